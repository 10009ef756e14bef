"""Exchange encrypted messages over a TCP connection whose two ends share a secret key.

A message is sent in records of up to 1 MiB, each encrypted and authenticated by AES-256-GCM. Each
connection has two keys of its own, one per direction. They are derived by HKDF from the shared key
and the salts of both ends, so a recording cannot be replayed on another connection or to its
sender. Records are numbered, and the number is the nonce: omitting, repeating or reordering a
record ends the connection. Only authenticated data is returned, so messages may be of kinds that
are unsafe from strangers, such as pickles.

    salt      u8[16]   random, not encrypted; each end sends one first
    record    header | content, encrypted | u8[16] authentication tag
    header    u32 length of content and tag | u8 1: the message continues in the next record, or 0

A header is authenticated with its record but not encrypted.
"""

from __future__ import annotations

import math
import secrets
import socket
import struct
import time
from collections.abc import Callable

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from sparkstrom.base.descriptors import wait_until_readable
from sparkstrom.base.errors import WireError
from sparkstrom.codec.sealed_frames import derive_key

SALT_BYTES = 16
TAG_BYTES = 16
RECORD_BYTES_MAX = 1 << 20
RECORD = struct.Struct("<IB")  # header of a record
NONCE = struct.Struct("<IQ")
GREETING = b"sparkstrom control 1"  # first message in each direction; proves possession of the key
GREETING_TIMEOUT_S = 3.0  # limit for the whole greeting, since strangers can connect too
RECORD_TIMEOUT_S = 30.0  # limit for receiving one record, and for sending


class EncryptedStream:
    """One end of an encrypted connection. Methods raise WireError once the connection has ended.

    One thread may send while another one receives.
    """

    def __init__(self, connection: socket.socket, key: bytes, *, is_opener: bool) -> None:
        """Exchange salts and greetings within ``GREETING_TIMEOUT_S`` seconds.

        Args:
            connection: a connected TCP socket, which this object owns from now on.
            key: the secret that both ends share.
            is_opener: True at the end that connected, False at the end that accepted.

        Raises:
            WireError: no greeting in time, another key, or another version; the socket is closed.
        """
        self._socket = connection
        # Deadline of the whole greeting; infinity afterwards.
        self._until_s = time.monotonic() + GREETING_TIMEOUT_S
        connection.settimeout(GREETING_TIMEOUT_S)
        try:
            own = secrets.token_bytes(SALT_BYTES)
            connection.sendall(own)
            theirs = self._receive_exactly(SALT_BYTES, self._until_s)
            salts = own + theirs if is_opener else theirs + own
            self._sealer, self._opener = (
                AESGCM(_derive_direction_key(key, salts, from_opener=end))
                for end in (is_opener, not is_opener)
            )
            self._sent = self._received = 0
            self.send(GREETING)
            if self.receive() != GREETING:
                raise WireError("the other end has another version")
        except OSError as error:
            connection.close()
            raise WireError(f"no greeting: {error}") from None
        except WireError:
            connection.close()
            raise
        connection.settimeout(RECORD_TIMEOUT_S)
        self._until_s = math.inf

    def send(self, message: bytes) -> None:
        """Encrypt and send a whole message; raise WireError if the connection has ended."""
        parts = range(0, max(1, len(message)), RECORD_BYTES_MAX)
        for begin in parts:
            self._send_record(message[begin : begin + RECORD_BYTES_MAX], more=begin != parts[-1])

    def _send_record(self, body: bytes, *, more: bool) -> None:
        """Send one encrypted record; ``more``: whether the message continues in the next record."""
        header = RECORD.pack(len(body) + TAG_BYTES, more)
        sealed = self._sealer.encrypt(NONCE.pack(0, self._sent), body, header)
        self._sent += 1
        try:
            self._socket.sendall(header + sealed)
        except OSError as error:
            raise WireError(f"the connection is gone: {error}") from None

    def receive(self, on_record: Callable[[], None] = lambda: None) -> bytes:
        """Return the next message, decrypted, blocking until it is complete.

        Call ``on_record`` after each record, since a long message may take minutes to arrive. Raise
        WireError if a record takes longer than ``RECORD_TIMEOUT_S`` or is not authentic.
        """
        parts, more = [], True
        while more:
            until_s = min(self._until_s, time.monotonic() + RECORD_TIMEOUT_S)
            header = self._receive_exactly(RECORD.size, until_s)
            size, more = RECORD.unpack(header)
            if not TAG_BYTES <= size <= RECORD_BYTES_MAX + TAG_BYTES:
                raise WireError(f"a record of {size} bytes")
            try:
                nonce = NONCE.pack(0, self._received)
                parts.append(
                    self._opener.decrypt(nonce, self._receive_exactly(size, until_s), header)
                )
            except InvalidTag:
                raise WireError(
                    "the seal does not fit: another job's key, or changed in transit"
                ) from None
            self._received += 1
            on_record()
        return b"".join(parts)

    def wait_for_data(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for data to receive; return False if none has arrived."""
        try:
            return wait_until_readable(self._socket, seconds)
        except (OSError, ValueError) as error:
            raise WireError(f"the connection is gone: {error}") from None

    def close(self) -> None:
        """Close the socket. Idempotent."""
        self._socket.close()

    def _receive_exactly(self, size: int, end_s: float) -> bytes:
        """Return ``size`` bytes; raise WireError if they do not arrive by ``end_s`` (monotonic)."""
        parts = bytearray()
        while len(parts) < size:
            left_s = end_s - time.monotonic()
            if left_s <= 0 or not self.wait_for_data(left_s):
                missing = "greeting" if self._until_s < math.inf else "whole record"
                raise WireError(f"no {missing} in time: timed out")
            try:
                part = self._socket.recv(size - len(parts))
            except OSError as error:
                raise WireError(f"the connection is gone: {error}") from None
            if not part:
                raise WireError("the other end has closed the connection")
            parts += part
        return bytes(parts)


def _derive_direction_key(key: bytes, salts: bytes, *, from_opener: bool) -> bytes:
    """Return the connection's key for one direction, from the shared key and both ends' salts.

    ``GREETING`` makes the key differ from keys that are derived for other purposes.
    """
    direction = b"to the listener" if from_opener else b"from the listener"
    return derive_key(key, GREETING + salts + direction)
