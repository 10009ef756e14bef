"""Admit workers as members, and end memberships.

``Admission`` answers a worker's join with a place in the tree or a refusal. ``MembershipCloser``
ends the membership of a worker that is silent, leaves, was replaced or holds up the others. The
worker's partition becomes free for a successor, which continues where committed training ends.
"""

from __future__ import annotations

from collections.abc import Mapping

from sparkstrom.base.errors import UsageError
from sparkstrom.base.identity import MASTER, NodeId
from sparkstrom.codec.messages import IdClosed, Join, JoinRefusal, Phase
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.children import Leases
from sparkstrom.protocol.common.events_and_effects import (
    Effect,
    IgnoredMessages,
    IgnoreReason,
    TaskEnding,
)
from sparkstrom.protocol.master.announcements import ClosedNotices
from sparkstrom.protocol.master.commit_order import CommitOrder
from sparkstrom.protocol.master.members import Member, Members, Partition, send_to_process
from sparkstrom.protocol.master.phases import Phases
from sparkstrom.protocol.master.tree_placement import Placement


class MembershipCloser:
    """Ends the memberships of workers that are silent, leave, were replaced or hold up others.

    No later update of the worker is committed, and its reports no longer move the partition's
    position. The successor, which starts at this position, therefore neither repeats nor omits
    committed training.
    """

    def __init__(
        self,
        lease_s: float,
        *,
        members: Members,
        leases: Leases,
        placement: Placement,
        order: CommitOrder,
        notices: ClosedNotices,
    ) -> None:
        self._lease_s, self._members, self._leases = lease_s, members, leases
        self._placement, self._order, self._notices = placement, order, notices

    def close(
        self, node: NodeId, reason: str, now_s: float, *, released: bool = False
    ) -> list[Effect]:
        """End one membership; see ``close_all``."""
        return self.close_all({node: reason}, now_s, released=released)

    def close_all(
        self, reasons: Mapping[NodeId, str], now_s: float, *, released: bool = False
    ) -> list[Effect]:
        """End these memberships, and schedule new edges for the children that the members had.

        Args:
            reasons: why each member leaves, as human-readable text.
            now_s: time.
            released: True if they leave on request, after saving their residuals; the residual
                files granted to them then count as used.
        """
        effects: list[Effect] = []
        before = self._placement.tree
        moved = self._placement.detach(reasons.keys())
        for node, reason in reasons.items():
            member, parent = self._members.live[node], before.parent(node)
            if parent != MASTER and member.order is not None:
                self._notices.add(member, parent, now_s)
            effects += self._close(member, reason, now_s, released=released)
        self._placement.move_each(moved, now_s)
        return effects

    def _close(self, member: Member, reason: str, now_s: float, *, released: bool) -> list[Effect]:
        """Remove a member, and note its departure unless it was released."""
        self._order.close(member.node)
        partition = self._members.remove(member, reason, now_s, released=released)
        effects = self._placement.forget(member)
        if not released:
            where = f"partition {partition.index} on {member.join.host}"
            text = f"node {member.node} ({where}) left: {reason}"
            effects.append(ev.Note(text, departure=True))
        return effects

    def closed_message(self, node: NodeId, join: Join) -> IdClosed:
        """Return the answer for a process that joins again under a closed id."""
        return self._notices.make_message(node, join)

    def tick(self, now_s: float) -> list[Effect]:
        """End memberships whose lease expired, or that were not attached to a parent in time."""
        silent = {
            node: f"silent for {silent_s:.1f} s (lease {self._lease_s:g} s)"
            for node, silent_s in self._leases.expire(now_s)
        }
        effects = self.close_all(silent, now_s) if silent else []
        unattached = self._placement.expired_attachments(now_s)
        if unattached:
            effects += self.close_all(unattached, now_s)
        for node in unattached:
            self._notices.notify_closed(node, now_s)
        return effects


class Admission:
    """Answers join messages.

    A repeated join (same process and count) gets the same answer. A higher Spark taskAttemptId
    takes a partition over from a lower one. A process whose lease expired returns under a new id,
    unless another process has owned its partition since. ``version`` is that of sparkstrom in the
    driver program.
    """

    def __init__(
        self,
        version: str,
        *,
        members: Members,
        phases: Phases,
        order: CommitOrder,
        placement: Placement,
        closing: MembershipCloser,
        ignored: IgnoredMessages,
    ) -> None:
        self._version, self._members, self._phases = version, members, phases
        self._order, self._placement, self._closing = order, placement, closing
        self._ignored = ignored

    def on_join(self, join: Join, now_s: float) -> list[Effect]:
        """Answer a join: admit, repeat the last answer, refuse, or report that the id is closed.

        Abort the fit if the version or the rows differ, or if the tree is full. Ignore a join that
        a newer one of the same process has overtaken.
        """
        if join.version != self._version:
            reason = DIFFERENT_VERSIONS.format(self._version, join.version, join.host)
            return [ev.Abort(reason, "", join.host, join.partition, ev.Failure.SETUP)]
        node = self._members.id_of(join)
        if node is not None and node in self._members.live:
            return self._on_join_again(self._members.live[node], join, now_s)
        if self._members.has_newer_join(join):
            self._ignored.count(join, IgnoreReason.LATE)
            return []
        refusal = self._refuse_if_unfit(join)
        if refusal is not None:
            return [send_to_process(join, refusal)]
        if node is not None:
            return [send_to_process(join, self._closing.closed_message(node, join))]
        return self._admit(join, now_s)

    def _on_join_again(self, member: Member, join: Join, now_s: float) -> list[Effect]:
        """Answer a live member's join: repeat its welcome, or give it a new edge on request.

        Ignore an outdated join, and one whose answer must wait for the member's place.
        """
        self._placement.renew_lease(member, now_s)
        if join.request < member.join.request:
            self._ignored.count(join, IgnoreReason.LATE)
            return []
        if join.request > member.join.request:
            return self._placement.on_new_request(member, join, now_s)
        if member.order is None:
            self._ignored.count(join, IgnoreReason.EARLY)  # those above it have no place yet
            return []
        return [send_to_process(join, member.order)]

    def _refuse_if_unfit(self, join: Join) -> JoinRefusal | None:
        """Return the refusal for a process that must not join; None if it may."""
        if join.partition >= len(self._members.partitions):
            return _make_refusal(join, f"there is no partition {join.partition}", fatal=True)
        partition = self._members.partitions[join.partition]
        if self._members.partitions.has_newer_attempt(join.partition, join.attempt):
            return _make_refusal(join, TaskEnding.SUPERSEDED.value, fatal=True)
        if self._phases.phase >= Phase.DRAINING or partition.trained:
            return _make_refusal(join, TaskEnding.DISMISSED.value, fatal=False)
        former = self._members.former_ids(join.token)
        if former and partition.last_owner not in former:
            return _make_refusal(join, TaskEnding.SUPERSEDED.value, fatal=True)
        return None

    def _admit(self, join: Join, now_s: float) -> list[Effect]:
        """Add a member, and close the id of the partition's older owner; return the effects.

        Abort the fit if the rows differ from those read before, or if the tree is full.
        """
        partition = self._members.partitions[join.partition]
        if not partition.record_or_compare_rows(join.rows, join.checksum, join.batches):
            reason = describe_different_rows(partition, join.rows, join.batches, join.checksum)
            return [ev.Abort(reason, "", join.host, join.partition, ev.Failure.USAGE)]
        effects: list[Effect] = []
        if partition.owner is not None:
            effects += self._closing.close(partition.owner, TaskEnding.SUPERSEDED.value, now_s)
        try:
            self._placement.assign_place(self._members.next_id, join.executor)
        except UsageError as error:
            return [*effects, ev.Abort(str(error), "", join.host, join.partition, ev.Failure.USAGE)]
        member = self._members.add(join)
        self._order.admit(member.node)
        self._placement.move(member, now_s)
        self._phases.on_join(now_s)
        return effects + self._placement.send_order_if_due(member, now_s)


def _make_refusal(join: Join, reason: str, *, fatal: bool) -> JoinRefusal:
    """Return the refusal that answers this join; ``fatal``: whether the task must fail."""
    return JoinRefusal(token=join.token, count=join.count, reason=reason, fatal=fatal)


def describe_different_rows(partition: Partition, rows: int, batches: int, checksum: int) -> str:
    """Return the error text for a partition whose rows differ from those read before."""
    first, again, remedy = CHANGED_SINCE if partition.is_resumed else CHANGED_BETWEEN
    return (
        f"partition {partition.index} had {partition.rows} rows in {partition.batches} "
        f"minibatches (checksum {partition.checksum:016x}) {first} and has {rows} in "
        f"{batches} (checksum {checksum:016x}) {again}: {remedy}"
    )


CHANGED_BETWEEN = (
    "at first",
    "when its task is tried again",
    "the data must not change between attempts; write it to files or persist it first",
)
CHANGED_SINCE = (
    "when its checkpoint was written",
    "now",
    "a fit goes on with the same rows and the same batch_size_per_worker; give those of then, or "
    "begin anew with another checkpoint_directory or resume=False",
)
DIFFERENT_VERSIONS = (
    "sparkstrom is {} on the driver and {} on the executor at {}: install the same version on all"
)
