"""Tests of ``Staleness``, in minibatches of other workers, with invented sequences of commits."""

from __future__ import annotations

from typing import Any

import pytest

from sparkstrom.codec.messages import BUFFERS
from sparkstrom.protocol.master import commit_order as module
from sparkstrom.protocol.master.commit_order import Staleness


def simulate_turns(workers: int, rounds: int, late: int = 1) -> Staleness:
    """Return the staleness when workers take turns, one minibatch each.

    Each worker has seen all commits up to its own update of ``late`` rounds ago.
    """
    staleness = Staleness()
    for commit in range(1, workers * rounds + 1):
        node = 1 + (commit - 1) % workers
        staleness.on_commit(node, commit, max(0, commit - late * workers), 1)
    return staleness


@pytest.mark.parametrize("workers", [1, 2, 8])
def test_staleness_of_k_workers_in_turns_is_k_minus_1(workers: int) -> None:
    """With k workers that take turns, the staleness is k - 1."""
    staleness = simulate_turns(workers, 100)
    assert staleness.most == workers - 1
    assert staleness.mean == pytest.approx(workers - 1, abs=0.05 * workers)


def test_seeing_commits_one_round_later_doubles_staleness() -> None:
    """Workers that see commits one round later are stale by two rounds."""
    assert simulate_turns(4, 100, late=2).most == 2 * 3


def test_own_minibatches_cause_no_staleness() -> None:
    """A worker's own minibatches do not make it stale, even if it has not seen their commits."""
    staleness = Staleness()
    for commit in range(1, 10):
        staleness.on_commit(1, commit, 0, 3)  # the only worker, which has seen no commit
    assert (staleness.mean, staleness.most) == (0.0, 0.0)


def test_steps_of_late_publication_are_assumed_evenly_spaced() -> None:
    """The steps of one late publication are assumed to be evenly spaced since the previous one.

    Here the first of four steps had seen two of the eight minibatches of others, the last all
    eight.
    """
    staleness = Staleness()
    staleness.on_commit(1, 1, 0, 1)
    for commit in range(2, 10):
        staleness.on_commit(2, commit, commit - 1, 1)
    staleness.on_commit(1, 10, 9, 4)  # seen before: 0 of the others'; now: 8
    assert staleness.most == 6.0  # the steps had seen 2, 4, 6 and 8 of 8
    assert staleness.mean * 13 == pytest.approx(1 * (1 - 1) + (6 + 4 + 2 + 0))


def test_minibatches_without_an_update_count_with_the_next_commit() -> None:
    staleness = Staleness()
    staleness.on_commit(2, 1, 0, 1)
    staleness.on_empty_steps(2, 5)
    staleness.on_commit(2, 2, 1, 1)
    staleness.on_commit(1, 3, 1, 1)  # it had seen 1 of 7
    assert staleness.most == 6.0
    staleness.on_empty_steps(1, 2)
    staleness.on_commit(1, 4, 2, 1)  # it had seen all 7 of the others'
    assert (staleness.most, staleness.mean) == (6.0, 6 / 4)


def test_update_without_minibatches_does_not_change_staleness() -> None:
    """An update without minibatches, such as one with buffers, does not change the staleness."""
    staleness = Staleness()
    staleness.on_commit(2, 1, 0, 1)
    staleness.on_commit(1, 2, 0, 0)  # buffers
    assert (staleness.most, staleness.mean) == (0.0, 0.0)


def test_forget_discards_earlier_publications_of_worker() -> None:
    """After ``forget``, a worker's next publication is not compared with its earlier ones."""
    staleness = Staleness()
    staleness.on_commit(1, 1, 0, 1)
    for commit in range(2, 8):
        staleness.on_commit(2, commit, commit - 1, 1)
    staleness.forget(1)
    staleness.on_commit(1, 8, 7, 6)  # its first publication: all 6 steps count as begun at commit 7
    assert staleness.most == 0.0


def test_seen_commit_beyond_memory_counts_as_oldest_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the newest commits are remembered; an older ``seen`` counts as the oldest."""
    monkeypatch.setattr(module, "REMEMBERED", 8)
    staleness = Staleness()
    for commit in range(1, 101):
        staleness.on_commit(2, commit, commit - 1, 1)
    staleness.on_commit(1, 101, 0, 1)
    assert staleness.most == 7.0
    assert len(staleness._at) == 8


def test_master_counts_minibatches_with_and_without_update(master: Any, make: Any) -> None:
    """The master counts minibatches of updates, and those reported without an update."""
    master.running()
    staleness = master.machine.order.staleness
    master.hear(1, make.update(1, 1, seen=0, batch=1))
    master.hear(2, make.update(2, 1, b"buffers", form=BUFFERS, batch=0))
    master.hear(2, make.update(2, 2, seen=0, batch=2))  # two, none of node 1's seen
    assert (staleness.mean, staleness.most) == (2 / 3, 1.0)
    master.say(1, after_seq=1, epoch=0, batch=2)  # a step without a publication
    master.hear(2, make.update(2, 3, seen=3, batch=3))
    assert staleness.mean == 3 / 4
