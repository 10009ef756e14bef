"""Summary: what a finished fit can say about itself."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from typing import Any

from sparkstrom.observe.epochs import Epoch
from sparkstrom.observe.fit_totals import FitTotals
from sparkstrom.observe.listening.json_lines import plain
from sparkstrom.observe.reporting.summary_page import summary_html, summary_text
from sparkstrom.observe.telemetry import bytes_on_links
from sparkstrom.spark.driver.common_options import CommonOptions
from sparkstrom.spark.driver.epoch_watch import Best
from sparkstrom.spark.driver.fit_record import FitRecord
from sparkstrom.spark.driver.horizon_notes import Horizons, in_words
from sparkstrom.spark.driver.summary_figures import (
    Fault,
    WorkerFigures,
    departures,
    dismissed,
    encoding_of,
    faults_of,
    kinds_of,
    mean_loss,
    phases_of,
    tau_of,
    waiting_of,
    worker_seconds_of,
    workers_of,
)
from sparkstrom.spark.driver.summary_warnings import warnings_of


@dataclass(frozen=True, slots=True)
class TrainingSummary:
    """One ``fit``. Bytes are bytes, times seconds, masses sums of absolute values."""

    replicas_equal: bool  # all hashes are the same and no parameter left the exact range
    hashes: dict[str, str]  # node id or "driver" -> SHA-256 of its parameters, as hex
    bytes_sent: int  # sealed updates, counted once at their origin
    # What Aeron sent over all interfaces, each hop, all headers included. Not between processes of
    # one host, unless they use loopback, and not Spark's own (rows, initial parameters).
    bytes_wire: int
    bytes_dense: int  # minibatches x 4 x n_params: dense float32 updates
    seconds: float
    phase_seconds: dict[str, float]
    epochs: int  # trained, those before a resumed checkpoint included; fewer if it was stopped
    workers: int
    n_params: int
    minibatches: int  # committed, each once
    minibatches_expected: int
    examples: int  # trained, as workers told it: repeats after a loss, too
    rows: int  # that executors read: each is trained in every epoch or held out, none is dropped
    rows_trained: int
    rows_held_out: int
    export_directory: str | None  # where exported rows are until network.close()
    spilled_bytes: int  # rows beyond batch_memory_bytes, on the executors' scratch
    updates: int  # committed
    loss: float  # mean over the examples of each worker's last epoch
    sent_fraction: float  # entries sent / (publications x n_params)
    staleness: Counter[int] = field(repr=False)  # commits between seen and applied -> updates
    # How many minibatches of the others an update had not seen when it was committed, each step of
    # it from where it was made. About as many as workers train are a round, which is good.
    staleness_minibatches: float  # mean over minibatches
    staleness_minibatches_max: float
    residual_minibatches: float  # how long learning waits in residuals, mean, on top of that
    residual_norm: float  # Euclidean, over all workers, at the end
    mass_clipped: float
    mass_scaled_away: float
    mass_lost: float  # kept for this fit, but its worker never came
    grants: int  # workers that went on with what an earlier fit had left
    horizons: Horizons  # what momentum and schedules became: name -> change; and workers
    tau: float  # mean of the workers' thresholds at the end
    exactness_breaches: int
    first_breach: int  # index of the first parameter that left the exact range, or -1
    rejected_frames: int  # strangers' and damaged ones, on the driver and all workers
    departures: list[str] = field(repr=False)  # who left before the end, and why
    warnings: list[str] = field(repr=False)
    stopped: str | None  # why the fit ended before its last epoch, if it did
    history: list[Epoch] = field(repr=False)  # loss, and what held-out rows say, of each epoch
    resumed_from: str | None  # the checkpoint that it went on from
    minibatches_resumed: int  # of ``minibatches``: trained before that
    checkpoint: str | None  # the newest that it has written
    best: Best | None  # with early stopping: the epoch whose parameters are delivered
    worker_seconds: dict[str, dict[str, float]] = field(repr=False)  # by node and activity
    encoding: dict[str, dict[str, float]] = field(repr=False)  # encoding_debug_mode: by node
    batch_size_per_worker: int
    effective_batch: int  # rows of a round: a minibatch of each worker that has rows
    # Bytes that driver and workers handed over to be sent, each hop, sealed, within hosts too:
    # updates, commits, sums, snapshots, optimizer_states, control
    bytes_by_kind: dict[str, int] = field(repr=False)
    per_worker: list[WorkerFigures] = field(repr=False)
    faults: list[Fault] = field(
        repr=False
    )  # survived: workers and controllers lost, media drivers replaced
    slow_links: list[str] = field(repr=False)  # that carried less than training would fill
    epochs_resumed: int = 0  # of ``epochs``: complete before the fit was resumed

    @property
    def staleness_mean(self) -> float:
        count = sum(self.staleness.values())
        return sum(s * n for s, n in self.staleness.items()) / count if count else 0.0

    @property
    def staleness_max(self) -> int:
        return max(self.staleness, default=0)

    def to_dict(self) -> dict[str, Any]:
        """All fields by name, and staleness_mean and _max, as JSON has them; NaN is None."""
        named = {each.name: plain(getattr(self, each.name)) for each in fields(self)}
        means = {"staleness_mean": self.staleness_mean, "staleness_max": self.staleness_max}
        return named | means

    def __str__(self) -> str:
        return summary_text(self.to_dict())

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return summary_html(self.to_dict())

    def _best_row(self) -> list[tuple[str, str]]:
        if self.best is None:
            return []
        delivered = "" if self.best.commit is None else f", parameters of commit {self.best.commit}"
        figure = f"{self.best.metric} {self.best.value:.4f}"
        return [("best epoch", f"{self.best.epoch} ({figure}{delivered})")]

    def _staleness_in_words(self) -> str:
        return (
            f"{self.staleness_minibatches:.1f} minibatches of others (max"
            f" {self.staleness_minibatches_max:.0f}), {self.staleness_mean:.1f} commits (max"
            f" {self.staleness_max}); {self.residual_minibatches:.0f} more in residuals"
        )

    def table(self, *, all: bool = False) -> str:
        """Return the figures, aligned, one per line, the hashes last; ``all``: every figure."""
        if all:
            return summary_text(self.to_dict(), whole=True)
        ratio = self.bytes_dense / self.bytes_sent if self.bytes_sent else float("inf")
        rows = [
            ("minibatches", f"{self.minibatches:,} of {self.minibatches_expected:,}"),
            (
                "rows",
                f"{self.rows:,}: {self.rows_trained:,} trained, {self.rows_held_out:,} held out",
            ),
            ("loss (last epoch)", f"{self.loss:.4f}"),
            *self._best_row(),
            ("bytes sent", f"{self.bytes_sent:,} (dense {self.bytes_dense:,}: {ratio:.0f} x)"),
            ("bytes on the wire", f"{self.bytes_wire:,}"),
            ("sent fraction", f"{self.sent_fraction:.2e}"),
            ("staleness", self._staleness_in_words()),
            ("residual norm", f"{self.residual_norm:.4f}"),
            ("threshold", f"{self.tau:.2e}"),
            *([("horizons", in_words(self.horizons))] if self.horizons else []),
            ("seconds", " + ".join(f"{k} {v:.1f}" for k, v in self.phase_seconds.items())),
            ("", f"= {self.seconds:.1f}"),
            *((f"hash {name}", digest[:16]) for name, digest in self.hashes.items()),
            ("replicas equal", str(self.replicas_equal)),
        ]
        return "\n".join(f"{name:<20}{value}" for name, value in rows)


def summarize(
    record: FitRecord,
    *,
    executors: int,
    warnings: list[str],
    master: CommonOptions,
    export_directory: str | None = None,
    best: Best | None,
    horizons: Horizons,
) -> TrainingSummary:
    """Put a fit that is done into figures."""
    assert record.end is not None, "the fit is done"
    spec, outcome = record.end.spec, record.end.outcome
    total = FitTotals.of(outcome.stats.values())
    overflows = outcome.overflows + total.overflows
    rows_trained = sum(max(0, rows) for rows in outcome.rows)
    trained = outcome.minibatches - outcome.minibatches_resumed
    return TrainingSummary(
        replicas_equal=len(set(outcome.hashes.values())) == 1 and not overflows,
        hashes=outcome.hashes,
        bytes_sent=total.update_bytes,
        bytes_wire=bytes_on_links([outcome.wire, *total.links]),
        bytes_dense=trained * 4 * spec.n_params,
        seconds=record.ended_s - record.began_s,
        phase_seconds=phases_of(outcome.phase_began_s, record),
        epochs=record.end.epochs_trained,
        workers=spec.workers,
        n_params=spec.n_params,
        minibatches=outcome.minibatches,
        minibatches_expected=outcome.minibatches_expected,
        examples=total.examples,
        rows=rows_trained + total.rows_held_out,
        rows_trained=rows_trained,
        rows_held_out=total.rows_held_out,
        export_directory=export_directory,
        spilled_bytes=total.spilled_bytes,
        updates=outcome.commits,
        loss=mean_loss(total),
        sent_fraction=total.hits / max(1.0, total.publications * spec.n_params),
        staleness=outcome.staleness,
        staleness_minibatches=outcome.staleness_minibatches,
        staleness_minibatches_max=outcome.staleness_minibatches_max,
        residual_minibatches=waiting_of(outcome, trained, total),
        residual_norm=total.residual_square**0.5,
        mass_clipped=total.mass_clipped,
        mass_scaled_away=total.mass_scaled_away,
        mass_lost=outcome.lost_mass + dismissed(record.end.reports),
        grants=outcome.grants,
        horizons=horizons,
        tau=tau_of(total),
        exactness_breaches=overflows,
        first_breach=outcome.first_overflow,
        rejected_frames=outcome.traffic.strange + total.rejected,
        departures=departures(outcome),
        warnings=[*warnings, *warnings_of(outcome, total, executors, overflows)],
        stopped=outcome.stop_reason,
        history=record.end.history,
        resumed_from=None,
        minibatches_resumed=outcome.minibatches_resumed,
        checkpoint=None,
        best=best,
        worker_seconds=worker_seconds_of(outcome) if master.collect_training_stats else {},
        encoding=encoding_of(outcome),
        batch_size_per_worker=master.batch_size_per_worker,
        effective_batch=sum(rows > 0 for rows in outcome.rows) * master.batch_size_per_worker,
        bytes_by_kind=kinds_of(outcome, total),
        per_worker=workers_of(outcome, spec.n_params),
        faults=faults_of(outcome, record),
        slow_links=list(outcome.slow_links),
    )
