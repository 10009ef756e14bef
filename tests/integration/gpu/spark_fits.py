"""Whole fits on Spark whose workers train on GPUs; prints one JSON object per fit.

    python -m tests.integration.gpu.spark_fits [CASE ...]

Four workers in two executors share the machine's first GPU, which Spark assigns to each task. The
loss fails unless it is computed on ``--device``, so no worker trains on the CPU unnoticed.
``--device cpu`` tries the program out where there is no GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pyspark import TaskContext, cloudpickle
from pyspark.sql import SparkSession
from torch import nn

from sparkstrom import (
    AdaptiveThreshold,
    ParameterAveragingTrainingMaster,
    SharedTrainingMaster,
    SparkNetwork,
    VoidConfiguration,
)
from sparkstrom.ml import SparkstromEstimator
from sparkstrom.models.torch import TorchModel

CLASSES, FEATURES, ROWS = 10, 64, 6144
WORKERS = 4
GPU_CONFIGURATION = {
    "spark.worker.resource.gpu.amount": "1",
    "spark.executor.resource.gpu.amount": "1",
    "spark.task.resource.gpu.amount": "0.5",  # two tasks to a GPU
}
ADAM = partial(torch.optim.Adam, lr=1e-3)
MOMENTUM = partial(torch.optim.SGD, lr=0.02, momentum=0.9)


class LossOnDevice(nn.CrossEntropyLoss):
    """Cross entropy that refuses outputs which are not on ``kind``, such as "cuda"."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss, or raise RuntimeError."""
        if outputs.device.type != self.kind:
            raise RuntimeError(f"trains on {outputs.device}, not on {self.kind}")
        return super().forward(outputs, targets)


class LossOnExecutors(LossOnDevice):
    """``LossOnDevice`` where a task runs, and cross entropy in the driver program."""

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the loss, or raise RuntimeError."""
        if TaskContext.get() is None:
            return nn.functional.cross_entropy(outputs, targets)
        return super().forward(outputs, targets)


class Fits:
    """The cases: each is a method that returns what is printed."""

    def __init__(self, spark: SparkSession, device: str) -> None:
        self.spark, self.device = spark, device
        random = np.random.default_rng(0)
        centres = random.normal(size=(CLASSES, FEATURES))
        self.labels = random.integers(0, CLASSES, ROWS)
        self.features = (centres[self.labels] + random.normal(size=(ROWS, FEATURES))).astype(
            np.float32
        )

    def model(
        self, optimizer: Any = ADAM, hidden: int = 512, loss: nn.Module | None = None
    ) -> TorchModel:
        """Return a perceptron that trains on the GPU which Spark assigns."""
        loss = loss or LossOnDevice(self.device)
        torch.manual_seed(0)
        module = nn.Sequential(
            nn.Linear(FEATURES, hidden), nn.BatchNorm1d(hidden), nn.ReLU(),
            nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES),
        )  # fmt: skip
        device = None if self.device == "cuda" else self.device
        return TorchModel(module, loss, optimizer, device=device)

    def rows(self) -> Any:
        """Return an RDD of the training rows, in as many partitions as there are workers."""
        pairs = list(zip(self.features, map(int, self.labels), strict=True))
        return self.spark.sparkContext.parallelize(pairs, WORKERS)

    def network(self, model: TorchModel, **options: Any) -> SparkNetwork:
        """Return a network with the options of SharedTrainingMaster."""
        options = {"threshold": AdaptiveThreshold(1e-4), "batch_size_per_worker": 32} | options
        master = SharedTrainingMaster(**options)
        return SparkNetwork(self.spark, model, master, progress=False)

    def outcome(self, network: SparkNetwork, summary: Any, seconds: float) -> dict[str, Any]:
        """Return what every case prints. The driver program predicts, on the CPU."""
        predicted = network.predict(self.features).argmax(1)
        return {
            "replicas_equal": summary.replicas_equal,
            "minibatches_missing": summary.minibatches_expected - summary.minibatches,
            "accuracy": float((predicted == self.labels).mean()),
            "examples_per_s": summary.examples / seconds,
        }

    def fitted(self, network: SparkNetwork, epochs: int = 4) -> dict[str, Any]:
        """Fit, and return the outcome."""
        began_s = time.monotonic()
        summary = network.fit(self.rows(), epochs=epochs)
        return self.outcome(network, summary, time.monotonic() - began_s)

    # -- cases ----------------------------------------------------------------------------------

    def adam(self) -> dict[str, Any]:
        """Fit twice, and evaluate on executors."""
        network = self.network(self.model())
        first = self.fitted(network)
        again = self.fitted(network)
        evaluation = network.evaluate(self.rows())
        return first | {"second": again, "evaluated": evaluation.classification.accuracy}

    def momentum(self) -> dict[str, Any]:
        return self.fitted(self.network(self.model(MOMENTUM)))

    def large(self) -> dict[str, Any]:
        """Fit a model of 4.3 million parameters."""
        return self.fitted(self.network(self.model(hidden=2048)))

    def mesh_of_two(self) -> dict[str, Any]:
        """Fit in a mesh in which each worker forwards updates to at most two others."""
        return self.fitted(
            self.network(
                self.model(), void=VoidConfiguration(mesh_build_mode="mesh", mesh_fan_out=2)
            )
        )

    def averaging(self) -> dict[str, Any]:
        """Train in rounds."""
        master = ParameterAveragingTrainingMaster(batch_size_per_worker=32, averaging_frequency=5)
        network = SparkNetwork(self.spark, self.model(), master, progress=False)
        began_s = time.monotonic()
        summary = network.fit(self.rows(), epochs=2)
        return self.outcome(network, summary, time.monotonic() - began_s)

    def killed_worker(self) -> dict[str, Any]:
        """Fit while one training Python worker is killed."""
        from tests.integration.spark.conftest import Victims

        killed: list[int] = []

        def kill() -> None:
            while not killed:
                time.sleep(0.2)
                if workers := Victims().workers():
                    time.sleep(1.5)
                    with contextlib.suppress(ProcessLookupError):  # it has just ended
                        os.kill(workers[0], signal.SIGKILL)
                        killed.append(workers[0])

        threading.Thread(target=kill, daemon=True).start()
        return self.fitted(self.network(self.model()), epochs=30) | {"killed": len(killed)}

    def resumed(self) -> dict[str, Any]:
        """Fit with another network from the checkpoint of a fit."""
        with tempfile.TemporaryDirectory() as directory:
            first = self.network(self.model(), checkpoint_directory=directory)
            first.fit(self.rows(), epochs=1)
            first.close()
            network = self.network(self.model())
            network.restore(directory)
            return self.fitted(network)

    def estimator(self) -> dict[str, Any]:
        """Fit a DataFrame with the estimator; executors predict."""
        from pyspark.ml.functions import array_to_vector
        from pyspark.sql.functions import col

        pairs = [(x.tolist(), float(y)) for x, y in zip(self.features, self.labels, strict=True)]
        frame = self.spark.createDataFrame(pairs, ["array", "label"]).select(
            array_to_vector(col("array")).alias("features"), "label"
        )
        master = SharedTrainingMaster(threshold=AdaptiveThreshold(1e-4))
        fitted = SparkstromEstimator(
            model=self.model(), featuresCol="features", labelCol="label", epochs=4,
            batchSize=32, master=master,
        ).fit(frame)  # fmt: skip
        right = fitted.transform(frame).where("prediction = label").count()
        return {"replicas_equal": fitted.summary.replicas_equal, "accuracy": right / ROWS}

    def measured_rehearsal(self) -> dict[str, Any]:
        """Rehearse with steps measured on the executors' GPU; this program trains on the CPU."""
        network = self.network(self.model(loss=LossOnExecutors(self.device)))
        result = network.rehearse(self.rows(), epochs=1, workers=(1, 4), measure=True, rows=1024)
        return {"conditions": str(result).splitlines()[:2]}


CASES: tuple[Callable[[Fits], dict[str, Any]], ...] = (
    Fits.adam,
    Fits.momentum,
    Fits.large,
    Fits.mesh_of_two,
    Fits.averaging,
    Fits.killed_worker,
    Fits.resumed,
    Fits.estimator,
    Fits.measured_rehearsal,
)


@contextlib.contextmanager
def session(device: str) -> Iterator[SparkSession]:
    """Yield a session with two executors of two tasks, which get GPU 0 if ``device`` is "cuda"."""
    builder = (
        SparkSession.builder.master("local-cluster[2,2,2048]")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.log.level", "ERROR")
    )
    with tempfile.TemporaryDirectory() as directory:
        if device == "cuda":
            script = Path(directory) / "find-gpus"
            script.write_text("""#!/bin/sh\necho '{"name": "gpu", "addresses": ["0"]}'\n""")
            script.chmod(0o755)
            builder = builder.config("spark.worker.resource.gpu.discoveryScript", str(script))
            for key, value in GPU_CONFIGURATION.items():
                builder = builder.config(key, value)
        spark = builder.getOrCreate()
        try:
            yield spark
        finally:
            spark.stop()


def main() -> int:
    """Run the cases; return 1 if one raised."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help="default: all")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    args = parser.parse_args()
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    failed = False
    with session(args.device) as spark:
        fits = Fits(spark, args.device)
        for case in CASES:
            if args.cases and case.__name__ not in args.cases:
                continue
            try:
                result = case(fits)
            except Exception as error:
                traceback.print_exc()
                failed, result = True, {"error": repr(error)}
            print(json.dumps({"case": case.__name__} | result), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
