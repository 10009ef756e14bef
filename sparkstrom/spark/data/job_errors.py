"""Job errors: what a failed Spark job says, in one line; Java's and Python's traces behind it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from sparkstrom.base.errors import TrainingError, first_line

OURS = "sparkstrom."  # the line of one of our own errors, which are as long as they must be
CALLING = "An error occurred while calling "  # py4j; what happened is on the next line
JAVA = re.compile(r"^: (?:[\w.$]+: )?")  # its class
LOST = "ExecutorLostFailure "  # Spark names jobs, stages and tasks before it comes to this
NEWEST = " Most recent failure reason:"  # on the lines behind it


def cause_of(text: str) -> str:
    """What Spark's long error says happened: the Python exception's own line, where there is one.

    A Python traceback stands before the first Java frame, its exception's lines at its end.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    java = next((i for i, line in enumerate(lines) if line.strip().startswith("at ")), len(lines))
    said = lines[:java]
    if any("Traceback (most recent call last)" in line for line in said):
        frames = [i for i, line in enumerate(said) if line.startswith('  File "')]
        after = said[frames[-1] + 1 :] if frames else said[-1:]
        return _cut(next((line for line in after if not line.startswith(" ")), said[-1]))
    if len(said) > 1 and said[0].startswith(CALLING):
        said = [JAVA.sub("", said[1])]
    if not said:
        return "no reason given"
    line = said[0][said[0].find(LOST) :] if LOST in said[0] else said[0]
    return _cut(line.partition(NEWEST)[0])


def _cut(line: str) -> str:
    line = line.strip()
    return line if line.startswith(OURS) else first_line(line)


@contextlib.contextmanager
def in_one_line(doing: str) -> Iterator[None]:
    """Around a Spark job. Raise TrainingError for what fails on an executor, traces behind it."""
    from py4j.protocol import Py4JJavaError

    try:
        yield
    except Py4JJavaError as error:
        text = str(error)
        raise TrainingError(f"{doing} failed: {cause_of(text)}", trace=text) from None
