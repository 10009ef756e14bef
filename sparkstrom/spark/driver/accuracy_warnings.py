"""Accuracy warnings: what makes a loss of accuracy against one machine likely, and the remedy.

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
    AUTO,
    AdaptiveThreshold,
    AutoThreshold,
    FixedThreshold,
    TargetSparsityThreshold,
    ThresholdAlgorithm,
    algorithm_of,
    levels_of,
)
from sparkstrom.models.base import FlatModel, Paced
from sparkstrom.observe.fit_totals import FitTotals
from sparkstrom.runtime.fit_state import Outcome
from sparkstrom.spark.driver.horizon_notes import horizon_warnings
from sparkstrom.spark.driver.training_master import SharedTrainingMaster

log = logging.getLogger(__name__)

FAR = 5.0  # times beyond what was wanted of the sent fraction
SETTLED = 10  # publications of a worker, before which a sent fraction says little
CLIPPED_MAX = 0.1  # of what left residuals; where half was, accuracy fell, and at 5 % it did not
WAITING_MAX = 0.5  # of the fit, in residuals; up to 0.4 was seen where nothing was lost
MOMENTUM_MAX = 0.95  # that it acts like: more is rarely wanted, and 0.9 is there from three workers
AGE_MAX = 30.0  # minibatches; ``executor.AGE`` and what comes beside it
ROUNDS_MAX = 1.5  # where that is more: one is what there is at least
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
    clipped: float  # share of the mass that left residuals, but nobody got


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
    total = FitTotals.of(outcome.stats.values())
    workers, publications = sum(rows > 0 for rows in outcome.rows), total.publications
    minibatches = minibatches_before + outcome.minibatches
    earlier = minibatches / outcome.minibatches if outcome.minibatches else 1.0
    return Facts(
        workers=workers,
        minibatches=minibatches,
        publications=earlier * publications / workers if workers else 0.0,
        sent_fraction=total.hits / (publications * n_params) if publications else 0.0,
        tau=total.tau or 0.0,
        staleness=outcome.staleness_minibatches,
        waiting=total.waiting_in_residuals(workers, outcome.minibatches),
        clipped=total.mass_clipped / total.mass_left if total.mass_left else 0.0,
    )


def momentum_doubts(master: SharedTrainingMaster, model: FlatModel, facts: Facts) -> list[str]:
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
    k, publish_every = facts.workers, master.publish_every
    if k < 2 or facts.staleness <= max(AGE_MAX, ROUNDS_MAX * k):
        return []
    if master.max_staleness != AUTO:
        remedy = f"max_staleness='auto' bounds it (it was {master.max_staleness})"
    elif isinstance(publish_every, int) and publish_every > 1:
        remedy = f"publish_every='auto' holds back less (it was {publish_every})"
    else:
        remedy = (
            "steps are short beside a message: a larger batch_size_per_worker, fewer workers or"
            " max_lead=1 bring it down"
        )
    return [
        "when an update was committed, its worker had not seen the others' last"
        f" {facts.staleness:.0f} minibatches, {facts.staleness / k:.1f} rounds of {k} workers;"
        f" beyond {max(AGE_MAX, ROUNDS_MAX * k):.0f} accuracy suffers: {remedy}"
    ]


def density_doubts(master: SharedTrainingMaster, facts: Facts) -> list[str]:
    """Whether what is sent can carry what is learnt; the first of these that it can be blamed on.

    Nothing sent at all is another warning.
    """
    if not facts.sent_fraction:
        return []
    waits_long = facts.waiting > WAITING_MAX * facts.minibatches
    found = clipping_doubts(master, facts) or fraction_doubts(master, facts, waits_long)
    if waits_long:
        found = found or steps_doubts(master, facts) or tau_doubts(master, facts)
    return found


def clipping_doubts(master: SharedTrainingMaster, facts: Facts) -> list[str]:
    """A tau so small that residuals grow until they are clipped."""
    if facts.clipped <= CLIPPED_MAX:
        return []
    remedy = "take threshold='auto', a larger tau or levels=4"
    if isinstance(algorithm_of(master.threshold), AutoThreshold):
        remedy = "clip less, as by residual_post_processor=ResidualClipping(20.0)"
    return [
        f"{facts.clipped:.0%} of what was learnt was lost by clipping residuals: tau,"
        f" {facts.tau:.2g} at the end, is too small to carry it; {remedy}"
    ]


def fraction_doubts(master: SharedTrainingMaster, facts: Facts, waits_long: bool) -> list[str]:
    """A sent fraction far from the wanted one.

    Too little only where learning waits: of a gradient that is sparse itself all may be sent.
    """
    algorithm = algorithm_of(master.threshold)
    band = wanted_fractions(algorithm)
    if isinstance(algorithm, AutoThreshold):  # which finds tau itself; small models send more
        return []
    if band is None or facts.publications < SETTLED:
        return []
    low, high = band
    too_much = facts.sent_fraction > FAR * high and master.warm_up is None
    too_little = facts.sent_fraction < low / FAR and waits_long
    if not too_much and not too_little:
        return []
    wanted = f"{low:.2g}" if low == high else f"{low:.2g} to {high:.2g}"
    return [
        f"a publication sent {facts.sent_fraction:.2g} of all parameters, where {wanted} is wanted:"
        f" take a {'larger' if too_much else 'smaller'} tau than {facts.tau:.2g}, which it was at"
        " the end, or threshold='auto', which finds it at once"
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
    several = levels_of(algorithm_of(master.threshold)) > 1
    needed = 1 / (facts.sent_fraction * (LEVELS_REACH if several else 1.0))
    if facts.publications >= needed:
        return []
    return [
        f"a short fit: each worker published {facts.publications:.0f} times, and to share most of"
        f" what it learns it needs {needed:.0f}; take fewer workers, more epochs or a smaller"
        " batch_size_per_worker"
    ]


def tau_doubts(master: SharedTrainingMaster, facts: Facts) -> list[str]:
    """A tau that does not carry what is learnt, although it is sent often enough."""
    if isinstance(algorithm_of(master.threshold), AutoThreshold):
        return []  # which follows what waits
    return [
        f"what was learnt waited in residuals for {facts.waiting:,.0f} minibatches on average, of"
        f" {facts.minibatches:,}: tau, {facts.tau:.2g} at the end, does not carry it; take"
        " threshold='auto', a larger tau or levels=4"
    ]
