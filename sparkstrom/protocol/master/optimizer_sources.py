"""Optimizer sources: from whom somebody that joined in mid-training takes an optimizer's state."""

from __future__ import annotations

from sparkstrom.base.identity import MASTER
from sparkstrom.codec.messages import AskUpdater
from sparkstrom.protocol.common.events import Effect
from sparkstrom.protocol.common.ignored import Ignored, Reason
from sparkstrom.protocol.master.members import Members


class OptimizerSources:
    """One for each who asks: chunks of two make no copy."""

    def __init__(self, members: Members, ignored: Ignored) -> None:
        self._members, self._ignored = members, ignored
        self._chosen: dict[int, int] = {}  # who asks -> its source

    def on_ask(self, ask: AskUpdater) -> list[Effect]:
        """Hand the question to somebody who has it; always to the same one, while it lives."""
        live = self._members.live
        source = live.get(self._chosen.get(ask.asker, MASTER))
        if source is None:
            able = [m for m in live.values() if m.is_source and m.node != ask.asker]
            if not able:
                self._ignored.count(ask, Reason.UNSERVED)
                return []
            source = max(able, key=lambda member: (member.steps, -member.node))
            self._chosen[ask.asker] = source.node
        return [source.answer(ask)]
