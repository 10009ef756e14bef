"""Limits of the master: how long it waits, and what its children may cost it."""

from __future__ import annotations

from dataclasses import dataclass

from sparkstrom.protocol.common.child import SERVING, Serving
from sparkstrom.protocol.common.events import CopyUpdater
from sparkstrom.protocol.common.topology import FLAT


@dataclass(frozen=True, slots=True)
class MasterLimits:
    """Times in seconds of the master's clock, sizes in bytes; each wait counts from progress."""

    lease_s: float = 10.0
    start_s: float = 60.0  # from the first join until training begins with those who came
    workers_min: int = 1
    attach_s: float = 120.0  # from the order of a place until its parent confirms it
    rejoin_s: float = 300.0  # how long a partition may be without a worker, while nobody trains
    release_s: float = 10.0  # how long one waits before a finished worker gives up its slot
    end_s: float = 60.0  # draining or auditing without progress
    log_bytes: int = 64 << 20
    serving: Serving = SERVING
    fan_out: int = FLAT[0]
    depth: int = FLAT[1]
    last_copies: CopyUpdater | None = None  # of updaters' states, before the fit is done
