"""Fill in missing options from Spark's configuration and the environment.

A value given to the constructor comes first, then ``spark.sparkstrom.*``, then the environment,
then the default. An option has one name everywhere: the keyword ``lease_s`` is
``spark.sparkstrom.lease_s`` and ``SPARKSTROM_LEASE_S``. Values are written as in Python, such as
``AdaptiveThreshold(1e-3)``, but words need no quotes, ``none`` is None and a port range is
``40123-40186``.

``to_json`` and ``from_json`` save the options of an estimator. They accept only the classes in
CLASSES. Of an option class, only the given options are written, so ``spark.sparkstrom.*`` fills
in the others wherever the file is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import KEY
from sparkstrom.encoding.residual import ResidualClipping
from sparkstrom.encoding.tau import WarmUp
from sparkstrom.encoding.thresholds import ALGORITHMS
from sparkstrom.models.updaters import UPDATERS
from sparkstrom.observe.early_stopping import TERMINATION_CONDITIONS, EarlyStopping
from sparkstrom.options.common import CommonOptions, options_in, unknown_option_message
from sparkstrom.options.gradient_sharing import ALIASES, REFUSED, SharedTrainingMaster
from sparkstrom.options.network import REFUSED as VOID_REFUSED
from sparkstrom.options.network import VoidConfiguration
from sparkstrom.options.parameter_averaging import ParameterAveragingTrainingMaster

PREFIX = "spark.sparkstrom."
ENVIRONMENT_PREFIX = "SPARKSTROM_"
LOCAL_IP = ("SPARKSTROM_LOCAL_IP", "DL4J_VOID_IP")  # the second is DL4J's name for it

OPTION_CLASSES = (SharedTrainingMaster, ParameterAveragingTrainingMaster, VoidConfiguration)
NESTED = "void"  # the option of SharedTrainingMaster whose value has options of its own

Master = TypeVar("Master", bound=CommonOptions)
Options = TypeVar("Options", bound=CommonOptions | VoidConfiguration)


def resolve(master: Master, conf: Mapping[str, str], env: Mapping[str, str]) -> Master:
    """Return the options with those that were not given read from configuration and environment.

    Args:
        master: The options that the user passed.
        conf: Spark's configuration; keys that do not start with ``spark.sparkstrom.`` are ignored.
        env: The driver's environment.

    Raises:
        UsageError: An unknown key, or an invalid value: the result is checked as a whole.
    """
    names = [each.name for cls in OPTION_CLASSES for each in options_in(cls) if each.name != NESTED]
    for key in conf:
        name = key.removeprefix(PREFIX)
        if key.startswith(PREFIX) and name not in names:
            refused = {**REFUSED, **VOID_REFUSED}
            owner = "Spark's configuration"
            raise UsageError(unknown_option_message(owner, name, names, refused, ALIASES))
    return _fill_options(master, conf, env)


def local_ip(env: Mapping[str, str]) -> str | None:
    """Return the address that the environment tells this process to bind, if any.

    Raise UsageError if DL4J's variable and ours name different addresses.
    """
    named = {variable: env[variable] for variable in LOCAL_IP if env.get(variable)}
    if len(set(named.values())) > 1:
        said = " but ".join(f"{variable}={address}" for variable, address in named.items())
        raise UsageError(f"{said}; set one of them, or both to the same address")
    return next(iter(named.values()), None)


def _fill_options(options: Options, conf: Mapping[str, str], env: Mapping[str, str]) -> Options:
    """Return a copy with all options, also nested ones, that were not given filled in."""
    values: dict[str, Any] = {}
    for option in options_in(options):
        if option.name == NESTED:
            values[NESTED] = _fill_options(getattr(options, NESTED), conf, env)
            continue
        key, variable = PREFIX + option.name, ENVIRONMENT_PREFIX + option.name.upper()
        kind = option.metadata[KEY]
        if option.name in options.given:
            continue
        if key in conf:
            values[option.name] = kind.from_text(key, conf[key])
        elif variable in env:
            values[option.name] = kind.from_text(variable, env[variable])
    return replace(options, **values)


_OPTIONS: tuple[type[Any], ...] = (
    *ALGORITHMS,
    *TERMINATION_CONDITIONS,
    *UPDATERS.values(),
    EarlyStopping,
    ParameterAveragingTrainingMaster,
    ResidualClipping,
    SharedTrainingMaster,
    VoidConfiguration,
    WarmUp,
)
CLASSES = {made.__name__: made for made in sorted(_OPTIONS, key=lambda made: made.__name__)}
CLASS_KEY = "class"


def to_json(value: Any) -> Any:
    """Convert options to dictionaries, lists and scalars, for JSON.

    Raise UsageError for a value of a class that cannot be saved.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [to_json(one) for one in value]
    if isinstance(value, Mapping):
        return {str(name): to_json(one) for name, one in value.items()}
    if CLASSES.get(type(value).__name__) is not type(value):
        raise UsageError(
            f"{value!r} cannot be saved: it is none of {', '.join(CLASSES)}; leave it out, and set "
            "it again after loading"
        )
    return {CLASS_KEY: type(value).__name__} | {
        name: to_json(getattr(value, name)) for name in given_fields(value)
    }


def from_json(value: Any) -> Any:
    """Return the value that ``to_json`` converted; lists become tuples.

    Raise UsageError for an unknown class.
    """
    if isinstance(value, list):
        return tuple(from_json(one) for one in value)
    if not isinstance(value, dict):
        return value
    made = {name: from_json(one) for name, one in value.items() if name != CLASS_KEY}
    if CLASS_KEY not in value:
        return made
    if value[CLASS_KEY] not in CLASSES:
        raise UsageError(f"a saved value is of class {value[CLASS_KEY]!r}, which is none of ours")
    return CLASSES[value[CLASS_KEY]](**made)


def given_fields(value: Any) -> list[str]:
    """Return the names of the fields that were given; all fields if the class records none."""
    names = [field.name for field in fields(value) if field.init]
    known = getattr(value, "given", names)
    return [name for name in names if name in known]


def replace_options(master: Master, **changes: Any) -> Master:
    """Return a copy with changed options; options that were not given remain not given."""
    return type(master)(**{name: getattr(master, name) for name in given_fields(master)} | changes)
