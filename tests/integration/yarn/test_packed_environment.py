"""Tests of scripts/pack-environment: a fit in YARN's cluster mode uses only the archive.

``SPARKSTROM_PACKED`` may name an existing archive, because making one takes minutes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tarfile
from pathlib import Path

import pytest

JOB = Path(__file__).with_name("packed_job.py")
ROOT = JOB.parents[3]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_200)]


@pytest.fixture(scope="session")
def archive(tmp_path_factory) -> Path:
    if made := os.environ.get("SPARKSTROM_PACKED"):
        return Path(made)
    target = tmp_path_factory.mktemp("packed") / "environment.tar.gz"
    command = [ROOT / "scripts/pack-environment", "-o", target, "-e", "images", "threadpoolctl"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    return target


def test_a_fit_runs_in_cluster_mode_from_the_archive_alone(cluster, archive, udp_range) -> None:
    packed = "./environment/bin/python"
    conf = {
        "spark.yarn.dist.archives": f"{archive}#environment",  # the same as option --archives
        "spark.yarn.appMasterEnv.PYSPARK_PYTHON": packed,
        "spark.executorEnv.PYSPARK_PYTHON": packed,
        "spark.yarn.appMasterEnv.PYTHONPATH": "",  # not this checkout
        "spark.executorEnv.PYTHONPATH": "",
        "spark.executor.instances": "1",  # of two cores: a node unpacks for a minute
    }
    with udp_range.watched():
        done = cluster.submit(JOB, conf=conf | udp_range.conf())
    assert done.exit_code == 0, done.output + done.container_logs
    [line] = [each for each in done.container_logs.splitlines() if each.startswith('{"driver"')]
    said = json.loads(line)
    for process in [said["driver"], *said["executors"]]:
        assert process["prefix"].endswith("/environment"), process
        assert Path(process["sparkstrom"]).is_relative_to(process["prefix"])
        assert process["named library"] == ""
    hashes = re.findall(r"^hash \S+ +([0-9a-f]{16})$", done.container_logs, re.MULTILINE)
    assert len(hashes) == 3  # two workers and the driver
    assert len(set(hashes)) == 1
    assert len(udp_range.seen) >= 2  # the driver's and the executor's


def test_archive_has_library_packages_kernels_and_no_scripts(
    archive,
) -> None:
    """The archive has Aeron, packages and compiled kernels; its folder bin has only links."""
    with tarfile.open(archive) as opened:
        members = list(opened)
    names = [member.name.removeprefix("./") for member in members]
    assert any("_pyaeron" in name and name.endswith(".so") for name in names)
    assert any(name.endswith("site-packages/threadpoolctl.py") for name in names)
    in_bin = [m for m in members if re.fullmatch(r"(\./)?bin/[^/]+", m.name)]
    assert in_bin
    assert all(member.issym() for member in in_bin)
    assert not any(name.split("/")[-2:-1] == ["pip"] for name in names)
    kernels = {Path(name).name.rpartition("-")[0] for name in names if name.endswith(".kernels")}
    assert kernels >= {
        "sparkstrom.encoding.update_sum",
        "sparkstrom.transport.aeron.receive_kernels",
    }
