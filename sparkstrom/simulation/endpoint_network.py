"""Endpoint network: every process speaks through its real message endpoint, in virtual time.

Messages become sealed frames, are cut and joined, wait in outboxes and pass counters, as in a real
fit; what may happen to a message in ``Network`` happens here to its frames. Frames are recorded,
too, and now and then an old one comes again, to whomever: nobody may take it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

from sparkstrom.base.identity import MASTER, Endpoint, NodeId
from sparkstrom.codec.frames import HEADER, OVERHEAD_BYTES, Header, Seal
from sparkstrom.codec.messages import Address, Direct, Message
from sparkstrom.protocol.common import events as ev
from sparkstrom.protocol.master.welcomes import STREAMS_PER_EDGE
from sparkstrom.runtime.message_endpoint import MessageEndpoint
from sparkstrom.runtime.node_thread import FIRST_OWN_STREAM
from sparkstrom.simulation.faults import Faults
from sparkstrom.simulation.hearing import PIECE_BYTES_MIN, Hearing
from sparkstrom.simulation.scene import Scene
from sparkstrom.simulation.sim_network import (
    DELAY_S_MIN,
    LATE_S_MAX,
    LIVENESS_S,
    MASTERS_HOST,
    REPEATED,
    Network,
)
from sparkstrom.simulation.sim_process import SimProcess
from sparkstrom.simulation.timeline import Timeline
from sparkstrom.simulation.virtual_transport import (
    Place,
    Receiver,
    VirtualSender,
    VirtualTransport,
)

KEY, JOB = bytes(range(32)), 13
JOIN_STREAM = 1  # of the master; streams of edges lie above
PIECE_BYTES = (
    PIECE_BYTES_MIN,
    96,
    4096,
)  # of data in one frame, which differs from media driver to driver
CHUNK_BYTES_MAX = 1024  # as a job may want it: more than some drivers take in a frame
MESSAGE_BYTES_MAX = 1 << 20
RECEIVER, EDGE = 5, 6  # fields of ``HEADER``
OFFER_S_MIN, OFFER_S_MAX = 0.001, 0.05  # until what waits is offered again: longer each time
RECORDED = 64  # frames; the newest are kept
RECORDING_SHARE = 0.5  # of the messages that come twice: beside them comes an older one
FORGED_SHARE = 0.5  # of these

Owner = SimProcess | None  # None: the master


class LossyFrame(bytes):
    """Of a message that is repeated anyway, so that it may get lost, one by one."""


class MarkingSeal(Seal):
    """The job's seal, which marks the frames of what may get lost, and sees each nonce once."""

    def __init__(self, violation: Callable[[str], None]) -> None:
        super().__init__(KEY, JOB)
        self._violation = violation
        self._nonces: set[tuple[NodeId | None, int, int]] = set()
        self.lossy = False  # the message that is being sealed

    def close(self, header: Header, body: bytes, token: int = 0) -> bytes:
        session = header.edge if header.sender is None else 0
        nonce = header.sender, session, header.counter
        if nonce in self._nonces:
            self._violation(f"I7: node {header.sender} seals twice under counter {header.counter}")
        self._nonces.add(nonce)
        frame = super().close(header, body, token)
        return LossyFrame(frame) if self.lossy else frame


class EndpointNetwork(Network):
    """See ``Network``. ``hearing`` checks that what is heard is what was said."""

    def __init__(
        self,
        time: Timeline,
        faults: Faults,
        to_master: Callable[[NodeId | None, Message], None],
        step_master: Callable[[ev.Event], None],
        hearing: Hearing,
        *,
        liveness_s: float = LIVENESS_S,
    ) -> None:
        super().__init__(time, faults, to_master, liveness_s=liveness_s)
        self._step_master, self._hearing = step_master, hearing
        self._chance = time.chance
        self._seal = MarkingSeal(hearing.violation)
        self.receivers: dict[Place, Receiver[Owner]] = {}
        self._recorded: deque[tuple[bytes, Receiver[Owner]]] = deque(maxlen=RECORDED)
        self._ends: dict[Owner, MessageEndpoint] = {}
        self._due: set[Owner] = set()  # whose endpoint offers what waits, at this moment
        self._offering: set[Owner] = set()  # who offers again soon, as not all was taken
        self._pause_s: dict[Owner, float] = {}  # until then
        self._looking: set[Owner] = set()  # who looks at its streams once it is awake
        self._streams = FIRST_OWN_STREAM
        self._new_endpoint(None)
        self._ends[None].open_join_stream(JOIN_STREAM)

    # -- endpoints -------------------------------------------------------------------------------

    def _new_endpoint(self, owner: Owner) -> None:
        self._ends[owner] = MessageEndpoint(
            self._new_transport(owner),
            self._seal,
            me=MASTER if owner is None else None,
            token=0 if owner is None else owner.identity.token,
            message_bytes_max=MESSAGE_BYTES_MAX,
            chunk_bytes_max=CHUNK_BYTES_MAX,
        )

    def _new_transport(self, owner: Owner) -> VirtualTransport[Owner]:
        """Over a new media driver; the master keeps its port."""
        if owner is not None:
            owner.port += 1
        place = Endpoint(MASTERS_HOST, 1) if owner is None else Endpoint(owner.name, owner.port)
        frame_bytes_max = OVERHEAD_BYTES + self._chance.choice(PIECE_BYTES)
        return VirtualTransport(self, owner, place, frame_bytes_max)

    def _transport(self, owner: Owner) -> VirtualTransport[Owner]:
        transport = self._ends[owner].transport
        assert isinstance(transport, VirtualTransport)
        return transport

    def add(self, process: SimProcess) -> None:
        super().add(process)
        self._new_endpoint(process)

    def listen(self, process: SimProcess) -> Address:
        """On fresh streams, as the node's thread does it."""
        end = self._ends[process]
        self._streams += STREAMS_PER_EDGE
        here = end.transport.endpoint
        address = Address(here.host, here.port, self._streams, self._streams + 1)
        end.listen(address)
        end.meet(Endpoint(MASTERS_HOST, 1), JOIN_STREAM)
        return address

    def lose(self, owner: Owner) -> None:
        """It goes on over another media driver, with the counters that it had."""
        super().lose(owner)
        end = self._ends[owner]
        end.move_to(lambda: self._new_transport(owner))
        if owner is None:
            end.open_join_stream(JOIN_STREAM)

    # -- edges -----------------------------------------------------------------------------------

    def open(self, owner: Owner, effect: ev.OpenEdge) -> None:
        super().open(owner, effect)
        peer = effect.peer
        self._ends[owner].open_edge(effect.node, effect.edge, effect.local, peer)
        senders = self._transport(owner).senders
        for stream, data in ((peer.control_stream, False), (peer.data_stream, True)):
            sender = senders[Endpoint(peer.host, peer.port), stream, False]
            sender.edge = effect.edge, owner, data

    def close(self, owner: Owner, node: NodeId) -> None:
        super().close(owner, node)
        self._ends[owner].close_edge(node)

    def gets_through(self, sender: VirtualSender[Owner]) -> bool:
        """Does this stream live?"""
        return sender.edge not in self._broken

    # -- messages --------------------------------------------------------------------------------

    def send(self, owner: Owner, to: NodeId, message: Message) -> None:
        """To a neighbour, if there is an edge."""
        slot = (self._master_slots if owner is None else owner.slots).get(to)
        self._seal.lossy = isinstance(message, REPEATED)
        if slot is not None:
            must_s = 0.0 if self._seal.lossy else self._time.now_s
            self._hearing.said(slot.edge, owner, message, must_s)
        self._end(owner).send(to, message)
        self._soon(owner)

    def tell(self, process: SimProcess, message: Direct) -> None:
        """To the master's join stream."""
        self._seal.lossy = True
        self._hearing.said_directly(None, message)
        self._end(process).tell(message)
        self._soon(process)

    def answer(self, answer: ev.Answer) -> None:
        """From the master, directly."""
        self._seal.lossy = True
        self._hearing.said_directly(answer.token, answer.message)
        self._end(None).answer(answer)
        self._soon(None)

    def _end(self, owner: Owner) -> MessageEndpoint:
        """Its endpoint, under the id that it has now."""
        end = self._ends[owner]
        if owner is not None:
            end.me = owner.me
        return end

    def _soon(self, owner: Owner) -> None:
        """At the end of this duty cycle its endpoint offers what waits."""
        if owner not in self._due:
            self._due.add(owner)
            self._time.after(0.0, self._flush, owner)

    def _flush(self, owner: Owner) -> None:
        self._due.discard(owner)
        end = self._ends[owner]
        went = end.flush()
        if owner not in self._offering and (owner is None or owner.alive) and end.waiting:
            pause_s = OFFER_S_MIN if went else self._pause_s.get(owner, OFFER_S_MIN)
            self._pause_s[owner] = min(2 * pause_s, OFFER_S_MAX)
            self._offering.add(owner)
            self._time.after(pause_s, self._offer_again, owner)

    def _offer_again(self, owner: Owner) -> None:
        """What the transport did not take."""
        self._offering.discard(owner)
        self._flush(owner)

    # -- the way ---------------------------------------------------------------------------------

    def carry(
        self, sender: VirtualSender[Owner], receiver: Receiver[Owner], frames: Sequence[bytes]
    ) -> None:
        """Each frame of what may get lost by itself; of others all at once, in order."""
        owner, target, now_s = sender.owner, receiver.owner, self._time.now_s
        cut_s = self._cut_until_s(owner, target)
        if cut_s == math.inf or (cut_s and sender.edge is None):
            receiver.unread -= sum(map(len, frames))
            return
        start_s = max(now_s, cut_s)
        if self._faults.bandwidth:
            begins_s = max(now_s, self._free_s.get(owner, 0.0))
            took_s = sum(map(len, frames)) / self._faults.bandwidth
            self._free_s[owner] = begins_s + took_s
            start_s = max(start_s, begins_s + took_s)
        whole: list[bytes] = []
        for frame in frames:
            if self.quiet or type(frame) is not LossyFrame:
                whole.append(frame)
                continue
            self._in_order(sender, receiver, whole, start_s)
            whole = []
            self._carry_lossy(sender, receiver, frame, start_s)
        self._in_order(sender, receiver, whole, start_s)

    def _in_order(
        self,
        sender: VirtualSender[Owner],
        receiver: Receiver[Owner],
        frames: list[bytes],
        start_s: float,
    ) -> None:
        if frames:
            at_s = max(start_s + self._delay_s(), sender.newest_s)
            sender.newest_s = at_s
            self._time.at(at_s, self._arrive, sender, receiver, frames)

    def _delay_s(self) -> float:
        return DELAY_S_MIN + self._random() * self._delay_s_max

    def _carry_lossy(
        self, sender: VirtualSender[Owner], receiver: Receiver[Owner], frame: bytes, start_s: float
    ) -> None:
        copies = self._copies()
        receiver.unread += (copies - 1) * len(frame)
        for _ in range(copies):
            if self._random() < self._faults.late:
                self._time.faults["late"] += 1
                at_s = max(start_s + self._delay_s(), sender.newest_s)  # nothing overtakes there
                at_s += self._random() * LATE_S_MAX
                self._time.at(at_s, self._arrive, sender, receiver, [frame])
            else:
                self._in_order(sender, receiver, [frame], start_s)
        if copies > 1 and self._recorded and self._random() < RECORDING_SHARE:
            self._play_recording()

    def _play_recording(self) -> None:
        """Whoever is on the path sends an old frame once more, to somebody who listens.

        Or to where another one went, with that one's address upon it.
        """
        self._time.faults["recordings"] += 1
        (frame, _), (other, receiver) = self._chance.choices(self._recorded, k=2)
        if self._random() < FORGED_SHARE:
            frame = _readdressed(frame, other)
        else:
            receiver = self._chance.choice(list(self.receivers.values()))
        receiver.unread += len(frame)
        self._time.after(self._random() * LATE_S_MAX, self._take, receiver, [frame])

    # -- arriving --------------------------------------------------------------------------------

    def _arrive(
        self, sender: VirtualSender[Owner], receiver: Receiver[Owner], frames: list[bytes]
    ) -> None:
        """What is cut off comes afterwards; directly, or on a stream that is dead by now, never."""
        target, ready_s = receiver.owner, 0.0
        if target is not None and target.cut is not None and self._swallows(target.cut, up=False):
            ready_s = target.cut.until_s
        if (ready_s and sender.edge is None) or ready_s == math.inf or sender.is_closed:
            receiver.unread -= sum(map(len, frames))
        elif ready_s or sender.held_s > self._time.now_s:
            sender.held_s = max(ready_s, sender.held_s)  # nobody overtakes what waits already
            self._time.at(sender.held_s, self._arrive, sender, receiver, frames)
        elif self.gets_through(sender):
            # what is sent once more has been there: in a stream of Aeron's nothing overtakes
            self._recorded.extend((frame, receiver) for frame in frames)
            self._take(receiver, frames)

    def _take(self, receiver: Receiver[Owner], frames: list[bytes]) -> None:
        """They are there; who is awake looks at once."""
        owner = receiver.owner
        receiver.arrive(frames)
        if owner is None or (owner.alive and owner.awake_s <= self._time.now_s):
            self._look_into(owner)
        elif owner.alive and owner.awake_s < math.inf and owner not in self._looking:
            self._looking.add(owner)
            self._time.at(owner.awake_s, self._wake, owner)

    def _wake(self, owner: SimProcess) -> None:
        """It may have fallen asleep again."""
        self._looking.discard(owner)
        if owner.alive and owner.awake_s <= self._time.now_s:
            self._look_into(owner)
        elif owner.alive and owner.awake_s < math.inf:
            self._looking.add(owner)
            self._time.at(owner.awake_s, self._wake, owner)

    def _look_into(self, owner: Owner) -> None:
        """A duty cycle: what came goes to the machine, one by one, as it changes who it is."""
        end = self._end(owner)
        for sender, message in end.receive(0.0):
            if owner is None:
                self._check_heard(owner, sender, message)
                self._to_master(sender, message)
            elif owner.alive:
                self._check_heard(owner, sender, message)
                owner.feed(ev.Received(sender, message), self._time.now_s)
                end = self._end(owner)
        for sender, size in end.arriving():
            if owner is None:
                self._step_master(ev.Arriving(sender, size))
            elif owner.alive:
                owner.feed(ev.Arriving(sender, size), self._time.now_s)

    def _check_heard(self, owner: Owner, sender: NodeId | None, message: Message) -> None:
        slots = self._master_slots if owner is None else owner.slots
        slot = None if sender is None else slots.get(sender)
        self._hearing.heard(owner, sender, slot, message)

    # -- checks ----------------------------------------------------------------------------------

    def look(self, scene: Scene) -> None:
        """What waits is bounded."""
        self._hearing.bounds(scene, self._ends)

    def at_end(self) -> None:
        """What endpoints did not take was no message of ours, or came again."""
        self._hearing.at_end(self._ends, recordings=bool(self._time.faults["recordings"]))


def _readdressed(frame: bytes, other: bytes) -> bytes:
    """With the receiver and the edge of another frame: so much stands in the clear."""
    fields = list(HEADER.unpack_from(frame))
    fields[RECEIVER : EDGE + 1] = HEADER.unpack_from(other)[RECEIVER : EDGE + 1]
    return HEADER.pack(*fields) + frame[HEADER.size :]
