"""Membership: which ids this process has had, and how it asks the master for a place."""

from __future__ import annotations

from sparkstrom.base.identity import NodeId, Seq
from sparkstrom.codec.messages import Address, Closed, Join, LastSeqs, Refused, Welcome
from sparkstrom.protocol.common.endings import Vain
from sparkstrom.protocol.common.ignored import Reason
from sparkstrom.protocol.worker.limits import Identity, NodeLimits
from sparkstrom.protocol.worker.waits import LEVELS_ABOVE, Sleep, Wait


class Membership:
    """Its ids, and where it listens."""

    def __init__(self, identity: Identity, limits: NodeLimits, now_s: float) -> None:
        self.identity, self._limits = identity, limits
        self.node: NodeId | None = None  # None before the first welcome
        self.ids: dict[NodeId, Seq | None] = {}  # all it had: closed at this seq, or None
        self.count = 1  # rises with each return
        self.request = 0  # rises with each asking
        self.address: Address | None = None
        self.alone = False  # the last request said that all edges are gone
        self._began_s = now_s

    @property
    def id(self) -> NodeId:
        """Its present id, where it must have one."""
        assert self.node is not None, "it has no id yet"
        return self.node

    def listens_at(self, address: Address, *, alone: bool) -> None:
        """On fresh streams, over which the next edge is to come."""
        self.address, self.alone = address, alone or self.alone
        self.request += 1

    def join(self) -> Join:
        """The words that ask for a place, or for another edge."""
        assert self.address is not None, "who asks listens somewhere"
        who = self.identity
        return Join(
            token=who.token,
            count=self.count,
            request=self.request,
            partition=who.partition,
            attempt=who.attempt,
            rows=who.rows,
            checksum=who.checksum,
            batches=who.batches,
            address=self.address,
            host=who.host,
            executor=who.executor,
            pid=who.pid,
            version=who.version,
            alone=self.alone,
        )

    def is_not_for(self, message: Welcome | Refused | Closed) -> Reason | None:
        """Why an answer of the master is not one to the present asking, if it is not."""
        if message.token != self.identity.token:
            return Reason.FOR_ANOTHER
        return None if message.count == self.count else Reason.LATE

    def take_id(self, node: NodeId, closed: LastSeqs) -> dict[NodeId, Seq]:
        """It goes by this id now; return where each former one was closed."""
        assert node not in self.ids, "ids are never reused"
        for former, seq in closed:
            self.ids[former] = seq
        self.ids[node] = None
        self.node = node
        return {former: seq for former, seq in self.ids.items() if seq is not None}

    def is_closed(self, node: NodeId) -> bool:
        """It has heard before that this id is closed; the next join is under way."""
        return self.ids.get(node) is not None

    def close(self, node: NodeId, seq: Seq) -> None:
        """That id is gone; the next join is for another one."""
        assert not self.is_closed(node), "an id is closed once"
        self.ids[node] = seq
        self.count += 1

    # -- time ------------------------------------------------------------------------------------

    def slept(self, sleep: Sleep) -> None:
        """See ``Sleep``."""
        self._began_s = sleep.later(self._began_s)

    def wait(self, now_s: float) -> Wait | None:
        """For a place, far too long."""
        limit_s = LEVELS_ABOVE * self._limits.stuck_s
        if self.node is None and now_s - self._began_s > limit_s:
            return Wait(self._began_s, limit_s, Vain.PLACE)
        return None
