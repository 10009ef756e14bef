"""Listening: a fit as events, for whoever draws, judges or records it.

The driver's main thread looks at the master ten times a second and tells what has changed since.
So listeners never run in the master's thread: they may take their time, ask the master for a copy
of its parameters, and what one of them raises ends the fit.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sparkstrom.codec.messages import Phase
from sparkstrom.observe.epochs import Epoch, EpochBook
from sparkstrom.observe.telemetry import WorkerCounters
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.runtime.fit_state import Outcome, Progress
from sparkstrom.runtime.heard_lines import WorkerLine


@dataclass(frozen=True, slots=True)
class FitDone:
    """A fit that is done, whether after all its epochs or stopped before."""

    spec: FitSpec
    outcome: Outcome
    reports: list[str]  # the tasks' last words, as JSON
    history: list[Epoch]  # without gaps: tasks report all their epochs at the end

    @property
    def epochs_trained(self) -> int:
        """Of this fit; where it was stopped, those that some partition has come to the end of."""
        if self.outcome.stop_reason is None:
            return self.spec.epochs
        return self.history[-1].epoch - self.spec.first_epoch if self.history else 0


class FitListener:
    """Hears what a fit does; each method does nothing unless it is overridden.

    Between begin and end the events of one look come in the order of these methods. A fit that
    fails has no end.
    """

    needs_live = ""  # the option for which it must hear while the fit runs; "": the end will do

    def on_fit_begin(self, spec: FitSpec) -> None:
        """All is checked; the master and the Spark job are about to start."""

    def on_worker_says(self, line: WorkerLine) -> None:
        """A worker's code printed, warned or logged."""

    def on_news(self, text: str) -> None:
        """Something that a person will want to know now: a slow link, a worker that lags."""

    def on_phase(self, phase: Phase) -> None:
        """The fit has gone on to another phase."""

    def on_worker_change(self, training: frozenset[int]) -> None:
        """Workers have come or gone: partitions that have rows and a live worker."""

    def on_counters(self, counters: Mapping[int, WorkerCounters]) -> None:
        """Some node has told more; all that all have told, by node, the departed too."""

    def on_epoch(self, epoch: Epoch) -> None:
        """All partitions that are being trained have come to the end of this one.

        Each epoch once, in order. Listeners that need to hear live are not told of an epoch whose
        figures come too late for the next one; the others hear of it, and of all after it, when
        the fit is over.
        """

    def on_progress(self, progress: Progress) -> None:
        """Where the fit stands; also while nothing changes, so that time can be shown."""

    def on_fit_end(self, end: FitDone) -> None:
        """It is done, and nothing of it runs any more."""


class FitEvents:
    """Turns looks at a fit into events; all listeners hear each before any hears the next."""

    def __init__(
        self, spec: FitSpec, listeners: Sequence[FitListener], book: EpochBook | None = None
    ) -> None:
        self._spec, self._listeners = spec, listeners
        self._book = book or EpochBook(spec.first_epoch)
        self._before: Progress | None = None
        self._judging: frozenset[int] = frozenset()  # whose figures an epoch is to have
        self._epochs_told = self._epochs_in_order = self._book.epochs_before
        self._lines_told = self._news_told = 0

    @property
    def epochs_complete(self) -> int:
        """That all who train have come to the end of."""
        return self._epochs_told

    def begin(self) -> None:
        """Before anything starts."""
        for listener in self._listeners:
            listener.on_fit_begin(self._spec)

    def hear(self, now: Progress) -> None:
        """Tell what was said since the last look; also of a fit that has failed."""
        lines, news = now.heard[self._lines_told :], now.news[self._news_told :]
        self._lines_told, self._news_told = len(now.heard), len(now.news)
        for listener in self._listeners:
            for line in lines:
                listener.on_worker_says(line)
            for text in news:
                listener.on_news(text)

    def look(self, now: Progress) -> None:
        """Tell what has changed since the last look."""
        self.hear(now)
        before, self._before = self._before, now
        if before is None or now.phase is not before.phase:
            for listener in self._listeners:
                listener.on_phase(now.phase)
        moved = before is None or now.training != before.training
        if moved:
            for listener in self._listeners:
                listener.on_worker_change(now.training)
        if now.training:  # nobody is left at the end
            moved |= self._judging != now.training | now.measuring
            self._judging = now.training | now.measuring
        counted = before is None or now.stats != before.stats
        if counted:
            self._book.follow(now.stats.values())
            for listener in self._listeners:
                listener.on_counters(now.stats)
        if moved or counted:
            self._tell_epochs()
        for listener in self._listeners:
            listener.on_progress(now)

    def _tell_epochs(self) -> None:
        """Those that are complete now, in order, each once."""
        for epoch in self._book.judged_by(self._judging):
            if epoch < self._epochs_told:
                continue
            self._epochs_told = epoch + 1
            is_next = epoch == self._epochs_in_order
            self._epochs_in_order += is_next
            for listener in self._listeners:
                if is_next or listener.needs_live:
                    listener.on_epoch(self._book.epoch(epoch))

    def end(self, outcome: Outcome, reports: list[str]) -> None:
        """After a fit that is done."""
        self._book.close([json.loads(report)["epochs"] for report in reports])
        end = FitDone(self._spec, outcome, reports, self._book.history())
        for epoch in self._book.judged_by(self._judging):
            for listener in self._listeners:
                if epoch >= self._epochs_in_order and not listener.needs_live:
                    listener.on_epoch(self._book.epoch(epoch))
        for listener in self._listeners:
            listener.on_fit_end(end)
