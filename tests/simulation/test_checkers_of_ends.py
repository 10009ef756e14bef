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
    drops_the_rest,
    drops_the_rest_unseen,
    violations,
    waits_without_deadline,
)

# -- I4: memory and waits are bounded ----------------------------------------------------------


def sends_nothing_again(patch: pytest.MonkeyPatch) -> None:
    """Never send an update again."""
    patch.setattr(InFlight, "updates_to_resend", lambda self, origin, now_s, force=False: [])


def trusts_an_edge_on_which_something_is_heard(patch: pytest.MonkeyPatch) -> None:
    """Never replace an edge on which control messages arrive but no data."""
    patch.setattr(ParentLink, "is_starved", lambda self, fit, stalled_since_s, now_s: False)


def keeps_the_whole_log(patch: pytest.MonkeyPatch) -> None:
    """Never drop old entries from the log."""

    def append(self: Log, entry: Entry) -> None:
        self._entries[self.head] = entry, self._end
        self._end += entry_bytes(entry)
        self.head = entry.commit

    patch.setattr(Log, "append", append)


def ignores_its_window(patch: pytest.MonkeyPatch) -> None:
    """Publish although the window of uncommitted updates is full."""
    patch.setattr(InFlight, "has_room", lambda self: True)


def ignores_the_slowest(patch: pytest.MonkeyPatch) -> None:
    """Train without any step limit."""
    patch.setattr(Directives, "_train", lambda self, state: ev.Directive(ev.Command.TRAIN))


def looks_at_no_commit(patch: pytest.MonkeyPatch) -> None:
    """Allow ten more steps than the step limit."""
    steps_max = Directives._step_limit

    def far(self: Directives, *given: Any) -> tuple[int, ev.Directive]:
        limit, waits = steps_max(self, *given)
        assert limit is not None
        return 10 + limit, waits

    patch.setattr(Directives, "_step_limit", far)


def tells_more_than_is_committed(patch: pytest.MonkeyPatch) -> None:
    """Announce more minibatches than are committed."""
    look_around = StateBroadcast.refresh

    def more(self: StateBroadcast) -> None:
        look_around(self)
        self.minibatches += len(self._members.partitions)

    patch.setattr(StateBroadcast, "refresh", more)


def waits_for_an_empty_partition(patch: pytest.MonkeyPatch) -> None:
    """Treat an empty partition as not trained."""
    patch.setattr(Partition, "trained", property(lambda self: self.position >= self.end))


def repeats_a_phase(patch: pytest.MonkeyPatch) -> None:
    """Go back one phase when the audit begins."""
    enter = Phases._enter_phase

    def back(self: Phases, phase: Any, now_s: float) -> None:
        enter(self, phase, now_s)
        if phase == phase.AUDIT:
            self.phase = type(phase)(phase - 1)

    patch.setattr(Phases, "_enter_phase", back)


def keeps_its_former_id_at_its_endpoint(patch: pytest.MonkeyPatch) -> None:
    """Keep the first id for sending after the process got another one."""
    feed = SimProcess.handle

    def stubborn(self: SimProcess, event: ev.Event, now_s: float) -> None:
        before = self.me
        feed(self, event, now_s)
        self.me = self.me if before is None else before

    patch.setattr(SimProcess, "handle", stubborn)


def says_what_nobody_can_read(patch: pytest.MonkeyPatch) -> None:
    """Answer probes with an invalid node id."""
    patch.setattr(node, "ProbeReply", lambda node: ProbeReply(-1))


# -- I5: failures end the fit ------------------------------------------------------------------


def swallows_a_failure(patch: pytest.MonkeyPatch) -> None:
    """Ignore reports of training failures."""
    patch.setattr(Master, "_on_training_failure", lambda self, member, failed: [])


def names_nobody(patch: pytest.MonkeyPatch) -> None:
    """Abort without naming the worker that failed."""
    patch.setattr(
        Master,
        "_on_training_failure",
        lambda self, member, failed: [ev.Abort(failed.reason, failed.trace)],
    )


PLANTED: list[tuple[Plant, str, dict[str, Any]]] = [
    (waits_without_deadline, "I4: not over", {"master_lost": 1, "stop": 0.0, "failure": 0.0}),
    (waits_without_deadline, "I4: p", {"exiles": 1, "stop": 0.0, "failure": 0.0}),
    (sends_nothing_again, "I5: p", ROUGH),
    (trusts_an_edge_on_which_something_is_heard, "I5: p", ROUGH | {"breaks": 6}),
    (keeps_the_whole_log, "I4: the log holds", NARROW),
    (ignores_its_window, "I4: p", {"window_bytes": 100, "delay_ms_max": 200.0}),
    (ignores_the_slowest, "I4: ", {"max_lead": 1, "publish_every": 1, "crashes": 0}),
    (looks_at_no_commit, "I4: p", {"max_lead": None, "max_staleness": 1, "publish_every": 1}),
    (tells_more_than_is_committed, "I2: ", {}),
    (waits_for_an_empty_partition, "I4: not over", {"empty_partitions": 1}),
    (repeats_a_phase, "I4: not over", {}),
    (drops_the_rest, "I4: p", DEATHS),
    (drops_the_rest_unseen, "I5: p", DEATHS),
    (drops_the_rest_unseen, "I4: not over", DEATHS | {"crashes": 8, "stop": 0.5}),
    (swallows_a_failure, "I5: a reported failure", {"failure": 1.0, "stop": 0.0}),
    (keeps_its_former_id_at_its_endpoint, "I4: p", ROUGH | {"cuts": 6, "empty_partitions": 2}),
    (says_what_nobody_can_read, "WireError: control message", ROUGH),
    (names_nobody, "I5: aborted", {"failure": 1.0, "stop": 0.0}),
]


@pytest.mark.parametrize(
    ("plant", "begins", "given"), PLANTED, ids=lambda p: getattr(p, "__name__", "")
)
def test_a_planted_bug_is_caught(
    plant: Plant, begins: str, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the seeds shows a violation that begins with the expected text."""
    plant(monkeypatch)
    assert any(text.startswith(begins) for text in violations(given, SEEDS))


@pytest.mark.parametrize("given", {str(given): given for _, _, given in PLANTED}.values(), ids=str)
def test_no_setting_shows_a_violation_without_a_bug(given: dict[str, Any]) -> None:
    assert list(violations(given, range(2))) == []
