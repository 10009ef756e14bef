"""Thresholds per layer in the replica, for single updates and for sums."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sparkstrom.codec.messages import Commit
from sparkstrom.encoding.layers import Layers
from sparkstrom.protocol.common.events_and_effects import ApplyCommit
from sparkstrom.runtime import theta as module
from sparkstrom.runtime.training_loop import MergedCommits, TrainerInbox
from tests.unit.runtime.memories import make_theta

K, N = 10, 300
LAYERS = Layers((100, N), (1, 5))

MakeCommit = Callable[..., Commit]


def test_update_entry_adds_tau_times_layer_multiplier(make_commit: MakeCommit) -> None:
    """An update's entry adds tau times the multiplier of the entry's layer."""
    plain, layered = make_theta(N, K), make_theta(N, K, LAYERS)
    for theta in (plain, layered):
        theta.add(theta.decode(make_commit(1, 3, 200).payload))
    where = np.flatnonzero(plain.to_host())
    assert where.size
    assert (layered.to_host()[where] == plain.to_host()[where] * LAYERS.multipliers_at(where)).all()


def test_inbox_starts_new_sum_before_layer_multiples_overflow(
    make_commit: MakeCommit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inbox begins another sum before multiples of tau could overflow an entry."""
    theta = make_theta(N, K, LAYERS)
    update = make_commit(1, 200)
    largest = 5 * update.payload.tau_quanta
    assert np.abs(theta.decode(update.payload)[1]).max() == largest
    monkeypatch.setattr(module, "MERGED_QUANTA_SAFE_MAX", 3 * largest)
    inbox = TrainerInbox(0, theta.new_sum)
    for commit in range(1, 8):
        inbox.put(ApplyCommit(make_commit(commit, 200)))
    sums = inbox.take()
    assert [item.commit for item in sums if isinstance(item, MergedCommits)] == [3, 6, 7]
    assert max(
        int(np.abs(item.total.dense()).max()) for item in sums if isinstance(item, MergedCommits)
    ) == (3 * largest)
