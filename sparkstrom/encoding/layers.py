"""Give layers their own thresholds, whole multiples of tau; estimate tau from sampled residuals.

A parameter's residual (the change that is learned but not sent) is sent when its absolute value
reaches the threshold tau. Layers learn at different scales: with one tau for all layers, the layer
with the largest changes would fill the messages. A layer with multiplier m has the threshold
m * tau. Messages contain only tau. Decoders know the multipliers from the fit, and multiply each
entry by the multiplier of its layer. Messages thus do not grow, and all changes remain multiples of
the quantum, the power of two of which all parameters are multiples (``encoding.grid``).

With multipliers, messages contain the gaps between the indices of their entries, and are never
bitmaps. A bitmap takes two bits per parameter, and pays off only because it can also contain half
steps (tau / 2 instead of tau), which do not exist with multipliers. For the same entries without
half steps, gaps take at most one byte more than a bitmap, and mostly much less.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import UsageError
from sparkstrom.encoding.backends import F32, I32, U8, Backend, host
from sparkstrom.encoding.grid import Flat

MULTIPLIER_MAX = 1024  # leaves a range of three decades for tau
NAMES_SHOWN = 20  # names of layers in an error message


@dataclass(frozen=True, slots=True)
class Layers:
    """The multipliers of tau for consecutive index ranges, from index 0 on. Picklable."""

    stops: tuple[int, ...]  # the end index of each range; the last one is n_params
    multipliers: tuple[int, ...]  # each range's threshold in multiples of tau

    @property
    def largest(self) -> int:
        """The largest multiplier of tau of any layer."""
        return max(self.multipliers)

    def ranges(self) -> Iterator[tuple[int, int, int]]:
        """Yield (start index, end index, multiplier of tau) of each range."""
        return zip((0, *self.stops), self.stops, self.multipliers, strict=False)

    def split(self, indices: NDArray[np.integer]) -> Iterator[tuple[slice, int]]:
        """Split ascending parameter ``indices`` by layer.

        Yield for each layer the slice of ``indices`` that belongs to it, and its multiplier of tau.
        """
        edges = np.searchsorted(indices, self.stops).tolist()
        slices = (slice(low, high) for low, high in zip((0, *edges), edges, strict=False))
        return zip(slices, self.multipliers, strict=True)

    def multipliers_at(self, indices: NDArray[np.integer]) -> NDArray[np.int64]:
        """Return the multiplier for each index; ``indices`` may have any order."""
        return np.array(self.multipliers)[np.searchsorted(self.stops, indices, side="right")]

    def scale(self, indices: I32, quanta: I32) -> None:
        """Multiply ``quanta`` i32[hits] in place by the multipliers of ascending ``indices``."""
        for part, multiplier in self.split(indices):
            quanta[part] *= multiplier


def layers_of(
    n_params: int, layer_of: Callable[[int], str], multipliers: Mapping[str, int]
) -> Layers | None:
    """Return the model's layers with their multipliers; None if ``multipliers`` is empty.

    ``layer_of`` returns a parameter's layer name; a layer's parameters are contiguous. A key of
    ``multipliers`` matches layers of exactly that name, or whose name continues with a separator:
    "layer 2" matches "layer 2 weights", but not "layer 20 weights". The longest matching key
    applies; other layers have multiplier 1. Raises UsageError for a key that matches no layer.
    """
    if not multipliers:
        return None
    stops, found, names = [], [], []
    used: set[str] = set()
    start = 0
    while start < n_params:
        name = layer_of(start)
        start = _find_layer_end(name, start, n_params, layer_of)
        fitting = [key for key in multipliers if _matches_layer(key, name)]
        used.update(fitting)
        names.append(name)
        stops.append(start)
        found.append(multipliers[max(fitting, key=len)] if fitting else 1)
    if missing := sorted(multipliers.keys() - used):
        shown = ", ".join(names[:NAMES_SHOWN]) + (" ..." if len(names) > NAMES_SHOWN else "")
        raise UsageError(
            f"layer_multipliers names {missing[0]!r}, which is not a layer of this model: {shown}"
        )
    return Layers(tuple(stops), tuple(found))


def _matches_layer(key: str, name: str) -> bool:
    """Return whether ``key`` matches a layer's name: equal, or a prefix before a separator."""
    return name == key or (name.startswith(key) and not name[len(key)].isalnum())


def _find_layer_end(name: str, start: int, n_params: int, layer_of: Callable[[int], str]) -> int:
    """Return the index after the last parameter of the layer that starts at ``start``."""
    beyond = range(start, n_params)
    return start + bisect.bisect_left(beyond, True, key=lambda index: layer_of(index) != name)


class LayeredKernels:
    """Runs a backend's kernels layer by layer, with each layer's multiple of tau.

    A hit is a parameter whose residual reaches its layer's threshold. Its code is its index, or
    ``~index`` if the residual is negative; ``codes`` must have room for all hits. Results
    (overflows, first) are the number of parameters that left the range of exact float32 sums, and
    the index of the first of them or -1. "Bits" of a float32 are an integer with the same bits.
    ``encoding.reference_kernels`` documents the arguments. Which hits belong to which layer is
    computed on the host.
    """

    def __init__(self, backend: Backend, layers: Layers) -> None:
        """Run the kernels of ``backend`` with the multipliers of ``layers``."""
        self._kernels, self._memory, self._layers = backend.kernels, backend.memory, layers

    def scan_local(self, local: F32, theta: F32, tau: float, codes: I32) -> tuple[int, int]:
        """Write codes of hits in local - theta, layer by layer.

        Return (number of hits, bits of the largest |local|, which reveal NaN and infinity).
        """
        return self._scan_layers(self._kernels.scan_local, local, theta, tau, codes)

    def scan_replica(self, residual: F32, delta: F32, tau: float, codes: I32) -> tuple[int, int]:
        """Add delta to the residual, and write codes of hits, layer by layer.

        Return (number of hits, bits of the largest |residual|, which reveal NaN and infinity).
        """
        return self._scan_layers(self._kernels.scan_replica, residual, delta, tau, codes)

    def _scan_layers(
        self,
        kernel: Callable[[F32, F32, float, I32], tuple[int, int]],
        first: F32,
        second: F32,
        tau: float,
        codes: I32,
    ) -> tuple[int, int]:
        """Run a scanning kernel layer by layer; write codes with model-wide indices.

        ``first`` and ``second`` are the kernel's two arrays, f32[n_params]. Return (number of hits,
        bits of the largest absolute value that any call of the kernel found).
        """
        hits, worst, part = 0, 0, self._memory.part
        for start, stop, multiplier in self._layers.ranges():
            layer, rest = slice(start, stop), part(codes, slice(hits, None))
            found, bits = kernel(part(first, layer), part(second, layer), tau * multiplier, rest)
            self._kernels.shift_codes(part(rest, slice(found)), start)
            hits, worst = hits + found, max(worst, bits)
        return hits, worst

    def choose_local(
        self, local: F32, theta: F32, tau: float, limit: int, seed: int, codes: I32
    ) -> int:
        """Write codes of hits, a random part of those below 2 tau; return how many.

        Here and in ``choose_replica``, tau is the threshold of the parameter's layer.
        """
        return self._choose(self._kernels.choose_local, (local, theta), tau, limit, seed, codes)

    def choose_replica(self, residual: F32, tau: float, limit: int, seed: int, codes: I32) -> int:
        """Write codes of hits, a random part of those below 2 tau; return how many."""
        return self._choose(self._kernels.choose_replica, (residual,), tau, limit, seed, codes)

    def _choose(
        self,
        kernel: Callable[..., int],
        arrays: tuple[F32, ...],
        tau: float,
        limit: int,
        seed: int,
        codes: I32,
    ) -> int:
        """Run ``kernel``, which chooses hits, layer by layer; write codes with model-wide indices.

        ``arrays`` are the kernel's first arguments, f32[n_params]. Return the number of codes.
        """
        hits, part = 0, self._memory.part
        for start, stop, multiplier in self._layers.ranges():
            layer = [part(array, slice(start, stop)) for array in arrays]
            rest = part(codes, slice(hits, None))
            found = kernel(*layer, tau * multiplier, limit, seed + start, rest)
            self._kernels.shift_codes(part(rest, slice(found)), start)
            hits += found
        return hits

    def find_levels_local(
        self, local: F32, theta: F32, codes: I32, tau: float, top: int, levels: U8
    ) -> int:
        """Write to ``levels`` each hit's level, by the tau of its layer; return the highest one."""
        return max(
            self._kernels.find_levels_local(
                local, theta, own, tau * m, top, self._memory.part(levels, at)
            )
            for own, at, m in self._cut(codes)
        )

    def find_levels_replica(
        self, residual: F32, codes: I32, tau: float, top: int, levels: U8
    ) -> int:
        """Write to ``levels`` each hit's level, by the tau of its layer; return the highest one."""
        return max(
            self._kernels.find_levels_replica(
                residual, own, tau * m, top, self._memory.part(levels, at)
            )
            for own, at, m in self._cut(codes)
        )

    def move_by_levels(
        self,
        theta: F32,
        other: F32,
        codes: I32,
        levels: U8,
        step: float,
        other_step: float,
        q: float,
    ) -> tuple[int, int]:
        """Add hits' steps, times 2^level and the layer's multiplier, to theta and ``other``.

        Return (overflows of theta, index of one of them or -1).
        """
        overflows, first = 0, -1
        for own, at, m in self._cut(codes):
            found = self._memory.part(levels, at)
            over, where = self._kernels.move_by_levels(
                theta, other, own, found, m * step, m * other_step, q
            )
            overflows, first = overflows + over, where if first < 0 else first
        return overflows, first

    def move(
        self, theta: F32, other: F32, codes: I32, step: float, other_step: float, q: float
    ) -> tuple[int, int]:
        """Add hits' steps, times the layer's multiplier, to theta and ``other``.

        Return (overflows of theta, index of the first one or -1).
        """
        overflows, first = 0, -1
        for own, _, m in self._cut(codes):
            over, where = self._kernels.move(theta, other, own, m * step, m * other_step, q)
            overflows, first = overflows + over, where if first < 0 else first
        return overflows, first

    def clip_local(self, local: F32, theta: F32, limit: float) -> float:
        """Clip local - theta to +-``limit`` times each layer's multiplier.

        Return the sum of absolute changes.
        """
        part = self._memory.part
        return sum(
            self._kernels.clip_local(
                part(local, slice(start, stop)), part(theta, slice(start, stop)), limit * m
            )
            for start, stop, m in self._layers.ranges()
        )

    def clip_replica(self, residual: F32, limit: float) -> float:
        """Clip the residual to +-``limit`` times each layer's multiplier.

        Return the sum of absolute changes.
        """
        return sum(
            self._kernels.clip_replica(self._memory.part(residual, slice(start, stop)), limit * m)
            for start, stop, m in self._layers.ranges()
        )

    def _cut(self, codes: I32) -> Iterator[tuple[I32, slice, int]]:
        """Split hit codes by layer; yield (codes of the layer, their slice, multiplier of tau)."""
        for at, multiplier in self._layers.split(indices_of(self._memory.to_host(codes))):
            yield self._memory.part(codes, at), at, multiplier


def indices_of(codes: I32) -> I32:
    """Return the parameter index in each hit code, which is ``index`` or ``~index``."""
    return codes ^ (codes >> 31)


SAMPLE_HITS = 128  # hits in a sample, which estimate the number of hits with an error of a tenth
SAMPLE_LEAST = 8192  # parameters in the smallest sample
SAMPLE_PARAMS = 65_536  # parameters in the largest sample; smaller models are read completely
FEW_STRIDE = 16  # ``nth_largest`` first examines every sixteenth value
FEW_SPARE = 4  # ranks by which it lowers its bound, so that enough values reach the bound


def tau_reached_by(
    fraction: float,
    publication: int,
    learnt: Flat,
    other: Flat,
    sign: int,
    layers: Layers | None = None,
    backend: Backend | None = None,
) -> float | None:
    """Return the tau that ``fraction`` of the residuals reach; None if all residuals are 0.

    The residual is ``learnt + sign * other``, such as local - theta, both f32[n_params] in the
    backend's memory (None: the host's). A large model is sampled at random, seeded by the number of
    the ``publication``; only the sample is copied to the host. With ``layers``, each residual is
    divided by its layer's multiplier first.
    """
    residuals = Residuals(learnt, other, sign, layers, backend or host())
    enough = max(SAMPLE_LEAST, math.ceil(SAMPLE_HITS / fraction))
    few = min(enough, SAMPLE_PARAMS) if learnt.size > SAMPLE_PARAMS else SAMPLE_PARAMS
    for size in sorted({few, SAMPLE_PARAMS}):
        sizes, taken = residuals.sample_sizes(size, publication)
        wanted = math.ceil(fraction * taken)
        if sizes.size >= wanted:  # otherwise most residuals are 0: take a larger sample
            break
    return nth_largest(sizes, min(wanted, sizes.size)) if sizes.size else None


def nth_largest(values: Flat, n: int) -> float:
    """Return the ``n``-th largest of ``values``, f32[at least n], counted from 1.

    For small n this takes about a quarter of the time of ``np.partition``. A sixteenth of the
    values gives a probable lower bound; only values that reach this bound are partitioned. If n is
    large or too few values reach the bound, all values are partitioned.
    """
    few = values[::FEW_STRIDE]
    rank = 2 * n // FEW_STRIDE + FEW_SPARE  # of the bound among the few; about 2 n values reach it
    if rank < few.size // 4:  # otherwise a quarter of all values or more would reach it
        large = values[values >= np.partition(few, -rank)[-rank]]
        if large.size >= n:
            values = large
    return float(np.partition(values, -n)[-n])


class Residuals(NamedTuple):
    """The residuals ``learnt + sign * other`` of a model, to be read completely or sampled."""

    learnt: Flat  # f32[n_params], first term of ``Residual.terms``
    other: Flat  # f32[n_params], second term
    sign: int  # 1 or -1
    layers: Layers | None  # multipliers of tau per layer; None: one tau for all
    backend: Backend  # whose memory holds the arrays

    def sample_sizes(self, size: int, seed: int) -> tuple[Flat, int]:
        """Return (each |residual| / multiplier of a sample, size of the sample).

        The first result omits 0, NaN and infinity. A large model is sampled at random: ``size``
        residuals, seeded by ``seed``. A model of up to ``SAMPLE_PARAMS`` is read completely.
        """
        where, sizes = (
            self._read_all() if self.learnt.size <= SAMPLE_PARAMS else self._read_sample(size, seed)
        )
        if self.layers is not None:
            sizes = (sizes / self.layers.multipliers_at(where)).astype(np.float32)
        taken = sizes.size
        if not (np.all(sizes) and math.isfinite(np.add.reduce(sizes, dtype=np.float64))):
            sizes = sizes[(sizes > 0) & np.isfinite(sizes)]  # ``HitScan`` reports infinite ones
        return sizes, taken

    def _read_all(self) -> tuple[I32, Flat]:
        """Return (indices, absolute values) of all residuals."""
        one, other = (self.backend.memory.to_host(each) for each in (self.learnt, self.other))
        with np.errstate(invalid="ignore", over="ignore"):
            return np.arange(one.size, dtype=np.int32), np.abs(one + np.float32(self.sign) * other)

    def _read_sample(self, size: int, seed: int) -> tuple[I32, Flat]:
        """Return (indices, absolute values) of a random sample.

        The sample is random because a fixed stride could hit a single column of a weight matrix.
        """
        kernels, memory = self.backend.kernels, self.backend.memory
        where, sizes = memory.empty(size, np.int32), memory.empty(size, np.float32)
        kernels.sample(self.learnt, self.other, self.sign, seed, where, sizes)
        return memory.to_host(where), memory.to_host(sizes)
