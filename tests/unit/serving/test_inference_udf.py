"""Series of columns become what the model takes, and its outputs Series again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.models import DenseNetwork
from sparkstrom.models.outputs import predict_in_blocks
from sparkstrom.spark.executor.inference_udf import (
    check_inputs,
    features_of_series,
    outputs_of_features,
)


def arrays(*rows: list[float]) -> Any:
    return pd.Series([np.array(row) for row in rows])


def test_columns_of_numbers_stand_side_by_side() -> None:
    found = features_of_series([pd.Series([1, 2]), pd.Series([0.5, 1.5])], None, None)
    assert found.tolist() == [[1, 0.5], [2, 1.5]]  # type: ignore[union-attr]


def test_a_column_of_arrays_is_an_array() -> None:
    found = features_of_series([arrays([1.0, 2.0, 3.0], [4.0, 5.0, 6.0])], None, None)
    assert found.shape == (2, 3)  # type: ignore[union-attr]
    assert found.dtype == np.float32  # type: ignore[union-attr]
    shaped = features_of_series([arrays([1, 2, 3, 4])], None, [(2, 2)])
    assert shaped.tolist() == [[[1, 2], [3, 4]]]  # type: ignore[union-attr]


def test_each_input_has_its_column() -> None:
    given = [arrays([1, 2]), pd.Series([3])]
    pair = features_of_series(given, 2, None)
    assert isinstance(pair, tuple)
    assert [array.tolist() for array in pair] == [[[1, 2]], [[3]]]
    named = features_of_series(given, ("a", "b"), [(2, 1), (1,)])
    assert isinstance(named, dict)
    assert named["a"].shape == (1, 2, 1)


def test_whole_numbers_stay_whole() -> None:
    tokens = features_of_series([pd.Series([np.array([1, 2], np.int64)])], None, None)
    assert tokens.dtype == np.int64  # type: ignore[union-attr]


def test_outputs_are_those_of_predict() -> None:
    model = DenseNetwork([4, 8, 3], seed=1)
    model.bind(model.initial())
    features = np.random.default_rng(0).random((1000, 4), np.float32)
    found = outputs_of_features(model, features)
    assert found[0].tobytes() == predict_in_blocks(model, features).tobytes()


@pytest.mark.parametrize(
    ("given", "inputs", "shapes", "words"),
    [
        ([arrays([1, 2], [3])], None, None, "different lengths"),
        ([pd.Series([1.0, None])], None, None, "column 0 has a null, in row 1"),
        ([pd.Series([np.array([1]), None])], None, None, "has a null"),
        ([pd.Series(["a"])], None, None, "give numbers"),
        ([arrays([1, 2])], 2, None, "got 1 columns; give 2"),
        ([arrays([1, 2, 3])], None, [(2, 2)], r"shapes\[0\]=\(2, 2\): rows have \[3\]"),
    ],
)
def test_what_does_not_fit_is_named(given: Any, inputs: Any, shapes: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        features_of_series(given, inputs, shapes)


def test_a_model_that_fails_says_where_to_look() -> None:
    model = DenseNetwork([4, 3], seed=1)
    model.bind(model.initial())
    with pytest.raises(UsageError, match=r"look at inputs= and shapes="):
        outputs_of_features(model, np.zeros((2, 5), np.float32))


@pytest.mark.parametrize(
    ("inputs", "shapes"), [(0, None), (True, None), ((), None), ("a", None), (2, [(1,)])]
)
def test_inputs_and_shapes_are_looked_at(inputs: Any, shapes: Any) -> None:
    with pytest.raises(UsageError, match=r"inputs=|shapes="):
        check_inputs(inputs, shapes)
