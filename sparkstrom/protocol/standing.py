"""Standing: all that a node knows of itself and of the fit; its other modules act on it."""

from __future__ import annotations

from dataclasses import dataclass, field

from sparkstrom.base.identity import Position
from sparkstrom.codec.messages import Activity, Address, AuditAnswer, Failed, Final, Leaving, State
from sparkstrom.protocol.catchup import Catchup
from sparkstrom.protocol.uplink import Uplink


@dataclass(frozen=True, slots=True)
class NodeLimits:
    """Times in seconds of the node's clock, sizes in bytes; each wait counts from progress."""

    lease_s: float = 10.0
    join_s: float = 60.0
    master_silent_s: float = 30.0
    stuck_s: float = 120.0  # window full or catching up, without any progress
    step_s: float = 600.0  # one step, or reading one batch
    window_bytes: int = 4 << 20
    hold_bytes: int = 64 << 20
    max_lead: int | None = None


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


@dataclass(slots=True)
class Standing:
    """A node's state. ``began_s`` is when it was made."""

    identity: Identity
    limits: NodeLimits
    uplink: Uplink
    began_s: float

    # its place in the mesh
    node: int = -1
    ids: dict[int, int | None] = field(default_factory=dict)  # all it had: closed at seq, or None
    count: int = 1
    edge: int = 0
    address: Address | None = None
    joined: bool = False  # the present edge has been welcomed
    join_due_s: float = 0.0
    heard_s: float = 0.0  # from the master, on whatever edge
    edge_heard_s: float = 0.0
    opened_s: float = 0.0  # the present edge
    unanswered: int = 0  # edges opened since anything was heard: each gets twice the patience
    ticked_s: float = 0.0

    # its replica
    has_replica: bool = False
    received: int = 0  # every commit up to here
    got_s: float = 0.0  # the newest commit; or, since then nothing was missing until now
    fed_s: float = 0.0
    ask_due_s: float = 0.0
    catchup: Catchup | None = None
    installing: bool = False
    paused: bool = False
    pauses: int = 0

    # its trainer
    position: Position = field(default_factory=lambda: Position(0, 0))
    steps: int = 0  # as its trainer counts
    head_start: int = 0  # steps it is credited with: nobody waits for what it missed
    activity: Activity = Activity.CATCHING_UP
    activity_s: float = 0.0
    final: Final | None = None
    audit: AuditAnswer | None = None
    failed: Failed | None = None
    failed_s: float = 0.0
    leaving: Leaving | None = None
    leaving_s: float = 0.0

    # what the master says, and what it is told
    state: State | None = None
    news: bool = False
    reports: int = 0
    report_due_s: float = 0.0
    lease_due_s: float = 0.0

    def __post_init__(self) -> None:
        self.heard_s = self.edge_heard_s = self.ticked_s = self.began_s
        self.opened_s = self.got_s = self.fed_s = self.activity_s = self.began_s

    @property
    def behind(self) -> bool:
        """There are commits that it has not received."""
        return self.state is not None and self.state.head > self.received

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
        self.activity_s = now_s
