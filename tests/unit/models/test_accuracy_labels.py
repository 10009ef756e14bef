"""Tests of accuracy: ignored labels do not count, and each of several true labels does."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.fit.evaluation import Evaluation, MetricSpec, evaluate_batch, merge_evaluations
from sparkstrom.models import DenseNetwork
from sparkstrom.models.base import Batch, get_step_weight
from sparkstrom.models.output_interpretation import measure_batch, to_class_indices

pytest.importorskip("torch", reason="torch is not installed: pip install 'sparkstrom[torch]'")
import torch

from sparkstrom.models.torch import TorchModel

nn, fn = torch.nn, torch.nn.functional
random = np.random.default_rng(1)
X = random.normal(size=(40, 3)).astype(np.float32)
MANY = (X > 0).astype(np.float32)  # a row may have several true labels
LOSSES_PER_LABEL = [nn.BCEWithLogitsLoss(), fn.binary_cross_entropy_with_logits]


def model(loss: Any, **options: Any) -> Any:
    """Return a model whose outputs are its features."""
    module = nn.Linear(3, 3, bias=False)
    with torch.no_grad():
        module.weight[:] = torch.eye(3)
    made = TorchModel(module, loss, partial(torch.optim.SGD, lr=0.1), **options)
    made.bind(made.initial())
    return made


@pytest.mark.parametrize(
    ("loss", "ignored"),
    [
        (nn.CrossEntropyLoss(), -100),
        (fn.cross_entropy, -100),
        (nn.CrossEntropyLoss(ignore_index=2), 2),
        (nn.CrossEntropyLoss(ignore_index=np.int64(2)), 2),  # type: ignore[arg-type]
        (partial(fn.cross_entropy, ignore_index=-1), -1),
    ],
)
def test_labels_ignored_by_loss_do_not_affect_accuracy(loss: Any, ignored: int) -> None:
    labels = X.argmax(axis=1)
    labels[:3] = (labels[:3] + 1) % 3
    labels[labels == 2] = 1 if ignored == 2 else 2
    labels[10:] = ignored
    kept = labels != ignored
    true = float((X.argmax(axis=1) == labels)[kept].mean())
    hits, weights = measure_batch(model(loss), Batch(X, labels), "accuracy")
    assert weights == kept.sum()
    assert hits / weights == pytest.approx(true)
    found = evaluate_batch(model(loss), MetricSpec(("classification", "roc")), Batch(X, labels))
    assert found.classification.rows == kept.sum()
    assert found.classification.accuracy == pytest.approx(true)
    assert found.roc.positives.sum() == (labels == 1).sum()
    nothing = evaluate_batch(
        model(loss), MetricSpec(("classification", "roc")), Batch(X, np.full(40, ignored))
    )
    assert merge_evaluations([found, nothing]).classification.accuracy == pytest.approx(true)


def test_ignore_index_does_not_apply_to_class_probabilities() -> None:
    """If labels are probabilities per class, all rows count despite ignore_index."""
    shares = np.eye(3, dtype=np.float32)[X.argmax(axis=1)]
    hits, weights = measure_batch(
        model(nn.CrossEntropyLoss(ignore_index=0)), Batch(X, shares), "accuracy"
    )
    assert (hits, weights) == (40, 40)


@pytest.mark.parametrize("loss", LOSSES_PER_LABEL)
def test_accuracy_includes_each_of_several_true_labels(loss: Any) -> None:
    labels = MANY.copy()
    labels[:6, 1] = 1 - labels[:6, 1]
    assert measure_batch(model(loss), Batch(X, labels), "accuracy") == (40 - 6 / 3, 40)
    found = evaluate_batch(model(loss), MetricSpec(("classification", "roc"), 1), Batch(X, labels))
    assert found.classification.accuracy == pytest.approx(114 / 120)
    assert found.classification.confusion.shape == (2, 2)
    assert found.roc.positives.sum() == labels[:, 1].sum()
    assert "accuracy by label" in found.table()
    assert "1 of 3 (0 to 2" in found.table()
    with pytest.raises(UsageError, match="the labels 0 to 2"):
        evaluate_batch(model(loss), MetricSpec(("roc",), 3), Batch(X, labels))


def test_label_with_probability_above_half_is_predicted_true() -> None:
    for loss in (nn.BCELoss(), fn.binary_cross_entropy):
        shown = model(loss)
        assert shown.outputs == "probabilities"
        hits, _ = measure_batch(
            shown, Batch(np.abs(X), (np.abs(X) > 0.5).astype(np.float32)), "accuracy"
        )
        assert hits == 40


def test_single_binary_output_is_evaluated_as_two_classes() -> None:
    """One output with BCEWithLogitsLoss is evaluated as two classes, not by label."""
    module = nn.Linear(3, 1)
    made = TorchModel(module, nn.BCEWithLogitsLoss(), partial(torch.optim.SGD, lr=0.1))
    made.bind(made.initial())
    found = evaluate_batch(made, MetricSpec(("classification",)), Batch(X, MANY[:, :1]))
    assert not found.classification.by_label


def test_row_with_several_true_labels_has_no_class_index() -> None:
    """A row with several labels of 1 has no class index; one with probabilities has."""
    with pytest.raises(UsageError, match=r"labels \[1.0, 1.0, 0.0\] of one row"):
        to_class_indices(np.array([[0, 0, 1], [1, 1, 0]], np.float32))
    assert to_class_indices(np.array([[0.2, 0.5, 0.3]], np.float32)).tolist() == [1]


def test_evaluation_memory_grows_with_rows_not_pairs_of_classes() -> None:
    """An evaluation of 4,000 classes takes memory per row, not per pair of classes."""
    network = DenseNetwork([3, 4000], seed=1)
    network.bind(network.initial())
    parts = [
        evaluate_batch(
            network, MetricSpec(("classification",)), Batch(X, random.integers(0, 4000, 40))
        )
        for _ in range(4)
    ]
    whole = merge_evaluations(parts)
    held = whole.classification
    assert isinstance(whole, Evaluation)
    assert held.rows == 160
    assert held.cells.nbytes + held.counts.nbytes <= 160 * 16


def test_per_label_and_ignored_label_are_found_in_keras_losses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Labels per output and ignored labels are recognized from Keras' losses, too."""
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    pytest.importorskip("jax", reason="jax is not installed")
    pytest.importorskip("keras", reason="keras is not installed")
    from sparkstrom.models.keras import KerasModel
    from sparkstrom.models.keras_support import keras

    def made(loss: Any) -> Any:
        dense = keras.layers.Dense(3, activation="sigmoid", kernel_initializer="identity")
        network = keras.Sequential([keras.Input((3,)), dense])
        out = KerasModel(network, loss, keras.optimizers.Adam())
        out.bind(out.initial())
        return out

    for loss in ("binary_crossentropy", keras.losses.BinaryCrossentropy()):
        assert measure_batch(made(loss), Batch(X, MANY), "accuracy") == (40, 40)
    for ignored in (2, np.int64(2)):
        ignoring = made(keras.losses.SparseCategoricalCrossentropy(ignore_class=ignored))
        assert ignoring.ignored_label == 2
    assert not ignoring.per_label
    labels = np.array([2] * 30 + [0, 1] * 5)
    counted = labels != 2
    total, weight = ignoring.loss(Batch(X, labels))
    assert weight == pytest.approx(10)
    assert total == pytest.approx(ignoring.loss(Batch(X[counted], labels[counted]))[0], rel=1e-5)
    ignoring.step(Batch(X, labels))
    assert get_step_weight(ignoring, Batch(X, labels)) == pytest.approx(10)
    before = ignoring.module.get_weights()
    assert ignoring.loss(Batch(X[:30], labels[:30])) == (0.0, 0.0)
    assert ignoring.step(Batch(X[:30], labels[:30])) == 0.0
    assert all(map(np.array_equal, before, ignoring.module.get_weights()))
    weights = np.linspace(0, 3, 40, dtype=np.float32)
    weights[:30] *= labels[0]  # rows that do not count have more weight
    weights[35:] = 0
    for kept in (counted, weights > 0):
        ignoring.bind(ignoring.initial())
        part = Batch(X[counted], labels[counted], weights[counted])
        whole = Batch(X, labels, np.where(kept, weights, 0).astype(np.float32))
        assert ignoring.loss(whole) == pytest.approx(ignoring.loss(part), rel=1e-5)
        assert ignoring.step(whole) == pytest.approx(made(ignoring._loss).step(part), rel=1e-4)
    only_ignored = np.where(counted, 0, 1).astype(np.float32)
    assert ignoring.loss(Batch(X, labels, only_ignored)) == (0.0, 0.0)
    assert ignoring.step(Batch(X, labels, only_ignored)) == 0.0
    assert ignoring.loss(Batch(X, labels.astype(np.uint8), weights))[1] > 0
