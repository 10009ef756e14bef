"""Unite a fit's data and a DataFrame of held-out rows into one DataFrame.

A boolean column marks the held-out rows, so everything that partitions, exports and measures rows
works as for a ``validation`` column that the user named.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import shown
from sparkstrom.spark.data.columns import Chosen, check_chosen, fields_of
from sparkstrom.spark.data.partitioning import is_dataframe
from sparkstrom.spark.driver.averaging_master import IF_DIFFERENT, TrainingMaster

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructField

COLUMN = "sparkstrom_held_out"


class HeldOutFrames:
    """The last union of data and held-out rows that a network made.

    The next fit of the same two DataFrames gets the same union, and so reuses its export.
    """

    def __init__(self, check: Callable[[Any], None]) -> None:
        self._check = check  # raises UsageError for data that the application does not take
        self._last: tuple[DataFrame, DataFrame, list[str], bool] | None = None
        self._made: tuple[DataFrame, str] | None = None

    def united(
        self, data: Any, chosen: Chosen, validation: Any, repartition: str
    ) -> tuple[Any, Chosen]:
        """Return the data united with the rows of ``validation``, and the columns to read.

        If ``validation`` is a fraction, a column's name or None, return the data unchanged. Raise
        UsageError for a DataFrame of held-out rows that does not match the data.
        """
        if not (is_dataframe(validation) or hasattr(validation, "mapPartitions")):
            self._last = self._made = None
            return data, chosen._replace(validation=validation)
        check_chosen(chosen, dataframe=is_dataframe(data))
        self._need_frames(data, validation)
        fields = fields_of(data, chosen)
        _need_like(fields, validation, chosen)
        names, stay = list(fields), repartition == "never"
        if self._made is None or not self._is_last(data, validation, names, stay=stay):
            self._made = _union(data, validation, names, stay=stay)
            self._last = (data, validation, names, stay)
        frame, column = self._made
        return frame, chosen._replace(validation=column)

    def _is_last(self, data: Any, held: Any, names: list[str], *, stay: bool) -> bool:
        if self._last is None:
            return False
        theirs, those, *rest = self._last
        return theirs is data and those is held and rest == [names, stay]

    def spread_by(self, master: TrainingMaster, data: Any) -> TrainingMaster:
        """Return the master to partition ``data`` with.

        The union has the partitions of both DataFrames, so their number says nothing. With
        ``num_partitions_workers_differs``, a union is therefore repartitioned as with ``always``.
        """
        counted = master.repartition == IF_DIFFERENT
        if not counted or self._made is None or data is not self._made[0]:
            return master
        return replace(master, repartition="always")

    def _need_frames(self, data: Any, held: Any) -> None:
        self._check(data)
        if not is_dataframe(held):
            raise UsageError(
                f"validation={shown(held)}: held-out rows cannot be an RDD; make a DataFrame of"
                " them, and one of the data, too (toDF), or give a fraction such as 0.1"
            )
        try:
            self._check(held)
        except UsageError as error:
            raise UsageError(f"validation: {error}") from None
        if not is_dataframe(data):
            raise UsageError(
                "validation: held-out rows are a DataFrame, and the data are an RDD: make a"
                " DataFrame of the data, too (toDF), or give a fraction such as 0.1"
            )
        if type(held) is not type(data):
            raise UsageError(
                "validation: held-out rows are a DataFrame of another session than data, one over"
                " Spark Connect and one not: make both with one session"
            )
        for name, frame in (("data", data), ("validation", held)):
            if frame.isStreaming:
                raise UsageError(
                    f"{name} is a streaming DataFrame, which has no last row: read a table, or"
                    " train on each micro-batch by each_batch(network, validation=frame) of"
                    " sparkstrom.streams, where frame is a table"
                )


def _need_like(fields: dict[str, StructField], held: Any, plain: Chosen) -> None:
    """Raise UsageError where held-out rows lack a column, or have one of another type."""
    try:
        theirs = fields_of(held, plain)
    except UsageError as error:
        raise UsageError(
            f"validation: {error}. Held-out rows need the columns that the fit reads of the data,"
            f" with the same names: {', '.join(fields)}"
        ) from None
    for name, field in fields.items():
        mine, other = field.dataType, theirs[name].dataType
        if (type(mine), mine.simpleString()) != (type(other), other.simpleString()):
            wanted = mine.simpleString()
            raise UsageError(
                f"validation: column {name!r} is {other.simpleString()} among the held-out rows and"
                f" {wanted} in the data: give both one type, such as"
                f" frame.withColumn({name!r}, frame[{name!r}].cast({wanted!r}))"
            )


def _union(data: Any, held: Any, names: list[str], *, stay: bool) -> tuple[Any, str]:
    """Return the union of these columns with the mark, and the name of the mark's column.

    If rows stay in their partitions (``stay``), the held-out rows form a single partition, so that
    at most one worker has none to train on.
    """
    from pyspark.sql import functions as sql

    column = COLUMN
    while column.lower() in {name.lower() for name in names}:
        column += "_"
    quoted = ["`" + name.replace("`", "``") + "`" for name in names]
    parts = [
        frame.select(*quoted, sql.lit(is_held).alias(column))
        for frame, is_held in ((data, False), (held.coalesce(1) if stay else held, True))
    ]
    return parts[0].unionByName(parts[1]), column
