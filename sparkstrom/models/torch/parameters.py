"""Keep the parameters of torch modules in one flat vector, and convert their buffers to bytes.

Each ``Parameter`` object that the user's code refers to stays the same; only its memory moves. The
vector contains a parameter that several modules share (a tied parameter) once. It also contains
frozen parameters, whose values do not change.

Buffers that are part of the ``state_dict`` are packed as bytes, one after the other in the module's
order. To average the buffers of several workers, the mean of each element is computed in float64.
The workers' values are added in the given order, so that equal buffers give equal bytes. For
integers (BatchNorm's count of batches), the maximum is taken instead of the mean.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from sparkstrom.base.errors import UsageError
from sparkstrom.models.base import Flat, Layout, check_bindable, check_bindable_on_device

NamedParameters = dict[str, nn.Parameter]


def named_parameters(module: Any) -> NamedParameters:
    """Return each parameter once, by its first name; raise UsageError if one cannot be used."""
    if not isinstance(module, nn.Module):
        raise UsageError(f"module is a {type(module).__name__}: pass a torch.nn.Module")
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise UsageError(
            f"module is wrapped in {type(module).__name__}: sparkstrom distributes the work itself;"
            " pass the module inside (wrapped.module)"
        )
    named = dict(module.named_parameters())
    for name, parameter in named.items():
        _check_parameter(name, parameter)
    for name, buffer in module.named_buffers():
        _refuse_lazy(f"buffer {name}", buffer)
    if not any(parameter.requires_grad for parameter in named.values()):
        raise UsageError(
            f"{type(module).__name__} has no parameter with requires_grad: nothing can be trained"
        )
    _refuse_shared_memory(named)
    return named


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    """Raise UsageError unless the parameter is dense, float32, and has values."""
    _refuse_lazy(f"parameter {name}", parameter)
    if parameter.dtype != torch.float32:
        kind = str(parameter.dtype).removeprefix("torch.")
        remedy = "call module.float(), and use autocast='bfloat16' to compute in bfloat16"
        if parameter.is_complex():
            remedy = (
                "create it from torch.view_as_real(values), and call view_as_complex in forward"
            )
        elif not parameter.is_floating_point():
            remedy = "register it as a buffer (register_buffer)"
        raise UsageError(f"parameter {name} is {kind}: parameters are trained in float32; {remedy}")
    if parameter.is_meta or parameter.layout != torch.strided:
        where = "on the meta device" if parameter.is_meta else f"of layout {parameter.layout}"
        raise UsageError(f"parameter {name} is {where}: it must be dense and have values")


def _refuse_lazy(what: str, tensor: torch.Tensor) -> None:
    """Raise UsageError for a lazy parameter or buffer; ``what`` names it."""
    if nn.parameter.is_lazy(tensor):
        raise UsageError(
            f"{what} is lazy, so its shape is not known before the first batch: run the module once"
            " on a batch of the right shape before you pass it"
        )


def _refuse_shared_memory(named: NamedParameters) -> None:
    """Raise UsageError for two parameters that share memory without being the same object."""
    ranges = sorted((*_memory_range(p), name) for name, p in named.items() if _has_own_memory(p))
    for (_, stop, first), (start, _, name) in itertools.pairwise(ranges):
        if start < stop:
            first, name = sorted((first, name), key=list(named).index)
            raise UsageError(
                f"parameters {first} and {name} share memory but are two objects: tie them as one"
                f" Parameter (module.{name} = module.{first})"
            )


def refuse_buffer_aliases(module: nn.Module, named: NamedParameters) -> None:
    """Raise UsageError for a buffer that lies in a parameter's memory, which ``bind`` replaces.

    Also raise it for a sparse or expanded buffer, into which no averages could be loaded.
    """
    ranges = [(*_memory_range(p), name) for name, p in named.items() if _has_own_memory(p)]
    for alias, buffer in module.named_buffers():
        address = buffer.data_ptr() if _has_own_memory(buffer) else 0
        for start, stop, name in ranges:
            if start <= address < stop:
                raise UsageError(
                    f"buffer {alias} lies in the memory of parameter {name}, which moves into the"
                    f" flat vector: register a copy ({name}.detach().clone()), or read the"
                    " parameter in forward"
                )
    for name, buffer in named_buffers(module).items():
        if buffer.layout != torch.strided:
            raise UsageError(
                f"buffer {name} has layout {buffer.layout}, but only dense buffers are averaged:"
                " register it with persistent=False"
            )
        if any(
            not step and size > 1 for step, size in zip(buffer.stride(), buffer.shape, strict=True)
        ):
            raise UsageError(
                f"buffer {name} is expanded, so several of its values share memory and cannot be"
                " set: register a copy (tensor.clone())"
            )


def _has_own_memory(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's memory holds all its values; an expanded tensor's does not."""
    if tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
        return False
    return bool(tensor.untyped_storage().nbytes() >= tensor.nbytes)


def _memory_range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return a tensor's (first address, end address); if not contiguous, of its first value."""
    values = tensor.numel() if tensor.is_contiguous() else 1
    return tensor.data_ptr(), tensor.data_ptr() + values * tensor.element_size()


def require_same_parameters(module: nn.Module, named: NamedParameters) -> None:
    """Raise UsageError unless the module's parameters are still the objects in ``named``."""
    now = dict(module.named_parameters())
    for name in [*named, *now]:
        if now.get(name) is not named.get(name):
            raise UsageError(
                f"parameter {name} of {type(module).__name__} was replaced, added or removed after"
                " the module was passed: create a new TorchModel with it"
            )
    for name, parameter in named.items():
        _check_parameter(name, parameter)


def make_layout(named: NamedParameters) -> Layout:
    """Return the layout of the parameters in the flat vector, in the module's order."""
    return Layout.from_shapes((name, tuple(parameter.shape)) for name, parameter in named.items())


def gather_values(named: NamedParameters) -> Flat:
    """Return a copy of all parameters' values as one vector f32[n_params], in its order."""
    pieces = [p.detach().cpu().reshape(-1).numpy() for p in named.values()]
    return np.concatenate(pieces)


def as_tensor(params: Any, n_params: int, device: torch.device) -> torch.Tensor:
    """Return a tensor that shares memory with ``params``, f32[n_params].

    Raise UsageError if that memory is on a different GPU than ``device``.
    """
    if not hasattr(params, "__cuda_array_interface__"):
        return torch.from_numpy(check_bindable(params, n_params))
    pointer: tuple[int, bool] = check_bindable_on_device(params, n_params).__cuda_array_interface__[
        "data"
    ]
    tensor = torch.as_tensor(params, device=device)
    if tensor.data_ptr() != pointer[0]:
        raise UsageError(
            f"parameters of a different device than {device}, where the model is: allocate them"
            " there"
        )
    return tensor


class ParameterViews:
    """Makes parameters views of one flat tensor f32[n_params].

    Args:
        named: the parameters, whose memory is replaced.
        layout: their positions in the vector.
        shared: the vector to which other workers' updates are added, on the host or the device.
        flat: the tensor to view: ``shared`` itself, or a copy of it on the device.
    """

    def __init__(
        self, named: NamedParameters, layout: Layout, shared: torch.Tensor, flat: torch.Tensor
    ) -> None:
        self._shared, self._flat = shared, flat
        self._named = named
        self._pointers: list[int] = []
        for parameter, start in zip(named.values(), layout.starts, strict=True):
            stop = start + parameter.numel()
            parameter.data = flat[start:stop].view(parameter.shape)
            parameter.grad = None
            self._pointers.append(parameter.data_ptr())

    def copy_from_shared(self) -> None:
        """Before a step, copy the shared vector to the device if it is on the host."""
        if self._flat is not self._shared:
            self._flat.copy_(self._shared)

    def copy_to_shared(self) -> None:
        """After a step, copy the parameters from the device to the shared vector on the host.

        If the shared vector itself is on the GPU, wait instead until the GPU has finished, because
        other kernels do not run on torch's streams. Raise UsageError if a parameter's memory was
        replaced.
        """
        self.check()
        if self._flat is not self._shared:
            self._shared.copy_(self._flat)
        elif self._flat.is_cuda:
            torch.cuda.synchronize(self._flat.device)

    def check(self) -> None:
        """Raise UsageError for a parameter whose memory is no longer in the vector, or not f32."""
        for (name, parameter), pointer in zip(self._named.items(), self._pointers, strict=True):
            if parameter.data_ptr() != pointer or parameter.dtype != torch.float32:
                raise UsageError(
                    f"parameter {name} left the flat vector during a step: something replaced"
                    " its memory (parameter.data = ..., module.to(...), module.half()) instead of"
                    " changing it in place (parameter.copy_(...), parameter.mul_(...))"
                )


def move_buffers(device: torch.device, *modules: Any) -> None:
    """Move the buffers of modules to ``device``; ignore arguments that are not modules."""
    for module in modules:
        for submodule in module.modules() if isinstance(module, nn.Module) else ():
            for name, buffer in submodule._buffers.items():
                if buffer is not None:
                    submodule._buffers[name] = buffer.to(device)


Buffers = dict[str, torch.Tensor]


def named_buffers(module: nn.Module) -> Buffers:
    """Return each persistent buffer once, under its first name.

    ``state_dict`` is not called, because the user's module may override it.
    """
    transient = {
        f"{prefix}.{name}".removeprefix(".")
        for prefix, part in module.named_modules()
        for name in part._non_persistent_buffers_set
    }
    return {name: buffer for name, buffer in module.named_buffers() if name not in transient}


# Buffer name -> its shape and dtype.
BufferForms = dict[str, tuple[tuple[int, ...], torch.dtype]]


def get_buffer_forms(buffers: Buffers) -> BufferForms:
    """Return the shape and dtype of each buffer."""
    return {name: (tuple(buffer.shape), buffer.dtype) for name, buffer in buffers.items()}


def check_buffer_forms(buffers: Buffers, forms: BufferForms) -> None:
    """Raise UsageError for a buffer whose shape or dtype is not that in ``forms``."""
    for name, form in get_buffer_forms(buffers).items():
        if (known := forms.get(name)) != form:
            before = "missing" if known is None else _format_form(*known)
            raise UsageError(
                f"buffer {name} is {_format_form(*form)} now and was {before} when the model"
                " was created: buffers are averaged over workers and must keep shape and dtype;"
                " give it its final shape and dtype from the beginning, or register it with"
                " persistent=False, so that each worker keeps its own"
            )


def _format_form(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """Return a shape and dtype as text, such as ``float32[3]``."""
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


def pack_buffers(buffers: Buffers) -> bytes:
    """Return the bytes of all buffers, one after the other."""
    return b"".join(
        buffer.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for buffer in buffers.values()
        if buffer.numel()
    )


def unpack_buffers(templates: Buffers, data: bytes) -> Buffers:
    """Convert packed bytes to buffers like ``templates``; raise UsageError if the size differs."""
    expected = sum(buffer.numel() * buffer.element_size() for buffer in templates.values())
    if len(data) != expected:
        raise UsageError(
            f"{len(data)} bytes of buffers, this module has {expected} (of {len(templates)}"
            " buffers): they belong to another model"
        )
    buffers, offset = {}, 0
    for name, buffer in templates.items():
        size = buffer.numel() * buffer.element_size()
        raw = (
            torch.frombuffer(bytearray(data[offset : offset + size]), dtype=buffer.dtype)
            if size
            else (torch.empty(0, dtype=buffer.dtype))
        )
        buffers[name] = raw.reshape(buffer.shape)
        offset += size
    return buffers


def load_buffers(buffers: Buffers, data: bytes) -> None:
    """Set the buffers in place to packed values. Raise UsageError if the size differs."""
    with torch.no_grad():
        for name, values in unpack_buffers(buffers, data).items():
            buffers[name].copy_(values)


def average_buffers(
    templates: Buffers, reports: list[bytes], weights: Sequence[float] | None = None
) -> bytes:
    """Return the mean of packed buffers, packed again; for integer buffers the maximum.

    Args:
        templates: buffers with the names, dtypes and shapes.
        reports: packed buffers of each worker.
        weights: weight of each report; None: all reports weigh the same.

    Raises:
        UsageError: the size of a report differs.
    """
    columns = [unpack_buffers(templates, report) for report in reports]
    counts = [1.0] * len(reports) if weights is None else weights
    return pack_buffers(
        {name: _weighted_mean([c[name] for c in columns], counts) for name in templates}
    )


def _weighted_mean(values: list[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Return the weighted mean of tensors, computed in float64; for integers the maximum."""
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
