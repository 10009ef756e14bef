"""Residuals as figures: how much is learnt and not sent, and how far from being sent it is.

DL4J's ``encodingDebugMode``. The figures travel among a worker's other counters, so the driver
sees all of them; they cost a sort of the residual each time, which is why they are off as a rule.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from sparkstrom.observe.telemetry import ResidualFigures, WorkerCounters

log = logging.getLogger("sparkstrom.encoding")

PERCENTILES = (50, 95, 99, 99.9, 99.99)
LOG_EVERY_S = 5.0


def figures_of(residual: NDArray[np.float32], tau: float) -> ResidualFigures:
    """Mean, max and percentiles of the absolute values of the residual f32[n_params], and how
    many of them reach ``tau`` (parameter units).
    """
    sizes = np.abs(residual)
    points = np.percentile(sizes, PERCENTILES)
    return ResidualFigures(
        tau,
        float(np.count_nonzero(sizes >= tau)),
        float(sizes.mean(dtype=np.float64)),
        float(sizes.max()),
        *map(float, points),
    )


class EncodingLog:
    """Writes every worker's figures to the log ``sparkstrom.encoding``, now and then."""

    def __init__(self) -> None:
        self._due_s = 0.0

    def show(self, counters: Mapping[int, WorkerCounters], *, force: bool = False) -> None:
        """Log if it is time, one line per node that has figures. ``counters``: by node."""
        now_s = time.monotonic()
        if now_s < self._due_s and not force:
            return
        for node, told in sorted(counters.items()):
            if told.training is not None and told.training.residual is not None:
                self._due_s = now_s + LOG_EVERY_S
                figures = told.training.residual.by_name()
                text = ", ".join(f"{name} {value:.3g}" for name, value in figures.items())
                log.info("node %d, absolute residual: %s", node, text)
