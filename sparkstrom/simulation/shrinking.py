"""Shrinking: the smallest run that a seed still fails in, found by leaving things out.

One thing after another is switched off, halved or widened, and what keeps the kind of violation
is kept. What is left is worth reading.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from sparkstrom.simulation.conditions import changed, drawn
from sparkstrom.simulation.faults import NO_FAULTS, Faults
from sparkstrom.simulation.run_sizes import Size
from sparkstrom.simulation.runs import Result, play

SHRINK_S = 20.0  # of the clock on the wall
WIDE = {"log_bytes": 1_000_000, "window_bytes": 10_000, "downlink_bytes": 10_000, "max_lead": 1000}
LESS = ("nodes", "epochs", "batches", "kept_files", "empty_partitions")


@dataclass(frozen=True, slots=True)
class Small:
    """What is left: sizes, faults, and what happens under them."""

    size: Size
    faults: Faults
    result: Result

    def given(self, seed: int, mode: str) -> dict[str, Any]:
        """What must be said beside the seed, the nodes and ``--calm`` to see it again."""
        size, _ = drawn(seed, self.size.nodes, mode)
        return {
            field.name: getattr(mine, field.name)
            for mine, base in ((self.size, size), (self.faults, NO_FAULTS))
            for field in fields(mine)
            if getattr(mine, field.name) != getattr(base, field.name)
        }


def kind(violations: list[str]) -> str:
    """Two runs fail alike if this is the same: the invariant's name, or the exception's."""
    return violations[0].split(":")[0] if violations else ""


def shrink(result: Result, nodes: int, mode: str, given: dict[str, Any]) -> Small:
    """Leave out what the first violation does not need, while there is time."""
    until_s = time.monotonic() + SHRINK_S
    small = Small(*changed(*drawn(result.seed, nodes, mode), given), result)
    changing = True
    while changing:
        changing = False
        for size, faults in _smaller(small.size, small.faults):
            if time.monotonic() > until_s:
                return small
            again = _play(result.seed, mode, size, faults)
            if kind(again.violations) == kind(result.violations):
                small, changing = Small(size, faults, again), True
                break
    return small


def _play(seed: int, mode: str, size: Size, faults: Faults) -> Result:
    given = {f.name: getattr(part, f.name) for part in (size, faults) for f in fields(part)}
    return play(seed, size.nodes, mode, given)


def _smaller(size: Size, faults: Faults) -> Iterator[tuple[Size, Faults]]:
    """Runs with one thing less, the boldest first."""
    for field in fields(faults):
        usual, now = getattr(NO_FAULTS, field.name), getattr(faults, field.name)
        if now != usual:
            yield size, replace(faults, **{field.name: usual})
    for name in LESS:
        now = getattr(size, name)
        least = 0 if name in ("kept_files", "empty_partitions") else 1
        for value in sorted({least, now // 2, now - 1}):
            if least <= value < now:
                yield changed(size, faults, {name: value})
    for field in fields(faults):
        now = getattr(faults, field.name)
        if isinstance(now, int) and now > 1:
            for value in (now // 2, now - 1):
                yield size, replace(faults, **{field.name: value})
    for name, wide in WIDE.items():
        if getattr(size, name) != wide:
            yield changed(size, faults, {name: wide})
