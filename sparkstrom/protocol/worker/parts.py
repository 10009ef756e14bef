"""Parts: of what a node is made, and who knows whom. None knows one that is made later."""

from __future__ import annotations

from sparkstrom.protocol.common.children import Children
from sparkstrom.protocol.common.history import History, Log
from sparkstrom.protocol.common.ignored import Ignored
from sparkstrom.protocol.common.leases import Leases
from sparkstrom.protocol.common.status_table import StatusTable
from sparkstrom.protocol.worker.deadlines import Deadlines
from sparkstrom.protocol.worker.directives import Directives
from sparkstrom.protocol.worker.fit_view import FitView
from sparkstrom.protocol.worker.heartbeats import Heartbeats
from sparkstrom.protocol.worker.in_flight import InFlight
from sparkstrom.protocol.worker.joining import Joining
from sparkstrom.protocol.worker.limits import Identity, NodeLimits
from sparkstrom.protocol.worker.membership import Membership
from sparkstrom.protocol.worker.news import News
from sparkstrom.protocol.worker.optimizer_transfer import OptimizerTransfers
from sparkstrom.protocol.worker.parent_link import ParentLink
from sparkstrom.protocol.worker.relaying import Relaying
from sparkstrom.protocol.worker.replication import Replication
from sparkstrom.protocol.worker.subtree import Subtree
from sparkstrom.protocol.worker.task_end import TaskEnd
from sparkstrom.protocol.worker.trainer_view import TrainerView


class NodeParts:
    """What there is of one worker; see each one's own module."""

    def __init__(self, identity: Identity, limits: NodeLimits, now_s: float) -> None:
        self.limits = limits
        self.news, self.ignored = news, ignored = News(), Ignored()
        history = History(Log(limits.log_bytes))
        self.own = InFlight(limits.window_bytes)
        self.children = Children(limits.serving, history, Leases(limits.lease_s, now_s))
        self.subtree = Subtree(self.children, StatusTable())
        self.membership = membership = Membership(identity, limits, now_s)
        self.fit, self.task = FitView(limits, now_s), TaskEnd()
        self.trainer = TrainerView(limits, news, now_s)
        self.link = link = ParentLink(limits, membership, self.own, news, now_s)
        self.replication = Replication(
            limits,
            history,
            membership=membership,
            link=link,
            own=self.own,
            trainer=self.trainer,
            children=self.children,
            news=news,
            ignored=ignored,
            now_s=now_s,
        )
        self.transfers = OptimizerTransfers(
            limits,
            membership=membership,
            link=link,
            trainer=self.trainer,
            fit=self.fit,
            subtree=self.subtree,
            news=news,
            ignored=ignored,
        )
        self._put_together(now_s)

    def _put_together(self, now_s: float) -> None:
        """What several parts do in common."""
        self.relaying = Relaying(
            membership=self.membership,
            link=self.link,
            replication=self.replication,
            transfers=self.transfers,
            subtree=self.subtree,
            news=self.news,
            ignored=self.ignored,
        )
        self.reporting = Heartbeats(
            self.limits,
            membership=self.membership,
            link=self.link,
            replication=self.replication,
            own=self.own,
            trainer=self.trainer,
            fit=self.fit,
            task=self.task,
            transfers=self.transfers,
            subtree=self.subtree,
            news=self.news,
            now_s=now_s,
        )
        self._joining = Joining(
            membership=self.membership,
            link=self.link,
            replication=self.replication,
            own=self.own,
            trainer=self.trainer,
            fit=self.fit,
            task=self.task,
            subtree=self.subtree,
            reporting=self.reporting,
            ignored=self.ignored,
        )
        self._orders = Directives(
            self.limits,
            replication=self.replication,
            own=self.own,
            trainer=self.trainer,
            fit=self.fit,
            transfers=self.transfers,
            children=self.children,
        )
        sleepers = (
            self.membership, self.fit, self.replication, self.trainer, self.link, self.task,
            self.own,
        )  # fmt: skip
        self._deadlines = Deadlines(
            self.limits,
            sleepers,
            membership=self.membership,
            link=self.link,
            replication=self.replication,
            trainer=self.trainer,
            fit=self.fit,
            task=self.task,
            now_s=now_s,
        )
