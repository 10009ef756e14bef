"""Connect spread: a DataFrame over one partition per worker, without RDDs.

Rows are dealt as on the classic path (``shuffle_blocks``), pickled, cut, and shuffled by a key
that Spark hashes to the worker's partition. Behind the shuffle Spark sorts: so it has fetched a
partition as a whole before a task sees its first row, and the last row is an end that was put
there. A worker whose input breaks off knows it by that.
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
from sparkstrom.spark.connect.binary_rows import SCHEMA
from sparkstrom.spark.connect.connect_jobs import ConnectJob, answers_of
from sparkstrom.spark.connect.connect_tasks import Batches, count_rows, task_number
from sparkstrom.spark.data.arrow import blocks_of_batches
from sparkstrom.spark.data.columns import Chosen, check_chosen, chosen_columns
from sparkstrom.spark.data.partitioning import BATCH_ROWS, Spread, rows_of_a_message
from sparkstrom.spark.data.row_blocks import Block
from sparkstrom.spark.data.shuffle_blocks import Blocks, ShuffleBlock, deal
from sparkstrom.spark.driver.first_rows import ELEMENTS, answers_in_time

if TYPE_CHECKING:
    import pyarrow as pa

PIECE_BYTES = 32 << 10  # a thousand of them, or what maxRecordsPerBatch says, are in memory at once
BATCH_ROWS_MAX = 1_000
NUMBERS_PER_WORKER = 20  # candidates for keys, beside those that chance wants

DEALT = "key long, worker long, source long, number long, piece long, pieces long, content binary"
ORDER = ("source", "number", "piece")
END = (1 << 62, 0, 0)  # no source has this number


class FrameOfBlocks(NamedTuple):
    """What a fit's tasks read."""

    frame: Any
    batch_rows: int  # of the user's rows, which are read in the same job


def spread_frame(frame: Any, chosen: Chosen, workers: int, *, seed: int, move: bool) -> Spread:
    """Rows at random and balanced, or partitions as they are, merged where there are too many."""
    check_chosen(chosen, dataframe=True)
    wanted, reading = chosen_columns(frame, chosen)
    blocks = partial(blocks_of_batches, reading)
    rows_at_once = batch_rows_of(frame)
    first = partial(first_blocks, wanted, blocks)
    if move:
        made = FrameOfBlocks(_dealt(wanted, blocks, workers, seed), rows_at_once)
        return Spread(made, blocks_in_order, workers, first=first)
    kept = wanted.coalesce(workers)
    rows = tuple(answers_of(kept.mapInArrow(count_rows, SCHEMA), "counting rows"))
    return Spread(FrameOfBlocks(kept, rows_at_once), blocks, len(rows), rows, first)


def first_blocks(wanted: Any, blocks: Blocks) -> Iterator[Block]:
    """Some rows, where the server computes them soon. Raise UsageError for one that is unfit."""
    group = f"sparkstrom-first-{secrets.token_hex(8)}"
    runner = partial(_record_batches, wanted.limit(ELEMENTS))
    return blocks(0, answers_in_time(ConnectJob(wanted.sparkSession, group, runner)))


def _record_batches(frame: Any) -> list[Any]:
    batches: list[Any] = frame.toArrow().to_batches()  # not in Spark 3.5: then there are none
    return batches


def _dealt(wanted: Any, blocks: Blocks, workers: int, seed: int) -> Any:
    from pyspark.sql.connect import functions as sql

    keys = keys_of(wanted.sparkSession, workers)
    dealt = wanted.mapInArrow(partial(deal_batches, blocks, keys, seed), DEALT)
    ends = wanted.sparkSession.range(0, workers, 1, 1)
    key = sql.element_at(sql.array(*map(sql.lit, keys)), sql.col("id").cast("int") + 1)
    marks = [
        sql.lit(value).cast("long").alias(name) for value, name in zip(END, ORDER, strict=True)
    ]
    ends = ends.select(
        key.cast("long").alias("key"),
        sql.col("id").alias("worker"),
        *marks,
        sql.lit(1).cast("long").alias("pieces"),
        sql.lit(b"").alias("content"),
    )
    return dealt.union(ends).repartition(workers, "key").sortWithinPartitions(*ORDER)


def keys_of(session: Any, workers: int) -> list[int]:
    """For each worker a number that Spark's hash sends to its partition, as Spark itself says."""
    candidates = math.ceil(workers * (math.log(workers) + NUMBERS_PER_WORKER))
    place = f"pmod(hash(id), {workers})"
    rows = session.range(candidates).selectExpr("id", f"{place} place").groupBy("place")
    found = {row.place: row.key for row in rows.agg({"id": "min"}).toDF("place", "key").collect()}
    missing = [worker for worker in range(workers) if worker not in found]
    if missing:
        raise SetupError(
            f"Spark's hash sends none of {candidates} numbers to partition {missing[0]}"
        )
    return [found[worker] for worker in range(workers)]


def deal_batches(
    blocks: Blocks, keys: list[int], seed: int, batches: Batches
) -> Iterator[pa.RecordBatch]:
    """A source partition's rows, for all workers; runs on an executor."""
    source = task_number()
    for worker, dealt in deal(blocks, len(keys), seed, source, batches):
        content = pickle.dumps(dealt, protocol=5)
        pieces = range(0, len(content), PIECE_BYTES)
        yield _batch(
            [keys[worker]] * len(pieces),
            [worker] * len(pieces),
            [source] * len(pieces),
            [dealt.number] * len(pieces),
            list(range(len(pieces))),
            [len(pieces)] * len(pieces),
            [content[begin : begin + PIECE_BYTES] for begin in pieces],
        )


def _batch(*columns: list[Any]) -> pa.RecordBatch:
    import pyarrow as pa

    numbers, content = columns[:-1], columns[-1]
    arrays = [pa.array(column, pa.int64()) for column in numbers]
    names = [field.split()[0] for field in DEALT.split(", ")]
    return pa.RecordBatch.from_arrays([*arrays, pa.array(content, pa.binary())], names=names)


def blocks_in_order(partition: int, batches: Iterable[Any]) -> Iterator[Block]:
    """A worker's rows. Raise EOFError where some are missing in the end."""
    content: list[bytes] = []
    expected: dict[int, int] = {}  # by source: the number of its next shuffle block
    ended = False
    for row in _rows(batches):
        if row["worker"] != partition:
            raise SetupError(
                f"rows of worker {row['worker']} came to partition {partition}: this cluster's "
                "Spark hashes rows otherwise than it says"
            )
        if (row["source"], row["number"], row["piece"]) == END:
            ended = True
            break
        content.append(row["content"])
        if len(content) < row["pieces"]:
            continue
        dealt: ShuffleBlock = pickle.loads(b"".join(content))
        content = []
        if dealt.number != expected.get(dealt.source, 0):
            break
        expected[dealt.source] = dealt.number + 1
        if dealt.refusal is not None:
            raise dealt.refusal
        if dealt.block is not None and len(dealt.block.records):
            yield dealt.block
    if not ended:
        raise EOFError(f"the rows of partition {partition} broke off: Spark makes them again")


def _rows(batches: Iterable[Any]) -> Iterator[dict[str, Any]]:
    for batch in batches:
        yield from batch.to_pylist()


# -- a session's configuration while a fit runs ----------------------------------------------------

_LOCK = threading.Lock()
_held: Counter[tuple[str, str]] = Counter()  # fits by session and key
_before: dict[tuple[str, str], str | None] = {}  # what sessions had; None: nothing was set


def batch_rows_of(frame: Any) -> int:
    """How many of its rows may be in one Arrow batch."""
    return min(rows_of_a_message(frame), BATCH_ROWS_MAX)


def small_batches(session: Any, rows: int) -> AbstractContextManager[None]:
    """In the block Arrow batches of this session have so few rows that they fit into memory.

    Spark reads this when a stage begins, so it holds until the last one has. Other jobs of the
    session have small batches meanwhile, which costs them little.
    """

    def fewer(now: str | None) -> str:
        return str(min(int(now), rows) if now is not None and int(now) > 0 else rows)

    return _held_at(session, BATCH_ROWS, fewer)


@contextlib.contextmanager
def held_settings(session: Any, wanted: Mapping[str, str]) -> Iterator[None]:
    """In the block the session's configuration has these values."""
    with contextlib.ExitStack() as stack:
        for key, value in wanted.items():
            stack.enter_context(_held_at(session, key, partial(_whatever_is, value)))
        yield


def _whatever_is(value: str, now: str | None) -> str:
    return value


@contextlib.contextmanager
def _held_at(session: Any, key: str, value: Callable[[str | None], str]) -> Iterator[None]:
    """Put back when the last block that holds it ends; ``value`` is told what there is now."""
    here = str(session.session_id), key
    with _LOCK:
        now = session.conf.get(key, None)
        if not _held[here]:
            _before[here] = now
        _held[here] += 1
        session.conf.set(key, value(now))
    try:
        yield
    finally:
        with _LOCK:
            _held[here] -= 1
            if not _held[here]:
                before = _before.pop(here)
                if before is None:
                    session.conf.unset(key)
                else:
                    session.conf.set(key, before)
