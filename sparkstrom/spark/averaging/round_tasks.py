"""Round tasks: the named functions that run in Spark's Python workers for training in rounds.

``step_round`` takes rows and parameters and gives pieces to be added up; it knows nothing of how
they travel. What a model raises is an answer: Spark would try a task that fails again, in vain.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparkstrom.base.clock import SystemClock
from sparkstrom.base.errors import SetupError, UsageError, reason_of
from sparkstrom.base.import_archives import keep_unchanged_archives
from sparkstrom.models.base import Buffered, Placeable, Share
from sparkstrom.models.outputs import measured
from sparkstrom.runtime.averaging import is_summed
from sparkstrom.runtime.batches import Batches
from sparkstrom.runtime.prefetching import prefetched
from sparkstrom.runtime.round_step import Beginning, Turn, train_alone
from sparkstrom.runtime.worker_output import WorkerOutput, captured
from sparkstrom.spark.averaging.pieces import (
    PICKLE,
    ArrayPiece,
    RowsMissing,
    SentAll,
    Told,
    added,
    means,
    packed_record,
    pieces_of,
    target_of,
    whole_records,
)
from sparkstrom.spark.averaging.round_job import (
    BUFFERS,
    PARAMETERS,
    UPDATER,
    AveragingJob,
    Measure,
    ModelFailure,
    PackedJob,
    RoundInput,
    RoundReport,
    RowFacts,
    RowPiece,
)
from sparkstrom.spark.data.shuffle_blocks import Blocks
from sparkstrom.spark.driver.averaging_master import OWN
from sparkstrom.spark.executor.own_rows import batches_of
from sparkstrom.spark.executor.task_place import TaskPlace, again, here, spare_collections

TRACE_CHARS_MAX = 8_000


# -- rows ----------------------------------------------------------------------------------------


def look_at_rows(
    packed: PackedJob, blocks: Blocks, index: int, items: Iterable[Any]
) -> Iterator[RowFacts | UsageError | SetupError]:
    """What a partition's rows are, checked against the model; what is wrong is an answer."""
    keep_unchanged_archives()
    job, place = packed.opened(), here()
    try:
        batches = batches_of(job, place, blocks(index, items))
    except (UsageError, SetupError) as error:
        yield error
        return
    held, per_epoch = batches.held_out.rows, batches.per_epoch
    checksum, spilled = batches.checksum, batches.spilled_bytes
    yield RowFacts(index, batches.rows, held, checksum, per_epoch, spilled, place.host)
    batches.close()


@dataclass(frozen=True, slots=True)
class EpochCut:
    """Some rounds of an epoch, and which minibatches of each worker are theirs."""

    epoch: int  # of this fit
    rounds: range  # of this epoch, from 0
    firsts: tuple[int, ...]  # each worker's first minibatch of round 0
    checksums: tuple[int, ...]  # of each worker's rows
    held_out: bool  # behind the last round: what is held out

    @property
    def workers(self) -> int:
        return len(self.firsts)

    @property
    def targets(self) -> int:
        """Partitions of the shuffle: each worker's of each round."""
        return (len(self.rounds) + self.held_out) * self.workers

    def first_target(self, number: int) -> int:
        """Of a round; of one behind the last: of held-out rows."""
        return (number - self.rounds.start) * self.workers


def cut_epoch(
    packed: PackedJob, cut: EpochCut, blocks: Blocks, index: int, items: Iterable[Any]
) -> Iterator[tuple[int, bytes]]:
    """A worker's minibatches, each to its round. Raise SetupError where the rows are others."""
    keep_unchanged_archives()
    job = packed.opened()
    batches = batches_of(job, here(), blocks(index, items))
    try:
        if batches.checksum != cut.checksums[index]:
            raise SetupError(
                f"partition {index} has other rows than when the fit began: the data change from"
                " one evaluation to the next; persist them or write them to files first"
            )
        for number in cut.rounds:
            target = cut.first_target(number) + index
            for record in _minibatches(job, batches, cut, number, index):
                yield target, pickle.dumps(record, PICKLE)
        if cut.held_out:
            target = cut.first_target(cut.rounds.stop) + index
            for record in _held_out(batches):
                yield target, pickle.dumps(record, PICKLE)
    finally:
        batches.close()


def _minibatches(
    job: AveragingJob, batches: Batches, cut: EpochCut, number: int, index: int
) -> Iterator[RowPiece]:
    each = job.master.averaging_frequency
    first = cut.firsts[index] + number * each
    wanted = range(first, min(first + each, batches.per_epoch))
    for count, batch in enumerate(wanted):
        place = batches.place(cut.epoch, batch)
        form = None if count else batches.form
        yield RowPiece(count, -1, form, batches.stored(cut.epoch, batch), place)
    yield RowPiece(len(wanted), len(wanted))


def _held_out(batches: Batches) -> Iterator[RowPiece]:
    count = 0
    for arrays in batches.held_out.stored():
        yield RowPiece(count, -1, None if count else batches.form, arrays)
        count += 1
    yield RowPiece(count, count)


def turns_of(records: Iterable[bytes]) -> Iterator[Turn]:
    """A round's minibatches, in order. Raise RowsMissing where some are."""
    form, came, total = None, 0, -1
    for content in records:
        piece: RowPiece = pickle.loads(content)
        if piece.number != came:  # a worker's rows come from one source, in its order
            break
        if piece.arrays is None:
            total = piece.total
            continue
        form = piece.form or form
        assert form is not None, "the first brings it"
        came += 1
        yield Turn(form.batch_of(piece.arrays), piece.place)
    if came != total:
        raise RowsMissing(
            f"{came} minibatches of a round arrived and not the rest: Spark has lost shuffle"
            " files and makes them again"
        )


# -- a round -------------------------------------------------------------------------------------


def step_round(
    job: AveragingJob, given: RoundInput, place: TaskPlace, records: Iterable[bytes]
) -> Iterator[ArrayPiece | Told]:
    """One worker's round: its report, and pieces of what it came to."""
    report = RoundReport(place.partition, place.host, f"{place.host}/{place.jvm}", again())
    source, pieces, records = place.partition, list[ArrayPiece](), iter(records)
    with _telling(report):
        _settle(job, given, place)
        beginning = _beginning(given, report, records)
        report.doing = "training"
        pieces = _trained(job, beginning, report, _timed(job, records, report))
    yield Told(source, report)
    if report.error is None and report.weight:
        yield from pieces


@contextlib.contextmanager
def _telling(report: RoundReport | Measure) -> Iterator[None]:
    """What a user's code says in the block, and what it raises, goes into the report."""
    output = WorkerOutput(SystemClock())
    output.phase = lambda: report.doing
    try:
        with captured(output):
            yield
    except RowsMissing:
        raise
    except Exception as error:
        trace = "".join(traceback.format_exception(error))[-TRACE_CHARS_MAX:]
        report.error = ModelFailure(reason_of(error), trace, isinstance(error, UsageError))
    if said := output.take():
        report.lines, report.skipped = said.lines, said.skipped


def _settle(job: AveragingJob, given: RoundInput, place: TaskPlace) -> None:
    """Chance is the same when the task is tried again."""
    if isinstance(job.model, Placeable):
        chance = (job.master.rng_seed, place.partition, job.spec.first_epoch, given.number)
        seed = int(np.random.SeedSequence(chance).generate_state(1, np.uint64)[0] >> np.uint64(1))
        job.model.place(Share(place.cpus, place.gpu, seed))


def _beginning(given: RoundInput, report: RoundReport, records: Iterator[bytes]) -> Beginning:
    began_s = time.monotonic()
    arrays, shipped = given.parameters.unpacked(records), given.updater_of(report.partition)
    state = {**shipped.unpacked(records), **shipped.plain}
    report.seconds["copying parameters"] = time.monotonic() - began_s
    buffers = arrays[BUFFERS].tobytes() if BUFFERS in arrays else b""
    return Beginning(arrays[PARAMETERS], buffers, state, given.steps_before)


def _timed(job: AveragingJob, records: Iterable[bytes], report: RoundReport) -> Iterator[Turn]:
    """The turns, and how long they took to come."""
    report.seconds["reading"], asked_s = 0.0, time.monotonic()
    for turn in prefetched(turns_of(records), job.master.prefetch):
        report.seconds["reading"] += time.monotonic() - asked_s
        yield turn
        asked_s = time.monotonic()


def _trained(
    job: AveragingJob, beginning: Beginning, report: RoundReport, turns: Iterator[Turn]
) -> Any:
    """Train; the pieces are cut when they are asked for."""
    began_s = time.monotonic()
    alone = train_alone(job.model, beginning, turns)
    report.seconds["stepping"] = time.monotonic() - began_s - report.seconds["reading"]
    report.steps, report.examples = alone.steps, alone.examples
    report.weight, report.loss_sum, report.buffers = alone.weight, alone.loss_sum, alone.buffers
    saved = job.master.save_updater
    state = alone.updater if saved else {}
    own = f"{report.partition}/" if saved == OWN else ""
    arrays: dict[str, Any] = {PARAMETERS: alone.parameters}
    arrays |= {f"{own}{UPDATER}{k}": v for k, v in state.items() if is_summed(v)}
    report.rest = {k: v for k, v in state.items() if not is_summed(v)}
    report.shapes = {name: (array.shape, array.dtype.str) for name, array in arrays.items()}
    if alone.weight:
        report.sent_bytes = sum(array.nbytes for array in arrays.values()) + len(alone.buffers)
    return pieces_of(report.partition, arrays.items(), alone.weight, job.piece_bytes)


def direct_round(
    packed: PackedJob, given: RoundInput, index: int, records: Iterable[bytes]
) -> Iterator[bytes]:
    """For the driver program itself."""
    keep_unchanged_archives()
    spare_collections()
    count = 0
    for record in step_round(packed.opened(), given, here(), records):
        count += 1
        yield packed_record(record)
    yield packed_record(SentAll(index, count))


class ShuffledRound:
    """For those who add up: ``groups`` of workers, and ``targets`` of pieces in each.

    Behind the targets each group has one for reports.
    """

    def __init__(
        self, packed: PackedJob, given: RoundInput, groups: int, workers: int, targets: int
    ) -> None:
        self._packed, self._given = packed, given
        self._groups, self._workers, self._targets = groups, workers, targets

    def __call__(self, index: int, records: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
        keep_unchanged_archives()
        spare_collections()
        job = self._packed.opened()
        base = group_of(index, self._workers, self._groups) * (self._targets + 1)
        found = step_round(job, self._given, here(), records)
        yield from addressed(found, index, base, self._targets, job.piece_bytes)


@dataclass(frozen=True, slots=True)
class SummedRound:
    """A level in a tree of sums: ``groups`` of sources become the sources of ``next_groups``."""

    sources: int
    groups: int
    next_groups: int
    targets: int
    piece_bytes: int

    def __call__(self, index: int, records: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
        """The sum of what came to one target of one group, as that group's own."""
        keep_unchanged_archives()
        group, target = divmod(index, self.targets + 1)
        whole = whole_records(records, members_of(group, self.sources, self.groups))
        base = group_of(group, self.groups, self.next_groups) * (self.targets + 1)
        told = [Told(group, one.what) for one in whole if isinstance(one, Told)]
        made: list[ArrayPiece | Told] = [*told, *added(whole, group)]
        for record in made:
            yield base + target, packed_record(record)
        yield base + target, packed_record(SentAll(group, len(made)))


@dataclass(frozen=True, slots=True)
class MeanRound:
    """The last level: means of what came to a target, or all as it came, for the driver program."""

    sources: int
    makes_means: bool

    def __call__(self, index: int, records: Iterable[bytes]) -> Iterator[bytes]:
        """Of one target."""
        keep_unchanged_archives()
        whole = whole_records(records, range(self.sources))
        if not self.makes_means:
            yield from map(packed_record, whole)
            return
        yield from (packed_record(one) for one in whole if isinstance(one, Told))
        yield from map(packed_record, means(whole))


def group_of(source: int, sources: int, groups: int) -> int:
    """Neighbours are together."""
    return source // -(-sources // groups)


def members_of(group: int, sources: int, groups: int) -> range:
    """Who is in it."""
    size = -(-sources // groups)
    return range(group * size, min(sources, (group + 1) * size))


def addressed(
    records: Iterable[ArrayPiece | Told], source: int, base: int, targets: int, piece_bytes: int
) -> Iterator[tuple[int, bytes]]:
    """Each record to its target, and to every target how many those were."""
    counts = [0] * (targets + 1)
    for record in records:
        target = targets
        if isinstance(record, ArrayPiece):
            target = target_of(record, targets, piece_bytes)
        counts[target] += 1
        yield base + target, packed_record(record)
    for target, count in enumerate(counts):
        yield base + target, packed_record(SentAll(source, count))


# -- held-out rows ---------------------------------------------------------------------------------


def measure_round(
    packed: PackedJob, given: RoundInput, index: int, records: Iterable[bytes]
) -> Iterator[Measure]:
    """How the parameters do on one worker's held-out rows; what is wrong with them is an answer."""
    keep_unchanged_archives()
    job, place, began_s = packed.opened(), here(), time.monotonic()
    measure, records = Measure(index, host=place.host), iter(records)
    with _telling(measure):
        model, arrays = job.model, given.parameters.unpacked(records)
        _settle(job, given, place)
        model.bind(arrays[PARAMETERS])
        if isinstance(model, Buffered) and BUFFERS in arrays:
            model.load_buffers_bytes(arrays[BUFFERS].tobytes())
        figures = [measured(model, turn.batch, job.spec.metric) for turn in turns_of(records)]
        sums, weights = zip(*figures, strict=True) if figures else ((), ())
        measure.total, measure.weight = math.fsum(sums), math.fsum(weights)
    measure.seconds = time.monotonic() - began_s
    yield measure
