"""Sums of updates: sorted entries while they are few, else one array. The same integers either way.

A sum of a hundred updates of a large model holds a few percent of its parameters; an array for all
of them would cost more than the updates did.
"""

# Compiled code mixes NumPy's scalars with Python's, which are the same to Numba, not to mypy.
# mypy: disable-error-code="assignment"

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sparkstrom.encoding.backends import host
from sparkstrom.encoding.cpu.compiled import kernel

I32 = NDArray[np.int32]
Hits = tuple[I32, I32]  # ascending indices, no index twice; quanta to add

SPARSE_MAX = 8  # parameters per entry: with more entries an array is smaller and sooner added to


@kernel("UniTuple(i8, 2)(i4[::1], i4[::1], i4[::1], i4[::1], i4[::1], i4[::1])")
def merge(
    ones: I32, one: I32, others: I32, other: I32, indices: I32, quanta: I32
) -> tuple[int, int]:
    """Add two sorted lists; return how many entries came out, and how many wrapped around.

    What adds up to 0 is left out.

    ones, others     i32[any]  in   ascending indices, no index twice in either
    one, other       i32[any]  in   their quanta; sums wrap around, as in ``sum_hits``
    indices, quanta  i32[sum]  out  room for all of both
    """
    i, j, made, overflows = 0, 0, 0, 0
    while i < ones.shape[0] or j < others.shape[0]:
        if j == others.shape[0] or (i < ones.shape[0] and ones[i] < others[j]):
            indices[made], quanta[made], i = ones[i], one[i], i + 1
        elif i == ones.shape[0] or others[j] < ones[i]:
            indices[made], quanta[made], j = others[j], other[j], j + 1
        else:
            exact = np.int64(one[i]) + np.int64(other[j])
            indices[made], quanta[made] = ones[i], np.int32(exact)
            overflows += int(quanta[made] != exact)
            i, j = i + 1, j + 1
        made += int(quanta[made] != 0)
    return made, overflows


class Total:
    """A sum of updates over ``n_params`` parameters, to which more can be added.

    ``overflows``: entries whose sum left int32, so that it is wrong by 2 ** 32 quanta.
    """

    def __init__(self, n_params: int) -> None:
        self.n_params, self.overflows = n_params, 0
        self._hits: Hits = (np.empty(0, np.int32), np.empty(0, np.int32))
        self._array: I32 | None = None  # i32[n_params], once it is not sparse

    @classmethod
    def of_array(cls, array: I32) -> Total:
        """The sum that is all of i32[n_params]; the array becomes its own."""
        total = cls(array.size)
        total._array = array
        return total

    @property
    def array(self) -> I32 | None:
        """i32[n_params] where it is kept so; None where it is sparse."""
        return self._array

    @property
    def hits(self) -> Hits:
        """Its entries; none of them is 0."""
        if self._array is None:
            return self._hits
        where = np.flatnonzero(self._array).astype(np.int32)
        return where, self._array[where]

    def dense(self) -> I32:
        """A copy as i32[n_params]."""
        if self._array is not None:
            return self._array.copy()
        array = np.zeros(self.n_params, np.int32)
        array[self._hits[0]] = self._hits[1]
        return array

    def add(self, hits: Hits) -> None:
        """Add an update's entries; sums wrap around, as in ``sum_hits``."""
        if self._array is None and (self._hits[0].size + hits[0].size) * SPARSE_MAX > self.n_params:
            self._array = self.dense()
        if self._array is not None:
            self.overflows += host().kernels.sum_hits(self._array, *hits)[0]
            return
        room = self._hits[0].size + hits[0].size
        indices, quanta = np.empty(room, np.int32), np.empty(room, np.int32)
        made, overflows = merge(*self._hits, *hits, indices, quanta)
        self.overflows += int(overflows)
        self._hits = (indices[:made], quanta[:made])

    def add_total(self, other: Total) -> None:
        """Add another sum over the same parameters."""
        self.overflows += other.overflows
        if other._array is None:
            self.add(other._hits)
        elif self._array is None:
            mine, self._array = self._hits, other._array.copy()
            self.overflows += host().kernels.sum_hits(self._array, *mine)[0]
        else:
            before = self._array.copy()
            self._array += other._array
            wrapped = (before ^ self._array) & (other._array ^ self._array)  # both had its sign not
            self.overflows += int(np.count_nonzero(wrapped < 0))
