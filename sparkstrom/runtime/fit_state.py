"""Fit state: what the master's thread tells the driver program of a fit, as values."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from sparkstrom.base.identity import Endpoint
from sparkstrom.codec.messages import Phase
from sparkstrom.models.base import Flat
from sparkstrom.observe.telemetry import NO_BYTES, LinkBytes, WorkerCounters
from sparkstrom.protocol.common.fit_spec import PartitionStart
from sparkstrom.protocol.common.ignored import Reason
from sparkstrom.protocol.master.members import Departure
from sparkstrom.protocol.master.residual_checkpoints import CheckpointFiles
from sparkstrom.runtime.heard_lines import WorkerLine
from sparkstrom.runtime.traffic import Traffic


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a fit is, for people."""

    phase: Phase
    workers: int  # live
    partitions: int
    joined: int  # partitions that a worker has read
    minibatches: int  # committed
    minibatches_expected: int  # of the partitions joined
    commits: int
    staleness: float  # mean so far: how many minibatches of the others an update had not seen
    stats: dict[int, WorkerCounters] = field(hash=False)  # by node, the departed too
    training: frozenset[int] = frozenset()  # partitions with rows and a live worker
    measuring: frozenset[int] = frozenset()  # partitions all of whose rows are held out, likewise
    departures: tuple[Departure, ...] = ()  # so far
    by_kind: Counter[str] = field(default_factory=Counter, hash=False)  # bytes the driver sent
    wire: LinkBytes = field(default=NO_BYTES, hash=False)  # what left the driver's interfaces
    slow_links: tuple[str, ...] = ()  # each that was found too slow, in words
    news: tuple[str, ...] = ()  # other notes, so far
    copied: int = 0  # live workers that hold a replica
    slow_now: int = 0  # of these, to live workers
    deaf: tuple[Endpoint, ...] = ()  # of whom the driver hears, and who does not hear it
    heard: tuple[WorkerLine, ...] = ()  # of workers' code, so far
    unheard: int = 0  # lines of it that are left out


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The driver's replica as of one commit."""

    commit: int
    parameters: Flat  # a copy
    buffers: bytes  # b"" where the model has none
    partitions: tuple[PartitionStart, ...]  # what of their minibatches is in the parameters


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a finished fit left behind."""

    hashes: dict[str, str]  # node id or "driver" -> hex
    minibatches: int  # committed
    minibatches_expected: int
    rows: list[int]  # per partition; -1 where no worker came
    executors: set[str]  # that had a worker
    commits: int
    staleness: Counter[int]  # in commits
    staleness_minibatches: float  # mean and max, as ``protocol.master.staleness`` counts
    staleness_minibatches_max: float
    stats: dict[int, WorkerCounters]  # by node
    traffic: Traffic
    wire: LinkBytes  # what left the driver program's interfaces
    ignored: Counter[tuple[str, Reason]]  # messages, by kind and why
    hosts: dict[int, str]  # of every node that ever joined
    slow_links: tuple[str, ...]  # in words; they are among the notes, too
    departures: list[Departure]
    notes: list[str]
    kept: CheckpointFiles
    lost_mass: float
    grants: int  # kept files that found a new owner
    phase_began_s: dict[Phase, float]
    overflows: int  # entries of theta that left the range in which sums are exact
    first_overflow: int  # index of the first of them, or -1
    stop_reason: str | None
    minibatches_resumed: int = 0  # of those that are committed: trained in an earlier run
