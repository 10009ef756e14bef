"""Run logs for tests: that of a real fit, in which a worker was killed, and changes to it.

``killed_worker.jsonl`` is of four workers on two executors of one machine, 20 ms of sleep in each
step; one Python worker and one media driver were killed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

REAL = Path(__file__).parent / "killed_worker.jsonl"
PLOTS = 10  # of a fit that is done

Line = dict[str, Any]


def real() -> list[Line]:
    return [json.loads(line) for line in REAL.read_text().splitlines()]


def written(path: Path, lines: Iterable[Line], torn: str = "") -> Path:
    """As ``JsonLines`` does; NaN and infinity as Python writes them."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + torn)
    return path


def long(iterations: int) -> list[Line]:
    """The same fit with so many iterations, which rise and fall, and an epoch for each tenth."""
    begin, *middle, end = real()
    steps = [line for line in middle if line["event"] == "iteration"]
    others = [line for line in middle if line["event"] == "worker_change"]
    epochs = [line for line in middle if line["event"] == "epoch"]
    lines = [
        steps[-1]
        | {"seconds": i / 2, "minibatches": i, "examples": 32 * i, "loss": 2 / (1 + i % 97)}
        for i in range(iterations)
    ]
    ends = [
        epochs[i % len(epochs)] | {"seconds": 5.0 * i, "epoch": i + 1}
        for i in range(iterations // 10)
    ]
    return [begin, *others, *lines, *ends, end]
