"""Likely reasons why a gradient-sharing fit was less accurate than training on one machine.

Each rule is a function of the options and of a few statistics; it returns a list, which is empty or
contains one warning with a remedy. The limits come from fits whose accuracy was compared with that
of one machine (``python -m benchmarks.convergence``). A worker sends a change of a parameter once
it reaches the threshold tau; until then, the change waits in the worker's residual.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from sparkstrom.encoding.thresholds import AUTO, AutoThreshold, HasTargetFractions, step_size_count
from sparkstrom.fit.summary import HyperparameterChanges
from sparkstrom.models.base import FlatModel, Paced
from sparkstrom.models.momentum_scaling import UNINSPECTABLE, MomentumChange
from sparkstrom.observe.telemetry import FitTotals
from sparkstrom.options.gradient_sharing import DDP, MEAN, SharedTrainingMaster
from sparkstrom.runtime.master_control import FitOutcome

log = logging.getLogger(__name__)
SENT_FRACTION_FACTOR = 5.0  # warn if the sent fraction is this many times off its target
PUBLICATIONS_MIN = 10  # per worker; with fewer, the sent fraction is not meaningful
CLIPPED_MAX = 0.1  # see ``clipped_share`` below; 0.5 cost accuracy, 0.05 did not
WAITING_MAX = 0.5  # share of the fit that changes wait in residuals; 0.4 cost no accuracy
MOMENTUM_MAX = 0.95  # effective momentum on one machine; more is rarely intended
STALENESS_MAX = 30.0  # minibatches; slightly above ``options.gradient_sharing.STALENESS_TARGET``
STALENESS_ROUNDS_MAX = 1.5  # rounds, with many workers; one round cannot be avoided
MULTILEVEL_SPEEDUP = 2.0  # mean number of thresholds of an entry, with several levels


@dataclass(frozen=True, slots=True)
class FitStatistics:
    """Statistics of a finished fit, on which its accuracy warnings depend.

    A publication is one call of ``Encoder.publish``, which sends at most one update. A mass is a
    sum of absolute values of parameter changes.
    """

    workers: int  # number of workers with rows
    minibatches: int  # trained by all workers, in this fit and the earlier ones that it continued
    publications: float  # mean per worker, extrapolated from this fit to the earlier ones
    sent_fraction: float  # entries sent / (publications x parameters)
    tau: float  # mean of the workers' thresholds at the end
    # Mean number of other workers' minibatches that were committed before a worker's minibatch, but
    # that the worker did not have yet when it trained.
    staleness: float
    waiting: float  # mean time that changes wait in residuals, in minibatches of all workers
    clipped_share: float  # mass clipped / mass that left residuals: sent, clipped or scaled away


def accuracy_warnings(
    master: SharedTrainingMaster, model: FlatModel, outcome: FitOutcome, minibatches_before: int
) -> list[str]:
    """Return all accuracy warnings about a finished fit, with remedies; also log them.

    Args:
        master: The options of the fit.
        model: The trained model.
        outcome: The result of the fit.
        minibatches_before: Number of minibatches of the earlier fits that this fit continued.
    """
    statistics = collect_statistics(outcome, model.n_params, minibatches_before)
    warnings = [
        *horizon_warnings(master, model, outcome.rows),
        *momentum_warnings(master, model, statistics),
        *staleness_warnings(master, statistics),
        *density_warnings(master, statistics),
    ]
    for text in warnings:
        log.warning("%s", text)
    return warnings


def collect_statistics(
    outcome: FitOutcome, n_params: int, minibatches_before: int
) -> FitStatistics:
    """Return the statistics of a finished fit that the accuracy warnings depend on.

    ``minibatches_before``: number of minibatches of the earlier fits that this fit continued.
    """
    total = FitTotals.from_counters(outcome.stats.values())
    training, workers = total.training, sum(rows > 0 for rows in outcome.rows)
    publications = training.publications
    minibatches = minibatches_before + outcome.minibatches
    earlier = minibatches / outcome.minibatches if outcome.minibatches else 1.0
    return FitStatistics(
        workers=workers,
        minibatches=minibatches,
        publications=earlier * publications / workers if workers else 0.0,
        sent_fraction=training.hits / (publications * n_params) if publications else 0.0,
        tau=training.tau or 0.0,
        staleness=outcome.staleness_minibatches,
        waiting=total.residual_wait_minibatches(workers, outcome.minibatches),
        clipped_share=training.mass_clipped / training.mass_left if training.mass_left else 0.0,
    )


def scaled_hyperparameters(
    master: SharedTrainingMaster, model: FlatModel, rows: list[int], summed: int | None = None
) -> HyperparameterChanges:
    """Return how momentum and schedules were rescaled because several workers train.

    One worker takes only its share of the fit's steps, so momentum and schedules that count its own
    steps would last too long. The result maps "workers" to their number, and names to changes; it
    is {} if nothing was rescaled.

    Args:
        master: the options of the fit.
        model: the model that was trained.
        rows: number of rows by partition.
        summed: number of workers that all updates together counted as at the end; None: by
            ``master``.
    """
    workers = sum(count > 0 for count in rows)
    if master.minibatch_horizon != "fit" or workers < 2 or not isinstance(model, Paced):
        return {}
    acting = min(workers, summed or master.summed_workers_max or workers)
    changes = {name: str(change) for name, change in model.horizons(acting).items()}
    if acting < workers:
        changes["weight of an update"] = f"1 -> {acting / workers:.4g}"
    return {"workers": workers, **changes} if changes else {}


def horizon_warnings(master: SharedTrainingMaster, model: FlatModel, rows: list[int]) -> list[str]:
    """Return a warning if momentum or schedules could not be rescaled to the fit's minibatches."""
    adapted = scaled_hyperparameters(master, model, rows)
    if master.minibatch_horizon != "fit" or sum(count > 0 for count in rows) < 2:
        return []
    if not isinstance(model, Paced):
        return [
            f"a {type(model).__name__} counts each worker's own steps, so momentum and schedules"
            " that were tuned on one machine last too long on several; implement keep_pace"
            " (sparkstrom.models.base.Paced), or set horizon='worker'"
        ]
    if UNINSPECTABLE in adapted:
        return [
            f"parts of the optimizer cannot be inspected ({adapted[UNINSPECTABLE]}): momentum"
            " inside counts each worker's own steps; build it with optax.inject_hyperparams, or"
            " lower the momentum m to m ** workers yourself and set horizon='worker'"
        ]
    return []


def momentum_warnings(
    master: SharedTrainingMaster, model: FlatModel, fit: FitStatistics
) -> list[str]:
    """Return a warning if momentum is not scaled to the number of workers and is too strong."""
    k = fit.workers
    if master.minibatch_horizon != "worker" or k <= 2 or not isinstance(model, Paced):
        return []
    if master.scaling == DDP or master.aggregation == MEAN:  # DDP's rule, or its mean
        return []
    for name, change in model.horizons(k).items():
        momenta = change.momenta if isinstance(change, MomentumChange) else ()
        acting = max(momenta, default=0.0) ** (1 / k)
        if acting > MOMENTUM_MAX:
            return [
                f"{name} {max(momenta):g} counts each worker's own steps, so on {k} workers it acts"
                f" like {acting:.3g} on one machine; set horizon='fit', which changes it to"
                f" {change}"
            ]
    return []


def staleness_warnings(master: SharedTrainingMaster, fit: FitStatistics) -> list[str]:
    """Return a warning, with a remedy, if other workers' updates arrived too late."""
    k, publish_every = fit.workers, master.publish_every
    if k < 2 or fit.staleness <= max(STALENESS_MAX, STALENESS_ROUNDS_MAX * k):
        return []
    if master.max_staleness != AUTO:
        remedy = f"set max_staleness='auto' (it was {master.max_staleness})"
    elif isinstance(publish_every, int) and publish_every > 1:
        remedy = f"set publish_every='auto' (it was {publish_every})"
    else:
        remedy = (
            "steps are short compared with messages; use a larger batch_size_per_worker, fewer"
            " workers or max_lead=1"
        )
    return [
        f"updates were late: {fit.staleness:.0f} minibatches of the other workers on average,"
        f" {fit.staleness / k:.1f} rounds of {k} workers; above"
        f" {max(STALENESS_MAX, STALENESS_ROUNDS_MAX * k):.0f} accuracy suffers: {remedy}"
    ]


def density_warnings(master: SharedTrainingMaster, fit: FitStatistics) -> list[str]:
    """Return at most one warning, with a remedy, if updates contained too little or too much.

    Too little means that what workers learned was clipped, or waited long in their residuals.
    Return none if nothing was sent at all, because ``fit.summary`` warns about that.
    """
    if not fit.sent_fraction:
        return []
    waits_long = fit.waiting > WAITING_MAX * fit.minibatches
    warnings = clipping_warnings(master, fit) or sent_fraction_warnings(master, fit, waits_long)
    if waits_long and not warnings:
        warnings = short_fit_warnings(master, fit) or threshold_warnings(master, fit)
    return warnings


def clipping_warnings(master: SharedTrainingMaster, fit: FitStatistics) -> list[str]:
    """Return a warning if tau is so small that residuals grow until they are clipped."""
    if fit.clipped_share <= CLIPPED_MAX:
        return []
    remedy = "use threshold='auto', a larger tau or levels=4"
    if isinstance(master.threshold_algorithm, AutoThreshold):
        remedy = "clip less, as with residual_post_processor=ResidualClipping(20.0)"
    return [
        f"residual clipping discarded {fit.clipped_share:.0%} of what was learned: tau"
        f" ({fit.tau:.2g} at the end) is too small; {remedy}"
    ]


def sent_fraction_warnings(
    master: SharedTrainingMaster, fit: FitStatistics, waits_long: bool
) -> list[str]:
    """Return a warning if the sent fraction is far from the threshold algorithm's target.

    ``waits_long``: whether changes wait long in residuals. Only then does a small fraction count,
    because the gradient itself may be sparse. Return none for an algorithm without a target, for
    AutoThreshold, which chooses tau itself, and for few publications.
    """
    algorithm = master.threshold_algorithm
    band = algorithm.wanted_fractions if isinstance(algorithm, HasTargetFractions) else None
    if isinstance(algorithm, AutoThreshold):  # it chooses tau itself; small models send more
        return []
    if band is None or fit.publications < PUBLICATIONS_MIN:
        return []
    low, high = band
    too_much = fit.sent_fraction > SENT_FRACTION_FACTOR * high and master.warm_up is None
    too_little = fit.sent_fraction < low / SENT_FRACTION_FACTOR and waits_long
    if not too_much and not too_little:
        return []
    wanted = f"{low:.2g}" if low == high else f"{low:.2g} to {high:.2g}"
    return [
        f"a publication sent {fit.sent_fraction:.2g} of all parameters instead of {wanted}: use a"
        f" {'larger' if too_much else 'smaller'} tau (it was {fit.tau:.2g} at the end), or"
        " threshold='auto', which finds it"
    ]


def short_fit_warnings(master: SharedTrainingMaster, fit: FitStatistics) -> list[str]:
    """Return a warning if a worker sent each parameter less than once in the fit, on average."""
    several = step_size_count(master.threshold_algorithm) > 1
    needed = 1 / (fit.sent_fraction * (MULTILEVEL_SPEEDUP if several else 1.0))
    if fit.publications >= needed:
        return []
    return [
        f"this fit was too short for {fit.workers} workers: each sent {fit.publications:.0f}"
        f" updates (aim for {needed:.0f}), so most of what they learned was never shared; train"
        " longer, use fewer workers, or reduce batch_size_per_worker"
    ]


def threshold_warnings(master: SharedTrainingMaster, fit: FitStatistics) -> list[str]:
    """Return a warning that tau is too small, for a fit whose changes waited long in residuals.

    Return none for AutoThreshold, which adapts tau to the waiting changes.
    """
    if isinstance(master.threshold_algorithm, AutoThreshold):
        return []
    return [
        f"changes waited in residuals for {fit.waiting:,.0f} of {fit.minibatches:,} minibatches on"
        f" average: tau ({fit.tau:.2g} at the end) is too small; use threshold='auto', a larger"
        " tau or levels=4"
    ]
