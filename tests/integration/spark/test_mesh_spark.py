"""Test of a mesh with fan-out 2 on three executors: an executor whose node is a relay is killed.

It needs a session of three executors and so ends the folder's session; tests/conftest.py runs this
file last.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from sparkstrom import SharedTrainingMaster, SparkNetwork, VoidConfiguration
from sparkstrom.base.identity import MASTER
from sparkstrom.models import DenseNetwork, Sgd
from sparkstrom.protocol.master.master import Master

EPOCHS, BATCHES = 12, (45, 48)  # an epoch's minibatches, depending on how rows are distributed


@pytest.fixture
def three_executors() -> Iterator[Any]:
    """A session on three executors with a slot each; the current session ends."""
    from pyspark.sql import SparkSession

    former = SparkSession.getActiveSession()
    if former is not None:
        former.stop()
    session = (
        SparkSession.builder.master("local-cluster[3,1,1024]")
        .appName("sparkstrom mesh")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    yield session
    session.stop()


def find_relay_executor(master: Master) -> int:
    """Return the process id of an executor whose node is the parent of another executor's node."""
    tree, executors = master.placement.tree, master.members.executors
    inner = next(node for node in tree.descendants(MASTER) if any(tree.children(node)))
    child = next(iter(tree.children(inner)))
    assert tree.depth(child) == 2
    assert executors[child] != executors[inner]
    return int(executors[inner].rpartition("/")[2].split("-")[0])


@pytest.mark.slow
def test_fit_is_complete_after_relay_executor_is_killed(
    three_executors: Any,
    digits: Any,
    victims: Any,
    wait_until: Any,
    in_background: Any,
    running_master: Any,
    has_trained: Any,
) -> None:
    void = VoidConfiguration(lease_s=3.0, mesh_build_mode="mesh", mesh_fan_out=2)
    master = SharedTrainingMaster(void, debug_longer_iterations=25)
    model = DenseNetwork([64, 32, 10], updater=Sgd(0.1), seed=1)
    network = SparkNetwork(three_executors, model, master, progress=False)
    data = three_executors.sparkContext.parallelize(digits.rows(), 3)
    fit = in_background(network.fit, data, epochs=EPOCHS)
    wait_until(lambda: has_trained(100, workers=3), 120, "training")
    known = running_master()
    assert known is not None
    assert len(list(known.placement.tree.children(MASTER))) == 2
    victim = find_relay_executor(known)
    assert victim in victims.executors()
    victims.kill(victim)
    summary = fit.result(timeout=150)
    print(summary.table())
    assert summary.replicas_equal, summary.hashes
    assert summary.minibatches == summary.minibatches_expected
    assert summary.minibatches_expected in [EPOCHS * batches for batches in BATCHES]
    assert summary.departures
