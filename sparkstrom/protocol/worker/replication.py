"""Follow the commits in order, fetch snapshots, and relay the messages of children.

A commit is an update that the master has numbered. A replica is a node's copy of the parameters; it
is at a commit if it contains all commits up to that number. A snapshot is a replica that a node
fetches from its parent in chunks. Parent and children are a node's neighbours in the tree.
"""

from __future__ import annotations

from itertools import islice

import msgspec

from sparkstrom.base.identity import CommitNo
from sparkstrom.codec.messages import (
    BUFFERS,
    Adopt,
    Attach,
    ChildSilent,
    Chunk,
    ChunkRequest,
    Commit,
    CommitsRequest,
    Disown,
    Heartbeat,
    LastSeqs,
    LeaveNotice,
    MergedRange,
    Message,
    OptimizerChunk,
    OptimizerRequest,
    ResendRequest,
    SnapshotRequired,
    State,
    Update,
)
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.children import Child, Children
from sparkstrom.protocol.common.commit_log import Entry, History, Log
from sparkstrom.protocol.common.events_and_effects import (
    Effect,
    IgnoredMessages,
    IgnoreReason,
    Send,
    TimeoutReason,
)
from sparkstrom.protocol.common.process_pause import ProcessPause
from sparkstrom.protocol.common.stages import INSTALLS, PROBE, ReplicaStage, Trigger, next_stage
from sparkstrom.protocol.worker.identity import Membership
from sparkstrom.protocol.worker.node_state import DirtyFlag, Subtree, TrainerView
from sparkstrom.protocol.worker.optimizer_transfer import OptimizerTransfers
from sparkstrom.protocol.worker.parent_link import InFlight, ParentLink
from sparkstrom.protocol.worker.time_limits import NodeLimits, Wait

ASKED_AT_ONCE = 8  # chunks requested at once; the parent sends them as the link has room


class SnapshotFetch:
    """A snapshot that is being fetched, chunk by chunk, from the parent's live replica.

    Each chunk names the newest commit in its bytes; later commits are held in the node's log until
    all chunks have arrived. A chunk stays valid only while the log can continue from the chunk's
    commit: chunks that are older than the log, or whose commit lies inside a sum in the log, are
    requested again. No timer is needed: a requested chunk arrives, or its stream is gone.

    A fetch makes progress when it holds more chunks than ever before, so chunks that become invalid
    as fast as they arrive are not progress. ``before`` is the fetch that this one replaces.
    """

    def __init__(
        self, held: Log, chunks: int, now_s: float, before: SnapshotFetch | None = None
    ) -> None:
        self._count = chunks
        self._chunks: dict[int, Chunk] = {}  # valid chunks, by index
        self._asked: set[int] = set()  # indices requested from the current parent
        self._held = held  # the node's log, which begins at the snapshot's base
        self._most: int = before._most if before is not None else 0  # most chunks ever held
        self.progress_s: float = before.progress_s if before is not None else now_s

    def drop_useless_chunks(self) -> None:
        """Drop chunks that are no longer valid; see the class."""
        for index in [i for i, chunk in self._chunks.items() if self._is_useless(chunk)]:
            del self._chunks[index]

    def _is_useless(self, chunk: Chunk) -> bool:
        """Return whether a chunk is not valid: the log cannot continue from the chunk's commit."""
        log = self._held
        return chunk.commit < log.base or (
            chunk.commit < log.head and not log.reaches(chunk.commit)
        )

    def add_chunk(self, chunk: Chunk, now_s: float) -> bool:
        """Store a chunk; return False if it is not valid (see the class) or was stored before."""
        self._asked.discard(chunk.index)
        if chunk.index >= self._count or self._is_useless(chunk) or chunk.index in self._chunks:
            return False
        self._chunks[chunk.index] = chunk
        if len(self._chunks) > self._most:
            self._most, self.progress_s = len(self._chunks), now_s
        return True

    def next_requests(self) -> list[int]:
        """Return the indices of chunks to request now, and record them as requested.

        At most ASKED_AT_ONCE requests are under way.
        """
        missing = (i for i in range(self._count) if i not in self._chunks and i not in self._asked)
        out = list(islice(missing, max(0, ASKED_AT_ONCE - len(self._asked))))
        self._asked.update(out)
        return out

    def ready(self, now_s: float) -> bool:
        """Return whether all chunks have arrived, and all commits that some chunk contains.

        If so, only the trainer is awaited, so restart the deadline.
        """
        ready = len(self._chunks) == self._count and all(
            chunk.commit <= self._held.head for chunk in self._chunks.values()
        )
        if ready:
            self.progress_s = now_s
        return ready

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """Return all chunks in their order."""
        return tuple(self._chunks[i] for i in range(self._count))

    @property
    def held(self) -> tuple[Entry, ...]:
        """Return the commits since the snapshot's base, in order."""
        return tuple(self._held.entries_after(self._held.base))

    def resume(self) -> None:
        """Mark all missing chunks as not requested, so that they are requested again."""
        self._asked.clear()

    def shift_deadlines(self, pause: ProcessPause) -> None:
        """Postpone the deadlines by a pause of the process, which does not count as waiting."""
        self.progress_s = pause.shift(self.progress_s)


ASK_SPACING_S = 1.0  # between requests: commits that are under way show the same gap


class Replication:
    """Receives a node's commits and snapshots, and knows which commits its trainer has applied.

    Everything received is also appended to the node's log, from which its children are served.
    """

    def __init__(
        self,
        limits: NodeLimits,
        history: History,
        *,
        membership: Membership,
        link: ParentLink,
        in_flight: InFlight,
        trainer: TrainerView,
        children: Children,
        report_flag: DirtyFlag,
        ignored: IgnoredMessages,
        now_s: float,
    ) -> None:
        self._limits, self.history = limits, history
        self._membership, self._link, self._in_flight = membership, link, in_flight
        self._trainer, self._children = trainer, children
        self._report_flag, self._ignored = report_flag, ignored
        self.stage = ReplicaStage.EMPTY
        self.has_replica = False  # True for good once the trainer has installed the first one
        self.chunks = 0  # number of chunks in a snapshot
        self.fetch: SnapshotFetch | None = None  # exactly in stages FETCHING and REFETCHING
        self.paused = False  # the trainer has obeyed the newest PAUSE
        self.pauses = 0  # number of the newest PAUSE
        self._got_s = now_s  # when data last came, or when nothing was missing
        self._ask_due_s = 0.0  # no commits are requested before this time
        self._asked: CommitNo | None = None  # the last request was for commits after this one
        self._seen = CommitNo(0)  # newest commit that came after a gap and was dropped

    @property
    def received(self) -> CommitNo:
        """Return the newest commit up to which everything has been received."""
        return self.history.log.head

    @property
    def has_begun(self) -> bool:
        """Return whether the trainer has a replica, or is installing its first one."""
        return self.has_replica or self.stage in INSTALLS

    @property
    def needs_no_snapshot(self) -> bool:
        """Return whether no snapshot is needed: a replica exists, or came with the task."""
        begins_whole = self._membership.identity.whole
        return self.fetch is None and (self.stage is not ReplicaStage.EMPTY or begins_whole)

    def is_behind(self, state: State | None) -> bool:
        """Return whether commits exist that this node has not received."""
        return state is not None and state.head > self.history.log.head

    def stalled_since_s(self, state: State | None) -> float | None:
        """Return since when this node waits for data that are under way; None if none are.

        Data are under way during the fetch of a snapshot, and while the parent has sent more
        commits (by its newest state) than have arrived.
        """
        awaits_commits = state is not None and state.sent > self.history.log.head
        return self._got_s if self.fetch is not None or awaits_commits else None

    def _advance_stage(self, trigger: Trigger) -> None:
        """Enter the next stage, and assert that the new stage agrees with ``fetch``."""
        self.stage = next_stage(self.stage, trigger)
        fetching = self.stage in (ReplicaStage.FETCHING, ReplicaStage.REFETCHING)
        assert fetching == (self.fetch is not None), "who fetches has a snapshot under way"

    def on_commit(self, committed: Commit, now_s: float) -> list[Effect]:
        """Apply or hold the next commit; after a gap, request the missing commits.

        Ignore a commit that was received before.
        """
        received = self.history.log.head
        if committed.commit <= received:
            self._ignored.count(committed, IgnoreReason.LATE)
            self._report_flag.set()  # the parent does not know how far this node is
            return []
        if committed.commit > received + 1:
            self._ignored.count(committed, IgnoreReason.EARLY)
            self._seen = committed.commit
            return self.request_commits(now_s)
        own = committed.origin in self._membership.ids
        if own:
            update = self._in_flight.acknowledge(committed.origin, committed.seq, now_s)
            assert update is not None, f"own update {committed.seq} was not kept until committed"
            if update.payload.form != BUFFERS:  # for buffers, the commit has the average
                committed = msgspec.structs.replace(committed, payload=update.payload)
        self._append(committed, now_s)
        if self.fetch is None:
            return _commit_effects(committed, own=own) + self._children.feed_all(now_s)
        return self._after_append(self.fetch, now_s)

    def _after_append(self, fetch: SnapshotFetch, now_s: float) -> list[Effect]:
        """Update the fetch after an entry was appended to the log, and serve the children."""
        fetch.drop_useless_chunks()
        return self.continue_fetch(now_s) + self._children.feed_all(now_s)

    def on_merged(self, merged: MergedRange, now_s: float) -> list[Effect]:
        """Apply or hold a sum of commits that starts where the node is.

        After a gap, request the missing commits. Ignore a sum without a commit that is missing.
        """
        if merged.after != self.received:
            self._report_flag.set()
            if merged.commit <= self.received:
                self._ignored.count(merged, IgnoreReason.LATE)
                return []
            self._ignored.count(merged, IgnoreReason.EARLY)
            self._seen = merged.commit
            return self.request_commits(now_s)
        last = dict(merged.last)
        own = [u for u in self._in_flight.uncommitted if u.seq <= last.get(u.origin, 0)]
        for update in own:
            self._in_flight.acknowledge(update.origin, update.seq, now_s)
        self._append(merged, now_s)
        if self.fetch is not None:
            return self._after_append(self.fetch, now_s)
        return [ev.ApplyMergedRange(merged, tuple(own)), *self._children.feed_all(now_s)]

    def _append(self, entry: Commit | MergedRange, now_s: float) -> None:
        """Append a commit or sum to the history."""
        self.history.append(entry)
        self.note_data(now_s)

    def note_data(self, now_s: float) -> None:
        """Record that data, a whole message or a part of one, came now."""
        self._got_s = now_s
        self._report_flag.set_routine()

    def restart_wait_if_current(self, state: State, now_s: float) -> None:
        """Restart the wait for data if no sent commit is missing and no snapshot is fetched."""
        if state.sent <= self.history.log.head and self.fetch is None:
            self._got_s = now_s

    def request_commits(self, now_s: float) -> list[Effect]:
        """Request all commits after the received ones, unless they were requested just before."""
        if now_s < self._ask_due_s:
            return []
        self._ask_due_s, self._asked = now_s + ASK_SPACING_S, self.received
        return [self._link.send(CommitsRequest(self.received))]

    def request_commits_now(self, now_s: float) -> list[Effect]:
        """Request missing commits at once, even if they were requested just before."""
        self._ask_due_s = now_s
        return self.request_commits(now_s)

    def on_applied(self, commit: CommitNo) -> None:
        """Record that the trainer's replica contains every commit up to this one."""
        self.history.applied = max(self.history.applied, commit)

    def follow(self, now_s: float) -> list[Effect]:
        """Follow the parent from the current replica, or from the replica of commit 0.

        If a snapshot is being fetched, continue the fetch instead.
        """
        if self.fetch is not None:
            self.fetch.resume()
            return self.continue_fetch(now_s)
        if self.stage is not ReplicaStage.EMPTY:
            return []
        self._advance_stage(Trigger.BEGUN)
        self._trainer.restart_step_deadline(now_s)
        return [ev.UseInitialReplica()]

    def on_snapshot_required(self, behind: SnapshotRequired, now_s: float) -> list[Effect]:
        """Fetch a snapshot, because the parent's log does not reach back to this node's commit.

        If the missing commits have arrived already, continue a running fetch of a snapshot; without
        one, ignore the message.
        """
        if behind.base <= self.received:  # what was missing has arrived since
            self._report_flag.set()
            if self.fetch is None:
                self._ignored.count(behind, IgnoreReason.LATE)
                return []
            self.fetch.resume()  # the parent begins anew, and has forgotten what was asked for
            return self.continue_fetch(now_s)
        effects = self.begin_fetch(behind.base, behind.last, now_s)
        seen, self._seen = self._seen, CommitNo(0)
        return self.request_commits_now(now_s) + effects if seen > behind.base else effects

    def begin_fetch(self, base: CommitNo, last: LastSeqs, now_s: float) -> list[Effect]:
        """Begin to fetch a replica as of ``base`` or later; hold the commits after ``base``.

        ``last`` has the number of each origin's newest update as of ``base``.
        """
        self._in_flight.acknowledge_up_to(last, set(self._membership.ids), now_s)
        self.history.restart_at(base, last)
        self.note_data(now_s)
        self.pauses += 1
        self.paused = False
        self.fetch = SnapshotFetch(self.history.log, self.chunks, now_s, self.fetch)
        self._advance_stage(Trigger.BEHIND)
        return self.continue_fetch(now_s)

    def on_chunk(self, chunk: Chunk, now_s: float) -> list[Effect]:
        """Store a chunk, and request further ones.

        The commits in it came earlier over the same stream; if any are missing, request them.
        """
        if self.fetch is None:
            self._ignored.count(chunk, IgnoreReason.LATE)
            return []
        self.note_data(now_s)
        if not self.fetch.add_chunk(chunk, now_s):
            self._ignored.count(chunk, IgnoreReason.LATE)
        effects = self.continue_fetch(now_s)
        if chunk.commit > self.received and self._asked != self.received:
            effects = self.request_commits(now_s) + effects
        return effects

    def continue_fetch(self, now_s: float) -> list[Effect]:
        """Request chunks; install the snapshot once it is complete and the trainer has paused."""
        fetch = self.fetch
        if fetch is None or self.stage is ReplicaStage.REFETCHING or not self._link.attached:
            return []
        ready = fetch.ready(now_s)
        if ready:
            self._got_s = now_s
        if not (ready and self.paused):
            return [self._link.send(ChunkRequest(index)) for index in fetch.next_requests()]
        self.fetch = None
        self._advance_stage(Trigger.COMPLETED)
        self._report_flag.set()
        self._trainer.restart_step_deadline(now_s)
        return [
            ev.InstallSnapshot(fetch.chunks, fetch.held, self._in_flight.uncommitted, self.received)
        ]

    def on_paused(self, number: int) -> None:
        """Record that the trainer obeyed PAUSE ``number``; only the newest number counts."""
        self.paused = number == self.pauses

    def on_installed(self, now_s: float) -> None:
        """Record that the trainer has installed the replica."""
        self._advance_stage(Trigger.INSTALLED)
        self.paused, self.has_replica = False, True
        self.history.whole = self.stage is ReplicaStage.FOLLOWING
        self._trainer.restart_step_deadline(now_s)

    def shift_deadlines(self, pause: ProcessPause) -> None:
        """Postpone the deadlines by a pause of the process, which does not count as waiting."""
        self._got_s = pause.shift(self._got_s)
        if self.fetch is not None:
            self.fetch.shift_deadlines(pause)

    def overdue_snapshot_wait(self, now_s: float) -> Wait | None:
        """Return a Wait if a snapshot fetch made no progress for ``stuck_s``; otherwise None."""
        fetch, stuck_s = self.fetch, self._limits.stuck_s
        if fetch is not None and fetch.progress_s < now_s - stuck_s:
            return Wait(fetch.progress_s, stuck_s, TimeoutReason.SNAPSHOT)
        return None

    def overdue_commits_wait(self, state: State | None, now_s: float) -> Wait | None:
        """Return a Wait if commits are missing and no data came for ``stuck_s``; otherwise None.

        ``state`` tells which commits exist.
        """
        stuck_s = self._limits.stuck_s
        if self._got_s < now_s - stuck_s and self.is_behind(state):
            return Wait(self._got_s, stuck_s, TimeoutReason.UPDATES)
        return None


def _commit_effects(committed: Commit, *, own: bool) -> list[Effect]:
    """Return the effects of one commit: apply it or, if it is this worker's own, report it.

    A commit of buffers contains the average of all workers, so the worker also applies its own.
    """
    if not own:
        return [ev.ApplyCommit(committed)]
    passed = ev.OwnCommitted(committed.commit)
    return [ev.ApplyCommit(committed), passed] if committed.payload.form == BUFFERS else [passed]


class Relaying:
    """Handles messages from a worker's children; passes messages between them and its parent."""

    def __init__(
        self,
        *,
        membership: Membership,
        link: ParentLink,
        replication: Replication,
        transfers: OptimizerTransfers,
        subtree: Subtree,
        report_flag: DirtyFlag,
        ignored: IgnoredMessages,
    ) -> None:
        self._membership, self._link, self._replication = membership, link, replication
        self._transfers, self._subtree = transfers, subtree
        self._children, self._statuses = subtree.children, subtree.statuses
        self._report_flag, self._ignored = report_flag, ignored

    def on_adopt(self, order: Adopt, now_s: float) -> list[Effect]:
        """Add a child, unless it is this node's own parent, which would briefly form a cycle.

        Ignore the order if the child already has this edge or a newer one.
        """
        if order.node == self._link.parent:
            self._ignored.count(order, IgnoreReason.EARLY)
            return []
        known = self._children.by_node.get(order.node)
        if known is not None and known.edge >= order.edge:
            self._ignored.count(order, IgnoreReason.LATE)
            return []
        if known is not None:
            self._statuses.drop_subtree(order.node)
        return self._children.adopt(order, now_s)

    def on_disown(self, order: Disown) -> list[Effect]:
        """Remove a child, and return the effect that closes its edge.

        Ignore the order, as late, if the node is not a child or has a newer edge.
        """
        effects = self._subtree.drop(order.node, order.edge)
        if not effects:
            self._ignored.count(order, IgnoreReason.LATE)
        return effects

    def on_child(self, child: Child, message: Message, now_s: float) -> list[Effect]:
        """Process a message that a child sent over its edge."""
        self._children.leases.renew(child.node, now_s)
        match message:
            case Attach():
                return self._on_attach(child, message, now_s)
            case Update():
                return self._on_update(child, message, now_s)
            case Heartbeat():
                for status in message.statuses:
                    if self._statuses.update(status, child.node):
                        self._report_flag.set()
                return self._children.on_heartbeat(child, message, now_s)
            case CommitsRequest(commit=commit) if commit <= self._replication.received:
                return self._children.on_commits_request(child, commit, now_s)
            case ChunkRequest(index=index) if index < self._replication.chunks:
                return self._children.on_chunk_request(child, index, now_s)
            case OptimizerRequest():
                return self._transfers.on_request(message, child.node)
            case OptimizerChunk():
                child.arriving = 0
                return self._transfers.on_chunk(message, child.node, now_s)
            case LeaveNotice():
                return self._subtree.drop(child.node)
            case CommitsRequest() | ChunkRequest():
                self._ignored.count(message, IgnoreReason.EARLY)  # the child has newer commits
            case _:
                self._ignored.count(message, IgnoreReason.WRONG_WAY)
        return []

    def _on_attach(self, child: Child, attach: Attach, now_s: float) -> list[Effect]:
        """Answer the attach message of a child, and schedule a state for it."""
        child.state_due = child.state_is_urgent = True
        effects = self._children.on_attach(child, attach, now_s)
        if child.stage is PROBE:
            self._ignored.count(attach, IgnoreReason.EARLY)
        return effects

    def _on_update(self, child: Child, update: Update, now_s: float) -> list[Effect]:
        """Forward a child's update to the parent; drop the update while no parent is attached."""
        size = self._children.on_update(child, update)
        if self._link.attached:
            return self._link.enqueue(update, child, now_s)
        self._ignored.count(update, IgnoreReason.EARLY)
        child.bytes_forwarded += size  # dropped: the origin resends it once a parent exists
        return []

    def on_resend_request(self, again: ResendRequest, now_s: float) -> list[Effect]:
        """Resend this node's updates, or forward the request to the child that leads to the origin.

        A request without an origin means a new edge further up: every node below resends at once.
        """
        origin = again.origin
        if origin is None:
            below = self._subtree.request_resend_from_all()
            return [*self._link.resend_own(now_s, force=True), *below]
        if origin in self._membership.ids:
            return self._link.resend_own(now_s)
        child = self._subtree.child_towards(origin)
        if child is None:
            self._ignored.count(again, IgnoreReason.UNSERVED)
            return []
        return [Send(child.node, again)]

    def tick(self, state: State | None, now_s: float) -> list[Effect]:
        """Serve the children, send them the state, and report silent ones to the master."""
        lost = self._children.leases.expire(now_s)
        effects: list[Effect] = []
        if not self._children.by_node:
            return effects
        for node, _ in lost:
            child = self._children.by_node[node]
            self._children.leases.snooze(node, now_s)
            effects.append(ev.SendDirect(ChildSilent(self._membership.id, node, child.edge)))
        if state is not None:
            effects += self._children.tick(state, now_s)
        return effects
