"""Tests of ``benchmarks.rounds``: the figures that it computes from its probes' times."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.rounds import WARM_STEPS, Probes, SilentModel, figures, percentiles_ms, watch


def make_probe_record(**fields: Any) -> dict[str, Any]:
    """Return a probe's record with these fields."""
    return vars(Probes()) | fields


def test_commit_and_apply_times_count_from_publication() -> None:
    """With two workers, the first worker's commit 41 is the first after the warm-up."""
    late = 2 * WARM_STEPS + 1
    master = make_probe_record(
        numbered_s={"1": 0.5, str(late): 10.002}, cpu_s={"thread": 0.004, "protocol": 0.002}
    )
    first = make_probe_record(
        steps_s=[float(i) for i in range(WARM_STEPS + 3)],
        published_s=[0.0, 10.0],
        own_commits=[1, late],
        cpu_s={"origin": 0.006, "thread": 0.004},
    )
    second = make_probe_record(
        steps_s=[0.0], applied_s={str(late): 10.005}, cpu_s={"receiver": 0.001}
    )
    found = figures([master, first, second], workers=2)
    assert found["round_ms"] == [1000.0, 1000.0]
    assert found["commit_ms"] == pytest.approx([2.0, 2.0])
    assert found["applied_ms"] == pytest.approx([5.0, 5.0])
    assert (found["updates"], found["cpu_ms"]["origin"], found["cpu_ms"]["receiver"]) == (2, 3, 1)
    assert found["cpu_ms"]["master"]["thread"] == 2
    assert found["cpu_ms"]["node"]["thread"] == 1, "per update and worker"


def test_percentiles_of_no_values_are_none() -> None:
    assert percentiles_ms([]) is None


def test_a_method_that_is_watched_twice_is_counted_once() -> None:
    """If a method is watched twice, only the second watcher is called, once per call."""

    class Kind:
        calls = 0

        def work(self, step: int) -> int:
            self.calls += step
            return self.calls

    told: list[int] = []
    watch(Kind, "work", "first", lambda _, step: told.append(-step))
    watch(Kind, "work", "second", lambda _, step: told.append(step))
    one = Kind()
    assert (one.work(2), one.work(3)) == (2, 5)
    assert told == [2, 3]


def test_silent_model_step_changes_next_hundredth_of_parameters(tmp_path: Any) -> None:
    """Each step of a silent model changes the next hundredth of the parameters."""
    model = SilentModel(200, str(tmp_path))
    params = model.initial()
    model.bind(params)
    for _ in range(2):
        model.step(None)  # type: ignore[arg-type]
    assert params.tolist() == [1.0] * 4 + [0.0] * 196
