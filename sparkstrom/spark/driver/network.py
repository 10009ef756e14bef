"""SparkNetwork: a model, a master and a Spark application; what users hold in their hands."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from sparkstrom.checkpoint.store import load_model, local_path
from sparkstrom.encoding.backends import warm_up
from sparkstrom.models.base import FlatModel
from sparkstrom.observe.progress_choice import check_progress, progress_for
from sparkstrom.observe.stopping import EarlyStopping, epochs_of
from sparkstrom.observe.termination import TerminationCondition
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.runtime.lent_state import LentStates
from sparkstrom.runtime.theta import Theta
from sparkstrom.spark.averaging.averaging_run import AveragingRun
from sparkstrom.spark.data.columns import Chosen, Names
from sparkstrom.spark.data.export import Exports
from sparkstrom.spark.data.partitioning import Spread
from sparkstrom.spark.driver.application import Application, need_session
from sparkstrom.spark.driver.applications import application_of, context_of
from sparkstrom.spark.driver.attempts import begins_anew
from sparkstrom.spark.driver.averaging_master import TrainingMaster
from sparkstrom.spark.driver.call_checks import check_call, epochs_given
from sparkstrom.spark.driver.cluster import (
    Slots,
    check_conf,
    check_key,
    check_min_workers,
    check_rounds,
    workers_again,
    workers_for,
)
from sparkstrom.spark.driver.controller_choice import parse_controller
from sparkstrom.spark.driver.dry_step import try_step
from sparkstrom.spark.driver.dynamic_allocation import allocation_note
from sparkstrom.spark.driver.evaluation import Evaluation, wanted_for
from sparkstrom.spark.driver.fit_call import FitCall, Showing
from sparkstrom.spark.driver.fit_checkpoints import FitCheckpoints, key_of
from sparkstrom.spark.driver.fit_record import FitRecord
from sparkstrom.spark.driver.fit_run import FitRun
from sparkstrom.spark.driver.fit_site import RunningFit, TrainingSite
from sparkstrom.spark.driver.followed_fit import FollowedFit, fit_spec
from sparkstrom.spark.driver.held_out_frames import HeldOutFrames
from sparkstrom.spark.driver.memory_parts import demand_of
from sparkstrom.spark.driver.options import need, need_flag
from sparkstrom.spark.driver.pickling import need_model, need_picklable, packed
from sparkstrom.spark.driver.predictor import Predictor
from sparkstrom.spark.driver.preflight import check_machine
from sparkstrom.spark.driver.settings import resolve
from sparkstrom.spark.driver.spark_layer_names import SparkLayerNames
from sparkstrom.spark.driver.summary import TrainingSummary
from sparkstrom.spark.driver.trained_network import TrainedNetwork
from sparkstrom.spark.driver.training_master import SharedTrainingMaster

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class SparkNetwork(SparkLayerNames, TrainedNetwork):
    """Trains a model on Spark executors, again and again, and holds its parameters.

    ``spark`` is a SparkSession or SparkContext; ``progress=False`` is silent, True is "auto";
    "bar", "plain" and "notebook" say how it is shown (docs/progress.md). With ``keep=False``
    workers leave nothing for a next fit, which saves files, and the job that removes them. In a
    ``with`` block it is closed at the end. Raises
    UsageError for options, configuration or a session that cannot work, before any work starts.
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
        keep = need_flag("keep", keep)
        need_model(model)
        self._application = application = application_of(spark)
        self._tried: set[str] = set()  # columns of fits whose first rows were tried
        need_session(application)
        hint = "must be a SharedTrainingMaster or a ParameterAveragingTrainingMaster"
        need(isinstance(master, TrainingMaster | None), "master", master, hint)
        conf = application.conf()
        self._master = resolve(master or SharedTrainingMaster(), conf, os.environ)
        application.check(self._master)
        self._conf = conf
        self._may_have_files = False
        self._context = context_of(spark)
        self._exports = Exports(self._context, self._master.export_directory)
        self._held_out = HeldOutFrames(application.check_data)
        name = secrets.token_hex(8)
        super().__init__(model, FitCheckpoints(model, self._master, name), progress)
        self._site = TrainingSite(application, model, self._master, name, keep)
        self._predictor = Predictor(application, lambda: (self.model, self.parameters))

    # -- training --------------------------------------------------------------------------------

    def fit(
        self,
        data: Any,
        epochs: int = 1,
        *,
        features: Names = "features",
        label: Names | None = "label",
        weight: str | None = None,
        validation: float | str | DataFrame | None = None,
        early_stopping: EarlyStopping | Sequence[TerminationCondition] | None = None,
        listeners: Sequence[Any] = (),
        run_log: str | os.PathLike[str] | None = None,
    ) -> TrainingSummary:
        """Train for ``epochs`` epochs; return what happened.

        ``data`` is an RDD of (features, label) or (features, label, weight), or a DataFrame:
        ``features`` and ``label`` name a column, a list of numeric columns that stand side by
        side, or a tuple or dictionary of these for several arrays; ``weight`` names a column;
        ``label=None`` is for a model whose loss takes its labels from the features.
        ``validation`` holds rows out: a fraction, by seed and content, or a boolean column; or it
        is a DataFrame of separate rows, with the columns that the fit reads;
        ``early_stopping`` ends the fit when they gain nothing, or by DL4J's termination conditions
        (a list will do), and delivers the best parameters.
        ``listeners`` hear what happens (docs/listeners.md); the same goes to ``run_log`` as JSON
        lines: None is a new file in the directory sparkstrom-runs, "" none.
        Raises UsageError, SetupError or TrainingError (with host, partition and traceback).
        """
        need_session(self._application)
        record = FitRecord()
        named, repartition = Chosen(features, label, weight), self._master.repartition
        data, chosen = self._held_out.united(data, named, validation, repartition)
        rule = check_call(self._model, epochs, chosen, early_stopping, listeners, run_log)
        epochs, ends = epochs_of(rule, epochs_given(epochs))
        need_picklable(self._model)  # it may have been changed since the network was made
        self._application.check_data(data)
        with closing(progress_for(self._progress)) as progress:
            slots = self._application.slots(self._master.start_timeout, progress.say)
            workers, warnings = self._begin(slots, progress.say)
            key = key_of(self._checkpoints.fits + 1, self._application.local_property)
            found = self._checkpoints.find(key, epochs, progress.say)
            if found is None and key.number == 1:
                warnings += begins_anew(self._conf, self._master)
            for warning in warnings:
                progress.say(f"sparkstrom warns: {warning}")
            done, goes_on = self._begin_with(found, key)
            if done is not None:
                return done
            workers = workers_again(slots, workers, len(goes_on.starts) if goes_on else None)
            if self._master.repartition == "always":  # else the data say how many there are
                check_min_workers(self._master, workers)
            if slots.is_dynamic:
                note = allocation_note(workers, slots.per_executor, self._master)
                progress.say(f"sparkstrom notes: {note}")
            call = FitCall(epochs, chosen, rule, tuple(listeners), run_log, key, goes_on, ends)
            with self._application.interrupts():
                with self._checkpoints.kept_if_it_fails():
                    spread = self._spread(data, chosen, workers)
                    check_min_workers(self._master, spread.workers)
                    self._try_first_rows(call, spread)
                showing = Showing(
                    progress, record, slots, warnings, worker_lines=self._shows_worker_lines
                )
                return self._train(call, spread, showing)

    def _try_first_rows(self, call: FitCall, spread: Spread) -> None:
        """Try a step on the first rows here, once for the same columns: later fits start sooner."""
        columns = repr(call.chosen)
        if self._has_gpus() or columns in self._tried:
            return
        metric = call.metric_measured
        try_step(self._model, self._learnt.parameters, spread.first, packed, metric)
        self._tried.add(columns)

    @property
    def _shows_worker_lines(self) -> bool:
        """Whether the progress display has to show what workers print."""
        return not self._application.has_workers_output

    def _has_gpus(self) -> bool:
        """Do workers train on GPUs, which this program may not have?"""
        return self._conf.get("spark.task.resource.gpu.amount", "0") not in ("0", "")

    def _begin(self, slots: Slots, say: Callable[[str], None]) -> tuple[int, list[str]]:
        """How many workers train, and what may go wrong. Raise for what cannot work."""
        if not isinstance(self._master, SharedTrainingMaster):
            workers, demand = workers_for(slots, self._master), demand_of(self._model)
            return workers, check_rounds(self._conf, workers, demand, self._master)
        self._master = master = self._application.settled(self._master, slots, say)
        self._site = replace(self._site, master=master)
        workers = workers_for(slots, master)
        warnings = check_conf(self._conf, workers, demand_of(self._model), master)
        warnings += check_key(self._conf)
        check_machine(master.void, workers, self._application.host)
        return workers, warnings

    def _train(self, call: FitCall, spread: Spread, showing: Showing) -> TrainingSummary:
        """All is checked: train, and tell of it."""
        master = self._master
        controller = master.void.controller if isinstance(master, SharedTrainingMaster) else None
        if controller is not None and not parse_controller(controller).apart:
            warm_up(say=showing.progress.say)
        spec = fit_spec(call, spread.workers, self._learnt, self._model.n_params)
        again = partial(self._again, spread)
        fit = FollowedFit(self._site, self._checkpoints, call, showing, again)
        run = self._fit_run(fit, call, spec, spread)
        return fit.follow(run, self._learnt, self._exports.directory)

    def _again(self, spread: Spread, spec: FitSpec, theta: Theta, states: LentStates) -> FitRun:
        """The fit once more, where its controller was lost."""
        master = self._master
        assert isinstance(master, SharedTrainingMaster), "rounds have no controller"
        return FitRun(self._site.of(master), spec, theta, spread, {}, states)

    def _fit_run(
        self, fit: FollowedFit, call: FitCall, spec: FitSpec, spread: Spread
    ) -> RunningFit:
        site, learnt, master = self._site, self._learnt, self._master
        if not isinstance(master, SharedTrainingMaster):
            judged = call.early_stopping is not None
            return AveragingRun(site.of(master), spec, learnt, spread, judged=judged)
        theta = learnt.theta(master.layer_multipliers or {})
        kept, states = learnt.use_up(spread.workers)
        run = FitRun(site.of(master), spec, theta, spread, kept, fit.states_for(states))
        self._may_have_files = site.keep
        return run

    def _spread(self, data: Any, chosen: Chosen, workers: int) -> Spread:
        """The data over one partition per worker, exported before where that is wanted."""
        master = self._held_out.spread_by(self._master, data)
        direct = partial(self._application.spread, data, chosen, workers, master)
        if self._master.rdd_training_approach == "export":
            return self._exports.spread(data, chosen, workers, direct)
        return direct()

    # -- prediction and evaluation ---------------------------------------------------------------

    def predict(
        self,
        data: Any,
        *,
        features: Names = "features",
        output: str | tuple[str, ...] | dict[str, str] = "prediction",
    ) -> Any:
        """Outputs under the shared parameters.

        Of features [rows, ...] f32[rows, outputs], computed in this process; a tuple or dict of
        arrays goes to a model with several inputs. Of an RDD of features an RDD of f32[outputs];
        of a DataFrame, with ``features`` as ``fit`` takes them, the same with one more column
        ``output``, array<float>: on the executors, when Spark runs it, under the parameters of
        now. A model of several outputs, a tuple or dictionary, gives one for each row of an RDD,
        and needs one of names in ``output``, for the columns of a DataFrame.
        """
        return self._predictor.predict(data, features, output)

    def udf(
        self,
        *,
        inputs: tuple[str, ...] | int | None = None,
        shapes: Sequence[Sequence[int]] | None = None,
        output: str | tuple[str, ...] | dict[str, str] | None = None,
    ) -> Any:
        """A function of columns under the parameters of now: ``df.select(network.udf()("x"))``.

        It gives array<float>; with ``output``, which a model of several outputs needs, a struct
        with a field for each. Columns of numbers, or one of arrays, are one array side by side;
        ``inputs``: one column for each input instead, by name for a model that takes a dictionary,
        or so many for a tuple. ``shapes``: of each input, without rows. See docs/serving.md.
        """
        return self._predictor.udf(inputs, shapes, output)

    def evaluate(
        self,
        data: Any,
        metrics: str | Sequence[str] | None = None,
        *,
        features: Names = "features",
        label: Names | None = "label",
        weight: str | None = None,
        positive: int = 1,
    ) -> Evaluation:
        """How well the shared parameters do on ``data``, as ``fit`` takes it, or on two arrays.

        ``metrics``: among classification, regression, roc (of class ``positive``) and loss; None:
        what fits the model. ``weight`` counts in the loss. Counted on the executors and merged
        exactly: see docs/evaluation.md.
        """
        wanted = wanted_for(self._model, metrics, positive)
        return self._predictor.evaluate(data, wanted, Chosen(features, label, weight))

    def score(
        self,
        data: Any,
        *,
        features: Names = "features",
        label: Names | None = "label",
        weight: str | None = None,
    ) -> float:
        """The model's own loss on ``data``, mean over rows: smaller is better (DL4J's score)."""
        chosen: dict[str, Any] = {"features": features, "label": label, "weight": weight}
        return self.evaluate(data, "loss", **chosen).loss

    # -- the result ------------------------------------------------------------------------------

    @property
    def application(self) -> Application:
        """What it asks Spark by."""
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
        """A network with the model and parameters that ``save`` wrote.

        ``model``: one like the saved one, where its code was not saved, as a TorchModel's is not.
        """
        model, parameters, epochs = load_model(local_path(path), model)
        network = cls(spark, model, master, progress=progress)
        network.parameters = parameters
        network._learnt.epochs = epochs
        return network

    def close(self) -> None:
        """Remove what workers kept for the next fit, and exported rows. Idempotent.

        After ``spark.stop()`` nothing is left on executors, and nothing is asked of Spark.
        """
        self._exports.close()
        if not self._may_have_files:
            return
        if not self._application.is_stopped:  # executors, and what they keep, end with Spark
            self._application.forget(self._site.network)
        self._learnt.use_up()
        self._may_have_files = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
