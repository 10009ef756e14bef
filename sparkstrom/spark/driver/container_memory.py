"""Container memory: what an executor's container has beside its heap, and what it needs.

YARN and Kubernetes kill containers that use more than heap + overhead. Before a fit the plan
(``memory_parts``) says what is too little; when a container was killed all the same, its
manager's own figures come on top.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparkstrom.spark.driver.averaging_master import TrainingMaster
from sparkstrom.spark.driver.common_options import ALL_SLOTS
from sparkstrom.spark.driver.memory_parts import MIB, Demand, executor_overhead
from sparkstrom.spark.driver.rounds_memory import round_overhead
from sparkstrom.spark.driver.training_master import SharedTrainingMaster

OVERHEAD_MIN, OVERHEAD_SHARE = "384", "0.10"  # Spark's defaults: MiB at least, of the heap
SPARE = 0.25  # of a container that was killed: it was looked at before it had all it wanted

# In Spark's words: YarnAllocator's for both of YARN's checks, ExecutorPodsLifecycleManager's.
BY_YARN = re.compile(
    r"exceeding (physical|virtual) memory limits\W+([\d.]+ ?[KMGT]?B) of ([\d.]+ ?[KMGT]?B)"
)
BY_KERNEL = re.compile(r"possible container OOM|OOMKilled")


@dataclass(frozen=True, slots=True)
class Beside:
    """One executor's container, as it is configured; sizes in bytes."""

    heap: int
    overhead: int
    python: int  # spark.executor.pyspark.memory, which is a part of the container, too

    @classmethod
    def of(cls, conf: Any) -> Beside:
        """What Spark asks its cluster manager for."""
        heap = parse_bytes(conf.get("spark.executor.memory", "1g"))
        least = parse_bytes(conf.get("spark.executor.minMemoryOverhead", OVERHEAD_MIN), unit=MIB)
        share = float(conf.get("spark.executor.memoryOverheadFactor", OVERHEAD_SHARE))
        said = conf.get("spark.executor.memoryOverhead")
        overhead = parse_bytes(said, unit=MIB) if said else max(least, int(share * heap))
        python = parse_bytes(conf.get("spark.executor.pyspark.memory", "0"), unit=MIB)
        return cls(heap, overhead, python)

    @property
    def given(self) -> int:
        """For everything that is not in the JVM's heap."""
        return self.overhead + self.python


@dataclass(frozen=True, slots=True)
class Need:
    """What a fit is reckoned to take of every container beside the heap."""

    workers: int  # of one executor
    n_params: int
    bytes: int
    master: TrainingMaster

    @classmethod
    def of(cls, conf: Any, workers: int, demand: Demand, master: TrainingMaster) -> Need:
        """With so many workers in all."""
        slots = int(conf.get("spark.executor.cores", "1")) // int(conf.get("spark.task.cpus", "1"))
        here = max(1, slots if master.workers_per_node == ALL_SLOTS else master.workers_per_node)
        if isinstance(master, SharedTrainingMaster):
            needed = executor_overhead(demand, master, workers, here)
        else:
            needed = round_overhead(demand, master, workers, here)
        return cls(here, demand.n_params, needed, master)

    @property
    def text(self) -> str:
        """Whose it is."""
        aeron = " and Aeron" if isinstance(self.master, SharedTrainingMaster) else ""
        return f"{self.workers} workers of {self.n_params:,} parameters{aeron}"

    @property
    def to_lower(self) -> str:
        """Options that it depends on."""
        rows = f"{self.master.batch_memory_bytes // MIB} MiB of each for rows (batch_memory_bytes)"
        if not isinstance(self.master, SharedTrainingMaster):
            return rows
        log = self.master.void.log_bytes // MIB
        return f"{rows} and {log} MiB for recent commits (log_bytes)"


def check_overhead(conf: Mapping[str, str], need: Need) -> list[str]:
    """A warning where the plan does not fit."""
    if not conf.get("spark.master", "").startswith(("yarn", "k8s")):
        return []
    beside = Beside.of(conf)
    if beside.given >= need.bytes:
        return []
    return [
        f"spark.executor.memoryOverhead is {beside.overhead // MIB} MiB; {need.text} need up to"
        f" {mib(need.bytes)} MiB beside the heap, {need.to_lower}: set --conf "
        f"spark.executor.memoryOverhead={mib(need.bytes - beside.python)}m, or lower these, or "
        "containers may be killed (`sparkstrom plan` tells the parts)"
    ]


@dataclass(frozen=True, slots=True)
class Killed:
    """A container that was killed for its memory; sizes in bytes, 0 where nobody says."""

    text: str  # what Spark says of it
    is_virtual: bool = False
    used: int = 0
    limit: int = 0


def killed_for_memory(error: str) -> Killed | None:
    """What a failed task's or job's error says of it, if that is why."""
    if found := BY_YARN.search(error):
        kind, used, limit = found.groups()
        text = f"YARN counted {used} of {limit} {kind} memory"
        return Killed(text, kind == "virtual", parse_bytes(used), parse_bytes(limit))
    if found := BY_KERNEL.search(error):
        return Killed(f"Spark says '{found.group()}'")
    return None


def enough(killed: Killed, beside: Beside, need: Need) -> int:
    """Bytes of overhead: what the plan wants, or what was used and a quarter where that is more.

    The manager looks now and then, so what it saw is not the most that would have been used.
    """
    container = beside.heap + beside.given
    share = killed.used / killed.limit if killed.limit else 1.0
    return max(need.bytes, int((share + SPARE) * container) - beside.heap) - beside.python


def killed_in_words(killed: Killed, beside: Beside, need: Need) -> str:
    """What happened, and what to set."""
    wanted = mib(enough(killed, beside, need))
    plan = need.text
    if beside.given < need.bytes:
        why = f"{plan} need up to {mib(need.bytes)} MiB (`sparkstrom plan` tells the parts)"
    else:
        why = (
            f"that holds what {plan} need, {mib(need.bytes)} MiB, so the model itself takes more: "
            "what a step computes, what a library keeps"
        )
    remedy = f"set --conf spark.executor.memoryOverhead={wanted}m"
    if killed.is_virtual:
        remedy = f"set yarn.nodemanager.vmem-check-enabled=false on its nodes, or {remedy}"
    return (
        f"a container was killed for its memory ({killed.text}); beside the heap of "
        f"{beside.heap // MIB} MiB it had {beside.given // MIB} MiB, and {why}: {remedy}"
    )


class ContainerMemory:
    """What an application's containers have and a fit needs, for when one was killed."""

    def __init__(self, conf: Any, need: Need) -> None:
        """``conf``: anything with ``get(key, default)``."""
        self._conf, self._need = conf, need

    def explain(self, error: str) -> str:
        """What to set, where a task's or a job's error is of a container killed for its memory."""
        killed = killed_for_memory(error)
        return killed_in_words(killed, Beside.of(self._conf), self._need) if killed else ""


def mib(size: int) -> int:
    """Whole MiB that are enough."""
    return -(-size // MIB)


def parse_bytes(text: str, unit: int = 1) -> int:
    """Spark's and YARN's way to write sizes: 512m, 2g, 1.5 GB, or a number in ``unit`` bytes."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)b?\s*", text.lower())
    number, suffix = found.groups()  # type: ignore[union-attr]
    factor = {"": unit, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}[suffix]
    return int(float(number) * factor)
