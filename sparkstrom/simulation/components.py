"""Make the components of a simulated world: master, replicas, processes and checkers."""

from __future__ import annotations

from typing import Any, Protocol

from sparkstrom.base.identity import CommitNo, Endpoint
from sparkstrom.codec.messages import Chunk, Commit, MergedRange
from sparkstrom.protocol.common.events import SendMerged
from sparkstrom.protocol.common.fit_spec import FitSpec, PartitionStart
from sparkstrom.protocol.master.master import Master
from sparkstrom.protocol.worker.node import Identity, NodeLimits
from sparkstrom.simulation.invariants import InvariantChecker
from sparkstrom.simulation.process import SimProcess
from sparkstrom.simulation.replica import (
    CHUNKS,
    N_PARAMS,
    IntTheta,
    SimReplica,
    join_reports,
    make_merged_range,
    residual_mass,
)
from sparkstrom.simulation.run_options import RunSize
from sparkstrom.simulation.timeline import Timeline


def resolve_partition_starts(size: RunSize) -> tuple[PartitionStart, ...]:
    """Return the positions at which partitions start; empty for a new fit."""
    drawn = tuple(map(size.start_of, range(size.nodes))) if size.resumed else ()
    return size.starts or drawn


def make_master(
    size: RunSize,
    time: Timeline,
    scratch: dict[str, Any],
    *,
    chunks: int,
    n_params: int = N_PARAMS,
    unit: float = 1,
) -> Master:
    """Return the master of a run, and write the residual files of an earlier fit to ``scratch``.

    Their values are random multiples of ``unit``.
    """
    kept: dict[str, dict[str, float]] = {}
    for index in range(size.kept_files):
        executor = f"e{index // size.per_executor}"
        path = f"{executor}/kept{index}"
        scratch[path] = [unit * time.rng.randint(-2, 2) for _ in range(n_params)]
        kept.setdefault(executor, {})[path] = residual_mass(scratch[path])
    return Master(
        FitSpec(
            workers=size.nodes,
            epochs=size.epochs,
            n_params=n_params,
            version="sim",
            starts=resolve_partition_starts(size),
        ),
        chunks=chunks,
        endpoint=Endpoint("master", 1),
        limits=size.master_limits(),
        now_s=0.0,
        kept=kept,
        average=join_reports,
    )


class MasterReplica(Protocol):
    """The driver's replica of the parameters."""

    @property
    def buffers(self) -> bytes:
        """The combined buffers of all workers."""

    def apply_update(self, update: Commit) -> None:
        """Add the next commit."""

    def take_buffers(self, buffers: bytes, commit: CommitNo) -> None:
        """Apply the next commit, which contains the combined buffers."""

    def chunk(self, index: int) -> Chunk:
        """Return a part of the replica for a snapshot."""

    def digest(self) -> str:
        """Return a hash of parameters and buffers."""


class ComponentFactory:
    """Makes the components of one world, with parameters that are a few integers."""

    def __init__(self, size: RunSize) -> None:
        self.size = size

    def replica(self) -> MasterReplica:
        """Return the driver's replica."""
        return SimReplica(self.size.weights.chunk_bytes)

    def master(self, time: Timeline, scratch: dict[str, IntTheta]) -> Master:
        """Return the master; residual files of an earlier fit are written to ``scratch``."""
        return make_master(self.size, time, scratch, chunks=max(CHUNKS, self.size.weights.chunks))

    def checks(self, kept: dict[str, float]) -> InvariantChecker:
        """Return the invariant checker; ``kept`` has the mass of each residual file."""
        return InvariantChecker(kept)

    def process(
        self, name: str, identity: Identity, limits: NodeLimits, **given: Any
    ) -> SimProcess:
        """Return a new worker process."""
        return SimProcess(name, identity, limits, **given)

    def merged(self, effect: SendMerged) -> MergedRange:
        """Return the sum of commits that an effect requests."""
        return make_merged_range(effect, self.size.weights.sum_bytes(effect.count))
