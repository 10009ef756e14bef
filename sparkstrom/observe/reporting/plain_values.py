"""Plain values: what a JSON value is taken for, whatever is there; a log may hold anything."""

from __future__ import annotations

import math
from typing import Any

STRANGE = "\N{REPLACEMENT CHARACTER}"


def number(value: Any) -> float | None:
    """None for what is no number, or none that can be drawn."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def text(value: Any) -> str:
    """Empty for None. Without halves of characters and controls, which no page can hold."""
    if value is None:
        return ""
    said = str(value).encode("utf-8", "replace").decode("utf-8")
    return "".join(one if one.isprintable() or one in "\n\t" else STRANGE for one in said)


def mapping(value: Any) -> dict[str, Any]:
    """Empty for what is none."""
    return value if isinstance(value, dict) else {}


def listing(value: Any) -> list[Any]:
    """Empty for what is none."""
    return value if isinstance(value, list) else []
