"""Connect jobs: the Spark job of a fit, asked for over Spark Connect; and short ones.

A job is an operation of the session, in a thread of its own, and has a tag by which it can be
ended. What its tasks do meanwhile Spark Connect does not tell: that is known by what they say
themselves to the controller, and by the job's end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sparkstrom.base.errors import TrainingError
from sparkstrom.spark.connect.binary_rows import of_rows
from sparkstrom.spark.data.job_errors import cause_of
from sparkstrom.spark.driver.spark_job import RunningTask, SparkJob
from sparkstrom.spark.driver.start_watch import refusal_of


@dataclass(slots=True)
class ConnectJob(SparkJob):
    """``context`` is the session, ``group`` the tag of its operation."""

    def start(self) -> None:
        self.thread = threading.Thread(target=self._run, name=f"{self.group}-job", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.context.addTag(self.group)  # of this thread
            self.reports = self.runner()
        except Exception as error:  # handed to the main thread, which decides what it means
            self.error = error

    def cancel(self) -> None:
        if self.running:
            self.context.interruptTag(self.group)

    def tasks(self) -> tuple[int | None, int]:
        return None, 0

    def task_errors(self) -> list[str]:
        return []

    def executors(self) -> set[str]:
        return set()

    def running_tasks(self) -> list[RunningTask]:
        return []

    def newest(self) -> list[tuple[int, int, int]]:
        return []

    def killed_for_memory(self) -> list[str]:
        return []


def collected(frame: Any) -> Callable[[], list[Any]]:
    """What its tasks yielded, as a job's runner."""
    return lambda: of_rows(frame.collect())


def answers_of(frame: Any, doing: str) -> list[Any]:
    """Of a short job, in this thread. Raise SetupError where a task refused its machine."""
    from pyspark.errors import PySparkException

    try:
        return of_rows(frame.collect())
    except PySparkException as error:
        cause = cause_of(str(error))
        if (refusal := refusal_of(cause)) is not None:
            raise refusal from None
        raise TrainingError(f"{doing} failed: {cause}", trace=str(error)) from None
