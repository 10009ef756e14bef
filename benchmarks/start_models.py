"""Models that record the time of their first events in each process, for ``benchmarks.start``."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from sparkstrom.models import DenseNetwork, Sgd


class Stamped:
    """A mixin for models that appends a JSON line to file ``marks`` at the first of each event."""

    marks: Path

    def mark(self, name: str) -> None:
        """Record a name with the host's monotonic time, unless this object has recorded it."""
        seen = self.__dict__.setdefault("_seen", set())
        if name not in seen:
            seen.add(name)
            line = json.dumps({"pid": os.getpid(), "name": name, "s": time.monotonic()})
            with self.marks.open("a") as file:
                file.write(line + "\n")

    def check(self, *rows: Any) -> None:
        """Record that the worker has rows."""
        self.mark("rows")
        super().check(*rows)  # type: ignore[misc]

    def bind(self, params: Any) -> None:
        """Record that the model has its parameters."""
        self.mark("bound")
        super().bind(params)  # type: ignore[misc]

    def step(self, batch: Any) -> float:
        """Train a step; record the first."""
        loss: float = super().step(batch)  # type: ignore[misc]
        self.mark("step")
        return loss

    def __getstate__(self) -> Any:
        return self.marks, super().__getstate__()

    def __setstate__(self, state: Any) -> None:
        self.marks, rest = state
        super().__setstate__(rest)  # type: ignore[misc]
        self.marks = state[0]
        self.mark("imported")


class StampedDense(Stamped, DenseNetwork):
    """The built-in network, with recorded times."""


def make_dense() -> Any:
    """Return a small network in NumPy."""
    return StampedDense([64, 256, 256, 10], updater=Sgd(0.1), seed=1)


def make_torch() -> Any:
    """Return a network of the same size in PyTorch."""
    from benchmarks.start_torch import StampedTorch

    return StampedTorch.create_small()
