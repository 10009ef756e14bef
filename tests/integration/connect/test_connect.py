"""Tests of fits over Spark Connect on a real server: results, refusals, workers that die."""

from __future__ import annotations

import pytest

from tests.integration.conftest import FITS

pytestmark = pytest.mark.timeout(1_800)  # one client runs all parts
ROWS = 1437


@pytest.fixture
def outcome(answers):
    return answers[FITS]


def check_all_replicas_equal(told, workers=3):
    assert told["equal"], told["text"]
    assert told["replicas"] == workers + 1  # and the controller, which has its own slot


def test_dense_network_fits_predicts_and_evaluates(outcome):
    """A dense network fits with listeners and held-out rows, and then predicts and scores."""
    dense = outcome["dense"]
    check_all_replicas_equal(dense["first"])
    check_all_replicas_equal(dense["again"])
    assert dense["lease_s"] == 7  # from the server's configuration
    assert dense["epochs_heard"] == dense["history"] >= 3
    assert dense["apart"][:2] == [ROWS, 40]  # held-out rows were a separate DataFrame
    assert 0 < dense["apart"][2] < 1
    assert dense["looks"] > 0
    assert dense["accuracy"] > 0.85
    assert dense["as_here"]
    rows, accuracy, loss = dense["evaluated"]
    assert rows == ROWS
    assert accuracy > 0.85
    assert loss == dense["score"] == pytest.approx(dense["evaluated_here"], rel=1e-5)


@pytest.mark.slow
def test_large_torch_estimator_and_killed_worker_fits_succeed(outcome):
    """A large model, a torch model, a fit whose worker dies, and the estimator succeed."""
    check_all_replicas_equal(outcome["large"], workers=2)
    check_all_replicas_equal(outcome["torch"])
    assert outcome["torch"]["accuracy"] > 0.8
    assert outcome["torch"]["checkpoint"]
    check_all_replicas_equal(outcome["dies"])
    assert "another attempt of its task" in outcome["dies"]["text"]
    assert outcome["dies"]["died"]
    assert outcome["estimator"]["right"] > 0.6
    assert "network.save(path)" in outcome["estimator"]["save"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jax", "keras"])
def test_jax_and_keras_models_fit_and_evaluate(outcome, kinds, kind):
    """Two fits of a JAX or Keras model have equal replicas; the accuracy exceeds 0.8."""
    if kind not in kinds:
        pytest.skip("its library is not here")
    check_all_replicas_equal(outcome[kind]["first"], workers=2)
    check_all_replicas_equal(outcome[kind]["again"], workers=2)
    assert outcome[kind]["accuracy"] > 0.8
    assert outcome[kind]["evaluated"] > 0.8


@pytest.mark.slow
def test_rehearsal_uses_sample_of_rows(outcome):
    rehearsal = outcome["rehearsal"]
    first, second = rehearsal["results"]
    assert first == second
    assert first["rows"] == 600
    assert {run["workers"] for run in first["runs"]} == {1, 2}
    assert rehearsal["unchanged"]
    assert "rows have 63 features, the network takes 64" in rehearsal["bad"]
    assert "UsageError: measure=True is not supported over Spark Connect" in rehearsal["measured"]


@pytest.mark.slow
def test_unsupported_inputs_and_user_errors_are_reported(outcome):
    """Unsupported data, options and rows are refused, and errors of a user's code are shown."""
    refusals = outcome["refusals"]
    for name, said in {
        "rdd": "UsageError: data is an RDD",
        "export": "UsageError: rdd_training_approach='export'",
        "host": "UsageError: controller='10.1.2.3'",
        "slots": "UsageError: controller='executor' needs one slot more: 4 workers",
        "column": "UsageError: there is no column 'lable'",
        "held_out": "held-out rows cannot be an RDD; make a DataFrame of them",
        "stream": "UsageError: each_batch(network)",
        "row": "has 63 values where earlier ones have 64",
        "user": "ValueError: this code of a user's is wrong",
    }.items():
        assert said in refusals[name], refusals[name]
