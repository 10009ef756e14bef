"""`fetch-aeron`: the shared library out of the pinned wheel, checked by its hash, put in place.

CPython 3.11 cannot install that wheel, but its library loads there just as well. Replacing is
atomic: a process that starts meanwhile sees the old file or the new one.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from sparkstrom.base.errors import SetupError
from sparkstrom.transport.aeron import pinned
from sparkstrom.transport.aeron.checked import Aeron
from sparkstrom.transport.aeron.library import fetched_path

DOWNLOAD_DEADLINE_S = 120


def fetch(wheel: Path | None = None, target: Path | None = None) -> Path:
    """Put the pinned library at ``target`` (default: where ``load_library`` looks); return it.

    ``wheel`` is a file that was downloaded by other means. Raise SetupError where the wheel cannot
    be had, is not the pinned one, or does not load.
    """
    target = target or fetched_path()
    with tempfile.TemporaryDirectory(prefix="sparkstrom-fetch-") as scratch:
        source = wheel or _download(Path(scratch))
        library = _extract(source)
    _place(library, target)
    return target


def _download(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--dest", str(scratch)]
    command += ["--only-binary=:all:", "--python-version", pinned.WHEEL_PYTHON]
    command += ["--platform", pinned.PLATFORM, f"{pinned.PROJECT}=={pinned.VERSION}"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise SetupError(
            f"downloading {pinned.WHEEL} took over {DOWNLOAD_DEADLINE_S} s: {_BY_HAND}"
        ) from error
    if done.returncode != 0:
        raise SetupError(f"downloading {pinned.WHEEL} failed:\n{done.stderr.strip()}\n{_BY_HAND}")
    return scratch / pinned.WHEEL


_BY_HAND = f"fetch that file elsewhere and run `sparkstrom fetch-aeron --wheel {pinned.WHEEL}`"


def _extract(wheel: Path) -> bytes:
    try:
        content = wheel.read_bytes()
    except OSError as error:
        raise SetupError(f"{wheel} cannot be read ({error.strerror}): {_BY_HAND}") from error
    found = hashlib.sha256(content).hexdigest()
    if found != pinned.WHEEL_SHA256:
        raise SetupError(
            f"{wheel} has sha256 {found}, not {pinned.WHEEL_SHA256}: it is not {pinned.WHEEL}, "
            "which sparkstrom is tested with; delete it and fetch again"
        )
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(pinned.EXTENSION)


def _place(library: bytes, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=".fetch-", suffix=".so", dir=target.parent)
    draft = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(library)
        draft.chmod(0o755)
        Aeron(name)  # a library that does not load is not put in place
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)
