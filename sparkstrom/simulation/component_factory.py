"""Make the components of a simulated fit: master, replicas, worker processes and checker.

A replica is a process's copy of the shared parameters. The controller is the process that runs the
master. The checker compares the run with the protocol's invariants (``simulation.invariants``).
"""

from __future__ import annotations

from typing import Any, Protocol

from sparkstrom.base.identity import CommitNo, Endpoint
from sparkstrom.codec.messages import Chunk, Commit, MergedRange
from sparkstrom.protocol.common.events_and_effects import SendMerged
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
from sparkstrom.simulation.virtual_clock import VirtualClock


def resolve_partition_starts(size: RunSize) -> tuple[PartitionStart, ...]:
    """Return where training starts in each partition of a resumed fit; empty for a new fit."""
    drawn = tuple(map(size.start_of, range(size.nodes))) if size.resumed else ()
    return size.starts or drawn


def make_master(
    size: RunSize,
    time: VirtualClock,
    scratch: dict[str, Any],
    *,
    chunks: int,
    n_params: int = N_PARAMS,
    unit: float = 1,
) -> Master:
    """Return the master of a run, and write the residual files of an earlier fit to ``scratch``.

    A residual is what a worker learned and did not send; here its values are random multiples of
    ``unit``. ``chunks``: number of parts in which a snapshot of the replica is sent.
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
    """The controller's replica of the parameters."""

    @property
    def buffers(self) -> bytes:
        """The combined buffers of all workers."""

    def apply_update(self, update: Commit) -> None:
        """Add the next commit (numbered update)."""

    def take_buffers(self, buffers: bytes, commit: CommitNo) -> None:
        """Apply the next commit, which contains the combined buffers."""

    def chunk(self, index: int) -> Chunk:
        """Return part ``index`` of a snapshot of the replica."""

    def digest(self) -> str:
        """Return a hash of parameters and buffers."""


class ComponentFactory:
    """Makes the components of one simulated fit, whose parameters are a few integers."""

    def __init__(self, size: RunSize) -> None:
        self.size = size

    def create_replica(self) -> MasterReplica:
        """Return the controller's replica."""
        return SimReplica(self.size.message_sizes.chunk_bytes)

    def create_master(self, time: VirtualClock, scratch: dict[str, IntTheta]) -> Master:
        """Return the protocol's master; write residual files of an earlier fit to ``scratch``."""
        chunks = max(CHUNKS, self.size.message_sizes.chunks)
        return make_master(self.size, time, scratch, chunks=chunks)

    def create_checker(self, kept: dict[str, float]) -> InvariantChecker:
        """Return the invariant checker; ``kept``: residual file -> sum of absolute values in it."""
        return InvariantChecker(kept)

    def create_process(
        self, name: str, identity: Identity, limits: NodeLimits, **given: Any
    ) -> SimProcess:
        """Return a new worker process; ``given`` has the other arguments of SimProcess."""
        return SimProcess(name, identity, limits, **given)

    def merge_commits(self, effect: SendMerged) -> MergedRange:
        """Return the message that answers ``effect``: the sum of a range of commits."""
        return make_merged_range(effect, self.size.message_sizes.sum_bytes(effect.count))
