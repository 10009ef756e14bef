"""Tests of ``Children``: sending chunks of snapshots, and the memory limit for all children."""

from __future__ import annotations

from typing import Any

import pytest

from sparkstrom.codec.messages import Commit, MergedRange, SnapshotRequired
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.flow_control import HEADER_BYTES
from tests.unit.protocol.effect_filters import every, only, sent
from tests.unit.protocol.parents import CHUNK_BYTES, ONE, Parent, sent_commits

CHUNK = HEADER_BYTES + CHUNK_BYTES


def chunks(effects: list[ev.Effect], node: int = 5) -> list[int]:
    """Return the indices of the chunks that were sent to this child."""
    return [chunk.index for chunk in every(effects, ev.SendChunk) if chunk.to == node]


# -- chunks ------------------------------------------------------------------------------------


def test_requested_chunks_are_sent_once_each_within_window(parent_with: Any) -> None:
    """Requested chunks are sent once each, as far as the window allows."""
    parent = parent_with(window_bytes=5 * CHUNK // 2)
    parent.attach(whole=False)
    effects = [parent.asks(index) for index in range(4)] + [parent.asks(3)]
    assert [chunks(one) for one in effects] == [[0], [1], [], [], []]
    assert chunks(parent.report(0, bytes_received=CHUNK)) == [2]
    assert chunks(parent.report(0, bytes_received=3 * CHUNK)) == [3]
    assert chunks(parent.report(0)) == []


def test_all_commits_so_far_are_sent_before_chunk(parent_with: Any) -> None:
    """All commits up to now are sent before a chunk, because the chunk may contain them."""
    parent = parent_with(window_bytes=CHUNK)
    parent.attach(whole=False)
    parent.asks(0)
    parent.commit(3)
    parent.asks(1)
    effects = parent.report(0)
    kinds = [type(getattr(effect, "message", effect)) for effect in effects]
    assert kinds == [*[Commit] * 3, ev.SendChunk]


def test_only_applied_commits_are_summed_before_chunk(parent_with: Any, make: Any) -> None:
    """Before a chunk, only applied commits go as a sum, so that no chunk contains part of it."""
    parent = parent_with(window_bytes=ONE)
    parent.attach(whole=False)
    parent.asks(0)
    parent.commit(5)
    for commit in (6, 7, 8):
        parent.history.append(make.committed(commit))
    parent.asks(1)
    effects = parent.report(0)
    assert (only(effects, ev.SendMerged).after, only(effects, ev.SendMerged).commit) == (0, 5)
    assert sent_commits(effects) == [6, 7, 8]
    assert isinstance(effects[-1], ev.SendChunk)


def test_chunks_may_equal_bytes_of_commits_before_them(parent_with: Any, make: Any) -> None:
    """Chunks may equal the commits before them in bytes, so they get through on a busy link."""
    parent = parent_with(window_bytes=CHUNK)
    parent.attach(whole=False)
    parent.asks(0)
    for index in range(1, 9):
        parent.asks(index)
    parent.append(make.committed(1, payload=b"x" * 3 * CHUNK))
    effects = parent.report(0)
    assert sent_commits(effects) == [1]
    assert chunks(effects) == [1, 2, 3]


@pytest.mark.parametrize("applied", [5, 6])
def test_no_chunk_is_sent_while_received_sum_is_partly_applied(
    parent: Any, make: Any, applied: int
) -> None:
    """No chunk is sent while the replica has applied only part of a sum in the log."""
    parent.attach(whole=False)
    parent.history.append(make.merged(0, 6))
    parent.history.applied = applied
    effects = parent.asks(0)
    assert len(sent(effects, MergedRange)) == 1
    assert chunks(effects) == ([0] if applied == 6 else [])


def test_no_chunk_is_sent_while_sum_sent_to_child_is_partly_applied(
    parent_with: Any, make: Any
) -> None:
    """No chunk is sent while it would contain only part of a sum that the child was sent."""
    parent = parent_with(window_bytes=ONE)
    parent.attach(whole=False)
    parent.commit()
    for commit in range(2, 8):
        parent.history.append(make.committed(commit))
    parent.history.applied = 4
    assert only(parent.report(1), ev.SendMerged).commit == 7
    assert chunks(parent.asks(0) + parent.report(7)) == []
    parent.history.applied = 7
    assert chunks(parent.children.feed_all(0.0)) == [0]


def test_no_chunk_is_sent_while_replica_is_being_replaced(parent: Any) -> None:
    parent.attach(whole=False)
    parent.history.whole = False
    assert parent.asks(0) == []
    parent.history.whole = True
    assert chunks(parent.children.feed_all(0.0)) == [0]


def test_snapshot_required_discards_queued_chunk_requests(parent_with: Any) -> None:
    """SnapshotRequired discards the child's queued requests for chunks of the former snapshot."""
    parent = parent_with(window_bytes=CHUNK, log_bytes=2 * ONE)
    parent.attach(whole=False)
    for index in range(3):
        parent.asks(index)
    assert [behind.base for behind in sent(parent.commit(4), SnapshotRequired)] == [4]
    assert chunks(parent.report(0)) == []
    assert chunks(parent.asks(2)) == [2]


# -- memory for all children -------------------------------------------------------------------

CHILDREN = 1000


def attach_many_children(parent: Parent) -> Parent:
    """Attach 1000 children."""
    for node in range(CHILDREN):
        parent.attach(node=node)
    return parent


def under_way(parent: Parent) -> int:
    """Return the bytes under way to all children."""
    return sum(child.link.under_way for child in parent.children.by_node.values())


def test_bytes_under_way_to_all_children_stay_within_memory_limit(parent_with: Any) -> None:
    """The bytes under way to a thousand children use the memory limit fully and never exceed it."""
    parent = attach_many_children(parent_with(total_bytes=40 * ONE))
    for round_ in range(10):
        parent.commit(3)
        assert 39 * ONE <= under_way(parent) <= 40 * ONE
        parent.asks(0, node=round_)
        parent.report(0, node=next(c.node for c in parent.children.by_node.values() if c.sent))
        assert 39 * ONE <= under_way(parent) <= 40 * ONE


def test_all_children_are_served_in_turn_at_memory_limit(parent_with: Any) -> None:
    """Every child is served in turn, although there are always more commits for the first ones."""
    parent = attach_many_children(parent_with(total_bytes=40 * ONE, n_params=1))
    way = [send.to for send in every(parent.commit(40), ev.Send)]
    served = set(way)
    for _ in range(2 * CHILDREN):
        node = way.pop(0)
        effects = parent.report(0, node=node) + parent.commit()
        way += [effect.to for effect in every(effects, ev.Send)]
        way += [effect.to for effect in every(effects, ev.SendMerged)]
        served |= set(way)
        assert under_way(parent) <= 40 * ONE
    assert len(served) == CHILDREN


def test_message_above_memory_limit_is_sent_in_its_turn(parent_with: Any, make: Any) -> None:
    """A message that needs all the memory gets it in its turn, despite many small messages."""
    parent = parent_with(total_bytes=10 * ONE)
    big = make.committed(1, payload=b"x" * 20 * ONE)
    parent.append(big)
    for node in (5, 6, 7):
        parent.attach(1, node=node)
    parent.commit()
    parent.attach(0, node=8)
    got = False
    for _ in range(40):
        for node in (5, 6, 7):
            effects = parent.commit() + parent.report(0, node=node)
            got = got or bool([send for send in every(effects, ev.Send) if send.message == big])
    assert got


def test_bytes_under_way_to_removed_child_free_memory(parent_with: Any) -> None:
    """Bytes under way to a removed child no longer count towards the memory limit."""
    parent = parent_with(total_bytes=2 * ONE)
    parent.attach(node=5)
    parent.attach(node=6)
    assert sent_commits(parent.commit(2), 5) == [1, 2]
    assert sent_commits(parent.children.feed_all(0.0), 6) == []
    parent.children.disown(5)
    assert sent_commits(parent.children.feed_all(0.0), 6) == [1, 2]


def test_acknowledgement_lets_other_child_waiting_for_memory_proceed(parent_with: Any) -> None:
    """An acknowledgement of one child lets another child be served that waited for memory."""
    parent = parent_with(total_bytes=2 * ONE)
    parent.attach(node=5)
    parent.attach(node=6)
    parent.commit(2)
    assert sent_commits(parent.report(2, node=5), 6) == [1, 2]
