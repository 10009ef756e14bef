"""Whether a process runs, for tests that know its number only."""

from __future__ import annotations

from sparkstrom.transport.aeron.driver_directories import identify_process, is_process_alive


def is_running(pid: int) -> bool:
    """Whether a process with this number runs; a zombie does not."""
    try:
        return is_process_alive(identify_process(pid))
    except ProcessLookupError:
        return False
