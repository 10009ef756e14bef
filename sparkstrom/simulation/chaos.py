"""Chaos: plans a run's faults and lets them happen."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Protocol

from sparkstrom.codec.messages import Phase
from sparkstrom.protocol.common import events as ev
from sparkstrom.protocol.common.endings import Ending, Vain
from sparkstrom.simulation.deaths import Doom
from sparkstrom.simulation.faults import Faults
from sparkstrom.simulation.linked import LinkedNetwork
from sparkstrom.simulation.scene import Scene
from sparkstrom.simulation.sim_network import Network, Split
from sparkstrom.simulation.sim_process import Cut, SimProcess

FIRST_S, EARLY_S = 0.3, 4.0
EARLY_SHARE = 0.25
TRAINING_SHARE = 1.2  # of the time that all steps take at their slowest
# How long cuts and pauses of the driver last at most; twice that its isolations and workers' pauses
LEASES_MAX = 2
CUT_S_MIN = 0.1
MASTER_SHARE = 0.3  # of the media drivers that die
DEATHS_IN_A_ROW = (1, 1, 2, 3)


class Stricken(Scene, Protocol):
    """A world to which something may happen. ``doom``: of the master's media driver."""

    network: Network
    doom: Doom | None

    def start(self, partition: int) -> None:
        """Spark starts an attempt."""

    def end(self, process: SimProcess, *, restart: bool) -> None:
        """The process is gone."""

    def lose_driver(self, process: SimProcess) -> None:
        """Its media driver is gone."""

    def lose_masters_driver(self) -> None:
        """The master's is."""

    def pause_master(self, seconds: float) -> None:
        """The driver program stands still, perhaps for ever."""

    def step_master(self, event: ev.Event) -> None:
        """One event for the master's machine."""


class Chaos:
    """What happens to a world, by its faults."""

    def __init__(self, world: Stricken, faults: Faults) -> None:
        self._world, self._faults = world, faults
        self._later: list[Callable[[], None]] = []
        self._master_was_away = False
        self._unreached: set[SimProcess] = set()  # who was out of reach for some time

    def plan(self) -> None:
        """Draw when each fault comes: a few while workers gather, most while they train."""
        faults, chance = self._faults, self._world.time.chance
        acts: tuple[tuple[int, Callable[[], None]], ...] = (
            (faults.crashes, self._crash),
            (faults.executor_crashes, self._crash_executor),
            (faults.doubles, self._double),
            (faults.cuts, self._cut_off),
            (faults.splits, self._split),
            (faults.narrows, self._narrow),
            (faults.isolations, self._isolate),
            (faults.pauses, self._pause),
            (faults.leaps, self._leap),
            (faults.master_pauses, self._pause_master),
            (faults.breaks, self._break_stream),
            (faults.exiles, self._exile),
            (faults.master_lost, self._lose_master),
            (faults.edge_deaths, self._kill_edge),
            (faults.driver_deaths, self._doom),
            (self._world.size.copies, self._copy_updater),
            (self._world.size.copies_of_all, partial(self._copy_updater, everybody=True)),
            (chance.random() < faults.stop, self._stop),
            (chance.random() < faults.failure, self._fail),
        )
        for count, act in acts:
            for _ in range(count):
                if chance.random() < EARLY_SHARE:
                    self._world.time.at(chance.uniform(FIRST_S, EARLY_S), act)
                else:
                    self._later.append(act)

    def training_began(self) -> None:
        """From now on until about when it would end."""
        time, size = self._world.time, self._world.size
        training_s = size.epochs * size.batches * self._faults.step_s_max
        for act in self._later:
            time.after(time.chance.uniform(0, TRAINING_SHARE * training_s), act)
        time.after(self._faults.quiet_after_s, self._world.network.calm_down)

    def excuses(self, process: SimProcess, why: Ending | Vain | None) -> bool:
        """Whether this process may fail because nobody answers."""
        if why not in (Vain.MASTER, Vain.ANSWER):
            return False
        return process in self._unreached or self._master_was_away

    def _victim(self) -> SimProcess | None:
        alive = self._world.alive
        if not alive or self._world.phase is Phase.DONE:
            return None
        return self._world.time.chance.choice(alive)

    def _happens(self, what: str, text: str) -> None:
        self._world.time.faults[what] += 1
        self._world.time.say(text)
        self._lasts(self._world.time.now_s)

    def _lasts(self, until_s: float) -> None:
        """Nobody need be well again before."""
        shape = self._world.shape
        shape.trouble_s = max(shape.trouble_s, until_s)

    def _duration_s(self) -> float:
        return self._world.time.chance.uniform(CUT_S_MIN, LEASES_MAX * self._world.size.lease_s)

    def _crash(self) -> None:
        victim = self._victim()
        if victim is not None:
            self._happens("crashes", f"crash {victim.name}")
            self._world.end(victim, restart=True)

    def _crash_executor(self) -> None:
        victim = self._victim()
        if victim is None:
            return
        executor = victim.identity.executor
        self._happens("executor crashes", f"crash of executor {executor}")
        for process in self._world.alive:
            if process.identity.executor == executor:
                self._world.end(process, restart=True)

    def _double(self) -> None:
        victim = self._victim()
        if victim is not None:
            self._happens("doubles", f"Spark takes {victim.name} for lost")
            self._world.start(victim.identity.partition)

    def _cut_off(self) -> None:
        victim = self._victim()
        if victim is None:
            return
        time = self._world.time
        until_s = time.now_s + self._duration_s()
        up, down = time.chance.choice(((True, True), (True, True), (True, False), (False, True)))
        self._happens("cuts", f"cut {victim.name} until {until_s:.3f}, {up=}, {down=}")
        self._cut(victim, Cut(until_s, up, down))

    def _cut(self, victim: SimProcess, cut: Cut) -> None:
        self._unreached.add(victim)
        self._lasts(cut.until_s)
        self._world.network.cut(victim, cut)

    def _split(self) -> None:
        """Half of the workers are alone with each other."""
        alive, time = self._world.alive, self._world.time
        if len(alive) < 2 or self._world.phase is Phase.DONE:
            return
        apart = time.chance.sample(alive, len(alive) // 2)
        until_s = time.now_s + self._duration_s()
        self._happens("splits", f"{', '.join(p.name for p in apart)} split off until {until_s:.3f}")
        self._lasts(until_s)
        self._unreached.update(apart)
        self._world.network.split(Split(until_s, frozenset(apart)))

    def _narrow(self) -> None:
        network = self._world.network
        if isinstance(network, LinkedNetwork) and self._world.phase is not Phase.DONE:
            network.narrow()

    def _isolate(self) -> None:
        """The driver program lives and hears nobody: to it, everybody else is gone."""
        until_s = self._world.time.now_s + 2 * self._duration_s()
        self._happens("isolations", f"nobody hears the master until {until_s:.3f}, or is heard")
        self._lasts(until_s)
        self._master_was_away = True
        self._world.network.split(Split(until_s, frozenset(self._world.alive)))

    def _leap(self) -> None:
        victim = self._victim()
        if victim is not None:
            seconds = self._world.time.chance.random() * self._world.size.lease_s / 8
            self._happens("leaps", f"the clock of {victim.name} leaps by {seconds:.3f} s")
            victim.leap(seconds)

    def _break_stream(self) -> None:
        victim = self._victim()
        if victim is not None:
            luck = self._world.time.chance.getrandbits(2)
            up, data = bool(luck & 1), bool(luck & 2)
            self._happens("breaks", f"a stream of {victim.name} breaks, {up=}, {data=}")
            self._world.network.break_stream(victim, up=up, data=data)

    def _exile(self) -> None:
        victim = self._victim()
        if victim is not None:
            self._happens("exiles", f"{victim.name} is out of reach for ever")
            self._cut(victim, Cut(math.inf, up=True, down=True))

    def _lose_master(self) -> None:
        self._happens("master lost", "the driver program is gone")
        self._master_was_away = True
        self._lasts(math.inf)
        self._world.pause_master(math.inf)

    def _pause(self) -> None:
        victim = self._victim()
        if victim is not None:
            victim.awake_s = self._world.time.now_s + 2 * self._duration_s()
            self._happens("pauses", f"pause {victim.name} until {victim.awake_s:.3f}")
            self._lasts(victim.awake_s)

    def _copy_updater(self, *, everybody: bool = False) -> None:
        """No fault: the driver program's main thread wants a checkpoint."""
        if self._world.phase is not Phase.DONE:
            self._world.step_master(ev.CopyUpdater(everybody))

    def _pause_master(self) -> None:
        duration_s = self._duration_s()
        self._happens("master pauses", f"the master stands still for {duration_s:.3f} s")
        self._master_was_away = True
        self._lasts(self._world.time.now_s + duration_s)
        self._world.pause_master(duration_s)

    def _kill_edge(self) -> None:
        """A media driver dies: a worker's, or the master's, which takes all edges along."""
        victim = self._victim()
        if victim is None:
            return
        if self._world.time.chance.random() < MASTER_SHARE:
            self._happens("edge deaths", "the master's media driver dies")
            self._world.lose_masters_driver()
        else:
            self._happens("edge deaths", f"the media driver of {victim.name} dies")
            self._world.lose_driver(victim)

    def _doom(self) -> None:
        """The same as soon as a machine wants several things at once, and perhaps again at once."""
        world, victim = self._world, self._victim()
        if victim is None:
            return
        chance = world.time.chance
        doom = Doom(chance, chance.choice(DEATHS_IN_A_ROW))
        if chance.random() < MASTER_SHARE:
            self._happens("driver deaths", "the master's media driver is doomed")
            world.doom = doom
            return
        joining = [p for p in world.alive if p.node.node is None]
        victim = chance.choice(joining) if joining else victim
        self._happens("driver deaths", f"the media driver of {victim.name} is doomed")
        victim.doom = doom

    def _stop(self) -> None:
        if self._world.phase is not Phase.DONE:
            self._happens("stops", "somebody asks to stop")
            self._world.step_master(ev.StopRequested("enough"))

    def _fail(self) -> None:
        victim = self._victim()
        if victim is not None and not victim.failing:
            self._happens("failures", f"training raises in {victim.name}")
            victim.fail(self._world.time.now_s)
