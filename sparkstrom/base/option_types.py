"""Option types: each option's type, range and unit, declared once and checked in one place.

A dataclass declares an option by its field's metadata and checks all of them at once:

    @dataclass(frozen=True)
    class Example:
        workers: int = field(default=2, metadata=whole(1, unit="processes"))

        def __post_init__(self) -> None:
            check_options(self)

Other callers check one value by ``read``. NumPy's scalars become Python's, and paths become
strings; arrays, True in place of 1, NaN and infinities are refused.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, TypeGuard

from sparkstrom.base.errors import UsageError

KEY = "option"  # of a field's metadata
SHOWN_MAX = 100  # characters of a value in a message
INT_MAX = 2**63 - 1  # the largest of NumPy's int64
BYTES_MAX = 2**50  # 1 PiB
SECONDS_MIN = 1e-3  # no system keeps shorter deadlines
SECONDS_MAX = 10**9  # about 30 years; timeouts of the C library end before 10^10
COUNT_MAX = 10**9  # of epochs, minibatches, publications
FLOAT_MAX = 3.4028234663852886e38  # the largest float32
FLOAT_MIN = 1.1754943508222875e-38  # the smallest float32 of full precision

Metadata = Mapping[str, "OptionType"]


class Refused(ValueError):
    """A value is not what an option takes; the text says what it must be."""


@dataclass(frozen=True, slots=True)
class OptionType:
    """What one option takes."""

    convert: Callable[[Any], Any]  # returns the value as Python's own type, or raises Refused
    wanted: str  # in words, as in "must be ..."
    unit: str = ""
    words: tuple[str | None, ...] = ()  # taken as they are: None, "auto"

    def read(self, name: str, value: object, owner: str = "") -> Any:
        """Return the value as Python's own type. Raise UsageError naming ``name`` and ``value``."""
        if value is None and None in self.words:
            return None
        if isinstance(value, str) and value in self.words:
            return str(value)
        try:
            return self.convert(value)
        except Refused as refused:
            said = f"{owner}: {name}" if owner else name
            raise UsageError(f"{said}={shown(value)}: {refused}") from None


def check_options(options: Any, owner: str = "") -> None:
    """Check every declared field of a dataclass, and keep each value as Python's own type.

    Raises UsageError for the first field that cannot work; ``owner`` then stands before its name.
    """
    for declared in fields(options):
        kind: OptionType | None = declared.metadata.get(KEY)
        if kind is not None:
            value = getattr(options, declared.name)
            read = kind.read(declared.name, value, owner)
            if read is not value:
                object.__setattr__(options, declared.name, read)


def shown(value: object) -> str:
    """Return a value for one line of a message: bounded, and never an error of its own."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and shape:
        return f"<{type(value).__name__} of shape {shape}>"
    try:
        text = repr(value)
    except Exception:  # such as an int of more digits than Python prints
        return f"<{type(value).__name__}>"
    return text if len(text) <= SHOWN_MAX else f"{text[: SHOWN_MAX - 3]}..."


def whole(
    least: int,
    most: int = INT_MAX,
    *,
    unit: str = "",
    remedy: str = "",
    words: tuple[str | None, ...] = (),
) -> Metadata:
    """Declare a whole number from ``least`` to ``most``; ``remedy`` ends the message."""
    wanted = f"must be a whole number of at least {least}{remedy}"

    def convert(value: Any) -> int:
        plain = int(value) if is_whole(value) else None
        if plain is None or plain < least:
            raise Refused(wanted)
        if plain > most:
            raise Refused(f"must be at most {most}{remedy}")
        return plain

    return {KEY: OptionType(convert, wanted, unit, words)}


def number(
    *,
    above: float | None = None,
    least: float | None = None,
    below: float | None = None,
    most: float = FLOAT_MAX,
    unit: str = "",
    remedy: str = "",
    words: tuple[str | None, ...] = (),
) -> Metadata:
    """Declare a finite number between the limits that are given; ``remedy`` ends the message."""
    limits = [f"above {above:g}"] if above is not None else []
    limits += [f"of at least {least:g}"] if least is not None else []
    limits += [f"below {below:g}"] if below is not None else []
    limits += [f"of at most {most:g}"] if most != FLOAT_MAX else []
    wanted = " ".join(["must be a finite number", " and ".join(limits)]).rstrip() + remedy

    def convert(value: Any) -> float:
        plain = as_float(value)
        fits = math.isfinite(plain) and abs(plain) <= FLOAT_MAX and plain <= most
        fits = fits and (above is None or plain > above) and (least is None or plain >= least)
        if not fits or not (below is None or plain < below):
            raise Refused(wanted)
        return int(value) if is_whole(value) else plain

    return {KEY: OptionType(convert, wanted, unit, words)}


def seconds(remedy: str = "", least: float = SECONDS_MIN) -> Metadata:
    """Declare a number of seconds above 0, and of at least ``least``."""
    wanted = f"must be a number of seconds above 0{remedy}"

    def convert(value: Any) -> float:
        plain = as_float(value)
        if not plain > 0 or plain == math.inf:
            raise Refused(wanted)
        if plain > SECONDS_MAX:
            raise Refused(f"must be at most {SECONDS_MAX} seconds{remedy}")
        if plain < least:
            raise Refused(f"must be at least {least} seconds{remedy}")
        return int(value) if is_whole(value) else plain

    return {KEY: OptionType(convert, wanted, "s")}


def flag(words: tuple[str | None, ...] = ()) -> Metadata:
    """Declare True or False."""
    *others, last = ["True", "False", *map(repr, words)]
    wanted = f"must be {', '.join(others)} or {last}"

    def convert(value: Any) -> bool:
        if not is_truth(value):
            raise Refused(wanted)
        return bool(value)

    return {KEY: OptionType(convert, wanted, "", words)}


def one_of(choices: tuple[str, ...], words: tuple[str | None, ...] = ()) -> Metadata:
    """Declare one of several words."""
    known = ", ".join(choices)
    wanted = f"must be {'None or ' if None in words else ''}one of {known}"

    def convert(value: Any) -> str:
        if not (isinstance(value, str) and value in choices):
            raise Refused(wanted)
        return str(value)

    return {KEY: OptionType(convert, wanted, "", words)}


def member(kind: type[enum.Enum]) -> Metadata:
    """Declare a member of an enumeration, or its name in either case."""
    known = ", ".join(repr(each.value) for each in kind)
    wanted = f"must be one of {known}"

    def convert(value: Any) -> enum.Enum:
        if isinstance(value, kind):
            return value
        for each in kind:
            if isinstance(value, str) and value.lower() == str(each.value).lower():
                return each
        raise Refused(wanted)

    return {KEY: OptionType(convert, wanted)}


def text(wanted: str, words: tuple[str | None, ...] = ()) -> Metadata:
    """Declare text that is not empty."""

    def convert(value: Any) -> str:
        if not (isinstance(value, str) and value.strip() and "\0" not in value):
            raise Refused(wanted)
        return str(value)

    return {KEY: OptionType(convert, wanted, "", words)}


def path(
    wanted: str = "must be None, a path or a URL", words: tuple[str | None, ...] = (None,)
) -> Metadata:
    """Declare a path as a string or Path object, which becomes a string; or one of ``words``."""

    def convert(value: Any) -> str:
        if hasattr(type(value), "__fspath__"):
            value = value.__fspath__()
        if not (isinstance(value, str) and value and "\0" not in value):
            raise Refused(wanted)
        return str(value)

    return {KEY: OptionType(convert, wanted, "", words)}


def path_given(value: object) -> str:
    """Return the path that a method was given. Raise UsageError for what is none."""
    kind = path("must be a path, as a string or a Path object", words=())[KEY]
    return str(kind.read("path", value))


def instance(
    kinds: tuple[type[Any], ...], wanted: str, words: tuple[str | None, ...] = ()
) -> Metadata:
    """Declare an object of these classes; a class in place of an object is refused."""

    def convert(value: Any) -> Any:
        if isinstance(value, type):
            raise Refused(f"{wanted}; this is a class: call it, as in {value.__name__}(...)")
        if not isinstance(value, kinds):
            raise Refused(wanted)
        return value

    return {KEY: OptionType(convert, wanted, "", words)}


def custom(convert: Callable[[Any], Any], wanted: str, unit: str = "") -> Metadata:
    """Declare what ``convert`` takes; it returns the value to keep, or raises Refused."""
    return {KEY: OptionType(convert, wanted, unit)}


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether a value is a whole number, Python's or NumPy's; True is none."""
    return isinstance(value, Integral) and not is_truth(value)


def is_real(value: object) -> TypeGuard[float]:
    """Return whether a value is a real number, Python's or NumPy's; True is none."""
    return isinstance(value, Real) and not is_truth(value)


def as_float(value: object) -> float:
    """Return a real number as a float, infinite where it is too large; NaN for what is none."""
    if not is_real(value):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def is_truth(value: object) -> bool:
    """Return whether a value is True or False, Python's or NumPy's."""
    kind = type(value)  # by name: protocol modules import this one, and do without NumPy
    is_numpys = kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_")
    return isinstance(value, bool) or is_numpys
