"""Threshold algorithms: tau for the next message, from how much the last one sent.

An algorithm is a frozen option; what it has learnt is a small plain dict that the caller keeps,
from fit to fit and in checkpoints: ``{}`` before the first message, then ``tau`` (unrounded,
parameter units) and ``sent_fraction`` (hits per parameter of the last message it looked at).
Formulas and reducers are those of DL4J's ``org.deeplearning4j.optimize.solvers.accumulation
.encoding.threshold``; its "sparsity ratio" is our sent fraction (a larger one is denser).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from sparkstrom.base.errors import UsageError

ThresholdState = dict[str, float]


@runtime_checkable
class ThresholdAlgorithm(Protocol):
    """What the encoder asks of a threshold."""

    def next_tau(self, state: ThresholdState, sent_fraction: float | None) -> ThresholdState:
        """The state for the next message, ``tau`` in it; ``None``: nothing was published yet."""

    def merge(self, states: Iterable[ThresholdState]) -> ThresholdState:
        """One state out of several workers'; those that never published do not count."""


@dataclass(frozen=True, slots=True)
class FixedThreshold:
    """The same tau for every message (DL4J: ``FixedThresholdAlgorithm``)."""

    tau: float  # parameter units

    def __post_init__(self) -> None:
        _need_positive("tau", self.tau)

    def next_tau(self, state: ThresholdState, sent_fraction: float | None) -> ThresholdState:
        """Always this tau."""
        return {"tau": self.tau}

    def merge(self, states: Iterable[ThresholdState]) -> ThresholdState:
        """Nothing is learnt, so nothing can differ."""
        return {"tau": self.tau} if any("tau" in state for state in states) else {}


@dataclass(frozen=True, slots=True)
class AdaptiveThreshold:
    """Steer tau so that the sent fraction stays within a band (``AdaptiveThresholdAlgorithm``)."""

    tau_initial: float = 1e-4  # parameter units
    sent_fraction_min: float = 1e-4
    sent_fraction_max: float = 1e-2
    decay: float = 0.5 ** (1 / 20)  # tau halves or doubles in 20 messages

    def __post_init__(self) -> None:
        _need_positive("tau_initial", self.tau_initial)
        _need_decay(self.decay)
        if not 0 < self.sent_fraction_min <= self.sent_fraction_max < 1:
            raise UsageError(
                f"sent_fraction_min={self.sent_fraction_min}, sent_fraction_max="
                f"{self.sent_fraction_max}: need 0 < min <= max < 1, as fractions of all parameters"
            )

    def next_tau(self, state: ThresholdState, sent_fraction: float | None) -> ThresholdState:
        """tau falls by ``decay`` below the band, rises by it above, and stays inside."""
        low, high = self.sent_fraction_min, self.sent_fraction_max
        return _steer(state, sent_fraction, self.tau_initial, low, high, self.decay)

    def merge(self, states: Iterable[ThresholdState]) -> ThresholdState:
        """The means over all states that have a tau."""
        return _mean(states)


@dataclass(frozen=True, slots=True)
class TargetSparsityThreshold:
    """Steer tau towards one sent fraction (DL4J: ``TargetSparsityThresholdAlgorithm``).

    It never settles: it swings around the target by one step of ``decay``.
    """

    tau_initial: float = 1e-4  # parameter units
    sent_fraction_target: float = 1e-3
    decay: float = 0.5 ** (1 / 20)  # tau halves or doubles in 20 messages

    def __post_init__(self) -> None:
        _need_positive("tau_initial", self.tau_initial)
        _need_decay(self.decay)
        if not 0 < self.sent_fraction_target < 1 / 16:
            raise UsageError(
                f"sent_fraction_target={self.sent_fraction_target}: must lie in (0, 1/16); beyond,"
                " sparse messages no longer pay"
            )

    def next_tau(self, state: ThresholdState, sent_fraction: float | None) -> ThresholdState:
        """tau falls by ``decay`` below the target and rises by it above."""
        target = self.sent_fraction_target
        return _steer(state, sent_fraction, self.tau_initial, target, target, self.decay)

    def merge(self, states: Iterable[ThresholdState]) -> ThresholdState:
        """The means over all states that have a tau."""
        return _mean(states)


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


def _mean(states: Iterable[ThresholdState]) -> ThresholdState:
    used = [state for state in states if "tau" in state]
    if not used:
        return {}
    merged = {"tau": math.fsum(state["tau"] for state in used) / len(used)}
    if any("sent_fraction" in state for state in used):
        # As in DL4J, one that has no sent fraction yet adds nothing but counts.
        sent = math.fsum(state.get("sent_fraction", 0.0) for state in used)
        merged["sent_fraction"] = sent / len(used)
    return merged


def _need_positive(name: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise UsageError(f"{name}={value}: a threshold is a positive, finite number, such as 1e-3")


def _need_decay(decay: float) -> None:
    if not 0.5 <= decay < 1:
        raise UsageError(
            f"decay={decay}: must lie in [0.5, 1); it is the factor by which tau falls per message"
        )
