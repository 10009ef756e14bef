"""The interface ``RoundsBackend``, by which a fit in rounds has its workers train and measure."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from sparkstrom.fit.supervisor import CANCELLED_MESSAGE, FitCancelled
from sparkstrom.rounds.averaging import RoundResults, RoundState
from sparkstrom.rounds.worker_round import HeldOutReport, ReplicaReport, RoundPace


@dataclass(frozen=True, slots=True)
class PartitionFacts:
    """What a worker reports about its rows before the first round."""

    partition: int
    rows: int  # number of rows to train on
    held_out: int  # number of held-out rows
    checksum: int  # of the rows, to recognize them when a fit is resumed
    batches: int  # minibatches per epoch
    spilled_bytes: int  # bytes of rows on disk, because they do not fit into memory
    host: str = ""  # the worker's host


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """How the minibatches that are left in one epoch are divided into rounds."""

    epoch: int  # of this fit, from 0
    frequency: int  # most minibatches of a worker in one round
    firsts: tuple[int, ...]  # each worker's first minibatch; above 0 if the fit resumed within it
    ends: tuple[int, ...]  # each worker's number of minibatches in an epoch
    held_out: bool  # whether rows are held out, to be measured after the last round

    @property
    def rounds(self) -> int:
        """Number of rounds until every worker has trained all of its minibatches."""
        left = [end - first for first, end in zip(self.firsts, self.ends, strict=True)]
        return max(0, -(-max(left) // self.frequency))

    def batches(self, number: int, worker: int) -> range:
        """Return the indices of a worker's minibatches in round ``number``, counted from 0."""
        first = min(self.firsts[worker] + number * self.frequency, self.ends[worker])
        return range(first, min(first + self.frequency, self.ends[worker]))


@dataclass(frozen=True, slots=True)
class RoundOrder:
    """One round to train, as a backend gets it."""

    plan: EpochPlan
    number: int  # of the round in its epoch, from 0
    pace: RoundPace  # position of the whole fit when the round starts


class RoundsBackend(ABC):
    """The workers of one fit; a subclass for each kind, such as Spark tasks or local processes.

    The thread that trains the rounds calls all methods except ``abort``.
    """

    def __init__(self) -> None:
        self._aborted = threading.Event()

    def abort(self) -> None:
        """Make the present call and all later ones raise FitCancelled soon. Thread-safe."""
        self._aborted.set()

    def check_aborted(self) -> None:
        """Raise FitCancelled if ``abort`` was called."""
        if self._aborted.is_set():
            raise FitCancelled(CANCELLED_MESSAGE.format("nobody waits for its rounds"))

    @abstractmethod
    def open(self) -> AbstractContextManager[Sequence[PartitionFacts]]:
        """Read the rows; return a context manager that keeps the workers ready inside its block.

        Its value has the facts of all partitions, in any order.
        """

    @abstractmethod
    def train(self, order: RoundOrder, state: RoundState) -> RoundResults:
        """Train one round that starts from ``state``; return its results.

        If a user's model raises, the exception is in a report of the results.
        """

    @abstractmethod
    def measure(self, plan: EpochPlan, state: RoundState) -> Sequence[HeldOutReport]:
        """Measure the held-out rows with the parameters of ``state`` at an epoch's end.

        Return a report of each worker that has held-out rows.
        """

    def end(self, state: RoundState) -> Sequence[ReplicaReport]:
        """End the workers after the last round.

        Return a hash of the parameters for each worker that keeps its own copy.
        """
        return ()
