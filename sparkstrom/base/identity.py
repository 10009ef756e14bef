"""Define small types that processes of a fit exchange: ids, positions and addresses.

A node is the master or a worker, and an edge is one connection between a node and its parent in the
tree of nodes. The origin of an update is the worker that made it. A commit is an update that the
master has numbered.
"""

from __future__ import annotations

from typing import NamedTuple, NewType

NodeId = NewType("NodeId", int)  # u32; a worker gets a new one at each join; never reused
EdgeNo = NewType("EdgeNo", int)  # u32, from 1; later edges of a fit have higher numbers
Seq = NewType("Seq", int)  # u63; number of an update among those of its origin, from 1; 0: none yet
CommitNo = NewType("CommitNo", int)  # u63; position among all updates, from 1; 0: none yet

MASTER = NodeId(0)  # root of the tree; numbers updates; origin of averaged model buffers


class Position(NamedTuple):
    """A worker's position in training: ``batch`` minibatches of ``epoch`` are done; both from 0."""

    epoch: int  # index of the epoch
    batch: int  # number of its minibatches that are done


class Endpoint(NamedTuple):
    """The UDP address of an Aeron media driver, which serves all connections of one executor."""

    host: str  # IP address
    port: int  # UDP port

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"
