"""Tests of a relay whose updates wait for room to its parent. It is node 1, its parent node 4."""

from __future__ import annotations

from typing import Any

import pytest

from sparkstrom.codec.messages import OptimizerChunk, ResendRequest, State, Update
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.children import FlowLimits
from sparkstrom.protocol.common.events_and_effects import Command
from sparkstrom.protocol.common.flow_control import HEADER_BYTES
from sparkstrom.protocol.worker.parent_link import RETRY_LEAST_S
from tests.unit.protocol.effect_filters import every, sent

PARENT = 4
ONE = HEADER_BYTES + 4  # weight of one update of these tests


@pytest.fixture
def relay(node_with: Any) -> Any:
    """A relay whose link to the parent takes two updates at a time; its children are 5 and 6."""
    serving = FlowLimits(2 * ONE, 10**6, 10**6, 10)
    return node_with(parent=PARENT, flow_limits=serving).training().with_child(5).with_child(6)


def updates_sent_to_parent(effects: list[ev.Effect]) -> list[tuple[int, int]]:
    """Return (origin, seq) of the updates that were sent to the parent."""
    return [(update.origin, update.seq) for update in sent(effects, Update, PARENT)]


def acknowledge_updates(relay: Any, count: int, **fields: Any) -> list[ev.Effect]:
    """Let the parent acknowledge ``count`` updates as forwarded; return the effects."""
    effects: list[ev.Effect] = relay.alive(
        bytes_received=count * ONE, bytes_forwarded=count * ONE, **fields
    )
    return effects + list(relay.tick(0.1))


def acknowledged_to_child(effects: list[ev.Effect], child: int) -> list[tuple[int, int]]:
    """Return (received, forwarded) updates from each state that was sent to this child."""
    return [
        (s.bytes_received // ONE, s.bytes_forwarded // ONE) for s in sent(effects, State, child)
    ]


# -- waiting for room ----------------------------------------------------------------------------


def test_updates_without_room_wait_for_acknowledgements(relay: Any, make: Any) -> None:
    """Updates for which the link has no room wait, and are sent as acknowledgements arrive."""
    for seq in (1, 2):
        assert updates_sent_to_parent(relay.hear(make.update(5, seq), sender=5)) == [(5, seq)]
    for seq in (3, 4):
        assert updates_sent_to_parent(relay.hear(make.update(5, seq), sender=5)) == []
    assert updates_sent_to_parent(acknowledge_updates(relay, 1)) == [(5, 3)]
    assert updates_sent_to_parent(acknowledge_updates(relay, 3)) == [(5, 4)]
    assert not relay.me.link.waiting


def test_updates_are_forwarded_in_order_of_arrival(relay: Any, make: Any) -> None:
    """Updates go up in their order of arrival, own ones included; none overtakes another."""
    relay.hear(make.update(5, 1), sender=5)
    relay.hear(make.update(6, 1, b"x" * 100), sender=6)
    relay.step(make.published(1))
    relay.hear(make.update(5, 2, b""), sender=5)
    assert updates_sent_to_parent(relay.tick()) == []
    effects = acknowledge_updates(relay, 1)
    assert updates_sent_to_parent(effects) == [(6, 1)]
    effects = relay.alive(bytes_received=10**6, bytes_forwarded=10**6)
    assert updates_sent_to_parent(effects) == [(1, 1), (5, 2)], "as soon as there is room"


def test_state_reports_bytes_received_and_forwarded_to_child(relay: Any, make: Any) -> None:
    """A state reports to a child the bytes received from it, and those forwarded to the parent."""
    for seq in (1, 2, 3, 4):
        relay.hear(make.update(5, seq), sender=5)
    assert acknowledged_to_child(relay.tick(0.1), 5) == [(4, 2)]
    assert acknowledged_to_child(acknowledge_updates(relay, 2) + relay.tick(0.1), 5)[-1] == (4, 4)


def test_blocked_relay_stores_at_most_one_window_of_child(
    relay: Any, node_with: Any, make: Any
) -> None:
    """A relay that cannot forward stores at most one window of a child's updates."""
    child = node_with(parent=1, flow_limits=relay.me.limits.flow_limits).training()
    for batch in range(1, 20):
        for update in sent(child.step(make.published(batch)), Update):
            relay.hear(update, sender=5)
        for state in sent(relay.tick(0.1), State, 5):
            child.hear(state)
        for update in sent(child.tick(0.1), Update):
            relay.hear(update, sender=5)
    assert len(relay.me.link.waiting) == 2  # two others are under way to the parent
    assert len(child.me.link.waiting) == 19 - 4


def test_slowly_acknowledged_updates_are_not_sent_twice(relay: Any, make: Any) -> None:
    """No update is sent twice while its bytes keep arriving slowly, here for a minute."""
    relay.hear(make.update(5, 1), sender=5)
    relay.step(make.published(1))
    effects: list[ev.Effect] = []
    for tick in range(120):
        effects += relay.alive(bytes_received=tick) + relay.tick(0.5)
    assert updates_sent_to_parent(effects) == []
    assert every(effects, ev.ReopenStreams) == []


def test_resend_request_does_not_duplicate_waiting_own_update(relay: Any, make: Any) -> None:
    """A resend request does not duplicate an own update that still waits for room."""
    for batch in (1, 2, 3):
        relay.step(make.published(batch))
    assert updates_sent_to_parent(relay.hear(ResendRequest(1), 1.0)) == []
    assert updates_sent_to_parent(acknowledge_updates(relay, 2)) == [(1, 1), (1, 2)]
    assert updates_sent_to_parent(acknowledge_updates(relay, 4)) == [(1, 3)]
    assert not relay.me.link.waiting


def test_uncommitted_update_is_resent_after_retry_least_s(relay: Any, make: Any) -> None:
    """An uncommitted update is sent again after RETRY_LEAST_S without further acknowledgements."""
    relay.step(make.published(1))
    effects: list[ev.Effect] = []
    for _ in range(int(RETRY_LEAST_S) - 1):
        effects += acknowledge_updates(relay, 1)
    assert updates_sent_to_parent(effects) == []
    for _ in range(2 * int(RETRY_LEAST_S)):
        effects += relay.alive(bytes_received=ONE, bytes_forwarded=ONE) + relay.tick(1.0)
    assert updates_sent_to_parent(effects) == [(1, 1)]


# -- a new edge to the parent --------------------------------------------------------------------


def test_relay_resends_only_own_updates_over_new_edge(relay: Any, make: Any) -> None:
    """Over a new edge the relay resends only its own updates; its children must resend theirs.

    Waiting updates of children count as forwarded; sent from here, they would arrive twice.
    """
    relay.step(make.published(1))
    for seq in (1, 2, 3):
        relay.hear(make.update(5, seq), sender=5)
    relay.opened()
    relay.told(make.welcome(edge=9, parent=PARENT, request=relay.me.membership.request))
    effects = relay.hear(make.attached(0, snapshot=False))
    assert updates_sent_to_parent(effects) == [(1, 1)]
    assert [send.to for send in every(effects, ev.Send) if send.message == ResendRequest(None)] == [
        5,
        6,
    ]
    assert not relay.me.link.waiting
    assert relay.me.link.window.under_way == ONE
    assert acknowledged_to_child(relay.tick(0.1), 5)[-1] == (3, 3)


def test_update_dropped_without_parent_counts_as_forwarded(relay: Any, make: Any) -> None:
    """Without a parent, a child's update is dropped but counts as received and forwarded."""
    relay.opened()
    assert relay.hear(make.update(5, 1), sender=5) == []
    child = relay.me.children.by_node[5]
    assert (child.bytes_received, child.bytes_forwarded) == (ONE, ONE)


def test_resend_request_without_origin_is_obeyed_after_recent_resend(relay: Any, make: Any) -> None:
    """A resend request without an origin is obeyed even just after another resend.

    It means a new edge further up, before which the first resend may have been dropped.
    """
    relay.step(make.published(1))
    assert updates_sent_to_parent(relay.hear(ResendRequest(1), 1.0)) == [(1, 1)]
    assert updates_sent_to_parent(relay.hear(ResendRequest(1))) == []
    relay.alive(bytes_received=10**6, bytes_forwarded=10**6)
    assert updates_sent_to_parent(relay.hear(ResendRequest(None))) == [(1, 1)]


def test_new_edge_starts_with_byte_counts_at_0(relay: Any, make: Any) -> None:
    """A new edge starts with all byte counts at 0."""
    relay.hear(make.update(5, 1), sender=5)
    acknowledge_updates(relay, 1)
    relay.hear(make.committed(1))
    relay.told(make.welcome(edge=50, parent=PARENT, request=relay.me.membership.request))
    assert (relay.me.link.window.sent, relay.me.link.bytes_received, relay.me.link.arriving) == (
        0,
        0,
        0,
    )
    relay.hear(make.attached(1, snapshot=False))
    relay.hear(make.update(5, 1), sender=5)
    assert relay.me.link.window.since_s is not None
    acknowledge_updates(relay, 1)
    assert relay.me.link.window.since_s is None


def test_updates_of_childs_old_edge_do_not_count_on_new_edge(relay: Any, make: Any) -> None:
    """Updates that came over a child's old edge do not count as forwarded on its new edge."""
    for seq in (1, 2, 3):
        relay.hear(make.update(5, seq), sender=5)
    relay.with_child(5)
    acknowledge_updates(relay, 2)
    child = relay.me.children.by_node[5]
    assert (child.bytes_received, child.bytes_forwarded) == (0, 0)


# -- bytes of children -----------------------------------------------------------------------------


def test_bytes_of_incomplete_message_are_acknowledged_to_child(relay: Any, make: Any) -> None:
    """Bytes of an incomplete message from a child are acknowledged to that child as received."""
    relay.step(ev.DataArriving(5, 10 * ONE))
    assert acknowledged_to_child(relay.tick(0.1), 5) == [(10, 0)]
    relay.hear(make.update(5, 1), sender=5)
    assert acknowledged_to_child(relay.tick(0.1), 5) == [(1, 1)]


def test_complete_optimizer_chunk_resets_incomplete_bytes(relay: Any, make: Any) -> None:
    """A complete chunk of an optimizer state resets the count of incomplete bytes."""
    relay.step(ev.DataArriving(5, 10 * ONE))
    chunk = OptimizerChunk(asker=77, copy=1, index=0, count=1, payload=b"")
    relay.hear(chunk, sender=5)
    assert relay.me.children.by_node[5].arriving == 0


def test_partial_message_of_unknown_sender_is_ignored(relay: Any) -> None:
    """Part of a message from an unknown sender is ignored."""
    assert relay.step(ev.DataArriving(77, 1000)) == []
    assert relay.order is Command.TRAIN


# -- a dead stream to the parent -------------------------------------------------------------------


def opens_fresh_streams(relay: Any, leases: float, **state: Any) -> bool:
    """Return whether the relay opens fresh streams within ``leases``; the master is alive."""
    for _ in range(int(10 * leases)):
        relay.alive(**state)
        if every(relay.tick(relay.me.limits.lease_s / 10), ev.ReopenStreams):
            return True
    return False


def test_unacknowledged_update_of_child_replaces_edge(relay: Any, make: Any) -> None:
    """A relay replaces its edge if a child's update is not acknowledged, even without own ones."""
    assert not opens_fresh_streams(relay, 1.5)
    relay.hear(make.update(5, 1), sender=5)
    assert opens_fresh_streams(relay, 1.5)


def test_bytes_received_by_parent_keep_edge(relay: Any, make: Any) -> None:
    """Bytes that the parent received prove that the stream works, committed or not."""
    relay.hear(make.update(5, 1), sender=5)
    assert not opens_fresh_streams(relay, 3.5, bytes_received=ONE)
    relay.hear(make.update(5, 2), sender=5)
    assert opens_fresh_streams(relay, 1.5, bytes_received=ONE)
