"""A worker's machine: falling behind, losing its id, coming back."""

from __future__ import annotations

from typing import Any

import msgspec

from sparkstrom.codec.messages import (
    Activity,
    AskChunk,
    Join,
    Message,
    Report,
    Update,
)
from sparkstrom.protocol import events as ev
from sparkstrom.protocol.events import Order


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
