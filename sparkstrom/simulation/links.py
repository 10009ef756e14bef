"""Links: hosts with one network interface each, and Aeron's streams between them, in bytes.

A stream is ordered and reliable. What its outbox offers is accepted as long as less than half a
term waits to be sent; the host sends in turn a burst of each stream that the receiver's window has
room for; what arrives waits until the receiver's process looks. So an interface that is narrow, or
a process that is slow to look, is back-pressure all the way to the outbox.

Not modelled: datagrams lost in a full switch and sent again by Aeron (what comes in at one host
waits its turn instead; all windows together bound it), and status messages' own bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from sparkstrom.base.identity import NodeId
from sparkstrom.codec.frames import OVERHEAD_BYTES
from sparkstrom.codec.messages import Data, Message
from sparkstrom.codec.wire import encode
from sparkstrom.runtime.message_endpoint import CONTROL_PIECE_BYTES
from sparkstrom.runtime.outbox import Outbox
from sparkstrom.simulation.timeline import Timeline
from sparkstrom.transport.aeron.sizes import TERMS, WINDOW_MAX
from sparkstrom.transport.contract import Offer

DATA_TERM, CONTROL_TERM = TERMS[0]
DATA_PIECE_BYTES = DATA_TERM // 16 - OVERHEAD_BYTES
BURST_BYTES = 16 << 10  # of one stream in its turn: some datagrams
WIRE_DELAY_S = 0.0002  # from host to host, beside the time that the bytes take
DATA_HEADER_BYTES = 40
LOOK_S = 0.001  # between two looks of a process at its streams
LOOK_BYTES = 1 << 20  # taken of one stream in a look


class Frame(bytes):
    """A frame as an outbox sees it: as long as it says, but without the bytes."""

    message: Message
    size: int
    sender: NodeId | None
    last: bool

    def __len__(self) -> int:
        return self.size

    __eq__ = object.__eq__
    __hash__ = object.__hash__


def body_bytes(message: Message) -> int:
    """About, where it is data: nothing is put together to be measured."""
    if isinstance(message, Data):
        return DATA_HEADER_BYTES + len(message.payload)
    return len(encode(message)[1])


def frames_of(message: Message, size: int, sender: NodeId | None, *, data: bool) -> list[Frame]:
    """The frames that a message endpoint cuts a body of so many bytes into."""
    piece = DATA_PIECE_BYTES if data else CONTROL_PIECE_BYTES
    count = max(1, -(-size // piece))
    frames = []
    for i in range(count):
        frame = Frame()
        frame.message, frame.sender, frame.last = message, sender, i == count - 1
        frame.size = OVERHEAD_BYTES + min(piece, size - i * piece)
        frames.append(frame)
    return frames


@dataclass(eq=False, slots=True)
class Host:
    """A machine's interface. ``rate``: bytes per second, each way."""

    name: str
    rate: float
    busy: bool = False
    turns: deque[Stream] = field(default_factory=deque)
    free_s: float = 0.0  # when all that is on its way here will have come in


class Stream:
    """One direction of an edge, control or data; a ``transport.base.Sender`` for its outbox."""

    def __init__(
        self,
        links: Links,
        ends: tuple[Host, Host],
        *,
        data: bool,
        connected: Callable[[], bool],
        moves: Callable[[], bool],
        hurry: Callable[[Stream], None],
    ) -> None:
        """``connected``: does the receiver listen; ``moves``: is nothing in between now?

        ``hurry``: something has arrived that the receiving process has to look at.
        """
        self._links, self.source, self.target = links, *ends
        self.data = data
        self.connected, self.moves, self.hurry = connected, moves, hurry
        term = DATA_TERM if data else CONTROL_TERM
        self._term_window = term // 2
        self._window = min(WINDOW_MAX, term // 2 - term // 16)
        self.outbox = Outbox(self)
        self._accepted: deque[Frame] = deque()
        self._head_sent = 0  # bytes of the first of these that are on their way
        self.queued = 0  # bytes of data that wait in the outbox
        self.arriving = 0  # bytes of a message whose end the receiver does not have
        self.unsent = 0  # bytes accepted, and not on their way
        self.under_way = 0  # bytes on their way that the receiver has not taken
        self.sent = self.useful = 0  # bytes in all; of whole messages that were of use
        self._on_way: deque[tuple[int, list[Frame]]] = deque()  # bursts that have arrived
        self.waiting = 0  # bytes of those
        self.listed = False  # in its host's turns
        self.is_closed = False
        self.dropped = 0  # messages that the outbox did not take
        self.longest = 0  # message so far, in bytes

    # -- sending ---------------------------------------------------------------------------------

    def put(self, frames: list[Frame], newest_of: Hashable = None) -> None:
        """Queue a message's frames, and offer what waits."""
        before = len(self.outbox)
        size = sum(map(len, frames))
        self.longest = max(self.longest, size)
        self.outbox.put(list[bytes](frames), newest_of)
        if self.data:
            taken = len(self.outbox) == before + len(frames)
            self.queued += size if taken else 0
            self.dropped += not taken
        self.outbox.flush()

    def offer(self, frames: Sequence[bytes]) -> tuple[int, Offer]:
        """As Aeron: below the limit a frame of any length goes in."""
        if self.is_closed:
            self.queued = 0
            return 0, Offer.CLOSED
        if not self.connected():
            return 0, Offer.UNCONNECTED
        count = 0
        for frame in frames:
            if self.unsent >= self._term_window:
                break
            assert isinstance(frame, Frame)
            self._accepted.append(frame)
            self.unsent += len(frame)
            self.queued -= len(frame)
            count += 1
        self._links.kick(self)
        return count, Offer.SENT if count == len(frames) else Offer.BUSY

    def close(self) -> None:
        """Revoked: what has not left is dropped."""
        self.is_closed = True
        self._accepted.clear()
        self.queued = self.unsent = 0

    def ready(self) -> int:
        """Bytes that may go now."""
        if self.is_closed or not self.unsent or not self.connected() or not self.moves():
            return 0
        return min(BURST_BYTES, self.unsent, self._window - self.under_way)

    def leave(self, size: int) -> list[Frame]:
        """So much goes on its way; return the frames whose end is in it."""
        whole: list[Frame] = []
        size = min(size, self.unsent)
        self.unsent -= size
        self.under_way += size
        self.sent += size
        while size:
            rest = len(self._accepted[0]) - self._head_sent
            if rest > size:
                self._head_sent += size
                break
            size -= rest
            self._head_sent = 0
            whole.append(self._accepted.popleft())
        return whole

    # -- receiving -------------------------------------------------------------------------------

    def arrive(self, size: int, frames: list[Frame]) -> None:
        self._on_way.append((size, frames))
        self.waiting += size
        self.hurry(self)

    def take(self, bytes_max: int) -> list[Frame]:
        """What has come in, in order; it makes room in the window."""
        frames: list[Frame] = []
        taken = 0
        while self._on_way and taken < bytes_max:
            size, whole = self._on_way.popleft()
            taken += size
            frames += whole
        self.waiting -= taken
        self._links.acknowledge(self, taken)
        return frames


class Links:
    """All hosts, and what is between them."""

    def __init__(self, time: Timeline, rate: float) -> None:
        self._time, self._rate = time, rate
        self.hosts: dict[str, Host] = {}

    def host(self, name: str) -> Host:
        if name not in self.hosts:
            self.hosts[name] = Host(name, self._rate)
        return self.hosts[name]

    def kick(self, stream: Stream) -> None:
        """It may have something to send."""
        host = stream.source
        if not stream.listed and stream.ready() > 0:
            stream.listed = True
            host.turns.append(stream)
        if not host.busy:
            self._turn(host)

    def acknowledge(self, stream: Stream, size: int) -> None:
        """The sender hears that there is room again."""
        self._time.after(WIRE_DELAY_S, self._heard, stream, size)

    def _heard(self, stream: Stream, size: int) -> None:
        stream.under_way -= size
        self.kick(stream)

    def _turn(self, host: Host) -> None:
        """The next stream's burst goes out."""
        host.busy = False
        while host.turns:
            stream = host.turns.popleft()
            stream.listed = False
            size = stream.ready()
            if size > 0:
                host.busy = True
                local = stream.target is host  # shared memory
                took_s = 0.0 if local else size / host.rate
                self._time.after(took_s, self._left, stream, size)
                return

    def _left(self, stream: Stream, size: int) -> None:
        host, target, now_s = stream.source, stream.target, self._time.now_s
        host.busy = False
        if not stream.is_closed:
            size = min(size, stream.unsent)
            frames = stream.leave(size)
            arrives_s = now_s
            if target is not host:
                comes_s = max(now_s + WIRE_DELAY_S, target.free_s)
                arrives_s = target.free_s = comes_s + size / target.rate
            self._time.at(arrives_s, stream.arrive, size, frames)
            stream.outbox.flush()
            self.kick(stream)
        self._turn(host) if not host.busy else None
