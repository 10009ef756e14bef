"""Cluster: everything that we ask Spark before a job starts, and what we refuse by name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparkstrom.base.errors import SetupError, UsageError
from sparkstrom.spark.driver.controller_choice import parse_controller
from sparkstrom.spark.driver.memory_parts import MIB, Demand, executor_overhead
from sparkstrom.spark.driver.training_master import ALL_SLOTS, SharedTrainingMaster

OVERHEAD_MIN, OVERHEAD_SHARE = 384 * MIB, 0.10  # Spark's default memory overhead


@dataclass(frozen=True, slots=True)
class Slots:
    """What the application has to run tasks on."""

    executors: int
    per_executor: int  # task slots of one executor

    @property
    def total(self) -> int:
        return self.executors * self.per_executor


def slots_of(context: Any) -> Slots:
    """Executors and task slots, from the master URL and the configuration.

    Executors may still be on their way when a session starts, so what is configured counts
    before what has registered.
    """
    conf = live_conf(context)
    cpus = int(conf.get("spark.task.cpus", "1"))
    master = context.master
    if local := re.fullmatch(r"local(\[(\d+|\*)(,\d+)?])?", master):
        return Slots(1, max(1, _local_cores(local.group(2)) // cpus))
    if cluster := re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*\d+\s*]", master):
        return Slots(int(cluster.group(1)), max(1, int(cluster.group(2)) // cpus))
    executors = int(conf.get("spark.executor.instances", "0")) or registered(context)
    if executors < 1:
        raise SetupError(
            f"no executor has registered with {master}: start the application with executors "
            "(--num-executors N, or workers in the standalone cluster) and try again"
        )
    default = 1 if master.startswith(("yarn", "k8s")) else context.defaultParallelism // executors
    cores = int(conf.get("spark.executor.cores", str(max(1, default))))
    return Slots(executors, max(1, cores // cpus))


def is_told(context: Any) -> bool:
    """Do the master URL or the configuration say how many executors there are?

    Where allocation is dynamic nobody comes before there is work.
    """
    conf = live_conf(context)
    dynamic = conf.get("spark.dynamicAllocation.enabled", "false").lower() == "true"
    instances = int(conf.get("spark.executor.instances", "0"))
    return dynamic or instances > 0 or context.master.startswith("local")


def registered(context: Any) -> int:
    """Executors that are there now; the driver counts to Spark, too."""
    return int(context._jsc.sc().getExecutorMemoryStatus().size()) - 1


def _local_cores(text: str | None) -> int:
    import os

    if text is None:
        return 1
    return os.cpu_count() or 1 if text == "*" else int(text)


def workers_for(slots: Slots, master: SharedTrainingMaster) -> int:
    """How many workers a fit has. Raise UsageError where they cannot all run at once.

    A controller in a task of its own has one of the slots.
    """
    free = slots.total - parse_controller(master.void.controller).apart
    wanted = slots.executors * master.workers_per_node
    if master.workers_per_node == ALL_SLOTS:
        wanted = max(1, free)
    elif master.workers_per_node > slots.per_executor:
        raise UsageError(
            f"workers_per_node={master.workers_per_node}: an executor has {slots.per_executor} "
            "task slots (spark.executor.cores / spark.task.cpus); all workers of a fit must run "
            "at the same time: raise --executor-cores or lower workers_per_node"
        )
    if wanted > free:
        raise UsageError(
            f"controller={master.void.controller!r} needs one slot more: {wanted} workers and the "
            f"controller's task must run at the same time, and there are {slots.total} task slots "
            f"({slots.executors} executors of {slots.per_executor}); add an executor, raise "
            "--executor-cores, or lower workers_per_node"
        )
    return wanted


def refuse_connect(session: Any) -> None:
    """Spark Connect has no RDDs and no tasks of ours: say so."""
    if type(session).__module__.startswith("pyspark.sql.connect"):
        raise UsageError(
            "this is a Spark Connect session; training needs a classic one: start the program "
            "with spark-submit, or SparkSession.builder without .remote(...)"
        )


def live_conf(context: Any) -> Any:
    """The application's configuration, to be asked for one key at a time.

    ``getConf`` copies all of it: some hundred questions to the JVM, 0.05 s.
    """
    return context._conf


def driver_host(context: Any) -> str:
    """The driver's machine, as Spark calls it."""
    return str(live_conf(context).get("spark.driver.host", "127.0.0.1"))


def check_conf(
    conf: Mapping[str, str], workers: int, demand: Demand, master: SharedTrainingMaster
) -> list[str]:
    """Raise UsageError for what cannot work; return warnings for what may go wrong.

    Every message names the key and the value to set.
    """
    return check_scheduling(conf, workers) + _check_overhead(conf, workers, demand, master)


def check_scheduling(conf: Mapping[str, str], workers: int) -> list[str]:
    """``check_conf``'s part that does not depend on what is trained."""
    if conf.get("spark.speculation", "false").lower() == "true":
        raise UsageError(
            "spark.speculation=true would start a second copy of slow workers, which train the "
            "same rows: set --conf spark.speculation=false"
        )
    warnings = []
    if conf.get("spark.dynamicAllocation.enabled", "false").lower() == "true":
        warnings.append(
            "spark.dynamicAllocation.enabled=true: executors may come late or be taken away; "
            f"for {workers} workers set --conf spark.dynamicAllocation.enabled=false"
        )
    if conf.get("spark.task.maxFailures", "4") == "1":
        warnings.append(
            "spark.task.maxFailures=1: the first executor that dies ends the fit; set it to 4"
        )
    return warnings


KEY_IN_THE_CLEAR = (
    "Spark hands the key of this fit to its executors in the clear: whoever can read that "
    "traffic can read and forge sparkstrom's; set --conf spark.authenticate=true --conf "
    "spark.network.crypto.enabled=true, or spark.ssl.rpc.enabled=true (Spark 4), where the "
    "network is not your own"
)


_told_of_key: set[str] = set()  # applications of this driver program


def check_key(conf: Mapping[str, str]) -> list[str]:
    """A warning where the fit's key can be read on its way, once per application."""
    application = conf.get("spark.app.id", "")
    if is_key_sealed(conf) or application in _told_of_key:
        return []
    _told_of_key.add(application)
    return [KEY_IN_THE_CLEAR]


def is_key_sealed(conf: Mapping[str, str]) -> bool:
    """Does nobody on the network see the task binary, in which the AES key travels?

    Spark encrypts only what it authenticates; in local mode nothing leaves the machine.
    """

    def on(key: str) -> bool:
        return conf.get(key, "false").lower() == "true"

    ciphers = ("spark.network.crypto.enabled", "spark.authenticate.enableSaslEncryption")
    encrypted = on("spark.authenticate") and any(map(on, ciphers))
    local = conf.get("spark.master", "").startswith("local")
    return local or encrypted or on("spark.ssl.rpc.enabled")


def _check_overhead(
    conf: Mapping[str, str], workers: int, demand: Demand, master: SharedTrainingMaster
) -> list[str]:
    """YARN and Kubernetes kill containers that use more than heap + overhead."""
    if not conf.get("spark.master", "").startswith(("yarn", "k8s")):
        return []
    slots = int(conf.get("spark.executor.cores", "1")) // int(conf.get("spark.task.cpus", "1"))
    here = max(1, slots if master.workers_per_node == ALL_SLOTS else master.workers_per_node)
    needed = executor_overhead(demand, master, workers, here)
    heap = parse_bytes(conf.get("spark.executor.memory", "1g"))
    default = max(OVERHEAD_MIN, int(OVERHEAD_SHARE * heap))
    overhead = conf.get("spark.executor.memoryOverhead")
    given = parse_bytes(overhead, unit=MIB) if overhead else default
    if given >= needed:
        return []
    advised = -(-needed // MIB)
    return [
        f"spark.executor.memoryOverhead is {given // MIB} MiB; {here} workers of "
        f"{demand.n_params:,} parameters and Aeron need up to {advised} MiB beside the heap, "
        f"{master.batch_memory_bytes // MIB} MiB of each for rows (batch_memory_bytes) and "
        f"{master.void.log_bytes // MIB} MiB for recent commits (log_bytes): set --conf "
        f"spark.executor.memoryOverhead={advised}m, or lower these, or containers may be killed "
        "(`sparkstrom plan` tells the parts)"
    ]


def parse_bytes(text: str, unit: int = 1) -> int:
    """Spark's way to write sizes: 512m, 2g, or a number in ``unit`` bytes."""
    number, suffix = re.fullmatch(r"\s*(\d+)\s*([kmgt]?)b?\s*", text.lower()).groups()  # type: ignore[union-attr]
    factor = {"": unit, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}[suffix]
    return int(number) * factor
