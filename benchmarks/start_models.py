"""Models that say when they begin, in each process: ``benchmarks.start`` reads it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from sparkstrom.models import DenseNetwork, Sgd


class Stamped:
    """Mixed in before a model's class: ``marks`` gets a JSON line at each first time."""

    marks: Path

    def mark(self, name: str) -> None:
        """Now, on the host's monotonic clock; the first time of this name in this object."""
        seen = self.__dict__.setdefault("_seen", set())
        if name not in seen:
            seen.add(name)
            line = json.dumps({"pid": os.getpid(), "name": name, "s": time.monotonic()})
            with self.marks.open("a") as file:
                file.write(line + "\n")

    def check(self, *rows: Any) -> None:
        """Rows have come."""
        self.mark("rows")
        super().check(*rows)  # type: ignore[misc]

    def bind(self, params: Any) -> None:
        """The replica is made."""
        self.mark("bound")
        super().bind(params)  # type: ignore[misc]

    def step(self, batch: Any) -> float:
        """Training has begun."""
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
    """The built-in network."""


def dense() -> Any:
    """A small network in NumPy."""
    return StampedDense([64, 256, 256, 10], updater=Sgd(0.1), seed=1)


def torch() -> Any:
    """The same in PyTorch."""
    from benchmarks.start_torch import StampedTorch

    return StampedTorch.small()
