"""Scratch: a wrapper's directory for files; what killed programs left is removed by the next one.

Whoever uses a scratch directory holds the lock in it, which the kernel drops the moment its holder
dies, however that is. A directory without a lock file may be anybody's, and stays.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from sparkstrom.transport.aeron.locks import is_still, open_lock, taken, try_lock

PREFIX = "sparkstrom-local-"
LOCK = "lock"


class WrapperScratch:
    """One of them, in the temporary directory, until ``remove``."""

    def __init__(self) -> None:
        self.path = Path()
        while not self._is_made():
            pass  # it was taken for one that is left before its lock was held: a moment

    def _is_made(self) -> bool:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._descriptor = open_lock(self.path / LOCK)
        try:
            is_ours = try_lock(self._descriptor) and is_still(self.path / LOCK, self._descriptor)
        except OSError:  # no locks on this file system: nobody removes what is left here
            is_ours = True
        if not is_ours:
            os.close(self._descriptor)
        return is_ours

    def remove(self) -> None:
        """With all that is in it; once."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._descriptor)


def remove_left() -> None:
    """Those that programs of this user have left, which were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # gone meanwhile, or without a lock
            if path.lstat().st_uid == os.getuid():
                _remove_if_left(path)


def _remove_if_left(path: Path) -> None:
    with taken(path / LOCK) as is_left:
        if is_left:
            shutil.rmtree(path, ignore_errors=True)
