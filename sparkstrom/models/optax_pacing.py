"""Optax's transformations where several workers train: the same functions with other decays.

A transformation is a closure, and keeps its hyperparameters nowhere else. So it is made again, with
the same code and other cells; what ``optax.inject_hyperparams`` makes in each step, too. Schedules
are evaluated at a count in the optimizer's state, which is set to where the fit is.
"""

from __future__ import annotations

import copy
import functools
from types import CellType, FunctionType, MethodType
from typing import Any

import jax
import jax.numpy as jnp
import optax

from sparkstrom.models.horizons import OPTAX, OPTAX_EVERYWHERE, UNSEEN, changed, raised

FACTORY = "inner_factory"  # of inject_hyperparams: makes the transformation anew in each step
NUMBERS = "numeric_hps"  # of inject_hyperparams: the user's own values
INJECTED = (OPTAX_EVERYWHERE, "momentum")
SCHEDULES = ("ScaleByScheduleState", "WrappedScheduleState")
BY_FIT = "steps by the fit's minibatches"


class Remade:
    """Values made again, with hyperparameters that count steps raised to the power of workers."""

    def __init__(self, workers: Any) -> None:
        self._workers = workers
        self.found: list[tuple[str, Any]] = []  # names and the user's own values
        self.unseen: set[str] = set()  # kinds of callables that hide what they keep
        self._made: dict[int, tuple[Any, Any]] = {}  # by id: what it was, what it became

    def of(self, value: Any) -> Any:
        """The same value where nothing in it counts steps."""
        if id(value) not in self._made:
            self._made[id(value)] = value, value
            self._made[id(value)] = value, self._again(value)
        return self._made[id(value)][1]

    def _again(self, value: Any) -> Any:
        if isinstance(value, FunctionType):
            return self._function(value) if value.__closure__ else value
        if isinstance(value, MethodType):
            return getattr(self.of(value.__self__), value.__name__)
        if isinstance(value, functools.partial):
            return functools.partial(self.of(value.func), *value.args, **value.keywords)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self.of, value))
        if isinstance(value, tuple | list):
            return type(value)(map(self.of, value))
        if isinstance(value, dict):
            return type(value)((key, self.of(v)) for key, v in value.items())
        if isinstance(value, optax.MultiSteps):
            again = copy.copy(value)
            again.__dict__.update({name: self.of(v) for name, v in vars(value).items()})
            return again
        if callable(value) and not isinstance(value, type):
            self.unseen.add(type(value).__name__)
        return value

    def _function(self, function: FunctionType) -> FunctionType:
        assert function.__closure__ is not None
        cells = tuple(CellType() for _ in function.__closure__)
        made = FunctionType(
            function.__code__,
            function.__globals__,
            function.__name__,
            function.__defaults__,
            cells,
        )
        made.__kwdefaults__ = function.__kwdefaults__
        made.__qualname__, made.__module__ = function.__qualname__, function.__module__
        self._made[id(function)] = function, made  # it may be in a cell of its own
        for name, old, new in zip(
            function.__code__.co_freevars, function.__closure__, cells, strict=True
        ):
            new.cell_contents = self._cell(function, name, old.cell_contents)
        return made

    def _cell(self, function: FunctionType, name: str, value: Any) -> Any:
        maker = function.__qualname__.partition(".")[0]
        if not function.__module__.startswith("optax"):
            return self.of(value)
        if maker == "inject_hyperparams" and name == FACTORY:
            return lambda *given, **named: Remade(self._workers).of(value(*given, **named))
        if maker == "inject_hyperparams" and name == NUMBERS:  # raised in each step, see above
            self.found += [(key, value[key]) for key in INJECTED if value.get(key)]
        follows = name in (OPTAX_EVERYWHERE, OPTAX.get(maker))
        if not follows or value is None or (isinstance(value, float | int) and not value):
            return self.of(value)
        self.found.append((name, value))
        return raised(value, self._workers)


def paced(optimizer: Any, workers: Any) -> Any:
    """The transformation where so many train."""
    return Remade(workers).of(optimizer)


def at_position(state: Any, minibatches: Any) -> Any:
    """The optimizer's state with every schedule at least there."""

    def reached(part: Any) -> Any:
        if type(part).__name__ not in SCHEDULES:
            return part
        return part._replace(count=jnp.maximum(part.count, minibatches))

    return jax.tree_util.tree_map(
        reached, state, is_leaf=lambda part: type(part).__name__ in SCHEDULES
    )


def told(optimizer: Any, state: Any, workers: int) -> dict[str, str]:
    """What is changed where so many train, for people; ``state`` may be shapes alone."""
    remade = Remade(workers)
    remade.of(optimizer)
    what: dict[str, str] = {}

    def look(part: Any) -> Any:
        if type(part).__name__ in SCHEDULES:
            what["scheduler"] = BY_FIT
        return part

    jax.tree_util.tree_map(look, state, is_leaf=lambda part: type(part).__name__ in SCHEDULES)
    for name, value in remade.found:
        text = changed(value, workers)
        what[name] = text if what.get(name, text) == text else f"{what[name]}; {text}"
    return what | ({UNSEEN: ", ".join(sorted(remade.unseen))} if remade.unseen else {})


def no_optimizer(given: Any) -> str:
    """What to write where something else than an optimizer of optax is passed."""
    if isinstance(given, functools.partial):
        options = [*map(repr, given.args), *(f"{k}={v!r}" for k, v in given.keywords.items())]
        line = f"optax.{given.func.__name__}({', '.join(options)})"
        return f"optimizer={line} is what to pass, not a functools.partial that makes one"
    if callable(given):
        line = f"optax.{getattr(given, '__name__', type(given).__name__)}(1e-3)"
        return f"optimizer={line} is what to pass, not the function that makes one: call it"
    return f"optimizer is a {type(given).__name__}: pass optax's own, such as optax.adam(1e-3)"
