"""Trainer inbox: what waits for the batch boundary, bounded in bytes.

Remote updates come whenever they come; the trainer takes them between two steps. When they wait
too long, they are summed: sparsely, and at most as one array. The sum is exact, so nobody sees a
difference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from sparkstrom.base.identity import CommitNo
from sparkstrom.codec.messages import BUFFERS, Committed
from sparkstrom.protocol.common.events import (
    Admitted,
    Begin,
    Deliver,
    DeliverMerged,
    Install,
    InstallUpdater,
    Passed,
)


class CommitSum(Protocol):
    """Several updates of others, added up."""

    def add_update(self, update: Committed) -> bool:
        """Add one; False where the sum could overflow, and is as before. A new one takes any."""


Sum = TypeVar("Sum")


@dataclass(slots=True)
class Merged(Generic[Sum]):
    """Several commits in one, up to and with ``commit``."""

    total: Sum
    commit: CommitNo
    passed: int  # how many of the commits are the node's own


Effect = Deliver | Passed | DeliverMerged | Install | Begin | InstallUpdater | Admitted
Item = Effect | Merged[Any]


class TrainerInbox:
    """A queue of items in commit order. Not thread-safe: its owner holds a lock."""

    __slots__ = ("_begin_sum", "_bytes", "_bytes_max", "_items", "merges")

    def __init__(self, bytes_max: int, begin_sum: Callable[[], CommitSum]) -> None:
        self._bytes_max, self._begin_sum = bytes_max, begin_sum
        self._items: list[Item] = []
        self._bytes = 0
        self.merges = 0

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Effect) -> None:
        """Add an item; single updates beyond the limit are merged."""
        items = self._items
        if isinstance(item, Deliver) and item.update.payload.form != BUFFERS:
            size = len(item.update.payload)
            if self._bytes + size > self._bytes_max:
                self._merge(item.update)
                return
            self._bytes += size
        elif isinstance(item, Passed) and items and isinstance(items[-1], Merged):
            last = items[-1]  # so that a merge is not cut into pieces
            last.commit, last.passed = item.commit, last.passed + 1
            return
        items.append(item)

    def take(self) -> list[Item]:
        """Everything that waits."""
        items, self._items, self._bytes = self._items, [], 0
        return items

    def _merge(self, update: Committed) -> None:
        last = self._items[-1] if self._items else None
        if isinstance(last, Merged) and last.total.add_update(update):
            last.commit = update.commit
            return
        total = self._begin_sum()
        total.add_update(update)
        self._items.append(Merged(total, update.commit, 0))
        self.merges += 1
