"""Dispatch the events of a fit to its internal listeners, such as progress display and checkpoints.

The controller is the process or thread that coordinates the workers. The program's main thread
polls it ten times a second and passes changes on as events. Listeners run in the main thread and
never in the controller's, so they may be slow or request a copy of the parameters. An exception in
a listener ends the fit.

Users' listeners (``observe.listener_events.TrainingListener``) run in another thread. One of the
internal listeners, ``fit.listeners.ListenerThread``, passes events on to them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparkstrom.codec.messages import Phase
from sparkstrom.observe.epoch_history import Epoch, EpochHistory
from sparkstrom.observe.telemetry import WorkerCounters
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.runtime.master_control import FitOutcome, Progress, WorkerLogLine


@dataclass(frozen=True, slots=True)
class FinishedFit:
    """The result of a fit that did not fail, although it may have been stopped early."""

    spec: FitSpec  # number of workers, epochs and other facts of the fit
    outcome: FitOutcome  # counters and diagnostics from the controller
    reports: list[str]  # the tasks' results, as JSON
    history: list[Epoch]  # without gaps, because tasks report all their epochs at the end

    @property
    def epochs_trained(self) -> int:
        """Number of this fit's epochs; if it was stopped, the number that some partition completed.

        A fit that resumes from a checkpoint may be asked for fewer epochs than the checkpoint has;
        the number is then that of the checkpoint.
        """
        if self.outcome.stop_reason is None:
            return max(self.spec.epochs, self.spec.epochs_resumed)
        return self.history[-1].epoch - self.spec.first_epoch if self.history else 0


class FitListener:
    """Base class of listeners: one method per event, which does nothing unless overridden.

    Events of one poll are dispatched in the order of these methods. ``on_fit_end`` is not called
    for a fit that failed.
    """

    # Name of the user's option, such as "early_stopping", for which this listener needs events
    # while the fit runs; "": it can do without.
    live_option = ""

    def on_fit_begin(self, spec: FitSpec) -> None:
        """Handle the start of the fit, after all checks and before controller and tasks start."""

    def on_worker_says(self, line: WorkerLogLine) -> None:
        """Handle a line that a worker's code printed, warned or logged."""

    def on_note(self, text: str) -> None:
        """Handle a note for the user, such as about a slow link or worker."""

    def on_phase(self, phase: Phase) -> None:
        """Handle a change of the fit's phase, such as from gathering workers to training."""

    def on_worker_change(self, training: frozenset[int]) -> None:
        """Handle workers that joined or left.

        ``training``: the partitions that have rows and a worker now.
        """

    def on_counters(self, counters: Mapping[int, WorkerCounters]) -> None:
        """Handle changed counters.

        ``counters``: by node id, those of all workers, including workers that left.
        """

    def on_epoch(self, epoch: Epoch) -> None:
        """Handle the end of an epoch, once all training partitions have completed it.

        The values of an epoch may arrive after those of the next one. Listeners with a
        ``live_option`` then get the next epoch at once, and never the late one. All other listeners
        get every epoch in order, so they get the late one and those after it at the end of the fit.
        """

    def on_progress(self, progress: Progress) -> None:
        """Handle the progress of one poll, even if nothing changed."""

    def on_fit_end(self, end: FinishedFit) -> None:
        """Handle the end of a fit without failure, after all its threads and tasks have ended."""


class FitEvents:
    """Compares each polled progress with the previous one, and dispatches changes as events.

    All listeners get an event before any listener gets the next one.

    Args:
        spec: Description of the fit.
        listeners: The listeners to which events are dispatched.
        book: Losses and metrics of the epochs before a resume; updated during the fit.
    """

    def __init__(
        self, spec: FitSpec, listeners: Sequence[FitListener], book: EpochHistory | None = None
    ) -> None:
        self._spec, self._listeners = spec, listeners
        self._book = book or EpochHistory(spec.first_epoch)
        self._before: Progress | None = None  # at the previous poll
        self._epoch_partitions: frozenset[int] = frozenset()  # those that must complete an epoch
        # Number of epochs that listeners with a ``live_option`` got, and that all others got.
        self._epochs_dispatched = self._epochs_live = self._book.epochs_resumed_from
        self._lines_dispatched = self._notes_dispatched = 0

    @property
    def epochs_complete(self) -> int:
        """Number of epochs that all training partitions have completed."""
        return self._epochs_dispatched

    def begin(self) -> None:
        """Dispatch the start of the fit."""
        for listener in self._listeners:
            listener.on_fit_begin(self._spec)

    def dispatch_output(self, now: Progress) -> None:
        """Dispatch new worker output and notes, the only events that follow a failure."""
        lines, news = now.heard[self._lines_dispatched :], now.news[self._notes_dispatched :]
        self._lines_dispatched, self._notes_dispatched = len(now.heard), len(now.news)
        for listener in self._listeners:
            for line in lines:
                listener.on_worker_says(line)
            for text in news:
                listener.on_note(text)

    def dispatch(self, now: Progress) -> None:
        """Dispatch everything that changed since the last call."""
        self.dispatch_output(now)
        before, self._before = self._before, now
        if before is None or now.phase is not before.phase:
            for listener in self._listeners:
                listener.on_phase(now.phase)
        changed = before is None or now.training != before.training
        if changed:
            for listener in self._listeners:
                listener.on_worker_change(now.training)
        if now.training:  # at the end it is empty
            changed |= self._epoch_partitions != now.training | now.evaluating
            self._epoch_partitions = now.training | now.evaluating
        counted = before is None or now.stats != before.stats
        if counted:
            self._book.add_counters(now.stats.values())
            for listener in self._listeners:
                listener.on_counters(now.stats)
        if changed or counted:
            self._dispatch_epochs()
        for listener in self._listeners:
            listener.on_progress(now)

    def _dispatch_epochs(self) -> None:
        """Dispatch the epochs that became complete; see ``FitListener.on_epoch``."""
        for epoch in self._book.epochs_reported_by(self._epoch_partitions):
            if epoch < self._epochs_dispatched:
                continue
            self._epochs_dispatched = epoch + 1
            is_next = epoch == self._epochs_live
            self._epochs_live += is_next
            for listener in self._listeners:
                if is_next or listener.live_option:
                    listener.on_epoch(self._book.epoch(epoch))

    def end(self, outcome: FitOutcome, reports: list[str]) -> None:
        """Dispatch the end of a fit that did not fail, after the epochs not dispatched before.

        ``reports`` are the results of the fit's tasks, as JSON.
        """
        self._book.add_reports([json.loads(report)["epochs"] for report in reports])
        end = FinishedFit(self._spec, outcome, reports, self._book.history())
        for epoch in self._book.epochs_reported_by(self._epoch_partitions):
            for listener in self._listeners:
                if epoch >= self._epochs_live and not listener.live_option:
                    listener.on_epoch(self._book.epoch(epoch))
        for listener in self._listeners:
            listener.on_fit_end(end)
