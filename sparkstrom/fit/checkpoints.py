"""Save a fit in checkpoints, and decide what a later fit does with the newest checkpoint.

``CheckpointListener`` writes checkpoints during a fit and at its end. ``ResumePoint`` is a
checkpoint that was read. A program that is run again calls ``fit`` in the same order, so the number
of the call identifies a fit. ``FitCheckpoints`` compares it with the number in the newest
checkpoint. If both are equal, the fit resumes. If the checkpoint is of an earlier fit, the fit
starts with its parameters. If it is of a later fit, the fit is skipped. In a stream, the
micro-batch's id is used instead of the number, because Spark repeats a micro-batch under its id.

The controller is the process that numbers updates; a numbered update is a commit, and a round
counts as one. A run is the part of a fit under one controller.
"""

from __future__ import annotations

import copy
import enum
import hashlib
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import CheckpointDamaged, SparkstromError, UsageError, first_line
from sparkstrom.base.identity import Position
from sparkstrom.checkpoint.directory import CheckpointDirectory, open_checkpoint
from sparkstrom.checkpoint.files import Checkpoint
from sparkstrom.checkpoint.saved_model import check_same_model
from sparkstrom.checkpoint.writer import (
    CheckpointInterval,
    CheckpointSchedule,
    CheckpointWriter,
    parse_checkpoint_every,
)
from sparkstrom.codec.messages import Phase
from sparkstrom.fit.early_stopping_listener import Best, EarlyStoppingListener
from sparkstrom.fit.events import FitListener
from sparkstrom.models.base import Flat, FlatModel, add_frozen_weights
from sparkstrom.observe.epoch_history import Epoch, EpochHistory
from sparkstrom.observe.listener_events import CheckpointWritten
from sparkstrom.options.gradient_sharing import ALL, ONE
from sparkstrom.options.parameter_averaging import TrainingMaster
from sparkstrom.protocol.common.fit_spec import (
    FitSpec,
    PartitionStart,
    count_complete_epochs,
)
from sparkstrom.runtime.master_control import MasterControl, Progress, Snapshot
from sparkstrom.runtime.optimizer_states import OptimizerStates, decode_optimizer_state

EpochFigures = dict[str, Any]  # losses and metrics by epoch, from ``EpochHistory.report``
EARLIER_RUN = -1  # used as the commit number of a snapshot that an earlier run of the fit made

# Names of thread-local properties that Spark sets in a stream.
STREAM_PROPERTY = "sql.streaming.queryId"
BATCH_PROPERTY = "streaming.sql.batchId"
STATE_ARRAY = "state"  # name of the array with the common optimizer state
TRAIN_ANEW_HINT = "begin anew with another checkpoint_directory or resume=False"
OPTIMIZER_STATE_TIMEOUT_S = 60.0  # for each worker's state; the controller gives up much earlier
Say = Callable[[str], None]
_directory_owners: dict[str, str] = {}  # location -> the network of this program that uses it


@dataclass(frozen=True, slots=True)
class FitKey:
    """Identifies a fit within its program. A program that is run again makes the same keys."""

    number: int  # counts the network's fits, from 1
    stream: str = ""  # id of the streaming query; "": the fit is not part of a stream
    batch: int = -1  # id of the query's micro-batch; -1 outside of a stream


@dataclass(frozen=True, slots=True)
class CheckpointContent:
    """The current state of a fit, from which a checkpoint is built."""

    key: FitKey  # identifies the fit within its program
    spec: FitSpec  # number of workers, epochs and other facts of the fit
    threshold: str  # repr of the threshold algorithm, for which encoder states are valid
    snapshot: Snapshot  # parameters, buffers and the position of each partition
    figures: EpochFigures  # losses and metrics by epoch
    k: int  # parameters are multiples of 2^-k
    states: OptimizerStates  # the common state is b"" if none could be copied
    wanted: str = ONE  # option checkpoint_updaters: the state of ONE worker or of ALL
    # With early stopping: the best epoch, and a copy of its parameters if the rule keeps them.
    best: tuple[Best, Snapshot | None] | None = None
    epochs_done: int | None = None  # epochs of a finished fit; None if it is not finished
    summaries: dict[str, Any] = field(default_factory=dict)  # of finished fits, by number
    ancestor: str = ""  # digest of the restored parameters that the network started from

    @property
    def delivers_best(self) -> bool:
        """Whether the fit is finished and delivers its best epoch, not its last parameters."""
        best = self.best[1] if self.best is not None else None
        return (
            self.epochs_done is not None
            and best is not None
            and best.commit != self.snapshot.commit
        )


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """Where and how often to save a fit, and the constant parts of its checkpoints."""

    directory: CheckpointDirectory  # where to write
    every: CheckpointInterval  # from one checkpoint to the next
    key: FitKey  # identifies the fit within its program
    model: FlatModel  # its description is part of each checkpoint
    threshold: str  # repr of the threshold algorithm
    k: int  # parameters are multiples of 2^-k
    states: OptimizerStates  # optimizer states with which the fit started
    summaries: dict[str, Any]  # of finished fits, by number
    updaters: str = ONE  # save the optimizer state of ONE worker or of ALL workers
    frozen: bool = True  # also save the weights of a Keras model's frozen layers
    ancestor: str = ""  # digest of the restored parameters that the network started from


class CheckpointListener(FitListener):
    """Writes checkpoints of one run while it trains and at its end.

    Args:
        config: What to save, where and how often.
        master: The run's controller, which makes snapshots.
        book: Losses and metrics of the run's epochs.
        stopping: Holds the best epoch so far and its parameters.
        notify: Called in the program's main thread with an event for each written checkpoint.
        say: Called with a message about each checkpoint that could not be written.
    """

    live_option = "checkpoint_directory"
    is_user_requested = True  # False for copies that are only made to survive controller losses
    writer_class = CheckpointWriter

    def __init__(
        self,
        config: CheckpointConfig,
        master: MasterControl,
        *,
        book: EpochHistory,
        stopping: EarlyStoppingListener,
        notify: Callable[[CheckpointWritten], None],
        say: Callable[[str], None],
    ) -> None:
        self._config, self._master, self._book, self._stopping = config, master, book, stopping
        self._notify = notify
        self._writer = self.writer_class(config.directory, say)
        self._announced = 0  # number of checkpoints with which ``notify`` was called
        self._spec: FitSpec | None = None
        self._schedule: CheckpointSchedule | None = None  # from the start of training
        self._epochs = book.epochs_resumed_from  # number of complete epochs, for the schedule
        self._states = config.states

    def on_fit_begin(self, spec: FitSpec) -> None:
        """Keep the description of the fit for its checkpoints."""
        self._spec = spec

    def on_phase(self, phase: Phase) -> None:
        """Start the schedule of checkpoints when training starts."""
        if phase is Phase.RUNNING:
            self._schedule = CheckpointSchedule(self._config.every, time.monotonic(), self._epochs)

    def on_epoch(self, epoch: Epoch) -> None:
        """Note the number of complete epochs, some of which may have had no event."""
        self._epochs = epoch.epoch - self._book.first_epoch

    def on_progress(self, progress: Progress) -> None:
        """Announce written checkpoints and start another one if it is due."""
        self._announce_written()
        self._save_if_due(progress)

    def _save_if_due(self, progress: Progress) -> None:
        """Take a snapshot and give it to the writer's thread, if a checkpoint is due.

        Skip the checkpoint while the previous one is still being written. If the controller cannot
        make a snapshot, such as while it replaces its media driver, warn and skip the checkpoint,
        or raise the snapshot's error if the fit has failed.
        """
        now, schedule = (time.monotonic(), self._epochs, progress.commits), self._schedule
        if schedule is None or progress.phase is not Phase.RUNNING or not schedule.is_due(*now):
            return
        if self._writer.busy:  # slow storage gets fewer checkpoints
            return
        schedule.mark_written(*now)
        try:
            snapshot = self._master.snapshot(updaters=True)
        except SparkstromError as error:
            if self._master.failure is not None:
                raise
            self._writer.record_failure(f"commit {progress.commits}", error)
            return
        states = self._master.copy_optimizer_states(everybody=self._config.updaters == ALL)
        make = partial(self._build, self._make_content(snapshot), states)
        self._writer.offer(make, f"commit {snapshot.commit}")

    def _build(self, fit: CheckpointContent, copies: Future[tuple[bytes, ...]]) -> Checkpoint:
        """Wait for the workers' optimizer states and build the checkpoint.

        ``copies`` receives the encoded states. This method runs in the writer's thread.
        """
        workers = fit.spec.workers if self._config.updaters == ALL else 1
        received = copies.result(OPTIMIZER_STATE_TIMEOUT_S * workers)
        self._states = self._merge_copies(received, OptimizerStates(self._states.one))
        return self._make_checkpoint(replace(fit, states=self._states))

    def _make_checkpoint(self, fit: CheckpointContent) -> Checkpoint:
        """Return the description and arrays of a checkpoint."""
        return build_checkpoint(self._config.model, fit, frozen=self._config.frozen)

    def _merge_copies(self, copies: tuple[bytes, ...], before: OptimizerStates) -> OptimizerStates:
        """Return the newly copied states, and the earlier states of workers without a new copy.

        ``before`` are the earlier states. The first copy is that of the worker that has trained
        most; it becomes the common state. If only ONE worker's state is saved, it is the only one.
        """
        if not copies:
            return before
        if self._config.updaters == ONE:
            return OptimizerStates(copies[0])
        return OptimizerStates(copies[0], {**before.own, **OptimizerStates.from_copies(copies).own})

    def _make_content(self, snapshot: Snapshot) -> CheckpointContent:
        """Return the content of a checkpoint with this snapshot and the newest copied states."""
        assert self._spec is not None, "the fit has started"
        config, stopping = self._config, self._stopping
        epochs = {i: s.position.epoch for i, s in enumerate(snapshot.partitions) if s.rows}
        return CheckpointContent(
            config.key,
            self._spec,
            config.threshold,
            snapshot,
            self._book.report(epochs),
            config.k,
            self._states,
            config.updaters,
            best=None if stopping.best is None else (stopping.best, stopping.copy),
            summaries=config.summaries,
            ancestor=config.ancestor,
        )

    def _announce_written(self) -> None:
        """Call ``notify`` for the checkpoints written since the last call."""
        for written in self._writer.written[self._announced :]:
            self._announced += 1
            positions = written.description["partitions"]
            epochs = min((epoch for epoch, _, rows, *_ in positions if rows), default=0)
            self._notify(CheckpointWritten(written.path, float(epochs), written.seconds))

    def discard(self) -> None:
        """Finish writing the current checkpoint, and stop without a last one."""
        self._writer.close(None)

    def finish(self, delivered: Snapshot, epochs_done: int, summaries: dict[str, Any]) -> list[str]:
        """Save a finished fit in a last checkpoint; return warnings.

        ``delivered`` has the parameters and buffers that the fit delivers, ``summaries`` the
        summaries of all finished fits, by number.
        """
        fit = self._make_content(self._master.snapshot(updaters=True))
        snapshot = replace(fit.snapshot, parameters=delivered.parameters, buffers=delivered.buffers)
        fit = replace(fit, snapshot=snapshot, epochs_done=epochs_done, summaries=summaries)
        return self._close(fit)

    def save_interrupted(self) -> list[str]:
        """Save an interrupted fit so that the same command continues it; return warnings.

        Errors become warnings, because an exception would hide the interruption.
        """
        if self._schedule is None:
            return self._close(None)
        try:
            snapshot = self._master.snapshot(updaters=True)
        except SparkstromError as error:
            where = self._config.directory.url
            text = f"what was learned since the last checkpoint is not saved in {where}: {error}"
            return [*self._close(None), text]
        return self._close(self._make_content(snapshot))

    @property
    def newest(self) -> str | None:
        """Path of the newest checkpoint of this run; None if none was written."""
        return self._writer.written[-1].path if self._writer.written else None

    def close_failed(self) -> None:
        """Finish and announce the current checkpoint; do not save the state of the failed fit."""
        self._writer.close(None)
        self._announce_written()

    def _close(self, fit: CheckpointContent | None) -> list[str]:
        """Write a last checkpoint, unless ``fit`` is None, and stop the writer; return warnings."""
        last = None
        if fit is not None:
            # Workers without a fresh copy, as after an interrupt, keep their previous one.
            self._states = self._merge_copies(self._master.optimizer_copies, self._states)
            # Optimizer states belong to the last parameters, not to the best ones.
            states = OptimizerStates() if fit.delivers_best else self._states
            last = self._make_checkpoint(replace(fit, states=states))
        self._writer.close(last)
        self._announce_written()
        unsaved = self._writer.unsaved_reason
        return [*self._writer.warnings, *([unsaved] if unsaved else [])]


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A checkpoint that was read and checked, and from which a fit can resume."""

    path: str  # of the checkpoint
    key: FitKey  # of the saved fit
    epochs: int  # number of epochs requested of the saved fit
    epochs_done: int | None  # number of epochs of the saved fit; None if it was not finished
    k: int  # parameters are multiples of 2^-k
    parameters: Flat  # f32[n_params]
    buffers: bytes  # the model's buffers, with the weights of a Keras model's frozen layers
    states: OptimizerStates  # optimizer states of the workers
    missing_states: tuple[int, ...]  # partitions whose worker's own state could not be copied
    threshold: str  # repr of the threshold algorithm
    first_epoch: int  # epochs that were trained before the saved fit
    minibatches_before: int  # minibatches that were trained before the saved fit
    commit: int  # number of the newest commit in the parameters
    starts: tuple[PartitionStart, ...]  # position and rows, by partition
    figures: EpochFigures  # losses and metrics by epoch
    best: tuple[Best, Snapshot | None] | None  # the best epoch and its parameters, as saved
    summaries: dict[str, Any]  # of finished fits, by number
    metric: str | None = None  # of the held-out rows, in ``figures`` and ``best``; None: unknown
    ancestor: str = ""  # digest of the restored parameters that the network started from
    warning: str | None = None  # that the model may differ; None: no difference was found

    @property
    def minibatches(self) -> int:
        """Number of the saved fit's minibatches that were trained."""
        return sum(start.minibatches for start in self.starts)

    @property
    def complete_epochs(self) -> int:
        """Number of epochs that all partitions with rows have completed."""
        return count_complete_epochs(self.starts)

    def starts_for(self, workers: int) -> tuple[PartitionStart, ...]:
        """Return the position from which each of ``workers`` workers continues.

        If the number of workers is unchanged, these are the saved positions. Otherwise rows are
        distributed differently, and all workers start with the first epoch that some partition had
        not completed.
        """
        if workers == len(self.starts):
            return self.starts
        return (PartitionStart(Position(self.complete_epochs, 0)),) * workers

    def figures_for(self, workers: int) -> EpochFigures:
        """Return losses and metrics of the epochs before the positions ``starts_for(workers)``.

        If the number of workers has changed, values of incomplete epochs ("parts") are left out.
        """
        parts = self.figures["parts"] if workers == len(self.starts) else []
        return {"whole": self.figures["whole"], "parts": parts}

    @property
    def has_validation(self) -> bool:
        """Whether a complete epoch has a value of its held-out rows."""
        return any(math.isfinite(epoch["validation"]) for epoch in self.figures["whole"])

    def without_validation(self) -> ResumePoint:
        """Return a copy without values of held-out rows, for a fit with another metric.

        The copy has no best epoch either, because the best epoch was chosen by these values.
        """
        whole = [epoch | {"validation": math.nan} for epoch in self.figures["whole"]]
        parts = [[p, epoch | {"held_sum": math.nan}] for p, epoch in self.figures["parts"]]
        return replace(self, figures={"whole": whole, "parts": parts}, best=None)


class ResumeAction(enum.Enum):
    """What a fit does with an existing checkpoint."""

    RESUME = "resume"  # continue this fit from the checkpoint
    START_FROM = "start from"  # start with the checkpoint's parameters: it is of an earlier fit
    SKIP = "skip"  # deliver the checkpoint's result: this fit was finished before


@dataclass(frozen=True, slots=True)
class ResumeDecision:
    """A checkpoint, and what a fit does with it."""

    action: ResumeAction  # what the fit does
    checkpoint: ResumePoint  # the checkpoint that was found

    @property
    def warnings(self) -> list[str]:
        """The warnings about the checkpoint, for the summary; they have been shown already."""
        return list(filter(None, [self.checkpoint.warning]))


@dataclass(slots=True)
class FitCheckpoints:
    """The checkpoints of one network, and the number of its fits so far.

    The newest checkpoint is read at the first fit and after failed fits.
    """

    model: FlatModel  # the network's model, which a checkpoint must suit
    master: TrainingMaster  # the user's options
    network: str  # id of the network in this program
    fits: int = 0  # number of fits that are over
    summaries: dict[str, Any] = field(default_factory=dict)  # of finished fits, by number, as JSON
    stream_summary: Any = None  # of the newest finished micro-batch; not in ``summaries``
    _pending: ResumePoint | None = None  # checkpoint that was read and not used by a fit yet
    # Checkpoint read by ``restore``; None once a fit that used it is over or wrote its own.
    _restored: ResumePoint | None = None
    _reads_newest: bool = True  # whether the next fit reads the newest checkpoint
    # ``restore`` was called before the program's first fit, as it is when the program is run again.
    _restores_first: bool = False
    _ancestor: str = ""  # digest of the parameters that ``restore`` read last; "" if none
    _directory: CheckpointDirectory | None = None  # the user's directory, once it was used
    _has_begun: bool = False  # the first fit has tested the directory
    _are_assigned: bool = False  # the user has assigned parameters for the next fit
    _has_failed: bool = False  # the newest fit failed
    _replaces_failed: bool = False  # the parameters were assigned after a fit that failed

    def restore(self, path: str, say: Say) -> ResumePoint:
        """Read a checkpoint, return it, and use it for the next fit instead of the newest one.

        Before the program's first fit, it is used only until the fits that follow have written
        their own; see ``find``. ``say``: called with messages about damaged files, and with a
        warning if the model may differ. Raise UsageError if the checkpoint is of another model or
        does not exist.
        """
        self._pending = self._restored = self._read(*open_checkpoint(path, say), say)
        self._ancestor = hashlib.sha256(self._restored.parameters.tobytes()).hexdigest()
        self._restores_first = not self._has_begun
        self._reads_newest = self._are_assigned = self._has_failed = False
        done = self._pending.epochs_done is not None
        self.fits = self._pending.key.number - (0 if done else 1)
        return self._pending

    def find(self, key: FitKey, epochs: int, say: Say) -> ResumeDecision | None:
        """Decide what a fit does with the newest checkpoint, and show a message about it.

        If ``restore`` has read a checkpoint, use that one instead of the newest. But if the program
        called it before its first fit, and the newest one is of a network that started from the
        same checkpoint, the program is being run again, and the newest is used. Return None if
        there is no checkpoint, or if parameters were assigned later; see ``mark_assigned``. The
        summaries of finished fits are taken from the checkpoint.

        Args:
            key: Identifies the fit within its program.
            epochs: Number of epochs requested of the fit.
            say: Called with a message for the user.

        Raises:
            SetupError: The directory cannot be written to or read.
            UsageError: Another network uses the directory, or the checkpoint is of another model.
        """
        self._prepare_directory()
        if self._reads_newest:
            self._pending = self._read_newest(say)
            self._reads_newest = False  # stays True if reading fails
        elif self._restores_first:
            self._replace_restored(key, say)
            self._restores_first = False
        point = self._pending
        if point is None:
            return None
        self._ancestor = self._ancestor or point.ancestor
        self.summaries = dict(point.summaries)
        if point.key.stream:
            self.stream_summary = self.summaries.pop(str(point.key.number), None)
        action = choose_resume_action(point, key, epochs)
        if action is not ResumeAction.SKIP:
            self._pending = None
        is_older = self._replaces_failed or action is ResumeAction.START_FROM
        if self._are_assigned and (point is self._restored or is_older):
            say(ASSIGNED_MESSAGE.format(path=point.path))
            return None
        fit = f"micro-batch {key.batch}" if key.stream else f"fit {key.number}"
        say(RESUME_MESSAGES[action].format(point=point, fit=fit))
        if action is ResumeAction.RESUME and epochs <= point.complete_epochs:
            say(NOTHING_LEFT_MESSAGE.format(epochs=epochs))
        return ResumeDecision(action, point)

    def _replace_restored(self, key: FitKey, say: Say) -> None:
        """Use the directory's newest checkpoint if its network started from the restored one.

        Do nothing if another network of this program uses the directory, or if the newest
        checkpoint is of another model or stream.
        """
        directory, restored = self.directory, self._restored
        if directory is None or restored is None or not self._may_claim(directory):
            return
        try:
            newest = self._read_newest(say)
        except UsageError:  # it is not of this model, and so of no network that started like this
            return
        if newest is None or newest.ancestor != self._ancestor:
            return
        if not key.stream or key.stream == newest.key.stream:
            say(NEWER_MESSAGE.format(path=newest.path, restored=restored.path))
            self._pending, self._restored = newest, None

    @property
    def directory(self) -> CheckpointDirectory | None:
        """The user's directory for checkpoints; None if none are written."""
        url = self.master.checkpoint_directory
        if url is not None and self._directory is None:
            self._directory = CheckpointDirectory(url, self.master.keep_last)
        return self._directory

    def _prepare_directory(self) -> None:
        """Before the first fit, test the directory; with ``resume=False`` note files to keep."""
        if self.directory is not None and not self._has_begun:
            self.directory.check()
            if not self.master.resume:
                self.directory.protect_existing()
        self._has_begun = True

    def _read_newest(self, say: Say) -> ResumePoint | None:
        """Return the newest valid checkpoint; None if there is none, or with ``resume=False``.

        Raise UsageError if another network of this program uses the directory.
        """
        if self.directory is None or not self.master.resume:
            return None
        self._claim_directory(self.directory)
        found = self.directory.read_newest(say)
        return None if found is None else self._read(*found, say)

    def _read(self, path: str, checkpoint: Checkpoint, say: Say) -> ResumePoint:
        """Return a checkpoint file's content; if the model may differ, show a warning."""
        point = read_resume_point(path, checkpoint, self.model)
        if point.warning is not None:
            say(f"sparkstrom warns: {point.warning}")
        return point

    def _claim_directory(self, directory: CheckpointDirectory) -> None:
        """Reserve a directory for this network until the program ends.

        Raise UsageError if another network of this program uses the directory. Each network numbers
        its own fits, so it could otherwise resume the other network's fit of the same number.
        """
        if not self._may_claim(directory):
            raise UsageError(
                f"checkpoint_directory={directory.url!r} is another network's of this program: a"
                " network resumes its own fits only; give each its own directory, or resume=False"
                " to ignore the existing checkpoints (network.restore(path) continues one of them)"
            )
        _directory_owners[directory.location] = self.network

    def _may_claim(self, directory: CheckpointDirectory) -> bool:
        """Return whether no other network of this program has reserved the directory."""
        return _directory_owners.get(directory.location, self.network) == self.network

    def config(self, key: FitKey, k: int, states: OptimizerStates) -> CheckpointConfig | None:
        """Return how to save the fit ``key``, which is about to start; None if it is not saved.

        ``k``: the parameters are multiples of 2^-k; ``states``: optimizer states at the start.
        """
        if self.directory is None:
            return None
        return self.config_in(self.directory, self.master.checkpoint_every, key, k, states)

    def config_in(
        self,
        directory: CheckpointDirectory,
        every: str,
        key: FitKey,
        k: int,
        states: OptimizerStates,
    ) -> CheckpointConfig:
        """Return how to save a fit in ``directory`` at the interval ``every``; see ``config``."""
        return CheckpointConfig(
            directory=directory,
            every=parse_checkpoint_every(every),
            key=key,
            model=self.model,
            threshold=repr(self.master.threshold),
            k=k,
            states=states,
            summaries=self.summaries_for(key),
            updaters=self.master.checkpoint_updaters,
            ancestor=self._ancestor,
        )

    def record_summary(self, key: FitKey, summary: dict[str, Any]) -> None:
        """Keep a finished fit's summary, for a program that is run again and skips this fit."""
        if key.stream:
            self.stream_summary = summary  # only the newest, because a stream has no end
        else:
            self.summaries = {**self.summaries, str(key.number): summary}

    def summaries_for(self, key: FitKey) -> dict[str, Any]:
        """Return the summaries for checkpoints of the fit ``key``.

        If the fit is of a stream, the summary of its newest finished micro-batch is included under
        the number of ``key``.
        """
        if not key.stream or self.stream_summary is None:
            return self.summaries
        return {**self.summaries, str(key.number): self.stream_summary}

    def mark_ended(self, number: int) -> None:
        """Record that fit ``number`` ended or was interrupted; the next fit has the next number."""
        self.fits, self._restored = max(self.fits, number), None
        self._are_assigned = self._has_failed = False

    def mark_assigned(self) -> None:
        """Record that the user assigned parameters, with which the next fit starts.

        That fit then uses neither the checkpoint of ``restore`` nor one of a fit that has ended or
        failed before. Parameters that were assigned before the program's first fit do not count,
        because a program that is run again assigns them again, and is to continue from its
        checkpoint.
        """
        self._are_assigned = self.fits > 0 or self._has_failed or not self._reads_newest
        self._replaces_failed = self._has_failed

    def mark_written(self) -> None:
        """Record that a fit wrote a checkpoint, so that a retry resumes from it.

        With ``resume=False`` the new checkpoint is never read, so a retry starts as this fit did.
        """
        if self.master.resume:
            self._restored, self._are_assigned = None, False

    def mark_failed(self) -> None:
        """Record that a fit failed, so that the next fit gets its number and continues it.

        The next fit resumes from the newest checkpoint. But if the failed fit resumed from one that
        ``restore`` had read, and wrote none itself, the next fit resumes from the same one again.
        """
        self._pending, self._reads_newest = self._restored, self._restored is None
        self._has_failed = True

    @contextmanager
    def mark_failed_on_error(self) -> Iterator[None]:
        """Call ``mark_failed`` if the block raises; for code between two runs of a fit."""
        try:
            yield
        except BaseException:
            self.mark_failed()
            raise

    @contextmanager
    def undo_find_on_error(self) -> Iterator[None]:
        """Let ``find`` return the same checkpoint to the next fit if this one fails before it runs.

        The block contains the whole fit. Do nothing if a run was interrupted or failed, because
        ``mark_ended`` or ``mark_failed`` has recorded that.
        """
        before, fits = (self._pending, self._restored, self._reads_newest), self.fits
        restores_first = self._restores_first
        try:
            yield
        except BaseException:
            is_used_up = self._pending is None and not self._reads_newest
            if is_used_up and self.fits == fits:
                self._pending, self._restored, self._reads_newest = before
                self._restores_first = restores_first
            raise


def make_fit_key(number: int, properties: Callable[[str], str | None]) -> FitKey:
    """Return the key of the network's fit ``number``, counted from 1.

    ``properties`` returns the value of a thread-local property of Spark by its name, or None. In a
    stream, these contain the ids of the query and of its micro-batch.
    """
    stream, batch = properties(STREAM_PROPERTY), properties(BATCH_PROPERTY)
    if stream and batch:
        return FitKey(number, stream, int(batch))
    return FitKey(number)


def build_checkpoint(
    model: FlatModel, fit: CheckpointContent, *, frozen: bool = True
) -> Checkpoint:
    """Return the description and arrays to write to a checkpoint file.

    ``frozen``: whether to include the weights of a Keras model's frozen layers.
    """
    spec, snapshot = fit.spec, fit.snapshot
    buffers = add_frozen_weights(model, snapshot.buffers) if frozen else snapshot.buffers
    best, best_copy = fit.best or (None, None)
    states = _state_arrays(fit.states)
    description = {
        "model": model.describe(),
        "n_params": spec.n_params,
        "k": fit.k,
        "key": asdict(fit.key),
        "epochs": spec.epochs,
        "epochs_done": fit.epochs_done,
        "first_epoch": spec.first_epoch,
        "minibatches_before": spec.minibatches_before,
        "commit": snapshot.commit,
        "partitions": [[*s.position, s.rows, s.checksum, s.batches] for s in snapshot.partitions],
        "threshold": fit.threshold,
        "updaters": _describe_optimizer_states(fit),
        "figures": fit.figures,
        "best": None if best is None else asdict(best),
        "summaries": fit.summaries,
        "metric": spec.metric,
        "ancestor": fit.ancestor,
    }
    arrays: dict[str, NDArray[Any]] = {
        "parameters": snapshot.parameters,
        "buffers": np.frombuffer(buffers, np.uint8),
        **{name: np.frombuffer(state, np.uint8) for name, state in states.items()},
    }
    if best_copy is not None:
        arrays["best_parameters"] = best_copy.parameters
        arrays["best_buffers"] = np.frombuffer(best_copy.buffers, np.uint8)
    return Checkpoint(description, arrays)


def _state_array_name(states: OptimizerStates, partition: int) -> str:
    """Return the name of the array with a partition's state; equal states share one array."""
    return STATE_ARRAY if states.own[partition] == states.one else f"{STATE_ARRAY}_of_{partition}"


def _state_arrays(states: OptimizerStates) -> dict[str, bytes]:
    """Return the distinct encoded optimizer states, by the names of their arrays in the file."""
    own = {_state_array_name(states, partition): state for partition, state in states.own.items()}
    return own | {STATE_ARRAY: states.one}


def _describe_optimizer_states(fit: CheckpointContent) -> dict[str, Any]:
    """Return the array names of the partitions' states, and the partitions without a state."""
    own = {
        str(partition): _state_array_name(fit.states, partition)
        for partition in sorted(fit.states.own)
    }
    trains = [i for i, start in enumerate(fit.snapshot.partitions) if start.rows]
    left_out = [i for i in trains if i not in fit.states.own] if fit.wanted == ALL else []
    return {"wanted": fit.wanted, "own": own, "left_out": left_out}


def read_resume_point(path: str, checkpoint: Checkpoint, model: FlatModel) -> ResumePoint:
    """Return a checkpoint file's content, after checking that it suits the model.

    Raise UsageError if the checkpoint is of another model or optimizer, and CheckpointDamaged if
    its description does not have the form that ``build_checkpoint`` makes.
    """
    try:
        msgspec.convert(checkpoint.description, _Description)
        EpochHistory().restore(checkpoint.description["figures"])
        return _build_resume_point(path, checkpoint, model)
    except SparkstromError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        why = f"its description does not fit ({type(error).__name__}: {first_line(error)})"
        raise CheckpointDamaged(path, why) from error


NonNegative = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**62)]


class _Description(msgspec.Struct):
    """The types and ranges of a checkpoint's description, as ``build_checkpoint`` makes it."""

    model: dict[str, Any]  # what the model's ``describe`` returned
    key: FitKey  # of the saved fit
    epochs: Positive  # number of epochs requested of the saved fit
    epochs_done: NonNegative | None  # number of epochs of a finished fit
    k: Annotated[int, msgspec.Meta(ge=-(2**10), le=2**10)]  # parameters are multiples of 2^-k
    first_epoch: NonNegative  # epochs that were trained before the saved fit
    minibatches_before: NonNegative  # minibatches that were trained before the saved fit
    commit: Annotated[int, msgspec.Meta(ge=EARLIER_RUN)]  # number of the parameters' newest commit
    partitions: list[  # epoch, minibatch, rows, checksum of the rows, minibatches per epoch
        tuple[NonNegative, NonNegative, Annotated[int, msgspec.Meta(ge=-1)], int, NonNegative]
    ]
    threshold: str  # repr of the threshold algorithm
    figures: dict[str, list[Any]]  # losses and metrics by epoch, from ``EpochHistory.report``
    best: Best | None  # with early stopping
    summaries: dict[str, Any]  # of finished fits, by number
    updaters: dict[str, Any] | None = None  # from ``_describe_optimizer_states``
    metric: str | None = None  # of the held-out rows
    ancestor: str = ""  # digest of the restored parameters; "" also in older checkpoints


# Fields of ``ResumePoint`` that have the same names and values in a description.
SAVED_UNCHANGED = (
    *("epochs", "epochs_done", "k", "threshold", "first_epoch"),
    *("minibatches_before", "commit", "figures", "summaries"),
)


def _build_resume_point(path: str, checkpoint: Checkpoint, model: FlatModel) -> ResumePoint:
    """Make a ResumePoint from a checkpoint whose description is valid.

    Raise UsageError if the checkpoint does not fit ``model``.
    """
    said, arrays = checkpoint.description, checkpoint.arrays
    warning = check_same_model(model.describe(), said["model"], path)
    parameters, buffers = arrays["parameters"], arrays["buffers"].tobytes()
    if parameters.shape != (model.n_params,):
        raise UsageError(
            f"{path} has {parameters.size:,} parameters, the given model has {model.n_params:,}:"
            f" create it as the saved one was created, or {TRAIN_ANEW_HINT}"
        )
    # Older checkpoints have one optimizer state for all workers.
    updaters = said.get("updaters", {"own": {}, "left_out": []})
    states = OptimizerStates(
        arrays[STATE_ARRAY].tobytes(),
        {int(index): arrays[name].tobytes() for index, name in updaters["own"].items()},
    )
    _check_states(path, model, parameters, states)
    best = None
    if said["best"] is not None:
        best_copy = None
        if "best_parameters" in arrays:
            best_buffers = arrays["best_buffers"].tobytes()
            best_copy = Snapshot(EARLIER_RUN, arrays["best_parameters"], best_buffers, ())
        best = Best(**said["best"]), best_copy
    return ResumePoint(
        path=path,
        key=FitKey(**said["key"]),
        parameters=parameters,
        buffers=buffers,
        states=states,
        missing_states=tuple(updaters["left_out"]),
        starts=tuple(
            PartitionStart(Position(epoch, batch), *rest)
            for epoch, batch, *rest in said["partitions"]
        ),
        best=best,
        # Older checkpoints have the metric only with a best epoch.
        metric=said.get("metric", best[0].metric if best is not None else None),
        ancestor=said.get("ancestor", ""),
        warning=warning,
        **{name: said[name] for name in SAVED_UNCHANGED},
    )


def _check_states(path: str, model: FlatModel, parameters: Flat, states: OptimizerStates) -> None:
    """Load the optimizer states into a copy of the model. Raise UsageError if that fails."""
    if not states.one:
        return
    tried = copy.deepcopy(model)
    tried.bind(parameters.copy())
    try:
        for state in (states.one, *states.own.values()):
            tried.load_updater_state(decode_optimizer_state(state))
    except Exception as error:  # libraries raise anything for a state that is not theirs
        raise UsageError(
            f"{path} has an optimizer state that the given model cannot use"
            f" ({type(error).__name__}: {error}): pass the optimizer that was used, or"
            f" {TRAIN_ANEW_HINT}"
        ) from error


def choose_resume_action(point: ResumePoint, key: FitKey, epochs: int) -> ResumeAction:
    """Return whether the fit ``key`` resumes a checkpoint, starts from it, or is skipped.

    A fit is skipped if the checkpoint is of a later fit, or of the same fit, finished with at least
    ``epochs`` epochs. It starts with the parameters of an earlier fit or of another stream.

    Fits of a stream have other numbers when the program is run again. If the checkpoint is of a
    stream and the fit is not, the fit came before the stream, and is skipped, if the checkpoint
    contains the fit's summary.
    """
    if key.stream != point.key.stream:
        came_before = key.number < point.key.number and str(key.number) in point.summaries
        return ResumeAction.SKIP if came_before and not key.stream else ResumeAction.START_FROM
    here, there = (key.batch, point.key.batch) if key.stream else (key.number, point.key.number)
    if here != there:
        return ResumeAction.SKIP if here < there else ResumeAction.START_FROM
    enough = point.epochs_done is not None and epochs <= point.epochs
    return ResumeAction.SKIP if enough else ResumeAction.RESUME


NOTHING_LEFT_MESSAGE = (
    "sparkstrom: no minibatch of the {epochs} epochs asked for is left to train: the fit delivers"
    " the checkpoint's parameters"
)
ASSIGNED_MESSAGE = (
    "sparkstrom: parameters were assigned after {path} was written or restored: the fit starts with"
    " them, and does not use that checkpoint"
)
NEWER_MESSAGE = (
    "sparkstrom: {path} was written after an earlier restore({restored!r}), and is used instead; to"
    " train from the restored checkpoint, give another checkpoint_directory, or resume=False"
)
RESUME_MESSAGES = {
    ResumeAction.RESUME: "sparkstrom resumes from {point.path}: it has {point.minibatches:,}"
    " minibatches of {fit}, {point.complete_epochs} of {point.epochs} epochs are complete",
    ResumeAction.START_FROM: "sparkstrom starts {fit} with the parameters of {point.path}",
    ResumeAction.SKIP: "sparkstrom: {point.path} has the result of {fit}, which is not repeated; to"
    " train anew, give another checkpoint_directory, or resume=False",
}
