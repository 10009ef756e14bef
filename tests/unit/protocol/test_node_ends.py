"""Tests of the end of a worker's task: drain, audit, release, failure, and the waits' deadlines."""

from __future__ import annotations

from typing import Any

from sparkstrom.codec.messages import (
    Activity,
    AuditAnswer,
    Heartbeat,
    LeaveNotice,
    Phase,
    Probe,
    Release,
    ResidualCheckpoint,
    State,
    TrainingFailure,
    WorkerLog,
)
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.events_and_effects import Command
from sparkstrom.protocol.worker.heartbeats import REPEAT_S
from sparkstrom.protocol.worker.node_state import FAREWELL_S
from tests.unit.protocol.effect_filters import every, only, sent, sent_directly


def statuses_in(effects: list[ev.Effect]) -> list[Any]:
    """Return the statuses in the node's heartbeats."""
    return [status for report in sent(effects, Heartbeat) for status in report.statuses]


# -- the end -----------------------------------------------------------------------------------


def test_node_drains_audits_leaves_and_ends(node: Any, make: Any) -> None:
    """A node drains, audits, leaves and ends, and repeats its statuses until acknowledged."""
    node.training()
    node.step(make.published(1))
    node.hear(make.state(Phase.DRAINING))
    assert node.order is Command.DRAIN
    node.step(ev.TrainerDrained())
    assert [status.final for status in statuses_in(node.tick(0.1))] == [1]
    assert [status.final for status in statuses_in(node.tick(REPEAT_S))] == [
        1
    ]  # until acknowledged
    node.hear(make.state(Phase.AUDIT, head=3, final=3))
    assert node.order is Command.WAIT
    for commit, origin in ((1, 9), (2, 1), (3, 9)):
        node.hear(make.committed(commit, origin, seq=1 if origin == 1 else commit))
    assert (node.order, node.machine.directive.commit) == (Command.AUDIT, 3)
    answer = AuditAnswer(3, "d", ResidualCheckpoint("p", 1.0))
    node.step(ev.ReplicaHashed(3, "d", ResidualCheckpoint("p", 1.0)))
    assert [status.audit for status in statuses_in(node.tick(0.1))] == [answer]
    assert [status.audit for status in statuses_in(node.tick(REPEAT_S))] == [answer]
    node.hear(make.state(Phase.DONE, head=3, final=3))
    assert sent(node.tick(), LeaveNotice) == [LeaveNotice(node=1, reason="done", checkpoint=None)]
    node.tick()
    assert node.order is Command.END


def test_state_of_earlier_phase_is_ignored(node: Any, make: Any) -> None:
    """A state of an earlier phase is ignored, so no training follows the last update."""
    node.training()
    node.hear(make.state(Phase.DRAINING))
    node.step(ev.TrainerDrained())
    node.hear(make.state(Phase.RUNNING))
    assert node.order is Command.DRAIN


def test_node_audits_even_if_fit_is_done(node: Any, make: Any) -> None:
    """A node that has not audited must still do so when the fit is done."""
    node.training()
    node.hear(make.state(Phase.DONE))
    assert node.order is Command.AUDIT


def enter_audit_phase(node: Any, make: Any) -> Any:
    """Bring the node into the audit phase, with its replica hashed."""
    node.hear(make.state(Phase.AUDIT))
    node.step(ev.ReplicaHashed(0, "d", None))
    return node


def test_first_ending_of_task_is_kept(node: Any, make: Any) -> None:
    """Once a task has ended, later notices and requests do not change the ending."""
    enter_audit_phase(node.training(), make)
    node.hear(make.state(Phase.DONE))
    node.tick()
    node.told(make.closed(1, 0, free=False))
    node.told(Release("a slot is needed"))
    assert (node.order, node.machine.directive.reason) == (Command.END, "done")


def test_node_without_parent_ends_on_direct_state_of_master(node: Any, make: Any) -> None:
    """A node whose parent is gone learns from the master directly that the fit is done."""
    node.parent = 4
    enter_audit_phase(node.training(), make)
    node.opened()
    node.told(make.state(Phase.DONE))
    node.tick()
    assert node.order is Command.END


def test_parent_leaves_only_after_all_children_have_left(node: Any, make: Any) -> None:
    """After the fit a parent waits for the leave notices of all its children before it leaves."""
    enter_audit_phase(node.training().with_child(5).with_child(6), make)
    node.hear(make.state(Phase.DONE))
    assert sent(node.tick(0.1), LeaveNotice) == []
    node.hear(LeaveNotice(node=5, reason="done", checkpoint=None), sender=5)
    assert node.order is Command.WAIT
    assert sent(node.tick(0.1), LeaveNotice) == []
    node.hear(LeaveNotice(node=6, reason="done", checkpoint=None), sender=6)
    assert sent(node.tick(0.1), LeaveNotice) == [
        LeaveNotice(node=1, reason="done", checkpoint=None)
    ]
    assert node.order is Command.END


def test_parent_waits_at_most_farewell_s_for_child_to_leave(node: Any, make: Any) -> None:
    """A parent waits for a child that does not leave for at most FAREWELL_S."""
    enter_audit_phase(node.training().with_child(5), make)
    node.hear(make.state(Phase.DONE))
    told = node.tick()
    for _ in range(10):
        node.alive(Phase.DONE)
        told += node.tick(FAREWELL_S / 10)
    assert sent(told, LeaveNotice) == []
    assert node.order is Command.WAIT
    assert len(sent(told, State, 5)) > 5  # it gets states all the time
    assert len(sent(node.tick(0.2), LeaveNotice)) == 1
    assert node.order is Command.END


def test_released_node_repeats_leave_notice_until_confirmed(node: Any, make: Any) -> None:
    """A released node repeats its leave notice until the master confirms it, and then ends."""
    node.training()
    node.told(Release("a slot is needed"))
    assert node.order is Command.RELEASE
    leaving = LeaveNotice(node=1, reason="released", checkpoint=ResidualCheckpoint("p", 1.0))
    assert sent_directly(node.step(ev.TrainerReleased(leaving.checkpoint)), LeaveNotice) == [
        leaving
    ]
    assert node.order is Command.RELEASE
    assert sent_directly(node.tick(REPEAT_S + 2.5), LeaveNotice) == [leaving]
    node.told(make.closed(1, 0, token=0, count=0, free=False))
    assert (node.order, node.machine.directive.reason) == (Command.END, "released")


def test_released_node_ends_after_farewell_s_without_confirmation(node: Any) -> None:
    """Without a confirmation, a released node ends after FAREWELL_S."""
    node.training()
    node.told(Release("a slot is needed"))
    node.step(ev.TrainerReleased(None))
    for _ in range(3):
        node.step(ev.Tick(), FAREWELL_S / 3 + 0.1)
        node.alive()
    assert (node.order, node.machine.directive.reason) == (Command.END, "released")


def test_failure_report_is_repeated_until_confirmed(node: Any, make: Any) -> None:
    """A failure report is repeated until the master confirms it; then the task fails."""
    node.training()
    failed = TrainingFailure(node=1, reason="NaN", trace="t", host="h", attempt=10)
    assert sent_directly(node.step(ev.TrainerFailed("NaN", "t")), TrainingFailure) == [failed]
    assert sent_directly(node.tick(REPEAT_S + 2.5), TrainingFailure) == [failed]
    assert node.order is not Command.FAIL
    node.told(make.closed(1, 0, token=0, count=0, free=False, reason="the fit has failed"))
    assert (node.order, node.machine.directive.reason) == (Command.FAIL, "NaN")


def test_failure_report_states_what_worker_was_doing(node: Any) -> None:
    """A failure report states what the worker was doing."""
    effects = node.training().step(ev.TrainerFailed("NaN", "t", "reading rows"))
    assert [failed.phase for failed in sent_directly(effects, TrainingFailure)] == ["reading rows"]


def test_printed_lines_are_sent_to_master_at_once_and_only_once(node: Any) -> None:
    """Printed lines are sent to the master at once and only once, also before joining."""
    says = WorkerLog(host="h", partition=0, lines=[("training", "loss 0.5")], skipped=3)
    event = ev.OutputPrinted([("training", "loss 0.5")], 3)
    assert sent_directly(node.step(event), WorkerLog) == [says]
    node.training()
    command = node.machine.directive
    assert sent_directly(node.step(event), WorkerLog) == [says]
    assert sent_directly(node.tick(REPEAT_S + 2.5), WorkerLog) == []
    assert node.machine.directive == command


def test_failure_is_reported_directly_without_parent(node: Any) -> None:
    """A failure is reported directly to the master while the node has no parent."""
    node.training().opened()
    failed = TrainingFailure(node=1, reason="NaN", trace="t", host="h", attempt=10)
    node.step(ev.TrainerFailed("NaN", "t"))
    assert sent_directly(node.tick(0.6), TrainingFailure) == [failed]


# -- deadlines ---------------------------------------------------------------------------------


def pass_seconds(node: Any, seconds: float, *, alive: bool = False, **state: Any) -> None:
    """Advance the time in steps of 1 s, and open fresh streams when the node asks for them.

    If ``alive``, a state of the master comes with each step, and a new edge is granted.
    """
    for _ in range(int(seconds)):
        if alive:
            node.alive(**state)
        if every(node.tick(1.0), ev.ReopenStreams):
            node.opened_anew() if alive else node.opened()


def failure_reason(node: Any) -> str:
    """Assert that the task must fail, and return the reason."""
    assert node.order is Command.FAIL
    return str(node.machine.directive.reason)


def test_unanswered_join_fails_task_after_join_s(node: Any, make: Any) -> None:
    """A task fails if the master does not answer its join for ``join_s``."""
    node.opened()
    pass_seconds(node, 60)
    assert node.order is Command.WAIT
    pass_seconds(node, 1)
    assert failure_reason(node).startswith("no answer from the master for 61 s: is UDP open")


def test_probed_node_keeps_waiting_for_its_place(node: Any) -> None:
    """A node waits for its place while the master probes it: others may get theirs first."""
    node.opened()
    for _ in range(200):
        node.told(Probe(7))  # the id that the master has chosen for it
        assert not every(node.tick(1.0), ev.ReopenStreams)
    assert node.order is Command.WAIT


def test_probed_node_without_place_fails_after_four_times_stuck_s(node_with: Any) -> None:
    """A node that is probed but gets no place fails after four times ``stuck_s``."""
    node = node_with(stuck_s=20.0)
    node.opened()
    for _ in range(81):
        assert node.order is Command.WAIT
        node.told(Probe(7))
        node.tick(1.0)
    assert failure_reason(node).startswith("no place in the mesh for 81 s, although the master")


def test_node_without_id_fails_on_notice_of_failed_fit(node: Any, make: Any) -> None:
    """A node without an id fails if it is notified that the fit has failed."""
    node.opened()
    node.told(make.closed(7, 0, free=False, reason="the fit has failed"))
    assert failure_reason(node) == "the fit has failed"


def test_silent_master_fails_task_after_master_silent_s(node: Any) -> None:
    """A task fails if the master is silent for ``master_silent_s``."""
    node.training()
    pass_seconds(node, 31)
    assert failure_reason(node).startswith("nothing heard from the master for 31 s")


def test_missing_chunks_fail_task_after_stuck_s(node: Any, make: Any) -> None:
    """A task fails if no chunk of its snapshot arrives for ``stuck_s``."""
    node.joined()
    pass_seconds(node, 121, alive=True)
    assert "catching up made no progress for 121 s" in failure_reason(node)


def test_restarted_fetches_without_progress_fail_task(node: Any, make: Any) -> None:
    """A fetch that starts again and again without holding more chunks fails after ``stuck_s``."""
    node.joined()
    for base in range(1, 125):
        node.hear(make.behind(base))
        node.tick(1.0)
    assert "catching up made no progress" in failure_reason(node)


def test_snapshot_deadline_does_not_run_during_long_step(node: Any, make: Any) -> None:
    """The deadline for a snapshot does not run while a complete one waits for a long step."""
    node.training()
    node.step(ev.ActivityChanged(Activity.STEPPING))
    node.hear(make.behind(3))
    node.hear(make.chunk(3))
    pass_seconds(node, 200, alive=True)
    assert node.order is Command.PAUSE
    node.step(ev.TrainerPaused(2))
    assert only(node.tick(), ev.InstallSnapshot).commit == 3


def test_uncommitted_updates_fail_task_after_stuck_s(node_with: Any, make: Any) -> None:
    """A task fails with hints if none of its updates is committed for ``stuck_s``."""
    node = node_with(window_bytes=1).training()
    node.step(make.published(1))
    pass_seconds(node, 121, alive=True)
    reason = failure_reason(node)
    assert reason.startswith("none of its updates was committed for 121 s")
    assert f"{node.me.in_flight.bytes} bytes of them wait" in reason
    assert "MB/s" in reason
    assert "publish_every='auto'" in reason


def test_step_longer_than_step_s_fails_task_but_waiting_does_not(node: Any, make: Any) -> None:
    """A step that exceeds ``step_s`` fails the task; a trainer that waits has no deadline."""
    node.training()
    pass_seconds(node, 700, alive=True)
    assert node.order is Command.TRAIN
    node.step(ev.ActivityChanged(Activity.STEPPING))
    pass_seconds(node, 601, alive=True)
    assert failure_reason(node).startswith("one training step took longer than 601 s")


def test_step_deadline_does_not_run_during_pause_for_snapshot(node_with: Any, make: Any) -> None:
    """The deadline of a step does not run during a pause, although the activity is STEPPING."""
    node = node_with(lease_s=1e6).training()
    node.step(ev.ActivityChanged(Activity.STEPPING))
    node.hear(make.behind(5))
    node.step(ev.TrainerPaused(2))
    for _ in range(7):
        node.me.replication.fetch.progress_s = node.now_s  # as with another chunk
        pass_seconds(node, 100, alive=True)
        assert node.order is Command.PAUSE
    assert only(node.hear(make.chunk(5)), ev.InstallSnapshot)
    node.step(ev.ReplicaInstalled())
    node.hear(make.state())
    node.tick(1.0)
    assert node.order is Command.TRAIN


def test_missing_commits_fail_task_after_stuck_s(node: Any, make: Any) -> None:
    """A task fails if existing commits do not arrive for ``stuck_s``."""
    node.training()
    pass_seconds(node, 100, alive=True, head=0)
    pass_seconds(node, 115, alive=True, head=5, sent=5)
    assert node.order is Command.TRAIN
    pass_seconds(node, 10, alive=True, head=6, sent=6)
    assert failure_reason(node).startswith("the updates of the others did not arrive for 121 s")


def test_process_pause_postpones_master_deadline_only_once(node: Any, make: Any) -> None:
    """A pause of the process postpones the deadline for the master only once."""
    node.training()
    node.hear(make.state(), 3_600.0)  # after the pause it first reads a message
    node.tick()
    pass_seconds(node, 30)
    assert node.order is Command.TRAIN
    pass_seconds(node, 1)
    assert "nothing heard from the master" in failure_reason(node)


def test_process_pause_is_neither_silence_nor_long_step(node: Any, make: Any) -> None:
    """A pause of the process counts neither as silence of the master nor as a long step."""
    node.training()
    node.step(ev.ActivityChanged(Activity.STEPPING))
    assert isinstance(node.tick(3_600.0)[0], ev.ReopenStreams)
    node.opened()
    assert node.order is Command.TRAIN
    pass_seconds(node, 31)
    assert "nothing heard from the master" in failure_reason(node)


def test_process_pause_does_not_count_as_wait_for_attach_reply(node: Any, make: Any) -> None:
    """Time in which the process did not run does not count as waiting for the attach reply."""
    node.opened()
    node.told(make.welcome())
    node.tick(1.0)
    node.tick(3_600.0)
    assert node.order is Command.WAIT


def test_state_with_older_beat_is_ignored(node: Any, make: Any) -> None:
    """A state with an older beat is ignored."""
    node.training()
    node.hear(make.state(beat=2, head=5, slowest=4))
    node.hear(make.state(beat=1, head=3, slowest=9))
    assert (node.me.fit.state.head, node.me.fit.state.slowest) == (5, 4)


def test_parent_without_replica_fails_task_after_four_times_stuck_s(node: Any, make: Any) -> None:
    """A task fails if its parent has no replica for it for four times ``stuck_s``."""
    node.opened()
    node.told(make.welcome())
    for _ in range(481):
        node.alive()
        assert node.order is Command.WAIT
        node.tick(1.0)
    assert failure_reason(node).startswith("its parent in the mesh has had no replica for it")
