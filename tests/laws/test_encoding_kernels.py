"""Each optimized kernel equals its NumPy definition exactly, for any floats; sums are exact."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from sparkstrom.encoding import backends
from sparkstrom.encoding import reference_kernels as reference
from sparkstrom.encoding.cpu import kernels as kernels_cpu

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
Hits = tuple[I32, I32]

Q = 2.0**-20
# Blocks have 256 or 512 parameters, words 64, packed bytes 4.
sizes = st.one_of(
    st.integers(0, 40),
    st.sampled_from([63, 64, 65, 127, 255, 256, 257, 319, 511, 512, 513, 767, 1024, 1100]),
)
starts = st.integers(0, 3)  # arrays need not be aligned to vectors
floats = st.floats(-20, 20, width=32)
wild = st.floats(width=32, allow_subnormal=True)
quanta = st.integers(1, 2**12).map(lambda half: 2 * half)
sides = st.sampled_from([1, -1])


@st.composite
def pairs(draw: st.DrawFn, elements: Any = floats) -> tuple[F32, F32]:
    """Draw two arrays of one size, such as local parameters (or a residual) and theta."""
    n = draw(sizes)
    few = draw(arrays(np.float32, max(1, min(n, 30)), elements=elements))
    seed = draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    first = random.choice(few, n).astype(np.float32)
    theta = (random.integers(-(2**24), 2**24, n, endpoint=True) * Q).astype(np.float32)
    if draw(st.booleans()):  # close to theta, so that values are near the threshold
        first = (theta + first * np.float32(2.0**-14)).astype(np.float32)
    return copy_with_offset(first, draw(starts)), copy_with_offset(theta, draw(starts))


def copy_with_offset(values: F32, by: int) -> F32:
    """Return a copy of the values with another alignment in memory."""
    room = np.zeros(values.size + by, np.float32)
    room[by:] = values
    return room[by:]


def assert_kernels_equal(name: str, *arguments: Any) -> Any:
    """Run both kernels on copies; assert equal results and arrays, and return both."""
    answers: list[Any] = []
    memories: list[list[Any]] = []
    for kernels in (reference, kernels_cpu):
        memory = [
            copy_with_same_alignment(a) if isinstance(a, np.ndarray) else a for a in arguments
        ]
        answers.append(getattr(kernels, name)(*memory))
        memories.append([m for m, a in zip(memory, arguments, strict=True) if m is not a])
    assert answers[0] == answers[1]
    for defined, fast in zip(*memories, strict=True):
        np.testing.assert_array_equal(defined, fast)
    return answers[1], memories[1]


def copy_with_same_alignment(array: NDArray[Any]) -> NDArray[Any]:
    """Return a copy with the same alignment, modulo 64 bytes."""
    by = array.ctypes.data % 64
    room = np.empty(array.nbytes + 128, np.uint8)
    begin = (by - room.ctypes.data) % 64
    copy = room[begin : begin + array.nbytes].view(array.dtype)
    copy[:] = array
    return copy


def assert_scans_equal(name: str, first: F32, second: F32, tau: float, capacity: int) -> int:
    """Compare two scans like ``same``, ignoring the codes after the hits; return ``worst``."""
    answers, memories = [], []
    for kernels in (reference, kernels_cpu):
        memory = (copy_with_same_alignment(first), copy_with_same_alignment(second))
        codes = np.zeros(capacity, np.int32)
        hits, worst = getattr(kernels, name)(*memory, tau, codes)
        answers.append((hits, worst, codes[:hits].tolist()))
        memories.append(memory)
    assert answers[0] == answers[1]
    for defined, fast in zip(*memories, strict=True):
        np.testing.assert_array_equal(defined, fast)
    return int(answers[0][1])


@given(pair=pairs(), tau=quanta, spare=st.integers(-40, 40))
def test_scan_kernels_equal_reference(pair: tuple[F32, F32], tau: int, spare: int) -> None:
    """Scans find the same hits and the same largest value."""
    for name in ("scan_local", "scan_replica"):
        assert_scans_equal(name, *pair, tau * Q, max(0, pair[0].size + spare))


@given(pair=pairs(wild), tau=quanta)
def test_scan_kernels_report_only_non_finite_values_as_such(
    pair: tuple[F32, F32], tau: int
) -> None:
    """Scans report NaN and infinity, and report nothing else as such."""
    local, theta = pair
    for name in ("scan_local", "scan_replica"):
        worst = assert_scans_equal(name, local, theta, tau * Q, local.size)
        with np.errstate(over="ignore", invalid="ignore"):
            values = local if name == "scan_local" else local + theta
        assert (worst >= 0x7F800000) == (not np.isfinite(values).all())


@given(pair=pairs(), tau=quanta, part=st.integers(1, 2**12))
def test_move_kernel_equals_reference(pair: tuple[F32, F32], tau: int, part: int) -> None:
    """Moving hits between theta and local gives the same arrays."""
    local, theta = pair
    step = min(tau, 2 * part)
    codes = np.zeros(local.size, np.int32)
    hits, _ = kernels_cpu.scan_local(local, theta, tau * Q, codes)
    for other_step in ((step - tau) * Q, -tau * Q, 0.0):
        assert_kernels_equal("move", theta, local, codes[:hits], step * Q, other_step, Q)


@given(pair=pairs(), tau=quanta, part=st.integers(1, 2**12), side=sides)
def test_bitmap_kernels_equal_reference(
    pair: tuple[F32, F32], tau: int, part: int, side: int
) -> None:
    """Encoding, counting, decoding and adding bitmaps give the same results."""
    values, theta = pair
    step = min(tau, 2 * part)
    out = np.full((values.size + 3) // 4, 0xFF, np.uint8)
    for name in ("bitmap_local", "bitmap_replica"):
        for backend in (reference, kernels_cpu):
            scratch = np.zeros(512, np.uint8)
            memory = (copy_with_same_alignment(values), copy_with_same_alignment(theta), out.copy())
            answer = getattr(backend, name)(
                memory[0], memory[1], tau * Q, step * Q, side, Q, scratch, memory[2]
            )
            if backend is reference:
                expected, wanted = memory, answer
        assert answer == wanted
        for fast, defined in zip(memory, expected, strict=True):
            np.testing.assert_array_equal(fast, defined)
        packed = memory[2]
        count, _ = assert_kernels_equal("bitmap_count", packed, values.size)
        assert count == answer[0] + answer[1]
        hits = np.zeros(count, np.int32), np.zeros(count, np.int32)
        assert_kernels_equal("bitmap_decode", packed, values.size, side, step, *hits)
        assert_kernels_equal("bitmap_add", theta, packed, side, step * Q, Q, scratch)
        assert_kernels_equal("bitmap_add_both", theta, values, packed, side, step * Q, Q, scratch)


@given(pair=pairs(), tau=quanta, side=sides)
def test_adding_bitmap_equals_adding_its_entries(
    pair: tuple[F32, F32], tau: int, side: int
) -> None:
    values, theta = pair
    scratch, packed = np.zeros(512, np.uint8), np.zeros((values.size + 3) // 4, np.uint8)
    tau_step = (tau * Q, tau * Q)
    kernels_cpu.bitmap_local(values.copy(), theta.copy(), *tau_step, side, Q, scratch, packed)
    count = kernels_cpu.bitmap_count(packed, values.size)
    hits = np.zeros(count, np.int32), np.zeros(count, np.int32)
    kernels_cpu.bitmap_decode(packed, values.size, side, tau, *hits)
    expected, theta_local = (theta.copy(), values.copy()), (theta.copy(), values.copy())
    wanted = kernels_cpu.apply_hits_both(*expected, *hits, Q)
    assert kernels_cpu.bitmap_add_both(*theta_local, packed, side, tau * Q, Q, scratch) == wanted
    for one, other in zip(theta_local, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@given(pair=pairs(), data=st.data())
def test_apply_and_sum_kernels_equal_reference(pair: tuple[F32, F32], data: st.DataObject) -> None:
    """Applying and summing updates give the same arrays."""
    local, theta = pair
    seed = data.draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    total = random.integers(-(2**31), 2**31, theta.size).astype(np.int32)
    indices = np.flatnonzero(random.random(theta.size) < 0.3).astype(np.int32)
    amounts = random.integers(-(2**24), 2**24, indices.size).astype(np.int32)
    assert_kernels_equal("apply_hits", theta, indices, amounts, Q)
    assert_kernels_equal("apply_hits_both", theta, local, indices, amounts, Q)
    assert_kernels_equal("sum_hits", total, indices, amounts)
    assert_kernels_equal("add_quanta", theta, total, Q)
    assert_kernels_equal("add_quanta_both", theta, local, total, Q)


@given(
    n=sizes,
    limit=st.integers(1, 20),
    seed=st.integers(0, 2**32 - 1),
)
def test_clipping_and_norm_kernels_equal_reference(n: int, limit: int, seed: int) -> None:
    """Clipping and the norms of residuals give the same results."""
    random = np.random.default_rng(seed)
    local, theta = ((random.integers(-40, 40, n) / 8).astype(np.float32) for _ in range(2))
    assert_kernels_equal("clip_local", local, theta, limit / 8)
    assert_kernels_equal("clip_replica", local, limit / 8)
    assert_kernels_equal("residual_sums_local", local, theta)
    assert_kernels_equal("residual_sums_replica", local)


@st.composite
def updates(draw: st.DrawFn) -> tuple[int, list[Hits]]:
    """Draw some updates of one model, small enough to stay in the exact range."""
    n = draw(st.integers(1, 200))
    made = []
    for seed in draw(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=6)):
        random = np.random.default_rng(seed)
        indices = np.flatnonzero(random.random(n) < 0.5).astype(np.int32)
        amounts = random.integers(-(2**20), 2**20, indices.size).astype(np.int32)
        made.append((indices, amounts))
    return n, made


@pytest.mark.parametrize("backend", backends.BACKENDS)
@given(made=updates(), data=st.data())
def test_theta_is_independent_of_update_order_and_grouping(
    backend: str, made: tuple[int, list[Hits]], data: st.DataObject
) -> None:
    n, hits = made
    kernels = backends.kernels(backend)
    start = (np.random.default_rng(n).integers(-(2**22), 2**22, n) * Q).astype(np.float32)
    in_order, shuffled, merged = start.copy(), start.copy(), start.copy()
    total = np.zeros(n, np.int32)
    overflows = 0
    for update in hits:
        overflows += kernels.apply_hits(in_order, *update, Q)[0]
    for update in data.draw(st.permutations(hits)):
        overflows += kernels.apply_hits(shuffled, *update, Q)[0]
    cut = data.draw(st.integers(0, len(hits)))
    for update in hits[:cut]:
        kernels.sum_hits(total, *update)
    for update in hits[cut:]:
        overflows += kernels.apply_hits(merged, *update, Q)[0]
    overflows += kernels.add_quanta(merged, total, Q)[0]
    assume(overflows == 0)
    assert in_order.tobytes() == shuffled.tobytes() == merged.tobytes()


@given(made=updates())
def test_subtracting_updates_restores_theta_exactly(made: tuple[int, list[Hits]]) -> None:
    n, hits = made
    kernels = backends.kernels()
    start = (np.random.default_rng(n).integers(-(2**22), 2**22, n) * Q).astype(np.float32)
    theta = start.copy()
    for update in hits:
        kernels.apply_hits(theta, *update, Q)
    for indices, amounts in hits:
        kernels.apply_hits(theta, indices, -amounts, Q)
    np.testing.assert_array_equal(theta, start)


@pytest.mark.parametrize("backend", backends.BACKENDS)
@given(
    start=arrays(
        np.int64, sizes.filter(bool), elements=st.integers(2**24 - 6, 2**24 + 2), fill=st.just(0)
    ),
    tau=st.sampled_from([2, 4]),
)
def test_overflow_is_counted_only_when_theta_leaves_exact_range(
    backend: str, start: NDArray[np.int64], tau: int
) -> None:
    kernels, n = backends.kernels(backend), start.size
    sign = np.where(np.arange(n) % 2, 1, -1)
    theta = (sign * start * Q).astype(np.float32)
    before = np.rint(theta.astype(np.float64) / Q).astype(np.int64)
    for direction in (1, -1):
        exact = before + direction * sign * tau
        over = np.flatnonzero(np.abs(exact) > 2**24)
        expected = (over.size, over[0] if over.size else -1)
        indices, amounts = np.arange(n, dtype=np.int32), (exact - before).astype(np.int32)
        codes = np.where(amounts > 0, indices, ~indices)
        assert kernels.apply_hits(theta.copy(), indices, amounts, Q) == expected
        assert kernels.add_quanta(theta.copy(), amounts, Q) == expected
        assert kernels.move(theta.copy(), theta.copy(), codes, tau * Q, 0.0, Q) == expected
        scratch, out = np.zeros(512, np.uint8), np.zeros((n + 3) // 4, np.uint8)
        learnt = (amounts * Q).astype(np.float32)
        learnt[1:] = 0  # an entry that does not change is not an overflow
        expected = (1, 0) if over.size and over[0] == 0 else (0, -1)
        answer = kernels.bitmap_replica(learnt, theta.copy(), tau * Q, tau * Q, 1, Q, scratch, out)
        assert answer == (1, 0, *expected)
