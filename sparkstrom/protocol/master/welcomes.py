"""Welcomes: what a member is told with its place: where to attach, and where to go on."""

from __future__ import annotations

from sparkstrom.codec.messages import Address, LastSeqs, Welcome
from sparkstrom.protocol.master.broadcast import Broadcast
from sparkstrom.protocol.master.members import Member, Members
from sparkstrom.protocol.master.sequencer import Sequencer

FIRST_STREAM = 1000  # up streams of edges; below is room for the join stream
STREAMS_PER_EDGE = 4  # control and data, by UDP and inside one media driver


class Welcomes:
    """Each opens an edge that none has had before. ``chunks``: of a snapshot."""

    def __init__(
        self, chunks: int, members: Members, sequencer: Sequencer, broadcast: Broadcast
    ) -> None:
        self._chunks = chunks
        self._members, self._sequencer, self._broadcast = members, sequencer, broadcast
        self._edges = 0  # so far

    def make(self, member: Member, parent: int, host: str, port: int) -> Welcome:
        """For this one, under that parent, which listens there."""
        self._edges += 1
        stream = FIRST_STREAM + STREAMS_PER_EDGE * self._edges
        position = self._members.partition_of(member).position
        return Welcome(
            token=member.join.token,
            count=member.join.count,
            request=member.join.request,
            node=member.node,
            parent=parent,
            edge=self._edges,
            up=Address(host, port, stream, stream + 1),
            chunks=self._chunks,
            closed=self._closed(member),
            epoch=position.epoch,
            batch=position.batch,
            steps=self._broadcast.slowest,
            grants=list(self._members.checkpoints.granted(member.node)),
        )

    def _closed(self, member: Member) -> LastSeqs:
        """Of its former ids, how far each one's updates are numbered."""
        closed = self._sequencer.closed
        return [(node, closed[node]) for node in sorted(member.own) if node in closed]
