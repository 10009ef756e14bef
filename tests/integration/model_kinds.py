"""One model of each kind for the digits data, f32[64] in ten classes, all with momentum."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sparkstrom.base.errors import UsageError
from sparkstrom.models import from_dl4j
from sparkstrom.models.base import Batch, Columns, Flat, State

os.environ.setdefault("KERAS_BACKEND", "jax")  # before Keras is imported
DATA = Path(__file__).parents[1] / "conformance" / "data"
WIDTH, HIDDEN, CLASSES = 64, 16, 10
RATE, MOMENTUM = 0.05, 0.9


class Linear:
    """A user's own model, softmax regression with momentum; it has only the required methods."""

    n_params = WIDTH * CLASSES

    def __init__(self) -> None:
        self._velocity = np.zeros(self.n_params, np.float32)

    def initial(self) -> Flat:
        return np.zeros(self.n_params, np.float32)

    def bind(self, params: Flat) -> None:
        self._params = params

    def predict(self, features: Columns) -> NDArray[np.float32]:
        logits = features @ self._params.reshape(WIDTH, CLASSES)  # type: ignore[operator]
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        made: NDArray[np.float32] = shares / shares.sum(axis=1, keepdims=True)
        return made

    def step(self, batch: Batch) -> float:
        assert isinstance(batch.features, np.ndarray)
        shares, rows = self.predict(batch.features), np.arange(batch.rows)
        loss = -np.log(shares[rows, batch.labels]).mean()  # type: ignore[call-overload]
        shares[rows, batch.labels] -= 1  # type: ignore[call-overload]
        self._velocity *= np.float32(MOMENTUM)
        self._velocity -= np.float32(RATE / batch.rows) * (batch.features.T @ shares).ravel()
        self._params += self._velocity
        return float(loss)

    def check(self, features: Columns, labels: Columns) -> None:
        if not (isinstance(features, np.ndarray) and features.shape[1:] == (WIDTH,)):
            raise UsageError(f"features are not f32[rows, {WIDTH}]")

    def updater_state(self) -> State:
        return {"velocity": self._velocity.copy()}

    def load_updater_state(self, state: State) -> None:
        self._velocity = np.array(state["velocity"], np.float32)

    def layer_of(self, index: int) -> str:
        return "weights"

    def describe(self) -> dict[str, Any]:
        return {"kind": "linear"}


def jax_model(factor: float = 1.0) -> Any:
    """Return a JaxModel with a second collection next to "params", like Flax's for BatchNorm.

    ``factor`` multiplies the outputs; it does not appear in the model's description.
    """
    pytest.importorskip("optax", reason="not installed: pip install 'sparkstrom[jax]'")
    import jax
    import jax.numpy as jnp
    import optax

    from sparkstrom.models.jax import JaxModel

    def init(key: Any) -> Any:
        first, last = jax.random.split(key)
        params = {
            "first": jax.random.normal(first, (WIDTH, HIDDEN)) * 0.2,
            "last": jax.random.normal(last, (HIDDEN, CLASSES)) * 0.2,
        }
        return {"params": params, "seen": {"mean": jnp.zeros(WIDTH)}}

    def apply(variables: Any, x: Any) -> Any:
        params, x = variables["params"], x - variables["seen"]["mean"]
        return factor * jnp.tanh(x @ params["first"]) @ params["last"]

    def apply_train(variables: Any, x: Any, key: Any) -> Any:
        mean = 0.9 * variables["seen"]["mean"] + 0.1 * x.mean(axis=0)
        return apply(variables, x), {"seen": {"mean": mean}}

    loss = optax.softmax_cross_entropy_with_integer_labels
    optimizer = optax.sgd(optax.cosine_decay_schedule(RATE, 500), momentum=MOMENTUM)
    return JaxModel(init, apply, loss, optimizer, seed=2, apply_train=apply_train)


def keras_model() -> Any:
    pytest.importorskip("keras", reason="not installed: pip install 'sparkstrom[keras]'")
    from sparkstrom.models.keras import KerasModel
    from sparkstrom.models.keras_support import keras

    keras.utils.set_random_seed(1)
    layers = [
        keras.Input((WIDTH,)),
        keras.layers.Dense(HIDDEN),
        keras.layers.BatchNormalization(momentum=0.9),
        keras.layers.ReLU(),
        keras.layers.Dense(CLASSES),
    ]
    schedule = keras.optimizers.schedules.CosineDecay(RATE, 500)
    return KerasModel(
        keras.Sequential(layers),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        keras.optimizers.SGD(schedule, momentum=MOMENTUM),
    )


def lightning_model() -> Any:
    pl = pytest.importorskip("pytorch_lightning", reason="pip install 'sparkstrom[lightning]'")
    import torch
    from torch import nn

    from sparkstrom.models.lightning import LightningModel

    class Net(pl.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(WIDTH, HIDDEN),
                nn.BatchNorm1d(HIDDEN),
                nn.ReLU(),
                nn.Linear(HIDDEN, CLASSES),
            )

        def forward(self, x: Any) -> Any:
            return self.layers(x)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            made = torch.optim.SGD(self.parameters(), lr=RATE, momentum=MOMENTUM)
            schedule = torch.optim.lr_scheduler.StepLR(made, 10, gamma=0.9)
            return {
                "optimizer": made,
                "lr_scheduler": {"scheduler": schedule, "interval": "step"},
            }

    torch.manual_seed(3)
    return LightningModel(Net())


def dl4j_dense() -> Any:
    """Return a dense network that was trained in DL4J, with Adam's state of that training."""
    return from_dl4j(DATA / "dl4j-mlp0.zip")


def dl4j_module() -> Any:
    """Return a network from DL4J with Nesterovs, BatchNormalization and dropout."""
    pytest.importorskip("torch", reason="not installed: pip install 'sparkstrom[torch]'")
    return from_dl4j(DATA / "dl4j-mlp1.zip")


KINDS: dict[str, Any] = {
    "jax": jax_model,
    "keras": keras_model,
    "lightning": lightning_model,
    "dl4j-dense": dl4j_dense,
    "dl4j-module": dl4j_module,
    "own": Linear,
}
BY_CHANCE = ("dl4j-module",)  # with dropout: only two whole fits are equal


def select_kinds(*kinds: str) -> tuple[str, ...]:
    """Return ``kinds``, or all kinds if the environment has ``SPARKSTROM_KINDS=all``."""
    return tuple(KINDS) if os.environ.get("SPARKSTROM_KINDS") == "all" else kinds


def by_value() -> Any:
    """Return this module, to be pickled by value, like functions and classes of a script."""
    return sys.modules[__name__]
