"""Assign commit numbers to updates: each update once, and each origin's updates in order.

The origin of an update is the worker that made it; a seq is the origin's own number for the update.
A commit is an update with the master's number.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from operator import attrgetter

from sparkstrom.base.identity import CommitNo, NodeId, Seq
from sparkstrom.codec.messages import Commit, Payload, Update
from sparkstrom.protocol.common.commit_log import History, Log
from sparkstrom.protocol.common.events_and_effects import IgnoredMessages, IgnoreReason


class Sequencer:
    """Assigns commit numbers, and records the seq of each id's last committed update.

    The master closes an id, for good, when its worker leaves, is silent or is replaced.
    """

    def __init__(self, log_bytes: int, ignored: IgnoredMessages) -> None:
        self._ignored = ignored
        self.history = History(Log(log_bytes), whole=True)
        self.last: dict[NodeId, Seq] = {}  # open id -> its newest committed seq
        self.closed: dict[NodeId, Seq] = {}  # closed id -> the last seq that counts
        self.slowest_told = 0  # ``Commit.slowest`` of the newest commit
        self.frozen = False  # True from the audit on: nothing is numbered
        self.staleness: Counter[int] = Counter()  # number of unseen commits -> updates
        # Open id -> its own commits that it may not have seen.
        self._own: dict[NodeId, deque[CommitNo]] = {}

    @property
    def head(self) -> CommitNo:
        """Return the number of the newest commit; 0 before the first."""
        return self.history.log.head

    def admit(self, node: NodeId) -> None:
        """Accept updates of a new id, beginning with its update 1."""
        assert node not in self.last, "ids are never reused"
        assert node not in self.closed, "ids are never reused"
        self.last[node] = Seq(0)
        self._own[node] = deque()

    def close(self, node: NodeId) -> Seq:
        """Stop numbering updates of this id; return the seq of its last committed update."""
        self.closed[node] = self.last.pop(node)
        del self._own[node]
        return self.closed[node]

    def number(
        self,
        update: Update,
        slowest: int = 0,
        payload_of: Callable[[Update], Payload] = attrgetter("payload"),
    ) -> Commit | None:
        """Number an update, append its commit to the history, and return the commit.

        Return None for an update that is repeated, out of order or of a closed id, and for all once
        ``frozen`` is set. The commit carries ``slowest``, the steps of the slowest worker.
        ``payload_of`` returns the payload to commit; it is called only for an update that is
        numbered.
        """
        last = self.last.get(update.origin)
        reason = None
        if last is None:
            reason = IgnoreReason.CLOSED
        elif self.frozen or update.seq <= last:
            reason = IgnoreReason.LATE
        elif update.seq > last + 1:
            reason = IgnoreReason.EARLY
        if reason is not None:
            self._ignored.count(update, reason)
            return None
        committed = Commit(
            commit=CommitNo(self.head + 1),
            origin=update.origin,
            seq=update.seq,
            slowest=slowest,
            payload=payload_of(update),
        )
        self.staleness[self._count_unseen(update)] += 1
        self.history.append(committed)
        self.history.applied = committed.commit
        self._own[update.origin].append(committed.commit)
        self.last[update.origin] = update.seq
        self.slowest_told = slowest
        return committed

    def _count_unseen(self, update: Update) -> int:
        """Return how many commits of other origins the update's origin had not seen.

        Its own commits do not count, because it applied them when it made them.
        """
        own = self._own[update.origin]
        while own and own[0] <= update.seen:
            own.popleft()
        return max(0, self.head - update.seen - len(own))
