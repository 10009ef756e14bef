"""Measure what a rehearsal needs to simulate a fit: the times of its operations, and its links.

The operations are a training step, encoding an update, and adding another worker's update. If a
fit averages the workers' parameters in rounds, a worker's parameters count as its update.

``measure_times`` measures them in this process. If the user calls ``rehearse`` with
``measure=True``, one Spark task per worker calls ``measure_times`` and also measures links;
``summarize_workers`` combines the results.
"""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from sparkstrom.codec.messages import Payload
from sparkstrom.data.row_store import Batches
from sparkstrom.models.base import FlatModel
from sparkstrom.observe.reporting.summary_rendering import format_number
from sparkstrom.planning.scaling import ADD_ENTRY_S, ENCODE_ENTRY_S, SAMPLE_S, SCAN_S
from sparkstrom.rehearsal.conditions import StepTimes
from sparkstrom.rehearsal.fit import FitRecipe
from sparkstrom.rounds.averaging import WeightedSum
from sparkstrom.runtime.theta import Theta
from sparkstrom.worker.task_environment import TaskEnvironment, place_model
from sparkstrom.worker.training_task import load_initial_theta, make_replica

WARM_STEPS, STEPS_MIN, STEPS_MAX = 3, 8, 40  # warm steps are not counted
BUDGET_S = 5.0  # time after which no step beyond STEPS_MIN is measured
MAD_TO_DEVIATION = 1.4826  # standard / median absolute deviation of a normal distribution
JITTER_MAX = 0.5  # more comes from a busy machine, and says little about a cluster
# Per parameter, to pickle a vector of parameters and to add it to a weighted sum in float64;
# measured on one core of a Xeon, with 5 M parameters.
PACK_PARAM_S, ADD_PARAM_S = 8e-9, 12e-9
PICKLE = 5  # pickle protocol of results of training in rounds
DENSITY = 3e-3  # typical share of parameters in an update, for times that are not measured


@dataclass(frozen=True, slots=True)
class LinkMeasurement:
    """A link between two hosts, measured by the receiver."""

    bits_s: float | None  # rate in bits per second; None: no burst of datagrams arrived
    round_trip_s: float | None  # None: no ping was answered


@dataclass(frozen=True, slots=True)
class WorkerMeasurement:
    """What the task of one worker measured."""

    host: str
    times: StepTimes
    # Links from other hosts, by the host's name. Only one task per host measures them.
    links: Mapping[str, LinkMeasurement]
    problem: str = ""  # why links were not measured; "": nothing went wrong


@dataclass(frozen=True, slots=True)
class ClusterMeasurement:
    """The measured conditions of a cluster."""

    times: StepTimes  # of an average worker: each value is the median over all workers
    link_bits_s: float | None  # rate of the slowest host's link; None: not measured
    latency_s: float | None  # in one direction; None: not measured
    text: str  # the measured values, or why some are missing, in one line for the user


def count_rows_to_measure(recipe: FitRecipe) -> int:
    """Return how many rows ``measure_times`` needs, the held-out ones included."""
    return math.ceil(STEPS_MAX * recipe.master.batch_size_per_worker / (1 - recipe.fraction))


def measure_times(recipe: FitRecipe, batches: Batches, environment: TaskEnvironment) -> StepTimes:
    """Train some steps on ``batches``; return the median time of each operation and the jitter.

    The jitter is the relative standard deviation of a step's time, estimated from the median
    absolute deviation. Values are rounded to two significant digits, so that two rehearsals on a
    quiet machine are usually equal. To repeat a rehearsal exactly, give ``rehearse`` the times in
    its result. Raise the model's errors, and TrainingError for a loss that is not finite.
    """
    model: FlatModel = pickle.loads(recipe.packed)
    job = replace(recipe.job(1), model=model)
    place_model(job, environment)
    replica, other = make_replica(job, load_initial_theta(job)), load_initial_theta(job)
    other.create_local()
    total = WeightedSum(recipe.model.n_params)
    steps: list[float] = []
    encodings: list[float] = []
    additions: list[float] = []
    until_s, taken = time.monotonic() + BUDGET_S, 0
    while taken < STEPS_MIN or (taken < STEPS_MAX and time.monotonic() < until_s):
        batch = batches.get(0, taken % batches.batches_per_epoch)
        steps.append(_time_call(replica.step, batch))
        taken += 1
        if recipe.rounds is not None:
            encodings.append(_time_call(pickle.dumps, recipe.parameters, PICKLE))
            additions.append(_time_call(total.add, recipe.parameters, 1.0))
            continue
        began_s = time.perf_counter()
        payload = replica.publish()
        encodings.append(time.perf_counter() - began_s)
        if payload is not None:
            additions.append(_time_call(_add, other, payload))
    step_s = median(steps[WARM_STEPS:])
    deviation = MAD_TO_DEVIATION * median(abs(each - step_s) for each in steps[WARM_STEPS:])
    return StepTimes(
        _rounded(step_s),
        min(JITTER_MAX, _rounded(deviation / step_s)),
        _rounded(median(encodings[WARM_STEPS:])),
        _rounded(median(additions[WARM_STEPS:] or [0.0])),
    )


def summarize_workers(measurements: Sequence[WorkerMeasurement]) -> ClusterMeasurement:
    """Combine what the tasks of all workers measured.

    Times are medians over workers. A host's link is as fast as the fastest stream of datagrams that
    it sent or received, and the slowest host's link counts; the latency is half the median round
    trip. Both are None if no ping was answered, or if no stream of some host arrived.
    """
    times = [each.times for each in measurements]
    found = StepTimes(
        *(
            _rounded(median(getattr(each, name) for each in times))
            for name in ("step_s", "jitter", "encode_s", "apply_s")
        )
    )
    fastest: dict[str, float] = {}  # bits per second, by host
    round_trips = []
    for each in measurements:
        for other, link in each.links.items():
            for host in (each.host, other):
                fastest[host] = max(fastest.get(host, 0.0), link.bits_s or 0.0)
            if link.round_trip_s is not None:
                round_trips.append(link.round_trip_s)
    bits_s = latency_s = None
    if round_trips and min(fastest.values()) > 0:
        bits_s = _rounded(min(fastest.values()))
        latency_s = _rounded(median(round_trips) / 2)
    steps = sorted(each.step_s for each in times)
    hosts = sorted({each.host for each in measurements})
    text = (
        f"measured by {len(times)} workers on {len(hosts)} host{'s' if len(hosts) > 1 else ''}: a"
        f" step takes {format_number(found.step_s * 1e3)} ms ({format_number(steps[0] * 1e3)} to"
        f" {format_number(steps[-1] * 1e3)})"
    )
    problems = sorted({each.problem for each in measurements if each.problem})
    if len(hosts) < 2:
        text += "; there is no link between hosts to measure"
    elif bits_s is not None and latency_s is not None:
        rate, latency = format_number(bits_s / 1e6), format_number(latency_s * 1e3)
        text += f", links {rate} Mbit/s, latency {latency} ms"
        if problems:
            text += f"; some hosts were not measured: {problems[0]}"
    elif problems:
        text += f"; links were not measured: {problems[0]}"
    else:
        text += "; links were not measured: UDP is blocked between hosts, see sparkstrom doctor"
    return ClusterMeasurement(found, bits_s, latency_s, text)


def estimate_times(
    n_params: int, step_s: float, jitter: float, *, is_dense: bool = False
) -> StepTimes:
    """Return the times of a worker's operations for a given ``step_s`` and ``jitter``.

    The times to encode and to apply an update are estimated from the number of parameters.
    ``is_dense``: whether updates are whole vectors of parameters, as in training in rounds.
    """
    if is_dense:
        pack_s, add_s = (_rounded(n_params * each) for each in (PACK_PARAM_S, ADD_PARAM_S))
        return StepTimes(step_s, jitter, pack_s, add_s)
    entries = DENSITY * n_params
    encode_s = SAMPLE_S + SCAN_S * n_params + ENCODE_ENTRY_S * entries
    return StepTimes(step_s, jitter, _rounded(encode_s), _rounded(ADD_ENTRY_S * entries))


def _add(theta: Theta, payload: Payload) -> None:
    """Add an update to the replica of another worker."""
    theta.add(theta.read(payload))


def _time_call(work: Callable[..., object], *arguments: Any) -> float:
    """Call a function and return how long it took, in seconds."""
    began_s = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - began_s


def _rounded(value: float) -> float:
    """Return a number rounded to two significant digits."""
    return float(f"{value:.2g}")
