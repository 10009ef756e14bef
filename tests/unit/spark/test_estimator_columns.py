"""The columns that an estimator's model adds: of which types, and for which outputs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.ml.linalg import VectorUDT
from pyspark.sql.types import ArrayType, DoubleType, IntegerType, StructType

from sparkstrom.spark.data.column_selection import is_scalar_label

FRAME: Any = SimpleNamespace(
    schema=StructType()
    .add("label", DoubleType())
    .add("other", IntegerType())
    .add("steps", ArrayType(IntegerType()))
    .add("shares", VectorUDT())
)


@pytest.mark.parametrize(
    ("label", "scalar"),
    [
        *[(label, True) for label in ("label", ["label"], ("other",), (["label"],))],
        *[({"y": "label"}, True), ({"y": ["other"]}, True)],
        *[(label, False) for label in (None, "steps", "shares", ("steps",), {"y": "shares"})],
        *[(label, False) for label in (["label", "other"], ("label", "other"))],
    ],
)
def test_a_label_of_one_number_is_scalar_however_its_column_is_named(
    label: Any, scalar: bool
) -> None:
    """A list is how a module with one output gets labels [rows, 1]."""
    assert is_scalar_label(FRAME, label) is scalar
