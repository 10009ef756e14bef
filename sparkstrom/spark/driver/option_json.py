"""Option JSON: options as JSON and back, so that an estimator can be saved.

Only the classes listed here are made again; a file names none of its own. Of an option class that
knows which fields were given, only these are written, so that ``spark.sparkstrom.*`` fills the
others where it is loaded, as it would have done before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from sparkstrom.base.errors import UsageError
from sparkstrom.encoding.residuals import ResidualClipping
from sparkstrom.encoding.schedules import WarmUp
from sparkstrom.encoding.thresholds import ALGORITHMS
from sparkstrom.models.updaters import UPDATERS
from sparkstrom.observe.stopping import EarlyStopping
from sparkstrom.observe.termination import CONDITIONS
from sparkstrom.spark.driver.averaging_master import (
    ParameterAveragingTrainingMaster,
    TrainingMaster,
)
from sparkstrom.spark.driver.discovery import VoidConfiguration
from sparkstrom.spark.driver.training_master import SharedTrainingMaster

Master = TypeVar("Master", bound=TrainingMaster)

_OPTIONS: tuple[type[Any], ...] = (
    *ALGORITHMS,
    *CONDITIONS,
    *UPDATERS.values(),
    EarlyStopping,
    ParameterAveragingTrainingMaster,
    ResidualClipping,
    SharedTrainingMaster,
    VoidConfiguration,
    WarmUp,
)
CLASSES = {made.__name__: made for made in sorted(_OPTIONS, key=lambda made: made.__name__)}
KIND = "class"


def to_json(value: Any) -> Any:
    """A value as dictionaries, lists and plain scalars. Raise UsageError for another class."""
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
    return {KIND: type(value).__name__} | {
        name: to_json(getattr(value, name)) for name in given(value)
    }


def from_json(value: Any) -> Any:
    """What ``to_json`` was given; lists come back as tuples. Raise UsageError for another class."""
    if isinstance(value, list):
        return tuple(from_json(one) for one in value)
    if not isinstance(value, dict):
        return value
    made = {name: from_json(one) for name, one in value.items() if name != KIND}
    if KIND not in value:
        return made
    if value[KIND] not in CLASSES:
        raise UsageError(f"a saved value is of class {value[KIND]!r}, which is none of ours")
    return CLASSES[value[KIND]](**made)


def given(value: Any) -> list[str]:
    """The fields that the caller set, or all where the class does not know."""
    names = [field.name for field in fields(value) if field.init]
    known = getattr(value, "given", names)
    return [name for name in names if name in known]


def changed(master: Master, **changes: Any) -> Master:
    """A master with other values for some options; those that nobody gave stay open."""
    return type(master)(**{name: getattr(master, name) for name in given(master)} | changes)
