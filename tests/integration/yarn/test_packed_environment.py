"""scripts/pack-environment: digits in YARN's cluster mode, with nothing but the archive.

``SPARKSTROM_PACKED`` names an archive that is made already; making one takes minutes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tarfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_200)]


@pytest.fixture(scope="session")
def archive(tmp_path_factory) -> Path:
    if made := os.environ.get("SPARKSTROM_PACKED"):
        return Path(made)
    target = tmp_path_factory.mktemp("packed") / "environment.tar.gz"
    command = [ROOT / "scripts/pack-environment", "-o", target, "-e", "images", "scikit-learn"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    return target


def test_digits_run_in_cluster_mode_from_the_archive_alone(cluster, archive, udp_range) -> None:
    packed = "./environment/bin/python"
    conf = {
        "spark.yarn.dist.archives": f"{archive}#environment",  # as --archives says it
        "spark.yarn.appMasterEnv.PYSPARK_PYTHON": packed,
        "spark.executorEnv.PYSPARK_PYTHON": packed,
        "spark.yarn.appMasterEnv.PYTHONPATH": "",  # not this checkout
        "spark.executorEnv.PYTHONPATH": "",
        "spark.executor.instances": "1",  # of two cores: a node unpacks for a minute
    }
    options = "--mask", "127.0.0.0/8", "--port", str(udp_range.first), "--epochs", "5"
    example = str(ROOT / "examples/digits.py"), *options
    with udp_range.watched():
        done = cluster.submit(HERE / "packed_job.py", *example, conf=conf)
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


def test_the_archive_has_the_library_and_no_script_that_names_where_it_was_made(archive) -> None:
    with tarfile.open(archive) as opened:
        members = list(opened)
    names = [member.name.removeprefix("./") for member in members]
    assert any("_pyaeron" in name and name.endswith(".so") for name in names)
    in_bin = [m for m in members if re.fullmatch(r"(\./)?bin/[^/]+", m.name)]
    assert in_bin
    assert all(member.issym() for member in in_bin)
    assert not any(name.split("/")[-2:-1] == ["pip"] for name in names)
    kernels = {Path(name).name.rpartition("-")[0] for name in names if name.endswith(".kernels")}
    assert kernels >= {"sparkstrom.encoding.update_sum", "sparkstrom.transport.aeron.kernels"}
