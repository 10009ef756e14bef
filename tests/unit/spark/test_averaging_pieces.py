"""Pieces, shipments and groups: what is large travels cut, and arrives whole or not at all."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sparkstrom.runtime.averaging import averaged
from sparkstrom.spark.averaging.byte_shuffle import groups_of
from sparkstrom.spark.averaging.pieces import (
    ArrayPiece,
    CutArray,
    RowsMissing,
    SentAll,
    Told,
    added,
    bytes_by_target,
    means,
    packed_record,
    pieces_of,
    target_of,
    whole_records,
)
from sparkstrom.spark.averaging.round_job import RoundReport, RowPiece
from sparkstrom.spark.averaging.round_results import Results
from sparkstrom.spark.averaging.round_tasks import (
    addressed,
    group_of,
    members_of,
    turns_of,
)
from sparkstrom.spark.averaging.shipment import Broadcasts, shipped

WORKERS = 5
ARRAYS = [
    {"a": chance.normal(size=1000).astype(np.float32), "b": chance.normal(size=(3, 70))}
    for chance in map(np.random.default_rng, range(WORKERS))
]
WEIGHTS = [32.0, 32.0, 17.0, 1.0, 32.0]


def sent(worker: int, targets: int) -> list[tuple[int, bytes]]:
    pieces = pieces_of(worker, ARRAYS[worker].items(), WEIGHTS[worker], 512)
    return list(addressed([Told(worker, "hello"), *pieces], worker, 0, targets, 512))


def put_together(pieces: Any) -> dict[str, np.ndarray]:
    made = {name: np.zeros(array.size, array.dtype) for name, array in ARRAYS[0].items()}
    for piece in pieces:
        made[piece.name][piece.begin : piece.begin + piece.values.size] = piece.values
        assert piece.values.nbytes <= 512
    return made


@pytest.mark.parametrize("targets", [1, 3, 40])
def test_means_are_those_of_whole_arrays_whatever_the_order(targets: int) -> None:
    records = [record for worker in range(WORKERS) for record in sent(worker, targets)]
    order = np.random.default_rng(targets).permutation(len(records))
    found, told = [], []
    for target in range(targets + 1):
        here = [records[i][1] for i in order if records[i][0] == target]
        whole = whole_records(here, range(WORKERS))
        found += list(means(whole))
        told += [record.what for record in whole if isinstance(record, Told)]
    assert told == ["hello"] * WORKERS
    made = put_together(found)
    for name in ("a", "b"):
        wanted = averaged([arrays[name].ravel() for arrays in ARRAYS], WEIGHTS)
        assert (made[name] == wanted).all()
        assert made[name].dtype == ARRAYS[0][name].dtype


def test_sums_of_groups_come_to_the_same_means() -> None:
    groups = 2
    seconds: list[ArrayPiece] = []
    for group in range(groups):
        members = members_of(group, WORKERS, groups)
        assert [group_of(member, WORKERS, groups) for member in members] == [group] * len(members)
        pieces = [p for w in members for p in pieces_of(w, ARRAYS[w].items(), WEIGHTS[w], 512)]
        seconds += added(pieces, group)
    made = put_together(means(seconds))
    wanted = averaged([arrays["a"] for arrays in ARRAYS], WEIGHTS)
    assert np.allclose(made["a"], wanted, rtol=1e-6)


def test_a_result_that_breaks_off_is_not_taken_for_whole() -> None:
    records = [record for target, record in sent(0, 1) if target == 0]
    records.append(packed_record(SentAll(1, 0)))
    assert whole_records(records, [0, 1])
    for lost in (records[1:], records[:-1], records[:-2] + records[-1:]):
        with pytest.raises(EOFError, match=r"\d workers' results did not arrive whole"):
            whole_records(lost, [0, 1])


def test_an_array_without_values_arrives_as_well() -> None:
    """An optimizer's state has all its names again, or its model would refuse it."""
    empty = {"a": np.ones(3, np.float32), "none": np.zeros((0, 4), np.float32)}
    pieces = [p for worker in range(2) for p in pieces_of(worker, empty.items(), 1.0, 512)]
    report = RoundReport(0, "h", "h/1", 0)
    report.shapes = {name: (array.shape, array.dtype.str) for name, array in empty.items()}
    found = Results([report])
    found.fill(means(pieces))
    shapes = {name: array.shape for name, array in found.arrays.items()}
    assert shapes == {"a": (3,), "none": (0, 4)}


def test_all_send_the_same_values_to_the_same_target() -> None:
    for ours, others in zip(
        pieces_of(0, ARRAYS[0].items(), 1.0, 512),
        pieces_of(3, ARRAYS[3].items(), 1.0, 512),
        strict=True,
    ):
        assert target_of(ours, 7, 512) == target_of(others, 7, 512)


def test_a_round_s_rows_that_break_off_are_missed() -> None:
    pieces = [RowPiece(0), RowPiece(1), RowPiece(2, 2)]
    with pytest.raises(RowsMissing, match="0 minibatches of a round arrived"):
        list(turns_of(map(pickle.dumps, pieces[1:])))
    assert list(turns_of(map(pickle.dumps, [RowPiece(0, 0)]))) == []


class Handles:
    """Broadcasts that are in memory, pickled as Spark's are."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def sent(self, nbytes: int, parts: Iterator[bytes]) -> Broadcasts:
        assert nbytes > 0
        return Broadcasts(tuple(map(self.broadcast, parts)))

    def broadcast(self, part: bytes) -> Any:
        self.sizes.append(len(part))
        return SimpleNamespace(value=pickle.loads(pickle.dumps(part)), _value=part)


@pytest.mark.parametrize("part_bytes", [64, 1000, 1 << 20])
def test_a_shipment_is_cut_and_put_together(part_bytes: int) -> None:
    context = Handles()
    arrays = {**ARRAYS[0], "none": np.zeros(0, np.float32), "steps": np.array([3, 4])}
    made = shipped(context.sent, arrays, {"rate": 0.1}, part_bytes)
    assert max(context.sizes) <= part_bytes
    assert sum(context.sizes) == made.nbytes
    found = made.unpacked(iter(()))
    for name, array in arrays.items():
        assert (found[name] == array).all()
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].flags.writeable
    assert made.plain == {"rate": 0.1}


def test_groups_of_partitions() -> None:
    assert [list(group) for group in groups_of([1] * 5, 2)] == [[0, 1], [2, 3], [4]]
    assert [list(group) for group in groups_of([1, 1], 0)] == [[0], [1]]
    assert [list(group) for group in groups_of([3, 9, 0, 1, 5, 4], 6)] == [[0], [1], [2, 3, 4], [5]]
    assert list(groups_of([7], 6)) == [range(1)]


def test_what_comes_to_each_target_is_known_before_it_comes() -> None:
    arrays = [CutArray(name, array.size, array.itemsize) for name, array in ARRAYS[0].items()]
    wanted = [0] * 7
    for piece in pieces_of(0, ARRAYS[0].items(), 1.0, 512):
        wanted[target_of(piece, 7, 512)] += piece.values.nbytes
    assert bytes_by_target(arrays, 7, 512).tolist() == wanted
