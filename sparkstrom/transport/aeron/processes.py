"""Processes by number *and* start time: a number alone may belong to somebody else by now."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")


class Watched(NamedTuple):
    """One process, for good: its pid and when it started (clock ticks since boot)."""

    pid: int
    start_time: int


def watched(pid: int, proc: Path = PROC) -> Watched:
    """Name a living process so that it cannot be mistaken. Raise ProcessLookupError if gone."""
    stat = _stat(pid, proc)
    if stat is None:
        raise ProcessLookupError(f"no process {pid}")
    return Watched(pid, stat.start_time)


def is_alive(process: Watched, proc: Path = PROC) -> bool:
    """Whether that very process still runs (a zombie does not)."""
    stat = _stat(process.pid, proc)
    return stat is not None and stat.start_time == process.start_time and stat.state not in "ZX"


def find_executor(pid: int | None = None, proc: Path = PROC) -> Watched:
    """The executor's JVM above this Python worker: the nearest ancestor that is a ``java``.

    A Python that no JVM started (the driver program as plain ``python``) stands for itself.
    """
    own = pid = pid or os.getpid()
    while (stat := _stat(pid, proc)) is not None and pid > 1:
        if stat.name == "java":
            return Watched(pid, stat.start_time)
        pid = stat.parent
    return watched(own, proc)


class _Stat(NamedTuple):
    name: str
    state: str
    parent: int
    start_time: int


def _stat(pid: int, proc: Path) -> _Stat | None:
    try:
        line = (proc / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # pid (name, which may hold blanks and parentheses) state ppid ... ; starttime is field 22
    name, _, rest = line[line.index("(") + 1 :].rpartition(")")
    fields = rest.split()
    return _Stat(name, fields[0], int(fields[1]), int(fields[19]))
