"""Who made what: node ids, numbers of edges, updates and commits; positions, endpoints."""

from __future__ import annotations

from typing import NamedTuple, NewType

NodeId = NewType("NodeId", int)  # u32, fresh at each join, never reused
EdgeNo = NewType("EdgeNo", int)  # u32, from 1, rises through the whole fit
Seq = NewType("Seq", int)  # u63, an update's number at its origin, from 1; 0: before the first
CommitNo = NewType("CommitNo", int)  # u63, a place in the one order, from 1; 0: before the first

MASTER = NodeId(0)  # the driver's node: root of the tree, sequencer, origin of averaged buffers


class Position(NamedTuple):
    """How far a worker has trained: ``batch`` minibatches of epoch ``epoch`` (both from 0)."""

    epoch: int
    batch: int


class Endpoint(NamedTuple):
    """Where a media driver listens: one UDP socket for all edges of one executor."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
