"""Simulated fits that train small models of each kind, with replicas and encoders of real fits."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from sparkstrom.models.base import FlatModel
from sparkstrom.simulation import fuzzing as conditions
from sparkstrom.simulation.fuzzing import draw_scenario, simulate_seeds
from sparkstrom.simulation.real_components import (
    CLASSES,
    HIDDEN,
    INPUTS,
    LEARNING_RATE,
    ModelFactory,
    RealComponentFactory,
    make_small_network,
)
from sparkstrom.simulation.run_options import NO_FAULTS, ReplicaKind, RunSize
from sparkstrom.simulation.world import World
from tests.simulation.test_seeds import CORES


def torch_model() -> FlatModel:
    from torch import nn, optim

    from sparkstrom.models.torch import TorchModel

    parts = nn.Linear(INPUTS, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES)
    return TorchModel(
        nn.Sequential(*parts), nn.CrossEntropyLoss(), partial(optim.SGD, lr=LEARNING_RATE)
    )


def jax_model() -> FlatModel:
    import optax

    from tests.unit.models import mlp_in_jax

    return mlp_in_jax.make(optax.sgd(LEARNING_RATE))


def keras_model() -> FlatModel:
    from sparkstrom.models.keras import KerasModel
    from sparkstrom.models.keras_support import keras

    layers = keras.layers.Dense(HIDDEN, activation="tanh"), keras.layers.Dense(CLASSES)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model = keras.Sequential([keras.Input((INPUTS,)), *layers])
    return KerasModel(model, loss, keras.optimizers.SGD(LEARNING_RATE))


KINDS: dict[str, tuple[ModelFactory, tuple[str, ...]]] = {  # (model, required packages)
    "torch": (torch_model, ("torch",)),
    "jax": (jax_model, ("jax", "optax")),
    "keras": (keras_model, ("jax", "keras")),
}


@pytest.mark.parametrize(("mode", "nodes"), [("plain", 4), ("mesh", 12)])
def test_fits_with_real_replicas_keep_invariants(mode: str, nodes: int) -> None:
    for result in simulate_seeds(range(24), nodes, mode, {"replicas": ReplicaKind.REAL}, CORES):
        repeat = (
            f"python -m sparkstrom.simulation --mode {mode} --nodes {nodes} --seeds {result.seed}"
        )
        assert result.violations == [], f"{repeat} --replicas real"


@pytest.mark.parametrize("kind", KINDS)
def test_fits_of_each_model_kind_keep_invariants(kind: str) -> None:
    make, needed = KINDS[kind]
    if lacking := [name for name in needed if importlib.util.find_spec(name) is None]:
        pytest.skip(f"not installed: {', '.join(lacking)}")
    for seed in range(2):
        size, faults = draw_scenario(seed, 4, "mesh")
        world = World(seed, size, faults, RealComponentFactory(size, seed, make))
        assert world.run() == []
        assert world.checks.commits


def test_some_seeds_draw_real_replicas() -> None:
    """Some random scenarios train real replicas."""
    kinds = [conditions.draw_scenario(seed, 12, "mesh")[0].replicas for seed in range(1000)]
    assert 5 < kinds.count(ReplicaKind.REAL) < 50


def test_real_models_learn_in_simulation() -> None:
    """Real models do learn in the simulation: parameters change, and commits are made."""
    size = RunSize(nodes=3, epochs=4, batches=10)
    parts = RealComponentFactory(size, seed=2)
    world = World(2, size, NO_FAULTS, parts)
    assert world.run() == []
    learnt = world.replica.theta.to_host() - parts.job.initial  # type: ignore[attr-defined]
    assert np.abs(learnt).max() > 0.1
    assert len(world.checks.commits) > 20


# -- the checks ------------------------------------------------------------------------------------


def make_faultless_world(parts: RealComponentFactory) -> World:
    """Return a simulation without faults."""
    return World(2, parts.size, replace(NO_FAULTS, step_s_max=0.1), parts)


def test_checker_reports_residual_that_changes_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A residual that changes by itself is reported as a violation of I1."""
    from sparkstrom.runtime.theta import Replica

    parts, publish = RealComponentFactory(RunSize(nodes=2), seed=2), Replica.publish

    def forgetful(self: Any) -> Any:
        encoded = publish(self)
        if self.theta.local is not None:
            self.theta.local[0] += 0.01
        else:
            self.add_residual(np.full(self.theta.n_params, 0.01, np.float32))
        return encoded

    monkeypatch.setattr(Replica, "publish", forgetful)
    violations = make_faultless_world(parts).run()
    assert [v for v in violations if v.startswith("I1")]


def test_checker_reports_replica_that_skips_commits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that skips every fifth commit is reported as a violation of I3."""
    from sparkstrom.runtime.theta import Theta

    parts, add = RealComponentFactory(RunSize(nodes=2), seed=2), Theta.add

    def sloppy(self: Theta, hits: Any) -> None:
        if self.commit % 5:
            add(self, hits)

    monkeypatch.setattr(Theta, "add", sloppy)
    violations = make_faultless_world(parts).run()
    assert [v for v in violations if v.startswith("I3")]


def test_small_network_has_one_hidden_layer() -> None:
    """The small network has one hidden layer."""
    assert make_small_network().n_params == INPUTS * HIDDEN + HIDDEN + HIDDEN * CLASSES + CLASSES
