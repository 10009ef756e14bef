"""Stages: where each part of a machine stands, and in one table all ways from one to the next.

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
    LEAVING = "it has, and says so until it was heard"
    FAILING = "training raised, which is said until it was heard"
    ENDED = "no other order follows"


TRAINING, ENDED = TaskStage.TRAINING, TaskStage.ENDED


class FarewellStage(enum.Enum):
    """Of the end of the fit, as this node has part in it."""

    NEEDED = "the fit goes on, or this node is not audited yet"
    LINGERING = "the fit is done; others hear so from this node"
    DISMISSED = "it has taken leave of its parent"


DISMISSED = FarewellStage.DISMISSED


class ChildStage(enum.Enum):
    """Of a child, as its parent feeds it."""

    PROBE = "it has not said what it holds, or there is nothing to give it"
    REPLICATE = "it takes the commits as they come"
    SNAPSHOT = "it takes a snapshot, and the commits since"


PROBE, REPLICATE, SNAPSHOT = ChildStage.PROBE, ChildStage.REPLICATE, ChildStage.SNAPSHOT


class MemberStage(enum.Enum):
    """Of a member's place, as the master orders it."""

    WAITING = "its place is not ordered: the one above it has none"
    ORDERED = "it is told its place, and its parent has not confirmed the edge"
    UNHEARD = "the same, and its parent waits for it in vain"
    PLACED = "its parent has confirmed the edge"
    SUSPECT = "it, or one above it, may be gone: the master asks it"
    BROKEN = "its parent does not hear it any more: the master asks it"
    CLOSED = "its id is nobody's any more"


WAITING, PLACED, SUSPECT = MemberStage.WAITING, MemberStage.PLACED, MemberStage.SUSPECT
CLOSED_ID = MemberStage.CLOSED
IN_PLACE = (MemberStage.PLACED, MemberStage.SUSPECT, MemberStage.BROKEN)
NOT_HEARD = (MemberStage.UNHEARD, MemberStage.BROKEN)
Stage = LinkStage | ReplicaStage | TaskStage | FarewellStage | ChildStage | MemberStage


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
    FOLLOWS = "it goes on from where it is"
    COPIES = "what it lacks is not in the log, or it has taken part of a snapshot"
    HAS_COPY = "it reports that its snapshot is whole"
    ORDERED = "the one above has its place, so it is told its own"
    CONFIRMED = "its parent has it by the newest edge"
    COMPLAINED = "its parent does not hear it"
    DOUBTED = "one above it, or it, is not heard"
    SPOKE = "it has answered the master itself"
    MOVED = "its edge is gone, or is to lead to somebody else"
    EXPELLED = "it has left, is superseded, or its lease is over"


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
_LIVE = [stage for stage in MemberStage if stage is not MemberStage.CLOSED]
_CHILD: Table = {
    (ChildStage.PROBE, Cause.FOLLOWS): ChildStage.REPLICATE,
    (ChildStage.PROBE, Cause.COPIES): ChildStage.SNAPSHOT,
    (ChildStage.REPLICATE, Cause.COPIES): ChildStage.SNAPSHOT,
    (ChildStage.SNAPSHOT, Cause.COPIES): ChildStage.SNAPSHOT,
    (ChildStage.SNAPSHOT, Cause.HAS_COPY): ChildStage.REPLICATE,
}
_MEMBER: Table = {
    (MemberStage.WAITING, Cause.ORDERED): MemberStage.ORDERED,
    (MemberStage.ORDERED, Cause.CONFIRMED): MemberStage.PLACED,
    (MemberStage.UNHEARD, Cause.CONFIRMED): MemberStage.PLACED,
    (MemberStage.ORDERED, Cause.COMPLAINED): MemberStage.UNHEARD,
    (MemberStage.UNHEARD, Cause.COMPLAINED): MemberStage.UNHEARD,
    (MemberStage.PLACED, Cause.COMPLAINED): MemberStage.BROKEN,
    (MemberStage.SUSPECT, Cause.COMPLAINED): MemberStage.BROKEN,
    (MemberStage.BROKEN, Cause.COMPLAINED): MemberStage.BROKEN,
    (MemberStage.PLACED, Cause.DOUBTED): MemberStage.SUSPECT,
    (MemberStage.SUSPECT, Cause.SPOKE): MemberStage.PLACED,
    **dict.fromkeys(((stage, Cause.MOVED) for stage in _LIVE), MemberStage.WAITING),
    **dict.fromkeys(((stage, Cause.EXPELLED) for stage in _LIVE), MemberStage.CLOSED),
}
TRANSITIONS: Table = {**_LINK, **_REPLICA, **_TASK, **_FAREWELL, **_CHILD, **_MEMBER}


Kind = TypeVar("Kind", LinkStage, ReplicaStage, TaskStage, FarewellStage, ChildStage, MemberStage)


def after(stage: Kind, cause: Cause) -> Kind:
    """Where this leads. Only what is in the table may happen."""
    found = TRANSITIONS.get((stage, cause))
    assert found is not None, f"{cause} does not happen in {stage}"
    assert type(found) is type(stage), f"{stage} does not lead to {found}"
    return found
