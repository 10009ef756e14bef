"""Thresholds per layer: fixed whole multiples of tau, known to everybody from the job.

Layers learn at different scales, and with one tau for all the loudest fills the messages. A layer
with multiplier m has the threshold m * tau. The message names tau alone: whoever decodes multiplies
an entry by the multiplier of its index, so nothing is added to the wire and entries stay whole
quanta. There are no half steps with multipliers, hence no bitmaps: gaps are never longer.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import UsageError
from sparkstrom.encoding.backends import F32, I32, U8, Backend

MULTIPLIER_MAX = 1024  # times the smallest tau still leaves three decades of tau above it
NAMES_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Layers:
    """The multipliers of consecutive index ranges that begin at 0; picklable, and small."""

    stops: tuple[int, ...]  # where each range ends; the last is n_params
    multipliers: tuple[int, ...]

    @property
    def largest(self) -> int:
        """The largest multiplier: an entry has up to so many times tau."""
        return max(self.multipliers)

    def ranges(self) -> Iterator[tuple[int, int, int]]:
        """(start, stop, multiplier) of each range."""
        return zip((0, *self.stops), self.stops, self.multipliers, strict=False)

    def cut(self, indices: NDArray[np.integer]) -> Iterator[tuple[slice, int]]:
        """Where ascending ``indices`` cross from range to range: (slice, multiplier) of each."""
        edges = np.searchsorted(indices, self.stops).tolist()
        slices = (slice(low, high) for low, high in zip((0, *edges), edges, strict=False))
        return zip(slices, self.multipliers, strict=True)

    def at(self, indices: NDArray[np.integer]) -> NDArray[np.int64]:
        """The multiplier of each index, in any order."""
        return np.array(self.multipliers)[np.searchsorted(self.stops, indices, side="right")]

    def scale(self, indices: I32, quanta: I32) -> None:
        """Turn ``quanta`` i32[hits] of entries at ascending ``indices`` into what they add."""
        for part, multiplier in self.cut(indices):
            quanta[part] *= multiplier


def layers_of(
    n_params: int, layer_of: Callable[[int], str], multipliers: Mapping[str, int]
) -> Layers | None:
    """Find the layers that ``multipliers`` names; None where it names none.

    A name covers the layers that are called so or whose name goes on after it with a separator:
    "layer 2" covers "layer 2 weights", not "layer 20 weights". The longest one that fits counts,
    layers without one have 1. A layer's parameters lie together. Raises UsageError for a name that
    covers nothing.
    """
    if not multipliers:
        return None
    stops, found, names = [], [], []
    used: set[str] = set()
    start = 0
    while start < n_params:
        name = layer_of(start)
        start = _end(name, start, n_params, layer_of)
        fitting = [key for key in multipliers if _covers(key, name)]
        used.update(fitting)
        names.append(name)
        stops.append(start)
        found.append(multipliers[max(fitting, key=len)] if fitting else 1)
    if missing := sorted(multipliers.keys() - used):
        shown = ", ".join(names[:NAMES_SHOWN]) + (" ..." if len(names) > NAMES_SHOWN else "")
        raise UsageError(
            f"layer_multipliers names {missing[0]!r}, which is no layer of this model: {shown}"
        )
    return Layers(tuple(stops), tuple(found))


def _covers(key: str, name: str) -> bool:
    return name == key or (name.startswith(key) and not name[len(key)].isalnum())


def _end(name: str, start: int, n_params: int, layer_of: Callable[[int], str]) -> int:
    beyond = range(start, n_params)
    return start + bisect.bisect_left(beyond, True, key=lambda index: layer_of(index) != name)


class LayeredKernels:
    """What an encoder calls of a kernel set, layer by layer with each one's own tau.

    Argument tables: ``sparkstrom.encoding.reference``; ``codes`` must have room for all hits. Where
    they cross from layer to layer is looked up on the host.
    """

    def __init__(self, backend: Backend, layers: Layers) -> None:
        self._kernels, self._memory, self._layers = backend.kernels, backend.memory, layers

    def scan_local(self, local: F32, theta: F32, tau: float, codes: I32) -> tuple[int, int]:
        """``scan_local`` with a tau per layer."""
        return self._scan(self._kernels.scan_local, local, theta, tau, codes)

    def scan_replica(self, residual: F32, delta: F32, tau: float, codes: I32) -> tuple[int, int]:
        """``scan_replica`` with a tau per layer."""
        return self._scan(self._kernels.scan_replica, residual, delta, tau, codes)

    def _scan(
        self,
        scan: Callable[[F32, F32, float, I32], tuple[int, int]],
        one: F32,
        other: F32,
        tau: float,
        codes: I32,
    ) -> tuple[int, int]:
        hits, worst, part = 0, 0, self._memory.part
        for start, stop, multiplier in self._layers.ranges():
            own, rest = slice(start, stop), part(codes, slice(hits, None))
            found, bits = scan(part(one, own), part(other, own), tau * multiplier, rest)
            self._kernels.shift_codes(part(rest, slice(found)), start)
            hits, worst = hits + found, max(worst, bits)
        return hits, worst

    def choose_local(
        self, local: F32, theta: F32, tau: float, limit: int, seed: int, codes: I32
    ) -> int:
        """``choose_local`` with a tau per layer."""
        return self._choose(
            lambda own, *rest: self._kernels.choose_local(
                self._memory.part(local, own), self._memory.part(theta, own), *rest
            ),
            tau,
            limit,
            seed,
            codes,
        )

    def choose_replica(self, residual: F32, tau: float, limit: int, seed: int, codes: I32) -> int:
        """``choose_replica`` with a tau per layer."""
        return self._choose(
            lambda own, *rest: self._kernels.choose_replica(
                self._memory.part(residual, own), *rest
            ),
            tau,
            limit,
            seed,
            codes,
        )

    def _choose(
        self,
        choose: Callable[[slice, float, int, int, I32], int],
        tau: float,
        limit: int,
        seed: int,
        codes: I32,
    ) -> int:
        hits, part = 0, self._memory.part
        for start, stop, multiplier in self._layers.ranges():
            rest = part(codes, slice(hits, None))
            found = choose(slice(start, stop), tau * multiplier, limit, seed + start, rest)
            self._kernels.shift_codes(part(rest, slice(found)), start)
            hits += found
        return hits

    def levels_local(
        self, local: F32, theta: F32, codes: I32, tau: float, top: int, levels: U8
    ) -> int:
        """``levels_local`` with a tau per layer."""
        return max(
            self._kernels.levels_local(
                local, theta, own, tau * m, top, self._memory.part(levels, at)
            )
            for own, at, m in self._cut(codes)
        )

    def levels_replica(self, residual: F32, codes: I32, tau: float, top: int, levels: U8) -> int:
        """``levels_replica`` with a tau per layer."""
        return max(
            self._kernels.levels_replica(residual, own, tau * m, top, self._memory.part(levels, at))
            for own, at, m in self._cut(codes)
        )

    def move_levels(
        self,
        theta: F32,
        other: F32,
        codes: I32,
        levels: U8,
        step: float,
        other_step: float,
        q: float,
    ) -> tuple[int, int]:
        """``move_levels`` with steps per layer."""
        overflows, first = 0, -1
        for own, at, m in self._cut(codes):
            found = self._memory.part(levels, at)
            over, where = self._kernels.move_levels(
                theta, other, own, found, m * step, m * other_step, q
            )
            overflows, first = overflows + over, where if first < 0 else first
        return overflows, first

    def move(
        self, theta: F32, other: F32, codes: I32, step: float, other_step: float, q: float
    ) -> tuple[int, int]:
        """``move`` with steps per layer."""
        overflows, first = 0, -1
        for own, _, m in self._cut(codes):
            over, where = self._kernels.move(theta, other, own, m * step, m * other_step, q)
            overflows, first = overflows + over, where if first < 0 else first
        return overflows, first

    def clip_local(self, local: F32, theta: F32, limit: float) -> float:
        """``clip_local`` with a limit per layer."""
        part = self._memory.part
        return sum(
            self._kernels.clip_local(
                part(local, slice(start, stop)), part(theta, slice(start, stop)), limit * m
            )
            for start, stop, m in self._layers.ranges()
        )

    def clip_replica(self, residual: F32, limit: float) -> float:
        """``clip_replica`` with a limit per layer."""
        return sum(
            self._kernels.clip_replica(self._memory.part(residual, slice(start, stop)), limit * m)
            for start, stop, m in self._layers.ranges()
        )

    def _cut(self, codes: I32) -> Iterator[tuple[I32, slice, int]]:
        """(codes, their place among all codes, multiplier) of each range."""
        for at, multiplier in self._layers.cut(indices_of(self._memory.to_host(codes))):
            yield self._memory.part(codes, at), at, multiplier


def indices_of(codes: I32) -> I32:
    """The index of each code of a scan; all of it is on the host."""
    return codes ^ (codes >> 31)
