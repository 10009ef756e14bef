"""Followed fit: one fit with all who follow it, and what is left of it when it is over."""

from __future__ import annotations

import secrets
from dataclasses import replace
from functools import partial

from sparkstrom.base.version import __version__
from sparkstrom.observe.stopping import LOSS
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.runtime.fit_state import Snapshot
from sparkstrom.runtime.lent_state import LentStates, without_encoder
from sparkstrom.spark.data.partitioning import Spread
from sparkstrom.spark.driver.accuracy_warnings import doubts
from sparkstrom.spark.driver.checkpoint_keeper import CheckpointKeeper
from sparkstrom.spark.driver.epoch_watch import EpochWatch
from sparkstrom.spark.driver.fit_call import FitCall, Showing
from sparkstrom.spark.driver.fit_checkpoints import FitCheckpoints
from sparkstrom.spark.driver.fit_run import FitRun, TrainingSite
from sparkstrom.spark.driver.fitting import FitCancelled
from sparkstrom.spark.driver.horizon_notes import horizons_of
from sparkstrom.spark.driver.learnt import Learnt
from sparkstrom.spark.driver.listener_setup import listener_thread
from sparkstrom.spark.driver.listener_thread import ListenerThread
from sparkstrom.spark.driver.summary import TrainingSummary, summarize
from sparkstrom.spark.driver.summary_json import summary_to_json

NOT_KEPT = (
    "network.parameters are those from before the fit: what was learnt went with the controller's "
    "task, which had no TCP connection to this program to send it over, or was cancelled first"
)


def fit_spec(call: FitCall, spread: Spread, learnt: Learnt, n_params: int) -> FitSpec:
    """What everybody must know of a fit that is about to begin."""
    goes_on = call.goes_on
    return FitSpec(
        workers=spread.workers,
        epochs=call.epochs,
        n_params=n_params,
        version=__version__,
        job=secrets.randbits(63),
        first_epoch=learnt.epochs,
        minibatches_before=goes_on.minibatches_before if goes_on else learnt.minibatches_before,
        fraction=call.chosen.fraction,
        metric=call.early_stopping.metric if call.early_stopping else LOSS,
        starts=goes_on.starts_for(spread.workers) if goes_on else (),
    )


class FollowedFit:
    """Of a network; ``follow`` runs it once."""

    def __init__(
        self, site: TrainingSite, checkpoints: FitCheckpoints, call: FitCall, showing: Showing
    ) -> None:
        self._site, self._checkpoints, self._call, self._showing = site, checkpoints, call, showing

    def states_for(self, states: LentStates) -> LentStates:
        """What of a checkpoint's states the workers of this fit begin with."""
        goes_on = self._call.goes_on
        same = goes_on is None or goes_on.threshold == repr(self._site.master.threshold)
        return states if same else states.each(without_encoder)

    def follow(self, run: FitRun, learnt: Learnt, export_directory: str | None) -> TrainingSummary:
        """To its end, good or bad; ``learnt`` becomes what it has learnt."""
        call, showing, site = self._call, self._showing, self._site
        watch = EpochWatch(run.master, call.early_stopping)
        self._go_on(run, watch)
        snapshot, progress = run.master.snapshot, showing.progress
        heard = listener_thread(call, run.spec, site.model, site.master, snapshot, progress)
        keeper = self._keeper(run, watch, heard)
        return heard.follow(partial(self._run, run, watch, heard, keeper, learnt, export_directory))

    def _go_on(self, run: FitRun, watch: EpochWatch) -> None:
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
        self, run: FitRun, watch: EpochWatch, heard: ListenerThread
    ) -> CheckpointKeeper | None:
        kept = self._checkpoints.kept(self._call.key, run.theta.k, run.states)
        if kept is None:
            return None
        say = self._showing.progress.say
        tell = heard.tell
        return CheckpointKeeper(kept, run.master, book=run.book, watch=watch, tell=tell, say=say)

    def _run(
        self,
        run: FitRun,
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
            if keeper is not None:
                for warning in keeper.interrupted():
                    self._showing.warn(warning)
            raise
        except BaseException:
            self._checkpoints.has_failed()
            if keeper is not None:
                keeper.failed()
            raise
        assert showing.record.end is not None, "a fit that did not raise is done"
        learnt.take(run.theta, showing.record.end, watch.copy)
        self._checkpoints.is_over(self._call.key.number)
        summary = self._summary(watch, export_directory)
        return summary if keeper is None else self._saved(summary, keeper, learnt)

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

    def _summary(self, watch: EpochWatch, export_directory: str | None) -> TrainingSummary:
        """What the fit can say about itself; doubts go to the log, too."""
        showing, site = self._showing, self._site
        record = showing.record
        assert record.end is not None, "there is a fit to tell of"
        spec, outcome = record.end.spec, record.end.outcome
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
            horizons=horizons_of(site.master, site.model, outcome.rows),
        )
        goes_on = self._call.goes_on
        return summary if goes_on is None else replace(summary, resumed_from=goes_on.path)
