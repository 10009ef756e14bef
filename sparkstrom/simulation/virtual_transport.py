"""Virtual transport: what a message endpoint asks of a transport, in virtual time.

A sender's frames go to whoever listens at its place as long as the receiver has room; how long
they take, and which of them get there, is the network's to say (``Carrier``). What a receiver has
not looked at yet takes room, on its way and after, so that who does not look is back-pressure.
Nothing waits here: a ``poll`` takes what has arrived.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from sparkstrom.base.errors import UsageError
from sparkstrom.base.identity import Endpoint
from sparkstrom.transport.contract import Arrival, Offer, Sent, open_as_other_kind

CONTROL_FRAME_BYTES_MAX = 16_384
ROOM_BYTES = 32_768  # as a term has, on a scale with the frames: now and then it is not enough

Owner = TypeVar("Owner")
Place = tuple[Endpoint, int, bool]  # where frames go: endpoint, stream, local


class Receiver(Generic[Owner]):
    """One stream that ``owner`` listens on."""

    __slots__ = ("frames", "is_open", "owner", "stream", "unread")

    def __init__(self, owner: Owner, stream: int) -> None:
        self.owner, self.stream = owner, stream
        self.frames: deque[bytes] = deque()  # arrived
        self.unread = 0  # bytes of these, and of those on their way
        self.is_open = True

    def arrive(self, frames: Sequence[bytes]) -> None:
        """They can be polled; what comes on a stream that is closed is gone."""
        if self.is_open:
            self.frames.extend(frames)


class Carrier(Protocol[Owner]):
    """The network between senders and receivers."""

    receivers: dict[Place, Receiver[Owner]]

    def gets_through(self, sender: VirtualSender[Owner]) -> bool:
        """Does this stream live?"""

    def carry(
        self, sender: VirtualSender[Owner], receiver: Receiver[Owner], frames: Sequence[bytes]
    ) -> None:
        """Put frames on their way. What does not arrive gives its room back (``unread``)."""


class VirtualSender(Generic[Owner]):
    """See ``transport.contract.Sender``. ``edge``: whose it is, as the network knows streams."""

    def __init__(
        self, carrier: Carrier[Owner], owner: Owner, place: Place, frame_bytes_max: int
    ) -> None:
        self._carrier, self.owner, self.place = carrier, owner, place
        self._frame_bytes_max = frame_bytes_max
        self.edge: tuple[int, Owner, bool] | None = None  # None: for what is said directly
        self.newest_s = 0.0  # when the last frame that keeps the order arrives
        self.held_s = 0.0  # until then what has arrived is kept from the receiver
        self.is_closed = False

    def offer(self, frames: Sequence[bytes]) -> tuple[int, Offer]:
        """Send what goes now; see the contract."""
        if self.is_closed:
            return 0, Offer.CLOSED
        receiver = self._carrier.receivers.get(self.place)
        if receiver is None or not self._carrier.gets_through(self):
            return 0, Offer.UNCONNECTED
        count = 0
        for frame in frames:
            if len(frame) > self._frame_bytes_max:
                raise UsageError(f"a frame of {len(frame)} bytes, {self._frame_bytes_max} may be")
            if receiver.unread >= ROOM_BYTES:
                break
            receiver.unread += len(frame)
            count += 1
        if count:
            self._carrier.carry(self, receiver, frames[:count])
        return count, Offer.SENT if count == len(frames) else Offer.BUSY

    def close(self) -> None:
        """Offer no more; what is on its way is lost. Idempotent."""
        self.is_closed = True


class VirtualTransport(Generic[Owner]):
    """See ``transport.contract.Transport``. ``frame_bytes_max``: of data."""

    def __init__(
        self, carrier: Carrier[Owner], owner: Owner, endpoint: Endpoint, frame_bytes_max: int
    ) -> None:
        self._carrier, self._owner, self._endpoint = carrier, owner, endpoint
        self._frame_bytes_max = frame_bytes_max
        self.receivers: dict[int, tuple[Place, Receiver[Owner]]] = {}
        self.senders: dict[Place, VirtualSender[Owner]] = {}  # the newest to each place

    @property
    def endpoint(self) -> Endpoint:
        """A name that nobody else has at this time."""
        return self._endpoint

    @property
    def max_frame_bytes(self) -> int:
        """The longest frame of a data sender."""
        return self._frame_bytes_max

    @property
    def max_control_frame_bytes(self) -> int:
        """The longest frame of a control sender."""
        return CONTROL_FRAME_BYTES_MAX

    def open_sender(
        self, endpoint: Endpoint, stream: int, *, control: bool, local: bool = False
    ) -> VirtualSender[Owner]:
        """Connected as soon as somebody listens there; see the contract."""
        limit = CONTROL_FRAME_BYTES_MAX if control else self._frame_bytes_max
        place = (endpoint, stream, local)
        sender = self.senders[place] = VirtualSender(self._carrier, self._owner, place, limit)
        return sender

    def open_receiver(self, stream: int, *, local: bool = False) -> None:
        """Listen on ``stream``; see the contract."""
        if stream not in self.receivers:
            place, receiver = (self._endpoint, stream, local), Receiver(self._owner, stream)
            self.receivers[stream] = place, receiver
            self._carrier.receivers[place] = receiver
        elif self.receivers[stream][0][2] != local:
            raise open_as_other_kind(stream, local)

    def close_receiver(self, stream: int) -> None:
        """Stop listening on ``stream``; see the contract."""
        found = self.receivers.pop(stream, None)
        if found is not None:
            place, receiver = found
            receiver.is_open = False
            del self._carrier.receivers[place]

    def poll(self, wait_s: float) -> list[Arrival]:
        """What has arrived; nobody waits in virtual time."""
        arrivals = []
        for stream, (_, receiver) in self.receivers.items():
            while receiver.frames:
                frame = receiver.frames.popleft()
                receiver.unread -= len(frame)
                arrivals.append(Arrival(stream, frame))
        return arrivals

    def wake(self) -> None:
        """Nobody waits."""

    def sent(self) -> Sent:
        """Nothing: there are no interfaces."""
        return Sent(str(self._endpoint), 0, 0)

    def close(self) -> None:
        """Close senders and receivers. Idempotent."""
        for sender in self.senders.values():
            sender.close()
        for stream in list(self.receivers):
            self.close_receiver(stream)
