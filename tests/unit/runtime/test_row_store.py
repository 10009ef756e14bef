"""Row store: the same rows in the same order, however they arrive, in memory or on disk."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sparkstrom.base.errors import SetupError, UsageError
from sparkstrom.data import row_store as storing
from sparkstrom.data.packed_rows import (
    Leaf,
    RowFormat,
    entries_to_dense,
    format_from_batch,
    pack_sparse_entries,
)
from sparkstrom.data.row_store import PAGE_BYTES, WINDOW_BYTES, Batches, OrderedRows, RowStore
from sparkstrom.models.base import Batch

TINY_BYTES = 4_000


def make_rows(count: int, width: int = 3) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return this many random rows: features and labels."""
    chance = np.random.default_rng(count)
    return chance.normal(size=(count, width)).astype(np.float32), chance.integers(0, 5, count)


def store_rows(parts: list[Any], tmp_path: Path, memory_bytes: int, **options: Any) -> OrderedRows:
    """Return the rows of these parts, stored with ``memory_bytes`` of memory."""
    store = RowStore(memory_bytes, tmp_path, **options)
    for features, labels in parts:
        form = format_from_batch(Batch(features, labels))
        store.add(form, form.pack([features, labels]))
    return store.finish()


def read_all_bytes(rows: OrderedRows) -> bytes:
    """Return the bytes of all rows, including held-out ones."""
    return rows.read([(0, rows.rows + rows.held_out)]).tobytes()


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch")


@settings(max_examples=25)
@given(
    cuts=st.lists(st.integers(0, 400), max_size=6),
    seed=st.integers(0, 3),
    fraction=st.sampled_from([0.0, 0.3]),
)
def test_spilled_rows_in_any_order_equal_rows_in_memory(
    cuts: list[int], seed: int, fraction: float, scratch: Path
) -> None:
    """Rows in any order and in any parts, spilled to disk, are stored as in memory."""
    features, labels = make_rows(400)
    order = np.random.default_rng(seed).permutation(400)
    edges = sorted({0, *cuts, 400})
    parts = [(features[order[a:b]], labels[order[a:b]]) for a, b in itertools.pairwise(edges)]
    options = {"seed": 7, "fraction": fraction}
    plain = store_rows([(features, labels)], scratch, 1 << 30, **options)
    spilled = store_rows(parts, scratch, TINY_BYTES, **options)
    assert plain.spilled_bytes == 0 < spilled.spilled_bytes
    assert (plain.rows, plain.held_out, plain.checksum) == (
        spilled.rows,
        spilled.held_out,
        spilled.checksum,
    )
    assert read_all_bytes(plain) == read_all_bytes(spilled)
    assert plain.rows + plain.held_out == 400
    assert (plain.held_out > 0) is (fraction > 0)
    spilled.close()


def test_minibatches_from_disk_and_memory_are_equal(tmp_path: Path) -> None:
    """Rows on disk, over several windows, give the same minibatches as rows in memory."""
    features, labels = make_rows(3_000, width=1000)
    assert features.nbytes > 2 * WINDOW_BYTES
    on_disk = store_rows([(features, labels)], tmp_path, 1 << 20)
    options: dict[str, int] = {"batch_rows": 64, "seed": 1, "partition": 2}
    memory = Batches(features, labels, **options)
    disk = Batches.from_store(on_disk, **options)
    assert disk.spilled_bytes == on_disk.spilled_bytes > 0
    for epoch in (0, 1):
        seen = []
        for index in range(memory.batches_per_epoch):
            one, other = memory.get(epoch, index), disk.get(epoch, index)
            assert isinstance(one.features, np.ndarray)
            np.testing.assert_array_equal(one.features, other.features)
            np.testing.assert_array_equal(one.labels, other.labels)
            seen += one.features[:, 0].tolist()
        assert sorted(seen) == sorted(features[:, 0].tolist())
    later = disk.get(1, 20).features
    disk.get(0, 0)
    np.testing.assert_array_equal(disk.get(1, 20).features, later)  # as a new worker would
    disk.close()


def test_epoch_reads_each_spilled_byte_once_in_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An epoch reads each spilled byte once, in reads of about a page."""
    features, labels = make_rows(3_000, width=1000)
    rows = store_rows([(features, labels)], tmp_path, 1 << 20)
    batches = Batches.from_store(rows, batch_rows=64, seed=1, partition=2)
    reads: list[int] = []
    real = storing.os.preadv
    monkeypatch.setattr(storing.os, "preadv", lambda *a: reads.append(len(a[1][0])) or real(*a))
    for index in range(batches.batches_per_epoch):
        batches.get(0, index)
    assert sum(reads) == rows.spilled_bytes  # each byte once
    assert np.median(reads) > PAGE_BYTES / 2
    batches.close()


def test_held_out_rows_keep_order_and_stay_untrained(tmp_path: Path) -> None:
    """Held-out rows are not trained on, and are read in the same order each time."""
    features, labels = make_rows(500)
    batches = Batches(features, labels, batch_rows=32, seed=1, partition=0, fraction=0.2)
    held = [tuple(row) for batch in batches.held_out for row in batch.features.tolist()]
    trained = [
        tuple(row)
        for i in range(batches.batches_per_epoch)
        for row in batches.get(0, i).features.tolist()
    ]
    assert len(held) == batches.held_out.rows
    assert 60 < len(held) < 140
    assert sorted(held + trained) == sorted(map(tuple, features.tolist()))
    assert held == [tuple(row) for batch in batches.held_out for row in batch.features.tolist()]
    another = Batches(features, labels, batch_rows=32, seed=2, partition=0, fraction=0.2)
    assert another.checksum != batches.checksum  # other rows are held out


def test_spill_file_has_no_directory_entry(tmp_path: Path) -> None:
    """A spilled file has no directory entry."""
    rows = store_rows([make_rows(400)], tmp_path, TINY_BYTES)
    assert rows.spilled_bytes > 0
    assert list(tmp_path.iterdir()) == []
    rows.close()


def test_equal_rows_are_stored_separately(tmp_path: Path) -> None:
    """Equal rows are stored separately."""
    part = (np.ones((100, 3), np.float32), np.zeros(100, np.int64))
    rows = store_rows([part] * 5, tmp_path, TINY_BYTES)
    assert rows.rows == 500
    rows.close()


def test_empty_store_has_no_rows_and_zero_checksum(tmp_path: Path) -> None:
    rows = store_rows([], tmp_path, TINY_BYTES)
    assert (rows.rows, rows.held_out, rows.checksum, rows.spilled_bytes) == (0, 0, 0, 0)


def test_rows_of_different_width_raise_usage_error(tmp_path: Path) -> None:
    """Rows of another width in a later part are a UsageError that names both types."""
    features, labels = make_rows(10)
    with pytest.raises(UsageError, match=r"array 0 is float32\[2\] in one part .* float32\[3\]"):
        store_rows([(features, labels), (features[:, :2], labels)], tmp_path, 1 << 30)


def test_unusable_scratch_directory_is_named_in_error(tmp_path: Path) -> None:
    """The error names the scratch directory if no file can be created there."""
    with pytest.raises(SetupError, match=r"nowhere.*spark\.local\.dir"):
        store_rows([make_rows(400)], tmp_path / "nowhere", TINY_BYTES)


def test_full_disk_error_advises_on_spark_local_dir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is reported with advice about ``spark.local.dir``."""

    def full(*_: Any) -> int:
        raise OSError(storing.errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storing.os, "pwritev", full)
    with pytest.raises(SetupError, match=r"is full after .* give spark\.local\.dir more room"):
        store_rows([make_rows(400)], tmp_path, TINY_BYTES)


def test_partial_reads_and_writes_are_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes and reads that return early, as the kernel may do, are continued."""
    real_write, real_read = storing.os.pwritev, storing.os.preadv
    part = make_rows(400)
    plain = store_rows([part], tmp_path, 1 << 30)
    monkeypatch.setattr(storing.os, "pwritev", lambda fd, b, at: real_write(fd, [b[0][:100]], at))
    monkeypatch.setattr(storing.os, "preadv", lambda fd, b, at: real_read(fd, [b[0][:77]], at))
    rows = store_rows([part], tmp_path, TINY_BYTES)
    assert read_all_bytes(rows) == read_all_bytes(plain)
    rows.close()


# -- records ---------------------------------------------------------------------------------------


def make_sparse_format(room: int) -> RowFormat:
    """Return the format of a sparse feature column, with ``room`` for entries, and a label."""
    return RowFormat((Leaf("x", (1000,), "<f4", "<f4", room), Leaf("y", (), "<i8", "<i8")))


def test_sparse_row_key_does_not_depend_on_entry_capacity(tmp_path: Path) -> None:
    """Sparse rows with different room for entries fit one store; room does not change keys."""
    few = pack_sparse_entries(np.array([0, 1]), np.array([5, 999]), np.array([1.0, 2.0]), 3)
    assert few.shape == (3, 1)
    assert entries_to_dense(few, 1000).sum(1).tolist() == [1.0, 2.0, 0.0]
    labels = np.arange(3)
    narrow, wide = make_sparse_format(1), make_sparse_format(40)
    records = narrow.pack([few, labels])
    assert narrow.repack(records, wide).shape == (3, 40 * 8 + 8)
    np.testing.assert_array_equal(narrow.keys(records), wide.keys(narrow.repack(records, wide)))
    many = pack_sparse_entries(np.zeros(40, np.int64), np.arange(40), np.ones(40), 1)
    for memory_bytes in (1 << 30, 100):
        store = RowStore(memory_bytes, tmp_path)
        store.add(narrow, records)
        store.add(wide, wide.pack([many, np.array([7])]))
        rows = store.finish()
        batch = rows.form.batch(rows.read([(0, 4)]))
        assert isinstance(batch.features, np.ndarray)
        sums = dict(zip(np.asarray(batch.labels).tolist(), batch.features.sum(1), strict=True))
        assert sums == {0: 1.0, 1: 2.0, 2: 0.0, 7: 40.0}
        rows.close()


def test_long_sparse_row_spills_records_before_widening(tmp_path: Path) -> None:
    """Records of sparse rows are as long as the longest one: they are spilled before that."""
    narrow, wide, memory_bytes = make_sparse_format(1), make_sparse_format(1000), 1 << 20
    store, widths = RowStore(memory_bytes, tmp_path), []
    few = pack_sparse_entries(np.arange(5_000), np.arange(5_000) % 1000, np.ones(5_000), 5_000)
    many = pack_sparse_entries(np.zeros(1000, np.int64), np.arange(1000), np.ones(1000), 1)
    for form, entries in ((narrow, few), (wide, many), (narrow, few)):
        store.add(form, form.pack([entries, np.arange(len(entries))]))
        in_memory = sum(len(chunk.records) for chunk in store._chunks)
        assert store._form is not None
        widths.append(in_memory * store._form.row_bytes)
    assert max(widths) <= memory_bytes // 2
    rows = store.finish()
    assert rows.rows == 10_001
    assert rows.spilled_bytes == 10_001 * wide.row_bytes
    rows.close()


def test_row_key_depends_only_on_content() -> None:
    """A row's key does not depend on its place; different rows have different keys."""
    features, labels = make_rows(50)
    form = format_from_batch(Batch(features, labels))
    records = form.pack([features, labels])
    keys = form.keys(records)
    assert keys.shape == (50, 2)
    np.testing.assert_array_equal(form.keys(records[::-1].copy()), keys[::-1])
    assert len({key for pair in keys.tolist() for key in pair}) == 100


def test_every_bit_of_row_changes_both_keys() -> None:
    features, labels = make_rows(1, width=5)
    form = format_from_batch(Batch(features, labels))
    record = form.pack([features, labels])
    changed = np.repeat(record, 8 * form.row_bytes, axis=0)
    for bit in range(8 * form.row_bytes):
        changed[bit, bit // 8] ^= np.uint8(1 << bit % 8)
    keys = form.keys(np.concatenate([record, changed]))
    assert len(set(keys[:, 0].tolist())) == len(set(keys[:, 1].tolist())) == len(keys)


def test_zero_width_arrays_are_kept() -> None:
    empty, labels = np.zeros((4, 0), np.float32), np.arange(4)
    form = format_from_batch(Batch((empty, labels), labels, np.ones(4, np.float32)))
    batch = form.batch(form.pack([empty, labels, labels, np.ones(4)]))
    assert batch.features[0].shape == (4, 0)
    assert (batch.labels.tolist(), batch.weights.tolist()) == ([0, 1, 2, 3], [1.0] * 4)
