"""Threshold algorithms, which choose tau for the next message, and DL4J's names of their options.

``AutoThreshold``, the default, derives tau from the present distribution of the residual; the
others steer it by the fraction of parameters that the last message sent.

To add an algorithm, define a class here and list it in ``ALGORITHMS``. It is a frozen option. Its
state is a small plain dict that the caller keeps from fit to fit and in checkpoints: ``{}`` before
the first message, then ``tau`` (unrounded, parameter units) and ``sent_fraction`` (hits per
parameter of the last message it used). Formulas and reducers are those of DL4J's
``org.deeplearning4j.optimize.solvers.accumulation .encoding.threshold``; its "sparsity ratio" is
our sent fraction (a larger one is denser).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import FLOAT_MIN, check_options, number, whole

ThresholdState = dict[str, float]

AUTO = "auto"  # option value that stands for ``AutoThreshold()``
LEVELS_MAX = 4  # tau, 2 tau, 4 tau, 8 tau: 3 bits of a byte on the wire would hold more
ROUND_S = 0.1  # a publication committed this soon delays nothing
RISE = 1.25  # of the wanted fraction per publication: from minimum to maximum in 11
FALL_MAX = 0.2  # per publication, from maximum to minimum in two: one late commit proves little


@runtime_checkable
class ThresholdAlgorithm(Protocol):
    """Interface of threshold algorithms; ``Leveled`` and ``FractionAlgorithm`` extend it."""

    def next_tau(self, state: ThresholdState, sent_fraction: float | None) -> ThresholdState:
        """Return the state for the next message, with its ``tau``.

        ``sent_fraction`` is that of the last message, or None before the first one.
        """


@runtime_checkable
class Leveled(Protocol):
    """A threshold with which an entry may move by several multiples of tau at once."""

    @property
    def levels(self) -> int:
        """The number of step sizes: an entry moves by tau, 2 tau, ... 2^(levels - 1) tau."""


@runtime_checkable
class FractionAlgorithm(ThresholdAlgorithm, Protocol):
    """A threshold that chooses the fraction to send; tau follows from the residuals."""

    @property
    def sent_fraction_min(self) -> float:
        """The smallest fraction of all parameters to send."""

    @property
    def sent_fraction_max(self) -> float:
        """The largest fraction of all parameters to send, with which training starts."""

    def next_fraction(self, fraction: float, round_s: float, step_s: float) -> float:
        """Return the fraction to send next, from the last one and how long it took.

        ``round_s``: seconds until the last publication was committed; ``step_s``: seconds of a
        training step.
        """


@runtime_checkable
class HasTargetFractions(Protocol):
    """A threshold with a target range; after a fit, warnings compare it with what was sent.

    All of ``ALGORITHMS`` implement this. A user's own algorithm without it gets no such warning.
    """

    @property
    def wanted_fractions(self) -> tuple[float, float]:
        """The smallest and largest fraction of all parameters that a message should hold."""


@runtime_checkable
class SendsSomeEntries(Protocol):
    """A threshold that sends at least some entries of a small model, whatever its fractions are."""

    @property
    def entries_min(self) -> int:
        """The smallest number of entries to send per message, if half of the model has so many."""


def small_model_fraction(threshold: ThresholdAlgorithm, n_params: int) -> float:
    """Return the smallest fraction to send for a model of this size: at most 1/2, 0 for any.

    With 1/2, tau is the median of the residuals. With more it would be nearly the smallest one, of
    which no message could hold enough multiples.
    """
    entries = threshold.entries_min if isinstance(threshold, SendsSomeEntries) else 0
    return min(entries / n_params, 0.5)


def levels_of(threshold: ThresholdAlgorithm) -> int:
    """Return the number of step sizes of a threshold: 1 unless it is ``Leveled``."""
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
    """Send as much as the link has room for: tau is what the chosen fraction of residuals reach.

    The fraction starts at its maximum and follows the link between both bounds. The defaults come
    from measurements: accuracy did not improve above 1e-2 and fell below 1e-3. A model of less than
    a few thousand parameters sends at least 32 of them, or half. ``threshold="auto"`` means this
    algorithm.

    Args:
        sent_fraction_min: smallest fraction of all parameters to send per message.
        sent_fraction_max: largest fraction of all parameters to send per message.
        levels: number of step sizes; an entry moves by tau, 2 tau, ... 2^(levels - 1) tau.

    Raises:
        UsageError: a value out of range, or a minimum above the maximum.
    """

    sent_fraction_min: float = field(default=1e-3, metadata=_FRACTION)
    sent_fraction_max: float = field(default=1e-2, metadata=_FRACTION)
    # an entry moves by tau, 2 tau, ... 2^(levels - 1) tau; 1: by tau alone
    levels: int = field(default=4, metadata=_LEVELS)

    def __post_init__(self) -> None:
        """Raise UsageError if an option is out of range."""
        check_options(self)
        _check_band(self.sent_fraction_min, self.sent_fraction_max)

    @property
    def entries_min(self) -> int:
        """A message of fewer entries is hardly smaller, because of its headers."""
        return 32

    @property
    def wanted_fractions(self) -> tuple[float, float]:
        """The lower and upper bound of the fraction."""
        return self.sent_fraction_min, self.sent_fraction_max

    def next_fraction(self, fraction: float, round_s: float, step_s: float) -> float:
        """Return the fraction to send next, from the last one and how long it took.

        ``round_s`` is the time in seconds from the last publication until it was committed;
        ``step_s`` is that of a training step. The fraction grows by a quarter while a publication
        takes no longer than a step (or ``ROUND_S``, if steps are shorter). Otherwise it shrinks in
        proportion, to a fifth at most.
        """
        room_s = max(step_s, ROUND_S)
        change = RISE if round_s <= room_s else max(FALL_MAX, room_s / round_s)
        return min(max(fraction * change, self.sent_fraction_min), self.sent_fraction_max)

    def next_tau(self, state: ThresholdState, sent_fraction: float | None) -> ThresholdState:
        """Return the last state, or a tau of 0; called only where all residuals are 0."""
        return state if "tau" in state else {"tau": 0.0}


def algorithm_of(threshold: ThresholdAlgorithm | str) -> ThresholdAlgorithm:
    """Return the algorithm that an option's value stands for: "auto" is ``AutoThreshold()``."""
    if isinstance(threshold, str):
        assert threshold == AUTO, threshold
        return AutoThreshold()
    return threshold


@dataclass(frozen=True, slots=True)
class FixedThreshold:
    """Use the same tau for every message (Strom 2015; DL4J: ``FixedThresholdAlgorithm``).

    Args:
        tau: the threshold, in parameter units.
        levels: number of step sizes; an entry moves by tau, 2 tau, ... 2^(levels - 1) tau.

    Raises:
        UsageError: a tau that is not positive and finite, or levels out of range.
    """

    tau: float = field(metadata=_TAU)  # parameter units
    # an entry moves by tau, 2 tau, ... 2^(levels - 1) tau; DL4J: by tau alone
    levels: int = field(default=1, metadata=_LEVELS)

    def __post_init__(self) -> None:
        """Raise UsageError if an option is out of range."""
        check_options(self)

    @property
    def wanted_fractions(self) -> tuple[float, float]:
        """The bounds of ``AutoThreshold``, because a fixed tau has no target of its own."""
        return AutoThreshold().wanted_fractions

    def next_tau(self, state: ThresholdState, sent_fraction: float | None) -> ThresholdState:
        """Return a state with this tau."""
        return {"tau": self.tau}


@dataclass(frozen=True, slots=True)
class AdaptiveThreshold:
    """Steer tau so that the sent fraction stays within a band (``AdaptiveThresholdAlgorithm``).

    Args:
        tau_initial: first threshold, in parameter units.
        sent_fraction_min: lower bound of the band, as a fraction of all parameters per message.
        sent_fraction_max: upper bound of the band.
        decay: factor by which tau falls per message below the band, and rises above it.
        levels: number of step sizes; an entry moves by tau, 2 tau, ... 2^(levels - 1) tau.

    Raises:
        UsageError: a value out of range.
    """

    tau_initial: float = field(default=1e-4, metadata=_TAU)  # parameter units
    sent_fraction_min: float = field(default=1e-4, metadata=_FRACTION)
    sent_fraction_max: float = field(default=1e-2, metadata=_FRACTION)
    # tau halves or doubles in 20 messages
    decay: float = field(default=0.5 ** (1 / 20), metadata=_DECAY)
    levels: int = field(default=1, metadata=_LEVELS)  # as of ``FixedThreshold``

    def __post_init__(self) -> None:
        """Raise UsageError if an option is out of range."""
        check_options(self)
        _check_band(self.sent_fraction_min, self.sent_fraction_max)

    @property
    def wanted_fractions(self) -> tuple[float, float]:
        """The lower and upper bound of the band."""
        return self.sent_fraction_min, self.sent_fraction_max

    def next_tau(self, state: ThresholdState, sent_fraction: float | None) -> ThresholdState:
        """Multiply tau by ``decay`` below the band and divide it above; keep it within the band."""
        low, high = self.sent_fraction_min, self.sent_fraction_max
        return _adjust_tau(state, sent_fraction, self.tau_initial, low, high, self.decay)


@dataclass(frozen=True, slots=True)
class TargetSparsityThreshold:
    """Steer tau towards one sent fraction (DL4J: ``TargetSparsityThresholdAlgorithm``).

    The sent fraction does not converge: tau swings around the target by one step of ``decay``.

    Args:
        tau_initial: first threshold, in parameter units.
        sent_fraction_target: fraction of all parameters to send per message.
        decay: factor by which tau falls per message below the target, and rises above it.
        levels: number of step sizes; an entry moves by tau, 2 tau, ... 2^(levels - 1) tau.

    Raises:
        UsageError: a value out of range.
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
    levels: int = field(default=1, metadata=_LEVELS)  # as of ``FixedThreshold``

    def __post_init__(self) -> None:
        """Raise UsageError if an option is out of range."""
        check_options(self)

    @property
    def wanted_fractions(self) -> tuple[float, float]:
        """The target, as both bounds."""
        return self.sent_fraction_target, self.sent_fraction_target

    def next_tau(self, state: ThresholdState, sent_fraction: float | None) -> ThresholdState:
        """Multiply tau by ``decay`` below the target, and divide it above."""
        target = self.sent_fraction_target
        return _adjust_tau(state, sent_fraction, self.tau_initial, target, target, self.decay)


# Classes that saved options may name.
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
    """Return the next state: tau falls below ``low``, rises above ``high``, else stays."""
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


# DL4J option -> ours, from the Builders of SharedTrainingMaster, ParallelWrapper and
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

# DL4J option -> the remedy that the error message names.
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
