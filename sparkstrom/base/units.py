"""Parse rates, durations, counts and sizes in human notation, such as 100mbit, 300ms or 2g."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from sparkstrom.base.errors import UsageError

MIB = 1 << 20
PREFIXES = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
RATE = re.compile(r"(\d+(?:\.\d+)?)([kmgt]?)(i?)(bit|bps|)", re.IGNORECASE)
DURATION = re.compile(r"(\d+(?:\.\d+)?(?:e-?\d+)?)\s*(us|ms|s|min|)", re.IGNORECASE)
SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)b?\s*", re.IGNORECASE)
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "min": 60.0}


def parse_rate(text: str) -> int:
    """Parse a rate in tc's notation (100mbit, 1.5gbit, 12mbps); return bits per second.

    "bit" means bits and "bps" bytes per second. Raises ValueError for anything else and for a rate
    below 1 bit per second, or of so many digits that it counts as infinite.
    """
    match = RATE.fullmatch(text.strip())
    bits = 0.0
    if match is not None:
        number, prefix, binary, unit = match.groups()
        factor = (1024 if binary else 1000) ** PREFIXES[prefix.lower()]
        bits = float(number) * factor * (8 if unit.lower() == "bps" else 1)
    if not 0.5 < bits < math.inf:  # rounded to 1 at least
        raise ValueError(
            f"rate {text!r}: write it as tc does, such as 100mbit, 1gbit, 1.5mbit or 500kbit"
        )
    return round(bits)


def parse_duration(text: str) -> float:
    """Parse a duration such as 300ms, 20us, 1.5s, 2min or 0.3; return seconds.

    Raises ValueError for anything else.
    """
    match = DURATION.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"duration {text!r}: write 300ms, 20us, 1.5s or 2min")
    number, unit = match.groups()
    return float(number) * SECONDS[unit.lower()]


def parse_count(text: str) -> int:
    """Parse and return a whole number such as 25000000, 25_000_000 or 25e6.

    Raises ValueError for anything else.
    """
    try:
        value = float(text)
    except ValueError:
        value = 0.5
    if not abs(value) <= 2**53 or value != round(value):  # also false for NaN and infinity
        raise ValueError(f"number {text!r}: write a whole number, such as 25000000 or 25e6")
    return round(value)


def parse_bytes(text: str, unit: int = 1) -> int:
    """Parse a size in the notation of Spark and YARN (512m, 2g, 1.5 GB); return bytes.

    A number without a prefix is multiplied by ``unit`` bytes. Raises ValueError for anything
    else.
    """
    match, size = SIZE.fullmatch(text), math.inf
    if match is not None:
        number, prefix = match.groups()
        size = float(number) * (1024 ** PREFIXES[prefix.lower()] if prefix else unit)
    if size == math.inf:  # also for too many digits
        raise ValueError(f"size {text!r}: write 512m, 2g or 65536")
    return int(size)


def parse_option(name: str, text: str | None, parse: Callable[[str], Any]) -> Any:
    """Return ``parse(text)`` for option ``--name`` of a command, or None if ``text`` is None.

    If ``parse`` raises ValueError, raise UsageError with a message that names the option.
    """
    try:
        return None if text is None else parse(text)
    except ValueError as error:
        raise UsageError(f"--{name} {text!r}: {error}") from None


def mib(size: int) -> int:
    """Convert bytes to MiB, rounded up."""
    return -(-size // MIB)
