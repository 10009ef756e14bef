"""Tests of ``Log`` and ``History``: what is kept, and from which commits a replica can continue."""

from __future__ import annotations

from typing import Any

import pytest

from sparkstrom.protocol.common.commit_log import (
    History,
    Log,
    entry_bytes,
    last_seqs_of,
    preceding_commit,
)
from sparkstrom.protocol.common.flow_control import HEADER_BYTES

ONE = HEADER_BYTES + 4  # size of one commit of these tests
PLENTY = 10**6


def filled(make: Any, count: int, bytes_max: int = PLENTY) -> Log:
    """Return a log to which ``count`` commits were appended."""
    log = Log(bytes_max)
    for commit in range(1, count + 1):
        log.append(make.committed(commit))
    return log


def commits(entries: Any) -> list[int]:
    """Return the commit number of each entry."""
    return [entry.commit for entry in entries]


# -- the log -----------------------------------------------------------------------------------


def test_full_log_drops_oldest_commits(make: Any) -> None:
    log = filled(make, 5, 3 * ONE)
    assert (log.base, log.head, log.bytes) == (2, 5, 3 * ONE)
    assert [log.reaches(commit) for commit in (1, 2, 5)] == [False, True, True]
    assert commits(log.entries_after(3)) == [4, 5]
    assert log.entry_after(3).commit == 4


def test_log_accepts_commit_larger_than_its_limit(make: Any) -> None:
    log = Log(1)
    log.append(make.committed(1, payload=b"x" * 100))
    assert (log.base, log.head) == (0, 1)
    log.append(make.committed(2))
    assert (log.base, log.head, log.bytes) == (1, 2, entry_bytes(make.committed(2)))


@pytest.mark.parametrize("entry", [("committed", 4), ("merged", 3, 5), ("merged", 1, 4)])
def test_append_with_gap_or_overlap_fails(make: Any, entry: tuple[Any, ...]) -> None:
    kind, *numbers = entry
    with pytest.raises(AssertionError, match="no gaps"):
        filled(make, 2).append(getattr(make, kind)(*numbers))


def test_bytes_after_is_size_of_later_entries(make: Any) -> None:
    """``bytes_after`` is the size of all entries after a commit."""
    log = filled(make, 5, 3 * ONE)
    assert [log.bytes_after(commit) for commit in (2, 3, 5, 9)] == [3 * ONE, 2 * ONE, 0, 0]


def test_log_does_not_reach_commits_inside_sum(make: Any) -> None:
    """The log reaches back to the boundaries of a sum, but not to commits inside it."""
    log = filled(make, 2)
    log.append(make.merged(2, 5))
    log.append(make.committed(6))
    assert [log.reaches(commit) for commit in range(7)] == [True] * 3 + [False] * 2 + [True] * 2
    assert commits(log.entries_after(1)) == [2, 5, 6]
    assert preceding_commit(log.entry_after(2)) == 2


def test_full_log_drops_whole_sum(make: Any) -> None:
    """A sum is dropped from a full log as a whole."""
    log = Log(2 * ONE)
    for entry in (make.merged(0, 5), make.committed(6), make.committed(7)):
        log.append(entry)
    assert (log.base, log.head, log.bytes) == (5, 7, 2 * ONE)
    assert not log.reaches(0)


# -- history -----------------------------------------------------------------------------------


def history(make: Any, *keys: tuple[int, int]) -> History:
    """Return a history with these (origin, seq) as commits 1, 2 and so on."""
    made = History(Log(PLENTY))
    for commit, (origin, seq) in enumerate(keys, 1):
        made.append(make.committed(commit, origin, seq=seq))
    return made


def test_last_seqs_at_returns_newest_seqs_at_any_commit_in_log(make: Any) -> None:
    """``last_seqs_at`` returns each origin's newest sequence number at any commit in the log."""
    made = history(make, (1, 1), (2, 1), (1, 2), (1, 3))
    tables = [dict(made.last_seqs_at(base)) for base in range(5)]
    assert tables == [{1: 0, 2: 0}, {1: 1, 2: 0}, {1: 1, 2: 1}, {1: 2, 2: 1}, {1: 3, 2: 1}]


def test_last_seqs_at_includes_sums_but_fails_before_them(make: Any) -> None:
    """Sequence numbers in a sum count; those at a commit before the sum cannot be computed."""
    made = history(make, (1, 1), (2, 1))
    made.append(make.merged(2, 6, [(1, 4), (3, 1)]))
    made.append(make.committed(7, 1, seq=5))
    assert dict(made.last_seqs_at(7)) == {1: 5, 2: 1, 3: 1}
    assert dict(made.last_seqs_at(6)) == {1: 4, 2: 1, 3: 1}
    with pytest.raises(AssertionError, match="before a sum"):
        made.last_seqs_at(2)


def test_base_is_newest_of_applied_log_base_and_last_sum(make: Any) -> None:
    """``base`` is the newest of the applied commit, the log's base and the last sum."""
    made = history(make, (1, 1), (1, 2))
    assert made.base == 0
    made.applied = 1
    assert made.base == 1
    made.append(make.merged(2, 6))
    assert made.base == 6
    made.applied = 7
    assert made.base == 7
    made.log.base = 9
    assert made.base == 9


def test_restart_at_empties_log_and_takes_snapshot_seqs(make: Any) -> None:
    """``restart_at`` empties the log and takes the sequence numbers of the snapshot."""
    made = history(make, (1, 1), (1, 2))
    made.whole = True
    made.restart_at(9, [(1, 5), (2, 4)])
    assert (made.log.base, made.log.head, made.base, made.applied) == (9, 9, 9, 9)
    assert made.log.bytes_max == PLENTY
    assert not made.whole
    assert made.last_seqs_at(9) == [(1, 5), (2, 4)]


def test_last_seqs_of_returns_newest_seq_of_each_origin(make: Any) -> None:
    """``last_seqs_of`` returns each origin's newest sequence number, also from sums."""
    entries = [
        make.committed(1, 1, seq=1),
        make.merged(1, 5, [(1, 3), (2, 2)]),
        make.committed(6, 2, seq=3),
    ]
    assert dict(last_seqs_of(entries)) == {1: 3, 2: 3}
