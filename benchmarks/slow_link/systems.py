"""The names of the systems."""

from __future__ import annotations

from benchmarks.averaging.rounds_here import KNOWN

OURS = "sparkstrom"
PEERS = ("dense", "fp16", "powersgd", "diloco", "sparseloco")


def is_ours(system: str) -> bool:
    """Return whether a system is sparkstrom's: gradient sharing, or rounds of averaging."""
    return system == OURS or KNOWN.fullmatch(system) is not None
