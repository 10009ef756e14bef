"""Tests, over real sockets, of the UDP probe from executors to the driver program."""

from __future__ import annotations

import socket
import threading
from contextlib import closing

import pytest

from sparkstrom.base.errors import SetupError
from sparkstrom.base.identity import Endpoint
from sparkstrom.options.network import VoidConfiguration
from sparkstrom.spark.controller import reachability as udp_reach
from sparkstrom.spark.controller.reachability import (
    ReachabilityProbe,
    UdpEchoServer,
    probe_controller,
)

HERE = "127.0.0.1"


@pytest.fixture(autouse=True)
def short_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the probe's timeout, and unset the environment's address."""
    monkeypatch.setattr(udp_reach, "PROBE_TIMEOUT_S", 0.3)
    monkeypatch.delenv("SPARKSTROM_LOCAL_IP", raising=False)


def heard(endpoint: Endpoint, token: bytes) -> bool:
    """Return whether a probe from this process with this token is answered."""
    (answer,) = probe_controller(ReachabilityProbe(endpoint, token, VoidConfiguration()), [])
    assert answer.host == socket.gethostname()
    return answer.heard


def test_probe_is_answered_only_by_open_server_with_token() -> None:
    """A probe is answered only by an open server, and only with the right token."""
    with closing(UdpEchoServer(HERE, None)) as port:
        assert heard(port.endpoint, port.token)
        assert not heard(port.endpoint, b"another's token.")
    assert not heard(port.endpoint, port.token)  # the server is closed


@pytest.mark.parametrize("is_other", [True, False])
def test_answer_from_another_port_does_not_count(is_other: bool) -> None:
    """An answer from another port, such as that of a middlebox, does not count."""
    kind = socket.AF_INET, socket.SOCK_DGRAM
    with socket.socket(*kind) as asked, socket.socket(*kind) as other:
        asked.bind((HERE, 0))
        endpoint, token = Endpoint(HERE, asked.getsockname()[1]), bytes(16)

        def answer() -> None:
            datagram, sender = asked.recvfrom(64)
            (other if is_other else asked).sendto(datagram, sender)

        thread = threading.Thread(target=answer)
        thread.start()
        assert heard(endpoint, token) is not is_other
        thread.join()


def test_server_without_free_port_raises_error_naming_port() -> None:
    """The server raises SetupError with the port if its range has no free port."""
    with closing(UdpEchoServer(HERE, None)) as port:
        taken = port.endpoint.port
        with pytest.raises(SetupError, match=str(taken)):
            UdpEchoServer(HERE, range(taken, taken + 1))
