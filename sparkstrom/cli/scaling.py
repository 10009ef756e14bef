"""The command `sparkstrom scaling`: predict how training speed grows with the number of workers."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sparkstrom.base.descriptors import redirect_stdout_to_stderr
from sparkstrom.base.errors import UsageError
from sparkstrom.base.units import parse_count, parse_duration, parse_option, parse_rate

if TYPE_CHECKING:
    from sparkstrom.planning.scaling import ScalingInputs

WORKERS_MAX = 100_000  # largest number of workers for which to predict
NO_UPDATES = (
    "--from {}: no worker of that rehearsal sent updates, so it has no density: give --density, or"
    " rehearse with two workers or more"
)
DEFAULTS = {"density": "1e-3", "link": "1gbit", "latency": "0.2ms", "spread": "0"}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command ``scaling`` with its arguments."""
    parser = subparsers.add_parser(
        "scaling",
        help="estimate how far training scales, compared with a dense all-reduce",
        description="Estimate time per step, efficiency and staleness by number of workers"
        " (formula: docs/scaling.md). Write times as 300ms or 0.3s, rates as 1gbit.",
    )
    add = parser.add_argument
    add("--params", metavar="N", help="number of parameters of the model, such as 25e6")
    add("--step", metavar="TIME", help="time of one worker alone for a minibatch, such as 300ms")
    add(
        "--density",
        help=f"fraction of the parameters in an update (default: {DEFAULTS['density']})",
    )
    add(
        "--link",
        metavar="RATE",
        help=f"rate of each host's link in each direction (default: {DEFAULTS['link']})",
    )
    add(
        "--latency",
        metavar="TIME",
        help=f"latency in one direction (default: {DEFAULTS['latency']})",
    )
    add(
        "--workers",
        default="2..64",
        help="numbers of workers: a range, or a list such as 2,4,8 (default: %(default)s)",
    )
    add(
        "--fan-out",
        type=int,
        default=8,
        metavar="N",
        help="most children of a node in a mesh (default: %(default)s)",
    )
    add(
        "--spread",
        help=f"standard deviation of step times / their mean (default: {DEFAULTS['spread']})",
    )
    add(
        "--encoding",
        default=None,
        metavar="TIME",
        help="time to encode an update (default: estimated from --params)",
    )
    add(
        "--measure",
        type=Path,
        metavar="SCRIPT.py",
        help="measure parameters, step and encoding with the `model` and `batch` (features, "
        "labels) that this script defines",
    )
    add(
        "--from",
        type=Path,
        dest="rehearsal",
        metavar="REHEARSAL.json",
        help="output of sparkstrom rehearse --json, from which to take the values of options that"
        " are not given: parameters, step, spread, density, encoding, link and latency",
    )
    add("--json", action="store_true", help="print one JSON document with all figures")


def run(args: argparse.Namespace) -> int:
    """Print the prediction for each number of workers; return 0.

    Raise UsageError for invalid values.
    """
    from sparkstrom.planning.scaling import ScalingInputs, format_scaling, predict_scaling

    found = {} if args.rehearsal is None else _read_rehearsal(args.rehearsal)
    if args.density is None and found.get("density") == "0.0":
        raise UsageError(NO_UPDATES.format(args.rehearsal))
    _fill_in_flags(args, found)
    n_params = parse_option("params", args.params, parse_count)
    step_s = parse_option("step", args.step, parse_duration)
    if args.measure is None and None in (n_params, step_s):
        missing = "--params" if n_params is None else "--step"
        raise UsageError(f"{missing} is required, or --measure with a script that defines it")
    inputs = ScalingInputs(
        n_params=1 if n_params is None else n_params,  # until it is measured
        step_s=1.0 if step_s is None else step_s,
        density=parse_option("density", args.density, _parse_density),
        link_bits_s=parse_option("link", args.link, parse_rate),
        latency_s=parse_option("latency", args.latency, parse_duration),
        fan_out=args.fan_out,
        spread=parse_option("spread", args.spread, float),
        encoding_s=parse_option("encoding", args.encoding, parse_duration),
    )
    counts = parse_option("workers", args.workers, _parse_worker_counts)
    if args.measure is not None:
        inputs = _fill_in_measurements(inputs, args.measure, n_params, step_s)
    scaling = predict_scaling(inputs, counts)
    print(json.dumps(scaling.to_dict()) if args.json else format_scaling(scaling))
    return 0


def _read_rehearsal(path: Path) -> dict[str, str]:
    """Return flag -> value from a rehearsal's JSON file; raise UsageError for any other file."""
    try:
        figures = json.loads(path.read_text(encoding="utf-8"))
        conditions = figures["conditions"]
        times = conditions["times"]
        flags = {
            "params": str(figures["n_params"]),
            "density": str(figures["density"]),
            "step": str(times["step_s"]),
            "spread": str(times["jitter"]),
            "encoding": str(times["encode_s"]),
            "link": f"{conditions['link_bits_s']:.0f}bit",
            "latency": str(conditions["latency_s"]),
        }
    except OSError as error:
        raise UsageError(f"--from {path}: {error.strerror}; name a file that exists") from None
    except (ValueError, KeyError, TypeError):
        raise UsageError(
            f"--from {path}: it is not a rehearsal; write one with sparkstrom rehearse SCRIPT.py"
            " --json > rehearsal.json"
        ) from None
    if figures["density"] is None:
        raise UsageError(
            f"--from {path}: that fit trains in rounds, which sparkstrom scaling does not predict;"
            " rehearse it with more workers"
        )
    return flags


def _fill_in_flags(args: argparse.Namespace, found: dict[str, str]) -> None:
    """Set flags that were not given to their values in ``found``, or else to their defaults."""
    for name, value in (DEFAULTS | found).items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def _fill_in_measurements(
    inputs: ScalingInputs, script: Path, n_params: int | None, step_s: float | None
) -> ScalingInputs:
    """Return the inputs, with values that the user did not give measured on a script's model.

    ``n_params`` and ``step_s`` are None if the user did not give them. The script's output goes to
    stderr.
    """
    from sparkstrom.planning.scaling import measure_script

    with redirect_stdout_to_stderr():
        found = measure_script(script, inputs.density)
    n_params = found.n_params if n_params is None else n_params
    encoding_s = inputs.encoding_s
    if encoding_s is None and n_params == found.n_params:  # for another size it is estimated
        encoding_s = found.encoding_s
    step_s = found.step_s if step_s is None else step_s
    return replace(inputs, n_params=n_params, step_s=step_s, encoding_s=encoding_s)


def _parse_density(text: str) -> float:
    """Parse a density. Raise ValueError unless 0 < density <= 1."""
    try:
        density = float(text)
    except ValueError:
        density = 0.0
    if not 0 < density <= 1:
        raise ValueError("must be a number above 0 and at most 1, such as 1e-3")
    return density


def _parse_worker_counts(text: str) -> list[int]:
    """Parse 2..64 (all numbers from 2 to 64) or 2,4,8. Raise ValueError for any other form."""
    first, dots, last = text.partition("..")
    try:
        ends = [parse_count(number) for number in ([first, last] if dots else text.split(","))]
    except ValueError:
        ends = [0]
    if min(ends) < 1 or max(ends) > WORKERS_MAX or (dots and ends[0] > ends[1]):
        raise ValueError(f"write 2..64 or 2,4,8, with numbers from 1 to {WORKERS_MAX:,}")
    return list(range(ends[0], ends[1] + 1)) if dots else ends
