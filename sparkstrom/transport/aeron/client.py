"""The Aeron transport: one C client on a media driver; publications out, subscriptions in.

Adding a publication or a subscription takes the media driver some milliseconds, and seconds where
it is starved, so ``open_sender`` and ``open_receiver`` only ask and ``poll`` looks whether it came.
All streams to and from one peer cross the driver's one endpoint; a receiver is the stream number.
Streams neither skip nor come back: a receiver that lost touch (5 s of silence) refuses the old
session for good (``rejoin=false``), its sender then answers UNCONNECTED, and whoever leads the edge
opens another sender, which has a new session id. ``reliable`` is on: a gap is repaired, never
filled with padding.

Local streams (``aeron:ipc``) are logs that sender and receiver both map. Nothing is lost on them
and no silence breaks them: they end with the receiver, at once when it closes, after the driver's
client timeout (20 s) when its process was killed; until then a killed receiver is one that does
not poll, and the sender stays BUSY.

The media driver's death is seen by its file lock in the next call of anything here; a driver that
lives but stalls is given up by Aeron's own client after DRIVER_STALL_MS. Both raise DriverLost:
close this transport, ask ``ensure_driver`` again and open the edges anew.

A transport belongs to one thread and to the process that made it: Aeron's threads do not survive
a fork.
"""

from __future__ import annotations

import atexit
import os
import time
from contextlib import ExitStack
from typing import Any, Final

import numpy as np

from sparkstrom.base.errors import DriverLost, UsageError
from sparkstrom.base.identity import Endpoint
from sparkstrom.transport.aeron import kernels
from sparkstrom.transport.aeron.channels import (
    LOCAL_SUBSCRIPTION_URI,
    local_publication_uri,
    mtu,
    publication_uri,
    random_session,
    stays_on_host,
    subscription_uri,
)
from sparkstrom.transport.aeron.checked import Aeron, ffi, pointer
from sparkstrom.transport.aeron.driver import DRIVER_STALL_MS, DriverHandle
from sparkstrom.transport.aeron.inbox import Inbox
from sparkstrom.transport.aeron.library import load_library
from sparkstrom.transport.aeron.receiver import OpeningReceiver
from sparkstrom.transport.aeron.sender import FRAME_HEADER, AeronSender
from sparkstrom.transport.contract import Arrival, Sent, open_as_other_kind

MS: Final = 1_000_000  # ns
HEADERS: Final = 42  # bytes of a datagram: Ethernet 14, IPv4 20, UDP 8; IPv6 takes 20 more
STATUS_BYTES: Final = 36  # what Aeron does not count among the bytes that it has sent
NAK_BYTES: Final = 28
KEEPALIVE_MS: Final = 250
LOOK_S: Final = 0.05  # how often to look whether the driver lives
OPENING_LOOK_S: Final = 0.002  # how often to look whether a publication has come up
CLOSE_DEADLINE_S: Final = 1.0
STREAM_MAX: Final = 2**31 - 1

# Aeron's system counters, of the whole media driver: all workers of the executor together.
DRIVER_COUNTERS: Final = {
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
    """See ``transport.base.Transport``. Owns ``handle`` and closes it."""

    def __init__(self, handle: DriverHandle, name: str = "sparkstrom") -> None:
        """Connect to the media driver. Raise DriverLost where it is not there any more."""
        self._handle = handle
        self._aeron: Aeron = load_library()
        # Written by Aeron's own thread, so they must outlive the client.
        self._errors = np.zeros(2, np.int64)  # count, last code
        self._revoked = np.zeros(1, np.int64)  # revoked publications that Aeron has let go
        self._revoking = 0
        self._client: Any = None
        self._inbox = Inbox(self._aeron, handle.sizes.data_frame)
        self._local: dict[int, bool] = {}  # of each receiver's stream
        self._subscribing: dict[int, OpeningReceiver] = {}  # by stream
        self._unwanted: list[OpeningReceiver] = []  # closed before they were up
        self._opening: list[AeronSender] = []
        self._senders: list[AeronSender] = []
        self._sent = (0, 0, 0, 0)  # what senders that are gone had sent: see _read_counters
        self._figures: dict[str, int] = {}
        self._closing = ExitStack()
        self._closed = False
        self._looked_s = 0.0
        try:
            self._connect(name)
        except BaseException:
            self.close()
            raise
        atexit.register(self.close)

    def _connect(self, name: str) -> None:
        lib, checked = self._aeron.lib, self._aeron.checked
        self._closing.callback(self._handle.close)
        holder = ffi.new("aeron_context_t **")
        checked(lib.aeron_context_init(holder), "making the Aeron client's context")
        context = holder[0]
        self._closing.callback(lib.aeron_context_close, context)
        settings: tuple[tuple[str, tuple[Any, ...]], ...] = (
            ("dir", (os.fsencode(self._handle.aeron_directory),)),
            ("client_name", (name.encode(),)),
            ("driver_timeout_ms", (DRIVER_STALL_MS,)),
            ("keepalive_interval_ns", (KEEPALIVE_MS * MS,)),
            ("resource_linger_duration_ns", (1000 * MS,)),
            ("pre_touch_mapped_memory", (False,)),
            # The conductor takes one command per cycle: at 1 ms twenty edges are up in 0.1 s.
            ("idle_strategy_init_args", (b"1ms",)),
            ("idle_strategy", (b"sleep-ns",)),
            # The default handler ends the process.
            (
                "error_handler",
                (pointer(kernels.on_error.address), pointer(self._errors.ctypes.data)),
            ),
        )
        for setting, values in settings:
            setter = getattr(lib, f"aeron_context_set_{setting}")
            checked(setter(context, *values), f"setting the Aeron client's {setting}")
        self.require_driver("connecting")
        holder = ffi.new("aeron_t **")
        checked(lib.aeron_init(holder, context), "connecting to the media driver")
        self._closing.callback(lib.aeron_close, holder[0])
        self._client = holder[0]
        checked(lib.aeron_start(holder[0]), "starting the Aeron client")

    @property
    def endpoint(self) -> Endpoint:
        """The address and port that peers send to: the media driver's."""
        return self._handle.endpoint

    @property
    def max_frame_bytes(self) -> int:
        """The longest frame of a data sender."""
        return self._handle.sizes.data_frame

    @property
    def max_control_frame_bytes(self) -> int:
        """The longest frame of a control sender: its log is smaller."""
        return self._handle.sizes.control_frame

    def open_sender(
        self, endpoint: Endpoint, stream: int, *, control: bool, local: bool = False
    ) -> AeronSender:
        """Ask for a publication to ``endpoint``; see the contract."""
        self.require_driver("opening a sender")
        _check_stream(stream)
        sizes, session = self._handle.sizes, random_session()
        longest = 0 if local else mtu(endpoint, self.endpoint) - FRAME_HEADER
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
            breaks_for_good=local,
            datagram_bytes=longest,
            stays=stays_on_host(endpoint, self.endpoint),
        )
        self._opening.append(sender)
        self._senders.append(sender)
        return sender

    def _revoke(self, publication: Any) -> None:
        lib = self._aeron.lib
        if lib.aeron_is_closed(self._client):
            return  # its publications went with it
        on_closed, count = pointer(kernels.on_closed.address), pointer(self._revoked.ctypes.data)
        self._aeron.checked(
            lib.aeron_exclusive_publication_revoke(publication, on_closed, count),
            "closing a sender",
        )
        self._revoking += 1

    def open_receiver(self, stream: int, *, local: bool = False) -> None:
        """Ask for a subscription to ``stream`` at the endpoint; see the contract."""
        self.require_driver("opening a receiver")
        _check_stream(stream)
        if self._local.get(stream, local) != local:
            raise open_as_other_kind(stream, local)
        if stream not in self._local:
            uri = LOCAL_SUBSCRIPTION_URI if local else subscription_uri(self.endpoint)
            self._subscribing[stream] = OpeningReceiver(self._aeron, self._client, uri, stream)
            self._local[stream] = local

    def close_receiver(self, stream: int) -> None:
        """Stop listening on ``stream``; see the contract."""
        self.require_driver("closing a receiver")
        self._local.pop(stream, None)
        if stream in self._subscribing:
            self._unwanted.append(self._subscribing.pop(stream))
        subscription = self._inbox.remove(stream)
        if subscription is not None:
            self._unsubscribe(subscription)

    def _unsubscribe(self, subscription: Any) -> None:
        self._aeron.checked(
            self._aeron.lib.aeron_subscription_close(subscription, ffi.NULL, ffi.NULL),
            "closing a receiver",
        )

    def poll(self, wait_s: float) -> list[Arrival]:
        """Take what arrived; see the contract. Also brings up senders that were asked for."""
        end_s = time.monotonic() + wait_s
        while True:
            self.require_driver("polling")
            self._bring_up()
            left_s = end_s - time.monotonic()
            waiting = self._opening or self._subscribing
            turn_s = min(left_s, OPENING_LOOK_S if waiting else LOOK_S)
            arrivals = self._inbox.poll(max(0.0, turn_s))
            if self._inbox.take_wake() or arrivals or turn_s >= left_s:
                return arrivals

    def wake(self) -> None:
        """Let a poll wait no longer; see the contract."""
        self._inbox.wake()

    def _bring_up(self) -> None:
        """Look whether the media driver has answered."""
        for stream in [s for s, asked in self._subscribing.items() if not asked.is_opening()]:
            self._inbox.add(stream, self._subscribing.pop(stream).subscription)
        for asked in [asked for asked in self._unwanted if not asked.is_opening()]:
            self._unwanted.remove(asked)
            self._unsubscribe(asked.subscription)
        if not self._opening:
            return
        self._opening = [sender for sender in self._opening if sender.is_opening()]
        frames, sent, datagrams, stayed = self._sent
        for sender in filter(AeronSender.is_done, self._senders):
            frames, sent = frames + sender.frames_sent, sent + sender.bytes_sent
            datagrams, stayed = datagrams + sender.datagrams, stayed + sender.bytes_stayed
        self._sent = frames, sent, datagrams, stayed
        self._senders = [sender for sender in self._senders if not sender.is_done()]

    def require_driver(self, doing: str) -> None:
        """Raise DriverLost unless the media driver lives and talks to our client."""
        if self._closed:
            raise UsageError(f"{doing}: this transport is closed")
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_S:
            return
        if not self._handle.is_alive():
            reason = f"the media driver (pid {self._handle.pid}) died"
            raise DriverLost(doing, int(self._errors[1]), reason + self._last_words())
        if self._client is not None and self._aeron.lib.aeron_is_closed(self._client):
            reason = f"Aeron's client gave up its media driver (pid {self._handle.pid})"
            raise DriverLost(doing, int(self._errors[1]), reason + self._last_words())
        self._looked_s = now_s

    def _last_words(self) -> str:
        tail = self._handle.log_tail()
        return f"; end of its log:\n{tail}" if tail else ""

    def counters(self) -> dict[str, int]:
        """Cumulative figures: this client's own, and ``driver_*`` of the whole media driver.

        After ``close`` they are the last ones.
        """
        if not self._closed:
            self._figures = self._read_counters()
        return dict(self._figures)

    def _read_counters(self) -> dict[str, int]:
        lib = self._aeron.lib
        reader = lib.aeron_counters_reader(self._client)
        figures = {
            name: int(lib.aeron_counters_reader_addr(reader, number)[0])
            for name, number in DRIVER_COUNTERS.items()
        }
        own = {
            "client_errors": int(self._errors[0]),
            "frames_sent": self._sent[0] + sum(sender.frames_sent for sender in self._senders),
            "bytes_sent": self._sent[1] + sum(sender.bytes_sent for sender in self._senders),
            "datagrams": self._sent[2] + sum(sender.datagrams for sender in self._senders),
            "bytes_stayed": self._sent[3] + sum(sender.bytes_stayed for sender in self._senders),
        }
        return figures | own | self._inbox.counters()

    def sent(self) -> Sent:
        """From the media driver's counters; see the contract. Retransmissions count by packet."""
        known = self.counters()
        statuses, naks = known["driver_statuses_sent"], known["driver_naks_sent"]
        headers = HEADERS * (known["driver_heartbeats_sent"] + statuses + naks)
        uncounted = STATUS_BYTES * statuses + NAK_BYTES * naks
        return Sent(
            f"{self.endpoint}/{self._handle.pid}",
            known["driver_bytes_sent"] + headers + uncounted,
            HEADERS * known["datagrams"] - known["bytes_stayed"],
        )

    def close(self) -> None:
        """Revoke senders, close the client, give the driver back; bounded in time, idempotent."""
        if self._closed:
            return
        if self._client is not None:
            self._figures = self._read_counters()
        self._closed = True
        atexit.unregister(self.close)
        for sender in self._senders:
            sender.close()
        self._await_revoked()
        self._closing.close()

    def _await_revoked(self) -> None:
        """Closing before the driver took the commands would leave logs to linger there."""
        end_s = time.monotonic() + CLOSE_DEADLINE_S
        while self._revoked[0] < self._revoking and time.monotonic() < end_s:
            if self._aeron.lib.aeron_is_closed(self._client) or not self._handle.is_alive():
                return
            time.sleep(0.001)


def _check_stream(stream: int) -> None:
    if not 1 <= stream <= STREAM_MAX:
        raise UsageError(f"stream {stream} is outside 1 to {STREAM_MAX}")
