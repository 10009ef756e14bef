"""Tests that an object that is not a model is refused, with the name of the right wrapper."""

from __future__ import annotations

import os
from typing import Any

import pytest

from sparkstrom import ParallelInference, ParallelWrapper
from sparkstrom.base.errors import UsageError
from sparkstrom.ml import SparkstromEstimator
from sparkstrom.models import DenseNetwork
from sparkstrom.models.base import explain_invalid_model

os.environ.setdefault("KERAS_BACKEND", "jax")  # before Keras is imported


def lightning_module() -> Any:
    return pytest.importorskip("pytorch_lightning").LightningModule()


def keras_model() -> Any:
    return pytest.importorskip("keras").Sequential()


def torch_module() -> Any:
    return pytest.importorskip("torch").nn.Linear(2, 1)


@pytest.mark.parametrize(
    ("made", "wrapper"),
    [
        (torch_module, "TorchModel of sparkstrom.models.torch"),
        (lightning_module, "LightningModel of sparkstrom.models.lightning"),
        (keras_model, "KerasModel of sparkstrom.models.keras"),
        (lambda: 3, "pass a model of sparkstrom.models"),
    ],
)
def test_the_wrapper_is_named(made: Any, wrapper: str) -> None:
    assert wrapper in str(explain_invalid_model(made()))


def test_a_class_is_not_its_object() -> None:
    """A model's class is refused, with its constructor as the remedy."""
    assert explain_invalid_model(DenseNetwork([2, 2])) is None
    assert explain_invalid_model(DenseNetwork) == (
        "model is the class DenseNetwork: pass an object, DenseNetwork(...)"
    )


@pytest.mark.parametrize(
    "call",
    [
        ParallelWrapper,
        ParallelInference,
        lambda model: SparkstromEstimator(model=model),
    ],
    ids=["ParallelWrapper", "ParallelInference", "SparkstromEstimator"],
)
def test_it_is_said_where_it_is_given(call: Any) -> None:
    """Each entry point refuses a class in place of an object."""
    with pytest.raises(UsageError, match="model is the class DenseNetwork"):
        call(DenseNetwork)
