"""Interrupts: Ctrl-C in the middle of a fit.

Spark's handler asks the JVM to cancel all jobs from inside the signal handler, whatever call to the
JVM it interrupts: a RuntimeError about reentrant calls, and 40 lines of Py4J. During a fit Ctrl-C
raises KeyboardInterrupt and nothing else; the fit then ends its own job, at a place of its own.
Where it arrives during a call to the JVM, Py4J logs its own traceback, which is left out.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
from collections.abc import Iterator
from typing import Any

PY4J_INTERRUPTED = "KeyboardInterrupt while sending command."


@contextlib.contextmanager
def plain_interrupts(context: Any) -> Iterator[None]:
    """In the block Ctrl-C raises KeyboardInterrupt; what Spark was asked to do then is cancelled.

    A handler of the user's own stays in its place.
    """
    before = signal.getsignal(signal.SIGINT)
    logging.getLogger().addFilter(_is_not_py4js)  # Py4J logs it by the root logger
    replaced = threading.current_thread() is threading.main_thread() and _is_sparks(before)
    if replaced:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        context.cancelAllJobs()  # as Spark's own handler does
        raise
    finally:
        logging.getLogger().removeFilter(_is_not_py4js)
        if replaced:
            signal.signal(signal.SIGINT, before)


def _is_not_py4js(record: logging.LogRecord) -> bool:
    return record.msg != PY4J_INTERRUPTED


def _is_sparks(handler: Any) -> bool:
    return getattr(handler, "__module__", "").startswith("pyspark.")
