"""Where option values come from: constructor, then ``spark.sparkstrom.*``, environment, default.

One name everywhere: the keyword ``lease_s`` is ``spark.sparkstrom.lease_s`` and
``SPARKSTROM_LEASE_S``. Values are written as in Python, so thresholds read
``AdaptiveThreshold(1e-3)``; words need no quotes, ``none`` is None and a port range is
``40123-40186``. Pure functions: configuration and environment are passed in.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import Field, fields, replace
from typing import Any, TypeVar, overload

from sparkstrom.base.errors import UsageError
from sparkstrom.encoding.residuals import ResidualClipping
from sparkstrom.encoding.schedules import WarmUp
from sparkstrom.encoding.thresholds import ALGORITHMS, AUTO
from sparkstrom.models.updaters import UPDATERS as OUTER
from sparkstrom.spark.driver.averaging_master import ParameterAveragingTrainingMaster
from sparkstrom.spark.driver.discovery import REFUSED as VOID_REFUSED
from sparkstrom.spark.driver.discovery import VoidConfiguration
from sparkstrom.spark.driver.options import unknown
from sparkstrom.spark.driver.training_master import ALIASES, REFUSED, SharedTrainingMaster

PREFIX = "spark.sparkstrom."
ENVIRONMENT_PREFIX = "SPARKSTROM_"
LOCAL_IP = ("SPARKSTROM_LOCAL_IP", "DL4J_VOID_IP")  # the second is DL4J's name for it

_CALLABLE: dict[str, Callable[..., object]] = {
    made.__name__: made for made in (*ALGORITHMS, ResidualClipping, WarmUp)
}
OUTER_STEPS: dict[str, Callable[..., object]] = {made.__name__: made for made in OUTER.values()}
CALLED = {  # options whose values are written like calls, and of what
    **dict.fromkeys(("threshold", "residual_post_processor", "warm_up"), _CALLABLE),
    "outer": OUTER_STEPS,
}
EXAMPLES = ("AdaptiveThreshold(1e-3)", "Nesterov(0.7, 0.9)")

OWNERS = (SharedTrainingMaster, ParameterAveragingTrainingMaster, VoidConfiguration)

Options = TypeVar(
    "Options", SharedTrainingMaster, ParameterAveragingTrainingMaster, VoidConfiguration
)


@overload
def resolve(
    master: SharedTrainingMaster, conf: Mapping[str, str], env: Mapping[str, str]
) -> SharedTrainingMaster: ...
@overload
def resolve(
    master: SharedTrainingMaster | ParameterAveragingTrainingMaster,
    conf: Mapping[str, str],
    env: Mapping[str, str],
) -> SharedTrainingMaster | ParameterAveragingTrainingMaster: ...
def resolve(
    master: SharedTrainingMaster | ParameterAveragingTrainingMaster,
    conf: Mapping[str, str],
    env: Mapping[str, str],
) -> SharedTrainingMaster | ParameterAveragingTrainingMaster:
    """Fill what the constructors left open; the result passes through every check again.

    conf  Spark's configuration; keys under ``spark.sparkstrom.`` are read, others ignored
    env   the driver's environment

    Raises UsageError for a key that no option has and for a value that an option refuses.
    """
    _refuse_unknown(conf)
    if isinstance(master, ParameterAveragingTrainingMaster):
        return _filled(master, conf, env)
    return replace(_filled(master, conf, env), void=_filled(master.void, conf, env))


def local_ip(env: Mapping[str, str]) -> str | None:
    """The address that this process is told to bind by its own environment, if any.

    Raises UsageError where DL4J's variable and ours name different addresses.
    """
    named = {variable: env[variable] for variable in LOCAL_IP if env.get(variable)}
    if len(set(named.values())) > 1:
        said = " but ".join(f"{variable}={address}" for variable, address in named.items())
        raise UsageError(f"{said}; set one of them, or both to the same address")
    return next(iter(named.values()), None)


def _filled(options: Options, conf: Mapping[str, str], env: Mapping[str, str]) -> Options:
    values: dict[str, Any] = {}
    for option in _settable(type(options)):
        if option.name in options.given:
            continue
        for source, key in (
            (conf, PREFIX + option.name),
            (env, ENVIRONMENT_PREFIX + option.name.upper()),
        ):
            if key in source:
                values[option.name] = _parsed(option, key, source[key])
                break
    return replace(options, **values)


def _settable(cls: type[Any]) -> list[Field[Any]]:
    return [option for option in fields(cls) if option.init and option.name != "void"]


def _refuse_unknown(conf: Mapping[str, str]) -> None:
    names = [option.name for cls in OWNERS for option in _settable(cls)]
    for key in conf:
        name = key.removeprefix(PREFIX)
        if key.startswith(PREFIX) and name not in names:
            refused = {**REFUSED, **VOID_REFUSED}
            raise UsageError(unknown("Spark's configuration", name, names, refused, ALIASES))


def _parsed(option: Field[Any], key: str, text: str) -> object:
    """The value that ``text`` stands for; whether it suits is the dataclass's to say."""
    word = text.strip()
    if word.lower() in _WORDS:
        return _WORDS[word.lower()]
    if option.name == "threshold" and word.lower() == AUTO:
        return AUTO
    if option.name == "port_range":
        return _port_range(key, word)
    if option.type in ("int | str", "int | str | None") and word == AUTO:
        return word
    if option.type in ("int", "int | None", "int | str", "int | str | None", "float"):
        return _number(key, word)
    if option.name == "layer_multipliers":
        return _literal(key, word)
    if option.name in CALLED:
        return _called(key, word, CALLED[option.name])
    return word


_WORDS: dict[str, object] = {"none": None, "true": True, "false": False}


def _number(key: str, word: str) -> int | float:
    try:
        return int(word)
    except ValueError:
        try:
            return float(word)
        except ValueError:
            raise UsageError(f"{key}={word!r}: is not a number") from None


def _port_range(key: str, word: str) -> tuple[int, int]:
    first, dash, last = word.partition("-")
    if not (dash and first.strip().isdecimal() and last.strip().isdecimal()):
        raise UsageError(f"{key}={word!r}: is not a range of ports; write 40123-40186")
    return int(first), int(last)


def _literal(key: str, word: str) -> object:
    try:
        return ast.literal_eval(word)
    except (SyntaxError, ValueError):
        raise UsageError(f"{key}={word!r}: must be written like {{'layer 1': 2}}") from None


def _called(key: str, word: str, known: Mapping[str, Callable[..., object]]) -> object:
    """``Name(1e-3, decay=0.9)`` with a name of ours and literals: nothing else is evaluated."""
    try:
        call = ast.parse(word, mode="eval").body
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
            raise ValueError("no call")
        made = known[call.func.id]
        arguments = [ast.literal_eval(argument) for argument in call.args]
        keywords = {str(kw.arg): ast.literal_eval(kw.value) for kw in call.keywords}
    except (SyntaxError, ValueError, KeyError):
        names, example = ", ".join(known), EXAMPLES[known is OUTER_STEPS]
        raise UsageError(
            f"{key}={word!r}: must be one of {names}, with numbers, like {example}"
            + (f"; or {AUTO}" if key.lower().endswith("threshold") else "")
        ) from None
    try:
        return made(*arguments, **keywords)
    except TypeError as error:
        raise UsageError(f"{key}={word!r}: {error}") from None
