"""Standing: all that a node knows of itself and of the fit; its other modules act on it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sparkstrom.base.identity import Position
from sparkstrom.codec.messages import (
    Activity,
    Address,
    AuditAnswer,
    Failed,
    Leaving,
    State,
    Status,
    Update,
)
from sparkstrom.protocol.common.child import SERVING, Child, Serving
from sparkstrom.protocol.common.children import Children
from sparkstrom.protocol.common.history import History, Log
from sparkstrom.protocol.common.leases import Leases
from sparkstrom.protocol.common.send_window import SendWindow
from sparkstrom.protocol.common.status_table import StatusTable
from sparkstrom.protocol.worker.in_flight import InFlight
from sparkstrom.protocol.worker.snapshot_fetch import SnapshotFetch

if TYPE_CHECKING:
    from sparkstrom.protocol.worker.optimizer_transfer import OptimizerTransfer

NOBODY = -1


@dataclass(frozen=True, slots=True)
class NodeLimits:
    """Times in seconds of the node's clock, sizes in bytes; each wait counts from progress."""

    lease_s: float = 10.0
    join_s: float = 60.0
    master_silent_s: float = 30.0
    stuck_s: float = 120.0  # window full or catching up, without any progress
    step_s: float = 600.0  # one step, or reading one batch
    window_bytes: int = 4 << 20
    log_bytes: int = 64 << 20
    serving: Serving = SERVING
    max_lead: int | None = None
    max_staleness: int | None = None  # steps beyond that of the oldest uncommitted update
    age_of_updates: int = 0  # in the fit's minibatches: each who trains has its share, where more
    steps_each: int = 1  # that a publication holds
    publications_max: int | None = None  # uncommitted ones, beyond which the residual waits
    borrow_s: float = 0.0  # how long who joins late waits for another's updater state; 0: none


@dataclass(frozen=True, slots=True)
class Identity:
    """What a node says of itself when it joins; see ``Join`` for the fields."""

    token: int
    partition: int
    attempt: int
    rows: int
    checksum: int
    batches: int
    host: str
    executor: str
    pid: int
    version: str
    whole: bool = False  # it begins with the replica of commit 0; its parent hears so, not ``Join``


@dataclass(slots=True)
class NodeState:
    """A node's state. ``began_s`` is when it was made."""

    identity: Identity
    limits: NodeLimits
    uplink: InFlight
    began_s: float

    # its place in the mesh
    node: int = -1
    ids: dict[int, int | None] = field(default_factory=dict)  # all it had: closed at seq, or None
    count: int = 1
    knock: int = 0
    address: Address | None = None
    alone: bool = False  # the last knock said that all edges are gone
    parent: int = NOBODY
    edge: int = 0  # upwards
    attached: bool = False  # the parent has answered over that edge
    chunks: int = 0  # of a snapshot
    ask_s: float = 0.0  # when to knock, or to speak to the parent, again
    heard_s: float = 0.0  # a sign that the master lives
    edge_heard_s: float = 0.0
    opened_s: float = 0.0  # the present edge
    owed_s: float = 0.0  # since then the parent could have answered what this node said it holds
    steady_s: float = 0.0  # since then signs of the master have come without a gap
    up: SendWindow = field(init=False)  # over the present edge
    waiting: deque[tuple[Update, Child | None]] = field(default_factory=deque)  # for room on it
    taken: int = 0  # bytes that came down by it, by their weight
    arriving: int = 0  # bytes of a message from there that is not whole yet
    starved: int = 0  # edges opened since data last moved: each gets twice the patience
    unanswered: int = 0  # edges opened since anything was heard: each gets twice the patience
    ticked_s: float = 0.0

    # those below it
    history: History = field(init=False)
    family: Children = field(init=False)
    ledger: StatusTable = field(default_factory=StatusTable)

    # its replica
    has_replica: bool = False
    got_s: float = 0.0  # the newest data; or, since then nothing was missing until now
    level_s: float = 0.0  # when it was last where its parent is
    ask_due_s: float = 0.0
    asked: int = -1  # the commit after which it asked last
    seen: int = 0  # a commit that came after a gap, and was dropped
    catchup: SnapshotFetch | None = None
    installing: bool = False
    paused: bool = False
    pauses: int = 0
    borrowing: OptimizerTransfer | None = None
    lends: bool = False  # its updater began with the fit, or was borrowed

    # its trainer
    position: Position = field(default_factory=lambda: Position(0, 0))
    steps: int = 0  # as its trainer counts
    trained: bool = False  # at least one of them itself, so with the state that its updater lends
    head_start: int = 0  # steps it is credited with: nobody waits for what it missed
    activity: Activity = Activity.CATCHING_UP
    activity_s: float = 0.0
    final: int | None = None  # it publishes nothing after this seq
    audit: AuditAnswer | None = None
    failed: Failed | None = None
    failed_s: float = 0.0
    leaving: Leaving | None = None
    leaving_s: float = 0.0

    # what the master says, and what it is told
    state: State | None = None
    done_s: float | None = None  # since when the fit is done and this node audited
    may_end: bool = False  # nobody below it needs it any more
    stats: dict[str, float] | None = None
    status: Status | None = None  # as last told
    news: bool = False
    reports: int = 0
    report_due_s: float = 0.0
    lease_due_s: float = 0.0

    def __post_init__(self) -> None:
        self.heard_s = self.edge_heard_s = self.ticked_s = self.steady_s = self.began_s
        self.opened_s = self.owed_s = self.level_s = self.got_s = self.activity_s = self.began_s
        limits = self.limits
        self.up = SendWindow(limits.serving.window_max, self.began_s)
        self.history = History(Log(limits.log_bytes))
        leases = Leases(limits.lease_s, self.began_s)
        self.family = Children(limits.serving, self.history, leases)

    @property
    def received(self) -> int:
        """Every commit up to here."""
        return self.history.log.head

    @property
    def behind(self) -> bool:
        """There are commits that it has not received."""
        return self.state is not None and self.state.head > self.history.log.head

    @property
    def is_sent_more(self) -> bool:
        """Its parent has sent it commits, or chunks, that are not here."""
        if self.catchup is not None:
            return True
        return self.state is not None and self.state.sent > self.history.log.head

    @property
    def pace(self) -> int:
        """Steps for the comparison with the others."""
        return self.steps + self.head_start

    def keep_pace(self, slowest: int) -> None:
        """Who joins, or comes back, counts as the slowest one at first."""
        self.head_start = max(self.head_start, slowest - self.steps)

    def advance(self, position: Position, steps: int, now_s: float) -> None:
        """The trainer took a step."""
        self.position, self.steps, self.news = position, steps, True
        self.trained, self.activity_s = True, now_s
