"""Define ParallelWrapper, which trains a model with several processes on one machine."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Self

from sparkstrom.base.child_processes import count_cores, pickle_by_value
from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import KEY
from sparkstrom.checkpoint.saved_model import load_model, path_to_load
from sparkstrom.data.column_selection import HELD_OUT, ColumnNames, ColumnSpec, features_to_arrays
from sparkstrom.data.row_blocks import check_block
from sparkstrom.data.row_sample import sample_blocks
from sparkstrom.data.row_store import prefetch
from sparkstrom.encoding.backends import warm_up
from sparkstrom.fit.checkpoints import FitCheckpoints, make_fit_key
from sparkstrom.fit.evaluation import Evaluation, evaluate_batch, merge_evaluations, select_metrics
from sparkstrom.fit.fit_context import FitReporting, FitRequest, TaskSlots
from sparkstrom.fit.network_state import copy_if_used
from sparkstrom.fit.session import FitRunner, FitSession
from sparkstrom.fit.strategy import GradientSharing, Strategy
from sparkstrom.fit.summary import FitRecord, TrainingSummary
from sparkstrom.fit.trained_network import (
    TrainedNetwork,
    check_fit_arguments,
    dry_run_step,
    parse_epochs,
    set_known_classes,
)
from sparkstrom.local.data import (
    ScratchDirectory,
    holds_rows,
    partition_rows,
    read_blocks_with_held_out,
    read_data_blocks,
    remove_abandoned_directories,
)
from sparkstrom.local.fit_runner import LocalFitContext, LocalFitRunner, PartitionedRows
from sparkstrom.local.rounds import LocalRounds, RoundsThread
from sparkstrom.local.worker_pool import WorkerPool
from sparkstrom.local.wrapper_options import (
    PREFETCH,
    WORKERS,
    TrainingMode,
    parse_training_mode,
    resolve_options,
    resolve_round_options,
)
from sparkstrom.models.base import FlatModel
from sparkstrom.models.updaters import Updater
from sparkstrom.observe.early_stopping import EarlyStopping, TerminationCondition, limit_epochs
from sparkstrom.observe.progress_display import check_progress, make_progress_display
from sparkstrom.options.gradient_sharing import SharedTrainingMaster
from sparkstrom.options.parameter_averaging import Accumulator
from sparkstrom.rehearsal.rehearse import (
    DEFAULT_ROWS,
    DEFAULT_WORKERS,
    RehearsalRequest,
    make_recipe,
    rehearse,
)
from sparkstrom.rehearsal.result import Rehearsal
from sparkstrom.rehearsal.script import rehearse_instead
from sparkstrom.rounds.run import RoundsRun
from sparkstrom.runtime.theta import Theta
from sparkstrom.worker.network_setup import require_library
from sparkstrom.worker.training_job import require_model


class ParallelWrapper(TrainedNetwork):
    """Trains a model with several worker processes on this machine, without Spark.

    The processes start with the first fit and run until ``close``, the end of a ``with`` block, or
    the end of this process. The wrapper keeps the parameters from one fit to the next.

    Args:
        model: The model to train, as for ``SparkNetwork``.
        workers: number of worker processes; None: one per CPU core that this process may use. Lower
            ``workers`` if a library already uses several cores in a step, or to leave cores to
            other programs. Set ``workers=1`` for a model on a GPU, because GPUs are not distributed
            to workers.
        training_mode: how workers share what they learn: by thresholded updates, by averaging their
            parameters, or by combining their parameters with ``accumulator``. Use AVERAGING or
            CUSTOM if two fits with the same data, seed and number of workers must be bit-identical.
        prefetch_buffer: number of blocks of rows, of some MiB each, that a thread reads ahead; 0:
            none. Set ``prefetch_buffer=0`` to read the rows in the thread that calls ``fit``.
        averaging_frequency: for AVERAGING and CUSTOM: number of minibatches that each worker trains
            between two synchronizations, usually 1 to 10; None: 1. Raise ``averaging_frequency`` to
            synchronize less often. Lower ``averaging_frequency`` if accuracy suffers, as with many
            workers or a large learning rate.
        average_updaters: for AVERAGING and CUSTOM: whether the optimizers' states are averaged,
            too; None: True. Set ``average_updaters=False`` for DiLoCo, in which each worker keeps
            its own optimizer state.
        accumulator: for CUSTOM: a function, called in this process with (before f32[n_params],
            after f32[workers, n_params], rows i64[workers]). The function returns the parameters
            f32[n_params] with which all workers start the next round. Pass a function to combine
            parameters by a different rule than the mean, such as a median.
        outer: for AVERAGING and CUSTOM: outer optimizer, which steps from a round's initial
            parameters towards the combined parameters; None: the next round starts with the
            combined parameters. For DiLoCo, use ``Nesterov(0.7, 0.9)`` with
            ``average_updaters=False``. DiLoCo suits long training whose rounds must be far apart.
        **options: ``progress`` is as in ``SparkNetwork``. All others are options of
            ``SharedTrainingMaster``, by name, unless they only concern Spark (docs/local.md).

    Raises:
        UsageError: An option is unknown or invalid, or the model cannot be sent to processes.
        SetupError: cloudpickle is not installed.
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
        outer: Updater | None = None,
        **options: Any,
    ) -> None:
        progress = options.pop("progress", True)
        check_progress(progress)
        require_model(model, pickle_by_value)
        workers = count_cores() if workers is None else workers
        workers = WORKERS[KEY].read("workers", workers)
        prefetch_buffer = PREFETCH[KEY].read("prefetch_buffer", prefetch_buffer)
        self._mode = parse_training_mode(training_mode)
        self._prefetch_buffer = prefetch_buffer
        self._rounds = resolve_round_options(
            self._mode, averaging_frequency, average_updaters, accumulator, outer
        )
        self._master = resolve_options(options, self._mode, self._rounds, os.environ)
        self._strategy: Strategy[SharedTrainingMaster] = (
            GradientSharing(self._master) if self._rounds is None else Strategy(self._master)
        )
        self._strategy.check_workers(workers)
        name = secrets.token_hex(8)
        super().__init__(model, FitCheckpoints(model, self._master, name), progress)
        remove_abandoned_directories()
        scratch = ScratchDirectory()
        pool = WorkerPool(workers, scratch.path, self._master.void.lease_s)
        self._context = LocalFitContext(model, self._master, name, pool, scratch.path)
        self._owner = os.getpid()
        self._closing = weakref.finalize(self, _close_wrapper, pool, scratch, self._owner)

    def fit(
        self,
        data: Any,
        epochs: int = 1,
        *,
        features: ColumnNames = "features",
        label: ColumnNames | None = "label",
        weight: str | None = None,
        validation: Any = None,
        early_stopping: EarlyStopping | Sequence[TerminationCondition] | None = None,
        listeners: Sequence[Any] = (),
        run_log: str | os.PathLike[str] | None = None,
    ) -> TrainingSummary:
        """Train for ``epochs`` epochs and return a summary.

        Args:
            data: (features, labels) or (features, labels, weights) as arrays; an Arrow table, a
                pandas DataFrame or paths of Parquet files; a torch Dataset or an iterable of
                (features, label) or (features, label, weight), which is read once.
            epochs: Number of passes over the data.
            features: Names of the feature columns, if the data have columns.
            label: Names of the label columns; None if the model's loss takes its labels from the
                features.
            weight: Name of the column with each row's weight.
            validation: A fraction of the rows to hold out, the name of a boolean column, or
                separate rows in any form that ``data`` can have. A file must be a ``Path``, because
                a string names a column.
            early_stopping: When to stop before the last epoch, as in ``SparkNetwork.fit``.
            listeners: Listeners, as in ``SparkNetwork.fit``.
            run_log: File for a log of the run, as in ``SparkNetwork.fit``.

        Returns:
            What happened: losses, times, warnings and more.

        Raises:
            UsageError: An argument is invalid or does not suit the data.
            SetupError: This machine lacks something, such as disk space or the Aeron library.
            TrainingError: Training failed; the error contains the partition and the worker's
                traceback.
        """
        columns: dict[str, Any] = {"features": features, "label": label, "weight": weight}
        rehearse_instead(self.rehearse, data, epochs=epochs, validation=validation, **columns)
        if not self._closing.alive:
            raise UsageError("this ParallelWrapper is closed: create another one")
        self._check_owner()
        record = FitRecord()
        held = validation if holds_rows(validation) else None
        chosen = ColumnSpec(features, label, weight, validation if held is None else HELD_OUT)
        rule = check_fit_arguments(self._model, epochs, chosen, early_stopping, listeners, run_log)
        epochs, ends = limit_epochs(rule, parse_epochs(epochs))
        require_model(self._model, pickle_by_value)
        require_library()
        workers = len(self._context.pool)
        with (
            self._reserve(),
            closing(make_progress_display(self._progress)) as progress,
            self._checkpoints.undo_find_on_error(),
        ):
            key = make_fit_key(self._checkpoints.fits + 1, lambda name: None)
            decision = self._checkpoints.find(key, epochs, progress.say)
            finished, point = self._apply_decision(decision, key)
            if finished is not None:
                return finished
            request = FitRequest(epochs, chosen, rule, tuple(listeners), run_log, key, point, ends)
            theta = None
            if self._rounds is None:
                warm_up(say=progress.say)
                theta = self._state.theta(self._strategy.layer_multipliers)
            warnings = [] if decision is None else decision.warnings
            reporting = FitReporting(progress, record, TaskSlots(1, workers), warnings)
            with (
                self._context.pool.translate_closing_errors(),
                self._partition_into_files(data, held, chosen, workers) as rows,
            ):
                first = next(file for file in rows.files if file.spans)
                metric = request.validation_metric
                parameters = self._state.parameters
                model, pack = self._model, pickle_by_value
                classes = dry_run_step(model, parameters, first.blocks, pack, metric)
                with set_known_classes(model, classes):
                    return self._train(request, theta, rows, reporting)

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
        validation: Any = None,
        **conditions: Any,
    ) -> Rehearsal:
        """Simulate a fit with each number of workers in virtual time (docs/rehearse.md).

        The simulated workers run on one host each, as on a cluster. This wrapper is not changed.

        Args:
            data: As in ``fit``.
            workers: Numbers of workers to compare.
            epochs: Number of passes over the data.
            link: Rate of each host's link, such as "1gbit", or bits per second. Default: 1gbit.
            latency: Latency in one direction, such as "1ms", or in seconds. Default: 1ms.
            rows: Size of the random sample of the data to train on.
            seed: Seed of the sample, the placement of rows, and step times.
            features: As in ``fit``.
            label: As in ``fit``.
            weight: As in ``fit``.
            validation: As in ``fit``; losses are measured on these rows.
            **conditions: step, jitter, encode, apply, straggler, kill, scaling and to_loss, as
                docs/rehearse.md explains them.

        Returns:
            Losses, virtual times and bytes for each number of workers, for training in one process,
            and for PyTorch's DistributedDataParallel (DDP).

        Raises:
            UsageError: An argument is invalid or does not suit the data, or a fit is under way.
            TrainingError: Step times could not be measured.
        """
        request = RehearsalRequest.from_options(
            workers=workers, link=link, latency=latency, rows=rows, seed=seed, **conditions
        )
        if request.measure:
            raise UsageError(
                "measure=True: these workers are processes of this machine, where a step is"
                " measured anyway; rehearse a SparkNetwork, or give link, latency and step"
            )
        held = validation if holds_rows(validation) else None
        chosen = ColumnSpec(features, label, weight, validation if held is None else HELD_OUT)
        check_fit_arguments(self._model, epochs, chosen, None, (), "")
        with (
            self._reserve_unless_final(),
            closing(make_progress_display(self._progress)) as progress,
        ):
            packed = pickle_by_value(self._model)
            epochs = parse_epochs(epochs)
            fit = self._model, self._state, self._master, packed, epochs, chosen.fraction
            recipe = make_recipe(*fit, self._rounds)
            request.check_recipe(recipe)
            blocks = read_blocks_with_held_out(data, held, chosen)
            sample = sample_blocks(blocks, request.rows, request.seed)
            cpus = self._context.pool.threads
            return rehearse(recipe, sample, request, progress, cpus=cpus)

    def _check_owner(self) -> None:
        """Raise UsageError in a process forked from the one that created the wrapper.

        Both have the sockets to the workers, so their messages would be mixed up.
        """
        if os.getpid() != self._owner:
            raise UsageError(
                f"this ParallelWrapper was made in process {self._owner}, and this one was forked"
                " from it: create another one here"
            )

    @contextmanager
    def _partition_into_files(
        self, data: Any, held_out: Any, columns: ColumnSpec, workers: int
    ) -> Iterator[PartitionedRows]:
        """Distribute the rows to files, one per worker, in a new directory; yield the files.

        ``held_out``: separate held-out rows, or None. The directory is deleted at the end of the
        ``with`` block.
        """
        scratch, pool = self._context.scratch, self._context.pool
        directory = Path(tempfile.mkdtemp(prefix="fit-", dir=scratch))
        try:
            read = read_blocks_with_held_out(data, held_out, columns)
            drawn = prefetch(read, self._prefetch_buffer, pool.check_open)
            with closing(drawn) as blocks:
                files = partition_rows(blocks, workers, self._master.rng_seed, directory)
            yield PartitionedRows(files, directory)
        finally:
            shutil.rmtree(scratch if pool.is_closed else directory, ignore_errors=True)

    def _train(
        self,
        request: FitRequest,
        theta: Theta | None,
        rows: PartitionedRows,
        reporting: FitReporting,
    ) -> TrainingSummary:
        """Run one fit on partitioned rows and return its summary.

        ``theta`` is the controller's replica for gradient sharing; None for round-based training.
        """
        session = FitSession(self._strategy, self._checkpoints, request, reporting, self._state)
        spec = session.make_spec(len(rows.files))
        files, states = session.resume_state(spec.workers)
        self._context.pool.check_open()  # another thread may have closed it meanwhile
        runner: FitRunner
        if theta is not None:
            runner = LocalFitRunner(self._context, spec, theta, rows, files, states)
        else:
            assert self._rounds is not None, "only gradient sharing needs a theta"
            backend = LocalRounds(self._context, spec, self._rounds, rows)
            runner = RoundsRun(
                spec,
                self._model,
                self._rounds,
                self._state,
                states,
                backend,
                lambda train: RoundsThread(train, backend.abort),
                has_observer=request.early_stopping is not None,
            )
        return session.run(runner, None)

    def predict(self, features: Any) -> Any:
        """Return the model's outputs for features [rows, ...] with the trained parameters.

        The outputs are computed in this process.
        """
        return self.model.predict(features_to_arrays(features))

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
        """Evaluate the model with its current parameters on ``data``, in this process.

        Args:
            data: Rows in a form that ``fit`` accepts.
            metrics: Names of metrics, as in ``SparkNetwork.evaluate``; None selects those that suit
                the model.
            features: Names of the feature columns, if the data have columns.
            label: Names of the label columns.
            weight: Name of the column with each row's weight.
            positive: Index of the class that counts as positive in binary metrics.

        Returns:
            The metrics over all rows.

        Raises:
            UsageError: The data have no rows, or a row does not suit the model.
        """
        model, parts = self.model, []
        wanted = select_metrics(model, metrics, positive)
        for block in read_data_blocks(data, ColumnSpec(features, label, weight)):
            check_block(model, block)
            for part in block.split():
                parts.append(evaluate_batch(model, wanted, part.form.batch(part.records)))
        if not parts:
            raise UsageError("there are no rows to evaluate: the data are empty")
        return merge_evaluations(parts)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], *, model: FlatModel | None = None, **given: Any
    ) -> ParallelWrapper:
        """Return a wrapper with a saved model and its parameters.

        Args:
            path: File that ``save`` of a ParallelWrapper or a SparkNetwork wrote: a local path or a
                URL, as in ``save``.
            model: A model like the saved one. It is required if the file does not contain the
                model's code, as for TorchModel. If another network uses it, it is copied.
            **given: Arguments of ``ParallelWrapper``.

        Raises:
            UsageError: The saved network cannot be read, or an argument is invalid.
        """
        with path_to_load(path) as local:
            model, parameters, epochs = load_model(local, copy_if_used(model))
        wrapper = cls(model, **given)
        wrapper._state.assign(parameters, epochs, any_value=True)
        return wrapper

    @property
    def workers(self) -> int:
        """Number of worker processes."""
        return len(self._context.pool)

    def worker_pids(self) -> list[int]:
        """Return the process ids of the workers that are alive."""
        return self._context.pool.pids()

    def close(self) -> None:
        """End the worker processes; delete the files that they kept for the next fit. Idempotent.

        A fit that is running in another thread ends with a TrainingError. In a forked process,
        nothing is ended or deleted.
        """
        self._state.forget_resume_state()
        self._closing()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _close_wrapper(pool: WorkerPool, scratch: ScratchDirectory, owner: int) -> None:
    """End the workers and delete the scratch directory; do nothing in a forked process.

    ``owner``: id of the process that created the wrapper.
    """
    if os.getpid() != owner:
        return  # in a forked process, everything still belongs to the parent
    pool.close()
    scratch.remove()
