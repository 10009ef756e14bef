"""Evaluation metrics that merge exactly over partitions: classification, regression, ROC.

Counts are integers and sums are exact, so no metric depends on how the rows are distributed over
partitions. To sum exactly, each float64 is treated as an integer multiple of 2^-1126 (a quantum),
and Python's integers add without rounding; the sum is rounded once, when it is read. The
definitions are those of scikit-learn with ``zero_division=0``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import UsageError

MANTISSA_BITS = 53
HALF_BITS = 26  # mantissas are summed in two halves, so that sums over 2^36 rows fit an int64
EXPONENT_MIN = -1073  # frexp's exponent of the smallest float64, 0.5 x 2^-1073
NON_FINITE_SCORE = "a score is not finite: the model has diverged, or its input is bad"
QUANTA_PER_ONE = 1 << (MANTISSA_BITS - EXPONENT_MIN)


@dataclass(frozen=True, slots=True)
class ExactSum:
    """A sum of float64 values that is kept exactly, as an integer."""

    quanta: int = 0  # in multiples of 2^-1126

    @classmethod
    def from_values(cls, values: NDArray[np.floating]) -> ExactSum:
        """Return the sum of all values of an array; raise UsageError if a value is not finite."""
        values = np.asarray(values, np.float64).ravel()
        if not np.isfinite(values).all():
            bad = values[~np.isfinite(values)][0]
            raise UsageError(
                f"the data or outputs contain {bad}: fill or drop such values; if the model outputs"
                " them, lower the learning rate"
            )
        fractions, exponents = np.frexp(values)
        mantissas = np.ldexp(fractions, MANTISSA_BITS).astype(np.int64)
        steps, where = np.unique(exponents, return_inverse=True)
        high = np.zeros(len(steps), np.int64)
        low = np.zeros(len(steps), np.int64)
        np.add.at(high, where, mantissas >> HALF_BITS)
        np.add.at(low, where, mantissas & ((1 << HALF_BITS) - 1))
        return cls(
            sum(
                ((int(h) << HALF_BITS) + int(rest)) << (int(step) - EXPONENT_MIN)
                for step, h, rest in zip(steps, high, low, strict=True)
            )
        )

    def __add__(self, other: ExactSum) -> ExactSum:
        return ExactSum(self.quanta + other.quanta)

    @property
    def fraction(self) -> Fraction:
        """The sum as an exact fraction."""
        return Fraction(self.quanta, QUANTA_PER_ONE)

    def __float__(self) -> float:
        return self.quanta / QUANTA_PER_ONE  # rounds once, to nearest


AVERAGES = ("macro", "micro", "weighted", "binary")
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Classification:
    """A sparse confusion matrix, with accuracy, precision, recall and F1.

    Only pairs of label and prediction that occur are stored, so memory is bounded by the number of
    rows, however many classes there are.
    """

    classes: int  # number of classes
    cells: I64  # label x classes + predicted class, ascending
    counts: I64  # number of rows in each cell
    by_label: bool = False  # multi-label: each label of a row is counted like a two-class row

    @property
    def confusion(self) -> I64:
        """The dense confusion matrix, int64[classes, classes]; rows are the labels."""
        dense = np.zeros(self.classes * self.classes, np.int64)
        dense[self.cells] = self.counts
        return dense.reshape(self.classes, self.classes)

    def __repr__(self) -> str:
        classes = len(self.confusion)
        return f"Classification(rows={self.rows}, classes={classes}, accuracy={self.accuracy:.4f})"

    @classmethod
    def from_predictions(
        cls, labels: NDArray[Any], predicted: NDArray[Any], classes: int, *, by_label: bool = False
    ) -> Classification:
        """Return a Classification that counts the pairs of label and predicted class.

        Both arrays are [rows]. Raise UsageError for a label that is not an integer from 0 to
        ``classes - 1``, and for a prediction of NaN, which comes from scores that are not finite.
        """
        if np.isnan(predicted).any():
            raise UsageError(NON_FINITE_SCORE)
        known = (labels >= 0) & (labels < classes) & (labels == np.floor(labels))
        if not known.all():
            raise UsageError(
                f"a label is {labels[~known][0]}: the model knows the classes 0 to {classes - 1}"
            )
        cells = labels.astype(np.int64) * classes + predicted.astype(np.int64)
        found, counts = np.unique(cells, return_counts=True)
        return cls(classes, found, counts.astype(np.int64), by_label)

    @staticmethod
    def merge(parts: Sequence[Classification]) -> Classification:
        """Return a Classification with the counts of all partitions added up."""
        first = parts[0]
        cells, where = np.unique(
            np.concatenate([part.cells for part in parts]), return_inverse=True
        )
        counts = np.zeros(len(cells), np.int64)
        np.add.at(counts, where, np.concatenate([part.counts for part in parts]))
        return Classification(first.classes, cells, counts, first.by_label)

    @property
    def rows(self) -> int:
        """The number of rows counted; with ``by_label``, of labels."""
        return int(self.counts.sum())

    @property
    def accuracy(self) -> float:
        """The fraction of rows whose class was predicted correctly."""
        return float(_safe_divide(self._hits.sum(), self.counts.sum()))

    def precision(self, average: str | None = "macro") -> Any:
        """Return the fraction of rows predicted as a class that belong to that class.

        ``average`` is one of ``AVERAGES``, as in scikit-learn, or None for float64[classes].
        """
        return self._average(_safe_divide(self._hits, self._predictions), average)

    def recall(self, average: str | None = "macro") -> Any:
        """Return the fraction of a class's rows that were predicted as such; see ``precision``."""
        return self._average(_safe_divide(self._hits, self._support), average)

    def f1(self, average: str | None = "macro") -> Any:
        """Return the harmonic mean of precision and recall; see ``precision``."""
        return self._average(
            _safe_divide(2 * self._hits, self._predictions + self._support), average
        )

    @property
    def _hits(self) -> I64:
        """The number of correctly predicted rows of each class."""
        labels, found = np.divmod(self.cells, self.classes)
        return self._count_by_class(labels[labels == found], self.counts[labels == found])

    @property
    def _support(self) -> I64:
        """The number of rows whose true class is each class."""
        return self._count_by_class(self.cells // self.classes, self.counts)

    @property
    def _predictions(self) -> I64:
        """The number of rows predicted as each class."""
        return self._count_by_class(self.cells % self.classes, self.counts)

    def _count_by_class(self, class_of_count: I64, counts: I64) -> I64:
        """Sum ``counts`` per class; ``class_of_count`` holds the class of each count."""
        out = np.zeros(self.classes, np.int64)
        np.add.at(out, class_of_count, counts)
        return out

    def _average(self, by_class: F64, average: str | None) -> Any:
        """Return the values ``by_class``, f64[classes], averaged like scikit-learn does.

        Return the values themselves for None. "macro" is the mean over the classes that occur as
        label or prediction, and "binary" is the value of class 1. Raise UsageError for an unknown
        average, or for "binary" unless there are two classes.
        """
        seen = (self._predictions + self._support) > 0
        if average is None:
            return by_class
        if average == "macro":
            return float(by_class[seen].mean()) if seen.any() else 0.0
        if average == "micro":
            return self.accuracy
        if average == "weighted":
            support = self._support
            return float(_safe_divide((by_class * support).sum(), support.sum()))
        if average == "binary" and len(by_class) == 2:
            return float(by_class[1])
        raise UsageError(
            f"average={average!r} of {len(by_class)} classes: must be None or one of "
            f"{', '.join(AVERAGES)}; binary is for two classes, of which it shows class 1"
        )


@dataclass(frozen=True, slots=True)
class Regression:
    """Exact sums for each output of a regression, with MSE, RMSE, MAE and R2.

    Squared labels are exact because labels are float32.
    """

    rows: int  # number of rows
    absolute: tuple[ExactSum, ...]  # sum of |prediction - label|, one per output
    squared: tuple[ExactSum, ...]  # sum of (prediction - label)^2
    labels: tuple[ExactSum, ...]  # sum of labels
    labels_squared: tuple[ExactSum, ...]  # sum of squared labels

    def __repr__(self) -> str:
        return f"Regression(rows={self.rows}, rmse={self.rmse:.6g}, r2={self.r2:.6g})"

    @classmethod
    def from_predictions(cls, labels: NDArray[Any], predicted: NDArray[Any]) -> Regression:
        """Return a Regression with the exact sums over these rows, computed from float64 values.

        Both arrays are [rows] or [rows, outputs]. Raise UsageError if their sizes differ, or if a
        value is not finite.
        """
        wide = predicted.reshape(len(predicted), math.prod(predicted.shape[1:])).astype(np.float64)
        if labels.size != wide.size:
            raise UsageError(
                f"labels of shape {labels.shape} against outputs of shape {predicted.shape}: a "
                "regression needs a label per output; if labels are classes, pass "
                "metrics='classification' or give the model outputs='logits'"
            )
        wanted = labels.reshape(wide.shape).astype(np.float64)
        error = wide - wanted
        return cls(
            len(wide),
            _column_sums(np.abs(error)),
            _column_sums(error * error),
            _column_sums(wanted),
            _column_sums(wanted * wanted),
        )

    @staticmethod
    def merge(parts: Sequence[Regression]) -> Regression:
        """Return a Regression with the sums of all partitions added up."""
        return Regression(
            sum(part.rows for part in parts),
            *(
                tuple(map(_merge_sums, zip(*(getattr(part, name) for part in parts), strict=True)))
                for name in ("absolute", "squared", "labels", "labels_squared")
            ),
        )

    @property
    def mse(self) -> float:
        """Mean squared error over all rows and outputs."""
        return _mean_as_float([total.fraction / self.rows for total in self.squared])

    @property
    def rmse(self) -> float:
        """Root mean squared error; for several outputs, the mean of the outputs' RMSEs."""
        return float(np.mean([float(total.fraction / self.rows) ** 0.5 for total in self.squared]))

    @property
    def mae(self) -> float:
        """Mean absolute error over all rows and outputs."""
        return _mean_as_float([total.fraction / self.rows for total in self.absolute])

    @property
    def r2(self) -> float:
        """Coefficient of determination, averaged over outputs; NaN for fewer than two rows.

        An output whose labels are all equal scores 1 if all its predictions are exact, otherwise 0.
        """
        if self.rows < 2:
            return float("nan")
        scores = []
        for errors, first, second in zip(
            self.squared, self.labels, self.labels_squared, strict=True
        ):
            spread = second.fraction - first.fraction**2 / self.rows
            flat = Fraction(int(errors.quanta == 0))
            scores.append(1 - errors.fraction / spread if spread else flat)
        return _mean_as_float(scores)


@dataclass(frozen=True, slots=True, eq=False)
class Roc:
    """An exact ROC curve: the number of positive and negative rows for every distinct score.

    Scores are not binned; each distinct score takes 20 bytes.
    """

    scores: NDArray[np.float32]  # distinct, descending
    positives: I64  # number of rows of the positive class with each score
    negatives: I64  # number of other rows with each score
    positive: int = 1  # index of the positive class
    classes: int = 2  # number of classes of the model

    def __repr__(self) -> str:
        return f"Roc(auc={self.auc:.4f}, average_precision={self.average_precision:.4f})"

    @classmethod
    def from_scores(
        cls,
        is_positive: NDArray[np.bool_],
        scores: NDArray[np.floating],
        positive: int = 1,
        classes: int = 2,
    ) -> Roc:
        """Return a Roc with the numbers of positive and negative rows for each distinct score.

        Args:
            is_positive: bool[rows], whether a row belongs to the positive class.
            scores: float[rows], the model's score for the positive class.
            positive: index of the positive class.
            classes: number of classes of the model.

        Raises:
            UsageError: a score is not finite.
        """
        falling, where = np.unique(-(scores.astype(np.float32) + 0.0), return_inverse=True)
        if not np.isfinite(falling).all():
            raise UsageError(NON_FINITE_SCORE)
        trues = np.bincount(where[is_positive], minlength=len(falling)).astype(np.int64)
        falses = np.bincount(where[~is_positive], minlength=len(falling)).astype(np.int64)
        return cls(-falling, trues, falses, positive, classes)

    @staticmethod
    def merge(parts: Sequence[Roc]) -> Roc:
        """Return a Roc with the counts of all partitions added up."""
        everything = np.concatenate([part.scores for part in parts])
        falling, where = np.unique(-everything, return_inverse=True)
        counts = np.zeros((2, len(falling)), np.int64)
        np.add.at(counts[0], where, np.concatenate([part.positives for part in parts]))
        np.add.at(counts[1], where, np.concatenate([part.negatives for part in parts]))
        return Roc(-falling, counts[0], counts[1], parts[0].positive, parts[0].classes)

    def curve(self) -> tuple[F64, F64, F64]:
        """Return false positive rates, true positive rates and thresholds, by ascending rates.

        Equals ``sklearn.metrics.roc_curve`` with drop_intermediate=False; the first threshold is
        infinite.
        """
        true = np.concatenate([[0], np.cumsum(self.positives)])
        false = np.concatenate([[0], np.cumsum(self.negatives)])
        thresholds = np.concatenate([[np.inf], self.scores.astype(np.float64)])
        return _safe_divide(false, false[-1]), _safe_divide(true, true[-1]), thresholds

    @property
    def auc(self) -> float:
        """Area under the curve; NaN if all rows are positive or all are negative."""
        positives, negatives = int(self.positives.sum()), int(self.negatives.sum())
        if not positives or not negatives:
            return float("nan")
        before = np.concatenate([[0], np.cumsum(self.positives)[:-1]])
        doubled = sum(  # twice the number of correctly ordered pairs: an integer, so exact
            int(n) * (2 * int(b) + int(p))
            for n, b, p in zip(self.negatives, before, self.positives, strict=True)
            if n
        )
        return doubled / (2 * positives * negatives)

    @property
    def average_precision(self) -> float:
        """Sum over thresholds of precision x increase in recall; NaN without positive rows."""
        if not self.positives.sum():
            return float("nan")
        true = np.cumsum(self.positives)
        precision = true / (true + np.cumsum(self.negatives))
        return float((precision * self.positives).sum() / true[-1])


def _safe_divide(part: Any, whole: Any) -> F64:
    """Return part / whole, and 0 where the whole is 0."""
    part, whole = np.asarray(part, np.float64), np.asarray(whole, np.float64)
    out: F64 = np.zeros(np.broadcast(part, whole).shape)
    np.divide(part, whole, out=out, where=whole != 0)
    return out


def _column_sums(columns: F64) -> tuple[ExactSum, ...]:
    """Return the exact sum of each column of [rows, columns]."""
    return tuple(ExactSum.from_values(column) for column in columns.T)


def _merge_sums(sums: Sequence[ExactSum]) -> ExactSum:
    """Return the total of exact sums."""
    return ExactSum(sum(part.quanta for part in sums))


def _mean_as_float(values: list[Fraction]) -> float:
    """Return the exact mean of fractions as a float, rounded only once."""
    return float(sum(values, Fraction()) / len(values))
