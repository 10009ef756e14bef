"""Fits of a Spark Connect client; prints the result of each as JSON in the last line of stdout."""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits

from sparkstrom import (
    EarlyStopping,
    SharedTrainingMaster,
    SparkNetwork,
    SparkstromError,
    VoidConfiguration,
)
from sparkstrom.listeners import TrainingListener
from sparkstrom.models import DenseNetwork, Sgd
from sparkstrom.streams import each_batch
from tests.integration.model_kinds import jax_model, keras_model

ROWS = 1437
LARGE = [64, 1500, 900, 10]  # 1.5 million parameters: too many for the plan of a Spark job


class CountingListener(TrainingListener):
    """A listener that counts iteration events and records the commit of each epoch's snapshot."""

    def __init__(self) -> None:
        self.looks, self.commits = 0, []

    def on_iteration(self, event: Any) -> None:
        self.looks += 1

    def on_epoch(self, event: Any) -> None:
        self.commits.append(event.snapshot().commit)


class FailingNetwork(DenseNetwork):
    """A network that raises in each step."""

    def step(self, *args: Any, **keywords: Any) -> Any:
        raise ValueError("this code of a user's is wrong\nby two lines")


class KilledOnceNetwork(DenseNetwork):
    """A network that kills its process in the tenth step, in the first process that reaches it."""

    marker = ""
    steps = 0

    def step(self, *args: Any, **keywords: Any) -> Any:
        self.steps += 1
        if self.steps == 10:
            try:
                Path(self.marker).touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().step(*args, **keywords)


def summarize(summary: Any) -> dict[str, Any]:
    """Return the parts of a summary that the tests check."""
    return {
        "equal": summary.replicas_equal,
        "replicas": len(summary.hashes),
        "workers": summary.workers,
        "rows": summary.rows_trained,
        "epochs": summary.epochs,
        "text": summary.table(all=True),
    }


class Client:
    def __init__(self) -> None:
        self.spark = SparkSession.builder.getOrCreate()  # of the server in SPARK_REMOTE
        digits = load_digits()
        self.x, self.y = (digits.data / 16).astype(np.float32), digits.target
        table = pd.DataFrame({"features": list(self.x[:ROWS]), "label": self.y[:ROWS]})
        self.frame = self.spark.createDataFrame(table)

    def network(self, model: Any = None, void: Any = None, **options: Any) -> SparkNetwork:
        model = model or DenseNetwork([64, 32, 10], updater=Sgd(0.1), seed=1)
        master = SharedTrainingMaster(void or VoidConfiguration(), **options)
        return SparkNetwork(self.spark, model, master, progress="plain")

    def accuracy(self, network: SparkNetwork) -> float:
        held_out = network.predict(self.x[ROWS:]).argmax(1)
        return float((held_out == self.y[ROWS:]).mean())

    def refusal(self, what: Any, *args: Any, **keywords: Any) -> str:
        try:
            what(*args, **keywords)
        except SparkstromError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing was refused"

    # -- parts of the program --------------------------------------------------------------------

    def dense(self) -> dict[str, Any]:
        """Fit with listeners, held-out rows and early stopping; fit again, predict and evaluate."""
        network, heard = self.network(), CountingListener()
        stop = EarlyStopping(patience=2)
        asked = {"validation": 0.1, "early_stopping": stop, "listeners": [heard]}
        first = network.fit(self.frame, epochs=12, **asked)
        again = network.fit(self.frame, epochs=3)  # continues with the states that workers kept
        few = self.frame.limit(40)
        apart = network.fit(self.frame, epochs=1, validation=few.select("label", "features"))
        predicted = network.predict(few).select("features", "prediction").toPandas()
        here = network.predict(np.stack(predicted["features"].to_numpy()))
        there = np.stack(predicted["prediction"].to_numpy())
        figures = network.evaluate(self.frame, ["classification", "loss"])
        batch = (self.x[:ROWS], self.y[:ROWS])
        answer = {
            "first": summarize(first),
            "again": summarize(again),
            "apart": [apart.rows_trained, apart.rows_held_out, apart.history[-1].validation],
            "looks": heard.looks,
            "epochs_heard": len(heard.commits),
            "history": len(first.history),
            "lease_s": network._strategy.master.void.lease_s,
            "accuracy": self.accuracy(network),
            "as_here": bool(np.allclose(here, there, atol=1e-6)),
            "evaluated": [figures.rows, figures.classification.accuracy, figures.loss],
            "evaluated_here": network.evaluate(batch, ["classification", "loss"]).loss,
            "score": network.score(self.frame),
        }
        network.close()
        return answer

    def large(self) -> dict[str, Any]:
        """Fit a model that is sent as an artifact, without repartition or TCP to the client."""
        model = DenseNetwork(LARGE, updater=Sgd(0.05), seed=1)
        network = self.network(model, repartition="never", workers_per_node=1)
        from sparkstrom.spark.connect.application import ConnectApplication

        nowhere = property(lambda self: "192.0.2.1")  # no address of this machine
        before, ConnectApplication.host = ConnectApplication.host, nowhere
        try:
            summary = network.fit(self.frame.repartition(4), epochs=2)
        finally:
            ConnectApplication.host = before
        return summarize(summary) | {"score": network.score(self.frame)}

    def torch(self) -> dict[str, Any]:
        import torch
        from torch import nn

        from sparkstrom.models.torch import TorchModel

        module = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        model = TorchModel(module, nn.CrossEntropyLoss(), partial(torch.optim.SGD, lr=0.1))
        network = self.network(model, checkpoint_directory=os.path.abspath("checkpoints"))
        summary = network.fit(self.frame, epochs=6)
        more = {"accuracy": self.accuracy(network), "checkpoint": summary.checkpoint}
        return summarize(summary) | more

    def jax(self) -> dict[str, Any]:
        return self.of_kind(jax_model())

    def keras(self) -> dict[str, Any]:
        return self.of_kind(keras_model())

    def of_kind(self, model: Any) -> dict[str, Any]:
        """Fit a model with buffers; fit it again with the states that workers kept."""
        network = self.network(model, repartition="never", workers_per_node=1)
        first = network.fit(self.frame.coalesce(2), epochs=6)
        again = network.fit(self.frame.coalesce(2), epochs=2)
        figures = network.evaluate(self.frame)
        return {
            "first": summarize(first),
            "again": summarize(again),
            "accuracy": self.accuracy(network),
            "evaluated": figures.classification.accuracy,
        }

    def dies(self) -> dict[str, Any]:
        model = KilledOnceNetwork([64, 32, 10], updater=Sgd(0.1), seed=1)
        KilledOnceNetwork.marker = os.path.abspath("one-has-died")
        network = self.network(model)
        summary = network.fit(self.frame, epochs=6)
        return summarize(summary) | {"died": os.path.exists(KilledOnceNetwork.marker)}

    def estimator(self) -> dict[str, Any]:
        from sparkstrom.ml import SparkstromEstimator

        estimator = SparkstromEstimator(
            model=DenseNetwork([64, 32, 10], updater=Sgd(0.1), seed=1), epochs=4
        )
        model = estimator.fit(self.frame)
        out = model.transform(self.frame.limit(100)).toPandas()
        wrong = self.refusal(model.write().save, "/tmp/not-written")
        return {"right": float((out["prediction"] == out["label"]).mean()), "save": wrong}

    def rehearsal(self) -> dict[str, Any]:
        """Rehearse twice, with a column that marks held-out rows; also try unsupported inputs."""
        network = self.network()
        before = network.parameters.copy()
        conditions: dict[str, Any] = {"workers": (1, 2), "step": "5ms", "rows": 600, "seed": 3}
        split = self.frame.selectExpr("*", "rand(1) < 0.2 as held_out")
        results = [
            network.rehearse(split, epochs=2, validation="held_out", **conditions).to_dict()
            for _ in range(2)
        ]
        bad = pd.DataFrame({"features": [[1.0] * 64, [2.0] * 63], "label": [1, 2]})
        return {
            "results": results,
            "unchanged": bool((network.parameters == before).all()),
            "bad": self.refusal(
                network.rehearse, self.spark.createDataFrame(bad), workers=1, step="5ms"
            ),
            "measured": self.refusal(network.rehearse, self.frame, measure=True),
        }

    def refusals(self) -> dict[str, str]:
        class Rdd:
            """An object with the method by which RDDs are recognized."""

            def mapPartitions(self) -> None: ...

        network = self.network()
        host = partial(self.network, void=VoidConfiguration(controller="10.1.2.3"))
        many = self.network(workers_per_node=2)
        bad = pd.DataFrame({"features": [[1.0] * 64, [2.0] * 63], "label": [1, 2]})
        return {
            "rdd": self.refusal(network.fit, Rdd()),
            "export": self.refusal(self.network, rdd_training_approach="export"),
            "host": self.refusal(host),
            "slots": self.refusal(many.fit, self.frame),
            "column": self.refusal(network.fit, self.frame, label="lable"),
            "held_out": self.refusal(network.fit, self.frame, validation=Rdd()),
            "stream": self.refusal(each_batch, network),
            "row": self.refusal(network.fit, self.spark.createDataFrame(bad)),
            "user": self.refusal(self.network(FailingNetwork([64, 32, 10])).fit, self.frame),
        }


def answer_of(part: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the part's answer, or its traceback, so that the other parts still run."""
    try:
        return part()
    except Exception:
        return {"failed": traceback.format_exc()}


def run_parts(client: Any) -> None:
    """Run the parts of a client's program named on the command line; print answers as JSON."""
    answers = {name: answer_of(getattr(client, name)) for name in sys.argv[1:]}
    client.spark.stop()  # does nothing where several programs share the session
    print(json.dumps(answers))


if __name__ == "__main__":
    run_parts(Client())
