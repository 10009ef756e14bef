"""Simulated hosts on one machine: network namespaces on a switch, each behind a link with a rate.

A host has its own namespaces for network, mounts (its own /dev/shm and /etc/hosts) and host name,
and one interface, ``eth0``. This is one end of a virtual cable (veth); the other end is a port of a
bridge in one more namespace, the switch. A token bucket (``tbf``) at each end limits one direction
of the link; the switch itself is not limited. Addresses are in 10.77.0.0/24. Nothing is routed to
or from the machine's own network, whose interfaces are not touched.

The parameters of a bucket: ``burst`` is what the kernel may send between two ticks of its timer. It
is at least rate / 250 (HZ is 250 on most kernels), or the rate would not be reached, and at least
32 KiB, because a full segment of TCP is sent at once. ``latency`` limits the queue before the
bucket, like the buffer of a port: 256 KiB, but at least 50 ms, which TCP needs to fill a link, and
at most 400 ms, as in the modem of a slow uplink. Packets that do not fit are dropped.

This needs root, ``ip`` and ``tc`` (iproute2), ``unshare`` and ``nsenter`` (util-linux). Everything
is removed when the context ends, and also when its process is killed: see ``benchmarks.host``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from benchmarks.host import find_pids
from sparkstrom.base.units import parse_rate

NETWORK = "10.77.0"
HOSTS_MAX = 200  # addresses of the network
TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
TIMER_HZ = 250
BURST_BYTES_MIN = 32 << 10
QUEUE_BYTES = 256 << 10
LATENCY_S_MIN, LATENCY_S_MAX = 0.05, 0.4
END_S = 20.0  # limit for a host's cleanup
NICE = "5"  # of all processes on all hosts, so that other users of the machine have priority


@dataclass(frozen=True, slots=True)
class Counters:
    """Bytes that a host has sent and received, with Ethernet, IP and UDP headers."""

    tx: int
    rx: int


def bucket(bits: int) -> list[str]:
    """Return tc's arguments for a link of ``bits`` per second."""
    bytes_s = bits / 8
    burst = max(BURST_BYTES_MIN, int(bytes_s / TIMER_HZ))
    latency_s = min(LATENCY_S_MAX, max(LATENCY_S_MIN, QUEUE_BYTES / bytes_s))
    return f"tbf rate {bits}bit burst {burst}b latency {latency_s * 1000:.0f}ms".split()


def lacking() -> str | None:
    """Return a message about what this process lacks to create hosts, or None."""
    if os.geteuid() != 0:
        return "hosts are network namespaces, which need root: run it as root, or with sudo"
    missing = [f"{tool} (package {of})" for tool, of in TOOLS.items() if not shutil.which(tool)]
    if missing:
        return f"hosts need {', '.join(missing)}: install them"
    trial = f"ip link set lo up && tc qdisc add dev lo root {' '.join(bucket(10**6))}"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "sh", "-c", trial], capture_output=True, text=True
    )
    if tried.returncode:
        return (
            "hosts need the capabilities NET_ADMIN and SYS_ADMIN, and a kernel with sch_tbf and "
            f"veth; `{trial}` in new namespaces said: {tried.stderr.strip()}"
        )
    return None


class Hosts:
    """A context manager that creates ``count`` hosts with links.

    ``rate`` is the rate of all links, as tc writes it; None: no limit. Raises OSError with the
    reason if hosts cannot be created.
    """

    def __init__(self, count: int, rate: str | None = None) -> None:
        if not 1 <= count <= HOSTS_MAX:
            raise ValueError(f"{count} hosts: must be between 1 and {HOSTS_MAX}")
        self.count, self._rate = count, rate
        self.directory = Path()  # of all hosts, which share the disk; removed at the end
        self._holders: list[subprocess.Popen[str]] = []  # by host; the last one is the switch
        self._namespaces: list[int] = []  # inodes
        self._programs: list[subprocess.Popen[bytes]] = []
        self._cpu_s: list[dict[int, float]] = [{} for _ in range(count)]

    def __enter__(self) -> Hosts:
        if (reason := lacking()) is not None:
            raise OSError(reason)
        self.directory = Path(tempfile.mkdtemp(prefix="sparkstrom-hosts-"))
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _build(self) -> None:
        table = self.directory / "etc-hosts"
        names = [f"{self.address(host)} {self.name(host)}" for host in range(self.count)]
        table.write_text("\n".join(["127.0.0.1 localhost", *names]) + "\n")
        for name in (*map(self.name, range(self.count)), "switch"):
            self._hold(name, table)
        self._run_inside(self.count, "ip link add bridge type bridge")
        self._run_inside(self.count, "ip link set bridge up")
        for host in range(self.count):
            inside = f"peer name eth0 netns {self._holders[host].pid}"
            self._run_inside(self.count, f"ip link add port{host} type veth {inside}")
            self._run_inside(self.count, f"ip link set port{host} master bridge up")
            self._run_inside(host, "ip link set eth0 up")
            self._give_address(host)
            if self._rate is not None:
                self.set_rate(host, self._rate)

    def _give_address(self, host: int) -> None:
        self._run_inside(host, f"ip address add {self.address(host)}/24 dev eth0")

    def _hold(self, name: str, table: Path) -> None:
        inside = [sys.executable, "-I", str(Path(__file__).with_name("host.py"))]
        holder = subprocess.Popen(
            ["unshare", "--net", "--mount", "--uts", *inside, name, str(table)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C ends the benchmark, and that ends the hosts
        )
        self._holders.append(holder)
        assert holder.stdout is not None
        if holder.stdout.readline().strip() != "ready":
            raise OSError(f"the namespaces of {name} could not be made: see the error above")
        self._namespaces.append(os.stat(f"/proc/{holder.pid}/ns/net").st_ino)

    def _run_inside(self, host: int, command: str) -> None:
        done = subprocess.run(
            [*self._make_prefix(host), *command.split()], capture_output=True, text=True
        )
        if done.returncode:
            raise OSError(f"`{command}` on host {host} failed: {done.stderr.strip()}")

    def _make_prefix(self, host: int) -> list[str]:
        flags = ["--net", "--uts", "--mount", f"--wd={Path.cwd()}"]
        return ["nsenter", "-t", str(self._holders[host].pid), *flags, "--"]

    # -- of running hosts ------------------------------------------------------------------------

    @staticmethod
    def name(host: int) -> str:
        """Return a host's name, which all hosts can resolve."""
        return f"host{host}"

    @staticmethod
    def address(host: int) -> str:
        """Return the address of a host's interface."""
        return f"{NETWORK}.{host + 1}"

    def set_rate(self, host: int, rate: str | None) -> None:
        """Change the rate of a host's link in both directions; None: no limit."""
        ends = ((host, "eth0"), (self.count, f"port{host}"))
        for namespace, device in ends:
            wanted = " ".join(bucket(parse_rate(rate))) if rate is not None else "pfifo"
            self._run_inside(namespace, f"tc qdisc replace dev {device} root {wanted}")

    def run(
        self,
        host: int,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        output: IO[Any] | int | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a command on a host, with ``env`` added to this process's environment.

        ``output`` receives its standard output and error. It is killed when the hosts end.
        """
        program = subprocess.Popen(
            [*self._make_prefix(host), "nice", "-n", NICE, *command],
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT if output is not None else None,
            start_new_session=True,
        )
        self._programs.append(program)
        # Before the process has entered the namespace, a host that ends would not kill it.
        while program.pid not in find_pids(self._namespaces[host]) and program.poll() is None:
            time.sleep(0.002)
        return program

    def counters(self) -> list[Counters]:
        """Return the bytes of each host; a switch port receives what its host's bucket let pass."""
        table = Path(f"/proc/{self._holders[-1].pid}/net/dev").read_text()
        fields = {
            name.strip(): list(map(int, rest.split()))
            for name, _, rest in (line.partition(":") for line in table.splitlines()[2:])
        }
        ports = [fields[f"port{host}"] for host in range(self.count)]
        return [Counters(tx=port[0], rx=port[8]) for port in ports]

    def cpu_s(self) -> list[float]:
        """Return the processor time of each host's processes so far, in seconds.

        A process that has ended counts with its time at the last call before its end.
        """
        tick_s = 1 / os.sysconf("SC_CLK_TCK")
        for host, used in enumerate(self._cpu_s):
            for pid in find_pids(self._namespaces[host]):
                try:
                    stat = Path(f"/proc/{pid}/stat").read_text()
                except OSError:  # it has just ended
                    continue
                user, system = stat[stat.rindex(")") + 2 :].split()[11:13]
                used[pid] = (int(user) + int(system)) * tick_s
        return [sum(used.values()) for used in self._cpu_s]

    def close(self) -> None:
        """End all processes on the hosts, and remove the hosts."""
        for holder in self._holders:
            assert holder.stdin is not None
            holder.stdin.close()
        for holder in self._holders:
            holder.wait(END_S)
            assert holder.stdout is not None
            holder.stdout.close()
        for program in self._programs:
            program.kill()  # needed only if it had not entered its host yet
            program.wait(END_S)
        self._holders.clear()
        self._programs.clear()
        shutil.rmtree(self.directory, ignore_errors=True)
