"""Wait for data on a file descriptor, and redirect the standard output."""

from __future__ import annotations

import os
import select
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

STDOUT, STDERR = 1, 2


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


@contextmanager
def redirect_stdout_to_stderr() -> Iterator[None]:
    """Let this process and the ones that it starts in the block write to standard error instead.

    In a program that was started without these streams, do nothing.
    """
    stdout = sys.stdout
    if stdout is None or sys.stderr is None:
        yield
        return
    stdout.flush()
    before = os.dup(STDOUT)
    os.dup2(STDERR, STDOUT)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        stdout.flush()
        os.dup2(before, STDOUT)
        os.close(before)
