"""Frame engine: rounds by DataFrames; see ``averaging.round_engine``.

What is read more than once is a frame that Spark keeps, under a name of the session: the workers'
rows, the minibatches of the rounds to come, a round's means. Kept partitions that are lost with
their executor Spark computes again, as everywhere. A round's job reads its own rows out of the
kept ones: where its parameters are small nothing is shuffled; where they are not, they come as
rows of their own through one shuffle, sorted behind it, so that they are there before the rows.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from sparkstrom.base.errors import TrainingError
from sparkstrom.spark.averaging.round_engine import (
    Answering,
    Cutting,
    Fetch,
    Gone,
    Looking,
    Writing,
    need_waiting,
)
from sparkstrom.spark.averaging.round_job import AveragingJob, PieceSizes, RoundInput, RowFacts
from sparkstrom.spark.averaging.round_tasks import EpochCut
from sparkstrom.spark.averaging.shipment import ShippedParts
from sparkstrom.spark.connect.binary_rows import ROW_BYTES, SCHEMA
from sparkstrom.spark.connect.connect_jobs import collected
from sparkstrom.spark.connect.connect_spread import (
    FrameOfBlocks,
    held_settings,
    keys_of,
    small_batches,
)
from sparkstrom.spark.connect.frame_parts import PlanParts, ViewParts, view_rows
from sparkstrom.spark.connect.record_frames import (
    NUMBERS,
    ORDER,
    PAIR,
    PART,
    RECORD,
    ROWS_AT_ONCE,
    Read,
    contents_of,
    records_of,
    run_answers,
    run_cut,
    run_keep,
    run_look,
    run_written,
    stored_blocks,
)
from sparkstrom.spark.connect.uploads import INLINE_MAX
from sparkstrom.spark.data.partitioning import Spread

SIZES = PieceSizes(piece=ROW_BYTES >> 1, part=ROW_BYTES, direct=8 << 20, at_once=8)
IN_PLAN_MAX = INLINE_MAX  # of all shipments of a round that are not rows
CUT_LEVEL = "DISK_ONLY"  # where rows are not kept: classic Spark has them in shuffle files
ALL_ROUNDS = 1 << 30
HEAP_IS_FULL = "Java heap space"
TOO_LARGE = (
    "a JVM has no memory left on its heap, and arrays of a round have {} MiB: start the server with"
    " a larger spark.driver.memory, some 1 GiB beside five times that, or give executors more"
    " (spark.executor.memory)"
)

# The server would keep plans it has analyzed, with the parameters in them; and local relations
# larger than this for as long as the session lives.
SETTINGS = {
    "spark.connect.session.planCache.enabled": "false",
    "spark.sql.session.localRelationCacheThreshold": str(1 << 30),
}


class FrameRecords:
    """A frame of records, and how its tasks read it."""

    def __init__(self, engine: FrameEngine, frame: Any, read: Read) -> None:
        self._engine, self._frame, self._read = engine, frame, read

    def answers(self, run: Answering) -> list[Any]:
        return self._engine.collected(self._answered(run))

    def _answered(self, run: Answering) -> Any:
        return self._frame.mapInArrow(partial(run_answers, self._read, run), typed(SCHEMA))

    def shuffled(self, written: Writing, targets: int) -> FrameRecords:
        sending = partial(run_written, self._read, written, self._engine.keys(targets))
        sent = self._frame.mapInArrow(sending, typed(PAIR))
        return FrameRecords(self._engine, sent.repartition(targets, "key"), contents_of)

    @contextlib.contextmanager
    def results(self, run: Answering) -> Iterator[Fetch]:
        with self._engine.kept(self._answered(run), "MEMORY_AND_DISK") as made:
            yield lambda partitions: self._engine.collected(
                made.where(f"task between {partitions[0]} and {partitions[-1]}")
            )


class FrameCut:
    """The kept minibatches of some rounds; a round is a phase of it."""

    def __init__(self, engine: FrameEngine, frame: Any, workers: int) -> None:
        self._engine, self._frame, self._workers = engine, frame, workers

    def of_round(self, number: int, given: RoundInput, *, measures: bool = False) -> FrameRecords:
        rows = self._frame.where(f"phase = {number}")
        sent = given.addressed(self._workers)[: 1 if measures else None]
        arriving = [
            self._engine.exploded(name, to, ahead=len(sent) - place)
            for place, (shipment, to) in enumerate(sent)
            if isinstance(shipment.parts, ViewParts) and to
            for name in shipment.parts.names
        ]
        if arriving:
            rows = self._together([rows, *arriving])
        return FrameRecords(self._engine, rows, records_of)

    def _together(self, frames: list[Any]) -> Any:
        keys = ", ".join(f"{key}L" for key in self._engine.keys(self._workers))
        key = f"element_at(array({keys}), cast(worker + 1 as int)) key"
        columns = [*NUMBERS, "content"]
        every = frames[0].select(*columns)
        for frame in frames[1:]:
            every = every.union(frame.select(*columns))
        moved = every.selectExpr("*", key).repartition(self._workers, "key")
        return moved.sortWithinPartitions(*ORDER)


class FrameEngine:
    """By a session of Spark Connect."""

    def __init__(self, session: Any, job: AveragingJob, spread: Spread, gone: Gone) -> None:
        self._session, self._job, self._gone = session, job, gone
        self._made: FrameOfBlocks = spread.rdd
        self._frame, self._blocks = self._made.frame, spread.blocks
        self._names = (f"sparkstrom_{job.spec.job:016x}_{n}" for n in itertools.count())
        self._sent, self._keys = set[str](), dict[int, list[int]]()
        self._largest = 0  # bytes of a shipment

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        level = self._job.master.storage_level
        with contextlib.ExitStack() as stack:
            stack.enter_context(held_settings(self._session, SETTINGS))
            if level is not None:
                keep = partial(run_keep, self._job.spec.job, self._blocks)
                rows = self._frame.mapInArrow(keep, typed(RECORD))
                self._frame = stack.enter_context(self.kept(rows, level))
                self._blocks = stored_blocks
            try:
                yield
            finally:
                for name in sorted(self._sent):
                    self._drop(name)

    def look(self, look: Looking) -> list[Any]:
        with small_batches(self._session, self._made.batch_rows):
            looking = partial(run_look, look, self._blocks)
            return self.collected(self._frame.mapInArrow(looking, typed(SCHEMA)))

    def rounds_at_once(self, facts: Sequence[RowFacts]) -> int:
        """As many as a worker's memory for rows is for; else Spark would read all for each."""
        master = self._job.master
        most = max(facts, key=lambda one: one.spilled_bytes)
        if not most.spilled_bytes:
            return ALL_ROUNDS
        row_bytes = most.spilled_bytes / (most.rows + most.held_out)
        of_round = master.averaging_frequency * master.batch_size_per_worker * row_bytes
        return max(1, int(master.batch_memory_bytes / of_round))

    @contextlib.contextmanager
    def cut(self, cut: EpochCut, cutting: Cutting) -> Iterator[FrameCut]:
        run = partial(run_cut, cutting, cut.workers, cut.rounds.start, self._blocks)
        rows, level = self._frame.mapInArrow(run, typed(RECORD)), self._job.master.storage_level
        with (
            small_batches(self._session, ROWS_AT_ONCE),
            self.kept(rows, level or CUT_LEVEL) as made,
        ):
            yield FrameCut(self, made, cut.workers)

    def sent(self, nbytes: int, parts: Iterator[bytes]) -> ShippedParts:
        self._largest = max(self._largest, nbytes)
        if nbytes <= IN_PLAN_MAX // (2 + self._job.spec.workers):  # of all, with each its own
            return PlanParts(b"".join(parts))
        names, count = [], 0
        for rows in view_rows(parts):
            name = next(self._names)
            with self._asking():
                self._session.createDataFrame(rows, typed(PART)).createOrReplaceTempView(name)
            self._sent.add(name)
            names.append(name)
            count += len(rows)
        return ViewParts(tuple(names), count, self._drop)

    def _drop(self, name: str) -> None:
        self._session.catalog.dropTempView(name)
        self._sent.discard(name)

    # -- for the frames --------------------------------------------------------------------------

    def exploded(self, name: str, workers: list[int], *, ahead: int) -> Any:
        """A view's rows for each of these workers, so many phases before the rows of a round."""
        to = f"explode(array({', '.join(f'{worker}L' for worker in workers)})) worker"
        here = {"phase": -ahead, "piece": 0, "pieces": 1}
        columns = [f"{value}L {column}" for column, value in here.items()]
        return self._session.table(name).selectExpr(to, "number", *columns, "content")

    def keys(self, targets: int) -> list[int]:
        """Numbers that Spark hashes to each of so many partitions."""
        if targets not in self._keys:
            self._keys[targets] = keys_of(self._session, targets)
        return self._keys[targets]

    def collected(self, frame: Any) -> list[Any]:
        """What its tasks yielded; one job."""
        with self._asking():
            return collected(frame)()

    @contextlib.contextmanager
    def kept(self, frame: Any, level: str) -> Iterator[Any]:
        """The frame as Spark keeps it once it is computed, in the block."""
        name = next(self._names)
        frame.createOrReplaceTempView(name)
        view = self._session.table(name)
        view.persist(_level(level))
        try:
            assert view.columns  # known from now on: a round's job does not ask the server for them
            yield view
        finally:
            view.unpersist()
            self._session.catalog.dropTempView(name)

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """What takes the server a while is asked for as long as somebody waits for the fit."""
        need_waiting(self._gone)
        try:
            yield
        except Exception as error:
            if HEAP_IS_FULL not in str(error):
                raise
            raise TrainingError(TOO_LARGE.format(self._largest >> 20), trace=str(error)) from None


def _level(name: str) -> Any:
    """As frames have it: objects where it is memory, which a job reads some of."""
    from pyspark import StorageLevel

    level = getattr(StorageLevel, name)
    objects = level.useMemory and not level.useOffHeap
    return StorageLevel(
        level.useDisk, level.useMemory, level.useOffHeap, objects, level.replication
    )


def typed(fields: str) -> Any:
    """A schema of whole numbers and bytes; the server would be asked what its text means."""
    from pyspark.sql.types import BinaryType, LongType, StructField, StructType

    kinds = {"long": LongType(), "binary": BinaryType()}
    named = [field.split() for field in fields.split(", ")]
    return StructType([StructField(name, kinds[kind]) for name, kind in named])
