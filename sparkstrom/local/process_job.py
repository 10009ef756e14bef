"""Process job: one fit's partitions, each with a worker process; who ends is replaced."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from sparkstrom.base.errors import SparkstromError
from sparkstrom.local.orders import WorkerAnswer, WorkerOrder
from sparkstrom.local.worker_pool import WorkerPool
from sparkstrom.local.workers_at_work import WorkersAtWork

OrderOf = Callable[[int, int], WorkerOrder]  # partition, attempt


class ProcessJob:
    """Runs until every partition has a report; as ``Fitting`` wants a job."""

    def __init__(self, pool: WorkerPool, order_of: OrderOf) -> None:
        self._workers, self._order_of = WorkersAtWork(pool), order_of
        self._missing = set[int]()  # partitions
        self._reports: dict[int, str] = {}
        self.error: Exception | None = None
        self._cancelled = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sparkstrom-processes", daemon=True)

    @property
    def reports(self) -> list[Any]:
        """Of partitions, in order, as JSON."""
        return [report for _, report in sorted(self._reports.items())]

    def start(self) -> None:
        """All at once."""
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def cancel(self) -> None:
        """End all that have no report yet."""
        self._cancelled.set()

    def wait(self, seconds: float) -> bool:
        """Until it has ended; at most so long."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def killed_for_memory(self) -> list[str]:
        """Nobody here says so."""
        return []

    # -- its thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._missing.update(self._workers.begin())
            for partition in sorted(self._missing):
                self._order(partition)
            while self._missing and not self._cancelled.is_set():
                for partition, answer in self._workers.answers(self._missing):
                    self._take(partition, answer)
        except SparkstromError as error:
            self.error = error
        finally:
            self._workers.drop(self._missing)

    def _order(self, partition: int) -> None:
        order = self._order_of(partition, self._workers.attempts[partition])
        self._workers.send(partition, order)

    def _take(self, partition: int, answer: WorkerAnswer | None) -> None:
        """Raise TrainingError where another attempt is vain."""
        if answer is not None and not answer.failure:
            self._reports[partition] = answer.report
            self._missing.remove(partition)
            return
        if answer is None:
            self._workers.replace(partition)
        elif self._workers.failed(partition) or not answer.is_superseded:
            raise answer.as_error(partition)
        else:
            self._workers.again(partition)
        self._order(partition)
