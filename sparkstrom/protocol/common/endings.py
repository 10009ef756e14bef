"""Endings: how tasks, memberships and fits end. Code asks for the member, people read its text."""

from __future__ import annotations

import enum


class Ending(enum.Enum):
    """How a task ends by what it or the master has said; over the wire goes the text."""

    DONE = "done"
    RELEASED = "released"
    DISMISSED = "its partition is trained already"
    SUPERSEDED = "another attempt of its task has taken the partition over"
    LEASE_OVER = "its lease ran out"
    FIT_FAILED = "the fit has failed"
    FAILED = "training failed here"
    OTHER = "for a reason of which there is only the text"

    @classmethod
    def of(cls, text: str) -> Ending:
        """What a text from the wire means."""
        return _BY_TEXT.get(text, cls.OTHER)


_BY_TEXT = {ending.value: ending for ending in Ending}


class Vain(enum.Enum):
    """What a task has waited for in vain, ``silent`` seconds long, so that it fails."""

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
        "no place in the mesh for {silent:.0f} s, although the master answers: those above it do "
        "not get their replicas; look at their logs"
    )
    PARENT = (
        "the node that it stands under has had no replica for it for {silent:.0f} s, although it "
        "answers"
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
        "look at the link of this executor and at that of the node it stands under"
    )
    STEP = "one training step took longer than {silent:.0f} s: raise step_timeout if that is normal"


class Lack(enum.Enum):
    """Of workers, for which a fit is given up."""

    AT_START = (
        "{} workers joined within {:.0f} s, min_workers is {} (of {} partitions): lower "
        "min_workers, raise start_timeout, take fewer workers, or give an application of Spark's "
        "more task slots (--num-executors, --executor-cores)"
    )
    LATER = (
        "partition {} has been without a worker for {:.0f} s: nobody has started another one; on "
        "Spark see the executors' state in its UI (lost, out of memory, no free slot?)"
    )
