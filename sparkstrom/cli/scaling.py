"""`sparkstrom scaling`: how many workers pay, from step time, parameters, bandwidth and latency."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from sparkstrom.base.errors import UsageError
from sparkstrom.base.units import parse_count, parse_duration, parse_rate

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

    n_params, step_s, encoding_s = _of_the_work(args)
    work = Work(
        n_params=n_params,
        step_s=step_s,
        density=_read("density", args.density, _density),
        link_bits_s=_read("link", args.link, parse_rate),
        latency_s=_read("latency", args.latency, parse_duration),
        fan_out=args.fan_out,
        spread=args.spread,
        encoding_s=encoding_s,
    )
    scaling = scaling_of(work, _read("workers", args.workers, _workers))
    print(json.dumps(scaling.to_dict()) if args.json else text_of_scaling(scaling))
    return 0


def _of_the_work(args: argparse.Namespace) -> tuple[int, float, float | None]:
    """Parameters, seconds of a step, seconds of an update's encoding: given, or measured."""
    n_params, step_s, encoding_s = None, None, None
    if args.measure is not None:
        from sparkstrom.spark.driver.step_measurement import measure_script

        found = measure_script(args.measure, _read("density", args.density, _density))
        n_params, step_s, encoding_s = found.n_params, found.step_s, found.encoding_s
    if args.params is not None:
        given = _read("params", args.params, parse_count)
        encoding_s = encoding_s if given == n_params else None  # was of an update of another size
        n_params = given
    if args.step is not None:
        step_s = _read("step", args.step, parse_duration)
    if args.encoding is not None:
        encoding_s = _read("encoding", args.encoding, parse_duration)
    if n_params is None or step_s is None:
        missing = "--params" if n_params is None else "--step"
        raise UsageError(f"{missing} is not given: give it, or --measure with a script that has it")
    return n_params, step_s, encoding_s


def _read(flag: str, text: str, parse: Callable[[str], T]) -> T:
    try:
        return parse(text)
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
