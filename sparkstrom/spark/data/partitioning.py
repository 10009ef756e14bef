"""Partitioning: from what users have to one partition per worker, random and balanced by seed.

Whatever the data are, an executor sees an iterator of ``Block``. A DataFrame is an RDD of Arrow
messages, straight from the JVM: pyspark's ``mapInArrow`` and ``toArrow`` import pandas or collect
on the driver, the JVM's own Arrow writer does neither (3.5 and 4.0).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from sparkstrom.base.errors import UsageError
from sparkstrom.spark.data.arrow import blocks_of_arrow, count_arrow
from sparkstrom.spark.data.columns import Chosen, check_chosen, chosen_columns, is_image, is_vector
from sparkstrom.spark.data.job_errors import in_one_line
from sparkstrom.spark.data.row_blocks import Block, blocks_of_rows, count_rows
from sparkstrom.spark.data.shuffle_blocks import Blocks, blocks_from_shuffle, deal

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import DataFrame

BATCH_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"
_CONF = threading.Lock()  # a session's configuration is changed and put back by one at a time
NARROW_ROWS, ARRAY_ROWS, IMAGE_ROWS = 10_000, 1_000, 32  # rows of an Arrow message, by its widest


class Source(NamedTuple):
    """What a user's data are to executors."""

    rdd: RDD[Any]
    blocks: Blocks  # of a partition's elements
    count: Callable[[Any], Any]  # of its rows
    is_table: bool = False  # elements are messages of many rows


class Spread(NamedTuple):
    """The data over one partition per worker.

    Rows that stay where they are come as they are; then ``rows`` says how many each partition
    must have. Others come with their own count.
    """

    rdd: Any  # an RDD; over Spark Connect a ``FrameOfBlocks``
    blocks: Blocks
    workers: int
    rows: tuple[int, ...] = ()
    first: Callable[[], Iterator[Block]] | None = None  # some rows, in the calling process


def is_dataframe(data: Any) -> bool:
    """A Spark DataFrame, without importing pyspark for anything else."""
    return hasattr(data, "mapInArrow")


def check_data(data: Any) -> None:
    """Raise UsageError for what is neither."""
    if not (is_dataframe(data) or hasattr(data, "mapPartitions")):
        raise UsageError(
            f"data is a {type(data).__module__}.{type(data).__name__}: pass an RDD of (features, "
            "label) or a Spark DataFrame with features=... and label=... columns; "
            "spark.createDataFrame(...) makes one of a pandas DataFrame or a list of rows"
        )


def source_of(data: Any, chosen: Chosen) -> Source:
    """An RDD of rows, or a DataFrame as an RDD of Arrow messages. Raise UsageError for others."""
    check_data(data)
    check_chosen(chosen, is_dataframe(data))
    if not is_dataframe(data):
        return Source(data, blocks_of_rows, count_rows)
    frame, reading = chosen_columns(data, chosen)
    return Source(
        arrow_messages(frame),
        partial(blocks_of_arrow, reading),
        partial(count_arrow, reading),
        is_table=True,
    )


def spread_out(source: Source, workers: int, seed: int, *, move: bool) -> Spread:
    """Rows at random and balanced, or partitions as they are, merged where there are too many."""
    rdd = source.rdd
    if move:
        dealt = rdd.mapPartitionsWithIndex(partial(deal, source.blocks, workers, seed))
        shuffled: RDD[Any] = dealt.partitionBy(workers, int).values()
        return Spread(shuffled, partial(blocks_from_shuffle, rdd.getNumPartitions()), workers)
    kept = rdd if rdd.getNumPartitions() <= workers else rdd.coalesce(workers)
    with in_one_line("counting rows"):
        rows = tuple(kept.mapPartitions(source.count).collect())
    return Spread(kept, source.blocks, len(rows), rows)


def arrow_messages(frame: DataFrame) -> RDD[bytes]:
    """A DataFrame's partitions as Arrow record batches, each one message without its schema."""
    from pyspark import RDD
    from pyspark.serializers import NoOpSerializer

    with at_most(frame.sparkSession.conf, rows_of_a_message(frame)):
        jrdd = frame._jdf.toArrowBatchRdd().toJavaRDD()
    return RDD(jrdd, frame.sparkSession.sparkContext, NoOpSerializer())


@contextlib.contextmanager
def at_most(conf: Any, rows: int) -> Iterator[None]:
    """So many rows in a message, for now; fits in other threads of a session wait meanwhile."""
    with _CONF:
        before = conf.get(BATCH_ROWS)
        conf.set(BATCH_ROWS, str(min(int(before), rows)))
        try:
            yield
        finally:
            conf.set(BATCH_ROWS, before)


def rows_of_a_message(frame: DataFrame) -> int:
    """A message is in memory as a whole, in the JVM and in Python."""
    from pyspark.sql.types import ArrayType, BinaryType

    kinds = [field.dataType for field in frame.schema]
    if any(is_image(kind) or isinstance(kind, BinaryType) for kind in kinds):
        return IMAGE_ROWS
    wide = any(is_vector(kind) or isinstance(kind, ArrayType) for kind in kinds)
    return ARRAY_ROWS if wide else NARROW_ROWS
