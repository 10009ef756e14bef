"""Which UDP port a media driver binds: the one peers know, the one asked for, or any free one.

A port counts as free when a plain socket can be bound to it; Aeron binds it a moment later, so
whoever asks must be ready to take the next candidate.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator

from sparkstrom.base.errors import SetupError

EPHEMERAL_TRIES = 16


def candidate_ports(host: str, ports: range | None, preferred: int | None) -> Iterator[int]:
    """Ports of ``host`` that are free now, best first. Raise SetupError where it is not ours."""
    if preferred and (ports is None or preferred in ports) and free_port(host, preferred):
        yield preferred
    if ports is not None:
        yield from (port for port in ports if free_port(host, port))
        return
    for _ in range(EPHEMERAL_TRIES):
        yield free_port(host, 0)


def free_port(host: str, port: int) -> int:
    """``port``, or one the kernel chose for 0, if it can be bound now; 0 if it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return 0
            raise SetupError(
                f"UDP port {port} of {host} cannot be bound on {socket.gethostname()}: "
                f"{error.strerror}; choose an address of this machine and a port you may use"
            ) from error
        return int(probe.getsockname()[1])


def none_free(host: str, ports: range | None) -> str:
    """The sentence for when no candidate could be had."""
    if ports is None:
        return f"no free UDP port on {host} in {EPHEMERAL_TRIES} attempts: too many are in use"
    first, last = ports[0], ports[-1]
    which = f"UDP port {first}" if first == last else f"every UDP port from {first} to {last}"
    return (
        f"{which} of {host} on {socket.gethostname()} is taken: end the program that has it, "
        "choose another, or leave the port open to get any free one"
    )
