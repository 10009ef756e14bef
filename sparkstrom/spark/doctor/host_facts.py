"""Collect facts about the machine on which the driver program or a Python worker runs.

The driver program interprets the facts with ``checks``. Executors are examined with jobs in Spark's
barrier mode: these run as many tasks as there are slots, all at the same time, so that each
executor has at least one. On each executor, the task with the lowest partition number does the
work.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from sparkstrom.base.cache_directory import SHARED, VARIABLE, kernel_directory
from sparkstrom.base.errors import SetupError, SparkstromError
from sparkstrom.base.identity import Endpoint
from sparkstrom.encoding.backends import need_device
from sparkstrom.options.network import VoidConfiguration
from sparkstrom.planning.memory import count_executor_edges
from sparkstrom.spark.executor.entry_points import get_task_context
from sparkstrom.transport.aeron.channel_settings import (
    BufferSizes,
    choose_mtu,
    read_socket_buffer_limits,
)
from sparkstrom.transport.aeron.driver_directories import find_executor_process
from sparkstrom.transport.aeron.library import load_library
from sparkstrom.transport.aeron.media_driver import SHARED_MEMORY, DriverOptions, ensure_driver
from sparkstrom.transport.bind_address import list_interface_addresses
from sparkstrom.transport.udp_probe import PeerResult, ProbeGroup, UdpProbe
from sparkstrom.worker.network_setup import choose_executor_address
from sparkstrom.worker.task_environment import TaskEnvironment

JAVA_TIMEOUT_S = 10.0
GPU_DEVICES = "/dev/nvidia[0-9]*"


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """The space in the file system that contains a directory."""

    path: str  # the directory
    free_bytes: int  # space available to this user
    error: str = ""  # why the directory is not writable, or ""


@dataclass(frozen=True, slots=True)
class MediaDriverStart:
    """The result of starting Aeron's media driver, the process that handles network traffic."""

    endpoint: Endpoint | None = None  # address and port that it bound; None if it did not start
    sizes: BufferSizes | None = None  # sizes of its buffers; None if it did not start
    directory: str = ""  # directory of its log buffers
    error: str = ""  # why it did not start, or ""


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """The GPUs of a machine, on which a worker can keep its copy of the parameters."""

    assigned: int | None  # index of the GPU that Spark assigned to the task; None: none
    visible: int  # number of GPUs, counted as device files
    error: str = ""  # why Numba cannot use the GPU; "" if it can, or if there is no GPU


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Everything one process observes about its machine."""

    host: str  # name of the machine
    process: str  # "PID-STARTTIME" of the executor's JVM, or of the driver program
    java: str  # version of Java, or ""
    library: str  # path and version of the Aeron library, or ""
    library_error: str  # why the library cannot be loaded, or ""
    shared_memory: DiskSpace  # where the media driver's log buffers are
    scratch: DiskSpace  # where workers put temporary files
    kernels: DiskSpace  # where compiled kernels are cached
    has_compiled_kernels: bool  # whether the kernel cache contains kernels
    buffers: tuple[int, int]  # limits of a socket's receive and send buffer, in bytes
    interfaces: dict[str, str]  # names of network interfaces, by address
    mtu: int | None  # MTU of the media driver's interface in bytes; None if unknown
    media_driver: MediaDriverStart  # the result of starting a media driver
    gpu: GpuFacts  # the machine's GPUs


@dataclass(frozen=True, slots=True)
class InspectionOptions:
    """What to inspect on a machine, and how to start the media driver as a fit would."""

    address: Callable[[], str]  # returns the address to bind, or raises SetupError
    ports: range | None  # ports that may be bound; None: any
    edges: int  # number of neighbours on other media drivers, in the tree of workers
    local_edges: int  # number of pairs of neighbours that both use this media driver
    scratch: Path  # directory for temporary files
    gpu: int | None = None  # index of the GPU that Spark assigned to the task; None: none
    shared_memory: Path = SHARED_MEMORY  # directory for the media driver's log buffers, in memory


def inspect_host(options: InspectionOptions) -> HostFacts:
    """Inspect this machine and return the facts, which include any problems.

    This takes seconds, because a media driver is started and stopped.
    """
    executor = find_executor_process()
    path, has_kernels = find_kernel_cache()
    library, library_refused = _inspect_library()
    media_driver = (
        MediaDriverStart(error=library_refused) if library_refused else _start_media_driver(options)
    )
    return HostFacts(
        host=socket.gethostname(),
        process=f"{executor.pid}-{executor.start_time}",
        java=read_process_java_version(executor.pid),
        library=library,
        library_error=library_refused,
        shared_memory=measure_space(options.shared_memory),
        scratch=measure_space(options.scratch),
        kernels=measure_space(path),
        has_compiled_kernels=has_kernels,
        buffers=read_socket_buffer_limits(),
        interfaces={listed.address: listed.interface for listed in list_interface_addresses()},
        mtu=_read_mtu(media_driver.endpoint),
        media_driver=media_driver,
        gpu=_inspect_gpu(options.gpu),
    )


def _inspect_library() -> tuple[str, str]:
    """Return (path and version, error) of the Aeron library; one of them is ""."""
    try:
        library = load_library()
    except SetupError as error:
        return "", str(error)
    return f"{library.path} ({library.version})", ""


def _start_media_driver(options: InspectionOptions) -> MediaDriverStart:
    """Start a media driver as a fit would, stop it again, and return the result."""
    try:
        driver_options = DriverOptions(
            host=options.address(),
            ports=(options.ports[0], options.ports[-1]) if options.ports is not None else None,
            edges=options.edges,
            local_edges=options.local_edges,
            scratch=options.scratch,
            shared_memory=options.shared_memory,
            linger_s=0.0,
        )
        handle = ensure_driver(f"doctor-{secrets.token_hex(8)}", driver_options)
    except SparkstromError as error:
        return MediaDriverStart(error=str(error))
    started = MediaDriverStart(handle.endpoint, handle.sizes, str(handle.directory.parent.parent))
    handle.close()
    return started


def measure_space(path: Path) -> DiskSpace:
    """Return the space in a directory's file system, and whether the directory is writable.

    The directory is created if necessary. If that fails, its nearest existing parent is measured.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
        error = ""
    except OSError as raised:
        error = raised.strerror or str(raised)
    existing = next(place for place in (path, *path.parents) if place.exists())
    return DiskSpace(str(path), shutil.disk_usage(existing).free, error)


def find_kernel_cache() -> tuple[Path, bool]:
    """Return this process's directory for compiled kernels, and whether it contains kernels.

    If no directory can be created, return the one that NUMBA_CACHE_DIR names, or else the first one
    for temporary files, which cannot be written either.
    """
    try:
        path = kernel_directory(os.environ)
    except OSError:  # reported as a directory that cannot be written
        path = Path(os.environ.get(VARIABLE) or SHARED[0])
    return path, path.is_dir() and next(path.glob("*.kernels"), None) is not None


def read_process_java_version(pid: int) -> str:
    """Return the Java version of the process ``pid``, or "" if that is not a Java process."""
    try:
        program = os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return ""
    return read_java_version(program) if Path(program).name == "java" else ""


def read_java_version(program: str) -> str:
    """Return the Java version that ``program -version`` prints, or "" if it prints none."""
    command = [program, "-version"]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=JAVA_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    match = re.search(r'version "([^"]+)"', result.stderr + result.stdout)
    return match[1] if match else ""


def _read_mtu(endpoint: Endpoint | None) -> int | None:
    """Return the MTU of the interface with the endpoint's address, or None if unknown."""
    for listed in list_interface_addresses():
        if endpoint is not None and listed.address == endpoint.host:
            file = Path("/sys/class/net") / listed.interface / "mtu"
            return int(file.read_text()) if file.exists() else None
    return None


def _inspect_gpu(assigned: int | None) -> GpuFacts:
    """Return facts about the machine's GPUs; ``assigned`` is the index that Spark assigned."""
    visible = len(list(Path("/").glob(GPU_DEVICES.lstrip("/"))))
    if assigned is None and not visible:
        return GpuFacts(None, 0)
    try:
        need_device(assigned or 0)
    except SetupError as error:
        return GpuFacts(assigned, visible, str(error))
    return GpuFacts(assigned, visible)


# (position of the receiver in the group, what it received by sender, why its probe failed, or "")
ProbeResult = tuple[int, dict[int, PeerResult], str]


@dataclass(frozen=True, slots=True)
class InspectionTask:
    """The input of the tasks that inspect executors' hosts."""

    void: VoidConfiguration  # network options, such as ports
    workers: int  # number of workers that a fit would have
    controller: Endpoint  # the driver's address; the port is not used


@dataclass(frozen=True, slots=True)
class ProbeTask:
    """The input of the tasks that probe UDP."""

    group: ProbeGroup  # all processes that take part
    places: Mapping[str, int]  # each executor's position in the group, by ``identify_process``


def identify_process(facts: HostFacts) -> str:
    """Return a string that identifies an executor: its host and process."""
    return f"{facts.host}/{facts.process}"


def inspect_executor(task: InspectionTask, items: Iterable[Any]) -> Iterator[HostFacts]:
    """Yield facts about this host in its executor's first task, nothing in other tasks.

    ``items`` are not used.
    """
    place = get_task_context()
    if _is_leader(place):
        edges, local_edges = count_executor_edges(task.void.topology(task.workers))
        yield inspect_host(
            InspectionOptions(
                lambda: choose_executor_address(task.void, task.controller),
                task.void.executor_ports(),
                edges,
                local_edges,
                place.scratch,
                place.gpu,
            )
        )


def probe_from_executor(task: ProbeTask, items: Iterable[Any]) -> Iterator[ProbeResult]:
    """Yield what this executor received from other processes, or why its probe failed.

    Only the executor's first task probes; others wait at the barriers. ``items`` are not used.
    """
    place = get_task_context()
    position = task.places.get(f"{place.host}/{place.jvm}")
    if not _is_leader(place) or position is None:
        _wait_at_barrier()
        return
    try:
        own = task.group.endpoints[position]
        with UdpProbe(task.group, position, partial(choose_mtu, own=own)) as probe:
            _wait_at_barrier()  # until all have bound their ports
            yield position, probe.run(), ""
    except SetupError as error:
        _wait_at_barrier()
        yield position, {}, str(error)


def _is_leader(place: TaskEnvironment) -> bool:
    """Wait until all tasks have called this; return whether this task is its executor's first."""
    from pyspark import BarrierTaskContext

    key = f"{place.host}/{place.jvm}"
    keys = BarrierTaskContext.get().allGather(key)
    return keys.index(key) == place.partition


def _wait_at_barrier() -> None:
    """Wait until all tasks of the barrier stage have called this."""
    from pyspark import BarrierTaskContext

    BarrierTaskContext.get().barrier()


class WorkerVersions(NamedTuple):
    """The versions that one Python worker uses."""

    host: str  # name of the machine
    python: str  # version of Python
    program: str  # path of the Python interpreter
    sparkstrom: str  # version of sparkstrom; "" if it cannot be imported
    error: str  # why sparkstrom cannot be imported, or ""


def collect_versions(items: Iterable[int] = ()) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield one tuple with the fields of this process's WorkerVersions, in their order.

    ``items``, the content of the partition, is ignored. This function is pickled by value and uses
    nothing else from this module, because executors may have no sparkstrom, or another version.
    """
    import platform
    import socket
    import sys

    version, error = "", ""
    try:
        from sparkstrom.base.version import __version__ as version
        from sparkstrom.transport.aeron import library  # noqa: F401  # with what it needs
    except Exception as raised:  # a broken installation may raise anything
        error = f"{type(raised).__name__}: {raised}"
    yield socket.gethostname(), platform.python_version(), sys.executable, version, error
