"""Tests of the CPU's kernels at the ends of blocks, words and arrays, and of their intrinsics."""

from __future__ import annotations

import numpy as np
import pytest

from sparkstrom.encoding import reference_kernels as reference
from sparkstrom.encoding.cpu import intrinsics
from sparkstrom.encoding.cpu import kernels as kernels_cpu
from sparkstrom.encoding.cpu.kernel_loader import kernel
from sparkstrom.encoding.cpu.kernels import BLOCK

TAU = 0.5
EDGES = [0, 1, 63, 64, 65, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 65]


@pytest.mark.parametrize("density", [0.0, 0.02, 0.6, 1.0])
@pytest.mark.parametrize("n", EDGES)
@pytest.mark.parametrize("scan", ["scan_local", "scan_replica"])
def test_scan_counts_hits_beyond_capacity_of_codes(scan: str, n: int, density: float) -> None:
    random = np.random.default_rng(n)
    learnt = np.where(random.random(n) < density, random.choice([-0.75, 0.5], n), 0.25)
    learnt, zeros = learnt.astype(np.float32), np.zeros(n, np.float32)
    all_codes = np.zeros(n, np.int32)
    hits, worst = getattr(reference, scan)(learnt.copy(), zeros, TAU, all_codes)
    for capacity in {0, hits // 2, max(0, hits - 1), hits, hits + 1, n + BLOCK}:
        codes = np.full(capacity, 7, np.int32)
        assert getattr(kernels_cpu, scan)(learnt.copy(), zeros, TAU, codes) == (hits, worst)
        written = min(capacity, hits)
        np.testing.assert_array_equal(codes[:written], all_codes[:written])


@pytest.mark.parametrize("n", [BLOCK, BLOCK + 3])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("where", [0, 64, BLOCK - 1, -1])
def test_scan_finds_non_finite_value_at_any_position(n: int, bad: float, where: int) -> None:
    values, zeros, codes = np.zeros(n, np.float32), np.zeros(n, np.float32), np.zeros(n, np.int32)
    values[where] = bad
    for scan in (kernels_cpu.scan_local, kernels_cpu.scan_replica):
        hits, worst = scan(values.copy(), zeros, TAU, codes)
        assert worst >= 0x7F800000
        assert hits == (bad == np.inf)


@pytest.mark.parametrize("n", [1, 2, 511, 512, 513, 1027])
def test_bitmap_kernel_writes_only_its_own_bytes(n: int) -> None:
    values, theta = np.ones(n, np.float32), np.zeros(n, np.float32)
    size = (n + 3) // 4
    out = np.full(size + 4, 0xAA, np.uint8)
    scratch = np.full(512, 0xFF, np.uint8)
    answer = kernels_cpu.bitmap_replica(values, theta, 1.0, 1.0, 1, 0.125, scratch, out[:size])
    assert answer == (n, 0, 0, -1)
    assert (out[size:] == 0xAA).all()
    assert kernels_cpu.bitmap_count(out[:size], n) == n
    assert not values.any()
    assert (theta == 1).all()


@kernel("u8(u8)")
def _lowest(word: int) -> int:
    return intrinsics.lowest_bit(word)


@kernel("u8(u1[::1], u8, u8)")
def _replaced(memory: np.ndarray, at: int, word: int) -> int:
    before = intrinsics.load_word(memory, at)
    intrinsics.prefetch(memory, at)
    intrinsics.store_word(memory, at, word)
    return before


@pytest.mark.parametrize(("word", "bit"), [(0, 64), (1, 0), (6, 1), (2**63, 63)])
def test_lowest_bit_intrinsic(word: int, bit: int) -> None:
    assert _lowest(word) == bit


@pytest.mark.parametrize("at", range(9))
def test_word_intrinsics_work_at_any_byte_offset(at: int) -> None:
    memory = np.arange(17, dtype=np.uint8)
    expected = int.from_bytes(memory[at : at + 8].tobytes(), "little")
    assert _replaced(memory, at, 0x1122334455667788) == expected
    assert memory[at : at + 8].tobytes() == bytes.fromhex("8877665544332211")
    outside = np.delete(memory, np.s_[at : at + 8])
    np.testing.assert_array_equal(outside, np.delete(np.arange(17), np.s_[at : at + 8]))
