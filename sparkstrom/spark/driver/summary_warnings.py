"""Summary warnings: what went otherwise than it should in a fit that is done, and the remedy."""

from __future__ import annotations

from collections.abc import Sequence

from sparkstrom.observe.fit_totals import FitTotals
from sparkstrom.runtime.fit_state import Outcome
from sparkstrom.spark.driver.summary_figures import tau_of

SKEW = 1.5  # largest partition / smallest, from which on it is said


def warnings_of(outcome: Outcome, total: FitTotals, executors: int, overflows: int) -> list[str]:
    """All that there are, the master's notes first.

    ``executors`` of the application; 0 where their number is not fixed.
    """
    return [
        *outcome.notes,
        *skew_warnings(outcome.rows, len(outcome.executors), executors),
        *_overflow_warning(overflows, outcome.first_overflow),
        *_differing(outcome.hashes),
        *_fresh_updaters(total.fresh_updaters),
        *_unmeasured(outcome),
        *_nothing_learnt(outcome.minibatches, total),
        *_unknown_counters(total.unknown),
    ]


def skew_warnings(rows: list[int], executors_used: int, executors: int) -> list[str]:
    """What the spread of rows and workers turned out to be, where it is worth a word."""
    out = []
    empty = [i for i, count in enumerate(rows) if count == 0]
    if empty:
        out.append(
            f"{len(empty)} of {len(rows)} partitions have no rows (first: {empty[0]}): their "
            "workers had nothing to do; use fewer workers, or on Spark repartition='always'"
        )
    filled = [count for count in rows if count > 0]
    if filled and max(filled) > SKEW * min(filled) and max(filled) - min(filled) > len(rows):
        out.append(
            f"partitions have between {min(filled):,} and {max(filled):,} rows: the largest one "
            "decides how long an epoch takes; on Spark repartition='always' evens them out"
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


def _unmeasured(outcome: Outcome) -> list[str]:
    """Names the partitions of held-out rows alone whose worker left before the last epoch."""
    told = [one.training for one in outcome.stats.values() if one.training is not None]
    newest: dict[int, int] = {}
    for one in told:
        finished = one.epochs.finished if one.epochs is not None else -1
        newest[one.partition] = max(newest.get(one.partition, -1), finished)
    trained = [i for i, rows in enumerate(outcome.rows) if rows > 0]
    whole = min((newest.get(partition, -1) for partition in trained), default=-1)
    measure = {one.partition for one in told if one.rows_held_out} - {*trained}
    return [
        f"partition {partition} has only held-out rows, and its worker was lost or gave up its task"
        " slot: epochs after that were measured without them; choose held-out rows from every"
        " partition, or on Spark use repartition='always'"
        for partition in sorted(measure)
        if newest[partition] < whole
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
        f"{tau_of(total):.2e}), so the fit delivers the parameters it began with: train longer, or "
        "lower a threshold that you have set"
    ]


def _unknown_counters(names: Sequence[str]) -> list[str]:
    if not names:
        return []
    return [
        f"workers told {len(names)} counters that this driver does not know, which are in no "
        f"figure: {', '.join(names)}; please report this as a bug"
    ]
