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
def taken() -> Iterator[int]:
    """A UDP port of loopback that is bound during the test."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as holder:
        holder.bind((HOST, 0))
        yield holder.getsockname()[1]


def test_a_taken_port_is_not_free(taken: int) -> None:
    assert find_free_port(HOST, taken) == 0
    assert find_free_port(HOST, 0) not in (0, taken)


def test_only_a_free_port_is_a_candidate(taken: int) -> None:
    """A taken port is not a candidate, even if it is preferred or the only one."""
    assert list(candidate_ports(HOST, range(taken, taken + 1), None)) == []
    assert taken not in candidate_ports(HOST, None, preferred=taken)


def test_the_preferred_port_comes_first_where_it_is_allowed() -> None:
    """The preferred port is the first candidate if the range allows it, and otherwise not one."""
    port = find_free_port(HOST, 0)
    assert next(candidate_ports(HOST, None, port)) == port
    assert next(candidate_ports(HOST, range(port - 3, port + 1), port)) == port
    assert port not in candidate_ports(HOST, range(port + 1, port + 5), port)


def test_an_address_that_is_not_ours_is_a_setup_error() -> None:
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
def test_the_sentence_names_what_was_tried(ports: range | None, words: str) -> None:
    """The message names the port or range that was tried."""
    assert words in no_free_port_message(HOST, ports)
