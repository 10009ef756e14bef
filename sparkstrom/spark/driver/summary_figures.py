"""Summary figures: what a fit that is done left behind, as figures of it and of each worker."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from sparkstrom.codec.messages import Phase
from sparkstrom.observe.fit_totals import FitTotals
from sparkstrom.observe.telemetry import WorkerCounters
from sparkstrom.protocol.common.endings import Ending
from sparkstrom.runtime.fit_state import Outcome
from sparkstrom.spark.driver.fit_record import FitRecord

WORKER_LOST = "worker lost"
CONTROLLER_LOST = "controller lost"
DRIVER_REPLACED = "media driver replaced"
NO_FAULT = (Ending.DONE, Ending.RELEASED, Ending.DISMISSED)


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that broke, after which the fit went on."""

    what: str  # WORKER_LOST, CONTROLLER_LOST or DRIVER_REPLACED
    host: str
    reason: str
    seconds: float | None  # since the first job was submitted, as in the run log; None: not known
    node: int | None = None  # of a worker that was lost
    partition: int | None = None


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """One worker, as it has told last; who replaced it is another one."""

    node: int
    partition: int  # -1: its trainer never said anything
    host: str
    steps: int
    examples: int
    loss: float  # mean over the examples of its last epoch; NaN: it finished none
    sent_fraction: float  # entries sent / (publications x n_params)
    bytes_sent: int  # sealed updates of its own
    tau: float  # its threshold at the end; NaN: it published nothing
    seconds: dict[str, float]  # by activity: stepping, waiting, reading and what else there is


def workers_of(outcome: Outcome, n_params: int) -> list[WorkerFigures]:
    """All that told something, by node."""
    return [
        _worker(node, told, outcome.hosts.get(node, ""), n_params)
        for node, told in sorted(outcome.stats.items())
    ]


def _worker(node: int, told: WorkerCounters, host: str, n_params: int) -> WorkerFigures:
    total, training = FitTotals.of([told]), told.training
    return WorkerFigures(
        node=node,
        partition=training.partition if training is not None else -1,
        host=host,
        steps=training.steps if training is not None else 0,
        examples=total.examples,
        loss=mean_loss(total),
        sent_fraction=total.hits / max(1.0, total.publications * n_params),
        bytes_sent=total.update_bytes,
        tau=tau_of(total),
        seconds=dict(training.seconds) if training is not None else {},
    )


def faults_of(outcome: Outcome, record: FitRecord) -> list[Fault]:
    """What was lost, in order, then media drivers that others took the place of.

    Of a fit whose controller was lost workers are known since the last one began.
    """
    began_s = record.origin_s
    lost = [Fault(CONTROLLER_LOST, "", what, at_s - began_s) for at_s, what in record.lost]
    lost += [
        Fault(WORKER_LOST, d.host, d.reason, d.at_s - began_s, d.node, d.partition)
        for d in outcome.departures
        if Ending.of(d.reason) not in NO_FAULT
    ]
    left = {name: outcome.hosts.get(node, "") for node, name in _drivers_left(outcome)}
    left |= dict.fromkeys(list(outcome.wire.drivers)[:-1], "the driver program")
    replaced = [
        Fault(DRIVER_REPLACED, host, f"{name} was gone or stood still", None)
        for name, host in left.items()
    ]
    return lost + replaced


def _drivers_left(outcome: Outcome) -> list[tuple[int, str]]:
    """Nodes and the media drivers that they went on without: all that they told of but the last."""
    told = {node: one.node.links for node, one in outcome.stats.items() if one.node is not None}
    return [
        (node, name)
        for node, links in told.items()
        if links is not None
        for name in list(links.drivers)[:-1]
    ]


def kinds_of(outcome: Outcome, total: FitTotals) -> dict[str, int]:
    """Bytes that driver and workers handed over to be sent, by kind, the largest first."""
    both = Counter(outcome.traffic.by_kind)
    both.update(total.by_kind)
    return dict(both.most_common())


def dismissed(reports: Iterable[str]) -> float:
    """What tasks had not sent whose worker was not needed any more."""
    masses: Iterable[float] = (json.loads(report)["mass_dismissed"] for report in reports)
    return sum(masses)


def mean_loss(total: FitTotals) -> float:
    """Over the examples of each worker's last epoch; NaN where none is finished."""
    return total.last_loss_sum / total.last_examples if total.last_examples else float("nan")


def waiting_of(outcome: Outcome, trained: int, total: FitTotals) -> float:
    """How long learning waits in residuals, in minibatches; ``trained``: of this fit."""
    workers = sum(rows > 0 for rows in outcome.rows)
    return total.waiting_in_residuals(workers, trained)


def tau_of(total: FitTotals) -> float:
    """Mean of the workers' thresholds; NaN where nobody has published."""
    return float("nan") if total.tau is None else total.tau


def departures(outcome: Outcome) -> list[str]:
    """Who left before the end."""
    return [
        f"node {d.node} (partition {d.partition} on {d.host}): {d.reason}"
        for d in outcome.departures
        if Ending.of(d.reason) is not Ending.DONE
    ]


def encoding_of(outcome: Outcome) -> dict[str, dict[str, float]]:
    """With encoding_debug_mode, the residual's figures by node."""
    return {
        str(node): told.training.residual.by_name()
        for node, told in outcome.stats.items()
        if told.training is not None and told.training.residual is not None
    }


def phases_of(began: dict[Phase, float], record: FitRecord) -> dict[str, float]:
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


def worker_seconds_of(outcome: Outcome) -> dict[str, dict[str, float]]:
    """By node and activity."""
    return {
        str(node): told.training.seconds if told.training is not None else {}
        for node, told in outcome.stats.items()
    }
