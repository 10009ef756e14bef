"""SparkNetwork: a model, a master and a Spark application; what users hold in their hands."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from sparkstrom.base.errors import UsageError
from sparkstrom.checkpoint.store import load_model, local_path, save_model
from sparkstrom.models.base import Buffered, Exporting, Flat, FlatModel
from sparkstrom.observe.progress_choice import check_progress, progress_for
from sparkstrom.observe.stopping import EarlyStopping
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.runtime.theta import Theta
from sparkstrom.spark.controller.controller_auto import settled
from sparkstrom.spark.data import partitioning as spreading
from sparkstrom.spark.data.columns import Chosen, Names
from sparkstrom.spark.data.export import Exports
from sparkstrom.spark.data.partitioning import Spread
from sparkstrom.spark.driver.attempts import begins_anew
from sparkstrom.spark.driver.cluster import (
    Slots,
    check_conf,
    check_key,
    driver_host,
    refuse_connect,
    slots_of,
    workers_again,
    workers_for,
)
from sparkstrom.spark.driver.dynamic_allocation import allocation_note
from sparkstrom.spark.driver.epoch_watch import check_validation
from sparkstrom.spark.driver.evaluation import Evaluation, wanted_for
from sparkstrom.spark.driver.fit_call import FitCall, Showing
from sparkstrom.spark.driver.fit_checkpoints import FitCheckpoints, Use, key_of
from sparkstrom.spark.driver.fit_record import FitRecord
from sparkstrom.spark.driver.fit_run import FitRun, TrainingSite
from sparkstrom.spark.driver.followed_fit import FollowedFit, fit_spec
from sparkstrom.spark.driver.interrupts import plain_interrupts
from sparkstrom.spark.driver.learnt import Learnt
from sparkstrom.spark.driver.listener_thread import check_listeners
from sparkstrom.spark.driver.memory_parts import demand_of
from sparkstrom.spark.driver.pickling import need_model, need_picklable
from sparkstrom.spark.driver.predictor import Predictor
from sparkstrom.spark.driver.preflight import check_machine
from sparkstrom.spark.driver.registering import await_slots
from sparkstrom.spark.driver.settings import resolve
from sparkstrom.spark.driver.summary import TrainingSummary
from sparkstrom.spark.driver.summary_json import skipped
from sparkstrom.spark.driver.training_master import SharedTrainingMaster
from sparkstrom.spark.executor.tasks import forget_kept


class SparkNetwork:
    """Trains a model on Spark executors, again and again, and holds its parameters.

    ``spark`` is a SparkSession or SparkContext; ``progress=False`` is silent, True is "auto";
    "bar", "plain" and "notebook" say how it is shown (docs/progress.md). With ``keep=False``
    workers leave nothing for a next fit, which saves files, and the job that removes them. Raises
    UsageError for options, configuration or a session that cannot work, before any work starts.
    """

    def __init__(
        self,
        spark: Any,
        model: FlatModel,
        master: SharedTrainingMaster | None = None,
        *,
        progress: bool | str = True,
        keep: bool = True,
    ) -> None:
        refuse_connect(spark)
        check_progress(progress)
        need_model(model)
        self._context = getattr(spark, "sparkContext", spark)
        conf = dict(self._context.getConf().getAll())
        self._master = resolve(master or SharedTrainingMaster(), conf, os.environ)
        self._conf = conf
        self._model = model
        self._progress = progress
        self._learnt = Learnt(model)
        self._may_have_files = False
        self._exports = Exports(self._context, self._master.export_directory)
        name = secrets.token_hex(8)
        self._checkpoints = FitCheckpoints(model, self._master, name)
        self._site = TrainingSite(self._context, model, self._master, name, keep)
        self._predictor = Predictor(self._context, lambda: (self.model, self.parameters))

    # -- training --------------------------------------------------------------------------------

    def fit(
        self,
        data: Any,
        epochs: int = 1,
        *,
        features: Names = "features",
        label: Names | None = "label",
        weight: str | None = None,
        validation: float | str | None = None,
        early_stopping: EarlyStopping | None = None,
        listeners: Sequence[Any] = (),
        run_log: str | os.PathLike[str] | None = None,
    ) -> TrainingSummary:
        """Train for ``epochs`` epochs; return what happened.

        ``data`` is an RDD of (features, label) or (features, label, weight), or a DataFrame:
        ``features`` and ``label`` name a column, a list of numeric columns that stand side by
        side, or a tuple or dictionary of these for several arrays; ``weight`` names a column;
        ``label=None`` is for a model whose loss takes its labels from the features.
        ``validation`` holds rows out: a fraction, by seed and content, or a boolean column;
        ``early_stopping`` ends the fit when they gain nothing, and delivers the best parameters.
        ``listeners`` hear what happens (docs/listeners.md); the same goes to ``run_log`` as JSON
        lines: None is a new file in the directory sparkstrom-runs, "" none.
        Raises UsageError, SetupError or TrainingError (with host, partition and traceback).
        """
        record = FitRecord()
        if not (isinstance(epochs, int) and epochs >= 1):
            raise UsageError(f"epochs={epochs!r}: must be a whole number of at least 1")
        check_validation(self._model, validation, early_stopping, label)
        check_listeners(listeners)
        need_picklable(self._model)  # it may have been changed since the network was made
        spreading.check_data(data)
        chosen = Chosen(features, label, weight, validation)
        with closing(progress_for(self._progress)) as progress:
            slots = await_slots(self._context, self._master.start_timeout, progress.say)
            self._settle(slots, progress.say)
            workers = workers_for(slots, self._master)
            warnings = check_conf(self._conf, workers, demand_of(self._model), self._master)
            warnings += check_key(self._conf)
            check_machine(self._master.void, workers, driver_host(self._context))
            key = key_of(self._checkpoints.fits + 1, self._context.getLocalProperty)
            found = self._checkpoints.find(key, epochs, progress.say)
            if found is None and key.number == 1:
                warnings += begins_anew(self._conf, self._master)
            for warning in warnings:
                progress.say(f"sparkstrom warns: {warning}")
            if found is not None:
                self._learnt.begin_with(found.checkpoint)
                if found.use is Use.SKIP:
                    self._checkpoints.is_over(key.number)
                    return skipped(found.checkpoint, key)
            goes_on = found.checkpoint if found is not None and found.use is Use.GO_ON else None
            workers = workers_again(slots, workers, len(goes_on.starts) if goes_on else None)
            if slots.is_dynamic:
                progress.say(f"sparkstrom notes: {allocation_note(workers, slots.per_executor)}")
            call = FitCall(epochs, chosen, early_stopping, tuple(listeners), run_log, key, goes_on)
            theta = self._learnt.theta(self._master.layer_multipliers or {})
            with plain_interrupts(self._context):
                with self._checkpoints.kept_if_it_fails():
                    spread = self._spread(data, chosen, workers)
                return self._train(call, theta, spread, Showing(progress, record, slots, warnings))

    def _settle(self, slots: Slots, say: Callable[[str], None]) -> None:
        """Where the controller is, from the first fit on."""
        self._master = settled(self._master, self._context, slots, say)
        self._site = replace(self._site, master=self._master)

    def _train(
        self, call: FitCall, theta: Theta, spread: Spread, showing: Showing
    ) -> TrainingSummary:
        """All is checked: train, and tell of it."""
        spec = fit_spec(call, spread, self._learnt, self._model.n_params)
        fit = FollowedFit(self._site, self._checkpoints, call, showing)
        run = self._fit_run(fit, spec, theta, spread)
        self._may_have_files = self._site.keep
        return fit.follow(run, self._learnt, self._exports.directory)

    def _fit_run(self, fit: FollowedFit, spec: FitSpec, theta: Theta, spread: Spread) -> FitRun:
        kept, states = self._learnt.use_up(spread.workers)
        return FitRun(self._site, spec, theta, spread, kept, fit.states_for(states))

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
    def parameters(self) -> Flat:
        """A copy of the shared parameters, f32[n_params].

        Assigning is a warm start: what workers kept for the next fit belongs to the former
        parameters, and is not used any more.
        """
        return self._learnt.parameters.copy()

    @parameters.setter
    def parameters(self, values: Flat) -> None:
        self._learnt.assign(values)

    @property
    def checkpoint_directory(self) -> str | None:
        """Where it writes checkpoints, whichever way that was said; None: nowhere."""
        return self._master.checkpoint_directory

    @property
    def model(self) -> FlatModel:
        """The model, bound to a copy of the shared parameters."""
        self._model.bind(self.parameters)
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
            self._learnt.parameters,
            self._learnt.epochs,
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

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Become what a checkpoint holds: a file, or the newest whole one of a directory.

        The next ``fit`` goes on with the fit that was saved, if that was not done. Raises
        UsageError where there is none, or it is of another model.
        """
        with closing(progress_for(self._progress)) as progress:
            self._learnt.begin_with(self._checkpoints.restore(os.fspath(path), progress.say))

    def close(self) -> None:
        """Remove what workers kept for the next fit, and exported rows. Idempotent."""
        self._exports.close()
        if not self._may_have_files:
            return
        slots = slots_of(self._context).total
        forget = partial(forget_kept, self._site.network)
        self._context.parallelize(range(slots), slots).mapPartitions(forget).count()
        self._learnt.use_up()
        self._may_have_files = False
