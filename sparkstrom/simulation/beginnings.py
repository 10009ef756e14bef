"""Beginnings: the master of a simulated fit, and what an earlier fit has left for it."""

from __future__ import annotations

from sparkstrom.base.identity import Endpoint
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.protocol.master.master import Master
from sparkstrom.simulation.run_sizes import Size
from sparkstrom.simulation.sim_replica import CHUNKS, SIZE, Theta, average, mass
from sparkstrom.simulation.timeline import Timeline


def new_master(size: Size, time: Timeline, scratch: dict[str, Theta]) -> Master:
    """Its kept files are put into ``scratch``."""
    kept: dict[str, dict[str, float]] = {}
    for index in range(size.kept_files):
        executor = f"e{index // size.per_executor}"
        path = f"{executor}/kept{index}"
        scratch[path] = [time.chance.randint(-2, 2) for _ in range(SIZE)]
        kept.setdefault(executor, {})[path] = mass(scratch[path])
    return Master(
        FitSpec(workers=size.nodes, epochs=size.epochs, n_params=SIZE, version="sim"),
        chunks=max(CHUNKS, size.weights.chunks),
        endpoint=Endpoint("master", 1),
        limits=size.of_master(),
        now_s=0.0,
        kept=kept,
        average=average,
    )
