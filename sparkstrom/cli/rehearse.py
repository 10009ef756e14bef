"""The command `sparkstrom rehearse`: simulate a script's fit before paying for its workers."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from sparkstrom.base.descriptors import redirect_stdout_to_stderr
from sparkstrom.base.errors import UsageError
from sparkstrom.base.units import parse_count, parse_option


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command ``rehearse`` with its arguments."""
    parser = subparsers.add_parser(
        "rehearse",
        help="simulate a script's fit with k workers in virtual time: loss, seconds, bytes, best k",
        description="Run a script unchanged until it calls fit, simulate that fit with each number"
        " of workers, and exit (see docs/rehearse.md). The script's own options follow after --, as"
        " in: sparkstrom rehearse --workers 1,4 train.py -- --lr 0.1",
    )
    add = parser.add_argument
    add("script", type=Path, metavar="SCRIPT.py", help="script to submit later")
    add("arguments", nargs="*", metavar="ARGUMENT", help="argument of the script; repeatable")
    add(
        "--workers",
        default="1,4,16",
        metavar="K,...",
        help="numbers of workers to simulate (default: %(default)s)",
    )
    add(
        "--scaling",
        metavar="RULE,...",
        help="scaling rules to compare: sequential, limited, ddp (default: the script's)",
    )
    add("--measure", action="store_true", help="measure steps, encoding and links on executors")
    add(
        "--link",
        metavar="RATE",
        help="rate of each host's link in each direction (default: 1gbit, or measured)",
    )
    add("--latency", metavar="TIME", help="latency in one direction (default: 1ms, or measured)")
    add("--step", metavar="TIME", help="mean time of a step, such as 120ms (default: measured)")
    add(
        "--jitter",
        metavar="SHARE",
        help="standard deviation of step times / their mean (default: measured, or 0 with --step)",
    )
    add(
        "--encode",
        metavar="TIME",
        help="processor time to encode an update (default: measured, or estimated with --step)",
    )
    add(
        "--apply",
        metavar="TIME",
        help="processor time to apply an update (default: measured, or estimated with --step)",
    )
    add(
        "--straggler",
        metavar="NxSPEED",
        help="number of slow workers and their speed, such as 1x0.5: one at half speed"
        " (default: none)",
    )
    add("--kill", default="0", metavar="N", help="number of workers that die (default: none)")
    add("--to-loss", metavar="LOSS", help="loss to reach (default: see docs/rehearse.md)")
    add(
        "--rows",
        default="20000",
        metavar="N",
        help="number of rows in a random sample of the data (default: %(default)s)",
    )
    add(
        "--seed",
        default="0",
        metavar="N",
        help="seed of the sample, the placement of rows and the step times (default: %(default)s)",
    )
    add("--save", metavar="PAGE.html", help="write an HTML page with plots")
    add("--json", action="store_true", help="print all figures as one JSON document")


def run(args: argparse.Namespace) -> int:
    """Rehearse the script and print the result; return 0.

    Raise UsageError for invalid values, a page that cannot be written, or a script without a fit.
    What the script prints goes to stderr.
    """
    from sparkstrom.rehearsal.rehearse import RehearsalRequest
    from sparkstrom.rehearsal.script import limit_left_threads, rehearse_script

    options = _read_options(args)
    RehearsalRequest.from_options(**options)  # raises before the script begins
    page = None if args.save is None else _check_page(args.save)
    with redirect_stdout_to_stderr():
        rehearsal = rehearse_script(args.script, args.arguments, options)
    print(json.dumps(rehearsal.to_dict()) if args.json else rehearsal)
    if page is not None:
        rehearsal.save(page)
    limit_left_threads()
    return 0


def _check_page(path: str) -> str:
    """Return the absolute path of a page, because the script may change the working directory.

    Raise UsageError if the page cannot be written.
    """
    page = os.path.abspath(path)
    folder = os.path.dirname(page)
    reason = ""
    if os.path.isdir(page):
        reason = "it is a directory"
    elif not os.path.isdir(folder):
        reason = f"there is no directory {folder}"
    elif not os.access(page if os.path.exists(page) else folder, os.W_OK):
        reason = "it is not writable"
    if reason:
        raise UsageError(f"--save {path!r}: {reason}; name a file in a writable directory")
    return page


def _read_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the rehearsal's options that were given, by name. Raise UsageError for bad numbers."""
    options: dict[str, Any] = {
        "workers": parse_option("workers", args.workers, _parse_counts),
        "link": args.link,
        "latency": args.latency,
        "measure": args.measure or None,
        "kill": parse_option("kill", args.kill, parse_count),
        "rows": parse_option("rows", args.rows, parse_count),
        "seed": parse_option("seed", args.seed, parse_count),
        "jitter": parse_option("jitter", args.jitter, float),
        "to_loss": parse_option("to-loss", args.to_loss, float),
    }
    texts = {name: getattr(args, name) for name in ("step", "encode", "apply", "straggler")}
    options |= texts | {"scaling": args.scaling or ()}
    return {name: value for name, value in options.items() if value is not None}


def _parse_counts(text: str) -> tuple[int, ...]:
    """Parse numbers of workers, such as 1,4,16. Raise ValueError for anything else."""
    try:
        return tuple(parse_count(number) for number in text.split(","))
    except ValueError:
        raise ValueError("write numbers of workers with commas, such as 1,4,16") from None
