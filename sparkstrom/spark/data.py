"""Data: from what users have to one partition per worker, random and balanced by seed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from sparkstrom.base.errors import SetupError, UsageError
from sparkstrom.spark.parcels import COLUMNS, Parcel, deal_batches, deal_rows
from sparkstrom.spark.rows import FEATURES, LABEL

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import RDD
    from pyspark.sql import DataFrame


def is_dataframe(data: Any) -> bool:
    """A Spark DataFrame, without importing pyspark for anything else."""
    return hasattr(data, "mapInArrow")


def check_data(data: Any) -> None:
    """Raise UsageError for what is neither."""
    if not (is_dataframe(data) or hasattr(data, "mapPartitions")):
        raise UsageError(
            f"cannot train on {type(data).__name__}: pass an RDD of (features, label) or a "
            "DataFrame with features=... and label=... columns"
        )


class Spread(NamedTuple):
    """The data over one partition per worker.

    Dealt rows come as parcels, of so many ``sources``. Rows that stay where they are come as they
    are; then ``rows`` says how many each partition must have.
    """

    data: Any  # RDD of parcels or rows, or DataFrame
    workers: int
    sources: int = 0
    rows: tuple[int, ...] = ()


def deal_out(rdd: RDD[Any], workers: int, seed: int) -> Spread:
    """An RDD's rows, at random and balanced."""
    dealt = rdd.mapPartitionsWithIndex(partial(deal_rows, workers, seed))
    parcels: RDD[Any] = dealt.partitionBy(workers, int).values()
    return Spread(parcels, workers, sources=rdd.getNumPartitions())


def deal_out_frame(frame: DataFrame, workers: int, seed: int) -> Spread:
    """A DataFrame's rows, at random and balanced; they stay Arrow all the way."""
    dealt = frame.mapInArrow(partial(deal_batches, workers, seed), COLUMNS).rdd
    parcels: RDD[Any] = dealt.map(worker_and_parcel).partitionBy(workers, int).values()
    return Spread(parcels, workers, sources=dealt.getNumPartitions())


def worker_and_parcel(row: Any) -> tuple[int, Parcel]:
    """A row of ``parcels.COLUMNS`` as key and value."""
    worker, source, number, count, payload = row
    return worker, (source, number, count, bytes(payload))


def leave_in_place(rdd: RDD[Any], workers: int) -> Spread:
    """An RDD's partitions as they are, merged where there are more than workers."""
    kept = rdd if rdd.getNumPartitions() <= workers else rdd.coalesce(workers)
    rows = tuple(kept.mapPartitions(count_rows).collect())
    return Spread(kept, len(rows), rows=rows)


def leave_frame_in_place(frame: DataFrame, workers: int) -> Spread:
    """A DataFrame's partitions as they are, merged where there are more than workers."""
    kept = frame if frame.rdd.getNumPartitions() <= workers else frame.coalesce(workers)
    rows = tuple(row.rows for row in kept.mapInArrow(count_batches, "rows long").collect())
    return Spread(kept, len(rows), rows=rows)


def count_rows(rows: Iterable[Any]) -> Iterator[int]:
    """How many rows a partition has."""
    yield sum(1 for _ in rows)


def count_batches(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """How many rows a partition has, by Arrow."""
    import pyarrow as pa

    yield pa.RecordBatch.from_pydict({"rows": [sum(batch.num_rows for batch in batches)]})


def features_and_label(frame: DataFrame, features: str | list[str], label: str) -> DataFrame:
    """Two columns: ``features`` array<float>, and ``label``."""
    if importlib.util.find_spec("pandas") is None:
        raise SetupError(
            "Spark hands DataFrames to Python by Arrow, and its code for that imports pandas, "
            "which is not here: pip install pandas on the driver and the executors, or train on an "
            "RDD"
        )
    return frame.select(
        feature_column(frame, features).alias(FEATURES), _label_column(frame, label).alias(LABEL)
    )


def feature_column(frame: DataFrame, features: str | list[str]) -> Any:
    """One array column, vector column, or several numeric columns, as array<float>."""
    from pyspark.sql import functions as sql
    from pyspark.sql.types import ArrayType, NumericType

    names = [features] if isinstance(features, str) else list(features)
    for name in names:
        _need_column(frame, name)
    kind = frame.schema[names[0]].dataType
    if len(names) == 1 and kind.typeName() == "vectorudt":
        from pyspark.ml.functions import vector_to_array

        return vector_to_array(sql.col(names[0]), "float32")
    if (
        len(names) == 1
        and isinstance(kind, ArrayType)
        and isinstance(kind.elementType, NumericType)
    ):
        return sql.col(names[0]).cast("array<float>")
    for name in names:
        if not isinstance(frame.schema[name].dataType, NumericType):
            raise UsageError(
                f"features column {name!r} is {frame.schema[name].dataType.simpleString()}: "
                "it must be an array of numbers, an ml vector, or a list of numeric columns"
            )
    return sql.array(*(sql.col(name).cast("float") for name in names))


def _label_column(frame: DataFrame, label: str) -> Any:
    from pyspark.sql import functions as sql
    from pyspark.sql.types import ArrayType, BooleanType, FractionalType, NumericType

    _need_column(frame, label)
    kind = frame.schema[label].dataType
    if isinstance(kind, ArrayType) and isinstance(kind.elementType, NumericType):
        return sql.col(label).cast("array<float>")
    if not isinstance(kind, NumericType | BooleanType):
        raise UsageError(
            f"label column {label!r} is {kind.simpleString()}: it must be a number (a class index "
            "or a value) or an array of numbers"
        )
    return sql.col(label).cast("float" if isinstance(kind, FractionalType) else "bigint")


def _need_column(frame: DataFrame, name: str) -> None:
    if name not in frame.columns:
        raise UsageError(f"there is no column {name!r}; the DataFrame has {frame.columns}")


Runner = Callable[[], list[str]]


def rows_job(rdd: RDD[Any], run: Callable[..., Iterator[str]]) -> Runner:
    """The one Spark job of a fit, for an RDD."""
    return lambda: rdd.mapPartitionsWithIndex(run).collect()


def frame_job(frame: DataFrame, run: Callable[..., Iterator[Any]]) -> Runner:
    """The one Spark job of a fit, for a DataFrame."""
    return lambda: [row.report for row in frame.mapInArrow(run, "report string").collect()]
