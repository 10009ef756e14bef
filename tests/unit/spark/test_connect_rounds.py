"""Tests of the parts of rounds over Spark Connect, without a server."""

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
from sparkstrom.data.row_blocks import Block, read_row_blocks
from sparkstrom.fit.supervisor import FitCancelled
from sparkstrom.models import DenseNetwork
from sparkstrom.planning.memory import PieceSizes
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.rounds.backend import PartitionFacts
from sparkstrom.rounds.worker_round import IncompleteInput
from sparkstrom.spark.connect import dataframe_rounds as frame_parts
from sparkstrom.spark.connect import dataframe_rounds as record_frames
from sparkstrom.spark.connect.application import check_options
from sparkstrom.spark.connect.dataframe_rounds import (
    ALL_ROUNDS,
    DataFrameRoundsBackend,
    InlineParts,
    TemporaryViewParts,
    group_parts_for_views,
    read_cached_blocks,
    read_records,
    read_shuffled_records,
    run_caching_task,
    run_minibatch_task,
    run_writing_task,
    split_record,
)
from sparkstrom.spark.connect.partitioning import override_settings
from sparkstrom.spark.data.partitioning import PartitionedData
from sparkstrom.spark.fit_strategies import strategy_for
from sparkstrom.spark.rounds.array_exchange import Payload, send_payload
from sparkstrom.spark.rounds.tasks import RoundInput, SparkRoundsJob

RECORDS = [b"", b"a" * 10, b"b" * 25]


def list_rows(batches: Iterable[pa.RecordBatch]) -> list[dict[str, Any]]:
    return [row for batch in batches for row in batch.to_pylist()]


def as_batches(rows: list[dict[str, Any]], size: int = 2) -> list[pa.RecordBatch]:
    return pa.Table.from_pylist(rows).to_batches(size) if rows else []


@pytest.fixture
def current_partition(monkeypatch: pytest.MonkeyPatch) -> int:
    """Run tasks' code as in partition 1; return this number."""
    monkeypatch.setattr(record_frames, "get_partition_id", lambda: 1)
    return 1


# -- records ---------------------------------------------------------------------------------------


@pytest.fixture
def pieces() -> list[dict[str, Any]]:
    """Return rows for worker 1 with RECORDS, cut into pieces of 10 bytes."""
    return list_rows(split_record(1, 0, number, each, 10) for number, each in enumerate(RECORDS))


def test_split_records_are_joined_again(pieces: list[dict[str, Any]]) -> None:
    assert max(len(row["content"]) for row in pieces) == 10
    assert len(pieces) == 1 + 1 + 3
    assert list(read_records(1, as_batches(pieces))) == RECORDS


def test_missing_piece_of_record_raises_error(pieces: list[dict[str, Any]]) -> None:
    """A missing piece of a record is an error."""
    for lost in (pieces[:2] + pieces[3:], pieces[:3] + pieces[4:], pieces[:-1]):
        with pytest.raises(IncompleteInput, match=r"piece \d of a record|a record for partition"):
            list(read_records(1, as_batches(lost)))


def test_records_of_another_worker_are_refused(pieces: list[dict[str, Any]]) -> None:
    with pytest.raises(SetupError, match="rows of worker 1 came to partition 0"):
        list(read_records(0, as_batches(pieces)))


def test_rounds_of_one_job_have_separate_records(current_partition: int) -> None:
    """One job writes the records of several rounds; each round has its own phase number."""

    def cutting(blocks: Any, index: int, items: Any) -> Iterator[tuple[int, bytes]]:
        for number in range(2):
            for record in range(3):
                yield number * 4 + index, b"%d %d" % (number, record)

    rows = list_rows(run_minibatch_task(cutting, 4, 7, read_row_blocks, []))
    assert [(row["phase"], row["number"]) for row in rows] == [
        (phase, number) for phase in (7, 8) for number in range(3)
    ]
    mine = as_batches([row for row in rows if row["phase"] == 8])
    assert list(read_records(current_partition, mine)) == [b"1 0", b"1 1", b"1 2"]


def test_written_rows_have_shuffle_key_of_target(current_partition: int) -> None:
    """Each row that a task writes has the shuffle key of the record's target."""

    def written(index: int, records: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
        for number, record in enumerate(records):
            yield number % 2, record

    batches = as_batches(
        list_rows(split_record(current_partition, 0, n, r, 99) for n, r in enumerate(RECORDS))
    )
    rows = list_rows(run_writing_task(read_records, written, [55, 66], batches))
    assert [row["key"] for row in rows] == [55, 66, 55]
    assert list(read_shuffled_records(0, as_batches(rows))) == RECORDS


# -- cached rows -----------------------------------------------------------------------------------


def cache_rows(rows: Any) -> list[dict[str, Any]]:
    """Return the rows that a caching task writes."""
    return list_rows(run_caching_task(5, read_row_blocks, rows))


def test_cached_rows_are_read_back_complete(
    current_partition: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cached rows are read back; if any of them are missing, an error is raised."""
    monkeypatch.setattr(record_frames, "PIECE_BYTES", 100)
    rows = cache_rows([(np.full(4, i, np.float32), i) for i in range(20)])
    assert max(len(row["content"]) for row in rows) == 100
    blocks: list[Block] = list(read_cached_blocks(current_partition, as_batches(rows)))
    firsts = [block.form.batch(block.records).features[:, 0] for block in blocks]
    assert np.concatenate(firsts).tolist() == [*range(20)]
    for lost in (rows[:-1], []):
        with pytest.raises(EOFError, match="the rows of partition 1 are incomplete"):
            list(read_cached_blocks(current_partition, as_batches(lost)))


def test_row_error_is_cached_and_raised_on_each_read(current_partition: int) -> None:
    """An error in reading rows is cached, and raised each time they are read."""
    rows = cache_rows([("no number", 1)])
    for _ in range(2):
        with pytest.raises(UsageError, match="no number"):
            list(read_cached_blocks(current_partition, as_batches(rows)))


# -- parameters ------------------------------------------------------------------------------------

ARRAYS = {"a": np.arange(100, dtype=np.float32), "b": np.arange(7.0)}


def test_payload_in_views_is_read_before_minibatches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A payload in temporary views arrives as a task's first records; missing parts are errors."""
    monkeypatch.setattr(frame_parts, "VIEW_BYTES_MAX", 150)
    views: list[list[tuple[int, bytes]]] = []

    def sent(nbytes: int, parts: Iterator[bytes]) -> TemporaryViewParts:
        views.extend(group_parts_for_views(parts))
        return TemporaryViewParts(("v",), sum(map(len, views)), print)

    made = pickle.loads(pickle.dumps(send_payload(sent, ARRAYS, {}, 64)))
    rows = [row for view in views for row in view]
    assert [number for number, _ in rows] == [*range(len(rows))]
    assert max(sum(len(content) for _, content in view) for view in views) <= 150
    parts = [content for _, content in rows]
    records = iter([*parts, b"a minibatch"])
    found = made.unpack(records)
    assert all((found[name] == array).all() for name, array in ARRAYS.items())
    assert list(records) == [b"a minibatch"]
    for lost in (parts[1:], parts[:-1], [*parts[:-1], b"a minibatch" * 9]):
        with pytest.raises(IncompleteInput, match="of 504 bytes of a round's parameters"):
            made.unpack(iter(lost))


def test_payload_recipients_lists_workers_of_each_payload() -> None:
    """Each payload has the list of workers that receive it."""
    ships = [Payload((), InlineParts(b"%d" % number)) for number in range(3)]
    given = RoundInput(0, ships[0], ships[1], {1: ships[2]})
    sent = [(ship.parts.content, to) for ship, to in given.payload_recipients(3)]  # type: ignore[attr-defined]
    assert sent == [(b"0", [0, 1, 2]), (b"1", [0, 2]), (b"2", [1])]


# -- a fit -----------------------------------------------------------------------------------------


def make_backend(**options: Any) -> DataFrameRoundsBackend:
    """Return a backend of rounds for two workers, with these options and a fake session."""
    master, model = ParameterAveragingTrainingMaster(**options), DenseNetwork([6, 3])
    spec = FitSpec(2, 1, model.n_params, "test", job=7)
    job = SparkRoundsJob(spec, model, master, (), PieceSizes())
    data = PartitionedData(SimpleNamespace(frame=None, batch_rows=9), read_row_blocks, 2)
    return DataFrameRoundsBackend(SimpleNamespace(), job, data)


def test_batch_memory_bytes_limits_rounds_stored_at_once() -> None:
    """If rows are spilled, only as many rounds are stored at once as batch_memory_bytes allows."""
    backend = make_backend(
        batch_memory_bytes=16 << 20, averaging_frequency=4, batch_size_per_worker=8
    )
    few, many = PartitionFacts(0, 10, 0, 0, 1, 0), PartitionFacts(1, 900, 100, 0, 1, 1000 << 20)
    assert backend.max_rounds_stored_at_once([few]) == ALL_ROUNDS
    assert backend.max_rounds_stored_at_once([few, many]) == 1  # a row has 1 MiB
    assert backend.max_rounds_stored_at_once([replace(many, spilled_bytes=1000 << 10)]) == 512


def test_aborted_fit_runs_no_jobs() -> None:
    """An aborted fit runs no further jobs."""
    backend = make_backend()
    backend.abort()
    with pytest.raises(FitCancelled, match="nobody waits for its rounds"):
        backend.run_job(None)


def test_full_server_heap_error_recommends_larger_heap() -> None:
    """If the server's heap is full, the error recommends a larger heap."""

    class Full:
        def collect(self) -> None:
            raise RuntimeError('RPC that terminated with: details = "Java heap space"')

    backend = make_backend()
    backend.send_parts(3 << 20, iter(()))
    with pytest.raises(TrainingError, match=r"have 3 MiB: start the server with a larger spark.dr"):
        backend.run_job(Full())


class Conf(dict[str, str]):
    """A fake of the session's settings."""

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def unset(self, key: str) -> None:
        del self[key]


class InterruptedConf(Conf):
    """Settings of which one call is interrupted after the server has carried it out."""

    def set(self, key: str, value: str) -> None:
        super().set(key, value)
        if value == "6":
            raise KeyboardInterrupt


def test_interrupted_override_restores_settings() -> None:
    """Settings are restored even if setting one of them is interrupted."""
    session = SimpleNamespace(conf=InterruptedConf({"a": "1"}), session_id="one of these tests")
    with pytest.raises(KeyboardInterrupt), override_settings(session, {"a": "5", "b": "6"}):
        raise AssertionError("the block does not begin")
    assert session.conf == {"a": "1"}
    with override_settings(session, {"b": "5"}):
        pass
    assert session.conf == {"a": "1"}


def test_nested_overrides_restore_settings() -> None:
    """Nested overrides of settings are restored when the outermost one ends."""
    conf = Conf({"a": "1"})
    session = SimpleNamespace(conf=conf, session_id="one of these tests")
    with override_settings(session, {"a": "5", "b": "6"}):
        with override_settings(session, {"a": "5"}):
            assert conf == {"a": "5", "b": "6"}
        assert conf["a"] == "5"
    assert conf == {"a": "1"}


class FakeSession:
    """A fake server's session and catalog; the interrupted calls are carried out nevertheless."""

    session_id = "one of these tests"

    def __init__(self, *interrupted: str) -> None:
        self.conf, self.catalog, self.interrupted = Conf(), self, interrupted
        self.views, self.stored = set[str](), set[str]()

    def done(self, call: str) -> None:
        if call in self.interrupted:
            raise KeyboardInterrupt(call)

    def dropTempView(self, name: str) -> bool:
        self.views.discard(name)
        self.done("drop")
        return True

    def table(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(
            columns=["content"],
            persist=lambda level: (self.stored.add(name), self.done("persist")),
            unpersist=lambda: (self.stored.discard(name), self.done("unpersist")),
        )

    def createDataFrame(self, rows: Any, schema: Any = None) -> SimpleNamespace:
        def create(name: str) -> None:
            self.views.add(name)
            self.done("create")

        return SimpleNamespace(createOrReplaceTempView=create)


def test_inline_payload_is_pickled_with_its_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Payloads of up to a quarter of the limit, with two workers, are pickled with the job."""
    backend = make_backend()
    backend._session = FakeSession()
    monkeypatch.setattr(frame_parts, "INLINE_TOTAL_MAX", 4 * 504)
    made = pickle.loads(pickle.dumps(send_payload(backend.send_parts, ARRAYS, {"rate": 1}, 64)))
    found = made.unpack(iter(()))
    assert {name: array.tolist() for name, array in found.items()} == {
        name: array.tolist() for name, array in ARRAYS.items()
    }
    assert (made.plain, backend._session.views) == ({"rate": 1}, set())
    monkeypatch.setattr(frame_parts, "INLINE_TOTAL_MAX", 4 * 504 - 1)
    send_payload(backend.send_parts, ARRAYS, {}, 64)
    assert len(backend._session.views) == 1


@pytest.mark.parametrize("call", ["create", "drop", "persist", "unpersist"])
def test_interrupted_call_leaves_no_view_or_stored_rows(call: str) -> None:
    """Whichever call is interrupted, no view and no stored rows remain on the server."""
    backend, session = make_backend(storage_level=None), FakeSession(call)
    backend._session = session
    parts = [bytes(frame_parts.VIEW_BYTES_MAX)] * 2

    def run_a_round() -> None:
        with backend.keep_rows():
            backend.send_parts(sum(map(len, parts)), iter(parts))
            with backend.persisted(session.createDataFrame([]), "DISK_ONLY"):
                assert session.stored

    with pytest.raises(KeyboardInterrupt):
        run_a_round()
    assert (session.views, session.stored) == (set(), set())


def test_rejects_options_unsupported_by_spark_connect() -> None:
    """Options that Spark Connect cannot implement are refused with a reason."""
    check_options(strategy_for(ParameterAveragingTrainingMaster()))
    different = ParameterAveragingTrainingMaster(repartition="num_partitions_workers_differs")
    with pytest.raises(UsageError, match=r"^repartition='num_partitions_workers_differs' depends"):
        check_options(strategy_for(different))
    export = ParameterAveragingTrainingMaster(rdd_training_approach="export")
    with pytest.raises(UsageError, match="rdd_training_approach='export' writes"):
        check_options(strategy_for(export))
