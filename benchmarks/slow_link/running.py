"""Run a system's processes on hosts, and sample traffic and processor time from outside."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cluster import Cluster
from benchmarks.hosts import Hosts
from benchmarks.slow_link.systems import is_ours
from benchmarks.slow_link.trial import Trial
from sparkstrom.base.units import parse_rate

EVENTS = "events"  # name of the record in the hosts' directory
SAMPLE_S = 0.25
GRACE_S = 420.0  # limit for what is not training: start-up on a slow link, and evaluations
LOG_CHARS = 3000


@dataclass(frozen=True, slots=True)
class Narrowing:
    """A change of the rate of links, of one host or of all, in the middle of a trial."""

    rate: str
    after_s: float  # of training
    host: int | None

    @classmethod
    def parse(cls, text: str) -> Narrowing:
        """Parse RATE@SECONDS or RATE@SECONDS:HOST; raise ValueError for anything else."""
        rate, _, when = text.partition("@")
        seconds, _, host = when.partition(":")
        parse_rate(rate)
        try:
            return cls(rate, float(seconds), int(host) if host else None)
        except ValueError:
            raise ValueError(
                f"--narrow {text!r}: write RATE@SECONDS or RATE@SECONDS:HOST, as 10mbit@20:2"
            ) from None


@dataclass(frozen=True, slots=True)
class Sample:
    """Counters at one time, from the creation of the hosts on."""

    at_s: float
    tx: tuple[int, ...]  # bytes that left each host
    rx: tuple[int, ...]
    cpu_s: float  # of all hosts


@dataclass(slots=True)
class Observed:
    """The events and samples of one launch of a system."""

    events: list[dict[str, Any]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    launched_s: float = 0.0
    log: str = ""  # end of the output of the program on host 0


@dataclass(frozen=True, slots=True)
class Link:
    """The links of all hosts."""

    rate: str | None  # None: no limit
    narrowing: Narrowing | None = None


def observe(link: Link, trials: Sequence[Trial], conf: Mapping[str, str]) -> Observed:
    """Run trials in one application, one after the other, on new hosts."""
    first, observed = trials[0], Observed()
    patience_s = GRACE_S + sum(trial.limit_s for trial in trials)
    with Hosts(first.workers, link.rate) as hosts, start_system(hosts, trials, conf) as program:
        path = hosts.directory / EVENTS
        observed.launched_s = time.monotonic()
        until_s = observed.launched_s + patience_s
        narrowing = link.narrowing
        while program.poll() is None and time.monotonic() < until_s:
            observed.samples.append(read_counters(hosts))
            observed.events = read_events(path)
            if narrowing is not None and is_due(narrowing, observed.events):
                narrow(hosts, narrowing)
                narrowing = None
            time.sleep(SAMPLE_S)
        observed.samples.append(read_counters(hosts))
        observed.events = read_events(path)
        said = (hosts.directory / "program0.log").read_text(errors="replace")
        observed.log = said[-LOG_CHARS:]
    return observed


@contextmanager
def start_system(
    hosts: Hosts, trials: Sequence[Trial], conf: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a system's processes; yield the one on host 0, with which all trials end."""
    path = hosts.directory / EVENTS
    path.write_text("")
    texts = [trial.text() for trial in trials]
    with ExitStack() as stack:
        if is_ours(trials[0].system):
            cluster = stack.enter_context(Cluster(hosts, trials[0].workers))
            settings = json.dumps(cluster.session_conf() | dict(conf))
            yield launch(hosts, 0, "ours", str(path), settings, *texts)
        else:
            ranks = [
                launch(hosts, rank, "peers", str(rank), hosts.address(0), "eth0", str(path), *texts)
                for rank in range(trials[0].workers)
            ]
            yield ranks[0]


def launch(hosts: Hosts, host: int, module: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a program of this package on a host."""
    with (hosts.directory / f"program{host}.log").open("wb") as log:
        return hosts.run(
            host,
            [sys.executable, "-m", f"benchmarks.slow_link.{module}", *arguments],
            env=Cluster(hosts, 0).environment(host),
            output=log,
        )


def read_counters(hosts: Hosts) -> Sample:
    """Return the counters of the hosts."""
    counters = hosts.counters()
    tx, rx = tuple(c.tx for c in counters), tuple(c.rx for c in counters)
    return Sample(time.monotonic(), tx, rx, sum(hosts.cpu_s()))


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return all events whose line is complete."""
    return [json.loads(line) for line in path.read_text().splitlines(True) if line.endswith("\n")]


def is_due(narrowing: Narrowing, events: Sequence[dict[str, Any]]) -> bool:
    """Return whether training has lasted as long as ``after_s``."""
    began = next((event["at_s"] for event in events if event["event"] == "began"), None)
    return began is not None and time.monotonic() >= began + narrowing.after_s


def narrow(hosts: Hosts, narrowing: Narrowing) -> None:
    """Change the rates of the links."""
    wanted = range(hosts.count) if narrowing.host is None else [narrowing.host]
    for host in wanted:
        hosts.set_rate(host, narrowing.rate)
