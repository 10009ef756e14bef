"""Beginnings: the master of a simulated fit, and what an earlier fit has left for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparkstrom.base.identity import Endpoint
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.protocol.master.master import Master
from sparkstrom.simulation.sim_replica import CHUNKS, SIZE, average, mass

if TYPE_CHECKING:
    from sparkstrom.simulation.world import World


def new_master(world: World) -> Master:
    """Its kept files are in the world's scratch."""
    kept: dict[str, dict[str, float]] = {}
    for index in range(world.size.kept_files):
        executor = f"e{index // world.size.per_executor}"
        path = f"{executor}/kept{index}"
        world.scratch[path] = [world.time.chance.randint(-2, 2) for _ in range(SIZE)]
        kept.setdefault(executor, {})[path] = mass(world.scratch[path])
    return Master(
        FitSpec(workers=world.size.nodes, epochs=world.size.epochs, n_params=SIZE, version="sim"),
        chunks=max(CHUNKS, world.size.weights.chunks),
        endpoint=Endpoint("master", 1),
        limits=world.size.of_master(),
        now_s=0.0,
        kept=kept,
        average=average,
    )
