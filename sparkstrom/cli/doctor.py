"""`sparkstrom doctor`: whether training would work on this cluster, and what to do where not."""

from __future__ import annotations

import argparse
import json
import sys

from sparkstrom.base.errors import UsageError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the sub-command."""
    parser = subparsers.add_parser(
        "doctor",
        help="find out on the executors whether training would work, and what to do where not",
        description="Starts a Spark session, runs small jobs on every executor and says what it "
        "finds, with remedies. Exit code 1: training would fail; 2: a wrong call.",
    )
    parser.add_argument("--master", help="Spark's master URL (default: as spark-submit has it)")
    parser.add_argument(
        "--conf",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="as spark-submit's; also spark.sparkstrom.* (may be repeated)",
    )
    parser.add_argument(
        "--wait", type=float, default=60.0, metavar="S", help="for executors (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """Examine and print; exit code 1 where training would fail."""
    from sparkstrom.spark.doctor.examining import Call, examine
    from sparkstrom.spark.doctor.report_text import text_of

    conf = parsed_conf(args.conf)
    if not args.wait > 0:
        raise UsageError(f"--wait {args.wait}: must be a number of seconds above 0, as a rule 60")
    report = examine(Call(args.master, conf, args.wait), _say)
    print(json.dumps(report.to_dict()) if args.json else text_of(report))
    return 0 if report.ok else 1


def _say(text: str) -> None:
    print(f"sparkstrom doctor: {text}", file=sys.stderr, flush=True)


def parsed_conf(given: list[str]) -> dict[str, str]:
    """KEY=VALUE as spark-submit takes them. Raise UsageError for anything else."""
    conf = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals or not key.startswith("spark."):
            raise UsageError(
                f"--conf {text!r}: write a key of Spark's and its value, such as "
                "spark.sparkstrom.network_mask=10.0.0.0/16"
            )
        conf[key] = value
    return conf
