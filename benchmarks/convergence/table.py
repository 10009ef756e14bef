"""Print a Markdown table of results with error bars.

    python -m benchmarks.convergence --systems ours,ddp --json ... > results
    python -m benchmarks.convergence.table results [more results]

The table has a row per task, optimizer and length in minibatches, and a column per number of
workers. A cell has the gaps of sparkstrom and DDP to one process in points of accuracy or in loss,
means over the seeds:

    ours / DDP +- E     E: the standard error of the difference between the two
    (DDP's best)        with the best learning rate for so many workers, if ``ddp-best`` ran

The better of ours and DDP is bold if they differ by more than twice E. E combines two independent
parts: how the difference varies between seeds, and the error over the test rows, which are paired.
"""

from __future__ import annotations

import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Result = dict[str, Any]
Row = tuple[str, str, int]  # task, optimizer, minibatches


class Difference(NamedTuple):
    """How much worse ours is than DDP, and the standard error of this difference."""

    mean: float
    error: float

    @property
    def is_certain(self) -> bool:
        """Whether the difference is larger than twice its error."""
        return abs(self.mean) > 2 * self.error


def difference(results: list[Result]) -> Difference:
    """Return the difference to DDP for ours' results of all seeds; none may have diverged."""
    gaps = np.array([result["behind_ddp"] for result in results])
    of_rows = float(np.mean([result["behind_ddp_error"] for result in results]))
    of_seeds = gaps.std(ddof=1) / math.sqrt(gaps.size) if gaps.size > 1 else math.inf
    return Difference(float(gaps.mean()), math.hypot(of_seeds, of_rows))


def cell(ours: list[Result], ddp: list[Result], best: list[Result]) -> str:
    """Return a cell's text for the results of all seeds; ``best`` are those of ``ddp-best``."""
    if not ours or not ddp:
        return ""
    points = 100 if ours[0]["metric"] == "accuracy" else 1
    digits = 1 if points == 100 else 3

    def gap(results: list[Result]) -> str:
        gaps = [result["gap"] for result in results]
        lost = sum(gap is None for gap in gaps)
        if lost:
            return f"{lost} of {len(gaps)} diverged"
        return f"{points * np.mean(gaps):.{digits}f}".replace("-", "\N{MINUS SIGN}")

    left, right = gap(ours), gap(ddp)
    tuned = f" ({gap(best)})" if best else ""
    if any(result["gap"] is None for result in [*ours, *ddp]):
        return f"{left} / {right}{tuned}"
    found = difference(ours)
    if found.is_certain:
        left, right = (f"**{left}**", right) if found.mean < 0 else (left, f"**{right}**")
    return f"{left} / {right} \N{PLUS-MINUS SIGN} {points * found.error:.{digits}f}{tuned}"


def table(results: Iterable[Result]) -> Iterator[str]:
    """Yield the lines of a table in Markdown."""
    cells: dict[tuple[Row, int, str], list[Result]] = defaultdict(list)
    for result in results:
        row = (result["task"], result["optimizer"], result["minibatches"])
        cells[row, result["workers"], result["system"]].append(result)
    rows = sorted({row for row, _, _ in cells})
    workers = sorted({number for _, number, _ in cells if number > 1})
    yield (
        "| task, optimizer | minibatches | one process | "
        + " | ".join(f"k = {number}" for number in workers)
        + " |"
    )
    yield "|---" * (len(workers) + 3) + "|"
    for row in rows:
        of_row = [each for (its, _, _), found in cells.items() if its == row for each in found]
        one = np.mean([result["one"] for result in of_row])
        gaps = [
            cell(*(cells[row, k, system] for system in ("ours", "ddp", "ddp-best")))
            for k in workers
        ]
        yield f"| {row[0]}, {row[1]} | {row[2]:,} | {one:.3f} | " + " | ".join(gaps) + " |"


def main() -> int:
    """Print the table of the results in the named files, or in standard input."""
    texts = [Path(name).read_text() for name in sys.argv[1:]] or [sys.stdin.read()]
    lines = [line for text in texts for line in text.splitlines() if line.strip()]
    print("\n".join(table(map(json.loads, lines))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
