"""Tests of what is read from Spark before a job: slots, workers, configuration."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import pytest

from sparkstrom.base.errors import SetupError, UsageError
from sparkstrom.base.units import parse_bytes
from sparkstrom.encoding import encoder
from sparkstrom.encoding import residual as error_feedback
from sparkstrom.fit.fit_context import TaskSlots
from sparkstrom.options import gradient_sharing as training_master
from sparkstrom.options.gradient_sharing import SharedTrainingMaster
from sparkstrom.options.network import VoidConfiguration
from sparkstrom.planning.memory import MIB, ModelFootprint
from sparkstrom.spark.executor_slots import (
    check_conf,
    check_key_encryption,
    count_workers,
    driver_host,
    get_slots,
    is_context_stopped,
)
from sparkstrom.spark.fit_strategies import strategy_for


class FakeContext:
    """A fake SparkContext with registered executors that have ``slots`` slots in total."""

    defaultParallelism = 99  # a user's spark.default.parallelism

    def __init__(self, master: str, registered: int = 0, slots: int = 2, **conf: str) -> None:
        self.master = master
        self._conf = {f"spark.{key.replace('_', '.')}": value for key, value in conf.items()}
        self._registered, self._slots = registered, slots
        self._jsc = self

    def sc(self) -> Any:
        return self

    def getExecutorMemoryStatus(self) -> Any:
        return self

    def size(self) -> int:
        return self._registered + 1  # Spark counts the driver, too

    def resourceProfileManager(self) -> Any:
        return SimpleNamespace(defaultResourceProfile=lambda: "the default one")

    def maxNumConcurrentTasks(self, profile: str) -> int:
        assert profile == "the default one"
        return self._slots

    def getConf(self) -> Any:
        return self

    def getAllWithPrefix(self, prefix: str) -> list[Any]:
        keys = [key.removeprefix(prefix) for key in self._conf if key.startswith(prefix)]
        return [SimpleNamespace(_1=lambda key=key: key) for key in keys]


def gpus(executor: str, task: str) -> dict[str, str]:
    return {"executor_resource_gpu_amount": executor, "task_resource_gpu_amount": task}


@pytest.mark.parametrize(
    ("context", "slots"),
    [
        (FakeContext("local"), TaskSlots(1, 1)),
        (FakeContext("local[3]"), TaskSlots(1, 3)),
        (FakeContext("local[3,2]"), TaskSlots(1, 3)),
        (FakeContext("local[3 , 2]"), TaskSlots(1, 3)),
        (FakeContext("local[4]", task_cpus="2"), TaskSlots(1, 2)),
        (FakeContext("local-cluster[2,3,1024]"), TaskSlots(2, 3)),
        (FakeContext("local-cluster[2, 4, 1024]", task_cpus="4"), TaskSlots(2, 1)),
        (FakeContext("yarn", executor_instances="5", executor_cores="4"), TaskSlots(5, 4)),
        (FakeContext("yarn", registered=3), TaskSlots(3, 1)),
        (
            FakeContext("k8s://h:1", executor_instances="2", executor_cores="4", task_cpus="2"),
            TaskSlots(2, 2),
        ),
        (FakeContext("spark://h:7077", registered=2, slots=8), TaskSlots(2, 4)),
        (FakeContext("spark://h:7077", registered=1, slots=1), TaskSlots(1, 1)),
        (FakeContext("spark://h:7077", registered=1, executor_instances="4"), TaskSlots(1, 2)),
        (FakeContext("local-cluster[1,2,1024]", **gpus("1", "1")), TaskSlots(1, 1)),
        (
            FakeContext("yarn", registered=2, executor_cores="9", **gpus("2", "0.3")),
            TaskSlots(2, 6),
        ),
        (
            FakeContext("yarn", registered=2, executor_cores="9", **gpus("4", "0.6")),
            TaskSlots(2, 4),
        ),
        (FakeContext("yarn", registered=2, executor_cores="9", **gpus("5", "2")), TaskSlots(2, 2)),
        (
            FakeContext("k8s://h:1", 2, executor_cores="1", executor_resource_gpu_amount="4"),
            TaskSlots(2, 1),
        ),
    ],
    ids=lambda value: value.master if isinstance(value, FakeContext) else "",
)
def test_slots_follow_master_cores_and_gpus(context: FakeContext, slots: TaskSlots) -> None:
    assert get_slots(context) == slots


def test_spark_configuration_is_not_cached() -> None:
    """Spark's configuration is read for each fit; nothing of it is cached."""
    context = FakeContext("local[4]", driver_host="first")
    assert (get_slots(context).total, driver_host(context)) == (4, "first")
    context._conf |= {"spark.task.cpus": "2", "spark.driver.host": "second"}
    assert (get_slots(context).total, driver_host(context)) == (2, "second")


def test_local_star_has_as_many_slots_as_jvm_reports() -> None:
    """``local[*]`` has as many slots as the JVM reports."""
    assert get_slots(FakeContext("local[*]", slots=1)) == TaskSlots(1, 1)
    assert get_slots(FakeContext("local[*, 4]", slots=6)) == TaskSlots(1, 6)


def test_cluster_without_executors_raises_setup_error() -> None:
    with pytest.raises(SetupError, match=r"no executor has registered with spark://h:7077"):
        get_slots(FakeContext("spark://h:7077"))


def test_worker_count_follows_slots_and_workers_per_node() -> None:
    slots = TaskSlots(executors=3, per_executor=2)
    assert count_workers(slots, strategy_for(SharedTrainingMaster())) == 6
    assert count_workers(slots, strategy_for(SharedTrainingMaster(workers_per_node=1))) == 3
    with pytest.raises(UsageError, match="workers_per_node=3: an executor has 2 task slots"):
        count_workers(slots, strategy_for(SharedTrainingMaster(workers_per_node=3)))


def test_speculation_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--conf spark\.speculation=false"):
        check_conf({"spark.speculation": "TRUE"}, 4, SOME, SharedTrainingMaster())


@pytest.mark.parametrize(
    ("conf", "warning"),
    [
        ({}, None),
        ({"spark.task.maxFailures": "1"}, "set it to 4"),
        (
            {"spark.master": "yarn", "spark.executor.cores": "2"},
            "spark.executor.memoryOverhead=642m",
        ),
        (
            {"spark.master": "yarn", "spark.executor.memoryOverhead": "200"},
            "spark.executor.memoryOverhead=360m",
        ),
        ({"spark.master": "yarn", "spark.executor.memoryOverhead": "360"}, None),
        ({"spark.master": "yarn", "spark.executor.memory": "8g"}, None),
        ({"spark.master": "yarn", "spark.executor.memoryOverheadFactor": "0.5"}, None),
        ({"spark.master": "yarn", "spark.executor.minMemoryOverhead": "1g"}, None),
        ({"spark.master": "local[2]", "spark.executor.memoryOverhead": "1m"}, None),
    ],
)
def test_configuration_warnings_name_key_and_value(
    conf: dict[str, str], warning: str | None
) -> None:
    warnings = check_conf(conf, 4, SOME, SMALL)
    assert len(warnings) == (warning is not None)
    assert warning is None or warning in warnings[0]


SOME = ModelFootprint(1000, library="dense")
SMALL = SharedTrainingMaster(
    batch_memory_bytes=66 * MIB, void=VoidConfiguration(log_bytes=64 * MIB, window_bytes=6 * MIB)
)
DRIVER = 78  # MiB: a media driver with eight neighbours


def find_advised_overhead(
    master: SharedTrainingMaster, workers: int = 4, n_params: int = 10 * MIB
) -> int:
    """Return the overhead in MiB that is recommended for an executor with four slots."""
    conf = {"spark.master": "yarn", "spark.executor.cores": "4"}
    demand = ModelFootprint(n_params, library="dense")
    (warning,) = check_conf(conf, workers, demand, master)
    (found,) = re.findall(r"memoryOverhead=(\d+)m", warning)
    enough = conf | {"spark.executor.memoryOverhead": f"{found}m"}
    assert check_conf(enough, workers, demand, master) == []
    return int(found)


def test_advised_overhead_sums_media_driver_and_workers() -> None:
    """The overhead has a media driver and, for each worker, its buffers and its parameters."""
    worker = 140 + 66 + 64 + 2 * 6  # interpreter, rows, log, own updates and inbox
    assert find_advised_overhead(SMALL) == DRIVER + 4 * (worker + 480)
    assert find_advised_overhead(SMALL, n_params=20 * MIB) == DRIVER + 4 * (worker + 2 * 480)
    one = dataclasses.replace(SMALL, workers_per_node=1)
    assert find_advised_overhead(one) == DRIVER + worker + 480


def test_advised_overhead_counts_rows_and_logs_per_worker() -> None:
    """batch_memory_bytes and log_bytes count once for each worker."""
    more_rows = dataclasses.replace(SMALL, batch_memory_bytes=100 * MIB)
    assert find_advised_overhead(more_rows) == find_advised_overhead(SMALL) + 4 * 34
    void = dataclasses.replace(SMALL.void, log_bytes=100 * MIB)
    assert (
        find_advised_overhead(dataclasses.replace(SMALL, void=void))
        == find_advised_overhead(SMALL) + 4 * 36
    )


def test_advised_overhead_grows_with_mesh_fan_out() -> None:
    """In a mesh, the media driver's memory grows with mesh_fan_out."""

    def mesh(fan_out: int) -> SharedTrainingMaster:
        void = dataclasses.replace(SMALL.void, mesh_build_mode="mesh", mesh_fan_out=fan_out)
        return dataclasses.replace(SMALL, void=void)

    edge = 2 * 3 * (1 + 1 / 8)  # MiB: both streams in both directions, three terms each
    assert find_advised_overhead(mesh(8)) - find_advised_overhead(SMALL) == pytest.approx(
        16 * edge, abs=1
    )
    assert find_advised_overhead(mesh(24)) - find_advised_overhead(mesh(8)) == pytest.approx(
        16 * edge, abs=1
    )


@pytest.mark.parametrize(
    ("text", "size"),
    [("512m", 512 * MIB), ("2g", 2048 * MIB), (" 1T ", 1 << 40), ("64kb", 65_536), ("100", 100)],
)
def test_parse_bytes_accepts_spark_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


def test_parse_bytes_applies_unit_to_bare_number() -> None:
    assert parse_bytes("512", unit=MIB) == 512 * MIB


CRYPTO = {"spark.network.crypto.enabled": "true"}
SASL = {"spark.authenticate.enableSaslEncryption": "true"}


@pytest.mark.parametrize(
    ("conf", "warns"),
    [
        ({}, True),
        ({"spark.master": "local[4]"}, False),
        ({"spark.authenticate": "true"}, True),
        (CRYPTO, True),  # Spark encrypts only what it authenticates
        (CRYPTO | {"spark.authenticate": "TRUE"}, False),
        (SASL | {"spark.authenticate": "true"}, False),
        ({"spark.ssl.enabled": "true"}, True),  # for web pages; RPC does not inherit it
        ({"spark.ssl.rpc.enabled": "true"}, False),
    ],
)
def test_unencrypted_key_warns_once_per_application(
    conf: dict[str, str], warns: bool, request: pytest.FixtureRequest
) -> None:
    """One warning per application is given if Spark sends the fit's key without encryption."""
    conf = {"spark.master": "yarn", "spark.app.id": request.node.name} | conf
    warnings = check_key_encryption(conf)
    assert len(warnings) == warns
    assert all("spark.network.crypto.enabled=true" in warning for warning in warnings)
    assert check_key_encryption(conf) == []
    assert (
        len(check_key_encryption(conf | {"spark.app.id": f"{request.node.name}, another"})) == warns
    )


def test_context_stopped_in_python_or_jvm_is_recognized() -> None:
    """A context counts as stopped if Python or the JVM stopped it, or if the JVM is gone."""

    def context(stopped: Any) -> Any:
        scala = SimpleNamespace(isStopped=stopped)
        return SimpleNamespace(_jsc=SimpleNamespace(sc=lambda: scala))

    def gone() -> bool:
        raise ConnectionRefusedError(111, "Connection refused")

    assert not is_context_stopped(context(lambda: False))
    assert is_context_stopped(context(lambda: True))
    assert is_context_stopped(context(gone))
    assert is_context_stopped(SimpleNamespace(_jsc=None))


def test_parse_bytes_rejects_text_without_size() -> None:
    """Text that is not a size is refused with an example."""
    with pytest.raises(ValueError, match="size 'much': write 512m"):
        parse_bytes("much")


def test_training_master_shares_option_lists_with_encoder() -> None:
    """The lists of valid options are shared with the encoder, not copied."""
    assert training_master.TRAIN_ON is error_feedback.TRAIN_ON
    assert training_master.AGGREGATIONS is encoder.AGGREGATIONS
