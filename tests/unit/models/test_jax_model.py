"""JaxModel: its steps are optax's own, in the memory it was given; what cannot work is refused."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
from functools import partial
from typing import Any

import numpy as np
import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.models.base import Batch, Exporting, FlatModel, Measured, Placeable, Share

pytest.importorskip("jax", reason="jax is not installed: pip install 'sparkstrom[jax]'")
optax = pytest.importorskip("optax", reason="optax is not installed: 'sparkstrom[jax]'")
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.flatten_util import ravel_pytree  # noqa: E402

from sparkstrom.models.jax import JaxModel  # noqa: E402

cloudpickle = pytest.importorskip("pyspark.cloudpickle", reason="what ships is pickled by Spark's")

cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def init(key: Any) -> Any:
    """An MLP of 6 inputs and 3 outputs."""
    first, second = jax.random.split(key)
    return {
        "hidden": [jax.random.normal(first, (6, 5)) / 2, jnp.zeros(5)],
        "out": {"kernel": jax.random.normal(second, (5, 3)) / 2, "bias": jnp.zeros(3)},
    }


def apply(params: Any, features: Any) -> Any:
    weights, biases = params["hidden"]
    hidden = jax.nn.tanh(features @ weights + biases)
    return hidden @ params["out"]["kernel"] + params["out"]["bias"]


def apply_train(params: Any, features: Any, key: Any) -> Any:
    kept = jax.random.bernoulli(key, 0.5, features.shape)
    return apply(params, features * kept)


def batch(rows: int = 8, seed: int = 3, *, weighted: bool = False) -> Batch:
    random = np.random.default_rng(seed)
    features = random.normal(size=(rows, 6)).astype(np.float32)
    weights = random.integers(0, 3, rows).astype(np.float32) if weighted else None
    return Batch(features, random.integers(0, 3, rows), weights)


def bound(model: JaxModel) -> Any:
    params = model.initial()
    model.bind(params)
    return params


def make(optimizer: Any = None, **options: Any) -> JaxModel:
    return JaxModel(init, apply, cross_entropy, optimizer or optax.adam(0.05), **options)


def shipped(model: JaxModel) -> JaxModel:
    """As Spark ships it: its cloudpickle."""
    return cloudpickle.loads(cloudpickle.dumps(model))


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam in bfloat16": lambda: optax.adam(0.05, mu_dtype=jnp.bfloat16),
    "adamw on a schedule": lambda: optax.adamw(optax.cosine_decay_schedule(0.1, 10)),
    "clipped, accumulated": lambda: optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(1.0), optax.rmsprop(0.05)), 2
    ),
    "noisy": lambda: optax.noisy_sgd(0.05, eta=0.01, gamma=0.55, key=7),
    "one part frozen": lambda: optax.multi_transform(
        {"train": optax.adagrad(0.1), "freeze": optax.set_to_zero()},
        {"hidden": "freeze", "out": "train"},
    ),
    "plateau": lambda: optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()),
}


@pytest.mark.parametrize(
    ("name", "weighted"),
    [(name, i % 2 == 0) for i, name in enumerate(OPTIMIZERS) if name != "noisy"],
)
def test_steps_are_those_of_optax_itself(name: str, weighted: bool) -> None:
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


WITH_SCALARS_KEYS_AND_HALVES = ["adam in bfloat16", "clipped, accumulated", "noisy"]


@pytest.mark.parametrize("name", WITH_SCALARS_KEYS_AND_HALVES)
def test_optimizer_state_goes_on_in_another_process_s_model(name: str) -> None:
    model = make(OPTIMIZERS[name]())
    params = bound(model)
    for i in range(3):
        model.step(batch(seed=i))
    state = model.updater_state()
    assert all(isinstance(v, np.ndarray | int | float) for v in state.values())
    other, copy = shipped(model), params.copy()
    other.bind(copy)
    other.load_updater_state(state)
    for i in range(3, 6):
        assert model.step(batch(seed=i)) == other.step(batch(seed=i))
    np.testing.assert_array_equal(params, copy)
    for key, value in model.updater_state().items():
        np.testing.assert_array_equal(value, other.updater_state()[key])


def test_state_handed_out_stays_as_it_was() -> None:
    model = make()
    bound(model)
    model.step(batch())
    state = model.updater_state()
    before = {name: np.array(value) for name, value in state.items()}
    model.step(batch())
    for name, value in state.items():
        np.testing.assert_array_equal(value, before[name])


def test_a_state_of_another_optimizer_is_refused() -> None:
    model, other = make(optax.sgd(0.1, momentum=0.9)), make()
    bound(other)
    with pytest.raises(UsageError, match="another model or optimizer"):
        model.load_updater_state(other.updater_state())
    state = other.updater_state() | {"0/mu/out/bias": np.zeros(4, np.float32)}
    with pytest.raises(UsageError, match=r"0/mu/out/bias .* shape \(4,\)"):
        other.load_updater_state(state)


def test_it_works_in_the_bound_memory_alone() -> None:
    model = make(optax.sgd(0.1))
    params = bound(model)
    model.step(batch())
    params[:] = 0  # what the mesh does between two steps
    np.testing.assert_array_equal(model.predict(batch().features), np.zeros((8, 3)))
    model.step(batch())
    assert params[35:38].any()  # the last biases; zeros pass nothing on to the others
    assert not params[:35].any()
    assert not params[38:].any()


def test_names_and_views() -> None:
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


def test_exported_arrays_open_in_plain_numpy() -> None:
    model = make()
    assert isinstance(model, Exporting)
    params = bound(model)
    suffix, data = model.exported()
    with np.load(io.BytesIO(data)) as arrays:
        np.testing.assert_array_equal(arrays["out/kernel"].reshape(-1), params[-15:])
    assert suffix == ".arrays.npz"


def test_same_seed_same_parameters() -> None:
    np.testing.assert_array_equal(make(seed=4).initial(), shipped(make(seed=4)).initial())
    assert (make(seed=4).initial() != make(seed=5).initial()).any()


def test_two_sizes_of_minibatch_are_two_compilations() -> None:
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


def test_dropout_keys_differ_by_step_worker_and_seed_and_repeat(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NPROC", "2")  # and back: place sets it

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


def test_several_inputs_and_outputs_by_name() -> None:
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
def test_measured_without_a_step(weighted: bool) -> None:
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


def test_rows_of_no_weight_change_nothing() -> None:
    model = make(optax.sgd(0.1))
    params = bound(model)
    before = params.copy()
    assert model.step(batch()._replace(weights=np.zeros(8, np.float32))) == 0
    np.testing.assert_array_equal(params, before)


def scalar(outputs: Any, labels: Any) -> Any:
    return cross_entropy(outputs, labels).mean()


def test_a_loss_of_one_number_is_taken_but_not_weighted() -> None:
    one, each = JaxModel(init, apply, scalar, optax.sgd(0.1)), make(optax.sgd(0.1))
    first, second = bound(one), bound(each)
    one.check(batch().features, batch().labels)
    assert one.step(batch()) == pytest.approx(each.step(batch()))
    np.testing.assert_allclose(first, second, rtol=1e-6)
    with pytest.raises(UsageError, match="one loss per row"):
        one.step(batch(weighted=True))


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"init": lambda key: {"w": jnp.zeros(3, jnp.bfloat16)}}, "parameter w is bfloat16"),
        ({"init": lambda key: {"n": jnp.zeros(3, jnp.int32)}}, "parameter n is int32"),
        ({"init": lambda key: {}}, "makes no arrays"),
        (
            {"init": lambda key: {"params": jnp.zeros(3), "batch_stats": jnp.zeros(3)}},
            "init makes batch_stats beside params",
        ),
        ({"apply": 3}, "apply is a int"),
        ({"optimizer": optax.adam}, "optimizer is a function"),
        ({"outputs": "classes"}, "outputs='classes'"),
    ],
)
def test_what_cannot_be_trained_is_refused(changed: dict[str, Any], words: str) -> None:
    whole = {"init": init, "apply": apply, "loss": cross_entropy, "optimizer": optax.sgd(0.1)}
    with pytest.raises(UsageError, match=words):
        JaxModel(**(whole | changed))


def with_value(array: Any, row: int, value: Any) -> Any:
    changed = array.copy()
    changed[row if array.ndim == 1 else (row, 4)] = value
    return changed


@pytest.mark.parametrize(
    ("features", "labels", "words"),
    [
        (lambda f: f[:, :5], lambda y: y, r"on rows of float32\[5\]: TypeError: dot"),
        (partial(with_value, row=2, value=np.nan), lambda y: y, "feature 4 of row 2 is nan"),
        (lambda f: f, partial(with_value, row=5, value=3), "label of row 5 is 3: with 3 outputs"),
        (lambda f: f, partial(with_value, row=1, value=-1), "label of row 1 is -1"),
        (lambda f: f, partial(with_value, row=1, value=2**40), "32 bits"),
        (lambda f: f, lambda y: y[:7], "8 rows of features, but 7"),
    ],
)
def test_rows_that_do_not_fit_are_named(features: Any, labels: Any, words: str) -> None:
    rows = batch()
    make().check(rows.features, rows.labels)
    with pytest.raises(UsageError, match=words):
        make().check(features(rows.features), labels(rows.labels))


def test_a_loss_of_every_output_against_every_label_is_refused() -> None:
    model = JaxModel(
        lambda key: jnp.zeros((6, 1)),
        lambda params, features: features @ params,
        lambda outputs, labels: (outputs - labels) ** 2,
        optax.sgd(0.1),
    )
    numbers = np.zeros(8, np.float32)
    with pytest.raises(UsageError, match="broadcast"):
        model.check(batch().features, numbers)
    model.check(batch().features, numbers[:, None])


def test_an_optimizer_that_evaluates_by_itself_is_refused_by_its_own_words() -> None:
    with pytest.raises(UsageError, match="value_fn"):
        make(optax.lbfgs()).check(batch().features, batch().labels)


def test_a_description_names_the_arrays_and_makes_no_model() -> None:
    from sparkstrom.models.registry import from_description

    described = make().describe()
    assert described["parameters"][0] == ["hidden/0", [6, 5]]
    with pytest.raises(UsageError, match="make the model as before, and load"):
        from_description(described)


# -- shipping --------------------------------------------------------------------------------------


def test_lambdas_and_closures_ship_by_spark_s_pickle_and_parameters_do_not() -> None:
    scale = 2.0
    model = JaxModel(
        lambda key: jnp.zeros((500, 500)),
        lambda params, features: scale * (features @ params[:6, :3]),
        cross_entropy,
        optax.adam(0.1),
    )
    params = bound(model)
    model.step(batch())
    assert len(cloudpickle.dumps(model)) < 50_000  # a megabyte of parameters stays here
    other, copy = shipped(model), params.copy()
    other.bind(copy)
    np.testing.assert_array_equal(other.predict(batch().features), model.predict(batch().features))


def test_plain_pickle_takes_functions_that_have_a_name() -> None:
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(make())  # optax's are closures: plain pickle is not what ships


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
def test_xla_keeps_to_the_task_s_cpus(place: str) -> None:
    environment = {k: v for k, v in os.environ.items() if k not in ("NPROC", "JAX_PLATFORMS")}
    done = subprocess.run(
        [sys.executable, "-c", IN_A_TASK.format(place=place)],
        env=environment | {"OMP_NUM_THREADS": "1"},
        input=cloudpickle.dumps(make()).hex(),
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["3" if place else "1", "cpu"], done.stderr
