"""Tests of Spark's settings that decide how columns are named and written."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, FloatType, StructType

from sparkstrom.base.errors import UsageError
from sparkstrom.data.column_selection import ColumnSpec
from sparkstrom.spark.data.column_selection import (
    LARGE_TYPES_KEY,
    _FrameColumns,
    _get_arrow_schema,
    resolve_columns,
)


def frame_with(**settings: str) -> Any:
    """Return a fake DataFrame with columns ``Label``, ``label`` and ``image``."""
    schema = StructType().add("Label", FloatType()).add("label", FloatType())
    conf = {name.replace("_", "."): value for name, value in settings.items()}
    session = SimpleNamespace(conf=conf)
    return SimpleNamespace(schema=schema.add("image", BinaryType()), sparkSession=session)


@pytest.mark.parametrize("value", ["true", "TRUE"])
def test_boolean_settings_ignore_case(value: str) -> None:
    exact = _FrameColumns.from_frame(frame_with(spark_sql_caseSensitive=value))
    assert exact.find_ambiguous("label") == ["label"]
    frame = frame_with()
    frame.sparkSession.conf[LARGE_TYPES_KEY] = value
    assert _get_arrow_schema(frame).field("image").type == pa.large_binary()


def test_column_names_are_case_insensitive_by_default() -> None:
    """Column names that differ only in case are ambiguous by default."""
    assert _FrameColumns.from_frame(frame_with()).find_ambiguous("label") == ["Label", "label"]


@pytest.mark.parametrize(
    "names", [np.array(["Label", "image"]), pd.Index(["Label"]), {"a", "b"}, None, 3]
)
def test_rejects_features_that_are_not_names(names: Any) -> None:
    """Before, an array of names, such as ``pdf.columns``, ended a prediction in a ValueError."""
    with pytest.raises(UsageError, match=r"features=.*: give a column's name, a list of numeric"):
        resolve_columns(frame_with(), ColumnSpec(names, ()))
