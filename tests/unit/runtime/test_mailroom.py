"""The mailroom over memory: who is heard, who is not, what waits, and that no nonce repeats."""

from __future__ import annotations

import secrets
from dataclasses import replace

import pytest

from sparkstrom.base.identity import MASTER, Endpoint
from sparkstrom.codec import frames
from sparkstrom.codec.frames import KEY_BYTES, NOBODY, OVERHEAD_BYTES, Header, Seal
from sparkstrom.codec.messages import (
    Address,
    AskAfter,
    Committed,
    Failed,
    Final,
    Join,
    Message,
    Refused,
    Update,
    Welcome,
)
from sparkstrom.codec.wire import encode
from sparkstrom.runtime import mailroom
from sparkstrom.runtime.mailroom import STRANGERS, Mailroom
from sparkstrom.transport.memory import MemoryNetwork, MemoryTransport

KEY, JOB = bytes(range(KEY_BYTES)), 5
LOBBY = 77


class Recording(Seal):
    """Notes the nonce of each frame it closes."""

    def __init__(self) -> None:
        super().__init__(KEY, JOB)
        self.nonces: list[bytes] = []

    def close(self, header: Header, body: bytes) -> bytes:
        self.nonces.append(frames._nonce(header))
        return super().close(header, body)


class Office:
    """One mailroom, its transport, and the address that its one neighbour writes to."""

    def __init__(self, network: MemoryNetwork, me: int, stream: int, chunk: int = 65_536) -> None:
        self.transport = network.open()
        self.seal = Recording()
        self.room = Mailroom(
            self.transport,
            self.seal,
            me=me,
            message_bytes_max=100_000,
            chunk_bytes_max=chunk,
            random_u63=lambda: secrets.randbits(63),
        )
        here = self.transport.endpoint
        self.address = Address(here.host, here.port, stream, stream + 1)

    def got(self) -> list[tuple[int, Message]]:
        return list(self.room.receive(0.0))


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork()


@pytest.fixture
def pair(network: MemoryNetwork) -> tuple[Office, Office]:
    """The master and node 7, joined by edge 3."""
    master, node = Office(network, MASTER, 10), Office(network, 7, 20)
    join(master, node, edge=3)
    return master, node


def join(master: Office, node: Office, edge: int) -> None:
    for here, there in ((master, node), (node, master)):
        here.room.listen(here.address, there.room.me, edge)
    master.room.connect(node.room.me, edge, node.address)
    node.room.connect(MASTER, edge, master.address)


def update(seq: int = 1, payload: bytes = b"bits", origin: int = 7) -> Update:
    return Update(
        origin=origin,
        seq=seq,
        seen=0,
        epoch=0,
        batch=1,
        steps=1,
        form=1,
        tau_quanta=2,
        count=1,
        payload=payload,
    )


def joining(address: Address) -> Join:
    return Join(
        token=1, count=0, edge=1, partition=0, attempt=0, rows=1, checksum=1, batches=1, pid=1,
        address=address, host="h", executor="e", version="v", have=0, has_replica=False,
    )  # fmt: skip


def welcome(node: int) -> Welcome:
    return Welcome(
        token=1, count=0, edge=3, node=node, up=Address("h", 1, 1, 2), base=0, snapshot=False,
        chunks=1, last=[], closed=[], epoch=0, batch=0, steps=0, grants=[],
    )  # fmt: skip


def test_messages_travel_both_ways_and_control_overtakes_data(pair: tuple[Office, Office]) -> None:
    master, node = pair
    node.room.send(MASTER, update())
    node.room.send(MASTER, Final(1))
    assert node.room.flush() == 2
    assert master.got() == [(7, Final(1)), (7, update())]
    master.room.send(7, AskAfter(4))
    assert master.room.waiting == 1
    master.room.flush()
    assert master.room.waiting == 0
    assert node.got() == [(MASTER, AskAfter(4))]


def test_long_messages_are_cut_and_joined(network: MemoryNetwork) -> None:
    master, node = Office(network, MASTER, 10), Office(network, 7, 20, chunk=1024)
    join(master, node, edge=3)
    long, trace = update(payload=bytes(4096)), Failed(reason="r", trace="t" * 16_000)
    node.room.send(MASTER, long)
    node.room.send(MASTER, trace)
    assert node.room.waiting == 5 + 2  # 1024 at a time; control has a fixed size of its own
    node.room.flush()
    assert master.got() == [(7, trace), (7, long)]


def test_the_transport_limits_a_frame_too(pair: tuple[Office, Office]) -> None:
    _, node = pair
    most = node.transport.max_frame_bytes - OVERHEAD_BYTES
    body = len(encode(update(payload=b""))[1])
    node.room.send(MASTER, update(payload=bytes(most - body)))
    assert node.room.waiting == 1
    node.room.send(MASTER, update(payload=bytes(most - body + 1)))
    assert node.room.waiting == 3


def test_pieces_fit_the_transport_of_the_day(pair: tuple[Office, Office]) -> None:
    """After a media driver's death the logs of the next one may be smaller."""
    master, node = pair

    class Narrow(MemoryTransport):
        max_frame_bytes = 2000

    network = node.transport._network
    node.room.move_to(lambda: Narrow(network, Endpoint("127.0.0.1", 99)))
    node.room.connect(MASTER, 3, master.address)
    node.room.send(MASTER, update(payload=bytes(4000)))
    assert node.room.waiting == 3


def offer(office: Office, at: Address, *frame: bytes, control: bool = True) -> None:
    """Put raw frames where this address listens."""
    stream = at.control_stream if control else at.data_stream
    sender = office.transport.open_sender(Endpoint(at.host, at.port), stream, control=control)
    sender.offer(frame)


HEAD = Header(kind=1, sender=7, receiver=MASTER, edge=3, counter=1, piece=0, pieces=1)
FINAL = encode(Final(1))[1]


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (b"hello", "a frame has at least"),
        (Seal(bytes(KEY_BYTES), JOB).close(HEAD, FINAL), "the seal does not fit"),
        (Seal(KEY, JOB + 1).close(HEAD, FINAL), "a frame of job"),
        (Seal(KEY, JOB).close(replace(HEAD, edge=4), FINAL), "a frame of another edge"),
        (Seal(KEY, JOB).close(replace(HEAD, sender=8), FINAL), "a frame of another edge"),
        (Seal(KEY, JOB).close(replace(HEAD, receiver=8), FINAL), "a frame for somebody else"),
        (Seal(KEY, JOB).close(HEAD, b"no message"), "control message"),
        (Seal(KEY, JOB).close(replace(HEAD, kind=9), FINAL), "unknown kind of message 9"),
    ],
)
def test_strangers_frames_are_counted_and_change_nothing(
    pair: tuple[Office, Office], frame: bytes, reason: str
) -> None:
    master, node = pair
    offer(node, master.address, frame)
    node.room.send(MASTER, Final(2))
    node.room.send(MASTER, Final(3))
    node.room.flush()
    assert [message for _, message in master.got()][-1] == Final(3)
    assert [text for text in master.room.traffic.rejected if text.startswith(reason)]
    assert master.room.traffic.received_bytes > len(frame)


def test_a_repeated_frame_is_counted_and_dropped(pair: tuple[Office, Office]) -> None:
    master, node = pair
    frame = Seal(KEY, JOB).close(HEAD, FINAL)
    offer(node, master.address, frame, frame)
    assert master.got() == [(7, Final(1))]
    assert master.room.traffic.rejected.total() == 1


def test_frames_on_a_stream_that_was_closed_are_nobodys(pair: tuple[Office, Office]) -> None:
    master, node = pair
    node.room.send(MASTER, Final(1))
    node.room.flush()
    master.room.deaf(7)
    assert master.got() == []
    assert node.room.flush() == 0


def test_only_joins_are_taken_in_the_lobby(network: MemoryNetwork) -> None:
    master, node = Office(network, MASTER, 10), Office(network, NOBODY, 20)
    master.room.listen_to_strangers(LOBBY)
    node.room.connect_lobby(master.transport.endpoint, LOBBY)
    node.room.send(MASTER, joining(node.address))
    node.room.flush()
    assert master.got() == [(STRANGERS, joining(node.address))]
    lobby = Address("127.0.0.1", master.address.port, LOBBY, LOBBY)
    stranger = replace(HEAD, sender=NOBODY)
    offer(node, lobby, Seal(KEY, JOB).close(stranger, FINAL))
    offer(node, lobby, Seal(KEY, JOB).close(HEAD, encode(joining(node.address))[1]))
    assert master.got() == []
    assert master.room.traffic.rejected == {"only joins are taken here": 2}


def test_who_left_the_lobby_sends_no_joins(network: MemoryNetwork) -> None:
    master, node = Office(network, MASTER, 10), Office(network, NOBODY, 20)
    master.room.listen_to_strangers(LOBBY)
    node.room.connect_lobby(master.transport.endpoint, LOBBY)
    node.room.leave_lobby()
    node.room.send(MASTER, joining(node.address))
    node.room.flush()
    assert master.got() == []


def test_an_answer_reaches_who_has_no_edge(network: MemoryNetwork) -> None:
    master, node = Office(network, MASTER, 10), Office(network, NOBODY, 20)
    node.room.listen(node.address, MASTER, 1)
    refused = Refused(token=1, count=0, reason="no", fatal=True)
    for _ in range(2):
        master.room.answer(node.address, refused)
    master.room.flush()
    assert node.got() == [(MASTER, refused)] * 2


def test_senders_for_answers_are_bounded(network: MemoryNetwork) -> None:
    master, node = Office(network, MASTER, 10), Office(network, NOBODY, 20)
    for stream in range(1, 100):
        master.room.answer(replace_stream(node.address, stream), AskAfter(0))
    assert master.room.waiting == mailroom.ANSWERS_MAX


def replace_stream(address: Address, stream: int) -> Address:
    return Address(address.host, address.port, stream, stream + 1)


def test_a_welcome_finds_a_node_that_has_no_id_yet(network: MemoryNetwork) -> None:
    """Sealed for the id it brings; what follows in the same poll is for that id, too."""
    master, node = Office(network, MASTER, 10), Office(network, NOBODY, 20)
    node.room.listen(node.address, MASTER, 3)
    master.room.connect(9, 3, node.address)
    master.room.send(9, welcome(9))
    master.room.send(9, AskAfter(1))
    master.room.flush()
    came = []
    for _, message in node.room.receive(0.0):
        if isinstance(message, Welcome):
            node.room.me = message.node
        came.append(message)
    assert came == [welcome(9), AskAfter(1)]


def test_a_full_queue_loses_what_is_new_and_counts_it(
    pair: tuple[Office, Office], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailroom, "QUEUED_FRAMES_MAX", 3)
    master, node = pair
    for seq in range(1, 6):
        node.room.send(MASTER, update(seq))
    assert (node.room.waiting, node.room.traffic.not_queued) == (3, 2)
    node.room.flush()
    assert [m.seq for _, m in master.got() if isinstance(m, Update)] == [1, 2, 3]


def test_a_message_of_any_length_fits_an_empty_queue(
    network: MemoryNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailroom, "QUEUED_FRAMES_MAX", 3)
    master, node = Office(network, MASTER, 10), Office(network, 7, 20, chunk=1024)
    join(master, node, edge=3)
    node.room.send(MASTER, update(payload=bytes(10_000)))
    node.room.flush()
    assert master.got() == [(7, update(payload=bytes(10_000)))]


def test_back_pressure_keeps_frames_in_order(pair: tuple[Office, Office]) -> None:
    master, node = pair
    for seq in range(1, 41):
        node.room.send(MASTER, update(seq, payload=bytes(60_000)))
    seqs: list[int] = []
    while node.room.waiting:
        assert node.room.flush() > 0
        seqs += [m.seq for _, m in master.got() if isinstance(m, Update)]
    assert seqs == list(range(1, 41))


def test_without_an_edge_a_message_is_lost_and_counted(network: MemoryNetwork) -> None:
    node = Office(network, 7, 20)
    node.room.send(MASTER, Final(1))
    assert node.room.traffic.not_queued == 1


def test_own_updates_are_counted_once_and_everything_on_the_wire_each_time(
    pair: tuple[Office, Office],
) -> None:
    _, node = pair
    for message in (update(1), update(1), update(2), update(2, origin=8)):
        node.room.send(MASTER, message)
    frame = OVERHEAD_BYTES + len(encode(update())[1])
    assert node.room.traffic.update_bytes == 2 * frame
    assert node.room.traffic.wire_bytes == 4 * frame


def test_a_new_edge_replaces_the_old_one(pair: tuple[Office, Office]) -> None:
    master, node = pair
    node.room.send(MASTER, Final(1))
    for here, there in ((master, node), (node, master)):
        here.room.deaf(there.room.me)
    join(master, node, edge=4)
    node.room.send(MASTER, Final(2))
    node.room.flush()
    assert master.got() == [(7, Final(2))]


def test_over_another_transport_counters_and_traffic_go_on(pair: tuple[Office, Office]) -> None:
    master, node = pair
    node.room.send(MASTER, update())
    node.room.flush()
    before = node.room.traffic.wire_bytes
    other = node.transport._network.open()
    node.room.move_to(lambda: other)
    assert node.room.waiting == 0
    with pytest.raises(Exception, match="closed"):
        node.transport.poll(0.0)
    node.room.send(MASTER, Final(1))
    assert node.room.traffic.not_queued == 1  # no edge yet
    node.room.connect(MASTER, 3, master.address)
    node.room.send(MASTER, Final(2))
    node.room.flush()
    assert [m for _, m in master.got()] == [Final(2), update()]
    assert node.room.traffic.wire_bytes > before


def everything_that_is_sealed(master: Office, node: Office) -> None:
    """Data, control, repeats, answers, joins, another edge, another transport."""
    long = Committed(
        commit=1, origin=7, seq=1, form=1, tau_quanta=2, count=1, payload=bytes(200_000)
    )  # fmt: skip
    for _ in range(3):
        node.room.send(MASTER, update())
        node.room.send(MASTER, Final(1))
        master.room.send(7, long)
        master.room.answer(node.address, Final(1))
    node.room.connect_lobby(master.transport.endpoint, LOBBY)
    node.room.send(MASTER, joining(node.address))
    node.room.send(MASTER, joining(node.address))
    join(master, node, edge=9)
    node.room.send(MASTER, update())
    node.room.move_to(node.transport._network.open)
    node.room.connect(MASTER, 9, master.address)
    node.room.send(MASTER, update())


def test_no_nonce_is_used_twice(pair: tuple[Office, Office]) -> None:
    master, node = pair
    everything_that_is_sealed(master, node)
    nonces = master.seal.nonces + node.seal.nonces
    assert len(nonces) > 20
    assert len(set(nonces)) == len(nonces)
