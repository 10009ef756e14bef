"""Tests of the grid: the exponent k from the parameters, rounding, and thresholds in quanta."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.encoding import grid


def flat(*values: float) -> grid.Flat:
    return np.array(values, np.float32)


@pytest.mark.parametrize(
    ("largest", "k"),
    [(0.0, 20), (0.5, 20), (2.0, 20), (2.1, 19), (4.0, 19), (1000.0, 11), (2.0**124, -103)],
)
def test_exact_range_is_16_or_8_times_largest_parameter(largest: float, k: int) -> None:
    assert grid.first_exponent(flat(0.0, -largest)) == k
    reach = grid.EXACT_QUANTA * grid.quantum(k)
    assert reach >= max(16, 8 * largest)
    assert k == 20 or reach / 2 < 8 * largest


def test_model_without_parameters_has_default_exponent() -> None:
    """A model without parameters has k = 20."""
    assert grid.first_exponent(flat()) == 20


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_parameter_is_refused_by_index(bad: float) -> None:
    with pytest.raises(UsageError, match=r"parameter 2 is -?(nan|inf)"):
        grid.first_exponent(flat(0.0, 1.0, bad, bad))


def test_too_large_parameter_is_refused_by_index() -> None:
    with pytest.raises(UsageError, match=r"parameter 1 is .*scale the model down"):
        grid.first_exponent(flat(1.0, -3e37))


@pytest.mark.parametrize(("largest", "k"), [(0.1, 20), (4.0, 20), (4.1, 18), (100.0, 14)])
def test_later_fit_coarsens_grid_only_if_range_is_too_small(largest: float, k: int) -> None:
    assert grid.next_exponent(flat(largest), 20) == k


def test_a_later_fit_never_makes_the_grid_finer() -> None:
    assert grid.next_exponent(flat(0.001), 12) == 12


def test_rounding_is_to_nearest_multiple_without_negative_zero() -> None:
    rounded = grid.round_to_grid(flat(0.3, -0.1, -0.0, 0.625, 7.0), 2)
    assert rounded.tolist() == [0.25, 0.0, 0.0, 0.5, 7.0]
    assert not np.signbit(rounded).any()
    assert rounded.dtype == np.float32


def test_rounding_does_not_change_its_argument() -> None:
    theta = flat(0.3)
    grid.round_to_grid(theta, 0)
    assert theta[0] == np.float32(0.3)


@pytest.mark.parametrize(
    ("tau", "quanta"),
    [
        (1e-3, 1048),
        (2.0**-19, 2),
        (1e-12, 2),
        (3.1 * 2.0**-20, 4),
        (15.0, 15 * 2**20),
        (16.0, 2**24),
        (1e9, 2**24),
    ],
)
def test_tau_is_a_positive_even_number_of_quanta(tau: float, quanta: int) -> None:
    assert grid.tau_quanta(tau, 20) == quanta
    assert float(np.float32(quanta * grid.quantum(20))) == quanta * grid.quantum(20)


@pytest.mark.parametrize(
    ("quanta", "scale", "step"), [(8, 1.0, 8), (8, 0.5, 4), (8, 0.2, 2), (2, 0.01, 2), (6, 0.9, 6)]
)
def test_a_scaled_step_is_even_and_no_longer_than_tau(quanta: int, scale: float, step: int) -> None:
    assert grid.scaled_quanta(quanta, scale) == step
