"""The vocabulary of the mesh: every message as a frozen value.

Three travel on data streams (``Update``, ``Committed``, ``Chunk``); the others are control. What a
message means is decided by the machines in ``protocol``; how it looks as bytes by ``wire``.
"""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec

U16 = Annotated[int, msgspec.Meta(ge=0, lt=2**16)]
U32 = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
U63 = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # u64 on the wire; the top bit stays free
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
    """What a worker is doing; only READING and STEPPING run against ``step_timeout``."""

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


# -- up: from a node to the master -------------------------------------------------------------


class Join(msgspec.Struct, frozen=True, tag="join", kw_only=True):
    """Ask for a place in the mesh, or for a new edge to the old one (same token and count).

    ``token`` is random per process, ``count`` rises with each return of that process, ``edge``
    with each reopening. ``attempt`` is Spark's taskAttemptId: the higher one owns the partition.
    """

    token: U63
    count: U32
    edge: U32
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
    have: U63  # newest commit that this node holds in order; 0 with no replica yet
    has_replica: bool


class Report(msgspec.Struct, frozen=True, tag="report", kw_only=True):
    """Lease renewal, acknowledgement and position in one; idempotent, the newest counts."""

    edge: U32
    received: U63  # every commit up to here has been received in order
    after_seq: U63  # ``epoch, batch`` counts once the node's update of this number is committed
    epoch: U32
    batch: U32
    steps: U63
    activity: Activity


class AskAfter(msgspec.Struct, frozen=True, tag="ask-after"):
    """Commits are missing: send again everything after ``commit``."""

    commit: U63


class AskChunk(msgspec.Struct, frozen=True, tag="ask-chunk"):
    """Send this chunk of a snapshot, as it is now."""

    index: U32


class Final(msgspec.Struct, frozen=True, tag="final"):
    """The node publishes nothing after its update ``seq``."""

    seq: U63


class Kept(msgspec.Struct, frozen=True):
    """What a worker left on its executor's scratch for the next fit."""

    path: Text
    mass: float  # sum of absolute values of the residual (parameter units)


class AuditAnswer(msgspec.Struct, frozen=True, tag="audit-answer"):
    """SHA-256 of the replica's bytes at ``commit``, as hex, and what was kept for the next fit."""

    commit: U63
    digest: Annotated[str, msgspec.Meta(max_length=64)]
    kept: Kept | None


class Stats(msgspec.Struct, frozen=True, tag="stats"):
    """Counters of a worker by name, cumulative since it joined; opaque to the protocol."""

    values: Annotated[dict[str, float], msgspec.Meta(max_length=64)]


class Failed(msgspec.Struct, frozen=True, tag="failed", kw_only=True):
    """Training failed here and must end everywhere."""

    reason: Trace
    trace: Trace


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """A goodbye: the node is done with this fit, and its lease may end at once."""

    reason: Text
    kept: Kept | None


# -- down: from the master to a node -----------------------------------------------------------


class Welcome(msgspec.Struct, frozen=True, tag="welcome", kw_only=True):
    """The answer to ``Join``: who you are, where to send, where to begin."""

    token: U63
    count: U32
    edge: U32
    node: U32
    up: Address
    base: U63  # commits after this one follow on the data stream
    snapshot: bool  # a replica as of ``base`` or later must be fetched in chunks first
    chunks: U32
    last: list[tuple[U32, U63]]  # per id of this process: its last committed seq at ``base``
    closed: list[tuple[U32, U63]]  # former ids of this process and the seq they were closed at
    epoch: U32
    batch: U32
    steps: U63  # the step count that a newcomer starts from
    grants: list[Text]  # files of an earlier fit on this executor, yours to add


class Refused(msgspec.Struct, frozen=True, tag="refused", kw_only=True):
    """No place for you. ``fatal``: the task must fail; otherwise it ends with success."""

    token: U63
    count: U32
    reason: Trace
    fatal: bool


class State(msgspec.Struct, frozen=True, tag="state", kw_only=True):
    """Where the fit is. Answers reports, and is sent when it changes."""

    phase: Phase
    head: U63
    final: U63  # the audited commit, from AUDIT on
    slowest: U63  # steps of the slowest live, unfinished worker
    last_seq: U63  # your newest committed update


class Again(msgspec.Struct, frozen=True, tag="again"):
    """Updates after ``seq`` did not arrive in order: send all uncommitted ones again."""

    seq: U63


class Behind(msgspec.Struct, frozen=True, tag="behind"):
    """The log no longer reaches back to what you ask for: take a snapshot."""

    base: U63
    chunks: U32
    last: list[tuple[U32, U63]]


class Closed(msgspec.Struct, frozen=True, tag="closed", kw_only=True):
    """Your id is closed. ``free``: come back under a new one; otherwise your task is over."""

    token: U63
    count: U32
    node: U32
    seq: U63  # its last committed update
    reason: Text
    free: bool


class Release(msgspec.Struct, frozen=True, tag="release"):
    """Your partition is trained and another task needs the slot: keep your residual and leave."""

    reason: Text


# -- data --------------------------------------------------------------------------------------


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """One encoded gradient update on its way to the root."""

    origin: U32  # who made it, not who relayed it
    seq: U63  # from 1 per origin; ids are never reused, so (origin, seq) is the key
    seen: U63  # newest commit in the replica when the gradient was taken
    epoch: U32  # position up to which the origin has trained
    batch: U32
    steps: U63
    form: int  # u8, how the payload is encoded; opaque to the protocol
    tau_quanta: U32  # threshold as a multiple of the job's quantum
    count: U32  # entries in the payload
    payload: bytes


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """An update with its place in the one order. Its origin gets the number without payload."""

    commit: U63
    origin: U32
    seq: U63
    form: int
    tau_quanta: U32
    count: U32
    payload: bytes


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a snapshot: parameters of one index range, with all commits up to ``commit``."""

    index: U32
    commit: U63
    payload: bytes


Control = (
    Join | Report | AskAfter | AskChunk | Final | AuditAnswer | Stats | Failed | Leaving
    | Welcome | Refused | State | Again | Behind | Closed | Release
)  # fmt: skip
Data = Update | Committed | Chunk
Message = Control | Data
