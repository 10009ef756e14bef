"""Tests of dynamic allocation: how many executors a fit expects, and its warnings and notes."""

from __future__ import annotations

import pytest

from sparkstrom import ParameterAveragingTrainingMaster
from sparkstrom.fit.fit_context import TaskSlots
from sparkstrom.fit.summary import skew_warnings
from sparkstrom.planning.memory import ModelFootprint
from sparkstrom.spark.executor_slots import (
    DYNAMIC_ALLOCATION_ENABLED,
    ROUNDS_FIT_NOTE,
    SHARED_FIT_NOTE,
    check_rounds_conf,
    check_scheduling,
    choose_executor_count,
    choose_resume_workers,
    describe_allocation,
    get_slots,
)
from tests.unit.spark.test_cluster import FakeContext

DYNAMIC = "spark.dynamicAllocation."


def make_conf(**said: str) -> dict[str, str]:
    """Return a configuration with dynamic allocation and these settings."""
    names = {key: f"{DYNAMIC}{key}" for key in ("initialExecutors", "minExecutors", "maxExecutors")}
    names["instances"] = "spark.executor.instances"
    return {DYNAMIC_ALLOCATION_ENABLED: "true"} | {names[key]: value for key, value in said.items()}


@pytest.mark.parametrize(
    ("said", "registered", "wanted"),
    [
        ({}, 0, 2),
        ({}, 5, 5),
        ({"initialExecutors": "3"}, 0, 3),
        ({"initialExecutors": "3"}, 5, 3),
        ({"instances": "4"}, 0, 4),
        ({"instances": "4", "initialExecutors": "6"}, 1, 6),
        ({"instances": "0", "minExecutors": "1"}, 0, 2),  # a minimum is not a request
        ({"minExecutors": "3"}, 0, 3),
        ({"maxExecutors": "1"}, 0, 1),
        ({"instances": "8", "maxExecutors": "5"}, 0, 5),
        ({"maxExecutors": "50"}, 0, 2),  # nor is a maximum
    ],
)
def test_expected_executor_count_follows_settings(
    said: dict[str, str], registered: int, wanted: int
) -> None:
    """The expected number of executors follows from settings and registered executors."""
    assert choose_executor_count(make_conf(**said), registered) == wanted


def test_dynamic_slots_are_estimated_before_executors_register() -> None:
    """With dynamic allocation, slots are estimated even before an executor has registered."""
    slots = get_slots(FakeContext("yarn", dynamicAllocation_enabled="true", executor_cores="4"))
    assert (slots.executors, slots.per_executor, slots.total) == (2, 4, 8)
    assert slots.is_dynamic
    assert slots.is_estimate
    said = get_slots(
        FakeContext("yarn", dynamicAllocation_enabled="TRUE", executor_instances="3", registered=9)
    )
    assert (said.executors, said.is_estimate) == (3, False)
    assert not get_slots(FakeContext("yarn", executor_instances="3")).is_dynamic


def test_resumed_fit_keeps_worker_count_if_slots_are_estimated() -> None:
    """A resumed fit keeps its number of workers if the number of executors is an estimate."""
    guess = get_slots(FakeContext("yarn", dynamicAllocation_enabled="true", registered=3))
    assert choose_resume_workers(guess, 3, None) == 3
    assert choose_resume_workers(guess, 3, 8) == 8
    assert choose_resume_workers(TaskSlots(3, 1, is_dynamic=True), 3, 8) == 3


def test_idle_executors_cause_no_warning_with_dynamic_allocation() -> None:
    """With dynamic allocation (executors=0), idle executors cause no warning."""
    assert skew_warnings([10, 10], executors_used=1, executors=2) != []
    assert skew_warnings([10, 10], executors_used=1, executors=0) == []


def test_missing_initial_executors_and_low_stage_attempts_warn() -> None:
    """Warnings name missing settings: the initial executors and the limit of stage attempts."""
    unsaid, few = check_scheduling(make_conf())
    assert "set --conf spark.dynamicAllocation.initialExecutors=N" in unsaid
    assert "spark.stage.maxConsecutiveAttempts=4: the 4th executor" in few
    assert few.endswith("set --conf spark.stage.maxConsecutiveAttempts=100")
    served = {"spark.shuffle.service.enabled": "true"}
    patient = {"spark.stage.maxConsecutiveAttempts": "100"}
    assert check_scheduling(make_conf(instances="2") | served) == []
    assert check_scheduling(make_conf(instances="2") | patient) == []
    assert check_scheduling({}) == []


@pytest.mark.parametrize(
    ("said", "least"), [({}, 2), ({"maxExecutors": "1"}, 1), ({"minExecutors": "3"}, 3)]
)
def test_warning_names_least_expected_executor_count(said: dict[str, str], least: int) -> None:
    """The warning names the least number of executors that a fit expects."""
    unsaid, _ = check_scheduling(make_conf(**said))
    assert f"on the registered ones, and on at least {least};" in unsaid


def test_averaging_has_same_warnings_in_own_words() -> None:
    """Parameter averaging has the same warnings in its own words, and allows speculation."""

    def warned(conf: dict[str, str]) -> list[str]:
        return check_rounds_conf(conf, 4, ModelFootprint(1000), ParameterAveragingTrainingMaster())

    unsaid, few = warned(make_conf())
    assert "set --conf spark.dynamicAllocation.initialExecutors=N" in unsaid
    assert "the 4th executor that is removed during one round" in few
    assert few.endswith("set --conf spark.stage.maxConsecutiveAttempts=100")
    assert warned(make_conf(instances="2") | {"spark.stage.maxConsecutiveAttempts": "100"}) == []
    assert warned({"spark.speculation": "true"}) == []  # a round's tasks may run twice


def test_allocation_note_has_needed_executors_and_effect_of_fewer() -> None:
    """The note states how many executors a fit needs and, for its kind, the effect of fewer."""
    sharing = describe_allocation(5, 2, SHARED_FIT_NOTE)
    rounds = describe_allocation(5, 2, ROUNDS_FIT_NOTE)
    for note in (sharing, rounds):
        assert "this fit has 5 workers, for which Spark needs at least 3 executors" in note
    assert "executors that start late join during training" in sharing
    assert "no executor with a worker is idle" in sharing
    for of_others in ("during training", "is idle", "replaced"):
        assert of_others not in rounds
    assert "with fewer a round takes longer" in rounds
