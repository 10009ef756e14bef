"""The command `sparkstrom plan`: compute the memory and UDP ports that a fit needs."""

from __future__ import annotations

import argparse
import json

from sparkstrom.base.errors import UsageError
from sparkstrom.base.units import parse_bytes, parse_count

SHARING_DEFAULTS = {  # defaults of the flags that cannot be combined with --averaging
    "executors_per_host": 1,
    "log": "64m",
    "window": "8m",
    "train_on": "local",
    "mesh": "auto",
    "fan_out": 8,
    "controller": "auto",
    "port": None,
}
# Maps values of --averaging to values of the option save_updater.
SAVE_UPDATER_VALUES: dict[str, bool | str] = {"averaged": True, "new": False, "own": "own"}


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command ``plan`` with its arguments."""
    parser = subparsers.add_parser(
        "plan",
        help="compute the memory and ports of a fit, with the --conf lines to set",
        description="Compute the memory, shared memory and UDP ports of a fit. Write sizes as for"
        " Spark, such as 512m or 2g.",
    )
    add = parser.add_argument
    add("--params", required=True, metavar="N", help="number of parameters, such as 25e6")
    add("--workers", type=int, required=True, metavar="N", help="number of workers")
    add(
        "--workers-per-node",
        type=int,
        default=1,
        metavar="N",
        help="workers per executor (default: 1)",
    )
    add("--executors-per-host", type=int, metavar="N", help="executors per host (default: 1)")
    add(
        "--optimizer",
        default="adam",
        help="optimizer, such as sgd, momentum or adam (default: %(default)s)",
    )
    add(
        "--library",
        default="torch",
        help="kind of model: dense, torch, jax or keras (default: %(default)s)",
    )
    add(
        "--buffers",
        default="0",
        metavar="SIZE",
        help="size of the model's running statistics, such as BatchNorm's (default: %(default)s)",
    )
    add(
        "--batch-memory",
        default="512m",
        metavar="SIZE",
        help="memory for a worker's rows, option batch_memory_bytes (default: %(default)s)",
    )
    add(
        "--averaging",
        choices=[*SAVE_UPDATER_VALUES],
        help="plan rounds of ParameterAveragingTrainingMaster with this save_updater (default:"
        " gradient sharing)",
    )
    add("--outer", action="store_true", help="use an outer optimizer; needs --averaging")
    add("--log", metavar="SIZE", help="size of the log of commits, option log_bytes (default: 64m)")
    add(
        "--window",
        metavar="SIZE",
        help="limit of waiting updates, option window_bytes (default: 8m)",
    )
    add("--train-on", help="parameters to train on: local or replica (default: local)")
    add(
        "--checkpoints",
        choices=["one", "all"],
        help="write checkpoints with the optimizer states of one or all workers (default: no"
        " checkpoints)",
    )
    add("--mesh", help="topology: plain, mesh or auto (default: auto)")
    add("--fan-out", type=int, metavar="N", help="most children of a node in a mesh (default: 8)")
    add(
        "--controller",
        help="place of the controller: driver, executor or auto, planned as driver (default: auto)",
    )
    add("--port", type=int, metavar="N", help="first UDP port (default: 40123)")
    add("--json", action="store_true", help="print the plan as one JSON document")


def run(args: argparse.Namespace) -> int:
    """Print the plan of a fit; return 0. Raise UsageError for invalid values."""
    from sparkstrom.options.gradient_sharing import SharedTrainingMaster
    from sparkstrom.options.network import VoidConfiguration
    from sparkstrom.planning.memory import ModelFootprint
    from sparkstrom.planning.plan import WorkerCounts, format_plan, plan_fit

    args.params = parse_parameter_count(args.params)
    if args.averaging:
        return _plan_averaging(args)
    if args.outer:
        raise UsageError("--outer is a step of rounds: add --averaging averaged, new or own")
    for name, value in SHARING_DEFAULTS.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    placing = WorkerCounts(args.workers, args.workers_per_node, args.executors_per_host)
    void = VoidConfiguration(
        mesh_build_mode=args.mesh,
        mesh_fan_out=args.fan_out,
        log_bytes=parse_size("--log", args.log),
        window_bytes=parse_size("--window", args.window),
        unicast_port=args.port,
        controller=args.controller,
    )
    master = SharedTrainingMaster(
        void,
        batch_memory_bytes=parse_size("--batch-memory", args.batch_memory),
        train_on=args.train_on,
        checkpoint_directory="somewhere" if args.checkpoints else None,
        checkpoint_updaters=args.checkpoints or "one",
    )
    footprint = ModelFootprint(
        args.params, args.optimizer, args.library, parse_size("--buffers", args.buffers)
    )
    plan = plan_fit(footprint, placing, master)
    print(json.dumps(plan.to_dict()) if args.json else format_plan(plan))
    return 0


def _plan_averaging(args: argparse.Namespace) -> int:
    """Print the plan of a parameter-averaging fit; return 0. Raise UsageError like ``run``."""
    from sparkstrom.models.updaters import Nesterov
    from sparkstrom.options.gradient_sharing import ALL
    from sparkstrom.options.parameter_averaging import ParameterAveragingTrainingMaster
    from sparkstrom.planning.memory import ModelFootprint
    from sparkstrom.planning.plan import WorkerCounts, format_plan, plan_averaging

    if given := [name for name in SHARING_DEFAULTS if getattr(args, name) is not None]:
        flag = "--" + given[0].replace("_", "-")
        raise UsageError(
            f"{flag}: rounds are Spark jobs, without UDP: leave it out, or --averaging"
        )
    master = ParameterAveragingTrainingMaster(
        save_updater=SAVE_UPDATER_VALUES[args.averaging],
        outer=Nesterov(0.7, 0.9) if args.outer else None,
        batch_memory_bytes=parse_size("--batch-memory", args.batch_memory),
        checkpoint_directory="somewhere" if args.checkpoints else None,
    )
    if args.checkpoints not in (None, master.checkpoint_updaters):
        kept = master.checkpoint_updaters
        states = (
            "all workers' optimizer states"
            if kept == ALL
            else "one optimizer state for all workers"
        )
        raise UsageError(
            f"--checkpoints {args.checkpoints}: with --averaging {args.averaging}, checkpoints"
            f" contain {states}: write --checkpoints {kept}"
        )
    footprint = ModelFootprint(
        args.params, args.optimizer, args.library, parse_size("--buffers", args.buffers)
    )
    plan = plan_averaging(footprint, WorkerCounts(args.workers, args.workers_per_node), master)
    print(json.dumps(plan.to_dict()) if args.json else format_plan(plan))
    return 0


def parse_parameter_count(text: str) -> int:
    """Parse --params, a number of parameters such as 25e6. Raise UsageError if it is invalid."""
    try:
        return parse_count(text)
    except ValueError:
        raise UsageError(
            f"--params {text!r}: write a whole number, such as 25000000 or 25e6"
        ) from None


def parse_size(flag: str, text: str) -> int:
    """Parse a size, such as 512m, to bytes. Raise UsageError, naming ``flag``, if it is invalid."""
    try:
        return parse_bytes(text)
    except ValueError:
        raise UsageError(f"{flag} {text!r}: write a size such as 512m, 2g or 65536") from None
