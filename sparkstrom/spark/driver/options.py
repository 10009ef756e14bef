"""Option classes: frozen dataclasses that know which values the caller fixed.

The constructor's word beats ``spark.sparkstrom.*`` and the environment, also where it repeats a
default. So ``given`` records the names that were passed; ``settings`` fills only the others.
A name that DL4J has and we refuse, and one that nobody knows, end in a ``UsageError`` with a
sentence, not in Python's TypeError.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from sparkstrom.base import option_types
from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import shown

Options = TypeVar("Options")


def options(
    refused: Mapping[str, str],
    aliases: Mapping[str, str],
    *,
    owner: str = "",
) -> Callable[[type[Options]], type[Options]]:
    """Decorate a frozen dataclass that has a field ``given: frozenset[str]`` made without init.

    ``refused`` maps a DL4J name to the sentence why it means nothing here, ``aliases`` one to the
    field that does its work; ``owner`` is what users call, if not the class itself. Positional
    arguments count as given, too.
    """

    def decorate(cls: type[Options]) -> type[Options]:
        generated: Callable[..., None] = cls.__init__
        names = [field.name for field in fields(cls) if field.init]  # type: ignore[arg-type]

        @functools.wraps(generated)
        def init(self: Options, *args: Any, **keywords: Any) -> None:
            values = _translated(owner or cls.__name__, keywords, names, refused, aliases)
            object.__setattr__(self, "given", frozenset([*names[: len(args)], *values]))
            generated(self, *args, **values)

        cls.__init__ = init  # type: ignore[method-assign, assignment]
        return cls

    return decorate


def _translated(
    owner: str,
    keywords: Mapping[str, Any],
    names: list[str],
    refused: Mapping[str, str],
    aliases: Mapping[str, str],
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for keyword, value in keywords.items():
        name = aliases.get(keyword, keyword)
        if name not in names:
            raise UsageError(unknown(owner, keyword, names, refused, aliases))
        if name in values:
            raise UsageError(f"{owner}: {name} is given twice, once as {keyword}; keep one")
        values[name] = value
    return values


def unknown(
    owner: str,
    name: str,
    names: list[str],
    refused: Mapping[str, str],
    aliases: Mapping[str, str],
) -> str:
    """Say why ``owner`` has no option ``name``: DL4J's meaning nothing here, or a likely slip."""
    snake = snake_case(name)
    if snake in refused:
        return f"{owner} takes no {name}: {refused[snake]}"
    near = difflib.get_close_matches(snake, [*names, *aliases], n=1)
    hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(names)}"
    return f"{owner} knows no option {name}; {hint}"


def snake_case(name: str) -> str:
    """Of a name as DL4J writes it: evaluateROC is evaluate_roc."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()


def need(holds: bool, option: str, value: object, reason: str) -> None:
    """Raise UsageError naming the option, its value, and what it must be, unless ``holds``."""
    if not holds:
        raise UsageError(f"{option}={shown(value)}: {reason}")


def need_one_of(option: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise UsageError unless ``value`` is one of ``choices``."""
    option_types.one_of(choices)[option_types.KEY].read(option, value)


def need_whole(option: str, value: object, least: int, remedy: str = "") -> int:
    """Return ``value`` as an int. Raise UsageError unless it is whole and at least ``least``."""
    return int(option_types.whole(least, remedy=remedy)[option_types.KEY].read(option, value))


def need_seconds(option: str, value: object, remedy: str = "") -> float:
    """Return ``value``. Raise UsageError unless it is a finite number of seconds above 0."""
    return float(option_types.seconds(remedy, least=0.0)[option_types.KEY].read(option, value))


def need_flag(option: str, value: object) -> bool:
    """Return ``value`` as a bool. Raise UsageError unless it is True or False."""
    return bool(option_types.flag()[option_types.KEY].read(option, value))
