"""Tests of rehearsals on real executors, compared with the fits that they predict."""

from __future__ import annotations

import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkstrom import ParameterAveragingTrainingMaster, SparkNetwork
from sparkstrom.cli.main import main
from sparkstrom.models import DenseNetwork, Nesterov

EPOCHS = 6


def test_executors_measure_steps_of_rehearsed_model(
    spark: Any, digits: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Executors measure the steps of a torch model; on one host, links have default values."""
    torch = pytest.importorskip("torch")
    from sparkstrom.models.torch import TorchModel

    module = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
    model = TorchModel(module, torch.nn.CrossEntropyLoss(), partial(torch.optim.Adam, lr=1e-3))
    data = spark.sparkContext.parallelize(digits.rows(), 3)
    with SparkNetwork(spark, model, progress="plain") as network:
        found = network.rehearse(data, workers=2, rows=500, measure=True, jitter=0.25)
    assert "measured by 4 workers on 1 host: a step takes" in capsys.readouterr().err
    conditions = found.conditions
    assert 0 < conditions.times.step_s < 60
    assert conditions.times.jitter == 0.25
    assert (conditions.link_bits_s, conditions.latency_s) == (1e9, 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("per_node", [1, 2])
def test_rehearsed_loss_predicts_loss_of_fit(
    spark: Any, digits: Any, make_network: Any, per_node: int
) -> None:
    """The fit's loss differs from the losses of three rehearsals by at most their spread."""
    workers = 2 * per_node
    data = spark.sparkContext.parallelize(digits.rows(), 3)
    with make_network(workers_per_node=per_node) as network:
        before = network.parameters
        foretold = [
            network.rehearse(
                data, workers=workers, epochs=EPOCHS, validation=0.3, step="5ms", seed=seed
            )
            for seed in range(3)
        ]
        np.testing.assert_array_equal(network.parameters, before)
        summary = network.fit(data, epochs=EPOCHS, validation=0.3)
    losses = [result.runs[1].loss for result in foretold]
    spread = max(losses) - min(losses)
    assert all(result.runs[1].replicas_equal for result in foretold)
    assert foretold[0].rows == foretold[0].rows_total == len(digits.labels)
    loss = summary.history[-1].validation
    assert min(losses) - spread <= loss <= max(losses) + spread
    assert summary.minibatches == pytest.approx(foretold[0].runs[1].minibatches, rel=0.05)


@pytest.mark.parametrize(("kind", "save_updater"), [("rdd", "own"), ("dataframe", True)])
def test_rehearsed_rounds_equal_real_fit(
    spark: Any, digits: Any, kind: str, save_updater: bool | str
) -> None:
    """This holds if the sample has all rows, in the order of one partition."""
    data: Any = spark.sparkContext.parallelize(digits.rows()[:300], 1)
    if kind == "dataframe":
        rows = [(x.tolist(), y) for x, y in digits.rows()[:300]]
        data = spark.createDataFrame(rows, "features array<float>, label int").coalesce(1)
    model = DenseNetwork([64, 16, 10], updater=Nesterov(0.05, 0.9), seed=1)
    master = ParameterAveragingTrainingMaster(
        batch_size_per_worker=16,
        averaging_frequency=3,
        save_updater=save_updater,
        outer=Nesterov(0.7, 0.9),
    )
    with SparkNetwork(spark, model, master, progress=False) as network:
        result = network.rehearse(data, workers=4, epochs=2, validation=0.2, step="5ms")
        summary = network.fit(data, epochs=2, validation=0.2, run_log="")
        digest = hashlib.sha256(network.parameters.tobytes()).hexdigest()
    rehearsed = result.runs[1]
    assert summary.workers == 4
    assert (rehearsed.minibatches, rehearsed.digest) == (summary.minibatches, digest)
    assert rehearsed.loss == pytest.approx(summary.history[-1].validation)


SCRIPT = """
from pyspark.sql import SparkSession
from sparkstrom import ParameterAveragingTrainingMaster, SparkNetwork
from sparkstrom.models import DenseNetwork

spark = SparkSession.builder.getOrCreate()
frame = spark.createDataFrame([([float(i), 1.0], i % 2) for i in range(64)], ["features", "label"])
master = ParameterAveragingTrainingMaster(averaging_frequency=2, batch_size_per_worker=8)
network = SparkNetwork(spark, DenseNetwork([2, 2]), master, progress=False)
network.fit(frame, epochs=2)
raise AssertionError("the script ends at its first fit")
"""


def test_a_script_with_a_parameter_averaging_master_is_rehearsed(
    spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script is unchanged; executors measure the steps."""
    script, page = tmp_path / "train.py", tmp_path / "page.html"
    script.write_text(SCRIPT)
    flags = ["--workers", "1,2", "--measure", "--json", "--save", str(page)]
    assert main(["rehearse", str(script), *flags]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["averaging_frequency"] == 2
    assert [run["minibatches"] for run in figures["runs"]] == [16] * 4
    assert not any(run["error"] for run in figures["runs"])
    assert "Rounds of at most 2 minibatches" in page.read_text()
