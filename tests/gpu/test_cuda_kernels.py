"""Tests of kernels for device arrays: they equal the NumPy definition in every bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import cuda
from numpy.typing import NDArray

from sparkstrom.base.errors import UsageError
from sparkstrom.encoding import backends
from sparkstrom.encoding import reference_kernels as reference
from sparkstrom.encoding.cuda.device import SIMULATED, TILE, is_usable
from tests.gpu.compared import (
    LARGE,
    Q,
    arbitrary_floats,
    check_kernel,
    near_theta,
    quanta,
    seeds,
    sizes,
)

# These tests overflow floats on purpose; NumPy, on which the simulator runs, warns of it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

if not is_usable():  # the simulator counts as usable
    pytest.skip("no GPU; run simulated by laws/test_encoding_cuda.py", allow_module_level=True)

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]

INFINITY_BITS = 0x7F800000
SCRATCH = np.zeros(backends.SCRATCH_BYTES, np.uint8)

sides = st.sampled_from([1, -1])


def check_scan(name: str, first: F32, second: F32, tau: float, capacity: int) -> I32:
    """Compare a scan as ``check_scan`` does, its codes only up to the hits; return these codes."""
    host, codes = (first.copy(), second.copy()), np.zeros(capacity, np.int32)
    device, device_codes = [cuda.to_device(a) for a in host], cuda.to_device(codes)
    expected = getattr(reference, name)(*host, tau, codes)
    hits, worst = getattr(backends.kernels("cuda"), name)(*device, tau, device_codes)
    assert hits == expected[0]
    # IEEE 754 leaves open which NaN an addition yields, and processors differ.
    assert worst == expected[1] or min(worst, expected[1]) > INFINITY_BITS
    found: I32 = device_codes.copy_to_host()[:hits]
    np.testing.assert_array_equal(found, codes[:hits])
    for defined, fast in zip(host, device, strict=True):
        np.testing.assert_array_equal(defined, fast.copy_to_host())
    return found


SCANS = pytest.mark.parametrize("name", ["scan_local", "scan_replica"])


@SCANS
@given(n=sizes, seed=seeds, tau=quanta, spare=st.integers(-40, 40))
def test_scan_equals_definition(name: str, n: int, seed: int, tau: int, spare: int) -> None:
    local, theta = near_theta(n, seed, tau)
    second = theta if name == "scan_local" else np.zeros(n, np.float32)
    first = local if name == "scan_local" else local - theta
    check_scan(name, first, second, tau * Q, max(0, n + spare))


@SCANS
@pytest.mark.parametrize("room", [0, 1, 20])
def test_scan_counts_hits_beyond_capacity_without_writing(name: str, room: int) -> None:
    ones, zeros = np.ones(TILE + 3, np.float32), np.zeros(TILE + 3, np.float32)
    assert check_scan(name, ones, zeros, 1.0, room).size == room
    guarded = cuda.to_device(np.full(TILE + 3, 7, np.int32))
    scan = getattr(backends.kernels("cuda"), name)
    hits, _ = scan(cuda.to_device(ones), cuda.to_device(zeros), 1.0, guarded[:room])
    assert hits == TILE + 3
    assert (guarded.copy_to_host()[room:] == 7).all()


@SCANS
@pytest.mark.parametrize("tau", [2, 2**10, 2**24])
def test_codes_of_a_large_array_ascend(name: str, tau: int) -> None:
    local, theta = near_theta(LARGE, tau, 2**10)
    if name == "scan_replica":
        local, theta = local - theta, np.zeros(LARGE, np.float32)
    codes = check_scan(name, local, theta, tau * Q, LARGE)
    assert (np.diff(np.where(codes < 0, ~codes, codes)) > 0).all()
    assert (codes.size == 0) == (tau == 2**24)


@SCANS
@given(n=sizes, seed=seeds, tau=quanta)
def test_scan_reports_nan_and_infinity(name: str, n: int, seed: int, tau: int) -> None:
    check_scan(name, arbitrary_floats(n, seed), arbitrary_floats(n, seed + 1), tau * Q, n)


@given(n=sizes, seed=seeds, tau=quanta, part=st.integers(1, 2**12))
def test_move_equals_definition(n: int, seed: int, tau: int, part: int) -> None:
    local, theta = near_theta(n, seed, tau)
    codes, step = np.zeros(n, np.int32), min(tau, 2 * part)
    hits, _ = reference.scan_local(local, theta, tau * Q, codes)
    for other_step in ((step - tau) * Q, -tau * Q, 0.0):
        check_kernel("move", theta, local, codes[:hits], step * Q, other_step, Q)


def check_bitmap(n: int, seed: int, tau: int, step: int, side: int) -> None:
    """Compare all kernels of bitmaps with their definitions."""
    local, theta = near_theta(n, seed, tau)
    out = np.full((n + 3) // 4, 0xFF, np.uint8)
    rest = (tau * Q, step * Q, side, Q, SCRATCH, out)
    check_kernel("bitmap_replica", local - theta, theta, *rest)
    (hits, halves, *_), (_, _, _, packed) = check_kernel("bitmap_local", local, theta, *rest)
    count, _ = check_kernel("bitmap_count", packed, n)
    assert count == hits + halves
    check_kernel("bitmap_decode", packed, n, side, step, *np.zeros((2, count), np.int32))
    check_kernel("bitmap_add", theta, packed, side, step * Q, Q, SCRATCH)
    check_kernel("bitmap_add_both", theta, local, packed, side, step * Q, Q, SCRATCH)


@given(n=sizes, seed=seeds, tau=quanta, part=st.integers(1, 2**12), side=sides)
def test_bitmap_kernels_equal_definition(n: int, seed: int, tau: int, part: int, side: int) -> None:
    check_bitmap(n, seed, tau, min(tau, 2 * part), side)


def test_bitmap_kernels_equal_definition_for_large_array() -> None:
    check_bitmap(LARGE, 1, 2**10, 2**9, -1)


@pytest.mark.parametrize("n", [1, 2, 3, 4 * TILE - 3])
def test_bitmap_with_nonzero_padding_is_rejected(n: int) -> None:
    packed = np.zeros((n + 3) // 4, np.uint8)
    packed[-1] = 0b10_00_00_00
    assert check_kernel("bitmap_count", packed, n)[0] == -1


@given(n=sizes, seed=seeds)
def test_apply_and_add_kernels_equal_definition(n: int, seed: int) -> None:
    local, theta = near_theta(n, seed, 2**10)
    random = np.random.default_rng(seed)
    total = random.integers(-(2**31), 2**31, n).astype(np.int32)
    indices = np.flatnonzero(random.random(n) < 0.3).astype(np.int32)
    random.shuffle(indices)
    amounts = random.integers(-(2**31), 2**31, indices.size).astype(np.int32)
    check_kernel("apply_hits", theta, indices, amounts, Q)
    check_kernel("apply_hits_both", theta, local, indices, amounts, Q)
    check_kernel("sum_hits", total, indices, amounts)
    check_kernel("add_quanta", theta, total, Q)
    check_kernel("add_quanta_both", theta, local, total, Q)


@given(n=sizes, seed=seeds, limit=st.integers(1, 20))
def test_clipping_and_norm_kernels_equal_definition(n: int, seed: int, limit: int) -> None:
    random = np.random.default_rng(seed)
    local, theta = ((random.integers(-40, 40, n) / 8).astype(np.float32) for _ in range(2))
    check_kernel("clip_local", local, theta, limit / 8)
    check_kernel("clip_replica", local, limit / 8)
    check_kernel(
        "residual_sums_local", local, theta
    )  # eighths: exact sums, so their order does not matter
    check_kernel("residual_sums_replica", local)


def test_residual_norms_are_deterministic() -> None:
    local, theta = near_theta(LARGE // 4, 3, 1000)
    device = cuda.to_device(local), cuda.to_device(theta)
    norms = [backends.kernels("cuda").residual_sums_local(*device) for _ in range(2)]
    assert norms[0] == norms[1]
    assert norms[0] == pytest.approx(reference.residual_sums_local(local, theta), rel=1e-12)


@given(n=st.integers(1, 40), seed=seeds)
def test_overflow_count_and_first_index_equal_definition(n: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    edge = random.choice([2**24 - 2, 2**24 - 1, 2**24, 0], n) * random.choice([-1, 1], n)
    theta = (edge * Q).astype(np.float32)
    indices = random.permutation(n).astype(np.int32)
    amounts = random.choice([-2, 2], n).astype(np.int32)
    (over, first), _ = check_kernel("apply_hits", theta, indices, amounts, Q)
    assert (over == 0) == (first == -1)
    check_kernel(
        "apply_hits", theta, indices[:0], amounts[:0], Q
    )  # an empty call clears the counters
    check_kernel("add_quanta", theta, amounts, Q)
    codes = np.where(amounts > 0, indices, ~indices)
    check_kernel("move", theta, theta, codes, 2 * Q, 0.0, Q)
    learnt = (amounts * Q).astype(np.float32)
    packed = np.zeros((n + 3) // 4, np.uint8)
    check_kernel("bitmap_replica", learnt, theta, 2 * Q, 2 * Q, 1, Q, SCRATCH, packed)


def test_update_order_and_grouping_do_not_change_bits() -> None:
    random, kernels, n = np.random.default_rng(7), backends.kernels("cuda"), TILE + 5
    start = (random.integers(-(2**20), 2**20, n) * Q).astype(np.float32)
    updates = []
    for _ in range(3):
        indices = np.flatnonzero(random.random(n) < 0.5).astype(np.int32)
        amounts = random.integers(-(2**20), 2**20, indices.size).astype(np.int32)
        updates.append((cuda.to_device(indices), cuda.to_device(amounts)))
    in_order, reverse, merged = (cuda.to_device(start) for _ in range(3))
    total = cuda.to_device(np.zeros(n, np.int32))
    for update in updates:
        assert kernels.apply_hits(in_order, *update, Q) == (0, -1)
        kernels.sum_hits(total, *update)
    for update in reversed(updates):
        kernels.apply_hits(reverse, *update, Q)
    kernels.add_quanta(merged, total, Q)
    results = [array.copy_to_host().tobytes() for array in (in_order, reverse, merged)]
    assert results[0] == results[1] == results[2] != start.tobytes()


@pytest.mark.parametrize(
    ("local", "says"),
    [
        (lambda: np.zeros(4, np.float32), "local is a numpy.ndarray in host memory"),
        (lambda: cuda.to_device(np.zeros(4)), "local is float64 on the device: must be float32"),
        (lambda: cuda.to_device(np.zeros(8, np.float32))[::2], "must be one contiguous vector"),
        (lambda: cuda.to_device(np.zeros((2, 2), np.float32)), "must be one contiguous vector"),
    ],
)
def test_kernels_reject_host_and_noncontiguous_arrays(local: Any, says: str) -> None:
    theta, codes = cuda.to_device(np.zeros(4, np.float32)), cuda.to_device(np.zeros(4, np.int32))
    with pytest.raises(UsageError, match=says):
        backends.kernels("cuda").scan_local(local(), theta, Q, codes)


@pytest.mark.skipif(SIMULATED, reason="the simulator has no __cuda_array_interface__")
@pytest.mark.parametrize("library", ["torch", "cupy"])
def test_torch_and_cupy_arrays_are_changed_in_place(library: str) -> None:
    module = pytest.importorskip(library)
    ones = module.ones(
        100, dtype=module.float32, **({"device": "cuda"} if library == "torch" else {})
    )
    total = cuda.to_device(np.full(100, 3, np.int32))
    assert backends.kernels("cuda").add_quanta(ones, total, 0.5) == (0, -1)
    assert ones.tolist() == [2.5] * 100
