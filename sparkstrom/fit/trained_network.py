"""TrainedNetwork, the base class of SparkNetwork and ParallelWrapper, and checks before a fit.

``TrainedNetwork`` contains what both classes share: a model whose parameters can be trained, saved,
restored and assigned.

``dry_run_step`` trains a copy of the model for one step before workers are started. It finds a
wrong shape, dtype, label or loss in about a second, while starting workers takes ten.

``restart_warnings`` warns that a program trains from the beginning after a restart. In YARN's
cluster mode, the driver runs in a process named ApplicationMaster. If that dies, YARN starts the
program again as another attempt, possibly on another node. Like any program that is run again, this
attempt resumes from the newest checkpoint; without a checkpoint, it trains from the beginning.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, TextIO, cast

import numpy as np

from sparkstrom.base.errors import UsageError, first_line
from sparkstrom.base.option_types import COUNT_MAX, KEY, check_path_argument, whole
from sparkstrom.checkpoint.saved_model import path_to_save, save_model
from sparkstrom.codec.optimizer_state_codec import plain_scalars
from sparkstrom.data.column_selection import ColumnSpec, check_validation_value
from sparkstrom.data.row_blocks import Block, check_block
from sparkstrom.fit.checkpoints import (
    FitCheckpoints,
    FitKey,
    ResumeAction,
    ResumeDecision,
    ResumePoint,
)
from sparkstrom.fit.early_stopping_listener import check_validation
from sparkstrom.fit.listeners import check_listeners, check_run_log
from sparkstrom.fit.network_state import NetworkStateHolder
from sparkstrom.fit.summary import TrainingSummary, summary_of_skipped_fit
from sparkstrom.models.base import (
    Batch,
    ClassCounter,
    EpochAware,
    Exporting,
    Flat,
    FlatModel,
    Paced,
    buffers_to_save,
    get_buffers,
    load_buffers,
)
from sparkstrom.models.output_interpretation import measure_batch
from sparkstrom.observe.early_stopping import (
    EarlyStopping,
    TerminationCondition,
    parse_early_stopping,
)
from sparkstrom.observe.progress_display import make_progress_display
from sparkstrom.options.common import CommonOptions
from sparkstrom.worker.training_job import PickleFunction

EPOCHS = whole(1, COUNT_MAX, unit="epochs")


class TrainedNetwork:
    """A model with its trained parameters, which can be saved, restored and assigned.

    Args:
        model: The model.
        checkpoints: The network's checkpoints.
        progress: The user's option for the progress display.
    """

    def __init__(self, model: FlatModel, checkpoints: FitCheckpoints, progress: bool | str) -> None:
        self._model, self._checkpoints, self._progress = model, checkpoints, progress
        self._state = NetworkStateHolder(model)
        self._training = threading.Lock()  # held during a fit, and while the state is replaced

    @contextlib.contextmanager
    def _reserve(self) -> Iterator[None]:
        """Reserve the network for the block. Raise UsageError while a fit or rehearsal runs.

        Otherwise the result of that fit would replace a change that is made in the block.
        """
        if not self._training.acquire(blocking=False):
            name = type(self).__name__
            raise UsageError(
                f"a fit or rehearsal of this {name} is under way in another thread: wait for its"
                f" end, or make another {name}"
            )
        try:
            yield
        finally:
            self._state.is_final = False
            self._training.release()

    @contextlib.contextmanager
    def _reserve_unless_final(self) -> Iterator[None]:
        """Reserve the network like ``_reserve``, or do nothing if the fit is done with its state.

        A listener's ``on_fit_end``, which the fit calls at its end, may thus change the state.
        """
        if self._training.locked() and self._state.is_final:
            yield
        else:
            with self._reserve():
                yield

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._model!r}, {self._state.epochs} epochs trained)"

    def _apply_decision(
        self, decision: ResumeDecision | None, key: FitKey
    ) -> tuple[TrainingSummary | None, ResumePoint | None]:
        """Load the checkpoint of ``decision``; do nothing if that is None.

        Return (summary, None) if the fit ``key`` was finished before and is skipped. Otherwise
        return (None, checkpoint), with the checkpoint from which the fit resumes, or None if the
        fit starts anew.
        """
        if decision is None:
            return None, None
        self._state.load_checkpoint(decision.checkpoint)
        if decision.action is ResumeAction.SKIP:
            self._checkpoints.mark_ended(key.number)
            return summary_of_skipped_fit(decision.checkpoint, key), None
        return None, decision.checkpoint if decision.action is ResumeAction.RESUME else None

    @property
    def parameters(self) -> Flat:
        """A copy of the shared parameters, f32[n_params].

        Assigning parameters is a warm start: residual files, optimizer states and a restored
        checkpoint for the next fit belong to the former parameters and are not used. The number of
        epochs stays, so schedules by epochs continue; to start from epoch 1, make another network.
        """
        return self._state.parameters.copy()

    @parameters.setter
    def parameters(self, values: Flat) -> None:
        """Replace the parameters.

        Raise UsageError for another shape, for values that are not finite, or while a fit runs.
        """
        with self._reserve_unless_final():
            self._state.assign(values)
            self._checkpoints.mark_assigned()

    @property
    def checkpoint_directory(self) -> str | None:
        """Directory or URL for checkpoints, from any source of options; None: none are written."""
        return self._checkpoints.master.checkpoint_directory

    @property
    def model(self) -> FlatModel:
        """The model, bound to a copy of the shared parameters."""
        self._model.bind(self.parameters)
        return self._model

    @property
    def module(self) -> Any:
        """The TorchModel's module, with a copy of the shared parameters and with its buffers.

        Raise UsageError if the model is not a TorchModel.
        """
        model: Any = self.model
        if not hasattr(model, "module"):
            raise UsageError(
                f"a {type(model).__name__} has no module: network.module is for a TorchModel; "
                "network.model and network.parameters are there for every model"
            )
        return model.module

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save parameters, buffers and the model's description.

        Args:
            path: File to write, in NumPy's npz format: a local path, or a URL of a file system
                that fsspec supports, such as "s3://bucket/net.npz". A JSON description is written
                next to it, and for a TorchModel also ``path`` + ".pt", a state_dict for
                ``torch.load``.

        Raises:
            UsageError: fsspec does not know the URL's file system.
            SetupError: A file cannot be written.
        """
        model = self.model
        with path_to_save(path) as target:
            save_model(
                target,
                model.describe(),
                self._state.parameters,
                self._state.epochs,
                buffers=buffers_to_save(model),
                exported=model.exported() if isinstance(model, Exporting) else None,
            )

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Load a checkpoint; the next ``fit`` resumes the saved fit if that was not finished.

        Args:
            path: A checkpoint file, or a directory whose newest complete checkpoint is used.

        Raises:
            UsageError: There is no checkpoint, it is of another model, or a fit is under way.
        """
        with (
            self._reserve_unless_final(),
            closing(make_progress_display(self._progress)) as progress,
        ):
            self._state.load_checkpoint(
                self._checkpoints.restore(check_path_argument(path), progress.say)
            )


def parse_epochs(epochs: object) -> int:
    """Return the number of epochs as an int. Raise UsageError if the value is not valid."""
    return int(EPOCHS[KEY].read("epochs", epochs))


def check_fit_arguments(
    model: FlatModel,
    epochs: int,
    chosen: ColumnSpec,
    early_stopping: EarlyStopping | Sequence[TerminationCondition] | None,
    listeners: Sequence[Any],
    run_log: str | os.PathLike[str] | None,
) -> EarlyStopping | None:
    """Check the arguments of ``fit``; return the early-stopping rule, or None.

    ``chosen``: the columns of the data and the rows to hold out. Raise UsageError for an invalid
    argument.
    """
    parse_epochs(epochs)
    check_validation_value(chosen.validation)
    rule: EarlyStopping | None = parse_early_stopping(early_stopping)
    check_validation(model, chosen.validation, rule, chosen.label)
    check_listeners(listeners)
    check_run_log(run_log)
    return rule


ATTEMPT_KEY = "spark.app.attempt.id"  # set by Spark, in cluster mode only

RESTART_MESSAGE = (
    "this is attempt {attempt} of {application}, and it trains from the beginning: {reason}"
)
NO_DIRECTORY = (
    "the last attempt saved nothing; set checkpoint_directory=... on a file system that every node"
    " reaches, such as hdfs:///runs/7, and the next attempt resumes from the newest checkpoint"
)
RESUME_IS_OFF = (
    "resume=False is set; without it, an attempt resumes from the newest checkpoint in {url}"
)
NO_CHECKPOINT = (
    "there is no checkpoint in checkpoint_directory={url!r}: the last attempt ended before"
    " the first was written (checkpoint_every={every!r})"
)
OTHER_NODE = (
    ", or ran on another node, whose files this one does not see; set checkpoint_directory=... on"
    " a file system that every node reaches, such as hdfs:///runs/7"
)


def restart_warnings(conf: Mapping[str, str], master: CommonOptions) -> list[str]:
    """Return a warning if YARN restarted this program and it has no checkpoint to resume from.

    The caller has found no checkpoint; the warning says why, from the options ``master``. ``conf``
    is Spark's configuration, which in YARN's cluster mode contains the number of the application's
    attempt. Return none for the first attempt.
    """
    attempt = conf.get(ATTEMPT_KEY, "")
    if not attempt.isdecimal() or int(attempt) < 2:
        return []
    application = conf.get("spark.app.id", "the application")
    return [
        RESTART_MESSAGE.format(
            attempt=attempt, application=application, reason=_restart_reason(master)
        )
    ]


def _restart_reason(master: CommonOptions) -> str:
    """Return why a repeated attempt of the application could not resume, with a remedy."""
    url = master.checkpoint_directory
    if url is None:
        return NO_DIRECTORY
    if not master.resume:
        return RESUME_IS_OFF.format(url=url)
    is_local = "://" not in url or url.startswith("file://")
    empty = NO_CHECKPOINT.format(url=url, every=master.checkpoint_every)
    return empty + (OTHER_NODE if is_local else "")


log = logging.getLogger(__name__)

DRY_RUN_ROWS = 8  # if there are fewer, they are repeated
PARAMETERS_MAX = 20_000_000  # larger models take long: parameters and optimizer state are copied
BATCH_NORM_ERROR = "more than 1 value per channel"  # BatchNorm refuses a batch of one row


def dry_run_step(
    model: FlatModel,
    parameters: Flat,
    first: Callable[[], Iterable[Block]] | None,
    pack: PickleFunction,
    metric: str | None = None,
    examine: Callable[[FlatModel, Batch], None] | None = None,
) -> tuple[int, int] | None:
    """Train a copy of the model for one step on the first rows, to find errors before a fit starts.

    The step is skipped for large models, for user-defined model classes, and if there are no rows.
    Of a user-defined class, only the optimizer state is checked. Errors other than UsageError are
    only logged, because a worker would report them.

    Args:
        model: The model of the fit, which is not changed.
        parameters: Its parameters, f32[n_params].
        first: Returns the first blocks of rows; None if they are not available at once.
        pack: Pickles the model, as for a worker.
        metric: The metric that the fit computes on held-out rows; None if it computes none.
        examine: Called with the trained copy and the rows, unless it is None. It may raise
            UsageError.

    Returns:
        (Dimensions of labels, number of classes) as the copy found them, for ``set_known_classes``;
        None if they are unknown.

    Raises:
        UsageError: Rows, model and loss do not fit together, the optimizer state has other values
            than arrays and numbers, or ``examine`` raised it.
    """
    if model.n_params > PARAMETERS_MAX:
        return None
    try:
        with preserve_process_state():
            if not type(model).__module__.startswith("sparkstrom."):
                copied: FlatModel = pickle.loads(pack(model))
                copied.bind(parameters.copy())
                plain_scalars(copied.updater_state())
                return None
            block = None if first is None else next(iter(first()), None)
            if block is not None and len(block.records):
                copied, batch = _train_copy(model, parameters, block, pack, metric)
                if examine is not None:
                    examine(copied, batch)
                return copied.known_classes if isinstance(copied, ClassCounter) else None
    except UsageError as error:
        if BATCH_NORM_ERROR not in str(error):
            raise
    except Exception as error:  # a worker also reports it, if it occurs there
        log.info("the dry run before the fit was skipped: %s", first_line(error))
    return None


@contextlib.contextmanager
def set_known_classes(model: FlatModel, classes: tuple[int, int] | None) -> Iterator[None]:
    """Set ``known_classes`` of a model that counts classes during the ``with`` block, a fit.

    Workers then check all labels before they train. ``classes`` is as ``dry_run_step`` returns it.
    The model does not keep it, because a fit on other columns may use other outputs.
    """
    if not isinstance(model, ClassCounter):
        yield
        return
    model.known_classes = classes
    try:
        yield
    finally:
        model.known_classes = None


def _train_copy(
    model: FlatModel, parameters: Flat, block: Block, pack: PickleFunction, metric: str | None
) -> tuple[FlatModel, Batch]:
    """Check the first rows of a block, and take one step with them on a copy of the model.

    Then compute ``metric`` on these rows, unless it is None. ``pack`` pickles the model, as for a
    worker. Return the copy and the rows.
    """
    copied: FlatModel = pickle.loads(pack(model))
    block = block._replace(
        records=block.records[:DRY_RUN_ROWS], numbers=block.numbers[:DRY_RUN_ROWS]
    )
    check_block(copied, block)
    copied.bind(parameters.copy())
    load_buffers(copied, get_buffers(model))
    batch = block.form.batch(np.resize(block.records, (DRY_RUN_ROWS, block.records.shape[1])))
    if not batch.total_weight:  # these rows would not be tried
        batch = batch._replace(weights=np.ones(batch.rows, np.float32))
    if isinstance(copied, EpochAware):
        copied.set_position(0, 0, 1)
    if isinstance(copied, Paced):
        copied.keep_pace(1, 0, 0)
    try:
        copied.step(batch)
    except UsageError:
        check_block(copied, block)  # names a label's row and column, now that classes are known
        raise
    if metric is not None:
        measure_batch(copied, batch, metric)
    return copied, batch


class _MutedForThread:
    """A text stream that drops text of the thread that created it, and forwards all other text."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._thread = stream, threading.get_ident()

    def write(self, text: str) -> int:
        """Write the text, unless the creating thread calls; return the number of characters."""
        if threading.get_ident() == self._thread:
            return len(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


# Standard output, warning filters and random states belong to the whole process: two fits at the
# same time, as in a cross-validation, would restore them in the wrong order.
_process_state = threading.Lock()


@contextlib.contextmanager
def preserve_process_state() -> Iterator[None]:
    """Drop this thread's output and warnings in the block; restore random states afterwards."""
    with _process_state, contextlib.ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        if (torch := sys.modules.get("torch")) is not None:
            stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if sys.stdout is not None:  # it is None in a program that was started without one
            muted = cast(TextIO, _MutedForThread(sys.stdout))
            stack.enter_context(contextlib.redirect_stdout(muted))
        stack.enter_context(np.errstate(all="ignore"))
        yield
