"""Message endpoints: direct messages between nodes and the master, outside of edges."""

from __future__ import annotations

import pytest

from benchmarks.memory_transport import MemoryNetwork
from sparkstrom.base.identity import MASTER
from sparkstrom.codec.messages import (
    Address,
    Adopt,
    CommitsRequest,
    JoinRefusal,
    Probe,
    ProbeReply,
    TrainingFailure,
    Welcome,
)
from sparkstrom.codec.sealed_frames import Rejection, Seal, direct_header
from sparkstrom.codec.wire import encode
from sparkstrom.runtime import message_endpoint
from sparkstrom.runtime.message_endpoint import (
    CONNECT_FLUSHES_MAX,
    OPEN_SENDERS_MAX,
    QUEUED_REPLY_FRAMES_MAX,
    UNRESPONSIVE_AFTER_REQUESTS,
)
from tests.unit.runtime.endpoint_peers import (
    ASK,
    HEAD,
    JOB,
    KEY,
    LOBBY,
    Peer,
    make_join_request,
    make_welcome,
    send_raw_frames,
)


def make_master_and_joining_node(network: MemoryNetwork) -> tuple[Peer, Peer]:
    """Return a master with a join stream, and a node without an id that may write to it."""
    master, node = Peer(network, MASTER, 10), Peer(network, None, 20)
    master.room.listen_for_joins(LOBBY)
    node.room.set_master(master.transport.endpoint, LOBBY)
    return master, node


def test_join_stream_rejects_edge_frames_and_other_message_kinds(network: MemoryNetwork) -> None:
    """The join stream rejects frames with an edge's header, and other kinds of messages."""
    master, node = make_master_and_joining_node(network)
    node.room.send_direct(make_join_request(node.address))
    node.room.flush()
    assert master.got() == [(None, make_join_request(node.address))]
    join_stream = Address("127.0.0.1", master.address.port, LOBBY, LOBBY)
    stranger = direct_header(1, 1, HEAD.kind, 0, 1)
    send_raw_frames(node, join_stream, Seal(KEY, JOB).close(stranger, ASK))
    send_raw_frames(
        node, join_stream, Seal(KEY, JOB).close(HEAD, encode(make_join_request(node.address))[1])
    )
    assert master.got() == []
    assert master.room.traffic.rejected == {Rejection.NOT_DIRECT: 2}


def test_join_stream_reassembles_interleaved_messages_of_two_processes(
    network: MemoryNetwork,
) -> None:
    """Frames of two processes' long messages may alternate on the join stream."""
    master, node = make_master_and_joining_node(network)
    other = Peer(network, None, 30)
    other.room.set_master(master.transport.endpoint, LOBBY)
    told = [TrainingFailure(node=n, reason="r" * 9000, trace="t" * 16_000) for n in (1, 2)]
    for office, message in zip((node, other), told, strict=True):
        office.room.send_direct(message)
    boxes = [office.room._to_master for office in (node, other)]
    while node.room.waiting or other.room.waiting:
        for box in boxes:
            assert box is not None
            box._sender.offer([box.frames.popleft()])
    assert master.got() == [(None, message) for message in told]
    assert master.room._direct_receiver.reassemblers == {}


def test_join_stream_keeps_limited_number_of_partial_messages(
    network: MemoryNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The join stream keeps partial messages of at most ``INCOMPLETE_SENDERS_MAX`` processes."""
    monkeypatch.setattr(message_endpoint, "INCOMPLETE_SENDERS_MAX", 3)
    master, node = make_master_and_joining_node(network)
    for n in range(1, 10):
        teller = Peer(network, None, 20 + 10 * n)
        teller.room.set_master(master.transport.endpoint, LOBBY)
        teller.room.send_direct(TrainingFailure(node=n, reason="r", trace="t" * 16_000))
        assert teller.room._to_master is not None
        teller.room._to_master.frames.pop()  # its last piece is lost
        teller.room.flush()
        assert master.got() == []
        assert len(master.room._direct_receiver.reassemblers) == min(n, 3)
    node.room.send_direct(ProbeReply(5))
    node.room.flush()
    assert master.got() == [(None, ProbeReply(5))]


def test_setting_master_again_drops_unsent_direct_messages(network: MemoryNetwork) -> None:
    """Setting the master again drops the direct messages that wait to be sent."""
    master, node = make_master_and_joining_node(network)
    node.room.send_direct(make_join_request(node.address))
    node.room.set_master(master.transport.endpoint, LOBBY)
    node.room.send_direct(ProbeReply(7))
    node.room.flush()
    assert master.got() == [(None, ProbeReply(7))]


def test_direct_message_opens_new_sender_after_old_one_closed(network: MemoryNetwork) -> None:
    """After a node's sender to the master was closed, its next message opens another sender."""
    master, node = make_master_and_joining_node(network)
    node.room.send_direct(ProbeReply(6))
    assert node.room._to_master is not None
    node.room._to_master._sender.close()
    node.room.flush()
    node.room.send_direct(ProbeReply(7))
    node.room.flush()
    assert master.got() == [(None, ProbeReply(7))]


def test_node_without_id_or_edge_receives_direct_messages(network: MemoryNetwork) -> None:
    """A node without an id or an edge receives the master's direct messages."""
    master, node = Peer(network, MASTER, 10), Peer(network, None, 20)
    node.room.listen(node.address)
    refused = JoinRefusal(token=1, count=0, reason="no", fatal=True)
    for _ in range(2):
        master.answer(node, refused)
    master.room.flush()
    assert node.got() == [(MASTER, refused)] * 2


def test_only_peer_that_repeats_requests_is_unresponsive(
    network: MemoryNetwork,
) -> None:
    """Neither address receives: a firewall drops one peer's replies, the other process is gone."""
    master, behind_firewall = make_master_and_joining_node(network)
    dead = Peer(network, None, 30)
    dead.room.set_master(master.transport.endpoint, LOBBY)
    dead.room.send_direct(make_join_request(dead.address))
    dead.room.flush()
    for _ in range(UNRESPONSIVE_AFTER_REQUESTS + 1):
        behind_firewall.room.send_direct(make_join_request(behind_firewall.address))
        behind_firewall.room.flush()
        master.got()
        for office in (behind_firewall, dead):
            master.answer(office, Probe(1))
        master.room.flush()
    assert master.room.unresponsive_peers() == (behind_firewall.transport.endpoint,)


def test_node_receives_welcome_and_edge_message_in_same_poll(network: MemoryNetwork) -> None:
    """A node receives its id, and in the same poll a message over its new edge for this id."""
    master, node = Peer(network, MASTER, 10), Peer(network, None, 20)
    node.room.listen(node.address)
    up = master.at(1012)
    master.room.open_edge(9, 3, up, node.address)
    master.answer(node, make_welcome(9))
    master.room.send(9, CommitsRequest(1))
    master.room.flush()
    came = []
    for _, message in node.room.receive(0.0):
        if isinstance(message, Welcome):
            node.room.me = message.node
            node.room.open_edge(MASTER, 3, node.address, up)
        came.append(message)
    assert came == [make_welcome(9), CommitsRequest(1)]


def test_direct_and_edge_messages_may_arrive_in_either_order(pair: tuple[Peer, Peer]) -> None:
    """Direct messages and those of an edge have separate counters, so either may arrive first."""
    master, node = pair
    long = Adopt(node=8, edge=5, local=Address("h" * 500, 1, 1, 2), peer=node.address)
    for n in range(3):
        master.answer(node, Probe(n))
        master.room.send(7, CommitsRequest(n))
    master.answer(node, long)
    box = master.room._outgoing[7].control
    box.flush()  # the edge's messages arrive first
    master.room.flush()
    came = [message for _, message in node.got()]
    assert came == [*map(CommitsRequest, range(3)), *map(Probe, range(3)), long]
    assert node.room.traffic.rejected.total() == 0


def test_direct_message_replayed_on_new_streams_is_rejected(
    pair: tuple[Peer, Peer],
) -> None:
    """A recorded direct message is rejected when it is replayed on new streams of the node."""
    master, node = pair
    master.answer(node, Probe(7))
    (frame,) = master.room._replies._waiting[node.address]
    master.room.flush()
    assert node.got() == [(MASTER, Probe(7))]
    node.room.listen(node.at(60))
    send_raw_frames(master, node.at(60), frame)
    assert node.got() == []
    assert node.room.traffic.rejected.total() == 1


@pytest.mark.parametrize("many", [OPEN_SENDERS_MAX, 10 * OPEN_SENDERS_MAX])
def test_all_joining_nodes_get_replies_through_few_open_senders(
    network: MemoryNetwork, many: int
) -> None:
    """All nodes receive their replies, through few open senders that are closed only when empty."""
    master = Peer(network, MASTER, 10)
    nodes = [Peer(network, None, 20) for _ in range(many)]
    for node in nodes:
        node.room.listen(node.address)
        master.answer(node, Probe(1))
        master.answer(node, Probe(2))
    for _ in range(20):
        master.room.flush()
        assert len(master.room._replies._open) <= OPEN_SENDERS_MAX
    assert master.room.waiting == 0
    assert all(node.got() == [(MASTER, Probe(1)), (MASTER, Probe(2))] for node in nodes)


def test_unreachable_addresses_delay_other_replies_for_limited_flushes(
    network: MemoryNetwork,
) -> None:
    """Unreachable addresses delay others' replies by at most ``CONNECT_FLUSHES_MAX`` flushes."""
    master, node = Peer(network, MASTER, 10), Peer(network, None, 20)
    node.room.listen(node.address)
    for stream in range(100, 100 + OPEN_SENDERS_MAX):
        master.answer(node, Probe(1), at=node.at(stream))
    master.room.flush()
    master.answer(node, Probe(2))
    for _ in range(CONNECT_FLUSHES_MAX - 1):
        master.room.flush()
    assert node.got() == []
    master.room.flush()
    assert node.got() == [(MASTER, Probe(2))]


def test_queued_reply_frames_per_address_are_limited(network: MemoryNetwork) -> None:
    """At most ``QUEUED_REPLY_FRAMES_MAX`` frames wait for an address; others are not counted."""
    master, node = Peer(network, MASTER, 10), Peer(network, None, 20)
    master.answer(node, Probe(0))
    one = master.room.traffic.wire_bytes
    for n in range(1, 100):
        master.answer(node, Probe(n))
    assert master.room.waiting == QUEUED_REPLY_FRAMES_MAX
    assert master.room.traffic.wire_bytes == QUEUED_REPLY_FRAMES_MAX * one
