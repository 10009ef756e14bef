"""A worker of a rehearsed (simulated) fit, with the code of a real worker, in virtual time.

Its node, the protocol's state machine, and its trainer, which runs the training loop with model and
encoder, are those of a real fit. All of them run in one thread, which a virtual clock calls.
"""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, get_args

from sparkstrom.base.errors import PeerError, SparkstromError, TrainingError, format_reason
from sparkstrom.base.identity import NodeId
from sparkstrom.codec.messages import Address
from sparkstrom.data.row_store import Batches
from sparkstrom.models.base import FlatModel
from sparkstrom.observe.telemetry import TrainingCounters
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.events_and_effects import Directive
from sparkstrom.protocol.worker.node import Node
from sparkstrom.rehearsal.conditions import Conditions
from sparkstrom.rehearsal.links import Edge, VirtualNetwork
from sparkstrom.runtime.message_endpoint import MergeCache
from sparkstrom.runtime.node_thread import UPKEEP_INTERVAL_S
from sparkstrom.runtime.optimizer_states import OptimizerStateServer, load_worker_state
from sparkstrom.runtime.theta import Replica
from sparkstrom.runtime.trainer_thread import WAIT_POLL_S, Trainer
from sparkstrom.runtime.training_loop import (
    LoopAction,
    TrainerEffect,
    TrainerInbox,
    TrainerItem,
)
from sparkstrom.simulation.virtual_clock import VirtualClock
from sparkstrom.worker.task_environment import TaskEnvironment, place_model
from sparkstrom.worker.training_job import TrainingJob
from sparkstrom.worker.training_task import (
    load_initial_theta,
    make_identity,
    make_node_limits,
    make_replica,
    make_trainer_options,
)

TRAINER_EFFECTS = frozenset(get_args(TrainerEffect))
TOKEN_BITS = 63  # of the random number that identifies a process
CYCLE_S = 1e-4  # the shortest time between two duty cycles
WAKE_S = 2e-4  # delay with which a waiting trainer's thread runs after it was notified


class DutyCycleScheduler:
    """Schedules the duty cycles of the master or of a node in virtual time.

    In a duty cycle, the master or node handles a tick: it does what is due at that time.

    Args:
        time: Virtual time.
        interval_s: Time from one duty cycle to the next, unless an event requires an earlier one.
        run: Runs one duty cycle.
    """

    def __init__(self, time: VirtualClock, interval_s: float, run: Callable[[], None]) -> None:
        self._time, self._interval_s, self._run = time, interval_s, run
        # Number and time of the next duty cycle. Scheduled ones with other numbers do nothing.
        self._turn, self._next_s = 0, 0.0

    def start(self) -> None:
        """Schedule the first duty cycle, ``interval_s`` from now."""
        self._schedule(self._interval_s)

    def stop(self) -> None:
        """Run no more duty cycles. ``on_event`` must not be called afterwards: it would add one."""
        self._turn += 1

    def on_event(self, event: ev.Event, due_s: float) -> None:
        """Schedule the next duty cycle earlier if ``event``, which was handled, requires that.

        ``due_s``: time at which a message that is held back is due; infinity if there is none. A
        duty cycle also follows at most UPKEEP_INTERVAL_S after each event except a tick, as in
        ``runtime.node_thread``.
        """
        upkeep_in_s = math.inf if isinstance(event, ev.Tick) else UPKEEP_INTERVAL_S
        delay_s = max(CYCLE_S, min(due_s - self._time.now_s, upkeep_in_s))
        if self._next_s > self._time.now_s + delay_s:
            self._schedule(delay_s)

    def _schedule(self, delay_s: float) -> None:
        """Schedule the next duty cycle in ``delay_s`` seconds, in place of any other."""
        self._turn += 1
        self._next_s = self._time.now_s + delay_s
        self._time.at(self._next_s, self._run_if_due, self._turn)

    def _run_if_due(self, turn: int) -> None:
        """Run the duty cycle with number ``turn``, then schedule the next one.

        Do nothing if another one has replaced it. If it schedules the next one itself, keep that.
        """
        if turn != self._turn:
            return
        self._next_s = self._time.now_s + self._interval_s
        self._run()
        if turn == self._turn:
            self._schedule(self._interval_s)


class Observer(Protocol):
    """Interface of the object that a worker calls after each step and at its end."""

    def on_step(self, weight: float, loss: float) -> None:
        """Record the mean loss of a trained minibatch, and its weight in means of losses."""

    def on_end(self, worker: RehearsedWorker) -> None:
        """Record that a worker's task has ended."""


class RehearsedWorker:
    """One attempt at a worker's task: its protocol node and its trainer.

    Args:
        job: The description of the fit that each worker receives.
        model: The pickled model.
        environment: The task's partition, attempt and host.
        batches: The partition's minibatches.
        network: Delivers the worker's messages.
        time: Virtual time.
        conditions: The cluster, for the times of the worker's operations.
        observer: Called after each step and at the end of the task.
        tick_s: Interval of the node's duty cycles, in seconds.
    """

    def __init__(
        self,
        job: TrainingJob,
        model: bytes,
        environment: TaskEnvironment,
        batches: Batches,
        *,
        network: VirtualNetwork,
        time: VirtualClock,
        conditions: Conditions,
        observer: Observer,
        tick_s: float,
    ) -> None:
        own: FlatModel = pickle.loads(model)
        job = replace(job, model=own)
        partition, attempt = environment.partition, environment.attempt
        self.partition, self.name = partition, f"{partition}/{attempt}"
        self.host, self.edges = network.host(environment.host), dict[NodeId, Edge]()
        self.alive, self.batches = True, batches
        self._network, self._time, self._observer = network, time, observer
        self._duty_cycle = DutyCycleScheduler(time, tick_s, self._run_duty_cycle)
        self._times = conditions.times
        self._speed = conditions.speed(partition, job.spec.workers)
        self._rng = random.Random(f"steps of {self.name}, seed {conditions.seed}")
        place_model(job, environment)
        theta = load_initial_theta(job)
        self.replica: Replica = make_replica(job, theta)
        if state := job.initial_worker_state(partition):
            load_worker_state(self.replica, state)
        token = self._rng.getrandbits(TOKEN_BITS)
        self.identity = replace(make_identity(job, environment, batches), token=token, pid=attempt)
        self.machine = Node(self.identity, make_node_limits(job), time.now_s)
        self.inbox = TrainerInbox(job.master.void.window_bytes, theta.new_sum)
        self._sums = MergeCache(theta.merge)
        self._optimizer_server = OptimizerStateServer(time)
        self.trainer = Trainer(
            VirtualConnection(self),
            self.replica,
            batches,
            make_trainer_options(job, partition, attempt),
            # A rehearsed fit has no files of an earlier one, and leaves none.
            save_residual=lambda replica: None,
            add_residuals=lambda replica, paths: None,
            optimizer_server=self._optimizer_server,
            clock=time,
        )
        self._port = 0
        self.node: NodeId | None = None
        self._stepping = self._encoding = self._is_woken = False
        self._turn = 0  # number of the next batch boundary; those with other numbers do nothing

    def start(self) -> None:
        """Connect to the network, and schedule the first duty cycle and batch boundary."""
        self._network.add(self)
        self._open_streams()
        self._duty_cycle.start()
        self._schedule_boundary(0.0)

    def end(self) -> None:
        """End the simulated process at once: it neither receives messages nor trains any more."""
        self.alive = False
        self._duty_cycle.stop()

    def handle(self, event: ev.Event) -> None:
        """Pass an event to the node and perform the effects; wake the trainer if it has work."""
        before = self.machine.directive
        ev.perform_all(self.machine.step(event, self._time.now_s), self._perform)
        if len(self.inbox) or self.machine.directive != before:
            self._wake_trainer()
        self._duty_cycle.on_event(event, self.machine.tick_due_s)

    def _perform(self, effect: ev.Effect) -> None:
        """Queue an effect for the trainer, or perform it."""
        if type(effect) in TRAINER_EFFECTS:
            if isinstance(effect, ev.IdAssigned):
                self.node = effect.node
            self.inbox.put(effect)  # type: ignore[arg-type]
            return
        match effect:
            case ev.Send(to=to, message=message):
                self._network.send(self, to, message)
            case ev.SendDirect(message=message):
                self._network.send_direct(self, MASTER_ADDRESS, message, lambda: True)
            case ev.SendChunk(to=to, index=index):
                self._network.send(self, to, self.replica.chunk(index))
            case ev.SendMerged(to=to):
                self._network.send(self, to, self._sums.merge(effect))
            case ev.SendOptimizerChunk(to=to, ask=ask):
                self._optimizer_server.add_request(to, ask)
                self._send_optimizer_chunks()
            case ev.OpenEdge():
                self._network.open_edge(self, effect)
            case ev.CloseEdge(node=node):
                self._network.close_edge(self, node)
            case ev.ReopenStreams():
                self._open_streams()
            case _:
                raise AssertionError(f"a node cannot want {effect}")

    def accepts(self, answer: ev.SendToProcess) -> bool:
        """Return whether ``answer``, a direct message of the master, is for this process.

        It must name the process's token, its current port, and its current id or none.
        """
        is_mine = answer.token == self.identity.token and answer.node in (None, self.node)
        return is_mine and answer.address.port == self._port

    def _open_streams(self) -> None:
        """Listen at a new address; the node then requests a parent that connects to it."""
        self._port += 1
        self.handle(ev.StreamsOpened(Address(self.name, self._port, 1, 2), alone=False))

    def _run_duty_cycle(self) -> None:
        """Pass a tick to the node, send requested optimizer chunks, and clear the cached sums."""
        self.handle(ev.Tick())
        self._send_optimizer_chunks()
        self._sums.clear()

    def _send_optimizer_chunks(self) -> None:
        """Send requested chunks of the optimizer state, if the trainer has made a copy of it."""
        for to, chunk in self._optimizer_server.ready_chunks():
            self._network.send(self, to, chunk)

    def _wake_trainer(self) -> None:
        """Schedule a waiting trainer's next batch boundary in WAKE_S, unless that was done."""
        if not (self._stepping or self._is_woken):
            self._schedule_boundary(WAKE_S)
            self._is_woken = True

    def _schedule_boundary(self, delay_s: float) -> None:
        """Schedule the trainer's next batch boundary in ``delay_s``, in place of any other.

        A batch boundary is the time between two steps.
        """
        self._is_woken = False
        self._turn += 1
        self._time.after(delay_s, self._pass_boundary, self._turn)

    def _pass_boundary(self, turn: int) -> None:
        """End the running step, apply waiting updates, and begin the next step, wait or end.

        If the step's end publishes an update, first let the time pass that its encoding takes. Do
        nothing if the worker has ended, or if another boundary has replaced number ``turn``. Raise
        PeerError for the directive FAIL, and any error of training.
        """
        if not self.alive or turn != self._turn:
            return
        self._is_woken = False
        if self._stepping:
            if not self._encoding and self.trainer.finish_training() and self._times.encode_s:
                self._encoding = True
                self._schedule_boundary(self._times.encode_s / self._speed)
                return
            self._stepping = self._encoding = False
            self.trainer.end_step()
        waiting = len(self.inbox)
        action, command = self.trainer.pass_boundary()
        match action:
            case LoopAction.STEP:
                self._begin_step(command, waiting)
            case LoopAction.WAIT:
                self.trainer.evaluate_and_report()
                if self._turn == turn:
                    self._schedule_boundary(WAIT_POLL_S)
            case LoopAction.END:
                self.end()
                self._observer.on_end(self)
            case LoopAction.FAIL:
                raise PeerError(command.reason)

    def _begin_step(self, command: Directive, waiting: int) -> None:
        """Train on the next minibatch, and schedule the boundary at which this step ends.

        ``command``: the node's directive; ``waiting``: number of items, such as updates, that were
        applied just before, which also takes time. Raise TrainingError if the model fails.
        """
        self._stepping = True
        weight = self.trainer.counts.loss_weight
        try:
            loss = self.trainer.begin_step(command)
        except SparkstromError:
            raise
        except Exception as error:  # models raise errors of many kinds, which would fail a real fit
            raise TrainingError(format_reason(error)) from error
        self._observer.on_step(self.trainer.counts.loss_weight - weight, loss)
        times = self._times
        step_s = times.draw_step_s(self._rng)
        self._schedule_boundary((step_s + waiting * times.apply_s) / self._speed)


class VirtualConnection:
    """Connects a trainer with the node of its ``RehearsedWorker``, in the same thread."""

    def __init__(self, worker: RehearsedWorker) -> None:
        self._worker = worker
        self.stats: TrainingCounters | None = None

    @property
    def command(self) -> Directive:
        """The node's current directive: what the trainer has to do."""
        return self._worker.machine.directive

    def post(self, event: ev.Event) -> None:
        """Pass an event to the node at once."""
        self._worker.handle(event)

    def take(self) -> tuple[list[TrainerItem], Directive]:
        """Remove and return the waiting items, with the current directive."""
        return self._worker.inbox.take(), self.command

    def wait(self, seconds: float, known: Directive) -> None:
        """Raise AssertionError: a boundary is scheduled instead, so no thread waits."""
        raise AssertionError("a rehearsed trainer is scheduled, it never waits")


MASTER_ADDRESS = Address("master", 1, 1, 2)
