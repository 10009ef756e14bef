"""Limits: how long and how much a node waits for, and what it says of itself when it joins."""

from __future__ import annotations

from dataclasses import dataclass

from sparkstrom.base.identity import Position
from sparkstrom.protocol.common.child import SERVING, Serving


@dataclass(frozen=True, slots=True)
class NodeLimits:
    """Times in seconds of the node's clock, sizes in bytes; each wait counts from progress."""

    lease_s: float = 10.0
    join_s: float = 60.0
    master_silent_s: float = 30.0
    stuck_s: float = 120.0  # window full or catching up, without any progress
    step_s: float = 600.0  # one step, or reading one batch
    window_bytes: int = 4 << 20
    log_bytes: int = 64 << 20
    serving: Serving = SERVING
    max_lead: int | None = None
    max_staleness: int | None = None  # steps beyond that of the oldest uncommitted update
    age_of_updates: int = 0  # in the fit's minibatches: each who trains has its share, where more
    steps_each: int = 1  # that a publication holds
    publications_max: int | None = None  # uncommitted ones, beyond which the residual waits
    optimizer_wait_s: float = (
        0.0  # how long who joins late waits for another's updater state; 0: none
    )


@dataclass(frozen=True, slots=True)
class Identity:
    """What a node says of itself when it joins; see ``Join`` for the fields."""

    token: int
    partition: int
    attempt: int
    rows: int
    checksum: int
    batches: int
    host: str
    executor: str
    pid: int
    version: str
    whole: bool = False  # it begins with the replica of commit 0; its parent hears so, not ``Join``
    start: Position = Position(0, 0)  # the fit began there: whoever trains on is no successor
