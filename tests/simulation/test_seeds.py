"""Simulated fits with faults drawn from a seed; checkers test all invariants from outside."""

from __future__ import annotations

import os

import pytest

from sparkstrom.simulation.fuzzing import simulate_seed, simulate_seeds
from tests.simulation.planted import CALM

CORES = os.cpu_count() or 1
PLAIN = [(4, range(50)), (1, range(100, 106)), (2, range(100, 106)), (9, range(200, 206))]
MESH = [range(50), pytest.param(range(50, 200), marks=pytest.mark.slow)]


@pytest.mark.parametrize(("nodes", "seeds"), PLAIN)
def test_plain_fits_keep_invariants(nodes: int, seeds: range) -> None:
    for result in simulate_seeds(seeds, nodes, "plain", {}, CORES):
        repeat = f"python -m sparkstrom.simulation --nodes {nodes} --seeds {result.seed}"
        assert result.violations == [], repeat


@pytest.mark.parametrize("seeds", MESH)
def test_meshes_keep_invariants_under_every_kind_of_fault(seeds: range) -> None:
    """Meshes violate no invariant, and every kind of fault occurs."""
    seen: set[str] = set()
    for result in simulate_seeds(seeds, 12, "mesh", {}, CORES):
        repeat = f"python -m sparkstrom.simulation --mode mesh --nodes 12 --seeds {result.seed}"
        assert result.violations == [], repeat
        seen |= set(result.faults)
    assert seen >= {
        "lost", "repeated", "late", "crashes", "executor crashes", "doubles", "cuts", "cut off",
        "splits", "split off", "leaps", "pauses", "master pauses", "exiles", "master lost",
        "edge deaths", "driver deaths", "breaks", "stops", "failures", "isolations",
        "late attempts",
    }  # fmt: skip


@pytest.mark.parametrize("mode", ["plain", "mesh"])
def test_simulation_is_determined_by_seed(mode: str) -> None:
    assert simulate_seed(5, 6, mode, {}) == simulate_seed(5, 6, mode, {})


@pytest.mark.parametrize("mode", ["plain", "mesh"])
@pytest.mark.parametrize("seed", range(3))
def test_faultless_fit_makes_all_updates_without_violations(mode: str, seed: int) -> None:
    """Without faults, 20 updates and more are committed within 10 virtual seconds."""
    result = simulate_seed(seed, 4, mode, CALM | {"empty_partitions": 0, "resumed": 0})
    assert result.violations == []
    assert result.faults == {}
    assert result.updates >= 4 * 5
    ended_s = float(result.transcript[-1].split()[0])
    assert ended_s < 10.0


@pytest.mark.parametrize("fan_out", [1, 2, 3])
def test_narrow_trees_keep_invariants_despite_crashes(fan_out: int) -> None:
    """Chains and narrow trees violate no invariant, even with crashes."""
    given = {"fan_out": fan_out, "depth": 7, "crashes": 2}
    assert simulate_seed(1, 7, "mesh", CALM | given).violations == []
