"""Compute the memory, UDP ports and Spark configuration that a fit needs, without a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparkstrom.base.errors import UsageError
from sparkstrom.base.units import mib
from sparkstrom.options.common import require_one_of, require_whole
from sparkstrom.options.gradient_sharing import SharedTrainingMaster
from sparkstrom.options.network import (
    PORT_MAX,
    PORTS_PER_HOST,
    VoidConfiguration,
    parse_controller,
)
from sparkstrom.options.parameter_averaging import ParameterAveragingTrainingMaster
from sparkstrom.planning.memory import (
    BROADCAST_BYTES_PER_PARAM,
    LIBRARY_BYTES,
    OPTIMIZERS,
    MemoryPart,
    ModelFootprint,
    count_driver_edges,
    count_executor_edges,
    estimate_averaging_executor_overhead,
    estimate_driver_overhead,
    estimate_driver_parts,
    estimate_executor_overhead,
    estimate_media_driver_parts,
    estimate_round_driver_parts,
    estimate_round_worker_parts,
    estimate_shared_memory,
    estimate_worker_parts,
    round_broadcast_bytes,
    sum_parts,
)

UNICAST_PORT = 40_123  # DL4J's default, used by the samples in conf/
MASTER_OPTIONS = ("batch_memory_bytes", "train_on", "checkpoint_updaters")
NETWORK_OPTIONS = ("log_bytes", "window_bytes", "mesh_build_mode", "mesh_fan_out", "controller")
AVERAGING_OPTIONS = ("batch_memory_bytes", "save_updater")
FITS_PER_PORT = 2  # ports per executor: the previous fit's media driver keeps one for some seconds


@dataclass(frozen=True, slots=True)
class WorkerCounts:
    """The number of workers, in total and per executor, and of executors per host.

    The constructor raises UsageError for invalid numbers.
    """

    workers: int  # total number of workers
    per_executor: int = 1  # number of workers per executor
    executors_per_host: int = 1  # number of executors per host

    def __post_init__(self) -> None:
        require_whole("workers", self.workers, 1)
        require_whole("workers_per_node", self.per_executor, 1)
        require_whole("executors_per_host", self.executors_per_host, 1)
        if self.per_executor > self.workers:
            raise UsageError(
                f"workers_per_node={self.per_executor}: there are {self.workers} workers in all; "
                "an executor cannot have more"
            )
        if rest := self.workers % self.per_executor:
            fewer = self.workers - rest
            raise UsageError(
                f"workers={self.workers} with workers_per_node={self.per_executor}: a fit has the"
                f" same number of workers on each executor; plan {fewer} or"
                f" {fewer + self.per_executor} workers, or change workers_per_node"
            )


@dataclass(frozen=True, slots=True)
class NetworkPlan:
    """The resources that only a gradient-sharing fit needs, for its network. Sizes are in bytes."""

    media_driver: list[MemoryPart]  # memory of an executor's media driver
    shared_memory_executor: int  # space in /dev/shm for one executor
    shared_memory_host: int  # space in /dev/shm for all executors of a host
    shared_memory_driver: int  # space in /dev/shm for the driver
    ports: tuple[int, int]  # first and last UDP port, the same on every host


@dataclass(frozen=True, slots=True)
class FitPlan:
    """The resources that a fit needs, by process and part. Sizes are in bytes."""

    placement: WorkerCounts  # numbers of workers, and of executors per host
    worker: list[MemoryPart]  # memory of one Python worker
    driver: list[MemoryPart]  # memory of the driver program's Python process
    executor_overhead: int  # memory outside an executor's heap
    driver_overhead: int  # memory outside the driver's heap
    heap: int  # space for broadcast parameters in the heap of every JVM
    options: list[str]  # ``spark.sparkstrom.*`` settings that differ from the defaults
    has_controller_task: bool = False  # whether the controller takes an additional task slot
    network: NetworkPlan | None = None  # None for parameter averaging, which uses no UDP

    @property
    def executors(self) -> int:
        """Number of executors."""
        return self.placement.workers // self.placement.per_executor

    def conf(self) -> list[str]:
        """Return the ``--conf`` arguments for spark-submit."""
        workers = self.placement.per_executor
        lines = [
            f"spark.executor.instances={self.executors}",
            # Executors are equal, so each has a slot for the controller's task.
            f"spark.executor.cores={workers + self.has_controller_task}",
            f"spark.executor.memoryOverhead={mib(self.executor_overhead)}m",
            f"spark.driver.memoryOverhead={mib(self.driver_overhead)}m",
            f"spark.sparkstrom.workers_per_node={workers}",
        ]
        if self.network is not None:
            first, last = self.network.ports
            lines += [
                f"spark.sparkstrom.unicast_port={first}",
                f"spark.sparkstrom.port_range={first}-{last}",
            ]
        return [f"--conf {line}" for line in [*lines, *self.options]]

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as a dictionary for JSON, with sizes in bytes."""

        def sizes(parts: list[MemoryPart]) -> dict[str, int]:
            return {part.name: part.bytes for part in parts} | {"total": sum_parts(parts)}

        network = self.network
        return {
            "workers": self.placement.workers,
            "executors": self.executors,
            "workers_per_executor": self.placement.per_executor,
            "worker": sizes(self.worker),
            **({"media_driver": sizes(network.media_driver)} if network else {}),
            "driver": sizes(self.driver),
            "executor_overhead_bytes": self.executor_overhead,
            "driver_overhead_bytes": self.driver_overhead,
            "heap_bytes": self.heap,
            **(_network_to_dict(network) if network else {}),
            "conf": self.conf(),
        }


def _network_to_dict(network: NetworkPlan) -> dict[str, Any]:
    """Return the shared memory and the ports as a dictionary for JSON."""
    return {
        "shared_memory_bytes": {
            "executor": network.shared_memory_executor,
            "host": network.shared_memory_host,
            "driver": network.shared_memory_driver,
        },
        "udp_ports": list(network.ports),
    }


def plan_fit(
    footprint: ModelFootprint, placement: WorkerCounts, master: SharedTrainingMaster
) -> FitPlan:
    """Return the plan of a gradient-sharing fit. Raise UsageError for invalid numbers."""
    check_footprint(footprint)
    tree = master.void.topology(placement.workers)
    edges = sum(count_executor_edges(tree))
    here = estimate_shared_memory(edges)
    return FitPlan(
        placement,
        estimate_worker_parts(footprint, master),
        estimate_driver_parts(footprint, master, placement.workers),
        estimate_executor_overhead(footprint, master, placement.workers, placement.per_executor),
        estimate_driver_overhead(footprint, master, placement.workers),
        BROADCAST_BYTES_PER_PARAM * footprint.n_params + footprint.buffers_bytes,
        format_changed_options(master, SharedTrainingMaster(), MASTER_OPTIONS)
        + format_changed_options(master.void, VoidConfiguration(), NETWORK_OPTIONS),
        parse_controller(master.void.controller).is_in_task,
        NetworkPlan(
            estimate_media_driver_parts(edges),
            here,
            placement.executors_per_host * here,
            estimate_shared_memory(count_driver_edges(tree, placement.workers)),
            _plan_ports(placement, master),
        ),
    )


def plan_averaging(
    footprint: ModelFootprint, placement: WorkerCounts, master: ParameterAveragingTrainingMaster
) -> FitPlan:
    """Return the plan of a parameter-averaging fit. Raise UsageError for invalid numbers."""
    check_footprint(footprint)
    driver = estimate_round_driver_parts(footprint, master, placement.workers)
    return FitPlan(
        placement,
        estimate_round_worker_parts(footprint, master, placement.workers),
        driver,
        estimate_averaging_executor_overhead(
            footprint, master, placement.workers, placement.per_executor
        ),
        sum_parts(driver),
        round_broadcast_bytes(footprint, master, placement.workers),
        format_changed_options(master, ParameterAveragingTrainingMaster(), AVERAGING_OPTIONS),
    )


def check_footprint(footprint: ModelFootprint) -> None:
    """Raise UsageError if the model's sizes or its optimizer's or library's name are invalid."""
    require_whole("params", footprint.n_params, 1)
    require_whole("buffers", footprint.buffers_bytes, 0)
    require_one_of("optimizer", footprint.optimizer, tuple(OPTIMIZERS))
    require_one_of("library", footprint.library, tuple(LIBRARY_BYTES))


def format_changed_options(options: Any, default: Any, names: tuple[str, ...]) -> list[str]:
    """Return ``spark.sparkstrom.*`` settings for the options whose values differ from the defaults.

    ``default`` is an instance with the defaults, ``names`` the names of the options to compare.
    """
    changed = [name for name in names if getattr(options, name) != getattr(default, name)]
    return [f"spark.sparkstrom.{name}={getattr(options, name)}" for name in changed]


def _plan_ports(placement: WorkerCounts, master: SharedTrainingMaster) -> tuple[int, int]:
    """Return the first and last UDP port that a host needs.

    Each executor needs one port, and the previous fit may still be using as many. The driver needs
    another port. A range that would end above 65535 ends there. Raise UsageError if it then has too
    few ports.
    """
    needed = FITS_PER_PORT * placement.executors_per_host + 1
    first = master.void.unicast_port or UNICAST_PORT
    last = min(first + max(needed, PORTS_PER_HOST) - 1, PORT_MAX)
    if first + needed - 1 > last:
        raise UsageError(
            f"unicast_port={first}: a host needs {needed} ports from there on, but the last port "
            f"is {PORT_MAX}; choose a lower unicast_port"
        )
    return first, last


def format_plan(plan: FitPlan) -> str:
    """Return the plan as text: tables of memory parts, totals, and Spark's configuration."""
    network, hosts = plan.network, f", {plan.placement.executors_per_host} on a host"
    use = "for the parameters" if network else "for a round"
    lines = [
        f"{plan.executors} executors of {plan.placement.per_executor} workers"
        + (hosts if network else ""),
        _format_size_line("beside an executor's heap", plan.executor_overhead),
        _format_size_line("beside the driver's heap", plan.driver_overhead),
        _format_size_line(f"of each heap, {use}", plan.heap),
    ]
    sections = [format_section("one Python worker", plan.worker)]
    if network is not None:
        sections.append(format_section("the media driver of an executor", network.media_driver))
        shared, (first, last) = network.shared_memory_host, network.ports
        lines += [
            _format_size_line("/dev/shm of a host with executors", shared)
            + f" (docker: --shm-size={mib(shared)}m)",
            _format_size_line("/dev/shm of the driver's host", network.shared_memory_driver),
            f"  {'UDP ports of every host':<33} {first}-{last}",
        ]
    sections.append(format_section("the driver program's Python", plan.driver))
    conf = "\n".join(["Spark's configuration:", *plan.conf()])
    return "\n\n".join([*sections, "\n".join(lines), conf])


def _format_size_line(name: str, size: int) -> str:
    """Return an indented line with a name and a size in MiB."""
    return f"  {name:<33} {mib(size):>8,} MiB"


def format_section(title: str, parts: list[MemoryPart]) -> str:
    """Return a table of memory parts as text, with a title and the total."""
    width = 64
    rows = [f"  {part.name:<{width}} {mib(part.bytes):>8,} MiB" for part in parts if part.bytes]
    return "\n".join([title, *rows, f"  {'in all':<{width}} {mib(sum_parts(parts)):>8,} MiB"])
