"""World: a master, workers, a network and a supervisor in virtual time.

Everything that happens is an entry in one heap, ordered by time; every choice comes from one
seeded generator, so a run repeats exactly. Checkers stand outside the machines and look only at
what they say and do.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from sparkstrom.base.identity import MASTER
from sparkstrom.codec.messages import Address, Join, Message, Phase
from sparkstrom.protocol import events as ev
from sparkstrom.protocol.events import Effect, Order, Send
from sparkstrom.protocol.fit import MasterLimits
from sparkstrom.protocol.master import Master
from sparkstrom.protocol.node import Identity, NodeLimits
from sparkstrom.simulation.checks import Checks
from sparkstrom.simulation.faults import Faults
from sparkstrom.simulation.process import SimProcess
from sparkstrom.simulation.replica import CHUNKS, SimReplica

LEASE_S = 2.0
TICK_S = 0.02
STEP_S = (0.004, 0.03)
RESTART_S = (0.2, 4.0)  # Spark starts a lost task again after this
END_S = 300.0  # virtual; a run that is not over by then hangs


@dataclass(frozen=True, slots=True)
class Size:
    """How much is trained."""

    nodes: int = 4
    epochs: int = 3
    batches: int = 7
    max_lead: int | None = 6
    log_bytes: int = 4_000  # small on purpose: some must take snapshots
    window_bytes: int = 600


class World:
    """One run. ``run`` plays it to the end and returns the violations."""

    def __init__(self, seed: int, size: Size, faults: Faults) -> None:
        self.seed, self.size, self.faults = seed, size, faults
        self.chance = random.Random(seed)
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.counts: Counter[str] = Counter()
        self.transcript: list[str] = []
        self.checks = Checks(size.epochs * size.batches)
        self.replica = SimReplica()
        self.master = self._new_master()
        self.master_edges: dict[int, int] = {}  # node id -> edge the master has for it
        self.nodes: dict[int, SimProcess] = {}  # node id -> the process that holds it
        self.processes: list[SimProcess] = []
        self._attempts = itertools.count(100)
        self._cut: dict[SimProcess, float] = {}  # until when
        self.over = False

    def _new_master(self) -> Master:
        limits = MasterLimits(
            lease_s=LEASE_S,
            start_s=5.0,
            rejoin_s=60.0,
            release_s=3.0,
            end_s=30.0,
            log_bytes=self.size.log_bytes,
            downlink_bytes=2_000,
        )
        return Master(
            version="sim",
            partitions=self.size.nodes,
            epochs=self.size.epochs,
            chunks=CHUNKS,
            host="master",
            port=1,
            limits=limits,
            now_s=0.0,
        )

    # -- the run ---------------------------------------------------------------------------------

    def run(self) -> list[str]:
        """Play to the end of the fit; return what was violated, in words."""
        for partition in range(self.size.nodes):
            self._at(self.chance.uniform(0, 1.0), lambda p=partition: self._start(p))
        self._plan_faults()
        self._at(TICK_S, self._tick_master)
        while self._heap and not self.over:
            self.now_s, _, act = heapq.heappop(self._heap)
            if self.now_s > END_S:
                self.checks.violation(self._hang())
                break
            act()
        self.checks.at_end(self.master, self.replica, self.processes)
        return self.checks.violations

    def _at(self, at_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (at_s, next(self._order), act))

    def say(self, line: str) -> None:
        self.transcript.append(f"{self.now_s:9.4f}  {line}")

    def _hang(self) -> str:
        orders = {p.name: p.node.command for p in self.processes if p.alive}
        return f"I4: not over after {END_S:g} s: {self.master.fit.phases.phase.name}, {orders}"

    # -- processes -------------------------------------------------------------------------------

    def _start(self, partition: int) -> None:
        attempt = next(self._attempts)
        identity = Identity(
            token=self.chance.getrandbits(62),
            partition=partition,
            attempt=attempt,
            rows=7,
            checksum=partition,
            batches=self.size.batches,
            host="h",
            executor=f"e{partition // 2}",
            pid=attempt,
            version="sim",
        )
        limits = NodeLimits(
            lease_s=LEASE_S,
            window_bytes=self.size.window_bytes,
            hold_bytes=8_000,
            max_lead=self.size.max_lead,
        )
        name = f"p{partition}/{attempt}"
        process = SimProcess(
            name, identity, limits, self.size.epochs, attempt, self._perform, self.now_s
        )
        self.processes.append(process)
        self.say(f"start {name}")
        self._open(process)
        self._tick(process)
        self._boundary(process)

    def _open(self, process: SimProcess) -> None:
        process.edge += 1
        process.feed(ev.Opened(Address(process.name, process.edge, 1, 2)), self.now_s)

    def _tick(self, process: SimProcess) -> None:
        if process.alive:
            self._when_awake(process, lambda: process.feed(ev.Tick(), self.now_s))
            self._at(self.now_s + TICK_S * self.chance.uniform(0.5, 1.5),
                     lambda: self._tick(process))  # fmt: skip

    def _boundary(self, process: SimProcess) -> None:
        if not process.alive:
            return
        if self.now_s >= process.awake_s:
            process.boundary(self.now_s)
            self._look_for_end(process)
        self._at(self.now_s + self.chance.uniform(*STEP_S), lambda: self._boundary(process))

    def _look_for_end(self, process: SimProcess) -> None:
        command = process.node.command
        if command.order is Order.END:
            self.say(f"{process.name} ends: {command.reason}")
            self.checks.ended(process)
            process.alive = False
        elif command.order is Order.FAIL:
            self.say(f"{process.name} fails: {command.reason}")
            self.checks.failed(process, command.reason)
            process.alive = False

    def _when_awake(self, process: SimProcess, act: Callable[[], None]) -> None:
        if self.now_s >= process.awake_s:
            act()
        else:
            self._at(process.awake_s, lambda: act() if process.alive else None)

    # -- effects ---------------------------------------------------------------------------------

    def _perform(self, process: SimProcess, effect: Effect) -> None:
        """An effect of a node's machine."""
        match effect:
            case Send(message=message):
                self._transmit(process, up=True, edge=process.edge, message=message)
            case ev.Reopen():
                self._open(process)
            case ev.OpenEdge():
                pass
            case _:
                raise AssertionError(f"a node cannot want {effect}")

    def _step_master(self, event: ev.Event) -> None:
        for effect in self.master.step(event, self.now_s):
            self._perform_master(effect)

    def _perform_master(self, effect: Effect) -> None:
        match effect:
            case Send(to=to, message=message):
                self._send_down(to, message)
            case ev.Answer(address=address, message=message):
                for process in self.processes:
                    if process.name == address.host:
                        self._transmit(process, up=False, edge=address.port, message=message)
            case ev.OpenEdge(node=node, peer=peer):
                self.master_edges[node] = peer.port
                self.nodes[node] = next(p for p in self.processes if p.name == peer.host)
            case ev.CloseEdge(node=node):
                self.master_edges.pop(node, None)
            case ev.Deliver(update=update):
                self.checks.committed(self.nodes[update.origin], update)
                self.replica.apply(update)
            case ev.SendChunk(to=to, index=index):
                self._send_down(to, self.replica.chunk(index))
            case ev.Hash(commit=commit):
                digest = self.replica.digest()
                self._at(self.now_s, lambda: self._step_master(ev.Hashed(commit, digest, None)))
            case ev.Abort(reason=reason):
                self.checks.violation(f"aborted: {reason}")
                self.over = True
            case ev.Complete():
                self.say("complete")
                self._at(self.now_s + 3 * LEASE_S, self._finish)
            case ev.Note(text=text):
                self.say(text)
            case _:
                raise AssertionError(f"a master cannot want {effect}")

    def _finish(self) -> None:
        self.over = True

    # -- the network -----------------------------------------------------------------------------

    def _send_down(self, node: int, message: Message) -> None:
        if node in self.master_edges:
            self._transmit(
                self.nodes[node], up=False, edge=self.master_edges[node], message=message
            )

    def _transmit(self, process: SimProcess, *, up: bool, edge: int, message: Message) -> None:
        """Put a message on its way, once, twice, late or not at all."""
        self.counts["messages"] += 1
        copies = 1
        if self._quiet():
            pass
        elif self.chance.random() < self.faults.loss:
            self.counts["lost"] += 1
            return
        elif self.chance.random() < self.faults.repeat:
            self.counts["repeated"] += 1
            copies = 2
        for _ in range(copies):
            delay_s = self.chance.uniform(0.0005, max(0.001, self.faults.delay_ms_max / 1000))
            if not self._quiet() and self.chance.random() < self.faults.late:
                self.counts["late"] += 1
                delay_s += self.chance.uniform(0, 0.5)
            self._at(self.now_s + delay_s, lambda: self._arrive(process, up, edge, message))

    def _arrive(self, process: SimProcess, up: bool, edge: int, message: Message) -> None:
        if not process.alive and not up:
            return
        if self._cut.get(process, 0.0) > self.now_s:
            self.counts["cut"] += 1
            return
        if not up:
            if edge == process.edge:
                event = ev.Received(MASTER, message)
                self._when_awake(process, lambda: process.feed(event, self.now_s))
            return
        sender = -1 if isinstance(message, Join) else self._sender(process, edge)
        if isinstance(message, Join) or sender >= 0:
            self._step_master(ev.Received(sender, message))

    def _sender(self, process: SimProcess, edge: int) -> int:
        """The id whose edge this is at the master; -1 where the edge is gone."""
        for node, holder in self.nodes.items():
            if holder is process and self.master_edges.get(node) == edge:
                return node
        return -1

    def _tick_master(self) -> None:
        self._step_master(ev.Tick())
        self._at(self.now_s + TICK_S * self.chance.uniform(0.5, 1.5), self._tick_master)

    # -- faults ----------------------------------------------------------------------------------

    def _quiet(self) -> bool:
        return self.now_s > self.faults.quiet_after_s

    def _plan_faults(self) -> None:
        acts = (
            (self.faults.crashes, self._crash),
            (self.faults.cuts, self._cut_off),
            (self.faults.pauses, self._pause),
            (self.faults.edge_deaths, self._kill_edge),
        )
        for count, act in acts:
            for _ in range(count):
                self._at(self.chance.uniform(0.3, self.faults.quiet_after_s / 3), act)

    def _victim(self) -> SimProcess | None:
        alive = [p for p in self.processes if p.alive]
        if not alive or self.master.fit.phases.phase is Phase.DONE:
            return None
        return self.chance.choice(alive)

    def _crash(self) -> None:
        victim = self._victim()
        if victim is None:
            return
        self.counts["crashes"] += 1
        self.say(f"crash {victim.name}")
        victim.alive = False
        partition = victim.identity.partition
        self._at(self.now_s + self.chance.uniform(*RESTART_S), lambda: self._start(partition))

    def _cut_off(self) -> None:
        victim = self._victim()
        if victim is not None:
            self.counts["cuts"] += 1
            self._cut[victim] = self.now_s + self.chance.uniform(0.1, 2 * LEASE_S)
            self.say(f"cut {victim.name} until {self._cut[victim]:.3f}")

    def _pause(self) -> None:
        victim = self._victim()
        if victim is not None:
            self.counts["pauses"] += 1
            victim.awake_s = self.now_s + self.chance.uniform(0.1, 2 * LEASE_S)
            self.say(f"pause {victim.name} until {victim.awake_s:.3f}")

    def _kill_edge(self) -> None:
        """A media driver dies: the victim's, or the master's, which takes all edges along."""
        victim = self._victim()
        if victim is None:
            return
        self.counts["edge deaths"] += 1
        if self.chance.random() < 0.3:
            self.say("the master's media driver dies")
            self._step_master(ev.Moved("master", 2))
        else:
            self.say(f"the media driver of {victim.name} dies")
            self._open(victim)
