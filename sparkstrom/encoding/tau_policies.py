"""Policies: tau for the next publication, by stages that wrap one another.

    ShakingUp( WarmingUp( Clamped( Steered | Sampled )))

The innermost makes tau of a threshold algorithm: ``Steered`` of one that goes by how much the last
message sent, ``Sampled`` of one that says how much is to be sent. A wrapper changes what goes in,
what comes out, or both; it knows nothing of what it wraps. As in optax the threshold's state, a
small plain dict, is passed in and handed back; ``TauPolicy`` keeps it from publication to
publication and from fit to fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from sparkstrom.encoding.encoded import EncoderState
from sparkstrom.encoding.schedules import SHAKE_DIVISOR, WarmUp, shakes
from sparkstrom.encoding.thresholds import FractionAlgorithm, ThresholdAlgorithm, ThresholdState

TauReachedBy = Callable[[float], float | None]
PREFIX = "threshold_"  # of a threshold's state among an encoder's


class NextPublication(NamedTuple):
    """What a policy may go by."""

    number: int  # from 1, over all fits
    sent_fraction: float | None  # of the one before; None: there was none
    tau_reached_by: TauReachedBy  # by a fraction of the residuals; None where all of them are 0
    fraction: float | None = None  # what is to be sent, where that is laid down
    is_lesson: bool = True  # what the one before sent says something about tau


class Aim(NamedTuple):
    """What a publication is made with."""

    state: ThresholdState  # for the next one; "tau" in it (parameter units, unrounded)
    divisor: float = 1.0  # by which this publication's tau is less than that
    wanted: float | None = None  # fraction of all: of ties beyond it chance takes some; None: all
    is_coarse: bool = False  # hits move by few different steps

    @property
    def tau(self) -> float:
        """This publication's threshold (parameter units, unrounded)."""
        return self.state["tau"] / self.divisor


class TauStage(Protocol):
    """Makes tau, or changes what another stage made."""

    def next_tau(self, state: ThresholdState, ahead: NextPublication, /) -> Aim:
        """What the publication ahead is made with; ``state``: of the last one, {} before it."""


class TauSource(TauStage, Protocol):
    """The innermost stage: whose tau it is."""

    def follow_link(self, round_s: float, step_s: float, /) -> None:
        """Go by how long the last publication took until it was committed."""

    def state(self) -> EncoderState:
        """What it remembers besides the threshold's state."""

    def load_state(self, state: EncoderState, /) -> None:
        """Take it back."""


def source_of(algorithm: ThresholdAlgorithm) -> TauSource:
    """The stage that an algorithm is for: one that says how much to send, or one that steers."""
    if isinstance(algorithm, FractionAlgorithm):
        return Sampled(algorithm)
    return Steered(algorithm)


class Steered:
    """tau follows what the last message sent."""

    def __init__(self, algorithm: ThresholdAlgorithm) -> None:
        self._algorithm = algorithm

    def next_tau(self, state: ThresholdState, ahead: NextPublication) -> Aim:
        """Ask the algorithm, unless how much is to be sent is laid down."""
        if ahead.fraction is not None:
            return Aim(sampled(ahead, ahead.fraction, state, self._algorithm))
        if not ahead.is_lesson:
            return Aim(state)
        return Aim(self._algorithm.next_tau(state, ahead.sent_fraction))

    def follow_link(self, round_s: float, step_s: float) -> None:
        """What is sent follows the threshold alone."""

    def state(self) -> EncoderState:
        """Nothing: what it learns is the threshold's state."""
        return {}

    def load_state(self, state: EncoderState) -> None:
        """There is nothing to take back."""


class Sampled:
    """tau is what the wanted fraction of residuals reach; that fraction follows the link."""

    def __init__(self, algorithm: FractionAlgorithm) -> None:
        self._algorithm = algorithm
        self._wanted = algorithm.sent_fraction_max

    def next_tau(self, state: ThresholdState, ahead: NextPublication) -> Aim:
        """Look at the residuals, whatever was sent last."""
        fraction = self._wanted if ahead.fraction is None else ahead.fraction
        found = sampled(ahead, fraction, state, self._algorithm)
        return Aim(found, wanted=fraction, is_coarse=True)

    def follow_link(self, round_s: float, step_s: float) -> None:
        """Want more or less from the next publication on."""
        self._wanted = self._algorithm.next_fraction(self._wanted, round_s, step_s)

    def state(self) -> EncoderState:
        """What is wanted."""
        return {"wanted": self._wanted}

    def load_state(self, state: EncoderState) -> None:
        """Go on with it, within this algorithm's bounds."""
        low, high = self._algorithm.sent_fraction_min, self._algorithm.sent_fraction_max
        self._wanted = min(max(float(state.get("wanted", high)), low), high)


def sampled(
    ahead: NextPublication, fraction: float, state: ThresholdState, algorithm: ThresholdAlgorithm
) -> ThresholdState:
    """tau that so many residuals reach; where all are 0, the last one or the algorithm's first."""
    tau = ahead.tau_reached_by(fraction)
    if tau is not None:
        return {"tau": tau}
    return state or algorithm.next_tau({}, None)


@dataclass(frozen=True, slots=True)
class Clamped:
    """Keep tau within the grid's limits, or it could run away unnoticed."""

    inner: TauStage
    least: float  # parameter units
    most: float

    def next_tau(self, state: ThresholdState, ahead: NextPublication) -> Aim:
        """The inner stage's, clamped in its state, too."""
        aim = self.inner.next_tau(state, ahead)
        if self.least <= aim.state["tau"] <= self.most:
            return aim
        tau = min(max(aim.state["tau"], self.least), self.most)
        return aim._replace(state={**aim.state, "tau": tau})


@dataclass(frozen=True, slots=True)
class WarmingUp:
    """Lay down what the first publications send."""

    inner: TauStage
    warm_up: WarmUp

    def next_tau(self, state: ThresholdState, ahead: NextPublication) -> Aim:
        """The inner stage's, for the fraction of the ramp."""
        if self.warm_up.covers(ahead.number):
            ahead = ahead._replace(fraction=self.warm_up.sent_fraction(ahead.number))
        return self.inner.next_tau(state, ahead)


@dataclass(frozen=True, slots=True)
class ShakingUp:
    """Send more now and then: what reaches a third of tau, all of it, and learn nothing of it."""

    inner: TauStage
    frequency: int  # publications
    after: int = 0  # none of the first so many is shaken

    def next_tau(self, state: ThresholdState, ahead: NextPublication) -> Aim:
        """The inner stage's, or a third of it."""
        if self._shakes(ahead.number - 1):  # what a shake-up sent says nothing about tau
            ahead = ahead._replace(is_lesson=False)
        aim = self.inner.next_tau(state, ahead)
        if self._shakes(ahead.number):
            return aim._replace(divisor=SHAKE_DIVISOR, wanted=None)
        return aim

    def _shakes(self, number: int) -> bool:
        return number > self.after and shakes(number, self.frequency)


class TauPolicy:
    """A worker's thresholds, one after another."""

    def __init__(self, source: TauSource, stage: TauStage) -> None:
        """``stage``: ``source`` in its wrappers."""
        self._source, self._stage = source, stage
        self._state: ThresholdState = {}
        self._sent_fraction: float | None = None
        self.publications = 0  # survives from fit to fit, unlike an encoder's counters

    @property
    def tau(self) -> float:
        """The threshold of the last publication, shake-ups aside, unrounded; nan before it."""
        return self._state.get("tau", math.nan)

    def next_tau(self, tau_reached_by: TauReachedBy) -> Aim:
        """What publication number ``publications + 1`` is made with."""
        ahead = NextPublication(self.publications + 1, self._sent_fraction, tau_reached_by)
        aim = self._stage.next_tau(self._state, ahead)
        self._state = aim.state
        return aim

    def count(self, sent_fraction: float) -> None:
        """That publication is made, and sent so much; 0.0 where it found nothing to send."""
        self.publications += 1
        self._sent_fraction = sent_fraction

    def follow_link(self, round_s: float, step_s: float) -> None:
        """As ``TauSource.follow_link``."""
        self._source.follow_link(round_s, step_s)

    def state(self) -> EncoderState:
        """What survives from fit to fit."""
        state: EncoderState = {"publications": self.publications}
        state |= {f"{PREFIX}{name}": value for name, value in self._state.items()}
        if self._sent_fraction is not None:
            state["sent_fraction"] = self._sent_fraction
        return state | self._source.state()

    def load_state(self, state: EncoderState) -> None:
        """Go on where another policy stopped."""
        self.publications = int(state["publications"])
        self._sent_fraction = float(state["sent_fraction"]) if "sent_fraction" in state else None
        self._source.load_state(state)
        self._state = {
            name.removeprefix(PREFIX): float(value)
            for name, value in state.items()
            if name.startswith(PREFIX)
        }


def tau_policy(
    threshold: ThresholdAlgorithm,
    limits: tuple[float, float],
    warm_up: WarmUp | None = None,
    shake_frequency: int = 0,
) -> TauPolicy:
    """The stages in their order. ``limits``: the least and the largest tau (parameter units)."""
    source = source_of(threshold)
    stage: TauStage = Clamped(source, *limits)
    if warm_up is not None:
        stage = WarmingUp(stage, warm_up)
    if shake_frequency:
        after = warm_up.publications if warm_up is not None else 0
        stage = ShakingUp(stage, shake_frequency, after)
    return TauPolicy(source, stage)
