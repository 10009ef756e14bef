"""Epochs: what workers say about each, and what that is for all partitions together.

Partitions come to the end of an epoch at different times, each with its own theta. An epoch's
figure is the sum over partitions of what each measured at its own end of that epoch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from sparkstrom.observe.telemetry import EpochFigures, TrainingCounters, WorkerCounters

EARLIER = -1  # the attempts before the fit went on, which have the first word
# Newest epochs whose three figures are among the counters: a message has room for 256 names. Older
# than RECENT_S, they have been heard, so that WINDOW_MIN of them will do.
WINDOW, WINDOW_MIN, RECENT_S = 48, 8, 30.0


@dataclass(frozen=True, slots=True)
class Finished:
    """One partition's epoch, as one attempt of its task trained and measured it."""

    epoch: int  # from 0 in this fit
    loss_sum: float  # examples x mean loss, each minibatch before its step
    examples: int
    held_sum: float = 0.0  # of weight x loss over held-out rows under theta; or of weights of hits
    held_weight: float = 0.0  # 0: nothing held out


class EpochLog:
    """A worker's finished epochs: the newest go to the driver live, all of them at the end."""

    def __init__(
        self, partition: int = 0, attempt: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._partition, self._attempt, self._clock = partition, attempt, clock
        self._finished: list[Finished] = []
        self._added_s: list[float] = []

    def add(self, finished: Finished) -> None:
        self._finished.append(finished)
        self._added_s.append(self._clock())

    def figures(self) -> EpochFigures | None:
        """For the driver to follow: the newest epochs, if there are any."""
        if not self._finished:
            return None
        since_s = self._clock() - RECENT_S
        recent = sum(added_s >= since_s for added_s in self._added_s[-WINDOW:])
        told = self._finished[-max(WINDOW_MIN, recent) :]
        return EpochFigures(
            told[-1].epoch,
            told[-1].held_weight,
            held_sums={one.epoch: one.held_sum for one in told},
            loss_sums={one.epoch: one.loss_sum for one in told},
            examples={one.epoch: one.examples for one in told},
        )

    def report(self) -> dict[str, Any]:
        """Everything, JSON-able."""
        return {
            "partition": self._partition,
            "attempt": self._attempt,
            "epochs": [asdict(one) for one in self._finished],
        }


@dataclass(frozen=True, slots=True)
class Epoch:
    """One epoch over all partitions. NaN is what was not measured, or not reported in time."""

    epoch: int  # from 1 over all fits of a network
    loss: float  # mean over examples, each under the parameters before its own step
    examples: int
    validation: float  # loss or accuracy of held-out rows, under theta at each partition's end
    partitions: int  # that reported it
    held_weight: float = field(default=0.0, repr=False)  # of the held-out rows; 0: there are none


@dataclass(slots=True)
class EpochBook:
    """The driver's: figures by (partition, attempt) and epoch, whichever way they came."""

    first_epoch: int = 0  # epochs of earlier fits
    _told: dict[tuple[int, int], dict[int, Finished]] = field(default_factory=dict)
    _before: list[Epoch] = field(default_factory=list)  # whole ones, of the fit that it goes on

    def report(self, trained: Mapping[int, int]) -> dict[str, Any]:
        """For a fit that goes on from here, JSON-able.

        ``trained``: of each partition with rows, how many epochs it is through.
        """
        whole = min(trained.values(), default=0)
        known = {p: self._newest_of(p) for p in trained}
        later = {
            p: {e: told.get(e, Finished(e, 0.0, 0)) for e in range(whole, trained[p])}
            for p, told in known.items()
        }
        return {
            "whole": [asdict(self.epoch(epoch)) for epoch in range(whole)],
            "parts": [[p, asdict(one)] for p, told in later.items() for one in told.values()],
        }

    def go_on(self, report: Mapping[str, Any]) -> None:
        """From what ``report`` wrote; whatever is told of these epochs now comes on top."""
        self._before = [Epoch(**one) for one in report["whole"]]
        for partition, one in report["parts"]:
            self._of(partition, EARLIER)[one["epoch"]] = Finished(**one)

    @property
    def epochs_before(self) -> int:
        """That all partitions were through when the fit went on."""
        return len(self._before)

    def _newest_of(self, partition: int) -> dict[int, Finished]:
        attempts = sorted(attempt for known, attempt in self._told if known == partition)
        newest: dict[int, Finished] = {}
        for attempt in attempts:
            newest |= self._told[partition, attempt]
        return newest

    def follow(self, counters: Iterable[WorkerCounters]) -> None:
        """Counters of all workers, as they are now."""
        for one in counters:
            if one.training is not None and one.training.epochs is not None:
                self._follow(one.training, one.training.epochs)

    def _follow(self, training: TrainingCounters, figures: EpochFigures) -> None:
        """Take the epochs whose figures are all there."""
        told = self._of(training.partition, training.attempt)
        for epoch, held_sum in figures.held_sums.items():
            loss, examples = figures.loss_sums.get(epoch), figures.examples.get(epoch)
            if loss is not None and examples is not None:
                told[epoch] = Finished(epoch, loss, examples, held_sum, figures.held_weight)

    def close(self, reports: Iterable[Mapping[str, Any]]) -> None:
        """What tasks said at their end; complete, so it replaces what was followed."""
        for report in reports:
            told = self._of(report["partition"], report["attempt"])
            told.update({one["epoch"]: Finished(**one) for one in report["epochs"]})

    def _of(self, partition: int, attempt: int) -> dict[int, Finished]:
        return self._told.setdefault((partition, attempt), {})

    def judged_by(self, partitions: Collection[int]) -> list[int]:
        """Epochs, from 0, that each of these partitions has reported, in order."""
        if not partitions:
            return []
        known: dict[int, set[int]] = {partition: set() for partition in partitions}
        for (partition, _), told in self._told.items():
            if partition in known:
                known[partition] |= set(told)
        return sorted(set.intersection(*known.values()))

    def _latest(self, epoch: int) -> list[Finished]:
        """Of each partition the newest attempt that finished this epoch."""
        newest: dict[int, tuple[int, Finished]] = {}
        for (partition, attempt), told in self._told.items():
            if epoch in told and attempt >= newest.get(partition, (-1, None))[0]:
                newest[partition] = (attempt, told[epoch])
        return [newest[partition][1] for partition in sorted(newest)]

    def history(self) -> list[Epoch]:
        """All epochs that somebody reported, in order."""
        told = {epoch for told in self._told.values() for epoch in told}
        later = sorted(epoch for epoch in told if epoch >= self.epochs_before)
        return [*self._before, *map(self.epoch, later)]

    def epoch(self, epoch: int) -> Epoch:
        """One of them, from 0 in this fit, as far as it is known."""
        if epoch < self.epochs_before:
            return self._before[epoch]
        parts = self._latest(epoch)
        examples = sum(one.examples for one in parts)
        loss = math.fsum(one.loss_sum for one in parts) / examples if examples else math.nan
        number = self.first_epoch + epoch + 1
        weight = math.fsum(one.held_weight for one in parts)
        held = math.fsum(one.held_sum for one in parts) / weight if weight else math.nan
        return Epoch(number, loss, examples, held, len(parts), weight)
