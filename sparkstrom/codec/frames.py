"""Frames: sealed pieces of messages, each bound to its job, edge, direction and place.

A message is cut into pieces that fit a frame; each piece is sealed on its own with AES-GCM. The
header travels in the clear and is authenticated with the body, so a frame that was changed, or
made without the job's key, or sent on another edge, opens nowhere.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from sparkstrom.base.errors import WireError

# 4s magic | u8 version | u8 kind | 2 zero | u64 job | u32 sender | u32 receiver | u32 edge
# | u64 counter | u32 piece | u32 pieces | u32 body_bytes, sealed: 16 more than in the clear
HEADER = struct.Struct("<4sBB2xQIIIQIII")
NONCE = struct.Struct("<IQ")  # sender, counter: never twice under one key

MAGIC = b"SpSt"
VERSION = 1
TAG_BYTES = 16
OVERHEAD_BYTES = HEADER.size + TAG_BYTES
KEY_BYTES = 32
NOBODY = 0xFFFF_FFFF  # sender or receiver without an id yet
STRANGER_BIT = 0x8000_0000  # set in a nonce's first half where the sender has no id


@dataclass(frozen=True, slots=True)
class Header:
    """Who sends what to whom; see the layout above ``HEADER``."""

    kind: int
    sender: int
    receiver: int
    edge: int
    counter: int
    piece: int
    pieces: int


class Seal:
    """One job's key. Counters are the caller's: one per sender, rising with every frame."""

    def __init__(self, key: bytes, job: int) -> None:
        assert len(key) == KEY_BYTES, "AES-256"
        self._aead, self._job = AESGCM(key), job

    def close(self, header: Header, body: bytes) -> bytes:
        """The frame for one piece of a message."""
        clear = HEADER.pack(
            MAGIC,
            VERSION,
            header.kind,
            self._job,
            header.sender,
            header.receiver,
            header.edge,
            header.counter,
            header.piece,
            header.pieces,
            len(body) + TAG_BYTES,
        )
        return clear + self._aead.encrypt(_nonce(header), body, clear)

    def open_untrusted(self, frame: bytes) -> tuple[Header, bytes]:
        """The header and the body in the clear. Raise WireError and nothing else."""
        if len(frame) < OVERHEAD_BYTES:
            raise WireError(f"a frame has at least {OVERHEAD_BYTES} bytes, got {len(frame)}")
        clear = frame[: HEADER.size]
        magic, version, kind, job, *fields, body_bytes = HEADER.unpack(clear)
        if (magic, version) != (MAGIC, VERSION):
            raise WireError("no frame of ours")
        if job != self._job:
            raise WireError(f"a frame of job {job:016x}, this is {self._job:016x}")
        if body_bytes != len(frame) - HEADER.size:
            raise WireError(
                f"body of {body_bytes} bytes announced, {len(frame) - HEADER.size} came"
            )
        header = Header(kind, *fields)
        if not header.piece < header.pieces:
            raise WireError(f"piece {header.piece} of {header.pieces}")
        try:
            return header, self._aead.decrypt(_nonce(header), frame[HEADER.size :], clear)
        except InvalidTag:
            raise WireError("the seal does not fit: not this job's key, or changed") from None


def _nonce(header: Header) -> bytes:
    """A node's id and counter; where it has no id yet, two random numbers in their places."""
    if header.sender == NOBODY:
        return NONCE.pack(header.edge | STRANGER_BIT, header.counter)
    return NONCE.pack(header.sender, header.counter)


def pieces_of(body: bytes, piece_bytes: int) -> list[bytes]:
    """Cut a body; an empty one is one empty piece."""
    return [body[i : i + piece_bytes] for i in range(0, max(1, len(body)), piece_bytes)]


class Joiner:
    """Puts the pieces of one stream's messages together again, in bounded memory.

    A sender seals all pieces of a message in a row, so the next piece has the next counter;
    whatever else comes ends the partial message. A counter that is not above the last one is a
    replay.
    """

    def __init__(self, message_bytes_max: int) -> None:
        self._message_bytes_max = message_bytes_max
        self._counter = -1
        self._next: tuple[int, int, int, int] | None = None  # kind, counter, piece, pieces
        self._parts: list[bytes] = []
        self._bytes = 0

    @property
    def arriving_bytes(self) -> int:
        """Of the message that is not whole yet."""
        return self._bytes if self._next is not None else 0

    def take(self, header: Header, body: bytes) -> bytes | None:
        """The whole message's body once its last piece is here. Raise WireError for a replay."""
        if header.counter <= self._counter:
            raise WireError(f"counter {header.counter} again, it was {self._counter} already")
        self._counter = header.counter
        expected = (header.kind, header.counter, header.piece, header.pieces)
        if header.piece == 0:
            self._parts, self._bytes = [], 0
        elif expected != self._next:
            self._next = None
            return None
        self._bytes += len(body)
        if self._bytes > self._message_bytes_max:
            self._next, self._parts = None, []
            raise WireError(f"a message of more than {self._message_bytes_max} bytes")
        self._parts.append(body)
        if header.piece + 1 < header.pieces:
            self._next = (header.kind, header.counter + 1, header.piece + 1, header.pieces)
            return None
        whole = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._next, self._parts = None, []
        return whole
