"""Evaluate a model on distributed rows, with metrics that do not depend on the partitioning.

Executors return counts and exact sums (``observe.evaluation_metrics``), and for ROC the distinct
scores. The driver merges them without rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import SparkstromError, UsageError
from sparkstrom.base.option_types import KEY, shown, whole
from sparkstrom.data.column_selection import arrays_to_batch
from sparkstrom.models.base import Batch, FlatModel, Measured, RequiresLoss, require_single_array
from sparkstrom.models.output_interpretation import (
    VALUES,
    argmax_classes,
    compute_class_score,
    count_classes,
    flatten_positions,
    get_output_kind,
    has_label_per_output,
    iter_row_blocks,
    label_axis,
    mask_counted_labels,
    predict_keeping_shape,
)
from sparkstrom.observe.evaluation_metrics import Classification, ExactSum, Regression, Roc

METRICS = ("classification", "regression", "roc", "loss")


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """The metrics to compute, and the positive class of the ROC curve.

    Raises UsageError for unknown metrics.
    """

    metrics: tuple[str, ...]  # names among METRICS
    positive: int = 1  # index of the class that counts as positive for ROC

    def __post_init__(self) -> None:
        if unknown := set(self.metrics) - set(METRICS):
            raise UsageError(
                f"metrics={shown(sorted(unknown))}: must be among {', '.join(METRICS)}, or None for"
                " what fits the model"
            )


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The requested metrics on some rows; metrics that were not requested are None."""

    rows: int  # number of rows
    classification: Classification | None = None  # confusion matrix
    regression: Regression | None = None  # sums of errors and of labels
    roc: Roc | None = None  # number of positive and negative rows by score
    losses: ExactSum | None = None  # sum of weight x loss
    weights: ExactSum | None = None  # sum of the weights

    @property
    def loss(self) -> float:
        """The model's own loss, as the weighted mean over rows; NaN if it was not requested."""
        if self.losses is None or self.weights is None or not self.weights.quanta:
            return float("nan")
        return float(self.losses.fraction / self.weights.fraction)

    def __repr__(self) -> str:
        metrics = ", ".join(f"{name}={value}" for name, value in self._format_metrics())
        return f"Evaluation({metrics})"

    def table(self) -> str:
        """Return the metrics as text, one per line."""
        return "\n".join(f"{name:<20}{value}" for name, value in self._format_metrics())

    def _format_metrics(self) -> list[tuple[str, str]]:
        """Return the name and the formatted value of each metric."""
        lines = [("rows", f"{self.rows:,}")]
        if (found := self.classification) is not None:
            name = "accuracy by label" if found.by_label else "accuracy"
            lines += [(name, f"{found.accuracy:.4f}")]
            lines += [
                (f"{name} (macro)", f"{getattr(found, name)():.4f}")
                for name in ("precision", "recall", "f1")
            ]
        if (sums := self.regression) is not None:
            lines += [(name, f"{getattr(sums, name):.6g}") for name in ("mse", "rmse", "mae", "r2")]
        if (roc := self.roc) is not None:
            what = (
                f"{roc.positive} of {roc.classes} (0 to {roc.classes - 1}; choose with positive=)"
            )
            lines += [("ROC of class", what)]
            lines += [("area under ROC", f"{roc.auc:.4f}")]
            lines += [("average precision", f"{roc.average_precision:.4f}")]
        if self.losses is not None:
            lines += [("loss", f"{self.loss:.6g}")]
        return lines


def select_metrics(
    model: FlatModel, metrics: str | Sequence[str] | None, positive: int
) -> MetricSpec:
    """Return the requested metrics, or those that suit the model's outputs.

    Args:
        model: The model to evaluate.
        metrics: Names among ``METRICS``; None: classification or regression, by the outputs.
        positive: Index of the positive class of the ROC curve.

    Raises:
        UsageError: An argument is invalid, or the model cannot compute a loss.
    """
    if metrics is None:
        metrics = "regression" if get_output_kind(model) == VALUES else "classification"
    names = (metrics,) if isinstance(metrics, str) else metrics
    listed = isinstance(names, list | tuple | set | frozenset)
    if not (listed and all(isinstance(name, str) for name in names)):
        raise UsageError(
            f"metrics={shown(metrics)}: must be among {', '.join(METRICS)}, or None for what"
            " fits the model"
        )
    positive = whole(0)[KEY].read("positive", positive)
    wanted = MetricSpec(tuple(names), positive)
    if "loss" in wanted.metrics and not isinstance(model, Measured):
        raise UsageError(
            f"{type(model).__name__} lacks loss(batch) -> (sum, weight), or outputs, so its loss"
            " cannot be measured without training: give it both (sparkstrom.models.base.Measured)"
        )
    if "loss" in wanted.metrics and isinstance(model, RequiresLoss):
        model.need_loss()
    return wanted


def evaluate_batch(model: FlatModel, spec: MetricSpec, batch: Batch) -> Evaluation:
    """Compute the requested metrics on one batch of rows and return them.

    Raise UsageError if labels, outputs or losses do not suit a metric.
    """
    asked = {name: name in spec.metrics for name in METRICS}
    out: dict[str, Any] = {}
    if asked["classification"] or asked["regression"] or asked["roc"]:
        outputs = predict_keeping_shape(model, batch.features)
        labels, kind = require_single_array(batch.labels, "labels"), get_output_kind(model)
        if asked["classification"] or asked["roc"]:
            wide, classes = flatten_positions(model, outputs, labels)
            counts, by_label = (
                mask_counted_labels(model, labels, classes),
                has_label_per_output(model, outputs),
            )
            wide, classes = wide[counts], classes[counts]
        if asked["classification"]:
            found = argmax_classes(wide, kind)
            out["classification"] = Classification.from_predictions(
                classes, found, count_classes(wide), by_label=by_label
            )
        if asked["roc"]:
            positive, known = spec.positive, count_classes(wide)
            if by_label:
                axis = label_axis(model, outputs)
                known = outputs.shape[axis]
                wide, classes = _select_label(outputs, classes, positive, axis)
                positive = 1
            scores = compute_class_score(wide, kind, positive)
            out["roc"] = Roc.from_scores(classes == positive, scores, spec.positive, known)
        if asked["regression"]:
            out["regression"] = Regression.from_predictions(labels, outputs)
    if asked["loss"]:
        assert isinstance(model, Measured), "select_metrics has checked it"
        measured = np.array([model.loss(part) for part in iter_row_blocks(batch)], np.float64)
        out["losses"], out["weights"] = (
            ExactSum.from_values(measured[:, 0]),
            ExactSum.from_values(measured[:, 1]),
        )
    return Evaluation(batch.rows, **out)


def evaluate_arrays(model: FlatModel, spec: MetricSpec, data: tuple[Any, ...]) -> Evaluation:
    """Compute metrics on arrays (features, labels) or (features, labels, weights); return them.

    Raise UsageError if there are no rows, or if they are invalid or do not suit model or metrics.
    """
    batch = arrays_to_batch(data)
    if not batch.rows:
        return merge_evaluations([])
    model.check(batch.features, batch.labels)
    return merge_evaluations([evaluate_batch(model, spec, batch)])


def _select_label(
    outputs: NDArray[Any], labels: NDArray[Any], index: int, axis: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return one label's outputs [n, 1] and true values [n], where n counts rows, steps or pixels.

    ``index`` is the label's position on the axis ``axis`` of the outputs. Raise UsageError if there
    is no such label.
    """
    if not 0 <= index < outputs.shape[axis]:
        raise UsageError(
            f"positive={index}: this model knows the labels 0 to {outputs.shape[axis] - 1}"
        )
    chosen = (
        array.take(index, axis).reshape(-1) for array in (outputs, labels.reshape(outputs.shape))
    )
    scores, truth = chosen
    return scores[:, None], truth


def merge_evaluations(parts: Sequence[Evaluation]) -> Evaluation:
    """Return the merged metrics of several batches of rows. Raise UsageError if none has rows."""
    parts = [part for part in parts if part.rows]
    if not parts:
        raise UsageError("there are no rows to evaluate: check the filters of the data")

    def collect(name: str) -> list[Any]:
        return [value for part in parts if (value := getattr(part, name)) is not None]

    out: dict[str, Any] = {}
    for name, kind in (
        ("classification", Classification),
        ("regression", Regression),
        ("roc", Roc),
    ):
        if found := collect(name):
            out[name] = kind.merge(found)
    for name in ("losses", "weights"):
        if found := collect(name):
            out[name] = ExactSum(sum(part.quanta for part in found))
    return Evaluation(sum(part.rows for part in parts), **out)


class EvaluationAccumulator:
    """Merges many evaluations as they arrive, like a binary counter.

    Level i holds None or the merged result of 2^i evaluations. So n evaluations need memory for
    only log2(n) of them, and each is merged log2(n) times.
    """

    def __init__(self) -> None:
        self._by_level: list[Evaluation | None] = []

    @property
    def all(self) -> list[Evaluation]:
        """Everything that was added, merged into a few evaluations."""
        return [part for part in self._by_level if part is not None]

    def add(self, part: Evaluation) -> None:
        """Add an evaluation; merge results of equally many evaluations, as often as possible."""
        for level, present in enumerate(self._by_level):
            if present is None:
                self._by_level[level] = part
                return
            part = merge_evaluations([present, part])
            self._by_level[level] = None
        self._by_level.append(part)


def merge_evaluations_or_raise(results: Iterable[Evaluation | SparkstromError]) -> Evaluation:
    """Merge the evaluations of all partitions, or raise the first error among ``results``.

    Raise UsageError if the partitions have no rows.
    """
    parts = EvaluationAccumulator()
    for result in results:
        if not isinstance(result, Evaluation):
            raise result
        if result.rows:
            parts.add(result)
    return merge_evaluations(parts.all)
