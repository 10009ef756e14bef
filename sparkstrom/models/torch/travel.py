"""How a module travels: without its parameters' storage, and alone.

Functions around it (loss, step, ...) travel beside it. One that holds the module by itself would
meet another copy of it on an executor, whose training is lost, so that is refused.
"""

from __future__ import annotations

import copy
import dis
import itertools
import types
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from sparkstrom.base.errors import UsageError
from sparkstrom.models.own_words import said_by
from sparkstrom.models.torch.parameters import Named

LOOKED_AT_MAX = 10_000  # objects, nearest first: a function may hold a whole program

EMPTY = types.CellType()  # equal to the cell of a name that has no value yet


def without_storage(module: nn.Module, named: Named) -> nn.Module:
    """A copy of the module whose parameters have shape but one element of memory each.

    Its parametrizations are asleep until ``awakened``: torch's own class for them refuses to be
    pickled. Raise UsageError where the module cannot be copied.
    """
    memo: dict[int, Any] = {id(parameter): _hollow(parameter) for parameter in named.values()}
    try:
        twin: nn.Module = copy.deepcopy(module, memo)
    except Exception as error:
        raise UsageError(
            f"module {type(module).__name__} cannot be copied, so it cannot travel to executors:"
            f" {said_by(error)}"
        ) from error
    for part in twin.modules():
        if _is_awake(part):
            part.__class__ = parametrize.type_before_parametrizations(part)
    return twin


def awakened(module: nn.Module) -> nn.Module:
    """The module itself, its parametrized tensors (weight_norm, ...) computed again when read."""
    for part in list(module.modules()):
        if parametrize.is_parametrized(part) and not _is_awake(part):
            parametrize._inject_new_class(part)
            for name in part.parametrizations:
                parametrize._inject_property(part, name)
    return module


def _is_awake(part: nn.Module) -> bool:
    return parametrize.is_parametrized(part) and type(part).__name__.startswith("Parametrized")


def _hollow(parameter: nn.Parameter) -> nn.Parameter:
    values = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
    hollow = nn.Parameter(values, requires_grad=parameter.requires_grad)
    hollow.__dict__.update(parameter.__dict__)  # marks that users set, such as no_decay
    return hollow


# -- hooks on parameters ---------------------------------------------------------------------------

Hooks = dict[str, tuple[list[Any], list[Any]]]


def parameter_hooks(module: nn.Module, named: Named) -> Hooks:
    """Return the hooks of each parameter that has some: on its gradient, and after accumulation.

    torch drops hooks of parameters when it pickles or copies a module, so they travel beside it.
    Raise UsageError for a hook that holds the module itself.
    """
    found: Hooks = {}
    for name, parameter in named.items():
        of_gradient = list((parameter._backward_hooks or {}).values())
        accumulated = list((parameter._post_accumulate_grad_hooks or {}).values())
        if of_gradient or accumulated:
            found[name] = of_gradient, accumulated
            held = {f"a hook on {name} ({n})": h for n, h in enumerate(of_gradient + accumulated)}
            refuse_holders(module, remedy=HOOK_REMEDY, **held)
    return found


def register_hooks(named: Named, hooks: Hooks) -> None:
    """Register what ``parameter_hooks`` returned on the parameters of the same names."""
    for name, (of_gradient, accumulated) in hooks.items():
        for hook in of_gradient:
            named[name].register_hook(hook)
        for hook in accumulated:
            named[name].register_post_accumulate_grad_hook(hook)


# -- functions that hold the module ----------------------------------------------------------------


FUNCTION_REMEDY = (
    "use what the function is given, return what the loss needs from forward, or pass step=, which"
    " is given the module"
)
HOOK_REMEDY = (
    "let the hook use what it is given, and tensors that are read from the module before the hook"
    " is defined (mask = self.mask)"
)


def refuse_holders(module: nn.Module, remedy: str = FUNCTION_REMEDY, **functions: Any) -> None:
    """Raise UsageError naming the function that holds the module, or a part that has parameters."""
    own: dict[int, str] = {id(p): name for name, p in module.named_parameters()}
    for name, part in module.named_modules():
        if any(True for _ in part.parameters()):
            own[id(part)] = name or type(module).__name__
    for what, function in functions.items():
        found = next((own[id(held)] for held in _held(function) if id(held) in own), None)
        if found is not None:
            raise UsageError(
                f"{what} holds the module itself ({found}): on an executor that would be a copy"
                f" beside the one that is trained; {remedy}"
            )


def _held(function: Any) -> Iterator[Any]:
    """What a function brings along: closures, defaults, globals that it reads, attributes."""
    waiting, seen = deque([function]), {id(function)}
    while waiting and len(seen) < LOOKED_AT_MAX:
        thing = waiting.popleft()
        yield thing
        for part in itertools.islice(_parts(thing), LOOKED_AT_MAX):
            if id(part) not in seen:
                seen.add(id(part))
                waiting.append(part)


def _parts(thing: Any) -> Iterator[Any]:
    if isinstance(thing, partial):
        yield from (thing.func, *thing.args, *thing.keywords.values())
    elif isinstance(thing, types.MethodType):
        yield from (thing.__self__, thing.__func__)
    elif isinstance(thing, types.FunctionType):
        yield from thing.__defaults__ or ()
        yield from (cell.cell_contents for cell in thing.__closure__ or () if cell != EMPTY)
        yield from _globals_of(thing)
    elif isinstance(thing, list | tuple):
        yield from thing
    elif isinstance(thing, dict):
        yield from thing.values()
    elif not isinstance(thing, nn.Module | torch.Tensor | type | types.ModuleType):
        yield from getattr(thing, "__dict__", {}).values()


def _globals_of(function: types.FunctionType) -> Iterator[Any]:
    """Modules and tensors that it reads by name, and its own file's functions."""
    for name in _names_read(function.__code__):
        value = function.__globals__.get(name)
        beside = getattr(value, "__module__", None) == function.__module__
        if isinstance(value, nn.Module | torch.Tensor) or (
            beside and isinstance(value, types.FunctionType)
        ):
            yield value


def _names_read(code: types.CodeType) -> set[str]:
    names = {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_read(constant)
    return names
