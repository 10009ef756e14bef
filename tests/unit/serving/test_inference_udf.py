"""Tests of inference in a Spark UDF: columns become features, and outputs become columns."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.data.row_blocks import read_feature_blocks
from sparkstrom.models import DenseNetwork
from sparkstrom.models.base import arrays_of
from sparkstrom.models.output_interpretation import predict_flattened
from sparkstrom.spark.executor.inference import (
    check_inputs,
    create_inference_udf,
    predict_features,
    series_to_features,
)


def arrays(*rows: list[float]) -> Any:
    return pd.Series([np.array(row) for row in rows])


def test_numeric_columns_become_columns_of_one_array() -> None:
    """Several columns of numbers become the columns of one array."""
    found = series_to_features([pd.Series([1, 2]), pd.Series([0.5, 1.5])], None, None)
    assert found.tolist() == [[1, 0.5], [2, 1.5]]  # type: ignore[union-attr]


def test_array_column_becomes_float_array_of_given_shape() -> None:
    found = series_to_features([arrays([1.0, 2.0, 3.0], [4.0, 5.0, 6.0])], None, None)
    assert found.shape == (2, 3)  # type: ignore[union-attr]
    assert found.dtype == np.float32  # type: ignore[union-attr]
    shaped = series_to_features([arrays([1, 2, 3, 4])], None, [(2, 2)])
    assert shaped.tolist() == [[[1, 2], [3, 4]]]  # type: ignore[union-attr]


def test_each_column_becomes_one_input() -> None:
    """With ``inputs``, each column becomes an input of its own, by position or name."""
    given = [arrays([1, 2]), pd.Series([3])]
    pair = series_to_features(given, 2, None)
    assert isinstance(pair, tuple)
    assert [array.tolist() for array in pair] == [[[1, 2]], [3]]
    named = series_to_features(given, ("a", "b"), [(2, 1), (1,)])
    assert isinstance(named, dict)
    assert named["a"].shape == (1, 2, 1)


def test_numeric_column_has_same_shape_in_training_and_udf() -> None:
    """An input that is a column of numbers is [rows], so that it is not broadcast with others."""
    given = [arrays([1, 2], [3, 4]), pd.Series([0.5, 1.5])]
    for inputs in (2, ("a", "b")):
        found = arrays_of(series_to_features(given, inputs, None))
        assert [array.shape for array in found] == [(2, 2), (2,)]
    rows = zip(given[0], given[1], strict=True)
    block = next(read_feature_blocks(0, rows))
    trained = arrays_of(block.form.batch(block.records).features)
    assert [array.shape for array in trained] == [(2, 2), (2,)]
    wide = series_to_features(given, 2, [(2,), (1,)])
    assert [array.shape for array in arrays_of(wide)] == [(2, 2), (2, 1)]
    combined = series_to_features(given[1:], None, None)
    assert arrays_of(combined)[0].shape == (2, 1)


def test_integer_array_column_keeps_its_type() -> None:
    """Integers in an array column keep their type."""
    tokens = series_to_features([pd.Series([np.array([1, 2], np.int64)])], None, None)
    assert tokens.dtype == np.int64  # type: ignore[union-attr]


@pytest.mark.parametrize("second", [[3, 4], [0.5, 1.5], [True, False]])
def test_several_integer_or_mixed_columns_become_float32(second: list[Any]) -> None:
    """Several integer or mixed columns become float32, as in training."""
    found = series_to_features([pd.Series([1, 2]), pd.Series(second)], None, None)
    assert isinstance(found, np.ndarray)
    assert found.dtype == np.float32
    assert found.tolist() == [[1, second[0]], [2, second[1]]]


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32])
def test_integer_inputs_become_int64(dtype: Any) -> None:
    """Integers become int64 as in training; ``torch.gather`` accepts no other type."""
    given = pd.Series([np.array([1, 2], dtype)]), pd.Series([3], dtype=dtype)
    assert [array.dtype for array in series_to_features(given, 2, None)] == [np.int64] * 2


def test_decimals_become_float32() -> None:
    """In Spark's SQL, a literal such as 1.5 is a decimal."""
    numbers = pd.Series([Decimal("1.5"), Decimal(2)])
    found = series_to_features([numbers, pd.Series([0, 1])], None, None)
    assert isinstance(found, np.ndarray)
    assert (found.dtype, found.tolist()) == (np.float32, [[1.5, 0], [2, 1]])
    array: Any = series_to_features([pd.Series([numbers.to_numpy()])], None, None)
    assert (array.dtype, array.tolist()) == (np.float32, [[1.5, 2]])


def nested(values: list[Any], kind: Any) -> Any:
    """Return a Series of nested arrays in the form in which Spark passes them."""
    return pa.array(values, pa.list_(pa.list_(kind))).to_pandas()


@pytest.mark.parametrize("kind", [pa.float32(), pa.int16()])
def test_nested_array_column_is_stacked(kind: Any) -> None:
    values = [[[1, 2], [3, 4], [5, 6]], [[7, 8], [9, 10], [11, 12]]]
    found = series_to_features([nested(values, kind)], None, None)
    assert isinstance(found, np.ndarray)
    assert found.tolist() == values
    deep = pa.array([values, values]).to_pandas()
    assert series_to_features([deep], None, None).tolist() == [values, values]  # type: ignore[union-attr]


def test_predict_features_equals_predict_flattened() -> None:
    """The outputs are bit for bit those of ``predict_flattened``."""
    model = DenseNetwork([4, 8, 3], seed=1)
    model.bind(model.initial())
    features = np.random.default_rng(0).random((1000, 4), np.float32)
    found = predict_features(model, features)
    assert found[0].tobytes() == predict_flattened(model, features).tobytes()


@pytest.mark.parametrize(
    ("given", "inputs", "shapes", "words"),
    [
        ([arrays([1, 2], [3])], None, None, "different lengths"),
        ([pd.Series([1.0, None])], None, None, "column 0 has a null or NaN, in row 1"),
        ([pd.Series([np.array([1]), None])], None, None, "has a null"),
        ([pd.Series(["a"])], None, None, "give numbers"),
        ([pd.Series([pd.Timestamp(0)])], None, None, r"column 0 has datetime64\[ns\] values: give"),
        ([pd.Series([{"a": 1}])], None, None, "column 0 has dict values: give numbers"),
        ([pd.Series([np.array(["a"], object)])], None, None, "has str values: give numbers"),
        ([arrays([1, 2], [3, np.nan])], None, None, "column 0 has a null or NaN, in row 1"),
        ([pa.array([[1, 2], [None, 3]]).to_pandas()], None, None, "a null or NaN, in row 1"),
        ([pa.array([[True], [None]]).to_pandas()], None, None, "a null or NaN, in row 1"),
        ([pd.Series([1, 2]), arrays([1], [np.nan])], ("a", "b"), None, "column 1 .* row 1"),
        ([nested([[[1]], [[None]]], pa.int8())], None, None, "a null or NaN, in row 1"),
        ([nested([[[1], [2]], [[1], None]], pa.int8())], None, None, "a null or NaN, in row 1"),
        ([nested([[[1], [2]], [[1], [1, 2]]], pa.int8())], None, None, "different lengths"),
        ([nested([[[1], [2]], [[1]]], pa.int8())], None, None, "different lengths"),
        (
            [pd.Series([1.0, -1e300])],
            None,
            None,
            r"column 0: it has -1e\+300, which float32 cannot",
        ),
        ([arrays([1.0, 1e300])], 1, None, r"column 0: it has 1e\+300, which float32 cannot hold"),
        ([pd.DataFrame({"a": [1]})], None, None, r"column 0 is a struct of \['a'\]: give its"),
        ([arrays([1, 2])], 2, None, "got 1 columns; give 2"),
        ([arrays([1, 2, 3])], None, [(2, 2)], r"shapes\[0\]=\(2, 2\): rows have \[3\]"),
    ],
)
def test_unsuitable_column_is_refused_with_number_and_reason(
    given: Any, inputs: Any, shapes: Any, words: str
) -> None:
    """Unsuitable columns raise ``UsageError`` with the column's number and the reason."""
    with pytest.raises(UsageError, match=words):
        series_to_features(given, inputs, shapes)


def test_model_error_mentions_inputs_and_shapes_options() -> None:
    """An error inside the model mentions the options to check."""
    model = DenseNetwork([4, 3], seed=1)
    model.bind(model.initial())
    with pytest.raises(UsageError, match=r"check inputs= and shapes="):
        predict_features(model, np.zeros((2, 5), np.float32))


@pytest.mark.parametrize(
    ("inputs", "shapes"),
    [
        *[(0, None), (True, None), ((), None), ("a", None), (2, [(1,)])],
        *[(None, 5), (None, [784]), (None, [(2.0, 2)]), (None, [(True,)]), (None, ["28"])],
        *[(None, "2"), (2, {1: (1,), 2: (1,)}), (2, [(1,), None])],
    ],
)
def test_invalid_inputs_or_shapes_option_is_refused(inputs: Any, shapes: Any) -> None:
    """Invalid values of ``inputs`` or ``shapes`` raise ``UsageError``."""
    with pytest.raises(UsageError, match=r"inputs=|shapes="):
        check_inputs(inputs, shapes)


def test_shapes_may_be_sequences_of_integers() -> None:
    """Shapes may be tuples or lists of integers, including NumPy's."""
    check_inputs(2, [(1, 28, 28), [np.int64(4)]])
    check_inputs(("a", "b"), ((-1, 2), ()))


def test_struct_field_names_are_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A field's name may have backticks; before, Spark could not parse the type of the struct."""
    monkeypatch.setattr("pyspark.sql.pandas.functions.pandas_udf", lambda function, kind: kind)
    found = create_inference_udf(None, None, None, ("a.b", "c`d"))
    assert found == "struct<`a.b`:array<float>,`c``d`:array<float>>"
