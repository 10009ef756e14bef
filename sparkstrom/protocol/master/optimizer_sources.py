"""Choose the worker whose optimizer state a late worker copies; copy states for checkpoints.

An optimizer's state is what it remembers between steps, such as momentum. A late worker is one that
joins when others have begun to train. For a checkpoint the master copies the state of one worker,
or of each worker that can send it.
"""

from __future__ import annotations

from sparkstrom.base.identity import MASTER, NodeId
from sparkstrom.codec.messages import OptimizerChunk, OptimizerRequest
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.events_and_effects import (
    Effect,
    IgnoredMessages,
    IgnoreReason,
    OptimizerCopyRequest,
)
from sparkstrom.protocol.common.optimizer_fetch import OptimizerFetch
from sparkstrom.protocol.common.process_pause import ProcessPause
from sparkstrom.protocol.master.members import Member, Members


class OptimizerSources:
    """Chooses the worker from which a late worker copies optimizer state; forwards the requests."""

    def __init__(self, members: Members, ignored: IgnoredMessages) -> None:
        self._members, self._ignored = members, ignored
        self._chosen: dict[NodeId, NodeId] = {}  # asker -> the worker from which it copies

    def on_request(self, ask: OptimizerRequest) -> list[Effect]:
        """Forward a request to the asker's source, the worker from which it copies.

        The source stays the same while it lives, because chunks from two sources do not form one
        copy. Ignore the request if no worker can serve it.
        """
        live = self._members.live
        source = live.get(self._chosen[ask.asker]) if ask.asker in self._chosen else None
        if source is None:
            able = self.candidates(ask.asker)
            if not able:
                self._ignored.count(ask, IgnoreReason.UNSERVED)
                return []
            source = able[0]
            self._chosen[ask.asker] = source.node
        return [source.send(ask)]

    def candidates(self, asker: NodeId) -> list[Member]:
        """Return the members that can send their state to ``asker``, most steps first."""
        others = (m for m in self._members.live.values() if m.is_source and m.node != asker)
        return sorted(others, key=lambda member: (-member.steps, member.node))


class OptimizerCopies:
    """Copies workers' optimizer states for a checkpoint, while training continues.

    One state is fetched at a time, because the master's link also carries the commits. A copy is
    given up after ``patience_s`` without progress. A copy's content identifies its partition.
    """

    def __init__(
        self,
        patience_s: float,
        members: Members,
        sources: OptimizerSources,
        ignored: IgnoredMessages,
    ) -> None:
        self._patience_s, self._members = patience_s, members
        self._sources, self._ignored = sources, ignored
        self.fetch: OptimizerFetch | None = None  # the copy that is being fetched
        self.copied: tuple[bytes, ...] = ()  # complete copies of the current request
        self._source: NodeId | None = None  # the current source; None: ``OptimizerSources`` chooses
        self._everybody = False  # the request is for a copy from each candidate
        self._asked: set[NodeId] = set()  # sources that have had their turn
        self._numbers: set[int] = set()  # numbers of finished copies, whose chunks come too late
        # The request for the end of the fit, until its copies are begun; see ``begin_last``.
        self._last: OptimizerCopyRequest | None = None
        self._has_last = False  # the copies for the end of the fit were begun

    def begin(self, wish: OptimizerCopyRequest, now_s: float) -> list[Effect]:
        """Begin to copy the optimizer states in ``wish``; do nothing while copies are under way.

        If the copies for the end of the fit exist already, report those at once.
        """
        if self.fetch is None and self._has_last:
            return [ev.OptimizerCopied(self.copied)]
        if self.fetch is None:
            self._begin_copies(wish, now_s)
        return []

    def _begin_copies(self, wish: OptimizerCopyRequest, now_s: float) -> None:
        """Begin to fetch the copies that a request names."""
        self._everybody = wish.everybody
        self._asked, self.copied, self._numbers = set(), (), set()
        self._begin_fetch(self._next_source() if self._everybody else None, now_s)

    def begin_last(self, wish: OptimizerCopyRequest, now_s: float) -> None:
        """Begin the copies for the last checkpoint as soon as a worker can send one."""
        self._last = wish
        self._begin_last_if_possible(now_s)

    def _begin_last_if_possible(self, now_s: float) -> None:
        """Begin the requested copies for the last checkpoint, if that is possible now.

        A worker must be able to send its state, and no other copy may be under way.
        """
        wish = self._last
        if wish is not None and self.fetch is None and self._sources.candidates(MASTER):
            self._last, self._has_last = None, True
            self._begin_copies(wish, now_s)

    @property
    def is_pending(self) -> bool:
        """Return whether a copy is under way or still to come, and some worker can send it."""
        wanted = self.fetch is not None or self._last is not None
        return wanted and bool(self._sources.candidates(MASTER))

    def _next_source(self) -> NodeId | None:
        """Return the worker to copy from next; None once all candidates have had their turn."""
        able = (member.node for member in self._sources.candidates(MASTER))
        return next((node for node in able if node not in self._asked), None)

    def _begin_fetch(self, source: NodeId | None, now_s: float) -> None:
        """Begin to fetch one copy, from ``source`` or from any worker."""
        self._source = source
        self.fetch = OptimizerFetch(self._patience_s, now_s + self._patience_s)

    def shift_deadlines(self, pause: ProcessPause) -> None:
        """Postpone the deadline by a pause of the process, which does not count as waiting."""
        if self.fetch is not None:
            self.fetch.shift_deadlines(pause)

    def on_data_arriving(self, now_s: float) -> None:
        """Postpone repeated requests, because part of a message, perhaps a chunk, has arrived."""
        if self.fetch is not None:
            self.fetch.moved_s = now_s

    def on_chunk(self, chunk: OptimizerChunk, now_s: float) -> list[Effect]:
        """Store a chunk and request the next ones; ignore a chunk of a finished copy."""
        if self.fetch is None or chunk.copy in self._numbers:
            self._ignored.count(chunk, IgnoreReason.LATE)
            return []
        self.fetch.add_chunk(chunk, now_s)
        return self.continue_fetch(now_s)

    def continue_fetch(self, now_s: float) -> list[Effect]:
        """Finish the current copy if it is complete or overdue, or if its source has left.

        Then begin the copies for the end of the fit if possible, and request missing chunks.
        """
        effects: list[Effect] = []
        fetch = self.fetch
        if fetch is not None and (
            fetch.whole is not None or now_s > fetch.until_s or self._is_source_gone()
        ):
            effects += self._finish_fetch(fetch, now_s)
        self._begin_last_if_possible(now_s)
        return effects + self._request_missing(now_s)

    def _is_source_gone(self) -> bool:
        """Return whether a source was chosen here and has left the fit."""
        return self._source is not None and self._source not in self._members.live

    def _finish_fetch(self, fetch: OptimizerFetch, now_s: float) -> list[Effect]:
        """Finish the current copy, complete or not; begin the next one, or report all copies."""
        self.fetch = None
        if fetch.whole is not None:
            self.copied += (fetch.whole,)
        if fetch.copy is not None:
            self._numbers.add(fetch.copy)
        source: NodeId | None = None
        if self._source is not None:
            self._asked.add(self._source)
            source = self._next_source() if self._everybody else None
        if source is None:
            return [ev.OptimizerCopied(self.copied)]
        self._begin_fetch(source, now_s)
        return []

    def _request_missing(self, now_s: float) -> list[Effect]:
        """Request missing chunks from the current source."""
        fetch, effects = self.fetch, list[Effect]()
        if fetch is None:
            return []
        for index in fetch.next_requests(now_s):
            ask = OptimizerRequest(MASTER, fetch.copy, index)
            if self._source is None:
                effects += self._sources.on_request(ask)
            else:
                effects.append(self._members.live[self._source].send(ask))
        return effects
