"""One worker's encoder: from what was learnt to what is published, losing nothing on the way.

Five stages, each with memory and rules of its own:

    residual      error_feedback   where what was learnt and not sent lies
    tau           tau_policies     the next threshold: an algorithm, and what wraps it
    scan          scans            who reaches it
    form          form_writers     the message, by the hit count
    what is left  residuals        post-processors, such as clipping

The order is what matters. Scan (and find NaN) before anything changes; choose the form from the
hit count; only then write the message, and in the same act take it out of the residual and add
it to theta. So a message that exists has been subtracted, and one that was not made has not.

    came in  =  sent + residual + clipped + scaled away

``aggregation`` scales a hit: it takes tau out of the residual and moves theta by s * tau, with
s = 1 (sum), 1/workers (mean) or 1/sqrt(workers) (sqrt).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from sparkstrom.base.errors import UsageError
from sparkstrom.encoding import grid, levels
from sparkstrom.encoding.backends import Backend, host
from sparkstrom.encoding.encoded import Counters, Encoded, EncoderState
from sparkstrom.encoding.error_feedback import Operands, Stride, residual_of
from sparkstrom.encoding.form_writers import FormWriters, Workspace, Written
from sparkstrom.encoding.grid import Flat
from sparkstrom.encoding.layers import Layers
from sparkstrom.encoding.residuals import ResidualPostProcessor
from sparkstrom.encoding.samples import tau_reached_by
from sparkstrom.encoding.scans import Scan
from sparkstrom.encoding.schedules import WarmUp
from sparkstrom.encoding.tau_policies import Aim, tau_policy
from sparkstrom.encoding.thresholds import ThresholdAlgorithm, levels_of

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
        """``k``: the grid's exponent. ``layer_of`` names a parameter's layer in error messages.

        ``shake_frequency``: every so many publications one goes out with a third of tau; 0: none.
        ``backend``: where all arrays given to this encoder lie; None: on the host.
        """
        if aggregation not in AGGREGATIONS:
            raise UsageError(f"aggregation={aggregation!r}: must be one of {list(AGGREGATIONS)}")
        backend = backend or host()
        levels_max = levels_of(threshold)
        self.n_params, self.k, self.q = n_params, k, grid.quantum(k)
        self.train_on, self.aggregation, self.layers = train_on, aggregation, layers
        self.counters = Counters()
        self.scale = 1.0
        self.set_workers(workers)
        limits = grid.tau_limits(k, _largest_multiple(layers, levels_max))
        self._policy = tau_policy(threshold, limits, warm_up, shake_frequency)
        self._backend = backend
        self._residual = residual_of(train_on, n_params, backend, layers)
        space = Workspace.of(n_params, backend.memory, layers, levels_max=levels_max)
        self._scan = Scan(self._residual, space, layer_of)
        self._forms = FormWriters(self._residual, space, levels_max)
        self._clipping = clipping

    @property
    def tau(self) -> float:
        """The threshold of the last publication, unrounded; nan before the first."""
        return self._policy.tau

    def set_workers(self, workers: int) -> None:
        """Follow the number of workers that train: the scale of ``mean`` and ``sqrt``."""
        if workers < 1:
            raise UsageError(f"workers={workers}: at least this one trains")
        self.scale = AGGREGATIONS[self.aggregation](workers)

    def follow_link(self, round_s: float, step_s: float) -> None:
        """Send more or less from the next publication on, by how the last one went.

        round_s  from its publication until it was committed
        step_s   of one training step

        Only a threshold that says how much to send listens, such as ``AutoThreshold``.
        """
        self._policy.follow_link(round_s, step_s)

    def accumulate(self, delta: Flat) -> None:
        """Replica training, a step that is not published: residual += delta f32[n_params]."""
        self._residual.accumulate(delta)

    def publish(self, learnt: Flat, theta: Flat) -> Encoded | None:
        """Make the next update out of what reaches tau; None when nothing does.

        learnt  f32[n_params]  ``local`` (in/out, moves under mean and sqrt, and when clipped) or,
                               training on the replica, ``delta``, what the step changed (in)
        theta   f32[n_params]  in/out: the update is added at once, in quantised form

        Raises TrainingError naming index and layer when anything is NaN or infinite; theta is then
        as it was.
        """
        at, number = Operands(learnt, theta), self._policy.publications + 1
        aim = self._policy.next_tau(lambda fraction: self._tau_reached_by(fraction, number, at))
        stride = self._stride(aim)
        hits = self._scan.find(at, stride.least)
        if aim.wanted is not None:
            hits = self._scan.leave_to_chance(hits, aim.wanted, at, stride.least, number)
        self.counters.publications += 1
        if hits == 0:
            self._policy.count(sent_fraction=0.0)
            return None
        written = self._forms.of(hits).write(hits, at, stride)
        self._process_residual(at, number)
        self._count(written, stride)
        self._policy.count(written.encoded.sent_fraction)
        return written.encoded

    def residual(self, local: Flat, theta: Flat) -> Flat:
        """A copy of the residual f32[n_params]. ``local`` is ignored training on the replica."""
        return self._residual.copy(Operands(local, theta))

    def residual_norms(self, local: Flat, theta: Flat) -> tuple[float, float]:
        """The residual's mass (sum of absolute values) and Euclidean norm, in float64."""
        mass, squares = self._residual.norms(Operands(local, theta))
        return mass, math.sqrt(squares)

    def add_residual(self, saved: Flat, local: Flat) -> None:
        """Take over a residual f32[n_params] that was kept from an earlier fit."""
        self._residual.add(saved, local)

    def state(self) -> EncoderState:
        """What survives from fit to fit, arrays and plain scalars; ``load_state`` takes it back.

        The residual of local training is not in it: it is ``local - theta``, which the caller has.
        """
        return self._policy.state() | self._forms.state() | self._residual.state()

    def load_state(self, state: EncoderState) -> None:
        """Go on where an encoder of an equal model stopped; a residual is added to this one's."""
        for stage in (self._policy, self._forms, self._residual):
            stage.load_state(state)

    def _tau_reached_by(self, fraction: float, number: int, at: Operands) -> float | None:
        """What a fraction of the residuals reach, on the grid; None where all of them are 0."""
        terms = self._residual.terms(at)
        tau = tau_reached_by(fraction, number, *terms, self.layers, self._backend)
        return None if tau is None else grid.rounded_down(tau, self.k)

    def _stride(self, aim: Aim) -> Stride:
        """By how much hits move: any number where tau is steered, few where it is sampled."""
        least = grid.tau_quanta(aim.tau, self.k)
        tau = grid.coarse(least) if aim.is_coarse else least
        step = grid.scaled_quanta(tau, self.scale)
        if aim.is_coarse:
            step = grid.coarse(step)
        q = self.q
        return Stride(least * q, tau * q, step * q, step_quanta=step, q=q)

    def _process_residual(self, at: Operands, number: int) -> None:
        """By the whole tau: a shake-up's own would destroy more."""
        if self._clipping is not None:
            tau = grid.tau_quanta(self.tau, self.k) * self.q
            destroyed = self._clipping.process(self._residual, at, number, tau)
            self.counters.mass_clipped += destroyed

    def _count(self, written: Written, stride: Stride) -> None:
        encoded, counters = written.encoded, self.counters
        counters.messages += 1
        counters.hits += encoded.count
        counters.payload_bytes += len(encoded.payload)
        counters.mass_sent += written.steps * stride.step
        counters.mass_scaled_away += written.steps * (stride.tau - stride.step)
        if written.overflows and counters.first_overflow < 0:
            counters.first_overflow = written.first_overflow
        counters.overflows += written.overflows


def _largest_multiple(layers: Layers | None, levels_max: int) -> int:
    """By how many times tau a hit may move."""
    multiple = layers.largest if layers else 1
    return multiple << levels.TOP_MAX if levels_max > 1 else multiple
