"""Batches: one partition's minibatches, in an order that every attempt of its task repeats.

Spark may hand the rows of a partition in another order when a task is tried again, so they are
first put into an order of their own content. An epoch takes pages of neighbouring rows in a random
order and shuffles all rows of a window of pages: a partition of up to ``WINDOW_BYTES`` is shuffled
as a whole, a larger one is read from disk in pages, not in rows. Neighbours are neighbours by
their keys, which are hashes: nothing but chance has put them side by side.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from sparkstrom.models.base import Batch, Columns
from sparkstrom.runtime.records import RowFormat, arrays_in, form_of
from sparkstrom.runtime.row_store import Ordered, Store

PAGE_BYTES = 64 << 10  # read at once; a disk takes longer to find it than to read it
WINDOW_BYTES = 4 << 20  # shuffled at once, in memory


class HeldOut:
    """Rows that nobody trains on; iterate for minibatches, always in the same order."""

    def __init__(self, ordered: Ordered, batch_rows: int) -> None:
        self._ordered, self._batch_rows = ordered, batch_rows

    @property
    def rows(self) -> int:
        return self._ordered.held_out

    def __iter__(self) -> Iterator[Batch]:
        yield from map(self._ordered.form.batch_of, self.stored())

    def stored(self) -> Iterator[list[NDArray[Any]]]:
        """The same, as the form of the rows has their arrays."""
        begin, end = self._ordered.rows, self._ordered.rows + self.rows
        for first in range(begin, end, self._batch_rows):
            part = (first, min(end, first + self._batch_rows))
            yield self._ordered.form.arrays(self._ordered.read([part]))


class Batches:
    """Minibatches of one partition, shuffled by (seed, partition, epoch).

    A partial last batch is trained, too. Rows are [rows, ...] in every array; ``of_store`` takes
    what is too large for memory.
    """

    def __init__(
        self,
        features: Columns,
        labels: Columns,
        weights: NDArray[np.float32] | None = None,
        *,
        batch_rows: int,
        seed: int,
        partition: int,
        first_epoch: int = 0,
        fraction: float = 0.0,
    ) -> None:
        batch = Batch(features, labels, weights)
        form = form_of(batch)
        records = form.pack(arrays_in(batch))
        store = Store(seed=seed, fraction=fraction)
        store.add(form, records)
        self._take(store.finish(), batch_rows, seed, partition, first_epoch)

    @classmethod
    def of_store(
        cls, ordered: Ordered, *, batch_rows: int, seed: int, partition: int, first_epoch: int = 0
    ) -> Self:
        """Minibatches of rows that are in order already."""
        made = cls.__new__(cls)
        made._take(ordered, batch_rows, seed, partition, first_epoch)
        return made

    def _take(
        self, ordered: Ordered, batch_rows: int, seed: int, partition: int, first_epoch: int
    ) -> None:
        self._ordered, self._batch_rows = ordered, batch_rows
        self._seed, self._partition = seed, partition
        self._first_epoch = first_epoch  # epochs trained before: shuffling goes on from there
        row_bytes = max(1, ordered.form.row_bytes)
        self._page_rows = max(1, PAGE_BYTES // row_bytes)
        self._window_pages = max(1, WINDOW_BYTES // (self._page_rows * row_bytes))
        self._epoch, self._pages, self._starts = -1, np.zeros(0, np.int64), [0]
        self._window = -1
        self._arrays: list[NDArray[Any]] = []  # of that window
        self.held_out = HeldOut(ordered, batch_rows)

    @property
    def rows(self) -> int:
        """Rows to train on."""
        return self._ordered.rows

    @property
    def partition(self) -> int:
        """Whose rows these are."""
        return self._partition

    @property
    def checksum(self) -> int:
        """Of all rows and which of them are held out, whatever their order; 0 to 2^63 - 1."""
        return self._ordered.checksum

    @property
    def spilled_bytes(self) -> int:
        """What lies on the executor's scratch."""
        return self._ordered.spilled_bytes

    @property
    def per_epoch(self) -> int:
        """Minibatches in an epoch."""
        return -(-self.rows // self._batch_rows)

    def place(self, epoch: int, index: int) -> tuple[int, int, int]:
        """(epoch over all fits, minibatch, minibatches in it) of a position in this fit."""
        return self._first_epoch + epoch, index, self.per_epoch

    def get(self, epoch: int, index: int) -> Batch:
        """Minibatch ``index`` of an epoch: at most ``batch_rows`` rows."""
        return self.form.batch_of(self.stored(epoch, index))

    def stored(self, epoch: int, index: int) -> list[NDArray[Any]]:
        """The same, as ``form`` has its arrays: what is sparse is so still."""
        if epoch != self._epoch:
            self._begin(epoch)
        first = index * self._batch_rows
        end = min(self.rows, first + self._batch_rows)
        return self._stored(first, end)

    @property
    def form(self) -> RowFormat:
        """How rows are laid out."""
        return self._ordered.form

    def close(self) -> None:
        """Give memory and scratch back."""
        self._ordered.close()

    # -- the order of an epoch -------------------------------------------------------------------

    def _begin(self, epoch: int) -> None:
        """Shuffle the pages and cut them into windows."""
        self._epoch, self._window = epoch, -1
        pages = -(-self.rows // self._page_rows)
        self._pages = self._chance(0).permutation(pages)
        counts = [self._page_rows] * pages
        if pages:
            last = int(np.flatnonzero(self._pages == pages - 1)[0])
            counts[last] = self.rows - (pages - 1) * self._page_rows
        at = [0, *itertools.accumulate(counts)]
        self._starts = [*at[: pages : self._window_pages], self.rows]

    def _stored(self, first: int, end: int) -> list[NDArray[Any]]:
        """Rows of the shuffled epoch by their places in it, as arrays."""
        parts = []
        while first < end:
            window = bisect.bisect_right(self._starts, first) - 1
            begin, until = self._starts[window], min(end, self._starts[window + 1])
            parts.append([array[first - begin : until - begin] for array in self._shuffled(window)])
            first = until
        if len(parts) == 1:
            return parts[0]
        return [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]

    def _shuffled(self, window: int) -> list[NDArray[Any]]:
        """The rows of a window: read, shuffled, taken apart, and kept until the next one."""
        if window != self._window:
            first_page = window * self._window_pages
            pages = np.sort(self._pages[first_page : first_page + self._window_pages])
            firsts = (pages * self._page_rows).tolist()
            ranges = [(first, min(self.rows, first + self._page_rows)) for first in firsts]
            self._arrays = []  # free them before the next ones come
            records = self._ordered.read(ranges)
            records = records[self._chance(1 + window).permutation(len(records))]
            self._arrays, self._window = self._ordered.form.arrays(records), window
        return self._arrays

    def _chance(self, what: int) -> np.random.Generator:
        epoch = self._first_epoch + self._epoch
        return np.random.default_rng((self._seed, self._partition, epoch, what))
