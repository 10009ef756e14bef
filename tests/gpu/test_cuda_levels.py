"""Tests of levels, chance and layers on the device: they equal the NumPy definition bit by bit."""

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
from sparkstrom.encoding.cuda.device import TILE, is_usable
from sparkstrom.encoding.layers import LayeredKernels, Layers
from tests.gpu.compared import (
    F32,
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

I32 = NDArray[np.int32]

limits = st.one_of(st.sampled_from([0, 1, 2**32 - 1, 2**32]), st.integers(0, 2**32))
tops = st.integers(0, 7)
BOTH_WAYS = pytest.mark.parametrize("name", ["local", "replica"])


def check_choice(
    name: str, parts: tuple[F32, ...], tau: float, chance: tuple[int, int], capacity: int
) -> I32:
    """Compare choosing with its definition, with all of its codes; return the codes taken."""
    codes = np.full(capacity, 7, np.int32)
    there = cuda.to_device(codes)
    expected = getattr(reference, f"choose_{name}")(*parts, tau, *chance, codes)
    device = [cuda.to_device(part) for part in parts]
    taken = getattr(backends.kernels("cuda"), f"choose_{name}")(*device, tau, *chance, there)
    assert taken == expected
    np.testing.assert_array_equal(there.copy_to_host(), codes)  # beyond those taken: untouched
    for host, at in zip(parts, device, strict=True):
        np.testing.assert_array_equal(host, at.copy_to_host())
    return codes[:taken]


def create_residual(name: str, local: F32, theta: F32) -> tuple[F32, ...]:
    """Return a residual's arrays: local and theta, or their difference."""
    return (local, theta) if name == "local" else (local - theta,)


@given(n=sizes, seed=seeds, sign=st.sampled_from([-1, 1]), size=st.integers(0, 70))
def test_sample_equals_definition(n: int, seed: int, sign: int, size: int) -> None:
    """A sample has the indices and sizes that the definition gives."""
    one, other = near_theta(n + 1, seed, 1000)
    one[seed % (n + 1)] = np.nan
    where, found = np.full(size, -1, np.int32), np.zeros(size, np.float32)
    there = cuda.to_device(where), cuda.to_device(found)
    placed = cuda.to_device(one), cuda.to_device(other)
    backends.kernels("cuda").sample(*placed, sign, seed, *there)
    reference.sample(one, other, sign, seed, where, found)
    np.testing.assert_array_equal(there[0].copy_to_host(), where)
    np.testing.assert_array_equal(there[1].copy_to_host(), found)


@BOTH_WAYS
@given(
    n=sizes,
    seed=seeds,
    tau=quanta,
    limit=limits,
    draw=st.integers(0, 2**40),
    spare=st.integers(-40, 40),
)
def test_chosen_codes_equal_definition(
    name: str, n: int, seed: int, tau: int, limit: int, draw: int, spare: int
) -> None:
    parts = create_residual(name, *near_theta(n, seed, tau))
    check_choice(name, parts, tau * Q, (limit, draw), max(0, n + spare))


@BOTH_WAYS
@given(n=sizes, seed=seeds, tau=quanta, limit=limits)
def test_choice_skips_nan_and_takes_infinite_residuals(
    name: str, n: int, seed: int, tau: int, limit: int
) -> None:
    """A residual of NaN is never taken, an infinite one always."""
    parts = create_residual(name, arbitrary_floats(n, seed), arbitrary_floats(n, seed + 1))
    codes = check_choice(name, parts, tau * Q, (limit, seed), n)
    residual = parts[0] - parts[1] if name == "local" else parts[0]
    chosen = np.where(codes < 0, ~codes, codes)
    assert not np.isnan(residual[chosen]).any()
    assert np.isin(np.flatnonzero(np.isinf(residual)), chosen).all()


@BOTH_WAYS
def test_half_of_tied_residuals_are_chosen(name: str) -> None:
    """Half of the residuals of tau are taken, and all from 2 tau on; indices ascend."""
    tau = np.float32(1000 * Q)
    residual = np.resize(np.array([1, -1, 2, -3, 0.999, 0], np.float32) * tau, LARGE)
    parts = (residual, np.zeros(LARGE, np.float32))[: 2 if name == "local" else 1]
    codes = check_choice(name, parts, float(tau), (2**31, 5), LARGE)
    indices = np.where(codes < 0, ~codes, codes)
    assert (np.diff(indices) > 0).all()
    assert np.isin(np.flatnonzero(np.abs(residual) >= 2 * tau), indices).all()
    tied = np.abs(residual) == tau
    assert np.count_nonzero(tied[indices]) == pytest.approx(np.count_nonzero(tied) / 2, rel=0.15)


@given(n=sizes, seed=seeds, tau=quanta, top=tops)
def test_found_levels_equal_definition(n: int, seed: int, tau: int, top: int) -> None:
    local, theta = near_theta(n, seed, tau)
    local += ((local - theta) * np.resize(np.float32([0, 1, 3, 7, 40]), n)).astype(np.float32)
    codes = np.zeros(n, np.int32)
    hits, _ = reference.scan_local(local, theta, tau * Q, codes)
    rest = (codes[:hits], tau * Q, top, np.full(hits, 9, np.uint8))
    check_kernel("find_levels_local", local, theta, *rest)
    check_kernel("find_levels_replica", local - theta, *rest)


@given(n=sizes, seed=seeds, tau=quanta, top=tops)
def test_found_levels_equal_definition_for_arbitrary_bits(
    n: int, seed: int, tau: int, top: int
) -> None:
    indices = np.random.default_rng(seed).permutation(n).astype(np.int32)
    codes = np.where(indices % 3 == 0, ~indices, indices)
    rest = (codes, tau * Q, top, np.full(n, 9, np.uint8))
    check_kernel(
        "find_levels_local", arbitrary_floats(n, seed), arbitrary_floats(n, seed + 1), *rest
    )
    check_kernel("find_levels_replica", arbitrary_floats(n, seed), *rest)


def test_highest_level_is_reset_between_calls() -> None:
    """find_levels returns the highest level of this call, not of an earlier one."""
    codes, levels = np.arange(3, dtype=np.int32), np.zeros(3, np.uint8)
    for size, highest in ((8, 3), (2, 1), (1, 0)):
        residual = np.array([1, -1, size], np.float32)
        assert check_kernel("find_levels_replica", residual, codes, 1.0, 3, levels)[0] == highest
    assert check_kernel("find_levels_replica", residual, codes[:0], 1.0, 3, levels[:0])[0] == 0


@given(n=sizes, seed=seeds, tau=quanta, top=st.integers(0, 3), part=st.integers(1, 2**12))
def test_move_by_levels_equals_definition(n: int, seed: int, tau: int, top: int, part: int) -> None:
    local, theta = near_theta(n, seed, tau)
    codes, step = np.zeros(n, np.int32), min(tau, 2 * part)
    hits, _ = reference.scan_local(local, theta, tau * Q, codes)
    levels = np.random.default_rng(seed).integers(0, top + 1, hits).astype(np.uint8)
    for other_step in ((step - tau) * Q, -tau * Q, 0.0):
        check_kernel("move_by_levels", theta, local, codes[:hits], levels, step * Q, other_step, Q)


@given(n=st.integers(1, 40), seed=seeds)
def test_move_by_levels_overflows_equal_definition(n: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    edge = random.choice([2**24 - 16, 2**24 - 4, 2**24, 0], n) * random.choice([-1, 1], n)
    theta, indices = (edge * Q).astype(np.float32), random.permutation(n).astype(np.int32)
    codes = np.where(random.random(n) < 0.5, indices, ~indices)
    levels = random.integers(0, 4, n).astype(np.uint8)
    (over, first), _ = check_kernel("move_by_levels", theta, theta, codes, levels, 2 * Q, 0.0, Q)
    assert (over == 0) == (first == -1)
    check_kernel("move_by_levels", theta, theta, codes[:0], levels[:0], 2 * Q, 0.0, Q)


@given(n=sizes, seed=seeds, start=st.integers(0, 2**31 - 1 - TILE - 70))
def test_shift_codes_adds_offset_and_keeps_signs(n: int, seed: int, start: int) -> None:
    random = np.random.default_rng(seed)
    indices = np.arange(n, dtype=np.int32)
    codes = np.where(random.random(n) < 0.5, indices, ~indices)
    _, (shifted,) = check_kernel("shift_codes", codes, start)
    moved = np.where(shifted < 0, ~shifted, shifted)
    np.testing.assert_array_equal(moved, indices + start)
    np.testing.assert_array_equal(shifted < 0, codes < 0)


@st.composite
def layered(draw: st.DrawFn) -> Layers:
    """Draw one to three layers, some of about the size of a tile."""
    each = st.one_of(st.integers(1, 20), st.sampled_from([TILE - 1, TILE]))
    widths = draw(st.lists(each, min_size=1, max_size=3))
    multipliers = draw(st.lists(st.integers(1, 5), min_size=len(widths), max_size=len(widths)))
    return Layers(tuple(np.cumsum(widths).tolist()), tuple(multipliers))


@BOTH_WAYS
@given(layers=layered(), seed=seeds, tau=quanta, limit=limits)
def test_layered_publication_equals_definition(
    name: str, layers: Layers, seed: int, tau: int, limit: int
) -> None:
    """All kernels of a publication, run layer by layer, have equal results and arrays."""
    n = layers.stops[-1]
    local, theta = near_theta(n, seed, tau)
    answers = [
        publication(name, backends.backend(backend), layers, (local, theta), (tau * Q, limit))
        for backend in ("reference", "cuda")
    ]
    assert answers[0] == answers[1]


def publication(
    name: str,
    backend: backends.Backend,
    layers: Layers,
    arrays: tuple[F32, F32],
    chance: tuple[float, int],
) -> list[Any]:
    """Run all kernels of a publication on a backend; return their results and the arrays."""
    memory, n, (tau, limit) = backend.memory, layers.stops[-1], chance
    kernels = LayeredKernels(backend, layers)
    local, theta = (memory.from_host(array.copy()) for array in arrays)
    residual = memory.copy(local)
    memory.subtract(residual, local, theta)
    codes, levels = memory.zeros(n, np.int32), memory.zeros(n, np.uint8)
    one, other = (local, theta) if name == "local" else (residual, memory.zeros(n, np.float32))
    parts = (local, theta) if name == "local" else (residual,)
    answers: list[Any] = [getattr(kernels, f"scan_{name}")(one, other, tau, codes)]
    hits = getattr(kernels, f"choose_{name}")(*parts, tau, limit, 3, codes)
    taken, found = codes[:hits], levels[:hits]
    answers += [hits, getattr(kernels, f"find_levels_{name}")(*parts, taken, tau, 3, found)]
    answers.append(kernels.move_by_levels(theta, parts[0], taken, found, tau, 0.0, Q))
    answers.append(kernels.move(theta, parts[0], taken, tau, -tau, Q))
    answers.append(getattr(kernels, f"clip_{name}")(*parts, 2 * tau))
    left = (theta, parts[0], taken, found)
    return [pytest.approx(answers.pop(), rel=1e-12), *answers] + [
        memory.to_host(array).tolist() for array in left
    ]


def test_find_levels_rejects_host_or_non_byte_levels() -> None:
    residual, codes = (
        cuda.to_device(np.ones(4, np.float32)),
        cuda.to_device(np.arange(4, dtype="i4")),
    )
    with pytest.raises(UsageError, match=r"levels is a numpy\.ndarray in host memory"):
        backends.kernels("cuda").find_levels_replica(residual, codes, Q, 3, np.zeros(4, np.uint8))
    with pytest.raises(UsageError, match="levels is int32 on the device: must be uint8"):
        backends.kernels("cuda").find_levels_replica(residual, codes, Q, 3, codes)
