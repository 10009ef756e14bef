"""Run round-based training with a SparkContext: RDDs, broadcast variables and shuffled bytes.

In a round, each worker trains some minibatches, and the results are averaged. Records (byte
strings) are shuffled between tasks. ``RDD.partitionBy`` would pickle thousands of records at once,
whatever their size. Here tasks pass each record to Spark as soon as it is created.

Spark keeps a shuffle's files as long as its RDD exists, so that a job that reads some partitions
recomputes nothing. The files would remain until the driver's JVM collects garbage, so they are
deleted explicitly.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from sparkstrom.options.parameter_averaging import ParameterAveragingTrainingMaster
from sparkstrom.planning.memory import PieceSizes
from sparkstrom.rounds.backend import PartitionFacts
from sparkstrom.spark.data.partitioning import PartitionedData
from sparkstrom.spark.rounds.array_exchange import BroadcastParts
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
    from pyspark import RDD

SIZES = PieceSizes()  # the defaults suit broadcast variables
_LONG = struct.Struct("!q")  # the JVM reads the index of a partition as 8 bytes, big-endian

CheckAborted = Callable[[], None]  # raises an error if the fit was aborted


class RddRoundsBackend(SparkRoundsBackend):
    """Runs the rounds of a fit with RDDs of a SparkContext.

    Args:
        context: The SparkContext.
        job: What all rounds of the fit have in common.
        data: The rows, as an RDD with one partition per worker.
    """

    def __init__(self, context: Any, job: SparkRoundsJob, data: PartitionedData) -> None:
        super().__init__(job)
        self._context, self._data, self._rdd = context, data, data.rdd

    @contextmanager
    def keep_rows(self) -> Iterator[None]:
        """Persist the rows during the block; ``persist_rows`` tells in which cases not."""
        with persist_rows(self._data, self._job.master, self._job.spec.epochs) as data:
            self._rdd = data.rdd
            yield

    def inspect(self, task: RowsTask) -> list[Any]:
        """Run ``task`` on the rows of every partition; return everything that it yields."""
        self.check_aborted()
        run = partial(task, self._data.blocks)
        found: list[Any] = self._rdd.mapPartitionsWithIndex(run).collect()
        return found

    def max_rounds_stored_at_once(self, facts: Sequence[PartitionFacts]) -> int:
        """Return how many rounds fit into one shuffle of at most ``sizes.targets`` partitions."""
        return max(1, self._job.sizes.targets // len(facts))

    @contextmanager
    def store_minibatches(
        self, cut: StoredRounds, task: RowsWritingTask
    ) -> Iterator[RddMinibatches]:
        """Store minibatches as the files of a shuffle during the block; yield access to them."""
        shuffle = shuffle_bytes(self._rdd, partial(task, self._data.blocks), cut.targets)
        try:
            yield RddMinibatches(shuffle.rdd, cut, self.check_aborted)
        finally:
            shuffle.remove()

    def send_parts(self, nbytes: int, parts: Iterator[bytes]) -> BroadcastParts:
        """Send each part as a broadcast variable; return a handle. If one fails, destroy all."""
        with ExitStack() as undo:
            broadcasts = []
            for part in parts:
                self.check_aborted()
                broadcasts.append(self._context.broadcast(part))
                undo.callback(broadcasts[-1].destroy, blocking=False)
            undo.pop_all()
        return BroadcastParts(tuple(broadcasts))


class RddMinibatches:
    """The minibatches of consecutive rounds: an RDD with one partition per round and worker.

    Args:
        rows: The shuffled minibatches.
        cut: The rounds, which determine the indices of partitions.
        check_aborted: Raises an error if the fit was aborted.
    """

    def __init__(self, rows: RDD[bytes], cut: StoredRounds, check_aborted: CheckAborted) -> None:
        self._rows, self._cut, self._check_aborted = rows, cut, check_aborted

    def get_round_records(
        self, number: int, start: RoundInput, *, measures: bool = False
    ) -> RddRecords:
        """Return the minibatches of one round, in one partition per worker.

        ``start`` and ``measures`` are ignored, because the payloads of ``start`` are broadcast
        instead of sent as records. See ``Minibatches.get_round_records`` for the arguments.
        """
        first = self._cut.first_target(number)
        rows = select_partitions(self._rows, first, self._cut.workers)
        return RddRecords(rows, self._check_aborted)


class RddRecords:
    """A round's records in an RDD, on whose partitions task functions run as Spark jobs.

    Args:
        rdd: An RDD with one record per element.
        check_aborted: Raises an error if the fit was aborted.
        shuffles: The shuffles on which the RDD depends. Their files are deleted at the end of a
            ``with`` block of ``results``.
    """

    def __init__(
        self, rdd: RDD[bytes], check_aborted: CheckAborted, shuffles: tuple[ByteShuffle, ...] = ()
    ) -> None:
        self._rdd, self._check_aborted, self._shuffles = rdd, check_aborted, shuffles

    def collect(self, task: CollectedTask) -> list[Any]:
        """Run ``task`` on every partition; return everything that it yields."""
        self._check_aborted()
        return self._rdd.mapPartitionsWithIndex(task).collect()

    def shuffle(self, task: WritingTask, targets: int) -> RddRecords:
        """Return the records that ``task`` yields, shuffled to ``targets`` partitions."""
        shuffle = shuffle_bytes(self._rdd, task, targets)
        return RddRecords(shuffle.rdd, self._check_aborted, (*self._shuffles, shuffle))

    @contextmanager
    def results(self, task: CollectedTask) -> Iterator[Fetch]:
        """Yield a function that fetches the results of ``task`` for some partitions.

        The files of the shuffles are deleted when the ``with`` block ends.
        """
        rdd = self._rdd.mapPartitionsWithIndex(task)

        def fetch(partitions: Sequence[int]) -> list[bytes]:
            """Run a job that computes these partitions; return its results."""
            self._check_aborted()
            return collect_partitions(rdd, partitions)

        try:
            yield fetch
        finally:
            for shuffle in self._shuffles:
                shuffle.remove()


@contextmanager
def persist_rows(
    data: PartitionedData, master: ParameterAveragingTrainingMaster, epochs: int
) -> Iterator[PartitionedData]:
    """Persist the rows during the block if Spark would recompute them for each epoch.

    Persist nothing if the option ``storage_level`` is None, if the rows were exported to files, or
    if there is only one epoch. Yield the data to read. The user's own RDD may already be persisted;
    it is left alone, and an RDD derived from it is persisted instead.
    """
    from pyspark import StorageLevel

    level, is_exported = master.storage_level, master.rdd_training_approach == "export"
    if level is None or is_exported or epochs == 1:
        yield data
        return
    rdd: Any = data.rdd
    if data.rows:  # they were not shuffled, so this is the user's own RDD
        rdd = rdd.mapPartitions(_identity, preservesPartitioning=True)
    try:
        rdd.persist(getattr(StorageLevel, level))
        yield data._replace(rdd=rdd)
    finally:
        rdd.unpersist()


def _identity(items: Any) -> Any:
    """Return ``items``; as a task function, this passes rows on unchanged."""
    return items


class PairWritingTask:
    """A task function that writes another task function's (target, record) pairs for the JVM.

    Spark's PairwiseRDD expects each target as 8 bytes, followed by the record.
    """

    def __init__(self, task: WritingTask) -> None:
        self._task = task

    def __call__(self, index: int, items: Iterable[Any]) -> Iterator[bytes]:
        """Yield the packed target, then the record, for each pair."""
        for target, record in self._task(index, items):
            yield _LONG.pack(target)
            yield record


class ByteShuffle(NamedTuple):
    """An RDD of shuffled records, and the id of the shuffle."""

    rdd: RDD[bytes]  # one partition per target
    number: int  # Spark's shuffle id

    def remove(self) -> None:
        """Delete the shuffle's files on executors."""
        context: Any = self.rdd.ctx
        if context._jsc is None:  # the application stopped and its files are gone
            return
        cleaner = context._jsc.sc().cleaner()
        if cleaner.isDefined():  # unless spark.cleaner.referenceTracking is off
            cleaner.get().doCleanupShuffle(self.number, False)


def shuffle_bytes(rdd: RDD[Any], task: WritingTask, targets: int) -> ByteShuffle:
    """Return the records that ``task`` yields, shuffled to ``targets`` partitions.

    ``task`` reads a partition of ``rdd`` and yields (target, record) pairs. The records of a target
    have no defined order.
    """
    from pyspark import RDD
    from pyspark.serializers import NoOpSerializer

    context = rdd.ctx
    pairs: Any = rdd.mapPartitionsWithIndex(PairWritingTask(task))
    pairs._bypass_serializer = True
    jvm: Any = context._jvm
    grouped = jvm.PairwiseRDD(pairs._jrdd.rdd()).asJavaPairRDD()
    placed = grouped.partitionBy(jvm.PythonPartitioner(targets, id(task)))
    number = placed.rdd().dependencies().head().shuffleId()
    values = jvm.PythonRDD.valueOfPair(placed)
    return ByteShuffle(RDD(values, context, NoOpSerializer()), number)


def select_partitions(rdd: RDD[bytes], first: int, count: int) -> RDD[bytes]:
    """Return an RDD of ``count`` partitions beginning with index ``first``, renumbered from 0.

    Spark computes no other partitions of the original RDD.
    """
    from pyspark import RDD
    from pyspark.serializers import NoOpSerializer

    context: Any = rdd.ctx
    jvm, gateway = context._jvm, context._gateway
    # A bit mask of the selected partitions, in signed 64-bit words like Java's long.
    words = -(-(first + count) // 64)
    mask = gateway.new_array(jvm.long, words)
    selected = ((1 << count) - 1) << first
    for word in range(words):
        value = selected >> 64 * word & (1 << 64) - 1
        mask[word] = value - (1 << 64) if value >> 63 else value
    predicate = jvm.scala.collection.immutable.BitSet.fromBitMask(mask)  # a function Int => Boolean
    every: Any = rdd
    pruned = jvm.org.apache.spark.rdd.PartitionPruningRDD.create(every._jrdd.rdd(), predicate)
    return RDD(pruned.toJavaRDD(), context, NoOpSerializer())


def collect_partitions(rdd: RDD[bytes], partitions: Iterable[int]) -> list[bytes]:
    """Run one job that computes only the given partitions; return their records."""
    every: Any = rdd
    found: list[bytes] = every.ctx.runJob(rdd, _identity, list(partitions))
    return found
