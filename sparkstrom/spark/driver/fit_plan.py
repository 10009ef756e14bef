"""Fit plan: what a fit will take of memory, shared memory and ports, before there is a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparkstrom.base.errors import UsageError
from sparkstrom.spark.driver.common_options import ALL_SLOTS
from sparkstrom.spark.driver.controller_choice import parse_controller
from sparkstrom.spark.driver.discovery import PORTS_PER_HOST, VoidConfiguration
from sparkstrom.spark.driver.memory_parts import (
    LIBRARY_BYTES,
    MIB,
    OPTIMIZERS,
    PACKED_BYTES,
    Demand,
    Part,
    driver_edges,
    driver_overhead,
    driver_parts,
    edges_of,
    executor_overhead,
    media_driver_parts,
    shared_memory_bytes,
    total,
    worker_parts,
)
from sparkstrom.spark.driver.options import need_one_of, need_whole
from sparkstrom.spark.driver.training_master import SharedTrainingMaster

UNICAST_PORT = 40_123  # DL4J's, as the samples in conf/ have it
OF_MASTER = ("batch_memory_bytes", "train_on", "checkpoint_updaters")
OF_VOID = ("log_bytes", "window_bytes", "mesh_build_mode", "mesh_fan_out", "controller")
FITS_PER_PORT = 2  # the media driver of the fit before keeps its port for some seconds


@dataclass(frozen=True, slots=True)
class Placing:
    """How workers are spread. Raises UsageError for numbers that no cluster has."""

    workers: int
    per_executor: int = 1
    executors_per_host: int = 1

    def __post_init__(self) -> None:
        need_whole("workers", self.workers, 1)
        need_whole("workers_per_node", self.per_executor, 1)
        need_whole("executors_per_host", self.executors_per_host, 1)
        if self.per_executor > self.workers:
            raise UsageError(
                f"workers_per_node={self.per_executor}: there are {self.workers} workers in all; "
                "an executor cannot have more"
            )


@dataclass(frozen=True, slots=True)
class FitPlan:
    """What is needed, by part and place; sizes in bytes."""

    placing: Placing
    master: SharedTrainingMaster
    worker: list[Part]  # one Python worker
    media_driver: list[Part]  # of one executor
    driver: list[Part]
    executor_overhead: int  # beside the heap
    driver_overhead: int
    heap: int  # of every JVM, for the initial parameters' broadcast
    shared_memory_executor: int  # one executor's
    shared_memory_host: int  # of all executors of a host
    shared_memory_driver: int
    ports: tuple[int, int]  # UDP, first and last, on every host

    @property
    def executors(self) -> int:
        """In all; one slot more than there are workers where the controller is a task."""
        apart = parse_controller(self.master.void.controller).apart
        return -(-(self.placing.workers + apart) // self.placing.per_executor)

    def _workers_per_node(self) -> int:
        """As many as planned; all slots but one are no such number."""
        apart = parse_controller(self.master.void.controller).apart
        return ALL_SLOTS if apart else self.placing.per_executor

    def conf(self) -> list[str]:
        """The lines to give to spark-submit."""
        first, last = self.ports
        lines = [
            f"spark.executor.instances={self.executors}",
            f"spark.executor.cores={self.placing.per_executor}",
            f"spark.executor.memoryOverhead={mib(self.executor_overhead)}m",
            f"spark.driver.memoryOverhead={mib(self.driver_overhead)}m",
            f"spark.sparkstrom.workers_per_node={self._workers_per_node()}",
            f"spark.sparkstrom.unicast_port={first}",
            f"spark.sparkstrom.port_range={first}-{last}",
            *otherwise(self.master, SharedTrainingMaster(), OF_MASTER),
            *otherwise(self.master.void, VoidConfiguration(), OF_VOID),
        ]
        return [f"--conf {line}" for line in lines]

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""

        def parts(of: list[Part]) -> dict[str, int]:
            return {part.name: part.bytes for part in of}

        return {
            "workers": self.placing.workers,
            "executors": self.executors,
            "workers_per_executor": self.placing.per_executor,
            "worker": parts(self.worker) | {"total": total(self.worker)},
            "media_driver": parts(self.media_driver) | {"total": total(self.media_driver)},
            "driver": parts(self.driver) | {"total": total(self.driver)},
            "executor_overhead_bytes": self.executor_overhead,
            "driver_overhead_bytes": self.driver_overhead,
            "heap_bytes": self.heap,
            "shared_memory_bytes": {
                "executor": self.shared_memory_executor,
                "host": self.shared_memory_host,
                "driver": self.shared_memory_driver,
            },
            "udp_ports": list(self.ports),
            "conf": self.conf(),
        }


def plan_fit(demand: Demand, placing: Placing, master: SharedTrainingMaster) -> FitPlan:
    """Raise UsageError for a demand that no fit can have."""
    check_demand(demand)
    tree = master.void.topology(placing.workers)
    edges = sum(edges_of(tree))
    here = shared_memory_bytes(edges)
    return FitPlan(
        placing,
        master,
        worker_parts(demand, master),
        media_driver_parts(edges),
        driver_parts(demand, master, placing.workers),
        executor_overhead(demand, master, placing.workers, placing.per_executor),
        driver_overhead(demand, master, placing.workers),
        PACKED_BYTES * demand.n_params + demand.buffers_bytes,
        here,
        placing.executors_per_host * here,
        shared_memory_bytes(driver_edges(tree, placing.workers)),
        _ports(placing, master),
    )


def check_demand(demand: Demand) -> None:
    """Raise UsageError for what nobody can train."""
    need_whole("params", demand.n_params, 1)
    need_whole("buffers", demand.buffers_bytes, 0)
    need_one_of("optimizer", demand.optimizer, tuple(OPTIMIZERS))
    need_one_of("library", demand.library, tuple(LIBRARY_BYTES))


def otherwise(options: Any, default: Any, names: tuple[str, ...]) -> list[str]:
    """Options that the plan counts on and that are not what they are by default."""
    changed = [name for name in names if getattr(options, name) != getattr(default, name)]
    return [f"spark.sparkstrom.{name}={getattr(options, name)}" for name in changed]


def _ports(placing: Placing, master: SharedTrainingMaster) -> tuple[int, int]:
    """One for each executor of a host, as many for the fit before, and one for the driver."""
    needed = FITS_PER_PORT * placing.executors_per_host + 1
    first = master.void.unicast_port or UNICAST_PORT
    last = first + max(needed, PORTS_PER_HOST) - 1
    if last > 65_535:
        raise UsageError(
            f"unicast_port={first}: {needed} ports are wanted from there on, and the last is "
            "65535; begin lower"
        )
    return first, last


def mib(size: int) -> int:
    """Whole MiB that are enough."""
    return -(-size // MIB)


def text_of_plan(plan: FitPlan) -> str:
    """For people."""
    here = plan.placing
    sections = [
        section("one Python worker", plan.worker),
        section("the media driver of an executor", plan.media_driver),
        section("the driver program's Python", plan.driver),
    ]
    first, last = plan.ports
    sections.append(
        "\n".join(
            [
                f"{plan.executors} executors of {here.per_executor} workers, "
                f"{here.executors_per_host} on a host",
                f"  beside an executor's heap         {mib(plan.executor_overhead):>8,} MiB",
                f"  beside the driver's heap          {mib(plan.driver_overhead):>8,} MiB",
                f"  of each heap, for the parameters  {mib(plan.heap):>8,} MiB",
                f"  /dev/shm of a host with executors {mib(plan.shared_memory_host):>8,} MiB"
                f" (docker: --shm-size={mib(plan.shared_memory_host)}m)",
                f"  /dev/shm of the driver's host     {mib(plan.shared_memory_driver):>8,} MiB",
                f"  UDP ports of every host           {first}-{last}",
            ]
        )
    )
    sections.append("\n".join(["Spark's configuration:", *plan.conf()]))
    return "\n\n".join(sections)


def section(title: str, parts: list[Part]) -> str:
    """Of a plan's text."""
    width = 64
    rows = [f"  {part.name:<{width}} {mib(part.bytes):>8,} MiB" for part in parts if part.bytes]
    return "\n".join([title, *rows, f"  {'in all':<{width}} {mib(total(parts)):>8,} MiB"])
