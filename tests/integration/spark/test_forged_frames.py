"""Tests of strangers without the key: garbage and forged frames, and no key in the logs."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from sparkstrom import VoidConfiguration
from sparkstrom.base.identity import Endpoint
from sparkstrom.codec.messages import Heartbeat, LeaveNotice
from sparkstrom.codec.sealed_frames import KEY_BYTES, Header, Seal
from sparkstrom.codec.wire import encode
from sparkstrom.protocol.master.announcements import FIRST_STREAM, STREAMS_PER_EDGE
from sparkstrom.transport.aeron.client import AeronTransport
from sparkstrom.transport.aeron.media_driver import ensure_driver
from tests.key_forms import forms_of

# Control and data streams of the first edges that a master opens.
UP_STREAMS = [
    FIRST_STREAM + STREAMS_PER_EDGE * edge + data for edge in range(1, 5) for data in range(2)
]


@pytest.fixture
def free_ports() -> range:
    """Eight neighbouring UDP ports that are free now."""
    while True:
        with ExitStack() as stack:

            def bind(port: int) -> int:
                probe = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
                probe.bind(("127.0.0.1", port))
                return probe.getsockname()[1]

            first = bind(0)
            with suppress(OSError, OverflowError):  # a port is in use, or above 65535
                for port in range(first + 1, first + 8):
                    bind(port)
                return range(first, first + 8)


@contextmanager
def call_repeatedly(*acts: Callable[[], None]) -> Iterator[None]:
    """Call ``acts`` repeatedly in another thread while the block runs."""
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(0.002):
            for act in acts:
                act()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_garbage_and_forged_frames_do_not_affect_fit(spark, digits, make_network, free_ports):
    """A fit rejects forged frames and is otherwise unaffected by them and by garbage."""
    port = free_ports[0]
    void = VoidConfiguration(unicast_port=port, port_range=(free_ports[1], free_ports[-1]))
    garbage = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    stranger = AeronTransport(ensure_driver(f"stranger-{secrets.token_hex(4)}"))
    try:
        there = Endpoint("127.0.0.1", port)
        senders = [stranger.open_sender(there, stream, control=True) for stream in UP_STREAMS]
        forged = [forged_frame(i) for i in range(8)]

        def throw_garbage() -> None:
            for target in free_ports:
                garbage.sendto(os.urandom(200), ("127.0.0.1", target))

        def forge() -> None:
            stranger.poll(0.0)
            for sender in senders:
                sender.offer(forged)

        network = make_network(void=void, debug_longer_iterations=5)
        data = spark.sparkContext.parallelize(digits.rows(), 4)
        with call_repeatedly(throw_garbage, forge):
            summary = network.fit(data, epochs=12)
        network.close()
    finally:
        garbage.close()
        stranger.close()
    assert summary.replicas_equal
    assert summary.minibatches == summary.minibatches_expected
    assert summary.departures == []
    assert summary.rejected_frames > 0


def forged_frame(i: int) -> bytes:
    """Return a well-formed frame, sealed with another key: a LeaveNotice or a wrong Heartbeat."""
    seal = Seal(secrets.token_bytes(KEY_BYTES), secrets.randbits(63))
    message = (
        LeaveNotice(node=1, reason="done", checkpoint=None)
        if i % 2
        else Heartbeat(received=10**6, bytes_received=0, catching=False, stamp=10**6, statuses=[])
    )
    kind, body = encode(message)
    return seal.close(Header(kind, 1 + i // 2, 0, 1, 10**6 + i, 0, 1), body)


def test_logs_do_not_contain_key(spark, digits, make_network, monkeypatch, caplog):
    """Logs do not contain the key even at level DEBUG, where py4j logs what it sends to Spark."""
    keys = []
    real = secrets.token_bytes

    def drawn(count: int) -> bytes:
        keys.append(real(count))
        return keys[-1]

    monkeypatch.setattr(secrets, "token_bytes", drawn)
    network = make_network()
    with caplog.at_level(logging.DEBUG), caplog.at_level(logging.DEBUG, "py4j"):
        network.fit(spark.sparkContext.parallelize(digits.rows()[:64], 2), epochs=1)
    network.close()
    logged = "\n".join(caplog.messages)
    assert "SimplePythonFunction" in logged
    long = [key for key in keys if len(key) == KEY_BYTES]
    assert long
    for key in long:
        assert [form for form in forms_of(key) if form in logged] == []
