"""Tests of the parts of fits over Spark Connect, without a server."""

from __future__ import annotations

import pickle
import random
import socket
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest

from sparkstrom.base.errors import SetupError, UsageError
from sparkstrom.base.identity import Endpoint
from sparkstrom.data.column_selection import ColumnSpec
from sparkstrom.data.row_blocks import read_row_blocks
from sparkstrom.options.gradient_sharing import SharedTrainingMaster
from sparkstrom.options.network import VoidConfiguration
from sparkstrom.spark.connect import jobs as binary_rows
from sparkstrom.spark.connect import jobs as uploads
from sparkstrom.spark.connect import partitioning as connect_spread
from sparkstrom.spark.connect.application import check_dataframe
from sparkstrom.spark.connect.controller_placement import ConnectControllerPlacer
from sparkstrom.spark.connect.jobs import ValueUploader, decode_results, encode_results
from sparkstrom.spark.connect.partitioning import (
    END_MARK,
    SHUFFLE_SCHEMA,
    limit_batch_rows,
    read_shuffled_blocks,
    write_shuffle_rows,
)
from sparkstrom.spark.controller import task as controller_entry
from sparkstrom.spark.controller.reachability import ReachabilityProbe, probe_controller
from sparkstrom.spark.controller.task import await_probe
from sparkstrom.spark.network import get_spark_context

WORKERS = 3
KEYS = [11, 22, 33]


# -- results ---------------------------------------------------------------------------------------


def test_results_are_decoded_by_task_in_any_row_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Results are cut into rows of bytes, and are decoded by task in whatever order rows arrive."""
    monkeypatch.setattr(binary_rows, "ROW_BYTES_MAX", 7)
    rows = []
    for task, values in enumerate([["a" * 50, 1], [], [b"b" * 30]]):
        for batch in encode_results(values, task):
            rows += [SimpleNamespace(**row) for row in batch.to_pylist()]
    assert max(len(row.part) for row in rows) == 7
    random.Random(1).shuffle(rows)
    assert decode_results(rows) == ["a" * 50, 1, b"b" * 30]


def test_each_fit_proposes_place_in_its_own_dataframe() -> None:
    """Spark caches identical DataFrames once: two fits would get one executor and port."""
    tasks: list[bytes] = []

    def keep_task(task: Any, schema: Any) -> None:
        tasks.append(pickle.dumps(task))
        raise KeyboardInterrupt

    session = SimpleNamespace(range=lambda *_: SimpleNamespace(mapInArrow=keep_task))
    for job in (1, 2):
        training: Any = SimpleNamespace(
            master=SharedTrainingMaster(), spec=SimpleNamespace(job=job)
        )
        placer = ConnectControllerPlacer(session, training, *3 * (cast(Any, None),))
        with pytest.raises(KeyboardInterrupt), placer._propose():
            raise AssertionError("nothing is proposed")
    assert len(set(tasks)) == 2


# -- rows in a shuffle -----------------------------------------------------------------------------


@pytest.fixture
def shuffled_rows(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Return two partitions' rows in pieces of 100 bytes, sorted as a shuffle does."""
    monkeypatch.setattr(connect_spread, "PIECE_BYTES", 100)
    rows: list[dict[str, Any]] = []
    for source, count in ((0, 10), (1, 7)):
        monkeypatch.setattr(connect_spread, "get_partition_id", lambda source=source: source)
        data: Any = [(np.full(4, 10 * source + i, np.float32), i) for i in range(count)]
        for batch in write_shuffle_rows(read_row_blocks, KEYS, 0, data):
            rows += batch.to_pylist()
    for worker, key in enumerate(KEYS):
        names = [field.split()[0] for field in SHUFFLE_SCHEMA.split(", ")]
        rows.append(dict(zip(names, (key, worker, *END_MARK, 1, b""), strict=True)))
    return sorted(rows, key=lambda row: (row["source"], row["number"], row["piece"]))


def select_worker_batches(worker: int, rows: list[dict[str, Any]]) -> list[pa.RecordBatch]:
    """Return a worker's rows in record batches of five."""
    return pa.Table.from_pylist([row for row in rows if row["worker"] == worker]).to_batches(5)


def test_a_frame_without_partitions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A DataFrame without partitions is refused, such as a join that Spark finds to be empty."""
    frame: Any = SimpleNamespace(schema=[])
    frame.coalesce = frame.mapInArrow = lambda *_: frame
    monkeypatch.setattr(connect_spread, "select_columns", lambda *_: (frame, None))
    monkeypatch.setattr(connect_spread, "run_short_job", lambda *_: [])
    with pytest.raises(UsageError, match="all 0 partitions are empty"):
        connect_spread.partition_dataframe(frame, ColumnSpec(), 2, seed=0, move=False)


def test_every_row_reaches_exactly_one_worker(shuffled_rows: list[dict[str, Any]]) -> None:
    assert all(row["key"] == KEYS[row["worker"]] for row in shuffled_rows)
    assert max(row["pieces"] for row in shuffled_rows) > 1
    firsts: list[float] = []
    for worker in range(WORKERS):
        for block in read_shuffled_blocks(worker, select_worker_batches(worker, shuffled_rows)):
            firsts += block.form.batch(block.records).features[:, 0].tolist()
    assert sorted(firsts) == [*range(10), *range(10, 17)]


@pytest.mark.parametrize("left", [0, 1, -1])
def test_rejects_truncated_worker_input(left: int, shuffled_rows: list[dict[str, Any]]) -> None:
    """Missing rows at the end of a worker's input are an error."""
    rows = [row for row in shuffled_rows if row["worker"] == 1]
    with pytest.raises(EOFError, match="partition 1 are incomplete"):
        list(read_shuffled_blocks(1, select_worker_batches(1, rows[:left])))


def test_rows_of_another_worker_are_refused(shuffled_rows: list[dict[str, Any]]) -> None:
    with pytest.raises(SetupError, match="rows of worker 2 came to partition 0"):
        list(read_shuffled_blocks(0, select_worker_batches(2, shuffled_rows)))


def test_worker_raises_row_error_from_shuffle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error in reading rows travels through the shuffle, and workers raise it."""
    monkeypatch.setattr(connect_spread, "get_partition_id", lambda: 0)
    batches = write_shuffle_rows(read_row_blocks, KEYS, 0, [("no number", 1)])  # type: ignore[list-item]
    rows = [row for batch in batches for row in batch.to_pylist()]
    with pytest.raises(UsageError, match="no number"):
        list(read_shuffled_blocks(1, select_worker_batches(1, rows)))


class Conf(dict[str, str]):
    """A fake of the session's settings."""

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def unset(self, key: str) -> None:
        del self[key]


def test_smallest_batch_row_limit_remains_until_last_fit_ends() -> None:
    """The smallest limit of concurrent fits remains until the last of them ends."""
    conf = Conf({connect_spread.ARROW_BATCH_ROWS_KEY: "10000"})
    session = SimpleNamespace(conf=conf, session_id="one of this test")
    with limit_batch_rows(session, 1000):
        with limit_batch_rows(session, 32):
            assert conf[connect_spread.ARROW_BATCH_ROWS_KEY] == "32"
        assert conf[connect_spread.ARROW_BATCH_ROWS_KEY] == "32"
    assert conf[connect_spread.ARROW_BATCH_ROWS_KEY] == "10000"


# -- uploaded values -------------------------------------------------------------------------------


class Session:
    """A fake session that copies uploaded files into a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.sent = folder, list[str]()

    def addArtifacts(self, path: str, *, file: bool) -> None:
        assert file
        (self.folder / Path(path).name).write_bytes(Path(path).read_bytes())
        self.sent.append(path)


def test_small_values_are_inlined_and_large_ones_uploaded_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small values are pickled into the job; equal large ones are uploaded once, as a file."""
    import pyspark

    monkeypatch.setattr(uploads, "INLINE_BYTES_MAX", 1000)
    monkeypatch.setattr(pyspark.SparkFiles, "get", lambda name: str(tmp_path / name))
    session = Session(tmp_path)
    there = ValueUploader(session)
    assert pickle.loads(pickle.dumps(there.upload({"a": 1}))).value == {"a": 1}
    assert session.sent == []
    large = list(range(5000))
    handles = [there.upload(large), there.upload(list(large))]
    assert len(session.sent) == 1
    assert not Path(session.sent[0]).exists()  # the client's copy is deleted
    travelled = pickle.dumps(handles[1])
    assert len(travelled) < 1000
    assert pickle.loads(travelled).value == large == handles[0].value


# -- the controller's task -------------------------------------------------------------------------


def test_controller_task_answers_probe_until_media_driver_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The controller's task answers a UDP probe before its media driver starts, but not later."""
    monkeypatch.setattr(controller_entry, "PROBE_WAIT_S", 60.0)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
        free.bind(("127.0.0.1", 0))
        endpoint = Endpoint("127.0.0.1", free.getsockname()[1])
    token, void = b"sixteen bytes ..", VoidConfiguration()
    ask = partial(probe_controller, ReachabilityProbe(endpoint, token, void, 10.0))
    here = threading.Thread(target=await_probe, args=(token, endpoint))
    here.start()
    (heard,) = ask([])
    assert heard.heard
    here.join()
    (later,) = probe_controller(ReachabilityProbe(endpoint, token, void, 0.3), [])
    assert not later.heard  # the port is free for the task's media driver
    await_probe(b"", endpoint)  # without a token, the driver program sends no probe


# -- refusals --------------------------------------------------------------------------------------


def test_frames_of_another_session_are_refused() -> None:
    here = object()
    frame = SimpleNamespace(mapInArrow=None, sparkSession=here)
    check_dataframe(frame, here)
    with pytest.raises(UsageError, match="a different session"):
        check_dataframe(frame, object())
    with pytest.raises(UsageError, match="pass a Spark DataFrame with"):
        check_dataframe([1, 2], here)
    frame.isStreaming = True
    with pytest.raises(UsageError, match=r"a streaming DataFrame, .* stream\.writeStream"):
        check_dataframe(frame, here)


# -- sessions --------------------------------------------------------------------------------------


class Session35:
    """A session of Spark 3.5, which raises no AttributeError for what it does not implement."""

    __module__ = "pyspark.sql.connect.session"

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError(f"[NOT_IMPLEMENTED] {name}() is not implemented.")


def test_get_spark_context_returns_connect_session_itself() -> None:
    """Of a Spark Connect session, get_spark_context returns the session itself."""
    session, context = Session35(), object()
    assert get_spark_context(session) is session
    assert get_spark_context(SimpleNamespace(sparkContext=context)) is context
    assert get_spark_context(context) is context
