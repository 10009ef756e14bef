"""Trainer inbox: order, the limit on bytes, and sums equal to the single updates bit by bit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sparkstrom.codec.messages import BUFFERS, Commit, Payload
from sparkstrom.encoding.grid import quantum
from sparkstrom.models.base import Flat
from sparkstrom.protocol.common.events_and_effects import (
    ApplyCommit,
    IdAssigned,
    InstallSnapshot,
    OwnCommitted,
)
from sparkstrom.runtime import theta as module
from sparkstrom.runtime.theta import Theta
from sparkstrom.runtime.training_loop import MergedCommits, TrainerInbox, TrainerItem
from tests.unit.runtime.memories import make_theta

K, N = 10, 300
INSTALL = InstallSnapshot((), (), (), 5)
ADMITTED = IdAssigned(1, 0, 0, 0, (), False)

MakeCommit = Callable[..., Commit]


def apply_items(theta: Theta, items: list[TrainerItem]) -> list[int]:
    """Apply updates and sums to theta; return the commit after each."""
    commits = []
    for item in items:
        if isinstance(item, ApplyCommit):
            theta.add(theta.decode(item.update.payload))
            commits.append(item.update.commit)
        elif isinstance(item, MergedCommits):
            theta.add_sum(item.total)
            commits.append(item.commit)
    return commits


def test_items_are_taken_once_in_order(make_commit: MakeCommit) -> None:
    inbox = TrainerInbox(10_000, make_theta(N, K).new_sum)
    items = [ADMITTED, INSTALL, ApplyCommit(make_commit(1, 3)), ApplyCommit(make_commit(2, -3))]
    for item in items:
        inbox.put(item)
    assert len(inbox) == 4
    assert inbox.take() == items
    assert inbox.take() == []
    assert inbox.merge_count == 0


def test_updates_beyond_byte_limit_are_merged_into_one_sum(make_commit: MakeCommit) -> None:
    """Updates beyond the byte limit are merged into one sum."""
    first = ApplyCommit(make_commit(1, 1, 2))
    inbox = TrainerInbox(len(first.update.payload), make_theta(N, K).new_sum)
    inbox.put(first)
    for commit in range(2, 50):
        inbox.put(ApplyCommit(make_commit(commit, 1, -7)))
    single, merged = inbox.take()
    assert single == first
    assert isinstance(merged, MergedCommits)
    assert (merged.commit, inbox.merge_count) == (49, 1)
    assert merged.total.dense()[[0, 6]].tolist() == [48 * 128, -48 * 128]


def test_take_makes_room_for_single_updates(make_commit: MakeCommit) -> None:
    """``take`` makes room for further single updates."""
    update = ApplyCommit(make_commit(1, 1))
    inbox = TrainerInbox(len(update.update.payload), make_theta(N, K).new_sum)
    for _ in range(3):
        inbox.put(update)
        assert inbox.take() == [update]


def test_snapshot_between_updates_ends_sum(make_commit: MakeCommit) -> None:
    """Updates after a snapshot are not added to the sum before it."""
    inbox = TrainerInbox(0, make_theta(N, K).new_sum)
    inbox.put(ApplyCommit(make_commit(1, 1)))
    inbox.put(INSTALL)
    inbox.put(ApplyCommit(make_commit(6, 1)))
    kinds = [type(item) for item in inbox.take()]
    assert kinds == [MergedCommits, InstallSnapshot, MergedCommits]


def test_own_commits_do_not_split_sum(make_commit: MakeCommit) -> None:
    """Own commits are counted in the sum, which continues after them."""
    inbox = TrainerInbox(0, make_theta(N, K).new_sum)
    for commit in range(1, 10, 3):
        inbox.put(ApplyCommit(make_commit(commit, 1)))
        inbox.put(OwnCommitted(commit + 1))
        inbox.put(OwnCommitted(commit + 2))
    (merged,) = inbox.take()
    assert isinstance(merged, MergedCommits)
    assert (merged.commit, merged.own_commits, merged.total.dense()[0]) == (9, 6, 3 * 128)


def test_own_commits_are_separate_items_without_sum(make_commit: MakeCommit) -> None:
    """Own commits are separate items while nothing is merged."""
    inbox = TrainerInbox(10_000, make_theta(N, K).new_sum)
    items = [OwnCommitted(1), ApplyCommit(make_commit(2, 1)), OwnCommitted(3)]
    for item in items:
        inbox.put(item)
    assert inbox.take() == items


def test_averaged_buffers_end_sum(make_commit: MakeCommit) -> None:
    """Averaged buffers end a sum, and an own commit after them is a separate item."""
    inbox = TrainerInbox(0, make_theta(N, K).new_sum)
    average = ApplyCommit(
        Commit(commit=2, origin=9, seq=1, payload=Payload(BUFFERS, 0, 0, b"a" * 99))
    )
    inbox.put(ApplyCommit(make_commit(1, 1)))
    inbox.put(average)
    inbox.put(OwnCommitted(2))
    inbox.put(ApplyCommit(make_commit(3, 1)))
    first, *middle, last = inbox.take()
    assert middle == [average, OwnCommitted(2)]
    assert [m.commit for m in (first, last) if isinstance(m, MergedCommits)] == [1, 3]


def test_new_sum_starts_before_entry_could_overflow(
    make_commit: MakeCommit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inbox begins another sum before an entry could overflow."""
    monkeypatch.setattr(module, "MERGED_QUANTA_SAFE_MAX", 300)
    inbox = TrainerInbox(0, make_theta(N, K).new_sum)
    for commit in range(1, 6):
        inbox.put(ApplyCommit(make_commit(commit, 1)))  # 128 quanta each
    items = inbox.take()
    assert [item.commit for item in items if isinstance(item, MergedCommits)] == [2, 4, 5]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(
    hits=st.lists(
        st.lists(st.integers(1, N) | st.integers(-N, -1), min_size=1, max_size=200, unique_by=abs),
        max_size=12,
    ),
    bytes_max=st.integers(0, 300),
    takes=st.sets(st.integers(0, 11)),
)
def test_sums_equal_single_updates_bit_by_bit(
    make_commit: MakeCommit,
    draw_grid_parameters: Callable[[int, int], Flat],
    hits: list[list[int]],
    bytes_max: int,
    takes: set[int],
) -> None:
    """Sums give the same bits as single updates, with any byte limit and any calls of ``take``."""
    singly, merged = make_theta(N, K), make_theta(N, K)
    for theta in (singly, merged):
        theta.load(draw_grid_parameters(N, 1))
    inbox = TrainerInbox(bytes_max, merged.new_sum)
    commits: list[int] = []
    for i, indices in enumerate(hits):
        committed = make_commit(i + 1, *indices)
        singly.add(singly.decode(committed.payload))
        inbox.put(ApplyCommit(committed))
        if i in takes:
            commits += apply_items(merged, inbox.take())
    commits += apply_items(merged, inbox.take())
    np.testing.assert_array_equal(merged.to_host().view(np.int32), singly.to_host().view(np.int32))
    assert commits == sorted(commits)
    assert commits[-1:] == ([len(hits)] if hits else [])
    assert merged.q == quantum(K)
