"""Cluster: everything that we ask Spark before a job starts, and what we refuse by name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sparkstrom.base.errors import SetupError, UsageError
from sparkstrom.spark.driver.averaging_master import (
    ParameterAveragingTrainingMaster,
    TrainingMaster,
)
from sparkstrom.spark.driver.common_options import ALL_SLOTS
from sparkstrom.spark.driver.container_memory import Need, check_overhead
from sparkstrom.spark.driver.controller_choice import parse_controller
from sparkstrom.spark.driver.dynamic_allocation import (
    IN_A_ROUND,
    check_allocation,
    executors_wanted,
    is_dynamic,
    wish_of,
)
from sparkstrom.spark.driver.memory_parts import Demand
from sparkstrom.spark.driver.training_master import SharedTrainingMaster


@dataclass(frozen=True, slots=True)
class Slots:
    """What the application has to run tasks on."""

    executors: int
    per_executor: int  # task slots of one executor
    is_dynamic: bool = False  # executors come and go
    is_guess: bool = False  # of how many a fit should have: nobody said

    @property
    def total(self) -> int:
        return self.executors * self.per_executor


def is_stopped(context: Any) -> bool:
    """Was this SparkContext stopped, here or in its JVM, or is the JVM gone?"""
    if context._jsc is None:
        return True
    try:
        return bool(context._jsc.sc().isStopped())
    except Exception:  # Py4J's, or a refused connection: nobody answers
        return True


def slots_of(context: Any) -> Slots:
    """Executors and task slots, from the master URL and the configuration.

    Executors may still be on their way when a session starts, so what is configured counts
    before what has registered. With dynamic allocation there may be none before the first job:
    Spark asks for as many as the fit has tasks for.
    """
    live = live_conf(context)
    return slots_by(
        live, context.master, lambda: registered(context), lambda: int(context.defaultParallelism)
    )


def slots_by(
    conf: Any, master: str, registered: Callable[[], int], parallelism: Callable[[], int]
) -> Slots:
    """The same, from what is configured and, where that does not say, what has registered.

    ``parallelism``: Spark's default, which is the number of all cores.
    """
    cpus = int(conf.get("spark.task.cpus", "1"))
    if local := re.fullmatch(r"local(\[(\d+|\*)(,\d+)?])?", master):
        return Slots(1, max(1, _local_cores(local.group(2)) // cpus))
    if cluster := re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*\d+\s*]", master):
        return Slots(int(cluster.group(1)), max(1, int(cluster.group(2)) // cpus))
    dynamic = is_dynamic(conf)
    if dynamic:
        executors = executors_wanted(conf, registered() if wish_of(conf) is None else 0)
    else:
        executors = int(conf.get("spark.executor.instances", "0")) or registered()
    if executors < 1:
        raise SetupError(
            f"no executor has registered with {master}: start the application with executors "
            "(--num-executors N, or workers in the standalone cluster) and try again"
        )
    cores = int(conf.get("spark.executor.cores", "0"))
    if not cores:
        cores = 1 if master.startswith(("yarn", "k8s")) else max(1, parallelism() // executors)
    guess = dynamic and wish_of(conf) is None
    return Slots(executors, max(1, cores // cpus), is_dynamic=dynamic, is_guess=guess)


def is_told(context: Any) -> bool:
    """Do the master URL or the configuration say how many executors there are?

    Where allocation is dynamic nobody comes before there is work.
    """
    conf = live_conf(context)
    instances = int(conf.get("spark.executor.instances", "0"))
    return is_dynamic(conf) or instances > 0 or context.master.startswith("local")


def registered(context: Any) -> int:
    """Executors that are there now; the driver counts to Spark, too."""
    return int(context._jsc.sc().getExecutorMemoryStatus().size()) - 1


def _local_cores(text: str | None) -> int:
    import os

    if text is None:
        return 1
    return os.cpu_count() or 1 if text == "*" else int(text)


def workers_for(slots: Slots, master: TrainingMaster) -> int:
    """How many workers a fit has. Raise UsageError where they cannot all run at once.

    A controller in a task of its own has one of the slots.
    """
    controller = master.void.controller if isinstance(master, SharedTrainingMaster) else "driver"
    free = slots.total - parse_controller(controller).apart
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
            f"controller={controller!r} needs one slot more: {wanted} workers and the "
            f"controller's task must run at the same time, and there are {slots.total} task slots "
            f"({slots.executors} executors of {slots.per_executor}); add an executor, raise "
            "--executor-cores, or lower workers_per_node"
        )
    return wanted


def check_min_workers(master: TrainingMaster, workers: int) -> None:
    """Raise UsageError where a fit would wait for more workers than it has partitions."""
    if isinstance(master, SharedTrainingMaster) and master.min_workers > workers:
        raise UsageError(
            f"min_workers={master.min_workers}: the fit has {workers} workers, one for each"
            " partition, and more cannot join: lower min_workers, or give more task slots or"
            " partitions"
        )


def workers_again(slots: Slots, workers: int, before: int | None) -> int:
    """Where nobody said how many: as many as the checkpoint is of, so that rows lie as they did."""
    return workers if before is None or not slots.is_guess else before


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
    need = Need.of(conf, workers, demand, master)
    return check_scheduling(conf) + check_overhead(conf, need)


def check_rounds(
    conf: Mapping[str, str], workers: int, demand: Demand, master: ParameterAveragingTrainingMaster
) -> list[str]:
    """The same of a fit in rounds, which are ordinary jobs."""
    warnings = check_allocation(conf, IN_A_ROUND) + check_failures(conf)
    return warnings + check_overhead(conf, Need.of(conf, workers, demand, master))


def check_scheduling(conf: Mapping[str, str]) -> list[str]:
    """``check_conf``'s part that does not depend on what is trained."""
    if conf.get("spark.speculation", "false").lower() == "true":
        raise UsageError(
            "spark.speculation=true would start a second copy of slow workers, which train the "
            "same rows: set --conf spark.speculation=false"
        )
    return check_allocation(conf) + check_failures(conf)


def check_failures(conf: Mapping[str, str]) -> list[str]:
    """A warning where Spark tries nothing again."""
    if conf.get("spark.task.maxFailures", "4") != "1":
        return []
    return ["spark.task.maxFailures=1: the first executor that dies ends the fit; set it to 4"]


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
