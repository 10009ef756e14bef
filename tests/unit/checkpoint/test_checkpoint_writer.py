"""Tests of the checkpoint writer: training doesn't wait for it, and failed writes do not end it."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkstrom.checkpoint.directory import CheckpointDirectory
from sparkstrom.checkpoint.files import Checkpoint
from sparkstrom.checkpoint.writer import CheckpointWriter
from tests.unit.checkpoint.writer_bench import wait_for_writer


def make_checkpoint(number: int) -> Checkpoint:
    return Checkpoint({"number": number}, {"theta": np.full(9, number)})


class FaultyStore:
    """A checkpoint directory whose writes fail or wait on demand."""

    def __init__(self, path: Path) -> None:
        self.real, self.url = CheckpointDirectory(path, 2), str(path)
        self.error: Exception | None = None
        self.removing_error: Exception | None = None
        self.goes_on = threading.Event()
        self.goes_on.set()

    def write(self, checkpoint: Checkpoint) -> str:
        assert self.goes_on.wait(60)
        if self.error is not None:
            raise self.error
        return self.real.write(checkpoint)

    def remove_old(self) -> None:
        if self.removing_error is not None:
            raise self.removing_error
        self.real.remove_old()


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
READ_ONLY = OSError(errno.EROFS, os.strerror(errno.EROFS))


class WriterHarness:
    """A checkpoint writer with its store and the messages that it reports."""

    def __init__(self, path: Path) -> None:
        self.store: Any = FaultyStore(path)
        self.said: list[str] = []
        self.writer = CheckpointWriter(self.store, self.said.append)

    def write(self, number: int) -> None:
        self.writer.offer(lambda: make_checkpoint(number), f"update {number}")
        wait_for_writer(self.writer)


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[WriterHarness]:
    """Create a writer; at the end, check that its thread ends."""
    bench = WriterHarness(tmp_path)
    yield bench
    bench.store.goes_on.set()
    bench.writer.close(None)
    bench.writer._thread.join(60)
    assert not bench.writer._thread.is_alive()


def test_offered_checkpoints_are_written_and_listed(harness: WriterHarness) -> None:
    """Each offered checkpoint is written and listed, and old ones are removed."""
    for number in range(3):
        harness.write(number)
    harness.writer.close(make_checkpoint(3))
    written = harness.writer.written
    assert [one.description for one in written] == [{"number": number} for number in range(4)]
    assert [Path(one.path).name for one in written][-1] == "checkpoint-000004.npz"
    assert all(one.seconds >= 0 for one in written)
    assert (harness.said, harness.writer.warnings, harness.writer.unsaved_reason) == ([], [], "")
    assert len(os.listdir(harness.store.url)) == 2


def test_checkpoint_is_made_and_written_in_writer_thread(harness: WriterHarness) -> None:
    """The checkpoint is made and written in the writer's thread, which is busy in that time."""
    assert not harness.writer.busy
    harness.store.goes_on.clear()
    makers: list[str] = []

    def make() -> Checkpoint:
        makers.append(threading.current_thread().name)
        return make_checkpoint(1)

    harness.writer.offer(make, "update 1")
    assert harness.writer.busy
    harness.store.goes_on.set()
    wait_for_writer(harness.writer)
    assert not harness.writer.busy
    assert makers == ["checkpoints"]


def test_series_of_failures_and_next_success_are_reported_once(harness: WriterHarness) -> None:
    """A series of failures is reported once, and so is the next success."""
    harness.store.error = FULL
    for number in range(3):
        harness.write(number)
    assert harness.writer.unsaved_reason == (
        f"no checkpoint is saved in {harness.store.url}: "
        "update 2 could not be written (No space left on device)"
    )
    harness.store.error = None
    harness.write(3)
    url = harness.store.url
    assert harness.said == [
        f"checkpoint of update 0 not written to {url} (No space left on device): training"
        " continues, the next one is tried when due",
        f"checkpoints are written again, after 3 that failed: {url}/checkpoint-000001.npz",
    ]
    assert harness.writer.warnings == harness.said[:1]
    assert harness.writer.unsaved_reason == ""


def test_only_new_failure_reason_is_reported_after_success(harness: WriterHarness) -> None:
    """A reason that recurs after a success is not reported again, but another reason is."""
    for error in (FULL, None, FULL, None, READ_ONLY, FULL):
        harness.store.error = error
        harness.write(0)
    assert len(harness.writer.warnings) == 2
    assert "(No space left on device)" in harness.writer.warnings[0]
    assert "(Read-only file system)" in harness.writer.warnings[1]


def test_errors_differing_only_in_text_count_as_one_reason(harness: WriterHarness) -> None:
    """Errors that differ only in their text count as one reason."""
    for number in range(3):
        harness.store.error = RuntimeError(f"request {number} refused\nwith a long story")
        harness.write(number)
        harness.store.error = None
        harness.write(number)
    assert len(harness.writer.warnings) == 1
    assert "(RuntimeError: request 0 refused)" in harness.writer.warnings[0]


def test_failed_last_write_names_last_saved_checkpoint(harness: WriterHarness) -> None:
    """If the last write fails, the reason names the checkpoint after which changes are lost."""
    harness.write(1)
    harness.store.error = READ_ONLY
    harness.writer.close(make_checkpoint(2))
    assert harness.writer.unsaved_reason == (
        f"what was learned after {harness.store.url}/checkpoint-000001.npz is not saved: "
        "the end of the fit could not be written (Read-only file system)"
    )


def test_successful_last_write_clears_earlier_failure(harness: WriterHarness) -> None:
    """An earlier failure is of no consequence if the last write succeeds."""
    harness.store.error = FULL
    harness.write(1)
    harness.store.error = None
    harness.writer.close(make_checkpoint(2))
    assert harness.writer.unsaved_reason == ""
    assert [one.description for one in harness.writer.written] == [{"number": 2}]


@pytest.mark.parametrize("is_under_way", [False, True])
def test_close_waits_for_hanging_store_only_until_timeout(
    harness: WriterHarness, is_under_way: bool
) -> None:
    """``close`` waits for a store that hangs only until its timeout."""
    harness.store.goes_on.clear()
    if is_under_way:
        harness.writer.offer(lambda: make_checkpoint(1), "update 1")
    harness.writer.close(make_checkpoint(2), timeout_s=0.01)
    what = "update 1" if is_under_way else "the end of the fit"
    assert harness.writer.unsaved_reason == (
        f"no checkpoint is saved in {harness.store.url}: writing {what} takes more than 0 s"
    )
    assert harness.writer._thread.daemon


def test_failed_removal_of_old_checkpoints_only_warns(harness: WriterHarness) -> None:
    """A failure to remove old checkpoints is a warning; the new ones count as saved."""
    harness.store.removing_error = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    for number in range(4):
        harness.write(number)
    assert harness.writer.warnings == [
        f"old checkpoints in {harness.store.url} cannot be removed (Permission denied): they stay"
    ]
    assert (len(harness.writer.written), harness.writer.unsaved_reason) == (4, "")


def test_checkpoint_whose_creation_fails_counts_as_unsaved(harness: WriterHarness) -> None:
    """A checkpoint whose creation raises an error counts as not saved."""

    def make() -> Checkpoint:
        raise ValueError("no parameters yet")

    harness.writer.offer(make, "update 1")
    wait_for_writer(harness.writer)
    assert (
        "update 1 could not be written (ValueError: no parameters yet)"
        in harness.writer.unsaved_reason
    )


def test_offer_while_writing_or_after_close_raises(harness: WriterHarness) -> None:
    """A second offer while one is written, or an offer after ``close``, is a bug."""
    harness.store.goes_on.clear()
    harness.writer.offer(lambda: make_checkpoint(1), "update 1")
    with pytest.raises(AssertionError, match="one checkpoint at a time"):
        harness.writer.offer(lambda: make_checkpoint(2), "update 2")
    harness.store.goes_on.set()
    harness.writer.close(None)
    with pytest.raises(AssertionError, match="closed"):
        harness.writer.offer(lambda: make_checkpoint(3), "update 3")
