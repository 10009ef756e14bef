"""Tests of resumed fits, and of copies of optimizer states for checkpoints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sparkstrom.base.identity import MASTER, Position
from sparkstrom.codec.messages import (
    Activity,
    JoinRefusal,
    OptimizerChunk,
    OptimizerCopy,
    OptimizerRequest,
    Phase,
    Welcome,
    hash_optimizer_copy,
)
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.events_and_effects import IgnoreReason
from sparkstrom.protocol.common.fit_spec import FitSpec, PartitionStart
from sparkstrom.protocol.master.members import Partitions
from tests.unit.protocol.conftest import MasterDriver
from tests.unit.protocol.effect_filters import only, only_abort, sent, sent_by_master

# -- starts of partitions ----------------------------------------------------------------------


def make_resumed_spec(*positions: tuple[int, int], rows: int = 7, batches: int = 3) -> FitSpec:
    """Return the spec of a resumed fit whose partitions start at these positions."""
    starts = tuple(PartitionStart(Position(*at), rows, 5, batches) for at in positions)
    return FitSpec(len(positions), epochs=2, n_params=1, version="v", starts=starts)


def make_resumed_master(make: Any, spec: FitSpec) -> MasterDriver:
    """Return a master whose partitions resume from the spec's starts."""
    driver = MasterDriver(make, spec.workers)
    for partition, start in zip(driver.machine.partitions, spec.starts, strict=True):
        partition.resume_from(start)
    return driver


def test_partitions_start_at_positions_of_checkpoint() -> None:
    """Partitions start at the checkpoint's positions, and earlier minibatches count as resumed."""
    spec = make_resumed_spec((0, 2), (1, 0))
    partitions = Partitions.from_spec(spec, 0.0)
    assert [p.position for p in partitions] == [(0, 2), (1, 0)]
    assert [p.as_start() for p in partitions] == list(spec.starts)
    assert partitions.minibatches == partitions.minibatches_resumed == 5
    partitions[0].advance(Position(1, 1))
    assert (partitions.minibatches, partitions.minibatches_resumed) == (7, 5)
    assert spec.start_of(1) == (1, 0)


def test_start_beyond_last_epoch_counts_as_trained() -> None:
    """A start beyond the last epoch is moved to its end, so the partition counts as trained."""
    (partition,) = Partitions.from_spec(make_resumed_spec((5, 2)), 0.0)
    assert partition.trained
    assert partition.position == (2, 0)


def test_partitions_without_checkpoint_start_at_first_minibatch() -> None:
    spec = FitSpec(2, 1, 1, "v")
    assert [p.position for p in Partitions.from_spec(spec, 0.0)] == [(0, 0), (0, 0)]
    assert spec.start_of(1) == (0, 0)


def test_welcome_names_position_where_partition_resumes(make: Any) -> None:
    """The welcome of a worker names the position where its partition resumes."""
    master = make_resumed_master(make, make_resumed_spec((0, 2), (1, 0)))
    (welcome,) = sent_by_master(master.join(1, rows=7, checksum=5, batches=3), Welcome)
    assert (welcome.epoch, welcome.batch) == (1, 0)


@pytest.mark.parametrize("changed", [{"rows": 8}, {"checksum": 6}, {"batches": 4}])
def test_rows_other_than_in_checkpoint_abort_with_advice(
    make: Any, changed: dict[str, int]
) -> None:
    """Rows that differ from the checkpoint's abort the fit, with advice in the message."""
    master = make_resumed_master(make, make_resumed_spec((0, 2), (1, 0)))
    abort = only_abort(master.join(1, **({"rows": 7, "checksum": 5, "batches": 3} | changed)))
    assert abort.kind is ev.Failure.USAGE
    assert "when its checkpoint was written" in abort.reason
    assert "resume=False" in abort.reason


def test_rows_changed_between_attempts_abort_with_that_reason(make: Any) -> None:
    """After an attempt with the checkpoint's rows, other rows have changed between attempts."""
    master = make_resumed_master(make, make_resumed_spec((0, 2), (1, 0)))
    master.join(1, rows=7, checksum=5, batches=3)
    abort = only_abort(master.join(1, rows=8, checksum=5, batches=3, token=99, attempt=99))
    assert "when its task is tried again" in abort.reason


def test_fully_trained_fit_ends_without_workers(make: Any) -> None:
    """A fit whose partitions are all trained ends without workers, and refuses joins."""
    master = make_resumed_master(make, make_resumed_spec((2, 0), (2, 0)))
    effects = [*master.tick(), *master.tick()]
    assert master.phase is Phase.AUDIT
    assert only(effects, ev.HashReplica).commit == 0
    master.step(ev.ReplicaHashed(0, "d", None))
    assert master.phase is Phase.DONE
    (refused,) = sent_by_master(master.join(0, rows=7, checksum=5, batches=3), JoinRefusal)
    assert not refused.fatal


def test_worker_at_resumed_position_fetches_no_optimizer_state(node_with: Any, make: Any) -> None:
    """A worker that starts where the fit resumed, even in mid-epoch, fetches no optimizer state."""
    node = node_with(optimizer_wait_s=5.0)
    me = node.machine.membership
    me.identity = replace(me.identity, start=Position(1, 2))
    node.joined(epoch=1, batch=2)
    node.hear(make.state())
    node.hear(make.chunk(0))
    node.step(ev.TrainerPaused(1))
    node.tick()
    node.step(ev.ReplicaInstalled())
    assert sent(node.tick(), OptimizerRequest) == []


def test_worker_with_unreadable_rows_reports_failure_without_joining(node: Any) -> None:
    """A worker that cannot read its rows reports that, and does not join with wrong rows."""
    told = node.step(ev.TrainerFailed("no room on the disk", "trace"))
    message = only(told, ev.SendDirect).message
    who = node.machine.membership.identity
    assert (message.reason, message.attempt) == ("no room on the disk", who.attempt)
    assert [tell.message.node for tell in node.opened() if isinstance(tell, ev.SendDirect)] == []


# -- copies for checkpoints --------------------------------------------------------------------


def chunk_for_driver(index: int, content: bytes) -> OptimizerChunk:
    """Return one chunk of a copy, of single-byte chunks, that the master has requested."""
    return OptimizerCopy.from_content(content, 1).chunk(
        OptimizerRequest(MASTER, hash_optimizer_copy(content), index)
    )


def train_with_one_source(master: Any) -> Any:
    """Start training with node 1 as the only source of optimizer state."""
    master.running()
    master.say(1, steps=3, activity=Activity.STEPPING, lends=True)
    return master


def test_master_copies_optimizer_state_during_training(master: Any) -> None:
    """The master copies an optimizer state chunk by chunk while training continues."""
    train_with_one_source(master)
    master.step(ev.OptimizerCopyRequest())
    (ask,) = sent_by_master(master.tick(), OptimizerRequest, "w0")
    assert ask == OptimizerRequest(MASTER, None, 0)
    (rest,) = sent_by_master(master.hear(1, chunk_for_driver(0, b"ab")), OptimizerRequest, "w0")
    assert rest.index == 1
    copied = only(master.hear(1, chunk_for_driver(1, b"ab")), ev.OptimizerCopied)
    assert copied.payloads == (b"ab",)
    assert master.phase is Phase.RUNNING
    assert sent_by_master(master.tick(), OptimizerRequest) == []


def test_second_request_during_copy_starts_no_other_copy(master: Any) -> None:
    """A second request while a copy is being fetched does not start another one."""
    train_with_one_source(master)
    master.step(ev.OptimizerCopyRequest())
    master.tick()
    master.step(ev.OptimizerCopyRequest())
    assert only(master.hear(1, chunk_for_driver(0, b"a")), ev.OptimizerCopied).payloads == (b"a",)


def test_copy_without_sources_ends_empty_after_lease(master: Any) -> None:
    """Without any source, the copy is given up after a lease, with no payload."""
    master.running()
    master.step(ev.OptimizerCopyRequest())
    effects: list[ev.Effect] = []
    for _ in range(12):
        for node in (1, 2):
            master.say(node)
        effects += master.tick(1.0)
    assert only(effects, ev.OptimizerCopied).payloads == ()


def test_chunk_without_running_copy_is_ignored_and_counted(master: Any) -> None:
    """A chunk is ignored and counted if no copy is being fetched."""
    train_with_one_source(master)
    assert master.hear(1, chunk_for_driver(0, b"a")) == []
    assert master.machine.ignored.counts["OptimizerChunk", IgnoreReason.LATE] == 1


def train_with_three_sources(master: Any) -> Any:
    """Start training with three sources, of which node 2 has taken the most steps."""
    master.running()
    for node, steps in ((1, 5), (2, 7), (3, 3)):
        master.say(node, steps=steps, activity=Activity.STEPPING, lends=True)
    return master


def test_all_states_are_copied_one_by_one_most_steps_first(master_with: Any) -> None:
    """A request for all states copies them one after another, most steps first."""
    master = train_with_three_sources(master_with(partitions=3))
    master.step(ev.OptimizerCopyRequest(everybody=True))
    effects: list[ev.Effect] = master.tick()
    for name, node, content in (("w1", 2, b"b"), ("w0", 1, b"a"), ("w2", 3, b"c")):
        assert [a.index for a in sent_by_master(effects, OptimizerRequest, name)] == [0]
        assert len(sent_by_master(effects, OptimizerRequest)) == 1  # no other worker is asked yet
        effects = master.hear(node, chunk_for_driver(0, content))
    assert only(effects, ev.OptimizerCopied).payloads == (b"b", b"a", b"c")


def test_departed_or_silent_source_is_skipped(master_with: Any) -> None:
    """A source that has left, or does not answer within a lease, is skipped."""
    master = train_with_three_sources(master_with(partitions=3))
    master.step(ev.OptimizerCopyRequest(everybody=True))
    master.tick()
    effects: list[ev.Effect] = master.evict(2)  # the source of the present copy
    assert sent_by_master(effects, OptimizerRequest, "w0")
    effects = []
    for _ in range(30):  # node 1 is alive but sends no chunk
        for node in (1, 3):
            master.say(node, lends=True)
        effects = master.tick(1.0)
        if sent_by_master(effects, OptimizerRequest, "w2"):
            break
    assert sent_by_master(effects, OptimizerRequest, "w2")
    effects = master.hear(3, chunk_for_driver(0, b"c"))
    assert only(effects, ev.OptimizerCopied).payloads == (b"c",)


def test_repeated_chunk_of_finished_copy_is_ignored(master_with: Any) -> None:
    """A repeated chunk of a finished copy is ignored while the next copy is being fetched."""
    master = train_with_three_sources(master_with(partitions=3))
    master.step(ev.OptimizerCopyRequest(everybody=True))
    master.tick()
    master.hear(2, chunk_for_driver(0, b"b"))
    assert master.hear(2, chunk_for_driver(0, b"b")) == []
    assert master.machine.ignored.counts["OptimizerChunk", IgnoreReason.LATE] == 1
    master.hear(1, chunk_for_driver(0, b"a"))
    effects = master.hear(3, chunk_for_driver(0, b"c"))
    assert only(effects, ev.OptimizerCopied).payloads == (b"b", b"a", b"c")


def test_first_worker_that_becomes_source_is_used(master: Any) -> None:
    """If there is no source yet, the first worker that becomes one is asked."""
    master.running()
    master.step(ev.OptimizerCopyRequest(everybody=True))
    master.say(1, steps=3, activity=Activity.STEPPING, lends=True)
    assert sent_by_master(master.tick(3.0), OptimizerRequest, "w0")
    effects = master.hear(1, chunk_for_driver(0, b"a"))
    assert only(effects, ev.OptimizerCopied).payloads == (b"a",)
