"""How large logs, windows and buffers may be on this machine: pure choices over measured limits.

Every stream costs one log (three terms) at its sender's driver and one at its receiver's; a local
stream has one driver and one log. A full
shared-memory file system must be an error before training, so lengths follow the space really
free. The receive windows of all streams share one socket buffer: their sum must fit into it, or
the kernel drops datagrams whenever all peers send at once.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from sparkstrom.base.errors import SetupError

KIB, MIB = 1024, 1024 * 1024

# (data, control) term lengths, best first. Longer ones buy nothing: chunks are term/16 anyway.
TERMS = (
    (1 * MIB, 128 * KIB),
    (512 * KIB, 128 * KIB),
    (256 * KIB, 64 * KIB),
)
LOG_METADATA = 4 * KIB
DRIVER_BYTES = 13 * MIB  # commands, counters, error log and loss report of one media driver

WINDOW_MAX = 256 * KIB  # 1 GB/s at a round trip of 0.25 ms
WINDOW_MIN = 16 * KIB  # two datagrams of the largest kind
SOCKET_BUFFER_MAX = 4 * MIB
SOCKET_BUFFER_MIN = 128 * KIB

MTU_NETWORK = 1408  # fits every Ethernet and the overlay networks on it
MTU_LOCAL = 8192  # the loopback interface carries it in one piece: fewer datagrams per frame


@dataclass(frozen=True, slots=True)
class Sizes:
    """All lengths of one media driver, in bytes."""

    data_term: int
    control_term: int
    window: int  # of one stream: unconsumed bytes on their way to it
    receive_buffer: int
    send_buffer: int

    @property
    def data_frame(self) -> int:
        """Longest data frame: a term's remainder that a frame does not fit into is wasted."""
        return self.data_term // 16

    @property
    def control_frame(self) -> int:
        """Longest control frame: Aeron's limit for its term."""
        return self.control_term // 8


@dataclass(frozen=True, slots=True)
class LogDirectory:
    """A directory that could hold logs, and the bytes free there."""

    root: Path
    free_bytes: int


def log_bytes(term: int) -> int:
    """Size of the file behind one publication or image."""
    return 3 * term + LOG_METADATA


def needed_bytes(edges: int, data_term: int, control_term: int) -> int:
    """Space for a driver with ``edges`` neighbours, each with both streams in both directions.

    Two tasks that are neighbours on this driver count as one: both map the same logs.
    """
    return DRIVER_BYTES + edges * 2 * (log_bytes(data_term) + log_bytes(control_term))


def choose_place(places: list[LogDirectory], edges: int) -> tuple[LogDirectory, tuple[int, int]]:
    """The first place, with the longest terms, that has room. Raise SetupError if none has."""
    for place in places:
        for terms in TERMS:
            if needed_bytes(edges, *terms) <= place.free_bytes:
                return place, terms
    least = needed_bytes(edges, *TERMS[-1])
    free = ", ".join(f"{place.root} has {place.free_bytes:,} bytes free" for place in places)
    raise SetupError(
        f"no room for the media driver's logs: {edges} neighbours need {least:,} bytes, but "
        f"{free}; free some, enlarge shared memory (docker: --shm-size), or give a scratch "
        "directory on a disk that has room"
    )


def choose_sizes(edges: int, terms: tuple[int, int], limits: tuple[int, int]) -> Sizes:
    """Windows and buffers for ``edges`` neighbours within the kernel's socket buffer limits.

    ``terms``: data, control; ``limits``: largest receive and send buffer (all bytes).
    """
    data_term, control_term = terms
    receive_limit, send_limit = limits
    receive_buffer = min(SOCKET_BUFFER_MAX, max(SOCKET_BUFFER_MIN, receive_limit))
    # A control stream has at most half a control term on its way.
    share = receive_buffer // max(1, edges) - control_term // 2
    # Window plus a frame beyond half a term would be thrown away by the receiver itself.
    roof = min(WINDOW_MAX, data_term // 2 - data_term // 16)
    window = max(WINDOW_MIN, min(roof, share)) // KIB * KIB
    send_buffer = min(SOCKET_BUFFER_MAX, max(SOCKET_BUFFER_MIN, send_limit))
    return Sizes(data_term, control_term, window, receive_buffer, send_buffer)


def place(root: Path) -> LogDirectory:
    """Measure ``root``."""
    status = os.statvfs(root)
    return LogDirectory(root, status.f_bavail * status.f_frsize)


def socket_limits(proc: Path = Path("/proc/sys/net/core")) -> tuple[int, int]:
    """The kernel's largest receive and send buffer of a socket."""
    return _number(proc / "rmem_max"), _number(proc / "wmem_max")


def _number(path: Path) -> int:
    # Some containers hide these files; the kernel's built-in default is then the safe guess.
    return int(path.read_text()) if path.exists() else 212_992
