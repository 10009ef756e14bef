"""Outputs: what a model's outputs say about classes, whether they are probabilities or logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import UsageError
from sparkstrom.models.base import Batch, Columns, Measured, arrays_of
from sparkstrom.models.flat import one_array

PROBABILITIES, LOGITS, VALUES = KINDS = ("probabilities", "logits", "values")
BLOCK_ROWS = 256

Outputs = NDArray[np.float32]  # [rows, outputs]


def kind_of(model: object) -> str:
    """What the model's outputs are; one that does not say so gives logits."""
    return model.outputs if isinstance(model, Measured) else LOGITS


def per_label(model: object, outputs: NDArray[Any]) -> bool:
    """Whether each of several outputs says yes or no on its own, as a loss per label trains it."""
    if not getattr(model, "per_label", False) or outputs.ndim < 2:
        return False
    return int(outputs.shape[label_axis(model, outputs)]) > 1


def label_axis(model: object, outputs: NDArray[Any]) -> int:
    """Along which axis outputs have a model's labels or classes."""
    return 1 if outputs.ndim == 2 else int(getattr(model, "class_axis", 1))


def predict_in_blocks(model: Any, features: Columns) -> Outputs:
    """Outputs f32[rows, outputs], as ``predict_whole``, all of a row side by side."""
    outputs = predict_whole(model, features)
    return outputs.reshape(len(outputs), -1) if len(outputs) else np.zeros((0, 0), np.float32)


def predict_whole(model: Any, features: Columns) -> NDArray[Any]:
    """Outputs [rows, ...] in their own shape, the same bits for a row whatever is around it.

    A matrix product rounds differently for another number of rows, so all blocks are equally long;
    the last one is filled up with copies of its first row. Of a dict of outputs it is the one that
    is called what the model's outputs are.
    """
    rows = len(arrays_of(features)[0])
    out = []
    for first in range(0, rows, BLOCK_ROWS):
        count = min(BLOCK_ROWS, rows - first)
        index = first + np.arange(BLOCK_ROWS)
        index[count:] = first
        outputs = model.predict(rows_at(features, index))
        if isinstance(outputs, dict) and kind_of(model) in outputs:
            outputs = outputs[kind_of(model)]
        if not isinstance(outputs, np.ndarray):
            raise UsageError(
                f"the model puts out {_said(outputs)}: this needs one array of numbers; of a dict "
                "it takes the one that the model's option outputs= names (logits, probabilities, "
                "values); or give the model one output"
            )
        out.append(outputs[:count])
    return stacked(out) if out else np.zeros((0, 0), np.float32)


def stacked(pieces: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Outputs [rows, ...] of consecutive rows as one array, of the first one's dtype.

    Raise UsageError where the shape of a row differs from piece to piece.
    """
    first = pieces[0]
    for piece in pieces:
        if piece.shape[1:] != first.shape[1:]:
            raise UsageError(
                f"the model puts out {list(first.shape[1:])} for some rows and"
                f" {list(piece.shape[1:])} for others: outputs must have one shape; pad or cut them"
                " to a fixed length in the model, or predict rows of one length at a time"
            )
    return np.concatenate(pieces, dtype=first.dtype)


def _said(outputs: Any) -> str:
    if isinstance(outputs, dict):
        return f"a dict of {', '.join(map(str, outputs))}"
    return f"a {type(outputs).__name__}"


def rows_at(columns: Columns, index: NDArray[Any] | slice) -> Columns:
    """These rows of each array."""
    if isinstance(columns, np.ndarray):
        return columns[index]
    if isinstance(columns, dict):
        return {name: array[index] for name, array in columns.items()}
    return tuple(array[index] for array in columns)


def blocks_of(batch: Batch) -> Iterator[Batch]:
    """The batch in parts of at most ``BLOCK_ROWS``, so that memory stays small."""
    for first in range(0, batch.rows, BLOCK_ROWS):
        part = slice(first, first + BLOCK_ROWS)
        weights = None if batch.weights is None else batch.weights[part]
        yield Batch(rows_at(batch.features, part), rows_at(batch.labels, part), weights)


def class_count(outputs: Outputs) -> int:
    """One output is a logit of class 1 against class 0, or its probability."""
    return max(2, int(outputs.shape[1]))


def classes_of(outputs: Outputs, kind: str = LOGITS) -> NDArray[np.int64]:
    """The likeliest class of each row; of equal ones the first."""
    if outputs.shape[1] == 1:
        least = 0.5 if kind == PROBABILITIES else 0.0
        return (outputs[:, 0] > least).astype(np.int64)
    classes: NDArray[np.int64] = outputs.argmax(axis=1).astype(np.int64, copy=False)
    return classes


def by_place(
    model: object, outputs: NDArray[Any], labels: NDArray[Any]
) -> tuple[Outputs, NDArray[Any]]:
    """Outputs [n, classes] and class indices [n], of rows; of sequences and images of each place.

    Outputs are [rows, classes, steps ...] or, where labels say so, [rows, steps ..., classes].
    With a loss per label each output is a place of two classes: [n, 1].
    """
    if per_label(model, outputs):
        if labels.size != outputs.size:
            raise UsageError(
                f"labels of shape {labels.shape} against outputs of shape {outputs.shape}: the "
                "model's loss is per label, so each output needs a label of its own, 0 or 1"
            )
        return outputs.reshape(-1, 1), labels.reshape(-1)
    axis = _class_axis(model, outputs.shape, labels.shape)
    if axis is None:
        return outputs.reshape(len(outputs), -1), class_labels(labels)
    classes = outputs.shape[axis]
    wide = np.moveaxis(outputs, axis, -1).reshape(-1, classes)
    if labels.shape == outputs.shape:
        labels = np.moveaxis(labels, axis, -1).reshape(-1, classes)
    return wide, class_labels(labels.reshape(len(wide), -1))


def _class_axis(model: object, outputs: tuple[int, ...], labels: tuple[int, ...]) -> int | None:
    """None where a row is one place. What labels leave open is as the model has it."""
    fits = {1: outputs[2:], -1: outputs[1:-1]}
    if len(outputs) < 3 or outputs[0] != labels[0]:
        return None
    axes = [axis for axis, places in fits.items() if labels in (outputs, (outputs[0], *places))]
    own = int(getattr(model, "class_axis", 1))
    return own if own in axes else axes[0] if axes else None


def class_labels(labels: Columns) -> NDArray[Any]:
    """Class indices [rows]; of shares per class the largest.

    Raise UsageError for two arrays, and for rows of which several labels are true.
    """
    array = one_array(labels, "labels")
    wide = array.ndim > 1 and array.shape[1] > 1
    if wide and ((array == 1).sum(axis=1) > 1).any():
        row = int(((array == 1).sum(axis=1) > 1).argmax())
        raise UsageError(
            f"labels {array[row].tolist()} are true of one row: several labels are no class; train"
            " with a loss per label, such as BCEWithLogitsLoss, binary_crossentropy or XENT, which"
            " is measured label by label, or ask for the metric loss"
        )
    classes: NDArray[Any] = array.argmax(axis=1) if wide else array.reshape(len(array))
    return classes


def counted(model: object, labels: NDArray[Any], classes: NDArray[Any]) -> NDArray[np.bool_]:
    """Which of ``by_place``'s classes count: all but those that the model's loss ignores."""
    ignored = getattr(model, "ignored_label", None)
    if ignored is None or labels.size != classes.size:  # shares per class ignore nothing
        return np.ones(len(classes), np.bool_)
    return np.asarray(classes != ignored)


def measured(model: Any, batch: Batch, metric: str) -> tuple[float, float]:
    """(sum of weight x loss, sum of weights), or for "accuracy" (weights of hits, of all)."""
    if metric == "loss":
        total, weight = model.loss(batch)
        return float(total), float(weight)
    outputs, labels = predict_whole(model, batch.features), one_array(batch.labels, "labels")
    wide, classes = by_place(model, outputs, labels)
    counts = counted(model, labels, classes)
    hits = (classes_of(wide, kind_of(model)) == classes) & counts
    hit, of_all = (places.reshape(batch.rows, -1).mean(axis=1) for places in (hits, counts))
    weights = np.ones(batch.rows) if batch.weights is None else batch.weights.astype(np.float64)
    return float((weights * hit).sum()), float((weights * of_all).sum())


def raw_of(outputs: Outputs, kind: str) -> NDArray[np.float64]:
    """f64[rows, classes], of which the largest is the class, and each alone ranks rows.

    Logits have no zero of their own: their mean over the classes is taken out.
    """
    wide: NDArray[np.float64] = outputs.astype(np.float64)
    if kind == PROBABILITIES:
        return np.concatenate([1 - wide, wide], axis=1) if wide.shape[1] == 1 else wide
    if wide.shape[1] == 1:
        wide = np.concatenate([np.zeros_like(wide), wide], axis=1)
    wide -= wide.mean(axis=1, keepdims=True)
    return wide


def probabilities_of(outputs: Outputs, kind: str) -> NDArray[np.float64]:
    """f64[rows, classes], each row's sum is 1."""
    raw = raw_of(outputs, kind)
    if kind == PROBABILITIES:
        return raw
    raw -= raw.max(axis=1, keepdims=True)
    np.exp(raw, out=raw)
    raw /= raw.sum(axis=1, keepdims=True)
    return raw


def score_of_class(outputs: Outputs, kind: str, index: int) -> NDArray[np.float32]:
    """f32[rows] that ranks rows by how likely class ``index`` is. Raise UsageError for no class."""
    if not 0 <= index < class_count(outputs):
        raise UsageError(
            f"class {index}: this model knows the classes 0 to {class_count(outputs) - 1}"
        )
    two_logits = kind != PROBABILITIES and class_count(outputs) == 2
    wide = raw_of(outputs, kind) if two_logits else probabilities_of(outputs, kind)
    return wide[:, index].astype(np.float32)
