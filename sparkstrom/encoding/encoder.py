"""The encoder of one worker, which turns learned changes into compressed updates without loss.

A publication has five stages:

    residual       ``residual``     add what was learned to what was not yet sent
    tau            ``tau``          choose the threshold
    scan           ``Scan``         find the parameters whose residual reaches it (hits)
    form           ``FormWriters``  write the message in the form that suits the number of hits
    post-process   ``residual``     change the rest, for example clip it

Their order matters: scan, and detect NaN, before anything changes; choose the form from the number
of hits; only then write the message, and at the same time subtract it from the residual and add it
to theta. So exactly the messages that exist have been subtracted.

    came in  =  sent + residual + clipped + scaled away

``aggregation`` scales a hit: it subtracts tau from the residual and adds s * tau to theta, with s =
1 (sum), 1/workers (mean) or 1/sqrt(workers) (sqrt).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from sparkstrom.base.errors import TrainingError, UsageError
from sparkstrom.encoding import gaps, grid, levels
from sparkstrom.encoding.backends import I32, SCRATCH_BYTES, U8, Backend, Memory, host
from sparkstrom.encoding.forms import (
    Encoded,
    EncoderState,
    EncoderTotals,
    Form,
    half_side,
    prefers_bitmap,
)
from sparkstrom.encoding.grid import Flat
from sparkstrom.encoding.layers import Layers, indices_of, tau_reached_by
from sparkstrom.encoding.residual import (
    PublicationArrays,
    Residual,
    ResidualPostProcessor,
    StepSizes,
    create_residual,
)
from sparkstrom.encoding.tau import PublicationTarget, WarmUp, tau_policy
from sparkstrom.encoding.thresholds import ThresholdAlgorithm, levels_of


class WrittenMessage(NamedTuple):
    """A message, and how it changed theta."""

    encoded: Encoded  # the message
    steps: float  # sum of absolute steps, in multiples of tau
    overflows: int  # parameters moved beyond the exact range
    first_overflow: int  # the index of the first of them, or -1


@dataclass(frozen=True, slots=True)
class Workspace:
    """Buffers that the scan and all forms share, allocated once."""

    n_params: int  # number of the model's parameters
    memory: Memory  # of the backend: host or device
    layers: Layers | None  # thresholds per layer; None: one for all
    codes: I32  # in ``memory``: the hits of the last scan, as far as there is room
    out: U8  # on the host: a message being written

    @classmethod
    def allocate(
        cls, n_params: int, memory: Memory, layers: Layers | None, *, levels_max: int
    ) -> Workspace:
        """Allocate room for the largest possible message; untouched pages cost no memory."""
        # From n/2 hits on the form is the bitmap, where there is one.
        room = n_params // 2 + 1 if has_bitmaps(layers, levels_max) else n_params
        sparse_bytes = levels.bytes_max(room, n_params, levels_max - 1) + gaps.FLUSH_BYTES
        out = np.empty(max(sparse_bytes, bitmap_bytes(n_params)), np.uint8)
        return cls(n_params, memory, layers, memory.empty(room, np.int32), out)


def has_bitmaps(layers: Layers | None, levels_max: int) -> bool:
    """Return whether bitmaps can be used: they have a single tau and no multiples of it."""
    return layers is None and levels_max == 1


def bitmap_bytes(n_params: int) -> int:
    """Return the length of a bitmap in bytes: two bits per parameter."""
    return (n_params + 3) // 4


class FormWriter(Protocol):
    """Encodes messages of one form, and in the same call applies them to residual and theta."""

    def write(
        self, hits: int, arrays: PublicationArrays, step_sizes: StepSizes, /
    ) -> WrittenMessage:
        """Encode and apply the hits of the last scan; ``hits`` is at least 1."""


class GapsWriter:
    """Writes few hits, each of which moves by tau, or by its layer's multiple of it."""

    def __init__(self, residual: Residual, space: Workspace) -> None:
        """Write hits of ``residual`` with the buffers of ``space``."""
        self._residual, self._space = residual, space

    def write(self, hits: int, arrays: PublicationArrays, step_sizes: StepSizes) -> WrittenMessage:
        """Encode and apply the hits, see ``FormWriter.write``."""
        space = self._space
        codes = space.codes[:hits]
        on_host = space.memory.to_host(codes)
        size = gaps.encode(on_host, space.n_params, space.out)
        overflow = self._residual.move(arrays, codes, step_sizes)
        payload, n = space.out[:size].tobytes(), space.n_params
        steps = (
            int(space.layers.multipliers_at(indices_of(on_host)).sum()) if space.layers else hits
        )
        return WrittenMessage(
            Encoded(Form.GAPS, step_sizes.step_quanta, hits, payload, hits / n), steps, *overflow
        )


class LevelsWriter:
    """Writes few hits, each of which moves by the largest tau * 2^level that it reaches."""

    def __init__(self, residual: Residual, space: Workspace, levels_max: int) -> None:
        """Write hits of ``residual`` with at most ``levels_max`` levels, counted from level 0."""
        self._residual, self._space, self._top = residual, space, levels_max - 1
        self._levels_of: U8 = space.memory.empty(space.codes.size, np.uint8)

    def write(self, hits: int, arrays: PublicationArrays, step_sizes: StepSizes) -> WrittenMessage:
        """Encode and apply the hits; the form is ``GAPS`` if none of them reaches 2 tau."""
        space = self._space
        codes, found = space.codes[:hits], self._levels_of[:hits]
        top = self._residual.levels(arrays, codes, step_sizes.tau, self._top, found)
        overflow = self._residual.move_levels(arrays, codes, found, step_sizes)
        codes, found = space.memory.to_host(codes), space.memory.to_host(found)
        if top:
            size = levels.encode(codes, found, top, space.n_params, space.out)
        else:
            size = gaps.encode(codes, space.n_params, space.out)
        times = np.left_shift(1, found, dtype=np.int64)
        if space.layers:
            times *= space.layers.multipliers_at(indices_of(codes))
        form, payload = Form.LEVELS if top else Form.GAPS, space.out[:size].tobytes()
        encoded = Encoded(form, step_sizes.step_quanta, hits, payload, hits / space.n_params)
        return WrittenMessage(encoded, float(times.sum()), *overflow)


class BitmapWriter:
    """Writes many hits, with half steps of one sign in the same two bits; signs alternate."""

    def __init__(self, residual: Residual, space: Workspace) -> None:
        """Write hits of ``residual``; allocate the bitmap in the memory of ``space``."""
        self._residual, self._space = residual, space
        self._packed: U8 = space.memory.mirror(space.out[: bitmap_bytes(space.n_params)])
        self._scratch: U8 = space.memory.empty(SCRATCH_BYTES, np.uint8)
        self._half_side = 1

    def write(self, hits: int, arrays: PublicationArrays, step_sizes: StepSizes) -> WrittenMessage:
        """Encode and apply the hits, see ``FormWriter.write``. The kernel counts them itself."""
        form = Form.BITMAP_UP if self._half_side > 0 else Form.BITMAP_DOWN
        self._half_side = -self._half_side  # the next bitmap flushes the other side
        hits, halves, *overflow = self._residual.bitmap(
            arrays, step_sizes, half_side(form), self._scratch, self._packed
        )
        space, count = self._space, hits + halves
        payload = space.memory.to_host(self._packed).tobytes()
        encoded = Encoded(form, step_sizes.step_quanta, count, payload, count / space.n_params)
        return WrittenMessage(encoded, hits + halves / 2, *overflow)

    def state(self) -> EncoderState:
        """Return the sign of the next bitmap's half steps."""
        return {"half_side": self._half_side}

    def load_state(self, state: EncoderState) -> None:
        """Restore the sign of the next bitmap's half steps."""
        self._half_side = int(state["half_side"])


class FormWriters:
    """Holds a writer for each form that can occur, and chooses one by the number of hits."""

    def __init__(self, residual: Residual, space: Workspace, levels_max: int) -> None:
        """Create the writers. ``levels_max`` is the number of step sizes of a hit; 1: tau alone."""
        self._n_params = space.n_params
        self._has_bitmaps = has_bitmaps(space.layers, levels_max)
        self._bitmap = BitmapWriter(residual, space)
        self._sparse: FormWriter = GapsWriter(residual, space)
        if levels_max > 1:
            self._sparse = LevelsWriter(residual, space, levels_max)

    def for_hits(self, hits: int) -> FormWriter:
        """Return the writer for this number of hits."""
        if self._has_bitmaps and prefers_bitmap(hits, self._n_params):
            return self._bitmap
        return self._sparse

    def state(self) -> EncoderState:
        """Return the state that survives a fit, whether or not bitmaps are used in this one."""
        return self._bitmap.state()

    def load_state(self, state: EncoderState) -> None:
        """Restore state returned by ``state``."""
        self._bitmap.load_state(state)


INFINITY_BITS = 0x7F800000  # bits of a float32 at or above this, sign aside, mean NaN or infinity
CROWDED = 1.5  # times the wanted hits: with more, many residuals are tied and must be subsampled
SEED_CODES = 4096  # hits that seed the choice: their signs differ between workers with equal steps


class Scan:
    """Finds hits and non-finite values in one pass over the residual, before anything changes."""

    def __init__(
        self,
        residual: Residual,
        space: Workspace,
        layer_of: Callable[[int], str] | None = None,
    ) -> None:
        """Scan ``residual`` into ``space``; ``layer_of`` names layers in error messages."""
        self._residual, self._space, self._layer_of = residual, space, layer_of

    def find(self, arrays: PublicationArrays, tau: float) -> int:
        """Write the codes of all parameters that reach tau to the workspace; return their number.

        Raises TrainingError naming index and layer if any value is NaN or infinite.
        """
        hits, worst = self._residual.scan(arrays, tau, self._space.codes)
        if worst >= INFINITY_BITS:
            values = self._residual.values(arrays.learnt)
            raise self._non_finite_error(self._space.memory.to_host(values))
        return hits

    def subsample_ties(
        self, hits: int, fraction: float, arrays: PublicationArrays, tau: float, number: int
    ) -> int:
        """Randomly subsample hits tied near the threshold; the others stay in the residual.

            hits      number that ``find`` found with this tau
            fraction  of all parameters that should be sent
            number    of the publication, which seeds the choice
            returns   the number of hits that remain

        After Adam's first step all residuals have about the same size, and no tau separates them.
        Residuals from 2 tau on are always sent: tau is chosen such that these are no more than
        wanted.
        """
        codes = self._space.codes
        wanted = math.ceil(fraction * self._space.n_params)
        if hits <= CROWDED * wanted:
            return hits
        found = self._space.memory.to_host(codes[: min(hits, SEED_CODES)])
        seed = zlib.crc32(found.tobytes(), number)
        large = self._residual.choose(arrays, tau, 0, seed, codes)
        limit = max(0, wanted - large) * 2**32 // (hits - large) if hits > large else 0
        return min(codes.size, self._residual.choose(arrays, tau, limit, seed, codes))

    def _non_finite_error(self, values: Flat) -> TrainingError:
        """Return the error that names the first parameter that is NaN or infinite."""
        index = int(np.argmin(np.isfinite(values)))
        where = f" ({self._layer_of(index)})" if self._layer_of else ""
        return TrainingError(
            f"parameter {index}{where} became {values[index]} in training; nothing of that step was"
            " published. Lower the learning rate, clip gradients, or look at the data"
        )


AGGREGATIONS: dict[str, Callable[[int], float]] = {
    "sum": lambda workers: 1.0,
    "mean": lambda workers: 1.0 / workers,
    "sqrt": lambda workers: 1.0 / math.sqrt(workers),
}


class Encoder:
    """The encoder of one worker: compresses learned changes into updates. Not thread-safe."""

    def __init__(
        self,
        n_params: int,
        k: int,
        threshold: ThresholdAlgorithm,
        clipping: ResidualPostProcessor | None = None,
        *,
        train_on: str = "local",
        aggregation: str = "sum",
        workers: int = 1,
        backend: Backend | None = None,
        layer_of: Callable[[int], str] | None = None,
        warm_up: WarmUp | None = None,
        shake_frequency: int = 0,
        layers: Layers | None = None,
    ) -> None:
        """Set up an encoder for a model of ``n_params`` parameters.

        Args:
            n_params: number of parameters.
            k: the grid's exponent; every step is a multiple of 2^-k.
            threshold: the algorithm that chooses tau for each publication.
            clipping: what to do with the residual after a publication; None leaves it as it is.
            train_on: "local" (the residual is ``local - theta``) or "replica" (a separate array).
            aggregation: "sum", "mean" or "sqrt", how steps scale with the number of workers.
            workers: number of workers that train.
            backend: where all arrays given to this encoder are stored; None: on the host.
            layer_of: returns a parameter's layer name, for error messages.
            warm_up: send more in the first publications.
            shake_frequency: send with a third of tau every so many publications; 0: never.
            layers: multipliers of tau per layer.

        Raises:
            UsageError: an unknown ``aggregation`` or ``train_on``, or no workers.
        """
        if aggregation not in AGGREGATIONS:
            raise UsageError(f"aggregation={aggregation!r}: must be one of {list(AGGREGATIONS)}")
        backend = backend or host()
        levels_max = levels_of(threshold)
        self.n_params, self.k, self.q = n_params, k, grid.quantum(k)
        self.train_on, self.aggregation, self.layers = train_on, aggregation, layers
        self.counters = EncoderTotals()
        self.scale = 1.0
        self.set_workers(workers)
        limits = grid.tau_limits(k, _largest_multiple(layers, levels_max))
        self._policy = tau_policy(threshold, limits, n_params, warm_up, shake_frequency)
        self._backend = backend
        self._residual = create_residual(train_on, n_params, backend, layers)
        space = Workspace.allocate(n_params, backend.memory, layers, levels_max=levels_max)
        self._scan = Scan(self._residual, space, layer_of)
        self._forms = FormWriters(self._residual, space, levels_max)
        self._clipping = clipping

    @property
    def tau(self) -> float:
        """The threshold of the last publication, unrounded; NaN before the first one."""
        return self._policy.tau

    def set_workers(self, workers: int) -> None:
        """Set the number of training workers, which scales steps under "mean" and "sqrt".

        Raises UsageError for a number below 1.
        """
        if workers < 1:
            raise UsageError(f"workers={workers}: at least this one trains")
        self.scale = AGGREGATIONS[self.aggregation](workers)

    def follow_link(self, round_s: float, step_s: float) -> None:
        """Adapt how much to send from the next publication on to how long the last one took.

        Has an effect only if the threshold chooses the fraction to send, as ``AutoThreshold`` does.

            round_s  seconds from the last publication until it was committed
            step_s   seconds of one training step
        """
        self._policy.follow_link(round_s, step_s)

    def accumulate(self, delta: Flat) -> None:
        """Add ``delta`` f32[n_params] to the residual without publishing (replica training)."""
        self._residual.accumulate(delta)

    def publish(self, learnt: Flat, theta: Flat) -> Encoded | None:
        """Encode the next update from all residuals that reach tau; return None if none does.

            learnt  f32[n_params]  in/out: ``local``, which changes under mean and sqrt and when
                                   clipped; when training on the replica, in: this step's change
            theta   f32[n_params]  in/out: the quantised update is added at once

        Raises TrainingError naming index and layer if any value is NaN or infinite; theta is then
        unchanged.
        """
        arrays, number = PublicationArrays(learnt, theta), self._policy.publications + 1
        target = self._policy.next_tau(
            lambda fraction: self._tau_reached_by(fraction, number, arrays)
        )
        step_sizes = self._step_sizes(target)
        hits = self._scan.find(arrays, step_sizes.least)
        if target.wanted is not None:
            hits = self._scan.subsample_ties(hits, target.wanted, arrays, step_sizes.least, number)
        self.counters.publications += 1
        if hits == 0:
            self._policy.count(sent_fraction=0.0)
            return None
        written = self._forms.for_hits(hits).write(hits, arrays, step_sizes)
        self._process_residual(arrays, number)
        self._update_counters(written, step_sizes)
        self._policy.count(written.encoded.sent_fraction)
        return written.encoded

    def residual(self, local: Flat, theta: Flat) -> Flat:
        """Return a copy of the residual, f32[n_params], on the host.

        ``local`` is ignored when training on the replica.
        """
        return self._residual.copy(PublicationArrays(local, theta))

    def residual_norms(self, local: Flat, theta: Flat) -> tuple[float, float]:
        """Return the sum of the residual's absolute values and its Euclidean norm, in float64."""
        mass, squares = self._residual.norms(PublicationArrays(local, theta))
        return mass, math.sqrt(squares)

    def add_residual(self, saved: Flat, local: Flat) -> None:
        """Add a residual f32[n_params] that an earlier fit left over."""
        self._residual.add(saved, local)

    def state(self) -> EncoderState:
        """Return the state that survives a fit, as arrays and plain scalars, for ``load_state``.

        Excludes the residual of local training, which is ``local - theta`` and stored by the
        caller.
        """
        return self._policy.state() | self._forms.state() | self._residual.state()

    def load_state(self, state: EncoderState) -> None:
        """Restore the state of an encoder for an equal model.

        The saved residual, if any, is added to this encoder's.
        """
        for stage in (self._policy, self._forms, self._residual):
            stage.load_state(state)

    def _tau_reached_by(
        self, fraction: float, number: int, arrays: PublicationArrays
    ) -> float | None:
        """Return the tau, rounded down, that ``fraction`` of residuals reach; None if all are 0."""
        terms = self._residual.terms(arrays)
        tau = tau_reached_by(fraction, number, *terms, self.layers, self._backend)
        return None if tau is None else grid.round_tau_down(tau, self.k)

    def _step_sizes(self, target: PublicationTarget) -> StepSizes:
        """Compute the step sizes of a publication from its target threshold.

        Sampled thresholds are rounded to few significant bits, so that workers share step sizes.
        """
        least = grid.tau_quanta(target.tau, self.k)
        tau = grid.round_coarsely(least) if target.is_coarse else least
        step = grid.scaled_quanta(tau, self.scale)
        if target.is_coarse:
            step = grid.round_coarsely(step)
        q = self.q
        return StepSizes(least * q, tau * q, step * q, step_quanta=step, q=q)

    def _process_residual(self, arrays: PublicationArrays, number: int) -> None:
        """Post-process the residual with the full tau; a shake-up's own would destroy more."""
        if self._clipping is not None:
            tau = grid.tau_quanta(self.tau, self.k) * self.q
            destroyed = self._clipping.process(self._residual, arrays, number, tau)
            self.counters.mass_clipped += destroyed

    def _update_counters(self, written: WrittenMessage, step_sizes: StepSizes) -> None:
        """Add a written message to the counters."""
        encoded, counters = written.encoded, self.counters
        counters.hits += encoded.count
        counters.payload_bytes += len(encoded.payload)
        counters.mass_sent += written.steps * step_sizes.step
        counters.mass_scaled_away += written.steps * (step_sizes.tau - step_sizes.step)
        if written.overflows and counters.first_overflow < 0:
            counters.first_overflow = written.first_overflow
        counters.overflows += written.overflows


def _largest_multiple(layers: Layers | None, levels_max: int) -> int:
    """Return the largest multiple of tau by which a hit may move."""
    multiple = layers.largest if layers else 1
    return multiple << levels.TOP_MAX if levels_max > 1 else multiple
