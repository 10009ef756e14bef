"""Tests of parameter averaging on real executors: the results equal those of one process."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from pyspark import TaskContext

from sparkstrom import EarlyStopping, ParameterAveragingTrainingMaster, SparkNetwork
from sparkstrom.base.errors import TrainingError, UsageError
from sparkstrom.data.row_blocks import read_row_blocks
from sparkstrom.fit import checkpoints as fit_checkpoints
from sparkstrom.models import Adam, DenseNetwork, Nesterov, Sgd
from sparkstrom.planning.memory import PieceSizes
from sparkstrom.spark import classic_application
from sparkstrom.spark.data.partitioning import PartitionedData
from sparkstrom.spark.rounds import rdd
from tests.integration.averaged_rounds import fit_in_one_process, join_batches, rounds_of_fit

ROWS = (70, 64, 40, 34)  # of the partitions: some workers have fewer minibatches
SMALL = PieceSizes(piece=4096, part=10_000, direct=0, collected=20_000, targets=10)


def master_of(**options):
    options = {"repartition": "never", "batch_size_per_worker": 16} | options
    return ParameterAveragingTrainingMaster(**options)


@pytest.fixture(scope="module")
def parts(digits):
    """Features and labels of each partition."""
    edges = np.cumsum((0, *ROWS))
    return [
        (digits.features[first:end], digits.labels[first:end].astype(np.int64))
        for first, end in itertools.pairwise(edges)
    ]


@pytest.fixture(scope="module")
def data(spark, parts):
    rows = [list(zip(x, map(int, y), strict=True)) for x, y in parts]
    one_by_one = spark.sparkContext.parallelize(range(4), 4)
    return one_by_one.flatMap(lambda index: rows[index])


def test_averaging_every_step_equals_training_on_all_rows(spark, data, parts, monkeypatch):
    """SGD, averaged every step, equals one machine within 1e-6; small pieces change no bit."""
    model, master = (
        DenseNetwork([64, 32, 10], updater=Sgd(0.2), seed=1),
        master_of(averaging_frequency=1),
    )
    alone, reference = copy.deepcopy(model), model.initial()
    alone.bind(reference)
    for turns in rounds_of_fit(parts, master, 2):
        alone.step(join_batches([turn.batch for own in turns for turn in own]))
    network = SparkNetwork(spark, model, master, progress=False)
    summary = network.fit(data, epochs=2)
    assert np.abs(network.parameters - reference).max() < 1e-6
    assert summary.replicas_equal
    assert summary.minibatches == summary.minibatches_expected == 2 * (5 + 4 + 3 + 3)
    assert summary.examples == 2 * sum(ROWS)
    assert summary.rows == sum(ROWS)
    assert summary.updates == 10  # rounds
    assert summary.workers == 4
    assert [epoch.epoch for epoch in summary.history] == [1, 2]
    assert summary.bytes_sent == 30 * 4 * model.n_params
    assert summary.bytes_by_kind["averages"] == summary.bytes_sent
    assert summary.loss < 2.3
    again = SparkNetwork(spark, model, master, progress=False)
    with monkeypatch.context() as small:
        small.setattr(rdd, "SIZES", SMALL)
        again.fit(data, epochs=2)
    assert (again.parameters == network.parameters).all()


def shuffle_files(spark):
    """Return the shuffle files of all executors, listed by Python workers."""

    def look(rows):
        time.sleep(0.3)  # so that no executor gets all tasks
        folders = os.environ["SPARK_LOCAL_DIRS"].split(",")
        yield from (str(f) for folder in folders for f in Path(folder).glob("*/shuffle_*"))

    return set(spark.sparkContext.parallelize(range(8), 8).mapPartitions(look).collect())


def test_shuffle_files_of_rounds_are_removed_soon(spark, data, monkeypatch):
    """Shuffle files are removed soon, not only at the JVM's garbage collection."""
    monkeypatch.setattr(rdd, "SIZES", SMALL)
    before = shuffle_files(spark)
    seen = spark.sparkContext.parallelize([(1, 1)], 1).partitionBy(3)
    assert seen.count() == 1
    others = shuffle_files(spark)
    assert others - before  # so shuffle_files sees new files
    model = DenseNetwork([64, 32, 10], updater=Sgd(0.1), seed=1)
    network = SparkNetwork(spark, model, master_of(averaging_frequency=2), progress=False)
    first_id = spark.sparkContext._jsc.sc().newShuffleId()
    network.fit(data, epochs=4)
    assert spark.sparkContext._jsc.sc().newShuffleId() > first_id + 4  # each epoch shuffles
    until_s = time.monotonic() + 30
    while left := shuffle_files(spark) - others:
        assert time.monotonic() < until_s, left


class ExecutorKiller:
    """A listener that kills an executor after some minibatches."""

    def __init__(self, victims, minibatches):
        self._victims, self._minibatches = victims, minibatches
        self.killed = 0

    def on_iteration(self, event):
        if event.minibatches >= self._minibatches and not self.killed:
            self.killed = self._victims.executors()[0]
            self._victims.kill(self.killed)


def test_killed_executor_does_not_change_parameters(spark, data, parts, victims, monkeypatch):
    """A fit in which an executor is killed has the same parameters as one process."""
    monkeypatch.setattr(rdd, "SIZES", SMALL)
    model, master = (
        DenseNetwork([64, 32, 10], updater=Adam(), seed=1),
        master_of(averaging_frequency=2),
    )
    reference, killing = fit_in_one_process(model, parts, master, 3), ExecutorKiller(victims, 20)
    network = SparkNetwork(spark, model, master, progress=False)
    summary = network.fit(data, epochs=3, listeners=[killing])
    assert killing.killed
    assert killing.killed not in victims.executors()
    assert (network.parameters == reference).all()
    assert summary.minibatches == summary.minibatches_expected == 45


def test_a_python_process_that_dies_is_named(spark, data, tmp_path):
    """Before, a summary of rounds had only that Spark repeated a task."""
    flag = tmp_path / "died"

    class DyingOnce(DenseNetwork):
        """A model whose first step on an executor ends the process, as if memory had run out."""

        def step(self, batch):
            if TaskContext.get() is not None:
                with contextlib.suppress(FileExistsError):
                    flag.touch(exist_ok=False)
                    os.kill(os.getpid(), signal.SIGKILL)
            return super().step(batch)

    network = SparkNetwork(spark, DyingOnce([64, 10], seed=1), master_of(), progress=False)
    summary = network.fit(data)
    text = "the Python process of partition "
    assert any(each.startswith(text) for each in summary.warnings), summary.warnings
    assert summary.minibatches == summary.minibatches_expected


@pytest.mark.parametrize(("depth", "save_updater"), [(1, True), (3, True), (1, "own"), (2, "own")])
def test_parameters_do_not_depend_on_aggregation_depth(
    spark, data, parts, monkeypatch, depth, save_updater
):
    """The parameters do not depend on the depth of the aggregation tree."""
    monkeypatch.setattr(rdd, "SIZES", SMALL)
    model = DenseNetwork([64, 32, 10], updater=Nesterov(0.1), seed=1)
    options = {"aggregation_depth": depth, "save_updater": save_updater}
    master = master_of(averaging_frequency=5, **options)
    network = SparkNetwork(spark, model, master, progress=False)
    network.fit(data)
    assert np.allclose(network.parameters, fit_in_one_process(model, parts, master, 1), atol=1e-7)


@pytest.fixture
def one_thread():
    """Limit torch to one thread, as in workers, because its rounding depends on the threads."""
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("save_updater", "outer"), [(True, None), (False, Sgd(0.9)), ("own", Nesterov(0.7, 0.9))]
)
def test_torch_rounds_with_adam_and_batch_norm_equal_one_process(
    spark, data, parts, one_thread, save_updater, outer
):
    """Rounds of a torch model with Adam and BatchNorm have the parameters of one process."""
    torch = pytest.importorskip("torch")
    from functools import partial

    from torch import nn

    from sparkstrom.models.torch import TorchModel

    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(64, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 10))
    model = TorchModel(
        module,
        nn.CrossEntropyLoss(),
        partial(torch.optim.Adam, lr=0.01),
        scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=4, gamma=0.5),
        scheduler_interval="step",
    )
    master = master_of(averaging_frequency=2, save_updater=save_updater, outer=outer)
    reference = fit_in_one_process(copy.deepcopy(model), parts, master, 2)
    network = SparkNetwork(spark, model, master, progress=False)
    summary = network.fit(data, epochs=2)
    assert np.allclose(network.parameters, reference, atol=2e-6)
    vectors = 3 if save_updater else 1
    assert summary.bytes_sent > 2 * 9 * vectors * 4 * model.n_params
    assert network.module.state_dict()["1.num_batches_tracked"] > 0


class StoppingListener:
    """A listener that ends a fit once a checkpoint is written."""

    def __init__(self):
        self.written = 0

    def on_checkpoint(self, event):
        self.written += 1
        raise RuntimeError("enough")


def test_resumed_rounds_equal_uninterrupted_fit(spark, data, parts, tmp_path, monkeypatch):
    """A resumed fit has equal results, with own optimizers and the outer step's velocity."""
    model = DenseNetwork([64, 32, 10], updater=Adam(), seed=1)
    master = master_of(
        averaging_frequency=2,
        save_updater="own",
        outer=Nesterov(0.7, 0.9),
        checkpoint_directory=str(tmp_path),
        checkpoint_every="4 updates",
    )
    reference = fit_in_one_process(model, parts, master, 4)
    stopping = StoppingListener()
    with pytest.raises(TrainingError, match="enough"):
        SparkNetwork(spark, model, master, progress=False).fit(data, epochs=4, listeners=[stopping])
    monkeypatch.setattr(fit_checkpoints, "_directory_owners", {})  # as in another program
    network = SparkNetwork(spark, model, master, progress=False)
    summary = network.fit(data, epochs=4)
    assert summary.resumed_from
    assert 0 < summary.minibatches_resumed < summary.minibatches == 4 * 15
    assert (network.parameters == reference).all()
    assert [epoch.epoch for epoch in summary.history] == [1, 2, 3, 4]
    assert all("evens them out" in text for text in summary.warnings)


def test_early_stopping_selects_commit_of_best_epoch(spark, digits):
    """A fit that early stopping ends returns the parameters of the best epoch's own commit."""
    rows = spark.sparkContext.parallelize(digits.rows()[:400], 2)
    fresh = DenseNetwork([64, 32, 10], updater=Sgd(3.0), seed=1)
    master = ParameterAveragingTrainingMaster(averaging_frequency=2, batch_size_per_worker=8)
    network = SparkNetwork(spark, copy.deepcopy(fresh), master, progress=False)
    rule = EarlyStopping(patience=2)
    summary = network.fit(rows, epochs=30, validation=0.2, early_stopping=rule)
    assert summary.stopped
    assert summary.best is not None
    assert summary.rows_held_out > 40
    losses = {epoch.epoch: epoch.validation for epoch in summary.history}
    assert min(losses, key=losses.get) == summary.best.epoch == max(losses) - 2
    assert summary.best.commit == summary.best.epoch * (summary.updates // max(losses))
    so_far = SparkNetwork(spark, copy.deepcopy(fresh), master, progress=False)
    so_far.fit(rows, epochs=summary.best.epoch, validation=0.2)
    assert (network.parameters == so_far.parameters).all()


def test_errors_name_partition_and_activity(spark, data, digits):
    """Errors in rows, losses and a user's code name the partition and the activity, once."""
    master = master_of(averaging_frequency=2)
    wide = DenseNetwork([63, 10], seed=1)
    with pytest.raises(UsageError, match="64 features, the network takes 63"):
        SparkNetwork(spark, wide, master, progress=False).fit(data)
    wild = DenseNetwork([64, 32, 10], updater=Sgd(1e30), seed=1)
    with pytest.raises(TrainingError, match=r"the loss is .* \(partition \d on .*, training\)"):
        SparkNetwork(spark, wild, master, progress=False).fit(data, epochs=3)

    class FailsWhenMeasured(DenseNetwork):  # executors cannot import tests
        def loss(self, batch):
            raise ValueError("no loss")

    sorry = FailsWhenMeasured([64, 32, 10], seed=1)
    with pytest.raises(
        TrainingError, match=r"^ValueError: no loss \(partition 0 on .*, measuring\)"
    ) as caught:
        SparkNetwork(spark, sorry, master, progress=False).fit(data, validation=0.3)
    assert str(caught.value).count("no loss") == 1
    with pytest.raises(UsageError, match="partitions are empty"):
        SparkNetwork(spark, wild, master, progress=False).fit(data.filter(lambda row: False))


@pytest.mark.flips(
    "ParameterAveragingTrainingMaster.rdd_training_approach",
    "ParameterAveragingTrainingMaster.export_directory",
    "ParameterAveragingTrainingMaster.collect_training_stats",
    "ParameterAveragingTrainingMaster.start_timeout",
)
def test_exported_rows_give_same_parameters_and_worker_seconds(
    spark, data, parts, tmp_path, monkeypatch
):
    """A fit with exported rows has the same parameters, and reports its workers' seconds."""
    waited, wait = [], classic_application.await_slots
    monkeypatch.setattr(
        classic_application,
        "await_slots",
        lambda context, seconds, say: waited.append(seconds) or wait(context, seconds, say),
    )
    model = DenseNetwork([64, 32, 10], updater=Sgd(0.2), seed=1)
    exports = {"rdd_training_approach": "export", "export_directory": str(tmp_path)}
    master = master_of(collect_training_stats=True, start_timeout=33.0, **exports)
    network = SparkNetwork(spark, model, master, progress=False)
    summary = network.fit(data)
    assert waited == [33.0]
    assert summary.export_directory.startswith(str(tmp_path))
    assert {"stepping", "reading"} <= set(summary.worker_seconds["1"])
    assert (network.parameters == fit_in_one_process(model, parts, master, 1)).all()
    network.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.flips("ParameterAveragingTrainingMaster.storage_level")
def test_rows_are_kept_between_epochs(spark, data):
    """Rows are persisted for fits of several epochs, unless storage_level is None."""
    spread = PartitionedData(data, read_row_blocks, 4, ROWS)
    with rdd.persist_rows(spread, master_of(storage_level="DISK_ONLY"), 2) as kept:
        assert kept.rdd.getStorageLevel().useDisk
        assert not kept.rdd.getStorageLevel().useMemory
        assert kept.rdd.map(lambda row: row[1]).sum() == data.map(lambda row: row[1]).sum()
    assert not kept.rdd.getStorageLevel().useDisk
    assert not data.is_cached
    for options, epochs in (({"storage_level": None}, 2), ({}, 1)):
        with rdd.persist_rows(spread, master_of(**options), epochs) as kept:
            assert kept.rdd is data
