"""Tests of a report's axes: ticks and their labels, and which points of a long curve are drawn."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkstrom.observe.reporting.svg_plots import (
    AxisScale,
    downsample,
    evenly_spaced_indices,
    format_tick,
    split_at_gaps,
)

values = st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=20)


@given(values=values, is_log=st.booleans(), from_zero=st.booleans())
def test_axis_ticks_lie_within_axis_for_any_values(values, is_log, from_zero) -> None:
    scale = AxisScale.fit(values, is_log=is_log, from_zero=from_zero)
    ticks = scale.ticks(5)
    assert len(ticks) <= 8
    for value in [*ticks, *(value for value in values if scale.contains(value))]:
        assert -1e-6 <= scale.position(value) <= 1 + 1e-6
    assert ticks == sorted(ticks)
    assert all(format_tick(tick) for tick in ticks)


def test_ticks_are_round() -> None:
    assert AxisScale(0.0, 4.2).ticks(5) == [0, 1, 2, 3, 4]
    assert AxisScale(33.0, 67.0).ticks(5) == [40, 50, 60]
    assert AxisScale(1e-4, 2.0, True).ticks(5) == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1, 1])
    assert AxisScale(0.04, 1.5, True).ticks(5) == pytest.approx([0.05, 0.1, 0.2, 0.5, 1])


def test_axis_of_equal_values_has_positive_width() -> None:
    """An axis of equal, zero or no values still has a positive width."""
    scale = AxisScale.fit([3.0, 3.0])
    assert scale.low < 3.0 < scale.high
    assert AxisScale.fit([0.0, 0.0], from_zero=True).low == 0.0
    assert AxisScale.fit([5.0], from_zero=True).low == 0.0
    assert AxisScale.fit([], is_log=True).ticks(5)
    assert not AxisScale.fit([1.0, 2.0], is_log=True).contains(-1.0)
    assert not AxisScale.fit([1.0]).contains(None)


def test_tick_labels_are_short() -> None:
    told = [format_tick(value) for value in (0, 0.25, 1500.0, 20_000, 3e6, 1e-5, -5e4, 4e12)]
    assert told == ["0", "0.25", "1500", "20k", "3M", "1e-5", "-50k", "4T"]


@given(ys=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=500), most=st.integers(4, 50))
def test_downsampling_keeps_ends_and_extremes(ys, most) -> None:
    """Downsampling keeps the first and last point, the minimum and the maximum."""
    points = list(enumerate(ys))
    kept = downsample(points, most)
    assert len(kept) <= most
    assert kept == sorted(kept)
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert {min(ys), max(ys)} <= {y for _, y in kept}


def test_unknown_values_split_curve() -> None:
    """Unknown values split a curve into separate lines."""
    found = split_at_gaps([0, 1, 2, 3, 4, 5], [None, 1.0, 2.0, None, None, 3.0])
    assert found == [[(1, 1.0), (2, 2.0)], [(5, 3.0)]]
    assert split_at_gaps([0], [None]) == []


@pytest.mark.parametrize(("count", "most"), [(0, 5), (1, 5), (5, 5), (6, 5), (1000, 40)])
def test_evenly_spaced_indices_include_both_ends(count: int, most: int) -> None:
    found = evenly_spaced_indices(count, most)
    assert len(found) == min(count, most)
    assert found[:1] == [0][:count]
    assert found[-1:] == [count - 1][:count]
    gaps = {b - a for a, b in pairwise(found)}
    assert not gaps or max(gaps) - min(gaps) <= 1
