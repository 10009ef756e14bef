"""Turn facts about hosts, Spark and UDP into findings for `sparkstrom doctor`, and format them.

`sparkstrom doctor` checks whether training would work on a cluster. A finding is the result of one
check: OK, a warning or a failure. A media driver is Aeron's process, which sends and receives UDP
for an executor or for the driver program.

All functions are pure; ``host_facts`` and ``examination`` collect the facts. ``where`` is the name
of the process to which a finding applies. A report can be formatted as text or JSON.
"""

from __future__ import annotations

import enum
import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from sparkstrom.base.errors import UsageError
from sparkstrom.options.network import AUTO, parse_controller
from sparkstrom.spark.doctor.host_facts import HostFacts, WorkerVersions
from sparkstrom.spark.executor_slots import (
    KEY_UNENCRYPTED_WARNING,
    check_scheduling,
    is_key_encrypted,
)
from sparkstrom.transport.aeron.channel_settings import (
    KIB,
    MIB,
    MTU_NETWORK,
    SOCKET_BUFFER_BYTES_MAX,
    TERM_LENGTHS,
    WINDOW_BYTES_MAX,
    required_log_bytes,
)
from sparkstrom.transport.udp_probe import PeerResult

DRIVER = "driver"  # name of the driver program among the processes


class Level(enum.StrEnum):
    """The severity of a finding: what it means for training on this cluster."""

    OK = "ok"  # training works in this respect
    WARNING = "warning"  # training works, but slower or less safely than possible
    FAILURE = "failure"  # training would fail


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check in one process."""

    check: str  # short name of the check, such as "java"
    level: Level  # severity
    where: str  # "driver", or an executor's name
    found: str  # what was observed
    remedy: str = ""  # what to do; "" if the level is OK


@dataclass(frozen=True, slots=True)
class UdpLink:
    """UDP traffic from one process to another, as the receiver observed it."""

    heard: bool  # whether short datagrams arrive
    whole: bool  # whether datagrams of Aeron's length arrive unfragmented
    pieces: bool  # whether datagrams of that length arrive if routers may fragment them
    round_trip_ms: float | None = None  # round-trip time, measured by the sender; None: unknown
    bytes_s: float | None = None  # rate in bytes per second; None: unknown


UdpMatrix = dict[str, dict[str, UdpLink]]  # by sender, then by receiver


@dataclass(slots=True)
class Report:
    """All findings of one run of `sparkstrom doctor`."""

    findings: list[Finding] = field(default_factory=list)  # in the order of the checks
    matrix: UdpMatrix = field(default_factory=dict)  # UDP between all processes

    @property
    def ok(self) -> bool:
        """Whether no check failed, so that training would work as far as the checks show."""
        return all(finding.level is not Level.FAILURE for finding in self.findings)

    def add(self, findings: Sequence[Finding]) -> bool:
        """Add findings; return whether none of them is a failure."""
        self.findings += findings
        return all(finding.level is not Level.FAILURE for finding in findings)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dictionary that can be serialized as JSON."""
        matrix = {
            sender: {receiver: asdict(way) for receiver, way in row.items()}
            for sender, row in self.matrix.items()
        }
        return {"ok": self.ok, "findings": [asdict(f) for f in self.findings], "matrix": matrix}


def create_ok(check: str, where: str, found: str) -> Finding:
    """Return a finding of level OK, which needs no remedy; for the arguments, see ``Finding``."""
    return Finding(check, Level.OK, where, found)


def create_warning(check: str, where: str, found: str, remedy: str) -> Finding:
    """Return a finding of level WARNING: training works, but slower or less safely."""
    return Finding(check, Level.WARNING, where, found, remedy)


def create_failure(check: str, where: str, found: str, remedy: str) -> Finding:
    """Return a finding of level FAILURE: training would fail."""
    return Finding(check, Level.FAILURE, where, found, remedy)


TABLE_WIDTH = 100  # all widths are in characters
LEVEL_TEXTS = {Level.OK: "ok", Level.WARNING: "warning", Level.FAILURE: "FAILURE"}
WHERE_WIDTH, CHECK_WIDTH = 22, 15
CELL_WIDTH = 12
ROW_NAME_WIDTH = 16
PROCESSES_MAX = 6  # number of processes in the printed matrix; JSON contains all


def format_report(report: Report) -> str:
    """Return the report as text: findings, UDP between each two processes, and a verdict."""
    failures = sum(f.level is Level.FAILURE for f in report.findings)
    warnings = sum(f.level is Level.WARNING for f in report.findings)
    parts = [_format_table(report.findings)]
    if report.matrix:
        parts.append(_format_matrix(report.matrix))
    verdict = "training would fail here" if failures else "training would work here"
    parts.append(
        f"{verdict}: {_format_count(failures, 'failure')}, {_format_count(warnings, 'warning')}"
    )
    return "\n\n".join(parts)


def _format_count(number: int, noun: str) -> str:
    """Return a number with its noun in singular or plural."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _format_table(findings: Sequence[Finding]) -> str:
    """Return the table of findings as text; equal findings of several processes share an entry."""
    places_by_finding: dict[tuple[str, Level, str, str], list[str]] = {}
    checks = list(dict.fromkeys(each.check for each in findings))
    for each in sorted(findings, key=lambda each: checks.index(each.check)):
        key = each.check, each.level, each.found, each.remedy
        places_by_finding.setdefault(key, []).append(each.where)
    lines = [_format_row("check", "", "where", "found"), "-" * TABLE_WIDTH]
    for (check, level, found, remedy), places in places_by_finding.items():
        lines += _format_entry(
            check, LEVEL_TEXTS[level], ", ".join(dict.fromkeys(places)), found, remedy
        )
    return "\n".join(lines)


def _format_entry(check: str, level: str, places: str, found: str, remedy: str) -> list[str]:
    """Return a finding and its remedy as wrapped lines; ``places`` names the processes."""
    width = TABLE_WIDTH - CHECK_WIDTH - 9 - WHERE_WIDTH - 2
    text_lines = textwrap.wrap(found, width, break_on_hyphens=False) or [""]
    if remedy:
        text_lines += textwrap.wrap(
            f"-> {remedy}", width, break_on_hyphens=False, subsequent_indent="   "
        )
    place_lines = textwrap.wrap(places, WHERE_WIDTH, break_on_hyphens=False)
    lines = []
    for i in range(max(len(text_lines), len(place_lines))):
        is_first = i == 0
        lines.append(
            _format_row(
                check if is_first else "",
                level if is_first else "",
                place_lines[i] if i < len(place_lines) else "",
                text_lines[i] if i < len(text_lines) else "",
            )
        )
    return lines


def _format_row(check: str, level: str, where: str, found: str) -> str:
    """Return one line of the findings table."""
    return f"{check:<{CHECK_WIDTH}} {level:<8} {where:<{WHERE_WIDTH}} {found}".rstrip()


def _format_matrix(matrix: UdpMatrix) -> str:
    """Return the UDP matrix of the first processes as text: rows send, columns receive."""
    names = list(matrix)[:PROCESSES_MAX]
    hidden = len(matrix) - len(names)
    title = "UDP, from the row to the column: MB/s and ms there and back"
    if hidden:
        title += f" (the first {PROCESSES_MAX} of {len(matrix)}; --json has all)"
    corner = "from \\ to"
    lines = [
        title,
        f"{corner:<{ROW_NAME_WIDTH}} " + " ".join(f"{_shorten(n):>{CELL_WIDTH}}" for n in names),
    ]
    for sender in names:
        cells = [_format_cell(matrix[sender].get(receiver)) for receiver in names]
        lines.append(f"{_shorten(sender, ROW_NAME_WIDTH):<{ROW_NAME_WIDTH}} " + " ".join(cells))
    return "\n".join(line.rstrip() for line in lines)


def _shorten(name: str, width: int = CELL_WIDTH) -> str:
    """Return ``name``; if it is longer than ``width``, return "~" and its end.

    The ends of names differ more than their beginnings.
    """
    return name if len(name) <= width else "~" + name[1 - width :]


def _format_cell(link: UdpLink | None) -> str:
    """Return a link's cell of the matrix: MB/s and ms, "NOTHING", or blanks if ``link`` is None."""
    if link is None:
        return f"{'':>{CELL_WIDTH}}"
    if not link.heard:
        return f"{'NOTHING':>{CELL_WIDTH}}"
    values = (None if link.bytes_s is None else link.bytes_s / 1e6, 3), (link.round_trip_ms, 2)
    rate, trip = (
        "-" if value is None else f"{value:.0f}" if value >= 99.5 else f"{value:.{digits}g}"
        for value, digits in values
    )
    return f"{f'{rate}  {trip}':>{CELL_WIDTH}}"


UDP_HEADERS = 28  # bytes of the IPv4 and UDP headers
SCRATCH_LOW_BYTES = 1 << 30  # less free space for temporary files causes a warning
KERNELS_BYTES = 8 * MIB  # approximate size of all compiled kernels
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class HostExpectations:
    """What a fit requires of a host."""

    edges: int  # neighbours in the tree of workers for which a media driver needs log buffers
    drivers: int = 1  # media drivers on this host, of executors and of the driver program


def check_host(where: str, facts: HostFacts, expected: HostExpectations) -> list[Finding]:
    """Return all findings about one process's host; ``where`` is the name of the process."""
    return [
        _check_library(where, facts),
        _check_media_driver(where, facts),
        _check_shared_memory(where, facts, expected),
        *_check_buffers(where, facts),
        *_check_mtu(where, facts),
        _check_kernel_cache(where, facts),
        _check_scratch(where, facts),
        _check_gpu(where, facts),
    ]


def _check_library(where: str, facts: HostFacts) -> Finding:
    """Check whether the Aeron library can be loaded; return the finding."""
    if facts.library_error:
        *first_lines, last = facts.library_error.strip().splitlines()
        description = " ".join(" ".join(first_lines).split()) or last
        remedy = last if first_lines else "run `sparkstrom fetch-aeron` there"
        return create_failure("aeron library", where, description, remedy)
    return create_ok("aeron library", where, facts.library)


def _check_media_driver(where: str, facts: HostFacts) -> Finding:
    """Check whether Aeron's media driver started and receives datagrams; return the finding."""
    start = facts.media_driver
    if start.error:
        problem, _, remedy = start.error.partition("; ")

        return create_failure("media driver", where, problem, remedy)
    listed = facts.interfaces.get(start.endpoint.host if start.endpoint else "", "lo")
    found = f"starts and receives its own datagrams at {start.endpoint} ({listed})"
    return create_ok("media driver", where, found)


def _check_shared_memory(where: str, facts: HostFacts, expected: HostExpectations) -> Finding:
    """Check whether shared memory has room for the media drivers' log buffers; return the finding.

    Too little room is only a warning if shorter logs fit, or if the logs fit on the scratch disk.
    """
    check, memory = "shared memory", facts.shared_memory
    best_bytes, least_bytes = (
        required_log_bytes(expected.edges, *terms) for terms in (TERM_LENGTHS[0], TERM_LENGTHS[-1])
    )
    wanted_bytes = best_bytes * expected.drivers
    found = f"{memory.path} has {_format_size(memory.free_bytes)} free"
    drivers = f"{expected.drivers} media driver{'s' if expected.drivers > 1 else ''} here"
    remedy = (
        f"enlarge it: mount -o remount,size={-(-2 * wanted_bytes // MIB)}m {memory.path}"
        f" (docker: --shm-size={-(-2 * wanted_bytes // MIB)}m)"
    )
    if memory.free_bytes >= wanted_bytes and not memory.error:
        return create_ok(check, where, f"{found}, {drivers} want {_format_size(wanted_bytes)}")
    found += f", {drivers} want {_format_size(wanted_bytes)}"
    if memory.error:
        found += f", and cannot be written ({memory.error})"
    elif memory.free_bytes >= least_bytes * expected.drivers:
        return create_warning(check, where, f"{found}: shorter logs will do", remedy)
    if facts.scratch.free_bytes >= least_bytes * expected.drivers and not facts.scratch.error:
        return create_warning(
            check, where, f"{found}: logs go to {facts.scratch.path}, a disk", remedy
        )
    return create_failure(
        check, where, f"{found}, and {facts.scratch.path} has no room either", remedy
    )


def _check_buffers(where: str, facts: HostFacts) -> list[Finding]:
    """Return findings about the kernel's limits of socket buffers, which bound data in flight."""
    check, sizes = "socket buffers", facts.media_driver.sizes
    found, is_narrow = [], sizes is not None and sizes.window < WINDOW_BYTES_MAX
    for name, limit in zip(("rmem_max", "wmem_max"), facts.buffers, strict=True):
        key, is_low = f"net.core.{name}", limit < SOCKET_BUFFER_BYTES_MAX
        text = f"{key} is {limit:,}"
        if is_low and name == "rmem_max" and is_narrow and sizes is not None:
            window, best = sizes.window // KIB, WINDOW_BYTES_MAX // KIB
            text += f": {window} KiB in flight to a neighbour, not {best}"
        remedy = f"sysctl -w {key}={SOCKET_BUFFER_BYTES_MAX}" if is_low else ""
        found.append(Finding(check, Level.WARNING if is_low else Level.OK, where, text, remedy))
    return found


def _check_mtu(where: str, facts: HostFacts) -> list[Finding]:
    """Check whether Aeron's datagrams fit into the MTU; return [finding], or [] if unknown."""
    if facts.mtu is None:
        return []
    needed, found = MTU_NETWORK + UDP_HEADERS, f"interface has {facts.mtu}"
    if facts.mtu >= needed:
        return [create_ok("mtu", where, f"{found}, Aeron's datagrams need {needed}")]
    return [
        create_warning(
            "mtu",
            where,
            f"{found}, Aeron's datagrams need {needed}: each is split, and lost if a part is",
            f"ip link set dev {facts.interfaces[facts.media_driver.endpoint.host]} mtu 1500"
            if facts.media_driver.endpoint
            else "raise the interface's MTU to 1500",
        )
    ]


def _check_kernel_cache(where: str, facts: HostFacts) -> Finding:
    """Return a finding about the directory in which compiled kernels are cached."""
    check, kernels = "kernel cache", facts.kernels
    if kernels.error:
        return create_warning(
            check,
            where,
            f"{kernels.path} cannot be written ({kernels.error}): "
            "each Python worker compiles its own kernels, half a minute each time",
            "name a directory that can be written and persists: "
            "--conf spark.executorEnv.NUMBA_CACHE_DIR=/tmp/sparkstrom-kernels",
        )
    if kernels.free_bytes < KERNELS_BYTES:
        return create_warning(
            check,
            where,
            f"{kernels.path} has {_format_size(kernels.free_bytes)} free, kernels take 8 MiB",
            "free some, or name another directory: --conf spark.executorEnv.NUMBA_CACHE_DIR=...",
        )
    state = (
        "compiled"
        if facts.has_compiled_kernels
        else "empty: the first fit compiles for half a minute"
    )
    return create_ok(check, where, f"{kernels.path} ({state})")


def _check_scratch(where: str, facts: HostFacts) -> Finding:
    """Return a finding about the space for temporary files, such as rows that exceed memory."""
    check, scratch = "scratch", facts.scratch
    remedy = "name a directory with room in spark.local.dir (YARN: yarn.nodemanager.local-dirs)"
    if scratch.error:
        found = f"{scratch.path} cannot be written ({scratch.error})"
        return create_failure(check, where, found, remedy)
    found = f"{scratch.path} has {_format_size(scratch.free_bytes)} free"
    if scratch.free_bytes < SCRATCH_LOW_BYTES:
        return create_warning(
            check, where, f"{found}: rows beyond batch_memory_bytes go there", remedy
        )
    return create_ok(check, where, found)


def _check_gpu(where: str, facts: HostFacts) -> Finding:
    """Check whether the host's GPUs can be used, and are assigned by Spark; return the finding."""
    check, gpu = "gpu", facts.gpu
    if gpu.assigned is None and not gpu.visible:
        return create_ok(check, where, "none: parameters are in host memory")
    assignment = (
        "none assigned" if gpu.assigned is None else f"number {gpu.assigned} assigned by Spark"
    )
    if gpu.error:
        problem, _, remedy = gpu.error.partition(". ")
        return create_warning(
            check,
            where,
            f"{assignment}; {problem}",
            remedy or "pip install numba-cuda, NVIDIA's driver",
        )
    found = f"{gpu.visible} on this host, {assignment}; Numba can use it"
    if gpu.assigned is None and where != "driver":
        return create_warning(
            check,
            where,
            found,
            "let Spark assign them: --conf spark.executor.resource.gpu.amount=1 "
            "--conf spark.task.resource.gpu.amount=1, and a discovery script",
        )
    return create_ok(check, where, found)


def _format_size(size: int) -> str:
    """Return ``size``, a number of bytes, as text in MiB, or in GiB from 10 GiB."""
    return f"{size / MIB:,.0f} MiB" if size < 10 * GIB else f"{size / GIB:,.0f} GiB"


SPARK_FIRST, SPARK_LAST = (3, 5), (4,)
JAVA_MIN = 17
PYTHON_MISMATCH = "PYTHON_VERSION_MISMATCH"
NO_MODULE = "ModuleNotFoundError"


def check_java(where: str, version: str) -> Finding:
    """Check whether a JVM's Java ``version`` is 17 or later; return the finding."""
    number = re.match(r"(?:1\.)?(\d+)", version)
    if number is None:
        return create_warning(
            "java", where, "its version cannot be read", "make sure that it is 17 or later"
        )
    if int(number[1]) < JAVA_MIN:
        remedy = f"install Java {JAVA_MIN} or later and point JAVA_HOME to it (executors: --conf "
        remedy += "spark.executorEnv.JAVA_HOME=...); Spark 4 does not start without"
        return create_warning("java", where, version, remedy)
    return create_ok("java", where, version)


def check_spark(version: str) -> Finding:
    """Check whether sparkstrom supports this version of Spark; return the finding."""
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    if numbers >= SPARK_FIRST and numbers[:1] <= SPARK_LAST:
        return create_ok("spark", "driver", version)
    remedy = "use Spark 3.5 to 4.x: sparkstrom is not tested with others"
    create_finding = create_failure if numbers < SPARK_FIRST else create_warning
    return create_finding("spark", "driver", version, remedy)


def check_configuration(conf: Mapping[str, str]) -> list[Finding]:
    """Check Spark's configuration as ``fit`` does; return the findings.

    Unless the configuration makes a fit impossible, one finding states whether Spark encrypts the
    fit's secret key when sending it to executors.
    """
    try:
        warnings = check_scheduling(conf)
    except UsageError as error:
        problem, _, remedy = str(error).rpartition(": ")
        return [create_failure("configuration", "driver", problem, remedy)]
    found = []
    for text in warnings:
        problem, _, remedy = text.rpartition("; ") if "; " in text else text.rpartition(": ")
        found.append(create_warning("configuration", "driver", problem, remedy))
    if is_key_encrypted(conf):
        found.append(create_ok("encryption", "driver", "the key of a fit is sent encrypted"))
    else:
        problem, _, remedy = KEY_UNENCRYPTED_WARNING.partition("; ")
        found.append(create_warning("encryption", "driver", problem, remedy))
    return found


def check_executors(wanted: int, registered: int, seconds: float) -> Finding:
    """Check whether ``wanted`` executors have registered with Spark; return the finding.

    ``registered`` is the number of executors that registered within ``seconds``.
    """
    check, found = "executors", f"{registered} of {wanted} registered within {seconds:.0f} s"
    if registered >= wanted > 0:
        return create_ok(check, "driver", f"{registered} registered")
    remedy = (
        "check in the resource manager whether it has room and the application is running, "
        "and in its logs whether executors die; request fewer or smaller ones"
    )
    return (create_warning if registered else create_failure)(check, "driver", found, remedy)


def check_versions(
    driver: WorkerVersions, python_workers: Sequence[WorkerVersions]
) -> list[Finding]:
    """Compare each Python worker's Python and sparkstrom with the driver's; return the findings.

    Equal Python workers of one host share their findings.
    """
    found = [
        create_ok("python", "driver", f"{driver.python} ({driver.program})"),
        create_ok("sparkstrom", "driver", driver.sparkstrom),
    ]
    for worker, count in sorted(Counter(python_workers).items()):
        host = worker.host + (f" ({count} workers)" if count > 1 else "")
        python = f"{worker.python} ({worker.program})"
        if worker.python.split(".")[:2] != driver.python.split(".")[:2]:
            remedy = f"use Python {driver.python} there: --conf spark.pyspark.python=..., or conda"
            found.append(create_failure("python", host, python, remedy))
        elif worker.python != driver.python:
            remedy = "use one build everywhere; pickles of one may not load in another"
            found.append(
                create_warning("python", host, f"{python}, the driver {driver.python}", remedy)
            )
        else:
            found.append(create_ok("python", host, python))
        found.append(_check_sparkstrom(host, worker, driver.sparkstrom))
    return found


def _check_sparkstrom(host: str, worker: WorkerVersions, version: str) -> Finding:
    """Check whether a Python worker has the driver's version of sparkstrom; return the finding.

    ``host`` describes the worker, and ``version`` is the driver's version.
    """
    remedy = (
        f"install sparkstrom=={version} there, or send the environment (--archives, --py-files)"
    )
    if worker.error:
        return create_failure("sparkstrom", host, worker.error, remedy)
    if worker.sparkstrom != version:
        return create_failure(
            "sparkstrom", host, f"{worker.sparkstrom}, the driver has {version}", remedy
        )
    return create_ok("sparkstrom", host, worker.sparkstrom)


def explain_job_failure(cause: str, python: str) -> Finding:
    """Return a failure that explains why one of the doctor's Spark jobs failed.

    ``cause`` is Spark's message, and ``python`` the driver's Python version.
    """
    if PYTHON_MISMATCH in cause:
        remedy = f"use Python {python} on executors: --conf spark.pyspark.python=..., or conda"
        return create_failure("python", "executors", cause, remedy)
    if NO_MODULE in cause:
        remedy = "install it on executors, or send it: --py-files, --archives"
        return create_failure("python", "executors", cause, remedy)
    return create_failure(
        "executors", "executors", cause, "see the executors' logs: stderr in Spark's UI"
    )


UDP_CHECK = "udp"
RATE_LOW_BYTES_S = 1.25e6  # 10 Mbit/s
ROUND_TRIP_HIGH_MS = 50.0
LISTED_MAX = 6  # maximum number of names or links in a message


def build_matrix(names: Sequence[str], heard: Mapping[int, Mapping[int, PeerResult]]) -> UdpMatrix:
    """Return the UDP links between processes, by the processes' names.

    ``heard`` contains what each process received, by receiver and then by sender, as indices of
    ``names``.
    """
    matrix: UdpMatrix = {name: {} for name in names}
    for receiver, peers in heard.items():
        for sender, received in peers.items():
            reverse = heard.get(sender, {}).get(receiver)
            round_trip_s = reverse.round_trip_s if reverse is not None else None
            matrix[names[sender]][names[receiver]] = UdpLink(
                received.receives_pings,
                received.receives_unfragmented,
                received.receives_fragmentable,
                None if round_trip_s is None else round(1000 * round_trip_s, 3),
                None if received.bytes_s is None else round(received.bytes_s),
            )
    return matrix


@dataclass(frozen=True, slots=True)
class UdpNeeds:
    """Between which processes a fit sends datagrams."""

    driver: bool = True  # between the driver program, which has the controller, and executors
    executors: bool = True  # between all executors

    def includes(self, sender: str, receiver: str) -> bool:
        """Return whether a fit sends datagrams between these two processes."""
        return self.driver if DRIVER in (sender, receiver) else self.executors


def find_udp_needs(matrix: UdpMatrix, controller: str, *, is_mesh: bool) -> UdpNeeds:
    """Return between which processes a fit would send datagrams.

    All workers exchange messages with the controller. With ``controller="auto"``, it runs on an
    executor if no executor gets an answer from the driver program. Executors send datagrams to each
    other if it does, and in a mesh.
    """
    is_in_task = parse_controller(controller).is_in_task
    if controller == AUTO:
        answers = [
            link.heard and matrix[name][DRIVER].heard
            for name, link in matrix.get(DRIVER, {}).items()
            if DRIVER in matrix[name]
        ]
        is_in_task = not any(answers)
    return UdpNeeds(driver=not is_in_task, executors=is_in_task or is_mesh)


NEEDLESS = {  # remedies for links that a fit does not use, by whether the driver is at an end
    True: "none is needed: the controller runs on an executor, where it takes a task slot",
    False: "needed only with a controller on an executor, or mesh_build_mode='mesh'",
}


def check_udp(
    matrix: UdpMatrix, ports: Mapping[str, int], needs: UdpNeeds | None = None
) -> list[Finding]:
    """Return findings about the UDP links.

    Args:
        matrix: The links.
        ports: Each process's UDP port, by its name.
        needs: Between which processes a fit sends datagrams; None: between all. Other links cause
            warnings, not failures.
    """
    needs = needs or UdpNeeds()
    links = {(a, b): link for a, row in matrix.items() for b, link in row.items()}
    silent = [ends for ends, link in links.items() if not link.heard]
    findings = []
    for receiver in sorted({b for _, b in silent}):
        senders = [a for a, b in silent if b == receiver]
        needed = [sender for sender in senders if needs.includes(sender, receiver)]
        if needed:
            found = f"receives nothing at port {ports[receiver]} from {_list_names(needed)}"
            remedy = (
                f"open UDP to port {ports[receiver]} of {receiver}, and between all hosts in both "
                "directions; fix the ports with unicast_port and port_range, the network with "
                "network_mask; if only the driver is unreachable, use controller='executor'"
            )
            findings.append(create_failure(UDP_CHECK, receiver, found, remedy))
        if others := [sender for sender in senders if sender not in needed]:
            found = f"receives nothing at port {ports[receiver]} from {_list_names(others)}"
            remedy = NEEDLESS[DRIVER in (receiver, *others)]
            findings.append(create_warning(UDP_CHECK, receiver, found, remedy))
    findings += _check_path_mtu(links, needs)
    findings += _check_speed(links)
    if not silent and links:
        findings.append(create_ok(UDP_CHECK, "all", f"all {len(links)} links carry datagrams"))
    return findings


def _check_path_mtu(links: Mapping[tuple[str, str], UdpLink], needs: UdpNeeds) -> list[Finding]:
    """Return findings about links that lose or fragment long datagrams.

    A lost datagram is a failure if a fit sends such datagrams there.
    """
    working = {way: found for way, found in links.items() if found.heard}
    lost = [way for way, found in working.items() if not found.pieces]
    cut = [way for way, found in working.items() if found.pieces and not found.whole]
    findings = []
    remedy = (
        f"raise the path's MTU to 1500, or at least {MTU_NETWORK + 28} (VPNs and overlays fragment)"
    )
    for is_needed, create_finding in ((True, create_failure), (False, create_warning)):
        if ways := [way for way in lost if needs.includes(*way) is is_needed]:
            listed = _list_links(ways)
            found = f"short datagrams arrive, those of {MTU_NETWORK} bytes do not: {listed}"
            findings.append(create_finding("path mtu", ways[0][1], found, remedy))
    if cut:
        found = f"datagrams of {MTU_NETWORK} bytes are fragmented on their way: {_list_links(cut)}"
        findings.append(create_warning("path mtu", cut[0][1], found, remedy))
    return findings


def _check_speed(links: Mapping[tuple[str, str], UdpLink]) -> list[Finding]:
    """Return findings about links with a low rate or a long round-trip time."""
    slow = {w: f.bytes_s for w, f in links.items() if f.bytes_s and f.bytes_s < RATE_LOW_BYTES_S}
    far = {
        w: f.round_trip_ms for w, f in links.items() if (f.round_trip_ms or 0) > ROUND_TRIP_HIGH_MS
    }
    findings = []
    if slow:
        found = f"below {RATE_LOW_BYTES_S / 1e6:.2f} MB/s: {_list_links(list(slow))}"
        remedy = "training works, but workers wait for the slowest link (docs/scaling.md)"
        findings.append(create_warning("rate", "all", found, remedy))
    if far:
        found = f"round trips above {ROUND_TRIP_HIGH_MS:.0f} ms: {_list_links(list(far))}"
        remedy = "keep executors in one zone, or check whether hosts are overloaded"
        findings.append(create_warning("round trip", "all", found, remedy))
    return findings


def _list_names(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are, as text."""
    more = f" and {len(names) - LISTED_MAX} more" if len(names) > LISTED_MAX else ""
    return ", ".join(names[:LISTED_MAX]) + more


def _list_links(links: Sequence[tuple[str, str]]) -> str:
    """Return the links as text for a message."""
    return _list_names([f"{a} to {b}" for a, b in links])
