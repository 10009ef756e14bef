"""Wait for data on a file descriptor, even in programs with more than 1024 open files."""

from __future__ import annotations

import select
import socket


def wait_until_readable(source: int | socket.socket, seconds: float) -> bool:
    """Wait until the source has data, has ended or has failed; return False after a timeout.

    This function uses ``poll``, because ``select.select`` fails for descriptors above 1023, which
    programs with many open files have.

    Args:
        source: A descriptor or a socket.
        seconds: How long to wait at most; 0 or less: not at all.

    Raises:
        OSError, ValueError: The socket is closed.
    """
    poll = select.poll()
    poll.register(source, select.POLLIN)
    return bool(poll.poll(max(0.0, 1000 * seconds)))
