"""Tests of the residual's statistics: their values, and how often they are logged."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from sparkstrom.fit import listeners
from sparkstrom.fit.listeners import ResidualLogListener
from sparkstrom.observe.telemetry import (
    ResidualFigures,
    TrainingCounters,
    WorkerCounters,
)
from sparkstrom.runtime.trainer_thread import residual_statistics


def test_residual_statistics_use_absolute_values() -> None:
    """The statistics are of the entries' absolute values."""
    residual = np.linspace(-1, 1, 2001, dtype=np.float32)
    figures = residual_statistics(residual, 0.5).by_name()
    assert figures["tau"] == 0.5
    assert figures["at_least_tau"] == 1002  # 501 on either side
    assert figures["max"] == 1.0
    assert figures["mean"] == pytest.approx(0.5, abs=1e-3)
    for name, value in {"p50": 0.5, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}.items():
        assert figures[name] == pytest.approx(value, abs=1e-3)
    assert figures["p99.9"] <= figures["p99.99"] <= 1.0


def make_counters(tau: float) -> WorkerCounters:
    """Return a worker's counters with residual statistics for this tau."""
    figures = ResidualFigures(tau, 2.0, 0.1, 0.25, 0.2, 0.21, 0.22, 0.23, 0.24)
    return WorkerCounters(TrainingCounters(residual=figures))


def test_residual_statistics_are_logged_once_per_interval(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The statistics of each node are logged once per interval, or if forced."""
    now_s = 100.0
    monkeypatch.setattr(listeners.time, "monotonic", lambda: now_s)
    counters = {
        2: make_counters(0.5),
        1: make_counters(0.125),
        3: WorkerCounters(TrainingCounters(steps=1)),
        4: WorkerCounters(),
    }
    log = ResidualLogListener()
    with caplog.at_level(logging.INFO, "sparkstrom.encoding"):
        for _ in range(3):
            log.log_statistics(counters)
        assert [record.getMessage() for record in caplog.records] == [
            f"node {node}, absolute residual: tau {tau}, at_least_tau 2, mean 0.1, max 0.25,"
            " p50 0.2, p95 0.21, p99 0.22, p99.9 0.23, p99.99 0.24"
            for node, tau in ((1, 0.125), (2, 0.5))
        ]
        log.log_statistics(counters, force=True)
        now_s += listeners.RESIDUAL_LOG_EVERY_S
        log.log_statistics(counters)
    assert len(caplog.records) == 6
    assert {record.name for record in caplog.records} == {"sparkstrom.encoding"}


def test_nothing_is_logged_without_residual_statistics(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "sparkstrom.encoding"):
        ResidualLogListener().log_statistics(
            {1: WorkerCounters(TrainingCounters(steps=1))}, force=True
        )
    assert caplog.records == []
