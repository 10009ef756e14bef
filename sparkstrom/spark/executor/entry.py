"""Entry: the first that a training task runs; it looks for Aeron before anything is compiled.

A job's own module needs compiled kernels, so a job that Spark unpickled on its way to the task
would have them compiled, for half a minute on a new host, before the first line of ours could say
that training cannot work there.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from sparkstrom.base.import_archives import keep_unchanged_archives
from sparkstrom.spark.data.shuffle_blocks import Blocks
from sparkstrom.spark.driver.pickling import packed
from sparkstrom.spark.executor.interfaces import need_library
from sparkstrom.spark.executor.reaching import WayToController, need_answer
from sparkstrom.spark.executor.task_place import here


@dataclass(frozen=True, slots=True)
class Unopened:
    """A ``TrainingJob`` that the task itself unpickles; on the driver the job, elsewhere bytes.

    Pickled inside of Spark's own pickling, which looks for broadcasts.
    """

    job: Any
    way: WayToController

    def __reduce__(self) -> tuple[Any, ...]:
        return Unopened, (packed(self.job), self.way)


def enter(unopened: Unopened, blocks: Blocks, index: int, items: Iterable[Any]) -> Iterator[str]:
    """Train on one partition.

    Raise SetupError where this host has no Aeron library, NetworkError where UDP to the controller
    and back is dropped.
    """
    keep_unchanged_archives()
    need_library()
    need_answer(unopened.way, here())
    from sparkstrom.spark.executor.tasks import run_partition

    return run_partition(pickle.loads(unopened.job), blocks, index, items)
