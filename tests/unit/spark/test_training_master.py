"""Tests of SharedTrainingMaster: default values, accepted options, and refusals with reasons."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.encoding.residual import ResidualClipping
from sparkstrom.encoding.thresholds import (
    AdaptiveThreshold,
    AutoThreshold,
    AveragingThreshold,
    FixedThreshold,
)
from sparkstrom.options.gradient_sharing import ALIASES, REFUSED, SharedTrainingMaster
from sparkstrom.options.network import VoidConfiguration


def test_given_contains_names_of_constructor_options() -> None:
    """``given`` contains the names of the options that the constructor was given."""
    void = VoidConfiguration(unicast_port=40123)
    master = SharedTrainingMaster(
        void, batch_size_per_worker=16, workers_per_node=2, threshold=AdaptiveThreshold(1e-3)
    )
    assert master.void is void
    assert master.given == {"void", "batch_size_per_worker", "workers_per_node", "threshold"}


def test_default_values_of_main_options() -> None:
    master = SharedTrainingMaster()
    assert master.void == VoidConfiguration()
    assert master.workers_per_node == -1
    assert master.threshold == "auto"
    assert master.residual_post_processor == ResidualClipping(5.0, 5)
    assert master.batch_size_per_worker == 32
    assert master.train_on == "local"


def test_pickling_keeps_options_and_given_names() -> None:
    """Pickling keeps the options, and which of them were given."""
    master = SharedTrainingMaster(threshold=FixedThreshold(1e-3), residual_post_processor=None)
    copy = pickle.loads(pickle.dumps(master))
    assert copy == master
    assert copy.given == master.given


def test_dl4j_option_names_set_same_fields() -> None:
    """DL4J's names of options set the same fields as ours."""
    void = VoidConfiguration(lease_s=3.0)
    theirs = SharedTrainingMaster(
        void_configuration=void,  # type: ignore[call-arg]
        threshold_algorithm=FixedThreshold(1e-3),
        repartition_data="never",
    )
    assert theirs == SharedTrainingMaster(void, threshold=FixedThreshold(1e-3), repartition="never")


def test_rejects_option_given_under_two_names() -> None:
    names = {"repartition": "never", "repartition_data": "always"}
    with pytest.raises(UsageError, match="repartition is given twice, once as repartition_data"):
        SharedTrainingMaster(**names)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("void", None, "must be a VoidConfiguration"),
        ("batch_size_per_worker", 0, "at least 1, as a rule 32"),
        ("batch_size_per_worker", "32", "whole number"),
        ("batch_size_per_worker", True, "whole number"),
        ("workers_per_node", 0, "or -1 for all task slots"),
        ("train_on", "theta", "one of local, replica"),
        ("threshold", 1e-3, "AdaptiveThreshold(1e-3)"),
        ("threshold", "adaptive", "must be 'auto' or a threshold algorithm"),
        ("residual_post_processor", 5.0, "ResidualClipping(5.0, 5)"),
        ("publish_every", 0, "at least 1, or 'auto'"),
        ("publish_every", "always", "or 'auto'"),
        ("publish_every", "2", "or 'auto'"),
        ("publish_every", True, "or 'auto'"),
        ("publish_every", 1.5, "or 'auto'"),
        ("publish_every", None, "or 'auto'"),
        ("scaling", "linear", "None or one of sequential, limited, ddp"),
        ("aggregation", "average", "one of sum, mean, sqrt"),
        ("max_lead", 0, "at least 1, or 'auto', or None"),
        ("max_staleness", -1, "at least 0 rounds, or 'auto', or None"),
        ("repartition", "num_partitions_workers_differs", "one of always, never"),
        ("rdd_training_approach", "Direct", "one of direct"),
        ("rng_seed", -1, "at least 0"),
        ("min_workers", 0, "at least 1"),
        ("start_timeout", -1.0, "seconds above 0"),
        ("step_timeout", float("nan"), "seconds above 0"),
        ("collect_training_stats", 1, "True or False"),
        ("encoding_debug_mode", None, "True or False"),
        ("debug_longer_iterations", 600_000, "every step would be late"),
    ],
)
def test_invalid_option_error_names_option_value_and_remedy(
    option: str, value: object, words: str
) -> None:
    with pytest.raises(UsageError) as caught:
        SharedTrainingMaster(**{option: value})  # type: ignore[arg-type]
    assert f"{option}={value!r}" in str(caught.value)
    assert words in str(caught.value)


def test_rejects_max_lead_below_publish_every() -> None:
    """max_lead may not be less than publish_every."""
    with pytest.raises(UsageError, match="at least 5, the value of publish_every"):
        SharedTrainingMaster(publish_every=5, max_lead=4)
    assert SharedTrainingMaster(publish_every=5, max_lead=5).max_lead == 5
    assert SharedTrainingMaster(publish_every="auto", max_lead=1).max_lead == 1


@pytest.mark.parametrize(
    ("scaling", "option", "value"),
    [
        ("ddp", "horizon", "fit"),
        ("ddp", "aggregation", "sum"),
        ("limited", "aggregation", "sqrt"),
        ("sequential", "horizon", "worker"),
    ],
)
def test_rejects_option_that_contradicts_scaling(scaling: str, option: str, value: str) -> None:
    given: dict[str, Any] = {"scaling": scaling, option: value}
    with pytest.raises(
        UsageError, match=f"{option}='{value}': scaling='{scaling}' allows only {option}"
    ):
        SharedTrainingMaster(**given)


def test_accepts_horizon_alone_or_consistent_with_scaling() -> None:
    """``horizon`` may be given alone, or with a scaling rule that it agrees with."""
    ddp = SharedTrainingMaster(scaling="ddp", horizon="worker")
    assert (ddp.minibatch_horizon, ddp.sums_updates) == ("worker", False)
    alone = SharedTrainingMaster(horizon="worker")
    assert (alone.minibatch_horizon, alone.sums_updates) == ("worker", True)
    auto = SharedTrainingMaster()
    assert (auto.minibatch_horizon, auto.sums_updates) == ("fit", True)


@pytest.mark.parametrize(
    ("options", "other", "adaptive"),
    [
        ({}, "sum", "sum"),
        ({"aggregation": "sqrt"}, "sqrt", "sqrt"),
        ({"scaling": "limited"}, "sum", "sum"),
        ({"scaling": "ddp"}, "mean", "sqrt"),
        ({"scaling": "ddp", "aggregation": "mean"}, "mean", "mean"),
        ({"scaling": "ddp", "aggregation": "sqrt"}, "sqrt", "sqrt"),
    ],
)
def test_update_weight_depends_on_scaling_and_optimizer(
    options: dict[str, Any], other: str, adaptive: str
) -> None:
    master = SharedTrainingMaster(**options)
    assert master.choose_update_weight(is_adaptive=False) == other
    assert master.choose_update_weight(is_adaptive=True) == adaptive


def test_default_threshold_depends_on_scaling_and_optimizer() -> None:
    fixed = FixedThreshold(1e-3)
    for is_adaptive in (False, True):
        assert SharedTrainingMaster().choose_threshold(is_adaptive) == AutoThreshold()
        assert SharedTrainingMaster().threshold_algorithm == AutoThreshold()
        master = SharedTrainingMaster(scaling="ddp", threshold=fixed)
        assert master.choose_threshold(is_adaptive) == fixed
    ddp = SharedTrainingMaster(scaling="ddp")
    assert ddp.choose_threshold(is_adaptive=False) == AveragingThreshold()
    assert ddp.choose_threshold(is_adaptive=True) == AutoThreshold(sent_fraction_max=0.016)


@pytest.mark.parametrize(
    ("options", "workers"),
    [
        ({}, None),
        ({"scaling": "sequential"}, None),
        ({"scaling": "limited"}, 8),
        ({"scaling": "limited", "aggregation": "sum"}, 8),
        ({"scaling": "ddp"}, None),
    ],
)
def test_only_limited_scaling_limits_summed_workers(
    options: dict[str, Any], workers: int | None
) -> None:
    assert SharedTrainingMaster(**options).summed_workers_max == workers


def test_publish_every_is_auto_by_default() -> None:
    assert SharedTrainingMaster().publish_every == "auto"


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_unsupported_dl4j_option_is_refused_with_explanation(name: str) -> None:
    """An option of DL4J without a meaning here is refused with an explanation."""
    with pytest.raises(UsageError) as caught:
        SharedTrainingMaster(**{name: 1})  # type: ignore[arg-type]
    assert str(caught.value) == f"SharedTrainingMaster takes no {name}: {REFUSED[name]}"


def test_misspelled_option_error_suggests_nearest_name() -> None:
    """A misspelled option is refused with the nearest known name."""
    with pytest.raises(UsageError, match=r"bach_size; did you mean batch_size_per_worker\?"):
        SharedTrainingMaster(bach_size=1)  # type: ignore[call-arg]


def test_option_names_refused_names_and_aliases_are_disjoint() -> None:
    """Names of options, refused names and aliases do not overlap; aliases name options."""
    names = set(SharedTrainingMaster.__dataclass_fields__)
    assert not names & REFUSED.keys()
    assert not names & ALIASES.keys()
    assert set(ALIASES.values()) <= names
