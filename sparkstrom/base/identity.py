"""Types for node ids and for the numbers of edges, updates and commits; positions and endpoints."""

from __future__ import annotations

from typing import NamedTuple, NewType

NodeId = NewType("NodeId", int)  # u32, fresh at each join, never reused
EdgeNo = NewType("EdgeNo", int)  # u32, from 1, rises through the whole fit
Seq = NewType("Seq", int)  # u63, an update's number at its origin, from 1; 0: before the first
CommitNo = NewType("CommitNo", int)  # u63, a place in the one order, from 1; 0: before the first

MASTER = NodeId(0)  # the driver's node: root of the tree, sequencer, origin of averaged buffers


class Position(NamedTuple):
    """A worker's position in training: ``batch`` minibatches into ``epoch``, both from 0."""

    epoch: int
    batch: int


class Endpoint(NamedTuple):
    """The UDP address of a media driver, which serves all connections of one executor."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
