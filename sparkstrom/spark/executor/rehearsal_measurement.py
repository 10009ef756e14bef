"""Measure a cluster for rehearsals (simulated fits): training steps and UDP links on executors.

A rehearsal simulates fits under the measured conditions. One task per worker measures. The tasks
form a barrier stage, so that all of them train at the same time, as in a fit. When all have
finished, one task per host measures the links from the other hosts by UDP, on the ports that a fit
would use.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from sparkstrom.base.errors import SetupError, UsageError
from sparkstrom.base.identity import Endpoint
from sparkstrom.encoding.backends import warm_up
from sparkstrom.options.network import VoidConfiguration
from sparkstrom.rehearsal.data import SampledData
from sparkstrom.rehearsal.measurement import LinkMeasurement, WorkerMeasurement, measure_times
from sparkstrom.spark.executor.entry_points import forget_spark_archive_importers, get_task_context
from sparkstrom.spark.executor_slots import (
    DYNAMIC_ALLOCATION_ENABLED,
    driver_host,
    is_dynamic,
    live_conf,
)
from sparkstrom.spark.jobs import translate_job_errors
from sparkstrom.transport.aeron.channel_settings import choose_mtu
from sparkstrom.transport.aeron.driver_process import candidate_ports
from sparkstrom.transport.udp_probe import TOKEN_BYTES, ProbeGroup, UdpProbe
from sparkstrom.worker.network_setup import (
    DISCARD_PORT,
    choose_driver_address,
    choose_executor_address,
)
from sparkstrom.worker.task_environment import unpickle_without_collecting

PROBE_S, PROBE_PER_PEER_S = 5.0, 1.0  # duration of the UDP probe: fixed part, and per host
HOSTS_PROBED_MAX = 8  # limited, because each host probes every other one


@dataclass(frozen=True, slots=True)
class MeasurementTask:
    """What the tasks that measure steps and links receive; it is the same for all workers."""

    fit: Any  # broadcast variable of a pickled pair: the fit (FitRecipe) and some rows (RowSample)
    void: VoidConfiguration  # addresses and ports of a fit
    controller: Endpoint  # the driver's address; the route to it may decide an executor's address
    token: bytes  # secret that authenticates the datagrams of this measurement


def check_barrier_stages(context: Any) -> None:
    """Raise UsageError if dynamic allocation is on, because Spark then runs no barrier stages."""
    if is_dynamic(live_conf(context)):
        raise UsageError(
            f"measure=True: Spark runs tasks together only with {DYNAMIC_ALLOCATION_ENABLED}=false;"
            " set that for the rehearsal, or give step, link and latency"
        )


def measure_workers(
    context: Any, void: VoidConfiguration, fit: bytes, workers: int
) -> list[WorkerMeasurement]:
    """Run one measuring task per worker, all at the same time, and return the results.

    Args:
        context: The SparkContext.
        void: Addresses and ports of a fit.
        fit: The pickled FitRecipe and RowSample.
        workers: Number of tasks.

    Raises:
        TrainingError: The model fails on an executor, or Spark's job fails.
    """
    controller = Endpoint(choose_driver_address(void, driver_host(context)), DISCARD_PORT)
    broadcast = context.broadcast(fit)
    try:
        task = MeasurementTask(broadcast, void, controller, secrets.token_bytes(TOKEN_BYTES))
        tasks = context.parallelize(range(workers), workers).barrier()
        with translate_job_errors("measuring steps on executors"):
            found: list[WorkerMeasurement] = tasks.mapPartitions(
                partial(measure_worker, task)
            ).collect()
        return found
    finally:
        broadcast.destroy()


def measure_worker(task: MeasurementTask, items: Iterable[Any]) -> Iterator[WorkerMeasurement]:
    """Measure training steps, then this host's links; yield the results. ``items`` are not used."""
    from pyspark import BarrierTaskContext

    forget_spark_archive_importers()
    barrier, place = BarrierTaskContext.get(), get_task_context()
    recipe, sample = unpickle_without_collecting(task.fit.value)
    batches = SampledData(recipe, sample).partitions(1)[0]
    warm_up()
    barrier.barrier()  # so that all tasks train at the same time
    times = measure_times(recipe, batches, place)
    links, problem = _measure_links(task, place.host, barrier)
    yield WorkerMeasurement(place.host, times, links, problem)


def _measure_links(
    task: MeasurementTask, host: str, barrier: Any
) -> tuple[dict[str, LinkMeasurement], str]:
    """Measure the links from other hosts; return them by host, and an error message or "".

    All tasks must call this, because they exchange addresses and wait at ``barrier``. Only the
    first task of each of at most HOSTS_PROBED_MAX hosts measures; the others return no links.
    """
    endpoint, problem = None, ""
    try:
        address = choose_executor_address(task.void, task.controller)
        ports = candidate_ports(address, task.void.executor_ports(), None)
        port = next((port for port in ports if port), 0)
        endpoint = Endpoint(address, port) if port else None
    except SetupError as error:
        problem = str(error)
    answer = json.dumps([host, *endpoint] if endpoint is not None else None)
    endpoints: dict[str, tuple[int, Endpoint]] = {}  # task and address, by host
    for number, text in enumerate(barrier.allGather(answer)):
        place = json.loads(text)
        if place is not None and len(endpoints) < HOSTS_PROBED_MAX:
            endpoints.setdefault(place[0], (number, Endpoint(place[1], place[2])))
    hosts = list(endpoints)
    if len(hosts) < 2 or host not in endpoints or endpoints[host][0] != barrier.partitionId():
        barrier.barrier()
        return {}, problem
    seconds = PROBE_S + PROBE_PER_PEER_S * len(hosts)
    group = ProbeGroup(tuple(endpoints[name][1] for name in hosts), task.token, seconds)
    index, mine = hosts.index(host), endpoints[host][1]
    try:
        with UdpProbe(group, index, partial(choose_mtu, own=mine)) as probe:
            barrier.barrier()  # until all have bound their ports
            found = probe.run()
    except SetupError as error:  # another process has taken the port since it was found free
        barrier.barrier()
        return {}, str(error)
    return {
        hosts[peer]: LinkMeasurement(
            None if result.bytes_s is None else result.bytes_s * 8, result.round_trip_s
        )
        for peer, result in found.items()
    }, ""
