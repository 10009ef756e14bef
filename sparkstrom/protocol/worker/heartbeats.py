"""Heartbeats: a node renews its lease, acknowledges, and tells the news of all below it."""

from __future__ import annotations

import zlib

import msgspec

from sparkstrom.base.identity import NodeId
from sparkstrom.codec.messages import Heartbeat, Status
from sparkstrom.protocol.common import events as ev
from sparkstrom.protocol.common.events import Effect
from sparkstrom.protocol.worker.fit_view import FitView
from sparkstrom.protocol.worker.in_flight import InFlight
from sparkstrom.protocol.worker.limits import NodeLimits
from sparkstrom.protocol.worker.membership import Membership
from sparkstrom.protocol.worker.news import News
from sparkstrom.protocol.worker.optimizer_transfer import OptimizerTransfers
from sparkstrom.protocol.worker.parent_link import ParentLink
from sparkstrom.protocol.worker.replication import Replication
from sparkstrom.protocol.worker.subtree import Subtree
from sparkstrom.protocol.worker.task_end import TaskEnd
from sparkstrom.protocol.worker.trainer_view import TrainerView

REPORT_SPACING_S = 0.01  # news is told at once, but not more often than this
REPEAT_S = 0.25  # between repeats of what has not been shown to be heard


class Heartbeats:
    """What this node tells its parent, and when; of itself and of all below it."""

    def __init__(
        self,
        limits: NodeLimits,
        *,
        membership: Membership,
        link: ParentLink,
        replication: Replication,
        own: InFlight,
        trainer: TrainerView,
        fit: FitView,
        task: TaskEnd,
        transfers: OptimizerTransfers,
        subtree: Subtree,
        news: News,
        now_s: float,
    ) -> None:
        self._limits, self._membership, self._link = limits, membership, link
        self._replication, self._own, self._trainer = replication, own, trainer
        self._fit, self._task, self._transfers = fit, task, transfers
        self._statuses, self._news = subtree.statuses, news
        self.status: Status | None = None  # as last told
        self._reports = 0
        self._report_due_s = 0.0
        self._lease_due_s = 0.0
        self._level_s = now_s  # when it was last where its parent is

    def report_if_due(self, now_s: float) -> list[Effect]:
        """Report news at once, and otherwise when the lease wants it."""
        news_due = self._news.waits and now_s >= self._report_due_s
        return self.report(now_s) if news_due or now_s >= self._lease_due_s else []

    def report(self, now_s: float) -> list[Effect]:
        """Renew the lease, with whatever may not have been heard beside it."""
        self._news.waits = False
        self._reports += 1
        self._report_due_s = now_s + REPORT_SPACING_S
        self.put_own_status(now_s)
        direct = self._task.last_words
        repeats = direct or self._statuses.has_news
        self._lease_due_s = now_s + (REPEAT_S if repeats else self._pause_s())
        stamp, news = self._statuses.news()
        received = Heartbeat(
            received=self._replication.received,
            bytes_received=self._link.bytes_received + self._link.arriving,
            catching=self._replication.is_fetching,
            stamp=stamp,
            news=news,
        )
        return [self._link.send(received), *(ev.Tell(message) for message in direct)]

    def resend_all(self) -> None:
        """A new parent knows nothing."""
        self._statuses.resend_all()

    def goes_by_another_id(self, former: NodeId | None) -> None:
        """What was told under the former one is not this one's."""
        self.status = None
        if former is not None:
            self._statuses.forget(former)

    def put_own_status(self, now_s: float) -> None:
        """What changed since it was told last is news."""
        known, trainer = self.status, self._trainer
        status = Status(
            node=self._membership.id,
            edge=self._link.edge,
            count=known.count if known is not None else 1,
            after_seq=self._own.last_seq,
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
            self._statuses.put(self.status, self._membership.id)

    def _lag(self, now_s: float) -> int:
        """Commits behind the parent, in powers of two, once that has lasted; 0 otherwise."""
        state = self._fit.state
        if state is None or not self._replication.is_behind(state):
            self._level_s = now_s
            return 0
        if now_s - self._level_s <= self._limits.lease_s / 2:
            return 0
        return 1 << ((state.head - self._replication.received).bit_length() - 1)

    def _pause_s(self) -> float:
        """Until the next renewal: no two nodes keep the same beat."""
        jitter = zlib.crc32(b"%d/%d" % (self._membership.id, self._reports)) / 2**32
        return self._limits.lease_s / 4 * (0.5 + 0.5 * jitter)
