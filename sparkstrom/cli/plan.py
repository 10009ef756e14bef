"""`sparkstrom plan`: memory, shared memory and ports that a fit will take, before it is tried."""

from __future__ import annotations

import argparse
import json

from sparkstrom.base.errors import UsageError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the sub-command."""
    parser = subparsers.add_parser(
        "plan",
        help="memory, shared memory and ports that a fit will take, with the lines to set",
        description="Sizes are written as Spark writes them, such as 512m or 2g.",
    )
    add = parser.add_argument
    add("--params", type=int, required=True, metavar="N", help="parameters of the model")
    add("--workers", type=int, required=True, metavar="N", help="workers of the fit")
    add("--workers-per-node", type=int, default=1, metavar="N", help="of an executor (default: 1)")
    add("--executors-per-host", type=int, default=1, metavar="N", help="(default: 1)")
    add("--optimizer", default="adam", help="such as sgd, momentum, adam (default: %(default)s)")
    add("--library", default="torch", help="dense, torch, jax or keras (default: %(default)s)")
    add("--buffers", default="0", metavar="SIZE", help="of BatchNorm and the like (default: 0)")
    add("--batch-memory", default="512m", metavar="SIZE", help="batch_memory_bytes")
    add("--log", default="64m", metavar="SIZE", help="log_bytes")
    add("--window", default="8m", metavar="SIZE", help="window_bytes")
    add("--train-on", default="local", help="local or replica (default: %(default)s)")
    add(
        "--checkpoints",
        choices=["one", "all"],
        help="with the optimizer states of these",
    )
    add("--mesh", default="auto", help="plain, mesh or auto (default: %(default)s)")
    add("--fan-out", type=int, default=8, metavar="N", help="mesh_fan_out")
    add("--controller", default="auto", help="driver, executor or auto, which counts as driver")
    add("--port", type=int, default=None, metavar="N", help="first UDP port (default: 40123)")
    add("--json", action="store_true", help="one JSON document on stdout")


def run(args: argparse.Namespace) -> int:
    """Print what is needed. Raise UsageError for what no fit can have."""
    from sparkstrom.spark.driver.discovery import VoidConfiguration
    from sparkstrom.spark.driver.fit_plan import Placing, plan_fit, text_of_plan
    from sparkstrom.spark.driver.memory_parts import Demand
    from sparkstrom.spark.driver.training_master import SharedTrainingMaster

    placing = Placing(args.workers, args.workers_per_node, args.executors_per_host)
    void = VoidConfiguration(
        mesh_build_mode=args.mesh,
        mesh_fan_out=args.fan_out,
        log_bytes=size("--log", args.log),
        window_bytes=size("--window", args.window),
        unicast_port=args.port,
        controller=args.controller,
    )
    master = SharedTrainingMaster(
        void,
        batch_memory_bytes=size("--batch-memory", args.batch_memory),
        train_on=args.train_on,
        checkpoint_directory="somewhere" if args.checkpoints else None,
        checkpoint_updaters=args.checkpoints or "one",
    )
    demand = Demand(args.params, args.optimizer, args.library, size("--buffers", args.buffers))
    plan = plan_fit(demand, placing, master)
    print(json.dumps(plan.to_dict()) if args.json else text_of_plan(plan))
    return 0


def size(flag: str, text: str) -> int:
    """Bytes. Raise UsageError naming the flag where it is no size."""
    from sparkstrom.spark.driver.container_memory import parse_bytes

    try:
        return parse_bytes(text)
    except AttributeError:  # it matches nothing
        raise UsageError(f"{flag} {text!r}: write a size such as 512m, 2g or 65536") from None
