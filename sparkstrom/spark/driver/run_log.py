"""Run log: every fit leaves its events in a file of JSON lines."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import shown
from sparkstrom.observe.listening.json_lines import JsonLines
from sparkstrom.protocol.common.fit_spec import FitSpec

DIRECTORY = "sparkstrom-runs"  # in the driver program's working directory
VARIABLE = "SPARKSTROM_RUNS"  # names another one; empty: no run logs


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

    ``None`` is the usual directory, or what the environment variable SPARKSTROM_RUNS says.
    """
    if run_log is not None:
        return JsonLines(run_log) if os.fspath(run_log) else None
    directory = os.environ.get(VARIABLE, DIRECTORY)
    if not directory:
        return None
    began = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    return JsonLines(Path(directory) / f"{began}-{spec.job:016x}.jsonl")
