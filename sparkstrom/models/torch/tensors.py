"""Columns to tensors and back, without copies where NumPy and torch agree."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sparkstrom.base.errors import UsageError
from sparkstrom.models.base import Batch, Columns, arrays_of, rows_of
from sparkstrom.models.outputs import stacked
from sparkstrom.models.own_words import is_users_own, said_by
from sparkstrom.models.row_checks import refuse_not_finite

IGNORED = -100  # torch's own ignore_index
OUT_OF_BOUNDS = re.compile(r"Target (-?\d+) is out of bounds")  # in torch's words
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
    """A module's outputs as arrays of their own; fractions as float32.

    Of outputs by name those that have rows: no loss, and of a library's own kind of dict (a Hugging
    Face model's output) nothing but tensors: no cache.
    """
    if isinstance(outputs, dict):
        of_library = type(outputs) is not dict
        outputs = {
            name: value
            for name, value in outputs.items()
            if (value.ndim > 0 if isinstance(value, torch.Tensor) else not of_library)
        }
        if not outputs:
            raise UsageError("the module puts out a dict without tensors of rows")

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
    return stacked(pieces) if np.ndim(first) else first


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


def check_rows(columns: Columns, rows: int, role: str) -> None:
    """Raise UsageError naming row and place of what is no finite number, or of another length."""
    for array in arrays_of(columns):
        if len(array) != rows:
            raise UsageError(f"{rows} rows of features, but {len(array)} of {role}")
        if array.dtype.kind not in "biuf":
            raise UsageError(f"{role} are {array.dtype}, not numbers: turn them into numbers first")
    refuse_not_finite(role, columns)


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
    """Turn what torch says about tensors that do not fit into a UsageError with their shapes.

    What the user's own code raises keeps its own words.
    """
    try:
        yield
    except (UsageError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, UserWarning) as error:
        if is_users_own(error, "torch"):
            raise
        unknown = _unknown_class(**trees) or _out_of_bounds(str(error), trees)
        if isinstance(error, IndexError) and unknown:
            raise UsageError(unknown) from error
        kinds = ", ".join(f"{name} {kind_of(tree)}" for name, tree in trees.items())
        remedy = _one_column(**trees) or remedy
        raise UsageError(f"{doing} failed for {kinds}: {said_by(error)}; {remedy}") from error


def _one_column(output: Any = None, target: Any = None, features: Any = None, **_: Any) -> str:
    """The remedy where a column of numbers, [rows], meets [rows, 1]; else empty."""
    if isinstance(features, torch.Tensor) and features.ndim == 1:
        return (
            "one number per row is [rows], and a layer of one input wants [rows, 1]: name the"
            ' column in a list, such as features=["income"], or reshape(-1, 1) an array'
        )
    both = isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)
    if both and output.shape == (*target.shape, 1):
        return (
            "one number per row is [rows], and a module with one output makes [rows, 1]: name the"
            ' column in a list, such as label=["y"], or reshape(-1, 1) an array'
        )
    return ""


def _unknown_class(output: Any = None, target: Any = None, **_: Any) -> str:
    """Where a loss of classes [rows, classes, ...] meets a label that is none; else empty."""
    if not (torch.is_tensor(output) and torch.is_tensor(target) and output.ndim >= 2):
        return ""
    classes = output.shape[1]
    of_classes = target.shape == (output.shape[0], *output.shape[2:])
    if target.is_floating_point() or not of_classes:
        return ""
    strange = ((target < 0) | (target >= classes)) & (target != IGNORED)
    if not strange.any():
        return ""
    row, *place = strange.nonzero()[0].tolist()
    where = f"row {row}" + (f", column {place[0]}" if place else "")
    return (
        f"labels must be 0 to {classes - 1}, as the module puts out {classes} classes: {where} of"
        f" this minibatch has {target[row, *place].item()}; renumber the labels, or give the"
        " module more outputs"
    )


def _out_of_bounds(words: str, trees: dict[str, Any]) -> str:
    """Where torch names a target that is no class, and the loss's output is not at hand."""
    if (found := OUT_OF_BOUNDS.search(words)) is None:
        return ""
    label, places = int(found[1]), []

    def look(tensor: Any) -> None:
        if torch.is_tensor(tensor) and not tensor.is_floating_point() and tensor.ndim:
            places.extend((tensor == label).nonzero()[:1].tolist())

    mapped(look, trees)
    where = f"row {places[0][0]} of this minibatch has {label}" if places else f"there is {label}"
    return (
        f"labels must be 0 to C - 1, where the module puts out C classes: {where}; renumber the"
        " labels, or give the module more outputs"
    )


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
