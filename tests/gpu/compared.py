"""Helpers for tests of device code: compare a kernel's results with those of its definition."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from numba import cuda
from numpy.typing import NDArray

from sparkstrom.encoding import backends
from sparkstrom.encoding import reference_kernels as reference
from sparkstrom.encoding.cuda.device import SIMULATED, TILE

F32 = NDArray[np.float32]

Q = 2.0**-20
LARGE = 4096 if SIMULATED else 3_000_001
EVERYWHERE = (0, 1, 31, 32, 33, TILE - 1, TILE, TILE + 1)

sizes = st.one_of(st.integers(0, 70), st.sampled_from(EVERYWHERE))
seeds = st.integers(0, 2**32 - 1)
quanta = st.integers(1, 2**12).map(lambda half: 2 * half)


def near_theta(n: int, seed: int, tau_quanta: int) -> tuple[F32, F32]:
    """Return local and theta, f32[n]; some differ by multiples of tau / 4, others by any amount."""
    random = np.random.default_rng(seed)
    theta = (random.integers(-(2**22), 2**22, n) * Q).astype(np.float32)
    multiples = random.choice([-2, -1, -0.5, -0.25, 0, 0, 0, 0.5, 1, 1.5], n) * tau_quanta * Q
    noise = np.where(random.random(n) < 0.3, random.normal(0, tau_quanta * Q, n), 0)
    return (theta + multiples + noise).astype(np.float32), theta


def arbitrary_floats(n: int, seed: int) -> F32:
    """Return f32[n] of arbitrary bits, with NaN and infinities."""
    random = np.random.default_rng(seed)
    return random.integers(-(2**31), 2**31, n).astype(np.int32).view(np.float32)


def check_kernel(name: str, *arguments: Any) -> tuple[Any, list[Any]]:
    """Run definition and kernel on copies, assert equal results and arrays, return the kernel's."""
    answers: list[Any] = []
    memories: list[list[Any]] = []
    for kernels, place in ((reference, np.copy), (backends.kernels("cuda"), cuda.to_device)):
        memory = [place(a) if isinstance(a, np.ndarray) else a for a in arguments]
        answers.append(getattr(kernels, name)(*memory))
        memories.append([m for m, a in zip(memory, arguments, strict=True) if m is not a])
    assert answers[0] == answers[1]
    memories[1] = [array.copy_to_host() for array in memories[1]]
    for defined, fast in zip(*memories, strict=True):
        np.testing.assert_array_equal(defined, fast)
    return answers[1], memories[1]
