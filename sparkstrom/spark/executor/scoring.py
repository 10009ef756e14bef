"""Scoring: the model's loss of each row by itself, on the executors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import UsageError
from sparkstrom.models.base import Batch, FlatModel, LossBound, Measured, Penalized
from sparkstrom.models.outputs import BLOCK_ROWS, rows_at
from sparkstrom.spark.data.arrow import parts_of
from sparkstrom.spark.data.columns import Chosen, Reading, wanted_columns
from sparkstrom.spark.data.partitioning import Source
from sparkstrom.spark.data.row_blocks import Block, check_block, gathered, of_rows
from sparkstrom.spark.data.shuffle_blocks import Blocks
from sparkstrom.spark.executor.inference import arrow_batches, opened, udf_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def check_scored(model: FlatModel, penalized: bool) -> None:
    """Raise UsageError where rows have no loss, or the model no penalty that it could tell."""
    if isinstance(model, LossBound):
        model.need_loss()
    if not isinstance(model, Measured):
        raise UsageError(
            f"score_examples: a {type(model).__name__} has no loss(batch) -> (sum, weight); give it"
            " one (see sparkstrom.models.base.Measured)"
        )
    if penalized and not isinstance(model, Penalized):
        raise UsageError(
            f"include_regularization=True: a {type(model).__name__} does not tell its penalty, as"
            " that is in its optimizer (weight_decay) or its own loss; leave it out"
        )


def scores_of(model: Any, block: Block, penalized: bool) -> NDArray[np.float64]:
    """f64[rows]: each row's loss, without its weight; the penalty on top where wanted."""
    check_block(model, block)
    batch = block.form.batch(block.records)
    scores = np.empty(batch.rows)
    for i in range(batch.rows):
        one = slice(i, i + 1)
        total, weight = model.loss(Batch(rows_at(batch.features, one), rows_at(batch.labels, one)))
        scores[i] = total / weight
    return scores + model.penalty() if penalized else scores


def score_rows(
    shipped: Any, blocks: Blocks, penalized: bool, index: int, items: Iterable[Any]
) -> Iterator[float]:
    """One number for each row of a partition, in order."""
    model = opened(shipped.value)
    for block in of_rows(blocks(index, items), BLOCK_ROWS):
        yield from map(float, scores_of(model, block, penalized))


def scored(shipped: Any, source: Source, penalized: bool) -> Any:
    """An RDD of scores."""
    run = partial(score_rows, shipped, source.blocks, penalized)
    return source.rdd.mapPartitionsWithIndex(run)


def with_scores(
    frame: DataFrame, shipped: Any, chosen: Chosen, output: str, penalized: bool
) -> DataFrame:
    """The frame with a column of scores. Raise UsageError naming a column that does not fit."""
    columns, reading = wanted_columns(frame, chosen, dense=True)
    run = partial(_score_columns, shipped, reading, penalized)
    return frame.withColumn(output, udf_of(columns, run, "double"))


def _score_columns(
    shipped: Any, reading: Reading, penalized: bool, where: str, batches: Iterable[Any]
) -> Iterator[Any]:
    import pandas as pd

    model = opened(shipped.value)
    parts = parts_of(reading, arrow_batches(reading, batches), where)
    for block in of_rows(gathered(parts, where), BLOCK_ROWS):
        yield pd.Series(scores_of(model, block, penalized))
