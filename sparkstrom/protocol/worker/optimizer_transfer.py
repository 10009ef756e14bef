"""Fetch a copy of another worker's optimizer state if this one joins late; send copies to others.

A worker joins late if others have begun to train. It waits for the state until a deadline and then
trains with a fresh one. If its parent in the tree of workers trains, the parent is the source;
otherwise the request goes up the tree to the master, which chooses a source. A late worker that
trains with a fresh state never becomes a source, because its state lacks history.
"""

from __future__ import annotations

from sparkstrom.base.identity import NodeId
from sparkstrom.codec.messages import OptimizerChunk, OptimizerRequest, Phase
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.events_and_effects import (
    Effect,
    IgnoredMessages,
    IgnoreReason,
    Send,
)
from sparkstrom.protocol.common.optimizer_fetch import OptimizerFetch
from sparkstrom.protocol.common.process_pause import ProcessPause
from sparkstrom.protocol.worker.identity import Membership
from sparkstrom.protocol.worker.node_state import DirtyFlag, FitView, Subtree, TrainerView
from sparkstrom.protocol.worker.parent_link import ParentLink
from sparkstrom.protocol.worker.time_limits import NodeLimits


class OptimizerTransfers:
    """Fetches optimizer state for this node, and serves or forwards the requests of other nodes."""

    def __init__(
        self,
        limits: NodeLimits,
        *,
        membership: Membership,
        link: ParentLink,
        trainer: TrainerView,
        fit: FitView,
        subtree: Subtree,
        report_flag: DirtyFlag,
        ignored: IgnoredMessages,
    ) -> None:
        self._limits, self._membership, self._link = limits, membership, link
        self._trainer, self._fit = trainer, fit
        self._subtree, self._report_flag, self._ignored = subtree, report_flag, ignored
        self.fetch: OptimizerFetch | None = None
        self._is_whole = False  # the optimizer state has the fit's history, its own or a copied one

    def begin_if_late(self, now_s: float) -> None:
        """Begin to fetch optimizer state if training had begun before this node's first replica."""
        state = self._fit.state
        begun = self._trainer.steps > 0 or self._trainer.position > self._membership.identity.start
        late = begun or (state is not None and state.slowest > 0)
        over = state is not None and state.phase is not Phase.RUNNING
        self._is_whole = not late
        if late and not over and self._limits.optimizer_wait_s:
            self.fetch = OptimizerFetch(
                self._limits.optimizer_wait_s, now_s + self._limits.optimizer_wait_s
            )

    def continue_fetch(self, now_s: float) -> list[Effect]:
        """Request missing chunks; install the complete state, or None after the deadline."""
        fetch = self.fetch
        if fetch is None:
            return []
        if (whole := fetch.whole) is not None or now_s > fetch.until_s:
            self.fetch, self._is_whole = None, whole is not None
            self._report_flag.set()
            return [ev.InstallOptimizer(whole)]
        if not self._link.attached:
            return []
        if self._link.arriving:  # a long message on a slow link, which is not a loss
            fetch.moved_s = now_s
        me = self._membership.id
        return [
            self._link.send(OptimizerRequest(me, fetch.copy, i)) for i in fetch.next_requests(now_s)
        ]

    def shift_deadlines(self, pause: ProcessPause) -> None:
        """Postpone the deadline by a pause of the process, which does not count as waiting."""
        if self.fetch is not None:
            self.fetch.shift_deadlines(pause)

    @property
    def is_source(self) -> bool:
        """Return whether others may copy this worker's optimizer state.

        The worker must not have joined late with a fresh state. Its trainer must have taken a step,
        because only then is a fetched state certain to be installed.
        """
        return self._is_whole and self._trainer.trained

    def on_request(self, ask: OptimizerRequest, to: NodeId | None) -> list[Effect]:
        """Serve a request from this worker's state, or forward the request towards the master.

        ``to`` is the neighbour through which the answer goes. Ignore a request from the parent that
        cannot be served here, and one that cannot be forwarded.
        """
        if to is not None and self.is_source:
            return [ev.SendOptimizerChunk(to, ask)]
        asked_from_below = to != self._link.parent
        if asked_from_below and self._link.attached:
            return [self._link.send(ask)]
        self._ignored.count(ask, IgnoreReason.UNSERVED)
        return []

    def on_chunk(self, chunk: OptimizerChunk, sender: NodeId, now_s: float) -> list[Effect]:
        """Store a chunk for this node; forward any other towards its asker.

        Ignore a chunk that is too late, or that only its ``sender`` could take.
        """
        if chunk.asker == self._membership.node:
            if self.fetch is not None:
                self.fetch.add_chunk(chunk, now_s)
            else:
                self._ignored.count(chunk, IgnoreReason.LATE)
            return self.continue_fetch(now_s)
        child = self._subtree.child_towards(chunk.asker)
        to = self._link.parent if child is None else child.node
        if to is None or to == sender:
            self._ignored.count(chunk, IgnoreReason.UNSERVED)
            return []
        return [Send(to, chunk)]
