"""Optimizer sources: from whom somebody that joined in mid-training takes an optimizer's state."""

from __future__ import annotations

from sparkstrom.base.identity import NodeId
from sparkstrom.codec.messages import AskUpdater
from sparkstrom.protocol.common.events import Effect
from sparkstrom.protocol.common.ignored import Ignored, Reason
from sparkstrom.protocol.master.members import Member, Members


class OptimizerSources:
    """One for each who asks: chunks of two make no copy."""

    def __init__(self, members: Members, ignored: Ignored) -> None:
        self._members, self._ignored = members, ignored
        self._chosen: dict[NodeId, NodeId] = {}  # who asks -> its source

    def on_ask(self, ask: AskUpdater) -> list[Effect]:
        """Hand the question to somebody who has it; always to the same one, while it lives."""
        live = self._members.live
        source = live.get(self._chosen[ask.asker]) if ask.asker in self._chosen else None
        if source is None:
            able = self.able(ask.asker)
            if not able:
                self._ignored.count(ask, Reason.UNSERVED)
                return []
            source = able[0]
            self._chosen[ask.asker] = source.node
        return [source.answer(ask)]

    def able(self, asker: NodeId) -> list[Member]:
        """Who could lend its state, who has trained most first."""
        others = (m for m in self._members.live.values() if m.is_source and m.node != asker)
        return sorted(others, key=lambda member: (-member.steps, member.node))
