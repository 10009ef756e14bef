"""The one order: the root numbers each origin's updates, each once, in the origin's own order."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from operator import attrgetter

from sparkstrom.base.identity import CommitNo, NodeId, Seq
from sparkstrom.codec.messages import Committed, Payload, Update
from sparkstrom.protocol.common.history import History, Log
from sparkstrom.protocol.common.ignored import Ignored, Reason


class Sequencer:
    """Numbers updates; remembers per id how far it got, also after the id was closed."""

    def __init__(self, log_bytes: int, ignored: Ignored) -> None:
        self._ignored = ignored
        self.history = History(Log(log_bytes), whole=True)
        self.last: dict[NodeId, Seq] = {}  # per open id: its newest numbered seq
        self.closed: dict[NodeId, Seq] = {}  # per closed id: the seq it was closed at
        self.frozen = False  # from the audit on nothing is numbered
        self.staleness: Counter[int] = Counter()  # others' commits that an update had not seen
        # Per open id: its commits that it may not have seen.
        self._own: dict[NodeId, deque[CommitNo]] = {}

    @property
    def head(self) -> CommitNo:
        return self.history.log.head

    def admit(self, node: NodeId) -> None:
        assert node not in self.last, "ids are never reused"
        assert node not in self.closed, "ids are never reused"
        self.last[node] = Seq(0)
        self._own[node] = deque()

    def close(self, node: NodeId) -> Seq:
        """Nothing of this id is numbered any more; return its last seq."""
        self.closed[node] = self.last.pop(node)
        del self._own[node]
        return self.closed[node]

    def number(
        self, update: Update, payload_of: Callable[[Update], Payload] = attrgetter("payload")
    ) -> Committed | None:
        """The update's commit, or None if it is a repeat, out of order, or of a closed id.

        ``payload_of`` says what is committed in its name; it is asked only for what is numbered.
        """
        last = self.last.get(update.origin)
        reason = None
        if last is None:
            reason = Reason.CLOSED
        elif self.frozen or update.seq <= last:
            reason = Reason.LATE
        elif update.seq > last + 1:
            reason = Reason.EARLY
        if reason is not None:
            self._ignored.count(update, reason)
            return None
        committed = Committed(
            commit=CommitNo(self.head + 1),
            origin=update.origin,
            seq=update.seq,
            payload=payload_of(update),
        )
        self.staleness[self._unseen(update)] += 1
        self.history.append(committed)
        self.history.applied = committed.commit
        self._own[update.origin].append(committed.commit)
        self.last[update.origin] = update.seq
        return committed

    def _unseen(self, update: Update) -> int:
        """Commits of others between what the origin had seen and now; its own it always has."""
        own = self._own[update.origin]
        while own and own[0] <= update.seen:
            own.popleft()
        return max(0, self.head - update.seen - len(own))
