"""Choose the threshold tau of each publication, by an algorithm, a warm-up, shake-ups and limits.

A publication is one call of ``Encoder.publish``, which sends hits: the entries of the residual
(changes that are learned but not sent) that reach tau. Publications are counted from 1 and across
fits. Usually, a threshold algorithm computes tau. A warm-up and shake-ups replace this tau by
another one. During a warm-up, the first publications use a tau with which they send many entries. A
shake-up is every n-th publication, which uses a third of tau. As always, what is sent is subtracted
from the residual, so nothing is lost.
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
    AveragingThreshold,
    FractionAlgorithm,
    ThresholdAlgorithm,
    ThresholdState,
    small_model_fraction,
)

SHAKE_DIVISOR = 3.0  # DL4J 1.0.0-beta, EncodingHandler: a third of the threshold
# Large updates, see ``AveragingThreshold``:
LARGE_FACTOR = 20  # a large update has this many times the entries of another
LARGE_FRACTION_MAX = 0.25  # largest fraction of all parameters in a large update
LARGE_STEP_TAUS = 2.25  # change that an entry sends, in multiples of tau
LARGE_WORKERS_MIN = 4  # with fewer, no update is large
LARGE_DIVISOR_MAX = 4.0  # of ordinary tau / large update's tau (usually 1.8); above: none is large
WITHOUT_LARGE_FACTOR = 8 / 3  # if no update is large, each has this many times the entries


_FRACTION = number(
    above=0, below=1, remedy=", as a fraction of all parameters: 0 < last <= first < 1"
)


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Sends many entries at first, and exponentially fewer from publication to publication.

    Early gradients are large and change quickly. If they were held back until they reach a
    threshold that suits later training, they would arrive stale. Source: Deep Gradient Compression
    (Lin et al. 2018, section 3.3), where sparsity rises from epoch to epoch as 75 %, 93.75 %,
    98.4 %, 99.6 %, 99.9 %; the defaults give the same with ``publications=4``. As in that paper,
    tau is derived from a sample of the residual. After the warm-up, the threshold algorithm
    continues from the last tau, except ``FixedThreshold``, which uses its own tau.

    Args:
        publications: number of publications of each worker in the warm-up, such as one epoch's.
        sent_fraction_first: fraction of all parameters in the first message.
        sent_fraction_last: fraction that the first publication after the warm-up would send if the
            warm-up continued.

    Raises:
        UsageError: a value is out of range.
    """

    # number of publications of each worker
    publications: int = field(
        metadata=whole(
            1,
            COUNT_MAX,
            unit="publications",
            remedy="; for no warm-up give None in place of WarmUp",
        )
    )
    # fraction of all parameters in the first message
    sent_fraction_first: float = field(default=0.25, metadata=_FRACTION)
    # fraction that the first publication after the warm-up would send if the warm-up continued
    sent_fraction_last: float = field(default=1e-3, metadata=_FRACTION)

    def __post_init__(self) -> None:
        """Raise UsageError if the number of publications or a fraction is invalid."""
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
        """Return the fraction of all parameters to send in publication ``publication`` (from 1)."""
        ratio = self.sent_fraction_last / self.sent_fraction_first
        return float(self.sent_fraction_first * ratio ** ((publication - 1) / self.publications))


# tau is chosen by nested stages:
#
#     ShakeUpTau( WarmUpTau( ClampedTau( FeedbackTau | SampledTau )))
#
# The innermost stage gets tau from a threshold algorithm. Each outer stage wraps an inner stage of
# any kind, and changes the inner stage's input or output. As in optax, the algorithm's state, a
# small plain dict, is passed in and returned; ``TauChooser`` holds the state between publications.


TauReachedBy = Callable[[float], float | None]  # fraction of residuals -> tau that it reaches
PREFIX = "threshold_"  # prefix of the algorithm's keys in an encoder's state


class NextPublication(NamedTuple):
    """The inputs from which the threshold of the next publication is chosen."""

    number: int  # number of the publication, from 1, over all fits
    sent_fraction: float | None  # sent by the last publication; None before the first
    # Returns the tau that a given fraction of residuals reach; None if all residuals are 0.
    tau_reached_by: TauReachedBy
    fraction: float | None = None  # fraction that a warm-up prescribes to send; None: no warm-up
    use_as_feedback: bool = True  # whether ``sent_fraction`` may affect tau; False after shake-ups
    is_last: bool = False  # whether the worker has trained all its minibatches
    workers: int = 1  # number of workers that train


class PublicationTarget(NamedTuple):
    """The threshold of one publication, and the next state of the threshold algorithm.

    A hit is a parameter whose residual reaches the threshold.
    """

    state: ThresholdState  # the algorithm's next state, with "tau" (parameter units, unrounded)
    divisor: float = 1.0  # this publication uses tau / divisor
    wanted: float | None = None  # fraction to send; of more hits, a random part. None: all hits
    is_coarse: bool = False  # whether to round steps, so that workers use few different ones
    step_taus: float | None = None  # multiple of tau that each hit sends; None: depends on its size

    @property
    def tau(self) -> float:
        """This publication's threshold (parameter units, unrounded)."""
        return self.state["tau"] / self.divisor


class TauStage(Protocol):
    """Interface of a stage that chooses tau, or modifies the choice of an inner stage."""

    def next_tau(self, state: ThresholdState, upcoming: NextPublication, /) -> PublicationTarget:
        """Return the threshold of the upcoming publication, with the algorithm's next state.

        ``state`` is the threshold algorithm's state after the last publication: named numbers, of
        which "tau" is one; {} before the first publication.
        """


class TauSource(TauStage, Protocol):
    """Interface of the innermost stage, which gets tau from a threshold algorithm."""

    def follow_link(self, round_s: float, step_s: float, /) -> None:
        """Adapt to the speed of the network link.

        ``round_s`` is the time from a publication until the master numbers it (its commit), and
        ``step_s`` the duration of a training step, both in seconds.
        """

    def state(self) -> EncoderState:
        """Return this stage's own state for the next fit, without the algorithm's state (tau)."""

    def load_state(self, state: EncoderState, /) -> None:
        """Restore the state that ``state`` returned."""


class FeedbackTau:
    """Chooses tau by an algorithm that reacts to the fraction that the last message sent."""

    def __init__(self, algorithm: ThresholdAlgorithm) -> None:
        """Choose tau by ``algorithm``."""
        self._algorithm = algorithm

    def next_tau(self, state: ThresholdState, upcoming: NextPublication) -> PublicationTarget:
        """Return the algorithm's tau; in a warm-up, a sampled one; after a shake-up, the last one.

        The sampled tau is the one that the prescribed fraction of the residuals reach.
        """
        if upcoming.fraction is not None:
            return PublicationTarget(
                sample_tau(upcoming, upcoming.fraction, state, self._algorithm)
            )
        if not upcoming.use_as_feedback:
            return PublicationTarget(state)
        return PublicationTarget(self._algorithm.next_tau(state, upcoming.sent_fraction))

    def follow_link(self, round_s: float, step_s: float) -> None:
        """Do nothing, because the algorithm does not depend on the link."""

    def state(self) -> EncoderState:
        """Return {}: this stage keeps no state of its own."""
        return {}

    def load_state(self, state: EncoderState) -> None:
        """Do nothing: this stage keeps no state of its own."""


class SampledTau:
    """Chooses tau from a sample of the residuals, so that a target fraction of them reach tau.

    The target fraction follows the speed of the network link. With an ``AveragingThreshold``, some
    updates are large: they send many more entries.
    """

    def __init__(self, algorithm: FractionAlgorithm, n_params: int) -> None:
        """Start with the algorithm's largest fraction; ``n_params`` determines the smallest one."""
        self._algorithm = algorithm
        self._wanted = algorithm.sent_fraction_max
        self._least = small_model_fraction(algorithm, n_params)
        self._large_every = 0  # updates whose number is a multiple are large; 0: none is
        if isinstance(algorithm, AveragingThreshold):
            self._large_every = algorithm.large_every
        self._is_large = False  # whether the last update was large
        self._has_outliers = False  # whether few residuals are much larger than the others

    def next_tau(self, state: ThresholdState, upcoming: NextPublication) -> PublicationTarget:
        """Return the tau that the target fraction of the residuals reach, estimated from a sample.

        A warm-up prescribes another fraction. Otherwise, return the target of a large update if one
        is due and the residuals are suitable.
        """
        prescribed, every, asked = upcoming.fraction, self._large_every, self._wanted
        averages_many = upcoming.workers >= LARGE_WORKERS_MIN
        if every and (self._has_outliers or not averages_many):
            asked *= WITHOUT_LARGE_FACTOR
        fraction = max(asked if prescribed is None else prescribed, self._least)
        found = sample_tau(upcoming, fraction, state, self._algorithm)
        target = PublicationTarget(found, wanted=fraction, is_coarse=True)
        is_due = every > 0 and (upcoming.is_last or upcoming.number % every == 0)
        may_enlarge = is_due and averages_many and prescribed is None
        large = self._enlarge(target, upcoming) if may_enlarge else None
        self._is_large = large is not None
        return large or target

    def _enlarge(
        self, target: PublicationTarget, upcoming: NextPublication
    ) -> PublicationTarget | None:
        """Return the target of a large update; None if few residuals dominate, or if all are 0.

        ``target`` is the target of an ordinary update; its tau stays in the algorithm's state.
        """
        fraction = max(min(LARGE_FACTOR * self._wanted, LARGE_FRACTION_MAX), self._least)
        tau = upcoming.tau_reached_by(fraction)
        if tau is None:  # all residuals are 0
            return None
        divisor = target.tau / tau if tau else math.inf
        self._has_outliers = divisor > LARGE_DIVISOR_MAX
        if self._has_outliers:
            return None
        return target._replace(divisor=divisor, wanted=fraction, step_taus=LARGE_STEP_TAUS)

    def follow_link(self, round_s: float, step_s: float) -> None:
        """Adapt the target fraction to ``round_s`` and ``step_s``; see ``TauSource.follow_link``.

        Do nothing after a large update, because its time is not typical.
        """
        if self._is_large:
            return
        self._wanted = self._algorithm.next_fraction(self._wanted, round_s, step_s)

    def state(self) -> EncoderState:
        """Return the target fraction under the key "wanted"."""
        return {"wanted": self._wanted}

    def load_state(self, state: EncoderState) -> None:
        """Restore the target fraction, within this algorithm's bounds."""
        low, high = self._algorithm.sent_fraction_min, self._algorithm.sent_fraction_max
        self._wanted = min(max(float(state.get("wanted", high)), low), high)


def sample_tau(
    upcoming: NextPublication, fraction: float, state: ThresholdState, algorithm: ThresholdAlgorithm
) -> ThresholdState:
    """Return a state of ``algorithm`` with the tau that ``fraction`` of the residuals reach.

    If all residuals are 0, return the last state, ``state``, or the algorithm's first state.
    """
    tau = upcoming.tau_reached_by(fraction)
    if tau is not None:
        return {"tau": tau}
    return state or algorithm.next_tau({}, None)


@dataclass(frozen=True, slots=True)
class ClampedTau:
    """Keeps tau between ``least`` and ``most``, so that it cannot grow or shrink forever."""

    inner: TauStage  # the stage whose tau is clamped
    least: float  # smallest tau, parameter units
    most: float  # largest tau, parameter units

    def next_tau(self, state: ThresholdState, upcoming: NextPublication) -> PublicationTarget:
        """Return the inner stage's choice with tau clamped in the algorithm's state."""
        target = self.inner.next_tau(state, upcoming)
        if self.least <= target.state["tau"] <= self.most:
            return target
        tau = min(max(target.state["tau"], self.least), self.most)
        return target._replace(state={**target.state, "tau": tau})


@dataclass(frozen=True, slots=True)
class WarmUpTau:
    """Prescribes the fraction to send during the warm-up."""

    inner: TauStage  # the stage that chooses tau for the prescribed fraction
    warm_up: WarmUp  # length and fractions of the warm-up

    def next_tau(self, state: ThresholdState, upcoming: NextPublication) -> PublicationTarget:
        """Return the inner stage's choice of tau for the upcoming publication.

        During the warm-up, ``warm_up`` prescribes the fraction of parameters to send.
        """
        if self.warm_up.covers(upcoming.number):
            upcoming = upcoming._replace(fraction=self.warm_up.sent_fraction(upcoming.number))
        return self.inner.next_tau(state, upcoming)


@dataclass(frozen=True, slots=True)
class ShakeUpTau:
    """Makes every ``frequency``-th publication a shake-up, which sends all that reaches tau / 3.

    The threshold algorithm does not use the fraction that a shake-up sent as feedback.
    """

    inner: TauStage  # the stage whose tau is reduced
    frequency: int  # publications from one shake-up to the next, at least 1
    after: int = 0  # number of publications at the start without shake-ups

    def next_tau(self, state: ThresholdState, upcoming: NextPublication) -> PublicationTarget:
        """Return the inner stage's choice; in a shake-up, with a third of its tau."""
        if self._is_shake_up(upcoming.number - 1):  # its fraction says nothing about tau
            upcoming = upcoming._replace(use_as_feedback=False)
        target = self.inner.next_tau(state, upcoming)
        if self._is_shake_up(upcoming.number):
            return target._replace(divisor=SHAKE_DIVISOR, wanted=None, step_taus=None)
        return target

    def _is_shake_up(self, number: int) -> bool:
        """Return whether publication ``number`` is a shake-up."""
        return number > self.after and number % self.frequency == 0


class TauChooser:
    """Chooses the threshold of each publication of a worker, and keeps the state in between."""

    def __init__(self, source: TauSource, stage: TauStage) -> None:
        """Choose tau by ``stage``, which wraps ``source``."""
        self._source, self._stage = source, stage
        self._state: ThresholdState = {}
        self._sent_fraction: float | None = None
        self.publications = 0  # counted over all fits, unlike an encoder's counters

    @property
    def tau(self) -> float:
        """The last publication's threshold, unrounded, not reduced by shake-ups; NaN at first."""
        return self._state.get("tau", math.nan)

    def next_tau(
        self, tau_reached_by: TauReachedBy, *, is_last: bool = False, workers: int = 1
    ) -> PublicationTarget:
        """Return the threshold of publication number ``publications + 1``; store the next state.

        ``tau_reached_by(fraction)`` returns the tau that this fraction of residuals reach, or None
        if all are 0. ``is_last``: whether the worker has trained all its minibatches. ``workers``:
        number of workers that train.
        """
        number, sent = self.publications + 1, self._sent_fraction
        upcoming = NextPublication(number, sent, tau_reached_by, is_last=is_last, workers=workers)
        target = self._stage.next_tau(self._state, upcoming)
        self._state = target.state
        return target

    def count(self, sent_fraction: float) -> None:
        """Record a publication and the fraction that it sent (0.0: nothing to send)."""
        self.publications += 1
        self._sent_fraction = sent_fraction

    def follow_link(self, round_s: float, step_s: float) -> None:
        """Adapt to the speed of the link; see ``TauSource.follow_link``."""
        self._source.follow_link(round_s, step_s)

    def state(self) -> EncoderState:
        """Return the state to keep for the next fit."""
        state: EncoderState = {"publications": self.publications}
        state |= {f"{PREFIX}{name}": value for name, value in self._state.items()}
        if self._sent_fraction is not None:
            state["sent_fraction"] = self._sent_fraction
        return state | self._source.state()

    def load_state(self, state: EncoderState) -> None:
        """Restore a state that ``state`` returned, possibly in an earlier fit."""
        self.publications = int(state["publications"])
        self._sent_fraction = float(state["sent_fraction"]) if "sent_fraction" in state else None
        self._source.load_state(state)
        self._state = {
            name.removeprefix(PREFIX): float(value)
            for name, value in state.items()
            if name.startswith(PREFIX)
        }


def create_tau_chooser(
    threshold: ThresholdAlgorithm,
    limits: tuple[float, float],
    n_params: int,
    warm_up: WarmUp | None = None,
    shake_frequency: int = 0,
) -> TauChooser:
    """Build a TauChooser from its stages: algorithm, limits, warm-up and shake-ups.

    ``limits`` are the smallest and largest tau (parameter units), and ``n_params`` is the model's
    number of parameters. After the warm-up, each publication whose number is a multiple of
    ``shake_frequency`` is a shake-up; with 0, none is.
    """
    source: TauSource
    if isinstance(threshold, FractionAlgorithm):
        source = SampledTau(threshold, n_params)
    else:
        source = FeedbackTau(threshold)
    stage: TauStage = ClampedTau(source, *limits)
    if warm_up is not None:
        stage = WarmUpTau(stage, warm_up)
    if shake_frequency:
        after = warm_up.publications if warm_up is not None else 0
        stage = ShakeUpTau(stage, shake_frequency, after)
    return TauChooser(source, stage)
