"""Averaging plan: what a fit in rounds will take of memory, before there is a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparkstrom.spark.driver.averaging_master import ParameterAveragingTrainingMaster
from sparkstrom.spark.driver.fit_plan import Placing, check_demand, mib, otherwise, section
from sparkstrom.spark.driver.memory_parts import Demand, Part, total
from sparkstrom.spark.driver.rounds_memory import (
    round_driver_parts,
    round_overhead,
    round_worker_parts,
    shipped_bytes,
)

OF_ROUNDS = ("batch_memory_bytes", "save_updater")


@dataclass(frozen=True, slots=True)
class AveragingPlan:
    """What is needed, by part and place; sizes in bytes. Nothing of Aeron's, and no UDP port."""

    placing: Placing
    master: ParameterAveragingTrainingMaster
    worker: list[Part]  # one Python worker
    driver: list[Part]
    executor_overhead: int  # beside the heap
    heap: int  # of the driver's JVM, and so much of each executor's, for what a round begins with

    @property
    def executors(self) -> int:
        """In all."""
        return -(-self.placing.workers // self.placing.per_executor)

    def conf(self) -> list[str]:
        """The lines to give to spark-submit."""
        lines = [
            f"spark.executor.instances={self.executors}",
            f"spark.executor.cores={self.placing.per_executor}",
            f"spark.executor.memoryOverhead={mib(self.executor_overhead)}m",
            f"spark.driver.memoryOverhead={mib(total(self.driver))}m",
            f"spark.sparkstrom.workers_per_node={self.placing.per_executor}",
            *otherwise(self.master, ParameterAveragingTrainingMaster(), OF_ROUNDS),
        ]
        return [f"--conf {line}" for line in lines]

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it."""

        def parts(of: list[Part]) -> dict[str, int]:
            return {part.name: part.bytes for part in of} | {"total": total(of)}

        return {
            "workers": self.placing.workers,
            "executors": self.executors,
            "workers_per_executor": self.placing.per_executor,
            "worker": parts(self.worker),
            "driver": parts(self.driver),
            "executor_overhead_bytes": self.executor_overhead,
            "driver_overhead_bytes": total(self.driver),
            "heap_bytes": self.heap,
            "conf": self.conf(),
        }

    def __str__(self) -> str:
        """For people."""
        places = [
            f"{self.executors} executors of {self.placing.per_executor} workers",
            f"  beside an executor's heap         {mib(self.executor_overhead):>8,} MiB",
            f"  beside the driver's heap          {mib(total(self.driver)):>8,} MiB",
            f"  of each heap, for a round         {mib(self.heap):>8,} MiB",
        ]
        return "\n\n".join(
            [
                section("one Python worker", self.worker),
                section("the driver program's Python", self.driver),
                "\n".join(places),
                "\n".join(["Spark's configuration:", *self.conf()]),
            ]
        )


def plan_rounds(
    demand: Demand, placing: Placing, master: ParameterAveragingTrainingMaster
) -> AveragingPlan:
    """Raise UsageError for a demand that no fit can have."""
    check_demand(demand)
    return AveragingPlan(
        placing,
        master,
        round_worker_parts(demand, master, placing.workers),
        round_driver_parts(demand, master, placing.workers),
        round_overhead(demand, master, placing.workers, placing.per_executor),
        shipped_bytes(demand, master, placing.workers),
    )
