"""Entry points of Spark tasks, access to a task's context, and pickling of a task's input.

A host is checked before any module with compiled kernels is imported. Otherwise a task on a new
host would compile kernels for half a minute, while it unpickles its job, before it could report
that training cannot work there.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import re
import socket
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from zipimport import zipimporter

from sparkstrom.data.row_blocks import BlockReader
from sparkstrom.transport.aeron.driver_directories import find_executor_process
from sparkstrom.worker.network_setup import (
    ControllerRoute,
    require_controller_reachable,
    require_library,
)
from sparkstrom.worker.task_environment import (
    TaskEnvironment,
    assigned_gpu,
    free_last_model,
    unpickle_without_collecting,
)

if TYPE_CHECKING:
    from sparkstrom.worker.training_job import TrainingJob

# Loggers of py4j and Spark Connect that log every message sent to Spark at level DEBUG.
SENDING_LOGGERS = ("py4j.clientserver", "py4j.java_gateway", "pyspark.sql.connect.logging")

SPARK_ARCHIVES = ("pyspark.zip", "py4j-", "spark-core_")  # how names of Spark's archives begin

# Py4J sends bytes as a line of "j" and base64. Protobuf's text format quotes a pickled function.
PICKLED_TASK = re.compile(
    r"""(?: ^j | \\nj ) [A-Za-z0-9+/=]+ | \b command: \s* "(?: [^"\\] | \\. )*" """,
    re.MULTILINE | re.VERBOSE,
)


class _RedactPickledTasks(logging.Filter):
    """A logging filter that replaces pickled tasks in log records with a short note."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Redact a record of level DEBUG or lower in place; return True, so that it is logged."""
        if record.levelno <= logging.DEBUG:
            message = record.getMessage()
            if PICKLED_TASK.search(message):
                record.msg, record.args = PICKLED_TASK.sub("<pickled, not logged>", message), None
        return True


_redact_filter = _RedactPickledTasks()


def redact_pickled_tasks() -> None:
    """Keep pickled tasks, which contain secret keys, out of this program's log at any level."""
    for name in SENDING_LOGGERS:
        logging.getLogger(name).addFilter(_redact_filter)  # adding it again has no effect


def pickle_by_value(value: Any) -> bytes:
    """Return a value's pickle, with the code of classes that the user's script defines.

    Executors cannot import that script.
    """
    from pyspark import cloudpickle

    untyped: Any = cloudpickle
    content: bytes = untyped.dumps(value)
    return content


def hash_by_value(value: Any) -> bytes:
    """Return the SHA-256 of a value's pickle by value, with the bytes of torch's tensors.

    The usual pickle of a tensor contains its address in memory, which differs from copy to copy.
    """
    from pyspark import cloudpickle

    untyped: Any = cloudpickle

    class AddressFreePickler(untyped.Pickler):  # type: ignore[misc]
        """Pickles the bytes of a tensor's memory instead of its address."""

        def persistent_id(self, value: Any) -> Any:
            """Return what to pickle in place of ``value``; None means its usual pickle."""
            if type(value).__name__ != "TypedStorage":
                return None
            memory = value._untyped_storage.cpu()
            return str(value.dtype), ctypes.string_at(memory.data_ptr(), memory.nbytes())

    digest = hashlib.sha256()
    AddressFreePickler(SimpleNamespace(write=digest.update)).dump(value)
    return digest.digest()


def forget_spark_archive_importers() -> None:
    """Let the process's next task start without reading Spark's archives again.

    Spark invalidates Python's importers when a task starts. Before Python 3.12, each importer of a
    zip archive then reads the archive's whole directory (python/cpython#103200). A Python worker
    has one importer for each package that it has imported from ``pyspark.zip``, and two for Spark's
    main jar. Reading takes 0.1 to 0.2 s of processor time per task, most of the time of a short
    one. An importer that was removed from the cache is created again when needed, without reading.
    """
    for path, importer in list(sys.path_importer_cache.items()):
        if isinstance(importer, zipimporter):
            archive = os.path.basename(importer.archive)
            if archive.startswith(SPARK_ARCHIVES):  # others may be replaced by the user
                sys.path_importer_cache.pop(path, None)


def get_task_context() -> TaskEnvironment:
    """Return this task's partition, executor and resources, from Spark and the machine."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None, "runs in a Spark task only"
    jvm = find_executor_process()
    host = socket.gethostname()
    directories = os.environ.get("SPARK_LOCAL_DIRS", "/tmp").split(",")
    return TaskEnvironment(
        context.partitionId(),
        context.taskAttemptId(),
        host,
        f"{jvm.pid}-{jvm.start_time}",
        Path(directories[0]),
        context.cpus(),
        assigned_gpu(context.resources()),
    )


def is_retry() -> bool:
    """Return whether Spark has started the running task before."""
    return count_retries() > 0


def count_retries() -> int:
    """Return how many times Spark has started the running task before."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None, "runs in a Spark task only"
    return context.attemptNumber()


def train_partition(
    job: TrainingJob, blocks: BlockReader, index: int, items: Iterable[Any]
) -> Iterator[str]:
    """Train on the rows of one partition; yield the worker's report for the driver program.

    ``blocks`` reads the rows from ``items``, the elements of partition number ``index``.
    """
    from sparkstrom.worker.training_task import (
        run_training_task,
    )  # compiles kernels when it is imported

    yield run_training_task(job, get_task_context(), blocks(index, items))


def delete_worker_files(network: str, rows: Iterable[Any]) -> Iterator[int]:
    """Delete a SparkNetwork's residual files on this executor; yield the number of deleted files.

    A residual is what a worker has learned but not sent. ``network`` is the SparkNetwork's id,
    which the files' names contain. ``rows`` is not used.
    """
    from sparkstrom.worker.training_task import (
        delete_residuals,
    )  # compiles kernels when it is imported

    yield delete_residuals(get_task_context().scratch, network)


@dataclass(frozen=True, slots=True)
class LazyPickle:
    """A job that is pickled separately, so that a task can check its host before unpickling it.

    The job is pickled while Spark pickles the task, so that Spark finds the broadcast variables in
    the job.
    """

    job: Any  # on the driver a TrainingJob or ControllerSetup; on executors its pickle, as bytes
    route: ControllerRoute  # how an executor reaches the controller, which numbers updates

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the job now, with Spark's pickler."""
        return LazyPickle, (pickle_by_value(self.job), self.route)


def run_training_task(
    job: LazyPickle, blocks: BlockReader, index: int, items: Iterable[Any]
) -> Iterator[str]:
    """Check that training can work on this host, then train on one partition.

    Yield the worker's report for the driver program. Raise SetupError if this host has no Aeron
    library, and NetworkError if UDP to or from the controller is blocked.
    """
    forget_spark_archive_importers()
    require_library()
    require_controller_reachable(job.route, get_task_context())
    free_last_model()
    return train_partition(unpickle_without_collecting(job.job), blocks, index, items)
