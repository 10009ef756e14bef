"""tau from the update's own distribution: what a wanted fraction of a sample reaches."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from sparkstrom.encoding.backends import I32, Backend, host
from sparkstrom.encoding.grid import Flat
from sparkstrom.encoding.layers import Layers

SAMPLE_HITS = 128  # so many of a sample reach tau: their number is off by a tenth
SAMPLE_LEAST = 8192  # entries of a sample
SAMPLE_PARAMS = 65_536  # at most; so few are looked at altogether


def tau_reached_by(
    fraction: float,
    publication: int,
    learnt: Flat,
    other: Flat,
    sign: int,
    layers: Layers | None = None,
    backend: Backend | None = None,
) -> float | None:
    """The threshold that ``fraction`` of the residuals reach; None where all of them are 0.

    The residual is ``learnt + sign * other``, f32[n_params] each, which lie in the backend's
    memory (None: on the host); of many a sample by chance is taken, the same for the same
    publication, and nothing else of them comes to the host. A residual counts in multiples of its
    layer's tau.
    """
    residuals = Residuals(learnt, other, sign, layers, backend or host())
    enough = max(SAMPLE_LEAST, math.ceil(SAMPLE_HITS / fraction))
    few = min(enough, SAMPLE_PARAMS) if learnt.size > SAMPLE_PARAMS else SAMPLE_PARAMS
    for size in sorted({few, SAMPLE_PARAMS}):
        sizes, taken = residuals.sampled(size, publication)
        wanted = math.ceil(fraction * taken)
        if sizes.size >= wanted:  # otherwise most of them are 0, and more must be looked at
            break
    if sizes.size == 0:
        return None
    nth = max(0, sizes.size - wanted)
    return float(np.partition(sizes, nth)[nth])


class Residuals(NamedTuple):
    """``learnt + sign * other``, in multiples of their layers' taus."""

    learnt: Flat
    other: Flat
    sign: int
    layers: Layers | None
    backend: Backend

    def sampled(self, size: int, seed: int) -> tuple[Flat, int]:
        """(sizes of those that are neither 0 nor infinite, how many were looked at)."""
        where, sizes = self._all() if self.learnt.size <= SAMPLE_PARAMS else self._some(size, seed)
        if self.layers is not None:
            sizes = (sizes / self.layers.at(where)).astype(np.float32)
        return sizes[(sizes > 0) & np.isfinite(sizes)], sizes.size  # the scan reports infinite ones

    def _all(self) -> tuple[I32, Flat]:
        one, other = (self.backend.memory.to_host(each) for each in (self.learnt, self.other))
        with np.errstate(invalid="ignore", over="ignore"):
            return np.arange(one.size, dtype=np.int32), np.abs(one + np.float32(self.sign) * other)

    def _some(self, size: int, seed: int) -> tuple[I32, Flat]:
        """By chance: a stride would see one column of a matrix."""
        kernels, memory = self.backend.kernels, self.backend.memory
        where, sizes = memory.empty(size, np.int32), memory.empty(size, np.float32)
        kernels.sample(self.learnt, self.other, self.sign, seed, where, sizes)
        return memory.to_host(where), memory.to_host(sizes)
