"""Threshold algorithms: tau for the next message, from what there is to send or from what was.

``AutoThreshold``, the default, takes it from the present residual's own distribution; the others
steer it by how much the last message sent.

A new one is a class here and its name in ``ALGORITHMS``. It is a frozen option; what it has learnt
is a small plain dict that the caller keeps, from fit to fit and in checkpoints: ``{}`` before the
first message, then ``tau`` (unrounded, parameter units) and ``sent_fraction`` (hits per parameter
of the last message it looked at).
Formulas and reducers are those of DL4J's ``org.deeplearning4j.optimize.solvers.accumulation
.encoding.threshold``; its "sparsity ratio" is our sent fraction (a larger one is denser).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import FLOAT_MIN, check_options, number, whole

ThresholdState = dict[str, float]

AUTO = "auto"  # an option's word for what follows measurements; here for ``AutoThreshold()``
LEVELS_MAX = 4  # tau, 2 tau, 4 tau, 8 tau: 3 bits of a byte on the wire would hold more
ROUND_S = 0.1  # a publication that is through so soon makes nothing wait
RISE = 1.25  # of the wanted fraction per publication; from floor to ceiling in 11
FALL_MAX = 0.2  # per publication: from ceiling to floor in two; one late commit says little


@runtime_checkable
class ThresholdAlgorithm(Protocol):
    """What a threshold is asked; it may be one of the two kinds below as well."""

    def next_tau(self, state: ThresholdState, sent_fraction: float | None) -> ThresholdState:
        """The state for the next message, ``tau`` in it; ``None``: nothing was published yet."""


@runtime_checkable
class Leveled(Protocol):
    """A threshold of which an entry may move by a multiple at once."""

    @property
    def levels(self) -> int:
        """An entry moves by tau, 2 tau, ... 2^(levels - 1) tau."""


@runtime_checkable
class FractionAlgorithm(ThresholdAlgorithm, Protocol):
    """A threshold that says how much to send: tau is what so many of the residuals reach."""

    @property
    def sent_fraction_min(self) -> float:
        """Of all parameters; not less than this is wanted."""

    @property
    def sent_fraction_max(self) -> float:
        """Of all parameters; this is wanted first, and more never."""

    def next_fraction(self, fraction: float, round_s: float, step_s: float) -> float:
        """The fraction to send next, from what was wanted last and how that went."""


def levels_of(threshold: ThresholdAlgorithm) -> int:
    """By how many different steps an entry may move: one, unless the threshold knows more."""
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
    """As much as the link has room for: tau is what the wanted fraction of residuals reach.

    The wanted fraction begins at the most that pays and follows the link between both bounds:
    above 1e-2 accuracy no longer grew, below 1e-3 it fell. ``threshold="auto"`` is this.
    """

    sent_fraction_min: float = field(default=1e-3, metadata=_FRACTION)
    sent_fraction_max: float = field(default=1e-2, metadata=_FRACTION)
    # an entry moves by tau, 2 tau, ... 2^(levels - 1) tau; 1: by tau alone
    levels: int = field(default=4, metadata=_LEVELS)

    def __post_init__(self) -> None:
        check_options(self)
        _need_band(self.sent_fraction_min, self.sent_fraction_max)

    def next_fraction(self, fraction: float, round_s: float, step_s: float) -> float:
        """The fraction to send next, from what was wanted last and how that went.

        ``round_s``: how long the last publication took until it was committed; ``step_s``: how long
        a training step takes.

        While a publication is through within a step (or ``ROUND_S``, where steps are shorter)
        there is room for more; above that it is less in proportion, a fifth at least.
        """
        room_s = max(step_s, ROUND_S)
        change = RISE if round_s <= room_s else max(FALL_MAX, room_s / round_s)
        return min(max(fraction * change, self.sent_fraction_min), self.sent_fraction_max)

    def next_tau(self, state: ThresholdState, sent_fraction: float | None) -> ThresholdState:
        """What there is, or the least: this is only asked where all residuals are 0."""
        return state if "tau" in state else {"tau": 0.0}


def algorithm_of(threshold: ThresholdAlgorithm | str) -> ThresholdAlgorithm:
    """What the option ``threshold`` stands for."""
    if isinstance(threshold, str):
        assert threshold == AUTO, threshold
        return AutoThreshold()
    return threshold


@dataclass(frozen=True, slots=True)
class FixedThreshold:
    """The same tau for every message (Strom 2015; DL4J: ``FixedThresholdAlgorithm``).

    Raises UsageError for a tau that is not positive and finite, or levels that do not exist.
    """

    tau: float = field(metadata=_TAU)  # parameter units
    # an entry moves by tau, 2 tau, ... 2^(levels - 1) tau; DL4J: by tau alone
    levels: int = field(default=1, metadata=_LEVELS)

    def __post_init__(self) -> None:
        check_options(self)

    def next_tau(self, state: ThresholdState, sent_fraction: float | None) -> ThresholdState:
        """Always this tau."""
        return {"tau": self.tau}


@dataclass(frozen=True, slots=True)
class AdaptiveThreshold:
    """Steer tau so that the sent fraction stays within a band (``AdaptiveThresholdAlgorithm``).

    Fractions are of all parameters, for one message. Raises UsageError for values out of range.
    """

    tau_initial: float = field(default=1e-4, metadata=_TAU)  # parameter units
    sent_fraction_min: float = field(default=1e-4, metadata=_FRACTION)
    sent_fraction_max: float = field(default=1e-2, metadata=_FRACTION)
    # tau halves or doubles in 20 messages
    decay: float = field(default=0.5 ** (1 / 20), metadata=_DECAY)
    levels: int = field(default=1, metadata=_LEVELS)  # as of ``FixedThreshold``

    def __post_init__(self) -> None:
        check_options(self)
        _need_band(self.sent_fraction_min, self.sent_fraction_max)

    def next_tau(self, state: ThresholdState, sent_fraction: float | None) -> ThresholdState:
        """tau falls by ``decay`` below the band, rises by it above, and stays inside."""
        low, high = self.sent_fraction_min, self.sent_fraction_max
        return _steer(state, sent_fraction, self.tau_initial, low, high, self.decay)


@dataclass(frozen=True, slots=True)
class TargetSparsityThreshold:
    """Steer tau towards one sent fraction (DL4J: ``TargetSparsityThresholdAlgorithm``).

    It never settles: it swings around the target by one step of ``decay``. The target is a fraction
    of all parameters. Raises UsageError for values out of range.
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
        check_options(self)

    def next_tau(self, state: ThresholdState, sent_fraction: float | None) -> ThresholdState:
        """tau falls by ``decay`` below the target and rises by it above."""
        target = self.sent_fraction_target
        return _steer(state, sent_fraction, self.tau_initial, target, target, self.decay)


# Known by name where options are read, saved and checked.
ALGORITHMS: tuple[type[ThresholdAlgorithm], ...] = (
    AdaptiveThreshold,
    AutoThreshold,
    FixedThreshold,
    TargetSparsityThreshold,
)


def _steer(
    state: ThresholdState,
    sent_fraction: float | None,
    tau_initial: float,
    low: float,
    high: float,
    decay: float,
) -> ThresholdState:
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


def _need_band(low: float, high: float) -> None:
    if not 0 < low <= high < 1:
        raise UsageError(
            f"sent_fraction_min={low}, sent_fraction_max={high}: need 0 < min <= max < 1, as"
            " fractions of all parameters"
        )
