"""Parallel inference: one trained model, many threads that ask (DL4J's ParallelInference)."""

from __future__ import annotations

import enum
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import COUNT_MAX, check_options, member, whole
from sparkstrom.models.base import Columns, Flat, FlatModel, arrays_of
from sparkstrom.serving.generations import Generation
from sparkstrom.serving.waiting_requests import CLOSED, Request, WaitingRequests, refuse
from sparkstrom.spark.driver.options import need_seconds, options
from sparkstrom.spark.executor.inference import features_of

log = logging.getLogger(__name__)

WORKERS_MAX = 1024  # threads that run the model
ROWS_MAX = 2**31 - 1  # of one batch
FEW_ROWS = 32  # up to there a batch is filled up to a power of two, beyond to a multiple of it


class InferenceMode(enum.Enum):
    """How requests meet the model."""

    SEQUENTIAL = "sequential"  # each alone, by a worker
    BATCHED = "batched"  # those that wait together, by a worker
    INPLACE = "inplace"  # each alone, by the thread that asks


REFUSED = {
    "load_balance_mode": "a free instance is taken, whoever asks",
    "devices": "a model is where its library has put it",
}


@options(REFUSED, {}, owner="ParallelInference")
@dataclass(frozen=True, slots=True)
class ServingOptions:
    """What DL4J's builder takes. Raises UsageError naming value, reason and remedy."""

    workers: int = field(default=2, metadata=whole(1, WORKERS_MAX, unit="threads"))
    batch_limit: int = field(default=32, metadata=whole(1, ROWS_MAX, unit="rows"))
    queue_limit: int = field(default=64, metadata=whole(1, COUNT_MAX, unit="requests"))
    inference_mode: InferenceMode | str = field(
        default=InferenceMode.BATCHED, metadata=member(InferenceMode)
    )
    given: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def mode(self) -> InferenceMode:
        """However it was written."""
        return InferenceMode(self.inference_mode)


class ParallelInference:
    """Answers any number of threads with one trained model; a context, closed at its end.

    ``model``: a network that was trained (SparkNetwork, ParallelWrapper), or a model of
    sparkstrom.models with its own initial parameters, or with ``parameters`` f32[n_params].
    ``workers``: instances of the model, and threads that run them. ``batch_limit``: rows that are
    answered together; ``queue_limit``: requests that wait. Raises UsageError for what cannot be.
    """

    def __init__(self, model: Any, *, parameters: Flat | None = None, **given: Any) -> None:
        chosen = ServingOptions(**given)
        self._mode, self._workers = chosen.mode, chosen.workers
        self._rows_max = chosen.batch_limit if self._mode is InferenceMode.BATCHED else 1
        self._queue_limit = chosen.queue_limit
        self._generation = Generation(model, parameters, self._workers)
        self._waiting = WaitingRequests(chosen.queue_limit)
        self._in_place = threading.BoundedSemaphore(chosen.queue_limit + self._workers)
        self._updating = threading.Lock()
        self._closed, self._owner = False, os.getpid()
        self._threads = [
            threading.Thread(target=self._serve, args=(i,), name=f"inference {i}", daemon=True)
            for i in range(self._workers if self._mode is not InferenceMode.INPLACE else 0)
        ]
        for thread in self._threads:
            thread.start()

    def output(self, features: Any) -> Any:
        """What the model puts out for features [rows, ...]; from any thread.

        An array, or a tuple or dict of arrays for a model of several inputs; as many rows come
        back. Raises QueueFull at once where ``queue_limit`` requests wait, UsageError after
        ``close``, and what the model raises for these features, to nobody else.
        """
        if self._mode is not InferenceMode.INPLACE:
            return self.submit(features).result()
        request = Request.of(features_of(features))
        with self._place():
            return self._answered_here(request)

    def submit(self, features: Any) -> Future[Any]:
        """The same, without waiting: what the model raises is in the future.

        With INPLACE the answer is there when this returns.
        """
        request = Request.of(features_of(features))
        if self._mode is not InferenceMode.INPLACE:
            self._need_this_process()
            self._waiting.put(request)
            return request.answer
        with self._place():
            try:
                request.answer.set_result(self._answered_here(request))
            except Exception as error:
                request.answer.set_exception(error)
        return request.answer

    def update_model(self, model: Any, *, parameters: Flat | None = None) -> None:
        """Answer with another model, or other parameters, from now on.

        Requests that are being answered get the former one's answer, those that wait the new
        one's, each as a whole; none is lost. When this returns, all that is asked is answered by
        the new one.
        """
        self._need_this_process()
        if self._closed:
            raise UsageError(CLOSED)
        with self._updating:
            self._generation = Generation(model, parameters, self._workers)

    def close(self, timeout: float | None = None) -> bool:
        """Take no more requests, answer those that wait, and end the threads. Idempotent.

        ``timeout``: seconds that this may take, None: as long as the model takes. False: they are
        over, and the model has not come back from a call. Who still waits is refused then; who is
        in that call is answered if it ends, and its thread ends with the program at the latest.
        """
        if timeout is not None:
            timeout = need_seconds("timeout", timeout)
        self._closed = True
        if os.getpid() != self._owner:
            return True  # the threads, and what waits, are the other process'
        self._waiting.close()
        until_s = None if timeout is None else time.monotonic() + timeout
        for thread in self._threads:
            thread.join(None if until_s is None else max(0.0, until_s - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            return True
        for request in self._waiting.take_all():
            if request.answer.set_running_or_notify_cancel():
                _tell(request.answer.set_exception, UsageError(CLOSED))
        return False

    shutdown = close  # DL4J's name

    def __enter__(self) -> ParallelInference:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- threads ---------------------------------------------------------------------------------

    def _serve(self, worker: int) -> None:
        while requests := self._waiting.take(self._rows_max):
            wanted = [one for one in requests if one.answer.set_running_or_notify_cancel()]
            if wanted:
                _answer(self._generation.models[worker], wanted)

    def _need_this_process(self) -> None:
        """A forked one has no workers, nor gets back what threads had borrowed: it would wait."""
        if os.getpid() != self._owner:
            raise UsageError(
                f"this ParallelInference was made in process {self._owner}, and this one was forked"
                " from it: make another one here"
            )

    @contextmanager
    def _place(self) -> Iterator[None]:
        """One among those who wait or are answered in place. Raises what is refused."""
        self._need_this_process()
        if self._closed:
            raise UsageError(CLOSED)
        if not self._in_place.acquire(blocking=False):
            refuse(self._queue_limit)
        try:
            yield
        finally:
            self._in_place.release()

    def _answered_here(self, request: Request) -> Any:
        while True:
            generation = self._generation
            with generation.borrowed() as model:
                if generation is self._generation:  # not replaced while this one waited
                    return outputs_of(model, [request])[0]


def _answer(model: FlatModel, requests: Sequence[Request]) -> None:
    """Where the model fails on all together, each is asked alone, and the bad ones are told."""
    try:
        answers = outputs_of(model, requests)
    except BaseException as error:  # whatever a model raises: SystemExit would end this thread
        if len(requests) == 1:
            _tell(requests[0].answer.set_exception, error)
            return
        for request in requests:
            _answer(model, [request])
        return
    for request, outputs in zip(requests, answers, strict=True):
        _tell(request.answer.set_result, outputs)


def _tell(put: Callable[[Any], None], answer: Any) -> None:
    """Put an answer into its future, whose callbacks run here.

    Future itself logs what else they raise. SystemExit would end this thread; and Ctrl-C, which
    goes to the main thread, is none of its business.
    """
    try:
        put(answer)
    except BaseException:
        log.exception("a callback of an answer wants to end the program; this thread goes on")


def outputs_of(model: FlatModel, requests: Sequence[Request]) -> list[Any]:
    """What the model puts out for each, from one call.

    Rows are filled up with copies of the last one, so that a library that compiles for each number
    of rows does so for a few. Raise UsageError where the model puts out another number of rows.
    """
    rows = sum(request.rows for request in requests)
    filled = _filled(rows)
    outputs = model.predict(_together([request.features for request in requests], filled - rows))
    for array in arrays_of(outputs):
        if np.ndim(array) == 0 or len(array) != filled:
            raise UsageError(
                f"the model puts out {list(np.shape(array))} for {filled} rows: each row needs an "
                "output of its own"
            )
    ends = np.cumsum([request.rows for request in requests])
    parts = zip(requests, ends, strict=True)
    return [_rows_of(outputs, slice(end - one.rows, end)) for one, end in parts]


def _filled(rows: int) -> int:
    if rows < FEW_ROWS:
        return 1 << (rows - 1).bit_length()
    return -(-rows // FEW_ROWS) * FEW_ROWS


def _together(parts: Sequence[Columns], more: int) -> Columns:
    first = parts[0]
    columns = [list(column) for column in zip(*map(arrays_of, parts), strict=True)]
    joined = [_joined(column, more) for column in columns]
    if isinstance(first, dict):
        return dict(zip(first, joined, strict=True))
    return tuple(joined) if isinstance(first, tuple) else joined[0]


def _joined(arrays: Sequence[NDArray[Any]], more: int) -> NDArray[Any]:
    return np.concatenate([*arrays, np.repeat(arrays[-1][-1:], more, axis=0)])


def _rows_of(outputs: Any, part: slice) -> Any:
    """These rows of each output, as memory of their own."""
    if isinstance(outputs, dict):
        return {name: array[part].copy() for name, array in outputs.items()}
    if isinstance(outputs, tuple | list):
        return tuple(array[part].copy() for array in outputs)
    return outputs[part].copy()
