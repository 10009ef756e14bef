"""Simulate one fit with a given number of workers, in virtual time.

The protocol's state machines, the training loop, replicas, encoders and models are those of a real
fit. Links, hosts, threads and Spark are virtual. The result depends only on the arguments: on one
computer, runs with the same arguments give bit-identical results.
"""

from __future__ import annotations

import itertools
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from sparkstrom.base.errors import SparkstromError, TrainingError
from sparkstrom.base.identity import MASTER, Endpoint, NodeId
from sparkstrom.base.version import __version__
from sparkstrom.codec.messages import BUFFERS, Phase
from sparkstrom.data.row_store import Batches
from sparkstrom.encoding.grid import round_to_grid
from sparkstrom.fit.master_setup import make_master_limits, make_master_plan
from sparkstrom.fit.network_state import NO_STATES
from sparkstrom.models.base import Buffered, Flat, FlatModel, get_buffers
from sparkstrom.options.gradient_sharing import SharedTrainingMaster
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.protocol.master.master import Master
from sparkstrom.rehearsal.conditions import Conditions
from sparkstrom.rehearsal.links import Edge, VirtualNetwork
from sparkstrom.rehearsal.worker import MASTER_ADDRESS, DutyCycleScheduler, RehearsedWorker
from sparkstrom.rounds.averaging import AveragingOptions
from sparkstrom.runtime.master_control import error_from_abort
from sparkstrom.runtime.message_endpoint import MergeCache
from sparkstrom.runtime.optimizer_states import OptimizerStates
from sparkstrom.runtime.overshoot import OvershootControl
from sparkstrom.runtime.theta import Theta, snapshot_chunk_count
from sparkstrom.simulation.virtual_clock import VirtualClock
from sparkstrom.worker.task_environment import TaskEnvironment
from sparkstrom.worker.training_job import (
    TrainingJob,
    make_initial_theta,
    pack_parameters,
)

TICK_S_MIN, TICK_S_MAX = 0.02, 0.5  # bounds, in seconds, of the interval of duty cycles
POINTS = 20  # points of each curve of a run, in addition to the first one
DRIVER_HOST = "driver"  # name of the host on which the master runs
FIRST_ATTEMPT = 100  # number of the first task attempt

Value = TypeVar("Value")
# (parameters f32[n_params], buffers) -> metrics by name
Measure = Callable[[Flat, bytes], dict[str, float]]
OnProgress = Callable[[float], None]  # receives the fraction of a run that is done


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """Limit numeric libraries (BLAS, OpenMP, torch) to ``count`` threads in a ``with`` block.

    Measured steps use as many threads as a task has CPUs. Simulated runs use one thread each. With
    more, a library would be many times slower on a busy machine, because its threads spin while
    they wait for each other.
    """
    from threadpoolctl import threadpool_limits

    torch: Any = sys.modules.get("torch")
    before = torch.get_num_threads() if torch is not None else 0
    try:
        with threadpool_limits(count):
            yield
    finally:
        if torch is not None:
            torch.set_num_threads(before)


def make_environment(partition: int = 0, attempt: int = 0, host: str = "host") -> TaskEnvironment:
    """Return the environment of a simulated worker's task, which has one CPU."""
    return TaskEnvironment(partition, attempt, host, "executor", Path(tempfile.gettempdir()))


@dataclass(frozen=True, slots=True)
class FitRecipe:
    """A fit without its number of workers: model, parameters, options and length."""

    model: FlatModel
    packed: bytes  # the pickled model; each worker unpickles its own
    parameters: Flat  # f32[n_params]
    k: int  # parameters are multiples of 2^-k
    # The options of training; in rounds, only those are used that do not concern updates.
    master: SharedTrainingMaster
    epochs: int  # number of epochs to train
    fraction: float = 0.0  # fraction of the rows that is held out
    first_epoch: int = 0  # number of epochs of earlier fits
    minibatches_before: int = 0  # minibatches of earlier fits whose optimizer state is continued
    states: OptimizerStates = NO_STATES  # with which the workers start; empty: fresh ones
    states_workers: int = 0  # number of workers of the fit that ``states`` come from
    rounds: AveragingOptions | None = None  # options of training in rounds; None: gradient sharing

    def initial(self) -> Flat:
        """Return a copy of the initial parameters; in gradient sharing, multiples of 2^-k."""
        if self.rounds is not None:
            return self.parameters.copy()
        return round_to_grid(self.parameters, self.k)

    def states_for(self, workers: int) -> OptimizerStates:
        """Return the optimizer states with which ``workers`` workers start.

        If the previous fit had a different number of workers, all start with the common state.
        """
        return self.states if workers == self.states_workers else OptimizerStates(self.states.one)

    def theta(self) -> Theta:
        """Return a new replica of the initial parameters, rounded to multiples of 2^-k."""
        multipliers = self.master.layer_multipliers or {}
        return make_initial_theta(self.model, self.parameters, self.k, multipliers)

    def job(self, workers: int) -> TrainingJob:
        """Return the description of the fit that each of ``workers`` workers receives."""
        master = replace(self.master, debug_longer_iterations=0, checkpoint_directory=None)
        spec = FitSpec(
            workers=workers,
            epochs=self.epochs,
            n_params=self.model.n_params,
            version=__version__,
            first_epoch=self.first_epoch,
            minibatches_before=self.minibatches_before,
            fraction=self.fraction,
        )
        theta = self.theta()
        states = self.states_for(workers)
        endpoint = Endpoint(MASTER_ADDRESS.host, MASTER_ADDRESS.port)
        return TrainingJob(
            spec=spec,
            key=b"",
            model=self.model,
            master=master,
            k=theta.k,
            layers=theta.layers,
            endpoint=endpoint,
            join_stream=MASTER_ADDRESS.control_stream,
            network="rehearsal",
            initial=InMemory(pack_parameters(theta, states.one)),
            own_states={partition: InMemory(state) for partition, state in states.own.items()},
            keep_residuals=False,
        )


@dataclass(frozen=True, slots=True)
class InMemory(Generic[Value]):
    """A value in this process, with the interface of a broadcast variable."""

    value: Value


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Loss and accuracy of the shared parameters at one moment of training."""

    seconds: float  # virtual seconds of training so far
    examples: int  # rows trained by all workers so far
    measures: dict[str, float]  # metrics by name: "loss", and "accuracy" if labels are classes
    update_bytes: int = 0  # bytes of all updates published so far, each counted once


@dataclass(slots=True)
class SimulatedFit:
    """The result of a simulated fit or of a baseline."""

    workers: int  # number of workers
    points: list[CurvePoint] = field(default_factory=list)  # in order of time
    seconds: float = 0.0  # virtual seconds from the start of training to the last minibatch
    minibatches: int = 0  # trained by all workers, and committed
    examples: int = 0  # rows in these minibatches
    training_loss: float = math.nan  # mean loss of the last twentieth of the minibatches
    # Mean number of others' minibatches that an update had not seen; None: training in rounds.
    staleness: float | None = 0.0
    summed_workers: int | None = None  # n if updates had the weight n / workers; None: no limit
    update_bytes: int = 0  # bytes of all published updates, each counted once
    publications: int = 0  # number of published updates
    entries: int = 0  # number of parameters that an update changes, summed over all updates
    # host -> bytes sent and received
    link_bytes: dict[str, tuple[float, float]] = field(default_factory=dict)
    bytes_by_kind: dict[str, int] = field(default_factory=dict)  # kind of message -> bytes sent
    deaths: int = 0  # workers that were killed
    replicas_equal: bool = False  # all replicas had the same hash at the end
    digest: str = ""  # hash of the delivered parameters
    error: str = ""  # why training ended early, such as a loss that is not finite; "": it did not
    parameters: Flat | None = None  # the delivered parameters, f32[n_params]
    buffers: bytes = b""  # delivered model state other than parameters, such as BatchNorm's


class FitSimulator:
    """Simulates one fit; ``run`` returns the result.

    Args:
        recipe: The fit.
        partitions: The minibatches of each worker.
        conditions: The cluster.
        measure: Measures parameters for the curves; None: no curves.
        points: Number of evenly spaced points of a curve, in addition to the first one.
        on_progress: Called with the fraction of the fit's minibatches that the master has numbered.
    """

    def __init__(
        self,
        recipe: FitRecipe,
        partitions: list[Batches],
        conditions: Conditions,
        measure: Measure | None = None,
        points: int = POINTS,
        on_progress: OnProgress = lambda fraction: None,
    ) -> None:
        workers = len(partitions)
        self._recipe, self._partitions = recipe, partitions
        self._conditions = conditions.for_workers(workers)
        self._measure, self._points, self._on_progress = measure, points, on_progress
        self.job = job = recipe.job(workers)  # the description that each worker receives
        self._time = time = VirtualClock(conditions.seed)
        self._network = VirtualNetwork(time, conditions.link_bits_s, conditions.latency_s)
        self.theta = recipe.theta()
        self.simulated = SimulatedFit(workers)
        self._losses: list[tuple[float, float]] = []  # weight and mean loss of each minibatch
        self._attempts = itertools.count(FIRST_ATTEMPT)
        tick_s = min(max(TICK_S_MIN, conditions.times.step_s / 2), TICK_S_MAX)
        self._tick_interval_s = min(tick_s, job.master.void.lease_s / 8)
        self._master = SimulatedMaster(self, self._network, time, self._tick_interval_s)
        self.workers: list[RehearsedWorker] = []  # all attempts, in the order of their starts
        self._total = sum(each.batches_per_epoch for each in partitions) * recipe.epochs
        self._committed = 0  # minibatches whose updates the master has numbered (commits)
        self._rows_per_batch = sum(each.rows for each in partitions) / max(
            1, sum(each.batches_per_epoch for each in partitions)
        )
        self._kill_moments = self._conditions.list_kill_moments(self._total)

    def run(self) -> SimulatedFit:
        """Simulate the fit to its end and return the result.

        An error that would end a real fit, such as a loss that is not finite, ends this one early.
        The error's message is then in the result's ``error``.
        """
        simulated = self.simulated
        self._record_point()
        self._master.start()
        for partition in range(simulated.workers):
            self._start(partition)
        try:
            if not self._time.run(math.inf):
                raise TrainingError("the rehearsed fit cannot continue: no event is pending")
        except SparkstromError as error:
            simulated.error = str(error)
        self._complete_result()
        return simulated

    def _start(self, partition: int) -> None:
        """Start an attempt at a partition's task, on the partition's own host."""
        worker = RehearsedWorker(
            self.job,
            self._recipe.packed,
            make_environment(partition, next(self._attempts), f"worker {partition}"),
            self._partitions[partition],
            network=self._network,
            time=self._time,
            conditions=self._conditions,
            observer=self,
            tick_s=self._tick_interval_s,
        )
        self.workers.append(worker)
        worker.start()

    def on_step(self, weight: float, loss: float) -> None:
        """Record the weight and the mean loss of a trained minibatch."""
        self._losses.append((weight, loss))

    def on_end(self, worker: RehearsedWorker) -> None:
        """End the run if no worker is alive any more."""
        self._time.over = not any(each.alive for each in self.workers)

    def on_commit(self, committed: int) -> None:
        """Report progress; add a point to the curves or kill a worker if that is due.

        ``committed``: number of minibatches whose updates the master has numbered.
        """
        if committed == self._committed:
            return
        before, self._committed = self._committed, committed
        self._on_progress(committed / self._total)
        if before * self._points // self._total < committed * self._points // self._total:
            self._record_point()
        if self._kill_moments and committed >= self._kill_moments[0]:
            del self._kill_moments[0]
            self._time.after(0.0, self._kill)

    def _kill(self) -> None:
        """Kill a random worker, whose task Spark restarts after ``restart_s``.

        Do nothing unless the fit is training and at least two workers are alive.
        """
        alive = [each for each in self.workers if each.alive]
        if self._master.phase is not Phase.RUNNING or len(alive) < 2:
            return
        victim = self._time.rng.choice(alive)
        victim.end()
        self.simulated.deaths += 1
        self._time.after(self._conditions.restart_s, self._start_again, victim.partition)

    def _start_again(self, partition: int) -> None:
        """Start a killed worker's task again, unless training is over."""
        if self._master.phase in (Phase.GATHERING, Phase.RUNNING):
            self._start(partition)

    def _record_point(self) -> None:
        """Measure the parameters of the master's replica, and add a point to the curves, if any."""
        if self._measure is None:
            return
        began_s = self._master.began_s(Phase.RUNNING)
        seconds = self._time.now_s - began_s if self._committed else 0.0
        examples = round(self._committed * self._rows_per_batch)
        measures = self._measure(self.theta.to_host(), self._average_live_buffers())
        sent = sum(each.replica.encoder.counters.payload_bytes for each in self.workers)
        self.simulated.points.append(CurvePoint(seconds, examples, measures, sent))

    def _average_live_buffers(self) -> bytes:
        """Return the average of the live workers' buffers; if there are none, the master's."""
        reports = [get_buffers(each.replica.model) for each in self.workers if each.alive]
        model = self._recipe.model
        if any(reports) and isinstance(model, Buffered):
            return model.average_buffers(reports)
        return self.theta.buffers

    def _complete_result(self) -> None:
        """Set the remaining fields of the result at the end of the run."""
        simulated, master = self.simulated, self._master
        counters = [each.replica.encoder.counters for each in self.workers]
        simulated.seconds = master.training_seconds()
        simulated.minibatches = self._committed
        simulated.examples = round(self._committed * self._rows_per_batch)
        simulated.training_loss = average_recent(self._losses)
        simulated.staleness = master.machine.order.staleness.mean
        simulated.summed_workers = master.overshoot.summed_workers
        simulated.update_bytes = sum(each.payload_bytes for each in counters)
        simulated.publications = sum(each.publications for each in counters)
        simulated.entries = sum(each.hits for each in counters)
        hosts = self._network.hosts.values()
        simulated.link_bytes = {each.name: (each.sent_bytes, each.received_bytes) for each in hosts}
        simulated.bytes_by_kind = dict(sum((each.by_kind for each in hosts), Counter[str]()))
        digests = {*master.machine.phases.digests.values(), master.machine.phases.own_digest}
        simulated.replicas_equal = master.phase is Phase.DONE and len(digests) == 1
        simulated.digest = self.theta.digest()
        simulated.parameters, simulated.buffers = self.theta.to_host(), self.theta.buffers


def average_recent(losses: list[tuple[float, float]]) -> float:
    """Return the weighted mean of the last twentieth of ``losses``; NaN without weight.

    ``losses`` are (weight, mean loss) of each minibatch, or of each step or round of all workers.
    """
    recent = losses[-max(1, len(losses) // POINTS) :]
    total = sum(weight for weight, _ in recent)
    return sum(weight * loss for weight, loss in recent) / total if total else math.nan


class SimulatedMaster:
    """Runs the protocol's master, which numbers the updates of all workers, in virtual time."""

    name = MASTER_ADDRESS.host
    node = MASTER
    alive = True

    def __init__(
        self, simulator: FitSimulator, network: VirtualNetwork, time: VirtualClock, tick_s: float
    ) -> None:
        job, theta = simulator.job, simulator.theta
        self.host, self.edges = network.host(DRIVER_HOST), dict[NodeId, Edge]()
        self._simulator, self._network, self._time = simulator, network, time
        self._duty_cycle = DutyCycleScheduler(time, tick_s, self._run_duty_cycle)
        self._theta, self._sums = theta, MergeCache(theta.merge)
        plan = make_master_plan(job.spec, theta, job.model, job.master, {})
        self.machine = Master(
            plan.spec,
            chunks=snapshot_chunk_count(theta.n_params),
            endpoint=job.endpoint,
            limits=make_master_limits(job.master, job.spec.workers, theta.n_params),
            now_s=time.now_s,
            kept={},
            average=plan.average,
        )
        self.overshoot = OvershootControl(
            theta,
            plan.spec.workers,
            plan.summed_workers_max,
            is_enabled=plan.limits_overshoot,
        )
        if self.overshoot.limit is not None:
            self.machine.step(ev.SummedWorkersLimited(self.overshoot.limit), time.now_s)

    @property
    def phase(self) -> Phase:
        """The fit's phase in the master's state, such as GATHERING or RUNNING."""
        return self.machine.phases.phase

    def began_s(self, phase: Phase) -> float:
        """Return the virtual time at which a phase began; now if it has not begun."""
        return self.machine.phases.began_s.get(phase, self._time.now_s)

    def training_seconds(self) -> float:
        """Return the virtual seconds between the start of training and the last minibatch."""
        return self.began_s(Phase.DRAINING) - self.began_s(Phase.RUNNING)

    def start(self) -> None:
        """Join the network, and schedule the first duty cycle."""
        self._network.add(self)
        self._duty_cycle.start()

    def handle(self, event: ev.Event) -> None:
        """Pass an event to the protocol's master and perform the effects."""
        ev.perform_all(self.machine.step(event, self._time.now_s), self._perform)
        self._simulator.on_commit(self.machine.partitions.minibatches)
        self._duty_cycle.on_event(event, self.machine.children.state_due_s)

    def _run_duty_cycle(self) -> None:
        """Pass a tick to the master, and clear the cached sums."""
        self.handle(ev.Tick())
        self._sums.clear()

    def _perform(self, effect: ev.Effect) -> None:
        """Perform one effect, as ``runtime.master_thread`` does. Raise the error of an abort."""
        theta = self._theta
        match effect:
            case ev.Send(to=to, message=message):
                self._network.send(self, to, message)
            case ev.ApplyCommit(update=update):
                if update.payload.form == BUFFERS:
                    theta.buffers = update.payload.data
                else:
                    theta.add(theta.read(update.payload))
                    if limited := self.overshoot.after_commit(self.machine.broadcast.training):
                        self._time.after(0.0, self.handle, limited)
                theta.commit = update.commit
            case ev.SendChunk(to=to, index=index):
                self._network.send(self, to, theta.chunk(index))
            case ev.SendMerged(to=to):
                self._network.send(self, to, self._sums.merge(effect))
            case ev.SendToProcess(address=address):
                target = self._network.process(address.host)
                assert isinstance(target, RehearsedWorker), "the master sends nothing to itself"
                accepts = partial(target.accepts, effect)
                self._network.send_direct(self, address, effect.message, accepts)
            case ev.OpenEdge():
                self._network.open_edge(self, effect)
            case ev.CloseEdge(node=node):
                self._network.close_edge(self, node)
            case ev.HashReplica(commit=commit):
                hashed = ev.ReplicaHashed(commit, theta.digest(), None)
                self._time.after(0.0, self.handle, hashed)
            case ev.Abort():
                raise error_from_abort(effect)
            case ev.OptimizerCopied() | ev.ReportCounters() | ev.Note() | ev.ShowWorkerLog():
                pass
            case ev.Complete():
                pass  # the run ends with the last worker
            case _:
                raise AssertionError(f"a master cannot want {effect}")
