"""Mailroom: messages in and out over one transport, sealed, cut, joined and counted.

It belongs to the thread that drives a machine. Sending never blocks: frames wait in a queue per
stream, control apart from data, and go when the transport takes them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from sparkstrom.base.errors import WireError
from sparkstrom.base.identity import Endpoint
from sparkstrom.codec.frames import NOBODY, OVERHEAD_BYTES, Header, Joiner, Seal, pieces_of
from sparkstrom.codec.messages import Address, Join, Message, Update, Welcome
from sparkstrom.codec.wire import decode_untrusted, encode, is_data
from sparkstrom.transport.base import Offer, Sender, Transport

QUEUED_FRAMES_MAX = 4096  # a stream that takes nothing loses what is new; the protocol repeats it
ANSWERS_MAX = 32  # senders kept for those who have no edge
CONTROL_PIECE_BYTES = 8192 - OVERHEAD_BYTES  # the least that a control stream's log takes
UNBOUND = 0  # the edge of an answer to somebody who has none; edges count from 1
STRANGERS = -1  # whose lobby frames are: nobody's yet


class Outbox:
    """Frames that wait for one sender."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._frames: deque[bytes] = deque()

    def put(self, frames: list[bytes]) -> bool:
        """Queue a message's frames, all or none."""
        if len(self._frames) + len(frames) > QUEUED_FRAMES_MAX and self._frames:
            return False
        self._frames.extend(frames)
        return True

    def flush(self) -> int:
        """Offer what waits; return how many frames went."""
        if not self._frames:
            return 0
        sent, offer = self._sender.offer(list(self._frames))
        for _ in range(sent):
            self._frames.popleft()
        if offer is Offer.CLOSED:
            self._frames.clear()
        return sent

    def __len__(self) -> int:
        return len(self._frames)

    def close(self) -> None:
        self._sender.close()


@dataclass(slots=True)
class Peer:
    """The outgoing half of an edge."""

    node: int
    edge: int
    control: Outbox
    data: Outbox


@dataclass(slots=True)
class Slot:
    """The incoming half of an edge, or of the lobby: one local stream."""

    node: int
    edge: int
    joiner: Joiner | None  # None: single frames from anybody who has the key


@dataclass(slots=True)
class Traffic:
    """Bytes and frames, cumulative."""

    wire_bytes: int = 0  # everything sent, on every stream
    update_bytes: int = 0  # sealed updates of our own, the first time they were sent
    received_bytes: int = 0
    rejected: Counter[str] = field(default_factory=Counter)  # strangers' frames, by reason
    not_queued: int = 0


class Mailroom:
    """Sends and receives for one node. ``me`` is its id, NOBODY until it has one.

    ``chunk_bytes_max``: of a message in one data frame, where the transport takes so much.
    """

    def __init__(
        self,
        transport: Transport,
        seal: Seal,
        *,
        me: int,
        message_bytes_max: int,
        chunk_bytes_max: int,
        random_u63: Callable[[], int],
        traffic: Traffic | None = None,
    ) -> None:
        self.transport, self._seal, self.me = transport, seal, me
        self._message_bytes_max, self._chunk_bytes_max = message_bytes_max, chunk_bytes_max
        self._random = random_u63
        self.traffic = traffic or Traffic()
        self._counter = 0
        self._peers: dict[int, Peer] = {}
        self._slots: dict[int, Slot] = {}
        self._lobby: Outbox | None = None
        self._answers: dict[Address, Outbox] = {}
        self._sealed_seq = (-1, 0)

    # -- edges -----------------------------------------------------------------------------------

    def listen(self, address: Address, node: int, edge: int) -> None:
        """Take this neighbour's frames on both streams of ``address``."""
        for stream in (address.control_stream, address.data_stream):
            self._slots[stream] = Slot(node, edge, Joiner(self._message_bytes_max))
            self.transport.open_receiver(stream)

    def listen_to_strangers(self, stream: int) -> None:
        """Take joins from anybody who has the key."""
        self._slots[stream] = Slot(STRANGERS, 0, None)
        self.transport.open_receiver(stream)

    def deaf(self, node: int) -> None:
        """Stop listening to this neighbour."""
        for stream in [s for s, slot in self._slots.items() if slot.node == node]:
            del self._slots[stream]
            self.transport.close_receiver(stream)

    def connect(self, node: int, edge: int, address: Address) -> None:
        """Send to this neighbour there; an older connection is dropped."""
        self.disconnect(node)
        there = Endpoint(address.host, address.port)
        control = self.transport.open_sender(there, address.control_stream, control=True)
        data = self.transport.open_sender(there, address.data_stream, control=False)
        self._peers[node] = Peer(node, edge, Outbox(control), Outbox(data))

    def disconnect(self, node: int) -> None:
        """Drop the connection, with what waits on it."""
        peer = self._peers.pop(node, None)
        if peer is not None:
            peer.control.close()
            peer.data.close()

    def connect_lobby(self, endpoint: Endpoint, stream: int) -> None:
        """Send joins there from now on."""
        self.leave_lobby()
        self._lobby = Outbox(self.transport.open_sender(endpoint, stream, control=True))

    def leave_lobby(self) -> None:
        """No more joins for now."""
        if self._lobby is not None:
            self._lobby.close()
            self._lobby = None

    # -- sending ---------------------------------------------------------------------------------

    def send(self, node: int, message: Message) -> None:
        """Queue for a neighbour; where there is no edge, or no room, it is lost."""
        if isinstance(message, Join):
            if self._lobby is not None:
                self._put(self._lobby, self._seal_join(message))
            return
        peer = self._peers.get(node)
        if peer is None:
            self.traffic.not_queued += 1
            return
        frames = self._seal_message(message, receiver=node, edge=peer.edge)
        if isinstance(message, Update):
            self._count_update(message, frames)
        box = peer.data if is_data(message) else peer.control
        self._put(box, frames)

    def answer(self, address: Address, message: Message) -> None:
        """Queue one message for somebody without an edge; the sender is kept for repeats."""
        if address not in self._answers:
            if len(self._answers) >= ANSWERS_MAX:
                self._answers.pop(next(iter(self._answers))).close()
            there = Endpoint(address.host, address.port)
            sender = self.transport.open_sender(there, address.control_stream, control=True)
            self._answers[address] = Outbox(sender)
        self._put(
            self._answers[address], self._seal_message(message, receiver=NOBODY, edge=UNBOUND)
        )

    def flush(self) -> int:
        """Offer what waits on all streams, control first; return how many frames went."""
        return sum(box.flush() for box in self._boxes())

    @property
    def waiting(self) -> int:
        """Frames that the transport has not taken yet."""
        return sum(map(len, self._boxes()))

    def _boxes(self) -> list[Outbox]:
        lobby = [self._lobby] if self._lobby is not None else []
        control = [peer.control for peer in self._peers.values()]
        return [*lobby, *self._answers.values(), *control, *(p.data for p in self._peers.values())]

    @property
    def _piece_bytes(self) -> int:
        """Asked each time: after ``move_to`` the log may be a smaller one."""
        return min(self.transport.max_frame_bytes - OVERHEAD_BYTES, self._chunk_bytes_max)

    def _put(self, box: Outbox, frames: list[bytes]) -> None:
        if box.put(frames):
            self.traffic.wire_bytes += sum(map(len, frames))
        else:
            self.traffic.not_queued += 1

    def _seal_message(self, message: Message, *, receiver: int, edge: int) -> list[bytes]:
        kind, body = encode(message)
        data = is_data(message)
        pieces = pieces_of(body, self._piece_bytes if data else CONTROL_PIECE_BYTES)
        frames = []
        for i, piece in enumerate(pieces):
            self._counter += 1
            header = Header(kind, self.me, receiver, edge, self._counter, i, len(pieces))
            frames.append(self._seal.close(header, piece))
        return frames

    def _seal_join(self, join: Join) -> list[bytes]:
        """A join has no node's counter: random numbers take its place in the nonce."""
        kind, body = encode(join)
        edge, counter = self._random() & 0x7FFF_FFFF, self._random()
        return [self._seal.close(Header(kind, NOBODY, 0, edge, counter, 0, 1), body)]

    def _count_update(self, update: Update, frames: list[bytes]) -> None:
        key = (update.origin, update.seq)
        if key > self._sealed_seq and update.origin == self.me:
            self._sealed_seq = key
            self.traffic.update_bytes += sum(map(len, frames))

    # -- receiving -------------------------------------------------------------------------------

    def receive(self, wait_s: float) -> Iterator[tuple[int, Message]]:
        """Messages that came in, with their senders' ids; waits at most ``wait_s``.

        One by one: what a message changes (``me``, slots) holds for the next one.
        """
        for stream, frame in self.transport.poll(wait_s):
            self.traffic.received_bytes += len(frame)
            try:
                taken = self._open(stream, frame)
            except WireError as error:
                self.traffic.rejected[str(error).split(":")[0][:60]] += 1
                continue
            if taken is not None:
                yield taken

    def _open(self, stream: int, frame: bytes) -> tuple[int, Message] | None:
        slot = self._slots.get(stream)
        if slot is None:
            return None  # of an edge that was closed a moment ago
        header, body = self._seal.open_untrusted(frame)
        if slot.joiner is None:
            message = decode_untrusted(header.kind, body)
            if header.sender != NOBODY or not isinstance(message, Join):
                raise WireError("only joins are taken here")
            return STRANGERS, message
        if header.sender != slot.node or header.edge not in (slot.edge, UNBOUND):
            raise WireError("a frame of another edge")
        whole = slot.joiner.take(header, body)
        if whole is None:
            return None
        message = decode_untrusted(header.kind, whole)
        mine = header.receiver in (self.me, NOBODY) or isinstance(message, Welcome)
        if not mine:
            raise WireError("a frame for somebody else")
        return slot.node, message

    # -- the transport's life --------------------------------------------------------------------

    def move_to(self, opening: Callable[[], Transport]) -> None:
        """Go on over another transport: edges and slots are gone, counters and traffic stay."""
        self.close()
        self.transport = opening()

    def close(self) -> None:
        """Close everything, the transport too."""
        self._peers.clear()
        self._slots.clear()
        self._answers.clear()
        self._lobby = None
        self.transport.close()
