"""Byte shuffle: Spark's own shuffle for records that are bytes already, and parts of its result.

``RDD.partitionBy`` holds and pickles thousands of elements at once, whatever their size; here each
record goes to Spark as soon as it is there. Spark keeps what a shuffle has written on the executors
as long as the RDD lives, so that a job that reads some of its partitions runs nothing else; and
longer, until the driver's JVM happens to collect its garbage: whoever needs it no more says so.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pyspark import RDD

Written = Callable[[int, Iterable[Any]], Iterator[tuple[int, bytes]]]  # partition, what it holds

_LONG = struct.Struct("!q")  # as the JVM reads the number of a partition


class PairsOfBytes:
    """What a partition writes, as Spark's JVM side takes it: the target's number, then bytes."""

    def __init__(self, written: Written) -> None:
        self._written = written

    def __call__(self, index: int, items: Iterable[Any]) -> Iterator[bytes]:
        for target, record in self._written(index, items):
            yield _LONG.pack(target)
            yield record


class ByteShuffle(NamedTuple):
    """So many partitions of what was sent to each, in no order."""

    rdd: RDD[bytes]
    number: int  # Spark's, of the shuffle

    def remove(self) -> None:
        """Let executors delete its files; nobody reads it any more."""
        context: Any = self.rdd.ctx
        if context._jsc is None:  # stopped: its files are gone
            return
        cleaner = context._jsc.sc().cleaner()
        if cleaner.isDefined():  # spark.cleaner.referenceTracking
            cleaner.get().doCleanupShuffle(self.number, False)


def shuffled_bytes(rdd: RDD[Any], written: Written, targets: int) -> ByteShuffle:
    """So many partitions of what ``written`` sends to each."""
    from pyspark import RDD
    from pyspark.serializers import NoOpSerializer

    context = rdd.ctx
    pairs: Any = rdd.mapPartitionsWithIndex(PairsOfBytes(written))
    pairs._bypass_serializer = True
    jvm: Any = context._jvm
    grouped = jvm.PairwiseRDD(pairs._jrdd.rdd()).asJavaPairRDD()
    placed = grouped.partitionBy(jvm.PythonPartitioner(targets, id(written)))
    number = placed.rdd().dependencies().head().shuffleId()
    values = jvm.PythonRDD.valueOfPair(placed)
    return ByteShuffle(RDD(values, context, NoOpSerializer()), number)


def some_partitions(rdd: RDD[bytes], first: int, count: int) -> RDD[bytes]:
    """These alone, numbered from 0: nothing runs for the others."""
    from pyspark import RDD
    from pyspark.serializers import NoOpSerializer

    context: Any = rdd.ctx
    jvm, gateway = context._jvm, context._gateway
    words = -(-(first + count) // 64)
    mask = gateway.new_array(jvm.long, words)
    bits = ((1 << count) - 1) << first
    for word in range(words):
        value = bits >> 64 * word & (1 << 64) - 1
        mask[word] = value - (1 << 64) if value >> 63 else value
    chosen = jvm.scala.collection.immutable.BitSet.fromBitMask(mask)  # a function Int => Boolean
    every: Any = rdd
    pruned = jvm.org.apache.spark.rdd.PartitionPruningRDD.create(every._jrdd.rdd(), chosen)
    return RDD(pruned.toJavaRDD(), context, NoOpSerializer())


def collected(rdd: RDD[bytes], partitions: Iterable[int]) -> list[bytes]:
    """What is in these partitions; one job."""
    every: Any = rdd
    found: list[bytes] = every.ctx.runJob(rdd, _as_it_is, list(partitions))
    return found


def _as_it_is(items: Iterable[bytes]) -> Iterable[bytes]:
    return items


def groups_of(loads: Iterable[int], most: int) -> Iterator[range]:
    """Neighbours together, as long as their loads are ``most`` at most; a larger one is alone."""
    first = end = total = 0
    for end, load in enumerate(loads):
        if end > first and total + load > most:
            yield range(first, end)
            first, total = end, 0
        total += load
    yield range(first, end + 1)
