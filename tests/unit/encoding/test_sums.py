"""Tests of sums of updates: size, choice of the layout, refused bytes, and the change to dense."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from sparkstrom.base.errors import WireError
from sparkstrom.encoding import update_sum as sums
from sparkstrom.encoding.grid import round_coarsely
from sparkstrom.encoding.update_sum import SPARSE_MAX, UpdateSum
from tests.unit.encoding.sums_bound import sum_bytes_bound

I32 = NDArray[np.int32]
N = 200_000


def update(seed: int, density: float, tau: int, n_params: int = N) -> tuple[I32, I32]:
    """Return the indices and quanta of a random update."""
    random = np.random.default_rng(seed)
    indices = np.flatnonzero(random.random(n_params) < density).astype(np.int32)
    return indices, random.choice(np.array([-tau, tau, 2 * tau], np.int32), indices.size)


def make_sum(count: int, density: float, *, rounded: bool = True) -> UpdateSum:
    """Return a sum of random updates, whose steps are rounded to few sizes or not."""
    total = UpdateSum(N)
    for seed in range(count):
        tau = 2 * int(500 + 200 * np.random.default_rng(seed).random())
        total.add(update(seed, density, round_coarsely(tau) if rounded else tau))
    return total


def single_bytes(count: int, density: float) -> int:
    """Return about the bytes of the single updates: Rice-coded gaps and a sign."""
    return int(count * N * density * (np.log2(1 / density) + 2.6) / 8)


@pytest.mark.parametrize(
    ("count", "density", "of_singles"), [(1, 1e-2, 1.2), (16, 1e-2, 1.0), (75, 1e-2, 0.65)]
)
def test_sum_is_shorter_than_its_updates_and_round_trips(
    count: int, density: float, of_singles: float
) -> None:
    total = make_sum(count, density)
    payload = sums.encode(total)
    assert len(payload) < of_singles * single_bytes(count, density)
    assert len(payload) < 0.15 * 4 * N
    np.testing.assert_array_equal(sums.decode_untrusted(payload, N).dense(), total.dense())


def test_coarse_step_sizes_shorten_sum() -> None:
    """If tau is rounded to few sizes, a sum is less than 0.6 times as long."""
    assert len(sums.encode(make_sum(75, 1e-2))) < 0.6 * len(
        sums.encode(make_sum(75, 1e-2, rounded=False))
    )


@pytest.mark.parametrize(
    ("values", "layout"),
    [
        ([0] * 2000, 1),
        ([0] * 1999 + [-(2**31)], 1),
        ([5] * 2000, 1),
        (list(range(-32001, 32000, 32)), 3),
        ([3 * value for value in range(-127, 128)] * 4, 2),
        ([2**31 - 1 - value for value in range(0, 2**31 - 1, 2**22 - 1)], 4),
        ([-(2**31)] * 40, 1),
    ],
)
def test_shortest_sum_layout_is_chosen(values: list[int], layout: int) -> None:
    array = np.array(values, np.int32)
    payload = sums.encode(UpdateSum.of_array(array))
    assert payload[0] == layout
    np.testing.assert_array_equal(sums.decode_untrusted(payload, array.size).dense(), array)
    assert len(payload) <= sum_bytes_bound(array.size, array.size)


HEAD = sums.SPARSE_HEADER.pack(1, 2, 6, 1, 2, 0)  # 2 entries of a unit of 6


def test_worked_example_of_sparse_sum() -> None:
    # Rice parameter 2. Gap 5: 5 // 4 = 1 is 0 1, low bits 1 0; minus is 1; size 0 is 1.
    bits = "01" + "10" + "1" + "1" + "1" + "00" + "0" + "010"  # gap 0, plus, size 1 = 0 1 0
    body = bytes(int(bits[i : i + 8][::-1], 2) for i in range(0, len(bits), 8))
    total = sums.decode_untrusted(HEAD + body, 7)
    assert [part.tolist() for part in total.hits] == [[5, 6], [-6, 12]]


def header(**changed: int) -> bytes:
    """Return a sparse sum's header with these changes."""
    fields = {"layout": 1, "count": 1, "unit": 6, "least": 1, "rice": 0, "order": 0} | changed
    return sums.SPARSE_HEADER.pack(*fields.values())


@pytest.mark.parametrize(
    ("payload", "n_params", "why"),
    [
        (b"", 3, "none of 1 .. 4"),
        (b"\5" + bytes(20), 3, "none of 1 .. 4"),
        (b"\1" + bytes(8), 3, "none of 1 .. 4"),
        (header(unit=0) + b"\5", 3, "unit 0"),
        (header(least=0) + b"\5", 3, "least 0"),
        (header(rice=31) + b"\5" * 9, 3, "rice 31"),
        (header(order=31) + b"\5" * 9, 3, "order 31"),
        (header(count=4) + b"\7" * 9, 3, "4 entries for 3 parameters"),
        (header(count=3) + b"\7", 3, "in 1 bytes"),
        (header(count=2) + b"\5", 3, "few bytes"),
        (header() + b"\0", 3, "few bytes"),
        (header() + b"\1", 3, "few bytes"),
        (header() + b"\5\0", 3, "left over"),
        (header() + b"\x15", 3, "left over"),
        (header() + b"\x28", 3, "beyond the parameters"),
        (header(unit=2**31) + b"\5", 3, "beyond an i32"),
        (header(unit=2**16, least=2**15) + b"\5", 3, "beyond an i32"),
        (header() + b"\1" + bytes(3) + b"\4" + bytes(9), 3, "beyond an i32"),
        (b"\2\1\0\0\0" + bytes(4), 3, "9 bytes for 3"),
        (b"\2\0\0\0\0" + bytes(3), 3, "unit 0"),
        (b"\2\0\0\0\x80" + bytes(3), 3, "beyond an i32"),
        (b"\2\0\0\0\x40\2\0\0", 3, "beyond an i32"),
    ],
)
def test_malformed_sum_is_refused(payload: bytes, n_params: int, why: str) -> None:
    with pytest.raises(WireError, match=why):
        sums.decode_untrusted(payload, n_params)


def test_sum_becomes_dense_only_when_array_is_smaller() -> None:
    """A sum stays sparse, and drops entries of 0, until an array is smaller."""
    few, many = update(1, 1e-3, 10), update(2, 1.1 / SPARSE_MAX, 10)
    total = UpdateSum(N)
    total.add(few)
    total.add(few)
    assert total.array is None
    np.testing.assert_array_equal(total.hits[1], 2 * few[1])
    total.add((few[0], -2 * few[1]))
    assert total.hits[0].size == 0
    total.add(many)
    assert total.array is not None


def test_sum_bytes_bound_grows_with_entries_up_to_dense_size() -> None:
    """The bound grows with the entries, up to the size of a dense sum."""
    bounds = [sum_bytes_bound(entries, 10**6, 2**14) for entries in (0, 1, 10**4, 10**5, 10**7)]
    assert bounds == sorted(bounds)
    assert bounds[0] == sums.SPARSE_HEADER.size == len(sums.encode(UpdateSum(10**6)))
    assert sum_bytes_bound(10**9, 10**6) == 4 * 10**6 + 5
    assert sum_bytes_bound(10**4, 10**6, 2**14) < 3.5 * 10**4


def sum_of(entries: int, *, dense: bool) -> UpdateSum:
    """Return a sum of 64 parameters whose first entry is the largest int32."""
    total = UpdateSum(64)
    hits = np.arange(entries, dtype=np.int32), np.ones(entries, np.int32)
    hits[1][0] = 2**31 - 1
    if dense:
        return UpdateSum.of_array(np.concatenate([hits[1], np.zeros(64 - entries, np.int32)]))
    total.add(hits)
    return total


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("other", ["hits", "sparse", "dense"])
def test_int32_overflows_of_sum_are_counted(dense: bool, other: str) -> None:
    total = sum_of(3, dense=dense)
    assert (total.array is not None) == dense
    assert total.overflows == 0
    if other == "hits":
        total.add((np.array([0, 1], np.int32), np.array([1, -5], np.int32)))
    else:
        total.add_total(sum_of(3, dense=other == "dense"))
    assert total.overflows == 1
    total.add_total(total)
    assert total.overflows > 1, "what it was wrong by before counts, too"


def test_adding_to_sum_does_not_change_addend() -> None:
    added, total = UpdateSum.of_array(np.ones(16, np.int32)), UpdateSum(16)
    for times in (1, 2):
        total.add_total(added)
        np.testing.assert_array_equal(total.dense(), np.full(16, times))
        np.testing.assert_array_equal(added.dense(), np.ones(16))
