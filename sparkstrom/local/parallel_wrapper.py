"""ParallelWrapper: a model and its worker processes on this machine; no Spark, no JVM."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Self

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import KEY
from sparkstrom.checkpoint.store import load_model, local_path
from sparkstrom.encoding.backends import warm_up
from sparkstrom.local.accumulators import Accumulator
from sparkstrom.local.by_value import packed_by_value
from sparkstrom.local.dealt_rows import dealt
from sparkstrom.local.host_fit import Dealt, HostFit, HostSite
from sparkstrom.local.local_data import are_rows, blocks_of_data, blocks_with_held_out
from sparkstrom.local.rounds_fit import RoundsFit
from sparkstrom.local.scratch import WrapperScratch, remove_left
from sparkstrom.local.worker_pool import WorkerPool, cores
from sparkstrom.local.wrapper_options import (
    PREFETCH,
    WORKERS,
    TrainingMode,
    mode_of,
    options_of,
    rule_of,
)
from sparkstrom.models.base import FlatModel
from sparkstrom.observe.progress_choice import check_progress, progress_for
from sparkstrom.observe.stopping import EarlyStopping, epochs_of
from sparkstrom.observe.termination import TerminationCondition
from sparkstrom.runtime.prefetching import prefetched
from sparkstrom.runtime.theta import Theta
from sparkstrom.spark.data.columns import HELD_OUT, Chosen, Names
from sparkstrom.spark.data.row_blocks import check_block
from sparkstrom.spark.driver.call_checks import check_call, epochs_given
from sparkstrom.spark.driver.cluster import Slots, check_min_workers
from sparkstrom.spark.driver.dry_step import try_step
from sparkstrom.spark.driver.evaluation import Evaluation, evaluate_batch, merged, wanted_for
from sparkstrom.spark.driver.fit_call import FitCall, Showing
from sparkstrom.spark.driver.fit_checkpoints import FitCheckpoints, key_of
from sparkstrom.spark.driver.fit_record import FitRecord
from sparkstrom.spark.driver.fit_site import RunningFit
from sparkstrom.spark.driver.followed_fit import FollowedFit, fit_spec
from sparkstrom.spark.driver.pickling import need_model, need_picklable
from sparkstrom.spark.driver.summary import TrainingSummary
from sparkstrom.spark.driver.trained_network import TrainedNetwork
from sparkstrom.spark.executor.inference import features_of
from sparkstrom.spark.executor.interfaces import need_library


class ParallelWrapper(TrainedNetwork):
    """Trains a model with ``workers`` processes of this machine, again and again.

    ``workers=None``: one for each core that this process may use. ``training_mode`` is a
    ``TrainingMode`` or its name; ``prefetch_buffer``: blocks of rows (some MiB each) that are
    drawn ahead of an iterator, in a thread; 0: none. For AVERAGING and CUSTOM, where workers meet:
    ``averaging_frequency``, minibatches of a worker between two meetings, as a rule 1 to 10 (None:
    1); ``average_updaters``: the optimizer's state, too (None: yes). For CUSTOM ``accumulator``:
    called here with (before f32[n_params], after f32[workers, n_params], rows i64[workers]), it
    returns what all begin the next round with, f32[n_params].
    ``progress`` is as in ``SparkNetwork``. All other options are those of
    ``SharedTrainingMaster``, by name, as far as they are not about Spark (docs/local.md).

    Its processes start with the first fit and live until ``close``, the end of a ``with`` block,
    or the end of this process. Raises UsageError for options that cannot work.
    """

    def __init__(
        self,
        model: FlatModel,
        workers: int | None = None,
        *,
        training_mode: TrainingMode | str = TrainingMode.SHARED_GRADIENTS,
        prefetch_buffer: int = 2,
        averaging_frequency: int | None = None,
        average_updaters: bool | None = None,
        accumulator: Accumulator | None = None,
        **options: Any,
    ) -> None:
        progress = options.pop("progress", True)
        check_progress(progress)
        need_model(model, packed_by_value)
        workers = cores() if workers is None else workers
        workers = WORKERS[KEY].read("workers", workers)
        prefetch_buffer = PREFETCH[KEY].read("prefetch_buffer", prefetch_buffer)
        self._mode = mode_of(training_mode)
        self._prefetch_buffer = prefetch_buffer
        self._rule = rule_of(self._mode, averaging_frequency, average_updaters, accumulator)
        self._master = options_of(options, self._mode, self._rule, os.environ)
        check_min_workers(self._master, workers)
        name = secrets.token_hex(8)
        super().__init__(model, FitCheckpoints(model, self._master, name), progress)
        remove_left()
        scratch = WrapperScratch()
        pool = WorkerPool(workers, scratch.path, self._master.void.lease_s)
        self._site = HostSite(model, self._master, name, pool, scratch.path)
        self._owner, self._training = os.getpid(), threading.Lock()
        self._closing = weakref.finalize(self, _close, pool, scratch, self._owner)

    # -- training --------------------------------------------------------------------------------

    def fit(
        self,
        data: Any,
        epochs: int = 1,
        *,
        features: Names = "features",
        label: Names | None = "label",
        weight: str | None = None,
        validation: Any = None,
        early_stopping: EarlyStopping | Sequence[TerminationCondition] | None = None,
        listeners: Sequence[Any] = (),
        run_log: str | os.PathLike[str] | None = None,
    ) -> TrainingSummary:
        """Train for ``epochs`` epochs; return what happened.

        ``data``: (features, labels) or (features, labels, weights) as arrays; an Arrow table, a
        pandas DataFrame or paths of Parquet files, of which ``features``, ``label`` and ``weight``
        name columns; a Dataset of torch or an iterable of (features, label) or (features, label,
        weight), which is drawn once. ``validation`` is a fraction, the name of a boolean column, or
        separate rows of the same kinds; a file must be a ``Path``, as a string names a column.
        The rest is as in ``SparkNetwork.fit``.
        Raises UsageError, SetupError or TrainingError (with partition and traceback).
        """
        if not self._closing.alive:
            raise UsageError("this ParallelWrapper is closed: make another one")
        record = FitRecord()
        held = validation if are_rows(validation) else None
        chosen = Chosen(features, label, weight, validation if held is None else HELD_OUT)
        rule = check_call(self._model, epochs, chosen, early_stopping, listeners, run_log)
        epochs, ends = epochs_of(rule, epochs_given(epochs))
        need_picklable(self._model, packed_by_value)
        need_library()
        workers = len(self._site.pool)
        with self._by_itself(), closing(progress_for(self._progress)) as progress:
            key = key_of(self._checkpoints.fits + 1, lambda name: None)
            found = self._checkpoints.find(key, epochs, progress.say)
            done, goes_on = self._begin_with(found, key)
            if done is not None:
                return done
            call = FitCall(epochs, chosen, rule, tuple(listeners), run_log, key, goes_on, ends)
            if self._rule is None:
                warm_up(say=progress.say)
            theta = self._learnt.theta(self._master.layer_multipliers or {})
            showing = Showing(progress, record, Slots(1, workers), [])
            with self._site.pool.while_open(), self._dealt(data, held, chosen, workers) as rows:
                first = next(file for file in rows.files if file.spans)
                metric = call.metric_measured
                parameters = self._learnt.parameters
                try_step(self._model, parameters, first.blocks, packed_by_value, metric)
                return self._train(call, theta, rows, showing)

    @contextmanager
    def _by_itself(self) -> Iterator[None]:
        """Processes, and what they have learnt, are one fit's. Raise UsageError where it has none.

        Sockets to the workers are in a forked process, too: orders of both would be mixed.
        """
        if os.getpid() != self._owner:
            raise UsageError(
                f"this ParallelWrapper was made in process {self._owner}, and this one was forked"
                " from it: make another one here"
            )
        if not self._training.acquire(blocking=False):
            raise UsageError(
                "a fit of this ParallelWrapper is under way in another thread: wait for its end, or"
                " make another wrapper"
            )
        try:
            yield
        finally:
            self._training.release()

    @contextmanager
    def _dealt(self, data: Any, held: Any, chosen: Chosen, workers: int) -> Iterator[Dealt]:
        """The rows on disk, until the fit is over."""
        scratch, pool = self._site.scratch, self._site.pool
        directory = Path(tempfile.mkdtemp(prefix="fit-", dir=scratch))
        try:
            read = (
                blocks_of_data(data, chosen)
                if held is None
                else blocks_with_held_out(data, held, chosen._replace(validation=None))
            )
            drawn = prefetched(read, self._prefetch_buffer, pool.need_open)
            with self._checkpoints.kept_if_it_fails(), closing(drawn) as blocks:
                files = dealt(blocks, workers, self._master.rng_seed, directory)
            yield Dealt(files, directory)
        finally:
            shutil.rmtree(scratch if pool.is_closed else directory, ignore_errors=True)

    def _train(self, call: FitCall, theta: Theta, rows: Dealt, showing: Showing) -> TrainingSummary:
        workers = len(rows.files)
        spec = fit_spec(call, workers, self._learnt, self._model.n_params)
        fit = FollowedFit(self._site, self._checkpoints, call, showing)
        kept, states = self._learnt.use_up(workers)
        states = fit.states_for(states)
        self._site.pool.need_open()  # still
        run: RunningFit
        if self._rule is None:
            run = HostFit(self._site, spec, theta, rows, kept, states)
        else:
            theta.load(self._learnt.parameters)  # no sums of updates: they need no grid
            judged = call.early_stopping is not None
            run = RoundsFit(self._site, spec, theta, rows, self._rule, states, judged=judged)
        return fit.follow(run, self._learnt, None)

    # -- prediction and evaluation ---------------------------------------------------------------

    def predict(self, features: Any) -> Any:
        """Outputs of features [rows, ...] under the shared parameters, in this process."""
        return self.model.predict(features_of(features))

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
        """How well the shared parameters do on ``data``, in this process; data are as in ``fit``.

        Raises UsageError naming a row that does not fit, and where there is none.
        """
        model, parts = self.model, []
        wanted = wanted_for(model, metrics, positive)
        for block in blocks_of_data(data, Chosen(features, label, weight)):
            check_block(model, block)
            parts.append(evaluate_batch(model, wanted, block.form.batch(block.records)))
        if not parts:
            raise UsageError("there are no rows to evaluate: the data are empty")
        return merged(parts)

    # -- the wrapper itself ----------------------------------------------------------------------

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, model: FlatModel | None = None, **given: Any
    ) -> ParallelWrapper:
        """A wrapper with the model and parameters that ``save`` wrote, here or in a SparkNetwork.

        ``model``: one like the saved one, where its code was not saved, as a TorchModel's is not.
        """
        model, parameters, epochs = load_model(local_path(path), model)
        wrapper = cls(model, **given)
        wrapper.parameters = parameters
        wrapper._learnt.epochs = epochs
        return wrapper

    @property
    def workers(self) -> int:
        """Processes that train."""
        return len(self._site.pool)

    def worker_pids(self) -> list[int]:
        """Of those that live now."""
        return self._site.pool.pids()

    def close(self) -> None:
        """End the processes, and remove what they kept for the next fit. Idempotent.

        A fit in another thread ends with a TrainingError. In a forked process nothing happens.
        """
        self._learnt.use_up()
        self._closing()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _close(pool: WorkerPool, scratch: WrapperScratch, owner: int) -> None:
    if os.getpid() != owner:
        return  # forked: all this is the other process', which goes on
    pool.close()
    scratch.remove()
