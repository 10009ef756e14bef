"""Whether a process runs, for tests that know its number only."""

from __future__ import annotations

from sparkstrom.transport.aeron.processes import is_alive, watched


def is_running(pid: int) -> bool:
    """Whether a process with this number runs; a zombie does not."""
    try:
        return is_alive(watched(pid))
    except ProcessLookupError:
        return False
