"""Connect tasks: the named functions that ``mapInArrow`` runs on executors.

Each hands over to the function that a task of the classic path runs, and turns what that yields
into rows. Nothing is imported here that has kernels compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from sparkstrom.base.import_archives import keep_unchanged_archives
from sparkstrom.spark.connect.binary_rows import in_rows
from sparkstrom.spark.controller.control_words import LineOrder, MediaOrder
from sparkstrom.spark.controller.controller_entry import enter_controller
from sparkstrom.spark.data.shuffle_blocks import Blocks
from sparkstrom.spark.executor.entry import Unopened, enter
from sparkstrom.spark.executor.task_place import here

if TYPE_CHECKING:
    import pyarrow as pa

Batches = Iterable["pa.RecordBatch"]


def task_number() -> int:
    """Of this task's partition."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None, "runs in a Spark task only"
    return context.partitionId()


def run_task(task: Callable[[Iterable[Any]], Iterator[Any]], batches: Batches) -> Iterator[Any]:
    """Any task that needs its rows for nothing but being there."""
    keep_unchanged_archives()
    for _ in batches:
        pass
    return in_rows(task(()), task_number())


def run_worker(unopened: Unopened, blocks: Blocks, batches: Batches) -> Iterator[Any]:
    """Train on one partition."""
    index = task_number()
    return in_rows(enter(unopened, blocks, index, batches), index)


def run_controller(
    ways: tuple[LineOrder, MediaOrder], wanted: str, unopened: Unopened, batches: Batches
) -> Iterator[Any]:
    """Be the controller."""
    for _ in batches:
        pass
    return in_rows(enter_controller(ways, wanted, unopened, task_number(), ()), task_number())


def count_rows(batches: Batches) -> Iterator[Any]:
    """How many rows a partition has."""
    return in_rows([sum(batch.num_rows for batch in batches)], task_number())


def roll_call(items: Iterable[Any]) -> Iterator[str]:
    """Which executor this is."""
    place = here()
    yield f"{place.host}/{place.jvm}"
