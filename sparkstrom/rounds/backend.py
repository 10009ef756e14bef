"""Define ``RoundsBackend``, through which training in rounds (parameter averaging) runs workers.

Backends run the workers as Spark tasks (by RDDs or by DataFrames), as local processes, or in a
rehearsal, one after the other in virtual time.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from sparkstrom.data.row_store import Batches
from sparkstrom.fit.supervisor import CANCELLED_MESSAGE, FitCancelled
from sparkstrom.rounds.averaging import RoundResults, RoundState
from sparkstrom.rounds.worker_round import HeldOutReport, ReplicaReport, RoundPace

# Kinds of traffic for which a summary lists the number of bytes, as workers see them.
UPLOADED, DOWNLOADED = "averages", "parameters"


@dataclass(frozen=True, slots=True)
class PartitionFacts:
    """A worker's report about its partition of the rows, made before the first round."""

    partition: int  # index of the partition
    rows: int  # number of rows to train on
    held_out: int  # number of held-out rows
    checksum: int  # checksum of the rows, to recognize them when a fit is resumed
    batches: int  # minibatches per epoch
    spilled_bytes: int  # bytes of rows that are on disk because they do not fit into memory
    host: str = ""  # the worker's host

    @classmethod
    def from_batches(cls, partition: int, batches: Batches, host: str) -> PartitionFacts:
        """Return the facts about a worker's minibatches."""
        return cls(
            partition,
            batches.rows,
            batches.held_out.rows,
            batches.checksum,
            batches.batches_per_epoch,
            batches.spilled_bytes,
            host,
        )


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """The division of an epoch's remaining minibatches into rounds."""

    epoch: int  # epoch of this fit, from 0
    frequency: int  # maximum number of minibatches that a worker trains in one round
    firsts: tuple[int, ...]  # index of each worker's first untrained minibatch; above 0 on a resume
    ends: tuple[int, ...]  # each worker's number of minibatches in an epoch
    held_out: bool  # whether to evaluate the model on held-out rows after the last round

    @property
    def rounds(self) -> int:
        """Number of rounds that all workers need to train their remaining minibatches."""
        left = [end - first for first, end in zip(self.firsts, self.ends, strict=True)]
        return max(0, -(-max(left) // self.frequency))

    def batches(self, number: int, worker: int) -> range:
        """Return the indices of a worker's minibatches in round ``number`` (from 0), or none."""
        first = min(self.firsts[worker] + number * self.frequency, self.ends[worker])
        return range(first, min(first + self.frequency, self.ends[worker]))


@dataclass(frozen=True, slots=True)
class RoundOrder:
    """A request to a backend to train one round."""

    plan: EpochPlan
    number: int  # number of the round in its epoch, from 0
    pace: RoundPace  # position of the whole fit at the start of the round


class RoundsBackend(ABC):
    """The workers of one round-based fit; the module names the kinds of subclasses.

    The thread that trains the rounds calls all methods except ``abort``.
    """

    def __init__(self) -> None:
        self._aborted = threading.Event()

    def abort(self) -> None:
        """Make the current call and all later calls raise FitCancelled soon. Thread-safe."""
        self._aborted.set()

    def check_aborted(self) -> None:
        """Raise FitCancelled if ``abort`` was called."""
        if self._aborted.is_set():
            raise FitCancelled(CANCELLED_MESSAGE.format("nobody waits for its rounds"))

    @abstractmethod
    def open(self) -> AbstractContextManager[Sequence[PartitionFacts]]:
        """Read the rows; return a context manager that keeps the workers ready inside its block.

        Entering it returns the facts of all partitions, in any order.
        """

    @abstractmethod
    def train(self, order: RoundOrder, state: RoundState) -> RoundResults:
        """Train one round that starts from ``state``; return its results.

        An exception that a user's model raises in a worker is stored in that worker's report.
        """

    @abstractmethod
    def measure(self, plan: EpochPlan, state: RoundState) -> Sequence[HeldOutReport]:
        """Evaluate the parameters of ``state`` on the held-out rows at the end of an epoch.

        Return the reports of the workers that have held-out rows.
        """

    def end(self, state: RoundState) -> Sequence[ReplicaReport]:
        """End the workers after the last round.

        Return each worker's report, with a hash of the parameters as the worker sees them. Unless
        overridden, do nothing and return no reports.
        """
        return ()
