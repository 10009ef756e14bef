"""Measure the times of a rehearsed fit on this machine: a step, encoding and applying an update."""

from __future__ import annotations

import pickle
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from sparkstrom.codec.messages import Payload
from sparkstrom.data.row_store import Batches
from sparkstrom.models.base import FlatModel
from sparkstrom.planning.scaling import ADD_ENTRY_S, ENCODE_ENTRY_S, SAMPLE_S, SCAN_S
from sparkstrom.rehearsal.conditions import StepTimes
from sparkstrom.rehearsal.fit import FitRecipe
from sparkstrom.runtime.theta import Theta
from sparkstrom.worker.task_environment import TaskEnvironment, place_model
from sparkstrom.worker.training_task import load_initial_theta, make_replica

WARM_STEPS, STEPS_MIN, STEPS_MAX = 3, 8, 40  # warm steps are not counted
BUDGET_S = 5.0  # time after which no step beyond STEPS_MIN is measured
MAD_TO_DEVIATION = 1.4826  # of a normal distribution
JITTER_MAX = 0.5  # on a busy machine, more says little about a cluster
DENSITY = 3e-3  # typical share of parameters in an update, for times that are not measured


def measure_times(recipe: FitRecipe, batches: Batches) -> StepTimes:
    """Take some training steps and return the median times, rounded to two digits.

    The rounding keeps two rehearsals on a quiet machine equal; to repeat one exactly, give its
    times.
    """
    model: FlatModel = pickle.loads(recipe.packed)
    job = replace(recipe.job(1), model=model)
    place_model(job, TaskEnvironment(0, 0, "host", "executor", Path(tempfile.gettempdir())))
    replica, other = make_replica(job, load_initial_theta(job)), load_initial_theta(job)
    other.create_local()
    steps: list[float] = []
    encodings: list[float] = []
    additions: list[float] = []
    until_s, taken = time.monotonic() + BUDGET_S, 0
    while taken < STEPS_MIN or (taken < STEPS_MAX and time.monotonic() < until_s):
        batch = batches.get(0, taken % batches.batches_per_epoch)
        steps.append(_timed(replica.step, batch))
        began_s = time.perf_counter()
        payload = replica.publish()
        encodings.append(time.perf_counter() - began_s)
        if payload is not None:
            additions.append(_timed(_add, other, payload))
        taken += 1
    step_s = median(steps[WARM_STEPS:])
    deviation = MAD_TO_DEVIATION * median(abs(each - step_s) for each in steps[WARM_STEPS:])
    return StepTimes(
        _rounded(step_s),
        min(JITTER_MAX, _rounded(deviation / step_s)),
        _rounded(median(encodings[WARM_STEPS:])),
        _rounded(median(additions[WARM_STEPS:] or [0.0])),
    )


def estimate_times(n_params: int, step_s: float, jitter: float) -> StepTimes:
    """Return times for a given step: those of encoding and applying follow from constants."""
    entries = DENSITY * n_params
    encode_s = SAMPLE_S + SCAN_S * n_params + ENCODE_ENTRY_S * entries
    return StepTimes(step_s, jitter, _rounded(encode_s), _rounded(ADD_ENTRY_S * entries))


def _add(theta: Theta, payload: Payload) -> None:
    """Add an update to a replica, as another worker does."""
    theta.add(theta.read(payload))


def _timed(work: Callable[..., object], *arguments: Any) -> float:
    """Call a function and return how long it took, in seconds."""
    began_s = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - began_s


def _rounded(value: float) -> float:
    """Return a number with two significant digits."""
    return float(f"{value:.2g}")
