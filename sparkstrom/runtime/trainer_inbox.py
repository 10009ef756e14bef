"""Trainer inbox: what waits for the batch boundary, bounded in bytes.

Remote updates come whenever they come; the trainer takes them between two steps. When they wait
too long, they are summed: sparsely, and at most as one array. The sum is exact, so nobody sees a
difference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sparkstrom.codec.messages import BUFFERS, Committed
from sparkstrom.encoding.totals import Hits, Total
from sparkstrom.protocol.common.events import (
    Admitted,
    Begin,
    Deliver,
    DeliverMerged,
    Install,
    InstallUpdater,
    Passed,
)

MERGED_QUANTA_MAX = 2**30  # sums of thresholds beyond this could overflow an int32


@dataclass(slots=True)
class Merged:
    """Several commits in one, up to and with ``commit``."""

    total: Total
    commit: int
    passed: int  # how many of the commits are the node's own
    quanta: int  # sum of the largest entries in it: none can be larger


Effect = Deliver | Passed | DeliverMerged | Install | Begin | InstallUpdater | Admitted
Item = Effect | Merged


class TrainerInbox:
    """A queue of items in commit order. Not thread-safe: its owner holds a lock."""

    def __init__(self, n_params: int, bytes_max: int, decode: Callable[[Committed], Hits]) -> None:
        self._n_params, self._bytes_max, self._decode = n_params, bytes_max, decode
        self._items: list[Item] = []
        self._bytes = 0
        self.merges = 0

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Effect) -> None:
        """Add an item; single updates beyond the limit are merged."""
        if isinstance(item, Passed) and self._items and isinstance(self._items[-1], Merged):
            last = self._items[-1]  # so that a merge is not cut into pieces
            last.commit, last.passed = item.commit, last.passed + 1
            return
        if not isinstance(item, Deliver) or item.update.form == BUFFERS:
            self._items.append(item)
            return
        size = len(item.update.payload)
        if self._bytes + size <= self._bytes_max:
            self._items.append(item)
            self._bytes += size
        else:
            self._merge(item.update)

    def take(self) -> list[Item]:
        """Everything that waits."""
        items, self._items, self._bytes = self._items, [], 0
        return items

    def _merge(self, update: Committed) -> None:
        hits = self._decode(update)
        largest = int(np.abs(hits[1]).max())
        last = self._items[-1] if self._items else None
        if not isinstance(last, Merged) or last.quanta + largest > MERGED_QUANTA_MAX:
            last = Merged(Total(self._n_params), update.commit, 0, 0)
            self._items.append(last)
            self.merges += 1
        last.total.add(hits)
        last.commit = update.commit
        last.quanta += largest
