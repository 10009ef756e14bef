"""On a real YARN in cluster mode: equal replicas and exit code 0; a failure is exit code 1."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
JARS = os.environ.get("SPARKSTROM_YARN_JARS")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not JARS,
        reason="no YARN here: set SPARKSTROM_YARN_JARS to a directory with "
        "hadoop-client-minicluster, bcpkix-jdk18on, bcutil-jdk18on and jaxb-api",
    ),
]


def harness():
    """The module beside this file: test folders are no packages."""
    spec = importlib.util.spec_from_file_location("mini_yarn", HERE / "mini_yarn.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    with harness().mini_yarn(Path(JARS), tmp_path_factory.mktemp("yarn") / "home") as running:
        yield running


def test_digits_in_cluster_mode_end_with_equal_replicas(cluster) -> None:
    done = cluster.submit(ROOT / "examples/digits.py")
    assert done.exit_code == 0, done.output + done.container_logs
    hashes = dict(re.findall(r"^hash (\S+) +([0-9a-f]{16})$", done.container_logs, re.MULTILINE))
    assert len(hashes) == 5, done.container_logs  # four workers and the driver
    assert len(set(hashes.values())) == 1


def test_an_exception_in_training_fails_the_application_with_its_cause_in_the_log(cluster) -> None:
    done = cluster.submit(HERE / "burning_job.py")
    assert done.exit_code == 1, done.output
    assert "RuntimeError: the reactor is on fire" in done.container_logs
    assert "step" in done.container_logs
