"""The table of messages in ``docs/protocol.md`` as data: each message's way and handler."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from sparkstrom.codec import messages as m
from sparkstrom.protocol.common import stages


class Way(Enum):
    """Between whom, and over which path, a message travels."""

    UP_TO_WORKER = "child, over the edge", "worker"
    UP_TO_MASTER = "child, over the edge", "master"
    DOWN = "parent, over the edge", "worker"
    LOBBY = "worker, directly", "master"
    DIRECT = "master, directly", "worker"


class Route(NamedTuple):
    """One type of message on one way, and the method that handles it."""

    kind: type
    way: Way
    handler: str


ROUTES = [
    Route(m.Join, Way.LOBBY, "Admission.on_join"),
    Route(m.ChildSilent, Way.LOBBY, "Placement.on_child_silent"),
    Route(m.ProbeReply, Way.LOBBY, "Placement.on_probe_reply"),
    Route(m.TrainingFailure, Way.LOBBY, "Master._on_training_failure"),
    Route(m.WorkerLog, Way.LOBBY, "Master._on_direct"),
    Route(m.LeaveNotice, Way.LOBBY, "Master._on_leave_notice"),
    Route(m.Welcome, Way.DIRECT, "Joining.on_welcome"),
    Route(m.JoinRefusal, Way.DIRECT, "Joining.on_join_refusal"),
    Route(m.IdClosed, Way.DIRECT, "Joining.on_id_closed"),
    Route(m.Adopt, Way.DIRECT, "Relaying.on_adopt"),
    Route(m.Disown, Way.DIRECT, "Relaying.on_disown"),
    Route(m.Probe, Way.DIRECT, "Node._on_direct"),
    Route(m.Release, Way.DIRECT, "TaskEnd.release"),
    Route(m.OptimizerRequest, Way.DIRECT, "OptimizerTransfers.on_request"),
    Route(m.State, Way.DIRECT, "Node._on_state"),
    Route(m.Attach, Way.UP_TO_WORKER, "Relaying._on_attach"),
    Route(m.Heartbeat, Way.UP_TO_WORKER, "Children.on_heartbeat"),
    Route(m.CommitsRequest, Way.UP_TO_WORKER, "Children.on_commits_request"),
    Route(m.ChunkRequest, Way.UP_TO_WORKER, "Children.on_chunk_request"),
    Route(m.OptimizerRequest, Way.UP_TO_WORKER, "OptimizerTransfers.on_request"),
    Route(m.LeaveNotice, Way.UP_TO_WORKER, "Subtree.drop"),
    Route(m.Update, Way.UP_TO_WORKER, "Relaying._on_update"),
    Route(m.OptimizerChunk, Way.UP_TO_WORKER, "OptimizerTransfers.on_chunk"),
    Route(m.Attach, Way.UP_TO_MASTER, "Children.on_attach"),
    Route(m.Heartbeat, Way.UP_TO_MASTER, "Children.on_heartbeat"),
    Route(m.CommitsRequest, Way.UP_TO_MASTER, "Children.on_commits_request"),
    Route(m.ChunkRequest, Way.UP_TO_MASTER, "Children.on_chunk_request"),
    Route(m.OptimizerRequest, Way.UP_TO_MASTER, "OptimizerSources.on_request"),
    Route(m.LeaveNotice, Way.UP_TO_MASTER, "Children.disown"),
    Route(m.Update, Way.UP_TO_MASTER, "CommitOrder.on_update"),
    Route(m.OptimizerChunk, Way.UP_TO_MASTER, "Master._on_child"),
    Route(m.AttachReply, Way.DOWN, "Joining.on_attach_reply"),
    Route(m.State, Way.DOWN, "Node._on_state"),
    Route(m.ResendRequest, Way.DOWN, "Relaying.on_resend_request"),
    Route(m.SnapshotRequired, Way.DOWN, "Replication.on_snapshot_required"),
    Route(m.Commit, Way.DOWN, "Replication.on_commit"),
    Route(m.MergedRange, Way.DOWN, "Replication.on_merged"),
    Route(m.Chunk, Way.DOWN, "Replication.on_chunk"),
    Route(m.OptimizerChunk, Way.DOWN, "OptimizerTransfers.on_chunk"),
]


def messages_table() -> str:
    """Return the table of messages as Markdown, as in the document."""
    head = ["| message | from | to | taken by |", "|---|---|---|---|"]
    rows = [
        f"| `{kind.__name__}` | {way.value[0]} | {way.value[1]} | `{handler}` |"
        for kind, way, handler in ROUTES
    ]
    return "\n".join([*head, *rows])


def stages_table() -> str:
    """Return ``stages.TRANSITIONS`` as Markdown; rows with equal trigger and result are merged."""
    head = ["| part | stage | when | next |", "|---|---|---|---|"]
    grouped: dict[tuple[stages.Trigger, stages.Stage], list[stages.Stage]] = {}
    for (stage, cause), to in stages.TRANSITIONS.items():
        grouped.setdefault((cause, to), []).append(stage)
    rows = [
        f"| {type(to).__name__.removesuffix('Stage').lower()} | "
        f"{', '.join(stage.name for stage in found)} | {cause.value} ({cause.name}) | {to.name} |"
        for (cause, to), found in grouped.items()
    ]
    return "\n".join([*head, *rows])
