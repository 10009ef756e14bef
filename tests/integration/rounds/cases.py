"""Fits in rounds for all backends, compared with the same arithmetic in one process.

Run as a program, it is a Spark Connect client that prints the results of the named cases.
"""

from __future__ import annotations

import copy
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

from sparkstrom import (
    ParallelWrapper,
    ParameterAveragingTrainingMaster,
    SharedTrainingMaster,
    SparkNetwork,
    SparkstromError,
)
from sparkstrom.data.column_selection import ColumnSpec
from sparkstrom.data.row_store import Batches
from sparkstrom.fit import checkpoints as fit_checkpoints
from sparkstrom.listeners import TrainingListener
from sparkstrom.local.data import partition_rows, read_data_blocks
from sparkstrom.local.rounds import LocalRoundsJob
from sparkstrom.models import Adam, DenseNetwork, Nesterov, Sgd
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.worker.task_environment import TaskEnvironment, load_batches
from tests.integration.averaged_rounds import Part, batches_of, train_in_one_process

EDGES = (0, 70, 110)  # rows of the two workers on Spark: one has fewer minibatches
BATCH_ROWS, EPOCHS = 16, 2


def dense(updater: Any) -> DenseNetwork:
    return DenseNetwork([64, 32, 10], updater=updater, seed=1)


def frozen_layer_with_buffers() -> Any:
    """Return a model with BatchNorm's statistics, a user's own buffer and a frozen layer."""
    import torch
    from torch import nn

    from sparkstrom.models.torch import TorchModel

    torch.set_num_threads(1)
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(64, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 10))
    for parameter in module[0].parameters():
        parameter.requires_grad_(False)
    module[1].register_buffer("constant", torch.arange(5.0))
    return TorchModel(module, nn.CrossEntropyLoss(), partial(torch.optim.Adam, lr=0.01))


def trimmed_mean(before: Any, after: Any, rows: Any) -> Any:
    """Return each parameter's median where workers differ much, or else its mean."""
    spread = after.max(axis=0) - after.min(axis=0)
    return np.where(spread > 0.01, np.median(after, axis=0), after.mean(axis=0))


@dataclass(frozen=True)
class Case:
    """A model with the options of a fit in rounds, and the tolerance of its comparison."""

    model: Callable[[], Any]
    options: dict[str, Any] = field(default_factory=dict)  # of ParameterAveragingTrainingMaster
    frequency: int = 2
    tolerance: float = 0.0  # 0: equal bits
    resumes: bool = False  # a listener ends the fit; a second one continues from its checkpoint


DILOCO = {"outer": Nesterov(0.7, 0.9), "save_updater": "own"}
CASES = {
    "averaging": Case(partial(dense, Sgd(0.2)), frequency=1),
    "momentum": Case(partial(dense, Nesterov(0.1)), frequency=3),
    "diloco": Case(partial(dense, Adam()), DILOCO),
    "accumulator": Case(partial(dense, Nesterov(0.1)), {"accumulator": trimmed_mean}),
    "frozen": Case(frozen_layer_with_buffers, tolerance=2e-6),
    "resume": Case(partial(dense, Adam()), {"outer": Sgd(0.9)}, resumes=True),
    "resume-diloco": Case(partial(dense, Adam()), DILOCO, resumes=True),
}


class StoppingListener(TrainingListener):
    """A listener that ends a fit once a checkpoint is written."""

    def on_checkpoint(self, event: Any) -> None:
        raise RuntimeError("enough")


class SparkBackend:
    """Runs fits in a Spark session; ``data`` has one partition for each of ``parts``."""

    def __init__(self, session: Any, data: Any, parts: Sequence[Part]) -> None:
        self._session, self._data, self._parts = session, data, parts

    def batches(self) -> list[Batches]:
        return batches_of(self._parts, self._master({}, 1))

    def _master(self, options: dict[str, Any], frequency: int) -> ParameterAveragingTrainingMaster:
        return ParameterAveragingTrainingMaster(
            repartition="never",
            workers_per_node=1,
            batch_size_per_worker=BATCH_ROWS,
            averaging_frequency=frequency,
            **options,
        )

    def fit(
        self, model: Any, options: dict[str, Any], frequency: int, *listeners: Any
    ) -> tuple[Any, Any]:
        master = self._master(options, frequency)
        network = SparkNetwork(self._session, model, master, progress=False)
        summary = network.fit(self._data, epochs=EPOCHS, listeners=listeners)
        return network.parameters, summary


class LocalBackend:
    """Runs fits with a ParallelWrapper."""

    def __init__(self, part: Part, folder: Path) -> None:
        self._part, self._folder = part, folder

    def batches(self) -> list[Batches]:
        master = SharedTrainingMaster(batch_size_per_worker=BATCH_ROWS)
        blocks = read_data_blocks(self._part, ColumnSpec())
        files = partition_rows(blocks, 2, master.rng_seed, self._folder)
        job = LocalRoundsJob(FitSpec(2, EPOCHS, 1, "test"), dense(None), master)
        places = (TaskEnvironment(p, 0, "host", "host", self._folder) for p in range(2))
        return [
            load_batches(job, place, file.blocks())
            for place, file in zip(places, files, strict=True)
        ]

    def fit(
        self, model: Any, options: dict[str, Any], frequency: int, *listeners: Any
    ) -> tuple[Any, Any]:
        given = dict(options)
        own = {"average_updaters": given.pop("save_updater", True) is True}
        mode = "CUSTOM" if "accumulator" in given else "AVERAGING"
        own |= {"training_mode": mode, "averaging_frequency": frequency, "progress": False}
        # Slow enough that the listener gets a checkpoint before the fit ends.
        own |= {"debug_longer_iterations": 200} if listeners else {}
        wrapper = ParallelWrapper(model, 2, batch_size_per_worker=BATCH_ROWS, **own, **given)
        with wrapper:
            summary = wrapper.fit(self._part, EPOCHS, listeners=listeners, run_log="")
            return wrapper.parameters, summary


def run_case(backend: SparkBackend | LocalBackend, name: str) -> dict[str, Any]:
    """Train a case; return its results and its difference from one process, as JSON values."""
    case, each = CASES[name], backend.batches()
    names = ("save_updater", "outer", "accumulator")
    options = {key: case.options.get(key) for key in names} | {"frequency": case.frequency}
    options["save_updater"] = case.options.get("save_updater", True)
    reference = train_in_one_process(copy.deepcopy(case.model()), each, EPOCHS, **options)
    said = ""
    with tempfile.TemporaryDirectory() as folder:
        more = dict(case.options)
        if case.resumes:
            more |= {"checkpoint_directory": folder, "checkpoint_every": "1 updates"}
            try:
                backend.fit(case.model(), more, case.frequency, StoppingListener())
            except SparkstromError as error:
                said = str(error)
            fit_checkpoints._directory_owners.clear()  # as in another program
        parameters, summary = backend.fit(case.model(), more, case.frequency)
    most = max(one.batches_per_epoch for one in each)
    return {
        "off_by": float(np.abs(parameters - reference).max()),
        "moved_by": float(np.abs(reference - case.model().initial()).max()),
        "equal": summary.replicas_equal,
        "rounds": summary.updates,
        "rounds_expected": EPOCHS * -(-most // case.frequency),
        "minibatches": [summary.minibatches, summary.minibatches_expected],
        "minibatches_resumed": summary.minibatches_resumed,
        "epochs": [epoch.epoch for epoch in summary.history],
        "examples": [epoch.examples for epoch in summary.history],
        "said": said,
        "text": summary.table(all=True),
    }


def digits() -> Part:
    """Return the rows of all workers."""
    data = load_digits()
    rows = EDGES[-1]
    return (data.data / 16).astype(np.float32)[:rows], data.target.astype(np.int64)[:rows]


def split(part: Part) -> Iterator[Part]:
    """Yield the rows of each worker."""
    for first, end in itertools.pairwise(EDGES):
        yield part[0][first:end], part[1][first:end]


class Client:
    """A client of Spark Connect, whose parts are the cases."""

    def __init__(self) -> None:
        import pandas as pd
        from pyspark.sql import SparkSession

        self.spark = SparkSession.builder.getOrCreate()  # of the server in SPARK_REMOTE
        # Spark 4.1 and later would make one partition of the two.
        self.spark.conf.set("spark.sql.unionOutputPartitioning", "false")
        parts = list(split(digits()))
        frames = [pd.DataFrame({"features": list(x), "label": y}) for x, y in parts]
        one, other = (self.spark.createDataFrame(frame).coalesce(1) for frame in frames)
        self._backend = SparkBackend(self.spark, one.union(other), parts)

    def __getattr__(self, name: str) -> Any:
        return partial(run_case, self._backend, name)


if __name__ == "__main__":
    from tests.integration.connect.fits_of_a_client import run_parts

    sys.modules["tests.integration.rounds.cases"] = sys.modules["__main__"]
    run_parts(Client())
