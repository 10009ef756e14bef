"""Task functions of a round-based fit: they inspect rows, train, sum results and evaluate.

In a round, each worker trains some minibatches, and the results are averaged. The RDD and DataFrame
backends run the same functions. An error in the user's model is returned in the worker's report
instead of raised, because Spark would only repeat a failed task.

Spark may reuse a Python process for the tasks of later jobs. Each process therefore caches the
unpickled models of a few fits.
"""

from __future__ import annotations

import pickle
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from numpy.typing import NDArray

from sparkstrom.base.errors import SetupError, UsageError
from sparkstrom.data.packed_rows import RowFormat
from sparkstrom.data.row_blocks import BlockReader
from sparkstrom.data.row_store import Batches, prefetch
from sparkstrom.models.base import FlatModel, State
from sparkstrom.options.parameter_averaging import PER_WORKER, ParameterAveragingTrainingMaster
from sparkstrom.options.resolution import replace_options
from sparkstrom.planning.memory import PieceSizes
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.rounds.averaging import is_averaged
from sparkstrom.rounds.backend import EpochPlan, PartitionFacts
from sparkstrom.rounds.worker_round import (
    HeldOutReport,
    IncompleteInput,
    LocalRoundResult,
    RoundBatch,
    RoundPace,
    RoundReport,
    RoundStart,
    measure_held_out,
    reporting,
    train_and_report,
)
from sparkstrom.spark.executor.entry_points import (
    count_retries,
    forget_spark_archive_importers,
    get_task_context,
    pickle_by_value,
)
from sparkstrom.spark.rounds.array_exchange import (
    PICKLE,
    ArrayPiece,
    EndOfStream,
    Payload,
    ReportRecord,
    group_of_source,
    mean_pieces,
    pack_record,
    read_complete,
    route_records,
    sources_of_group,
    split_arrays,
    sum_pieces,
)
from sparkstrom.worker.task_environment import (
    TaskEnvironment,
    free_models,
    freeze_garbage_collector,
    load_batches,
    place_model,
    refer_weakly,
    unpickle_without_collecting,
)

CACHED_JOBS_MAX = 4  # number of fits whose models one Python process caches
ENDED_FITS_MAX = 64  # number of ended fits that a job lists; far more than a process caches
# Names of a round's arrays. Names of optimizer state arrays begin with OPTIMIZER.
PARAMETERS, OPTIMIZER, BUFFERS = "parameters", "updater/", "buffers"


@dataclass(frozen=True, slots=True)
class SparkRoundsJob:
    """What tasks need to know about a round-based fit. It is the same in all rounds."""

    spec: FitSpec  # the model's size, the seed, the number of epochs and other facts of the fit
    model: FlatModel  # the model, without memory for its parameters
    master: ParameterAveragingTrainingMaster  # the user's options
    rows: tuple[int, ...]  # number of rows by partition; empty if rows were shuffled
    sizes: PieceSizes  # size limits of messages
    accumulates: bool = False  # whether the user's accumulator gets every worker's parameters

    def without_accumulator(self) -> SparkRoundsJob:
        """Return a copy for tasks without the user's accumulator; only the driver calls that."""
        accumulates = self.master.accumulator is not None
        master = replace_options(self.master, accumulator=None) if accumulates else self.master
        return replace(self, master=master, accumulates=accumulates)

    @property
    def piece_bytes(self) -> int:
        """Maximum size of one piece of an array, in bytes.

        If the driver program computes the means, it receives the corresponding pieces of all
        workers at once; pieces are then smaller.
        """
        driver_sums = self.master.aggregation_depth == 1
        share = max(1, self.sizes.bytes_per_target // self.spec.workers)
        return min(self.sizes.piece, share) if driver_sums else self.sizes.piece


@dataclass(frozen=True, slots=True)
class PackedJob:
    """A pickled ``SparkRoundsJob``, which each Python worker unpickles once."""

    fit: int  # the fit's id, ``FitSpec.job``
    content: bytes = field(repr=False)  # the pickle
    ended_fits: tuple[int, ...] = ()  # fits whose jobs Python workers may drop from their caches

    @classmethod
    def pack(cls, job: SparkRoundsJob) -> PackedJob:
        """Pickle a job, including classes that the user's script defines."""
        return cls(job.spec.job, pickle_by_value(job))

    def with_ended_fits(self) -> PackedJob:
        """Return a copy that lists the fits that have ended so far."""
        return replace(self, ended_fits=tuple(_ended_fits))

    def unpack(self) -> SparkRoundsJob:
        """Return the job from this process's cache, or unpickle it and add it to the cache.

        Jobs of ended fits are removed from the cache.
        """
        forget_spark_archive_importers()
        _remove_cached(self.ended_fits)
        if self.fit not in _cached_jobs:
            _cached_jobs[self.fit] = unpickle_without_collecting(self.content)
            _remove_cached([*_cached_jobs][:-CACHED_JOBS_MAX])
        _cached_jobs.move_to_end(self.fit)
        return _cached_jobs[self.fit]


_cached_jobs: OrderedDict[int, SparkRoundsJob] = OrderedDict()  # by fit; least recently used first
_ended_fits = deque[int](maxlen=ENDED_FITS_MAX)  # used only in the driver program


def record_ended_fit(fit: int) -> None:
    """Record, in the driver program, that a fit has ended.

    ``PackedJob.with_ended_fits`` lists the fit in later jobs, and Python workers drop listed fits
    from their caches.
    """
    _ended_fits.append(fit)


def _remove_cached(fits: Iterable[int]) -> None:
    """Drop fits from this process's cache and free the memory of their models."""
    removed = [_cached_jobs.pop(fit) for fit in fits if fit in _cached_jobs]
    models = [refer_weakly(job.model) for job in removed]
    removed.clear()
    free_models(models)


@dataclass(frozen=True, slots=True)
class RoundInput:
    """The state from which all workers start a round."""

    steps_before: int  # steps that each worker has trained before; part of the random seed
    parameters: Payload  # the parameters, and buffers if the model has any
    updater: Payload  # the optimizer state of workers that have none in ``own``
    own: Mapping[int, Payload] = field(default_factory=dict)  # own optimizer states, by worker
    pace: RoundPace | None = None  # the progress that models with schedules need

    def optimizer_state_of(self, worker: int) -> Payload:
        """Return the payload with the optimizer state from which a worker starts."""
        return self.own.get(worker, self.updater)

    def payload_recipients(self, workers: int) -> list[tuple[Payload, list[int]]]:
        """Return (payload, workers that read the payload) pairs, with the parameters first."""
        everybody = range(workers)
        sent = [(self.parameters, [*everybody])]
        sent.append((self.updater, [worker for worker in everybody if worker not in self.own]))
        return sent + [(self.own[worker], [worker]) for worker in sorted(self.own)]


class MinibatchRecord(NamedTuple):
    """One minibatch, as it is sent to the round that trains on it.

    A record without rows, which contains the number of minibatches, follows the last minibatch.
    """

    number: int  # index of the minibatch in the round
    total: int = -1  # number of minibatches; set only in the last record
    form: RowFormat | None = None  # format of the rows; set only in the first record
    arrays: list[NDArray[Any]] | None = None  # the rows; None in the last record
    # (epoch counted over all fits, index in the epoch, minibatches per epoch); see Batches.place
    place: tuple[int, int, int] = (0, 0, 0)


@dataclass(slots=True)
class SparkRoundReport(RoundReport):
    """A worker's report of a round, including what the driver needs to assemble result arrays."""

    scalars: State = field(default_factory=dict)  # optimizer state without its arrays
    shapes: dict[str, tuple[tuple[int, ...], str]] = field(
        default_factory=dict
    )  # (shape, dtype) by array name


# How a report describes the task's earlier attempts, which count as lost.
RETRIED = "Spark began its task again ({} times)"


def inspect_rows(
    packed: PackedJob, blocks: BlockReader, index: int, items: Iterable[Any]
) -> Iterator[PartitionFacts | UsageError | SetupError]:
    """Yield facts about partition ``index``, or the error if its rows do not suit the model.

    ``blocks`` reads rows from ``items``, the partition's elements as Spark passes them to the task.
    """
    job, place = packed.unpack(), get_task_context()
    try:
        batches = load_batches(job, place, blocks(index, items))
    except (UsageError, SetupError) as error:
        yield error
        return
    yield PartitionFacts.from_batches(index, batches, place.host)
    batches.close()


@dataclass(frozen=True, slots=True)
class StoredRounds:
    """Consecutive rounds of an epoch whose minibatches are stored together, by one job."""

    plan: EpochPlan  # the plan of the whole epoch
    rounds: range  # the rounds, numbered from 0 in each epoch
    checksums: tuple[int, ...]  # checksum of each worker's rows

    @property
    def phases(self) -> range:
        """Numbers of the phases, in each of which every worker reads other minibatches.

        Each round is a phase. If rows are held out, their evaluation is a phase after the epoch's
        last round.
        """
        holds_out = self.plan.held_out and self.rounds.stop == self.plan.rounds
        return range(self.rounds.start, self.rounds.stop + holds_out)

    @property
    def workers(self) -> int:
        """Number of workers."""
        return len(self.checksums)

    @property
    def targets(self) -> int:
        """Number of shuffle partitions: one for each worker and phase."""
        return len(self.phases) * self.workers

    def first_target(self, phase: int) -> int:
        """Return the shuffle partition of worker 0 in a phase; other workers' partitions follow."""
        return (phase - self.rounds.start) * self.workers


def write_minibatches(
    packed: PackedJob, cut: StoredRounds, blocks: BlockReader, index: int, items: Iterable[Any]
) -> Iterator[tuple[int, bytes]]:
    """Yield (target, pickled MinibatchRecord) for a worker's minibatches in all phases of ``cut``.

    A target is a shuffle partition. Raise SetupError if the rows differ from those that
    ``inspect_rows`` read.
    """
    batches = load_batches(packed.unpack(), get_task_context(), blocks(index, items))
    try:
        if batches.checksum != cut.checksums[index]:
            raise SetupError(
                f"partition {index} has different rows than when the fit began: the data change"
                " from one evaluation to the next; persist them or write them to files first"
            )
        for phase in cut.phases:
            is_round = phase in cut.rounds
            pieces = (
                split_round(batches, cut, phase, index) if is_round else split_held_out(batches)
            )
            for piece in pieces:
                yield cut.first_target(phase) + index, pickle.dumps(piece, PICKLE)
    finally:
        batches.close()


def split_round(
    batches: Batches, cut: StoredRounds, number: int, index: int
) -> Iterator[MinibatchRecord]:
    """Yield worker ``index``'s minibatches of round ``number``, then a record with their count."""
    epoch, wanted = cut.plan.epoch, cut.plan.batches(number, index)
    for count, batch in enumerate(wanted):
        form = None if count else batches.form
        yield MinibatchRecord(
            count, -1, form, batches.stored_arrays(epoch, batch), batches.place(epoch, batch)
        )
    yield MinibatchRecord(len(wanted), len(wanted))


def split_held_out(batches: Batches) -> Iterator[MinibatchRecord]:
    """Yield a worker's held-out rows as minibatches, then a record with their number."""
    count = 0
    for arrays in batches.held_out.stored_arrays():
        yield MinibatchRecord(count, -1, None if count else batches.form, arrays)
        count += 1
    yield MinibatchRecord(count, count)


def read_minibatches(records: Iterable[bytes]) -> Iterator[RoundBatch]:
    """Yield a round's minibatches from pickled ``MinibatchRecord`` records, in order.

    Raise IncompleteInput if a minibatch is missing.
    """
    form, arrived, total = None, 0, -1
    for content in records:
        piece: MinibatchRecord = pickle.loads(content)
        if piece.number != arrived:  # one source writes all of them, in order
            break
        if piece.arrays is None:
            total = piece.total
            continue
        form = piece.form or form
        assert form is not None, "the first record has it"
        arrived += 1
        yield RoundBatch(form.batch_from_arrays(piece.arrays), piece.place)
    if arrived != total:
        raise IncompleteInput(
            f"{arrived} minibatches of a round arrived and not the rest: Spark has lost shuffle"
            " files and recomputes them"
        )


def train_round(
    job: SparkRoundsJob, start: RoundInput, place: TaskEnvironment, records: Iterable[bytes]
) -> Iterator[ArrayPiece | ReportRecord]:
    """Train one worker's round; yield the worker's report and then the pieces of its results.

    If the model raises an exception, the report contains the exception and no pieces follow.
    """
    report = SparkRoundReport(place.partition, place.host, executor=f"{place.host}/{place.jvm}")
    if retries := count_retries():
        report.lost_attempts = [RETRIED.format(retries)]
    pieces: Iterable[ArrayPiece] = ()
    records = iter(records)
    with reporting(report):
        place_model(job, place, start.steps_before)  # the same seed if the task runs again
        begin = read_start(start, report, records)
        batches = prefetch_minibatches(job, records, report)
        result = train_and_report(job.model, begin, batches, report)
        pieces = split_results(job, result, report)
    yield ReportRecord(place.partition, report)
    if report.error is None and report.weight:
        yield from pieces


def read_start(start: RoundInput, report: SparkRoundReport, records: Iterator[bytes]) -> RoundStart:
    """Return the state from which a worker starts a round, unpacked from payloads.

    Parts of the payloads may be the first items of ``records``. The time that unpacking takes is
    added to the report.
    """
    began_s = time.monotonic()
    arrays, updater = start.parameters.unpack(records), start.optimizer_state_of(report.partition)
    state = {**updater.unpack(records), **updater.plain}
    report.add_seconds("copying parameters", began_s)
    buffers = arrays[BUFFERS].tobytes() if BUFFERS in arrays else b""
    return RoundStart(arrays[PARAMETERS], buffers, state, start.steps_before, start.pace)


def prefetch_minibatches(
    job: SparkRoundsJob, records: Iterable[bytes], report: SparkRoundReport
) -> Iterator[RoundBatch]:
    """Yield a round's minibatches, read ahead by a thread; add the waiting time to the report."""
    began_s = time.monotonic()
    for batch in prefetch(read_minibatches(records), job.master.prefetch):
        report.add_seconds("reading", began_s)
        yield batch
        began_s = time.monotonic()


def split_results(
    job: SparkRoundsJob, result: LocalRoundResult, report: SparkRoundReport
) -> Iterator[ArrayPiece]:
    """Return an iterator over the pieces of a worker's results; add array shapes to the report.

    If an array must not be averaged with those of other workers, its name begins with the worker's
    number. Values of the optimizer state that are not averaged are put into the report.
    """
    number, master = f"{report.partition}/", job.master
    state = result.updater if master.save_updater else {}
    own = number if master.save_updater == PER_WORKER else ""
    parameters = number + PARAMETERS if job.accumulates else PARAMETERS
    arrays: dict[str, Any] = {parameters: result.parameters}
    arrays |= {f"{own}{OPTIMIZER}{k}": v for k, v in state.items() if is_averaged(v)}
    report.scalars = {k: v for k, v in state.items() if not is_averaged(v)}
    report.shapes = {name: (array.shape, array.dtype.str) for name, array in arrays.items()}
    if result.weight:
        report.sent_bytes = sum(array.nbytes for array in arrays.values()) + len(result.buffers)
    return split_arrays(report.partition, arrays.items(), result.weight, job.piece_bytes)


def train_for_driver(
    packed: PackedJob, start: RoundInput, index: int, records: Iterable[bytes]
) -> Iterator[bytes]:
    """Train one worker's round; yield serialized results for the driver program to average."""
    freeze_garbage_collector()
    count = 0
    for record in train_round(packed.unpack(), start, get_task_context(), records):
        count += 1
        yield pack_record(record)
    yield pack_record(EndOfStream(index, count))


@dataclass(frozen=True, slots=True)
class TrainingTask:
    """A task function that trains one worker's round, and sends the results to the next stage.

    Workers are divided into groups. For each group, the next stage has one task per target, which
    receives some of the pieces, and one more, which receives the reports. These tasks are numbered
    group by group.
    """

    packed: PackedJob  # the pickled job
    start: RoundInput  # the state from which workers start
    groups: int  # number of groups of workers
    workers: int  # number of workers
    targets: int  # number of targets per group, without the one for reports

    def __call__(self, index: int, records: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
        """Train as worker ``index``; yield (task of the next stage, serialized record) pairs."""
        freeze_garbage_collector()
        job = self.packed.unpack()
        base = group_of_source(index, self.workers, self.groups) * (self.targets + 1)
        results = train_round(job, self.start, get_task_context(), records)
        yield from route_records(results, index, base, self.targets, job.piece_bytes)


@dataclass(frozen=True, slots=True)
class SummingTask:
    """A task function that sums pieces on one level of a tree.

    A task sums the pieces that all sources of one group (workers, or groups of the level below)
    sent to one target. On the next level, the group is a source. Each group has ``targets`` + 1
    tasks on this level; the last one passes reports on.
    """

    sources: int  # number of sources on this level
    groups: int  # number of groups into which the sources are divided
    next_groups: int  # number of groups into which these groups are divided
    targets: int  # number of targets per group, without the one for reports
    piece_bytes: int  # maximum size of a piece

    def __call__(self, index: int, records: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
        """Sum the pieces of task ``index``; yield (task of the next level, serialized record)."""
        group, target = divmod(index, self.targets + 1)
        complete = read_complete(records, sources_of_group(group, self.sources, self.groups))
        base = group_of_source(group, self.groups, self.next_groups) * (self.targets + 1)
        reports = [
            ReportRecord(group, one.value) for one in complete if isinstance(one, ReportRecord)
        ]
        sums: list[ArrayPiece | ReportRecord] = [*reports, *sum_pieces(complete, group)]
        for record in sums:
            yield base + target, pack_record(record)
        yield base + target, pack_record(EndOfStream(group, len(sums)))


@dataclass(frozen=True, slots=True)
class MeanTask:
    """A task function on the last level: it computes means, or passes all pieces on unchanged."""

    sources: int  # number of sources
    makes_means: bool  # False: pass pieces on; the driver program computes the means

    def __call__(self, index: int, records: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the serialized records of one target, for the driver program to fetch."""
        complete = read_complete(records, range(self.sources))
        if not self.makes_means:
            yield from map(pack_record, complete)
            return
        yield from (pack_record(one) for one in complete if isinstance(one, ReportRecord))
        yield from map(pack_record, mean_pieces(complete))


def measure_partition(
    packed: PackedJob, start: RoundInput, index: int, records: Iterable[bytes]
) -> Iterator[HeldOutReport]:
    """Evaluate the model's metric on one worker's held-out rows; yield the report."""
    job, place = packed.unpack(), get_task_context()
    report, records = HeldOutReport(index, place.host), iter(records)
    with reporting(report):
        arrays = start.parameters.unpack(records)
        place_model(job, place, start.steps_before)
        buffers = arrays[BUFFERS].tobytes() if BUFFERS in arrays else b""
        batches = (batch for batch, _ in read_minibatches(records))
        measure_held_out(job.model, arrays[PARAMETERS], buffers, batches, job.spec.metric, report)
    yield report
