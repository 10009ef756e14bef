"""Tests of fits on real executors, from rows to bit-equal replicas."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from sparkstrom import AdaptiveThreshold, SparkNetwork
from sparkstrom.base.errors import TrainingError, UsageError
from sparkstrom.models import Adam, DenseNetwork
from sparkstrom.spark.executor_slots import live_conf
from sparkstrom.worker import task_environment


def check_complete_fit(summary, epochs, workers=4):
    """Check that replicas are bit-equal and every minibatch of every epoch was committed once."""
    assert summary.replicas_equal, summary.hashes
    assert len(set(summary.hashes.values())) == 1
    assert "driver" in summary.hashes
    assert summary.minibatches == summary.minibatches_expected
    assert summary.epochs == epochs
    assert summary.exactness_breaches == 0


def test_fit_learns_digits_with_equal_replicas(spark, digits, make_network):
    network = make_network(threshold=AdaptiveThreshold(1e-3))
    data = spark.sparkContext.parallelize(digits.rows(), 3)
    summary = network.fit(data, epochs=12)
    check_complete_fit(summary, 12)
    assert len(summary.hashes) == 5  # four workers and the driver
    assert summary.examples == 12 * len(digits.labels)  # no row is dropped
    assert summary.bytes_dense == summary.minibatches * 4 * 64 * 32 + summary.minibatches * 4 * 362
    assert 0 < summary.bytes_sent < summary.bytes_dense / 10
    assert summary.bytes_wire > summary.bytes_sent
    features, labels = digits.held_out
    assert (network.predict(features).argmax(1) == labels).mean() > 0.9
    network.close()


def test_dataframe_fit_trains_all_rows(spark, digits, make_network):
    rows = [(f.tolist(), int(y)) for f, y in zip(digits.features, digits.labels, strict=True)]
    frame = spark.createDataFrame(rows[:400], "pixels array<double>, digit int")
    summary = make_network().fit(frame, epochs=2, features="pixels", label="digit")
    check_complete_fit(summary, 2)
    assert summary.examples == 800


def test_later_fits_continue_residuals_and_threshold(spark, digits, make_network):
    """Later fits continue with the workers' residuals, and with the adapted threshold.

    The updater's state is not compared here.
    """
    model = DenseNetwork([64, 32, 10], updater=Adam(), seed=1)
    adaptive = AdaptiveThreshold(1e-5)  # far too low: it rises at every publication
    network = make_network(model, threshold=adaptive)
    data = spark.sparkContext.parallelize(digits.rows(), 4).cache()
    for fit in range(3):
        summary = network.fit(data, epochs=2)
        check_complete_fit(summary, 2)
        assert summary.mass_lost == 0.0
        assert summary.grants == (4 if fit else 0)
    publications = 2 * 13  # at most, of one worker in one fit
    assert summary.tau > 1e-5 / adaptive.decay**publications  # out of reach for one fit alone
    network.close()


def test_network_without_keep_starts_each_fit_afresh(spark, digits):
    network = SparkNetwork(spark, DenseNetwork([64, 32, 10]), progress=False, keep=False)
    data = spark.sparkContext.parallelize(digits.rows()[:200], 4)
    for _ in range(2):
        summary = network.fit(data, epochs=1)
        check_complete_fit(summary, 1)
        assert summary.residual_norm > 0
        assert summary.grants == summary.mass_lost == 0


def test_workers_exclude_modules_from_garbage_collection(spark, digits, make_network):
    """Workers exclude their imported modules from garbage collection."""
    make_network().fit(spark.sparkContext.parallelize(digits.rows()[:200], 4), epochs=1)
    slots = spark.sparkContext.parallelize(range(4), 4)
    spared = slots.mapPartitions(lambda _: [task_environment._modules_frozen]).collect()
    assert max(spared) > 500


def test_fit_leaves_no_importer_in_worker(spark, digits, make_network):
    """A fit leaves no importer of sparkstrom in a worker, which also runs the user's code."""

    def foreign(rows):
        importers = sys.path_importer_cache.values()
        yield [name for name in {type(each).__module__ for each in importers} if "strom" in name]

    make_network().fit(spark.sparkContext.parallelize(digits.rows()[:200], 4), epochs=1)
    slots = spark.sparkContext.parallelize(range(4), 4)
    assert slots.mapPartitions(foreign).collect() == [[]] * 4


def test_live_conf_returns_current_values(spark):
    """live_conf returns the values that Spark's configuration has at the time of the call."""
    live = spark.sparkContext._jsc.sc().conf()
    live.set("spark.sparkstrom.a_test", "first")
    try:
        assert live_conf(spark.sparkContext).get("spark.sparkstrom.a_test") == "first"
        live.set("spark.sparkstrom.a_test", "second")
        assert live_conf(spark.sparkContext).get("spark.sparkstrom.a_test") == "second"
    finally:
        live.remove("spark.sparkstrom.a_test")


def test_training_on_replica_keeps_replicas_equal(spark, digits, make_network):
    """Replicas are equal if workers train on the replica, as in DL4J."""
    network = make_network(train_on="replica", threshold=AdaptiveThreshold(1e-3))
    summary = network.fit(spark.sparkContext.parallelize(digits.rows(), 4), epochs=3)
    check_complete_fit(summary, 3)


def test_saved_network_predicts_same_after_loading(spark, digits, make_network, tmp_path):
    network = make_network()
    network.fit(spark.sparkContext.parallelize(digits.rows()[:200], 4), epochs=1)
    network.save(tmp_path / "model.npz")
    with np.load(tmp_path / "model.npz") as plain:
        np.testing.assert_array_equal(plain["parameters"], network.parameters)
    again = SparkNetwork.load(tmp_path / "model.npz", spark)
    np.testing.assert_array_equal(again.parameters, network.parameters)
    features, _ = digits.held_out
    np.testing.assert_array_equal(again.predict(features), network.predict(features))


def make_exploding_class() -> type[DenseNetwork]:
    """Return a class that is pickled by value, because executors cannot import tests."""

    class Exploding(DenseNetwork):
        """A network that raises in its fifth step."""

        def step(self, batch):
            self.taken = getattr(self, "taken", 0) + 1
            if self.taken == 5:
                raise ZeroDivisionError("on purpose")
            return super().step(batch)

    return Exploding


def test_an_exception_in_training_ends_the_fit_with_its_cause(spark, digits, make_network):
    network = make_network(make_exploding_class()([64, 32, 10]))
    with pytest.raises(TrainingError, match="ZeroDivisionError: on purpose") as raised:
        network.fit(spark.sparkContext.parallelize(digits.rows(), 4), epochs=5)
    assert raised.value.partition in range(4)
    assert "in step" in raised.value.trace


def test_wrong_row_width_error_names_row_and_partition(spark, digits, make_network):
    rows = [*digits.rows()[:100], (np.zeros(63, np.float32), 1)]
    with pytest.raises(TrainingError, match=r"row 25 of partition 3 has features float32\[63\]"):
        make_network().fit(spark.sparkContext.parallelize(rows, 4), epochs=1)


def test_a_nan_loss_ends_the_fit(spark, digits, make_network):
    rows = [(np.full(64, 3e38, np.float32), 1)] * 64
    with pytest.raises(TrainingError, match=r"loss is|became"):
        make_network().fit(spark.sparkContext.parallelize(rows, 4), epochs=1)


def test_fit_without_rows_raises_usage_error(spark, make_network):
    with pytest.raises(UsageError, match="no rows"):
        make_network().fit(spark.sparkContext.parallelize([], 4), epochs=1)
