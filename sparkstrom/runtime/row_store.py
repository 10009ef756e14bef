"""Row store: a worker's rows in an order of their own content, in bounded memory.

Rows come in any order. While they are few they stay in memory; beyond that they go to a file on
the executor's scratch, in buckets by the first bits of their keys, and from there bucket by bucket
into a second file, in order. The files have no name: what happens to the process, nothing is left.
"""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from pathlib import Path
from typing import IO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import SetupError
from sparkstrom.runtime.records import Keys, Records, RowFormat, splitmix

BUCKETS = 256  # of training rows, and as many of held-out ones; one must fit into memory
MEMORY_MIN_BYTES = 16 << 20  # below this, buckets are written in crumbs
SCRATCH = Path(tempfile.gettempdir())
VECTORS_MAX = 512  # buffers of one write call; Linux takes 1024


class RowChunk(NamedTuple):
    """Rows that came together."""

    form: RowFormat
    records: Records
    keys: Keys
    buckets: NDArray[np.int64]


class Run(NamedTuple):
    """What one spill wrote: rows by bucket, one bucket after the other."""

    form: RowFormat
    offsets: NDArray[np.int64]  # in the file, by bucket
    counts: NDArray[np.int64]  # rows, by bucket


class Ordered:
    """Training rows, then held-out ones, each in the order of their keys."""

    def __init__(
        self, form: RowFormat, rows: int, held_out: int, checksum: int, source: Records | IO[bytes]
    ) -> None:
        self.form, self.rows, self.held_out, self.checksum = form, rows, held_out, checksum
        self._source = source

    @property
    def spilled_bytes(self) -> int:
        """What lies on the executor's scratch."""
        if isinstance(self._source, np.ndarray):
            return 0
        return (self.rows + self.held_out) * self.form.row_bytes

    def read(self, ranges: list[tuple[int, int]]) -> Records:
        """The rows of some ranges (first, end), one after the other."""
        if isinstance(self._source, np.ndarray):
            return np.concatenate([self._source[first:end] for first, end in ranges])
        out = np.empty((sum(end - first for first, end in ranges), self.form.row_bytes), np.uint8)
        at = 0
        for first, end in ranges:
            _read(self._source, out[at : at + end - first], first * self.form.row_bytes)
            at += end - first
        return out

    def close(self) -> None:
        """Give memory and scratch back."""
        if not isinstance(self._source, np.ndarray):
            self._source.close()
        self._source = np.zeros((0, self.form.row_bytes), np.uint8)


class Store:
    """Takes rows in any order and puts them in order.

    memory_bytes  what it takes at most, about: one half for rows, the other for sorting them
    scratch       directory for the rows beyond
    fraction      of the rows is held out, chosen by ``seed`` and the row's content
    """

    def __init__(
        self,
        memory_bytes: int = sys.maxsize,
        scratch: Path = SCRATCH,
        *,
        seed: int = 0,
        fraction: float = 0.0,
    ) -> None:
        self._memory_bytes, self._scratch = memory_bytes, scratch
        self._salt = splitmix(np.array([seed + 1], np.uint64))
        self._held_below = np.uint64(int(fraction * 2.0**53)) << np.uint64(11)
        self._form: RowFormat | None = None
        self._chunks: list[RowChunk] = []
        self._bytes, self._checksum = 0, 0
        self._file: IO[bytes] | None = None
        self._runs: list[Run] = []

    def add(self, form: RowFormat, records: Records) -> None:
        """Take rows. Raise UsageError where they are of another kind than those before."""
        self._form = form if self._form is None else self._form.joined(form)
        keys = form.keys(records)
        held = form.held_out(records) | (splitmix(keys[:, 0] ^ self._salt) < self._held_below)
        self._checksum += int(keys[:, 0].sum()) + int(keys[held, 1].sum())
        buckets = (keys[:, 0] >> np.uint64(56)).astype(np.int64) + BUCKETS * held
        order = np.argsort(buckets, kind="stable")
        self._chunks.append(RowChunk(form, records[order], keys[order], buckets[order]))
        self._bytes += records.nbytes + keys.nbytes + buckets.nbytes
        if self._bytes > self._memory_bytes // 2:
            self._spill()

    def finish(self) -> Ordered:
        """All rows, in order; the store is empty then."""
        form = self._form or RowFormat(())
        if self._file is None:
            records, held = self._in_memory(form)
            return self._ordered(form, len(records) - held, held, records)
        self._spill()
        with self._file as file:
            return self._on_disk(form, file)

    def _ordered(
        self, form: RowFormat, rows: int, held_out: int, source: Records | IO[bytes]
    ) -> Ordered:
        return Ordered(form, rows, held_out, self._checksum & (2**63 - 1), source)

    def _in_memory(self, form: RowFormat) -> tuple[Records, int]:
        chunks, self._chunks = self._chunks, []
        total = sum(len(chunk.records) for chunk in chunks)
        records = np.empty((total, form.row_bytes), np.uint8)
        if not chunks:
            return records, 0
        held = np.concatenate([chunk.buckets >= BUCKETS for chunk in chunks])
        place = np.empty(total, np.int64)
        place[_in_order(np.concatenate([chunk.keys for chunk in chunks]), held)] = np.arange(total)
        at = 0
        for chunk in chunks:
            to = place[at : at + len(chunk.records)]
            records[to] = chunk.form.widened(chunk.records, form)
            at += len(chunk.records)
        return records, int(held.sum())

    def _spill(self) -> None:
        """Write what is in memory, bucket by bucket, from where it lies."""
        if self._file is None:
            self._file = nameless(self._scratch)
        form = self._form
        chunks, self._chunks, self._bytes = self._chunks, [], 0
        if form is None or not chunks:
            return
        wide = [chunk.form.widened(chunk.records, form) for chunk in chunks]
        edges = [np.searchsorted(chunk.buckets, np.arange(2 * BUCKETS + 1)) for chunk in chunks]
        counts = np.sum([np.diff(edge) for edge in edges], axis=0)
        begin = self._file.seek(0, os.SEEK_END)
        ends = begin + np.cumsum(counts) * form.row_bytes
        parts = [
            records[edge[bucket] : edge[bucket + 1]]
            for bucket in range(2 * BUCKETS)
            for records, edge in zip(wide, edges, strict=True)
            if edge[bucket + 1] > edge[bucket]
        ]
        try:
            _write(self._file, parts, begin, self._scratch)
        except BaseException:
            self._file.close()
            raise
        self._runs.append(Run(form, ends - counts * form.row_bytes, counts))

    def _on_disk(self, form: RowFormat, spilled: IO[bytes]) -> Ordered:
        out, at = nameless(self._scratch), 0
        counts = np.sum([run.counts for run in self._runs], axis=0)
        try:
            for bucket in np.flatnonzero(counts):
                parts = []
                for run in self._runs:
                    part = np.empty((run.counts[bucket], run.form.row_bytes), np.uint8)
                    _read(spilled, part, int(run.offsets[bucket]))
                    parts.append(run.form.widened(part, form))
                records = np.concatenate(parts)
                keys = form.keys(records)
                records = records[np.lexsort((keys[:, 1], keys[:, 0]))]
                _write(out, [records], at, self._scratch)
                at += records.nbytes
        except BaseException:
            out.close()
            raise
        return self._ordered(form, int(counts[:BUCKETS].sum()), int(counts[BUCKETS:].sum()), out)


def nameless(directory: Path) -> IO[bytes]:
    """A file that is gone when nobody has it open any more, also after SIGKILL.

    Raise SetupError where the directory takes none.
    """
    try:
        return tempfile.TemporaryFile(dir=directory, buffering=0)
    except OSError as error:
        raise SetupError(
            f"cannot make a file in {directory}, the executor's scratch, for rows beyond "
            f"batch_memory_bytes ({error.strerror}): give spark.local.dir a writable directory"
        ) from None


def _in_order(keys: Keys, held: NDArray[np.bool_]) -> NDArray[np.intp]:
    return np.lexsort((keys[:, 1], keys[:, 0], held))


def _read(file: IO[bytes], into: Records, offset: int) -> None:
    buffer = into.reshape(-1).data
    while buffer:
        count = os.preadv(file.fileno(), [buffer], offset)
        if not count:
            raise EOFError(f"a file of rows on the executor's scratch ends at byte {offset}")
        buffer, offset = buffer[count:], offset + count


def _write(file: IO[bytes], parts: list[Records], offset: int, where: Path) -> None:
    buffers = [np.ascontiguousarray(part).reshape(-1).data for part in parts if part.size]
    for first in range(0, len(buffers), VECTORS_MAX):
        some = buffers[first : first + VECTORS_MAX]
        while some:
            try:
                count = os.pwritev(file.fileno(), some, offset)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                raise SetupError(
                    f"{where}, the executor's scratch, is full after {offset:,} bytes of rows: "
                    "give spark.local.dir more room, use more executors, or raise "
                    "batch_memory_bytes"
                ) from None
            offset += count
            while some and count >= len(some[0]):
                count -= len(some.pop(0))
            if count:
                some[0] = some[0][count:]
