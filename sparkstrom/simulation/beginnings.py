"""Beginnings: the master of a simulated fit, and what an earlier fit has left for it."""

from __future__ import annotations

from typing import Any

from sparkstrom.base.identity import Endpoint
from sparkstrom.protocol.common.fit_spec import FitSpec, PartitionStart
from sparkstrom.protocol.master.master import Master
from sparkstrom.simulation.run_sizes import Size
from sparkstrom.simulation.sim_replica import SIZE, average, mass
from sparkstrom.simulation.timeline import Timeline


def starts_of(size: Size) -> tuple[PartitionStart, ...]:
    """Where the driver program says that partitions begin."""
    drawn = tuple(map(size.start_of, range(size.nodes))) if size.resumed else ()
    return size.starts or drawn


def new_master(
    size: Size,
    time: Timeline,
    scratch: dict[str, Any],
    *,
    chunks: int,
    n_params: int = SIZE,
    unit: float = 1,
) -> Master:
    """Its kept files are put into ``scratch``: so many of ``unit`` for each parameter."""
    kept: dict[str, dict[str, float]] = {}
    for index in range(size.kept_files):
        executor = f"e{index // size.per_executor}"
        path = f"{executor}/kept{index}"
        scratch[path] = [unit * time.chance.randint(-2, 2) for _ in range(n_params)]
        kept.setdefault(executor, {})[path] = mass(scratch[path])
    return Master(
        FitSpec(
            workers=size.nodes,
            epochs=size.epochs,
            n_params=n_params,
            version="sim",
            starts=starts_of(size),
        ),
        chunks=chunks,
        endpoint=Endpoint("master", 1),
        limits=size.of_master(),
        now_s=0.0,
        kept=kept,
        average=average,
    )
