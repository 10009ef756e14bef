"""Updater copies: workers' updater states for a checkpoint, fetched while training goes on.

Of one worker, or of each that could lend its state when it was asked for, one after another: the
driver's link carries the commits, too. Whose a copy is says its content.
"""

from __future__ import annotations

from sparkstrom.base.identity import MASTER, NodeId
from sparkstrom.codec.messages import AskUpdater, UpdaterChunk
from sparkstrom.protocol.common import events as ev
from sparkstrom.protocol.common.events import Effect
from sparkstrom.protocol.common.ignored import Ignored, Reason
from sparkstrom.protocol.common.optimizer_fetch import OptimizerFetch
from sparkstrom.protocol.master.members import Members
from sparkstrom.protocol.master.optimizer_sources import OptimizerSources


class UpdaterCopies:
    """At most one is on its way. ``patience_s``: how long nothing of it may come."""

    def __init__(
        self, patience_s: float, members: Members, sources: OptimizerSources, ignored: Ignored
    ) -> None:
        self._patience_s, self._members = patience_s, members
        self._sources, self._ignored = sources, ignored
        self.fetch: OptimizerFetch | None = None
        self.copied: tuple[bytes, ...] = ()  # since it was asked for last
        self._source: NodeId | None = None  # who lends now; None: whom the sources choose
        self._left: list[NodeId] = []  # who comes then
        self._numbers: set[int] = set()  # of copies that are over: more of them is late

    def begin(self, now_s: float, *, everybody: bool = False) -> None:
        """Unless some are on their way, which is as good."""
        if self.fetch is not None:
            return
        able = self._sources.able(MASTER) if everybody else []
        self._left, self.copied, self._numbers = [member.node for member in able], (), set()
        self._begin_next(now_s)

    def _begin_next(self, now_s: float) -> None:
        self._source = self._left.pop(0) if self._left else None
        self.fetch = OptimizerFetch(self._patience_s, now_s + self._patience_s)

    def on_chunk(self, chunk: UpdaterChunk, now_s: float) -> list[Effect]:
        """Some of it is here."""
        if self.fetch is None or chunk.copy in self._numbers:
            self._ignored.count(chunk, Reason.LATE)
            return []
        self.fetch.take(chunk, now_s)
        return self.ask_on(now_s)

    def ask_on(self, now_s: float) -> list[Effect]:
        """Until all is there, or nothing has come for too long."""
        fetch = self.fetch
        if fetch is None:
            return []
        if fetch.whole is not None or now_s > fetch.until_s or self._is_gone():
            self._end(fetch)
            self._left = [node for node in self._left if node in self._members.live]
            if not self._left:
                return [ev.UpdaterCopied(self.copied)]
            self._begin_next(now_s)
        return self._ask(now_s)

    def _is_gone(self) -> bool:
        return self._source is not None and self._source not in self._members.live

    def _end(self, fetch: OptimizerFetch) -> None:
        """It is whole, or its lender is left out."""
        self.fetch = None
        if fetch.whole is not None:
            self.copied += (fetch.whole,)
        if fetch.copy is not None:
            self._numbers.add(fetch.copy)

    def _ask(self, now_s: float) -> list[Effect]:
        """The one whose turn it is."""
        fetch, effects = self.fetch, list[Effect]()
        assert fetch is not None, "somebody's is on its way"
        for index in fetch.wanted(now_s):
            ask = AskUpdater(MASTER, fetch.copy, index)
            if self._source is None:
                effects += self._sources.on_ask(ask)
            else:
                effects.append(self._members.live[self._source].answer(ask))
        return effects
