"""Tests of JaxModel with collections besides its parameters, as in Flax."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.models.base import Batch, Buffered

pytest.importorskip("jax", reason="jax is not installed: pip install 'sparkstrom[jax]'")
optax = pytest.importorskip("optax", reason="optax is not installed: 'sparkstrom[jax]'")
pytest.importorskip("pyspark.cloudpickle", reason="what ships is pickled by Spark's")
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from sparkstrom.models.jax import JaxModel  # noqa: E402
from tests.unit.models.mlp_in_jax import bound, cross_entropy, make, pickle_round_trip  # noqa: E402

ROWS = np.random.default_rng(0).normal(3.0, 2.0, size=(8, 4)).astype(np.float32)
CLASSES = np.arange(8) % 3
BATCH = Batch(ROWS, CLASSES)


def init(key: Any) -> Any:
    return {
        "params": {"kernel": jax.random.normal(key, (4, 3)), "scale": jnp.ones(4)},
        "batch_stats": {"mean": jnp.zeros(4), "seen": jnp.zeros((), jnp.int32)},
    }


def normalized(variables: Any, features: Any, mean: Any) -> Any:
    params = variables["params"]
    return (features - mean) * params["scale"] @ params["kernel"]


def apply(variables: Any, features: Any) -> Any:
    return normalized(variables, features, variables["batch_stats"]["mean"])


def apply_train(variables: Any, features: Any, key: Any) -> Any:
    before, mean = variables["batch_stats"], features.mean(axis=0)
    after = {"mean": (before["mean"] + mean) / 2, "seen": before["seen"] + 1}
    return normalized(variables, features, mean), {"batch_stats": after}


def model(**options: Any) -> JaxModel:
    return JaxModel(
        init, apply, cross_entropy, optax.sgd(0.1), **{"apply_train": apply_train, **options}
    )


def test_steps_and_statistics_equal_optax_loop() -> None:
    made = pickle_round_trip(model())
    made.check(ROWS, CLASSES)
    params = bound(made)
    variables = init(jax.random.key(0))

    def objective(trained: Any, stats: Any) -> Any:
        outputs, changed = apply_train({"params": trained, **stats}, ROWS, None)
        return cross_entropy(outputs, CLASSES).mean(), changed

    trained, stats = variables["params"], {"batch_stats": variables["batch_stats"]}
    for _ in range(3):
        slope = jax.value_and_grad(objective, has_aux=True)
        (loss, changed), slopes = slope(trained, stats)
        trained = jax.tree_util.tree_map(lambda p, s: p - 0.1 * s, trained, slopes)
        stats = changed
        assert made.step(BATCH) == pytest.approx(float(loss), rel=1e-5)
    wanted = {"params": trained, **stats}
    for name, leaf in (("kernel", trained["kernel"]), ("scale", trained["scale"])):
        np.testing.assert_allclose(made.parameters(params)["params"][name], leaf, rtol=1e-5)
    np.testing.assert_allclose(made.predict(ROWS), apply(wanted, ROWS), rtol=1e-4, atol=1e-5)
    assert made.loss(BATCH)[0] / 8 == pytest.approx(
        float(cross_entropy(apply(wanted, ROWS), CLASSES).mean()), rel=1e-5
    )


def test_buffers_are_averaged_loaded_and_exported() -> None:
    """Statistics are averaged (integers: the largest), loaded, and exported with the parameters."""
    one, other = pickle_round_trip(model()), pickle_round_trip(model())
    assert isinstance(one, Buffered)
    bound(one)
    bound(other)
    for _ in range(3):
        one.step(BATCH)
    other.step(Batch(ROWS + 1, CLASSES))
    first, second = [made.buffers_bytes() for made in (one, other)]
    assert other.weighed_buffers([first, second], [5.0, 0.0]) == first
    other.load_buffers_bytes(other.average_buffers([first, second]))
    stats = other.parameters(np.zeros(16, np.float32))["batch_stats"]
    mean = (ROWS.mean(axis=0) * 7 / 8 + (ROWS + 1).mean(axis=0) / 2) / 2
    np.testing.assert_allclose(stats["mean"], mean, rtol=1e-5)
    assert stats["seen"] == 3
    arrays = np.load(io.BytesIO(other.exported()[1]))
    assert sorted(arrays) == [
        "batch_stats/mean", "batch_stats/seen", "params/kernel", "params/scale"
    ]  # fmt: skip
    with pytest.raises(UsageError, match="3 bytes of buffers, this model has 20"):
        one.load_buffers_bytes(b"abc")


def test_jax_model_without_collections_has_no_buffers() -> None:
    assert make().buffers_bytes() == b""


def apply_with_wrong_shape(variables: Any, features: Any, key: Any) -> Any:
    """Return statistics of another shape."""
    return apply(variables, features), {"batch_stats": {"mean": jnp.zeros(5), "seen": 0}}


@pytest.mark.parametrize(
    ("train", "why"),
    [
        (lambda variables, features, key: apply(variables, features), "must return .outputs, ch"),
        (apply_with_wrong_shape, "apply_train changed the names, shapes or types of batch_stats"),
    ],
)
def test_apply_train_with_wrong_collections_is_refused(train: Any, why: str) -> None:
    """apply_train must return the outputs and collections of unchanged shapes."""
    with pytest.raises(UsageError, match=why):
        model(apply_train=train).check(ROWS, CLASSES)


def test_deep_copy_has_equal_but_separate_statistics() -> None:
    """A deep copy, as a server uses it, has the same statistics, but not the same memory."""
    made = model()
    params = bound(made)
    made.step(BATCH)
    twin = copy.deepcopy(made)
    twin.bind(params.copy())
    np.testing.assert_array_equal(twin.predict(ROWS), made.predict(ROWS))
    before = made.buffers_bytes()
    twin.step(BATCH)
    assert made.buffers_bytes() == before != twin.buffers_bytes()
