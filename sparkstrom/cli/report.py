"""``sparkstrom report``: a run log as one page for a browser."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from sparkstrom.base.errors import UsageError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The command's arguments."""
    parser = subparsers.add_parser("report", help="a run log as one HTML page with plots")
    parser.add_argument(
        "log",
        nargs="?",
        type=Path,
        help="a run log, or a directory, whose newest is taken (default: sparkstrom-runs, or "
        "what SPARKSTROM_RUNS names)",
    )
    parser.add_argument(
        "-o", "--output", type=Path, help="the page (default: beside the log, ending in .html)"
    )
    parser.add_argument("--fit", type=int, metavar="N", help="only the fit N of the log, from 1")


def run(args: argparse.Namespace) -> int:
    """Write the page and print its place. UsageError says what to do where that fails."""
    from sparkstrom.observe.reporting.report_page import report
    from sparkstrom.observe.reporting.run_history import read_history
    from sparkstrom.spark.driver.run_log import DIRECTORY, VARIABLE

    named = args.log or Path(os.environ.get(VARIABLE) or DIRECTORY)
    log = newest(named) if named.is_dir() else named
    page = args.output or log.with_suffix(".html")
    if page.resolve() == log.resolve():
        raise UsageError(f"-o {page} is the log itself; name another file for the page")
    made = report(read_history(log), args.fit)
    try:
        page.write_text(made, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{page} cannot be written ({error.strerror}); name another place with -o"
        ) from error
    print(page)
    return 0


def newest(directory: Path) -> Path:
    """The log in it that was written to last."""
    logs = list(directory.glob("*.jsonl"))
    if not logs:
        raise UsageError(
            f"{directory} holds no run log (*.jsonl); name a file, or another directory"
        )
    return max(logs, key=lambda log: log.stat().st_mtime)
