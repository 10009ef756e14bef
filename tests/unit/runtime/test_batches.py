"""Batches: each row once per epoch, and the same minibatches in any attempt of the task."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from sparkstrom.data.row_store import Batches

Rows = tuple[NDArray[np.float32], NDArray[Any]]


def make_rows(count: int, seed: int = 0, distinct: int = 10**9) -> Rows:
    """Return random rows: two features each, and a label; ``distinct`` limits the variety."""
    chance = np.random.default_rng(seed)
    numbers = chance.integers(0, distinct, count)
    features = np.stack([numbers, numbers % 7], axis=1).astype(np.float32)
    return features, (numbers % 3).astype(np.int64)


def make_batches(rows: Rows, **options: int) -> Batches:
    """Return batches of these rows."""
    given = {"batch_rows": 4, "seed": 1, "partition": 2} | options
    return Batches(*rows, **given)


def read_epoch(made: Batches, epoch: int) -> list[list[tuple[float, ...]]]:
    """Return an epoch's minibatches as lists of rows (features and label)."""
    out = []
    for index in range(made.batches_per_epoch):
        features, labels, _ = made.get(epoch, index)
        out.append([(*f.tolist(), float(y)) for f, y in zip(features, labels, strict=True)])
    return out


@given(count=st.integers(0, 30), seed=st.integers(0, 5), distinct=st.sampled_from([3, 10**6]))
def test_minibatches_and_checksum_do_not_depend_on_row_order(
    count: int, seed: int, distinct: int
) -> None:
    """Minibatches and checksum do not depend on the order in which rows arrive."""
    features, labels = make_rows(count, seed, distinct)
    order = np.random.default_rng(seed + 1).permutation(count)
    one, other = make_batches((features, labels)), make_batches((features[order], labels[order]))
    for epoch in (0, 1):
        assert read_epoch(one, epoch) == read_epoch(other, epoch)
    assert one.checksum == other.checksum


@given(count=st.integers(1, 30), batch_rows=st.integers(1, 9))
def test_each_row_occurs_once_per_epoch(count: int, batch_rows: int) -> None:
    rows = make_rows(count)
    made = make_batches(rows, batch_rows=batch_rows)
    came = [row for batch in read_epoch(made, 3) for row in batch]
    assert sorted(came) == sorted((*f.tolist(), float(y)) for f, y in zip(*rows, strict=True))
    assert made.rows == count


def test_partial_last_minibatch_is_kept() -> None:
    made = make_batches(make_rows(10))
    assert made.batches_per_epoch == 3
    assert [len(batch) for batch in read_epoch(made, 0)] == [4, 4, 2]


def test_empty_partition_has_no_minibatches() -> None:
    made = make_batches((np.zeros((0, 0), np.float32), np.zeros(0, np.int64)))
    assert (made.rows, made.batches_per_epoch, made.checksum) == (0, 0, 0)


def test_minibatch_order_differs_by_epoch_partition_and_seed() -> None:
    rows = make_rows(40)
    orders = [
        read_epoch(make_batches(rows), 0),
        read_epoch(make_batches(rows), 1),
        read_epoch(make_batches(rows, partition=3), 0),
        read_epoch(make_batches(rows, seed=2), 0),
    ]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])
    made = make_batches(rows)
    forward = read_epoch(made, 0)
    read_epoch(made, 1)
    assert read_epoch(made, 0) == forward  # also if another epoch was read in between


def test_first_epoch_offsets_minibatch_order() -> None:
    """With ``first_epoch`` 5, epoch 0 has the minibatches of epoch 5."""
    rows = make_rows(40)
    assert read_epoch(make_batches(rows, first_epoch=5), 0) == read_epoch(make_batches(rows), 5)


def make_changed_variants(rows: Rows) -> dict[str, Rows]:
    """Return variants of the rows, each with one change."""
    features, labels = rows
    other, relabelled = features.copy(), labels.copy()
    other[3, 1] += 1
    relabelled[3] += 1
    return {
        "a feature": (other, labels),
        "a label": (features, relabelled),
        "a row less": (features[1:], labels[1:]),
        "a row twice": (features[[0, *range(len(labels))]], labels[[0, *range(len(labels))]]),
        "a row for another": (features[[0, *range(len(labels) - 1)]], labels[[0, *range(9)]]),
    }


@pytest.mark.parametrize("what", list(make_changed_variants(make_rows(10))))
def test_checksum_changes_with_any_row_change(what: str) -> None:
    rows = make_rows(10)
    assert make_batches(make_changed_variants(rows)[what]).checksum != make_batches(rows).checksum


def test_checksum_changes_with_permuted_labels() -> None:
    """The checksum changes if labels are permuted among the rows."""
    features, labels = make_rows(10)
    order = np.argsort(labels)
    assert (labels != labels[order]).any()
    moved = make_batches((features, labels[order]))
    assert moved.checksum != make_batches((features, labels)).checksum


def test_checksum_fits_63_bits() -> None:
    """The checksum is an integer below 2^63, as messages require."""
    assert all(0 <= make_batches(make_rows(n)).checksum < 2**63 for n in range(50))


def test_array_labels_are_batched_with_their_rows() -> None:
    features, _ = make_rows(10)
    labels = np.arange(20, dtype=np.float32).reshape(10, 2)
    one, other = make_batches((features, labels)), make_batches((features[::-1], labels[::-1]))
    np.testing.assert_array_equal(one.get(0, 0)[1], other.get(0, 0)[1])
    assert one.get(0, 0)[1].shape == (4, 2)
