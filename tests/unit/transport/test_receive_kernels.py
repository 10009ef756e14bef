"""The compiled fragment handler, called as Aeron calls it, on arrays of the test."""

from __future__ import annotations

import ctypes
import struct

import numpy as np
import pytest

from sparkstrom.transport.aeron import receive_kernels as k

FRAME_MAX = 1000
HANDLER = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_int64] * 4)
BEGIN, MIDDLE, END, WHOLE = 0x80, 0, 0x40, 0xC0


class FragmentHandler:
    """An inbox that receives one stream."""

    def __init__(self, capacity: int = 10_000, records: int = 100) -> None:
        self.frames = np.zeros(capacity, np.uint8)
        self.records = np.zeros((records, 2), np.int64)
        self.slots = np.full((k.GATHER_SLOTS, k.SLOT_FIELDS), k.FREE_SLOT, np.int64)
        self.gathered = np.zeros(k.GATHER_SLOTS * FRAME_MAX, np.uint8)
        self.state = np.zeros(k.INBOX_FIELDS, np.int64)
        self.state[k.INBOX_FRAMES] = self.frames.ctypes.data
        self.state[k.INBOX_CAPACITY] = capacity
        self.state[k.INBOX_RECORDS] = self.records.ctypes.data
        self.state[k.INBOX_RECORDS_MAX] = records
        self.state[k.INBOX_STREAM] = 42
        self.state[k.INBOX_SLOTS] = self.slots.ctypes.data
        self.state[k.INBOX_GATHERED] = self.gathered.ctypes.data
        self.state[k.INBOX_FRAME_MAX] = FRAME_MAX

    def take(self, payload: bytes, flags: int = WHOLE, session: int = 1) -> int:
        """Call the handler with one fragment; return its answer."""
        header = struct.pack("<iBBHiiiiq", 32 + len(payload), 0, flags, 1, 0, session, 42, 0, 0)
        memory = np.frombuffer(header + payload, np.uint8)
        at = memory.ctypes.data + len(header)
        handle = HANDLER(k.on_fragment.address)
        return int(handle(self.state.ctypes.data, at, len(payload), 0))

    def taken(self) -> list[bytes]:
        """Return the complete frames in the inbox."""
        lengths = self.records[: self.state[k.INBOX_COUNT], 1]
        ends = np.cumsum(lengths)
        return [
            self.frames[end - length : end].tobytes()
            for end, length in zip(ends, lengths, strict=True)
        ]

    @property
    def discarded(self) -> int:
        return int(self.state[k.INBOX_DISCARDED])


def test_unfragmented_frames_are_stored_with_stream() -> None:
    """Unfragmented frames of any length up to the limit are stored with their stream."""
    handler = FragmentHandler()
    for frame in (b"a", b"", b"c" * FRAME_MAX):
        assert handler.take(frame) == k.CONTINUE
    assert handler.taken() == [b"a", b"", b"c" * FRAME_MAX]
    assert handler.records[0, 0] == 42


def test_interleaved_fragments_are_joined_per_session() -> None:
    """Alternating fragments of several sessions are joined per session."""
    handler = FragmentHandler()
    sessions = (7, -7, 0, 2**31 - 1)
    for flags, piece in ((BEGIN, b"head"), (MIDDLE, b"body"), (END, b"tail")):
        for session in sessions:
            handler.take(piece + str(session).encode(), flags, session)
    assert handler.taken() == [f"head{s}body{s}tail{s}".encode() for s in sessions]
    assert handler.discarded == 0


def test_fragments_without_first_one_are_discarded_and_counted() -> None:
    """Fragments whose first one is missing are discarded and counted."""
    handler = FragmentHandler()
    handler.take(b"body", MIDDLE)
    handler.take(b"tail", END)
    handler.take(b"next")
    assert handler.taken() == [b"next"]
    assert handler.discarded == 2


def test_second_first_fragment_discards_earlier_fragments() -> None:
    """A second first fragment discards the fragments before it."""
    handler = FragmentHandler()
    for flags, piece in ((BEGIN, b"lost"), (BEGIN, b"kept "), (END, b"whole")):
        handler.take(piece, flags)
    assert handler.taken() == [b"kept whole"]
    assert handler.discarded == 1


@pytest.mark.parametrize("flags", [MIDDLE, END])
def test_frame_above_length_limit_is_discarded(flags: int) -> None:
    handler = FragmentHandler()
    handler.take(b"x" * FRAME_MAX, BEGIN)
    assert handler.take(b"x", flags) == k.CONTINUE
    handler.take(b"y", END)
    handler.take(b"z" * (FRAME_MAX + 1))
    assert handler.taken() == []
    assert handler.discarded == 3


@pytest.mark.parametrize("limits", [{"capacity": 8}, {"records": 1}])
def test_full_inbox_aborts_and_later_accepts_same_fragment(limits: dict[str, int]) -> None:
    """A full inbox answers ABORT, and accepts the same fragment once there is room."""
    handler = FragmentHandler(**limits)
    handler.take(b"abcd")
    handler.take(b"efg", BEGIN)
    assert handler.take(b"hi", END) == k.ABORT
    assert handler.take(b"whole") == k.ABORT
    assert handler.state[k.INBOX_FULL] == 1
    assert handler.taken() == [b"abcd"]
    handler.state[[k.INBOX_USED, k.INBOX_COUNT, k.INBOX_FULL]] = 0
    assert handler.take(b"hi", END) == k.CONTINUE
    assert handler.taken() == [b"efghi"]


def test_partial_frame_beyond_slots_replaces_longest_silent_one() -> None:
    """A partial frame beyond the slots replaces the one that has been silent longest."""
    handler = FragmentHandler()
    for session in range(k.GATHER_SLOTS):
        handler.take(b"begin", BEGIN, session)
    handler.take(b"more", MIDDLE, session=0)  # now session 1 has been silent longest
    handler.take(b"new", BEGIN, session=100)
    assert handler.discarded == 1
    for session in (0, 1, 100):
        handler.take(b"end", END, session)
    assert handler.taken() == [b"beginmoreend", b"newend"]
    assert handler.discarded == 2
