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


def some_rows(count: int, seed: int = 0, distinct: int = 10**9) -> Rows:
    """Return random rows: two features each, and a label; ``distinct`` limits the variety."""
    chance = np.random.default_rng(seed)
    numbers = chance.integers(0, distinct, count)
    features = np.stack([numbers, numbers % 7], axis=1).astype(np.float32)
    return features, (numbers % 3).astype(np.int64)


def batches(rows: Rows, **options: int) -> Batches:
    """Return batches of these rows."""
    given = {"batch_rows": 4, "seed": 1, "partition": 2} | options
    return Batches(*rows, **given)


def epoch_of(made: Batches, epoch: int) -> list[list[tuple[float, ...]]]:
    """Return an epoch's minibatches as lists of rows (features and label)."""
    out = []
    for index in range(made.batches_per_epoch):
        features, labels, _ = made.get(epoch, index)
        out.append([(*f.tolist(), float(y)) for f, y in zip(features, labels, strict=True)])
    return out


@given(count=st.integers(0, 30), seed=st.integers(0, 5), distinct=st.sampled_from([3, 10**6]))
def test_any_order_of_the_rows_gives_the_same_minibatches(
    count: int, seed: int, distinct: int
) -> None:
    """Minibatches and checksum do not depend on the order in which rows arrive."""
    features, labels = some_rows(count, seed, distinct)
    order = np.random.default_rng(seed + 1).permutation(count)
    one, other = batches((features, labels)), batches((features[order], labels[order]))
    for epoch in (0, 1):
        assert epoch_of(one, epoch) == epoch_of(other, epoch)
    assert one.checksum == other.checksum


@given(count=st.integers(1, 30), batch_rows=st.integers(1, 9))
def test_every_row_comes_once_an_epoch(count: int, batch_rows: int) -> None:
    rows = some_rows(count)
    made = batches(rows, batch_rows=batch_rows)
    came = [row for batch in epoch_of(made, 3) for row in batch]
    assert sorted(came) == sorted((*f.tolist(), float(y)) for f, y in zip(*rows, strict=True))
    assert made.rows == count


def test_a_partial_last_batch_is_kept() -> None:
    made = batches(some_rows(10))
    assert made.batches_per_epoch == 3
    assert [len(batch) for batch in epoch_of(made, 0)] == [4, 4, 2]


def test_no_rows_are_no_batches() -> None:
    made = batches((np.zeros((0, 0), np.float32), np.zeros(0, np.int64)))
    assert (made.rows, made.batches_per_epoch, made.checksum) == (0, 0, 0)


def test_epochs_partitions_and_seeds_differ() -> None:
    rows = some_rows(40)
    orders = [
        epoch_of(batches(rows), 0),
        epoch_of(batches(rows), 1),
        epoch_of(batches(rows, partition=3), 0),
        epoch_of(batches(rows, seed=2), 0),
    ]
    assert all(a != b for i, a in enumerate(orders) for b in orders[:i])
    made = batches(rows)
    forward = epoch_of(made, 0)
    epoch_of(made, 1)
    assert epoch_of(made, 0) == forward  # also if another epoch was read in between


def test_a_later_fit_goes_on_with_the_next_epochs() -> None:
    """With ``first_epoch`` 5, epoch 0 has the minibatches of epoch 5."""
    rows = some_rows(40)
    assert epoch_of(batches(rows, first_epoch=5), 0) == epoch_of(batches(rows), 5)


def changed(rows: Rows) -> dict[str, Rows]:
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


@pytest.mark.parametrize("what", list(changed(some_rows(10))))
def test_the_checksum_sees_a_change(what: str) -> None:
    rows = some_rows(10)
    assert batches(changed(rows)[what]).checksum != batches(rows).checksum


def test_the_checksum_sees_labels_that_changed_places() -> None:
    """The checksum changes if labels are permuted among the rows."""
    features, labels = some_rows(10)
    order = np.argsort(labels)
    assert (labels != labels[order]).any()
    moved = batches((features, labels[order]))
    assert moved.checksum != batches((features, labels)).checksum


def test_the_checksum_fits_the_wire() -> None:
    """The checksum is an integer below 2^63, as messages require."""
    assert all(0 <= batches(some_rows(n)).checksum < 2**63 for n in range(50))


def test_labels_may_be_arrays() -> None:
    features, _ = some_rows(10)
    labels = np.arange(20, dtype=np.float32).reshape(10, 2)
    one, other = batches((features, labels)), batches((features[::-1], labels[::-1]))
    np.testing.assert_array_equal(one.get(0, 0)[1], other.get(0, 0)[1])
    assert one.get(0, 0)[1].shape == (4, 2)
