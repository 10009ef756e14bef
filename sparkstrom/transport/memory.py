"""An in-process transport with the contract of the real one: for local use and for tests.

A ``MemoryNetwork`` joins endpoints by name. Frames of one sender wait in a queue at the receiver;
a full queue is back-pressure. With faults, whole senders break: Aeron repairs lost, repeated and
late datagrams itself, and what it cannot repair is a stream that breaks off.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from sparkstrom.base.errors import UsageError
from sparkstrom.base.identity import Endpoint
from sparkstrom.transport.contract import Arrival, Offer, Sent, open_as_other_kind

FRAME_BYTES_MAX = 65_536
CONTROL_FRAME_BYTES_MAX = 16_384
QUEUE_BYTES_MAX = 524_288  # like half a term: what a peer that does not poll lets through
POLL_FRAMES_MAX = 1024


class Mailbox(NamedTuple):
    """Where frames go."""

    endpoint: Endpoint
    stream: int
    local: bool


class MemoryNetwork:
    """What connects the transports of one process; any thread may use it.

    ``break_fraction`` of all offers breaks its sender (UNCONNECTED from then on), by ``seed``.
    """

    def __init__(self, seed: int = 0, break_fraction: float = 0.0) -> None:
        self._random = random.Random(seed)
        self._break_fraction = break_fraction
        self._ports = 0
        self._receivers: dict[Mailbox, _Receiver] = {}
        self.changed = threading.Condition()

    def open(
        self, host: str = "127.0.0.1", beside: MemoryTransport | None = None
    ) -> MemoryTransport:
        """A transport on an endpoint of its own, or on that of ``beside``.

        Sharing an endpoint stands for sharing a media driver: local streams lead no further.
        """
        if beside is not None:
            return MemoryTransport(self, beside.endpoint)
        with self.changed:
            self._ports += 1
            return MemoryTransport(self, Endpoint(host, self._ports))

    def add(self, place: Mailbox) -> _Receiver:
        """The receiver there, made if need be. Hold ``changed``."""
        return self._receivers.setdefault(place, _Receiver())

    def remove(self, place: Mailbox) -> None:
        """Drop the receiver there, with what it holds. Hold ``changed``."""
        receiver = self._receivers.pop(place, None)
        if receiver is not None:
            receiver.is_open = False

    def find(self, place: Mailbox) -> _Receiver | None:
        """The receiver there. Hold ``changed``."""
        return self._receivers.get(place)

    def breaks_now(self) -> bool:
        """Whether the fault schedule ends a sender at this offer. Hold ``changed``."""
        return self._break_fraction > 0 and self._random.random() < self._break_fraction


class _Receiver:
    """Frames of one stream that wait to be polled."""

    def __init__(self) -> None:
        self.frames: deque[bytes] = deque()
        self.waiting_bytes = 0
        self.is_open = True


class MemorySender:
    """See ``transport.base.Sender``."""

    def __init__(self, network: MemoryNetwork, place: Mailbox, frame_max: int) -> None:
        self._network, self._place, self._frame_max = network, place, frame_max
        self._receiver: _Receiver | None = None  # bound at the first offer that finds one
        self._is_closed = False
        self._is_broken = False

    def offer(self, frames: Sequence[bytes]) -> tuple[int, Offer]:
        """Send what goes now; see the contract."""
        with self._network.changed:
            for sent, frame in enumerate(frames):
                answer = self._offer_one(frame)
                if answer is not Offer.SENT:
                    return sent, answer
            return len(frames), Offer.SENT

    def _offer_one(self, frame: bytes) -> Offer:
        if self._is_closed:
            return Offer.CLOSED
        if len(frame) > self._frame_max:
            raise UsageError(
                f"a frame of {len(frame)} bytes on stream {self._place.stream}: the limit is "
                f"{self._frame_max}; cut it into pieces"
            )
        receiver = self._connected()
        if receiver is None:
            return Offer.UNCONNECTED
        if receiver.waiting_bytes >= QUEUE_BYTES_MAX:
            return Offer.BUSY
        receiver.frames.append(bytes(frame))
        receiver.waiting_bytes += len(frame)
        self._network.changed.notify_all()
        return Offer.SENT

    def _connected(self) -> _Receiver | None:
        if self._receiver is None:
            self._receiver = self._network.find(self._place)
        elif not self._receiver.is_open or self._network.breaks_now():
            self._is_broken = True  # for good: whoever leads the edge opens another
        return None if self._is_broken else self._receiver

    def close(self) -> None:
        """Offer no more. Idempotent."""
        self._is_closed = True


class MemoryTransport:
    """See ``transport.base.Transport``. Made by ``MemoryNetwork.open``."""

    def __init__(self, network: MemoryNetwork, endpoint: Endpoint) -> None:
        self._network = network
        self._endpoint = endpoint
        self._streams: dict[int, tuple[Mailbox, _Receiver]] = {}
        self._senders: list[MemorySender] = []
        self._is_closed = self._is_awake = False

    @property
    def endpoint(self) -> Endpoint:
        """A name nobody else in this network has; no socket is behind it."""
        return self._endpoint

    @property
    def max_frame_bytes(self) -> int:
        """The longest frame of a data sender."""
        return FRAME_BYTES_MAX

    @property
    def max_control_frame_bytes(self) -> int:
        """The longest frame of a control sender."""
        return CONTROL_FRAME_BYTES_MAX

    def open_sender(
        self, endpoint: Endpoint, stream: int, *, control: bool, local: bool = False
    ) -> MemorySender:
        """A sender that is connected as soon as somebody listens there; see the contract."""
        self._require_open("opening a sender")
        limit = CONTROL_FRAME_BYTES_MAX if control else FRAME_BYTES_MAX
        place = Mailbox(self._endpoint if local else endpoint, stream, local)
        sender = MemorySender(self._network, place, limit)
        self._senders.append(sender)
        return sender

    def open_receiver(self, stream: int, *, local: bool = False) -> None:
        """Listen on ``stream``; see the contract."""
        self._require_open("opening a receiver")
        with self._network.changed:
            if stream not in self._streams:
                place = Mailbox(self._endpoint, stream, local)
                self._streams[stream] = place, self._network.add(place)
            elif self._streams[stream][0].local != local:
                raise open_as_other_kind(stream, local)

    def close_receiver(self, stream: int) -> None:
        """Stop listening on ``stream``; see the contract."""
        with self._network.changed:
            found = self._streams.pop(stream, None)
            if found is not None:
                self._network.remove(found[0])

    def poll(self, wait_s: float) -> list[Arrival]:
        """Take what arrived; see the contract."""
        self._require_open("polling")
        end_s = time.monotonic() + wait_s
        with self._network.changed:
            while not (arrivals := self._take()) and not self._is_awake:
                left_s = end_s - time.monotonic()
                if left_s <= 0 or not self._network.changed.wait(left_s):
                    break
            self._is_awake = False
            return arrivals or self._take()

    def wake(self) -> None:
        """Let a poll wait no longer; see the contract."""
        with self._network.changed:
            self._is_awake = True
            self._network.changed.notify_all()

    def _take(self) -> list[Arrival]:
        arrivals: list[Arrival] = []
        for stream, (_, receiver) in self._streams.items():
            while receiver.frames and len(arrivals) < POLL_FRAMES_MAX:
                frame = receiver.frames.popleft()
                receiver.waiting_bytes -= len(frame)
                arrivals.append(Arrival(stream, frame))
        return arrivals

    def _require_open(self, doing: str) -> None:
        if self._is_closed:
            raise UsageError(f"{doing}: this transport is closed")

    def sent(self) -> Sent:
        """Nothing: there are no interfaces."""
        return Sent(str(self._endpoint), 0, 0)

    def close(self) -> None:
        """Close senders and receivers. Idempotent."""
        for sender in self._senders:
            sender.close()
        for stream in list(self._streams):
            self.close_receiver(stream)
        self._is_closed = True
