"""Checkpoint keeper: has checkpoints of one fit written while it goes on, and at its end."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sparkstrom.base.errors import SparkstromError
from sparkstrom.checkpoint.cadence import Cadence, CheckpointEvery
from sparkstrom.checkpoint.checkpoint_directory import CheckpointDirectory
from sparkstrom.checkpoint.checkpoint_file import Checkpoint
from sparkstrom.checkpoint.checkpoint_writer import CheckpointWriter
from sparkstrom.codec.messages import Phase
from sparkstrom.models.base import FlatModel
from sparkstrom.observe.epochs import Epoch, EpochBook
from sparkstrom.observe.listening.fit_events import CheckpointWritten
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.runtime.fit_state import Progress, Snapshot
from sparkstrom.runtime.lent_state import LentStates
from sparkstrom.runtime.master_control import MasterControl
from sparkstrom.spark.driver.checkpoint_content import FitKey, FitToSave, checkpoint_of
from sparkstrom.spark.driver.epoch_watch import EpochWatch
from sparkstrom.spark.driver.fit_listeners import FitListener
from sparkstrom.spark.driver.training_master import ALL, ONE

STATE_S = 60.0  # for each; the master gives up long before


@dataclass(frozen=True, slots=True)
class Kept:
    """What of a fit does not change while it runs, and where its checkpoints go."""

    directory: CheckpointDirectory
    every: CheckpointEvery
    key: FitKey
    model: FlatModel
    threshold: str
    k: int
    states: LentStates  # that the fit began with
    summaries: dict[str, Any]
    updaters: str = ONE  # of whose: one worker's, or of all


class CheckpointKeeper(FitListener):
    """``tell`` hears of each checkpoint, in the driver's main thread; ``say`` of failures."""

    needs_live = "checkpoint_directory"
    is_wanted = True  # by a person, who has them afterwards

    def __init__(
        self,
        kept: Kept,
        master: MasterControl,
        *,
        book: EpochBook,
        watch: EpochWatch,
        tell: Callable[[CheckpointWritten], None],
        say: Callable[[str], None],
    ) -> None:
        self._kept, self._master, self._book, self._watch = kept, master, book, watch
        self._tell = tell
        self._writer = CheckpointWriter(kept.directory, say)
        self._told = 0
        self._spec: FitSpec | None = None
        self._cadence: Cadence | None = None
        self._epochs = book.epochs_before
        self._states = kept.states

    # -- while the fit goes on -------------------------------------------------------------------

    def on_fit_begin(self, spec: FitSpec) -> None:
        self._spec = spec

    def on_phase(self, phase: Phase) -> None:
        if phase is Phase.RUNNING:
            self._cadence = Cadence(self._kept.every, time.monotonic(), self._epochs)

    def on_epoch(self, epoch: Epoch) -> None:
        self._epochs += 1

    def on_progress(self, progress: Progress) -> None:
        self._tell_news()
        self._look(progress)

    def _look(self, progress: Progress) -> None:
        now, cadence = (time.monotonic(), self._epochs, progress.commits), self._cadence
        if cadence is None or progress.phase is not Phase.RUNNING or not cadence.is_due(*now):
            return
        if self._writer.busy:  # a slow store gets fewer
            return
        cadence.done(*now)
        snapshot = self._master.snapshot(updaters=True)
        make = partial(self._make, self._progressed(snapshot), self._copy_updaters())
        self._writer.offer(make, f"commit {snapshot.commit}")

    def _copy_updaters(self) -> Future[tuple[bytes, ...]]:
        return self._master.copy_updaters(everybody=self._kept.updaters == ALL)

    def _make(self, fit: FitToSave, copies: Future[tuple[bytes, ...]]) -> Checkpoint:
        """In the writer's thread: workers' states take their time to come."""
        seconds = STATE_S * (fit.spec.workers if self._kept.updaters == ALL else 1)
        self._states = self._with(copies.result(seconds), LentStates(self._states.one))
        return checkpoint_of(self._kept.model, replace(fit, states=self._states))

    def _with(self, copies: tuple[bytes, ...], before: LentStates) -> LentStates:
        """The first is of who has trained most; who gave none keeps what it had before."""
        if not copies:
            return before
        if self._kept.updaters == ONE:
            return LentStates(copies[0])
        return LentStates(copies[0], {**before.own, **LentStates.of(copies).own})

    def _progressed(self, snapshot: Snapshot) -> FitToSave:
        assert self._spec is not None, "it has begun"
        kept, watch = self._kept, self._watch
        rows = {i: s.position.epoch for i, s in enumerate(snapshot.partitions) if s.rows}
        return FitToSave(
            kept.key,
            self._spec,
            kept.threshold,
            snapshot,
            self._book.report(rows),
            kept.k,
            self._states,
            kept.updaters,
            best=None if watch.best is None else (watch.best, watch.copy),
            summaries=kept.summaries,
        )

    def _tell_news(self) -> None:
        for written in self._writer.written[self._told :]:
            self._told += 1
            self._tell(CheckpointWritten(written.path, float(self._epochs), written.seconds))

    # -- at its end ------------------------------------------------------------------------------

    def forgotten(self) -> None:
        """The fit is over, and nobody wants them."""
        self._writer.close(None)

    def finish(self, delivered: Snapshot, epochs_done: int, summaries: dict[str, Any]) -> list[str]:
        """The fit is done: save what it delivers. Return what is to be warned of."""
        fit = self._progressed(self._master.snapshot(updaters=True))
        at = fit.snapshot
        fit = replace(
            fit,
            snapshot=replace(at, parameters=delivered.parameters, buffers=delivered.buffers),
            epochs_done=epochs_done,
            summaries=summaries,
        )
        return self._close(fit)

    def interrupted(self) -> list[str]:
        """Save what a fit that a person ended has learnt, so that the same command continues it.

        Return warnings; what cannot be saved never hides the interruption.
        """
        if self._cadence is None:
            return self._close(None)
        try:
            snapshot = self._master.snapshot(updaters=True)
        except SparkstromError as error:
            where = self._kept.directory.url
            text = f"what was learnt since the last checkpoint is not saved in {where}: {error}"
            return [*self._close(None), text]
        return self._close(self._progressed(snapshot))

    @property
    def newest(self) -> str | None:
        """Where the last checkpoint of this fit is, if there is one."""
        return self._writer.written[-1].path if self._writer.written else None

    def failed(self) -> None:
        """What is being written is written; what failed is no state to go on from."""
        self._writer.close(None)
        self._tell_news()

    def _close(self, fit: FitToSave | None) -> list[str]:
        last = None
        if fit is not None:
            # whose is missing, because a person ended the fit, say, has its last one
            self._states = self._with(self._master.updater_copies, self._states)
            last = checkpoint_of(self._kept.model, replace(fit, states=self._states))
        self._writer.close(last)
        self._tell_news()
        unsaved = self._writer.unsaved
        return [*self._writer.warnings, *([unsaved] if unsaved else [])]
