"""`sparkstrom simulate`: the protocol's machines in virtual time, under faults drawn per seed."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from sparkstrom.base.errors import UsageError

if TYPE_CHECKING:
    from sparkstrom.simulation.runs import Result

NODES_MAX = 256  # one heap of Python objects: beyond this a run takes minutes
MODES = ("plain", "mesh", "links", "links-mesh")
THROUGH = ("objects", "codec", "endpoint")
REPLICAS = ("numbers", "real")

OPTIONS: dict[str, tuple[type, str]] = {  # fields of Size and Faults that can be given
    "epochs": (int, "epochs per partition"),
    "batches": (int, "minibatches per epoch and partition"),
    "publish_every": (int, "steps between publications; 0: when the last one is committed"),
    "max_lead": (int, "steps that a worker may be ahead of the slowest"),
    "max_staleness": (int, "steps that a worker may take beside an uncommitted update"),
    "log_bytes": (int, "the master's log"),
    "merged_bytes": (int, "what a sum of commits costs"),
    "fan_out": (int, "children of a node in a mesh"),
    "depth": (int, "levels of a mesh"),
    "per_executor": (int, "workers in one executor"),
    "bandwidth": (float, "bytes per second that one host can send; 0: no bound"),
    "rate": (float, "bytes per second of each host's interface, in links and links-mesh"),
    "params": (int, "parameters of the model that messages are as long as"),
    "density": (float, "share of its parameters in an update"),
    "narrow": (int, "hosts whose interface is narrower than the others'"),
    "narrows": (int, "times that a host's interface gets narrower"),
    "slow_pollers": (int, "workers that look at their streams seldom"),
    "downlink_bytes": (int, "under way from a node to one child"),
    "empty_partitions": (int, "partitions without rows"),
    "resumed": (int, "number from which positions are drawn that the fit goes on from; 0: none"),
    "copies": (int, "copies of an updater's state that the driver wants"),
    "copies_of_all": (int, "times that it wants a copy of everybody's"),
    "last_copies": (int, "whose updaters' states its end waits for: 0: none, 1: one's, 2: all"),
    "kept_files": (int, "residuals left by an earlier fit"),
    "window_bytes": (int, "uncommitted updates of one worker"),
    "loss": (float, "share of messages that are lost"),
    "repeat": (float, "share of messages that arrive twice"),
    "late": (float, "share of messages that are overtaken by others"),
    "delay_ms_max": (float, "longest delay of the others, ms"),
    "step_s_max": (float, "longest step of a slow trainer, seconds"),
    "restart_s_max": (float, "longest time until Spark starts a task again, seconds"),
    "quiet_after_s": (float, "seconds of training after which no message is lost any more"),
    "crashes": (int, "worker processes that die"),
    "executor_crashes": (int, "executors that die"),
    "doubles": (int, "tasks started again although the first attempt lives"),
    "cuts": (int, "workers that are out of reach for a while"),
    "splits": (int, "times that half of the workers is out of the others' reach"),
    "isolations": (int, "times that nobody can speak with the driver program"),
    "slow": (int, "workers that are ten times slower"),
    "drift": (float, "share by which the workers' clocks go fast or slow"),
    "leaps": (int, "times that a worker's clock goes forward"),
    "breaks": (int, "single streams that break for good"),
    "exiles": (int, "workers that are out of reach for ever"),
    "master_lost": (int, "whether the driver program ends in the middle"),
    "controller_dies": (int, "times that the controller is lost, and another goes on from a copy"),
    "pauses": (int, "workers that stand still for a while"),
    "master_pauses": (int, "times that the driver program stands still"),
    "edge_deaths": (int, "media drivers that die"),
    "driver_deaths": (int, "media drivers that die between two effects"),
    "stop": (float, "chance that the fit is stopped early"),
    "failure": (float, "chance that training raises in a worker"),
}
AT_LEAST_ONE = (
    "epochs",
    "batches",
    "max_lead",
    "fan_out",
    "depth",
    "per_executor",
)
SHARES = ("loss", "repeat", "late", "stop", "failure", "drift", "density")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Describe the sub-command."""
    parser = subparsers.add_parser(
        "simulate",
        help="run the protocol in virtual time under seeded faults, and check its invariants",
        description="Sizes and faults that are not given are drawn from each seed.",
    )
    parser.add_argument("--nodes", type=int, default=4, help="workers (default: %(default)s)")
    parser.add_argument("--seeds", default="0:50", help="A:B, or one (default: %(default)s)")
    parser.add_argument(
        "--mode",
        default="plain",
        help="topology: plain or mesh, or links or links-mesh: the same with messages of real "
        "length over interfaces of a certain rate (default: %(default)s)",
    )
    parser.add_argument(
        "--through",
        default=None,
        help="what messages go through, in plain and mesh: endpoint (frames, seals, outboxes), "
        "codec (their bytes alone) or objects (nothing); drawn from each seed if not given",
    )
    parser.add_argument(
        "--replicas",
        default=None,
        help="what is trained, in plain and mesh: real (a small model, with the replica and the "
        "encoder of a real fit) or numbers; drawn from each seed if not given",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per line and seed")
    parser.add_argument("--transcript", action="store_true", help="what happened, on stderr")
    parser.add_argument("--jobs", type=int, default=None, help="processes (default: all cores)")
    parser.add_argument("--calm", action="store_true", help="no faults but those given")
    parser.add_argument(
        "--shrink",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="look for the smallest run in which the first bad seed still fails, and tell what "
        "happens in it (default: unless --json)",
    )
    for name, (kind, what) in OPTIONS.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=kind, default=None, metavar="N", help=what)


def run(args: argparse.Namespace) -> int:
    """Play all seeds; exit code 1 on any violation."""
    from sparkstrom.simulation.runs import play_all

    _check(args)
    seeds, given = _seeds(args.seeds), _given(args)
    jobs = args.jobs or os.cpu_count() or 1
    failed = 0
    for result in play_all(seeds, args.nodes, args.mode, given, jobs):
        print(_as_json(result) if args.json else _as_text(result), flush=True)
        if args.transcript:
            print("\n".join(result.transcript), file=sys.stderr)
        if result.violations:
            failed += 1
            _explain(result, args)
            if failed == 1 and (args.shrink or (args.shrink is None and not args.json)):
                _tell_small(result, args)
    if not args.json:
        print(f"{len(seeds)} seeds, {failed} with violations")
    return 1 if failed else 0


def _seeds(text: str) -> range:
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    first = int(found[1]) if found else 0
    last = int(found[2] or first + 1) if found else 0
    if last <= first:
        raise UsageError(f"--seeds {text!r}: need A:B with A < B, like 0:50, or one seed, like 7")
    return range(first, last)


def _check(args: argparse.Namespace) -> None:
    if args.mode not in MODES:
        raise UsageError(f"--mode {args.mode!r}: there is only {', '.join(MODES)}")
    for name, known in (("through", THROUGH), ("replicas", REPLICAS)):
        value = getattr(args, name)
        if value is not None and value not in known:
            raise UsageError(f"--{name} {value!r}: there is only {', '.join(known)}")
        if value is not None and args.mode.startswith("links"):
            raise UsageError(
                f"--{name} {value}: in --mode {args.mode} messages have a length and no bytes; "
                "leave it out, or use --mode plain or mesh"
            )
    if not 1 <= args.nodes <= NODES_MAX:
        raise UsageError(f"--nodes {args.nodes}: need 1 to {NODES_MAX}")
    if args.jobs is not None and args.jobs < 1:
        raise UsageError(f"--jobs {args.jobs}: need at least 1")
    for name in OPTIONS:
        value = getattr(args, name)
        if value is None:
            continue
        flag = "--" + name.replace("_", "-")
        least = 1 if name in AT_LEAST_ONE else 0
        if value < least:
            raise UsageError(f"{flag} {value}: need at least {least}")
        if name in SHARES and value > 1:
            raise UsageError(f"{flag} {value}: a share is at most 1")


def _said(args: argparse.Namespace) -> dict[str, Any]:
    """What of sizes and faults, and of how messages go, stands in the command."""
    names = ("through", "replicas", *OPTIONS)
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def _given(args: argparse.Namespace) -> dict[str, Any]:
    from sparkstrom.simulation.faults import NO_FAULTS
    from sparkstrom.simulation.run_sizes import Replicas, Through

    given = _said(args)
    for name, kind in (("through", Through), ("replicas", Replicas)):
        if name in given:
            given[name] = kind(given[name])
    calm = {field.name: getattr(NO_FAULTS, field.name) for field in fields(NO_FAULTS)}
    return {**calm, **given} if args.calm else given


def _as_json(result: Result) -> str:
    return json.dumps(
        {
            "seed": result.seed,
            "violations": result.violations,
            "updates": result.updates,
            "faults": result.faults,
        }
    )


def _as_text(result: Result) -> str:
    faults = ", ".join(f"{count} {kind}" for kind, count in sorted(result.faults.items()))
    verdict = "; ".join(result.violations) or "ok"
    return f"seed {result.seed}: {verdict} ({result.updates} updates; {faults or 'no faults'})"


def _explain(result: Result, args: argparse.Namespace) -> None:
    """Say how to see this one again."""
    for text in result.violations:
        print(f"seed {result.seed}: {text}", file=sys.stderr)
    command = _command(result, args, args.nodes, _said(args), args.calm)
    print(f"to repeat: {command}", file=sys.stderr)


def _command(
    result: Result, args: argparse.Namespace, nodes: int, given: dict[str, Any], calm: bool
) -> str:
    words = ["sparkstrom simulate", f"--nodes {nodes}", f"--seeds {result.seed}"]
    words += [f"--mode {args.mode}", *(["--calm"] if calm else [])]
    words += [f"--{name.replace('_', '-')} {value}" for name, value in given.items()]
    return " ".join([*words, "--transcript"])


def _tell_small(result: Result, args: argparse.Namespace) -> None:
    """The same with everything left out that it does not need, as a story."""
    from sparkstrom.simulation.shrinking import shrink

    small = shrink(result, args.nodes, args.mode, _given(args))
    given = small.given(result.seed, args.mode)
    given.pop("nodes", None)
    print("\n".join(small.result.transcript), file=sys.stderr)
    for text in small.result.violations:
        print(f"seed {result.seed}, shrunk: {text}", file=sys.stderr)
    command = _command(result, args, small.size.nodes, given, calm=True)
    print(f"to repeat the shrunk one: {command}", file=sys.stderr)
