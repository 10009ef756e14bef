"""Batches: one partition in memory, in an order that every attempt of its task repeats."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkstrom.models.base import Batch


class Batches:
    """Minibatches of one partition, shuffled by (seed, partition, epoch).

    Spark may hand the rows of a partition in another order when a task is tried again, so they
    are first put into an order of their own content. A partial last batch is trained, too.
    """

    def __init__(
        self,
        features: NDArray[Any],
        labels: NDArray[Any],
        *,
        batch_rows: int,
        seed: int,
        partition: int,
        first_epoch: int = 0,
    ) -> None:
        keys = row_keys(features, labels)
        order = np.lexsort((keys[:, 1], keys[:, 0])) if len(keys) else np.zeros(0, np.intp)
        self._features, self._labels = features[order], labels[order]
        self.checksum = int(keys[:, 0].sum() & (2**63 - 1)) if len(keys) else 0
        self._batch_rows, self._seed, self._partition = batch_rows, seed, partition
        self._first_epoch = first_epoch  # epochs trained before: shuffling goes on from there
        self._epoch, self._order = -1, order

    @property
    def rows(self) -> int:
        return len(self._features)

    @property
    def per_epoch(self) -> int:
        """Minibatches in an epoch."""
        return -(-self.rows // self._batch_rows)

    def get(self, epoch: int, index: int) -> Batch:
        """Minibatch ``index`` of an epoch: at most ``batch_rows`` rows."""
        if epoch != self._epoch:
            chance = np.random.default_rng((self._seed, self._partition, self._first_epoch + epoch))
            self._epoch, self._order = epoch, chance.permutation(self.rows)
        rows = self._order[index * self._batch_rows : (index + 1) * self._batch_rows]
        return Batch(self._features[rows], self._labels[rows])


def row_keys(features: NDArray[Any], labels: NDArray[Any]) -> NDArray[np.int64]:
    """Two numbers for each row, i64[rows, 2], from its content alone: same row, same key."""
    keys = np.empty((len(features), 2), np.int64)
    for i, (feature, label) in enumerate(zip(features, labels, strict=True)):
        content = feature.tobytes() + np.asarray(label).tobytes()
        first, second = zlib.crc32(content), zlib.adler32(content)
        keys[i] = (first << 31) ^ second, zlib.crc32(content, 0x5EED)
    return keys
