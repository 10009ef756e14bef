"""Tests that the checkers of bounds, waits and endings (I4, I5) report planted bugs."""

from __future__ import annotations

from typing import Any

import pytest

from sparkstrom.codec.messages import ProbeReply
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.commit_log import Entry, Log, entry_bytes
from sparkstrom.protocol.master.announcements import StateBroadcast
from sparkstrom.protocol.master.master import Master
from sparkstrom.protocol.master.members import Partition
from sparkstrom.protocol.master.phases import Phases
from sparkstrom.protocol.worker import node
from sparkstrom.protocol.worker.node import Directives
from sparkstrom.protocol.worker.parent_link import InFlight, ParentLink
from sparkstrom.simulation.process import SimProcess
from tests.simulation.planted import (
    DEATHS,
    NARROW,
    ROUGH,
    SEEDS,
    Plant,
    disable_wait_deadlines,
    skip_effects_after_driver_death,
    skip_effects_without_transport_check,
    violations,
)

# -- I4: memory and waits are bounded ----------------------------------------------------------


def disable_resends(patch: pytest.MonkeyPatch) -> None:
    """Never send an update again."""
    patch.setattr(InFlight, "updates_to_resend", lambda self, origin, now_s, force=False: [])


def keep_edge_without_data(patch: pytest.MonkeyPatch) -> None:
    """Never replace an edge on which control messages arrive but no data."""
    patch.setattr(ParentLink, "is_starved", lambda self, fit, stalled_since_s, now_s: False)


def keep_whole_log(patch: pytest.MonkeyPatch) -> None:
    """Never drop old entries from the log."""

    def append(self: Log, entry: Entry) -> None:
        self._entries[self.head] = entry, self._end
        self._end += entry_bytes(entry)
        self.head = entry.commit

    patch.setattr(Log, "append", append)


def ignore_update_window(patch: pytest.MonkeyPatch) -> None:
    """Publish although the window of uncommitted updates is full."""
    patch.setattr(InFlight, "has_room", lambda self: True)


def ignore_step_limit(patch: pytest.MonkeyPatch) -> None:
    """Train without any step limit."""
    patch.setattr(Directives, "_train", lambda self, state: ev.Directive(ev.Command.TRAIN))


def exceed_step_limit(patch: pytest.MonkeyPatch) -> None:
    """Allow ten more steps than the step limit."""
    steps_max = Directives._step_limit

    def far(self: Directives, *given: Any) -> tuple[int, ev.Directive]:
        limit, waits = steps_max(self, *given)
        assert limit is not None
        return 10 + limit, waits

    patch.setattr(Directives, "_step_limit", far)


def announce_uncommitted_minibatches(patch: pytest.MonkeyPatch) -> None:
    """Announce more minibatches than are committed."""
    look_around = StateBroadcast.refresh

    def more(self: StateBroadcast) -> None:
        look_around(self)
        self.minibatches += len(self._members.partitions)

    patch.setattr(StateBroadcast, "refresh", more)


def wait_for_empty_partition(patch: pytest.MonkeyPatch) -> None:
    """Treat an empty partition as not trained."""
    patch.setattr(Partition, "trained", property(lambda self: self.position >= self.end))


def return_to_previous_phase(patch: pytest.MonkeyPatch) -> None:
    """Go back one phase when the audit begins."""
    enter = Phases._enter_phase

    def back(self: Phases, phase: Any, now_s: float) -> None:
        enter(self, phase, now_s)
        if phase == phase.AUDIT:
            self.phase = type(phase)(phase - 1)

    patch.setattr(Phases, "_enter_phase", back)


def keep_first_id_for_sending(patch: pytest.MonkeyPatch) -> None:
    """Keep the first id for sending after the process got another one."""
    feed = SimProcess.handle

    def stubborn(self: SimProcess, event: ev.Event, now_s: float) -> None:
        before = self.me
        feed(self, event, now_s)
        self.me = self.me if before is None else before

    patch.setattr(SimProcess, "handle", stubborn)


def send_invalid_node_id(patch: pytest.MonkeyPatch) -> None:
    """Answer probes with an invalid node id."""
    patch.setattr(node, "ProbeReply", lambda node: ProbeReply(-1))


# -- I5: failures end the fit ------------------------------------------------------------------


def ignore_training_failures(patch: pytest.MonkeyPatch) -> None:
    """Ignore reports of training failures."""
    patch.setattr(Master, "_on_training_failure", lambda self, member, failed: [])


def abort_without_worker_name(patch: pytest.MonkeyPatch) -> None:
    """Abort without naming the worker that failed."""
    patch.setattr(
        Master,
        "_on_training_failure",
        lambda self, member, failed: [ev.Abort(failed.reason, failed.trace)],
    )


PLANTED: list[tuple[Plant, str, dict[str, Any]]] = [
    (disable_wait_deadlines, "I4: not over", {"master_lost": 1, "stop": 0.0, "failure": 0.0}),
    (disable_wait_deadlines, "I4: p", {"exiles": 1, "stop": 0.0, "failure": 0.0}),
    (disable_resends, "I5: p", ROUGH),
    (keep_edge_without_data, "I5: p", ROUGH | {"breaks": 6}),
    (keep_whole_log, "I4: the log holds", NARROW),
    (ignore_update_window, "I4: p", {"window_bytes": 100, "delay_ms_max": 200.0}),
    (ignore_step_limit, "I4: ", {"max_lead": 1, "publish_every": 1, "crashes": 0}),
    (exceed_step_limit, "I4: p", {"max_lead": None, "max_staleness": 1, "publish_every": 1}),
    (announce_uncommitted_minibatches, "I2: ", {}),
    (wait_for_empty_partition, "I4: not over", {"empty_partitions": 1}),
    (return_to_previous_phase, "I4: not over", {}),
    (skip_effects_after_driver_death, "I4: p", DEATHS),
    (skip_effects_without_transport_check, "I5: p", DEATHS),
    (skip_effects_without_transport_check, "I4: not over", DEATHS | {"crashes": 8, "stop": 0.5}),
    (ignore_training_failures, "I5: a reported failure", {"failure": 1.0, "stop": 0.0}),
    (keep_first_id_for_sending, "I4: p", ROUGH | {"cuts": 6, "empty_partitions": 2}),
    (send_invalid_node_id, "WireError: control message", ROUGH),
    (abort_without_worker_name, "I5: aborted", {"failure": 1.0, "stop": 0.0}),
]


@pytest.mark.parametrize(
    ("plant", "begins", "given"), PLANTED, ids=lambda p: getattr(p, "__name__", "")
)
def test_checker_reports_planted_bug(
    plant: Plant, begins: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the seeds shows a violation that begins with the expected text."""
    plant(monkeypatch)
    assert any(text.startswith(begins) for text in violations(given, SEEDS))


@pytest.mark.parametrize("given", {str(given): given for _, _, given in PLANTED}.values(), ids=str)
def test_no_setting_shows_a_violation_without_a_bug(given: dict[str, Any]) -> None:
    assert list(violations(given, range(2))) == []
