"""Tests of imported networks' learning rate schedules, and of truncated BPTT."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkstrom.models import DenseNetwork, from_dl4j
from sparkstrom.models.base import Batch, from_description
from sparkstrom.models.dl4j import NoDl4jNetwork, NotImported
from tests.conformance.dl4j_files import (
    CONFIG,
    LABELS,
    X,
    draw_normal,
    f,
    gradients,
    layer,
    network,
    output,
    write,
)


def test_iteration_schedule_continues_at_iteration_count(tmp_path: Path) -> None:
    """A schedule by iteration continues at the file's iterationCount (3)."""
    w, b = draw_normal(1, 3, 4), draw_normal(2, 4)
    schedule = {"@class": "org.nd4j.linalg.schedule.StepSchedule", "scheduleType": "ITERATION",
                "initialValue": 1.0, "decayRate": 0.5, "step": 2.0}  # fmt: skip
    sgd = {"@class": CONFIG + "Sgd", "learningRate": 1.0, "learningRateSchedule": schedule}
    model = from_dl4j(write(tmp_path / "s.zip", network(output(3, 4, iupdater=sgd)), f(w), b))
    model.bind(model.initial())
    for rate in (0.5, 0.25, 0.25, 0.125):  # iterations 3 to 6
        grad_w, grad_b = gradients(w, b)
        w, b = w - rate * grad_w, b - rate * grad_b
        model.step(Batch(X, LABELS))
    np.testing.assert_allclose(model.module.state_dict()["layers.0_layer0.bias"], b, atol=1e-5)


def test_epoch_schedule_starts_at_epoch_count(tmp_path: Path) -> None:
    """A schedule by epoch starts at the file's epochCount; a copy gets the current rate.

    A rate without a schedule (the biases') stays constant.
    """
    w, b = draw_normal(1, 3, 4), draw_normal(2, 4)
    schedule = {"@class": "x.MapSchedule", "scheduleType": "EPOCH",
                "values": {"0": 1.0, "3": 0.5, "4": 0.25}}  # fmt: skip
    sgd = {"@class": CONFIG + "Sgd", "learningRate": 1.0}
    by_epoch = {**sgd, "learningRateSchedule": schedule}
    told = network(output(3, 4, iupdater=by_epoch, biasUpdater=sgd), epochCount=2)
    model = copy.deepcopy(from_dl4j(write(tmp_path / "e.zip", told, f(w), b)))
    model.bind(model.initial())
    for epoch, rate in ((0, 1.0), (0, 1.0), (1, 0.5), (1, 0.5), (2, 0.25), (5, 0.25)):
        grad_w, grad_b = gradients(w, b)
        w, b = w - rate * grad_w, b - grad_b
        model.set_position(epoch, 0, 2)
        model.step(Batch(X, LABELS))
    state = model.module.state_dict()
    np.testing.assert_allclose(state["layers.0_layer0.weight"].numpy().T, w, atol=1e-5)
    np.testing.assert_allclose(state["layers.0_layer0.bias"], b, atol=1e-5)
    again = from_description(model.describe())
    again.bind(model.initial())
    again.load_updater_state(model.updater_state())
    assert again.updater_state()["groups/0/lr"] == 0.25
    told["epochCount"] = -1
    with pytest.raises(NoDl4jNetwork, match="epochCount=-1"):
        from_dl4j(write(tmp_path / "n.zip", told, f(w), b))


def test_momentum_and_unknown_schedules_are_refused(tmp_path: Path) -> None:
    """Schedules of momentum (momentumISchedule in DL4J's files) and unknown ones are refused."""
    fixed = {"@class": "x.FixedSchedule", "value": 0.5}
    moved = {"@class": CONFIG + "Nesterovs", "learningRate": 0.1, "momentum": "NaN"}
    for name in ("momentumISchedule", "momentumSchedule"):
        told = network(output(3, 4, iupdater={**moved, name: fixed}))
        path = write(tmp_path / "m.zip", told, draw_normal(1, 16))
        with pytest.raises(NotImported, match="momentumSchedule of outputlayer 'layer0'"):
            from_dl4j(path)
        assert from_dl4j(path, training=False).predict(X).shape == (8, 4)
    other = {"@class": "x.OtherSchedule", "scheduleType": "ITERATION"}
    sgd = {"@class": CONFIG + "Sgd", "learningRate": 1.0, "learningRateSchedule": other}
    path = write(tmp_path / "o.zip", network(output(3, 4, iupdater=sgd)), draw_normal(1, 16))
    with pytest.raises(NotImported, match="learning rate by otherschedule of outputlayer 'layer0'"):
        from_dl4j(path)


def test_sigmoid_schedule_reaches_zero_without_overflow(tmp_path: Path) -> None:
    """The rate is 0 where Java's exp is infinite and Python's overflows."""
    schedule = {"@class": "x.SigmoidSchedule", "scheduleType": "ITERATION",
                "initialValue": 0.5, "gamma": -1.0, "stepSize": 10}  # fmt: skip
    sgd = {"@class": CONFIG + "Sgd", "learningRate": 1.0, "learningRateSchedule": schedule}
    told = network(output(3, 4, iupdater=sgd), iterationCount=2000)
    model = from_dl4j(write(tmp_path / "s.zip", told, draw_normal(1, 16)))
    before = model.initial()
    model.bind(before.copy())
    model.step(Batch(X, LABELS))
    np.testing.assert_array_equal(model.module.state_dict()["layers.0_layer0.bias"], before[12:])


SCHEDULES = {
    "PolySchedule": (
        {"initialValue": 0.4, "power": 2.0, "maxIter": 5},
        [0.4 * 1.6**2, 0.4 * 1.8**2, 0, 0],  # of 1 + i/n, as in DL4J
    ),
    "CycleSchedule": (
        {"initialLearningRate": 0.1, "maxLearningRate": 0.5, "cycleLength": 6,
         "annealingLength": 2, "annealingDecay": 0.5},
        [0.3, 0.1, 0.05, 0.1],  # iterations 3 to 6: down, annealing, the next cycle
    ),
    "RampSchedule": (
        {"baseSchedule": {"@class": "x.FixedSchedule", "value": 0.5}, "numIter": 6},
        [0.5 * 4 / 6, 0.5 * 5 / 6, 0.5, 0.5],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEDULES)
def test_poly_cycle_and_ramp_schedules_match_dl4j(tmp_path: Path, name: str) -> None:
    options, rates = SCHEDULES[name]
    w, b = draw_normal(1, 3, 4), draw_normal(2, 4)
    schedule = {"@class": f"x.{name}", "scheduleType": "ITERATION", **options}
    sgd = {"@class": CONFIG + "Sgd", "learningRate": 0.0, "learningRateSchedule": schedule}
    model = from_dl4j(write(tmp_path / "s.zip", network(output(3, 4, iupdater=sgd)), f(w), b))
    model.bind(model.initial())
    for rate in rates:
        grad_w, grad_b = gradients(w, b)
        w, b = w - rate * grad_w, b - rate * grad_b
        model.step(Batch(X, LABELS))
    np.testing.assert_allclose(model.module.state_dict()["layers.0_layer0.bias"], b, atol=1e-5)


@pytest.mark.parametrize(
    ("conf", "layers", "said"),
    [
        ({"learningRatePolicy": "Step"}, {}, "learningRatePolicy step"),
        ({}, {"biasLearningRate": 0.2}, "biasLearningRate of outputlayer 'layer0'"),
        ({"learningRatePolicy": "None"}, {"biasLearningRate": 0.1}, None),
        ({}, {"biasLearningRate": "NaN"}, None),
    ],
)
def test_rate_policies_of_version_0_9_are_refused(
    tmp_path: Path, conf: Any, layers: Any, said: str | None
) -> None:
    """0.9's rate policies and rates of biases are refused, never silently ignored."""
    sgd = {"@class": CONFIG + "Sgd", "learningRate": 0.1}
    told = network(output(3, 4, iupdater=sgd, **layers))
    told["confs"][0] |= conf
    path = write(tmp_path / "p.zip", told, draw_normal(1, 16))
    if said is None:
        assert isinstance(from_dl4j(path), DenseNetwork)
        return
    with pytest.raises(NotImported, match=said):
        from_dl4j(path)


def test_truncated_bptt_takes_one_step_per_segment(tmp_path: Path) -> None:
    """Each segment is a step of its own, and starts in the final state of the previous one."""
    sgd = {"@class": CONFIG + "Sgd", "learningRate": 0.5}
    told = network(
        layer("recurrent.SimpleRnn", nin=1, nout=1, act="Identity", iupdater=sgd),
        layer("RnnLossLayer", lossFn={"@class": "x.LossL2"}),
        backpropType="TruncatedBPTT", tbpttFwdLength=2, tbpttBackLength=2,
    )  # fmt: skip
    w, rw, b = 0.5, 0.25, 0.125
    path = write(tmp_path / "t.zip", told, np.array([w, rw, b], np.float32))
    model = from_dl4j(path)
    flat = model.initial()
    model.bind(flat)
    x, y = [0.3, -0.2, 0.4], [0.1, 0.2, -0.3]
    score = model.step(Batch(np.array([[x]], np.float32), np.array([[y]], np.float32)))
    wanted, state = 0.0, 0.0
    for first, last in ((0, 2), (2, 3)):
        grads, hidden = np.zeros(3), state
        back = np.zeros(3)  # the hidden state's derivatives by w, rw, b within this segment
        for t in range(first, last):
            back = np.array([x[t], hidden, 1.0]) + rw * back
            hidden = w * x[t] + rw * hidden + b
            grads += 2 * (hidden - y[t]) * back
            wanted += (hidden - y[t]) ** 2
        w, rw, b = np.array([w, rw, b]) - 0.5 * grads
        state = hidden
    np.testing.assert_allclose(flat, [w, rw, b], rtol=1e-5)
    np.testing.assert_allclose(score, wanted, rtol=1e-5)
    whole = model.predict(np.array([[x]], np.float32))
    np.testing.assert_array_equal(model.predict(np.array([[x]], np.float32)), whole)
    with pytest.raises(
        NotImported, match=r"TruncatedBPTT of features \[1, 1, 3\] with labels \[1\]"
    ):
        model.step(Batch(np.array([[x]], np.float32), np.array([1.0], np.float32)))
    short = {**told, "tbpttBackLength": 1}
    with pytest.raises(NotImported, match="TruncatedBPTT of 1 steps back and 2 forward"):
        from_dl4j(write(tmp_path / "s.zip", short, np.zeros(3)))
