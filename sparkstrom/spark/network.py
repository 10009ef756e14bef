"""Define SparkNetwork, which trains a model on Spark executors and holds its parameters.

``make_application`` returns the ``Application``, sparkstrom's interface to Spark, for the
SparkSession or SparkContext with which a SparkNetwork is made. ``each_batch`` returns a function
that trains a SparkNetwork on one micro-batch; Spark calls it for each micro-batch of a streaming
query.
"""

from __future__ import annotations

import inspect
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import shown
from sparkstrom.checkpoint.saved_model import load_model, path_to_load
from sparkstrom.data.column_selection import ColumnNames, ColumnSpec
from sparkstrom.data.row_sample import RowSample
from sparkstrom.fit.checkpoints import FitCheckpoints, make_fit_key
from sparkstrom.fit.evaluation import Evaluation, select_metrics
from sparkstrom.fit.fit_context import FitReporting, FitRequest, TaskSlots
from sparkstrom.fit.network_state import copy_if_used
from sparkstrom.fit.session import FitSession
from sparkstrom.fit.summary import FitRecord, TrainingSummary
from sparkstrom.fit.trained_network import (
    TrainedNetwork,
    check_fit_arguments,
    dry_run_step,
    parse_epochs,
    restart_warnings,
    set_known_classes,
)
from sparkstrom.models.base import Batch, FlatModel
from sparkstrom.observe.early_stopping import EarlyStopping, TerminationCondition, limit_epochs
from sparkstrom.observe.progress_display import check_progress, make_progress_display
from sparkstrom.options.common import require_flag
from sparkstrom.options.gradient_sharing import SharedTrainingMaster
from sparkstrom.options.parameter_averaging import TrainingMaster
from sparkstrom.options.resolution import resolve
from sparkstrom.planning.memory import footprint_of_model
from sparkstrom.rehearsal.fit import FitRecipe
from sparkstrom.rehearsal.measurement import ClusterMeasurement, summarize_workers
from sparkstrom.rehearsal.rehearse import (
    DEFAULT_ROWS,
    DEFAULT_WORKERS,
    RehearsalRequest,
    make_recipe,
    rehearse,
)
from sparkstrom.rehearsal.result import Rehearsal
from sparkstrom.rehearsal.script import rehearse_instead
from sparkstrom.spark.application import Application, Predictor, require_active_session
from sparkstrom.spark.classic_application import ClassicApplication
from sparkstrom.spark.data.export import ExportCache
from sparkstrom.spark.data.partitioning import HeldOutFrames, PartitionedData, check_columns
from sparkstrom.spark.dl4j_method_names import Dl4jMethodNames
from sparkstrom.spark.executor.entry_points import pickle_by_value
from sparkstrom.spark.executor.rehearsal_measurement import check_barrier_stages, measure_workers
from sparkstrom.spark.executor_slots import (
    choose_resume_workers,
    count_workers,
    describe_allocation,
)
from sparkstrom.spark.fit_strategies import FitContext, strategy_for
from sparkstrom.worker.training_job import require_model

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger(__name__)


def is_connect_object(thing: Any) -> bool:
    """Return whether ``thing`` is a session, DataFrame or other object of Spark Connect."""
    return type(thing).__module__.startswith("pyspark.sql.connect")


def make_application(spark: Any) -> Application:
    """Return the ``Application`` of a SparkSession (classic or Spark Connect) or a SparkContext.

    Raise UsageError for any other object.
    """
    if is_connect_object(spark):
        from sparkstrom.spark.connect.application import ConnectApplication

        return ConnectApplication(spark)
    context = get_spark_context(spark)
    if isinstance(context, type) or not callable(getattr(context, "getConf", None)):
        raise UsageError(
            f"spark={shown(spark)}: must be a SparkSession or SparkContext, such as"
            " SparkSession.builder.getOrCreate()"
        )
    return ClassicApplication(context, spark if hasattr(spark, "conf") else None)


def get_spark_context(spark: Any) -> Any:
    """Return the SparkContext of a classic session, or a Spark Connect session itself.

    A SparkContext is returned unchanged. Connect sessions are recognized by their class, because in
    Spark 3.5 reading their ``sparkContext`` raises an error other than AttributeError.
    """
    return spark if is_connect_object(spark) else getattr(spark, "sparkContext", spark)


class SparkNetwork(Dl4jMethodNames, TrainedNetwork):
    """Trains a model on Spark executors and keeps its parameters from one fit to the next.

    Used in a ``with`` statement, the network is closed when the block ends.

    Args:
        spark: A SparkSession (classic or Spark Connect) or a SparkContext.
        model: The model to train.
        master: The training options: a SharedTrainingMaster, which is the default, or a
            ParameterAveragingTrainingMaster.
        progress: Whether or how to show progress: True (or "auto"), False, "bar", "plain" or
            "notebook" (docs/progress.md).
        keep: Whether workers keep files for the next fit. ``close`` removes these files.

    Raises:
        UsageError: The options, the configuration or the session cannot be used.
    """

    def __init__(
        self,
        spark: Any,
        model: FlatModel,
        master: TrainingMaster | None = None,
        *,
        progress: bool | str = True,
        keep: bool = True,
    ) -> None:
        check_progress(progress)
        keep = require_flag("keep", keep)
        require_model(model, pickle_by_value)
        self._application = application = make_application(spark)
        # Column specs for which ``_try_first_rows`` ran, and what it returned.
        self._tried_columns: dict[str, tuple[int, int] | None] = {}
        require_active_session(application)
        given = strategy_for(SharedTrainingMaster() if master is None else master).master
        self._conf = conf = application.conf()
        self._strategy = strategy_for(resolve(given, conf, os.environ))
        application.check(self._strategy)
        self._may_have_files = False  # whether executors may have files of a fit
        options, name = self._strategy.master, secrets.token_hex(8)
        self._context = get_spark_context(spark)
        self._exports = ExportCache(self._context, options.export_directory)
        self._held_out = HeldOutFrames(application.check_data)
        super().__init__(model, FitCheckpoints(model, options, name), progress)
        self._fit_context = FitContext(application, model, name, keep)
        self._predictor = Predictor(application, lambda: (self.model, self.parameters))

    def fit(
        self,
        data: Any,
        epochs: int = 1,
        *,
        features: ColumnNames = "features",
        label: ColumnNames | None = "label",
        weight: str | None = None,
        validation: float | str | DataFrame | None = None,
        early_stopping: EarlyStopping | Sequence[TerminationCondition] | None = None,
        listeners: Sequence[Any] = (),
        run_log: str | os.PathLike[str] | None = None,
    ) -> TrainingSummary:
        """Train for ``epochs`` epochs and return a summary.

        Args:
            data: A DataFrame, or an RDD of (features, label) or (features, label, weight).
            epochs: Number of passes over the data.
            features: A column of the DataFrame, a list of numeric columns that are concatenated
                into one array, or a tuple or dictionary of these for several arrays.
            label: Like ``features``; None if the model's loss takes its labels from the features.
            weight: Column with each row's weight.
            validation: Rows to hold out: a fraction, for which rows are selected by seed and
                content; the name of a boolean column; or a separate DataFrame with the same
                columns.
            early_stopping: Rule, or DL4J's termination conditions, that can end the fit before its
                last epoch. The fit then delivers the best parameters.
            listeners: Objects that receive the fit's events (docs/listeners.md).
            run_log: File for the events as JSON lines. None means a new file in the directory
                sparkstrom-runs, and "" means no file.

        Returns:
            What happened: losses, times, warnings and more.

        Raises:
            UsageError: An argument is invalid or does not suit the data.
            SetupError: The cluster or a host lacks something that training needs.
            TrainingError: Training failed; the error contains host, partition and traceback.
        """
        given: dict[str, Any] = {"features": features, "label": label, "weight": weight}
        rehearse_instead(self.rehearse, data, epochs=epochs, validation=validation, **given)
        require_active_session(self._application)
        record, options = FitRecord(), self._strategy.master
        named = ColumnSpec(features, label, weight)
        with (
            self._reserve(),
            closing(make_progress_display(self._progress)) as progress,
            self._checkpoints.undo_find_on_error(),
        ):
            data, columns = self._held_out.unite(data, named, validation, options.repartition)
            rule = check_fit_arguments(
                self._model, epochs, columns, early_stopping, listeners, run_log
            )
            epochs, epoch_limit = limit_epochs(rule, parse_epochs(epochs))
            # The model may have been changed since the network was made.
            require_model(self._model, pickle_by_value)
            self._application.check_data(data)
            check_columns(data, columns)  # before the program waits for executors
            slots = self._application.await_slots(options.start_timeout, progress.say)
            workers, warnings = self._prepare(slots, progress.say)
            strategy = self._strategy
            key = make_fit_key(self._checkpoints.fits + 1, self._application.get_local_property)
            decision = self._checkpoints.find(key, epochs, progress.say)
            if decision is None and key.number == 1:
                warnings += restart_warnings(self._conf, options)
            for warning in warnings:
                progress.say(f"sparkstrom warns: {warning}")
            finished, point = self._apply_decision(decision, key)
            if finished is not None:
                return finished
            if decision is not None:
                warnings += decision.warnings
            workers = choose_resume_workers(slots, workers, len(point.starts) if point else None)
            if options.repartition == "always":  # else the data decide how many there are
                strategy.check_workers(workers)
            if slots.is_dynamic:
                note = strategy.allocation_note
                text = describe_allocation(workers, slots.per_executor, note)
                progress.say(f"sparkstrom notes: {text}")
            request = FitRequest(
                epochs, columns, rule, tuple(listeners), run_log, key, point, epoch_limit
            )
            with self._application.cancel_jobs_on_interrupt():
                rows = self._partition(data, columns, workers)
                strategy.check_workers(rows.workers)
                classes = self._try_first_rows(request, rows)
                shows_output = not self._application.has_workers_output
                reporting = FitReporting(
                    progress, record, slots, warnings, shows_worker_output=shows_output
                )
                with set_known_classes(self._model, classes):
                    return self._train(request, rows, reporting)

    def rehearse(
        self,
        data: Any,
        *,
        workers: int | Iterable[int] = DEFAULT_WORKERS,
        epochs: int = 1,
        link: str | float | None = None,
        latency: str | float | None = None,
        rows: int = DEFAULT_ROWS,
        seed: int = 0,
        features: ColumnNames = "features",
        label: ColumnNames | None = "label",
        weight: str | None = None,
        validation: float | str | DataFrame | None = None,
        **conditions: Any,
    ) -> Rehearsal:
        """Simulate a fit with each number of workers in virtual time (docs/rehearse.md).

        Executors only draw the sample, and with ``measure=True`` measure steps and links; training
        is simulated in this program. The network is not changed.

        Args:
            data: As in ``fit``.
            workers: Numbers of workers, each on a host of its own.
            epochs: Number of passes over the data.
            link: Rate of each host's link, such as "1gbit", or bits per second. Default: 1gbit.
            latency: Latency in one direction, such as "1ms", or in seconds. Default: 1ms.
            rows: Size of the random sample of the data to train on.
            seed: Random seed of the sample, of the placement of rows, and of step times.
            features: As in ``fit``.
            label: As in ``fit``.
            weight: As in ``fit``.
            validation: As in ``fit``; the losses are computed on these rows.
            **conditions: measure, step, jitter, encode, apply, straggler, kill, scaling and
                to_loss, as docs/rehearse.md explains them.

        Returns:
            Losses, virtual times and bytes for each number of workers, compared with one process
            and with DDP (PyTorch's DistributedDataParallel).

        Raises:
            UsageError: An argument is invalid or does not suit the data, or a fit is under way.
            TrainingError: Training failed.
        """
        request = RehearsalRequest.from_options(
            workers=workers, link=link, latency=latency, rows=rows, seed=seed, **conditions
        )
        require_active_session(self._application)
        master = self._strategy.master
        if request.measure:
            self._application.require_rdds("measure=True", "give step, link and latency")
            check_barrier_stages(self._context)
        named = ColumnSpec(features, label, weight)
        with (
            self._reserve_unless_final(),
            closing(make_progress_display(self._progress)) as progress,
        ):
            data, columns = self._held_out.unite(data, named, validation, master.repartition)
            check_fit_arguments(self._model, epochs, columns, None, (), "")
            self._application.check_data(data)
            packed = pickle_by_value(self._model)
            fit = self._model, self._state, master, packed, parse_epochs(epochs), columns.fraction
            recipe = make_recipe(*fit)
            request.check_recipe(recipe)
            with self._application.cancel_jobs_on_interrupt():
                progress.say(f"sampling {request.rows:,} rows")
                sample = self._application.draw_sample(data, columns, request.rows, request.seed)
            measure, cpus = self._measure_cluster, int(self._conf.get("spark.task.cpus", "1"))
            return rehearse(recipe, sample, request, progress, measure, cpus=cpus)

    def _measure_cluster(self, recipe: FitRecipe, sample: RowSample) -> ClusterMeasurement:
        """Measure a step's time, and the links between executors' hosts; return a summary.

        There are as many measuring tasks as a fit would have workers. Their input, a recipe for the
        fit and a sample of rows, is the same.
        """
        timeout_s = self._strategy.master.start_timeout
        with closing(make_progress_display(self._progress)) as progress:
            slots = self._application.await_slots(timeout_s, progress.say)
        workers = count_workers(slots, self._strategy)
        # No worker's own optimizer state is measured, and there may be many.
        common = replace(recipe, states=recipe.states_for(0))
        fit = pickle_by_value((common, sample))
        with self._application.cancel_jobs_on_interrupt():
            measured = measure_workers(self._context, recipe.master.void, fit, workers)
        return summarize_workers(measured)

    def _try_first_rows(self, request: FitRequest, data: PartitionedData) -> tuple[int, int] | None:
        """Try one training step on the first rows in this program, to find errors early.

        This happens once per set of columns, and never if workers train on GPUs. Return the number
        of classes as ``dry_run_step`` does.
        """
        columns = repr(request.columns)
        if self._has_gpus():
            return None
        if columns in self._tried_columns:
            return self._tried_columns[columns]
        parameters, metric = self._state.parameters, request.validation_metric
        model, examine, pack = self._model, self._examine_outputs, pickle_by_value
        classes = dry_run_step(model, parameters, data.first, pack, metric, examine)
        self._tried_columns[columns] = classes
        return classes

    def _examine_outputs(self, model: FlatModel, batch: Batch) -> None:
        """Do nothing. A subclass may raise UsageError for outputs that it cannot use."""

    def _has_gpus(self) -> bool:
        """Return whether workers train on GPUs, which this program may not have."""
        return self._conf.get("spark.task.resource.gpu.amount", "0") not in ("0", "")

    def _prepare(self, slots: TaskSlots, say: Callable[[str], None]) -> tuple[int, list[str]]:
        """Choose where the controller runs; return the number of workers and warnings.

        Raise UsageError or SetupError if a fit is impossible with the options and configuration.
        """
        strategy = self._strategy = self._strategy.with_controller(self._application, slots, say)
        workers, footprint = count_workers(slots, strategy), footprint_of_model(self._model)
        return workers, strategy.check(self._application, self._conf, workers, footprint)

    def _train(
        self, request: FitRequest, data: PartitionedData, reporting: FitReporting
    ) -> TrainingSummary:
        """Run a fit with checked arguments and partitioned data; return its summary."""
        strategy, context = self._strategy, self._fit_context
        session = FitSession(
            strategy,
            self._checkpoints,
            request,
            reporting,
            self._state,
            strategy.make_restart_runner(context, data),
        )
        spec = session.make_spec(data.workers)
        runner = strategy.make_runner(context, session, spec, data)
        self._may_have_files = strategy.leaves_files and context.keep
        return session.run(runner, self._exports.directory)

    def _partition(self, data: Any, columns: ColumnSpec, workers: int) -> PartitionedData:
        """Return the data in one partition per worker.

        With the option ``rdd_training_approach="export"``, the rows are first written to files.
        """
        options = self._strategy.master
        master = self._held_out.partitioning_options(options, data)
        direct = partial(self._application.partition_data, data, columns, workers, master)
        if options.rdd_training_approach == "export":
            return self._exports.partition_data(data, columns, workers, direct)
        return direct()

    def predict(
        self,
        data: Any,
        *,
        features: ColumnNames = "features",
        output: str | tuple[str, ...] | dict[str, str] = "prediction",
    ) -> Any:
        """Return the model's outputs, computed with the current parameters.

        For an RDD or DataFrame, executors compute the outputs when Spark evaluates the result.

        Args:
            data: An array [rows, ...] of features, or a tuple or dict of arrays for a model with
                several inputs; an RDD of features; or a DataFrame.
            features: Columns of the DataFrame, as in ``fit``.
            output: Name of the new column, array<float>, which the DataFrame must not have yet. A
                model with several outputs needs a tuple or dictionary of names.

        Returns:
            For arrays, f32[rows, outputs]. For an RDD, an RDD of f32[outputs], or of tuples or
            dictionaries of these if the model has several outputs. For a DataFrame, that DataFrame
            with the new columns.
        """
        return self._predictor.predict(data, features, output)

    def udf(
        self,
        *,
        inputs: tuple[str, ...] | int | None = None,
        shapes: Sequence[Sequence[int]] | None = None,
        output: str | tuple[str, ...] | dict[str, str] | None = None,
    ) -> Any:
        """Return a Spark function of columns, for ``df.select(network.udf()("x"))``.

        The function computes outputs with the current parameters. It returns array<float>, or a
        struct if ``output`` is given (docs/serving.md).

        Args:
            inputs: None combines all columns (numbers or arrays) into one array. Otherwise each
                column is one input of the model, [rows] for a column of numbers, as in ``fit``.
                Give the inputs' names for a model that takes a dictionary, or their number for a
                model that takes a tuple.
            shapes: Shape of each input, without the dimension of rows.
            output: Names of the struct's fields; required if the model has several outputs.
        """
        return self._predictor.udf(inputs, shapes, output)

    def evaluate(
        self,
        data: Any,
        metrics: str | Sequence[str] | None = None,
        *,
        features: ColumnNames = "features",
        label: ColumnNames | None = "label",
        weight: str | None = None,
        positive: int = 1,
    ) -> Evaluation:
        """Evaluate the model with its current parameters on ``data`` (docs/evaluation.md).

        Each executor computes counts and sums over its rows; these are merged exactly.

        Args:
            data: Rows as in ``fit``, or a tuple of arrays (features, labels), which are evaluated
                in this program.
            metrics: One or several of "classification", "regression", "roc" and "loss"; None
                selects those that suit the model.
            features: Columns, as in ``fit``.
            label: Columns, as in ``fit``.
            weight: Column with each row's weight in the loss.
            positive: Index of the positive class for "roc".

        Returns:
            The metrics.

        Raises:
            UsageError: An argument is invalid, or a row does not suit the model.
        """
        spec = select_metrics(self._model, metrics, positive)
        return self._predictor.evaluate(data, spec, ColumnSpec(features, label, weight))

    def score(
        self,
        data: Any,
        *,
        features: ColumnNames = "features",
        label: ColumnNames | None = "label",
        weight: str | None = None,
    ) -> float:
        """Return the model's loss on ``data``, a weighted mean over rows, like DL4J's score."""
        columns: dict[str, Any] = {"features": features, "label": label, "weight": weight}
        return self.evaluate(data, "loss", **columns).loss

    @property
    def application(self) -> Application:
        """The Spark application that trains the model."""
        return self._application

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        spark: Any,
        master: TrainingMaster | None = None,
        *,
        model: FlatModel | None = None,
        progress: bool | str = True,
    ) -> SparkNetwork:
        """Return a SparkNetwork with the model and parameters that ``save`` wrote.

        Args:
            path: File that ``save`` wrote; a local path or a URL, as in ``save``.
            spark: As in the constructor.
            master: As in the constructor.
            model: A model like the saved one. It is required if the file does not contain the
                model's code, as for TorchModel. If another network uses it, it is copied.
            progress: As in the constructor.

        Raises:
            UsageError: The file or another argument cannot be used.
        """
        with path_to_load(path) as local:
            model, parameters, epochs = load_model(local, copy_if_used(model))
        network = cls(spark, model, master, progress=progress)
        network._state.assign(parameters, epochs, any_value=True)
        return network

    def close(self) -> None:
        """Remove exported rows and the files that workers kept for the next fit. Idempotent.

        After ``spark.stop()`` the workers' files are gone already, and Spark is not called. Raise
        UsageError while a fit is under way, because its workers use these files.
        """
        with self._reserve_unless_final():
            try:
                self._exports.close()
            finally:
                self._delete_worker_files()

    def _delete_worker_files(self) -> None:
        """Delete the files that workers may have kept for the next fit."""
        if not self._may_have_files:
            return
        if not self._application.is_stopped:  # executors, and what they keep, end with Spark
            self._application.delete_worker_files(self._fit_context.network)
        self._state.forget_resume_state()
        self._may_have_files = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self.close()
        except UsageError as error:  # a fit is under way, as of a streaming query
            if kind is None:
                raise
            log.warning("the network is not closed: %s", error)


RUN_PROPERTY = "spark.jobGroup.id"  # in a streaming query, Spark's id of the query's current run
OnSummary = Callable[[int, TrainingSummary], object]  # called with (micro-batch id, fit's summary)


def each_batch(
    network: SparkNetwork, on_summary: OnSummary | None = None, **fit: Any
) -> Callable[[Any, int], None]:
    """Return a function that trains the network on one micro-batch of a streaming query.

    Pass the function to ``DataStreamWriter.foreachBatch``; Spark then calls it with each
    micro-batch, a DataFrame, and its id. It calls ``network.fit(frame, **fit)``, which continues
    from the parameters that the previous micro-batch reached. Micro-batches without rows are
    skipped. An error in a fit ends the query. If the same program starts the query again, a
    micro-batch that was already trained is skipped. Call the function only once per micro-batch:
    after such a restart, all calls with this micro-batch are skipped.

    Args:
        network: The network to train.
        on_summary: Called after each fit with the micro-batch's id and the fit's summary.
        fit: Options of ``SparkNetwork.fit``.

    Raises:
        UsageError: ``fit`` contains a keyword that is not an option of ``SparkNetwork.fit``,
            another argument is invalid, or the network uses Spark Connect.
    """
    if not isinstance(network, SparkNetwork):
        raise UsageError(f"network={network!r}: must be a SparkNetwork, made before the query")
    network.application.require_rdds("each_batch(network)", "fit tables in a loop of your own")
    if on_summary is not None and not callable(on_summary):
        raise UsageError(f"on_summary={on_summary!r}: must be called with batch id and summary")
    if "data" in fit:
        raise UsageError("data=...: each micro-batch is the data; leave it out")
    unknown = sorted(set(fit) - set(_get_fit_options()))
    if unknown:
        raise UsageError(
            f"{unknown[0]}={fit[unknown[0]]!r}: fit has no such option; it has {_get_fit_options()}"
        )

    def fit_batch(frame: Any, batch: int) -> None:
        """Train on one micro-batch, unless it has no rows or the network has learned it before.

        Spark repeats a micro-batch if the query ended before it was committed, as in ``on_summary``
        or during the fit, and is started again.
        """
        get_property = network.application.get_local_property
        key, run = make_fit_key(0, get_property), get_property(RUN_PROPERTY)
        summary = network._state.find_micro_batch(key, run)
        if summary is None:
            if frame.isEmpty():
                return
            # Meanwhile, the fit of an earlier run that was stopped may have ended.
            summary = network._state.find_micro_batch(key, run)
        if summary is not None:
            log.info("micro-batch %d was trained before in this program; it is not repeated", batch)
        else:
            summary = network.fit(frame, **fit)
            network._state.record_micro_batch(key, run, summary)
        if on_summary is not None:
            on_summary(batch, summary)

    return fit_batch


def _get_fit_options() -> list[str]:
    """Return the names of the options of ``SparkNetwork.fit``, without ``data``."""
    return list(inspect.signature(SparkNetwork.fit).parameters)[2:]
