"""Time of a round without training: from a publication to its commit and application, by phase.

    python -m benchmarks.rounds --json
    python -m benchmarks.rounds --sizes 85000 --workers 2 --systems wrapper,aeron,gloo --steps 400

Workers take steps that change some parameters and compute nothing, start each step together
(``max_lead=1``) and, if there are several, publish 1 % of the parameters after each step.
``wrapper`` is ParallelWrapper, ``cluster`` SparkNetwork on a ``local-cluster``, and ``mesh`` the
same with a fan-out of two, so that some of three or more workers relay. Probes in all processes
read the same monotonic clock:

``round_ms``       from one step to the next, at a worker
``commit_ms``      from the end of encoding until the master has numbered the update
``applied_ms``     from the end of encoding until another worker has added it to its replica
``cpu_ms``         processor time per update of all workers together: of a worker's trainer
                   (``origin`` for its own update, ``receiver`` for one of another worker), of the
                   thread of a worker's node (``node``, or ``relay`` if it forwards to others) and
                   of the master's thread, with what each does in it

Times are [median, 99th percentile] in milliseconds. The node thread's time with one worker is what
an origin needs; what it needs more with two is what a receiver does.

Each step adds 1 to some parameters, so these leave the range of exact addition after about 1,600
steps of all workers together, and ``replicas_equal`` is then false.

For comparison, in ``aeron`` two processes send a frame of an update's size back and forth over the
same media driver: by C calls that never sleep (``spin_ms``, half a round trip), and waiting as
sparkstrom's endpoints do, for a doorbell (``bell_ms``). ``gloo`` is torch's all-reduce of all
parameters.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.local import StandInModel
from sparkstrom.models.base import Batch, Flat

SYSTEMS = ("wrapper", "cluster", "mesh", "aeron", "gloo")
SENT_FRACTION = 0.01  # of the parameters that a step changes, as much as the default sends
WARM_STEPS = 20  # at the beginning, not counted
MESH_FAN_OUT = 2


def main() -> int:
    """Print one line per system, size and number of workers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="systems, by comma")
    parser.add_argument("--sizes", default="1000,85000,1000000", help="of the model, by comma")
    parser.add_argument("--workers", default="1,2,4", help="numbers of workers, by comma")
    parser.add_argument("--steps", type=int, default=300, help="of each worker")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    args = parser.parse_args()
    systems, sizes, workers = args.systems.split(","), _numbers(args.sizes), _numbers(args.workers)
    if unknown := set(systems) - set(SYSTEMS):
        parser.error(f"--systems {', '.join(unknown)}: there are {', '.join(SYSTEMS)}")
    for n_params in sizes:
        for system in systems:
            for count in workers if system != "aeron" else [2]:
                if system == "gloo" and count == 1:
                    continue
                result = measure(system, n_params, count, args.steps)
                result = {"system": system, "n_params": n_params, "workers": count} | result
                print(json.dumps(result) if args.json else format_result(result), flush=True)
    return 0


def _numbers(text: str) -> list[int]:
    """Return the whole numbers of a list by comma."""
    return [int(each) for each in text.split(",")]


def measure(system: str, n_params: int, workers: int, steps: int) -> dict[str, Any]:
    """Return the figures of one system."""
    if system == "aeron":
        return ping_pong(n_params, steps)
    if system == "gloo":
        return all_reduce(n_params, workers, steps)
    with tempfile.TemporaryDirectory() as directory:
        model = SilentModel(n_params, directory)
        if system == "wrapper":
            summary = fit_by_wrapper(model, workers, steps)
        else:
            summary = fit_on_cluster(model, workers, steps, mesh=system == "mesh")
        probes = [json.loads(path.read_text()) for path in Path(directory).iterdir()]
    return figures(probes, workers) | {
        "bytes_per_update": round(summary.bytes_sent / max(1, summary.updates)),
        "replicas_equal": summary.replicas_equal,
    }


def fit_by_wrapper(model: SilentModel, workers: int, steps: int) -> Any:
    """Train with ParallelWrapper; return the summary."""
    from sparkstrom import ParallelWrapper

    install_probes(model.directory)
    with ParallelWrapper(
        model, workers, batch_size_per_worker=1, max_lead=1, progress=False
    ) as wrapper:
        return wrapper.fit(_rows(workers * steps), run_log="")


def fit_on_cluster(model: SilentModel, workers: int, steps: int, *, mesh: bool) -> Any:
    """Train with SparkNetwork on executors of this machine; return the summary."""
    from benchmarks.sessions import local_cluster
    from sparkstrom import SharedTrainingMaster, SparkNetwork, VoidConfiguration

    install_probes(model.directory)
    features, labels = _rows(workers * steps)
    rows = list(zip(features, labels.tolist(), strict=True))
    with local_cluster(workers) as session:
        void = VoidConfiguration(
            mesh_build_mode="mesh" if mesh else "plain", mesh_fan_out=MESH_FAN_OUT
        )
        master = SharedTrainingMaster(void, batch_size_per_worker=1, max_lead=1)
        network = SparkNetwork(session, model, master, progress=False)
        summary = network.fit(session.sparkContext.parallelize(rows, workers))
        network.close()
    return summary


def _rows(count: int) -> tuple[Any, Any]:
    """Return rows of zeros: features and labels."""
    return np.zeros((count, 1), np.float32), np.zeros(count, int)


class SilentModel(StandInModel):
    """Each step adds 1 to the next ``SENT_FRACTION`` of the parameters, and computes nothing.

    Unpickling it installs the probes, which happens in each worker's process.
    """

    def __init__(self, n_params: int, directory: str) -> None:
        self.n_params, self.directory = n_params, directory
        self._params: Flat | None = None
        self._width = max(1, int(SENT_FRACTION * n_params))
        self._begin = 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the model, and install the probes."""
        self.__dict__.update(state)
        install_probes(self.directory)

    def bind(self, params: Flat) -> None:
        """Train on these parameters."""
        self._params = params

    def step(self, batch: Batch) -> float:
        """Change some parameters, and note the time."""
        assert self._params is not None
        PROBES.steps_s.append(time.monotonic())
        self._params[self._begin : self._begin + self._width] += 1
        self._begin = (self._begin + self._width) % (self.n_params - self._width + 1)
        return 0.0


# -- probes ----------------------------------------------------------------------------------------


class Probes:
    """The measured values of one process, written to a file when its protocol thread ends."""

    def __init__(self) -> None:
        self.steps_s: list[float] = []
        self.published_s: list[float] = []  # by own update
        self.own_commits: list[int] = []  # by own update
        self.applied_s: dict[int, float] = {}  # by commit of another worker
        self.numbered_s: dict[int, float] = {}  # by commit, at the master
        self.cpu_s = Counter[str]()  # by phase
        self.neighbours: list[int] = []  # nodes that this one was connected to

    def write(self, directory: str) -> None:
        """Write all values to a new file."""
        Path(directory, f"{os.getpid()}-{secrets.token_hex(4)}").write_text(json.dumps(vars(self)))


PROBES = Probes()


def install_probes(directory: str) -> None:
    """Make the package's methods in this process measure the next fit."""
    global PROBES
    from sparkstrom.protocol.master.commit_order import CommitOrder
    from sparkstrom.protocol.master.master import Master
    from sparkstrom.protocol.worker.node import Node
    from sparkstrom.runtime.master_thread import MasterThread
    from sparkstrom.runtime.message_endpoint import MessageEndpoint
    from sparkstrom.runtime.node_thread import NodeThread
    from sparkstrom.runtime.theta import Replica

    PROBES = Probes()
    for thread in (MasterThread, NodeThread):
        watch(thread, "run", "thread", lambda *_: PROBES.write(directory))
    for kind, name, phase in (
        (Master, "step", "protocol"), (Node, "step", "protocol"),
        (MessageEndpoint, "_open_frame", "open_and_decode"), (MessageEndpoint, "flush", "offer"),
        (MessageEndpoint, "send", "encode_and_seal"),
    ):  # fmt: skip
        watch(kind, name, phase)
    watch(Replica, "publish", "origin", _note_publication)
    watch(Replica, "apply_update", "receiver", _note_application)
    watch(Replica, "mark_committed", "own", lambda _, commit: PROBES.own_commits.append(commit))
    watch(CommitOrder, "on_update", "", _note_commit)
    watch(MessageEndpoint, "open_edge", "", _note_neighbour)


def watch(kind: type, name: str, phase: str, then: Callable[..., Any] | None = None) -> None:
    """Count the processor time of a method as ``phase``; then call ``then`` with its arguments."""
    method = getattr(kind, name)
    method = getattr(method, "__wrapped__", method)  # of an earlier fit in this process

    @functools.wraps(method)
    def measured(*args: Any, **kwargs: Any) -> Any:
        began_s = time.thread_time()
        result = method(*args, **kwargs)
        PROBES.cpu_s[phase] += time.thread_time() - began_s
        if then is not None:
            then(*args, **kwargs)
        return result

    setattr(kind, name, measured)


def _note_publication(replica: Any, **_: Any) -> None:
    """Note when the newest own update was ready, if there is one."""
    if len(replica._pending) + len(PROBES.own_commits) > len(PROBES.published_s):
        PROBES.published_s.append(time.monotonic())


def _note_application(replica: Any, update: Any) -> None:
    """Note when another worker's update was added."""
    PROBES.applied_s[update.commit] = time.monotonic()


def _note_commit(order: Any, *_: Any) -> None:
    """Note when the master had numbered the newest update."""
    PROBES.numbered_s.setdefault(order._sequencer.head, time.monotonic())


def _note_neighbour(endpoint: Any, node: int, *_: Any) -> None:
    """Note that the node is connected to another one."""
    if node not in PROBES.neighbours:
        PROBES.neighbours.append(node)


def figures(probes: list[dict[str, Any]], workers: int) -> dict[str, Any]:
    """Return the figures of all processes' probes together."""
    masters = [each for each in probes if each["numbered_s"]]
    trainers = [each for each in probes if each["steps_s"]]
    relays = [each for each in trainers if len(each["neighbours"]) > 1]
    leaves = [each for each in trainers if each not in relays]
    numbered_s = {int(c): s for each in masters for c, s in each["numbered_s"].items()}
    rounds, commits, applied = [], [], []
    for each in trainers:
        rounds += np.diff(each["steps_s"])[WARM_STEPS:].tolist()
        for began_s, commit in list(zip(each["published_s"], each["own_commits"], strict=False)):
            if commit <= WARM_STEPS * workers:
                continue
            commits.append(numbered_s[commit] - began_s)
            applied += [
                other["applied_s"][str(commit)] - began_s
                for other in trainers
                if str(commit) in other["applied_s"]
            ]
    return {
        "round_ms": percentiles_ms(rounds),
        "commit_ms": percentiles_ms(commits),
        "applied_ms": percentiles_ms(applied),
        "updates": len(numbered_s),
        "cpu_ms": {
            "origin": _per_call_ms(trainers, "origin", "published_s"),
            "receiver": _per_call_ms(trainers, "receiver", "applied_s"),
            "node": _phases_ms(leaves, len(numbered_s)),
            "relay": _phases_ms(relays, len(numbered_s)) if relays else None,
            "master": _phases_ms(masters, len(numbered_s)),
        },
    }


def percentiles_ms(seconds: Iterable[float]) -> list[float] | None:
    """Return median and 99th percentile in milliseconds; None without values."""
    values = list(seconds)
    return [round(1000 * float(v), 3) for v in np.percentile(values, (50, 99))] if values else None


def _per_call_ms(trainers: list[dict[str, Any]], phase: str, counted: str) -> float | None:
    """Return the mean processor time of a phase that trainers run, in milliseconds."""
    calls = sum(len(each[counted]) for each in trainers)
    spent_s = sum(each["cpu_s"].get(phase, 0.0) for each in trainers)
    return round(1000 * spent_s / calls, 3) if calls else None


def _phases_ms(processes: list[dict[str, Any]], updates: int) -> dict[str, float]:
    """Return the mean processor time per update of one process's protocol thread, by phase."""
    phases = ("thread", "protocol", "open_and_decode", "encode_and_seal", "offer")
    return {
        phase: round(
            1000 * sum(each["cpu_s"].get(phase, 0.0) for each in processes)
            / max(1, updates * len(processes)),
            3,
        )
        for phase in phases
    }  # fmt: skip


# -- for comparison --------------------------------------------------------------------------------


def ping_pong(n_params: int, steps: int) -> dict[str, Any]:
    """Send a frame back and forth between two processes on one media driver."""
    frame_bytes = 128 + int(1.2 * SENT_FRACTION * n_params)  # about a byte per entry, and headers
    found = {}
    for name, wait_s in (("spin_ms", 0.0), ("bell_ms", 1.0)):
        key = f"rounds-{secrets.token_hex(4)}"
        context = multiprocessing.get_context("spawn")
        echo = context.Process(target=_echo, args=(key, steps, wait_s), daemon=True)
        echo.start()
        found[name] = percentiles_ms(_send_and_wait(key, frame_bytes, steps, wait_s))
        echo.join()
    return {"frame_bytes": frame_bytes, **found}


def _open_local(key: str, receive: int, send: int) -> tuple[Any, Any]:
    """Return a transport on the key's media driver, and a local sender."""
    from sparkstrom.transport.aeron.client import AeronTransport
    from sparkstrom.transport.aeron.media_driver import DriverOptions, ensure_driver

    transport = AeronTransport(ensure_driver(key, DriverOptions(local_edges=2)))
    transport.open_receiver(receive, local=True)
    return transport, transport.open_sender(transport.endpoint, send, control=False, local=True)


def _send(transport: Any, sender: Any, frames: list[bytes]) -> None:
    """Send all frames, waiting for a receiver with room if needed."""
    while frames:
        sent, _ = sender.offer(frames)
        frames = frames[sent:]
        if frames:
            transport.poll(0.001)


def _echo(key: str, steps: int, wait_s: float) -> None:
    """Send back all frames that come."""
    transport, sender = _open_local(key, 11, 12)
    left = steps + WARM_STEPS
    while left:
        frames = [arrival.frame for arrival in transport.poll(wait_s)]
        _send(transport, sender, frames)
        left -= len(frames)
    transport.poll(0.2)
    transport.close()


def _send_and_wait(key: str, frame_bytes: int, steps: int, wait_s: float) -> list[float]:
    """Return half of the round trips' times in seconds."""
    transport, sender = _open_local(key, 12, 11)
    frame, times_s = bytes(frame_bytes), []
    for _ in range(steps + WARM_STEPS):
        began_s = time.monotonic()
        _send(transport, sender, [frame])
        while not transport.poll(wait_s):
            pass
        times_s.append((time.monotonic() - began_s) / 2)
    transport.close()
    return times_s[WARM_STEPS:]


def all_reduce(n_params: int, workers: int, steps: int) -> dict[str, Any]:
    """Sum all parameters over processes by gloo."""
    import torch

    with tempfile.TemporaryDirectory() as directory:
        given = (n_params, workers, steps, directory)
        torch.multiprocessing.spawn(_reduce, given, nprocs=workers)
        times_s = json.loads(Path(directory, "times").read_text())
    return {"all_reduce_ms": percentiles_ms(times_s)}


def _reduce(rank: int, n_params: int, workers: int, steps: int, directory: str) -> None:
    """Take part in the sums; the first process writes how long they took, in seconds."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{directory}/rendezvous", None, workers, rank)
    tensor, times_s = torch.zeros(n_params), []
    for _ in range(steps + WARM_STEPS):
        began_s = time.monotonic()
        dist.all_reduce(tensor)
        times_s.append(time.monotonic() - began_s)
    if rank == 0:
        Path(directory, "times").write_text(json.dumps(times_s[WARM_STEPS:]))
    dist.destroy_process_group()


def format_result(result: dict[str, Any]) -> str:
    """Return a result as text."""
    name = f"{result['system']}, {result['n_params']:,} parameters, {result['workers']} processes"
    times = {key: value for key, value in result.items() if key.endswith("_ms")}
    return f"{name}: " + ", ".join(f"{key} {value}" for key, value in times.items())


if __name__ == "__main__":
    sys.exit(main())
