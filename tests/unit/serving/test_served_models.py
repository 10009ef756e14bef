"""Tests that each kind of model is served with its trained parameters and statistics."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sparkstrom import ParallelInference
from sparkstrom.models import DenseNetwork
from sparkstrom.models.base import Batch, count_rows
from sparkstrom.models.output_interpretation import select_rows
from sparkstrom.serving import ModelPool
from tests.integration.model_kinds import KINDS, WIDTH
from tests.unit.serving.conftest import DEADLINE_S

FEATURES = np.random.default_rng(0).random((40, WIDTH), np.float32)
LABELS = np.arange(40) % 10
MODES = ["sequential", "batched", "inplace"]


def dense() -> Any:
    return DenseNetwork([WIDTH, 6, 10], seed=2)


def torch_model() -> Any:
    torch = pytest.importorskip("torch")
    from sparkstrom.models.torch import TorchModel

    torch.manual_seed(0)
    layers = [
        torch.nn.Linear(WIDTH, 6),
        torch.nn.BatchNorm1d(6),
        torch.nn.ReLU(),
        torch.nn.Linear(6, 10),
    ]
    module = torch.nn.Sequential(*layers)
    return TorchModel(module, torch.nn.CrossEntropyLoss(), partial(torch.optim.SGD, lr=0.1))


MAKERS = {"dense": dense, "torch": torch_model} | KINDS


@pytest.fixture(scope="module")
def trained() -> Any:
    """Return ``trained(kind)``, which trains a model once and returns it with its parameters."""
    made: dict[str, Any] = {}

    def get(kind: str) -> Any:
        if kind not in made:
            model = MAKERS[kind]()
            parameters = model.initial()
            model.bind(parameters)
            for _ in range(3):
                model.step(Batch(FEATURES, LABELS))
            made[kind] = model, parameters
        return made[kind]

    return get


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("mode", MODES)
def test_concurrent_answers_are_of_old_or_new_model(trained: Any, kind: str, mode: str) -> None:
    """Each answer is of one model, the old or the new, while the model is replaced."""
    model, parameters = trained(kind)
    others = (parameters * np.float32(1.5)).astype(np.float32)
    wanted = []
    for values in (parameters, others):
        model.bind(values.copy())
        wanted.append(np.asarray(model.predict(FEATURES)))
    assert np.abs(wanted[0] - wanted[1]).max() > 1e-3
    network = SimpleNamespace(model=model, parameters=parameters)  # like a trained one
    done, seen = threading.Event(), set[int]()

    def ask(client: int) -> None:
        while not done.is_set():
            found = inference.output(FEATURES[client : client + 3])
            near = [
                np.allclose(found, one[client : client + 3], rtol=1e-4, atol=1e-5) for one in wanted
            ]
            assert any(near), (client, found, wanted)
            seen.add(near.index(True))

    with (
        ParallelInference(network, inference_mode=mode) as inference,
        ThreadPoolExecutor(8) as clients,
    ):
        model.bind(np.zeros_like(parameters))  # the served copy is independent
        found = list(clients.map(inference.output, np.split(FEATURES, 40)))
        assert np.concatenate(found) == pytest.approx(wanted[0], rel=1e-4, abs=1e-5)
        asked = [clients.submit(ask, i) for i in range(8)]
        try:
            inference.update_model(model, parameters=others)
            found = [inference.output(FEATURES)]
        finally:
            done.set()
        for one in asked:
            one.result(DEADLINE_S)
    assert np.concatenate(found) == pytest.approx(wanted[1], rel=1e-4, abs=1e-5)


def merging_model() -> Any:
    """Return a model with a LoRA layer, whose evaluation mode merges one weight into another."""
    torch = pytest.importorskip("torch")
    from sparkstrom.models.torch import TorchModel

    class Merging(torch.nn.Linear):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(WIDTH, 3)
            self.added, self.is_merged = torch.nn.Parameter(torch.ones(3, WIDTH)), False

        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            if mode == self.is_merged:
                self.weight.data += self.added.data * (-1 if mode else 1)
                self.is_merged = not mode
            return self

        def forward(self, x: Any) -> Any:
            meeting.wait(DEADLINE_S)  # both instances are merged now
            weight = self.weight if self.is_merged else self.weight + self.added
            result = torch.nn.functional.linear(x, weight, self.bias)
            meeting.wait(DEADLINE_S)
            return result

    torch.manual_seed(0)
    return TorchModel(
        torch.nn.Sequential(Merging()), torch.nn.MSELoss(), partial(torch.optim.SGD, lr=0.1)
    )


meeting = threading.Barrier(2)


@pytest.mark.parametrize("mode", ["sequential", "inplace"])
def test_model_copies_that_merge_weights_share_no_parameters(mode: str) -> None:
    """Weights that one instance merges for its prediction are not those of another one."""
    model = merging_model()
    parameters = model.initial()
    layer = model.module[0]
    weight = (layer.weight + layer.added).detach().numpy()
    wanted = FEATURES[:1] @ weight.T + layer.bias.detach().numpy()
    with (
        ParallelInference(model, parameters=parameters, inference_mode=mode) as inference,
        ThreadPoolExecutor(2) as clients,
    ):
        found = list(clients.map(inference.output, [FEATURES[:1]] * 8))
    np.testing.assert_allclose(np.concatenate(found), np.repeat(wanted, 8, axis=0), rtol=1e-4)


def test_model_copies_with_harmless_train_override_share_parameters() -> None:
    """A module may override train() without changing parameters, as those of transformers do."""
    torch = pytest.importorskip("torch")
    from sparkstrom.models.torch import TorchModel

    class Counting(torch.nn.Linear):  # type: ignore[misc]
        calls = 0

        def train(self, mode: bool = True) -> Any:
            self.calls += 1
            return super().train(mode)

    model = TorchModel(Counting(2, 1), torch.nn.MSELoss(), partial(torch.optim.SGD, lr=0.1))
    pool = ModelPool(model, None, 3)
    addresses = {each.module.weight.data_ptr() for each in pool.models}  # type: ignore[attr-defined]
    assert addresses == {pool.parameters.ctypes.data}


def jax_of_two_inputs() -> Any:
    jax = pytest.importorskip("jax")
    optax = pytest.importorskip("optax")
    from sparkstrom.models.jax import JaxModel

    def apply(weights: Any, features: Any) -> Any:
        logits = features["a"] @ weights["a"] + features["b"] @ weights["b"]
        return {"logits": logits, "first": features["a"][:, 0]}

    return JaxModel(
        lambda key: {
            "a": jax.random.normal(key, (4, 3)),
            "b": jax.random.normal(key, (2, 3)),
        },
        apply,
        lambda outputs, labels: (outputs["logits"] ** 2).mean(axis=1),
        optax.sgd(0.1, momentum=0.9),
    )


def keras_of_two_inputs() -> Any:
    pytest.importorskip("keras")
    from sparkstrom.models.keras import KerasModel
    from sparkstrom.models.keras_support import keras

    a, b = keras.Input((4,), name="a"), keras.Input((2,), name="b")
    joined = keras.layers.Concatenate()([a, b])
    outputs = [keras.layers.Dense(3)(joined), keras.layers.Dense(1)(b)]
    model = keras.Model([a, b], outputs)
    return KerasModel(model, ["mse", "mse"], keras.optimizers.SGD(0.1, momentum=0.9))


@pytest.mark.parametrize("make", [jax_of_two_inputs, keras_of_two_inputs])
@pytest.mark.parametrize("mode", MODES)
def test_inputs_and_outputs_in_containers_are_split_by_rows(make: Any, mode: str) -> None:
    """Dictionaries and tuples of inputs and outputs are divided and joined by rows."""
    model = make()
    model.bind(model.initial())
    parts = FEATURES[:, :4], FEATURES[:, 4:6]
    features: Any = parts if make is keras_of_two_inputs else dict(zip("ab", parts, strict=True))
    wanted = model.predict(features)
    with (
        ParallelInference(model, inference_mode=mode) as inference,
        ThreadPoolExecutor(8) as clients,
    ):
        each = [select_rows(features, slice(i, i + 1)) for i in range(count_rows(features))]
        found = list(clients.map(inference.output, each))
    for name in wanted if isinstance(wanted, dict) else range(len(wanted)):
        rows = np.concatenate([one[name] for one in found])
        assert rows == pytest.approx(wanted[name], rel=1e-4, abs=1e-5)
