"""Admission: who may join, under which id, and from where it goes on.

The same process and count get the same answer; a higher Spark taskAttemptId takes a partition
over from a lower one; a process that was evicted comes back under a new id while nobody else has
owned its partition.
"""

from __future__ import annotations

from sparkstrom.codec.messages import Address, Closed, Join, Phase, Refused, Welcome
from sparkstrom.protocol import events as ev
from sparkstrom.protocol.events import Effect, Send
from sparkstrom.protocol.fit import Fit
from sparkstrom.protocol.members import Member
from sparkstrom.protocol.partitions import Partition
from sparkstrom.protocol.replay import Downlink

FIRST_STREAM = 1000  # up streams of edges; below is room for the lobby


def on_join(fit: Fit, join: Join, now_s: float) -> list[Effect]:
    """Answer a join, whoever sent it and however often."""
    if join.version != fit.version:
        reason = DIFFERENT_VERSIONS.format(fit.version, join.version, join.host)
        return [ev.Abort(reason, "", join.host, join.partition, "setup")]
    node = fit.members.of(join)
    if node is not None and node in fit.members.live:
        return _on_join_again(fit, fit.members.live[node], join, now_s)
    if any(token == join.token and count > join.count for token, count in fit.members.joins):
        return []  # sent before the process came back under its present id
    refusal = _refusal(fit, join)
    if refusal is not None:
        return [ev.Answer(join.address, refusal)]
    if node is not None:
        return [ev.Answer(join.address, _closed_answer(fit, node, join))]
    return _admit(fit, join, now_s)


def _on_join_again(fit: Fit, member: Member, join: Join, now_s: float) -> list[Effect]:
    """The same join gets the same answer; a newer edge of it replaces the older one."""
    fit.leases.renew(member.node, now_s)
    if join.edge < member.join.edge:
        return []
    if join.edge == member.join.edge:
        return [Send(member.node, member.welcome)]
    return _welcome(fit, member.node, join, member, now_s)


def _refusal(fit: Fit, join: Join) -> Refused | None:
    """Why this process cannot join, if it cannot."""
    if join.partition >= len(fit.partitions):
        return _refuse(join, f"there is no partition {join.partition}", fatal=True)
    partition = fit.partitions[join.partition]
    if partition.attempt > join.attempt:
        return _refuse(join, SUPERSEDED, fatal=True)
    if fit.phases.phase >= Phase.DRAINING or partition.trained:
        return _refuse(join, "its partition is trained already", fatal=False)
    former = fit.members.former(join.token)
    if former and partition.last_owner not in former:
        return _refuse(join, SUPERSEDED, fatal=True)
    return None


def _closed_answer(fit: Fit, node: int, join: Join) -> Closed:
    partition = fit.partitions[join.partition]
    free = partition.owner is None and partition.last_owner == node
    reason = "its lease ran out" if free else SUPERSEDED
    return Closed(
        token=join.token,
        count=join.count,
        node=node,
        seq=fit.sequencer.closed[node],
        reason=reason,
        free=free,
    )


def _admit(fit: Fit, join: Join, now_s: float) -> list[Effect]:
    partition = fit.partitions[join.partition]
    if not partition.seen_before(join.rows, join.checksum, join.batches):
        return [_different_rows(join, partition)]
    effects: list[Effect] = []
    if partition.owner is not None:
        effects += fit.close(fit.members.live[partition.owner], SUPERSEDED, now_s)
    node = fit.members.next_id
    fit.sequencer.admit(node)
    former = fit.members.former(join.token)
    for id_before in former:
        fit.keeping.returned(id_before, node)
    if not former:
        fit.keeping.grant(join.executor, node)
    partition.owner = partition.last_owner = node
    partition.attempt = join.attempt
    fit.leases.renew(node, now_s)
    fit.phases.joined(now_s)
    return effects + _welcome(fit, node, join, None, now_s)


def _welcome(fit: Fit, node: int, join: Join, old: Member | None, now_s: float) -> list[Effect]:
    """Open an edge to this node and tell it where to begin."""
    fit.edges += 1
    stream = FIRST_STREAM + 2 * fit.edges
    local = Address(fit.host, fit.port, stream, stream + 1)
    follows = join.has_replica and fit.sequencer.log.reaches(join.have)
    base = join.have if follows else fit.sequencer.head
    position = fit.partitions[join.partition].position
    former = fit.members.former(join.token)
    closed = fit.sequencer.closed
    welcome = Welcome(
        token=join.token,
        count=join.count,
        edge=join.edge,
        node=node,
        up=local,
        base=base,
        snapshot=not follows,
        chunks=fit.chunks,
        last=fit.last_of([*former, node]),
        closed=[(former_id, closed[former_id]) for former_id in former if former_id in closed],
        epoch=position.epoch,
        batch=position.batch,
        steps=fit.slowest,
        grants=list(fit.keeping.granted(node)),
    )
    downlink = Downlink(node, base, fit.limits.downlink_bytes, now_s)
    own = frozenset([*former, node])
    member = Member(node, join, local, welcome, downlink, own)
    if old is not None:
        member.pending, member.steps = old.pending, old.steps
        member.final, member.audit, member.activity = old.final, old.audit, old.activity
    fit.members.add(member)
    return [ev.OpenEdge(node, join.edge, local, join.address), Send(node, welcome)]


def _refuse(join: Join, reason: str, *, fatal: bool) -> Refused:
    return Refused(token=join.token, count=join.count, reason=reason, fatal=fatal)


def _different_rows(join: Join, partition: Partition) -> ev.Abort:
    reason = (
        f"partition {partition.index} had {partition.rows} rows in {partition.batches} "
        f"minibatches (checksum {partition.checksum:016x}) at first and has {join.rows} in "
        f"{join.batches} (checksum {join.checksum:016x}) when its task is tried again: the "
        "data must not change between attempts; write it to files or persist it first"
    )
    return ev.Abort(reason, "", join.host, join.partition, "usage")


DIFFERENT_VERSIONS = (
    "sparkstrom is {} on the driver and {} on the executor at {}: install the same version on all"
)
SUPERSEDED = "another attempt of its task has taken the partition over"
