"""Simulated fits whose controller dies: over all controllers, each minibatch is committed once."""

from __future__ import annotations

import os

import pytest

from sparkstrom.protocol.master.members import Partition, Partitions
from sparkstrom.simulation.fuzzing import simulate_seed, simulate_seeds
from tests.simulation.planted import CALM

CORES = os.cpu_count() or 1
RUNS = [("plain", 4, range(24), 2), ("mesh", 9, range(12), 1), ("links", 3, range(2), 1)]


@pytest.mark.parametrize(("mode", "nodes", "seeds", "dies"), RUNS)
def test_minibatches_are_committed_once_despite_controller_deaths(
    mode: str, nodes: int, seeds: range, dies: int
) -> None:
    """Each minibatch is committed once, although controllers die and fits resume from copies."""
    died = 0
    for result in simulate_seeds(seeds, nodes, mode, {"controller_dies": dies}, CORES):
        repeat = f"--nodes {nodes} --mode {mode} --controller-dies {dies} --seeds {result.seed}"
        assert result.violations == [], f"python -m sparkstrom.simulation {repeat}"
        died += result.faults.get("controllers", 0)
    assert died > len(seeds) / 2


def test_run_with_controller_deaths_is_deterministic() -> None:
    """A run with dying controllers repeats exactly."""
    given = {"controller_dies": 2}
    assert simulate_seed(5, 4, "plain", given) == simulate_seed(5, 4, "plain", given)


@pytest.mark.parametrize("further", [-1, 1])
def test_copy_with_wrong_partition_position_is_reported(
    further: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy for resuming whose position is one minibatch too high or too low is reported."""
    right = Partitions.as_starts

    def wrong(self: Partitions) -> object:
        one = self[0]
        if not 0 < one.minibatches < one.epochs * one.batches:
            return right(self)
        moved = Partition(0, one.epochs, one.rows, one.checksum, one.batches)
        epoch, batch = divmod(one.minibatches + further, one.batches)
        moved.position = type(one.position)(epoch, batch)
        return (moved.as_start(), *right(self)[1:])

    monkeypatch.setattr(Partitions, "as_starts", wrong)
    given = CALM | {"controller_dies": 1, "empty_partitions": 0, "resumed": 0}
    found = [
        text for seed in range(4) for text in simulate_seed(seed, 3, "plain", given).violations
    ]
    assert any("partition 0: a copy at commit" in text for text in found)
