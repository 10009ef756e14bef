"""Tests that JaxModel refuses what cannot work, with a remedy."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from sparkstrom.base.errors import UsageError

pytest.importorskip("jax", reason="jax is not installed: pip install 'sparkstrom[jax]'")
optax = pytest.importorskip("optax", reason="optax is not installed: 'sparkstrom[jax]'")
pytest.importorskip("pyspark.cloudpickle", reason="what ships is pickled by Spark's")
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from sparkstrom.data.row_blocks import read_feature_blocks  # noqa: E402
from sparkstrom.models.jax import JaxModel  # noqa: E402
from sparkstrom.spark.executor.inference import predict_block, predict_features  # noqa: E402
from tests.unit.models.mlp_in_jax import (  # noqa: E402
    apply,
    batch,
    bound,
    cross_entropy,
    init,
    make,
)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"init": lambda key: {"w": jnp.zeros(3, jnp.bfloat16)}}, "parameter w is bfloat16"),
        ({"init": lambda key: {"n": jnp.zeros(3, jnp.int32)}}, "parameter n is int32"),
        ({"init": lambda key: {}}, "makes no arrays"),
        (
            {"init": lambda key: {"params": jnp.zeros(3), "batch_stats": jnp.zeros(3)}},
            "init makes batch_stats besides params",
        ),
        ({"apply": 3}, "apply is a int"),
        ({"outputs": "classes"}, "outputs='classes'"),
    ],
)
def test_jax_model_refuses_invalid_arguments(changed: dict[str, Any], words: str) -> None:
    whole = {"init": init, "apply": apply, "loss": cross_entropy, "optimizer": optax.sgd(0.1)}
    with pytest.raises(UsageError, match=words):
        JaxModel(**(whole | changed))


def with_value(array: Any, row: int, value: Any) -> Any:
    """Return a copy with this value in a row (in column 4, if it has columns)."""
    changed = array.copy()
    changed[row if array.ndim == 1 else (row, 4)] = value
    return changed


@pytest.mark.parametrize(
    ("features", "labels", "words"),
    [
        (lambda f: f[:, :5], lambda y: y, r"on rows of float32\[5\]: TypeError: dot"),
        (partial(with_value, row=2, value=np.nan), lambda y: y, r"row 2: features at \[4\] is nan"),
        (
            lambda f: f,
            partial(with_value, row=5, value=3),
            "row 5: label is 3: labels must be 0 to 2",
        ),
        (lambda f: f, partial(with_value, row=1, value=-1), "row 1: label is -1"),
        (lambda f: f, partial(with_value, row=1, value=2**40), "32 bits"),
        (lambda f: f, lambda y: y[:7], "8 rows of features, but 7"),
    ],
)
def test_unsuitable_rows_are_refused_with_row_number(
    features: Any, labels: Any, words: str
) -> None:
    rows = batch()
    make().check(rows.features, rows.labels)
    with pytest.raises(UsageError, match=words):
        make().check(features(rows.features), labels(rows.labels))


@pytest.mark.parametrize("wrap", [lambda ids: ids, lambda ids: (ids,), lambda ids: {"ids": ids}])
def test_prediction_refuses_integers_beyond_32_bits(wrap: Any) -> None:
    """The id 2^32 + 1 is not predicted as the id 1."""
    model = JaxModel(
        lambda key: {"table": jnp.arange(6.0)},
        lambda params, ids: params["table"][jax.tree_util.tree_leaves(ids)[0]],
        lambda outputs, labels: (outputs - labels) ** 2,
        optax.sgd(0.1),
    )
    bound(model)
    assert model.predict(wrap(np.array([5, 2]))).tolist() == [5.0, 2.0]
    for value in (2**32 + 1, -(2**31) - 1):
        words = f"row 1: features.* is {value}: JAX computes with 32 bits; renumber such keys"
        with pytest.raises(UsageError, match=words):
            model.predict(wrap(np.array([1, value])))
    with pytest.raises(UsageError, match=f"is {2**63}: JAX computes with 32 bits"):
        model.predict(wrap(np.array([2**63], np.uint64)))
    rows = [wrap(np.array(value)) for value in [1] * 300 + [2**32 + 1]]
    block = next(read_feature_blocks(4, iter(rows)))
    with pytest.raises(UsageError, match=r"row 300 of partition 4: column .features.* is 42949"):
        predict_block(model, block)
    ids = wrap(np.array([1] * 300 + [2**32 + 1]))
    with pytest.raises(UsageError, match=r"row 300: features.* is 4294967297: JAX"):
        predict_features(model, ids)


def test_integer_labels_beyond_classes_are_accepted_only_as_floats() -> None:
    """Integers that are not classes are refused, unless they are cast to float32."""

    def squared(outputs: Any, labels: Any) -> Any:
        return (outputs[:, 0] - labels) ** 2

    model = JaxModel(init, apply, squared, optax.sgd(0.1))
    rows, ages = batch(), np.arange(30, 38)
    with pytest.raises(UsageError, match=r"label is 30: .* or cast them to float32 if they are"):
        model.check(rows.features, ages)
    model.check(rows.features, ages.astype(np.float32))


def test_padding_label_is_refused_unless_loss_masks_it() -> None:
    """A padding label is refused for optax's loss, and accepted for a loss that masks it."""

    def masked(logits: Any, labels: Any) -> Any:
        return cross_entropy(logits, jnp.maximum(labels, 0)) * (labels >= 0)

    features = np.zeros((8, 4, 6), np.float32)
    labels = np.zeros((8, 4), np.int32)
    make().check(features, labels)
    labels[2, 3] = -1  # padding, which optax takes for the last class
    with pytest.raises(UsageError, match=r"row 2: label at \[3\] is -1: labels must be 0 to 2"):
        make().check(features, labels)
    JaxModel(init, apply, masked, optax.sgd(0.1)).check(features, labels)


def test_loss_that_broadcasts_outputs_with_labels_is_refused() -> None:
    """A loss that broadcasts outputs [rows, 1] with labels [rows] is refused."""
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


def test_lbfgs_is_refused_with_message_of_optax() -> None:
    """optax.lbfgs is refused with optax's own message, since it needs value_fn."""
    with pytest.raises(UsageError, match="value_fn"):
        make(optax.lbfgs()).check(batch().features, batch().labels)


def test_description_lists_arrays_but_cannot_create_jax_model() -> None:
    from sparkstrom.models.base import from_description

    described = make().describe()
    assert described["parameters"][0] == ["hidden/0", [6, 5]]
    with pytest.raises(UsageError, match="create the model as before, and load"):
        from_description(described)
