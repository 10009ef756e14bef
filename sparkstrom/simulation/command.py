"""The command `python -m sparkstrom.simulation`: simulate the protocol under random faults.

The command prints each seed's result. For a run that violates an invariant, it also prints the
command that repeats this run; for the first such run, it looks for a smaller one that fails in the
same way.
"""

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
    from sparkstrom.simulation.fuzzing import RunResult

NODES_MAX = 256  # a run of more nodes takes minutes
MODES = ("plain", "mesh", "links", "links-mesh")
TRANSPORT_MODES = ("objects", "codec", "endpoint")
REPLICA_MODES = ("numbers", "real")

NUMBER_OPTIONS: dict[str, tuple[type, str]] = {  # fields of RunSize and Faults: type, help
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
    "late_attempts": (int, "tasks of an earlier stage attempt that start or fail late"),
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
AT_LEAST_ONE = ("epochs", "batches", "max_lead", "fan_out", "depth", "per_executor")
FRACTION_OPTIONS = ("loss", "repeat", "late", "stop", "failure", "drift", "density")


DESCRIPTION = (
    "Run the protocol in virtual time under seeded faults, and check its invariants. Sizes and"
    " faults that are not given are drawn from each seed."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to a parser."""
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
    for name, (kind, what) in NUMBER_OPTIONS.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=kind, default=None, metavar="N", help=what)


def run(args: argparse.Namespace) -> int:
    """Simulate all seeds and print the results; return 1 if any violates an invariant, else 0.

    Raise UsageError for invalid arguments.
    """
    from sparkstrom.simulation.fuzzing import simulate_seeds

    _check_arguments(args)
    seeds, given = _parse_seeds(args.seeds), _simulation_values(args)
    jobs = args.jobs or os.cpu_count() or 1
    failed = 0
    for result in simulate_seeds(seeds, args.nodes, args.mode, given, jobs):
        print(_result_to_json(result) if args.json else _format_result(result), flush=True)
        if args.transcript:
            print("\n".join(result.transcript), file=sys.stderr)
        if result.violations:
            failed += 1
            _print_violations(result, args)
            if failed == 1 and (args.shrink or (args.shrink is None and not args.json)):
                _print_shrunk_run(result, args)
    if not args.json:
        print(f"{len(seeds)} seeds, {failed} with violations")
    return 1 if failed else 0


def _parse_seeds(text: str) -> range:
    """Return the seeds of the text A:B (from A to B - 1) or A; raise UsageError for other text."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    first = int(match[1]) if match else 0
    last = int(match[2] or first + 1) if match else 0
    if last <= first:
        raise UsageError(f"--seeds {text!r}: need A:B with A < B, like 0:50, or one seed, like 7")
    return range(first, last)


def _check_arguments(args: argparse.Namespace) -> None:
    """Raise UsageError if a value is unknown or out of range, or does not fit the mode."""
    if args.mode not in MODES:
        raise UsageError(f"--mode {args.mode!r}: there is only {', '.join(MODES)}")
    for name, known in (("through", TRANSPORT_MODES), ("replicas", REPLICA_MODES)):
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
    for name in NUMBER_OPTIONS:
        value = getattr(args, name)
        if value is None:
            continue
        flag = "--" + name.replace("_", "-")
        least = 1 if name in AT_LEAST_ONE else 0
        if value < least:
            raise UsageError(f"{flag} {value}: need at least {least}")
        if name in FRACTION_OPTIONS and value > 1:
            raise UsageError(f"{flag} {value}: a share is at most 1")


def _given_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of RunSize and Faults that the command line sets, by name."""
    names = ("through", "replicas", *NUMBER_OPTIONS)
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def _simulation_values(args: argparse.Namespace) -> dict[str, Any]:
    """Return the fields to set in every run, by name; with --calm, other faults as in NO_FAULTS."""
    from sparkstrom.simulation.run_options import NO_FAULTS, ReplicaKind, TransportMode

    given = _given_options(args)
    for name, kind in (("through", TransportMode), ("replicas", ReplicaKind)):
        if name in given:
            given[name] = kind(given[name])
    calm = {field.name: getattr(NO_FAULTS, field.name) for field in fields(NO_FAULTS)}
    return {**calm, **given} if args.calm else given


def _result_to_json(result: RunResult) -> str:
    """Return a result as one line of JSON."""
    return json.dumps(
        {
            "seed": result.seed,
            "violations": result.violations,
            "updates": result.updates,
            "faults": result.faults,
        }
    )


def _format_result(result: RunResult) -> str:
    """Return a result as one line of text."""
    faults = ", ".join(f"{count} {kind}" for kind, count in sorted(result.faults.items()))
    verdict = "; ".join(result.violations) or "ok"
    return f"seed {result.seed}: {verdict} ({result.updates} updates; {faults or 'no faults'})"


def _print_violations(result: RunResult, args: argparse.Namespace) -> None:
    """Print a run's violations, and the command that repeats the run, to stderr."""
    for text in result.violations:
        print(f"seed {result.seed}: {text}", file=sys.stderr)
    command = _repeat_command(result, args, args.nodes, _given_options(args), args.calm)
    print(f"to repeat: {command}", file=sys.stderr)


def _repeat_command(
    result: RunResult, args: argparse.Namespace, nodes: int, options: dict[str, Any], calm: bool
) -> str:
    """Return the shell command that repeats a run of ``nodes`` workers and prints its transcript.

    ``options`` are the fields of RunSize and Faults to set, by name; ``calm``: the others of Faults
    are as in NO_FAULTS.
    """
    words = ["python -m sparkstrom.simulation", f"--nodes {nodes}", f"--seeds {result.seed}"]
    words += [f"--mode {args.mode}", *(["--calm"] if calm else [])]
    words += [f"--{name.replace('_', '-')} {value}" for name, value in options.items()]
    return " ".join([*words, "--transcript"])


def _print_shrunk_run(result: RunResult, args: argparse.Namespace) -> None:
    """Find the smallest run that still fails; print it and its command to stderr."""
    from sparkstrom.simulation.fuzzing import shrink_failure

    small = shrink_failure(result, args.nodes, args.mode, _simulation_values(args))
    given = small.given(result.seed, args.mode)
    given.pop("nodes", None)
    print("\n".join(small.result.transcript), file=sys.stderr)
    for text in small.result.violations:
        print(f"seed {result.seed}, shrunk: {text}", file=sys.stderr)
    command = _repeat_command(result, args, small.size.nodes, given, calm=True)
    print(f"to repeat the shrunk one: {command}", file=sys.stderr)
