"""Compare the bytes that two transports report with those of ``lo``, in a network namespace."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from sparkstrom.transport.aeron.client import AeronTransport
from sparkstrom.transport.aeron.driver_directories import identify_process
from sparkstrom.transport.aeron.media_driver import DriverOptions, ensure_driver

FRAMES = {"control": (100, 400), "data": (60_000, 300)}  # (bytes per frame, number of frames)
DEADLINE_S = 60.0
ETHERNET_HEADER_BYTES = 14


def lo_bytes() -> int:
    """Return the bytes that packets over ``lo`` would have on Ethernet, including all headers.

    The kernel counts packets of ``lo`` without a link header, which on Ethernet has 14 bytes.
    """
    lines = Path("/proc/net/dev").read_text().splitlines()
    figures = next(line.split(":")[1] for line in lines if line.strip().startswith("lo:"))
    sent_bytes, packets = (int(field) for field in figures.split()[8:10])
    return sent_bytes + ETHERNET_HEADER_BYTES * packets


def exchange(here: Any, there: Any, size: int, count: int, *, control: bool) -> None:
    """Send ``count`` frames, polling both transports in turn, until all have arrived.

    A control frame is sent after the one before has arrived: like a worker's heartbeats, each is a
    datagram of its own. A media driver that is late would send several in one, and the transport
    counts a header for each.
    """
    there.open_receiver(7)
    sender = here.open_sender(there.endpoint, 7, control=control)
    sent = arrived = 0
    end_s = time.monotonic() + DEADLINE_S
    while arrived < count:
        assert time.monotonic() < end_s, f"{sent} went, {arrived} came of {count}"
        if sent < count and (arrived == sent or not control):
            sent += sender.offer([bytes(size)])[0]
        here.poll(0)
        arrived += len(there.poll(0))


def main(kind: str) -> None:
    """Exchange frames of this kind; print the bytes of ``lo`` and the reported ones as JSON."""
    options = DriverOptions(linger_s=0.5, watch=identify_process(os.getpid()))
    here, there = (
        AeronTransport(ensure_driver(f"wire-{os.getpid()}-{name}", options)) for name in "ab"
    )
    size, count = FRAMES[kind]
    exchange(here, there, size, count, control=kind == "control")
    told = [transport.sent() for transport in (here, there)]
    lo = lo_bytes()
    here.close()
    there.close()
    print(json.dumps({"lo": lo, "told": sum(s.driver_bytes + s.own_bytes for s in told)}))


if __name__ == "__main__":
    main(sys.argv[1])
