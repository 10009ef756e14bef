"""Runs: many seeds, on all cores; whatever breaks inside a run is a violation of its seed."""

from __future__ import annotations

import gc
import multiprocessing
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from sparkstrom.simulation.conditions import changed, drawn
from sparkstrom.simulation.controllers import play_controllers
from sparkstrom.simulation.run_sizes import Replicas, Size
from sparkstrom.simulation.sim_parts import Parts
from sparkstrom.simulation.world import World

SEEDS_PER_TASK = 8
COLLECTED_OBJECTS = 50_000  # new ones between two looks; otherwise 700


@dataclass(frozen=True, slots=True)
class Result:
    """One run."""

    seed: int
    violations: list[str]
    updates: int  # committed
    faults: dict[str, int]  # by kind, how many happened
    transcript: list[str]

    def and_then(self, world: World, violations: list[str]) -> Result:
        """With one more controller's part of it."""
        return Result(
            self.seed,
            self.violations + violations,
            self.updates + len(world.checks.commits),
            dict(Counter(self.faults) + world.time.faults),
            self.transcript + world.time.transcript,
        )


def play(seed: int, nodes: int, mode: str, given: dict[str, Any]) -> Result:
    """One seed's run, under its own conditions but for what is ``given`` by name."""
    size, faults = changed(*drawn(seed, nodes, mode), given)
    result = Result(seed, [], 0, {}, [])
    worlds: Iterator[World] = iter([World(seed, size, faults, _parts(seed, size))])
    if faults.controller_dies:
        worlds = play_controllers(seed, size, faults, _parts)
    for world in worlds:
        try:
            with _few_collections():
                violations = world.run()
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__}: {error}"
            text = f"{what} ({where.name}, {where.filename}:{where.lineno})"
            violations = [*world.checks.violations, text]
        result = result.and_then(world, violations)
    return result


@contextmanager
def _few_collections() -> Iterator[None]:
    """A run makes many objects and hardly any circles of them: the collector looks less often."""
    before = gc.get_threshold()
    gc.set_threshold(COLLECTED_OBJECTS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _parts(seed: int, size: Size) -> Parts:
    """What is trained; real replicas are imported where a run has some."""
    if size.replicas is Replicas.NUMBERS:
        return Parts(size)
    from sparkstrom.simulation.real_parts import RealParts

    return RealParts(size, seed)


def play_all(
    seeds: range, nodes: int, mode: str, given: dict[str, Any], processes: int
) -> Iterator[Result]:
    """All seeds, in their order."""
    one = partial(play, nodes=nodes, mode=mode, given=given)
    if processes == 1 or len(seeds) < SEEDS_PER_TASK:
        yield from map(one, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap(one, seeds, chunksize=SEEDS_PER_TASK)
