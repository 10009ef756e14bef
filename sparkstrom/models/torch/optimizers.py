"""Optimizers: made from the user's factory, checked, and their state as named arrays and scalars.

Names of a state: ``state/PARAMETER/KEY``, ``shared/KEY`` (what belongs to no parameter),
``own/ATTRIBUTE`` (numbers and tensors that an optimizer keeps as attributes of its own),
``groups/NUMBER/KEY`` (learning rates change by the scheduler), ``scheduler/KEY``. A tensor without
dimensions becomes a scalar whose name ends with its type, as in ``state/0.weight/step:float32``.
The parts of a container follow its name, each after a ``~`` and a letter: ``~l0`` the first of a
list, ``~t0`` of a tuple, ``~sNAME`` and ``~iNUMBER`` the value of a key of a dict, ``~pNAME`` that
of a parameter.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.optim import LBFGS, Optimizer, SparseAdam
from torch.optim.lr_scheduler import LRScheduler

from sparkstrom.base.errors import UsageError
from sparkstrom.models.base import State
from sparkstrom.models.torch.parameters import Named

REFUSED = {
    LBFGS: "it evaluates the loss several times in a step (a closure), and a step here is one"
    " minibatch; use AdamW or SGD",
    SparseAdam: "it takes sparse gradients only, and leaves all rows alone that a batch does not"
    " touch; use Adam without sparse=True, or SGD or Adagrad, which take sparse gradients, too",
}

# Attributes of any optimizer of torch, among them what its schedulers set.
TORCHS_ATTRIBUTES = frozenset(
    {"defaults", "state", "param_groups", "step", "zero_grad"}
    | vars(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.0)).keys()
)
TORCHS_PREFIXES = (
    "_optimizer_",
    "_opt_called",
    "_warned_",
    "_need_",
    "_step_supports",
    "_zero_grad",
)

OptimizerFactory = Callable[[Any], Optimizer]
Groups = Callable[[Named], list[dict[str, Any]]]
SchedulerFactory = Callable[[Optimizer], LRScheduler]


def refuse_instances(optimizer: Any, scheduler: Any) -> None:
    """Raise UsageError with the line to write, where one that is made is passed for its maker."""
    if isinstance(optimizer, Optimizer):
        raise UsageError(
            f"optimizer={_maker_of(optimizer, optimizer.defaults)} is what to pass, with `import"
            f" functools`, instead of the {type(optimizer).__name__} itself: each worker makes one"
            " of the parameters that it trains"
            + ("; groups= makes its groups" if len(optimizer.param_groups) > 1 else "")
        )
    if not callable(optimizer):
        raise UsageError(
            f"optimizer is a {type(optimizer).__name__}: pass a function that makes one from"
            " parameters, such as functools.partial(torch.optim.Adam, lr=1e-3)"
        )
    if isinstance(scheduler, LRScheduler):
        raise UsageError(
            f"scheduler={_maker_of(scheduler, vars(scheduler))} is what to pass, with `import"
            f" functools`, instead of the {type(scheduler).__name__} itself: each worker makes one"
            " of its optimizer"
        )
    if scheduler is not None and not callable(scheduler):
        raise UsageError(
            f"scheduler is a {type(scheduler).__name__}: pass a function that makes one from the"
            " optimizer, such as functools.partial(torch.optim.lr_scheduler.StepLR, step_size=100)"
        )


def _maker_of(made: Any, values: dict[str, Any]) -> str:
    """``functools.partial(...)`` that makes an equal one, as far as its values are known."""
    kind = type(made)
    options = []
    for name, option in list(inspect.signature(kind).parameters.items())[1:]:
        value, default = values.get(name, option.default), option.default
        if name in ("last_epoch", "verbose") or (_same(value, default) and name != "lr"):
            continue
        unknown = value is inspect.Parameter.empty or callable(value)
        options.append(f", {name}={'...' if unknown else repr(value)}")
    where = kind.__module__
    if where.startswith("torch.optim"):
        where = "torch.optim.lr_scheduler" if isinstance(made, LRScheduler) else "torch.optim"
    place = kind.__qualname__ if where == "__main__" else f"{where}.{kind.__qualname__}"
    return f"functools.partial({place}{''.join(options)})"


def _same(value: Any, default: Any) -> bool:
    if default is inspect.Parameter.empty:
        return False
    return repr(value) == repr(default)


def made_optimizer(factory: OptimizerFactory, groups: Groups | None, named: Named) -> Optimizer:
    """The optimizer of the trainable parameters. Raise UsageError where it cannot work here."""
    trainable = {name: p for name, p in named.items() if p.requires_grad}
    given = list(trainable.values()) if groups is None else groups(dict(trainable))
    try:
        optimizer = factory(given)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"the optimizer refuses these parameters: {error}{_help(error)}"
        ) from error
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"optimizer(parameters) returned a {type(optimizer).__name__}: it must"
                         " return a torch.optim.Optimizer")  # fmt: skip
    check_optimizer(optimizer, named)
    return optimizer


def optimizer_in_words(factory: OptimizerFactory, groups: Groups | None, named: Named) -> str:
    """Return "Adam(lr=0.001, eps=1e-08, ...)": class and numbers, of each group if they differ."""
    try:
        optimizer = made_optimizer(factory, groups, named)
    except Exception:  # a factory of a user's own; its repr must not raise
        return repr(factory)
    numbers = {
        name: dict.fromkeys(f"{group[name]:.6g}" for group in optimizer.param_groups)
        for name, default in optimizer.defaults.items()
        if isinstance(default, int | float) and not isinstance(default, bool)
    }
    told = ", ".join(f"{name}={' and '.join(values)}" for name, values in numbers.items())
    return f"{type(optimizer).__name__}({told})"


def check_optimizer(optimizer: Optimizer, named: Named) -> None:
    """Raise UsageError unless it steps once a minibatch, on all trainable parameters.

    It may have frozen ones of the module too: without gradients, torch leaves them as they are.
    """
    _refuse_closures(optimizer)
    _check_covers(optimizer, named)


def made_scheduler(factory: SchedulerFactory | None, optimizer: Optimizer) -> LRScheduler | None:
    """The scheduler, if one is wanted. Raise UsageError where it is none."""
    if factory is None:
        return None
    try:
        scheduler = factory(optimizer)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"the scheduler cannot be made of the optimizer alone: {error}; give it the rest"
            " beforehand, as functools.partial(torch.optim.lr_scheduler.StepLR, step_size=100) does"
        ) from error
    if not isinstance(scheduler, LRScheduler):
        raise UsageError(f"scheduler(optimizer) returned a {type(scheduler).__name__}: it must"
                         " return a torch.optim.lr_scheduler.LRScheduler")  # fmt: skip
    return scheduler


def stepped(optimizer: Optimizer, parameters: list[torch.nn.Parameter]) -> None:
    """The optimizer's step. Raise UsageError where it takes no sparse gradients."""
    try:
        optimizer.step()
    except RuntimeError as error:
        if not _are_sparse(parameters):
            raise
        raise UsageError(
            f"optimizer {type(optimizer).__name__} and sparse gradients: {error}; SGD and Adagrad"
            " take them, without weight decay, or use nn.Embedding without sparse=True"
        ) from error


def with_gradients(named: Named, clip_norm: float | None) -> list[torch.nn.Parameter]:
    """Parameters that the loss reached, clipped. Raise UsageError where it reached none."""
    reached = [p for p in named.values() if p.grad is not None]
    if not reached:
        raise UsageError(NO_GRADIENT)
    if clip_norm is not None:
        clip(reached, clip_norm)
    return reached


def _are_sparse(parameters: list[torch.nn.Parameter]) -> bool:
    return any(p.grad is not None and p.grad.is_sparse for p in parameters)


def clip(parameters: list[torch.nn.Parameter], limit: float) -> None:
    """Scale the gradients so that their norm is at most ``limit``; sparse ones, too."""
    if not _are_sparse(parameters):
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


def _help(error: Exception) -> str:
    if "2D" not in str(error):
        return ""
    return (
        "; Muon trains matrices only: give it a module without biases and other parameters, freeze"
        " these (requires_grad_(False)), or use AdamW"
    )


def _refuse_closures(optimizer: Optimizer) -> None:
    for kind, reason in REFUSED.items():
        if isinstance(optimizer, kind):
            raise UsageError(f"optimizer {type(optimizer).__name__} cannot be used: {reason}")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UsageError(
            f"optimizer {type(optimizer).__name__} cannot be used: its step needs a closure"
        )


def _check_covers(optimizer: Optimizer, named: Named) -> None:
    taken = {id(p) for group in optimizer.param_groups for p in group["params"]}
    trainable = {name: p for name, p in named.items() if p.requires_grad}
    if taken - {id(p) for p in named.values()}:
        raise UsageError(
            "the optimizer has parameters that are not the module's: make it from"
            " those that the factory is given, and from no others (on an executor the module is"
            " another object than in your program)"
        )
    left = [name for name, p in trainable.items() if id(p) not in taken]
    if left:
        raise UsageError(
            f"the optimizer leaves out {', '.join(left[:8])}{' ...' if len(left) > 8 else ''}:"
            " put these into a group, or freeze them (requires_grad_(False))"
        )


# -- state -----------------------------------------------------------------------------------------


def state_of(optimizer: Optimizer, scheduler: LRScheduler | None, named: Named) -> State:
    """Everything that the two remember, by name; arrays are the live ones where torch allows."""
    state: State = {}
    names = {id(p): name for name, p in named.items()}
    for owner, values in optimizer.state.items():
        if not isinstance(owner, torch.Tensor):  # what an optimizer keeps beside the parameters
            _put(state, f"shared/{owner}", values)
            continue
        for key, value in values.items():
            _put_tree(state, f"state/{names[id(owner)]}/{key}", value, names)
    for key, value in _own_attributes(optimizer).items():
        _put_tree(state, f"own/{key}", value, names)
    for number, group in enumerate(optimizer.param_groups):
        options = {key: value for key, value in group.items() if key != "params"}
        _flatten(options, f"groups/{number}", state)
    if scheduler is not None:
        _flatten(scheduler.state_dict(), "scheduler", state)
    return state


def load_state(
    optimizer: Optimizer, scheduler: LRScheduler | None, named: Named, state: State
) -> None:
    """Take what ``state_of`` returned. Raise UsageError where it is not of an equal model."""
    left = dict(state)
    loaded = optimizer.state_dict()
    loaded["state"] = _parameter_state(optimizer, named, left) | _shared_state(left)
    own = _own_state(optimizer, named, left)
    loaded["param_groups"] = [
        _filled(group, f"groups/{number}", left)
        for number, group in enumerate(loaded["param_groups"])
    ]
    schedule = None if scheduler is None else _filled(scheduler.state_dict(), "scheduler", left)
    frozen = {name for name, p in named.items() if not p.requires_grad}
    left = {path: value for path, value in left.items() if _parameter_of(path) not in frozen}
    if left:
        raise UsageError(
            f"updater state has {sorted(left)[0]!r}, which this {type(optimizer).__name__} does"
            " not: it is not of an equal model"
        )
    optimizer.load_state_dict(loaded)
    vars(optimizer).update(own)
    if scheduler is not None and schedule is not None:
        scheduler.load_state_dict(schedule)


def _parameter_of(path: str) -> str | None:
    """Return the parameter that a path of a state belongs to, if any."""
    kind, _, rest = path.partition("/")
    return rest.rpartition("/")[0] if kind == "state" else None


def _parameter_state(optimizer: Optimizer, named: Named, left: State) -> dict[Any, Any]:
    names = {id(p): name for name, p in named.items()}
    order = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = {names[id(p)]: number for number, p in enumerate(order)}
    made: dict[Any, Any] = {}
    for path in [path for path in left if path.startswith("state/")]:
        name, _, key = path.removeprefix("state/").rpartition("/")
        if name in numbers:
            values = made.setdefault(numbers[name], {})
            _add_part(values, key, left.pop(path), named)
    return {number: _whole(values) for number, values in made.items()}


def _shared_state(left: State) -> dict[str, Any]:
    paths = [path for path in left if path.startswith("shared/")]
    return dict(_taken(path.removeprefix("shared/"), left.pop(path)) for path in paths)


def _own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return the attributes that a class of optimizers adds to those of torch's own.

    Torch leaves them out of ``state_dict`` unless the class overrides that.
    """
    return {
        key: value
        for key, value in vars(optimizer).items()
        if key not in TORCHS_ATTRIBUTES and not key.startswith(TORCHS_PREFIXES)
    }


def _own_state(optimizer: Optimizer, named: Named, left: State) -> dict[str, Any]:
    """Take attributes out of ``left``, each on the device of the parameters."""
    known, made = _own_attributes(optimizer), dict[str, Any]()
    for path in [path for path in left if path.startswith("own/")]:
        key = path.removeprefix("own/")
        if key.partition("~")[0].partition(":")[0] in known:
            _add_part(made, key, left.pop(path), named)
    device = next(iter(named.values())).device
    moved = {key: _moved(value, device) for key, value in _whole(made).items()}
    assert isinstance(moved, dict)
    return moved


def _moved(tree: Any, device: torch.device) -> Any:
    if isinstance(tree, dict):
        return {key: _moved(value, device) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_moved(value, device) for value in tree)
    return tree.to(device) if isinstance(tree, torch.Tensor) else tree


class _Parts(dict[str, Any]):
    """The parts of a container while it is put together: by ``l0``, ``sNAME``, ..."""


def _put_tree(state: State, path: str, value: Any, names: dict[int, str]) -> None:
    """Put numbers and tensors, and those in lists, tuples and dicts, however deep."""
    if isinstance(value, dict):
        for key, part in value.items():
            if isinstance(key, torch.Tensor):
                if id(key) in names:
                    _put_tree(state, f"{path}~p{names[id(key)]}", part, names)
            elif isinstance(key, str | int):
                _put_tree(state, f"{path}~{'s' if isinstance(key, str) else 'i'}{key}", part, names)
    elif isinstance(value, list | tuple):
        letter = "l" if isinstance(value, list) else "t"
        for number, part in enumerate(value):
            _put_tree(state, f"{path}~{letter}{number}", part, names)
    else:
        _put(state, path, value)


def _add_part(values: dict[Any, Any], path: str, value: Any, named: Named) -> None:
    """Put a value where its path says; containers are put together by ``_whole``."""
    *steps, last = path.split("~")
    last, value = _taken(last, value)
    for step in steps:
        values = values.setdefault(_key_of(step, named, values), _Parts())
    values[_key_of(last, named, values)] = value


def _key_of(step: str, named: Named, inside: dict[Any, Any]) -> Any:
    if not isinstance(inside, _Parts):
        return step
    letter, name = step[0], step[1:]
    return (letter, named[name] if letter == "p" else name)


def _whole(tree: Any) -> Any:
    """Return lists, tuples and dicts for the parts that were added."""
    if not isinstance(tree, dict):
        return tree
    values = {key: _whole(value) for key, value in tree.items()}
    if not isinstance(tree, _Parts):
        return values
    letters = {letter for letter, _ in values}
    if letters <= {"l"} or letters <= {"t"}:
        ordered = [values[key] for key in sorted(values, key=lambda key: int(key[1]))]
        return tuple(ordered) if letters == {"t"} else ordered
    return {int(key) if letter == "i" else key: v for (letter, key), v in values.items()}


def _put(state: State, path: str, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        if value.ndim == 0:
            state[f"{path}:{str(value.dtype).removeprefix('torch.')}"] = value.item()
        else:
            state[path] = value.numpy()
    elif isinstance(value, bool | int | float):
        state[path] = value


def _taken(key: str, value: Any) -> tuple[str, Any]:
    key, _, kind = key.partition(":")
    if kind:
        return key, torch.tensor(value, dtype=getattr(torch, kind))
    return key, torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) else value


def _flatten(tree: Any, path: str, state: State) -> None:
    """Numbers and tensors among dicts and lists; all else comes from the user's factories."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            _flatten(value, f"{path}/{key}", state)
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            _flatten(value, f"{path}/{number}", state)
    else:
        _put(state, path, tree)


def _filled(tree: Any, path: str, left: State) -> Any:
    """The same tree with the numbers that ``left`` has for it; they are taken out of it."""
    if isinstance(tree, dict):
        made = copy.copy(tree)
        for key, value in tree.items():
            made[key] = value if key == "params" else _filled(value, f"{path}/{key}", left)
        return made
    if isinstance(tree, list | tuple):
        return type(tree)(_filled(v, f"{path}/{n}", left) for n, v in enumerate(tree))
    for name in (path, *(f"{path}:{kind}" for kind in ("float32", "float64", "int64"))):
        if name in left:
            return _taken(name, left.pop(name))[1]
    return tree


NO_GRADIENT = (
    "no parameter of the module got a gradient: the loss is computed without them (detached, under"
    " torch.no_grad, or from another module); compute it from the output that it is given"
)
