"""Run round-based training over Spark Connect, with DataFrames that hold binary records.

In a round, each worker trains some minibatches, and the results are averaged.
``spark.rounds.backend`` has the base class. A record is a byte string: a block of rows, a
minibatch, part of a round's result, or part of a payload (the parameters and other state with which
a round's tasks start).

Arrow batches are limited in rows, not in bytes, so a large record is split into pieces, one per row
of the DataFrame. DataFrames that several jobs read (workers' rows, minibatches and the results of a
round) are persisted as named temporary views. Spark recomputes lost partitions.

A small payload is part of the job's plan. A large one becomes temporary views of a few MiB each,
which exist until the round is over. One shuffle sends their rows to the tasks together with the
minibatches, sorted so that a task reads the payload first.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from sparkstrom.base.errors import SetupError, SparkstromError, TrainingError, UsageError
from sparkstrom.data.row_blocks import Block, BlockReader
from sparkstrom.planning.memory import PieceSizes
from sparkstrom.rounds.backend import PartitionFacts
from sparkstrom.rounds.worker_round import IncompleteInput
from sparkstrom.spark.connect.jobs import (
    INLINE_BYTES_MAX,
    RESULT_SCHEMA,
    ROW_BYTES_MAX,
    ArrowBatches,
    collect_later,
    encode_results,
    get_partition_id,
    make_batch,
    run_partition_task,
)
from sparkstrom.spark.connect.partitioning import (
    PIECE_BYTES,
    WorkerDataFrame,
    check_worker,
    find_partition_keys,
    iterate_rows,
    limit_batch_rows,
    override_settings,
)
from sparkstrom.spark.data.partitioning import PartitionedData
from sparkstrom.spark.rounds.array_exchange import PICKLE, PayloadParts
from sparkstrom.spark.rounds.backend import (
    CollectedTask,
    Fetch,
    RowsTask,
    RowsWritingTask,
    SparkRoundsBackend,
    WritingTask,
)
from sparkstrom.spark.rounds.tasks import RoundInput, SparkRoundsJob, StoredRounds

if TYPE_CHECKING:
    import pyarrow as pa

ReadRecords = Callable[[int, ArrowBatches], Iterator[bytes]]  # (partition, batches) -> records

RECORD_BATCH_ROWS = 32  # rows of one Arrow batch; a row has at most ``ROW_BYTES_MAX``

# Columns of the rows that form a record; a row contains piece number ``piece`` of ``pieces``.
INDEX_COLUMNS = ("worker", "phase", "number", "piece", "pieces")
RECORD_SCHEMA = ", ".join(f"{name} long" for name in INDEX_COLUMNS) + ", content binary"
SORT_COLUMNS = ("phase", "number", "piece")
PAIR_SCHEMA = "key long, content binary"  # a record, and the key that selects its partition
PART_SCHEMA = "number long, content binary"  # part of a payload


def split_record(
    worker: int, phase: int, number: int, content: bytes, piece_bytes: int
) -> pa.RecordBatch:
    """Return one record as a batch of rows, each with a piece of at most ``piece_bytes``.

    Args:
        worker: The worker that will read the record.
        phase: The record's round. Payloads have negative phases and so precede all rounds.
        number: Position of the record among the records of its phase.
        content: The record.
        piece_bytes: Maximum size of a piece.
    """
    offsets = range(0, max(1, len(content)), piece_bytes)
    count = len(offsets)
    constant_columns = ([value] * count for value in (worker, phase, number))
    pieces = [content[begin : begin + piece_bytes] for begin in offsets]
    return make_batch(RECORD_SCHEMA, *constant_columns, list(range(count)), [count] * count, pieces)


def read_records(index: int, batches: ArrowBatches) -> Iterator[bytes]:
    """Yield a worker's records, joined from pieces.

    ``index`` is the worker's partition. Raise IncompleteInput if a piece is missing, and SetupError
    for a row of another worker.
    """
    content: list[bytes] = []
    for row in iterate_rows(batches):
        check_worker(row, index)
        if row["piece"] != len(content):
            raise IncompleteInput(
                f"piece {len(content)} of a record did not reach partition {index}"
            )
        content.append(row["content"])
        if len(content) == row["pieces"]:
            yield b"".join(content)
            content = []
    if content:
        raise IncompleteInput(f"a record for partition {index} is incomplete")


def read_shuffled_records(index: int, batches: ArrowBatches) -> Iterator[bytes]:
    """Yield the records that tasks sent to this partition, one per row, in no defined order.

    ``index`` is not used.
    """
    for batch in batches:
        yield from batch.column("content").to_pylist()


def run_collected_task(
    read: ReadRecords, run: CollectedTask, batches: ArrowBatches
) -> Iterator[pa.RecordBatch]:
    """Run the task function ``run`` on the records that ``read`` returns; yield encoded results."""
    index = get_partition_id()
    return encode_results(run(index, read(index, batches)), index)


def run_writing_task(
    read: ReadRecords, written: WritingTask, keys: list[int], batches: ArrowBatches
) -> Iterator[pa.RecordBatch]:
    """Run the task function ``written`` on the records that ``read`` returns; yield what it writes.

    The function yields (target, record) pairs. Each record is written with the key of its target
    from ``keys``, which Spark hashes to the partition with the number ``target``.
    """
    index = get_partition_id()
    for target, content in written(index, read(index, batches)):
        yield make_batch(PAIR_SCHEMA, [keys[target]], [content])


def run_minibatch_task(
    task: RowsWritingTask,
    workers: int,
    first_phase: int,
    blocks: BlockReader,
    batches: ArrowBatches,
) -> Iterator[pa.RecordBatch]:
    """Run a task function that writes minibatches; yield these as rows that name their round.

    Args:
        task: Yields (target, minibatch) pairs; a target is a number for a round and a worker.
        workers: Number of workers, which is the number of targets per round.
        first_phase: The round of the first ``workers`` targets.
        blocks: Reads the worker's rows.
        batches: The Arrow batches that Spark passes to the task.
    """
    index, numbers = get_partition_id(), dict[int, int]()
    for target, content in task(blocks, index, batches):
        phase = first_phase + target // workers
        number = numbers[phase] = numbers.get(phase, -1) + 1
        yield split_record(index, phase, number, content, ROW_BYTES_MAX)


def run_caching_task(
    fit: int, blocks: BlockReader, batches: ArrowBatches
) -> Iterator[pa.RecordBatch]:
    """Read a worker's rows; yield them in pickled form, as rows that Spark will persist.

    An error in the rows is stored with them, and ``read_cached_blocks`` raises it. Spark shares one
    cache among identical DataFrames. The unused argument ``fit`` makes this one unique, so that it
    stays persisted when another fit unpersists its own DataFrame.
    """
    index = get_partition_id()
    for number, value in enumerate(_blocks_or_error(blocks, index, batches)):
        yield split_record(index, 0, number, pickle.dumps(value, PICKLE), PIECE_BYTES)


def _blocks_or_error(
    blocks: BlockReader, index: int, batches: ArrowBatches
) -> Iterator[Block | SparkstromError | int]:
    """Yield a worker's blocks and then their number, or instead an error found in the rows."""
    count = 0
    try:
        for block in blocks(index, batches):
            yield block
            count += 1
    except (UsageError, SetupError) as error:
        yield error
        return
    yield count


def read_cached_blocks(index: int, batches: Iterable[Any]) -> Iterator[Block]:
    """Yield the blocks of rows that ``run_caching_task`` stored.

    Raise the error that was stored, or EOFError if blocks are missing.
    """
    came, total = 0, -1
    for content in read_records(index, batches):
        value: Block | SparkstromError | int = pickle.loads(content)
        if isinstance(value, SparkstromError):
            raise value
        if isinstance(value, int):
            total = value
            continue
        came += 1
        yield value
    if came != total:
        raise EOFError(f"the rows of partition {index} are incomplete: Spark recomputes them")


VIEW_BYTES_MAX = 16 << 20  # a view is sent in one message; the server accepts 128 MiB


@dataclass(frozen=True, slots=True)
class InlineParts:
    """The parts of a small payload, which is contained in the job's plan."""

    content: bytes = field(repr=False)  # all parts, joined

    def contents(self, records: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the whole payload as one part; ``records`` is not used."""
        yield self.content

    def destroy(self) -> None:
        """Do nothing: the payload exists only as long as the job."""


class TemporaryViewParts:
    """The parts of a large payload, stored in temporary views.

    A task receives the views' rows as its first records.

    Args:
        names: The views' names; empty in tasks.
        count: Number of parts.
        drop: Drops a view by name; None in tasks.
    """

    def __init__(
        self, names: tuple[str, ...], count: int, drop: Callable[[str], None] | None = None
    ) -> None:
        self.names, self._count, self._drop = names, count, drop

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without the views' names, because only the driver program needs them."""
        return TemporaryViewParts, ((), self._count)

    def contents(self, records: Iterator[bytes]) -> Iterator[bytes]:
        """Return an iterator over the parts, which are the first items of ``records``."""
        return itertools.islice(records, self._count)

    def destroy(self) -> None:
        """Drop the views. Call this only in the driver program."""
        for name in self.names:
            assert self._drop is not None, "called only in the driver program"
            self._drop(name)


def group_parts_for_views(parts: Iterator[bytes]) -> Iterator[list[tuple[int, bytes]]]:
    """Number the parts and yield them in lists of at most VIEW_BYTES_MAX bytes, one for a view.

    A list is longer only if it has a single part.
    """
    rows: list[tuple[int, bytes]] = []
    size = 0
    for number, part in enumerate(parts):
        if rows and size + len(part) > VIEW_BYTES_MAX:
            yield rows
            rows, size = [], 0
        rows.append((number, part))
        size += len(part)
    if rows:
        yield rows


PAYLOAD_SIZES = PieceSizes(
    piece=ROW_BYTES_MAX >> 1, part=ROW_BYTES_MAX, direct=8 << 20, pieces_per_task=8
)
INLINE_TOTAL_MAX = INLINE_BYTES_MAX  # total bytes of a round's payloads in the job's plan
MINIBATCH_STORAGE_LEVEL = "DISK_ONLY"  # of minibatches, if the options do not persist rows
ALL_ROUNDS = 1 << 30  # more rounds than an epoch has
HEAP_EXHAUSTED = "Java heap space"
HEAP_EXHAUSTED_ERROR = (
    "a JVM has no memory left on its heap, and arrays of a round have {} MiB: start the server with"
    " a larger spark.driver.memory, some 1 GiB beside five times that, or give executors more"
    " (spark.executor.memory)"
)

# Without these settings, the server would cache plans that contain parameters, and uploaded rows,
# until the session ends.
SESSION_SETTINGS = {
    "spark.connect.session.planCache.enabled": "false",
    "spark.sql.session.localRelationCacheThreshold": str(1 << 30),
}


class DataFrameRecords:
    """The records in a DataFrame, which Spark computes when results are requested.

    Args:
        backend: Runs jobs.
        frame: The DataFrame.
        read: Returns a task's records from its Arrow batches.
    """

    def __init__(self, backend: DataFrameRoundsBackend, frame: Any, read: ReadRecords) -> None:
        self._backend, self._frame, self._read = backend, frame, read

    def collect(self, run: CollectedTask) -> list[Any]:
        """Run the task function ``run`` on every partition; return everything that it yields."""
        return self._backend.run_job(self._run(run))

    def _run(self, run: CollectedTask) -> Any:
        """Return a DataFrame of the encoded results of ``run``."""
        return self._frame.mapInArrow(
            partial(run_collected_task, self._read, run), parse_schema(RESULT_SCHEMA)
        )

    def shuffle(self, written: WritingTask, targets: int) -> DataFrameRecords:
        """Return the records that ``written`` yields, shuffled to ``targets`` partitions."""
        sending = partial(
            run_writing_task, self._read, written, self._backend.partition_keys(targets)
        )
        sent = self._frame.mapInArrow(sending, parse_schema(PAIR_SCHEMA))
        return DataFrameRecords(
            self._backend, sent.repartition(targets, "key"), read_shuffled_records
        )

    @contextlib.contextmanager
    def results(self, run: CollectedTask) -> Iterator[Fetch]:
        """Persist the results of ``run`` during the block; yield a function that fetches them."""
        with self._backend.persisted(self._run(run), "MEMORY_AND_DISK") as made:
            yield lambda partitions: self._backend.run_job(
                made.where(f"task between {partitions[0]} and {partitions[-1]}")
            )


class DataFrameMinibatches:
    """The persisted minibatches of consecutive rounds.

    Args:
        backend: Runs jobs and knows the payloads' views.
        frame: The minibatches; its column ``phase`` is the round.
        workers: Number of workers.
    """

    def __init__(self, backend: DataFrameRoundsBackend, frame: Any, workers: int) -> None:
        self._backend, self._frame, self._workers = backend, frame, workers

    def get_round_records(
        self, number: int, start: RoundInput, *, measures: bool = False
    ) -> DataFrameRecords:
        """Return a round's minibatches, preceded by the payloads in temporary views.

        See ``Minibatches.get_round_records`` for the arguments.
        """
        rows = self._frame.where(f"phase = {number}")
        sent = start.payload_recipients(self._workers)[: 1 if measures else None]
        arriving = [
            self._backend.view_rows_for(name, to, ahead=len(sent) - place)
            for place, (payload, to) in enumerate(sent)
            if isinstance(payload.parts, TemporaryViewParts) and to
            for name in payload.parts.names
        ]
        if arriving:
            rows = self._union_and_sort([rows, *arriving])
        return DataFrameRecords(self._backend, rows, read_records)

    def _union_and_sort(self, frames: list[Any]) -> Any:
        """Return the records of all frames, shuffled to their workers and sorted by phase."""
        keys = ", ".join(f"{key}L" for key in self._backend.partition_keys(self._workers))
        key = f"element_at(array({keys}), cast(worker + 1 as int)) key"
        columns = [*INDEX_COLUMNS, "content"]
        union = frames[0].select(*columns)
        for frame in frames[1:]:
            union = union.union(frame.select(*columns))
        shuffled = union.selectExpr("*", key).repartition(self._workers, "key")
        return shuffled.sortWithinPartitions(*SORT_COLUMNS)


class DataFrameRoundsBackend(SparkRoundsBackend):
    """Runs the rounds of a fit with DataFrames of a Spark Connect session.

    Args:
        session: The session.
        job: What all rounds of the fit have in common.
        data: The rows, as a DataFrame with one partition per worker.
    """

    def __init__(self, session: Any, job: SparkRoundsJob, data: PartitionedData) -> None:
        super().__init__(job)
        self._session = session
        self._made: WorkerDataFrame = data.rdd
        self._frame, self._blocks = self._made.frame, data.blocks
        # Names of temporary views, unique in the session.
        self._names = (f"sparkstrom_{job.spec.job:016x}_{n}" for n in itertools.count())
        self._sent = set[str]()  # names of the payloads' views
        self._keys = dict[int, list[int]]()  # by number of partitions; see ``partition_keys``
        self._largest_bytes = 0  # size of the largest payload so far, for an error message

    @contextlib.contextmanager
    def keep_rows(self) -> Iterator[None]:
        """Let Spark store the rows during the block if the option ``storage_level`` is set.

        Otherwise each job that reads them recomputes them. During the block, SESSION_SETTINGS hold;
        at its end, the payloads' remaining views are dropped.
        """
        level = self._job.master.storage_level
        with contextlib.ExitStack() as stack:
            stack.enter_context(override_settings(self._session, SESSION_SETTINGS))
            if level is not None:
                keep = partial(run_caching_task, self._job.spec.job, self._blocks)
                rows = self._frame.mapInArrow(keep, parse_schema(RECORD_SCHEMA))
                self._frame = stack.enter_context(self.persisted(rows, level))
                self._blocks = read_cached_blocks
            try:
                yield
            finally:
                for name in sorted(self._sent):
                    stack.callback(self._drop_view, name)

    def inspect(self, task: RowsTask) -> list[Any]:
        """Run ``task`` on the rows of every worker; return everything that it yields."""
        with limit_batch_rows(self._session, self._made.batch_rows):
            looking = partial(run_partition_task, partial(task, self._blocks))
            return self.run_job(self._frame.mapInArrow(looking, parse_schema(RESULT_SCHEMA)))

    def max_rounds_stored_at_once(self, facts: Sequence[PartitionFacts]) -> int:
        """Return how many rounds' minibatches are stored at once: as many as fit into memory.

        If no rows were spilled to disk, these are all rounds. If more rounds were stored than fit
        into memory, every round would read the minibatches of all stored rounds from disk.
        """
        master = self._job.master
        most = max(facts, key=lambda one: one.spilled_bytes)
        if not most.spilled_bytes:
            return ALL_ROUNDS
        row_bytes = most.spilled_bytes / (most.rows + most.held_out)
        of_round = master.averaging_frequency * master.batch_size_per_worker * row_bytes
        return max(1, int(master.batch_memory_bytes / of_round))

    @contextlib.contextmanager
    def store_minibatches(
        self, cut: StoredRounds, task: RowsWritingTask
    ) -> Iterator[DataFrameMinibatches]:
        """Persist the minibatches that ``task`` yields during the block; yield access to them."""
        run = partial(run_minibatch_task, task, cut.workers, cut.rounds.start, self._blocks)
        rows, level = (
            self._frame.mapInArrow(run, parse_schema(RECORD_SCHEMA)),
            self._job.master.storage_level,
        )
        with (
            limit_batch_rows(self._session, RECORD_BATCH_ROWS),
            self.persisted(rows, level or MINIBATCH_STORAGE_LEVEL) as made,
        ):
            yield DataFrameMinibatches(self, made, cut.workers)

    def send_parts(self, nbytes: int, parts: Iterator[bytes]) -> PayloadParts:
        """Put a payload, given in parts, into the job's plan, or a large one into views.

        Return a handle of the payload, which has ``nbytes`` bytes.
        """
        self._largest_bytes = max(self._largest_bytes, nbytes)
        if nbytes <= INLINE_TOTAL_MAX // (
            2 + self._job.spec.workers
        ):  # in case every worker has its own
            return InlineParts(b"".join(parts))
        names, count = [], 0
        for rows in group_parts_for_views(parts):
            name = next(self._names)
            self._sent.add(name)  # before the call: if interrupted, it may have made the view
            with self._translate_errors():
                self._session.createDataFrame(
                    rows, parse_schema(PART_SCHEMA)
                ).createOrReplaceTempView(name)
            names.append(name)
            count += len(rows)
        return TemporaryViewParts(tuple(names), count, self._drop_view)

    def _drop_view(self, name: str) -> None:
        """Drop one temporary view of a payload."""
        self._session.catalog.dropTempView(name)
        self._sent.discard(name)

    def view_rows_for(self, name: str, workers: list[int], *, ahead: int) -> Any:
        """Return the rows of a payload's view as records, one copy for each of ``workers``.

        ``name`` is the name of the view. The records' phase is ``-ahead``, so that they precede the
        minibatches of all rounds, and payloads with a larger ``ahead`` come first.
        """
        to = f"explode(array({', '.join(f'{worker}L' for worker in workers)})) worker"
        constants = {"phase": -ahead, "piece": 0, "pieces": 1}
        columns = [f"{value}L {column}" for column, value in constants.items()]
        return self._session.table(name).selectExpr(to, "number", *columns, "content")

    def partition_keys(self, targets: int) -> list[int]:
        """Return, for each of ``targets`` partitions, a key that Spark hashes to that partition.

        The keys for a number of targets are computed once, by a Spark job.
        """
        if targets not in self._keys:
            self._keys[targets] = find_partition_keys(self._session, targets)
        return self._keys[targets]

    def run_job(self, frame: Any) -> list[Any]:
        """Compute a DataFrame of encoded results; return the decoded results of all tasks."""
        with self._translate_errors():
            return collect_later(frame)()

    @contextlib.contextmanager
    def persisted(self, frame: Any, level: str) -> Iterator[Any]:
        """Persist a DataFrame during the block; yield a temporary view of that DataFrame.

        ``level`` is the name of Spark's storage level.
        """
        name = next(self._names)
        with contextlib.ExitStack() as stack:
            # Each undo is registered before its call: an interrupted call may have taken effect.
            stack.callback(self._session.catalog.dropTempView, name)
            frame.createOrReplaceTempView(name)
            view = self._session.table(name)
            stack.callback(view.unpersist)
            view.persist(_storage_level(level))
            assert view.columns  # cached from now on, so that rounds need not request them
            yield view

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Raise FitCancelled if the fit was aborted; otherwise translate errors in the block.

        An error about an exhausted JVM heap becomes a TrainingError with the settings to change.
        """
        self.check_aborted()
        try:
            yield
        except Exception as error:
            if HEAP_EXHAUSTED not in str(error):
                raise
            raise TrainingError(
                HEAP_EXHAUSTED_ERROR.format(self._largest_bytes >> 20), trace=str(error)
            ) from None


def _storage_level(name: str) -> Any:
    """Return Spark's storage level ``name``, changed to keep deserialized rows in memory.

    Jobs read only parts of the stored rows; otherwise they would have to deserialize all rows.
    """
    from pyspark import StorageLevel

    level = getattr(StorageLevel, name)
    objects = level.useMemory and not level.useOffHeap
    return StorageLevel(
        level.useDisk, level.useMemory, level.useOffHeap, objects, level.replication
    )


def parse_schema(fields: str) -> Any:
    """Return the schema for text like "name type, ..."; a type is "long" or "binary".

    If a schema is given as text, Spark Connect sends a request to the server to parse it.
    """
    from pyspark.sql.types import BinaryType, LongType, StructField, StructType

    kinds = {"long": LongType(), "binary": BinaryType()}
    named = [field.split() for field in fields.split(", ")]
    return StructType([StructField(name, kinds[kind]) for name, kind in named])
