"""Tests of users' threshold algorithms: two examples, which are one class each, and their fits."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import sparkstrom
from sparkstrom.encoding import thresholds
from sparkstrom.encoding.forms import Form
from sparkstrom.encoding.thresholds import (
    ALGORITHMS,
    AveragingThreshold,
    ThresholdState,
    step_size_count,
)
from sparkstrom.options import resolution as option_json
from sparkstrom.options import resolution as settings
from sparkstrom.options.gradient_sharing import SharedTrainingMaster
from tests.unit.encoding.encoding_worker import Worker

N = 2000


@dataclass(frozen=True)
class DecreasingThreshold:
    """A threshold that decreases with every message, and has no more methods than it must."""

    tau_initial: float

    def next_tau(self, state: ThresholdState, sent_fraction: float | None) -> ThresholdState:
        return {"tau": state["tau"] * 0.75 if state else self.tau_initial}


@dataclass(frozen=True)
class ConstantFractionThreshold:
    """A threshold with a wanted fraction, lowered to its minimum in slow rounds; up to 4 tau."""

    sent_fraction_min: float
    sent_fraction_max: float
    levels: int = 3

    def next_fraction(self, fraction: float, round_s: float, step_s: float) -> float:
        return self.sent_fraction_min if round_s > 1 else fraction

    def next_tau(self, state: ThresholdState, sent_fraction: float | None) -> ThresholdState:
        return state or {"tau": 0.0}


class Regression:
    """A least-squares fit by gradient descent on local, with a remote replica."""

    def __init__(self, threshold: Any) -> None:
        assert SharedTrainingMaster(threshold=threshold).threshold is threshold
        self.worker = Worker(threshold, n=N)
        self.encoder = self.worker.encoder
        self.wanted = np.random.default_rng(1).normal(0, 1, N).astype(np.float32)
        self.forms: list[Form] = []
        self.sent: list[float] = []

    def step(self) -> None:
        made = self.worker.learn(np.float32(0.2) * (self.wanted - self.worker.local))
        assert made is not None
        self.forms.append(made.form)
        self.sent.append(made.sent_fraction)

    def loss(self) -> float:
        return float(((self.worker.elsewhere - self.wanted) ** 2).mean())


def test_custom_threshold_with_only_next_tau_trains() -> None:
    """A threshold that only computes the next tau trains a model."""
    fit, taus = Regression(DecreasingThreshold(0.5)), []
    for _ in range(16):
        fit.step()
        taus.append(fit.encoder.tau)
    assert taus == [0.5 * 0.75**step for step in range(16)]
    assert fit.loss() < 0.1
    assert fit.encoder.state()["threshold_tau"] == taus[-1]


def test_custom_threshold_with_next_fraction_follows_link() -> None:
    """A threshold with next_fraction trains a model, and sends less on a slow link."""
    fit = Regression(ConstantFractionThreshold(0.01, 0.2))
    for _ in range(40):
        fit.step()
    assert fit.loss() < 1e-4
    assert Form.LEVELS in fit.forms
    assert np.mean(fit.sent) == pytest.approx(0.2, rel=0.25)
    fit.encoder.follow_link(round_s=9.0, step_s=0.1)
    fit.step()
    assert fit.sent[-1] == pytest.approx(0.01, rel=0.5)
    assert fit.encoder.state()["wanted"] == 0.01


def test_step_size_count_depends_on_levels_attribute_not_class() -> None:
    """The number of step sizes depends on the attribute ``levels``, not on the class."""
    assert [
        step_size_count(one)
        for one in (DecreasingThreshold(1.0), ConstantFractionThreshold(0.1, 0.2))
    ] == [1, 3]


def test_built_in_thresholds_are_exported_saved_and_parsed() -> None:
    """All built-in algorithms are exported, saved, and read from configurations."""
    ours = {
        value
        for value in vars(thresholds).values()
        if inspect.isclass(value) and hasattr(value, "__dataclass_fields__")
    }
    assert {*ALGORITHMS, AveragingThreshold} == ours  # the last is a part of "auto"
    for algorithm in ALGORITHMS:
        name = algorithm.__name__
        assert getattr(sparkstrom, name) is algorithm
        assert option_json.CLASSES[name] is algorithm
        read = settings.resolve(
            SharedTrainingMaster(), {"spark.sparkstrom.threshold": f"{name}(0.01)"}, {}
        )
        assert type(read.threshold) is algorithm
