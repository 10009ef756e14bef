"""Whole fits under faults drawn from a seed; every invariant is checked from outside."""

from __future__ import annotations

from dataclasses import fields

import pytest

from sparkstrom.simulation.faults import NO_FAULTS
from sparkstrom.simulation.runs import play

RUNS = [(4, seed) for seed in range(50)]
RUNS += [(nodes, seed) for nodes in (1, 2, 3) for seed in range(100, 110)]
RUNS += [(9, seed) for seed in range(200, 206)] + [(16, 300), (16, 301)]


@pytest.mark.parametrize(("nodes", "seed"), RUNS)
def test_a_fit_keeps_the_invariants(nodes: int, seed: int) -> None:
    result = play(seed, nodes, {})
    assert result.violations == [], f"sparkstrom simulate --nodes {nodes} --seeds {seed}"


def test_a_run_repeats_exactly() -> None:
    assert play(5, 4, {}) == play(5, 4, {})


def test_the_seeds_of_the_suite_see_every_kind_of_fault() -> None:
    seen: set[str] = set()
    for seed in range(50):
        seen |= set(play(seed, 4, {}).faults)
    assert seen >= {
        "lost", "repeated", "late", "crashes", "executor crashes", "doubles", "cuts", "cut off",
        "pauses", "master pauses", "exiles", "master lost", "edge deaths", "stops",
    }  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_without_faults_every_update_is_committed_in_little_time(seed: int) -> None:
    calm = {field.name: getattr(NO_FAULTS, field.name) for field in fields(NO_FAULTS)}
    result = play(seed, 4, calm | {"empty_partitions": 0})
    assert result.violations == []
    assert result.faults == {}
    assert result.updates >= 4 * 5
