"""Tests of the timeouts of a silent edge, which double, and of ``FitView.has_steady_contact``."""

from __future__ import annotations

from sparkstrom.codec.messages import Address
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.worker.node import Identity, Node, NodeLimits
from sparkstrom.protocol.worker.node_state import FitView

WHO = Identity(
    token=1,
    partition=0,
    attempt=1,
    rows=1,
    checksum=1,
    batches=1,
    host="h",
    executor="e",
    pid=1,
    version="v",
)


def test_each_unanswered_edge_doubles_next_timeout() -> None:
    """Each edge without an answer doubles the timeout for the next one.

    Seed 30343 found: with round trips near half a lease, no answer ever arrived in time for its
    edge.
    """
    node = Node(WHO, NodeLimits(lease_s=2.0), 0.0)
    node.step(ev.StreamsOpened(Address("h", 1, 1, 2)), 0.0)
    reopened = []
    for tick in range(1, 400):
        now_s = tick / 20
        if ev.ReopenStreams() in node.step(ev.Tick(), now_s):
            reopened.append(now_s)
            node.step(ev.StreamsOpened(Address("h", 1, 1, 2)), now_s)
    waits = [b - a for a, b in zip([0.0, *reopened], reopened, strict=False)]
    assert [round(wait) for wait in waits[:4]] == [1, 2, 4, 8]


def test_contact_is_steady_only_a_lease_after_gap() -> None:
    """After a gap, contact is steady only after another lease, whatever ended the gap."""
    fit = FitView(NodeLimits(lease_s=2.0), 0.0)
    for tick in range(1, 6):
        fit.on_master_heard(tick / 2)
    assert fit.has_steady_contact(0.0, 2.5)
    for now_s in (4.0, 4.5):  # after 1.5 s without a sign
        fit.on_master_heard(now_s)
        assert not fit.has_steady_contact(0.0, now_s)
    for tick in range(10, 14):
        fit.on_master_heard(tick / 2)
    assert fit.has_steady_contact(0.0, 6.5)
