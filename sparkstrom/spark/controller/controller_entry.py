"""Controller entry: the first that the tasks of a controller run, on its executor.

As with training tasks, nothing is imported here that has kernels compiled: what a machine lacks is
said at once, and the driver program is connected before the first line of it.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from sparkstrom.base.clock import SystemClock
from sparkstrom.base.errors import SetupError
from sparkstrom.base.identity import Endpoint
from sparkstrom.base.import_archives import keep_unchanged_archives
from sparkstrom.spark.controller.control_words import (
    ControllerOrder,
    ControllerPlace,
    LineOrder,
    NotHere,
    in_parts,
)
from sparkstrom.spark.controller.controller_line import ControllerLine
from sparkstrom.spark.driver.controller_choice import ControllerChoice
from sparkstrom.spark.driver.settings import local_ip
from sparkstrom.spark.executor.entry import Unopened
from sparkstrom.spark.executor.interfaces import need_library, resolve
from sparkstrom.spark.executor.task_place import executor_name, here, is_again
from sparkstrom.transport.addresses import choose_address, listed_addresses
from sparkstrom.transport.aeron.ports import candidate_ports, none_free

if TYPE_CHECKING:
    from sparkstrom.spark.driver.discovery import VoidConfiguration


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
        explicit=choice.address_among(listed),
        listed=listed,
        fallback=local_ip(os.environ) or resolve(host),
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
    way: LineOrder, wanted: str, unopened: Unopened, index: int, items: Iterable[Any]
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
    line = ControllerLine(way, SystemClock())
    line.connect()  # what follows may import and compile for a minute
    order: ControllerOrder = pickle.loads(unopened.job)
    from sparkstrom.spark.controller.controller_task import ControllerSession

    return in_parts(ControllerSession(order, line).run())
