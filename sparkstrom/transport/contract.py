"""The transport contract: senders and one poll; every answer is a value.

A transport belongs to one thread. It has one endpoint (one UDP port) and any number of streams
on it. Frames of one sender arrive in order and whole or not at all; an accepted frame is *not*
an acknowledged one: peers die, receivers restart. Ids, commits and leases above heal that.

Transports on one media driver share its endpoint and its stream numbers. They may also reach one
another on *local* streams, through shared memory, with the same answers and frame lengths.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from sparkstrom.base.errors import UsageError
from sparkstrom.base.identity import Endpoint


class Offer(enum.Enum):
    """What became of a frame. Each answer names the caller's next move."""

    SENT = "sent"
    BUSY = "busy"  # back-pressure or log rotation: keep it, offer again next cycle
    UNCONNECTED = "unconnected"  # nobody listens (yet): the lease decides, not this loop
    CLOSED = "closed"  # this sender is finished: open another


class Arrival(NamedTuple):
    """One frame that came in, and the local stream it came in on."""

    stream: int
    frame: bytes


class Sent(NamedTuple):
    """What has left this machine's interfaces, cumulative, all headers included.

    Between processes of one host that is nothing, unless they use the loopback interface.
    """

    driver: str  # which media driver; transports that share one name the same
    driver_bytes: int  # of it, whoever's they are: add them up once
    own_bytes: int  # to add for this transport's own frames: datagrams' headers, less what went to
    # other processes of this host, which the driver counts, too


class Sender(Protocol):
    """One direction of one edge, for one writer."""

    def offer(self, frames: Sequence[bytes]) -> tuple[int, Offer]:
        """Send as many of ``frames`` as go now, in order; return how many went and why it stopped.

        Never blocks. ``(len(frames), Offer.SENT)`` when all went.
        """

    def close(self) -> None:
        """Drop at once (revoke): unsent frames are lost, the log is freed. Idempotent."""


class Transport(Protocol):
    """Opened on an endpoint; raises ``DriverLost`` from any call once its media driver is gone."""

    @property
    def endpoint(self) -> Endpoint:
        """The address and port that peers send to."""

    @property
    def max_frame_bytes(self) -> int:
        """The longest frame a data sender takes; a longer one is a UsageError."""

    @property
    def max_control_frame_bytes(self) -> int:
        """The longest frame a control sender takes: its log is smaller."""

    def open_sender(
        self, endpoint: Endpoint, stream: int, *, control: bool, local: bool = False
    ) -> Sender:
        """Start opening a sender to a peer's endpoint; offers answer UNCONNECTED until it is up.

        Returns at once; opening goes on inside ``poll``. ``control`` streams get a small log.
        ``local``: to a peer on this media driver; the endpoint then only names it in messages.
        """

    def open_receiver(self, stream: int, *, local: bool = False) -> None:
        """Start listening on a stream (1 <= stream < 2^31) of this endpoint.

        Returns at once; opening goes on inside ``poll``, which raises SetupError if it is refused.
        ``local``: take frames of local senders, and only those. A stream that is open already
        stays as it is; UsageError where it is open as the other kind. One that was closed is not
        opened again while old senders to it live: it would hear them from the middle, or again.
        """

    def close_receiver(self, stream: int) -> None:
        """Stop listening. Unknown streams are ignored."""

    def poll(self, wait_s: float) -> list[Arrival]:
        """Take what arrived on all streams, at most a bounded amount, without the GIL.

        Returns at once when something is there; waits (parked) at most ``wait_s`` for it, or for
        a ``wake``, otherwise.
        """

    def wake(self) -> None:
        """Let the poll that waits, or else the next one, wait no longer. From any thread."""

    def sent(self) -> Sent:
        """How much has left the interfaces; after ``close`` how much had by then."""

    def close(self) -> None:
        """Close senders, receivers and the client. Idempotent."""


def open_as_other_kind(stream: int, local: bool) -> UsageError:
    """The error of ``open_receiver`` for a stream that cannot be both."""
    asked, found = ("local", "UDP") if local else ("UDP", "local")
    return UsageError(
        f"stream {stream} is asked for as a {asked} stream but is open as a {found} one: "
        "close it first or take another number"
    )
