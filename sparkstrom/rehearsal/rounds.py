"""Simulate one fit in rounds with a given number of workers, in virtual time.

In a round, each worker trains some minibatches; then the results are averaged. The code of a real
fit (``sparkstrom.rounds``) trains and averages. Workers train one after the other in this process.
Spark's jobs, hosts and links are virtual: ``VirtualCluster`` computes the time and bytes of a
round.

The time of a round is a sum: overhead of a Spark job, broadcast of the parameters, steps of the
slowest worker, transfers and additions that average the results. The job that evaluates held-out
rows at an epoch's end takes only the overhead and a broadcast. The shuffle of rows is not
simulated.
"""

from __future__ import annotations

import copy
import math
import pickle
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np

from sparkstrom.base.errors import format_reason
from sparkstrom.data.row_store import Batches
from sparkstrom.models.base import Flat, FlatModel, State
from sparkstrom.options.parameter_averaging import PER_WORKER, ParameterAveragingTrainingMaster
from sparkstrom.planning.memory import PieceSizes
from sparkstrom.planning.scaling import WIRE_OVERHEAD
from sparkstrom.rehearsal.conditions import Conditions
from sparkstrom.rehearsal.fit import (
    DRIVER_HOST,
    POINTS,
    CurvePoint,
    FitRecipe,
    Measure,
    OnProgress,
    SimulatedFit,
    average_recent,
    make_environment,
)
from sparkstrom.rounds.averaging import RoundResults, RoundState, load_state, tree_levels
from sparkstrom.rounds.backend import (
    DOWNLOADED,
    UPLOADED,
    EpochPlan,
    PartitionFacts,
    RoundOrder,
    RoundsBackend,
)
from sparkstrom.rounds.control import RoundsControl
from sparkstrom.rounds.run import RoundsLoop
from sparkstrom.rounds.worker_round import (
    HeldOutReport,
    ReplicaReport,
    RoundBatch,
    RoundReport,
    RoundStart,
    train_and_report,
)
from sparkstrom.worker.task_environment import place_model

JOB_S = 0.2  # overhead of a Spark job; benchmarks/records/measurements.md has measured it
# Copies of a broadcast that the driver program sends; executors send the others to each other.
BROADCAST_COPIES = 2
SUM_VALUE_BYTES = 2  # bytes of a partial sum (float64) per byte of a result (float32)
DEFAULT_DEPTH = 2  # default of ``aggregation_depth``, an option that ParallelWrapper lacks

HostBytes = Mapping[str, float]  # host -> bytes


def simulate_rounds(
    recipe: FitRecipe,
    partitions: Sequence[Batches],
    conditions: Conditions,
    measure: Measure | None = None,
    on_progress: OnProgress = lambda fraction: None,
) -> SimulatedFit:
    """Simulate a fit in rounds to its end; return the result.

    An error that would end a real fit ends this one early; its message is in the result's
    ``error``.

    Args:
        recipe: The fit, whose ``rounds`` are not None.
        partitions: The minibatches of each worker.
        conditions: The cluster.
        measure: Measures parameters for the curves; None: no curves.
        on_progress: Called with the completed fraction of the fit's minibatches.
    """
    assert recipe.rounds is not None, "this fit shares gradients"
    workers, spec = len(partitions), recipe.job(len(partitions)).spec
    backend = RehearsedRounds(recipe, partitions, conditions, measure, on_progress)
    state = RoundState(
        pickle.loads(recipe.packed),
        recipe.rounds,
        recipe.parameters,
        recipe.states_for(workers),
        spec.minibatches_before // workers,
    )
    control = RoundsControl(spec, state, has_observer=False, abort=backend.abort)
    simulated, failure = backend.simulated, None
    try:
        RoundsLoop(backend, control, recipe.rounds.averaging_frequency).run()
    except Exception as error:  # models raise errors of many kinds, which would fail a real fit
        failure = error
    if (failure := failure or control.failure) is not None:
        simulated.error = format_reason(failure)
    simulated.training_loss = average_recent(backend.losses)
    simulated.bytes_by_kind = dict(control.progress.by_kind)
    simulated.digest = state.digest()
    simulated.parameters, simulated.buffers = state.parameters, state.buffers
    return simulated


class VirtualCluster:
    """Computes the time of transfers in a fit's Spark jobs, and counts bytes on hosts' links.

    The driver program and each worker have a host of their own.

    Args:
        conditions: The cluster, for rate and latency of the links.
        workers: Number of workers.
    """

    def __init__(self, conditions: Conditions, workers: int) -> None:
        self._conditions = conditions
        self._workers = [f"worker {partition}" for partition in range(workers)]
        self._sent, self._received = defaultdict[str, float](float), defaultdict[str, float](float)

    @property
    def link_bytes(self) -> dict[str, tuple[float, float]]:
        """The bytes that each host has sent and received."""
        return {
            host: (self._sent[host], self._received[host]) for host in (DRIVER_HOST, *self._workers)
        }

    def broadcast(self, common: int, own: Mapping[int, int]) -> float:
        """Send every worker ``common`` bytes and, by partition, its ``own``; return the seconds."""
        workers = len(self._workers)
        copies = min(BROADCAST_COPIES, workers)
        sent = dict.fromkeys(self._workers, (workers - copies) * common / workers)
        sent[DRIVER_HOST] = copies * common + sum(own.values())
        received = {name: common + own.get(i, 0) for i, name in enumerate(self._workers)}
        return self._transfer(sent, received)

    def send_again(self, partition: int, size: int) -> float:
        """Send ``size`` bytes to the worker of a repeated task; return the seconds."""
        return self._transfer({DRIVER_HOST: size}, {self._workers[partition]: size})

    def collect(self, averaged: int, own: int, depth: int, add_s: float) -> float:
        """Average the results of a round, and send the driver program the means.

        Args:
            averaged: Bytes of each worker that are averaged.
            own: Bytes of each worker that the driver program gets without averaging.
            depth: The option ``aggregation_depth``.
            add_s: Processor time to add one worker's averaged bytes to a sum.

        Returns:
            The seconds that this takes.
        """
        workers, size = len(self._workers), averaged + own
        whole = dict.fromkeys(self._workers, float(size))
        if workers * size <= PieceSizes().direct:
            return self._transfer(whole, {DRIVER_HOST: workers * size}) + workers * add_s
        seconds = self._shuffle(size)
        if depth == 1:
            sent = self._transfer(whole, {DRIVER_HOST: workers * size})
            return seconds + sent + workers * add_s
        seconds += add_s  # each executor adds a slice of all results
        for groups in tree_levels(workers, depth):
            seconds += self._shuffle(SUM_VALUE_BYTES * (averaged * groups / workers + own))
            seconds += add_s * groups / workers
        results = averaged + workers * own
        slices = dict.fromkeys(self._workers, results / workers)
        return seconds + self._transfer(slices, {DRIVER_HOST: results})

    def _shuffle(self, size: float) -> float:
        """Let each worker send its ``size`` bytes to all, in slices; return the seconds."""
        workers = len(self._workers)
        moved = dict.fromkeys(self._workers, size * (workers - 1) / workers)
        return self._transfer(moved, moved)

    def _transfer(self, sent: HostBytes, received: HostBytes) -> float:
        """Count the bytes that hosts send and receive at once; return how long that takes."""
        for total, moved in ((self._sent, sent), (self._received, received)):
            for host, size in moved.items():
                total[host] += WIRE_OVERHEAD * size
        busiest = max([*sent.values(), *received.values()])
        if not busiest:
            return 0.0
        conditions = self._conditions
        return conditions.latency_s + 8 * WIRE_OVERHEAD * busiest / conditions.link_bits_s


class RehearsedRounds(RoundsBackend):
    """Trains the rounds of one fit in this process, and fills in ``simulated``, the result.

    The arguments are those of ``simulate_rounds``.
    """

    def __init__(
        self,
        recipe: FitRecipe,
        partitions: Sequence[Batches],
        conditions: Conditions,
        measure: Measure | None,
        on_progress: OnProgress,
    ) -> None:
        super().__init__()
        assert recipe.rounds is not None, "this fit shares gradients"
        workers = len(partitions)
        self._options, self._depth = recipe.rounds, DEFAULT_DEPTH
        if isinstance(recipe.rounds, ParameterAveragingTrainingMaster):
            self._depth = recipe.rounds.aggregation_depth
        self._partitions = partitions
        self._conditions = conditions = conditions.for_workers(workers)
        self._measure, self._on_progress = measure, on_progress
        # All workers train this model, because a round loads all state into it.
        self._model: FlatModel = pickle.loads(recipe.packed)
        self._job = replace(recipe.job(workers), model=self._model)
        self._cluster = VirtualCluster(conditions, workers)
        self._now_s = 0.0
        names = [f"steps of {p}, seed {conditions.seed}" for p in range(workers)]
        self._step_rngs = [random.Random(name) for name in names]
        self._kill_rng = random.Random(conditions.seed)
        self._total = recipe.epochs * sum(each.batches_per_epoch for each in partitions)
        self._trained = 0  # minibatches, those of the current round included
        self._kill_moments = conditions.list_kill_moments(self._total)
        self._has_sent_fresh = False  # whether the state before the first step was sent
        self._recorded = -1  # number of the curves' last point
        self.losses: list[tuple[float, float]] = []  # weight and mean loss of each round
        self.simulated = SimulatedFit(workers, staleness=None, replicas_equal=True)

    @contextmanager
    def open(self) -> Iterator[Sequence[PartitionFacts]]:
        """Yield facts about all partitions, whose rows are already in memory."""
        yield [
            PartitionFacts.from_batches(partition, batches, f"worker {partition}")
            for partition, batches in enumerate(self._partitions)
        ]

    def train(self, order: RoundOrder, state: RoundState) -> RoundResults:
        """Train one round; return its results. Raise any error of the model."""
        self._record_point(state)
        reports: list[RoundReport] = []
        parameters, states = list[Flat](), dict[int, State]()
        for partition in range(len(self._partitions)):
            if not (indices := order.plan.batches(order.number, partition)):
                continue
            updater = copy.deepcopy(load_state(state.own.get(partition, state.updater)))
            own = state.parameters.copy()
            start = RoundStart(own, state.buffers, updater, state.steps, order.pace)
            report = self._train_worker(partition, order.plan.epoch, indices, start)
            reports.append(report)
            if report.weight:
                parameters.append(own)
                if self._options.save_updater:  # a copy, because the next worker uses the model
                    states[partition] = copy.deepcopy(self._model.updater_state())
        results = RoundResults.combine(self._options, reports, parameters, states)
        results.traffic = self._advance_clock(state, reports, states)
        self._add_to_result(reports)
        return results

    def measure(self, plan: EpochPlan, state: RoundState) -> Sequence[HeldOutReport]:
        """Advance the virtual time by a job that evaluates held-out rows; return no reports."""
        size = state.parameters.nbytes + len(state.buffers)
        self._now_s += JOB_S + self._cluster.broadcast(size, {})
        return ()

    def end(self, state: RoundState) -> Sequence[ReplicaReport]:
        """Add the last point to the curves; return no reports."""
        self._record_point(state)
        return ()

    def _train_worker(
        self, partition: int, epoch: int, indices: range, start: RoundStart
    ) -> RoundReport:
        """Train a worker on its minibatches; return its report. Raise any error of the model."""
        host = f"worker {partition}"
        report = RoundReport(partition, host, executor=host)
        place_model(self._job, make_environment(partition), start.steps_before)
        minibatches = self._read_minibatches(self._partitions[partition], epoch, indices)
        train_and_report(self._model, start, minibatches, report)
        return report

    def _read_minibatches(
        self, batches: Batches, epoch: int, indices: range
    ) -> Iterator[RoundBatch]:
        """Yield a worker's minibatches of a round; report progress after each."""
        for index in indices:
            yield RoundBatch(batches.get(epoch, index), batches.place(epoch, index))
            self._trained += 1
            self._on_progress(self._trained / self._total)

    def _advance_clock(
        self, state: RoundState, reports: Sequence[RoundReport], states: Mapping[int, State]
    ) -> Counter[str]:
        """Advance the virtual time by one round; return the bytes of its transfers, by kind.

        Args:
            state: The state with which the round started.
            reports: The workers' reports; their ``sent_bytes`` are set.
            states: The optimizer states that workers send, by partition.
        """
        times, vector = self._conditions.times, state.parameters.nbytes
        common, own = self._count_sent_bytes(state)
        averaged, single = self._count_result_bytes(vector, reports, states)
        for report in reports:
            report.sent_bytes = averaged + single if report.weight else 0
        begin_s = JOB_S + self._cluster.broadcast(common, own)
        pack_s = times.encode_s * (averaged + single) / vector
        work_s = {report.partition: self._draw_work_s(report, pack_s) for report in reports}
        self._kill_workers(reports, work_s, {p: common + own.get(p, 0) for p in work_s})
        add_s = times.apply_s * averaged / vector
        collect_s = self._cluster.collect(averaged, single, self._depth, add_s)
        self._now_s += begin_s + max(work_s.values()) + collect_s
        uploaded = sum(report.sent_bytes for report in reports)
        downloaded = len(self._partitions) * common + sum(own.values())
        return Counter({DOWNLOADED: downloaded, UPLOADED: uploaded})

    def _count_sent_bytes(self, state: RoundState) -> tuple[int, dict[int, int]]:
        """Return how many bytes of ``state`` each worker gets, and how many more by partition."""
        own = {p: count_bytes(load_state(value)) for p, value in state.own.items()}
        common = state.parameters.nbytes + len(state.buffers)
        is_fresh = state.updater is state.fresh  # executors keep this one for the next rounds
        if len(own) < len(self._partitions) and not (is_fresh and self._has_sent_fresh):
            common += count_bytes(state.updater)
        self._has_sent_fresh |= is_fresh
        return common, own

    def _count_result_bytes(
        self, vector: int, reports: Sequence[RoundReport], states: Mapping[int, State]
    ) -> tuple[int, int]:
        """Return a worker's bytes that are averaged, and those that it sends without averaging.

        Args:
            vector: Size of the parameters in bytes.
            reports: The workers' reports.
            states: The optimizer states that workers send, by partition.
        """
        averaged = vector if self._options.accumulator is None else 0
        single = vector - averaged + max(len(report.buffers) for report in reports)
        state_bytes = max(map(count_bytes, states.values()), default=0)
        if self._options.save_updater == PER_WORKER:
            return averaged, single + state_bytes
        return averaged + state_bytes, single

    def _draw_work_s(self, report: RoundReport, pack_s: float) -> float:
        """Return the time that a worker needs for its steps, and to pack its results."""
        partition = report.partition
        rng, times = self._step_rngs[partition], self._conditions.times
        steps_s = math.fsum(times.draw_step_s(rng) for _ in range(report.steps))
        return (steps_s + pack_s) / self._conditions.speed(partition, len(self._partitions))

    def _kill_workers(
        self, reports: Sequence[RoundReport], work_s: dict[int, float], sent: Mapping[int, int]
    ) -> None:
        """Kill a random worker at each moment that is due; Spark starts its task again.

        Args:
            reports: The workers' reports of the round.
            work_s: Each worker's time for the round, by partition; a killed worker's is raised.
            sent: Bytes with which each worker's task starts, by partition.
        """
        done = self.simulated.minibatches + sum(report.steps for report in reports)
        while self._kill_moments and done >= self._kill_moments[0]:
            del self._kill_moments[0]
            victim = self._kill_rng.choice([report.partition for report in reports])
            again_s = self._conditions.restart_s + self._cluster.send_again(victim, sent[victim])
            work_s[victim] += self._kill_rng.random() * work_s[victim] + again_s
            self.simulated.deaths += 1

    def _add_to_result(self, reports: Sequence[RoundReport]) -> None:
        """Add a round, whose time has passed, to the result."""
        simulated = self.simulated
        simulated.seconds = self._now_s
        simulated.minibatches += sum(report.steps for report in reports)
        simulated.examples += sum(report.examples for report in reports)
        simulated.update_bytes += sum(report.sent_bytes for report in reports)
        simulated.link_bytes = self._cluster.link_bytes
        if weight := math.fsum(report.weight for report in reports):
            loss_sum = math.fsum(report.loss_sum for report in reports)
            self.losses.append((weight, loss_sum / weight))

    def _record_point(self, state: RoundState) -> None:
        """Add a point of ``state`` to the curves, if that is due."""
        simulated = self.simulated
        reached = simulated.minibatches * POINTS // self._total
        if self._measure is None or reached == self._recorded:
            return
        self._recorded = reached
        measures = self._measure(state.parameters.copy(), state.buffers)
        simulated.points.append(
            CurvePoint(simulated.seconds, simulated.examples, measures, simulated.update_bytes)
        )


def count_bytes(state: State) -> int:
    """Return the size in bytes of the arrays in an optimizer state."""
    return sum(value.nbytes for value in state.values() if isinstance(value, np.ndarray))
