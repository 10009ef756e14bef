"""Tests of GridValue, which wraps values of a tuning grid that JSON cannot represent."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from pyspark.ml import Estimator, Pipeline, Transformer
from pyspark.ml.tuning import ParamGridBuilder

from sparkstrom import EarlyStopping, SharedTrainingMaster
from sparkstrom.base.errors import UsageError
from sparkstrom.listeners import TrainingListener
from sparkstrom.ml import SparkstromEstimator
from sparkstrom.models import DenseNetwork, Sgd
from sparkstrom.spark.ml.params import GridValue

MODEL = DenseNetwork([2, 3], updater=Sgd(0.25), seed=7)
VALUES: dict[str, Any] = {
    "model": MODEL,
    "master": SharedTrainingMaster(workers_per_node=1),
    "earlyStopping": EarlyStopping(patience=2),
    "listeners": [TrainingListener()],
    "featuresCol": ("a", "b"),
    "labelCol": ("a", ["b", "c"]),
    "predictionCol": ("p", "q"),
}


@pytest.mark.parametrize(("name", "value"), [*VALUES.items(), ("predictionCol", {0: "p", 1: "q"})])
def test_grid_wraps_values_that_json_cannot_represent(name: str, value: Any) -> None:
    """A grid wraps such a value as a stage, which Spark ML can save; an estimator unwraps it."""
    estimator = SparkstromEstimator(model=MODEL)
    for grid in (
        ParamGridBuilder().addGrid(estimator.getParam(name), [value]),
        ParamGridBuilder().baseOn((estimator.getParam(name), value)),
    ):
        held: Any
        ((held,),) = (list(one.values()) for one in grid.build())
        assert isinstance(held, Transformer)  # otherwise Spark ML would write it as JSON
        assert held == value
        assert repr(held) == repr(value)
        named: dict[str, Any] = {name: held}
        for given in (
            estimator.copy({estimator.getParam(name): held}),
            SparkstromEstimator(**named),
            SparkstromEstimator().setParams(**named),
        ):
            assert given.getOrDefault(name) is value
            assert given.extractParamMap()[given.getParam(name)] is value
    estimator.set(estimator.getParam(name), value)
    assert estimator.getOrDefault(name) is value


def test_json_values_are_not_wrapped_in_grid() -> None:
    """Values that JSON can represent are not wrapped in a grid."""
    estimator = SparkstromEstimator(model=MODEL)
    plain = {"featuresCol": ["a", "b"], "labelCol": {"y": ["a", "b"]}, "epochs": 3}
    grid = ParamGridBuilder()
    for name, value in plain.items():
        grid.addGrid(estimator.getParam(name), [value])
    (made,) = grid.build()
    assert {param.name: value for param, value in made.items()} == plain
    assert not any(isinstance(value, GridValue | Estimator) for value in made.values())


@pytest.mark.parametrize("name", [*VALUES, "epochs"])
@pytest.mark.parametrize("in_pipeline", [False, True])
def test_copy_wraps_values_of_dict_grid_in_place(name: str, in_pipeline: bool) -> None:
    """``copy`` converts the values of a user's own dictionaries in place, as ParamGridBuilder does.

    Spark ML passes these dictionaries to ``copy``, and saves them with the tuned model.
    """
    estimator = SparkstromEstimator(model=MODEL)
    value = VALUES.get(name, np.int64(3))
    others = SparkstromEstimator().model  # a Param of another stage of a pipeline
    grid: list[dict[Any, Any]] = [{estimator.getParam(name): value, others: "kept"}]
    tuned: Any = Pipeline(stages=[estimator]) if in_pipeline else estimator
    for _ in range(2):  # once per fold
        copied = tuned.copy(grid[0])
        if in_pipeline:
            (copied,) = copied.getStages()
        assert copied.getOrDefault(name) == value
    held = grid[0][estimator.getParam(name)]
    assert held == value
    assert isinstance(held, Transformer) if name in VALUES else type(held) is int
    assert grid[0][others] == "kept"


def test_a_wrong_value_in_a_grid_of_dicts_is_refused_by_name() -> None:
    estimator = SparkstromEstimator(model=MODEL)
    with pytest.raises(UsageError, match="epochs=0"):
        estimator.copy({estimator.epochs: 0})


def test_grid_value_has_attributes_of_wrapped_value() -> None:
    """A GridValue has the wrapped value's attributes, is hashable, and refuses to transform."""
    held: Any = GridValue("model", MODEL)
    assert (held.n_params, held.describe()) == (9, MODEL.describe())
    assert {held: 1}[copy.copy(held)] == 1
    with pytest.raises(AttributeError):
        held.nothing_like_it  # noqa: B018
    with pytest.raises(UsageError, match="is a value of a grid"):
        held._transform(None)


def test_negative_seed_is_mapped_to_valid_seed() -> None:
    """A negative seed, such as Spark ML's default, is mapped to a valid seed."""
    assert SparkstromEstimator(model=MODEL, seed=-5)._master().rng_seed == 2**63 - 5


def test_seed_of_none_uses_rng_seed_of_master() -> None:
    """With a seed of None, the master's rng_seed is used."""
    master = SharedTrainingMaster(rng_seed=7)
    estimator = SparkstromEstimator(model=MODEL, master=master, seed=5)
    assert estimator.setSeed(None)._master().rng_seed == 7
