"""One exclusive publication, from the asking to the revoking."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from sparkstrom.base.errors import DriverLost, SetupError, TransportError, UsageError
from sparkstrom.transport.aeron import kernels
from sparkstrom.transport.aeron.checked import STORAGE_SPACE, Aeron, address, ffi
from sparkstrom.transport.contract import Offer

FRAME_HEADER: Final = 32  # bytes, of each fragment
FRAMES_PER_CALL: Final = 64  # a long queue that is stuck costs no more than this to offer

ANSWERS: Final = {
    kernels.NOT_CONNECTED: Offer.UNCONNECTED,
    kernels.BACK_PRESSURED: Offer.BUSY,
    kernels.ADMIN_ACTION: Offer.BUSY,
    kernels.CLOSED: Offer.CLOSED,
    kernels.MAX_POSITION_EXCEEDED: Offer.CLOSED,
}


class AeronSender:
    """See ``transport.base.Sender``. Made by ``AeronTransport.open_sender``."""

    def __init__(
        self,
        aeron: Aeron,
        client: Any,
        uri: str,
        stream: int,
        frame_max: int,
        require_driver: Callable[[str], None],
        revoke: Callable[[Any], None],
        *,
        breaks_for_good: bool,
        datagram_bytes: int = 0,
        stays: bool = False,
    ) -> None:
        """``breaks_for_good``: another receiver would get what the last one had not taken.

        ``datagram_bytes``: so much of a frame goes in one; 0 where none do. ``stays``: to another
        process of this host, over no network.
        """
        self._aeron, self._uri, self._stream, self._frame_max = aeron, uri, stream, frame_max
        self._require_driver, self._revoke = require_driver, revoke
        self._offer_address = aeron.address_of("aeron_exclusive_publication_offer")
        self._publication: Any = None
        self._failure: TransportError | None = None
        self._is_closed = False
        self._breaks_for_good, self._datagram_bytes = breaks_for_good, datagram_bytes
        self._stays = stays
        self._frames = np.zeros((FRAMES_PER_CALL, 2), np.int64)
        self._answer = np.zeros(1, np.int64)
        self.frames_sent = self.bytes_sent = 0
        self.datagrams = 0  # that the frames took, about: what is offered at once goes together
        self.bytes_stayed = 0  # of those, with Aeron's headers, what left no interface
        adding = ffi.new("aeron_async_add_exclusive_publication_t **")
        aeron.checked(
            aeron.lib.aeron_async_add_exclusive_publication(adding, client, uri.encode(), stream),
            f"opening {self}",
        )
        self._adding = adding[0]

    def __str__(self) -> str:
        return f"stream {self._stream} of {self._uri}"

    def is_opening(self) -> bool:
        """Look once whether the media driver has answered; False once it has.

        Raise DriverLost where Aeron's client no longer waits for that.
        """
        if self._failure is not None:
            raise self._failure
        added = ffi.new("aeron_exclusive_publication_t **")
        self._aeron.clear_error()
        result = self._aeron.lib.aeron_async_add_exclusive_publication_poll(added, self._adding)
        if result == 0:
            return True
        if result < 0:
            self._failure = self._aeron.failure(f"opening {self}")
            if isinstance(self._failure, DriverLost):
                raise self._failure
        elif self._is_closed:
            self._revoke(added[0])
        else:
            self._publication = added[0]
        return False

    def is_done(self) -> bool:
        """Whether nothing is left to revoke, now or later."""
        return self._is_closed and self._publication is None

    def offer(self, frames: Sequence[bytes]) -> tuple[int, Offer]:
        """Send what goes now; see the contract.

        Raise SetupError where the media driver found no room for the log, UsageError for a frame
        that is longer than this sender's limit.
        """
        if self._is_closed or self._failure is not None:
            return 0, self._why_closed()
        self._require_driver("offering frames")
        if self._publication is None:  # not yet, or broken
            return 0, Offer.UNCONNECTED
        sent = 0
        while sent < len(frames):
            part = frames[sent : sent + FRAMES_PER_CALL]
            went = self._offer_part(part)
            sent += went
            if went < len(part):
                return sent, self._why_stopped()
        return sent, Offer.SENT

    def _offer_part(self, part: Sequence[bytes]) -> int:
        for i, frame in enumerate(part):
            if len(frame) > self._frame_max:
                raise UsageError(
                    f"a frame of {len(frame)} bytes on {self}: the limit is {self._frame_max}; "
                    "cut it into pieces"
                )
            self._frames[i] = address(ffi.from_buffer(frame)), len(frame)
        went = int(
            kernels.offer_all(
                self._offer_address,
                address(self._publication),
                self._frames[: len(part)],
                self._answer,
            )
        )
        self.frames_sent += went
        bytes_went = int(self._frames[:went, 1].sum())
        self.bytes_sent += bytes_went
        if self._datagram_bytes:
            framed = bytes_went + went * FRAME_HEADER
            if self._stays:
                self.bytes_stayed += framed
            else:
                self.datagrams += -(-framed // self._datagram_bytes)
        return went

    def _why_stopped(self) -> Offer:
        answer = int(self._answer[0])
        if answer not in ANSWERS:
            raise self._aeron.failure(f"offering on {self}")
        if answer == kernels.NOT_CONNECTED and self.frames_sent and self._breaks_for_good:
            self._drop()
        return ANSWERS[answer]

    def _why_closed(self) -> Offer:
        if self._failure is not None and self._failure.code == STORAGE_SPACE:
            raise SetupError(
                f"no room for the log of {self}: {self._failure.text}; enlarge shared memory "
                "(docker: --shm-size) or give a scratch directory that has room"
            ) from self._failure
        return Offer.CLOSED

    def close(self) -> None:
        """Revoke; see the contract. One that is still being opened goes when it has come up."""
        self._is_closed = True
        self._drop()

    def _drop(self) -> None:
        if self._publication is not None:
            publication, self._publication = self._publication, None
            self._revoke(publication)
