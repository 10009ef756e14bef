"""The systems by name."""

from __future__ import annotations

from benchmarks.averaging.rounds_here import KNOWN

OURS = "sparkstrom"
PEERS = ("dense", "fp16", "powersgd", "diloco", "sparseloco")


def is_ours(system: str) -> bool:
    """A fit on Spark's executors: with defaults, or rounds of averaging."""
    return system == OURS or KNOWN.fullmatch(system) is not None
