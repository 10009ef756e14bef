"""Admission: who may join, under which id, and from where it goes on.

The same process and count get the same answer; a higher Spark taskAttemptId takes a partition
over from a lower one; a process that was evicted comes back under a new id while nobody else has
owned its partition.
"""

from __future__ import annotations

from sparkstrom.base.errors import UsageError
from sparkstrom.codec.messages import Join, Phase, Refused
from sparkstrom.protocol.common import events as ev
from sparkstrom.protocol.common.endings import Ending
from sparkstrom.protocol.common.events import Effect
from sparkstrom.protocol.common.ignored import Reason
from sparkstrom.protocol.master.fit import Fit
from sparkstrom.protocol.master.members import Member, answer
from sparkstrom.protocol.master.partitions import Partition
from sparkstrom.protocol.master.placement import (
    closed_answer,
    find_place,
    on_another_request,
    order_place,
)


def on_join(fit: Fit, join: Join, now_s: float) -> list[Effect]:
    """Answer a join, whoever sent it and however often."""
    if join.version != fit.spec.version:
        reason = DIFFERENT_VERSIONS.format(fit.spec.version, join.version, join.host)
        return [ev.Abort(reason, "", join.host, join.partition, ev.Failure.SETUP)]
    node = fit.members.of(join)
    if node is not None and node in fit.members.live:
        return _on_join_again(fit, fit.members.live[node], join, now_s)
    if fit.members.newest.get(join.token, 0) > join.count:
        fit.ignored.count(join, Reason.LATE)  # its process came back under another id since
        return []
    refusal = _refusal(fit, join)
    if refusal is not None:
        return [answer(join, refusal)]
    if node is not None:
        return [answer(join, closed_answer(fit, node, join))]
    return _admit(fit, join, now_s)


def _on_join_again(fit: Fit, member: Member, join: Join, now_s: float) -> list[Effect]:
    """The same join gets the same answer; a newer request wants another edge."""
    if fit.leases.holds(member.node):
        fit.leases.renew(member.node, now_s)
    if join.request < member.join.request:
        fit.ignored.count(join, Reason.LATE)
        return []
    if join.request == member.join.request:
        if member.order is None:
            fit.ignored.count(join, Reason.EARLY)  # those above it have no place yet
            return []
        return [answer(join, member.order)]
    member.join = join
    return on_another_request(fit, member, now_s) + order_place(fit, member.node, now_s)


def _refusal(fit: Fit, join: Join) -> Refused | None:
    """Why this process cannot join, if it cannot."""
    if join.partition >= len(fit.partitions):
        return _refuse(join, f"there is no partition {join.partition}", fatal=True)
    partition = fit.partitions[join.partition]
    if partition.attempt > join.attempt:
        return _refuse(join, Ending.SUPERSEDED.value, fatal=True)
    if fit.phases.phase >= Phase.DRAINING or partition.trained:
        return _refuse(join, Ending.DISMISSED.value, fatal=False)
    former = fit.members.former(join.token)
    if former and partition.last_owner not in former:
        return _refuse(join, Ending.SUPERSEDED.value, fatal=True)
    return None


def _admit(fit: Fit, join: Join, now_s: float) -> list[Effect]:
    partition = fit.partitions[join.partition]
    if not partition.seen_before(join.rows, join.checksum, join.batches):
        return [_different_rows(join, partition)]
    effects: list[Effect] = []
    if partition.owner is not None:
        effects += fit.close(partition.owner, Ending.SUPERSEDED.value, now_s)
    node = fit.members.next_id
    try:
        find_place(fit, node, join.executor)
    except UsageError as error:
        return [*effects, ev.Abort(str(error), "", join.host, join.partition, ev.Failure.USAGE)]
    fit.sequencer.admit(node)
    former = fit.members.former(join.token)
    for id_before in former:
        fit.checkpoints.returned(id_before, node)
    if not former:
        fit.checkpoints.grant(join.executor, node)
    partition.owner = partition.last_owner = node
    partition.attempt = join.attempt
    fit.members.add(Member(node, join, frozenset([*former, node])))
    fit.move(node, now_s)
    fit.phases.joined(now_s)
    return effects + order_place(fit, node, now_s)


def _refuse(join: Join, reason: str, *, fatal: bool) -> Refused:
    return Refused(token=join.token, count=join.count, reason=reason, fatal=fatal)


def _different_rows(join: Join, partition: Partition) -> ev.Abort:
    reason = (
        f"partition {partition.index} had {partition.rows} rows in {partition.batches} "
        f"minibatches (checksum {partition.checksum:016x}) at first and has {join.rows} in "
        f"{join.batches} (checksum {join.checksum:016x}) when its task is tried again: the "
        "data must not change between attempts; write it to files or persist it first"
    )
    return ev.Abort(reason, "", join.host, join.partition, ev.Failure.USAGE)


DIFFERENT_VERSIONS = (
    "sparkstrom is {} on the driver and {} on the executor at {}: install the same version on all"
)
