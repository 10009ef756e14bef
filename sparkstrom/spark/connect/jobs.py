"""Run jobs over Spark Connect, decode their results, and upload values for their tasks.

Each task function here calls a function that jobs of a SparkContext also run, and encodes its
results. Results are pickled and split into numbered rows, because Spark Connect sends results in
messages of a few MiB that contain whole rows. Importing this module compiles no kernels.

Spark Connect has no broadcast variables. Small values are part of each job that needs them. Large
values are artifacts of the session: files that are uploaded once and that each executor fetches
once. Artifacts exist as long as their session, so an artifact with the same content is reused.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import tempfile
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparkstrom.base.child_processes import count_cores
from sparkstrom.base.errors import TrainingError
from sparkstrom.fit.supervisor import find_cause, setup_error_in
from sparkstrom.spark.controller.driver_messages import pack_message, unpack_message
from sparkstrom.spark.executor.entry_points import get_task_context, pickle_by_value
from sparkstrom.spark.jobs import RunningTask, SparkJob
from sparkstrom.worker.task_environment import read_executor_info

if TYPE_CHECKING:
    import pyarrow as pa


ROW_BYTES_MAX = 1 << 20  # Spark Connect's messages have about 4 MiB, and at most 128 MiB
RESULT_SCHEMA = "task long, number long, part binary"


def make_batch(schema: str, *columns: list[Any]) -> pa.RecordBatch:
    """Return a record batch with the columns of ``schema``, given one list per column.

    ``schema`` is text like ``RESULT_SCHEMA``: the last column is binary, all others are long.
    """
    import pyarrow as pa

    names = [field.split()[0] for field in schema.split(", ")]
    *numbers, content = columns
    arrays = [pa.array(column, pa.int64()) for column in numbers]
    return pa.RecordBatch.from_arrays([*arrays, pa.array(content, pa.binary())], names=names)


def encode_results(values: Iterable[Any], task: int) -> Iterator[pa.RecordBatch]:
    """Yield the values of one task as record batches of ``RESULT_SCHEMA``.

    Rows are numbered from 1. The number of a row is negative if its value continues in the next
    row.
    """
    number = 0
    for value in values:
        content = pack_message(value)
        begins = range(0, len(content), ROW_BYTES_MAX)
        for begin in begins:
            part = content[begin : begin + ROW_BYTES_MAX]
            last = begin == begins[-1]
            number += 1
            yield make_batch(RESULT_SCHEMA, [task], [number if last else -number], [part])


def decode_results(rows: Iterable[Any]) -> list[Any]:
    """Return the values that ``encode_results`` encoded in all tasks, ordered by task."""
    values, parts = [], []
    for row in sorted(rows, key=lambda row: (row.task, abs(row.number))):
        parts.append(bytes(row.part))
        if row.number > 0:  # the last of its value
            values.append(unpack_message(b"".join(parts)))
            parts = []
    return values


ArrowBatches = Iterable["pa.RecordBatch"]


def get_partition_id() -> int:
    """Return the index of the partition that the running Spark task computes."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None, "runs in a Spark task only"
    return context.partitionId()


def run_rowless_task(
    task: Callable[[Iterable[Any]], Iterator[Any]], batches: ArrowBatches
) -> Iterator[Any]:
    """Run ``task`` and yield its encoded results. The rows in ``batches`` are ignored."""
    for _ in batches:
        pass
    return encode_results(task(()), get_partition_id())


def run_partition_task(
    task: Callable[[int, ArrowBatches], Iterable[Any]], batches: ArrowBatches
) -> Iterator[Any]:
    """Run ``task`` with the index and the rows of a partition; yield its encoded results."""
    index = get_partition_id()
    return encode_results(task(index, batches), index)


def count_rows(batches: ArrowBatches) -> Iterator[Any]:
    """Count the rows of a partition; yield the encoded count."""
    return encode_results([sum(batch.num_rows for batch in batches)], get_partition_id())


def identify_executor(items: Iterable[Any]) -> Iterator[tuple[str, int]]:
    """Yield (name, cores) of the executor that runs this task; the name is its host and process."""
    place, executor = get_task_context(), read_executor_info()
    cores = count_cores() if executor.id == "driver" else executor.cores
    yield f"{place.host}/{place.jvm}", cores


@dataclass(slots=True)
class ConnectJob(SparkJob):
    """A job of a Spark Connect session, executed in its own thread.

    ``context`` is the session, and ``group`` is the tag used to cancel the job. Spark Connect
    reports nothing about tasks.
    """

    def start(self) -> None:
        """Submit the job from a new thread."""
        self.thread = threading.Thread(target=self._run, name=f"{self.group}-job", daemon=True)
        self.thread.start()

    def join_group(self) -> None:
        """Make ``cancel`` also cancel the jobs that the calling thread starts from now on."""
        self.context.addTag(self.group)

    def cancel(self) -> None:
        """Cancel the job if it is still running."""
        if self.running:
            self.context.interruptTag(self.group)

    def count_tasks(self) -> tuple[int | None, int]:
        """Return (None, 0), as Spark Connect reports neither running nor failed tasks."""
        return None, 0

    def task_errors(self, first_attempt: int = 0) -> list[str]:
        """Return []: Spark Connect does not report errors of individual tasks."""
        return []

    def executors(self) -> set[str]:
        """Return an empty set: Spark Connect does not report which executors run tasks."""
        return set()

    def running_tasks(self, executors: Collection[str]) -> list[RunningTask]:
        """Return []: Spark Connect does not report which tasks run."""
        return []

    def stage_attempts(self) -> list[tuple[int, int, int]]:
        """Return []: Spark Connect does not report stages."""
        return []

    def killed_for_memory(self) -> list[str]:
        """Return []: Spark Connect does not report killed containers."""
        return []


def collect_later(frame: Any) -> Callable[[], list[Any]]:
    """Return a function that computes a DataFrame of encoded results and returns the values."""
    return lambda: decode_results(frame.collect())


def run_short_job(frame: Any, doing: str) -> list[Any]:
    """Compute a DataFrame of encoded results in this thread; return the values that tasks yielded.

    Raise SetupError if a task cannot run on its machine, and TrainingError for other failures; its
    message begins with ``doing``, such as "counting rows".
    """
    from pyspark.errors import PySparkException

    try:
        return decode_results(frame.collect())
    except PySparkException as error:
        cause = find_cause(str(error))
        if (refusal := setup_error_in(cause)) is not None:
            raise refusal from None
        raise TrainingError(f"{doing} failed: {cause}", trace=str(error)) from None


INLINE_BYTES_MAX = 4 << 20  # larger values are uploaded; a job's plan may have up to 128 MiB
CACHED_VALUES_MAX = 2  # number of uploaded values that a Python worker caches


@dataclass(frozen=True, slots=True)
class InlineValue:
    """A handle that contains its (small) value, in this program and in pickles."""

    value: Any

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the value by value, because the user's script may define the value's class."""
        return _unpickle_inline, (pickle_by_value(self.value),)


def _unpickle_inline(content: bytes) -> InlineValue:
    """Return the handle for a pickled value."""
    return InlineValue(pickle.loads(content))


class UploadedValue:
    """A handle of a large value in an uploaded file. A pickle contains only the file's name.

    Args:
        name: Name of the file.
        value: The value, in the program that uploaded it; None to read the file when needed.
    """

    def __init__(self, name: str, value: Any = None) -> None:
        self.name, self._value = name, value

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the file's name."""
        return UploadedValue, (self.name,)

    @property
    def value(self) -> Any:
        """The value, read from this machine's copy of the file if necessary."""
        return self._value if self._value is not None else _read_uploaded(self.name)


@lru_cache(CACHED_VALUES_MAX)
def _read_uploaded(name: str) -> Any:
    """Return the value in an uploaded file. Each process caches ``CACHED_VALUES_MAX`` values."""
    from pyspark import SparkFiles

    return pickle.loads(Path(SparkFiles.get(name)).read_bytes())


class ValueUploader:
    """Makes values of this program available to executors of one session, through handles."""

    def __init__(self, session: Any) -> None:
        self._session, self._uploaded = session, set[str]()

    def upload(self, value: Any) -> InlineValue | UploadedValue:
        """Return a handle whose ``value`` is ``value``, in this program and on executors.

        A large value is uploaded, unless the same content was already uploaded in this session.
        """
        content = pickle_by_value(value)
        if len(content) <= INLINE_BYTES_MAX:
            return InlineValue(value)
        name = f"sparkstrom-{hashlib.sha256(content).hexdigest()[:32]}.bin"
        if name not in self._uploaded:
            with tempfile.TemporaryDirectory(prefix="sparkstrom-") as folder:
                path = os.path.join(folder, name)
                Path(path).write_bytes(content)
                self._session.addArtifacts(path, file=True)
            self._uploaded.add(name)
        return UploadedValue(name, value)
