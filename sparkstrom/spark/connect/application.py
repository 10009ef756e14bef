"""Implement ``Application`` with a Spark Connect session: ``ConnectApplication``.

Options, data and features that need RDDs are rejected, with an alternative in the message. A client
cannot list executors, so a job reports the executors that run its tasks. If there are no executors,
that job would wait forever, so it is cancelled after ``start_timeout`` seconds, an option of fits.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

from sparkstrom.base.errors import SetupError, UsageError
from sparkstrom.data.arrow_conversion import read_batch_blocks
from sparkstrom.data.column_selection import ColumnSpec, check_column_spec
from sparkstrom.data.row_sample import RowSample, merge_samples, sample_partition
from sparkstrom.fit.evaluation import Evaluation, MetricSpec, merge_evaluations_or_raise
from sparkstrom.fit.events import FitListener
from sparkstrom.fit.fit_context import FitReporting, TaskSlots
from sparkstrom.fit.strategy import GradientSharing, Strategy
from sparkstrom.fit.supervisor import FitJob, cancel_job
from sparkstrom.models.base import FlatModel
from sparkstrom.options.common import CommonOptions
from sparkstrom.options.gradient_sharing import SharedTrainingMaster
from sparkstrom.options.network import AUTO, EXECUTOR, parse_controller
from sparkstrom.options.parameter_averaging import (
    IF_COUNT_DIFFERS,
    ParameterAveragingTrainingMaster,
    TrainingMaster,
)
from sparkstrom.options.resolution import local_ip
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.protocol.master.members import CheckpointFiles
from sparkstrom.rounds.run import MakeJob
from sparkstrom.runtime.theta import Theta
from sparkstrom.spark.application import Notify
from sparkstrom.spark.connect import dataframe_rounds
from sparkstrom.spark.connect.controller_placement import ConnectControllerPlacer
from sparkstrom.spark.connect.jobs import (
    RESULT_SCHEMA,
    ConnectJob,
    ValueUploader,
    collect_later,
    identify_executor,
    run_partition_task,
    run_rowless_task,
    run_short_job,
)
from sparkstrom.spark.connect.partitioning import (
    WorkerDataFrame,
    choose_batch_rows,
    limit_batch_rows,
    partition_dataframe,
)
from sparkstrom.spark.controller.driver_messages import ControlEndpoint
from sparkstrom.spark.data.column_selection import select_columns
from sparkstrom.spark.data.partitioning import PartitionedData, check_data, is_dataframe
from sparkstrom.spark.executor.entry_points import (
    LazyPickle,
    delete_worker_files,
    redact_pickled_tasks,
    run_training_task,
)
from sparkstrom.spark.executor.inference import evaluate_partition
from sparkstrom.spark.executor_slots import (
    FIRST_NOTICE_S,
    NOTICE_INTERVAL_S,
    REGISTRATION_POLL_S,
    compute_slots,
    count_executor_slots,
    count_workers,
    list_resources,
)
from sparkstrom.spark.jobs import SparkJob
from sparkstrom.spark.rounds.tasks import SparkRoundsJob
from sparkstrom.worker.training_job import (
    ParametersBroadcast,
    StateBroadcast,
    TrainingJob,
    pack_parameters,
)

USE_CLASSIC_HINT = "or start the program with spark-submit, without .remote(...)"


def check_options(strategy: Strategy[CommonOptions]) -> None:
    """Raise UsageError for options that Spark Connect cannot support.

    These need RDDs, a host for the controller, or the number of a DataFrame's partitions.
    """
    master = strategy.master
    if master.rdd_training_approach == "export":
        raise UsageError(
            "rdd_training_approach='export' writes and reads by RDDs, which a Spark Connect session"
            " does not have: leave it out (and write the DataFrame to Parquet yourself, where it is"
            f" expensive to make), {USE_CLASSIC_HINT}"
        )
    if parse_controller(strategy.controller).host:
        raise UsageError(
            f"controller={strategy.controller!r}: a Spark Connect session cannot ask for a host;"
            f" write controller='executor', {USE_CLASSIC_HINT}"
        )
    if master.repartition == IF_COUNT_DIFFERS:
        raise UsageError(
            f"repartition={IF_COUNT_DIFFERS!r} depends on the number of partitions, which Spark"
            " Connect does not report: write repartition='always' or 'never',"
            f" {USE_CLASSIC_HINT}"
        )


def check_dataframe(data: Any, session: Any) -> None:
    """Raise UsageError unless ``data`` is a DataFrame of ``session``."""
    if not is_dataframe(data):
        if hasattr(data, "mapPartitions"):
            raise UsageError(
                "data is an RDD, which a Spark Connect session cannot take: pass a DataFrame with"
                f" features=... and label=... columns, {USE_CLASSIC_HINT}"
            )
        raise UsageError(
            f"data has type {type(data).__module__}.{type(data).__name__}: pass a Spark DataFrame"
            " with features=... and label=... columns; spark.createDataFrame(...) makes one of a"
            " pandas DataFrame or a list of rows"
        )
    check_data(data)
    if data.sparkSession is not session:
        raise UsageError(
            "data is a DataFrame of a different session than the network's: create both with one"
            " session"
        )


# Settings of Spark's default number of tasks.
TASKS_OF_A_JOB = {"spark.default.parallelism", "spark.sql.leafNodeDefaultParallelism"}
WAITING_NOTICE = "sparkstrom waits: for executors of {}, which a job counts"
NO_EXECUTORS = (
    "no executor of {} has run a task within {:g} s (start_timeout): check the cluster's web page:"
    " are executors running, does the cluster have the cores and the memory that they need, or do"
    " other clients of this server, or another application, hold their slots? On YARN and"
    " Kubernetes, no job has to count executors if the server's spark.executor.instances is set"
)


def discover_executors(
    job: FitJob, server: str, seconds: float, notify: Callable[[str], None]
) -> list[Any]:
    """Run a job whose tasks yield their executors; return what they yield, one item per task.

    Args:
        job: The unstarted job.
        server: Description of the Spark Connect server, for messages.
        seconds: How long the job may take.
        notify: Shows the user a line of text while the job waits.

    Raises:
        SetupError: The job has not finished in time; it is then cancelled.
        Exception: The error with which the job failed.
    """
    start_s = time.monotonic()
    notice_s = start_s + FIRST_NOTICE_S
    job.start()
    try:
        while not job.wait(REGISTRATION_POLL_S):
            now_s = time.monotonic()
            if now_s - start_s > seconds:
                raise SetupError(NO_EXECUTORS.format(server, seconds))
            if now_s > notice_s:
                notice_s = now_s + NOTICE_INTERVAL_S
                notify(WAITING_NOTICE.format(server))
    except BaseException:
        cancel_job(job)
        raise
    if job.error is not None:
        raise job.error
    return job.reports


def evaluate_dataframe(model: Any, metrics: MetricSpec, frame: Any, spec: ColumnSpec) -> Evaluation:
    """Return a model's metrics over all rows of a DataFrame.

    Raise UsageError if a row does not suit the model; the message names the row.
    """
    check_column_spec(spec, dataframe=True)
    columns, plan = select_columns(frame, spec)
    task = partial(evaluate_partition, model, metrics, partial(read_batch_blocks, plan))
    run = partial(run_partition_task, task)
    return merge_evaluations_or_raise(
        run_short_job(columns.mapInArrow(run, RESULT_SCHEMA), "evaluating")
    )


def sample_dataframe(frame: Any, spec: ColumnSpec, rows: int, seed: int) -> RowSample:
    """Return a random sample of ``rows`` rows of a DataFrame, or of all if there are fewer.

    Raise UsageError if the DataFrame has no rows.
    """
    check_column_spec(spec, dataframe=True)
    columns, plan = select_columns(frame, spec)
    task = partial(sample_partition, partial(read_batch_blocks, plan), rows, seed)
    run = partial(run_partition_task, task)
    return merge_samples(
        run_short_job(columns.mapInArrow(run, RESULT_SCHEMA), "sampling rows"), rows, seed
    )


class ConnectApplication:
    """Implements ``Application`` with a Spark Connect session.

    Args:
        session: The SparkSession, created with ``.remote(...)``.
    """

    def __init__(self, session: Any) -> None:
        self._session, self._uploads = session, ValueUploader(session)
        redact_pickled_tasks()
        self._slots: TaskSlots | None = None  # the task slots that the newest fit found

    @property
    def name(self) -> str:
        """The session's id."""
        return str(self._session.session_id)

    @property
    def session(self) -> Any:
        """The session with which the application was made."""
        return self._session

    @property
    def is_stopped(self) -> bool:
        """Whether the session was stopped."""
        return bool(getattr(self._session, "is_stopped", False))  # Spark 3.5 has no is_stopped

    @property
    def live_conf(self) -> Any:
        """A copy of Spark's configuration; each access requests it from the server again."""
        return self.conf()

    @property
    def host(self) -> str:
        """Address of this program's machine on its route to the Spark Connect server.

        The environment variable SPARKSTROM_LOCAL_IP (or DL4J_VOID_IP) can set another address.
        """
        return local_ip(os.environ) or _find_local_address(self._session.client.host)

    def conf(self) -> Mapping[str, str]:
        """Return a copy of the whole Spark configuration."""
        return read_session_conf(self._session)

    def check(self, strategy: Strategy[CommonOptions]) -> None:
        """Raise UsageError for options that Spark Connect does not support."""
        check_options(strategy)

    @property
    def has_workers_output(self) -> bool:
        """False: the cluster's machines show what tasks print, not this program."""
        return False

    def check_data(self, data: Any) -> None:
        """Raise UsageError unless ``data`` is a DataFrame of this session."""
        check_dataframe(data, self._session)

    def require_rdds(self, what: str, instead: str) -> None:
        """Always raise UsageError: Spark Connect has no RDDs."""
        raise UsageError(
            f"{what} is not supported over Spark Connect: {instead}, {USE_CLASSIC_HINT}"
        )

    def await_slots(self, seconds: float, notify: Notify) -> TaskSlots:
        """Return the numbers of executors and task slots. A slot is the capacity for one task.

        They follow from the configuration. If the configuration does not set the number of
        executors, a job counts them. Raise SetupError if the job takes more than ``seconds``.
        """
        conf = self.conf()
        resources = list_resources(conf)
        list_executors = cache(partial(self._list_executors, conf, seconds, notify))
        self._slots = compute_slots(
            conf,
            conf.get("spark.master", ""),
            resources,
            lambda: len(list_executors()),
            lambda: sum(
                count_executor_slots(conf, cores, resources) for cores in list_executors().values()
            ),
        )
        return self._slots

    def _list_executors(
        self, conf: Mapping[str, str], seconds: float, notify: Notify
    ) -> dict[str, int]:
        """Run a job with Spark's default number of tasks; return the cores of each executor found.

        The keys are the executors' names. In local mode the number of cores is the number of the
        job's tasks, unless the configuration ``conf`` sets that number. ``seconds`` and ``notify``
        are as in ``await_slots``.
        """
        run = partial(self._run_tasks, identify_executor, None, "counting executors")
        job = ConnectJob(self._session, f"sparkstrom-{secrets.token_hex(8)}", run)
        server = f"the Spark Connect server {self._session.client.host}"
        found = discover_executors(job, server, seconds, notify)
        if conf.get("spark.master", "").startswith("local[") and not conf.keys() & TASKS_OF_A_JOB:
            found = [(name, len(found)) for name, _ in found]
        return dict(found)

    def resolve_controller(
        self, master: SharedTrainingMaster, slots: TaskSlots, notify: Notify
    ) -> SharedTrainingMaster:
        """Return the options with ``controller="auto"`` replaced by "executor".

        This works even if executors cannot reach the client. Raise UsageError if there are not
        enough task slots for the workers and the controller.
        """
        if master.void.controller == AUTO:
            void = replace(master.void, controller=EXECUTOR, controller_address=None)
            master = replace(master, void=void)
        count_workers(slots, GradientSharing(master))
        return master

    def get_local_property(self, key: str) -> str | None:
        """Return None: Spark Connect has no local properties."""
        return None

    def create_thread(self, run: Callable[[], None], name: str) -> threading.Thread:
        """Return an unstarted ordinary thread that executes ``run``.

        Any thread may call Spark Connect; only a SparkContext needs pyspark's InheritableThread.
        """
        return threading.Thread(target=run, name=name)

    @contextlib.contextmanager
    def cancel_jobs_on_interrupt(self) -> Iterator[None]:
        """Let Ctrl-C cancel the Spark operations that this thread starts during the block.

        KeyboardInterrupt is then raised. A tag identifies these operations for Spark Connect.
        """
        tag = f"sparkstrom-{secrets.token_hex(8)}"
        self._session.addTag(tag)
        try:
            yield
        except KeyboardInterrupt:
            self._session.interruptTag(tag)
            raise
        finally:
            self._session.removeTag(tag)

    def partition_data(
        self, data: Any, columns: ColumnSpec, workers: int, master: TrainingMaster
    ) -> PartitionedData:
        """Return the rows, distributed over one partition per worker or left where they are.

        The option ``repartition`` decides whether rows are redistributed.
        """
        move = master.repartition == "always"
        with limit_batch_rows(self._session, choose_batch_rows(data)):
            return partition_dataframe(data, columns, workers, seed=master.rng_seed, move=move)

    @contextlib.contextmanager
    def broadcast_parameters(
        self, theta: Theta, workers: int, state: bytes
    ) -> Iterator[ParametersBroadcast]:
        """Upload ``theta`` and one optimizer state; yield a handle of parameters and state."""
        yield self._uploads.upload(pack_parameters(theta, state))

    @contextlib.contextmanager
    def broadcast_worker_states(
        self, states: Mapping[int, bytes]
    ) -> Iterator[dict[int, StateBroadcast]]:
        """Upload each worker's own optimizer state; yield the states' handles by partition."""
        yield {partition: self._uploads.upload(state) for partition, state in states.items()}

    def create_training_job(
        self, job: TrainingJob, data: PartitionedData, memory: Any
    ) -> ConnectJob:
        """Return the unstarted job of a gradient-sharing fit; each task trains one partition."""
        task = partial(run_training_task, LazyPickle(job, job.controller_route), data.blocks)
        input_frame: WorkerDataFrame = data.rdd
        results = input_frame.frame.mapInArrow(partial(run_partition_task, task), RESULT_SCHEMA)

        def runner() -> list[Any]:
            """Run the job with limited Arrow batches; return the values that its tasks yielded."""
            with limit_batch_rows(self._session, input_frame.batch_rows):
                return collect_later(results)()

        return ConnectJob(self._session, f"sparkstrom-{job.spec.job:016x}", runner)

    def create_rounds_backend(
        self,
        spec: FitSpec,
        model: FlatModel,
        master: ParameterAveragingTrainingMaster,
        data: PartitionedData,
    ) -> tuple[dataframe_rounds.DataFrameRoundsBackend, MakeJob]:
        """Return the backend of a round-based fit, and a function that creates the fit's job."""
        job = SparkRoundsJob(spec, model, master, data.rows, dataframe_rounds.PAYLOAD_SIZES)
        backend = dataframe_rounds.DataFrameRoundsBackend(self._session, job, data)
        return backend, partial(ConnectJob, self._session, f"sparkstrom-{spec.job:016x}")

    def executor_monitors(self, job: SparkJob, notify: Notify) -> list[FitListener]:
        """Return []: Spark Connect does not report on executors."""
        return []

    def rounds_monitors(self, job: SparkJob, reporting: FitReporting) -> list[FitListener]:
        """Return []: Spark Connect does not report on jobs and tasks."""
        return []

    def create_controller_placer(
        self,
        training: TrainingJob,
        checkpoints: CheckpointFiles,
        control: ControlEndpoint,
        notify: Notify,
    ) -> ConnectControllerPlacer:
        """Return a placer that starts the controller's task where it has cached a row."""
        return ConnectControllerPlacer(self._session, training, checkpoints, control, notify)

    def get_control_addresses(self) -> tuple[str, str]:
        """Return this machine's address twice: to listen on, and for executors to connect to."""
        return self.host, self.host

    def broadcast_value(self, value: Any) -> Any:
        """Return a handle of ``value``. It contains a small value; a large value is uploaded."""
        return self._uploads.upload(value)

    def draw_sample(self, data: Any, columns: ColumnSpec, rows: int, seed: int) -> RowSample:
        """Return a random sample of ``rows`` rows, or all if there are fewer; executors draw it.

        Raise UsageError if there are no rows.
        """
        with limit_batch_rows(self._session, choose_batch_rows(data)):
            return sample_dataframe(data, columns, rows, seed)

    def evaluate(
        self, model: Any, metrics: MetricSpec, data: Any, columns: ColumnSpec
    ) -> Evaluation:
        """Return metrics over a DataFrame. Raise UsageError if a row does not suit the model."""
        with limit_batch_rows(self._session, choose_batch_rows(data)):
            return evaluate_dataframe(model, metrics, data, columns)

    def delete_worker_files(self, network: str) -> None:
        """Run a job that deletes the files that workers of the SparkNetwork ``network`` left."""
        slots = self._slots.total if self._slots is not None else 1
        self._run_tasks(partial(delete_worker_files, network), slots, "deleting workers' files")

    def _run_tasks(self, task: Any, tasks: int | None, doing: str) -> list[Any]:
        """Run the function ``task``, without rows, in each task of a job; return what they yield.

        ``tasks`` is the number of the job's tasks; None means Spark's default. ``doing`` tells what
        the job does, for error messages.
        """
        rows = self._session.range(0, tasks or 1 << 20, 1, tasks)
        return run_short_job(rows.mapInArrow(partial(run_rowless_task, task), RESULT_SCHEMA), doing)


def read_session_conf(session: Any) -> dict[str, str]:
    """Return a session's whole configuration.

    Only Spark 4 has a public method for this; with Spark 3.5 a request is sent to the server.
    """
    conf = session.conf
    if hasattr(type(conf), "getAll"):
        return dict(conf.getAll)
    from pyspark.sql.connect import proto

    everything = proto.ConfigRequest.Operation(get_all=proto.ConfigRequest.GetAll())
    return dict(session.client.config(everything).pairs)


def _find_local_address(server: str) -> str:
    """Return the source address of packets from this machine to ``server``, without sending any.

    Raise UsageError if there is no route to the server.
    """
    host = server.rpartition(":")[0] if server.count(":") == 1 else server
    try:
        family, kind, *_, where = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UsageError(
            f"no network route to the Spark Connect server {server!r}: {error}"
        ) from None
