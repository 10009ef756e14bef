"""The vocabulary of the mesh: every message as a frozen value.

Five travel on data streams (``Update``, ``Committed``, ``MergedRange``, ``Chunk``,
``UpdaterChunk``); the others are control. What a message means is decided by the machines in
``protocol``; how it looks as bytes by ``wire``. Neighbours in the tree speak over an edge; some
things a node and the master tell each other directly, whoever stands between them.
"""

from __future__ import annotations

import enum
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
    """Where a fit is. Told in every answer of the master, so that nobody can miss it."""

    GATHERING = 0  # waiting for workers; those that came hold a replica and wait
    RUNNING = 1
    DRAINING = 2  # no new updates: each worker names its last one
    AUDIT = 3  # nothing is numbered any more; every replica hashes itself at the final commit
    DONE = 4


class Activity(enum.IntEnum):
    """What a worker is doing; only STEPPING runs against ``step_timeout``."""

    CATCHING_UP = 0
    WAITING = 1  # for the start, the window, or the pace of the others
    STEPPING = 2
    FINISHED = 3  # its whole partition is trained; it stays until the fit is done


class Address(msgspec.Struct, frozen=True):
    """Where a node listens for one edge."""

    host: Text
    port: U16
    control_stream: U32
    data_stream: U32


class Payload(msgspec.Struct, frozen=True):
    """An update as its origin encoded it; opaque to the protocol. ``len``: bytes of ``data``."""

    form: int  # u8, how ``data`` is encoded
    tau_quanta: U32  # threshold as a multiple of the job's quantum
    count: U32  # entries in ``data``
    data: bytes

    def __len__(self) -> int:
        return len(self.data)


BUFFERS = 6  # the form of an update that replaces a model's buffers, and adds to no parameter
NOTHING = Payload(form=0, tau_quanta=0, count=0, data=b"")  # its origin has it

LastSeqs = list[tuple[NodeField, SeqField]]  # id -> its newest committed seq


# -- direct: from a node to the master ---------------------------------------------------------


class Join(msgspec.Struct, frozen=True, tag="join", kw_only=True):
    """Ask for a place in the mesh, or for a new edge upwards (same token and count).

    ``token`` is random per process, ``count`` rises with each return of that process, ``request``
    with each asking. ``attempt`` is Spark's taskAttemptId: the higher one owns the partition.
    """

    token: U63
    count: U32
    request: U32 = msgspec.field(name="knock")
    partition: U32
    attempt: U63
    rows: U63
    checksum: U63  # of the rows' content, whatever their order
    batches: U32  # minibatches per epoch
    address: Address
    host: Text
    executor: Text  # same text = same executor process
    pid: U32
    version: Text
    alone: bool  # it has no edges to children any more: they went with its media driver


class Silent(msgspec.Struct, frozen=True, tag="silent"):
    """A parent has not heard from its child over this edge for a lease."""

    node: NodeField  # the parent
    child: NodeField
    edge: EdgeField


class Here(msgspec.Struct, frozen=True, tag="here"):
    """The answer to ``Probe``."""

    node: NodeField


class Failed(msgspec.Struct, frozen=True, tag="failed", kw_only=True):
    """Training failed here and must end everywhere."""

    node: NodeField | None  # None: it has no id yet
    reason: Trace
    trace: Trace
    host: Text = ""
    partition: U32 = 0
    phase: Text = ""  # what the worker was doing, in words


class Says(msgspec.Struct, frozen=True, tag="says", kw_only=True):
    """What a worker's Python code says: for people, and nothing follows from it. May be lost."""

    host: Text
    partition: U32
    lines: Annotated[list[tuple[Text, Text]], msgspec.Meta(max_length=64)]  # phase, line
    skipped: U63  # lines left out since the last of these messages


# -- up: over the edge to the parent -----------------------------------------------------------


class Attach(msgspec.Struct, frozen=True, tag="attach", kw_only=True):
    """The first words over a new edge: what the child holds, and what it needs."""

    have: CommitField  # newest commit that it holds in order
    whole: bool  # it has a replica as of ``have``; otherwise it needs a snapshot
    catching: bool  # it holds the chunks of a snapshot and every commit since: go on with them
    ids: list[NodeField]  # all that its process has had


class ResidualCheckpoint(msgspec.Struct, frozen=True):
    """What a worker left on its executor's scratch for the next fit."""

    path: Text
    mass: float  # sum of absolute values of the residual (parameter units)


class AuditAnswer(msgspec.Struct, frozen=True):
    """SHA-256 of the replica's bytes at ``commit``, as hex, and what was kept for the next fit."""

    commit: CommitField
    digest: Annotated[str, msgspec.Meta(max_length=64)]
    checkpoint: ResidualCheckpoint | None = msgspec.field(name="kept")


class Status(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """What a node says of itself; goes up to the master as it is, never summed.

    The newest counts: that of the newest edge, and there the highest count.
    """

    node: NodeField
    edge: EdgeField  # its edge upwards
    count: U63  # rises with each change
    after_seq: SeqField  # ``epoch, batch`` counts once this update of the node is committed
    epoch: U32
    batch: U32
    steps: U63
    activity: Activity
    final: SeqField | None = None  # it publishes nothing after this seq
    audit: AuditAnswer | None = None
    stats: Annotated[dict[str, float], msgspec.Meta(max_length=256)] | None = None  # cumulative
    lag: U63 = 0  # commits that it has been behind its parent for a while, about
    lends: bool = False  # its updater's state is worth having
    whole: bool = False  # it has a replica that those below it may copy

    @property
    def age(self) -> tuple[EdgeNo, int]:
        """Of two of the same node the greater one is newer."""
        return self.edge, self.count


class Heartbeat(msgspec.Struct, frozen=True, tag="report", kw_only=True):
    """Lease renewal, acknowledgement, and news of the subtree; idempotent, the newest counts."""

    received: CommitField  # every commit up to here has been received in order
    bytes_received: U63 = msgspec.field(name="taken")  # from you by this edge (``SendWindow``)
    catching: bool  # it takes a snapshot
    stamp: U63  # the parent has heard all news up to here once it has this
    news: list[Status]  # since the last stamp that the parent has acknowledged


class AskAfter(msgspec.Struct, frozen=True, tag="ask-after"):
    """Commits are missing: send again everything after ``commit``."""

    commit: CommitField


class AskChunk(msgspec.Struct, frozen=True, tag="ask-chunk"):
    """Send this chunk of a snapshot, as it is now."""

    index: U32


class AskUpdater(msgspec.Struct, frozen=True, tag="ask-updater"):
    """Send this chunk of the updater's state to ``asker``, of this copy, or find it."""

    asker: NodeField
    copy: U63 | None  # None: whichever the lender has
    index: U32


class Leaving(msgspec.Struct, frozen=True, tag="leaving", kw_only=True):
    """A goodbye: to the parent at the end of a fit, to the master before that."""

    node: NodeField
    reason: Text
    checkpoint: ResidualCheckpoint | None = msgspec.field(name="kept")


# -- direct: from the master to a node ---------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, tag="welcome", kw_only=True):
    """Your place: who you are, whom you stand under, where to begin. Answers a join, or moves."""

    token: U63
    count: U32
    request: U32 = msgspec.field(name="knock")  # of the newest join that the master has seen
    node: NodeField
    parent: NodeField
    edge: EdgeField  # rises through the whole fit: a higher one replaces a lower one
    up: Address  # where the parent listens for you
    chunks: U32
    closed: LastSeqs  # former ids of this process and the seq they were closed at
    epoch: U32
    batch: U32
    steps: U63  # the step count that a newcomer starts from
    grants: list[Text]  # files of an earlier fit on this executor, yours to add


class Adopt(msgspec.Struct, frozen=True, tag="adopt", kw_only=True):
    """A node is to stand under you: listen for it at ``local``, send to it at ``peer``."""

    node: NodeField
    edge: EdgeField
    local: Address
    peer: Address


class Disown(msgspec.Struct, frozen=True, tag="disown"):
    """That node does not stand under you any more, by this edge or an older one."""

    node: NodeField
    edge: EdgeField


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """Somebody does not hear you: say ``Here``."""

    node: NodeField


class Refused(msgspec.Struct, frozen=True, tag="refused", kw_only=True):
    """No place for you. ``fatal``: the task must fail; otherwise it ends with success."""

    token: U63
    count: U32
    reason: Trace
    fatal: bool


class Closed(msgspec.Struct, frozen=True, tag="closed", kw_only=True):
    """Your id is closed. ``free``: come back under a new one; otherwise your task is over."""

    token: U63
    count: U32
    node: NodeField
    seq: SeqField  # its last committed update
    reason: Text
    free: bool


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Your partition is trained and another task needs the slot: keep your residual and leave."""

    reason: Text


# -- down: over the edge to a child ------------------------------------------------------------


class Attached(msgspec.Struct, frozen=True, tag="attached", kw_only=True):
    """The answer to ``Attach``: commits after ``base`` follow on the data stream."""

    base: CommitField
    snapshot: bool  # a replica as of ``base`` or later must be fetched in chunks first
    last: LastSeqs  # with a snapshot: of every id that published, as of ``base``


class State(msgspec.Struct, frozen=True, tag="state", kw_only=True):
    """Where the fit is. Comes from the master, handed on by parents; answers reports."""

    phase: Phase
    beat: U63  # the master is alive: this grows
    head: CommitField  # of the parent
    final: CommitField  # the audited commit, from AUDIT on
    slowest: U63  # steps of the slowest live, unfinished worker
    nodes: U32  # live ones, in the whole mesh
    training: U32  # live workers that hold a replica and have rows left
    minibatches: U63  # committed in the whole fit
    epochs: U32  # that every partition with rows to train on is through
    wait_ms: U32  # what is made now waits so long above you for the slowest link to a child
    closed: list[NodeField]  # ids closed a moment ago, whose owners may not know it
    stamp: U63 = msgspec.field(name="heard")  # newest stamp of your reports
    sent: CommitField  # you were sent every commit up to here by this edge
    bytes_received: U63 = msgspec.field(name="taken")  # from you by this edge (``SendWindow``)
    bytes_forwarded: U63 = msgspec.field(name="passed")  # of those: the rest waits above you


class Again(msgspec.Struct, frozen=True, tag="again"):
    """``origin`` is to send all its uncommitted updates again."""

    origin: NodeField | None  # None: everybody below


class Behind(msgspec.Struct, frozen=True, tag="behind"):
    """The log no longer reaches back to what you ask for: take a snapshot."""

    base: CommitField
    last: LastSeqs


# -- data --------------------------------------------------------------------------------------


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """One encoded gradient update on its way to the root."""

    origin: NodeField  # who made it, not who relayed it
    seq: SeqField  # from 1 per origin; ids are never reused, so (origin, seq) is the key
    seen: CommitField  # newest commit in the replica when the gradient was taken
    epoch: U32  # position up to which the origin has trained
    batch: U32
    steps: U63
    payload: Payload


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """An update with its place in the one order. Its origin gets the number with NOTHING."""

    commit: CommitField
    origin: NodeField
    seq: SeqField
    payload: Payload


class MergedRange(msgspec.Struct, frozen=True, kw_only=True):
    """All commits in (after, commit] as one sum, for a child that is exactly at ``after``."""

    after: CommitField
    commit: CommitField
    last: LastSeqs  # per id with an update in it: the newest seq in it
    count: U32  # entries in it, about: what a link reckons with
    payload: bytes


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a snapshot: parameters of one index range, with all commits up to ``commit``."""

    index: U32
    commit: CommitField
    payload: bytes


class UpdaterChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a worker's updater state on its way to who joins in mid-training."""

    asker: NodeField
    copy: U63  # above 0: a hash of the whole copy
    index: U32
    count: U32
    payload: bytes


Control = (
    Join | Silent | Here | Failed | Says | Attach | Heartbeat | AskAfter | AskChunk | AskUpdater
    | Leaving | Welcome | Adopt | Disown | Probe | Refused | Closed | Release
    | Attached | State | Again | Behind
)  # fmt: skip
Direct = Join | Silent | Here | Failed | Says | Leaving
Data = Update | Committed | MergedRange | Chunk | UpdaterChunk
Message = Control | Data
