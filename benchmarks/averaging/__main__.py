"""The command line of ``benchmarks.averaging``."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import benchmarks.averaging
from benchmarks.averaging.clock import Cost, Link, rounds_cost, sharing_cost
from benchmarks.averaging.rounds_here import Recipe, Rounds, measure_epochs
from benchmarks.averaging.sharing_here import simulate_sharing
from benchmarks.convergence.tasks import OPTIMIZERS, TASKS
from benchmarks.convergence.trial import Trial
from benchmarks.hosts import parse_rate

OURS = "ours"
SYSTEMS = ("averaging-1", "averaging-5", "averaging-8", "diloco-8", OURS)
GB = 1e9


def main() -> int:
    """Print one object or line per link and system."""
    args = parsed(sys.argv[1:])
    if args.large:
        from benchmarks.averaging.large_fit import run_large_fit

        print(json.dumps(run_large_fit(args.large, args.large_workers)), flush=True)
        return 0
    import torch

    torch.set_num_threads(1)
    for result in results(args):
        print(json.dumps(result) if args.json else format_result(result), flush=True)
    return 0


def parsed(arguments: list[str]) -> argparse.Namespace:
    """Return the options; exit with a message if they are wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.averaging",
        description=benchmarks.averaging.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="systems, by comma")
    parser.add_argument("--links", default="100mbit,1gbit,10gbit", help="rates as tc writes them")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--params", type=float, default=25e6, help="of the model of time and bytes")
    parser.add_argument("--step", type=float, default=0.3, help="seconds of a step")
    parser.add_argument("--job", type=float, default=0.2, help="seconds of a Spark job")
    parser.add_argument("--task", default="digits", choices=[*TASKS])
    parser.add_argument("--optimizer", default="sgd", choices=OPTIMIZERS)
    parser.add_argument("--wanted", type=float, default=0.95, help="accuracy")
    parser.add_argument("--epochs", type=int, help="default: the task's")
    parser.add_argument("--seeds", type=int, default=1, help="runs of each system")
    parser.add_argument(
        "--large",
        type=lambda text: int(float(text)),
        metavar="PARAMS",
        help="run a fit of so many parameters on executors instead",
    )
    parser.add_argument("--large-workers", type=int, default=2, help="of this fit")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    args = parser.parse_args(arguments)
    args.systems = args.systems.split(",")
    try:
        args.links = {text: parse_rate(text) for text in args.links.split(",")}
        for name in args.systems:
            _ = name == OURS or Recipe.parse(name)
    except ValueError as error:
        parser.error(str(error))
    return args


def results(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train each system once per seed, but sharing once per link, as delays change its training."""
    rate = TASKS[args.task].rates[args.optimizer]
    first = Trial(args.task, args.optimizer, args.workers, 0, rate, (), args.epochs)
    for seed in range(args.seeds):
        trial = replace(first, seed=seed)
        for name in args.systems:
            known = None if name == OURS else Averaged(trial, Recipe.parse(name))
            for text, bits in args.links.items():
                link = Link(bits, args.params, args.step, args.job)
                points = train_by_sharing(trial, link) if known is None else known.points(link)
                yield make_result(args, name, text, seed, points)


class Averaged:
    """The results of one training in rounds, whose cost can be computed for any link."""

    def __init__(self, trial: Trial, recipe: Recipe) -> None:
        rounds = Rounds(trial, recipe)
        self._recipe, self._workers = recipe, trial.workers
        self._tests, self._steps = measure_epochs(trial, rounds), rounds.steps_per_epoch
        self._state = rounds.state_vectors

    def points(self, link: Link) -> list[tuple[dict[str, float], Cost, float]]:
        """Return (measures on ``test``, cost of the epoch, seconds of its steps) by epoch."""
        vectors = 1 if self._recipe.is_diloco else 1 + self._state
        own = self._state if self._recipe.is_diloco else 0
        steps, each = self._steps, self._recipe.each
        cost = rounds_cost(link, self._workers, steps, each, vectors, own)
        return [(test, cost, steps * link.step_s) for test in self._tests]


def train_by_sharing(trial: Trial, link: Link) -> list[tuple[dict[str, float], Cost, float]]:
    """Train by sharing; return the same as ``Averaged.points``, with the bytes scaled."""
    simulated, points = simulate_sharing(trial, link), []
    assert simulated.parameters is not None
    steps = trial.batches()[0].batches_per_epoch
    for before, seen in pairwise(simulated.points):
        sent = (seen.update_bytes - before.update_bytes) * link.params / simulated.parameters.size
        cost = sharing_cost(link, trial.workers, steps, sent)
        points.append((seen.measures, cost, steps * link.step_s))
    return points


def make_result(
    args: argparse.Namespace,
    name: str,
    link: str,
    seed: int,
    points: list[tuple[dict[str, float], Cost, float]],
) -> dict[str, Any]:
    """Return the result of one training on one link."""
    accuracies = [test.get("accuracy", 0.0) for test, _, _ in points]
    low = [i for i, accuracy in enumerate(accuracies) if accuracy < args.wanted]
    reached = low[-1] + 1 if low else 0
    held = points[: reached + 1] if reached < len(points) else None
    return {
        "system": name,
        "workers": args.workers,
        "link": link,
        "task": args.task,
        "optimizer": args.optimizer,
        "seed": seed,
        "steps_per_round": 0 if name == OURS else Recipe.parse(name).each,
        "accuracy": round(accuracies[-1], 4),
        "loss": round(points[-1][0]["loss"], 4),
        "seconds": round(sum(cost.seconds for _, cost, _ in points), 1),
        "steps_s": round(sum(steps_s for _, _, steps_s in points), 1),
        "seconds_to": held and round(sum(cost.seconds for _, cost, _ in held), 1),
        "gigabytes": round(sum(cost.bytes for _, cost, _ in points) / GB, 3),
        "gigabytes_to": held and round(sum(cost.bytes for _, cost, _ in held) / GB, 3),
    }


def format_result(result: dict[str, Any]) -> str:
    """Return a result as text."""
    return (
        f"{result['link']}, {result['system']}, seed {result['seed']}: accuracy"
        f" {result['accuracy']}, the wanted one after {result['seconds_to']} s and"
        f" {result['gigabytes_to']} GB; in all {result['seconds']} s ({result['steps_s']} of steps)"
        f" and {result['gigabytes']} GB"
    )


if __name__ == "__main__":
    sys.exit(main())
