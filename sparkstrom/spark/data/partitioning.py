"""Distribute users' data over one partition per worker, and add the user's held-out rows.

Rows are shuffled randomly, by a seed, so that all partitions have about the same number of rows, or
they stay where they are. Executors read every kind of data as an iterator of ``Block``, a group of
rows. A DataFrame is read as an RDD of Arrow messages that Spark's JVM writes. pyspark's own
functions are unsuitable: in versions 3.5 and 4.0 ``mapInArrow`` imports pandas, and ``toArrow``
collects all rows on the driver.

``HeldOutFrames`` unites training rows with a separate DataFrame of rows for evaluation.
``draw_sample`` and ``read_first_blocks`` return a few rows.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import shown
from sparkstrom.data.arrow_conversion import count_arrow_rows, read_arrow_blocks
from sparkstrom.data.column_selection import ColumnSpec, check_column_spec
from sparkstrom.data.row_blocks import (
    Block,
    BlockReader,
    count_rows,
    distribute_rows,
    read_row_blocks,
    read_shuffle_blocks,
)
from sparkstrom.data.row_sample import RowSample, merge_samples, sample_partition
from sparkstrom.options.parameter_averaging import IF_COUNT_DIFFERS, TrainingMaster
from sparkstrom.protocol.master.phases import NO_ROWS
from sparkstrom.spark.data.column_selection import (
    DENSE_WIDTH_MAX,
    find_fields,
    get_vector_width,
    is_image,
    is_vector,
    select_columns,
)
from sparkstrom.spark.jobs import SparkJob, translate_job_errors

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructField


ARROW_BATCH_ROWS_KEY = "spark.sql.execution.arrow.maxRecordsPerBatch"
_CONF_LOCK = threading.Lock()  # held while a session's configuration is changed temporarily
# Rows of an Arrow message, which is in memory as a whole, and the size to aim at.
MESSAGE_ROWS_MIN, MESSAGE_ROWS_MAX, MESSAGE_BYTES = 32, 10_000, 4 << 20
# Assumed sizes of values; arrays and images that are larger make larger messages.
NUMBER_BYTES, ARRAY_BYTES, IMAGE_BYTES = 8, 32 << 10, 128 << 10


class RowSource(NamedTuple):
    """A user's data as an RDD, with functions that read a partition on an executor."""

    rdd: RDD[Any]  # its elements are rows, or Arrow messages of many rows
    blocks: BlockReader  # converts a partition's elements to blocks
    count: Callable[[Any], Any]  # yields the number of rows in a partition's elements
    is_batched: bool = False  # whether elements are messages of many rows


class PartitionedData(NamedTuple):
    """A user's data, distributed over one partition per worker.

    ``rows`` contains each partition's number of rows, if rows were not shuffled. Shuffled
    partitions contain their own row counts.
    """

    rdd: Any  # an RDD, or, for Spark Connect, a ``WorkerDataFrame``
    blocks: BlockReader  # converts a partition's elements to blocks
    workers: int  # number of partitions
    rows: tuple[int, ...] = ()  # by partition, or empty
    first: Callable[[], Iterator[Block]] | None = None  # reads some rows in the calling process


def is_dataframe(data: Any) -> bool:
    """Return whether ``data`` is a Spark DataFrame, without importing pyspark."""
    return hasattr(data, "mapInArrow")


def check_data(data: Any) -> None:
    """Raise UsageError unless ``data`` is an RDD or a DataFrame that is not streaming."""
    if getattr(data, "isStreaming", False) is True:
        raise UsageError(
            "data is a streaming DataFrame, which has no last row: read a table, or train on each"
            " micro-batch by stream.writeStream.foreachBatch(each_batch(network)), with each_batch"
            " of sparkstrom.streams, where validation is a table; to evaluate, call"
            " network.evaluate in a function for foreachBatch"
        )
    if not (is_dataframe(data) or hasattr(data, "mapPartitions")):
        raise UsageError(
            f"data is a {type(data).__module__}.{type(data).__name__}: pass an RDD of (features, "
            "label) or a Spark DataFrame with features=... and label=... columns; "
            "spark.createDataFrame(...) makes one of a pandas DataFrame or a list of rows"
        )


def check_columns(data: Any, columns: ColumnSpec) -> None:
    """Raise UsageError unless ``data`` has these columns, with suitable types; run no Spark job."""
    check_column_spec(columns, is_dataframe(data))
    if is_dataframe(data):
        find_fields(data, columns)


def create_source(data: Any, columns: ColumnSpec) -> RowSource:
    """Return a RowSource for an RDD of rows or a DataFrame. Raise UsageError for other data."""
    check_data(data)
    check_column_spec(columns, is_dataframe(data))
    if not is_dataframe(data):
        return RowSource(data, read_row_blocks, count_rows)
    frame, plan = select_columns(data, columns)
    return RowSource(
        to_arrow_rdd(frame),
        partial(read_arrow_blocks, plan),
        partial(count_arrow_rows, plan),
        is_batched=True,
    )


def partition_source(source: RowSource, workers: int, seed: int, *, move: bool) -> PartitionedData:
    """Return the rows, distributed over one partition per worker.

    If ``move`` is True, rows are shuffled randomly, by ``seed``. Otherwise they stay where they
    are: partitions are merged only if there are more than ``workers``, and a job counts their rows.
    Raise UsageError if that job counts no rows.
    """
    rdd = source.rdd
    if move:
        assigned = rdd.mapPartitionsWithIndex(
            partial(distribute_rows, source.blocks, workers, seed)
        )
        shuffled: RDD[Any] = assigned.partitionBy(workers, int).values()
        return PartitionedData(
            shuffled, partial(read_shuffle_blocks, rdd.getNumPartitions()), workers
        )
    kept = rdd if rdd.getNumPartitions() <= workers else rdd.coalesce(workers)
    with translate_job_errors("counting rows"):
        rows = tuple(kept.mapPartitions(source.count).collect())
    require_rows(rows)
    return PartitionedData(kept, source.blocks, len(rows), rows)


def require_rows(rows: tuple[int, ...]) -> None:
    """Raise UsageError if no partition has a row, or if there are no partitions.

    Data without partitions can be the result of an empty join, for example.
    """
    if not any(rows):
        raise UsageError(NO_ROWS.format(len(rows)))


def draw_sample(source: RowSource, rows: int, seed: int) -> RowSample:
    """Return at most ``rows`` random rows, chosen by ``seed``; raise UsageError if none exist."""
    draw = partial(sample_partition, source.blocks, rows, seed)
    with translate_job_errors("sampling rows"):
        parts = source.rdd.mapPartitionsWithIndex(draw).collect()
    return merge_samples(parts, rows, seed)


def to_arrow_rdd(frame: DataFrame) -> RDD[bytes]:
    """Return an RDD with a DataFrame's rows as Arrow record batches, without their schema."""
    from pyspark import RDD
    from pyspark.serializers import NoOpSerializer

    with limit_message_rows(frame.sparkSession.conf, choose_message_rows(frame)):
        jrdd = frame._jdf.toArrowBatchRdd().toJavaRDD()
    return RDD(jrdd, frame.sparkSession.sparkContext, NoOpSerializer())


@contextlib.contextmanager
def limit_message_rows(conf: Any, rows: int) -> Iterator[None]:
    """Limit Spark's Arrow messages to ``rows`` rows inside the ``with`` block.

    Only one thread at a time can be inside such a block, because all change the same setting.
    """
    with _CONF_LOCK:
        original = conf.get(ARROW_BATCH_ROWS_KEY)
        conf.set(ARROW_BATCH_ROWS_KEY, choose_row_limit(rows, original))
        try:
            yield
        finally:
            conf.set(ARROW_BATCH_ROWS_KEY, original)


def choose_row_limit(rows: int, current: str | None) -> str:
    """Return the smaller of ``rows`` and Spark's current limit; None, 0 or less mean no limit."""
    return str(min(int(current), rows) if current is not None and int(current) > 0 else rows)


def choose_message_rows(frame: DataFrame) -> int:
    """Return how many rows an Arrow message may have, so that it fits into memory.

    The number depends on the number and the types of the DataFrame's columns.
    """
    row_bytes = sum(map(_estimate_bytes, frame.schema))
    return min(MESSAGE_ROWS_MAX, max(MESSAGE_ROWS_MIN, MESSAGE_BYTES // max(1, row_bytes)))


def _estimate_bytes(field: StructField) -> int:
    """Return the size of a column's values, as far as its type shows it."""
    from pyspark.sql.types import ArrayType, BinaryType

    kind, depth = field.dataType, 0
    while isinstance(kind, ArrayType):
        kind, depth = kind.elementType, depth + 1
    if is_image(kind) or isinstance(kind, BinaryType) or depth > 2:
        return IMAGE_BYTES
    if is_vector(kind):
        width = get_vector_width(field)
        return width * NUMBER_BYTES if 0 < width <= DENSE_WIDTH_MAX else ARRAY_BYTES
    return ARRAY_BYTES if depth else NUMBER_BYTES


FIRST_ROWS_TIMEOUT_S = 10.0  # if the first rows take longer to compute, they are not used
FIRST_ELEMENTS = 8  # number of rows to read; if elements are Arrow messages, one is read
FIRST_ROWS_JOB = "sparkstrom reads the first rows"


def read_first_blocks(context: Any, source: RowSource) -> Iterator[Block]:
    """Yield some rows of the first partition that has any, for a trial step before training.

    Yield no rows if Spark fails or takes too long to compute them. Raise UsageError for a row that
    cannot be read.
    """
    count = 1 if source.is_batched else FIRST_ELEMENTS
    group = f"sparkstrom-first-{secrets.token_hex(8)}"
    runner = partial(_find_first_elements, context, source.rdd, count)
    found = run_with_timeout(SparkJob(context, group, runner, description=FIRST_ROWS_JOB))
    for index, elements in found[:1]:
        yield from source.blocks(index, elements)


def _find_first_elements(context: Any, rdd: Any, count: int) -> list[tuple[int, list[Any]]]:
    """Return (index, its first elements) of partitions that have any; [] if none has.

    As ``RDD.take`` does, read one partition first, then four times as many in each further job.
    """
    first, total = rdd.mapPartitionsWithIndex(partial(_take, count)), rdd.getNumPartitions()
    found: list[tuple[int, list[Any]]] = []
    begin, partitions = 0, 1
    while begin < total and not found:
        end = min(begin + partitions, total)
        found = context.runJob(first, list, range(begin, end))
        begin, partitions = end, 4 * partitions
    return found


def _take(count: int, index: int, elements: Iterable[Any]) -> Iterator[tuple[int, list[Any]]]:
    """Yield (index, the first ``count`` elements) of a partition that has any."""
    if first := list(islice(elements, count)):
        yield index, first


def run_with_timeout(job: SparkJob) -> list[Any]:
    """Run a job; return its results, or [] if it fails or exceeds ``FIRST_ROWS_TIMEOUT_S``."""
    job.start()
    try:
        is_done = job.wait(FIRST_ROWS_TIMEOUT_S)
    except BaseException:
        job.cancel()
        raise
    if not is_done:
        job.cancel()
        return []
    return [] if job.error is not None else job.reports


HELD_OUT_COLUMN = "sparkstrom_held_out"  # name of the column that marks held-out rows in a union


class HeldOutFrames:
    """Unites a DataFrame of training rows with one of held-out rows, and caches the last union.

    A boolean column marks the held-out rows, so partitioning, export and evaluation work as if the
    user had named such a column as ``validation``. The next fit on the same DataFrames reuses the
    union and its export.
    """

    def __init__(self, check: Callable[[Any], None]) -> None:
        """Store ``check``, which raises UsageError for data that the application cannot read."""
        self._check = check
        # What the last union was made of: data, held-out rows, columns, ``keep_partitions``.
        self._last: tuple[DataFrame, DataFrame, list[str], bool] | None = None
        self._made: tuple[DataFrame, str] | None = None  # that union, and its marking column

    def unite(
        self, data: Any, columns: ColumnSpec, validation: Any, repartition: str
    ) -> tuple[Any, ColumnSpec]:
        """Return the data united with the rows of ``validation``, and the columns to read.

        If ``validation`` is a fraction, a column's name or None, the data are returned unchanged.
        ``repartition`` is the training option: "never" means that rows stay in their partitions.
        Raise UsageError for a DataFrame of held-out rows that does not match the data.
        """
        if not (is_dataframe(validation) or hasattr(validation, "mapPartitions")):
            self._last = self._made = None
            return data, columns._replace(validation=validation)
        check_column_spec(columns, dataframe=is_dataframe(data))
        self._check_frames(data, validation)
        fields = find_fields(data, columns)
        _check_same_types(fields, validation, columns)
        names, keep_partitions = list(fields), repartition == "never"
        if self._made is None or not self._is_last(
            data, validation, names, keep_partitions=keep_partitions
        ):
            self._made = _unite_frames(data, validation, names, keep_partitions=keep_partitions)
            self._last = (data, validation, names, keep_partitions)
        frame, mark = self._made
        return frame, columns._replace(validation=mark)

    def _is_last(self, data: Any, held: Any, names: list[str], *, keep_partitions: bool) -> bool:
        """Return whether the last union had these data, held-out rows, columns and partitioning."""
        if self._last is None:
            return False
        last_data, last_held, *rest = self._last
        return last_data is data and last_held is held and rest == [names, keep_partitions]

    def partitioning_options(self, master: TrainingMaster, data: Any) -> TrainingMaster:
        """Return the training options to use for partitioning ``data``.

        A union has the partitions of both DataFrames, so their number does not show whether the
        user's data have one partition per worker. For a union,
        ``repartition="num_partitions_workers_differs"`` is therefore replaced by "always".
        """
        counted = master.repartition == IF_COUNT_DIFFERS
        if not counted or self._made is None or data is not self._made[0]:
            return master
        return replace(master, repartition="always")

    def _check_frames(self, data: Any, held: Any) -> None:
        """Raise UsageError unless ``data`` and ``held`` are both non-streaming DataFrames."""
        self._check(data)
        if not is_dataframe(held):
            raise UsageError(
                f"validation={shown(held)}: held-out rows cannot be an RDD; make a DataFrame of"
                " them, and one of the data, too (toDF), or give a fraction such as 0.1"
            )
        try:
            self._check(held)
        except UsageError as error:
            raise UsageError(f"validation: {error}") from None
        if not is_dataframe(data):
            raise UsageError(
                "validation: held-out rows are a DataFrame, and the data are an RDD: make a"
                " DataFrame of the data, too (toDF), or give a fraction such as 0.1"
            )
        if type(held) is not type(data):
            raise UsageError(
                "validation: held-out rows are a DataFrame of a different session than data, one"
                " over Spark Connect and one not: make both with one session"
            )


def _check_same_types(fields: dict[str, StructField], held: Any, columns: ColumnSpec) -> None:
    """Raise UsageError unless the held-out rows have the data's ``fields``, with the same types."""
    try:
        theirs = find_fields(held, columns)
    except UsageError as error:
        raise UsageError(
            f"validation: {error}. Held-out rows need the columns that the fit reads of the data,"
            f" with the same names: {', '.join(fields)}"
        ) from None
    for name, field in fields.items():
        mine, other = field.dataType, theirs[name].dataType
        if (type(mine), mine.simpleString()) != (type(other), other.simpleString()):
            wanted = mine.simpleString()
            raise UsageError(
                f"validation: column {name!r} is {other.simpleString()} among the held-out rows and"
                f" {wanted} in the data: give both one type, such as"
                f" frame.withColumn({name!r}, frame[{name!r}].cast({wanted!r}))"
            )


def _unite_frames(
    data: Any, held: Any, names: list[str], *, keep_partitions: bool
) -> tuple[Any, str]:
    """Return the union of both DataFrames, and the name of the column that marks rows of ``held``.

    The union has the columns ``names`` and the mark. If rows stay in their partitions
    (``keep_partitions``), the held-out rows form a single partition, so that at most one worker has
    no rows to train on.
    """
    from pyspark.sql import functions as sql

    column = HELD_OUT_COLUMN
    while column.lower() in {name.lower() for name in names}:
        column += "_"
    quoted = ["`" + name.replace("`", "``") + "`" for name in names]
    parts = [
        frame.select(*quoted, sql.lit(is_held).alias(column))
        for frame, is_held in ((data, False), (held.coalesce(1) if keep_partitions else held, True))
    ]
    return parts[0].unionByName(parts[1]), column
