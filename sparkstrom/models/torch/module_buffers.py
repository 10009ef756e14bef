"""Buffers: a module's arrays that are not parameters, such as BatchNorm's statistics.

They travel as their bytes one behind the other, in the order of the module; only those that a
``state_dict`` holds. The average of several workers is the mean of each element, by weight where
there are some, in float64 and in the order given, so that the same reports make the same bytes;
whole numbers (BatchNorm's count of batches) take the largest.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from sparkstrom.base.errors import UsageError

Buffers = dict[str, torch.Tensor]


def named_buffers(module: nn.Module) -> Buffers:
    """Each buffer once, under its first name, as it is now; those that state_dict leaves out."""
    keys = set(module.state_dict(keep_vars=True))
    return {name: buffer for name, buffer in module.named_buffers() if name in keys}


def shapes_of(buffers: Buffers) -> dict[str, tuple[int, ...]]:
    """Return the shape of each buffer."""
    return {name: tuple(buffer.shape) for name, buffer in buffers.items()}


def check_shapes(buffers: Buffers, shapes: dict[str, tuple[int, ...]]) -> None:
    """Raise UsageError naming a buffer that has another shape than when the model was made."""
    for name, buffer in buffers.items():
        if (shape := shapes.get(name)) != tuple(buffer.shape):
            before = "not there" if shape is None else f"of shape {list(shape)}"
            raise UsageError(
                f"buffer {name} has shape {list(buffer.shape)} now and was {before} when the model"
                " was made: buffers are averaged over workers and must keep their shapes; give it"
                " its final shape from the beginning, or register it with persistent=False, so"
                " that each worker keeps its own"
            )


def packed(buffers: Buffers) -> bytes:
    """The bytes of all buffers."""
    return b"".join(
        buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for buffer in buffers.values()
        if buffer.numel()
    )


def unpacked(like: Buffers, data: bytes) -> Buffers:
    """Buffers of the same names, kinds and shapes. Raise UsageError where sizes do not agree."""
    wanted = sum(buffer.numel() * buffer.element_size() for buffer in like.values())
    if len(data) != wanted:
        raise UsageError(
            f"{len(data)} bytes of buffers, this module has {wanted} (of {len(like)} buffers):"
            " they are not of an equal model"
        )
    made, at = {}, 0
    for name, buffer in like.items():
        size = buffer.numel() * buffer.element_size()
        raw = (
            torch.frombuffer(bytearray(data[at : at + size]), dtype=buffer.dtype)
            if size
            else (torch.empty(0, dtype=buffer.dtype))
        )
        made[name] = raw.reshape(buffer.shape)
        at += size
    return made


def load(buffers: Buffers, data: bytes) -> None:
    """Change the buffers in place. Raise UsageError where sizes do not agree."""
    with torch.no_grad():
        for name, values in unpacked(buffers, data).items():
            buffers[name].copy_(values)


def averaged(like: Buffers, reports: list[bytes], weights: Sequence[float] | None = None) -> bytes:
    """One for all, as the module's text says. Raise UsageError for a report of another size."""
    columns = [unpacked(like, report) for report in reports]
    counts = [1.0] * len(reports) if weights is None else weights
    return packed({name: _average([c[name] for c in columns], counts) for name in like})


def _average(values: list[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    first = values[0]
    if not (first.is_floating_point() or first.is_complex()):
        largest = first
        for value in values[1:]:
            largest = torch.maximum(largest, value)
        return largest
    total = torch.zeros(first.shape, dtype=torch.promote_types(first.dtype, torch.float64))
    for value, weight in zip(values, weights, strict=True):
        total += value.to(total.dtype) * weight
    return (total / sum(weights)).to(first.dtype)
