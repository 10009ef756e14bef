"""Quantities: numbers with their units, as people read them."""

from __future__ import annotations

UNKNOWN = "not known"


def count(value: float | None) -> str:
    """1,234,567"""
    return UNKNOWN if value is None else f"{value:,.0f}"


def figure(value: float | None) -> str:
    """Four digits that count."""
    if value is None:
        return UNKNOWN
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.3g}"
    return f"{value:.4g}"


def byte_count(value: float | None) -> str:
    """In the unit that leaves the fewest digits; a MB is 1,000,000 bytes."""
    if value is None:
        return UNKNOWN
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.0f} bytes"


def duration(seconds: float | None) -> str:
    """0.4 s, 41 s, 3 min 20 s, 2 h 5 min"""
    if seconds is None:
        return UNKNOWN
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def times(value: float | None, base: float | None) -> str:
    """How many times less ``value`` is than ``base``; empty where nothing is known or sent."""
    if not value or not base:
        return ""
    return f"{base / value:,.0f} times less"


def plural(number_of: float | None, thing: str) -> str:
    """1 worker, 4 workers, 2 epochs"""
    return f"{count(number_of)} {thing}{'' if number_of == 1 else 's'}"
