"""Controller entry: the first that the tasks of a controller run, on its executor.

As with training tasks, nothing is imported here that has kernels compiled: what a machine lacks is
said at once, and the driver program is connected before the first line of it.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from sparkstrom.base.clock import SystemClock
from sparkstrom.base.errors import SetupError
from sparkstrom.base.identity import Endpoint
from sparkstrom.base.import_archives import keep_unchanged_archives
from sparkstrom.spark.controller.control_words import (
    ControllerOrder,
    ControllerPlace,
    LineOrder,
    MediaOrder,
    NotHere,
    in_parts,
)
from sparkstrom.spark.controller.controller_line import ControllerLine
from sparkstrom.spark.controller.udp_reach import EchoPort
from sparkstrom.spark.driver.controller_choice import ControllerChoice
from sparkstrom.spark.driver.settings import local_ip
from sparkstrom.spark.executor.entry import Unopened
from sparkstrom.spark.executor.interfaces import need_library, resolve
from sparkstrom.spark.executor.task_place import executor_name, here, is_again
from sparkstrom.transport.addresses import choose_address, listed_addresses
from sparkstrom.transport.aeron.driver import ensure_driver
from sparkstrom.transport.aeron.ports import candidate_ports, none_free

if TYPE_CHECKING:
    from sparkstrom.spark.driver.discovery import VoidConfiguration

ASKED_S = 300.0  # it waits so long for the task that asks, which may have to wait for a slot


def look_at_place(
    void: VoidConfiguration, choice: ControllerChoice, items: Iterable[Any]
) -> Iterator[ControllerPlace | NotHere]:
    """What the executor of this task can offer. Raise SetupError where it has no such address."""
    place, executor, listed = here(), executor_name(), listed_addresses()
    host = executor.host or place.host
    if not choice.suits((host, place.host), listed):
        yield NotHere(host, again=False)
        return
    address = choose_address(
        mask=void.network_mask,
        explicit=choice.address_among(listed, void.network_mask),
        listed=listed,
        fallback=local_ip(os.environ) or choice.resolved_among(listed) or resolve(host),
    )
    ports = choice.ports(void.controller_ports())
    from_the_end = ports and ports[::-1]  # workers' media drivers take theirs from the beginning
    port = next(candidate_ports(address, from_the_end, None), None)
    if not port:
        raise SetupError(none_free(address, ports))
    process = f"{place.host}/{place.jvm}"
    endpoint = Endpoint(address, port)
    yield ControllerPlace(process, executor.number, host, endpoint, str(place.scratch))


def enter_controller(
    ways: tuple[LineOrder, MediaOrder],
    wanted: str,
    unopened: Unopened,
    index: int,
    items: Iterable[Any],
) -> Iterator[bytes]:
    """Be the controller, in the process that is wanted; the result comes in parts.

    Raise SetupError where this host has no Aeron library.
    """
    keep_unchanged_archives()
    need_library()
    place = here()
    process = f"{place.host}/{place.jvm}"
    if is_again() or process != wanted:
        return in_parts(NotHere(process, is_again()))
    way, media = ways
    await_asker(way.token, unopened.way.endpoint)
    with closing(ensure_driver(media.key, media.options)):
        line = ControllerLine(way, SystemClock())
        line.connect()  # what follows may import and compile for a minute
        order: ControllerOrder = pickle.loads(unopened.job)
        from sparkstrom.spark.controller.controller_task import ControllerSession

        return in_parts(ControllerSession(order, line).run())


def await_asker(token: bytes, endpoint: Endpoint) -> None:
    """Until the task that asks by UDP whether this one has begun, if there is one, has heard it.

    The port is free again then, for the media driver.
    """
    if not token:
        return
    port = range(endpoint.port, endpoint.port + 1)
    with closing(EchoPort(endpoint.host, port, token)) as echo:
        echo.answered.wait(ASKED_S)
