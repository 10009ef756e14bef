"""Where media drivers live: one private directory per (user, key), emptied by the last one out.

    <root>/sparkstrom-<uid>-<key>/        the home, 0700; root is shared memory where there is one
        start.lock
        current -> <directory of the driver in use>
        <token>/                          one media driver; under the scratch root where shared
            driver.lock  clients.lock     memory has no room for its logs
            driver.log  endpoint.json
            aeron/                        the directory that Aeron itself works in

Others may write to the roots, too. What lies there under our names is used, or removed, only where
it is a directory of this user with mode 700 and no link; a name that somebody else has taken is
left alone, and a home takes another one.

A symbolic link needs no block, so a full file system cannot keep a home from being used.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sparkstrom.base.errors import SetupError, UsageError
from sparkstrom.transport.aeron.locks import (
    CLIENTS_LOCK,
    DRIVER_LOCK,
    START_LOCK,
    is_held,
    opened_private,
    private_directory,
    start_lock,
)

CURRENT = "current"
ENDPOINT = "endpoint.json"
LOG = "driver.log"
AERON = "aeron"
KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
TOKEN_BYTES = 4
TOKEN = re.compile(rf"[0-9a-f]{{{2 * TOKEN_BYTES}}}")
NAMES_MAX = 1000  # that are tried for one key, where others have taken the first ones


def _prefix() -> str:
    return f"sparkstrom-{os.getuid()}-"


@dataclass(frozen=True, slots=True)
class Home:
    """The home of one key, and the same name under every root that may hold its drivers."""

    name: str
    roots: tuple[Path, ...]  # the first is where the home is; drivers may live under any

    @property
    def path(self) -> Path:
        return self.roots[0] / self.name

    def new_directory(self, root: Path) -> Path:
        """Make the directory of one more media driver under ``root``. Call under the start lock."""
        return private_directory(
            private_directory(root / self.name) / secrets.token_hex(TOKEN_BYTES)
        )

    def current(self) -> Path | None:
        """The directory of the driver last started, dead or alive."""
        try:
            return Path(os.readlink(self.path / CURRENT))
        except FileNotFoundError:
            return None

    def set_current(self, directory: Path) -> None:
        """Point to the driver that whoever comes next shall use. Call under the start lock."""
        draft = self.path / f".{CURRENT}"
        draft.unlink(missing_ok=True)
        draft.symlink_to(directory)
        draft.replace(self.path / CURRENT)

    def forget_current(self) -> None:
        """Let nobody join that driver any more. Call under the start lock."""
        (self.path / CURRENT).unlink(missing_ok=True)

    def tidy(self) -> None:
        """Remove dead drivers, and the home with the last of them. Call under the start lock."""
        left = [_has_drivers_left(root / self.name) for root in self.roots]  # all are looked at
        if any(left):
            return
        for root in reversed(self.roots):  # the start lock goes last
            _remove_empty(root / self.name)


def home_for(key: str, shared_memory: Path, scratch: Path) -> Home:
    """The home of ``key``. It is the same for all workers that agree on the three arguments."""
    if not KEY.fullmatch(key):
        raise UsageError(
            f"{key!r} is no key for a media driver: want 1 to 100 of A-Z a-z 0-9 . _ -"
        )
    roots = [root for root in (shared_memory, scratch) if is_usable(root)]
    if not roots:
        raise SetupError(
            f"neither {shared_memory} nor {scratch} is a directory that user {os.getuid()} can "
            "write to: give a scratch directory that is"
        )
    return _free_home(_prefix() + key, tuple(dict.fromkeys(roots)))


def _free_home(name: str, roots: tuple[Path, ...]) -> Home:
    """The first one of this name, or of ``name~1`` and so on, that nobody else has taken.

    All workers come to the same one: once it is ours under a root, it stays the choice.
    """
    for number in range(NAMES_MAX):
        home = Home(f"{name}~{number}" if number else name, roots)
        taken = {root for root in roots if _is_taken(root / home.name)}
        is_ours = any((root / home.name).exists() for root in roots if root not in taken)
        if is_ours or not taken:
            return Home(home.name, tuple(root for root in roots if root not in taken))
    raise SetupError(
        f"{roots[0] / name} and {NAMES_MAX - 1:,} names like it are taken, none by a directory of "
        f"user {os.getuid()} with mode 700: remove them, or give another scratch directory"
    )


def _is_taken(path: Path) -> bool:
    """Whether there is something that is no directory of this user; a link never is one.

    One of ours that others can enter is not taken: nobody else made it, and its user is told.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid()


def is_usable(root: Path) -> bool:
    """Whether directories can be made in ``root``."""
    return root.is_dir() and os.access(root, os.W_OK | os.X_OK)


def is_in_use(directory: str | Path, dir_fd: int | None = None) -> bool:
    """Whether a media driver or a client of it still holds a lock in ``directory``."""
    locks = (f"{directory}/{name}" for name in (DRIVER_LOCK, CLIENTS_LOCK))
    return any(is_held(path, dir_fd) for path in locks)


def sweep(roots: tuple[Path, ...], besides: str) -> None:
    """Remove what dead drivers of this user left under ``roots``; whatever is in use stays.

    A courtesy to the host: what stands in its way is left there, and nothing is raised.
    """
    for name in _names_under(roots) - {besides}:
        ours = tuple(root for root in roots if not _is_taken(root / name))
        if not any((root / name).exists() for root in ours):
            continue  # somebody else took our name: not ours to remove
        home = Home(name, ours)
        with suppress(OSError, SetupError), start_lock(home.path, 0) as locked:
            if locked:
                home.tidy()


def _names_under(roots: tuple[Path, ...]) -> set[str]:
    names: set[str] = set()
    for root in roots:
        with suppress(OSError):
            names.update(name for name in os.listdir(root) if name.startswith(_prefix()))
    return names


def _has_drivers_left(home: Path) -> bool:
    """Remove the dead drivers of a home that is ours, if it is; are there others?"""
    with opened_private(home) as opened:
        if opened is None:
            return False
        for name in _drivers(opened):
            if not is_in_use(name, opened):
                shutil.rmtree(name, ignore_errors=True, dir_fd=opened)
        return bool(_drivers(opened))


def _drivers(home: int) -> list[str]:
    with os.scandir(home) as entries:
        found = [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    return [name for name in found if TOKEN.fullmatch(name)]


def _remove_empty(path: Path) -> None:
    with opened_private(path) as opened:
        if opened is None:
            return  # no driver ever lived under this root, or it is not ours
        for name in (f".{CURRENT}", CURRENT, START_LOCK):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=opened)
    try:
        path.rmdir()
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:  # a new worker has made its own start lock already
            raise
