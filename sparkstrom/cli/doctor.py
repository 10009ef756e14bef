"""The command `sparkstrom doctor`: check whether training would work on a cluster."""

from __future__ import annotations

import argparse
import json
import sys

from sparkstrom.base.errors import UsageError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command ``doctor`` with its arguments."""
    parser = subparsers.add_parser(
        "doctor",
        help="check whether training would work on a cluster",
        description="Start a Spark session, run small jobs on every executor, and report problems "
        "with remedies. Exit code 1: training would fail; 2: wrong arguments.",
    )
    parser.add_argument("--master", help="URL of Spark's master (default: as for spark-submit)")
    parser.add_argument(
        "--conf",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="Spark option, as for spark-submit, or spark.sparkstrom.* option; repeatable",
    )
    parser.add_argument(
        "--wait",
        type=float,
        default=60.0,
        metavar="S",
        help="longest wait for executors, in seconds (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the report as one JSON document")


def run(args: argparse.Namespace) -> int:
    """Examine the cluster and print a report; return 1 if training would fail, else 0.

    Raise UsageError for invalid arguments.
    """
    from sparkstrom.spark.doctor.checks import format_report
    from sparkstrom.spark.doctor.examination import ExaminationOptions, examine

    conf = parse_conf(args.conf)
    if not args.wait > 0:
        raise UsageError(f"--wait {args.wait}: must be a number of seconds above 0, such as 60")
    report = examine(ExaminationOptions(args.master, conf, args.wait), _print_progress)
    print(json.dumps(report.to_dict()) if args.json else format_report(report))
    return 0 if report.ok else 1


def _print_progress(text: str) -> None:
    """Print a line of progress to stderr."""
    print(f"sparkstrom doctor: {text}", file=sys.stderr, flush=True)


def parse_conf(settings: list[str]) -> dict[str, str]:
    """Parse settings KEY=VALUE like spark-submit. Raise UsageError for any other form."""
    conf = {}
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals or not key.startswith("spark."):
            raise UsageError(
                f"--conf {text!r}: write a key of Spark's and its value, such as "
                "spark.sparkstrom.network_mask=10.0.0.0/16"
            )
        conf[key] = value
    return conf
