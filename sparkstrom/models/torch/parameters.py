"""A module's parameters as views of one flat vector.

Each ``Parameter`` stays the object that the user's code knows; only its memory moves. Tied
parameters are one object, so they lie in the vector once; frozen ones lie in it, too, and stay
as they are.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from torch import nn

from sparkstrom.base.errors import UsageError
from sparkstrom.models.base import Flat
from sparkstrom.models.flat import Layout, bindable, bindable_on_device

Named = dict[str, nn.Parameter]


def named_parameters(module: Any) -> Named:
    """Each parameter once, under its first name. Raise UsageError for what cannot be trained."""
    if not isinstance(module, nn.Module):
        raise UsageError(f"module is a {type(module).__name__}: pass a torch.nn.Module")
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise UsageError(
            f"module is wrapped in {type(module).__name__}: sparkstrom spreads the work itself;"
            " pass the module inside (wrapped.module)"
        )
    named = dict(module.named_parameters())
    for name, parameter in named.items():
        _check_parameter(name, parameter)
    if not any(parameter.requires_grad for parameter in named.values()):
        raise UsageError(
            f"{type(module).__name__} has no parameter with requires_grad: nothing can be trained"
        )
    _refuse_shared_memory(named)
    return named


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if nn.parameter.is_lazy(parameter):
        raise UsageError(
            f"parameter {name} is lazy, so its shape is not known before the first batch: run the"
            " module once on a batch of the right shape before you pass it"
        )
    if parameter.dtype != torch.float32:
        kind = str(parameter.dtype).removeprefix("torch.")
        raise UsageError(
            f"parameter {name} is {kind}: parameters are trained in float32; call module.float(),"
            " and use autocast='bfloat16' to compute in bfloat16"
        )
    if parameter.is_meta or parameter.layout != torch.strided:
        where = "on the meta device" if parameter.is_meta else f"of layout {parameter.layout}"
        raise UsageError(f"parameter {name} is {where}: it must be dense and have values")


def _refuse_shared_memory(named: Named) -> None:
    ranges = sorted((*_range_of(p), name) for name, p in named.items() if _has_values(p))
    for (_, stop, first), (start, _, name) in itertools.pairwise(ranges):
        if start < stop:
            first, name = sorted((first, name), key=list(named).index)
            raise UsageError(
                f"parameters {first} and {name} share memory but are two objects: tie them as one"
                f" Parameter (module.{name} = module.{first})"
            )


def refuse_aliases(module: nn.Module, named: Named) -> None:
    """Raise UsageError for a buffer in a parameter's memory: parameters move to the vector."""
    ranges = [(*_range_of(p), name) for name, p in named.items() if _has_values(p)]
    for alias, buffer in module.named_buffers():
        at = buffer.data_ptr() if _has_values(buffer) else 0
        for start, stop, name in ranges:
            if start <= at < stop:
                raise UsageError(
                    f"buffer {alias} lies in the memory of parameter {name}, which moves into the"
                    f" flat vector: register a copy ({name}.detach().clone()), or read the"
                    " parameter in forward"
                )


def _has_values(tensor: torch.Tensor) -> bool:
    """Values of its own: not empty, not expanded from one, as in a module that has travelled."""
    if tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
        return False
    return bool(tensor.untyped_storage().nbytes() >= tensor.nbytes)


def _range_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte and the one after the last; of columns of a matrix, the first value's."""
    values = tensor.numel() if tensor.is_contiguous() else 1
    return tensor.data_ptr(), tensor.data_ptr() + values * tensor.element_size()


def need_same(module: nn.Module, named: Named) -> None:
    """Raise UsageError where the module has other parameters than when it was passed."""
    now = dict(module.named_parameters())
    for name in [*named, *now]:
        if now.get(name) is not named.get(name):
            raise UsageError(
                f"parameter {name} of {type(module).__name__} was replaced, added or removed after"
                " the module was passed: make a new TorchModel of it"
            )
    for name, parameter in named.items():
        _check_parameter(name, parameter)


def layout_of(named: Named) -> Layout:
    """Where each parameter lies in the vector: in the module's own order."""
    return Layout.of((name, tuple(parameter.shape)) for name, parameter in named.items())


def gathered(named: Named) -> Flat:
    """A copy of the values, f32[n_params]."""
    pieces = [p.detach().cpu().reshape(-1).numpy() for p in named.values()]
    return np.concatenate(pieces)


def tensor_on(params: Any, n_params: int, device: torch.device) -> torch.Tensor:
    """The same memory as a tensor. Raise UsageError where it cannot be, or is on another GPU."""
    if not hasattr(params, "__cuda_array_interface__"):
        return torch.from_numpy(bindable(params, n_params))
    given: tuple[int, bool] = bindable_on_device(params, n_params).__cuda_array_interface__["data"]
    tensor = torch.as_tensor(params, device=device)
    if tensor.data_ptr() != given[0]:
        raise UsageError(
            f"parameters of another device than {device}, where the model is: allocate them there"
        )
    return tensor


class Views:
    """Parameters that lie in one flat tensor: in the vector that all work on, or in a copy of it.

    ``shared``: f32[n_params], on the host or on the model's device; ``flat``: the same where it is
    on the device, else a copy there.
    """

    def __init__(
        self, named: Named, layout: Layout, shared: torch.Tensor, flat: torch.Tensor
    ) -> None:
        self._shared, self._flat = shared, flat
        self._named = named
        self._pointers: list[int] = []
        for parameter, start in zip(named.values(), layout.starts, strict=True):
            stop = start + parameter.numel()
            parameter.data = flat[start:stop].view(parameter.shape)
            parameter.grad = None
            self._pointers.append(parameter.data_ptr())

    def fetch(self) -> None:
        """Before a step: what others have changed in a vector on the host."""
        if self._flat is not self._shared:
            self._flat.copy_(self._shared)

    def store(self) -> None:
        """After a step: what it has changed. Nothing of it is under way any more."""
        self.check()
        if self._flat is not self._shared:
            self._shared.copy_(self._flat)
        elif self._flat.is_cuda:  # whoever works on it next knows nothing of torch's streams
            torch.cuda.synchronize(self._flat.device)

    def check(self) -> None:
        """Raise UsageError naming a parameter that lies elsewhere now: its training is lost."""
        for (name, parameter), pointer in zip(self._named.items(), self._pointers, strict=True):
            if parameter.data_ptr() != pointer or parameter.dtype != torch.float32:
                raise UsageError(
                    f"parameter {name} has left the flat vector during a step: something replaced"
                    " its memory (parameter.data = ..., module.to(...), module.half()) instead of"
                    " changing it in place (parameter.copy_(...), parameter.mul_(...))"
                )


def move_buffers(device: torch.device, *modules: Any) -> None:
    """Bring to ``device`` what modules among these have of tensors, but their parameters."""
    for whole in modules:
        for part in whole.modules() if isinstance(whole, nn.Module) else ():
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    part._buffers[name] = buffer.to(device)
