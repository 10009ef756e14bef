"""Messages for several children are summed, encoded and split once per duty cycle."""

from __future__ import annotations

import pytest

from benchmarks.memory_transport import MemoryNetwork
from sparkstrom.base.identity import MASTER
from sparkstrom.codec.messages import Commit, CommitsRequest, MergedRange, Message, Payload
from sparkstrom.codec.sealed_frames import split_body
from sparkstrom.codec.wire import COMMITTED_HEADER, Kind, encode
from sparkstrom.protocol.common.events_and_effects import SendMerged
from sparkstrom.runtime import message_endpoint as encoded_once
from sparkstrom.runtime.message_endpoint import EncodingCache, MergeCache
from tests.unit.runtime.endpoint_peers import Peer, open_edge_between


def make_numbered_commit(number: int, data: bytes = b"bits") -> Commit:
    return Commit(commit=number, origin=9, seq=number, payload=Payload(1, 2, 1, data))


@pytest.fixture
def encoded_messages(monkeypatch: pytest.MonkeyPatch) -> list[Message]:
    """The messages that were encoded."""
    out: list[Message] = []

    def noting(message: Message) -> tuple[Kind, bytes]:
        out.append(message)
        return encode(message)

    monkeypatch.setattr(encoded_once, "encode", noting)
    return out


def test_commit_for_several_children_is_encoded_once_per_flush(
    network: MemoryNetwork, encoded_messages: list[Message]
) -> None:
    """A relay encodes a commit for its children once; a flush empties the cache."""
    relay = Peer(network, 7, 20)
    children = [Peer(network, node, 30 + 10 * node) for node in (8, 9, 10)]
    for edge, child in enumerate(children, 1):
        open_edge_between(relay, child, edge)
    burst = [
        make_numbered_commit(1, bytes(100_000 - COMMITTED_HEADER.size)),
        make_numbered_commit(2),
    ]
    for child in children:
        for one in burst:
            relay.room.send(child.room.me, one)
    assert encoded_messages == burst
    relay.room.flush()
    assert [child.got() for child in children] == [[(7, one) for one in burst]] * 3
    relay.room.send(8, burst[0])
    assert encoded_messages == [*burst, burst[0]]  # the flush emptied the cache


def test_message_for_single_peer_is_not_cached(
    network: MemoryNetwork, encoded_messages: list[Message]
) -> None:
    """Messages that are not for several children are encoded each time."""
    node, ask = Peer(network, 7, 20), CommitsRequest(1)
    open_edge_between(Peer(network, MASTER, 10), node, 3)
    node.room.send(MASTER, ask)
    node.room.send(MASTER, ask)
    assert encoded_messages == [ask, ask]


def test_cache_is_not_misled_by_reused_object_ids() -> None:
    """The cache is not misled by a new message that has the id of a deleted one."""
    bodies = EncodingCache()
    for number in range(1, 50):
        one = make_numbered_commit(number)
        assert bodies.encode(one, 1000) == (Kind.COMMITTED, [encode(one)[1]])
        del one


def test_cache_distinguishes_piece_lengths() -> None:
    """The cache distinguishes piece lengths: a new media driver may take shorter frames."""
    bodies, one = EncodingCache(), make_numbered_commit(1, bytes(500))
    for piece_bytes in (1000, 100):
        assert bodies.encode(one, piece_bytes)[1] == split_body(encode(one)[1], piece_bytes)


def make_merge_order(to: int, after: int = 0, commit: int = 2, count: int = 5) -> SendMerged:
    """Return an order to send a sum of commits to the child ``to``."""
    return SendMerged(to, after, commit, [(9, commit)], count, ())


def test_commit_range_is_summed_once_until_cache_is_cleared() -> None:
    """A range of commits is summed once for all children, until the cache is cleared."""
    asked: list[SendMerged] = []

    def merge(one: SendMerged) -> MergedRange:
        asked.append(one)
        return MergedRange(
            after=one.after, commit=one.commit, last=one.last, count=one.count, payload=b"sum"
        )

    sums = MergeCache(merge)
    assert sums.merge(make_merge_order(5)) is sums.merge(make_merge_order(6))
    others = [
        make_merge_order(5, after=1),
        make_merge_order(5, commit=3),
        make_merge_order(5, count=6),
    ]
    for other in others:
        made = sums.merge(other)
        assert (made.after, made.commit, made.count) == (other.after, other.commit, other.count)
    assert asked == [make_merge_order(5), *others]
    sums.clear()
    sums.merge(make_merge_order(6))
    assert asked[-1] == make_merge_order(6)
