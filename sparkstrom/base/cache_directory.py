"""Find a safe directory for compiled kernels, in the package or private to this user and host.

Cached files are machine code that is executed. So a directory or file that another user owns or
can write to is never used. Numba, which compiles the GPU kernels, reads ``NUMBA_CACHE_DIR`` when it
is imported, so packages whose modules import Numba call ``use_writable_cache`` first.
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
OWN = "__pycache__"  # the package's cache directory, also used by Python
USING_NUMBA = ("", "encoding/cuda")  # folders whose __pycache__ Numba may use
# Directories shared by all applications of the host. Spark's directories belong to one application,
# so each application would compile again. The first one survives a reboot.
SHARED = (Path("/var/tmp"), Path("/tmp"))


def kernel_directory(environ: Mapping[str, str], package: Path = PACKAGE) -> Path:
    """Return the directory for compiled kernels, and create it if necessary.

    If ``environ`` contains ``NUMBA_CACHE_DIR``, this is the directory that it names, otherwise the
    package's own. If that directory is not writable, or if another user owns it or can write to it,
    this is a directory that is private to this user and host.
    """
    if VARIABLE in environ:
        chosen = Path(environ[VARIABLE])
        chosen.mkdir(mode=0o755, parents=True, exist_ok=True)
        return chosen if _is_safe_named(chosen) else private_directory(SHARED)
    if os.access(package, os.W_OK):
        chosen = package / OWN
        with suppress(FileExistsError):  # an existing directory is checked below
            chosen.mkdir(mode=0o755)
        if is_safe_directory(chosen, owner=package.stat().st_uid):
            return chosen
    return private_directory(SHARED)


def use_writable_cache(environ: MutableMapping[str, str], package: Path = PACKAGE) -> None:
    """Set ``NUMBA_CACHE_DIR`` to a private directory if Numba's default is unwritable or unsafe.

    The default is ``__pycache__`` folders below ``package``. If ``environ`` contains the variable
    already, it is replaced only if the directory that it names is unsafe.
    """
    if VARIABLE in environ:
        named = Path(environ[VARIABLE])
        usable = _is_safe_named(named) if named.exists() else _has_safe_parents(named)
    else:
        usable = os.access(package, os.W_OK) and all(
            is_safe_directory(own, owner=package.stat().st_uid)
            for own in (package / folder / OWN for folder in USING_NUMBA)
            if os.path.lexists(own)
        )
    if not usable:
        environ[VARIABLE] = str(private_directory(SHARED))


def is_safe_directory(path: Path, *, owner: int | None = None) -> bool:
    """Return whether only this user, root and ``owner`` can write to this directory.

    ``owner`` is a user id, or None. Returns False for anything that is not a directory.
    """
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and is_safe(status, owner)


def is_safe(status: os.stat_result, owner: int | None = None) -> bool:
    """Return whether ``status`` lets only this user, root and user id ``owner`` write to a file."""
    return status.st_uid in (os.getuid(), 0, owner) and not status.st_mode & 0o022


def _is_safe_named(path: Path) -> bool:
    """Return whether the directory named by ``NUMBA_CACHE_DIR`` is safe; log a warning if not.

    A symbolic link is followed only if this user or root made it.
    """
    if path.exists() and not path.is_dir():
        return True  # a file: writing there fails with an error of its own
    is_trusted_link = path.is_symlink() and path.lstat().st_uid in (os.getuid(), 0)
    directory = path.resolve() if is_trusted_link else path
    if is_safe_directory(directory) and _has_safe_parents(directory):
        return True
    log.warning(
        "%s=%s is not used: what lies there is executed, and somebody else owns the directory or "
        "one above it, or can write to it; name one that only you can write to (chmod 700)",
        *(VARIABLE, path),
    )
    return False


def _has_safe_parents(path: Path) -> bool:
    """Return whether no other user can replace this path by replacing a directory above it."""
    ours = (os.getuid(), 0)
    return all(
        is_safe(status) or (status.st_uid in ours and bool(status.st_mode & stat.S_ISVTX))
        for status in (parent.stat() for parent in path.resolve().parents if parent.exists())
    )


def private_directory(roots: tuple[Path, ...]) -> Path:
    """Return this user's private kernel directory under the first usable root.

    Falls back to a new temporary directory if no root can be used.
    """
    name = f"sparkstrom-kernels-{os.getuid()}"
    for root in roots:
        if root.is_dir() and os.access(root, os.W_OK | os.X_OK) and _create_private(root / name):
            return root / name
    return Path(tempfile.mkdtemp(prefix=f"{name}-"))


def _create_private(wanted: Path) -> bool:
    """Create the directory if needed; return whether this user alone owns and can access it."""
    try:
        wanted.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError:  # a file or a broken link
        return False
    found = wanted.lstat()
    ours = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    return ours and not found.st_mode & 0o077
