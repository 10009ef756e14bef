"""Run logs for tests: that of a real fit in which processes were killed, and modified copies.

``killed_worker.jsonl`` is from four workers on two executors of one machine, with 20 ms of sleep
in each step; one Python worker and one media driver were killed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

REAL = Path(__file__).parent / "killed_worker.jsonl"
PLOTS = 10  # plots on the page of a completed fit

Line = dict[str, Any]


def read_real_log() -> list[Line]:
    """Return the lines of the real run log."""
    return [json.loads(line) for line in REAL.read_text().splitlines()]


def write_log(path: Path, lines: Iterable[Line], torn: str = "") -> Path:
    """Write the lines like ``JsonLines``, but NaN and infinity as Python does, then ``torn``."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + torn)
    return path


def make_long_log(iterations: int) -> list[Line]:
    """Return the real fit with this many iterations, a rising and falling loss, and n/10 epochs."""
    begin, *middle, end = read_real_log()
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
