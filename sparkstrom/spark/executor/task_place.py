"""Task place: where a task runs, as Spark and the machine say."""

from __future__ import annotations

import gc
import logging
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from sparkstrom.transport.aeron.processes import PROC, find_executor

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TaskPlace:
    """Where this task runs."""

    partition: int
    attempt: int  # Spark's taskAttemptId
    host: str
    jvm: str  # names the executor's process among those of this host
    scratch: Path
    cpus: int = 1  # of the task
    gpu: int | None = None  # the first that Spark assigned to the task


@cache
def spare_collections() -> None:
    """Once per process: what has been imported by now is no garbage, and is not searched for any.

    Spark's daemon collects after each task, the next one waiting: 0.06 s with our modules, 0.18 s
    with torch's, and more on a busy machine.
    """
    gc.freeze()


def here() -> TaskPlace:
    """Ask Spark and the machine."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None, "runs in a Spark task only"
    jvm = find_executor()
    host = socket.gethostname()
    directories = os.environ.get("SPARK_LOCAL_DIRS", "/tmp").split(",")
    return TaskPlace(
        context.partitionId(),
        context.taskAttemptId(),
        host,
        f"{jvm.pid}-{jvm.start_time}",
        Path(directories[0]),
        context.cpus(),
        gpu_of(context.resources()),
    )


@dataclass(frozen=True, slots=True)
class ExecutorName:
    """An executor as Spark knows it."""

    number: str  # its id; "driver" in local mode
    host: str  # "": Spark has not told


def executor_name(proc: Path = PROC) -> ExecutorName:
    """Of the executor of this process, by what Spark started it with, on every cluster manager."""
    command = (proc / str(find_executor(proc=proc).pid) / "cmdline").read_text(errors="replace")
    words = command.split("\0")
    said = dict(pairwise(words))
    return ExecutorName(said.get("--executor-id", "driver"), said.get("--hostname", ""))


def is_again() -> bool:
    """Has Spark begun this task before?"""
    return again() > 0


def again() -> int:
    """How often Spark has begun this task before."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None, "runs in a Spark task only"
    return context.attemptNumber()


def gpu_of(resources: Mapping[str, Any]) -> int | None:
    """The index of the first GPU that Spark assigned to the task, if there is one."""
    addresses = resources["gpu"].addresses if "gpu" in resources else []
    if not addresses:
        return None
    if addresses[0].isdigit():
        return int(addresses[0])
    log.warning("Spark calls its GPU %r, which is no index: choose device= yourself", addresses[0])
    return None
