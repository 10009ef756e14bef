"""Tests of accuracy warnings: at the limit there is none; beyond it, a warning advises a remedy."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from sparkstrom.encoding.tau import WarmUp
from sparkstrom.encoding.thresholds import (
    ALGORITHMS,
    AdaptiveThreshold,
    AutoThreshold,
    FixedThreshold,
    TargetSparsityThreshold,
)
from sparkstrom.fit import strategy as module
from sparkstrom.fit.accuracy_warnings import (
    FitStatistics,
    accuracy_warnings,
    collect_statistics,
    density_warnings,
    momentum_warnings,
    staleness_warnings,
)
from sparkstrom.models.dense import DenseNetwork
from sparkstrom.models.momentum_scaling import MomentumChange
from sparkstrom.models.updaters import Adam, Nesterov, Sgd
from sparkstrom.options.gradient_sharing import SharedTrainingMaster
from tests.unit.spark.test_summary import STATS, outcome

# Statistics of the quickstart's fit.
HEALTHY = FitStatistics(
    workers=4,
    minibatches=1920,
    publications=296,
    sent_fraction=1e-2,
    tau=8e-4,
    staleness=6.3,
    waiting=192,
    clipped_share=0.0,
)
WAITS = replace(HEALTHY, waiting=961)  # more than half of the fit
AUTO = SharedTrainingMaster()
WORKER = SharedTrainingMaster(horizon="worker")


def test_healthy_fit_has_no_warnings() -> None:
    assert momentum_warnings(AUTO, DenseNetwork([2, 2], updater=Nesterov(0.1, 0.9)), HEALTHY) == []
    assert staleness_warnings(AUTO, HEALTHY) == density_warnings(AUTO, HEALTHY) == []


@pytest.mark.parametrize(
    ("updater", "workers", "acting"),
    [
        (Nesterov(0.1, 0.9), 2, None),
        (Nesterov(0.1, 0.9), 3, "0.965"),
        (Adam(1e-3), 8, "0.987"),
        (Nesterov(0.1, 0.9**8), 8, None),  # lowered by the user, it acts like 0.9
        (Nesterov(0.1, 0.94**8), 8, None),
        (Nesterov(0.1, 0.96**8), 8, "0.96"),
        (Sgd(0.1), 8, None),
    ],
)
def test_strong_momentum_with_worker_horizon_warns(
    updater: Any, workers: int, acting: str | None
) -> None:
    """With horizon="worker", momentum is too strong if it acts like more than 0.95."""
    model, facts = DenseNetwork([2, 2], updater=updater), replace(HEALTHY, workers=workers)
    assert momentum_warnings(AUTO, model, facts) == []
    found = momentum_warnings(WORKER, model, facts)
    if acting is None:
        assert found == []
        return
    (text,) = found
    assert f"on {workers} workers it acts like {acting} on one machine" in text
    assert "horizon='fit'" in text


def test_model_without_horizons_has_no_momentum_warning() -> None:
    """A model without ``horizons`` gets no warning about momentum."""
    assert momentum_warnings(WORKER, object(), HEALTHY) == []  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        ({"max_staleness": None}, "set max_staleness='auto' (it was None)"),
        ({"max_staleness": 2}, "set max_staleness='auto' (it was 2)"),
        ({"publish_every": 4}, "set publish_every='auto' (it was 4)"),
        ({"publish_every": 1}, "a larger batch_size_per_worker, fewer workers or max_lead=1"),
        ({}, "a larger batch_size_per_worker, fewer workers or max_lead=1"),
    ],
)
def test_staleness_above_30_minibatches_warns(options: Any, remedy: str) -> None:
    """A staleness above 30 minibatches causes a warning, whose remedy depends on the options."""
    master = SharedTrainingMaster(**options)
    assert staleness_warnings(master, replace(HEALTHY, staleness=30.0)) == []
    (text,) = staleness_warnings(master, replace(HEALTHY, staleness=30.4))
    assert "late: 30 minibatches of the other workers on average, 7.6 rounds of 4 workers" in text
    assert "above 30 accuracy suffers" in text
    assert remedy in text


def test_staleness_limit_is_1_5_rounds_with_32_workers() -> None:
    """With 32 workers, the limit of staleness is 1.5 rounds, which are 48 minibatches."""
    many = replace(HEALTHY, workers=32)
    assert staleness_warnings(AUTO, replace(many, staleness=48.0)) == []
    assert staleness_warnings(AUTO, replace(many, staleness=49.0)) != []


def test_single_worker_has_no_staleness_warning() -> None:
    """A single worker gets no warning about staleness."""
    assert staleness_warnings(AUTO, replace(HEALTHY, workers=1, staleness=99.0)) == []


def test_clipping_above_10_percent_warns() -> None:
    """A warning states which share residual clipping discarded, if it is more than 10%."""
    assert density_warnings(AUTO, replace(HEALTHY, clipped_share=0.1)) == []
    (text,) = density_warnings(AUTO, replace(HEALTHY, clipped_share=0.52, sent_fraction=0.9))
    assert "residual clipping discarded 52% of what was learned" in text
    assert "tau (0.0008 at the end)" in text
    assert "clip less, as with residual_post_processor=" in text  # threshold is already "auto"
    fixed = SharedTrainingMaster(threshold=FixedThreshold(1e-3))
    (text,) = density_warnings(fixed, replace(HEALTHY, clipped_share=0.52, sent_fraction=0.9))
    assert "threshold='auto'" in text


def test_auto_threshold_is_not_recommended_if_already_set() -> None:
    """With threshold='auto', no warning recommends it, and no sent fraction is too large."""
    for fit in (replace(WAITS, clipped_share=0.5), replace(WAITS, publications=3)):
        (text,) = density_warnings(AUTO, fit)
        assert "threshold='auto'" not in text
    assert density_warnings(AUTO, replace(HEALTHY, sent_fraction=0.5)) == []


def test_short_fit_warning_has_at_most_35_words() -> None:
    """The warning that a fit was too short has at most 35 words."""
    (text,) = density_warnings(AUTO, replace(WAITS, publications=5))
    assert len(text.split()) <= 35


@pytest.mark.parametrize(
    ("threshold", "most"),
    [
        (AdaptiveThreshold(sent_fraction_max=2e-2), 1e-1),
        (TargetSparsityThreshold(sent_fraction_target=1e-3), 5e-3),
        (FixedThreshold(1e-3), 5e-2),
    ],
)
def test_sent_fraction_above_5_times_target_warns(threshold: Any, most: float) -> None:
    """A sent fraction of more than 5 times the threshold algorithm's target causes a warning."""
    master = SharedTrainingMaster(threshold=threshold)
    above = replace(HEALTHY, sent_fraction=1.01 * most)
    assert density_warnings(master, replace(HEALTHY, sent_fraction=most)) == []
    (text,) = density_warnings(master, above)
    assert f"sent {1.01 * most:.2g} of all parameters" in text
    assert "a larger tau (it was 0.0008 at the end)" in text
    assert (
        density_warnings(master, replace(above, publications=9.9)) == []
    )  # tau had no time to rise
    warm = SharedTrainingMaster(threshold=threshold, warm_up=WarmUp(100))
    assert density_warnings(warm, above) == []  # a warm-up sends more on purpose


def test_small_sent_fraction_warns_only_if_updates_wait_long() -> None:
    """A small sent fraction causes a warning only if changes wait long in residuals."""
    master = SharedTrainingMaster(threshold=TargetSparsityThreshold(1.0))
    below, enough = replace(WAITS, sent_fraction=1.9e-4), 1e9
    (text,) = density_warnings(master, below)
    assert "sent 0.00019 of all parameters instead of 0.001: use a smaller tau" in text
    assert (
        density_warnings(master, replace(below, waiting=960)) == []
    )  # changes did not wait long: the gradient is sparse
    at_bound = replace(below, sent_fraction=2e-4, publications=enough)
    (text,) = density_warnings(master, at_bound)
    assert "instead of" not in text


def test_custom_threshold_without_target_has_no_density_warning() -> None:
    """A user's threshold algorithm without a target causes no warning about the sent fraction."""

    class Own:
        def next_tau(self, state: Any, sent_fraction: float | None) -> Any:
            return {"tau": 1.0}

        def merge(self, states: Any) -> Any:
            return {"tau": 1.0}

    master = SharedTrainingMaster(threshold=Own())
    assert density_warnings(master, replace(HEALTHY, sent_fraction=0.9)) == []


def test_custom_threshold_is_compared_with_its_wanted_fractions() -> None:
    """The sent fraction is compared with ``wanted_fractions`` of a user's threshold algorithm."""

    class Aimed:
        wanted_fractions = (1e-3, 1e-2)

        def next_tau(self, state: Any, sent_fraction: float | None) -> Any:
            return {"tau": 1.0}

    master = SharedTrainingMaster(threshold=Aimed())
    (text,) = density_warnings(master, replace(HEALTHY, sent_fraction=0.9))
    assert "sent 0.9 of all parameters instead of 0.001 to 0.01" in text


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_builtin_thresholds_have_wanted_fractions(algorithm: Any) -> None:
    """All built-in algorithms have target fractions; without them, this warning is never given."""
    made = algorithm(1e-3) if algorithm is FixedThreshold else algorithm()
    low, high = made.wanted_fractions
    assert 0 < low <= high < 1


@pytest.mark.parametrize(
    ("threshold", "needed"),
    [("auto", 50), (AutoThreshold(levels=1), 100), (AdaptiveThreshold(), 100)],
)
def test_fit_with_too_few_publications_warns(threshold: Any, needed: int) -> None:
    """A fit whose changes wait is too short if workers sent each parameter less than once."""
    master = SharedTrainingMaster(threshold=threshold)
    (text,) = density_warnings(master, replace(WAITS, publications=needed - 1))
    assert f"each sent {needed - 1} updates (aim for {needed})" in text
    assert "train longer, use fewer workers, or reduce" in text
    enough = density_warnings(master, replace(WAITS, publications=needed))
    assert not any("too short" in text for text in enough)
    assert density_warnings(master, replace(WAITS, publications=9, waiting=960)) == []


def test_updates_waiting_half_of_fit_warn_of_small_tau() -> None:
    """If changes wait for more than half of the fit, a warning states that tau is too small."""
    adaptive = SharedTrainingMaster(threshold=AdaptiveThreshold())
    assert density_warnings(adaptive, replace(WAITS, waiting=960)) == []
    (text,) = density_warnings(adaptive, WAITS)
    assert "waited in residuals for 961 of 1,920 minibatches on average: tau (0.0008" in text
    assert "use threshold='auto'" in text
    assert density_warnings(AUTO, WAITS) == []


def test_fit_that_sent_nothing_has_no_density_warning() -> None:
    """A fit that sent nothing causes no density warning; ``fit.summary`` warns about it."""
    nothing = replace(WAITS, sent_fraction=0.0, publications=0.0)
    assert density_warnings(AUTO, nothing) == []


def test_statistics_include_minibatches_of_earlier_fits() -> None:
    """Statistics include the minibatches of the earlier fits that this fit continued."""
    made = collect_statistics(outcome(), 100, 60)  # 60 earlier minibatches, 20 of this fit
    assert made == FitStatistics(
        workers=2,
        minibatches=80,
        publications=4 * 10,
        sent_fraction=0.05,
        tau=pytest.approx(0.02),
        staleness=1.5,
        waiting=2 * 1.5,
        clipped_share=0.25,
    )
    nothing = collect_statistics(outcome(stats={}, minibatches=0, rows=[0, -1]), 100, 0)
    assert nothing == FitStatistics(0, 0, 0.0, 0.0, 0.0, 1.5, 0.0, 0.0)


def test_warnings_are_returned_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """All warnings of a fit are returned, and each of them is logged once."""
    model = DenseNetwork([2, 2], updater=Nesterov(0.1, 0.9))
    late = outcome(
        rows=[5] * 4,
        stats={1: STATS | {"mass_clipped": 3.0}},
        staleness=Counter(),
        staleness_minibatches=31.0,
    )
    with caplog.at_level(logging.WARNING, module.__name__):
        found = accuracy_warnings(WORKER, model, late, 0)
    assert [text.split()[0] for text in found] == ["momentum", "updates", "residual"]
    assert caplog.messages == found


def test_custom_horizons_text_is_not_parsed() -> None:
    """``horizons`` of a user's model may contain any text; it is not parsed, even with arrows."""

    class Own:
        def keep_pace(self, workers: int, minibatches: int, counted: int) -> None:
            pass

        def horizons(self, workers: int) -> dict[str, str]:
            return {"rate": "linear -> cosine"}

    many = replace(HEALTHY, workers=8)
    assert momentum_warnings(WORKER, Own(), many) == []  # type: ignore[arg-type]


def test_momentum_change_keeps_exact_momentum() -> None:
    """The exact momentum is kept: with six digits, 0.9999999 would be written as 1."""
    model = DenseNetwork([2, 2], updater=Nesterov(0.1, 0.99999994))
    change = copy.deepcopy(model.horizons(3)["momentum"])
    assert change == "1 -> 1"
    assert isinstance(change, MomentumChange)
    assert change.momenta == (0.99999994,)
