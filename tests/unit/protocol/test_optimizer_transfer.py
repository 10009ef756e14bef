"""Tests of optimizer transfer: who fetches whose state, and how chunks are requested and sent."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sparkstrom.codec.messages import (
    Activity,
    OptimizerChunk,
    OptimizerCopy,
    OptimizerRequest,
    hash_optimizer_copy,
)
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.events_and_effects import Command
from sparkstrom.protocol.common.optimizer_fetch import (
    ASKED_AT_ONCE,
    RETRY_FIRST_S,
    OptimizerFetch,
)
from tests.unit.protocol.effect_filters import every, only, sent, sent_by_master


def chunk(index: int = 0, content: bytes = b"0", asker: int = 1) -> OptimizerChunk:
    """Return one chunk of a copy whose chunks are single bytes."""
    return OptimizerCopy.from_content(content, 1).chunk(
        OptimizerRequest(asker, hash_optimizer_copy(content), index)
    )


def make_late_node(node: Any, make: Any) -> Any:
    """Return a node that has installed its first replica after the other workers began to train."""
    node.joined()
    node.hear(make.state(slowest=3))
    node.hear(make.chunk(0))
    node.step(ev.TrainerPaused(1))
    node.tick()
    node.step(ev.ReplicaInstalled())
    return node


# -- one copy ----------------------------------------------------------------------------------


def test_copy_is_complete_with_all_chunks_in_any_order() -> None:
    """A copy is complete when all of its chunks have arrived, in any order."""
    fetch = OptimizerFetch(10.0, 10.0)
    assert fetch.next_requests(0.0) == [0]
    for index in (2, 0):
        fetch.add_chunk(chunk(index, b"012"), 0.0)
        assert fetch.whole is None
    assert fetch.next_requests(0.0) == [1]
    fetch.add_chunk(chunk(1, b"012"), 0.0)
    assert fetch.whole == b"012"


def test_chunk_of_other_copy_discards_earlier_chunks() -> None:
    """A chunk of another copy discards the chunks of the first copy."""
    fetch = OptimizerFetch(10.0, 10.0)
    fetch.add_chunk(chunk(0, b"ab"), 0.0)
    fetch.add_chunk(chunk(1, b"cd"), 0.0)
    assert fetch.whole is None
    assert fetch.next_requests(0.0) == [0]


def test_copy_with_wrong_hash_is_requested_again() -> None:
    """If the complete content does not match the copy's hash, all chunks are requested again."""
    fetch = OptimizerFetch(10.0, 10.0)
    fetch.add_chunk(chunk(0, b"ab"), 0.0)
    fetch.add_chunk(msgspec.structs.replace(chunk(1, b"ab"), payload=b"d"), 0.0)
    assert fetch.whole is None
    assert (fetch.copy, fetch.next_requests(0.0)) == (None, [0])
    for index in (0, 1):
        fetch.add_chunk(chunk(index, b"ab"), 0.0)
    assert fetch.whole == b"ab"


def test_chunk_requests_are_repeated_at_doubling_intervals() -> None:
    """A few chunks are requested at once, and again at doubling intervals."""
    fetch = OptimizerFetch(10.0, 10.0)
    fetch.add_chunk(chunk(0, b"012345678"), 0.0)
    some = list(range(1, 1 + ASKED_AT_ONCE))
    asked = [now_s for now_s in range(40) if fetch.next_requests(float(now_s)) == some]
    assert asked == [0, 3, 8, 17, 34]  # just after 2, 4, 8 and 16 s
    assert RETRY_FIRST_S == 2.0


def test_pending_chunks_are_not_requested_while_others_arrive() -> None:
    """Pending chunks are not requested again while others arrive over a slow link."""
    fetch = OptimizerFetch(60.0, 60.0)
    fetch.add_chunk(chunk(0, b"01234"), 0.0)
    assert fetch.next_requests(0.0) == [1, 2, 3, 4]
    for index in (1, 2, 3):
        fetch.add_chunk(chunk(index, b"01234"), 1.9 * index)
        assert fetch.next_requests(1.9 * index + 1.8) == []
    assert fetch.next_requests(9.4) == []  # a chunk takes 1.9 s; the retry time is twice that
    assert fetch.next_requests(9.6) == [4]


def test_retry_time_is_twice_time_of_last_chunk() -> None:
    """The retry time is at least twice the last chunk's: a link further up may be slow."""
    fetch = OptimizerFetch(60.0, 60.0)
    assert fetch.next_requests(0.0) == [0]
    fetch.add_chunk(chunk(0, b"01234"), 1.9)
    assert fetch.next_requests(1.9) == [1, 2, 3, 4]
    assert fetch.next_requests(5.6) == []
    assert fetch.next_requests(5.8) == [1, 2, 3, 4]


def test_chunk_is_not_requested_again_while_its_parts_arrive(node_with: Any, make: Any) -> None:
    """A requested chunk is not requested again while parts of it keep arriving."""
    node = make_late_node(node_with(optimizer_wait_s=60.0), make)
    asks: list[Any] = []
    for size in range(1, 20):
        node.step(ev.DataArriving(node.parent, 10_000 * size))
        asks += sent(node.tick(0.5), OptimizerRequest)
    assert [ask.index for ask in asks] == [0]


def test_each_new_chunk_postpones_deadline() -> None:
    """Each new chunk postpones the deadline, so a complete state may take long over a slow link."""
    fetch = OptimizerFetch(10.0, 10.0)
    fetch.add_chunk(chunk(0, b"012345678"), 8.0)
    assert fetch.until_s == 18.0
    fetch.add_chunk(chunk(0, b"012345678"), 9.0)  # again: no progress
    assert fetch.until_s == 18.0
    fetch.add_chunk(chunk(1, b"012345678"), 17.0)
    assert fetch.until_s == 27.0


# -- nodes that fetch a state ------------------------------------------------------------------


def test_late_worker_waits_for_optimizer_state(node_with: Any, make: Any) -> None:
    """A worker that joins in mid-training waits for another worker's optimizer state."""
    node = make_late_node(node_with(optimizer_wait_s=5.0), make)
    assert (node.order, node.machine.directive.reason[:11]) == (Command.WAIT, "the updater")
    assert not node.me.transfers.is_source
    assert sent(node.tick(), OptimizerRequest) == [OptimizerRequest(1, None, 0)]
    effects = node.hear(chunk())
    assert only(effects, ev.InstallOptimizer).payload == b"0"
    assert node.order is Command.TRAIN


def test_late_worker_trains_with_fresh_state_after_optimizer_wait_s(
    node_with: Any, make: Any
) -> None:
    """After ``optimizer_wait_s`` without a chunk, the worker trains with a fresh state."""
    node = make_late_node(node_with(optimizer_wait_s=5.0), make)
    for _ in range(2):
        node.tick(2.45)
    assert node.order is Command.WAIT
    assert only(node.tick(0.2), ev.InstallOptimizer).payload is None
    assert node.order is Command.TRAIN


def test_process_pause_postpones_optimizer_deadline(node_with: Any, make: Any) -> None:
    """A pause of the process postpones the deadline for the optimizer state."""
    node = make_late_node(node_with(optimizer_wait_s=5.0), make)
    node.tick(2.0)
    node.alive(slowest=3)
    assert every(node.tick(4.0), ev.InstallOptimizer) == []
    assert only(node.hear(chunk()), ev.InstallOptimizer).payload == b"0"


def test_fetched_state_is_served_only_after_first_step(node_with: Any, make: Any) -> None:
    """A worker serves a fetched state only after a step, when it is certainly installed."""
    borrower = make_late_node(node_with(optimizer_wait_s=5.0), make)
    assert only(borrower.hear(chunk()), ev.InstallOptimizer).payload == b"0"
    assert not borrower.me.transfers.is_source
    borrower.step(ev.ActivityChanged(Activity.STEPPING))
    borrower.step(ev.StepCompleted(0, 1, 4))
    assert borrower.me.transfers.is_source


def test_late_worker_becomes_source_only_with_fetched_state(node_with: Any, make: Any) -> None:
    """A latecomer with a fetched state becomes a source; one with a fresh state never does."""
    borrower = make_late_node(node_with(optimizer_wait_s=5.0), make)
    borrower.hear(chunk())
    fresh = make_late_node(node_with(optimizer_wait_s=5.0), make)
    fresh.tick(5.1)
    for node, lends in ((borrower, True), (fresh, False)):
        node.step(ev.ActivityChanged(Activity.STEPPING))
        node.step(ev.StepCompleted(0, 1, 4))
        node.me.reporting.update_own_status(10.0)
        assert node.me.reporting.status.lends == lends
        ask = OptimizerRequest(5, None, 0)
        assert node.told(ask) == ([ev.SendOptimizerChunk(0, ask)] if lends else [])


@pytest.mark.parametrize("welcome", [{"batch": 3}, {"epoch": 1}, {"steps": 3}])
def test_successor_in_mid_partition_fetches_optimizer_state(
    node_with: Any, make: Any, welcome: dict[str, int]
) -> None:
    """A successor in mid-partition fetches a state even if the slowest worker has 0 steps."""
    node = node_with(optimizer_wait_s=5.0).joined(**welcome)
    node.hear(make.state(slowest=0))
    node.hear(make.chunk(0))
    node.step(ev.TrainerPaused(1))
    node.tick()
    node.step(ev.ReplicaInstalled())
    assert sent(node.tick(), OptimizerRequest) == [OptimizerRequest(1, None, 0)]


def test_worker_present_from_start_fetches_no_optimizer_state(node_with: Any) -> None:
    """A worker that is there from the start trains at once, without fetching a state."""
    assert node_with(optimizer_wait_s=5.0).training().order is Command.TRAIN


# -- sources -----------------------------------------------------------------------------------


def train_one_step(node: Any) -> Any:
    """Let the node train one step, after which others may copy its optimizer state."""
    node.training().step(ev.StepCompleted(0, 1, 1))
    return node


def test_trained_worker_serves_its_state_to_child_and_master(node: Any) -> None:
    """A worker that has trained serves its state to a child, and to the master."""
    train_one_step(node).with_child(5)
    ask = OptimizerRequest(5, None, 0)
    assert node.hear(ask, sender=5) == [ev.SendOptimizerChunk(5, ask)]
    assert node.told(ask) == [ev.SendOptimizerChunk(0, ask)]  # as the master asked


def test_untrained_worker_only_forwards_requests_of_children(node: Any) -> None:
    """An untrained worker forwards a child's request, and ignores the master's."""
    node.training().with_child(5)
    ask = OptimizerRequest(5, None, 0)
    assert node.hear(ask, sender=5) == [ev.Send(0, ask)]
    assert node.told(ask) == []


def test_master_forwards_requests_to_one_source_and_chunks_to_asker(master: Any, make: Any) -> None:
    """The master forwards requests to one source, and the source's chunks to the asker."""
    master.running()
    ask = OptimizerRequest(2, None, 0)
    assert master.hear(2, ask) == []  # nobody has trained
    master.say(1, steps=3, activity=Activity.STEPPING)
    assert master.hear(2, ask) == []  # no worker is a source
    master.say(1, steps=3, activity=Activity.STEPPING, lends=True)
    for _ in range(2):
        assert sent_by_master(master.hear(2, ask), OptimizerRequest, "w0") == [ask]
    assert sent(master.hear(1, chunk(asker=2)), OptimizerChunk, 2) == [chunk(asker=2)]


def test_source_stays_same_while_it_lives(
    master_with: Any,
) -> None:
    """The source stays the same while it lives: chunks of two sources form no copy."""
    master = master_with(partitions=3).running()
    ask = OptimizerRequest(3, None, 0)
    for node, steps in ((1, 5), (2, 3)):
        master.say(node, steps=steps, activity=Activity.STEPPING, lends=True)
    assert sent_by_master(master.hear(3, ask), OptimizerRequest, "w0") == [ask]
    master.say(2, steps=9, activity=Activity.STEPPING, lends=True)
    assert sent_by_master(master.hear(3, ask), OptimizerRequest, "w0") == [ask]
    master.evict(1)
    assert sent_by_master(master.hear(3, ask), OptimizerRequest, "w1") == [ask]


# -- forwarding --------------------------------------------------------------------------------


def test_chunk_is_forwarded_towards_asker_or_else_up(node: Any, make: Any) -> None:
    """A chunk is forwarded to the child that leads to the asker, or else to the parent."""
    node.training().with_child(5).with_child(6)
    node.hear(make.report(make.status(8)), sender=5)
    assert node.hear(chunk(asker=8)) == [ev.Send(5, chunk(asker=8))]
    assert node.hear(chunk(asker=8), sender=6) == [ev.Send(5, chunk(asker=8))]
    assert node.hear(chunk(asker=77), sender=6) == [ev.Send(0, chunk(asker=77))]


@pytest.mark.parametrize(("sender", "asker"), [(0, 77), (5, 8)])
def test_chunk_is_never_forwarded_to_its_sender(
    node: Any, make: Any, sender: int, asker: int
) -> None:
    """A chunk never goes back to its sender: two nodes could exchange it forever."""
    node.training().with_child(5)
    node.hear(make.report(make.status(8)), sender=5)
    assert node.hear(chunk(asker=asker), sender=sender) == []
