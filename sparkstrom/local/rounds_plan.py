"""Rounds plan: what of synchronous rounds is fixed before a fit; what is told of their workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from sparkstrom.codec.messages import Phase
from sparkstrom.local.accumulators import Accumulator
from sparkstrom.local.orders import WorkerOrder
from sparkstrom.models.base import FlatModel
from sparkstrom.observe.telemetry import WorkerCounters
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.protocol.master.members import Departure
from sparkstrom.runtime.heard_lines import HeardLines


@dataclass(frozen=True, slots=True)
class RoundsPlan:
    """What of rounds does not change while a fit runs."""

    spec: FitSpec
    model: FlatModel
    frequency: int  # minibatches of a worker in a round, as far as its epoch has them
    averages_state: bool
    steps_before: int  # of each worker, in earlier fits
    accumulator: Accumulator | None  # None: the mean, by the weight of rows
    directory: Path  # of the files that processes share
    begin: Callable[[int, int], WorkerOrder]  # for an attempt at a partition


@dataclass(slots=True)
class RoundsTold:
    """What is known of the workers, for whoever asks."""

    stats: dict[int, WorkerCounters] = field(default_factory=dict)
    departures: list[Departure] = field(default_factory=list)
    began_s: dict[Phase, float] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)
    heard: HeardLines = field(default_factory=HeardLines)
