"""First rows: some of a fit's rows for its dry step, where Spark has them at once."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import islice
from typing import Any

from sparkstrom.spark.data.partitioning import Source
from sparkstrom.spark.data.row_blocks import Block
from sparkstrom.spark.driver.spark_job import SparkJob

WAIT_S = 10.0  # rows that take longer to compute are not waited for
ELEMENTS = 8  # of a partition: rows, or messages, of which the first has as many as are needed
WORDS = "sparkstrom looks at the first rows"


def first_blocks(context: Any, source: Source) -> Iterator[Block]:
    """Rows of the first partition; none where Spark cannot compute them soon.

    Raise UsageError for a row that cannot be read.
    """
    count = 1 if source.is_table else ELEMENTS
    take = partial(_first, count)
    group = f"sparkstrom-first-{secrets.token_hex(8)}"
    runner = partial(context.runJob, source.rdd, take, [0])
    return source.blocks(0, answers_in_time(SparkJob(context, group, runner, words=WORDS)))


def _first(count: int, elements: Iterable[Any]) -> Iterator[Any]:
    return islice(elements, count)


def answers_in_time(job: SparkJob) -> list[Any]:
    """What the job gives, or nothing where it fails or takes too long; then it is cancelled."""
    job.start()
    try:
        done = job.wait(WAIT_S)
    except BaseException:
        job.cancel()
        raise
    if not done:
        job.cancel()
        return []
    return [] if job.error is not None else job.reports
