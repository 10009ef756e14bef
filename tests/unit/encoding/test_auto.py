"""Tests of AutoThreshold and AveragingThreshold: sent fractions, tied residuals, levels, link."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from sparkstrom.base.errors import UsageError
from sparkstrom.encoding.forms import Form
from sparkstrom.encoding.grid import quantum, round_coarsely
from sparkstrom.encoding.layers import Layers
from sparkstrom.encoding.residual import ResidualClipping
from sparkstrom.encoding.tau import WarmUp
from sparkstrom.encoding.thresholds import (
    AdaptiveThreshold,
    AutoThreshold,
    AveragingThreshold,
    FixedThreshold,
    TargetSparsityThreshold,
)
from tests.unit.encoding.encoding_worker import K, Worker

F32 = NDArray[np.float32]
N = 200_000
BOTH_WAYS = pytest.mark.parametrize("train_on", ["local", "replica"])


def adam_steps(count: int, n: int = N, lr: float = 1e-3) -> list[F32]:
    """Return Adam's steps for random gradients; in the first, each parameter moves by the rate."""
    random, deltas = np.random.default_rng(3), []
    first, second = np.zeros((2, n))
    for step in range(1, count + 1):
        gradient = random.normal(size=n) * 10.0 ** random.integers(-4, 0, n)
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        mean, square = first / (1 - 0.9**step), second / (1 - 0.999**step)
        deltas.append((-lr * mean / (np.sqrt(square) + 1e-8)).astype(np.float32))
    return deltas


@BOTH_WAYS
@pytest.mark.parametrize("wanted", [1e-2, 1e-3])
def test_auto_threshold_sends_wanted_fraction_from_first_adam_step(
    train_on: str, wanted: float
) -> None:
    worker = Worker(AutoThreshold(wanted, wanted), train_on)
    for delta in adam_steps(12):
        update = worker.learn(delta)
        assert update is not None
        assert 0.5 * wanted <= update.sent_fraction <= 2 * wanted


@BOTH_WAYS
@pytest.mark.parametrize("size", [1e-3, 2.0**-10, 5e-6])
def test_wanted_fraction_of_tied_residuals_is_sent_at_random(train_on: str, size: float) -> None:
    """Of equal residuals the wanted fraction is sent, chosen at random in each publication."""
    worker, learnt = Worker(AutoThreshold(), train_on), np.zeros(N, np.float64)
    signs = np.random.default_rng(1).choice([-size, size], N).astype(np.float32)
    moved = set()
    for _ in range(3):
        update = worker.learn(signs)
        learnt += signs
        assert update is not None
        assert 0.5e-2 <= update.sent_fraction <= 2e-2
        moved.add(tuple(np.flatnonzero(worker.theta).tolist()))
    np.testing.assert_allclose(worker.held(), learnt, rtol=1e-6)
    assert len(moved) == 3
    where = np.flatnonzero(worker.theta)
    assert np.histogram(where, 4, (0, N))[0].min() > 0.2 * where.size  # everywhere


def test_workers_with_tied_residuals_send_different_parameters() -> None:
    """Two workers with equal residuals choose different parameters at random."""
    sent = []
    for seed in (1, 2):
        worker = Worker(AutoThreshold())
        signs = np.random.default_rng(seed).choice([-1e-3, 1e-3], N).astype(np.float32)
        worker.learn(signs)
        sent.append(np.flatnonzero(worker.theta))
    both = np.intersect1d(*sent).size
    assert both < 0.1 * sent[0].size


def test_large_residuals_are_sent_before_tied_ones() -> None:
    """Residuals of several tau are all sent; the rest is chosen among those tied at tau."""
    worker = Worker(AutoThreshold())
    delta = np.full(N, 1e-3, np.float32)
    large = np.random.default_rng(2).choice(N, N // 200, replace=False)
    delta[large] = 5e-3
    update = worker.learn(delta)
    assert update is not None
    assert update.form is Form.LEVELS
    assert (worker.theta[large] > 0).all()
    assert update.sent_fraction == pytest.approx(1e-2, rel=0.2)


def test_layer_multipliers_apply_to_tied_residuals() -> None:
    layers = Layers((N // 2, N), (1, 4))
    worker = Worker(AutoThreshold(), layers=layers)
    delta = np.full(N, 1e-3, np.float32)
    delta[N // 2 :] = -4e-3
    update = worker.learn(delta)
    assert update is not None
    assert update.sent_fraction == pytest.approx(1e-2, rel=0.2)
    assert (worker.theta[: N // 2] > 0).sum() == pytest.approx(update.count / 2, rel=0.2)
    assert np.unique(worker.theta).size == 3
    assert worker.theta.min() == -4 * worker.theta.max()


@BOTH_WAYS
@pytest.mark.parametrize("threshold", [AutoThreshold(), FixedThreshold(1e-3, levels=4)])
def test_residual_of_several_steps_moves_by_several_tau(train_on: str, threshold: Any) -> None:
    """With publish_every=4 a residual can be four steps; levels send more than one tau of it."""
    worker, learnt = Worker(threshold, train_on), np.zeros(N, np.float64)
    delta = np.zeros(N, np.float32)
    delta[: N // 2] = 1e-4  # small, and many of them
    delta[:500] = np.linspace(1e-3, 4e-3, 500)
    for step in range(8):
        learnt += delta
        worker.learn(delta, publish=step % 4 == 3)
    tau = worker.encoder.tau
    assert worker.theta[:500].max() >= 4 * tau
    np.testing.assert_allclose(worker.held(), learnt, rtol=1e-5)
    plain = Worker(FixedThreshold(1e-3), train_on)
    for step in range(8):
        plain.learn(delta, publish=step % 4 == 3)
    assert worker.theta[:500].sum() > 2 * plain.theta[:500].sum()  # no levels


def test_step_size_is_rounded_coarsely_but_threshold_is_not() -> None:
    """Steps are rounded down to few sizes, and the threshold stays as it was sampled."""
    assert [round_coarsely(q) for q in (2, 4, 14, 16, 18, 30, 32, 34, 1046, 2**24)] == [
        2, 4, 14, 16, 16, 28, 32, 32, 1024, 2**24,
    ]  # fmt: skip
    random = np.random.default_rng(5)
    worker = Worker(AutoThreshold(levels=1))
    update = worker.learn(random.normal(0, 1e-3, N).astype(np.float32))
    assert update is not None
    assert update.form is Form.GAPS
    assert update.tau_quanta == round_coarsely(update.tau_quanta)
    assert update.tau_quanta < worker.encoder.tau / quantum(K) <= 1.25 * update.tau_quanta


@pytest.mark.flips("AutoThreshold.sent_fraction_max")
@pytest.mark.flips("AutoThreshold.sent_fraction_min")
def test_wanted_fraction_follows_link_within_its_bounds() -> None:
    auto = AutoThreshold(1e-3, 1e-2)
    step_s = 0.5
    assert auto.next_fraction(4e-3, 0.4, step_s) == 5e-3  # a fast link: a quarter more
    assert auto.next_fraction(4e-3, 0.09, 0.001) == 5e-3  # a round of 0.1 s is never too slow
    assert auto.next_fraction(4e-3, 0.125, 0.001) == pytest.approx(3.2e-3)  # in proportion
    assert auto.next_fraction(8e-3, 60.0, step_s) == pytest.approx(1.6e-3)  # a fifth at least
    assert auto.next_fraction(9e-3, 0.1, step_s) == 1e-2
    assert auto.next_fraction(1.5e-3, 9.0, step_s) == 1e-3
    assert AutoThreshold(1e-4, 1e-2).next_fraction(1.5e-3, 9.0, step_s) == pytest.approx(3e-4)
    assert AutoThreshold(1e-3, 0.1).next_fraction(9e-3, 0.1, step_s) == 9e-3 * 1.25


def test_fraction_lowered_by_slow_link_is_kept_for_next_fit() -> None:
    """Slow rounds lower the sent fraction, which an encoder's state carries to the next fit."""
    deltas = list(np.random.default_rng(8).normal(0, 1e-3, (9, N)).astype(np.float32))
    worker = Worker(AutoThreshold())
    sent = []
    for delta in deltas[:5]:
        update = worker.learn(delta)
        assert update is not None
        sent.append(update.sent_fraction)
        worker.encoder.follow_link(round_s=10.0, step_s=0.01)
    assert sent == pytest.approx([1e-2, 2e-3, 1e-3, 1e-3, 1e-3], rel=0.25)
    again = Worker(AutoThreshold())
    again.encoder.load_state(worker.encoder.state())
    update = again.learn(deltas[5])
    assert update is not None
    assert update.sent_fraction == pytest.approx(1e-3, rel=0.25)
    again.encoder.follow_link(round_s=0.01, step_s=0.01)
    update = again.learn(deltas[6])
    assert update is not None
    assert update.sent_fraction == pytest.approx(1.25e-3, rel=0.3)


@pytest.mark.parametrize("threshold", [FixedThreshold(1e-3), AdaptiveThreshold(1e-3)])
def test_fixed_and_adaptive_thresholds_ignore_link_speed(threshold: Any) -> None:
    one, other = Worker(threshold, n=1000), Worker(threshold, n=1000)
    delta = np.random.default_rng(1).normal(0, 1e-3, 1000).astype(np.float32)
    for _ in range(3):
        one.encoder.follow_link(round_s=60.0, step_s=0.01)
        assert one.learn(delta) == other.learn(delta)
    assert one.encoder.state().keys() == other.encoder.state().keys()


@pytest.mark.parametrize("aggregation", ["mean", "sqrt"])
@BOTH_WAYS
def test_changes_scaled_away_by_aggregation_are_counted(train_on: str, aggregation: str) -> None:
    """With mean or sqrt, the counter has the learned changes that theta and residual lack."""
    worker = Worker(AutoThreshold(), train_on, aggregation=aggregation, workers=3)
    learnt = np.zeros(N, np.float64)
    for delta in adam_steps(4):
        update = worker.learn(delta)
        learnt += delta
        assert update is not None
        assert update.tau_quanta == round_coarsely(update.tau_quanta)
    lost = float(np.abs(learnt - worker.held()).sum())
    assert lost == pytest.approx(worker.encoder.counters.mass_scaled_away, rel=1e-3)
    assert lost > 0.1 * worker.encoder.counters.mass_sent


@pytest.mark.parametrize("workers", [3, 4, 7])
def test_rounding_of_scaled_step_loses_nothing_from_residual(workers: int) -> None:
    """Sent and scaled-away changes are 1 : (workers - 1), although the step is rounded."""
    worker = Worker(AutoThreshold(levels=1), aggregation="mean", workers=workers)
    update = worker.learn(np.random.default_rng(5).normal(0, 1e-3, N).astype(np.float32))
    assert update is not None
    counters = worker.encoder.counters
    assert counters.mass_sent * (workers - 1) == pytest.approx(counters.mass_scaled_away, rel=1e-2)


def large_updates(worker: Worker, deltas: list[F32], **last: bool) -> list[bool]:
    """Publish all; return for each update whether it was large: 12 % of entries, of one step."""
    found = []
    for delta in deltas:
        update = worker.learn(delta, **last)
        assert update is not None
        is_large = update.sent_fraction > 0.05
        assert update.sent_fraction == pytest.approx(0.12 if is_large else 6e-3, rel=0.3)
        assert update.form is Form.GAPS or not is_large
        found.append(is_large)
    return found


@BOTH_WAYS
def test_every_eighth_averaging_update_and_the_last_are_large(train_on: str) -> None:
    worker = Worker(AveragingThreshold(), train_on, aggregation="mean", workers=4)
    deltas = list(np.random.default_rng(8).normal(0, 1e-3, (18, N)).astype(np.float32))
    assert large_updates(worker, deltas[:17]) == [number % 8 == 0 for number in range(1, 18)]
    assert large_updates(worker, deltas[17:], is_last=True) == [True]


def test_steps_of_large_update_are_twice_its_threshold() -> None:
    worker = Worker(AveragingThreshold(large_every=1), aggregation="mean", workers=4)
    update = worker.learn(np.random.default_rng(8).normal(0, 1e-3, N).astype(np.float32))
    assert update is not None
    tau = 1.555e-3  # 12 % of these changes reach this
    assert 4 * update.tau_quanta * quantum(K) == pytest.approx(2 * tau, rel=0.15)


def test_slow_link_lowers_fraction_of_large_updates() -> None:
    """A slow link lowers the fraction of large updates as it lowers the others'."""
    worker = Worker(AveragingThreshold(large_every=3), aggregation="mean", workers=4)
    for delta in np.random.default_rng(8).normal(0, 1e-3, (3, N)).astype(np.float32):
        update = worker.learn(delta)
        worker.encoder.follow_link(round_s=100.0, step_s=0.01)
    assert update is not None
    assert update.sent_fraction == pytest.approx(20 * 3e-4, rel=0.3)


def test_updates_are_large_only_with_four_or_more_workers() -> None:
    """With fewer than four workers, no update is large."""
    worker = Worker(AveragingThreshold(large_every=1), aggregation="mean", workers=3)
    sent = []
    for delta in np.random.default_rng(8).normal(0, 1e-3, (2, N)).astype(np.float32):
        update = worker.learn(delta)
        assert update is not None
        sent.append(update.sent_fraction)
        worker.encoder.set_workers(4)
    assert sent == pytest.approx([1.6e-2, 0.12], rel=0.3)


@BOTH_WAYS
def test_mean_of_large_updates_contains_common_small_change(train_on: str) -> None:
    """A common change that is small on each worker is in the mean of large updates only."""
    random, workers = np.random.default_rng(4), 32
    common = random.normal(0, 1e-4, N).astype(np.float32)
    shares = {}
    for threshold in (AutoThreshold(), AveragingThreshold(large_every=1)):
        mean = np.zeros(N)
        for _ in range(workers):
            worker = Worker(threshold, train_on, aggregation="mean", workers=workers)
            worker.learn(common + random.normal(0, 1e-3, N).astype(np.float32))
            mean += worker.theta
        shares[type(threshold)] = float(mean @ common / (common @ common))
    assert shares[AveragingThreshold] == pytest.approx(0.75, abs=0.15)
    assert shares[AutoThreshold] < 0.15


def test_warm_up_and_shake_up_updates_are_not_large() -> None:
    random = np.random.default_rng(8)
    worker = Worker(AveragingThreshold(large_every=1), workers=4, warm_up=WarmUp(1, 0.25, 0.04))
    update = worker.learn(random.normal(0, 1e-3, N).astype(np.float32), is_last=True)
    assert update is not None
    assert update.tau_quanta * quantum(K) <= worker.encoder.tau
    shaken = Worker(AveragingThreshold(large_every=1), workers=4, shake_frequency=1)
    update = shaken.learn(random.normal(0, 1e-3, N).astype(np.float32))
    assert update is not None
    assert update.tau_quanta * quantum(K) <= shaken.encoder.tau / 3


def test_model_of_20_parameters_has_large_updates() -> None:
    worker = Worker(AveragingThreshold(large_every=1), n=20, workers=4)
    update = worker.learn(np.linspace(-1, 1, 20, dtype=np.float32))
    assert update is not None
    assert (update.count, update.form) == (10, Form.GAPS)


def test_large_update_is_capped_at_a_quarter_and_needs_two_levels() -> None:
    worker = Worker(AveragingThreshold(0.1, 0.1, large_every=1), workers=4)
    update = worker.learn(np.random.default_rng(8).normal(0, 1e-3, N).astype(np.float32))
    assert update is not None
    assert update.sent_fraction == pytest.approx(0.25, rel=0.2)
    with pytest.raises(UsageError, match="levels=1: large updates need at least 2"):
        AveragingThreshold(levels=1)


def sparse_steps(count: int) -> list[F32]:
    """Return steps as of an embedding: only 5 % of the parameters change."""
    random, deltas = np.random.default_rng(9), np.zeros((count, N), np.float32)
    deltas[:, : N // 20] = random.normal(0, 1e-3, (count, N // 20))
    return list(deltas)


def uneven_steps(count: int) -> list[F32]:
    """Return steps in which 5 % of the parameters change a hundred times as much as the others."""
    random = np.random.default_rng(9)
    deltas = random.normal(0, 1e-5, (count, N)).astype(np.float32)
    deltas[:, : N // 20] *= 100
    return list(deltas)


@BOTH_WAYS
@pytest.mark.parametrize("make_steps", [sparse_steps, uneven_steps])
def test_dominant_residuals_replace_large_updates_by_denser_ones(
    train_on: str, make_steps: Any
) -> None:
    """If 5 % of residuals dominate, no update is large; from the ninth on, each has 1.6 %."""
    clipping = ResidualClipping(5.0, 5)
    worker = Worker(AveragingThreshold(), train_on, clipping=clipping, workers=4)
    sent = []
    for number, delta in enumerate(make_steps(40)):
        update = worker.learn(delta, is_last=number == 39)
        assert update is not None
        sent.append(update.sent_fraction)
    assert sent[:8] == pytest.approx([6e-3] * 8, rel=0.4)
    assert sent[8:] == pytest.approx([1.6e-2] * 32, rel=0.4)
    assert worker.encoder.counters.mass_clipped == 0


def test_clipping_after_large_update_uses_tau_of_small_updates() -> None:
    """Clipping and later updates use the tau of small updates, which large ones do not change."""
    worker = Worker(AveragingThreshold(large_every=2), clipping=ResidualClipping(5.0, 1), workers=4)
    taus = []
    for delta in np.random.default_rng(8).normal(0, 1e-3, (6, N)).astype(np.float32):
        worker.learn(delta)
        taus.append(worker.encoder.tau)
    assert worker.encoder.counters.mass_clipped == 0
    assert all(later > 0.9 * earlier for earlier, later in pairwise(taus))


def test_slow_round_of_large_update_does_not_lower_fraction() -> None:
    """A slow round of a large update does not lower the wanted fraction."""
    worker = Worker(AveragingThreshold(large_every=2), workers=4)
    deltas = np.random.default_rng(8).normal(0, 1e-3, (5, N)).astype(np.float32)
    sent = []
    for number, delta in enumerate(deltas):
        update = worker.learn(delta)
        assert update is not None
        sent.append(update.sent_fraction)
        worker.encoder.follow_link(round_s=9.0 if number % 2 else 0.01, step_s=0.01)
    assert sent == pytest.approx([6e-3, 0.12, 6e-3, 0.12, 6e-3], rel=0.3)


def test_auto_threshold_sends_own_fraction_after_warm_up() -> None:
    """After a warm-up's two publications, AutoThreshold's own fraction is sent."""
    worker = Worker(AutoThreshold(), warm_up=WarmUp(2, 0.25, 0.04))
    sent = []
    for delta in adam_steps(4):
        update = worker.learn(delta)
        assert update is not None
        sent.append(update.sent_fraction)
    assert sent == pytest.approx([0.25, 0.1, 0.01, 0.01], rel=0.5)


def test_shake_up_sends_more_and_next_update_does_not() -> None:
    """A shake-up sends more than 5 %, and the next update 1 % as before."""
    worker, sent = Worker(AutoThreshold(), shake_frequency=2), []
    for delta in np.random.default_rng(8).laplace(0, 1e-3, (4, N)).astype(np.float32):
        update = worker.learn(delta)
        assert update is not None
        sent.append(update.sent_fraction)
    assert sent[1] > 5e-2 < sent[3]
    assert sent[0] == pytest.approx(1e-2, rel=0.3) == sent[2]


def test_zero_changes_send_no_update_even_in_small_model() -> None:
    worker = Worker(AutoThreshold(), n=5)
    assert worker.learn(np.zeros(5, np.float32)) is None
    update = worker.learn(np.array([0, 1e-3, 0, -2e-3, 0], np.float32))
    assert update is not None
    assert update.count == 2
    assert worker.theta[3] < 0


@pytest.mark.flips("AutoThreshold.levels")
@pytest.mark.flips("FixedThreshold.levels")
@pytest.mark.flips("AdaptiveThreshold.levels")
@pytest.mark.flips("TargetSparsityThreshold.levels")
@pytest.mark.parametrize(
    ("make", "first"),
    [
        (AutoThreshold, {"sent_fraction_min": 0.5, "sent_fraction_max": 0.5}),
        (FixedThreshold, {"tau": 0.25}),
        (AdaptiveThreshold, {"tau_initial": 0.25}),
        (TargetSparsityThreshold, {"tau_initial": 0.25}),
    ],
)
def test_levels_limit_how_many_tau_an_entry_moves(make: Any, first: dict[str, float]) -> None:
    """With ``levels``, an entry moves by up to 2 ** (levels - 1) times tau."""
    moved = []
    for levels in (1, 2, 4):
        worker = Worker(make(**first, levels=levels), n=8)
        worker.learn(np.array([0.25, 0.5, 1, 4, -9, 0, 0, 0], np.float32))
        moved.append([round(value / 0.25) for value in worker.theta.tolist()[2:5]])
    lowest = moved[0][0]
    assert moved[0] == [lowest, lowest, -lowest]
    assert moved[1] == [2 * lowest, 2 * lowest, -2 * lowest]
    assert moved[2][1:] == [8 * lowest, -8 * lowest]


def test_tau_is_lowered_so_that_largest_level_stays_exact() -> None:
    """A tau that is too large is lowered so that its largest level is in the exact range."""
    worker = Worker(FixedThreshold(1e9, levels=2), n=40)
    update = worker.learn(np.array([2e9] + 39 * [0], np.float32))
    assert update is not None
    assert update.tau_quanta == 2**21
    assert worker.theta[0] == 2 * 2**21 * quantum(K)


@pytest.mark.parametrize(
    ("make", "changes"),
    [
        (AutoThreshold, {"sent_fraction_min": 0.0}),
        (AutoThreshold, {"sent_fraction_min": 0.1}),
        (AutoThreshold, {"sent_fraction_max": 1.0}),
        (AutoThreshold, {"levels": 0}),
        (AutoThreshold, {"levels": 5}),
        (AutoThreshold, {"levels": True}),
        (AdaptiveThreshold, {"levels": 1.5}),
    ],
)
def test_invalid_threshold_option_is_refused_by_name(make: Any, changes: dict[str, Any]) -> None:
    ((name, value),) = changes.items()
    with pytest.raises(UsageError, match=f"{name}={value}"):
        make(**changes)
