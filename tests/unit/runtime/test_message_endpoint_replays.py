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
from tests.unit.runtime.offices import (
    ASK,
    HEAD,
    JOB,
    KEY,
    LOBBY,
    Office,
    join,
    joining,
    offer,
    update,
)

RELEASE = Release("a slot is needed")
LONG = TrainingFailure(node=1, reason="r" * 9000, trace="t" * 16_000)
FORGED = 2_000


def said(master: Office, to: Office, message: Message, node: int | None = None) -> list[bytes]:
    """Return the frames that the master would send for this direct message."""
    master.answer(to, message, node)
    return list(master.room._replies._waiting.pop(to.address))


def told(node: Office, message: TrainingFailure | ProbeReply) -> list[bytes]:
    """Return the frames that a node would send for this direct message to the master."""
    node.room.send_direct(message)
    box = node.room._to_master
    assert box is not None
    frames = list(box.frames)
    box.frames.clear()
    return frames


@pytest.fixture
def master(network: MemoryNetwork) -> Office:
    """A master with a join stream."""
    office = Office(network, MASTER, 10)
    office.room.listen_for_joins(LOBBY)
    return office


def listening(network: MemoryNetwork, me: int, stream: int) -> Office:
    """Return a node with this id that listens for its parent and the master."""
    office = Office(network, me, stream)
    office.room.listen(office.address)
    return office


def join_stream(master: Office) -> Address:
    """Return the master's join stream as an address."""
    return Address("127.0.0.1", master.address.port, LOBBY, LOBBY)


# -- over an edge ----------------------------------------------------------------------------------


def test_what_was_heard_on_one_stream_of_an_edge_is_not_heard_on_the_other(
    network: MemoryNetwork, master: Office
) -> None:
    """A control frame is rejected on the data stream, and vice versa; each has its own counter."""
    node = Office(network, 7, 20)
    up = join(master, node, edge=3)
    offer(node, up, Seal(KEY, JOB).close(HEAD, ASK))
    assert master.got() == [(7, CommitsRequest(1))]
    offer(node, up, Seal(KEY, JOB).close(HEAD, ASK), control=False)
    kind, body = encode(update())
    data = Seal(KEY, JOB).close(replace(HEAD, kind=kind, counter=2), body)
    offer(node, up, data, control=False)
    assert master.got() == [(7, update())]
    offer(node, up, data)
    assert master.got() == []
    assert master.room.traffic.rejected == {Rejection.OTHER_STREAM: 2}


@pytest.mark.parametrize("how", ["opened again", "closed before", "elsewhere", "moved"])
def test_what_was_heard_on_an_edge_is_not_heard_when_it_is_opened_again(
    network: MemoryNetwork, master: Office, how: str
) -> None:
    """Recorded frames of an edge stay rejected after the edge is opened again, in any way."""
    node = Office(network, 7, 20)
    up = join(master, node, edge=3)
    recorded = [Seal(KEY, JOB).close(replace(HEAD, counter=count), ASK) for count in (4, 5)]
    offer(node, up, *recorded)
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
    offer(node, up, *recorded)
    assert master.got() == []
    assert master.room.traffic.rejected == {Rejection.AGAIN: 2}
    offer(node, up, Seal(KEY, JOB).close(replace(HEAD, counter=6), ASK))
    assert master.got() == [(7, CommitsRequest(1))]


# -- from the master -------------------------------------------------------------------------------


def test_what_is_said_to_one_node_is_not_heard_by_another(
    network: MemoryNetwork, master: Office
) -> None:
    """A direct message for one process cannot be decrypted by another."""
    seven, eight = listening(network, 7, 20), listening(network, 8, 30)
    frames = said(master, seven, RELEASE, 7)
    offer(master, eight.address, *frames)
    assert eight.got() == []
    assert eight.room.traffic.rejected == {Rejection.SEAL: 1}
    offer(master, seven.address, *frames)
    assert seven.got() == [(MASTER, RELEASE)]


@pytest.mark.parametrize(
    "message", [JoinRefusal(token=1, count=1, reason="no", fatal=True), Probe(7)]
)
def test_nor_what_is_said_to_one_that_has_no_id_yet(
    network: MemoryNetwork, master: Office, message: Message
) -> None:
    """A direct message for a process without an id cannot be decrypted by another."""
    one, other = listening(network, None, 20), listening(network, None, 30)
    frames = said(master, one, message)
    offer(master, other.address, *frames)
    assert other.got() == []
    assert other.room.traffic.rejected == {Rejection.SEAL: 1}
    offer(master, one.address, *frames)
    assert one.got() == [(MASTER, message)]


def test_what_was_meant_for_an_id_does_not_reach_the_next_one(
    network: MemoryNetwork, master: Office
) -> None:
    """A returned process, now node 9, rejects a request to leave that was sent to it as node 7."""
    node = listening(network, 7, 20)
    frames = said(master, node, RELEASE, 7)
    node.room.me = 9
    offer(master, node.address, *frames)
    assert node.got() == []
    assert node.room.traffic.rejected == {Rejection.OTHER_RECEIVER: 1}


def test_it_is_heard_once_on_whatever_stream(network: MemoryNetwork, master: Office) -> None:
    """A direct message is accepted once, also if it is replayed on other streams or transports."""
    node = listening(network, 7, 20)
    frames = said(master, node, RELEASE, 7)
    offer(master, node.address, *frames, *frames)
    node.room.listen(node.at(60))
    offer(master, node.at(60), *frames)
    assert node.got() == [(MASTER, RELEASE)]
    node.room.replace_transport(network.open)
    node.room.listen(node.at(70))
    offer(master, Office.at(node, 70), *frames)
    assert node.got() == []


# -- to the master ---------------------------------------------------------------------------------


def test_what_was_told_is_not_heard_again(network: MemoryNetwork, master: Office) -> None:
    """Replayed probe replies, which would extend a dead node's lease, are rejected."""
    node = Office(network, None, 20)
    node.room.set_master(master.transport.endpoint, LOBBY)
    first, second = told(node, ProbeReply(7)), told(node, ProbeReply(7))
    offer(node, join_stream(master), *first, *first, *second, *first, *second)
    assert master.got() == [(None, ProbeReply(7))] * 2
    assert master.room.traffic.rejected == {Rejection.AGAIN: 3}


def test_nor_after_the_drivers_media_driver_has_died(
    network: MemoryNetwork, master: Office
) -> None:
    """Replays are rejected after the driver program's transport was replaced."""
    node = Office(network, None, 20)
    node.room.set_master(master.transport.endpoint, LOBBY)
    frames = told(node, ProbeReply(7))
    offer(node, join_stream(master), *frames)
    assert master.got() == [(None, ProbeReply(7))]
    endpoint = master.transport.endpoint
    master.room.replace_transport(lambda: type(master.transport)(network, endpoint))
    master.room.listen_for_joins(LOBBY)
    offer(node, join_stream(master), *frames, *told(node, ProbeReply(8)))
    assert master.got() == [(None, ProbeReply(8))]
    assert master.room.traffic.rejected == {Rejection.AGAIN: 1}


def test_a_session_goes_on_over_other_connections(network: MemoryNetwork, master: Office) -> None:
    """After ``set_master``, counters continue; late frames of the former sender are rejected."""
    node = Office(network, None, 20)
    node.room.set_master(master.transport.endpoint, LOBBY)
    late = told(node, LONG)
    node.room.set_master(master.transport.endpoint, LOBBY)
    offer(node, join_stream(master), late[0], *told(node, ProbeReply(1)), *late[1:])
    assert master.got() == [(None, ProbeReply(1))]
    assert set(master.room.traffic.rejected) == {Rejection.AGAIN}
    offer(node, join_stream(master), *told(node, LONG))
    assert master.got() == [(None, LONG)]
    node.room.replace_transport(network.open)
    node.room.set_master(master.transport.endpoint, LOBBY)
    node.room.send_direct(joining(node.address))
    node.room.flush()
    assert master.got() == [(None, joining(node.address))]


def test_sessions_do_not_disturb_each_other(network: MemoryNetwork, master: Office) -> None:
    """Each process has its own counter, and frames of two processes' messages may alternate."""
    nodes = [Office(network, None, 20 + 10 * n) for n in range(3)]
    for node in nodes:
        node.room.set_master(master.transport.endpoint, LOBBY)
    assert [told(nodes[0], ProbeReply(n)) for n in range(5)]
    both = zip(told(nodes[0], LONG), told(nodes[1], LONG), strict=True)
    offer(nodes[0], join_stream(master), *(frame for pair in both for frame in pair))
    offer(nodes[2], join_stream(master), *told(nodes[2], ProbeReply(3)))
    assert master.got() == [(None, LONG)] * 2 + [(None, ProbeReply(3))]
    assert master.room.traffic.rejected == {}


def test_only_who_has_the_key_takes_room_among_direct_messages(
    network: MemoryNetwork, master: Office
) -> None:
    """The master stores one counter per process that has the key, and none for forged frames."""
    nodes = [Office(network, None, 20 + 10 * n) for n in range(3)]
    for node in nodes * 5:
        node.room.set_master(master.transport.endpoint, LOBBY)
        node.room.send_direct(LONG)
        node.room.flush()
    rest = random.Random(1)
    offer(nodes[0], join_stream(master), *(forged(rest) for _ in range(50)))
    assert len(master.got()) == 15
    assert master.room._direct_receiver.last_counts.keys() == {node.token for node in nodes}


# -- counting what is rejected ---------------------------------------------------------------------


def forged(chance: random.Random) -> bytes:
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


def test_what_strangers_send_is_counted_by_a_few_reasons(
    network: MemoryNetwork, master: Office
) -> None:
    """Forged frames are counted by reason and take no memory, however they vary."""
    node, chance = listening(network, 7, 20), random.Random(2)
    for office, at in ((master, join_stream(master)), (node, node.address)):
        for _ in range(FORGED):
            offer(office, at, forged(chance))
            assert office.got() == []
        assert office.room.traffic.rejected.total() == FORGED
        assert set(office.room.traffic.rejected) <= set(Rejection)
        assert len(office.room.traffic.rejected) >= 5
        assert office.room._direct_receiver.last_counts == {}
    ours = Seal(KEY, JOB).close(HEAD, ASK)
    offer(master, node.address, ours)
    assert node.got() == []
    assert node.room.traffic.rejected[Rejection.EARLY] == 1
    assert node.room.traffic.foreign_frames == FORGED
