"""RDD engine: rounds by RDDs, Spark's shuffle of raw bytes, and broadcast variables."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from sparkstrom.spark.averaging.byte_shuffle import (
    ByteShuffle,
    collected,
    shuffled_bytes,
    some_partitions,
)
from sparkstrom.spark.averaging.round_engine import (
    Answering,
    Cutting,
    Fetch,
    Gone,
    Looking,
    Writing,
    need_waiting,
)
from sparkstrom.spark.averaging.round_job import AveragingJob, RoundInput, RowFacts
from sparkstrom.spark.averaging.round_tasks import EpochCut
from sparkstrom.spark.averaging.shipment import Broadcasts
from sparkstrom.spark.data.partitioning import Spread
from sparkstrom.spark.driver.averaging_master import ParameterAveragingTrainingMaster

if TYPE_CHECKING:
    from pyspark import RDD


class RddRecords:
    """An RDD of them, behind these shuffles; what they have written goes once results are taken."""

    def __init__(self, rdd: RDD[bytes], gone: Gone, shuffles: tuple[ByteShuffle, ...] = ()) -> None:
        self._rdd, self._gone, self._shuffles = rdd, gone, shuffles

    def answers(self, run: Answering) -> list[Any]:
        need_waiting(self._gone)
        return self._rdd.mapPartitionsWithIndex(run).collect()

    def shuffled(self, written: Writing, targets: int) -> RddRecords:
        shuffle = shuffled_bytes(self._rdd, written, targets)
        return RddRecords(shuffle.rdd, self._gone, (*self._shuffles, shuffle))

    @contextlib.contextmanager
    def results(self, run: Answering) -> Iterator[Fetch]:
        rdd = self._rdd.mapPartitionsWithIndex(run)

        def fetch(partitions: Sequence[int]) -> list[bytes]:
            need_waiting(self._gone)
            return collected(rdd, partitions)

        try:
            yield fetch
        finally:
            for shuffle in self._shuffles:
                shuffle.remove()


class RddCut:
    """One shuffle, with a partition for each worker of each round."""

    def __init__(self, rows: RDD[bytes], cut: EpochCut, gone: Gone) -> None:
        self._rows, self._cut, self._gone = rows, cut, gone

    def of_round(self, number: int, given: RoundInput, *, measures: bool = False) -> RddRecords:
        first = self._cut.first_target(number)
        return RddRecords(some_partitions(self._rows, first, self._cut.workers), self._gone)


class RddEngine:
    """By a SparkContext in this process."""

    def __init__(self, context: Any, job: AveragingJob, spread: Spread, gone: Gone) -> None:
        self._context, self._job, self._spread, self._gone = context, job, spread, gone
        self._rdd = spread.rdd

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        with kept_rows(self._spread, self._job.master, self._job.spec.epochs) as spread:
            self._rdd = spread.rdd
            yield

    def look(self, look: Looking) -> list[Any]:
        need_waiting(self._gone)
        found: list[Any] = self._rdd.mapPartitionsWithIndex(
            partial(look, self._spread.blocks)
        ).collect()
        return found

    def rounds_at_once(self, facts: Sequence[RowFacts]) -> int:
        return max(1, self._job.sizes.targets // len(facts))

    @contextlib.contextmanager
    def cut(self, cut: EpochCut, cutting: Cutting) -> Iterator[RddCut]:
        written = partial(cutting, self._spread.blocks)
        shuffle = shuffled_bytes(self._rdd, written, cut.targets)
        try:
            yield RddCut(shuffle.rdd, cut, self._gone)
        finally:
            shuffle.remove()

    def sent(self, nbytes: int, parts: Iterator[bytes]) -> Broadcasts:
        with contextlib.ExitStack() as undo:
            handles = []
            for part in parts:
                need_waiting(self._gone)
                handles.append(self._context.broadcast(part))
                undo.callback(handles[-1].destroy, blocking=False)
            undo.pop_all()
        return Broadcasts(tuple(handles))


@contextlib.contextmanager
def kept_rows(
    spread: Spread, master: ParameterAveragingTrainingMaster, epochs: int
) -> Iterator[Spread]:
    """The rows, at hand for each epoch, where they would be computed or shuffled again.

    What users have, and may have persisted themselves, is not touched.
    """
    from pyspark import StorageLevel

    level, exported = master.storage_level, master.rdd_training_approach == "export"
    if level is None or exported or epochs == 1:
        yield spread
        return
    rdd: Any = spread.rdd
    if spread.rows:
        rdd = rdd.mapPartitions(_as_they_are, preservesPartitioning=True)
    rdd.persist(getattr(StorageLevel, level))
    try:
        yield spread._replace(rdd=rdd)
    finally:
        rdd.unpersist()


def _as_they_are(items: Iterator[Any]) -> Iterator[Any]:
    return items
