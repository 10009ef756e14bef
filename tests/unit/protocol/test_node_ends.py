"""A worker's machine: how a task ends, and after which waits."""

from __future__ import annotations

from typing import Any

import msgspec

from sparkstrom.codec.messages import (
    Activity,
    AuditAnswer,
    Failed,
    Final,
    Kept,
    Leaving,
    Message,
    Phase,
    Release,
)
from sparkstrom.protocol import events as ev
from sparkstrom.protocol.events import Order
from sparkstrom.protocol.reporting import REPEAT_S
from sparkstrom.protocol.waiting import FAREWELL_S


def sent(effects: list[ev.Effect], kind: type[Message]) -> list[Any]:
    messages = [effect.message for effect in effects if isinstance(effect, ev.Send)]
    return [message for message in messages if isinstance(message, kind)]


def only(effects: list[ev.Effect], kind: type[Any]) -> Any:
    found = [effect for effect in effects if isinstance(effect, kind)]
    assert len(found) == 1, effects
    return found[0]


def own(make: Any, commit: int, seq: int) -> Any:
    """The number of an update of node 1, without its payload."""
    return msgspec.structs.replace(make.committed(commit, origin=1, payload=b""), seq=seq)


# -- the end -----------------------------------------------------------------------------------


def test_it_drains_audits_and_ends(node: Any, make: Any) -> None:
    node.training()
    node.step(make.published(1))
    node.hear(make.state(Phase.DRAINING))
    assert node.order is Order.DRAIN
    assert sent(node.step(ev.Drained()), Final) == [Final(1)]
    assert sent(node.tick(REPEAT_S), Final) == [Final(1)]  # until the master shows it has heard
    node.hear(make.state(Phase.AUDIT, head=3, final=3))
    assert node.order is Order.WAIT
    for commit, origin in ((1, 9), (2, 1), (3, 9)):
        node.hear(make.committed(commit, origin=origin) if origin == 9 else own(make, commit, 1))
    assert (node.order, node.machine.command.commit) == (Order.AUDIT, 3)
    answer = AuditAnswer(3, "d", Kept("p", 1.0))
    assert sent(node.step(ev.Hashed(3, "d", Kept("p", 1.0))), AuditAnswer) == [answer]
    assert sent(node.tick(REPEAT_S), AuditAnswer) == [answer]
    effects = node.hear(make.state(Phase.DONE, head=3, final=3))
    assert sent(effects, Leaving) == [Leaving("done", None)]
    assert node.order is Order.END


def test_a_phase_that_was_overtaken_does_not_come_back(node: Any, make: Any) -> None:
    """Otherwise it would train on after it has named its last update."""
    node.training()
    node.hear(make.state(Phase.DRAINING))
    node.step(ev.Drained())
    node.hear(make.state(Phase.RUNNING))
    assert node.order is Order.DRAIN


def test_done_without_an_audit_is_no_end(node: Any, make: Any) -> None:
    node.training()
    node.hear(make.state(Phase.DONE))
    assert node.order is Order.AUDIT


def test_how_a_task_ended_first_stays(node: Any, make: Any) -> None:
    node.training()
    node.hear(make.state(Phase.AUDIT))
    node.step(ev.Hashed(0, "d", None))
    node.hear(make.state(Phase.DONE))
    node.hear(make.closed(1, 0, free=False))
    node.hear(Release("a slot is needed"))
    assert (node.order, node.machine.command.reason) == (Order.END, "done")


def test_a_released_one_stays_until_it_was_heard(node: Any, make: Any) -> None:
    node.training()
    node.hear(Release("a slot is needed"))
    assert node.order is Order.RELEASE
    leaving = Leaving("released", Kept("p", 1.0))
    assert sent(node.step(ev.Released(leaving.kept)), Leaving) == [leaving]
    assert node.order is Order.RELEASE
    assert sent(node.tick(REPEAT_S + 2.5), Leaving) == [leaving]
    node.hear(make.closed(1, 0, token=0, count=0, free=False))
    assert (node.order, node.machine.command.reason) == (Order.END, "released")


def test_a_released_one_leaves_unheard_after_a_while(node: Any, make: Any) -> None:
    node.training()
    node.hear(Release("a slot is needed"))
    node.step(ev.Released(None))
    for _ in range(3):
        node.hear(make.state(), FAREWELL_S / 3 + 0.1)
        node.tick()
    assert (node.order, node.machine.command.reason) == (Order.END, "released")


def test_a_failure_is_repeated_until_it_was_heard(node: Any, make: Any) -> None:
    node.training()
    failed = Failed(reason="NaN", trace="t")
    assert sent(node.step(ev.TrainerFailed("NaN", "t")), Failed) == [failed]
    assert sent(node.tick(REPEAT_S + 2.5), Failed) == [failed]
    assert node.order is not Order.FAIL
    node.hear(make.closed(1, 0, token=0, count=0, free=False, reason="the fit has failed"))
    assert (node.order, node.machine.command.reason) == (Order.FAIL, "NaN")


# -- deadlines ---------------------------------------------------------------------------------


def beat(node: Any, seconds: float, message: Message | None = None) -> None:
    """Time passes in small steps, and this is heard all the while."""
    for _ in range(int(seconds)):
        if message is not None:
            node.hear(message)
        node.tick(1.0)


def failed_with(node: Any) -> str:
    assert node.order is Order.FAIL
    return str(node.machine.command.reason)


def test_nobody_answers_the_join(node: Any, make: Any) -> None:
    node.step(ev.Opened(make.join().address))
    beat(node, 60)
    assert node.order is Order.WAIT
    beat(node, 1)
    assert failed_with(node).startswith("no answer from the master for 61 s: is UDP open")


def test_the_master_is_silent(node: Any) -> None:
    node.training()
    beat(node, 31)
    assert failed_with(node).startswith("nothing heard from the master for 31 s")


def test_a_snapshot_does_not_come(node: Any, make: Any) -> None:
    node.joined()
    beat(node, 121, make.state())
    assert "catching up made no progress for 121 s" in failed_with(node)


def test_snapshots_that_grow_old_again_and_again_are_no_progress(node: Any, make: Any) -> None:
    node.joined()
    for base in range(1, 125):
        node.hear(make.behind(base))
        node.tick(1.0)
    assert "catching up made no progress" in failed_with(node)


def test_a_long_step_is_not_taken_for_a_missing_snapshot(node: Any, make: Any) -> None:
    node.training()
    node.step(ev.Busy(Activity.STEPPING))
    node.hear(make.behind(3))
    node.hear(make.chunk(3))
    beat(node, 200, make.state())
    assert node.order is Order.PAUSE
    node.step(ev.Paused(2))
    assert only(node.tick(), ev.Install).commit == 3


def test_a_full_window_has_a_deadline(node_with: Any, make: Any) -> None:
    node = node_with(window_bytes=1).training()
    node.step(make.published(1))
    beat(node, 121, make.state())
    assert failed_with(node).startswith("none of its updates was committed for 121 s")


def test_a_step_has_a_deadline_and_a_waiting_trainer_none(node: Any, make: Any) -> None:
    node.training()
    beat(node, 700, make.state())
    assert node.order is Order.TRAIN
    node.step(ev.Busy(Activity.STEPPING))
    beat(node, 601, make.state())
    assert failed_with(node).startswith("one training step took longer than 601 s")


def test_a_long_snapshot_is_not_taken_for_a_long_step(node_with: Any, make: Any) -> None:
    """A trainer that is paused does not say that it waits, and goes on without a word."""
    node = node_with(lease_s=1e6).training()
    node.step(ev.Busy(Activity.STEPPING))
    node.hear(make.behind(5))
    node.step(ev.Paused(2))
    for _ in range(7):
        node.me.catchup.progress_s = node.now_s  # as with another chunk
        beat(node, 100, make.state())
        assert node.order is Order.PAUSE
    assert only(node.hear(make.chunk(5)), ev.Install)
    node.step(ev.Installed())
    node.hear(make.state())
    node.tick(1.0)
    assert node.order is Order.TRAIN


def test_commits_that_do_not_arrive_have_a_deadline(node: Any, make: Any) -> None:
    node.training()
    beat(node, 100, make.state(head=0))
    beat(node, 115, make.state(head=5))
    assert node.order is Order.TRAIN
    beat(node, 10, make.state(head=6))
    assert failed_with(node).startswith("the updates of the others did not arrive for 121 s")


def test_one_sleep_does_not_excuse_the_next_silence(node: Any, make: Any) -> None:
    node.training()
    node.hear(make.state(), 3_600.0)  # it wakes up and first reads what has come
    node.tick()
    beat(node, 31)
    assert "nothing heard from the master" in failed_with(node)


def test_time_asleep_counts_for_no_wait(node: Any, make: Any) -> None:
    """A process that was stopped for a minute has heard nobody, and that is nobody's fault."""
    node.training()
    node.step(ev.Busy(Activity.STEPPING))
    assert isinstance(node.tick(3_600.0)[0], ev.Reopen)
    assert node.order is Order.TRAIN
    beat(node, 31)
    assert "nothing heard from the master" in failed_with(node)


def test_states_are_kept_in_order_of_their_head(node: Any, make: Any) -> None:
    node.training()
    node.hear(make.state(head=5, slowest=4))
    node.hear(make.state(head=3, slowest=9))
    assert (node.me.state.head, node.me.state.slowest) == (5, 4)
