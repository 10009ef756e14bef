"""Tests of the phases of a fit at the master, and of task slots that finished workers give up."""

from __future__ import annotations

from typing import Any

import pytest

from sparkstrom.codec.messages import (
    Activity,
    AuditAnswer,
    IdClosed,
    LeaveNotice,
    Phase,
    Release,
    ResidualCheckpoint,
    State,
    TrainingFailure,
)
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.events_and_effects import IgnoreReason
from tests.unit.protocol.effect_filters import every, only, only_abort, sent, sent_by_master

# -- phases ------------------------------------------------------------------------------------


def test_training_starts_when_all_workers_have_replica(master: Any) -> None:
    master.enter(0)
    master.enter(1)
    master.say(1, activity=Activity.WAITING)
    assert master.phase is Phase.GATHERING
    master.say(2, activity=Activity.WAITING)
    assert master.phase is Phase.RUNNING
    assert [s.phase for s in sent(master.tick(), State, 1)] == [Phase.RUNNING]


def test_training_starts_after_start_s_with_present_workers(master: Any) -> None:
    """After ``start_s`` training begins with the workers that are present."""
    master.enter(0)
    for _ in range(32):
        master.say(1, activity=Activity.WAITING)
        master.tick(2.0)
    assert master.phase is Phase.RUNNING


def test_too_few_workers_after_start_s_abort_fit(master_with: Any) -> None:
    """With fewer than ``workers_min`` ready workers after ``start_s``, the fit is aborted."""
    master = master_with(workers_min=2)
    master.enter(0)
    effects: list[ev.Effect] = []
    for _ in range(32):
        master.say(1, activity=Activity.WAITING)
        effects += master.tick(2.0)
    abort = only_abort(effects)
    assert abort.kind == ev.Failure.SETUP
    assert "1 workers joined within 62 s, min_workers is 2 (of 2 partitions)" in abort.reason


def test_a_pause_of_the_process_does_not_count_as_waiting_for_workers(master_with: Any) -> None:
    master = master_with(workers_min=2)
    master.enter(0)
    master.say(1, activity=Activity.WAITING)
    assert every(master.tick(600.0), ev.Abort) == []
    master.enter(1)
    master.say(2, activity=Activity.WAITING)
    assert master.phase is Phase.RUNNING


def train_both_partitions(master: Any, make: Any) -> Any:
    """Train both partitions completely, which starts the draining."""
    master.running()
    for node in (1, 2):
        master.hear(node, make.update(node, 1, epoch=2, batch=0))
    assert master.phase is Phase.DRAINING
    return master


def test_a_fit_drains_audits_and_is_done(master: Any, make: Any) -> None:
    """A fit drains, audits the final commit, collects all hashes and is done."""
    train_both_partitions(master, make)
    master.say(1, final=1)
    effects = master.say(2, final=1)
    assert every(effects, ev.HashReplica) == [ev.HashReplica(2)]
    assert master.phase is Phase.AUDIT
    assert [(s.phase, s.final) for s in sent(master.tick(0.1), State, 1)] == [(Phase.AUDIT, 2)]
    master.step(ev.ReplicaHashed(2, "d", None))
    master.say(1, audit=AuditAnswer(2, "d", ResidualCheckpoint("p", 1.0)))
    effects = master.say(2, audit=AuditAnswer(2, "other", None))
    assert every(effects, ev.Complete) == [ev.Complete()]
    assert master.machine.phases.digests == {1: "d", 2: "other"}
    assert master.machine.checkpoints.files == {"e": {"p": 1.0}}
    assert [s.phase for s in sent(master.tick(0.1), State, 2)] == [Phase.DONE]
    effects = master.hear(1, LeaveNotice(node=1, reason="done", checkpoint=None))
    assert effects == [ev.CloseEdge(1)]
    assert list(master.machine.children.by_node) == [2]


def test_draining_state_has_new_epoch_count(master: Any, make: Any) -> None:
    """The state that announces draining has the new epoch count, even between two scans."""
    master.running()
    master.machine._scan_due_s = master.now_s
    for node in (1, 2):
        master.hear(node, make.update(node, 1, epoch=2, batch=0))
    master.machine._scan_due_s = master.now_s + 1e6
    states = sent(master.tick(0.1), State, 1)
    assert [(state.phase, state.epochs) for state in states] == [(Phase.DRAINING, 2)]


def test_audit_waits_for_hash_of_masters_own_replica(master: Any, make: Any) -> None:
    """The audit ends only when the master's own replica is hashed, too."""
    train_both_partitions(master, make)
    for node in (1, 2):
        master.say(node, final=1)
    for node in (1, 2):
        master.say(node, audit=AuditAnswer(2, "d", None))
    assert master.phase is Phase.AUDIT
    assert every(master.step(ev.ReplicaHashed(2, "d", None)), ev.Complete) == [ev.Complete()]


def test_the_final_commit_waits_for_every_last_update(master: Any, make: Any) -> None:
    """The final commit is fixed after every worker's last update; later ones are ignored."""
    train_both_partitions(master, make)
    master.say(1, final=1)
    master.say(2, final=2)
    assert master.phase is Phase.DRAINING
    master.hear(2, make.update(2, 2, epoch=2, batch=0))
    assert (master.phase, master.machine.phases.final) == (Phase.AUDIT, 3)
    assert master.hear(1, make.update(1, 2, epoch=2, batch=0)) == []
    assert master.machine.ignored.counts == {("Update", IgnoreReason.LATE): 1}


def test_dead_worker_does_not_delay_draining(master: Any, make: Any) -> None:
    """A worker that dies while draining is no longer waited for."""
    train_both_partitions(master, make)
    master.say(1, final=1)
    master.evict(2)
    assert master.phase is Phase.AUDIT
    master.step(ev.ReplicaHashed(2, "d", None))
    assert every(master.say(1, audit=AuditAnswer(2, "d", None)), ev.Complete)


def test_queued_answers_are_processed_after_master_pause(master: Any, make: Any) -> None:
    """After a pause of the master, queued answers are still processed before ids are closed."""
    train_both_partitions(master, make)
    master.now_s += 600.0
    for node in (1, 2):
        assert every(master.say(node, final=1), ev.Note) == []
    assert master.phase is Phase.AUDIT
    assert list(master.machine.members.live) == [1, 2]


@pytest.mark.parametrize("what", ["last update", "hash"])
def test_worker_late_with_last_update_or_hash_is_closed_after_end_s(
    master_with: Any, make: Any, what: str
) -> None:
    """A worker whose last update or hash does not come within ``end_s`` is closed."""
    master = train_both_partitions(master_with(end_s=5.0), make)
    master.say(1, final=1)
    if what == "hash":
        master.say(2, final=1)
        master.say(1, audit=AuditAnswer(2, "d", None))
        master.step(ev.ReplicaHashed(2, "d", None))
    effects: list[ev.Effect] = []
    for _ in range(6):
        for node in list(master.machine.members.live):
            master.hear(node, make.report(received=2))
        effects += master.tick(1.0)
    texts = [note.text for note in every(effects, ev.Note)]
    assert texts == [f"node 2 (partition 1 on h) left: its {what} did not come within 5 s"]


def test_end_deadline_starts_with_draining_phase(master_with: Any) -> None:
    """The deadline of draining starts with the phase, even long after the last commit."""
    master = master_with(end_s=5.0).running()
    for _ in range(30):
        master.tick(1.0)
        for node in (1, 2):
            master.hear(node, master.make.report())
    master.step(ev.StopRequested("enough"))
    assert master.phase is Phase.DRAINING
    assert every(master.tick(1.0), ev.Note) == []
    assert list(master.machine.members.live) == [1, 2]


def test_stop_drains_at_once_and_keeps_first_reason(master: Any, make: Any) -> None:
    """A stop drains at once and keeps its first reason; later joins get a harmless refusal."""
    master.running()
    master.hear(1, make.update(1, 1, batch=1))
    master.step(ev.StopRequested("enough"))
    master.step(ev.StopRequested("again"))
    assert (master.phase, master.machine.phases.stop_reason) == (Phase.DRAINING, "enough")
    master.evict(2)
    (refused,) = sent_by_master(master.join(1, count=2))
    assert not refused.fatal
    master.say(1, final=1)
    assert master.phase is Phase.AUDIT
    assert master.machine.partitions[1].position == (0, 0)


def test_empty_partitions_count_as_trained(master_with: Any, make: Any) -> None:
    master = master_with(partitions=2)
    master.enter(0, rows=0, batches=0)
    master.enter(1)
    for node in (1, 2):
        master.say(node, activity=Activity.WAITING)
    master.hear(2, make.update(2, 1, epoch=2, batch=0))
    assert master.phase is Phase.DRAINING


def test_empty_partition_does_not_delay_start(master: Any) -> None:
    """Training begins without a ready worker of an empty partition."""
    master.enter(0, rows=0, batches=0)
    master.enter(1)
    master.say(2, activity=Activity.WAITING)
    assert master.phase is Phase.RUNNING


def test_fit_without_rows_is_aborted(master_with: Any) -> None:
    """A fit whose partitions are all empty is aborted as a usage error."""
    master = master_with(partitions=1)
    master.enter(0, rows=0, batches=0)
    abort = only_abort(master.say(1, activity=Activity.FINISHED))
    assert (abort.kind, abort.reason[:27]) == (ev.Failure.USAGE, "all 1 partitions are empty:")


def test_reported_failure_precedes_abort_for_missing_rows(master_with: Any) -> None:
    """If no worker has rows, a reported failure is the reason of the abort."""
    master = master_with(partitions=1)
    assert not every(master.enter(0, rows=0, batches=0) + master.tick(), ev.Abort)
    failed = TrainingFailure(node=1, reason="row 3 is null", host="h", trace="")
    assert only_abort(master.direct(failed)).reason == "row 3 is null"


def test_fit_without_rows_or_failure_is_aborted_after_start_s(master_with: Any) -> None:
    """If no worker has rows and none reports a failure, the fit is aborted after ``start_s``."""
    master = master_with(partitions=1)
    master.enter(0, rows=0, batches=0)
    effects: list[ev.Effect] = []
    for _ in range(32):
        master.say(1, activity=Activity.CATCHING_UP)
        effects += master.tick(2.0)
    assert only_abort(effects).reason.startswith("all 1 partitions are empty:")


def test_failure_report_after_done_aborts_nothing(master: Any, make: Any) -> None:
    """A failure report after the fit is done aborts nothing; the worker is sent an end notice."""
    train_both_partitions(master, make)
    for node in (1, 2):
        master.say(node, final=1)
    master.step(ev.ReplicaHashed(2, "d", None))
    for node in (1, 2):
        master.say(node, audit=AuditAnswer(2, "d", None))
    effects = master.direct(TrainingFailure(node=1, reason="late", trace=""))
    assert every(effects, ev.Abort) == []
    assert sent_by_master(effects, IdClosed, "w0")


# -- task slots --------------------------------------------------------------------------------


def leave_partition_without_worker(master: Any, make: Any) -> Any:
    """Train partition 0 completely, and let partition 1 lose its worker."""
    master.running()
    master.hear(1, make.update(1, 1, epoch=2, batch=0))
    master.say(1, after_seq=1, epoch=2, activity=Activity.FINISHED)
    master.evict(2)
    return master


def tick_alive(master: Any, seconds: float) -> list[ev.Effect]:
    """Let time pass in which all live workers report that they are finished."""
    effects: list[ev.Effect] = []
    for _ in range(int(seconds)):
        for node in list(master.machine.members.live):
            master.say(node, after_seq=1, epoch=2, activity=Activity.FINISHED)
        effects += master.tick(1.0)
    return effects


def test_finished_worker_is_released_after_release_s(master: Any, make: Any) -> None:
    """A finished worker is asked to leave after ``release_s``; its file is recorded."""
    leave_partition_without_worker(master, make)
    assert sent_by_master(tick_alive(master, 8), Release) == []
    asked = sent_by_master(tick_alive(master, 4), Release, "w0")
    assert asked[0].reason == "partition 1 needs a task slot"
    effects = master.direct(
        LeaveNotice(node=1, reason="released", checkpoint=ResidualCheckpoint("p", 2.0))
    )
    assert only(sent_by_master(effects), IdClosed).node == 1
    assert master.machine.checkpoints.files == {"e": {"p": 2.0}}
    assert master.phase is Phase.RUNNING


def test_finished_workers_are_released_one_at_a_time(master_with: Any, make: Any) -> None:
    """The next finished worker is asked only if the slot of the first one did not help."""
    master = master_with(partitions=3).running()
    for node in (1, 2):
        master.hear(node, make.update(node, 1, epoch=2, batch=0))
    master.evict(3)
    effects = tick_alive(master, 12)
    assert [bool(sent_by_master(effects, Release, host)) for host in ("w0", "w1")] == [True, False]
    master.direct(LeaveNotice(node=1, reason="released", checkpoint=None))
    assert not sent_by_master(tick_alive(master, 8), Release, "w1")
    assert sent_by_master(tick_alive(master, 5), Release, "w1")


def test_worker_without_confirmed_place_is_not_released(master_with: Any) -> None:
    """A worker whose place is not confirmed is not asked, even if its partition is empty."""
    master = master_with(partitions=4, fan_out=1, depth=4, release_s=3.0, start_s=1.0)
    master.enter(0)
    master.join(1, rows=0, batches=0)
    master.say(1, activity=Activity.WAITING)
    assert not sent_by_master([e for _ in range(12) for e in pass_second(master)], Release)
    assert master.phase is Phase.RUNNING
    master.confirm(2)
    assert sent_by_master([e for _ in range(4) for e in pass_second(master)], Release, "w1")


def pass_second(master: Any) -> list[ev.Effect]:
    """Let one second pass in which the first worker trains and the second one repeats its join."""
    master.say(1, activity=Activity.STEPPING)
    master.join(1, rows=0, batches=0)
    return list(master.tick(1.0))


def test_partition_without_worker_aborts_fit_after_rejoin_s(master_with: Any, make: Any) -> None:
    master = leave_partition_without_worker(master_with(rejoin_s=30.0, release_s=1e9), make)
    abort = only_abort(tick_alive(master, 31))
    assert (abort.kind, abort.partition) == (ev.Failure.SETUP, 1)
    assert abort.reason.startswith("partition 1 has been without a worker for 3")
    assert "or a suspended Python process that keeps its slot?" in abort.reason


def test_rejoin_deadline_does_not_run_while_others_train(master_with: Any, make: Any) -> None:
    """The deadline does not run while others train: they free their slots when finished."""
    master = master_with(rejoin_s=30.0, release_s=1e9)
    master.running()
    master.evict(2)
    for _ in range(200):
        master.say(1, activity=Activity.STEPPING)
        assert not aborts(master.tick(1.0))
    master.hear(1, make.update(1, 1, epoch=2, batch=0))
    assert not aborts(tick_alive(master, 29))
    assert only_abort(tick_alive(master, 3)).partition == 1


def aborts(effects: list[ev.Effect]) -> list[ev.Abort]:
    """Return all ``Abort`` effects."""
    return [effect for effect in effects if isinstance(effect, ev.Abort)]


def test_audit_of_10000_nodes_finds_different_hashes(master_with: Any, make: Any) -> None:
    """A mesh of 10,000 nodes runs, drains and audits, and the two different hashes are found."""
    master = master_with(partitions=10_000, fan_out=8, depth=5)
    for partition in range(10_000):
        master.enter(partition, executor=f"e{partition}")
    nodes = sorted(master.machine.members.live)
    for node in nodes:
        master.say(node, activity=Activity.WAITING)
    master.tick(1.0)
    assert master.phase is Phase.RUNNING
    assert max(map(master.machine.placement.tree.depth, nodes)) == 5
    for node in nodes:
        master.say(node, epoch=2, batch=0, activity=Activity.FINISHED)
    master.tick(1.0)
    assert master.phase is Phase.DRAINING
    for node in nodes:
        master.say(node, final=0)
    assert every(master.tick(1.0), ev.HashReplica) == [ev.HashReplica(0)]
    master.step(ev.ReplicaHashed(0, "d", None))
    for node in nodes:
        master.say(node, audit=AuditAnswer(0, "odd" if node in (3, 7777) else "d", None))
    assert every(master.tick(1.0), ev.Complete) == [ev.Complete()]
    digests = master.machine.phases.digests
    assert [node for node in nodes if digests[node] != "d"] == [3, 7777]
