"""Sealed stream: messages over one TCP connection, sealed both ways with a key that both ends have.

Each connection has keys of its own, one for each direction, which HKDF derives from the shared key
and salts that both ends draw. So what was recorded of one connection opens on no other, and nothing
that one end said opens as the other's. Records are counted, and the count is the nonce: one that is
left out, repeated or moved ends the connection. Nothing is handed on that was not sealed so; a
message may therefore be of a kind that strangers must never send.

    salt, u8[16], each way, in the clear
    record: u32 bytes, sealed: 16 more than in the clear | u8 1: more of this message follows | body
"""

from __future__ import annotations

import math
import secrets
import select
import socket
import struct
import time

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from sparkstrom.base.errors import WireError
from sparkstrom.codec.frames import derived_key

SALT_BYTES = 16
TAG_BYTES = 16
PART_BYTES = 1 << 20
RECORD = struct.Struct("<IB")
NONCE = struct.Struct("<IQ")
HELLO = b"sparkstrom control 1"  # the first message each way: it proves the key
GREETING_S = 3.0  # for a stranger to show that it is none
STALL_S = 30.0  # for one record on its way, from its first byte to its last


class SealedStream:
    """One end of a connection. Raises WireError when it is over, whatever the reason.

    ``send`` from one thread at a time, ``receive`` from one; they may be two.
    """

    def __init__(self, connection: socket.socket, key: bytes, *, opens: bool) -> None:
        """Greet; ``opens``: this end has connected. At most ``GREETING_S``."""
        self._socket = connection
        self._until_s = time.monotonic() + GREETING_S  # for all of the greeting
        connection.settimeout(GREETING_S)
        try:
            own = secrets.token_bytes(SALT_BYTES)
            connection.sendall(own)
            theirs = self._exactly(SALT_BYTES, self._until_s)
            salts = own + theirs if opens else theirs + own
            self._sealer, self._opener = (
                AESGCM(_derived(key, salts, from_opener=end)) for end in (opens, not opens)
            )
            self._sent = self._received = 0
            self.send(HELLO)
            if self.receive() != HELLO:
                raise WireError("another version's connection")
        except OSError as error:
            connection.close()
            raise WireError(f"no greeting: {error}") from None
        except WireError:
            connection.close()
            raise
        connection.settimeout(STALL_S)
        self._until_s = math.inf

    def send(self, message: bytes) -> None:
        """All of it, or WireError."""
        parts = range(0, max(1, len(message)), PART_BYTES)
        for begin in parts:
            self._send_part(message[begin : begin + PART_BYTES], more=begin != parts[-1])

    def _send_part(self, body: bytes, *, more: bool) -> None:
        header = RECORD.pack(len(body) + TAG_BYTES, more)
        sealed = self._sealer.encrypt(NONCE.pack(0, self._sent), body, header)
        self._sent += 1
        try:
            self._socket.sendall(header + sealed)
        except OSError as error:
            raise WireError(f"the connection is gone: {error}") from None

    def receive(self) -> bytes:
        """The next message. Blocks until it is whole, and for no record longer than ``STALL_S``."""
        parts, more = [], True
        while more:
            until_s = min(self._until_s, time.monotonic() + STALL_S)
            header = self._exactly(RECORD.size, until_s)
            size, more = RECORD.unpack(header)
            if not TAG_BYTES <= size <= PART_BYTES + TAG_BYTES:
                raise WireError(f"a record of {size} bytes")
            try:
                nonce = NONCE.pack(0, self._received)
                parts.append(self._opener.decrypt(nonce, self._exactly(size, until_s), header))
            except InvalidTag:
                raise WireError("the seal does not fit: not this job's key, or changed") from None
            self._received += 1
        return b"".join(parts)

    def waits(self, seconds: float) -> bool:
        """Has something come? Waits so long at most."""
        try:
            poll = select.poll()  # select.select takes no descriptor above 1023
            poll.register(self._socket, select.POLLIN)
            return bool(poll.poll(1000 * seconds))
        except (OSError, ValueError) as error:
            raise WireError(f"the connection is gone: {error}") from None

    def close(self) -> None:
        """Idempotent."""
        self._socket.close()

    def _exactly(self, size: int, until_s: float) -> bytes:
        """So many bytes, or WireError where they are not all here at that time."""
        parts = bytearray()
        while len(parts) < size:
            left_s = until_s - time.monotonic()
            if left_s <= 0 or not self.waits(left_s):
                what = "greeting" if self._until_s < math.inf else "whole record"
                raise WireError(f"no {what} in time: timed out")
            try:
                part = self._socket.recv(size - len(parts))
            except OSError as error:
                raise WireError(f"the connection is gone: {error}") from None
            if not part:
                raise WireError("the other end has closed the connection")
            parts += part
        return bytes(parts)


def _derived(key: bytes, salts: bytes, *, from_opener: bool) -> bytes:
    """One direction's key of this connection; with ``HELLO`` in it, it is no other purpose's."""
    way = b"to the listener" if from_opener else b"from the listener"
    return derived_key(key, HELLO + salts + way)
