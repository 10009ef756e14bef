"""Estimate the memory that a fit needs, part by part, and compare it with Spark's configuration.

``sparkstrom plan`` and the warnings of ``fit`` use the same estimates. All sizes are upper bounds.
If an option limits the size of a part, the part's name contains the option's name. A media driver
is Aeron's process, which sends and receives UDP for the workers of an executor or for the driver.

YARN and Kubernetes kill containers that use more memory than heap plus overhead. Before a fit,
``check_overhead`` compares the estimate with the configuration. After a container was killed,
``explain_memory_kill`` returns a message with the setting to change; it also uses what the
cluster manager measured.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sparkstrom.base.units import mib, parse_bytes
from sparkstrom.models.base import FlatModel, get_buffers
from sparkstrom.options.common import ALL_SLOTS, CommonOptions
from sparkstrom.options.gradient_sharing import ALL, SharedTrainingMaster
from sparkstrom.options.network import parse_controller
from sparkstrom.options.parameter_averaging import (
    PER_WORKER,
    ParameterAveragingTrainingMaster,
    TrainingMaster,
)
from sparkstrom.protocol.common.topology import Topology
from sparkstrom.transport.aeron.channel_settings import TERM_LENGTHS, required_log_bytes

MIB = 1 << 20
EDGES_PER_EXECUTOR = 8  # number of workers' connections to assume; few executors have more workers
AERON_BYTES = 10 * MIB  # Aeron's media driver process, without its logs
PYTHON_BYTES = 140 * MIB  # one worker's interpreter, numpy, llvmlite and pyarrow
DRIVER_PYTHON_BYTES = 250 * MIB  # the same with pyspark, and with pandas and grpc, which it imports
LIBRARY_BYTES = {"dense": 0, "torch": 280 * MIB, "jax": 350 * MIB, "keras": 450 * MIB}
OPTIMIZERS = {  # number of f32[n_params] vectors in an optimizer's state
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
BROADCAST_BYTES_PER_PARAM = 3  # as packed for a broadcast (``worker.training_job.pack_parameters``)
F32_BYTES = 4
# Number of f32[n_params] vectors at the end of a fit, in addition to the optimizer's state: a copy
# of the residual (changes not sent), and its mass (sum of absolute values) in float64. Encoding an
# update or copying a replica needs less.
FINAL_VECTORS = 5


class MemoryPart(NamedTuple):
    """One part of a process's memory, with its size."""

    name: str  # what the memory is used for
    bytes: int  # its size in bytes


@dataclass(frozen=True, slots=True)
class ModelFootprint:
    """The properties of a model that determine how much memory a fit needs."""

    n_params: int  # number of parameters
    optimizer: str = "adam"  # a key of OPTIMIZERS
    library: str = "torch"  # a key of LIBRARY_BYTES
    buffers_bytes: int = 0  # size of other state, such as running statistics of BatchNorm


@dataclass(frozen=True, slots=True)
class PieceSizes:
    """The size limits, in bytes, by which parameter averaging splits large arrays for sending."""

    piece: int = 4 << 20  # a piece of a worker's result, sent to the task that sums it
    part: int = 64 << 20  # a part of a round's initial state, sent as one broadcast variable
    direct: int = 1 << 20  # results of this total size or less are summed in the driver program
    collected: int = 64 << 20  # what one Spark job may return to the driver program
    targets: int = 20_000  # number of target partitions of one shuffle of rows
    pieces_per_task: int = 1  # number of pieces of each worker that one task sums

    @property
    def bytes_per_target(self) -> int:
        """Bytes of results that one task should handle; by chance, some tasks get much more."""
        return self.collected // 8


def footprint_of_model(model: FlatModel) -> ModelFootprint:
    """Return the properties that determine a model's memory.

    An optimizer that is not in OPTIMIZERS counts as Adam. A library that computes the model and is
    not in LIBRARY_BYTES counts as "dense", which needs no additional memory.
    """
    kind = type(model).__module__.removeprefix("sparkstrom.models.").partition(".")[0]
    described = model.describe().get("updater")
    updater = described.get("name", "") if isinstance(described, dict) else ""
    return ModelFootprint(
        model.n_params,
        updater if updater in OPTIMIZERS else "adam",
        kind if kind in LIBRARY_BYTES else "dense",
        len(get_buffers(model)),
    )


def count_executor_edges(tree: Topology) -> tuple[int, int]:
    """Return how many neighbours to expect for an executor's media driver: (remote, local).

    Neighbours are connected workers or the controller. Local neighbours use the same media driver.
    In a mesh, workers also have children, preferably on their own executor.
    """
    if tree.depth_max == 1:
        return EDGES_PER_EXECUTOR, 0
    return EDGES_PER_EXECUTOR + tree.fan_out, EDGES_PER_EXECUTOR


def count_driver_edges(tree: Topology, workers: int) -> int:
    """Return the maximum number of neighbours of the driver program's media driver."""
    return min(workers, tree.fan_out)


def _part_unless_empty(name: str, size: int) -> list[MemoryPart]:
    """Return a list with the part; [] if its size is 0."""
    return [MemoryPart(name, size)] if size else []


def estimate_worker_parts(
    footprint: ModelFootprint, master: SharedTrainingMaster
) -> list[MemoryPart]:
    """Return the maximum memory of one Python worker in gradient sharing, by part, in bytes.

    This includes the log of recent commits that every worker keeps for nodes that missed some.
    """
    void, vector = master.void, F32_BYTES * footprint.n_params
    is_local = master.train_on == "local"
    trained = "local" if is_local else "residual and what a step changes"
    return [
        MemoryPart("Python, numpy, llvmlite, pyarrow", PYTHON_BYTES),
        *_part_unless_empty(footprint.library, LIBRARY_BYTES[footprint.library]),
        MemoryPart("theta", vector),
        MemoryPart(trained, vector if is_local else 2 * vector),
        MemoryPart("gradient", vector),
        MemoryPart(f"state of {footprint.optimizer}", OPTIMIZERS[footprint.optimizer] * vector),
        MemoryPart(
            "kept for the next fit, at the end",
            (FINAL_VECTORS + OPTIMIZERS[footprint.optimizer]) * vector,
        ),
        *_part_unless_empty("buffers", 3 * footprint.buffers_bytes),
        MemoryPart("rows (batch_memory_bytes)", master.batch_memory_bytes),
        MemoryPart("recent commits (log_bytes)", void.log_bytes),
        MemoryPart("others' updates and own ones (2 x window_bytes)", 2 * void.window_bytes),
    ]


def estimate_driver_parts(
    footprint: ModelFootprint, master: SharedTrainingMaster, workers: int
) -> list[MemoryPart]:
    """Return the maximum memory of the driver program's Python in gradient sharing.

    The result lists the parts of that memory, with their sizes in bytes.
    """
    vector = F32_BYTES * footprint.n_params
    return [
        MemoryPart("Python, pyspark, pandas, numpy, llvmlite", DRIVER_PYTHON_BYTES),
        *_part_unless_empty(footprint.library, LIBRARY_BYTES[footprint.library]),
        MemoryPart("the model and the network's parameters", 2 * vector),
        MemoryPart("theta", vector),
        MemoryPart("a replica on its way, at the start and at the end", 3 * vector),
        *_part_unless_empty("buffers", 3 * footprint.buffers_bytes),
        MemoryPart("recent commits (log_bytes)", master.void.log_bytes),
        *estimate_checkpoint_parts(footprint, master, workers),
    ]


def estimate_checkpoint_parts(
    footprint: ModelFootprint, master: TrainingMaster, workers: int
) -> list[MemoryPart]:
    """Return the driver program's memory for checkpoints, by part; [] if none are written.

    The result includes the optimizer states that arrive for the next checkpoint while one is still
    being written.
    """
    if master.checkpoint_directory is None:
        return []
    vector = F32_BYTES * footprint.n_params
    copies = workers if master.checkpoint_updaters == ALL else 1
    return [
        MemoryPart("a checkpoint that is written", 3 * vector + 2 * footprint.buffers_bytes),
        MemoryPart(
            "optimizers' states in it", (2 * copies + 1) * OPTIMIZERS[footprint.optimizer] * vector
        ),
    ]


def estimate_media_driver_parts(edges: int) -> list[MemoryPart]:
    """Return the memory of a media driver for ``edges`` neighbours: its process and its logs."""
    return [
        MemoryPart("media driver", AERON_BYTES),
        MemoryPart("its logs in shared memory", estimate_shared_memory(edges)),
    ]


def estimate_shared_memory(edges: int) -> int:
    """Return how many bytes in /dev/shm a media driver for ``edges`` neighbours needs."""
    return required_log_bytes(edges, *TERM_LENGTHS[0])


def sum_parts(parts: Sequence[MemoryPart]) -> int:
    """Return the total size of the parts in bytes."""
    return sum(part.bytes for part in parts)


def estimate_executor_overhead(
    footprint: ModelFootprint, master: SharedTrainingMaster, workers: int, workers_here: int
) -> int:
    """Return the bytes that an executor needs outside its heap: Python workers and media driver.

    If the controller (the process that numbers updates) runs in a Spark task, any executor may run
    it, so memory for the controller is included. ``workers`` is the total number of workers,
    ``workers_here`` that of the executor.
    """
    edges = sum(count_executor_edges(master.void.topology(workers)))
    needed = sum_parts(estimate_media_driver_parts(edges))
    needed += workers_here * sum_parts(estimate_worker_parts(footprint, master))
    if parse_controller(master.void.controller).is_in_task:
        needed += estimate_driver_overhead(footprint, master, workers)
    return needed


def estimate_driver_overhead(
    footprint: ModelFootprint, master: SharedTrainingMaster, workers: int
) -> int:
    """Return the bytes that the driver needs outside its heap: Python and media driver."""
    edges = count_driver_edges(master.void.topology(workers), workers)
    return sum_parts(estimate_media_driver_parts(edges)) + sum_parts(
        estimate_driver_parts(footprint, master, workers)
    )


# Parameter averaging does not use Aeron.
SUM_COPIES = 3  # copies of a piece: as received, as an array, and in the float64 sum
OUTER_VECTORS = 2  # vectors of an outer optimizer: difference from the mean, and velocity


def estimate_round_worker_parts(
    footprint: ModelFootprint, master: ParameterAveragingTrainingMaster, workers: int
) -> list[MemoryPart]:
    """Return the maximum memory of one Python worker in parameter averaging, by part, in bytes.

    The result covers both training a round and summing results. Each of several simultaneous fits
    needs this memory. ``workers`` is the total number of workers.
    """
    vector, state = F32_BYTES * footprint.n_params, OPTIMIZERS[footprint.optimizer]
    sizes = PieceSizes()
    return [
        MemoryPart("Python, numpy, llvmlite, pyarrow", PYTHON_BYTES),
        *_part_unless_empty(footprint.library, LIBRARY_BYTES[footprint.library]),
        MemoryPart("parameters", vector),
        MemoryPart("gradient, and what a step changes", 2 * vector),
        MemoryPart(f"state of {footprint.optimizer}, as it came and in use", 2 * state * vector),
        *_part_unless_empty("buffers", 3 * footprint.buffers_bytes),
        MemoryPart("rows (batch_memory_bytes)", master.batch_memory_bytes),
        MemoryPart("a part of the parameters on its way", min(sizes.part, vector)),
        MemoryPart(
            "pieces of all workers, added up", SUM_COPIES * workers * min(sizes.piece, vector)
        ),
    ]


def estimate_round_driver_parts(
    footprint: ModelFootprint, master: ParameterAveragingTrainingMaster, workers: int
) -> list[MemoryPart]:
    """Return the maximum memory of the driver program's Python in parameter averaging.

    The result lists the parts of that memory, with their sizes in bytes. ``workers`` is the total
    number of workers.
    """
    vector, state = F32_BYTES * footprint.n_params, OPTIMIZERS[footprint.optimizer]
    # Two of each state: the current one and the next one.
    copies = {PER_WORKER: 2 * workers, True: 2, False: 0}[master.save_updater]
    results = round_result_bytes(footprint, master, workers)
    outer_vectors = OUTER_VECTORS if master.outer is not None else 0
    accumulated = workers if master.accumulator is not None else 0
    return [
        MemoryPart("Python, pyspark, pandas, numpy, llvmlite", DRIVER_PYTHON_BYTES),
        *_part_unless_empty(footprint.library, LIBRARY_BYTES[footprint.library]),
        MemoryPart("the model and the network's parameters", 2 * vector),
        MemoryPart("parameters of the round, and their mean", 2 * vector),
        MemoryPart("a fresh optimizer's state", state * vector),
        MemoryPart("optimizers' states (save_updater)", copies * state * vector),
        *_part_unless_empty("the outer step", outer_vectors * vector),
        *_part_unless_empty("every worker's parameters (accumulator)", accumulated * vector),
        *_part_unless_empty("buffers", (3 + workers) * footprint.buffers_bytes),
        MemoryPart("results of one job", min(PieceSizes().collected, results)),
        *estimate_checkpoint_parts(footprint, master, workers),
    ]


def worker_round_bytes(footprint: ModelFootprint, master: ParameterAveragingTrainingMaster) -> int:
    """Return how many bytes one worker sends after a round.

    It sends its parameters and, unless ``save_updater`` is False, its optimizer state.
    """
    states = OPTIMIZERS[footprint.optimizer] if master.save_updater else 0
    return (1 + states) * F32_BYTES * footprint.n_params


def round_result_bytes(
    footprint: ModelFootprint, master: ParameterAveragingTrainingMaster, workers: int
) -> int:
    """Return how many bytes the driver program receives per round.

    With an ``aggregation_depth`` of 1, executors send every worker's result. Otherwise they send
    the means of parameters and of optimizer states, or every worker's values of those that an
    accumulator or ``save_updater="own"`` exempts from averaging.
    """
    sent, vector = worker_round_bytes(footprint, master), F32_BYTES * footprint.n_params
    if master.aggregation_depth == 1:
        return workers * sent
    vectors = 1 if master.accumulator is None else workers
    states = workers if master.save_updater == PER_WORKER else 1
    return vectors * vector + states * (sent - vector)


def estimate_averaging_executor_overhead(
    footprint: ModelFootprint,
    master: ParameterAveragingTrainingMaster,
    workers: int,
    workers_here: int,
) -> int:
    """Return the bytes that an executor needs outside its heap in parameter averaging.

    ``workers`` is the total number of workers, ``workers_here`` that of the executor.
    """
    return workers_here * sum_parts(estimate_round_worker_parts(footprint, master, workers))


def round_broadcast_bytes(
    footprint: ModelFootprint, master: ParameterAveragingTrainingMaster, workers: int
) -> int:
    """Return how many bytes each round broadcasts; every JVM stores them in its heap."""
    copies = workers if master.save_updater == PER_WORKER else 1
    vectors = 1 + copies * OPTIMIZERS[footprint.optimizer]
    return vectors * F32_BYTES * footprint.n_params + footprint.buffers_bytes


OVERHEAD_MIN, OVERHEAD_SHARE = "384", "0.10"  # Spark's defaults: minimum MiB, and share of the heap
PEAK_MARGIN = 0.25  # share of a container's size to add, because its use is measured before a peak

# Messages of Spark's YarnAllocator (for both of YARN's checks) and ExecutorPodsLifecycleManager.
YARN_KILL_PATTERN = re.compile(
    r"exceeding (physical|virtual) memory limits\W+([\d.]+ ?[KMGT]?B) of ([\d.]+ ?[KMGT]?B)"
)
OOM_KILL_PATTERN = re.compile(r"possible container OOM|OOMKilled")


@dataclass(frozen=True, slots=True)
class ContainerLayout:
    """The memory configuration of one executor's container, in bytes."""

    heap: int  # spark.executor.memory
    overhead: int  # spark.executor.memoryOverhead
    python: int  # spark.executor.pyspark.memory, which is added to the container's size

    @classmethod
    def from_conf(cls, conf: Any) -> ContainerLayout:
        """Return the layout that Spark requests. ``conf`` has a method ``get(key, default)``."""
        heap = parse_bytes(conf.get("spark.executor.memory", "1g"), unit=MIB)
        least = parse_bytes(conf.get("spark.executor.minMemoryOverhead", OVERHEAD_MIN), unit=MIB)
        share = float(conf.get("spark.executor.memoryOverheadFactor", OVERHEAD_SHARE))
        said = conf.get("spark.executor.memoryOverhead")
        overhead = parse_bytes(said, unit=MIB) if said else max(least, int(share * heap))
        python = parse_bytes(conf.get("spark.executor.pyspark.memory", "0"), unit=MIB)
        return cls(heap, overhead, python)

    @property
    def outside_heap(self) -> int:
        """Number of bytes for everything outside the JVM's heap."""
        return self.overhead + self.python


@dataclass(frozen=True, slots=True)
class MemoryRequirement:
    """The memory that a fit is expected to use outside the heap, in every executor's container."""

    workers: int  # number of workers of one executor
    n_params: int  # number of parameters
    bytes: int  # required memory in bytes
    batch_memory_bytes: int  # value of this option
    log_bytes: int | None = None  # value of this option; None in parameter averaging: no log

    @property
    def text(self) -> str:
        """What needs the memory, in words for messages: how many workers of which model size."""
        aeron = "" if self.log_bytes is None else " and Aeron"
        return f"{self.workers} workers of {self.n_params:,} parameters{aeron}"

    @property
    def reducing_options(self) -> str:
        """The options that can reduce the requirement, with their current values, as text."""
        rows = f"{self.batch_memory_bytes // MIB} MiB of each for rows (batch_memory_bytes)"
        if self.log_bytes is None:
            return rows
        return f"{rows} and {self.log_bytes // MIB} MiB for recent commits (log_bytes)"


def gradient_sharing_memory(
    conf: Any, workers: int, footprint: ModelFootprint, master: SharedTrainingMaster
) -> MemoryRequirement:
    """Return the memory that gradient sharing with ``workers`` workers in total needs per executor.

    ``conf`` is Spark's configuration, with a method ``get(key, default)``.
    """
    here = _workers_on_executor(conf, master)
    needed = estimate_executor_overhead(footprint, master, workers, here)
    rows, log = master.batch_memory_bytes, master.void.log_bytes
    return MemoryRequirement(here, footprint.n_params, needed, rows, log)


def rounds_memory(
    conf: Any, workers: int, footprint: ModelFootprint, master: ParameterAveragingTrainingMaster
) -> MemoryRequirement:
    """Return the memory that averaging with ``workers`` workers in total needs per executor.

    ``conf`` is Spark's configuration, with a method ``get(key, default)``.
    """
    here = _workers_on_executor(conf, master)
    needed = estimate_averaging_executor_overhead(footprint, master, workers, here)
    return MemoryRequirement(here, footprint.n_params, needed, master.batch_memory_bytes)


def _workers_on_executor(conf: Any, master: CommonOptions) -> int:
    """Return the number of workers that Spark may start on one executor.

    ``conf`` is Spark's configuration, with a method ``get(key, default)``.
    """
    slots = int(conf.get("spark.executor.cores", "1")) // int(conf.get("spark.task.cpus", "1"))
    return max(1, slots if master.workers_per_node == ALL_SLOTS else master.workers_per_node)


def check_overhead(conf: Mapping[str, str], requirement: MemoryRequirement) -> list[str]:
    """Return a list with a warning if the configured overhead is too small, else [].

    The check is only for YARN and Kubernetes, which kill containers that use too much memory.
    """
    if not conf.get("spark.master", "").startswith(("yarn", "k8s")):
        return []
    layout = ContainerLayout.from_conf(conf)
    if layout.outside_heap >= requirement.bytes:
        return []
    return [
        f"spark.executor.memoryOverhead is {layout.overhead // MIB} MiB; {requirement.text} need"
        f" up to {mib(requirement.bytes)} MiB beside the heap, {requirement.reducing_options}: set"
        f" --conf spark.executor.memoryOverhead={mib(requirement.bytes - layout.python)}m, or lower"
        " these, or containers may be killed (`sparkstrom plan` lists the parts)"
    ]


@dataclass(frozen=True, slots=True)
class KilledContainer:
    """A container that was killed for using too much memory. Sizes are in bytes, 0 if unknown."""

    text: str  # description of the event, for messages
    is_virtual: bool = False  # whether YARN's limit on virtual memory was exceeded
    used_bytes: int = 0  # memory use that the cluster manager measured
    limit: int = 0  # memory limit of the container


def parse_memory_kill(error: str) -> KilledContainer | None:
    """Parse the error of a failed task or job.

    Return None unless a container was killed for using too much memory.
    """
    if found := YARN_KILL_PATTERN.search(error):
        kind, used, limit = found.groups()
        text = f"YARN counted {used} of {limit} {kind} memory"
        return KilledContainer(text, kind == "virtual", parse_bytes(used), parse_bytes(limit))
    if found := OOM_KILL_PATTERN.search(error):
        return KilledContainer(f"Spark says '{found.group()}'")
    return None


def sufficient_overhead(
    killed: KilledContainer, layout: ContainerLayout, requirement: MemoryRequirement
) -> int:
    """Return the overhead to configure, in bytes: the requirement, or the measured use if larger.

    A margin is added to the measured use, because the cluster manager does not see the peak. If the
    use is unknown, the whole container counts as used.
    """
    container = layout.heap + layout.outside_heap
    share = killed.used_bytes / killed.limit if killed.limit else 1.0
    used = int((share + PEAK_MARGIN) * container) - layout.heap
    return max(requirement.bytes, used) - layout.python


def format_memory_kill(
    killed: KilledContainer, layout: ContainerLayout, requirement: MemoryRequirement
) -> str:
    """Return the message about a killed container: what happened, and which setting to change."""
    wanted = mib(sufficient_overhead(killed, layout, requirement))
    plan = requirement.text
    if layout.outside_heap < requirement.bytes:
        why = f"{plan} need up to {mib(requirement.bytes)} MiB (`sparkstrom plan` lists the parts)"
    else:
        why = (
            f"that includes what {plan} need, {mib(requirement.bytes)} MiB, so the model itself"
            " takes more: temporary arrays of a step, or memory that a library keeps"
        )
    remedy = f"set --conf spark.executor.memoryOverhead={wanted}m"
    if killed.is_virtual:
        remedy = f"set yarn.nodemanager.vmem-check-enabled=false on its nodes, or {remedy}"
    return (
        f"a container was killed for its memory ({killed.text}); beside the heap of "
        f"{layout.heap // MIB} MiB it had {layout.outside_heap // MIB} MiB, and {why}: {remedy}"
    )


def explain_memory_kill(conf: Any, requirement: MemoryRequirement, error: str) -> str:
    """Return a message with a remedy if a container was killed for using too much memory.

    ``error`` is the error of a failed task or job; return "" if no container was killed for its
    memory. ``conf`` is Spark's configuration, with a method ``get(key, default)``.
    """
    killed = parse_memory_kill(error)
    if killed is None:
        return ""
    return format_memory_kill(killed, ContainerLayout.from_conf(conf), requirement)
