"""The command line of ``benchmarks.convergence``."""

from __future__ import annotations

import argparse
import ast
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any

import benchmarks.convergence
from benchmarks.convergence.settings import Settings
from benchmarks.convergence.tasks import BATCH_ROWS, GRIDS, OPTIMIZERS, TASKS
from benchmarks.convergence.trial import Outcome, Trial, scores

OURS, EXECUTORS, DDP, BEST = "ours", "executors", "ddp", "ddp-best"
BEST_TIMES = (1, 2, 4, 8, 16)  # multiples of the learning rate of one process
Train = Callable[[Trial], Outcome]
NOT_RUN = Outcome(*2 * ({"loss": math.nan, "accuracy": math.nan},))


def main() -> int:
    """Print one object or line per run."""
    args = parsed(sys.argv[1:])
    import torch

    torch.set_num_threads(1)
    results = choose_rates(args) if args.choose else runs(args)
    for result in results:
        print(json.dumps(result) if args.json or args.choose else format_result(result), flush=True)
    return 0


def parsed(arguments: list[str]) -> argparse.Namespace:
    """Return the options; exit with a message if they are wrong."""
    from benchmarks.convergence.baselines import BASELINES

    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.convergence",
        description=benchmarks.convergence.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    words = make_word_parser(parser)
    parser.add_argument("--tasks", default=list(TASKS), type=words("--tasks", TASKS))
    parser.add_argument(
        "--optimizers", default=list(OPTIMIZERS), type=words("--optimizers", OPTIMIZERS)
    )
    parser.add_argument("--workers", default="1,2,4,8,16,32", help="numbers, by comma")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each case")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--systems", default=[OURS, BEST, *BASELINES], type=parse_systems)
    parser.add_argument(
        "--set", action="append", type=parse_settings, dest="variants", metavar="NAME=VALUE,...",
        help="a variant of ours; repeatable",
    )  # fmt: skip
    parser.add_argument("--executors", default="", help="numbers of workers to run on executors")
    parser.add_argument("--rate", type=float, help="learning rate; default: the task's")
    parser.add_argument(
        "--options", default=(), type=parse_options, metavar="NAME=VALUE,...",
        help="of all systems' optimizers, such as nesterov=True,weight_decay=0.01",
    )  # fmt: skip
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=int, help="default: the task's")
    length.add_argument("--minibatches", default="", help="by comma; rounded to whole epochs")
    parser.add_argument(
        "--choose", action="store_true", help="only print the scores of learning rates"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    args = parser.parse_args(arguments)
    args.workers = parse_numbers(args.workers)
    args.executors = parse_numbers(args.executors)
    args.minibatches = parse_numbers(args.minibatches)
    args.variants = args.variants or [("", Settings())]
    return args


def make_word_parser(parser: argparse.ArgumentParser) -> Callable[..., Callable[[str], list[str]]]:
    """Return a maker of argument types: lists of known words; other words are errors."""

    def of(option: str, known: Any) -> Callable[[str], list[str]]:
        def read(text: str) -> list[str]:
            words = text.split(",")
            if unknown := {*words} - {*known}:
                parser.error(f"{option} {', '.join(sorted(unknown))}: known are {', '.join(known)}")
            return words

        return read

    return of


def parse_systems(text: str) -> list[str]:
    """Parse a list of systems, in which DiLoCo and SparseLoCo may have any numbers."""
    from benchmarks.convergence.baselines import baseline

    names = text.split(",")
    try:
        for name in names:
            _ = name in (OURS, BEST) or baseline(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return names


def parse_settings(text: str) -> tuple[str, Settings]:
    """Parse a variant of ours; return its text, which is its name, and the settings."""
    try:
        return text, Settings.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parse_options(text: str) -> tuple[tuple[str, Any], ...]:
    """Parse keyword arguments of an optimizer, which have literal values."""
    try:
        pairs = [item.split("=") for item in text.split(",")]
        return tuple((name, ast.literal_eval(value)) for name, value in pairs)
    except (ValueError, SyntaxError) as error:
        message = f"{text!r}: must be NAME=VALUE,... as in Python"
        raise argparse.ArgumentTypeError(message) from error


def parse_numbers(text: str) -> list[int]:
    """Parse a list of whole numbers, which may be empty."""
    return [int(word) for word in text.split(",") if word]


def runs(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run everything; compare each run with one process and with DDP, with the same seed."""
    for trial in trials(args):
        reference = train_by_ddp(trial.alone)
        peer = train_by_ddp(trial) if DDP in args.systems else NOT_RUN
        for name, system, made, train in plan_runs(trial, args):
            yield run_trial(made, system, name, train, reference, peer)


def plan_runs(trial: Trial, args: argparse.Namespace) -> Iterator[tuple[str, str, Trial, Train]]:
    """Yield (name of the settings, system, trial, function that trains it) of each run."""
    from benchmarks.convergence.baselines import baseline

    for system in args.systems:
        if system == OURS:
            for name, variant in args.variants:
                yield name, OURS, trial, partial(train_ours, variant)
        elif trial.workers > 1 and system == BEST:
            rate = find_best_rate(replace(trial, seed=0))
            yield "", BEST, replace(trial, rate=rate), baseline("ddp")
        elif trial.workers > 1:
            yield "", system, trial, train_by_ddp if system == DDP else baseline(system)
    if trial.workers in args.executors:
        for name, variant in args.variants:
            yield name, EXECUTORS, trial, partial(train_on_executors, variant)


def trials(args: argparse.Namespace) -> Iterator[Trial]:
    """Yield the trials of the options, seed by seed."""
    for task, optimizer in product(args.tasks, args.optimizers):
        rate = args.rate or TASKS[task].rates[optimizer]
        for epochs, workers in product(list_epochs(task, args), args.workers):
            for seed in range(args.first_seed, args.first_seed + args.seeds):
                yield Trial(*(task, optimizer, workers, seed, rate), args.options, epochs)


def list_epochs(task: str, args: argparse.Namespace) -> list[int | None]:
    """Return the numbers of epochs to train; None: the task's number."""
    per_epoch = len(TASKS[task].split().train.labels) / BATCH_ROWS
    return [max(1, round(each / per_epoch)) for each in args.minibatches] or [args.epochs]


def train_ours(variant: Settings, trial: Trial) -> Outcome:
    """Train a variant of ours in virtual time."""
    from benchmarks.convergence.ours import train

    return train(trial, variant)


def train_on_executors(variant: Settings, trial: Trial) -> Outcome:
    """Train a variant of ours on Spark's executors."""
    from benchmarks.convergence.executors import train

    return train(trial, variant)


@cache
def train_by_ddp(trial: Trial) -> Outcome:
    """Train with DDP, once per trial; with one worker this is training in one process."""
    from benchmarks.convergence.baselines import ddp

    return ddp(trial)


@cache
def find_best_rate(trial: Trial) -> float:
    """Return DDP's best learning rate for a trial, chosen once per number of workers."""
    from benchmarks.convergence.baselines import ddp

    found = scores([trial], ddp, [trial.rate * times for times in BEST_TIMES])
    return next(iter(found))


def choose_rates(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the scores of one process's learning rates per task and optimizer, the best first."""
    from benchmarks.convergence.baselines import ddp

    for task, optimizer in product(args.tasks, args.optimizers):
        for epochs in list_epochs(task, args):
            trials = [Trial(task, optimizer, 1, n, 0.0, (), epochs) for n in range(args.seeds)]
            found = scores(trials, ddp, GRIDS[optimizer])
            yield {
                "task": task,
                "optimizer": optimizer,
                "minibatches": trials[0].minibatches,
                "scores": found,
            }


def run_trial(
    trial: Trial, system: str, name: str, train: Train, reference: Outcome, peer: Outcome
) -> dict[str, Any]:
    """Train; return the figures, compared with ``reference`` (one process) and ``peer`` (DDP)."""
    metric, began_s = trial.task.metric, time.monotonic()
    outcome = train(trial)
    gap, error = outcome.worse_than(reference, metric)
    behind, behind_error = outcome.worse_than(peer, metric)
    return {
        "task": trial.task_name,
        "optimizer": trial.optimizer,
        "workers": trial.workers,
        "minibatches": trial.minibatches,
        "system": system,
        "settings": name,
        "seed": trial.seed,
        "rate": trial.rate,
        "options": dict(trial.options),
        "metric": metric,
        "value": round_figure(outcome.test[metric]),
        "one": round_figure(reference.test[metric]),
        "gap": round_figure(gap),
        "gap_error": round_figure(error),
        "behind_ddp": round_figure(behind),
        "behind_ddp_error": round_figure(behind_error),
        "loss": round_figure(outcome.test["loss"]),
        "loss_gap": round_figure(outcome.test["loss"] - reference.test["loss"]),
        "validate": round_figure(outcome.validate[metric]),
        "bytes_factor": None if outcome.factor is None else round(outcome.factor, 1),
        "figures": {key: round_figure(each) for key, each in outcome.figures.items()},
        "seconds": round(time.monotonic() - began_s, 2),
    }


def round_figure(value: float) -> float | None:
    """Round to four digits; None if the value is not finite, because training diverged."""
    return round(value, 4) if math.isfinite(value) else None


def format_result(result: dict[str, Any]) -> str:
    """Return a result as text."""
    figures = ", ".join(f"{name} {value}" for name, value in result["figures"].items())
    return (
        f"{result['task']} {result['optimizer']} {result['rate']:g}, {result['workers']} workers, "
        f"seed {result['seed']}: {result['system']} {result['settings']}: {result['metric']} "
        f"{result['value']} (one process {result['one']}, gap {result['gap']}; of the loss "
        f"{result['loss_gap']}), {result['bytes_factor']} times fewer bytes; {figures}"
    )


if __name__ == "__main__":
    sys.exit(main())
