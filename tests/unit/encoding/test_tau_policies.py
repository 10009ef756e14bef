"""Tests of tau choosers: what each wrapper changes in its arguments and in its result."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest

from sparkstrom.encoding.tau import (
    ClampedTau,
    FeedbackTau,
    NextPublication,
    PublicationTarget,
    SampledTau,
    ShakeUpTau,
    WarmUp,
    WarmUpTau,
    create_tau_chooser,
    sample_tau,
)
from sparkstrom.encoding.thresholds import (
    AdaptiveThreshold,
    AutoThreshold,
    FixedThreshold,
    ThresholdState,
)

LIMITS = (1e-6, 10.0)
N = 1_000_000  # parameters


def find_no_tau(fraction: float) -> None:
    """Return None, as if all residuals were 0."""


def inverse(fraction: float) -> float:
    """Return the tau that this fraction of the residuals reaches: 1e-3 / fraction."""
    return 1e-3 / fraction


def ahead(number: int = 1, **known: Any) -> NextPublication:
    """Return the arguments for a publication, with the changes ``known``."""
    return NextPublication(number, **({"sent_fraction": None, "tau_reached_by": inverse} | known))


@dataclass
class RecordingChooser:
    """An inner chooser that records its last argument."""

    tau: float = 0.5
    last: NextPublication | None = None

    def next_tau(self, state: ThresholdState, ahead: NextPublication) -> PublicationTarget:
        self.last = ahead
        return PublicationTarget({**state, "tau": self.tau}, wanted=0.25)


def test_feedback_tau_adapts_to_last_sent_fraction() -> None:
    """Tau adapts to the last sent fraction, unless that is not to be used as feedback."""
    stage = FeedbackTau(AdaptiveThreshold(0.5, 0.1, 0.2, 0.5))
    assert stage.next_tau({}, ahead()) == PublicationTarget({"tau": 0.5})
    denser = ahead(2, sent_fraction=0.9)
    assert stage.next_tau({"tau": 0.5}, denser).tau == 1.0
    assert (
        stage.next_tau({"tau": 0.5}, ahead(2, sent_fraction=0.9, use_as_feedback=False)).tau == 0.5
    )


def test_feedback_tau_is_sampled_for_prescribed_fraction() -> None:
    """If a warm-up prescribes a fraction, tau is sampled for this fraction."""
    stage = FeedbackTau(FixedThreshold(0.5))
    assert stage.next_tau({}, ahead(fraction=0.25)) == PublicationTarget({"tau": 4e-3})


def test_sampled_tau_starts_at_maximum_fraction_and_follows_link() -> None:
    """The wanted fraction starts at the maximum, falls on a slow link, and can be prescribed."""
    stage = SampledTau(AutoThreshold(0.1, 0.5), N)
    first = stage.next_tau({}, ahead())
    assert first == PublicationTarget({"tau": 2e-3}, wanted=0.5, is_coarse=True)
    stage.follow_link(round_s=100.0, step_s=0.01)
    assert stage.next_tau(first.state, ahead(2, sent_fraction=1e-9)).wanted == 0.1
    assert stage.next_tau(first.state, ahead(2, fraction=0.25)).wanted == 0.25


def test_loaded_fraction_is_clipped_to_bounds_of_new_threshold() -> None:
    """A loaded fraction is clipped to the bounds of the threshold that loads it."""
    slow = SampledTau(AutoThreshold(0.01, 0.5), N)
    slow.follow_link(round_s=100.0, step_s=0.01)
    for bounds, wanted in (((0.01, 0.5), 0.1), ((0.2, 0.5), 0.2), ((0.01, 0.05), 0.05)):
        stage = SampledTau(AutoThreshold(*bounds), N)
        stage.load_state(slow.state())
        assert stage.state() == {"wanted": wanted}
    fresh = SampledTau(AutoThreshold(0.01, 0.5), N)
    fresh.load_state({})  # of an encoder with another threshold
    assert fresh.state() == {"wanted": 0.5}


@pytest.mark.parametrize(("n_params", "wanted"), [(5, 0.5), (320, 0.1), (N, 0.01)])
def test_small_model_wants_at_least_32_entries_or_half(n_params: int, wanted: float) -> None:
    stage = SampledTau(AutoThreshold(0.001, 0.01), n_params)
    assert stage.next_tau({}, ahead()).wanted == wanted
    assert stage.next_tau({}, ahead(fraction=0.75)).wanted == 0.75  # a warm-up may send more


def test_last_tau_stays_if_all_residuals_are_zero() -> None:
    nothing = ahead(tau_reached_by=find_no_tau)
    kept = {"tau": 0.25, "sent_fraction": 0.1}
    assert sample_tau(nothing, 0.1, kept, FixedThreshold(1.0)) == kept
    assert sample_tau(nothing, 0.1, {}, FixedThreshold(1.0)) == {"tau": 1.0}


def test_clamped_tau_is_kept_in_state() -> None:
    """The state has the clamped tau, so that tau can leave the limit at once."""
    for tau, within in ((1e-9, 1e-6), (99.0, 10.0), (0.5, 0.5)):
        aim = ClampedTau(RecordingChooser(tau), *LIMITS).next_tau({"sent_fraction": 0.1}, ahead())
        assert aim == PublicationTarget({"tau": within, "sent_fraction": 0.1}, wanted=0.25)


def test_warm_up_prescribes_fraction_until_its_end() -> None:
    """A warm-up prescribes a fraction to the inner chooser, and none after its end."""
    inner = RecordingChooser()
    stage = WarmUpTau(inner, WarmUp(2, 0.25, 0.04))
    asked = []
    for number in (1, 2, 3):
        stage.next_tau({}, ahead(number))
        assert inner.last is not None
        asked.append(inner.last.fraction)
    assert asked == [0.25, pytest.approx(0.1), None]


def test_shake_up_divides_tau_and_gives_no_feedback() -> None:
    """A shake-up divides tau and sends all hits; the sent fraction is not feedback afterwards."""
    inner = RecordingChooser()
    stage = ShakeUpTau(inner, frequency=3)
    seen = []
    for number in (2, 3, 4, 5):
        aim = stage.next_tau({}, ahead(number))
        assert inner.last is not None
        assert aim.state == {"tau": 0.5}  # the state keeps the undivided tau
        seen.append((aim.tau, aim.wanted, inner.last.use_as_feedback))
    assert seen == [(0.5, 0.25, True), (0.5 / 3, None, True), (0.5, 0.25, False), (0.5, 0.25, True)]


def test_shake_ups_begin_after_warm_up_publications() -> None:
    """No publication up to ``after`` is shaken."""
    inner = RecordingChooser()
    stage = ShakeUpTau(inner, frequency=2, after=4)
    shaken = [number for number in range(1, 9) if stage.next_tau({}, ahead(number)).divisor > 1]
    assert shaken == [6, 8]
    stage.next_tau({}, ahead(5))
    assert inner.last is not None
    assert inner.last.use_as_feedback  # the fourth was not shaken, though 2 divides it


def test_combined_tau_chooser_has_expected_taus_and_state() -> None:
    """A chooser with warm-up, feedback and shake-ups has the expected taus and state."""
    policy = create_tau_chooser(AdaptiveThreshold(0.5, 0.1, 0.2, 0.5), LIMITS, N, WarmUp(1), 3)
    assert math.isnan(policy.tau)
    taus = []
    for sent in (0.25, 0.9, 0.9, 0.9, 0.15):
        taus.append(policy.next_tau(inverse).tau)
        policy.count(sent)
    # sampled; doubled, as 0.25 is too dense; doubled, and divided by 3; undivided; doubled
    assert taus == [4e-3, 8e-3, 16e-3 / 3, 16e-3, 32e-3]
    assert policy.tau == 32e-3
    assert policy.state() == {
        "publications": 5,
        "threshold_tau": 32e-3,
        "threshold_sent_fraction": 0.9,
        "sent_fraction": 0.15,
    }


@pytest.mark.parametrize("threshold", [AdaptiveThreshold(0.5, 0.1, 0.2, 0.5), AutoThreshold()])
@pytest.mark.parametrize("cut", [0, 1, 3])
def test_tau_chooser_continues_from_loaded_state(threshold: Any, cut: int) -> None:
    """A chooser that loads another's state has the same next targets."""

    def fresh() -> Any:
        return create_tau_chooser(threshold, LIMITS, N, WarmUp(1), 2)

    def go_on(policy: Any, count: int) -> list[PublicationTarget]:
        made = []
        for _ in range(count):
            made.append(policy.next_tau(inverse))
            policy.count(0.9)
            policy.follow_link(9.0, 0.01)
        return made

    first, second = fresh(), fresh()
    parts = go_on(first, cut)
    second.load_state(first.state())
    assert parts + go_on(second, 6 - cut) == go_on(fresh(), 6)
