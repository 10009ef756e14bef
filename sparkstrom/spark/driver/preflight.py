"""Preflight: what the driver's machine lacks for a fit, looked at before any job; some ms.

What executors lack is said by their tasks, and by `sparkstrom doctor` before there is any.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from sparkstrom.spark.driver.controller_choice import parse_controller
from sparkstrom.spark.driver.discovery import VoidConfiguration
from sparkstrom.spark.driver.memory_parts import driver_edges
from sparkstrom.spark.executor.interfaces import driver_address, need_library
from sparkstrom.transport.aeron.driver import SHARED_MEMORY, DriverOptions, room_for


def check_machine(
    void: VoidConfiguration,
    workers: int,
    spark_driver_host: str,
    shared_memory: Path = SHARED_MEMORY,
    scratch: Path | None = None,
) -> None:
    """Raise SetupError where there is no library, no address in the mask, or no room for logs.

    Nothing of it is needed where the controller is elsewhere.
    """
    if parse_controller(void.controller).apart:
        return
    need_library()
    address = driver_address(void, spark_driver_host)
    edges = driver_edges(void.topology(workers), workers)
    scratch = scratch or Path(tempfile.gettempdir())
    room_for(DriverOptions(host=address, edges=edges, scratch=scratch, shared_memory=shared_memory))
