"""Prefetching: what an iterator gives is fetched in a thread while the last of it is used."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable
from typing import Any, TypeVar

T = TypeVar("T")

LOOK_S = 0.1  # how often a thread looks whether anybody still wants what it has fetched
END_S = 1.0  # for that look; a thread that waits for ``items`` is left there, and ends after it


def prefetched(
    items: Iterable[T], count: int, look: Callable[[], None] = lambda: None
) -> Generator[T]:
    """The same items, up to ``count`` of them fetched ahead; 0: none, and no thread.

    What ``items`` raises is raised in its place, and what ``look`` raises at once: it is called
    before each item and, with a thread, while none comes. Whoever stops early ends the thread by
    ``close``.
    """
    if count == 0:
        for item in items:
            look()
            yield item
        return
    fetched: queue.Queue[tuple[str, Any]] = queue.Queue(count)
    unwanted = threading.Event()
    thread = threading.Thread(
        target=_fetch, args=(items, fetched, unwanted), name="sparkstrom-prefetching", daemon=True
    )
    thread.start()
    try:
        while (found := _next(fetched, look))[0] == "item":
            yield found[1]
        if found[0] == "error":
            raise found[1]
    finally:
        unwanted.set()
        thread.join(END_S)


def _next(fetched: queue.Queue[tuple[str, Any]], look: Callable[[], None]) -> tuple[str, Any]:
    while True:
        look()
        try:
            return fetched.get(timeout=LOOK_S)
        except queue.Empty:
            continue


def _fetch(
    items: Iterable[Any], fetched: queue.Queue[tuple[str, Any]], unwanted: threading.Event
) -> None:
    last: tuple[str, Any] = ("end", None)
    try:
        for item in items:
            if not _put(("item", item), fetched, unwanted):
                return
    except BaseException as error:  # handed to who uses the items
        last = ("error", error)
    _put(last, fetched, unwanted)


def _put(
    what: tuple[str, Any], fetched: queue.Queue[tuple[str, Any]], unwanted: threading.Event
) -> bool:
    """False where nobody wants it any more."""
    while not unwanted.is_set():
        try:
            fetched.put(what, timeout=LOOK_S)
            return True
        except queue.Full:
            continue
    return False
