"""Losses: ``loss(output, target)`` as users have them, with a weight for each row where asked."""

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
from sparkstrom.models.losses import loss_name
from sparkstrom.models.torch.tensors import IGNORED, TINY, Tensors

Loss = Callable[..., torch.Tensor]
MEANS = ("mean", "batchmean")  # the latter adds up a row's values, as KLDivLoss wants it
OUTPUTS = ("logits", "probabilities", "values")
OF_CLASSES = ("crossentropy", "nll", "withlogits", "multilabelsoft")  # in a loss of logits' name
OF_INDICES = ("crossentropyloss", "crossentropy", "nllloss", "multimarginloss")
PER_LABEL = ("withlogits", "bceloss", "binarycrossentropy", "multilabelsoft")


def outputs_kind(wanted: str | None, loss: Any) -> str:
    """What a module with this loss puts out. Raise UsageError for an unknown word."""
    if wanted is None:
        name = _plain(loss)
        if name in ("bceloss", "binarycrossentropy"):
            return "probabilities"
        of_classes = loss is None or any(word in name for word in OF_CLASSES)
        return "logits" if of_classes else "values"
    if wanted not in OUTPUTS:
        raise UsageError(f"outputs={wanted!r}: must be one of {', '.join(OUTPUTS)}")
    return wanted


def is_per_label(loss: Any) -> bool:
    """Whether each output has a true or false of its own."""
    said = getattr(loss, "per_label", None)  # DL4J's
    return any(word in _plain(loss) for word in PER_LABEL) if said is None else bool(said)


def with_classes(loss: Any, output: Tensors, target: Tensors) -> Tensors:
    """The target as ``loss`` wants it: class indices that came as fractions are int64.

    Spark ML's labels are doubles. Raise UsageError naming one that is not whole.
    """
    if not (isinstance(output, torch.Tensor) and isinstance(target, torch.Tensor)):
        return target
    of_indices = is_torchs(loss) and _plain(loss) in OF_INDICES
    if not (of_indices and target.is_floating_point() and target.ndim == output.ndim - 1):
        return target
    whole = target.long()
    if (wrong := whole != target).any():
        raise UsageError(
            f"a label is {target[wrong][0].item():g}: the loss {loss_name(loss)} takes classes,"
            " which are whole numbers from 0; for other values take a loss of values, such as"
            " MSELoss, or give shares [rows, classes]"
        )
    return whole


def ignored_label(loss: Any) -> int | None:
    """The ``ignore_index`` of a loss of classes; None where it has none."""
    found = getattr(loss, "ignore_index", None)  # of a module
    if found is None and (parameter := _parameters(loss).get("ignore_index")) is not None:
        found = parameter.default  # of a function, or of a partial with its own
    return found if isinstance(found, int) else None


def _plain(loss: Any) -> str:
    return loss_name(loss).replace("_", "").lower()


def is_torchs(loss: Any) -> bool:
    """Torch's own, which compares outputs with labels."""
    loss = getattr(loss, "func", loss)  # of a partial
    where = getattr(loss, "__module__", None) or type(loss).__module__
    return loss is not None and str(where).partition(".")[0] == "torch"


def check_loss(loss: Any) -> None:
    """Raise UsageError for a loss that is no mean over rows, or has parameters of its own."""
    if not callable(loss):
        raise UsageError(f"loss is {loss!r}: pass a function loss(output, target)")
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        raise UsageError(
            f"loss {type(loss).__name__} has parameters of its own, which nobody would train:"
            " make it part of the module, and return the loss from its forward"
        )
    reduction = _reduction(loss)
    if reduction not in (None, *MEANS):
        raise UsageError(
            f"the loss has reduction={reduction!r}: it must be the mean over rows ('mean', or"
            " 'batchmean' where it has that), so that a step does not depend on how many rows a"
            " batch has"
        )


def counted(loss: Any, target: Tensors, like: torch.Tensor) -> torch.Tensor | None:
    """Return what each place of ``target`` counts in the loss's own mean, or None: all count one.

    ``CrossEntropyLoss`` and ``NLLLoss`` divide by the sum of the class weights of the places whose
    label is not ``ignore_index``. Labels that are probabilities count one each. ``like``: a tensor
    of the dtype and device that the result is to have.
    """
    options = _class_options(loss)
    if options is None or not isinstance(target, torch.Tensor) or target.is_floating_point():
        return None
    weight, ignored = options
    is_counted = target != ignored
    if weight is None:
        return is_counted.to(like.dtype)
    labels = torch.where(is_counted, target, 0)
    return weight.to(like.device, like.dtype)[labels] * is_counted


def _class_options(loss: Any) -> tuple[torch.Tensor | None, int] | None:
    """Return (class weights, ignore_index) of torch's losses of one class per place."""
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        return loss.weight, loss.ignore_index
    keywords = loss.keywords if isinstance(loss, functools.partial) else {}
    if getattr(loss, "func", loss) in (functional.cross_entropy, functional.nll_loss):
        return keywords.get("weight"), keywords.get("ignore_index", IGNORED)
    return None


def weighted(loss: Loss, output: Tensors, target: Tensors, weights: torch.Tensor) -> torch.Tensor:
    """sum(weight * loss of row) / sum(weight).

    With weights of one this is what the loss computes without them, class weights and ignored
    labels included: sum(weight * class weight * loss) / sum(weight * class weight) over places.
    A loss with a parameter ``weights`` gets them, and returns that mean itself. Torch's own, which
    have a ``reduction``, are asked for each row's loss. Raise UsageError for any other.
    """
    if "weights" in _parameters(loss):
        return loss(output, target, weights=weights)
    if isinstance(loss, nn.Module) and hasattr(loss, "reduction"):
        each = copy.copy(loss)
        each.reduction = "none"
        return _mean(loss, each(output, target), target, weights, loss.reduction)
    if (reduction := _reduction(loss)) is not None:
        return _mean(loss, loss(output, target, reduction="none"), target, weights, reduction)
    raise UsageError(
        "rows have weights, but the loss takes none: give it a parameter `weights` (f32[rows]) and"
        " let it return sum(weights * losses) / sum(weights), or use a loss with `reduction`"
    )


def number_of(loss: Any) -> float:
    """The loss of a step as a number. Raise UsageError if it is none."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return float(loss.detach())
    if isinstance(loss, Real) or (isinstance(loss, np.ndarray) and loss.ndim == 0):
        return float(loss)
    raise UsageError(f"step(module, optimizer, batch) returned {loss!r}: it must return the loss")


def _mean(
    loss: Any, losses: torch.Tensor, target: Tensors, weights: torch.Tensor, reduction: Any
) -> torch.Tensor:
    if losses.ndim == 0 or len(losses) != len(weights):
        raise UsageError(
            f"the loss makes {list(losses.shape)} values of {len(weights)} rows: with weights it"
            " needs one for each row, or several [rows, ...]"
        )
    counts = counted(loss, target, losses)
    if counts is not None:  # the losses have the class weights in them already
        each = weights.reshape(-1, *[1] * (losses.ndim - 1))
        return (each * losses).sum() / (each * counts).sum().clamp_min(TINY)
    rows = losses.reshape(len(weights), -1)
    each = rows.sum(dim=1) if reduction == "batchmean" else rows.mean(dim=1)
    return (weights * each).sum() / weights.sum().clamp_min(TINY)


def _reduction(loss: Any) -> str | None:
    """How the loss makes one number of the rows', where it says so."""
    if isinstance(loss, nn.Module):
        return getattr(loss, "reduction", None)
    parameter = _parameters(loss).get("reduction")
    return None if parameter is None else str(parameter.default)


def _parameters(loss: Any) -> dict[str, inspect.Parameter]:
    function = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        return dict(inspect.signature(function).parameters)
    except ValueError:  # written in C, without a signature
        return {}
