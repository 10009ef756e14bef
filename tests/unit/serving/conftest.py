"""A model whose calls tests can block and inspect, and fixtures for parallel inference."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from sparkstrom import InferenceMode, ParallelInference
from sparkstrom.models import DenseNetwork
from sparkstrom.models.base import Columns, arrays_of
from sparkstrom.serving import ModelPool

WIDTH = 3
DEADLINE_S = 60.0
MODES = list(InferenceMode)


class Watch:
    """The recorded calls and the locks that all copies of a probe share."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, str]] = []  # (rows, thread)
        self.entered = threading.Semaphore(0)
        self.gate = threading.Event()
        self.gate.set()


class Probe(DenseNetwork):
    """A model that adds its first parameter to the features and fails if a feature is negative."""

    watch = Watch()

    def predict(self, features: Columns) -> Any:
        array = arrays_of(features)[0]
        self.watch.calls.append((len(array), threading.current_thread().name))
        self.watch.entered.release()
        assert self.watch.gate.wait(DEADLINE_S)
        if (array < 0).any():
            raise ArithmeticError(f"{array.min()} is negative")
        return array + self._require_bound()[0]


def probe(value: float) -> tuple[Probe, Any]:
    """Return a probe and parameters with which it adds ``value``."""
    model = Probe([WIDTH, WIDTH])
    return model, np.full(model.n_params, value, np.float32)


def rows(value: float, count: int = 1) -> Any:
    return np.full((count, WIDTH), value, np.float32)


def serving(value: float = 0.0, **options: Any) -> ParallelInference:
    model, parameters = probe(value)
    return ParallelInference(model, parameters=parameters, **options)


class BlockedServer:
    """A server with one worker that is blocked in its first request, so that others wait."""

    def __init__(self, watch: Watch, **options: Any) -> None:
        watch.gate.clear()
        self.watch, self.inference = watch, serving(workers=1, **options)
        self.first = self.inference.submit(rows(0))
        assert watch.entered.acquire(timeout=DEADLINE_S)

    def go_on(self) -> None:
        self.watch.gate.set()

    def calls(self) -> list[int]:
        """Close, and return the number of rows of each call after the first."""
        self.inference.close()
        return [count for count, _ in self.watch.calls[1:]]


def wait_until_threads_wait(generation: ModelPool, count: int) -> None:
    """Wait until this many threads wait for a model."""
    until_s = time.monotonic() + DEADLINE_S
    while len(generation._waiting) < count:
        assert time.monotonic() < until_s, "nobody waits"


@pytest.fixture
def watch() -> Iterator[Watch]:
    Probe.watch = Watch()
    yield Probe.watch
    Probe.watch.gate.set()
