"""Prefetching: order, number of items in advance, threads, exceptions, and stopping early."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from sparkstrom.data.row_store import prefetch

LIMIT_S = 10.0


class CountingIterable:
    """An iterable that counts the drawn items, and records the threads that drew them."""

    def __init__(self, items: int) -> None:
        self.items, self.drawn = items, 0
        self.threads: set[str] = set()
        self.far = threading.Event()  # four items are drawn

    def __iter__(self) -> Iterator[int]:
        for i in range(self.items):
            self.threads.add(threading.current_thread().name)
            self.drawn += 1
            if self.drawn == 4:
                self.far.set()
            yield i


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_prefetch_yields_all_items_in_order(ahead: int) -> None:
    assert list(prefetch(CountingIterable(20), ahead)) == list(range(20))


def test_prefetch_draws_limited_items_ahead_and_close_ends_thread() -> None:
    """Prefetching 2 items draws 4 of them while one is used; closing ends the thread."""
    counted = CountingIterable(100)
    drawing = prefetch(counted, 2)
    assert next(drawing) == 0
    assert counted.far.wait(10)  # one is taken, two are queued, one waits for room in the queue
    assert counted.drawn == 4
    assert counted.threads == {"sparkstrom-prefetching"}
    drawing.close()
    assert counted.drawn <= 5
    assert "sparkstrom-prefetching" not in {thread.name for thread in threading.enumerate()}


def test_prefetch_of_zero_draws_items_in_caller_thread() -> None:
    """With a count of 0, items are drawn when they are taken, in the caller's thread."""
    counted = CountingIterable(100)
    drawing = prefetch(counted, 0)
    assert next(drawing) == 0
    assert counted.drawn == 1
    assert counted.threads == {threading.current_thread().name}
    drawing.close()


@pytest.mark.parametrize("ahead", [0, 2])
def test_iterator_exception_is_raised_after_preceding_items(ahead: int) -> None:
    """An exception of the iterator is raised after the items that precede it."""

    def broken() -> Iterator[int]:
        yield 1
        raise OSError("the disk is gone")

    drawing = prefetch(broken(), ahead)
    assert next(drawing) == 1
    with pytest.raises(OSError, match="the disk is gone"):
        next(drawing)


class BlockingIterable:
    """An iterable that yields one item, then blocks until ``let_go`` is set."""

    def __init__(self) -> None:
        self.waits, self.let_go = threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[int]:
        yield 0
        self.waits.set()
        self.let_go.wait(LIMIT_S)
        yield 1


@pytest.fixture
def blocking_iterable() -> Iterator[BlockingIterable]:
    """A blocking iterable; after the test it is unblocked, and its thread ends."""
    made = BlockingIterable()
    yield made
    made.let_go.set()
    for thread in threading.enumerate():
        if thread.name == "sparkstrom-prefetching":
            thread.join(LIMIT_S)
            assert not thread.is_alive()


def test_close_does_not_wait_for_blocked_iterator(blocking_iterable: BlockingIterable) -> None:
    """Closing the generator does not wait for an iterator that blocks."""
    drawing = prefetch(blocking_iterable, 2)
    assert next(drawing) == 0
    assert blocking_iterable.waits.wait(LIMIT_S)
    began_s = time.monotonic()
    drawing.close()
    assert time.monotonic() - began_s < LIMIT_S / 2


def test_check_cancelled_exception_interrupts_blocked_iterator(
    blocking_iterable: BlockingIterable,
) -> None:
    """An exception of ``check_cancelled`` ends the iteration while the iterator blocks."""

    def look() -> None:
        if blocking_iterable.waits.is_set():
            raise OSError("nobody wants it")

    drawing = prefetch(blocking_iterable, 2, look)
    with pytest.raises(OSError, match="nobody wants it"):
        list(drawing)
    assert not blocking_iterable.let_go.is_set()


def test_check_cancelled_runs_once_per_item_without_thread() -> None:
    """Without a thread, ``check_cancelled`` is called once per item."""
    looks: list[int] = []
    assert list(prefetch(range(5), 0, lambda: looks.append(1))) == list(range(5))
    assert len(looks) == 5
