"""Simulate the runs of a rehearsal, and schedule them on the processors of this machine.

A run is either a fit or a baseline. A fit has a number of workers and a scaling rule. The rule is a
value of the option ``scaling``, which adapts steps to the number of workers. A baseline trains in
one process, or with DistributedDataParallel (DDP). Runs are independent of each other, and the
result of a run does not depend on the process that simulates it. This process simulates one run
after the other, in their order. If that takes long, other processes simulate further runs in
parallel, in the opposite order.
"""

from __future__ import annotations

import logging
import math
import pickle
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import connection
from typing import Any

from sparkstrom.base.child_processes import count_cores, pickle_by_value
from sparkstrom.base.errors import SparkstromError, UsageError, format_reason
from sparkstrom.models.base import Batch, Flat, FlatModel, Measured, load_buffers
from sparkstrom.models.output_interpretation import VALUES, get_output_kind, measure_batch
from sparkstrom.observe.early_stopping import ACCURACY, LOSS
from sparkstrom.observe.progress import ProgressDisplay, RehearsalFigures
from sparkstrom.observe.reporting.summary_rendering import pluralize
from sparkstrom.rehearsal.baselines import ring_bits_s, train_synchronously
from sparkstrom.rehearsal.conditions import Conditions
from sparkstrom.rehearsal.data import EVALUATION_ROWS_MAX, SampledData
from sparkstrom.rehearsal.fit import FitRecipe, FitSimulator, Measure, OnProgress, SimulatedFit
from sparkstrom.rehearsal.result import ALL_REDUCE, ONE_PROCESS, SPARKSTROM
from sparkstrom.rehearsal.rounds import simulate_rounds
from sparkstrom.rehearsal.run_process import RunProcess, free_memory_bytes

log = logging.getLogger(__name__)

# Time to simulate one process or DDP, as a fraction of sparkstrom's (measured: a digits network).
SYNCHRONOUS_WEIGHT = 0.2
FIRST_POLL_S = 2.0  # before the first poll and the first estimate of the time left
LONG_S = 10.0  # other processes, which import modules for seconds, start if more time is left
PROCESSES_MAX = 8  # this one included
PROCESS_BYTES = 400 << 20  # memory of a process besides sample and replicas: Python, torch, kernels
REPLICA_BYTES = 64  # memory of a simulated worker per parameter
POLL_S = 0.1

WEIGHTLESS = (
    f"the rows of the sample on which losses are computed (at most {EVALUATION_ROWS_MAX:,},"
    " held-out ones if there are any) all weigh 0, by their weights or because the loss ignores"
    " their labels: rehearse rows that count"
)


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a rehearsal, before it is simulated."""

    system: str  # ONE_PROCESS, SPARKSTROM or ALL_REDUCE (DDP)
    workers: int  # number of workers, or of DDP's ranks
    rule: str = ""  # scaling rule of SPARKSTROM; "": that of the network's options

    @property
    def description(self) -> str:
        """The run as the progress display names it."""
        if self.system == ONE_PROCESS:
            return "one process"
        if self.system == ALL_REDUCE:
            return f"DDP with {self.workers} ranks"
        return f"{pluralize(self.workers, 'worker')}{f', {self.rule}' if self.rule else ''}"

    @property
    def weight(self) -> float:
        """The estimated time to simulate this run, relative to a run of sparkstrom."""
        return 1.0 if self.system == SPARKSTROM else SYNCHRONOUS_WEIGHT


def plan_runs(workers: Sequence[int], rules: Sequence[str], own_rule: str | None) -> list[Run]:
    """Return the runs of a rehearsal, in the order of its table.

    Args:
        workers: Numbers of workers, ascending.
        rules: Scaling rules to compare; empty: only the network's own options.
        own_rule: The scaling rule among the network's options; None: none.
    """
    runs = [Run(ONE_PROCESS, 1)]
    for count in workers:
        compared = rules or [own_rule or ""]
        if count == 1:  # one worker needs no rule
            compared = compared[:1]
        runs += [Run(SPARKSTROM, count, rule) for rule in compared]
        if count > 1:
            runs.append(Run(ALL_REDUCE, count))
    return runs


class LossMeter:
    """Computes loss and accuracy of parameters on fixed rows, with its own copy of the model."""

    def __init__(self, recipe: FitRecipe, batches: Sequence[Batch]) -> None:
        self._model: FlatModel = pickle.loads(recipe.packed)
        self._batches = batches
        self._metrics: tuple[str, ...] = (LOSS, ACCURACY)
        self._parameters = recipe.parameters.copy()
        self._model.bind(self._parameters)
        if get_output_kind(self._model) == VALUES or not self._can_measure_accuracy():
            self._metrics = (LOSS,)

    def _can_measure_accuracy(self) -> bool:
        """Return whether accuracy can be measured, because the labels are classes."""
        try:
            measure_batch(self._model, self._batches[0], ACCURACY)
        except (SparkstromError, ValueError, TypeError, IndexError):
            return False
        return True

    def __call__(self, parameters: Flat, buffers: bytes) -> dict[str, float]:
        """Return the metrics, by name, of parameters f32[n_params] and the model's buffers.

        A loss that is not finite becomes inf. The accuracy is NaN if outputs are not finite. Raise
        UsageError if the rows all weigh 0.
        """
        self._parameters[:] = parameters
        load_buffers(self._model, buffers)
        found = {}
        for metric in self._metrics:
            parts = [measure_batch(self._model, batch, metric) for batch in self._batches]
            total, weight = (math.fsum(part[i] for part in parts) for i in range(2))
            if metric == LOSS and not weight:
                raise UsageError(WEIGHTLESS)
            value = total / weight if weight else math.nan
            is_lost = metric == LOSS and not math.isfinite(value)
            found[metric] = math.inf if is_lost else value
        return found


class RunSimulator:
    """Simulates single runs of one rehearsal.

    Args:
        recipe: The fit.
        data: Its rows.
        conditions: The cluster.
        compares_rules: Whether a run's scaling rule replaces the network's own options.
    """

    def __init__(
        self, recipe: FitRecipe, data: SampledData, conditions: Conditions, *, compares_rules: bool
    ) -> None:
        self.recipe, self.data, self.conditions = recipe, data, conditions
        self.compares_rules = compares_rules
        batches, self.is_held_out = data.evaluation_batches()
        self.measure: Measure | None = None
        if isinstance(recipe.model, Measured):
            self.measure = LossMeter(recipe, batches)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the constructor's arguments; unpickling creates another LossMeter."""
        make = partial(RunSimulator, compares_rules=self.compares_rules)
        return make, (self.recipe, self.data, self.conditions)

    def simulate(self, run: Run, on_progress: OnProgress) -> SimulatedFit:
        """Simulate a run; return its result. Call ``on_progress`` with the completed fraction."""
        recipe, conditions = self.recipe, self.conditions
        partitions = self.data.partitions(run.workers)
        if run.system == SPARKSTROM and recipe.rounds is not None:
            return simulate_rounds(recipe, partitions, conditions, self.measure, on_progress)
        if run.system == SPARKSTROM:
            if self.compares_rules:
                master = replace(recipe.master, scaling=run.rule, horizon=None, aggregation=None)
                recipe = replace(recipe, master=master)
            return FitSimulator(
                recipe, partitions, conditions, self.measure, on_progress=on_progress
            ).run()
        simulated = train_synchronously(recipe, partitions, conditions, self.measure, on_progress)
        if run.system == ALL_REDUCE:
            sent = ring_bits_s(recipe, run.workers, conditions) * simulated.seconds / 8
            simulated.link_bytes = {f"worker {i}": (sent, sent) for i in range(run.workers)}
        return simulated


class RunScheduler:
    """Simulates all runs of a rehearsal, and shows the progress.

    Args:
        simulator: Simulates each run.
        runs: All runs, no two of which are equal.
        n_params: The model's number of parameters.
        display: Shows the progress.
    """

    def __init__(
        self, simulator: RunSimulator, runs: Sequence[Run], n_params: int, display: ProgressDisplay
    ) -> None:
        self._simulator, self._runs, self._display = simulator, runs, display
        self._n_params = n_params
        self._queue = deque(runs)  # runs that have not begun
        self._fractions = dict.fromkeys(runs, 0.0)  # completed fraction of each run
        self._simulated: dict[Run, SimulatedFit] = {}
        self._processes: list[RunProcess[Run]] = []  # each simulates a run
        # With JAX, no other processes start: XLA uses all processors in this process, but would use
        # one in others. They would gain little, and a sum's bits may depend on the threads' number.
        self._may_start = "jax" not in sys.modules
        self._pickled = b""  # the simulator, for other processes
        self._began_s = time.monotonic()
        # When to poll other processes, or to start one.
        self._poll_due_s = self._began_s + FIRST_POLL_S

    def simulate_all(self) -> list[SimulatedFit]:
        """Simulate all runs; return their results in the same order."""
        try:
            while len(self._simulated) < len(self._runs):
                if self._queue:
                    run = self._queue.popleft()
                    advance = partial(self._advance, run)
                    advance(0.0)
                    self._finish(run, self._simulator.simulate(run, advance))
                else:
                    connection.wait([each.connection for each in self._processes], POLL_S)
                    self._poll_processes()
                    self._show(self._processes[0].run if self._processes else self._runs[-1])
        finally:
            for process in self._processes:
                process.kill()
        return [self._simulated[run] for run in self._runs]

    def _advance(self, run: Run, fraction: float) -> None:
        """Record and show that ``fraction`` of ``run``, which this process simulates, is done.

        If the time for it has come, also poll the other processes, or start one.
        """
        self._fractions[run] = fraction
        if (now_s := time.monotonic()) >= self._poll_due_s:
            self._poll_due_s = now_s + POLL_S
            self._poll_processes()
            if self._may_start and self._queue and self._takes_long(now_s):
                self._start_process()
        self._show(run)

    def _show(self, run: Run) -> None:
        """Show the progress of all runs, and the name of one that is being simulated."""
        number = self._runs.index(run) + 1
        phase = f"rehearsing {run.description} ({number} of {len(self._runs)})"
        self._display.show(RehearsalFigures(phase, self._fraction_done()))

    def _fraction_done(self) -> float:
        """Return the completed fraction of all runs, weighted by their estimated times."""
        total = math.fsum(run.weight for run in self._runs)
        done = math.fsum(run.weight * fraction for run, fraction in self._fractions.items())
        return min(1.0, done / total)

    def _finish(self, run: Run, simulated: SimulatedFit) -> None:
        """Record the result of a run."""
        self._simulated[run], self._fractions[run] = simulated, 1.0

    def _takes_long(self, now_s: float) -> bool:
        """Return whether more than LONG_S is left, estimated at ``now_s`` on the monotonic clock.

        Starting another process then saves time.
        """
        done = self._fraction_done()
        return (now_s - self._began_s) * (1 - done) > LONG_S * done

    def _start_process(self) -> None:
        """Start a process for the last run in the queue, if processors and memory suffice.

        If they do not, or if the start fails, no further process will be started.
        """
        self._may_start = len(self._processes) + 2 < min(count_cores(), PROCESSES_MAX)
        if count_cores() == 1:
            return
        try:
            self._pickled = self._pickled or pickle_by_value(self._simulator)
            if self._memory_needed() > free_memory_bytes() / 2:
                self._may_start = False
                return
            self._processes.append(RunProcess(self._pickled))
        except Exception as error:  # models of any kind are pickled; this process simulates all
            log.info("no further process simulates runs: %s", error)
            self._may_start = False
            return
        self._processes[-1].begin(self._queue.pop())

    def _memory_needed(self) -> int:
        """Return how many bytes of memory another process needs at most."""
        replicas = self._n_params * max(run.workers for run in self._queue)
        return PROCESS_BYTES + 2 * len(self._pickled) + REPLICA_BYTES * replicas

    def _poll_processes(self) -> None:
        """Record progress and results of the other processes, and send them further runs.

        A process for which no run is left is ended. If a process died, for example for lack of
        memory, its run is queued again.
        """
        for process in list(self._processes):
            try:
                simulated = process.poll()
            except (EOFError, OSError) as error:
                log.warning("a process that simulated a run died (%s)", format_reason(error))
                self._queue.append(process.run)
                self._fractions[process.run], self._may_start = 0.0, False
                self._drop(process)
                continue
            self._fractions[process.run] = process.fraction
            if simulated is not None:
                self._finish(process.run, simulated)
                if self._queue:
                    process.begin(self._queue.pop())
                else:
                    self._drop(process)

    def _drop(self, process: RunProcess[Run]) -> None:
        """End a process that is dead or no longer needed."""
        self._processes.remove(process)
        process.kill()
