"""Commit order: updates get their numbers and go to everybody; positions count once they may."""

from __future__ import annotations

from collections.abc import Callable

from sparkstrom.base.identity import Position
from sparkstrom.codec.messages import BUFFERS, Update
from sparkstrom.protocol.common import events as ev
from sparkstrom.protocol.common.child import Child
from sparkstrom.protocol.common.children import Children
from sparkstrom.protocol.common.events import Effect
from sparkstrom.protocol.master.closed_notices import ClosedNotices
from sparkstrom.protocol.master.members import Member, Members
from sparkstrom.protocol.master.phases import Phases
from sparkstrom.protocol.master.sequencer import Sequencer
from sparkstrom.protocol.master.staleness import Staleness


class CommitOrder:
    """What becomes of an update, with ``average`` of a model's buffers where it has some."""

    def __init__(
        self,
        sequencer: Sequencer,
        *,
        members: Members,
        phases: Phases,
        notices: ClosedNotices,
        children: Children,
        average: Callable[[list[bytes]], bytes] | None,
    ) -> None:
        self._sequencer, self._members, self._phases = sequencer, members, phases
        self._notices, self._children, self._average = notices, children, average
        self.staleness = Staleness()
        self._buffers: dict[int, bytes] = {}  # partition -> the newest of a model's

    def admit(self, node: int) -> None:
        """One more whose updates count."""
        self._sequencer.admit(node)

    def close(self, node: int) -> None:
        """Nothing of this one is numbered any more."""
        self._sequencer.close(node)
        self.staleness.forget(node)

    def on_update(self, child: Child, update: Update, now_s: float) -> list[Effect]:
        """Number it, once; what is missing before it is asked for."""
        child.bytes_forwarded += self._children.on_update(child, update)
        member = self._members.live.get(update.origin)
        committed = self._sequencer.number(update, self._payload_of)
        if member is None:
            assert committed is None, f"{update.origin} is no member, and its update has a number"
            self._notices.still_speaks(update.origin, now_s)
            return []
        member.steps = max(member.steps, update.steps)
        if committed is None:
            last = self._sequencer.last[member.node]
            ahead = update.seq > last + 1 and not self._sequencer.frozen
            return self._children.again(child, member.node, last, now_s) if ahead else []
        self._phases.progressed(now_s)
        position = Position(update.epoch, update.batch)
        taken = self._members.partition_of(member).advance(position)
        self.staleness.committed(member.node, committed.commit, update.seen, taken)
        self.count_pending(member)
        return [ev.Deliver(committed), *self._children.feed_all(now_s)]

    def _payload_of(self, update: Update) -> bytes:
        """An update is committed as it is; of buffers, the average of the latest everywhere."""
        if update.form != BUFFERS or self._average is None:
            return update.payload
        partition = self._members.live[update.origin].join.partition
        self._buffers[partition] = update.payload
        return self._average([self._buffers[index] for index in sorted(self._buffers)])

    def is_at(self, member: Member, after_seq: int, position: Position) -> None:
        """It says that it is there, once its update of that number is committed."""
        if member.pending is None or member.pending <= (after_seq, position):
            member.pending = (after_seq, position)
        self.count_pending(member)

    def count_pending(self, member: Member) -> None:
        """A position counts once the update that it names is committed."""
        if member.pending is None:
            return
        after_seq, position = member.pending
        if self._sequencer.last[member.node] >= after_seq:
            taken = self._members.partition_of(member).advance(position)
            self.staleness.sent_nothing(member.node, taken)
            member.pending = None
