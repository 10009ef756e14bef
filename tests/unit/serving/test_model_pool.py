"""Tests of the pool of model copies: the longest waiting thread is first, and no copy is lost."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from sparkstrom.models import DenseNetwork
from sparkstrom.serving import ModelPool
from tests.unit.serving.conftest import DEADLINE_S, wait_until_threads_wait


@pytest.fixture
def model_pool() -> ModelPool:
    return ModelPool(DenseNetwork([3, 2], seed=1), None, 1)


def test_longest_waiting_thread_borrows_next(model_pool: ModelPool) -> None:
    """A thread that returns a copy and asks again at once is behind all waiting threads."""
    order: list[Any] = []

    def ask(number: int) -> None:
        with model_pool.borrow():
            order.append(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    with model_pool.borrow():
        for number, thread in enumerate(threads):
            thread.start()
            wait_until_threads_wait(model_pool, number + 1)
    with model_pool.borrow():
        order.append("again")
    for thread in threads:
        thread.join(DEADLINE_S)
    assert order == [0, 1, 2, 3, "again"]


class Interruption(BaseException):
    """An exception like ``KeyboardInterrupt``."""


class InterruptedQueue:
    """A queue whose ``get`` is interrupted, either before or after it was handed a model."""

    def __init__(self, generation: ModelPool, *, handed: bool) -> None:
        self._pool, self._handed, self._things = generation, handed, list[Any]()

    def put(self, thing: Any) -> None:
        self._things.append(thing)

    def get(self) -> Any:
        if self._handed and not self._things:
            self._pool._release(self._pool.models[0])
            raise Interruption
        if self._things:
            return self._things.pop()
        raise Interruption


@pytest.mark.parametrize("handed", [False, True])
def test_interrupted_thread_loses_no_model_copy(
    model_pool: ModelPool, monkeypatch: pytest.MonkeyPatch, handed: bool
) -> None:
    """A thread that is interrupted while it waits loses no copy, even if it was handed one."""
    taken = model_pool._acquire()
    queue = InterruptedQueue(model_pool, handed=handed)
    monkeypatch.setattr("sparkstrom.serving.queue.SimpleQueue", lambda: queue)
    with pytest.raises(Interruption), model_pool.borrow():
        pass
    assert not model_pool._waiting
    if not handed:
        model_pool._release(taken)
    assert model_pool._free == model_pool.models
