"""Doorbells: FIFOs through which senders wake receivers that use the same media driver.

Aeron does not signal that frames have arrived, so a receiver would have to poll all the time.
Instead, each client owns a FIFO, its doorbell, in the media driver's directory, and waits for a
byte in it. A sender rings, which means that it writes a byte. Beside the FIFO is a symbolic link
for each local stream that the client receives, named after the stream's number, so that a sender
finds the bell of its receiver.

    <driver's directory>/bells/
        <token>                 a client's FIFO
        <stream> -> <token>

Frames from other media drivers ring no bell, and a ring may be lost. A waiting receiver therefore
also checks for frames at least every 5 ms. Rings that do not fit into the FIFO are dropped.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import threading
from contextlib import suppress
from pathlib import Path

BELLS_DIRECTORY = "bells"
RING = b"\0"
# With O_RDWR neither end blocks or breaks when the other is missing.
OPEN_FLAGS = os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC
_write = ctypes.PyDLL(None, use_errno=True).write  # keeps the interpreter lock
_write.argtypes = (ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t)
_write.restype = ctypes.c_ssize_t


class Doorbell:
    """One client's FIFO; a byte written to it ends the client's wait. ``ring`` is thread-safe."""

    def __init__(self, driver_directory: Path) -> None:
        """Create the FIFO in the media driver's directory.

        Raise OSError if that fails, as it does once the driver has ended.
        """
        directory = driver_directory / BELLS_DIRECTORY
        directory.mkdir(mode=0o700, exist_ok=True)
        self._path = directory / secrets.token_hex(8)
        self._links: dict[int, Path] = {}
        self._lock = threading.Lock()
        os.mkfifo(self._path, 0o600)
        self.descriptor = os.open(self._path, OPEN_FLAGS)  # -1: closed

    def add_stream(self, stream: int) -> None:
        """Create the link by which the senders of this local stream find this bell."""
        self._links[stream] = link = self._path.parent / str(stream)
        with suppress(OSError):  # an older link; or the driver has ended
            link.unlink()
        with suppress(OSError):
            link.symlink_to(self._path.name)

    def remove_stream(self, stream: int) -> None:
        """Remove the link of a stream. Unknown streams are ignored."""
        if (link := self._links.pop(stream, None)) is not None:
            with suppress(OSError):
                link.unlink()

    def ring(self) -> None:
        """End this client's current wait, or else the next one; do nothing once closed."""
        with self._lock:
            if self.descriptor >= 0:
                _write_ring(self.descriptor)

    def close(self) -> None:
        """Remove the FIFO and its links. Idempotent."""
        for stream in list(self._links):
            self.remove_stream(stream)
        with self._lock:
            if self.descriptor < 0:
                return
            os.close(self.descriptor)
            self.descriptor = -1
        with suppress(OSError):
            self._path.unlink()


class ReceiverBell:
    """Lets the sender of a local stream ring the bell of the stream's receiver."""

    def __init__(self, driver_directory: Path, stream: int) -> None:
        self._path = driver_directory / BELLS_DIRECTORY / str(stream)
        self._descriptor = -1

    def ring(self) -> None:
        """Wake the receiver; do nothing while it has no bell."""
        if self._descriptor < 0:
            with suppress(OSError):
                self._descriptor = os.open(self._path, OPEN_FLAGS)
        if self._descriptor >= 0:
            _write_ring(self._descriptor)

    def close(self) -> None:
        """Close the FIFO of the bell at this end. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _write_ring(descriptor: int) -> None:
    """Write a ring (one byte) to a FIFO unless it is full of unread ones. Raise OSError on failure.

    ``os.write`` would release the interpreter lock, which the woken thread of this process then
    takes, so that the caller waits for it.
    """
    if _write(descriptor, RING, len(RING)) < 0:
        number = ctypes.get_errno()
        if number != errno.EAGAIN:  # EAGAIN: it is full
            raise OSError(number, os.strerror(number))
