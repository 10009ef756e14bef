"""Optimizer transfer: who joins in mid-training takes the updater's state of somebody who trains.

Momentum and second moments are worth having, but nobody waits for them beyond a deadline. A
parent that trains is the source; otherwise the question goes up, and the master chooses one.
Who began in mid-training with a fresh state, because none came in time, is no source to the end of
the fit: it is not what it is taken for.
"""

from __future__ import annotations

from sparkstrom.base.identity import NodeId
from sparkstrom.codec.messages import AskUpdater, Phase, UpdaterChunk
from sparkstrom.protocol.common import events as ev
from sparkstrom.protocol.common.events import Effect, Send
from sparkstrom.protocol.common.ignored import Ignored, Reason
from sparkstrom.protocol.common.optimizer_fetch import OptimizerFetch
from sparkstrom.protocol.worker.fit_view import FitView
from sparkstrom.protocol.worker.limits import NodeLimits
from sparkstrom.protocol.worker.membership import Membership
from sparkstrom.protocol.worker.news import News
from sparkstrom.protocol.worker.parent_link import ParentLink
from sparkstrom.protocol.worker.subtree import Subtree
from sparkstrom.protocol.worker.trainer_view import TrainerView


class OptimizerTransfers:
    """What this node fetches, and whether others may take its own."""

    def __init__(
        self,
        limits: NodeLimits,
        *,
        membership: Membership,
        link: ParentLink,
        trainer: TrainerView,
        fit: FitView,
        subtree: Subtree,
        news: News,
        ignored: Ignored,
    ) -> None:
        self._limits, self._membership, self._link = limits, membership, link
        self._trainer, self._fit = trainer, fit
        self._subtree, self._news, self._ignored = subtree, news, ignored
        self.fetch: OptimizerFetch | None = None
        self._is_whole = False  # its optimizer began with the fit, or was taken from one that did

    def begin_if_late(self, now_s: float) -> None:
        """Its first replica is installed; has training begun without it?"""
        state = self._fit.state
        begun = self._trainer.steps > 0 or self._trainer.position > self._membership.identity.start
        late = begun or (state is not None and state.slowest > 0)
        over = state is not None and state.phase is not Phase.RUNNING
        self._is_whole = not late
        if late and not over and self._limits.optimizer_wait_s:
            self.fetch = OptimizerFetch(
                self._limits.optimizer_wait_s, now_s + self._limits.optimizer_wait_s
            )

    def request_chunks(self, now_s: float) -> list[Effect]:
        """Ask on, until all is there or it has taken too long."""
        fetch = self.fetch
        if fetch is None:
            return []
        if (whole := fetch.whole) is not None or now_s > fetch.until_s:
            self.fetch, self._is_whole = None, whole is not None
            self._news.add()
            return [ev.InstallUpdater(whole)]
        if not self._link.attached:
            return []
        if self._link.arriving:  # a long message on a slow link, which is no loss
            fetch.moved_s = now_s
        me = self._membership.id
        return [self._link.send(AskUpdater(me, fetch.copy, i)) for i in fetch.wanted(now_s)]

    @property
    def is_source(self) -> bool:
        """Has it trained, with a state that was never fresh in mid-training?

        What it has fetched is with its trainer for certain only once that has taken a step.
        """
        return self._is_whole and self._trainer.trained

    def on_ask(self, ask: AskUpdater, to: NodeId | None) -> list[Effect]:
        """Give it, or let somebody above find a source. ``to``: the neighbour it goes to."""
        if to is not None and self.is_source:
            return [ev.SendUpdater(to, ask)]
        asked_from_below = to != self._link.parent
        if asked_from_below and self._link.attached:
            return [self._link.send(ask)]
        self._ignored.count(ask, Reason.UNSERVED)
        return []

    def on_chunk(self, chunk: UpdaterChunk, sender: NodeId, now_s: float) -> list[Effect]:
        """For this node, or for one below it, or on its way up; never back where it was."""
        if chunk.asker == self._membership.node:
            if self.fetch is not None:
                self.fetch.take(chunk, now_s)
            else:
                self._ignored.count(chunk, Reason.LATE)
            return self.request_chunks(now_s)
        child = self._subtree.towards(chunk.asker)
        to = self._link.parent if child is None else child.node
        if to is None or to == sender:
            self._ignored.count(chunk, Reason.UNSERVED)
            return []
        return [Send(to, chunk)]
