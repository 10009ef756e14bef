"""Events that the protocol's state machines take, and effects that they return.

``Master.step`` and ``Node.step`` take one event and the time, and return effects: instructions that
the caller carries out in order (``runtime`` over Aeron, ``simulation`` in virtual time). Events and
effects are frozen values. Random numbers (tokens, stream ids) come inside events, so a machine that
gets the same events returns the same effects.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable

import msgspec

from sparkstrom.base.errors import DriverLost
from sparkstrom.base.identity import CommitNo, EdgeNo, NodeId
from sparkstrom.codec.messages import (
    Address,
    Chunk,
    Commit,
    Direct,
    LastSeqs,
    MergedRange,
    Message,
    OptimizerRequest,
    Payload,
    ResidualCheckpoint,
    Update,
    WorkerLog,
)
from sparkstrom.observe.telemetry import WorkerCounters


class TaskEnding(enum.Enum):
    """How a worker's task ends, as decided by the task itself or by the master.

    Each value is the human-readable text and also the text sent in messages, so it is part of the
    wire format (``test_endings.py``). Any other text, such as "silent for 3.2 s (lease 10 s)",
    decodes as OTHER. Code decodes a received text once and then uses the member.
    """

    DONE = "done"
    RELEASED = "released"
    DISMISSED = "its partition is trained already"
    SUPERSEDED = "another attempt of its task has taken the partition over"
    LEASE_OVER = "its lease ran out"
    FIT_FAILED = "the fit has failed"
    FAILED = "training failed here"
    OTHER = "for a reason of which there is only the text"

    @classmethod
    def from_text(cls, text: str) -> TaskEnding:
        """Return the ending whose text was received; OTHER for any other text."""
        return _BY_TEXT.get(text, cls.OTHER)


_BY_TEXT = {ending.value: ending for ending in TaskEnding}


class TimeoutReason(enum.Enum):
    """Why a task failed after waiting too long. Each value is a message template."""

    ANSWER = (
        "no answer from the master for {silent:.0f} s: is UDP open between executors and driver in"
        " both directions (ports, security group), and do network mask and controller address name"
        " the network that both share?"
    )
    MASTER = (
        "nothing heard from the master for {silent:.0f} s: the driver program has ended, or the "
        "network between this executor and it is down"
    )
    PLACE = (
        "no place in the mesh for {silent:.0f} s, although the master answers: nodes above it have "
        "no replica yet; look at their logs"
    )
    PARENT = (
        "its parent in the mesh has had no replica for it for {silent:.0f} s, although it answers"
    )
    SNAPSHOT = (
        "catching up made no progress for {silent:.0f} s: no part of the replica arrived, or each "
        "was out of date before the last one came; raise log_bytes, or publish less often"
    )
    COMMITS = (
        "none of its updates was committed for {silent:.0f} s, although the master answers: "
        "{bytes:,} bytes of them wait, {under_way:,} bytes are under way to node {parent}, and the "
        "link there carried {rate:.2f} MB/s; look at that link and at the driver's, use "
        "mesh_build_mode='mesh', or send less (threshold='auto', publish_every='auto')"
    )
    UPDATES = (
        "the updates of the others did not arrive for {silent:.0f} s, although the master answers: "
        "look at the links of this executor and of its parent in the mesh"
    )
    STEP = "one training step took longer than {silent:.0f} s: raise step_timeout if that is normal"


class WorkerShortage(enum.Enum):
    """Why a fit ends with too few workers. Each value is a message template."""

    AT_START = (
        "{} workers joined within {:.0f} s, min_workers is {} (of {} partitions): lower "
        "min_workers, raise start_timeout, use fewer workers, or give a Spark application "
        "more task slots (--num-executors, --executor-cores)"
    )
    LATER = (
        "partition {} has been without a worker for {:.0f} s: no replacement has started; on "
        "Spark see the executors' state in its UI (lost, out of memory, no free slot, or a "
        "suspended Python process that keeps its slot?)"
    )


class IgnoreReason(enum.Enum):
    """Why a received message was ignored."""

    STRANGER = "from nobody who is a neighbour, or a member"
    CLOSED = "of an id that is closed"
    WRONG_WAY = "not a message that comes from there"
    FOR_ANOTHER = "meant for another id or process"
    EARLY = "what has to be here first is not here yet"
    LATE = "a repeat, or overtaken by something newer"
    UNKNOWN = "has counters by names that nobody here knows"
    UNSERVED = "nobody is known who could be served, or serve it"


class IgnoredMessages:
    """Counts of ignored messages by message type and reason.

    Ignored messages are not errors: a network that repeats or reorders messages causes many.
    """

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, IgnoreReason]] = Counter()

    def count(self, message: msgspec.Struct, reason: IgnoreReason) -> None:
        """Count one message that is ignored."""
        self.counts[type(message).__name__, reason] += 1

    @property
    def total(self) -> int:
        """Return the number of all ignored messages."""
        return self.counts.total()


# Events for both machines.


class Received(msgspec.Struct, frozen=True):
    """A complete, authenticated message arrived."""

    sender: NodeId | None  # the neighbour that sent it; None for a direct message to the master
    message: Message


class DataArriving(msgspec.Struct, frozen=True):
    """Part of a data message from a neighbour arrived: a sign that the stream is alive."""

    sender: NodeId
    bytes: int  # bytes of the incomplete message received so far


class Tick(msgspec.Struct, frozen=True):
    """Time has passed; the state machine does its periodic work."""


# Events for a worker's node, from its trainer and its transport.


class StreamsOpened(msgspec.Struct, frozen=True):
    """The node listens on fresh streams; its previous edge to the parent is closed."""

    address: Address
    alone: bool = False  # True: edges to all children are also closed (the media driver died)


class UpdatePublished(msgspec.Struct, frozen=True):
    """The trainer encoded an update and has already added it to its own shared parameters."""

    payload: Payload  # the encoded update
    seen: CommitNo  # newest commit in the worker's replica when the gradient was computed
    epoch: int  # with ``batch``: the position up to which the update contains training
    batch: int
    steps: int  # training steps of this worker so far


class StepCompleted(msgspec.Struct, frozen=True):
    """The trainer took a step and published nothing.

    The position (``epoch``, ``batch``) is the last published one. Later steps are still in the
    residual; a successor of this worker would train them again.
    """

    epoch: int
    batch: int
    steps: int  # training steps of this worker so far, the unpublished ones included


class ActivityChanged(msgspec.Struct, frozen=True):
    """The trainer started another kind of work."""

    activity: int  # an ``Activity`` value


class TrainerPaused(msgspec.Struct, frozen=True):
    """The trainer stopped at a batch boundary to receive a replica."""

    number: int  # ``Directive.number`` of the PAUSE directive that the trainer obeyed


class ReplicaInstalled(msgspec.Struct, frozen=True):
    """The trainer finished the last ``InstallSnapshot`` or ``UseInitialReplica``."""


class CommitApplied(msgspec.Struct, frozen=True):
    """The trainer's replica now contains every commit up to this one."""

    commit: CommitNo


class TrainerDrained(msgspec.Struct, frozen=True):
    """The trainer will publish no further update."""


class ReplicaHashed(msgspec.Struct, frozen=True):
    """The replica was hashed for the audit, the final comparison of all replicas."""

    commit: CommitNo  # the audited commit
    digest: str  # SHA-256 in hex
    checkpoint: ResidualCheckpoint | None  # residual saved for the next fit; None: nothing to save


class TrainerReleased(msgspec.Struct, frozen=True):
    """The trainer obeyed RELEASE: it saved its residual and leaves before the fit ends."""

    checkpoint: ResidualCheckpoint | None  # None: there was nothing to save


class TrainerFailed(msgspec.Struct, frozen=True):
    """Training raised an exception, which must end the whole fit."""

    reason: str  # one line
    trace: str  # the traceback
    phase: str = ""  # what the worker was doing, in human-readable words


class OutputPrinted(msgspec.Struct, frozen=True):
    """The worker's Python code printed, warned or logged."""

    lines: list[tuple[str, str]]  # (what the worker was doing, the line)
    skipped: int  # further lines that were left out


# Events for the master.


class EndpointChanged(msgspec.Struct, frozen=True):
    """The master's media driver (Aeron's process) was restarted, so all its edges are closed.

    ``host`` and ``port`` are its new address.
    """

    host: str
    port: int


class SummedWorkersLimited(msgspec.Struct, frozen=True):
    """Decision that from now on all updates together count as those of at most so many workers."""

    workers: int  # the limit; if more workers, k, train, an update has the weight workers / k


class StopRequested(msgspec.Struct, frozen=True):
    """Request to end the fit early but in order: drain, audit, done."""

    reason: str


class AbortRequested(msgspec.Struct, frozen=True):
    """Request to end the fit at once: Spark's job failed, or the user interrupted it."""

    reason: str


class OptimizerCopyRequest(msgspec.Struct, frozen=True):
    """Request to copy workers' optimizer states, because a checkpoint is about to be written."""

    everybody: bool = False  # True: from each worker that can send one; False: from one of them


Event = (
    Received | DataArriving | Tick | StreamsOpened | UpdatePublished | StepCompleted
    | ActivityChanged | TrainerPaused | ReplicaInstalled | CommitApplied | TrainerDrained
    | ReplicaHashed | TrainerReleased | TrainerFailed | OutputPrinted | EndpointChanged
    | SummedWorkersLimited | StopRequested | AbortRequested | OptimizerCopyRequest
)  # fmt: skip


# Effects: messages and edges.


class Send(msgspec.Struct, frozen=True):
    """Instruction to send a message to a neighbour over their edge. The message may get lost."""

    to: NodeId
    message: Message


class SendDirect(msgspec.Struct, frozen=True):
    """Instruction to send a message from a worker directly to the master, bypassing the tree.

    The message may get lost.
    """

    message: Direct


class SendToProcess(msgspec.Struct, frozen=True):
    """Instruction to send a message from the master directly to one process, bypassing the tree.

    The message may get lost.
    """

    address: Address
    token: int  # of the process; the frame is sealed for it, so no other process can open it
    message: Message
    # The receiver drops the message unless this is its current id. None: the message itself names
    # the id, or the process has no id yet.
    node: NodeId | None = None


class OpenEdge(msgspec.Struct, frozen=True):
    """Instruction to open the edge to a neighbour and to drop any older edge to it."""

    node: NodeId
    edge: EdgeNo
    local: Address  # where to listen; for the parent, the address of the last ``StreamsOpened``
    peer: Address  # where the neighbour listens


class CloseEdge(msgspec.Struct, frozen=True):
    """Instruction to close the edge to this neighbour."""

    node: NodeId


class ReopenStreams(msgspec.Struct, frozen=True):
    """Instruction to listen on fresh streams and report ``StreamsOpened``: the old edge is dead."""


# Effects: the replica and the trainer.


class ApplyCommit(msgspec.Struct, frozen=True):
    """Instruction to add one commit to the replica, after everything delivered before it."""

    update: Commit


class OwnCommitted(msgspec.Struct, frozen=True):
    """Notice that the node's oldest own update was committed. The replica already contains it."""

    commit: CommitNo  # the replica now contains every commit up to this one


class ApplyMergedRange(msgspec.Struct, frozen=True):
    """Instruction to add a sum of commits to the replica, minus the node's own updates in it."""

    merged: MergedRange
    own: tuple[Update, ...]  # the node's updates in the sum, which its replica has already


class InstallSnapshot(msgspec.Struct, frozen=True):
    """Instruction to replace the replica with a snapshot plus the node's own updates.

    To each chunk, the held commits that the chunk lacks are added, and then ``own``. Afterwards the
    replica is at ``commit`` plus the node's own uncommitted updates.
    """

    chunks: tuple[Chunk, ...]  # one per index, in order
    held: tuple[Commit | MergedRange, ...]  # all commits after the oldest chunk, in order
    own: tuple[Update, ...]  # the node's own uncommitted updates
    commit: CommitNo


class UseInitialReplica(msgspec.Struct, frozen=True):
    """Instruction to start from the replica of commit 0, which came with the task."""


class IdAssigned(msgspec.Struct, frozen=True):
    """Notice that the master gave this node its id."""

    node: NodeId
    epoch: int  # with ``batch``: where training starts
    batch: int
    steps: int  # step count that a newcomer starts from: that of the slowest worker
    grants: tuple[str, ...]  # residual files of an earlier fit that the trainer may add
    returned: bool  # True: the process came back and keeps its replica and its position


class SendChunk(msgspec.Struct, frozen=True):
    """Instruction to read a chunk of the live replica at this moment and send it."""

    to: NodeId  # the child that requested the chunk
    index: int  # of the chunk in the snapshot


class SendMerged(msgspec.Struct, frozen=True):
    """Instruction to send the sum of ``entries`` as one message for commits after+1 to commit."""

    to: NodeId  # the child
    after: CommitNo  # the commit before the first one in the sum
    commit: CommitNo  # the last commit in the sum
    last: LastSeqs  # newest seq of each origin in the sum
    count: int  # estimated number of parameters that the sum changes
    entries: tuple[Commit | MergedRange, ...]  # the commits, or earlier sums of some, in order


class SendOptimizerChunk(msgspec.Struct, frozen=True):
    """Instruction to send a chunk of this worker's optimizer state, once a copy of it exists."""

    to: NodeId
    ask: OptimizerRequest  # the request that the chunk answers


class InstallOptimizer(msgspec.Struct, frozen=True):
    """Instruction to continue training with another worker's optimizer state."""

    payload: bytes | None  # None: no state came in time; keep the fresh one


class OptimizerCopied(msgspec.Struct, frozen=True):
    """Notice with the optimizer states that an ``OptimizerCopyRequest`` asked for."""

    payloads: tuple[bytes, ...]  # complete copies only; (): no worker sent one in time


class HashReplica(msgspec.Struct, frozen=True):
    """Instruction to hash the master's replica at ``commit`` and to report ``ReplicaHashed``."""

    commit: CommitNo


# Effects: reports to the user and to the driver program.


class ReportCounters(msgspec.Struct, frozen=True):
    """Instruction to record a worker's counters for the summary and the progress display.

    Counters are cumulative in a process, so they include those reported under its former ids.
    """

    node: NodeId
    counters: WorkerCounters
    former: frozenset[NodeId] = frozenset()  # former ids of the worker's process


class Note(msgspec.Struct, frozen=True):
    """Instruction to log a sentence for the user: a departure, a refusal or a loss."""

    text: str
    departure: bool = False  # True: ``Members.departures`` also lists it


class ShowWorkerLog(msgspec.Struct, frozen=True):
    """Instruction to show lines that a worker's Python code printed."""

    says: WorkerLog


class Failure(enum.Enum):
    """The kind of failure, which selects the exception that ``fit`` raises."""

    USAGE = "usage"  # the call or the data are wrong: UsageError
    SETUP = "setup"  # machines or versions are wrong: SetupError
    TRAINING = "training"  # training failed: TrainingError, or RowsRefused for a bad row


class Abort(msgspec.Struct, frozen=True):
    """Instruction to end the job and raise an exception, because the fit has failed."""

    reason: str
    trace: str = ""  # traceback from the worker
    host: str = ""  # where it failed; "": nowhere in particular
    partition: int | None = None  # the partition concerned; None: no particular one
    kind: Failure = Failure.TRAINING
    lack: WorkerShortage | None = None  # set if too few workers are the reason
    phase: str = ""  # what the worker was doing, in human-readable words


class Complete(msgspec.Struct, frozen=True):
    """Notice that the fit ends with success: every live replica was hashed at the final commit."""


Effect = (
    Send | SendDirect | SendToProcess | OpenEdge | CloseEdge | ReopenStreams | ApplyCommit
    | OwnCommitted | ApplyMergedRange | InstallSnapshot | UseInitialReplica | InstallOptimizer
    | IdAssigned | SendChunk | SendMerged | SendOptimizerChunk | OptimizerCopied | HashReplica
    | ReportCounters | Note | ShowWorkerLog | Abort | Complete
)  # fmt: skip


# Directives: what a trainer reads at its batch boundaries.


class Command(enum.Enum):
    """What a trainer must do at its next batch boundary."""

    WAIT = "wait"
    TRAIN = "train"
    PAUSE = "pause"  # stop, report TrainerPaused; a replica follows
    DRAIN = "drain"  # publish nothing more, report TrainerDrained
    AUDIT = "audit"  # hash the replica at the audited commit, report ReplicaHashed
    RELEASE = "release"  # save the residual, report TrainerReleased
    END = "end"  # the task ends with success
    FAIL = "fail"  # the task fails


class Directive(msgspec.Struct, frozen=True):
    """A command to the trainer, with its arguments. The trainer polls and obeys the newest one."""

    order: Command
    reason: str = ""  # human-readable reason
    cause: TaskEnding | TimeoutReason | None = None  # with END and FAIL: the reason
    steps_max: int | None = None  # with TRAIN: stop after this many steps; None: no limit
    publishes: bool = True  # with TRAIN: False: keep changes in the residual, publish nothing
    round_s: float = 0.0  # with TRAIN: recent time from a publication to its commit, in seconds
    workers: int = 1  # with TRAIN: number of workers that train now
    summed: int | None = None  # with TRAIN: limit of SummedWorkersLimited; None: no limit
    minibatches: int = 0  # with TRAIN: minibatches committed in the whole fit
    minibatches_expected: int = 0  # with TRAIN: minibatches of the whole fit; 0: not known yet
    epochs: int = 0  # with TRAIN and AUDIT: epochs that every non-empty partition has finished
    commit: CommitNo = CommitNo(0)  # with AUDIT: the audited commit
    number: int = 0  # with PAUSE: repeated in TrainerPaused, so answers to older ones are ignored


# Effects that need the media driver, Aeron's process that sends and receives UDP.
BY_DRIVER = frozenset(
    {
        Send, SendDirect, SendToProcess, OpenEdge, CloseEdge, ReopenStreams,
        SendChunk, SendMerged, SendOptimizerChunk,
    }
)  # fmt: skip


def perform_all(effects: Iterable[Effect], perform: Callable[[Effect], None]) -> None:
    """Perform the effects in order, and raise the first DriverLost at the end.

    A state machine treats an effect as done once it has returned the effect, so each must be
    performed. After a DriverLost, only those in ``BY_DRIVER`` are skipped: the caller reports
    ``StreamsOpened(alone=True)`` or ``EndpointChanged`` next, and the machine requests all edges
    again.
    """
    lost: DriverLost | None = None
    for effect in effects:
        if lost is not None and type(effect) in BY_DRIVER:
            continue
        try:
            perform(effect)
        except DriverLost as error:
            lost = lost or error
    if lost is not None:
        raise lost
