"""Tests of the figures that are computed from a trial's events and samples."""

from __future__ import annotations

import pytest

from benchmarks.slow_link.figures import figures, score, thinned, used
from benchmarks.slow_link.running import Observed, Sample
from benchmarks.slow_link.trial import Trial, first_held

TRIAL = Trial(
    system="dense",
    rate=1e-3,
    seed=0,
    workers=2,
    widths=(8,),
    optimizer="adam",
    epochs=1,
    limit_s=120.0,
    wanted=0.9,
)


def event(name: str, at_s: float, **values: object) -> dict[str, object]:
    return {"event": name, "trial": TRIAL.rate, "at_s": at_s, **values}


def evaluated(at_s: float, accuracy: float, minibatches: int) -> dict[str, object]:
    return event("evaluated", at_s, accuracy=accuracy, minibatches=minibatches)


def sample(at_s: float, tx: tuple[int, int], cpu_s: float) -> Sample:
    return Sample(at_s, tx, (tx[1], tx[0]), cpu_s)


def make_observation() -> Observed:
    """Return a trial launched at 100 s that began at 110 s and ended at 130 s."""
    return Observed(
        events=[
            event("began", 110.0),
            event("copied", 112.0, minibatches=4),
            event("ended", 130.0, minibatches=40),
            evaluated(112.0, 0.5, 4),
            evaluated(114.0, 0.95, 8),
            evaluated(116.0, 0.8, 12),
            evaluated(118.0, 0.9, 16),
            evaluated(120.0, 0.92, 20),
            evaluated(122.0, 0.91, 24),
            evaluated(130.0, 0.93, 40),
        ],
        samples=[
            sample(100.0, (0, 0), 0.0),
            sample(110.0, (1000, 0), 5.0),
            sample(130.0, (5000, 2000), 15.0),
            sample(150.0, (9000, 9000), 99.0),
        ],
        launched_s=100.0,
    )


def test_accuracy_is_held_after_three_consecutive_values() -> None:
    """An accuracy is held from the first of three consecutive values that reach it."""
    assert first_held([0.5, 0.97, 0.96, 0.97, 0.98, 0.99, 0.2], 0.97) == 3
    assert first_held([0.97, 0.97], 0.97) is None
    assert first_held([0.97, 0.97, 0.9, 0.97, 0.97], 0.97) is None
    assert first_held([0.97, 0.97, 0.97], 0.97) == 0
    assert first_held([], 0.97) is None
    assert first_held([0.1, 0.97], 0.97, times=1) == 1


def test_figures_follow_from_events_and_samples() -> None:
    found = figures(TRIAL, make_observation())
    assert found["seconds_to"] == 8.0  # at 118, the first of three
    assert found["steps_to"] == 8.0
    assert (found["startup_s"], found["seconds"], found["steps"]) == (10.0, 20.0, 20.0)
    assert (found["accuracy"], found["accuracy_best"]) == (0.93, 0.95)
    assert found["ms_per_step"] == 1000.0
    assert found["cpu_ms_per_step"] == 250.0  # 10 s of 40 minibatches
    assert (found["bytes"], found["bytes_training"]) == (7000, 6000)
    assert found["bytes_to"] == 2400  # 8 of 20 seconds
    assert (found["bytes_driver"], found["bytes_driver_training"]) == (5000, 4000)
    assert found["bytes_driver_received"] == 2000
    assert found["ended"] == "epochs"


def test_trial_stopped_at_limit_has_no_time_to_accuracy() -> None:
    """A trial that was stopped at its limit before it held the accuracy has no time to it."""
    cut = make_observation()
    cut.events[2] = event("stopped", 231.0)
    del cut.events[6:]
    found = figures(TRIAL, cut)
    assert found["seconds_to"] is None
    assert found["bytes_to"] is None
    assert found["ended"] == "limit"
    assert found["steps"] == 6.0  # up to the last evaluation


def test_failed_trial_has_its_error_in_figures() -> None:
    """A failed trial's error is in its figures."""
    failed = make_observation()
    failed.events[2] = event("ended", 130.0, minibatches=0, error="TrainingError: none")
    assert figures(TRIAL, failed)["ended"] == "TrainingError: none"


def test_trial_without_steps_has_no_time_per_step() -> None:
    stuck = make_observation()
    stuck.events = [event("began", 110.0), event("stopped", 130.0)]
    found = figures(TRIAL, stuck)
    assert (found["steps"], found["ms_per_step"], found["cpu_ms_per_step"]) == (0.0, None, None)
    assert found["accuracy"] is None


def test_trial_that_never_began_has_its_log_in_figures() -> None:
    """A trial that never began has its log in its figures."""
    found = figures(TRIAL, Observed(log="no such module"))
    assert (found["seconds_to"], found["ended"]) == (None, "it did not begin")
    assert found["log"] == "no such module"


def test_counters_are_interpolated_between_samples() -> None:
    """Counters are interpolated linearly between samples."""
    samples = make_observation().samples
    assert used(samples, 105.0, 120.0).tx == (2500, 1000)
    assert used(samples, 0.0, 1000.0).tx == (9000, 9000)
    assert used(samples, 120.0, 120.0).cpu_s == 0.0


@pytest.mark.parametrize("points", [0, 1, 59, 60, 61, 1000])
def test_thinned_curve_keeps_last_point(points: int) -> None:
    """A thinned curve has at most 60 points, and the last point."""
    curve = [(float(i), 0.5, 2.0 * i) for i in range(points)]
    kept = thinned(curve)
    assert len(kept) <= 60
    assert kept[-1:] == ([[points - 1.0, 0.5, 2.0 * (points - 1)]] if points else [])


def test_learning_rate_that_learns_sooner_scores_higher() -> None:
    """A learning rate whose accuracy rises sooner has a higher score."""
    total = TRIAL.steps * TRIAL.workers

    def scored(*points: tuple[float, float]) -> float:
        events = [
            evaluated(100.0 + i, a, round(part * total)) for i, (part, a) in enumerate(points)
        ]
        return score(TRIAL, [event("began", 100.0), *events])

    soon, late = scored((0.5, 0.9), (1.0, 0.9)), scored((0.5, 0.1), (1.0, 0.9))
    assert soon == pytest.approx(0.675, abs=0.01)
    assert late < soon
    assert scored((0.5, 0.9)) == pytest.approx(0.225, abs=0.01)  # ended early
    assert score(TRIAL, []) == 0.0
