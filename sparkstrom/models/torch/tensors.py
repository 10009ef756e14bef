"""Columns to tensors and back, without copies where NumPy and torch agree."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sparkstrom.base.errors import UsageError
from sparkstrom.models.base import Batch, Columns, rows_of

PREDICT_ROWS = 1024  # at once, so that activations of a large table do not fill the memory

Tensors = Any  # a tensor, or a tuple or dict of tensors


class TorchBatch(NamedTuple):
    """A minibatch on the model's device: what a custom step gets.

    Features and labels are a tensor, or a tuple or dict of tensors, rows first; fractions are
    float32, whole labels int64. ``weights``: f32[rows], or None.
    """

    features: Tensors
    labels: Tensors
    weights: torch.Tensor | None = None


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same tuple, list or dict with ``function`` of each of its leaves."""
    if isinstance(tree, dict):
        return {name: mapped(function, value) for name, value in tree.items()}
    if isinstance(tree, tuple | list):
        return tuple(mapped(function, value) for value in tree)
    return function(tree)


def features_to(device: torch.device, columns: Columns) -> Tensors:
    """Features as tensors: fractions as float32, other numbers as they are."""
    return mapped(lambda array: _tensor(array).to(device, non_blocking=True), columns)


def labels_to(device: torch.device, columns: Columns) -> Tensors:
    """Labels as tensors: fractions as float32, whole numbers as int64, as torch's losses want."""
    return mapped(lambda array: _whole(_tensor(array)).to(device, non_blocking=True), columns)


def batch_to(device: torch.device, batch: Batch) -> TorchBatch:
    """A minibatch as tensors."""
    weights = None if batch.weights is None else features_to(device, batch.weights)
    return TorchBatch(features_to(device, batch.features), labels_to(device, batch.labels), weights)


def outputs_of(outputs: Tensors) -> Any:
    """A module's outputs as arrays of their own; fractions as float32."""

    def array(value: Any) -> NDArray[Any]:
        if not isinstance(value, torch.Tensor):
            raise UsageError(
                f"the module puts out a {type(value).__name__}: predictions are tensors, or tuples,"
                " lists or dicts of them; return these from forward in evaluation mode"
            )
        value = value.float() if value.is_floating_point() else value
        values: NDArray[Any] = value.cpu().numpy().copy()
        return values

    return mapped(array, outputs)


def joined(pieces: list[Any]) -> Any:
    """Outputs of consecutive rows, one behind the other."""
    first = pieces[0]
    if isinstance(first, dict):
        return {name: joined([piece[name] for piece in pieces]) for name in first}
    if isinstance(first, tuple):
        return tuple(joined(list(column)) for column in zip(*pieces, strict=True))
    return np.concatenate(pieces, dtype=first.dtype) if np.ndim(first) else first


def parts_of(batch: TorchBatch, rows: int, count: int) -> Iterator[tuple[TorchBatch, Any]]:
    """Up to ``count`` consecutive parts, each with its share of the rows or of the weights."""
    if count == 1:
        yield batch, 1.0
        return
    size = -(-rows // count)
    whole = rows if batch.weights is None else batch.weights.sum().clamp_min(TINY)
    for start in range(0, rows, size):
        stop = min(start + size, rows)
        cut = slice(start, stop)
        weights = None if batch.weights is None else batch.weights[cut]
        part = TorchBatch(
            mapped(itemgetter(cut), batch.features),
            mapped(itemgetter(cut), batch.labels),
            weights,
        )
        yield part, (stop - start if weights is None else weights.sum()) / whole


def slices_of(columns: Columns, size: int = PREDICT_ROWS) -> Iterator[Columns]:
    """The columns in parts of at most ``size`` rows; of no rows, one part of none."""
    for start in range(0, max(rows_of(columns), 1), size):
        yield mapped(itemgetter(slice(start, start + size)), columns)


def called(function: Callable[..., Any], features: Tensors) -> Any:
    """Call a module: one input, several by place, or several by name."""
    if isinstance(features, dict):
        return function(**features)
    return function(*features) if isinstance(features, tuple) else function(features)


def check_rows(columns: Columns, rows: int, what: str) -> None:
    """Raise UsageError naming row and column of what is no finite number, or of another length."""
    if isinstance(columns, np.ndarray):
        _check_array(columns, rows, what)
        return
    named = columns.items() if isinstance(columns, dict) else enumerate(columns)
    for name, array in named:
        _check_array(array, rows, f"{what} {name!r}")


def _check_array(array: NDArray[Any], rows: int, what: str) -> None:
    if len(array) != rows:
        raise UsageError(f"{rows} rows of features, but {len(array)} of {what}")
    if array.dtype.kind not in "biuf":
        raise UsageError(f"{what} are {array.dtype}, not numbers: turn them into numbers first")
    if array.dtype.kind == "f":
        finite = np.isfinite(array).reshape(rows, -1)
        if not finite.all():
            row, column = np.argwhere(~finite)[0]
            value = array.reshape(rows, -1)[row, column]
            raise UsageError(f"value {column} of row {row} of {what} is {value}: fill or drop it")


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    if array.dtype.kind == "f":
        array = array.astype(np.float32, copy=False)
    elif array.dtype.kind == "u" and array.dtype.itemsize > 1:  # torch computes with uint8 only
        array = array.astype(np.int64)
    if not (array.flags.writeable and array.flags.c_contiguous):
        array = array.copy()
    return torch.from_numpy(array)


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    whole = not tensor.is_floating_point() and tensor.dtype != torch.bool
    return tensor.long() if whole else tensor


@contextlib.contextmanager
def explained(doing: str, remedy: str, **trees: Any) -> Iterator[None]:
    """Turn what torch says about tensors that do not fit into a UsageError with their shapes."""
    try:
        yield
    except (UsageError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, UserWarning) as error:
        kinds = ", ".join(f"{name} {kind_of(tree)}" for name, tree in trees.items())
        raise UsageError(
            f"{doing} failed for {kinds}: {type(error).__name__}: {error}; {remedy}"
        ) from error


def kind_of(tree: Any) -> str:
    """Types and shapes of tensors, as ``float32[32, 10]``."""
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{name}: {kind_of(part)}" for name, part in tree.items()) + "}"
    if isinstance(tree, tuple | list):
        return "(" + ", ".join(map(kind_of, tree)) + ")"
    if isinstance(tree, torch.Tensor):
        return f"{str(tree.dtype).removeprefix('torch.')}{list(tree.shape)}"
    return type(tree).__name__


TINY = 1e-30  # a sum of weights is at least this


FORWARD_FITS = (
    "make the features fit its first layers, or change these; BatchNorm wants more than one row in"
    " each minibatch, the last one of a partition, too (batch_size_per_worker)"
)
LOSS_FITS = (
    "classes are whole numbers (int64), other targets fractions (float32) of the output's shape:"
    " cast the label column, or reshape and cast inside the loss"
)
