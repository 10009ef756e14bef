"""Define algorithms that choose each message's threshold tau, and map DL4J's options to ours.

The residual is what a worker has learned but not yet sent. A parameter's change is sent when its
residual reaches tau in absolute value, so a larger tau makes messages smaller.

``AutoThreshold``, the default, derives tau from the current distribution of the residual. The other
algorithms keep tau fixed, or adjust it according to the fraction of all parameters that the last
message contained.

To add an algorithm, define a frozen dataclass here and list it in ``ALGORITHMS``. An algorithm's
state is a small plain dict that the caller keeps between fits and in checkpoints. It is ``{}``
before the first message, and then has the keys ``tau`` (not rounded, on the scale of the
parameters) and, if the algorithm uses it, ``sent_fraction`` (number of entries in the last message,
divided by the number of parameters). The formulas are those of DL4J's package
``org.deeplearning4j.optimize.solvers.accumulation.encoding.threshold``. What DL4J calls "sparsity
ratio" is called sent fraction here: the larger it is, the more entries a message has.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import COUNT_MAX, FLOAT_MIN, check_options, number, whole

ThresholdState = dict[str, float]

AUTO = "auto"  # option value; see ``SharedTrainingMaster.choose_threshold``
LEVELS_MAX = 4  # tau, 2 tau, 4 tau and 8 tau; the wire format has room for more
ROUND_S = 0.1  # a commit this many seconds after the publication delays nothing
RISE = 1.25  # growth of the wanted fraction per publication: minimum to maximum in 11 publications
FALL_FACTOR_MIN = 0.2  # the fraction's factor per publication; one late commit proves little


@runtime_checkable
class ThresholdAlgorithm(Protocol):
    """Interface of threshold algorithms; ``Leveled`` and ``FractionAlgorithm`` extend it."""

    def next_tau(self, state: ThresholdState, sent_fraction: float | None) -> ThresholdState:
        """Return the state for the next message, which contains the message's ``tau``.

        ``sent_fraction`` is the fraction that the last message sent; None before the first message.
        """


@runtime_checkable
class Leveled(Protocol):
    """A threshold algorithm that lets an entry send a multiple of tau at once."""

    @property
    def levels(self) -> int:
        """The number of step sizes: an entry sends tau, 2 tau, ... or 2^(levels - 1) tau."""


@runtime_checkable
class FractionAlgorithm(ThresholdAlgorithm, Protocol):
    """An algorithm that chooses the fraction to send; tau is then derived from the residuals."""

    @property
    def sent_fraction_min(self) -> float:
        """The smallest fraction of all parameters to send."""

    @property
    def sent_fraction_max(self) -> float:
        """The largest fraction of all parameters to send; training starts with this fraction."""

    def next_fraction(self, fraction: float, round_s: float, step_s: float) -> float:
        """Return the fraction to send next; ``fraction`` is the last one.

        ``round_s``: seconds from the last publication to its commit, when the master numbers it;
        ``step_s``: seconds per training step.
        """


@runtime_checkable
class HasTargetFractions(Protocol):
    """A threshold algorithm with a target range for the sent fraction.

    A warning after the fit says if the sent fraction was far out of range. All of ``ALGORITHMS``
    implement this interface; for a user-defined algorithm that does not, there is no warning.
    """

    @property
    def wanted_fractions(self) -> tuple[float, float]:
        """The smallest and largest fraction of all parameters that a message should contain."""


@runtime_checkable
class HasMinimumEntries(Protocol):
    """A threshold algorithm with a minimal number of entries per message, for small models."""

    @property
    def entries_min(self) -> int:
        """The smallest number of entries to send per message.

        ``small_model_fraction`` limits it to half of a small model's parameters.
        """


def small_model_fraction(threshold: ThresholdAlgorithm, n_params: int) -> float:
    """Return the smallest fraction to send for a model of this size: from 0 (no limit) to 1/2.

    With 1/2, tau is the median of the residuals. With more, tau would be close to the smallest
    residual, and the multiples of tau that a message supports could not represent the large ones.
    """
    entries = threshold.entries_min if isinstance(threshold, HasMinimumEntries) else 0
    return min(entries / n_params, 0.5)


def step_size_count(threshold: ThresholdAlgorithm) -> int:
    """Return an algorithm's number of step sizes: 1 unless the algorithm is ``Leveled``."""
    return threshold.levels if isinstance(threshold, Leveled) else 1


_TAU = number(
    least=FLOAT_MIN,
    unit="parameter units",
    remedy=": a threshold is positive and finite, such as 1e-3",
)
_FRACTION = number(above=0, below=1, unit="of all parameters")
_LEVELS = whole(
    1,
    LEVELS_MAX,
    unit="steps",
    remedy=f" (at most {LEVELS_MAX}); an entry moves by up to 2^(levels - 1) tau",
)
_DECAY = number(least=0.5, below=1, remedy="; it is the factor by which tau falls per message")


@dataclass(frozen=True, slots=True)
class AutoThreshold:
    """Sends as large a fraction of the parameters as the network link allows.

    tau is the value that this fraction of the residuals reach. The fraction starts at its maximum
    and follows the link's speed between both bounds. The defaults come from measurements: if
    updates were summed, accuracy did not improve with fractions above 1e-2, and declined with
    fractions below 1e-3. A message contains at least 32 entries, or half of the parameters if that
    is less. ``threshold="auto"`` selects this algorithm; with ``scaling="ddp"``, it selects
    ``AveragingThreshold`` if updates are averaged, or else a maximum of 1.6e-2.

    Args:
        sent_fraction_min: smallest fraction of all parameters to send per message.
        sent_fraction_max: largest fraction of all parameters to send per message.
        levels: number of step sizes; an entry sends tau, 2 tau, ... or 2^(levels - 1) tau.

    Raises:
        UsageError: a value is out of range, or the minimum is above the maximum.
    """

    sent_fraction_min: float = field(default=1e-3, metadata=_FRACTION)
    sent_fraction_max: float = field(default=1e-2, metadata=_FRACTION)
    # an entry sends tau, 2 tau, ... or 2^(levels - 1) tau; 1: only tau
    levels: int = field(default=4, metadata=_LEVELS)

    def __post_init__(self) -> None:
        """Raise UsageError if an option is out of range."""
        check_options(self)
        _check_band(self.sent_fraction_min, self.sent_fraction_max)

    @property
    def entries_min(self) -> int:
        """32, because a message with fewer entries would hardly be shorter, due to its headers."""
        return 32

    @property
    def wanted_fractions(self) -> tuple[float, float]:
        """The lower and upper bound of the fraction."""
        return self.sent_fraction_min, self.sent_fraction_max

    def next_fraction(self, fraction: float, round_s: float, step_s: float) -> float:
        """Return the fraction to send next; see ``FractionAlgorithm.next_fraction``.

        The fraction grows by a quarter if the last commit took (``round_s``) no longer than a step
        (``step_s``), or than ``ROUND_S`` if steps are shorter. Otherwise it shrinks in proportion,
        to no less than a fifth.
        """
        room_s = max(step_s, ROUND_S)
        change = RISE if round_s <= room_s else max(FALL_FACTOR_MIN, room_s / round_s)
        return min(max(fraction * change, self.sent_fraction_min), self.sent_fraction_max)

    def next_tau(self, state: ThresholdState, sent_fraction: float | None) -> ThresholdState:
        """Return ``state`` unchanged; if it has no tau, return a state with a tau of 0.

        Normally, tau is derived from the residuals (``tau.SampledTau``). This method is called only
        if all residuals are 0, when nothing is sent. ``sent_fraction`` is not used.
        """
        return state if "tau" in state else {"tau": 0.0}


@dataclass(frozen=True, slots=True)
class AveragingThreshold(AutoThreshold):
    """Sends fewer entries than ``AutoThreshold``, except that every eighth update is large.

    It suits updates that are averaged (``aggregation="mean"``). What the workers' changes have in
    common is much smaller than each worker's noise, so it rarely reaches tau. A large update sends
    it at once: it contains 20 times as many entries, and each sends 2.25 tau, which may be more
    than its residual. These errors differ between workers, so that they nearly vanish in the mean.
    The update after a worker's last minibatch is also large, because what remains in the residual
    is lost.

    Source of the step: for normally distributed residuals, of which the largest 12 % each send
    2.7 tau, the update equals the residual plus noise that does not correlate with it (Bussgang's
    theorem). Smaller steps add less noise. Steps are rounded down, so 2.25 tau are 2 tau on
    average.

    No update is large with fewer than four workers, or if few residuals are much larger than the
    others, as in models with embeddings, because equal steps do not suit these. Then all updates
    have 8/3 times as many entries, which takes the same bytes.

    Args:
        sent_fraction_min: smallest fraction of all parameters to send per ordinary message.
        sent_fraction_max: largest fraction of all parameters to send per ordinary message.
        levels: number of step sizes of ordinary messages, as in ``AutoThreshold``; at least 2.
        large_every: a worker's updates whose number is a multiple of this are large.

    Raises:
        UsageError: a value is out of range, or ``levels`` is 1.
    """

    sent_fraction_min: float = field(default=3e-4, metadata=_FRACTION)
    sent_fraction_max: float = field(default=6e-3, metadata=_FRACTION)
    # a worker's updates whose number is a multiple of this are large
    large_every: int = field(default=8, metadata=whole(1, COUNT_MAX, unit="updates"))

    def __post_init__(self) -> None:
        """Raise UsageError if an option is out of range, or if there is only one level.

        With one level, an encoder has no room for the entries of large updates of small models.
        """
        AutoThreshold.__post_init__(self)
        if self.levels == 1:
            raise UsageError("levels=1: large updates need at least 2")


@dataclass(frozen=True, slots=True)
class FixedThreshold:
    """Uses the same tau for every message (Strom 2015; DL4J: ``FixedThresholdAlgorithm``).

    Args:
        tau: the threshold, in parameter units.
        levels: number of step sizes; an entry sends tau, 2 tau, ... or 2^(levels - 1) tau.

    Raises:
        UsageError: tau is not positive and finite, or levels are out of range.
    """

    tau: float = field(metadata=_TAU)  # parameter units
    # an entry sends tau, 2 tau, ... or 2^(levels - 1) tau; DL4J: only tau
    levels: int = field(default=1, metadata=_LEVELS)

    def __post_init__(self) -> None:
        """Raise UsageError if an option is out of range."""
        check_options(self)

    @property
    def wanted_fractions(self) -> tuple[float, float]:
        """The bounds of ``AutoThreshold``, because a fixed tau has no target range of its own."""
        return AutoThreshold().wanted_fractions

    def next_tau(self, state: ThresholdState, sent_fraction: float | None) -> ThresholdState:
        """Return a state with the fixed tau, whatever the last message sent."""
        return {"tau": self.tau}


@dataclass(frozen=True, slots=True)
class AdaptiveThreshold:
    """Adjusts tau to keep the sent fraction in a band (DL4J: ``AdaptiveThresholdAlgorithm``).

    Args:
        tau_initial: first threshold, in parameter units.
        sent_fraction_min: lower bound of the band, as a fraction of all parameters per message.
        sent_fraction_max: upper bound of the band.
        decay: tau is multiplied by this after a message below the band, and divided by it after one
            above the band.
        levels: number of step sizes; an entry sends tau, 2 tau, ... or 2^(levels - 1) tau.

    Raises:
        UsageError: a value is out of range.
    """

    tau_initial: float = field(default=1e-4, metadata=_TAU)  # parameter units
    sent_fraction_min: float = field(default=1e-4, metadata=_FRACTION)
    sent_fraction_max: float = field(default=1e-2, metadata=_FRACTION)
    # tau halves or doubles in 20 messages
    decay: float = field(default=0.5 ** (1 / 20), metadata=_DECAY)
    levels: int = field(default=1, metadata=_LEVELS)  # as in ``FixedThreshold``

    def __post_init__(self) -> None:
        """Raise UsageError if an option is out of range."""
        check_options(self)
        _check_band(self.sent_fraction_min, self.sent_fraction_max)

    @property
    def wanted_fractions(self) -> tuple[float, float]:
        """The lower and upper bound of the band."""
        return self.sent_fraction_min, self.sent_fraction_max

    def next_tau(self, state: ThresholdState, sent_fraction: float | None) -> ThresholdState:
        """Return the next state: tau falls if less than the band was sent, and rises if more."""
        low, high = self.sent_fraction_min, self.sent_fraction_max
        return _adjust_tau(state, sent_fraction, self.tau_initial, low, high, self.decay)


@dataclass(frozen=True, slots=True)
class TargetSparsityThreshold:
    """Adjusts tau so that messages contain about a target fraction of all parameters.

    The fraction does not converge, because each message that is not exactly on target changes tau
    by a factor of ``decay``. DL4J: ``TargetSparsityThresholdAlgorithm``.

    Args:
        tau_initial: first threshold, in parameter units.
        sent_fraction_target: fraction of all parameters to send per message.
        decay: tau is multiplied by this after a message below the target, and divided by it after
            one above the target.
        levels: number of step sizes; an entry sends tau, 2 tau, ... or 2^(levels - 1) tau.

    Raises:
        UsageError: a value is out of range.
    """

    tau_initial: float = field(default=1e-4, metadata=_TAU)  # parameter units
    sent_fraction_target: float = field(
        default=1e-3,
        metadata=number(
            above=0, below=1 / 16, remedy="; beyond 1/16 sparse messages no longer pay"
        ),
    )
    # tau halves or doubles in 20 messages
    decay: float = field(default=0.5 ** (1 / 20), metadata=_DECAY)
    levels: int = field(default=1, metadata=_LEVELS)  # as in ``FixedThreshold``

    def __post_init__(self) -> None:
        """Raise UsageError if an option is out of range."""
        check_options(self)

    @property
    def wanted_fractions(self) -> tuple[float, float]:
        """The target, as both bounds."""
        return self.sent_fraction_target, self.sent_fraction_target

    def next_tau(self, state: ThresholdState, sent_fraction: float | None) -> ThresholdState:
        """Return the next state: tau falls if less than the target was sent, and rises if more."""
        target = self.sent_fraction_target
        return _adjust_tau(state, sent_fraction, self.tau_initial, target, target, self.decay)


# Classes that configuration and saved options may name. ``AveragingThreshold`` is not among them:
# only ``threshold="auto"`` chooses it.
ALGORITHMS: tuple[type[ThresholdAlgorithm], ...] = (
    AdaptiveThreshold,
    AutoThreshold,
    FixedThreshold,
    TargetSparsityThreshold,
)


def _adjust_tau(
    state: ThresholdState,
    sent_fraction: float | None,
    tau_initial: float,
    low: float,
    high: float,
    decay: float,
) -> ThresholdState:
    """Return the next state: tau falls for a sent fraction below ``low``, rises above ``high``.

    The first tau is ``tau_initial``. ``decay`` is the factor by which tau falls. If
    ``sent_fraction`` is None, the fraction in ``state`` is used; without either, tau stays.
    """
    if "tau" not in state:
        return {"tau": tau_initial}
    tau = state["tau"]
    sent = state.get("sent_fraction") if sent_fraction is None else sent_fraction
    if sent is None:  # a state that has seen no message yet
        return {"tau": tau}
    if sent < low:
        tau = tau * decay
    elif sent > high:
        tau = tau / decay
    return {"tau": tau, "sent_fraction": sent}


def _check_band(low: float, high: float) -> None:
    """Raise UsageError unless 0 < low <= high < 1."""
    if not 0 < low <= high < 1:
        raise UsageError(
            f"sent_fraction_min={low}, sent_fraction_max={high}: need 0 < min <= max < 1, as"
            " fractions of all parameters"
        )


# Our name of a DL4J option in the Builders of SharedTrainingMaster, ParallelWrapper and
# EncodedGradientsAccumulator. All option classes of gradient sharing pass this dict and ``REFUSED``
# to ``options(refused=..., aliases=...)``.
ALIASES: dict[str, str] = {
    "threshold_algorithm": "threshold",
}

_QUEUE = (
    "updates wait in a window of so many bytes, VoidConfiguration(window_bytes=...), and in the"
    " residual; nothing is dropped"
)
_ENCODING = (
    "encoding follows threshold=, residual_post_processor=, shake_frequency= and warm_up=; there"
    " is no handler to replace"
)

# Unsupported DL4J options, with the remedy that the error message names.
REFUSED: dict[str, str] = {
    "updates_threshold": "write threshold=AdaptiveThreshold(tau)",
    "encoding_handler": _ENCODING,
    "message_handler": _ENCODING,
    "gradients_accumulator": _ENCODING,
    "encoder_updates_queue": _QUEUE,
    "encoder_update_queue": _QUEUE,
    "queue_size": _QUEUE,
    "memory_parameters": _QUEUE,
    "initial_memory": _QUEUE,
    "temporary_memory": _QUEUE,
    "encoding_bitmap_mode": "the form of a message, sparse or bitmap, is the shorter of the two",
    "boundary": "all that reached the threshold is sent; SharedTrainingMaster's threshold='auto'"
    " holds the fraction that is sent between two limits",
    "step_trigger": "use AdaptiveThreshold, AutoThreshold or TargetSparsityThreshold, which follow"
    " the fraction that is sent",
    "step_delay": "use warm_up=WarmUp(publications), which lowers what is sent step by step",
    "threshold_step": "use AdaptiveThreshold(decay=...), which lowers and raises the threshold",
    "min_threshold": "a threshold follows what is sent; no least value is needed",
    "relative_threshold": "use TargetSparsityThreshold(sent_fraction_target=...)",
}
