"""Memory parts: what a fit takes of memory, shared memory and ports, part by part.

One rule for `sparkstrom plan` and for what `fit` warns of. All sizes are upper bounds of what a fit
with these options can come to hold; what is bounded by an option names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from sparkstrom.models.base import Buffered, FlatModel
from sparkstrom.protocol.common.topology import Topology
from sparkstrom.spark.driver.averaging_master import TrainingMaster
from sparkstrom.spark.driver.controller_choice import parse_controller
from sparkstrom.spark.driver.training_master import ALL, SharedTrainingMaster
from sparkstrom.transport.aeron.sizes import TERMS, needed_bytes

MIB = 1 << 20
EDGES_PER_EXECUTOR = 8  # as many workers as executors have, as a rule
AERON_BYTES = 10 * MIB  # the media driver itself; its logs come on top
PYTHON_BYTES = 140 * MIB  # interpreter, numpy, llvmlite and pyarrow, per worker
DRIVER_PYTHON_BYTES = 200 * MIB  # pyspark in full, too
LIBRARY_BYTES = {"dense": 0, "torch": 280 * MIB, "jax": 350 * MIB, "keras": 450 * MIB}
OPTIMIZERS = {  # f32 vectors that each keeps
    "sgd": 0,
    "nesterov": 1,
    "momentum": 1,
    "rmsprop": 1,
    "adagrad": 1,
    "adam": 2,
    "adamw": 2,
    "nadam": 2,
    "amsgrad": 3,
}
PACKED_BYTES = 3  # of a parameter, on its way through Spark's broadcast
F32 = 4
KEPT = 5  # vectors: a copy of the residual, and its mass in float64, beside the optimizer's state;
# while it trains, an update being made and a replica on its way take less


class Part(NamedTuple):
    """One thing that takes memory."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Demand:
    """What is to be trained, as far as memory depends on it."""

    n_params: int
    optimizer: str = "adam"  # one of OPTIMIZERS
    library: str = "torch"  # one of LIBRARY_BYTES
    buffers_bytes: int = 0  # of BatchNorm and the like


def demand_of(model: FlatModel) -> Demand:
    """A model's, as far as it says: of an optimizer that is not ours, Adam is assumed."""
    kind = type(model).__module__.removeprefix("sparkstrom.models.").partition(".")[0]
    described = model.describe().get("updater")
    updater = described.get("name", "") if isinstance(described, dict) else ""
    return Demand(
        model.n_params,
        updater if updater in OPTIMIZERS else "adam",
        kind if kind in LIBRARY_BYTES else "dense",
        len(model.buffers_bytes()) if isinstance(model, Buffered) else 0,
    )


def edges_of(tree: Topology) -> tuple[int, int]:
    """Neighbours of an executor's workers elsewhere, and on it: what its driver has room for.

    In a mesh a worker has children, too; those of its own executor first.
    """
    meshed = tree.depth_max > 1
    return (
        EDGES_PER_EXECUTOR + (tree.fan_out if meshed else 0),
        EDGES_PER_EXECUTOR if meshed else 0,
    )


def driver_edges(tree: Topology, workers: int) -> int:
    """Neighbours of the driver program's media driver."""
    return min(workers, tree.fan_out)


def worker_parts(demand: Demand, master: SharedTrainingMaster) -> list[Part]:
    """What one Python worker holds at most; every worker keeps a log, for whoever asks it."""
    void, vector = master.void, F32 * demand.n_params
    learnt = "local" if master.train_on == "local" else "residual and what a step changes"
    return [
        Part("Python, numpy, llvmlite, pyarrow", PYTHON_BYTES),
        *([Part(demand.library, size)] if (size := LIBRARY_BYTES[demand.library]) else []),
        Part("theta", vector),
        Part(learnt, vector if master.train_on == "local" else 2 * vector),
        Part("gradient", vector),
        Part(f"state of {demand.optimizer}", OPTIMIZERS[demand.optimizer] * vector),
        Part("kept for the next fit, at the end", (KEPT + OPTIMIZERS[demand.optimizer]) * vector),
        *([Part("buffers", 3 * demand.buffers_bytes)] if demand.buffers_bytes else []),
        Part("rows (batch_memory_bytes)", master.batch_memory_bytes),
        Part("recent commits (log_bytes)", void.log_bytes),
        Part("others' updates and own ones (2 x window_bytes)", 2 * void.window_bytes),
    ]


def driver_parts(demand: Demand, master: SharedTrainingMaster, workers: int) -> list[Part]:
    """What the driver program's Python holds at most."""
    vector = F32 * demand.n_params
    return [
        Part("Python, pyspark, numpy, llvmlite, pyarrow", DRIVER_PYTHON_BYTES),
        *([Part(demand.library, size)] if (size := LIBRARY_BYTES[demand.library]) else []),
        Part("the model and the network's parameters", 2 * vector),
        Part("theta", vector),
        Part("a replica on its way, at the start and at the end", 3 * vector),
        *([Part("buffers", 3 * demand.buffers_bytes)] if demand.buffers_bytes else []),
        Part("recent commits (log_bytes)", master.void.log_bytes),
        *checkpoint_parts(demand, master, workers),
    ]


def checkpoint_parts(demand: Demand, master: TrainingMaster, workers: int) -> list[Part]:
    """While one is written, from chunks put together, the next states are on their way."""
    if master.checkpoint_directory is None:
        return []
    vector, copies = F32 * demand.n_params, workers if master.checkpoint_updaters == ALL else 1
    return [
        Part("a checkpoint that is written", 3 * vector + 2 * demand.buffers_bytes),
        Part("optimizers' states in it", (2 * copies + 1) * OPTIMIZERS[demand.optimizer] * vector),
    ]


def media_driver_parts(edges: int) -> list[Part]:
    """Of one media driver: a process, and its logs in shared memory, which count as its memory."""
    return [
        Part("media driver", AERON_BYTES),
        Part("its logs in shared memory", shared_memory_bytes(edges)),
    ]


def shared_memory_bytes(edges: int) -> int:
    """What one media driver wants of /dev/shm."""
    return needed_bytes(edges, *TERMS[0])


def total(parts: Sequence[Part]) -> int:
    """Bytes of all."""
    return sum(part.bytes for part in parts)


def executor_overhead(
    demand: Demand, master: SharedTrainingMaster, workers: int, workers_here: int
) -> int:
    """Bytes beside an executor's heap: its Python workers and its media driver.

    A controller in a task may be on any of them, in addition.
    """
    edges = sum(edges_of(master.void.topology(workers)))
    apart = parse_controller(master.void.controller).apart
    beside = driver_overhead(demand, master, workers) if apart else 0
    here = total(media_driver_parts(edges)) + workers_here * total(worker_parts(demand, master))
    return here + beside


def driver_overhead(demand: Demand, master: SharedTrainingMaster, workers: int) -> int:
    """Bytes beside the driver's heap, where the driver program runs in a container."""
    edges = driver_edges(master.void.topology(workers), workers)
    return total(media_driver_parts(edges)) + total(driver_parts(demand, master, workers))
