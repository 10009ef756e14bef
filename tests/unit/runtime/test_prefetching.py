"""Prefetching: bounded, in order, ended by whoever stops, and errors arrive."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from sparkstrom.data.row_store import prefetch

LIMIT_S = 10.0


class Counted:
    """Counts what was drawn, and in which threads."""

    def __init__(self, items: int) -> None:
        self.items, self.drawn = items, 0
        self.threads: set[str] = set()
        self.far = threading.Event()  # as far as it goes before anybody takes one

    def __iter__(self) -> Iterator[int]:
        for i in range(self.items):
            self.threads.add(threading.current_thread().name)
            self.drawn += 1
            if self.drawn == 4:
                self.far.set()
            yield i


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_the_same_items_in_the_same_order(ahead: int) -> None:
    assert list(prefetch(Counted(20), ahead)) == list(range(20))


def test_so_many_are_drawn_ahead_and_no_more() -> None:
    counted = Counted(100)
    drawing = prefetch(counted, 2)
    assert next(drawing) == 0
    assert counted.far.wait(10)  # one is out, two wait, one is in hand
    assert counted.drawn == 4
    assert counted.threads == {"sparkstrom-prefetching"}
    drawing.close()
    assert counted.drawn <= 5
    assert "sparkstrom-prefetching" not in {thread.name for thread in threading.enumerate()}


def test_nothing_is_drawn_ahead_without_a_buffer() -> None:
    counted = Counted(100)
    drawing = prefetch(counted, 0)
    assert next(drawing) == 0
    assert counted.drawn == 1
    assert counted.threads == {threading.current_thread().name}
    drawing.close()


@pytest.mark.parametrize("ahead", [0, 2])
def test_what_the_iterator_raises_comes_in_its_place(ahead: int) -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise OSError("the disk is gone")

    drawing = prefetch(broken(), ahead)
    assert next(drawing) == 1
    with pytest.raises(OSError, match="the disk is gone"):
        next(drawing)


class Blocking:
    """Gives one item, and then none before it is let go."""

    def __init__(self) -> None:
        self.waits, self.let_go = threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[int]:
        yield 0
        self.waits.set()
        self.let_go.wait(LIMIT_S)
        yield 1


@pytest.fixture
def blocking() -> Iterator[Blocking]:
    """Nothing is left of it after the test."""
    made = Blocking()
    yield made
    made.let_go.set()
    for thread in threading.enumerate():
        if thread.name == "sparkstrom-prefetching":
            thread.join(LIMIT_S)
            assert not thread.is_alive()


def test_whoever_stops_does_not_wait_for_the_iterator(blocking: Blocking) -> None:
    drawing = prefetch(blocking, 2)
    assert next(drawing) == 0
    assert blocking.waits.wait(LIMIT_S)
    began_s = time.monotonic()
    drawing.close()
    assert time.monotonic() - began_s < LIMIT_S / 2


def test_a_look_that_raises_ends_it_while_the_iterator_is_waited_for(blocking: Blocking) -> None:
    def look() -> None:
        if blocking.waits.is_set():
            raise OSError("nobody wants it")

    drawing = prefetch(blocking, 2, look)
    with pytest.raises(OSError, match="nobody wants it"):
        list(drawing)
    assert not blocking.let_go.is_set()


def test_without_a_thread_each_item_is_looked_at() -> None:
    looks: list[int] = []
    assert list(prefetch(range(5), 0, lambda: looks.append(1))) == list(range(5))
    assert len(looks) == 5
