"""The master's machine: who is a member, under which id, with which grants."""

from __future__ import annotations

from typing import Any

from sparkstrom.codec.messages import (
    Activity,
    Committed,
    Message,
    State,
    Welcome,
)
from sparkstrom.protocol import events as ev


def told(effects: list[ev.Effect], node: int, kind: type[Message]) -> list[Any]:
    messages = [e.message for e in effects if isinstance(e, ev.Send) and e.to == node]
    return [message for message in messages if isinstance(message, kind)]


def every(effects: list[ev.Effect], kind: type[Any]) -> list[Any]:
    return [effect for effect in effects if isinstance(effect, kind)]


def answers(effects: list[ev.Effect]) -> list[Any]:
    return [effect.message for effect in every(effects, ev.Answer)]


# -- losing and returning ----------------------------------------------------------------------


def test_a_silent_node_is_evicted_and_noted(master: Any) -> None:
    effects = master.running().evict(1)
    assert every(effects, ev.CloseEdge) == [ev.CloseEdge(1)]
    assert every(effects, ev.Note)[0].text.startswith("node 1 (partition 0 on h) left: silent for")
    assert master.fit.members.departures[0].node == 1


def test_an_evicted_process_is_told_and_comes_back_under_another_id(master: Any, make: Any) -> None:
    master.running()
    master.hear(1, make.update(1, 1))
    master.evict(1)
    (closed,) = answers(master.join(0))
    assert (closed.node, closed.seq, closed.free) == (1, 1, True)
    (welcome,) = told(master.join(0, count=2, edge=2, have=1, has_replica=True), 3, Welcome)
    assert (welcome.snapshot, welcome.base) == (False, 1)
    assert welcome.closed == [(1, 1)]
    assert welcome.last == [(1, 1), (3, 0)]
    assert master.hear(1, make.update(1, 2)) == []  # nothing of the old id is numbered


def test_a_returner_gets_the_numbers_of_its_old_ids(master: Any, make: Any) -> None:
    master.running()
    master.hear(1, make.update(1, 1))
    master.evict(1)
    effects = master.join(0, count=2, edge=2, have=0, has_replica=True)
    effects += master.tick()
    assert [(c.origin, c.payload) for c in told(effects, 3, Committed)] == [(1, b"")]


def test_a_process_whose_partition_was_taken_over_fails(master: Any) -> None:
    master.running().evict(1)
    assert told(master.join(0, attempt=50, token=7), 3, Welcome)
    (refused,) = answers(master.join(0, count=2, edge=2, have=0, has_replica=True))
    assert (refused.fatal, refused.reason[:15]) == (True, "another attempt")


def test_a_higher_attempt_closes_a_live_owner(master: Any) -> None:
    effects = master.running().join(0, attempt=50, token=7)
    assert every(effects, ev.CloseEdge) == [ev.CloseEdge(1)]
    assert told(effects, 3, Welcome)
    (refused,) = answers(master.join(0))
    assert refused.fatal


def test_a_join_from_before_a_return_is_ignored(master: Any) -> None:
    master.running().evict(1)
    master.join(0, count=2, edge=2)
    assert master.join(0) == []
    assert 3 in master.fit.members.live


def test_the_same_join_gets_the_same_answer(master: Any) -> None:
    first = told(master.join(0), 1, Welcome)
    again = master.join(0)
    assert told(again, 1, Welcome) == first
    assert every(again, ev.OpenEdge) == []


def test_another_edge_of_a_live_node_keeps_what_is_known_of_it(master: Any, make: Any) -> None:
    master.running()
    master.hear(1, make.report(steps=5, after_seq=1, batch=2, activity=Activity.STEPPING))
    effects = master.join(0, edge=2, have=0, has_replica=True)
    assert every(effects, ev.OpenEdge)[0].edge == 2
    member = master.fit.members.live[1]
    assert (member.steps, member.activity) == (5, Activity.STEPPING)
    assert member.pending == (1, (0, 2))
    assert master.join(0, edge=1) == []  # an older one


def test_a_moved_master_forgets_edges_and_takes_them_again(master: Any) -> None:
    master.running()
    effects = master.step(ev.Moved("master", 2))
    assert every(effects, ev.CloseEdge) == [ev.CloseEdge(1), ev.CloseEdge(2)]
    (welcome,) = told(master.join(0), 1, Welcome)
    assert welcome.up.port == 2


# -- refusals ----------------------------------------------------------------------------------


def aborted(effects: list[ev.Effect]) -> ev.Abort:
    (abort,) = every(effects, ev.Abort)
    found: ev.Abort = abort
    return found


def test_another_version_ends_the_fit(master: Any) -> None:
    abort = aborted(master.join(0, version="w"))
    assert (abort.kind, abort.partition) == ("setup", 0)
    assert "v on the driver and w on the executor" in abort.reason


def test_other_rows_in_a_second_attempt_end_the_fit(master: Any) -> None:
    master.running().evict(1)
    abort = aborted(master.join(0, attempt=50, token=7, rows=8))
    assert (abort.kind, abort.host, abort.partition) == ("usage", "h", 0)
    assert "partition 0 had 7 rows" in abort.reason


def test_there_is_no_such_partition(master: Any) -> None:
    (refused,) = answers(master.join(9))
    assert (refused.fatal, refused.reason) == (True, "there is no partition 9")


def test_a_retry_of_a_trained_partition_ends_well(master: Any, make: Any) -> None:
    master.running()
    master.hear(1, make.update(1, 1, epoch=2, batch=0))
    master.evict(1)
    (refused,) = answers(master.join(0, attempt=50, token=7))
    assert not refused.fatal


# -- between fits ------------------------------------------------------------------------------


def test_a_process_keeps_its_grant_when_it_comes_back_without_a_replica(
    master_with: Any, make: Any
) -> None:
    master = master_with(kept={"e": {"f1": 1.0, "f2": 2.0, "f3": 4.0}}).running()
    master.evict(1)
    (welcome,) = told(master.join(0, count=2, edge=2), 3, Welcome)
    assert welcome.grants == ["f1"]
    (other,) = told(master.join(0, attempt=50, token=7), 4, Welcome)
    assert other.grants == ["f3"]


def test_the_pace_of_a_newcomer_is_that_of_the_slowest(master: Any, make: Any) -> None:
    master.running()
    for node, steps in ((1, 8), (2, 5)):
        master.hear(node, make.report(steps=steps, activity=Activity.STEPPING))
    states = told(master.tick(0.1), 1, State)
    assert [state.slowest for state in states] == [5]
    master.evict(1)
    assert told(master.join(0, attempt=50, token=7), 3, Welcome)[0].steps == 5
