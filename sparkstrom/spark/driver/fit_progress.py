"""Showing a fit to people: its progress, what workers say, and residuals' figures in the log."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from sparkstrom.codec.messages import Phase
from sparkstrom.observe.epochs import Epoch
from sparkstrom.observe.fit_totals import FitTotals
from sparkstrom.observe.listening.fit_events import Iteration, iteration_of
from sparkstrom.observe.progress import Line, ProgressLine
from sparkstrom.observe.residual_figures import EncodingLog
from sparkstrom.observe.telemetry import WorkerCounters, bytes_on_links
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.runtime.fit_state import Progress
from sparkstrom.runtime.heard_lines import WorkerLine
from sparkstrom.spark.driver.fit_listeners import FitDone, FitListener

PHASES = {
    Phase.DRAINING: "draining: waiting for last updates",
    Phase.AUDIT: "comparing replicas",
    Phase.DONE: "done",
}


class FitProgress(FitListener):
    """Keeps what is shown up to date; the last drawing stays and shows the end.

    ``worker_lines=False``: the terminal shows what workers print anyway, so it is not repeated.
    """

    def __init__(self, line: ProgressLine, *, worker_lines: bool = True) -> None:
        self._line, self._worker_lines = line, worker_lines
        self._spec: FitSpec | None = None
        self._newest: Progress | None = None
        self._held_out: float | None = None

    def on_fit_begin(self, spec: FitSpec) -> None:
        self._spec = spec

    def on_worker_says(self, line: WorkerLine) -> None:
        if self._worker_lines:
            self._line.say(says_in_words(line))

    def on_news(self, text: str) -> None:
        self._line.say(f"sparkstrom notes: {text}")

    def on_epoch(self, epoch: Epoch) -> None:
        if epoch.held_weight and math.isfinite(epoch.validation):
            self._held_out = epoch.validation

    def on_progress(self, progress: Progress) -> None:
        self._newest = progress
        if progress.phase is not Phase.DONE:
            self._show(force=False)

    def on_fit_end(self, end: FitDone) -> None:
        for epoch in end.history[-1:]:  # those of the last moment come with the tasks' reports
            self.on_epoch(epoch)
        self._show(force=True)
        if self._worker_lines and self._newest is not None and self._newest.unheard:
            self._line.say(
                f"sparkstrom: workers said {self._newest.unheard:,} lines more than were shown;"
                " all of them are in the executors' stderr (Spark's UI, `yarn logs`)"
            )

    def _show(self, *, force: bool) -> None:
        if self._newest is not None and self._spec is not None:
            line = replace(line_of(self._newest, self._spec), held_out=self._held_out)
            self._line.show(line, force=force)


class ResidualLog(FitListener):
    """Logs what ``encoding_debug_mode`` adds to the counters; the last figures in any case."""

    def __init__(self) -> None:
        self._log = EncodingLog()

    def on_counters(self, counters: Mapping[int, WorkerCounters]) -> None:
        self._log.show(counters)

    def on_fit_end(self, end: FitDone) -> None:
        self._log.show(end.outcome.stats, force=True)


def iteration_now(progress: Progress, spec: FitSpec, seconds: float) -> Iteration:
    """The same, and what went over links, as users' listeners hear it."""
    counts = progress.minibatches, progress.minibatches_expected
    total = FitTotals.of(progress.stats.values())
    by_kind = Counter(progress.by_kind)
    by_kind.update(total.by_kind)
    return replace(
        iteration_of(line_of(progress, spec), seconds, counts),
        bytes_wire=bytes_on_links([progress.wire, *total.links]),
        bytes_by_kind=dict(by_kind),
        slow_links=progress.slow_links,
    )


def says_in_words(line: WorkerLine) -> str:
    """Who says it, doing what."""
    return f"partition {line.partition} on {line.host} ({line.phase}) says: {line.text}"


def phase_in_words(progress: Progress) -> str:
    """What a fit waits for, or does."""
    here, wanted = progress.workers, progress.partitions
    if (words := PHASES.get(progress.phase)) is not None:
        return words
    if progress.phase is Phase.GATHERING and not here:
        return f"starting {wanted} Python worker{'s' * (wanted > 1)}"
    if progress.phase is Phase.GATHERING and here < wanted:
        return f"{here} of {wanted} workers are there"
    if progress.phase is Phase.GATHERING or not progress.copied:
        return "copying parameters"
    return "training" if progress.minibatches else "taking the first steps"


def line_of(progress: Progress, spec: FitSpec) -> Line:
    """What people see of a fit under way."""
    epochs, n_params = spec.epochs, spec.n_params
    total = FitTotals.of(progress.stats.values())
    examples, loss_sum = total.last_examples, total.last_loss_sum
    if not examples:  # nobody has finished an epoch yet
        examples, loss_sum = total.examples, total.loss_sum
    expected = progress.minibatches_expected
    return Line(
        phase=phase_in_words(progress),
        workers=progress.workers,
        partitions=progress.partitions,
        epoch=epochs * progress.minibatches / expected if expected else 0.0,
        epochs=epochs,
        loss=loss_sum / examples if examples else None,
        examples=total.examples,
        updates=progress.commits,
        bytes_sent=total.update_bytes,
        staleness=progress.staleness,
        waiting=total.waiting_in_residuals(len(progress.training), progress.minibatches),
        sent_fraction=total.hits / total.publications / n_params if total.publications else None,
        tau=total.tau,
        slow_links=progress.slow_now,
    )
