"""Tests of JaxModel on executors: its pickle, its continued state, and a task's CPUs."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from sparkstrom.base.errors import UsageError

pytest.importorskip("jax", reason="jax is not installed: pip install 'sparkstrom[jax]'")
optax = pytest.importorskip("optax", reason="optax is not installed: 'sparkstrom[jax]'")
pytest.importorskip("pyspark.cloudpickle", reason="what ships is pickled by Spark's")
import jax.numpy as jnp  # noqa: E402
from pyspark import cloudpickle  # noqa: E402

from sparkstrom.models.jax import JaxModel  # noqa: E402
from tests.unit.models.mlp_in_jax import batch, bound, cross_entropy, make, pickle_round_trip  # noqa: E402


def make_mixed_state_optimizer() -> Any:
    """Return an optimizer whose state has scalars, a random key and bfloat16 arrays."""
    noise = optax.add_noise(eta=0.01, gamma=0.55, key=7)
    return optax.MultiSteps(optax.chain(noise, optax.adam(0.05, mu_dtype=jnp.bfloat16)), 2)


def test_unpickled_model_continues_from_optimizer_state() -> None:
    """A model that loads parameters and optimizer state takes the same steps as the original."""
    model = make(make_mixed_state_optimizer())
    params = bound(model)
    for i in range(3):
        model.step(batch(seed=i))
    state = model.updater_state()
    assert all(isinstance(v, np.ndarray | int | float) for v in state.values())
    other, copy = pickle_round_trip(model), params.copy()
    other.bind(copy)
    other.load_updater_state(state)
    for i in range(3, 6):
        assert model.step(batch(seed=i)) == other.step(batch(seed=i))
    np.testing.assert_array_equal(params, copy)
    for key, value in model.updater_state().items():
        np.testing.assert_array_equal(value, other.updater_state()[key])


def test_returned_optimizer_state_is_not_changed_by_later_step() -> None:
    """A later step does not change a state that updater_state() returned."""
    model = make()
    bound(model)
    model.step(batch())
    state = model.updater_state()
    before = {name: np.array(value) for name, value in state.items()}
    model.step(batch())
    for name, value in state.items():
        np.testing.assert_array_equal(value, before[name])


def test_state_of_another_optimizer_is_refused() -> None:
    model, other = make(optax.sgd(0.1, momentum=0.9)), make()
    bound(other)
    with pytest.raises(UsageError, match="another model or optimizer"):
        model.load_updater_state(other.updater_state())
    state = other.updater_state() | {"0/mu/out/bias": np.zeros(4, np.float32)}
    with pytest.raises(UsageError, match=r"0/mu/out/bias .* shape \(4,\)"):
        other.load_updater_state(state)


def test_cloudpickle_contains_lambdas_but_no_parameters() -> None:
    scale = 2.0
    model = JaxModel(
        lambda key: jnp.zeros((500, 500)),
        lambda params, features: scale * (features @ params[:6, :3]),
        cross_entropy,
        optax.adam(0.1),
    )
    params = bound(model)
    model.step(batch())
    assert len(cloudpickle.dumps(model)) < 50_000  # without the megabyte of parameters
    other, copy = pickle_round_trip(model), params.copy()
    other.bind(copy)
    np.testing.assert_array_equal(other.predict(batch().features), model.predict(batch().features))


def test_plain_pickle_fails_at_optax_closures() -> None:
    """Plain pickle, unlike Spark's cloudpickle, fails at optax's closures."""
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(make())


IN_A_TASK = """
import os, sys
from pyspark import cloudpickle
from sparkstrom.models.base import Share
model = cloudpickle.loads(bytes.fromhex(sys.stdin.read()))
{place}
model.bind(model.initial())
names = [open(f"/proc/self/task/{{t}}/comm").read() for t in os.listdir("/proc/self/task")]
import jax
print(sum("XLAEigen" in name for name in names), jax.devices()[0].platform)
"""


@pytest.mark.parametrize("place", ["", "model.place(Share(threads=3, gpu=None, seed=1))"])
def test_xla_has_as_many_threads_as_its_task(place: str) -> None:
    """XLA has as many threads as the Share, or as OMP_NUM_THREADS (1) if there is none."""
    environment = {k: v for k, v in os.environ.items() if k not in ("NPROC", "JAX_PLATFORMS")}
    done = subprocess.run(
        [sys.executable, "-c", IN_A_TASK.format(place=place)],
        env=environment | {"OMP_NUM_THREADS": "1"},
        input=cloudpickle.dumps(make()).hex(),
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["3" if place else "1", "cpu"], done.stderr
