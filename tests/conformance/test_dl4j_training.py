"""Tests of training imported networks as DL4J would: updaters with saved state, penalties, losses.

Expected steps are computed in NumPy as ND4J's updaters do, in BaseMultiLayerUpdater's order:
normalize gradients, add l1 and l2, apply the updater, then decay the weights before the step.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkstrom.models import DenseNetwork, from_dl4j
from sparkstrom.models.base import Batch, from_description
from sparkstrom.models.dl4j import NotImported
from tests.conformance import dl4j_files as dl4j
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

PENALTY = "org.nd4j.linalg.learning.regularization."
RATE, STEPS_BEFORE = 0.05, 3
SMALL = draw_normal(12, 16)
State = list[np.ndarray]


def adam(g: Any, s: State, t: int, squared: Any = None) -> tuple[np.ndarray, State]:
    """Return Adam's or AMSGrad's step and next state; ``squared`` is AMSGrad's largest square."""
    m, v = 0.9 * s[0] + 0.1 * g, 0.999 * s[1] + 0.001 * g * g
    rate = RATE * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
    if squared is None:
        return rate * m / (np.sqrt(v) + 1e-8), [m, v]
    largest = np.maximum(v, squared)
    return rate * m / (np.sqrt(largest) + 1e-8), [m, v, largest]


def adabelief(g: Any, s: State, t: int) -> tuple[np.ndarray, State]:
    m = 0.9 * s[0] + 0.1 * g
    v = 0.999 * s[1] + 0.001 * (g - m) ** 2 + 1e-14
    rate = RATE * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
    return rate * m / (np.sqrt(v) + 1e-14), [m, v]


def nesterovs(g: Any, s: State, t: int) -> tuple[np.ndarray, State]:
    v = 0.9 * s[0] - RATE * g
    return -(1.9 * v - 0.9 * s[0]), [v]


def nadam(g: Any, s: State, t: int) -> tuple[np.ndarray, State]:
    m, v = 0.9 * s[0] + 0.1 * g, 0.999 * s[1] + 0.001 * g * g
    ahead = (m * 0.9 + 0.1 * g) / (1 - 0.9**t)
    return RATE * ahead / (np.sqrt(v) + 1e-8), [m, v]


def adamax(g: Any, s: State, t: int) -> tuple[np.ndarray, State]:
    m, u = 0.9 * s[0] + 0.1 * g, np.maximum(0.999 * s[1], np.abs(g))
    return RATE / (1 - 0.9**t) * m / (u + 1e-32), [m, u]


def adadelta(g: Any, s: State, t: int) -> tuple[np.ndarray, State]:
    square = 0.95 * s[0] + 0.05 * g * g
    step = np.sqrt(s[1] + 1e-6) / np.sqrt(square + 1e-6) * g
    return step, [square, 0.95 * s[1] + 0.05 * step * step]


def adagrad(g: Any, s: State, t: int) -> tuple[np.ndarray, State]:
    square = s[0] + g * g
    return RATE * g / (np.sqrt(square) + 1e-6), [square]


def rmsprop(g: Any, s: State, t: int) -> tuple[np.ndarray, State]:
    square = 0.95 * s[0] + 0.05 * g * g
    return RATE * g / (np.sqrt(square) + 1e-8), [square]


UPDATERS = {
    "Sgd": (0, lambda g, s, t: (RATE * g, [])),
    "Nesterovs": (1, nesterovs),
    "Adam": (2, adam),
    "AdaBelief": (2, adabelief),
    "AMSGrad": (3, lambda g, s, t: adam(g, s, t, s[2])),
    "Nadam": (2, nadam),
    "AdaMax": (2, adamax),
    "AdaDelta": (2, adadelta),
    "AdaGrad": (1, adagrad),
    "RmsProp": (1, rmsprop),
}


@pytest.mark.parametrize("gains", [False, True])  # with dropout (p=1), torch computes the step
@pytest.mark.parametrize("name", UPDATERS)
def test_updaters_continue_from_saved_state(tmp_path: Path, name: str, gains: bool) -> None:
    """Two steps continue from the saved state: one vector of all weights and biases per moment."""
    count, step = UPDATERS[name]
    w, b = draw_normal(1, 3, 4), draw_normal(2, 4)
    vectors = [np.abs(draw_normal(20 + i, 16)) * 0.1 for i in range(count)]
    options = {"learningRate": RATE} if name != "AdaDelta" else {}
    updater = {"iupdater": {"@class": CONFIG + name, **options}}
    drop = {"@class": "org.deeplearning4j.nn.conf.dropout.Dropout", "p": 1.0}
    told = network(output(3, 4, idropout=drop if gains else None, **updater))
    entries = {"updaterState_bin": dl4j.nd4j(np.concatenate(vectors))} if count else {}
    model = from_dl4j(write(tmp_path / "m.zip", told, f(w), b, **entries))
    model.bind(model.initial())
    if count:
        model.load_updater_state(model.continuing_state())
    states = [vector.astype(np.float64) for vector in vectors]
    flat = np.concatenate([f(w), b]).astype(np.float64)
    for t in (STEPS_BEFORE + 1, STEPS_BEFORE + 2):
        grad_w, grad_b = gradients(flat[:12].reshape(4, 3).T, flat[12:])
        update, states = step(np.concatenate([f(grad_w), grad_b]), states, t)
        flat -= update
        model.step(Batch(X, LABELS))
    wanted = np.exp(X @ flat[:12].reshape(4, 3).T + flat[12:])
    wanted /= wanted.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(model.predict(X), wanted, rtol=2e-4, atol=1e-5)
    assert isinstance(model, DenseNetwork) == (
        not gains and name in ("Sgd", "Nesterovs", "Adam", "AdaGrad")
    )


def test_updater_state_is_read_in_blocks_per_updater(tmp_path: Path) -> None:
    """BatchNormalization's statistics have no updater state; biases may have their own updater."""
    adam, sgd = {"@class": CONFIG + "Adam"}, {"@class": CONFIG + "Sgd", "learningRate": 0.5}
    dense = layer("DenseLayer", nin=3, nout=2, iupdater=adam, biasUpdater=sgd)
    norm = layer("BatchNormalization", nout=2, iupdater=adam)
    told = network(dense, norm, output(2, 4, iupdater=adam))
    arrays = [draw_normal(i, n) for i, n in enumerate((6, 2, 2, 2, 2, 2, 8, 4))]
    arrays[5] = np.abs(arrays[5])  # the variance
    state = np.arange(2 * (6 + 4 + 12), dtype=np.float32)
    zipped = write(tmp_path / "b.zip", told, *arrays, updaterState_bin=dl4j.nd4j(state))
    found = from_dl4j(zipped).continuing_state()
    w = found["state/layers.0_layer0.weight/mean"]
    np.testing.assert_array_equal(w, np.arange(6).reshape(2, 3))  # columns of W are rows here
    assert "state/layers.0_layer0.bias/mean" not in found
    np.testing.assert_array_equal(found["state/layers.0_layer0.weight/square"], w + 6)
    np.testing.assert_array_equal(found["state/layers.1_layer1.weight/mean"], [12, 13])
    np.testing.assert_array_equal(found["state/layers.1_layer1.bias/square"], [18, 19])
    np.testing.assert_array_equal(found["state/layers.2_layer2.bias/mean"], np.arange(28, 32))
    assert found["state/layers.2_layer2.bias/steps"] == STEPS_BEFORE


@pytest.mark.parametrize(
    ("normalization", "limit"),
    [("None", 1.0), ("ClipL2PerLayer", 0.1), ("RenormalizeL2PerParamType", 1.0),
     ("ClipElementWiseAbsoluteValue", 0.02)],
)  # fmt: skip
def test_step_normalizes_gradients_before_l1_and_weight_decay(
    tmp_path: Path, normalization: str, limit: float
) -> None:
    """Gradients are normalized, then l1 is added; weight decay uses the previous weights."""
    w, b = draw_normal(1, 3, 4), draw_normal(2, 4)
    listed = [
        {"@class": PENALTY + "L1Regularization", "l1": {"@class": "FixedSchedule", "value": 0.02}},
        {"@class": PENALTY + "WeightDecay", "coeff": {"@class": "FixedSchedule", "value": 0.3},
         "applyLR": True},
    ]  # fmt: skip
    options = {"gradientNormalization": normalization, "gradientNormalizationThreshold": limit}
    sgd = {"@class": CONFIG + "Sgd", "learningRate": RATE}
    told = network(output(3, 4, iupdater=sgd, regularization=listed, **options))
    model = from_dl4j(write(tmp_path / "o.zip", told, f(w), b))
    model.bind(model.initial())
    model.step(Batch(X, LABELS))
    grad_w, grad_b = gradients(w, b)
    if normalization == "ClipL2PerLayer":
        norm = np.sqrt((grad_w**2).sum() + (grad_b**2).sum())
        grad_w, grad_b = (g * min(1, limit / norm) for g in (grad_w, grad_b))
    elif normalization == "RenormalizeL2PerParamType":
        grad_w, grad_b = grad_w / np.linalg.norm(grad_w), grad_b / np.linalg.norm(grad_b)
    elif normalization != "None":
        grad_w, grad_b = np.clip(grad_w, -limit, limit), np.clip(grad_b, -limit, limit)
    w_next = w - RATE * (grad_w + 0.02 * np.sign(w)) - RATE * 0.3 * w
    state = model.module.state_dict()
    np.testing.assert_allclose(state["layers.0_layer0.weight"].numpy().T, w_next, atol=1e-6)
    np.testing.assert_allclose(state["layers.0_layer0.bias"].numpy(), b - RATE * grad_b, atol=1e-6)


def test_adabelief_adds_epsilon_at_each_step(tmp_path: Path) -> None:
    """AdaBelief adds its epsilon to the square at each step, and to the square root."""
    options = {"learningRate": RATE, "beta1": 0.9, "beta2": 0.999, "epsilon": 0.01}
    updater = {"@class": CONFIG + "AdaBelief", **options}
    model = from_dl4j(write(tmp_path / "a.zip", network(output(3, 4, iupdater=updater)), SMALL))
    flat = model.initial()
    model.bind(flat)
    wanted, m, v = SMALL.astype(np.float64), np.zeros(16), np.zeros(16)
    for t in (1, 2):
        grad_w, grad_b = gradients(wanted[:12].reshape(4, 3).T, wanted[12:])
        g = np.concatenate([f(grad_w), grad_b])
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * (g - m) ** 2 + 0.01
        rate = RATE * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        wanted -= rate * m / (np.sqrt(v) + 0.01)
        model.step(Batch(X, LABELS))
    np.testing.assert_allclose(model.module.state_dict()["layers.0_layer0.bias"], wanted[12:], 1e-5)


SCORES = {
    "LossWasserstein": lambda p, y: (p * y).mean(axis=1),
    "LossMSE": lambda p, y: ((p - y) ** 2).mean(axis=1),
    "LossL2": lambda p, y: ((p - y) ** 2).sum(axis=1),
    "LossMAE": lambda p, y: np.abs(p - y).mean(axis=1),
    "LossL1": lambda p, y: np.abs(p - y).sum(axis=1),
    "LossBinaryXENT": lambda p, y: -(y * np.log(p) + (1 - y) * np.log(1 - p)).sum(axis=1),
    "LossPoisson": lambda p, y: (p - y * np.log(p)).sum(axis=1),
    "LossHinge": lambda p, y: np.maximum(0, 1 - y * p).sum(axis=1),
    "LossSquaredHinge": lambda p, y: (np.maximum(0, 1 - y * p) ** 2).sum(axis=1),
    "LossKLD": lambda p, y: (
        np.clip(y, 1e-5, 1) * np.log(np.clip(y, 1e-5, 1) / np.clip(p, 1e-5, 1))
    ).sum(axis=1),
    "LossCosineProximity": lambda p, y: (
        -(p * y).sum(axis=1) / np.linalg.norm(p, axis=1) / np.linalg.norm(y, axis=1)
    ),
}


@pytest.mark.parametrize("name", SCORES)
def test_loss_scores_match_formulas(tmp_path: Path, name: str) -> None:
    w, b, y = (
        draw_normal(1, 3, 4),
        draw_normal(2, 4),
        np.abs(np.sin(draw_normal(3, 8, 4))).astype(np.float32),
    )
    loss = {"@class": "org.nd4j.linalg.lossfunctions.impl." + name}
    told = network(output(3, 4, act="Sigmoid", lossFn=loss))
    model = from_dl4j(write(tmp_path / "l.zip", told, f(w), b))
    p = 1 / (1 + np.exp(-(X @ w + b)))
    total, weight = model.loss(Batch(X, y))
    np.testing.assert_allclose(total / weight, SCORES[name](p, y).mean(), rtol=1e-5)
    weights = np.arange(8, dtype=np.float32)
    total, _ = model.loss(Batch(X, y, weights))
    np.testing.assert_allclose(total, SCORES[name](p, y) @ weights, rtol=1e-4)
    assert model.outputs == ("probabilities" if name == "LossBinaryXENT" else "values")


def test_loss_weights_are_read_as_list_or_object(tmp_path: Path) -> None:
    """Weights are an object with shape and data since 1.0.0-beta4, and a list of numbers before."""
    w, b = draw_normal(1, 3, 4), draw_normal(2, 4)
    p = np.exp(X @ w + b)
    p /= p.sum(axis=1, keepdims=True)
    wanted = -(np.array([1, 2, 3, 4])[LABELS] * np.log(p[np.arange(8), LABELS])).mean()
    numbers = [1.0, 2.0, 3.0, 4.0]
    for weights in (numbers, {"dataType": "FLOAT", "shape": [1, 4], "data": numbers}):
        loss = {"@class": "org.nd4j.linalg.lossfunctions.impl.LossMCXENT", "weights": weights}
        told = network(output(3, 4, lossFn={**loss, "softmaxClipEps": 1e-10}))
        total, rows = from_dl4j(write(tmp_path / "w.zip", told, f(w), b)).loss(Batch(X, LABELS))
        np.testing.assert_allclose(total / rows, wanted, rtol=1e-5)


def test_alpha_dropout_keeps_mean_and_variance(tmp_path: Path) -> None:
    import torch

    options = {"p": 0.7, "pSchedule": None, "alpha": 1.6732632423543772}
    options |= {"@class": "org.deeplearning4j.nn.conf.dropout.AlphaDropout"}
    drop = {**options, "lambda": 1.0507009873554804}
    told = network(layer("DropoutLayer", idropout=drop), output(3, 4))
    model = from_dl4j(write(tmp_path / "a.zip", told, draw_normal(1, 16)))
    dropped = model.module.layers["0_layer0"]
    torch.manual_seed(0)
    out = dropped(torch.randn(200_000, 1), 1)
    assert abs(float(out.mean())) < 0.01
    assert abs(float(out.std()) - 1) < 0.01
    off = -1.6732632423543772 * 1.0507009873554804
    gain = 1 / np.sqrt(0.7 + off**2 * 0.7 * 0.3)
    share = (out - (gain * off - gain * 0.3 * off)).abs() < 1e-5  # all that were dropped are equal
    assert abs(float(share.float().mean()) - 0.3) < 0.01


def test_l2_penalty_includes_layer_norm_gains(tmp_path: Path) -> None:
    """As in DL4J, l2 includes layer normalization's gains, and not BatchNormalization's."""
    listed = [{"@class": PENALTY + "L2Regularization", "l2": {"@class": "x.FixedSchedule",
               "value": 0.5}}]  # fmt: skip
    sgd = {"@class": CONFIG + "Sgd", "learningRate": 0.0}
    dense = layer("DenseLayer", nin=3, nout=2, hasLayerNorm=True, regularization=listed)
    told = network(dense, layer("BatchNormalization", nout=2), output(2, 4, iupdater=sgd))
    model = from_dl4j(write(tmp_path / "g.zip", told, np.full(6 + 2 + 2 + 8 + 12, 2.0)))
    model.bind(model.initial())
    assert model.penalty() == pytest.approx(0.5 / 2 * 4 * (6 + 2))


def test_rejects_clipping_per_parameter_type_in_graves_lstm(tmp_path: Path) -> None:
    clipped = {"gradientNormalization": "ClipL2PerParamType"}
    told = network(
        layer("GravesLSTM", nin=3, nout=1, **clipped), output(1, 2, kind="RnnOutputLayer")
    )
    with pytest.raises(NotImported, match="clipl2perparamtype of graveslstm 'layer0'"):
        from_dl4j(write(tmp_path / "p.zip", told, np.zeros(12 + 7 + 4 + 4)))


@pytest.mark.parametrize(
    ("kind", "options", "x", "drops"),
    [
        ("DenseLayer", {"nin": 2, "nout": 2}, (4, 2), True),
        ("GravesLSTM", {"nin": 2, "nout": 2}, (4, 2, 3), True),
        ("GravesBidirectionalLSTM", {"nin": 2, "nout": 2}, (4, 2, 3), False),
        ("Upsampling1D", {"size": [2]}, (4, 2, 3), True),
        ("Cropping1D", {"cropping": [1, 0]}, (4, 2, 3), False),
        ("misc.RepeatVector", {"n": 2}, (4, 2), True),
        ("ActivationLayer", {}, (4, 2), False),
        ("SubsamplingLayer", {"kernelSize": [1, 1], "stride": [1, 1]}, (4, 2, 3, 3), False),
    ],
)
def test_only_layers_with_dropout_in_dl4j_apply_it(
    tmp_path: Path, kind: str, options: Any, x: Any, drops: bool
) -> None:
    """A network's default dropout is in all layers' JSON, but some layers of DL4J ignore it."""
    from sparkstrom.models.dl4j.configuration import parse_network
    from sparkstrom.models.dl4j.parameters import count_parameters

    drop = {"@class": "org.deeplearning4j.nn.conf.dropout.Dropout", "p": 1e-6}
    told = network(layer(kind, idropout=drop, **options), layer("DenseLayer", nin=2, nout=2))
    count = count_parameters(parse_network("x", told))
    path = write(tmp_path / "d.zip", told, draw_normal(1, count))
    module = from_dl4j(path, training=False).module.layers["0_layer0"]
    import torch

    given = torch.ones(x)
    trained, said = module.train()(given, 4), module.eval()(given, 4)
    assert bool((trained == said).all()) != drops


def test_frozen_layers_do_not_learn(tmp_path: Path) -> None:
    w, b, v, c = draw_normal(1, 3, 4), draw_normal(2, 4), draw_normal(3, 4, 4), draw_normal(4, 4)
    frozen = {
        "@class": "org.deeplearning4j.nn.conf.layers.misc.FrozenLayer",
        "layer": layer("DenseLayer", nin=3, nout=4, act="TanH"),
    }
    told = network(frozen, output(4, 4))
    model = from_dl4j(write(tmp_path / "f.zip", told, f(w), b, f(v), c))
    model.bind(model.initial())
    model.step(Batch(X, LABELS))
    state = model.module.state_dict()
    np.testing.assert_array_equal(state["layers.0_layer0.weight"].numpy().T, w)
    assert not np.array_equal(state["layers.1_layer1.weight"].numpy().T, v)


def test_network_without_loss_is_imported_only_to_predict(tmp_path: Path) -> None:
    """A network without a loss is imported only to predict; its description restores it."""
    w, b = draw_normal(1, 3, 4), draw_normal(2, 4)
    dense = layer("DenseLayer", nin=3, nout=4, act="Softmax")
    path = write(tmp_path / "p.zip", network(dense), f(w), b)
    with pytest.raises(NotImported, match="ends with denselayer 'layer0', which has no loss"):
        from_dl4j(path)
    model = from_dl4j(path, training=False)
    with pytest.raises(NotImported, match="it was imported to predict"):
        model.step(Batch(X, LABELS))
    again = from_description(copy.deepcopy(model.describe()))
    again.bind(model.initial())
    np.testing.assert_array_equal(again.predict(X), model.predict(X))
