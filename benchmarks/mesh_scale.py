"""Load of a mesh of 8 to 32,768 nodes: the protocol's state machines in virtual time.

All nodes join, 64 workers train and publish, one node in a hundred dies, and the others end with
equal replicas. The root's load must not grow with the mesh: like each relay it has 8 children. Each
size runs in a process of its own, because its peak of memory is measured.

    python -m benchmarks.mesh_scale --json
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import resource
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from typing import Any

from sparkstrom.codec.messages import Phase
from sparkstrom.protocol.common.topology import DEPTH, FAN_OUT
from sparkstrom.simulation.network import Network
from sparkstrom.simulation.process import SimProcess
from sparkstrom.simulation.replica import TAU, SimLearner
from sparkstrom.simulation.run_options import NO_FAULTS, RunSize
from sparkstrom.simulation.world import World

NODES = (8, 64, 512, 4_096, 32_768)
PUBLISHERS = 64
UPDATES = 5  # of each publisher
DEATHS_SHARE = 0.01
LEASE_S = 10.0  # as in production
TICK_S = 1.0  # interval of a node's ticks
BUSY_TICK_S = 0.15  # the same with a pending report; acknowledgements arrive before the next tick
POLL_S = 0.08  # interval at which a node polls its streams
WAKE_S = 1.0  # longest delay until a waiting trainer handles new items
STEADY_S = 3.0  # of training before the first death
DYING_S = 2.0  # in which all deaths happen
STEP_S_MAX = 2.0
DELAY_MS_MAX = 1.0  # in addition to half a millisecond, as in a LAN
CHECK_S = 0.25
SEED = 1


@dataclass(slots=True)
class Traffic:
    """The messages that a node has sent and that were sent to it."""

    messages: int = 0
    bytes: int = 0


class SteadyLearner(SimLearner):
    """A learner that can publish after each step."""

    def step(self) -> None:
        """Make a step whose update has one element."""
        self.residual[0] += TAU
        self.learnt += TAU


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one size. A message counts for its sender and for its receiver.

    ``steady`` figures are per second of training, before the first death. They compare the root
    with relays that have as many children, and an edge to their parent.
    """

    nodes: int
    publishers: int
    commits: int
    deaths: int
    depth: int
    violations: list[str]
    messages_per_node: float
    bytes_per_node: float
    root_messages: int
    root_bytes: int
    root_children: int
    steady_commits_s: float
    steady_root_messages_s: float
    steady_root_bytes_s: float
    steady_relay_messages_s: float | None  # the median of all relays with as many children
    steady_relay_bytes_s: float | None
    begun_virtual_s: float  # until all nodes have joined
    stable_virtual_s: float | None  # from the last death until all nodes have all commits again
    over_virtual_s: float
    wall_s: float
    cpu_s: float
    peak_mib: float
    lease_s: float = LEASE_S
    tick_s: float = TICK_S
    busy_tick_s: float = BUSY_TICK_S
    poll_s: float = POLL_S


class MeasuredWorld(World):
    """A simulated fit with deaths but no other faults, which measures traffic."""

    def __init__(self, nodes: int) -> None:
        publishers = min(PUBLISHERS, nodes)
        size = RunSize(
            nodes=nodes,
            epochs=1,
            batches=UPDATES,
            max_lead=None,
            log_bytes=4_000,
            window_bytes=10_000,
            downlink_bytes=1 << 20,
            fan_out=FAN_OUT,
            depth=DEPTH,
            per_executor=4,
            empty_partitions=nodes - publishers,
            kept_files=0,
            lease_s=LEASE_S,
            tick_s=TICK_S,
            busy_tick_s=BUSY_TICK_S,
            wake_s=WAKE_S,
            trainer_poll_s=10.0,
            check_interval_s=10.0,
            task_start_window_s=10.0,
            end_s=2_000.0,
        )
        faults = replace(NO_FAULTS, delay_ms_max=DELAY_MS_MAX, step_s_max=STEP_S_MAX)
        super().__init__(SEED, size, faults)
        self.network = Network(
            self.time, faults, self._arrive_at_master, counts_traffic=True, poll_s=POLL_S
        )
        self.publishers = publishers
        self.died_s: float | None = None  # time of the last death
        self.stable_s: float | None = None
        self.began_s = 0.0
        self.depth = 0
        self.deaths = max(1, round(DEATHS_SHARE * nodes))
        self.steady_traffic: dict[SimProcess | None, Traffic] = {}
        self.steady_commits = 0
        self.root_children = 0
        self.relays: list[SimProcess] = []  # with as many children as the root
        self.time.at(CHECK_S, self._note_progress)

    def start(self, partition: int) -> None:
        """Start a partition's worker with a ``Steady`` learner."""
        before = len(self.processes)
        super().start(partition)
        for process in self.processes[before:]:
            process.learner = SteadyLearner(self.time.rng)

    def _note_progress(self) -> None:
        """Note when training begins, and when the mesh is stable after the last death."""
        now_s = self.time.now_s
        if self.phase is not Phase.GATHERING and not self.began_s:
            self.began_s = now_s
            self.depth = max(map(self.master.placement.tree.depth, self.master.members.live))
            self.time.after(
                STEADY_S, self._end_steady, self.count_traffic(), len(self.checks.commits)
            )
        if self.died_s is not None and self.stable_s is None and now_s > self.died_s:
            self.stable_s = now_s if self._is_stable() else None
        self.time.after(CHECK_S, self._note_progress)

    def count_traffic(self) -> dict[SimProcess | None, Traffic]:
        """Return the traffic until now by process; the master's key is None."""
        out: dict[SimProcess | None, Traffic] = defaultdict(Traffic)
        sent = [(None, self.network.master_links), *((p, p.links) for p in self.processes)]
        for source, links in sent:
            for target, link in links.items():
                for end in (source, target):
                    out[end].messages += link.messages
                    out[end].bytes += link.bytes
        return out

    def _end_steady(self, before: dict[SimProcess | None, Traffic], commits: int) -> None:
        self.steady_commits = len(self.checks.commits) - commits
        self.steady_traffic = {
            end: Traffic(t.messages - before[end].messages, t.bytes - before[end].bytes)
            for end, t in self.count_traffic().items()
        }
        self.root_children = len(self.master.children.by_node)
        self.relays = [p for p in self.alive if len(p.node.children.by_node) == self.root_children]
        self.died_s = self.time.now_s + DYING_S
        for victim in self.time.rng.sample(self.alive, self.deaths):
            self.time.after(self.time.rng.uniform(0, DYING_S), self._kill, victim)

    def _kill(self, victim: SimProcess) -> None:
        self.time.faults["crashes"] += 1
        self.end(victim, restart=True)

    def _is_stable(self) -> bool:
        """Return whether the tree has only live nodes, each of which has all commits."""
        members, placement = self.master.members, self.master.placement
        living = {p.node.node for p in self.alive if p.node.node is not None}
        if placement.moving or placement.suspects or members.live.keys() - living:
            return False
        nodes = [p.node for p in self.alive if p.node.node in members.live]
        head = self.master.sequencer.head
        return all(n.link.attached and n.replication.received >= head for n in nodes)


def measure(nodes: int) -> Figures:
    """Simulate one size, without cyclic garbage collection, which takes a third of the time."""
    gc.disable()
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    world = MeasuredWorld(nodes)
    violations = world.run()
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    if world.stable_s is None or world.died_s is None:
        violations.append("after the deaths it was never well again")
    traffic = world.count_traffic()
    root = traffic.pop(None)
    steady_root = world.steady_traffic.get(None, Traffic())
    relays = [world.steady_traffic[process] for process in world.relays]
    return Figures(
        nodes=nodes,
        publishers=world.publishers,
        commits=len(world.checks.commits),
        deaths=world.time.faults["crashes"],
        depth=world.depth,
        violations=violations,
        messages_per_node=statistics.fmean(t.messages for t in traffic.values()),
        bytes_per_node=statistics.fmean(t.bytes for t in traffic.values()),
        root_messages=root.messages,
        root_bytes=root.bytes,
        root_children=world.root_children,
        steady_commits_s=world.steady_commits / STEADY_S,
        steady_root_messages_s=steady_root.messages / STEADY_S,
        steady_root_bytes_s=steady_root.bytes / STEADY_S,
        steady_relay_messages_s=_compute_median_per_s([t.messages for t in relays]),
        steady_relay_bytes_s=_compute_median_per_s([t.bytes for t in relays]),
        begun_virtual_s=world.began_s,
        stable_virtual_s=_subtract(world.died_s, world.stable_s),
        over_virtual_s=world.time.now_s,
        wall_s=wall_s,
        cpu_s=cpu_s,
        peak_mib=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )


def _compute_median_per_s(values: list[int]) -> float | None:
    return statistics.median(values) / STEADY_S if values else None


def _subtract(died_s: float | None, stable_s: float | None) -> float | None:
    return None if died_s is None or stable_s is None else stable_s - died_s


def main(argv: list[str]) -> int:
    """Measure the given sizes, each in a new process; return 1 if there was a violation."""
    parser = argparse.ArgumentParser(description="Load of a mesh in virtual time, by its size.")
    parser.add_argument("--nodes", type=int, nargs="*", default=list(NODES), help="sizes")
    parser.add_argument("--json", action="store_true", help="one JSON object per line and size")
    args = parser.parse_args(argv)
    bad = False
    for nodes in args.nodes:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            figures: dict[str, Any] = asdict(pool.apply(measure, (nodes,)))
        rounded = {k: round(v, 2) if isinstance(v, float) else v for k, v in figures.items()}
        text = json.dumps(rounded) if args.json else _format_figures(rounded)
        print(text, flush=True)
        bad = bad or bool(figures["violations"])
    return 1 if bad else 0


def _format_figures(figures: dict[str, Any]) -> str:
    return "\n".join(f"{name:>24}  {value}" for name, value in figures.items()) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
