"""What happens to a machine, and what it wants done.

Events and effects are frozen values. Time comes with ``step(event, now_s)``; random numbers
(tokens, stream ids) come inside events. Effects are performed in order by whoever drives the
machine: the runtime over Aeron, or the simulator.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from sparkstrom.codec.messages import (
    Address,
    Chunk,
    Committed,
    Direct,
    Kept,
    LastSeqs,
    MergedRange,
    Message,
    Update,
)


@dataclass(frozen=True, slots=True)
class Received:
    """A message whose seal was good; ``sender`` is 0 for the master, -1 for the master's lobby."""

    sender: int
    message: Message


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; whatever is due is done."""


# -- to a node, from its own trainer and transport ---------------------------------------------


@dataclass(frozen=True, slots=True)
class Opened:
    """This node listens here now; the old edge upwards is gone, ``alone``: all edges are."""

    address: Address
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Published:
    """The trainer made an update; it is in theta already."""

    form: int
    tau_quanta: int
    count: int
    payload: bytes
    seen: int
    epoch: int
    batch: int
    steps: int


@dataclass(frozen=True, slots=True)
class Progressed:
    """The trainer took a step that sent nothing."""

    epoch: int
    batch: int
    steps: int


@dataclass(frozen=True, slots=True)
class Busy:
    """What the trainer does now: an ``Activity`` value."""

    activity: int


@dataclass(frozen=True, slots=True)
class Paused:
    """The trainer stands at a batch boundary and waits for a replica, as order ``number`` said."""

    number: int


@dataclass(frozen=True, slots=True)
class Installed:
    """The trainer's replica is that of the last ``Install``."""


@dataclass(frozen=True, slots=True)
class Applied:
    """The trainer's replica has this commit now."""

    commit: int


@dataclass(frozen=True, slots=True)
class Drained:
    """The trainer publishes nothing any more."""


@dataclass(frozen=True, slots=True)
class Hashed:
    """The hash of the replica at ``commit`` and what was kept for the next fit."""

    commit: int
    digest: str
    kept: Kept | None


@dataclass(frozen=True, slots=True)
class Released:
    """The trainer has kept its residual and leaves before the end, as ordered."""

    kept: Kept | None


@dataclass(frozen=True, slots=True)
class TrainerFailed:
    """Training raised; the whole fit must end."""

    reason: str
    trace: str


# -- to the master -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Moved:
    """The master's own endpoint changed (its media driver was started again)."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class StopRequested:
    """End the fit now, in order: drain, audit, done."""

    reason: str


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The driver program ends the fit: Spark's job failed, or a person interrupted it."""

    reason: str


Event = (
    Received | Tick | Opened | Published | Progressed | Busy | Paused | Installed | Applied
    | Drained | Hashed | Released | TrainerFailed | Moved | StopRequested | GivenUp
)  # fmt: skip


# -- effects -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send to a neighbour over its edge; may be lost."""

    to: int
    message: Message


@dataclass(frozen=True, slots=True)
class Tell:
    """Say something to the master directly, whoever stands between; may be lost."""

    message: Direct


@dataclass(frozen=True, slots=True)
class Answer:
    """From the master directly to a node, whoever stands between; may be lost."""

    address: Address
    message: Message


@dataclass(frozen=True, slots=True)
class OpenEdge:
    """Listen on ``local`` for this neighbour, and send to it at ``peer``; drop any older edge.

    A node listens for its parent where it said it listens.
    """

    node: int
    edge: int
    local: Address
    peer: Address


@dataclass(frozen=True, slots=True)
class CloseEdge:
    """Forget the edge to this neighbour."""

    node: int


@dataclass(frozen=True, slots=True)
class Reopen:
    """The edge is dead or silent: listen on fresh streams and say ``Opened``."""


@dataclass(frozen=True, slots=True)
class Deliver:
    """Apply to the replica, after all that was delivered before."""

    update: Committed


@dataclass(frozen=True, slots=True)
class Passed:
    """The node's oldest own update is committed: it is in the replica, which is at ``commit``."""

    commit: int


@dataclass(frozen=True, slots=True)
class DeliverMerged:
    """Apply a sum of commits, less the node's oldest ``own`` updates, which it has already."""

    merged: MergedRange
    own: tuple[Update, ...]


@dataclass(frozen=True, slots=True)
class Install:
    """Replace the replica: chunks, then from ``held`` what each chunk lacks, then ``own``.

    Afterwards the replica is at ``commit`` plus the node's own uncommitted updates.
    """

    chunks: tuple[Chunk, ...]
    held: tuple[Committed, ...]
    own: tuple[Update, ...]
    commit: int


@dataclass(frozen=True, slots=True)
class Admitted:
    """This node has its id now; where its training begins and which kept files it may add."""

    node: int
    epoch: int
    batch: int
    steps: int
    grants: tuple[str, ...]
    returned: bool  # it came back with its replica: go on, do not start


@dataclass(frozen=True, slots=True)
class SendChunk:
    """Read chunk ``index`` of the live replica, now, and send it."""

    to: int
    index: int


@dataclass(frozen=True, slots=True)
class SendMerged:
    """Sum what ``entries`` hold and send it as all of (after, commit]."""

    to: int
    after: int
    commit: int
    last: LastSeqs = field(hash=False)
    entries: tuple[Committed | MergedRange, ...]


@dataclass(frozen=True, slots=True)
class Hash:
    """Hash the replica at ``commit``, all of it applied, and answer ``Hashed``."""

    commit: int


@dataclass(frozen=True, slots=True)
class Observed:
    """A worker's counters, for the summary and the progress line."""

    node: int
    values: dict[str, float] = field(hash=False)


@dataclass(frozen=True, slots=True)
class Note:
    """Something a person will want to read afterwards: a departure, a refusal, a loss."""

    text: str


@dataclass(frozen=True, slots=True)
class Abort:
    """The fit has failed: end the job and raise."""

    reason: str
    trace: str = ""
    host: str = ""
    partition: int = -1
    kind: str = "training"  # or "setup", "peer"


@dataclass(frozen=True, slots=True)
class Complete:
    """The fit is done: every live replica was hashed at the final commit."""


Effect = (
    Send | Tell | Answer | OpenEdge | CloseEdge | Reopen | Deliver | Passed | DeliverMerged
    | Install | Admitted | SendChunk | SendMerged | Hash | Observed | Note | Abort | Complete
)  # fmt: skip


class Order(enum.Enum):
    """What a node's trainer is to do at its next batch boundary."""

    WAIT = "wait"
    TRAIN = "train"
    PAUSE = "pause"  # stand still and say Paused with this number; a replica follows
    DRAIN = "drain"  # publish nothing more and say Drained
    AUDIT = "audit"  # hash at the audited commit and say Hashed
    RELEASE = "release"  # keep the residual, say Released
    END = "end"  # the task ends with success
    FAIL = "fail"  # the task fails


@dataclass(frozen=True, slots=True)
class Command:
    """The order that holds now, read by the trainer whenever it likes; the newest counts."""

    order: Order
    reason: str = ""
    steps_max: int | None = None  # with TRAIN: how far it may go
    commit: int = 0  # with AUDIT
    number: int = 0  # with PAUSE: an answer to an older one does not count
