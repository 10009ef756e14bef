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
from tests.unit.protocol.spoken import aborted, answers, every, only, sent

# -- phases ------------------------------------------------------------------------------------


def test_training_begins_when_all_hold_a_replica(master: Any) -> None:
    master.enter(0)
    master.enter(1)
    master.say(1, activity=Activity.WAITING)
    assert master.phase is Phase.GATHERING
    master.say(2, activity=Activity.WAITING)
    assert master.phase is Phase.RUNNING
    assert [s.phase for s in sent(master.tick(), State, 1)] == [Phase.RUNNING]


def test_it_begins_with_those_who_came_in_time(master: Any) -> None:
    """After ``start_s`` training begins with the workers that are present."""
    master.enter(0)
    for _ in range(32):
        master.say(1, activity=Activity.WAITING)
        master.tick(2.0)
    assert master.phase is Phase.RUNNING


def test_too_few_workers_end_the_fit(master_with: Any) -> None:
    """With fewer than ``workers_min`` ready workers after ``start_s``, the fit is aborted."""
    master = master_with(workers_min=2)
    master.enter(0)
    effects: list[ev.Effect] = []
    for _ in range(32):
        master.say(1, activity=Activity.WAITING)
        effects += master.tick(2.0)
    abort = aborted(effects)
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


def finished(master: Any, make: Any) -> Any:
    """Train both partitions completely, which starts the draining."""
    master.running()
    for node in (1, 2):
        master.hear(node, make.update(node, 1, epoch=2, batch=0))
    assert master.phase is Phase.DRAINING
    return master


def test_a_fit_drains_audits_and_is_done(master: Any, make: Any) -> None:
    """A fit drains, audits the final commit, collects all hashes and is done."""
    finished(master, make)
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


def test_whoever_drains_hears_that_the_last_epoch_is_over(master: Any, make: Any) -> None:
    """The state that announces draining has the new epoch count, even between two scans."""
    master.running()
    master.machine._scan_due_s = master.now_s
    for node in (1, 2):
        master.hear(node, make.update(node, 1, epoch=2, batch=0))
    master.machine._scan_due_s = master.now_s + 1e6
    states = sent(master.tick(0.1), State, 1)
    assert [(state.phase, state.epochs) for state in states] == [(Phase.DRAINING, 2)]


def test_it_is_not_done_before_the_driver_has_a_hash_of_its_own(master: Any, make: Any) -> None:
    """The audit ends only when the master's own replica is hashed, too."""
    finished(master, make)
    for node in (1, 2):
        master.say(node, final=1)
    for node in (1, 2):
        master.say(node, audit=AuditAnswer(2, "d", None))
    assert master.phase is Phase.AUDIT
    assert every(master.step(ev.ReplicaHashed(2, "d", None)), ev.Complete) == [ev.Complete()]


def test_the_final_commit_waits_for_every_last_update(master: Any, make: Any) -> None:
    """The final commit is fixed after every worker's last update; later ones are ignored."""
    finished(master, make)
    master.say(1, final=1)
    master.say(2, final=2)
    assert master.phase is Phase.DRAINING
    master.hear(2, make.update(2, 2, epoch=2, batch=0))
    assert (master.phase, master.machine.phases.final) == (Phase.AUDIT, 3)
    assert master.hear(1, make.update(1, 2, epoch=2, batch=0)) == []
    assert master.machine.ignored.counts == {("Update", IgnoreReason.LATE): 1}


def test_who_dies_before_the_end_holds_nothing_up(master: Any, make: Any) -> None:
    """A worker that dies while draining is no longer waited for."""
    finished(master, make)
    master.say(1, final=1)
    master.evict(2)
    assert master.phase is Phase.AUDIT
    master.step(ev.ReplicaHashed(2, "d", None))
    assert every(master.say(1, audit=AuditAnswer(2, "d", None)), ev.Complete)


def test_a_pause_of_the_process_does_not_count_as_waiting_for_the_end(
    master: Any, make: Any
) -> None:
    """After a pause of the master, queued answers are still processed before ids are closed."""
    finished(master, make)
    master.now_s += 600.0
    for node in (1, 2):
        assert every(master.say(node, final=1), ev.Note) == []
    assert master.phase is Phase.AUDIT
    assert list(master.machine.members.live) == [1, 2]


@pytest.mark.parametrize("what", ["last update", "hash"])
def test_the_end_has_a_deadline(master_with: Any, make: Any, what: str) -> None:
    """A worker whose last update or hash does not come within ``end_s`` is closed."""
    master = finished(master_with(end_s=5.0), make)
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


def test_the_end_has_all_its_time_after_a_long_step(master_with: Any) -> None:
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


def test_a_stop_drains_what_there_is(master: Any, make: Any) -> None:
    """A stop drains at once and keeps its first reason; later joins get a harmless refusal."""
    master.running()
    master.hear(1, make.update(1, 1, batch=1))
    master.step(ev.StopRequested("enough"))
    master.step(ev.StopRequested("again"))
    assert (master.phase, master.machine.phases.stop_reason) == (Phase.DRAINING, "enough")
    master.evict(2)
    (refused,) = answers(master.join(1, count=2))
    assert not refused.fatal
    master.say(1, final=1)
    assert master.phase is Phase.AUDIT
    assert master.machine.partitions[1].position == (0, 0)


def test_empty_partitions_are_trained_from_the_start(master_with: Any, make: Any) -> None:
    master = master_with(partitions=2)
    master.enter(0, rows=0, batches=0)
    master.enter(1)
    for node in (1, 2):
        master.say(node, activity=Activity.WAITING)
    master.hear(2, make.update(2, 1, epoch=2, batch=0))
    assert master.phase is Phase.DRAINING


def test_nobody_waits_for_the_second_attempt_of_an_empty_partition(master: Any) -> None:
    """Training begins without a ready worker of an empty partition."""
    master.enter(0, rows=0, batches=0)
    master.enter(1)
    master.say(2, activity=Activity.WAITING)
    assert master.phase is Phase.RUNNING


def test_without_any_rows_there_is_nothing_to_train(master_with: Any) -> None:
    """A fit whose partitions are all empty is aborted as a usage error."""
    master = master_with(partitions=1)
    master.enter(0, rows=0, batches=0)
    abort = aborted(master.say(1, activity=Activity.FINISHED))
    assert (abort.kind, abort.reason[:27]) == (ev.Failure.USAGE, "all 1 partitions are empty:")


def test_who_could_not_read_its_rows_says_so_first(master_with: Any) -> None:
    """If no worker has rows, a reported failure is the reason of the abort."""
    master = master_with(partitions=1)
    assert not every(master.enter(0, rows=0, batches=0) + master.tick(), ev.Abort)
    failed = TrainingFailure(node=1, reason="row 3 is null", host="h", trace="")
    assert aborted(master.direct(failed)).reason == "row 3 is null"


def test_nobody_waits_for_ever_for_rows_that_do_not_come(master_with: Any) -> None:
    """If no worker has rows and none reports a failure, the fit is aborted after ``start_s``."""
    master = master_with(partitions=1)
    master.enter(0, rows=0, batches=0)
    effects: list[ev.Effect] = []
    for _ in range(32):
        master.say(1, activity=Activity.CATCHING_UP)
        effects += master.tick(2.0)
    assert aborted(effects).reason.startswith("all 1 partitions are empty:")


def test_a_failure_after_the_end_does_not_count(master: Any, make: Any) -> None:
    """A failure report after the fit is done aborts nothing; the worker is sent an end notice."""
    finished(master, make)
    for node in (1, 2):
        master.say(node, final=1)
    master.step(ev.ReplicaHashed(2, "d", None))
    for node in (1, 2):
        master.say(node, audit=AuditAnswer(2, "d", None))
    effects = master.direct(TrainingFailure(node=1, reason="late", trace=""))
    assert every(effects, ev.Abort) == []
    assert answers(effects, IdClosed, "w0")


# -- task slots --------------------------------------------------------------------------------


def one_waits(master: Any, make: Any) -> Any:
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


def test_a_finished_worker_is_asked_to_give_up_its_slot(master: Any, make: Any) -> None:
    """A finished worker is asked to leave after ``release_s``; its file is recorded."""
    one_waits(master, make)
    assert answers(tick_alive(master, 8), Release) == []
    asked = answers(tick_alive(master, 4), Release, "w0")
    assert asked[0].reason == "partition 1 needs a task slot"
    effects = master.direct(
        LeaveNotice(node=1, reason="released", checkpoint=ResidualCheckpoint("p", 2.0))
    )
    assert only(answers(effects), IdClosed).node == 1
    assert master.machine.checkpoints.files == {"e": {"p": 2.0}}
    assert master.phase is Phase.RUNNING


def test_slots_are_given_up_one_at_a_time(master_with: Any, make: Any) -> None:
    """The next finished worker is asked only if the slot of the first one did not help."""
    master = master_with(partitions=3).running()
    for node in (1, 2):
        master.hear(node, make.update(node, 1, epoch=2, batch=0))
    master.evict(3)
    effects = tick_alive(master, 12)
    assert [bool(answers(effects, Release, host)) for host in ("w0", "w1")] == [True, False]
    master.direct(LeaveNotice(node=1, reason="released", checkpoint=None))
    assert not answers(tick_alive(master, 8), Release, "w1")
    assert answers(tick_alive(master, 5), Release, "w1")


def test_who_may_not_know_its_id_yet_is_not_asked(master_with: Any) -> None:
    """A worker whose place is not confirmed is not asked, even if its partition is empty."""
    master = master_with(partitions=4, fan_out=1, depth=4, release_s=3.0, start_s=1.0)
    master.enter(0)
    master.join(1, rows=0, batches=0)
    master.say(1, activity=Activity.WAITING)
    assert not answers([e for _ in range(12) for e in alive(master)], Release)
    assert master.phase is Phase.RUNNING
    master.confirm(2)
    assert answers([e for _ in range(4) for e in alive(master)], Release, "w1")


def alive(master: Any) -> list[ev.Effect]:
    """Let one second pass in which the first worker trains and the second one repeats its join."""
    master.say(1, activity=Activity.STEPPING)
    master.join(1, rows=0, batches=0)
    return list(master.tick(1.0))


def test_a_partition_without_a_worker_has_a_deadline(master_with: Any, make: Any) -> None:
    master = one_waits(master_with(rejoin_s=30.0, release_s=1e9), make)
    abort = aborted(tick_alive(master, 31))
    assert (abort.kind, abort.partition) == (ev.Failure.SETUP, 1)
    assert abort.reason.startswith("partition 1 has been without a worker for 3")
    assert "or a suspended Python process that keeps its slot?" in abort.reason


def test_a_partition_without_a_worker_waits_while_others_train(master_with: Any, make: Any) -> None:
    """The deadline does not run while others train: they free their slots when finished."""
    master = master_with(rejoin_s=30.0, release_s=1e9)
    master.running()
    master.evict(2)
    for _ in range(200):
        master.say(1, activity=Activity.STEPPING)
        assert not aborts(master.tick(1.0))
    master.hear(1, make.update(1, 1, epoch=2, batch=0))
    assert not aborts(tick_alive(master, 29))
    assert aborted(tick_alive(master, 3)).partition == 1


def aborts(effects: list[ev.Effect]) -> list[ev.Abort]:
    """Return all ``Abort`` effects."""
    return [effect for effect in effects if isinstance(effect, ev.Abort)]


def test_ten_thousand_drain_and_the_audit_names_those_that_differ(
    master_with: Any, make: Any
) -> None:
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
