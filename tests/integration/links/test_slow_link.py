"""Tests of three hosts with a worker each, whose links of 10 Mbit/s are too slow for all updates.

The traffic that is needed if k workers on k hosts are all children of the driver, on one of these
hosts: a worker's update is sent once to the driver, from k - 1 of the hosts, and by the driver to
each other worker's host, which are k - 1 hosts if the update comes from the driver's own, and else
k - 2. So for U bytes of sealed updates (``summary.bytes_sent``; U / k per worker) the driver's host
sends

    U / k (k - 1) + U (k - 1) / k (k - 2) = U (k - 1)^2 / k

and all hosts together send U (k - 1). Before, the initial parameters, 4 P bytes, go to k - 1 hosts,
and (k - 1) / k of each host's rows to the others. Updates that are summed because a link is slow
need less, which makes the tests' bounds more generous.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.hosts import lacking
from benchmarks.slow_link.data import ROWS
from benchmarks.slow_link.figures import figures
from benchmarks.slow_link.running import Link, Observed, observe
from benchmarks.slow_link.systems import OURS
from benchmarks.slow_link.trial import Trial

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif((reason := lacking()) is not None, reason=reason or ""),
]
pytest.importorskip("torch", reason="not installed: pip install 'sparkstrom[torch]'")

RATE = "10mbit"
WORKERS = 3
WIDTHS = (512, 512)
N_PARAMS = 64 * 512 + 512 + 512 * 512 + 512 + 512 * 10 + 10
ROW_BYTES = 64 * 4 + 8

USEFUL_MIN = 0.7
DRIVER_MAX = 1.5


SHARING = Trial(
    system=OURS,
    rate=1e-3,
    seed=0,
    workers=WORKERS,
    widths=WIDTHS,
    optimizer="adam",
    epochs=1,
    limit_s=14.0,
)
# Its learning rate differs, to distinguish the events of the two trials.
ROUNDS = replace(SHARING, system="diloco-4", rate=2e-3, widths=(64,), limit_s=5.0)


@pytest.fixture(scope="module")
def observed() -> Observed:
    """Both fits, observed in one application."""
    return observe(Link(RATE), [SHARING, ROUNDS], {})


@pytest.fixture(scope="module")
def found(observed: Observed) -> dict[str, Any]:
    """The figures of the fit with gradient sharing."""
    return figures(SHARING, observed)


def test_a_fit_ends_with_equal_replicas(found: dict[str, Any]) -> None:
    assert "summary" in found, found["ended"]
    assert found["summary"]["replicas_equal"]
    assert found["summary"]["updates"] > 0


def test_most_sent_bytes_are_needed_for_updates(found: dict[str, Any]) -> None:
    """At least 0.7 of the bytes that are sent during training are needed for updates."""
    useful = found["summary"]["bytes_sent"] * (WORKERS - 1)
    assert useful >= USEFUL_MIN * found["bytes_training"]


def test_driver_host_sends_little_more_than_necessary(found: dict[str, Any]) -> None:
    """The driver's host sends at most 1.5 times the needed bytes."""
    updates = found["summary"]["bytes_sent"] * (WORKERS - 1) ** 2 / WORKERS
    initial = 4 * N_PARAMS * (WORKERS - 1)
    rows = ROWS["train"] * ROW_BYTES * (WORKERS - 1) / WORKERS**2
    assert found["bytes_driver"] <= DRIVER_MAX * (updates + initial + rows)


def test_training_progresses_on_slow_links(found: dict[str, Any]) -> None:
    """On slow links, workers still take steps and the accuracy improves."""
    assert found["steps"] >= 10
    assert found["accuracy"] > 0.6


def test_each_averaging_round_sends_all_parameters(observed: Observed) -> None:
    """In each round of averaging, every worker sends all parameters."""
    found = figures(ROUNDS, observed)
    assert "summary" in found, found["ended"]
    of_all = WORKERS * 4 * (64 * 64 + 64 + 64 * 10 + 10)  # bytes of parameters
    summary = found["summary"]
    assert summary["updates"] == pytest.approx(found["steps"] / 4, abs=1)  # one may be shorter
    assert summary["bytes_sent"] >= summary["updates"] * of_all > 0
    others = (WORKERS - 1) / WORKERS  # the rest stays on host 0
    assert found["bytes_training"] >= summary["bytes_sent"] * others
    assert found["curve"]
