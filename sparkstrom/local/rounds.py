"""Run round-based training with worker processes on one machine.

In each round, all workers start with the same parameters and train independently for some steps;
then their results are averaged (``rounds``). All processes map the same file of parameters: row 0
contains the parameters with which a round starts, and row 1 + p the result of partition p. Buffers
(model state other than parameters) and optimizer states are also passed in files. If a process is
replaced, its replacement repeats the round from the same files, so nothing is lost or counted
twice.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparkstrom.base.child_processes import pickle_by_value
from sparkstrom.base.clock import SystemClock
from sparkstrom.base.errors import TrainingError
from sparkstrom.codec.optimizer_state_codec import decode_state_untrusted, encode_state
from sparkstrom.data.row_blocks import Block
from sparkstrom.local.data import RowFile, allocate_file, write_file
from sparkstrom.local.fit_runner import LocalFitContext, PartitionedRows, ThreadedJob
from sparkstrom.local.worker_pool import HOST, ActiveWorkers, WorkerTask, step_limit
from sparkstrom.models.base import Batch, Flat, FlatModel, State, get_buffers, load_buffers
from sparkstrom.options.gradient_sharing import SharedTrainingMaster
from sparkstrom.options.parameter_averaging import PER_WORKER
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.rounds.averaging import (
    AveragingOptions,
    RoundResults,
    RoundState,
    StoredState,
    load_state,
)
from sparkstrom.rounds.backend import EpochPlan, PartitionFacts, RoundOrder, RoundsBackend
from sparkstrom.rounds.worker_round import (
    HeldOutReport,
    ReplicaReport,
    RoundBatch,
    RoundPace,
    RoundReport,
    RoundStart,
    measure_held_out,
    reporting,
    train_and_report,
)
from sparkstrom.runtime.output_capture import WorkerOutput
from sparkstrom.worker.task_environment import (
    TaskEnvironment,
    load_batches,
    place_model,
    unpickle_without_collecting,
)

log = logging.getLogger(__name__)

PARAMETERS, BUFFERS, STATE = "parameters", "buffers", "updater"  # file names
F32 = np.dtype("<f4")


class LocalRounds(RoundsBackend):
    """Runs the rounds of one fit in worker processes.

    A process that dies is replaced, and its replacement repeats the task.
    """

    def __init__(
        self,
        context: LocalFitContext,
        spec: FitSpec,
        options: AveragingOptions,
        rows: PartitionedRows,
    ) -> None:
        super().__init__()
        self._context, self._spec, self._options, self._rows = context, spec, options, rows
        self._directory = rows.directory
        self._job = pickle_by_value(LocalRoundsJob(spec, context.model, context.master))
        self._workers = ActiveWorkers(context.pool)
        self._facts = dict[int, PartitionFacts]()  # by partition
        # How processes were lost, by partition, until the next report includes it.
        self._lost_attempts = defaultdict[int, list[str]](list)
        self._written = dict[Path, object]()  # the object that was last written to each file

    @contextmanager
    def open(self) -> Iterator[Sequence[PartitionFacts]]:
        """Start the processes, make them read their rows, and yield facts about all partitions.

        This is a context manager. At the end of its ``with`` block, the processes are killed if the
        block raised an exception or ``abort`` was called; otherwise they continue. Raise
        TrainingError if another thread closes the ParallelWrapper.
        """
        n_params, done = self._spec.n_params, False
        n_bytes = (1 + self._spec.workers) * n_params * F32.itemsize
        with self._context.pool.translate_closing_errors():
            allocate_file(self._directory / PARAMETERS, n_bytes)
            self._shared = map_parameters(self._directory, n_params)
            try:
                self._read_rows(self._workers.begin())
                yield list(self._facts.values())
                done = not self._aborted.is_set()
            finally:
                if not done:  # a process may still work on a task
                    self._workers.drop(range(self._spec.workers))

    def train(self, order: RoundOrder, state: RoundState) -> RoundResults:
        """Train one round in the processes; return their reports and combined results.

        Return only the reports if a model failed or no trained row has a weight.
        """
        self._write_start(state)
        reports: list[RoundReport] = self._run_tasks_for_reports(
            {
                p: TrainRound(order.plan.epoch, batches, state.steps, order.pace, p in state.own)
                for p in self._facts
                if (batches := order.plan.batches(order.number, p))
            }
        )
        if any(report.error for report in reports):
            return RoundResults(reports)
        trained = [report.partition for report in reports if report.weight]
        states: dict[int, State | StoredState] = {}
        if self._options.save_updater == PER_WORKER:
            states |= {p: self._adopt_result_state(p) for p in trained}
        elif self._options.save_updater:
            states |= {
                p: MappedOptimizerState(result_state_path(self._directory, p)) for p in trained
            }
        rows = [self._shared[1 + p] for p in trained]
        return RoundResults.combine(self._options, reports, rows, states)

    def measure(self, plan: EpochPlan, state: RoundState) -> Sequence[HeldOutReport]:
        """Evaluate the model on held-out rows; return reports of the processes that have any."""
        self._write_start(state)
        tasks = {p: MeasureHeldOut() for p, facts in self._facts.items() if facts.held_out}
        return self._run_tasks_for_reports(tasks)

    def end(self, state: RoundState) -> Sequence[ReplicaReport]:
        """Close all workers; return their reports with hashes of the parameters that they read."""
        self._write_start(state)
        return self._run_tasks_for_reports({p: EndRounds() for p in self._facts})

    def _write_start(self, state: RoundState) -> None:
        """Write the state with which a round starts to the shared files, unless unchanged."""
        self._shared[0] = state.parameters
        if state.buffers:
            self._write_if_changed(self._directory / BUFFERS, state.buffers)
        self._write_if_changed(self._directory / STATE, state.updater)
        for partition, own in state.own.items():
            self._write_if_changed(own_state_path(self._directory, partition), own)

    def _write_if_changed(self, path: Path, value: Any) -> None:
        """Write bytes or an optimizer state to ``path``, unless it was written there last."""
        if self._written.get(path) is not value:
            content = value if isinstance(value, bytes) else encode_state(load_state(value))
            write_file(path, content)
            self._written[path] = value

    def _adopt_result_state(self, partition: int) -> MappedOptimizerState:
        """Let a worker start the next round with the optimizer state that it ended this one with.

        Return a handle of that state.
        """
        path = own_state_path(self._directory, partition)
        result_state_path(self._directory, partition).replace(path)
        self._written[path] = state = MappedOptimizerState(path)
        return state

    def _read_rows(self, partitions: Iterable[int]) -> None:
        """Make the processes of these partitions read their rows.

        Raise TrainingError if a replacement process finds different rows than its predecessor did.
        """
        tasks = {
            p: BeginRounds(
                self._job,
                self._context.make_environment(p, self._workers.attempts[p]),
                self._rows.files[p],
                str(self._directory),
            )
            for p in partitions
        }
        for partition, facts in self._run_tasks(tasks).items():
            if self._facts.setdefault(partition, facts) != facts:
                raise TrainingError(f"partition {partition} has different rows than before")

    def _run_tasks_for_reports(self, tasks: Mapping[int, WorkerTask]) -> list[Any]:
        """Run one task per partition; return the reports in order, with ``lost_attempts`` set."""
        reports = self._run_tasks(tasks)
        for partition, report in reports.items():
            report.lost_attempts = self._lost_attempts.pop(partition, [])
        return list(reports.values())

    def _run_tasks(self, tasks: Mapping[int, WorkerTask]) -> dict[int, Any]:
        """Run one task per partition; return the results in order of partition.

        Raise a task's error, TrainingError if a partition's processes die too often, and
        FitCancelled after ``abort``.
        """
        results = dict[int, Any]()
        for partition, task in tasks.items():
            self._workers.send(partition, task)
        while missing := tasks.keys() - results.keys():
            for partition, answer in self._workers.answers(missing):
                if answer is None:
                    how = self._workers.replace(partition)
                    self._lost_attempts[partition].append(f"its process {how}")
                    self._read_rows([partition])
                    self._workers.send(partition, tasks[partition])
                elif answer.failure:
                    raise answer.as_error(partition)
                else:
                    results[partition] = answer.report
            self.check_aborted()
        return dict(sorted(results.items()))


class RoundsThread(ThreadedJob):
    """Trains all rounds of a fit in a thread.

    Args:
        train: Trains all rounds and returns the workers' reports.
        abort: Makes ``train`` end early.
    """

    def __init__(self, train: Callable[[], list[str]], abort: Callable[[], None]) -> None:
        super().__init__("sparkstrom-rounds")
        self._train, self.cancel = train, abort
        self.reports: list[Any] = []

    def _run(self) -> None:
        """Train all rounds; store an unexpected exception as the job's error."""
        try:
            self.reports = self._train()
        except BaseException as error:
            self.fail("the rounds failed", error)


class MappedOptimizerState:
    """An encoded optimizer state in a memory-mapped file; it survives the file's replacement."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def load(self) -> State:
        """Decode the state and return it."""
        return decode_state_untrusted(self._content[:])


def map_parameters(directory: Path, n_params: int) -> Flat:
    """Map the parameters that all processes share, f32[1 + workers, n_params], from their file."""
    return np.memmap(directory / PARAMETERS, F32, "r+").reshape(-1, n_params)


def own_state_path(directory: Path, partition: int) -> Path:
    """Return the path of the optimizer state with which only this partition starts a round."""
    return directory / f"{STATE}-{partition}"


def result_state_path(directory: Path, partition: int) -> Path:
    """Return the path of the file with a partition's optimizer state after a round."""
    return directory / f"{STATE}-{partition}-result"


@dataclass(frozen=True, slots=True)
class LocalRoundsJob:
    """The description of a fit that every worker process receives."""

    spec: FitSpec  # number of workers, epochs and other facts of the fit
    model: FlatModel  # the model to train
    master: SharedTrainingMaster  # the user's options
    rows: tuple[int, ...] = ()  # number of rows by partition; empty: not counted in advance


class RoundsWorker:
    """Trains and evaluates one partition in a worker process, with its rows and a model."""

    def __init__(
        self, job: LocalRoundsJob, place: TaskEnvironment, blocks: Iterator[Block], directory: Path
    ) -> None:
        place_model(job, place)
        self._job, self._place = job, place
        self._spec, self._model, self._partition = job.spec, job.model, place.partition
        self._directory, self._step_s = directory, job.master.step_timeout
        self._delay_s = job.master.debug_longer_iterations / 1000
        self._batches = load_batches(job, place, blocks)
        self._shared = map_parameters(directory, job.spec.n_params)
        self._params = np.empty(job.spec.n_params, F32)
        self._output = WorkerOutput(SystemClock())  # limits the printed lines of the whole fit

    @property
    def facts(self) -> PartitionFacts:
        """The partition's numbers of rows and minibatches, and the rows' checksum."""
        return PartitionFacts.from_batches(self._partition, self._batches, HOST)

    def train(self, task: TrainRound) -> RoundReport:
        """Train one round, write the results to the shared files, and return a report.

        The results are the parameters and the optimizer state. If the model fails, none are
        written, and the report contains the error.
        """
        report = RoundReport(self._partition, HOST, executor=HOST)
        with reporting(report, self._output):
            step_limit.start_step(self._step_s)
            place_model(self._job, self._place, task.steps_before)  # same seed in a repeated round
            state = self._read_state(own=task.has_own_state)
            start = RoundStart(
                self._load_parameters(), self._read_buffers(), state, task.steps_before, task.pace
            )
            batches = self._read_batches(task, report)
            result = train_and_report(self._model, start, batches, report)
        if report.error is None:
            step_limit.start_step(self._step_s)
            began_s = time.monotonic()
            self._shared[1 + self._partition] = result.parameters
            content = encode_state(result.updater)
            write_file(result_state_path(self._directory, self._partition), content)
            report.sent_bytes = result.parameters.nbytes
            report.add_seconds("encoding", began_s)
        return report

    def measure(self) -> HeldOutReport:
        """Evaluate the shared parameters on the held-out rows; return a report with the sums."""
        report = HeldOutReport(self._partition, HOST)
        with reporting(report, self._output):
            measure_held_out(
                self._model,
                self._load_parameters(),
                self._read_buffers(),
                self._read_held_out(),
                self._spec.metric,
                report,
            )
        return report

    def close(self) -> ReplicaReport:
        """Release the rows; return a report with a hash of the shared parameters and buffers."""
        self._model.bind(self._load_parameters())
        load_buffers(self._model, self._read_buffers())
        self._batches.close()
        content = self._params.tobytes() + get_buffers(self._model)
        digest = hashlib.sha256(content).hexdigest()
        return ReplicaReport(self._partition, HOST, digest=digest)

    def _read_batches(self, task: TrainRound, report: RoundReport) -> Iterator[RoundBatch]:
        """Yield the task's minibatches; restart the time limit before each read and each step."""
        for index in task.batches:
            began_s = time.monotonic()
            step_limit.start_step(self._step_s)
            batch = self._batches.get(task.epoch, index)
            report.add_seconds("reading", began_s)
            step_limit.start_step(self._step_s)
            time.sleep(self._delay_s)
            yield RoundBatch(batch, self._batches.place(task.epoch, index))

    def _read_held_out(self) -> Iterator[Batch]:
        """Yield the held-out minibatches; restart the time limit before each of them."""
        for batch in self._batches.held_out:
            step_limit.start_step(self._step_s)
            yield batch

    def _load_parameters(self) -> Flat:
        """Copy and return a round's initial parameters from the shared file, f32[n_params]."""
        self._params[:] = self._shared[0]
        return self._params

    def _read_buffers(self) -> bytes:
        """Return a round's initial buffers; b"" if the model has none."""
        path = self._directory / BUFFERS
        return path.read_bytes() if path.exists() else b""

    def _read_state(self, *, own: bool) -> State:
        """Return a round's initial optimizer state: this partition's ``own``, or the common one."""
        path = self._directory / STATE
        if own:
            path = own_state_path(self._directory, self._partition)
        return decode_state_untrusted(path.read_bytes())


_worker: list[RoundsWorker] = []  # the worker of this process, from BeginRounds to EndRounds


@dataclass(frozen=True, slots=True)
class BeginRounds:
    """Task: read the partition's rows and create a worker for the tasks that follow."""

    job: bytes  # a pickled LocalRoundsJob
    place: TaskEnvironment  # partition, attempt and resources of the worker
    rows: RowFile  # the partition's rows
    directory: str  # directory of the fit's shared files

    def run(self) -> PartitionFacts:
        """Create this process's worker and return facts about its rows."""
        _worker.clear()
        job, directory = unpickle_without_collecting(self.job), Path(self.directory)
        _worker.append(RoundsWorker(job, self.place, self.rows.blocks(), directory))
        return _worker[0].facts


@dataclass(frozen=True, slots=True)
class TrainRound:
    """Task: train one round, starting from the shared parameters."""

    epoch: int  # epoch of this fit, from 0
    batches: range  # indices of the minibatches in the epoch
    steps_before: int  # number of steps that each worker trained before the round
    pace: RoundPace  # position of the whole fit, for learning-rate schedules
    has_own_state: bool  # whether the optimizer continues with the partition's own state

    def run(self) -> RoundReport:
        """Train with this process's worker and return its report."""
        return _worker[0].train(self)


@dataclass(frozen=True, slots=True)
class MeasureHeldOut:
    """Task: evaluate the shared parameters on the partition's held-out rows."""

    def run(self) -> HeldOutReport:
        """Evaluate with this process's worker and return its report."""
        return _worker[0].measure()


@dataclass(frozen=True, slots=True)
class EndRounds:
    """Task: end training on the partition."""

    def run(self) -> ReplicaReport:
        """Close this process's worker and return its last report."""
        return _worker.pop().close()
