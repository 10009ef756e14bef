"""Updater copies: workers' updater states for a checkpoint, fetched while training goes on.

Of one worker, or of each that could lend its state when it was asked for, one after another: the
driver's link carries the commits, too. Whose a copy is says its content.
"""

from __future__ import annotations

from sparkstrom.base.identity import MASTER, NodeId
from sparkstrom.codec.messages import AskUpdater, UpdaterChunk
from sparkstrom.protocol.common import events as ev
from sparkstrom.protocol.common.events import CopyUpdater, Effect
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
        self._everybody = False
        self._asked: set[NodeId] = set()  # whose has come since, or could not be had
        self._numbers: set[int] = set()  # of copies that are over: more of them is late
        self._last: CopyUpdater | None = None  # not begun: nobody can lend, or one is on its way
        self._has_last = False  # begun, if not over

    def begin(self, wish: CopyUpdater, now_s: float) -> list[Effect]:
        """Unless some are on their way, which is as good, or the last ones have come."""
        if self.fetch is None and self._has_last:
            return [ev.UpdaterCopied(self.copied)]
        if self.fetch is None:
            self._begin(wish, now_s)
        return []

    def _begin(self, wish: CopyUpdater, now_s: float) -> None:
        self._everybody = wish.everybody
        self._asked, self.copied, self._numbers = set(), (), set()
        self._begin_next(self._next() if self._everybody else None, now_s)

    def begin_last(self, wish: CopyUpdater, now_s: float) -> None:
        """As soon as somebody can lend one, and what is on its way is over."""
        self._last = wish
        self._begin_waiting(now_s)

    def _begin_waiting(self, now_s: float) -> None:
        wish = self._last
        if wish is not None and self.fetch is None and self._sources.able(MASTER):
            self._last, self._has_last = None, True
            self._begin(wish, now_s)

    @property
    def is_awaited(self) -> bool:
        """Is one on its way, or to come, and can anybody lend it?"""
        wanted = self.fetch is not None or self._last is not None
        return wanted and bool(self._sources.able(MASTER))

    def _next(self) -> NodeId | None:
        """Whose turn it is."""
        able = (member.node for member in self._sources.able(MASTER))
        return next((node for node in able if node not in self._asked), None)

    def _begin_next(self, source: NodeId | None, now_s: float) -> None:
        self._source = source
        self.fetch = OptimizerFetch(self._patience_s, now_s + self._patience_s)

    def arriving(self, now_s: float) -> None:
        """A long message on a slow link, which is no loss: perhaps it is a chunk."""
        if self.fetch is not None:
            self.fetch.moved_s = now_s

    def on_chunk(self, chunk: UpdaterChunk, now_s: float) -> list[Effect]:
        """Some of it is here."""
        if self.fetch is None or chunk.copy in self._numbers:
            self._ignored.count(chunk, Reason.LATE)
            return []
        self.fetch.take(chunk, now_s)
        return self.ask_on(now_s)

    def ask_on(self, now_s: float) -> list[Effect]:
        """Until all is there, or nothing has come for too long."""
        effects: list[Effect] = []
        fetch = self.fetch
        if fetch is not None and (
            fetch.whole is not None or now_s > fetch.until_s or self._is_gone()
        ):
            effects += self._end(fetch, now_s)
        self._begin_waiting(now_s)
        return effects + self._ask(now_s)

    def _is_gone(self) -> bool:
        return self._source is not None and self._source not in self._members.live

    def _end(self, fetch: OptimizerFetch, now_s: float) -> list[Effect]:
        """It is whole, or its lender is left out."""
        self.fetch = None
        if fetch.whole is not None:
            self.copied += (fetch.whole,)
        if fetch.copy is not None:
            self._numbers.add(fetch.copy)
        source: NodeId | None = None
        if self._source is not None:
            self._asked.add(self._source)
            source = self._next() if self._everybody else None
        if source is None:
            return [ev.UpdaterCopied(self.copied)]
        self._begin_next(source, now_s)
        return []

    def _ask(self, now_s: float) -> list[Effect]:
        """The one whose turn it is."""
        fetch, effects = self.fetch, list[Effect]()
        if fetch is None:
            return []
        for index in fetch.wanted(now_s):
            ask = AskUpdater(MASTER, fetch.copy, index)
            if self._source is None:
                effects += self._sources.on_ask(ask)
            else:
                effects.append(self._members.live[self._source].answer(ask))
        return effects
