"""An in-process transport for tests and benchmarks, with the interface of ``transport.base``."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from sparkstrom.base.errors import UsageError
from sparkstrom.base.identity import Endpoint
from sparkstrom.transport.base import OfferResult, ReceivedFrame, SentBytes, stream_kind_error

FRAME_BYTES_MAX = 65_536
CONTROL_FRAME_BYTES_MAX = 16_384
RECEIVE_QUEUE_BYTES_MAX = 524_288  # half a term: as much as Aeron queues for a receiver
POLL_FRAMES_MAX = 1024


class StreamAddress(NamedTuple):
    """The address of a receiver, to which a sender's frames go."""

    endpoint: Endpoint  # of the receiving transport
    stream: int  # the receiver's number at this endpoint
    local: bool  # whether it receives only from transports with the same endpoint


class MemoryNetwork:
    """The receivers of all in-process transports. Thread-safe.

    Frames wait in a queue at the receiver; a full queue causes back-pressure. Injected faults break
    whole senders, like Aeron, which repairs lost and repeated datagrams or else ends the stream.

    Args:
        seed: seed of the fault injection.
        break_fraction: probability that an offer breaks its sender, which then stays UNCONNECTED.
    """

    def __init__(self, seed: int = 0, break_fraction: float = 0.0) -> None:
        """Create a network without endpoints."""
        self._random = random.Random(seed)
        self._break_fraction = break_fraction
        self._ports = 0
        self._receivers: dict[StreamAddress, _ReceiveQueue] = {}
        self.changed = threading.Condition()  # guards the queues; notified of new frames

    def open(
        self, host: str = "127.0.0.1", beside: MemoryTransport | None = None
    ) -> MemoryTransport:
        """Return a transport on a new endpoint, or on the endpoint of ``beside``.

        Transports with the same endpoint behave like those on one media driver: local streams
        connect only them.
        """
        if beside is not None:
            return MemoryTransport(self, beside.endpoint)
        with self.changed:
            self._ports += 1
            return MemoryTransport(self, Endpoint(host, self._ports))

    def add_queue(self, address: StreamAddress) -> _ReceiveQueue:
        """Return an address's receive queue; create it if needed. The caller holds ``changed``."""
        return self._receivers.setdefault(address, _ReceiveQueue())

    def remove_queue(self, address: StreamAddress) -> None:
        """Remove the receive queue at an address with its frames. The caller holds ``changed``."""
        receiver = self._receivers.pop(address, None)
        if receiver is not None:
            receiver.is_open = False

    def find_queue(self, address: StreamAddress) -> _ReceiveQueue | None:
        """Return the receive queue at an address, or None. The caller holds ``changed``."""
        return self._receivers.get(address)

    def should_break_sender(self) -> bool:
        """Return whether this offer breaks its sender. The caller holds ``changed``."""
        return self._break_fraction > 0 and self._random.random() < self._break_fraction


class _ReceiveQueue:
    """A queue of the frames of one stream that have not been polled yet."""

    def __init__(self) -> None:
        """Create an empty, open queue."""
        self.frames: deque[bytes] = deque()
        self.waiting_bytes = 0
        self.is_open = True


class MemorySender:
    """A ``transport.base.Sender`` to a receiver in the same process."""

    def __init__(self, network: MemoryNetwork, address: StreamAddress, frame_max: int) -> None:
        """Prepare to send frames of up to ``frame_max`` bytes to the receiver at ``address``."""
        self._network, self._address, self._frame_max = network, address, frame_max
        self._receiver: _ReceiveQueue | None = None  # set by the first offer that finds one
        self._is_closed = False
        self._is_broken = False

    def offer(self, frames: Sequence[bytes]) -> tuple[int, OfferResult]:
        """Append frames to the receiver's queue until it is full; see ``Sender.offer``."""
        with self._network.changed:
            for sent, frame in enumerate(frames):
                answer = self._offer_one(frame)
                if answer is not OfferResult.SENT:
                    return sent, answer
            return len(frames), OfferResult.SENT

    def _offer_one(self, frame: bytes) -> OfferResult:
        """Append a frame to the receiver's queue if there is room; UsageError if it is too long."""
        if self._is_closed:
            return OfferResult.CLOSED
        if len(frame) > self._frame_max:
            raise UsageError(
                f"a frame of {len(frame)} bytes on stream {self._address.stream}: the limit is "
                f"{self._frame_max}; split it"
            )
        receiver = self._find_receiver()
        if receiver is None:
            return OfferResult.UNCONNECTED
        if receiver.waiting_bytes >= RECEIVE_QUEUE_BYTES_MAX:
            return OfferResult.BUSY
        receiver.frames.append(bytes(frame))
        receiver.waiting_bytes += len(frame)
        self._network.changed.notify_all()
        return OfferResult.SENT

    def _find_receiver(self) -> _ReceiveQueue | None:
        """Return the receiver; None until one exists, and after it closed or this sender broke."""
        if self._receiver is None:
            self._receiver = self._network.find_queue(self._address)
        elif not self._receiver.is_open or self._network.should_break_sender():
            self._is_broken = True  # forever; the protocol opens another sender
        return None if self._is_broken else self._receiver

    def close(self) -> None:
        """Make later offers return CLOSED. Idempotent."""
        self._is_closed = True


class MemoryTransport:
    """A ``transport.base.Transport`` that ``MemoryNetwork.open`` creates."""

    def __init__(self, network: MemoryNetwork, endpoint: Endpoint) -> None:
        """Create a transport at ``endpoint`` without streams."""
        self._network = network
        self._endpoint = endpoint
        self._streams: dict[int, tuple[StreamAddress, _ReceiveQueue]] = {}
        self._senders: list[MemorySender] = []
        self._is_closed = self._is_awake = False

    @property
    def endpoint(self) -> Endpoint:
        """An endpoint that is unique in this network; no socket is behind it."""
        return self._endpoint

    @property
    def max_frame_bytes(self) -> int:
        """Length of the longest frame that a data sender accepts."""
        return FRAME_BYTES_MAX

    @property
    def max_control_frame_bytes(self) -> int:
        """Length of the longest frame that a control sender accepts."""
        return CONTROL_FRAME_BYTES_MAX

    def open_sender(
        self, endpoint: Endpoint, stream: int, *, control: bool, local: bool = False
    ) -> MemorySender:
        """Return a sender that connects once a receiver exists; see ``Transport.open_sender``."""
        self._require_open("opening a sender")
        limit = CONTROL_FRAME_BYTES_MAX if control else FRAME_BYTES_MAX
        address = StreamAddress(self._endpoint if local else endpoint, stream, local)
        sender = MemorySender(self._network, address, limit)
        self._senders.append(sender)
        return sender

    def open_receiver(self, stream: int, *, local: bool = False) -> None:
        """Listen on ``stream``; see ``Transport.open_receiver``."""
        self._require_open("opening a receiver")
        with self._network.changed:
            if stream not in self._streams:
                address = StreamAddress(self._endpoint, stream, local)
                self._streams[stream] = address, self._network.add_queue(address)
            elif self._streams[stream][0].local != local:
                raise stream_kind_error(stream, local)

    def close_receiver(self, stream: int) -> None:
        """Stop listening on ``stream``; see ``Transport.close_receiver``."""
        with self._network.changed:
            closed = self._streams.pop(stream, None)
            if closed is not None:
                self._network.remove_queue(closed[0])

    def poll(self, wait_s: float) -> list[ReceivedFrame]:
        """Return the frames that have arrived; see ``Transport.poll``."""
        self._require_open("polling")
        end_s = time.monotonic() + wait_s
        with self._network.changed:
            while not (arrivals := self._take_frames()) and not self._is_awake:
                left_s = end_s - time.monotonic()
                if left_s <= 0 or not self._network.changed.wait(left_s):
                    break
            self._is_awake = False
            return arrivals or self._take_frames()

    def wake(self) -> None:
        """Make ``poll`` return without waiting; see ``Transport.wake``."""
        with self._network.changed:
            self._is_awake = True
            self._network.changed.notify_all()

    def _take_frames(self) -> list[ReceivedFrame]:
        """Remove and return queued frames of all streams, at most POLL_FRAMES_MAX."""
        arrivals: list[ReceivedFrame] = []
        for stream, (_, receiver) in self._streams.items():
            while receiver.frames and len(arrivals) < POLL_FRAMES_MAX:
                frame = receiver.frames.popleft()
                receiver.waiting_bytes -= len(frame)
                arrivals.append(ReceivedFrame(stream, frame))
        return arrivals

    def _require_open(self, operation: str) -> None:
        """Raise UsageError, which names ``operation``, if the transport is closed."""
        if self._is_closed:
            raise UsageError(f"{operation}: this transport is closed")

    def sent(self) -> SentBytes:
        """Return zeros, because no network interface is used."""
        return SentBytes(str(self._endpoint), 0, 0)

    def close(self) -> None:
        """Close all senders and receivers. Idempotent."""
        for sender in self._senders:
            sender.close()
        for stream in list(self._streams):
            self.close_receiver(stream)
        self._is_closed = True
