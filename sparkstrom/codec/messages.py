"""Define every message of the protocol as an immutable struct.

The master and the workers are nodes of a tree. A node exchanges messages with its parent over an
edge, which has a control stream and a data stream; direct messages go between a node and the master
outside the tree. ``Update``, ``Commit``, ``MergedRange``, ``Chunk`` and ``OptimizerChunk`` use the
data stream; all others are control messages. The package ``protocol`` handles the messages, and
``codec.wire`` encodes them. ``tag`` and ``name=`` are names on the wire, which stay the same when
the code is renamed.

A worker that makes an update is its origin. The master numbers updates; a numbered update is a
commit. A replica is a node's copy of the parameters as of some commit, and a snapshot is a replica
that a child fetches from its parent in chunks. A node's lease is how long its neighbours consider
it alive after they heard from it. A residual is what a worker has learned but not yet sent.
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass
from typing import Annotated

import msgspec

from sparkstrom.base.identity import CommitNo, EdgeNo, NodeId, Seq

U16 = Annotated[int, msgspec.Meta(ge=0, lt=2**16)]
U32 = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
U63 = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # u64 on the wire, with an unused top bit
NodeField = Annotated[NodeId, msgspec.Meta(ge=0, lt=2**32)]
EdgeField = Annotated[EdgeNo, msgspec.Meta(ge=0, lt=2**32)]
SeqField = Annotated[Seq, msgspec.Meta(ge=0, le=2**63 - 1)]
CommitField = Annotated[CommitNo, msgspec.Meta(ge=0, le=2**63 - 1)]
Text = Annotated[str, msgspec.Meta(max_length=512)]
Trace = Annotated[str, msgspec.Meta(max_length=16_384)]


class Phase(enum.IntEnum):
    """Phase of a fit. Every ``State`` message repeats the phase, so a node cannot miss a change."""

    GATHERING = 0  # waiting for workers; those that have joined fetch a replica and wait
    RUNNING = 1
    DRAINING = 2  # each worker sends its last updates and reports the newest one's number
    AUDIT = 3  # no further update is numbered; every replica is hashed at the final commit
    DONE = 4


class Activity(enum.IntEnum):
    """A worker's current activity. Only STEPPING counts against ``step_timeout``."""

    CATCHING_UP = 0  # the worker has no complete replica yet
    WAITING = 1  # for the start, for commits of its own updates, or for slower workers
    STEPPING = 2
    FINISHED = 3  # the worker has trained its whole partition, and stays until the fit is done


class Address(msgspec.Struct, frozen=True):
    """The address where a process listens for one edge: a UDP endpoint and two stream ids."""

    host: Text  # IP address
    port: U16  # UDP port
    control_stream: U32  # Aeron's id of the stream for control messages
    data_stream: U32  # Aeron's id of the stream for data messages


class Payload(msgspec.Struct, frozen=True):
    """An encoded update, which the protocol never decodes. ``len()`` is the size of ``data``."""

    form: int  # u8: an ``encoding.forms.Form``
    tau_quanta: U32  # threshold, in quanta: all parameters are multiples of the job's quantum
    count: U32  # entries (changed parameters) in ``data``
    data: bytes  # the entries, in the layout of ``form``

    def __len__(self) -> int:
        return len(self.data)


BUFFERS = 6  # form of an update that replaces the model's buffers and changes no parameter
# Payload of a commit that is sent to the update's own origin, which has the data already.
NOTHING = Payload(form=0, tau_quanta=0, count=0, data=b"")

LastSeqs = list[tuple[NodeField, SeqField]]  # (origin, number of its newest committed update)


# Direct messages from a node to the master.


class Join(msgspec.Struct, frozen=True, tag="join", kw_only=True):
    """A worker's request for a node id and a place in the tree.

    If token and count are those of an earlier join, the worker keeps its id: a higher ``request``
    asks for another edge, an equal one for the same answer again.
    """

    token: U63  # random, per process
    count: U32  # from 1; rises with each node id that this process requests
    request: U32 = msgspec.field(name="knock")  # rises with each change of the address
    partition: U32  # index of the partition that the worker trains
    attempt: U63  # Spark's taskAttemptId; the highest one owns the partition
    rows: U63  # number of rows in the partition
    checksum: U63  # of the rows' content, independent of their order
    batches: U32  # minibatches per epoch
    address: Address  # where the process listens for its parent
    host: Text  # the worker's host, as Spark knows it
    executor: Text  # equal text means the same executor process
    pid: U32  # the worker's process id
    version: Text  # of sparkstrom; must equal the controller's
    alone: bool  # True: the media driver (Aeron's process) died, so edges to children are lost also


class ChildSilent(msgspec.Struct, frozen=True, tag="silent"):
    """A parent's report that a child has sent nothing for the duration of a lease."""

    node: NodeField  # the parent
    child: NodeField  # the silent child
    edge: EdgeField  # the edge that is silent


class ProbeReply(msgspec.Struct, frozen=True, tag="here"):
    """Answer to ``Probe``: the node is alive."""

    node: NodeField


class TrainingFailure(msgspec.Struct, frozen=True, tag="failed", kw_only=True):
    """A worker's report that its training failed, so the whole fit must end.

    If the worker has no id, the master ignores a report of an attempt older than the partition's.
    """

    node: NodeField | None  # None: the worker failed before it had an id
    reason: Trace  # one line
    trace: Trace  # the traceback
    host: Text = ""  # the worker's host
    partition: U32 = 0  # the worker's partition
    attempt: U63 = 0  # as in ``Join``
    phase: Text = ""  # the worker's activity, as text for people


class WorkerLog(msgspec.Struct, frozen=True, tag="says", kw_only=True):
    """Lines that a worker's Python code printed, to be shown to the user. They may be lost."""

    host: Text
    partition: U32
    lines: Annotated[list[tuple[Text, Text]], msgspec.Meta(max_length=64)]  # (activity, line)
    skipped: U63  # number of lines left out since the previous WorkerLog


# Messages to the parent, over the edge.


class Attach(msgspec.Struct, frozen=True, tag="attach", kw_only=True):
    """First message over a new edge: states what the child has, and thereby what it needs."""

    have: CommitField  # newest commit up to which the child has received all commits
    whole: bool  # the child has a replica as of ``have``; False: it needs a snapshot
    catching: bool  # the child has part of a snapshot and all commits since, and can continue
    ids: list[NodeField]  # all node ids that the child's process has had


class ResidualCheckpoint(msgspec.Struct, frozen=True):
    """A file with a worker's unsent changes, left on its executor's disk for the next fit."""

    path: Text
    mass: float  # sum of absolute values of the residual (parameter units)


class AuditAnswer(msgspec.Struct, frozen=True):
    """Result of hashing one worker's replica at the audited commit."""

    commit: CommitField  # the audited commit
    digest: Annotated[str, msgspec.Meta(max_length=64)]  # SHA-256 of the replica's bytes, in hex
    checkpoint: ResidualCheckpoint | None = msgspec.field(name="kept")  # for the next fit


class Status(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A node's report about itself. Nodes on the way to the master forward it unchanged.

    Of two statuses of one node, the one with the higher ``edge`` is newer; if the edges are equal,
    the one with the higher ``count``.
    """

    node: NodeField
    edge: EdgeField  # the node's edge to its parent
    count: U63  # rises with each change of the status
    after_seq: SeqField  # (epoch, batch) is valid once this update of the node is committed
    epoch: U32  # with ``batch``: position up to which the worker has trained
    batch: U32
    steps: U63  # the worker's steps, plus those credited because it joined late
    activity: Activity
    final: SeqField | None = None  # number of its last update; None: more may follow
    audit: AuditAnswer | None = None  # None: not audited yet
    # Cumulative counters (``observe.telemetry``); None: as in the last status, or none sampled yet.
    stats: Annotated[dict[str, float], msgspec.Meta(max_length=256)] | None = None
    # Commits that the node is behind its parent, rounded down to a power of two; 0 if the node has
    # only just fallen behind.
    lag: U63 = 0
    lends: bool = False  # other workers may copy this node's optimizer state
    whole: bool = False  # the node has a complete replica, which children may copy

    @property
    def age(self) -> tuple[EdgeNo, int]:
        """Return the key that orders the statuses of one node; the greater key is newer."""
        return self.edge, self.count


class Heartbeat(msgspec.Struct, frozen=True, tag="report", kw_only=True):
    """A node's periodic message to its parent. A newer heartbeat replaces older ones.

    It renews the node's lease, acknowledges commits, and reports changed statuses.
    """

    received: CommitField  # every commit up to this one has arrived
    bytes_received: U63 = msgspec.field(name="taken")  # from the parent over this edge
    catching: bool  # the node is fetching a snapshot
    stamp: U63  # the parent acknowledges the statuses by repeating this (``State.stamp``)
    # Statuses of the node and its descendants that are not acknowledged yet.
    statuses: list[Status] = msgspec.field(name="news")


class CommitsRequest(msgspec.Struct, frozen=True, tag="ask-after"):
    """Request to send all commits after ``commit`` again, because some are missing."""

    commit: CommitField


class ChunkRequest(msgspec.Struct, frozen=True, tag="ask-chunk"):
    """Request for one chunk of a snapshot; the parent reads it from its live replica."""

    index: U32  # number of the chunk, from 0


class OptimizerRequest(msgspec.Struct, frozen=True, tag="ask-updater"):
    """Request for one chunk of a worker's optimizer state, to be sent to ``asker``."""

    asker: NodeField  # the node that wants the state
    copy: U63 | None  # number of the wanted copy (``OptimizerCopy``); None: any
    index: U32  # number of the chunk, from 0


class LeaveNotice(msgspec.Struct, frozen=True, tag="leaving", kw_only=True):
    """Notice that a node leaves the fit.

    It is sent to the node's parent at the end of the fit, and to the master if the node leaves
    earlier.
    """

    node: NodeField  # the node that leaves
    reason: Text
    checkpoint: ResidualCheckpoint | None = msgspec.field(name="kept")  # for the next fit


# Direct messages from the master to a node.


class Welcome(msgspec.Struct, frozen=True, tag="welcome", kw_only=True):
    """Answer to a join, or instruction to move: a node's id, parent and start position."""

    token: U63  # with ``count``: identifies the join that this message answers
    count: U32
    request: U32 = msgspec.field(name="knock")  # ``Join.request`` of the newest join received
    node: NodeField  # id of the node that receives this message
    parent: NodeField  # id of the node's parent
    edge: EdgeField  # numbers rise throughout the fit: a higher edge replaces a lower one
    up: Address  # where the parent listens for this node
    chunks: U32  # number of chunks in a snapshot
    closed: LastSeqs  # former ids of this process, with their last valid updates
    epoch: U32  # with ``batch``: the position at which to begin training
    batch: U32
    steps: U63  # step count credited to a new worker, so that no worker waits for it
    grants: list[Text]  # paths of an earlier fit's residual files that this node has to add


class Adopt(msgspec.Struct, frozen=True, tag="adopt", kw_only=True):
    """Instruction to a parent to accept a node as its child over this edge."""

    node: NodeField  # the child
    edge: EdgeField  # number of the edge between parent and child
    local: Address  # where the parent has to listen for the child
    peer: Address  # where the child listens for the parent


class Disown(msgspec.Struct, frozen=True, tag="disown"):
    """Instruction to a parent to drop a child that it has over this edge or an older one."""

    node: NodeField  # the child
    edge: EdgeField  # a newer edge to the child is kept


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """Question to a node whether it is alive; ``ProbeReply`` is the answer."""

    node: NodeField


class JoinRefusal(msgspec.Struct, frozen=True, tag="refused", kw_only=True):
    """Answer to a join that is refused."""

    token: U63  # with ``count``: identifies the join that this message answers
    count: U32
    reason: Trace
    fatal: bool  # True: the task must fail; False: the task ends successfully


class IdClosed(msgspec.Struct, frozen=True, tag="closed", kw_only=True):
    """Notice to a process that its node id is closed: no further update of this id counts."""

    token: U63  # with ``count``: identifies the process, as in ``Join``
    count: U32
    node: NodeField  # the closed id
    seq: SeqField  # number of its last committed update
    reason: Text
    free: bool  # True: the process may join again under a new id; False: its task is over


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Instruction to a finished worker to save its residual and leave, to free its task slot."""

    reason: Text


# Messages to a child, over the edge.


class AttachReply(msgspec.Struct, frozen=True, tag="attached", kw_only=True):
    """Answer to ``Attach``: the commits after ``base`` follow on the data stream."""

    base: CommitField
    snapshot: bool  # True: the child must first fetch a replica as of ``base`` or later, in chunks
    last: LastSeqs  # with a snapshot: number of every origin's newest update as of ``base``


class State(msgspec.Struct, frozen=True, tag="state", kw_only=True):
    """State of the fit, from the master; each parent adds the fields of its child's edge."""

    phase: Phase
    beat: U63  # grows as long as the master is alive
    head: CommitField  # newest commit that the parent has; 0: the parent has no replica
    final: CommitField  # the audited commit, from the phase AUDIT on
    slowest: U63  # step count of the slowest live, unfinished worker
    nodes: U32  # number of live nodes in the tree
    training: U32  # number of live workers that have a replica and untrained rows
    minibatches: U63  # number of minibatches committed so far
    minibatches_expected: U63 = 0  # of the whole fit; an estimate while rows are still unread
    epochs: U32  # number of epochs that every partition with training rows has finished
    summed: U32 = 0  # all updates together count as those of at most so many workers; 0: no limit
    wait_ms: U32  # how long a new commit waits for the slowest link on the way to the child
    closed: list[NodeField]  # recently closed node ids (``IdClosed``), in case a notice was lost
    stamp: U63 = msgspec.field(name="heard")  # newest ``Heartbeat.stamp`` from the child
    sent: CommitField  # every commit up to this one was sent to the child over this edge
    bytes_received: U63 = msgspec.field(name="taken")  # from the child over this edge
    # Bytes of ``bytes_received`` that the parent has sent on; the rest waits there.
    bytes_forwarded: U63 = msgspec.field(name="passed")


class ResendRequest(msgspec.Struct, frozen=True, tag="again"):
    """Instruction to an origin to send all of its uncommitted updates again."""

    origin: NodeField | None  # None: the receiving node and all nodes below it


class SnapshotRequired(msgspec.Struct, frozen=True, tag="behind"):
    """Answer to a child that needs commits no longer in the log: it must fetch a snapshot."""

    base: CommitField  # the commits after this one follow
    last: LastSeqs  # number of every origin's newest update as of ``base``


# Messages on the data stream.


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """One encoded gradient update on its way to the master."""

    origin: NodeField  # the node that made the update, not one that relayed it
    seq: SeqField  # from 1 at each origin; ids are never reused, so (origin, seq) is unique
    seen: CommitField  # newest commit in the origin's replica when the update was made
    epoch: U32  # with ``batch``: position up to which the origin has trained
    batch: U32
    steps: U63  # as in ``Status``
    payload: Payload


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """An update with its commit number, which is its place in the order of all updates."""

    commit: CommitField  # the commit number
    origin: NodeField  # the node that made the update
    seq: SeqField  # the origin's number for the update
    slowest: U63 = 0  # steps of the slowest live, unfinished worker when the update was numbered
    payload: Payload  # NOTHING if the message goes to the update's own origin


class MergedRange(msgspec.Struct, frozen=True, kw_only=True):
    """Sum of the commits ``after`` + 1 to ``commit``, for a child whose newest is ``after``."""

    after: CommitField
    commit: CommitField
    last: LastSeqs  # number of the newest update of each origin that has one in the sum
    count: U32  # estimated number of entries, which both ends use for flow control
    payload: bytes  # the sum, as ``encoding.forms.Form.QUANTA``


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of one index range: a part of a snapshot."""

    index: U32  # number of the chunk in the snapshot, from 0
    commit: CommitField  # the parameters contain every commit up to this one, and no later one
    payload: bytes  # float32, little endian


class OptimizerChunk(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a copy of a worker's optimizer state, on its way to the node ``asker``."""

    asker: NodeField
    copy: U63  # number of the copy: a hash of its content, above 0
    index: U32  # number of the chunk, from 0
    count: U32  # number of chunks of the copy
    payload: bytes


Control = (
    Join | ChildSilent | ProbeReply | TrainingFailure | WorkerLog | Attach | Heartbeat
    | CommitsRequest | ChunkRequest | OptimizerRequest | LeaveNotice | Welcome | Adopt | Disown
    | Probe | JoinRefusal | IdClosed | Release | AttachReply | State | ResendRequest
    | SnapshotRequired
)  # fmt: skip
Direct = Join | ChildSilent | ProbeReply | TrainingFailure | WorkerLog | LeaveNotice
Data = Update | Commit | MergedRange | Chunk | OptimizerChunk
Message = Control | Data


NUMBER_BITS = 63  # numbers of messages stay below 2^63


def hash_optimizer_copy(content: bytes) -> int:
    """Return the number that identifies an optimizer copy: a hash of its content, at least 1."""
    digest = hashlib.sha256(content).digest()
    return max(1, int.from_bytes(digest[:8], "little") >> (64 - NUMBER_BITS))


@dataclass(frozen=True, slots=True)
class OptimizerCopy:
    """An encoded optimizer state that is sent in chunks.

    Its number is a hash of its content. The receiver can thus tell chunks of different copies apart
    and verify the complete copy.
    """

    content: bytes  # made by ``optimizer_state_codec.encode_state``
    number: int  # hash of ``content``, at least 1
    chunk_bytes: int  # size of each chunk but the last

    @classmethod
    def from_content(cls, content: bytes, chunk_bytes: int) -> OptimizerCopy:
        """Create a copy from an encoded state, which must not be empty."""
        return cls(content, hash_optimizer_copy(content), chunk_bytes)

    def chunk(self, ask: OptimizerRequest) -> OptimizerChunk:
        """Return the requested chunk, or the first one if the request names a different copy."""
        size, count = self.chunk_bytes, -(-len(self.content) // self.chunk_bytes)
        index = ask.index if ask.copy == self.number and ask.index < count else 0
        payload = self.content[index * size : (index + 1) * size]
        return OptimizerChunk(
            asker=ask.asker, copy=self.number, index=index, count=count, payload=payload
        )
