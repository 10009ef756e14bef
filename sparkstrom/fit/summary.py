"""The summary of a finished fit: compute its values and warnings, and convert it to JSON.

``FitRecord`` records the times of a fit. ``FitFacts`` combines them with the fit's result, and each
field of ``TrainingSummary`` declares the function that computes it from these facts.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from sparkstrom.codec.messages import Phase
from sparkstrom.fit.checkpoints import FitKey, ResumePoint
from sparkstrom.fit.early_stopping_listener import Best
from sparkstrom.fit.events import FinishedFit, FitListener
from sparkstrom.observe.epoch_history import Epoch
from sparkstrom.observe.listener_events import to_json_value
from sparkstrom.observe.reporting.summary_rendering import short_text, summary_html, summary_text
from sparkstrom.observe.telemetry import FitTotals, WorkerCounters, sum_link_bytes
from sparkstrom.options.common import CommonOptions
from sparkstrom.protocol.common.events_and_effects import TaskEnding
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.runtime.master_control import FitOutcome

# How momentum and schedules were adapted: "workers", and name -> change.
HyperparameterChanges = dict[str, str | int]


T = TypeVar("T")
VALUE = "value"  # metadata key: the function that computes a figure


def figure(value: Callable[[FitFacts], T], **options: Any) -> T:
    """Declare a field of the summary, and the function ``value`` that computes it for a fit.

    ``options`` are those of ``dataclasses.field``.
    """
    declared: Any = field(metadata={VALUE: value}, **options)
    return cast(T, declared)


@dataclass(frozen=True, kw_only=True)
class FitFacts:
    """All that is known about a finished fit; the summary's values are computed from it."""

    record: FitRecord  # times and result
    executors: int  # the application's number of executors; 0 if it is not fixed
    warnings: list[str]  # warnings that the fit has shown already
    master: CommonOptions  # the user's options
    export_directory: str | None = None  # where the rows were exported
    best: Best | None  # the best epoch, if there was early stopping
    horizons: HyperparameterChanges  # how momentum and schedules were rescaled
    validation: str | float | None = None  # which rows are held out, as the user wrote it

    @cached_property
    def end(self) -> FinishedFit:
        """The result of the fit, with the history of its epochs."""
        return self.record.finished()

    @property
    def outcome(self) -> FitOutcome:
        """The counters and diagnostics of the fit that the controller has collected."""
        return self.end.outcome

    @property
    def n_params(self) -> int:
        """Number of parameters."""
        return self.end.spec.n_params

    @cached_property
    def total(self) -> FitTotals:
        """The combined counters of all workers."""
        return FitTotals.from_counters(self.outcome.stats.values())

    @property
    def overflows(self) -> int:
        """How often a parameter left the range in which sums are exact, on all nodes."""
        return self.outcome.overflows + self.total.training.overflows

    @property
    def rows_trained(self) -> int:
        """Number of rows to train on, in all partitions; each epoch trains all of them."""
        return sum(max(0, rows) for rows in self.outcome.rows)

    @property
    def training_workers(self) -> int:
        """Number of workers that have rows to train on."""
        return sum(rows > 0 for rows in self.outcome.rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSummary:
    """The result of one ``fit``: times in seconds, masses as sums of absolute values.

    A publication is the sending of an update by a worker. The controller numbers the update, which
    is then a commit. Changes that are too small to be sent wait in the worker's residual.
    """

    # All hashes are the same and no parameter left the exact range.
    replicas_equal: bool = figure(
        lambda fit: len(set(fit.outcome.hashes.values())) == 1 and not fit.overflows
    )
    # Node id or "driver" -> SHA-256 of its parameters, as hex.
    hashes: dict[str, str] = figure(lambda fit: fit.outcome.hashes)
    # Encrypted updates, counted once at their origin.
    bytes_sent: int = figure(lambda fit: fit.total.node.update_bytes)
    # Bytes that Aeron sent over all interfaces, on each hop, with all headers. Not included: bytes
    # between processes of one host, except over loopback, and Spark's (rows, initial parameters).
    bytes_wire: int = figure(lambda fit: sum_link_bytes([fit.outcome.wire, *fit.total.links]))
    # minibatches x 4 x n_params: dense float32 updates.
    bytes_dense: int = figure(lambda fit: fit.outcome.minibatches_trained * 4 * fit.n_params)
    seconds: float = figure(lambda fit: fit.record.ended_s - fit.record.began_s)
    phase_seconds: dict[str, float] = figure(
        lambda fit: phase_durations(fit.outcome.phase_began_s, fit.record)
    )
    # Number of epochs trained, including those before a resumed checkpoint; fewer if stopped early.
    epochs: int = figure(lambda fit: fit.end.epochs_trained)
    workers: int = figure(lambda fit: fit.end.spec.workers)
    n_params: int = figure(lambda fit: fit.n_params)
    # Minibatches whose updates were committed, each counted once.
    minibatches: int = figure(lambda fit: fit.outcome.minibatches)
    minibatches_expected: int = figure(lambda fit: fit.outcome.minibatches_expected)
    # Rows trained, as workers reported: including repetitions after the loss of a worker.
    examples: int = figure(lambda fit: fit.total.training.examples)
    # Rows read by executors: each is trained in every epoch or held out, none is dropped.
    rows: int = figure(lambda fit: fit.rows_trained + fit.total.training.rows_held_out)
    rows_trained: int = figure(lambda fit: fit.rows_trained)
    rows_held_out: int = figure(lambda fit: fit.total.training.rows_held_out)
    # Directory of the exported rows, until network.close().
    export_directory: str | None = figure(lambda fit: fit.export_directory)
    # Bytes of rows beyond batch_memory_bytes, in the executors' scratch directories.
    spilled_bytes: int = figure(lambda fit: fit.total.training.spilled_bytes)
    # Committed updates.
    updates: int = figure(lambda fit: fit.outcome.commits)
    # Mean over the examples of each partition's last epoch; if none was trained after a resume,
    # that of the checkpoint's last epoch.
    loss: float = figure(lambda fit: final_loss(fit))
    # Entries sent / (publications x n_params).
    sent_fraction: float = figure(lambda fit: mean_sent_fraction(fit.total, fit.n_params))
    # Number of commits that an update missed -> number of such updates.
    staleness: Counter[int] = figure(lambda fit: fit.outcome.staleness, repr=False)
    # Number of other workers' minibatches that an update had not seen when it was committed,
    # counted for each of its steps: the mean over minibatches, and the maximum. About the number
    # of workers, which is one round, is good.
    staleness_minibatches: float = figure(lambda fit: fit.outcome.staleness_minibatches)
    staleness_minibatches_max: float = figure(lambda fit: fit.outcome.staleness_minibatches_max)
    # Mean time that changes wait in residuals, in minibatches of all workers; not in staleness.
    residual_minibatches: float = figure(
        lambda fit: fit.total.residual_wait_minibatches(
            fit.training_workers, fit.outcome.minibatches_trained
        )
    )
    # Euclidean norm of all workers' residuals (changes not sent) at the end.
    residual_norm: float = figure(lambda fit: (fit.total.training.residual_square or 0.0) ** 0.5)
    # Removed from residuals by clipping, and by scaling them down.
    mass_clipped: float = figure(lambda fit: fit.total.training.mass_clipped)
    mass_scaled_away: float = figure(lambda fit: fit.total.training.mass_scaled_away)
    # Residuals of an earlier fit that no worker took over, and changes of dismissed workers that
    # were never committed.
    mass_lost: float = figure(
        lambda fit: (
            fit.outcome.lost_mass
            + sum(json.loads(report)["mass_dismissed"] for report in fit.end.reports)
        )
    )
    # Number of workers that took over residuals of an earlier fit.
    grants: int = figure(lambda fit: fit.outcome.grants)
    # How momentum and schedules were rescaled: name -> change; and the number of workers.
    horizons: HyperparameterChanges = figure(lambda fit: fit.horizons)
    # Mean of the workers' thresholds at the end.
    tau: float = figure(lambda fit: mean_tau(fit.total))
    # How often a parameter left the exact range.
    exactness_breaches: int = figure(lambda fit: fit.overflows)
    # Index of the first parameter that left the exact range, or -1.
    first_breach: int = figure(lambda fit: fit.outcome.first_overflow)
    # Foreign or damaged frames, on the controller and all workers.
    rejected_frames: int = figure(
        lambda fit: fit.outcome.traffic.foreign_frames + fit.total.node.rejected
    )
    # Workers that left before the end, and why.
    departures: list[str] = figure(lambda fit: format_departures(fit.outcome), repr=False)
    warnings: list[str] = figure(lambda fit: [*fit.warnings, *summary_warnings(fit)], repr=False)
    # Why the fit ended before its last epoch, if it did.
    stopped: str | None = figure(lambda fit: fit.outcome.stop_reason)
    # Loss and held-out metric of each epoch.
    history: list[Epoch] = figure(lambda fit: fit.end.history, repr=False)
    # The checkpoint from which the fit resumed.
    resumed_from: str | None = None
    # Those of ``minibatches`` that were trained before the resume.
    minibatches_resumed: int = figure(lambda fit: fit.outcome.minibatches_resumed)
    # The newest checkpoint that the fit wrote.
    checkpoint: str | None = None
    # With early stopping: the epoch whose parameters are delivered.
    best: Best | None = figure(lambda fit: fit.best)
    # Seconds by node and activity, with ``collect_training_stats``.
    worker_seconds: dict[str, dict[str, float]] = figure(
        lambda fit: worker_durations(fit.outcome) if fit.master.collect_training_stats else {},
        repr=False,
    )
    # With encoding_debug_mode: statistics of the residuals by node.
    encoding: dict[str, dict[str, float]] = figure(
        lambda fit: collect_residual_statistics(fit.outcome), repr=False
    )
    batch_size_per_worker: int = figure(lambda fit: fit.master.batch_size_per_worker)
    # Rows of a round: a minibatch of each worker that has rows.
    effective_batch: int = figure(
        lambda fit: fit.training_workers * fit.master.batch_size_per_worker
    )
    # Encrypted bytes that driver and workers sent, on each hop and also within hosts, by kind:
    # updates, commits, sums, snapshots, optimizer_states, control.
    bytes_by_kind: dict[str, int] = figure(
        lambda fit: sum_bytes_by_kind(fit.outcome, fit.total), repr=False
    )
    per_worker: list[WorkerFigures] = figure(
        lambda fit: collect_worker_figures(fit.outcome, fit.n_params), repr=False
    )
    # Failures that the fit survived.
    faults: list[Fault] = figure(lambda fit: collect_faults(fit.outcome, fit.record), repr=False)
    # Links that carried less than training could send.
    slow_links: list[str] = figure(lambda fit: list(fit.outcome.slow_links), repr=False)
    # Those of ``epochs`` that were complete before the fit was resumed.
    epochs_resumed: int = 0
    # n, if each update of k workers had the weight n / k at the end, so that all updates together
    # counted as n workers'; None: no limit below the number of workers.
    summed_workers: int | None = figure(lambda fit: fit.outcome.summed_workers, default=None)
    # Messages that the controller ignored, by reason (stranger, late, early and so on), and as
    # "on_workers" all that workers ignored. Some are normal.
    ignored_messages: dict[str, int] = figure(
        lambda fit: count_ignored_messages(fit.outcome, fit.total), repr=False, default_factory=dict
    )

    @property
    def staleness_mean(self) -> float:
        """Mean of ``staleness`` over all updates, in commits."""
        count = sum(self.staleness.values())
        return sum(s * n for s, n in self.staleness.items()) / count if count else 0.0

    @property
    def staleness_max(self) -> int:
        """Maximum of ``staleness``, in commits."""
        return max(self.staleness, default=0)

    def _values(self) -> dict[str, Any]:
        """Return all fields by name, and the mean and the maximum of the staleness."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        means = {"staleness_mean": self.staleness_mean, "staleness_max": self.staleness_max}
        return values | means

    def to_dict(self) -> dict[str, Any]:
        """Return all values by name, as JSON values; NaN becomes None."""
        return {name: to_json_value(value) for name, value in self._values().items()}

    def __str__(self) -> str:
        return summary_text(self.to_dict())

    def _repr_html_(self) -> str:
        """Return the summary as HTML for a notebook."""
        return summary_html(self.to_dict())

    def table(self, *, all: bool = False) -> str:
        """Return the most important values as text, one per line; with ``all`` every value."""
        return summary_text(self.to_dict(), whole=True) if all else short_text(self._values())


def summarize(facts: FitFacts) -> TrainingSummary:
    """Compute the summary of a finished fit and return it."""
    declared = {each.name: each.metadata.get(VALUE) for each in fields(TrainingSummary)}
    return TrainingSummary(
        **{name: value(facts) for name, value in declared.items() if value is not None}
    )


@dataclass(slots=True)
class FitRecord(FitListener):
    """Records the times of a fit, as ``time.monotonic`` values, and its result.

    A run is the part of a fit under one controller; each lost controller causes another run.
    """

    began_s: float = field(default_factory=time.monotonic)  # when ``fit`` was called
    submitted_s: float = math.nan  # when the current run started
    ended_s: float = math.nan  # when the last run ended
    end: FinishedFit | None = None  # None until the fit has ended without failure
    first_s: float = math.nan  # ``submitted_s`` of the first run; a lost controller causes another
    controller_losses: list[tuple[float, str]] = field(default_factory=list)  # (time, controller)

    def on_fit_begin(self, spec: FitSpec) -> None:
        """Record the start of a run."""
        self.submitted_s = time.monotonic()
        if math.isnan(self.first_s):
            self.first_s = self.submitted_s

    @property
    def origin_s(self) -> float:
        """The time at which the first run started, to which times of faults are relative."""
        return self.submitted_s if math.isnan(self.first_s) else self.first_s

    def record_controller_loss(self, what: str) -> None:
        """Record that a controller was lost now; ``what`` describes the loss."""
        self.controller_losses.append((time.monotonic(), what))

    def on_fit_end(self, end: FinishedFit) -> None:
        """Record the end and the result."""
        self.end, self.ended_s = end, time.monotonic()

    def finished(self) -> FinishedFit:
        """Return the result of a fit that has ended without failure."""
        assert self.end is not None, "the fit has ended without failure"
        return self.end


@dataclass(frozen=True, slots=True)
class Fault:
    """A failure that the fit survived."""

    what: str  # WORKER_LOST, CONTROLLER_LOST or DRIVER_REPLACED
    host: str  # "" if unknown
    reason: str  # as text
    seconds: float | None  # since the first run started, as in the run log; None if unknown
    node: int | None = None  # of a lost worker
    partition: int | None = None  # of a lost worker


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """The last reported values of one worker; its replacement counts as another worker."""

    node: int  # id in the protocol
    partition: int  # -1 if the trainer never reported
    host: str  # "" if unknown
    steps: int  # trained minibatches
    examples: int  # trained rows, including repetitions
    loss: float  # weighted mean over its last epoch; NaN if it finished none
    sent_fraction: float  # entries sent / (publications x n_params)
    bytes_sent: int  # of its own encrypted updates
    tau: float  # its threshold at the end; NaN if it published nothing
    seconds: dict[str, float]  # by activity, such as stepping, waiting and reading


def summary_to_json(summary: TrainingSummary) -> dict[str, Any]:
    """Return all fields as JSON values, for a checkpoint; inverse of ``summary_from_json``."""
    values = asdict(summary)
    values["staleness"] = {str(commits): count for commits, count in summary.staleness.items()}
    return values


def summary_from_json(values: dict[str, Any]) -> TrainingSummary:
    """Return the summary from values that ``summary_to_json`` returned."""
    staleness = Counter({int(commits): count for commits, count in values["staleness"].items()})
    history = [Epoch(**epoch) for epoch in values["history"]]
    best = None if values["best"] is None else Best(**values["best"])
    records: dict[str, Any] = {
        "staleness": staleness,
        "history": history,
        "best": best,
        "per_worker": [WorkerFigures(**worker) for worker in values["per_worker"]],
        "faults": [Fault(**fault) for fault in values["faults"]],
    }
    return TrainingSummary(**(values | records))


def summary_of_skipped_fit(checkpoint: ResumePoint, key: FitKey) -> TrainingSummary:
    """Return the summary of a skipped fit, which a checkpoint contains.

    In a stream, return the summary of the newest fit. If the checkpoint does not contain the
    summary, for example because the fit was interrupted, return one with a warning and no values.
    """
    summaries = checkpoint.summaries
    number = max(summaries, key=int) if key.stream and summaries else str(key.number)
    values = summaries.get(number)
    summary = _unknown_summary(checkpoint, key) if values is None else summary_from_json(values)
    warnings = [*summary.warnings, *filter(None, [checkpoint.warning])]
    path = checkpoint.path
    return replace(summary, resumed_from=path, checkpoint=path, warnings=warnings)


def _unknown_summary(checkpoint: ResumePoint, key: FitKey) -> TrainingSummary:
    """Return a summary whose values are 0, NaN or empty, with a warning that they are unknown."""
    text = NO_SUMMARY.format(path=checkpoint.path, number=key.number)
    values = {name: _unknown_value(kind) for name, kind in get_type_hints(TrainingSummary).items()}
    known = {"n_params": checkpoint.parameters.size, "warnings": [text]}
    # Only the checkpoint's parameters exist, so no replica can differ from them.
    return TrainingSummary(**(values | known | {"replicas_equal": True}))


def _unknown_value(kind: Any) -> Any:
    """Return the value of type ``kind`` that means "not known" in a summary."""
    if type(None) in get_args(kind):
        return None
    return math.nan if kind is float else (get_origin(kind) or kind)()


NO_SUMMARY = (
    "{path} contains no summary of fit {number}, which was probably interrupted: its figures are"
    " not known"
)
WORKER_LOST = "worker lost"
CONTROLLER_LOST = "controller lost"
DRIVER_REPLACED = "media driver replaced"
ON_WORKERS = "on_workers"  # key for all messages that workers ignored, whatever the reason
NORMAL_ENDINGS = (TaskEnding.DONE, TaskEnding.RELEASED, TaskEnding.DISMISSED)


def collect_worker_figures(outcome: FitOutcome, n_params: int) -> list[WorkerFigures]:
    """Return the values of all workers that reported, in order of node ids."""
    return [
        _make_worker_figures(node, counters, outcome.hosts.get(node, ""), n_params)
        for node, counters in sorted(outcome.stats.items())
    ]


def _make_worker_figures(
    node: int, counters: WorkerCounters, host: str, n_params: int
) -> WorkerFigures:
    """Return the values of one worker, from its last counters."""
    total, training = FitTotals.from_counters([counters]), counters.training
    return WorkerFigures(
        node=node,
        partition=training.partition if training is not None else -1,
        host=host,
        steps=training.steps if training is not None else 0,
        examples=total.training.examples,
        loss=mean_loss(total),
        sent_fraction=mean_sent_fraction(total, n_params),
        bytes_sent=total.node.update_bytes,
        tau=mean_tau(total),
        seconds=dict(training.seconds) if training is not None else {},
    )


def collect_faults(outcome: FitOutcome, record: FitRecord) -> list[Fault]:
    """Return the faults of a fit: lost controllers, lost workers and replaced media drivers.

    If a controller was lost, only the workers lost under the last controller are known.
    """
    began_s = record.origin_s
    lost = [
        Fault(CONTROLLER_LOST, "", what, at_s - began_s) for at_s, what in record.controller_losses
    ]
    lost += [
        Fault(WORKER_LOST, d.host, d.reason, d.at_s - began_s, d.node, d.partition)
        for d in outcome.departures
        if d.ending not in NORMAL_ENDINGS
    ]
    hosts = {name: outcome.hosts.get(node, "") for node, name in _replaced_media_drivers(outcome)}
    hosts |= dict.fromkeys(list(outcome.wire.drivers)[:-1], "the driver program")
    replaced = [
        Fault(DRIVER_REPLACED, host, f"{name} was gone or stood still", None)
        for name, host in hosts.items()
    ]
    return lost + replaced


def _replaced_media_drivers(outcome: FitOutcome) -> list[tuple[int, str]]:
    """Return (node, name) of the media drivers that workers replaced: all but a worker's last."""
    links_by_node = {
        node: one.node.links for node, one in outcome.stats.items() if one.node is not None
    }
    return [
        (node, name)
        for node, links in links_by_node.items()
        if links is not None
        for name in list(links.drivers)[:-1]
    ]


def sum_bytes_by_kind(outcome: FitOutcome, total: FitTotals) -> dict[str, int]:
    """Return the bytes that controller and workers sent, by kind of message, largest first."""
    by_kind = Counter(outcome.traffic.by_kind)
    by_kind.update(total.node.by_kind)
    return dict(by_kind.most_common())


def count_ignored_messages(outcome: FitOutcome, total: FitTotals) -> dict[str, int]:
    """Return the number of ignored messages by reason; workers report only their total."""
    by_reason = Counter[str]()
    for (_, reason), count in outcome.ignored.items():
        by_reason[reason.name.lower()] += count
    if total.node.ignored:
        by_reason[ON_WORKERS] = total.node.ignored
    return dict(by_reason.most_common())


def final_loss(fit: FitFacts) -> float:
    """Return the mean loss of the last epoch, which may be one before a resume."""
    if fit.end.history and not fit.outcome.minibatches_trained:
        return fit.end.history[-1].loss
    return mean_loss(fit.total)


def mean_loss(total: FitTotals) -> float:
    """Return the mean loss over each partition's last complete epoch; NaN if none is complete."""
    weight = total.training.last_loss_weight
    return total.training.last_loss_sum / weight if weight else float("nan")


def mean_sent_fraction(total: FitTotals, n_params: int) -> float:
    """Return the average fraction of the model's parameters that one publication sends."""
    return total.training.hits / max(1.0, total.training.publications * n_params)


def mean_tau(total: FitTotals) -> float:
    """Return the mean of the workers' thresholds; NaN if no worker has published."""
    return float("nan") if total.training.tau is None else total.training.tau


def format_departures(outcome: FitOutcome) -> list[str]:
    """Return a line for each worker that left before the end, with the reason."""
    return [
        f"node {d.node} (partition {d.partition} on {d.host}): {d.reason}"
        for d in outcome.departures
        if d.ending is not TaskEnding.DONE
    ]


def collect_residual_statistics(outcome: FitOutcome) -> dict[str, dict[str, float]]:
    """Return the statistics of each worker's residual (changes not sent), by node and name.

    The result is {} without the option ``encoding_debug_mode``.
    """
    return {
        str(node): counters.training.residual.by_name()
        for node, counters in outcome.stats.items()
        if counters.training is not None and counters.training.residual is not None
    }


def phase_durations(began: dict[Phase, float], record: FitRecord) -> dict[str, float]:
    """Return the seconds of each phase in order; they add up to the duration of the fit.

    ``began``: the time at which each phase began.
    """
    ends = [
        ("prepare", record.submitted_s),
        ("start", began.get(Phase.RUNNING, record.submitted_s)),
        ("train", began.get(Phase.DRAINING, record.ended_s)),
        ("drain", began.get(Phase.AUDIT, record.ended_s)),
        ("audit", began.get(Phase.DONE, record.ended_s)),
        ("end", record.ended_s),
    ]
    out, before_s = {}, record.began_s
    for name, end_s in ends:
        out[name] = max(0.0, end_s - before_s)
        before_s = max(before_s, end_s)
    return out


def worker_durations(outcome: FitOutcome) -> dict[str, dict[str, float]]:
    """Return the seconds that each worker spent, by node and activity."""
    return {
        str(node): counters.training.seconds if counters.training is not None else {}
        for node, counters in outcome.stats.items()
    }


SKEW_MAX = 1.5  # ratio of largest to smallest partition above which the summary warns


def summary_warnings(fit: FitFacts) -> list[str]:
    """Return the warnings about a finished fit, the controller's notes first."""
    outcome, total = fit.outcome, fit.total
    return [
        *outcome.notes,
        *skew_warnings(outcome.rows, len(outcome.executors), fit.executors),
        *_overflow_warning(fit.overflows, outcome.first_overflow),
        *_replica_warning(outcome.hashes),
        *_fresh_optimizer_warning(total.training.fresh_updaters),
        *_no_held_out_warning(fit),
        *_unmeasured_partition_warnings(outcome),
        *_unchanged_parameters_warning(outcome.minibatches_trained, total),
        *_unknown_counter_warning(total.unknown),
        *_worker_warnings(fit.end.reports),
    ]


def skew_warnings(rows: list[int], executors_used: int, executors: int) -> list[str]:
    """Return warnings about empty or uneven partitions, and about executors without workers.

    ``rows``: number of rows by partition; ``executors_used``: number of executors that had a
    worker; ``executors``: number of the application's executors, or 0 if it is not fixed.
    """
    out = []
    empty = [i for i, count in enumerate(rows) if count == 0]
    if empty:
        out.append(
            f"{len(empty)} of {len(rows)} partitions have no rows (first: {empty[0]}): their "
            "workers had nothing to do; use fewer workers, or on Spark repartition='always'"
        )
    filled = [count for count in rows if count > 0]
    if filled and max(filled) > SKEW_MAX * min(filled) and max(filled) - min(filled) > len(rows):
        out.append(
            f"partitions have between {min(filled):,} and {max(filled):,} rows: the largest one "
            "decides how long an epoch takes; on Spark repartition='always' evens them out"
        )
    if 0 < executors_used < min(executors, len(rows)):  # 0: nothing was left to train
        out.append(
            f"workers ran on {executors_used} of {executors} executors: Spark gave the others no "
            "task; workers_per_node=-1 uses every slot"
        )
    return out


def _overflow_warning(overflows: int, first: int) -> list[str]:
    """Return a warning if parameters left the exact range; ``first``: the first one's index."""
    if not overflows:
        return []
    return [
        f"{overflows} times a parameter (first: index {first}) left the range in which sums are "
        "exact: replicas may differ; the driver's parameters are returned. Lower the learning "
        "rate, or start another fit: it takes a coarser grid"
    ]


def _replica_warning(hashes: dict[str, str]) -> list[str]:
    """Return a warning that names the nodes whose replicas differ from the controller's.

    ``hashes``: of the replicas by node id, and under "driver" of the controller's.
    """
    nodes = [f"node {node}" for node, digest in hashes.items() if digest != hashes["driver"]]
    if not nodes:
        return []
    return [f"replicas differ from the driver's: {', '.join(nodes)}; please report this as a bug"]


def _fresh_optimizer_warning(workers: int) -> list[str]:
    """Return a warning if ``workers`` workers joined a running fit without an optimizer state."""
    if not workers:
        return []
    return [
        f"{workers} workers joined in mid-training and started with a fresh optimizer state: no "
        "worker sent them one within a lease; their momentum and second moments start at zero"
    ]


WEIGHTLESS = (
    "the rows that validation holds out all weigh 0, by their weights or because the loss ignores"
    " their labels, so no epoch has a held-out loss: hold out rows that count"
)


def _no_held_out_warning(fit: FitFacts) -> list[str]:
    """Return a warning if rows should have been held out, but there were none, or all weigh 0."""
    if not fit.validation or not fit.outcome.minibatches_trained:
        return []
    if fit.total.training.rows_held_out:
        counters = [one.training for one in fit.outcome.stats.values() if one.training is not None]
        weights = [one.epochs.held_weight for one in counters if one.rows_held_out and one.epochs]
        return [WEIGHTLESS] if weights and not any(weights) else []
    return [
        "validation selects no rows, so no epoch has a held-out loss: give a larger fraction, a"
        " column that is true for some rows, or held-out rows that are not empty"
    ]


def _unmeasured_partition_warnings(outcome: FitOutcome) -> list[str]:
    """Return warnings about held-out rows that were not evaluated in every epoch.

    These rows are in partitions without rows to train on, whose worker left before the last epoch.
    """
    counters = [one.training for one in outcome.stats.values() if one.training is not None]
    newest: dict[int, int] = {}  # last finished epoch by partition
    for one in counters:
        finished = one.epochs.finished if one.epochs is not None else -1
        newest[one.partition] = max(newest.get(one.partition, -1), finished)
    trained = [i for i, rows in enumerate(outcome.rows) if rows > 0]
    complete = min((newest.get(partition, -1) for partition in trained), default=-1)
    measured = {one.partition for one in counters if one.rows_held_out} - {*trained}
    return [
        f"partition {partition} has only held-out rows, and its worker was lost or gave up its task"
        " slot: epochs after that were measured without them; choose held-out rows from every"
        " partition, or on Spark use repartition='always'"
        for partition in sorted(measured)
        if newest[partition] < complete
    ]


def _unchanged_parameters_warning(minibatches: int, total: FitTotals) -> list[str]:
    """Return a warning if a fit delivers the same parameters with which it started."""
    if not minibatches or total.training.hits:
        return []
    if not total.training.residual_square:
        return [
            "no minibatch changed a parameter, so the fit returns the initial ones; check that the "
            "step works on the bound parameters, and that the learning rate and the weights of "
            "rows are above 0"
        ]
    return [
        "no worker sent anything: every change stayed below its threshold (at the end "
        f"{mean_tau(total):.2e}), so the fit returns the initial parameters: train longer,"
        " or lower a threshold that you have set"
    ]


def _unknown_counter_warning(names: Sequence[str]) -> list[str]:
    """Return a warning that names the workers' counters that this version does not know."""
    if not names:
        return []
    return [
        f"workers sent {len(names)} counters that this driver does not know and does not "
        f"report: {', '.join(names)}; please report this as a bug"
    ]


WORKER_WARNINGS_MAX = 3


def _worker_warnings(reports: list[str]) -> list[str]:
    """Return the warnings in the tasks' reports; of many, the first three with their number."""
    found = [text for report in reports for text in json.loads(report).get("warnings", ())]
    if len(found) > WORKER_WARNINGS_MAX:
        found[WORKER_WARNINGS_MAX - 1] += f" (such warnings of workers: {len(found)})"
    return found[:WORKER_WARNINGS_MAX]
