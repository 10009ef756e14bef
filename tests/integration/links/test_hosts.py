"""Tests of hosts behind slow links: their rates, their counters, and that nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.hosts import Hosts, lacking
from sparkstrom.base.units import parse_rate
from tests.integration.running import is_running

pytestmark = pytest.mark.skipif((reason := lacking()) is not None, reason=reason or "")

SINK = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 5000))
print("ready", flush=True)
connection, _ = server.accept()
began, received = time.monotonic(), 0
while piece := connection.recv(1 << 16):
    received += len(piece)
print(received / (time.monotonic() - began), flush=True)
"""
SOURCE = """
import socket, sys
socket.create_connection((sys.argv[1], 5000)).sendall(bytes(int(sys.argv[2])))
"""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(3, "20mbit") as made:
        yield made


def measure_rate(hosts: Hosts, sender: int, receiver: int, size: int) -> float:
    """Return the bytes per second of a TCP connection from one host to the other."""
    address = hosts.address(receiver)
    command = [sys.executable, "-c", SINK, address]
    sink = hosts.run(receiver, command, output=subprocess.PIPE)
    assert sink.stdout is not None
    with sink.stdout as said:
        assert said.readline() == b"ready\n"
        source = hosts.run(sender, [sys.executable, "-c", SOURCE, address, str(size)])
        assert source.wait(60) == 0
        assert sink.wait(60) == 0
        return float(said.readline())


def test_link_limits_rate_and_counts_bytes(hosts: Hosts) -> None:
    size = 2_000_000
    before = hosts.counters()
    bytes_s = measure_rate(hosts, 0, 2, size)
    after = hosts.counters()
    assert 0.5 * 20e6 / 8 < bytes_s < 1.05 * 20e6 / 8
    sent = [b.tx - a.tx for a, b in zip(before, after, strict=True)]
    received = [b.rx - a.rx for a, b in zip(before, after, strict=True)]
    assert size < sent[0] < 1.1 * size
    assert sent[0] == pytest.approx(received[2], abs=2000)
    assert sent[1] < 2000  # the third host's link is not used


def test_set_rate_limits_both_directions(hosts: Hosts) -> None:
    hosts.set_rate(1, "2mbit")
    for sender, receiver in ((0, 1), (1, 0)):
        assert measure_rate(hosts, sender, receiver, 400_000) < 1.3 * parse_rate("2mbit") / 8
    assert measure_rate(hosts, 0, 2, 2_000_000) > 2 * parse_rate("2mbit") / 8
    hosts.set_rate(1, None)
    assert measure_rate(hosts, 1, 0, 2_000_000) > 2 * parse_rate("2mbit") / 8


def test_cpu_s_counts_processor_time_of_each_host(hosts: Hosts) -> None:
    """cpu_s() returns the processor seconds of each host, with those of ended processes."""
    before = hosts.cpu_s()
    busy = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ntime.sleep(60)"
    program = hosts.run(1, [sys.executable, "-c", busy], output=subprocess.PIPE)
    assert program.stdout is not None
    with program.stdout as said:
        said.readline()
    after = hosts.cpu_s()
    assert 0.45 < after[1] - before[1] < 2.0  # the kernel rounds to ticks
    assert after[0] == pytest.approx(before[0], abs=0.1)
    program.kill()
    program.wait()
    assert hosts.cpu_s()[1] >= after[1]  # ended processes count, too


def test_host_has_name_and_resolves_other_hosts(hosts: Hosts) -> None:
    look = "import socket; print(socket.gethostname(), socket.gethostbyname('host2'))"
    program = hosts.run(0, [sys.executable, "-c", look], output=subprocess.PIPE)
    assert program.communicate()[0].decode().split() == ["host0", "10.77.0.3"]


def test_invalid_rate_raises_and_exit_status_is_returned(hosts: Hosts) -> None:
    """An invalid rate raises ValueError, and a program's exit status is returned."""
    with pytest.raises(ValueError, match="'fast'"):
        hosts.set_rate(0, "fast")
    assert hosts.run(0, ["false"]).wait() == 1


def test_closing_hosts_kills_programs_and_removes_directory() -> None:
    """At the end of Hosts, their programs are killed and their directory is removed."""
    with Hosts(2) as hosts:
        program = hosts.run(1, ["sleep", "600"])
        directory = hosts.directory
        assert directory.is_dir()
    assert program.wait(10) == -signal.SIGKILL
    assert not directory.exists()


def test_hosts_disappear_with_their_killed_process() -> None:
    """Hosts disappear if their process is killed, because the kernel closes its pipes."""
    build = (
        "import time\nfrom benchmarks.hosts import Hosts\n"
        "with Hosts(2) as hosts:\n"
        "    sleeper = hosts.run(1, ['sleep', '600'])\n"
        "    print(sleeper.pid, hosts.directory, flush=True)\n"
        "    time.sleep(600)\n"
    )
    root = str(Path(__file__).parents[3])
    env = {**os.environ, "PYTHONPATH": root}
    process = subprocess.Popen([sys.executable, "-c", build], stdout=subprocess.PIPE, env=env)
    assert process.stdout is not None
    with process.stdout as said:
        pid, directory = said.readline().split()
    assert is_running(int(pid))
    process.kill()
    process.wait()
    until_s = time.monotonic() + 60
    while (
        is_running(int(pid)) or Path(directory.decode()).exists()
    ) and time.monotonic() < until_s:
        time.sleep(0.05)
    assert not is_running(int(pid))
    assert not Path(directory.decode()).exists()
