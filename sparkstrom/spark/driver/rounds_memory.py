"""Rounds memory: what a fit of ParameterAveragingTrainingMaster takes, part by part.

As ``memory_parts`` has it of the other master; nothing of it is Aeron's.
"""

from __future__ import annotations

from sparkstrom.spark.averaging.round_job import PieceSizes
from sparkstrom.spark.driver.averaging_master import OWN, ParameterAveragingTrainingMaster
from sparkstrom.spark.driver.memory_parts import (
    DRIVER_PYTHON_BYTES,
    F32,
    LIBRARY_BYTES,
    OPTIMIZERS,
    PYTHON_BYTES,
    Demand,
    Part,
    checkpoint_parts,
    total,
)

SUMMED = 3  # a piece as it came, as an array, and the sum in float64
OUTER_VECTORS = 2  # the way to the mean, and an updater's velocity


def round_worker_parts(
    demand: Demand, master: ParameterAveragingTrainingMaster, workers: int
) -> list[Part]:
    """What one Python worker holds at most, in a round or where results are added up.

    Between rounds, and until a next fit comes, it keeps a part of that and nothing else. Of fits
    that run at once it keeps what each of them has in use.
    """
    vector, state = F32 * demand.n_params, OPTIMIZERS[demand.optimizer]
    sizes = PieceSizes()
    return [
        Part("Python, numpy, llvmlite, pyarrow", PYTHON_BYTES),
        *([Part(demand.library, size)] if (size := LIBRARY_BYTES[demand.library]) else []),
        Part("parameters", vector),
        Part("gradient, and what a step changes", 2 * vector),
        Part(f"state of {demand.optimizer}, as it came and in use", 2 * state * vector),
        *([Part("buffers", 3 * demand.buffers_bytes)] if demand.buffers_bytes else []),
        Part("rows (batch_memory_bytes)", master.batch_memory_bytes),
        Part("a part of the parameters on its way", min(sizes.part, vector)),
        Part("pieces of all workers, added up", SUMMED * workers * min(sizes.piece, vector)),
    ]


def round_driver_parts(
    demand: Demand, master: ParameterAveragingTrainingMaster, workers: int
) -> list[Part]:
    """What the driver program's Python holds at most."""
    vector, state = F32 * demand.n_params, OPTIMIZERS[demand.optimizer]
    copies = {OWN: 2 * workers, True: 2, False: 0}[master.save_updater]  # of now, and the next
    coming = result_bytes(demand, master, workers)
    return [
        Part("Python, pyspark, numpy, llvmlite, pyarrow", DRIVER_PYTHON_BYTES),
        *([Part(demand.library, size)] if (size := LIBRARY_BYTES[demand.library]) else []),
        Part("the model and the network's parameters", 2 * vector),
        Part("parameters of the round, and their mean", 2 * vector),
        Part("a fresh optimizer's state", state * vector),
        Part("optimizers' states (save_updater)", copies * state * vector),
        *([Part("the outer step", OUTER_VECTORS * vector)] if master.outer is not None else []),
        *([Part("buffers", (3 + workers) * demand.buffers_bytes)] if demand.buffers_bytes else []),
        Part("results of one job", min(PieceSizes().collected, coming)),
        *checkpoint_parts(demand, master, workers),
    ]


def sent_bytes(demand: Demand, master: ParameterAveragingTrainingMaster) -> int:
    """What each worker sends at a round's end: parameters, and its optimizer's state."""
    states = OPTIMIZERS[demand.optimizer] if master.save_updater else 0
    return (1 + states) * F32 * demand.n_params


def result_bytes(demand: Demand, master: ParameterAveragingTrainingMaster, workers: int) -> int:
    """What the driver program gets of a round: means, states of each worker's own, or all."""
    of_each, vector = sent_bytes(demand, master), F32 * demand.n_params
    if master.aggregation_depth == 1:
        return workers * of_each
    copies = workers if master.save_updater == OWN else 1
    return vector + copies * (of_each - vector)


def round_overhead(
    demand: Demand, master: ParameterAveragingTrainingMaster, workers: int, workers_here: int
) -> int:
    """Bytes beside an executor's heap: its Python workers."""
    return workers_here * total(round_worker_parts(demand, master, workers))


def shipped_bytes(demand: Demand, master: ParameterAveragingTrainingMaster, workers: int) -> int:
    """What goes to executors with each round: broadcast variables, in the driver's heap, too."""
    copies = workers if master.save_updater == OWN else 1
    vectors = 1 + copies * OPTIMIZERS[demand.optimizer]
    return vectors * F32 * demand.n_params + demand.buffers_bytes
