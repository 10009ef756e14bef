"""Where compiled kernels are kept: beside the package, or else in a private directory.

Numba reads ``NUMBA_CACHE_DIR`` when it is imported, so the packages whose modules import it call
this first. What lies in the cache is unpickled: a directory that somebody else can write to is
never used.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
VARIABLE = "NUMBA_CACHE_DIR"


def use_writable_cache(environ: MutableMapping[str, str], package: Path = PACKAGE) -> None:
    """Name a directory for kernels where the package's own is read-only and none is named."""
    if VARIABLE not in environ and not os.access(package, os.W_OK):
        scratch = environ.get("SPARK_LOCAL_DIRS", tempfile.gettempdir()).split(",")[0]
        environ[VARIABLE] = str(_private(Path(scratch) / f"sparkstrom-kernels-{os.getuid()}"))


def _private(wanted: Path) -> Path:
    """This directory if it is ours alone, otherwise a new one."""
    try:
        wanted.mkdir(mode=0o700, exist_ok=True)
        found = wanted.lstat()
    except FileExistsError:
        return Path(tempfile.mkdtemp(prefix=f"{wanted.name}-"))
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    if ours and not found.st_mode & 0o077:
        return wanted
    return Path(tempfile.mkdtemp(prefix=f"{wanted.name}-"))
