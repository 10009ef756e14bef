"""Checkers: the invariants, seen from outside the machines."""

from __future__ import annotations

from collections import Counter

from sparkstrom.codec.messages import Committed, Phase
from sparkstrom.protocol.master import Master
from sparkstrom.simulation.process import SimProcess
from sparkstrom.simulation.replica import SimReplica, total

ENDS_ANOTHER_WAY = ("another attempt", "its partition is trained")


class Checks:
    """Collects violations of I1 to I4 as sentences that begin with the invariant's name."""

    def __init__(self, minibatches: int) -> None:
        self._minibatches = minibatches  # per partition
        self.violations: list[str] = []
        self.commits: list[Committed] = []
        self._numbered: dict[int, int] = {}
        self._taken: Counter[SimProcess] = Counter()  # how many of its updates are committed
        self._covered: dict[int, int] = {}  # partition -> minibatches inside committed updates
        self._ended: set[SimProcess] = set()

    def violation(self, text: str) -> None:
        self.violations.append(text)

    def committed(self, process: SimProcess, update: Committed) -> None:
        """I2: per origin in order, each once, and no minibatch twice."""
        expected = self._numbered.get(update.origin, 0) + 1
        if update.seq != expected or update.commit != len(self.commits) + 1:
            self.violation(f"I2: commit {update.commit} is ({update.origin}, {update.seq}), "
                           f"expected seq {expected}")  # fmt: skip
        self._numbered[update.origin] = update.seq
        self.commits.append(update)
        made = process.made[self._taken[process]]
        self._taken[process] += 1
        if made.payload != update.payload:
            self.violation(f"I2: commit {update.commit} is not what {process.name} made")
        self.covers(process.identity.partition, made.first, made.last)

    def covers(self, partition: int, first: int, last: int) -> None:
        """Minibatches ``first + 1`` to ``last`` of a partition are committed now."""
        if first < self._covered.get(partition, 0):
            self.violation(f"I2: minibatch {first + 1} of partition {partition} committed twice")
        self._covered[partition] = last

    def ended(self, process: SimProcess) -> None:
        self._ended.add(process)
        self._conserves(process)

    def failed(self, process: SimProcess, reason: str) -> None:
        if not any(text in reason for text in ENDS_ANOTHER_WAY):
            self.violation(f"I5: {process.name} failed: {reason}")
        self._conserves(process)

    def _conserves(self, process: SimProcess) -> None:
        if not process.learner.conserves():
            self.violation(f"I1: {process.name} lost mass")

    def at_end(self, master: Master, replica: SimReplica, processes: list[SimProcess]) -> None:
        """I1 to I4, once the fit is over."""
        for process in processes:
            self._conserves(process)
        if master.fit.phases.phase is not Phase.DONE:
            return
        if replica.theta != total(self.commits):
            self.violation("I2: the master's replica is not the sum of all commits")
        for node, digest in master.fit.phases.digests.items():
            if digest != master.fit.phases.own_digest:
                self.violation(f"I3: node {node} differs from the master")
        for partition in master.fit.partitions:
            if partition.minibatches != self._minibatches:
                self.violation(f"I2: partition {partition.index} has {partition.minibatches} of "
                               f"{self._minibatches} minibatches committed")  # fmt: skip
        for process in processes:
            if process.alive:
                self.violation(f"I4: {process.name} did not end: {process.node.command}")
