"""Ports: free ports, candidates in order of preference, and error messages."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from sparkstrom.base.errors import SetupError
from sparkstrom.transport.aeron.driver_process import (
    candidate_ports,
    find_free_port,
    no_free_port_message,
)

HOST = "127.0.0.1"


@pytest.fixture
def bound_port() -> Iterator[int]:
    """A UDP port of loopback that is bound during the test."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as holder:
        holder.bind((HOST, 0))
        yield holder.getsockname()[1]


def test_bound_port_is_not_free(bound_port: int) -> None:
    assert find_free_port(HOST, bound_port) == 0
    assert find_free_port(HOST, 0) not in (0, bound_port)


def test_bound_port_is_no_candidate(bound_port: int) -> None:
    """A taken port is not a candidate, even if it is preferred or the only one."""
    assert list(candidate_ports(HOST, range(bound_port, bound_port + 1), None)) == []
    assert bound_port not in candidate_ports(HOST, None, preferred=bound_port)


def test_preferred_port_is_first_candidate_if_in_range() -> None:
    """The preferred port is the first candidate if the range allows it, and otherwise not one."""
    port = find_free_port(HOST, 0)
    assert next(candidate_ports(HOST, None, port)) == port
    assert next(candidate_ports(HOST, range(port - 3, port + 1), port)) == port
    assert port not in candidate_ports(HOST, range(port + 1, port + 5), port)


def test_port_of_foreign_address_raises_setup_error() -> None:
    """An address of another machine is a SetupError."""
    with pytest.raises(SetupError, match=r"UDP port 4000 of 203\.0\.113\.9 cannot be bound"):
        find_free_port("203.0.113.9", 4000)


@pytest.mark.parametrize(
    ("ports", "words"),
    [
        (None, "no free UDP port"),
        (range(5, 6), "UDP port 5 of"),
        (range(5, 9), "every UDP port from 5 to 8 of"),
    ],
)
def test_no_free_port_message_names_tried_ports(ports: range | None, words: str) -> None:
    """The message names the port or range that was tried."""
    assert words in no_free_port_message(HOST, ports)
