"""Tests of KerasModel: steps as train_on_batch's, state, pickles, descriptions, refusals."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.checkpoint.saved_model import check_same_model
from sparkstrom.models.base import (
    Batch,
    Buffered,
    Exporting,
    FlatModel,
    Measured,
    Placeable,
    Share,
    add_frozen_weights,
    from_description,
)

os.environ.setdefault("KERAS_BACKEND", "jax")  # before Keras is imported
pytest.importorskip("jax", reason="jax is not installed: pip install 'sparkstrom[keras]'")
pytest.importorskip("keras", reason="keras is not installed: pip install 'sparkstrom[keras]'")
from sparkstrom.models.keras import KerasModel
from sparkstrom.models.keras_support import keras

cloudpickle = pytest.importorskip("pyspark.cloudpickle", reason="what ships is pickled by Spark's")
layers = keras.layers
MEAN = keras.losses.MeanSquaredError()
LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@pytest.fixture(autouse=True)
def _threads_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore NPROC, which ``place`` sets, after each test."""
    monkeypatch.setenv("NPROC", os.environ.get("NPROC", "2"))


def network(*between: Any, inputs: int = 6) -> Any:
    keras.utils.set_random_seed(3)
    parts = [layers.Dense(5, activation="tanh", name="hidden"), *between, layers.Dense(3)]
    return keras.Sequential([keras.Input((inputs,)), *parts], name="mlp")


def batch(rows: int = 8, seed: int = 3, *, weighted: bool = False) -> Batch:
    random = np.random.default_rng(seed)
    features = random.normal(size=(rows, 6)).astype(np.float32)
    weights = random.integers(0, 3, rows).astype(np.float32) if weighted else None
    return Batch(features, random.integers(0, 3, rows), weights)


def bound(model: KerasModel) -> Any:
    params = model.initial()
    model.bind(params)
    return params


def pickle_round_trip(model: KerasModel) -> KerasModel:
    """Return the model as an executor gets it: through Spark's cloudpickle."""
    return cloudpickle.loads(cloudpickle.dumps(model))


def test_steps_equal_keras_train_on_batch() -> None:
    """Steps equal Keras' own with BatchNorm, a penalty and a schedule."""
    module = network(layers.BatchNormalization(), layers.Dense(4, kernel_regularizer="l2"))
    adam = keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(0.05, 10), clipnorm=1.0)
    model = KerasModel(module, LOGITS, adam)
    params = bound(model)
    module.compile(adam, LOGITS)
    for i in range(4):
        rows = batch(seed=i)
        model.step(rows)
        module.train_on_batch(rows.features, rows.labels)
    own = np.concatenate([v.numpy().reshape(-1) for v in module.trainable_variables])
    np.testing.assert_allclose(params, own, rtol=1e-4, atol=1e-5)
    statistics = np.concatenate([v.numpy() for v in module.non_trainable_variables])
    np.testing.assert_allclose(
        np.frombuffer(model.buffers_bytes(), np.float32), statistics, rtol=1e-4, atol=1e-6
    )
    np.testing.assert_allclose(
        model.predict(batch().features), module.predict(batch().features, verbose=0), atol=1e-5
    )
    assert model.layer_of(0) == pickle_round_trip(model).layer_of(0) == "hidden/kernel"


def test_keras_model_implements_protocols_and_infers_outputs() -> None:
    model = KerasModel(network(), LOGITS, "sgd")
    for protocol in (FlatModel, Measured, Buffered, Placeable):
        assert isinstance(model, protocol)
    assert model.n_params == 6 * 5 + 5 + 5 * 3 + 3
    assert model.outputs == "logits"
    assert KerasModel(network(), "mse", "sgd").outputs == "values"
    assert KerasModel(network(), "sparse_categorical_crossentropy", "sgd").outputs == (
        "probabilities"
    )


@pytest.mark.parametrize("weighted", [False, True])
def test_loss_weighs_rows_and_changes_no_parameter(weighted: bool) -> None:
    model = KerasModel(network(layers.Dropout(0.5)), LOGITS, "sgd")
    params = bound(model)
    rows = batch(weighted=weighted)
    weights = np.ones(8) if rows.weights is None else rows.weights
    each = np.asarray(LOGITS.call(rows.labels, model.predict(rows.features)))
    loss, weight = model.loss(rows)
    assert loss == pytest.approx(float(each @ weights), rel=1e-5)
    assert weight == weights.sum()
    np.testing.assert_array_equal(params, model.initial())
    plain = KerasModel(network(), LOGITS, "sgd")
    bound(plain)
    assert plain.step(rows) == pytest.approx(loss / weight, rel=1e-5)


def test_unpickled_model_continues_from_state_and_buffers() -> None:
    """A copy that loads parameters, state and buffers takes the same steps."""
    model = KerasModel(network(layers.BatchNormalization()), LOGITS, keras.optimizers.Adam(0.05))
    params = bound(model)
    for i in range(3):
        model.step(batch(seed=i))
    other, copy, state = pickle_round_trip(model), params.copy(), model.updater_state()
    assert all(isinstance(v, np.ndarray | int | float) for v in state.values())
    other.bind(copy)
    other.load_updater_state(state)
    other.load_buffers_bytes(model.buffers_bytes())
    for i in range(3, 5):
        assert model.step(batch(seed=i)) == other.step(batch(seed=i))
    np.testing.assert_array_equal(params, copy)
    assert model.buffers_bytes() == other.buffers_bytes()
    with pytest.raises(UsageError, match="another model or optimizer"):
        KerasModel(network(), LOGITS, "sgd").load_updater_state(state)
    with pytest.raises(UsageError, match="pickles contain no parameters"):
        other.initial()


def test_optimizer_state_names_lack_keras_number() -> None:
    """State names lack Keras' number (sgd_1), which is ignored in names of older files."""
    first, later = (KerasModel(network(), LOGITS, keras.optimizers.SGD(0.1)) for _ in range(2))
    for model in (first, later):
        bound(model)
    state = first.updater_state()
    assert state.keys() == later.updater_state().keys()
    later.load_updater_state(state)
    later.load_updater_state({f"sgd_7/{name.partition('/')[2]}": state[name] for name in state})


def test_reading_module_stores_trained_parameters_in_module() -> None:
    """Reading model.module writes the trained parameters into the user's own module."""
    module = network(layers.BatchNormalization())
    model = KerasModel(module, LOGITS, "adam")
    bound(model)
    before = [v.numpy().copy() for v in module.variables]
    model.step(batch())
    for value, variable in zip(before, module.variables, strict=True):
        np.testing.assert_array_equal(value, variable.numpy())  # not changed yet
    outputs = model.module(batch().features, training=False)
    np.testing.assert_allclose(outputs, model.predict(batch().features), atol=1e-6)


def warning_about(own: Any, saved: Any) -> Any:
    """Return the warning about a network and another one that was saved in a file, or None."""
    own, saved = map(keras.saving.serialize_keras_object, (own, saved))
    current = {"kind": "keras", "model": own}
    return check_same_model(current, {**current, "model": json.loads(json.dumps(saved))}, "f")


def assert_equal(one: Any, other: Any) -> None:
    """Check that two networks count as the same, whichever was saved."""
    assert warning_about(one, other) is None
    assert warning_about(other, one) is None


def branching(inputs: Any = None, *, adds_first: bool = True, activation: str = "relu") -> Any:
    """Return a network of two branches, of which the options change a detail."""
    inputs = keras.Input((6,)) if inputs is None else inputs
    first = layers.Activation(activation)(layers.Dense(3)(inputs))
    second = layers.Activation("tanh")(layers.Dense(3)(inputs))
    ends = layers.Dense(3)(first), layers.Dense(3)(second), first if adds_first else second
    return keras.Model(inputs, layers.Add()([*ends]))


def built(build: Any) -> Any:
    """Return a network without an input layer, after ``build``."""
    model = keras.Sequential([layers.Dense(5, name="hidden"), layers.Dense(3)])
    build(model)
    return model


def test_compiled_or_built_network_is_recognized_as_same() -> None:
    compiled = network()
    compiled.compile(optimizer="adam", loss="mse", metrics=["mae"])
    assert_equal(network(), compiled)
    with_inputs = built(lambda model: model.build((None, 6)))
    assert_equal(with_inputs, built(lambda model: model.build((8, 6))))
    assert_equal(with_inputs, built(lambda model: model(np.zeros((8, 6), np.float32))))
    inputs = keras.Input(batch_shape=(8, 6))
    assert_equal(branching(inputs), branching(keras.Input((6,))))


def test_cloned_network_is_recognized_as_same() -> None:
    assert_equal(branching(), branching())
    for model in (network(), branching(), keras.Sequential([keras.Input((6,)), branching()])):
        assert_equal(model, keras.models.clone_model(model))


def test_other_loss_warns_only_if_outputs_are_of_other_kind() -> None:
    """Another loss causes a warning only if the outputs are of another kind."""
    mse, mean = (KerasModel(network(), loss, "sgd").describe() for loss in ("mse", MEAN))
    assert mse["loss"] != mean["loss"]
    assert check_same_model(mse, mean, "f") is None
    text = check_same_model(mse, KerasModel(network(), LOGITS, "sgd").describe(), "f")
    assert "outputs='logits', the given model has 'values'" in (text or "")


def test_warning_names_difference_between_networks() -> None:
    """A warning names the activation, connection or data type that differs."""
    assert "['activation']='tanh'" in warning_about(branching(), branching(activation="tanh"))
    assert "['keras_history'][0]=4" in warning_about(branching(), branching(adds_first=False))
    half = keras.Sequential([keras.Input((6,)), layers.Dense(3, dtype="mixed_bfloat16")])
    full = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
    assert "['name']='mixed_bfloat16'" in warning_about(full, half)


def test_exported_model_is_loadable_by_keras(tmp_path: Path) -> None:
    model = KerasModel(network(layers.BatchNormalization()), LOGITS, "adam")
    assert isinstance(model, Exporting)
    bound(model)
    model.step(batch())
    suffix, data = model.exported()
    (tmp_path / f"model{suffix}").write_bytes(data)
    again = keras.saving.load_model(tmp_path / f"model{suffix}", compile=False)
    outputs = again(batch().features, training=False)
    np.testing.assert_allclose(outputs, model.predict(batch().features), atol=1e-6)


def test_buffers_are_averaged_without_dropout_seeds() -> None:
    """Buffers are averaged over workers; Dropout's seed is not one of them."""
    model = KerasModel(network(layers.BatchNormalization(), layers.Dropout(0.5)), LOGITS, "sgd")
    bound(model)
    reports = [np.full(10, value, np.float32).tobytes() for value in (1, 2, 6)]
    assert model.average_buffers(reports) == np.full(10, 3, np.float32).tobytes()
    weighed = model.weighed_buffers(reports, [1.0, 1.0, 0.0])
    assert weighed == np.full(10, 1.5, np.float32).tobytes()
    model.load_buffers_bytes(reports[2])
    assert model.buffers_bytes() == reports[2]
    with pytest.raises(UsageError, match="36 bytes of buffers, this model has 40"):
        model.load_buffers_bytes(reports[0][4:])


def test_dropout_differs_by_worker_and_step_but_is_repeatable() -> None:
    model = KerasModel(network(layers.Dropout(0.5)), LOGITS, keras.optimizers.SGD(0.0))

    def losses(seed: int) -> list[float]:
        other = pickle_round_trip(model)
        other.place(Share(threads=2, gpu=None, seed=seed))
        other.bind(model.initial())
        return [other.step(batch()) for _ in range(2)]

    assert losses(1) == losses(1)
    assert len({*losses(1), *losses(2)}) == 4


def test_frozen_layers_are_unchanged_and_no_buffers() -> None:
    module = network(layers.BatchNormalization())
    module.get_layer("hidden").trainable = False
    model = KerasModel(module, LOGITS, "sgd")
    bound(model)
    frozen = module.get_layer("hidden").kernel.numpy().copy()
    other = pickle_round_trip(model)
    other.bind(model.initial())
    other.step(batch())
    assert len(other.buffers_bytes()) == 2 * 5 * 4
    np.testing.assert_array_equal(other.module.get_layer("hidden").kernel.numpy(), frozen)


def test_frozen_weights_are_restored_from_checkpoint() -> None:
    """A model that is made again with other frozen weights gets those of the checkpoint."""

    def make() -> KerasModel:
        module = network(layers.BatchNormalization())
        module.get_layer("hidden").trainable = False
        return KerasModel(module, LOGITS, "sgd")

    model, other = make(), make()
    buffers = np.arange(10, dtype=np.float32).tobytes()  # of an epoch's end
    other.load_buffers_bytes(add_frozen_weights(model, buffers))
    assert other.buffers_bytes() == buffers
    assert other.saved_buffers_bytes()[40:] == model.saved_buffers_bytes()[40:]
    pickle_round_trip(other).load_buffers_bytes(buffers)


def test_model_with_named_inputs_and_tuple_of_outputs_trains() -> None:
    left, right = keras.Input((2,), name="left"), keras.Input((3,), name="right")
    whole = layers.Dense(1, use_bias=False)(layers.concatenate([left, right]))
    module = keras.Model({"left": left, "right": right}, (whole, 2 * whole))

    def loss(labels: Any, outputs: Any) -> Any:
        return (outputs[0] - labels[0]) ** 2 + (outputs[1] - labels[1]) ** 2

    model = pickle_round_trip(KerasModel(module, loss, keras.optimizers.SGD(0.05)))
    params = np.zeros(5, np.float32)
    model.bind(params)
    random = np.random.default_rng(0)
    features = {
        "left": random.normal(size=(16, 2)).astype(np.float32),
        "right": random.normal(size=(16, 3)).astype(np.float32),
    }
    wanted = features["left"] @ np.array([[1], [-1]], np.float32)
    model.check(features, (wanted, 2 * wanted))
    for _ in range(200):
        model.step(Batch(features, (wanted, 2 * wanted)))
    np.testing.assert_allclose(params, [1, -1, 0, 0, 0], atol=1e-3)


def two_headed() -> Any:
    """Return a network with two inputs and two outputs."""
    keras.utils.set_random_seed(3)
    left, right = keras.Input((2,), name="left"), keras.Input((4,), name="right", dtype="int32")
    words = layers.Flatten()(layers.Embedding(9, 3)(right))
    whole = layers.concatenate([layers.Dense(4, activation="tanh")(left), words])
    heads = [layers.Dense(3, name="kind")(whole), layers.Dense(1, name="size")(whole)]
    return keras.Model([left, right], heads)


@pytest.mark.parametrize("by_name", [False, True])
def test_losses_per_output_are_summed_as_in_keras(by_name: bool) -> None:
    random = np.random.default_rng(0)
    features = (
        random.normal(size=(8, 2)).astype(np.float32),
        random.integers(0, 9, (8, 4)).astype(np.int32),
    )
    labels = (random.integers(0, 3, 8), random.normal(size=8).astype(np.float32))
    module = two_headed()
    losses: Any = {"size": "mse", "kind": LOGITS} if by_name else [LOGITS, "mse"]
    made = KerasModel(module, losses, keras.optimizers.SGD(0.1))
    model = pickle_round_trip(made)
    model.bind(made.initial())
    given: Any = dict(zip(("kind", "size"), labels, strict=True)) if by_name else labels
    model.check(features, given)
    module.compile(keras.optimizers.SGD(0.1), loss=[LOGITS, "mse"])
    for _ in range(3):
        wanted = module.train_on_batch(list(features), list(labels))
        wanted = wanted[0] if isinstance(wanted, list) else wanted
        module.reset_metrics()
        assert model.step(Batch(features, given)) == pytest.approx(float(wanted), rel=1e-4)


@pytest.mark.parametrize(
    "losses",
    [
        [LOGITS, "mse"],
        (keras.losses.sparse_categorical_crossentropy, keras.losses.MeanSquaredError()),
        {"size": keras.losses.mean_squared_error, "kind": LOGITS},
    ],
)
def test_model_with_loss_per_output_is_created_from_description(losses: Any) -> None:
    random = np.random.default_rng(1)
    made = KerasModel(two_headed(), losses, keras.optimizers.SGD(0.1))
    again = from_description(json.loads(json.dumps(made.describe())))
    assert again.describe()["loss"] == made.describe()["loss"]
    features = (
        random.normal(size=(8, 2)).astype(np.float32),
        random.integers(0, 9, (8, 4)).astype(np.int32),
    )
    labels = (random.integers(0, 3, 8), random.normal(size=8).astype(np.float32))
    given: Any = dict(zip(("kind", "size"), labels, strict=True))
    for model in (made, again):
        model.bind(made.initial())
        model.check(features, given if isinstance(losses, dict) else labels)
    rows = Batch(features, given if isinstance(losses, dict) else labels)
    assert made.step(rows) == again.step(rows)


def named_heads(last: str, first: str) -> Any:
    """Return a network whose outputs are a dict; the arguments are the names of the layers."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((6,))
    heads = {"two": layers.Dense(2, name=last)(inputs), "one": layers.Dense(2, name=first)(inputs)}
    return keras.Model(inputs, heads)


@pytest.mark.parametrize("names", [("x2", "x1"), ("one", "two")])
@pytest.mark.parametrize("by_name", [False, True])
def test_losses_of_dict_outputs_are_matched_by_key(names: Any, by_name: bool) -> None:
    """Names of layers do not count, even if they are the keys of other outputs."""
    module, features = named_heads(*names), batch().features
    labels = {"two": features[:, :2], "one": features[:, 4:]}
    losses: Any = {"two": "mae", "one": "mse"} if by_name else ["mse", "mae"]
    model = KerasModel(module, losses, "sgd")
    bound(model)
    given: Any = labels if by_name else (labels["one"], labels["two"])
    model.check(features, given)
    found = model.step(Batch(features, given))
    module.compile("sgd", loss=losses)
    expected = module.train_on_batch(features, labels)[0]
    assert found == pytest.approx(float(expected), rel=1e-5)
    again = from_description(json.loads(json.dumps(model.describe())))
    assert again.describe()["loss"] == model.describe()["loss"]
    with pytest.raises(UsageError, match=r"outputs x2, x1, but the model returns one, two: give"):
        KerasModel(named_heads("x2", "x1"), {"x2": "mse", "x1": "mse"}, "sgd")


def test_description_error_names_missing_user_loss() -> None:
    """A model with a user's loss function is not made from its description; the error names it."""

    def mine(labels: Any, outputs: Any) -> Any:
        return keras.losses.mean_squared_error(labels, outputs)

    for losses in (["mse", mine], {"size": mine, "kind": "mse"}):
        made = KerasModel(two_headed(), losses, "sgd")
        with pytest.raises(UsageError, match=r"of your own \(loss mine\), whose code was not"):
            from_description(json.loads(json.dumps(made.describe())))
    of_partial = partial(keras.losses.sparse_categorical_crossentropy, from_logits=True)
    with pytest.raises(UsageError, match=r"functools\.partial of sparse_categorical_cross"):
        from_description(KerasModel(network(scaled()(3.0)), of_partial, "sgd").describe())


@pytest.mark.parametrize(
    ("loss", "options", "outputs"),
    [
        (keras.losses.sparse_categorical_crossentropy, {"from_logits": True}, "logits"),
        (keras.losses.sparse_categorical_crossentropy, {"ignore_class": -1}, "probabilities"),
        (keras.losses.binary_crossentropy, {"from_logits": True}, "logits"),
        (keras.losses.huber, {"delta": 2.0}, "values"),
    ],
)
def test_partial_of_loss_has_outputs_and_labels_of_its_function(
    loss: Any, options: dict[str, Any], outputs: str
) -> None:
    """Outputs, labels and name of a partial of a loss are those of its function and options."""
    made = KerasModel(network(), partial(loss, **options), "sgd")
    assert made.outputs == outputs
    assert made.per_label == (loss is keras.losses.binary_crossentropy)
    assert made.ignored_label == options.get("ignore_class")
    assert loss.__name__ in repr(made)


class CustomFocalLoss(keras.losses.BinaryFocalCrossentropy):  # type: ignore[misc]
    """A user's subclass of one of Keras' losses."""


@pytest.mark.parametrize(
    ("loss", "outputs", "per_label"),
    [
        *[("bce", "probabilities", True), ("BCE", "probabilities", True)],
        *[("BinaryCrossentropy", "probabilities", True), ("mse", "values", False)],
        *[("categorical_crossentropy", "probabilities", False), ("Huber", "values", False)],
        *[
            (CustomFocalLoss(), "probabilities", True),
            (CustomFocalLoss(from_logits=True), "logits", True),
        ],
    ],
)
def test_loss_alias_or_subclass_is_recognized_as_keras_loss(
    loss: Any, outputs: str, per_label: bool
) -> None:
    """Keras' aliases and the user's subclasses count as Keras' own losses."""
    model = KerasModel(network(), loss, "sgd")
    assert (model.outputs, model.per_label) == (outputs, per_label)
    if isinstance(loss, str):
        assert from_description(json.loads(json.dumps(model.describe()))).outputs == outputs


def test_class_losses_refuse_labels_outside_classes() -> None:
    rows = batch()
    labels = rows.labels.astype(np.float32)
    labels[2] = -1
    generalized = keras.losses.CategoricalGeneralizedCrossEntropy()
    for loss in ("sparse_categorical_crossentropy", LOGITS, generalized):
        with pytest.raises(UsageError, match=r"row 2: label is -1.0: labels must be 0 to 2"):
            KerasModel(network(), loss, "sgd").check(rows.features, labels)


def squared(labels: Any, outputs: Any) -> Any:
    return keras.ops.mean(keras.ops.square(labels - outputs), axis=-1)


@pytest.mark.parametrize("loss", ["hinge", "poisson", "binary_crossentropy", squared])
def test_step_with_one_label_per_row_equals_keras(loss: Any) -> None:
    """Labels [rows] of Dense(1), whose outputs are [rows, 1], give the step that Keras takes."""
    keras.utils.set_random_seed(3)
    module = keras.Sequential([keras.Input((6,)), layers.Dense(1, "sigmoid")])
    features, classes, _ = batch()
    labels = (classes > 0).astype(np.float32)
    model = KerasModel(module, loss, "sgd")
    params = bound(model)
    model.check(features, labels)
    model.step(Batch(features, labels))
    module.compile("sgd", loss)
    module.train_on_batch(features, labels)
    expected = np.concatenate([np.asarray(v).ravel() for v in module.trainable_variables])
    np.testing.assert_allclose(params, expected, rtol=0, atol=1e-6)


def test_losses_that_do_not_match_outputs_are_refused() -> None:
    with pytest.raises(UsageError, match=r"outputs kind, but the model returns kind, size"):
        KerasModel(two_headed(), {"kind": LOGITS}, "sgd")
    with pytest.raises(UsageError, match=r"losses for the outputs 3, but"):
        KerasModel(two_headed(), ["mse"] * 3, "sgd")


def test_layer_masks_apply_to_loss_as_in_keras() -> None:
    keras.utils.set_random_seed(3)
    embedding = layers.Embedding(9, 4, mask_zero=True)
    parts = [embedding, layers.LSTM(5, return_sequences=True), layers.Dense(3)]
    module = keras.Sequential([keras.Input((6,), dtype="int32"), *parts])
    random = np.random.default_rng(0)
    words = random.integers(1, 9, (8, 6)).astype(np.int32)
    words[:, 4:], words[0, 1:] = 0, 0
    classes = random.integers(0, 3, (8, 6))
    module.compile("sgd", LOGITS)
    wanted = module.evaluate(words, classes.astype(np.int32), verbose=0)  # JAX warns of int64
    model = KerasModel(module, LOGITS, "sgd")
    model.bind(model.initial())
    total, rows = model.loss(Batch(words, classes))
    assert total / rows == pytest.approx(wanted, rel=1e-5)
    assert model.step(Batch(words, classes)) == pytest.approx(wanted, rel=1e-5)


def test_mixed_precision_outputs_are_writable_float32() -> None:
    keras.utils.set_random_seed(3)
    module = keras.Sequential([keras.Input((6,)), layers.Dense(3, dtype="mixed_bfloat16")])
    model = KerasModel(module, LOGITS, "sgd")
    bound(model)
    outputs = model.predict(batch().features)
    assert (outputs.dtype, outputs.flags.writeable) == (np.float32, True)
    expected = np.asarray(module(batch().features), np.float32)
    np.testing.assert_allclose(outputs, expected, rtol=1e-2)


def scaled(*, registered: bool = False) -> Any:
    """Return a layer class that executors cannot import."""

    class Scaled(layers.Layer):
        def __init__(self, by: float, **options: Any) -> None:
            super().__init__(**options)
            self.by = by

        def call(self, x: Any) -> Any:
            return x * self.by

        def get_config(self) -> dict[str, Any]:
            return {**super().get_config(), "by": self.by}

    Scaled.__module__ = "__main__"
    return Scaled


def test_custom_layer_survives_pickling() -> None:
    model = KerasModel(network(scaled()(3.0)), LOGITS, "sgd")
    params = bound(model)
    other = pickle_round_trip(model)
    other.bind(params)
    features = batch().features
    np.testing.assert_array_equal(other.predict(features), model.predict(features))
    assert "model" not in model.describe()
    with pytest.raises(UsageError, match="layers or a loss of your own"):
        from_description(model.describe())


def test_model_from_json_description_takes_same_step() -> None:
    """A model made from its JSON description takes the same step."""
    model = KerasModel(network(layers.BatchNormalization()), LOGITS, keras.optimizers.Adam(0.05))
    again = from_description(json.loads(json.dumps(model.describe())))
    params = bound(model)
    again.bind(params.copy())
    assert again.step(batch()) == model.step(batch())
    with_other_numbers = KerasModel(network(layers.BatchNormalization()), LOGITS, "sgd").describe()
    assert with_other_numbers["parameters"] == model.describe()["parameters"]
    by_name = KerasModel(network(), "mse", "rmsprop").describe()
    assert from_description(by_name).describe() == by_name


def test_description_naming_foreign_module_is_refused() -> None:
    """A description that names a different module than Keras is refused."""
    described = KerasModel(network(), LOGITS, "sgd").describe()
    described["model"]["config"]["layers"][1]["module"] = "subprocess"
    with pytest.raises(UsageError, match=r"names subprocess\.Dense"):
        from_description(described)


# -- refusals --------------------------------------------------------------------------------------


def unbuilt() -> Any:
    return keras.Sequential([layers.Dense(3)])


def halved() -> Any:
    return keras.Sequential([keras.Input((6,)), layers.Dense(3, dtype="bfloat16")])


def forgetful() -> Any:
    """Return a network with a layer whose get_config lacks an argument."""

    class Forgetful(scaled()):
        def get_config(self) -> dict[str, Any]:
            return layers.Layer.get_config(self)

    return network(Forgetful(2.0))


@pytest.mark.parametrize(
    ("model", "loss", "optimizer", "words"),
    [
        (lambda: 3, LOGITS, "sgd", "model is a int"),
        (unbuilt, LOGITS, "sgd", "no trainable variables yet"),
        (halved, LOGITS, "sgd", "kernel is bfloat16"),
        (forgetful, LOGITS, "sgd", "cannot be sent to executors.*get_config"),
        (network, "crosentropy", "sgd", "has no such loss"),
        (network, 3, "sgd", "loss is a int"),
        (network, keras.losses.MeanSquaredError(reduction="sum"), "sgd", "reduction='sum'"),
        (network, LOGITS, "sdg", "optimizer='sdg'"),
        (network, LOGITS, keras.optimizers.SGD(use_ema=True), "use_ema"),
        (
            network,
            LOGITS,
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
            "LossScaleOptimizer",
        ),
    ],
)
def test_keras_model_refuses_invalid_arguments(
    model: Any, loss: Any, optimizer: Any, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        KerasModel(model(), loss, optimizer)


def test_unsuitable_rows_are_refused_with_reason() -> None:
    model, rows = KerasModel(network(), LOGITS, "sgd"), batch()
    model.check(rows.features, rows.labels)
    with pytest.raises(UsageError, match=r"on rows of float32\[5\]: ValueError"):
        model.check(rows.features[:, :5], rows.labels)
    with pytest.raises(UsageError, match="row 0: label is 7: labels must be 0 to 2"):
        model.check(rows.features, np.full(8, 7))


def test_repr_of_keras_model_has_learning_rate() -> None:
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)], name="small")
    model = KerasModel(made, "mse", keras.optimizers.Adam(0.003))
    expected = "KerasModel(small, 10 parameters, loss=mse, optimizer=Adam(learning_rate=0.003))"
    assert repr(model) == expected
