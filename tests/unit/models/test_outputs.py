"""Tests of outputs: classes, probabilities and scores, from logits and from probabilities."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.fit.evaluation import MetricSpec, evaluate_batch
from sparkstrom.fit.network_state import NetworkStateHolder
from sparkstrom.models import DenseNetwork
from sparkstrom.models.base import Batch
from sparkstrom.models.output_interpretation import (
    argmax_classes,
    compute_class_score,
    compute_probabilities,
    compute_raw_scores,
    concatenate_outputs,
    flatten_positions,
    get_output_kind,
    measure_batch,
    predict_flattened,
)
from sparkstrom.serving import InferenceRequest, predict_requests
from sparkstrom.spark.executor.inference import OutputConcatenator

LOGITS = np.array([[1.0, 3.0], [90.0, -90.0], [5.0, 5.0]], np.float32)


def test_logits_become_probabilities() -> None:
    shares = compute_probabilities(LOGITS, "logits")
    np.testing.assert_allclose(shares.sum(axis=1), 1)
    assert shares[0, 1] == pytest.approx(1 / (1 + np.exp(-2)))
    assert argmax_classes(LOGITS).tolist() == shares.argmax(axis=1).tolist() == [1, 0, 0]


def test_single_logit_is_converted_to_two_classes() -> None:
    """One logit is class 1 above 0, and its sigmoid is class 1's probability."""
    one = np.array([[0.5], [-0.5], [0.0]], np.float32)
    assert argmax_classes(one).tolist() == [1, 0, 0]
    np.testing.assert_allclose(
        compute_probabilities(one, "logits")[:, 1], 1 / (1 + np.exp(-one[:, 0]))
    )


def test_single_probability_is_that_of_class_one() -> None:
    """One probability, as of a sigmoid, is class 1's: 0.4 is class 0, and both have scores."""
    one = np.array([[0.6], [0.4], [0.5]], np.float32)
    assert argmax_classes(one, "probabilities").tolist() == [1, 0, 0]
    np.testing.assert_allclose(compute_probabilities(one, "probabilities"), np.c_[1 - one, one])
    assert compute_class_score(one, "probabilities", 1).tolist() == one[:, 0].tolist()


class Sequences:
    """A model whose classes are on axis 1."""

    class_axis = 1


class ChannelsLast:
    """A model whose classes are on the last axis."""

    class_axis = -1


@pytest.mark.parametrize("hot", [False, True])
@pytest.mark.parametrize(
    ("model", "shape", "axis"),
    [
        (Sequences(), (5, 3, 4), 1),
        (Sequences(), (5, 3, 3), 1),
        (Sequences(), (5, 3, 2, 4), 1),
        (Sequences(), (5, 1, 4), 1),
        (ChannelsLast(), (5, 4, 3), -1),
        (ChannelsLast(), (5, 3, 3), -1),
    ],
)
def test_sequence_outputs_are_flattened_to_one_row_per_position(
    model: object, shape: tuple[int, ...], axis: int, hot: bool
) -> None:
    """[rows, classes, steps] are rows * steps places with classes, as in DL4J's Evaluation."""
    outputs = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    wanted = np.moveaxis(outputs, axis, -1).reshape(-1, shape[axis])
    classes = np.random.default_rng(2).integers(0, max(2, shape[axis]), wanted.shape[0])
    places = np.delete(np.array(shape), axis)
    labels = classes.reshape(places)
    if hot:
        one = shape[axis] == 1
        labels = np.moveaxis(labels[..., None] if one else np.eye(shape[axis])[labels], -1, axis)
    wide, found = flatten_positions(model, outputs, labels)
    np.testing.assert_array_equal(wide, wanted)
    np.testing.assert_array_equal(found, classes)


def test_image_outputs_with_one_label_are_one_position() -> None:
    """If a row has one label, all of its outputs belong to one place."""
    outputs = np.arange(24.0, dtype=np.float32).reshape(2, 3, 2, 2)
    wide, found = flatten_positions(Sequences(), outputs, np.array([1, 0]))
    assert wide.shape == (2, 12)
    assert found.tolist() == [1, 0]


def test_raw_score_is_logit_minus_mean_of_row() -> None:
    """A raw score is the logit minus the mean of the row's logits."""
    assert compute_raw_scores(LOGITS, "logits")[:, 1].tolist() == [1.0, -90.0, 0.0]


def test_class_score_of_huge_logits_does_not_round_to_one() -> None:
    """Of two classes, a score is half the logits' difference: it does not round to 1."""
    far = np.array([[0.0, 200.0], [0.0, 300.0]], np.float32)
    assert compute_class_score(far, "logits", 1).tolist() == [100.0, 150.0]
    three = np.array([[0.0, 0.0, 0.0]], np.float32)
    assert compute_class_score(three, "logits", 2).tolist() == [np.float32(1 / 3)]
    with pytest.raises(UsageError, match=r"class 2: .* 0 to 1"):
        compute_class_score(far, "logits", 2)


def test_prediction_of_row_is_independent_of_other_rows() -> None:
    """A row's prediction has the same bits whatever rows are predicted together with it."""
    network = DenseNetwork([30, 17, 3], seed=3)
    network.bind(network.initial())
    random = np.random.default_rng(1)
    features = random.normal(size=(700, 30)).astype(np.float32)
    whole = predict_flattened(network, features)
    for _ in range(5):
        order = random.permutation(700)
        cut = int(random.integers(700))
        parts = [predict_flattened(network, features[order[i]]) for i in _cuts(cut)]
        assert np.concatenate([p for p in parts if len(p)]).tobytes() == whole[order].tobytes()


def _cuts(cut: int) -> list[slice]:
    return [slice(0, cut), slice(cut, None)]


def test_tuple_as_flat_prediction_is_refused() -> None:
    class Two:
        def predict(self, features: object) -> tuple[int, int]:
            return 1, 2

    assert get_output_kind(Two()) == "logits"
    with pytest.raises(UsageError, match="returns a tuple"):
        predict_flattened(Two(), np.zeros((2, 1)))


@pytest.mark.parametrize(
    ("compute", "words"),
    [
        (lambda x: {"logits": x, "hidden": (x, x)}, r"output 'hidden' is a tuple: .*not nested"),
        (lambda x: (x, [x]), r"output 1 is a list: .*not nested"),
        (lambda x: [{"a": x}], r"output 0 is a dict: .*not nested"),
        (lambda x: (x, x.mean()), r"output 1 of the model has the shape \[\] for 8 rows: each row"),
        (lambda x: {"a": x[:2]}, r"output 'a' of the model has the shape \[2, 3\] for 8 rows"),
        (lambda x: x[0], r"the output of the model has the shape \[3\] for 8 rows: each row"),
        (lambda x: None, r"the output is a NoneType: .*not nested"),
    ],
)
def test_output_that_is_no_array_of_rows_is_refused_by_name(compute: Any, words: str) -> None:
    """Where outputs become columns or are divided by rows, others are refused by name."""
    model: Any = SimpleNamespace(predict=compute)
    features = np.zeros((8, 3), np.float32)
    with pytest.raises(UsageError, match=words):
        OutputConcatenator(model).predict(features)
    with pytest.raises(UsageError, match=words):
        predict_requests(model, [InferenceRequest.from_features(features)])


def test_outputs_of_different_widths_are_refused() -> None:
    pieces = [np.zeros((1024, 7), np.float32), np.zeros((3, 5), np.float32)]
    with pytest.raises(UsageError, match=r"returns \[7\] for some rows and \[5\] for others"):
        concatenate_outputs(pieces)
    assert concatenate_outputs([pieces[0], pieces[0][:3]]).shape == (1027, 7)


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_outputs_have_no_class(width: int, bad: float) -> None:
    """Outputs that are not finite have no class; before, NaN counted as class 0."""
    outputs = np.full((3, width), bad, np.float32)
    outputs[0] = -1.0
    np.testing.assert_array_equal(argmax_classes(outputs), [0, np.nan, np.nan])
    model: Any = SimpleNamespace(predict=lambda index: outputs[index])
    batch = Batch(np.arange(3), np.zeros(3, np.int64))
    assert np.isnan(measure_batch(model, batch, "accuracy")[0])
    with pytest.raises(UsageError, match="a score is not finite: the model has diverged"):
        evaluate_batch(model, MetricSpec(("classification",)), batch)


def test_logit_of_minus_infinity_excludes_class() -> None:
    assert argmax_classes(np.array([[-np.inf, 1.0, 0.0]], np.float32)).tolist() == [1]
    assert argmax_classes(np.array([[-np.inf], [1.0]], np.float32)).tolist() == [0, 1]


def test_nan_output_of_row_without_weight_does_not_affect_accuracy() -> None:
    outputs = np.array([[np.nan, np.nan], [1.0, 0.0]], np.float32)
    model: Any = SimpleNamespace(predict=lambda index: outputs[index])
    batch = Batch(np.arange(2), np.zeros(2, np.int64), np.array([0, 1], np.float32))
    assert measure_batch(model, batch, "accuracy") == (1.0, 1.0)


@pytest.mark.parametrize(("bad", "shown"), [(np.nan, "nan"), (1e300, r"1e\+300")])
def test_assigning_non_finite_parameters_is_refused(bad: float, shown: str) -> None:
    """Parameters that are not finite in float32 are refused; before, 1e300 became infinity."""
    holder = NetworkStateHolder(DenseNetwork([2, 2]))
    values = holder.parameters.astype(np.float64)
    values[3] = bad
    with pytest.raises(UsageError, match=rf"parameters\[3\]={shown}: must be a finite number"):
        holder.assign(values)
    holder.assign(values, any_value=True)  # a saved network that had diverged


def test_output_kind_of_model_without_loss_is_as_declared() -> None:
    """A model of the user's own that only has ``outputs`` is evaluated as it declares."""
    assert get_output_kind(SimpleNamespace(outputs="values")) == "values"
    assert get_output_kind(SimpleNamespace(outputs=10)) == "logits"  # another meaning
    with pytest.raises(UsageError, match="outputs is 'regression': it must be one of"):
        get_output_kind(SimpleNamespace(outputs="regression"))
