"""The law of exact sums: however values are split and merged, the sum equals ``math.fsum``."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkstrom.base.errors import UsageError
from sparkstrom.observe.evaluation_metrics import ExactSum

numbers = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e300, max_value=1e300)


@given(st.lists(numbers, max_size=40), st.integers(0, 40))
def test_sum_of_parts_is_exact_for_any_split(values: list[float], cut: int) -> None:
    whole = ExactSum.from_values(np.array(values))
    parts = ExactSum.from_values(np.array(values[cut:])) + ExactSum.from_values(
        np.array(values[:cut])
    )
    assert parts == whole
    assert float(whole) == math.fsum(values)


def test_small_values_are_kept_when_large_ones_cancel() -> None:
    """Small values are kept when large ones cancel."""
    assert float(ExactSum.from_values(np.array([1e300, 1.0, -1e300, 2.0**-1074]))) == 1.0
    assert ExactSum.from_values(np.array([2.0**-1074])).quanta == 1 << 52


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_exact_sum_rejects_non_finite_value(value: float) -> None:
    """NaN and infinity raise UsageError."""
    with pytest.raises(UsageError, match=str(value)):
        ExactSum.from_values(np.array([1.0, value]))
