"""Where compiled kernels are kept: beside the package, or else in a private directory of the host.

What lies there is executed: a directory that somebody else can write to is never used. Numba, which
compiles for GPUs, reads ``NUMBA_CACHE_DIR`` when it is imported, so the packages whose modules
import it call ``use_writable_cache`` first.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
VARIABLE = "NUMBA_CACHE_DIR"
OWN = "__pycache__"  # of the package, beside what Python compiles
# Directories of the host, whatever the application: those of Spark are an application's own, and
# others would compile again. The first outlives a restart of the machine.
SHARED = (Path("/var/tmp"), Path("/tmp"))


def kernel_directory(environ: Mapping[str, str], package: Path = PACKAGE) -> Path:
    """What the user names, the package's own where it can be written to, or one per user and host.

    Made where it is not there.
    """
    if VARIABLE in environ:
        chosen = Path(environ[VARIABLE])
        chosen.mkdir(parents=True, exist_ok=True)
        return chosen
    if os.access(package, os.W_OK):
        chosen = package / OWN
        chosen.mkdir(exist_ok=True)
        return chosen
    return private_directory(SHARED)


def use_writable_cache(environ: MutableMapping[str, str], package: Path = PACKAGE) -> None:
    """Name a directory for Numba where the package's own is read-only and none is named."""
    if VARIABLE not in environ and not os.access(package, os.W_OK):
        environ[VARIABLE] = str(private_directory(SHARED))


def private_directory(roots: tuple[Path, ...]) -> Path:
    """The one of this user under the first root that has room for it; if need be, a new one."""
    name = f"sparkstrom-kernels-{os.getuid()}"
    for root in roots:
        if root.is_dir() and os.access(root, os.W_OK | os.X_OK) and _is_ours(root / name):
            return root / name
    return Path(tempfile.mkdtemp(prefix=f"{name}-"))


def _is_ours(wanted: Path) -> bool:
    """Make it; is it ours alone?"""
    try:
        wanted.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError:  # a file or a link that leads nowhere
        return False
    found = wanted.lstat()
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return ours and not found.st_mode & 0o077
