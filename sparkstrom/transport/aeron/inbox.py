"""Subscriptions and the memory that frames arrive in: one call polls them all, without the GIL."""

from __future__ import annotations

from ctypes import CDLL, c_void_p, cast
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from sparkstrom.base.errors import TransportError
from sparkstrom.transport.aeron import kernels as k
from sparkstrom.transport.aeron.checked import Aeron, address
from sparkstrom.transport.contract import Arrival

FRAMES_MAX: Final = 1024  # of one poll: what the caller must hold at once
CAPACITY_FRAMES: Final = 16  # room for so many of the longest

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]


class Inbox:
    """All receivers of one client. Not for two threads."""

    def __init__(self, aeron: Aeron, frame_max: int) -> None:
        self._aeron, self._frame_max = aeron, frame_max
        self._frames: U8 = np.empty(CAPACITY_FRAMES * frame_max, np.uint8)
        self._records: I64 = np.empty((FRAMES_MAX, 2), np.int64)
        self._state: I64 = np.zeros(k.INBOX_FIELDS, np.int64)
        self._state[k.INBOX_FRAMES] = self._frames.ctypes.data
        self._state[k.INBOX_CAPACITY] = len(self._frames)
        self._state[k.INBOX_RECORDS] = self._records.ctypes.data
        self._state[k.INBOX_RECORDS_MAX] = FRAMES_MAX
        self._state[k.INBOX_FRAME_MAX] = frame_max
        self._state_address = self._state.ctypes.data
        self._functions: I64 = np.array(
            [
                aeron.address_of("aeron_subscription_controlled_poll"),
                k.on_fragment.address,
                aeron.address_of("aeron_nano_clock"),
                cast(CDLL(None).usleep, c_void_p).value,
            ],
            np.int64,
        )
        self._receivers: dict[int, tuple[Any, I64, U8]] = {}  # stream: subscription and its memory
        self._table: I64 = np.empty((0, k.RECEIVER_FIELDS), np.int64)
        self._first = 0
        self._received_frames = self._received_bytes = 0

    def add(self, stream: int, subscription: Any) -> None:
        """Poll ``subscription`` from now on. Its memory is touched only by frames in pieces."""
        slots = np.full((k.SLOTS, k.SLOT_FIELDS), k.FREE, np.int64)
        gathered = np.empty(k.SLOTS * self._frame_max, np.uint8)
        self._receivers[stream] = subscription, slots, gathered
        self._rebuild()

    def remove(self, stream: int) -> Any | None:
        """Forget a receiver; return its subscription, or None where there is none."""
        found = self._receivers.pop(stream, None)
        self._rebuild()
        return found[0] if found else None

    def _rebuild(self) -> None:
        rows = [
            (address(subscription), stream, slots.ctypes.data, gathered.ctypes.data)
            for stream, (subscription, slots, gathered) in self._receivers.items()
        ]
        self._table = np.array(rows, np.int64).reshape(len(rows), k.RECEIVER_FIELDS)

    def poll(self, wait_s: float) -> list[Arrival]:
        """Whole frames that came in, at most FRAMES_MAX; waits parked for the first of them."""
        # After a poll that was cut short the others have their turn first.
        self._first = (self._first + 1) % max(1, len(self._table))
        failed = k.poll_all(
            self._functions,
            self._table,
            self._first,
            self._state,
            self._state_address,
            int(wait_s * 1e9),
        )
        if failed:
            raise TransportError("polling", *self._aeron.last_error())
        return self._take()

    def wake(self) -> None:
        """Let the poll that waits, or the next one, wait no longer. From any thread."""
        self._state[k.INBOX_AWAKE] = 1

    def take_wake(self) -> bool:
        """Was there a wake since the last call?"""
        awake = bool(self._state[k.INBOX_AWAKE])
        self._state[k.INBOX_AWAKE] = 0
        return awake

    def _take(self) -> list[Arrival]:
        count = int(self._state[k.INBOX_COUNT])
        if not count:
            return []
        content = self._frames[: self._state[k.INBOX_USED]].data
        arrivals, start = [], 0
        for stream, length in self._records[:count].tolist():
            arrivals.append(Arrival(stream, bytes(content[start : start + length])))
            start += length
        self._received_frames += count
        self._received_bytes += start
        return arrivals

    def counters(self) -> dict[str, int]:
        """Cumulative figures of this client."""
        return {
            "frames_received": self._received_frames,
            "bytes_received": self._received_bytes,
            "fragments_received": int(self._state[k.INBOX_FRAGMENTS]),
            "fragments_discarded": int(self._state[k.INBOX_DISCARDED]),
        }
