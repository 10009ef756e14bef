"""Tests of the doctor's checks: findings from good facts, and from bad ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparkstrom.base.errors import SetupError
from sparkstrom.base.identity import Endpoint
from sparkstrom.spark.doctor.checks import (
    TABLE_WIDTH,
    Finding,
    HostExpectations,
    Level,
    Report,
    UdpLink,
    UdpNeeds,
    build_matrix,
    check_configuration,
    check_executors,
    check_host,
    check_java,
    check_spark,
    check_udp,
    check_versions,
    create_failure,
    explain_job_failure,
    find_udp_needs,
    format_report,
)
from sparkstrom.spark.doctor.examination import excuse_driver
from sparkstrom.spark.doctor.host_facts import (
    DiskSpace,
    GpuFacts,
    HostFacts,
    InspectionOptions,
    MediaDriverStart,
    WorkerVersions,
    collect_versions,
    inspect_host,
    measure_space,
    read_java_version,
)
from sparkstrom.transport.aeron.channel_settings import MIB, TERM_LENGTHS, choose_buffer_sizes
from sparkstrom.transport.udp_probe import PeerResult

OK, WARNING, FAILURE = Level.OK, Level.WARNING, Level.FAILURE
LARGE = 4 << 20
ROOM = DiskSpace("/there", 50 << 30)
SIZES = choose_buffer_sizes(8, TERM_LENGTHS[0], (LARGE, LARGE))
SMALL = choose_buffer_sizes(8, TERM_LENGTHS[0], (212_992, 212_992))
FACTS = HostFacts(
    host="host7",
    process="1-1",
    java="17.0.1",
    library="/lib/aeron.so (1.48)",
    library_error="",
    shared_memory=replace(ROOM, path="/dev/shm"),
    scratch=replace(ROOM, path="/scratch"),
    kernels=ROOM,
    has_compiled_kernels=True,
    buffers=(LARGE, LARGE),
    interfaces={"10.0.0.7": "eth0"},
    mtu=1500,
    media_driver=MediaDriverStart(Endpoint("10.0.0.7", 40123), SIZES, "/dev/shm"),
    gpu=GpuFacts(None, 0),
)
EXPECTED = HostExpectations(edges=8)


def list_findings(
    check: str, facts: HostFacts, expected: HostExpectations = EXPECTED
) -> list[Finding]:
    """Return the findings of one check of host7."""
    return [each for each in check_host("host7", facts, expected) if each.check == check]


def test_healthy_host_has_no_warnings_or_remedies() -> None:
    assert {each.level for each in check_host("host7", FACTS, EXPECTED)} == {OK}
    assert {each.remedy for each in check_host("host7", FACTS, EXPECTED)} == {""}


@pytest.mark.parametrize(
    ("check", "changed", "level", "words"),
    [
        (
            "aeron library",
            {"library_error": "no Aeron library; looked at\n  1. there\nRun fetch-aeron."},
            FAILURE,
            ["looked at 1. there", "Run fetch-aeron."],
        ),
        (
            "media driver",
            {
                "media_driver": MediaDriverStart(
                    error="network mask 10.1.0.0/16 matches nothing; widen the mask"
                )
            },
            FAILURE,
            ["matches nothing", "widen the mask"],
        ),
        (
            "shared memory",
            {"shared_memory": DiskSpace("/dev/shm", 64 * MIB)},
            WARNING,
            ["64 MiB free", "want 67 MiB", "shorter logs", "size=135m", "--shm-size=135m"],
        ),
        (
            "shared memory",
            {"shared_memory": DiskSpace("/dev/shm", MIB)},
            WARNING,
            ["logs go to /scratch"],
        ),
        (
            "shared memory",
            {
                "shared_memory": DiskSpace("/dev/shm", MIB),
                "scratch": DiskSpace("/s", MIB),
            },
            FAILURE,
            ["/s has no room either"],
        ),
        (
            "shared memory",
            {"shared_memory": replace(ROOM, error="Read-only file system")},
            WARNING,
            ["cannot be written (Read-only file system)"],
        ),
        (
            "mtu",
            {"mtu": 1400},
            WARNING,
            ["has 1400", "need 1436", "ip link set dev eth0 mtu 1500"],
        ),
        (
            "kernel cache",
            {"kernels": replace(ROOM, error="Permission denied")},
            WARNING,
            ["/there cannot be written", "NUMBA_CACHE_DIR="],
        ),
        ("kernel cache", {"kernels": DiskSpace("/k", MIB)}, WARNING, ["kernels take 8 MiB"]),
        ("kernel cache", {"has_compiled_kernels": False}, OK, ["the first fit compiles"]),
        (
            "scratch",
            {"scratch": replace(ROOM, error="Permission denied")},
            FAILURE,
            ["Permission denied", "spark.local.dir"],
        ),
        ("scratch", {"scratch": DiskSpace("/s", MIB)}, WARNING, ["1 MiB free"]),
        (
            "gpu",
            {"gpu": GpuFacts(0, 1, "backend='cuda': no compiler. Install the CUDA toolkit")},
            WARNING,
            ["number 0 assigned", "no compiler", "Install the CUDA toolkit"],
        ),
        (
            "gpu",
            {"gpu": GpuFacts(None, 2)},
            WARNING,
            ["2 on this host", "task.resource.gpu.amount=1"],
        ),
        ("gpu", {"gpu": GpuFacts(1, 2)}, OK, ["number 1 assigned", "Numba can use it"]),
    ],
)
def test_bad_host_fact_leads_to_finding_with_remedy(
    check: str, changed: dict[str, Any], level: Level, words: list[str]
) -> None:
    """A bad fact of a host leads to a finding of this level with these words and a remedy."""
    (found,) = list_findings(check, replace(FACTS, **changed))
    assert found.level is level
    for word in words:
        assert word in f"{found.found} {found.remedy}"
    assert bool(found.remedy) == (level is not OK)


def test_second_media_driver_doubles_needed_shared_memory() -> None:
    """Two media drivers of a host need twice as much shared memory."""
    facts = replace(FACTS, shared_memory=DiskSpace("/dev/shm", 100 * MIB))
    assert list_findings("shared memory", facts)[0].level is OK
    assert list_findings("shared memory", facts, HostExpectations(8, drivers=2))[0].level is WARNING


def test_small_socket_buffers_recommend_sysctl_command() -> None:
    """If socket buffers are too small, the remedy is the sysctl command."""
    facts = replace(
        FACTS, buffers=(212_992, 212_992), media_driver=replace(FACTS.media_driver, sizes=SMALL)
    )
    receive, send = list_findings("socket buffers", facts)
    assert receive.level is send.level is WARNING
    assert receive.remedy == "sysctl -w net.core.rmem_max=4194304"
    assert send.remedy == "sysctl -w net.core.wmem_max=4194304"
    assert "16 KiB in flight to a neighbour, not 256" in receive.found


def test_inspect_host_works_without_matching_network_mask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The facts of this machine are read, although no address matches the network mask."""

    def refuse() -> str:
        raise SetupError("network mask 203.0.113.0/24 matches no address; widen it")

    monkeypatch.setenv("SPARKSTROM_AERON_LIBRARY", "")
    facts = inspect_host(
        InspectionOptions(refuse, None, 8, 0, tmp_path, shared_memory=tmp_path / "none" / "shm")
    )
    assert facts.media_driver.error.startswith("network mask 203.0.113.0/24")
    assert facts.shared_memory.free_bytes > 0
    assert not facts.scratch.error
    assert facts.library
    assert facts.interfaces["127.0.0.1"] == "lo"


def test_measure_space_gives_reason_for_unwritable_directory(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert measure_space(file / "below").error == "Not a directory"
    assert measure_space(tmp_path).error == ""


def test_java_version_is_read_from_java_command(tmp_path: Path) -> None:
    """Java's version is read from the output of the java command."""
    java = tmp_path / "java"
    java.write_text("#!/bin/sh\necho 'openjdk version \"21.0.2\" 2024-01-16' >&2\n")
    java.chmod(0o755)
    assert read_java_version(str(java)) == "21.0.2"
    assert read_java_version("/nowhere/java") == ""


@pytest.mark.parametrize(
    ("version", "level"), [("17.0.15", OK), ("21", OK), ("11.0.2", WARNING), ("1.8.0_402", WARNING)]
)
def test_java_version_determines_level(version: str, level: Level) -> None:
    assert check_java("driver", version).level is level


@pytest.mark.parametrize(
    ("version", "level"),
    [("3.5.1", OK), ("4.0.5", OK), ("4.2.0", OK), ("3.4.4", FAILURE), ("5.0.0", WARNING)],
)
def test_spark_version_determines_level(version: str, level: Level) -> None:
    assert check_spark(version).level is level


@pytest.mark.parametrize(
    ("wanted", "registered", "level"), [(2, 2, OK), (3, 2, WARNING), (2, 0, FAILURE)]
)
def test_executor_count_determines_level(wanted: int, registered: int, level: Level) -> None:
    assert check_executors(wanted, registered, 60).level is level


def test_dangerous_settings_are_findings_with_remedies() -> None:
    """Settings that prevent or endanger fits lead to findings with the setting to change."""
    (speculation,) = check_configuration({"spark.speculation": "true"})
    assert (speculation.level, speculation.check) == (FAILURE, "configuration")
    assert speculation.remedy == "set --conf spark.speculation=false"
    unsaid, few, key = check_configuration({"spark.dynamicAllocation.enabled": "true"})
    assert unsaid.level is few.level is key.level is WARNING
    assert "set --conf spark.dynamicAllocation.initialExecutors=N" in unsaid.remedy
    assert few.remedy == "set --conf spark.stage.maxConsecutiveAttempts=100"
    assert "spark.network.crypto.enabled=true" in key.remedy
    (sealed,) = check_configuration({"spark.master": "local[2]"})
    assert (sealed.level, sealed.check) == (OK, "encryption")


HERE = WorkerVersions("driver", "3.11.7", "/usr/bin/python", "0.1.0", "")


@pytest.mark.parametrize(
    ("changed", "check", "level", "words"),
    [
        ({}, "python", OK, "3.11.7"),
        ({"python": "3.11.9"}, "python", WARNING, "one build everywhere"),
        ({"python": "3.12.1"}, "python", FAILURE, "use Python 3.11.7 there"),
        ({"sparkstrom": "0.2.0"}, "sparkstrom", FAILURE, "install sparkstrom==0.1.0"),
        ({"error": "ModuleNotFoundError: numba"}, "sparkstrom", FAILURE, "numba"),
    ],
)
def test_version_differences_of_workers_are_findings(
    changed: dict[str, str], check: str, level: Level, words: str
) -> None:
    """Differences of Python or sparkstrom between driver and workers are findings."""
    found = check_versions(HERE, [HERE._replace(host="h", **changed)] * 2)
    (there,) = [each for each in found if each.check == check and each.where != "driver"]
    assert there.level is level
    assert there.where == "h (2 workers)"
    assert words in f"{there.found} {there.remedy}"


def test_collect_versions_reads_installed_version() -> None:
    (here,) = collect_versions()
    assert WorkerVersions(*here).sparkstrom == "0.1.0"
    assert WorkerVersions(*here).error == ""


@pytest.mark.parametrize(
    ("cause", "check", "words"),
    [
        ("[PYTHON_VERSION_MISMATCH] 3.12 than 3.11", "python", "use Python 3.11.7 on executors"),
        ("ModuleNotFoundError: No module named 'x'", "python", "--py-files"),
        ("java.lang.OutOfMemoryError", "executors", "stderr in Spark's UI"),
    ],
)
def test_failed_job_remedy_suits_cause(cause: str, check: str, words: str) -> None:
    """The finding about a failed job has a remedy that suits the cause."""
    found = explain_job_failure(cause, "3.11.7")
    assert (found.level, found.check) == (FAILURE, check)
    assert words in found.remedy


# -- the matrix of UDP links -----------------------------------------------------------------------

GOOD = PeerResult(True, True, True, 0.0005, 100e6, True)
NAMES = ["driver", "host1", "host2"]
PORTS = {"driver": 1, "host1": 2, "host2": 3}


def make_peer_results(**changed: PeerResult) -> dict[int, dict[int, PeerResult]]:
    """Return good results between all three; ``_0_1`` is what 1 measured of 0's datagrams."""
    told = {a: {b: replace(GOOD) for b in range(3) if b != a} for a in range(3)}
    for key, one in changed.items():
        _, sender, receiver = key.split("_")
        told[int(receiver)][int(sender)] = one
    return told


def test_udp_matrix_has_entry_for_each_direction() -> None:
    """Each direction between two hosts has its own entry in the matrix."""
    slow = replace(GOOD, round_trip_s=0.002, bytes_s=5e6)  # host1's result for the driver
    matrix = build_matrix(NAMES, make_peer_results(_0_1=slow))
    assert matrix["driver"]["host1"] == UdpLink(True, True, True, 0.5, 5_000_000)
    assert matrix["host1"]["driver"].round_trip_ms == 2.0
    assert [each.level for each in check_udp(matrix, PORTS)] == [OK]


def test_matrix_shows_large_numbers_without_exponents() -> None:
    """Before, the matrix had 1.23e+03 MB/s and 1.2e+02 ms."""
    matrix = build_matrix(
        NAMES, make_peer_results(_0_1=replace(GOOD, bytes_s=1.234e9, round_trip_s=0.1234))
    )
    text = format_report(Report([], matrix))
    assert {"1234", "123"} <= set(text.split())


@pytest.mark.parametrize(
    ("told", "level", "words"),
    [
        (PeerResult(), FAILURE, "host1: receives nothing at port 2 from driver"),
        (
            replace(GOOD, receives_unfragmented=False, receives_fragmentable=False),
            FAILURE,
            "host1: short datagrams arrive",
        ),
        (
            replace(GOOD, receives_unfragmented=False),
            WARNING,
            "host1: datagrams of 1408 bytes are fragmented",
        ),
        (replace(GOOD, bytes_s=1e5), WARNING, "all: below 1.25 MB/s: driver to host1"),
    ],
)
def test_bad_udp_link_is_finding_with_remedy(told: PeerResult, level: Level, words: str) -> None:
    """A bad link leads to a finding that names its hosts, and a remedy."""
    found = check_udp(build_matrix(NAMES, make_peer_results(_0_1=told)), PORTS)
    (bad,) = [each for each in found if each.level is not OK]
    assert bad.level is level
    assert f"{bad.where}: {bad.found}".startswith(words)
    assert bad.remedy


DRIVER_SILENT = {"_0_1": PeerResult(), "_0_2": PeerResult()}  # its datagrams arrive nowhere


@pytest.mark.parametrize(
    ("controller", "is_mesh", "changed", "driver", "executors"),
    [
        ("auto", False, {}, True, False),
        ("auto", True, {}, True, True),
        ("auto", False, {"_0_1": PeerResult()}, True, False),  # host2 gets answers
        ("auto", False, DRIVER_SILENT, False, True),
        ("driver", False, DRIVER_SILENT, True, False),
        ("executor", False, {}, False, True),
        ("host1:40123", False, {}, False, True),
    ],
)
def test_udp_needs_follow_controller_and_mesh(
    controller: str, is_mesh: bool, changed: dict[str, PeerResult], driver: bool, executors: bool
) -> None:
    """All workers exchange datagrams with the controller; executors with each other in a mesh."""
    matrix = build_matrix(NAMES, make_peer_results(**changed))
    assert find_udp_needs(matrix, controller, is_mesh=is_mesh) == UdpNeeds(driver, executors)


@pytest.mark.parametrize(
    ("changed", "needs"),
    [
        (DRIVER_SILENT, UdpNeeds(driver=False)),
        ({"_1_2": PeerResult()}, UdpNeeds(executors=False)),
        ({"_2_1": replace(GOOD, receives_fragmentable=False)}, UdpNeeds(executors=False)),
    ],
)
def test_bad_link_that_fit_does_not_need_is_warning(
    changed: dict[str, PeerResult], needs: UdpNeeds
) -> None:
    """Before, the doctor said that training would fail, although the controller moves."""
    matrix = build_matrix(NAMES, make_peer_results(**changed))
    found = check_udp(matrix, PORTS, needs)
    assert {each.level for each in found if each.level is not OK} == {WARNING}
    assert FAILURE in {each.level for each in check_udp(matrix, PORTS)}


def test_missing_aeron_on_driver_without_controller_is_warning() -> None:
    """What only a controller needs is a warning on the driver if the controller is elsewhere."""
    library = create_failure("aeron library", "driver", "none", "fetch it")
    assert excuse_driver(library).level is WARNING
    scratch = create_failure("scratch", "driver", "full", "free some")
    assert excuse_driver(scratch) is scratch


def test_long_round_trip_is_warning() -> None:
    """A long round trip is a warning."""
    found = check_udp(
        build_matrix(NAMES, make_peer_results(_1_0=replace(GOOD, round_trip_s=0.2))), PORTS
    )
    assert [each.check for each in found if each.level is WARNING] == ["round trip"]


def test_report_fits_table_width_and_merges_equal_findings() -> None:
    """The report fits into the table's width, and lists equal findings of several hosts once."""
    findings = check_host("driver", FACTS, EXPECTED)
    findings += check_host("host1.a-long-name.example.com", FACTS, EXPECTED)
    findings += check_udp(build_matrix(NAMES, make_peer_results(_0_1=PeerResult())), PORTS)
    text = format_report(
        Report(findings, build_matrix(NAMES, make_peer_results(_0_1=PeerResult())))
    )
    assert max(map(len, text.splitlines())) <= TABLE_WIDTH
    assert "NOTHING" in text
    assert "100  0.5" in text
    assert text.splitlines()[-1] == "training would fail here: 1 failure, 0 warnings"
    assert text.count("/lib/aeron.so") == 1  # equal on two hosts


def test_json_report_has_findings_and_matrix() -> None:
    """The report as JSON has findings and the matrix."""
    report = Report(check_host("driver", FACTS, EXPECTED), build_matrix(NAMES, make_peer_results()))
    document = json.loads(json.dumps(report.to_dict()))
    assert document["ok"] is True
    assert document["matrix"]["driver"]["host1"]["bytes_s"] == 100_000_000
    first = document["findings"][0]
    assert set(first) == {"check", "level", "where", "found", "remedy"}
