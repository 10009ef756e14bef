"""Losses and validation scores per epoch, recorded by workers and combined on the driver.

Partitions reach the end of an epoch at different times, each with its own theta. An epoch's figure
is the sum over partitions of what each measured at its own end of that epoch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from sparkstrom.observe.telemetry import EpochFigures, TrainingCounters, WorkerCounters

# Attempt number of epochs read from a checkpoint; any real attempt replaces them.
RESUMED_ATTEMPT = -1
# A worker's counters hold three figures for each of its newest epochs, at most RECENT_EPOCHS_MAX:
# a message has room for 256 names. The driver has received epochs that ended over RECENT_S ago, so
# RECENT_EPOCHS_MIN of those are enough.
RECENT_EPOCHS_MAX, RECENT_EPOCHS_MIN, RECENT_S = 48, 8, 30.0


@dataclass(frozen=True, slots=True)
class PartitionEpoch:
    """Figures of one epoch of one partition, measured by one attempt of its task.

    Field names are keys of checkpoints and of task reports.
    """

    epoch: int  # from 0 in this fit
    loss_sum: float  # examples x mean loss, each minibatch before its step
    examples: int  # rows trained
    held_sum: float = 0.0  # sum over held-out rows of weight x loss, or of weight x hit
    held_weight: float = 0.0  # 0: nothing held out


class EpochLog:
    """The finished epochs of one worker, for its live counters and its final report."""

    def __init__(
        self, partition: int = 0, attempt: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._partition, self._attempt, self._clock = partition, attempt, clock
        self._finished: list[PartitionEpoch] = []
        self._added_s: list[float] = []

    def add(self, finished: PartitionEpoch) -> None:
        """Record an epoch that has just ended."""
        self._finished.append(finished)
        self._added_s.append(self._clock())

    def recent_figures(self) -> EpochFigures | None:
        """Return the newest epochs for the live counters, or None before the first one."""
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
            examples={each.epoch: each.examples for each in newest},
        )

    def report(self) -> dict[str, Any]:
        """Return all epochs as a JSON object."""
        return {
            "partition": self._partition,
            "attempt": self._attempt,
            "epochs": [asdict(epoch) for epoch in self._finished],
        }


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch over all partitions. NaN: not measured, or not reported in time.

    Field names are keys of checkpoints and of ``TrainingSummary.to_dict()``.
    """

    epoch: int  # from 1 over all fits of a network
    loss: float  # mean over examples, each under the parameters before its own step
    examples: int  # rows trained, over all partitions
    validation: float  # loss or accuracy of held-out rows, under theta at each partition's end
    partitions: int  # number of partitions that reported it
    held_weight: float = field(default=0.0, repr=False)  # total weight of held-out rows; 0: none


@dataclass(slots=True)
class EpochHistory:
    """The driver's record of every epoch of a fit, by partition, attempt and epoch."""

    first_epoch: int = 0  # epochs of earlier fits
    # (partition, attempt) -> epoch -> figures
    _attempts: dict[tuple[int, int], dict[int, PartitionEpoch]] = field(default_factory=dict)
    _resumed_epochs: list[Epoch] = field(default_factory=list)  # complete epochs of the resumed fit

    def report(self, trained: Mapping[int, int]) -> dict[str, Any]:
        """Return the record as a JSON object for a checkpoint; ``restore`` reads it.

        ``trained``: number of completed epochs of each partition that has rows.
        """
        whole = min(trained.values(), default=0)
        known = {p: self._latest_of_partition(p) for p in trained}
        later = {
            p: {e: epochs.get(e, PartitionEpoch(e, 0.0, 0)) for e in range(whole, trained[p])}
            for p, epochs in known.items()
        }
        return {
            "whole": [asdict(self.epoch(epoch)) for epoch in range(whole)],
            "parts": [
                [p, asdict(epoch_figures)]
                for p, epochs in later.items()
                for epoch_figures in epochs.values()
            ],
        }

    def restore(self, report: Mapping[str, Any]) -> None:
        """Restore what ``report`` returned; later figures of the same epochs replace these."""
        self._resumed_epochs = [Epoch(**epoch) for epoch in report["whole"]]
        for partition, epoch in report["parts"]:
            epochs = self._epochs_of_attempt(partition, RESUMED_ATTEMPT)
            epochs[epoch["epoch"]] = PartitionEpoch(**epoch)

    @property
    def epochs_resumed_from(self) -> int:
        """The number of epochs that all partitions had completed when the fit was resumed."""
        return len(self._resumed_epochs)

    def _latest_of_partition(self, partition: int) -> dict[int, PartitionEpoch]:
        """Return a partition's epochs by number; newer attempts replace older ones."""
        attempts = sorted(attempt for known, attempt in self._attempts if known == partition)
        newest: dict[int, PartitionEpoch] = {}
        for attempt in attempts:
            newest |= self._attempts[partition, attempt]
        return newest

    def add_counters(self, counters: Iterable[WorkerCounters]) -> None:
        """Record the epochs in the live counters of all workers."""
        for worker in counters:
            if worker.training is not None and worker.training.epochs is not None:
                self._add_worker(worker.training, worker.training.epochs)

    def _add_worker(self, training: TrainingCounters, figures: EpochFigures) -> None:
        """Record a worker's live epochs; skip one unless all three figures of it have arrived."""
        known = self._epochs_of_attempt(training.partition, training.attempt)
        for epoch, held_sum in figures.held_sums.items():
            loss, examples = figures.loss_sums.get(epoch), figures.examples.get(epoch)
            if loss is not None and examples is not None:
                known[epoch] = PartitionEpoch(epoch, loss, examples, held_sum, figures.held_weight)

    def add_reports(self, reports: Iterable[Mapping[str, Any]]) -> None:
        """Record the final reports of tasks; they are complete and replace live figures."""
        for report in reports:
            known = self._epochs_of_attempt(report["partition"], report["attempt"])
            known.update({epoch["epoch"]: PartitionEpoch(**epoch) for epoch in report["epochs"]})

    def _epochs_of_attempt(self, partition: int, attempt: int) -> dict[int, PartitionEpoch]:
        """Return the record of one attempt, by epoch; create an empty one if there is none."""
        return self._attempts.setdefault((partition, attempt), {})

    def epochs_reported_by(self, partitions: Collection[int]) -> list[int]:
        """Return the epochs (from 0, ascending) that every one of these partitions reported."""
        if not partitions:
            return []
        known: dict[int, set[int]] = {partition: set() for partition in partitions}
        for (partition, _), epochs in self._attempts.items():
            if partition in known:
                known[partition] |= set(epochs)
        return sorted(set.intersection(*known.values()))

    def _latest_of_epoch(self, epoch: int) -> list[PartitionEpoch]:
        """Return this epoch's figures, from the newest attempt of each partition."""
        newest: dict[int, tuple[int, PartitionEpoch]] = {}
        for (partition, attempt), epochs in self._attempts.items():
            if epoch in epochs and attempt >= newest.get(partition, (-1, None))[0]:
                newest[partition] = (attempt, epochs[epoch])
        return [newest[partition][1] for partition in sorted(newest)]

    def history(self) -> list[Epoch]:
        """Return all epochs that any partition reported, ascending."""
        epochs = {epoch for epochs in self._attempts.values() for epoch in epochs}
        later = sorted(epoch for epoch in epochs if epoch >= self.epochs_resumed_from)
        return [*self._resumed_epochs, *map(self.epoch, later)]

    def epoch(self, epoch: int) -> Epoch:
        """Combine the figures known so far of one epoch (from 0 in this fit)."""
        if epoch < self.epochs_resumed_from:
            return self._resumed_epochs[epoch]
        parts = self._latest_of_epoch(epoch)
        examples = sum(part.examples for part in parts)
        loss = math.fsum(part.loss_sum for part in parts) / examples if examples else math.nan
        number = self.first_epoch + epoch + 1
        weight = math.fsum(part.held_weight for part in parts)
        held = math.fsum(part.held_sum for part in parts) / weight if weight else math.nan
        return Epoch(number, loss, examples, held, len(parts), weight)
