"""Tests where DL4J trains otherwise than torch: gradients, statistics, frozen layers, counters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkstrom.fit.evaluation import evaluate_batch, select_metrics
from sparkstrom.models import DenseNetwork, from_dl4j
from sparkstrom.models.base import Batch
from sparkstrom.models.dl4j import NotImported
from sparkstrom.models.output_interpretation import measure_batch
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
    softmax,
    write,
)

SGD = {"@class": CONFIG + "Sgd", "learningRate": 1.0}
LOSS = "org.nd4j.linalg.lossfunctions.impl."
DROP_ALL = {"@class": "org.deeplearning4j.nn.conf.dropout.Dropout", "p": 1e-6}
HOT = np.eye(4, dtype=np.float32)[LABELS]


def step_once(
    tmp_path: Path, told: Any, labels: Any, *arrays: np.ndarray
) -> tuple[Any, np.ndarray]:
    """Return the model after one step, and what the step subtracted from its parameters."""
    model = from_dl4j(write(tmp_path / "m.zip", told, *arrays))
    before = model.initial()
    flat = before.copy()
    model.bind(flat)
    model.step(Batch(X, labels))
    return model, before - flat


def test_no_op_updater_subtracts_unchanged_gradients(tmp_path: Path) -> None:
    """ND4J's NoOpUpdater leaves a gradient unchanged, and DL4J then subtracts it."""
    w, b = draw_normal(1, 3, 4), draw_normal(2, 4)
    told = network(output(3, 4, iupdater={"@class": CONFIG + "NoOp"}))
    _, taken = step_once(tmp_path, told, LABELS, f(w), b)
    grad_w, grad_b = gradients(w, b)
    np.testing.assert_allclose(taken, [*grad_w.T.ravel(), *grad_b], atol=1e-6)


@pytest.mark.parametrize("labels", ["shares", "zeros", "weighted"])
def test_softmax_gradient_handles_unnormalized_and_weighted_labels(
    tmp_path: Path, labels: str
) -> None:
    """The gradient is p - y even if y does not sum to 1; with weights, p * sum(w y) - w y."""
    w, b = draw_normal(1, 3, 4), draw_normal(2, 4)
    y = HOT if labels == "weighted" else HOT * (0.5 if labels == "shares" else 0.0)
    loss: dict[str, Any] = {"@class": LOSS + "LossMCXENT", "softmaxClipEps": 1e-10}
    weights = np.array([1.0, 2.0, 3.0, 4.0])
    p = softmax(X @ w + b)
    wanted = p - y
    if labels == "weighted":
        loss["weights"] = list(weights)
        wanted = p * (weights * y).sum(axis=1, keepdims=True) - weights * y
    drop = {"@class": "org.deeplearning4j.nn.conf.dropout.Dropout", "p": 1.0}  # trained by torch
    told = network(output(3, 4, iupdater=SGD, lossFn=loss, idropout=drop))
    _, taken = step_once(tmp_path, told, y, f(w), b)
    np.testing.assert_allclose(taken[-4:], wanted.mean(axis=0), atol=1e-6)


@pytest.mark.parametrize(("act", "far"), [("Sigmoid", 0), ("Sigmoid", 14), ("Softmax", 0)])
def test_binary_cross_entropy_is_clipped(tmp_path: Path, act: str, far: int) -> None:
    """(p - y) / (p (1 - p)) has p in [eps, 1 - eps], and passes back through the activation."""
    w, b = draw_normal(1, 3, 4), draw_normal(2, 4) - far
    loss = {"@class": LOSS + "LossBinaryXENT", "clipEps": 1e-5}
    told = network(output(3, 4, act=act, iupdater=SGD, lossFn=loss))
    model, taken = step_once(tmp_path, told, HOT, f(w), b)
    z = (X @ w + b).astype(np.float64)
    p = 1 / (1 + np.exp(-z)) if act == "Sigmoid" else softmax(z)
    clipped = p.clip(1e-5, 1 - 1e-5)
    pull = (clipped - HOT) / (clipped * (1 - clipped)) * p
    if act == "Sigmoid":
        wanted = pull * (1 - p)
        score = -(HOT * np.log(clipped) + (1 - HOT) * np.log(1 - clipped)).sum(axis=1).mean()
    else:
        wanted = pull - p * pull.sum(axis=1, keepdims=True)
        score = -(HOT * np.log(p)).sum(axis=1).mean()
    np.testing.assert_allclose(taken[-4:], wanted.mean(axis=0), rtol=1e-4, atol=1e-6)
    model.bind(model.initial())
    assert model.loss(Batch(X, HOT))[0] / 8 == pytest.approx(score, rel=1e-5)


def test_sparse_cross_entropy_clips_score_but_not_gradient(tmp_path: Path) -> None:
    """A row that is certainly wrong has the score ln 1e10, and still its full gradient."""
    b = np.array([100.0, 0, 0, 0], np.float32)
    loss = {"@class": LOSS + "LossSparseMCXENT", "softmaxClipEps": 1e-10}
    told = network(output(3, 4, iupdater=SGD, lossFn=loss))
    labels = np.ones((8, 1), np.float32)  # class indices in a column, as DL4J has sparse labels
    model, taken = step_once(tmp_path, told, labels, np.zeros(12), b)
    np.testing.assert_allclose(taken[-4:], [1, -1, 0, 0], atol=1e-6)
    model.bind(model.initial())
    assert model.loss(Batch(X, labels))[0] / 8 == pytest.approx(np.log(1e10))


def test_kld_gradient_uses_unclipped_labels(tmp_path: Path) -> None:
    """LossKLD's gradient uses the labels unclipped, although its score clips them."""
    w, b = draw_normal(1, 3, 4), draw_normal(2, 4)
    told = network(output(3, 4, act="Sigmoid", iupdater=SGD, lossFn={"@class": LOSS + "LossKLD"}))
    _, taken = step_once(tmp_path, told, HOT * 3, f(w), b)
    p = 1 / (1 + np.exp(-(X @ w + b)))
    np.testing.assert_allclose(taken[-4:], (-3 * HOT * (1 - p)).mean(axis=0), rtol=1e-4, atol=1e-6)


def test_batch_norm_running_variance_divides_by_n(tmp_path: Path) -> None:
    """DL4J's variance divides by n (torch's running one by n - 1), and one row is allowed."""
    told = network(layer("BatchNormalization", nout=3, decay=0.75, eps=1e-5), output(3, 4))
    norm = np.concatenate([np.ones(3), np.zeros(3), np.zeros(3), np.ones(3)])
    path = write(tmp_path / "n.zip", told, norm, draw_normal(1, 16))
    for rows in (8, 1):
        model = from_dl4j(path)
        model.bind(model.initial())
        model.step(Batch(X[:rows], LABELS[:rows]))
        state = model.module.state_dict()
        mean, var = X[:rows].mean(axis=0), X[:rows].var(axis=0)
        np.testing.assert_allclose(state["layers.0_layer0.running_mean"], mean / 4, rtol=1e-5)
        np.testing.assert_allclose(state["layers.0_layer0.running_var"], 0.75 + var / 4, rtol=1e-5)


def frozen(one: Any, kind: str = "FrozenLayer") -> Any:
    """Return a layer's JSON wrapped into a frozen layer of this kind."""
    inner = "layer" if kind == "FrozenLayer" else "underlying"
    return {"@class": f"org.deeplearning4j.nn.conf.layers.misc.{kind}", inner: one}


def test_frozen_layers_apply_no_dropout_in_training(tmp_path: Path) -> None:
    """Frozen layers, as transfer learning leaves them, do not apply their dropout in training."""
    w, b, v, c = draw_normal(1, 3, 4), draw_normal(2, 4), draw_normal(3, 4, 4), draw_normal(4, 4)
    told = network(
        frozen(layer("DenseLayer", nin=3, nout=4, act="TanH", idropout=DROP_ALL)),
        frozen(layer("DropoutLayer", idropout=DROP_ALL)),
        output(4, 4, iupdater=SGD),
    )
    _, taken = step_once(tmp_path, told, LABELS, f(w), b, f(v), c)
    p = softmax(np.tanh(X @ w + b) @ v + c)
    np.testing.assert_allclose(taken[-4:], (p - HOT).mean(axis=0), atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "learns"), [("FrozenLayer", False), ("FrozenLayerWithBackprop", True)]
)
def test_layers_before_frozen_layer_learn_only_with_backprop(
    tmp_path: Path, kind: str, learns: bool
) -> None:
    """Layers before FrozenLayer do not learn, those before FrozenLayerWithBackprop do."""
    told = network(
        layer("DenseLayer", nin=3, nout=4, iupdater=SGD),
        frozen(layer("DenseLayer", nin=4, nout=4), kind),
        output(4, 4, iupdater=SGD),
    )
    _, taken = step_once(
        tmp_path, told, LABELS, draw_normal(1, 16), draw_normal(2, 20), draw_normal(3, 20)
    )
    assert taken[:16].any() == learns
    assert not taken[16:36].any()
    assert taken[36:].any()


@pytest.mark.parametrize("updater", ["Adam", "AMSGrad"])
def test_missing_updater_state_keeps_iteration_count(tmp_path: Path, updater: str) -> None:
    """With saveUpdater=false, moments start at 0 but are corrected by the iterationCount."""
    w, b = draw_normal(1, 3, 4), draw_normal(2, 4)
    conf = {"@class": CONFIG + updater, "learningRate": 0.1}
    told = network(output(3, 4, iupdater=conf), iterationCount=225)
    model = from_dl4j(write(tmp_path / "a.zip", told, f(w), b))
    flat = model.initial()
    model.bind(flat)
    model.load_updater_state(model.continuing_state())
    model.step(Batch(X, LABELS))
    _, g = gradients(w, b)
    rate = 0.1 * np.sqrt(1 - 0.999**226) / (1 - 0.9**226)
    wanted = rate * 0.1 * g / (np.sqrt(0.001 * g * g) + 1e-8)
    np.testing.assert_allclose(b - flat[-4:], wanted, rtol=1e-3)


@pytest.mark.parametrize(
    ("updater", "adaptive"),
    [("Sgd", False), ("Nesterovs", False), ("Adam", True), ("AMSGrad", True), ("AdaDelta", True)],
)
def test_adaptive_updaters_are_recognized(tmp_path: Path, updater: str, adaptive: bool) -> None:
    told = network(output(3, 4, iupdater={"@class": CONFIG + updater, "learningRate": 0.1}))
    model = from_dl4j(write(tmp_path / "a.zip", told, f(draw_normal(1, 3, 4)), draw_normal(2, 4)))
    assert model.has_adaptive_optimizer() == adaptive


@pytest.mark.parametrize("built_in", [True, False])
def test_new_adagrad_state_starts_at_1e_minus_6(tmp_path: Path, built_in: bool) -> None:
    """AdaGrad's state starts with 1e-6, whatever its epsilon: small gradients take small steps."""
    x, w, b = X, np.zeros((3, 4), np.float32), np.array([0, 8, 0, 0], np.float32)
    conf = {"@class": CONFIG + "AdaGrad", "learningRate": 0.1, "epsilon": 1e-8}
    drop = {"@class": "org.deeplearning4j.nn.conf.dropout.Dropout", "p": 1.0}
    told = network(
        output(3, 4, iupdater=conf, idropout=None if built_in else drop), iterationCount=0
    )
    model = from_dl4j(write(tmp_path / "g.zip", told, w, b))
    assert isinstance(model, DenseNetwork) == built_in
    flat = model.initial()
    model.bind(flat)
    if state := model.continuing_state():
        model.load_updater_state(state)
    model.step(Batch(x, np.ones(8, np.int64)))
    p = softmax(b[None].astype(np.float64))[0]
    g = p - [0, 1, 0, 0]
    np.testing.assert_allclose(b - flat[-4:], 0.1 * g / (np.sqrt(1e-6 + g * g) + 1e-8), rtol=5e-3)


def test_score_includes_weight_decay_without_learning_rate(tmp_path: Path) -> None:
    """As WeightDecay.score: half the coefficient times the squares, without the learning rate."""
    decay = {
        "@class": "org.nd4j.linalg.learning.regularization.WeightDecay",
        "coeff": {"@class": "x.FixedSchedule", "value": 0.5},
        "applyLR": True,
    }
    told = network(output(3, 4, regularization=[decay]))
    model = from_dl4j(write(tmp_path / "d.zip", told, np.full(16, 2.0)))
    model.bind(model.initial())
    assert model.penalty() == pytest.approx(0.5 / 2 * 4 * 12)


HALF = {"@class": "x.FixedSchedule", "value": 0.5}
STEPS = {"@class": "x.StepSchedule", "initialValue": 0.5, "decayRate": 0.5, "step": 10}
OF_TRAINING = {
    "dropout by schedule (dropout) of outputlayer 'layer0'": {
        "idropout": {"@class": "x.Dropout", "p": "NaN", "pSchedule": HALF}
    },
    "dropout otherdropout of outputlayer 'layer0'": {"idropout": {"@class": "x.OtherDropout"}},
    "loss fmeasure": {"lossFn": {"@class": LOSS + "LossFMeasure", "beta": 1.0}},
    "regularization that follows a schedule": {
        "regularization": [{"@class": "x.L2Regularization", "l2": STEPS}]
    },
    "regularization otherregularization": {"regularization": [{"@class": "x.OtherRegularization"}]},
    "weightNoise of outputlayer 'layer0'": {"weightNoise": {"@class": "x.DropConnect"}},
    "constraints of outputlayer 'layer0'": {"constraints": [{"@class": "x.NonNegativeConstraint"}]},
}


@pytest.mark.parametrize("said", OF_TRAINING)
def test_unsupported_training_option_still_allows_prediction(tmp_path: Path, said: str) -> None:
    """A refusal names layer, reason and remedy; training=False ignores the option."""
    w, b = draw_normal(1, 3, 4), draw_normal(2, 4)
    path = write(tmp_path / "t.zip", network(output(3, 4, **OF_TRAINING[said])), f(w), b)
    with pytest.raises(NotImported) as refused:
        from_dl4j(path)
    assert said in str(refused.value)
    assert "from_dl4j(path, training=False)" in str(refused.value)
    assert "layer0" in str(refused.value)
    model = from_dl4j(path, training=False)
    np.testing.assert_allclose(model.predict(X), softmax(X @ w + b), rtol=1e-4)


def test_evaluation_counts_each_step_of_sequence(tmp_path: Path) -> None:
    """As in DL4J's evaluate, each step counts, whether labels are indices or one-hot."""
    v, c, x = draw_normal(1, 3, 4), draw_normal(2, 4), draw_normal(3, 6, 3, 5)
    told = network(output(3, 4, kind="RnnOutputLayer"))
    model = from_dl4j(write(tmp_path / "r.zip", told, f(v), c))
    model.bind(model.initial())
    z = np.einsum("nit,io->not", x, v) + c.reshape(1, 4, 1)
    classes = np.random.default_rng(1).integers(0, 4, (6, 5))
    hot = np.moveaxis(np.eye(4, dtype=np.float32)[classes], -1, 1)
    wanted = np.zeros((4, 4), int)
    np.add.at(wanted, (classes.ravel(), z.argmax(axis=1).ravel()), 1)
    asked = select_metrics(model, ["classification", "roc"], 2)
    for labels in (classes, hot):
        found = evaluate_batch(model, asked, Batch(x, labels))
        assert found.classification is not None
        assert found.roc is not None
        np.testing.assert_array_equal(found.classification.confusion, wanted)
        assert found.roc.positives.sum() == (classes == 2).sum()
        hits, weights = measure_batch(model, Batch(x, labels), "accuracy")
        assert hits / weights == pytest.approx(np.trace(wanted) / 30)


def test_single_sigmoid_output_predicts_two_classes(tmp_path: Path) -> None:
    """With one output, the class is 1 above 0.5, as in DL4J; before, every row had class 1."""
    w, b = draw_normal(1, 3, 1), np.zeros(1, np.float32)
    loss = {"@class": LOSS + "LossBinaryXENT", "clipEps": 1e-5}
    told = network(output(3, 1, act="Sigmoid", lossFn=loss))
    model = from_dl4j(write(tmp_path / "b.zip", told, f(w), b))
    model.bind(model.initial())
    found = evaluate_batch(model, select_metrics(model, None, 1), Batch(X, LABELS % 2))
    assert found.classification is not None
    wanted = np.zeros((2, 2), int)
    np.add.at(wanted, (LABELS % 2, (X @ w > 0).ravel().astype(int)), 1)
    np.testing.assert_array_equal(found.classification.confusion, wanted)
    roc = evaluate_batch(model, select_metrics(model, "roc", 1), Batch(X, LABELS % 2)).roc
    assert roc is not None
    assert 0 < roc.auc < 1
