"""Tests of waiting for data on descriptors and sockets with high numbers."""

from __future__ import annotations

import fcntl
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from sparkstrom.base.descriptors import wait_until_readable
from sparkstrom.options.network import VoidConfiguration
from sparkstrom.spark.controller import reachability
from sparkstrom.spark.controller.reachability import ReachabilityProbe, UdpEchoServer
from sparkstrom.transport.aeron.media_driver import TIMEOUT_MESSAGE, _read_status

HIGH = 1024  # the first number that select.select refuses


@pytest.fixture(autouse=True)
def raise_file_limit() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(limits[1], 2 * HIGH), limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def move_up(descriptor: int) -> int:
    """Duplicate a descriptor to a high number, and close the original."""
    high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, HIGH)
    os.close(descriptor)
    return high


def test_wait_until_readable_works_with_high_descriptors() -> None:
    """``wait_until_readable`` works with a descriptor above select's limit."""
    read_end, write_end = os.pipe()
    read_end = move_up(read_end)
    assert not wait_until_readable(read_end, -1.0)  # poll would wait for ever
    os.write(write_end, b"ready")
    assert wait_until_readable(read_end, 60.0)
    assert _read_status(read_end, 0.0) == TIMEOUT_MESSAGE
    os.close(write_end)
    assert wait_until_readable(read_end, 60.0)
    os.close(read_end)


def test_udp_echo_works_with_high_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before, the echo's thread died, and controller="auto" chose an executor instead."""

    def bind_high(address: str, port: int) -> socket.socket:
        with closing(bind(address, port)) as low:
            return socket.socket(fileno=move_up(low.detach()))

    bind = reachability._bind_udp_socket
    monkeypatch.setattr(reachability, "_bind_udp_socket", bind_high)
    with closing(UdpEchoServer("127.0.0.1", None)) as server:
        probe = ReachabilityProbe(server.endpoint, server.token, VoidConfiguration(), 60.0)
        with bind_high("127.0.0.1", 0) as sock:
            assert reachability._receives_echo(sock, probe)
