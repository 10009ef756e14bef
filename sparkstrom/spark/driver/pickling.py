"""Pickling: can this model travel to executors, and if not, what of it cannot?

What is pickled for a task has the fit's key, so it is kept out of logs.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

from sparkstrom.base.errors import UsageError
from sparkstrom.models.base import no_model
from sparkstrom.models.own_words import said_by

DEPTH_MAX = 8  # attributes of attributes

Pack = Callable[[Any], bytes]

# Loggers that print what is sent to Spark, at level DEBUG: py4j's, and Spark Connect's.
SENDING_LOGGERS = ("py4j.clientserver", "py4j.java_gateway", "pyspark.sql.connect.logging")
# In py4j's commands bytes are a line: j, and base64. In protobuf's text functions are quoted.
PICKLED = re.compile(
    r"""(?: ^j | \\nj ) [A-Za-z0-9+/=]+ | \b command: \s* "(?: [^"\\] | \\. )*" """,
    re.MULTILINE | re.VERBOSE,
)


class _WithoutTasks(logging.Filter):
    """Takes pickled tasks out of records."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno <= logging.DEBUG:
            message = record.getMessage()
            if PICKLED.search(message):
                record.msg, record.args = PICKLED.sub("<pickled, not logged>", message), None
        return True


_without_tasks = _WithoutTasks()


def keep_tasks_out_of_logs() -> None:
    """Have no pickled task in this program's log, at any level. Call before one is sent."""
    for name in SENDING_LOGGERS:
        logging.getLogger(name).addFilter(_without_tasks)  # once, however often it is called


def packed(value: Any) -> bytes:
    """By Spark's own pickler, which sends what a user's script defines by value."""
    from pyspark import cloudpickle

    pickler: Any = cloudpickle
    content: bytes = pickler.dumps(value)
    return content


def need_model(model: Any, pack: Pack = packed) -> None:
    """Raise UsageError for what is no model of ours, or cannot travel."""
    if (why := no_model(model)) is not None:
        raise UsageError(why)
    need_picklable(model, pack)


def need_picklable(model: Any, pack: Pack = packed) -> None:
    """Raise UsageError naming the part of the model that ``pack`` could not send."""
    error = _error_of(model, pack)
    if error is None:
        return
    if isinstance(error, UsageError):  # the model's own words
        raise error
    path, error = _culprit(model, type(model).__name__, error, pack)
    raise UsageError(
        f"{path} cannot be pickled, which is how a model gets to executors"
        f" ({said_by(error)}): make it where it is used, or leave locks, files, sockets,"
        " generators and handles out of the model"
    ) from error


def _error_of(value: Any, pack: Pack) -> Exception | None:
    """What the pickler says."""
    try:
        pack(value)
    except Exception as error:  # whatever a user's __reduce__ raises
        return error
    return None


def _culprit(value: Any, path: str, error: Exception, pack: Pack) -> tuple[str, Exception]:
    """The deepest part that cannot be pickled, and why."""
    for _ in range(DEPTH_MAX):
        for name, part in _parts(value):
            inner = _error_of(part, pack)
            if inner is not None:
                value, path, error = part, path + name, inner
                break
        else:
            break
    return path, error


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        yield from ((f"[{name!r}]", part) for name, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{number}]", part) for number, part in enumerate(value))
    else:
        yield from ((f".{name}", part) for name, part in getattr(value, "__dict__", {}).items())
