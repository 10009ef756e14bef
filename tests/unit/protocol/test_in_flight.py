"""Tests of ``InFlight``: a node's own updates until they are committed, under all its ids."""

from __future__ import annotations

from typing import Any

import pytest

from sparkstrom.protocol.common.flow_control import HEADER_BYTES
from sparkstrom.protocol.worker.parent_link import (
    AGAIN_LEAST_S,
    RETRY_LEAST_S,
    RETRY_LONGEST_S,
    ROUNDS,
    InFlight,
)


def filled(make: Any, count: int, window_bytes: int = 10**6) -> InFlight:
    """Return ``count`` uncommitted updates of node 1, all made at time 0."""
    uplink = InFlight(window_bytes)
    for seq in range(1, count + 1):
        uplink.add(make.update(1, seq), 0.0)
    return uplink


def keys(uplink: InFlight) -> list[tuple[int, int]]:
    """Return the (id, seq) of each uncommitted update, oldest first."""
    return [(update.origin, update.seq) for update in uplink.uncommitted]


def test_acknowledge_removes_update_once(make: Any) -> None:
    """An acknowledged update is removed and returned once."""
    uplink = filled(make, 2)
    struck = uplink.acknowledge(1, 1, 0.0)
    assert struck is not None
    assert struck.seq == 1
    assert uplink.acknowledge(1, 1, 0.0) is None
    assert (keys(uplink), len(uplink), uplink.bytes) == ([(1, 2)], 1, HEADER_BYTES + 4)


def test_add_with_seq_gap_fails(make: Any) -> None:
    with pytest.raises(AssertionError, match="no gaps"):
        filled(make, 1).add(make.update(1, 3), 0.0)


def test_empty_window_takes_update_of_any_size(make: Any) -> None:
    uplink = InFlight(1)
    assert uplink.has_room()
    uplink.add(make.update(1, 1), 0.0)
    assert not uplink.has_room()
    uplink.acknowledge(1, 1, 0.0)
    assert uplink.has_room()


def test_acknowledge_up_to_removes_only_updates_under_own_ids(make: Any) -> None:
    """A table of sequence numbers removes all updates of this process up to those numbers."""
    uplink = filled(make, 4)
    uplink.acknowledge_up_to([(1, 3), (7, 9)], {1}, 0.0)
    assert keys(uplink) == [(1, 4)]
    uplink.acknowledge_up_to([(1, 4)], {7}, 0.0)  # 1 is not an id of this process
    assert keys(uplink) == [(1, 4)]


def test_new_id_renumbers_only_uncommitted_updates(make: Any) -> None:
    """Under a new id, uncommitted updates are renumbered from 1; committed ones are not."""
    uplink = filled(make, 4)
    uplink.renumber({1: 2}, 5, 0.0)
    assert keys(uplink) == [(1, 1), (1, 2), (5, 1), (5, 2)]
    assert uplink.last_seq == 2
    assert [update.seq for update in uplink.updates_to_resend(5, 1.0)] == [1, 2]
    assert [update.batch for update in uplink.uncommitted] == [1, 2, 3, 4]


def test_unknown_closed_id_has_no_updates_to_renumber(make: Any) -> None:
    """A closed id that the node never learned of has no updates to renumber.

    The node was evicted as 1, admitted as 5 without learning that, and admitted as 6.
    """
    uplink = filled(make, 3)
    uplink.renumber({1: 1, 5: 0}, 6, 0.0)
    assert keys(uplink) == [(1, 1), (6, 1), (6, 2)]


def test_second_renumbering_includes_updates_of_first(make: Any) -> None:
    """A second return renumbers the updates that the first return had renumbered."""
    uplink = filled(make, 3)
    uplink.renumber({1: 1}, 5, 0.0)
    uplink.renumber({1: 1, 5: 1}, 6, 0.0)
    assert keys(uplink) == [(1, 1), (5, 1), (6, 1)]
    assert uplink.last_seq == 1


def test_first_id_has_no_updates_to_renumber(make: Any) -> None:
    """The first id has no updates to renumber."""
    uplink = InFlight(100)
    uplink.renumber({}, 1, 0.0)
    assert (uplink.last_seq, keys(uplink)) == (0, [])


def test_second_resend_within_again_least_s_is_empty_unless_forced(make: Any) -> None:
    """A second resend within AGAIN_LEAST_S returns nothing, unless it is forced."""
    uplink = filled(make, 2)
    assert len(uplink.updates_to_resend(1, 1.0)) == 2
    assert uplink.updates_to_resend(1, 1.0 + AGAIN_LEAST_S / 2) == []
    assert len(uplink.updates_to_resend(1, 1.0 + AGAIN_LEAST_S / 2, force=True)) == 2
    assert len(uplink.updates_to_resend(1, 1.0 + 2 * AGAIN_LEAST_S)) == 2


def test_slow_commits_lengthen_distance_between_resends(make: Any) -> None:
    """Resends are ROUNDS commit times apart, as updates under way show the same gap."""
    uplink = filled(make, 2)
    uplink.acknowledge(1, 1, 20.0)
    assert uplink.round_s == 20.0
    assert len(uplink.updates_to_resend(1, 20.0)) == 1
    assert uplink.updates_to_resend(1, 19.0 + ROUNDS * 20.0) == []
    assert len(uplink.updates_to_resend(1, 20.0 + ROUNDS * 20.0)) == 1


def waits(uplink: InFlight, count: int, now_s: float = 0.0) -> list[float]:
    """Return the waits until the oldest update is overdue, with a back-off after each."""
    out = []
    for _ in range(count):
        before_s = now_s
        while not uplink.is_overdue(now_s):
            now_s += 0.5
        out.append(now_s - before_s)
        uplink.back_off(now_s)
    return out


def test_overdue_wait_doubles_up_to_retry_longest_s(make: Any) -> None:
    """The time until updates count as lost doubles from RETRY_LEAST_S to RETRY_LONGEST_S."""
    found = waits(filled(make, 2), 6)
    assert found[:3] == [RETRY_LEAST_S * 2**i for i in range(3)]
    assert found[-1] == RETRY_LONGEST_S


def test_update_is_not_overdue_before_several_commit_times(make: Any) -> None:
    """If a commit took a minute, the next update counts as lost only after ROUNDS minutes."""
    uplink = filled(make, 2)
    uplink.acknowledge(1, 1, 60.0)
    assert not uplink.is_overdue(60.0 + ROUNDS * 60.0 - 1.0)
    assert uplink.is_overdue(60.0 + ROUNDS * 60.0)


def test_overdue_wait_is_never_below_several_commit_times(make: Any) -> None:
    """If commits take long, no wait is shorter than ROUNDS commit times."""
    uplink = filled(make, 2)
    uplink.acknowledge(1, 1, 60.0)
    assert min(waits(uplink, 4, 60.0)) >= ROUNDS * 60.0


def test_update_is_not_overdue_while_its_parts_arrive(make: Any) -> None:
    """An update that takes ten minutes to transmit is not overdue while parts of it arrive."""
    uplink = filled(make, 1)
    for now_s in range(0, 600, 5):
        uplink.note_progress(float(now_s))
        assert not uplink.is_overdue(now_s + 5.0)
    assert uplink.progress_s == 595.0
    assert uplink.is_overdue(595.0 + RETRY_LEAST_S)


def test_commit_restarts_overdue_wait(make: Any) -> None:
    """A commit restarts the wait for the others; without uncommitted updates nothing is overdue."""
    uplink = filled(make, 3)
    waits(uplink, 3)
    uplink.acknowledge(1, 1, 100.0)
    uplink.acknowledge(1, 2, 100.0)
    assert not uplink.is_overdue(100.0 + ROUNDS * 100.0 - 1.0)
    uplink.acknowledge(1, 3, 200.0)
    assert not uplink.is_overdue(10_000.0)  # nothing is uncommitted


def test_renumbered_updates_do_not_measure_commit_time(make: Any) -> None:
    """Updates made before a return are not used to measure the time to commit."""
    uplink = filled(make, 2)
    uplink.renumber({1: 1}, 5, 50.0)
    uplink.acknowledge(1, 1, 300.0)
    uplink.acknowledge(5, 1, 300.0)
    assert uplink.round_s == 0.0


def test_progress_s_is_last_commit_or_first_new_update(make: Any) -> None:
    """``progress_s``: the last commit, or the first update added after all were committed."""
    uplink = filled(make, 1)
    uplink.acknowledge(1, 1, 3.0)
    assert uplink.progress_s == 3.0
    uplink.add(make.update(1, 2), 50.0)
    assert uplink.progress_s == 50.0
    uplink.add(make.update(1, 3), 60.0)
    assert uplink.progress_s == 50.0
