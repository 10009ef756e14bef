"""Stages: where each part of a node stands, and in one table all ways from one to the next.

Whatever changes a stage names a cause, and the table says where that leads; what is not in it
cannot happen.
"""

from __future__ import annotations

import enum
from typing import TypeVar


class LinkStage(enum.Enum):
    """Of the edge to the parent."""

    CLOSED = "it listens nowhere yet"
    JOINING = "it has asked the master for a place"
    ATTACHING = "it has told a parent what it holds"
    ATTACHED = "the parent has answered over this edge"


class ReplicaStage(enum.Enum):
    """Of the replica, as its trainer has it."""

    EMPTY = "there is none, and none on its way"
    FETCHING = "a snapshot is on its way; the trainer is to stand still"
    INSTALLING = "all of it is with the trainer"
    REFETCHING = "the trainer still installs one, and the next is on its way"
    FOLLOWING = "it takes the commits as they come"


# Looking a member up in its class takes as long as two calls: what each event asks for has a name.
CLOSED, ATTACHING, ATTACHED = LinkStage.CLOSED, LinkStage.ATTACHING, LinkStage.ATTACHED
INSTALLING = ReplicaStage.INSTALLING
INSTALLS = (ReplicaStage.INSTALLING, ReplicaStage.REFETCHING)


class TaskStage(enum.Enum):
    """Of the task itself: how it comes to its end."""

    TRAINING = "orders follow from where the node stands"
    RELEASING = "it is to keep its residual and leave"
    LEAVING = "it has, and says goodbye until it was heard"
    FAILING = "training raised, which is said until it was heard"
    ENDED = "no other order follows"


TRAINING, ENDED = TaskStage.TRAINING, TaskStage.ENDED


class FarewellStage(enum.Enum):
    """Of the end of the fit, as this node has part in it."""

    NEEDED = "the fit goes on, or this node is not audited yet"
    LINGERING = "the fit is done; others hear so from this node"
    DISMISSED = "it has said goodbye to its parent"


DISMISSED = FarewellStage.DISMISSED
Stage = LinkStage | ReplicaStage | TaskStage | FarewellStage


class Cause(enum.Enum):
    """What leads from one stage to the next."""

    OPENED = "it listens on fresh streams"
    WELCOMED = "the master has named a place"
    ANSWERED = "the parent has answered"
    GIVEN_UP = "nothing is heard, or nothing gets through: it wants fresh streams"
    BEGUN = "it begins with the replica of commit 0"
    BEHIND = "the parent's log does not reach back to what is here"
    COMPLETED = "the snapshot is whole, and the trainer stands still"
    INSTALLED = "the trainer has installed it"
    RELEASED = "the master wants its slot"
    LEFT = "the trainer has kept its residual"
    FAILED = "the trainer has failed"
    ENDED = "a deadline, the master or the end of the fit ends the task"
    DONE = "the fit is done, and this node audited"
    UNNEEDED = "nobody below needs it, or has needed it for long enough"


Table = dict[tuple[Stage, Cause], Stage]
_LINK: Table = {
    (LinkStage.CLOSED, Cause.OPENED): LinkStage.JOINING,
    (LinkStage.JOINING, Cause.OPENED): LinkStage.JOINING,
    (LinkStage.ATTACHING, Cause.OPENED): LinkStage.JOINING,
    (LinkStage.ATTACHED, Cause.OPENED): LinkStage.JOINING,
    (LinkStage.JOINING, Cause.WELCOMED): LinkStage.ATTACHING,
    (LinkStage.ATTACHING, Cause.WELCOMED): LinkStage.ATTACHING,
    (LinkStage.ATTACHED, Cause.WELCOMED): LinkStage.ATTACHING,
    (LinkStage.ATTACHING, Cause.ANSWERED): LinkStage.ATTACHED,
    (LinkStage.JOINING, Cause.GIVEN_UP): LinkStage.JOINING,
    (LinkStage.ATTACHING, Cause.GIVEN_UP): LinkStage.ATTACHING,
    (LinkStage.ATTACHED, Cause.GIVEN_UP): LinkStage.ATTACHING,
}
_REPLICA: Table = {
    (ReplicaStage.EMPTY, Cause.BEGUN): ReplicaStage.INSTALLING,
    (ReplicaStage.EMPTY, Cause.BEHIND): ReplicaStage.FETCHING,
    (ReplicaStage.FETCHING, Cause.BEHIND): ReplicaStage.FETCHING,
    (ReplicaStage.INSTALLING, Cause.BEHIND): ReplicaStage.REFETCHING,
    (ReplicaStage.REFETCHING, Cause.BEHIND): ReplicaStage.REFETCHING,
    (ReplicaStage.FOLLOWING, Cause.BEHIND): ReplicaStage.FETCHING,
    (ReplicaStage.FETCHING, Cause.COMPLETED): ReplicaStage.INSTALLING,
    (ReplicaStage.INSTALLING, Cause.INSTALLED): ReplicaStage.FOLLOWING,
    (ReplicaStage.REFETCHING, Cause.INSTALLED): ReplicaStage.FETCHING,
}
_TASK: Table = {
    (TaskStage.TRAINING, Cause.RELEASED): TaskStage.RELEASING,
    (TaskStage.RELEASING, Cause.RELEASED): TaskStage.RELEASING,
    (TaskStage.LEAVING, Cause.RELEASED): TaskStage.LEAVING,
    (TaskStage.FAILING, Cause.RELEASED): TaskStage.FAILING,
    (TaskStage.ENDED, Cause.RELEASED): TaskStage.ENDED,
    (TaskStage.RELEASING, Cause.LEFT): TaskStage.LEAVING,
    (TaskStage.ENDED, Cause.LEFT): TaskStage.ENDED,
    (TaskStage.TRAINING, Cause.FAILED): TaskStage.FAILING,
    (TaskStage.RELEASING, Cause.FAILED): TaskStage.FAILING,
    (TaskStage.LEAVING, Cause.FAILED): TaskStage.FAILING,
    (TaskStage.FAILING, Cause.FAILED): TaskStage.FAILING,
    (TaskStage.ENDED, Cause.FAILED): TaskStage.ENDED,
    (TaskStage.TRAINING, Cause.ENDED): TaskStage.ENDED,
    (TaskStage.RELEASING, Cause.ENDED): TaskStage.ENDED,
    (TaskStage.LEAVING, Cause.ENDED): TaskStage.ENDED,
    (TaskStage.FAILING, Cause.ENDED): TaskStage.ENDED,
    (TaskStage.ENDED, Cause.ENDED): TaskStage.ENDED,
}
_FAREWELL: Table = {
    (FarewellStage.NEEDED, Cause.DONE): FarewellStage.LINGERING,
    (FarewellStage.LINGERING, Cause.UNNEEDED): FarewellStage.DISMISSED,
}
TRANSITIONS: Table = {**_LINK, **_REPLICA, **_TASK, **_FAREWELL}


Kind = TypeVar("Kind", LinkStage, ReplicaStage, TaskStage, FarewellStage)


def after(stage: Kind, cause: Cause) -> Kind:
    """Where this leads. Only what is in the table may happen."""
    found = TRANSITIONS.get((stage, cause))
    assert found is not None, f"{cause} does not happen in {stage}"
    assert type(found) is type(stage), f"{stage} does not lead to {found}"
    return found
