"""Tests of JaxModel: its steps equal optax's own, in the memory that it was given."""

from __future__ import annotations

import io
from functools import partial
from typing import Any

import numpy as np
import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.models.base import Batch, Exporting, FlatModel, Measured, Placeable, Share

pytest.importorskip("jax", reason="jax is not installed: pip install 'sparkstrom[jax]'")
optax = pytest.importorskip("optax", reason="optax is not installed: 'sparkstrom[jax]'")
pytest.importorskip("pyspark.cloudpickle", reason="what ships is pickled by Spark's")
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.flatten_util import ravel_pytree  # noqa: E402

from sparkstrom.models.jax import JaxModel  # noqa: E402
from tests.unit.models.mlp_in_jax import (  # noqa: E402
    apply,
    apply_train,
    batch,
    bound,
    cross_entropy,
    init,
    make,
    pickle_round_trip,
)

OPTIMIZERS = {
    "adamw on a schedule": lambda: optax.adamw(optax.cosine_decay_schedule(0.1, 10)),
    "clipped, accumulated": lambda: optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(1.0), optax.rmsprop(0.05)), 2
    ),
    "one part frozen": lambda: optax.multi_transform(
        {"train": optax.adagrad(0.1), "freeze": optax.set_to_zero()},
        {"hidden": "freeze", "out": "train"},
    ),
    "plateau": lambda: optax.chain(
        optax.sgd(0.1, momentum=0.9, nesterov=True), optax.contrib.reduce_on_plateau()
    ),
}


@pytest.mark.parametrize(
    ("name", "weighted"), [(name, i % 2 == 0) for i, name in enumerate(OPTIMIZERS)]
)
def test_steps_equal_optax(name: str, weighted: bool) -> None:
    optimizer = OPTIMIZERS[name]()
    model = make(optimizer)
    params = bound(model)
    tree = jax.jit(init)(jax.random.key(0))
    state = jax.jit(optimizer.init)(tree)
    np.testing.assert_allclose(params, ravel_pytree(tree)[0], rtol=1e-6)

    def mean(tree: Any, rows: Batch) -> Any:
        losses = cross_entropy(apply(tree, rows.features), rows.labels)
        return jnp.average(losses, weights=rows.weights)

    @jax.jit
    def by_optax(tree: Any, state: Any, rows: Batch) -> Any:
        loss, slopes = jax.value_and_grad(mean)(tree, rows)
        update = optax.with_extra_args_support(optimizer).update
        steps, state = update(slopes, state, tree, value=loss)
        return optax.apply_updates(tree, steps), state, loss

    for i in range(4):
        rows = batch(seed=i, weighted=weighted)
        tree, state, loss = by_optax(tree, state, rows)
        assert model.step(rows) == pytest.approx(float(loss), rel=1e-5)
        np.testing.assert_allclose(params, ravel_pytree(tree)[0], rtol=2e-4, atol=2e-5)


def test_jax_model_reads_and_writes_only_bound_array() -> None:
    """The model uses the values in the bound array, also after others changed them."""
    model = make(optax.sgd(0.1))
    params = bound(model)
    model.step(batch())
    params[:] = 0  # as a remote update may do between two steps
    np.testing.assert_array_equal(model.predict(batch().features), np.zeros((8, 3)))
    model.step(batch())
    assert params[35:38].any()  # the last biases; zero weights give no others a gradient
    assert not params[:35].any()
    assert not params[38:].any()


def test_layer_names_and_parameter_views() -> None:
    model = make()
    assert isinstance(model, FlatModel)
    assert isinstance(model, Measured)
    assert isinstance(model, Placeable)
    assert model.n_params == 6 * 5 + 5 + 5 * 3 + 3
    assert [model.layer_of(i) for i in (0, 30, 35, 38)] == [
        "hidden/0",
        "hidden/1",
        "out/bias",
        "out/kernel",
    ]
    flat = model.initial()
    assert np.shares_memory(model.parameters(flat)["out"]["kernel"], flat)


def test_exported_arrays_are_readable_by_numpy() -> None:
    model = make()
    assert isinstance(model, Exporting)
    params = bound(model)
    suffix, data = model.exported()
    with np.load(io.BytesIO(data)) as arrays:
        np.testing.assert_array_equal(arrays["out/kernel"].reshape(-1), params[-15:])
    assert suffix == ".arrays.npz"


def test_initial_parameters_depend_on_seed_only() -> None:
    np.testing.assert_array_equal(make(seed=4).initial(), pickle_round_trip(make(seed=4)).initial())
    assert (make(seed=4).initial() != make(seed=5).initial()).any()


def test_step_is_compiled_once_per_minibatch_size() -> None:
    """The step is compiled once for each size of the minibatch."""
    traced = []

    def counted(params: Any, features: Any) -> Any:
        traced.append(features.shape)
        return apply(params, features)

    model = JaxModel(init, counted, cross_entropy, optax.sgd(0.1))
    bound(model)
    for _ in range(3):
        model.step(batch(8))
        model.step(batch(5))
    assert traced == [(8, 6), (5, 6)]


def test_dropout_keys_differ_by_step_worker_and_seed_but_are_repeatable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Random keys differ between steps, workers and seeds, and are the same in a repetition."""
    monkeypatch.setenv("NPROC", "2")  # restored after the test; place sets it

    def keys(seed: int, worker: int) -> list[float]:
        model = JaxModel(
            lambda key: jnp.zeros(1),
            lambda params, features: features[:, 0] * 0,
            lambda outputs, labels: outputs,
            optax.sgd(0.0),
            apply_train=lambda p, x, key: jnp.full(len(x), jax.random.uniform(key)) + p * 0,
            seed=seed,
        )
        model.place(Share(threads=2, gpu=None, seed=worker))
        bound(model)
        return [model.step(batch()) for _ in range(2)]

    assert keys(0, 1) == keys(0, 1)
    assert len({*keys(0, 1), *keys(0, 2), *keys(1, 1)}) == 6


def test_model_with_named_inputs_and_outputs_trains() -> None:
    def both(params: Any, features: Any) -> Any:
        whole = features["left"] @ params["left"] + features["right"] @ params["right"]
        return {"sum": whole, "twice": 2 * whole}

    def loss(outputs: Any, labels: Any) -> Any:
        return (outputs["sum"] - labels[0]) ** 2 + (outputs["twice"] - labels[1]) ** 2

    model = JaxModel(
        lambda key: {"left": jnp.zeros(2), "right": jnp.zeros(3)}, both, loss, optax.sgd(0.05)
    )
    params = bound(model)
    random = np.random.default_rng(0)
    features = {k: random.normal(size=(16, n)).astype(np.float32) for k, n in
                (("left", 2), ("right", 3))}  # fmt: skip
    wanted = features["left"] @ np.array([1, -1], np.float32)
    labels = (wanted, 2 * wanted)
    model.check(features, labels)
    for _ in range(200):
        model.step(Batch(features, labels))
    np.testing.assert_allclose(params, [1, -1, 0, 0, 0], atol=1e-3)
    outputs = model.predict(features)
    np.testing.assert_allclose(outputs["twice"], 2 * wanted, atol=1e-2)
    assert model.outputs == "values"


@pytest.mark.parametrize("weighted", [False, True])
def test_loss_is_measured_without_changing_parameters(weighted: bool) -> None:
    """loss() returns the weighted sum of losses and the weight, and changes no parameter."""
    model = make(apply_train=apply_train)
    params = bound(model)
    rows = batch(weighted=weighted)
    losses = np.asarray(cross_entropy(apply(init(jax.random.key(0)), rows.features), rows.labels))
    weights = np.ones(8) if rows.weights is None else rows.weights
    before = params.copy()
    loss, weight = model.loss(rows)
    assert loss == pytest.approx(float(losses @ weights), rel=1e-5)
    assert weight == weights.sum()
    np.testing.assert_array_equal(params, before)
    assert model.outputs == "logits"
    assert make(outputs="probabilities").outputs == "probabilities"


def test_minibatch_of_zero_weights_changes_no_parameter() -> None:
    model = make(optax.adamw(0.1))
    params = bound(model)
    model.step(batch())
    before = params.copy()
    assert model.step(batch()._replace(weights=np.zeros(8, np.float32))) == 0
    np.testing.assert_array_equal(params, before)


def test_outputs_are_independent_arrays_of_at_least_float32() -> None:
    """Outputs may be changed in place; bfloat16, which NumPy lacks, becomes float32."""

    def several(params: Any, features: Any) -> Any:
        whole = apply(params, features)
        return whole, {"narrow": whole.astype(jnp.bfloat16), "class": whole.argmax(axis=1)}

    model = JaxModel(init, several, lambda outputs, labels: outputs[0][:, 0], optax.sgd(0.1))
    bound(model)
    whole, others = model.predict(batch().features)
    narrow, classes = others["narrow"], others["class"]
    assert (whole.dtype, narrow.dtype, classes.dtype) == (np.float32, np.float32, np.int32)
    np.testing.assert_array_equal(narrow, jnp.asarray(whole, jnp.bfloat16).astype(jnp.float32))
    expected = whole.copy()
    for array in (whole, narrow, classes):
        array[:] = 0
    np.testing.assert_array_equal(model.predict(batch().features)[0], expected)


@pytest.mark.parametrize(
    ("loss", "kind", "per_label"),
    [
        (optax.softmax_cross_entropy, "logits", False),
        (optax.losses.poly_loss_cross_entropy, "logits", False),
        (optax.losses.multiclass_hinge_loss, "logits", False),
        (partial(optax.losses.multiclass_perceptron_loss), "logits", False),
        (optax.losses.multiclass_sparsemax_loss, "logits", False),
        (optax.sigmoid_binary_cross_entropy, "logits", True),
        (partial(optax.sigmoid_focal_loss, gamma=1.0), "logits", True),
        (optax.squared_error, "values", False),
        (optax.losses.kl_divergence, "values", False),
    ],
)
def test_output_kind_is_inferred_from_loss(loss: Any, kind: str, per_label: bool) -> None:
    model = make(loss=loss)
    assert (model.outputs, model.per_label) == (kind, per_label)


@pytest.mark.parametrize(
    "loss",
    [
        optax.losses.multiclass_hinge_loss,
        optax.losses.multiclass_perceptron_loss,
        optax.losses.multiclass_sparsemax_loss,
    ],
)
def test_optax_class_losses_accept_whole_doubles_as_labels(loss: Any) -> None:
    """Labels outside the classes are refused; Spark ML's doubles are classes."""
    whole, doubles = make(loss=loss), make(loss=loss)
    rows = batch()
    labels = rows.labels.astype(np.float64)
    for model in (whole, doubles):
        bound(model)
    doubles.check(rows.features, labels)
    assert doubles.step(Batch(rows.features, labels)) == whole.step(rows)
    with pytest.raises(UsageError, match=r"row 2: label is -1.0: labels must be 0 to"):
        doubles.check(rows.features, np.where(np.arange(len(labels)) == 2, -1, labels))


def scalar(outputs: Any, labels: Any) -> Any:
    """Return one loss for all rows."""
    return cross_entropy(outputs, labels).mean()


def test_scalar_loss_works_only_without_row_weights() -> None:
    """A loss of one number per minibatch works, except for rows with weights."""
    one, each = JaxModel(init, apply, scalar, optax.sgd(0.1)), make(optax.sgd(0.1))
    first, second = bound(one), bound(each)
    one.check(batch().features, batch().labels)
    assert one.step(batch()) == pytest.approx(each.step(batch()))
    np.testing.assert_allclose(first, second, rtol=1e-6)
    with pytest.raises(UsageError, match="one loss per row"):
        one.step(batch(weighted=True))


@pytest.mark.parametrize("wrap", [lambda loss: loss, partial, jax.jit])
def test_integer_label_loss_accepts_whole_doubles_as_classes(wrap: Any) -> None:
    """Whole doubles are classes, as Spark ML's StringIndexer makes them."""
    features = np.random.default_rng(1).normal(size=(8, 3)).astype(np.float32)
    labels = features.argmax(axis=1)

    def made(loss: Any) -> JaxModel:
        model = JaxModel(
            lambda key: {"w": jax.numpy.zeros((3, 3))},
            lambda params, rows: rows @ params["w"],
            loss,
            optax.sgd(0.1),
        )
        model.bind(model.initial())
        return model

    loss = wrap(optax.softmax_cross_entropy_with_integer_labels)
    whole, doubles = made(loss), made(loss)
    doubles.check(features, labels.astype(np.float64))
    assert doubles.outputs == "logits"
    for _ in range(3):
        expected = whole.step(Batch(features, labels))
        assert doubles.step(Batch(features, labels.astype(np.float64))) == expected
    assert doubles.loss(Batch(features, labels.astype(np.float32))) == whole.loss(
        Batch(features, labels)
    )
    strange = labels.astype(np.float64)
    strange[3] = 1.5
    with pytest.raises(UsageError, match=r"row 3: label is 1.5: labels must be 0 to 2"):
        doubles.check(features, strange)
    own = made(lambda outputs, given: loss(outputs, given))
    with pytest.raises(UsageError, match=r"labels.astype\(int\), or cast the column"):
        own.check(features, labels.astype(np.float64))
