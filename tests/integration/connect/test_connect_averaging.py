"""Tests of fits in rounds over Spark Connect: they have the same results as one process."""

from __future__ import annotations

import pytest

from tests.integration.conftest import ROUNDS

pytestmark = pytest.mark.timeout(1_800)  # one client runs all parts


@pytest.fixture
def outcome(answers):
    return answers[ROUNDS]


def check_equals_one_process(told, rounds):
    assert told["off_by"] == 0.0, told["text"]
    assert told["equal"]
    assert told["workers"] == 2
    assert told["rounds"] == rounds
    assert told["minibatches"][0] == told["minibatches"][1]


def test_averaging_every_step_equals_training_on_all_rows(outcome):
    """Averaging every step equals one machine on all rows; the session keeps no view or setting."""
    union = outcome["union"]
    check_equals_one_process(union, rounds=10)
    assert union["off_machine_by"] < 1e-6
    assert union["epochs"] == [1, 2]
    assert union["left"] == []
    assert union["settings"] == [None, None]


@pytest.mark.slow
def test_rounds_succeed_with_torch_killed_worker_and_diloco(outcome):
    """Fits in rounds succeed in each case; "dies" and "diloco" send messages in small pieces."""
    torch, ends, dies, diloco = (outcome[name] for name in ("torch", "ends", "dies", "diloco"))
    assert torch["beside"]["off_by"] < 2e-6, torch["beside"]["text"]
    assert torch["rows"] == 1797
    assert torch["held_out"] > 200
    assert torch["workers"] == 4
    assert torch["best"]
    assert torch["losses"][-1] < torch["losses"][0]
    assert torch["accuracy"] > 0.8
    assert "repartition='num_partitions_workers_differs' depends" in ends["different"]
    assert "rdd_training_approach='export'" in ends["export"]
    assert "64 features, the network takes 63" in ends["features"]
    assert "ValueError: this code of a user's is wrong (partition" in ends["user"]
    assert ends["interrupted"]
    assert ends["learnt"]
    assert ends["left"] == []
    assert dies["died"]
    assert dies["off_by"] == 0.0, dies["text"]
    assert "Spark began its task again (1 times)" in dies["text"]
    check_equals_one_process(diloco, rounds=3)
    assert "enough" in diloco["said"]
    assert "resumed from" in diloco["text"]
    assert diloco["epochs"] == [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jax", "keras"])
def test_jax_and_keras_rounds_equal_training_in_one_process(outcome, kinds, kind):
    """Rounds of a JAX or Keras model have the parameters of the same arithmetic in one process."""
    if kind not in kinds:
        pytest.skip("its library is not here")
    found = outcome[kind]
    assert found["off_by"] < 1e-5, found["text"]
    assert found["equal"]
    assert found["rounds"] == 2 * 3
    assert found["minibatches"] == [16, 16]
