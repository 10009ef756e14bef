"""Define ParallelInference, which serves one trained model to many threads, like DL4J's class.

    with ParallelInference(network, workers=4, batch_limit=64) as inference:
        outputs = inference.output(features)

Requests wait in a bounded queue. Worker threads take them from it, each with its own instance of
the model; all instances share one copy of the parameters, unless predictions change them.
``InferenceMode`` selects whether a worker combines waiting requests into one batch or runs each of
them alone, or whether the calling thread runs the model itself, without a queue.
"""

from __future__ import annotations

import copy
import enum
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, NoReturn

import numpy as np

from sparkstrom.base.errors import QueueFull, UsageError
from sparkstrom.base.option_types import COUNT_MAX, check_options, member, whole
from sparkstrom.data.column_selection import features_to_arrays
from sparkstrom.models.base import (
    Columns,
    Flat,
    FlatModel,
    MayChangeParameters,
    arrays_of,
    count_rows,
    explain_invalid_model,
    get_buffers,
    load_buffers,
    map_columns,
)
from sparkstrom.models.output_interpretation import list_outputs
from sparkstrom.options.common import option_class, require_seconds

log = logging.getLogger(__name__)

WORKERS_MAX = 1024
ROWS_MAX = 2**31 - 1  # maximum value of batch_limit
PADDING_ROWS = 32  # smaller batches are padded to a power of two, others to a multiple of this


class InferenceMode(enum.Enum):
    """How requests are grouped, and which thread runs the model."""

    SEQUENTIAL = "sequential"  # one request at a time, in a worker thread
    BATCHED = "batched"  # waiting requests together, in a worker thread
    INPLACE = "inplace"  # one request at a time, in the calling thread


# Options of DL4J's class that do not exist here, with the reason.
REFUSED = {
    "load_balance_mode": "every request takes a free instance",
    "devices": "a model is where its library has put it",
}


@option_class(REFUSED, {}, owner="ParallelInference")
@dataclass(frozen=True, slots=True)
class ServingOptions:
    """The options of ``ParallelInference``, named as in DL4J's builder; explained in that class.

    Raises:
        UsageError: A value is out of range, or an option is unknown.
    """

    workers: int = field(default=2, metadata=whole(1, WORKERS_MAX, unit="threads"))
    batch_limit: int = field(default=32, metadata=whole(1, ROWS_MAX, unit="rows"))
    queue_limit: int = field(default=64, metadata=whole(1, COUNT_MAX, unit="requests"))
    inference_mode: InferenceMode | str = field(
        default=InferenceMode.BATCHED, metadata=member(InferenceMode)
    )
    # Names of the options that the caller passed.
    given: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Raise UsageError if an option is out of range."""
        check_options(self)


class ParallelInference:
    """Predicts with one trained model for any number of threads.

    Used in a ``with`` statement, the object is closed when the block ends.

    Args:
        model: A trained network (SparkNetwork or ParallelWrapper), or a model of
            sparkstrom.models.
        parameters: float32[n_params]. None means the network's parameters, or the model's initial
            parameters.
        workers: Number of instances of the model. Each has its own thread, except in mode INPLACE.
        batch_limit: Maximum number of rows in one batch of the mode BATCHED. A request with more
            rows is run alone.
        queue_limit: Maximum number of waiting requests; further ones raise QueueFull.
        inference_mode: How requests are grouped; see ``InferenceMode``.

    Raises:
        UsageError: An option is unknown or out of range, or ``model`` or ``parameters`` is invalid.
    """

    def __init__(self, model: Any, *, parameters: Flat | None = None, **options: Any) -> None:
        chosen = ServingOptions(**options)
        self._mode, self._workers = InferenceMode(chosen.inference_mode), chosen.workers
        self._rows_max = chosen.batch_limit if self._mode is InferenceMode.BATCHED else 1
        self._queue_limit = chosen.queue_limit
        self._pool = ModelPool(model, parameters, self._workers)
        self._waiting = RequestQueue(chosen.queue_limit)
        self._inline_slots = threading.BoundedSemaphore(chosen.queue_limit + self._workers)
        self._update_lock = threading.Lock()
        self._closed, self._owner = False, os.getpid()
        self._threads = [
            threading.Thread(target=self._run_worker, args=(i,), name=f"inference {i}", daemon=True)
            for i in range(self._workers if self._mode is not InferenceMode.INPLACE else 0)
        ]
        for thread in self._threads:
            thread.start()

    def output(self, features: Any) -> Any:
        """Return the model's outputs for ``features``, once they are computed. Thread-safe.

        Args:
            features: An array [rows, ...], or for a model with several inputs a tuple or dictionary
                of such arrays.

        Returns:
            The outputs: an array with one entry per row, or a tuple or dictionary of such arrays.

        Raises:
            QueueFull: ``queue_limit`` requests are already waiting.
            UsageError: This object is closed, or the features are invalid.
            Exception: Any exception that the model raises for these features.
        """
        if self._mode is not InferenceMode.INPLACE:
            return self.submit(features).result()
        request = InferenceRequest.from_features(features_to_arrays(features))
        with self._inline_slot():
            return self._answer_inline(request)

    def submit(self, features: Any) -> Future[Any]:
        """Request a prediction; return a future of the outputs, or of the model's exception.

        ``features``, QueueFull and UsageError are as in ``output``. In the mode INPLACE, this
        method runs the model, so that the returned future is already complete.
        """
        request = InferenceRequest.from_features(features_to_arrays(features))
        if self._mode is not InferenceMode.INPLACE:
            self._check_process()
            self._waiting.put(request)
            return request.answer
        with self._inline_slot():
            try:
                request.answer.set_result(self._answer_inline(request))
            except Exception as error:
                request.answer.set_exception(error)
        return request.answer

    def update_model(self, model: Any, *, parameters: Flat | None = None) -> None:
        """Replace the model and its parameters while requests are served.

        The former model answers running requests, and the new model answers waiting and later
        requests. No request is lost, and no request gets outputs of both models.

        Args:
            model: As in the constructor. To replace only the parameters, pass the former object
                again, with new ``parameters`` or, for a network, after further training.
            parameters: As in the constructor.

        Raises:
            UsageError: This object is closed, or ``model`` or ``parameters`` is invalid.
        """
        self._check_process()
        if self._closed:
            raise UsageError(CLOSED_TEXT)
        with self._update_lock:
            self._pool = ModelPool(model, parameters, self._workers)

    def close(self, timeout: float | None = None) -> bool:
        """Refuse further requests, answer waiting requests, and end the threads. Idempotent.

        Args:
            timeout: Maximum number of seconds to wait; None: as long as the model takes.

        Returns:
            True if all threads have ended, or if this is a forked process, which has none. False if
            a call of the model has not returned in time; then waiting requests fail with
            UsageError, and running requests are answered when the call returns.
        """
        if timeout is not None:
            timeout = require_seconds("timeout", timeout)
        self._closed = True
        if os.getpid() != self._owner:
            return True  # a forked copy: threads and requests belong to the parent process
        self._waiting.close()
        until_s = None if timeout is None else time.monotonic() + timeout
        for thread in self._threads:
            thread.join(None if until_s is None else max(0.0, until_s - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            return True
        for request in self._waiting.take_all():
            if request.answer.set_running_or_notify_cancel():
                _complete_future(request.answer.set_exception, UsageError(CLOSED_TEXT))
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

    def _run_worker(self, worker: int) -> None:
        """Answer requests with instance number ``worker`` until the queue is closed and empty.

        Each worker thread runs this.
        """
        while requests := self._waiting.take(self._rows_max):
            active = [
                request for request in requests if request.answer.set_running_or_notify_cancel()
            ]
            if active:
                _answer_requests(self._pool.models[worker], active)

    def _check_process(self) -> None:
        """Raise UsageError in a forked process, which has none of the worker threads."""
        if os.getpid() != self._owner:
            raise UsageError(
                f"this ParallelInference was made in process {self._owner}, and this one was forked"
                " from it: create another one here"
            )

    @contextmanager
    def _inline_slot(self) -> Iterator[None]:
        """Count an INPLACE request during the ``with`` block.

        Raise QueueFull if there are too many, or UsageError if this object cannot be used any more.
        """
        self._check_process()
        if self._closed:
            raise UsageError(CLOSED_TEXT)
        if not self._inline_slots.acquire(blocking=False):
            raise_queue_full(self._queue_limit)
        try:
            yield
        finally:
            self._inline_slots.release()

    def _answer_inline(self, request: InferenceRequest) -> Any:
        """Return the outputs for a request, computed in the calling thread.

        If ``update_model`` replaces the model while this thread waits, the new model is used.
        """
        while True:
            pool = self._pool
            with pool.borrow() as model:
                if pool is self._pool:  # not replaced while this one waited
                    return predict_requests(model, [request])[0]


class ModelPool:
    """Instances of one model that share one copy of its parameters.

    If predictions change parameters temporarily, each instance has a copy of its own. Each instance
    is used by one thread at a time.

    Args:
        trained: A network or a model.
        parameters: float32[n_params]. None means the network's parameters, or the model's initial
            parameters.
        instances: Number of instances.

    Raises:
        UsageError: ``trained`` is not a model, or the parameters have the wrong shape or dtype.
    """

    def __init__(self, trained: Any, parameters: Flat | None, instances: int) -> None:
        network = hasattr(trained, "parameters") and hasattr(trained, "model")
        model = trained.model if network else trained
        if (why := explain_invalid_model(model)) is not None:
            raise UsageError(f"{why}; or a network that was trained, which has a model")
        if parameters is None:
            parameters = trained.parameters if network else model.initial()
        self.parameters = np.array(parameters)
        if self.parameters.shape != (model.n_params,) or self.parameters.dtype != "float32":
            raise UsageError(
                f"parameters are {self.parameters.dtype}{list(self.parameters.shape)}: this model "
                f"has float32[{model.n_params}]"
            )
        buffers = get_buffers(model) if network else b""
        self.models = [self._copy_model(model, buffers) for _ in range(instances)]
        self._lock = threading.Lock()
        self._free = list(self.models)
        self._waiting: deque[queue.SimpleQueue[FlatModel]] = deque()  # threads, longest wait first

    def _copy_model(self, model: FlatModel, buffers: bytes) -> FlatModel:
        """Return a copy of the model, bound to the parameters, and load its ``buffers``.

        Buffers are the model's state other than parameters, encoded; b"" if there is none.
        """
        copied = copy.deepcopy(model)
        copied.bind(self.parameters)
        if isinstance(copied, MayChangeParameters) and copied.changes_parameters():
            copied.bind(self.parameters.copy())
        load_buffers(copied, buffers)
        return copied

    @contextmanager
    def borrow(self) -> Iterator[FlatModel]:
        """Yield an instance that this thread alone uses during the ``with`` block.

        If all are in use, wait for one; threads get instances in the order in which they asked.
        """
        model = self._acquire()
        try:
            yield model
        finally:
            self._release(model)

    def _acquire(self) -> FlatModel:
        """Return a free instance, which is then reserved; wait for one if all are in use."""
        with self._lock:
            if self._free:
                return self._free.pop()
            handover: queue.SimpleQueue[FlatModel] = queue.SimpleQueue()
            self._waiting.append(handover)
        try:
            return handover.get()
        except BaseException:  # Ctrl-C: pass on an instance that may have arrived
            with self._lock:
                is_waiting = handover in self._waiting
                if is_waiting:
                    self._waiting.remove(handover)
            if not is_waiting:
                self._release(handover.get())
            raise

    def _release(self, model: FlatModel) -> None:
        """Pass an instance to the thread that has waited longest, or mark it free."""
        with self._lock:
            if not self._waiting:
                self._free.append(model)
                return
            handover = self._waiting.popleft()
        handover.put(model)


CLOSED_TEXT = "this ParallelInference is closed: create another one"


def raise_queue_full(limit: int) -> NoReturn:
    """Raise QueueFull with a message that the queue already holds ``limit`` requests."""
    raise QueueFull(
        f"queue_limit={limit}: the queue is full, so this request is refused: try again later, or "
        "set more workers, a larger batch_limit or a longer queue"
    )


@dataclass(eq=False, slots=True)
class InferenceRequest:
    """One request for predictions.

    Attributes:
        features: An array [rows, ...], or a tuple or dictionary of arrays.
        rows: Number of rows.
        kind: Requests with equal kinds can be concatenated into one batch.
        answer: Future of the model's outputs.
    """

    features: Columns
    rows: int
    kind: object  # names, shapes and dtypes of the features
    answer: Future[Any] = field(default_factory=Future)

    @classmethod
    def from_features(cls, features: Columns) -> InferenceRequest:
        """Return a new request. Raise UsageError for a scalar, no rows, or unequal lengths."""
        arrays = arrays_of(features)
        if any(array.ndim == 0 for array in arrays):
            raise UsageError("features are a single number: give an array [rows, ...]")
        lengths = {len(array) for array in arrays}
        if len(lengths) != 1 or 0 in lengths:
            shapes = [list(array.shape) for array in arrays]
            raise UsageError(f"features of shape {shapes}: give at least one row, as many of each")
        names = tuple(features) if isinstance(features, dict) else None
        kind = names, tuple((array.shape[1:], array.dtype) for array in arrays)
        return cls(features, count_rows(features), (type(features), kind))


class RequestQueue:
    """A thread-safe queue of at most ``limit`` requests, which are taken from it in batches."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._waiting: deque[InferenceRequest] = deque()
        self._changed = threading.Condition()
        self._closed = False

    def put(self, request: InferenceRequest) -> None:
        """Append a request. Raise QueueFull if the queue is full, UsageError if it is closed."""
        with self._changed:
            if self._closed:
                raise UsageError(CLOSED_TEXT)
            if len(self._waiting) >= self._limit:
                self._drop_cancelled()
            if len(self._waiting) >= self._limit:
                raise_queue_full(self._limit)
            self._waiting.append(request)
            self._changed.notify()

    def _drop_cancelled(self) -> None:
        """Remove cancelled requests, and wake threads that are waiting for them."""
        cancelled = {request for request in self._waiting if request.answer.cancelled()}
        for request in cancelled:
            request.answer.set_running_or_notify_cancel()  # wakes ``concurrent.futures.wait``
        self._waiting = deque(request for request in self._waiting if request not in cancelled)

    def take(self, rows_max: int) -> list[InferenceRequest]:
        """Wait for requests, then take and return a batch; return [] if closed and empty.

        The batch consists of the oldest request and others of the same kind, with at most
        ``rows_max`` rows in total. A larger request is a batch by itself.
        """
        with self._changed:
            while not self._waiting:
                if self._closed:
                    return []
                self._changed.wait()
            first = self._waiting.popleft()
            taken, rows = [first], first.rows
            others: list[InferenceRequest] = []
            while self._waiting and rows < rows_max:
                request = self._waiting.popleft()
                if request.kind == first.kind and rows + request.rows <= rows_max:
                    taken.append(request)
                    rows += request.rows
                else:
                    others.append(request)
            self._waiting.extendleft(reversed(others))
            if self._waiting:
                self._changed.notify()
            return taken

    def take_all(self) -> list[InferenceRequest]:
        """Take and return all waiting requests without waiting."""
        with self._changed:
            taken = list(self._waiting)
            self._waiting.clear()
            return taken

    def close(self) -> None:
        """Refuse further requests. Waiting requests can still be taken."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


def _answer_requests(model: FlatModel, requests: Sequence[InferenceRequest]) -> None:
    """Run the model on a batch of requests and complete their futures.

    If the model fails for the batch, each request is run alone, so that only invalid requests fail.
    """
    try:
        answers = predict_requests(model, requests)
    except BaseException as error:  # whatever a model raises: SystemExit would end this thread
        if len(requests) == 1:
            _complete_future(requests[0].answer.set_exception, error)
            return
        for request in requests:
            _answer_requests(model, [request])
        return
    for request, outputs in zip(requests, answers, strict=True):
        _complete_future(request.answer.set_result, outputs)


def _complete_future(put: Callable[[Any], None], answer: Any) -> None:
    """Complete a future: ``put`` is its method ``set_result`` or ``set_exception``.

    The future's callbacks run in this thread. The future itself logs their ordinary exceptions.
    SystemExit and KeyboardInterrupt are logged here, because they would end this thread.
    """
    try:
        put(answer)
    except BaseException:
        log.exception("a callback of an answer tried to end the program; this thread continues")


def predict_requests(model: FlatModel, requests: Sequence[InferenceRequest]) -> list[Any]:
    """Run the model once on the rows of all requests; return the outputs of each request.

    The batch is padded with copies of its last row, so that a library that compiles code for each
    number of rows compiles only a few times. Raise UsageError if the model does not return arrays
    with one output per row.
    """
    rows = sum(request.rows for request in requests)
    padded_rows = _count_padded_rows(rows)
    outputs = model.predict(
        _concatenate_features([request.features for request in requests], padded_rows - rows)
    )
    list_outputs(outputs, padded_rows)
    ends = np.cumsum([request.rows for request in requests])
    parts = zip(requests, ends, strict=True)
    return [_slice_outputs(outputs, slice(end - request.rows, end)) for request, end in parts]


def _count_padded_rows(rows: int) -> int:
    """Return the number of rows to pad a batch to; see ``PADDING_ROWS``."""
    if rows < PADDING_ROWS:
        return 1 << (rows - 1).bit_length()
    return -(-rows // PADDING_ROWS) * PADDING_ROWS


def _concatenate_features(batches: Sequence[Columns], padding: int) -> Columns:
    """Return the features of several requests, with the last row repeated ``padding`` times."""
    first = batches[0]
    columns = [list(column) for column in zip(*map(arrays_of, batches), strict=True)]
    joined = [
        np.concatenate([*column, np.repeat(column[-1][-1:], padding, axis=0)]) for column in columns
    ]
    if isinstance(first, dict):
        return dict(zip(first, joined, strict=True))
    return tuple(joined) if isinstance(first, tuple) else joined[0]


def _slice_outputs(outputs: Any, rows: slice) -> Any:
    """Return a copy of a range of rows of each output."""
    columns = tuple(outputs) if isinstance(outputs, list) else outputs
    return map_columns(lambda array: array[rows].copy(), columns)
