"""Prefetching: what an iterator gives is fetched in a thread while the last of it is used."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterable
from typing import Any, TypeVar

T = TypeVar("T")

LOOK_S = 0.1  # how often a thread looks whether anybody still wants what it has fetched


def prefetched(items: Iterable[T], count: int) -> Generator[T]:
    """The same items, up to ``count`` of them fetched ahead; 0: none, and no thread.

    What ``items`` raises is raised in its place. Whoever stops early ends the thread by ``close``.
    """
    if count == 0:
        yield from items
        return
    fetched: queue.Queue[tuple[str, Any]] = queue.Queue(count)
    unwanted = threading.Event()
    thread = threading.Thread(
        target=_fetch, args=(items, fetched, unwanted), name="sparkstrom-prefetching", daemon=True
    )
    thread.start()
    try:
        while (found := fetched.get())[0] == "item":
            yield found[1]
        if found[0] == "error":
            raise found[1]
    finally:
        unwanted.set()
        thread.join()


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
