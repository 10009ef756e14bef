"""Data: from what users have to one partition per worker, random and balanced by seed."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from sparkstrom.base.errors import UsageError
from sparkstrom.spark.rows import FEATURES, LABEL

if TYPE_CHECKING:
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


def spread_rows(rdd: RDD[Any], workers: int, seed: int, *, move: bool) -> RDD[Any]:
    """An RDD's rows over ``workers`` partitions: dealt out at random, or merged where they are."""
    if not move:
        return rdd if rdd.getNumPartitions() <= workers else rdd.coalesce(workers)
    dealt: RDD[tuple[int, Any]] = rdd.mapPartitionsWithIndex(partial(deal, workers, seed))
    return dealt.partitionBy(workers, int).values()


def deal(workers: int, seed: int, index: int, rows: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """Give each row of a partition its worker: shuffled, then in turn, so that shares are equal.

    The same rows get the same workers again when Spark computes the partition again.
    """
    chance = random.Random(zlib.crc32(b"%d/%d" % (seed, index)))
    shuffled = list(rows)
    chance.shuffle(shuffled)
    first = chance.randrange(workers)
    for i, row in enumerate(shuffled):
        yield (first + i) % workers, row


def spread_frame(
    frame: DataFrame,
    features: str | list[str],
    label: str,
    workers: int,
    seed: int,
    *,
    move: bool,
) -> DataFrame:
    """Two columns, ``features`` array<float> and ``label``, over ``workers`` partitions.

    Round robin after a sort by the rows' hash (Spark's own, so that a retry repeats it); the
    seed goes into the hash.
    """
    from pyspark.sql import functions as sql

    chosen = frame.select(
        _feature_column(frame, features).alias(FEATURES), _label_column(frame, label).alias(LABEL)
    )
    if not move:
        count = chosen.rdd.getNumPartitions()
        return chosen if count <= workers else chosen.coalesce(workers)
    keyed = chosen.withColumn("key", sql.xxhash64(sql.lit(seed), sql.col(FEATURES)))
    return keyed.repartition(workers).select(FEATURES, LABEL)


def _feature_column(frame: DataFrame, features: str | list[str]) -> Any:
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
