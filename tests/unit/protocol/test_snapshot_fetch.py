"""Tests of ``SnapshotFetch``: chunks that are requested, kept or dropped, and its completion."""

from __future__ import annotations

from typing import Any

from sparkstrom.protocol.common.commit_log import Log
from sparkstrom.protocol.worker.replication import ASKED_AT_ONCE, SnapshotFetch

PLENTY, ONE = 10**6, 1  # bytes: room for all commits of these tests, or for the newest alone


def test_each_chunk_is_requested_once_a_few_at_a_time(make: Any) -> None:
    """Each chunk is requested once, however long it takes: it arrives or its stream is gone."""
    catchup = SnapshotFetch(Log(PLENTY), 10, 0.0)
    assert catchup.next_requests() == list(range(ASKED_AT_ONCE))
    assert catchup.next_requests() == []
    catchup.add_chunk(make.chunk(0, 1), 60.0)
    assert catchup.next_requests() == [ASKED_AT_ONCE]
    assert catchup.next_requests() == []


def test_fetch_is_ready_with_all_chunks_and_commits_inside_them(make: Any) -> None:
    held = Log(PLENTY, base=3)
    catchup = SnapshotFetch(held, 2, 0.0)
    catchup.add_chunk(make.chunk(3, 0), 0.0)
    assert not catchup.ready(0.0)
    catchup.add_chunk(make.chunk(5, 1), 0.0)
    held.append(make.committed(4))
    assert not catchup.ready(0.0)
    held.append(make.committed(5))
    assert catchup.ready(0.0)
    assert [chunk.commit for chunk in catchup.chunks] == [3, 5]
    assert [entry.commit for entry in catchup.held] == [4, 5]


def append_commits(catchup: SnapshotFetch, held: Log, *commits: Any) -> None:
    """Append commits to the log while the fetch is running."""
    for commit in commits:
        held.append(commit)
    catchup.drop_useless_chunks()


def test_chunk_older_than_log_is_requested_again(make: Any) -> None:
    """A chunk is requested again if the log no longer has all commits after it."""
    held = Log(ONE)
    catchup = SnapshotFetch(held, 2, 0.0)
    catchup.add_chunk(make.chunk(0, 0), 0.0)
    catchup.add_chunk(make.chunk(1, 1), 0.0)
    append_commits(catchup, held, make.committed(1), make.committed(2))
    assert not catchup.ready(0.0)
    assert catchup.next_requests() == [0]
    catchup.add_chunk(make.chunk(0, 0), 0.0)
    assert catchup.next_requests() == [0]
    catchup.add_chunk(make.chunk(2, 0), 0.0)
    assert catchup.ready(0.0)


def test_chunk_with_index_beyond_last_is_ignored(make: Any) -> None:
    catchup = SnapshotFetch(Log(ONE), 1, 0.0)
    catchup.add_chunk(make.chunk(0, 1), 0.0)
    assert not catchup.ready(0.0)


def test_progress_requires_more_chunks_than_ever_before(make: Any) -> None:
    """Progress means to hold more chunks than ever before, also in a replaced fetch."""
    held = Log(ONE)
    catchup = SnapshotFetch(held, 3, 0.0)
    catchup.add_chunk(make.chunk(0, 0), 1.0)
    catchup.add_chunk(make.chunk(0, 1), 2.0)
    assert catchup.progress_s == 2.0
    append_commits(
        catchup, held, make.committed(1), make.committed(2)
    )  # both chunks are too old now
    catchup.add_chunk(make.chunk(2, 0), 3.0)
    catchup.add_chunk(make.chunk(2, 1), 4.0)
    assert catchup.progress_s == 2.0
    again = SnapshotFetch(Log(ONE, base=9), 3, 5.0, catchup)
    again.add_chunk(make.chunk(9, 0), 6.0)
    assert again.progress_s == 2.0


def test_complete_snapshot_restarts_deadline_while_trainer_is_awaited(make: Any) -> None:
    """When the snapshot is complete and only the trainer is awaited, the deadline is restarted."""
    catchup = SnapshotFetch(Log(ONE), 1, 0.0)
    catchup.add_chunk(make.chunk(0, 0), 1.0)
    assert catchup.ready(50.0)
    assert catchup.progress_s == 50.0


def test_resume_requests_only_missing_chunks_from_new_parent(make: Any) -> None:
    """Chunks of the old parent are kept; only missing ones are requested from the new one."""
    catchup = SnapshotFetch(Log(PLENTY), 3, 0.0)
    catchup.next_requests()
    catchup.add_chunk(make.chunk(0, 1), 0.1)
    catchup.resume()
    assert catchup.next_requests() == [0, 2]


def test_chunk_with_part_of_sum_is_requested_again(make: Any) -> None:
    """A chunk is useless if it contains part of a sum; with none or all of it, it is kept."""
    held = Log(PLENTY, base=3)
    catchup = SnapshotFetch(held, 4, 0.0)
    catchup.next_requests()
    for index, commit in enumerate((3, 4, 5, 8)):
        catchup.add_chunk(make.chunk(commit, index), 0.0)
    append_commits(catchup, held, make.committed(4), make.merged(4, 8))
    assert catchup.next_requests() == [2]
    catchup.add_chunk(make.chunk(6, 2), 0.0)  # the parent sent it before it sent the sum
    assert catchup.next_requests() == [2]
    assert not catchup.ready(0.0)
    catchup.add_chunk(make.chunk(8, 2), 0.0)
    assert catchup.ready(0.0)
    assert [chunk.commit for chunk in catchup.chunks] == [3, 4, 8, 8]
    assert [entry.commit for entry in catchup.held] == [4, 8]
