"""Tests of checkpoints in a real object store that is unreachable, slow or loses its client."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import pytest

from sparkstrom.base.errors import SetupError
from sparkstrom.checkpoint import files as folders
from sparkstrom.checkpoint.directory import CheckpointDirectory, open_checkpoint
from sparkstrom.checkpoint.files import Checkpoint
from sparkstrom.checkpoint.saved_model import load_model, path_to_load, path_to_save, save_model
from sparkstrom.checkpoint.writer import CheckpointWriter
from sparkstrom.models import DenseNetwork
from tests.integration.checkpoint.tcp_proxy import TcpProxy
from tests.unit.checkpoint.writer_bench import wait_for_writer

URL = "s3://bucket/run/1"
LARGE = 1_700_000  # in float64, three parts of an upload
HALF_OF_IT = 7 << 20

# asyncio reports late errors of aiohttp's connections that the proxy has closed.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "PART_BYTES", 5 << 20)  # S3's smallest


def make_numbered_checkpoint(number: int, size: int = 9) -> Checkpoint:
    return Checkpoint({"number": number}, {"theta": np.full(size, float(number))})


def test_store_keeps_newest_small_and_large_checkpoints(s3: TcpProxy) -> None:
    """Checkpoints with one and with several upload parts are written, read, and removed if old."""
    directory = CheckpointDirectory(URL, 2)
    directory.check()
    assert directory.read_newest(pytest.fail) is None
    paths = []
    for number, size in enumerate((9, LARGE, 9, LARGE)):
        paths.append(directory.write(make_numbered_checkpoint(number, size)))
        directory.remove_old()
    assert paths[0] == f"{URL}/checkpoint-000001.npz"
    newest = CheckpointDirectory(URL).read_newest(pytest.fail)
    assert newest is not None
    assert newest[0] == paths[3]
    np.testing.assert_array_equal(newest[1].arrays["theta"], np.full(LARGE, 3.0))
    assert open_checkpoint(paths[2], pytest.fail)[1].description == {"number": 2}
    with pytest.raises(Exception, match="there is no checkpoint"):
        open_checkpoint(paths[0], pytest.fail)


def test_truncated_object_falls_back_to_previous_checkpoint(s3: TcpProxy) -> None:
    """If the newest checkpoint is truncated, this is reported and the previous one is read."""
    import s3fs

    directory = CheckpointDirectory(URL)
    first, second = (
        directory.write(make_numbered_checkpoint(1)),
        directory.write(make_numbered_checkpoint(2)),
    )
    files = s3fs.S3FileSystem(skip_instance_cache=True)
    files.pipe_file(second, files.cat_file(second)[:-7])
    said: list[str] = []
    newest = directory.read_newest(said.append)
    assert newest is not None
    assert newest[0] == first
    assert said[0].startswith(f"{second} is damaged")


def test_check_rejects_missing_bucket(s3: TcpProxy) -> None:
    with pytest.raises(SetupError, match=r"'s3://bukket/run' cannot be written \(.*bucket"):
        CheckpointDirectory("s3://bukket/run").check()


def test_saving_model_overwrites_object_but_creates_no_bucket(s3: TcpProxy) -> None:
    import s3fs

    for seed in (1, 2):
        model = DenseNetwork([4, 5, 2], seed=seed)
        with path_to_save("s3://bucket/models/net.npz") as path:
            save_model(path, model.describe(), model.initial(), 1)
    with path_to_load("s3://bucket/models/net.npz") as path:
        np.testing.assert_array_equal(load_model(path)[1], model.initial())
    with (
        pytest.raises(SetupError, match=r"s3://bukket/net\.npz cannot be written \(.*bucket"),
        path_to_save("s3://bukket/net.npz") as path,
    ):
        save_model(path, model.describe(), model.initial(), 1)
    assert s3fs.S3FileSystem(skip_instance_cache=True).ls("") == ["bucket"]


def test_unreachable_store_skips_checkpoints_with_one_warning(s3: TcpProxy) -> None:
    """While the store is unreachable, checkpoints fail with one warning; a later one succeeds."""
    said: list[str] = []
    directory = CheckpointDirectory(URL)
    writer = CheckpointWriter(directory, said.append)
    for number, is_away in enumerate((False, True, True, False)):
        s3.shut() if is_away else s3.open()
        writer.offer(lambda number=number: make_numbered_checkpoint(number), f"update {number}")
        wait_for_writer(writer)
    s3.shut()
    writer.close(make_numbered_checkpoint(9))
    assert [one.description["number"] for one in writer.written] == [0, 3]
    assert len(writer.warnings) == 1
    assert "update 1 not written to s3://bucket/run/1 (" in said[0]
    assert "written again, after 2 that failed" in said[1]
    assert writer.unsaved_reason.startswith(
        f"what was learned after {URL}/checkpoint-000002.npz is not saved: the end of the fit"
    )
    with pytest.raises(SetupError, match="wait until the store is back"):
        directory.read_newest(pytest.fail)


def test_interrupted_upload_leaves_no_object(s3: TcpProxy) -> None:
    directory = CheckpointDirectory(URL)
    directory.write(make_numbered_checkpoint(1))
    cut = threading.Thread(target=_shut_after, args=(s3, HALF_OF_IT))
    cut.start()
    with pytest.raises(Exception, match=r"onnection"):
        directory.write(make_numbered_checkpoint(2, LARGE))
    cut.join()
    s3.open()
    newest = CheckpointDirectory(URL).read_newest(pytest.fail)
    assert newest is not None
    assert newest[1].description == {"number": 1}
    assert directory.write(make_numbered_checkpoint(3)).endswith("checkpoint-000002.npz")


def _shut_after(door: TcpProxy, passed_bytes: int) -> None:
    end = door.passed_bytes + passed_bytes
    with door.passed:
        assert door.passed.wait_for(lambda: door.passed_bytes >= end, 60)
    door.shut()


WRITE = """
import sys
import numpy as np
from sparkstrom.checkpoint import files as folders
from sparkstrom.checkpoint.directory import CheckpointDirectory
from sparkstrom.checkpoint.files import Checkpoint
folders.PART_BYTES = 5 << 20
CheckpointDirectory(sys.argv[1]).write(Checkpoint({"number": 2}, {"a": np.ones(int(sys.argv[2]))}))
"""


def test_writer_killed_during_upload_leaves_no_object(s3: TcpProxy) -> None:
    CheckpointDirectory(URL).write(make_numbered_checkpoint(1))
    end = s3.passed_bytes + (HALF_OF_IT)
    with subprocess.Popen([sys.executable, "-c", WRITE, URL, str(LARGE)]) as writer:
        with s3.passed:
            assert s3.passed.wait_for(lambda: s3.passed_bytes >= end, 60)
        writer.kill()
    newest = CheckpointDirectory(URL).read_newest(pytest.fail)
    assert newest is not None
    assert newest[1].description == {"number": 1}


def test_close_waits_for_slow_store_only_until_timeout(s3: TcpProxy) -> None:
    """close() waits for a slow upload only until its timeout, and reports what is unsaved."""
    writer = CheckpointWriter(CheckpointDirectory(URL), print)
    writer.offer(lambda: make_numbered_checkpoint(1), "update 1")
    wait_for_writer(writer)
    s3.delay_s = 1.0
    writer.offer(lambda: make_numbered_checkpoint(2), "update 2")
    assert writer.busy
    writer.close(make_numbered_checkpoint(3), timeout_s=0.2)
    assert writer.unsaved_reason.startswith(
        f"what was learned after {URL}/checkpoint-000001.npz is not saved: writing update 2 takes"
    )
    s3.delay_s = 0.0
    wait_for_writer(writer)
