"""Create torch optimizers and schedulers with users' factories, check them, and save their state.

A factory is a function that makes an optimizer from parameters, or a scheduler from an optimizer.

Names in a saved state:

    state/PARAMETER/KEY    state of one parameter
    shared/KEY             state that belongs to no particular parameter
    own/ATTRIBUTE          numbers and tensors that an optimizer keeps as attributes
    groups/NUMBER/KEY      options of a parameter group, such as the learning rate
    scheduler/KEY          the scheduler's state
    fit/KEY                the fit that a scheduler was made for, if it depends on the fit's length

A tensor without dimensions is stored as a scalar whose name ends with the dtype, as in
``state/0.weight/step:float32``. A part of a container has the container's name followed by ``~``, a
letter for the kind of its index or key, and the index or key: ``~l0`` is the first element of a
list, ``~t0`` of a tuple; ``~sNAME``, ``~iNUMBER`` and ``~pNAME`` are values of a dict whose key is
a string, an integer, or a parameter. Parts of nested containers have one such suffix per level.
"""

from __future__ import annotations

import copy
import functools
import inspect
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.optim import LBFGS, Optimizer, SparseAdam
from torch.optim.lr_scheduler import LRScheduler

from sparkstrom.base.errors import UsageError, first_line
from sparkstrom.models.base import State
from sparkstrom.models.torch.deferred_compiler import defer_compiler_import
from sparkstrom.models.torch.parameters import NamedParameters

REFUSED_OPTIMIZERS = {
    LBFGS: "it evaluates the loss several times in a step (a closure), and a step here is one"
    " minibatch; use AdamW or SGD",
    SparseAdam: "it takes sparse gradients only, and leaves all rows alone that a batch does not"
    " touch; use Adam without sparse=True, or SGD or Adagrad, which take sparse gradients, too",
}

INNER_STATE = (
    "optimizer {} contains {}, whose state, such as momentum, is neither saved nor given to other"
    " workers: it begins anew in each round, worker and fit; use {} alone, or a class that keeps"
    " all state itself"
)

# Prefixes of attributes that torch and schedulers set on optimizers, besides ``_torch_attributes``.
TORCH_PREFIXES = (
    "_optimizer_",
    "_opt_called",
    "_warned_",
    "_need_",
    "_step_supports",
    "_zero_grad",
)

OptimizerFactory = Callable[[Any], Optimizer]
GroupFactory = Callable[[NamedParameters], list[dict[str, Any]]]
SchedulerFactory = Callable[..., LRScheduler]  # (optimizer), or (optimizer, total_steps)

FIT_PREFIX = "fit/"
# Keys of parameter groups that schedulers write.
SCHEDULED_KEYS = {
    *("lr", "initial_lr", "max_lr", "min_lr", "betas"),
    *("momentum", "base_momentum", "max_momentum"),
}


def refuse_instances(optimizer: Any, scheduler: Any, groups: Any) -> None:
    """Raise UsageError, with the code to write, if an object was passed instead of its factory."""
    if isinstance(optimizer, Optimizer):
        raise UsageError(
            f"optimizer must be a factory, not an instance of {type(optimizer).__name__}, because"
            " each worker builds its own: pass"
            f" {_format_factory(optimizer, optimizer.defaults)} (import functools)"
            + (", and groups= for its groups" if len(optimizer.param_groups) > 1 else "")
        )
    if not callable(optimizer):
        raise UsageError(
            f"optimizer is a {type(optimizer).__name__}: pass a function that makes one from"
            " parameters, such as functools.partial(torch.optim.Adam, lr=1e-3)"
        )
    if isinstance(scheduler, LRScheduler):
        raise UsageError(
            f"scheduler must be a factory, not an instance of {type(scheduler).__name__}, because"
            " each worker builds its own: pass"
            f" {_format_factory(scheduler, vars(scheduler))} (import functools)"
        )
    if groups is not None and not callable(groups):
        raise UsageError(
            f"groups is a {type(groups).__name__}: pass a function that makes groups from a"
            " dictionary of named parameters"
        )
    if scheduler is not None and not callable(scheduler):
        raise UsageError(
            f"scheduler is a {type(scheduler).__name__}: pass a function that makes one from the"
            " optimizer, such as functools.partial(torch.optim.lr_scheduler.StepLR, step_size=100)"
        )


def _format_factory(instance: Any, values: dict[str, Any]) -> str:
    """Return code, ``functools.partial(...)``, that creates an equal optimizer or scheduler."""
    cls = type(instance)
    options = []
    for name, option in list(inspect.signature(cls).parameters.items())[1:]:
        value, default = values.get(name, option.default), option.default
        is_default = default is not inspect.Parameter.empty and repr(value) == repr(default)
        if name in ("last_epoch", "verbose") or (is_default and name != "lr"):
            continue
        unknown = value is inspect.Parameter.empty or callable(value)
        options.append(f", {name}={'...' if unknown else repr(value)}")
    module = cls.__module__
    if module.startswith("torch.optim"):
        module = "torch.optim.lr_scheduler" if isinstance(instance, LRScheduler) else "torch.optim"
    name_of_class = cls.__qualname__ if module == "__main__" else f"{module}.{cls.__qualname__}"
    return f"functools.partial({name_of_class}{''.join(options)})"


def make_optimizer(
    factory: OptimizerFactory, groups: GroupFactory | None, named: NamedParameters
) -> Optimizer:
    """Return a new optimizer for the trainable parameters.

    Args:
        factory: the user's function (parameters or groups) -> optimizer.
        groups: the user's function (named parameters) -> groups, or None.
        named: the module's parameters.

    Raises:
        UsageError: the factory fails, or its result cannot be used here.
    """
    defer_compiler_import()
    trainable = {name: p for name, p in named.items() if p.requires_grad}
    given = list(trainable.values()) if groups is None else groups(dict(trainable))
    try:
        optimizer = factory(given)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"the optimizer rejects these parameters: {error}{_explain_muon_error(error)}"
        ) from error
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"optimizer(parameters) returned a {type(optimizer).__name__}: it must"
                         " return a torch.optim.Optimizer")  # fmt: skip
    check_optimizer(optimizer, named)
    for group in optimizer.param_groups:
        if isinstance(group.get("lr"), torch.Tensor):  # schedulers change it in place
            group["lr"] = group["lr"].clone()
    return optimizer


def format_optimizer(
    factory: OptimizerFactory, groups: GroupFactory | None, named: NamedParameters
) -> str:
    """Return text such as "SGD(lr=0.1 and 0.2)"; if the factory fails, return its ``repr``."""
    try:
        optimizer = make_optimizer(factory, groups, named)
    except Exception:  # repr must not raise, whatever the user's factory does
        return repr(factory)
    numbers = {
        name: dict.fromkeys(f"{group[name]:.6g}" for group in optimizer.param_groups)
        for name, default in optimizer.defaults.items()
        if isinstance(default, int | float) and not isinstance(default, bool)
    }
    options = ", ".join(f"{name}={' and '.join(values)}" for name, values in numbers.items())
    return f"{type(optimizer).__name__}({options})"


def takes_total_steps(factory: Any) -> bool:
    """Return whether a scheduler factory must be given ``total_steps``.

    This is so if it has that parameter, and the user has bound neither that parameter nor
    ``epochs`` or ``steps_per_epoch`` to a value.
    """
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return False
    if "total_steps" not in parameters:
        return False
    default = parameters["total_steps"].default
    if default is not None:
        return default is inspect.Parameter.empty
    others = (parameters[name] for name in ("epochs", "steps_per_epoch") if name in parameters)
    return all(other.default in (None, inspect.Parameter.empty) for other in others)


def make_scheduler(
    factory: SchedulerFactory | None, optimizer: Optimizer, total_steps: int
) -> LRScheduler | None:
    """Return a new scheduler, or None if there is no factory.

    ``total_steps`` is passed to a factory that needs it. Raise UsageError if the factory fails or
    does not return a scheduler.
    """
    if factory is None:
        return None
    needs_total_steps = takes_total_steps(factory)
    try:
        scheduler = (
            factory(optimizer, total_steps=total_steps) if needs_total_steps else factory(optimizer)
        )
    except (TypeError, ValueError, ArithmeticError) as error:
        if needs_total_steps:
            raise UsageError(
                f"the scheduler cannot be created from the optimizer and"
                f" total_steps={total_steps:,}: {first_line(error)}"
            ) from error
        if isinstance(error, ArithmeticError):
            raise
        raise UsageError(
            f"the scheduler cannot be created from the optimizer alone: {error}; give it the rest"
            " beforehand, as functools.partial(torch.optim.lr_scheduler.StepLR, step_size=100) does"
            "; a parameter named total_steps gets the fit's number of steps"
        ) from error
    if not isinstance(scheduler, LRScheduler):
        raise UsageError(f"scheduler(optimizer) returned a {type(scheduler).__name__}: it must"
                         " return a torch.optim.lr_scheduler.LRScheduler")  # fmt: skip
    return scheduler


def step_optimizer(optimizer: Optimizer, parameters: list[torch.nn.Parameter]) -> None:
    """Take a step. Raise UsageError if it fails and one of ``parameters`` has a sparse gradient."""
    try:
        optimizer.step()
    except RuntimeError as error:
        if not _has_sparse_gradients(parameters):
            raise
        raise UsageError(
            f"optimizer {type(optimizer).__name__} and sparse gradients: {error}; SGD and Adagrad"
            " take them, without weight decay, or use nn.Embedding without sparse=True"
        ) from error


def require_gradients(named: NamedParameters, clip_norm: float | None) -> list[torch.nn.Parameter]:
    """Return the parameters that have a gradient; raise UsageError if none has.

    Unless ``clip_norm`` is None, first clip the gradients to that joint norm.
    """
    trained = [p for p in named.values() if p.grad is not None]
    if not trained:
        raise UsageError(NO_GRADIENT_MESSAGE)
    if clip_norm is not None:
        clip_gradients(trained, clip_norm)
    return trained


def _has_sparse_gradients(parameters: list[torch.nn.Parameter]) -> bool:
    """Return whether at least one gradient is sparse."""
    return any(p.grad is not None and p.grad.is_sparse for p in parameters)


def clip_gradients(parameters: list[torch.nn.Parameter], limit: float) -> None:
    """Scale the gradients, dense or sparse, so that their joint norm is at most ``limit``."""
    if not _has_sparse_gradients(parameters):
        torch.nn.utils.clip_grad_norm_(parameters, limit)
        return
    values = []
    for p in parameters:
        if p.grad is not None and p.grad.is_sparse:
            p.grad = p.grad.coalesce()
        if p.grad is not None:
            values.append(p.grad._values() if p.grad.is_sparse else p.grad)
    norms = [torch.linalg.vector_norm(value) for value in values]
    scale = (limit / (torch.linalg.vector_norm(torch.stack(norms)) + 1e-6)).clamp(max=1.0)
    for value in values:
        value.mul_(scale)


def _explain_muon_error(error: Exception) -> str:
    """Return a remedy for Muon's error about parameters that are not matrices; else ""."""
    if "2D" not in str(error):
        return ""
    return (
        "; Muon trains matrices only: give it a module without biases and other parameters, freeze"
        " these (requires_grad_(False)), or use AdamW"
    )


def check_optimizer(optimizer: Optimizer, named: NamedParameters) -> None:
    """Raise UsageError unless the optimizer steps once per minibatch and covers all parameters.

    It must contain all trainable parameters and may contain frozen ones, which torch leaves
    unchanged because they have no gradients.
    """
    for kind, reason in REFUSED_OPTIMIZERS.items():
        if isinstance(optimizer, kind):
            raise UsageError(f"optimizer {type(optimizer).__name__} cannot be used: {reason}")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UsageError(
            f"optimizer {type(optimizer).__name__} cannot be used: its step needs a closure"
        )
    covered = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trainable = {name: p for name, p in named.items() if p.requires_grad}
    if covered - {id(p) for p in named.values()}:
        raise UsageError(
            "the optimizer has parameters that are not the module's: make it from"
            " those that the factory is given, and from no others (on an executor the module is"
            " a copy of the one in your program)"
        )
    missing = [name for name, p in trainable.items() if id(p) not in covered]
    if missing:
        raise UsageError(
            "the optimizer leaves out"
            f" {', '.join(missing[:8])}{' ...' if len(missing) > 8 else ''}:"
            " put these into a group, or freeze them (requires_grad_(False))"
        )


def drop_schedule(state: State) -> State:
    """Return the saved optimizer state without the entries that a scheduler writes."""
    return {
        path: value
        for path, value in state.items()
        if not path.startswith(("scheduler/", FIT_PREFIX))
        and not (path.startswith("groups/") and re.split("[/:]", path)[2] in SCHEDULED_KEYS)
    }


def count_scheduler_steps(state: State) -> int:
    """Return how many steps the scheduler in a saved state has taken; 0 without a scheduler."""
    chained = "scheduler/_schedulers/0/last_epoch"  # a ChainedScheduler has no position itself
    return int(state.get("scheduler/last_epoch", state.get(chained, 0)))


def dump_state(
    optimizer: Optimizer, scheduler: LRScheduler | None, named: NamedParameters
) -> State:
    """Return the state of optimizer and scheduler, named as in the module's docstring.

    Arrays share memory with the live state where torch allows it.
    """
    state: State = {}
    _warn_of_inner_state(optimizer)
    names = {id(p): name for name, p in named.items()}
    for owner, values in optimizer.state.items():
        if not isinstance(owner, torch.Tensor):  # state that belongs to no particular parameter
            _store_value(state, f"shared/{owner}", values)
            continue
        for key, value in values.items():
            _store_tree(state, f"state/{names[id(owner)]}/{key}", value, names)
    for key, value in _list_extra_attributes(optimizer).items():
        _store_tree(state, f"own/{key}", value, names)
    for number, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key != "params"}
        _store_options(options, f"groups/{number}", state)
    if scheduler is not None:
        _store_options(scheduler.state_dict(), "scheduler", state)
    return state


def _warn_of_inner_state(optimizer: Optimizer) -> None:
    """Warn if the optimizer's attributes contain optimizers with a state, which is not saved."""
    is_delegating = type(optimizer).load_state_dict is not Optimizer.load_state_dict
    for value in vars(optimizer).values():
        inside = list(value.values()) if isinstance(value, dict) else value
        for inner in inside if isinstance(inside, list | tuple) else [value]:
            if not isinstance(inner, Optimizer) or (
                is_delegating and inner.state is optimizer.state
            ):
                continue  # a wrapper such as Accelerate's passes the inner state on as its own
            if any(not isinstance(each, dict) or each for each in inner.state.values()):
                wrapper, wrapped = type(optimizer).__name__, type(inner).__name__
                warnings.warn(INNER_STATE.format(wrapper, wrapped, wrapped), stacklevel=2)


def load_state(
    optimizer: Optimizer, scheduler: LRScheduler | None, named: NamedParameters, state: State
) -> None:
    """Restore a state from ``dump_state``. Raise UsageError if it is from a different model."""
    remaining = dict(state)
    loaded = optimizer.state_dict()
    loaded["state"] = _take_parameter_state(optimizer, named, remaining) | _take_shared_state(
        remaining
    )
    own = _take_extra_attributes(optimizer, named, remaining)
    loaded["param_groups"] = [
        _fill_tree(group, f"groups/{number}", remaining)
        for number, group in enumerate(loaded["param_groups"])
    ]
    schedule = (
        None if scheduler is None else _fill_tree(scheduler.state_dict(), "scheduler", remaining)
    )
    frozen = {name for name, p in named.items() if not p.requires_grad}
    remaining = {
        path: value for path, value in remaining.items() if _parameter_name(path) not in frozen
    }
    if remaining:
        raise UsageError(
            f"optimizer state has {min(remaining)!r}, which this {type(optimizer).__name__}"
            " does not have: it belongs to another model"
        )
    optimizer.load_state_dict(loaded)
    vars(optimizer).update(own)
    if scheduler is not None and schedule is not None:
        scheduler.load_state_dict(schedule)


def _parameter_name(path: str) -> str | None:
    """Return the name of the parameter whose state has this path in a saved state, or None."""
    kind, _, rest = path.partition("/")
    return rest.rpartition("/")[0] if kind == "state" else None


def _take_parameter_state(
    optimizer: Optimizer, named: NamedParameters, remaining: State
) -> dict[Any, Any]:
    """Remove the parameters' state from the saved state ``remaining``; return it by number.

    Parameters are numbered in the order of the optimizer's groups, as in its ``state_dict``.
    """
    names = {id(p): name for name, p in named.items()}
    order = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = {names[id(p)]: number for number, p in enumerate(order)}
    made: dict[Any, Any] = {}
    for path in [path for path in remaining if path.startswith("state/")]:
        name, _, key = path.removeprefix("state/").rpartition("/")
        if name in numbers:
            values = made.setdefault(numbers[name], {})
            _add_part(values, key, remaining.pop(path), named)
    return {number: _build_containers(values) for number, values in made.items()}


def _take_shared_state(remaining: State) -> dict[str, Any]:
    """Remove from the saved state what belongs to no particular parameter; return it by key."""
    paths = [path for path in remaining if path.startswith("shared/")]
    return dict(
        _decode_state_entry(path.removeprefix("shared/"), remaining.pop(path)) for path in paths
    )


@functools.cache
def _torch_attributes() -> frozenset[str]:
    """Return the names of attributes that all optimizers have or that schedulers replace.

    Creating a process's first optimizer makes torch import its compiler, which takes more than a
    second. This function therefore creates one only when called; predictions need no optimizer.
    """
    plain = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)
    return frozenset({"defaults", "state", "param_groups", "step", "zero_grad", *vars(plain)})


def _list_extra_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return name -> value of the attributes that an optimizer has and torch's plain SGD lacks.

    torch omits them from ``state_dict``, unless the optimizer's class overrides that method.
    """
    return {
        key: value
        for key, value in vars(optimizer).items()
        if key not in _torch_attributes() and not key.startswith(TORCH_PREFIXES)
    }


def _take_extra_attributes(
    optimizer: Optimizer, named: NamedParameters, remaining: State
) -> dict[str, Any]:
    """Remove extra attributes from the saved state ``remaining``; return name -> value.

    Tensors are returned on the parameters' device.
    """
    known, made = _list_extra_attributes(optimizer), dict[str, Any]()
    for path in [path for path in remaining if path.startswith("own/")]:
        key = path.removeprefix("own/")
        if key.partition("~")[0].partition(":")[0] in known:
            _add_part(made, key, remaining.pop(path), named)
    device = next(iter(named.values())).device
    moved = {key: _move_tree(value, device) for key, value in _build_containers(made).items()}
    assert isinstance(moved, dict)
    return moved


def _move_tree(tree: Any, device: torch.device) -> Any:
    """Return nested lists, tuples and dicts with all tensors on ``device``."""
    if isinstance(tree, dict):
        return {key: _move_tree(value, device) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_move_tree(value, device) for value in tree)
    return tree.to(device) if isinstance(tree, torch.Tensor) else tree


class _ContainerParts(dict[str, Any]):
    """Parts of a list, tuple or dict that is being rebuilt; each key is (letter, name)."""


def _store_tree(state: State, path: str, value: Any, names: dict[int, str]) -> None:
    """Store a value, or all parts of nested containers, in ``state`` under ``path``.

    ``names`` (id of a parameter -> its name) is for dicts whose keys are parameters.
    """
    if isinstance(value, dict):
        for key, part in value.items():
            if isinstance(key, torch.Tensor):
                if id(key) in names:
                    _store_tree(state, f"{path}~p{names[id(key)]}", part, names)
            elif isinstance(key, str | int):
                _store_tree(
                    state, f"{path}~{'s' if isinstance(key, str) else 'i'}{key}", part, names
                )
    elif isinstance(value, list | tuple):
        letter = "l" if isinstance(value, list) else "t"
        for number, part in enumerate(value):
            _store_tree(state, f"{path}~{letter}{number}", part, names)
    else:
        _store_value(state, path, value)


def _add_part(values: dict[Any, Any], path: str, value: Any, named: NamedParameters) -> None:
    """Add a stored value to the tree ``values`` at its path; create ``_ContainerParts`` for it."""
    *steps, last = path.split("~")
    last, value = _decode_state_entry(last, value)
    for step in steps:
        values = values.setdefault(_parse_key(step, named, values), _ContainerParts())
    values[_parse_key(last, named, values)] = value


def _parse_key(step: str, named: NamedParameters, container: dict[Any, Any]) -> Any:
    """Convert one step of a path, such as ``l0``, to a key of ``container``."""
    if not isinstance(container, _ContainerParts):
        return step
    letter, name = step[0], step[1:]
    return (letter, named[name] if letter == "p" else name)


def _build_containers(tree: Any) -> Any:
    """Return the tree with each ``_ContainerParts`` replaced by its list, tuple or dict."""
    if not isinstance(tree, dict):
        return tree
    values = {key: _build_containers(value) for key, value in tree.items()}
    if not isinstance(tree, _ContainerParts):
        return values
    letters = {letter for letter, _ in values}
    if letters <= {"l"} or letters <= {"t"}:
        ordered = [values[key] for key in sorted(values, key=lambda key: int(key[1]))]
        return tuple(ordered) if letters == {"t"} else ordered
    return {int(key) if letter == "i" else key: v for (letter, key), v in values.items()}


def _store_value(state: State, path: str, value: Any) -> None:
    """Store a tensor or number in ``state`` under ``path``; ignore any other value.

    A tensor without dimensions becomes a number, and its dtype is added to the path.
    """
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        if value.layout != torch.strided:  # SGD's momentum for sparse gradients
            value = value.to_dense()
        if value.ndim == 0:
            state[f"{path}:{str(value.dtype).removeprefix('torch.')}"] = value.item()
        else:
            state[path] = value.numpy()
    elif isinstance(value, bool | int | float):
        state[path] = value


def _decode_state_entry(key: str, value: Any) -> tuple[str, Any]:
    """Parse an entry of a stored optimizer state; return (name, tensor or number).

    The key is "name", or "name:dtype" for a number that was a tensor without dimensions. Arrays
    become tensors.
    """
    key, _, kind = key.partition(":")
    if kind:
        return key, torch.tensor(value, dtype=getattr(torch, kind))
    return key, torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) else value


def _store_options(tree: Any, path: str, state: State) -> None:
    """Store the numbers and tensors of a tree in ``state``, at paths that begin with ``path``.

    Other values are not stored, because users' factories make them again.
    """
    if isinstance(tree, dict):
        for key, value in tree.items():
            _store_options(value, f"{path}/{key}", state)
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            _store_options(value, f"{path}/{number}", state)
    else:
        _store_value(state, path, tree)


def _fill_tree(tree: Any, path: str, remaining: State) -> Any:
    """Return a copy of the tree with values from ``remaining`` at paths that begin with ``path``.

    Remove these values from ``remaining``. Values that are not stored there are kept.
    """
    if isinstance(tree, dict):
        made = copy.copy(tree)
        for key, value in tree.items():
            made[key] = value if key == "params" else _fill_tree(value, f"{path}/{key}", remaining)
        return made
    if isinstance(tree, list | tuple):
        return type(tree)(_fill_tree(v, f"{path}/{n}", remaining) for n, v in enumerate(tree))
    for name in (path, *(f"{path}:{kind}" for kind in ("float32", "float64", "int64"))):
        if name in remaining:
            return _decode_state_entry(name, remaining.pop(name))[1]
    return tree


NO_GRADIENT_MESSAGE = (
    "no parameter of the module got a gradient: the loss is computed without them (detached, under"
    " torch.no_grad, or from another module); compute it from the output that it is given"
)
