"""A worker's identity for the master: constant facts about its process, and its node ids.

The master closes an id, for good, when its worker leaves, is silent or is replaced. A process that
returns after that gets a new id; the facts stay the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparkstrom.base.identity import NodeId, Position, Seq
from sparkstrom.codec.messages import Address, IdClosed, Join, JoinRefusal, LastSeqs, Welcome
from sparkstrom.protocol.common.events_and_effects import IgnoreReason, TimeoutReason
from sparkstrom.protocol.common.process_pause import ProcessPause
from sparkstrom.protocol.worker.time_limits import LEVELS_ABOVE, NodeLimits, Wait


@dataclass(frozen=True, slots=True)
class Identity:
    """The constant facts with which a worker process joins; most are fields of ``Join``."""

    token: int  # random number that identifies the process
    partition: int  # index of the partition that the worker trains
    attempt: int  # Spark's taskAttemptId; the highest one owns the partition
    rows: int  # number of rows in the partition
    checksum: int  # of the rows' content, independent of their order
    batches: int  # minibatches per epoch
    host: str  # the worker's host, as Spark knows it
    executor: str  # equal text means the same executor process
    pid: int  # the worker's process id
    version: str  # of sparkstrom; must equal the controller's
    # It starts with the replica of commit 0; sent with ``Attach``, not ``Join``.
    whole: bool = False
    # Where the fit begins in the partition; a worker that starts later succeeds another one.
    start: Position = Position(0, 0)


class Membership:
    """The ids of this process, and the address where it listens for its parent."""

    def __init__(self, identity: Identity, limits: NodeLimits, now_s: float) -> None:
        self.identity, self._limits = identity, limits
        self.node: NodeId | None = None  # None before the first welcome
        self.ids: dict[NodeId, Seq | None] = {}  # its ids -> seq at which it was closed, or None
        self.count = 1  # rises with each return under a new id
        self.request = 0  # rises with each request for an edge
        self.address: Address | None = None  # where it listens; None: nowhere yet
        self.alone = False  # the last request stated that edges to children are gone as well
        self._began_s = now_s

    @property
    def id(self) -> NodeId:
        """Return the current id; raise AssertionError before the first welcome."""
        assert self.node is not None, "it has no id yet"
        return self.node

    def set_address(self, address: Address, *, alone: bool) -> None:
        """Set the fresh streams on which the process listens; the next join is a new request.

        ``alone``: whether the edges to its children are lost as well.
        """
        self.address, self.alone = address, alone or self.alone
        self.request += 1

    def make_join(self) -> Join:
        """Return the message that asks for a place, or for another edge."""
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

    def mismatch_reason(self, message: Welcome | JoinRefusal | IdClosed) -> IgnoreReason | None:
        """Return why this message does not answer the latest join; None if it does."""
        if message.token != self.identity.token:
            return IgnoreReason.FOR_ANOTHER
        return None if message.count == self.count else IgnoreReason.LATE

    def take_id(self, node: NodeId, closed: LastSeqs) -> dict[NodeId, Seq]:
        """Take ``node`` as the current id, and record the ``closed`` former ids.

        Return the number (seq) of each former id's last committed update.
        """
        assert node not in self.ids, "ids are never reused"
        for former, seq in closed:
            self.ids[former] = seq
        self.ids[node] = None
        self.node = node
        return {former: seq for former, seq in self.ids.items() if seq is not None}

    def is_closed(self, node: NodeId) -> bool:
        """Return whether this id of the process is known to be closed."""
        return self.ids.get(node) is not None

    def close(self, node: NodeId, seq: Seq) -> None:
        """Record that an id is closed; the next join requests a new one."""
        assert not self.is_closed(node), "an id is closed once"
        self.ids[node] = seq
        self.count += 1

    def shift_deadlines(self, pause: ProcessPause) -> None:
        """Postpone the deadlines by a pause of the process, which does not count as waiting."""
        self._began_s = pause.shift(self._began_s)

    def overdue_wait(self, now_s: float) -> Wait | None:
        """Return the wait for a first place in the tree if it is overdue; otherwise None."""
        limit_s = LEVELS_ABOVE * self._limits.stuck_s
        if self.node is None and now_s - self._began_s > limit_s:
            return Wait(self._began_s, limit_s, TimeoutReason.PLACE)
        return None
