"""Tests that an object that is not a model is refused, with the name of the right wrapper."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
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
def test_unwrapped_model_error_names_wrapper(made: Any, wrapper: str) -> None:
    assert wrapper in str(explain_invalid_model(made()))


def test_model_class_error_shows_constructor_call() -> None:
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
def test_every_entry_point_refuses_model_class(call: Any) -> None:
    """Each entry point refuses a class in place of an object."""
    with pytest.raises(UsageError, match="model is the class DenseNetwork"):
        call(DenseNetwork)


class Regressor(DenseNetwork):
    """A model with an unknown kind of outputs."""

    kind = "regression"

    @property
    def outputs(self) -> str:
        return self.kind


def test_unknown_output_kind_is_refused_before_training() -> None:
    """``outputs`` is checked when a wrapper is made, and again before each fit."""
    model = Regressor([2, 2])
    with pytest.raises(UsageError, match="outputs is 'regression': it must be one of"):
        ParallelWrapper(model, 1, progress=False)
    model.kind = "values"
    with ParallelWrapper(model, 1, progress=False) as wrapper:
        model.kind = "logit"
        with pytest.raises(UsageError, match="outputs is 'logit': it must be one of"):
            wrapper.fit((np.zeros((4, 2), np.float32), np.zeros((4, 2), np.float32)), run_log="")
