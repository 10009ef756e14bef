"""Every message of the protocol, as frozen values.

``Update``, ``Commit``, ``MergedRange``, ``Chunk`` and ``OptimizerChunk`` use an edge's data stream;
all others are control messages. Neighbours in the tree exchange messages over an edge; direct
messages go between a node and the master past the tree. ``protocol`` decides what follows from a
message, ``codec.wire`` how it is encoded. ``tag`` and ``name=`` are the names on the wire,
which stay the same when the code changes.
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
U63 = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # u64 on the wire; the top bit stays free
NodeField = Annotated[NodeId, msgspec.Meta(ge=0, lt=2**32)]
EdgeField = Annotated[EdgeNo, msgspec.Meta(ge=0, lt=2**32)]
SeqField = Annotated[Seq, msgspec.Meta(ge=0, le=2**63 - 1)]
CommitField = Annotated[CommitNo, msgspec.Meta(ge=0, le=2**63 - 1)]
Text = Annotated[str, msgspec.Meta(max_length=512)]
Trace = Annotated[str, msgspec.Meta(max_length=16_384)]


class Phase(enum.IntEnum):
    """Phase of a fit. The master repeats it in every state, so a node cannot miss one."""

    GATHERING = 0  # waiting for workers; those that have joined hold a replica and wait
    RUNNING = 1
    DRAINING = 2  # each worker sends its last updates and names the newest
    AUDIT = 3  # no update is numbered any more; every replica is hashed at the final commit
    DONE = 4


class Activity(enum.IntEnum):
    """A worker's present activity. Only STEPPING counts against ``step_timeout``."""

    CATCHING_UP = 0  # it has no replica yet
    WAITING = 1  # for the start, for commits of its own updates, or for slower workers
    STEPPING = 2
    FINISHED = 3  # it has trained its whole partition, and stays until the fit is done


class Address(msgspec.Struct, frozen=True):
    """The address at which a process listens for one edge: an endpoint and two stream ids."""

    host: Text
    port: U16
    control_stream: U32
    data_stream: U32


class Payload(msgspec.Struct, frozen=True):
    """An encoded update, opaque to the protocol. ``len()`` is the number of bytes in ``data``."""

    form: int  # u8: an ``encoding.forms.Form``
    tau_quanta: U32  # threshold as a multiple of the job's quantum
    count: U32  # entries (changed parameters) in ``data``
    data: bytes

    def __len__(self) -> int:
        return len(self.data)


BUFFERS = 6  # form of an update that replaces a model's buffers and changes no parameter
NOTHING = Payload(form=0, tau_quanta=0, count=0, data=b"")  # stands for what the origin has itself

LastSeqs = list[tuple[NodeField, SeqField]]  # (id, its newest committed seq)


# Direct: from a node to the master.


class Join(msgspec.Struct, frozen=True, tag="join", kw_only=True):
    """Request for a place in the tree, or (same token and count) for another edge."""

    token: U63  # random, per process
    count: U32  # rises with each id that this process requests, from 1
    request: U32 = msgspec.field(name="knock")  # rises with each change of the address
    partition: U32
    attempt: U63  # Spark's taskAttemptId; the highest one owns the partition
    rows: U63
    checksum: U63  # of the rows' content, in any order
    batches: U32  # minibatches per epoch
    address: Address  # where the process listens for its parent
    host: Text
    executor: Text  # equal text means the same executor process
    pid: U32
    version: Text  # of sparkstrom; must equal the controller's
    alone: bool  # True: its edges to children are gone, too, with its media driver


class ChildSilent(msgspec.Struct, frozen=True, tag="silent"):
    """A parent's report that it has heard nothing from a child for a lease."""

    node: NodeField  # the parent
    child: NodeField
    edge: EdgeField  # the edge that is silent


class ProbeReply(msgspec.Struct, frozen=True, tag="here"):
    """Answer to ``Probe``: this node is alive."""

    node: NodeField


class TrainingFailure(msgspec.Struct, frozen=True, tag="failed", kw_only=True):
    """Training failed on this worker, so the whole fit must end."""

    node: NodeField | None  # None: it failed before it had an id
    reason: Trace  # one line
    trace: Trace  # the traceback
    host: Text = ""
    partition: U32 = 0
    phase: Text = ""  # what the worker was doing, in words


class WorkerLog(msgspec.Struct, frozen=True, tag="says", kw_only=True):
    """Lines that a worker's Python code printed, for people only. They may be lost."""

    host: Text
    partition: U32
    lines: Annotated[list[tuple[Text, Text]], msgspec.Meta(max_length=64)]  # (phase, line)
    skipped: U63  # lines left out since the previous WorkerLog


# Up: over the edge to the parent.


class Attach(msgspec.Struct, frozen=True, tag="attach", kw_only=True):
    """First message over a new edge: what the child holds and what it needs."""

    have: CommitField  # newest commit that it has received without a gap
    whole: bool  # it has a replica as of ``have``; False: it needs a snapshot
    catching: bool  # it has part of a snapshot and every commit since, and continues with them
    ids: list[NodeField]  # every id that its process has had


class ResidualCheckpoint(msgspec.Struct, frozen=True):
    """A file that a worker left on its executor's disk for the next fit."""

    path: Text
    mass: float  # sum of absolute values of the residual (parameter units)


class AuditAnswer(msgspec.Struct, frozen=True):
    """Result of the audit at one worker."""

    commit: CommitField  # the audited commit
    digest: Annotated[str, msgspec.Meta(max_length=64)]  # SHA-256 of the replica's bytes, in hex
    checkpoint: ResidualCheckpoint | None = msgspec.field(name="kept")  # for the next fit


class Status(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A node's report about itself. Relays forward it to the master unchanged, never summed.

    Of two statuses of one node, the one with the newer edge counts, then the higher ``count``.
    """

    node: NodeField
    edge: EdgeField  # its edge to its parent
    count: U63  # rises with each change
    after_seq: SeqField  # ``epoch, batch`` count once this update of the node is committed
    epoch: U32
    batch: U32
    steps: U63  # its steps, plus the head start that it was credited with
    activity: Activity
    final: SeqField | None = None  # seq of its last update; None: more may follow
    audit: AuditAnswer | None = None  # None: not audited yet
    # Cumulative counters (``observe.telemetry``); None: as in the status before, or none yet.
    stats: Annotated[dict[str, float], msgspec.Meta(max_length=256)] | None = None
    lag: U63 = 0  # commits behind its parent, a power of two; 0 unless it has lasted
    lends: bool = False  # other workers may copy its optimizer state
    whole: bool = False  # it has a replica that its children may copy

    @property
    def age(self) -> tuple[EdgeNo, int]:
        """Return the key by which statuses of one node are ordered; the greater is newer."""
        return self.edge, self.count


class Heartbeat(msgspec.Struct, frozen=True, tag="report", kw_only=True):
    """Lease renewal, acknowledgement and changed statuses of a node. A newer one replaces older
    ones.
    """

    received: CommitField  # every commit up to this one has arrived
    bytes_received: U63 = msgspec.field(name="taken")  # from the parent over this edge
    catching: bool  # it is fetching a snapshot
    stamp: U63  # the parent acknowledges the statuses by repeating this (``State.stamp``)
    statuses: list[Status] = msgspec.field(name="news")  # not acknowledged yet; itself and below


class CommitsRequest(msgspec.Struct, frozen=True, tag="ask-after"):
    """Request to send everything after ``commit`` again, because commits are missing."""

    commit: CommitField


class ChunkRequest(msgspec.Struct, frozen=True, tag="ask-chunk"):
    """Request for one chunk of a snapshot, read from the live replica when it is sent."""

    index: U32


class OptimizerRequest(msgspec.Struct, frozen=True, tag="ask-updater"):
    """Request for one chunk of a worker's optimizer state, to be sent to ``asker``."""

    asker: NodeField
    copy: U63 | None  # number of the copy; None: any that the source has
    index: U32


class LeaveNotice(msgspec.Struct, frozen=True, tag="leaving", kw_only=True):
    """A node's notice that it leaves: to its parent at the end of a fit, to the master before
    it.
    """

    node: NodeField
    reason: Text
    checkpoint: ResidualCheckpoint | None = msgspec.field(name="kept")


# Direct: from the master to a node.


class Welcome(msgspec.Struct, frozen=True, tag="welcome", kw_only=True):
    """A node's place: its id, its parent and where to begin. Answers a join, or moves the node."""

    token: U63  # with ``count``: the join that this answers
    count: U32
    request: U32 = msgspec.field(name="knock")  # of the newest join that the master has seen
    node: NodeField
    parent: NodeField
    edge: EdgeField  # rises through the whole fit: a higher one replaces a lower one
    up: Address  # where the parent listens for this node
    chunks: U32  # number of chunks in a snapshot
    closed: LastSeqs  # former ids of this process, each with the last seq that counts
    epoch: U32  # with ``batch``: the position at which to begin
    batch: U32
    steps: U63  # the step count that a newcomer starts from
    grants: list[Text]  # residual files of an earlier fit on this executor, for this node to add


class Adopt(msgspec.Struct, frozen=True, tag="adopt", kw_only=True):
    """Order to a parent: a node becomes your child over this edge."""

    node: NodeField
    edge: EdgeField
    local: Address  # where to listen for it
    peer: Address  # where it listens


class Disown(msgspec.Struct, frozen=True, tag="disown"):
    """Order to a parent: that node is no longer your child over this edge or an older one."""

    node: NodeField
    edge: EdgeField


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """The question whether a node is alive; ``ProbeReply`` answers it."""

    node: NodeField


class JoinRefusal(msgspec.Struct, frozen=True, tag="refused", kw_only=True):
    """Answer to a join that gets no place."""

    token: U63  # with ``count``: the join that this answers
    count: U32
    reason: Trace
    fatal: bool  # True: the task must fail; False: it ends with success


class IdClosed(msgspec.Struct, frozen=True, tag="closed", kw_only=True):
    """Notice to a process that its id is closed."""

    token: U63
    count: U32
    node: NodeField  # the closed id
    seq: SeqField  # its last committed update
    reason: Text
    free: bool  # True: it may join again under a new id; False: its task is over


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Order to a finished worker: save the residual and leave, another task needs the slot."""

    reason: Text


# Down: over the edge to a child.


class AttachReply(msgspec.Struct, frozen=True, tag="attached", kw_only=True):
    """Answer to ``Attach``: commits after ``base`` follow on the data stream."""

    base: CommitField
    snapshot: bool  # True: first fetch a replica as of ``base`` or later, in chunks
    last: LastSeqs  # with a snapshot: every origin's newest seq as of ``base``


class State(msgspec.Struct, frozen=True, tag="state", kw_only=True):
    """State of the fit, from the master. Each parent fills in the fields for its child's edge."""

    phase: Phase
    beat: U63  # grows while the master lives
    head: CommitField  # newest commit that the parent has; 0: it has no replica
    final: CommitField  # the audited commit, from AUDIT on
    slowest: U63  # steps of the slowest live, unfinished worker
    nodes: U32  # live ones, in the whole tree
    training: U32  # live workers that hold a replica and have rows left
    minibatches: U63  # committed in the whole fit
    minibatches_expected: U63 = 0  # in the whole fit; an estimate while rows are unread
    epochs: U32  # finished by every partition that has rows to train on
    wait_ms: U32  # how long a new commit now waits, above the child, for the slowest link
    closed: list[NodeField]  # ids closed lately, whose owners may not know
    stamp: U63 = msgspec.field(name="heard")  # newest ``Heartbeat.stamp`` of the child
    sent: CommitField  # every commit up to this one was sent to the child over this edge
    bytes_received: U63 = msgspec.field(name="taken")  # from the child over this edge
    bytes_forwarded: U63 = msgspec.field(name="passed")  # of those; the rest waits at the parent


class ResendRequest(msgspec.Struct, frozen=True, tag="again"):
    """Order to an origin: send all uncommitted updates again."""

    origin: NodeField | None  # None: every node below


class SnapshotRequired(msgspec.Struct, frozen=True, tag="behind"):
    """Answer to a child for which the log does not reach back far enough: fetch a snapshot."""

    base: CommitField  # commits after this one follow
    last: LastSeqs  # every origin's newest seq as of ``base``


# Data.


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """One encoded gradient update on its way to the master."""

    origin: NodeField  # the node that made it, not the one that relayed it
    seq: SeqField  # from 1 per origin; ids are never reused, so (origin, seq) is the key
    seen: CommitField  # newest commit in the replica when the gradient was taken
    epoch: U32  # with ``batch``: position up to which the origin has trained
    batch: U32
    steps: U63  # training steps of the origin, its head start included
    payload: Payload


class Commit(msgspec.Struct, frozen=True, kw_only=True):
    """An update with its commit number, its place in the order of all updates."""

    commit: CommitField
    origin: NodeField
    seq: SeqField
    slowest: U63 = 0  # steps of the slowest live, unfinished worker when this was numbered
    payload: Payload  # NOTHING when it goes to its own origin


class MergedRange(msgspec.Struct, frozen=True, kw_only=True):
    """Sum of all commits in (after, commit], for a child that is exactly at ``after``."""

    after: CommitField
    commit: CommitField
    last: LastSeqs  # newest seq of each origin that has an update in the sum
    count: U32  # estimated entries, by which both ends account for it
    payload: bytes  # ``Form.QUANTA``


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of one index range, as part of a snapshot."""

    index: U32
    commit: CommitField  # the parameters contain every commit up to this one, and no later one
    payload: bytes  # float32, little endian


class OptimizerChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a copy of a worker's optimizer state, on its way to ``asker``."""

    asker: NodeField
    copy: U63  # hash of the whole copy, above 0
    index: U32
    count: U32  # chunks of the copy
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


def copy_number(content: bytes) -> int:
    """Return the number of an optimizer copy: a hash of its content, at least 1."""
    digest = hashlib.sha256(content).digest()
    return max(1, int.from_bytes(digest[:8], "little") >> (64 - NUMBER_BITS))


@dataclass(frozen=True, slots=True)
class OptimizerCopy:
    """An encoded optimizer state, which is sent in chunks that cannot be mixed with another copy's.

    Its number is a hash of its content, so that a receiver of all chunks can check them.
    """

    content: bytes
    number: int
    chunk_bytes: int

    @classmethod
    def from_content(cls, content: bytes, chunk_bytes: int) -> OptimizerCopy:
        """Return a copy with this content, which must not be empty."""
        return cls(content, copy_number(content), chunk_bytes)

    def chunk(self, ask: OptimizerRequest) -> OptimizerChunk:
        """Return the requested chunk; the first one if the request names another copy."""
        size, count = self.chunk_bytes, -(-len(self.content) // self.chunk_bytes)
        index = ask.index if ask.copy == self.number and ask.index < count else 0
        payload = self.content[index * size : (index + 1) * size]
        return OptimizerChunk(
            asker=ask.asker, copy=self.number, index=index, count=count, payload=payload
        )
