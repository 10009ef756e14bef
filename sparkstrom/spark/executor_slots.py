"""Count task slots, check Spark's configuration, and wait for executors to register.

A task slot is the executor's capacity for one task: ``spark.task.cpus`` cores, by default one, and
its share of GPUs if tasks need them. A gradient-sharing fit trains in one Spark stage with one task
per worker, and all these tasks must run at the same time.

With dynamic allocation, the number of executors is not known in advance, so a fit guesses it.
Spark requests executors until every task has a slot, and late workers join the running fit. A
round-based fit runs ordinary jobs with one task per worker; with fewer executors it takes longer.

``context`` is a SparkContext, and ``conf`` is Spark's configuration.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Final

from sparkstrom.base.errors import SetupError, UsageError
from sparkstrom.fit.fit_context import TaskSlots
from sparkstrom.fit.strategy import Strategy
from sparkstrom.options.common import ALL_SLOTS, CommonOptions
from sparkstrom.options.gradient_sharing import SharedTrainingMaster
from sparkstrom.options.parameter_averaging import ParameterAveragingTrainingMaster
from sparkstrom.planning.memory import (
    ModelFootprint,
    check_overhead,
    gradient_sharing_memory,
    rounds_memory,
)

DYNAMIC_ALLOCATION_ENABLED = "spark.dynamicAllocation.enabled"
INITIAL_EXECUTORS = "spark.dynamicAllocation.initialExecutors"
EXECUTOR_INSTANCES = "spark.executor.instances"
MIN_EXECUTORS = "spark.dynamicAllocation.minExecutors"
MAX_EXECUTORS = "spark.dynamicAllocation.maxExecutors"
MAX_STAGE_ATTEMPTS = "spark.stage.maxConsecutiveAttempts"
DEFAULT_EXECUTORS = 2  # Spark's own default of spark.executor.instances
STAGE_ATTEMPTS_LOW = 10  # below this, a few lost executors end a fit: warn

EXECUTORS_UNSPECIFIED = (
    "spark.dynamicAllocation.enabled=true, and no setting gives how many executors a fit should"
    " have: it counts on the registered ones, and on at least {least}; for N of them set --conf"
    " spark.dynamicAllocation.initialExecutors=N"
)
STAGE_ATTEMPTS_WARNING = (
    "spark.stage.maxConsecutiveAttempts={attempts}: the {ordinal} executor that is removed"
    " {when} ends the fit, because its shuffled rows must be computed again, and dynamic"
    " allocation does remove executors: set --conf spark.stage.maxConsecutiveAttempts=100"
)


# Values of {when} in STAGE_ATTEMPTS_WARNING.
DURING_FIT, DURING_ROUND = "while a fit trains", "during one round"
# How each strategy uses executors that start late; see ``describe_allocation``.
SHARED_FIT_NOTE = (
    "executors that start late join during training, removed ones are replaced, and no executor"
    " with a worker is idle"
)
ROUNDS_FIT_NOTE = (
    "with fewer a round takes longer, executors that start late get tasks of the next round, and"
    " Spark recomputes what a removed executor held"
)


def is_enabled(conf: Any, key: str) -> bool:
    """Return Spark's boolean setting ``key``, in upper or lower case; False if it is not set.

    ``conf`` is a dictionary or another object with a method ``get(key, default)``.
    """
    return str(conf.get(key, "false")).lower() == "true"


def is_dynamic(conf: Any) -> bool:
    """Return whether Spark adds and removes executors (dynamic allocation).

    ``conf`` is a dictionary or another object with a method ``get(key, default)``.
    """
    return is_enabled(conf, DYNAMIC_ALLOCATION_ENABLED)


def count_configured_executors(conf: Any) -> int | None:
    """Return how many executors the configuration asks for, or None if it names no number.

    minExecutors and maxExecutors do not count, because they are limits for all kinds of jobs.
    """
    configured = max(int(conf.get(key, "0")) for key in (INITIAL_EXECUTORS, EXECUTOR_INSTANCES))
    return configured or None


def choose_executor_count(conf: Any, registered: int) -> int:
    """Return how many executors a fit assumes with dynamic allocation: at least one.

    This is the configured number. If none is configured, it is ``registered``, the number of
    executors now, but at least Spark's default. Spark's minimum and maximum limit the result.
    """
    count = count_configured_executors(conf) or max(registered, DEFAULT_EXECUTORS)
    count = max(count, int(conf.get(MIN_EXECUTORS, "0")))
    limit = int(conf.get(MAX_EXECUTORS, "0")) or count
    return min(count, limit)


def check_dynamic_allocation(conf: Mapping[str, str], when: str = DURING_FIT) -> list[str]:
    """Return warnings about dynamic allocation; none if it is off.

    ``when`` is a phrase for the warning about removed executors. It names the period in which Spark
    counts removed executors.
    """
    if not is_dynamic(conf):
        return []
    warnings = []
    if count_configured_executors(conf) is None:
        warnings.append(EXECUTORS_UNSPECIFIED.format(least=choose_executor_count(conf, 0)))
    has_shuffle_service = is_enabled(conf, "spark.shuffle.service.enabled")
    attempts = int(conf.get(MAX_STAGE_ATTEMPTS, "4"))
    if attempts < STAGE_ATTEMPTS_LOW and not has_shuffle_service:
        ordinal = {1: "first", 2: "second", 3: "third"}.get(attempts, f"{attempts}th")
        warnings.append(
            STAGE_ATTEMPTS_WARNING.format(attempts=attempts, ordinal=ordinal, when=when)
        )
    return warnings


def describe_allocation(workers: int, slots: int, note: str) -> str:
    """Return the text that explains to the user what dynamic allocation means for this fit.

    ``slots`` is the number of task slots of one executor. ``note`` is added to the text and tells
    how the fit's strategy uses executors that start late.
    """
    executors = -(-workers // slots)
    return (
        f"{DYNAMIC_ALLOCATION_ENABLED}=true: this fit has {workers} workers, for which Spark needs"
        f" at least {executors} executors and requests the missing ones; {note}"
    )


def is_context_stopped(context: Any) -> bool:
    """Return whether a SparkContext was stopped or its JVM is gone."""
    if context._jsc is None:
        return True
    try:
        return bool(context._jsc.sc().isStopped())
    except Exception:  # Py4J's, or a refused connection: the JVM is gone
        return True


def get_slots(context: Any) -> TaskSlots:
    """Return the number of executors and task slots of a SparkContext's application.

    Configured numbers take precedence over the number of registered executors, because some
    executors may still be starting. With dynamic allocation there may be none before the first job.
    """
    return compute_slots(
        live_conf(context),
        context.master,
        _list_task_resources(context),
        lambda: count_registered_executors(context),
        lambda: _count_registered_slots(context),
    )


def compute_slots(
    conf: Any,
    master: str,
    resources: Collection[str],
    registered: Callable[[], int],
    registered_slots: Callable[[], int],
) -> TaskSlots:
    """Return the number of executors and task slots, configured or counted.

    Args:
        conf: Spark's configuration, with a method ``get(key, default)``.
        master: The master URL.
        resources: The resources that a task needs besides CPUs, such as "gpu".
        registered: Returns the number of registered executors.
        registered_slots: Returns how many tasks the registered executors can run at the same time.

    Raises:
        SetupError: No executor is configured or registered.
    """
    # Local mode has no resources besides CPUs.
    if local_match := re.fullmatch(r"local(\[(\d+|\*)(\s*,\s*\d+)?])?", master):
        cores = local_match.group(2) or "1"
        if cores == "*":  # the JVM counts them, by affinity and the container's limits
            return TaskSlots(1, max(1, registered_slots()))
        return TaskSlots(1, count_executor_slots(conf, int(cores)))
    if cluster_match := re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,\s*\d+\s*]", master):
        executors, cores = map(int, cluster_match.groups())
        return TaskSlots(executors, count_executor_slots(conf, cores, resources))
    dynamic = is_dynamic(conf)
    if dynamic:
        executors = choose_executor_count(
            conf, registered() if count_configured_executors(conf) is None else 0
        )
    else:
        executors = count_requested_executors(conf, master) or registered()
    if executors < 1:
        raise SetupError(
            f"no executor has registered with {master}: start the application with executors "
            "(--num-executors N, or workers in the standalone cluster) and try again"
        )
    cores = int(conf.get("spark.executor.cores", "0"))
    if not cores and master.startswith(("yarn", "k8s")):
        cores = 1  # Spark's default; elsewhere an executor takes all cores that it gets
    if cores:
        slots = count_executor_slots(conf, cores, resources)
    else:
        slots = max(1, registered_slots() // executors)
    is_estimate = dynamic and count_configured_executors(conf) is None
    return TaskSlots(executors, slots, is_dynamic=dynamic, is_estimate=is_estimate)


TASK_RESOURCE, EXECUTOR_RESOURCE = "spark.task.resource.", "spark.executor.resource."
AMOUNT = ".amount"  # end of the keys of both


def list_resources(keys: Iterable[str]) -> list[str]:
    """Return NAME for each of ``keys`` that has the form ``spark.task.resource.NAME.amount``."""
    return [
        key.removeprefix(TASK_RESOURCE).removesuffix(AMOUNT)
        for key in keys
        if key.startswith(TASK_RESOURCE) and key.endswith(AMOUNT)
    ]


def count_executor_slots(conf: Any, cores: int, resources: Collection[str] = ()) -> int:
    """Return how many tasks an executor with ``cores`` cores can run at once: at least one.

    ``conf`` is Spark's configuration, with a method ``get(key, default)``. ``resources`` names what
    a task needs besides CPUs, such as "gpu".
    """
    slots = cores // int(conf.get("spark.task.cpus", "1"))
    for name in resources:
        owned = int(conf.get(f"{EXECUTOR_RESOURCE}{name}{AMOUNT}", "0"))
        needed = float(conf.get(f"{TASK_RESOURCE}{name}{AMOUNT}", "0"))
        if needed > 1:
            slots = min(slots, int(owned // needed))
        elif needed > 0:  # several tasks share one: a task never gets parts of two
            slots = min(slots, owned * int(1 / needed))
    return max(1, slots)


def count_requested_executors(conf: Any, master: str) -> int:
    """Return how many executors an application without dynamic allocation requests; 0 if unknown.

    A standalone cluster ignores ``spark.executor.instances``.
    """
    if master.startswith("spark://"):
        return 0
    return int(conf.get(EXECUTOR_INSTANCES, "0"))


def is_executor_count_configured(context: Any) -> bool:
    """Return whether a fit can count its executors before any of them has registered.

    This is True if the master URL or ``spark.executor.instances`` gives their number. It is also
    True with dynamic allocation, which starts executors only when there is work for them.
    """
    conf, master = live_conf(context), context.master
    requested = count_requested_executors(conf, master)
    return is_dynamic(conf) or requested > 0 or master.startswith("local")


def count_registered_executors(context: Any) -> int:
    """Return how many executors are registered now, without the driver."""
    return int(context._jsc.sc().getExecutorMemoryStatus().size()) - 1


def _count_registered_slots(context: Any) -> int:
    """Return how many tasks the registered executors can run at the same time.

    ``SparkContext.defaultParallelism`` is not used, because ``spark.default.parallelism`` changes
    it and it is at least 2.
    """
    scala = context._jsc.sc()
    profile = scala.resourceProfileManager().defaultResourceProfile()
    return int(scala.maxNumConcurrentTasks(profile))


def _list_task_resources(context: Any) -> list[str]:
    """Return the names of the resources that a task of a SparkContext needs besides CPUs."""
    pairs = context._jsc.sc().getConf().getAllWithPrefix(TASK_RESOURCE)
    return list_resources(TASK_RESOURCE + pair._1() for pair in pairs)


def count_workers(slots: TaskSlots, strategy: Strategy[CommonOptions]) -> int:
    """Return how many workers a fit has, according to the option ``workers_per_node``.

    The option is the number of workers per executor. A controller (the process that coordinates the
    workers) that runs in a Spark task takes one of the slots. Raise UsageError if the workers
    cannot all run at the same time.
    """
    master, free = strategy.master, slots.total - strategy.has_controller_task
    workers = slots.executors * master.workers_per_node
    if master.workers_per_node == ALL_SLOTS:
        workers = max(1, free)
    elif master.workers_per_node > slots.per_executor:
        raise UsageError(
            f"workers_per_node={master.workers_per_node}: an executor has {slots.per_executor} "
            "task slots (spark.executor.cores / spark.task.cpus, or fewer if "
            "spark.task.resource.* limits them); all workers of a fit must run at the same time: "
            "raise --executor-cores or lower workers_per_node"
        )
    if workers > free:
        raise UsageError(
            f"controller={strategy.controller!r} needs one slot more: {workers} workers and the "
            f"controller's task must run at the same time, and there are {slots.total} task slots "
            f"({slots.executors} executors of {slots.per_executor}); add an executor, raise "
            "--executor-cores, or lower workers_per_node"
        )
    return workers


def choose_resume_workers(slots: TaskSlots, workers: int, checkpoint_workers: int | None) -> int:
    """Return how many workers a fit has: ``workers`` or ``checkpoint_workers``.

    ``checkpoint_workers`` is the number of workers of the checkpoint from which the fit is resumed;
    None if it is not resumed. This number is used if the number of executors is only an estimate,
    so that every row is in the same partition as before.
    """
    return workers if checkpoint_workers is None or not slots.is_estimate else checkpoint_workers


def live_conf(context: Any) -> Any:
    """Return a SparkContext's configuration, to be read one key at a time.

    ``getConf`` would copy all keys by several hundred calls into the JVM, which takes 0.05 s.
    """
    return context._conf


def driver_host(context: Any) -> str:
    """Return the address of Spark's driver from the configuration."""
    return str(live_conf(context).get("spark.driver.host", "127.0.0.1"))


def check_conf(
    conf: Mapping[str, str], workers: int, demand: ModelFootprint, master: SharedTrainingMaster
) -> list[str]:
    """Check Spark's configuration for a gradient-sharing fit and return warnings.

    Every message names the key and the value to set. ``demand`` is the memory that the model
    needs. Raise UsageError if a setting cannot work.
    """
    need = gradient_sharing_memory(conf, workers, demand, master)
    return check_scheduling(conf) + check_overhead(conf, need)


def check_rounds_conf(
    conf: Mapping[str, str],
    workers: int,
    demand: ModelFootprint,
    master: ParameterAveragingTrainingMaster,
) -> list[str]:
    """Return warnings about Spark's configuration for a round-based fit.

    ``demand`` is the memory that the model needs.
    """
    warnings = check_dynamic_allocation(conf, DURING_ROUND) + check_task_retries(conf)
    return warnings + check_overhead(conf, rounds_memory(conf, workers, demand, master))


def check_scheduling(conf: Mapping[str, str]) -> list[str]:
    """Check the settings by which Spark retries tasks and removes executors; return warnings.

    Raise UsageError if speculative execution is on.
    """
    if is_enabled(conf, "spark.speculation"):
        raise UsageError(
            "spark.speculation=true would start a second copy of slow workers, which train the "
            "same rows: set --conf spark.speculation=false"
        )
    return check_dynamic_allocation(conf) + check_task_retries(conf)


def check_task_retries(conf: Mapping[str, str]) -> list[str]:
    """Return a list with a warning if Spark never retries a failed task, else []."""
    if conf.get("spark.task.maxFailures", "4") != "1":
        return []
    return ["spark.task.maxFailures=1: the first lost executor ends the fit; set it to 4"]


KEY_UNENCRYPTED_WARNING = (
    "Spark sends the key of this fit to its executors unencrypted: anyone who can read that "
    "traffic can read and forge sparkstrom's; set --conf spark.authenticate=true --conf "
    "spark.network.crypto.enabled=true, or spark.ssl.rpc.enabled=true (Spark 4), unless you trust "
    "the network"
)


_warned_applications: set[str] = set()  # ids of applications that were warned about the key


def check_key_encryption(conf: Mapping[str, str]) -> list[str]:
    """Return a warning if Spark sends the fit's key unencrypted, but only once per application.

    All messages between workers are encrypted with this key.
    """
    application = conf.get("spark.app.id", "")
    if is_key_encrypted(conf) or application in _warned_applications:
        return []
    _warned_applications.add(application)
    return [KEY_UNENCRYPTED_WARNING]


def is_key_encrypted(conf: Mapping[str, str]) -> bool:
    """Return whether the fit's AES key cannot be read from network traffic.

    Spark's tasks contain the key. Spark encrypts tasks if TLS is on, or if authentication and a
    cipher are. In local mode nothing leaves the machine.
    """
    ciphers = ("spark.network.crypto.enabled", "spark.authenticate.enableSaslEncryption")
    has_cipher = any(is_enabled(conf, cipher) for cipher in ciphers)
    encrypted = is_enabled(conf, "spark.authenticate") and has_cipher
    local = conf.get("spark.master", "").startswith("local")
    return local or encrypted or is_enabled(conf, "spark.ssl.rpc.enabled")


REGISTRATION_POLL_S: Final = 0.1  # between two counts of executors
FIRST_NOTICE_S: Final = 1.0  # after waiting this long, the user is notified
NOTICE_INTERVAL_S: Final = 5.0  # between two such notices
REGISTRATION_QUIET_S: Final = 3.0  # no new executor for this long: assume that no more will come
REGISTRATION_INCOMPLETE_S: Final = 15.0  # the same if a number is expected and not reached


_registered_applications: set[str] = set()  # ids of applications whose executors were awaited


def await_slots(context: Any, seconds: float, notify: Callable[[str], None]) -> TaskSlots:
    """Return the application's task slots once its executors have registered.

    This waits only in an application's first fit, and only if the number of executors is not
    configured. On a standalone cluster, for example, the session is ready before its executors. The
    wait ends when the expected number of executors (``estimate_executor_count``) has registered, or
    when no further executor has registered for some time.

    Args:
        context: The SparkContext.
        seconds: How long to wait for the first executor.
        notify: Shows the user a line of text.

    Raises:
        SetupError: No executor has registered within ``seconds``.
    """
    application = str(context.applicationId)
    if is_executor_count_configured(context) or (
        application in _registered_applications and count_registered_executors(context)
    ):
        return get_slots(context)
    _await_registration(context, seconds, notify)
    _registered_applications.add(application)
    return get_slots(context)


def _await_registration(context: Any, seconds: float, notify: Callable[[str], None]) -> None:
    """Wait until the expected executors have registered, or no new one has for some time.

    Raise SetupError if no executor has registered after ``seconds``.
    """
    expected = estimate_executor_count(context)
    start_s = changed_s = time.monotonic()
    notice_s, count = start_s + FIRST_NOTICE_S, 0
    while True:
        now_s, registered = time.monotonic(), count_registered_executors(context)
        if registered != count:
            count, changed_s = registered, now_s
        if expected is not None and count >= expected:
            return
        if count and now_s - changed_s > (
            REGISTRATION_QUIET_S if expected is None else REGISTRATION_INCOMPLETE_S
        ):
            break
        if not count and now_s - start_s > seconds:
            raise SetupError(
                f"no executor has registered with {context.master} within {seconds:g} s "
                "(start_timeout): check the cluster's web page: are workers running, do they have "
                "the cores and the memory of an executor (spark.executor.cores, "
                "spark.executor.memory), or does another application hold them (spark.cores.max)?"
            )
        if now_s > notice_s:
            notice_s = now_s + NOTICE_INTERVAL_S
            wanted = "" if expected is None else f" of {expected}"
            notify(f"sparkstrom waits: {count}{wanted} executors have registered")
        time.sleep(REGISTRATION_POLL_S)
    if expected is not None:
        notify(
            f"sparkstrom notes: {count} of {expected} executors have registered and no more for "
            f"{REGISTRATION_INCOMPLETE_S:g} s: training starts with these"
        )


def estimate_executor_count(context: Any) -> int | None:
    """Return how many executors will start if the cluster has room for them.

    On YARN and Kubernetes this is Spark's default number. Elsewhere it follows from the settings
    for cores; return None if these do not limit the number.
    """
    if context.master.startswith(("yarn", "k8s")):
        return DEFAULT_EXECUTORS
    conf = live_conf(context)
    limit, cores = conf.get("spark.cores.max"), conf.get("spark.executor.cores")
    if limit is None or cores is None:
        return None
    return max(1, int(limit) // int(cores))
