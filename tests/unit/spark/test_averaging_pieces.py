"""Tests of arrays sent in pieces: they arrive whole or not at all, and sums by target are right."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sparkstrom.rounds.averaging import weighted_mean
from sparkstrom.rounds.worker_round import IncompleteInput
from sparkstrom.spark.rounds.array_exchange import (
    ArrayPiece,
    BroadcastParts,
    EndOfStream,
    ReportRecord,
    SplitArray,
    choose_target,
    count_target_bytes,
    group_by_load,
    group_of_source,
    mean_pieces,
    pack_record,
    read_complete,
    route_records,
    send_payload,
    sources_of_group,
    split_arrays,
    sum_pieces,
)
from sparkstrom.spark.rounds.backend import collect_arrays
from sparkstrom.spark.rounds.tasks import MinibatchRecord, SparkRoundReport, read_minibatches

WORKERS = 5
ARRAYS = [
    {"a": chance.normal(size=1000).astype(np.float32), "b": chance.normal(size=(3, 70))}
    for chance in map(np.random.default_rng, range(WORKERS))
]
WEIGHTS = [32.0, 32.0, 17.0, 1.0, 32.0]


def sent(worker: int, targets: int) -> list[tuple[int, bytes]]:
    """Return one worker's records with their targets; pieces have at most 512 bytes."""
    pieces = split_arrays(worker, ARRAYS[worker].items(), WEIGHTS[worker], 512)
    return list(route_records([ReportRecord(worker, "hello"), *pieces], worker, 0, targets, 512))


def join_pieces(pieces: Any) -> dict[str, np.ndarray]:
    """Return the arrays that consist of these pieces, each of at most 512 bytes."""
    made = {name: np.zeros(array.size, array.dtype) for name, array in ARRAYS[0].items()}
    for piece in pieces:
        made[piece.name][piece.begin : piece.begin + piece.values.size] = piece.values
        assert piece.values.nbytes <= 512
    return made


@pytest.mark.parametrize("targets", [1, 3, 40])
def test_means_of_pieces_equal_means_of_whole_arrays(targets: int) -> None:
    records = [record for worker in range(WORKERS) for record in sent(worker, targets)]
    order = np.random.default_rng(targets).permutation(len(records))
    found, told = [], []
    for target in range(targets + 1):
        here = [records[i][1] for i in order if records[i][0] == target]
        whole = read_complete(here, range(WORKERS))
        found += list(mean_pieces(whole))
        told += [record.value for record in whole if isinstance(record, ReportRecord)]
    assert told == ["hello"] * WORKERS
    made = join_pieces(found)
    for name in ("a", "b"):
        wanted = weighted_mean([arrays[name].ravel() for arrays in ARRAYS], WEIGHTS)
        assert (made[name] == wanted).all()
        assert made[name].dtype == ARRAYS[0][name].dtype


def test_means_of_group_sums_equal_means_over_all_workers() -> None:
    """Means of the sums of groups of workers equal the means over all workers."""
    groups = 2
    seconds: list[ArrayPiece] = []
    for group in range(groups):
        members = sources_of_group(group, WORKERS, groups)
        assert [group_of_source(member, WORKERS, groups) for member in members] == [group] * len(
            members
        )
        pieces = [p for w in members for p in split_arrays(w, ARRAYS[w].items(), WEIGHTS[w], 512)]
        seconds += sum_pieces(pieces, group)
    made = join_pieces(mean_pieces(seconds))
    wanted = weighted_mean([arrays["a"] for arrays in ARRAYS], WEIGHTS)
    assert np.allclose(made["a"], wanted, rtol=1e-6)


def test_rejects_worker_result_with_missing_record() -> None:
    """A missing record of any worker, also its last one, is an error."""
    records = [record for target, record in sent(0, 1) if target == 0]
    records.append(pack_record(EndOfStream(1, 0)))
    assert read_complete(records, [0, 1])
    for lost in (records[1:], records[:-1], records[:-2] + records[-1:]):
        with pytest.raises(EOFError, match=r"\d workers' results did not arrive whole"):
            read_complete(lost, [0, 1])


def test_empty_arrays_keep_names_and_shapes() -> None:
    """Empty arrays keep their names, which a model requires in an optimizer's state."""
    empty = {"a": np.ones(3, np.float32), "none": np.zeros((0, 4), np.float32)}
    pieces = [p for worker in range(2) for p in split_arrays(worker, empty.items(), 1.0, 512)]
    report = SparkRoundReport(0)
    report.shapes = {name: (array.shape, array.dtype.str) for name, array in empty.items()}
    found = collect_arrays([report], [mean_pieces(pieces)])
    shapes = {name: array.shape for name, array in found.items()}
    assert shapes == {"a": (3,), "none": (0, 4)}


def test_workers_send_same_range_to_same_target() -> None:
    """Every worker sends the same range of an array to the same target."""
    ours, others = (
        [
            (piece.name, piece.begin, len(piece.values), choose_target(piece, 7, 512))
            for piece in split_arrays(worker, ARRAYS[worker].items(), 1.0, 512)
        ]
        for worker in (0, 3)
    )
    assert ours == others
    assert len({target for *_, target in ours}) > 1


def test_rejects_round_without_its_first_minibatch() -> None:
    """A round's minibatches without the first one are an error; a round without any is valid."""
    pieces = [MinibatchRecord(0), MinibatchRecord(1), MinibatchRecord(2, 2)]
    with pytest.raises(IncompleteInput, match="0 minibatches of a round arrived"):
        list(read_minibatches(map(pickle.dumps, pieces[1:])))
    assert list(read_minibatches(map(pickle.dumps, [MinibatchRecord(0, 0)]))) == []


class FakeBroadcasts:
    """A fake of Spark's broadcasts that keeps pickled values in memory and records their sizes."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def sent(self, nbytes: int, parts: Iterator[bytes]) -> BroadcastParts:
        assert nbytes > 0
        return BroadcastParts(tuple(map(self.broadcast, parts)))

    def broadcast(self, part: bytes) -> Any:
        self.sizes.append(len(part))
        return SimpleNamespace(value=pickle.loads(pickle.dumps(part)), _value=part)


@pytest.mark.parametrize("part_bytes", [64, 1000, 1 << 20])
def test_payload_survives_split_into_broadcast_parts(part_bytes: int) -> None:
    """A payload is broadcast in parts of at most part_bytes; unpacked, its arrays are equal."""
    context = FakeBroadcasts()
    arrays = {**ARRAYS[0], "none": np.zeros(0, np.float32), "steps": np.array([3, 4])}
    made = send_payload(context.sent, arrays, {"rate": 0.1}, part_bytes)
    assert max(context.sizes) <= part_bytes
    assert sum(context.sizes) == made.nbytes
    found = made.unpack(iter(()))
    for name, array in arrays.items():
        assert (found[name] == array).all()
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].flags.writeable
    assert made.plain == {"rate": 0.1}


def test_partitions_are_grouped_up_to_load() -> None:
    """Consecutive partitions are grouped up to a load; a larger partition is a group by itself."""
    assert [list(group) for group in group_by_load([1] * 5, 2)] == [[0, 1], [2, 3], [4]]
    assert [list(group) for group in group_by_load([1, 1], 0)] == [[0], [1]]
    assert [list(group) for group in group_by_load([3, 9, 0, 1, 5, 4], 6)] == [
        [0],
        [1],
        [2, 3, 4],
        [5],
    ]
    assert list(group_by_load([7], 6)) == [range(1)]


def test_count_target_bytes_equals_bytes_of_pieces() -> None:
    """``count_target_bytes`` computes how many bytes of values each target will receive."""
    arrays = [SplitArray(name, array.size, array.itemsize) for name, array in ARRAYS[0].items()]
    wanted = [0] * 7
    for piece in split_arrays(0, ARRAYS[0].items(), 1.0, 512):
        wanted[choose_target(piece, 7, 512)] += piece.values.nbytes
    assert count_target_bytes(arrays, 7, 512).tolist() == wanted
