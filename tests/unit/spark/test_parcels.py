"""Rows in a shuffle: whole, or an error that is Spark's to mend."""

from __future__ import annotations

import numpy as np
import pytest

from sparkstrom.spark import parcels
from sparkstrom.spark.parcels import Parcel, arrays_of_parcels, deal_rows, opened


def of_worker(worker: int, sources: int, rows: int) -> list[Parcel]:
    """What one of two workers gets from sources of so many rows each."""
    return [
        parcel
        for source in range(sources)
        for who, parcel in deal_rows(2, 0, source, [([source, i], i) for i in range(rows)])
        if who == worker
    ]


def test_all_parcels_make_the_partition_whatever_their_order() -> None:
    sent = of_worker(0, sources=3, rows=10)
    features, labels = arrays_of_parcels(3, sent)
    again, _ = arrays_of_parcels(3, sent[::-1])
    assert features.shape == (15, 2)
    assert len(labels) == 15
    np.testing.assert_array_equal(features, again)


def test_an_empty_source_sends_a_parcel_too() -> None:
    assert opened(2, of_worker(1, sources=2, rows=0)) == [[], []]


@pytest.mark.parametrize("lost", range(4))
def test_a_source_that_did_not_arrive_is_no_end_of_input(lost: int) -> None:
    sent = of_worker(0, sources=4, rows=5)
    del sent[lost]
    with pytest.raises(EOFError, match=f"source partition {lost}"):
        arrays_of_parcels(4, sent)


def test_a_source_in_many_parcels_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcels, "ROWS_PER_PARCEL", 3)
    sent = of_worker(0, sources=1, rows=20)
    assert [parcel[:3] for parcel in sent] == [(0, i, 4) for i in range(4)]
    assert len(arrays_of_parcels(1, sent)[0]) == 10
    with pytest.raises(EOFError, match="1 of 4 parcels"):
        arrays_of_parcels(1, sent[:-1])


def test_nothing_at_all_is_not_an_empty_partition() -> None:
    with pytest.raises(EOFError):
        opened(2, [])
