"""Encrypted streams over sockets: messages, greetings, timeouts and manipulated records."""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing

import pytest

from sparkstrom.base.errors import WireError
from sparkstrom.transport import encrypted_tcp as sealed_stream
from sparkstrom.transport.encrypted_tcp import (
    RECORD,
    RECORD_BYTES_MAX,
    SALT_BYTES,
    EncryptedStream,
)

KEY, OTHER = bytes(32), b"\1" * 32


def accept_in_thread(connection: socket.socket, key: bytes = KEY) -> Future[EncryptedStream]:
    """Start the listener's end in a thread; return a future of its stream or error."""
    made: Future[EncryptedStream] = Future()

    def greet() -> None:
        try:
            made.set_result(EncryptedStream(connection, key, is_opener=False))
        except WireError as error:
            made.set_exception(error)

    threading.Thread(target=greet).start()
    return made


@pytest.fixture
def stream_pair() -> Iterator[tuple[EncryptedStream, EncryptedStream]]:
    """The opener's and the listener's end of a connection."""
    here, there = socket.socketpair()
    listener = accept_in_thread(there)
    with (
        closing(EncryptedStream(here, KEY, is_opener=True)) as opener,
        closing(listener.result(10)) as other,
    ):
        yield opener, other


def test_messages_of_any_length_pass_in_both_directions(
    stream_pair: tuple[EncryptedStream, EncryptedStream],
) -> None:
    """Messages arrive complete in both directions, from empty to several records long."""
    opener, listener = stream_pair
    long = secrets.token_bytes(3 * RECORD_BYTES_MAX + 5)
    for message in (b"", b"short", long, bytes(RECORD_BYTES_MAX)):
        sender = threading.Thread(target=opener.send, args=(message,))
        sender.start()
        assert listener.wait_for_data(10)
        assert listener.receive() == message
        sender.join()
        listener.send(message[:10])
        assert opener.receive() == message[:10]
    assert not listener.wait_for_data(0)


def test_receive_calls_on_record_for_each_record(
    stream_pair: tuple[EncryptedStream, EncryptedStream],
) -> None:
    """``receive`` calls ``on_record`` for each record, before the message is complete."""
    opener, listener = stream_pair
    heard: list[int] = []
    opener._send_record(b"begun", more=True)
    sending = threading.Thread(target=opener._send_record, args=(b"ended",), kwargs={"more": False})

    def on_record() -> None:
        heard.append(len(heard))
        if len(heard) == 1:
            sending.start()  # the message is not complete yet

    assert listener.receive(on_record) == b"begunended"
    sending.join()
    assert len(heard) == 2


@pytest.mark.parametrize("stranger_opens", [False, True])
def test_greeting_with_different_keys_fails_at_both_ends(stranger_opens: bool) -> None:
    """Both ends raise WireError in the greeting if their keys differ."""
    here, there = socket.socketpair()
    keys = (OTHER, KEY) if stranger_opens else (KEY, OTHER)
    listener = accept_in_thread(there, keys[1])
    with pytest.raises(WireError):
        EncryptedStream(here, keys[0], is_opener=True)
    with pytest.raises(WireError):
        listener.result(10)


def test_greeting_of_silent_peer_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that sends nothing fails the greeting after its timeout."""
    monkeypatch.setattr(sealed_stream, "GREETING_TIMEOUT_S", 0.1)
    here, there = socket.socketpair()
    with here, pytest.raises(WireError, match="timed out"):
        accept_in_thread(there).result(10)


def test_greeting_of_slowly_sending_peer_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that sends single bytes slowly fails the greeting after its timeout."""
    monkeypatch.setattr(sealed_stream, "GREETING_TIMEOUT_S", 0.2)
    here, there = socket.socketpair()
    listener = accept_in_thread(there)
    with here:
        while not listener.done():
            with contextlib.suppress(BrokenPipeError):
                here.sendall(b"x")
            threading.Event().wait(0.1)  # shorter than the timeout of the greeting
        with pytest.raises(WireError, match="no greeting in time"):
            listener.result()


class RecordInterceptor:
    """An intermediary between two ends that intercepts the opener's records."""

    def __init__(self) -> None:
        self.opener, inner = socket.socketpair()
        outer, self.listener = socket.socketpair()
        self._inner, self._outer = inner, outer
        self.records: list[bytes] = []
        self.salt = b""

    def back(self) -> None:
        """Pass on the listener's bytes unchanged."""
        with contextlib.suppress(OSError):  # until they are closed
            while part := self._outer.recv(1 << 16):
                self._inner.sendall(part)

    def exactly(self, size: int) -> bytes:
        """Return the next ``size`` bytes from the opener."""
        parts = b""
        while len(parts) < size:
            parts += self._inner.recv(size - len(parts))
        return parts

    def record(self) -> bytes:
        """Return the opener's next record, with its header."""
        header = self.exactly(RECORD.size)
        return header + self.exactly(RECORD.unpack(header)[0])

    def pass_on(self, data: bytes) -> None:
        """Send bytes to the listener."""
        self._outer.sendall(data)

    def close(self) -> None:
        for end in (self.opener, self.listener, self._inner, self._outer):
            end.close()


@pytest.fixture
def intercepted_streams() -> Iterator[tuple[RecordInterceptor, EncryptedStream, EncryptedStream]]:
    """An intermediary and the two ends, after their greeting."""
    made = RecordInterceptor()
    listener = accept_in_thread(made.listener)
    threading.Thread(target=made.back, daemon=True).start()
    opener: Future[EncryptedStream] = Future()
    greet = threading.Thread(
        target=lambda: opener.set_result(EncryptedStream(made.opener, KEY, is_opener=True))
    )
    greet.start()
    made.salt = made.exactly(SALT_BYTES)
    made.pass_on(made.salt)
    made.records.append(made.record())
    made.pass_on(made.records[0])
    yield made, opener.result(10), listener.result(10)
    greet.join()
    made.close()


@pytest.mark.parametrize("deed", ["repeat", "leave out", "change", "turn more on"])
def test_manipulated_record_raises_wire_error(
    intercepted_streams: tuple[RecordInterceptor, EncryptedStream, EncryptedStream], deed: str
) -> None:
    """A repeated, missing or changed record raises WireError."""
    middle, opener, listener = intercepted_streams
    opener.send(b"first")
    opener.send(b"second")
    first, second = middle.record(), middle.record()
    changed = bytearray(first)
    changed[-1 if deed == "change" else RECORD.size - 1] ^= 1
    sent = {
        "repeat": (first, first),
        "leave out": (second,),
        "change": (bytes(changed),),
        "turn more on": (bytes(changed), second),
    }[deed]
    for record in sent:
        middle.pass_on(record)
    if deed == "repeat":
        assert listener.receive() == b"first"
    with pytest.raises(WireError, match="seal"):
        listener.receive()


def test_recorded_greeting_is_rejected_on_other_connection(
    intercepted_streams: tuple[RecordInterceptor, EncryptedStream, EncryptedStream],
) -> None:
    """A recorded greeting is rejected on another connection."""
    middle, _, _ = intercepted_streams
    here, there = socket.socketpair()
    listener = accept_in_thread(there)
    with here:
        here.sendall(middle.salt + middle.records[0])
        with pytest.raises(WireError, match="seal"):
            listener.result(10)


def test_reflected_greeting_is_rejected() -> None:
    """A peer that reflects the salt and the greeting is rejected."""
    here, there = socket.socketpair()
    listener = accept_in_thread(there)
    with here:
        here.settimeout(10)
        here.sendall(here.recv(SALT_BYTES))  # equal salts: keys differ by direction
        here.sendall(here.recv(1 << 16))
        with pytest.raises(WireError, match="seal"):
            listener.result(10)


def test_record_header_with_oversize_raises_wire_error(
    intercepted_streams: tuple[RecordInterceptor, EncryptedStream, EncryptedStream],
) -> None:
    """A record header with too large a size raises WireError."""
    middle, _, listener = intercepted_streams
    middle.pass_on(RECORD.pack(1 << 31, 0))
    with pytest.raises(WireError, match="a record of"):
        listener.receive()


def test_slowly_arriving_record_times_out(
    intercepted_streams: tuple[RecordInterceptor, EncryptedStream, EncryptedStream],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A record whose bytes arrive slowly raises WireError after its timeout."""
    monkeypatch.setattr(sealed_stream, "RECORD_TIMEOUT_S", 0.2)
    middle, opener, listener = intercepted_streams
    opener.send(b"message")
    record, over = middle.record(), threading.Event()

    def drip() -> None:
        for byte in record:
            middle.pass_on(bytes([byte]))
            if over.wait(0.05):
                return

    dripping = threading.Thread(target=drip)
    dripping.start()
    with pytest.raises(WireError, match="no whole record in time"):
        listener.receive()
    over.set()
    dripping.join()
