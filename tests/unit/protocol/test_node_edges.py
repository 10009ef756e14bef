"""Tests of when a node replaces the edge to its parent, because it is dead and not merely slow."""

from __future__ import annotations

from typing import Any

import pytest

from sparkstrom.codec.messages import Heartbeat, Probe, Update
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.events_and_effects import Command
from sparkstrom.protocol.common.flow_control import message_weight
from tests.unit.protocol.conftest import NodeDriver
from tests.unit.protocol.effect_filters import every, only, sent


def opens_fresh_streams(node: Any, **state: Any) -> bool:
    """Return whether the node opens fresh streams within 12 s in which the master is heard."""
    effects: list[ev.Effect] = []
    for _ in range(24):
        effects += node.alive(**state) + node.tick(0.5)
    return bool(every(effects, ev.ReopenStreams))


def test_edge_without_missing_data_stays_open(node: Any) -> None:
    """An edge over which nothing is missing stays open."""
    assert not opens_fresh_streams(node.training())


def test_unacknowledged_update_replaces_edge(node: Any, make: Any) -> None:
    """A node replaces its edge if a sent update is never acknowledged as received."""
    node.training().step(make.published(1))
    assert opens_fresh_streams(node)


def test_arriving_uncommitted_updates_keep_edge(node: Any, make: Any) -> None:
    """An edge stays if bytes arrive but are not committed: a new one would not be faster."""
    node.training().step(make.published(1))
    effects: list[ev.Effect] = []
    for taken in range(1, 49):
        effects += node.alive(bytes_received=taken) + node.tick(0.5)
    assert node.me.in_flight.uncommitted
    assert not every(effects, ev.ReopenStreams)


def test_missing_sent_commits_replace_edge(node: Any) -> None:
    """A node replaces its edge if commits that the parent has sent never arrive."""
    assert opens_fresh_streams(node.training(), head=3, sent=3)


def test_commits_not_yet_sent_by_parent_keep_edge(node: Any) -> None:
    """An edge stays if the parent has not sent the commits: they wait for room or memory there."""
    assert not opens_fresh_streams(node.training(), head=3)


def test_edge_timeout_starts_when_data_are_sent(node: Any) -> None:
    """The timeout counts from when data were sent, not from the last data before."""
    node.training()
    effects: list[ev.Effect] = []
    for _ in range(60):
        effects += node.alive() + node.tick(0.5)
    for _ in range(18):
        effects += node.alive(head=1, sent=1) + node.tick(0.5)
    assert not every(effects, ev.ReopenStreams)
    assert opens_fresh_streams(node, head=1, sent=1)


def test_edge_timeout_doubles_with_each_edge_given_up(node: Any, make: Any) -> None:
    """The timeout doubles with each edge given up, as slow links need long for a message."""
    node.training()
    waits = []
    for _ in range(3):
        node.opened_anew()
        began_s = node.now_s
        while not every(node.alive(head=3, sent=3) + node.tick(0.5), ev.ReopenStreams):
            pass
        waits.append(round((node.now_s - began_s) / node.me.limits.lease_s))
    assert waits == [1, 2, 4]
    node.opened_anew()
    node.hear(make.committed(1))
    assert node.me.link.starved_down == 0


@pytest.mark.parametrize("direction", ["down", "up"])
def test_partial_message_does_not_reset_doubled_edge_timeout(
    node: Any, make: Any, direction: str
) -> None:
    """Parts of a message, and data in the other direction, do not reset the doubled timeout."""
    node.training()
    node.step(make.published(1, b"x" * 100_000))
    waits = []
    for commit in (1, 2, 3):
        node.opened_anew()
        if direction == "down":
            missing = {"head": 9, "sent": 9, "bytes_received": 100_064, "bytes_forwarded": 100_064}
            node.alive(**missing)
            node.step(ev.DataArriving(0, 65_536))
        else:
            missing = {"head": commit, "sent": commit, "bytes_received": 65_536}
            node.hear(make.committed(commit))
            node.alive(**missing)
        began_s = node.now_s
        while not every(node.alive(**missing) + node.tick(0.5), ev.ReopenStreams):
            pass
        waits.append(round((node.now_s - began_s) / node.me.limits.lease_s))
    assert waits == [1, 2, 4]


def test_long_message_arriving_in_parts_keeps_edge(node: Any, make: Any) -> None:
    """An edge stays while parts of a long message keep arriving, here for 70 s."""
    before = node.training().me.link.bytes_received
    effects: list[ev.Effect] = []
    for second in range(1, 71):
        effects += node.step(ev.DataArriving(0, second * 131_072))
        effects += node.alive(head=3, sent=3) + node.tick(1.0)
    assert not every(effects, ev.ReopenStreams)
    assert sent(effects, Heartbeat)[-1].bytes_received == before + 70 * 131_072
    assert only(node.hear(make.merged(0, 3)), ev.ApplyMergedRange)
    taken = before + message_weight(make.merged(0, 3), 0)
    assert sent(node.tick(1.0), Heartbeat)[0].bytes_received == taken


def test_slowly_acknowledged_update_keeps_edge_and_is_sent_once(node: Any, make: Any) -> None:
    """An edge stays while parts of a long update reach the parent; it is sent once."""
    node.training()
    effects = node.step(make.published(1, b"x" * 9_000_000))
    for second in range(1, 71):
        effects += node.alive(bytes_received=second * 125_000) + node.tick(1.0)
    assert not every(effects, ev.ReopenStreams)
    assert len(sent(effects, Update)) == 1
    effects = node.alive(bytes_received=9_000_064, bytes_forwarded=9_000_064) + node.tick(1.0)
    assert node.me.link.window.under_way == 0


def test_missing_requested_chunks_replace_edge(node: Any) -> None:
    """A node replaces its edge if requested chunks never arrive."""
    assert opens_fresh_streams(node.joined())


def test_arriving_chunks_keep_edge(node: Any, make: Any) -> None:
    """An edge stays while chunks arrive, however long the whole snapshot takes."""
    node.joined(chunks=24)
    effects: list[ev.Effect] = []
    for index in range(24):
        effects += node.hear(make.chunk(index)) + node.alive() + node.tick(1.0)
    assert not every(effects, ev.ReopenStreams)


def test_snapshot_waiting_for_trainer_pause_keeps_edge(node: Any, make: Any) -> None:
    """An edge stays while a complete snapshot waits for the trainer to pause."""
    node.joined()
    node.hear(make.chunk(0))
    effects: list[ev.Effect] = []
    for _ in range(24):
        effects += node.alive() + node.tick(1.0)
    assert node.order is Command.PAUSE
    assert not every(effects, ev.ReopenStreams)


def test_missing_attach_reply_replaces_edge_despite_states(node: Any, make: Any) -> None:
    """A node replaces its edge if the attach reply never comes, although states do."""
    node.opened()
    node.told(make.welcome())
    assert opens_fresh_streams(node)


def test_edges_lost_to_silence_do_not_double_data_timeout(node: Any, make: Any) -> None:
    """Edges given up because of silence do not double the timeout for data that do not move."""
    node.opened()
    for _ in range(3):
        while not every(node.tick(0.5), ev.ReopenStreams):
            pass
    node.opened()
    node.told(make.welcome(request=node.me.membership.request))
    assert opens_fresh_streams(node)


def test_attach_reply_timeout_starts_once_parent_has_replica(make: Any) -> None:
    """The timeout of the attach reply runs only once the relay above has a replica."""
    node = NodeDriver(make, parent=9)
    node.opened()
    node.told(make.welcome(parent=9))
    assert not opens_fresh_streams(node)
    assert not every(node.alive(head=3) + node.tick(0.5), ev.ReopenStreams)
    assert opens_fresh_streams(node, head=3)


def test_silence_of_master_keeps_edge_to_parent(node: Any, make: Any) -> None:
    """An edge stays if the parent's states show no sign of the master: the fault is further up."""
    node.parent = 4
    node.training().step(make.published(1))
    effects: list[ev.Effect] = []
    for _ in range(24):
        effects += node.hear(make.state()) + node.tick(0.5)
    assert not every(effects, ev.ReopenStreams)


@pytest.mark.parametrize("attached", [True, False])
def test_data_and_direct_messages_do_not_hide_dead_control_stream(
    node: Any, make: Any, attached: bool
) -> None:
    """Commits and direct messages do not count as signs that the control stream works."""
    node.training()
    if not attached:
        node.hear(make.welcome(edge=2))
    effects: list[ev.Effect] = []
    for commit in range(1, 15):
        effects += node.hear(make.committed(commit)) + node.hear(Probe(1)) + node.tick(0.5)
    assert every(effects, ev.ReopenStreams)
