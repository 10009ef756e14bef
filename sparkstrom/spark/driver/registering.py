"""Registering: waiting for executors that are on their way, where nobody said how many there are.

A session on a standalone cluster is there before its executors are, and Spark does not say how many
will come: only what limits them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

from sparkstrom.base.errors import SetupError
from sparkstrom.spark.driver.cluster import Slots, is_told, live_conf, registered, slots_of

LOOK_S: Final = 0.1
SAY_FIRST_S: Final = 1.0
SAY_S: Final = 5.0  # between two words on what is waited for
QUIET_S: Final = 3.0  # nobody has come for so long: these are all
MISSING_S: Final = 15.0  # the same, where more were to come

SPARK_INSTANCES: Final = 2  # on YARN and Kubernetes, where nobody says otherwise

_settled: set[str] = set()  # applications whose executors have been waited for


def await_slots(context: Any, seconds: float, say: Callable[[str], None]) -> Slots:
    """What the application has, once its executors have registered.

    Waits in an application's first fit only, and where their number is not in the configuration:
    until as many as its cores are for are there, or for some time nobody has come. Raise SetupError
    where nobody is there after ``seconds``.
    """
    application = str(context.applicationId)
    if is_told(context) or (application in _settled and registered(context)):
        return slots_of(context)
    _await(context, seconds, say)
    _settled.add(application)
    return slots_of(context)


def _await(context: Any, seconds: float, say: Callable[[str], None]) -> None:
    expected = expected_of(context)
    began_s = came_s = time.monotonic()
    say_s, count = began_s + SAY_FIRST_S, 0
    while True:
        now_s, here = time.monotonic(), registered(context)
        if here != count:
            count, came_s = here, now_s
        if expected is not None and count >= expected:
            return
        if count and now_s - came_s > (QUIET_S if expected is None else MISSING_S):
            break
        if not count and now_s - began_s > seconds:
            raise SetupError(
                f"no executor has registered with {context.master} within {seconds:g} s "
                "(start_timeout): see the cluster's web page: are workers there, do they have "
                "the cores and the memory of an executor (spark.executor.cores, "
                "spark.executor.memory), or does another application hold them (spark.cores.max)?"
            )
        if now_s > say_s:
            say_s = now_s + SAY_S
            wanted = "" if expected is None else f" of {expected}"
            say(f"sparkstrom waits: {count}{wanted} executors have registered")
        time.sleep(LOOK_S)
    if expected is not None:
        say(
            f"sparkstrom notes: {count} of {expected} executors have registered, nobody for "
            f"{MISSING_S:g} s: these train"
        )


def expected_of(context: Any) -> int | None:
    """How many executors a cluster that has room starts; None: nobody said."""
    if context.master.startswith(("yarn", "k8s")):
        return SPARK_INSTANCES
    conf = live_conf(context)
    limit, cores = conf.get("spark.cores.max"), conf.get("spark.executor.cores")
    if limit is None or cores is None:
        return None
    return max(1, int(limit) // int(cores))
