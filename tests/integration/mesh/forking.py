"""Fork node processes on request, after importing and compiling once, as Spark's daemon does.

This script reads one ``Order`` (JSON) per line, forks a process with the node and trainer of one
task, as under Spark, and prints its pid. The process writes its report or traceback to a file.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkstrom import SharedTrainingMaster, VoidConfiguration
from sparkstrom.base.identity import Endpoint
from sparkstrom.base.version import __version__
from sparkstrom.data.row_blocks import read_row_blocks
from sparkstrom.encoding.backends import warm_up
from sparkstrom.encoding.thresholds import FixedThreshold
from sparkstrom.models.base import Batch, Flat, State
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.transport.aeron.library import load_library
from sparkstrom.worker.task_environment import TaskEnvironment
from sparkstrom.worker.training_job import TrainingJob
from sparkstrom.worker.training_task import run_training_task

WORKERS, EXECUTORS = 16, 4
ROWS, BATCH_ROWS, WIDTH = 36, 2, 16  # rows per partition and per minibatch; parameters per row
K, TAU = 10, 0.125
N_PARAMS = WORKERS * ROWS * WIDTH


class Tally:
    """A model that adds tau to a row's parameters per training on it: it counts trainings."""

    def __init__(self) -> None:
        self.params: Flat = self.initial()

    @property
    def n_params(self) -> int:
        return N_PARAMS

    def initial(self) -> Flat:
        return np.zeros(N_PARAMS, np.float32)

    def bind(self, params: Flat) -> None:
        self.params = params

    def step(self, batch: Batch) -> float:
        assert isinstance(batch.labels, np.ndarray)
        for row in batch.labels.tolist():
            self.params[row * WIDTH : (row + 1) * WIDTH] += np.float32(TAU)
        return 1.0

    def predict(self, features: NDArray[Any]) -> NDArray[np.float32]:
        return np.zeros((len(features), 1), np.float32)

    def check(self, features: Any, labels: Any) -> None:
        """Accept all rows."""

    def updater_state(self) -> State:
        return {}

    def load_updater_state(self, state: State) -> None:
        """Do nothing: there is no state."""

    def layer_of(self, index: int) -> str:
        return "tally"

    def describe(self) -> dict[str, Any]:
        return {"kind": "tally"}


@dataclass(frozen=True, slots=True)
class Order:
    """A fit, as all its processes must know it, and the task of this process."""

    job: int
    key: str  # hex
    fan_out: int
    depth: int
    lease_s: float
    epochs: int
    sleep_ms: int
    scratch: str
    port: int = 0  # the master's port
    join_stream: int = 0
    partition: int = 0
    attempt: int = 0

    @property
    def executor(self) -> str:
        """The executor of the task; each has four successive partitions."""
        return f"e{self.partition * EXECUTORS // WORKERS}"

    def training(self) -> TrainingJob:
        """Return the training job, which is equal in all processes."""
        return TrainingJob(
            spec=FitSpec(WORKERS, self.epochs, N_PARAMS, __version__, self.job),
            key=bytes.fromhex(self.key),
            model=Tally(),
            master=SharedTrainingMaster(
                VoidConfiguration(
                    mesh_build_mode="mesh",
                    mesh_fan_out=self.fan_out,
                    mesh_depth=self.depth,
                    lease_s=self.lease_s,
                ),
                batch_size_per_worker=BATCH_ROWS,
                threshold=FixedThreshold(TAU),
                residual_post_processor=None,
                debug_longer_iterations=self.sleep_ms,
            ),
            k=K,
            layers=None,
            endpoint=Endpoint("127.0.0.1", self.port),
            join_stream=self.join_stream,
            network="mesh",
        )

    def train(self) -> str:
        """Run the task; return its report."""
        first = self.partition * ROWS
        rows = [(np.zeros(1, np.float32), first + i) for i in range(ROWS)]
        place = TaskEnvironment(
            self.partition, self.attempt, "here", self.executor, Path(self.scratch)
        )
        return run_training_task(self.training(), place, read_row_blocks(self.partition, rows))


def run_task(order: Order) -> None:
    """Run the task, and write its report, or else a traceback, to a file named by the pid."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # the task waits for its media driver's process
    report = Path(order.scratch) / f"{os.getpid()}.report"
    log = os.open(report.with_suffix(".log"), os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        text = order.train()
    except BaseException:
        text = traceback.format_exc()
    report.with_suffix(".draft").write_text(text)
    report.with_suffix(".draft").rename(report)


def main() -> None:
    """Fork a task for each line of the input."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended tasks leave no zombies
    warm_up()
    load_library()
    print("ready", flush=True)
    for line in iter(sys.stdin.readline, ""):
        order = Order(**json.loads(line))
        pid = os.fork()
        if pid == 0:
            run_task(order)
            os._exit(0)
        print(pid, flush=True)


if __name__ == "__main__":
    main()
