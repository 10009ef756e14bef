"""Run round-based training on Spark: one Spark job per round, whose tasks are the workers.

``SparkRoundsBackend`` is the base class of ``rounds.rdd.RddRoundsBackend``, for a SparkContext, and
of ``connect.dataframe_rounds.DataFrameRoundsBackend``, for a Spark Connect session.

In a round, each worker trains some minibatches, and the results are averaged. One job sorts the
minibatches of several rounds by round. Each round's job then reads only its own minibatches,
trains, and sums the results. If an executor dies, Spark recomputes what was lost, with
bit-identical results.

Small results are averaged in the driver program. Large results are split into pieces: each executor
averages some of the pieces, and the driver program fetches the means in several jobs, so that no
task result, closure or broadcast variable contains a whole parameter vector.
"""

from __future__ import annotations

import itertools
import math
import pickle
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sparkstrom.data.row_blocks import BlockReader
from sparkstrom.models.base import State
from sparkstrom.options.parameter_averaging import PER_WORKER
from sparkstrom.planning.memory import footprint_of_model, round_result_bytes, worker_round_bytes
from sparkstrom.rounds.averaging import (
    RoundResults,
    RoundState,
    load_state,
    merge_scalars,
    tree_levels,
)
from sparkstrom.rounds.backend import (
    DOWNLOADED,
    UPLOADED,
    EpochPlan,
    PartitionFacts,
    RoundOrder,
    RoundsBackend,
)
from sparkstrom.rounds.worker_round import HeldOutReport
from sparkstrom.spark.rounds.array_exchange import (
    ArrayPiece,
    Payload,
    PayloadParts,
    ReportRecord,
    SplitArray,
    count_target_bytes,
    group_by_load,
    mean_pieces,
    read_complete,
    send_payload,
)
from sparkstrom.spark.rounds.tasks import (
    BUFFERS,
    OPTIMIZER,
    PARAMETERS,
    MeanTask,
    PackedJob,
    RoundInput,
    SparkRoundReport,
    SparkRoundsJob,
    StoredRounds,
    SummingTask,
    TrainingTask,
    inspect_rows,
    measure_partition,
    record_ended_fit,
    train_for_driver,
    write_minibatches,
)

# A task function receives the index of its partition and the partition's records or rows. A target
# is the index of the shuffle partition to which a record is sent.
Records = Iterable[bytes]
CollectedTask = Callable[[int, Records], Iterator[Any]]  # (partition, records) -> results
WritingTask = Callable[[int, Any], Iterator[tuple[int, bytes]]]  # -> (target, record)
RowsTask = Callable[[BlockReader, int, Iterable[Any]], Iterator[Any]]
RowsWritingTask = Callable[[BlockReader, int, Iterable[Any]], Iterator[tuple[int, bytes]]]
Fetch = Callable[[Sequence[int]], list[bytes]]  # indices of consecutive partitions -> their results


class RoundRecords(Protocol):
    """Partitioned records (byte strings) on executors, computed only when results are requested."""

    def collect(self, task: CollectedTask) -> list[Any]:
        """Run ``task`` on every partition; return everything that it yields."""
        ...

    def shuffle(self, task: WritingTask, targets: int) -> RoundRecords:
        """Return the records that ``task`` yields, each in the partition that is its target.

        Targets are numbered from 0 to ``targets`` - 1. The records of a target have no defined
        order.
        """
        ...

    def results(self, task: CollectedTask) -> AbstractContextManager[Fetch]:
        """Return a context manager whose value is a function that fetches the results of ``task``.

        The function takes the indices of consecutive partitions and returns what ``task`` yields
        for them. Each partition is computed at most once during the block.
        """
        ...


class Minibatches(Protocol):
    """The minibatches of consecutive rounds, stored on executors."""

    def get_round_records(
        self, number: int, start: RoundInput, *, measures: bool = False
    ) -> RoundRecords:
        """Return the records that one round reads, in one partition per worker.

        A partition begins with those payloads of ``start`` that are sent as records; with a
        SparkContext there are none. The minibatches follow.

        Args:
            number: The round, counted from 0 in each epoch. The number after the last round selects
                the held-out rows.
            start: The state from which the workers start.
            measures: Whether the tasks evaluate on held-out rows instead of training. Of the
                payloads, they then need only the parameters.
        """
        ...


class SparkRoundsBackend(RoundsBackend):
    """Runs the rounds of one fit as Spark jobs. Subclasses use RDDs or DataFrames.

    Args:
        job: What all tasks of the fit need: options, model and size limits.
    """

    def __init__(self, job: SparkRoundsJob) -> None:
        super().__init__()
        self._job, self._packed_job = job, PackedJob.pack(job.without_accumulator())
        self._facts: Sequence[PartitionFacts] = ()  # by partition; empty before ``open``
        self._fresh: Payload | None = None  # optimizer state before the first step
        self._cut: StoredRounds | None = None  # the rounds whose minibatches are stored now
        self._minibatches: Minibatches | None = None  # of the rounds in ``_cut``
        self._open_cut = ExitStack()  # closing it deletes the stored minibatches

    @abstractmethod
    def keep_rows(self) -> AbstractContextManager[None]:
        """Return a context manager in whose block Spark may store the rows for all epochs.

        Without the option ``storage_level``, Spark recomputes them instead.
        """

    @abstractmethod
    def inspect(self, task: RowsTask) -> list[Any]:
        """Run ``task`` on the rows of every partition; return everything that it yields."""

    @abstractmethod
    def max_rounds_stored_at_once(self, facts: Sequence[PartitionFacts]) -> int:
        """Return the maximum number of rounds whose minibatches are stored at the same time."""

    @abstractmethod
    def store_minibatches(
        self, cut: StoredRounds, task: RowsWritingTask
    ) -> AbstractContextManager[Minibatches]:
        """Return a context manager that stores the minibatches that ``task`` yields.

        ``cut`` names the rounds to which these minibatches belong.
        """

    @abstractmethod
    def send_parts(self, nbytes: int, parts: Iterator[bytes]) -> PayloadParts:
        """Send a payload of ``nbytes`` bytes, given in parts, to executors; return its handle."""

    @contextmanager
    def open(self) -> Iterator[Sequence[PartitionFacts]]:
        """Keep the rows available during the block; yield facts about each partition, in order.

        Raise the UsageError or SetupError of a partition whose rows do not suit the model.
        """
        try:
            with self.keep_rows(), self._open_cut, ExitStack() as stack:
                stack.callback(self._destroy_fresh_state)
                facts = []
                for one in self.inspect(partial(inspect_rows, self._packed)):
                    if not isinstance(one, PartitionFacts):
                        raise one
                    facts.append(one)
                self._facts = sorted(facts, key=lambda one: one.partition)
                yield self._facts
        finally:
            record_ended_fit(self._job.spec.job)

    def train(self, order: RoundOrder, state: RoundState) -> RoundResults:
        """Train one round, starting from ``state``; return its results, with traffic in bytes."""
        traffic = Counter[str]()
        minibatches = self._minibatches_for(order.plan, order.number)
        with ExitStack() as sent:
            start = self._send_start(order, state, sent, traffic)
            records = minibatches.get_round_records(order.number, start)
            reports, arrays = train_and_collect(records, self._packed, self._job, start)
        traffic[UPLOADED] += sum(report.sent_bytes for report in reports)
        return assemble_results(self._job, reports, arrays, traffic)

    def measure(self, plan: EpochPlan, state: RoundState) -> Sequence[HeldOutReport]:
        """Evaluate the parameters of ``state`` on the held-out rows.

        Return the workers' reports, sorted by partition.
        """
        minibatches = self._minibatches_for(plan, plan.rounds)
        payload = self._send_parameters(state)
        try:
            start = RoundInput(state.steps, payload, payload)
            records = minibatches.get_round_records(plan.rounds, start, measures=True)
            found = records.collect(partial(measure_partition, self._packed, start))
        finally:
            payload.destroy()
        return sorted(found, key=lambda one: one.partition)

    @property
    def _packed(self) -> PackedJob:
        """The pickled job for the next tasks, with a current list of fits that have ended."""
        return self._packed_job.with_ended_fits()

    def _minibatches_for(self, plan: EpochPlan, number: int) -> Minibatches:
        """Return stored minibatches that include those of round ``number``.

        If ``number`` is ``plan.rounds``, the held-out rows are meant. If the stored minibatches do
        not include the round, they are deleted, and those of this and following rounds are stored.
        """
        cut = self._cut
        if cut is None or cut.plan != plan or number not in cut.phases:
            self._open_cut.close()
            end = min(plan.rounds, number + self.max_rounds_stored_at_once(self._facts))
            checksums = tuple(one.checksum for one in self._facts)
            self._cut = cut = StoredRounds(plan, range(number, end), checksums)
            task = partial(write_minibatches, self._packed, cut)
            self._minibatches = self._open_cut.enter_context(self.store_minibatches(cut, task))
        assert self._minibatches is not None, "it was just made"
        return self._minibatches

    def _send_start(
        self, order: RoundOrder, state: RoundState, sent: ExitStack, traffic: Counter[str]
    ) -> RoundInput:
        """Send the state from which workers start a round; return handles of its payloads.

        Add the bytes sent to ``traffic``. Closing ``sent`` destroys the payloads, except for the
        optimizer state before the first step, which later rounds may use as well.
        """

        def send(payload: Payload, hosts: int) -> Payload:
            """Register a payload that ``hosts`` hosts read; count its bytes, and return it."""
            if payload is not self._fresh:  # the fresh state is sent once per fit
                sent.callback(payload.destroy)
                traffic[DOWNLOADED] += hosts * payload.nbytes
            return payload

        hosts = max(1, len({one.host for one in self._facts}))
        parameters = send(self._send_parameters(state), hosts)
        updater = send(self._send_optimizer_state(state), hosts)
        own = {p: send(self._send_state(load_state(state.own[p])), 1) for p in sorted(state.own)}
        return RoundInput(state.steps, parameters, updater, own, order.pace)

    def _send_parameters(self, state: RoundState) -> Payload:
        """Send the parameters and, if the model has any, its buffers; return the payload."""
        arrays: dict[str, Any] = {PARAMETERS: state.parameters}
        if state.buffers:
            arrays[BUFFERS] = np.frombuffer(state.buffers, np.uint8)
        return send_payload(self.send_parts, arrays, {}, self._job.sizes.part)

    def _send_optimizer_state(self, state: RoundState) -> Payload:
        """Send the optimizer state that workers have in common; return the payload.

        The state before the first step is sent only once per fit.
        """
        if state.updater is not state.fresh:
            return self._send_state(state.updater)
        if self._fresh is None:
            self._fresh = self._send_state(state.fresh)
        return self._fresh

    def _send_state(self, state: State) -> Payload:
        """Send an optimizer state; return the payload.

        Arrays are sent in parts. Other values are part of the payload object itself.
        """
        arrays = {name: value for name, value in state.items() if isinstance(value, np.ndarray)}
        plain = {name: value for name, value in state.items() if name not in arrays}
        return send_payload(self.send_parts, arrays, plain, self._job.sizes.part)

    def _destroy_fresh_state(self) -> None:
        """Destroy the payload of the fresh optimizer state (before any step), if it was sent."""
        if self._fresh is not None:
            self._fresh.destroy()


Arrays = dict[str, NDArray[Any]]
RoundOutput = tuple[list[SparkRoundReport], Arrays]  # reports sorted by worker; arrays by name


def train_and_collect(
    records: RoundRecords, packed: PackedJob, job: SparkRoundsJob, start: RoundInput
) -> RoundOutput:
    """Train one round; return all workers' reports and, unless a model failed, the result arrays.

    ``records`` are the round's minibatches, ``packed`` is the pickled ``job``, and ``start`` is the
    state from which workers start. Small results are sent to the driver program, which computes the
    means. Large results are handled by further tasks on executors; see
    ``_train_and_sum_on_executors``.
    """
    workers, sizes, footprint = job.spec.workers, job.sizes, footprint_of_model(job.model)
    size = worker_round_bytes(footprint, job.master)
    if workers * size <= sizes.direct:
        found = records.collect(partial(train_for_driver, packed, start))
        complete = read_complete(found, range(workers))
        reports = read_reports(complete)
        return reports, collect_arrays(reports, [mean_pieces(complete)])
    targets_to_sum = -(-size // (sizes.piece * sizes.pieces_per_task))
    results = round_result_bytes(footprint, job.master, workers)
    targets = max(targets_to_sum, -(-results // sizes.bytes_per_target))
    return _train_and_sum_on_executors(records, packed, job, start, targets)


def _train_and_sum_on_executors(
    records: RoundRecords, packed: PackedJob, job: SparkRoundsJob, start: RoundInput, targets: int
) -> RoundOutput:
    """Train one round whose results are collected on executors; return reports and arrays.

    If the option ``aggregation_depth`` is at least 2, executors sum the pieces in a tree of this
    depth and compute the means. Otherwise executors only collect the pieces, and the driver program
    computes the means. If a model failed, no arrays are returned.

    Args:
        records: The round's minibatches.
        packed: The pickled ``job``.
        job: What all rounds of the fit have in common.
        start: The state from which workers start.
        targets: Number of partitions over which the pieces are distributed. An additional
            partition receives the reports.
    """
    depth, workers = job.master.aggregation_depth, job.spec.workers
    levels = [*tree_levels(workers, depth), 1]
    task = TrainingTask(packed, start, levels[0], workers, targets)
    summed, sources = records.shuffle(task, levels[0] * (targets + 1)), workers
    for groups, following in itertools.pairwise(levels):
        task_of_level = SummingTask(sources, groups, following, targets, job.piece_bytes)
        summed, sources = summed.shuffle(task_of_level, following * (targets + 1)), groups
    with summed.results(MeanTask(sources, depth > 1)) as fetch:
        reports = read_reports(map(pickle.loads, fetch([targets])))
        if any(report.error is not None for report in reports):
            return reports, {}
        expected = _list_arrays_to_fetch(reports, are_means=depth > 1)
        loads = count_target_bytes(expected, targets, job.piece_bytes)
        parts = (
            map(pickle.loads, fetch(group))
            for group in group_by_load(loads.tolist(), job.sizes.collected)
        )
        means = parts if depth > 1 else map(mean_pieces, parts)
        return reports, collect_arrays(reports, means)


def _list_arrays_to_fetch(
    reports: Sequence[SparkRoundReport], *, are_means: bool
) -> Iterable[SplitArray]:
    """Return the names and sizes of the arrays that the driver program will fetch.

    Each array is listed once if ``are_means`` is True, otherwise once per worker that sends it.
    """
    arrays = [
        SplitArray(name, math.prod(shape), np.dtype(dtype).itemsize)
        for report in reports
        if report.weight
        for name, (shape, dtype) in report.shapes.items()
    ]
    return dict.fromkeys(arrays) if are_means else arrays


def read_reports(records: Iterable[ArrayPiece | ReportRecord]) -> list[SparkRoundReport]:
    """Return the workers' reports among the records, sorted by worker."""
    found = [record.value for record in records if isinstance(record, ReportRecord)]
    return sorted(found, key=lambda one: one.partition)


def collect_arrays(
    reports: Iterable[SparkRoundReport], parts: Iterable[Iterable[ArrayPiece | ReportRecord]]
) -> Arrays:
    """Assemble arrays from their pieces; return them by name.

    ``reports`` contain the arrays' shapes and dtypes. ``parts`` are lists of records; records other
    than pieces are ignored.
    """
    shapes = {name: shape for one in reports for name, shape in one.shapes.items()}
    arrays: Arrays = {}
    for record in itertools.chain.from_iterable(parts):
        if isinstance(record, ArrayPiece):
            if record.name not in arrays:
                arrays[record.name] = np.empty(*shapes[record.name])
            flat = arrays[record.name].reshape(-1)
            flat[record.begin : record.begin + record.values.size] = record.values
    return arrays


def assemble_results(
    job: SparkRoundsJob, reports: Sequence[SparkRoundReport], arrays: Arrays, traffic: Counter[str]
) -> RoundResults:
    """Return a round's results, built from the workers' reports and the result arrays.

    Parameters are removed from ``arrays``, so that their memory is released early. If a worker
    failed or none trained, the results contain only the reports and ``traffic`` (bytes by kind).
    """
    results = RoundResults(reports, traffic=traffic)
    trained = [report for report in reports if report.weight]
    if not trained or any(report.error is not None for report in reports):
        return results
    if job.master.accumulator is None:
        results.parameters = arrays.pop(PARAMETERS)
    else:
        results.parameters = np.empty((len(trained), job.spec.n_params), np.float32)
        for row, report in zip(results.parameters, trained, strict=True):
            row[:] = arrays.pop(f"{report.partition}/{PARAMETERS}")  # each is released at once
    states: dict[str, State] = {}  # by owner: "", or a worker's number and a slash
    for name, array in arrays.items():
        owner, _, own_name = name.partition(OPTIMIZER)
        states.setdefault(owner, {})[own_name] = array
    if job.master.save_updater == PER_WORKER:
        results.own = {
            one.partition: {**one.scalars, **states.get(f"{one.partition}/", {})} for one in trained
        }
    elif job.master.save_updater:
        weights, steps = [one.weight for one in trained], [one.steps for one in trained]
        scalars = merge_scalars([one.scalars for one in trained], weights, steps)
        results.updater = {**scalars, **states.get("", {})}
    return results
