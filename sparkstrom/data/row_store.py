"""Sort a worker's rows in bounded memory, shuffle them into minibatches, and prefetch these.

Rows are sorted by a hash of their content (their key), because Spark may deliver them in another
order when it retries a task, and every attempt must produce the same minibatches. Rows that exceed
the memory limit are written to a scratch file, in buckets by the first bits of their keys, and then
sorted bucket by bucket into a second file. The files have no names, so they disappear with the
process even if it is killed.
"""

from __future__ import annotations

import bisect
import errno
import itertools
import os
import queue
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import SetupError
from sparkstrom.data.packed_rows import (
    Keys,
    Records,
    RowFormat,
    flatten_batch,
    format_from_batch,
    splitmix,
)
from sparkstrom.models.base import Batch, Columns

BUCKETS = 256  # buckets of training rows, and of held-out rows; each bucket must fit into memory
MEMORY_MIN_BYTES = 16 << 20  # with less memory, buckets would be written in very small pieces
DEFAULT_SCRATCH = Path(tempfile.gettempdir())
ROW_OVERHEAD_BYTES = 24  # a row's two hashes and its bucket
WRITE_BUFFERS_MAX = 512  # buffers per write call; Linux allows 1024


class RowChunk(NamedTuple):
    """Rows that one call of ``RowStore.add`` added, sorted by bucket."""

    form: RowFormat  # layout of the records
    records: Records  # u8[rows, row_bytes]
    keys: Keys  # two hashes of each row
    buckets: NDArray[np.int64]  # bucket of each row


class SpilledRun(NamedTuple):
    """Describes the rows that one spill wrote to the file, sorted by bucket."""

    form: RowFormat  # layout of the records
    offsets: NDArray[np.int64]  # each bucket's position in the file, in bytes
    counts: NDArray[np.int64]  # each bucket's number of rows


class OrderedRows:
    """Rows in memory or in a file: training rows, then held-out rows, both sorted by hashes."""

    def __init__(
        self, form: RowFormat, rows: int, held_out: int, checksum: int, source: Records | IO[bytes]
    ) -> None:
        # ``rows`` and ``held_out`` are the numbers of training rows and of held-out rows,
        # ``checksum`` is that of all rows, and ``source`` contains their records.
        self.form, self.rows, self.held_out, self.checksum = form, rows, held_out, checksum
        self._source = source

    @property
    def spilled_bytes(self) -> int:
        """Number of bytes of rows on the executor's scratch disk; 0 if they are in memory."""
        if isinstance(self._source, np.ndarray):
            return 0
        return (self.rows + self.held_out) * self.form.row_bytes

    def read(self, ranges: list[tuple[int, int]]) -> Records:
        """Return the records of several ranges (first, end) of rows, concatenated."""
        if isinstance(self._source, np.ndarray):
            return np.concatenate([self._source[first:end] for first, end in ranges])
        out = np.empty((sum(end - first for first, end in ranges), self.form.row_bytes), np.uint8)
        at = 0
        for first, end in ranges:
            _read_array(self._source, out[at : at + end - first], first * self.form.row_bytes)
            at += end - first
        return out

    def close(self) -> None:
        """Free memory and scratch space; no row can be read afterwards."""
        if not isinstance(self._source, np.ndarray):
            self._source.close()
        self._source = np.zeros((0, self.form.row_bytes), np.uint8)


class RowStore:
    """Accepts rows in any order, selects held-out rows, and sorts all by hashes of their content.

    Rows that exceed the memory limit are written to a scratch file.

    Args:
        memory_bytes: approximate memory limit, half of it for rows and half for sorting them.
        scratch: directory for rows that exceed the limit.
        seed: seed for selecting held-out rows.
        fraction: fraction of the rows to hold out, which ``seed`` and the rows' content select.
    """

    def __init__(
        self,
        memory_bytes: int = sys.maxsize,
        scratch: Path = DEFAULT_SCRATCH,
        *,
        seed: int = 0,
        fraction: float = 0.0,
    ) -> None:
        self._memory_bytes, self._scratch = memory_bytes, scratch
        self._salt = splitmix(np.array([seed + 1], np.uint64))
        self._held_out_below = np.uint64(int(fraction * 2.0**53)) << np.uint64(11)
        self._form: RowFormat | None = None
        self._chunks: list[RowChunk] = []
        self._rows, self._checksum = 0, 0  # rows in memory; checksum of all rows
        self._file: IO[bytes] | None = None
        self._runs: list[SpilledRun] = []

    def add(self, form: RowFormat, records: Records) -> None:
        """Add packed rows. Raise UsageError if their format does not match that of earlier ones."""
        joined = form if self._form is None else self._form.unify(form)
        if joined != self._form and self._exceeds_memory(joined):
            self._spill()  # one long sparse row must not widen all others in memory
        self._form = joined
        keys = form.keys(records)
        held = form.held_out(records) | (splitmix(keys[:, 0] ^ self._salt) < self._held_out_below)
        self._checksum += int(keys[:, 0].sum()) + int(keys[held, 1].sum())
        buckets = (keys[:, 0] >> np.uint64(56)).astype(np.int64) + BUCKETS * held
        order = np.argsort(buckets, kind="stable")
        self._chunks.append(RowChunk(form, records[order], keys[order], buckets[order]))
        self._rows += len(records)
        if self._exceeds_memory(joined):
            self._spill()

    def _exceeds_memory(self, form: RowFormat) -> bool:
        """Return whether the rows in memory, converted to ``form``, exceed their share of it."""
        return self._rows * (form.row_bytes + ROW_OVERHEAD_BYTES) > self._memory_bytes // 2

    def finish(self) -> OrderedRows:
        """Sort and return all rows, and empty the store."""
        form = self._form or RowFormat(())
        if self._file is None:
            records, held = self._sort_in_memory(form)
            return self._make_ordered_rows(form, len(records) - held, held, records)
        self._spill()
        with self._file as file:
            return self._sort_on_disk(form, file)

    def _make_ordered_rows(
        self, form: RowFormat, rows: int, held_out: int, source: Records | IO[bytes]
    ) -> OrderedRows:
        """Create an OrderedRows with the store's checksum."""
        return OrderedRows(form, rows, held_out, self._checksum & (2**63 - 1), source)

    def _sort_in_memory(self, form: RowFormat) -> tuple[Records, int]:
        """Sort all records in memory; return the records and the number of held-out ones."""
        chunks, self._chunks = self._chunks, []
        total = sum(len(chunk.records) for chunk in chunks)
        records = np.empty((total, form.row_bytes), np.uint8)
        if not chunks:
            return records, 0
        held = np.concatenate([chunk.buckets >= BUCKETS for chunk in chunks])
        keys = np.concatenate([chunk.keys for chunk in chunks])
        place = np.empty(total, np.int64)
        place[np.lexsort((keys[:, 1], keys[:, 0], held))] = np.arange(total)
        at = 0
        for chunk in chunks:
            to = place[at : at + len(chunk.records)]
            records[to] = chunk.form.repack(chunk.records, form)
            at += len(chunk.records)
        return records, int(held.sum())

    def _spill(self) -> None:
        """Move the rows in memory to the scratch file, bucket by bucket."""
        if self._file is None:
            self._file = open_unnamed_file(self._scratch)
        form = self._form
        chunks, self._chunks, self._rows = self._chunks, [], 0
        if form is None or not chunks:
            return
        wide = [chunk.form.repack(chunk.records, form) for chunk in chunks]
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
            _write_arrays(self._file, parts, begin, self._scratch)
        except BaseException:
            self._file.close()
            raise
        self._runs.append(SpilledRun(form, ends - counts * form.row_bytes, counts))

    def _sort_on_disk(self, form: RowFormat, spilled: IO[bytes]) -> OrderedRows:
        """Sort the spilled rows bucket by bucket into a second file."""
        out, at = open_unnamed_file(self._scratch), 0
        counts = np.sum([run.counts for run in self._runs], axis=0)
        try:
            for bucket in np.flatnonzero(counts):
                parts = []
                for run in self._runs:
                    part = np.empty((run.counts[bucket], run.form.row_bytes), np.uint8)
                    _read_array(spilled, part, int(run.offsets[bucket]))
                    parts.append(run.form.repack(part, form))
                records = np.concatenate(parts)
                keys = form.keys(records)
                records = records[np.lexsort((keys[:, 1], keys[:, 0]))]
                _write_arrays(out, [records], at, self._scratch)
                at += records.nbytes
        except BaseException:
            out.close()
            raise
        return self._make_ordered_rows(
            form, int(counts[:BUCKETS].sum()), int(counts[BUCKETS:].sum()), out
        )


def open_unnamed_file(directory: Path) -> IO[bytes]:
    """Create a file that disappears when it is closed or the process dies, even by SIGKILL.

    Raise SetupError if the directory is not writable.
    """
    try:
        return tempfile.TemporaryFile(dir=directory, buffering=0)
    except OSError as error:
        raise SetupError(
            f"cannot create a file in {directory}, the executor's scratch, for rows beyond "
            f"batch_memory_bytes ({error.strerror}): set spark.local.dir to a writable directory"
        ) from None


def _read_array(file: IO[bytes], into: Records, offset: int) -> None:
    """Fill an array from a file at ``offset``. Raise EOFError if the file is too short."""
    buffer = into.reshape(-1).data
    while buffer:
        count = os.preadv(file.fileno(), [buffer], offset)
        if not count:
            raise EOFError(f"a file of rows on the executor's scratch ends at byte {offset}")
        buffer, offset = buffer[count:], offset + count


def _write_arrays(file: IO[bytes], parts: list[Records], offset: int, where: Path) -> None:
    """Write arrays to a file, from byte ``offset`` on. Raise SetupError if the disk is full."""
    buffers = [np.ascontiguousarray(part).reshape(-1).data for part in parts if part.size]
    for first in range(0, len(buffers), WRITE_BUFFERS_MAX):
        some = buffers[first : first + WRITE_BUFFERS_MAX]
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


T = TypeVar("T")

POLL_S = 0.1  # interval at which each thread checks whether the other has ended
JOIN_TIMEOUT_S = 1.0  # a thread that blocks in ``items`` for longer ends on its own later


def prefetch(
    items: Iterable[T], count: int, check_cancelled: Callable[[], None] = lambda: None
) -> Generator[T]:
    """Yield ``items`` while a thread fetches up to ``count`` of them in advance.

    Args:
        items: the iterable. Its exceptions are raised here, after the items that precede them.
        count: number of items to fetch in advance; 0: none, and no thread is used.
        check_cancelled: called before each item and while waiting for one; may raise an exception.

    A caller that stops early ends the thread by closing the generator.
    """
    if count == 0:
        for item in items:
            check_cancelled()
            yield item
        return
    fetched: queue.Queue[tuple[str, Any]] = queue.Queue(count)
    cancelled = threading.Event()
    thread = threading.Thread(
        target=_fetch, args=(items, fetched, cancelled), name="sparkstrom-prefetching", daemon=True
    )
    thread.start()
    try:
        while (result := _next_fetched(fetched, check_cancelled))[0] == "item":
            yield result[1]
        if result[0] == "error":
            raise result[1]
    finally:
        cancelled.set()
        thread.join(JOIN_TIMEOUT_S)


def _next_fetched(
    fetched: queue.Queue[tuple[str, Any]], check_cancelled: Callable[[], None]
) -> tuple[str, Any]:
    """Wait for the next queued (kind, value) and return it; keep calling ``check_cancelled``."""
    while True:
        check_cancelled()
        try:
            return fetched.get(timeout=POLL_S)
        except queue.Empty:
            continue


def _fetch(
    items: Iterable[Any], fetched: queue.Queue[tuple[str, Any]], cancelled: threading.Event
) -> None:
    """Queue ("item", item) for all items, then ("end", None) or ("error", error), in a thread."""
    last: tuple[str, Any] = ("end", None)
    try:
        for item in items:
            if not _put_unless_cancelled(("item", item), fetched, cancelled):
                return
    except BaseException as error:  # raised again in the consumer's thread
        last = ("error", error)
    _put_unless_cancelled(last, fetched, cancelled)


def _put_unless_cancelled(
    result: tuple[str, Any], fetched: queue.Queue[tuple[str, Any]], cancelled: threading.Event
) -> bool:
    """Queue ``result``; return True, or False if ``cancelled`` is set before the queue has room."""
    while not cancelled.is_set():
        try:
            fetched.put(result, timeout=POLL_S)
            return True
        except queue.Full:
            continue
    return False


PAGE_BYTES = 64 << 10  # amount read at once; a disk takes longer to seek a page than to read it
WINDOW_BYTES = 4 << 20  # amount shuffled at once, in memory


class HeldOutBatches:
    """The held-out rows of a partition, iterable as minibatches in a fixed order."""

    def __init__(self, ordered: OrderedRows, batch_rows: int) -> None:
        self._ordered, self._batch_rows = ordered, batch_rows

    @property
    def rows(self) -> int:
        """Number of held-out rows."""
        return self._ordered.held_out

    def __iter__(self) -> Iterator[Batch]:
        yield from map(self._ordered.form.batch_from_arrays, self.stored_arrays())

    def stored_arrays(self) -> Iterator[list[NDArray[Any]]]:
        """Yield the arrays of each minibatch as records have them: sparse vectors stay sparse."""
        begin, end = self._ordered.rows, self._ordered.rows + self.rows
        for first in range(begin, end, self._batch_rows):
            part = (first, min(end, first + self._batch_rows))
            yield self._ordered.form.arrays(self._ordered.read([part]))


class Batches:
    """The minibatches of one partition, shuffled by (seed, partition, epoch).

    In each epoch, pages of neighbouring rows are read in random order, and the rows of several
    pages at a time (a window) are shuffled together. A partition of up to ``WINDOW_BYTES`` is thus
    shuffled as a whole. Neighbouring rows are unrelated, because they are sorted by hashes. The
    last minibatch of an epoch may be smaller. The constructor takes arrays [rows, ...];
    ``from_store`` takes rows that need not fit into memory.

    Args:
        features: arrays of the features.
        labels: arrays of the labels.
        weights: weights of the rows; None: all are 1.
        batch_rows: number of rows in a minibatch.
        seed: seed for shuffling and for selecting held-out rows.
        partition: index of the partition.
        first_epoch: number of epochs of earlier fits.
        fraction: fraction of the rows to hold out.
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
        form = format_from_batch(batch)
        records = form.pack(flatten_batch(batch))
        store = RowStore(seed=seed, fraction=fraction)
        store.add(form, records)
        self._initialize(store.finish(), batch_rows, seed, partition, first_epoch)

    @classmethod
    def from_store(
        cls,
        ordered: OrderedRows,
        *,
        batch_rows: int,
        seed: int,
        partition: int,
        first_epoch: int = 0,
    ) -> Self:
        """Create the minibatches of rows that a ``RowStore`` has sorted."""
        made = cls.__new__(cls)
        made._initialize(ordered, batch_rows, seed, partition, first_epoch)
        return made

    def _initialize(
        self, ordered: OrderedRows, batch_rows: int, seed: int, partition: int, first_epoch: int
    ) -> None:
        """Initialize this object from sorted rows."""
        self._ordered, self._batch_rows = ordered, batch_rows
        self._seed, self._partition = seed, partition
        self._first_epoch = first_epoch  # epochs of earlier fits, so that shuffling continues
        row_bytes = max(1, ordered.form.row_bytes)
        self._page_rows = max(1, PAGE_BYTES // row_bytes)
        self._window_pages = max(1, WINDOW_BYTES // (self._page_rows * row_bytes))
        self._epoch, self._pages, self._starts = -1, np.zeros(0, np.int64), [0]
        self._window = -1
        self._arrays: list[NDArray[Any]] = []  # leaves of that window's rows, in stored form
        self.held_out = HeldOutBatches(ordered, batch_rows)

    @property
    def rows(self) -> int:
        """Number of rows to train on."""
        return self._ordered.rows

    @property
    def partition(self) -> int:
        """Index of the partition."""
        return self._partition

    @property
    def checksum(self) -> int:
        """Checksum (0 to 2^63 - 1) of all rows and held-out flags, independent of their order."""
        return self._ordered.checksum

    @property
    def spilled_bytes(self) -> int:
        """Number of bytes of rows on the executor's scratch disk; 0 if they are in memory."""
        return self._ordered.spilled_bytes

    @property
    def batches_per_epoch(self) -> int:
        """Number of minibatches in an epoch."""
        return -(-self.rows // self._batch_rows)

    def place(self, epoch: int, index: int) -> tuple[int, int, int]:
        """Return (epoch counted over all fits, ``index``, minibatches per epoch) for the model.

        ``epoch`` counts the epochs of this fit, and ``index`` is that of a minibatch in the epoch.
        """
        return self._first_epoch + epoch, index, self.batches_per_epoch

    def get(self, epoch: int, index: int) -> Batch:
        """Return minibatch ``index`` of an epoch of this fit, with at most ``batch_rows`` rows."""
        return self.form.batch_from_arrays(self.stored_arrays(epoch, index))

    def stored_arrays(self, epoch: int, index: int) -> list[NDArray[Any]]:
        """Return the arrays of a minibatch as records have them: sparse vectors stay sparse."""
        if epoch != self._epoch:
            self._begin_epoch(epoch)
        first = index * self._batch_rows
        end = min(self.rows, first + self._batch_rows)
        return self._read_shuffled(first, end)

    @property
    def form(self) -> RowFormat:
        """The layout of the packed rows."""
        return self._ordered.form

    def close(self) -> None:
        """Free memory and scratch space."""
        self._ordered.close()

    def _begin_epoch(self, epoch: int) -> None:
        """Shuffle the pages for an epoch and divide them into windows."""
        self._epoch, self._window = epoch, -1
        pages = -(-self.rows // self._page_rows)
        self._pages = self._rng(0).permutation(pages)
        counts = [self._page_rows] * pages
        if pages:
            last = int(np.flatnonzero(self._pages == pages - 1)[0])
            counts[last] = self.rows - (pages - 1) * self._page_rows
        at = [0, *itertools.accumulate(counts)]
        self._starts = [*at[: pages : self._window_pages], self.rows]

    def _read_shuffled(self, first: int, end: int) -> list[NDArray[Any]]:
        """Return the arrays, as stored, of rows ``first`` to ``end`` - 1 of the shuffled epoch."""
        parts = []
        while first < end:
            window = bisect.bisect_right(self._starts, first) - 1
            begin, until = self._starts[window], min(end, self._starts[window + 1])
            parts.append(
                [array[first - begin : until - begin] for array in self._load_window(window)]
            )
            first = until
        if len(parts) == 1:
            return parts[0]
        return [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]

    def _load_window(self, window: int) -> list[NDArray[Any]]:
        """Return a window's shuffled rows as arrays; cache them until another window is needed."""
        if window != self._window:
            first_page = window * self._window_pages
            pages = np.sort(self._pages[first_page : first_page + self._window_pages])
            firsts = (pages * self._page_rows).tolist()
            ranges = [(first, min(self.rows, first + self._page_rows)) for first in firsts]
            self._arrays = []  # free memory before the next rows are read
            records = self._ordered.read(ranges)
            records = records[self._rng(1 + window).permutation(len(records))]
            self._arrays, self._window = self._ordered.form.arrays(records), window
        return self._arrays

    def _rng(self, purpose: int) -> np.random.Generator:
        """Return a new random generator for one purpose in the current epoch.

        ``purpose``: 0 to shuffle the pages, 1 + i to shuffle the rows of window i (see the class).
        """
        epoch = self._first_epoch + self._epoch
        return np.random.default_rng((self._seed, self._partition, epoch, purpose))
