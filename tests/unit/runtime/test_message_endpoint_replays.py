"""Replays: recorded frames that are sent again are rejected.

The master's direct messages are encrypted for one process and, where it matters, for one node id.
Direct messages to the master have a token and a counter of their process.
"""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from benchmarks.memory_transport import MemoryNetwork
from sparkstrom.base.identity import MASTER
from sparkstrom.codec.messages import (
    Address,
    CommitsRequest,
    JoinRefusal,
    Message,
    Probe,
    ProbeReply,
    Release,
    TrainingFailure,
)
from sparkstrom.codec.sealed_frames import HEADER, KEY_BYTES, Header, Rejection, Seal
from sparkstrom.codec.wire import encode
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

RELEASE = Release("a slot is needed")
LONG = TrainingFailure(node=1, reason="r" * 9000, trace="t" * 16_000)
FORGED = 2_000


def seal_reply(master: Peer, to: Peer, message: Message, node: int | None = None) -> list[bytes]:
    """Return the frames that the master would send for this direct message."""
    master.answer(to, message, node)
    return list(master.room._replies._waiting.pop(to.address))


def seal_direct_message(node: Peer, message: TrainingFailure | ProbeReply) -> list[bytes]:
    """Return the frames that a node would send for this direct message to the master."""
    node.room.send_direct(message)
    box = node.room._to_master
    assert box is not None
    frames = list(box.frames)
    box.frames.clear()
    return frames


@pytest.fixture
def master(network: MemoryNetwork) -> Peer:
    """A master with a join stream."""
    office = Peer(network, MASTER, 10)
    office.room.listen_for_joins(LOBBY)
    return office


def make_listening_node(network: MemoryNetwork, me: int, stream: int) -> Peer:
    """Return a node with this id that listens for its parent and the master."""
    office = Peer(network, me, stream)
    office.room.listen(office.address)
    return office


def join_stream_address(master: Peer) -> Address:
    """Return the master's join stream as an address."""
    return Address("127.0.0.1", master.address.port, LOBBY, LOBBY)


# -- over an edge ----------------------------------------------------------------------------------


def test_edge_frame_is_rejected_on_other_stream_of_edge(
    network: MemoryNetwork, master: Peer
) -> None:
    """A control frame is rejected on the data stream, and vice versa; each has its own counter."""
    node = Peer(network, 7, 20)
    up = open_edge_between(master, node, edge=3)
    send_raw_frames(node, up, Seal(KEY, JOB).close(HEAD, ASK))
    assert master.got() == [(7, CommitsRequest(1))]
    send_raw_frames(node, up, Seal(KEY, JOB).close(HEAD, ASK), control=False)
    kind, body = encode(make_update())
    data = Seal(KEY, JOB).close(replace(HEAD, kind=kind, counter=2), body)
    send_raw_frames(node, up, data, control=False)
    assert master.got() == [(7, make_update())]
    send_raw_frames(node, up, data)
    assert master.got() == []
    assert master.room.traffic.rejected == {Rejection.OTHER_STREAM: 2}


@pytest.mark.parametrize("how", ["opened again", "closed before", "elsewhere", "moved"])
def test_recorded_edge_frames_are_rejected_after_edge_reopens(
    network: MemoryNetwork, master: Peer, how: str
) -> None:
    """Recorded frames of an edge stay rejected after the edge is opened again, in any way."""
    node = Peer(network, 7, 20)
    up = open_edge_between(master, node, edge=3)
    recorded = [Seal(KEY, JOB).close(replace(HEAD, counter=count), ASK) for count in (4, 5)]
    send_raw_frames(node, up, *recorded)
    assert master.got() == [(7, CommitsRequest(1))] * 2
    if how == "closed before":
        master.room.close_edge(7)
    elif how == "elsewhere":
        up = master.at(5000)
    elif how == "moved":
        master.room.replace_transport(network.open)
        master.transport = master.room.transport
        up = master.at(1012)
    master.room.open_edge(7, 3, up, node.address)
    send_raw_frames(node, up, *recorded)
    assert master.got() == []
    assert master.room.traffic.rejected == {Rejection.AGAIN: 2}
    send_raw_frames(node, up, Seal(KEY, JOB).close(replace(HEAD, counter=6), ASK))
    assert master.got() == [(7, CommitsRequest(1))]


# -- from the master -------------------------------------------------------------------------------


def test_direct_message_for_one_node_is_rejected_by_another(
    network: MemoryNetwork, master: Peer
) -> None:
    """A direct message for one process cannot be decrypted by another."""
    seven, eight = make_listening_node(network, 7, 20), make_listening_node(network, 8, 30)
    frames = seal_reply(master, seven, RELEASE, 7)
    send_raw_frames(master, eight.address, *frames)
    assert eight.got() == []
    assert eight.room.traffic.rejected == {Rejection.SEAL: 1}
    send_raw_frames(master, seven.address, *frames)
    assert seven.got() == [(MASTER, RELEASE)]


@pytest.mark.parametrize(
    "message", [JoinRefusal(token=1, count=1, reason="no", fatal=True), Probe(7)]
)
def test_direct_message_for_process_without_id_is_rejected_elsewhere(
    network: MemoryNetwork, master: Peer, message: Message
) -> None:
    """A direct message for a process without an id cannot be decrypted by another."""
    one, other = make_listening_node(network, None, 20), make_listening_node(network, None, 30)
    frames = seal_reply(master, one, message)
    send_raw_frames(master, other.address, *frames)
    assert other.got() == []
    assert other.room.traffic.rejected == {Rejection.SEAL: 1}
    send_raw_frames(master, one.address, *frames)
    assert one.got() == [(MASTER, message)]


def test_direct_message_for_former_id_is_rejected(network: MemoryNetwork, master: Peer) -> None:
    """A returned process, now node 9, rejects a request to leave that was sent to it as node 7."""
    node = make_listening_node(network, 7, 20)
    frames = seal_reply(master, node, RELEASE, 7)
    node.room.me = 9
    send_raw_frames(master, node.address, *frames)
    assert node.got() == []
    assert node.room.traffic.rejected == {Rejection.OTHER_RECEIVER: 1}


def test_direct_message_is_accepted_once_across_streams(
    network: MemoryNetwork, master: Peer
) -> None:
    """A direct message is accepted once, also if it is replayed on other streams or transports."""
    node = make_listening_node(network, 7, 20)
    frames = seal_reply(master, node, RELEASE, 7)
    send_raw_frames(master, node.address, *frames, *frames)
    node.room.listen(node.at(60))
    send_raw_frames(master, node.at(60), *frames)
    assert node.got() == [(MASTER, RELEASE)]
    node.room.replace_transport(network.open)
    node.room.listen(node.at(70))
    send_raw_frames(master, Peer.at(node, 70), *frames)
    assert node.got() == []


# -- to the master ---------------------------------------------------------------------------------


def test_replayed_probe_replies_are_rejected(network: MemoryNetwork, master: Peer) -> None:
    """Replayed probe replies, which would extend a dead node's lease, are rejected."""
    node = Peer(network, None, 20)
    node.room.set_master(master.transport.endpoint, LOBBY)
    first, second = (
        seal_direct_message(node, ProbeReply(7)),
        seal_direct_message(node, ProbeReply(7)),
    )
    send_raw_frames(node, join_stream_address(master), *first, *first, *second, *first, *second)
    assert master.got() == [(None, ProbeReply(7))] * 2
    assert master.room.traffic.rejected == {Rejection.AGAIN: 3}


def test_replays_are_rejected_after_master_transport_replacement(
    network: MemoryNetwork, master: Peer
) -> None:
    """Replays are rejected after the driver program's transport was replaced."""
    node = Peer(network, None, 20)
    node.room.set_master(master.transport.endpoint, LOBBY)
    frames = seal_direct_message(node, ProbeReply(7))
    send_raw_frames(node, join_stream_address(master), *frames)
    assert master.got() == [(None, ProbeReply(7))]
    endpoint = master.transport.endpoint
    master.room.replace_transport(lambda: type(master.transport)(network, endpoint))
    master.room.listen_for_joins(LOBBY)
    send_raw_frames(
        node, join_stream_address(master), *frames, *seal_direct_message(node, ProbeReply(8))
    )
    assert master.got() == [(None, ProbeReply(8))]
    assert master.room.traffic.rejected == {Rejection.AGAIN: 1}


def test_session_counters_continue_over_new_connection(
    network: MemoryNetwork, master: Peer
) -> None:
    """After ``set_master``, counters continue; late frames of the former sender are rejected."""
    node = Peer(network, None, 20)
    node.room.set_master(master.transport.endpoint, LOBBY)
    late = seal_direct_message(node, LONG)
    node.room.set_master(master.transport.endpoint, LOBBY)
    send_raw_frames(
        node,
        join_stream_address(master),
        late[0],
        *seal_direct_message(node, ProbeReply(1)),
        *late[1:],
    )
    assert master.got() == [(None, ProbeReply(1))]
    assert set(master.room.traffic.rejected) == {Rejection.AGAIN}
    send_raw_frames(node, join_stream_address(master), *seal_direct_message(node, LONG))
    assert master.got() == [(None, LONG)]
    node.room.replace_transport(network.open)
    node.room.set_master(master.transport.endpoint, LOBBY)
    node.room.send_direct(make_join_request(node.address))
    node.room.flush()
    assert master.got() == [(None, make_join_request(node.address))]


def test_sessions_have_separate_counters(network: MemoryNetwork, master: Peer) -> None:
    """Each process has its own counter, and frames of two processes' messages may alternate."""
    nodes = [Peer(network, None, 20 + 10 * n) for n in range(3)]
    for node in nodes:
        node.room.set_master(master.transport.endpoint, LOBBY)
    assert [seal_direct_message(nodes[0], ProbeReply(n)) for n in range(5)]
    both = zip(
        seal_direct_message(nodes[0], LONG), seal_direct_message(nodes[1], LONG), strict=True
    )
    send_raw_frames(
        nodes[0], join_stream_address(master), *(frame for pair in both for frame in pair)
    )
    send_raw_frames(
        nodes[2], join_stream_address(master), *seal_direct_message(nodes[2], ProbeReply(3))
    )
    assert master.got() == [(None, LONG)] * 2 + [(None, ProbeReply(3))]
    assert master.room.traffic.rejected == {}


def test_master_stores_counters_only_for_processes_with_key(
    network: MemoryNetwork, master: Peer
) -> None:
    """The master stores one counter per process that has the key, and none for forged frames."""
    nodes = [Peer(network, None, 20 + 10 * n) for n in range(3)]
    for node in nodes * 5:
        node.room.set_master(master.transport.endpoint, LOBBY)
        node.room.send_direct(LONG)
        node.room.flush()
    rest = random.Random(1)
    send_raw_frames(
        nodes[0], join_stream_address(master), *(make_forged_frame(rest) for _ in range(50))
    )
    assert len(master.got()) == 15
    assert master.room._direct_receiver.last_counts.keys() == {node.token for node in nodes}


# -- counting what is rejected ---------------------------------------------------------------------


def make_forged_frame(chance: random.Random) -> bytes:
    """Return a frame as a stranger could make it: with any job, version, length or header."""
    header = Header(
        kind=chance.randrange(256),
        sender=chance.choice((None, MASTER, 7, chance.getrandbits(32))),
        receiver=chance.getrandbits(32),
        edge=chance.choice((0, 3, chance.getrandbits(32))),
        counter=chance.getrandbits(63),
        piece=chance.randrange(3),
        pieces=chance.randrange(1, 4),
    )
    job = chance.choice((JOB, chance.getrandbits(64)))
    frame = bytearray(Seal(chance.randbytes(KEY_BYTES), job).close(header, chance.randbytes(9)))
    if chance.random() < 0.2:
        frame[4] = chance.randrange(256)
    if chance.random() < 0.2:
        frame[HEADER.size - 4 : HEADER.size] = chance.randbytes(4)
    return bytes(frame[: chance.choice((len(frame), chance.randrange(len(frame))))])


def test_forged_frames_are_counted_by_reason_without_using_memory(
    network: MemoryNetwork, master: Peer
) -> None:
    """Forged frames are counted by reason and take no memory, however they vary."""
    node, chance = make_listening_node(network, 7, 20), random.Random(2)
    for office, at in ((master, join_stream_address(master)), (node, node.address)):
        for _ in range(FORGED):
            send_raw_frames(office, at, make_forged_frame(chance))
            assert office.got() == []
        assert office.room.traffic.rejected.total() == FORGED
        assert set(office.room.traffic.rejected) <= set(Rejection)
        assert len(office.room.traffic.rejected) >= 5
        assert office.room._direct_receiver.last_counts == {}
    ours = Seal(KEY, JOB).close(HEAD, ASK)
    send_raw_frames(master, node.address, ours)
    assert node.got() == []
    assert node.room.traffic.rejected[Rejection.EARLY] == 1
    assert node.room.traffic.foreign_frames == FORGED
