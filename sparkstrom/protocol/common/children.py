"""Serve a node's children in the tree: open edges, track leases, send commits and snapshots.

An edge is the connection of two neighbours in the tree. A commit is an update that the master has
numbered. A lease is the time of silence after which a node counts as gone. A state is a message
with the fit's state, to which each parent adds acknowledgements for its child.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TypeGuard

import msgspec

from sparkstrom.base.identity import CommitNo, EdgeNo, NodeId, Seq
from sparkstrom.codec.messages import (
    NOTHING,
    Address,
    Adopt,
    Attach,
    AttachReply,
    Commit,
    Heartbeat,
    ResendRequest,
    SnapshotRequired,
    State,
    Update,
)
from sparkstrom.observe.telemetry import SlowLink
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.commit_log import (
    Entry,
    History,
    count_changed_params,
    is_summable,
    last_seqs_of,
)
from sparkstrom.protocol.common.events_and_effects import Effect, Send
from sparkstrom.protocol.common.flow_control import (
    HEADER_BYTES,
    PROMPT_ACK_BYTES,
    QUEUE_S,
    ROUTINE_SPACING_S,
    Backlog,
    SendWindow,
    entries_in_sum,
    message_weight,
    sum_weight,
)
from sparkstrom.protocol.common.process_pause import PauseDetector
from sparkstrom.protocol.common.stages import (
    PROBE,
    REPLICATE,
    SNAPSHOT,
    ChildStage,
    Trigger,
    next_stage,
)


class Leases:
    """Records when each node was last heard from, and finds nodes that are silent for a lease.

    Spark ends Python workers with SIGKILL, so a node may vanish without a message.
    """

    def __init__(self, lease_s: float, now_s: float) -> None:
        self._lease_s = lease_s
        self._heard_s: dict[NodeId, float] = {}  # node -> when it was last heard from
        self._pauses = PauseDetector(lease_s, now_s)

    def renew(self, node: NodeId, now_s: float) -> None:
        """Record that a node was heard from; begin its lease if there is none."""
        self._heard_s[node] = now_s

    def holds(self, node: NodeId) -> bool:
        """Return whether a lease of the node is tracked here."""
        return node in self._heard_s

    def snooze(self, node: NodeId, now_s: float) -> None:
        """Make an expired lease that was just reported expire again after a quarter of a lease."""
        self._heard_s[node] = now_s - 3 / 4 * self._lease_s

    def silent_nodes(self, seconds: float, now_s: float) -> list[NodeId]:
        """Return the nodes that have not been heard from for more than ``seconds``."""
        return [n for n, at_s in self._heard_s.items() if now_s - at_s > seconds]

    def silence_s(self, node: NodeId, now_s: float) -> float:
        """Return the seconds since this node was last heard from; 0 if it has no lease."""
        return now_s - self._heard_s.get(node, now_s)

    def drop(self, node: NodeId) -> None:
        """Stop tracking the lease of this node; do nothing if it has none."""
        self._heard_s.pop(node, None)

    def expire(self, now_s: float) -> list[tuple[NodeId, float]]:
        """Return the nodes whose lease has expired, each with the seconds of its silence.

        If this process itself did not run for a quarter of a lease, renew all leases first, because
        messages could not be received in that time.
        """
        if self._pauses.pause_before(now_s) is not None:
            self._heard_s = dict.fromkeys(self._heard_s, now_s)
        lost = self.silent_nodes(self._lease_s, now_s)
        return [(n, now_s - self._heard_s[n]) for n in lost]


@dataclass(frozen=True, slots=True)
class FlowLimits:
    """Limits on what a node may have under way (sent and not acknowledged) to its children."""

    window_max: int  # bytes under way to one child, however fast its link is
    total_max: int  # bytes under way to all children
    n_params: int  # the model's number of parameters: a sum has at most that many entries
    chunk_bytes: int  # size of one chunk of a snapshot


# For tests and simulations without a model; a fit computes its own from the number of parameters.
DEFAULT_FLOW_LIMITS = FlowLimits(4 << 20, 64 << 20, 1 << 62, 256 << 10)


@dataclass(slots=True)
class ResendBackoff:
    """Limits how often a child is asked to make one origin resend its updates."""

    after: Seq  # the origin's newest committed seq at the last request; a newer one resets the wait
    next_s: float  # no request is sent before this time
    wait_s: float  # doubles with each request


@dataclass(slots=True)
class Child:
    """A node's record of one child: the edge to it, what it has received, what it requests."""

    node: NodeId
    edge: EdgeNo  # the newest edge to it; messages of older ones never reach this object
    peer: Address  # where it listens
    link: SendWindow  # send window of the data stream to it
    stage: ChildStage = PROBE
    answer: AttachReply | None = None  # as sent over this edge; None exactly in stage PROBE
    sent: CommitNo = CommitNo(0)  # every commit up to this one was sent over this edge
    received: CommitNo = CommitNo(0)  # every commit up to this one has arrived; at most ``sent``
    base: CommitNo = CommitNo(0)  # commit of its snapshot: older chunks are useless to it
    summed: CommitNo = CommitNo(0)  # newest commit that it was sent as part of a sum; 0: none
    chunk_requests: deque[int] = field(default_factory=deque)  # chunks to send, oldest first
    own_ids: frozenset[NodeId] = frozenset()  # ids of its process, which has their updates
    stamp: int = 0  # its newest ``Heartbeat.stamp``, acknowledged with the next state
    bytes_received: int = 0  # of complete data messages over this edge; see ``message_weight``
    arriving: int = 0  # bytes of an incomplete data message from it
    bytes_forwarded: int = 0  # bytes of ``bytes_received`` that were sent on to the parent
    state_due: bool = True  # there is news to send to it as a state
    state_is_urgent: bool = True  # the child waits for the news
    bytes_stated: int = 0  # ``bytes_forwarded`` in the last state
    state_s: float = -1.0  # when the state was last sent to it
    resend_backoffs: dict[NodeId, ResendBackoff] = field(default_factory=dict)  # by origin
    backlog: Backlog = field(default_factory=Backlog)  # how long data have waited for its link

    @property
    def next_state_s(self) -> float:
        """Return when the next state may be sent to the child; news that can wait is gathered."""
        unstated = self.bytes_forwarded - self.bytes_stated
        urgent = self.state_is_urgent or unstated >= PROMPT_ACK_BYTES
        return self.state_s + (STATE_SPACING_S if urgent else ROUTINE_SPACING_S)

    def advance_stage(self, trigger: Trigger) -> None:
        """Move to the stage that follows from ``trigger``."""
        self.stage = next_stage(self.stage, trigger)
        assert (self.answer is None) == (self.stage is PROBE), f"node {self.node} has no answer"


STATE_SPACING_S = 0.005  # between two states to one child of which the second is urgent
AGAIN_FIRST_S = 1.0  # until the second request to resend; answers may cross slow links
AGAIN_LONGEST_S = 60.0  # upper limit of this time, which doubles
WAIT_MS_MAX = 3_600_000  # an hour, far below what ``State.wait_ms`` (u32) can hold


class Children:
    """The children of one node, to which it sends commits and snapshots from its ``History``.

    A child gets as much as its link has room for: single commits, or their sum if there are too
    many. The rest stays in the history. While the edge lives, nothing is sent again unless the
    child requests it.
    """

    def __init__(self, flow_limits: FlowLimits, history: History, leases: Leases) -> None:
        self._flow_limits, self._history, self.leases = flow_limits, history, leases
        self.by_node: dict[NodeId, Child] = {}
        self._under_way = 0  # sum of ``link.under_way`` over all children
        self.slow_links: list[SlowLink] = []  # not reported yet; reporting empties the list
        self.state_due_s = math.inf  # when a state that is held back is due
        self._memory_limited = False  # a child waits for memory that the others' messages take

    def adopt(self, order: Adopt, now_s: float) -> list[Effect]:
        """Open the edge to this child, unless that edge or a newer one is open."""
        known = self.by_node.get(order.node)
        if known is not None and known.edge >= order.edge:
            return []
        self._forget(order.node)
        link = SendWindow(self._flow_limits.window_max, now_s)
        self.by_node[order.node] = Child(order.node, order.edge, order.peer, link)
        self.leases.renew(order.node, now_s)
        return [ev.OpenEdge(order.node, order.edge, order.local, order.peer)]

    def disown(self, node: NodeId, edge: EdgeNo | None = None) -> list[Effect]:
        """Close the edge to the child, unless it is newer than ``edge`` (None: in any case)."""
        child = self.by_node.get(node)
        if child is None or (edge is not None and child.edge > edge):
            return []
        self._forget(node)
        self.leases.drop(node)
        return [ev.CloseEdge(node)]

    def _forget(self, node: NodeId) -> None:
        """Remove a child, and subtract its bytes in flight from the total over all children."""
        child = self.by_node.pop(node, None)
        if child is not None:
            self._under_way -= child.link.under_way

    def on_attach(self, child: Child, attach: Attach, now_s: float) -> list[Effect]:
        """Answer a child's attach message, then send what it lacks and its link has room for.

        If the child has a replica or part of one, and the log still has all commits after the
        child's newest commit, the child continues from there. Otherwise it gets a snapshot. While
        this node has no complete replica to copy for that, return no effects; the child repeats
        its message. A repeated message gets the same answer.
        """
        history, answer = self._history, child.answer
        if answer is None:
            follows = (attach.whole or attach.catching) and history.log.reaches(attach.have)
            if not (follows or history.whole):
                return []  # there is nothing to copy yet; the child will ask again
            base = attach.have if follows else history.base
            last = [] if follows else history.last_seqs_at(base)
            child.answer = answer = AttachReply(base=base, snapshot=not follows, last=last)
            child.own_ids, child.sent, child.base = frozenset(attach.ids), base, base
            child.advance_stage(
                Trigger.COPIES if attach.catching or not follows else Trigger.FOLLOWS
            )
        return [Send(child.node, answer), *self.feed(child, now_s)]

    def on_heartbeat(self, child: Child, report: Heartbeat, now_s: float) -> list[Effect]:
        """Process a child's acknowledgement, and send what the link now has room for."""
        before = child.link.under_way
        child.link.on_ack(report.bytes_received, report.bytes_received, now_s)
        self._under_way -= before - child.link.under_way
        child.received = max(child.received, report.received)
        child.stamp = max(child.stamp, report.stamp)
        child.state_is_urgent |= len(report.statuses) > 1  # a relay may hold back more of them
        if report.catching and child.stage is REPLICATE:
            child.advance_stage(Trigger.COPIES)
        elif child.stage is SNAPSHOT and not report.catching:
            child.advance_stage(Trigger.HAS_COPY)
        child.state_due = True
        return self._feed_fairly(child, now_s)

    def on_commits_request(self, child: Child, commit: CommitNo, now_s: float) -> list[Effect]:
        """Send the commits after ``commit`` again, which the child has not received."""
        child.sent = commit
        return self._feed_fairly(child, now_s)

    def on_chunk_request(self, child: Child, index: int, now_s: float) -> list[Effect]:
        """Queue a chunk of a snapshot, and send it once the link has room."""
        if index not in child.chunk_requests:
            child.chunk_requests.append(index)
        return self._feed_fairly(child, now_s)

    def _feed_fairly(self, child: Child, now_s: float) -> list[Effect]:
        """Serve this child; if the node's memory limit blocks any child, serve all in turn."""
        return self.feed_all(now_s) if self._memory_limited else self.feed(child, now_s)

    def feed_all(self, now_s: float) -> list[Effect]:
        """Serve the children in turn; stop at the first that must wait for this node's memory.

        Otherwise small messages to other children would always use up the room that a large sum
        needs. The children served before that one come last in the next turn.
        """
        self._memory_limited = False
        out: list[Effect] = []
        fed: list[Child] = []
        head = self._history.log.head
        for child in list(self.by_node.values()):
            if child.sent >= head and not child.chunk_requests:
                continue
            if effects := self.feed(child, now_s):
                out += effects
                fed.append(child)
            if self._memory_limited:
                for last in fed:
                    self.by_node[last.node] = self.by_node.pop(last.node)
                break
        return out

    def feed(self, child: Child, now_s: float) -> list[Effect]:
        """Send what this child lacks, as far as its link and this node's memory limit have room.

        If the log no longer has what the child needs next, make it fetch a snapshot.
        """
        log = self._history.log
        if child.stage is PROBE or not (child.sent < log.head or child.chunk_requests):
            return []
        out: list[Effect] = []
        while child.sent < log.head or self._serves_chunks(child):
            if not log.reaches(child.sent):
                return [*out, *self._require_snapshot(child)]
            if not self._has_room(child, HEADER_BYTES):
                break
            if self._serves_chunks(child):
                if not self._has_room(child, HEADER_BYTES + self._flow_limits.chunk_bytes):
                    break
                out += self._send_chunks(child, now_s)
                continue
            if (entries := self._entries_to_sum(child, log.head)) is not None:
                if not self._has_room(child, self._sum_weight(entries)):
                    break
                out.append(self._send_merged(child, entries, now_s))
                continue
            entry = self._next_entry(child)
            if not self._has_room(child, weight := message_weight(entry, 0)):
                break
            out.append(self._send_next(child, entry, weight, now_s))
        return out

    def _has_room(self, child: Child, size: int) -> bool:
        """Return whether the link and this node's memory limit have room for this many bytes."""
        if self._under_way and self._under_way + size > self._flow_limits.total_max:
            self._memory_limited = True
            return False
        return child.link.has_room(size)

    def _count_sent(self, child: Child, size: int, now_s: float) -> None:
        """Add a sent message's bytes to the child's window and to the total of this node."""
        child.link.on_sent(size, now_s)
        self._under_way += size

    def _next_entry(self, child: Child) -> Entry:
        """Return the log entry that the child needs next; no payload if its process made it."""
        entry = self._history.log.entry_after(child.sent)
        if _is_made_by_child_process(entry, child):
            return msgspec.structs.replace(entry, payload=NOTHING)
        return entry

    def _send_next(self, child: Child, entry: Entry, weight: int, now_s: float) -> Effect:
        """Count one entry of the log as sent to a child; return the effect that sends it.

        ``weight`` is the entry's ``message_weight``.
        """
        self._count_sent(child, weight, now_s)
        child.sent = entry.commit
        return Send(child.node, entry)

    def _entries_to_sum(self, child: Child, upto: CommitNo) -> tuple[Entry, ...] | None:
        """Return the entries up to ``upto`` that should be sent as one sum; None: send them singly.

        A sum is better if more data wait than the link can send soon, and the sum is smaller.
        """
        log = self._history.log
        if upto - child.sent <= 1 or log.bytes_after(child.sent) <= child.link.window:
            return None
        waiting = log.entries_after(child.sent)
        entries = tuple(takewhile(lambda e: is_summable(e) and e.commit <= upto, waiting))
        singly = sum(
            HEADER_BYTES if _is_made_by_child_process(e, child) else message_weight(e, 0)
            for e in entries
        )
        if len(entries) <= 1 or self._sum_weight(entries) >= singly:
            return None
        return entries

    def _sum_weight(self, entries: tuple[Entry, ...]) -> int:
        """Return the expected size, in bytes, of a message with the sum of these entries."""
        return sum_weight(self._expected_entries(entries), last_seqs_of(entries))

    def _expected_entries(self, entries: tuple[Entry, ...]) -> int:
        """Return the expected number of distinct parameters in a sum of these entries."""
        return entries_in_sum(sum(map(count_changed_params, entries)), self._flow_limits.n_params)

    def _send_merged(self, child: Child, entries: tuple[Entry, ...], now_s: float) -> Effect:
        """Count a sum of entries as sent to a child; return the effect that sends it."""
        self._count_sent(child, self._sum_weight(entries), now_s)
        after, child.sent = child.sent, entries[-1].commit
        child.summed = child.sent
        last, count = last_seqs_of(entries), self._expected_entries(entries)
        return ev.SendMerged(child.node, after, child.sent, last, count, entries)

    def _serves_chunks(self, child: Child) -> bool:
        """Return whether a chunk that the child requested can be sent now.

        The replica must be at least as new as the base of the child's snapshot. It must also
        contain the whole of any sum that the child was sent: a chunk that contains part of a sum
        would be useless.
        """
        history = self._history
        if not child.chunk_requests or not history.whole:
            return False
        return history.applied >= max(history.merged, child.base, child.summed)

    def _send_chunks(self, child: Child, now_s: float) -> list[Effect]:
        """Send all commits up to now and then chunks, so that no chunk contains part of a sum.

        Commits that the replica has applied may go as a sum, since each chunk contains them. After
        them, chunks with as many bytes are sent, but at least one, so that chunks also get through
        on a slow link.
        """
        log, applied = self._history.log, self._history.applied
        before, out = child.link.sent, []
        while child.sent < log.head:
            entries = self._entries_to_sum(child, applied) if child.sent < applied else None
            if entries is not None:
                out.append(self._send_merged(child, entries, now_s))
            else:
                entry = self._next_entry(child)
                out.append(self._send_next(child, entry, message_weight(entry, 0), now_s))
        spent, size = child.link.sent - before, HEADER_BYTES + self._flow_limits.chunk_bytes
        for _ in range(min(len(child.chunk_requests), max(1, spent // size))):
            self._count_sent(child, size, now_s)
            out.append(ev.SendChunk(child.node, child.chunk_requests.popleft()))
        return out

    def _require_snapshot(self, child: Child) -> list[Effect]:
        """Make a child fetch a snapshot, because the log no longer reaches back to its commit.

        Return no effects if this node has no replica.
        """
        history = self._history
        if not history.whole:
            return []  # this node is behind itself; the child will ask again
        child.sent = child.base = history.base
        child.advance_stage(Trigger.COPIES)
        child.chunk_requests.clear()
        return [Send(child.node, SnapshotRequired(child.base, history.last_seqs_at(child.base)))]

    def on_update(self, child: Child, update: Update) -> int:
        """Record the arrival of an update from this child; return the update's weight in bytes."""
        size = message_weight(update, 0)
        child.bytes_received, child.arriving, child.state_due = child.bytes_received + size, 0, True
        return size

    def on_data_arriving(self, child: Child, size: int) -> None:
        """Record how many bytes of an incomplete message have arrived from a child."""
        child.arriving, child.state_due = size, True

    def request_resend(
        self, child: Child, origin: NodeId, after: Seq, now_s: float
    ) -> list[Effect]:
        """Ask an origin to resend its uncommitted updates, as ``child`` delivered them with a gap.

        ``after`` is the number of the origin's newest committed update. Updates that are under way
        show the same gap, so requests for one gap are spaced by waits that double; until such a
        wait is over, return no effects.
        """
        asked = child.resend_backoffs.get(origin)
        if asked is not None and asked.after == after:
            if now_s < asked.next_s:
                return []
            asked.wait_s = min(2 * asked.wait_s, AGAIN_LONGEST_S)
            asked.next_s = now_s + asked.wait_s
        else:
            child.resend_backoffs[origin] = ResendBackoff(
                after, now_s + AGAIN_FIRST_S, AGAIN_FIRST_S
            )
        return [Send(child.node, ResendRequest(origin))]

    @property
    def max_link_delay_s(self) -> float:
        """Return how many seconds more than QUEUE_S a new commit takes over the slowest link, or 0.

        Links to children whose rate is not known yet are left out.
        """
        known = (child for child in self.by_node.values() if child.link.rate)
        return max(0.0, max(map(self._link_delay_s, known), default=0.0))

    def _link_delay_s(self, child: Child) -> float:
        """Return the seconds until all data under way or waiting have arrived, less QUEUE_S.

        Return 0 if the child does not follow the commits: it needs a snapshot, or has not attached.
        """
        log, link = self._history.log, child.link
        if child.stage is not REPLICATE or not log.reaches(child.sent):
            return 0.0
        queued = link.under_way + log.bytes_after(child.sent)
        return queued / link.rate - QUEUE_S

    def tick(self, state: State, now_s: float) -> list[Effect]:
        """Serve all children, and send the fit's state to those for which it is due."""
        out = self.feed_all(now_s)
        head = self._history.log.head if self._history.whole else 0
        self.state_due_s, waits_s = math.inf, -1.0
        for child in self.by_node.values():
            self._check_link(child, now_s)
            if not child.state_due:
                continue
            if now_s < child.next_state_s:
                self.state_due_s = min(self.state_due_s, child.next_state_s)
            else:
                child.state_due = child.state_is_urgent = False
                child.state_s, child.bytes_stated = now_s, child.bytes_forwarded
                waits_s = self.max_link_delay_s if waits_s < 0 else waits_s
                edge_fields = {
                    "head": head,
                    "wait_ms": max(state.wait_ms, min(int(waits_s * 1000), WAIT_MS_MAX)),
                    "sent": child.sent,
                    "stamp": child.stamp,
                    "bytes_received": child.bytes_received + child.arriving,
                    "bytes_forwarded": child.bytes_forwarded,
                }
                out.append(Send(child.node, msgspec.structs.replace(state, **edge_fields)))
        return out

    def _check_link(self, child: Child, now_s: float) -> None:
        """Record the child's link as slow if data have waited for it too long."""
        log = self._history.log
        waits = child.stage is REPLICATE and child.sent < log.head
        needed = child.backlog.observe(waits, log.appended, child.link.rate, now_s)
        if needed is not None:
            behind = log.head - child.received
            self.slow_links.append(
                SlowLink(child.node, child.link.rate, needed, behind, child.summed > 0)
            )

    def announce_state(self, *, urgent: bool = True) -> None:
        """Mark the fit's state as due for every child: soon if urgent, or else with other news."""
        for child in self.by_node.values():
            child.state_due = True
            child.state_is_urgent |= urgent


def _is_made_by_child_process(entry: Entry, child: Child) -> TypeGuard[Commit]:
    """Return whether the child's process made this update, so that it needs only the number.

    False for model buffers, because their commit contains an average.
    """
    return isinstance(entry, Commit) and entry.origin in child.own_ids and is_summable(entry)
