"""Status table: the newest of a node and of all below it, and what the parent lacks of that.

Nothing is summed on the way up, so the master sees each node's own words, and a word that was
lost is in the next report. What did not change is not told again: however large the mesh is, a
report is as long as there is news.
"""

from __future__ import annotations

from sparkstrom.codec.messages import Status

AUDIT_COST, COUNTERS_PER_COST = 6, 2  # a plain status, of about 30 bytes, costs 1
COST_MAX = 600  # a report stays well below what a control stream takes


class StatusTable:
    """Statuses by node, each with a stamp that grows with every change."""

    def __init__(self) -> None:
        self._known: dict[int, Status] = {}
        self._via: dict[int, int] = {}  # node -> the child that it stands under; itself for a child
        self._unheard: dict[int, int] = {}  # node -> stamp, the oldest first
        self._stamp = 0

    def put(self, status: Status, via: int) -> bool:
        """Take this in; False if a newer one is known."""
        known = self._known.get(status.node)
        if known is not None and known.age >= status.age:
            if known.age == status.age:  # one above it was moved, and took it along
                self._via[status.node] = via
            return False
        self._known[status.node], self._via[status.node] = status, via
        self._unheard.pop(status.node, None)
        self._stamp += 1
        self._unheard[status.node] = self._stamp
        return True

    def via(self, node: int) -> int | None:
        """The child that leads to ``node``."""
        return self._via.get(node)

    def forget(self, child: int) -> None:
        """Nothing below this child is ours to tell any more."""
        for node in [n for n, via in self._via.items() if via == child]:
            del self._known[node], self._via[node]
            self._unheard.pop(node, None)

    def on_ack(self, stamp: int) -> bool:
        """The parent has all news up to here; True if it lacked some and there is more to tell."""
        struck = False
        while self._unheard:
            node = next(iter(self._unheard))
            if self._unheard[node] > stamp:
                return struck
            del self._unheard[node]
            struck = True
        return False

    def resend_all(self) -> None:
        """A new parent knows nothing."""
        self._unheard = {}
        for node in self._known:
            self._stamp += 1
            self._unheard[node] = self._stamp

    @property
    def has_news(self) -> bool:
        return bool(self._unheard)

    def news(self) -> tuple[int, list[Status]]:
        """The oldest news, as much as fits a report, and the stamp that it reaches to."""
        out: list[Status] = []
        stamp, spent = self._stamp, 0
        for node, at in self._unheard.items():
            status = self._known[node]
            price = 1 + len(status.stats or ()) // COUNTERS_PER_COST
            price += AUDIT_COST if status.audit is not None else 0
            if spent and spent + price > COST_MAX:
                break
            out.append(status)
            stamp, spent = at, spent + price
        return stamp, out
