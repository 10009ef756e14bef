"""A worker's machine: events in, effects and a command out."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from sparkstrom.codec.messages import (
    Activity,
    Again,
    AskAfter,
    AskChunk,
    AuditAnswer,
    Failed,
    Final,
    Join,
    Kept,
    Leaving,
    Message,
    Phase,
    Refused,
    Release,
    Report,
    Update,
)
from sparkstrom.protocol import events as ev
from sparkstrom.protocol.events import Order
from sparkstrom.protocol.following import HUNGRY_S
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


# -- joining -----------------------------------------------------------------------------------


def test_it_asks_to_join_until_it_is_welcomed(node: Any, make: Any) -> None:
    first = sent(node.step(ev.Opened(make.join().address)), Join)
    assert [(join.count, join.edge, join.have, join.has_replica) for join in first] == [
        (1, 1, 0, False)
    ]
    assert sent(node.tick(0.1), Join) == []
    assert len(sent(node.tick(0.5), Join)) == 1
    effects = node.hear(make.welcome())
    assert only(effects, ev.Admitted).node == 1
    assert only(effects, ev.OpenEdge).node == 0
    assert sent(node.tick(0.6), Join) == []


@pytest.mark.parametrize("other", [{"token": 2}, {"count": 2}, {"edge": 2}])
def test_a_welcome_for_another_join_is_ignored(node: Any, make: Any, other: dict[str, int]) -> None:
    node.step(ev.Opened(make.join().address))
    assert node.hear(make.welcome(**other)) == []
    assert node.me.node == -1


def test_a_second_welcome_is_ignored(node: Any, make: Any) -> None:
    node.joined()
    assert node.hear(make.welcome()) == []


def test_a_refusal_fails_or_ends_the_task(node_with: Any, make: Any) -> None:
    for fatal, order in ((True, Order.FAIL), (False, Order.END)):
        node = node_with()
        node.step(ev.Opened(make.join().address))
        node.hear(Refused(token=1, count=2, reason="for somebody else", fatal=fatal))
        assert node.order is Order.WAIT
        node.hear(Refused(token=1, count=1, reason="no", fatal=fatal))
        assert (node.order, node.machine.command.reason) == (order, "no")


def test_what_overtakes_the_welcome_is_dropped(node: Any, make: Any) -> None:
    node.step(ev.Opened(make.join().address))
    assert node.hear(make.committed(1)) == []
    assert node.hear(make.state()) == []
    assert node.me.received == 0


def test_silence_of_half_a_lease_opens_another_edge(node: Any) -> None:
    node.training()
    assert not any(isinstance(effect, ev.Reopen) for effect in node.tick(4.9))
    assert isinstance(node.tick(0.2)[0], ev.Reopen)
    assert node.order is Order.TRAIN  # training goes on meanwhile


# -- training ----------------------------------------------------------------------------------


def test_it_waits_until_all_have_joined_and_then_trains(node: Any, make: Any) -> None:
    node.joined()
    assert node.order is Order.PAUSE
    node.hear(make.chunk(0))
    node.step(ev.Paused(1))
    node.tick()
    node.step(ev.Installed())
    assert node.order is Order.WAIT
    node.hear(make.state(Phase.GATHERING))
    assert (node.order, node.machine.command.steps_max) == (Order.WAIT, None)
    node.hear(make.state(Phase.RUNNING))
    assert node.order is Order.TRAIN


def test_updates_are_numbered_and_sent_and_struck_when_committed(node: Any, make: Any) -> None:
    node.training()
    updates = [sent(node.step(make.published(batch)), Update)[0] for batch in (1, 2)]
    assert [(u.origin, u.seq, u.batch) for u in updates] == [(1, 1, 1), (1, 2, 2)]
    effects = node.hear(make.committed(1, origin=1, payload=b""))
    assert effects == [ev.Passed(1)]
    assert [u.seq for u in node.me.uplink.uncommitted] == [2]


def test_others_updates_are_delivered_in_order_once(node: Any, make: Any) -> None:
    node.training()
    first = node.hear(make.committed(1))
    assert only(first, ev.Deliver).update.commit == 1
    assert node.hear(make.committed(1)) == []
    assert sent(node.hear(make.committed(3)), AskAfter) == [AskAfter(1)]
    assert sent(node.hear(make.committed(4)), AskAfter) == []  # asked a moment ago
    assert only(node.hear(make.committed(2)), ev.Deliver).update.commit == 2


def test_it_asks_when_commits_are_known_to_exist_and_none_comes(node: Any, make: Any) -> None:
    node.training()
    node.hear(make.state(head=5))
    assert sent(node.tick(HUNGRY_S + 0.1), AskAfter) == [AskAfter(0)]
    assert sent(node.tick(0.1), AskAfter) == []


def test_a_full_window_stops_training_and_a_commit_lets_it_go_on(node_with: Any, make: Any) -> None:
    node = node_with(window_bytes=1).training()
    node.step(make.published(1))
    assert (node.order, node.machine.command.reason[:11]) == (Order.WAIT, "its updates")
    node.hear(make.committed(1, origin=1))
    assert node.order is Order.TRAIN


def test_it_goes_no_further_ahead_than_allowed(node_with: Any, make: Any) -> None:
    node = node_with(max_lead=3).training()
    assert node.machine.command.steps_max == 3
    node.step(ev.Progressed(0, 3, 3))
    assert node.order is Order.WAIT
    node.hear(make.state(slowest=1))
    assert (node.order, node.machine.command.steps_max) == (Order.TRAIN, 4)


def test_asked_again_it_sends_all_that_is_uncommitted(node: Any, make: Any) -> None:
    node.training()
    for batch in (1, 2):
        node.step(make.published(batch))
    assert [u.seq for u in sent(node.hear(Again(0), 1.0), Update)] == [1, 2]
    assert sent(node.hear(Again(0)), Update) == []
    assert [u.seq for u in sent(node.tick(1.0), Update)] == [1, 2]  # overdue


# -- reports -----------------------------------------------------------------------------------


def test_news_is_told_at_once_and_the_lease_renewed_without(node: Any, make: Any) -> None:
    node.training()
    node.tick(1.0)
    node.step(ev.Progressed(0, 2, 2))
    report = sent(node.tick(0.02), Report)[0]
    assert (report.batch, report.steps, report.after_seq) == (2, 2, 0)
    renewed = [after for after in range(1, 40) if sent(node.tick(0.1), Report)]
    assert renewed
    assert renewed[0] * 0.1 <= node.me.limits.lease_s / 4


def test_a_report_says_which_update_its_position_waits_for(node: Any, make: Any) -> None:
    node.training()
    node.step(make.published(1))
    node.step(ev.Progressed(0, 2, 2))
    report = sent(node.tick(0.02), Report)[0]
    assert (report.after_seq, report.batch) == (1, 2)


# -- a snapshot --------------------------------------------------------------------------------


def test_a_node_that_fell_behind_pauses_and_takes_a_snapshot(node: Any, make: Any) -> None:
    node.training()
    for batch in (1, 2):
        node.step(make.published(batch))
    asked = node.hear(make.behind(7, [(1, 1)]))
    assert sent(asked, AskChunk) == [AskChunk(0)]
    assert (node.order, node.machine.command.number) == (Order.PAUSE, 2)
    node.hear(own(make, 8, 2))  # its second update
    node.step(make.published(3))
    node.step(ev.Paused(2))
    assert node.hear(make.committed(9)) == []
    install = only(node.hear(make.chunk(8)), ev.Install)
    assert [held.commit for held in install.held] == [8, 9]
    assert install.held[0].payload == b"abcd"
    assert [update.seq for update in install.own] == [3]
    assert install.commit == 9
    assert node.order is Order.PAUSE
    node.step(ev.Installed())
    assert node.order is Order.TRAIN
    assert only(node.hear(make.committed(10)), ev.Deliver).update.commit == 10


def test_an_answer_to_an_older_pause_does_not_count(node: Any, make: Any) -> None:
    node.training()
    node.hear(make.behind(3))
    node.hear(make.behind(5))
    assert node.machine.command.number == 3
    node.step(ev.Paused(2))
    assert not any(isinstance(e, ev.Install) for e in node.hear(make.chunk(5)))
    node.step(ev.Paused(3))
    assert only(node.tick(), ev.Install).commit == 5


def test_an_old_behind_takes_nothing_back(node: Any, make: Any) -> None:
    node.training()
    node.hear(make.committed(1))
    assert node.hear(make.behind(1)) == []
    assert node.order is Order.TRAIN


def test_falling_behind_again_while_a_replica_is_installed(node: Any, make: Any) -> None:
    """The first Install is on its way to the trainer when another snapshot begins."""
    node.training()
    node.hear(make.behind(3))
    node.step(ev.Paused(2))
    only(node.hear(make.chunk(3)), ev.Install)
    node.hear(make.behind(9))
    assert node.machine.command.number == 3
    assert not any(isinstance(e, ev.Install) for e in node.hear(make.chunk(9)))
    node.step(ev.Installed())
    assert (node.order, node.machine.command.number) == (Order.PAUSE, 3)
    node.step(ev.Paused(3))
    assert only(node.tick(), ev.Install).commit == 9


def test_an_edge_that_dies_while_catching_up_begins_the_snapshot_again(
    node: Any, make: Any
) -> None:
    node.joined()
    join = sent(node.step(ev.Opened(make.join().address)), Join)[0]
    assert (join.edge, join.has_replica) == (2, False)
    asked = node.hear(make.welcome(edge=2, base=4))
    assert sent(asked, AskChunk) == [AskChunk(0)]
    node.step(ev.Paused(2))
    assert not any(isinstance(e, ev.Install) for e in node.hear(make.chunk(3)))
    assert only(node.hear(make.chunk(4)), ev.Install).commit == 4


# -- coming back -------------------------------------------------------------------------------


def returned(node: Any, make: Any, committed: int) -> list[ev.Effect]:
    """Evicted with so many updates committed, and back as node 5, with its replica."""
    assert isinstance(only(node.hear(make.closed(1, committed)), ev.Reopen), ev.Reopen)
    join = sent(node.step(ev.Opened(make.join().address)), Join)[0]
    assert (join.count, join.edge) == (2, 2)
    welcome = make.welcome(
        5, count=2, edge=2, snapshot=False, base=join.have, closed=[(1, committed)],
        last=[(1, committed), (5, 0)], batch=committed, epoch=0, steps=9,
    )  # fmt: skip
    return list(node.hear(welcome))


def test_a_returner_sends_what_was_not_committed_under_its_new_id(node: Any, make: Any) -> None:
    node.training()
    for batch in (1, 2, 3):
        node.step(make.published(batch))
    effects = returned(node, make, 1)
    admitted = only(effects, ev.Admitted)
    assert (admitted.node, admitted.returned) == (5, True)
    assert [(u.origin, u.seq, u.batch) for u in sent(effects, Update)] == [(5, 1, 2), (5, 2, 3)]
    report = sent(effects, Report)[0]
    assert (report.after_seq, report.batch) == (2, 3)  # its own position, not the committed one


def test_a_returner_still_strikes_what_its_old_id_had_committed(node: Any, make: Any) -> None:
    node.training()
    for batch in (1, 2):
        node.step(make.published(batch))
    returned(node, make, 1)
    assert node.hear(make.committed(1, origin=1, payload=b"")) == [ev.Passed(1)]
    assert [u.origin for u in node.me.uplink.uncommitted] == [5]


def test_updates_made_between_closing_and_welcome_get_new_numbers_too(node: Any, make: Any) -> None:
    node.training()
    node.step(make.published(1))
    node.hear(make.closed(1, 0))
    node.step(ev.Opened(make.join().address))
    assert node.step(make.published(2)) == []
    welcome = make.welcome(5, count=2, edge=2, snapshot=False, closed=[(1, 0)])
    updates = sent(node.hear(welcome), Update)
    assert [(u.origin, u.seq, u.batch) for u in updates] == [(5, 1, 1), (5, 2, 2)]


def test_closed_twice_before_the_welcome_came(node: Any, make: Any) -> None:
    """It was admitted as 5, never heard of it, and lost that id as well."""
    node.training()
    node.step(make.published(1))
    node.hear(make.closed(1, 0))
    node.step(ev.Opened(make.join().address))
    assert only(node.hear(make.closed(5, 0, count=2)), ev.Reopen)
    join = sent(node.step(ev.Opened(make.join().address)), Join)[0]
    assert join.count == 3
    closed = [(1, 0), (5, 0)]
    welcome = make.welcome(6, count=3, edge=3, snapshot=False, closed=closed)
    assert [(u.origin, u.seq) for u in sent(node.hear(welcome), Update)] == [(6, 1)]


def test_the_same_closing_heard_twice_is_one_return(node: Any, make: Any) -> None:
    node.training()
    node.hear(make.closed(1, 0))
    assert node.hear(make.closed(1, 0)) == []
    assert node.me.count == 2


def test_a_closing_of_somebody_else_is_ignored(node: Any, make: Any) -> None:
    node.training()
    assert node.hear(make.closed(7, 0, token=0, count=0, free=False)) == []
    assert node.order is Order.TRAIN


def test_a_superseded_node_fails(node: Any, make: Any) -> None:
    node.training()
    node.hear(make.closed(1, 0, free=False, reason="another attempt"))
    assert (node.order, node.machine.command.reason) == (Order.FAIL, "another attempt")


def test_whoever_comes_back_before_it_had_a_replica_starts_afresh(node: Any, make: Any) -> None:
    node.joined()
    node.hear(make.closed(1, 0))
    node.step(ev.Opened(make.join().address))
    welcome = make.welcome(5, count=2, edge=2, closed=[(1, 0)], epoch=1, grants=["f"])
    admitted = only(node.hear(welcome), ev.Admitted)
    assert (admitted.returned, admitted.epoch, admitted.grants) == (False, 1, ("f",))


def test_whoever_comes_back_while_its_first_replica_is_installed_has_one(
    node: Any, make: Any
) -> None:
    """The trainer will take Install before Admitted: its kept files are added already."""
    node.joined()
    node.step(ev.Paused(1))
    only(node.hear(make.chunk(0)), ev.Install)
    node.hear(make.closed(1, 0))
    node.step(ev.Opened(make.join().address))
    welcome = make.welcome(5, count=2, edge=2, closed=[(1, 0)], grants=["f"])
    assert only(node.hear(welcome), ev.Admitted).returned


def test_nobody_waits_for_what_a_newcomer_or_returner_missed(node_with: Any, make: Any) -> None:
    node = node_with(max_lead=2).training()
    effects = returned(node, make, 0)  # the slowest is at 9 now
    assert sent(effects, Report)[0].steps == 9
    node.hear(make.state(slowest=9))
    assert node.machine.command.steps_max == 2  # of its own steps, 0 so far
    node.step(ev.Progressed(0, 2, 2))
    assert node.order is Order.WAIT
    assert sent(node.tick(0.1), Report)[0].steps == 11


def test_a_newcomer_counts_from_where_the_slowest_is_when_it_can_train(
    node_with: Any, make: Any
) -> None:
    node = node_with(max_lead=2).joined()
    node.hear(make.state(slowest=50))
    node.hear(make.chunk(0))
    node.step(ev.Paused(1))
    node.tick()
    node.step(ev.Installed())
    node.step(ev.Busy(Activity.WAITING))
    assert sent(node.tick(0.1), Report)[0].steps == 50


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
