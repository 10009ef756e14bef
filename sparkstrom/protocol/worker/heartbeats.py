"""Send heartbeats, which acknowledge commits and contain changed statuses, to a node's parent.

A heartbeat renews the node's lease, which is the time for which the node counts as alive; when a
lease expires, the master may close the node's id (``protocol.common.stages``). A status describes
one node; a heartbeat contains the changed statuses of this node and of all nodes below it.
"""

from __future__ import annotations

import math
import zlib

import msgspec

from sparkstrom.base.identity import NodeId
from sparkstrom.codec.messages import Heartbeat, Status
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.events_and_effects import Effect
from sparkstrom.protocol.common.flow_control import PROMPT_ACK_BYTES, ROUTINE_SPACING_S
from sparkstrom.protocol.worker.identity import Membership
from sparkstrom.protocol.worker.node_state import (
    DirtyFlag,
    FitView,
    Subtree,
    TaskEnd,
    TrainerView,
)
from sparkstrom.protocol.worker.optimizer_transfer import OptimizerTransfers
from sparkstrom.protocol.worker.parent_link import InFlight, ParentLink
from sparkstrom.protocol.worker.replication import Replication
from sparkstrom.protocol.worker.time_limits import NodeLimits

REPORT_SPACING_S = 0.01  # least time from a report to an urgent one
REPEAT_S = 0.25  # between repeats of messages that are not acknowledged or confirmed


class Heartbeats:
    """Decides when a node sends a heartbeat to its parent, and what the heartbeat contains."""

    def __init__(
        self,
        limits: NodeLimits,
        *,
        membership: Membership,
        link: ParentLink,
        replication: Replication,
        in_flight: InFlight,
        trainer: TrainerView,
        fit: FitView,
        task: TaskEnd,
        transfers: OptimizerTransfers,
        subtree: Subtree,
        report_flag: DirtyFlag,
        now_s: float,
    ) -> None:
        self._limits, self._membership, self._link = limits, membership, link
        self._replication, self._in_flight, self._trainer = replication, in_flight, trainer
        self._fit, self._task, self._transfers = fit, task, transfers
        self._statuses, self._report_flag = subtree.statuses, report_flag
        self.status: Status | None = None  # as last reported
        self._reports = 0  # heartbeats so far
        self._reported_s, self._bytes_reported = -math.inf, 0  # with the last heartbeat
        self._lease_due_s = 0.0  # when the next heartbeat is due even without news
        self._level_s = now_s  # when this node last had all commits that its parent had

    def report_if_due(self, now_s: float) -> list[Effect]:
        """Return a heartbeat if a status has changed or the lease must be renewed."""
        return self.report(now_s) if now_s >= min(self.news_due_s, self._lease_due_s) else []

    @property
    def news_due_s(self) -> float:
        """Return when the next heartbeat with news is due; infinity without any."""
        if not self._report_flag.is_set:
            return math.inf
        unreported = self._bytes_taken - self._bytes_reported
        urgent = self._report_flag.is_urgent or unreported >= PROMPT_ACK_BYTES
        return self._reported_s + (REPORT_SPACING_S if urgent else ROUTINE_SPACING_S)

    @property
    def _bytes_taken(self) -> int:
        """Return the bytes of data messages that came from the parent over this edge."""
        return self._link.bytes_received + self._link.arriving

    def report(self, now_s: float) -> list[Effect]:
        """Return a heartbeat, and again the direct messages that the master has not confirmed."""
        self._report_flag.clear()
        self._reports += 1
        self._reported_s, self._bytes_reported = now_s, self._bytes_taken
        self.update_own_status(now_s)
        direct = self._task.unconfirmed_messages
        repeats = direct or self._statuses.has_pending
        self._lease_due_s = now_s + (REPEAT_S if repeats else self._renewal_interval_s())
        stamp, statuses = self._statuses.next_report()
        received = Heartbeat(
            received=self._replication.received,
            bytes_received=self._bytes_reported,
            catching=self._replication.fetch is not None,
            stamp=stamp,
            statuses=statuses,
        )
        return [self._link.send(received), *(ev.SendDirect(message) for message in direct)]

    def on_new_id(self, former: NodeId | None) -> None:
        """Forget the status that was reported under the former id."""
        self.status = None
        if former is not None:
            self._statuses.drop_subtree(former)

    def update_own_status(self, now_s: float) -> None:
        """Put this node's status into the status table if it has changed."""
        known, trainer = self.status, self._trainer
        status = Status(
            node=self._membership.id,
            edge=self._link.edge,
            count=known.count if known is not None else 1,
            after_seq=self._in_flight.last_seq,
            epoch=trainer.position.epoch,
            batch=trainer.position.batch,
            steps=trainer.pace,
            activity=trainer.activity,
            lag=self._lag(now_s),
            final=trainer.final,
            audit=trainer.audit,
            stats=trainer.stats,
            lends=self._transfers.is_source,
            whole=self._replication.history.whole,
        )
        if status != known:
            self.status = msgspec.structs.replace(status, count=self._reports)
            self._statuses.update(self.status, self._membership.id)

    def _lag(self, now_s: float) -> int:
        """Return how many commits this node is behind its parent, rounded down to a power of two.

        Return 0 unless the node has been behind for a while.
        """
        state = self._fit.state
        if state is None or not self._replication.is_behind(state):
            self._level_s = now_s
            return 0
        if now_s - self._level_s <= self._limits.lease_s / 2:
            return 0
        return 1 << ((state.head - self._replication.received).bit_length() - 1)

    def _renewal_interval_s(self) -> float:
        """Return the seconds until the next renewal, with jitter to keep nodes out of step."""
        jitter = zlib.crc32(b"%d/%d" % (self._membership.id, self._reports)) / 2**32
        return self._limits.lease_s / 4 * (0.5 + 0.5 * jitter)
