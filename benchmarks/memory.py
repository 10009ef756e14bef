"""Peak memory of the processes of a fit, compared with what `sparkstrom plan` computes.

Trains a torch module or a dense network, both with Adam, on executors of this machine. Ten times a
second it measures the resident memory of each process, without shared memory, which belongs to the
media driver and is planned separately.

    python -m benchmarks.memory --params 5000000 --model torch --json
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.sessions import local_cluster

MIB = 1 << 20
SAMPLE_S = 0.1
FEATURES, CLASSES, ROWS = 64, 10, 640
LIMITS = {"log_bytes": 8 * MIB, "window_bytes": 4 * MIB}  # small, so that a short fit fills them
BATCH_MEMORY = 16 * MIB


class MemorySampler(threading.Thread):
    """A thread that records the peak of private resident memory of this process and its workers."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peaks: dict[int, int] = {}  # bytes, by pid
        self.kinds: dict[int, str] = {}  # "driver" or "worker", by pid
        self._over = threading.Event()

    def run(self) -> None:
        """Measure until ``stop`` is called."""
        while not self._over.wait(SAMPLE_S):
            for pid, kind in list_processes():
                self.peaks[pid] = max(self.peaks.get(pid, 0), private_bytes(pid))
                self.kinds[pid] = kind

    def stop(self) -> None:
        """Stop measuring."""
        self._over.set()
        self.join()

    def largest(self, kind: str) -> int:
        """Return the peak of the largest process of a kind in bytes; 0 if there was none."""
        return max((peak for pid, peak in self.peaks.items() if self.kinds[pid] == kind), default=0)


def list_processes() -> Iterator[tuple[int, str]]:
    """Yield pid and kind of this process and of Spark's Python workers below it."""
    table = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                stat = (entry / "stat").read_text()
            except OSError:  # it has just ended
                continue
            table[int(entry.name)] = int(stat[stat.rindex(")") + 2 :].split()[1]), command
    yield os.getpid(), "driver"
    daemons = {pid for pid, (_, command) in table.items() if "pyspark.daemon" in command}
    for pid in daemons:
        parent, _ = table[pid]
        if parent in daemons and os.getpid() in list_ancestors(pid, table):
            yield pid, "worker"


def list_ancestors(pid: int, table: dict[int, tuple[int, str]]) -> Iterator[int]:
    """Yield the pids of a process's parent, its parent, and so on; ``table`` has parents by pid."""
    while (pid := table.get(pid, (0, ""))[0]) > 0:
        yield pid


def private_bytes(pid: int) -> int:
    """Return a process's resident memory without shared memory; 0 if it has just ended."""
    try:
        lines = (Path("/proc") / str(pid) / "status").read_text().splitlines()
    except OSError:
        return 0
    found = {line.partition(":")[0]: line.split()[1] for line in lines if line.startswith("Rss")}
    return 1024 * (int(found.get("RssAnon", 0)) + int(found.get("RssFile", 0)))


def choose_widths(n_params: int) -> tuple[int, int]:
    """Return the widths of two hidden layers with which a network has about ``n_params``."""
    width = 16
    while FEATURES * width + width * width + (2 + CLASSES) * width < n_params:
        width += 1
    return width, width


def make_model(kind: str, n_params: int) -> Any:
    """Return a model of about ``n_params`` parameters, with Adam."""
    hidden = choose_widths(n_params)
    if kind == "dense":
        from sparkstrom.models import Adam, DenseNetwork

        return DenseNetwork([FEATURES, *hidden, CLASSES], updater=Adam(1e-3))
    import torch
    from torch import nn

    from sparkstrom.models.torch import TorchModel

    first, second = hidden
    module = nn.Sequential(
        *(nn.Linear(FEATURES, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU()),
        nn.Linear(second, CLASSES),
    )
    return TorchModel(module, nn.CrossEntropyLoss(), partial(torch.optim.Adam, lr=1e-3))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Train once; return the measured and the planned memory."""
    from sparkstrom import SharedTrainingMaster, SparkNetwork, VoidConfiguration
    from sparkstrom.planning.memory import (
        estimate_driver_parts,
        estimate_worker_parts,
        footprint_of_model,
        sum_parts,
    )

    chance = np.random.default_rng(0)
    features = chance.random((ROWS, FEATURES), np.float32)
    rows = list(zip(features, chance.integers(0, CLASSES, ROWS).tolist(), strict=True))
    model = make_model(args.model, args.params)
    void = VoidConfiguration(**LIMITS)
    folder = tempfile.TemporaryDirectory(prefix="sparkstrom-memory-")
    master = SharedTrainingMaster(
        void,
        batch_memory_bytes=BATCH_MEMORY,
        checkpoint_directory=folder.name if args.checkpoints else None,
        checkpoint_every="1 s",
        checkpoint_updaters=args.checkpoints or "one",
    )
    sampler = MemorySampler()
    sampler.start()
    with local_cluster(args.workers) as spark:
        network = SparkNetwork(spark, model, master, progress=False)
        data = spark.sparkContext.parallelize(rows, args.workers)
        summary = network.fit(data, epochs=args.epochs, run_log="")
    sampler.stop()
    folder.cleanup()
    found = {f"{kind}_bytes": sampler.largest(kind) for kind in ("driver", "worker")}
    demand = footprint_of_model(model)
    found["driver_planned_bytes"] = sum_parts(estimate_driver_parts(demand, master, args.workers))
    found["worker_planned_bytes"] = sum_parts(estimate_worker_parts(demand, master))
    return {"params": model.n_params, "minibatches": summary.minibatches} | found


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--params", type=int, default=5_000_000, help="of the model, about")
    parser.add_argument("--model", choices=("torch", "dense"), default="torch")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument(
        "--checkpoints",
        choices=("one", "all"),
        help="write a checkpoint every second, with one worker's or all workers' optimizer states",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args()
    found = measure(args)
    if args.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        text = f"{value / MIB:,.0f} MiB" if name.endswith("_bytes") else f"{value:,}"
        print(f"{name:<22} {text}")


if __name__ == "__main__":
    main()
