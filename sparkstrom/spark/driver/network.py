"""SparkNetwork: a model, a master and a Spark application; what users hold in their hands."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from sparkstrom.base.errors import UsageError
from sparkstrom.base.version import __version__
from sparkstrom.checkpoint.store import load_model, local_path, save_model
from sparkstrom.encoding.grid import first_exponent, next_exponent
from sparkstrom.models.base import Buffered, Exporting, Flat, FlatModel
from sparkstrom.observe.progress import ProgressLine
from sparkstrom.observe.stopping import LOSS, EarlyStopping
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.protocol.master.residual_checkpoints import CheckpointFiles
from sparkstrom.runtime.master_thread import Snapshot
from sparkstrom.runtime.theta import Theta
from sparkstrom.spark.data import partitioning as spreading
from sparkstrom.spark.data.columns import Chosen, Names
from sparkstrom.spark.data.export import Exports
from sparkstrom.spark.data.partitioning import Spread
from sparkstrom.spark.driver.accuracy_warnings import doubts
from sparkstrom.spark.driver.cluster import (
    check_conf,
    check_key,
    refuse_connect,
    slots_of,
    workers_for,
)
from sparkstrom.spark.driver.epoch_watch import Best, EpochWatch, check_validation
from sparkstrom.spark.driver.evaluation import Evaluation, wanted_for
from sparkstrom.spark.driver.fit_call import FitCall, Showing
from sparkstrom.spark.driver.fit_listeners import FitDone
from sparkstrom.spark.driver.fit_run import FitRun, TrainingSite
from sparkstrom.spark.driver.fitting import FitCancelled
from sparkstrom.spark.driver.horizon_notes import horizons_of
from sparkstrom.spark.driver.initial_parameters import theta_of
from sparkstrom.spark.driver.interrupts import plain_interrupts
from sparkstrom.spark.driver.listener_thread import check_listeners
from sparkstrom.spark.driver.pickling import need_model, need_picklable
from sparkstrom.spark.driver.predictor import Predictor
from sparkstrom.spark.driver.settings import resolve
from sparkstrom.spark.driver.summary import FitRecord, TrainingSummary, summarize
from sparkstrom.spark.driver.training_master import SharedTrainingMaster
from sparkstrom.spark.executor.tasks import forget_kept


class SparkNetwork:
    """Trains a model on Spark executors, again and again, and holds its parameters.

    ``spark`` is a SparkSession or SparkContext; ``progress=False`` is silent. With ``keep=False``
    workers leave nothing for a next fit, which saves files, and the job that removes them. Raises
    UsageError for options, configuration or a session that cannot work, before any work starts.
    """

    def __init__(
        self,
        spark: Any,
        model: FlatModel,
        master: SharedTrainingMaster | None = None,
        *,
        progress: bool = True,
        keep: bool = True,
    ) -> None:
        refuse_connect(spark)
        need_model(model)
        self._context = getattr(spark, "sparkContext", spark)
        conf = dict(self._context.getConf().getAll())
        self._master = resolve(master or SharedTrainingMaster(), conf, os.environ)
        self._conf = conf
        self._model = model
        self._show_progress = progress
        self._parameters: Flat = np.ascontiguousarray(model.initial(), np.float32)
        self._k: int | None = None
        self._kept: CheckpointFiles = {}
        self._may_have_files = False
        self._exports = Exports(self._context, self._master.export_directory)
        self._epochs_trained, self._minibatches_trained = 0, 0
        name = secrets.token_hex(8)
        self._site = TrainingSite(self._context, model, self._master, name, keep)
        self._predictor = Predictor(self._context, lambda: (self.model, self._parameters.copy()))

    # -- training --------------------------------------------------------------------------------

    def fit(
        self,
        data: Any,
        epochs: int = 1,
        *,
        features: Names = "features",
        label: Names = "label",
        weight: str | None = None,
        validation: float | str | None = None,
        early_stopping: EarlyStopping | None = None,
        listeners: Sequence[Any] = (),
        run_log: str | os.PathLike[str] | None = None,
    ) -> TrainingSummary:
        """Train for ``epochs`` epochs; return what happened.

        ``data`` is an RDD of (features, label) or (features, label, weight), or a DataFrame:
        ``features`` and ``label`` name a column, a list of numeric columns that stand side by
        side, or a tuple or dictionary of these for several arrays; ``weight`` names a column.
        ``validation`` holds rows out: a fraction, by seed and content, or a boolean column;
        ``early_stopping`` ends the fit when they gain nothing, and delivers the best parameters.
        ``listeners`` hear what happens (docs/listeners.md); the same goes to ``run_log`` as JSON
        lines: None is a new file in the directory sparkstrom-runs, "" none.
        Raises UsageError, SetupError or TrainingError (with host, partition and traceback).
        """
        record = FitRecord()
        if not (isinstance(epochs, int) and epochs >= 1):
            raise UsageError(f"epochs={epochs!r}: must be a whole number of at least 1")
        check_validation(self._model, validation, early_stopping)
        check_listeners(listeners)
        need_picklable(self._model)  # it may have been changed since the network was made
        spreading.check_data(data)
        slots = slots_of(self._context)
        workers = workers_for(slots, self._master)
        warnings = check_conf(self._conf, workers, self._model.n_params, self._master)
        warnings += check_key(self._conf)
        progress = ProgressLine(enabled=self._show_progress)
        for warning in warnings:
            progress.say(f"sparkstrom warns: {warning}")
        chosen = Chosen(features, label, weight, validation)
        call = FitCall(epochs, chosen, early_stopping, tuple(listeners), run_log)
        theta = self._theta()
        with plain_interrupts(self._context):
            spread = self._spread(data, chosen, workers)
            return self._train(call, theta, spread, Showing(progress, record, slots, warnings))

    def _train(
        self, call: FitCall, theta: Theta, spread: Spread, showing: Showing
    ) -> TrainingSummary:
        """All is checked: train, and tell of it."""
        spec = FitSpec(
            workers=spread.workers,
            epochs=call.epochs,
            n_params=self._model.n_params,
            version=__version__,
            job=secrets.randbits(63),
            first_epoch=self._epochs_trained,
            minibatches_before=self._minibatches_trained if self._kept else 0,
            fraction=call.chosen.fraction,
            metric=call.early_stopping.metric if call.early_stopping else LOSS,
        )
        run = self._fit_run(spec, theta, spread)
        # Kept files are granted once: a fit that fails uses them up.
        self._kept, self._may_have_files = {}, self._site.keep
        watch = run.follow(call, showing)
        assert showing.heard is not None, "somebody follows it"
        return showing.heard.follow(partial(self._run, run, watch, showing))

    def _fit_run(self, spec: FitSpec, theta: Theta, spread: Spread) -> FitRun:
        return FitRun(self._site, spec, theta, spread, self._kept)

    def _run(self, run: FitRun, watch: EpochWatch, showing: Showing) -> TrainingSummary:
        try:
            run.run(watch, showing)
        except (KeyboardInterrupt, FitCancelled):
            self._keep_learnt(run.theta, run.epochs_complete)
            raise
        assert showing.record.end is not None, "a fit that did not raise is done"
        self._take(run.theta, showing.record.end, watch.copy)
        return self._summary(showing, watch.best)

    def _keep_learnt(self, theta: Theta, epochs: int) -> None:
        """Of a fit that a person ended: the driver's replica as it was then."""
        self._parameters, self._kept = theta.to_host(), {}
        self._epochs_trained += epochs
        if isinstance(self._model, Buffered) and theta.buffers:
            self._model.load_buffers_bytes(theta.buffers)

    def _take(self, theta: Theta, end: FitDone, best: Snapshot | None) -> None:
        """Parameters and buffers as they are at the end, or as they were at the best epoch."""
        outcome = end.outcome
        self._minibatches_trained = end.spec.minibatches_before + outcome.minibatches
        self._epochs_trained += end.epochs_trained
        if best is None or best.commit == outcome.commits:
            self._parameters, self._kept = theta.to_host(), outcome.kept
            buffers = theta.buffers
        else:  # what workers kept belongs to later parameters
            self._parameters, buffers = best.parameters, best.buffers
        if isinstance(self._model, Buffered) and buffers:
            self._model.load_buffers_bytes(buffers)

    def _summary(self, showing: Showing, best: Best | None) -> TrainingSummary:
        """What the fit can say about itself; doubts go to the log, too."""
        record = showing.record
        assert record.end is not None, "there is a fit to tell of"
        spec, outcome = record.end.spec, record.end.outcome
        found = doubts(self._master, self._model, outcome, spec.minibatches_before)
        return summarize(
            record,
            executors=showing.slots.executors,
            warnings=[*showing.warnings, *found],
            collect_stats=self._master.collect_training_stats,
            export_directory=self._exports.directory,
            best=best,
            horizons=horizons_of(self._master, self._model, outcome.rows),
        )

    def _theta(self) -> Theta:
        """The parameters on the job's grid, which is chosen at the first fit and kept."""
        self._k = (
            first_exponent(self._parameters)
            if self._k is None
            else next_exponent(self._parameters, self._k)
        )
        multipliers = self._master.layer_multipliers or {}
        return theta_of(self._model, self._parameters, self._k, multipliers)

    def _spread(self, data: Any, chosen: Chosen, workers: int) -> Spread:
        """The data over one partition per worker, exported before where that is wanted."""
        seed, move = self._master.rng_seed, self._master.repartition == "always"
        direct = partial(spreading.spread_data, data, chosen, workers, seed, move=move)
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

    def evaluate(
        self,
        data: Any,
        metrics: str | Sequence[str] | None = None,
        *,
        features: Names = "features",
        label: Names = "label",
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
        label: Names = "label",
        weight: str | None = None,
    ) -> float:
        """The model's own loss on ``data``, mean over rows: smaller is better (DL4J's score)."""
        chosen: dict[str, Any] = {"features": features, "label": label, "weight": weight}
        return self.evaluate(data, "loss", **chosen).loss

    # -- the result ------------------------------------------------------------------------------

    @property
    def parameters(self) -> Flat:
        """A copy of the shared parameters, f32[n_params].

        Assigning is a warm start: what workers kept for the next fit belongs to the former
        parameters, and is not used any more.
        """
        return self._parameters.copy()

    @parameters.setter
    def parameters(self, values: Flat) -> None:
        values = np.asarray(values, np.float32)
        if values.shape != (self._model.n_params,):
            raise UsageError(
                f"parameters of shape {values.shape}: this model has ({self._model.n_params},)"
            )
        self._parameters = np.ascontiguousarray(values).copy()
        self._kept = {}

    @property
    def model(self) -> FlatModel:
        """The model, bound to a copy of the shared parameters."""
        self._model.bind(self._parameters.copy())
        return self._model

    @property
    def module(self) -> Any:
        """A TorchModel's module with a copy of the shared parameters, its buffers and own keys.

        Raises UsageError for a model that is none.
        """
        model: Any = self.model
        if not hasattr(model, "module"):
            raise UsageError(
                f"a {type(model).__name__} has no module: network.module is for a TorchModel; "
                "network.model and network.parameters are there for every model"
            )
        return model.module

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write ``path`` (npz: plain NumPy opens it) and a JSON description beside it.

        A TorchModel adds ``path`` + ".pt", a state_dict that ``torch.load`` opens.
        """
        model, target = self.model, local_path(path)
        save_model(
            target,
            model.describe(),
            self._parameters,
            self._epochs_trained,
            buffers=model.buffers_bytes() if isinstance(model, Buffered) else b"",
            exported=model.exported() if isinstance(model, Exporting) else None,
        )

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        spark: Any,
        master: SharedTrainingMaster | None = None,
        *,
        model: FlatModel | None = None,
        progress: bool = True,
    ) -> SparkNetwork:
        """A network with the model and parameters that ``save`` wrote.

        ``model``: one like the saved one, where its code was not saved, as a TorchModel's is not.
        """
        model, parameters, epochs = load_model(local_path(path), model)
        network = cls(spark, model, master, progress=progress)
        network.parameters = parameters
        network._epochs_trained = epochs
        return network

    def close(self) -> None:
        """Remove what workers kept for the next fit, and exported rows. Idempotent."""
        self._exports.close()
        if not self._may_have_files:
            return
        slots = slots_of(self._context).total
        forget = partial(forget_kept, self._site.network)
        self._context.parallelize(range(slots), slots).mapPartitions(forget).count()
        self._kept, self._may_have_files = {}, False
