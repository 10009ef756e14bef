"""Evaluation: executors count and sum up their rows, the driver merges, and nothing is rounded.

What travels back is counts and exact sums (``observe.metrics``); for ROC the distinct scores. So
the figures are those of all rows in one place, whatever the partitions.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import SetupError, SparkstromError, UsageError
from sparkstrom.base.import_archives import keep_unchanged_archives
from sparkstrom.base.option_types import KEY, shown, whole
from sparkstrom.models.base import Batch, FlatModel, LossBound, Measured
from sparkstrom.models.flat import one_array
from sparkstrom.models.outputs import (
    BLOCK_ROWS,
    VALUES,
    blocks_of,
    by_place,
    class_count,
    classes_of,
    counted,
    kind_of,
    label_axis,
    per_label,
    predict_whole,
    score_of_class,
)
from sparkstrom.observe.exact import ExactSum
from sparkstrom.observe.metrics import Classification, Regression, Roc
from sparkstrom.spark.data.job_errors import in_one_line
from sparkstrom.spark.data.partitioning import Source
from sparkstrom.spark.data.row_blocks import check_block, of_rows
from sparkstrom.spark.data.shuffle_blocks import Blocks
from sparkstrom.spark.executor.inference import opened

METRICS = ("classification", "regression", "roc", "loss")
AT_ONCE = 32  # partitions' figures that one task, or the driver, merges


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which figures, and for which class the ROC curve."""

    metrics: tuple[str, ...]
    positive: int = 1

    def __post_init__(self) -> None:
        if unknown := set(self.metrics) - set(METRICS):
            raise UsageError(
                f"metrics={shown(sorted(unknown))}: must be among {', '.join(METRICS)}, or None for"
                " what fits the model"
            )


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What was asked for; None is what was not."""

    rows: int
    classification: Classification | None = None
    regression: Regression | None = None
    roc: Roc | None = None
    losses: ExactSum | None = None  # of weight x loss
    weights: ExactSum | None = None

    @property
    def loss(self) -> float:
        """The model's own loss, mean over rows by their weight; NaN where it was not asked for."""
        if self.losses is None or self.weights is None or not self.weights.quanta:
            return float("nan")
        return float(self.losses.exact / self.weights.exact)

    def __repr__(self) -> str:
        return f"Evaluation({', '.join(f'{name}={value}' for name, value in self._figures())})"

    def table(self) -> str:
        """The figures, one per line."""
        return "\n".join(f"{name:<20}{value}" for name, value in self._figures())

    def _figures(self) -> list[tuple[str, str]]:
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


def wanted_for(model: FlatModel, metrics: str | Sequence[str] | None, positive: int) -> Wanted:
    """The asked metrics, or those that fit the model's outputs. Raise UsageError for others."""
    if metrics is None:
        metrics = "regression" if kind_of(model) == VALUES else "classification"
    names = (metrics,) if isinstance(metrics, str) else metrics
    listed = isinstance(names, list | tuple | set | frozenset)
    if not (listed and all(isinstance(name, str) for name in names)):
        raise UsageError(
            f"metrics={shown(metrics)}: must be among {', '.join(METRICS)}, or None for what"
            " fits the model"
        )
    positive = whole(0)[KEY].read("positive", positive)
    wanted = Wanted(tuple(names), positive)
    if "loss" in wanted.metrics and not isinstance(model, Measured):
        raise UsageError(
            f"{type(model).__name__} has no loss(batch) -> (sum, weight), so its loss cannot be "
            "measured without training: give it one (see sparkstrom.models.base.Measured)"
        )
    if "loss" in wanted.metrics and isinstance(model, LossBound):
        model.need_loss()
    return wanted


def evaluate_batch(model: FlatModel, wanted: Wanted, batch: Batch) -> Evaluation:
    """The figures of some rows."""
    asked = {name: name in wanted.metrics for name in METRICS}
    out: dict[str, Any] = {}
    if asked["classification"] or asked["regression"] or asked["roc"]:
        outputs = predict_whole(model, batch.features)
        labels, kind = one_array(batch.labels, "labels"), kind_of(model)
        if asked["classification"] or asked["roc"]:
            wide, classes = by_place(model, outputs, labels)
            counts, by_label = counted(model, labels, classes), per_label(model, outputs)
            wide, classes = wide[counts], classes[counts]
        if asked["classification"]:
            found = classes_of(wide, kind)
            out["classification"] = Classification.of(
                classes, found, class_count(wide), by_label=by_label
            )
        if asked["roc"]:
            positive, known = wanted.positive, class_count(wide)
            if by_label:
                axis = label_axis(model, outputs)
                known = outputs.shape[axis]
                wide, classes = _of_label(outputs, classes, positive, axis)
                positive = 1
            scores = score_of_class(wide, kind, positive)
            out["roc"] = Roc.of(classes == positive, scores, wanted.positive, known)
        if asked["regression"]:
            out["regression"] = Regression.of(labels, outputs)
    if asked["loss"]:
        assert isinstance(model, Measured), "asked for before"
        measured = np.array([model.loss(part) for part in blocks_of(batch)], np.float64)
        out["losses"], out["weights"] = ExactSum.of(measured[:, 0]), ExactSum.of(measured[:, 1])
    return Evaluation(batch.rows, **out)


def _of_label(
    outputs: NDArray[Any], labels: NDArray[Any], index: int, axis: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Outputs [n, 1] and labels [n] of one of several labels of each row, step or pixel."""
    if not 0 <= index < outputs.shape[axis]:
        raise UsageError(
            f"positive={index}: this model knows the labels 0 to {outputs.shape[axis] - 1}"
        )
    chosen = (
        array.take(index, axis).reshape(-1) for array in (outputs, labels.reshape(outputs.shape))
    )
    scores, truth = chosen
    return scores[:, None], truth


def merged(parts: Sequence[Evaluation]) -> Evaluation:
    """The figures of all rows. Raise UsageError where there are none."""
    parts = [part for part in parts if part.rows]
    if not parts:
        raise UsageError("there are no rows to evaluate: look at the data's filters")

    def collect(name: str) -> list[Any]:
        return [value for part in parts if (value := getattr(part, name)) is not None]

    out: dict[str, Any] = {}
    for name, kind in (
        ("classification", Classification),
        ("regression", Regression),
        ("roc", Roc),
    ):
        if found := collect(name):
            out[name] = kind.merged(found)
    for name in ("losses", "weights"):
        if found := collect(name):
            out[name] = ExactSum(sum(part.quanta for part in found))
    return Evaluation(sum(part.rows for part in parts), **out)


def evaluate_partition(
    shipped: Any, wanted: Wanted, blocks: Blocks, index: int, items: Iterable[Any]
) -> Iterator[Evaluation | UsageError | SetupError]:
    """The figures of one partition, whatever its rows come from; runs on an executor.

    What is wrong with the rows is an answer: Spark would try a task that fails again.
    """
    keep_unchanged_archives()
    model, parts = opened(shipped.value), Growing()
    try:
        for block in of_rows(blocks(index, items), BLOCK_ROWS):
            check_block(model, block)
            parts.add(evaluate_batch(model, wanted, block.form.batch(block.records)))
    except (UsageError, SetupError) as error:
        yield error
        return
    if parts.all:
        yield merged(parts.all)


class Growing:
    """Evaluations that are merged as they come, each of them about as often as there are bits
    in their number: neither memory nor time grows with blocks times figures."""

    def __init__(self) -> None:
        self._by_level: list[Evaluation | None] = []

    @property
    def all(self) -> list[Evaluation]:
        """Of everything that was added, in a few parts."""
        return [part for part in self._by_level if part is not None]

    def add(self, part: Evaluation) -> None:
        """As a binary counter counts: two of a level are one of the next."""
        for level, held in enumerate(self._by_level):
            if held is None:
                self._by_level[level] = part
                return
            part = merged([held, part])
            self._by_level[level] = None
        self._by_level.append(part)


def evaluate_source(shipped: Any, wanted: Wanted, source: Source) -> Evaluation:
    """The figures of all partitions. Raise UsageError naming a row that does not fit."""
    run = partial(evaluate_partition, shipped, wanted, source.blocks)
    answers = source.rdd.mapPartitionsWithIndex(run)
    with in_one_line("evaluating"):
        while (count := answers.getNumPartitions()) > AT_ONCE:
            answers = answers.coalesce(-(-count // AT_ONCE), shuffle=True)
            answers = answers.mapPartitions(merged_answers)
        found = answers.collect()
    return merged_or_raise(found)


def merged_answers(found: Iterable[Any]) -> Iterator[Evaluation | UsageError | SetupError]:
    """Of what ``evaluate_partition`` yielded on some partitions; runs on an executor."""
    parts = Growing()
    for part in found:
        if not isinstance(part, Evaluation):
            yield part
            return
        parts.add(part)
    if parts.all:
        yield merged(parts.all)


def merged_or_raise(found: Iterable[Evaluation | SparkstromError]) -> Evaluation:
    """Of what ``evaluate_partition`` yielded on all partitions."""
    parts = Growing()
    for part in found:
        if not isinstance(part, Evaluation):
            raise part
        if part.rows:
            parts.add(part)
    return merged(parts.all)
