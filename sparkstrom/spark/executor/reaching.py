"""Reaching: before anything else a task asks whether the controller's UDP and its own get through.

Spark's TCP has brought the task here, so a firewall, a mask or a route that is wrong for UDP would
show as silence only, after rows are read and kernels are compiled. Asked for here it is an error
within seconds, told over Spark.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from dataclasses import dataclass
from typing import Final

from sparkstrom.base.errors import DriverLost, NetworkError
from sparkstrom.base.identity import Endpoint
from sparkstrom.spark.driver.controller_choice import who_is_master
from sparkstrom.spark.driver.discovery import VoidConfiguration
from sparkstrom.spark.executor.interfaces import ATTEMPTS, ends_of, executor_address, ports_beside
from sparkstrom.spark.executor.task_place import TaskPlace
from sparkstrom.transport.aeron.answering import is_answered
from sparkstrom.transport.aeron.driver import DriverOptions, ensure_driver

log = logging.getLogger(__name__)

ANSWER_S: Final = 4.0  # Aeron asks ten times a second: half of the datagrams may be lost
BEGINS_S: Final = 60.0
ANSWERED: Final = "answered"  # a file beside the media driver's: its other tasks need not ask


@dataclass(frozen=True, slots=True)
class WayToController:
    """From an executor to the controller of a fit."""

    job: int
    endpoint: Endpoint  # of the controller
    void: VoidConfiguration
    edges: int  # of an executor's media driver
    local_edges: int
    answers: bool = True  # it has a media driver by now

    @property
    def patience_s(self) -> float:
        """A controller in a task that has not been heard of may still be on its way."""
        return ANSWER_S if self.answers else BEGINS_S

    def driver_key(self, place: TaskPlace) -> str:
        """Of the media driver of this task's executor."""
        return f"{self.job:016x}-{place.jvm}"

    def driver_options(self, place: TaskPlace) -> DriverOptions:
        """Of that one: all tasks of an executor want the same."""
        address = executor_address(self.void, self.endpoint)
        return DriverOptions(
            host=address,
            ports=ends_of(ports_beside(self.void.executor_ports(), address, self.endpoint)),
            edges=self.edges,
            local_edges=self.local_edges,
            scratch=place.scratch,
        )


def need_answer(way: WayToController, place: TaskPlace) -> None:
    """Raise NetworkError where no UDP goes to the controller and back; at once where it does."""
    options = way.driver_options(place)
    if _is_here(way.endpoint, options.host):
        return
    for attempt in range(1, ATTEMPTS + 1):
        try:
            here = _ask(way, place, options)
            break
        except DriverLost:
            if attempt == ATTEMPTS:
                raise
            log.warning("the media driver ended while it was joined")
    if here is not None:
        raise NetworkError(in_words(way, here, way.patience_s))


def _is_here(there: Endpoint, host: str) -> bool:
    return there.host == host or ipaddress.ip_address(there.host).is_loopback


def _ask(way: WayToController, place: TaskPlace, options: DriverOptions) -> Endpoint | None:
    """Our own place, where no answer came to it."""
    handle = ensure_driver(way.driver_key(place), options)
    answered = handle.directory / ANSWERED
    try:
        if not answered.exists():
            if not is_answered(handle, way.endpoint, way.patience_s):
                return handle.endpoint
            answered.touch()
        return None
    finally:
        handle.close()


def in_words(way: WayToController, here: Endpoint, seconds: float) -> str:
    """In one line: Spark's errors are told by their last line."""
    there, void = way.endpoint, way.void
    who = who_is_master(void.controller)
    return (
        f"UDP between the executor on {socket.gethostname()} at {here} and the {who} at {there} "
        f"is dropped: no answer within {seconds:g} s; ask whoever has the firewalls (or security "
        f"groups) of both hosts to allow UDP from {here.host} to {there.host} port {there.port}, "
        f"and from {there.host} to {here.host} {ports_in_words(void, here.port)}, with the answers "
        f"to both{_fix(void)}; or, where this is not the network they share, name that by "
        "network_mask"
    )


def ports_in_words(void: VoidConfiguration, port: int) -> str:
    """Of executors, of which one has this port."""
    ports = void.executor_ports()
    return f"port {port}" if ports is None else f"ports {ports[0]} to {ports[-1]}"


def _fix(void: VoidConfiguration) -> str:
    if void.unicast_port is not None:
        return ""
    return " (ports change with each fit: fix them by unicast_port=40123)"
