"""Tests of minibatch files: which ones a path or pattern selects, and unreadable files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from sparkstrom.base.errors import SetupError, UsageError
from sparkstrom.spark.data import export as written_batches
from sparkstrom.spark.data.export import list_minibatch_files, read_file_rows

fs = pytest.importorskip("pyarrow.fs")


def save_arrays(path: Path, **arrays: object) -> str:
    """Write these arrays to an npz file; return its path."""
    path.parent.mkdir(exist_ok=True, parents=True)
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return str(path)


def test_folders_patterns_and_lists_select_files(tmp_path: Path) -> None:
    """Folders, patterns and lists of paths select files, whose rows are read in order."""
    x, y = np.arange(6.0).reshape(3, 2), np.arange(3)
    one = save_arrays(tmp_path / "a/part-0.npz", features=x, labels=y)
    two = save_arrays(tmp_path / "a/b/part-1.npz", x=x + 1, y=y[:, None], weights=y)
    (tmp_path / "a/_SUCCESS").touch()
    assert list_minibatch_files(str(tmp_path)) == (".npz", sorted([one, two]))
    assert list_minibatch_files(f"file://{tmp_path}/a/*/part-?.npz") == (".npz", [two])
    assert list_minibatch_files([one, two, one])[1] == sorted([one, two])
    rows = list(read_file_rows([one, two]))
    assert [row[1] for row in rows[:3]] == [0, 1, 2]
    np.testing.assert_array_equal(rows[3][0], [1, 2])
    assert rows[4][1:] == (np.array([1]), 1.0)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a folder with minibatch files in several subfolders."""
    for name in ("m1", "m2", "a/m3", "a/b/m4", "c/m5"):
        save_arrays(tmp_path / f"{name}.npz", features=np.zeros((2, 1)), labels=np.zeros(2))
    return tmp_path


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("/m*.npz", ["m1", "m2"]),  # files in this folder only
        ("/*/*.npz", ["a/m3", "c/m5"]),
        ("/*/m[34].npz", ["a/m3"]),
        ("/a/*/m?.npz", ["a/b/m4"]),
        ("/[ac]", ["a/b/m4", "a/m3", "c/m5"]),  # a folder selects all files in it
        ("/*/b/", ["a/b/m4"]),
    ],
)
def test_wildcards_do_not_match_slashes(tree: Path, pattern: str, names: list[str]) -> None:
    """Wildcards do not match slashes; a folder that matches selects all files in it."""
    assert list_minibatch_files(f"{tree}{pattern}") == (
        ".npz",
        [f"{tree}/{name}.npz" for name in names],
    )


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("", ["_x=1/m2", "m1"]),
        ("/*", ["_x=1/m2", "m1"]),
        ("/*/*.npz", ["_x=1/m2"]),
        ("/_temporary", ["_temporary/0/m3"]),  # named by the pattern
        ("/_t*/0", ["_temporary/0/m3"]),
        ("/.s*/*", [".staging/m4"]),
    ],
)
def test_hidden_files_are_skipped_unless_pattern_names_them(
    tmp_path: Path, pattern: str, names: list[str]
) -> None:
    """Names that start with _ or . are skipped, as by Spark, unless the pattern has them."""
    root = tmp_path / "_data"  # a hidden parent folder does not matter
    for name in ("m1", "_x=1/m2", "_temporary/0/m3", ".staging/m4", "_m5", ".m6"):
        save_arrays(root / f"{name}.npz", features=np.zeros((2, 1)), labels=np.zeros(2))
    assert list_minibatch_files(f"{root}{pattern}")[1] == [f"{root}/{name}.npz" for name in names]


@pytest.mark.parametrize("before", ["", "./", "../data/"])
def test_relative_paths_start_at_working_directory(
    tmp_path: Path, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative paths and patterns start at the working directory."""
    here = tmp_path / "data"
    found = [
        save_arrays(here / f"m{i}.npz", features=np.zeros((2, 1)), labels=np.zeros(2))
        for i in (1, 2)
    ]
    monkeypatch.chdir(here)
    assert list_minibatch_files(f"{before}m*.npz")[1] == found
    assert list_minibatch_files(f"{before}m2.npz")[1] == found[1:]


@pytest.mark.parametrize(
    ("head", "inside"),
    [("hdfs://nn:8020", ""), ("hdfs://", ""), ("s3://bucket", "bucket"), ("abfs://b@acc", "b")],
)
def test_listed_files_keep_host_of_url(
    tree: Path, head: str, inside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files keep the host of the URL; ``inside`` is the filesystem's name of its root."""
    place = RemoteFilesystem(tree, inside)
    opened: list[str] = []

    def filesystem_of(url: str) -> tuple[Any, str]:
        opened.append(url)
        return place, f"{inside}{url.removeprefix(head)}".rstrip("/") or "/"[: not inside]

    monkeypatch.setattr(written_batches, "open_filesystem", filesystem_of)
    assert list_minibatch_files(f"{head}/a")[1] == [f"{head}/a/b/m4.npz", f"{head}/a/m3.npz"]
    assert list_minibatch_files(f"{head}/m*.npz")[1] == [f"{head}/m1.npz", f"{head}/m2.npz"]
    assert list_minibatch_files(f"{head}/m1.npz")[1] == [f"{head}/m1.npz"]
    assert all(url.startswith(f"{head}/") for url in opened)


class RemoteFilesystem:
    """A fake filesystem whose root is a local folder, named ``inside``."""

    def __init__(self, folder: Path, inside: str) -> None:
        self._folder, self._inside = str(folder), inside
        self._local = fs.LocalFileSystem()

    def get_file_info(self, wanted: Any) -> Any:
        if isinstance(wanted, str):
            return self._renamed(self._local.get_file_info(self._place(wanted)))
        below = fs.FileSelector(self._place(wanted.base_dir), recursive=wanted.recursive)
        return [self._renamed(one) for one in self._local.get_file_info(below)]

    def _place(self, path: str) -> str:
        return self._folder + path.removeprefix(self._inside)

    def _renamed(self, info: Any) -> Any:
        return fs.FileInfo(self._inside + info.path.removeprefix(self._folder), type=info.type)


def test_rejects_paths_and_files_without_minibatches(tmp_path: Path) -> None:
    """Paths without minibatches, arrays of different lengths and other files are refused."""
    with pytest.raises(UsageError, match=r"neither \.npz nor \.parquet"):
        list_minibatch_files(str(tmp_path / "nowhere"))
    one = save_arrays(tmp_path / "a.npz", features=np.zeros((2, 1)), labels=np.zeros(3))
    with pytest.raises(SetupError, match="of equally many rows"):
        list(read_file_rows([one]))
    (tmp_path / "b.npz").write_bytes(b"PK no")
    with pytest.raises(
        SetupError, match=r"b\.npz cannot be read: it is not an npz file; write it by"
    ):
        list(read_file_rows([str(tmp_path / "b.npz")]))
    (tmp_path / "c.parquet").touch()
    with pytest.raises(UsageError, match="files of both kinds"):
        list_minibatch_files(str(tmp_path))
    for nothing in ([], None, 7):
        with pytest.raises(UsageError, match="paths="):
            list_minibatch_files(cast(Any, nothing))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda whole: whole[:-300], "cannot be read: File is not a zip file"),
        (lambda whole: whole[:300] + b"?" + whole[301:], "cannot be read: Bad CRC-32"),
    ],
)
def test_damaged_minibatch_file_is_named(tmp_path: Path, change: Any, said: str) -> None:
    """A damaged file is named; the executor's BadZipFile alone would not name it."""
    path = save_arrays(tmp_path / "d.npz", features=np.ones((40, 4)), labels=np.ones(40))
    Path(path).write_bytes(change(Path(path).read_bytes()))
    with pytest.raises(SetupError, match=rf"minibatch .*d\.npz {said}"):
        list(read_file_rows([path]))


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"features": 1.0, "labels": 1}, "has no arrays `features` and `labels`"),
        ({"weights": np.ones(2)}, r"has weights of shape \[2\] for 3 rows"),
        ({"weights": 1.0}, r"has weights of shape \[\] for 3 rows"),
    ],
)
def test_rejects_missing_arrays_and_wrong_weights(tmp_path: Path, arrays: Any, said: str) -> None:
    """Arrays that are missing or do not have one entry per row are named."""
    given = {"features": np.ones((3, 2)), "labels": np.zeros(3), **arrays}
    with pytest.raises(SetupError, match=said):
        list(read_file_rows([save_arrays(tmp_path / "n.npz", **given)]))
