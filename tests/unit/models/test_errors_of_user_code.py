"""Tests that a user's own exception stays as it is, and a library's error becomes one line."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from sparkstrom.base.errors import UsageError, first_line

ROWS, CLASSES = np.ones((4, 2), np.float32), np.array([0, 1, 2, 0])


def raise_user_error(*given: Any) -> Any:
    """Raise a user's exception."""
    raise RuntimeError("the tide is out\nand the boats lie dry")


def keras_on_jax() -> Any:
    """Set Keras' backend, then import and return Keras."""
    pytest.importorskip("optree", reason="keras is not here, which brings it")
    from sparkstrom.models.keras_support import keras

    return keras


def assert_user_error_is_unchanged(check: Any) -> None:
    """Check that the user's exception comes through unchanged."""
    with pytest.raises(RuntimeError) as caught:
        check(ROWS, CLASSES)
    assert str(caught.value) == "the tide is out\nand the boats lie dry"


@pytest.fixture
def make_jax_model() -> Any:
    optax = pytest.importorskip("optax", reason="optax is not here")
    from sparkstrom.models.jax import JaxModel

    def make(apply: Any, optimizer: Any = None) -> Any:
        return JaxModel(
            lambda key: {"w": np.ones((3, 3), np.float32)},
            apply,
            optax.softmax_cross_entropy_with_integer_labels,
            optimizer or optax.sgd(0.1),
        )

    return make


@pytest.fixture
def make_keras_model() -> Any:
    keras = keras_on_jax()
    from sparkstrom.models.keras import KerasModel

    def make(loss: Any, optimizer: Any = "sgd") -> Any:
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
        return KerasModel(model, loss, optimizer)

    return make


def test_jax_keeps_user_exception_and_shortens_library_error(make_jax_model: Any) -> None:
    assert_user_error_is_unchanged(make_jax_model(raise_user_error).check)
    with pytest.raises(UsageError) as caught:
        make_jax_model(lambda params, x: x @ params["w"]).check(ROWS, CLASSES)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 300
    assert caught.value.__cause__ is not None


def test_keras_keeps_user_exception_and_shortens_library_error(make_keras_model: Any) -> None:
    assert_user_error_is_unchanged(make_keras_model(raise_user_error).check)
    with pytest.raises(UsageError) as caught:
        make_keras_model("sparse_categorical_crossentropy").check(
            np.ones((4, 5), np.float32), CLASSES
        )
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 300
    assert "Exception encountered" not in str(caught.value)


def test_user_exception_in_keras_layer_is_unchanged() -> None:
    keras = keras_on_jax()
    from sparkstrom.models.keras import KerasModel

    class Refusing(keras.layers.Layer):
        def call(self, x: Any, training: bool = False) -> Any:
            return raise_user_error() if training else x

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3), Refusing()])
    made = KerasModel(model, "sparse_categorical_crossentropy", "sgd")
    assert_user_error_is_unchanged(made.check)
    assert keras.config.is_traceback_filtering_enabled()


def test_optax_factory_as_optimizer_is_refused_with_call_to_write(make_jax_model: Any) -> None:
    """optax.sgd in place of optax.sgd(...) is refused with the expression to write."""
    optax = pytest.importorskip("optax", reason="optax is not here")
    with pytest.raises(UsageError, match=r"^pass optimizer=optax\.sgd\(1e-3\) instead"):
        make_jax_model(raise_user_error, optax.sgd)
    with pytest.raises(
        UsageError, match=r"^pass optimizer=optax\.adam\(learning_rate=0\.1\) instead"
    ):
        make_jax_model(raise_user_error, functools.partial(optax.adam, learning_rate=0.1))


def test_keras_optimizer_class_is_refused_with_call_to_write(make_keras_model: Any) -> None:
    """A class or partial in place of a Keras optimizer is refused with the expression to write."""
    keras = keras_on_jax()
    made = functools.partial(keras.optimizers.SGD, learning_rate=0.1)
    for given, words in (
        (
            keras.optimizers.Adam,
            r"^pass optimizer=keras\.optimizers\.Adam\(learning_rate=0\.001\) instead",
        ),
        (made, r"^pass optimizer=keras\.optimizers\.SGD\(learning_rate=0\.1\) instead of the"),
    ):
        with pytest.raises(UsageError, match=words):
            make_keras_model("mse", given)


def test_torch_optimizer_object_is_refused_with_factory_to_write() -> None:
    """An optimizer or scheduler object is refused with the factory to write."""
    torch = pytest.importorskip("torch", reason="torch is not here")
    from sparkstrom.models.torch import TorchModel

    module, loss = torch.nn.Linear(2, 3), torch.nn.functional.cross_entropy
    made = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    line = r"pass functools\.partial\(torch\.optim\.SGD, lr=0\.1, momentum=0\.9\) \(import"
    with pytest.raises(UsageError, match=rf"^optimizer must be a factory, not .*SGD.*: {line}"):
        TorchModel(module, loss, made)
    maker = functools.partial(torch.optim.SGD, lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(made, 7)
    line = r"pass functools\.partial\(torch\.optim\.lr_scheduler\.StepLR, step_size=7\) \(import"
    with pytest.raises(UsageError, match=rf"^scheduler must be a factory, not .*StepLR.*: {line}"):
        TorchModel(module, loss, maker, scheduler=scheduler)


def test_first_line_is_cut_and_has_text_for_empty_message() -> None:
    """first_line() takes one line of at most 200 characters, and has a text for none."""
    assert first_line("\n  one\ntwo") == "one"
    assert first_line("") == "no reason"
    assert len(first_line("x" * 5000)) == 200
