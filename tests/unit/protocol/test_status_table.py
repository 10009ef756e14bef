"""Tests of ``StatusTable``: which statuses are in the next report, and when they are repeated."""

from __future__ import annotations

from typing import Any

from sparkstrom.codec.messages import AuditAnswer
from sparkstrom.protocol.worker.node_state import (
    AUDIT_COST,
    COST_MAX,
    COUNTERS_PER_COST,
    StatusTable,
)


def nodes(ledger: StatusTable) -> list[int]:
    """Return the nodes whose statuses are in the next report."""
    return [status.node for status in ledger.next_report()[1]]


def filled(make: Any, *known: int, via: int = 5) -> StatusTable:
    """Return a table with one status of each of these nodes, received through the child ``via``."""
    ledger = StatusTable()
    for node in known:
        assert ledger.update(make.status(node), via)
    return ledger


def acknowledge_next_report(ledger: StatusTable) -> None:
    """Acknowledge the next report."""
    ledger.on_ack(ledger.next_report()[0])


def test_new_status_is_reported_until_acknowledged(make: Any) -> None:
    """A new status is in every report until the parent acknowledges it."""
    ledger = filled(make, 1, 2)
    stamp, news = ledger.next_report()
    assert [status.node for status in news] == [1, 2]
    assert ledger.next_report() == (stamp, news)
    ledger.on_ack(stamp)
    assert not ledger.has_pending
    assert ledger.next_report() == (stamp, [])


def test_status_changed_after_report_stays_pending(make: Any) -> None:
    """A status that changes after a report stays pending when that report is acknowledged."""
    ledger = filled(make, 1, 2)
    stamp, _ = ledger.next_report()
    assert ledger.update(make.status(2, count=2, steps=9), 5)
    ledger.on_ack(stamp)  # acknowledges the first two statuses only
    (status,) = ledger.next_report()[1]
    assert (status.node, status.steps) == (2, 9)


def test_lost_report_is_repeated_in_next_report(make: Any) -> None:
    ledger = filled(make, 1)
    ledger.next_report()
    ledger.update(make.status(2), 5)
    assert nodes(ledger) == [1, 2]


def test_status_with_older_edge_or_count_is_ignored(make: Any) -> None:
    """A status with a lower edge, or with the same edge and no higher count, is ignored."""
    ledger = filled(make, 1)
    assert ledger.update(make.status(1, edge=2, count=1, steps=7), 5)
    for edge, count in ((2, 1), (1, 9)):
        assert not ledger.update(make.status(1, edge=edge, count=count), 5)
    assert [status.steps for status in ledger.next_report()[1]] == [7]


def test_old_acknowledgement_changes_no_pending_status(make: Any) -> None:
    """An overtaken acknowledgement neither restores nor removes pending statuses."""
    ledger = filled(make, 1)
    old, _ = ledger.next_report()
    ledger.update(make.status(2), 5)
    acknowledge_next_report(ledger)
    ledger.update(make.status(3), 5)
    ledger.on_ack(old)
    assert nodes(ledger) == [3]


def test_report_has_longest_pending_statuses_up_to_cost_limit(make: Any) -> None:
    """A report has the statuses that have been pending longest, up to the cost limit."""
    plain = COST_MAX
    ledger = filled(make, *range(1, plain + 11))
    told = []
    while ledger.has_pending:
        told.append(nodes(ledger))
        acknowledge_next_report(ledger)
    assert told == [list(range(1, plain + 1)), list(range(plain + 1, plain + 11))]


def test_counters_and_hashes_raise_cost_of_status(make: Any) -> None:
    """Statuses with counters or a hash cost more, so fewer of them fit into a report."""
    counters = {str(i): 1.0 for i in range(COUNTERS_PER_COST * AUDIT_COST)}
    rich = COST_MAX // (1 + AUDIT_COST)
    ledger = StatusTable()
    for node in range(1, 2 * rich + 1):
        extra = {"stats": counters} if node % 2 else {"audit": AuditAnswer(1, "d", None)}
        ledger.update(make.status(node, **extra), 5)
    assert nodes(ledger) == list(range(1, rich + 1))


def test_status_above_cost_limit_is_sent_alone(make: Any, monkeypatch: Any) -> None:
    """A status that alone exceeds the cost limit is sent in a report of its own."""
    monkeypatch.setattr("sparkstrom.protocol.worker.node_state.COST_MAX", AUDIT_COST)
    ledger = StatusTable()
    for node in (1, 2):
        ledger.update(make.status(node, audit=AuditAnswer(1, "d", None)), 5)
    assert nodes(ledger) == [1]


def test_new_parent_gets_all_statuses(make: Any) -> None:
    """A new parent gets all statuses; acknowledgements of earlier reports do not count for it."""
    ledger = filled(make, 1, 2)
    acknowledge_next_report(ledger)
    ledger.resend_all()
    assert nodes(ledger) == [1, 2]
    before, _ = ledger.next_report()
    ledger.resend_all()
    ledger.on_ack(before)  # acknowledges a report to the former parent
    assert nodes(ledger) == [1, 2]


def test_drop_subtree_removes_child_and_all_nodes_below(make: Any) -> None:
    """Dropping a child removes its status and those of all nodes below it."""
    ledger = filled(make, 1, 2, via=5)
    ledger.update(make.status(3), 6)
    ledger.drop_subtree(5)
    assert nodes(ledger) == [3]
    assert [ledger.child_towards(node) for node in (1, 2, 3)] == [None, None, 6]
    assert ledger.update(make.status(1), 6)  # the same status, through its new parent
    assert ledger.child_towards(1) == 6


def test_status_from_other_child_moves_node_to_that_child(make: Any) -> None:
    """A status from another child moves the node there; dropping the first child keeps it."""
    ledger = filled(make, 1, via=5)
    assert not ledger.update(make.status(1), 6)  # the same status is not news
    assert ledger.child_towards(1) == 6
    ledger.drop_subtree(5)
    assert nodes(ledger) == [1]


def test_acknowledged_counters_are_reported_again_only_if_changed(make: Any) -> None:
    """Counters are reported until they are acknowledged, and later only if they have changed."""
    ledger = StatusTable()
    ledger.update(make.status(1, stats={"steps": 1.0}), 5)
    stamp, _ = ledger.next_report()
    ledger.update(make.status(1, count=2, stats={"steps": 1.0}), 5)
    assert ledger.next_report()[1][0].stats == {"steps": 1.0}, "they may be lost"
    acknowledge_next_report(ledger)
    ledger.update(make.status(1, count=3, stats={"steps": 1.0}), 5)
    assert ledger.next_report()[1][0].stats is None, "nothing has changed"
    ledger.update(make.status(1, count=4, stats={"steps": 2.0}), 5)
    assert ledger.next_report()[1][0].stats == {"steps": 2.0}
    ledger.on_ack(stamp)  # a late acknowledgement of the first counters
    assert ledger.next_report()[1][0].stats == {"steps": 2.0}


def test_a_relay_keeps_counters_that_a_later_status_leaves_out(make: Any) -> None:
    ledger = StatusTable()
    ledger.update(make.status(1, stats={"steps": 1.0}), 5)
    ledger.update(make.status(1, count=2), 5)
    assert ledger.next_report()[1][0].stats == {"steps": 1.0}
    acknowledge_next_report(ledger)
    ledger.update(make.status(1, count=3), 5)
    assert ledger.next_report()[1][0].stats is None
    ledger.resend_all()
    assert ledger.next_report()[1][0].stats == {"steps": 1.0}, "a new parent has none"
