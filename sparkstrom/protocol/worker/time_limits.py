"""Limit how long a worker's node waits for the master, its parent or its trainer.

Each kind of wait has its own limit: for a sign of life from the master, for the commits of own
updates, for missing commits, for a snapshot, and for the end of a training step. If a wait makes no
progress within its limit, the task fails with a ``TimeoutReason``. A commit is an update that the
master has numbered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from sparkstrom.protocol.common.children import DEFAULT_FLOW_LIMITS, FlowLimits
from sparkstrom.protocol.common.events_and_effects import TimeoutReason


@dataclass(frozen=True, slots=True)
class NodeLimits:
    """Limits of a node: times in seconds, counted from the last progress, and sizes in bytes.

    At a limit of steps, bytes or publications (updates that it sends), training waits or publishes
    nothing.
    """

    lease_s: float = 10.0  # a node that is silent for longer is suspected to be gone
    join_s: float = 60.0  # without any answer from the master, before the first place
    master_silent_s: float = 30.0  # without any sign of life from the master, afterwards
    stuck_s: float = 120.0  # without progress of its own updates, missing commits or a snapshot
    step_s: float = 600.0  # one training step, or reading one batch
    window_bytes: int = 4 << 20  # own uncommitted updates; with more, training waits
    log_bytes: int = 64 << 20  # of the newest commits, kept for children that lack them
    flow_limits: FlowLimits = DEFAULT_FLOW_LIMITS  # of the data in flight to neighbours
    max_lead: int | None = None  # steps ahead of the slowest worker; None: no limit
    # The same limit in minibatches of the other training workers, divided by their number; the
    # larger of the two limits applies.
    lead_minibatches: int = 0
    max_staleness: int | None = None  # steps after the oldest uncommitted update; None: no limit
    # The same limit in minibatches of the whole fit, divided by the number of training workers, and
    # less ``steps_each``; the larger of the two limits applies.
    age_of_updates: int = 0
    steps_each: int = 1  # steps that one publication contains at least
    publications_max: int | None = None  # uncommitted publications, at most; None: no limit
    optimizer_wait_s: float = 0.0  # how long a late worker waits for optimizer state; 0: not at all


NO_FIGURES: Mapping[str, float | str] = MappingProxyType({})
# Levels of a mesh of depth 5 above a leaf: each fetches its replica before the next gets a place.
LEVELS_ABOVE = 4


class Wait(NamedTuple):
    """Something that a node waits for; after ``limit_s`` without progress the task fails."""

    since_s: float  # time of the last progress
    limit_s: float  # longest time without progress
    reason: TimeoutReason
    # Values for the reason's template, besides the seconds.
    figures: Mapping[str, float | str] = NO_FIGURES
