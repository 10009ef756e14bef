"""Summary: what a finished fit can say about itself."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sparkstrom.codec.messages import Phase
from sparkstrom.observe.epochs import Epoch
from sparkstrom.observe.fit_totals import FitTotals
from sparkstrom.observe.telemetry import bytes_on_links
from sparkstrom.protocol.common.endings import Ending
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.runtime.master_thread import Outcome
from sparkstrom.spark.driver.epoch_watch import Best
from sparkstrom.spark.driver.fit_listeners import FitDone, FitListener
from sparkstrom.spark.driver.horizon_notes import Horizons, in_words

SKEW = 1.5  # largest partition / smallest, from which on it is said


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
    epochs: int
    workers: int
    n_params: int
    minibatches: int  # committed, each once
    minibatches_expected: int
    examples: int  # trained, repeats after a loss included
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
    best: Best | None  # with early stopping: the epoch whose parameters are delivered
    worker_seconds: dict[str, dict[str, float]] = field(repr=False)  # by node and activity
    encoding: dict[str, dict[str, float]] = field(repr=False)  # encoding_debug_mode: by node

    @property
    def staleness_mean(self) -> float:
        count = sum(self.staleness.values())
        return sum(s * n for s, n in self.staleness.items()) / count if count else 0.0

    @property
    def staleness_max(self) -> int:
        return max(self.staleness, default=0)

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

    def table(self) -> str:
        """The figures, aligned, one per line; the hashes last."""
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


@dataclass(slots=True)
class FitRecord(FitListener):
    """Keeps what a summary is made of: how a fit ended, and when, on the driver's clock."""

    began_s: float = field(default_factory=time.monotonic)  # ``fit`` was called
    submitted_s: float = math.nan
    ended_s: float = math.nan
    end: FitDone | None = None

    def on_fit_begin(self, spec: FitSpec) -> None:
        self.submitted_s = time.monotonic()

    def on_fit_end(self, end: FitDone) -> None:
        self.end, self.ended_s = end, time.monotonic()


def summarize(
    record: FitRecord,
    *,
    executors: int,
    warnings: list[str],
    collect_stats: bool,
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
    return TrainingSummary(
        replicas_equal=len(set(outcome.hashes.values())) == 1 and not overflows,
        hashes=outcome.hashes,
        bytes_sent=total.update_bytes,
        bytes_wire=bytes_on_links([outcome.wire, *total.links]),
        bytes_dense=outcome.minibatches * 4 * spec.n_params,
        seconds=record.ended_s - record.began_s,
        phase_seconds=_phases(outcome.phase_began_s, record),
        epochs=spec.epochs,
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
        loss=_mean_loss(total),
        sent_fraction=total.hits / max(1.0, total.publications * spec.n_params),
        staleness=outcome.staleness,
        staleness_minibatches=outcome.staleness_minibatches,
        staleness_minibatches_max=outcome.staleness_minibatches_max,
        residual_minibatches=_waiting(outcome, total),
        residual_norm=total.residual_square**0.5,
        mass_clipped=total.mass_clipped,
        mass_scaled_away=total.mass_scaled_away,
        mass_lost=outcome.lost_mass + _dismissed(record.end.reports),
        grants=outcome.grants,
        horizons=horizons,
        tau=_tau(total),
        exactness_breaches=overflows,
        first_breach=outcome.first_overflow,
        rejected_frames=outcome.traffic.rejected.total() + total.rejected,
        departures=_departures(outcome),
        warnings=[*warnings, *_warnings(outcome, total, executors, overflows)],
        stopped=outcome.stop_reason,
        history=record.end.history,
        best=best,
        worker_seconds=_worker_seconds(outcome) if collect_stats else {},
        encoding=_encoding(outcome),
    )


def _dismissed(reports: Iterable[str]) -> float:
    """What tasks had not sent whose worker was not needed any more."""
    masses: Iterable[float] = (json.loads(report)["mass_dismissed"] for report in reports)
    return sum(masses)


def _mean_loss(total: FitTotals) -> float:
    return total.last_loss_sum / total.last_examples if total.last_examples else float("nan")


def _waiting(outcome: Outcome, total: FitTotals) -> float:
    workers = sum(rows > 0 for rows in outcome.rows)
    return total.waiting_in_residuals(workers, outcome.minibatches)


def _tau(total: FitTotals) -> float:
    return float("nan") if total.tau is None else total.tau


def _warnings(outcome: Outcome, total: FitTotals, executors: int, overflows: int) -> list[str]:
    return [
        *outcome.notes,
        *skew_warnings(outcome.rows, len(outcome.executors), executors),
        *_overflow_warning(overflows, outcome.first_overflow),
        *_differing(outcome.hashes),
        *_fresh_updaters(total.fresh_updaters),
        *_nothing_learnt(outcome.minibatches, total),
        *_unknown_counters(total.unknown),
    ]


def _departures(outcome: Outcome) -> list[str]:
    """Who left before the end."""
    return [
        f"node {d.node} (partition {d.partition} on {d.host}): {d.reason}"
        for d in outcome.departures
        if Ending.of(d.reason) is not Ending.DONE
    ]


def _encoding(outcome: Outcome) -> dict[str, dict[str, float]]:
    return {
        str(node): told.training.residual.by_name()
        for node, told in outcome.stats.items()
        if told.training is not None and told.training.residual is not None
    }


def _phases(began: dict[Phase, float], record: FitRecord) -> dict[str, float]:
    """Seconds of each phase, in order; together they are the whole."""
    marks = [
        ("prepare", record.submitted_s),
        ("start", began.get(Phase.RUNNING, record.submitted_s)),
        ("train", began.get(Phase.DRAINING, record.ended_s)),
        ("drain", began.get(Phase.AUDIT, record.ended_s)),
        ("audit", began.get(Phase.DONE, record.ended_s)),
        ("end", record.ended_s),
    ]
    out, before_s = {}, record.began_s
    for name, mark_s in marks:
        out[name] = max(0.0, mark_s - before_s)
        before_s = max(before_s, mark_s)
    return out


def _differing(hashes: dict[str, str]) -> list[str]:
    """Names the nodes whose replica is not the driver's, if any."""
    nodes = [f"node {node}" for node, digest in hashes.items() if digest != hashes["driver"]]
    if not nodes:
        return []
    return [f"replicas differ from the driver's: {', '.join(nodes)}; please report this as a bug"]


def _fresh_updaters(workers: int) -> list[str]:
    if not workers:
        return []
    return [
        f"{workers} workers joined in mid-training and went on with a fresh updater state: nobody "
        "lent them one within a lease; momentum and second moments began anew there"
    ]


def _nothing_learnt(minibatches: int, total: FitTotals) -> list[str]:
    """Says so where a fit delivers the parameters that it began with."""
    if not minibatches or total.hits:
        return []
    if not total.residual_square:
        return [
            "no minibatch changed a parameter: the fit delivers those it began with; does the step "
            "compute with the parameters it is given, and is the learning rate above 0?"
        ]
    return [
        "no worker sent anything: every change stayed below its threshold (at the end "
        f"{_tau(total):.2e}), so the fit delivers the parameters it began with; lower it, as by "
        "threshold='auto', or train longer"
    ]


def _unknown_counters(names: Sequence[str]) -> list[str]:
    if not names:
        return []
    return [
        f"workers told {len(names)} counters that this driver does not know, which are in no "
        f"figure: {', '.join(names)}; please report this as a bug"
    ]


def skew_warnings(rows: list[int], executors_used: int, executors: int) -> list[str]:
    """What the spread of rows and workers turned out to be, where it is worth a word."""
    out = []
    empty = [i for i, count in enumerate(rows) if count == 0]
    if empty:
        out.append(
            f"{len(empty)} of {len(rows)} partitions have no rows (first: {empty[0]}): their "
            "workers had nothing to do; use fewer workers, or repartition='always'"
        )
    filled = [count for count in rows if count > 0]
    if filled and max(filled) > SKEW * min(filled) and max(filled) - min(filled) > len(rows):
        out.append(
            f"partitions have between {min(filled):,} and {max(filled):,} rows: the largest one "
            "decides how long an epoch takes; repartition='always' evens them out"
        )
    if executors_used < min(executors, len(rows)):
        out.append(
            f"workers ran on {executors_used} of {executors} executors: Spark gave the others no "
            "task; workers_per_node=-1 uses every slot"
        )
    return out


def _overflow_warning(overflows: int, first: int) -> list[str]:
    if not overflows:
        return []
    return [
        f"{overflows} times a parameter (first: index {first}) left the range in which sums are "
        "exact: replicas may differ; the driver's parameters are delivered. Lower the learning "
        "rate, or start another fit: it takes a coarser grid"
    ]


def _worker_seconds(outcome: Outcome) -> dict[str, dict[str, float]]:
    return {
        str(node): told.training.seconds if told.training is not None else {}
        for node, told in outcome.stats.items()
    }
