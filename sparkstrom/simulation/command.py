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
    "epochs": (int, "number of epochs"),
    "batches": (int, "number of minibatches per epoch and partition"),
    "publish_every": (
        int,
        "number of steps between publications; 0: publish when the last one is committed",
    ),
    "max_lead": (int, "most steps that a worker may be ahead of the slowest"),
    "max_staleness": (int, "most steps that a worker may take after its oldest uncommitted update"),
    "log_bytes": (int, "bytes of commits that a node keeps in its log"),
    "merged_bytes": (int, "bytes that nodes assume for a sum of commits"),
    "fan_out": (int, "most children of a node in a mesh"),
    "depth": (int, "number of levels of a mesh below the master"),
    "per_executor": (int, "number of workers in one executor"),
    "bandwidth": (float, "bytes per second that one host can send; 0: no limit"),
    "rate": (
        float,
        "bytes per second of each host's interface in each direction, in links and links-mesh",
    ),
    "params": (int, "number of parameters of the model whose message lengths are used"),
    "density": (float, "share of the parameters in an update, 0 to 1"),
    "narrow": (int, "number of hosts whose interface has a lower rate from the start"),
    "narrows": (int, "number of times that the rate of a host's interface drops"),
    "slow_pollers": (int, "number of workers that poll their streams rarely"),
    "downlink_bytes": (int, "most bytes under way from a node to one child"),
    "empty_partitions": (int, "number of partitions without rows"),
    "resumed": (int, "seed of the positions at which a resumed fit begins; 0: a new fit"),
    "copies": (int, "number of times that the driver program copies one worker's optimizer state"),
    "copies_of_all": (int, "number of times that it copies all workers' optimizer states"),
    "last_copies": (
        int,
        "optimizer states to copy before the fit ends; 0: none, 1: one worker's, 2: all",
    ),
    "kept_files": (int, "number of residual files left by an earlier fit"),
    "window_bytes": (int, "most bytes of a worker's uncommitted updates"),
    "loss": (float, "share of direct and repeated control messages that are lost, 0 to 1"),
    "repeat": (float, "share of the same messages that arrive twice, 0 to 1"),
    "late": (float, "share of the same messages that later ones overtake, 0 to 1"),
    "delay_ms_max": (float, "longest delay of all other messages, in milliseconds"),
    "step_s_max": (float, "longest step of the slowest trainer, in seconds"),
    "restart_s_max": (float, "longest time until Spark restarts a lost task, in seconds"),
    "quiet_after_s": (
        float,
        "seconds of training after which no message is lost, repeated or late",
    ),
    "crashes": (int, "number of worker processes that die"),
    "executor_crashes": (int, "number of executors that die"),
    "doubles": (int, "number of tasks that are started again although the first attempt lives"),
    "late_attempts": (int, "number of tasks of an earlier stage attempt that start or fail late"),
    "cuts": (int, "number of workers that are unreachable for a while"),
    "splits": (int, "number of times that half of the workers cannot reach the others for a while"),
    "isolations": (int, "number of times that no worker can reach the driver program for a while"),
    "slow": (int, "number of workers whose steps take ten times as long"),
    "drift": (float, "share by which the workers' clocks run fast or slow, 0 to 1"),
    "leaps": (int, "number of times that a worker's clock jumps forward"),
    "breaks": (int, "number of single streams that break for good"),
    "exiles": (int, "number of workers that become unreachable forever"),
    "master_lost": (int, "1: the driver program dies in the middle of the fit; 0: it lives"),
    "controller_dies": (
        int,
        "number of times that the controller dies and a new one resumes from a copy",
    ),
    "pauses": (int, "number of workers that are suspended for a while"),
    "master_pauses": (int, "number of times that the driver program is suspended for a while"),
    "edge_deaths": (int, "number of media drivers that die"),
    "driver_deaths": (int, "number of media drivers that die between two effects of one call"),
    "stop": (float, "chance that the fit is stopped early, 0 to 1"),
    "failure": (float, "chance that training in a worker raises an exception, 0 to 1"),
}
AT_LEAST_ONE = ("epochs", "batches", "max_lead", "fan_out", "depth", "per_executor")
FRACTION_OPTIONS = ("loss", "repeat", "late", "stop", "failure", "drift", "density")


DESCRIPTION = (
    "Run the protocol in virtual time under seeded faults, and check its invariants. Sizes and"
    " faults that are not given have fixed values or are drawn from each seed."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to a parser."""
    parser.add_argument(
        "--nodes", type=int, default=4, help="number of workers (default: %(default)s)"
    )
    parser.add_argument(
        "--seeds",
        default="0:50",
        help="seeds: A:B, from A to B - 1, or a single one (default: %(default)s)",
    )
    parser.add_argument(
        "--mode",
        default="plain",
        help="topology, plain or mesh; links and links-mesh are the same with messages of "
        "realistic length over interfaces of limited rate (default: %(default)s)",
    )
    parser.add_argument(
        "--through",
        default=None,
        help="form in which the network carries messages, in plain and mesh: endpoint (encrypted "
        "frames), codec (encoded bytes) or objects (Python objects) (default: drawn from each "
        "seed)",
    )
    parser.add_argument(
        "--replicas",
        default=None,
        help="what workers train, in plain and mesh: real (a small model, with the replica and "
        "encoder of a real fit) or numbers (a few integers) (default: drawn from each seed)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print a line with a JSON object for each seed"
    )
    parser.add_argument(
        "--transcript", action="store_true", help="print each run's events to stderr"
    )
    parser.add_argument(
        "--jobs", type=int, default=None, help="number of processes (default: one per core)"
    )
    parser.add_argument(
        "--calm", action="store_true", help="simulate only the faults that are given"
    )
    parser.add_argument(
        "--shrink",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="find the smallest run in which the first failing seed still fails, and print its "
        "events (default: on, but off with --json)",
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
