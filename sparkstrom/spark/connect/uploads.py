"""Uploads: values on their way to executors through Spark Connect, which has no broadcasts.

What is small travels with each job that needs it. What is large is an artifact of the session: a
file that is sent once, in pieces, and that each executor fetches once. Spark Connect removes
artifacts with their session only, so one of the same content is used again.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from sparkstrom.spark.driver.pickling import packed

INLINE_MAX = 4 << 20  # bytes in a job's plan, of which Spark Connect takes 128 MiB at most
KEPT_MAX = 2  # values that a Python worker has at hand


@dataclass(frozen=True, slots=True)
class Inline:
    """The value itself."""

    value: Any

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened_inline, (packed(self.value),)


def _opened_inline(content: bytes) -> Inline:
    return Inline(pickle.loads(content))


class Uploaded:
    """A file of the session; here the value, too."""

    def __init__(self, name: str, value: Any = None) -> None:
        self.name, self._value = name, value

    def __reduce__(self) -> tuple[Any, ...]:
        return Uploaded, (self.name,)

    @property
    def value(self) -> Any:
        """Read from this machine's copy, where it is not at hand."""
        return self._value if self._value is not None else _read(self.name)


@lru_cache(KEPT_MAX)
def _read(name: str) -> Any:
    from pyspark import SparkFiles

    return pickle.loads(Path(SparkFiles.get(name)).read_bytes())


class Uploads:
    """Of one session."""

    def __init__(self, session: Any) -> None:
        self._session, self._there = session, set[str]()

    def handle(self, value: Any) -> Inline | Uploaded:
        """Whose ``value`` it is, here and on executors."""
        content = packed(value)
        if len(content) <= INLINE_MAX:
            return Inline(value)
        name = f"sparkstrom-{hashlib.sha256(content).hexdigest()[:32]}.bin"
        if name not in self._there:
            with tempfile.TemporaryDirectory(prefix="sparkstrom-") as folder:
                path = os.path.join(folder, name)
                Path(path).write_bytes(content)
                self._session.addArtifacts(path, file=True)
            self._there.add(name)
        return Uploaded(name, value)
