"""How long a worker's node may wait: its limits, its waits, and pauses of its whole process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from sparkstrom.protocol.common.children import DEFAULT_FLOW_LIMITS, FlowLimits
from sparkstrom.protocol.common.events import TimeoutReason


@dataclass(frozen=True, slots=True)
class NodeLimits:
    """Limits of a node: seconds of its clock, counted from the last progress, and bytes."""

    lease_s: float = 10.0  # a node that is silent for so long is suspected
    join_s: float = 60.0  # without any answer of the master before the first place
    master_silent_s: float = 30.0  # without any sign of the master afterwards
    stuck_s: float = 120.0  # without a commit of own updates, or without progress in fetching
    step_s: float = 600.0  # one training step, or reading one batch
    window_bytes: int = 4 << 20  # own uncommitted updates, beyond which training waits
    log_bytes: int = 64 << 20  # bound of the log for children
    flow_limits: FlowLimits = DEFAULT_FLOW_LIMITS
    max_lead: int | None = None  # steps ahead of the slowest worker; None: no limit
    max_staleness: int | None = None  # steps after that of the oldest uncommitted update
    # The same limit in the fit's minibatches: each training worker has its share, if that is more.
    age_of_updates: int = 0
    steps_each: int = 1  # steps that one publication contains
    publications_max: int | None = None  # uncommitted ones, beyond which the residual is kept
    optimizer_wait_s: float = 0.0  # how long a latecomer waits for optimizer state; 0: not at all


NO_FIGURES: Mapping[str, float | str] = MappingProxyType({})
LEVELS_ABOVE = 4  # in a mesh of depth 5: each fetches its replica before the next gets a place


class Wait(NamedTuple):
    """Something a node waits for; after ``limit_s`` without progress it ends with ``reason``."""

    since_s: float  # the last progress
    limit_s: float  # longest time without progress
    reason: TimeoutReason
    figures: Mapping[str, float | str] = (
        NO_FIGURES  # fields of the reason's text, beside the seconds
    )


class ProcessPause(NamedTuple):
    """A time in which this process did not run, such as a suspended container.

    It received nothing meanwhile, so deadlines are shifted by the pause.
    """

    pause_s: float
    now_s: float

    def shift(self, since_s: float) -> float:
        """Return the start of a wait, ``since_s``, moved later by the pause, at most to now."""
        return min(self.now_s, since_s + self.pause_s)
