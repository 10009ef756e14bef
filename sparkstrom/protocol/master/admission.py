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
from sparkstrom.protocol.common.ignored import Ignored, Reason
from sparkstrom.protocol.master.closing import Closing
from sparkstrom.protocol.master.commit_order import CommitOrder
from sparkstrom.protocol.master.members import Member, Members, answer
from sparkstrom.protocol.master.partitions import Partition
from sparkstrom.protocol.master.phases import Phases
from sparkstrom.protocol.master.placement import Placement


class Admission:
    """The answers to joins. ``version``: of sparkstrom, on the driver."""

    def __init__(
        self,
        version: str,
        *,
        members: Members,
        phases: Phases,
        order: CommitOrder,
        placement: Placement,
        closing: Closing,
        ignored: Ignored,
    ) -> None:
        self._version, self._members, self._phases = version, members, phases
        self._order, self._placement, self._closing = order, placement, closing
        self._ignored = ignored

    def on_join(self, join: Join, now_s: float) -> list[Effect]:
        """Answer a join, whoever sent it and however often."""
        if join.version != self._version:
            reason = DIFFERENT_VERSIONS.format(self._version, join.version, join.host)
            return [ev.Abort(reason, "", join.host, join.partition, ev.Failure.SETUP)]
        node = self._members.of(join)
        if node is not None and node in self._members.live:
            return self._on_join_again(self._members.live[node], join, now_s)
        if self._members.has_returned(join):
            self._ignored.count(join, Reason.LATE)
            return []
        refusal = self._refusal(join)
        if refusal is not None:
            return [answer(join, refusal)]
        if node is not None:
            return [answer(join, self._closing.closed(node, join))]
        return self._admit(join, now_s)

    def _on_join_again(self, member: Member, join: Join, now_s: float) -> list[Effect]:
        """The same join gets the same answer; a newer request wants another edge."""
        self._placement.heard(member, now_s)
        if join.request < member.join.request:
            self._ignored.count(join, Reason.LATE)
            return []
        if join.request > member.join.request:
            return self._placement.on_another_request(member, join, now_s)
        if member.order is None:
            self._ignored.count(join, Reason.EARLY)  # those above it have no place yet
            return []
        return [answer(join, member.order)]

    def _refusal(self, join: Join) -> Refused | None:
        """Why this process cannot join, if it cannot."""
        if join.partition >= len(self._members.partitions):
            return _refuse(join, f"there is no partition {join.partition}", fatal=True)
        partition = self._members.partitions[join.partition]
        if partition.attempt > join.attempt:
            return _refuse(join, Ending.SUPERSEDED.value, fatal=True)
        if self._phases.phase >= Phase.DRAINING or partition.trained:
            return _refuse(join, Ending.DISMISSED.value, fatal=False)
        former = self._members.former(join.token)
        if former and partition.last_owner not in former:
            return _refuse(join, Ending.SUPERSEDED.value, fatal=True)
        return None

    def _admit(self, join: Join, now_s: float) -> list[Effect]:
        partition = self._members.partitions[join.partition]
        if not partition.seen_before(join.rows, join.checksum, join.batches):
            reason = different_rows(partition, join.rows, join.batches, join.checksum)
            return [ev.Abort(reason, "", join.host, join.partition, ev.Failure.USAGE)]
        effects: list[Effect] = []
        if partition.owner is not None:
            effects += self._closing.close(partition.owner, Ending.SUPERSEDED.value, now_s)
        try:
            self._placement.find(self._members.next_id, join.executor)
        except UsageError as error:
            return [*effects, ev.Abort(str(error), "", join.host, join.partition, ev.Failure.USAGE)]
        member = self._members.add(join)
        self._order.admit(member.node)
        self._placement.move(member, now_s)
        self._phases.joined(now_s)
        return effects + self._placement.order(member, now_s)


def _refuse(join: Join, reason: str, *, fatal: bool) -> Refused:
    return Refused(token=join.token, count=join.count, reason=reason, fatal=fatal)


def different_rows(partition: Partition, rows: int, batches: int, checksum: int) -> str:
    """What to say where a partition's rows are others than they were."""
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
