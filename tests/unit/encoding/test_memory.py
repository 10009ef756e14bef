"""Tests of host memory: it copies nothing without need, and assigns only arrays that are alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from sparkstrom.encoding import backends
from sparkstrom.encoding import layers as samples
from sparkstrom.encoding.layers import Layers

memory = backends.memory()


def test_host_array_is_not_copied() -> None:
    array = np.arange(6, dtype=np.float32)
    assert memory.from_host(array) is array
    assert memory.to_host(array) is array
    assert np.shares_memory(memory.part(array, slice(2, 4)), array)


def test_copy_is_independent_of_original() -> None:
    array = np.arange(3, dtype=np.float32)
    twin = memory.copy(array)
    memory.assign(array, np.zeros(3, np.float32))
    assert (twin.tolist(), array.tolist()) == ([0, 1, 2], [0, 0, 0])


def test_subtract_may_write_into_its_operand() -> None:
    one, other = np.array([3, 5], np.float32), np.array([1, 7], np.float32)
    memory.subtract(other, one, other)
    assert other.tolist() == [2, -2]
    memory.subtract(one, one, other)
    assert one.tolist() == [1, 7]


@pytest.mark.parametrize("source", [np.zeros(1, np.float32), np.zeros(3, np.float64)])
def test_assign_rejects_other_shape_or_dtype(source: NDArray[Any]) -> None:
    with pytest.raises(AssertionError):
        memory.assign(np.ones(3, np.float32), source)


def test_tau_is_computed_from_sample_of_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a sample of many parameters is copied; sizes are divided by the layers' multipliers."""
    host, copied = backends.host(), list[int]()

    class Counting:  # the methods that are called here
        empty = staticmethod(memory.empty)

        def to_host(self, array: NDArray[Any]) -> NDArray[Any]:
            copied.append(array.size)
            return array

    backend = replace(host, memory=cast(Any, Counting()))
    monkeypatch.setattr(samples, "SAMPLE_PARAMS", 8)
    learnt, theta = np.full(100, 6, np.float32), np.zeros(100, np.float32)
    tau = samples.tau_reached_by(0.5, 1, learnt, theta, -1, Layers((100,), (3,)), backend)
    assert tau == 2
    assert copied == [8, 8]  # indices and sizes


@pytest.mark.parametrize(
    ("fraction", "looked_at"), [(0.5, 8192), (1e-2, 12_800), (4e-3, 32_000), (1e-3, 65_536)]
)
def test_sample_grows_as_wanted_fraction_shrinks(
    monkeypatch: pytest.MonkeyPatch, fraction: float, looked_at: int
) -> None:
    """The smaller the fraction, the larger the sample, so that tau is accurate enough."""
    sizes, sampled = [], samples.Residuals.sample_sizes

    def seen(self: samples.Residuals, size: int, seed: int) -> Any:
        sizes.append(size)
        return sampled(self, size, seed)

    monkeypatch.setattr(samples.Residuals, "sample_sizes", seen)
    chance = np.random.default_rng(3)
    learnt, theta = chance.normal(0, 1, 300_000).astype(np.float32), np.zeros(300_000, np.float32)
    taus = [samples.tau_reached_by(fraction, number, learnt, theta, -1) for number in range(40)]
    assert set(sizes) == {looked_at}
    found = [np.count_nonzero(np.abs(learnt) >= tau) / learnt.size for tau in taus]
    assert np.std(found) < 0.13 * fraction  # a tenth; an eighth for the smallest fraction
    assert np.mean(found) == pytest.approx(fraction, rel=0.06)


def test_sample_is_larger_if_most_residuals_are_zero() -> None:
    """If most residuals are 0, as in an embedding, the sample is larger."""
    learnt, theta = np.zeros(1_000_000, np.float32), np.zeros(1_000_000, np.float32)
    learnt[::10_000] = 1  # 100 of them: a sample of 8,192 mostly has one or none
    taus = [samples.tau_reached_by(0.1, number, learnt, theta, -1) for number in range(20)]
    assert taus.count(1.0) >= 18
    assert samples.tau_reached_by(0.1, 1, theta, theta, -1) is None


@pytest.mark.parametrize("size", [1, 70, 3_000])
def test_nth_largest_is_exact_with_and_without_equal_values(size: int) -> None:
    chance = np.random.default_rng(size)
    looked_at = chance.random(size)
    looked_at[:: samples.FEW_STRIDE] += 1  # too few values reach the bound of these
    alike = chance.integers(0, 5, size)
    for values in (chance.random(size), alike, np.sort(chance.random(size)), looked_at):
        array = values.astype(np.float32)
        descending = np.sort(array)[::-1]
        for n in {1, min(size, 10), min(size, 30), size // 2 + 1, size}:
            assert samples.nth_largest(array, n) == descending[n - 1]
