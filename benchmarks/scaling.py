"""Predictions of `sparkstrom scaling` compared with real fits, a worker on each host behind a link.

    python -m benchmarks.scaling --json

Each case is a fit on real executors in network namespaces (root; ``benchmarks.hosts``). Its steps
mostly sleep, so that several workers can share two cores. The formula gets the time of a step from
a fit of one worker, and the density of updates from the measured fit, and predicts:

    step_ms                    from a minibatch of a worker to its next one
    updates_per_step           of a worker
    staleness                  mean, in minibatches
    worker_sent, driver_sent   bytes per step that leave a worker's host, and the driver's host

Each key has the measured value. The key with ``_reckoned`` has the predicted value, and the one
with ``_deviation`` has predicted / measured - 1. ``waits_for`` is what limits the steps according
to the formula. The driver's host also has a worker, whose traffic with the driver uses no link.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.hosts import lacking
from benchmarks.slow_link import data
from benchmarks.slow_link.figures import figures
from benchmarks.slow_link.running import Link, observe
from benchmarks.slow_link.systems import OURS
from benchmarks.slow_link.trial import Trial
from sparkstrom.base.units import parse_rate
from sparkstrom.planning.scaling import TOPOLOGIES, ScalingInputs, ThroughputPrediction

LEARNING_RATE = 1e-3
WIDTHS = (1024, 1024)
WIRE_S = 0.0002  # latency between two namespaces, through the switch


def main() -> int:
    """Print one line per case."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workers", default="1,2,4", help="numbers, by comma; the first must be 1")
    parser.add_argument(
        "--rate", default="100mbit,10mbit,2mbit", help="of links, as in tc, by comma"
    )
    parser.add_argument("--step-ms", type=int, default=200, help="time that each step sleeps")
    parser.add_argument("--seconds", type=float, default=30.0, help="limit of training per fit")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    args = parser.parse_args()
    counts = [int(count) for count in args.workers.split(",")]
    if counts[0] != 1:
        parser.error(f"--workers {args.workers}: begin with 1, which gives the step")
    if (reason := lacking()) is not None:
        print(f"benchmarks.scaling: {reason}", file=sys.stderr)
        return 2
    for rate in args.rate.split(","):
        for found in measure_cases(rate, counts, args.step_ms, args.seconds):
            print(json.dumps(found) if args.json else format_result(found), flush=True)
    return 0


def measure_cases(
    rate: str, counts: list[int], step_ms: int, seconds: float
) -> Iterator[dict[str, Any]]:
    """Measure all numbers of workers with one rate; the first must be one worker."""
    alone_s = 0.0
    for workers in counts:
        found = run_fit(rate, workers, step_ms, seconds)
        if "summary" not in found:
            raise RuntimeError(f"{workers} workers at {rate}: {found['ended']}; {found.get('log')}")
        alone_s = alone_s or found["ms_per_step"] / 1000
        yield compare_with_formula(rate, workers, found, alone_s)


def run_fit(rate: str, workers: int, step_ms: int, seconds: float) -> dict[str, Any]:
    """Run a fit; return its figures as in ``benchmarks.slow_link``."""
    trial = Trial(
        system=OURS, rate=LEARNING_RATE, seed=0, workers=workers, widths=WIDTHS,
        optimizer="adam", epochs=1000, limit_s=seconds,
    )  # fmt: skip
    conf = {"spark.sparkstrom.debug_longer_iterations": str(step_ms)}
    return figures(trial, observe(Link(rate), [trial], conf))


def compare_with_formula(
    rate: str, workers: int, found: dict[str, Any], alone_s: float
) -> dict[str, Any]:
    """Return the measured and the predicted values."""
    summary, steps = found["summary"], found["steps"]
    n_params = data.copy_parameters(data.make_module(WIDTHS, 0)).size
    work = ScalingInputs(
        n_params=n_params,
        step_s=alone_s,
        density=summary["sent_fraction"],
        link_bits_s=parse_rate(rate),
        latency_s=WIRE_S,
        beside_driver=1,
        encoding_s=0.0,  # included in the step of one worker
    )
    pace: ThroughputPrediction = TOPOLOGIES["star"](work, workers)
    result = {
        "rate": rate,
        "workers": workers,
        "density": summary["sent_fraction"],
        "updates_per_step": round(summary["updates"] / max(1, steps * workers), 3),
        "updates_per_step_reckoned": round(1 / pace.steps_per_update, 3),
        **compare_value("step_ms", found["ms_per_step"], 1000 * pace.step_s),
        **compare_value("staleness", summary["staleness_mean"], pace.staleness),
        "waits_for": pace.limited_by,
    }
    if workers > 1:
        others = found["bytes_training"] - found["bytes_driver_training"]
        result |= compare_value("worker_sent", others / (workers - 1) / steps, pace.worker_sent)
        driver = found["bytes_driver_training"] / steps
        result |= compare_value("driver_sent", driver, pace.driver_sent)
    return result


def compare_value(name: str, measured: float, reckoned: float) -> dict[str, Any]:
    """Return a measured value, the predicted one and the deviation, which is None of 0."""
    return {
        name: round(measured, 3),
        f"{name}_reckoned": round(reckoned, 3),
        f"{name}_deviation": round(reckoned / measured - 1, 3) if measured else None,
    }


def format_result(found: dict[str, Any]) -> str:
    """Return a result as text."""
    return (
        f"{found['rate']:>8} {found['workers']} workers: {found['step_ms']:.0f} ms a step, "
        f"predicted {found['step_ms_reckoned']:.0f} ({found['step_ms_deviation']:+.0%}); "
        f"staleness {found['staleness']}, predicted {found['staleness_reckoned']}"
    )


if __name__ == "__main__":
    sys.exit(main())
