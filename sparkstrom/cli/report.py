"""The command `sparkstrom report`: turn the log of a training run into an HTML page with plots."""

from __future__ import annotations

import argparse
from pathlib import Path

from sparkstrom.base.errors import UsageError
from sparkstrom.base.untrusted_files import find_local_path


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command ``report`` with its arguments."""
    parser = subparsers.add_parser(
        "report",
        help="turn a run log into one HTML page with plots",
        description="Turn a run log into one HTML page with plots.",
    )
    parser.add_argument(
        "log",
        nargs="?",
        type=Path,
        help="run log, or a directory, whose newest log is taken (default: $SPARKSTROM_RUNS, or "
        "sparkstrom-runs)",
    )
    parser.add_argument(
        "-o", "--output", type=Path, help="page to write (default: the log's name with .html)"
    )
    parser.add_argument(
        "--fit", type=int, metavar="N", help="show only fit N of the log, from 1 (default: all)"
    )


def run(args: argparse.Namespace) -> int:
    """Write the page and print its path; return 0.

    Raise UsageError if the log cannot be read or the page cannot be written.
    """
    from sparkstrom.fit.listeners import RUN_LOG_DIRECTORY, find_run_log_directory
    from sparkstrom.observe.reporting.report_page import render_report
    from sparkstrom.observe.reporting.run_log_reader import read_history

    directory = find_run_log_directory() or RUN_LOG_DIRECTORY
    named = args.log or Path(find_local_path(directory) or directory)
    log = newest_log(named) if named.is_dir() else named
    page = args.output or log.with_suffix(".html")
    if page.resolve() == log.resolve():
        raise UsageError(f"-o {page} is the log itself; name another file for the page")
    html = render_report(read_history(log), args.fit)
    try:
        page.write_text(html, encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{page} cannot be written ({error.strerror}); name another place with -o"
        ) from error
    print(page)
    return 0


def newest_log(directory: Path) -> Path:
    """Return the most recently modified run log in a directory. Raise UsageError if it has none."""
    logs = [log for log in directory.glob("*.jsonl") if log.is_file()]  # no broken links
    if not logs:
        raise UsageError(
            f"{directory} holds no run log (*.jsonl); name a file, or another directory"
        )
    return max(logs, key=lambda log: log.stat().st_mtime)
