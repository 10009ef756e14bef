"""Where media drivers live: one private directory per (user, key), emptied by the last one out.

    <root>/sparkstrom-<uid>-<key>/        the home, 0700; root is shared memory where there is one
        start.lock
        current -> <directory of the driver in use>
        <token>/                          one media driver; under the scratch root where shared
            driver.lock  clients.lock     memory has no room for its logs
            driver.log  endpoint.json
            aeron/                        the directory that Aeron itself works in

A symbolic link needs no block, so a full file system cannot keep a home from being used.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from sparkstrom.base.errors import SetupError, UsageError
from sparkstrom.transport.aeron.locks import (
    CLIENTS_LOCK,
    DRIVER_LOCK,
    START_LOCK,
    is_held,
    private_directory,
    start_lock,
)

CURRENT = "current"
ENDPOINT = "endpoint.json"
LOG = "driver.log"
AERON = "aeron"
KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


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
        return private_directory(private_directory(root / self.name) / secrets.token_hex(4))

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
        for root in self.roots:
            for directory in _subdirectories(root / self.name):
                if not is_in_use(directory):
                    shutil.rmtree(directory, ignore_errors=True)
        if any(_subdirectories(root / self.name) for root in self.roots):
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
    return Home(_prefix() + key, tuple(dict.fromkeys(roots)))


def is_usable(root: Path) -> bool:
    """Whether directories can be made in ``root``."""
    return root.is_dir() and os.access(root, os.W_OK | os.X_OK)


def is_in_use(directory: Path) -> bool:
    """Whether a media driver or a client of it still holds a lock in ``directory``."""
    return is_held(directory / DRIVER_LOCK) or is_held(directory / CLIENTS_LOCK)


def sweep(roots: tuple[Path, ...], besides: str) -> None:
    """Remove what dead drivers of this user left under ``roots``; whatever is in use stays."""
    names = {path.name for root in roots for path in root.glob(_prefix() + "*")} - {besides}
    for name in names:
        home = Home(name, roots)
        if not _is_ours(home.path):
            continue  # somebody else took our name: not ours to remove
        with start_lock(home.path, 0) as locked:
            if locked:
                home.tidy()


def _is_ours(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.getuid()
    except FileNotFoundError:
        return True


def _subdirectories(path: Path) -> list[Path]:
    try:
        return [
            Path(entry.path) for entry in os.scandir(path) if entry.is_dir(follow_symlinks=False)
        ]
    except FileNotFoundError:
        return []


def _remove_empty(path: Path) -> None:
    for name in (f".{CURRENT}", CURRENT, START_LOCK):
        (path / name).unlink(missing_ok=True)
    try:
        path.rmdir()
    except FileNotFoundError:
        return  # no driver ever lived under this root
    except OSError as error:
        if error.errno != errno.ENOTEMPTY:  # a new worker has made its own start lock already
            raise
