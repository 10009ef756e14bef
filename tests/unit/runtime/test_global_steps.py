"""Global steps: the number of workers and of the fit's minibatches that a model gets per step."""

from __future__ import annotations

from typing import Any

import pytest

from sparkstrom.models.base import FitLength
from sparkstrom.models.dense import DenseNetwork
from sparkstrom.protocol.common.events_and_effects import Command, Directive
from sparkstrom.runtime.trainer_thread import GlobalStepEstimator
from tests.unit.runtime.trainer_harness import N, Script, TrainerHarness


class PaceRecordingModel(DenseNetwork):
    """A model that records the arguments of ``keep_pace``."""

    def __init__(self) -> None:
        super().__init__([2, N // 3])
        self.told: list[tuple[int, int, int]] = []

    def keep_pace(self, workers: int, minibatches: int, counted: int) -> None:
        self.told.append((workers, minibatches, counted))


class LengthRecordingModel(PaceRecordingModel):
    """A model that also records the fit's length."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[FitLength] = []

    def set_fit_length(self, length: FitLength) -> None:
        self.lengths.append(length)


def train(
    workers: int = 1, minibatches: int = 0, expected: int = 0, summed: int | None = None
) -> Directive:
    """Return a directive to train, with a report of the master about the whole fit."""
    return Directive(
        Command.TRAIN,
        workers=workers,
        summed=summed,
        minibatches=minibatches,
        minibatches_expected=expected,
    )


def estimate_pace(*commands: Directive, before: int = 0) -> list[tuple[int, int, int]]:
    """Return what a model gets if it takes one step per directive."""
    model = PaceRecordingModel()
    pacemaker = GlobalStepEstimator(model, before)
    for steps, command in enumerate(commands):
        pacemaker.update_model(command, steps)
    return model.told


def test_estimate_between_reports_assumes_equal_speed_of_workers() -> None:
    """Between two reports, each worker counts one minibatch per step of this worker."""
    assert estimate_pace(train(4), train(4), train(4, 6), train(4, 6)) == [
        (4, 0, 0), (4, 4, 0), (4, 6, 6), (4, 10, 6),
    ]  # fmt: skip


def test_summed_worker_limit_does_not_change_minibatch_estimate() -> None:
    """A limit on summed workers caps the number of workers, but not the estimate."""
    assert estimate_pace(*(train(workers, summed=8) for workers in (12, 12, 4))) == [
        (8, 0, 0), (8, 12, 0), (4, 24, 0),
    ]  # fmt: skip


def test_estimate_does_not_fall_after_lower_report() -> None:
    """The estimate does not fall if a report is lower."""
    words = [train(4), train(4), train(4), train(4, 5), train(4, 5), train(4, 12)]
    assert [about for _, about, _ in estimate_pace(*words)] == [0, 4, 8, 8, 9, 12]


def test_estimate_grows_by_number_of_workers_still_training() -> None:
    """The estimate grows by the number of workers that still train."""
    words = [*[train(4)] * 3, *[train(1)] * 3]
    assert [about for _, about, _ in estimate_pace(*words)] == [0, 4, 8, 12, 13, 14]


@pytest.mark.parametrize("resumed", [0, 40])
def test_single_worker_counts_own_steps_despite_late_reports(resumed: int) -> None:
    """A report of 2 minibatches arrives after the third step, and one of 3 after the fifth."""
    words = [train(1, resumed + reported) for reported in (0, 1, 1, 2, 2, 3)]
    assert [about - resumed for _, about, _ in estimate_pace(*words)] == [0, 1, 2, 3, 4, 5]


def test_single_worker_adopts_report_above_own_estimate() -> None:
    """A worker that trains alone takes over a report that exceeds its own estimate."""
    words = [train(1), train(1, 1), train(1, 9), train(1, 10), train(1, 10)]
    assert [about for _, about, _ in estimate_pace(*words)] == [0, 1, 9, 10, 11]


def test_minibatches_of_earlier_fits_are_added() -> None:
    """The minibatches of earlier fits are added."""
    assert estimate_pace(train(2), train(2, 3), before=100) == [(2, 100, 100), (2, 103, 103)]


def run_trainer(script: Script, **schedule: Any) -> list[tuple[int, int, int]]:
    """Return what a model gets from a trainer that plays this script."""
    model = PaceRecordingModel()
    TrainerHarness(model, script, **schedule).run()
    return model.told


def test_trainer_updates_model_pace_before_each_step() -> None:
    script: Script = [([], train(4)), ([], train(4, 3)), ([], train(3, 9))]
    assert run_trainer(script, minibatches_before=20) == [(4, 20, 20), (4, 23, 23), (3, 29, 29)]


def test_model_gets_no_estimates_without_minibatches_before() -> None:
    """Without ``minibatches_before``, the model counts its own steps and gets no estimates."""
    assert run_trainer([([], train(4))]) == []


@pytest.mark.parametrize(
    ("before", "expected", "minibatches"), [(30, 21, 21), (30, 0, 2 * 3 * 4), (None, 21, 2 * 3)]
)
def test_trainer_sets_fit_length_of_model(
    before: int | None, expected: int, minibatches: int
) -> None:
    """The length is the master's count, else 4 workers x own minibatches, or own ones alone."""
    model = LengthRecordingModel()
    script: Script = [([], train(4, 0, expected)), ([], train(4, 3, 99))]
    TrainerHarness(model, script, minibatches_before=before, start=(5, 30)).run()
    assert model.lengths == [FitLength(2, minibatches, 5, 30)]
