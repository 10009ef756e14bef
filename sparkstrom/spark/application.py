"""Define ``Application``, the interface to Spark that fits use, and ``Predictor``, built on it.

``classic_application`` implements the interface with a SparkContext in this process, and
``connect.application`` with DataFrames of a Spark Connect session. Other code depends only on
``Application``. ``Predictor`` uses an application to compute outputs and metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import shown
from sparkstrom.data.column_selection import (
    FEATURES,
    ColumnNames,
    ColumnSpec,
    check_column_spec,
    features_to_arrays,
)
from sparkstrom.data.row_sample import RowSample
from sparkstrom.fit.evaluation import Evaluation, MetricSpec, evaluate_arrays
from sparkstrom.fit.events import FitListener
from sparkstrom.fit.fit_context import FitReporting, TaskSlots
from sparkstrom.fit.strategy import Strategy
from sparkstrom.models.base import Flat, FlatModel
from sparkstrom.options.common import CommonOptions
from sparkstrom.options.gradient_sharing import SharedTrainingMaster
from sparkstrom.options.parameter_averaging import ParameterAveragingTrainingMaster, TrainingMaster
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.runtime.theta import Theta
from sparkstrom.spark.controller.remote_controller import ControllerApplication
from sparkstrom.spark.data import partitioning
from sparkstrom.spark.data.partitioning import PartitionedData
from sparkstrom.spark.executor.inference import (
    TrainedModel,
    UdfInputs,
    UdfShapes,
    add_output_columns,
    add_score_column,
    check_can_score,
    create_inference_udf,
    predict_pairs,
    predict_rows,
    score_rdd,
)
from sparkstrom.spark.jobs import SparkJob
from sparkstrom.worker.training_job import ParametersBroadcast, StateBroadcast

if TYPE_CHECKING:  # importing some of these compiles kernels
    from sparkstrom.rounds.backend import RoundsBackend
    from sparkstrom.rounds.run import MakeJob
    from sparkstrom.worker.training_job import TrainingJob


Notify = Callable[[str], None]  # shows the user one line of text
PREDICTION = "prediction"  # default name of the column with a model's outputs


SESSION_STOPPED = (
    "the Spark session was stopped (spark.stop()): make a network with a new session; a network of"
    " the stopped one still has its parameters (new.parameters = network.parameters, or"
    " network.save and SparkNetwork.load)"
)


def require_active_session(application: Application) -> None:
    """Raise UsageError if the Spark session was stopped."""
    if application.is_stopped:
        raise UsageError(SESSION_STOPPED)


class Application(ControllerApplication, Protocol):
    """One Spark application, as a driver program or a Spark Connect client sees it."""

    @property
    def name(self) -> str:
        """Id of the application or session. Broadcast values are valid only within it."""
        ...

    @property
    def session(self) -> Any:
        """The SparkSession that reads files."""
        ...

    @property
    def live_conf(self) -> Any:
        """Spark's current configuration: an object whose ``get(key, default)`` reads one key."""
        ...

    @property
    def host(self) -> str:
        """Address at which executors can reach this program's machine."""
        ...

    @property
    def is_stopped(self) -> bool:
        """Whether the session was stopped, so that Spark runs no more jobs."""
        ...

    def conf(self) -> Mapping[str, str]:
        """Return a copy of the whole Spark configuration, with the session's own options."""
        ...

    @property
    def has_workers_output(self) -> bool:
        """Whether this program's standard error already shows what tasks print."""
        ...

    def check(self, strategy: Strategy[CommonOptions]) -> None:
        """Raise UsageError if this kind of application lacks what the strategy's options need."""

    def check_data(self, data: Any) -> None:
        """Raise UsageError if a fit or evaluation in this application cannot read ``data``."""

    def require_rdds(self, what: str, instead: str) -> None:
        """Raise UsageError if this kind of application has no RDDs.

        For the message, ``what`` names the feature that needs RDDs, and ``instead`` an alternative.
        """

    def await_slots(self, seconds: float, notify: Notify) -> TaskSlots:
        """Wait for executors to register; return the number of executors and of task slots.

        A task slot is an executor's capacity for one task. Raise SetupError if no executor has
        registered after ``seconds``. During a longer wait, ``notify`` shows the user a line of
        text.
        """
        ...

    def resolve_controller(
        self, master: SharedTrainingMaster, slots: TaskSlots, notify: Notify
    ) -> SharedTrainingMaster:
        """Return the options with ``controller="auto"`` replaced by "driver" or "executor".

        The controller coordinates the workers of a fit. It will run in the driver program or, on an
        executor, in a Spark task of its own, which takes one of ``slots``. ``notify`` shows the
        user a line of text.
        """
        ...

    def get_local_property(self, key: str) -> str | None:
        """Return the value of this thread's Spark property ``key``, or None if it is not set."""
        ...

    def cancel_jobs_on_interrupt(self) -> AbstractContextManager[None]:
        """Return a context manager; in its block, Ctrl-C cancels jobs and raises KeyboardInterrupt.

        With a SparkContext, all its jobs are cancelled; with Spark Connect, only those that the
        calling thread started in the block.
        """
        ...

    def partition_data(
        self, data: Any, columns: ColumnSpec, workers: int, master: TrainingMaster
    ) -> PartitionedData:
        """Return the rows of ``data``, distributed over one partition per worker.

        Args:
            data: An RDD or DataFrame.
            columns: Which columns of a DataFrame contain features, labels and weights.
            workers: Number of workers.
            master: The user's options. Its ``repartition`` may keep the existing partitions.
        """
        ...

    def broadcast_parameters(
        self, theta: Theta, workers: int, state: bytes
    ) -> AbstractContextManager[ParametersBroadcast]:
        """Return a context manager that makes the initial parameters available on executors.

        Its value is a handle for reading the parameters there, valid inside the block.

        Args:
            theta: The parameters.
            workers: Number of workers that read the parameters.
            state: One encoded optimizer state for all workers; b"" if they start without one.
        """
        ...

    def broadcast_worker_states(
        self, states: Mapping[int, bytes]
    ) -> AbstractContextManager[dict[int, StateBroadcast]]:
        """Return a context manager that makes each worker's own optimizer state available to it.

        ``states`` maps a partition to its worker's encoded state. The context manager's value maps
        the partition to a handle of that state, valid inside the block.
        """
        ...

    def create_training_job(self, job: TrainingJob, data: PartitionedData, memory: Any) -> SparkJob:
        """Return the unstarted Spark job of a gradient-sharing fit; its tasks are the workers.

        ``job`` is what each worker's task receives, and ``data`` are the rows, in one partition per
        worker. ``memory`` is the executors' memory requirement, for messages about killed
        containers.
        """
        ...

    def create_rounds_backend(
        self,
        spec: FitSpec,
        model: FlatModel,
        master: ParameterAveragingTrainingMaster,
        data: PartitionedData,
    ) -> tuple[RoundsBackend, MakeJob]:
        """Return the backend, which runs a fit's rounds, and a function that creates the fit's job.

        In a round, each worker trains some minibatches, and the results are averaged. The job's
        thread runs all rounds; each round starts its own Spark jobs.
        """
        ...

    def executor_monitors(self, job: SparkJob, notify: Notify) -> list[FitListener]:
        """Return listeners that watch the job's executors and report problems with ``notify``."""
        ...

    def rounds_monitors(self, job: SparkJob, reporting: FitReporting) -> list[FitListener]:
        """Return listeners that watch the Spark jobs of a fit in rounds and report problems."""
        ...

    def broadcast_value(self, value: Any) -> Any:
        """Return a handle whose ``value`` is ``value``, in this program and in executors' tasks."""
        ...

    def draw_sample(self, data: Any, columns: ColumnSpec, rows: int, seed: int) -> RowSample:
        """Return a random sample of ``rows`` rows, or all if there are fewer; executors draw it.

        Raise UsageError if there are no rows.
        """
        ...

    def evaluate(
        self, model: Any, metrics: MetricSpec, data: Any, columns: ColumnSpec
    ) -> Evaluation:
        """Return the metrics of a model over all rows of ``data``.

        Args:
            model: Handle of a ``TrainedModel``, from ``broadcast_value``.
            metrics: The metrics to compute.
            data: An RDD or DataFrame.
            columns: Which columns of a DataFrame contain features, labels and weights.

        Raises:
            UsageError: A row is invalid.
        """
        ...

    def delete_worker_files(self, network: str) -> None:
        """Delete the files that workers of a ``SparkNetwork`` left on executors.

        ``network`` is the SparkNetwork's id, which the files' names contain.
        """


class Predictor:
    """Predicts and evaluates with a trained model, on executors or in this process.

    Args:
        application: Runs the Spark jobs.
        current: Returns the model, bound to a copy of its parameters, and a second copy of the
            parameters.
    """

    def __init__(
        self, application: Application, current: Callable[[], tuple[FlatModel, Flat]]
    ) -> None:
        self._application, self._bind_current = application, current
        self._broadcast: Any = None  # newest broadcast model, reused until the parameters change

    def predict(
        self, data: Any, features: ColumnNames, output: str | tuple[str, ...] | dict[str, str]
    ) -> Any:
        """Return the outputs for arrays, an RDD or a DataFrame; see ``SparkNetwork.predict``."""
        if partitioning.is_dataframe(data):
            return add_output_columns(data, self._broadcast_model(), features, output)
        _refuse_column_names(features, output)
        if hasattr(data, "mapPartitionsWithIndex"):
            return data.mapPartitionsWithIndex(partial(predict_rows, self._broadcast_model()))
        model, _ = self._bind_current()
        return model.predict(features_to_arrays(data))

    def predict_with_keys(
        self, pairs: Any, features: ColumnNames = FEATURES, output: str = PREDICTION
    ) -> Any:
        """Return an RDD of (key, outputs), given one of (key, features).

        Spark computes each partition of ``pairs`` only once. Raise UsageError if ``features`` or
        ``output``, which an RDD does not have, are not the defaults.
        """
        _refuse_column_names(features, output)
        return pairs.mapPartitionsWithIndex(partial(predict_pairs, self._broadcast_model()))

    def udf(self, inputs: UdfInputs, shapes: UdfShapes, output: Any) -> Any:
        """Return a Spark function that computes outputs from columns; see ``SparkNetwork.udf``."""
        return create_inference_udf(self._broadcast_model(), inputs, shapes, output)

    def score(self, data: Any, columns: ColumnSpec, output: str, *, penalized: bool) -> Any:
        """Return each row's loss: an RDD for an RDD, or the DataFrame with a new column ``output``.

        If ``penalized`` is True, each loss includes the model's regularization penalty. See
        ``SparkNetwork.score_examples``.
        """
        check_can_score(self._bind_current()[0], penalized)
        if partitioning.is_dataframe(data):
            return add_score_column(data, self._broadcast_model(), columns, output, penalized)
        return score_rdd(
            self._broadcast_model(), partitioning.create_source(data, columns), penalized
        )

    def evaluate(self, data: Any, metrics: MetricSpec, columns: ColumnSpec) -> Evaluation:
        """Return metrics over an RDD, a DataFrame, or arrays (features, labels) in this process."""
        if isinstance(data, tuple):
            check_column_spec(columns, dataframe=False, data_kind="a tuple of arrays")
            return evaluate_arrays(self._bind_current()[0], metrics, data)
        require_active_session(self._application)
        self._application.check_data(data)
        return self._application.evaluate(self._broadcast_model(), metrics, data, columns)

    def _broadcast_model(self) -> Any:
        """Return a handle from which tasks read the model with its current parameters.

        If the model and parameters are unchanged, the previous handle is returned again.
        """
        require_active_session(self._application)
        trained = TrainedModel.from_model(*self._bind_current())
        if self._broadcast is None or self._broadcast.value.digest != trained.digest:
            self._broadcast = self._application.broadcast_value(trained)
        return self._broadcast


def _refuse_column_names(features: ColumnNames, output: object) -> None:
    """Raise UsageError if columns are named for a prediction of data without named columns.

    A pandas DataFrame would be read as one array of all its columns, in their order.
    """
    for name, value, default in (
        ("features", features, FEATURES),
        ("output", output, PREDICTION),
    ):
        if not (isinstance(value, str) and value == default):
            raise UsageError(
                f"{name}={shown(value)}: only a Spark DataFrame has named columns; leave {name}"
                " out, and give an RDD of features, or arrays, such as frame[names].to_numpy() of a"
                " pandas DataFrame"
            )
