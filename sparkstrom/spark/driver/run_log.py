"""Run log: every fit leaves its events in a file of JSON lines."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from datetime import datetime
from pathlib import Path

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import shown
from sparkstrom.observe.listening.json_lines import JsonLines
from sparkstrom.protocol.common.fit_spec import FitSpec

DIRECTORY = "sparkstrom-runs"  # in the driver program's working directory
VARIABLE = "SPARKSTROM_RUNS"  # names another one; empty: no run logs
KEPT = 100  # logs in the usual directory; a log of some thousand epochs takes about 1 MB
NAME = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{16}\.jsonl")  # as run_log_of names them
TUNING = ("pyspark.ml.tuning", "pyspark.ml.connect.tuning")


def check_run_log(run_log: object) -> None:
    """Raise UsageError for what cannot name a file."""
    named = os.fspath(run_log) if isinstance(run_log, os.PathLike) else run_log
    if not (named is None or (isinstance(named, str) and "\0" not in named)):
        raise UsageError(
            f"run_log={shown(run_log)}: give the path of a file, None for a new one in {DIRECTORY},"
            ' or "" for none'
        )


def run_log_of(run_log: str | os.PathLike[str] | None, spec: FitSpec) -> JsonLines | None:
    """What writes this fit's log: into ``run_log``, or into a new file of the usual directory.

    ``None`` is the usual directory, or what the environment variable SPARKSTROM_RUNS says; there
    the oldest logs beyond ``KEPT`` are removed. Fits that a cross-validation makes have none.
    """
    if run_log is not None:
        return JsonLines(run_log) if os.fspath(run_log) else None
    directory = os.environ.get(VARIABLE, DIRECTORY)
    if not directory or is_one_of_many():
        return None
    remove_old(Path(directory), KEPT - 1)
    began = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    return JsonLines(Path(directory) / f"{began}-{spec.job:016x}.jsonl")


def remove_old(directory: Path, kept: int) -> None:
    """Remove the oldest logs that a fit has named, but ``kept``; other files are left alone."""
    with contextlib.suppress(OSError):
        names = sorted(name for name in os.listdir(directory) if NAME.fullmatch(name))
        for name in names[: max(0, len(names) - kept)]:
            (directory / name).unlink()


def is_one_of_many() -> bool:
    """Return whether pyspark's CrossValidator or TrainValidationSplit is trying parameters."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        where = frame.f_globals.get("__name__"), frame.f_code.co_name
        if where[0] in TUNING and where[1] == "singleTask":
            return True
    return False
