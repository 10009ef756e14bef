"""Process the updates that reach the master, and measure the staleness of the training in them.

``commit_sequencer`` numbers an update, which makes it a commit; this module then distributes the
commit and records the progress. A minibatch's staleness is the number of other workers' minibatches
that were committed before it and that the parameters on which it was trained did not include. With
k workers that take turns without waiting, staleness is k - 1, one minibatch of each other worker.
"""

from __future__ import annotations

from array import array
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from sparkstrom.base.identity import CommitNo, NodeId, Position, Seq
from sparkstrom.codec.messages import BUFFERS, Payload, Update
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.children import Child, Children
from sparkstrom.protocol.common.events_and_effects import Effect
from sparkstrom.protocol.master.announcements import ClosedNotices
from sparkstrom.protocol.master.commit_sequencer import Sequencer
from sparkstrom.protocol.master.members import Member, Members
from sparkstrom.protocol.master.phases import Phases

REMEMBERED = 1 << 14  # commits; an update based on an older one counts as based on the oldest
MARKS = 256  # remembered commits of one worker; older ones are treated in the same way


@dataclass(slots=True)
class _Worker:
    """Counts from which the staleness of one worker's updates is computed."""

    minibatches: int = 0  # trained by this worker
    known: int | None = None  # minibatches of others in its replica at its last publication
    # (commit, own minibatches up to that commit), from the last commit that it has seen.
    marks: deque[tuple[CommitNo, int]] = field(
        default_factory=lambda: deque([(CommitNo(0), 0)], MARKS)
    )


class Staleness:
    """Computes the staleness of all committed minibatches from the commits, in their order."""

    def __init__(self) -> None:
        self.most = 0.0  # the highest staleness of any minibatch
        self._sum, self._count = 0.0, 0  # over all minibatches that came with an update
        self._minibatches, self._head = 0, CommitNo(0)  # trained by all workers; newest commit
        self._at = array("q", bytes(8 * REMEMBERED))  # commit % size -> minibatches up to it
        self._workers = defaultdict[NodeId, _Worker](_Worker)

    @property
    def mean(self) -> float:
        """Return the mean over all minibatches that came with an update; 0 before the first."""
        return self._sum / self._count if self._count else 0.0

    def on_commit(self, node: NodeId, commit: CommitNo, seen: CommitNo, minibatches: int) -> None:
        """Record a commit that contains ``minibatches`` of training by ``node``.

        ``seen`` is the newest commit in the replica on which the last of them was trained. What the
        earlier ones had seen is interpolated linearly from the worker's previous publication on.
        """
        worker = self._workers[node]
        if minibatches:
            known = self._minibatches_of_others(worker, seen)
            before = known if worker.known is None else worker.known
            worker.known = known
            now = self._minibatches - worker.minibatches
            per_minibatch = max(0, known - before) / minibatches
            oldest = max(0.0, now - known + per_minibatch * (minibatches - 1))
            newest = max(0.0, now - known)
            self.most = max(self.most, oldest)
            self._sum += minibatches * (oldest + newest) / 2
            self._count += minibatches
        self._add_minibatches(node, minibatches, commit)
        self._head = commit
        self._at[commit % REMEMBERED] = self._minibatches

    def on_empty_steps(self, node: NodeId, minibatches: int) -> None:
        """Record minibatches whose training led to no update; they count with the next commit."""
        if minibatches:
            self._add_minibatches(node, minibatches, CommitNo(self._head + 1))

    def forget(self, node: NodeId) -> None:
        """Drop a worker whose id is closed."""
        self._workers.pop(node, None)

    def _add_minibatches(self, node: NodeId, minibatches: int, commit: CommitNo) -> None:
        """Add committed minibatches to a worker's count and to the total, as of ``commit``."""
        worker = self._workers[node]
        self._minibatches += minibatches
        worker.minibatches += minibatches
        if worker.marks[-1][0] == commit:
            worker.marks.pop()
        worker.marks.append((commit, worker.minibatches))

    def _minibatches_of_others(self, worker: _Worker, seen: CommitNo) -> int:
        """Return the others' minibatches at commit ``seen``, or at the nearest recorded commit."""
        at = max(min(seen, self._head), self._head - REMEMBERED + 1)
        marks = worker.marks
        while len(marks) > 1 and marks[1][0] <= at:
            marks.popleft()
        own = marks[0][1] if marks[0][0] <= at else 0
        return self._at[at % REMEMBERED] - own


class CommitOrder:
    """Has updates numbered, distributes the commits, and advances the partitions' positions.

    Buffers are model state other than parameters. ``average`` combines the newest buffers of all
    partitions; None for a model without buffers.
    """

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
        self._buffers: dict[int, bytes] = {}  # partition -> its newest buffers

    def admit(self, node: NodeId) -> None:
        """Begin to number updates of a new id."""
        self._sequencer.admit(node)

    def close(self, node: NodeId) -> None:
        """Stop numbering updates of this id, which is closed."""
        self._sequencer.close(node)
        self.staleness.forget(node)

    def on_update(self, child: Child, update: Update, now_s: float) -> list[Effect]:
        """Number an update from a child; return effects that apply it here and send it on.

        A repeated update has no effect. If earlier updates of its origin (the worker that made it)
        are missing, ask for them again. If the origin's id is closed, notify its process.
        """
        child.bytes_forwarded += self._children.on_update(child, update)
        member = self._members.live.get(update.origin)
        if member is not None:
            self._members.advance(member, update.steps)
        slowest = self._members.slowest
        committed = self._sequencer.number(update, slowest, self._payload_to_commit)
        if member is None:
            assert committed is None, (
                f"{update.origin} is not a member, and its update has a number"
            )
            self._notices.notify_closed(update.origin, now_s)
            return []
        if committed is None:
            last = self._sequencer.last[member.node]
            ahead = update.seq > last + 1 and not self._sequencer.frozen
            return self._children.request_resend(child, member.node, last, now_s) if ahead else []
        self._phases.note_progress(now_s)
        position = Position(update.epoch, update.batch)
        taken = self._members.partition_of(member).advance(position)
        self.staleness.on_commit(member.node, committed.commit, update.seen, taken)
        self.apply_pending(member)
        return [ev.ApplyCommit(committed), *self._children.feed_all(now_s)]

    def _payload_to_commit(self, update: Update) -> Payload:
        """Return the payload to commit, which is the update's own unless it contains buffers.

        Keep buffers as the newest of their partition, and return the average of the newest buffers
        of all partitions.
        """
        if update.payload.form != BUFFERS or self._average is None:
            return update.payload
        partition = self._members.live[update.origin].join.partition
        self._buffers[partition] = update.payload.data
        average = self._average([self._buffers[index] for index in sorted(self._buffers)])
        return msgspec.structs.replace(update.payload, data=average)

    def on_position(self, member: Member, after_seq: Seq, position: Position) -> None:
        """Record a position that a member reports.

        The position counts once the member's update ``after_seq`` is committed.
        """
        if member.pending is None or member.pending <= (after_seq, position):
            member.pending = (after_seq, position)
        self.apply_pending(member)

    def apply_pending(self, member: Member) -> None:
        """Advance the partition to the member's reported position if the position counts now."""
        if member.pending is None:
            return
        after_seq, position = member.pending
        if self._sequencer.last[member.node] >= after_seq:
            taken = self._members.partition_of(member).advance(position)
            self.staleness.on_empty_steps(member.node, taken)
            member.pending = None
