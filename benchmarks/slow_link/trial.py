"""A trial, which is one training by one system, and its record, a file of events.

The program on host 0 writes the record, and the benchmark reads it. Every ``copy_s`` seconds the
program copies the parameters, so that an evaluation costs the training only a copy. After training
it evaluates the copies in order until the wanted accuracy is held, and the last one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.slow_link import data

BATCH_ROWS = 32  # of each worker
HELD = 3  # evaluations in a row
COPY_S_MIN = 1.0
COPIES_BYTES_MAX = 2 << 30  # of all copies in memory; large models are copied less often


@dataclass(frozen=True, slots=True)
class Trial:
    """The options of a training: plain values, which are passed as JSON."""

    system: str
    rate: float  # of learning
    seed: int
    workers: int
    widths: tuple[int, ...]
    optimizer: str
    epochs: int
    limit_s: float  # of training
    wanted: float = 2.0  # accuracy that ends evaluations; above 1: all copies are evaluated
    choosing: bool = False

    @property
    def train_part(self) -> str:
        """Name of the rows to train on."""
        return "choose" if self.choosing else "train"

    @property
    def test_part(self) -> str:
        """Name of the rows to measure on."""
        return "validate" if self.choosing else "test"

    @property
    def steps(self) -> int:
        """Steps of one worker."""
        return self.epochs * (data.ROWS[self.train_part] // self.workers // BATCH_ROWS)

    def copy_s(self, n_params: int) -> float:
        """Return the seconds from one copy to the next."""
        return max(COPY_S_MIN, self.limit_s * 4 * n_params / COPIES_BYTES_MAX)

    def text(self) -> str:
        """Return the trial as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Trial:
        """Parse what ``text`` returns."""
        values = json.loads(text)
        return cls(**{**values, "widths": tuple(values["widths"])})


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of the parameters."""

    at_s: float  # time.monotonic(), the same for all processes on the machine
    minibatches: int  # of all workers together
    parameters: NDArray[np.float32]


class Record:
    """The writer of a trial's events; each line is an object with ``event`` and ``at_s``."""

    def __init__(self, path: Path, trial: Trial) -> None:
        self._path, self.trial = path, trial
        self._copies: list[Copy] = []
        self.began_s: float | None = None
        self._due_s = 0.0
        self._copy_s = COPY_S_MIN

    def event(self, name: str, at_s: float | None = None, **values: Any) -> None:
        """Append an event to the file."""
        at_s = time.monotonic() if at_s is None else at_s
        line = json.dumps({"event": name, "trial": self.trial.rate, "at_s": at_s, **values})
        with self._path.open("a") as file:
            file.write(line + "\n")

    def began(self, n_params: int, at_s: float | None = None) -> None:
        """Record that all workers have the initial parameters and the first step begins."""
        self.began_s = time.monotonic() if at_s is None else at_s
        self._copy_s = self.trial.copy_s(n_params)
        self._due_s = self.began_s + self._copy_s
        self.event("began", self.began_s)

    @property
    def due(self) -> bool:
        """Whether it is time for a copy."""
        return time.monotonic() >= self._due_s

    @property
    def over(self) -> bool:
        """Whether the trial's time is over."""
        return self.began_s is not None and self._seconds() >= self.trial.limit_s

    def _seconds(self) -> float:
        assert self.began_s is not None
        return time.monotonic() - self.began_s

    def put_aside(
        self, parameters: NDArray[np.float32], minibatches: int, at_s: float | None = None
    ) -> None:
        """Keep parameters, which must be a copy that the caller does not change."""
        at_s = time.monotonic() if at_s is None else at_s
        self._copies.append(Copy(at_s, minibatches, parameters))
        self._due_s = max(self._due_s + self._copy_s, time.monotonic())
        self.event("copied", at_s, minibatches=minibatches)

    def evaluate(self) -> None:
        """Evaluate the copies in order until the wanted accuracy is held, and the last copy."""
        rows = data.make_rows(self.trial.test_part)
        module = data.make_module(self.trial.widths, self.trial.seed)
        accuracies: list[float] = []
        copies, self._copies = self._copies, []
        for copy in copies:
            held = first_held(accuracies, self.trial.wanted) is not None
            if held and copy is not copies[-1]:
                continue
            data.load_parameters(module, copy.parameters)
            accuracies.append(data.compute_accuracy(module, rows))
            values = {"minibatches": copy.minibatches, "accuracy": round(accuracies[-1], 4)}
            self.event("evaluated", copy.at_s, **values)


def first_held(accuracies: Sequence[float], wanted: float, times: int = HELD) -> int | None:
    """Return the index of the first of ``times`` accuracies >= ``wanted`` in a row, or None."""
    run = 0
    for index, accuracy in enumerate(accuracies):
        run = run + 1 if accuracy >= wanted else 0
        if run == times:
            return index - times + 1
    return None
