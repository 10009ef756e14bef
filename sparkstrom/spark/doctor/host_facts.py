"""Host facts: what one process, the driver program or a Python worker, sees of its machine.

Only looks and tries; what it means is ``host_checks``' to say, on the driver.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sparkstrom.base.errors import SetupError, SparkstromError
from sparkstrom.base.identity import Endpoint
from sparkstrom.base.kernel_cache import VARIABLE, kernel_directory
from sparkstrom.encoding.backends import need_device
from sparkstrom.transport.addresses import listed_addresses
from sparkstrom.transport.aeron.driver import SHARED_MEMORY, DriverOptions, ensure_driver
from sparkstrom.transport.aeron.library import load_library
from sparkstrom.transport.aeron.processes import find_executor
from sparkstrom.transport.aeron.sizes import Sizes, socket_limits

JAVA_S = 10.0
DEVICES = "/dev/nvidia[0-9]*"


@dataclass(frozen=True, slots=True)
class Space:
    """A file system's."""

    path: str
    total_bytes: int
    free_bytes: int
    refused: str = ""  # why nothing can be written there


@dataclass(frozen=True, slots=True)
class Drive:
    """How the media driver's start went."""

    endpoint: Endpoint | None = None
    sizes: Sizes | None = None
    directory: str = ""  # where its logs were
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Gpu:
    """What there is for parameters on a GPU."""

    assigned: int | None  # by Spark
    visible: int  # device files
    refused: str = ""  # why Numba cannot use it; "" where it can, or where there is none


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What one process sees."""

    host: str
    process: str  # "pid-start" of the executor's JVM, or of the driver program
    java: str
    library: str  # path and version
    library_refused: str
    shared_memory: Space
    scratch: Space
    kernels: Space
    compiled: bool  # is there anything in the cache
    buffers: tuple[int, int]  # largest receive and send buffer
    interfaces: dict[str, str]  # addresses, and whose they are
    mtu: int | None  # of the interface of the endpoint
    drive: Drive
    gpu: Gpu


@dataclass(frozen=True, slots=True)
class Looking:
    """What a process looks at; a media driver is started as for a fit."""

    address: Callable[[], str]  # that it would bind; raises SetupError
    ports: range | None
    edges: int
    local_edges: int
    scratch: Path
    gpu: int | None = None
    shared_memory: Path = SHARED_MEMORY


def look(looking: Looking) -> HostFacts:
    """Look at this machine; within seconds, and never raising for what is wrong with it."""
    watched = find_executor()
    path, compiled = kernel_cache(looking.scratch)
    library, library_refused = _library()
    drive = Drive(refused=library_refused) if library_refused else _drive(looking)
    return HostFacts(
        host=socket.gethostname(),
        process=f"{watched.pid}-{watched.start_time}",
        java=java_of(watched.pid),
        library=library,
        library_refused=library_refused,
        shared_memory=space(looking.shared_memory),
        scratch=space(looking.scratch),
        kernels=space(path),
        compiled=compiled,
        buffers=socket_limits(),
        interfaces={has.address: has.interface for has in listed_addresses()},
        mtu=_mtu(drive.endpoint),
        drive=drive,
        gpu=_gpu(looking.gpu),
    )


def _library() -> tuple[str, str]:
    try:
        library = load_library()
    except SetupError as error:
        return "", str(error)
    return f"{library.path} ({library.version})", ""


def _drive(looking: Looking) -> Drive:
    """Start a media driver as a fit would, which makes it hear itself; and let it go at once."""
    try:
        options = DriverOptions(
            host=looking.address(),
            ports=(looking.ports[0], looking.ports[-1]) if looking.ports is not None else None,
            edges=looking.edges,
            local_edges=looking.local_edges,
            scratch=looking.scratch,
            shared_memory=looking.shared_memory,
            linger_s=0.0,
        )
        handle = ensure_driver(f"doctor-{secrets.token_hex(8)}", options)
    except SparkstromError as error:
        return Drive(refused=str(error))
    with_it = Drive(handle.endpoint, handle.sizes, str(handle.directory.parent.parent))
    handle.close()
    return with_it


def space(path: Path) -> Space:
    """Measure a directory, and try to write there. One that is not there is measured above."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
        refused = ""
    except OSError as error:
        refused = error.strerror or str(error)
    existing = next(place for place in (path, *path.parents) if place.exists())
    usage = shutil.disk_usage(existing)
    return Space(str(path), usage.total, usage.free, refused)


def kernel_cache(scratch: Path) -> tuple[Path, bool]:
    """Where this process keeps compiled kernels, and whether some lie there."""
    try:
        path = kernel_directory(os.environ)
    except OSError:  # what cannot be made there is told as what cannot be written
        path = Path(os.environ.get(VARIABLE) or scratch)
    return path, path.is_dir() and next(path.glob("*.kernels"), None) is not None


def java_of(pid: int) -> str:
    """The version of the Java that runs this process; "" where it is none, or does not say."""
    try:
        program = os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return ""
    return java_version(program) if Path(program).name == "java" else ""


def java_version(program: str) -> str:
    """What `java -version` says it is; "" where it cannot be run."""
    command = [program, "-version"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=JAVA_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r'version "([^"]+)"', said.stderr + said.stdout)
    return found[1] if found else ""


def _mtu(endpoint: Endpoint | None) -> int | None:
    """Of the interface that has the endpoint's address."""
    for has in listed_addresses():
        if endpoint is not None and has.address == endpoint.host:
            file = Path("/sys/class/net") / has.interface / "mtu"
            return int(file.read_text()) if file.exists() else None
    return None


def _gpu(assigned: int | None) -> Gpu:
    visible = len(list(Path("/").glob(DEVICES.lstrip("/"))))
    if assigned is None and not visible:
        return Gpu(None, 0)
    try:
        need_device(assigned or 0)
    except SetupError as error:
        return Gpu(assigned, visible, str(error))
    return Gpu(assigned, visible)
