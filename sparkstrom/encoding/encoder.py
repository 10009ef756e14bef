"""One worker's encoder: from what was learnt to what is published, losing nothing on the way.

The order is what matters. Scan (and find NaN) before anything changes; choose the form from the
hit count; only then write the message, and in the same act take it out of the residual and add
it to theta. So a message that exists has been subtracted, and one that was not made has not.

    came in  =  sent + residual + clipped + scaled away

In ``local`` training the residual is ``local - theta`` and has no array of its own; in ``replica``
training it has (DL4J's rule). ``aggregation`` scales a hit: it takes tau out of the residual and
moves theta by s * tau, with s = 1 (sum), 1/workers (mean) or 1/sqrt(workers) (sqrt).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import TrainingError, UsageError
from sparkstrom.encoding import backends, gaps, grid, levels
from sparkstrom.encoding.backends import Backend
from sparkstrom.encoding.encoded import Counters, Encoded
from sparkstrom.encoding.forms import Form, half_side, prefers_bitmap
from sparkstrom.encoding.grid import Flat
from sparkstrom.encoding.layers import LayeredKernels, Layers, indices_of
from sparkstrom.encoding.residuals import ResidualClipping
from sparkstrom.encoding.samples import tau_reached_by
from sparkstrom.encoding.schedules import SHAKE_DIVISOR, WarmUp, shakes
from sparkstrom.encoding.thresholds import AutoThreshold, ThresholdAlgorithm, ThresholdState

EncoderState = dict[str, "NDArray[Any] | float | int"]

INFINITY_BITS = 0x7F800000  # bits of a float32 at or above this, sign aside, are not a number
CROWDED = 1.5  # times the wanted hits: many residuals are tied, and chance must choose among them
SEED_CODES = 4096  # hits whose signs tell workers apart that learn by the same step

AGGREGATIONS: dict[str, Callable[[int], float]] = {
    "sum": lambda workers: 1.0,
    "mean": lambda workers: 1.0 / workers,
    "sqrt": lambda workers: 1.0 / math.sqrt(workers),
}


class Encoder:
    """Turn a worker's progress into updates. Used by one thread."""

    def __init__(
        self,
        n_params: int,
        k: int,
        threshold: ThresholdAlgorithm,
        clipping: ResidualClipping | None = None,
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
        """``k``: the grid's exponent. ``layer_of`` names a parameter's layer in error messages.

        ``shake_frequency``: every so many publications one goes out with a third of tau; 0: none.
        ``backend``: where all arrays given to this encoder lie; None: on the host.
        """
        if train_on not in ("local", "replica"):
            raise UsageError(f"train_on={train_on!r}: must be 'local' or 'replica'")
        if aggregation not in AGGREGATIONS:
            raise UsageError(f"aggregation={aggregation!r}: must be one of {list(AGGREGATIONS)}")
        self._levels = int(getattr(threshold, "levels", 1))
        self._auto = threshold if isinstance(threshold, AutoThreshold) else None
        backend = backend or backends.backend()
        if backend.name == backends.CUDA and (warm_up or layers or self._auto or self._levels > 1):
            raise UsageError(
                "backend='cuda' with warm_up, layer multipliers, AutoThreshold or levels above 1:"
                " they work on the host only; use backend='cpu', or leave them out and give a"
                " threshold such as AdaptiveThreshold(1e-3)"
            )
        self.n_params, self.k, self.q = n_params, k, grid.quantum(k)
        self.threshold, self.clipping = threshold, clipping
        self.train_on, self.aggregation = train_on, aggregation
        self.warm_up, self.shake_frequency, self.layers = warm_up, shake_frequency, layers
        self.counters = Counters()
        self.scale = 1.0
        self.set_workers(workers)
        self._layer_of = layer_of
        self._kernels, self._memory = backend.kernels, backend.memory
        self._layered = LayeredKernels(self._kernels, layers) if layers else self._kernels
        self._threshold_state: ThresholdState = {}
        self._sent_fraction: float | None = None
        self._wanted = self._auto.sent_fraction_max if self._auto else 0.0
        self._publications = 0  # survives from fit to fit, unlike the counters
        self._half_side = 1
        kept = n_params if train_on == "replica" else 0
        self._residual: Flat = self._memory.zeros(kept, np.float32)
        # Touched only as far as hits need it: from n/2 hits on the form is the bitmap, as a rule.
        sparse_only = layers is not None or self._levels > 1
        room = n_params if sparse_only else n_params // 2 + 1
        self._codes: backends.I32 = self._memory.empty(room, np.int32)
        self._levels_of = np.empty(room if self._levels > 1 else 0, np.uint8)
        sparse_bytes = levels.bytes_max(room, n_params, self._levels - 1) + gaps.FLUSH_BYTES
        self._out = np.empty(max(sparse_bytes, (n_params + 3) // 4), np.uint8)
        self._packed = self._memory.mirror(self._out[: (n_params + 3) // 4])
        self._scratch = np.empty(backends.SCRATCH_BYTES, np.uint8)

    @property
    def tau(self) -> float:
        """The threshold of the last publication, unrounded; nan before the first."""
        return self._threshold_state.get("tau", math.nan)

    def set_workers(self, workers: int) -> None:
        """Follow the number of workers that train: the scale of ``mean`` and ``sqrt``."""
        if workers < 1:
            raise UsageError(f"workers={workers}: at least this one trains")
        self.scale = AGGREGATIONS[self.aggregation](workers)

    def follow_link(self, round_s: float, step_s: float) -> None:
        """Send more or less from the next publication on, by how the last one went.

        round_s  from its publication until it was committed
        step_s   of one training step

        Only ``AutoThreshold`` listens.
        """
        if self._auto is not None:
            self._wanted = self._auto.next_fraction(self._wanted, round_s, step_s)

    def accumulate(self, delta: Flat) -> None:
        """Replica training, a step that is not published: residual += delta f32[n_params]."""
        assert self.train_on == "replica"
        self._memory.add(self._residual, delta)

    def publish(self, learnt: Flat, theta: Flat) -> Encoded | None:
        """Make the next update out of what reaches tau; None when nothing does.

        learnt  f32[n_params]  ``local`` (in/out, moves under mean and sqrt, and when clipped) or,
                               training on the replica, ``delta``, what the step changed (in)
        theta   f32[n_params]  in/out: the update is added at once, in quantised form

        Raises TrainingError naming index and layer when anything is NaN or infinite; theta is then
        as it was.
        """
        least_quanta = self._next_tau_quanta(learnt, theta)  # of a hit
        tau_quanta = self._step_of(least_quanta)
        step_quanta = self._step_of(grid.scaled_quanta(tau_quanta, self.scale))
        hits = self._scan(learnt, theta, least_quanta)
        self._publications += 1
        if self._auto is not None and not self._shakes(self._publications):
            hits = self._chosen(hits, learnt, theta, least_quanta)
        self.counters.publications += 1
        if hits == 0:
            self._sent_fraction = 0.0
            return None
        if self._levels > 1:
            encoded, steps = self._write_levels(hits, learnt, theta, tau_quanta, step_quanta)
        elif self.layers is None and prefers_bitmap(hits, self.n_params):
            encoded, steps = self._write_bitmap(learnt, theta, tau_quanta, step_quanta)
        else:
            encoded, steps = self._write_gaps(hits, learnt, theta, tau_quanta, step_quanta)
        self._clip(learnt, theta)
        self._count(encoded, steps, tau_quanta)
        self._sent_fraction = encoded.sent_fraction
        return encoded

    def residual(self, local: Flat, theta: Flat) -> Flat:
        """A copy of the residual f32[n_params]. ``local`` is ignored training on the replica."""
        to_host = self._memory.to_host
        if self.train_on == "replica":
            return to_host(self._residual).copy()
        residual: Flat = to_host(local) - to_host(theta)
        return residual

    def residual_norms(self, local: Flat, theta: Flat) -> tuple[float, float]:
        """The residual's mass (sum of absolute values) and Euclidean norm, in float64."""
        if self.train_on == "replica":
            mass, squares = self._kernels.norms_replica(self._residual)
        else:
            mass, squares = self._kernels.norms_local(local, theta)
        return mass, math.sqrt(squares)

    def add_residual(self, saved: Flat, local: Flat) -> None:
        """Take over a residual f32[n_params] that was kept from an earlier fit."""
        if saved.shape != (self.n_params,):
            raise UsageError(f"a residual of shape {saved.shape} for {self.n_params} parameters")
        target = self._residual if self.train_on == "replica" else local
        self._memory.add(target, saved)

    def state(self) -> EncoderState:
        """What survives from fit to fit, arrays and plain scalars; ``load_state`` takes it back.

        The residual of local training is not in it: it is ``local - theta``, which the caller has.
        """
        state: EncoderState = {"publications": self._publications, "half_side": self._half_side}
        state |= {f"threshold_{name}": value for name, value in self._threshold_state.items()}
        if self._sent_fraction is not None:
            state["sent_fraction"] = self._sent_fraction
        if self._auto is not None:
            state["wanted"] = self._wanted
        if self.train_on == "replica":
            state["residual"] = self._memory.to_host(self._residual).copy()
        return state

    def load_state(self, state: EncoderState) -> None:
        """Go on where an encoder of an equal model stopped; a residual is added to this one's."""
        self._publications = int(state["publications"])
        self._half_side = int(state["half_side"])
        self._sent_fraction = float(state["sent_fraction"]) if "sent_fraction" in state else None
        if self._auto is not None:
            low, high = self._auto.sent_fraction_min, self._auto.sent_fraction_max
            self._wanted = min(max(float(state.get("wanted", high)), low), high)
        prefix = "threshold_"
        self._threshold_state = {
            name.removeprefix(prefix): float(value)
            for name, value in state.items()
            if name.startswith(prefix)
        }
        if "residual" in state and self.train_on == "replica":
            self.add_residual(np.asarray(state["residual"], np.float32), self._residual)

    def _next_tau_quanta(self, learnt: Flat, theta: Flat) -> int:
        """Let the threshold adapt. Within the grid's limits, or tau could run away unnoticed."""
        state = self._next_threshold_state(learnt, theta)
        multiplier = self.layers.largest if self.layers else 1
        if self._levels > 1:
            multiplier <<= levels.TOP_MAX
        least, most = grid.tau_limits(self.k, multiplier)
        tau = min(max(state["tau"], least), most)
        self._threshold_state = {**state, "tau": tau}
        shaken = tau / SHAKE_DIVISOR if self._shakes(self._publications + 1) else tau
        return grid.tau_quanta(shaken, self.k)

    def _next_threshold_state(self, learnt: Flat, theta: Flat) -> ThresholdState:
        number = self._publications + 1
        fraction = self._fraction_of(number)
        if fraction is not None:
            local = self.train_on == "local"
            parts = (learnt, theta, -1) if local else (self._residual, learnt, 1)
            tau = tau_reached_by(fraction, number, *parts, self.layers)
            if tau is not None:
                return {"tau": grid.rounded_down(tau, self.k)}
            return self._threshold_state or self.threshold.next_tau({}, None)
        if self._shakes(self._publications):  # what a shake-up sent says nothing about tau
            return self._threshold_state
        return self.threshold.next_tau(self._threshold_state, self._sent_fraction)

    def _step_of(self, quanta: int) -> int:
        """By how much hits move: any number where tau is steered, few where it is sampled."""
        return grid.coarse(quanta) if self._auto is not None else quanta

    def _fraction_of(self, publication: int) -> float | None:
        """What this publication is to send, where tau is made for it."""
        if self.warm_up and self.warm_up.covers(publication):
            return self.warm_up.sent_fraction(publication)
        return self._wanted if self._auto is not None else None

    def _chosen(self, hits: int, learnt: Flat, theta: Flat, tau_quanta: int) -> int:
        """Leave to chance who of many tied ones is sent; the others stay in the residual.

        After Adam's first step all residuals are about as large, and no tau parts them. From 2 tau
        on everybody is sent: by tau's making these are no more than are wanted.
        """
        wanted = math.ceil((self._fraction_of(self._publications) or 1.0) * self.n_params)
        if hits <= CROWDED * wanted:
            return hits
        seed = zlib.crc32(self._codes[: min(hits, SEED_CODES)].tobytes(), self._publications)
        large = self._choose(learnt, theta, tau_quanta, 0, seed)
        limit = max(0, wanted - large) * 2**32 // (hits - large) if hits > large else 0
        return min(self._codes.size, self._choose(learnt, theta, tau_quanta, limit, seed))

    def _choose(self, learnt: Flat, theta: Flat, tau_quanta: int, limit: int, seed: int) -> int:
        rest = (tau_quanta * self.q, limit, seed, self._codes)
        if self.train_on == "local":
            return self._layered.choose_local(learnt, theta, *rest)
        return self._layered.choose_replica(self._residual, *rest)

    def _shakes(self, publication: int) -> bool:
        warming = self.warm_up is not None and self.warm_up.covers(publication)
        return not warming and shakes(publication, self.shake_frequency)

    def _scan(self, learnt: Flat, theta: Flat, tau_quanta: int) -> int:
        tau = tau_quanta * self.q
        if self.train_on == "local":
            hits, worst = self._layered.scan_local(learnt, theta, tau, self._codes)
        else:
            hits, worst = self._layered.scan_replica(self._residual, learnt, tau, self._codes)
        if worst >= INFINITY_BITS:
            values = learnt if self.train_on == "local" else self._residual
            raise self._not_finite(self._memory.to_host(values))
        return hits

    def _not_finite(self, values: Flat) -> TrainingError:
        index = int(np.argmin(np.isfinite(values)))
        where = f" ({self._layer_of(index)})" if self._layer_of else ""
        return TrainingError(
            f"parameter {index}{where} became {values[index]} in training; nothing of that step was"
            " published. Lower the learning rate, clip gradients, or look at the data"
        )

    def _write_gaps(
        self, hits: int, learnt: Flat, theta: Flat, tau_quanta: int, step_quanta: int
    ) -> tuple[Encoded, float]:
        codes = self._codes[:hits]
        on_host = self._memory.to_host(codes)
        size = gaps.encode(on_host, self.n_params, self._out)
        other, keeps = (learnt, step_quanta) if self.train_on == "local" else (self._residual, 0)
        self._note_breaches(
            *self._layered.move(
                theta,
                other,
                codes,
                step_quanta * self.q,
                (keeps - tau_quanta) * self.q,
                self.q,
            )
        )
        payload = self._out[:size].tobytes()
        steps = int(self.layers.at(indices_of(on_host)).sum()) if self.layers else hits
        return Encoded(Form.GAPS, step_quanta, hits, payload, hits / self.n_params), steps

    def _write_levels(
        self, hits: int, learnt: Flat, theta: Flat, tau_quanta: int, step_quanta: int
    ) -> tuple[Encoded, float]:
        """As ``_write_gaps``, each hit by the largest tau * 2^level that its residual reaches."""
        codes, found = self._codes[:hits], self._levels_of[:hits]
        tau, step, highest = tau_quanta * self.q, step_quanta * self.q, self._levels - 1
        if self.train_on == "local":
            top = self._layered.levels_local(learnt, theta, codes, tau, highest, found)
            other, other_step = learnt, step - tau
        else:
            top = self._layered.levels_replica(self._residual, codes, tau, highest, found)
            other, other_step = self._residual, -tau
        self._note_breaches(
            *self._layered.move_levels(theta, other, codes, found, step, other_step, self.q)
        )
        if top:
            size = levels.encode(codes, found, top, self.n_params, self._out)
        else:
            size = gaps.encode(codes, self.n_params, self._out)
        times = np.left_shift(1, found, dtype=np.int64)
        if self.layers:
            times *= self.layers.at(indices_of(codes))
        form, payload = Form.LEVELS if top else Form.GAPS, self._out[:size].tobytes()
        encoded = Encoded(form, step_quanta, hits, payload, hits / self.n_params)
        return encoded, float(times.sum())

    def _write_bitmap(
        self, learnt: Flat, theta: Flat, tau_quanta: int, step_quanta: int
    ) -> tuple[Encoded, float]:
        form = Form.BITMAP_UP if self._half_side > 0 else Form.BITMAP_DOWN
        self._half_side = -self._half_side  # the next bitmap flushes the other side
        local = self.train_on == "local"
        write = self._kernels.bitmap_local if local else self._kernels.bitmap_replica
        hits, halves, breaches, first = write(
            learnt if local else self._residual,
            theta,
            tau_quanta * self.q,
            step_quanta * self.q,
            half_side(form),
            self.q,
            self._scratch,
            self._packed,
        )
        self._note_breaches(breaches, first)
        count = hits + halves
        payload = self._memory.to_host(self._packed).tobytes()
        encoded = Encoded(form, step_quanta, count, payload, count / self.n_params)
        return encoded, hits + halves / 2

    def _clip(self, learnt: Flat, theta: Flat) -> None:
        if self.clipping is None or not self.clipping.is_due(self._publications):
            return
        tau_quanta = grid.tau_quanta(self.tau, self.k)  # a shake-up's own would destroy more
        limit = self.clipping.multiple * tau_quanta * self.q
        if self.train_on == "local":
            self.counters.mass_clipped += self._layered.clip_local(learnt, theta, limit)
        else:
            self.counters.mass_clipped += self._layered.clip_replica(self._residual, limit)

    def _count(self, encoded: Encoded, steps: float, tau_quanta: int) -> None:
        """``steps``: how many times tau was sent in all, up or down."""
        self.counters.messages += 1
        self.counters.hits += encoded.count
        self.counters.payload_bytes += len(encoded.payload)
        self.counters.mass_sent += steps * encoded.tau_quanta * self.q
        self.counters.mass_scaled_away += steps * (tau_quanta - encoded.tau_quanta) * self.q

    def _note_breaches(self, breaches: int, first: int) -> None:
        if breaches and self.counters.first_breach < 0:
            self.counters.first_breach = first
        self.counters.breaches += breaches
