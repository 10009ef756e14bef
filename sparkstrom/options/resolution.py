"""Fill in missing options from Spark's configuration and the environment; save options as JSON.

A value given to the constructor takes precedence, then ``spark.sparkstrom.*``, then the
environment, then the default. An option has the same name everywhere: the keyword ``lease_s`` is
``spark.sparkstrom.lease_s`` and ``SPARKSTROM_LEASE_S``. Values are written as in Python, such as
``AdaptiveThreshold(1e-3)``, but words need no quotes, ``none`` means None and a port range is
written ``40123-40186``.

``to_json`` and ``from_json`` save and load the options of an estimator. They accept only the
classes in CLASSES. Of an option class, only the given options are saved, so that
``spark.sparkstrom.*`` fills in the others wherever the file is loaded.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import KEY, unquote
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
NESTED = "void"  # the option of SharedTrainingMaster whose value contains further options

Master = TypeVar("Master", bound=CommonOptions)
Options = TypeVar("Options", bound=CommonOptions | VoidConfiguration)


def resolve(master: Master, conf: Mapping[str, str], env: Mapping[str, str]) -> Master:
    """Return a copy of the options in which configuration and environment replace defaults.

    Options that the user gave stay as they are.

    Args:
        master: The options that the user passed.
        conf: Spark's configuration; keys that do not start with ``spark.sparkstrom.`` are ignored.
        env: The driver program's environment variables; those that name no option are ignored.

    Raises:
        UsageError: A key ``spark.sparkstrom.*`` names no option, a text is not a value of its
            option, or the resulting options are invalid.
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
    """Return the IP address to bind that the environment variables name, or None if none does.

    Raise UsageError if a variable in LOCAL_IP is not an address, or if they name different ones.
    """
    given = {variable: unquote(env.get(variable, "")) for variable in LOCAL_IP}
    named = {variable: address for variable, address in given.items() if address}
    for variable, address in named.items():
        try:
            ipaddress.ip_address(address)
        except ValueError:
            raise UsageError(
                f"{variable}={address!r} on {socket.gethostname()} is not an IP address; write one"
                " of this host, such as 10.0.0.5"
            ) from None
    if len(set(named.values())) > 1:
        said = " but ".join(f"{variable}={address}" for variable, address in named.items())
        raise UsageError(f"{said}; set one of them, or both to the same address")
    return next(iter(named.values()), None)


def _fill_options(options: Options, conf: Mapping[str, str], env: Mapping[str, str]) -> Options:
    """Return a copy in which configuration and environment replace options that were not given.

    This includes nested options.
    """
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
    """Convert an option's value to dictionaries, lists and scalars, for JSON.

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
    """Return the value that ``to_json`` has converted; lists become tuples.

    Raise UsageError for an unknown class, and the constructors' errors unchanged.
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
    """Return the names of the fields that were given to the constructor.

    If the class does not record these, return the names of all fields.
    """
    names = [field.name for field in fields(value) if field.init]
    known = getattr(value, "given", names)
    return [name for name in names if name in known]


def replace_options(master: Master, **changes: Any) -> Master:
    """Return a copy with ``changes``. Other options count as given only if they did before."""
    return type(master)(**{name: getattr(master, name) for name in given_fields(master)} | changes)
