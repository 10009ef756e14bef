"""Tests of class labels that are doubles, as in Spark ML, and of labels for outputs [rows, 1]."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.models.base import Batch

torch = pytest.importorskip(
    "torch", reason="torch is not installed: pip install 'sparkstrom[torch]'"
)
from sparkstrom.models.torch import TorchModel  # noqa: E402

nn, fn = torch.nn, torch.nn.functional
X = np.random.default_rng(1).normal(size=(8, 3)).astype(np.float32)
Y = X.argmax(axis=1)


def model(loss: Any, outputs: int = 3, inputs: int = 3) -> Any:
    torch.manual_seed(1)
    made = TorchModel(nn.Linear(inputs, outputs), loss, partial(torch.optim.SGD, lr=0.1))
    made.bind(made.initial())
    return made


class SmoothedCrossEntropy(nn.CrossEntropyLoss):
    """A subclass of one of torch's losses."""

    def __init__(self) -> None:
        super().__init__(label_smoothing=0.1)


@pytest.mark.parametrize("weights", [None, np.ones(8, np.float32)])
@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(),
        fn.cross_entropy,
        partial(fn.cross_entropy),
        nn.MultiMarginLoss(),
        SmoothedCrossEntropy(),
    ],
)
def test_class_losses_accept_whole_doubles_as_classes(loss: Any, weights: Any) -> None:
    whole, doubles = model(loss), model(loss)
    expected = whole.step(Batch(X, Y, weights))
    assert doubles.step(Batch(X, Y.astype(np.float32), weights)) == expected
    assert (doubles.initial() == whole.initial()).all()
    assert doubles.loss(Batch(X, Y.astype(np.float32), weights)) == whole.loss(Batch(X, Y, weights))


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 10.0, 0.1])),
        partial(fn.nll_loss, ignore_index=2),
    ],
)
def test_class_weights_apply_to_labels_that_are_whole_doubles(loss: Any) -> None:
    for weights in (None, np.arange(8, dtype=np.float32)):
        for labels in (Y, np.full(8, 2)):
            expected = model(loss).loss(Batch(X, labels, weights))
            assert model(loss).loss(Batch(X, labels.astype(np.float32), weights)) == expected


def test_subclass_of_loss_has_output_kind_of_its_base() -> None:
    assert model(SmoothedCrossEntropy()).outputs == "logits"
    assert not model(SmoothedCrossEntropy()).per_label

    class Scaled(nn.BCEWithLogitsLoss):
        pass

    assert model(Scaled(), 1).per_label


def test_subclass_of_loss_may_ignore_labels() -> None:
    """A subclass of a loss that ignores its labels works without any."""

    class OfPairs(nn.CrossEntropyLoss):
        def forward(self, outputs: Any, _: Any) -> Any:
            return super().forward(outputs @ outputs.T, torch.arange(len(outputs)))

    assert np.isfinite(model(OfPairs()).step(Batch(X, ())))


def test_fractional_class_label_is_refused() -> None:
    labels = Y.astype(np.float32)
    labels[3] = 1.5
    with pytest.raises(UsageError, match=r"a label is 1.5: the loss CrossEntropyLoss takes"):
        model(nn.CrossEntropyLoss()).step(Batch(X, labels))


def test_probabilities_and_values_reach_loss_as_doubles() -> None:
    """Labels that are probabilities or values reach the loss as doubles."""
    shares = np.eye(3, dtype=np.float32)[Y]
    assert np.isfinite(model(nn.CrossEntropyLoss()).step(Batch(X, shares)))
    half = np.full((8, 1), 0.5, np.float32)
    assert np.isfinite(model(nn.MSELoss(), 1).step(Batch(X, half)))


class LogPoisson(nn.PoissonNLLLoss):
    """A subclass of a loss that broadcasts silently."""


@pytest.mark.parametrize("weights", [None, np.ones(8, np.float32)])
@pytest.mark.parametrize(
    "loss",
    [
        nn.BCEWithLogitsLoss(),
        nn.MSELoss(),
        nn.PoissonNLLLoss(),
        LogPoisson(),
        nn.KLDivLoss(reduction="batchmean"),
        nn.HingeEmbeddingLoss(),
        nn.MultiLabelSoftMarginLoss(),
        fn.poisson_nll_loss,
        partial(fn.gaussian_nll_loss, var=torch.ones(8, 1)),
    ],
)
def test_flat_labels_for_one_output_are_refused_with_remedy(loss: Any, weights: Any) -> None:
    """Labels [rows] for outputs [rows, 1] are refused, with label=["y"] as the remedy."""
    labels = (Y > 0).astype(np.float32)
    with pytest.raises(UsageError, match=r'label=\["y"\]'):
        model(loss, 1).step(Batch(X, labels, weights))
    trained = model(loss, 1)
    trained.step(Batch(X, labels[:, None]))
    with pytest.raises(UsageError, match=r'label=\["y"\]'):
        trained.loss(Batch(X, labels, weights))


class SqueezingPoissonLoss(nn.PoissonNLLLoss):
    """A loss that makes the shapes equal itself."""

    def forward(self, output: Any, target: Any) -> Any:
        return super().forward(output[:, 0], target)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler
def test_compiled_loss_handles_labels_like_uncompiled_one() -> None:
    """torch.compile does not change how a loss's labels are handled."""
    labels = (Y > 0).astype(np.float32)
    model(torch.compile(SqueezingPoissonLoss()), 1).step(Batch(X, labels))
    with pytest.raises(UsageError, match="PoissonNLLLoss"):
        model(torch.compile(nn.PoissonNLLLoss()), 1).step(Batch(X, labels))
    classes = Batch(X, labels.astype(np.float64))
    expected = model(nn.CrossEntropyLoss(), 2).step(classes)
    assert model(torch.compile(nn.CrossEntropyLoss()), 2).step(classes) == expected


def test_custom_loss_may_match_output_and_label_shapes() -> None:
    labels = (Y > 0).astype(np.float32)
    expected = model(nn.PoissonNLLLoss(), 1).step(Batch(X, labels[:, None]))
    assert model(SqueezingPoissonLoss(), 1).step(Batch(X, labels)) == pytest.approx(expected)


def test_flat_single_feature_is_refused_with_remedy() -> None:
    with pytest.raises(UsageError, match=r'features=\["income"\]'):
        model(nn.MSELoss(), 1, inputs=1).step(Batch(X[:, 0], X[:, :1]))
