"""Seconds and memory of an averaging fit of many parameters on executors of this machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.memory import MIB, MemorySampler
from benchmarks.sessions import local_cluster
from sparkstrom import ParameterAveragingTrainingMaster, SparkNetwork
from sparkstrom.models import DenseNetwork, Sgd

INPUTS, OUTPUTS = 64, 10
ROUNDS, BATCH = 3, 8


class RoundListener:
    """A listener that records when each round ended."""

    def __init__(self) -> None:
        self.at_s = [time.monotonic()]

    def on_iteration(self, event: Any) -> None:
        """Record the time; rounds are long enough that each has an event of its own."""
        self.at_s.append(time.monotonic())


def widths_for(params: int) -> list[int]:
    """Return the widths of a network of about ``params`` parameters, with two hidden layers."""
    width = round((-(INPUTS + OUTPUTS) + ((INPUTS + OUTPUTS) ** 2 + 4 * params) ** 0.5) / 2)
    return [INPUTS, width, width, OUTPUTS]


def run_large_fit(params: int, workers: int) -> dict[str, Any]:
    """Run one fit, and return its figures."""
    chance = np.random.default_rng(0)
    features = chance.normal(size=(workers * BATCH * ROUNDS, INPUTS)).astype(np.float32)
    rows = [(x, int(i % OUTPUTS)) for i, x in enumerate(features)]
    model = DenseNetwork(widths_for(params), updater=Sgd(1e-3))
    master = ParameterAveragingTrainingMaster(averaging_frequency=1, batch_size_per_worker=BATCH)
    listener, sampler = RoundListener(), MemorySampler()
    with local_cluster(workers) as session:
        data = session.sparkContext.parallelize(rows, workers)
        network = SparkNetwork(session, model, master, progress=False)
        sampler.start()
        began_s = time.monotonic()
        summary = network.fit(data, listeners=[listener])
        seconds, java = time.monotonic() - began_s, read_java_peaks()
        sampler.stop()
    times = np.diff(listener.at_s)
    return {
        "params": model.n_params,
        "workers": workers,
        "rounds": summary.updates,
        "seconds": round(seconds, 1),
        "seconds_of_rounds": [round(float(each), 1) for each in times],
        "bytes_sent": summary.bytes_sent,
        "minibatches": summary.minibatches,
        "loss": summary.loss,
        "peak_mib": {
            "driver_python": sampler.largest("driver") // MIB,
            "worker_python": sampler.largest("worker") // MIB,
            **java,
        },
    }


def read_java_peaks() -> dict[str, int]:
    """Return the peaks of resident memory (VmHWM) of Spark's JVMs on this machine, in MiB."""
    peaks: dict[str, int] = {}
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            status = (entry / "status").read_text() if "java" in command else ""
        except OSError:
            continue
        found = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")]
        if not found:
            continue
        executor = "CoarseGrainedExecutorBackend" in command
        name = "executor_java" if executor else "driver_java"
        if executor or "SparkSubmit" in command:
            peaks[name] = max(peaks.get(name, 0), int(found[0]) // 1024)
    return peaks
