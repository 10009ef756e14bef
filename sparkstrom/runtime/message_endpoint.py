"""Message endpoint: messages in and out over one transport, sealed, cut, joined and counted.

It belongs to the thread that drives a machine. Sending never blocks: frames wait in a queue per
stream, control apart from data, and go when the transport takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from sparkstrom.base.errors import WireError
from sparkstrom.base.identity import MASTER, EdgeNo, Endpoint, NodeId, Seq
from sparkstrom.codec.frames import (
    OVERHEAD_BYTES,
    UNBOUND,
    FrameError,
    Header,
    Joiner,
    Rejection,
    Seal,
    pieces_of,
    told_by,
)
from sparkstrom.codec.messages import Address, Direct, Heartbeat, Message, State, Update
from sparkstrom.codec.wire import Kind, decode_untrusted, encode, is_data
from sparkstrom.protocol.common.events import Answer
from sparkstrom.runtime.encoded_once import EncodedOnce
from sparkstrom.runtime.outbox import Answers, Outbox
from sparkstrom.runtime.traffic import Traffic
from sparkstrom.transport.contract import Sender, Transport

CONTROL_PIECE_BYTES = 8192 - OVERHEAD_BYTES  # the least that a control stream's log takes
TELLERS_MAX = 1024  # of whom the join stream keeps what is not whole yet
NEWEST_COUNTS = (Heartbeat, State)  # each says all that the one before it said, and more
IDLE_WAIT_S = 0.02  # between two looks at what is due; frames and wakes come at once
BRIEF_WAIT_S = 0.001  # where something is due soon, or the transport did not take all
LOCAL = 2  # streams of an edge inside one media driver: so much above those for UDP


@dataclass(slots=True)
class Peer:
    """The outgoing half of an edge."""

    node: NodeId
    edge: EdgeNo
    control: Outbox
    data: Outbox


@dataclass(slots=True)
class IncomingEdge:
    """The incoming half of an edge: one local stream. Unbound until the edge is agreed."""

    node: NodeId | None
    edge: EdgeNo
    data: bool
    joiner: Joiner


@dataclass(slots=True)
class DirectMessages:
    """The master's stream for whoever has the job's key. Nothing is heard twice.

    Each process tells under its token, with a count that rises. ``heard`` lives as long as the
    fit, whatever becomes of the stream, and has one number for each process that Spark has
    started for it: only who has the key makes an entry, and a recording of it makes none.
    """

    message_bytes_max: int
    heard: dict[int, int] = field(default_factory=dict)  # token -> its highest count
    joiners: dict[int, Joiner] = field(default_factory=dict)  # token -> what is not whole yet

    def take(self, header: Header, body: bytes) -> bytes | None:
        """The whole message's body once its last piece is here. Raise FrameError for a replay."""
        token, known = header.session, self.heard.get(header.session, 0)
        if header.count <= known:
            raise FrameError(Rejection.AGAIN, f"count {header.count}, it was {known} already")
        self.heard[token] = header.count
        joiner = self.joiners.pop(token, None) or Joiner(self.message_bytes_max)
        if len(self.joiners) >= TELLERS_MAX:
            del self.joiners[next(iter(self.joiners))]
        whole = joiner.take(header, body)
        if whole is None:
            self.joiners[token] = joiner
        return whole


class MessageEndpoint:
    """Sends and receives for one node. ``me`` is its id, None until it has one.

    ``token``: of its process; the master has none. What is said directly is bound to it.
    ``chunk_bytes_max``: of a message in one data frame, where the transport takes so much.
    """

    def __init__(
        self,
        transport: Transport,
        seal: Seal,
        *,
        me: NodeId | None,
        token: int,
        message_bytes_max: int,
        chunk_bytes_max: int,
        traffic: Traffic | None = None,
    ) -> None:
        self.transport, self._seal, self.me, self._token = transport, seal, me, token
        self._message_bytes_max, self._chunk_bytes_max = message_bytes_max, chunk_bytes_max
        self.traffic = traffic or Traffic()
        self._counter = self._told = 0
        self._peers: dict[NodeId, Peer] = {}
        self._slots: dict[int, IncomingEdge] = {}
        # The highest counters of edges that were heard: a recording is as old when one is reopened.
        self._heard: dict[tuple[NodeId, EdgeNo, bool], int] = {}
        self._own: Address | None = None  # where this node listens for its parent
        self._master: tuple[Endpoint, int] | None = None
        self._to_master: Outbox | None = None
        self._direct_messages = DirectMessages(CONTROL_PIECE_BYTES * 8)
        self._join_stream: int | None = None
        self._answers = Answers(self._open_answer)
        self._direct = Joiner(message_bytes_max)  # the master's own words, whichever stream
        self.bodies = EncodedOnce()
        self._sealed_seq = (MASTER, Seq(0))
        self._arriving: dict[NodeId, int] = {}  # neighbour -> bytes of a message that is not whole

    # -- edges -----------------------------------------------------------------------------------

    def listen(self, address: Address) -> None:
        """Take there what the master says directly, and later what the parent says."""
        if self._own is not None:
            for stream in (*_streams(self._own), *_streams(_local(self._own))):
                self._close_receiver(stream)
        self._own = address
        for stream in _streams(address):
            self._unbind(stream)
            self.transport.open_receiver(stream)

    def open_join_stream(self, stream: int) -> None:
        """Take what is told directly by anybody who has the key."""
        self._join_stream = stream
        self.transport.open_receiver(stream)

    def open_edge(self, node: NodeId, edge: EdgeNo, local: Address, peer: Address) -> None:
        """Hear this neighbour at ``local`` and send to it at ``peer``; an older edge is dropped.

        Neighbours on one media driver speak by shared memory, on streams of their own.
        """
        same = Endpoint(peer.host, peer.port) == self.transport.endpoint
        if same:
            local, peer = _local(local), _local(peer)
        for stream, slot in list(self._slots.items()):
            if (slot.node, slot.edge) == (node, edge) and stream not in _streams(local):
                self._forget(stream)  # before the new ones count on
        for stream in _streams(local):
            if stream not in self._slots:
                self.transport.open_receiver(stream, local=same)
            self._retire(stream)
            self._slots[stream] = self._slot(node, edge, data=stream == local.data_stream)
        for stream, slot in list(self._slots.items()):
            if slot.node == node and slot.edge != edge:
                self._forget(stream)
        self._connect(node, edge, peer, local=same)

    def close_edge(self, node: NodeId) -> None:
        """Neither hear this neighbour nor send to it."""
        for stream in [s for s, slot in self._slots.items() if slot.node == node]:
            self._forget(stream)
        self._disconnect(node)

    def _slot(self, node: NodeId | None, edge: EdgeNo, *, data: bool) -> IncomingEdge:
        after = -1 if node is None else self._heard.get((node, edge, data), -1)
        return IncomingEdge(node, edge, data, Joiner(self._message_bytes_max, after))

    def _retire(self, stream: int) -> IncomingEdge | None:
        """Take the slot away, and remember how far its edge has counted."""
        slot = self._slots.pop(stream, None)
        if slot is not None and slot.node is not None:
            self._heard[slot.node, slot.edge, slot.data] = slot.joiner.counter
        return slot

    def _unbind(self, own: int) -> None:
        assert self._own is not None
        self._retire(own)
        self._slots[own] = self._slot(None, UNBOUND, data=own == self._own.data_stream)

    def _forget(self, stream: int) -> None:
        """Hear no neighbour there; the own streams stay, for the next parent and the master."""
        if self._own is not None and stream in _streams(self._own):
            self._unbind(stream)
        else:
            self._close_receiver(stream)

    def _close_receiver(self, stream: int) -> None:
        if self._retire(stream) is not None:
            self.transport.close_receiver(stream)

    def _connect(self, node: NodeId, edge: EdgeNo, address: Address, *, local: bool) -> None:
        self._disconnect(node)
        there, opening = Endpoint(address.host, address.port), self.transport.open_sender
        control = opening(there, address.control_stream, control=True, local=local)
        data = opening(there, address.data_stream, control=False, local=local)
        self._peers[node] = Peer(node, edge, Outbox(control), Outbox(data))

    def _disconnect(self, node: NodeId) -> None:
        """Drop the connection, with what waits on it."""
        peer = self._peers.pop(node, None)
        if peer is not None:
            peer.control.close()
            peer.data.close()

    # -- sending ---------------------------------------------------------------------------------

    def send(self, node: NodeId, message: Message) -> None:
        """Queue for a neighbour; where there is no edge, it is lost."""
        peer = self._peers.get(node)
        if peer is None:
            self.traffic.not_queued += 1
            return
        frames = self._seal_message(message, receiver=node, edge=peer.edge)
        if isinstance(message, Update):
            self._count_update(message, frames)
        box = peer.data if is_data(message) else peer.control
        box.put(frames, type(message) if isinstance(message, NEWEST_COUNTS) else None)
        self.traffic.count_sent(message, frames)

    def meet(self, endpoint: Endpoint, join_stream: int) -> None:
        """Where the master takes what is told directly; a connection that was there is dropped."""
        self._master = endpoint, join_stream
        if self._to_master is not None:
            self._to_master.close()
            self._to_master = None

    def tell(self, message: Direct) -> None:
        """Queue for the master's join stream."""
        assert self._master is not None, "the master's place is not known"
        if self._to_master is None:
            endpoint, stream = self._master
            self._to_master = Outbox(self.transport.open_sender(endpoint, stream, control=True))
        kind, body = encode(message)
        pieces, frames = pieces_of(body, CONTROL_PIECE_BYTES), []
        for i, piece in enumerate(pieces):
            self._told += 1
            header = told_by(self._token, self._told, kind, i, len(pieces))
            frames.append(self._seal.close(header, piece))
        self._to_master.put(frames)
        self.traffic.count_sent(message, frames)

    def answer(self, answer: Answer) -> None:
        """Queue something that the master says directly, whoever stands between."""
        frames = self._seal_message(
            answer.message, receiver=answer.node, edge=UNBOUND, token=answer.token
        )
        if self._answers.put(answer.address, frames):
            self.traffic.count_sent(answer.message, frames)
        else:
            self.traffic.not_queued += 1

    def deaf(self) -> tuple[Endpoint, ...]:
        """Who has asked again and again and is not there for the answers."""
        return self._answers.deaf()

    def _open_answer(self, address: Address) -> Sender:
        there = Endpoint(address.host, address.port)
        return self.transport.open_sender(there, address.control_stream, control=True)

    def flush(self) -> int:
        """Offer what waits on all streams, control first; return how many frames went."""
        self.bodies.forget()
        return sum([self._answers.flush(), *(box.flush() for box in self._boxes())])

    @property
    def waiting(self) -> int:
        """Frames that the transport has not taken yet."""
        return len(self._answers) + sum(map(len, self._boxes()))

    def _boxes(self) -> list[Outbox]:
        join_stream = [self._to_master] if self._to_master is not None else []
        control = [peer.control for peer in self._peers.values()]
        return [*join_stream, *control, *(peer.data for peer in self._peers.values())]

    @property
    def _piece_bytes(self) -> int:
        """Asked each time: after ``move_to`` the log may be a smaller one."""
        return min(self.transport.max_frame_bytes - OVERHEAD_BYTES, self._chunk_bytes_max)

    def _seal_message(
        self, message: Message, *, receiver: NodeId | None, edge: EdgeNo, token: int = 0
    ) -> list[bytes]:
        piece_bytes = self._piece_bytes if is_data(message) else CONTROL_PIECE_BYTES
        kind, pieces = self.bodies.of(message, piece_bytes)
        frames = []
        for i, piece in enumerate(pieces):
            self._counter += 1
            header = Header(kind, self.me, receiver, edge, self._counter, i, len(pieces))
            frames.append(self._seal.close(header, piece, token))
        return frames

    def _count_update(self, update: Update, frames: list[bytes]) -> None:
        key = (update.origin, update.seq)
        if key > self._sealed_seq and update.origin == self.me:
            self._sealed_seq = key
            self.traffic.update_bytes += sum(map(len, frames))

    # -- receiving -------------------------------------------------------------------------------

    def patience_s(self, brief: bool) -> float:
        """How long to wait for messages: what waits to be sent is offered again soon."""
        return BRIEF_WAIT_S if brief or self.waiting else IDLE_WAIT_S

    def receive(self, wait_s: float) -> Iterator[tuple[NodeId | None, Message]]:
        """Messages that came in, with their senders' ids; waits at most ``wait_s``, or for a wake.

        None for who told it directly.
        One by one: what a message changes (``me``, slots) holds for the next one.
        """
        for stream, frame in self.transport.poll(wait_s):
            self.traffic.received_bytes += len(frame)
            try:
                taken = self._open(stream, frame)
            except WireError as error:
                self.traffic.rejected[_rejection(error)] += 1
                continue
            if taken is not None:
                yield taken

    def _open(self, stream: int, frame: bytes) -> tuple[NodeId | None, Message] | None:
        if stream == self._join_stream:
            return self._open_direct(frame)
        slot = self._slots.get(stream)
        if slot is None:
            return None  # of an edge that was closed a moment ago
        header, body = self._seal.open_untrusted(frame, self._token)
        direct = header.from_master
        agreed = slot.node is not None and (header.sender, header.edge) == (slot.node, slot.edge)
        if not (direct or agreed):
            raise FrameError(Rejection.EARLY if slot.node is None else Rejection.OTHER_EDGE)
        if (header.kind != Kind.CONTROL) != slot.data:
            raise FrameError(Rejection.OTHER_STREAM)  # each has counters: heard here, it is new
        if header.receiver != self.me and not (direct and header.receiver is None):
            raise FrameError(Rejection.OTHER_RECEIVER)
        assert header.sender is not None, "a neighbour, or the master"
        joiner = self._direct if direct else slot.joiner
        whole = joiner.take(header, body)
        if whole is None:
            if header.kind != Kind.CONTROL:
                self._arriving[header.sender] = joiner.arriving_bytes
            return None
        self._arriving.pop(header.sender, None)
        return header.sender, decode_untrusted(header.kind, whole)

    def wake(self) -> None:
        """Let who waits for messages wait no longer: there is something to do. From any thread."""
        self.transport.wake()

    def arriving(self) -> list[tuple[NodeId, int]]:
        """Since the last call: neighbours with a data message under way, and its bytes so far."""
        arriving, self._arriving = list(self._arriving.items()), {}
        return arriving

    def _open_direct(self, frame: bytes) -> tuple[None, Message] | None:
        header, body = self._seal.open_untrusted(frame)
        if header.sender is not None:
            raise FrameError(Rejection.NOT_DIRECT)
        whole = self._direct_messages.take(header, body)
        if whole is None:
            return None
        message = decode_untrusted(header.kind, whole)
        if not isinstance(message, Direct):
            raise FrameError(Rejection.NOT_DIRECT)
        return None, message

    # -- the transport's life --------------------------------------------------------------------

    def move_to(self, opening: Callable[[], Transport]) -> None:
        """Go on over another transport: edges and slots are gone, counters and traffic stay.

        So does what the join stream has heard: a recording is as old over another stream.
        """
        self.close()
        self.transport = opening()

    def close(self) -> None:
        """Close everything, the transport too."""
        self._peers.clear()
        for stream in list(self._slots):
            self._retire(stream)
        self._answers = Answers(self._open_answer)
        self._own = self._to_master = self._join_stream = None
        self.transport.close()


def _rejection(error: WireError) -> Rejection:
    return Rejection(error.rejection) if isinstance(error, FrameError) else Rejection.NO_MESSAGE


def _streams(address: Address) -> tuple[int, int]:
    return address.control_stream, address.data_stream


def _local(address: Address) -> Address:
    """The same place for a neighbour on the same media driver."""
    return Address(
        address.host, address.port, address.control_stream + LOCAL, address.data_stream + LOCAL
    )
