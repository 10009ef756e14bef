"""Step measurement: how long a model's step takes on this machine, and an update's encoding."""

from __future__ import annotations

import runpy
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from sparkstrom.base.errors import UsageError
from sparkstrom.encoding.encoder import Encoder
from sparkstrom.encoding.grid import first_exponent, round_to_grid
from sparkstrom.encoding.thresholds import AutoThreshold
from sparkstrom.models.base import Batch, FlatModel, arrays_of, no_model

WARM_STEPS, STEPS_MIN, STEPS_MAX = 3, 8, 50
BUDGET_S = 10.0  # of measuring
WANTS = "a script that leaves `model`, as SparkNetwork takes it, and `batch`, (features, labels)"


@dataclass(frozen=True, slots=True)
class StepMeasurement:
    """Medians, in seconds."""

    n_params: int
    step_s: float
    encoding_s: float


def measure_script(path: Path, density: float) -> StepMeasurement:
    """Run a script and measure what it leaves. Raise UsageError where that is not enough.

    ``density``: entries of an update per parameter. What the script raises, it raises here.
    """
    if not path.is_file():
        raise UsageError(f"--measure {path}: there is no such file; name {WANTS}")
    with _imports_beside(path):
        left = runpy.run_path(str(path))
    lacking = [name for name in ("model", "batch") if name not in left]
    if lacking:
        raise UsageError(f"--measure {path}: it leaves no {' and no '.join(lacking)}; name {WANTS}")
    model, batch = left["model"], left["batch"]
    if (why := no_model(model)) is not None:
        raise UsageError(f"--measure {path} leaves no model: {why}")
    if not isinstance(batch, tuple) or len(batch) not in (2, 3):
        kind = type(batch).__name__
        raise UsageError(f"--measure {path}: `batch` is a {kind}, not a pair; name {WANTS}")
    features, labels, *weights = map(_as_arrays, batch)
    for what, columns in (("features", features), ("labels", labels)):
        if any(np.ndim(one) == 0 for one in arrays_of(columns)):
            raise UsageError(f"--measure {path}: the {what} of `batch` are no rows; name {WANTS}")
    return measure(model, Batch(features, labels, *weights), density)


@contextmanager
def _imports_beside(path: Path) -> Iterator[None]:
    """As ``python script.py`` has it: what lies beside the script can be imported by it."""
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def _as_arrays(columns: Any) -> Any:
    """Arrays of torch tensors, lists and numbers; of several, each of them."""
    if columns is None:
        return ()  # of labels, where the model has its own loss
    if isinstance(columns, dict):
        return {name: _as_arrays(column) for name, column in columns.items()}
    if isinstance(columns, tuple):
        return tuple(map(_as_arrays, columns))
    return columns.detach().cpu().numpy() if hasattr(columns, "detach") else np.asarray(columns)


def measure(model: FlatModel, batch: Batch, density: float) -> StepMeasurement:
    """Take some steps as a worker does, each with its publication."""
    if batch.rows == 0:
        raise UsageError("`batch` has no rows: give as many as a minibatch of the fit has")
    model.check(batch.features, batch.labels)
    initial = model.initial()
    k = first_exponent(initial)
    theta = round_to_grid(initial, k)
    local = theta.copy()
    model.bind(local)
    encoder = Encoder(theta.size, k, AutoThreshold(density, density))
    steps: list[float] = []
    publications: list[float] = []
    until_s = time.monotonic() + BUDGET_S
    while len(steps) < STEPS_MIN or (len(steps) < STEPS_MAX and time.monotonic() < until_s):
        steps.append(_seconds(lambda: model.step(batch)))
        publications.append(_seconds(lambda: encoder.publish(local, theta)))
    return StepMeasurement(
        theta.size, median(steps[WARM_STEPS:]), median(publications[WARM_STEPS:])
    )


def _seconds(work: Callable[[], Any]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s
