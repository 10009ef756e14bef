"""The command line of ``benchmarks.slow_link``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import benchmarks.slow_link
from benchmarks.hosts import lacking
from benchmarks.slow_link import data
from benchmarks.slow_link.choosing import choose
from benchmarks.slow_link.figures import figures
from benchmarks.slow_link.running import Link, Narrowing, observe
from benchmarks.slow_link.systems import OURS, PEERS, is_ours
from benchmarks.slow_link.trial import Trial
from sparkstrom.base.units import parse_rate


def main() -> int:
    """Print one object or line per link, system and seed."""
    args = parsed(sys.argv[1:])
    if (reason := lacking()) is not None:
        print(f"benchmarks.slow_link: {reason}", file=sys.stderr)
        return 2
    for result in results(args):
        print(json.dumps(result) if args.json else format_result(result), flush=True)
    return 0


def parsed(arguments: list[str]) -> argparse.Namespace:
    """Return the options; exit with a message if they are wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.slow_link",
        description=benchmarks.slow_link.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rate", default=["100mbit"], type=by_comma, help="of links, as in tc")
    parser.add_argument("--systems", default=[OURS, *PEERS], type=by_comma, help="default: all")
    parser.add_argument("--hosts", type=int, default=4, help="one worker on each")
    parser.add_argument("--widths", default=["2048", "2048"], type=by_comma, help="hidden layers")
    parser.add_argument("--optimizer", default="adam", choices=sorted(data.LEARNING_RATES))
    parser.add_argument("--seeds", type=int, default=1, help="runs per link and system")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--limit-s", type=float, default=120.0, help="of training, in seconds")
    parser.add_argument("--wanted", type=float, default=0.97, help="accuracy to reach")
    parser.add_argument("--narrow", type=Narrowing.parse, help="RATE@SECONDS or RATE@SECONDS:HOST")
    parser.add_argument(
        "--learning-rates",
        default=[],
        type=by_comma,
        help="RATE for all systems, or SYSTEM=RATE,...; default: chosen from a grid",
    )
    parser.add_argument(
        "--conf", action="append", default=[], help="Spark's key=value, for sparkstrom; repeatable"
    )
    parser.add_argument(
        "--project", default=["dense"], type=by_comma, help="systems whose time is projected"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    args = parser.parse_args(arguments)
    if unknown := {name for name in args.systems if name not in PEERS and not is_ours(name)}:
        parser.error(
            f"--systems {', '.join(sorted(unknown))}: known are {OURS}, averaging-STEPS, "
            f"diloco-STEPS, {', '.join(PEERS)}"
        )
    try:
        for rate in args.rate:
            parse_rate(rate)
    except ValueError as error:
        parser.error(str(error))
    args.conf = dict(item.split("=", 1) for item in args.conf)
    return args


def by_comma(text: str) -> list[str]:
    """Return the words of a list on the command line."""
    return text.split(",")


def results(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run each system on all links, and yield the results."""
    for system in args.systems:
        trial = Trial(
            system=system,
            rate=0.0,
            seed=0,
            workers=args.hosts,
            widths=tuple(map(int, args.widths)),
            optimizer=args.optimizer,
            epochs=args.epochs,
            limit_s=args.limit_s,
            wanted=args.wanted,
        )
        given = get_given_rate(args.learning_rates, system)
        scores = choose(trial, args.conf) if given is None else {}
        trial = replace(trial, rate=next(iter(scores)) if given is None else given)
        for seed in range(args.seeds):
            for rate in args.rate:
                yield run_trial(replace(trial, seed=seed), rate, scores, args)


def get_given_rate(texts: list[str], system: str) -> float | None:
    """Return the learning rate that the command line has for a system, or None."""
    given = dict(text.rpartition("=")[::2] for text in texts)
    value = given.get(system, given.get(""))
    return None if value is None else float(value)


def run_trial(
    trial: Trial, rate: str, scores: dict[float, float], args: argparse.Namespace
) -> dict[str, Any]:
    """Train once, and project the time if the accuracy was not reached; return the result."""
    found = figures(trial, observe(Link(rate, args.narrow), [trial], args.conf))
    late = found["seconds_to"] is None and found.get("ms_per_step") is not None
    if late and trial.system in args.project and trial.system in PEERS:
        found |= project(trial, found["ms_per_step"])
    n_params = data.copy_parameters(data.make_module(trial.widths, trial.seed)).size
    return {
        "system": trial.system,
        "rate": rate,
        "narrowed": None if args.narrow is None else asdict(args.narrow),
        "seed": trial.seed,
        "hosts": trial.workers,
        "n_params": n_params,
        "optimizer": trial.optimizer,
        "learning_rate": trial.rate,
        "learning_rate_scores": {str(key): value for key, value in scores.items()},
        "wanted": trial.wanted,
        **found,
    }


def project(trial: Trial, ms_per_step: float) -> dict[str, Any]:
    """Train without limited links; project the seconds that these steps take on this link.

    Only for synchronous systems, whose steps are the same on every link.
    """
    free = figures(trial, observe(Link(None), [trial], {}))
    steps = free["seconds_to"] and free["steps_to"]
    seconds = round(steps * ms_per_step / 1000, 1) if steps else None
    return {"projected_s": seconds, "projected_steps": steps}


def format_result(result: dict[str, Any]) -> str:
    """Return a result as text."""
    name = f"{result['rate']:>8} {result['system']:<11}"
    if "ms_per_step" not in result:
        return f"{name} never: {result['ended']}"
    when = f"{result['seconds_to']:.1f} s" if result["seconds_to"] is not None else "never"
    if result.get("projected_s") is not None:
        when += f" (projected: {result['projected_s']:.0f} s)"
    pace = "no step"
    if result["ms_per_step"] is not None:
        pace = f"{result['ms_per_step']:.0f} ms, CPU {result['cpu_ms_per_step']:.0f} ms a step"
    return (
        f"{name} {when} to {result['wanted']}, {pace}, start-up {result['startup_s']:.1f} s, "
        f"{result['bytes'] / 1e6:,.1f} MB sent, {result['bytes_driver'] / 1e6:,.1f} of it by the "
        f"driver's host; {result['accuracy']} after {result['seconds']:.0f} s and "
        f"{result['steps']:.0f} of {result['steps_wanted']} steps ({result['ended']}); "
        f"learning rate {result['learning_rate']:g}"
    )


if __name__ == "__main__":
    sys.exit(main())
