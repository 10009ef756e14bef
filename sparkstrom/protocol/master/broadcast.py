"""Broadcast: what everybody is told of the fit, and how often."""

from __future__ import annotations

from sparkstrom.base.identity import CommitNo
from sparkstrom.codec.messages import State
from sparkstrom.protocol.common.children import Children
from sparkstrom.protocol.master.closed_notices import ClosedNotices
from sparkstrom.protocol.master.members import Members
from sparkstrom.protocol.master.phases import Phases
from sparkstrom.protocol.master.sequencer import Sequencer

BEATS_PER_LEASE = 8


class Broadcast:
    """The figures as they were last told; news goes at once, and a beat says that this lives."""

    def __init__(
        self,
        lease_s: float,
        *,
        members: Members,
        sequencer: Sequencer,
        phases: Phases,
        notices: ClosedNotices,
        children: Children,
    ) -> None:
        self._beat_s, self._members, self._sequencer = lease_s / BEATS_PER_LEASE, members, sequencer
        self._phases, self._notices, self._children = phases, notices, children
        self.slowest = 0  # steps of the slowest live, unfinished worker
        self.training = 0  # live, unfinished workers with a replica
        self.minibatches = 0  # committed
        self.epochs = 0  # that every partition with rows to train on is through
        self._beat = 0

    def look_around(self) -> None:
        """How many train, and how far are they? That is news that cannot wait."""
        slowest, training = self._members.slowest(), self._members.training()
        known = self.slowest, self.training
        self.slowest = self.slowest if slowest is None else slowest
        self.training = training
        self.minibatches = self._members.partitions.minibatches
        self.epochs = self._members.partitions.epochs_whole
        if known != (self.slowest, self.training):
            self._children.announce()

    def beat(self, now_s: float) -> None:
        """Everybody is to hear now and then that the master lives."""
        beat = int(now_s / self._beat_s)
        if beat > self._beat:
            self._beat = beat
            self._children.announce()

    @property
    def state(self) -> State:
        """What everybody is told; each parent adds what is for its own edge."""
        return State(
            phase=self._phases.phase,
            beat=self._beat,
            head=self._sequencer.head,
            final=self._phases.final,
            slowest=self.slowest,
            nodes=len(self._members.live),
            training=self.training,
            minibatches=self.minibatches,
            epochs=self.epochs,
            wait_ms=0,
            closed=list(self._notices.by_node),
            stamp=0,
            sent=CommitNo(0),
            bytes_received=0,
            bytes_forwarded=0,
        )
