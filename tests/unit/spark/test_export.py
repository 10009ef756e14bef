"""Tests of exported rows: paths and URLs of directories, and which files stay after failures."""

from __future__ import annotations

import builtins
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sparkstrom.base.errors import SetupError, UsageError
from sparkstrom.data.column_selection import ColumnSpec
from sparkstrom.data.row_blocks import read_row_blocks
from sparkstrom.spark.data import export
from sparkstrom.spark.data.export import ExportCache, delete_export, open_filesystem
from sparkstrom.spark.data.partitioning import PartitionedData
from sparkstrom.spark.network import SparkNetwork

fs = pytest.importorskip("pyarrow.fs")


@pytest.mark.parametrize("url", ["/a/b", "file:/a/b", "file:///a/b"])
def test_local_directories_need_no_package_but_pyarrow(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Opening a local directory imports no package but pyarrow."""
    imported, original = set[str](), builtins.__import__

    def record(name: str, *args: Any, **options: Any) -> Any:
        imported.add(name.partition(".")[0])
        return original(name, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", record)
        filesystem, path = open_filesystem(url)
    assert imported - sys.stdlib_module_names == {"pyarrow"}
    assert isinstance(filesystem, fs.LocalFileSystem)
    assert path == "/a/b"


@pytest.mark.parametrize("name", ["run#1", "run?1", "run%201", "run::1", "rün 1"])
@pytest.mark.parametrize("prefix", ["", "file:", "file://"])
def test_characters_of_local_path_are_taken_literally(name: str, prefix: str) -> None:
    """Characters such as # and % in a local path are not interpreted as in a URL."""
    assert open_filesystem(f"{prefix}/a/{name}/b")[1] == f"/a/{name}/b"


def test_failed_export_keeps_users_folder_of_similar_name(tmp_path: Path) -> None:
    """A failed export to run#1 leaves the folder run; delete_export refuses any other folder."""
    (tmp_path / "run").mkdir()
    exports = ExportCache(None, f"{tmp_path}/run#1")
    with pytest.raises(RuntimeError, match="boom"):
        exports.partition_data(
            None, ColumnSpec(), 2, lambda: PartitionedData(FailingJob(), read_row_blocks, 2)
        )
    exports.close()
    assert (tmp_path / "run").exists()
    with pytest.raises(AssertionError, match="is not a directory of exports"):
        delete_export(str(tmp_path))


@pytest.mark.parametrize("character", "#?")
def test_url_with_hash_or_question_mark_is_refused(character: str) -> None:
    """A URL with # or ? is refused, because filesystems would cut it off there."""
    exports = ExportCache(None, f"mock:///run{character}1")
    with pytest.raises(UsageError, match=rf"/run\{character}1/.* has a '\{character}'"):
        exports.partition_data(None, ColumnSpec(), 2, pytest.fail)  # type: ignore[arg-type]
    exports.close()


def test_url_with_unknown_protocol_raises_setup_error() -> None:
    """A URL with an unknown protocol raises SetupError."""
    pytest.importorskip("fsspec")
    with pytest.raises(SetupError, match="cannot open bogus://x/y: Protocol not known: bogus"):
        open_filesystem("bogus://x/y")


class FailingJob:
    """A fake RDD whose second partition fails after the first one was written."""

    write: Any = None

    def mapPartitionsWithIndex(self, write: Any) -> FailingJob:
        self.write = write
        return self

    def run_partition(self) -> list[Any]:
        return list(self.write(0, [([1.0, 2.0], 0)]))

    def collect(self) -> Any:
        assert self.run_partition()[0][1].rows == 1
        raise RuntimeError("boom")


def test_an_export_whose_job_fails_leaves_no_files(tmp_path: Path) -> None:
    """A failed export's files are deleted, also those that a late task writes before ``close``."""
    job = FailingJob()
    exports = ExportCache(None, str(tmp_path))
    with pytest.raises(RuntimeError, match="boom"):
        exports.partition_data(
            None, ColumnSpec(), 2, lambda: PartitionedData(job, read_row_blocks, 2)
        )
    assert list(tmp_path.iterdir()) == []
    assert exports.directory is None
    job.run_partition()  # a late task of the failed job
    exports.close()
    assert list(tmp_path.iterdir()) == []
    exports.close()


def test_failed_export_error_notes_files_that_remain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a failed export's files cannot be deleted, a note about them is added to the error."""

    def fail(directory: str) -> None:
        raise SetupError(f"cannot delete {directory}")

    monkeypatch.setattr(export, "delete_export", fail)
    partitioned = PartitionedData(FailingJob(), read_row_blocks, 2)
    with pytest.raises(RuntimeError, match="boom") as failed:
        export.export_rows(None, ColumnSpec(), 2, partitioned, str(tmp_path))
    assert failed.value.__notes__ == [f"cannot delete {tmp_path}"]


class WritingJob(FailingJob):
    """A fake RDD whose only partition is written without failure."""

    def collect(self) -> Any:
        return self.run_partition()


def test_an_export_is_not_used_for_columns_that_were_changed_in_place(tmp_path: Path) -> None:
    """Rows are exported again if the list of feature columns was changed in place."""
    names = ["a", "b"]
    context = SimpleNamespace(parallelize=lambda *_: None)
    exports, columns = ExportCache(context, str(tmp_path)), ColumnSpec(features=names)
    made: list[int] = []

    def partition() -> PartitionedData:
        made.append(1)
        return PartitionedData(WritingJob(), read_row_blocks, 1)

    for _ in range(2):
        exports.partition_data(None, columns, 1, partition)
    names.append("c")
    exports.partition_data(None, columns, 1, partition)
    assert len(made) == 2


def test_the_first_rows_of_an_export_are_read_for_a_trial_step(tmp_path: Path) -> None:
    """A fit on exported rows tries a step, as every fit does, with rows of the longest file."""
    context = SimpleNamespace(parallelize=lambda *_: None)
    exports = ExportCache(context, str(tmp_path))
    data = exports.partition_data(
        None, ColumnSpec(), 1, lambda: PartitionedData(WritingJob(), read_row_blocks, 1)
    )
    assert data.first is not None
    (block,) = data.first()
    np.testing.assert_array_equal(block.form.batch(block.records).features, [[1.0, 2.0]])
    (path,) = [str(each) for each in tmp_path.rglob("*") if each.is_file()]
    files = (export.ExportedFile("an empty one", 0), export.ExportedFile(path, 1))
    two = export.ExportedData(None, ColumnSpec(), 2, "", files)
    first = export.partition_export(context, two).first
    assert first is not None
    assert [block.numbers.tolist() for block in first()] == [[0]]
    empty = export.ExportedData(None, ColumnSpec(), 1, "", (export.ExportedFile("", 0),))
    first = export.partition_export(context, empty).first
    assert first is not None
    assert not list(first())


def test_exported_rows_may_have_their_keys_in_another_order(tmp_path: Path) -> None:
    rows = [({"a": 1, "b": 2}, 0), ({"b": 4, "a": 3}, 1)]
    blocks = (block for row in rows for block in read_row_blocks(0, [row]))
    written = export._write_parquet(str(tmp_path / "0.parquet"), blocks)
    (block,) = export.read_exported_blocks((written,), 0, ())
    features = block.form.batch(block.records).features
    np.testing.assert_equal(features, {"a": np.float32([1, 3]), "b": np.float32([2, 4])})


def test_close_deletes_worker_files_if_export_deletion_fails() -> None:
    """``close`` deletes the workers' files even if the export cannot be deleted."""

    def fail() -> None:
        raise SetupError("the export cannot be deleted")

    deleted: list[str] = []
    network: Any = SparkNetwork.__new__(SparkNetwork)
    network._exports = SimpleNamespace(close=fail)
    network._application = SimpleNamespace(is_stopped=False, delete_worker_files=deleted.append)
    network._fit_context = SimpleNamespace(network="n1")
    network._state = SimpleNamespace(forget_resume_state=lambda: None)
    network._may_have_files, network._training = True, threading.Lock()
    with pytest.raises(SetupError, match="cannot be deleted"):
        network.close()
    assert deleted == ["n1"]
