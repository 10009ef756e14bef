"""`sparkstrom scaling`: how many workers pay, from step time, parameters, bandwidth and latency."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sparkstrom.base.errors import UsageError
from sparkstrom.base.units import parse_count, parse_duration, parse_rate

if TYPE_CHECKING:
    from sparkstrom.spark.driver.scalability import Work

T = TypeVar("T")
WORKERS_MAX = 100_000


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the sub-command."""
    parser = subparsers.add_parser(
        "scaling",
        help="time per step, efficiency and staleness of 2, 4, ... workers, and how many pay",
        description="The formula is docs/scaling.md. Times as 300ms or 0.3s, rates as 1gbit.",
    )
    add = parser.add_argument
    add("--params", metavar="N", help="parameters of the model, such as 25e6")
    add("--step", metavar="TIME", help="of one worker alone for one minibatch, such as 300ms")
    add("--density", default="1e-3", help="entries of an update per parameter (%(default)s)")
    add("--link", default="1gbit", metavar="RATE", help="of each host, each way (%(default)s)")
    add("--latency", default="0.2ms", metavar="TIME", help="one way (%(default)s)")
    add("--workers", default="2..64", help="2..64, or 2,4,8 (default: %(default)s)")
    add("--fan-out", type=int, default=8, metavar="N", help="of a mesh (%(default)s)")
    add("--spread", type=float, default=0.0, help="of step times: standard deviation over mean")
    add("--encoding", default=None, metavar="TIME", help="of an update (default: by parameters)")
    add(
        "--measure",
        type=Path,
        metavar="SCRIPT.py",
        help="a script that leaves `model` and `batch`, (features, labels): parameters, step and "
        "encoding are measured with them",
    )
    add("--json", action="store_true", help="one JSON document on stdout, with all numbers")


def run(args: argparse.Namespace) -> int:
    """Print what so many workers come to. Raise UsageError for what cannot be."""
    from sparkstrom.spark.driver.scalability import Work, scaling_of
    from sparkstrom.spark.driver.scalability_page import text_of_scaling

    n_params = _read("params", args.params, parse_count)
    step_s = _read("step", args.step, parse_duration)
    if args.measure is None and None in (n_params, step_s):
        missing = "--params" if n_params is None else "--step"
        raise UsageError(f"{missing} is not given: give it, or --measure with a script that has it")
    work = Work(
        n_params=1 if n_params is None else n_params,  # until it is measured
        step_s=1.0 if step_s is None else step_s,
        density=_read("density", args.density, _density),
        link_bits_s=_read("link", args.link, parse_rate),
        latency_s=_read("latency", args.latency, parse_duration),
        fan_out=args.fan_out,
        spread=args.spread,
        encoding_s=_read("encoding", args.encoding, parse_duration),
    )
    counts = _read("workers", args.workers, _workers)
    if args.measure is not None:
        work = _measured(work, args.measure, n_params, step_s)
    scaling = scaling_of(work, counts)
    print(json.dumps(scaling.to_dict()) if args.json else text_of_scaling(scaling))
    return 0


def _measured(work: Work, script: Path, n_params: int | None, step_s: float | None) -> Work:
    """With what a script's model takes, where it is not given. What it prints goes to stderr."""
    from sparkstrom.spark.driver.step_measurement import measure_script

    with contextlib.redirect_stdout(sys.stderr):
        found = measure_script(script, work.density)
    n_params = found.n_params if n_params is None else n_params
    encoding_s = work.encoding_s
    if encoding_s is None and n_params == found.n_params:  # another size's is reckoned
        encoding_s = found.encoding_s
    step_s = found.step_s if step_s is None else step_s
    return replace(work, n_params=n_params, step_s=step_s, encoding_s=encoding_s)


def _read(flag: str, text: str | None, parse: Callable[[str], T]) -> Any:
    """None where the flag is not given. Raise UsageError naming it where it cannot be read."""
    try:
        return None if text is None else parse(text)
    except ValueError as error:
        raise UsageError(f"--{flag} {text!r}: {error}") from None


def _density(text: str) -> float:
    try:
        density = float(text)
    except ValueError:
        density = 0.0
    if not 0 < density <= 1:
        raise ValueError("must be a number above 0 and at most 1, as a rule 1e-3")
    return density


def _workers(text: str) -> list[int]:
    """2..64 is all of them, 2,4,8 are these."""
    first, dots, last = text.partition("..")
    try:
        ends = [parse_count(number) for number in ([first, last] if dots else text.split(","))]
    except ValueError:
        ends = [0]
    if min(ends) < 1 or max(ends) > WORKERS_MAX or (dots and ends[0] > ends[1]):
        raise ValueError(f"write 2..64 or 2,4,8, with numbers from 1 to {WORKERS_MAX:,}")
    return list(range(ends[0], ends[1] + 1)) if dots else ends
