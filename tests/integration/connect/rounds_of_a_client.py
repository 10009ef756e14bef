"""Fits in rounds of a Spark Connect client; prints the results as JSON in the last line."""

from __future__ import annotations

import copy
import itertools
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits

from sparkstrom import (
    EarlyStopping,
    ParameterAveragingTrainingMaster,
    SparkNetwork,
    SparkstromError,
)
from sparkstrom.fit import checkpoints as fit_checkpoints
from sparkstrom.listeners import TrainingListener
from sparkstrom.models import Adam, DenseNetwork, Nesterov, Sgd
from sparkstrom.planning.memory import PieceSizes
from sparkstrom.spark.connect import dataframe_rounds as frame_engine
from sparkstrom.spark.connect import dataframe_rounds as frame_parts
from tests.integration.averaged_rounds import fit_in_one_process, join_batches, rounds_of_fit
from tests.integration.connect.fits_of_a_client import run_parts
from tests.integration.model_kinds import jax_model, keras_model

EDGES = (0, 70, 110)  # rows of the two workers
CUT = PieceSizes(piece=4000, part=7000, direct=0, collected=18_000, pieces_per_task=2)
SIXTH = 5  # the sixth step's number, counted from 0


class SelfKillingNetwork(DenseNetwork):
    """A network that kills its process in the sixth step of all processes, in the second round."""

    steps_seen = ""  # a directory, with a file for each step of any process

    def step(self, *args: Any, **keywords: Any) -> Any:
        number = len(os.listdir(self.steps_seen))
        while True:
            try:
                Path(self.steps_seen, str(number)).touch(exist_ok=False)
                break
            except FileExistsError:
                number += 1
        if number == SIXTH:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(*args, **keywords)


class FailingNetwork(DenseNetwork):
    def step(self, *args: Any, **keywords: Any) -> Any:
        raise ValueError("this code of a user's is wrong\nby two lines")


class StoppingListener(TrainingListener):
    """A listener that ends a fit once a checkpoint is written."""

    def on_checkpoint(self, event: Any) -> None:
        raise RuntimeError("enough")


class InterruptingListener(TrainingListener):
    """A listener that sends Ctrl-C to this process after the first minibatches."""

    def __init__(self) -> None:
        self.minibatches = 0

    def on_iteration(self, event: Any) -> None:
        if not self.minibatches and event.minibatches:
            self.minibatches = event.minibatches
            os.kill(os.getpid(), signal.SIGINT)


def set_small_limits() -> None:
    """Set small limits, so that parameters need many views and results many jobs."""
    frame_engine.PAYLOAD_SIZES, frame_engine.INLINE_TOTAL_MAX, frame_parts.VIEW_BYTES_MAX = (
        CUT,
        0,
        12_000,
    )


class Client:
    def __init__(self) -> None:
        self.spark = SparkSession.builder.getOrCreate()  # of the server in SPARK_REMOTE
        digits = load_digits()
        self.x, self.y = (digits.data / 16).astype(np.float32), digits.target.astype(np.int64)
        ends = list(itertools.pairwise(EDGES))
        self.parts = [(self.x[first:end], self.y[first:end]) for first, end in ends]
        # Spark 4.1 and later would make one partition of the two.
        self.spark.conf.set("spark.sql.unionOutputPartitioning", "false")
        one, other = (self.frame_of(*part).coalesce(1) for part in self.parts)
        self.frame = one.union(other)

    def frame_of(self, x: Any, y: Any) -> Any:
        return self.spark.createDataFrame(pd.DataFrame({"features": list(x), "label": y}))

    def fit(self, model: Any, master: Any, epochs: int = 2, **more: Any) -> tuple[Any, Any]:
        network = SparkNetwork(self.spark, model, master, progress="plain")
        return network, network.fit(self.frame, epochs=epochs, **more)

    def beside(self, model: Any, master: Any, epochs: int = 2, **more: Any) -> dict[str, Any]:
        """Run a fit; return its results and its difference from the same fit in one process."""
        reference = fit_in_one_process(copy.deepcopy(model), self.parts, master, epochs)
        network, summary = self.fit(model, master, epochs, **more)
        self.parameters = network.parameters
        return {
            "off_by": float(np.abs(self.parameters - reference).max()),
            "equal": summary.replicas_equal,
            "rounds": summary.updates,
            "workers": summary.workers,
            "minibatches": [summary.minibatches, summary.minibatches_expected],
            "epochs": [epoch.epoch for epoch in summary.history],
            "text": summary.table(all=True),
        }

    # -- parts of the program --------------------------------------------------------------------

    def union(self) -> dict[str, Any]:
        """Average after every step; compare with one machine that trains on all rows."""
        model, master = DenseNetwork([64, 32, 10], updater=Sgd(0.2), seed=1), master_of(1)
        alone, reference = copy.deepcopy(model), model.initial()
        alone.bind(reference)
        for turns in rounds_of_fit(self.parts, master, 2):
            alone.step(join_batches([turn.batch for own in turns for turn in own]))
        told = self.beside(model, master)
        off_by = float(np.abs(self.parameters - reference).max())
        left = self.spark.catalog.listTables()
        settings = [self.spark.conf.get(key, None) for key in frame_engine.SESSION_SETTINGS]
        more = {"off_machine_by": off_by, "left": [table.name for table in left]}
        return told | more | {"settings": settings}

    def dies(self) -> dict[str, Any]:
        """Run a fit in which a worker is killed, with messages in small pieces."""
        set_small_limits()
        model = SelfKillingNetwork([64, 16, 10], updater=Adam(), seed=1)
        reference = fit_in_one_process(
            DenseNetwork([64, 16, 10], updater=Adam(), seed=1), self.parts, master_of(2), 1
        )
        SelfKillingNetwork.steps_seen = os.path.abspath("steps-seen")
        os.mkdir(SelfKillingNetwork.steps_seen)
        network, summary = self.fit(model, master_of(2, aggregation_depth=1), 1)
        return {
            "off_by": float(np.abs(network.parameters - reference).max()),
            "died": os.path.exists(Path(SelfKillingNetwork.steps_seen, str(SIXTH))),
            "text": summary.table(all=True),
        }

    def diloco(self) -> dict[str, Any]:
        """Fit with Adam in each worker and an outer step; a listener ends it, and it is resumed."""
        set_small_limits()
        model = DenseNetwork([64, 16, 10], updater=Adam(), seed=1)
        options = {"outer": Nesterov(0.7, 0.9), "save_updater": "own"}
        kept = {"checkpoint_directory": os.path.abspath("kept"), "checkpoint_every": "3 updates"}
        master = master_of(2, **options, **kept)
        said = refusal(self.fit, copy.deepcopy(model), master, 2, listeners=[StoppingListener()])
        fit_checkpoints._directory_owners.clear()  # as in another program
        return self.beside(model, master) | {"said": said}

    def torch(self) -> dict[str, Any]:
        """Fit with BatchNorm and averaged Adam; then with repartitioning and early stopping."""
        import torch
        from torch import nn

        from sparkstrom.models.torch import TorchModel

        torch.manual_seed(3)
        module = nn.Sequential(nn.Linear(64, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 10))
        model = TorchModel(module, nn.CrossEntropyLoss(), partial(torch.optim.Adam, lr=0.01))
        torch.set_num_threads(1)
        told = self.beside(copy.deepcopy(model), master_of(2), 1)
        master = ParameterAveragingTrainingMaster(
            averaging_frequency=6, workers_per_node=2, storage_level="DISK_ONLY"
        )
        every = self.frame_of(self.x, self.y)
        rule = EarlyStopping(patience=1)
        asked = {"validation": 0.2, "early_stopping": rule}
        network = SparkNetwork(self.spark, model, master, progress="plain")
        summary = network.fit(every, epochs=3, **asked)
        return {
            "beside": told,
            "rows": summary.rows,
            "held_out": summary.rows_held_out,
            "workers": summary.workers,
            "best": summary.best is not None,
            "losses": [epoch.validation for epoch in summary.history],
            "accuracy": network.evaluate(every).classification.accuracy,
        }

    def jax(self) -> dict[str, Any]:
        """Fit with Optax's momentum and schedule in each worker, and an outer step."""
        return self.beside(jax_model(), master_of(2, save_updater="own", outer=Nesterov(0.7, 0.9)))

    def keras(self) -> dict[str, Any]:
        """Average BatchNorm's statistics and momentum, with parameters and results in pieces."""
        set_small_limits()
        return self.beside(keras_model(), master_of(2))

    def ends(self) -> dict[str, Any]:
        """Collect refusals and errors of a user's model and data; interrupt a fit by Ctrl-C."""
        model, different = DenseNetwork([64, 10], seed=1), "num_partitions_workers_differs"
        interrupting, master = InterruptingListener(), master_of(1)
        network = SparkNetwork(self.spark, model, master, progress=False)
        before, interrupted = network.parameters.copy(), False
        try:
            network.fit(self.frame, epochs=500, listeners=[interrupting])
        except KeyboardInterrupt:
            interrupted = True
        return {
            "different": refusal(self.fit, model, master_of(1, repartition=different)),
            "export": refusal(self.fit, model, master_of(1, rdd_training_approach="export")),
            "features": refusal(self.fit, DenseNetwork([63, 10], seed=1), master_of(1)),
            "user": refusal(self.fit, FailingNetwork([64, 10], seed=1), master_of(1)),
            "interrupted": interrupted,
            "learnt": bool((network.parameters != before).any()),
            "left": [table.name for table in self.spark.catalog.listTables()],
        }


def master_of(frequency: int, **options: Any) -> ParameterAveragingTrainingMaster:
    defaults = {"repartition": "never", "batch_size_per_worker": 16, "workers_per_node": 1}
    return ParameterAveragingTrainingMaster(
        averaging_frequency=frequency, **{**defaults, **options}
    )


def refusal(what: Any, *args: Any, **keywords: Any) -> str:
    try:
        what(*args, **keywords)
    except SparkstromError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


if __name__ == "__main__":
    run_parts(Client())
