"""Manage a node's edge to its parent, and keep its own updates until they are committed.

An edge is the connection of two neighbours in the tree. An update is committed when the master has
numbered it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable

import msgspec

from sparkstrom.base.identity import MASTER, EdgeNo, NodeId, Seq
from sparkstrom.codec.messages import Address, AttachReply, Data, Message, State, Update, Welcome
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.children import Child
from sparkstrom.protocol.common.events_and_effects import Effect, Send, TimeoutReason
from sparkstrom.protocol.common.flow_control import HEADER_BYTES, SendWindow, message_weight
from sparkstrom.protocol.common.process_pause import ProcessPause
from sparkstrom.protocol.common.stages import ATTACHED, ATTACHING, CLOSED, Trigger, next_stage
from sparkstrom.protocol.worker.identity import Membership
from sparkstrom.protocol.worker.node_state import DirtyFlag, FitView
from sparkstrom.protocol.worker.time_limits import LEVELS_ABOVE, NodeLimits, Wait

ROUNDS = 4  # an update that takes this many times longer than the last one may be lost
RETRY_LEAST_S = 10.0  # first wait for a commit before everything is sent again
RETRY_LONGEST_S = 60.0  # upper limit of this wait, which doubles
AGAIN_LEAST_S = 1.0  # between answers to ResendRequest: updates under way show the same gap


class InFlight:
    """A node's own updates that are not committed yet, in the order in which they were made.

    Only the origin stores an uncommitted update. It sends the update once, and again on request or
    over a new edge; the master drops repetitions. If the oldest update stays uncommitted for much
    longer than usual, all are sent again, in case a request was lost.
    """

    def __init__(self, window_bytes: int) -> None:
        self._window_bytes = window_bytes
        self._own: dict[tuple[NodeId, Seq], Update] = {}  # by (id, seq), oldest first
        self.bytes = 0  # size of all uncommitted updates, headers included
        self.last_seq = Seq(0)  # newest seq under the current id; seqs have no gaps
        self._made_s: dict[tuple[NodeId, Seq], float] = {}  # when each was made, current id only
        self.round_s = 0.0  # recent time from making an update to its commit; 0: none committed yet
        self._retry_s = RETRY_LEAST_S  # after so long without progress the oldest may be lost
        self._deadline_s = 0.0  # time at which all are sent again
        self._again_s = -1.0  # until this time a request to resend is ignored
        self.progress_s = 0.0  # when any last made progress, or the first one was added

    @property
    def uncommitted(self) -> tuple[Update, ...]:
        """Return the uncommitted updates, oldest first."""
        return tuple(self._own.values())

    @property
    def oldest(self) -> Update | None:
        """Return the uncommitted update that was made first; None if there is none."""
        return next(iter(self._own.values())) if self._own else None

    def __len__(self) -> int:
        return len(self._own)

    def has_room(self) -> bool:
        """Return whether the window has room for an update; an empty window takes any size."""
        return not self._own or self.bytes < self._window_bytes

    def add(self, update: Update, now_s: float) -> None:
        """Add an update that was just published."""
        assert update.seq == self.last_seq + 1, "seqs have no gaps"
        if not self._own:
            self._restart_timer(now_s)
        self._own[update.origin, update.seq] = update
        self._made_s[update.origin, update.seq] = now_s
        self.bytes += HEADER_BYTES + len(update.payload)
        self.last_seq = update.seq

    def acknowledge(self, origin: NodeId, seq: Seq, now_s: float) -> Update | None:
        """Remove update ``seq`` of the id ``origin``, which is now committed, and return it.

        Return None if it was removed before.
        """
        update = self._own.pop((origin, seq), None)
        if update is not None:
            self.bytes -= HEADER_BYTES + len(update.payload)
            made_s = self._made_s.pop((origin, seq), None)
            if made_s is not None:  # it was not made under an id that is closed
                self.round_s = now_s - made_s
            self._restart_timer(now_s)
        return update

    def acknowledge_up_to(
        self, last: Iterable[tuple[NodeId, Seq]], ids: Container[NodeId], now_s: float
    ) -> None:
        """Remove this node's committed updates: for each id, those up to the number in ``last``.

        ``ids`` are those of this process; other ids in ``last`` are ignored.
        """
        for origin, seq in last:
            if origin not in ids:
                continue
            for key in [k for k in self._own if k[0] == origin and k[1] <= seq]:
                self.acknowledge(*key, now_s)

    def renumber(self, closed: dict[NodeId, Seq], node: NodeId, now_s: float) -> None:
        """Give updates not committed under closed ids new sequence numbers under the id ``node``.

        ``closed``: closed id -> sequence number of its last committed update.
        """
        kept: dict[tuple[NodeId, Seq], Update] = {}
        self.last_seq = Seq(0)
        for (origin, seq), update in self._own.items():
            if origin != node and seq > closed[origin]:
                self.last_seq = Seq(self.last_seq + 1)
                update = msgspec.structs.replace(update, origin=node, seq=self.last_seq)
            kept[update.origin, update.seq] = update
        self._own = kept
        self._made_s.clear()
        self._restart_timer(now_s)

    def updates_to_resend(self, node: NodeId, now_s: float, *, force: bool = False) -> list[Update]:
        """Return the uncommitted updates whose origin is the id ``node``, to be sent again.

        This restarts the deadlines for sending them once more. If that happened a short time ago,
        return no updates and change nothing, unless ``force`` is True.
        """
        if now_s < self._again_s and not force:
            return []
        self._again_s = now_s + max(AGAIN_LEAST_S, ROUNDS * self.round_s)
        self._deadline_s = now_s + self._retry_s
        return [update for update in self._own.values() if update.origin == node]

    def is_overdue(self, now_s: float) -> bool:
        """Return whether the oldest update has waited so long that it may be lost."""
        return bool(self._own) and now_s >= self._deadline_s

    def back_off(self, now_s: float) -> None:
        """Double the time after which updates count as lost."""
        longest_s = max(RETRY_LONGEST_S, ROUNDS * self.round_s)
        self._retry_s = min(2 * self._retry_s, longest_s)
        self._deadline_s = now_s + self._retry_s

    def note_progress(self, now_s: float) -> None:
        """Restart the timer for lost updates, because part of what was sent has arrived."""
        self.progress_s = now_s
        self._deadline_s = now_s + self._retry_s

    def shift_deadlines(self, pause: ProcessPause) -> None:
        """Postpone the deadlines by a pause of the process, which does not count as waiting."""
        self.progress_s = pause.shift(self.progress_s)

    def _restart_timer(self, now_s: float) -> None:
        """Restart the timer after which the oldest update counts as lost, at its initial value."""
        self._retry_s = max(RETRY_LEAST_S, ROUNDS * self.round_s)
        self._deadline_s = now_s + self._retry_s
        self.progress_s = now_s


JOIN_RETRY_S = 0.5  # direct messages may be lost
ATTACH_RETRY_S = 0.25  # the parent may not have opened its end of the edge yet
DOUBLINGS_MAX = 4  # how often the timeout of silent edges doubles, for slow networks


class ParentLink:
    """A node's edge to its parent; each new edge starts with fresh window and byte counts.

    Updates for which the link has no room are queued in order. A child's bytes count as forwarded
    only when this link has sent them, so the child's own window fills up and it publishes less:
    backpressure reaches the origin, and nothing is dropped.
    """

    def __init__(
        self,
        limits: NodeLimits,
        membership: Membership,
        in_flight: InFlight,
        report_flag: DirtyFlag,
        now_s: float,
    ) -> None:
        self._limits, self._membership = limits, membership
        self._own, self._report_flag = in_flight, report_flag
        self.stage = CLOSED
        self.parent: NodeId | None = None  # None: no edge is open
        self.edge = EdgeNo(0)  # number of the newest edge; only rises
        self._begin_counts(now_s)
        self.waiting: deque[tuple[Update, Child | None]] = deque()  # (update, child that sent it)
        # Edges given up since the last data message got through to the parent, and from it; each
        # doubles the timeout of its direction. Parts of messages do not count: over a new edge,
        # a message is sent from its beginning, so a long one would otherwise never get through.
        self.starved_up = self.starved_down = 0
        self._unanswered = 0  # edges given up since the last sign of life; likewise
        self._ask_s = 0.0  # when to repeat the join or the attach message
        self._heard_s = now_s  # last sign of life of the control stream, or of the join stream
        self._opened_s = now_s  # when the current edge was opened, or attached
        self._owed_s = now_s  # since when the parent has been able to answer the attach message

    def _begin_counts(self, now_s: float) -> None:
        """Reset window and byte counts, for a new edge."""
        self.window = SendWindow(self._limits.flow_limits.window_max, now_s)
        self.bytes_received = 0  # complete data messages from the parent, by weight
        self.arriving = 0  # bytes of an incomplete data message from the parent

    @property
    def attached(self) -> bool:
        """Return whether the parent has answered over this edge, so that data may flow."""
        return self.stage is ATTACHED

    def send(self, message: Message) -> Send:
        """Return the effect that sends a message to the parent."""
        assert self.parent is not None, "there is no edge"
        return Send(self.parent, message)

    def close_edge(self) -> list[Effect]:
        """Forget the parent; return the effect that closes its edge, or [] if there is no edge."""
        parent, self.parent = self.parent, None
        return [ev.CloseEdge(parent)] if parent is not None else []

    def on_join_requested(self, now_s: float) -> None:
        """Record that the master was asked for an edge to the fresh streams of this node."""
        assert self.parent is None, "the old edge is left first"
        self.stage = next_stage(self.stage, Trigger.OPENED)
        self._heard_s = now_s

    def open_edge(self, welcome: Welcome, here: Address, now_s: float) -> list[Effect]:
        """Record the parent that ``welcome`` names; return the effects that open the edge to it.

        An edge to another parent is closed. ``here`` is where this node listens to its parent.
        """
        assert welcome.edge > self.edge, "a lower edge is an older one"
        effects = self.close_edge() if self.parent != welcome.parent else []
        self.stage = next_stage(self.stage, Trigger.WELCOMED)
        self.parent, self.edge = welcome.parent, welcome.edge
        self._opened_s = self._owed_s = self._heard_s = now_s
        self._begin_counts(now_s)
        return [*effects, ev.OpenEdge(self.parent, self.edge, here, welcome.up)]

    def on_attached(self, now_s: float) -> None:
        """Record that the parent has answered the attach message: data may flow."""
        self.stage = next_stage(self.stage, Trigger.ANSWERED)
        self._opened_s = now_s
        self._report_flag.set()

    def give_up(self, now_s: float, *, silent: bool) -> None:
        """Treat the edge as dead, and double the timeout for the next one.

        ``silent``: whether no sign of life came over the edge; otherwise only data did not move.
        """
        self.stage = next_stage(self.stage, Trigger.GIVEN_UP)
        self._heard_s = now_s
        self._unanswered += 1
        self.starved_up += not silent
        self.starved_down += not silent

    def is_retry_due(self, now_s: float) -> bool:
        """Return whether it is time to repeat the join message or the attach message."""
        return now_s >= self._ask_s

    def schedule_retry(self, retry_s: float, now_s: float) -> None:
        """Schedule the next join or attach message for ``retry_s`` seconds from now."""
        self._ask_s = now_s + retry_s

    def note_sign_of_life(self, sender: NodeId, message: Message, now_s: float) -> None:
        """Record a message that proves that the edge's control stream works, or answers a join.

        Direct messages from the master prove nothing about the edge. Data messages do not count
        either, as they use another stream.
        """
        if self.parent is None:
            if sender == MASTER:
                self._heard_s = now_s
        elif sender == self.parent and isinstance(message, (State, AttachReply)):
            self._heard_s, self._unanswered = now_s, 0

    def reset_patience(self) -> None:
        """Use the initial timeout of silent edges again, because the master is alive."""
        self._unanswered = 0

    def on_data(self, message: Data) -> None:
        """Count a complete data message from the parent; reset the timeout for missing data."""
        self.bytes_received += message_weight(message, self._limits.flow_limits.chunk_bytes)
        self.arriving = self.starved_down = 0
        self._report_flag.set_routine()

    def on_partial_data(self, size: int) -> None:
        """Record that ``size`` bytes of an incomplete data message have arrived from the parent."""
        self.arriving = size
        self._report_flag.set_routine()

    def on_state(self, state: State, now_s: float) -> None:
        """Update the send window with the parent's counts of bytes received and forwarded."""
        acked = self.window.acked
        if self.window.on_ack(state.bytes_received, state.bytes_forwarded, now_s):
            self._own.note_progress(now_s)
        if self.window.acked > acked:
            self.starved_up = 0

    def reset_answer_timer(self, now_s: float) -> None:
        """Restart the wait for the attach reply: a parent without a replica cannot answer yet."""
        self._owed_s = now_s

    def enqueue(self, update: Update, child: Child | None, now_s: float) -> list[Effect]:
        """Queue an update for the parent, and send what the window allows.

        ``child`` is the child that sent the update; None: it is this node's own.
        """
        self.waiting.append((update, child))
        return self.send_queued(now_s)

    def send_queued(self, now_s: float) -> list[Effect]:
        """Send queued updates to the parent while the window allows."""
        out: list[Effect] = []
        while self.waiting and self.stage is ATTACHED:
            update, child = self.waiting[0]
            size = message_weight(update, 0)
            if not self.window.has_room(size):
                break
            self.waiting.popleft()
            self.window.on_sent(size, now_s)
            if child is not None:
                child.bytes_forwarded += size
                child.state_due = True
            out.append(self.send(update))
        return out

    def resend_own(self, now_s: float, *, force: bool = False) -> list[Effect]:
        """Queue again what ``InFlight.updates_to_resend`` returns; send what the window allows."""
        updates = self._own.updates_to_resend(self._membership.id, now_s, force=force)
        if not updates:
            return []
        others = [(update, child) for update, child in self.waiting if child is not None]
        self.waiting = deque([*others, *((update, None) for update in updates)])
        return self.send_queued(now_s)

    def resend_on_new_edge(self, now_s: float) -> list[Effect]:
        """Send the node's own updates again over a new edge, and drop queued updates of others.

        The caller asks the origins of the dropped updates to send them again.
        """
        for update, child in self.waiting:
            if child is not None:
                child.bytes_forwarded += message_weight(update, 0)
                child.state_due = True
        self.waiting.clear()
        return self.resend_own(now_s, force=True)

    def resend_overdue(self, now_s: float) -> list[Effect]:
        """Send this node's uncommitted updates again, because the oldest one is overdue."""
        assert self._own.is_overdue(now_s), "nothing is sent again before its time"
        self._own.back_off(now_s)
        return self.resend_own(now_s)

    def shift_deadlines(self, pause: ProcessPause) -> None:
        """Postpone the deadlines by a pause of the process, which does not count as waiting."""
        self._opened_s = pause.shift(self._opened_s)
        self._owed_s = pause.shift(self._owed_s)
        self.window.shift_deadlines(pause.pause_s)

    def is_silent(self, now_s: float) -> bool:
        """Return whether there was no sign of life, or no answer to a join, for too long."""
        doublings = min(self._unanswered, DOUBLINGS_MAX)
        patience_s: float = self._limits.lease_s / 2 * 2**doublings
        return now_s - self._heard_s > patience_s

    def is_starved(self, fit: FitView, stalled_since_s: float | None, now_s: float) -> bool:
        """Return whether the master is heard over the edge, but no data got through for too long.

        Control messages and data have separate streams, and one may break while the other works. If
        the master is not heard either, the fault is further up the tree, and the answer is False.
        Too long is one lease, doubled (up to a maximum) for each edge that was given up for this
        reason since the last data message got through in that direction. ``stalled_since_s``: see
        ``Replication.stalled_since_s``.
        """
        if self.parent is None or not fit.has_steady_contact(self._opened_s, now_s):
            return False
        up, down = self.starved_up, self.starved_down
        waits: list[tuple[float | None, int]] = [(self.window.since_s, up)]
        if self.stage is ATTACHED:
            waits.append((stalled_since_s, down))
        elif self.stage is ATTACHING:
            waits.append((self._owed_s, max(up, down)))
        return any(
            now_s - max(since_s, fit.contact_since_s)
            > self._limits.lease_s * 2 ** min(starved, DOUBLINGS_MAX)
            for since_s, starved in waits
            if since_s is not None
        )

    def overdue_wait(self, now_s: float) -> Wait | None:
        """Return the wait for the attach reply or for a commit if it exceeds ``stuck_s``.

        The limit of the wait for the reply is longer, because each level above may also wait.
        """
        stuck_s = self._limits.stuck_s
        begun_s = now_s - stuck_s  # a wait that began before this time is stuck
        if self._opened_s < begun_s and self.stage is ATTACHING:
            return Wait(self._opened_s, LEVELS_ABOVE * stuck_s, TimeoutReason.PARENT)
        if self._own.progress_s < begun_s and len(self._own) > 0:
            return Wait(
                self._own.progress_s, stuck_s, TimeoutReason.COMMITS, self._progress_figures()
            )
        return None

    def _progress_figures(self) -> dict[str, float | str]:
        """Return the values for the error text ``TimeoutReason.COMMITS``, such as waiting bytes."""
        return {
            "bytes": self._own.bytes,
            "under_way": self.window.under_way,
            "parent": str(self.parent),
            "rate": self.window.rate / 1e6,
        }
