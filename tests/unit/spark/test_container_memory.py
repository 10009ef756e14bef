"""Tests of containers killed for their memory: Spark's error is recognized, and a remedy given."""

from __future__ import annotations

import re

import pytest

from sparkstrom.base.units import parse_bytes
from sparkstrom.options.gradient_sharing import SharedTrainingMaster
from sparkstrom.options.network import VoidConfiguration
from sparkstrom.options.parameter_averaging import ParameterAveragingTrainingMaster
from sparkstrom.planning.memory import (
    MIB,
    ContainerLayout,
    ModelFootprint,
    check_overhead,
    explain_memory_kill,
    gradient_sharing_memory,
    parse_memory_kill,
    rounds_memory,
)

# The error message of Spark 4.0's scheduler, with the reason of its YarnAllocator.
BY_YARN = (
    "ExecutorLostFailure (executor 1 exited caused by one of the running tasks) Reason: Container "
    "killed by YARN for exceeding {kind} memory limits. {used} of {limit} {kind} memory used. "
    "Consider boosting spark.executor.memoryOverhead."
)
BY_KERNEL = (
    "ExecutorLostFailure (executor 1 exited caused by one of the running tasks) Reason: The "
    "executor with id 1 exited with exit code 137(SIGKILL, possible container OOM)."
)
OTHERS = (
    "ExecutorLostFailure (executor 2 exited caused by one of the running tasks) Reason: Container "
    "from a bad node: container_1795443792902_0001_01_000003 on host: 127.0.0.2. Exit status: 137. "
    "Possible causes: Unknown executor exit code (137) (died from signal 9?)"
)
CONF = {"spark.master": "yarn", "spark.executor.memory": "512m", "spark.executor.cores": "2"}
MASTER = SharedTrainingMaster(
    batch_memory_bytes=66 * MIB, void=VoidConfiguration(log_bytes=64 * MIB, window_bytes=6 * MIB)
)
NEED = gradient_sharing_memory(CONF, 4, ModelFootprint(1000, library="dense"), MASTER)
PLANNED = 642  # MiB, as in test_cluster.py


def explain_error(error: str, overhead: int, **more: str) -> str:
    """Explain an error with this overhead in MiB; ``more`` are settings of spark.executor."""
    keys = {f"spark.executor.{key.replace('_', '.')}": value for key, value in more.items()}
    conf = CONF | {"spark.executor.memoryOverhead": f"{overhead}m"} | keys
    return explain_memory_kill(conf, NEED, error)


def find_advised_overhead(text: str) -> int:
    """Return the recommended overhead in MiB."""
    [found] = re.findall(r"--conf spark\.executor\.memoryOverhead=(\d+)m", text)
    return int(found)


def yarn(used: str, limit: str, kind: str = "physical") -> str:
    """Return YARN's error message."""
    return BY_YARN.format(kind=kind, used=used, limit=limit)


def test_overhead_below_plan_recommends_planned_overhead() -> None:
    """If the overhead was less than planned, the planned overhead is recommended."""
    text = explain_error(yarn("901.2 MB", "900 MB"), 388)
    assert "YARN counted 901.2 MB of 900 MB physical memory" in text
    assert "beside the heap of 512 MiB it had 388 MiB" in text
    assert find_advised_overhead(text) == PLANNED
    assert check_overhead(CONF | {"spark.executor.memoryOverhead": f"{PLANNED}m"}, NEED) == []


@pytest.mark.parametrize("overhead", [388, 700])
def test_usage_beyond_plan_recommends_a_quarter_more(overhead: int) -> None:
    """Beyond the plan, the used memory and a quarter of the container are recommended."""
    container = 512 + overhead
    text = explain_error(yarn(f"{2 * container} MB", f"{container} MB"), overhead)
    assert find_advised_overhead(text) == 2.25 * container - 512
    assert ("so the model itself takes more" in text) == (overhead > PLANNED)


def test_pyspark_memory_counts_as_memory_outside_heap() -> None:
    """spark.executor.pyspark.memory counts as memory outside the heap."""
    text = explain_error(yarn("901 MB", "900 MB"), 288, pyspark_memory="100m")
    assert "it had 388 MiB" in text
    assert find_advised_overhead(text) == PLANNED - 100
    assert (
        ContainerLayout.from_conf(CONF | {"spark.executor.pyspark.memory": "1g"}).outside_heap
        == (384 + 1024) * MIB
    )


def test_a_heap_without_a_unit_is_in_mebibytes_as_for_spark() -> None:
    assert ContainerLayout.from_conf({"spark.executor.memory": "4096"}).heap == 4096 * MIB


def test_virtual_memory_kill_recommends_disabling_its_check() -> None:
    text = explain_error(yarn("4.6 GB", "3.1 GB", "virtual"), 700)
    assert "yarn.nodemanager.vmem-check-enabled=false" in text
    assert find_advised_overhead(text) > 700


def test_kernel_kill_recommends_plan_or_a_quarter_more() -> None:
    """If the kernel killed it, no sizes are known: the plan is recommended, or a quarter more."""
    assert find_advised_overhead(explain_error(BY_KERNEL, 388)) == PLANNED
    text = explain_error(BY_KERNEL, 1000)
    assert "Spark says 'possible container OOM'" in text
    assert find_advised_overhead(text) == 1000 + 378  # a quarter of 1512


def test_exit_status_137_alone_is_not_memory_kill() -> None:
    """Exit status 137 alone is not a memory kill: kill -9 has it, too, and YARN gives a reason."""
    assert parse_memory_kill(OTHERS) is None
    assert explain_error(OTHERS, 388) == ""


def test_parse_bytes_accepts_fractions() -> None:
    assert parse_bytes("1.5 GB") == 1536 * MIB


def test_averaging_texts_do_not_mention_aeron_or_logs() -> None:
    """For parameter averaging, the texts do not mention Aeron or logs."""
    master = ParameterAveragingTrainingMaster(batch_memory_bytes=66 * MIB)
    need = rounds_memory(CONF, 4, ModelFootprint(1000, library="dense"), master)
    killed = explain_memory_kill(CONF, need, yarn("901.2 MB", "900 MB"))
    [warned] = check_overhead(CONF, need)
    for text in (killed, warned):
        assert "2 workers of 1,000 parameters need up to" in text
        assert "Aeron" not in text
        assert "log_bytes" not in text
    assert "66 MiB of each for rows (batch_memory_bytes): set --conf" in warned
    assert find_advised_overhead(warned) == -(-need.bytes // MIB)
