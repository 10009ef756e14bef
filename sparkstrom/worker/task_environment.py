"""Describe where a training task runs, and load the rows of its partition as minibatches.

Because a process runs several tasks, one after the other, functions here also free the last task's
model and exempt imported modules from garbage collection.
"""

from __future__ import annotations

import gc
import logging
import pickle
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from sparkstrom.data.row_blocks import Block, check_block
from sparkstrom.data.row_store import Batches, RowStore
from sparkstrom.models.base import FlatModel, Placeable, Share
from sparkstrom.options.common import CommonOptions
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.transport.aeron.driver_directories import PROC_DIRECTORY, find_executor_process

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TaskEnvironment:
    """The partition, executor and resources of one running task."""

    partition: int  # number of the partition
    attempt: int  # Spark's taskAttemptId
    host: str  # of the executor, as Spark knows it
    jvm: str  # name of the executor's JVM process, unique on this host
    scratch: Path  # directory for spilled rows and residual files
    cpus: int = 1  # CPUs of the task
    gpu: int | None = None  # index of the first GPU that Spark assigned to the task


def freeze_garbage_collector() -> None:
    """Exclude everything that is imported by now from garbage collection.

    Spark's daemon collects garbage after each task while the next one waits: 0.06 s with the
    modules of this package, 0.18 s with torch's, and more on a busy machine.
    """
    global _modules_frozen
    if len(sys.modules) > _modules_frozen:
        gc.freeze()
        _modules_frozen = len(sys.modules)


def unpickle_without_collecting(content: bytes) -> Any:
    """Return the unpickled value; collect no garbage while the modules it needs are imported.

    Importing torch takes an eighth less time without collections, which would free nothing. What
    was imported is then excluded from later collections.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        value = pickle.loads(content)
        freeze_garbage_collector()
        return value
    finally:
        if was_enabled:
            gc.enable()


_modules_frozen = 0  # number of modules when the garbage collector was last frozen
_last_models: list[Callable[[], FlatModel | None]] = []  # of this process's latest training task


def remember_model(model: FlatModel) -> None:
    """Note the model of the running training task, for ``free_last_model``."""
    _last_models[:] = [refer_weakly(model)]


def free_last_model() -> None:
    """Free the model of this process's latest training task.

    Call this before the next model is created. To free a frozen model, all objects are searched and
    then frozen, so a model that existed by then would have to be freed in the same way.
    """
    free_models(_last_models)


def refer_weakly(model: FlatModel) -> Callable[[], FlatModel | None]:
    """Return a weak reference for ``free_models``, or one to nothing if the class allows none."""
    try:
        return weakref.ref(model)
    except TypeError:  # a class with __slots__
        return lambda: None


def free_models(models: Collection[Callable[[], FlatModel | None]]) -> None:
    """Free models of earlier fits that only reference cycles keep alive.

    The garbage collector skips models that were frozen with the modules they imported. Searching
    frozen objects takes 0.3 s with torch's modules, and makes a forked process copy the memory that
    it shares, so this is done only for a model that still exists.

    Args:
        models: Weak references to models that are no longer used.
    """
    if all(model() is None for model in models):
        return
    gc.collect()
    if any(model() is not None for model in models):
        gc.unfreeze()
        gc.collect()
        gc.freeze()


@dataclass(frozen=True, slots=True)
class ExecutorInfo:
    """An executor's id, host and cores as Spark knows them."""

    id: str  # "driver" in local mode
    host: str  # "" if unknown
    cores: int = 1  # 1 if unknown


def read_executor_info(proc: Path = PROC_DIRECTORY) -> ExecutorInfo:
    """Return id, host and cores of this process's executor, read from its command line."""
    command = (proc / str(find_executor_process(proc=proc).pid) / "cmdline").read_text(
        errors="replace"
    )
    words = command.split("\0")
    said = dict(pairwise(words))
    cores = int(said.get("--cores", "1"))
    return ExecutorInfo(said.get("--executor-id", "driver"), said.get("--hostname", ""), cores)


def assigned_gpu(resources: Mapping[str, Any]) -> int | None:
    """Return the index of the first GPU that Spark assigned to the task, or None.

    ``resources`` are those of Spark's TaskContext. If the GPU's name is not a number, log a
    warning.
    """
    addresses = resources["gpu"].addresses if "gpu" in resources else []
    if not addresses:
        return None
    if addresses[0].isdigit():
        return int(addresses[0])
    log.warning(
        "Spark names this task's GPU %r, which is not an index: set device= yourself", addresses[0]
    )
    return None


class PartitionSpec(Protocol):
    """The attributes of a job that determine which rows a worker trains on."""

    @property
    def spec(self) -> FitSpec:
        """The fit, with its partitions and their positions."""

    @property
    def model(self) -> FlatModel:
        """The model that the rows are checked against."""

    @property
    def master(self) -> CommonOptions:
        """The options of training."""

    @property
    def rows(self) -> tuple[int, ...]:
        """The number of rows per partition; () if they were not counted before the fit."""
        ...


def require_row_count(job: PartitionSpec, environment: TaskEnvironment, rows: int) -> None:
    """Raise EOFError if a partition whose rows were counted before has lost or gained rows."""
    if job.rows and rows != job.rows[environment.partition]:
        raise EOFError(
            f"partition {environment.partition} has {rows} rows, "
            f"{job.rows[environment.partition]} were counted before: Spark lost part of it and "
            "recomputes it, or the data change from one evaluation to the next; then persist them "
            "or write them to files first"
        )


def load_batches(
    job: PartitionSpec, environment: TaskEnvironment, blocks: Iterator[Block] | None
) -> Batches:
    """Return the partition's minibatches, after checking the rows against the model.

    ``blocks``: blocks of the partition's rows; None: no rows, and their number is not checked.
    """
    master = job.master
    store = RowStore(
        master.batch_memory_bytes,
        environment.scratch,
        seed=master.rng_seed,
        fraction=job.spec.fraction,
    )
    rows = 0
    for block in blocks or ():
        check_block(job.model, block)
        store.add(block.form, block.records)
        rows += len(block.records)
    if blocks is not None:
        require_row_count(job, environment, rows)
    return Batches.from_store(
        store.finish(),
        batch_rows=master.batch_size_per_worker,
        seed=master.rng_seed,
        partition=environment.partition,
        first_epoch=job.spec.first_epoch,
    )


def place_model(job: PartitionSpec, place: TaskEnvironment, *position: int) -> None:
    """Give a ``Placeable`` model its share of CPUs and GPUs, and a random seed.

    The seed depends on ``position``, numbers that identify a place within the fit.
    """
    if isinstance(job.model, Placeable):
        chance = (job.master.rng_seed, place.partition, job.spec.first_epoch, *position)
        seed = int(np.random.SeedSequence(chance).generate_state(1, np.uint64)[0] >> np.uint64(1))
        job.model.place(Share(place.cpus, place.gpu, seed))
