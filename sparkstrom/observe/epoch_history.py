"""Record the loss and held-out score of each epoch on workers, and combine them on the driver.

Partitions reach the end of an epoch at different times, each with its own version of the
parameters. An epoch's value combines what each partition measured at its own end of that epoch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sparkstrom.observe.telemetry import EpochFigures, TrainingCounters, WorkerCounters

# Attempt number of epochs read from a checkpoint; any real attempt replaces them.
RESUMED_ATTEMPT = -1
# A worker's counters repeat four values for each of its latest epochs, for RECENT_EPOCHS_MAX at
# most, because a message has room for 256 names. Epochs that ended more than RECENT_S seconds ago
# have reached the driver, so they are only repeated to make up RECENT_EPOCHS_MIN epochs.
RECENT_EPOCHS_MAX, RECENT_EPOCHS_MIN, RECENT_S = 36, 8, 30.0


@dataclass(frozen=True, slots=True)
class PartitionEpoch:
    """Sums over one epoch of one partition, measured by one attempt of its Spark task.

    The field names are keys in checkpoints and in task reports.
    """

    epoch: int  # from 0 in this fit
    loss_sum: float  # weighted sum of losses; each minibatch is evaluated before its step
    examples: int  # rows trained
    held_sum: float = 0.0  # weighted sum over held-out rows: their losses, or 1 if correct
    held_weight: float = 0.0  # total weight of the held-out rows; 0: none
    loss_weight: float | None = None  # total weight of the losses; None: ``examples``


def _unknown_epoch(epoch: int) -> PartitionEpoch:
    """Return a placeholder for an epoch not reported yet, with NaN for the held-out rows."""
    return PartitionEpoch(epoch, 0.0, 0, held_sum=math.nan, held_weight=math.nan)


def _loss_weight(part: PartitionEpoch) -> float:
    """Return the total weight of an epoch's losses. Checkpoints of earlier versions lack it."""
    return part.examples if part.loss_weight is None else part.loss_weight


class EpochLog:
    """A worker's record of its finished epochs, for its live counters and its final report."""

    def __init__(
        self, partition: int = 0, attempt: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._partition, self._attempt, self._clock = partition, attempt, clock
        self._finished: list[PartitionEpoch] = []
        self._added_s: list[float] = []  # when each of them was added

    def add(self, finished: PartitionEpoch) -> None:
        """Record an epoch that has just ended."""
        self._finished.append(finished)
        self._added_s.append(self._clock())

    def recent_figures(self) -> EpochFigures | None:
        """Return the latest epochs for the live counters, or None if no epoch has ended yet."""
        if not self._finished:
            return None
        since_s = self._clock() - RECENT_S
        recent = sum(added_s >= since_s for added_s in self._added_s[-RECENT_EPOCHS_MAX:])
        newest = self._finished[-max(RECENT_EPOCHS_MIN, recent) :]
        return EpochFigures(
            newest[-1].epoch,
            newest[-1].held_weight,
            held_sums={each.epoch: each.held_sum for each in newest},
            loss_sums={each.epoch: each.loss_sum for each in newest},
            loss_weights={each.epoch: _loss_weight(each) for each in newest},
            examples={each.epoch: each.examples for each in newest},
        )

    def report(self) -> dict[str, Any]:
        """Return all epochs as a JSON object, for ``EpochHistory.add_reports``."""
        return {
            "partition": self._partition,
            "attempt": self._attempt,
            "epochs": [asdict(epoch) for epoch in self._finished],
        }


@dataclass(frozen=True, slots=True)
class Epoch:
    """The results of one epoch over all partitions. NaN: not measured, or not reported in time.

    The field names are keys in checkpoints and in ``TrainingSummary.to_dict()``.
    """

    epoch: int  # from 1, counted over all fits of a network
    loss: float  # weighted mean over rows; each minibatch is evaluated before its own step
    examples: int  # rows trained, over all partitions
    validation: float  # held-out loss or accuracy, with the parameters at each partition's end
    partitions: int  # number of partitions that have reported this epoch
    held_weight: float = field(default=0.0, repr=False)  # total weight of held-out rows; 0: none


@dataclass(slots=True)
class EpochHistory:
    """The driver program's record of all epochs of a fit, by partition and task attempt."""

    first_epoch: int = 0  # number of epochs in earlier fits

    # (partition, attempt) -> epoch -> sums
    _attempts: dict[tuple[int, int], dict[int, PartitionEpoch]] = field(default_factory=dict)
    _resumed_epochs: list[Epoch] = field(default_factory=list)  # completed before resuming the fit

    def report(self, trained: Mapping[int, int]) -> dict[str, Any]:
        """Return the record as a JSON object for a checkpoint; ``restore`` reads it back.

        ``trained`` maps each partition that has rows to its number of completed epochs. Epochs that
        all of them have completed are merged ("whole"); later ones are given by partition
        ("parts"). If a partition's figures have not arrived yet, as while it evaluates held-out
        rows, the epoch's validation becomes NaN, so that an incomplete value cannot stop a resumed
        fit.
        """
        whole = min(trained.values(), default=0)
        known = {p: self._latest_of_partition(p) for p in trained}
        later = {
            p: {e: epochs.get(e, _unknown_epoch(e)) for e in range(whole, trained[p])}
            for p, epochs in known.items()
        }
        return {
            "whole": [asdict(self._whole_epoch(epoch, known)) for epoch in range(whole)],
            "parts": [
                [p, asdict(epoch_figures)]
                for p, epochs in later.items()
                for epoch_figures in epochs.values()
            ],
        }

    def _whole_epoch(self, epoch: int, known: Mapping[int, Mapping[int, PartitionEpoch]]) -> Epoch:
        """Return an epoch; its validation is NaN unless all partitions in ``known`` reported it."""
        figures = self.epoch(epoch)
        if epoch < self.epochs_resumed_from or all(epoch in epochs for epochs in known.values()):
            return figures
        return replace(figures, validation=math.nan)

    def restore(self, report: Mapping[str, Any]) -> None:
        """Restore a record from the JSON object that the method ``report`` returned.

        New values of a partition replace restored ones.
        """
        self._resumed_epochs = [Epoch(**epoch) for epoch in report["whole"]]
        for partition, epoch in report["parts"]:
            epochs = self._epochs_of_attempt(partition, RESUMED_ATTEMPT)
            epochs[epoch["epoch"]] = PartitionEpoch(**epoch)

    @property
    def epochs_resumed_from(self) -> int:
        """The number of epochs that all partitions had completed when the fit was resumed."""
        return len(self._resumed_epochs)

    def _latest_of_partition(self, partition: int) -> dict[int, PartitionEpoch]:
        """Return a partition's epochs by number; newer task attempts replace older ones."""
        attempts = sorted(attempt for known, attempt in self._attempts if known == partition)
        newest: dict[int, PartitionEpoch] = {}
        for attempt in attempts:
            newest |= self._attempts[partition, attempt]
        return newest

    def add_counters(self, counters: Iterable[WorkerCounters]) -> None:
        """Record the epochs contained in the live counters of all workers."""
        for worker in counters:
            if worker.training is not None and worker.training.epochs is not None:
                self._add_worker(worker.training, worker.training.epochs)

    def _add_worker(self, training: TrainingCounters, figures: EpochFigures) -> None:
        """Record a worker's live epochs; skip epochs whose four values have not all arrived."""
        known = self._epochs_of_attempt(training.partition, training.attempt)
        for epoch, held_sum in figures.held_sums.items():
            loss, weight = figures.loss_sums.get(epoch), figures.loss_weights.get(epoch)
            examples = figures.examples.get(epoch)
            if loss is not None and weight is not None and examples is not None:
                held = held_sum, figures.held_weight
                known[epoch] = PartitionEpoch(epoch, loss, examples, *held, loss_weight=weight)

    def add_reports(self, reports: Iterable[Mapping[str, Any]]) -> None:
        """Record the final reports of tasks; they are complete and replace live values."""
        for report in reports:
            known = self._epochs_of_attempt(report["partition"], report["attempt"])
            known.update({epoch["epoch"]: PartitionEpoch(**epoch) for epoch in report["epochs"]})

    def _epochs_of_attempt(self, partition: int, attempt: int) -> dict[int, PartitionEpoch]:
        """Return the epochs of one task attempt by number; create the record if it is missing."""
        return self._attempts.setdefault((partition, attempt), {})

    def epochs_reported_by(self, partitions: Collection[int]) -> list[int]:
        """Return the epochs (from 0, ascending) that all of these partitions have reported."""
        if not partitions:
            return []
        known: dict[int, set[int]] = {partition: set() for partition in partitions}
        for (partition, _), epochs in self._attempts.items():
            if partition in known:
                known[partition] |= set(epochs)
        return sorted(set.intersection(*known.values()))

    def _latest_of_epoch(self, epoch: int) -> list[PartitionEpoch]:
        """Return this epoch's sums from the newest task attempt of each partition."""
        newest: dict[int, tuple[int, PartitionEpoch]] = {}
        for (partition, attempt), epochs in self._attempts.items():
            if epoch in epochs and attempt >= newest.get(partition, (-1, None))[0]:
                newest[partition] = (attempt, epochs[epoch])
        return [newest[partition][1] for partition in sorted(newest)]

    def history(self) -> list[Epoch]:
        """Return all epochs that at least one partition has reported, in ascending order."""
        epochs = {epoch for epochs in self._attempts.values() for epoch in epochs}
        later = sorted(epoch for epoch in epochs if epoch >= self.epochs_resumed_from)
        return [*self._resumed_epochs, *map(self.epoch, later)]

    def epoch(self, epoch: int) -> Epoch:
        """Combine what partitions have reported so far about one epoch (from 0 in this fit)."""
        if epoch < self.epochs_resumed_from:
            return self._resumed_epochs[epoch]
        parts = self._latest_of_epoch(epoch)
        examples = sum(part.examples for part in parts)
        weight = math.fsum(map(_loss_weight, parts))
        loss = math.fsum(part.loss_sum for part in parts) / weight if weight else math.nan
        number = self.first_epoch + epoch + 1
        held_weight = math.fsum(part.held_weight for part in parts)
        held_sum = math.fsum(part.held_sum for part in parts)
        held = held_sum / held_weight if held_weight else math.nan
        return Epoch(number, loss, examples, held, len(parts), held_weight)
