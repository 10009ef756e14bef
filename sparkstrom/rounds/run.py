"""Run a round-based fit on any backend: divide epochs into rounds and train them in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sparkstrom.base.errors import SparkstromError, UsageError
from sparkstrom.base.identity import Position
from sparkstrom.codec.messages import Phase
from sparkstrom.fit.early_stopping_listener import EarlyStoppingListener
from sparkstrom.fit.events import FitListener
from sparkstrom.fit.fit_context import FitReporting
from sparkstrom.fit.listeners import ProgressListener
from sparkstrom.fit.network_state import NetworkStateHolder
from sparkstrom.fit.session import FitRunner
from sparkstrom.fit.supervisor import FitJob
from sparkstrom.models.base import FlatModel
from sparkstrom.observe.epoch_history import EpochHistory
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.protocol.master.membership import describe_different_rows
from sparkstrom.protocol.master.phases import NO_ROWS
from sparkstrom.rounds.averaging import AveragedParameters, AveragingOptions, RoundState
from sparkstrom.rounds.backend import EpochPlan, PartitionFacts, RoundOrder, RoundsBackend
from sparkstrom.rounds.control import RoundsControl
from sparkstrom.rounds.worker_round import RoundPace, fit_length, raise_failure
from sparkstrom.runtime.optimizer_states import OptimizerStates

MakeJob = Callable[[Callable[[], list[str]]], FitJob]  # (train_all_rounds) -> job that runs it
MakeMonitors = Callable[[Any, FitReporting], Sequence[FitListener]]  # (job, reporting) -> listeners


class RoundsRun(FitRunner):
    """One round-based fit, with its parameters, controller and job; ``run`` is called once.

    Args:
        spec: The fit.
        model: The model that is trained.
        options: How workers' results are combined.
        network: Holds the parameters from which the first round starts.
        states: The optimizer states from which the first round starts.
        backend: The workers.
        make_job: Receives a function that trains all rounds; returns a job whose thread calls it.
        make_monitors: Returns listeners that watch the job and report problems.
        has_observer: Whether early stopping may end the fit.
        keeps_states: Whether the next fit continues with the optimizer states.
    """

    master: RoundsControl

    def __init__(
        self,
        spec: FitSpec,
        model: FlatModel,
        options: AveragingOptions,
        network: NetworkStateHolder,
        states: OptimizerStates,
        backend: RoundsBackend,
        make_job: MakeJob,
        make_monitors: MakeMonitors = lambda job, reporting: (),
        *,
        has_observer: bool,
        keeps_states: bool = True,
    ) -> None:
        self.spec, self.states, self._keeps_states = spec, states, keeps_states
        self.book = EpochHistory(spec.first_epoch)
        steps = spec.minibatches_before // spec.workers
        state = RoundState(model, options, network.parameters, states, steps)
        self.theta = AveragedParameters(state, network.grid_exponent())
        self.master = RoundsControl(spec, state, has_observer=has_observer, abort=backend.abort)
        self._make_monitors = make_monitors
        self._job = make_job(RoundsLoop(backend, self.master, options.averaging_frequency).run)

    @property
    def states_after(self) -> OptimizerStates:
        """The optimizer states from which the next fit continues; none if they are not kept."""
        if not self._keeps_states:
            return OptimizerStates()
        return OptimizerStates.from_copies(self.master.state.copy_states().encoded())

    def run(
        self, reporting: FitReporting, stopping: EarlyStoppingListener, *others: FitListener
    ) -> None:
        """Run the fit to completion. Raise the error that ended it early."""
        display = ProgressListener(reporting.progress, worker_lines=reporting.shows_worker_output)
        monitors = self._make_monitors(self._job, reporting)
        self._supervise(self._job, *monitors, stopping, display, reporting.record, *others)


class RoundsLoop:
    """The loop that trains all rounds of one fit.

    Args:
        backend: The workers.
        control: The fit's controller, which receives all results.
        frequency: Number of minibatches that a worker trains in one round.
    """

    def __init__(self, backend: RoundsBackend, control: RoundsControl, frequency: int) -> None:
        self._backend, self._control, self._frequency = backend, control, frequency
        self._facts: Sequence[PartitionFacts] = ()  # by partition

    def run(self) -> list[str]:
        """Train all rounds in this thread. Return each worker's metrics of all epochs, as JSON.

        A SparkstromError is not raised but passed to the controller, which ends the fit; the result
        is then empty, as it is if the fit was given up. All other exceptions are raised.
        """
        control = self._control
        try:
            with self._backend.open() as facts:
                self._begin_training(facts)
                for epoch in range(control.spec.epochs):
                    if control.continues and self._is_incomplete(epoch):
                        self._train_epoch(epoch)
                if control.given_up:
                    return []
                control.enter_phase(Phase.DRAINING)
                control.enter_phase(Phase.AUDIT)
                replicas = self._backend.end(control.state)
                control.record_output(replicas)
            return control.finish({str(one.partition + 1): one.digest for one in replicas})
        except SparkstromError as error:
            control.fail(error)
            return []

    def _begin_training(self, facts: Sequence[PartitionFacts]) -> None:
        """Check the workers' rows and begin training.

        Raise UsageError if the rows differ from those before a resume, or there are no rows.
        """
        self._facts = sorted(facts, key=lambda one: one.partition)
        for one in self._facts:
            partition = self._control.partitions[one.partition]
            if not partition.record_or_compare_rows(one.rows, one.checksum, one.batches):
                raise UsageError(
                    describe_different_rows(partition, one.rows, one.batches, one.checksum)
                )
        if not any(one.rows for one in self._facts):
            raise UsageError(NO_ROWS.format(len(self._facts)))
        self._control.begin_training(self._facts)

    def _is_incomplete(self, epoch: int) -> bool:
        """Return whether any partition with rows has not completed this epoch."""
        partitions = self._control.partitions
        return any(p.rows and p.position.epoch <= epoch for p in partitions)

    def _first_batch(self, epoch: int, index: int) -> int:
        """Return the index of the first untrained minibatch of an epoch in partition ``index``.

        If the partition has completed the epoch, return the epoch's number of minibatches.
        """
        position = self._control.partitions[index].position
        if position.epoch == epoch:
            return position.batch
        return 0 if position.epoch < epoch else self._facts[index].batches

    def _train_epoch(self, epoch: int) -> None:
        """Train the rest of an epoch in rounds, then evaluate the model on the held-out rows.

        Return early if a stop was requested. Raise the first error of a model.
        """
        control, workers = self._control, range(len(self._facts))
        plan = EpochPlan(
            epoch,
            self._frequency,
            firsts=tuple(self._first_batch(epoch, index) for index in workers),
            ends=tuple(one.batches for one in self._facts),
            held_out=any(one.held_out for one in self._facts),
        )
        for number in range(plan.rounds):
            if not control.continues:
                return
            self._train_round(plan, number)
        reports = self._backend.measure(plan, control.state) if plan.held_out else []
        control.record_output(reports)
        raise_failure(reports)
        control.end_epoch(epoch, {one.partition: one for one in reports})

    def _train_round(self, plan: EpochPlan, number: int) -> None:
        """Train an epoch's round ``number`` (from 0), and pass its results to the controller.

        Raise the first error of a worker's model.
        """
        spec, partitions = self._control.spec, self._control.partitions
        batches = [plan.batches(number, one.partition) for one in self._facts]
        counts = [len(each) for each in batches if each]
        before = spec.minibatches_before + partitions.minibatches
        length = fit_length(spec, partitions.minibatches_expected)
        pace = RoundPace(before, len(counts), sum(counts), length)
        results = self._backend.train(RoundOrder(plan, number, pace), self._control.state)
        self._control.record_output(results.reports)
        raise_failure(results.reports)
        # A position stays in the epoch until ``end_epoch``, after the held-out rows are evaluated.
        positions = {
            one.partition: Position(plan.epoch, each.stop)
            for one, each in zip(self._facts, batches, strict=True)
            if one.rows
        }
        self._control.end_round(results, positions)
