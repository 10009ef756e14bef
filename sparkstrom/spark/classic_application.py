"""Implement ``Application``, the interface to Spark that fits use, with a SparkContext.

The SparkContext is in this process and offers every feature of Spark, whereas Spark Connect
(``connect.application``) lacks some.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from sparkstrom.data.column_selection import ColumnSpec
from sparkstrom.data.row_sample import RowSample
from sparkstrom.fit.evaluation import Evaluation, MetricSpec
from sparkstrom.fit.events import FitListener
from sparkstrom.fit.fit_context import FitReporting, TaskSlots
from sparkstrom.fit.strategy import Strategy
from sparkstrom.models.base import FlatModel
from sparkstrom.observe.progress_display import captures_descriptors, is_in_notebook
from sparkstrom.options.common import CommonOptions
from sparkstrom.options.gradient_sharing import SharedTrainingMaster
from sparkstrom.options.parameter_averaging import (
    ParameterAveragingTrainingMaster,
    TrainingMaster,
    needs_repartitioning,
)
from sparkstrom.options.resolution import PREFIX
from sparkstrom.planning.memory import (
    MemoryRequirement,
    explain_memory_kill,
    footprint_of_model,
    rounds_memory,
)
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.protocol.master.members import CheckpointFiles
from sparkstrom.rounds.run import MakeJob
from sparkstrom.runtime.theta import Theta
from sparkstrom.spark.application import Notify
from sparkstrom.spark.controller.controller_placement import ClassicControllerPlacer
from sparkstrom.spark.controller.driver_messages import ControlEndpoint
from sparkstrom.spark.controller.reachability import resolve_controller
from sparkstrom.spark.data import partitioning
from sparkstrom.spark.data.partitioning import PartitionedData, read_first_blocks
from sparkstrom.spark.executor.entry_points import (
    LazyPickle,
    delete_worker_files,
    redact_pickled_tasks,
    run_training_task,
)
from sparkstrom.spark.executor.inference import evaluate_source
from sparkstrom.spark.executor_slots import (
    await_slots,
    driver_host,
    get_slots,
    is_context_stopped,
    live_conf,
)
from sparkstrom.spark.jobs import (
    DecommissionMonitor,
    OutOfMemoryMonitor,
    SlotMonitor,
    SparkJob,
    cancel_jobs_on_interrupt,
)
from sparkstrom.spark.rounds import rdd
from sparkstrom.spark.rounds.rdd import RddRoundsBackend
from sparkstrom.spark.rounds.tasks import SparkRoundsJob
from sparkstrom.worker.training_job import (
    ParametersBroadcast,
    StateBroadcast,
    TrainingJob,
    broadcast_parameters,
)


class ClassicApplication:
    """Implements ``Application`` with a SparkContext.

    Args:
        context: An active SparkContext.
        session: The SparkSession that reads files and whose options ``spark.sparkstrom.*`` apply.
            If it is None, the active session reads files, and the context's options apply.
    """

    def __init__(self, context: Any, session: Any = None) -> None:
        """Store context and session, and keep pickled tasks, which contain keys, out of the log."""
        self._context, self._session = context, session
        redact_pickled_tasks()

    @property
    def name(self) -> str:
        """The application's id."""
        return str(self._context.applicationId)

    @property
    def session(self) -> Any:
        """The session with which the application was made; for a context, the active one."""
        from pyspark.sql import SparkSession

        return self._session or SparkSession.builder.getOrCreate()

    @property
    def live_conf(self) -> Any:
        """Spark's configuration; its ``get(key, default)`` reads one key and copies no others."""
        return live_conf(self._context)

    @property
    def is_stopped(self) -> bool:
        """Whether the SparkContext was stopped."""
        return is_context_stopped(self._context)

    @property
    def host(self) -> str:
        """Address of Spark's driver, as executors reach it."""
        return driver_host(self._context)

    def conf(self) -> Mapping[str, str]:
        """Return a copy of the whole Spark configuration, with the session's own options.

        The context's configuration lacks the ``spark.sparkstrom.*`` options that a running session
        was given by its builder or ``conf.set``, so they are read from the session.
        """
        conf = dict(self._context.getConf().getAll())
        return conf if self._session is None else conf | read_session_options(self._session)

    @property
    def has_workers_output(self) -> bool:
        """Whether tasks write to the standard error of this program, as they do in local mode.

        In a notebook, this is True only if the kernel shows the output of subprocesses and Spark's
        JVM is a subprocess of this program.
        """
        if not re.fullmatch(r"local(\[.*\])?", self._context.master):
            return False
        launched = getattr(self._context._gateway, "proc", None) is not None
        return not is_in_notebook() or (launched and captures_descriptors(sys.stderr))

    def check(self, strategy: Strategy[CommonOptions]) -> None:
        """Accept all options: a SparkContext supports everything."""

    def check_data(self, data: Any) -> None:
        """Raise UsageError unless ``data`` is an RDD or a DataFrame."""
        partitioning.check_data(data)

    def require_rdds(self, what: str, instead: str) -> None:
        """Do nothing: a SparkContext has RDDs."""

    def await_slots(self, seconds: float, notify: Notify) -> TaskSlots:
        """Wait until executors have registered; return the number of executors and of task slots.

        Raise SetupError if no executor has registered after ``seconds``. During a longer wait,
        ``notify`` shows the user a line of text. See ``executor_slots.await_slots``.
        """
        return await_slots(self._context, seconds, notify)

    def resolve_controller(
        self, master: SharedTrainingMaster, slots: TaskSlots, notify: Notify
    ) -> SharedTrainingMaster:
        """Return the options with ``controller="auto"`` replaced, after a probe by UDP.

        The controller will run in this program if executors reach this program by UDP, and in a
        Spark task otherwise.
        """
        return resolve_controller(master, self._context, slots, notify)

    def get_local_property(self, key: str) -> str | None:
        """Return the value of this thread's Spark property ``key``, or None if it is not set."""
        value: str | None = self._context.getLocalProperty(key)
        return value

    def create_thread(self, run: Callable[[], None], name: str) -> threading.Thread:
        """Return an unstarted thread that executes ``run`` with this thread's Spark properties."""
        from pyspark import InheritableThread  # closes its connection to the JVM

        return InheritableThread(target=run, name=name)

    def cancel_jobs_on_interrupt(self) -> AbstractContextManager[None]:
        """During the block, let Ctrl-C cancel all Spark jobs and raise KeyboardInterrupt."""
        return cancel_jobs_on_interrupt(self._context)

    def partition_data(
        self, data: Any, columns: ColumnSpec, workers: int, master: TrainingMaster
    ) -> PartitionedData:
        """Return the rows, distributed over one partition per worker or left where they are.

        The option ``repartition`` decides whether rows are redistributed.
        """
        source = partitioning.create_source(data, columns)
        move = needs_repartitioning(master.repartition, source.rdd, workers)
        partitioned = partitioning.partition_source(source, workers, master.rng_seed, move=move)
        return partitioned._replace(first=partial(read_first_blocks, self._context, source))

    def broadcast_parameters(
        self, theta: Theta, workers: int, state: bytes
    ) -> AbstractContextManager[ParametersBroadcast]:
        """Return a context manager that broadcasts the parameters and one optimizer state.

        The broadcast variables are destroyed when the block ends.
        """
        return broadcast_parameters(self._context, theta, workers, state)

    @contextmanager
    def broadcast_worker_states(
        self, states: Mapping[int, bytes]
    ) -> Iterator[dict[int, StateBroadcast]]:
        """Broadcast each worker's own optimizer state during the block.

        Yield the broadcast variables by partition. Every executor stores all states as files, but a
        worker reads only its own.
        """
        handles = {index: self._context.broadcast(state) for index, state in states.items()}
        try:
            yield handles
        finally:
            for handle in handles.values():
                handle.destroy()

    def create_training_job(
        self, job: TrainingJob, data: PartitionedData, memory: MemoryRequirement
    ) -> SparkJob:
        """Return the unstarted job of a gradient-sharing fit; each task trains one partition."""
        run = partial(run_training_task, LazyPickle(job, job.controller_route), data.blocks)
        runner = data.rdd.mapPartitionsWithIndex(run).collect
        explain = partial(explain_memory_kill, self.live_conf, memory)
        return SparkJob(self._context, f"sparkstrom-{job.spec.job:016x}", runner, explain)

    def create_rounds_backend(
        self,
        spec: FitSpec,
        model: FlatModel,
        master: ParameterAveragingTrainingMaster,
        data: PartitionedData,
    ) -> tuple[RddRoundsBackend, MakeJob]:
        """Return the backend that trains rounds with RDDs, and a function that creates the job."""
        footprint = footprint_of_model(model)
        requirement = rounds_memory(self.live_conf, spec.workers, footprint, master)
        explain = partial(explain_memory_kill, self.live_conf, requirement)
        group = f"sparkstrom-{spec.job:016x}"

        def make_job(run: Callable[[], list[str]]) -> SparkJob:
            """Return an unstarted job whose thread trains all rounds by executing ``run``."""
            return SparkJob(self._context, group, run, explain, "sparkstrom averaging")

        job = SparkRoundsJob(spec, model, master, data.rows, rdd.SIZES)
        return RddRoundsBackend(self._context, job, data), make_job

    def executor_monitors(self, job: SparkJob, notify: Notify) -> list[FitListener]:
        """Return the listeners that watch the job's executors.

        One warns of killed containers and dead Python processes; one moves workers off executors
        that are being decommissioned.
        """
        return [OutOfMemoryMonitor(job, notify), DecommissionMonitor(job, notify)]

    def rounds_monitors(self, job: SparkJob, reporting: FitReporting) -> list[FitListener]:
        """Return the listeners that watch the Spark jobs of a fit in rounds.

        One warns of killed containers and dead Python processes; one shows that no task has a slot.
        """
        return [OutOfMemoryMonitor(job, reporting.warn), SlotMonitor(job, reporting.progress.say)]

    def create_controller_placer(
        self,
        training: TrainingJob,
        checkpoints: CheckpointFiles,
        control: ControlEndpoint,
        notify: Notify,
    ) -> ClassicControllerPlacer:
        """Return a placer that submits the controller's task with a preferred location."""
        return ClassicControllerPlacer(self._context, training, checkpoints, control, notify)

    def get_control_addresses(self) -> tuple[str, str]:
        """Return two addresses of Spark's driver: one to listen on, and one for executors."""
        return str(self.live_conf.get("spark.driver.bindAddress", self.host)), self.host

    def broadcast_value(self, value: Any) -> Any:
        """Return a broadcast variable that contains the value."""
        return self._context.broadcast(value)

    def draw_sample(self, data: Any, columns: ColumnSpec, rows: int, seed: int) -> RowSample:
        """Return a random sample of ``rows`` rows, or all if there are fewer; executors draw it.

        Raise UsageError if there are no rows.
        """
        return partitioning.draw_sample(partitioning.create_source(data, columns), rows, seed)

    def evaluate(
        self, model: Any, metrics: MetricSpec, data: Any, columns: ColumnSpec
    ) -> Evaluation:
        """Return metrics over an RDD or DataFrame. Raise UsageError if a row is invalid."""
        return evaluate_source(model, metrics, partitioning.create_source(data, columns))

    def delete_worker_files(self, network: str) -> None:
        """Run a job that deletes the files that workers of the SparkNetwork ``network`` left."""
        slots = get_slots(self._context).total
        forget = partial(delete_worker_files, network)
        self._context.parallelize(range(slots), slots).mapPartitions(forget).count()


def read_session_options(session: Any) -> dict[str, str]:
    """Return the keys ``spark.sparkstrom.*`` of a SparkSession's configuration."""
    pairs, options = session.conf._jconf.getAll().iterator(), {}  # Spark 3.5 has no conf.getAll
    while pairs.hasNext():
        pair = pairs.next()
        if pair._1().startswith(PREFIX):
            options[pair._1()] = pair._2()
    return options
