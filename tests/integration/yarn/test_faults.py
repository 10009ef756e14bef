"""Test of one fit with several faults on a real YARN with dynamic allocation.

Executors start late, one is ended by SIGKILL, one exceeds its container's memory, and SIGKILL ends
a NodeManager, whose executors still train as zombies while others replace them. Nevertheless each
row is trained once in each epoch.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.mini_yarn import Cluster, mini_yarn
from sparkstrom.protocol.common.events_and_effects import TaskEnding
from tests.integration.yarn.conftest import JARS
from tests.integration.yarn.faults_job import EPOCHS, GLUT_BYTES

JOB = Path(__file__).parent / "faults_job.py"
SITE = {
    "yarn.nm.liveness-monitor.expiry-interval-ms": 6_000,  # 10 minutes by default
    "yarn.nodemanager.container-monitor.interval-ms": 500,
    # One node for the driver alone, and two for the executors, of which one dies.
    "yarn.nodemanager.resource.memory-mb": 2_560,
}
OVERHEAD_MIB = 768
CONF = {
    "spark.executor.memoryOverhead": f"{OVERHEAD_MIB}m",
    "spark.executor.instances": "0",
    "spark.dynamicAllocation.enabled": "true",
    "spark.dynamicAllocation.initialExecutors": "2",
    "spark.dynamicAllocation.executorIdleTimeout": "1s",
    "spark.dynamicAllocation.schedulerBacklogTimeout": "4s",
    "spark.stage.maxConsecutiveAttempts": "100",
    "spark.executor.maxNumFailures": "100",
    "spark.python.daemon.module": "sparkstrom.spark.daemon",  # imports once for both workers
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def frail_cluster(tmp_path: Path) -> Iterator[Cluster]:
    """A cluster of three nodes that detects a dead node within seconds."""
    if not JARS:
        pytest.skip("no YARN here: set SPARKSTROM_YARN_JARS")
    with mini_yarn(Path(JARS), tmp_path / "home", nodes=3, site=SITE) as running:
        yield running


def test_each_row_is_trained_once_per_epoch_despite_faults(frail_cluster: Cluster) -> None:
    done = frail_cluster.submit(JOB, str(frail_cluster.home), conf=CONF, timeout_s=500)
    assert done.exit_code == 0, done.output + done.container_logs
    lines = done.container_logs.splitlines()
    [told] = [json.loads(line) for line in lines if line.startswith('{"trainings"')]
    assert told["trainings"] == [EPOCHS]
    assert told["minibatches"] == told["expected"]
    assert told["equal"]
    check_late_executors(told, done.container_logs)
    check_faults(told)
    check_memory(told, done.container_logs)


def check_late_executors(told: dict, logs: str) -> None:
    """Check that the fit began without executors, then had one, then two."""
    assert "this fit has 4 workers, for which Spark needs at least 2 executors" in logs
    assert "began with 2 of 4 workers" in told["warnings"]
    of_one_executor = list(itertools.takewhile(lambda count: count <= 2, told["training"]))
    assert 2 in of_one_executor  # after a 1, if an event came between its two workers
    assert 4 in told["training"]


def check_faults(told: dict) -> None:
    """Check that all first workers were lost, and that zombies were superseded while alive.

    If the machine is busy, one of several zombies may be silent for a whole lease before.
    """
    lost = [fault for fault in told["faults"] if fault["what"] == "worker lost"]
    assert {fault["partition"] for fault in lost if "silent" in fault["reason"]} == {0, 1, 2, 3}
    superseded = {f["partition"] for f in lost if f["reason"] == TaskEnding.SUPERSEDED.value}
    assert superseded & set(told["of_zombies"]), told["faults"]
    lost_twice = {p for p, count in Counter(f["partition"] for f in lost).items() if count > 1}
    assert lost_twice >= set(told["of_zombies"]), told["faults"]


def check_memory(told: dict, logs: str) -> None:
    """Check that a warning was logged and in the summary, and that the advised memory suffices."""
    [warning] = [text for text in told["warnings"] if "killed for its memory" in text]
    assert f"sparkstrom warns: {warning}" in logs
    assert f"of 512 MiB it had {OVERHEAD_MIB} MiB" in warning
    [advised] = map(int, re.findall(r"--conf spark\.executor\.memoryOverhead=(\d+)m", warning))
    assert advised > OVERHEAD_MIB + (GLUT_BYTES >> 20)
