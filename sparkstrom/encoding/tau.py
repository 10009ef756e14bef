"""The threshold of each publication: an algorithm's tau, warm-up, shake-ups and limits.

Warm-up sends much at first; a shake-up is every n-th publication, which sends all that reaches a
fraction of tau. Both replace tau for single messages and nothing else: what is sent is still
subtracted from the residual, so nothing is lost. Publications are counted from 1 and across fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import COUNT_MAX, check_options, number, whole
from sparkstrom.encoding.forms import EncoderState
from sparkstrom.encoding.thresholds import (
    FractionAlgorithm,
    ThresholdAlgorithm,
    ThresholdState,
    small_model_fraction,
)

SHAKE_DIVISOR = 3.0  # DL4J 1.0.0-beta, EncodingHandler: a third of the threshold


_FRACTION = number(
    above=0, below=1, remedy=", as a fraction of all parameters: 0 < last <= first < 1"
)


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Send much at first, and exponentially less from publication to publication.

    Early gradients are large and change quickly. If they are held back until they reach a threshold
    that suits later training, they arrive stale. Source: Deep Gradient Compression (Lin et al.
    2018, section 3.3), where sparsity rises from epoch to epoch as 75 %, 93.75 %, 98.4 %, 99.6 %,
    99.9 %: these defaults with ``publications=4``. As there, tau is derived from a sample of the
    residual. The threshold algorithm takes over afterwards, from the last tau; a fixed one with its
    own.

    Args:
        publications: number of publications of each worker in the warm-up: an epoch's or a few.
        sent_fraction_first: fraction of all parameters in the first message.
        sent_fraction_last: fraction that the ramp would reach one publication after its last.

    Raises:
        UsageError: a value out of range.
    """

    # of each worker; an epoch's worth or a few
    publications: int = field(
        metadata=whole(
            1,
            COUNT_MAX,
            unit="publications",
            remedy="; for no warm-up give None in place of WarmUp",
        )
    )
    # of all parameters, in the first message
    sent_fraction_first: float = field(default=0.25, metadata=_FRACTION)
    # what the ramp would reach one publication after its last
    sent_fraction_last: float = field(default=1e-3, metadata=_FRACTION)

    def __post_init__(self) -> None:
        """Raise UsageError unless the fractions and the count are valid."""
        check_options(self)
        if not 0 < self.sent_fraction_last <= self.sent_fraction_first < 1:
            raise UsageError(
                f"sent_fraction_first={self.sent_fraction_first}, sent_fraction_last="
                f"{self.sent_fraction_last}: need 0 < last <= first < 1, as fractions of all"
                " parameters"
            )

    def covers(self, publication: int) -> bool:
        """Return whether publication number ``publication`` (from 1) belongs to the warm-up."""
        return publication <= self.publications

    def sent_fraction(self, publication: int) -> float:
        """Return the fraction of all parameters that this publication should send."""
        ratio = self.sent_fraction_last / self.sent_fraction_first
        return float(self.sent_fraction_first * ratio ** ((publication - 1) / self.publications))


def is_shake_up(publication: int, frequency: int) -> bool:
    """Return whether this publication is a shake-up; with ``frequency`` 0 none is."""
    return frequency > 0 and publication > 0 and publication % frequency == 0


# tau is chosen by nested stages:
#
#     ShakeUpTau( WarmUpTau( ClampedTau( FeedbackTau | SampledTau )))
#
# The innermost stage gets tau from a threshold algorithm. Each wrapper changes the input or the
# output of its inner stage, and is independent of what that is. As in optax, the algorithm's state,
# a small plain dict, is passed in and returned; ``TauPolicy`` holds it in between.


TauReachedBy = Callable[[float], float | None]
PREFIX = "threshold_"  # of the keys of the algorithm's state within an encoder's state


class NextPublication(NamedTuple):
    """The facts about the next publication from which its threshold is chosen."""

    number: int  # from 1, over all fits
    sent_fraction: float | None  # of the last publication; None before the first
    tau_reached_by: TauReachedBy  # fraction -> tau that it reaches; None if all residuals are 0
    fraction: float | None = None  # prescribed fraction to send (warm-up), if any
    use_as_feedback: bool = True  # False after a shake-up: its sent fraction is no feedback on tau


class PublicationTarget(NamedTuple):
    """The threshold of one publication, and the state that its algorithm continues with."""

    state: ThresholdState  # the algorithm's next state, with "tau" (parameter units, unrounded)
    divisor: float = 1.0  # this publication uses tau / divisor
    wanted: float | None = None  # fraction to send; ties beyond it are subsampled; None: send all
    is_coarse: bool = False  # round the step, so that workers use few different ones

    @property
    def tau(self) -> float:
        """This publication's threshold (parameter units, unrounded)."""
        return self.state["tau"] / self.divisor


class TauStage(Protocol):
    """A step of choosing tau: makes one, or modifies that of an inner stage."""

    def next_tau(self, state: ThresholdState, upcoming: NextPublication, /) -> PublicationTarget:
        """Choose the threshold of the coming publication.

        ``state`` is the threshold algorithm's state after the last publication, {} before the
        first.
        """


class TauSource(TauStage, Protocol):
    """The innermost stage, which gets tau from a threshold algorithm."""

    def follow_link(self, round_s: float, step_s: float, /) -> None:
        """Adapt to how long the last publication took until it was committed (seconds)."""

    def state(self) -> EncoderState:
        """Return the state to keep besides the threshold algorithm's own."""

    def load_state(self, state: EncoderState, /) -> None:
        """Restore state returned by ``state``."""


def tau_source(algorithm: ThresholdAlgorithm, n_params: int) -> TauSource:
    """Return the stage for an algorithm: sampling if it chooses a fraction, else feedback."""
    if isinstance(algorithm, FractionAlgorithm):
        return SampledTau(algorithm, n_params)
    return FeedbackTau(algorithm)


class FeedbackTau:
    """Chooses tau by feedback: the algorithm reacts to the fraction that the last message sent."""

    def __init__(self, algorithm: ThresholdAlgorithm) -> None:
        """Choose tau by ``algorithm``."""
        self._algorithm = algorithm

    def next_tau(self, state: ThresholdState, upcoming: NextPublication) -> PublicationTarget:
        """Return the algorithm's tau, or a sampled one while a warm-up prescribes the fraction."""
        if upcoming.fraction is not None:
            return PublicationTarget(
                sample_tau(upcoming, upcoming.fraction, state, self._algorithm)
            )
        if not upcoming.use_as_feedback:
            return PublicationTarget(state)
        return PublicationTarget(self._algorithm.next_tau(state, upcoming.sent_fraction))

    def follow_link(self, round_s: float, step_s: float) -> None:
        """Do nothing: the fraction to send depends on the threshold alone."""

    def state(self) -> EncoderState:
        """Return {}: this stage keeps no state of its own."""
        return {}

    def load_state(self, state: EncoderState) -> None:
        """Do nothing: this stage keeps no state of its own."""


class SampledTau:
    """Chooses tau from a sample, so that a target fraction of residuals reach it.

    The wanted fraction follows the speed of the link.
    """

    def __init__(self, algorithm: FractionAlgorithm, n_params: int) -> None:
        """Start with the largest fraction that ``algorithm`` allows for so many parameters."""
        self._algorithm = algorithm
        self._wanted = algorithm.sent_fraction_max
        self._least = small_model_fraction(algorithm, n_params)

    def next_tau(self, state: ThresholdState, upcoming: NextPublication) -> PublicationTarget:
        """Choose, from a sample of residuals, the tau that the target fraction reach."""
        asked = self._wanted if upcoming.fraction is None else upcoming.fraction
        fraction = max(asked, self._least)
        found = sample_tau(upcoming, fraction, state, self._algorithm)
        return PublicationTarget(found, wanted=fraction, is_coarse=True)

    def follow_link(self, round_s: float, step_s: float) -> None:
        """Adapt the target fraction to the duration of the last publication."""
        self._wanted = self._algorithm.next_fraction(self._wanted, round_s, step_s)

    def state(self) -> EncoderState:
        """Return the target fraction."""
        return {"wanted": self._wanted}

    def load_state(self, state: EncoderState) -> None:
        """Restore the target fraction, within this algorithm's bounds."""
        low, high = self._algorithm.sent_fraction_min, self._algorithm.sent_fraction_max
        self._wanted = min(max(float(state.get("wanted", high)), low), high)


def sample_tau(
    upcoming: NextPublication, fraction: float, state: ThresholdState, algorithm: ThresholdAlgorithm
) -> ThresholdState:
    """Return a state whose tau ``fraction`` of the residuals reach.

    Where all residuals are 0, it is the last state or the algorithm's first one.
    """
    tau = upcoming.tau_reached_by(fraction)
    if tau is not None:
        return {"tau": tau}
    return state or algorithm.next_tau({}, None)


@dataclass(frozen=True, slots=True)
class ClampedTau:
    """Keeps tau within the limits of the grid, so that it cannot grow or shrink for ever."""

    inner: TauStage  # the stage whose tau is clamped
    least: float  # smallest tau, parameter units
    most: float  # largest tau, parameter units

    def next_tau(self, state: ThresholdState, upcoming: NextPublication) -> PublicationTarget:
        """Clamp the tau of the inner stage, also in its state."""
        target = self.inner.next_tau(state, upcoming)
        if self.least <= target.state["tau"] <= self.most:
            return target
        tau = min(max(target.state["tau"], self.least), self.most)
        return target._replace(state={**target.state, "tau": tau})


@dataclass(frozen=True, slots=True)
class WarmUpTau:
    """Prescribes the fraction to send during the warm-up."""

    inner: TauStage  # the stage that chooses tau for the prescribed fraction
    warm_up: WarmUp  # its duration and fractions

    def next_tau(self, state: ThresholdState, upcoming: NextPublication) -> PublicationTarget:
        """Return the inner stage's choice, for the fraction of the ramp during the warm-up."""
        if self.warm_up.covers(upcoming.number):
            upcoming = upcoming._replace(fraction=self.warm_up.sent_fraction(upcoming.number))
        return self.inner.next_tau(state, upcoming)


@dataclass(frozen=True, slots=True)
class ShakeUpTau:
    """Sends more in every ``frequency``-th publication: all that reaches a third of tau.

    The threshold algorithm does not use the outcome of a shake-up as feedback.
    """

    inner: TauStage  # the stage whose tau is reduced
    frequency: int  # publications
    after: int = 0  # no shake-up among the first so many publications

    def next_tau(self, state: ThresholdState, upcoming: NextPublication) -> PublicationTarget:
        """Return the inner stage's choice; in a shake-up, with a third of its tau."""
        if self._is_shake_up(upcoming.number - 1):  # what a shake-up sent is no evidence about tau
            upcoming = upcoming._replace(use_as_feedback=False)
        target = self.inner.next_tau(state, upcoming)
        if self._is_shake_up(upcoming.number):
            return target._replace(divisor=SHAKE_DIVISOR, wanted=None)
        return target

    def _is_shake_up(self, number: int) -> bool:
        """Return whether publication ``number`` is a shake-up."""
        return number > self.after and is_shake_up(number, self.frequency)


class TauPolicy:
    """Chooses the thresholds of one worker's publications, and holds the state in between."""

    def __init__(self, source: TauSource, stage: TauStage) -> None:
        """Use ``stage``, which is ``source`` in its wrappers."""
        self._source, self._stage = source, stage
        self._state: ThresholdState = {}
        self._sent_fraction: float | None = None
        self.publications = 0  # survives from fit to fit, unlike an encoder's counters

    @property
    def tau(self) -> float:
        """The threshold of the last publication, shake-ups aside, unrounded; nan before it."""
        return self._state.get("tau", math.nan)

    def next_tau(self, tau_reached_by: TauReachedBy) -> PublicationTarget:
        """Choose the threshold of publication number ``publications + 1``.

        ``tau_reached_by(fraction)`` samples the residuals; it returns None where all of them are 0.
        """
        upcoming = NextPublication(self.publications + 1, self._sent_fraction, tau_reached_by)
        target = self._stage.next_tau(self._state, upcoming)
        self._state = target.state
        return target

    def count(self, sent_fraction: float) -> None:
        """Record that a publication was made and what fraction it sent (0.0: nothing to send)."""
        self.publications += 1
        self._sent_fraction = sent_fraction

    def follow_link(self, round_s: float, step_s: float) -> None:
        """Adapt to the link, see ``TauSource.follow_link``."""
        self._source.follow_link(round_s, step_s)

    def state(self) -> EncoderState:
        """Return the state that survives a fit."""
        state: EncoderState = {"publications": self.publications}
        state |= {f"{PREFIX}{name}": value for name, value in self._state.items()}
        if self._sent_fraction is not None:
            state["sent_fraction"] = self._sent_fraction
        return state | self._source.state()

    def load_state(self, state: EncoderState) -> None:
        """Restore the state of another policy."""
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
    n_params: int,
    warm_up: WarmUp | None = None,
    shake_frequency: int = 0,
) -> TauPolicy:
    """Build a policy from its stages: algorithm, limits, warm-up, shake-ups.

    ``limits`` are the smallest and largest tau (parameter units), ``n_params`` the model's number
    of parameters. ``shake_frequency`` 0: no shake-ups.
    """
    source = tau_source(threshold, n_params)
    stage: TauStage = ClampedTau(source, *limits)
    if warm_up is not None:
        stage = WarmUpTau(stage, warm_up)
    if shake_frequency:
        after = warm_up.publications if warm_up is not None else 0
        stage = ShakeUpTau(stage, shake_frequency, after)
    return TauPolicy(source, stage)
