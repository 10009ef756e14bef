"""Followed fit: one fit with all who follow it, and what is left of it when it is over."""

from __future__ import annotations

import contextlib
import logging
import secrets
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from sparkstrom.base.errors import ControllerLost
from sparkstrom.base.version import __version__
from sparkstrom.observe.stopping import LOSS
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.runtime.fit_state import Snapshot
from sparkstrom.runtime.lent_state import LentStates, without_encoder
from sparkstrom.runtime.master_control import MasterControl
from sparkstrom.runtime.theta import Theta
from sparkstrom.spark.driver.accuracy_warnings import doubts
from sparkstrom.spark.driver.checkpoint_keeper import CheckpointKeeper
from sparkstrom.spark.driver.controller_copies import ControllerCopies
from sparkstrom.spark.driver.controller_losses import ControllerLosses
from sparkstrom.spark.driver.epoch_watch import EpochWatch
from sparkstrom.spark.driver.fit_call import FitCall, Showing
from sparkstrom.spark.driver.fit_checkpoints import FitCheckpoints
from sparkstrom.spark.driver.fit_site import RunningFit, SiteToFollow
from sparkstrom.spark.driver.fitting import FitCancelled
from sparkstrom.spark.driver.horizon_notes import Horizons, horizons_of
from sparkstrom.spark.driver.learnt import Learnt
from sparkstrom.spark.driver.listener_setup import listener_thread
from sparkstrom.spark.driver.listener_thread import ListenerThread
from sparkstrom.spark.driver.summary import TrainingSummary, summarize
from sparkstrom.spark.driver.summary_json import summary_to_json
from sparkstrom.spark.driver.training_master import SharedTrainingMaster

log = logging.getLogger(__name__)

LOOK_S = 0.1

NOT_KEPT = (
    "network.parameters are those from before the fit: what was learnt went with the controller's "
    "task, which had no TCP connection to this program to send it over, or was cancelled first"
)


# Another run of the same fit, where a controller elsewhere was lost.
Again = Callable[[FitSpec, Theta, LentStates], RunningFit]


def fit_spec(call: FitCall, workers: int, learnt: Learnt, n_params: int) -> FitSpec:
    """What everybody must know of a fit that is about to begin."""
    goes_on = call.goes_on
    return FitSpec(
        workers=workers,
        epochs=call.epochs,
        n_params=n_params,
        version=__version__,
        job=secrets.randbits(63),
        first_epoch=learnt.epochs,
        minibatches_before=goes_on.minibatches_before if goes_on else learnt.minibatches_before,
        fraction=call.chosen.fraction,
        metric=call.early_stopping.metric if call.early_stopping else LOSS,
        starts=goes_on.starts_for(workers) if goes_on else (),
    )


def _answers(master: MasterControl) -> bool:
    """Is there a snapshot to be had, or a reason why there is none?"""
    return master.reachable or master.finished.is_set()


class FollowedFit:
    """Of a network; ``follow`` runs it once, with as many controllers as that takes."""

    def __init__(
        self,
        site: SiteToFollow,
        checkpoints: FitCheckpoints,
        call: FitCall,
        showing: Showing,
        again: Again | None = None,
    ) -> None:
        self._site, self._checkpoints, self._call, self._showing = site, checkpoints, call, showing
        self._again, self._asked = again, call
        self._turn, self._over = threading.Condition(), False  # from run to run, to the end

    def states_for(self, states: LentStates) -> LentStates:
        """What of a checkpoint's states the workers of this fit begin with."""
        goes_on = self._call.goes_on
        same = goes_on is None or goes_on.threshold == repr(self._site.master.threshold)
        return states if same else states.each(without_encoder)

    def follow(
        self, run: RunningFit, learnt: Learnt, export_directory: str | None
    ) -> TrainingSummary:
        """To its end, good or bad; ``learnt`` becomes what it has learnt."""
        call, site = self._call, self._site
        self._current, progress = run, self._showing.progress
        snapshot = self._snapshot
        heard = listener_thread(call, run.spec, site.model, site.master, snapshot, progress)
        with tempfile.TemporaryDirectory(prefix="sparkstrom-copies-") as folder:
            losses = ControllerLosses(site.master, self._checkpoints, self._showing, folder)
            return heard.follow(partial(self._follow, heard, losses, learnt, export_directory))

    def _snapshot(self) -> Snapshot:
        """Of the run that is under way, for listeners; one whose controller is lost is waited out.

        Raises ControllerLost where no other run follows.
        """
        while True:
            run = self._current
            try:
                return run.master.snapshot()
            except ControllerLost:
                with self._turn:
                    while self._current is run or not _answers(self._current.master):
                        if self._over:
                            raise
                        self._turn.wait(LOOK_S)

    def _turn_to(self, run: RunningFit) -> None:
        with self._turn:
            self._current = run
            self._turn.notify_all()

    def _end(self) -> None:
        """No other run follows."""
        with self._turn:
            self._over = True
            self._turn.notify_all()

    def _follow(
        self,
        heard: ListenerThread,
        losses: ControllerLosses,
        learnt: Learnt,
        export_directory: str | None,
    ) -> TrainingSummary:
        """Run after run, until one is done, or ends with what ends the fit."""
        with learnt.unless_it_fails(), contextlib.ExitStack() as stack:
            stack.callback(self._end)
            while True:
                run = self._current
                watch = EpochWatch(run.master, self._call.early_stopping)
                self._go_on(run, watch)
                keeper = self._keeper(run, watch, heard, losses)
                try:
                    return self._run(run, watch, heard, keeper, learnt, export_directory)
                except ControllerLost as lost:
                    with self._checkpoints.kept_if_it_fails():
                        call = losses.next_call(lost, self._call, run.master, keeper)
                        self._turn_to(self._next_run(run, call, learnt))

    def _next_run(self, run: RunningFit, call: FitCall, learnt: Learnt) -> RunningFit:
        """After one whose controller was lost."""
        site, before, states = self._site, self._call.goes_on, run.states
        self._call = call
        spec = replace(run.spec, job=secrets.randbits(63))
        if call.goes_on is not None and call.goes_on is not before:
            learnt.begin_with(call.goes_on)
            spec = fit_spec(call, spec.workers, learnt, spec.n_params)
            states = self.states_for(learnt.use_up(spec.workers)[1])
        assert self._again is not None, "a controller in this process is not lost"
        assert isinstance(site.master, SharedTrainingMaster), "rounds have no controller"
        theta = learnt.theta(site.master.layer_multipliers or {})
        return self._again(spec, theta, states)

    def _go_on(self, run: RunningFit, watch: EpochWatch) -> None:
        """With the epochs of a checkpoint behind it."""
        goes_on, workers = self._call.goes_on, run.spec.workers
        if goes_on is None:
            return
        run.book.go_on(goes_on.figures_for(workers))
        watch.go_on(run.book.history()[: run.book.epochs_before], goes_on.best)
        if workers != len(goes_on.starts):
            whole = run.spec.starts[0].position.epoch
            self._showing.warn(
                f"{goes_on.path} is of {len(goes_on.starts)} workers and there are {workers} now:"
                f" rows lie otherwise, and all of epoch {whole + 1} is trained again"
            )
        if not goes_on.states.one:
            self._showing.warn(
                f"{goes_on.path} has no optimizer's state, because no worker could lend one in"
                " time: momentum and second moments begin anew"
            )

        if goes_on.left_out and goes_on.states.one and workers == len(goes_on.starts):
            left_out = ", ".join(map(str, goes_on.left_out))
            self._showing.warn(
                f"{goes_on.path} has no optimizer's state of the workers of partitions {left_out},"
                " which did not lend theirs in time: they go on with another one's"
            )

    def _keeper(
        self, run: RunningFit, watch: EpochWatch, heard: ListenerThread, losses: ControllerLosses
    ) -> CheckpointKeeper | None:
        call, k = self._call, run.theta.k
        about: dict[str, Any] = {"book": run.book, "watch": watch, "tell": heard.tell}
        kept = self._checkpoints.kept(call.key, k, run.states)
        if kept is not None:
            return CheckpointKeeper(kept, run.master, **about, say=self._showing.progress.say)
        if not losses.keeps_copies:
            return None
        kept = losses.kept(call, k, run.states)
        return ControllerCopies(kept, run.master, **about, say=log.warning)

    def _run(
        self,
        run: RunningFit,
        watch: EpochWatch,
        heard: ListenerThread,
        keeper: CheckpointKeeper | None,
        learnt: Learnt,
        export_directory: str | None,
    ) -> TrainingSummary:
        showing = self._showing
        others = [heard] if keeper is None else [keeper, heard]
        try:
            run.run(showing, watch, *others)
        except (KeyboardInterrupt, FitCancelled):
            self._checkpoints.is_over(self._call.key.number)
            if not run.master.knows_theta:
                self._showing.warn(NOT_KEPT)
                raise
            learnt.keep(run.theta, run.spec, run.epochs_complete)
            if keeper is not None and keeper.is_wanted:
                for warning in keeper.interrupted():
                    self._showing.warn(warning)
            raise
        except BaseException as error:
            if not isinstance(error, ControllerLost):
                self._checkpoints.has_failed()
            if keeper is not None:
                keeper.failed()
            raise
        assert showing.record.end is not None, "a fit that did not raise is done"
        learnt.take(run.theta, showing.record.end, watch.copy, run.states_after)
        self._checkpoints.is_over(self._call.key.number)
        summary = self._summary(run, watch, export_directory)
        if keeper is None or keeper.is_wanted:
            return summary if keeper is None else self._saved(summary, keeper, learnt)
        keeper.forgotten()
        return summary

    def _saved(
        self, summary: TrainingSummary, keeper: CheckpointKeeper, learnt: Learnt
    ) -> TrainingSummary:
        """With what it delivers in a checkpoint; what could not be saved is told."""
        end = self._showing.record.end
        assert end is not None, "it is done"
        delivered = Snapshot(end.outcome.commits, learnt.parameters, learnt.buffers, ())
        told = summary_to_json(summary)
        self._checkpoints.done(self._call.key, told)
        warnings = keeper.finish(delivered, end.epochs_trained, self._checkpoints.summaries)
        for warning in warnings:
            self._showing.warn(warning)
        return replace(summary, checkpoint=keeper.newest, warnings=[*summary.warnings, *warnings])

    def _summary(
        self, run: RunningFit, watch: EpochWatch, export_directory: str | None
    ) -> TrainingSummary:
        """What the fit can say about itself; doubts go to the log, too."""
        showing, site = self._showing, self._site
        record = showing.record
        assert record.end is not None, "there is a fit to tell of"
        spec, outcome = record.end.spec, record.end.outcome
        found, horizons = list[str](), Horizons()
        if isinstance(site.master, SharedTrainingMaster):
            horizons = horizons_of(site.master, site.model, outcome.rows)
            if run.sends_updates:
                found = doubts(site.master, site.model, outcome, spec.minibatches_before)
        for text in found:
            showing.progress.say(f"sparkstrom warns: {text}")
        summary = summarize(
            record,
            executors=0 if showing.slots.is_dynamic else showing.slots.executors,
            warnings=[*showing.warnings, *found],
            master=site.master,
            export_directory=export_directory,
            best=watch.best,
            horizons=horizons,
        )
        summary = replace(summary, epochs_resumed=run.book.epochs_before)
        ends = self._call.ends_with
        if ends is not None and summary.stopped is None:
            last = spec.first_epoch + spec.epochs
            summary = replace(summary, stopped=f"early stopping: {ends} is met in epoch {last}")
        goes_on = self._asked.goes_on
        return summary if goes_on is None else replace(summary, resumed_from=goes_on.path)
