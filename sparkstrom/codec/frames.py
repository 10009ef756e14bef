"""Frames: sealed pieces of messages, each bound to its job, edge, direction and place.

A message is cut into pieces that fit a frame; each piece is sealed on its own with AES-GCM. The
header travels in the clear and is authenticated with the body, so a frame that was changed, or
made without the job's key, or sent on another edge, opens nowhere. What goes beside the edges is
bound to the process at the node's end, by its token.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from sparkstrom.base.errors import WireError
from sparkstrom.base.identity import MASTER, EdgeNo, NodeId

# 4s magic | u8 version | u8 kind | 2 zero | u64 job | u32 sender | u32 receiver | u32 edge
# | u64 counter | u32 piece | u32 pieces | u32 body_bytes, sealed: 16 more than in the clear
HEADER = struct.Struct("<4sBB2xQIIIQIII")
NONCE = struct.Struct("<IQ")  # sender, counter: never twice under one key
TOKEN = struct.Struct("<Q")  # authenticated with what the master says directly, and not sent

MAGIC = b"SpSt"
VERSION = 1
TAG_BYTES = 16
OVERHEAD_BYTES = HEADER.size + TAG_BYTES
KEY_BYTES = 32
FRAMES = b"sparkstrom frames 1"  # what the key of frames is derived for
NOBODY = 0xFFFF_FFFF  # on the wire: sender or receiver without an id yet, which is None in a header
UNBOUND = EdgeNo(0)  # the edge of what the master says directly; edges count from 1
STRANGER_BIT = 0x8000_0000  # set in a nonce's first half where the sender has no id
COUNT_BITS = 32  # of a teller's counter; above them stands the lower half of its token
COUNT_MAX = (1 << COUNT_BITS) - 1


class Rejection(enum.StrEnum):
    """Why a frame is not taken: few words, the same for all, so that counting them is bounded."""

    SHORT = "shorter than a frame"
    FOREIGN = "no frame of ours"
    OTHER_JOB = "a frame of another job"
    LENGTH = "another length than announced"
    PIECE = "a piece beyond the last"
    SEAL = "the seal does not fit"
    AGAIN = "counted already"
    TOO_LONG = "too long a message"
    EARLY = "a frame of an edge that is not open here yet"  # it comes again
    OTHER_EDGE = "a frame of another edge"
    OTHER_STREAM = "a frame of the edge's other stream"  # whose counters are not these
    OTHER_RECEIVER = "a frame for somebody else"
    NOT_DIRECT = "only what is told directly is taken here"
    NO_MESSAGE = "no message"  # the seal was good, the body is nothing that can be read


class FrameError(WireError):
    """A frame that is not taken: a ``Rejection`` for counting, and what it was for reading."""

    def __init__(self, rejection: str, detail: str = "") -> None:
        super().__init__(rejection, detail)
        self.rejection, self.detail = rejection, detail

    def __str__(self) -> str:
        return f"{self.rejection}: {self.detail}" if self.detail else self.rejection


@dataclass(frozen=True, slots=True)
class Header:
    """Who sends what to whom; see the layout above ``HEADER``."""

    kind: int
    sender: NodeId | None
    receiver: NodeId | None
    edge: EdgeNo
    counter: int
    piece: int
    pieces: int

    @property
    def from_master(self) -> bool:
        """Does the master say it directly, whoever stands between?"""
        return (self.sender, self.edge) == (MASTER, UNBOUND)

    @property
    def session(self) -> int:
        """The token of the process that tells this directly."""
        return self.edge << COUNT_BITS | self.counter >> COUNT_BITS

    @property
    def count(self) -> int:
        """How many frames that process has told, with this one."""
        return self.counter & COUNT_MAX


def told_by(token: int, count: int, kind: int, piece: int, pieces: int) -> Header:
    """The header of what a process tells the master directly: its token, and a count from 1.

    Together they are the nonce, too: 63 random bits per process and a number that rises.
    """
    assert 0 < count <= COUNT_MAX, "a nonce must not repeat"
    edge, counter = EdgeNo(token >> COUNT_BITS), (token & COUNT_MAX) << COUNT_BITS | count
    return Header(kind, None, MASTER, edge, counter, piece, pieces)


def derived_key(fit_key: bytes, purpose: bytes, salt: bytes | None = None) -> bytes:
    """HKDF-SHA256 of the fit's key. Each purpose has a key of its own; the fit's seals nothing."""
    assert len(fit_key) == KEY_BYTES, "as the fit has drawn it"
    return HKDF(SHA256(), KEY_BYTES, salt, purpose).derive(fit_key)


class Seal:
    """One job's key of frames. Counters are the caller's: one per sender, rising with each frame.

    ``token``: of the process that a frame is for. What the master says directly is sealed with
    it, and opens nowhere else; all other frames are bound by their edge.
    """

    def __init__(self, key: bytes, job: int) -> None:
        assert len(key) == KEY_BYTES, "AES-256"
        self._aead, self._job = AESGCM(key), job

    @classmethod
    def of_fit(cls, fit_key: bytes, job: int) -> Self:
        """With the key of frames that is derived from the fit's."""
        return cls(derived_key(fit_key, FRAMES), job)

    def close(self, header: Header, body: bytes, token: int = 0) -> bytes:
        """The frame for one piece of a message."""
        clear = HEADER.pack(
            MAGIC,
            VERSION,
            header.kind,
            self._job,
            _to_wire(header.sender),
            _to_wire(header.receiver),
            header.edge,
            header.counter,
            header.piece,
            header.pieces,
            len(body) + TAG_BYTES,
        )
        return clear + self._aead.encrypt(_nonce(header), body, _bound(header, clear, token))

    def open_untrusted(self, frame: bytes, token: int = 0) -> tuple[Header, bytes]:
        """The header and the body in the clear. Raise FrameError and nothing else."""
        if len(frame) < OVERHEAD_BYTES:
            detail = f"at least {OVERHEAD_BYTES} bytes, got {len(frame)}"
            raise FrameError(Rejection.SHORT, detail)
        clear = frame[: HEADER.size]
        magic, version, kind, job, sender, receiver, *fields, body_bytes = HEADER.unpack(clear)
        if (magic, version) != (MAGIC, VERSION):
            raise FrameError(Rejection.FOREIGN)
        if job != self._job:
            raise FrameError(Rejection.OTHER_JOB, f"{job:016x}, this is {self._job:016x}")
        if body_bytes != len(frame) - HEADER.size:
            came = len(frame) - HEADER.size
            raise FrameError(Rejection.LENGTH, f"{body_bytes} bytes announced, {came} came")
        header = Header(kind, _from_wire(sender), _from_wire(receiver), *fields)
        if not header.piece < header.pieces:
            raise FrameError(Rejection.PIECE, f"piece {header.piece} of {header.pieces}")
        bound = _bound(header, clear, token)
        try:
            return header, self._aead.decrypt(_nonce(header), frame[HEADER.size :], bound)
        except InvalidTag:
            detail = "not this job's key, changed, or for another process"
            raise FrameError(Rejection.SEAL, detail) from None


def _to_wire(node: NodeId | None) -> int:
    return NOBODY if node is None else node


def _from_wire(node: int) -> NodeId | None:
    return None if node == NOBODY else NodeId(node)


def _bound(header: Header, clear: bytes, token: int) -> bytes:
    """What is authenticated with the body: a stranger's recording opens for no other process."""
    return clear + TOKEN.pack(token) if header.from_master else clear


def _nonce(header: Header) -> bytes:
    """A node's id and counter; beside the edges its process's token and count instead."""
    if header.sender is None:
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

    def __init__(self, message_bytes_max: int, after: int = -1) -> None:
        """``after``: the highest counter that was taken before."""
        self._message_bytes_max = message_bytes_max
        self._counter = after
        self._next: tuple[int, int, int, int] | None = None  # kind, counter, piece, pieces
        self._parts: list[bytes] = []
        self._bytes = 0

    @property
    def counter(self) -> int:
        """The highest that was taken."""
        return self._counter

    @property
    def arriving_bytes(self) -> int:
        """Of the message that is not whole yet."""
        return self._bytes if self._next is not None else 0

    def take(self, header: Header, body: bytes) -> bytes | None:
        """The whole message's body once its last piece is here. Raise FrameError for a replay."""
        if header.counter <= self._counter:
            detail = f"counter {header.counter} again, it was {self._counter} already"
            raise FrameError(Rejection.AGAIN, detail)
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
            raise FrameError(Rejection.TOO_LONG, f"more than {self._message_bytes_max} bytes")
        self._parts.append(body)
        if header.piece + 1 < header.pieces:
            self._next = (header.kind, header.counter + 1, header.piece + 1, header.pieces)
            return None
        whole = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._next, self._parts = None, []
        return whole
