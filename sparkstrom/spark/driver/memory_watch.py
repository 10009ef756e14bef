"""Memory watch: says what to set as soon as a container was killed for its memory.

Spark replaces the executor and the fit goes on, so without it people would see a lost worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from sparkstrom.runtime.fit_state import Progress
from sparkstrom.spark.driver.fit_listeners import FitDone, FitListener
from sparkstrom.spark.driver.spark_job import SparkJob

LOOK_S = 2.0  # a look is some questions to the JVM


class MemoryWatch(FitListener):
    """Warns of each such container, unless the same was said of another."""

    def __init__(self, job: SparkJob, warn: Callable[[str], None]) -> None:
        self._job, self._warn = job, warn
        self._due_s = 0.0
        self._seen: list[tuple[int, int, int]] = []
        self._said: set[str] = set()

    def on_progress(self, progress: Progress) -> None:
        """Look now and then, and further only where tasks have failed since."""
        if time.monotonic() < self._due_s:
            return
        self._due_s = time.monotonic() + LOOK_S
        newest = self._job.newest()
        if newest != self._seen and any(attempt or failed for _, attempt, failed in newest):
            self._look()
        self._seen = newest

    def on_fit_end(self, end: FitDone) -> None:
        """Those since the last look."""
        if self._job.newest() != self._seen:
            self._look()

    def _look(self) -> None:
        for text in self._job.killed_for_memory():
            if text not in self._said:
                self._said.add(text)
                self._warn(text)
