"""Workers at work: the processes of one fit, by partition; who dies or stands still is replaced."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterator
from multiprocessing import connection

from sparkstrom.base.errors import TrainingError
from sparkstrom.local.orders import WorkerAnswer, WorkerOrder
from sparkstrom.local.worker_pool import WorkerPool, WorkerProcess

log = logging.getLogger(__name__)

FAILURES_MAX = 4  # of one partition, as Spark has it for tasks
LOOK_S = 0.1
DIED_TOO_OFTEN = "the process of worker {} has died {} times; the last one {}"


class WorkersAtWork:
    """As many as the pool has."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._there: dict[int, WorkerProcess] = {}
        self._failures = Counter[int]()
        self.attempts = Counter[int]()  # the number of each partition's, from 0

    def begin(self) -> range:
        """Start who is missing; return the partitions. Raise SetupError where none can be."""
        everybody = range(len(self._pool))
        for partition in everybody:
            self._there[partition] = self._pool.living(partition)
        return everybody

    def send(self, partition: int, order: WorkerOrder) -> None:
        """Where it cannot be sent, ``answers`` says so."""
        with self._pool.while_open():
            self._there[partition].send(order)

    def answers(self, of: Collection[int]) -> Iterator[tuple[int, WorkerAnswer | None]]:
        """What comes from these in ``LOOK_S``; None: this one has to be replaced."""
        waited = {self._there[partition].connection: partition for partition in of}
        with self._pool.while_open():
            for ready in connection.wait(list(waited), LOOK_S):
                partition = waited.pop(ready)  # type: ignore[call-overload]
                yield partition, self._there[partition].receive()
            for partition in waited.values():
                if self._there[partition].stands_still:
                    yield partition, None

    def failed(self, partition: int) -> bool:
        """Count it; was it the last time?"""
        self._failures[partition] += 1
        return self._failures[partition] >= FAILURES_MAX

    def replace(self, partition: int) -> str:
        """Another process in its place, for another attempt; return how the former one ended.

        Raise TrainingError after too many.
        """
        process = self._there[partition]
        with self._pool.while_open():
            how, tail = process.last_words(stood_still=process.stands_still)
        log.warning("worker %d is replaced, its process %s", partition, how)
        if self.failed(partition):
            raise TrainingError(DIED_TOO_OFTEN.format(partition, FAILURES_MAX, how), trace=tail)
        self._pool.drop(partition)
        self.again(partition)
        return how

    def again(self, partition: int) -> None:
        """Another attempt, in the same process if that lives."""
        self.attempts[partition] += 1
        self._there[partition] = self._pool.living(partition)

    def drop(self, partitions: Collection[int]) -> None:
        """End these, whatever they do."""
        for partition in list(partitions):
            self._pool.drop(partition)
