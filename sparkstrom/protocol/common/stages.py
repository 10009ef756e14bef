"""The stages that the parts of the protocol's state machines pass through, as one table.

Theory of operation
===================

Two state machines make up the protocol: ``Master`` (one, in the controller) and ``Node`` (one in
each worker process, beside its trainer). ``step(event, now_s)`` takes an event and returns effects;
a machine does no I/O, owns no thread and reads no clock. ``docs/protocol.md`` has the messages and
two sequence diagrams; read this overview before the code.

One order. A worker publishes updates and numbers them (``seq``, from 1, without gaps); the worker
is the *origin* of its updates. An update travels up the tree to the master, which alone turns the
update into a *commit* with the next number (``commit``, from 1). Commits travel down, and every
replica adds them in this order. Parameters are whole multiples of one quantum, so float32 additions
are exact, and replicas at equal commits are equal bit for bit. What a node has received is
therefore a single number, and what it lacks is one range of numbers. An origin keeps an update
until it sees the commit; the master drops repeated updates by their ``seq``. The commit of an
origin's own update comes back without the payload, which the origin still has.

Tree. The master is the root. It gives each member a place, a parent, and an *edge* to that
parent: a pair of streams (control, data) with a number that no edge had before. Within an edge,
streams are ordered and complete, so nothing is sent again; over a new edge everything uncertain is
sent again. Some messages bypass the tree and go directly between a node and the master: joins,
places, probes, and the closing of an id. These may get lost, so they are repeated until an answer
shows that they arrived.

Ids. A process gets a fresh id each time it joins, and an id is never reused. The master closes an
id when its lease expires, when a newer attempt takes its partition, or when its process leaves.
Closing fixes, at once, the last ``seq`` that counts and the position at which the successor
starts. A process whose id was closed may return under a new one, with its replica and its residual.

Leases. A node counts as alive while its parent hears from it. When a parent hears nothing from a
child for the length of a lease, the parent only reports the silence (``ChildSilent``): the edge may
be broken rather than the child. The master then probes the child and all nodes below it directly,
and closes the ids of those that stay silent for a lease.

Each part of a machine has its own stage:

- ``LinkStage``: the edge from a node to its parent. The node joins, the master answers with a place
  (``Welcome``), the node attaches, the parent replies. When the edge stays silent, or signs of life
  arrive but no data does, the node opens fresh streams and joins again for another edge.
- ``ReplicaStage``: how a node gets its parameters. It starts from the replica of commit 0 if the
  parent's log reaches back that far; otherwise it fetches a snapshot in chunks from the parent's
  live replica, and holds all later commits until then. Then it follows the commits. A node that
  falls out of reach of the parent's log fetches again.
- ``TaskStage``: how a worker's task ends. While it trains, the other stages determine the node's
  directive, the trainer's next instruction. Training ends when the master needs the task slot
  for another worker, when the trainer fails, or when something else ends the task.
- ``FarewellStage``: after the fit is done, a parent stays until its children know that it is done.
- ``ChildStage``: how a parent serves one child, as a Raft leader serves a follower: probe the child
  until it reports what it holds, then send it commits, or a snapshot first.
- ``MemberStage``: a member's place in the tree, which the master assigns from the top down: a node
  is sent to a parent only after that parent's own edge is confirmed, so no cycle ever exists.

Every change of a stage names a trigger, and ``TRANSITIONS`` gives the next stage. A combination
that is not in the table cannot happen and raises AssertionError, in production and in simulation.
"""

from __future__ import annotations

import enum
from typing import TypeVar


class LinkStage(enum.Enum):
    """Stage of a node's edge to its parent. The values of all stages are texts for the docs."""

    CLOSED = "no stream is open yet"
    JOINING = "it has asked the master for a place"
    ATTACHING = "it has a place, and has told the parent what it holds"
    ATTACHED = "the parent has answered over this edge; data may flow"


class ReplicaStage(enum.Enum):
    """Stage of a node's replica, which its trainer owns."""

    EMPTY = "it has no replica, and none is on its way"
    FETCHING = "a snapshot is on its way; the trainer is to pause"
    INSTALLING = "the trainer is installing a complete replica"
    REFETCHING = "the trainer is still installing one, and the next is on its way"
    FOLLOWING = "it applies the commits as they come"


# Module-level names: an attribute lookup on an Enum class costs as much as two calls, and these are
# compared after every event.
CLOSED, ATTACHING, ATTACHED = LinkStage.CLOSED, LinkStage.ATTACHING, LinkStage.ATTACHED
INSTALLING = ReplicaStage.INSTALLING
INSTALLS = (ReplicaStage.INSTALLING, ReplicaStage.REFETCHING)


class TaskStage(enum.Enum):
    """Stage of a worker's task on its way to the end."""

    TRAINING = "directives follow from the other stages"
    RELEASING = "the trainer is to save its residual and leave"
    LEAVING = "it has saved it, and announces that until the master confirms"
    FAILING = "training raised, which is reported until the master confirms"
    ENDED = "the last directive is given"


TRAINING, ENDED = TaskStage.TRAINING, TaskStage.ENDED


class FarewellStage(enum.Enum):
    """Stage of a node after the end of the fit, while children may still depend on it."""

    NEEDED = "the fit is not done, or this node is not audited yet"
    LINGERING = "the fit is done; it waits until its children have heard so"
    DISMISSED = "it has taken leave of its parent"


DISMISSED = FarewellStage.DISMISSED


class ChildStage(enum.Enum):
    """Stage of a child from its parent's point of view: what the parent sends it."""

    PROBE = "it has not said what it holds, or the parent has nothing to give yet"
    REPLICATE = "it receives the commits as they come"
    SNAPSHOT = "it receives a snapshot, and the commits since"


PROBE, REPLICATE, SNAPSHOT = ChildStage.PROBE, ChildStage.REPLICATE, ChildStage.SNAPSHOT


class MemberStage(enum.Enum):
    """Stage of a member's place in the tree, from the master's point of view."""

    WAITING = "its place is not ordered: its parent has no confirmed place"
    ORDERED = "it was sent its place; its parent has not confirmed the edge"
    UNHEARD = "the same, and its parent reports that it hears nothing"
    PLACED = "its parent has confirmed the edge"
    SUSPECT = "it, or a node above it, may be gone: the master probes it"
    BROKEN = "its parent does not hear it any more: the master probes it"
    CLOSED = "its id is closed for good"


WAITING, PLACED, SUSPECT = MemberStage.WAITING, MemberStage.PLACED, MemberStage.SUSPECT
CLOSED_ID = MemberStage.CLOSED
IN_PLACE = (MemberStage.PLACED, MemberStage.SUSPECT, MemberStage.BROKEN)
NOT_HEARD = (MemberStage.UNHEARD, MemberStage.BROKEN)
Stage = LinkStage | ReplicaStage | TaskStage | FarewellStage | ChildStage | MemberStage


class Trigger(enum.Enum):
    """An event that moves a part to another stage. Values are texts for docs/protocol.md."""

    # link
    OPENED = "the node listens on fresh streams"
    WELCOMED = "the master has named a place"
    ANSWERED = "the parent has answered"
    GIVEN_UP = "nothing is heard, or no data gets through: it requests fresh streams"
    # replica
    BEGUN = "it starts from the replica of commit 0"
    BEHIND = "the parent's log does not reach back to what it holds"
    COMPLETED = "the snapshot is complete, and the trainer has paused"
    INSTALLED = "the trainer has installed it"
    # task
    RELEASED = "the master requests its task slot"
    LEFT = "the trainer has saved its residual"
    FAILED = "the trainer has failed"
    ENDED = "a deadline, the master or the end of the fit ends the task"
    # farewell
    DONE = "the fit is done, and this node audited"
    UNNEEDED = "no child depends on it, or it has waited long enough"
    # child
    FOLLOWS = "it continues from what it holds"
    COPIES = "the log does not reach back to it, or it has taken part of a snapshot"
    HAS_COPY = "it reports that its snapshot is complete"
    # member
    ORDERED = "its parent has a confirmed place, so it is sent its own"
    CONFIRMED = "its parent confirms the newest edge"
    COMPLAINED = "its parent reports that it hears nothing"
    DOUBTED = "it, or a node above it, is not heard"
    SPOKE = "it has answered the master directly"
    MOVED = "its edge is gone, or it gets another parent"
    EXPELLED = "it has left, is superseded, or its lease has expired"


Table = dict[tuple[Stage, Trigger], Stage]
_LINK: Table = {
    (LinkStage.CLOSED, Trigger.OPENED): LinkStage.JOINING,
    (LinkStage.JOINING, Trigger.OPENED): LinkStage.JOINING,
    (LinkStage.ATTACHING, Trigger.OPENED): LinkStage.JOINING,
    (LinkStage.ATTACHED, Trigger.OPENED): LinkStage.JOINING,
    (LinkStage.JOINING, Trigger.WELCOMED): LinkStage.ATTACHING,
    (LinkStage.ATTACHING, Trigger.WELCOMED): LinkStage.ATTACHING,
    (LinkStage.ATTACHED, Trigger.WELCOMED): LinkStage.ATTACHING,
    (LinkStage.ATTACHING, Trigger.ANSWERED): LinkStage.ATTACHED,
    (LinkStage.JOINING, Trigger.GIVEN_UP): LinkStage.JOINING,
    (LinkStage.ATTACHING, Trigger.GIVEN_UP): LinkStage.ATTACHING,
    (LinkStage.ATTACHED, Trigger.GIVEN_UP): LinkStage.ATTACHING,
}
_REPLICA: Table = {
    (ReplicaStage.EMPTY, Trigger.BEGUN): ReplicaStage.INSTALLING,
    (ReplicaStage.EMPTY, Trigger.BEHIND): ReplicaStage.FETCHING,
    (ReplicaStage.FETCHING, Trigger.BEHIND): ReplicaStage.FETCHING,
    (ReplicaStage.INSTALLING, Trigger.BEHIND): ReplicaStage.REFETCHING,
    (ReplicaStage.REFETCHING, Trigger.BEHIND): ReplicaStage.REFETCHING,
    (ReplicaStage.FOLLOWING, Trigger.BEHIND): ReplicaStage.FETCHING,
    (ReplicaStage.FETCHING, Trigger.COMPLETED): ReplicaStage.INSTALLING,
    (ReplicaStage.INSTALLING, Trigger.INSTALLED): ReplicaStage.FOLLOWING,
    (ReplicaStage.REFETCHING, Trigger.INSTALLED): ReplicaStage.FETCHING,
}
_TASK: Table = {
    (TaskStage.TRAINING, Trigger.RELEASED): TaskStage.RELEASING,
    (TaskStage.RELEASING, Trigger.RELEASED): TaskStage.RELEASING,
    (TaskStage.LEAVING, Trigger.RELEASED): TaskStage.LEAVING,
    (TaskStage.FAILING, Trigger.RELEASED): TaskStage.FAILING,
    (TaskStage.ENDED, Trigger.RELEASED): TaskStage.ENDED,
    (TaskStage.RELEASING, Trigger.LEFT): TaskStage.LEAVING,
    (TaskStage.ENDED, Trigger.LEFT): TaskStage.ENDED,
    (TaskStage.TRAINING, Trigger.FAILED): TaskStage.FAILING,
    (TaskStage.RELEASING, Trigger.FAILED): TaskStage.FAILING,
    (TaskStage.LEAVING, Trigger.FAILED): TaskStage.FAILING,
    (TaskStage.FAILING, Trigger.FAILED): TaskStage.FAILING,
    (TaskStage.ENDED, Trigger.FAILED): TaskStage.ENDED,
    (TaskStage.TRAINING, Trigger.ENDED): TaskStage.ENDED,
    (TaskStage.RELEASING, Trigger.ENDED): TaskStage.ENDED,
    (TaskStage.LEAVING, Trigger.ENDED): TaskStage.ENDED,
    (TaskStage.FAILING, Trigger.ENDED): TaskStage.ENDED,
    (TaskStage.ENDED, Trigger.ENDED): TaskStage.ENDED,
}
_FAREWELL: Table = {
    (FarewellStage.NEEDED, Trigger.DONE): FarewellStage.LINGERING,
    (FarewellStage.LINGERING, Trigger.UNNEEDED): FarewellStage.DISMISSED,
}
_LIVE = [stage for stage in MemberStage if stage is not MemberStage.CLOSED]
_CHILD: Table = {
    (ChildStage.PROBE, Trigger.FOLLOWS): ChildStage.REPLICATE,
    (ChildStage.PROBE, Trigger.COPIES): ChildStage.SNAPSHOT,
    (ChildStage.REPLICATE, Trigger.COPIES): ChildStage.SNAPSHOT,
    (ChildStage.SNAPSHOT, Trigger.COPIES): ChildStage.SNAPSHOT,
    (ChildStage.SNAPSHOT, Trigger.HAS_COPY): ChildStage.REPLICATE,
}
_MEMBER: Table = {
    (MemberStage.WAITING, Trigger.ORDERED): MemberStage.ORDERED,
    (MemberStage.ORDERED, Trigger.CONFIRMED): MemberStage.PLACED,
    (MemberStage.UNHEARD, Trigger.CONFIRMED): MemberStage.PLACED,
    (MemberStage.ORDERED, Trigger.COMPLAINED): MemberStage.UNHEARD,
    (MemberStage.UNHEARD, Trigger.COMPLAINED): MemberStage.UNHEARD,
    (MemberStage.PLACED, Trigger.COMPLAINED): MemberStage.BROKEN,
    (MemberStage.SUSPECT, Trigger.COMPLAINED): MemberStage.BROKEN,
    (MemberStage.BROKEN, Trigger.COMPLAINED): MemberStage.BROKEN,
    (MemberStage.PLACED, Trigger.DOUBTED): MemberStage.SUSPECT,
    (MemberStage.SUSPECT, Trigger.SPOKE): MemberStage.PLACED,
    **dict.fromkeys(((stage, Trigger.MOVED) for stage in _LIVE), MemberStage.WAITING),
    **dict.fromkeys(((stage, Trigger.EXPELLED) for stage in _LIVE), MemberStage.CLOSED),
}
TRANSITIONS: Table = {**_LINK, **_REPLICA, **_TASK, **_FAREWELL, **_CHILD, **_MEMBER}


StageKind = TypeVar(
    "StageKind", LinkStage, ReplicaStage, TaskStage, FarewellStage, ChildStage, MemberStage
)


def next_stage(stage: StageKind, trigger: Trigger) -> StageKind:
    """Return the stage that ``trigger`` leads to; raise AssertionError if the table lacks it."""
    found = TRANSITIONS.get((stage, trigger))
    assert found is not None, f"{trigger} does not happen in {stage}"
    assert type(found) is type(stage), f"{stage} does not lead to {found}"
    return found
