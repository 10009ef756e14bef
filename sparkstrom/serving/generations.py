"""Generations: copies of one trained model; whoever answers with one has all of it."""

from __future__ import annotations

import copy
import queue
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from sparkstrom.base.errors import UsageError
from sparkstrom.models.base import Buffered, Flat, FlatModel, no_model


class Generation:
    """So many instances of a model, one for each thread, over one copy of its parameters."""

    def __init__(self, trained: Any, parameters: Flat | None, instances: int) -> None:
        """``trained``: a network, or a model; ``parameters``: others than it has.

        Raises UsageError for what is no model, or other parameters than it has.
        """
        network = hasattr(trained, "parameters") and hasattr(trained, "model")
        model = trained.model if network else trained
        if (why := no_model(model)) is not None:
            raise UsageError(f"{why}; or a network that was trained, which has a model")
        if parameters is None:
            parameters = trained.parameters if network else model.initial()
        self.parameters = np.array(parameters)
        if self.parameters.shape != (model.n_params,) or self.parameters.dtype != "float32":
            raise UsageError(
                f"parameters are {self.parameters.dtype}{list(self.parameters.shape)}: this model "
                f"has float32[{model.n_params}]"
            )
        buffers = model.buffers_bytes() if network and isinstance(model, Buffered) else b""
        self.models = [self._instance(model, buffers) for _ in range(instances)]
        self._lock = threading.Lock()
        self._free = list(self.models)
        self._waiting: deque[queue.SimpleQueue[FlatModel]] = deque()  # the longest first

    def _instance(self, model: FlatModel, buffers: bytes) -> FlatModel:
        made = copy.deepcopy(model)
        made.bind(self.parameters)
        if buffers and isinstance(made, Buffered):
            made.load_buffers_bytes(buffers)
        return made

    @contextmanager
    def borrowed(self) -> Iterator[FlatModel]:
        """An instance that nobody else has meanwhile; who waits longest gets the next one."""
        model = self._take()
        try:
            yield model
        finally:
            self._give_back(model)

    def _take(self) -> FlatModel:
        with self._lock:
            if self._free:
                return self._free.pop()
            handed: queue.SimpleQueue[FlatModel] = queue.SimpleQueue()
            self._waiting.append(handed)
        try:
            return handed.get()
        except BaseException:  # Ctrl-C: nobody is here to take it
            with self._lock:
                is_waiting = handed in self._waiting
                if is_waiting:
                    self._waiting.remove(handed)
            if not is_waiting:
                self._give_back(handed.get())
            raise

    def _give_back(self, model: FlatModel) -> None:
        with self._lock:
            if not self._waiting:
                self._free.append(model)
                return
            handed = self._waiting.popleft()
        handed.put(model)
