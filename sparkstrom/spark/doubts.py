"""Doubts: what makes it likely that a fit has lost accuracy against one machine, and the remedy.

None of it is an error: such a fit trains, ends well and is somewhat worse than it could be. So it
is said at the end, in ``summary.warnings`` and once in the driver's log. Each rule is a function of
the options and of a few facts; its limits come from fits whose accuracy was compared with that of
one machine (``python -m benchmarks.convergence``).
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass

from sparkstrom.encoding.thresholds import (
    AdaptiveThreshold,
    AutoThreshold,
    FixedThreshold,
    TargetSparsityThreshold,
    ThresholdAlgorithm,
    algorithm_of,
)
from sparkstrom.models.base import FlatModel, Paced
from sparkstrom.observe.residuals import waiting_in_residuals
from sparkstrom.runtime.master import Outcome
from sparkstrom.spark.horizons import horizon_warnings
from sparkstrom.spark.shared import SharedTrainingMaster

log = logging.getLogger(__name__)

FAR = 4.0  # times beyond what was wanted of the sent fraction
SETTLED = 10  # publications of a worker, before which a sent fraction says little
WAITING_MAX = 0.25  # of the fit, in residuals
MOMENTUM_MAX = 0.95  # that it acts like: more is rarely wanted, and 0.9 is there from three workers
ROUNDS_MAX = 2.5  # two were harmless up to eight workers
LEVELS_REACH = 2.0  # thresholds by which an entry moves at once, where it has several levels

BEFORE_THE_ARROW = re.compile(r"(\S+) -> ")  # as ``models.horizons.changed`` writes it


@dataclass(frozen=True, slots=True)
class Facts:
    """Of a fit and of those before it that it went on from."""

    workers: int  # that had rows
    minibatches: int
    publications: float  # of each worker
    sent_fraction: float
    tau: float  # mean of the workers' at the end
    staleness: float  # mean, in minibatches of the fit
    waiting: float  # in residuals, likewise


def doubts(
    master: SharedTrainingMaster, model: FlatModel, outcome: Outcome, minibatches_before: int
) -> list[str]:
    """All that there are, which go to the log, too; ``minibatches_before`` of earlier fits."""
    facts = facts_of(outcome, model.n_params, minibatches_before)
    found = [
        *horizon_warnings(master, model, outcome.rows),
        *momentum_doubts(master, model, facts),
        *staleness_doubts(master, facts),
        *density_doubts(master, facts),
    ]
    for text in found:
        log.warning("%s", text)
    return found


def facts_of(outcome: Outcome, n_params: int, minibatches_before: int) -> Facts:
    """What the rules look at."""
    stats = outcome.stats.values()
    workers = sum(rows > 0 for rows in outcome.rows)
    publications = sum(values.get("publications", 0.0) for values in stats)
    hits = sum(values.get("hits", 0.0) for values in stats)
    taus = [values["tau"] for values in stats if "tau" in values]
    minibatches = minibatches_before + outcome.minibatches
    earlier = minibatches / outcome.minibatches if outcome.minibatches else 1.0
    return Facts(
        workers=workers,
        minibatches=minibatches,
        publications=earlier * publications / workers if workers else 0.0,
        sent_fraction=hits / (publications * n_params) if publications else 0.0,
        tau=sum(taus) / len(taus) if taus else 0.0,
        staleness=outcome.staleness_minibatches,
        waiting=waiting_in_residuals(stats, workers, outcome.minibatches),
    )


def momentum_doubts(
    master: SharedTrainingMaster, model: FlatModel, facts: Facts
) -> list[str]:
    """Momentum that counts each worker's own steps."""
    k = facts.workers
    if master.horizon != "worker" or k <= 2 or not isinstance(model, Paced):
        return []
    for name, change in model.horizons(k).items():
        momenta = [float(m) for m in BEFORE_THE_ARROW.findall(change)]
        acting = max(momenta, default=0.0) ** (1 / k)
        if acting > MOMENTUM_MAX:
            return [
                f"{name} {max(momenta):g} counts each worker's own steps: on {k} workers it acts"
                f" like {acting:.3g} on one machine; say horizon='fit', which makes it {change}"
            ]
    return []


def staleness_doubts(master: SharedTrainingMaster, facts: Facts) -> list[str]:
    """Others' learning that comes too late."""
    k = facts.workers
    if k < 2 or facts.staleness <= ROUNDS_MAX * k:
        return []
    loose = master.max_staleness is None or master.max_staleness > 1
    remedy = (
        f"max_staleness=1 (it was {master.max_staleness}) bounds it"
        if loose
        else "steps are short beside a message: a larger batch_size_per_worker, fewer workers or"
        " max_lead=1 bring it down"
    )
    return [
        f"updates were {facts.staleness:.0f} minibatches old on average when they were committed,"
        f" {facts.staleness / k:.1f} rounds of {k} workers; above two rounds accuracy suffers:"
        f" {remedy}"
    ]


def density_doubts(master: SharedTrainingMaster, facts: Facts) -> list[str]:
    """Too much or too little is sent, or what is sent cannot carry what is learnt: one of these."""
    if not facts.sent_fraction:
        return []  # that is told apart
    waits_long = facts.waiting > WAITING_MAX * facts.minibatches
    return (
        fraction_doubts(master, facts, waits_long)
        or (steps_doubts(master, facts) if waits_long else [])
        or (tau_doubts(master, facts) if waits_long else [])
    )


def fraction_doubts(
    master: SharedTrainingMaster, facts: Facts, waits_long: bool
) -> list[str]:
    """A sent fraction far from the wanted one.

    Too little only where learning waits: of a gradient that is sparse itself all may be sent.
    """
    band = wanted_fractions(algorithm_of(master.threshold))
    if band is None or facts.publications < SETTLED:
        return []
    low, high = band
    too_much = facts.sent_fraction > FAR * high and master.warm_up is None
    if not too_much and not (facts.sent_fraction < low / FAR and waits_long):
        return []
    wanted = f"{low:.0e}" if low == high else f"{low:.0e} to {high:.0e}"
    change = f"larger than {facts.tau:.1e}" if too_much else f"smaller than {facts.tau:.1e}"
    return [
        f"{facts.sent_fraction:.1e} of all parameters were sent in each publication, where"
        f" {wanted} are wanted: take a tau {change} (the workers' mean at the end), or"
        " threshold='auto', which finds it at once"
    ]


def wanted_fractions(threshold: ThresholdAlgorithm) -> tuple[float, float] | None:
    """Bounds of the sent fraction that it aims at; a fixed one should be where "auto" is."""
    match threshold:
        case AutoThreshold() | AdaptiveThreshold():
            return threshold.sent_fraction_min, threshold.sent_fraction_max
        case TargetSparsityThreshold():
            return threshold.sent_fraction_target, threshold.sent_fraction_target
        case FixedThreshold():
            return wanted_fractions(AutoThreshold())
        case _:
            return None


def steps_doubts(master: SharedTrainingMaster, facts: Facts) -> list[str]:
    """A parameter that a worker sends less than once in the whole fit."""
    several = getattr(algorithm_of(master.threshold), "levels", 1) > 1
    reach = LEVELS_REACH if several else 1.0
    if facts.sent_fraction * facts.publications * reach >= 1:
        return []
    needed = 1 / (facts.sent_fraction * reach)
    return [
        f"each worker published {facts.publications:.0f} times, and sent"
        f" {facts.sent_fraction:.1e} of its parameters each time: of most it has sent little that"
        f" it learnt. From {needed:.0f} publications on that is better: fewer workers, more epochs,"
        " a smaller batch_size_per_worker, or a threshold that sends more"
    ]


def tau_doubts(master: SharedTrainingMaster, facts: Facts) -> list[str]:
    """A tau that cannot carry what is learnt, so that residuals grow."""
    auto = isinstance(algorithm_of(master.threshold), AutoThreshold)
    remedy = "send more (sent_fraction_max)" if auto else "take threshold='auto' or a larger tau"
    return [
        f"what workers learnt waited {facts.waiting:.0f} of {facts.minibatches} minibatches in"
        f" residuals on average: tau, {facts.tau:.1e} at the end, does not carry it; {remedy}"
    ]
