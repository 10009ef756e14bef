"""Predict in blocks of rows; derive classes, probabilities and accuracy from a model's outputs.

A model's output kind says what its outputs are: "probabilities" of classes, "logits" or "values".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import KEY, one_of
from sparkstrom.models.activations_and_losses import softmax
from sparkstrom.models.base import (
    Batch,
    Columns,
    arrays_of,
    map_columns,
    require_single_array,
)
from sparkstrom.models.row_checks import BadValue

PROBABILITIES, LOGITS, VALUES = OUTPUT_KINDS = ("probabilities", "logits", "values")
OUTPUTS_OPTION = one_of(OUTPUT_KINDS)[KEY]  # the option ``outputs`` of all model classes
BLOCK_ROWS = 256  # rows per call of ``predict``, to bound the memory of activations

Outputs = NDArray[np.float32]  # [rows, outputs]


def get_output_kind(model: object) -> str:
    """Return the model's output kind; LOGITS for a model that does not declare it.

    Raise UsageError if a model of the user's own declares an unknown kind.
    """
    kind = getattr(model, "outputs", LOGITS)
    if not isinstance(kind, str):
        return LOGITS  # an attribute with another meaning
    if kind not in OUTPUT_KINDS:
        raise UsageError(
            f"{type(model).__name__}.outputs is {kind!r}: it must be one of"
            f" {', '.join(OUTPUT_KINDS)}; rename the attribute if it means something else"
        )
    return kind


def has_label_per_output(model: object, outputs: NDArray[Any]) -> bool:
    """Return whether the model has several outputs, each trained with its own label, 0 or 1."""
    if not getattr(model, "per_label", False) or outputs.ndim < 2:
        return False
    return int(outputs.shape[label_axis(model, outputs)]) > 1


def label_axis(model: object, outputs: NDArray[Any]) -> int:
    """Return the axis of the outputs along which a row's classes or labels are stored."""
    return 1 if outputs.ndim == 2 else int(getattr(model, "class_axis", 1))


def predict_flattened(model: Any, features: Columns) -> Outputs:
    """Predict in blocks of rows; return the outputs as f32[rows, outputs]."""
    outputs = predict_keeping_shape(model, features)
    return outputs.reshape(len(outputs), -1) if len(outputs) else np.zeros((0, 0), np.float32)


def predict_keeping_shape(model: Any, features: Columns) -> NDArray[Any]:
    """Predict in blocks of rows; return the outputs [rows, ...] in the model's own shape.

    A row's output does not depend on the other rows: because matrix products round differently for
    different numbers of rows, all blocks have the same length, and the last block is filled up with
    copies of its first row. If the model returns a dict, the entry named after its output kind is
    used. Raise UsageError for several outputs, and BadValue if the model refuses a value.
    """
    rows = len(arrays_of(features)[0])
    pieces = []
    for first in range(0, rows, BLOCK_ROWS):
        count = min(BLOCK_ROWS, rows - first)
        index = first + np.arange(BLOCK_ROWS)
        index[count:] = first
        try:
            outputs = model.predict(select_rows(features, index))
        except BadValue as error:
            raise error.moved(first) from None
        if isinstance(outputs, dict) and get_output_kind(model) in outputs:
            outputs = outputs[get_output_kind(model)]
        if not isinstance(outputs, np.ndarray):
            raise UsageError(
                f"the model returns {_describe_outputs(outputs)}: this needs one array of numbers;"
                " of a dict it takes the entry that the model's option outputs= names (logits, "
                "probabilities, values); or give the model one output"
            )
        pieces.append(outputs[:count])
    return concatenate_outputs(pieces) if pieces else np.zeros((0, 0), np.float32)


def list_outputs(outputs: Any, rows: int) -> list[tuple[str | int, Any]]:
    """Return (name, array) of each output of a model for this many rows.

    An output without a name has its position in place of the name. Raise UsageError if an output
    is not an array, or does not have an entry for each row.
    """
    if isinstance(outputs, dict):
        named = list(outputs.items())
    else:
        named = list(enumerate(outputs if isinstance(outputs, tuple | list) else [outputs]))
    is_single = not isinstance(outputs, tuple | list | dict)
    for name, array in named:
        if not hasattr(array, "shape"):
            raise UsageError(
                f"{'the output' if is_single else f'output {name!r}'} is a"
                f" {type(array).__name__}: on executors and in a ParallelInference, forward (or"
                " call, apply) must return one array, or a tuple or dict of arrays, not nested;"
                " leave this output out, or return its parts as separate outputs"
            )
        if not array.shape or array.shape[0] != rows:
            which = "the output" if is_single else f"output {name!r}"
            raise UsageError(
                f"{which} of the model has the shape {list(array.shape)} for {rows} rows: each row"
                " needs an output of its own"
            )
    return named


def concatenate_outputs(pieces: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Concatenate the outputs [rows, ...] of consecutive rows, in the dtype of the first piece.

    Raise UsageError if the shape of a row's output differs between pieces.
    """
    first = pieces[0]
    for piece in pieces:
        if piece.shape[1:] != first.shape[1:]:
            raise UsageError(
                f"the model returns {list(first.shape[1:])} for some rows and"
                f" {list(piece.shape[1:])} for others: outputs must have one shape; pad or cut them"
                " to a fixed length in the model, or predict rows of one length at a time"
            )
    return np.concatenate(pieces, dtype=first.dtype)


def _describe_outputs(outputs: Any) -> str:
    """Return the type of outputs as text, with the keys of a dict, for an error message."""
    if isinstance(outputs, dict):
        return f"a dict of {', '.join(map(str, outputs))}"
    return f"a {type(outputs).__name__}"


def select_rows(columns: Columns, index: NDArray[Any] | slice) -> Columns:
    """Return the columns with only the rows that ``index`` selects."""
    return map_columns(itemgetter(index), columns)


def iter_row_blocks(batch: Batch) -> Iterator[Batch]:
    """Yield consecutive parts of the batch, of at most ``BLOCK_ROWS`` rows, to bound memory."""
    for first in range(0, batch.rows, BLOCK_ROWS):
        part = slice(first, first + BLOCK_ROWS)
        weights = None if batch.weights is None else batch.weights[part]
        yield Batch(select_rows(batch.features, part), select_rows(batch.labels, part), weights)


def count_classes(outputs: Outputs) -> int:
    """Return the number of classes; a single output is a score of class 1 of two classes."""
    return max(2, int(outputs.shape[1]))


def argmax_classes(outputs: Outputs, kind: str = LOGITS) -> NDArray[np.float64]:
    """Return the most likely class of each row, f64[rows]; of equally likely classes, the first.

    A single output means class 1 if it is above 0.5 (if ``kind`` is PROBABILITIES) or above 0 (any
    other kind), and class 0 otherwise. A row whose largest output is not finite has no class: NaN.
    A single output may be minus infinity, which is class 0.
    """
    if outputs.shape[1] == 1:
        scores = outputs[:, 0]
        found = scores > (0.5 if kind == PROBABILITIES else 0.0)
        return np.where(np.isnan(scores) | np.isposinf(scores), np.nan, found)
    return np.where(np.isfinite(outputs.max(axis=1)), outputs.argmax(axis=1), np.nan)


def flatten_positions(
    model: object, outputs: NDArray[Any], labels: NDArray[Any]
) -> tuple[Outputs, NDArray[Any]]:
    """Return outputs [n, classes] and class indices [n], with an entry for each row or position.

    Sequences and images may have a label for each position (step or pixel). Their outputs are
    [rows, classes, steps ...], or [rows, steps ..., classes] if the labels' shape implies it. If
    the model's loss treats each output as a label of its own, each output counts as a position with
    two classes, and the returned outputs are [n, 1]. Raise UsageError if the labels' shape does not
    fit.
    """
    if has_label_per_output(model, outputs):
        if labels.size != outputs.size:
            raise UsageError(
                f"labels of shape {labels.shape} against outputs of shape {outputs.shape}: the "
                "model's loss is per label, so each output needs its own label, 0 or 1"
            )
        return outputs.reshape(-1, 1), labels.reshape(-1)
    axis = _find_class_axis(model, outputs.shape, labels.shape)
    if axis is None:
        return outputs.reshape(len(outputs), -1), to_class_indices(labels)
    classes = outputs.shape[axis]
    rows_by_class = np.moveaxis(outputs, axis, -1).reshape(-1, classes)
    if labels.shape == outputs.shape:
        labels = np.moveaxis(labels, axis, -1).reshape(-1, classes)
    return rows_by_class, to_class_indices(labels.reshape(len(rows_by_class), -1))


def _find_class_axis(
    model: object, outputs: tuple[int, ...], labels: tuple[int, ...]
) -> int | None:
    """Return the axis of the classes, given the shapes of ``outputs`` and ``labels``.

    The result is None unless the labels' shape shows that each position has a label. If that shape
    fits both possible axes, 1 and -1, the model's ``class_axis`` decides.
    """
    positions_by_axis = {1: outputs[2:], -1: outputs[1:-1]}
    if len(outputs) < 3 or outputs[0] != labels[0]:
        return None
    axes = [
        axis
        for axis, positions in positions_by_axis.items()
        if labels in (outputs, (outputs[0], *positions))
    ]
    model_axis = int(getattr(model, "class_axis", 1))
    return model_axis if model_axis in axes else axes[0] if axes else None


def to_class_indices(labels: Columns) -> NDArray[Any]:
    """Return class indices [rows]; for labels [rows, classes], the index of the largest share.

    Raise UsageError for several arrays, and for a row in which several classes have the share 1.
    """
    array = require_single_array(labels, "labels")
    has_classes = array.ndim > 1 and array.shape[1] > 1
    if has_classes and ((array == 1).sum(axis=1) > 1).any():
        row = int(((array == 1).sum(axis=1) > 1).argmax())
        raise UsageError(
            f"labels {array[row].tolist()} of one row: a row with several true labels has no class;"
            " train with a loss per label, such as BCEWithLogitsLoss, binary_crossentropy or XENT,"
            " whose accuracy is measured label by label, or use the metric loss"
        )
    classes: NDArray[Any] = array.argmax(axis=1) if has_classes else array.reshape(len(array))
    return classes


def mask_counted_labels(
    model: object, labels: NDArray[Any], classes: NDArray[Any]
) -> NDArray[np.bool_]:
    """Return bool[n]: False where the model's loss ignores the label.

    ``classes`` [n] are the class indices that ``flatten_positions`` made of ``labels``.
    """
    ignored = getattr(model, "ignored_label", None)
    if ignored is None or labels.size != classes.size:  # class shares: no label is ignored
        return np.ones(len(classes), np.bool_)
    return np.asarray(classes != ignored)


def measure_batch(model: Any, batch: Batch, metric: str) -> tuple[float, float]:
    """Evaluate ``metric``, "loss" or "accuracy", on a batch; return (weighted sum, sum of weights).

    For "loss", weight x loss is summed over the rows; for "accuracy", weight x share of correct
    labels. The latter is NaN if a counted row's scores are not finite, as after divergence.
    """
    if metric == "loss":
        total, weight = model.loss(batch)
        return float(total), float(weight)
    outputs = predict_keeping_shape(model, batch.features)
    labels = require_single_array(batch.labels, "labels")
    scores, classes = flatten_positions(model, outputs, labels)
    counts = mask_counted_labels(model, labels, classes)
    found = argmax_classes(scores, get_output_kind(model))
    hits = np.where(np.isnan(found), np.nan, found == classes)
    hits[~counts] = 0.0
    row_hits, row_counts = (
        places.reshape(batch.rows, -1).mean(axis=1) for places in (hits, counts)
    )
    weights = np.ones(batch.rows) if batch.weights is None else batch.weights.astype(np.float64)
    row_hits[weights == 0] = 0.0  # also where there is no class
    return float((weights * row_hits).sum()), float((weights * row_counts).sum())


def compute_raw_scores(outputs: Outputs, kind: str) -> NDArray[np.float64]:
    """Return f64[rows, classes]: probabilities, or logits minus their mean over the classes.

    ``kind`` is the output kind; all but PROBABILITIES are treated as logits. The largest score of a
    row belongs to the predicted class. Logits are only defined up to a constant per row;
    subtracting the mean makes them comparable between rows.
    """
    scores: NDArray[np.float64] = outputs.astype(np.float64)
    if kind == PROBABILITIES:
        return np.concatenate([1 - scores, scores], axis=1) if scores.shape[1] == 1 else scores
    if scores.shape[1] == 1:
        scores = np.concatenate([np.zeros_like(scores), scores], axis=1)
    scores -= scores.mean(axis=1, keepdims=True)
    return scores


def compute_probabilities(outputs: Outputs, kind: str) -> NDArray[np.float64]:
    """Return the probabilities f64[rows, classes] for outputs of this kind; each row sums to 1."""
    raw = compute_raw_scores(outputs, kind)
    return raw if kind == PROBABILITIES else softmax(raw)


def compute_class_score(outputs: Outputs, kind: str, index: int) -> NDArray[np.float32]:
    """Return a score f32[rows] that is higher the more likely class ``index`` is.

    It is the class's probability; for two classes whose outputs are not probabilities, its logit
    minus the mean. Raise UsageError if the model has no such class.
    """
    if not 0 <= index < count_classes(outputs):
        raise UsageError(
            f"class {index}: this model has the classes 0 to {count_classes(outputs) - 1}"
        )
    two_logits = kind != PROBABILITIES and count_classes(outputs) == 2
    scores = (
        compute_raw_scores(outputs, kind) if two_logits else compute_probabilities(outputs, kind)
    )
    return scores[:, index].astype(np.float32)
