"""Own rows: a worker's rows, checked and counted, as minibatches; whatever it does with them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from sparkstrom.models.base import FlatModel
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.runtime.batches import Batches
from sparkstrom.runtime.row_store import Store
from sparkstrom.spark.data.row_blocks import Block, check_block
from sparkstrom.spark.driver.common_options import CommonOptions
from sparkstrom.spark.executor.task_place import TaskPlace


class OwnRows(Protocol):
    """What of a job says which rows a worker has."""

    @property
    def spec(self) -> FitSpec: ...
    @property
    def model(self) -> FlatModel: ...
    @property
    def master(self) -> CommonOptions: ...
    @property
    def rows(self) -> tuple[int, ...]:
        """Per partition, where rows stayed and so were counted."""
        ...


def need_all_rows(job: OwnRows, place: TaskPlace, rows: int) -> None:
    """Rows that stayed where they were have been counted: raise EOFError where some are missing."""
    if job.rows and rows != job.rows[place.partition]:
        raise EOFError(
            f"partition {place.partition} has {rows} rows, {job.rows[place.partition]} were "
            "counted before: Spark lost part of it and makes it again, or the data change from one "
            "evaluation to the next; then persist them or write them to files first"
        )


def batches_of(job: OwnRows, place: TaskPlace, blocks: Iterator[Block] | None) -> Batches:
    """The partition's minibatches, checked against the model; of None there are none."""
    master = job.master
    store = Store(
        master.batch_memory_bytes, place.scratch, seed=master.rng_seed, fraction=job.spec.fraction
    )
    rows = 0
    for block in blocks or ():
        check_block(job.model, block)
        store.add(block.form, block.records)
        rows += len(block.records)
    if blocks is not None:
        need_all_rows(job, place, rows)
    return Batches.of_store(
        store.finish(),
        batch_rows=master.batch_size_per_worker,
        seed=master.rng_seed,
        partition=place.partition,
        first_epoch=job.spec.first_epoch,
    )
