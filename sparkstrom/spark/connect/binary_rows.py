"""Binary rows: what tasks hand back through a DataFrame, and what it is on this side again.

A value is pickled and cut, because Spark Connect sends a result in messages of some MiB, and a row
in one piece. Rows have a number: those of one partition arrive in order, and this does not rely on
it. Both ends are of the same program, and Spark has brought the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from sparkstrom.spark.controller.control_words import packed_word, unpacked_word

if TYPE_CHECKING:
    import pyarrow as pa

ROW_BYTES = 1 << 20  # Spark Connect's messages are of 4 MiB, and of 128 MiB at most
SCHEMA = "task long, number long, part binary"


def in_rows(values: Iterable[Any], task: int) -> Iterator[pa.RecordBatch]:
    """Values of one task, as ``mapInArrow`` wants them."""
    import pyarrow as pa

    number = 0
    for value in values:
        whole = packed_word(value)
        cuts = range(0, len(whole), ROW_BYTES)
        for begin in cuts:
            part = whole[begin : begin + ROW_BYTES]
            last = begin == cuts[-1]
            number += 1
            columns = [
                pa.array([task], pa.int64()),
                pa.array([number if last else -number], pa.int64()),
                pa.array([part], pa.binary()),
            ]
            yield pa.RecordBatch.from_arrays(columns, names=["task", "number", "part"])


def of_rows(rows: Iterable[Any]) -> list[Any]:
    """The values of all tasks, in the order of tasks."""
    values, parts = [], []
    for row in sorted(rows, key=lambda row: (row.task, abs(row.number))):
        parts.append(bytes(row.part))
        if row.number > 0:  # the last of its value
            values.append(unpacked_word(b"".join(parts)))
            parts = []
    return values
