"""Tests that metrics equal scikit-learn's, and do not depend on how rows are divided into parts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

from sparkstrom.base.errors import UsageError
from sparkstrom.observe.evaluation_metrics import Classification, Regression, Roc

random = np.random.default_rng(5)
LABELS = random.integers(0, 4, 200)
FOUND = np.where(random.random(200) < 0.6, LABELS, random.integers(0, 4, 200))
VALUES = random.normal(3, 2, (200, 2)).astype(np.float32)
GUESSES = (VALUES + random.normal(0, 1, VALUES.shape)).astype(np.float32)
SCORES = np.round(random.random(200), 2).astype(np.float32)  # with ties


@pytest.mark.parametrize("average", ["macro", "micro", "weighted", None])
def test_classification_metrics_equal_scikit_learn(average: str | None) -> None:
    """Accuracy, precision, recall, F1 and the confusion matrix equal scikit-learn's."""
    ours = Classification.from_predictions(LABELS, FOUND, 5)  # class 4 never occurs
    theirs: dict[str, Any] = {"average": average, "zero_division": 0}
    np.testing.assert_array_equal(
        ours.confusion, sk.confusion_matrix(LABELS, FOUND, labels=range(5))
    )
    assert ours.accuracy == sk.accuracy_score(LABELS, FOUND)
    if average is None:
        theirs["labels"] = range(5)
    np.testing.assert_allclose(ours.precision(average), sk.precision_score(LABELS, FOUND, **theirs))
    np.testing.assert_allclose(ours.recall(average), sk.recall_score(LABELS, FOUND, **theirs))
    np.testing.assert_allclose(ours.f1(average), sk.f1_score(LABELS, FOUND, **theirs))


def test_binary_average_gives_figures_of_class_1() -> None:
    """``average="binary"`` gives class 1's figures; with more than two classes it is refused."""
    ours = Classification.from_predictions(LABELS > 1, FOUND > 1, 2)
    assert ours.f1("binary") == pytest.approx(sk.f1_score(LABELS > 1, FOUND > 1))
    with pytest.raises(UsageError, match=r"average='binary' of 4 classes"):
        Classification.from_predictions(LABELS, FOUND, 4).recall("binary")


def test_rejects_label_beyond_classes_of_model() -> None:
    with pytest.raises(UsageError, match=r"a label is 4: .* 0 to 3"):
        Classification.from_predictions(np.array([0, 4]), np.array([0, 0]), 4)


def test_regression_metrics_equal_scikit_learn() -> None:
    ours = Regression.from_predictions(VALUES, GUESSES)
    wanted, found = VALUES.astype(np.float64), GUESSES.astype(np.float64)
    assert ours.mse == pytest.approx(sk.mean_squared_error(wanted, found), rel=1e-14)
    assert ours.rmse == pytest.approx(sk.root_mean_squared_error(wanted, found), rel=1e-14)
    assert ours.mae == pytest.approx(sk.mean_absolute_error(wanted, found), rel=1e-14)
    assert ours.r2 == pytest.approx(sk.r2_score(wanted, found), rel=1e-13)


def test_r2_is_accurate_for_large_mean() -> None:
    """R² is accurate if the values' mean is much larger than their spread."""
    far = (VALUES[:, 0] + np.float32(1e6)).astype(np.float32)
    ours = Regression.from_predictions(far, GUESSES[:, 0] + np.float32(1e6))
    theirs = sk.r2_score(far.astype(np.float64), (GUESSES[:, 0] + np.float32(1e6)).astype(float))
    assert ours.r2 == pytest.approx(theirs, rel=1e-12)


def test_r2_of_equal_labels_is_1_0_or_nan() -> None:
    """With equal labels, R² is 1 if all predictions are right, else 0; of one row it is NaN."""
    same = np.ones(4, np.float32)
    assert Regression.from_predictions(same, same).r2 == 1.0
    assert Regression.from_predictions(same, np.zeros(4)).r2 == 0.0
    assert math.isnan(Regression.from_predictions(same[:1], same[:1]).r2)


def test_roc_metrics_equal_scikit_learn() -> None:
    """The ROC curve, its area and the average precision equal scikit-learn's."""
    ours = Roc.from_scores(LABELS == 1, SCORES)
    for mine, theirs in zip(
        ours.curve(), sk.roc_curve(LABELS == 1, SCORES, drop_intermediate=False), strict=True
    ):
        np.testing.assert_allclose(mine, theirs)
    assert ours.auc == pytest.approx(sk.roc_auc_score(LABELS == 1, SCORES), rel=1e-14)
    theirs = sk.average_precision_score(LABELS == 1, SCORES)
    assert ours.average_precision == pytest.approx(theirs, rel=1e-13)


def test_roc_area_is_nan_if_all_labels_are_equal() -> None:
    """Area and average precision are NaN if all rows have the same label."""
    assert math.isnan(Roc.from_scores(np.array([True, True]), np.array([0.1, 0.2])).auc)
    assert math.isnan(Roc.from_scores(np.array([False]), np.array([0.1])).average_precision)


def test_roc_treats_signed_zeros_as_tie() -> None:
    """Scores of 0.0 and -0.0 are ties."""
    assert Roc.from_scores(np.array([True, False]), np.array([0.0, -0.0])).auc == 0.5


@settings(max_examples=30)
@given(st.randoms(use_true_random=False), st.integers(1, 7))
def test_merged_metrics_do_not_depend_on_division_of_rows(chance: Any, parts: int) -> None:
    """Merged metrics equal those of all rows, for any division and order of the rows."""
    where = np.array([chance.randrange(parts) for _ in LABELS])
    order = np.array(chance.sample(range(200), 200))
    chosen = [order[where == part] for part in range(parts)]
    counted = Classification.merge(
        [Classification.from_predictions(LABELS[i], FOUND[i], 4) for i in chosen]
    )
    summed = Regression.merge([Regression.from_predictions(VALUES[i], GUESSES[i]) for i in chosen])
    ranked = Roc.merge([Roc.from_scores(LABELS[i] == 1, SCORES[i]) for i in chosen])
    assert (counted.confusion == Classification.from_predictions(LABELS, FOUND, 4).confusion).all()
    assert summed == Regression.from_predictions(VALUES, GUESSES)
    assert ranked.auc == Roc.from_scores(LABELS == 1, SCORES).auc
    assert ranked.curve()[1].tobytes() == Roc.from_scores(LABELS == 1, SCORES).curve()[1].tobytes()
