"""Tests of the pool of model copies: the longest waiting thread is first, and no copy is lost."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from sparkstrom.models import DenseNetwork
from sparkstrom.serving import ModelPool
from tests.unit.serving.conftest import DEADLINE_S, wait_for_waiting


@pytest.fixture
def generation() -> ModelPool:
    return ModelPool(DenseNetwork([3, 2], seed=1), None, 1)


def test_who_waits_longest_is_next(generation: ModelPool) -> None:
    """A thread that returns a copy and asks again at once is behind all waiting threads."""
    order: list[Any] = []

    def ask(number: int) -> None:
        with generation.borrow():
            order.append(number)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    with generation.borrow():
        for number, thread in enumerate(threads):
            thread.start()
            wait_for_waiting(generation, number + 1)
    with generation.borrow():
        order.append("again")
    for thread in threads:
        thread.join(DEADLINE_S)
    assert order == [0, 1, 2, 3, "again"]


class Interruption(BaseException):
    """An exception like ``KeyboardInterrupt``."""


class Breaking:
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
def test_who_is_interrupted_takes_none_along(
    generation: ModelPool, monkeypatch: pytest.MonkeyPatch, handed: bool
) -> None:
    """A thread that is interrupted while it waits loses no copy, even if it was handed one."""
    taken = generation._acquire()
    queue = Breaking(generation, handed=handed)
    monkeypatch.setattr("sparkstrom.serving.queue.SimpleQueue", lambda: queue)
    with pytest.raises(Interruption), generation.borrow():
        pass
    assert not generation._waiting
    if not handed:
        generation._release(taken)
    assert generation._free == generation.models
