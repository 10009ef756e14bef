"""Child: one child of a node, as its parent knows it, and what it may cost."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from sparkstrom.codec.messages import Address, Attached
from sparkstrom.protocol.common.send_window import SendWindow
from sparkstrom.protocol.common.slow_links import Backlog
from sparkstrom.protocol.common.stages import PROBE, Cause, ChildStage, after


@dataclass(frozen=True, slots=True)
class Serving:
    """What the children of one node may cost it, in bytes."""

    window_max: int  # under way to one child, whatever its link takes
    total_max: int  # under way to all of them
    n_params: int  # entries in a sum, at most
    chunk_bytes: int  # of a snapshot


SERVING = Serving(4 << 20, 64 << 20, 1 << 62, 256 << 10)  # where the model is not known


@dataclass(slots=True)
class ResendRequest:
    """An origin was asked for its updates: not again before ``next_s``, unless it answered."""

    after: int  # its newest seq that is numbered
    next_s: float
    wait_s: float


@dataclass(slots=True)
class Child:
    """One child and the edge to it."""

    node: int
    edge: int
    peer: Address
    link: SendWindow
    stage: ChildStage = PROBE
    answer: Attached | None = None  # to what it said it holds; None: PROBE
    sent: int = 0  # it was handed everything up to this commit
    received: int = 0  # and has this much
    base: int = 0  # where the copy that it takes begins
    summed: int = 0  # the newest commit that it was sent inside of a sum
    chunk_requests: deque[int] = field(default_factory=deque)  # chunks that it has asked for
    own: frozenset[int] = frozenset()  # every id that its process has had
    stamp: int = 0  # stamp of its news
    bytes_received: int = 0  # bytes that came by this edge
    arriving: int = 0  # bytes of a message that is not whole yet
    bytes_forwarded: int = 0  # of what came, what has gone on from here
    state_due: bool = True
    state_s: float = -1.0
    resend_requests: dict[int, ResendRequest] = field(default_factory=dict)  # by origin
    backlog: Backlog = field(default_factory=Backlog)

    def becomes(self, cause: Cause) -> None:
        """The next stage."""
        self.stage = after(self.stage, cause)
        assert (self.answer is None) == (self.stage is PROBE), f"node {self.node} has no answer"
