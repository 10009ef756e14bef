"""What happens to a machine, and what it wants done.

Events and effects are frozen values. Time comes with ``step(event, now_s)``; random numbers
(tokens, stream ids) come inside events. Effects are performed in order by whoever drives the
machine: the runtime over Aeron, or the simulator.
"""

from __future__ import annotations

import enum

import msgspec

from sparkstrom.base.identity import CommitNo, EdgeNo, NodeId
from sparkstrom.codec.messages import (
    Address,
    AskUpdater,
    Chunk,
    Committed,
    Direct,
    LastSeqs,
    MergedRange,
    Message,
    Payload,
    ResidualCheckpoint,
    Says,
    Update,
)
from sparkstrom.observe.telemetry import WorkerCounters
from sparkstrom.protocol.common.endings import Ending, Lack, Vain


class Received(msgspec.Struct, frozen=True):
    """A message whose seal was good. ``sender``: None where it was told to the master directly."""

    sender: NodeId | None
    message: Message


class Arriving(msgspec.Struct, frozen=True):
    """So many bytes of a data message from a neighbour are here; it is not whole yet."""

    sender: NodeId
    bytes: int


class Tick(msgspec.Struct, frozen=True):
    """Time passed; whatever is due is done."""


# -- to a node, from its own trainer and transport ---------------------------------------------


class Opened(msgspec.Struct, frozen=True):
    """This node listens here now; the old edge upwards is gone, ``alone``: all edges are."""

    address: Address
    alone: bool = False


class Published(msgspec.Struct, frozen=True):
    """The trainer made an update; it is in theta already."""

    payload: Payload
    seen: CommitNo
    epoch: int
    batch: int
    steps: int


class Progressed(msgspec.Struct, frozen=True):
    """The trainer took a step that sent nothing; the position is that of what it did send.

    Beyond it are steps that it has held back: whoever replaces it takes them again.
    """

    epoch: int
    batch: int
    steps: int


class Busy(msgspec.Struct, frozen=True):
    """What the trainer does now: an ``Activity`` value."""

    activity: int


class Paused(msgspec.Struct, frozen=True):
    """The trainer stands at a batch boundary and waits for a replica, as order ``number`` said."""

    number: int


class Installed(msgspec.Struct, frozen=True):
    """The trainer's replica is that of the last ``Install``, or of ``Begin``."""


class Applied(msgspec.Struct, frozen=True):
    """The trainer's replica has this commit now."""

    commit: CommitNo


class Drained(msgspec.Struct, frozen=True):
    """The trainer publishes nothing any more."""


class Hashed(msgspec.Struct, frozen=True):
    """The hash of the replica at ``commit`` and what was kept for the next fit."""

    commit: CommitNo
    digest: str
    checkpoint: ResidualCheckpoint | None


class Released(msgspec.Struct, frozen=True):
    """The trainer has kept its residual and leaves before the end, as ordered."""

    checkpoint: ResidualCheckpoint | None


class TrainerFailed(msgspec.Struct, frozen=True):
    """Training raised; the whole fit must end."""

    reason: str
    trace: str
    phase: str = ""  # what the worker was doing, in words


class Said(msgspec.Struct, frozen=True):
    """The worker's Python code printed, warned or logged; ``skipped`` lines more are left out."""

    lines: list[tuple[str, str]]  # what the worker was doing, the line
    skipped: int


# -- to the master -----------------------------------------------------------------------------


class Moved(msgspec.Struct, frozen=True):
    """The master's own endpoint changed (its media driver was started again)."""

    host: str
    port: int


class StopRequested(msgspec.Struct, frozen=True):
    """End the fit now, in order: drain, audit, done."""

    reason: str


class GivenUp(msgspec.Struct, frozen=True):
    """The driver program ends the fit: Spark's job failed, or a person interrupted it."""

    reason: str


class CopyUpdater(msgspec.Struct, frozen=True):
    """A checkpoint is about to be written: get a copy of some worker's updater state, or of each's.

    ``everybody``: of each that could lend it now, one after another.
    """

    everybody: bool = False


Event = (
    Received | Arriving | Tick | Opened | Published | Progressed | Busy | Paused | Installed
    | Applied | Drained | Hashed | Released | TrainerFailed | Said | Moved | StopRequested | GivenUp
    | CopyUpdater
)  # fmt: skip


# -- effects -----------------------------------------------------------------------------------


class Send(msgspec.Struct, frozen=True):
    """Send to a neighbour over its edge; may be lost."""

    to: NodeId
    message: Message


class Tell(msgspec.Struct, frozen=True):
    """Say something to the master directly, whoever stands between; may be lost."""

    message: Direct


class Answer(msgspec.Struct, frozen=True):
    """From the master directly to a node, whoever stands between; may be lost.

    It is for this process and nobody else, and for the id ``node`` where the message names none
    and the process must know its own: what is meant for an id must not reach the next one.
    """

    address: Address
    token: int
    message: Message
    node: NodeId | None = None


class OpenEdge(msgspec.Struct, frozen=True):
    """Listen on ``local`` for this neighbour, and send to it at ``peer``; drop any older edge.

    A node listens for its parent where it said it listens.
    """

    node: NodeId
    edge: EdgeNo
    local: Address
    peer: Address


class CloseEdge(msgspec.Struct, frozen=True):
    """Forget the edge to this neighbour."""

    node: NodeId


class Reopen(msgspec.Struct, frozen=True):
    """The edge is dead or silent: listen on fresh streams and say ``Opened``."""


class Deliver(msgspec.Struct, frozen=True):
    """Apply to the replica, after all that was delivered before."""

    update: Committed


class Passed(msgspec.Struct, frozen=True):
    """The node's oldest own update is committed: it is in the replica, which is at ``commit``."""

    commit: CommitNo


class DeliverMerged(msgspec.Struct, frozen=True):
    """Apply a sum of commits, less the node's oldest ``own`` updates, which it has already."""

    merged: MergedRange
    own: tuple[Update, ...]


class Install(msgspec.Struct, frozen=True):
    """Replace the replica: chunks, then from ``held`` what each chunk lacks, then ``own``.

    Afterwards the replica is at ``commit`` plus the node's own uncommitted updates.
    """

    chunks: tuple[Chunk, ...]
    held: tuple[Committed | MergedRange, ...]
    own: tuple[Update, ...]
    commit: CommitNo


class Begin(msgspec.Struct, frozen=True):
    """The replica that the trainer was started with, of commit 0, is the one to go on from."""


class Admitted(msgspec.Struct, frozen=True):
    """This node has its id now; where its training begins and which kept files it may add."""

    node: NodeId
    epoch: int
    batch: int
    steps: int
    grants: tuple[str, ...]
    returned: bool  # it came back with its replica: go on, do not start


class SendChunk(msgspec.Struct, frozen=True):
    """Read chunk ``index`` of the live replica, now, and send it."""

    to: NodeId
    index: int


class SendMerged(msgspec.Struct, frozen=True):
    """Sum what ``entries`` hold and send it as all of (after, commit]."""

    to: NodeId
    after: CommitNo
    commit: CommitNo
    last: LastSeqs
    count: int  # entries of the sum, about
    entries: tuple[Committed | MergedRange, ...]


class SendUpdater(msgspec.Struct, frozen=True):
    """Answer with a chunk of this worker's updater state, if there is a copy yet."""

    to: NodeId
    ask: AskUpdater


class InstallUpdater(msgspec.Struct, frozen=True):
    """Go on with this updater's state of another worker; None: nobody lent one in time."""

    payload: bytes | None


class UpdaterCopied(msgspec.Struct, frozen=True):
    """What ``CopyUpdater`` wanted, whole ones only; (): no worker could lend one in time."""

    payloads: tuple[bytes, ...]


class Hash(msgspec.Struct, frozen=True):
    """Hash the replica at ``commit``, all of it applied, and answer ``Hashed``."""

    commit: CommitNo


class Observed(msgspec.Struct, frozen=True):
    """A worker's counters, for the summary and the progress line."""

    node: NodeId
    counters: WorkerCounters


class Note(msgspec.Struct, frozen=True):
    """Something a person will want to read afterwards: a departure, a refusal, a loss."""

    text: str
    departure: bool = False  # which ``Members.departures`` tells, too


class Spoken(msgspec.Struct, frozen=True):
    """What a worker's code said, for people."""

    says: Says


class Failure(enum.Enum):
    """Whose the failure of a fit is: which error ``fit`` raises."""

    USAGE = "usage"
    SETUP = "setup"
    TRAINING = "training"


class Abort(msgspec.Struct, frozen=True):
    """The fit has failed: end the job and raise."""

    reason: str
    trace: str = ""
    host: str = ""
    partition: int | None = None
    kind: Failure = Failure.TRAINING
    lack: Lack | None = None  # of workers, where that is the reason
    phase: str = ""  # what the worker was doing, in words


class Complete(msgspec.Struct, frozen=True):
    """The fit is done: every live replica was hashed at the final commit."""


Effect = (
    Send | Tell | Answer | OpenEdge | CloseEdge | Reopen | Deliver | Passed | DeliverMerged
    | Install | Begin | InstallUpdater | Admitted | SendChunk | SendMerged | SendUpdater
    | UpdaterCopied | Hash | Observed | Note | Spoken | Abort | Complete
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


ENDS = (Order.END, Order.FAIL)


class Directive(msgspec.Struct, frozen=True):
    """The order that holds now, read by the trainer whenever it likes; the newest counts."""

    order: Order
    reason: str = ""
    why: Ending | Vain | None = None  # with END and FAIL
    steps_max: int | None = None  # with TRAIN: how far it may go
    publishes: bool = True  # with TRAIN: a publication may go; False: the last ones are under way
    round_s: float = 0.0  # with TRAIN: from a publication to its commit, lately
    workers: int = 1  # with TRAIN: so many train now
    minibatches: int = 0  # with TRAIN: committed in the whole fit
    epochs: int = 0  # with TRAIN and AUDIT: that every partition with rows to train on is through
    commit: CommitNo = CommitNo(0)  # with AUDIT
    number: int = 0  # with PAUSE: an answer to an older one does not count
