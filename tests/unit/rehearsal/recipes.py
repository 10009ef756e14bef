"""A small fit for tests of rehearsals: a built-in network learns two classes of points."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from sparkstrom import SharedTrainingMaster
from sparkstrom.data.column_selection import ColumnSpec
from sparkstrom.data.row_sample import RowSample, sample_blocks
from sparkstrom.data.row_store import Batches
from sparkstrom.encoding.grid import first_exponent
from sparkstrom.local.data import read_data_blocks
from sparkstrom.models.base import FlatModel
from sparkstrom.models.dense import DenseNetwork
from sparkstrom.models.updaters import Nesterov, Sgd, Updater
from sparkstrom.rehearsal.conditions import Conditions, StepTimes
from sparkstrom.rehearsal.data import SampledData
from sparkstrom.rehearsal.fit import FitRecipe, FitSimulator, SimulatedFit

ROWS, COLUMNS = 256, 5
TIMES = StepTimes(0.1, 0.2, 1e-3, 1e-4)


def rows() -> tuple[Any, Any]:
    """Return random points and the side of a plane on which each lies."""
    features = np.random.default_rng(0).normal(size=(ROWS, COLUMNS)).astype(np.float32)
    return features, (features.sum(axis=1) > 0).astype(np.int64)


def make_network(updater: Updater | None = None) -> DenseNetwork:
    return DenseNetwork([COLUMNS, 8, 2], hidden="tanh", updater=updater or Sgd(0.1), seed=1)


def make_momentum_network() -> DenseNetwork:
    return make_network(Nesterov(0.05, 0.9))


def make_recipe(model: FlatModel | None = None, epochs: int = 3, **options: Any) -> FitRecipe:
    model = model or make_network()
    initial, master = model.initial(), SharedTrainingMaster(batch_size_per_worker=8, **options)
    return FitRecipe(model, pickle.dumps(model), initial, first_exponent(initial), master, epochs)


def make_sample(validation: float = 0.0) -> RowSample:
    chosen = ColumnSpec("features", "label", None, validation or None)
    return sample_blocks(read_data_blocks(rows(), chosen), ROWS, 0)


def make_partitions(made: FitRecipe, workers: int) -> list[Batches]:
    return SampledData(made, make_sample()).partitions(workers)


def make_conditions(**given: Any) -> Conditions:
    return Conditions(**{"link_bits_s": 1e9, "latency_s": 1e-3, "times": TIMES} | given)


def make_simulator(made: FitRecipe, workers: int, **given: Any) -> FitSimulator:
    return FitSimulator(made, make_partitions(made, workers), make_conditions(**given))


def simulate_fit(made: FitRecipe, workers: int, **given: Any) -> SimulatedFit:
    return make_simulator(made, workers, **given).run()
