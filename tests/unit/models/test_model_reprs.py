"""Tests that reprs of models show differences, such as learning rates after a search."""

from __future__ import annotations

from functools import partial

import numpy as np
import optax
import pytest
import torch
from torch import nn

from sparkstrom.models import Adam, DenseNetwork
from sparkstrom.models.jax import JaxModel
from sparkstrom.models.torch import TorchModel


def test_repr_of_dense_network_evaluates_to_equal_network() -> None:
    model = DenseNetwork([4, 3, 2], updater=Adam(0.003), seed=7)
    assert eval(repr(model)).describe() == model.describe()


@pytest.mark.parametrize("optimizer", [partial(torch.optim.Adam, lr=0.003), torch.optim.Adam])
def test_repr_of_torch_model_has_optimizer_and_rate(optimizer: type[torch.optim.Adam]) -> None:
    model = TorchModel(nn.Linear(4, 2), nn.CrossEntropyLoss(), optimizer)
    rate = "0.003" if isinstance(optimizer, partial) else "0.001"
    text = f"TorchModel(Linear, 10 parameters, loss=CrossEntropyLoss, optimizer=Adam(lr={rate}, "
    assert repr(model).startswith(text)


def test_repr_has_rate_of_each_parameter_group() -> None:
    model = TorchModel(
        nn.Linear(4, 2),
        nn.CrossEntropyLoss(),
        partial(torch.optim.SGD, lr=0.1),
        groups=lambda named: [
            {"params": [named["weight"]], "lr": 0.5},
            {"params": [named["bias"]]},
        ],
    )
    assert "SGD(lr=0.5 and 0.1, " in repr(model)


@pytest.mark.parametrize("optimizer", [optax.sgd(0.003), optax.adam(0.003)])
def test_repr_of_jax_model_has_learning_rate(optimizer: optax.GradientTransformation) -> None:
    model = JaxModel(
        lambda key: {"w": np.zeros((4, 2), np.float32)},
        lambda params, x: x @ params["w"],
        optax.softmax_cross_entropy_with_integer_labels,
        optimizer,
        outputs="logits",
    )
    assert repr(model) == "JaxModel(8 parameters, learning_rate=0.003, seed=0)"
