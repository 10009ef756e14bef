"""Compute the figures of a trial from its events and samples.

The keys are explained in ``benchmarks.slow_link``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from benchmarks.slow_link.running import Observed, Sample
from benchmarks.slow_link.trial import Trial, first_held

Event = dict[str, Any]
Curve = list[tuple[float, float, float]]  # seconds of training, accuracy, steps of a worker
CURVE_POINTS = 60


def figures(trial: Trial, observed: Observed) -> dict[str, Any]:
    """Return the figures of one observed trial; those that are not known are None."""
    events = [event for event in observed.events if event["trial"] == trial.rate]
    began = find_event(events, "began")
    if began is None:
        return make_failed_figures(events, observed.log)
    called_s = (find_event(events, "called") or {"at_s": observed.launched_s})["at_s"]
    began_s = began["at_s"]
    last = find_event(events, "ended") or find_event(events, "stopped") or events[-1]
    error = last.get("error")
    seconds = last["at_s"] - began_s
    minibatches = max((event.get("minibatches", 0) for event in events), default=0)
    curve = make_curve(trial, events, began_s)
    accuracies = [accuracy for _, accuracy, _ in curve]
    held = first_held(accuracies, trial.wanted)
    seconds_to, _, steps_to = curve[held] if held is not None else (None, None, None)
    samples = observed.samples
    whole = used(samples, called_s, last["at_s"])
    training = used(samples, began_s, last["at_s"])
    until = used(samples, began_s, began_s + seconds_to) if seconds_to is not None else None
    return {
        "seconds_to": round_figure(seconds_to),
        "startup_s": round_figure(began_s - called_s),
        "startup_next_s": round_figure((find_event(events, "again") or {}).get("startup_s")),
        "accuracy": accuracies[-1] if curve else None,
        "accuracy_best": max(accuracies, default=None),
        "seconds": round_figure(seconds),
        "ended": error or ("limit" if seconds >= trial.limit_s else "epochs"),
        "steps": minibatches / trial.workers,
        "steps_wanted": trial.steps,
        "steps_to": steps_to,
        "ms_per_step": divide(1000 * seconds * trial.workers, minibatches),
        "cpu_ms_per_step": divide(1000 * training.cpu_s, minibatches),
        "bytes": sum(whole.tx),
        "bytes_training": sum(training.tx),
        "bytes_to": sum(until.tx) if until is not None else None,
        "bytes_driver": whole.tx[0],
        "bytes_driver_training": training.tx[0],
        "bytes_driver_received": whole.rx[0],
        "curve": thinned(curve),
        **({"summary": last["summary"]} if "summary" in last else {}),
    }


def make_failed_figures(events: Sequence[Event], log: str) -> dict[str, Any]:
    """Return the figures of a trial in which training did not begin."""
    ended = find_event(events, "ended")
    return {"seconds_to": None, "ended": (ended or {}).get("error", "it did not begin"), "log": log}


def find_event(events: Sequence[Event], name: str) -> Event | None:
    """Return the first event of a name, or None."""
    return next((event for event in events if event["event"] == name), None)


def make_curve(trial: Trial, events: Sequence[Event], began_s: float) -> Curve:
    """Return the evaluations as (seconds of training, accuracy, steps of a worker)."""
    return [
        (event["at_s"] - began_s, event["accuracy"], event["minibatches"] / trial.workers)
        for event in events
        if event["event"] == "evaluated"
    ]


def thinned(curve: Curve) -> list[list[float]]:
    """Return at most ``CURVE_POINTS`` points of a curve, with the last one."""
    every = -(-len(curve) // CURVE_POINTS) or 1
    kept = curve[::-1][::every][::-1]
    return [[round(seconds, 2), accuracy, round(steps, 1)] for seconds, accuracy, steps in kept]


def used(samples: Sequence[Sample], from_s: float, to_s: float) -> Sample:
    """Return bytes and processor time between two times, interpolated between samples."""
    first, last = interpolate(samples, from_s), interpolate(samples, to_s)
    tx = tuple(b - a for a, b in zip(first.tx, last.tx, strict=True))
    rx = tuple(b - a for a, b in zip(first.rx, last.rx, strict=True))
    return Sample(to_s, tx, rx, last.cpu_s - first.cpu_s)


def interpolate(samples: Sequence[Sample], at_s: float) -> Sample:
    """Interpolate the counters at a time; outside the samples, return the first or the last one."""
    if at_s <= samples[0].at_s:
        return samples[0]
    for a, b in pairwise(samples):
        if at_s <= b.at_s:
            part = (at_s - a.at_s) / (b.at_s - a.at_s)
            return Sample(
                at_s,
                tuple(round(x + part * (y - x)) for x, y in zip(a.tx, b.tx, strict=True)),
                tuple(round(x + part * (y - x)) for x, y in zip(a.rx, b.rx, strict=True)),
                a.cpu_s + part * (b.cpu_s - a.cpu_s),
            )
    return samples[-1]


def round_figure(value: float | None) -> float | None:
    """Round to three decimals; None stays None."""
    return None if value is None else round(value, 3)


def divide(total: float, count: float) -> float | None:
    """Return total / count, rounded to three decimals; None if count is 0."""
    return round(total / count, 3) if count else None


def score(trial: Trial, events: Sequence[Event]) -> float:
    """Return the mean accuracy over the trial's steps, by which a learning rate is chosen.

    Accuracy is interpolated between evaluations. The mean is higher for a rate that learns faster,
    and for one that learns more. After the end of a trial that failed, accuracy counts as 0.
    """
    mine = [event for event in events if event["trial"] == trial.rate]
    began = find_event(mine, "began")
    if began is None:
        return 0.0
    points = [(0.0, 0.0)]
    points += [(steps, accuracy) for _, accuracy, steps in make_curve(trial, mine, began["at_s"])]
    area = sum((b - a) * (f + g) / 2 for (a, f), (b, g) in pairwise(points))
    return area / trial.steps
