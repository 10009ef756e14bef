"""Where compiled kernels are kept: beside the package, or else in a private directory of the host.

What lies there is executed: a directory that somebody else owns, or can write to, is never used,
and neither is such a file. Numba, which compiles for GPUs, reads ``NUMBA_CACHE_DIR`` when it is
imported, so the packages whose modules import it call ``use_writable_cache`` first.
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

log = logging.getLogger(__name__)

PACKAGE = Path(__file__).resolve().parent.parent
VARIABLE = "NUMBA_CACHE_DIR"
OWN = "__pycache__"  # of the package, beside what Python compiles
USING_NUMBA = ("", "encoding/cuda")  # folders of the package; Numba caches beside the modules
# Directories of the host, whatever the application: those of Spark are an application's own, and
# others would compile again. The first outlives a restart of the machine.
SHARED = (Path("/var/tmp"), Path("/tmp"))


def kernel_directory(environ: Mapping[str, str], package: Path = PACKAGE) -> Path:
    """What the user names, the package's own where it can be written to, or one per user and host.

    Made where it is not there; never one that others own or can write to.
    """
    if VARIABLE in environ:
        chosen = Path(environ[VARIABLE])
        chosen.mkdir(mode=0o755, parents=True, exist_ok=True)
        return chosen if _is_safe_named(chosen) else private_directory(SHARED)
    if os.access(package, os.W_OK):
        chosen = package / OWN
        with suppress(FileExistsError):  # what is there is looked at
            chosen.mkdir(mode=0o755)
        if is_safe_directory(chosen, owner=package.stat().st_uid):
            return chosen
    return private_directory(SHARED)


def use_writable_cache(environ: MutableMapping[str, str], package: Path = PACKAGE) -> None:
    """Name a directory for Numba where the package's own cannot be used, or the named one."""
    if VARIABLE in environ:
        named = Path(environ[VARIABLE])
        usable = not named.exists() or _is_safe_named(named)
    else:
        usable = os.access(package, os.W_OK) and all(
            is_safe_directory(own, owner=package.stat().st_uid)
            for own in (package / folder / OWN for folder in USING_NUMBA)
            if os.path.lexists(own)
        )
    if not usable:
        environ[VARIABLE] = str(private_directory(SHARED))


def is_safe_directory(path: Path, *, owner: int | None = None) -> bool:
    """Whether it is a directory that only this user, root and ``owner`` can write to."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and is_safe(status, owner)


def is_safe(status: os.stat_result, owner: int | None = None) -> bool:
    """Whether nobody but this user, root and ``owner`` can change what has this status."""
    return status.st_uid in (os.getuid(), 0, owner) and not status.st_mode & 0o022


def _is_safe_named(path: Path) -> bool:
    """Say why, where it is not. A link is followed where whoever made it is trusted."""
    if path.exists() and not path.is_dir():
        return True  # a file: whoever writes there fails, and says so
    is_trusted_link = path.is_symlink() and path.lstat().st_uid in (os.getuid(), 0)
    if is_safe_directory(path.resolve() if is_trusted_link else path):
        return True
    log.warning(
        "%s=%s is not used: what lies there is executed, and somebody else owns the directory or "
        "can write to it; name one of your own that only you can write to (chmod 700)",
        *(VARIABLE, path),
    )
    return False


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
