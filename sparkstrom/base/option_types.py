"""Declare options with their type, range and unit, and check option values.

A dataclass declares each option in its field's metadata and checks all options at once:

    @dataclass(frozen=True)
    class Example:
        workers: int = field(default=2, metadata=whole(1, unit="processes"))

        def __post_init__(self) -> None:
            check_options(self)

Other callers check a single value with ``OptionType.read``. NumPy scalars are converted to Python
numbers and paths to strings. Arrays, True in place of 1, NaN and infinities are rejected.

``whole`` and the other functions that return a field's metadata have these arguments in common:

    wanted    description of valid values in errors, such as "must be a path"
    accepts   description of valid values in the documentation; "": derived from ``wanted``
    words     values that are valid besides those of the type, such as None or "auto"
    unit      what a number counts, such as "rows"; "": nothing
    remedy    end of error messages
    parse     converts the text form of a value; raises UsageError
"""

from __future__ import annotations

import ast
import enum
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Any, TypeGuard

from sparkstrom.base.errors import UsageError

KEY = "option"  # key in a field's metadata
SHOWN_MAX = 100  # most characters of a value in a message
INT_MAX = 2**63 - 1  # the largest of NumPy's int64
BYTES_MAX = 2**50  # 1 PiB
SECONDS_MIN = 1e-3  # no system can keep shorter deadlines
SECONDS_MAX = 10**9  # about 30 years; timeouts of the C library end before 10^10
COUNT_MAX = 10**9  # most epochs, minibatches or publications
FLOAT_MAX = 3.4028234663852886e38  # the largest float32
FLOAT_MIN = 1.1754943508222875e-38  # the smallest float32 of full precision

# What Path makes of a URL, such as s3:/bucket. Hadoop's hdfs:/runs is not a local path, either.
URL_AS_PATH = re.compile(r"(?!file:)[A-Za-z][\w+.-]+:/(?!/)")
_ONE_SLASH = (
    "would be a local path; write a URL as a string with two slashes, such as s3://bucket/run or"
    " hdfs:///run (Path keeps one of them)"
)

Metadata = Mapping[str, "OptionType"]  # of a dataclass field: {KEY: the option's type}


class Refused(ValueError):
    """A value is not valid for an option; the message describes valid values."""


def parse_word(key: str, word: str) -> object:
    """Return ``word`` unchanged. This is the parser of options that take strings."""
    return word


def parse_number(key: str, word: str) -> int | float:
    """Parse ``word`` as an int or float. Raise UsageError naming ``key`` if it is not a number."""
    try:
        return int(word)
    except ValueError:
        try:
            return float(word)
        except ValueError:
            raise UsageError(f"{key}={word!r}: is not a number") from None


Parser = Callable[[str, str], object]  # (key, word) -> value; raises UsageError naming the key


def call_parser(
    classes: Mapping[str, Callable[..., object]], example: str, hint: str = ""
) -> Parser:
    """Return a parser for text such as ``Name(1e-3, decay=0.9)``, with literal arguments only.

    Args:
        classes: The classes that the text may name, by name.
        example: A valid text, shown in error messages.
        hint: The end of the error message, such as "; or auto".
    """

    def parse(key: str, word: str) -> object:
        try:
            call = ast.parse(word, mode="eval").body
            if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
                raise ValueError("not a call")
            made = classes[call.func.id]
            arguments = [ast.literal_eval(argument) for argument in call.args]
            keywords = {str(kw.arg): ast.literal_eval(kw.value) for kw in call.keywords}
        except (SyntaxError, ValueError, KeyError):
            raise UsageError(
                f"{key}={word!r}: must be one of {', '.join(classes)}, with numbers, like"
                f" {example}{hint}"
            ) from None
        try:
            return made(*arguments, **keywords)
        except TypeError as error:
            raise UsageError(f"{key}={word!r}: {error}") from None

    return parse


@dataclass(frozen=True, slots=True)
class OptionType:
    """The type, range, unit and text form of one option, and the function that checks its value."""

    convert: Callable[[Any], Any]  # returns the value as a plain Python type, or raises Refused
    wanted: str  # description of valid values, such as "must be ..."
    unit: str = ""  # what a number counts, such as "rows"; "" if nothing
    words: tuple[str | None, ...] = ()  # values accepted as they are, such as None or "auto"
    parse: Parser = parse_word  # parses text other than ``words``, none, true and false
    accepts: str = ""  # valid values, for the documentation; "": derived from ``wanted``

    @property
    def values(self) -> str:
        """The valid values as a phrase, such as "a whole number of rows from 1 to 100, or None"."""
        return self.accepts or self.wanted.removeprefix("must be ")

    def read(self, name: str, value: object, owner: str = "") -> Any:
        """Check ``value`` and return it as a plain Python type.

        Raises UsageError that names the option (``owner``, if given, and ``name``) and the value.
        """
        if value is None and None in self.words:
            return None
        if isinstance(value, str) and value in self.words:
            return str(value)
        try:
            return self.convert(value)
        except Refused as refused:
            said = f"{owner}: {name}" if owner else name
            raise UsageError(f"{said}={shown(value)}: {refused}") from None

    def from_text(self, key: str, text: str) -> object:
        """Parse the text form of a value and return the value, unchecked; pass it to ``read``.

        Quotes around the text are removed: files such as spark-defaults.conf and those of docker's
        ``--env-file`` keep them. Raises UsageError that names ``key``, the configuration key or
        environment variable.
        """
        word = unquote(text)
        if word.lower() in _CONSTANTS:
            return _CONSTANTS[word.lower()]
        return word if word in self.words else self.parse(key, word)


def unquote(text: str) -> str:
    """Return the text without spaces, and without one pair of quotes, around it."""
    word = text.strip()
    if len(word) > 1 and word[0] == word[-1] and word[0] in "\"'" and word[0] not in word[1:-1]:
        return word[1:-1].strip()
    return word


_CONSTANTS: dict[str, object] = {"none": None, "true": True, "false": False}


def check_options(options: Any, owner: str = "") -> None:
    """Check every declared option of a dataclass instance, and store each as a plain Python type.

    Raises UsageError for the first invalid field; the message starts with ``owner`` if given.
    """
    for declared in fields(options):
        kind: OptionType | None = declared.metadata.get(KEY)
        if kind is not None:
            value = getattr(options, declared.name)
            read = kind.read(declared.name, value, owner)
            if read is not value:
                object.__setattr__(options, declared.name, read)


def shown(value: object) -> str:
    """Return ``repr(value)`` for a message, cut to ``SHOWN_MAX`` characters. Never raises."""
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple) and shape:
        return f"<{type(value).__name__} of shape {shape}>"
    try:
        text = repr(value)
    except Exception:  # such as an int with more digits than Python prints
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
    """Return metadata of an option that takes an integer from ``least`` to ``most``.

    ``words`` are further valid values, such as None. Error messages end with ``remedy``.
    """
    wanted = f"must be a whole number of at least {least}{remedy}"

    def convert(value: Any) -> int:
        plain = int(value) if is_whole(value) else None
        if plain is None or plain < least:
            raise Refused(wanted)
        if plain > most:
            raise Refused(f"must be at most {most}{remedy}")
        return plain

    last = "" if most == INT_MAX else f" to {_format_limit(most, unit)}"
    least_shown = _format_limit(least, unit)
    span = f"from {least_shown}{last}" if last else f"of at least {least_shown}"
    kind = f"a whole number{f' of {unit}' if unit else ''} {span}"
    return {KEY: OptionType(convert, wanted, unit, words, parse_number, _with_words(kind, words))}


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
    """Return metadata of an option that takes a real number within these limits.

    A value may equal ``least`` and ``most``, but not ``above`` and ``below``. ``words`` are further
    valid values, such as None. Error messages end with ``remedy``.
    """
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

    kind = " ".join(["a finite number", " and ".join(limits)]).rstrip()
    return {KEY: OptionType(convert, wanted, unit, words, parse_number, _with_words(kind, words))}


def seconds(remedy: str = "", least: float = SECONDS_MIN) -> Metadata:
    """Return metadata of an option for a time from ``least`` to SECONDS_MAX seconds, above 0.

    Error messages end with ``remedy``.
    """
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

    kind = f"a number of seconds from {max(least, SECONDS_MIN):g} to {SECONDS_MAX:,}"
    return {KEY: OptionType(convert, wanted, "s", parse=parse_number, accepts=kind)}


def flag(words: tuple[str | None, ...] = ()) -> Metadata:
    """Return metadata of a boolean option that also accepts ``words``, such as None or "auto"."""
    *others, last = ["True", "False", *map(repr, words)]
    wanted = f"must be {', '.join(others)} or {last}"

    def convert(value: Any) -> bool:
        if not is_boolean(value):
            raise Refused(wanted)
        return bool(value)

    kind = _join_values(["True", "False", *map(_format_word, words)])
    return {KEY: OptionType(convert, wanted, "", words, accepts=kind)}


def one_of(choices: tuple[str, ...], words: tuple[str | None, ...] = ()) -> Metadata:
    """Return metadata of an option that takes a string in ``choices``, or one of ``words``."""
    known = ", ".join(choices)
    wanted = f"must be {'None or ' if None in words else ''}one of {known}"

    def convert(value: Any) -> str:
        if not (isinstance(value, str) and value in choices):
            raise Refused(wanted)
        return str(value)

    kind = _join_values([*map(_format_word, choices), *map(_format_word, words)])
    return {KEY: OptionType(convert, wanted, "", words, accepts=kind)}


def member(kind: type[enum.Enum]) -> Metadata:
    """Return metadata of an option for an enumeration member, or its value as text in any case."""
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


def text(wanted: str, words: tuple[str | None, ...] = (), accepts: str = "") -> Metadata:
    """Return metadata of an option that takes a non-empty string, or one of ``words``.

    ``wanted`` describes valid values in errors, ``accepts`` in the documentation ("": the same).
    """

    def convert(value: Any) -> str:
        if not (isinstance(value, str) and value.strip() and "\0" not in value):
            raise Refused(wanted)
        return str(value)

    return {KEY: OptionType(convert, wanted, "", words, accepts=accepts)}


def path(
    wanted: str = "must be None, a path or a URL",
    words: tuple[str | None, ...] = (None,),
    accepts: str = "",
) -> Metadata:
    """Return metadata of an option that takes a path (stored as a string), or one of ``words``.

    ``wanted`` describes valid values in errors, ``accepts`` in the documentation ("": the same).
    """

    def convert(value: Any) -> str:
        if hasattr(type(value), "__fspath__"):
            value = value.__fspath__()
        if not (isinstance(value, str) and value and "\0" not in value):
            raise Refused(wanted)
        if URL_AS_PATH.match(value):
            raise Refused(_ONE_SLASH)
        return str(value)

    return {KEY: OptionType(convert, wanted, "", words, accepts=accepts)}


def check_path_argument(value: object) -> str:
    """Return a method's path argument as a string. Raise UsageError if it is not a path."""
    kind = path("must be a path, as a string or a Path object", words=())[KEY]
    return str(kind.read("path", value))


def instance(
    kinds: tuple[type[Any], ...],
    wanted: str,
    words: tuple[str | None, ...] = (),
    parse: Parser = parse_word,
) -> Metadata:
    """Return metadata of an option that takes an instance of one of the classes ``kinds``.

    ``wanted`` describes valid values in errors. ``words`` are further valid values, such as None,
    and ``parse`` converts the text form of all other values.
    """

    def convert(value: Any) -> Any:
        if isinstance(value, type):
            raise Refused(f"{wanted}; this is a class: call it, as in {value.__name__}(...)")
        if not isinstance(value, kinds):
            raise Refused(wanted)
        return value

    return {KEY: OptionType(convert, wanted, "", words, parse)}


def custom(
    convert: Callable[[Any], Any],
    wanted: str,
    unit: str = "",
    parse: Parser = parse_word,
    accepts: str = "",
) -> Metadata:
    """Return metadata of an option of any other type.

    ``convert`` returns the value to store, or raises Refused. ``wanted`` describes valid values in
    errors, ``accepts`` in the documentation ("": the same); ``parse`` converts their text form.
    """
    return {KEY: OptionType(convert, wanted, unit, parse=parse, accepts=accepts)}


def _format_limit(limit: int, unit: str) -> str:
    """Format a limit for the documentation, such as "1,000", or "16 MiB" if the unit is bytes."""
    if unit == "bytes":
        for power, name in ((50, "PiB"), (40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
            if limit >= 1 << power and limit % (1 << power) == 0:
                return f"{limit >> power} {name}"
    return f"{limit:,}"


def _format_word(word: str | None) -> str:
    """Format one of an option's ``words`` for the documentation: a quoted string, or None."""
    return "None" if word is None else f'"{word}"'


def _join_values(values: list[str]) -> str:
    """Join values to a phrase such as "a, b or c"."""
    *others, last = values
    return f"{', '.join(others)} or {last}" if others else last


def _with_words(kind: str, words: tuple[str | None, ...]) -> str:
    """Append the valid ``words`` to ``kind``, a description of the other valid values."""
    return "".join([kind, *(f", or {_format_word(word)}" for word in words)])


def is_whole(value: object) -> TypeGuard[int]:
    """Return whether a value is a Python or NumPy integer; booleans do not count."""
    return isinstance(value, Integral) and not is_boolean(value)


def is_real(value: object) -> TypeGuard[float]:
    """Return whether a value is a Python or NumPy real number; booleans do not count."""
    return isinstance(value, Real) and not is_boolean(value)


def as_float(value: object) -> float:
    """Convert a value to float: infinity if it is too large, NaN if it is not a real number."""
    if not is_real(value):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def is_boolean(value: object) -> bool:
    """Return whether a value is a Python or NumPy boolean."""
    kind = type(value)  # compared by name, because protocol modules import this one without NumPy
    is_numpys = kind.__module__ == "numpy" and kind.__name__ in ("bool", "bool_")
    return isinstance(value, bool) or is_numpys
