"""Log and Downlink: what is kept, what is sent, and when again."""

from __future__ import annotations

from typing import Any

import pytest

from sparkstrom.protocol.replay import (
    HEADER_BYTES,
    RETRY_FIRST_S,
    RETRY_LONGEST_S,
    Downlink,
    Log,
    cost,
)

ONE = HEADER_BYTES + 4  # what a commit of these tests costs


def filled(make: Any, count: int, bytes_max: int = 10**6) -> Log:
    log = Log(bytes_max)
    for commit in range(1, count + 1):
        log.append(make.committed(commit))
    return log


def commits(sent: list[Any]) -> list[int]:
    return [committed.commit for committed in sent]


def test_the_oldest_commits_leave_a_full_log(make: Any) -> None:
    log = filled(make, 5, 3 * ONE)
    assert (log.base, log.head, log.bytes) == (2, 5, 3 * ONE)
    assert [log.reaches(commit) for commit in (1, 2, 5)] == [False, True, True]
    assert commits(list(log.after(3))) == [4, 5]
    assert log.get(4).commit == 4


def test_a_log_takes_one_commit_of_any_size(make: Any) -> None:
    log = Log(1)
    log.append(make.committed(1, payload=b"x" * 100))
    assert (log.base, log.head) == (0, 1)
    log.append(make.committed(2))
    assert (log.base, log.head, log.bytes) == (1, 2, cost(make.committed(2)))


def test_a_log_has_no_gaps(make: Any) -> None:
    with pytest.raises(AssertionError, match="no gaps"):
        filled(make, 2).append(make.committed(4))


def test_commits_go_once_in_order_as_far_as_the_window_reaches(make: Any) -> None:
    log, downlink = filled(make, 5), Downlink(1, 0, 2 * ONE, 0.0)
    assert commits(downlink.due(log, 0.0)) == [1, 2]
    assert downlink.due(log, 0.0) == []
    downlink.acknowledge(1, 0.0)
    assert commits(downlink.due(log, 0.0)) == [3]
    downlink.acknowledge(3, 0.0)
    assert commits(downlink.due(log, 0.0)) == [4, 5]


def test_an_empty_window_takes_one_commit_of_any_size(make: Any) -> None:
    downlink = Downlink(1, 0, 1, 0.0)
    assert commits(downlink.due(filled(make, 3), 0.0)) == [1]


def test_an_old_acknowledgement_changes_nothing(make: Any) -> None:
    log, downlink = filled(make, 4), Downlink(1, 0, 10**6, 0.0)
    downlink.due(log, 0.0)
    downlink.acknowledge(3, 0.0)
    downlink.acknowledge(1, 0.0)
    assert (downlink.acked, downlink.sent) == (3, 4)


def test_a_child_that_has_more_than_was_sent_is_not_sent_that_again(make: Any) -> None:
    log, downlink = filled(make, 5), Downlink(1, 0, 2 * ONE, 0.0)
    downlink.due(log, 0.0)
    downlink.acknowledge(4, 0.0)
    assert commits(downlink.due(log, 0.0)) == [5]


def test_what_was_not_acknowledged_goes_again_each_time_later(make: Any) -> None:
    log, downlink = filled(make, 2), Downlink(1, 0, 10**6, 0.0)
    downlink.due(log, 0.0)
    now_s, waits = 0.0, []
    for _ in range(7):
        before_s = now_s
        while not downlink.overdue(now_s):
            now_s += RETRY_FIRST_S / 8
        waits.append(now_s - before_s)
        downlink.back_off(now_s)
        assert commits(downlink.due(log, now_s)) == [1, 2]
    assert waits[:4] == [RETRY_FIRST_S * 2**i for i in range(4)]
    assert waits[-1] == RETRY_LONGEST_S


def test_nothing_is_overdue_when_nothing_is_under_way(make: Any) -> None:
    log, downlink = filled(make, 1), Downlink(1, 0, 10**6, 0.0)
    downlink.due(log, 0.0)
    downlink.acknowledge(1, 0.0)
    assert not downlink.overdue(100.0)
    log.append(make.committed(2))
    downlink.due(log, 100.0)
    assert not downlink.overdue(100.0)  # the wait begins when something is sent


def test_whoever_asks_gets_all_that_follows_again(make: Any) -> None:
    log, downlink = filled(make, 4), Downlink(1, 0, 10**6, 0.0)
    downlink.due(log, 0.0)
    downlink.rewind(2, 0.0)
    assert commits(downlink.due(log, 0.0)) == [3, 4]
