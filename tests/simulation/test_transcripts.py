"""Transcripts of four instructive runs, which must equal the files in tests/transcripts.

After an intended change, write the files again, and review the difference:

    SPARKSTROM_WRITE_TRANSCRIPTS=1 python -m pytest tests/simulation/test_transcripts.py
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sparkstrom.base.identity import MASTER
from sparkstrom.codec.messages import (
    AttachReply,
    ChildSilent,
    Direct,
    IdClosed,
    MergedRange,
    Message,
    SnapshotRequired,
    Welcome,
)
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.simulation.network import Network
from sparkstrom.simulation.process import Outage, SimProcess
from sparkstrom.simulation.run_options import NO_FAULTS, RunSize
from sparkstrom.simulation.world import World

KEPT = Path(__file__).parents[1] / "transcripts"
WRITE = "SPARKSTROM_WRITE_TRANSCRIPTS"
AFTER_S = 0.5  # seconds of training before the trouble begins
LOOK_S = 0.001


class TranscribingNetwork(Network):
    """A network that adds messages about places, snapshots and sums to the transcript."""

    world: ScenarioWorld
    welcomed: set[int]

    def send_to_process(self, answer: ev.SendToProcess) -> None:
        say, host = self.world.time.say, answer.address.host
        match message := answer.message:
            case Welcome(edge=edge) if edge not in self.welcomed:
                self.welcomed.add(edge)
                above = "the master" if message.parent == MASTER else f"node {message.parent}"
                say(f"master -> {host}: you are node {message.node}, under {above}")
            case IdClosed():
                say(f"master -> {host}: node {message.node} is closed: {message.reason}")
            case _:
                pass
        super().send_to_process(answer)

    def send(self, owner: SimProcess | None, to: int, message: Message) -> None:
        who = "master" if owner is None else f"node {owner.node.node}"
        text = None
        match message:
            case AttachReply(base=base, snapshot=True):
                text = f"take a snapshot; commits after {base} follow"
            case AttachReply(base=base):
                text = f"commits after {base} follow"
            case SnapshotRequired(base=base):
                text = f"my log begins at {base}: take a snapshot"
            case MergedRange(after=after, commit=commit):
                text = f"the sum of commits {after + 1} to {commit}"
            case _:
                pass
        if text is not None:
            self.world.time.say(f"{who} -> node {to}: {text}")
        super().send(owner, to, message)

    def send_to_master(self, process: SimProcess, message: Direct) -> None:
        if isinstance(message, ChildSilent):
            self.world.time.say(f"node {message.node} -> master: I do not hear {message.child}")
        super().send_to_master(process, message)


class ScenarioWorld(World):
    """A mesh of seven workers, in which only ``trouble`` goes wrong."""

    def __init__(self, trouble: Callable[[ScenarioWorld], None], size: RunSize) -> None:
        super().__init__(7, size, replace(NO_FAULTS, delay_ms_max=1, step_s_max=0.4))
        self.network = TranscribingNetwork(self.time, self.faults, self._arrive_at_master)
        self.network.world, self.network.welcomed = self, set()
        self._trouble = trouble
        self._began = False

    def step_master(self, event: ev.Event) -> None:
        super().step_master(event)
        if self._initial_workers and not self._began:
            self._began = True
            self.time.after(AFTER_S, self._trouble, self)

    def inner(self) -> SimProcess:
        """Return the process with children that has the lowest id."""
        inner = [p for p in self.alive if p.node.children.by_node]
        return min(inner, key=lambda p: p.node.node)

    def leaf(self) -> SimProcess:
        """Return the process without children that has the highest id."""
        leaves = [p for p in self.alive if not p.node.children.by_node]
        return max(leaves, key=lambda p: p.node.node)

    def below(self, process: SimProcess) -> list[SimProcess]:
        """Return the processes below this one in the master's tree."""
        under = self.master.placement.tree.descendants(process.node.node)
        return [p for p in self.alive if p.node.node in under]


def kill_inner_node(world: ScenarioWorld) -> None:
    """Kill the inner node as soon as a node below it has an uncommitted update."""
    victim = world.inner()
    if not any(len(process.node.in_flight) for process in world.below(victim)):
        world.time.after(LOOK_S, kill_inner_node, world)
        return
    for process in world.below(victim):
        waiting = len(process.node.in_flight)
        world.time.say(f"{process.name} has {waiting} updates that are not committed")
    world.time.say(f"kill {victim.name}, node {victim.node.node}")
    world.end(victim, restart=True)


def cut_off_inner_node(world: ScenarioWorld) -> None:
    """Block all messages of the inner node for 2.5 leases."""
    victim = world.inner()
    until_s = world.time.now_s + 2.5 * world.size.lease_s
    world.time.say(f"nobody reaches {victim.name}, node {victim.node.node}, until {until_s:.1f}")
    world.shape.trouble_until_s = until_s
    world.network.begin_outage(victim, Outage(until_s, up=True, down=True))


def suspend_leaf(world: ScenarioWorld) -> None:
    """Suspend the last leaf for half a lease."""
    victim = world.leaf()
    victim.paused_until_s = world.time.now_s + world.size.lease_s / 2
    text = f"{victim.name}, node {victim.node.node}, stands still until {victim.paused_until_s:.1f}"
    world.time.say(text)


def kill_executor(world: ScenarioWorld) -> None:
    """Kill the executor with the most workers among those that run an inner node."""
    tasks = Counter(p.identity.executor for p in world.alive)
    inner = [p for p in world.alive if p.node.children.by_node]
    executor = max((p.identity.executor for p in inner), key=tasks.__getitem__)
    for process in world.alive:
        if process.identity.executor == executor:
            world.time.say(f"{executor} dies: kill {process.name}, node {process.node.node}")
            world.end(process, restart=True)


SIZE = RunSize(nodes=7, fan_out=2, depth=5, per_executor=1, kept_files=0, max_lead=None)
STORIES: dict[str, tuple[Callable[[ScenarioWorld], None], RunSize]] = {
    "inner-node-killed": (kill_inner_node, SIZE),
    "cut-off-and-back": (cut_off_inner_node, SIZE),
    "merged-range-to-a-slow-child": (
        suspend_leaf,
        replace(SIZE, merged_bytes=100, downlink_bytes=500),
    ),
    "executor-of-head-and-its-tasks-killed": (kill_executor, replace(SIZE, per_executor=3)),
}


def run_scenario(name: str) -> str:
    """Run a scenario and return its transcript."""
    trouble, size = STORIES[name]
    world = ScenarioWorld(trouble, size)
    assert world.run() == []
    master = world.master
    replicas = sorted({(d[:12]) for d in master.phases.digests.values()})
    assert replicas == [(master.phases.own_digest or "")[:12]]
    world.time.say(f"{master.sequencer.head} commits, in every replica: {replicas[0]}")
    return "\n".join(world.time.transcript) + "\n"


@pytest.mark.parametrize("name", STORIES)
def test_scenario_transcript_equals_stored_one(name: str) -> None:
    """A scenario's transcript equals the stored one."""
    kept, told = KEPT / f"{name}.txt", run_scenario(name)
    if os.environ.get(WRITE):
        kept.write_text(told)
    assert told == kept.read_text(), f"{WRITE}=1 writes it anew, if that was meant"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("inner-node-killed", "has 1 updates that are not committed"),
        ("inner-node-killed", "under node"),
        ("cut-off-and-back", "is closed: its lease ran out"),
        ("merged-range-to-a-slow-child", "the sum of commits"),
        ("executor-of-head-and-its-tasks-killed", "dies: kill"),
    ],
)
def test_stored_transcript_contains_key_event(name: str, words: str) -> None:
    """A stored transcript contains the events that it was chosen for."""
    assert words in (KEPT / f"{name}.txt").read_text()
