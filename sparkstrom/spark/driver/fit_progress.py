"""Showing a fit to people: the progress line, and residuals' figures in the log."""

from __future__ import annotations

from collections.abc import Mapping

from sparkstrom.codec.messages import Phase
from sparkstrom.observe.fit_totals import FitTotals
from sparkstrom.observe.progress import Line, ProgressLine
from sparkstrom.observe.residual_figures import EncodingLog
from sparkstrom.observe.telemetry import WorkerCounters
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.runtime.master_thread import Progress
from sparkstrom.spark.driver.fit_listeners import FitDone, FitListener


class FitProgress(FitListener):
    """Keeps a progress line up to date; the last one stays and shows the end."""

    def __init__(self, line: ProgressLine) -> None:
        self._line = line
        self._spec: FitSpec | None = None
        self._newest: Progress | None = None

    def on_fit_begin(self, spec: FitSpec) -> None:
        self._spec = spec

    def on_progress(self, progress: Progress) -> None:
        self._newest = progress
        if progress.phase is not Phase.DONE:
            self._show(force=False)

    def on_fit_end(self, end: FitDone) -> None:
        self._show(force=True)

    def _show(self, *, force: bool) -> None:
        if self._newest is not None and self._spec is not None:
            self._line.show(line_of(self._newest, self._spec), force=force)


class ResidualLog(FitListener):
    """Logs what ``encoding_debug_mode`` adds to the counters; the last figures in any case."""

    def __init__(self) -> None:
        self._log = EncodingLog()

    def on_counters(self, counters: Mapping[int, WorkerCounters]) -> None:
        self._log.show(counters)

    def on_fit_end(self, end: FitDone) -> None:
        self._log.show(end.outcome.stats, force=True)


def line_of(progress: Progress, spec: FitSpec) -> Line:
    """What people see of a fit under way."""
    epochs, n_params = spec.epochs, spec.n_params
    total = FitTotals.of(progress.stats.values())
    examples, loss_sum = total.last_examples, total.last_loss_sum
    if not examples:  # nobody has finished an epoch yet
        examples, loss_sum = total.examples, total.loss_sum
    expected = progress.minibatches_expected
    return Line(
        phase=progress.phase.name.lower(),
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
    )
