"""Who is alive, said by file locks alone: the kernel drops a lock the moment its holder dies.

    start.lock     exclusive, short: whoever starts, joins, ends or sweeps media drivers of one home
    driver.lock    exclusive, held by the media driver's process for life
    clients.lock   shared, held by each client process while it uses the driver

No pid files, no heartbeat ages: both lie after kill -9.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sparkstrom.base.errors import SetupError

DRIVER_LOCK = "driver.lock"
CLIENTS_LOCK = "clients.lock"
START_LOCK = "start.lock"

RETRY_S = 0.01
_OPEN = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


def open_lock(path: Path) -> int:
    """Open (or make) a lock file; the descriptor is not inherited across exec."""
    return os.open(path, _OPEN | os.O_CREAT, 0o600)


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Take the lock if it is free; a second call on a descriptor that has it changes its mode."""
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(descriptor: int) -> None:
    """Give the lock back and keep the descriptor."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


@contextmanager
def taken(path: str | Path, dir_fd: int | None = None) -> Iterator[bool]:
    """Hold the lock of a file that is there, if it is free; yield whether it is.

    Raise FileNotFoundError where there is none.
    """
    descriptor = os.open(path, _OPEN, dir_fd=dir_fd)
    try:
        yield try_lock(descriptor)
    finally:
        os.close(descriptor)


def is_held(path: str | Path, dir_fd: int | None = None) -> bool:
    """Whether any process holds the lock at ``path``; a missing file is held by nobody."""
    try:
        with taken(path, dir_fd) as is_free:
            return not is_free
    except FileNotFoundError:
        return False


def private_directory(path: Path) -> Path:
    """Make ``path``, or check that it is ours alone. Raise SetupError where it is not."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        status = path.lstat()
        if not path.is_dir() or path.is_symlink() or status.st_uid != os.getuid():
            raise SetupError(
                f"{path} exists and is not a directory of user {os.getuid()}: remove it"
            ) from None
        if status.st_mode & 0o077:
            raise SetupError(
                f"{path} is open to others (mode {status.st_mode & 0o777:o}): remove it, or "
                f"`chmod 700 {path}`"
            ) from None
    return path


@contextmanager
def opened_private(path: Path) -> Iterator[int | None]:
    """Yield a descriptor of the directory; None where there is none that is ours alone.

    A link is never followed, and what is done by the descriptor is done in the directory that was
    checked, whatever becomes of the name.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        status = os.fstat(descriptor)
        ours = status.st_uid == os.getuid() and not status.st_mode & 0o077
        yield descriptor if ours else None
    finally:
        os.close(descriptor)


@contextmanager
def start_lock(home: Path, deadline_s: float) -> Iterator[bool]:
    """Hold the start lock of ``home``, making both; yield whether it came within the deadline."""
    end_s = time.monotonic() + deadline_s
    descriptor = _try_start_lock(home)
    while descriptor is None and time.monotonic() < end_s:
        time.sleep(RETRY_S)
        descriptor = _try_start_lock(home)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _try_start_lock(home: Path) -> int | None:
    path = home / START_LOCK
    with opened_private(private_directory(home)) as opened:
        if opened is None:
            return None  # the last one out removed the home between our two steps
        try:
            descriptor = os.open(START_LOCK, _OPEN | os.O_CREAT, 0o600, dir_fd=opened)
        except FileNotFoundError:
            return None  # the same, a moment later
    if try_lock(descriptor) and is_still(path, descriptor):
        return descriptor
    os.close(descriptor)
    return None


def is_still(path: Path, descriptor: int) -> bool:
    """Whether ``path`` names the file we locked, and not one made after ours was removed."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
