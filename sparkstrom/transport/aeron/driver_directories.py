"""Directories and file locks of media drivers, and identities of processes (pid and start time).

All processes of one user that pass the same key, which names the job and the executor, share one
private directory, the home. The last process that uses the home removes it:

    <root>/sparkstrom-<uid>-<key>/        the home, 0700; root is shared memory if available
        start.lock
        current -> <directory of the driver in use>
        <token>/                          the directory of one media driver
            driver.lock  clients.lock
            driver.log  endpoint.json
            aeron/                        Aeron's own directory
            bells/                        FIFOs that wake its clients (``doorbell``)

If shared memory has no room for a driver's logs, ``<token>`` is created under the scratch root.

Only file locks show which processes are alive, because the kernel releases a lock when its holder
dies. Files with pids or heartbeats would be wrong after kill -9.

    start.lock     exclusive, briefly, by a process that starts, joins, ends or removes drivers
    driver.lock    exclusive, by the media driver's process for its lifetime
    clients.lock   shared, by each client process while it uses the driver

Other users can also write to the roots. So a directory is used or removed only if it belongs to
this user, has mode 700 and is not a link. A name that another user has taken is left alone, and the
home gets another name. ``current`` is a symbolic link because that needs no disk block: a full file
system cannot make a home unusable.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sparkstrom.base.errors import SetupError, UsageError

PROC_DIRECTORY = Path("/proc")


class ProcessIdentity(NamedTuple):
    """A process by pid and start time (clock ticks since boot), because pids are reused."""

    pid: int  # process id
    start_time: int  # clock ticks since boot


def identify_process(pid: int, proc: Path = PROC_DIRECTORY) -> ProcessIdentity:
    """Return the identity of a running process; raise ProcessLookupError if it has exited."""
    stat = _read_process_stat(pid, proc)
    if stat is None:
        raise ProcessLookupError(f"no process {pid}")
    return ProcessIdentity(pid, stat.start_time)


def is_process_alive(process: ProcessIdentity, proc: Path = PROC_DIRECTORY) -> bool:
    """Return whether that very process still runs (a zombie does not count)."""
    stat = _read_process_stat(process.pid, proc)
    return stat is not None and stat.start_time == process.start_time and stat.state not in "ZX"


def find_executor_process(pid: int | None = None, proc: Path = PROC_DIRECTORY) -> ProcessIdentity:
    """Return the executor's JVM, which is the nearest process named ``java`` from ``pid`` upwards.

    ``pid``: None means this process. If there is no such ancestor, as in a driver program that was
    started as plain ``python``, return the identity of ``pid`` itself.
    """
    own_pid = pid = pid or os.getpid()
    while (stat := _read_process_stat(pid, proc)) is not None and pid > 1:
        if stat.name == "java":
            return ProcessIdentity(pid, stat.start_time)
        pid = stat.parent
    return identify_process(own_pid, proc)


class _ProcessStat(NamedTuple):
    """The fields of /proc/PID/stat that identify a process."""

    name: str  # name of the program
    state: str  # one letter, such as "Z" for a zombie
    parent: int  # process id of the parent
    start_time: int  # clock ticks since boot


def _read_process_stat(pid: int, proc: Path) -> _ProcessStat | None:
    """Read /proc/PID/stat; return None if the process has exited."""
    try:
        line = (proc / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # pid (name, which may contain blanks and parentheses) state ppid ... ; starttime is field 22
    name, _, rest = line[line.index("(") + 1 :].rpartition(")")
    fields = rest.split()
    return _ProcessStat(name, fields[0], int(fields[1]), int(fields[19]))


DRIVER_LOCK = "driver.lock"
CLIENTS_LOCK = "clients.lock"
START_LOCK = "start.lock"

LOCK_RETRY_S = 0.01
_OPEN_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


def open_lock(path: Path) -> int:
    """Open or create a lock file; return its descriptor, which is not inherited across exec."""
    return os.open(path, _OPEN_FLAGS | os.O_CREAT, 0o600)


def try_lock(descriptor: int, *, shared: bool = False) -> bool:
    """Lock the file without waiting; return False if another descriptor has a conflicting lock.

    ``shared`` selects a shared instead of an exclusive lock. If ``descriptor`` holds a lock of the
    other kind, that lock is converted.
    """
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(descriptor: int) -> None:
    """Release the lock and keep the descriptor open."""
    fcntl.flock(descriptor, fcntl.LOCK_UN)


@contextmanager
def hold_lock_if_free(path: str | Path, dir_fd: int | None = None) -> Iterator[bool]:
    """Lock an existing file exclusively during the block if it is free; yield whether it was.

    A relative ``path`` refers to the open directory ``dir_fd``, or to the working directory if that
    is None. Raise FileNotFoundError if the file does not exist.
    """
    descriptor = os.open(path, _OPEN_FLAGS, dir_fd=dir_fd)
    try:
        yield try_lock(descriptor)
    finally:
        os.close(descriptor)


def is_locked(path: str | Path, dir_fd: int | None = None) -> bool:
    """Return whether any process holds the lock at ``path``; False if there is no file."""
    try:
        with hold_lock_if_free(path, dir_fd) as is_free:
            return not is_free
    except FileNotFoundError:
        return False


def make_private_directory(path: Path) -> Path:
    """Create ``path`` with mode 700, or check that it is such a directory of this user.

    Return ``path``; raise SetupError if something else exists there.
    """
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
def open_private_directory(path: Path) -> Iterator[int | None]:
    """Yield a descriptor of the directory, or None if it is not private to this user.

    Links are never followed. Operations relative to the descriptor act on the directory that was
    checked, even if the name is replaced later.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        yield None
        return
    try:
        status = os.fstat(descriptor)
        is_private = status.st_uid == os.getuid() and not status.st_mode & 0o077
        yield descriptor if is_private else None
    finally:
        os.close(descriptor)


@contextmanager
def hold_start_lock(home: Path, timeout_s: float) -> Iterator[bool]:
    """Hold the start lock of ``home`` during the block; yield whether it was free in time.

    Wait for the lock at most ``timeout_s`` seconds. Create home and lock file if necessary.
    """
    end_s = time.monotonic() + timeout_s
    descriptor = _try_start_lock(home)
    while descriptor is None and time.monotonic() < end_s:
        time.sleep(LOCK_RETRY_S)
        descriptor = _try_start_lock(home)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _try_start_lock(home: Path) -> int | None:
    """Return a descriptor that holds the start lock; None if the lock is held or was removed."""
    path = home / START_LOCK
    with open_private_directory(make_private_directory(home)) as opened:
        if opened is None:
            return None  # the last user removed the home between the two steps
        try:
            descriptor = os.open(START_LOCK, _OPEN_FLAGS | os.O_CREAT, 0o600, dir_fd=opened)
        except FileNotFoundError:
            return None  # removed after it was opened
    if try_lock(descriptor) and is_same_file(path, descriptor):
        return descriptor
    os.close(descriptor)
    return None


def is_same_file(path: Path, descriptor: int) -> bool:
    """Return whether ``path`` still names the open file, and not a newer one of the same name."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


CURRENT_LINK = "current"
ENDPOINT_FILE = "endpoint.json"
LOG_FILE = "driver.log"
AERON_DIRECTORY = "aeron"
KEY_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
TOKEN_BYTES = 4
TOKEN_PATTERN = re.compile(rf"[0-9a-f]{{{2 * TOKEN_BYTES}}}")
HOME_NAMES_MAX = 1000  # names to try for one key if others have taken the first ones


def _home_prefix() -> str:
    """Return the start of the names of all homes of this user."""
    return f"sparkstrom-{os.getuid()}-"


@dataclass(frozen=True, slots=True)
class DriverHome:
    """The directories of the media drivers that share one key, under one or several roots.

    Each root may have a directory ``name`` with a subdirectory for each driver. The directory
    ``name`` under the first root is the home. It also contains the start lock, which a process
    holds while it starts, joins, ends or removes drivers, and a link to the current driver, which
    is the one that clients join.
    """

    name: str  # the directories' name, which contains the user id and the key
    roots: tuple[Path, ...]  # the first one contains the home; drivers may be under any of them

    @property
    def path(self) -> Path:
        """The home directory."""
        return self.roots[0] / self.name

    def create_driver_directory(self, root: Path) -> Path:
        """Create and return a directory for a new driver. The caller has the start lock."""
        return make_private_directory(
            make_private_directory(root / self.name) / secrets.token_hex(TOKEN_BYTES)
        )

    def current(self) -> Path | None:
        """Return the directory of the newest driver, dead or alive; None if there is none."""
        try:
            return Path(os.readlink(self.path / CURRENT_LINK))
        except FileNotFoundError:
            return None

    def set_current(self, directory: Path) -> None:
        """Make ``directory`` the one that clients join. The caller has the start lock."""
        draft = self.path / f".{CURRENT_LINK}"
        draft.unlink(missing_ok=True)
        draft.symlink_to(directory)
        draft.replace(self.path / CURRENT_LINK)

    def clear_current(self) -> None:
        """Stop clients from joining the current driver. The caller has the start lock."""
        (self.path / CURRENT_LINK).unlink(missing_ok=True)

    def remove_dead_drivers(self) -> None:
        """Remove dead drivers, and the home if no driver is left. The caller has the start lock."""
        has_drivers = [_remove_dead_drivers(root / self.name) for root in self.roots]
        if any(has_drivers):  # a list, so that all roots are cleaned
            return
        for root in reversed(self.roots):  # the first root, with the start lock, comes last
            _remove_home(root / self.name)


def resolve_home(key: str, shared_memory: Path, scratch: Path) -> DriverHome:
    """Return the home of ``key``, which is the same for all workers that pass equal arguments.

    ``shared_memory`` and ``scratch`` are the possible roots; the first writable one has the home.

    Raise UsageError for an invalid key, SetupError if neither directory is writable.
    """
    if not KEY_PATTERN.fullmatch(key):
        raise UsageError(
            f"{key!r} is not a valid key of a media driver: use 1 to 100 of A-Z a-z 0-9 . _ -"
        )
    roots = [root for root in (shared_memory, scratch) if is_writable_directory(root)]
    if not roots:
        raise SetupError(
            f"neither {shared_memory} nor {scratch} is a directory that user {os.getuid()} can "
            "write to: give a scratch directory that is"
        )
    return _choose_home(_home_prefix() + key, tuple(dict.fromkeys(roots)))


def _choose_home(name: str, roots: tuple[Path, ...]) -> DriverHome:
    """Return the home with the first of the names ``name``, ``name~1``, ... that is not taken.

    A name is taken if another user has it under one of ``roots`` and this user has it under none.
    Once a home exists, all workers of this user thus choose it. It has only the roots under which
    no other user has its name.
    """
    for number in range(HOME_NAMES_MAX):
        home = DriverHome(f"{name}~{number}" if number else name, roots)
        taken = {root for root in roots if _is_foreign(root / home.name)}
        is_ours = any((root / home.name).exists() for root in roots if root not in taken)
        if is_ours or not taken:
            return DriverHome(home.name, tuple(root for root in roots if root not in taken))
    raise SetupError(
        f"{roots[0] / name} and {HOME_NAMES_MAX - 1:,} names like it are taken, none by "
        f"a directory of user {os.getuid()} with mode 700: remove them, or give another scratch "
        "directory"
    )


def _is_foreign(path: Path) -> bool:
    """Return whether the path exists and is not a directory of this user; links are foreign.

    A directory of this user with too many permissions is not foreign: it raises an error elsewhere.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid()


def is_writable_directory(root: Path) -> bool:
    """Return whether this user can create directories in ``root``."""
    return root.is_dir() and os.access(root, os.W_OK | os.X_OK)


def is_driver_in_use(directory: str | Path, dir_fd: int | None = None) -> bool:
    """Return whether a media driver or a client holds a lock in ``directory``."""
    locks = (f"{directory}/{name}" for name in (DRIVER_LOCK, CLIENTS_LOCK))
    return any(is_locked(path, dir_fd) for path in locks)


def remove_stale_homes(roots: tuple[Path, ...], keep: str) -> None:
    """Remove what dead drivers of this user left under ``roots``, except in homes named ``keep``.

    Failures are ignored, because the caller does not depend on the result.
    """
    for name in _list_homes(roots) - {keep}:
        own_roots = tuple(root for root in roots if not _is_foreign(root / name))
        if not any((root / name).exists() for root in own_roots):
            continue  # another user's, not ours to remove
        home = DriverHome(name, own_roots)
        with suppress(OSError, SetupError), hold_start_lock(home.path, 0) as locked:
            if locked:
                home.remove_dead_drivers()


def _list_homes(roots: tuple[Path, ...]) -> set[str]:
    """Return the names of this user's homes, and of their directories in other ``roots``."""
    names: set[str] = set()
    for root in roots:
        with suppress(OSError):
            names.update(name for name in os.listdir(root) if name.startswith(_home_prefix()))
    return names


def _remove_dead_drivers(home: Path) -> bool:
    """Remove the dead drivers under ``home``, the directory of one key under one root.

    Return whether any driver is left; False if ``home`` is missing or not private to this user.
    """
    with open_private_directory(home) as opened:
        if opened is None:
            return False
        for name in _list_drivers(opened):
            if not is_driver_in_use(name, opened):
                shutil.rmtree(name, ignore_errors=True, dir_fd=opened)
        return bool(_list_drivers(opened))


def _list_drivers(home: int) -> list[str]:
    """Return the names of the drivers' directories in the open directory ``home``."""
    with os.scandir(home) as entries:
        names = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    return [name for name in names if TOKEN_PATTERN.fullmatch(name)]


def _remove_home(path: Path) -> None:
    """Remove a directory of drivers (``DriverHome``) that has none, with its links and start lock.

    Do nothing if ``path`` does not exist or is not private to this user. Keep the directory if a
    new worker has already created files in it.
    """
    with open_private_directory(path) as opened:
        if opened is None:
            return  # no driver ever used this root, or it is not ours
        for name in (f".{CURRENT_LINK}", CURRENT_LINK, START_LOCK):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=opened)
    try:
        path.rmdir()
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:  # a new worker has created its start lock already
            raise
