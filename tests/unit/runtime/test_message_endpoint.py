"""Message endpoints over edges: accepted and rejected frames, order, queues, unique nonces."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from benchmarks.memory_transport import MemoryNetwork, MemoryTransport
from sparkstrom.base.identity import MASTER, Endpoint
from sparkstrom.codec.messages import (
    Commit,
    CommitsRequest,
    Heartbeat,
    Payload,
    Probe,
    TrainingFailure,
    Update,
)
from sparkstrom.codec.sealed_frames import KEY_BYTES, OVERHEAD_BYTES, UNBOUND, Rejection, Seal
from sparkstrom.codec.wire import encode
from sparkstrom.runtime.message_endpoint import Outbox
from tests.unit.runtime.endpoint_peers import (
    ASK,
    HEAD,
    JOB,
    KEY,
    LOBBY,
    Peer,
    make_join_request,
    make_update,
    open_edge_between,
    send_raw_frames,
)


def test_messages_pass_both_ways_and_control_arrives_before_data(pair: tuple[Peer, Peer]) -> None:
    """Messages pass in both directions, and control messages arrive before data messages."""
    master, node = pair
    node.room.send(MASTER, make_update())
    node.room.send(MASTER, CommitsRequest(1))
    assert node.room.flush() == 2
    assert master.got() == [(7, CommitsRequest(1)), (7, make_update())]
    master.room.send(7, CommitsRequest(4))
    assert master.room.waiting == 1
    master.room.flush()
    assert master.room.waiting == 0
    assert node.got() == [(MASTER, CommitsRequest(4))]


def test_control_frames_are_offered_before_data_frames(
    pair: tuple[Peer, Peer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Control frames are offered to the transport before data frames, which may fill the link."""
    _, node = pair
    flush, offered = Outbox.flush, list[Outbox]()

    def noting(box: Outbox) -> int:
        offered.append(box)
        return flush(box)

    monkeypatch.setattr(Outbox, "flush", noting)
    node.room.send(MASTER, make_update())
    node.room.send(MASTER, CommitsRequest(0))
    node.room.flush()
    peer = node.room._outgoing[MASTER]
    assert offered == [peer.control, peer.data]


def test_long_messages_are_split_and_reassembled(network: MemoryNetwork) -> None:
    """Long messages are split into frames and reassembled; control has a piece size of its own."""
    master, node = Peer(network, MASTER, 10), Peer(network, 7, 20, chunk=1024)
    open_edge_between(master, node, edge=3)
    long, trace = (
        make_update(payload=bytes(4096)),
        TrainingFailure(node=7, reason="r", trace="t" * 16_000),
    )
    node.room.send(MASTER, long)
    node.room.send(MASTER, trace)
    assert node.room.waiting == 5 + 2  # data in pieces of 1024 bytes, control in larger ones
    node.room.flush()
    assert master.got() == [(7, trace), (7, long)]


def test_message_above_transport_frame_limit_is_split(pair: tuple[Peer, Peer]) -> None:
    """A message that exceeds the transport's longest frame is split."""
    _, node = pair
    most = node.transport.max_frame_bytes - OVERHEAD_BYTES
    body = len(encode(make_update(payload=b""))[1])
    node.room.send(MASTER, make_update(payload=bytes(most - body)))
    assert node.room.waiting == 1
    node.room.send(MASTER, make_update(payload=bytes(most - body + 1)))
    assert node.room.waiting == 3


def test_pieces_fit_frame_limit_of_replaced_transport(pair: tuple[Peer, Peer]) -> None:
    """After the transport is replaced, pieces fit the frames of the new one, which are shorter."""
    master, node = pair

    class Narrow(MemoryTransport):
        max_frame_bytes = 2000

    network = node.transport._network
    node.room.replace_transport(lambda: Narrow(network, Endpoint("127.0.0.1", 99)))
    node.room.open_edge(MASTER, 3, node.address, master.at(1012))
    node.room.send(MASTER, make_update(payload=bytes(4000)))
    assert node.room.waiting == 3


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"hello", Rejection.SHORT),
        (bytes(OVERHEAD_BYTES), Rejection.FOREIGN),
        (Seal(bytes(KEY_BYTES), JOB).close(HEAD, ASK), Rejection.SEAL),
        (Seal(KEY, JOB + 1).close(HEAD, ASK), Rejection.OTHER_JOB),
        (Seal(KEY, JOB).close(HEAD, ASK) + b"x", Rejection.LENGTH),
        (Seal(KEY, JOB).close(replace(HEAD, piece=1), ASK), Rejection.PIECE),
        (Seal(KEY, JOB).close(replace(HEAD, edge=4), ASK), Rejection.OTHER_EDGE),
        (Seal(KEY, JOB).close(replace(HEAD, sender=8), ASK), Rejection.OTHER_EDGE),
        (Seal(KEY, JOB).close(replace(HEAD, receiver=8), ASK), Rejection.OTHER_RECEIVER),
        (Seal(KEY, JOB).close(replace(HEAD, receiver=None), ASK), Rejection.OTHER_RECEIVER),
        (Seal(KEY, JOB).close(HEAD, b"no message"), Rejection.NO_MESSAGE),
        (Seal(KEY, JOB).close(replace(HEAD, kind=9), ASK), Rejection.OTHER_STREAM),
    ],
)
def test_invalid_frame_is_counted_by_reason_and_dropped(
    pair: tuple[Peer, Peer], frame: bytes, reason: Rejection
) -> None:
    """Invalid frames are counted by reason, and later messages on the edge still arrive."""
    master, node = pair
    send_raw_frames(node, master.at(1012), frame)
    node.room.send(MASTER, CommitsRequest(2))
    node.room.send(MASTER, CommitsRequest(3))
    node.room.flush()
    assert [message for _, message in master.got()][-1] == CommitsRequest(3)
    assert master.room.traffic.rejected[reason] == 1


def test_stream_without_edge_rejects_edge_frames_as_early(network: MemoryNetwork) -> None:
    """A stream without an edge rejects all edge frames as early, even ones without a sender."""
    node = Peer(network, None, 20)
    node.room.listen(node.address)
    strange = replace(HEAD, sender=None, receiver=None, edge=UNBOUND)
    for head in (HEAD, replace(HEAD, receiver=None), strange):
        send_raw_frames(node, node.address, Seal(KEY, JOB).close(head, ASK))
    assert node.got() == []
    assert node.room.traffic.rejected == {Rejection.EARLY: 3}
    assert node.room.traffic.foreign_frames == 0


def test_repeated_frame_is_counted_and_dropped(pair: tuple[Peer, Peer]) -> None:
    master, node = pair
    frame = Seal(KEY, JOB).close(HEAD, ASK)
    send_raw_frames(node, master.at(1012), frame, frame)
    assert master.got() == [(7, CommitsRequest(1))]
    assert master.room.traffic.rejected.total() == 1


# -- edges -----------------------------------------------------------------------------------------


def test_frames_sent_on_closed_edge_are_not_received(pair: tuple[Peer, Peer]) -> None:
    """Frames that were sent on an edge are not received after it was closed."""
    master, node = pair
    node.room.send(MASTER, CommitsRequest(1))
    node.room.flush()
    master.room.close_edge(7)
    assert master.got() == []
    assert node.room.flush() == 0


def test_relay_exchanges_messages_with_parent_and_each_child(network: MemoryNetwork) -> None:
    """A relay exchanges messages with its parent and each child, over an edge for each."""
    master, relay = Peer(network, MASTER, 10), Peer(network, 7, 20)
    below = [Peer(network, 8, 30), Peer(network, 9, 40)]
    open_edge_between(master, relay, edge=3)
    for edge, child in enumerate(below, 4):
        open_edge_between(relay, child, edge)
        child.room.send(7, CommitsRequest(edge))
        child.room.flush()
    relay.room.send(MASTER, CommitsRequest(3))
    assert relay.got() == [(8, CommitsRequest(4)), (9, CommitsRequest(5))]
    for to in (8, 9):
        relay.room.send(to, CommitsRequest(to))
    relay.room.flush()
    assert [office.got() for office in (master, *below)] == [
        [(7, CommitsRequest(3))],
        [(7, CommitsRequest(8))],
        [(7, CommitsRequest(9))],
    ]


def test_edge_within_media_driver_uses_local_streams(network: MemoryNetwork) -> None:
    """An edge in one media driver has local streams; UDP streams stay open for the master only."""
    relay = Peer(network, 7, 20)
    child = Peer(network, 8, 40, beside=relay.transport)
    master = Peer(network, MASTER, 10)
    child.room.listen(child.address)
    up = open_edge_between(relay, child, edge=4)
    assert {place.local for place, _ in relay.transport._streams.values()} == {True}
    relay.room.send(8, CommitsRequest(1))
    child.room.send(7, CommitsRequest(2))
    master.answer(child, Probe(8))
    for office in (relay, child, master):
        office.room.flush()
    assert relay.got() == [(8, CommitsRequest(2))]
    assert sorted(child.got(), key=lambda came: came[0]) == [
        (MASTER, Probe(8)),
        (7, CommitsRequest(1)),
    ]
    send_raw_frames(master, up, Seal(KEY, JOB).close(HEAD, ASK))
    assert relay.got() == []  # no other host reaches the edge
    child.room.close_edge(7)
    assert {place.local for place, _ in child.transport._streams.values()} == {False}


def test_new_parent_reuses_streams_and_old_parent_is_rejected(pair: tuple[Peer, Peer]) -> None:
    """A new parent may use the streams of the former one, whose frames are then rejected."""
    master, node = pair
    other = Peer(node.transport._network, 5, 50)
    node.room.close_edge(MASTER)
    open_edge_between(other, node, edge=9)
    other.room.send(7, CommitsRequest(1))
    master.room.send(7, CommitsRequest(2))
    other.room.flush()
    master.room.flush()
    assert node.got() == [(5, CommitsRequest(1))]
    assert node.room.traffic.rejected == {Rejection.OTHER_EDGE: 1}


def test_new_edge_closes_old_streams_and_drops_unsent_messages(pair: tuple[Peer, Peer]) -> None:
    """A new edge to a neighbour closes the old edge's streams and drops its unsent messages."""
    master, node = pair
    node.room.send(MASTER, CommitsRequest(1))
    open_edge_between(master, node, edge=4)
    node.room.send(MASTER, CommitsRequest(2))
    node.room.flush()
    assert master.got() == [(7, CommitsRequest(2))]
    assert sorted(master.transport._streams) == [1016, 1017]


def test_listening_at_new_address_closes_former_streams(pair: tuple[Peer, Peer]) -> None:
    """Listening at another address closes the streams of the former address."""
    master, node = pair
    before = node.address
    node.room.listen(node.at(60))
    master.answer(node, Probe(7), at=before)
    master.answer(node, Probe(7), at=node.at(60))
    master.room.flush()
    assert node.got() == [(MASTER, Probe(7))]
    assert sorted(node.transport._streams) == [60, 61]


# -- queues ----------------------------------------------------------------------------------------


def test_data_queue_has_no_limit(pair: tuple[Peer, Peer]) -> None:
    """Queues of data have no limit here: the protocol limits how much it hands over."""
    master, node = pair
    for seq in range(1, 10_001):
        node.room.send(MASTER, make_update(seq))
    assert node.room.waiting == 10_000
    seqs: list[int] = []
    while node.room.waiting:
        node.room.flush()
        seqs += [m.seq for _, m in master.got() if isinstance(m, Update)]
    assert seqs == list(range(1, 10_001))


def make_heartbeat(stamp: int) -> Heartbeat:
    """Return a heartbeat with this stamp."""
    return Heartbeat(received=0, bytes_received=0, catching=False, stamp=stamp, statuses=[])


def test_only_newest_waiting_heartbeat_is_sent(pair: tuple[Peer, Peer]) -> None:
    """Of waiting heartbeats only the newest is sent; its counter rises, so it is not a replay."""
    master, node = pair
    node.room.send(MASTER, CommitsRequest(1))
    for stamp in range(1, 50):
        node.room.send(MASTER, make_heartbeat(stamp))
    node.room.send(MASTER, CommitsRequest(2))
    node.room.send(MASTER, make_heartbeat(50))
    assert node.room.waiting == 3
    node.room.flush()
    assert [m for _, m in master.got()] == [
        CommitsRequest(1),
        CommitsRequest(2),
        make_heartbeat(50),
    ]
    node.room.send(MASTER, make_heartbeat(51))
    node.room.flush()
    assert [m for _, m in master.got()] == [make_heartbeat(51)]
    assert not master.room.traffic.rejected


def test_messages_stay_in_order_under_back_pressure(pair: tuple[Peer, Peer]) -> None:
    """Messages arrive in order if the transport accepts only a part at a time."""
    master, node = pair
    for seq in range(1, 41):
        node.room.send(MASTER, make_update(seq, payload=bytes(60_000)))
    seqs: list[int] = []
    while node.room.waiting:
        assert node.room.flush() > 0
        seqs += [m.seq for _, m in master.got() if isinstance(m, Update)]
    assert seqs == list(range(1, 41))


def test_message_to_node_without_edge_is_dropped_uncounted(network: MemoryNetwork) -> None:
    """A message to a node without an edge is dropped and not counted."""
    node = Peer(network, 7, 20)
    node.room.send(MASTER, CommitsRequest(1))
    assert (node.room.waiting, node.room.traffic.wire_bytes) == (0, 0)


@pytest.mark.parametrize("payload", [b"bits", bytes(80_000)])
def test_update_bytes_count_once_and_wire_bytes_each_time(
    pair: tuple[Peer, Peer], payload: bytes
) -> None:
    """``update_bytes`` has an own update once, ``wire_bytes`` each time, also under another id."""
    _, node = pair
    node.room.count_update(make_update(payload=payload).payload)
    sent = (make_update(2, payload), make_update(2, payload), make_update(1, payload, origin=9))
    for message in sent:
        node.room.me = message.origin
        node.room.send(MASTER, message)
    assert node.room.traffic.wire_bytes == 3 * node.room.traffic.update_bytes


def test_counters_and_traffic_continue_after_transport_replacement(pair: tuple[Peer, Peer]) -> None:
    """After the transport is replaced, new frames are accepted, and counters continue."""
    master, node = pair
    node.room.send(MASTER, make_update())
    node.room.flush()
    before = node.room.traffic.wire_bytes
    other = node.transport._network.open()
    node.room.replace_transport(lambda: other)
    assert node.room.waiting == 0
    with pytest.raises(Exception, match="closed"):
        node.transport.poll(0.0)
    node.room.send(MASTER, CommitsRequest(1))
    assert node.room.waiting == 0  # no edge yet
    node.room.open_edge(MASTER, 3, node.address, master.at(1012))
    node.room.send(MASTER, CommitsRequest(2))
    node.room.flush()
    assert [m for _, m in master.got()] == [CommitsRequest(2), make_update()]
    assert node.room.traffic.wire_bytes > before


def encrypt_all_frame_kinds(master: Peer, node: Peer) -> None:
    """Encrypt data, control, replies, direct messages; then use another edge and transport."""
    long = Commit(commit=1, origin=7, seq=1, payload=Payload(1, 2, 1, bytes(200_000)))
    for _ in range(3):
        node.room.send(MASTER, make_update())
        node.room.send(MASTER, CommitsRequest(1))
        master.room.send(7, long)
        master.answer(node, Probe(7))
    node.room.set_master(master.transport.endpoint, LOBBY)
    node.room.send_direct(make_join_request(node.address))
    node.room.send_direct(TrainingFailure(node=7, reason="r", trace="t" * 16_000))
    open_edge_between(master, node, edge=9)
    node.room.send(MASTER, make_update())
    node.room.replace_transport(node.transport._network.open)
    node.room.open_edge(MASTER, 9, node.address, master.at(1036))
    node.room.send(MASTER, make_update())


def test_no_nonce_is_used_twice(pair: tuple[Peer, Peer]) -> None:
    """No two encrypted frames have the same nonce, whichever way they are sent."""
    master, node = pair
    encrypt_all_frame_kinds(master, node)
    nonces = master.seal.nonces + node.seal.nonces
    assert len(nonces) > 20
    assert len(set(nonces)) == len(nonces)
