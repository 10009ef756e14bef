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
from tests.unit.checkpoint.writer_bench import wait_for


def numbered(number: int) -> Checkpoint:
    return Checkpoint({"number": number}, {"theta": np.full(9, number)})


class Store:
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


class Bench:
    """A checkpoint writer with its store and the messages that it reports."""

    def __init__(self, path: Path) -> None:
        self.store: Any = Store(path)
        self.said: list[str] = []
        self.writer = CheckpointWriter(self.store, self.said.append)

    def write(self, number: int) -> None:
        self.writer.offer(lambda: numbered(number), f"update {number}")
        wait_for(self.writer)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Create a writer; at the end, check that its thread ends."""
    bench = Bench(tmp_path)
    yield bench
    bench.store.goes_on.set()
    bench.writer.close(None)
    bench.writer._thread.join(60)
    assert not bench.writer._thread.is_alive()


def test_what_is_offered_is_written_and_told(bench: Bench) -> None:
    """Each offered checkpoint is written and listed, and old ones are removed."""
    for number in range(3):
        bench.write(number)
    bench.writer.close(numbered(3))
    written = bench.writer.written
    assert [one.description for one in written] == [{"number": number} for number in range(4)]
    assert [Path(one.path).name for one in written][-1] == "checkpoint-000004.npz"
    assert all(one.seconds >= 0 for one in written)
    assert (bench.said, bench.writer.warnings, bench.writer.unsaved_reason) == ([], [], "")
    assert len(os.listdir(bench.store.url)) == 2


def test_it_is_busy_while_it_writes_and_the_caller_is_not(bench: Bench) -> None:
    """The checkpoint is made and written in the writer's thread, which is busy in that time."""
    assert not bench.writer.busy
    bench.store.goes_on.clear()
    makers: list[str] = []

    def make() -> Checkpoint:
        makers.append(threading.current_thread().name)
        return numbered(1)

    bench.writer.offer(make, "update 1")
    assert bench.writer.busy
    bench.store.goes_on.set()
    wait_for(bench.writer)
    assert not bench.writer.busy
    assert makers == ["checkpoints"]


def test_a_failure_is_told_once_and_its_end_too(bench: Bench) -> None:
    """A series of failures is reported once, and so is the next success."""
    bench.store.error = FULL
    for number in range(3):
        bench.write(number)
    assert bench.writer.unsaved_reason == (
        f"no checkpoint is saved in {bench.store.url}: "
        "update 2 could not be written (No space left on device)"
    )
    bench.store.error = None
    bench.write(3)
    url = bench.store.url
    assert bench.said == [
        f"checkpoint of update 0 not written to {url} (No space left on device): training"
        " continues, the next one is tried when due",
        f"checkpoints are written again, after 3 that failed: {url}/checkpoint-000001.npz",
    ]
    assert bench.writer.warnings == bench.said[:1]
    assert bench.writer.unsaved_reason == ""


def test_after_a_success_another_reason_is_told_and_the_same_one_is_not(bench: Bench) -> None:
    """A reason that recurs after a success is not reported again, but another reason is."""
    for error in (FULL, None, FULL, None, READ_ONLY, FULL):
        bench.store.error = error
        bench.write(0)
    assert len(bench.writer.warnings) == 2
    assert "(No space left on device)" in bench.writer.warnings[0]
    assert "(Read-only file system)" in bench.writer.warnings[1]


def test_stores_words_that_change_are_one_reason(bench: Bench) -> None:
    """Errors that differ only in their text count as one reason."""
    for number in range(3):
        bench.store.error = RuntimeError(f"request {number} refused\nwith a long story")
        bench.write(number)
        bench.store.error = None
        bench.write(number)
    assert len(bench.writer.warnings) == 1
    assert "(RuntimeError: request 0 refused)" in bench.writer.warnings[0]


def test_what_is_not_saved_at_the_end_is_said(bench: Bench) -> None:
    """If the last write fails, the reason names the checkpoint after which changes are lost."""
    bench.write(1)
    bench.store.error = READ_ONLY
    bench.writer.close(numbered(2))
    assert bench.writer.unsaved_reason == (
        f"what was learned after {bench.store.url}/checkpoint-000001.npz is not saved: "
        "the end of the fit could not be written (Read-only file system)"
    )


def test_a_failure_before_the_last_one_is_made_up_for(bench: Bench) -> None:
    """An earlier failure is of no consequence if the last write succeeds."""
    bench.store.error = FULL
    bench.write(1)
    bench.store.error = None
    bench.writer.close(numbered(2))
    assert bench.writer.unsaved_reason == ""
    assert [one.description for one in bench.writer.written] == [{"number": 2}]


@pytest.mark.parametrize("is_under_way", [False, True])
def test_a_store_that_hangs_holds_the_end_up_for_a_while(bench: Bench, is_under_way: bool) -> None:
    """``close`` waits for a store that hangs only until its timeout."""
    bench.store.goes_on.clear()
    if is_under_way:
        bench.writer.offer(lambda: numbered(1), "update 1")
    bench.writer.close(numbered(2), timeout_s=0.01)
    what = "update 1" if is_under_way else "the end of the fit"
    assert bench.writer.unsaved_reason == (
        f"no checkpoint is saved in {bench.store.url}: writing {what} takes more than 0 s"
    )
    assert bench.writer._thread.daemon


def test_old_ones_that_cannot_be_removed_are_no_failure_to_save(bench: Bench) -> None:
    """A failure to remove old checkpoints is a warning; the new ones count as saved."""
    bench.store.removing_error = PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    for number in range(4):
        bench.write(number)
    assert bench.writer.warnings == [
        f"old checkpoints in {bench.store.url} cannot be removed (Permission denied): they stay"
    ]
    assert (len(bench.writer.written), bench.writer.unsaved_reason) == (4, "")


def test_a_checkpoint_that_cannot_be_made_is_not_saved(bench: Bench) -> None:
    """A checkpoint whose creation raises an error counts as not saved."""

    def make() -> Checkpoint:
        raise ValueError("no parameters yet")

    bench.writer.offer(make, "update 1")
    wait_for(bench.writer)
    assert (
        "update 1 could not be written (ValueError: no parameters yet)"
        in bench.writer.unsaved_reason
    )


def test_one_at_a_time_and_none_after_the_end(bench: Bench) -> None:
    """A second offer while one is written, or an offer after ``close``, is a bug."""
    bench.store.goes_on.clear()
    bench.writer.offer(lambda: numbered(1), "update 1")
    with pytest.raises(AssertionError, match="one checkpoint at a time"):
        bench.writer.offer(lambda: numbered(2), "update 2")
    bench.store.goes_on.set()
    bench.writer.close(None)
    with pytest.raises(AssertionError, match="closed"):
        bench.writer.offer(lambda: numbered(3), "update 3")
