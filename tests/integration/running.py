"""A check whether a process runs, for tests that know only its id."""

from __future__ import annotations

from sparkstrom.transport.aeron.driver_directories import identify_process, is_process_alive


def is_running(pid: int) -> bool:
    """Return whether a process with this id runs; a zombie does not."""
    try:
        return is_process_alive(identify_process(pid))
    except ProcessLookupError:
        return False
