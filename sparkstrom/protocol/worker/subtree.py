"""Subtree: who is below a worker: the edges to its children, and the newest words of all."""

from __future__ import annotations

from sparkstrom.codec.messages import EVERYBODY, Again
from sparkstrom.protocol.common.child import Child
from sparkstrom.protocol.common.children import Children
from sparkstrom.protocol.common.events import Effect, Send
from sparkstrom.protocol.common.status_table import StatusTable


class Subtree:
    """Both change together: what a child told is nobody's to tell once its edge is gone."""

    def __init__(self, children: Children, statuses: StatusTable) -> None:
        self.children, self.statuses = children, statuses

    def drop(self, node: int, edge: int | None = None) -> list[Effect]:
        """One child less, unless it is there by a newer edge than this one."""
        effects = self.children.disown(node, edge)
        if effects:
            self.statuses.forget(node)
        return effects

    def drop_all(self) -> list[Effect]:
        """Drop all edges downwards; the children will find out."""
        effects: list[Effect] = []
        for child in list(self.children.by_node):
            effects += self.drop(child)
        return effects

    def ask_all_again(self) -> list[Effect]:
        """Everybody below is to send its uncommitted updates again."""
        return [Send(child, Again(EVERYBODY)) for child in self.children.by_node]

    def towards(self, node: int) -> Child | None:
        """The child that leads to this node, if it is below."""
        via = self.statuses.via(node)
        return None if via is None else self.children.by_node.get(via)
