"""World: a master, workers, a network and a supervisor in virtual time.

Every choice comes from one seeded generator, so a run repeats exactly. Checkers stand outside the
machines and look only at what they say and do.
"""

from __future__ import annotations

import itertools
import math

from sparkstrom.base.identity import NodeId
from sparkstrom.codec.messages import BUFFERS, Failed, MergedRange, Message, Phase, Release
from sparkstrom.protocol.common import events as ev
from sparkstrom.protocol.common.events import Effect, Order, Send
from sparkstrom.protocol.worker.node import Identity
from sparkstrom.runtime.training_loop import Move
from sparkstrom.simulation.chaos import Chaos
from sparkstrom.simulation.deaths import Doom, outlives
from sparkstrom.simulation.faults import NO_FAULTS, Faults
from sparkstrom.simulation.linked import new_network
from sparkstrom.simulation.run_sizes import Size
from sparkstrom.simulation.shape import Shape
from sparkstrom.simulation.sim_parts import Parts
from sparkstrom.simulation.sim_process import STEP_S_MIN, SimProcess
from sparkstrom.simulation.sim_replica import Theta, mass
from sparkstrom.simulation.timeline import Timeline

TICK = ev.Tick()
OVER = (Move.END, Move.FAIL)
LEAVE_S = 80.0  # from the end of the fit until the last task must have ended
RESTART_S_MIN = 0.2
SLOWER = 10
ZERO_S_MAX = 1000.0  # what a clock that drifts shows at virtual time 0


class World:
    """One run. ``run`` plays it to the end and returns the violations."""

    def __init__(self, seed: int, size: Size, faults: Faults, parts: Parts | None = None) -> None:
        self.seed, self.size, self.faults = seed, size, faults
        self.time = Timeline(seed)
        self.scratch: dict[str, Theta] = {}
        self.parts = parts or Parts(size)
        self.replica = self.parts.replica()
        self.master = self.parts.master(self.time, self.scratch)
        self.checks = self.parts.checks({p: mass(theta) for p, theta in self.scratch.items()})
        self.checks.begin(size, calm=faults == NO_FAULTS)
        self.network = new_network(
            self.time,
            size,
            faults,
            to_master=self._arrive_at_master,
            step_master=self.step_master,
            violation=self.checks.violation,
        )
        self.shape = Shape(self.checks.violation, size.lease_s)
        self.processes: list[SimProcess] = []
        self.chaos = Chaos(self, faults)
        self._attempts = itertools.count(100)
        self._master_awake_s = 0.0
        self._began_with = 0  # workers that held a replica
        self.doom: Doom | None = None  # of the master's media driver

    # -- the run ---------------------------------------------------------------------------------

    def run(self) -> list[str]:
        """Play to the end of the fit; return what was violated, in words."""
        for partition in range(self.size.nodes):
            self.time.at(self.time.chance.uniform(0, self.size.starts_s), self.start, partition)
        self.chaos.plan()
        self.time.at(self.size.tick_s, self._tick_master)
        self.time.at(self.size.bounds_s, self._look_at_bounds)
        if not self.time.run(self.size.end_s):
            self.checks.violation(self._hang())
        self.checks.at_end(self.master, self.replica, self.processes)
        self.network.at_end()
        return self.checks.violations

    def _hang(self) -> str:
        orders = {p.name: p.node.command for p in self.processes if p.alive}
        return f"I4: not over at {self.time.now_s:g} s: {self.phase.name}, {orders}"

    @property
    def phase(self) -> Phase:
        return self.master.phases.phase

    @property
    def alive(self) -> list[SimProcess]:
        return [process for process in self.processes if process.alive]

    @property
    def master_is_lost(self) -> bool:
        return self._master_awake_s == math.inf

    @property
    def steady(self) -> bool:
        """Nobody has left or come since training began."""
        members = self.master.members
        nobody_came = len(members.live) == len(self.processes) == self._began_with
        return self.phase is Phase.RUNNING and nobody_came and not members.departures

    @property
    def _is_calm(self) -> bool:
        """Training goes on, and no message gets lost any more."""
        running = self.phase in (Phase.RUNNING, Phase.DRAINING) and not self.master.aborted
        return running and self.network.quiet

    def _lacks_workers(self) -> bool:
        """May the fit end for want of workers? Links that are narrow are no reason."""
        late = self.phase is Phase.GATHERING and bool(self.time.faults)
        return late or not (self._has_worker() or self.faults.rate)

    def _process_of(self, node: NodeId) -> SimProcess:
        """Whose id this is."""
        return self.network.process(self.master.members.live[node].join.address.host)

    def _has_worker(self) -> bool:
        """Does anybody hold a replica, who can be reached?"""
        now_s = self.time.now_s
        awake = (p for p in self.alive if p.installed and p.awake_s <= now_s)
        return any(not self.network.is_cut(process) for process in awake)

    def _look_at_bounds(self) -> None:
        self.checks.bounds(self.master, self.processes)
        self.checks.counted(self.master)
        self.shape.tree(self.master)
        self.shape.edges(self.processes)
        self.shape.transports(self.processes, self.master, self.network.masters_edges)
        if self._is_calm:
            head = self.master.sequencer.head
            self.shape.places(self.master, self.time.now_s)
            self.shape.goes_on(self.processes, head, self.time.now_s)
            self.shape.closed_ids(self.processes, self.master, self.time.now_s)
        if self.steady and self.size.max_lead is not None:
            self.checks.lead(self.processes, self.size.max_lead)
        self.network.look(self)
        if self.master_is_lost and not self.alive:
            self.time.over = True
        self.time.after(self.size.bounds_s, self._look_at_bounds)

    # -- processes -------------------------------------------------------------------------------

    def identity(self, partition: int, attempt: int) -> Identity:
        """What an attempt says of itself."""
        start = self.size.start_of(partition)
        return Identity(
            token=self.time.chance.getrandbits(62),
            partition=partition,
            attempt=attempt,
            rows=start.rows,
            checksum=start.checksum,
            batches=start.batches,
            host="h",
            executor=f"e{partition // self.size.per_executor}",
            pid=attempt,
            version="sim",
            start=start.position,
            whole=self.size.whole,
        )

    def start(self, partition: int) -> None:
        """Spark starts an attempt, unless the job has ended."""
        if self.phase is Phase.DONE or self.master.aborted:
            return
        attempt = next(self._attempts)
        process = self.parts.process(
            f"p{partition}/{attempt}",
            self.identity(partition, attempt),
            self.size.of_node(),
            epochs=self.size.epochs,
            publish_every=self.size.publish_every,
            seed=self.time.chance.getrandbits(32),
            perform=self._perform,
            wake=self._wake,
            hurry=self._hurry,
            replace=self.lose_driver,
            scratch=self.scratch,
            time=self.time,
            clock=self._clock(),
            buffered=self.size.buffered,
            weights=self.size.weights,
        )
        process.slowness_s = self.time.chance.uniform(STEP_S_MIN, self.faults.step_s_max)
        if partition < self.faults.slow:
            process.slowness_s *= SLOWER
        self.processes.append(process)
        self.network.add(process)
        self.checks.started(process)
        self.time.say(f"start {process.name}")
        self.open(process)
        self._tick(process, process.ticks)
        self._take_turn(process, 0.0)

    def _clock(self) -> tuple[float, float]:
        drift, chance = self.faults.drift, self.time.chance
        if not drift:
            return 1.0, 0.0
        return 1.0 + chance.uniform(-drift, drift), chance.uniform(0.0, ZERO_S_MAX)

    def end(self, process: SimProcess, *, restart: bool) -> None:
        """The process is gone; Spark starts a lost or failed task again after a while."""
        process.alive = False
        if restart:
            delay_s = self.time.chance.uniform(RESTART_S_MIN, self.faults.restart_s_max)
            self.time.after(delay_s, self._start_again, process)

    def _start_again(self, gone: SimProcess) -> None:
        partition = gone.identity.partition
        if not self.master_is_lost and partition not in (p.identity.partition for p in self.alive):
            self.start(partition)

    def open(self, process: SimProcess, *, alone: bool = False) -> None:
        """It listens on fresh streams."""
        process.feed(ev.Opened(self.network.listen(process), alone), self.time.now_s)

    def lose_driver(self, process: SimProcess) -> None:
        """It goes on over another media driver."""
        self.network.lose(process)
        self.open(process, alone=True)

    def _tick(self, process: SimProcess, number: int) -> None:
        if not process.alive or number != process.ticks:
            return
        if self.time.now_s < process.awake_s:
            self.time.at(process.awake_s, self._tick, process, number)
            return
        process.feed(TICK, self.time.now_s)
        busy = process.node.has_news
        self._plan_tick(process, self.size.busy_tick_s if busy else self.size.tick_s)

    def _plan_tick(self, process: SimProcess, about_s: float) -> None:
        """The next one; the one that was planned before is off."""
        process.ticks += 1
        process.tick_s = self.time.now_s + about_s * (0.5 + self.time.chance.random())
        self.time.at(process.tick_s, self._tick, process, process.ticks)

    def _wake(self, process: SimProcess) -> None:
        """A trainer that waits looks at what is new; one in a step does not."""
        self._hurry(process)
        if not (process.stepping or process.woken):
            self._take_turn(process, self.size.wake_s * self.time.chance.random())
            process.woken = True

    def _hurry(self, process: SimProcess) -> None:
        """Its machine has something to say."""
        if process.tick_s > self.time.now_s + 1.5 * self.size.busy_tick_s:
            self._plan_tick(process, self.size.busy_tick_s)

    def _take_turn(self, process: SimProcess, delay_s: float) -> None:
        process.woken = False
        process.turn += 1
        self.time.after(delay_s, self._boundary, process, process.turn)

    def _boundary(self, process: SimProcess, turn: int) -> None:
        if not process.alive or turn != process.turn:
            return
        now_s = self.time.now_s
        if now_s < process.awake_s:
            self.time.at(process.awake_s, self._boundary, process, turn)
            return
        process.woken = False
        changes = process.stepping or process.waiting
        move = process.boundary(now_s)
        if changes:
            self.checks.replica(process)
            self.checks.added(process)
        if move in OVER:
            self._let_end(process)
        if process.stepping:
            step_s = STEP_S_MIN + process.slowness_s * self.time.chance.random()
            self._take_turn(process, step_s)
        elif process.turn == turn:
            self._take_turn(process, self.size.look_s)

    def _let_end(self, process: SimProcess) -> None:
        command = process.node.command
        if command.order is Order.END:
            self.time.say(f"{process.name} ends: {command.reason}")
            self.checks.ended(process, command)
            self.end(process, restart=False)
        else:
            self.time.say(f"{process.name} fails: {command.reason}")
            expected = self.master.aborted or self.chaos.excuses(process, command.why)
            self.checks.failed(process, command, expected=expected)
            self.end(process, restart=True)

    # -- effects ---------------------------------------------------------------------------------

    def _perform(self, process: SimProcess, effect: Effect) -> None:
        """An effect of a node's machine."""
        match effect:
            case Send():
                self.network.send(process, effect.to, effect.message)
            case ev.Tell(message=message):
                self.network.tell(process, message)
            case ev.Reopen():
                self.open(process)
            case ev.OpenEdge():
                self.network.open(process, effect)
            case ev.CloseEdge(node=node):
                self.network.close(process, node)
            case ev.SendChunk(to=to, index=index):
                self.network.send(process, to, process.replica.chunk(index))
            case ev.SendUpdater(to=to, ask=ask):
                process.lender.ask(to, ask)
                process.lend()
            case ev.SendMerged(to=to):
                self.network.send(process, to, self._sum(effect))
            case _:
                raise AssertionError(f"a node cannot want {effect}")

    def step_master(self, event: ev.Event) -> None:
        """One event for the master's machine, and its effects performed."""
        before = self.phase
        effects = self.master.step(event, self.time.now_s)
        lives = outlives(effects, self._perform_master, self.doom)
        if before is Phase.GATHERING and self.phase is not before:
            self.time.say("training begins")
            self._began_with = sum(process.installed for process in self.alive)
            self.chaos.training_began()
        if not lives:
            self.lose_masters_driver()

    def lose_masters_driver(self) -> None:
        self.network.lose(None)
        self.step_master(ev.Moved("master", 1))

    def _perform_master(self, effect: Effect) -> None:
        match effect:
            case Send():
                self.network.send(None, effect.to, effect.message)
            case ev.Answer(address=address, message=message):
                if isinstance(message, Release):
                    self.checks.released(self.network.process(address.host))
                self.network.answer(effect)
            case ev.OpenEdge():
                self.network.open(None, effect)
            case ev.CloseEdge(node=node):
                self.network.close(None, node)
            case ev.Deliver(update=update):
                self.checks.committed(self._process_of(update.origin), update)
                if update.payload.form == BUFFERS:
                    self.replica.take_buffers(update.payload.data, update.commit)
                else:
                    self.replica.apply_update(update)
            case ev.SendChunk(to=to, index=index):
                self.network.send(None, to, self.replica.chunk(index))
            case ev.SendMerged(to=to):
                self.network.send(None, to, self._sum(effect))
            case ev.Hash(commit=commit):
                hashed = ev.Hashed(commit, self.replica.digest(), None)
                self.time.after(0.0, self.step_master, hashed)
            case ev.Abort():
                self.time.say(f"aborted: {effect.reason}")
                self.checks.aborted(effect, nobody=self._lacks_workers())
                self._wait_for_the_last(self.time.now_s + LEAVE_S)
            case ev.Complete():
                self.time.say("complete")
                self._wait_for_the_last(self.time.now_s + LEAVE_S)
            case ev.UpdaterCopied(payloads=payloads):
                self.time.say(f"{len(payloads)} updaters are copied")
                self.checks.copied(payloads, self.processes)
            case ev.Note(text=text):
                self.time.say(text)
            case _:
                raise AssertionError(f"a master cannot want {effect}")

    def _sum(self, effect: ev.SendMerged) -> MergedRange:
        return self.parts.merged(effect)

    def _wait_for_the_last(self, until_s: float) -> None:
        """Tasks end by themselves, soon after the fit has."""
        if self.alive and self.time.now_s < until_s:
            self.time.after(self.size.tick_s, self._wait_for_the_last, until_s)
        else:
            self.time.over = True

    def _arrive_at_master(self, sender: NodeId | None, message: Message) -> None:
        """A driver program that stands still finds the message when it goes on."""
        if self.master_is_lost:
            return
        if self.time.now_s < self._master_awake_s:
            self.time.at(self._master_awake_s, self._arrive_at_master, sender, message)
            return
        counts = isinstance(message, Failed) and message.node in self.master.members.live
        counts = counts and self.phase is not Phase.DONE
        self.step_master(ev.Received(sender, message))
        if counts and not self.master.aborted:
            self.checks.violation(f"I5: a failure was heard and nothing done: {message}")

    def _tick_master(self) -> None:
        if self.time.now_s >= self._master_awake_s:
            self.step_master(TICK)
        after_s = self.size.busy_tick_s * (0.5 + self.time.chance.random())
        self.time.after(after_s, self._tick_master)

    def pause_master(self, seconds: float) -> None:
        """The driver program stands still, perhaps for ever."""
        self._master_awake_s = max(self._master_awake_s, self.time.now_s + seconds)
