"""Wait for data on a file descriptor, in programs with any number of open files."""

from __future__ import annotations

import select
import socket


def wait_until_readable(source: int | socket.socket, seconds: float) -> bool:
    """Wait until the source has data, has ended or has failed; return False after a timeout.

    ``select.select`` does the same, but fails for descriptors above 1023.

    Args:
        source: A descriptor or a socket.
        seconds: How long to wait at most; 0 or less: not at all.

    Raises:
        OSError, ValueError: The socket is closed.
    """
    poll = select.poll()
    poll.register(source, select.POLLIN)
    return bool(poll.poll(max(0.0, 1000 * seconds)))
