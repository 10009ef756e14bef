"""Compress one worker's parameter changes into updates, keeping what is not sent for later.

``theta`` is the vector of parameters that all workers share, and the residual is what this worker
has learned but not yet sent. A publication is one call of ``Encoder.publish``, which makes at most
one message. It has five stages, each done by the module or class named beside it:

    residual       ``residual``     add newly learned changes to the residual
    tau            ``tau``          choose the threshold tau
    scan           ``HitScan``      find the parameters whose residual reaches tau (hits)
    form           ``FormWriters``  write the message in a form (encoding) for the number of hits
    post-process   ``residual``     modify the remaining residual, for example clip it

Their order matters. The scan detects NaN before anything is sent or added to theta. Writing a
message also subtracts it from the residual and adds it to theta, so that the residual and theta
reflect exactly the messages that exist:

    learned  =  sent + residual + clipped + scaled away

The argument ``aggregation`` scales a hit: tau is subtracted from the residual and s * tau is added
to theta, with s = 1 (sum), 1/workers (mean) or 1/sqrt(workers) (sqrt). ``Encoder.set_workers`` may
reduce s further. The rest, (1 - s) * tau, is scaled away.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from sparkstrom.base.errors import TrainingError, UsageError
from sparkstrom.encoding import gaps, grid
from sparkstrom.encoding import leveled_gaps as levels
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
from sparkstrom.encoding.tau import PublicationTarget, WarmUp, create_tau_chooser
from sparkstrom.encoding.thresholds import ThresholdAlgorithm, step_size_count


class WrittenMessage(NamedTuple):
    """A message, and statistics on how applying the message changed theta."""

    encoded: Encoded  # the message
    steps: float  # sum of absolute changes of theta, in multiples of ``StepSizes.step``
    overflows: int  # number of parameters that left the range of exact float32 sums
    first_overflow: int  # index of the first such parameter, or -1


@dataclass(frozen=True, slots=True)
class Workspace:
    """Buffers that the scan and all form writers share; pages that are not used cost no memory."""

    n_params: int  # number of the model's parameters
    memory: Memory  # memory of the backend, on the host or a device
    layers: Layers | None  # multipliers of tau per layer; None: one tau for all layers
    codes: I32  # in ``memory``: codes (index and sign) of the last scan's hits, as many as fit
    out: U8  # on the host: the message that is being written

    @classmethod
    def allocate(
        cls, n_params: int, memory: Memory, layers: Layers | None, *, levels_max: int
    ) -> Workspace:
        """Allocate room for the largest message with up to ``levels_max`` step sizes."""
        # From n/2 hits on, the form is a bitmap, if bitmaps are possible.
        room = n_params // 2 + 1 if has_bitmaps(layers, levels_max) else n_params
        sparse_bytes = levels.bytes_max(room, n_params, levels_max - 1) + gaps.FLUSH_BYTES
        out = np.empty(max(sparse_bytes, bitmap_bytes(n_params)), np.uint8)
        return cls(n_params, memory, layers, memory.empty(room, np.int32), out)


def has_bitmaps(layers: Layers | None, levels_max: int) -> bool:
    """Return whether bitmaps are possible, which need one tau for all layers and one step size."""
    return layers is None and levels_max == 1


def bitmap_bytes(n_params: int) -> int:
    """Return the length of a bitmap in bytes, at two bits per parameter."""
    return (n_params + 3) // 4


class FormWriter(Protocol):
    """Writes messages of one form, and in the same call applies them to the residual and theta."""

    def write(
        self, hits: int, arrays: PublicationArrays, step_sizes: StepSizes, /
    ) -> WrittenMessage:
        """Encode the hits of the last scan, and apply the message to the residual and theta.

        ``hits`` is the number of hits, at least 1; ``arrays`` has theta and the arrays of the
        residual, which are changed by ``step_sizes``. Returns the message with its statistics.
        """


class GapsWriter:
    """Writes sparse messages in which each hit changes by tau, or its layer's multiple of tau."""

    def __init__(self, residual: Residual, space: Workspace) -> None:
        """Write hits of ``residual`` with the buffers of ``space``."""
        self._residual, self._space = residual, space

    def write(self, hits: int, arrays: PublicationArrays, step_sizes: StepSizes) -> WrittenMessage:
        """Encode the hits as Rice-coded gaps between indices, with signs, and apply them.

        Arguments and result are those of ``FormWriter.write``.
        """
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
    """Writes sparse messages in which hits, the parameters whose residual reaches tau, have levels.

    A hit of level l changes by tau * 2^l, the largest such value that its residual reaches.
    """

    def __init__(self, residual: Residual, space: Workspace, levels_max: int) -> None:
        """Write hits of ``residual`` with levels 0 to ``levels_max`` - 1, using ``space``."""
        self._residual, self._space, self._top = residual, space, levels_max - 1
        self._levels_of: U8 = space.memory.empty(space.codes.size, np.uint8)

    def write(self, hits: int, arrays: PublicationArrays, step_sizes: StepSizes) -> WrittenMessage:
        """Encode and apply the hits, without levels (as ``GAPS``) if none reaches 2 tau.

        Arguments and result are those of ``FormWriter.write``.
        """
        space = self._space
        codes, found = space.codes[:hits], self._levels_of[:hits]
        top = self._residual.find_levels(arrays, codes, step_sizes.tau, self._top, found)
        overflow = self._residual.move_by_levels(arrays, codes, found, step_sizes)
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
    """Writes bitmaps, which suit many hits.

    A bitmap contains +tau, -tau, a half step (tau / 2) or nothing for each parameter. All half
    steps of a bitmap have the same sign, which alternates from bitmap to bitmap.
    """

    def __init__(self, residual: Residual, space: Workspace) -> None:
        """Write hits of ``residual``; allocate the bitmap in the memory of ``space``."""
        self._residual, self._space = residual, space
        self._packed: U8 = space.memory.mirror(space.out[: bitmap_bytes(space.n_params)])
        self._scratch: U8 = space.memory.empty(SCRATCH_BYTES, np.uint8)
        self._half_side = 1

    def write(self, hits: int, arrays: PublicationArrays, step_sizes: StepSizes) -> WrittenMessage:
        """Encode and apply the hits, which the kernel counts again; see ``FormWriter.write``."""
        form = Form.BITMAP_UP if self._half_side > 0 else Form.BITMAP_DOWN
        self._half_side = -self._half_side  # the next bitmap sends half steps of the other sign
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
    """Holds a writer for each possible form (encoding) of a message, and chooses one of them."""

    def __init__(self, residual: Residual, space: Workspace, levels_max: int) -> None:
        """Create writers for ``residual`` that use ``space``.

        ``levels_max`` is the number of step sizes tau, 2 tau, 4 tau ... that a hit may send.
        """
        self._n_params = space.n_params
        self._has_bitmaps = has_bitmaps(space.layers, levels_max)
        self.bitmap = BitmapWriter(residual, space)  # its state is kept for the next fit
        self._equal_steps: FormWriter = GapsWriter(residual, space)
        self._sparse: FormWriter = self._equal_steps
        if levels_max > 1:
            self._sparse = LevelsWriter(residual, space, levels_max)

    def for_hits(self, hits: int, *, has_equal_steps: bool = False) -> FormWriter:
        """Return the writer of the form that suits this number of hits.

        ``has_equal_steps``: whether all hits send the same multiple of tau, independently of their
        residual; if so, the form is ``GAPS``, without levels.
        """
        if has_equal_steps:
            return self._equal_steps
        if self._has_bitmaps and prefers_bitmap(hits, self._n_params):
            return self.bitmap
        return self._sparse


INFINITY_BITS = 0x7F800000  # |x| whose float32 bits are at or above this is NaN or infinite
CROWDED = 1.5  # times the wanted number of hits; if there are more, only some of them are sent
SEED_CODES = 4096  # number of hits that seed this choice, so that it differs between workers


class HitScan:
    """Finds the hits of a publication, and NaN and infinity, in one pass over the residual.

    The encoder runs it before it changes theta, so an error leaves theta unchanged.
    """

    def __init__(
        self,
        residual: Residual,
        space: Workspace,
        layer_of: Callable[[int], str] | None = None,
    ) -> None:
        """Scan ``residual`` into ``space``; ``layer_of`` returns layer names for error messages."""
        self._residual, self._space, self._layer_of = residual, space, layer_of

    def find(self, arrays: PublicationArrays, tau: float) -> int:
        """Find the parameters whose residual reaches tau (hits); return their number.

        Writes their codes (index and sign) to the workspace. Raises TrainingError naming index and
        layer if any value is NaN or infinite.
        """
        hits, worst = self._residual.scan(arrays, tau, self._space.codes)
        if worst >= INFINITY_BITS:
            values = self._residual.values(arrays.learnt)
            raise self._non_finite_error(self._space.memory.to_host(values))
        return hits

    def subsample_ties(
        self, hits: int, fraction: float, arrays: PublicationArrays, tau: float, number: int
    ) -> int:
        """Select hits at random if there are too many; return the number of hits to send.

        The codes of the selected hits replace those of all hits in the workspace, and the other
        hits stay in the residual. ``hits`` is what ``find`` returned for the same ``arrays`` and
        ``tau``, ``fraction`` is the wanted fraction of all parameters, and ``number`` is the number
        of the publication, which seeds the choice.

        After Adam's first step all residuals have about the same size (are tied), and no tau
        separates them. Hits of 2 tau and more are always selected, because tau is chosen so that
        there are no more of these than wanted.
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
        """Create the error that names the first parameter that is NaN or infinite."""
        index = int(np.argmin(np.isfinite(values)))
        where = f" ({self._layer_of(index)})" if self._layer_of else ""
        return TrainingError(
            f"parameter {index}{where} became {values[index]} in training; nothing of that step was"
            " published. Lower the learning rate, clip gradients, or look at the data"
        )


# Names of aggregations, and their factors by which steps are scaled for a number of workers.
AGGREGATIONS: dict[str, Callable[[int], float]] = {
    "sum": lambda workers: 1.0,
    "mean": lambda workers: 1.0 / workers,
    "sqrt": lambda workers: 1.0 / math.sqrt(workers),
}


class Encoder:
    """Turns one worker's parameter changes into compressed updates. Not thread-safe."""

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
            clipping: processes the residual after a publication; None: no processing.
            train_on: "local" (the residual is ``local - theta``) or "replica" (a separate array).
            aggregation: "sum", "mean" or "sqrt": how steps scale with the number of workers.
            workers: number of workers that train.
            backend: kernels and memory of all arrays given to this encoder; None: the host's.
            layer_of: returns the layer name of a parameter index, for error messages.
            warm_up: sends more in the first publications; None: no warm-up.
            shake_frequency: after the warm-up, each publication whose number is a multiple of this
                uses a third of tau; 0: none does.
            layers: multipliers of tau per layer; None: one tau for all layers.

        Raises:
            UsageError: ``aggregation`` or ``train_on`` is unknown, or ``workers`` is below 1.
        """
        if aggregation not in AGGREGATIONS:
            raise UsageError(f"aggregation={aggregation!r}: must be one of {list(AGGREGATIONS)}")
        backend = backend or host()
        levels_max = step_size_count(threshold)
        self.n_params, self.k, self.q = n_params, k, grid.quantum(k)
        self.train_on, self.aggregation, self.layers = train_on, aggregation, layers
        self.counters = EncoderTotals()
        self.scale = 1.0
        self.set_workers(workers)
        limits = grid.tau_limits(k, _largest_multiple(layers, levels_max))
        self._policy = create_tau_chooser(threshold, limits, n_params, warm_up, shake_frequency)
        self._backend = backend
        self._residual = create_residual(train_on, n_params, backend, layers)
        space = Workspace.allocate(n_params, backend.memory, layers, levels_max=levels_max)
        self._scan = HitScan(self._residual, space, layer_of)
        self._forms = FormWriters(self._residual, space, levels_max)
        self._clipping = clipping

    @property
    def tau(self) -> float:
        """The threshold of the last publication, unrounded; NaN before the first publication.

        Shake-ups and large updates use a fraction of this value.
        """
        return self._policy.tau

    def set_workers(self, workers: int, summed: int | None = None) -> None:
        """Set the number of training workers, which may scale the steps.

        Args:
            workers: number of workers that train.
            summed: largest number of workers whose steps are added in full; if more train, steps
                are also scaled by ``summed / workers``. None: no limit.

        Raises:
            UsageError: ``workers`` is below 1.
        """
        if workers < 1:
            raise UsageError(f"workers={workers}: must be at least 1")
        self._workers = workers
        self.scale = AGGREGATIONS[self.aggregation](workers)
        if summed is not None:
            self.scale *= min(1.0, summed / workers)

    def follow_link(self, round_s: float, step_s: float) -> None:
        """Adapt the size of the next messages to the time that the last publication took.

        This has an effect only if the threshold algorithm chooses the fraction to send, like
        ``AutoThreshold``.

        Args:
            round_s: seconds from the last publication until the master numbered its update.
            step_s: duration of one training step in seconds.
        """
        self._policy.follow_link(round_s, step_s)

    def accumulate(self, delta: Flat) -> None:
        """Add a step's change, ``delta`` f32[n_params], to the residual; publish nothing.

        Raises AssertionError with ``train_on="local"``, because ``local`` contains the change.
        """
        self._residual.accumulate(delta)

    def publish(self, learnt: Flat, theta: Flat, *, is_last: bool = False) -> Encoded | None:
        """Encode an update with all residuals that reach tau; return None if no residual does.

        Args:
            learnt: f32[n_params]. With ``train_on="local"`` it is ``local``, which "mean", "sqrt"
                and clipping change. With "replica" it is the last step's change, and is only read.
            theta: f32[n_params]; the quantised update is added to it.
            is_last: whether the worker has trained all its minibatches.

        Raises:
            TrainingError: a value is NaN or infinite; names index and layer. Theta is unchanged.
        """
        arrays, number = PublicationArrays(learnt, theta), self._policy.publications + 1
        target = self._policy.next_tau(
            lambda fraction: self._tau_reached_by(fraction, number, arrays),
            is_last=is_last,
            workers=self._workers,
        )
        step_sizes = self._step_sizes(target)
        hits = self._scan.find(arrays, step_sizes.hit_min)
        if target.wanted is not None:
            hits = self._scan.subsample_ties(
                hits, target.wanted, arrays, step_sizes.hit_min, number
            )
        self.counters.publications += 1
        if hits == 0:
            self._policy.count(sent_fraction=0.0)
            return None
        writer = self._forms.for_hits(hits, has_equal_steps=target.step_taus is not None)
        written = writer.write(hits, arrays, step_sizes)
        self._process_residual(arrays, number)
        self._update_counters(written, step_sizes)
        self._policy.count(written.encoded.sent_fraction)
        return written.encoded

    def residual(self, local: Flat, theta: Flat) -> Flat:
        """Return a copy of the residual, f32[n_params], on the host.

        ``local`` is ignored with ``train_on="replica"``.
        """
        return self._residual.copy(PublicationArrays(local, theta))

    def residual_norms(self, local: Flat, theta: Flat) -> tuple[float, float]:
        """Return the residual's L1 norm (its mass) and Euclidean norm, computed in float64."""
        mass, squares = self._residual.sums(PublicationArrays(local, theta))
        return mass, math.sqrt(squares)

    def add_residual(self, saved: Flat, local: Flat) -> None:
        """Add ``saved``, a residual f32[n_params] that an earlier fit left over, to the residual.

        With ``train_on="local"``, ``local`` is changed; otherwise it is not used.
        """
        self._residual.add_saved(saved, local)

    def state(self) -> EncoderState:
        """Return the state to keep for the next fit, as arrays and plain scalars.

        With ``train_on="local"`` this excludes the residual ``local - theta``, which the caller
        stores.
        """
        return self._policy.state() | self._forms.bitmap.state() | self._residual.state()

    def load_state(self, state: EncoderState) -> None:
        """Restore what ``state`` returned, possibly in an earlier fit of a model of this layout.

        A residual in ``state`` is added to this encoder's residual.
        """
        for stage in (self._policy, self._forms.bitmap, self._residual):
            stage.load_state(state)

    def _tau_reached_by(
        self, fraction: float, number: int, arrays: PublicationArrays
    ) -> float | None:
        """Return the tau (rounded down) that ``fraction`` of residuals reach; None if all are 0.

        ``number``, that of the publication, seeds the sample from which tau is estimated.
        """
        terms = self._residual.terms(arrays)
        tau = tau_reached_by(fraction, number, *terms, self.layers, self._backend)
        return None if tau is None else grid.round_tau_down(tau, self.k)

    def _step_sizes(self, target: PublicationTarget) -> StepSizes:
        """Compute the step sizes of a publication from its target threshold.

        If ``target.is_coarse``, the step is rounded to few significant bits, so that all workers
        use few different steps.
        """
        least = grid.tau_quanta(target.tau, self.k)
        sent = grid.tau_quanta(target.tau * (target.step_taus or 1.0), self.k)
        tau, step = sent, grid.scaled_quanta(sent, self.scale)
        if target.is_coarse:
            step = grid.round_coarsely(step)
            tau = grid.unscaled_quanta(step, self.scale, sent)
        q = self.q
        return StepSizes(least * q, tau * q, step * q, step_quanta=step, q=q)

    def _process_residual(self, arrays: PublicationArrays, number: int) -> None:
        """Post-process the residual after publication ``number``.

        This uses the full tau, because the tau of a shake-up, a third of it, would clip more.
        """
        if self._clipping is not None:
            tau = grid.tau_quanta(self.tau, self.k) * self.q
            destroyed = self._clipping.process(self._residual, arrays, number, tau)
            self.counters.mass_clipped += destroyed

    def _update_counters(self, written: WrittenMessage, step_sizes: StepSizes) -> None:
        """Add a message's statistics to the counters."""
        encoded, counters = written.encoded, self.counters
        counters.hits += encoded.count
        counters.payload_bytes += len(encoded.payload)
        counters.mass_sent += written.steps * step_sizes.step
        counters.mass_scaled_away += written.steps * (step_sizes.tau - step_sizes.step)
        if written.overflows and counters.first_overflow < 0:
            counters.first_overflow = written.first_overflow
        counters.overflows += written.overflows


def _largest_multiple(layers: Layers | None, levels_max: int) -> int:
    """Return the largest multiple of tau that a single hit may add, on any layer."""
    multiple = layers.largest if layers else 1
    return multiple << levels.TOP_MAX if levels_max > 1 else multiple
