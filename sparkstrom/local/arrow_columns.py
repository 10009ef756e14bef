"""Arrow columns: from names that a user gives to what is read of a table, checked before."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from sparkstrom.base.errors import UsageError
from sparkstrom.spark.data.arrow import is_listed
from sparkstrom.spark.data.columns import (
    HELD_OUT,
    LABEL,
    WEIGHT,
    Chosen,
    Reading,
    reading_for,
    take_of,
    wanted_by_role,
)

if TYPE_CHECKING:
    import pyarrow as pa


def reading_of(
    schema: pa.Schema, batches: Callable[[list[str]], Iterable[pa.RecordBatch]], chosen: Chosen
) -> tuple[Reading, Iterable[pa.RecordBatch]]:
    """How to read the columns, and batches of these alone. Raise UsageError naming a wrong one."""
    used: dict[str, int] = {}
    takes = [
        take_of(role, one, used, partial(_check, schema, role))
        for role, one in wanted_by_role(chosen)
    ]
    return reading_for(chosen, b"", takes), batches(list(used))


def _check(schema: pa.Schema, role: str, name: str, side_by_side: bool) -> None:
    if schema.names.count(name) != 1:
        raise UsageError(
            f"there is no column {name!r} for {role}, or more than one; the table has"
            f" {schema.names}"
        )
    _check_kind(role, name, schema.field(name).type, side_by_side=side_by_side)


def _check_kind(role: str, name: str, kind: pa.DataType, *, side_by_side: bool) -> None:
    import pyarrow as pa

    number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    if role == HELD_OUT:
        fits, wanted = pa.types.is_boolean(kind), "boolean: true for rows to hold out"
    elif role == WEIGHT:
        fits, wanted = number, "a number"
    elif side_by_side:
        fits, wanted = number, "a number to stand beside others; name an array column by itself"
    elif role == LABEL:
        fits, wanted = number or _is_nested(kind), "a number, or an array of numbers"
    else:
        fits = number or _is_nested(kind) or pa.types.is_binary(kind)
        wanted = "a number, an array of numbers, an image's bytes, or a list of numeric columns"
    if not fits:
        raise UsageError(f"{role} column {name!r} is {kind}: it must be {wanted}")


def _is_nested(kind: pa.DataType) -> bool:
    """A list of numbers, or of such lists."""
    import pyarrow as pa

    depth = 0
    while is_listed(kind):
        kind, depth = kind.value_type, depth + 1
    return bool(depth) and (
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    )
