"""Residuals as figures: how much is learnt and not sent, and how far from being sent it is.

DL4J's ``encodingDebugMode``. The figures travel among a worker's other counters, so the driver
sees all of them; they cost a sort of the residual each time, which is why they are off as a rule.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger("sparkstrom.encoding")

PREFIX = "r_"  # of these figures among a worker's counters
PERCENTILES = (50, 95, 99, 99.9, 99.99)
LOG_EVERY_S = 5.0

Figures = dict[str, float]


def figures_of(residual: NDArray[np.float32], tau: float) -> Figures:
    """Mean, max and percentiles of the absolute values of the residual f32[n_params], and how
    many of them reach ``tau`` (parameter units).
    """
    sizes = np.abs(residual)
    points = np.percentile(sizes, PERCENTILES)
    return {
        "tau": tau,
        "at_least_tau": float(np.count_nonzero(sizes >= tau)),
        "mean": float(sizes.mean(dtype=np.float64)),
        "max": float(sizes.max()),
        **{f"p{point:g}": float(value) for point, value in zip(PERCENTILES, points, strict=True)},
    }


def waiting_in_residuals(
    counters: Iterable[Mapping[str, float]], workers: int, minibatches: int
) -> float:
    """How long what workers learn waits until it is sent, in minibatches of the fit; the mean.

    By Little's law a mass waits ``mass_waited / mass_left`` of its worker's steps, and each of them
    is as many minibatches of the fit as workers train. At most the fit itself: ``minibatches``.
    """
    waited = left = 0.0
    for values in counters:
        waited += values.get("mass_waited", 0.0)
        left += values.get("mass_left", 0.0)
    if not waited:
        return 0.0
    return min(workers * waited / left, float(minibatches)) if left else float(minibatches)


def among_counters(figures: Figures) -> Figures:
    """As they travel."""
    return {PREFIX + name: value for name, value in figures.items()}


def figures_in(counters: Mapping[str, float]) -> Figures:
    """What ``among_counters`` put there; empty where the mode is off."""
    return {
        name.removeprefix(PREFIX): value
        for name, value in counters.items()
        if name.startswith(PREFIX)
    }


class EncodingLog:
    """Writes every worker's figures to the log ``sparkstrom.encoding``, now and then."""

    def __init__(self) -> None:
        self._due_s = 0.0

    def show(self, counters: Mapping[int, Mapping[str, float]], *, force: bool = False) -> None:
        """Log if it is time, one line per node that has figures. ``counters``: by node."""
        now_s = time.monotonic()
        if now_s < self._due_s and not force:
            return
        lines = {node: figures_in(values) for node, values in sorted(counters.items())}
        for node, figures in lines.items():
            if figures:
                self._due_s = now_s + LOG_EVERY_S
                text = ", ".join(f"{name} {value:.3g}" for name, value in figures.items())
                log.info("node %d, absolute residual: %s", node, text)
