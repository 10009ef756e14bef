"""Tests of processes that are killed during an epoch: the fit succeeds and trains all rows."""

from __future__ import annotations

import pytest

from sparkstrom import VoidConfiguration
from sparkstrom.observe.reporting.report_page import render_report
from sparkstrom.observe.reporting.run_log_reader import read_history
from tests.unit.observe.run_logs import PLOTS


@pytest.fixture
def slow_fit(spark, digits, make_network, in_background):
    """A function that starts a fit of some seconds, during which a test can kill processes."""

    def start(run_log="", **options):
        network = make_network(
            void=VoidConfiguration(lease_s=3.0), debug_longer_iterations=25, **options
        )
        data = spark.sparkContext.parallelize(digits.rows(), 4)
        return in_background(network.fit, data, epochs=20, run_log=run_log), network

    return start


def check_nothing_lost(summary):
    print(summary.table())
    assert summary.replicas_equal, summary.hashes
    assert summary.minibatches == summary.minibatches_expected
    assert summary.minibatches_expected == 20 * 48 or summary.minibatches_expected == 20 * 45


@pytest.fixture
def wait_until_training(wait_until, has_trained):
    """A function that waits until all workers have trained together 200 minibatches."""
    return lambda: wait_until(lambda: has_trained(200), 60, "training")


def test_fit_is_complete_after_python_worker_is_killed(
    slow_fit, victims, wait_until_training, tmp_path
):
    fit, _ = slow_fit(run_log=tmp_path / "run.jsonl")
    wait_until_training()
    victims.kill(victims.workers()[0])
    summary = fit.result(timeout=120)
    check_nothing_lost(summary)
    assert any("silent" in text or "another attempt" in text for text in summary.departures)
    fault = next(fault for fault in summary.faults if fault.what == "worker lost")
    assert 0 < fault.seconds < summary.seconds
    page = render_report(read_history(tmp_path / "run.jsonl"))
    assert page.count('class="plot"') == PLOTS
    assert f"worker lost: partition {fault.partition} on {fault.host}" in page


def test_fit_is_complete_after_executor_media_driver_is_killed(
    slow_fit, victims, wait_until_training
):
    fit, _ = slow_fit()
    wait_until_training()
    victims.kill(victims.media_driver_of_executor())
    check_nothing_lost(fit.result(timeout=120))


def test_fit_is_complete_after_executor_is_killed(slow_fit, victims, wait_until_training):
    fit, _ = slow_fit()
    wait_until_training()
    victims.kill(victims.executors()[0])
    summary = fit.result(timeout=150)
    check_nothing_lost(summary)
    assert len(summary.departures) >= 2


def test_fit_is_complete_after_driver_media_driver_is_killed(
    slow_fit, victims, wait_until_training
):
    fit, _ = slow_fit()
    wait_until_training()
    others = {victims.media_driver_of_executor()}
    own = [pid for pid in victims.media_drivers() if pid not in others]
    for pid in own:
        victims.kill(pid)
    summary = fit.result(timeout=120)
    check_nothing_lost(summary)
