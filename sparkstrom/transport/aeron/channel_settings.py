"""Choose the sizes of logs, windows and socket buffers for this machine, and write channel URIs.

A log is the file that buffers a stream; it has three equal parts, the terms. Every stream needs one
log at its sender's media driver and one at its receiver's; a local stream needs only one. Sizes are
chosen to fit the free space; if there is too little, an error is raised before training. The
receive windows of all streams share one socket buffer: the sum of the windows must fit into it, or
the kernel drops datagrams whenever all peers send at once.

A channel URI names an endpoint and the settings of a stream. Aeron silently ignores a misspelled
setting, so only the functions of this module write URIs. URIs contain neither socket buffers nor
windows, because all users of an endpoint must agree on those; the media driver's settings do.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
from dataclasses import dataclass
from pathlib import Path

from sparkstrom.base.errors import SetupError
from sparkstrom.base.identity import Endpoint

KIB, MIB = 1024, 1024 * 1024

# (data, control) term lengths, best first. Longer terms gain nothing, since frames have at most a
# sixteenth of a term.
TERM_LENGTHS = (
    (1 * MIB, 128 * KIB),
    (512 * KIB, 128 * KIB),
    (256 * KIB, 64 * KIB),
)
LOG_METADATA_BYTES = 4 * KIB
# Commands, counters, error log and loss report of one media driver.
DRIVER_OVERHEAD_BYTES = 13 * MIB

WINDOW_BYTES_MAX = 256 * KIB  # 1 GB/s at a round-trip time of 0.25 ms
WINDOW_BYTES_MIN = 16 * KIB  # two of the longest datagrams
SOCKET_BUFFER_BYTES_MAX = 4 * MIB
SOCKET_BUFFER_BYTES_MIN = 128 * KIB

MTU_NETWORK = 1408  # fits every Ethernet and the overlay networks on it
MTU_LOCAL = 8192  # loopback carries it unfragmented; long datagrams cost less per byte


@dataclass(frozen=True, slots=True)
class BufferSizes:
    """Sizes of one media driver's logs, windows and buffers, in bytes."""

    data_term: int  # a third of the log of a data stream
    control_term: int  # a third of the log of a control stream
    window: int  # receive window of one stream: bytes sent and not yet consumed
    receive_buffer: int  # the socket's receive buffer
    send_buffer: int  # the socket's send buffer

    @property
    def data_frame_bytes_max(self) -> int:
        """Maximum data frame in bytes; longer frames would waste much space at a term's end."""
        return self.data_term // 16

    @property
    def control_frame_bytes_max(self) -> int:
        """Maximum control frame in bytes, which is Aeron's limit for a log of this size."""
        return self.control_term // 8


@dataclass(frozen=True, slots=True)
class LogDirectory:
    """A directory that can hold logs, and its free space in bytes."""

    root: Path  # the directory
    free_bytes: int  # its free space


def log_file_bytes(term: int) -> int:
    """Return the size in bytes of one log file, whose three terms have ``term`` bytes each."""
    return 3 * term + LOG_METADATA_BYTES


def required_log_bytes(edges: int, data_term: int, control_term: int) -> int:
    """Return how many bytes the files of a media driver with ``edges`` neighbours need.

    ``data_term`` and ``control_term`` are the lengths of one term of the two kinds of logs.

    Each neighbour has four streams: data and control, each way. Two neighbouring tasks on the same
    driver count as one neighbour, because they share their logs.
    """
    return DRIVER_OVERHEAD_BYTES + edges * 2 * (
        log_file_bytes(data_term) + log_file_bytes(control_term)
    )


def choose_log_directory(
    directories: list[LogDirectory], edges: int
) -> tuple[LogDirectory, tuple[int, int]]:
    """Return the first directory with enough room, and the longest (data, control) terms that fit.

    Raise SetupError if no directory has enough room for ``edges`` neighbours.
    """
    for directory in directories:
        for terms in TERM_LENGTHS:
            if required_log_bytes(edges, *terms) <= directory.free_bytes:
                return directory, terms
    least = required_log_bytes(edges, *TERM_LENGTHS[-1])
    free = ", ".join(f"{each.root} has {each.free_bytes:,} bytes free" for each in directories)
    raise SetupError(
        f"no room for the media driver's logs: {edges} neighbours need {least:,} bytes, but "
        f"{free}; free some, enlarge shared memory (docker: --shm-size), or give a scratch "
        "directory on a disk that has room"
    )


def choose_buffer_sizes(edges: int, terms: tuple[int, int], limits: tuple[int, int]) -> BufferSizes:
    """Return ``terms`` together with a window and socket buffers that suit ``edges`` neighbours.

    Args:
        edges: number of neighbours on other drivers.
        terms: lengths of data and control terms, in bytes.
        limits: the kernel's largest receive and send buffers, in bytes.
    """
    data_term, control_term = terms
    receive_limit, send_limit = limits
    receive_buffer = min(SOCKET_BUFFER_BYTES_MAX, max(SOCKET_BUFFER_BYTES_MIN, receive_limit))
    # A control stream has at most half a control term in flight.
    share = receive_buffer // max(1, edges) - control_term // 2
    # The receiver itself discards what exceeds half a term: the window plus one frame must fit.
    limit = min(WINDOW_BYTES_MAX, data_term // 2 - data_term // 16)
    window = max(WINDOW_BYTES_MIN, min(limit, share)) // KIB * KIB
    send_buffer = min(SOCKET_BUFFER_BYTES_MAX, max(SOCKET_BUFFER_BYTES_MIN, send_limit))
    return BufferSizes(data_term, control_term, window, receive_buffer, send_buffer)


def measure_log_directory(root: Path) -> LogDirectory:
    """Return directory ``root`` with its current free space."""
    status = os.statvfs(root)
    return LogDirectory(root, status.f_bavail * status.f_frsize)


def read_socket_buffer_limits(proc: Path = Path("/proc/sys/net/core")) -> tuple[int, int]:
    """Return the kernel's largest receive and send buffers of a socket, in bytes."""
    return _read_limit(proc / "rmem_max"), _read_limit(proc / "wmem_max")


def _read_limit(path: Path) -> int:
    """Return the bytes that a file of /proc names, or the kernel's default if it is hidden."""
    return int(path.read_text()) if path.exists() else 212_992


LINGER = "1s"  # how long a closed sender can still send lost datagrams again


def publication_uri(
    peer: Endpoint, own: Endpoint, sizes: BufferSizes, *, control: bool, session: int
) -> str:
    """Return the channel URI of a sender from ``own`` to ``peer``.

    ``control`` selects the shorter log; ``session`` is the sender's own session id.
    """
    term = sizes.control_term if control else sizes.data_term
    return (
        f"aeron:udp?endpoint={peer}|session-id={session}|term-length={term}"
        f"|mtu={choose_mtu(peer, own)}|sparse=false|linger={LINGER}"
    )


def subscription_uri(own: Endpoint) -> str:
    """Return the channel URI of a media driver's receivers; a broken stream does not rejoin."""
    return f"aeron:udp?endpoint={own}|rejoin=false|reliable=true|sparse=false"


def local_publication_uri(
    peer: Endpoint, sizes: BufferSizes, *, control: bool, session: int
) -> str:
    """Return the channel URI of a sender to a peer on the same media driver: one shared log.

    ``peer`` is only a label for counters and messages.
    """
    term = sizes.control_term if control else sizes.data_term
    return (
        f"aeron:ipc?alias={peer}|session-id={session}|term-length={term}"
        f"|mtu={MTU_LOCAL}|sparse=false"
    )


# Tethered: the sender waits for a slow receiver and never drops it.
LOCAL_SUBSCRIPTION_URI = "aeron:ipc?tether=true"


def probe_uri(peer: Endpoint, session: int, term: int) -> str:
    """Return the channel URI of a publication that only tests whether an endpoint is reachable.

    ``term``: length of a term of its log, in bytes.
    """
    return (
        f"aeron:udp?endpoint={peer}|session-id={session}|term-length={term}"
        f"|mtu={MTU_NETWORK}|sparse=false|linger=0"
    )


def choose_mtu(peer: Endpoint, own: Endpoint) -> int:
    """Return the maximum size in bytes of a datagram from ``own`` to ``peer``.

    It is larger between processes of one host.
    """
    local = peer.host == own.host or ipaddress.ip_address(peer.host).is_loopback
    return MTU_LOCAL if local else MTU_NETWORK


def stays_on_host(peer: Endpoint, own: Endpoint) -> bool:
    """Return whether ``peer`` is on this host, at an address other than a loopback address."""
    return peer.host == own.host and not ipaddress.ip_address(peer.host).is_loopback


def random_session_id() -> int:
    """Return an unpredictable session id (any i32)."""
    return secrets.randbits(32) - 2**31
