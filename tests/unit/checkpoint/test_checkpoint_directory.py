"""Tests of checkpoint directories, local and remote: numbers, which files stay, and the newest."""

from __future__ import annotations

import errno
import itertools
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from sparkstrom.base.errors import CheckpointDamaged, SetupError, UsageError
from sparkstrom.checkpoint import files as checkpoint_file
from sparkstrom.checkpoint.directory import CheckpointDirectory, open_checkpoint
from sparkstrom.checkpoint.files import Checkpoint, RemoteFolder, open_folder, temporary_name

FRESH = itertools.count()


def make_checkpoint(number: int) -> Checkpoint:
    return Checkpoint({"number": number}, {"theta": np.full(9, number)})


def fail_on_message(text: str) -> None:
    """Fail the test, because no message was expected."""
    raise AssertionError(f"nothing was to be said: {text}")


@pytest.fixture(params=["local", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return a new directory's URL, in a local and in an in-memory file system."""
    return str(tmp_path / "a" / "b") if request.param == "local" else f"memory://{next(FRESH)}/b"


def list_names(url: str) -> list[str]:
    files, path = fsspec.core.url_to_fs(url)
    return sorted(found.rsplit("/", 1)[-1] for found in files.ls(path, detail=False))


def change_file(path: str, how: Callable[[bytes], bytes]) -> None:
    """Replace a file's content by a function of it."""
    with fsspec.open(path, "rb") as file:
        content = file.read()
    with fsspec.open(path, "wb") as file:
        file.write(how(content))


def test_names_sort_in_writing_order_across_restarts(url: str) -> None:
    """Names sort in the order of writing, which a new program continues."""
    directory = CheckpointDirectory(url, 9)
    assert directory.read_newest(fail_on_message) is None
    paths = [directory.write(make_checkpoint(number)) for number in range(9)]
    paths += [CheckpointDirectory(url, 9).write(make_checkpoint(number)) for number in (9, 10)]
    assert paths == sorted(paths)
    assert [path.rsplit("/", 1)[1] for path in paths[-2:]] == [
        "checkpoint-000010.npz",
        "checkpoint-000011.npz",
    ]
    newest = directory.read_newest(fail_on_message)
    assert newest is not None
    assert newest[0] == paths[-1]
    assert newest[1].description == {"number": 10}


def test_seven_digit_number_is_newer_than_six_digits(url: str) -> None:
    """A checkpoint with a number of seven digits is newer than one with six."""
    directory = CheckpointDirectory(url, 9)
    first = directory.write(make_checkpoint(0))
    files, _ = fsspec.core.url_to_fs(url)
    files.mv(first, first.replace("000001", "999999"))
    assert directory.write(make_checkpoint(1)).endswith("checkpoint-1000000.npz")
    assert directory.write(make_checkpoint(2)).endswith("checkpoint-1000001.npz")
    newest = directory.read_newest(fail_on_message)
    assert newest is not None
    assert newest[1].description == {"number": 2}


@pytest.mark.parametrize("keep_last", [1, 3])
def test_remove_old_keeps_newest_keep_last_checkpoints(url: str, keep_last: int) -> None:
    """After each removal the newest ``keep_last`` checkpoints are left."""
    for number in range(6):
        directory = CheckpointDirectory(url, keep_last)  # a restart each time
        directory.write(make_checkpoint(number))
        directory.remove_old()
    kept = range(7 - keep_last, 7)
    assert list_names(url) == [f"checkpoint-{number:06d}.npz" for number in kept]


def test_files_with_other_names_are_not_read_or_removed(url: str) -> None:
    """Files with other names are not read or removed."""
    files, path = fsspec.core.url_to_fs(url)
    files.makedirs(path)
    others = ["checkpoint-1.npz", "checkpoint-000001.npz.json", "notes.txt", ".other.tmp"]
    for other in others:
        files.pipe_file(f"{path}/{other}", b"mine")
    directory = CheckpointDirectory(url, 1)
    assert directory.read_newest(fail_on_message) is None
    for number in range(3):
        directory.write(make_checkpoint(number))
        directory.remove_old()
    assert list_names(url) == sorted([*others, "checkpoint-000003.npz"])


@pytest.mark.parametrize(
    "harm",
    [
        lambda content: b"",
        lambda content: content[: len(content) // 2],
        lambda content: content[:-1],
        lambda content: content[:100] + bytes([content[100] ^ 4]) + content[101:],
    ],
)
def test_damaged_newest_falls_back_to_intact_one_with_report(
    url: str, harm: Callable[[bytes], bytes]
) -> None:
    """If the newest checkpoints are damaged, the newest intact one is read and each is reported."""
    directory = CheckpointDirectory(url, 2)
    paths = [directory.write(make_checkpoint(number)) for number in range(3)]
    for path in paths[1:]:
        change_file(path, harm)
    said: list[str] = []
    newest = CheckpointDirectory(url, 2).read_newest(said.append)
    assert newest is not None
    assert newest[0] == paths[0]
    assert newest[1].description == {"number": 0}
    assert [text.split(" is damaged: ")[0] for text in said] == [paths[2], paths[1]]
    assert all(text.endswith("; using the checkpoint before it") for text in said)


def test_damaged_checkpoints_stay_beyond_keep_last(url: str) -> None:
    """Damaged checkpoints are not removed and do not count for ``keep_last``."""
    directory = CheckpointDirectory(url, 2)
    paths = [directory.write(make_checkpoint(number)) for number in range(3)]
    change_file(paths[1], lambda content: content[:-1])
    directory = CheckpointDirectory(url, 2)
    assert (
        directory.read_newest(fail_on_message) is not None
    )  # the damaged one is older, so it was not read
    for number in range(3, 7):
        directory.write(make_checkpoint(number))
        directory.remove_old()
        kept = {f"checkpoint-{number + add:06d}.npz" for add in (0, 1)}
        assert set(list_names(url)) == kept | {"checkpoint-000002.npz"}


def test_number_of_damaged_newest_checkpoint_is_not_reused(url: str) -> None:
    directory = CheckpointDirectory(url)
    change_file(directory.write(make_checkpoint(0)), lambda content: b"")
    assert CheckpointDirectory(url).write(make_checkpoint(1)).endswith("checkpoint-000002.npz")


def test_read_newest_returns_none_if_all_are_damaged(url: str) -> None:
    """If all checkpoints are damaged, ``read_newest`` returns None."""
    directory = CheckpointDirectory(url)
    change_file(directory.write(make_checkpoint(0)), lambda content: b"")
    said: list[str] = []
    assert directory.read_newest(said.append) is None
    assert len(said) == 1


def test_newest_checkpoint_of_newer_format_raises_usage_error(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newest checkpoint of a newer format raises an error; older ones are not used."""
    directory = CheckpointDirectory(url)
    directory.write(make_checkpoint(0))
    with monkeypatch.context() as newer:
        newer.setattr(checkpoint_file, "FORMAT", 2)
        directory.write(make_checkpoint(1))
    with pytest.raises(UsageError, match=r"checkpoint-000002.npz has checkpoint format 2"):
        directory.read_newest(fail_on_message)


def test_two_local_writers_never_overwrite_checkpoints(tmp_path: Path) -> None:
    """Two writers in one local directory never overwrite each other's checkpoints."""
    written: list[tuple[str, int]] = []

    def write(first: int) -> None:
        directory = CheckpointDirectory(tmp_path, 99)
        written.extend((directory.write(make_checkpoint(n)), n) for n in range(first, first + 20))

    writers = [threading.Thread(target=write, args=(first,)) for first in (0, 100)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len({path for path, _ in written}) == 40
    for path, number in written:
        assert open_checkpoint(path, fail_on_message)[1].description == {"number": number}
    assert len(list_names(str(tmp_path))) == 40


def test_only_unfinished_file_of_dead_writer_is_removed(tmp_path: Path) -> None:
    """The unfinished file of a dead writer is removed, that of a running writer is not."""
    dead = tmp_path / temporary_name("checkpoint-000001.npz")
    dead.write_bytes(b"half")
    begun, go_on = threading.Event(), threading.Event()

    def fill(file: Any) -> None:
        begun.set()
        assert go_on.wait(60)
        file.write(b"whole")

    folder = open_folder(tmp_path)
    writer = threading.Thread(target=folder.put, args=("checkpoint-000007.npz", fill))
    writer.start()
    assert begun.wait(60)
    CheckpointDirectory(tmp_path).write(make_checkpoint(0))
    left = list_names(str(tmp_path))
    go_on.set()
    writer.join()
    assert left == [temporary_name("checkpoint-000007.npz"), "checkpoint-000001.npz"]
    assert (tmp_path / "checkpoint-000007.npz").read_bytes() == b"whole"


@pytest.mark.parametrize("prefix", ["", "file:", "file://"])
def test_local_directory_name_may_contain_url_characters(prefix: str, tmp_path: Path) -> None:
    """A local name may contain characters of fsspec's URLs; before, it was cut at ``::``."""
    for name in ("run::lr=0.1", "run#1?%20"):
        directory = CheckpointDirectory(f"{prefix}{tmp_path}/{name}")
        directory.write(make_checkpoint(0))
        assert directory.location == str(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run#1?%20", "run::lr=0.1"]


def test_url_that_fsspec_would_truncate_raises_usage_error() -> None:
    with pytest.raises(UsageError, match=r"fsspec ignores '::lr=0\.1' at its end: use a name"):
        open_folder("memory://runs/run::lr=0.1")


@pytest.mark.parametrize("refused", ["open", "unlink"])
def test_unfinished_file_of_other_user_does_not_prevent_write(
    refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user's unfinished file may be unreadable, and may have the next checkpoint's name."""
    left = tmp_path / temporary_name("checkpoint-000001.npz")
    left.write_bytes(b"half")
    calls: dict[str, Any] = {"open": os.open, "unlink": os.unlink}

    def refuse(path: Any, *more: Any, **named: Any) -> Any:
        if Path(path) == left and not (more and more[0] & os.O_CREAT):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return calls[refused](path, *more, **named)

    monkeypatch.setattr(os, refused, refuse)
    directory = CheckpointDirectory(tmp_path)
    directory.check()
    assert directory.write(make_checkpoint(0)).endswith("checkpoint-000002.npz")
    assert left.read_bytes() == b"half"


def test_next_remote_write_removes_unfinished_file() -> None:
    """In a remote file system, the next write removes a dead writer's unfinished file."""
    url = f"memory://{next(FRESH)}"
    files, path = fsspec.core.url_to_fs(url)
    files.pipe_file(f"{path}/{temporary_name('checkpoint-000001.npz.ab')}", b"half")
    CheckpointDirectory(url).write(make_checkpoint(0))
    assert list_names(url) == ["checkpoint-000001.npz"]


def test_unremovable_remote_unfinished_file_does_not_prevent_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a remote file system, an unfinished file that cannot be removed prevents no write."""
    url = f"memory://{next(FRESH)}"
    files, path = fsspec.core.url_to_fs(url)
    left = temporary_name("checkpoint-000001.npz.ab")
    files.pipe_file(f"{path}/{left}", b"half")

    removes = type(files).rm_file

    def refuse(files: Any, path: str) -> Any:
        if path.endswith(left):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return removes(files, path)

    monkeypatch.setattr(type(files), "rm_file", refuse)
    CheckpointDirectory(url).write(make_checkpoint(0))
    assert sorted(list_names(url)) == [left, "checkpoint-000001.npz"]


def write_half_and_fail(file: Any) -> None:
    file.write(b"half")
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_failed_write_leaves_no_file(url: str) -> None:
    folder = open_folder(url)
    folder.create()
    with pytest.raises(OSError, match="No space left"):
        folder.put("x", write_half_and_fail)
    assert list_names(url) == []


def test_failed_object_store_write_discards_upload() -> None:
    """After a failed write, the upload to an object store is discarded and not closed."""
    discarded: list[str] = []

    class Upload:
        def write(self, data: bytes) -> int:
            return len(data)

        def discard(self) -> None:
            discarded.append("upload")
            raise ConnectionError("the store is away")

        def close(self) -> None:
            raise AssertionError("closing completes it")

    class Store:
        def invalidate_cache(self, path: str) -> None: ...
        def exists(self, path: str) -> bool:
            return False

        def open(self, path: str, mode: str, block_size: int) -> Upload:
            return Upload()

    with pytest.raises(OSError, match="No space left"):
        RemoteFolder(Store(), "bucket/x", appears_whole=True).put("x", write_half_and_fail)
    assert discarded == ["upload"]


def test_open_checkpoint_accepts_file_or_directory(url: str) -> None:
    """A checkpoint is opened by its file, or by its directory, which gives the newest."""
    directory = CheckpointDirectory(url)
    first, second = directory.write(make_checkpoint(1)), directory.write(make_checkpoint(2))
    for path, want in ((first, 1), (second, 2), (url, 2), (url + "/", 2)):
        found, checkpoint = open_checkpoint(path, fail_on_message)
        assert found == (first if want == 1 else second)
        assert checkpoint.description == {"number": want}
    change_file(first, lambda content: content[:-3])
    with pytest.raises(CheckpointDamaged, match=r"checkpoint-000001.npz is damaged"):
        open_checkpoint(first, fail_on_message)


def test_relative_paths_resolve_in_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative paths are resolved in the current directory when they are given."""
    monkeypatch.chdir(tmp_path)
    path = CheckpointDirectory("here").write(make_checkpoint(1))
    assert path == str(tmp_path / "here" / "checkpoint-000001.npz")
    monkeypatch.chdir(tmp_path / "here")
    for named in ("checkpoint-000001.npz", Path("../here"), f"file://{path}"):
        assert open_checkpoint(named, fail_on_message)[0] == path


def test_missing_checkpoint_raises_usage_error(tmp_path: Path) -> None:
    """A directory without checkpoints and a missing file raise ``UsageError``."""
    with pytest.raises(UsageError, match=r"contains no checkpoint: name a checkpoint file"):
        open_checkpoint(tmp_path, fail_on_message)
    for missing in (tmp_path / "x.npz", "memory://nothing/x.npz"):
        with pytest.raises(UsageError, match=r"there is no checkpoint '.*x.npz'"):
            open_checkpoint(missing, fail_on_message)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("", "a path or a URL, and '' is neither"),
        ("nfs4x://host/x", r"no file system for checkpoint directory 'nfs4x://host/x' \(.*nfs4x\)"),
        ("gs://bucket/x", r"'gs://bucket/x' needs a package .*pip install"),
    ],
)
def test_url_of_unknown_file_system_raises_usage_error(
    url: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A URL without a known or installed file system raises ``UsageError``."""
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(UsageError, match=words):
        CheckpointDirectory(url)


def test_keep_last_zero_raises_usage_error() -> None:
    with pytest.raises(UsageError, match="keep_last is 0"):
        CheckpointDirectory("x", 0)


def test_check_creates_directory_and_leaves_no_file(url: str) -> None:
    """``check`` creates the directory and leaves no file in it."""
    CheckpointDirectory(url).check()
    assert list_names(url) == []


def test_check_raises_setup_error_for_file_as_directory(tmp_path: Path) -> None:
    """``check`` raises ``SetupError`` if the directory is a file, or is inside a file."""
    (tmp_path / "x").write_text("a file")
    for path in (tmp_path / "x", tmp_path / "x" / "y"):
        with pytest.raises(SetupError, match=r"checkpoint directory '.*' cannot be written \("):
            CheckpointDirectory(path).check()
    with pytest.raises(SetupError, match=r"cannot be read \(Not a directory\)"):
        CheckpointDirectory(tmp_path / "x").read_newest(fail_on_message)


def test_put_with_existing_name_raises_file_exists_error(url: str) -> None:
    """Writing a file with an existing name raises ``FileExistsError``."""
    folder = open_folder(url)
    folder.create()
    folder.put("x", lambda file: file.write(b"first"))
    with pytest.raises(FileExistsError):
        folder.put("x", lambda file: file.write(b"second"))
    with folder.open("x") as file:
        assert file.read() == b"first"
    assert list_names(url) == ["x"]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_pipe_or_directory_named_like_checkpoint_is_skipped(
    tmp_path: Path, make: Callable[[Path], None]
) -> None:
    """A pipe or directory with a checkpoint's name is skipped and reported as damaged."""
    directory = CheckpointDirectory(tmp_path)
    path = directory.write(make_checkpoint(1))
    make(tmp_path / "checkpoint-000009.npz")
    said: list[str] = []
    found = directory.read_newest(said.append)
    assert found is not None
    assert found[0] == path
    assert "checkpoint-000009.npz is damaged: it is not a regular file" in said[0]
    with pytest.raises(CheckpointDamaged, match="not a regular file"):
        open_checkpoint(tmp_path / "checkpoint-000009.npz", fail_on_message)
    directory.write(make_checkpoint(2))


def test_link_named_like_unfinished_file_stays_untouched(tmp_path: Path) -> None:
    """A link with an unfinished file's name is neither followed nor removed."""
    (tmp_path / "victim").write_text("precious")
    planted = tmp_path / temporary_name("checkpoint-000005.npz")
    planted.symlink_to(tmp_path / "victim")
    CheckpointDirectory(tmp_path).write(make_checkpoint(1))
    assert planted.is_symlink()
    assert (tmp_path / "victim").read_text() == "precious"
