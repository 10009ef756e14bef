"""Rows per second from a DataFrame to minibatches, and how long a step waits for them.

    python -m benchmarks.feed --rows 200000 --features 64 --json

The table is Parquet on local disk, with two partitions for two Python workers.

    ours            what ``fit`` does: shuffle and order the rows, then take one epoch of
                    minibatches; also spilled to disk, and from exported files
    toPandas        the whole table on the driver by Arrow, and a loop that cuts out minibatches
    pyarrow         one process reads the Parquet files, and nothing else
    waiting_share   the share of the training steps that is spent on getting the minibatch, in a fit
                    of a ``[features, 256, 256, 10]`` network
    peak_mib        the largest peak of resident memory (VmHWM) of Spark's Python workers after a
                    fit of one epoch with ``batch_memory_bytes`` of 16 MiB. The rows of a worker
                    have 0.25, 5 and 20 times this size, in this order, as a peak never falls
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sparkstrom import SharedTrainingMaster, SparkNetwork
from sparkstrom.data.column_selection import ColumnSpec
from sparkstrom.data.row_blocks import BlockReader
from sparkstrom.data.row_store import MEMORY_MIN_BYTES, Batches, RowStore
from sparkstrom.models import DenseNetwork, Sgd
from sparkstrom.spark.data.export import export_rows, partition_export
from sparkstrom.spark.data.partitioning import PartitionedData, create_source, partition_source

BATCH_ROWS = 64
WORKERS = 2
MEMORY_BYTES = 512 << 20
WIDE = 1024  # features of a row when memory is measured


def main() -> int:
    """Print one line per measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000, help="rows of the table")
    parser.add_argument("--features", type=int, default=64, help="floats of a row")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    args = parser.parse_args()
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    with tempfile.TemporaryDirectory() as directory:
        for result in measure_all(args, Path(directory)):
            print(json.dumps(result) if args.json else format_result(result), flush=True)
    return 0


def measure_all(args: argparse.Namespace, directory: Path) -> Iterator[dict[str, Any]]:
    """Measure everything in one Spark application, and yield the figures."""
    from pyspark.sql import SparkSession

    path = directory / "table"
    write_table(path, args.rows, args.features)
    session = (
        SparkSession.builder.master(f"local[{WORKERS}]")
        .appName("sparkstrom benchmark")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.memory", "3g")
        .config("spark.sql.execution.arrow.pyspark.enabled", "true")  # makes toPandas fast
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    try:
        # Peaks first, before other measurements raise them.
        yield from (measure_peak(session, times) for times in (0.25, 5, 20))
        frame = session.read.parquet(str(path))
        chosen = ColumnSpec()

        def partition_rows() -> PartitionedData:  # for each run, as Spark reuses an RDD's shuffle
            return partition_source(create_source(frame, chosen), WORKERS, 0, move=True)

        read_epoch(partition_rows(), MEMORY_BYTES)  # starts Python workers, and compiles kernels
        feeds: dict[str, Callable[[], float]] = {
            "pyarrow, reading alone": lambda: read_parquet(path),
            "toPandas and a loop": lambda: loop_over_pandas(frame),
            "ours, direct": lambda: read_epoch(partition_rows(), MEMORY_BYTES),
            "ours, direct, spilled": lambda: read_epoch(partition_rows(), MEMORY_MIN_BYTES),
        }
        for way, feed in feeds.items():
            yield time_feed(way, args.rows, feed)
        began_s = time.perf_counter()
        made = export_rows(frame, chosen, WORKERS, partition_rows(), str(directory))
        yield {
            "way": "ours, writing the export",
            **compute_rates(args.rows, time.perf_counter() - began_s),
        }
        files = partition_export(session.sparkContext, made)
        yield time_feed("ours, from the export", args.rows, lambda: read_epoch(files, MEMORY_BYTES))
        yield measure_waiting(session, frame, args.features)
    finally:
        session.stop()


def write_table(path: Path, rows: int, features: int) -> None:
    """Write a Parquet table of ``features`` (array<float>) and ``label``, a file per worker."""
    import pyarrow as pa
    from pyarrow import parquet

    path.mkdir()
    chance = np.random.default_rng(0)
    for part in range(WORKERS):
        count = rows // WORKERS
        flat = pa.array(chance.random(count * features, np.float32))
        offsets = pa.array(np.arange(0, count * features + 1, features, dtype=np.int32))
        lists = pa.ListArray.from_arrays(offsets, flat)
        labels = pa.array(chance.integers(0, 10, count))
        table = pa.table({"features": lists, "label": labels})
        parquet.write_table(table, path / f"{part}.parquet", compression="snappy")


def read_parquet(path: Path) -> float:
    """Read and decode all Parquet files; return the sum of the labels."""
    from pyarrow import parquet

    total = 0.0
    for file in sorted(path.iterdir()):
        total += parquet.read_table(file, use_threads=False)["label"].to_numpy().sum()
    return total


def loop_over_pandas(frame: Any) -> float:
    """Load the table into the driver, and loop over shuffled minibatches."""
    table = frame.toPandas()
    order = np.random.default_rng(0).permutation(len(table))
    total = 0.0
    for first in range(0, len(order), BATCH_ROWS):
        rows = table.iloc[order[first : first + BATCH_ROWS]]
        features = np.stack(rows["features"].to_list()).astype(np.float32)
        total += rows["label"].to_numpy().sum() + features[0, 0]
    return total


def read_epoch(spread: PartitionedData, memory_bytes: int) -> float:
    """Read one epoch of minibatches in the workers."""
    read = partial(read_partition, spread.blocks, memory_bytes)
    return float(spread.rdd.mapPartitionsWithIndex(read).sum())


def read_partition(
    blocks: BlockReader, memory_bytes: int, index: int, items: Iterable[Any]
) -> Iterator[float]:
    """Store a partition's rows, and read one epoch of minibatches, as a worker does in a fit."""
    directory = os.environ.get("SPARK_LOCAL_DIRS", "/tmp").split(",")[0]
    store = RowStore(memory_bytes, Path(directory))
    for block in blocks(index, items):
        store.add(block.form, block.records)
    batches = Batches.from_store(store.finish(), batch_rows=BATCH_ROWS, seed=0, partition=index)
    yield sum(float(batches.get(0, i).labels.sum()) for i in range(batches.batches_per_epoch))  # type: ignore[union-attr]
    batches.close()


def measure_peak(session: Any, times: float) -> dict[str, Any]:
    """Train on rows of ``times`` the memory limit; return the largest Python worker's peak."""
    from pyspark.sql import functions as sql

    rows = int(times * MEMORY_MIN_BYTES * WORKERS) // (4 * WIDE + 8)
    wide = sql.array_repeat(sql.rand(0).cast("float"), WIDE).alias("features")
    frame = session.range(0, rows, 1, WORKERS).select(wide, sql.expr("id % 2 as label"))
    master = SharedTrainingMaster(
        batch_size_per_worker=BATCH_ROWS, batch_memory_bytes=MEMORY_MIN_BYTES
    )
    model = DenseNetwork([WIDE, 2], updater=Sgd(1e-3))
    network = SparkNetwork(session, model, master, progress=False)
    began_s = time.perf_counter()
    summary = network.fit(frame)
    seconds = time.perf_counter() - began_s
    network.close()
    workers = session.sparkContext.parallelize(range(4 * WORKERS), 4 * WORKERS)
    # Spark reuses the fit's processes.
    peaks = workers.mapPartitions(read_peak_bytes).collect()
    return {
        "way": f"a fit of {times:g} times the limit",
        "rows": summary.rows,
        "spilled_mib": summary.spilled_bytes >> 20,
        "seconds": round(seconds, 1),
        "peak_mib": max(peaks) >> 20,
    }


def read_peak_bytes(_: Iterable[Any]) -> Iterator[int]:
    """Yield the peak of this process's resident memory (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    yield next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) << 10


def time_feed(way: str, rows: int, feed: Callable[[], float]) -> dict[str, Any]:
    """Time ``feed`` twice; return the figures of the faster run."""
    seconds = []
    for _ in range(2):
        began_s = time.perf_counter()
        feed()
        seconds.append(time.perf_counter() - began_s)
    return {"way": way, **compute_rates(rows, min(seconds))}


def compute_rates(rows: int, seconds: float) -> dict[str, float]:
    """Return the seconds, and the rows per second."""
    return {"seconds": round(seconds, 3), "rows_per_s": round(rows / seconds)}


def measure_waiting(session: Any, frame: Any, features: int) -> dict[str, Any]:
    """Train once; return the share of the steps that was spent on getting minibatches."""
    model = DenseNetwork([features, 256, 256, 10], updater=Sgd(0.01))
    master = SharedTrainingMaster(collect_training_stats=True, batch_size_per_worker=BATCH_ROWS)
    network = SparkNetwork(session, model, master, progress=False)
    summary = network.fit(frame.limit(40_000), epochs=1)
    network.close()
    spent = summary.worker_seconds.values()
    reading = sum(s.get("reading", 0.0) for s in spent)
    steps = sum(s.get(part, 0.0) for s in spent for part in ("reading", "stepping", "encoding"))
    return {"way": "waiting for minibatches in a fit", "waiting_share": round(reading / steps, 5)}


def format_result(result: dict[str, Any]) -> str:
    """Return a result as text."""
    if "waiting_share" in result:
        return f"{result['way']:<34}{result['waiting_share']:.2%} of a step"
    if "peak_mib" in result:
        return f"{result['way']:<34}{result['peak_mib']:>12,} MiB at the peak of a Python worker"
    return f"{result['way']:<34}{result['rows_per_s']:>12,} rows/s"


if __name__ == "__main__":
    sys.exit(main())
