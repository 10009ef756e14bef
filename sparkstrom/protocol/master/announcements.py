"""Make the master's messages to nodes: notices of closed ids, the fit's state, and welcomes.

The master closes a worker's id, for good, when the worker leaves, is silent or is replaced. A
welcome gives a worker its id and its place in the tree.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparkstrom.base.identity import CommitNo, EdgeNo, NodeId
from sparkstrom.codec.messages import Address, Disown, IdClosed, Join, State, Welcome
from sparkstrom.protocol.common.children import Children
from sparkstrom.protocol.common.events_and_effects import Effect, TaskEnding
from sparkstrom.protocol.master.commit_sequencer import Sequencer
from sparkstrom.protocol.master.members import Member, Members, send_to_process
from sparkstrom.protocol.master.phases import Phases

SPACING_S = 0.5  # between repeats of a notice
LEASES = 2  # leases for which a notice is repeated; after one silent lease a node asks by itself


@dataclass(slots=True)
class ClosedNotice:
    """The notice that one id is closed, which is repeated for a while."""

    join: Join  # the newest join under the closed id; it states where its process listens
    parent: NodeId | None  # the parent that may still have the id as a child; None: unknown
    edge: EdgeNo  # the edge between that parent and the node
    until_s: float  # time until which the notice is repeated
    next_s: float  # time at which the notice is next sent


class ClosedNotices:
    """Notices of closed ids, repeated for a while because any of them may get lost.

    They go to the process that had the id, and to the parent that may still have the id as a child.
    """

    def __init__(self, lease_s: float, members: Members, sequencer: Sequencer) -> None:
        self._patience_s, self._members, self._sequencer = LEASES * lease_s, members, sequencer
        self.by_node: dict[NodeId, ClosedNotice] = {}

    def add(self, member: Member, parent: NodeId, now_s: float) -> None:
        """Begin to notify the process of a member whose id was closed, and its former parent."""
        assert member.order is not None, f"node {member.node} has stood nowhere"
        self._record(member.node, member.join, parent, member.order.edge, now_s)

    def notify_closed(self, node: NodeId, now_s: float) -> None:
        """Notify the process of a closed id again, because messages from it still arrive.

        All earlier notices may have been lost. Do nothing if notices are still being sent, or if
        the process has joined under a newer id.
        """
        join = self._members.closed_joins.get(node)
        if join is not None and node not in self.by_node and not self._members.has_newer_join(join):
            self._record(node, join, None, EdgeNo(0), now_s)

    def _record(
        self, node: NodeId, join: Join, parent: NodeId | None, edge: EdgeNo, now_s: float
    ) -> None:
        """Store a notice, to be repeated until the time for notices is over."""
        until_s = now_s + self._patience_s
        self.by_node[node] = ClosedNotice(join, parent, edge, until_s, now_s)

    def drop(self, node: NodeId) -> None:
        """Stop the notices about this id: its process left on request and expects none."""
        self.by_node.pop(node, None)

    def resend_due(self, now_s: float) -> list[Effect]:
        """Return the effects that send all notices due now."""
        effects: list[Effect] = []
        for node, notice in list(self.by_node.items()):
            if now_s >= notice.next_s:
                effects += self._send_notice(node, notice, now_s)
        return effects

    def _send_notice(self, node: NodeId, notice: ClosedNotice, now_s: float) -> list[Effect]:
        """Return a notice's messages to the id's process and former parent; drop an old notice."""
        notice.next_s = now_s + SPACING_S
        if now_s > notice.until_s:
            del self.by_node[node]
        above = None if notice.parent is None else self._members.live.get(notice.parent)
        disown = [above.send(Disown(node, notice.edge))] if above else []
        return [*disown, send_to_process(notice.join, self.make_message(node, notice.join))]

    def make_message(self, node: NodeId, join: Join) -> IdClosed:
        """Return the notice that an id is closed, and whether its process may get a new id."""
        partition, failed = self._members.partitions[join.partition], self._members.failed.get(node)
        free = partition.owner is None and partition.last_owner == node and failed is None
        ending = TaskEnding.LEASE_OVER if free else TaskEnding.SUPERSEDED
        return IdClosed(
            token=join.token,
            count=join.count,
            node=node,
            seq=self._sequencer.closed[node],
            reason=failed or ending.value,
            free=free,
        )


BEATS_PER_LEASE = 8  # so that a few lost states do not look like a dead master


class StateBroadcast:
    """The state of the fit, which the master broadcasts to every node.

    A change in the number of the training workers or in their pace (steps of the slowest one) is
    announced at once. A regular beat shows that the master lives.
    """

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
        self.slowest = 0  # steps of the slowest live, unfinished worker, as announced last
        self.training = 0  # number of live, unfinished workers with a replica
        self.minibatches = 0  # number of those committed in the whole fit
        self.minibatches_expected = 0  # those of the whole fit; an estimate until all rows are read
        self._is_all_read = False
        self.epochs = 0  # number of epochs that every partition with rows has finished
        self.summed = 0  # all updates count as those of at most so many workers; 0: no limit
        self._beat = 0  # number of the newest beat

    def refresh(self) -> None:
        """Recompute the state's values; announce it if the training workers or their pace changed.

        The announcement is urgent, unless only the pace has changed and a commit has already
        carried the new one.
        """
        self._members.refresh_slowest()
        known = self.slowest, self.training
        self.slowest, self.training = self._members.slowest, self._members.count_training()
        self.minibatches = self._members.partitions.minibatches
        if not self._is_all_read:
            partitions = self._members.partitions
            self.minibatches_expected, self._is_all_read = partitions.minibatches_estimated()
        self.epochs = self._members.partitions.epochs_finished
        if known != (self.slowest, self.training):
            told = known[1] == self.training and self._sequencer.slowest_told == self.slowest
            self._children.announce_state(urgent=not told)

    def limit_summed_workers(self, workers: int) -> None:
        """Announce that all updates together now count as those of at most so many workers."""
        self.summed = workers
        self._children.announce_state(urgent=True)

    def announce_if_due(self, now_s: float) -> None:
        """Announce the state if a beat is due, so that every node hears that the master lives."""
        beat = int(now_s / self._beat_s)
        if beat > self._beat:
            self._beat = beat
            self._children.announce_state()

    @property
    def state(self) -> State:
        """Return the state to broadcast; each parent fills in the fields for its child's edge."""
        return State(
            phase=self._phases.phase,
            beat=self._beat,
            head=self._sequencer.head,
            final=self._phases.final,
            slowest=self.slowest,
            nodes=len(self._members.live),
            training=self.training,
            minibatches=self.minibatches,
            minibatches_expected=self.minibatches_expected,
            epochs=self.epochs,
            summed=self.summed,
            wait_ms=0,
            closed=list(self._notices.by_node),
            stamp=0,
            sent=CommitNo(0),
            bytes_received=0,
            bytes_forwarded=0,
        )


FIRST_STREAM = 1000  # first stream id of edges; the join stream has a lower one
STREAMS_PER_EDGE = 4  # control and data, by UDP and inside one media driver


class WelcomeFactory:
    """Makes ``Welcome`` messages, each with an edge number and stream ids that were never used."""

    def __init__(
        self, chunks: int, members: Members, sequencer: Sequencer, broadcast: StateBroadcast
    ) -> None:
        self._chunks = chunks
        self._members, self._sequencer, self._broadcast = members, sequencer, broadcast
        self._edges = EdgeNo(0)  # the newest edge's number

    def make(self, member: Member, parent: NodeId, host: str, port: int) -> Welcome:
        """Return the welcome that places ``member`` under ``parent``, at ``host`` and ``port``."""
        self._edges = EdgeNo(self._edges + 1)
        stream = FIRST_STREAM + STREAMS_PER_EDGE * self._edges
        position, closed = self._members.partition_of(member).position, self._sequencer.closed
        return Welcome(
            token=member.join.token,
            count=member.join.count,
            request=member.join.request,
            node=member.node,
            parent=parent,
            edge=self._edges,
            up=Address(host, port, stream, stream + 1),
            chunks=self._chunks,
            closed=[(node, closed[node]) for node in sorted(member.own_ids) if node in closed],
            epoch=position.epoch,
            batch=position.batch,
            steps=self._broadcast.slowest,
            grants=list(self._members.checkpoints.grants_of(member.node)),
        )
