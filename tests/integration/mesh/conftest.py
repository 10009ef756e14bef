"""A mesh of processes over media drivers: four executors with four tasks each."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from sparkstrom.base.clock import SystemClock
from sparkstrom.base.identity import MASTER
from sparkstrom.encoding.backends import warm_up
from sparkstrom.fit.master_setup import make_master_limits
from sparkstrom.protocol.common.events_and_effects import TaskEnding
from sparkstrom.protocol.master.master import Master
from sparkstrom.runtime.master_control import FitOutcome
from sparkstrom.runtime.master_thread import MasterPlan, MasterThread
from sparkstrom.runtime.theta import Theta
from sparkstrom.transport.aeron.driver_directories import (
    ProcessIdentity,
    identify_process,
    is_process_alive,
)
from sparkstrom.transport.aeron.media_driver import DriverOptions, MediaDriverHandle, ensure_driver
from sparkstrom.worker.network_setup import transport_opener

SCRIPT = Path(__file__).with_name("forking.py")
LEASE_S = 4.0  # longer than any process waits for a processor on a busy machine


def _load() -> Any:
    """Import the script as a module, because test folders are not packages."""
    spec = importlib.util.spec_from_file_location("mesh_forking", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


forking = _load()


def wait_until(condition: Callable[[], Any], seconds: float, what: str) -> None:
    """Poll until ``condition`` is true; fail after ``seconds``."""
    until_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until_s, f"{what} did not happen within {seconds} s"
        time.sleep(0.02)


class Forker:
    """The process that forks task processes."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"},
        )
        assert self._answer() == "ready"

    def fork(self, order: Any) -> int:
        """Start a task process; return its pid."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(order)) + "\n")
        self._process.stdin.flush()
        return int(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        self._process.communicate(timeout=30)


@pytest.fixture
def until() -> Callable[..., None]:
    """The function ``wait_until``."""
    return wait_until


@pytest.fixture(scope="session")
def forker() -> Iterator[Forker]:
    forker = Forker()
    yield forker
    forker.close()


class RealMesh:
    """A master in this process, and 16 task processes; a share ``loss`` of datagrams is lost."""

    def __init__(
        self, forker: Forker, scratch: Path, *, fan_out: int, depth: int, loss: float, **given: Any
    ) -> None:
        self._forker, self._scratch, self._loss = forker, scratch, loss
        self.order = forking.Order(
            job=secrets.randbits(63),
            key=secrets.token_hex(32),
            fan_out=fan_out,
            depth=depth,
            lease_s=LEASE_S,
            scratch=str(scratch),
            **{"epochs": 2, "sleep_ms": 100, **given},
        )
        self.theta = Theta(forking.N_PARAMS, forking.K)
        self.processes: dict[int, ProcessIdentity] = {}  # partition -> its newest process
        self.ended: Counter[str] = Counter()  # ways in which each partition's last process ended
        self._all: list[ProcessIdentity] = []
        self._handles: list[MediaDriverHandle] = []
        self._lead()
        for partition in range(forking.WORKERS):
            self.start(partition, partition)

    def _lead(self) -> None:
        """Start the media drivers and the master."""
        warm_up()
        executors = {replace(self.order, partition=p).executor for p in range(forking.WORKERS)}
        with ThreadPoolExecutor() as pool:
            self._handles = list(pool.map(self._driver, ["driver", *sorted(executors)]))
        job = self.order.training()
        plan = MasterPlan(
            job.spec,
            message_bytes_max=job.message_bytes_max,
            chunk_bytes_max=job.master.void.max_chunk_size,
            kept={},
        )
        self.master = MasterThread(
            plan,
            make_master_limits(job.master, forking.WORKERS, forking.N_PARAMS),
            self.theta,
            open_transport=transport_opener(
                self._key("driver"),
                DriverOptions(edges=self.order.fan_out, scratch=self._scratch),
            ),
            seal=job.seal(),
            clock=SystemClock(),
        )
        self.master.start()

    def _key(self, name: str) -> str:
        return f"{self.order.job:016x}-{name}"

    def _driver(self, name: str) -> MediaDriverHandle:
        seed = self.order.job % 1000 + len(name)
        rule = f"rate={self._loss}|seed={seed}|recv-msg-mask=0xF" if self._loss else ""
        return ensure_driver(
            self._key(name),
            DriverOptions(
                edges=16,
                local_edges=8,
                scratch=self._scratch,
                watch=identify_process(os.getpid()),
                linger_s=0.5,
                datagram_loss=rule,
            ),
            60,
        )

    # -- processes -------------------------------------------------------------------------------

    def start(self, partition: int, attempt: int) -> None:
        """Start a task process for this partition, as Spark would."""
        endpoint, join_stream = self.master.endpoint, self.master.join_stream
        order = replace(
            self.order,
            port=endpoint.port,
            join_stream=join_stream,
            partition=partition,
            attempt=attempt,
        )
        self.processes[partition] = identify_process(self._forker.fork(order))
        self._all.append(self.processes[partition])

    def signal(self, partition: int, number: int) -> None:
        """Send a signal to the newest process of a partition, which must be alive."""
        process = self.processes[partition]
        assert is_process_alive(process), self.report(process.pid)
        os.kill(process.pid, number)

    def report(self, pid: int) -> str:
        """Return the report and the log of a process, as far as it has written them."""
        files = [self._scratch / f"{pid}.{kind}" for kind in ("report", "log")]
        return "\n".join(file.read_text() for file in files if file.exists())

    # -- the fit ---------------------------------------------------------------------------------

    @property
    def machine(self) -> Master:
        """The master's state machine."""
        return self.master._machine

    def partition(self, node: int) -> int:
        """Return the partition of a live node."""
        return self.machine.members.live[node].join.partition

    def inner(self) -> list[int]:
        """Return the live nodes that have children, from the top of the tree."""
        tree = self.machine.placement.tree
        nodes = [node for node in tree.descendants(MASTER) if any(tree.children(node))]
        return [node for node in nodes if node in self.machine.members.live]

    def under_way(self, minibatches: int) -> None:
        """Wait until all workers have joined and this many minibatches are trained."""

        def far_enough() -> bool:
            look = self.master.progress
            assert self.master.failure is None, self.master.failure
            return look.workers == forking.WORKERS and look.minibatches >= minibatches

        wait_until(far_enough, 120, "training so far")

    def finish(self, seconds: float = 180.0) -> FitOutcome:
        """Wait until the fit is done and all processes have ended; return the outcome."""
        assert self.master.finished.wait(seconds), self.master.progress
        if self.master.failure is not None:
            raise self.master.failure
        for process in self.processes.values():
            wait_until(
                lambda process=process: not is_process_alive(process), 30, "the end of a task"
            )
            # DISMISSED: it returned after its eviction, but its partition was trained already.
            ways = f"done|released|{TaskEnding.DISMISSED.value}"
            ended = re.search(f'"ended": "({ways})"', self.report(process.pid))
            assert ended, self.report(process.pid)
            self.ended[ended[1]] += 1
        return self.master.outcome()

    def close(self) -> None:
        """Kill the remaining processes and end the master."""
        for process in filter(is_process_alive, self._all):
            os.kill(process.pid, signal.SIGKILL)
        self.master.end()
        for handle in self._handles:
            handle.close()

    def left_behind(self) -> list[str]:
        """Return the remaining directories of media drivers."""
        roots = {root for handle in self._handles for root in handle.home.roots}
        return [str(p) for root in roots for p in root.glob(f"*{self.order.job:016x}*")]


@pytest.fixture
def real_mesh(forker: Forker, tmp_path: Path) -> Iterator[Callable[..., RealMesh]]:
    """A factory of meshes; processes and media drivers must be gone after the test."""
    made: list[RealMesh] = []

    def make(**options: Any) -> RealMesh:
        made.append(RealMesh(forker, tmp_path, **options))
        return made[-1]

    yield make
    for mesh in made:
        mesh.close()
        wait_until(lambda mesh=mesh: not mesh.left_behind(), 30, "the end of the media drivers")
