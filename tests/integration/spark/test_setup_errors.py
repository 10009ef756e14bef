"""Tests of faults of the machine or the cluster: errors come early, with value and reason."""

from __future__ import annotations

import socket
import time

import pytest

from sparkstrom import VoidConfiguration
from sparkstrom.base.errors import SetupError, UsageError
from sparkstrom.transport.aeron.library import LIBRARY_VARIABLE


def test_taken_port_error_names_port(spark, digits, make_network):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        network = make_network(void=VoidConfiguration(unicast_port=port))
        with pytest.raises(SetupError, match=str(port)):
            network.fit(spark.sparkContext.parallelize(digits.rows()[:100], 4))


def test_unmatched_mask_error_lists_addresses(spark, digits, make_network):
    network = make_network(void=VoidConfiguration(network_mask="203.0.113.0/24"))
    with pytest.raises(SetupError, match=r"203\.0\.113\.0/24.*127\.0\.0\.1"):
        network.fit(spark.sparkContext.parallelize(digits.rows()[:100], 4))


def test_fit_with_too_few_workers_raises_setup_error(
    spark, digits, make_network, in_background, tmp_path
):
    context, enough = spark.sparkContext, tmp_path / "enough"

    def take_a_slot(_):
        until_s = time.monotonic() + 60
        while not enough.exists() and time.monotonic() < until_s:
            time.sleep(0.05)

    hog = in_background(context.parallelize(range(2), 2).map(take_a_slot).count)
    network = make_network(min_workers=4, start_timeout=3.0)
    with pytest.raises(SetupError, match=r"2 workers joined.*min_workers is 4"):
        network.fit(context.parallelize(digits.rows()[:200], 2), epochs=1)
    enough.touch()
    hog.result(60)


def test_more_workers_than_slots_are_refused(make_network, spark, digits):
    with pytest.raises(UsageError, match=r"workers_per_node=3.*2 task slots"):
        make_network(workers_per_node=3).fit(spark.sparkContext.parallelize(digits.rows(), 2))


def test_two_concurrent_fits_in_one_application_succeed(spark, digits, make_network, in_background):
    rows = spark.sparkContext.parallelize(digits.rows()[:400], 4).cache()
    fits = [in_background(make_network(workers_per_node=1).fit, rows, epochs=3) for _ in range(2)]
    for fit in fits:
        summary = fit.result(120)
        assert summary.replicas_equal
        assert summary.minibatches == summary.minibatches_expected
        assert len(summary.hashes) == 3


def test_missing_aeron_library_fails_fit_before_compilation(
    spark, digits, make_network, tmp_path, monkeypatch
):
    """If workers lack Aeron's library, the fit fails before they compile kernels."""
    context = spark.sparkContext
    # For new Python workers only: this program has already loaded its library.
    monkeypatch.setitem(context.environment, LIBRARY_VARIABLE, "/nowhere/libaeron.so")
    monkeypatch.setitem(context.environment, "NUMBA_CACHE_DIR", str(tmp_path))
    with pytest.raises(SetupError) as refused:
        make_network().fit(context.parallelize(digits.rows()[:100], 4))
    assert str(refused.value).startswith(f"on {socket.gethostname()}: /nowhere/libaeron.so")
    assert f"{LIBRARY_VARIABLE} names it: correct that" in str(refused.value)
    assert "\n" not in str(refused.value)
    assert list(tmp_path.rglob("*.nbc")) == []
