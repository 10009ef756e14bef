"""Parent: the edge upwards: how it comes about, what goes over it, and when it is given up.

What the link has no room for waits here, in the order in which it came. A child's bytes count as
passed only when they have gone on, so that its own link fills up and it publishes less: up waits
for up, and nothing is dropped.
"""

from __future__ import annotations

from collections import deque

from sparkstrom.base.identity import MASTER, EdgeNo, NodeId
from sparkstrom.codec.messages import Address, Attached, Data, Message, State, Update, Welcome
from sparkstrom.protocol.common import events as ev
from sparkstrom.protocol.common.child import Child
from sparkstrom.protocol.common.endings import Vain
from sparkstrom.protocol.common.events import Effect, Send
from sparkstrom.protocol.common.send_window import SendWindow, weight
from sparkstrom.protocol.common.stages import ATTACHED, ATTACHING, CLOSED, Cause, after
from sparkstrom.protocol.worker.fit_view import FitView
from sparkstrom.protocol.worker.in_flight import InFlight
from sparkstrom.protocol.worker.limits import NodeLimits
from sparkstrom.protocol.worker.membership import Membership
from sparkstrom.protocol.worker.news import News
from sparkstrom.protocol.worker.waits import LEVELS_ABOVE, Sleep, Wait

JOIN_RETRY_S = 0.5
ATTACH_RETRY_S = 0.25
DOUBLINGS_MAX = 4  # of the patience with an edge that stays silent, on a network that is slow


class ParentLink:
    """One edge after the other, each with its own counts of bytes and its own window."""

    def __init__(
        self, limits: NodeLimits, membership: Membership, own: InFlight, news: News, now_s: float
    ) -> None:
        self._limits, self._membership, self._own, self._news = limits, membership, own, news
        self.stage = CLOSED
        self.parent: NodeId | None = None
        self.edge = EdgeNo(0)
        self._begin_counts(now_s)
        self.waiting: deque[tuple[Update, Child | None]] = deque()  # for room on the link
        self.starved = 0  # edges opened since data last moved: each gets twice the patience
        self._unanswered = 0  # edges opened since anything was heard: each gets twice the patience
        self._ask_s = 0.0  # when to ask the master, or to speak to the parent, again
        self._heard_s = (
            now_s  # a sign that the control stream, or without an edge the join stream, lives
        )
        self._opened_s = now_s  # the present edge
        self._owed_s = now_s  # since then the parent could have answered what this node holds

    def _begin_counts(self, now_s: float) -> None:
        self.window = SendWindow(self._limits.serving.window_max, now_s)
        self.bytes_received = 0  # bytes that came down by this edge, by their weight
        self.arriving = 0  # bytes of a message from there that is not whole yet

    @property
    def attached(self) -> bool:
        """The parent has answered over this edge: data may go and come."""
        return self.stage is ATTACHED

    def send(self, message: Message) -> Send:
        """Over the edge."""
        assert self.parent is not None, "there is no edge"
        return Send(self.parent, message)

    # -- the edge --------------------------------------------------------------------------------

    def leave(self) -> list[Effect]:
        """Hear nothing more over the present edge."""
        parent, self.parent = self.parent, None
        return [ev.CloseEdge(parent)] if parent is not None else []

    def on_request_for_place(self, now_s: float) -> None:
        """Fresh streams are open, and the master is to hear so."""
        assert self.parent is None, "the old edge is left first"
        self.stage = after(self.stage, Cause.OPENED)
        self._heard_s = now_s

    def take_place(self, welcome: Welcome, here: Address, now_s: float) -> list[Effect]:
        """Under this parent, by this edge."""
        assert welcome.edge > self.edge, "a lower edge is an older one"
        effects = self.leave() if self.parent != welcome.parent else []
        self.stage = after(self.stage, Cause.WELCOMED)
        self.parent, self.edge = welcome.parent, welcome.edge
        self._opened_s = self._owed_s = self._heard_s = now_s
        self._begin_counts(now_s)
        return [*effects, ev.OpenEdge(self.parent, self.edge, here, welcome.up)]

    def answered(self, now_s: float) -> None:
        """The parent goes on from what this node holds."""
        self.stage = after(self.stage, Cause.ANSWERED)
        self._opened_s = now_s
        self._news.add()

    def give_up(self, now_s: float, *, silent: bool) -> None:
        """The edge is taken for dead; the next one gets more patience."""
        self.stage = after(self.stage, Cause.GIVEN_UP)
        self._heard_s = now_s
        self._unanswered += 1
        self.starved += not silent

    def asks(self, now_s: float) -> bool:
        """Is it time to ask, the master or a parent, again?"""
        return now_s >= self._ask_s

    def on_request(self, retry_s: float, now_s: float) -> None:
        """The same again after so long."""
        self._ask_s = now_s + retry_s

    # -- what comes ------------------------------------------------------------------------------

    def hear(self, sender: NodeId, message: Message, now_s: float) -> None:
        """Does this show that the edge's control stream, or without one the join stream, lives?

        What the master says directly shows nothing, nor does data, which has a stream of its own.
        """
        if self.parent is None:
            if sender == MASTER:
                self._heard_s = now_s
        elif sender == self.parent and isinstance(message, (State, Attached)):
            self._heard_s, self._unanswered = now_s, 0

    def master_lives(self) -> None:
        """A new sign of it has come: the trouble was not at this edge."""
        self._unanswered = 0

    def on_data(self, message: Data) -> None:
        """One more message is whole."""
        self.bytes_received += weight(message, self._limits.serving.chunk_bytes)
        self.arriving = self.starved = 0
        self._news.waits = True

    def on_part(self, size: int) -> None:
        """So much of a message is here: the stream lives."""
        self.arriving, self.starved = size, 0
        self._news.add()

    def on_state(self, state: State, now_s: float) -> None:
        """The parent says what has arrived there."""
        if self.window.on_ack(state.bytes_received, state.bytes_forwarded, now_s):
            self._own.moves(now_s)
            self.starved = 0

    def owes_nothing(self, now_s: float) -> None:
        """The parent has no replica yet, and so no answer."""
        self._owed_s = now_s

    # -- what goes up ----------------------------------------------------------------------------

    def hand_up(self, update: Update, child: Child | None, now_s: float) -> list[Effect]:
        """One more update is to go up; ``child``: over whose edge it came, None: its own."""
        self.waiting.append((update, child))
        return self.send_up(now_s)

    def send_up(self, now_s: float) -> list[Effect]:
        """As much as the link takes."""
        out: list[Effect] = []
        while self.waiting and self.stage is ATTACHED:
            update, child = self.waiting[0]
            size = weight(update, 0)
            if not self.window.has_room(size):
                break
            self.waiting.popleft()
            self.window.on_sent(size, now_s)
            if child is not None:
                child.bytes_forwarded, child.state_due = child.bytes_forwarded + size, True
            out.append(self.send(update))
        return out

    def send_all(self, now_s: float, *, force: bool = False) -> list[Effect]:
        """All own uncommitted updates, again."""
        updates = self._own.again(self._membership.id, now_s, force=force)
        if not updates:
            return []
        others = [(update, child) for update, child in self.waiting if child is not None]
        self.waiting.clear()
        self.waiting.extend(others)
        self.waiting.extend((update, None) for update in updates)
        return self.send_up(now_s)

    def send_anew(self, now_s: float) -> list[Effect]:
        """Over a new edge: the own ones again. Others' are asked for where they were made."""
        for update, child in self.waiting:
            if child is not None:
                child.bytes_forwarded, child.state_due = (
                    child.bytes_forwarded + weight(update, 0),
                    True,
                )
        self.waiting.clear()
        return self.send_all(now_s, force=True)

    def send_overdue(self, now_s: float) -> list[Effect]:
        """The own updates again: the oldest has waited far too long for its commit."""
        assert self._own.overdue(now_s), "nothing is sent again before its time"
        self._own.back_off(now_s)
        return self.send_all(now_s)

    # -- time ------------------------------------------------------------------------------------

    def slept(self, sleep: Sleep) -> None:
        """See ``Sleep``."""
        self._opened_s = sleep.later(self._opened_s)
        self._owed_s = sleep.later(self._owed_s)
        self.window.slept(sleep.slept_s)

    def is_silent(self, now_s: float) -> bool:
        """Was nothing at all heard over the edge for too long, also no answer to a join?"""
        doublings = min(self._unanswered, DOUBLINGS_MAX)
        patience_s: float = self._limits.lease_s / 2 * 2**doublings
        return now_s - self._heard_s > patience_s

    def is_starved(self, fit: FitView, missing_since_s: float | None, now_s: float) -> bool:
        """Do signs of the master's life come over the edge, and nothing else gets through?

        Data does not, one way or the other, or the word that asks for it: a stream may have broken
        off for good, each for itself. Where the master is silent, the trouble is further up.
        ``missing_since_s``: the newest data, where the parent has sent more than is here.
        """
        missing = missing_since_s is not None or self.window.since_s is not None
        if not missing and self.stage is ATTACHED:
            return False
        if self.parent is None or not fit.is_steady(self._opened_s, now_s):
            return False
        since_s = [self._owed_s] if self.stage is ATTACHING else []
        if self.stage is ATTACHED and missing_since_s is not None:
            since_s.append(missing_since_s)
        if self.window.since_s is not None:
            since_s.append(self.window.since_s)
        patience_s = self._limits.lease_s * 2 ** min(self.starved, DOUBLINGS_MAX)
        return any(now_s - max(at_s, fit.steady_s) > patience_s for at_s in since_s)

    def wait(self, now_s: float) -> Wait | None:
        """For the parent's answer, or for a commit of the own updates, for long already."""
        stuck_s = self._limits.stuck_s
        begun_s = now_s - stuck_s  # whoever waits since before this is stuck
        if self._opened_s < begun_s and self.stage is ATTACHING:
            return Wait(self._opened_s, LEVELS_ABOVE * stuck_s, Vain.PARENT)
        if self._own.progress_s < begun_s and len(self._own) > 0:
            return Wait(self._own.progress_s, stuck_s, Vain.COMMITS, self._figures())
        return None

    def _figures(self) -> dict[str, float | str]:
        """What waits, and how fast it went."""
        return {
            "bytes": self._own.bytes,
            "under_way": self.window.under_way,
            "parent": str(self.parent),
            "rate": self.window.rate / 1e6,
        }
