"""Connect evaluation: the figures of a DataFrame's partitions, counted on executors."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from sparkstrom.spark.connect.binary_rows import SCHEMA, in_rows
from sparkstrom.spark.connect.connect_jobs import answers_of
from sparkstrom.spark.connect.connect_tasks import Batches, task_number
from sparkstrom.spark.data.arrow import blocks_of_batches
from sparkstrom.spark.data.columns import Chosen, check_chosen, chosen_columns
from sparkstrom.spark.data.shuffle_blocks import Blocks
from sparkstrom.spark.driver.evaluation import (
    Evaluation,
    Wanted,
    evaluate_partition,
    merged_or_raise,
)


def run_evaluation(shipped: Any, wanted: Wanted, blocks: Blocks, batches: Batches) -> Iterator[Any]:
    """Of one partition; runs on an executor."""
    index = task_number()
    return in_rows(evaluate_partition(shipped, wanted, blocks, index, batches), index)


def evaluate_frame(shipped: Any, wanted: Wanted, frame: Any, chosen: Chosen) -> Evaluation:
    """Of all of them. Raise UsageError naming a row that does not fit."""
    check_chosen(chosen, dataframe=True)
    columns, reading = chosen_columns(frame, chosen)
    run = partial(run_evaluation, shipped, wanted, partial(blocks_of_batches, reading))
    return merged_or_raise(answers_of(columns.mapInArrow(run, SCHEMA), "evaluating"))
