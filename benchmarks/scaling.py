"""`sparkstrom scaling` against real runs: hosts behind links of their own rate, a worker on each.

    python -m benchmarks.scaling --json

Each case is a fit on real executors in network namespaces (root; ``benchmarks.hosts``), with steps
that sleep, so that two cores can hold several workers. One worker alone gives the step; the
messages' density is the run's own. With these the formula says what so many workers come to:

    step_ms                    from a minibatch of a worker to its next
    updates_per_step           of a worker
    staleness                  minibatches, mean
    worker_sent, driver_sent   bytes per step that left such a host

each with ``_reckoned`` and ``_deviation``, reckoned / measured - 1, and ``waits_for`` as the
formula has it. On host 0 there are the driver and a worker, which its link does not see.
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
WIRE_S = 0.0002  # one way between two namespaces, with the switch


def main() -> int:
    """One line per case."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workers", default="1,2,4", help="the first must be 1")
    parser.add_argument("--rate", default="100mbit,10mbit,2mbit", help="of links, as tc has it")
    parser.add_argument("--step-ms", type=int, default=200, help="of sleep in each step")
    parser.add_argument("--seconds", type=float, default=30.0, help="of training, at most")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    args = parser.parse_args()
    counts = [int(count) for count in args.workers.split(",")]
    if counts[0] != 1:
        parser.error(f"--workers {args.workers}: begin with 1, which gives the step")
    if (reason := lacking()) is not None:
        print(f"benchmarks.scaling: {reason}", file=sys.stderr)
        return 2
    for rate in args.rate.split(","):
        for found in cases(rate, counts, args.step_ms, args.seconds):
            print(json.dumps(found) if args.json else line(found), flush=True)
    return 0


def cases(rate: str, counts: list[int], step_ms: int, seconds: float) -> Iterator[dict[str, Any]]:
    """All of one rate; the first is one worker alone."""
    alone_s = 0.0
    for workers in counts:
        found = measured(rate, workers, step_ms, seconds)
        if "summary" not in found:
            raise RuntimeError(f"{workers} workers at {rate}: {found['ended']}; {found.get('log')}")
        alone_s = alone_s or found["ms_per_step"] / 1000
        yield compared(rate, workers, found, alone_s)


def measured(rate: str, workers: int, step_ms: int, seconds: float) -> dict[str, Any]:
    """A fit's figures, as ``benchmarks.slow_link`` has them."""
    trial = Trial(
        system=OURS, rate=LEARNING_RATE, seed=0, workers=workers, widths=WIDTHS,
        optimizer="adam", epochs=1000, limit_s=seconds,
    )  # fmt: skip
    conf = {"spark.sparkstrom.debug_longer_iterations": str(step_ms)}
    return figures(trial, observe(Link(rate), [trial], conf))


def compared(rate: str, workers: int, found: dict[str, Any], alone_s: float) -> dict[str, Any]:
    """What was measured, and what the formula says."""
    summary, steps = found["summary"], found["steps"]
    n_params = data.flat_of(data.make_module(WIDTHS, 0)).size
    work = ScalingInputs(
        n_params=n_params,
        step_s=alone_s,
        density=summary["sent_fraction"],
        link_bits_s=parse_rate(rate),
        latency_s=WIRE_S,
        beside_driver=1,
        encoding_s=0.0,  # it is in one worker's step
    )
    pace: ThroughputPrediction = TOPOLOGIES["star"](work, workers)
    result = {
        "rate": rate,
        "workers": workers,
        "density": summary["sent_fraction"],
        "updates_per_step": round(summary["updates"] / max(1, steps * workers), 3),
        "updates_per_step_reckoned": round(1 / pace.steps_per_update, 3),
        **beside("step_ms", found["ms_per_step"], 1000 * pace.step_s),
        **beside("staleness", summary["staleness_mean"], pace.staleness),
        "waits_for": pace.limited_by,
    }
    if workers > 1:
        others = found["bytes_training"] - found["bytes_driver_training"]
        result |= beside("worker_sent", others / (workers - 1) / steps, pace.worker_sent)
        driver = found["bytes_driver_training"] / steps
        result |= beside("driver_sent", driver, pace.driver_sent)
    return result


def beside(name: str, measured: float, reckoned: float) -> dict[str, Any]:
    """A figure with the formula's; the deviation of nothing is none."""
    return {
        name: round(measured, 3),
        f"{name}_reckoned": round(reckoned, 3),
        f"{name}_deviation": round(reckoned / measured - 1, 3) if measured else None,
    }


def line(found: dict[str, Any]) -> str:
    """For people."""
    return (
        f"{found['rate']:>8} {found['workers']} workers: {found['step_ms']:.0f} ms a step, "
        f"reckoned {found['step_ms_reckoned']:.0f} ({found['step_ms_deviation']:+.0%}); "
        f"staleness {found['staleness']}, reckoned {found['staleness_reckoned']}"
    )


if __name__ == "__main__":
    sys.exit(main())
