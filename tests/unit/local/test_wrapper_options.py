"""Tests of a ``ParallelWrapper``'s options: those of training are taken, Spark's are refused."""

from __future__ import annotations

from typing import Any

import pytest

from sparkstrom import FixedThreshold, SharedTrainingMaster, UsageError, VoidConfiguration
from sparkstrom.local.wrapper_options import (
    TrainingMode,
    parse_training_mode,
    resolve_options,
    resolve_round_options,
)

SHARED, AVERAGING = TrainingMode.SHARED_GRADIENTS, TrainingMode.AVERAGING
RULE = resolve_round_options(AVERAGING, None, None, None)


def test_training_and_mesh_options_override_environment() -> None:
    """Training options and mesh options are given together, and override environment variables."""
    given = {"publish_every": 4, "lease_s": 3.0, "threshold_algorithm": FixedThreshold(0.5)}
    made = resolve_options(
        given, SHARED, None, {"SPARKSTROM_LEASE_S": "7", "SPARKSTROM_RNG_SEED": "9"}
    )
    assert (made.publish_every, made.void.lease_s, made.rng_seed) == (4, 3.0, 9)
    assert made.threshold == FixedThreshold(0.5)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"workers_per_node": 2}, "ParallelWrapper takes no workers_per_node: workers=N sets"),
        (
            {"gradients_accumulator": None},
            "takes no gradients_accumulator: with training_mode='CUSTOM'",
        ),
        ({"report_score_after_averaging": True}, "takes no report_score_after_averaging: progress"),
        ({"workspace_mode": None}, "takes no workspace_mode: memory is"),
        ({"trainer_factory": None}, "takes no trainer_factory: training_mode='CUSTOM'"),
        ({"model_params_supplier": None}, "takes no model_params_supplier: assign"),
        ({"updater_params_supplier": None}, "takes no updater_params_supplier: an optimizer"),
        ({"void": None}, "ParallelWrapper takes no void: there is no network"),
        ({"network_mask": "10.0.0.0/8"}, "takes no network_mask: everything stays on this machine"),
        ({"storage_level": 1}, "takes no storage_level"),
        ({"publish_evry": 1}, "knows no option publish_evry; did you mean publish_every?"),
        ({"publish_every": 0}, "publish_every=0"),
        ({"trainingMode": "AVERAGING"}, "no option trainingMode; did you mean training_mode?"),
        ({"reportScoreAfterAveraging": True}, "takes no reportScoreAfterAveraging: progress"),
    ],
)
def test_option_without_effect_locally_is_refused_by_name(given: dict[str, Any], why: str) -> None:
    """An option without effect in a ``ParallelWrapper`` is refused with its name and the reason."""
    with pytest.raises(UsageError, match=why):
        resolve_options(given, SHARED, None, {})


def test_averaging_refuses_update_options() -> None:
    """Averaging sends no updates, so options of updates are refused."""
    assert (
        resolve_options({"batch_size_per_worker": 7}, AVERAGING, RULE, {}).batch_size_per_worker
        == 7
    )
    with pytest.raises(UsageError, match="training_mode=AVERAGING sends no updates"):
        resolve_options({"publish_every": 4}, AVERAGING, RULE, {})


@pytest.mark.parametrize("given", [{"min_workers": 99}, {"start_timeout": 1.0}])
def test_averaging_refuses_options_for_starting_with_fewer_workers(given: dict[str, Any]) -> None:
    """Averaging needs all workers in each round, so it refuses options for starting with fewer."""
    (name,) = given
    assert getattr(resolve_options(given, SHARED, None, {}), name) == given[name]
    with pytest.raises(UsageError, match=f"all workers meet every .* leave out {name}="):
        resolve_options(given, AVERAGING, RULE, {})


@pytest.mark.parametrize(
    ("given", "takes"),
    [
        ((2, None, None), "AVERAGING"),
        ((None, True, None), "AVERAGING"),
        ((None, None, max), "CUSTOM"),
    ],
)
def test_round_option_with_shared_gradients_names_right_mode(
    given: tuple[Any, Any, Any], takes: str
) -> None:
    """An option of rounds is refused with SHARED_GRADIENTS, and the error names the right mode."""
    with pytest.raises(UsageError, match=f"training_mode=SHARED_GRADIENTS; take {takes}"):
        resolve_round_options(SHARED, *given)


def test_checkpoint_has_all_optimizer_states_if_not_averaged() -> None:
    """Checkpoints have all optimizer states if these aren't averaged, whatever the environment."""
    env = {"SPARKSTROM_CHECKPOINT_UPDATERS": "all"}
    assert resolve_options({}, AVERAGING, RULE, env).checkpoint_updaters == "one"
    own = resolve_round_options(AVERAGING, None, False, None)
    assert resolve_options({}, AVERAGING, own, {}).checkpoint_updaters == "all"


def test_environment_variables_of_spark_only_options_are_ignored() -> None:
    """Clusters set variables for all programs, also for options that ParallelWrapper refuses."""
    env = {"SPARKSTROM_CONTROLLER": "executor", "SPARKSTROM_SCALING": "ddp"}
    env |= {"SPARKSTROM_KEEP_LAST": "7"}
    shared, averaged = (resolve_options({}, mode, None, env) for mode in (SHARED, AVERAGING))
    assert {shared.void.controller, averaged.void.controller} == {VoidConfiguration().controller}
    assert (shared.scaling, averaged.scaling) == ("ddp", SharedTrainingMaster().scaling)
    assert (shared.keep_last, averaged.keep_last) == (7, 7)


def test_training_mode_is_parsed_from_exact_name() -> None:
    assert parse_training_mode("AVERAGING") is parse_training_mode(AVERAGING) is AVERAGING
    with pytest.raises(UsageError, match="training_mode='averaging': must be one of SHARED_"):
        parse_training_mode("averaging")
