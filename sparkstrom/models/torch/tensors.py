"""Convert minibatches to tensors and outputs to arrays, and explain errors about wrong shapes."""

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
from sparkstrom.models.base import Batch, Columns, arrays_of, count_rows
from sparkstrom.models.output_interpretation import concatenate_outputs
from sparkstrom.models.row_checks import describe_error, is_raised_by_user_code, refuse_non_finite

IGNORE_INDEX = -100  # torch's own ignore_index
OUT_OF_BOUNDS = re.compile(r"Target (-?\d+) is out of bounds")  # torch's message
PREDICT_ROWS = 1024  # rows per forward pass, to bound the memory of activations
Tensors = Any  # a tensor, or a tuple or dict of tensors


class TorchBatch(NamedTuple):
    """A minibatch as tensors on the model's device, as passed to a user-defined step."""

    features: Tensors  # tensor, or tuple or dict of tensors, [rows, ...]; floats are float32
    labels: Tensors  # the same; integers are int64
    weights: torch.Tensor | None = None  # f32[rows], each row's weight; None: all rows weigh 1


def map_tree(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply ``function`` to each leaf of nested dicts and tuples; lists become tuples."""
    if isinstance(tree, dict):
        return {name: map_tree(function, value) for name, value in tree.items()}
    if isinstance(tree, tuple | list):
        return tuple(map_tree(function, value) for value in tree)
    return function(tree)


def features_to_device(device: torch.device, columns: Columns) -> Tensors:
    """Convert columns to tensors on the device: floats to float32, other numbers unchanged.

    Tensors have their own memory, because the user's code may change them in place.
    """
    return map_tree(
        lambda array: _to_tensor(array).to(device, non_blocking=True, copy=True), columns
    )


def labels_to_device(device: torch.device, columns: Columns) -> Tensors:
    """Convert columns as ``features_to_device`` does, but integers to int64."""
    return map_tree(_to_int64, features_to_device(device, columns))


def batch_to_device(device: torch.device, batch: Batch) -> TorchBatch:
    """Convert a minibatch to tensors on the device."""
    weights = None if batch.weights is None else features_to_device(device, batch.weights)
    return TorchBatch(
        features_to_device(device, batch.features), labels_to_device(device, batch.labels), weights
    )


def outputs_to_numpy(outputs: Tensors) -> Any:
    """Convert a module's outputs to arrays with their own memory, floats to float32.

    Outputs are tensors, or nested tuples, lists or dicts of tensors; raise UsageError for others.
    If they are a dict, scalars in it, such as a loss, are omitted. If they are of a subclass of
    dict, such as a Hugging Face model's output, values that are not tensors are also omitted.
    """
    if isinstance(outputs, dict):
        of_library = type(outputs) is not dict
        outputs = {
            name: value
            for name, value in outputs.items()
            if (value.ndim > 0 if isinstance(value, torch.Tensor) else not of_library)
        }
        if not outputs:
            raise UsageError("the module returns a dict without tensors of rows")

    def array(value: Any) -> NDArray[Any]:
        """Convert one tensor to an array. Raise UsageError for anything else."""
        if not isinstance(value, torch.Tensor):
            raise UsageError(
                f"the module returns a {type(value).__name__}: predictions are tensors, or tuples,"
                " lists or dicts of them; return these from forward in evaluation mode"
            )
        value = value.float() if value.is_floating_point() else value
        values: NDArray[Any] = value.detach().cpu().numpy().copy()
        return values

    return map_tree(array, outputs)


def join_outputs(pieces: list[Any]) -> Any:
    """Join outputs for consecutive rows, which are arrays, or tuples or dicts of arrays.

    For scalars, return the first one.
    """
    first = pieces[0]
    if isinstance(first, dict):
        return {name: join_outputs([piece[name] for piece in pieces]) for name in first}
    if isinstance(first, tuple):
        return tuple(join_outputs(list(column)) for column in zip(*pieces, strict=True))
    return concatenate_outputs(pieces) if np.ndim(first) else first


def split_batch(batch: TorchBatch, rows: int, size: int) -> Iterator[TorchBatch]:
    """Yield consecutive parts of at most ``size`` of the minibatch's rows."""
    if size >= rows:
        yield batch
        return
    for start in range(0, rows, size):
        cut = itemgetter(slice(start, start + size))
        weights = None if batch.weights is None else cut(batch.weights)
        yield TorchBatch(map_tree(cut, batch.features), map_tree(cut, batch.labels), weights)


def split_rows(columns: Columns, size: int = PREDICT_ROWS) -> Iterator[Columns]:
    """Yield parts of at most ``size`` consecutive rows; one empty part if there are no rows."""
    for start in range(0, max(count_rows(columns), 1), size):
        yield map_tree(itemgetter(slice(start, start + size)), columns)


def call_with_features(function: Callable[..., Any], features: Tensors) -> Any:
    """Return ``function``'s result for the features; a tuple or dict becomes several arguments."""
    if isinstance(features, dict):
        return function(**features)
    return function(*features) if isinstance(features, tuple) else function(features)


def check_rows(columns: Columns, rows: int, role: str) -> None:
    """Raise UsageError unless the columns have ``rows`` rows of finite numbers.

    ``role``, "features" or "labels", names the columns in the message.
    """
    for array in arrays_of(columns):
        if len(array) != rows:
            raise UsageError(f"{rows} rows of features, but {len(array)} of {role}")
        if array.dtype.kind not in "biuf":
            raise UsageError(f"{role} are {array.dtype}, not numbers: turn them into numbers first")
    refuse_non_finite(role, columns)


def _to_tensor(array: NDArray[Any]) -> torch.Tensor:
    """Return a tensor that shares the array's memory if its dtype and layout allow it."""
    if array.dtype.kind == "f":
        array = array.astype(np.float32, copy=False)
    elif array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)  # torch fully supports no unsigned type except uint8
    if not (array.flags.writeable and array.flags.c_contiguous):
        array = array.copy()
    return torch.from_numpy(array)


def _to_int64(tensor: torch.Tensor) -> torch.Tensor:
    """Convert integers to int64; return other tensors unchanged."""
    is_integer = not tensor.is_floating_point() and tensor.dtype != torch.bool
    return tensor.long() if is_integer else tensor


@contextlib.contextmanager
def explaining_shape_errors(operation: str, remedy: str, **trees: Any) -> Iterator[None]:
    """Convert torch's errors within the context to UsageErrors that show the tensors' shapes.

    Errors that the user's own code raises on purpose are not changed.

    Args:
        operation: what failed, for the message.
        remedy: end of the message.
        trees: name -> tensors that the message describes.
    """
    try:
        yield
    except (UsageError, torch.OutOfMemoryError):
        raise
    except (RuntimeError, ValueError, TypeError, IndexError, UserWarning) as error:
        if is_raised_by_user_code(error, "torch"):
            raise
        if "does not require grad" in str(error) and not torch.is_grad_enabled():
            remedy = NO_GRAD_REMEDY
        unknown = _explain_unknown_class(**trees) or _explain_out_of_bounds(str(error), trees)
        if isinstance(error, IndexError) and unknown:
            raise UsageError(unknown) from error
        raise UsageError(
            describe_failure(operation, describe_error(error), remedy, trees)
        ) from error


def describe_failure(operation: str, reason: str, remedy: str, trees: dict[str, Any]) -> str:
    """Return the text of an error in ``operation``, with the shapes of the tensors in ``trees``."""
    kinds = ", ".join(f"{name} {format_shapes(tree)}" for name, tree in trees.items())
    return f"{operation} failed for {kinds}: {reason}; {_column_remedy(**trees) or remedy}"


def _column_remedy(output: Any = None, target: Any = None, features: Any = None, **_: Any) -> str:
    """Return a remedy if numbers [rows] are combined with a column [rows, 1]; otherwise ""."""
    if isinstance(features, torch.Tensor) and features.ndim == 1:
        return (
            "one number per row is [rows], and a layer with one input needs [rows, 1]: name the"
            ' column in a list, such as features=["income"], or reshape(-1, 1) an array'
        )
    both = isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)
    if both and output.shape == (*target.shape, 1):
        return (
            "one number per row is [rows], and a module with one output makes [rows, 1]: name the"
            ' column in a list, such as label=["y"], or reshape(-1, 1) an array'
        )
    return ""


def _explain_unknown_class(output: Any = None, target: Any = None, **_: Any) -> str:
    """Return an error text if a target is not a class of outputs [rows, classes, ...]; else ""."""
    if not (torch.is_tensor(output) and torch.is_tensor(target) and output.ndim >= 2):
        return ""
    classes = output.shape[1]
    of_classes = target.shape == (output.shape[0], *output.shape[2:])
    if target.is_floating_point() or not of_classes:
        return ""
    strange = ((target < 0) | (target >= classes)) & (target != IGNORE_INDEX)
    if not strange.any():
        return ""
    row, *place = strange.nonzero()[0].tolist()
    where = f"row {row}" + (f", column {place[0]}" if place else "")
    return (
        f"labels must be 0 to {classes - 1}, as the module returns {classes} classes: {where} of"
        f" this minibatch has {target[row, *place].item()}; renumber the labels, or give the"
        " module more outputs"
    )


def _explain_out_of_bounds(message: str, trees: dict[str, Any]) -> str:
    """Return an error text if torch's message reports a target that is not a class; else ""."""
    if (found := OUT_OF_BOUNDS.search(message)) is None:
        return ""
    label, places = int(found[1]), []

    def find_label(tensor: Any) -> None:
        """If the tensor contains the label, append its first position to ``places``."""
        if torch.is_tensor(tensor) and not tensor.is_floating_point() and tensor.ndim:
            places.extend((tensor == label).nonzero()[:1].tolist())

    map_tree(find_label, trees)
    where = f"row {places[0][0]} of this minibatch has {label}" if places else f"a label is {label}"
    return (
        f"labels must be 0 to C - 1, where the module returns C classes: {where}; renumber the"
        " labels, or give the module more outputs"
    )


def format_shapes(tree: Any) -> str:
    """Return the dtypes and shapes of a tree of tensors as text, such as ``float32[32, 10]``."""
    if isinstance(tree, dict):
        parts = (f"{name}: {format_shapes(part)}" for name, part in tree.items())
        return f"{{{', '.join(parts)}}}"
    if isinstance(tree, tuple | list):
        return "(" + ", ".join(map(format_shapes, tree)) + ")"
    if isinstance(tree, torch.Tensor):
        return f"{str(tree.dtype).removeprefix('torch.')}{list(tree.shape)}"
    return type(tree).__name__


FORWARD_REMEDY = (
    "make the features fit its first layers, or change these; BatchNorm needs more than one row in"
    " each minibatch, also in the last one of a partition (batch_size_per_worker)"
)
NO_GRAD_REMEDY = (
    "predictions and held-out losses are computed under torch.no_grad: compute derivatives in"
    " forward inside `with torch.enable_grad():`"
)
LOSS_REMEDY = (
    "classes are integers (int64), other targets floats (float32) of the output's shape:"
    " cast the label column, or reshape and cast inside the loss"
)
