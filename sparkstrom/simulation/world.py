"""Simulate a fit in virtual time: master, workers, network, Spark's task starts, and faults.

All random choices come from one seeded generator, so a run repeats exactly. ``FaultInjector`` draws
the faults. ``World`` runs the fit and calls checkers, such as those in ``simulation.invariants``,
which compare messages, effects and state with the protocol's invariants. A media driver is Aeron's
process that sends and receives UDP for a worker or for the master.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial

from sparkstrom.base.identity import NodeId
from sparkstrom.codec.messages import BUFFERS, Message, Phase, Release, TrainingFailure
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.events_and_effects import (
    Command,
    Effect,
    Send,
    TaskEnding,
    TimeoutReason,
)
from sparkstrom.protocol.worker.node import Identity
from sparkstrom.runtime.training_loop import LoopAction
from sparkstrom.simulation.component_factory import ComponentFactory
from sparkstrom.simulation.endpoint_network import BandwidthNetwork, make_network
from sparkstrom.simulation.invariants import TopologyChecker
from sparkstrom.simulation.network import NetworkPartition
from sparkstrom.simulation.process import STEP_S_MIN, Outage, SimProcess
from sparkstrom.simulation.replica import IntTheta, residual_mass
from sparkstrom.simulation.run_options import (
    NO_FAULTS,
    DriverFault,
    Faults,
    RunSize,
    perform_with_fault,
)
from sparkstrom.simulation.virtual_clock import VirtualClock

FIRST_FAULT_S, EARLY_FAULT_S_MAX = 0.3, 4.0
EARLY_SHARE = 0.25  # of the faults; these happen while workers still join
TRAINING_SHARE = 1.2  # of the time that all steps take at their slowest; later faults happen in it
OUTAGE_LEASES_MAX = 2  # longest outage or pause; isolations and worker pauses: twice that
OUTAGE_S_MIN = 0.1
MASTER_SHARE = 0.3  # of the media-driver deaths that hit the master's driver
CONSECUTIVE_DEATHS = (1, 1, 2, 3)
EARLY_FAILURE_SHARE = 0.5  # of the late attempts that fail before they join
FIRST_ATTEMPT = 100  # older attempts have lower numbers


class FaultInjector:
    """Draws the faults of one run from its seed and injects them into a world."""

    def __init__(self, world: World, faults: Faults) -> None:
        self._world, self._faults = world, faults
        self._later: list[Callable[[], None]] = []  # faults that happen during training
        self._was_master_unreachable = False
        self._once_unreachable: set[SimProcess] = set()  # had an outage at some time

    def plan(self) -> None:
        """Draw when each fault happens: a few while workers join, most while they train."""
        faults, rng = self._faults, self._world.time.rng
        acts: tuple[tuple[int, Callable[[], None]], ...] = (
            (faults.crashes, self._crash),
            (faults.executor_crashes, self._crash_executor),
            (faults.doubles, self._start_duplicate_attempt),
            (faults.cuts, self._make_unreachable),
            (faults.splits, self._partition_network),
            (faults.narrows, self._narrow_link),
            (faults.isolations, self._isolate_master),
            (faults.pauses, self._pause_worker),
            (faults.leaps, self._advance_clock),
            (faults.master_pauses, self._pause_master),
            (faults.breaks, self._break_stream),
            (faults.exiles, self._cut_off_forever),
            (faults.master_lost, self._kill_driver_program),
            (faults.edge_deaths, self._kill_media_driver),
            (faults.driver_deaths, self._plan_driver_fault),
            (self._world.size.copies, self._request_optimizer_copy),
            (self._world.size.copies_of_all, partial(self._request_optimizer_copy, everybody=True)),
            (rng.random() < faults.stop, self._request_stop),
            (rng.random() < faults.failure, self._fail_training),
            (faults.late_attempts, self._start_older_attempt),
        )
        for count, act in acts:
            for _ in range(count):
                if rng.random() < EARLY_SHARE:
                    self._world.time.at(rng.uniform(FIRST_FAULT_S, EARLY_FAULT_S_MAX), act)
                else:
                    self._later.append(act)

    def schedule_training_faults(self) -> None:
        """Schedule the remaining faults over the expected duration of training, from now on."""
        time, size = self._world.time, self._world.size
        training_s = size.epochs * size.batches * self._faults.step_s_max
        for act in self._later:
            time.after(time.rng.uniform(0, TRAINING_SHARE * training_s), act)
        time.after(self._faults.quiet_after_s, self._world.network.stop_message_faults)

    def is_failure_excused(
        self, process: SimProcess, why: TaskEnding | TimeoutReason | None
    ) -> bool:
        """Return True if injected faults explain that a process failed for lack of an answer."""
        if why not in (TimeoutReason.MASTER, TimeoutReason.ANSWER):
            return False
        return process in self._once_unreachable or self._was_master_unreachable

    def _pick_victim(self) -> SimProcess | None:
        """Return a random living process; None if the fit is done or no process lives."""
        alive = self._world.alive
        if not alive or self._world.phase is Phase.DONE:
            return None
        return self._world.time.rng.choice(alive)

    def _record_fault(self, kind: str, text: str) -> None:
        """Count a fault of this ``kind``, note ``text``, and excuse missing progress until now."""
        self._world.time.faults[kind] += 1
        self._world.time.say(text)
        self._extend_trouble(self._world.time.now_s)

    def _extend_trouble(self, until_s: float) -> None:
        """Record that processes need not make progress before the virtual time ``until_s``."""
        shape = self._world.shape
        shape.trouble_until_s = max(shape.trouble_until_s, until_s)

    def _draw_duration_s(self) -> float:
        """Draw how long an outage or pause lasts."""
        return self._world.time.rng.uniform(
            OUTAGE_S_MIN, OUTAGE_LEASES_MAX * self._world.size.lease_s
        )

    def _crash(self) -> None:
        """Kill a worker process."""
        victim = self._pick_victim()
        if victim is not None:
            self._record_fault("crashes", f"crash {victim.name}")
            self._world.end(victim, restart=True)

    def _crash_executor(self) -> None:
        """Kill all workers of one executor."""
        victim = self._pick_victim()
        if victim is None:
            return
        executor = victim.identity.executor
        self._record_fault("executor crashes", f"crash of executor {executor}")
        for process in self._world.alive:
            if process.identity.executor == executor:
                self._world.end(process, restart=True)

    def _start_duplicate_attempt(self) -> None:
        """Start another attempt of a task that still runs, as if Spark had lost contact."""
        victim = self._pick_victim()
        if victim is not None:
            self._record_fault("doubles", f"Spark considers {victim.name} lost")
            self._world.start(victim.identity.partition)

    def _start_older_attempt(self) -> None:
        """Start a task of an earlier stage attempt late; it may fail before it joins."""
        victim = self._pick_victim()
        if victim is None:
            return
        world, partition = self._world, victim.identity.partition
        self._record_fault("late attempts", f"an attempt older than {victim.name} starts")
        older, newest = world.start_older(partition), world.master.partitions[partition].attempt
        if older is None or newest < older.identity.attempt:
            return  # without a newer attempt its failure would rightly end the fit
        if world.time.rng.random() < EARLY_FAILURE_SHARE:
            older.fail(world.time.now_s)

    def _make_unreachable(self) -> None:
        """Make a worker unreachable for a while, in one direction or both."""
        victim = self._pick_victim()
        if victim is None:
            return
        time = self._world.time
        until_s = time.now_s + self._draw_duration_s()
        up, down = time.rng.choice(((True, True), (True, True), (True, False), (False, True)))
        self._record_fault("cuts", f"cut {victim.name} until {until_s:.3f}, {up=}, {down=}")
        self._begin_outage(victim, Outage(until_s, up, down))

    def _begin_outage(self, victim: SimProcess, outage: Outage) -> None:
        """Begin an outage of a process."""
        self._once_unreachable.add(victim)
        self._extend_trouble(outage.until_s)
        self._world.network.begin_outage(victim, outage)

    def _partition_network(self) -> None:
        """Cut half of the workers off from all other processes; they still reach each other."""
        alive, time = self._world.alive, self._world.time
        if len(alive) < 2 or self._world.phase is Phase.DONE:
            return
        apart = time.rng.sample(alive, len(alive) // 2)
        until_s = time.now_s + self._draw_duration_s()
        self._record_fault(
            "splits", f"{', '.join(p.name for p in apart)} split off until {until_s:.3f}"
        )
        self._extend_trouble(until_s)
        self._once_unreachable.update(apart)
        self._world.network.begin_partition(NetworkPartition(until_s, frozenset(apart)))

    def _narrow_link(self) -> None:
        """Lower the rate of a host's link if links are simulated and the fit is not done."""
        network = self._world.network
        if isinstance(network, BandwidthNetwork) and self._world.phase is not Phase.DONE:
            network.narrow_link()

    def _isolate_master(self) -> None:
        """Cut the running driver program off from all workers for a while."""
        until_s = self._world.time.now_s + 2 * self._draw_duration_s()
        self._record_fault(
            "isolations", f"the master is cut off from all workers until {until_s:.3f}"
        )
        self._extend_trouble(until_s)
        self._was_master_unreachable = True
        self._world.network.begin_partition(NetworkPartition(until_s, frozenset(self._world.alive)))

    def _advance_clock(self) -> None:
        """Move a worker's clock forward."""
        victim = self._pick_victim()
        if victim is not None:
            seconds = self._world.time.rng.random() * self._world.size.lease_s / 8
            self._record_fault("leaps", f"the clock of {victim.name} leaps by {seconds:.3f} s")
            victim.advance_clock(seconds)

    def _break_stream(self) -> None:
        """Break one stream of an edge for good."""
        victim = self._pick_victim()
        if victim is not None:
            luck = self._world.time.rng.getrandbits(2)
            up, data = bool(luck & 1), bool(luck & 2)
            self._record_fault("breaks", f"a stream of {victim.name} breaks, {up=}, {data=}")
            self._world.network.break_stream(victim, up=up, data=data)

    def _cut_off_forever(self) -> None:
        """Make a worker unreachable forever."""
        victim = self._pick_victim()
        if victim is not None:
            self._record_fault("exiles", f"{victim.name} is unreachable from now on")
            self._begin_outage(victim, Outage(math.inf, up=True, down=True))

    def _kill_driver_program(self) -> None:
        """Stop the driver program for good."""
        self._record_fault("master lost", "the driver program dies")
        self._was_master_unreachable = True
        self._extend_trouble(math.inf)
        self._world.pause_master(math.inf)

    def _pause_worker(self) -> None:
        """Suspend a worker process for a while."""
        victim = self._pick_victim()
        if victim is not None:
            victim.paused_until_s = self._world.time.now_s + 2 * self._draw_duration_s()
            self._record_fault("pauses", f"pause {victim.name} until {victim.paused_until_s:.3f}")
            self._extend_trouble(victim.paused_until_s)

    def _request_optimizer_copy(self, *, everybody: bool = False) -> None:
        """Request optimizer states of one worker, or of all if ``everybody``, for a checkpoint.

        This is load, not a fault.
        """
        if self._world.phase is not Phase.DONE:
            self._world.step_master(ev.OptimizerCopyRequest(everybody))

    def _pause_master(self) -> None:
        """Suspend the driver program for a while."""
        duration_s = self._draw_duration_s()
        self._record_fault("master pauses", f"the master is suspended for {duration_s:.3f} s")
        self._was_master_unreachable = True
        self._extend_trouble(self._world.time.now_s + duration_s)
        self._world.pause_master(duration_s)

    def _kill_media_driver(self) -> None:
        """Kill the media driver of a worker or of the master; this breaks all edges of the node."""
        victim = self._pick_victim()
        if victim is None:
            return
        if self._world.time.rng.random() < MASTER_SHARE:
            self._record_fault("edge deaths", "the master's media driver dies")
            self._world.lose_master_driver()
        else:
            self._record_fault("edge deaths", f"the media driver of {victim.name} dies")
            self._world.lose_driver(victim)

    def _plan_driver_fault(self) -> None:
        """Prepare one or more deaths of a media driver, each in the middle of a list of effects."""
        world, victim = self._world, self._pick_victim()
        if victim is None:
            return
        rng = world.time.rng
        fault = DriverFault(rng, rng.choice(CONSECUTIVE_DEATHS))
        if rng.random() < MASTER_SHARE:
            self._record_fault(
                "driver deaths", "the master's media driver will die between effects"
            )
            world.driver_fault = fault
            return
        joining = [p for p in world.alive if p.node.node is None]
        victim = rng.choice(joining) if joining else victim
        self._record_fault(
            "driver deaths", f"the media driver of {victim.name} will die between effects"
        )
        victim.driver_fault = fault

    def _request_stop(self) -> None:
        """Request an early end of the fit."""
        if self._world.phase is not Phase.DONE:
            self._record_fault("stops", "an early stop is requested")
            self._world.step_master(ev.StopRequested("enough"))

    def _fail_training(self) -> None:
        """Make training raise an exception in a worker."""
        victim = self._pick_victim()
        if victim is not None and not victim.is_failing:
            self._record_fault("failures", f"training raises in {victim.name}")
            victim.fail(self._world.time.now_s)


TICK = ev.Tick()
FINAL_MOVES = (LoopAction.END, LoopAction.FAIL)
TASK_END_S_MAX = 80.0  # from the end of the fit until the last task must have ended
RESTART_S_MIN = 0.2  # until Spark restarts a lost task
SLOW_FACTOR = 10  # of the longest step of slow workers
CLOCK_OFFSET_S_MAX = 1000.0  # of a process's own clock, which drifts, at virtual time 0


class World:
    """One simulated run; ``run`` executes it and returns the violations of invariants.

    ``parts`` makes its components; None: those of a toy fit, whose parameters are a few integers.
    """

    def __init__(
        self, seed: int, size: RunSize, faults: Faults, parts: ComponentFactory | None = None
    ) -> None:
        self.seed, self.size, self.faults = seed, size, faults
        self.time = VirtualClock(seed)
        self.scratch: dict[str, IntTheta] = {}  # residual files, by path
        self.parts = parts or ComponentFactory(size)
        self.replica = self.parts.create_replica()
        self.master = self.parts.create_master(self.time, self.scratch)
        self.checks = self.parts.create_checker(
            {p: residual_mass(theta) for p, theta in self.scratch.items()}
        )
        self.checks.begin(size, calm=faults == NO_FAULTS)
        self.network = make_network(
            self.time,
            size,
            faults,
            to_master=self._arrive_at_master,
            step_master=self.step_master,
            violation=self.checks.report_violation,
        )
        self.shape = TopologyChecker(self.checks.report_violation, size.lease_s)
        self.processes: list[SimProcess] = []
        self.fault_injector = FaultInjector(self, faults)
        self._attempts = itertools.count(FIRST_ATTEMPT)
        self._older_attempts = itertools.count(FIRST_ATTEMPT - 1, -1)
        self._master_awake_s = 0.0
        self._initial_workers = 0  # workers with a replica when training began
        self.driver_fault: DriverFault | None = None  # pending fault of the master's media driver

    def run(self) -> list[str]:
        """Run to the end of the fit; return the violations of invariants, as text."""
        for partition in range(self.size.nodes):
            self.time.at(
                self.time.rng.uniform(0, self.size.task_start_window_s), self.start, partition
            )
        self.fault_injector.plan()
        self.time.at(self.size.tick_s, self._tick_master)
        self.time.at(self.size.check_interval_s, self._check_invariants)
        if not self.time.run(self.size.end_s):
            self.checks.report_violation(self._describe_hang())
        self.checks.check_at_end(self.master, self.replica, self.processes)
        self.network.check_at_end()
        return self.checks.violations

    def _describe_hang(self) -> str:
        """Return the violation of a run that does not end."""
        orders = {p.name: p.node.directive for p in self.processes if p.alive}
        return f"I4: not over at {self.time.now_s:g} s: {self.phase.name}, {orders}"

    @property
    def phase(self) -> Phase:
        """The fit's phase in the master's state, such as GATHERING or RUNNING."""
        return self.master.phases.phase

    @property
    def alive(self) -> list[SimProcess]:
        """The processes that have neither ended nor been killed."""
        return [process for process in self.processes if process.alive]

    @property
    def is_master_lost(self) -> bool:
        """Whether the driver program is gone for good."""
        return self._master_awake_s == math.inf

    @property
    def is_membership_unchanged(self) -> bool:
        """Whether no worker has joined or left since training began."""
        members = self.master.members
        nobody_came = len(members.live) == len(self.processes) == self._initial_workers
        return self.phase is Phase.RUNNING and nobody_came and not members.departures

    @property
    def _is_calm(self) -> bool:
        """Whether training runs and messages are no longer lost."""
        running = self.phase in (Phase.RUNNING, Phase.DRAINING) and not self.master.aborted
        return running and self.network.quiet

    def _may_lack_workers(self) -> bool:
        """Return True if faults explain that the fit lacks workers; slow links alone do not."""
        late = self.phase is Phase.GATHERING and bool(self.time.faults)
        return late or not (self._has_reachable_worker() or self.faults.rate)

    def _has_reachable_worker(self) -> bool:
        """Return True if a reachable worker that is not paused has a replica."""
        now_s = self.time.now_s
        awake = (p for p in self.alive if p.has_replica and p.paused_until_s <= now_s)
        return any(not self.network.is_unreachable(process) for process in awake)

    def _check_invariants(self) -> None:
        """Check what must hold throughout the run, and schedule the next check.

        End the run if the driver program and all workers are gone.
        """
        self.checks.check_bounds(self.master, self.processes)
        self.checks.check_minibatch_count(self.master)
        self.shape.check_tree(self.master)
        self.shape.check_edges(self.processes)
        self.shape.check_transports(self.processes, self.master, self.network.master_edges)
        if self._is_calm:
            head = self.master.sequencer.head
            self.shape.record_places(self.master, self.time.now_s)
            self.shape.check_progress(self.processes, head, self.time.now_s)
            self.shape.check_closed_ids(self.processes, self.master, self.time.now_s)
        if self.is_membership_unchanged and self.size.max_lead is not None:
            self.checks.check_lead(self.processes, self.size.max_lead)
        self.network.check_during_run(self)
        if self.is_master_lost and not self.alive:
            self.time.over = True
        self.time.after(self.size.check_interval_s, self._check_invariants)

    def identity(self, partition: int, attempt: int) -> Identity:
        """Return what a worker reports about itself and its rows when it joins the fit.

        ``attempt``: Spark's number of the task attempt; a higher one replaces a lower one.
        """
        start = self.size.start_of(partition)
        return Identity(
            token=self.time.rng.getrandbits(62),
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
        """Start an attempt at a partition, as Spark does, unless the job has ended."""
        self._start_attempt(partition, self._attempts)

    def start_older(self, partition: int) -> SimProcess | None:
        """Start an attempt that is older than all others at a partition, unless the job ended."""
        return self._start_attempt(partition, self._older_attempts)

    def _start_attempt(self, partition: int, attempts: Iterator[int]) -> SimProcess | None:
        """Start the next of these attempts at a partition and return it; None if the job ended."""
        if self.phase is Phase.DONE or self.master.aborted:
            return None
        attempt = next(attempts)
        process = self.parts.create_process(
            f"p{partition}/{attempt}",
            self.identity(partition, attempt),
            self.size.worker_limits(),
            epochs=self.size.epochs,
            publish_every=self.size.publish_every,
            seed=self.time.rng.getrandbits(32),
            perform=self._perform,
            wake_trainer=self._wake_trainer,
            tick_soon=self._tick_soon,
            replace_driver=self.lose_driver,
            scratch=self.scratch,
            time=self.time,
            clock=self._draw_clock(),
            buffered=self.size.has_buffers,
            message_sizes=self.size.message_sizes,
        )
        process.step_s_max = self.time.rng.uniform(STEP_S_MIN, self.faults.step_s_max)
        if partition < self.faults.slow:
            process.step_s_max *= SLOW_FACTOR
        self.processes.append(process)
        self.network.add(process)
        self.checks.record_start(process)
        self.time.say(f"start {process.name}")
        self.open(process)
        self._send_tick(process, process.ticks)
        self._schedule_boundary(process, 0.0)
        return process

    def _draw_clock(self) -> tuple[float, float]:
        """Draw rate and offset of a process's clock."""
        drift, rng = self.faults.drift, self.time.rng
        if not drift:
            return 1.0, 0.0
        return 1.0 + rng.uniform(-drift, drift), rng.uniform(0.0, CLOCK_OFFSET_S_MAX)

    def end(self, process: SimProcess, *, restart: bool) -> None:
        """Remove a process; if ``restart``, start another attempt later, as Spark does."""
        process.alive = False
        if restart:
            delay_s = self.time.rng.uniform(RESTART_S_MIN, self.faults.restart_s_max)
            self.time.after(delay_s, self._start_again, process)

    def _start_again(self, gone: SimProcess) -> None:
        """Start another attempt at the partition of ``gone``, unless one runs.

        Do nothing if the driver program is gone.
        """
        partition = gone.identity.partition
        if not self.is_master_lost and partition not in (p.identity.partition for p in self.alive):
            self.start(partition)

    def open(self, process: SimProcess, *, alone: bool = False) -> None:
        """Open new streams of a process; ``alone``: it lost all edges with its media driver."""
        process.handle(ev.StreamsOpened(self.network.open_streams(process), alone), self.time.now_s)

    def lose_driver(self, process: SimProcess) -> None:
        """Give a process a new media driver, because the old one died, and open new streams."""
        self.network.lose_media_driver(process)
        self.open(process, alone=True)

    def _send_tick(self, process: SimProcess, number: int) -> None:
        """Send a tick to a node, once any pause is over, and schedule the next one.

        Do nothing if the process has ended or has a newer scheduled tick than ``number``.
        """
        if not process.alive or number != process.ticks:
            return
        if self.time.now_s < process.paused_until_s:
            self.time.at(process.paused_until_s, self._send_tick, process, number)
            return
        process.handle(TICK, self.time.now_s)
        busy = process.node.has_pending_report
        self._schedule_tick(process, self.size.busy_tick_s if busy else self.size.tick_s)

    def _schedule_tick(self, process: SimProcess, mean_delay_s: float) -> None:
        """Schedule a node's next tick, in place of the one scheduled before.

        The delay is random, from half of ``mean_delay_s`` to one and a half of it.
        """
        process.ticks += 1
        process.tick_s = self.time.now_s + mean_delay_s * (0.5 + self.time.rng.random())
        self.time.at(process.tick_s, self._send_tick, process, process.ticks)

    def _wake_trainer(self, process: SimProcess) -> None:
        """Schedule a waiting trainer's next batch boundary soon, and a tick of its node.

        A trainer that computes a step is not disturbed.
        """
        self._tick_soon(process)
        if not (process.stepping or process.is_woken):
            self._schedule_boundary(process, self.size.wake_s * self.time.rng.random())
            process.is_woken = True

    def _tick_soon(self, process: SimProcess) -> None:
        """Schedule an early tick for a node that has something to report."""
        if process.tick_s > self.time.now_s + 1.5 * self.size.busy_tick_s:
            self._schedule_tick(process, self.size.busy_tick_s)

    def _schedule_boundary(self, process: SimProcess, delay_s: float) -> None:
        """Schedule the trainer's next boundary, in place of any other."""
        process.is_woken = False
        process.turn += 1
        self.time.after(delay_s, self._pass_boundary, process, process.turn)

    def _pass_boundary(self, process: SimProcess, turn: int) -> None:
        """Run a trainer's batch boundary, check its replica, and schedule the next boundary.

        Do nothing if the process has ended or a different boundary than ``turn`` is scheduled.
        """
        if not process.alive or turn != process.turn:
            return
        now_s = self.time.now_s
        if now_s < process.paused_until_s:
            self.time.at(process.paused_until_s, self._pass_boundary, process, turn)
            return
        process.is_woken = False
        changes = process.stepping or process.waiting
        move = process.run_boundary(now_s)
        if changes:
            self.checks.check_replica(process)
            self.checks.check_added_files(process)
        if move in FINAL_MOVES:
            self._end_task(process)
        if process.stepping:
            step_s = STEP_S_MIN + process.step_s_max * self.time.rng.random()
            self._schedule_boundary(process, step_s)
        elif process.turn == turn:
            self._schedule_boundary(process, self.size.trainer_poll_s)

    def _end_task(self, process: SimProcess) -> None:
        """End a task with success or failure, as its node's directive says."""
        command = process.node.directive
        if command.order is Command.END:
            self.time.say(f"{process.name} ends: {command.reason}")
            self.checks.check_success(process, command)
            self.end(process, restart=False)
        else:
            self.time.say(f"{process.name} fails: {command.reason}")
            expected = self.master.aborted or self.fault_injector.is_failure_excused(
                process, command.cause
            )
            self.checks.check_failure(process, command, expected=expected)
            if command.cause is TaskEnding.SUPERSEDED:  # raised in the task, which reports it
                process.fail(self.time.now_s)
            self.end(process, restart=True)

    def _perform(self, process: SimProcess, effect: Effect) -> None:
        """Perform an effect of a worker's node."""
        match effect:
            case Send():
                self.network.send(process, effect.to, effect.message)
            case ev.SendDirect(message=message):
                self.network.send_to_master(process, message)
            case ev.ReopenStreams():
                self.open(process)
            case ev.OpenEdge():
                self.network.open_edge(process, effect)
            case ev.CloseEdge(node=node):
                self.network.close_edge(process, node)
            case ev.SendChunk(to=to, index=index):
                self.network.send(process, to, process.replica.chunk(index))
            case ev.SendOptimizerChunk(to=to, ask=ask):
                process.lender.add_request(to, ask)
                process.send_optimizer_chunks()
            case ev.SendMerged(to=to):
                self.network.send(process, to, self.parts.merge_commits(effect))
            case _:
                raise AssertionError(f"a node has no effect {effect}")

    def step_master(self, event: ev.Event) -> None:
        """Pass an event to the master and perform the effects.

        When training begins, schedule the faults that happen during training.
        """
        before = self.phase
        effects = self.master.step(event, self.time.now_s)
        lives = perform_with_fault(effects, self._perform_master, self.driver_fault)
        if before is Phase.GATHERING and self.phase is not before:
            self.time.say("training begins")
            self._initial_workers = sum(process.has_replica for process in self.alive)
            self.fault_injector.schedule_training_faults()
        if not lives:
            self.lose_master_driver()

    def lose_master_driver(self) -> None:
        """Give the master a new media driver, because the old one died."""
        self.network.lose_media_driver(None)
        self.step_master(ev.EndpointChanged("master", 1))

    def _perform_master(self, effect: Effect) -> None:
        """Perform an effect of the master."""
        match effect:
            case Send():
                self.network.send(None, effect.to, effect.message)
            case ev.SendToProcess(address=address, message=message):
                if isinstance(message, Release):
                    self.checks.check_release(self.network.process(address.host))
                self.network.send_to_process(effect)
            case ev.OpenEdge():
                self.network.open_edge(None, effect)
            case ev.CloseEdge(node=node):
                self.network.close_edge(None, node)
            case ev.ApplyCommit(update=update):
                origin = self.master.members.live[update.origin].join.address.host
                self.checks.check_commit(self.network.process(origin), update)
                if update.payload.form == BUFFERS:
                    self.replica.take_buffers(update.payload.data, update.commit)
                else:
                    self.replica.apply_update(update)
            case ev.SendChunk(to=to, index=index):
                self.network.send(None, to, self.replica.chunk(index))
            case ev.SendMerged(to=to):
                self.network.send(None, to, self.parts.merge_commits(effect))
            case ev.HashReplica(commit=commit):
                hashed = ev.ReplicaHashed(commit, self.replica.digest(), None)
                self.time.after(0.0, self.step_master, hashed)
            case ev.Abort():
                self.time.say(f"aborted: {effect.reason}")
                newest = [partition.attempt for partition in self.master.partitions]
                self.checks.check_abort(effect, newest, nobody=self._may_lack_workers())
                self._wait_for_tasks(self.time.now_s + TASK_END_S_MAX)
            case ev.Complete():
                self.time.say("complete")
                self._wait_for_tasks(self.time.now_s + TASK_END_S_MAX)
            case ev.OptimizerCopied(payloads=payloads):
                self.time.say(f"{len(payloads)} updaters are copied")
                self.checks.check_optimizer_copies(payloads, self.processes)
            case ev.Note(text=text):
                self.time.say(text)
            case _:
                raise AssertionError(f"a master has no effect {effect}")

    def _wait_for_tasks(self, until_s: float) -> None:
        """End the run once all tasks have ended, or at ``until_s``."""
        if self.alive and self.time.now_s < until_s:
            self.time.after(self.size.tick_s, self._wait_for_tasks, until_s)
        else:
            self.time.over = True

    def _arrive_at_master(self, sender: NodeId | None, message: Message) -> None:
        """Deliver a message to the master once any pause is over; drop it if the master is lost.

        If the message reports a failure of training, check that the master aborts the fit (I5).
        """
        if self.is_master_lost:
            return
        if self.time.now_s < self._master_awake_s:
            self.time.at(self._master_awake_s, self._arrive_at_master, sender, message)
            return
        counts = isinstance(message, TrainingFailure) and message.node in self.master.members.live
        counts = counts and self.phase is not Phase.DONE
        self.step_master(ev.Received(sender, message))
        if counts and not self.master.aborted:
            self.checks.report_violation(f"I5: a reported failure did not end the fit: {message}")

    def _tick_master(self) -> None:
        """Send a tick to the master unless it is paused, and schedule the next one."""
        if self.time.now_s >= self._master_awake_s:
            self.step_master(TICK)
        after_s = self.size.busy_tick_s * (0.5 + self.time.rng.random())
        self.time.after(after_s, self._tick_master)

    def pause_master(self, seconds: float) -> None:
        """Suspend the driver program for ``seconds``, which may be infinite."""
        self._master_awake_s = max(self._master_awake_s, self.time.now_s + seconds)
