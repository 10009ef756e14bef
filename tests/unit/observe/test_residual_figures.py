"""The residual's figures: right, carried among counters, and logged now and then."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from sparkstrom.observe import residual_figures
from sparkstrom.observe.residual_figures import EncodingLog, among_counters, figures_in, figures_of


def test_figures_are_of_absolute_values() -> None:
    residual = np.linspace(-1, 1, 2001, dtype=np.float32)
    figures = figures_of(residual, 0.5)
    assert figures["tau"] == 0.5
    assert figures["at_least_tau"] == 1002  # 501 on either side
    assert figures["max"] == 1.0
    assert figures["mean"] == pytest.approx(0.5, abs=1e-3)
    for name, value in {"p50": 0.5, "p95": 0.95, "p99": 0.99, "p99.9": 0.999}.items():
        assert figures[name] == pytest.approx(value, abs=1e-3)
    assert figures["p99.9"] <= figures["p99.99"] <= 1.0


def test_they_come_out_of_the_counters_again() -> None:
    figures = figures_of(np.ones(10, np.float32), 2.0)
    counters = {"steps": 1.0, "residual_square": 4.0, "rejected": 0.0, **among_counters(figures)}
    assert figures_in(counters) == figures
    assert figures_in({"steps": 1.0, "residual_square": 4.0, "rejected": 0.0}) == {}


def test_the_log_says_them_now_and_then(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 100.0
    monkeypatch.setattr(residual_figures.time, "monotonic", lambda: now_s)
    counters = {
        2: among_counters({"tau": 0.5, "max": 0.25}),
        1: among_counters({"tau": 0.125}),
        3: {"steps": 1.0},
    }
    log = EncodingLog()
    with caplog.at_level(logging.INFO, "sparkstrom.encoding"):
        for _ in range(3):
            log.show(counters)
        assert [record.getMessage() for record in caplog.records] == [
            "node 1, absolute residual: tau 0.125",
            "node 2, absolute residual: tau 0.5, max 0.25",
        ]
        log.show(counters, force=True)
        now_s += residual_figures.LOG_EVERY_S
        log.show(counters)
    assert len(caplog.records) == 6
    assert {record.name for record in caplog.records} == {"sparkstrom.encoding"}


def test_without_figures_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "sparkstrom.encoding"):
        EncodingLog().show({1: {"steps": 1.0}}, force=True)
    assert caplog.records == []
