"""Family: what each child is fed, from where it goes on, and what it is asked and told."""

from __future__ import annotations

from typing import Any

import pytest

from sparkstrom.codec.messages import Again, Attached, Behind, Committed, MergedRange, State
from sparkstrom.protocol import events as ev
from sparkstrom.protocol.family import AGAIN_SPACING_S, STATE_SPACING_S, Child, Family
from sparkstrom.protocol.leases import Leases
from sparkstrom.protocol.replay import HEADER_BYTES, RETRY_FIRST_S, History, Log
from tests.unit.protocol.spoken import every, only, sent

PLENTY = 10**6
ONE = HEADER_BYTES + 4  # a commit of these tests
SUM_BYTES = 100  # a sum of any number of them
DEAR = 10**9


class Parent:
    """A family with a history that grows, at time ``now_s``."""

    def __init__(
        self,
        make: Any,
        *,
        window_bytes: int = PLENTY,
        merged_bytes: int = DEAR,
        log_bytes: int = PLENTY,
    ) -> None:
        self.make = make
        self.history = History(Log(log_bytes), whole=True)
        self.leases = Leases(10.0, 0.0)
        self.family = Family(window_bytes, merged_bytes, self.history, self.leases)
        self.now_s = 0.0

    def child(self, node: int = 5, edge: int = 50) -> Child:
        if node not in self.family.children:
            self.family.adopt(self.make.adopt(node, edge), self.now_s)
        return self.family.children[node]

    def attach(self, have: int = 0, *ids: int, node: int = 5, **fields: Any) -> list[ev.Effect]:
        attach = self.make.attach(have, *(ids or (node,)), **({"whole": True} | fields))
        return self.family.on_attach(self.child(node), attach, self.now_s)

    def append(self, *entries: Any) -> list[ev.Effect]:
        """These come, are applied, and go on to all children."""
        for entry in entries:
            self.history.append(entry)
            self.history.applied = entry.commit
        return self.family.feed_all(self.now_s)

    def commit(self, count: int = 1, origin: int = 9) -> list[ev.Effect]:
        """So many more of this origin's commits."""
        head = self.history.log.head
        return self.append(*(self.make.committed(head + i, origin) for i in range(1, count + 1)))

    def report(self, received: int, node: int = 5, **fields: Any) -> list[ev.Effect]:
        report = self.make.report(received=received, **fields)
        return self.family.on_report(self.child(node), report, self.now_s)


@pytest.fixture
def parent_with(make: Any) -> Any:
    return lambda **given: Parent(make, **given)


@pytest.fixture
def parent(make: Any) -> Parent:
    return Parent(make)


def fed(effects: list[ev.Effect], node: int = 5) -> list[int]:
    """Commits that went to this child, one by one."""
    return [committed.commit for committed in sent(effects, Committed, node)]


# -- edges -------------------------------------------------------------------------------------


def test_a_child_gets_its_edge_once(parent: Any, make: Any) -> None:
    order = make.adopt(5, 50)
    opened = ev.OpenEdge(5, 50, order.local, order.peer)
    assert parent.family.adopt(order, 0.0) == [opened]
    assert parent.family.adopt(order, 0.0) == []
    assert parent.family.adopt(make.adopt(5, 49), 0.0) == []
    assert parent.leases.holds(5)


def test_a_newer_edge_begins_anew(parent: Any, make: Any) -> None:
    parent.attach()
    parent.commit(2)
    assert parent.family.adopt(make.adopt(5, 51), 0.0)
    child = parent.family.children[5]
    assert (child.edge, child.answer, child.downlink.sent) == (51, None, 0)
    assert fed(parent.attach(1)) == [2]


def test_a_child_is_disowned_by_its_edge_or_a_newer_one(parent: Any) -> None:
    parent.child(5, 50)
    assert parent.family.disown(5, 49) == []
    assert parent.family.disown(5, 50) == [ev.CloseEdge(5)]
    assert parent.family.disown(5) == []
    assert not parent.leases.holds(5)


# -- attaching ---------------------------------------------------------------------------------


def test_whoever_the_log_reaches_follows(parent: Any) -> None:
    parent.commit(3)
    effects = parent.attach(1)
    assert sent(effects, Attached) == [Attached(base=1, snapshot=False, last=[])]
    assert fed(effects) == [2, 3]
    assert fed(parent.commit()) == [4]


def test_whoever_has_no_replica_takes_a_snapshot(parent: Any) -> None:
    parent.commit(3)
    parent.history.applied = 2
    effects = parent.attach(0, whole=False)
    assert sent(effects, Attached) == [Attached(base=2, snapshot=True, last=[(9, 2)])]
    assert fed(effects) == [3]


def test_whoever_the_log_does_not_reach_takes_a_snapshot(parent_with: Any) -> None:
    parent = parent_with(log_bytes=2 * ONE)
    parent.commit(5)
    assert [a.snapshot for a in sent(parent.attach(2, node=5), Attached)] == [True]
    assert [a.snapshot for a in sent(parent.attach(3, node=6), Attached)] == [False]


def test_whoever_holds_chunks_goes_on_with_them_where_the_log_reaches(parent_with: Any) -> None:
    parent = parent_with(log_bytes=2 * ONE)
    parent.commit(5)
    answers = sent(parent.attach(4, whole=False, catching=True), Attached)
    assert answers == [Attached(base=4, snapshot=False, last=[])]
    answers = sent(parent.attach(1, node=6, whole=False, catching=True), Attached)
    assert [a.snapshot for a in answers] == [True]


def test_whoever_is_ahead_of_its_parent_waits_for_it(parent: Any) -> None:
    parent.commit(2)
    effects = parent.attach(4)
    assert sent(effects, Attached) == [Attached(base=4, snapshot=False, last=[])]
    assert fed(parent.commit(2)) == []
    assert fed(parent.commit()) == [5]


def test_without_a_replica_there_is_nothing_to_copy(parent: Any) -> None:
    parent.commit(3)
    parent.history.whole = False
    assert parent.attach(0, whole=False) == []
    assert parent.child().answer is None
    assert fed(parent.commit()) == []
    assert fed(parent.attach(2, node=6), 6) == [3, 4]  # who needs no copy follows all the same
    parent.history.whole = True
    assert [a.base for a in sent(parent.attach(0, whole=False), Attached)] == [4]


def test_the_same_words_get_the_same_answer(parent: Any) -> None:
    """It may have got the first answer, and must not be set back to another base."""
    first = sent(parent.attach(0, whole=False), Attached)
    parent.commit(2)
    again = parent.attach(0, whole=False)
    assert sent(again, Attached) == first
    assert fed(again) == []


# -- feeding -----------------------------------------------------------------------------------


def test_nobody_is_fed_before_it_has_said_what_it_holds(parent: Any) -> None:
    parent.child()
    assert parent.commit(2) == []


def test_the_number_alone_goes_to_its_origin_under_all_its_ids(parent: Any, make: Any) -> None:
    parent.attach(0, 3, 5)
    parent.attach(0, node=6)
    effects = parent.append(make.committed(1, 3), make.committed(2, 5), make.committed(3, 6))
    assert [len(c.payload) for c in sent(effects, Committed, 5)] == [0, 0, 4]
    assert [len(c.payload) for c in sent(effects, Committed, 6)] == [4, 4, 0]
    number = sent(effects, Committed, 5)[0]
    assert (number.commit, number.origin, number.seq, number.form) == (1, 3, 1, 0)


def test_a_slow_child_holds_up_nobody_else(parent_with: Any) -> None:
    parent = parent_with(window_bytes=2 * ONE)
    parent.attach(node=5)
    parent.attach(node=6)
    parent.commit(2)
    parent.report(2, node=6)
    effects = parent.commit(2)
    assert (fed(effects, 5), fed(effects, 6)) == ([], [3, 4])
    assert fed(parent.report(1, node=5)) == [3]


def test_what_is_not_acknowledged_goes_again(parent: Any, make: Any) -> None:
    parent.attach()
    parent.commit(2)
    assert fed(parent.family.tick(make.state(), RETRY_FIRST_S / 2)) == []
    assert fed(parent.family.tick(make.state(), RETRY_FIRST_S)) == [1, 2]


# -- sums of many ------------------------------------------------------------------------------


@pytest.mark.parametrize("lacking", [2, 3])
def test_a_sum_goes_where_it_takes_less_than_all_that_is_missing(
    parent_with: Any, lacking: int
) -> None:
    parent = parent_with(merged_bytes=SUM_BYTES)
    parent.commit(1 + lacking)
    effects = parent.attach(1)
    if lacking * ONE <= HEADER_BYTES + SUM_BYTES:
        assert fed(effects) == [2, 3]
        return
    merged = only(effects, ev.SendMerged)
    assert (merged.to, merged.after, merged.commit, merged.last) == (5, 1, 4, [(9, 4)])
    assert [entry.commit for entry in merged.entries] == [2, 3, 4]
    assert fed(effects) == []


def test_after_a_sum_the_next_go_singly(parent_with: Any) -> None:
    parent = parent_with(merged_bytes=SUM_BYTES)
    parent.commit(5)
    parent.attach()
    assert fed(parent.commit()) == [6]


def test_no_sum_while_anything_is_under_way(parent_with: Any) -> None:
    """What arrives in between would make the child refuse it."""
    parent = parent_with(merged_bytes=SUM_BYTES, window_bytes=ONE)
    parent.attach()
    parent.commit()
    assert parent.commit(8) == []
    assert only(parent.report(1), ev.SendMerged).after == 1


def test_no_sum_for_a_child_that_takes_a_snapshot(parent_with: Any) -> None:
    parent = parent_with(merged_bytes=SUM_BYTES)
    parent.attach(0, whole=False)
    assert fed(parent.commit(8)) == list(range(1, 9))
    parent.report(8, catching=True)
    assert fed(parent.commit(8)) == list(range(9, 17))
    parent.report(16, catching=False)
    assert every(parent.commit(8), ev.SendMerged)


def test_a_sum_says_how_far_each_origin_is_in_it(parent_with: Any, make: Any) -> None:
    parent = parent_with(merged_bytes=1)
    parent.append(make.merged(0, 4, [(7, 2), (8, 3)]))
    parent.append(make.committed(5, 8, seq=4), make.committed(6, 9, seq=1))
    merged = only(parent.attach(), ev.SendMerged)
    assert (merged.after, merged.commit) == (0, 6)
    assert dict(merged.last) == {7: 2, 8: 4, 9: 1}


def test_what_came_as_a_sum_goes_on_as_one_to_whoever_is_where_it_begins(
    parent: Any, make: Any
) -> None:
    parent.commit(2)
    parent.attach(2, node=5)
    parent.attach(1, node=6)
    parent.report(2, node=5)
    merged = make.merged(2, 6)
    effects = parent.append(merged)
    assert sent(effects, MergedRange, 5) == [merged]
    assert sent(effects, MergedRange, 6) == [merged]  # after the second commit


def test_whoever_is_inside_of_a_sum_takes_a_snapshot(parent: Any, make: Any) -> None:
    parent.append(make.merged(0, 6))
    (answer,) = sent(parent.attach(3), Attached)
    assert (answer.snapshot, answer.base) == (True, 6)


def test_whoever_holds_chunks_takes_another_snapshot_where_a_sum_follows(
    parent: Any, make: Any
) -> None:
    parent.commit(2)
    parent.append(make.merged(2, 6))
    effects = parent.attach(1, whole=False, catching=True)
    assert fed(effects) == [2]
    assert sent(effects, Behind) == [Behind(6, [(9, 6)])]


# -- falling behind ----------------------------------------------------------------------------


def test_whoever_the_log_leaves_behind_takes_a_snapshot(parent_with: Any) -> None:
    parent = parent_with(log_bytes=2 * ONE, window_bytes=2 * ONE)
    parent.attach()
    parent.commit(2)
    effects = parent.commit(4)
    assert sent(effects, Behind) == [Behind(6, [(9, 6)])]
    assert fed(effects) == []
    assert fed(parent.commit()) == [7]


def test_who_is_behind_itself_promises_no_snapshot(parent_with: Any) -> None:
    parent = parent_with(log_bytes=2 * ONE, window_bytes=2 * ONE)
    parent.attach()
    parent.commit(2)
    parent.history.whole = False
    assert parent.commit(4) == []
    assert parent.report(2) == []
    parent.history.whole = True
    assert sent(parent.family.feed_all(0.0), Behind) == [Behind(6, [(9, 6)])]


# -- asking and telling ------------------------------------------------------------------------


def test_an_origin_is_asked_for_again_but_not_all_the_time(parent: Any) -> None:
    child = parent.child()
    assert parent.family.again(child, 7, 1.0) == [ev.Send(5, Again(7))]
    assert parent.family.again(child, 7, 1.0 + AGAIN_SPACING_S / 2) == []
    assert parent.family.again(child, 8, 1.0) == [ev.Send(5, Again(8))]
    assert parent.family.again(child, 7, 1.0 + AGAIN_SPACING_S) == [ev.Send(5, Again(7))]


def test_the_state_goes_to_each_with_what_was_heard_of_it(parent: Any, make: Any) -> None:
    parent.attach(node=5)
    parent.attach(node=6)
    parent.report(0, node=5, stamp=7)
    effects = parent.family.tick(make.state(), 1.0)
    assert [s.heard for s in sent(effects, State, 5)] == [7]
    assert [s.heard for s in sent(effects, State, 6)] == [0]
    assert parent.family.tick(make.state(), 2.0) == []


def test_a_report_is_answered_with_the_state_but_not_too_often(parent: Any, make: Any) -> None:
    parent.attach()
    parent.family.tick(make.state(), 1.0)
    parent.report(0, stamp=3)
    parent.report(0, stamp=2)  # it was overtaken
    assert parent.family.tick(make.state(), 1.0 + STATE_SPACING_S / 2) == []
    effects = parent.family.tick(make.state(), 1.0 + STATE_SPACING_S)
    assert [s.heard for s in sent(effects, State)] == [3]


def test_a_new_state_goes_to_all(parent: Any, make: Any) -> None:
    parent.child(5)
    parent.child(6)
    parent.family.tick(make.state(), 1.0)
    parent.family.tell_all()
    assert [e.to for e in every(parent.family.tick(make.state(), 2.0), ev.Send)] == [5, 6]
