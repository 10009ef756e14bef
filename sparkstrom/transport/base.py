"""The interface of transports, which send frames (byte strings) between processes.

A transport belongs to one thread. It has one endpoint (a UDP port) with any number of numbered
streams. Frames from one sender arrive in order, each whole or not at all. A frame that was accepted
for sending may still be lost, because peers die and receivers restart. The protocol that uses the
transport must therefore notice and repair losses.

A media driver is Aeron's process for network I/O. Transports that use the same media driver share
its endpoint and its stream numbers. They can also reach one another on *local* streams, through
shared memory. Local streams behave like those over UDP and have the same maximum frame lengths. The
buffer from which a stream's frames are sent is called the stream's log.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from sparkstrom.base.errors import UsageError
from sparkstrom.base.identity import Endpoint


class OfferResult(enum.Enum):
    """What happened to offered frames; the value determines what the caller does next."""

    SENT = "sent"
    BUSY = "busy"  # the log is full or rotates: keep the frame and offer it again next cycle
    UNCONNECTED = "unconnected"  # no receiver (yet): the caller decides how long to wait
    CLOSED = "closed"  # this sender has ended: open another one


class ReceivedFrame(NamedTuple):
    """A received frame, and the stream of this endpoint on which it arrived."""

    stream: int  # the number of the stream
    frame: bytes  # the whole frame


class SentBytes(NamedTuple):
    """Cumulative bytes that left this machine's network interfaces, including all headers.

    Traffic between processes of one host counts as zero unless it uses the loopback interface. A
    busy media driver joins control messages in one datagram; each is still counted with headers of
    its own, up to 42 bytes too many per message.
    """

    driver: str  # names the media driver; equal for all transports that share it
    driver_bytes: int  # bytes of all clients of the driver: add them up once per driver
    # Correction for this transport: plus datagram headers, which the driver does not count,
    # minus traffic to processes of this host, which the driver counts.
    own_bytes: int


class Sender(Protocol):
    """The sending side of one stream, for one thread."""

    def offer(self, frames: Sequence[bytes]) -> tuple[int, OfferResult]:
        """Send as many frames as possible without blocking.

        Returns:
            The number of frames that were sent, in order, and why sending stopped;
            ``(len(frames), OfferResult.SENT)`` if all were sent.
        """

    def close(self) -> None:
        """Close at once; frames that are not yet sent are lost. Idempotent."""


class Transport(Protocol):
    """An open endpoint. Every method raises ``DriverLost`` once the media driver has died."""

    @property
    def endpoint(self) -> Endpoint:
        """The address and port that peers send to."""

    @property
    def max_frame_bytes(self) -> int:
        """Maximum frame length of a data sender, in bytes; longer frames raise UsageError."""

    @property
    def max_control_frame_bytes(self) -> int:
        """Maximum frame length of a control sender, in bytes; its log is smaller."""

    def open_sender(
        self, endpoint: Endpoint, stream: int, *, control: bool, local: bool = False
    ) -> Sender:
        """Start to open a sender to a peer's endpoint, and return the sender at once.

        Opening continues inside ``poll``; until then offers return UNCONNECTED.

        Args:
            endpoint: the peer's endpoint; for a local sender only a label in messages.
            stream: stream number at the peer, from 1 to 2^31 - 1.
            control: use a small log, for short messages; False: a larger one, for data.
            local: send through shared memory to a peer that uses the same media driver.
        """

    def open_receiver(self, stream: int, *, local: bool = False) -> None:
        """Start to listen on a stream of this endpoint, and return at once.

        Opening continues inside ``poll``. A stream that is open already stays as it is. Do not
        reopen a closed stream while old senders to it live: frames would repeat, or start in the
        middle.

        Args:
            stream: stream number, from 1 to 2^31 - 1.
            local: receive from local senders, and only from those.

        Raises:
            UsageError: the stream is open as the other kind.
            SetupError: raised by ``poll`` if the media driver refuses the stream.
        """

    def close_receiver(self, stream: int) -> None:
        """Stop listening on a stream. Unknown streams are ignored."""

    def poll(self, wait_s: float) -> list[ReceivedFrame]:
        """Return the frames that have arrived on all streams, up to a fixed maximum.

        This method runs without the GIL. If no frame has arrived, it waits up to ``wait_s`` seconds
        for a frame or for ``wake``.
        """

    def wake(self) -> None:
        """Make the current ``poll``, or else the next one, return without waiting. Thread-safe."""

    def sent(self) -> SentBytes:
        """Return how many bytes have left the network interfaces. Also works after ``close``."""

    def close(self) -> None:
        """Close all senders, receivers and the client. Idempotent."""


def stream_kind_error(stream: int, local: bool) -> UsageError:
    """Return the error for a stream that is open as UDP and requested as local, or vice versa."""
    requested, present = ("local", "UDP") if local else ("UDP", "local")
    return UsageError(
        f"stream {stream} is requested as a {requested} stream but is open as a {present} one: "
        "close it first or use another number"
    )
