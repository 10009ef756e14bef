"""Metrics that merge: what partitions have counted adds up to what all rows would have given.

Counts are whole numbers, sums are exact (``exact``), so no figure depends on how the rows were
spread. The definitions are scikit-learn's, with its zero_division=0.
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
from sparkstrom.observe.exact import ExactSum

AVERAGES = ("macro", "micro", "weighted", "binary")
F64 = NDArray[np.float64]
I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Classification:
    """How often each class was taken for which.

    Only pairs that occur are held, so that many classes take no more than there are rows.
    """

    classes: int
    cells: I64  # label x classes + predicted, rising
    counts: I64  # of each cell
    by_label: bool = False  # counts each of a row's labels, true or false, as a place of its own

    @property
    def confusion(self) -> I64:
        """i64[classes, classes], rows are the labels; made when it is asked for."""
        dense = np.zeros(self.classes * self.classes, np.int64)
        dense[self.cells] = self.counts
        return dense.reshape(self.classes, self.classes)

    def __repr__(self) -> str:
        classes = len(self.confusion)
        return f"Classification(rows={self.rows}, classes={classes}, accuracy={self.accuracy:.4f})"

    @classmethod
    def of(
        cls,
        labels: NDArray[Any],
        predicted: NDArray[Any],
        classes: int,
        *,
        by_label: bool = False,
    ) -> Classification:
        """Count whole-numbered classes below ``classes``. Raise UsageError for another label."""
        known = (labels >= 0) & (labels < classes) & (labels == np.floor(labels))
        if not known.all():
            raise UsageError(
                f"a label is {labels[~known][0]}: the model knows the classes 0 to {classes - 1}"
            )
        cells = labels.astype(np.int64) * classes + predicted.astype(np.int64)
        found, counts = np.unique(cells, return_counts=True)
        return cls(classes, found, counts.astype(np.int64), by_label)

    @staticmethod
    def merged(parts: Sequence[Classification]) -> Classification:
        """All that the parts have counted."""
        first = parts[0]
        cells, where = np.unique(
            np.concatenate([part.cells for part in parts]), return_inverse=True
        )
        counts = np.zeros(len(cells), np.int64)
        np.add.at(counts, where, np.concatenate([part.counts for part in parts]))
        return Classification(first.classes, cells, counts, first.by_label)

    @property
    def rows(self) -> int:
        return int(self.counts.sum())

    @property
    def accuracy(self) -> float:
        """Share of rows whose class was found."""
        return float(_share(self._hits.sum(), self.counts.sum()))

    def precision(self, average: str | None = "macro") -> Any:
        """Share of rows taken for a class that are of it; f64[classes] where average is None."""
        return self._averaged(_share(self._hits, self._taken), average)

    def recall(self, average: str | None = "macro") -> Any:
        """Share of a class's rows that were found; f64[classes] where average is None."""
        return self._averaged(_share(self._hits, self._support), average)

    def f1(self, average: str | None = "macro") -> Any:
        """Harmonic mean of precision and recall; f64[classes] where average is None."""
        return self._averaged(_share(2 * self._hits, self._taken + self._support), average)

    @property
    def _hits(self) -> I64:
        labels, found = np.divmod(self.cells, self.classes)
        return self._by_class(labels[labels == found], self.counts[labels == found])

    @property
    def _support(self) -> I64:
        return self._by_class(self.cells // self.classes, self.counts)

    @property
    def _taken(self) -> I64:
        return self._by_class(self.cells % self.classes, self.counts)

    def _by_class(self, where: I64, counts: I64) -> I64:
        out = np.zeros(self.classes, np.int64)
        np.add.at(out, where, counts)
        return out

    def _averaged(self, by_class: F64, average: str | None) -> Any:
        """scikit-learn's averages, over the classes that a label or a prediction has."""
        seen = (self._taken + self._support) > 0
        if average is None:
            return by_class
        if average == "macro":
            return float(by_class[seen].mean()) if seen.any() else 0.0
        if average == "micro":
            return self.accuracy
        if average == "weighted":
            support = self._support
            return float(_share((by_class * support).sum(), support.sum()))
        if average == "binary" and len(by_class) == 2:
            return float(by_class[1])
        raise UsageError(
            f"average={average!r} of {len(by_class)} classes: must be None or one of "
            f"{', '.join(AVERAGES)}; binary is for two classes, of which it shows class 1"
        )


@dataclass(frozen=True, slots=True)
class Regression:
    """Exact sums over rows, per output; the squared label is exact because labels are float32."""

    rows: int
    absolute: tuple[ExactSum, ...]  # |prediction - label|
    squared: tuple[ExactSum, ...]  # (prediction - label)^2
    labels: tuple[ExactSum, ...]
    labels_squared: tuple[ExactSum, ...]

    def __repr__(self) -> str:
        return f"Regression(rows={self.rows}, rmse={self.rmse:.6g}, r2={self.r2:.6g})"

    @classmethod
    def of(cls, labels: NDArray[Any], predicted: NDArray[Any]) -> Regression:
        """Sum up [rows] or [rows, outputs], both of the same number of values."""
        wide = predicted.reshape(len(predicted), math.prod(predicted.shape[1:])).astype(np.float64)
        if labels.size != wide.size:
            raise UsageError(
                f"labels of shape {labels.shape} against outputs of shape {predicted.shape}: a "
                "regression needs a label per output"
            )
        wanted = labels.reshape(wide.shape).astype(np.float64)
        error = wide - wanted
        return cls(
            len(wide),
            _sums(np.abs(error)),
            _sums(error * error),
            _sums(wanted),
            _sums(wanted * wanted),
        )

    @staticmethod
    def merged(parts: Sequence[Regression]) -> Regression:
        """All that the parts have summed."""
        return Regression(
            sum(part.rows for part in parts),
            *(
                tuple(map(_total, zip(*(getattr(part, name) for part in parts), strict=True)))
                for name in ("absolute", "squared", "labels", "labels_squared")
            ),
        )

    @property
    def mse(self) -> float:
        """Mean squared error, over rows and outputs."""
        return _mean([total.exact / self.rows for total in self.squared])

    @property
    def rmse(self) -> float:
        """Root of the mean squared error; several outputs: the mean of their roots."""
        return float(np.mean([float(total.exact / self.rows) ** 0.5 for total in self.squared]))

    @property
    def mae(self) -> float:
        """Mean absolute error, over rows and outputs."""
        return _mean([total.exact / self.rows for total in self.absolute])

    @property
    def r2(self) -> float:
        """1 - error's squares / labels' squares about their mean, averaged over outputs.

        Where all labels are equal: 1 for no error at all, otherwise 0. NaN for fewer than two rows.
        """
        if self.rows < 2:
            return float("nan")
        scores = []
        for errors, first, second in zip(
            self.squared, self.labels, self.labels_squared, strict=True
        ):
            spread = second.exact - first.exact**2 / self.rows
            flat = Fraction(int(errors.quanta == 0))
            scores.append(1 - errors.exact / spread if spread else flat)
        return _mean(scores)


@dataclass(frozen=True, slots=True, eq=False)
class Roc:
    """Each distinct score, falling, with how many rows of and not of the class had it.

    20 bytes per distinct score; nothing is put into bins, so the curve is the exact one.
    """

    scores: NDArray[np.float32]
    positives: I64
    negatives: I64
    positive: int = 1  # the class that the others are told from
    classes: int = 2  # that the model knows

    def __repr__(self) -> str:
        return f"Roc(auc={self.auc:.4f}, average_precision={self.average_precision:.4f})"

    @classmethod
    def of(
        cls,
        is_positive: NDArray[np.bool_],
        scores: NDArray[np.floating],
        positive: int = 1,
        classes: int = 2,
    ) -> Roc:
        """Count scores f32[rows] of rows that are of the class or not."""
        falling, where = np.unique(-(scores.astype(np.float32) + 0.0), return_inverse=True)
        if not np.isfinite(falling).all():
            raise UsageError("a score is not finite: the model has diverged, or its input is bad")
        trues = np.bincount(where[is_positive], minlength=len(falling)).astype(np.int64)
        falses = np.bincount(where[~is_positive], minlength=len(falling)).astype(np.int64)
        return cls(-falling, trues, falses, positive, classes)

    @staticmethod
    def merged(parts: Sequence[Roc]) -> Roc:
        """All that the parts have counted."""
        everything = np.concatenate([part.scores for part in parts])
        falling, where = np.unique(-everything, return_inverse=True)
        counts = np.zeros((2, len(falling)), np.int64)
        np.add.at(counts[0], where, np.concatenate([part.positives for part in parts]))
        np.add.at(counts[1], where, np.concatenate([part.negatives for part in parts]))
        return Roc(-falling, counts[0], counts[1], parts[0].positive, parts[0].classes)

    def curve(self) -> tuple[F64, F64, F64]:
        """False and true positive rates and their thresholds, as ``sklearn.metrics.roc_curve``.

        The first threshold is infinite; no point is left out (drop_intermediate=False).
        """
        true = np.concatenate([[0], np.cumsum(self.positives)])
        false = np.concatenate([[0], np.cumsum(self.negatives)])
        thresholds = np.concatenate([[np.inf], self.scores.astype(np.float64)])
        return _share(false, false[-1]), _share(true, true[-1]), thresholds

    @property
    def auc(self) -> float:
        """Area under the curve; NaN where all rows are of the class, or none."""
        positives, negatives = int(self.positives.sum()), int(self.negatives.sum())
        if not positives or not negatives:
            return float("nan")
        before = np.concatenate([[0], np.cumsum(self.positives)[:-1]])
        doubled = sum(  # twice the number of pairs in the right order: a whole number
            int(n) * (2 * int(b) + int(p))
            for n, b, p in zip(self.negatives, before, self.positives, strict=True)
            if n
        )
        return doubled / (2 * positives * negatives)

    @property
    def average_precision(self) -> float:
        """Sum over thresholds of precision x what recall gains there; NaN without a positive."""
        if not self.positives.sum():
            return float("nan")
        true = np.cumsum(self.positives)
        precision = true / (true + np.cumsum(self.negatives))
        return float((precision * self.positives).sum() / true[-1])


def _share(part: Any, whole: Any) -> F64:
    """part / whole, and 0 where there is nothing."""
    part, whole = np.asarray(part, np.float64), np.asarray(whole, np.float64)
    out: F64 = np.zeros(np.broadcast(part, whole).shape)
    np.divide(part, whole, out=out, where=whole != 0)
    return out


def _sums(columns: F64) -> tuple[ExactSum, ...]:
    return tuple(ExactSum.of(column) for column in columns.T)


def _total(sums: Sequence[ExactSum]) -> ExactSum:
    return ExactSum(sum(part.quanta for part in sums))


def _mean(values: list[Fraction]) -> float:
    return float(sum(values, Fraction()) / len(values))
