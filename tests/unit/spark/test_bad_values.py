"""Tests of check_block, whose error names column, row and partition of a bad value."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.data.packed_rows import Leaf, RowFormat
from sparkstrom.data.row_blocks import Block, check_block
from sparkstrom.models import DenseNetwork
from sparkstrom.models.row_checks import BadValue

FIRST = 100  # the block's first row in its partition
GOOD = np.ones((4, 2), np.float32)


def dense() -> Any:
    return DenseNetwork([2, 3])


def make_torch_model() -> Any:
    torch = pytest.importorskip("torch", reason="torch is not here")
    from sparkstrom.models.torch import TorchModel

    loss = torch.nn.functional.cross_entropy
    return TorchModel(torch.nn.Linear(2, 3), loss, partial(torch.optim.SGD, lr=0.1))


def make_jax_model() -> Any:
    optax = pytest.importorskip("optax", reason="optax is not here")
    from sparkstrom.models.jax import JaxModel

    return JaxModel(
        lambda key: {"w": np.ones((2, 3), np.float32)},
        lambda params, x: x @ params["w"],
        optax.softmax_cross_entropy_with_integer_labels,
        optax.sgd(0.1),
    )


def make_keras_model() -> Any:
    pytest.importorskip("jax", reason="jax is not here")
    pytest.importorskip("optree", reason="keras is not here")
    from sparkstrom.models.keras import KerasModel
    from sparkstrom.models.keras_support import keras

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return KerasModel(model, loss, keras.optimizers.SGD(0.1))


KINDS = [dense, make_torch_model, make_jax_model, make_keras_model]


def block(
    features: Any, labels: Any, *, name: str = "pixels", kinds: tuple[str, str] = ("", "")
) -> Block:
    """Return a block of partition 3 with two columns; its first row has the number FIRST."""
    shapes, kind = (np.shape(features)[1:], np.shape(labels)[1:]), np.asarray(labels).dtype.str
    leaves = (
        Leaf(name, shapes[0], "<f4", "<f4", column=kinds[0]),
        Leaf("digit", shapes[1], kind, kind, column=kinds[1]),
    )
    form = RowFormat(leaves)
    records = form.pack([features, labels])
    return Block(form, records, np.arange(FIRST, FIRST + len(records)), "partition 3")


def make_bad_features(value: float) -> Any:
    """Return features with this value in row 2, column 1."""
    features = GOOD.copy()
    features[2, 1] = value
    return features


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nonfinite_value_error_names_column(make: Callable[[], Any], value: float) -> None:
    """An infinity or NaN is named by its column, and in an array also by its index."""
    model = make()
    for name, said in (("pixels", r"'pixels' at \[1\]"), ("age, income", "'income'")):
        with pytest.raises(UsageError) as caught:
            check_block(model, block(make_bad_features(value), np.zeros(4, int), name=name))
        assert caught.match(rf"^row 102 of partition 3: column {said} is {value}: it must be a fin")
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize("make", [dense, make_jax_model, make_keras_model])
@pytest.mark.parametrize("label", [-1, 3])
def test_invalid_class_label_error_names_column(make: Callable[[], Any], label: int) -> None:
    with pytest.raises(UsageError) as caught:
        check_block(make(), block(GOOD, np.array([0, 1, 2, label])))
    said = rf"^row 103 of partition 3: column 'digit' \(label\) is {label}: labels must be 0 to 2,"
    assert caught.match(said)


@pytest.mark.parametrize("make", KINDS)
def test_valid_rows_raise_no_error(make: Callable[[], Any]) -> None:
    check_block(make(), block(GOOD, np.array([0, 1, 2, 0])))


def test_pickled_bad_value_keeps_message() -> None:
    """A pickled BadValue keeps its message."""
    import pickle

    bad = BadValue("features", "x", 4, "2", "nan", "fill it")
    assert str(pickle.loads(pickle.dumps(bad))) == "row 4: features[x] at [2] is nan: fill it"


def test_only_dataframe_errors_contain_query_for_bad_rows() -> None:
    """The error has a query that shows the bad rows only if they came from a DataFrame."""
    kinds = ("number", "number")
    with pytest.raises(
        UsageError, match=r"frame\.where\(\"float\(income\) = float\('nan'\)\"\) shows"
    ):
        check_block(
            dense(),
            block(make_bad_features(np.nan), np.zeros(4, int), name="age, income", kinds=kinds),
        )
    with pytest.raises(UsageError, match=r'frame\.where\("digit = 3"\) shows such rows'):
        check_block(dense(), block(GOOD, np.array([0, 1, 2, 3]), kinds=kinds))
    local = block(GOOD, np.array([0, 1, 2, 3]), kinds=kinds)._replace(where="the data")
    of_rdd = block(GOOD, np.array([0, 1, 2, 3]))
    for no_dataframe in (local, of_rdd):
        with pytest.raises(UsageError) as caught:
            check_block(dense(), no_dataframe)
        assert "frame.where" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "quoted"),
    [
        ("my.vec", "`my.vec`"),
        ("größe", "`größe`"),
        ("a`b", "`a``b`"),
        ("a, b", "`a, b`"),
        ("Null", "`Null`"),
        ("true", "`true`"),
        ("x", "x"),
    ],
)
def test_special_column_names_are_quoted_in_query(name: str, quoted: str) -> None:
    """Spark takes a dot as a field of a struct, and in SQL only ASCII letters without backticks."""
    for kind, advice in (
        ("vector", f'vector_to_array("{quoted}", "float32")'),
        ("array", f"exists({quoted}, v -> float(v) = float('nan'))"),
    ):
        kinds = (kind, "number")
        with pytest.raises(UsageError) as caught:
            check_block(
                dense(), block(make_bad_features(np.nan), np.zeros(4, int), name=name, kinds=kinds)
            )
        assert advice in str(caught.value)
        assert f"column {name!r} at [1] is nan" in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "shape", "advice"),
    [
        (
            "array",
            (4, 2),
            """frame.where("exists(x, v -> float(v) = float('nan'))") shows such rows""",
        ),
        (
            "array",
            (4, 1, 2),
            """where("exists(x, v1 -> exists(v1, v2 -> float(v2) = float('nan')))") shows""",
        ),
        (
            "vector",
            (4, 2),
            """frame.where(exists(vector_to_array("x", "float32"), lambda v: v == lit("nan").ca""",
        ),
        ("", (4, 2), None),
    ],
)
def test_query_for_bad_rows_searches_array_elements(
    kind: str, shape: tuple[int, ...], advice: str | None
) -> None:
    """The query for bad rows searches the elements of arrays and vectors."""
    features = make_bad_features(np.nan).reshape(shape)
    with pytest.raises(UsageError) as caught:
        check_block(dense(), block(features, np.zeros(4, int), name="x", kinds=(kind, "number")))
    assert ("frame.where" in str(caught.value)) == (advice is not None)
    assert (advice or "") in str(caught.value)
    labels = np.zeros((4, 3), np.float32)
    labels[1, 2] = np.inf
    if kind == "array":
        model = DenseNetwork([2, 3], loss="squared_error")
        with pytest.raises(
            UsageError, match=r"where\(\"exists\(digit, v -> float\(v\) = float\('inf'\)\)"
        ):
            check_block(model, block(GOOD, labels, kinds=(kind, kind)))
