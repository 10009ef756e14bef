"""Tests of 20 steps of a KerasModel against Keras' own, in copies and after pickling."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.models.base import Batch, buffers_to_save

os.environ.setdefault("KERAS_BACKEND", "jax")  # before Keras is imported
pytest.importorskip("jax", reason="jax is not installed: pip install 'sparkstrom[keras]'")
pytest.importorskip("keras", reason="keras is not installed: pip install 'sparkstrom[keras]'")

from sparkstrom.models.keras import KerasModel
from sparkstrom.models.keras_support import _refuse_tensorflow_layers, keras

CHANCE = np.random.default_rng(0)
X = (CHANCE.normal(size=(32, 4)) * [1, 10, 100, 1000] + [5, -50, 500, 10000]).astype(np.float32)
SMALL = CHANCE.normal(size=(32, 4)).astype(np.float32)
Y = CHANCE.integers(0, 3, 32)
ONE_HOT = np.eye(3, dtype=np.float32)[Y]
SPARSE = keras.losses.SparseCategoricalCrossentropy


def plain() -> Any:
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)]
    )


def normalized() -> Any:
    keras.utils.set_random_seed(1)
    layer = keras.layers.Normalization()
    layer.adapt(X)
    return keras.Sequential([keras.Input((4,)), layer, keras.layers.Dense(3)])


def partly_frozen() -> Any:
    keras.utils.set_random_seed(1)
    backbone = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.BatchNormalization()]
    )
    backbone.trainable = False
    return keras.Sequential([keras.Input((4,)), backbone, keras.layers.Dense(3)])


def binned() -> Any:
    """Return a network with a Discretization layer."""
    keras.utils.set_random_seed(1)
    layer = keras.layers.Discretization(num_bins=4, output_mode="one_hot")
    layer.reset_state()  # adapt() needs TensorFlow
    layer.update_state(SMALL[:, :1])
    layer.finalize_state()
    inputs = keras.Input((4,))
    joined = keras.layers.Concatenate()([inputs, layer(inputs[:, :1])])
    return keras.Model(inputs, keras.layers.Dense(3)(joined))


def in_bfloat16() -> Any:
    keras.utils.set_random_seed(1)
    policy = "mixed_bfloat16"
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(8, "tanh", dtype=policy),
            keras.layers.Dense(3, dtype=policy),
        ]
    )


def regularized() -> Any:
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.Dense(
                8,
                "relu",
                kernel_regularizer=keras.regularizers.L2(0.01),
                kernel_constraint=keras.constraints.MaxNorm(0.5),
                activity_regularizer=keras.regularizers.L1(0.001),
            ),
            keras.layers.Dense(3),
        ]
    )


def decayed(**excluded: Any) -> Any:
    """Return AdamW that excludes these variables from weight decay."""
    optimizer = keras.optimizers.AdamW(0.05, weight_decay=1.0)
    optimizer.exclude_from_weight_decay(**excluded)
    return optimizer


def sgd() -> Any:
    return keras.optimizers.SGD(0.05, momentum=0.9)


CASES: dict[str, tuple[Callable[[], Any], Any, Callable[[], Any], np.ndarray, np.ndarray]] = {
    "plain": (plain, SPARSE(from_logits=True), sgd, SMALL, Y),
    "ignore_class": (plain, SPARSE(from_logits=True, ignore_class=0), sgd, SMALL, Y),
    "label smoothing": (
        plain,
        keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.2),
        sgd,
        SMALL,
        ONE_HOT,
    ),
    "huber": (plain, keras.losses.Huber(), sgd, SMALL, ONE_HOT),
    "no decay of biases": (
        plain,
        SPARSE(from_logits=True),
        lambda: decayed(var_names=["bias"]),
        SMALL,
        Y,
    ),
    "normalization": (normalized, SPARSE(from_logits=True), sgd, X, Y),
    "frozen": (partly_frozen, SPARSE(from_logits=True), sgd, SMALL, Y),
    "penalties": (regularized, SPARSE(from_logits=True), sgd, SMALL, Y),
    "discretization": (binned, SPARSE(from_logits=True), sgd, SMALL, Y),
    "bfloat16": (in_bfloat16, SPARSE(from_logits=True), sgd, SMALL, Y),
    "bfloat16, a name": (in_bfloat16, "mse", sgd, SMALL, ONE_HOT),
    "doubles": (plain, SPARSE(from_logits=True), sgd, SMALL, Y.astype(np.float64)),
    "accumulated": (
        plain,
        SPARSE(from_logits=True),
        lambda: keras.optimizers.Adam(
            keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5), gradient_accumulation_steps=3
        ),
        SMALL,
        Y,
    ),
    "clipped": (
        plain,
        SPARSE(from_logits=True),
        lambda: keras.optimizers.Adam(0.05, global_clipnorm=0.1),
        SMALL,
        Y,
    ),
    "schedule": (
        plain,
        SPARSE(from_logits=True),
        lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 5, 0.5)),
        SMALL,
        Y,
    ),
}


def train_20_steps(model: KerasModel, features: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the parameters after 20 steps."""
    params = model.initial()
    model.bind(params)
    for _ in range(20):
        model.step(Batch(features, labels))
    return params


@pytest.mark.parametrize("name", CASES)
def test_twenty_steps_of_model_and_copies_equal_keras(name: str) -> None:
    """The model, a deep copy and an unpickled copy take the steps of train_on_batch."""
    make, loss, optimizer, features, labels = CASES[name]
    reference = make()
    reference.compile(loss=loss, optimizer=optimizer())
    for _ in range(20):
        reference.train_on_batch(features, labels)
    expected = np.concatenate([np.asarray(v).ravel() for v in reference.trainable_variables])
    model = KerasModel(make(), loss, optimizer())
    initial = model.initial()
    travelled = pickle.loads(pickle.dumps(model))
    travelled.start_from(initial)
    for made in (model, copy.deepcopy(model), travelled):
        np.testing.assert_allclose(
            train_20_steps(made, features, labels), expected, rtol=0, atol=2e-4
        )


@pytest.mark.parametrize("name", CASES)
def test_model_from_description_and_buffers_predicts_the_same(name: str) -> None:
    make, loss, optimizer, features, labels = CASES[name]
    model = KerasModel(make(), loss, optimizer())
    params = train_20_steps(model, features, labels)
    again = KerasModel.from_description(model.describe())
    again.load_buffers_bytes(buffers_to_save(model))
    again.bind(params.copy())
    np.testing.assert_allclose(again.predict(features), model.predict(features), atol=1e-5)
    again.step(Batch(features, labels))
    again.load_updater_state(model.updater_state())
    continued = again.initial()
    continued[:] = params
    again.bind(continued)
    again.load_buffers_bytes(model.buffers_bytes())
    again.step(Batch(features, labels))
    model.step(Batch(features, labels))
    np.testing.assert_allclose(continued, params, rtol=0, atol=1e-5)


def test_variables_excluded_from_weight_decay_are_kept_in_copy() -> None:
    """A copy decays the same variables; excluding a variable of another model is refused."""
    reference = plain()
    optimizer = decayed(var_list=[reference.trainable_variables[0]])
    model = KerasModel(reference, SPARSE(from_logits=True), optimizer)
    wanted = plain()
    wanted.compile(
        loss=SPARSE(from_logits=True), optimizer=decayed(var_list=[wanted.trainable_variables[0]])
    )
    for _ in range(20):
        wanted.train_on_batch(SMALL, Y)
    expected = np.concatenate([np.asarray(v).ravel() for v in wanted.trainable_variables])
    np.testing.assert_allclose(
        train_20_steps(copy.deepcopy(model), SMALL, Y), expected, rtol=0, atol=2e-4
    )
    other = decayed(var_list=[plain().trainable_variables[0]])
    with pytest.raises(UsageError, match="exclude_from_weight_decay"):
        KerasModel(plain(), SPARSE(from_logits=True), other)


class OwnStep(keras.Model):  # type: ignore[misc]
    """A model whose loss is computed by a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(3)
        self.build((None, 4))

    def build(self, shape: Any) -> None:
        self.dense.build(shape)
        self.built = True

    def call(self, inputs: Any) -> Any:
        return self.dense(inputs)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return 2 * super().compute_loss(*args, **kwargs)


class OwnCall(keras.losses.Loss):  # type: ignore[misc]
    """A loss that bypasses ``call``."""

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return 0.0


def test_override_that_training_would_ignore_is_refused_by_name() -> None:
    """Overridden methods and options that training here would ignore are refused by name."""
    with pytest.raises(UsageError, match="OwnStep overrides compute_loss"):
        KerasModel(OwnStep(), "mse", "sgd")
    with pytest.raises(UsageError, match="OwnCall overrides __call__"):
        KerasModel(plain(), OwnCall(), "sgd")
    with pytest.raises(UsageError, match="loss_scale_factor"):
        KerasModel(plain(), "mse", keras.optimizers.SGD(0.1, loss_scale_factor=8.0))


class Hyperbola(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """A schedule of the user's own."""

    def __call__(self, step: Any) -> Any:
        return 0.1 / (1 + step)

    def get_config(self) -> dict[str, Any]:
        return {}


def test_option_set_on_variable_itself_is_refused_by_name() -> None:
    """A regularizer, constraint or ``trainable`` set on a variable itself is refused."""
    penalized, still, clipped = plain(), plain(), plain()
    penalized.trainable_variables[0].regularizer = keras.regularizers.L2(0.1)
    with pytest.raises(UsageError, match=r"the regularizer of its variable .*kernel was set on"):
        KerasModel(penalized, SPARSE(from_logits=True), "sgd")
    clipped.trainable_variables[1].constraint = keras.constraints.NonNeg()
    with pytest.raises(UsageError, match=r"the constraint of its variable .*pass it to its layer"):
        KerasModel(clipped, SPARSE(from_logits=True), "sgd")
    still.layers[0].bias.trainable = False
    with pytest.raises(UsageError, match=r"the trainable of its variable .*bias.* its layer inst"):
        KerasModel(still, SPARSE(from_logits=True), "sgd")


def test_loss_weights_and_float16_loss_scaling_are_refused() -> None:
    """loss_weights and float16's loss scaling, which Keras' trainer applies, are refused."""
    compiled = plain()
    compiled.compile("sgd", loss=["mse"], loss_weights=[2.0])
    with pytest.raises(UsageError, match=r"compiled with loss_weights=\[2.0\]"):
        KerasModel(compiled, "mse", "sgd")
    keras.config.set_dtype_policy("mixed_float16")
    try:
        scaled = plain()
    finally:
        keras.config.set_dtype_policy("float32")
    with pytest.raises(UsageError, match=r"mixed_float16, for which Keras scales the loss"):
        KerasModel(scaled, "mse", "sgd")


def test_optimizer_with_steps_taken_is_refused() -> None:
    trained, optimizer = plain(), keras.optimizers.Adam(0.1)
    trained.compile(optimizer, loss=SPARSE(from_logits=True))
    trained.train_on_batch(SMALL, Y)
    with pytest.raises(UsageError, match=r"adam.* has taken 1 steps already"):
        KerasModel(trained, SPARSE(from_logits=True), optimizer)
    again = type(optimizer).from_config(optimizer.get_config())
    KerasModel(trained, SPARSE(from_logits=True), again)


def test_a_function_as_learning_rate_is_refused() -> None:
    with pytest.raises(UsageError, match=r"a function as its learning rate"):
        KerasModel(plain(), "mse", keras.optimizers.SGD(lambda: 0.1))


def test_tensorflow_layer_is_refused() -> None:
    layer = object.__new__(keras.layers.IntegerLookup)  # its constructor needs TensorFlow
    object.__setattr__(layer, "name", "codes")
    with pytest.raises(UsageError, match=r"codes is a IntegerLookup, which computes with Tensor"):
        _refuse_tensorflow_layers([layer])


def test_custom_schedule_survives_pickling() -> None:
    model = KerasModel(plain(), SPARSE(from_logits=True), keras.optimizers.SGD(Hyperbola()))
    reference = plain()
    reference.compile(keras.optimizers.SGD(Hyperbola()), loss=SPARSE(from_logits=True))
    for _ in range(20):
        reference.train_on_batch(SMALL, Y)
    expected = np.concatenate([np.asarray(v).ravel() for v in reference.trainable_variables])
    twin = pickle.loads(pickle.dumps(model))
    twin.start_from(model.initial())
    np.testing.assert_allclose(train_20_steps(twin, SMALL, Y), expected, rtol=0, atol=2e-4)
    assert "model" not in model.describe()


@pytest.mark.parametrize("kind", [np.int64, np.float64])
def test_class_labels_are_checked_as_integers_and_doubles(kind: Any) -> None:
    labels = Y.astype(kind)
    labels[3] = -1
    KerasModel(plain(), SPARSE(from_logits=True, ignore_class=-1), "sgd").check(SMALL, labels)
    with pytest.raises(UsageError, match=r"row 3: label is -1(\.0)?: labels must"):
        KerasModel(plain(), SPARSE(from_logits=True), "sgd").check(SMALL, labels)


def test_minibatch_of_zero_weights_changes_no_parameter() -> None:
    """Momentum changes no parameter without a row that counts."""
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model = KerasModel(plain(), SPARSE(from_logits=True), optimizer)
    params = model.initial()
    model.bind(params)
    model.step(Batch(SMALL, Y))
    before = params.copy()
    assert model.step(Batch(SMALL, Y, np.zeros(32, np.float32))) == 0
    np.testing.assert_array_equal(params, before)
