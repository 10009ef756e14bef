"""Check the losses ``loss(output, target)`` of torch models, and compute them with row weights.

A loss is one of torch's own or a user-defined function; its value is a mean over rows. Labels that
the loss ignores (torch's ``ignore_index``) have weight 0 in this mean.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import is_whole, shown
from sparkstrom.models.activations_and_losses import loss_name
from sparkstrom.models.output_interpretation import OUTPUTS_OPTION
from sparkstrom.models.torch.tensors import IGNORE_INDEX, LOSS_REMEDY, Tensors, describe_failure

Loss = Callable[..., torch.Tensor]
TORCH_LOSSES = nn.CrossEntropyLoss.__module__
MEAN_REDUCTIONS = ("mean", "batchmean")  # batchmean (KLDivLoss) sums the values of a row
# If a loss's name contains one of these, its outputs are logits.
LOGITS_LOSSES = ("crossentropy", "nll", "withlogits", "multilabelsoft", "multimargin")
# With one of these and nll in its name, as in PoissonNLLLoss, its outputs are values.
DISTRIBUTIONS = ("poisson", "gaussian", "lognormal", "laplace", "binomial")
CLASS_INDEX_LOSSES = ("crossentropyloss", "crossentropy", "nllloss", "multimarginloss")
PER_LABEL_LOSSES = ("withlogits", "bceloss", "binarycrossentropy", "multilabelsoft")  # parts
WEIGHT_SUM_MIN = 1e-30  # lower bound of a sum of weights, to avoid division by zero


def resolve_outputs(outputs: str | None, loss: Any) -> str:
    """Return the valid output kind ``outputs``, or for None the one that the loss implies."""
    if outputs is None:
        name = _normalized_name(loss)
        if name in ("bceloss", "binarycrossentropy"):
            return "probabilities"
        of_classes = any(part in name for part in LOGITS_LOSSES)
        of_values = "nll" in name and any(part in name for part in DISTRIBUTIONS)
        return "logits" if loss is None or (of_classes and not of_values) else "values"
    return str(OUTPUTS_OPTION.read("outputs", outputs))


def is_per_label(loss: Any) -> bool:
    """Return whether the loss treats each output as a separate label that is true or false."""
    declared = getattr(loss, "per_label", None)  # an attribute of Dl4jLoss
    if declared is not None:
        return bool(declared)
    name = _normalized_name(loss)
    if "softmax" in name or "categorical" in name:
        return False  # such as softmax_cross_entropy_with_logits
    return any(part in name for part in PER_LABEL_LOSSES)


def cast_class_labels(loss: Any, output: Tensors, target: Tensors) -> Tensors:
    """Return the target as int64 if ``loss`` takes class indices; otherwise unchanged.

    This is needed because Spark ML's labels are doubles. Raise UsageError for a class index that is
    not a whole number.
    """
    if not (isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)):
        return target
    are_floats = target.is_floating_point() and target.ndim == output.ndim - 1
    if not (are_floats and _takes_class_indices(loss)):
        return target
    indices = target.long()
    if (wrong := indices != target).any():
        raise UsageError(
            f"a label is {target[wrong][0].item():g}: the loss {loss_name(loss)} takes classes,"
            " which are whole numbers from 0; for other values use a loss of values, such as"
            " MSELoss, or give shares [rows, classes]"
        )
    return indices


def count_class_labels(loss: Any, output: Tensors, target: Tensors) -> tuple[int, int] | None:
    """Return (dimensions of ``target``, number of classes) if it contains class indices.

    Return None otherwise, or if the loss has a user-defined ``forward``, which may change labels.
    """
    are_tensors = isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)
    if not (are_tensors and is_torch_loss(_get_computation(loss))):
        return None
    has_classes = output.ndim == target.ndim + 1 and output.ndim > 1
    return (target.ndim, output.shape[1]) if has_classes and _takes_class_indices(loss) else None


def _takes_class_indices(loss: Any) -> bool:
    """Return whether the loss is torch's, or derived from torch's, and takes class indices."""
    is_known = is_torch_loss(loss) or _get_torch_class(loss) is not None
    return is_known and _normalized_name(loss) in CLASS_INDEX_LOSSES


def refuse_broadcast(loss: Any, output: Tensors, target: Tensors) -> None:
    """Raise UsageError if torch's loss would combine every output with every target.

    Some of torch's losses, such as PoissonNLLLoss, broadcast outputs [rows, 1] and targets [rows]
    without a warning. A user-defined loss may reshape them, so it is not checked.
    """
    are_tensors = isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)
    if not are_tensors or output.ndim == target.ndim or not is_torch_loss(_get_computation(loss)):
        return
    if not _takes_class_indices(loss):
        reason = "the loss would be computed between every output and every target"
        shapes = {"output": output, "target": target}
        raise UsageError(describe_failure(loss_name(loss), reason, LOSS_REMEDY, shapes))


def get_ignored_label(loss: Any) -> int | None:
    """Return the label that the loss ignores (``ignore_index``), or None."""
    label = getattr(loss, "ignore_index", None)  # for a loss that is a module
    if label is None and (parameter := _signature_parameters(loss).get("ignore_index")) is not None:
        label = parameter.default  # for a loss that is a function or a partial
    return int(label) if is_whole(label) else None


def _normalized_name(loss: Any) -> str:
    """Return the loss's name in lower case, without underscores.

    A class derived from one of torch's losses has that loss's name.
    """
    base = _get_torch_class(loss)
    return (base.__name__ if base else loss_name(loss)).replace("_", "").lower()


def _get_torch_class(loss: Any) -> type | None:
    """Return the class in ``torch.nn`` that the loss is an instance of, or None."""
    bases = (base for base in type(loss).__mro__ if base.__module__ == TORCH_LOSSES)
    return next((base for base in bases if not base.__name__.startswith("_")), None)


def _get_computation(loss: Any) -> Any:
    """Return the function that computes the loss: ``forward`` of a module, or the loss itself."""
    return type(loss).forward if isinstance(loss, nn.Module) else loss


def is_torch_loss(loss: Any) -> bool:
    """Return whether the loss is one of torch's own."""
    loss = getattr(loss, "func", loss)  # a partial's function
    module = getattr(loss, "__module__", None) or type(loss).__module__
    return loss is not None and str(module).partition(".")[0] == "torch"


def check_loss(loss: Any) -> None:
    """Raise UsageError for a loss that is not callable, has parameters, or is not a mean."""
    if not callable(loss):
        raise UsageError(f"loss is {shown(loss)}: pass a function loss(output, target)")
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        raise UsageError(
            f"loss {type(loss).__name__} has its own parameters, which would not be trained:"
            " make it part of the module, and return the loss from its forward"
        )
    reduction = _get_reduction(loss)
    if reduction not in (None, *MEAN_REDUCTIONS):
        raise UsageError(
            f"the loss has reduction={reduction!r}: it must be the mean over rows ('mean', or"
            " 'batchmean' where it has that), so that a step does not depend on how many rows a"
            " batch has"
        )


def compute_label_weights(
    loss: Any, target: Tensors, template: torch.Tensor
) -> torch.Tensor | None:
    """Return the weight of each position of ``target`` in the loss's mean; None: all weigh 1.

    ``CrossEntropyLoss`` and ``NLLLoss`` divide by the sum of class weights over all positions whose
    label is not ``ignore_index``. Labels that are probabilities weigh 1. ``template`` provides the
    dtype and device of the result.
    """
    options = _get_class_options(loss)
    if options is None or not isinstance(target, torch.Tensor) or target.is_floating_point():
        return None
    weight, ignored = options
    is_counted = target != ignored
    if weight is None:
        return is_counted.to(template.dtype)
    # The loss itself reports a label that is not a class.
    labels = torch.where(is_counted, target, 0).clamp(0, len(weight) - 1)
    return weight.to(template.device, template.dtype)[labels] * is_counted


def _get_class_options(loss: Any) -> tuple[torch.Tensor | None, int] | None:
    """Return (class weights, ignored label) if the loss takes class indices; otherwise None."""
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        return loss.weight, loss.ignore_index
    keywords = loss.keywords if isinstance(loss, functools.partial) else {}
    if getattr(loss, "func", loss) in (functional.cross_entropy, functional.nll_loss):
        return keywords.get("weight"), keywords.get("ignore_index", IGNORE_INDEX)
    return None


def compute_weighted_loss(
    loss: Loss, output: Tensors, target: Tensors, weights: torch.Tensor
) -> torch.Tensor:
    """Return sum(weight * loss of row) / sum(weight), for ``weights`` f32[rows].

    If all weights are 1, this equals the unweighted loss, including class weights and ignored
    labels, because the mean over positions is sum(weight * class weight * loss) divided by
    sum(weight * class weight). A loss with a parameter ``weights`` gets the weights and returns the
    mean itself. A loss with a ``reduction`` is called without reduction. Raise UsageError for any
    other loss.
    """
    if "weights" in _signature_parameters(loss):
        return loss(output, target, weights=weights)
    if isinstance(loss, nn.Module) and hasattr(loss, "reduction"):
        each = copy.copy(loss)
        each.reduction = "none"
        return _weighted_mean(loss, each(output, target), target, weights, loss.reduction)
    if (reduction := _get_reduction(loss)) is not None:
        return _weighted_mean(
            loss, loss(output, target, reduction="none"), target, weights, reduction
        )
    raise UsageError(
        "rows have weights, but the loss takes none: give it a parameter `weights` (f32[rows]) and"
        " let it return sum(weights * losses) / sum(weights), or use a loss with `reduction`"
    )


def loss_to_float(loss: Any) -> float:
    """Return the loss of a step as a float. Raise UsageError if it is not a single number."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return float(loss.detach())
    if isinstance(loss, Real) or (isinstance(loss, np.ndarray) and loss.ndim == 0):
        return float(loss)
    raise UsageError(f"step(module, optimizer, batch) returned {loss!r}: it must return the loss")


def _weighted_mean(
    loss: Any, losses: torch.Tensor, target: Tensors, weights: torch.Tensor, reduction: Any
) -> torch.Tensor:
    """Return the mean of ``losses``, weighted by ``weights``, which has one weight per row.

    ``losses`` has one or several entries per row. If it includes label weights, found from ``loss``
    and ``target`` by ``compute_label_weights``, the weighted sum is divided by the sum of the
    products of both weights. Otherwise ``reduction``, an option of the loss, determines how the
    entries of a row are combined: "batchmean" sums them, anything else averages them. Raise
    UsageError if ``losses`` does not have one or several entries for each row.
    """
    if losses.ndim == 0 or len(losses) != len(weights):
        raise UsageError(
            f"the loss returns {list(losses.shape)} values for {len(weights)} rows: with weights it"
            " needs one for each row, or several [rows, ...]"
        )
    counts = compute_label_weights(loss, target, losses)
    if counts is not None:  # the losses include the class weights already
        each = weights.reshape(-1, *[1] * (losses.ndim - 1))
        return (each * losses).sum() / (each * counts).sum().clamp_min(WEIGHT_SUM_MIN)
    rows = losses.reshape(len(weights), -1)
    each = rows.sum(dim=1) if reduction == "batchmean" else rows.mean(dim=1)
    return (weights * each).sum() / weights.sum().clamp_min(WEIGHT_SUM_MIN)


def _get_reduction(loss: Any) -> str | None:
    """Return the loss's option ``reduction``, or None if it has none."""
    if isinstance(loss, nn.Module):
        return getattr(loss, "reduction", None)
    parameter = _signature_parameters(loss).get("reduction")
    return None if parameter is None else str(parameter.default)


def _signature_parameters(loss: Any) -> dict[str, inspect.Parameter]:
    """Return name -> parameter of the loss's signature; {} if it has no signature."""
    function = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        return dict(inspect.signature(function).parameters)
    except ValueError:  # written in C, without a signature
        return {}
