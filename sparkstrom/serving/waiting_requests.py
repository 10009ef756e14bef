"""Waiting requests: a bounded queue, from which those that fit together are taken together."""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NoReturn

from sparkstrom.base.errors import QueueFull, UsageError
from sparkstrom.models.base import Columns, arrays_of, rows_of

CLOSED = "this ParallelInference is closed: make another one"


def refuse(limit: int) -> NoReturn:
    """One request more than may wait."""
    raise QueueFull(
        f"queue_limit={limit}: so many requests wait, and this one is refused: ask again later, or "
        "give more workers, a larger batch_limit or a longer queue"
    )


@dataclass(eq=False, slots=True)
class Request:
    """Features [rows, ...], and where the answer goes."""

    features: Columns
    rows: int
    kind: object  # equal for requests whose rows can stand in one array
    answer: Future[Any] = field(default_factory=Future)

    @classmethod
    def of(cls, features: Columns) -> Request:
        """Raise UsageError for no rows, or for arrays of different lengths."""
        arrays = arrays_of(features)
        if any(array.ndim == 0 for array in arrays):
            raise UsageError("features are a single number: give an array [rows, ...]")
        lengths = {len(array) for array in arrays}
        if len(lengths) != 1 or 0 in lengths:
            shapes = [list(array.shape) for array in arrays]
            raise UsageError(f"features of shape {shapes}: give at least one row, as many of each")
        names = tuple(features) if isinstance(features, dict) else None
        kind = names, tuple((array.shape[1:], array.dtype) for array in arrays)
        return cls(features, rows_of(features), (type(features), kind))


class WaitingRequests:
    """At most ``limit``. Any thread may put and take."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: deque[Request] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, request: Request) -> None:
        """Raise QueueFull where so many wait, UsageError after ``close``."""
        with self._changed:
            if self._closed:
                raise UsageError(CLOSED)
            if len(self._waiting) >= self._limit:
                self._leave_out_cancelled()
            if len(self._waiting) >= self._limit:
                refuse(self._limit)
            self._waiting.append(request)
            self._changed.notify()

    def _leave_out_cancelled(self) -> None:
        gone = {one for one in self._waiting if one.answer.cancelled()}
        for one in gone:
            one.answer.set_running_or_notify_cancel()  # tells ``concurrent.futures.wait``
        self._waiting = deque(one for one in self._waiting if one not in gone)

    def take(self, rows_max: int) -> list[Request]:
        """The oldest, and others of its kind with at most ``rows_max`` rows in all; none: closed.

        One with more rows comes alone. Waits until there is one.
        """
        with self._changed:
            while not self._waiting:
                if self._closed:
                    return []
                self._changed.wait()
            first = self._waiting.popleft()
            taken, rows = [first], first.rows
            left: list[Request] = []
            while self._waiting and rows < rows_max:
                one = self._waiting.popleft()
                if one.kind == first.kind and rows + one.rows <= rows_max:
                    taken.append(one)
                    rows += one.rows
                else:
                    left.append(one)
            self._waiting.extendleft(reversed(left))
            if self._waiting:
                self._changed.notify()
            return taken

    def take_all(self) -> list[Request]:
        """All that wait now, perhaps none."""
        with self._changed:
            taken = list(self._waiting)
            self._waiting.clear()
            return taken

    def close(self) -> None:
        """No more come in; those that wait can still be taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
