"""Who says what to whom, and who takes it there: the table of ``docs/protocol.md``, as data."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from sparkstrom.codec import messages as m
from sparkstrom.protocol.common import stages


class Way(Enum):
    """How a message comes to its receiver."""

    UP_TO_WORKER = "child, over the edge", "worker"
    UP_TO_MASTER = "child, over the edge", "master"
    DOWN = "parent, over the edge", "worker"
    LOBBY = "worker, directly", "master"
    DIRECT = "master, directly", "worker"


class Route(NamedTuple):
    """One kind of message, one way, and what takes it."""

    kind: type
    way: Way
    handler: str


ROUTES = [
    Route(m.Join, Way.LOBBY, "Admission.on_join"),
    Route(m.Silent, Way.LOBBY, "Placement.on_silent"),
    Route(m.Here, Way.LOBBY, "Placement.is_here"),
    Route(m.Failed, Way.LOBBY, "Master._on_failed"),
    Route(m.Says, Way.LOBBY, "Master._on_direct"),
    Route(m.Leaving, Way.LOBBY, "Master._on_leaving"),
    Route(m.Welcome, Way.DIRECT, "Joining.on_welcome"),
    Route(m.Refused, Way.DIRECT, "Joining.on_refused"),
    Route(m.Closed, Way.DIRECT, "Joining.on_closed"),
    Route(m.Adopt, Way.DIRECT, "Relaying.on_adopt"),
    Route(m.Disown, Way.DIRECT, "Relaying.on_disown"),
    Route(m.Probe, Way.DIRECT, "Node._on_direct"),
    Route(m.Release, Way.DIRECT, "TaskEnd.release"),
    Route(m.AskUpdater, Way.DIRECT, "OptimizerTransfers.on_ask"),
    Route(m.State, Way.DIRECT, "Node._on_state"),
    Route(m.Attach, Way.UP_TO_WORKER, "Relaying._on_attach"),
    Route(m.Heartbeat, Way.UP_TO_WORKER, "Children.on_report"),
    Route(m.AskAfter, Way.UP_TO_WORKER, "Children.on_ask_after"),
    Route(m.AskChunk, Way.UP_TO_WORKER, "Children.on_ask_chunk"),
    Route(m.AskUpdater, Way.UP_TO_WORKER, "OptimizerTransfers.on_ask"),
    Route(m.Leaving, Way.UP_TO_WORKER, "Subtree.drop"),
    Route(m.Update, Way.UP_TO_WORKER, "Relaying._on_update"),
    Route(m.UpdaterChunk, Way.UP_TO_WORKER, "OptimizerTransfers.on_chunk"),
    Route(m.Attach, Way.UP_TO_MASTER, "Children.on_attach"),
    Route(m.Heartbeat, Way.UP_TO_MASTER, "Children.on_report"),
    Route(m.AskAfter, Way.UP_TO_MASTER, "Children.on_ask_after"),
    Route(m.AskChunk, Way.UP_TO_MASTER, "Children.on_ask_chunk"),
    Route(m.AskUpdater, Way.UP_TO_MASTER, "OptimizerSources.on_ask"),
    Route(m.Leaving, Way.UP_TO_MASTER, "Children.disown"),
    Route(m.Update, Way.UP_TO_MASTER, "CommitOrder.on_update"),
    Route(m.UpdaterChunk, Way.UP_TO_MASTER, "Master._on_child"),
    Route(m.Attached, Way.DOWN, "Joining.on_attached"),
    Route(m.State, Way.DOWN, "Node._on_state"),
    Route(m.Again, Way.DOWN, "Relaying.on_again"),
    Route(m.Behind, Way.DOWN, "Replication.on_behind"),
    Route(m.Committed, Way.DOWN, "Replication.on_committed"),
    Route(m.MergedRange, Way.DOWN, "Replication.on_merged"),
    Route(m.Chunk, Way.DOWN, "Replication.on_chunk"),
    Route(m.UpdaterChunk, Way.DOWN, "OptimizerTransfers.on_chunk"),
]


def messages_table() -> str:
    """As it stands in the document."""
    head = ["| message | from | to | taken by |", "|---|---|---|---|"]
    rows = [
        f"| `{kind.__name__}` | {way.value[0]} | {way.value[1]} | `{handler}` |"
        for kind, way, handler in ROUTES
    ]
    return "\n".join([*head, *rows])


def stages_table() -> str:
    """The same of ``stages.TRANSITIONS``."""
    head = ["| part | stage | when | next |", "|---|---|---|---|"]
    rows = [
        f"| {type(stage).__name__.removesuffix('Stage').lower()} | {stage.name} | {cause.value} "
        f"({cause.name}) | {to.name} |"
        for (stage, cause), to in stages.TRANSITIONS.items()
    ]
    return "\n".join([*head, *rows])
