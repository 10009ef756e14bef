"""A ``Children`` object on its own, with the history from which it serves children."""

from __future__ import annotations

from typing import Any

from sparkstrom.codec.messages import Commit
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.children import Child, Children, FlowLimits, Leases
from sparkstrom.protocol.common.commit_log import History, Log
from sparkstrom.protocol.common.flow_control import HEADER_BYTES
from tests.unit.protocol.effect_filters import sent

PLENTY = 10**6
ONE = HEADER_BYTES + 4  # weight of one commit of these tests
CHUNK_BYTES = 1000


class Parent:
    """A ``Children`` object, its growing history, and a clock ``now_s``."""

    def __init__(
        self,
        make: Any,
        *,
        window_bytes: int = PLENTY,
        total_bytes: int = 10**9,
        n_params: int = PLENTY,
        log_bytes: int = PLENTY,
    ) -> None:
        self.make = make
        self.history = History(Log(log_bytes), whole=True)
        self.leases = Leases(10.0, 0.0)
        serving = FlowLimits(window_bytes, total_bytes, n_params, CHUNK_BYTES)
        self.children = Children(serving, self.history, self.leases)
        self.now_s = 0.0

    def child(self, node: int = 5, edge: int = 50) -> Child:
        """Return the child, after adopting it if it is unknown."""
        if node not in self.children.by_node:
            self.children.adopt(self.make.adopt(node, edge), self.now_s)
        return self.children.by_node[node]

    def attach(self, have: int = 0, *ids: int, node: int = 5, **fields: Any) -> list[ev.Effect]:
        """Deliver a child's attach message; it has all commits up to ``have``."""
        attach = self.make.attach(have, *(ids or (node,)), **({"whole": True} | fields))
        return self.children.on_attach(self.child(node), attach, self.now_s)

    def append(self, *entries: Any) -> list[ev.Effect]:
        """Append these entries to the log, mark them as applied, and serve all children."""
        for entry in entries:
            self.history.append(entry)
            self.history.applied = entry.commit
        return self.children.feed_all(self.now_s)

    def commit(self, count: int = 1, origin: int = 9) -> list[ev.Effect]:
        """Append this many further commits of ``origin``."""
        head = self.history.log.head
        return self.append(*(self.make.committed(head + i, origin) for i in range(1, count + 1)))

    def report(self, received: int, node: int = 5, **fields: Any) -> list[ev.Effect]:
        """Deliver a child's heartbeat; by default it acknowledges all bytes sent."""
        child = self.child(node)
        report = self.make.report(
            received=received, **({"bytes_received": child.link.sent} | fields)
        )
        return self.children.on_heartbeat(child, report, self.now_s)

    def asks(self, index: int = 0, node: int = 5) -> list[ev.Effect]:
        """Deliver a child's request for a chunk."""
        return self.children.on_chunk_request(self.child(node), index, self.now_s)


def sent_commits(effects: list[ev.Effect], node: int = 5) -> list[int]:
    """Return the numbers of the single commits that were sent to this child."""
    return [committed.commit for committed in sent(effects, Commit, node)]
