"""What rounds over Spark Connect are made of, without a server."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from sparkstrom import ParameterAveragingTrainingMaster
from sparkstrom.base.errors import SetupError, TrainingError, UsageError
from sparkstrom.spark.averaging.pieces import RowsMissing
from sparkstrom.spark.averaging.round_job import PieceSizes, RoundInput, RowFacts
from sparkstrom.spark.averaging.shipment import Shipment, shipped
from sparkstrom.spark.connect import frame_parts, record_frames
from sparkstrom.spark.connect.connect_spread import held_settings
from sparkstrom.spark.connect.frame_engine import ALL_ROUNDS, FrameEngine
from sparkstrom.spark.connect.frame_parts import PlanParts, ViewParts, view_rows
from sparkstrom.spark.connect.record_frames import (
    contents_of,
    cut_record,
    records_of,
    run_cut,
    run_keep,
    run_written,
    stored_blocks,
)
from sparkstrom.spark.connect.refusals import check_options
from sparkstrom.spark.data.partitioning import Spread
from sparkstrom.spark.data.row_blocks import Block, blocks_of_rows
from sparkstrom.spark.driver.fitting import FitCancelled

RECORDS = [b"", b"a" * 10, b"b" * 25]


def rows_of(batches: Iterable[pa.RecordBatch]) -> list[dict[str, Any]]:
    return [row for batch in batches for row in batch.to_pylist()]


def as_batches(rows: list[dict[str, Any]], size: int = 2) -> list[pa.RecordBatch]:
    return pa.Table.from_pylist(rows).to_batches(size) if rows else []


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(record_frames, "task_number", lambda: 1)
    return 1


# -- records ---------------------------------------------------------------------------------------


@pytest.fixture
def pieces() -> list[dict[str, Any]]:
    return rows_of(cut_record(1, 0, number, each, 10) for number, each in enumerate(RECORDS))


def test_records_are_cut_and_whole_again(pieces: list[dict[str, Any]]) -> None:
    assert max(len(row["content"]) for row in pieces) == 10
    assert len(pieces) == 1 + 1 + 3
    assert list(records_of(1, as_batches(pieces))) == RECORDS


def test_a_piece_that_is_missing_is_missed(pieces: list[dict[str, Any]]) -> None:
    for lost in (pieces[:2] + pieces[3:], pieces[:3] + pieces[4:], pieces[:-1]):
        with pytest.raises(RowsMissing, match=r"piece \d of a record|a record broke off"):
            list(records_of(1, as_batches(lost)))


def test_records_of_another_worker_are_refused(pieces: list[dict[str, Any]]) -> None:
    with pytest.raises(SetupError, match="rows of worker 1 came to partition 0"):
        list(records_of(0, as_batches(pieces)))


def test_each_round_has_its_own_records(here: int) -> None:
    def cutting(blocks: Any, index: int, items: Any) -> Iterator[tuple[int, bytes]]:
        for number in range(2):
            for record in range(3):
                yield number * 4 + index, b"%d %d" % (number, record)

    rows = rows_of(run_cut(cutting, 4, 7, blocks_of_rows, []))
    assert [(row["phase"], row["number"]) for row in rows] == [
        (phase, number) for phase in (7, 8) for number in range(3)
    ]
    mine = as_batches([row for row in rows if row["phase"] == 8])
    assert list(records_of(here, mine)) == [b"1 0", b"1 1", b"1 2"]


def test_what_is_sent_has_the_key_of_its_target(here: int) -> None:
    def written(index: int, records: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
        for number, record in enumerate(records):
            yield number % 2, record

    batches = as_batches(rows_of(cut_record(here, 0, n, r, 99) for n, r in enumerate(RECORDS)))
    rows = rows_of(run_written(records_of, written, [55, 66], batches))
    assert [row["key"] for row in rows] == [55, 66, 55]
    assert list(contents_of(0, as_batches(rows))) == RECORDS


# -- rows that are kept ----------------------------------------------------------------------------


def kept(rows: Any) -> list[dict[str, Any]]:
    return rows_of(run_keep(5, blocks_of_rows, rows))


def test_kept_rows_are_those_that_came(here: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_frames, "PIECE_BYTES", 100)
    rows = kept([(np.full(4, i, np.float32), i) for i in range(20)])
    assert max(len(row["content"]) for row in rows) == 100
    blocks: list[Block] = list(stored_blocks(here, as_batches(rows)))
    firsts = [block.form.batch(block.records).features[:, 0] for block in blocks]
    assert np.concatenate(firsts).tolist() == [*range(20)]
    for lost in (rows[:-1], []):
        with pytest.raises(EOFError, match="the rows of partition 1 broke off"):
            list(stored_blocks(here, as_batches(lost)))


def test_what_is_wrong_with_rows_is_kept_and_refused(here: int) -> None:
    rows = kept([("no number", 1)])
    for _ in range(2):
        with pytest.raises(UsageError, match="no number"):
            list(stored_blocks(here, as_batches(rows)))


# -- parameters ------------------------------------------------------------------------------------

ARRAYS = {"a": np.arange(100, dtype=np.float32), "b": np.arange(7.0)}


def test_parameters_come_before_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_parts, "VIEW_BYTES", 150)
    views: list[list[tuple[int, bytes]]] = []

    def sent(nbytes: int, parts: Iterator[bytes]) -> ViewParts:
        views.extend(view_rows(parts))
        return ViewParts(("v",), sum(map(len, views)), print)

    made = pickle.loads(pickle.dumps(shipped(sent, ARRAYS, {}, 64)))
    rows = [row for view in views for row in view]
    assert [number for number, _ in rows] == [*range(len(rows))]
    assert max(sum(len(content) for _, content in view) for view in views) <= 150
    parts = [content for _, content in rows]
    records = iter([*parts, b"a minibatch"])
    found = made.unpacked(records)
    assert all((found[name] == array).all() for name, array in ARRAYS.items())
    assert list(records) == [b"a minibatch"]
    for lost in (parts[1:], parts[:-1], [*parts[:-1], b"a minibatch" * 9]):
        with pytest.raises(RowsMissing, match="of 504 bytes of a round's parameters"):
            made.unpacked(iter(lost))


def test_small_parameters_travel_with_the_job() -> None:
    made = shipped(lambda nbytes, parts: PlanParts(b"".join(parts)), ARRAYS, {"rate": 1}, 64)
    found = pickle.loads(pickle.dumps(made)).unpacked(iter(()))
    assert (found["b"] == ARRAYS["b"]).all()


def test_who_gets_which_shipment() -> None:
    ships = [Shipment((), PlanParts(b"%d" % number)) for number in range(3)]
    given = RoundInput(0, 0, 0, ships[0], ships[1], {1: ships[2]})
    sent = [(ship.parts.content, to) for ship, to in given.addressed(3)]  # type: ignore[attr-defined]
    assert sent == [(b"0", [0, 1, 2]), (b"1", [0, 2]), (b"2", [1])]


# -- a fit -----------------------------------------------------------------------------------------


def engine_of(gone: bool = False, **options: Any) -> FrameEngine:
    master = ParameterAveragingTrainingMaster(**options)
    spec = SimpleNamespace(job=7, workers=2)
    job: Any = SimpleNamespace(master=master, spec=spec, sizes=PieceSizes())
    spread = Spread(SimpleNamespace(frame=None, batch_rows=9), blocks_of_rows, 2)
    return FrameEngine(SimpleNamespace(), job, spread, lambda: gone)


def test_rounds_are_cut_by_the_memory_for_rows() -> None:
    engine = engine_of(batch_memory_bytes=16 << 20, averaging_frequency=4, batch_size_per_worker=8)
    few, many = RowFacts(0, 10, 0, 0, 1, 0), RowFacts(1, 900, 100, 0, 1, 1000 << 20)
    assert engine.rounds_at_once([few]) == ALL_ROUNDS
    assert engine.rounds_at_once([few, many]) == 1  # a row is of 1 MiB
    assert engine.rounds_at_once([replace(many, spilled_bytes=1000 << 10)]) == 512


def test_nothing_is_asked_for_a_fit_that_was_given_up() -> None:
    with pytest.raises(FitCancelled, match="nobody waits for its rounds"):
        engine_of(gone=True).collected(None)


def test_a_full_heap_says_what_to_set() -> None:
    class Full:
        def collect(self) -> None:
            raise RuntimeError('RPC that terminated with: details = "Java heap space"')

    engine = engine_of()
    engine.sent(3 << 20, iter(()))
    with pytest.raises(TrainingError, match=r"have 3 MiB: start the server with a larger spark.dr"):
        engine.collected(Full())


class Conf(dict[str, str]):
    def set(self, key: str, value: str) -> None:
        self[key] = value

    def unset(self, key: str) -> None:
        del self[key]


def test_settings_are_put_back() -> None:
    conf = Conf({"a": "1"})
    session = SimpleNamespace(conf=conf, session_id="one of these tests")
    with held_settings(session, {"a": "5", "b": "6"}):
        with held_settings(session, {"a": "5"}):
            assert conf == {"a": "5", "b": "6"}
        assert conf["a"] == "5"
    assert conf == {"a": "1"}


def test_what_needs_partitions_counted_is_refused_by_name() -> None:
    check_options(ParameterAveragingTrainingMaster())
    different = ParameterAveragingTrainingMaster(repartition="num_partitions_workers_differs")
    with pytest.raises(UsageError, match=r"^repartition='num_partitions_workers_differs' asks"):
        check_options(different)
    export = ParameterAveragingTrainingMaster(rdd_training_approach="export")
    with pytest.raises(UsageError, match="rdd_training_approach='export' writes"):
        check_options(export)
