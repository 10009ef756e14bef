"""Parts: what the replicas of a world are made of. Here: whole numbers (``sim_replica``)."""

from __future__ import annotations

from typing import Any, Protocol

from sparkstrom.base.identity import CommitNo
from sparkstrom.codec.messages import Chunk, Committed, MergedRange
from sparkstrom.protocol.common.events import SendMerged
from sparkstrom.protocol.master.master import Master
from sparkstrom.protocol.worker.node import Identity, NodeLimits
from sparkstrom.simulation.beginnings import new_master
from sparkstrom.simulation.checks import Checks
from sparkstrom.simulation.run_sizes import Size
from sparkstrom.simulation.sim_process import SimProcess
from sparkstrom.simulation.sim_replica import CHUNKS, SimReplica, Theta, merged_range
from sparkstrom.simulation.timeline import Timeline


class MasterReplica(Protocol):
    """The driver's replica."""

    @property
    def buffers(self) -> bytes: ...
    def apply_update(self, update: Committed) -> None: ...
    def take_buffers(self, buffers: bytes, commit: CommitNo) -> None: ...
    def chunk(self, index: int) -> Chunk: ...
    def digest(self) -> str: ...


class Parts:
    """Of one world. ``merged``: who sums commits for a child, which looks at no replica."""

    def __init__(self, size: Size) -> None:
        self.size = size

    def replica(self) -> MasterReplica:
        return SimReplica(self.size.weights.chunk_bytes)

    def master(self, time: Timeline, scratch: dict[str, Theta]) -> Master:
        return new_master(self.size, time, scratch, chunks=max(CHUNKS, self.size.weights.chunks))

    def checks(self, kept: dict[str, float]) -> Checks:
        return Checks(kept)

    def process(
        self, name: str, identity: Identity, limits: NodeLimits, **given: Any
    ) -> SimProcess:
        return SimProcess(name, identity, limits, **given)

    def merged(self, effect: SendMerged) -> MergedRange:
        return merged_range(effect, self.size.weights.sum_bytes(effect.count))
