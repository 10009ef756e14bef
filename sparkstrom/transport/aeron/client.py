"""The Aeron transport: one C client of a media driver, with its publications and subscriptions.

A publication is Aeron's sending end of a stream, a subscription the receiving end. The media driver
(Aeron's process that sends and receives UDP) takes milliseconds to add a publication or a
subscription, and seconds if it gets too little processor time. So that callers do not have to wait
for it, ``open_sender`` and ``open_receiver`` only send the request, and ``poll`` checks for the
reply. If no reply arrives in time, the whole client must be closed (DriverLost), because the driver
may still answer later. All streams to and from a peer use the driver's one endpoint; a stream
number selects the receiver.

A broken stream never resumes. After 5 s of silence a receiver rejects the old session
(``rejoin=false``) and its sender returns UNCONNECTED; the protocol then opens a new sender with a
new session id. ``reliable`` is on: gaps are repaired, never filled with padding.

Local streams (``aeron:ipc``) are logs that both sender and receiver map. They lose nothing, and
silence does not break them. They end when the receiver closes, or 20 s (the driver's client
timeout) after its process was killed; until then the sender returns BUSY.

Every call detects a dead media driver by its file lock. Aeron's client gives up a driver that is
alive but has stalled for DRIVER_TIMEOUT_MS. In both cases, calls raise DriverLost; the caller then
closes this transport, calls ``ensure_driver`` again and reopens all streams.

A transport belongs to one thread, and to the process that created it: Aeron's threads do not
survive a fork.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from ctypes import CDLL, PYFUNCTYPE, c_char_p, c_int64, c_size_t, c_void_p, cast
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from sparkstrom.base.errors import DriverLost, SetupError, TransportError, UsageError
from sparkstrom.base.identity import Endpoint
from sparkstrom.transport.aeron import receive_kernels as k
from sparkstrom.transport.aeron.channel_settings import (
    LOCAL_SUBSCRIPTION_URI,
    choose_mtu,
    local_publication_uri,
    publication_uri,
    random_session_id,
    stays_on_host,
    subscription_uri,
)
from sparkstrom.transport.aeron.doorbell import Doorbell, ReceiverBell
from sparkstrom.transport.aeron.library import (
    STORAGE_SPACE_ERROR,
    AeronLibrary,
    ffi,
    int_to_pointer,
    load_library,
    pointer_to_int,
)
from sparkstrom.transport.aeron.media_driver import DRIVER_TIMEOUT_MS, MediaDriverHandle
from sparkstrom.transport.base import OfferResult, ReceivedFrame, SentBytes, stream_kind_error


class PendingSubscription:
    """A requested subscription; ``subscription`` is set once the media driver has added it."""

    def __init__(self, aeron: AeronLibrary, client: Any, uri: str, stream: int) -> None:
        """Send the request to the media driver. Raises the same errors as ``is_opening``."""
        self._aeron, self._uri, self._stream = aeron, uri, stream
        self.subscription: Any = None
        self._failure: DriverLost | SetupError | None = None
        adding = ffi.new("aeron_async_add_subscription_t **")
        aeron.clear_error()
        self._raise_if_failed(
            aeron.lib.aeron_async_add_subscription(
                adding, client, uri.encode(), stream, *[ffi.NULL] * 4
            )
        )
        self._adding = adding[0]

    def is_opening(self) -> bool:
        """Poll the request once; return False once the subscription is ready.

        Raise SetupError if the media driver refused the request, DriverLost if it did not answer.
        """
        if self._failure is not None:
            raise self._failure  # Aeron has freed the request
        added = ffi.new("aeron_subscription_t **")
        self._aeron.clear_error()
        result = self._aeron.lib.aeron_async_add_subscription_poll(added, self._adding)
        self._raise_if_failed(result)
        self.subscription = added[0] if result else None
        return bool(result == 0)

    def _raise_if_failed(self, result: int) -> None:
        """If a C function's result is negative, raise the failure; ``is_opening`` repeats it."""
        if result >= 0:
            return
        name = f"stream {self._stream} of {self._uri}"
        failure = self._aeron.failure(f"opening {name}")
        if isinstance(failure, DriverLost):
            self._failure = failure
        else:
            self._failure = SetupError(
                f"the media driver refused {name}: Aeron error {failure.code}: {failure.text}"
            )
        raise self._failure


POLL_FRAMES_MAX: Final = 1024  # per poll; limits what the caller holds at once
BUFFER_FRAMES: Final = 16  # the buffer holds this many frames of the greatest length

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]


class SubscriptionPoller:
    """All subscriptions of one client, and the memory for the frames received. Not thread-safe.

    One call of ``poll`` polls all subscriptions without the GIL.
    """

    def __init__(self, aeron: AeronLibrary, frame_max: int, bell: Doorbell) -> None:
        """Allocate the buffers for received frames of up to ``frame_max`` bytes.

        ``bell``: this client's doorbell, which ends the wait for frames.
        """
        self._aeron, self._frame_max, self._bell = aeron, frame_max, bell
        self._rung_streams: set[int] = set()  # local streams, whose senders ring the bell
        self._frames: U8 = np.empty(BUFFER_FRAMES * frame_max, np.uint8)
        # (stream, length) of each received frame
        self._records: I64 = np.empty((POLL_FRAMES_MAX, 2), np.int64)
        self._state: I64 = np.zeros(k.INBOX_FIELDS, np.int64)
        self._state[k.INBOX_FRAMES] = self._frames.ctypes.data
        self._state[k.INBOX_CAPACITY] = len(self._frames)
        self._state[k.INBOX_RECORDS] = self._records.ctypes.data
        self._state[k.INBOX_RECORDS_MAX] = POLL_FRAMES_MAX
        self._state[k.INBOX_FRAME_MAX] = frame_max
        self._state[k.INBOX_BELL] = bell.descriptor
        self._state[k.INBOX_PARK_US] = k.PARK_US_MIN
        self._state_address = self._state.ctypes.data
        self._parking: I64 = np.zeros(k.PARKING_FIELDS, np.int64)
        self._parking_address = self._parking.ctypes.data
        self._functions: I64 = np.array(
            [
                aeron.function_address("aeron_subscription_controlled_poll"),
                k.on_fragment.address,
                aeron.function_address("aeron_nano_clock"),
                cast(CDLL(None).ppoll, c_void_p).value,
                cast(CDLL(None).read, c_void_p).value,
            ],
            np.int64,
        )
        # stream -> subscription, slots, gathered bytes
        self._receivers: dict[int, tuple[Any, I64, U8]] = {}
        self._table: I64 = np.empty((0, k.RECEIVER_FIELDS), np.int64)
        self._first = 0  # index of the subscription that is polled first
        self._received_frames = self._received_bytes = 0

    def add(self, stream: int, subscription: Any, *, rings: bool) -> None:
        """Start polling a subscription; allocate memory to assemble its fragmented frames.

        ``rings``: whether its senders ring this client's doorbell.
        """
        if rings:
            self._rung_streams.add(stream)
        slots = np.full((k.GATHER_SLOTS, k.SLOT_FIELDS), k.FREE_SLOT, np.int64)
        gathered = np.empty(k.GATHER_SLOTS * self._frame_max, np.uint8)
        self._receivers[stream] = subscription, slots, gathered
        self._rebuild()

    def remove(self, stream: int) -> Any | None:
        """Stop polling a stream; return its subscription, or None if there was none."""
        removed = self._receivers.pop(stream, None)
        self._rung_streams.discard(stream)
        self._rebuild()
        return removed[0] if removed else None

    def _rebuild(self) -> None:
        """Rebuild the table of subscriptions that the kernel polls."""
        rows = [
            (pointer_to_int(subscription), stream, slots.ctypes.data, gathered.ctypes.data)
            for stream, (subscription, slots, gathered) in self._receivers.items()
        ]
        self._table = np.array(rows, np.int64).reshape(len(rows), k.RECEIVER_FIELDS)

    def poll(self, wait_s: float) -> list[ReceivedFrame]:
        """Return complete frames, at most POLL_FRAMES_MAX; wait up to ``wait_s`` for one."""
        # Rotate the order, so that other streams come first after a full buffer.
        self._first = (self._first + 1) % max(1, len(self._table))
        failed = k.poll_subscriptions(
            self._functions,
            self._table,
            self._first,
            self._state,
            self._state_address,
            self._parking,
            self._parking_address,
            int(wait_s * 1e9),
        )
        if failed:
            raise TransportError("polling", *self._aeron.last_error())
        return self._take_frames()

    def wake(self) -> None:
        """Make the current poll, or else the next one, return without waiting. Thread-safe."""
        self._state[k.INBOX_WAKE] = 1
        self._bell.ring()

    def consume_wake(self) -> bool:
        """Return whether ``wake`` was called since the last call, and reset it."""
        awake = bool(self._state[k.INBOX_WAKE])
        self._state[k.INBOX_WAKE] = 0
        return awake

    def _take_frames(self) -> list[ReceivedFrame]:
        """Return copies of the frames that the last poll received, and count them."""
        count = int(self._state[k.INBOX_COUNT])
        if not count:
            return []
        content = self._frames[: self._state[k.INBOX_USED]].data
        arrivals, start, all_rung = [], 0, True
        for stream, length in self._records[:count].tolist():
            arrivals.append(ReceivedFrame(stream, bytes(content[start : start + length])))
            start += length
            all_rung &= stream in self._rung_streams
        self._state[k.INBOX_PARK_US] = k.PARK_US_RUNG if all_rung else k.PARK_US_MIN
        self._received_frames += count
        self._received_bytes += start
        return arrivals

    def counters(self) -> dict[str, int]:
        """Return cumulative receive counters of this client."""
        return {
            "frames_received": self._received_frames,
            "bytes_received": self._received_bytes,
            "fragments_received": int(self._state[k.INBOX_FRAGMENTS]),
            "fragments_discarded": int(self._state[k.INBOX_DISCARDED]),
        }


FRAME_HEADER_BYTES: Final = 32  # of each fragment
# Return codes of aeron_*_publication_offer.
NOT_CONNECTED, BACK_PRESSURED, ADMIN_ACTION, CLOSED, MAX_POSITION_EXCEEDED = -1, -2, -3, -4, -5
ADMIN_RETRIES: Final = 3  # the term rotated during the call, so the next one succeeds
# aeron_exclusive_publication_offer(publication, frame, length, supplier, clientd). It copies the
# frame and never blocks, so the GIL is kept: getting it back would take longer than the call.
OFFER: Final = PYFUNCTYPE(c_int64, c_void_p, c_char_p, c_size_t, c_void_p, c_void_p)

OFFER_RESULTS: Final = {
    NOT_CONNECTED: OfferResult.UNCONNECTED,
    BACK_PRESSURED: OfferResult.BUSY,
    ADMIN_ACTION: OfferResult.BUSY,
    CLOSED: OfferResult.CLOSED,
    MAX_POSITION_EXCEEDED: OfferResult.CLOSED,
}


# Attributes of AeronSender, whose sums over all senders are counters of the transport.
SENDER_COUNTERS: Final = ("frames_sent", "bytes_sent", "datagrams", "same_host_bytes")


class AeronSender:
    """A ``transport.base.Sender`` on one exclusive publication, which it opens and closes."""

    def __init__(
        self,
        aeron: AeronLibrary,
        client: Any,
        uri: str,
        stream: int,
        frame_max: int,
        require_driver: Callable[[str], None],
        revoke: Callable[[Any], None],
        *,
        reconnects: bool,
        datagram_bytes: int = 0,
        is_same_host: bool = False,
        bell: ReceiverBell | None = None,
    ) -> None:
        """Request the publication.

        Args:
            aeron: the Aeron library.
            client: the C client that owns the publication.
            uri: channel URI.
            stream: stream number.
            frame_max: length of the longest frame to accept, in bytes.
            require_driver: raises DriverLost if the media driver has died.
            revoke: closes the publication at once (Aeron: revokes it).
            reconnects: False: close for good when the receiver closes, because another receiver
                would get frames that the previous one had not taken.
            datagram_bytes: payload of one datagram; 0 if no datagrams are used.
            is_same_host: the receiver is on this host and no network interface is used.
            bell: doorbell to ring after frames were sent; None: the receiver has none.
        """
        self._aeron, self._uri, self._stream, self._frame_max = aeron, uri, stream, frame_max
        self._require_driver, self._revoke = require_driver, revoke
        self._offer = OFFER(aeron.function_address("aeron_exclusive_publication_offer"))
        self._publication: Any = None
        self._failure: TransportError | None = None
        self._is_closed = False
        self._reconnects, self._datagram_bytes = reconnects, datagram_bytes
        self._is_same_host, self._bell = is_same_host, bell
        self.frames_sent = self.bytes_sent = 0
        self.datagrams = 0  # approximate: frames offered together share datagrams
        self.same_host_bytes = 0  # bytes to this host without a network interface, with headers
        adding = ffi.new("aeron_async_add_exclusive_publication_t **")
        aeron.check_result(
            aeron.lib.aeron_async_add_exclusive_publication(adding, client, uri.encode(), stream),
            f"opening {self}",
        )
        self._adding = adding[0]

    def __str__(self) -> str:
        """Return the stream and channel, for messages."""
        return f"stream {self._stream} of {self._uri}"

    def is_opening(self) -> bool:
        """Poll the request once; return False once the media driver has answered.

        If it refused the request, later offers return CLOSED or raise SetupError. Raise DriverLost
        if Aeron's client has stopped waiting for the driver.
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

    def is_released(self) -> bool:
        """Return whether the sender is closed and has no open publication."""
        return self._is_closed and self._publication is None

    def offer(self, frames: Sequence[bytes]) -> tuple[int, OfferResult]:
        """Send frames; see ``Sender.offer``.

        Raise SetupError if the media driver had no room for the log, UsageError if a frame is too
        long.
        """
        if self._is_closed or self._failure is not None:
            return 0, self._report_closed()
        self._require_driver("offering frames")
        if self._publication is None:  # not open yet, or broken
            return 0, OfferResult.UNCONNECTED
        publication, sent, code = pointer_to_int(self._publication), 0, 0
        for frame in frames:
            if (code := self._offer_frame(publication, frame)) < 0:
                break
            sent += 1
        if sent:
            self._count_sent(sent, sum(map(len, frames[:sent])))
            if self._bell is not None:
                self._bell.ring()
        return sent, OfferResult.SENT if code >= 0 else self._map_offer_code(code)

    def _offer_frame(self, publication: int, frame: bytes) -> int:
        """Offer one frame; return its position in the stream, or Aeron's negative error code."""
        if len(frame) > self._frame_max:
            raise UsageError(
                f"a frame of {len(frame)} bytes on {self}: the limit is {self._frame_max}; split it"
            )
        for _ in range(ADMIN_RETRIES):
            code: int = self._offer(publication, frame, len(frame), None, None)
            if code != ADMIN_ACTION:
                break
        return code

    def _count_sent(self, count: int, sent_bytes: int) -> None:
        """Add ``count`` frames with ``sent_bytes`` in all, offered together, to the counters."""
        self.frames_sent += count
        self.bytes_sent += sent_bytes
        if self._datagram_bytes:
            framed_bytes = sent_bytes + count * FRAME_HEADER_BYTES
            if self._is_same_host:
                self.same_host_bytes += framed_bytes
            else:
                self.datagrams += -(-framed_bytes // self._datagram_bytes)

    def _map_offer_code(self, code: int) -> OfferResult:
        """Return the result for Aeron's error code; raise TransportError for an unexpected code.

        If the receiver has gone and the sender must not reconnect, close the publication.
        """
        if code not in OFFER_RESULTS:
            raise self._aeron.failure(f"offering on {self}")
        if code == NOT_CONNECTED and self.frames_sent and not self._reconnects:
            self._revoke_if_open()
        return OFFER_RESULTS[code]

    def _report_closed(self) -> OfferResult:
        """Return CLOSED, or raise SetupError if the sender failed for lack of space."""
        if self._failure is not None and self._failure.code == STORAGE_SPACE_ERROR:
            raise SetupError(
                f"no room for the log of {self}: {self._failure.text}; enlarge shared memory "
                "(docker: --shm-size) or give a scratch directory that has room"
            ) from self._failure
        return OfferResult.CLOSED

    def close(self) -> None:
        """Revoke the publication; one that is still being opened is revoked once it is open."""
        self._is_closed = True
        if self._bell is not None:
            self._bell.close()
        self._revoke_if_open()

    def _revoke_if_open(self) -> None:
        """Revoke the publication if it is open."""
        if self._publication is not None:
            publication, self._publication = self._publication, None
            self._revoke(publication)


MS: Final = 1_000_000  # ns
# Headers of a datagram: Ethernet 14, IPv4 20, UDP 8; IPv6 takes 20 more.
DATAGRAM_HEADER_BYTES: Final = 42
# Lengths of status messages and NAKs, which Aeron does not count as sent bytes.
STATUS_MESSAGE_BYTES: Final = 36
NAK_BYTES: Final = 28
KEEPALIVE_MS: Final = 250
LIVENESS_POLL_S: Final = 0.05  # between checks that the driver is alive
OPENING_POLL_S: Final = 0.002  # between checks whether a requested stream is open
CLOSE_TIMEOUT_S: Final = 1.0
STREAM_ID_MAX: Final = 2**31 - 1

# Ids of Aeron's system counters, which count all clients of the media driver.
DRIVER_COUNTER_IDS: Final = {
    "driver_bytes_sent": 0,
    "driver_bytes_received": 1,
    "driver_naks_sent": 5,
    "driver_naks_received": 6,
    "driver_statuses_sent": 7,
    "driver_heartbeats_sent": 9,
    "driver_retransmits": 11,
    "driver_overruns": 13,
    "driver_invalid_packets": 14,
    "driver_errors": 15,
    "driver_short_sends": 16,
}


class AeronTransport:
    """A ``transport.base.Transport`` over a media driver. Owns ``handle`` and closes it."""

    def __init__(self, handle: MediaDriverHandle, name: str = "sparkstrom") -> None:
        """Connect to the media driver as client ``name``; raise DriverLost if it has died."""
        self._handle = handle
        self.endpoint = handle.endpoint  # that of the media driver
        self.max_frame_bytes = handle.sizes.data_frame_bytes_max
        self.max_control_frame_bytes = handle.sizes.control_frame_bytes_max
        self._aeron: AeronLibrary = load_library()
        # Written by Aeron's own thread, so they must outlive the client.
        self._errors = np.zeros(2, np.int64)  # count, last code
        self._revoked = np.zeros(1, np.int64)  # publications whose revocation is complete
        self._revocations = 0
        self._client: Any = None
        # Stream -> is local, for all open and opening receivers.
        self._is_local: dict[int, bool] = {}
        self._pending_subscriptions: dict[int, PendingSubscription] = {}  # by stream
        # closed before they were open
        self._cancelled_subscriptions: list[PendingSubscription] = []
        self._opening_senders: list[AeronSender] = []
        self._senders: list[AeronSender] = []
        self._released_totals = dict.fromkeys(SENDER_COUNTERS, 0)  # of released senders
        self._last_counters: dict[str, int] = {}
        self._exit_stack = ExitStack()
        self._exit_stack.callback(handle.close)
        self._closed = False
        self._checked_s = 0.0
        try:
            self._bell = self._create_bell()
            self._inbox = SubscriptionPoller(self._aeron, self.max_frame_bytes, self._bell)
            self._connect(name)
        except BaseException:
            self.close()
            raise
        atexit.register(self.close)

    def _create_bell(self) -> Doorbell:
        """Create this client's doorbell; raise DriverLost if the media driver has died."""
        try:
            bell = Doorbell(self._handle.directory)
        except OSError as error:
            self.require_driver("connecting")
            raise SetupError(f"no doorbell in {self._handle.directory}: {error}") from error
        self._exit_stack.callback(bell.close)
        return bell

    def _connect(self, name: str) -> None:
        """Connect the C client, and register everything that ``close`` must release."""
        lib, checked = self._aeron.lib, self._aeron.check_result
        out = ffi.new("aeron_context_t **")
        checked(lib.aeron_context_init(out), "making the Aeron client's context")
        context = out[0]
        self._exit_stack.callback(lib.aeron_context_close, context)
        on_error = int_to_pointer(k.on_error.address), int_to_pointer(self._errors.ctypes.data)
        settings: tuple[tuple[str, tuple[Any, ...]], ...] = (
            ("dir", (os.fsencode(self._handle.aeron_directory),)),
            ("client_name", (name.encode(),)),
            ("driver_timeout_ms", (DRIVER_TIMEOUT_MS,)),
            ("keepalive_interval_ns", (KEEPALIVE_MS * MS,)),
            ("resource_linger_duration_ns", (1000 * MS,)),
            ("pre_touch_mapped_memory", (False,)),
            # The conductor handles one command per cycle: at 1 ms twenty edges open in 0.1 s.
            ("idle_strategy_init_args", (b"1ms",)),
            ("idle_strategy", (b"sleep-ns",)),
            ("error_handler", on_error),  # the default handler would end the process
        )
        for setting, values in settings:
            setter = getattr(lib, f"aeron_context_set_{setting}")
            checked(setter(context, *values), f"setting the Aeron client's {setting}")
        self.require_driver("connecting")
        out = ffi.new("aeron_t **")
        checked(lib.aeron_init(out, context), "connecting to the media driver")
        self._exit_stack.callback(lib.aeron_close, out[0])
        self._client = out[0]
        checked(lib.aeron_start(out[0]), "starting the Aeron client")

    def open_sender(
        self, endpoint: Endpoint, stream: int, *, control: bool, local: bool = False
    ) -> AeronSender:
        """Request a publication to ``endpoint``; see ``Transport.open_sender``."""
        self.require_driver("opening a sender")
        _check_stream_id(stream)
        sizes, session = self._handle.sizes, random_session_id()
        datagram_bytes = 0 if local else choose_mtu(endpoint, self.endpoint) - FRAME_HEADER_BYTES
        if local:
            uri = local_publication_uri(endpoint, sizes, control=control, session=session)
        else:
            uri = publication_uri(endpoint, self.endpoint, sizes, control=control, session=session)
        sender = AeronSender(
            self._aeron,
            self._client,
            uri,
            stream,
            self.max_control_frame_bytes if control else self.max_frame_bytes,
            self.require_driver,
            self._revoke,
            reconnects=not local,
            datagram_bytes=datagram_bytes,
            is_same_host=stays_on_host(endpoint, self.endpoint),
            bell=ReceiverBell(self._handle.directory, stream) if local else None,
        )
        self._opening_senders.append(sender)
        self._senders.append(sender)
        return sender

    def _revoke(self, publication: Any) -> None:
        """Revoke a publication, and count the close notification that will follow."""
        lib = self._aeron.lib
        if lib.aeron_is_closed(self._client):
            return  # its publications are gone too
        on_closed = int_to_pointer(k.on_publication_closed.address)
        count = int_to_pointer(self._revoked.ctypes.data)
        result = lib.aeron_exclusive_publication_revoke(publication, on_closed, count)
        self._aeron.check_result(result, "closing a sender")
        self._revocations += 1

    def open_receiver(self, stream: int, *, local: bool = False) -> None:
        """Request a subscription to ``stream``; see ``Transport.open_receiver``."""
        self.require_driver("opening a receiver")
        _check_stream_id(stream)
        if self._is_local.get(stream, local) != local:
            raise stream_kind_error(stream, local)
        if stream not in self._is_local:
            if local:
                self._bell.add_stream(stream)
            uri = LOCAL_SUBSCRIPTION_URI if local else subscription_uri(self.endpoint)
            self._pending_subscriptions[stream] = PendingSubscription(
                self._aeron, self._client, uri, stream
            )
            self._is_local[stream] = local

    def close_receiver(self, stream: int) -> None:
        """Stop listening on ``stream``; see ``Transport.close_receiver``."""
        self.require_driver("closing a receiver")
        self._is_local.pop(stream, None)
        self._bell.remove_stream(stream)
        if stream in self._pending_subscriptions:
            self._cancelled_subscriptions.append(self._pending_subscriptions.pop(stream))
        subscription = self._inbox.remove(stream)
        if subscription is not None:
            self._unsubscribe(subscription)

    def _unsubscribe(self, subscription: Any) -> None:
        """Close a subscription."""
        self._aeron.check_result(
            self._aeron.lib.aeron_subscription_close(subscription, ffi.NULL, ffi.NULL),
            "closing a receiver",
        )

    def poll(self, wait_s: float) -> list[ReceivedFrame]:
        """Return arrived frames and finish opening streams; see ``Transport.poll``."""
        end_s = time.monotonic() + wait_s
        while True:
            self.require_driver("polling")
            is_opening = self._poll_openings()
            left_s = end_s - time.monotonic()
            poll_s = min(left_s, OPENING_POLL_S if is_opening else LIVENESS_POLL_S)
            arrivals = self._inbox.poll(max(0.0, poll_s))
            if self._inbox.consume_wake() or arrivals or poll_s >= left_s:
                return arrivals

    def wake(self) -> None:
        """Make ``poll`` return without waiting; see ``Transport.wake``."""
        self._inbox.wake()

    def _poll_openings(self) -> bool:
        """Process the driver's answers to requests for streams; return whether it owes others.

        Start to poll the receivers that are now open, and close those that are not needed any more.
        Forget released senders.
        """
        if not (
            self._pending_subscriptions or self._cancelled_subscriptions or self._opening_senders
        ):
            return False
        opened = [s for s, each in self._pending_subscriptions.items() if not each.is_opening()]
        for stream in opened:
            subscription = self._pending_subscriptions.pop(stream).subscription
            self._inbox.add(stream, subscription, rings=self._is_local[stream])
        for request in [each for each in self._cancelled_subscriptions if not each.is_opening()]:
            self._cancelled_subscriptions.remove(request)
            self._unsubscribe(request.subscription)
        if self._opening_senders:
            self._opening_senders = [each for each in self._opening_senders if each.is_opening()]
            released = filter(AeronSender.is_released, self._senders)
            self._released_totals = self._sum_counters(released)
            self._senders = [each for each in self._senders if not each.is_released()]
        return bool(self._opening_senders or self._pending_subscriptions)

    def _sum_counters(self, senders: Iterable[AeronSender]) -> dict[str, int]:
        """Return the totals of released senders plus the counters of ``senders``, by name."""
        totals = self._released_totals.copy()
        for sender in senders:
            for name in SENDER_COUNTERS:
                totals[name] += getattr(sender, name)
        return totals

    def require_driver(self, operation: str) -> None:
        """Raise DriverLost unless the media driver is alive and serves this client.

        ``operation`` names in the error what the caller is doing. Raise UsageError if the transport
        is closed. The driver is checked at most every ``LIVENESS_POLL_S`` seconds.
        """
        if self._closed:
            raise UsageError(f"{operation}: this transport is closed")
        now_s = time.monotonic()
        if now_s - self._checked_s < LIVENESS_POLL_S:
            return
        if not self._handle.is_alive():
            reason = f"the media driver (pid {self._handle.pid}) died"
            raise DriverLost(operation, int(self._errors[1]), reason + self._format_log_tail())
        if self._client is not None and self._aeron.lib.aeron_is_closed(self._client):
            reason = f"Aeron's client gave up its media driver (pid {self._handle.pid})"
            raise DriverLost(operation, int(self._errors[1]), reason + self._format_log_tail())
        self._checked_s = now_s

    def _format_log_tail(self) -> str:
        """Return the end of the driver's log for an error message; "" if there is none."""
        tail = self._handle.log_tail()
        return f"; end of its log:\n{tail}" if tail else ""

    def counters(self) -> dict[str, int]:
        """Return cumulative counters of this client, and as ``driver_*`` those of the media driver.

        After ``close`` these are the final values.
        """
        if not self._closed:
            self._last_counters = self._read_counters()
        return dict(self._last_counters)

    def _read_counters(self) -> dict[str, int]:
        """Read the counters of this client and of the media driver."""
        lib = self._aeron.lib
        reader = lib.aeron_counters_reader(self._client)
        driver = {
            name: int(lib.aeron_counters_reader_addr(reader, number)[0])
            for name, number in DRIVER_COUNTER_IDS.items()
        }
        own = {"client_errors": int(self._errors[0])} | self._sum_counters(self._senders)
        return driver | own | self._inbox.counters()

    def sent(self) -> SentBytes:
        """Return the bytes sent, from the media driver's counters, including retransmissions."""
        counters = self.counters()
        statuses, naks = counters["driver_statuses_sent"], counters["driver_naks_sent"]
        headers = DATAGRAM_HEADER_BYTES * (counters["driver_heartbeats_sent"] + statuses + naks)
        uncounted = STATUS_MESSAGE_BYTES * statuses + NAK_BYTES * naks
        return SentBytes(
            f"{self.endpoint}/{self._handle.pid}",
            counters["driver_bytes_sent"] + headers + uncounted,
            DATAGRAM_HEADER_BYTES * counters["datagrams"] - counters["same_host_bytes"],
        )

    def close(self) -> None:
        """Revoke all senders, close the client and release the driver, in limited time."""
        if self._closed:
            return
        if self._client is not None:
            self._last_counters = self._read_counters()
        self._closed = True
        atexit.unregister(self.close)
        for sender in self._senders:
            sender.close()
        self._wait_for_revocations()
        self._exit_stack.close()

    def _wait_for_revocations(self) -> None:
        """Wait until the driver has processed all revocations; otherwise it would keep logs."""
        end_s = time.monotonic() + CLOSE_TIMEOUT_S
        while self._revoked[0] < self._revocations and time.monotonic() < end_s:
            if self._aeron.lib.aeron_is_closed(self._client) or not self._handle.is_alive():
                return
            time.sleep(0.001)


def _check_stream_id(stream: int) -> None:
    """Raise UsageError if a stream number is out of range."""
    if not 1 <= stream <= STREAM_ID_MAX:
        raise UsageError(f"stream {stream} is outside 1 to {STREAM_ID_MAX}")
