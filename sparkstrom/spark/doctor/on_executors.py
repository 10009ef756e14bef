"""What a doctor's two jobs do in Python workers: look at each executor's machine, then probe UDP.

Both run in Spark's barrier mode: as many tasks as there are slots, all at the same time, so that
each executor has some. The one with the lowest partition of each executor does the work.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sparkstrom.base.errors import SetupError
from sparkstrom.base.identity import Endpoint
from sparkstrom.spark.doctor.host_facts import HostFacts, Looking, look
from sparkstrom.spark.driver.discovery import VoidConfiguration
from sparkstrom.spark.driver.memory_parts import edges_of
from sparkstrom.spark.executor.interfaces import executor_address
from sparkstrom.spark.executor.task_place import TaskPlace, here
from sparkstrom.transport.aeron.channels import mtu
from sparkstrom.transport.udp_probe import HeardOf, ProbeGroup, UdpProbe

Probed = tuple[int, dict[int, HeardOf], str]  # place in the group, what it heard, why it could not


@dataclass(frozen=True, slots=True)
class LookOrder:
    """To look at executors as for a fit with these options and so many workers."""

    void: VoidConfiguration
    workers: int
    controller: Endpoint  # of the driver; its port means nothing yet


@dataclass(frozen=True, slots=True)
class ProbeOrder:
    """To probe: the group, and each executor's place in it."""

    group: ProbeGroup
    places: Mapping[str, int]  # by ``name_of`` an executor


def name_of(facts: HostFacts) -> str:
    """Of an executor."""
    return f"{facts.host}/{facts.process}"


def look_there(order: LookOrder, items: Iterable[Any]) -> Iterator[HostFacts]:
    """One executor's facts, from one of its tasks."""
    place = here()
    if _leads(place):
        edges, local_edges = edges_of(order.void.topology(order.workers))
        yield look(
            Looking(
                lambda: executor_address(order.void, order.controller),
                order.void.executor_ports(),
                edges,
                local_edges,
                place.scratch,
                place.gpu,
            )
        )


def probe_there(order: ProbeOrder, items: Iterable[Any]) -> Iterator[Probed]:
    """What one executor hears of the others, from one of its tasks."""
    place = here()
    number = order.places.get(f"{place.host}/{place.jvm}")
    if not _leads(place) or number is None:
        _meet()
        return
    try:
        with UdpProbe(order.group, number, length_in(order.group, number)) as probe:
            _meet()  # all are bound
            yield number, probe.run(), ""
    except SetupError as error:
        _meet()
        yield number, {}, str(error)


def length_in(group: ProbeGroup, own: int) -> Any:
    """Of the datagrams that Aeron would send to a peer."""
    return lambda endpoint: mtu(endpoint, group.endpoints[own])


def _leads(place: TaskPlace) -> bool:
    """Is this the first of its executor's tasks? All tasks of the stage must ask."""
    from pyspark import BarrierTaskContext

    key = f"{place.host}/{place.jvm}"
    said = BarrierTaskContext.get().allGather(key)
    return said.index(key) == place.partition


def _meet() -> None:
    from pyspark import BarrierTaskContext

    BarrierTaskContext.get().barrier()
