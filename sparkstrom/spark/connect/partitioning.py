"""Distribute a DataFrame over one partition per worker, without RDDs.

Rows are assigned to workers by the same function as with a SparkContext (``distribute_rows``). They
are pickled, split into pieces and shuffled by a key that Spark hashes to the worker's partition.

Each partition is sorted after the shuffle. Spark must fetch the whole partition to sort it, so a
fetch that fails does so before the task reads the first row. An end mark, which is sent with the
rows, is sorted to the end; if a task does not find the mark, its input was truncated.

The module also overrides settings of the session temporarily, such as the size of Arrow batches.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from sparkstrom.base.errors import SetupError
from sparkstrom.data.arrow_conversion import read_batch_blocks
from sparkstrom.data.column_selection import ColumnSpec, check_column_spec
from sparkstrom.data.row_blocks import Block, BlockReader, ShuffleBlock, distribute_rows
from sparkstrom.spark.connect.jobs import (
    RESULT_SCHEMA,
    ArrowBatches,
    ConnectJob,
    count_rows,
    get_partition_id,
    make_batch,
    run_short_job,
)
from sparkstrom.spark.data.column_selection import select_columns
from sparkstrom.spark.data.partitioning import (
    ARROW_BATCH_ROWS_KEY,
    FIRST_ELEMENTS,
    PartitionedData,
    choose_message_rows,
    choose_row_limit,
    require_rows,
    run_with_timeout,
)

if TYPE_CHECKING:
    import pyarrow as pa

PIECE_BYTES = 32 << 10  # up to maxRecordsPerBatch pieces (at most 1,000) are in memory at once
BATCH_ROWS_MAX = 1_000
KEY_CANDIDATES_PER_WORKER = 20  # in addition to log(workers); enough to find all workers' keys

SHUFFLE_SCHEMA = (
    "key long, worker long, source long, number long, piece long, pieces long, content binary"
)
SORT_COLUMNS = ("source", "number", "piece")
END_MARK = (1 << 62, 0, 0)  # sorts after every source


class WorkerDataFrame(NamedTuple):
    """The DataFrame that a fit's tasks read, with one partition per worker."""

    frame: Any  # the DataFrame
    batch_rows: int  # maximum number of the user's rows in one Arrow batch


def partition_dataframe(
    frame: Any, spec: ColumnSpec, workers: int, *, seed: int, move: bool
) -> PartitionedData:
    """Return the rows, distributed over one partition per worker.

    If ``move`` is True, rows are shuffled randomly, by ``seed``. Otherwise they stay where they
    are: partitions are merged only if there are more than ``workers``, and a job counts their rows.
    Raise UsageError if that job finds none.
    """
    check_column_spec(spec, dataframe=True)
    selected, plan = select_columns(frame, spec)
    blocks = partial(read_batch_blocks, plan)
    rows_at_once = choose_batch_rows(frame)
    first = partial(read_first_blocks, selected, blocks)
    if move:
        worker_frame = WorkerDataFrame(_shuffle_rows(selected, blocks, workers, seed), rows_at_once)
        return PartitionedData(worker_frame, read_shuffled_blocks, workers, first=first)
    kept = selected.coalesce(workers)
    rows = tuple(run_short_job(kept.mapInArrow(count_rows, RESULT_SCHEMA), "counting rows"))
    require_rows(rows)
    return PartitionedData(WorkerDataFrame(kept, rows_at_once), blocks, len(rows), rows, first)


def read_first_blocks(frame: Any, blocks: BlockReader) -> Iterator[Block]:
    """Yield some rows in this program, for a trial step that finds errors before training.

    ``blocks`` reads rows from Arrow batches of ``frame``. Yield no rows if the server fails or
    takes too long to compute them. Raise UsageError for a row that cannot be read.
    """
    group = f"sparkstrom-first-{secrets.token_hex(8)}"
    runner = partial(_to_arrow_batches, frame.limit(FIRST_ELEMENTS))
    return blocks(0, run_with_timeout(ConnectJob(frame.sparkSession, group, runner)))


def _to_arrow_batches(frame: Any) -> list[Any]:
    """Return a frame's rows as Arrow record batches in this program."""
    batches: list[Any] = frame.toArrow().to_batches()  # fails in Spark 3.5: then no rows are read
    return batches


def _shuffle_rows(frame: Any, blocks: BlockReader, workers: int, seed: int) -> Any:
    """Return a DataFrame of the pickled rows of ``frame``, shuffled to workers by ``seed``.

    ``blocks`` reads the rows. The last row of each worker's partition is an end mark.
    """
    from pyspark.sql.connect import functions as sql

    keys = find_partition_keys(frame.sparkSession, workers)
    assigned = frame.mapInArrow(partial(write_shuffle_rows, blocks, keys, seed), SHUFFLE_SCHEMA)
    ends = frame.sparkSession.range(0, workers, 1, 1)
    key = sql.element_at(sql.array(*map(sql.lit, keys)), sql.col("id").cast("int") + 1)
    marks = [
        sql.lit(value).cast("long").alias(name)
        for value, name in zip(END_MARK, SORT_COLUMNS, strict=True)
    ]
    ends = ends.select(
        key.cast("long").alias("key"),
        sql.col("id").alias("worker"),
        *marks,
        sql.lit(1).cast("long").alias("pieces"),
        sql.lit(b"").alias("content"),
    )
    return assigned.union(ends).repartition(workers, "key").sortWithinPartitions(*SORT_COLUMNS)


def find_partition_keys(session: Any, workers: int) -> list[int]:
    """Return, for each worker, a number that Spark's hash assigns to the worker's partition.

    A Spark job computes the hashes of candidates. Raise SetupError if a worker gets no number.
    """
    candidates = math.ceil(workers * (math.log(workers) + KEY_CANDIDATES_PER_WORKER))
    partition = f"pmod(hash(id), {workers})"
    rows = session.range(candidates).selectExpr("id", f"{partition} place").groupBy("place")
    found = {row.place: row.key for row in rows.agg({"id": "min"}).toDF("place", "key").collect()}
    missing = [worker for worker in range(workers) if worker not in found]
    if missing:
        raise SetupError(
            f"Spark's hash sends none of {candidates} numbers to partition {missing[0]}"
        )
    return [found[worker] for worker in range(workers)]


def write_shuffle_rows(
    blocks: BlockReader, keys: list[int], seed: int, batches: ArrowBatches
) -> Iterator[pa.RecordBatch]:
    """Yield one source partition's rows, pickled, for all workers. Runs on an executor.

    ``keys`` contains, for each worker, the number by which Spark shuffles rows to that worker.
    """
    source = get_partition_id()
    for worker, shuffle_block in distribute_rows(blocks, len(keys), seed, source, batches):
        content = pickle.dumps(shuffle_block, protocol=5)
        pieces = range(0, len(content), PIECE_BYTES)
        yield make_batch(
            SHUFFLE_SCHEMA,
            [keys[worker]] * len(pieces),
            [worker] * len(pieces),
            [source] * len(pieces),
            [shuffle_block.number] * len(pieces),
            list(range(len(pieces))),
            [len(pieces)] * len(pieces),
            [content[begin : begin + PIECE_BYTES] for begin in pieces],
        )


def check_worker(row: Mapping[str, Any], partition: int) -> None:
    """Raise SetupError if a shuffled row belongs to a worker other than ``partition``."""
    if row["worker"] != partition:
        raise SetupError(
            f"rows of worker {row['worker']} came to partition {partition}: this cluster's "
            "Spark hashes rows differently in a shuffle; report this as a bug"
        )


def read_shuffled_blocks(partition: int, batches: Iterable[Any]) -> Iterator[Block]:
    """Yield the blocks of rows that were shuffled to a worker.

    Raise the error that a source partition found in its rows; at the end, raise EOFError if rows
    are missing.
    """
    content: list[bytes] = []
    expected: dict[int, int] = {}  # by source: the number of its next shuffle block
    has_ended = False
    for row in iterate_rows(batches):
        check_worker(row, partition)
        if (row["source"], row["number"], row["piece"]) == END_MARK:
            has_ended = True
            break
        content.append(row["content"])
        if len(content) < row["pieces"]:
            continue
        shuffle_block: ShuffleBlock = pickle.loads(b"".join(content))
        content = []
        if shuffle_block.number != expected.get(shuffle_block.source, 0):
            break
        expected[shuffle_block.source] = shuffle_block.number + 1
        if shuffle_block.refusal is not None:
            raise shuffle_block.refusal
        if shuffle_block.block is not None and len(shuffle_block.block.records):
            yield shuffle_block.block
    if not has_ended:
        raise EOFError(f"the rows of partition {partition} are incomplete: Spark recomputes them")


def iterate_rows(batches: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Yield each row of the batches as a dictionary by column name."""
    for batch in batches:
        yield from batch.to_pylist()


_SETTINGS_LOCK = threading.Lock()
_holders: Counter[tuple[str, str]] = Counter()  # overriding blocks, by (session, key)
_original_values: dict[tuple[str, str], str | None] = {}  # by (session, key); None: was not set


def choose_batch_rows(frame: Any) -> int:
    """Return how many rows an Arrow batch of ``frame`` may have, given its columns' types."""
    return min(choose_message_rows(frame), BATCH_ROWS_MAX)


def limit_batch_rows(session: Any, rows: int) -> AbstractContextManager[None]:
    """Limit the rows of the session's Arrow batches during the block, so that they fit into memory.

    Spark reads this setting when a stage starts. Other jobs of the session also get small batches,
    which costs them little. If the user has set a lower limit, that limit stays.
    """
    return _override_setting(session, ARROW_BATCH_ROWS_KEY, partial(choose_row_limit, rows))


@contextlib.contextmanager
def override_settings(session: Any, settings: Mapping[str, str]) -> Iterator[None]:
    """Set some of the session's settings to other values during the block, then restore them."""
    with contextlib.ExitStack() as stack:
        for key, value in settings.items():
            stack.enter_context(_override_setting(session, key, partial(_constant, value)))
        yield


def _constant(value: str, current: str | None) -> str:
    """Return ``value`` and ignore the setting's current value."""
    return value


@contextlib.contextmanager
def _override_setting(session: Any, key: str, value: Callable[[str | None], str]) -> Iterator[None]:
    """Override a setting during the block. Of concurrent blocks, the last to end restores it.

    ``value`` computes the new value from the current value, which is None if none is set.
    """
    setting = str(session.session_id), key
    with contextlib.ExitStack() as stack:
        with _SETTINGS_LOCK:
            current = session.conf.get(key, None)
            if not _holders[setting]:
                _original_values[setting] = current
            _holders[setting] += 1
            # Before ``set``: an interrupted call may have taken effect.
            stack.callback(_release_setting, session, key)
            session.conf.set(key, value(current))
        yield


def _release_setting(session: Any, key: str) -> None:
    """End one override of a setting; restore the original value if no other one is left."""
    setting = str(session.session_id), key
    with _SETTINGS_LOCK:
        _holders[setting] -= 1
        if not _holders[setting]:
            original = _original_values.pop(setting)
            if original is None:
                session.conf.unset(key)
            else:
                session.conf.set(key, original)
