"""Tests of fits over Spark Connect on a real server: results, refusals, workers that die."""

from __future__ import annotations

import pytest

from tests.integration.conftest import FITS

pytestmark = pytest.mark.timeout(1_800)  # one client runs all parts
ROWS = 1437


@pytest.fixture
def told(answers):
    return answers[FITS]


def check_whole(told, workers=3):
    assert told["equal"], told["text"]
    assert told["replicas"] == workers + 1  # and the controller, which has its own slot


def test_a_dense_network_is_trained_followed_and_used(told):
    """A dense network fits with listeners and held-out rows, and then predicts and scores."""
    dense = told["dense"]
    check_whole(dense["first"])
    check_whole(dense["again"])
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
def test_large_models_others_models_and_workers_that_die(told):
    """A large model, a torch model, a fit whose worker dies, and the estimator succeed."""
    check_whole(told["large"], workers=2)
    check_whole(told["torch"])
    assert told["torch"]["accuracy"] > 0.8
    assert told["torch"]["checkpoint"]
    check_whole(told["dies"])
    assert "another attempt of its task" in told["dies"]["text"]
    assert told["dies"]["died"]
    assert told["estimator"]["right"] > 0.6
    assert "network.save(path)" in told["estimator"]["save"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["jax", "keras"])
def test_models_on_jax_and_of_keras_are_trained_and_used(told, kinds, kind):
    """Two fits of a JAX or Keras model have equal replicas; the accuracy exceeds 0.8."""
    if kind not in kinds:
        pytest.skip("its library is not here")
    check_whole(told[kind]["first"], workers=2)
    check_whole(told[kind]["again"], workers=2)
    assert told[kind]["accuracy"] > 0.8
    assert told[kind]["evaluated"] > 0.8


@pytest.mark.slow
def test_a_fit_is_rehearsed_with_a_sample_of_the_rows(told):
    rehearsal = told["rehearsal"]
    first, second = rehearsal["results"]
    assert first == second
    assert first["rows"] == 600
    assert {run["workers"] for run in first["runs"]} == {1, 2}
    assert rehearsal["unchanged"]
    assert "rows have 63 features, the network takes 64" in rehearsal["bad"]
    assert "UsageError: measure=True is not supported over Spark Connect" in rehearsal["measured"]


@pytest.mark.slow
def test_what_cannot_be_is_refused_by_name(told):
    """Unsupported data, options and rows are refused, and errors of a user's code are shown."""
    refusals = told["refusals"]
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
