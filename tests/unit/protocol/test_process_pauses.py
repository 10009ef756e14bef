"""Tests of pauses of a process: each stored time is postponed, or listed here with a reason."""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from sparkstrom.codec.messages import Release
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.master.master import Master
from sparkstrom.protocol.worker.node import Node

SLEPT_S = 5.0
NOT_SHIFTED = {
    "link._ask_s": "when to ask again: at once",
    "link._heard_s": "a lease of silence is short, and fresh streams do no harm",
    "fit.contact_since_s": "signs that come without a gap do so from now on",
    "replication._ask_due_s": "when to ask again: at once",
    "reporting._reported_s": "when the last report was sent",
    "reporting._lease_due_s": "when to report: at once",
    "reporting._level_s": "for how long it is behind, for a note; nobody is ended for it",
    "in_flight.round_s": "a length of time",
    "in_flight._retry_s": "a length of time",
    "in_flight._deadline_s": "when to send again: at once",
    "in_flight._again_s": "when it may be asked again: at once",
}


NOT_SHIFTED_BY_MASTER = {
    "phases._start_s": "a length of time",
    "phases._end_s": "a length of time",
    "vacancies._rejoin_s": "a length of time",
    "vacancies._patience_s": "a length of time",
    "vacancies._asked_s": "when to ask again: at once",
    "copies._patience_s": "a length of time",
    "copies.fetch.patience_s": "a length of time",
    "copies.fetch.retry_s": "a length of time",
    "copies.fetch.taken_s": "when to ask again: at once",
    "copies.fetch.moved_s": "when to ask again: at once",
    "notices._patience_s": "a length of time",
    "broadcast._beat_s": "a length of time",
    "placement._quiet_s": "a length of time",
    "closing._lease_s": "a length of time",
}


def times_of(machine: Node) -> dict[str, float]:
    """Return all times that the parts of a node store, by part and name."""
    parts = {name: part for name, part in vars(machine).items() if hasattr(part, "__dict__")}
    parts["replication.fetch"] = machine.replication.fetch
    return times_in(parts) | {"link.window.since_s": machine.link.window.since_s or 0.0}


def times_of_master(machine: Master) -> dict[str, float]:
    """Return all times that the parts of the master store, by part and name."""
    parts = {name: part for name, part in vars(machine).items() if hasattr(part, "__dict__")}
    assert machine.copies.fetch is not None
    parts["copies.fetch"] = SimpleNamespace(**asdict(machine.copies.fetch))  # it has slots
    unowned = {f"partition {each.index}": each.unowned_s for each in machine.partitions}
    return times_in(parts) | unowned


def times_in(parts: dict[str, Any]) -> dict[str, float]:
    """Return all float attributes whose names end with ``_s``, by part and name."""
    return {
        f"{part.removeprefix('_')}.{name}": at_s
        for part, of in parts.items()
        # Leases handle pauses themselves; ``_pauses`` measures them.
        if part not in ("directive", "limits", "children", "leases", "_pauses")
        for name, at_s in vars(of).items()
        if name.endswith("_s") and isinstance(at_s, float)
    }


@pytest.fixture
def waiting_node(node: Any, make: Any) -> Any:
    """A node in which every wait has begun: updates in flight, a fetch, a leave, a failure."""
    node.training()
    node.step(make.published(), 1.0)
    node.step(ev.ReplicaHashed(0, "digest", None))
    node.told(Release("a slot is needed"))
    node.step(ev.TrainerReleased(None))
    node.step(ev.TrainerFailed("training raised", "trace"))
    node.hear(make.behind(9))
    node.with_child(5, 9)
    node.alive(phase=node.me.fit.state.phase.DONE)
    node.tick()
    return node


def test_pause_postpones_every_unlisted_time_of_node(waiting_node: Any) -> None:
    """Each time that a node stores is postponed by the pause, or listed in NOT_SHIFTED."""
    before = times_of(waiting_node.machine)
    waiting_node.machine._deadlines.shift_after_pause(waiting_node.now_s + SLEPT_S)
    after = times_of(waiting_node.machine)
    same = {name for name in before if after[name] == before[name]}
    assert same - NOT_SHIFTED.keys() == set()
    assert NOT_SHIFTED.keys() <= before.keys()
    shifted = {name for name in before if after[name] == before[name] + SLEPT_S}
    assert shifted >= {
        "membership._began_s", "fit.heard_s", "fit._done_s", "replication._got_s",
        "replication.fetch.progress_s", "trainer._active_s", "link._opened_s", "link._owed_s",
        "link.window.since_s", "task._failed_s", "task._leaving_s", "in_flight.progress_s",
    }  # fmt: skip
    assert shifted & NOT_SHIFTED.keys() == set()


def test_pause_of_quarter_lease_shifts_no_time(waiting_node: Any) -> None:
    """A pause of a quarter of a lease shifts no time."""
    before = times_of(waiting_node.machine)
    waiting_node.machine._deadlines.shift_after_pause(
        waiting_node.now_s + waiting_node.machine.limits.lease_s / 4
    )
    after = times_of(waiting_node.machine)
    assert after == before


def test_pause_postpones_every_unlisted_time_of_master(master: Any) -> None:
    """The master postpones its times before the first event after a pause takes effect."""
    master.running().evict(2)
    master.step(ev.OptimizerCopyRequest())
    before = times_of_master(master.machine)
    master.step(ev.SummedWorkersLimited(2), SLEPT_S)
    after = times_of_master(master.machine)
    shifted = {name for name in before if after[name] == before[name] + SLEPT_S}
    assert shifted == before.keys() - NOT_SHIFTED_BY_MASTER.keys()
    assert {name for name in before if after[name] == before[name]} == NOT_SHIFTED_BY_MASTER.keys()
