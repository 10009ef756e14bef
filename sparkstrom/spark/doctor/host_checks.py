"""Host checks: what a machine's facts mean for a fit. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass

from sparkstrom.spark.doctor.findings import Finding, Level, failure, good, warning
from sparkstrom.spark.doctor.host_facts import HostFacts
from sparkstrom.transport.aeron.sizes import (
    KIB,
    MIB,
    MTU_NETWORK,
    SOCKET_BUFFER_MAX,
    TERMS,
    WINDOW_MAX,
    needed_bytes,
)

UDP_HEADERS = 28  # bytes of IPv4 and UDP
SCRATCH_LOW_BYTES = 1 << 30
KERNELS_BYTES = 8 * MIB
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Expected:
    """What a fit expects of the machine that facts are of."""

    edges: int  # neighbours that the media driver has room for, on it and elsewhere
    drivers: int = 1  # media drivers on this host: one for each executor, and the driver's


def host_findings(where: str, facts: HostFacts, expected: Expected) -> list[Finding]:
    """All that one machine's facts say."""
    return [
        _library(where, facts),
        _media_driver(where, facts),
        _shared_memory(where, facts, expected),
        *_buffers(where, facts),
        *_mtu(where, facts),
        _kernels(where, facts),
        _scratch(where, facts),
        _gpu(where, facts),
    ]


def _library(where: str, facts: HostFacts) -> Finding:
    if facts.library_refused:
        *told, last = facts.library_refused.strip().splitlines()
        found = " ".join(" ".join(told).split()) or last
        remedy = last if told else "run `sparkstrom fetch-aeron` there"
        return failure("aeron library", where, found, remedy)
    return good("aeron library", where, facts.library)


def _media_driver(where: str, facts: HostFacts) -> Finding:
    drive = facts.drive
    if drive.refused:
        what, _, remedy = drive.refused.partition("; ")
        remedy = remedy or "see the finding on the Aeron library, and what the message names"
        return failure("media driver", where, what, remedy)
    listed = facts.interfaces.get(drive.endpoint.host if drive.endpoint else "", "lo")
    found = f"starts and hears itself at {drive.endpoint} ({listed})"
    return good("media driver", where, found)


def _shared_memory(where: str, facts: HostFacts, expected: Expected) -> Finding:
    check, memory = "shared memory", facts.shared_memory
    best, least = (needed_bytes(expected.edges, *terms) for terms in (TERMS[0], TERMS[-1]))
    wanted = best * expected.drivers
    found = f"{memory.path} has {_mib(memory.free_bytes)} free"
    drivers = f"{expected.drivers} media driver{'s' if expected.drivers > 1 else ''} here"
    remedy = (
        f"enlarge it: mount -o remount,size={-(-2 * wanted // MIB)}m {memory.path}"
        f" (docker: --shm-size={-(-2 * wanted // MIB)}m)"
    )
    if memory.free_bytes >= wanted and not memory.refused:
        return good(check, where, f"{found}, {drivers} want {_mib(wanted)}")
    found += f", {drivers} want {_mib(wanted)}"
    if memory.refused:
        found += f", and cannot be written ({memory.refused})"
    elif memory.free_bytes >= least * expected.drivers:
        return warning(check, where, f"{found}: shorter logs will do", remedy)
    if facts.scratch.free_bytes >= least * expected.drivers and not facts.scratch.refused:
        return warning(check, where, f"{found}: logs go to {facts.scratch.path}, a disk", remedy)
    return failure(check, where, f"{found}, and {facts.scratch.path} has no room either", remedy)


def _buffers(where: str, facts: HostFacts) -> list[Finding]:
    """The receive windows of all streams share one socket's buffer."""
    check, sizes = "socket buffers", facts.drive.sizes
    found, narrow = [], sizes is not None and sizes.window < WINDOW_MAX
    for name, limit in zip(("rmem_max", "wmem_max"), facts.buffers, strict=True):
        key, is_low = f"net.core.{name}", limit < SOCKET_BUFFER_MAX
        text = f"{key} is {limit:,}"
        if is_low and name == "rmem_max" and narrow and sizes is not None:
            text += f": {sizes.window // KIB} KiB under way to a neighbour, not {WINDOW_MAX // KIB}"
        remedy = f"sysctl -w {key}={SOCKET_BUFFER_MAX}" if is_low else ""
        found.append(Finding(check, Level.WARNING if is_low else Level.OK, where, text, remedy))
    return found


def _mtu(where: str, facts: HostFacts) -> list[Finding]:
    if facts.mtu is None:
        return []
    needed, found = MTU_NETWORK + UDP_HEADERS, f"interface has {facts.mtu}"
    if facts.mtu >= needed:
        return [good("mtu", where, f"{found}, Aeron's datagrams need {needed}")]
    return [
        warning(
            "mtu",
            where,
            f"{found}, Aeron's datagrams need {needed}: each is cut in two, and lost with either",
            f"ip link set dev {facts.interfaces[facts.drive.endpoint.host]} mtu 1500"
            if facts.drive.endpoint
            else "raise the interface's MTU to 1500",
        )
    ]


def _kernels(where: str, facts: HostFacts) -> Finding:
    check, kernels = "kernel cache", facts.kernels
    if kernels.refused:
        return warning(
            check,
            where,
            f"{kernels.path} cannot be written ({kernels.refused}): "
            "each Python worker compiles for itself, half a minute each time",
            "name a directory that may be written and lasts: "
            "--conf spark.executorEnv.NUMBA_CACHE_DIR=/tmp/sparkstrom-kernels",
        )
    if kernels.free_bytes < KERNELS_BYTES:
        return warning(
            check,
            where,
            f"{kernels.path} has {_mib(kernels.free_bytes)} free, kernels take 8 MiB",
            "free some, or name another directory: --conf spark.executorEnv.NUMBA_CACHE_DIR=...",
        )
    state = "compiled" if facts.compiled else "empty: the first fit compiles for half a minute"
    return good(check, where, f"{kernels.path} ({state})")


def _scratch(where: str, facts: HostFacts) -> Finding:
    check, scratch = "scratch", facts.scratch
    remedy = "name a directory with room in spark.local.dir (YARN: yarn.nodemanager.local-dirs)"
    if scratch.refused:
        found = f"{scratch.path} cannot be written ({scratch.refused})"
        return failure(check, where, found, remedy)
    found = f"{scratch.path} has {_mib(scratch.free_bytes)} free"
    if scratch.free_bytes < SCRATCH_LOW_BYTES:
        return warning(check, where, f"{found}: rows beyond batch_memory_bytes go there", remedy)
    return good(check, where, found)


def _gpu(where: str, facts: HostFacts) -> Finding:
    check, gpu = "gpu", facts.gpu
    if gpu.assigned is None and not gpu.visible:
        return good(check, where, "none: parameters are in host memory")
    spark = "none assigned" if gpu.assigned is None else f"number {gpu.assigned} assigned by Spark"
    if gpu.refused:
        what, _, remedy = gpu.refused.partition(". ")
        return warning(
            check, where, f"{spark}; {what}", remedy or "pip install numba-cuda, NVIDIA's driver"
        )
    found = f"{gpu.visible} on this host, {spark}; Numba can use it"
    if gpu.assigned is None and where != "driver":
        return warning(
            check,
            where,
            found,
            "let Spark share them out: --conf spark.executor.resource.gpu.amount=1 "
            "--conf spark.task.resource.gpu.amount=1, and a discovery script",
        )
    return good(check, where, found)


def _mib(size: int) -> str:
    return f"{size / MIB:,.0f} MiB" if size < 10 * GIB else f"{size / GIB:,.0f} GiB"
