"""Run one gradient-sharing fit with worker processes on this machine.

The controller, which coordinates the workers, runs in the calling process. All processes share one
media driver (Aeron's process for messages) and exchange updates over shared memory. Worker
processes that die are replaced.
"""

from __future__ import annotations

import logging
import os
import pickle
import secrets
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from sparkstrom.base.child_processes import pickle_by_value
from sparkstrom.base.clock import SystemClock
from sparkstrom.base.errors import SparkstromError, TrainingError
from sparkstrom.codec.sealed_frames import KEY_BYTES, Seal
from sparkstrom.encoding.backends import warm_up
from sparkstrom.fit.early_stopping_listener import EarlyStoppingListener
from sparkstrom.fit.events import FitListener
from sparkstrom.fit.fit_context import FitReporting
from sparkstrom.fit.listeners import ProgressListener, ResidualLogListener
from sparkstrom.fit.master_setup import make_master_limits, make_master_plan
from sparkstrom.fit.session import FitRunner
from sparkstrom.local.data import RowFile, write_file
from sparkstrom.local.worker_pool import (
    HOST,
    ActiveWorkers,
    GradientSharingTask,
    WorkerAnswer,
    WorkerPool,
    WorkerTask,
)
from sparkstrom.models.base import FlatModel
from sparkstrom.observe.epoch_history import EpochHistory
from sparkstrom.options.gradient_sharing import SharedTrainingMaster
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.protocol.master.members import CheckpointFiles
from sparkstrom.runtime.master_thread import MasterThread
from sparkstrom.runtime.node_thread import OpenTransport
from sparkstrom.runtime.optimizer_states import OptimizerStates
from sparkstrom.runtime.theta import Theta
from sparkstrom.transport.aeron.driver_directories import ProcessIdentity, identify_process
from sparkstrom.transport.aeron.media_driver import DriverOptions
from sparkstrom.worker.network_setup import ControllerRoute, transport_opener, warm_up_transport
from sparkstrom.worker.task_environment import TaskEnvironment, unpickle_without_collecting
from sparkstrom.worker.training_job import TrainingJob, pack_parameters

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"  # address for UDP, which only the messages for joining the fit use
EDGES_OVER_UDP = 2  # number of neighbours for which UDP buffers are sized; join messages are short
EXECUTOR_NAME = "host"  # all workers count as tasks of one executor


@dataclass(frozen=True, slots=True)
class LocalFitContext:
    """The model, options and worker processes that all fits of one ParallelWrapper share."""

    model: FlatModel  # the model to train
    master: SharedTrainingMaster  # the user's options
    name: str  # prefix of the files that workers keep for the next fit
    pool: WorkerPool  # the worker processes
    scratch: Path  # the wrapper's scratch directory

    def make_environment(self, partition: int, attempt: int) -> TaskEnvironment:
        """Return the environment for training a partition: host, scratch directory and threads.

        ``attempt`` counts how often the partition's worker was restarted in this fit.
        """
        return TaskEnvironment(
            partition, attempt, HOST, EXECUTOR_NAME, self.scratch, self.pool.threads
        )


@dataclass(frozen=True, slots=True)
class PartitionedRows:
    """The rows of one fit in one file per worker, and the directory with all files of the fit."""

    files: tuple[RowFile, ...]  # by partition
    directory: Path  # the fit's directory, which is deleted after the fit


class LocalFitRunner(FitRunner):
    """Runs one gradient-sharing fit on this machine: its controller and its worker processes.

    Args:
        context: Model, options and processes of the wrapper.
        spec: Number of workers, epochs and other facts of the fit.
        theta: The controller's replica of the parameters. After the fit it contains the result.
        rows: The workers' rows.
        files: Files with residuals (learned changes not sent yet) that workers kept in an earlier
            fit.
        states: Optimizer states with which workers start.
    """

    theta: Theta

    def __init__(
        self,
        context: LocalFitContext,
        spec: FitSpec,
        theta: Theta,
        rows: PartitionedRows,
        files: CheckpointFiles,
        states: OptimizerStates,
    ) -> None:
        warm_up()
        warm_up_transport()
        spec = spec.with_epochs_closed()
        self._context, self.spec, self.theta, self._rows = context, spec, theta, rows
        self.states = states
        self.book = EpochHistory(spec.first_epoch)
        self._key = secrets.token_bytes(KEY_BYTES)
        self._driver = LocalMediaDriver.for_this_process(spec.job, spec.workers)
        options = context.master
        self.master = MasterThread(
            make_master_plan(spec, theta, context.model, options, files),
            make_master_limits(options, spec.workers, theta.n_params),
            theta,
            open_transport=self._driver.opener(),
            seal=Seal.from_fit_key(self._key, spec.job),
            clock=SystemClock(),
        )

    def run(
        self, reporting: FitReporting, stopping: EarlyStoppingListener, *others: FitListener
    ) -> None:
        """Run the fit to its end, or raise the error that ended it early."""
        job = pickle_by_value(self._make_job())

        def make_task(partition: int, attempt: int) -> WorkerTask:
            environment = self._context.make_environment(partition, attempt)
            return GradientSharingTask(job, environment, self._rows.files[partition])

        self._supervise(
            ProcessJob(self._context.pool, make_task, reporting.warn),
            stopping,
            ProgressListener(reporting.progress),
            ResidualLogListener(),
            reporting.record,
            *others,
        )

    def _make_job(self) -> LocalTrainingJob:
        """Return the job that is sent to the workers; large values are written to files."""
        context, directory, states = self._context, self._rows.directory, self.states
        own = {  # per-worker states from a checkpoint
            partition: FileHandle.write(state, directory / f"state-{partition}")
            for partition, state in states.own.items()
        }
        return LocalTrainingJob(
            spec=self.spec,
            key=self._key,
            model=context.model,
            master=context.master,
            k=self.theta.k,
            layers=self.theta.layers,
            endpoint=self.master.endpoint,
            join_stream=self.master.join_stream,
            network=context.name,
            initial=FileHandle.write(
                pack_parameters(self.theta, states.one), directory / "initial"
            ),
            own_states=own,
            driver=self._driver,
        )


MakeTask = Callable[[int, int], WorkerTask]  # (partition, attempt) -> task


class ThreadedJob(ABC):
    """A job that runs in a thread. Subclasses add ``_run``, and ``FitJob``'s remaining members."""

    def __init__(self, name: str) -> None:
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @abstractmethod
    def _run(self) -> None:
        """Run the job in its thread; store an error in ``error``."""

    def fail(self, text: str, error: BaseException) -> None:
        """Log an unexpected exception and store it, with a description, as the job's error.

        Without this, the thread would end silently.
        """
        log.exception("%s", text)
        self.error = TrainingError(f"{text}: {error!r}")
        self.error.__cause__ = error

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether the job's thread is still running."""
        return self._thread.is_alive()

    def wait(self, seconds: float) -> bool:
        """Wait up to ``seconds`` for the job to end; return whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def killed_for_memory(self) -> list[str]:
        """Return []: only a cluster manager would report processes killed for their memory."""
        return []


class ProcessJob(ThreadedJob):
    """Runs the tasks of one fit in worker processes.

    A thread sends the tasks, collects reports and replaces processes that die, until it has a
    report for each partition. ``warn`` shows the user why a process was replaced.
    """

    def __init__(self, pool: WorkerPool, make_task: MakeTask, warn: Callable[[str], None]) -> None:
        super().__init__("sparkstrom-processes")
        self._warn = warn
        self._workers, self._make_task = ActiveWorkers(pool), make_task
        self._missing = set[int]()  # partitions without a report
        self._reports: dict[int, str] = {}
        self._cancelled = threading.Event()

    @property
    def reports(self) -> list[Any]:
        """The workers' reports as JSON, in order of partition."""
        return [report for _, report in sorted(self._reports.items())]

    def cancel(self) -> None:
        """Request that worker processes without a report be killed. Does not wait for that."""
        self._cancelled.set()

    def _run(self) -> None:
        """Send each worker its task, and handle answers until all workers have reported.

        If ``cancel`` is called or an error occurs, kill the processes without a report.
        """
        try:
            self._missing.update(self._workers.begin())
            for partition in sorted(self._missing):
                self._send_task(partition)
            while self._missing and not self._cancelled.is_set():
                for partition, answer in self._workers.answers(self._missing):
                    self._handle_answer(partition, answer)
        except SparkstromError as error:
            self.error = error
        except BaseException as error:
            self.fail("the worker processes' thread failed", error)
        finally:
            self._workers.drop(self._missing)

    def _send_task(self, partition: int) -> None:
        """Send a partition's worker the task for its current attempt."""
        task = self._make_task(partition, self._workers.attempts[partition])
        self._workers.send(partition, task)

    def _handle_answer(self, partition: int, answer: WorkerAnswer | None) -> None:
        """Record a worker's report, or start another attempt if the task failed.

        ``answer`` is None if the worker's process died. Raise the worker's error if another attempt
        cannot succeed, and TrainingError after too many attempts.
        """
        if answer is not None and not answer.failure:
            self._reports[partition] = answer.report
            self._missing.remove(partition)
            return
        if answer is None:
            how = self._workers.replace(partition)
            self._warn(f"the process of partition {partition} {how}: another one has replaced it")
        elif self._workers.count_failure(partition) or not answer.is_superseded:
            raise answer.as_error(partition)
        else:
            self._workers.start_attempt(partition)
        self._send_task(partition)


@dataclass(frozen=True, slots=True)
class LocalMediaDriver:
    """The name and options of the media driver that all processes of one fit share."""

    job: int  # id of the fit
    workers: int  # number of workers
    owner: ProcessIdentity  # the calling process; the media driver exits when this process dies

    @classmethod
    def for_this_process(cls, job: int, workers: int) -> LocalMediaDriver:
        """Return the media driver for a fit in this process, with this process as the owner."""
        return cls(job, workers, identify_process(os.getpid()))

    @property
    def key(self) -> str:
        """The name by which the fit's processes find the media driver."""
        return f"{self.job:016x}-host"

    def options(self, *, is_exclusive: bool = False) -> DriverOptions:
        """Return the media driver's options.

        ``is_exclusive``: whether closing the media driver waits until it has exited. Only the
        calling process waits.
        """
        return DriverOptions(
            host=LOOPBACK,
            edges=EDGES_OVER_UDP,
            local_edges=self.workers,
            scratch=Path(tempfile.gettempdir()),
            watch=self.owner,
            is_exclusive=is_exclusive,
        )

    def opener(self) -> OpenTransport:
        """Return a function that opens the calling process's transport over this media driver."""
        return transport_opener(self.key, self.options(is_exclusive=True))


@dataclass(frozen=True, slots=True)
class LocalRoute(ControllerRoute):
    """A worker's route to the controller, through the media driver that both share."""

    driver: LocalMediaDriver = field(kw_only=True)  # shared by all processes of the fit

    def driver_key(self, place: TaskEnvironment) -> str:
        """Return the name of the media driver that all workers share, whatever their ``place``."""
        return self.driver.key

    def driver_options(self, place: TaskEnvironment) -> DriverOptions:
        """Return the options of the shared media driver, which are the same for all workers.

        If the media driver fails, the worker that restarts it prefers the former port.
        """
        return replace(self.driver.options(), port_preferred=self.endpoint.port)


@dataclass(frozen=True, slots=True)
class LocalTrainingJob(TrainingJob):
    """What worker processes on this machine need for a fit."""

    driver: LocalMediaDriver = field(kw_only=True)  # shared by all processes of the fit

    @property
    def controller_route(self) -> ControllerRoute:
        """The workers' route to the controller, through the shared media driver."""
        void, workers = self.master.void, self.spec.workers
        edges = EDGES_OVER_UDP, workers
        return LocalRoute(self.spec.job, self.endpoint, void, *edges, driver=self.driver)


@dataclass(frozen=True)
class FileHandle:
    """A reference to a file with one large pickled value. It is sent to workers, not the value."""

    path: str  # of the file

    @classmethod
    def write(cls, value: Any, path: Path) -> FileHandle:
        """Write the value to a file and return a reference to it.

        Raise SetupError if the disk is full.
        """
        write_file(path, pickle.dumps(value))
        return cls(str(path))

    @cached_property
    def value(self) -> Any:
        """The value, read from the file at the first access."""
        return unpickle_without_collecting(Path(self.path).read_bytes())
