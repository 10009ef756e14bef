"""Tests of Structured Streaming: each micro-batch is a fit of one network, in Spark's thread."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkstrom import SharedTrainingMaster, SparkNetwork
from sparkstrom.fit import checkpoints as fit_checkpoints
from sparkstrom.models import DenseNetwork, Nesterov
from sparkstrom.streams import each_batch

SCHEMA = "features array<float>, label int"
LIMIT_S = 300


class Stream:
    """A folder of arriving files, and a query that reads one file for each micro-batch."""

    def __init__(self, spark: Any, folder: Path) -> None:
        self._spark, self._folder, self._files = spark, folder, 0
        (folder / "arriving").mkdir()

    def put(self, rows: list[tuple[list[float], int]]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        features, labels = zip(*rows, strict=True) if rows else ((), ())
        table = pa.table(
            {
                "features": pa.array(features, pa.list_(pa.float32())),
                "label": pa.array(labels, pa.int32()),
            }
        )
        path = self._folder / f"{self._files}.parquet"
        pq.write_table(table, path)
        # Spark orders files by their time in milliseconds, so times must differ.
        os.utime(path, (self._files + 1, self._files + 1))
        path.rename(self._folder / "arriving" / path.name)
        self._files += 1

    def run(self, call: Callable[[Any, int], None]) -> Any:
        """Run the query until all files have been read; raise its error if it fails."""
        query = (
            self._spark.readStream.schema(SCHEMA)
            .option("maxFilesPerTrigger", 1)
            .parquet(str(self._folder / "arriving"))
            .writeStream.foreachBatch(call)
            .option("checkpointLocation", str(self._folder / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        try:
            assert query.awaitTermination(LIMIT_S), "the query takes too long"
        finally:
            query.stop()
        return query


class RecordingListener:
    """A listener that records the begin and the end of fits."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def on_fit_begin(self, event: Any) -> None:
        self.heard.append("begin")

    def on_fit_end(self, event: Any) -> None:
        self.heard.append("end")


@pytest.fixture
def stream(spark: Any, tmp_path: Path) -> Stream:
    return Stream(spark, tmp_path)


def make_rows(rows: int, seed: int) -> list[tuple[list[float], int]]:
    chance = np.random.default_rng(seed)
    features = chance.random((rows, 8), np.float32)
    return [(x.tolist(), int(x.argmax() % 4)) for x in features]


def make_small_network(spark: Any, **options: Any) -> SparkNetwork:
    model = DenseNetwork([8, 16, 4], updater=Nesterov(0.1), seed=1)
    return SparkNetwork(spark, model, SharedTrainingMaster(**options), progress=False)


@pytest.mark.slow
def test_each_micro_batch_continues_previous_fit(spark: Any, stream: Stream) -> None:
    """Each micro-batch with rows is a fit that continues from the previous one."""
    for seed, rows in enumerate((64, 96, 0, 32)):
        stream.put(make_rows(rows, seed))
    network, hearing = make_small_network(spark), RecordingListener()
    told: list[tuple[int, int, int]] = []
    parameters, threads = [network.parameters], set()

    def tell(batch: int, summary: Any) -> None:
        told.append((batch, summary.rows, summary.grants))
        parameters.append(network.parameters)
        threads.add(threading.current_thread())
        assert summary.replicas_equal

    stream.run(each_batch(network, tell, epochs=2, listeners=[hearing], run_log=""))
    network.close()
    # The third has no rows and no fit; later fits get residuals and momentum of earlier ones.
    assert told == [(0, 64, 0), (1, 96, 4), (3, 32, 4)]
    assert hearing.heard == ["begin", "end"] * 3
    assert threading.main_thread() not in threads
    for before, after in itertools.pairwise(parameters):
        assert np.abs(after - before).max() > 0


@pytest.mark.slow
def test_failed_fit_ends_query_with_its_message(spark: Any, stream: Stream) -> None:
    """If a fit fails, the query ends with the fit's error message."""
    from pyspark.errors import StreamingQueryException

    stream.put(make_rows(32, 0))
    stream.put([([0.5] * 8, 7)])
    network = make_small_network(spark)
    fits: list[int] = []
    call = each_batch(network, lambda batch, summary: fits.append(batch), run_log="")
    with pytest.raises(StreamingQueryException, match="label"):
        stream.run(call)
    assert fits == [0]
    network.close()


@pytest.mark.slow
def test_repeated_micro_batch_is_trained_once_with_checkpoints(
    spark: Any, stream: Stream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If Spark repeats a micro-batch, because it lost its commit, the fit's checkpoint is used."""
    directory = str(tmp_path / "checkpoints")
    for seed in range(2):
        stream.put(make_rows(64, seed))
    first = make_small_network(spark, checkpoint_directory=directory)
    stream.run(each_batch(first, epochs=2, run_log=""))
    learnt = first.parameters
    first.close()
    for name in ("1", ".1.crc"):
        (tmp_path / "checkpoint" / "commits" / name).unlink()
    stream.put(make_rows(64, 2))
    told: list[tuple[int, bool]] = []

    def tell(batch: int, summary: Any) -> None:
        told.append((batch, summary.resumed_from is not None))
        if batch == 1:
            np.testing.assert_array_equal(again.parameters, learnt)

    monkeypatch.setattr(fit_checkpoints, "_directory_owners", {})  # another program
    again = make_small_network(spark, checkpoint_directory=directory)
    stream.run(each_batch(again, tell, epochs=2, run_log=""))
    assert told == [(1, True), (2, False)]
    assert np.abs(again.parameters - learnt).max() > 0
    again.close()


@pytest.mark.slow
def test_restarted_query_does_not_train_micro_batch_twice(spark: Any, stream: Stream) -> None:
    """Spark repeats the micro-batch under another run id, and only the callback is called again."""
    stream.put(make_rows(32, 0))
    network, hearing, told = make_small_network(spark), RecordingListener(), list[tuple[int, int]]()

    def tell(batch: int, summary: Any) -> None:
        told.append((batch, summary.rows))
        if len(told) == 1:
            raise RuntimeError("the callback fails once")

    train = each_batch(network, tell, listeners=[hearing], run_log="")
    with pytest.raises(Exception, match="the callback fails once"):
        stream.run(train)
    trained = network.parameters
    stream.run(train)
    assert told == [(0, 32), (0, 32)]
    assert hearing.heard == ["begin", "end"]
    np.testing.assert_array_equal(network.parameters, trained)
    network.close()
