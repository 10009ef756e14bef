"""Controller auto: where the controller of an application's fits runs, found out once for each way.

In the driver program, as long as some executor reaches that by UDP: a host that does not, where
others do, has a firewall of its own, and is told so when its task begins. All do in local mode, and
where the driver program runs in the cluster; otherwise short tasks look, before the first fit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sparkstrom.base.errors import NetworkError, SetupError, UsageError
from sparkstrom.base.identity import Endpoint
from sparkstrom.spark.controller.udp_reach import EchoPort, Reached, ReachOrder, reaches
from sparkstrom.spark.data.job_errors import cause_of
from sparkstrom.spark.driver.cluster import Slots, driver_host, live_conf, workers_for
from sparkstrom.spark.driver.controller_choice import AUTO, DRIVER, EXECUTOR
from sparkstrom.spark.driver.preflight import check_machine
from sparkstrom.spark.driver.spark_job import SparkJob
from sparkstrom.spark.driver.training_master import SharedTrainingMaster
from sparkstrom.spark.executor.interfaces import driver_address

FOUND_OUT_S = 8.0  # in all: tasks that have no slot by then say nothing
GONE_S = 1.0
NAMED_MAX = 4
MOVES = (
    "sparkstrom: the controller goes to an executor (controller='auto'): {why}. There it takes one "
    "task slot; controller='driver' keeps it here"
)
UNHEARD = (
    "{hosts} get no answer by UDP from this program at {endpoint}; for the controller to be here "
    "open that way in both directions, or name the network that both share (network_mask, "
    "controller_address)"
)

STAYS = (
    "sparkstrom warns: the controller stays in this program (controller='auto'), as other "
    "executors reach it: {why}"
)
NO_SLOT = "{why}. Or have the controller on an executor: {error}"


@dataclass(frozen=True, slots=True)
class AskedWay:
    """What was asked about: other addresses or ports are another way, which may be open."""

    application: str
    network_mask: str | None
    controller_address: str | None
    ports: tuple[range | None, range | None]


@dataclass(frozen=True, slots=True)
class FoundOut:
    """What was found out: ``DRIVER``, and whom it lacks; or ``EXECUTOR``, and why."""

    word: str
    why: str = ""


log = logging.getLogger(__name__)

_found: dict[AskedWay, FoundOut] = {}


def settled(
    master: SharedTrainingMaster, context: Any, slots: Slots, say: Callable[[str], None]
) -> SharedTrainingMaster:
    """The same with ``controller`` found out, where it is "auto".

    Raise NetworkError where it cannot be in the driver program, and has no slot elsewhere.
    """
    if master.void.controller != AUTO:
        return master
    void = master.void
    ports = void.controller_ports(), void.executor_ports()
    way = AskedWay(str(context.applicationId), void.network_mask, void.controller_address, ports)
    found = FoundOut(DRIVER) if _is_inside(context) else _found.get(way)
    is_new = found is None
    if found is None:
        found = _found_out(master, context, slots)
        if found is None:
            found = FoundOut(DRIVER)  # nobody has said; the next network asks again
        else:
            _found[way] = found
    address = void.controller_address if found.word == DRIVER else None
    chosen = replace(master, void=replace(void, controller=found.word, controller_address=address))
    if found.word == EXECUTOR:
        _need_slot(slots, chosen, found.why)
    if is_new and found.why:
        say((MOVES if found.word == EXECUTOR else STAYS).format(why=found.why))
    return chosen


def _need_slot(slots: Slots, chosen: SharedTrainingMaster, why: str) -> None:
    try:
        workers_for(slots, chosen)
    except UsageError as error:
        raise NetworkError(NO_SLOT.format(why=why, error=error)) from None


def _is_inside(context: Any) -> bool:
    """Is the driver program where its executors are?"""
    mode = str(live_conf(context).get("spark.submit.deployMode", "client"))
    return str(context.master).startswith("local") or mode == "cluster"


def _found_out(master: SharedTrainingMaster, context: Any, slots: Slots) -> FoundOut | None:
    try:
        check_machine(master.void, slots.total, driver_host(context))
        address = driver_address(master.void, driver_host(context))
        with closing(EchoPort(address, master.void.controller_ports())) as port:
            answers = _ask(port, master, context, slots)
            endpoint = port.endpoint
    except SetupError as error:
        return FoundOut(EXECUTOR, str(error))
    if answers is None:
        return None
    return judged(answers, endpoint)


def judged(answers: Sequence[Reached], endpoint: Endpoint) -> FoundOut:
    """It moves where nobody reaches it; who alone does not is named."""
    hearing = {each.host for each in answers if each.heard}
    deaf = sorted({each.host for each in answers} - hearing)
    if not deaf:
        return FoundOut(DRIVER)
    hosts = ", ".join(deaf[:NAMED_MAX]) + (" and others" if len(deaf) > NAMED_MAX else "")
    why = UNHEARD.format(hosts=hosts, endpoint=endpoint)
    return FoundOut(DRIVER if hearing else EXECUTOR, why)


def _ask(
    port: EchoPort, master: SharedTrainingMaster, context: Any, slots: Slots
) -> list[Reached] | None:
    """As many tasks as slots, which Spark spreads over all executors; None: not in time."""
    void = master.void
    order = ReachOrder(port.endpoint, port.token, void.network_mask, void.executor_ports())
    runner = context.parallelize(range(slots.total), slots.total).mapPartitions(
        partial(reaches, order)
    )
    group = f"sparkstrom-reach-{time.monotonic_ns()}"
    words = "sparkstrom: is this program reached by UDP?"
    job = SparkJob(context, group, runner.collect, words=words)
    job.start()
    try:
        done = job.wait(FOUND_OUT_S)
    finally:
        if job.running:
            job.cancel()
            job.wait(GONE_S)
    if done and job.error is None:
        return job.reports
    why = cause_of(str(job.error)) if job.error is not None else f"nothing within {FOUND_OUT_S:g} s"
    log.warning("whether executors hear this program by UDP could not be found out: %s", why)
    return None
