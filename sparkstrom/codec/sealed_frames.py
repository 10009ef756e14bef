"""Encrypt messages as frames that are bound to their job, edge, direction and position.

An edge is one connection between two nodes of the tree. A message is cut into pieces that fit a
frame, and each piece is encrypted (sealed) with AES-GCM. A frame's position is its place among all
frames of its sender (``counter``) and in its message (``piece``). The header is sent unencrypted
and authenticated together with the body: a frame that was modified, made without the job's key, or
sent over another edge cannot be opened. Direct messages, which bypass the tree, have no edge; they
are bound to a worker process by the process's token.
"""

from __future__ import annotations

import enum
import struct
from typing import Self

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from sparkstrom.base.errors import WireError
from sparkstrom.base.identity import MASTER, EdgeNo, NodeId

# 4s magic | u8 version | u8 kind | 2 zero | u64 job | u32 sender | u32 receiver | u32 edge
# | u64 counter | u32 piece | u32 pieces | u32 body_bytes (encrypted: 16 more than the plain body)
HEADER = struct.Struct("<4sBB2xQIIIQIII")
NONCE = struct.Struct("<IQ")  # (sender, counter), never used twice with one key
TOKEN = struct.Struct("<Q")  # authenticated with the master's direct frames, but not sent

MAGIC = b"SpSt"
VERSION = 1
TAG_BYTES = 16
OVERHEAD_BYTES = HEADER.size + TAG_BYTES
KEY_BYTES = 32
FRAMES = b"sparkstrom frames 1"  # purpose for which the frames' key is derived
NOBODY = 0xFFFF_FFFF  # on the wire: a sender or receiver without an id yet (None in ``Header``)
UNBOUND = EdgeNo(0)  # edge of the master's direct frames; real edges count from 1
STRANGER_BIT = 0x8000_0000  # set in a nonce's first part if the sender has no id
# A direct frame to the master has as its counter the low half of the process's token, then a count.
COUNT_BITS = 32
COUNT_MAX = (1 << COUNT_BITS) - 1


class Rejection(enum.StrEnum):
    """The reason why a frame is rejected. Rejections are counted by reason, hence the fixed set."""

    SHORT = "shorter than a frame"
    FOREIGN = "no frame of ours"
    OTHER_JOB = "a frame of another job"
    LENGTH = "another length than announced"
    PIECE = "a piece beyond the last"
    SEAL = "the seal does not fit"
    AGAIN = "counted already"
    TOO_LONG = "too long a message"
    EARLY = "a frame of an edge that is not open here yet"  # it will be sent again
    OTHER_EDGE = "a frame of another edge"
    OTHER_STREAM = "a frame of the edge's other stream"  # the counters of the two streams differ
    OTHER_RECEIVER = "a frame for somebody else"
    NOT_DIRECT = "only what is told directly is taken here"
    NO_MESSAGE = "no message"  # it was decrypted, but its body cannot be decoded


class FrameError(WireError):
    """Error for a rejected frame. Contains the ``Rejection``, for counting, and details as text."""

    def __init__(self, rejection: str, detail: str = "") -> None:
        super().__init__(rejection, detail)
        self.rejection, self.detail = rejection, detail

    def __str__(self) -> str:
        return f"{self.rejection}: {self.detail}" if self.detail else self.rejection


class Header(msgspec.Struct, frozen=True):
    """A frame's unencrypted header. ``HEADER`` defines the layout.

    In frames that a worker process sends directly to the master, ``edge`` and ``counter`` contain
    ``session`` and ``count`` instead.
    """

    kind: int  # kind of message, a ``wire.Kind``
    sender: NodeId | None  # None: a worker process that sends directly to the master
    receiver: NodeId | None  # None: a worker process, identified by its token
    edge: EdgeNo  # UNBOUND if the master sends directly
    counter: int  # number of the frame among those of its sender
    piece: int  # which piece of the message the frame contains, from 0
    pieces: int  # number of the message's pieces

    @property
    def is_direct_from_master(self) -> bool:
        """Return whether the master sent this frame directly instead of through the tree."""
        return (self.sender, self.edge) == (MASTER, UNBOUND)

    @property
    def session(self) -> int:
        """Return the token of the worker process that sent this frame directly."""
        return self.edge << COUNT_BITS | self.counter >> COUNT_BITS

    @property
    def count(self) -> int:
        """Return the sender's running number of direct frames, from 1."""
        return self.counter & COUNT_MAX


def direct_header(token: int, count: int, kind: int, piece: int, pieces: int) -> Header:
    """Return the header of a frame that a worker process sends directly to the master.

    ``token`` (63 random bits per process) and ``count`` (from 1, rising) also form the nonce.
    """
    assert 0 < count <= COUNT_MAX, "a nonce must not repeat"
    edge, counter = EdgeNo(token >> COUNT_BITS), (token & COUNT_MAX) << COUNT_BITS | count
    return Header(kind, None, MASTER, edge, counter, piece, pieces)


def derive_key(fit_key: bytes, purpose: bytes, salt: bytes | None = None) -> bytes:
    """Derive a key for one purpose from the fit's key by HKDF-SHA256.

    The fit's key itself is never used for encryption.
    """
    assert len(fit_key) == KEY_BYTES, "as the fit has drawn it"
    return HKDF(SHA256(), KEY_BYTES, salt, purpose).derive(fit_key)


class Seal:
    """Encrypts and decrypts the frames of one job.

    The caller provides the counters, which must rise with each frame of a sender. The argument
    ``token`` of the methods identifies a worker process: only that process can open a direct frame
    that the master sent to it. All other frames are bound to their edge.
    """

    def __init__(self, key: bytes, job: int) -> None:
        assert len(key) == KEY_BYTES, "AES-256"
        self._aead, self._job = AESGCM(key), job

    @classmethod
    def from_fit_key(cls, fit_key: bytes, job: int) -> Self:
        """Return a seal that uses the frames' key, derived from the fit's key."""
        return cls(derive_key(fit_key, FRAMES), job)

    def close(self, header: Header, body: bytes, token: int = 0) -> bytes:
        """Encrypt one piece of a message; return the frame. For ``token`` see the class."""
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
        return clear + self._aead.encrypt(
            _nonce(header), body, _authenticated_bytes(header, clear, token)
        )

    def open_untrusted(self, frame: bytes, token: int = 0) -> tuple[Header, bytes]:
        """Decrypt a frame; return its header and body. For ``token`` see the class.

        Raise FrameError, and no other error, if the frame is rejected.
        """
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
        bound = _authenticated_bytes(header, clear, token)
        try:
            return header, self._aead.decrypt(_nonce(header), frame[HEADER.size :], bound)
        except InvalidTag:
            detail = "not this job's key, changed, or for another process"
            raise FrameError(Rejection.SEAL, detail) from None


def _to_wire(node: NodeId | None) -> int:
    """Return the number that represents a node id in a header: NOBODY for None."""
    return NOBODY if node is None else node


def _from_wire(node: int) -> NodeId | None:
    """Return the node id that a number in a header represents: None for NOBODY."""
    return None if node == NOBODY else NodeId(node)


def _authenticated_bytes(header: Header, clear: bytes, token: int) -> bytes:
    """Return the bytes that are authenticated together with the body.

    These are the header and, for direct frames of the master, the token.
    """
    return clear + TOKEN.pack(token) if header.is_direct_from_master else clear


def _nonce(header: Header) -> bytes:
    """Return the nonce of a frame, which must never repeat.

    It consists of the sender's id and counter or, in direct frames to the master, of the process's
    token and count.
    """
    if header.sender is None:
        return NONCE.pack(header.edge | STRANGER_BIT, header.counter)
    return NONCE.pack(header.sender, header.counter)


def split_body(body: bytes, piece_bytes: int) -> list[bytes]:
    """Cut a message's body into pieces of at most ``piece_bytes``.

    An empty body gives one empty piece.
    """
    return [body[i : i + piece_bytes] for i in range(0, max(1, len(body)), piece_bytes)]


class Reassembler:
    """Reassembles the messages of one stream from their pieces, in bounded memory.

    A sender seals all pieces of a message in sequence, so the next piece has the next counter; any
    other frame discards the incomplete message. A counter not above the last one is a replay.
    ``message_bytes_max`` limits the size of a message's body. ``after`` is the highest counter that
    was accepted before.
    """

    def __init__(self, message_bytes_max: int, after: int = -1) -> None:
        self._message_bytes_max = message_bytes_max
        self.counter = after  # the highest one that was accepted
        self._next: tuple[int, int, int, int] | None = None  # kind, counter, piece, pieces
        self._parts: list[bytes] = []
        self._bytes = 0

    @property
    def arriving_bytes(self) -> int:
        """Return the number of bytes received of the incomplete message."""
        return self._bytes if self._next is not None else 0

    def add_piece(self, header: Header, body: bytes) -> bytes | None:
        """Add a piece. Return the message's body if this was its last piece, else None.

        ``header`` and ``body`` are those of a decrypted frame. A piece out of sequence discards the
        incomplete message, and is itself dropped unless it is the first piece of another message.
        Raise FrameError for a replay (a counter not above the last one) or a message that is too
        long.
        """
        if header.counter <= self.counter:
            detail = f"counter {header.counter} again, it was {self.counter} already"
            raise FrameError(Rejection.AGAIN, detail)
        self.counter = header.counter
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
