"""Simulated computer networks that are more realistic than ``simulation.network``.

In an ``EndpointNetwork``, processes send encrypted frames through the message endpoints of real
fits. In a ``BandwidthNetwork``, messages have realistic lengths, and links have limited rates.

``VirtualTransport`` implements the transport interface without waiting. Frames that are in flight
or not yet polled occupy the receiver's buffer, so a receiver that does not poll causes
back-pressure. A ``FrameCarrier`` carries frames from senders to receivers, and decides which frames
are delayed or lost. The owner of an endpoint, a transport or a stream is the process that uses it;
None means the master.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from sparkstrom.base.errors import UsageError
from sparkstrom.base.identity import MASTER, EdgeNo, Endpoint, NodeId
from sparkstrom.codec.messages import Address, Direct, Message
from sparkstrom.codec.sealed_frames import HEADER, OVERHEAD_BYTES, Header, Seal
from sparkstrom.codec.wire import is_data
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.master.announcements import STREAMS_PER_EDGE
from sparkstrom.runtime.message_endpoint import SUPERSEDING_MESSAGES, MessageEndpoint
from sparkstrom.runtime.node_thread import FIRST_NODE_STREAM
from sparkstrom.simulation.links import (
    PIECE_BYTES_MIN,
    POLL_BYTES,
    POLL_S,
    DeliveryChecker,
    LinkHost,
    Links,
    LinkStream,
    SizedFrame,
    TrafficChecker,
    estimate_body_bytes,
    split_into_frames,
)
from sparkstrom.simulation.network import (
    DELAY_S_MIN,
    LATE_S_MAX,
    LIVENESS_S,
    MASTER_HOST,
    REPEATED_MESSAGES,
    ArrivalHandler,
    Network,
)
from sparkstrom.simulation.process import SimProcess
from sparkstrom.simulation.run_options import Faults, RunSize, TransportMode
from sparkstrom.simulation.virtual_clock import VirtualClock, WorldView
from sparkstrom.transport.base import OfferResult, ReceivedFrame, SentBytes, stream_kind_error

CONTROL_FRAME_BYTES_MAX = 16_384
RECEIVER_BYTES_MAX = 32_768  # like a term buffer, scaled to the frame sizes; sometimes it is full

OwnerT = TypeVar("OwnerT")
FrameDestination = tuple[Endpoint, int, bool]  # endpoint, stream, local (one media driver)


class VirtualReceiver(Generic[OwnerT]):
    """The receiving end of one stream, with the frames that ``owner`` has not polled yet."""

    __slots__ = ("frames", "is_open", "owner", "stream", "unread_bytes")

    def __init__(self, owner: OwnerT, stream: int) -> None:
        self.owner, self.stream = owner, stream
        self.frames: deque[bytes] = deque()  # arrived
        self.unread_bytes = 0  # of these frames and of those in flight
        self.is_open = True

    def arrive(self, frames: Sequence[bytes]) -> None:
        """Make frames available to ``poll``; drop them if the stream is closed."""
        if self.is_open:
            self.frames.extend(frames)


class FrameCarrier(Protocol[OwnerT]):
    """Interface of the simulated path between senders and receivers."""

    receivers: dict[FrameDestination, VirtualReceiver[OwnerT]]

    def is_stream_alive(self, sender: VirtualSender[OwnerT]) -> bool:
        """Return True if the sender's stream is not broken."""

    def carry(
        self,
        sender: VirtualSender[OwnerT],
        receiver: VirtualReceiver[OwnerT],
        frames: Sequence[bytes],
    ) -> None:
        """Send frames from a sender to its receiver, or lose some of them.

        The sender has added the frames to ``receiver.unread_bytes``; subtract those that get lost.
        """


class VirtualSender(Generic[OwnerT]):
    """The sending end of a stream to ``place``; implements ``transport.base.Sender``.

    ``frame_bytes_max`` is the longest frame to accept, in bytes.
    """

    def __init__(
        self,
        carrier: FrameCarrier[OwnerT],
        owner: OwnerT,
        place: FrameDestination,
        frame_bytes_max: int,
    ) -> None:
        self._carrier, self.owner, self.place = carrier, owner, place
        self._frame_bytes_max = frame_bytes_max
        # Edge, owner, data; None: direct messages.
        self.edge: tuple[int, OwnerT, bool] | None = None
        self.newest_s = 0.0  # arrival time of the last frame that keeps the order
        self.blocked_until_s = 0.0  # arrived frames are withheld from the receiver until then
        self.is_closed = False

    def offer(self, frames: Sequence[bytes]) -> tuple[int, OfferResult]:
        """Send the frames for which the receiver has room; see ``transport.base.Sender``."""
        if self.is_closed:
            return 0, OfferResult.CLOSED
        receiver = self._carrier.receivers.get(self.place)
        if receiver is None or not self._carrier.is_stream_alive(self):
            return 0, OfferResult.UNCONNECTED
        count = 0
        for frame in frames:
            if len(frame) > self._frame_bytes_max:
                raise UsageError(
                    f"a frame has {len(frame)} bytes: at most {self._frame_bytes_max} are allowed"
                )
            if receiver.unread_bytes >= RECEIVER_BYTES_MAX:
                break
            receiver.unread_bytes += len(frame)
            count += 1
        if count:
            self._carrier.carry(self, receiver, frames[:count])
        return count, OfferResult.SENT if count == len(frames) else OfferResult.BUSY

    def close(self) -> None:
        """Close the stream; frames in flight are lost. Idempotent."""
        self.is_closed = True


class VirtualTransport(Generic[OwnerT]):
    """A transport over a ``FrameCarrier``; implements ``transport.base.Transport``.

    ``endpoint`` is its address, and ``frame_bytes_max`` the longest data frame, in bytes.
    """

    def __init__(
        self, carrier: FrameCarrier[OwnerT], owner: OwnerT, endpoint: Endpoint, frame_bytes_max: int
    ) -> None:
        self._carrier, self._owner = carrier, owner
        self.endpoint = endpoint  # unique at any one time
        self.max_frame_bytes = frame_bytes_max
        self.max_control_frame_bytes = CONTROL_FRAME_BYTES_MAX
        self.receivers: dict[int, tuple[FrameDestination, VirtualReceiver[OwnerT]]] = {}
        self.senders: dict[FrameDestination, VirtualSender[OwnerT]] = {}  # the newest to each place

    def open_sender(
        self, endpoint: Endpoint, stream: int, *, control: bool, local: bool = False
    ) -> VirtualSender[OwnerT]:
        """Return a sender that connects once a receiver listens on ``stream`` at the endpoint.

        ``control``: it has the length limit of control frames, not that of data frames. ``local``:
        it reaches only receivers opened as local, which share a media driver in a real fit.
        """
        limit = self.max_control_frame_bytes if control else self.max_frame_bytes
        place = (endpoint, stream, local)
        sender = self.senders[place] = VirtualSender(self._carrier, self._owner, place, limit)
        return sender

    def open_receiver(self, stream: int, *, local: bool = False) -> None:
        """Listen on ``stream``, for local senders only if ``local``.

        Raise UsageError if the stream is open with another ``local``.
        """
        if stream not in self.receivers:
            place, receiver = (self.endpoint, stream, local), VirtualReceiver(self._owner, stream)
            self.receivers[stream] = place, receiver
            self._carrier.receivers[place] = receiver
        elif self.receivers[stream][0][2] != local:
            raise stream_kind_error(stream, local)

    def close_receiver(self, stream: int) -> None:
        """Stop listening on ``stream``. Idempotent."""
        found = self.receivers.pop(stream, None)
        if found is not None:
            place, receiver = found
            receiver.is_open = False
            del self._carrier.receivers[place]

    def poll(self, wait_s: float) -> list[ReceivedFrame]:
        """Return the frames that have arrived; ``wait_s`` is ignored."""
        arrivals = []
        for stream, (_, receiver) in self.receivers.items():
            while receiver.frames:
                frame = receiver.frames.popleft()
                receiver.unread_bytes -= len(frame)
                arrivals.append(ReceivedFrame(stream, frame))
        return arrivals

    def wake(self) -> None:
        """Do nothing, because ``poll`` never waits."""

    def sent(self) -> SentBytes:
        """Return counts of 0, because no network interface is used."""
        return SentBytes(str(self.endpoint), 0, 0)

    def close(self) -> None:
        """Close all senders and receivers. Idempotent."""
        for sender in self.senders.values():
            sender.close()
        for stream in list(self.receivers):
            self.close_receiver(stream)


SEAL_KEY, JOB_ID = bytes(range(32)), 13
JOIN_STREAM = 1  # of the master; streams of edges have higher numbers
PIECE_BYTES = (PIECE_BYTES_MIN, 96, 4096)  # data in one frame; drawn for each media driver
CHUNK_BYTES_MAX = 1024  # larger than a frame of some media drivers
MESSAGE_BYTES_MAX = 1 << 20
RECEIVER_FIELD, EDGE_FIELD = 5, 6  # fields of ``HEADER``
RETRY_S_MIN, RETRY_S_MAX = 0.001, 0.05  # until rejected frames are offered again, doubling
RECORDED_FRAMES_MAX = 64  # the newest are kept
REPLAY_SHARE = 0.5  # of the duplicated frames; each comes with a replay of an older one
FORGED_SHARE = 0.5  # of the replays, which get another frame's address

Owner = SimProcess | None  # None: the master


class LossyFrame(bytes):
    """A frame that may get lost, because its message is repeated anyway."""


class LossMarkingSeal(Seal):
    """Encrypts frames, marks those that may get lost, and checks that no nonce is used twice.

    ``violation`` is called with a text about each nonce that is used again.
    """

    def __init__(self, violation: Callable[[str], None]) -> None:
        super().__init__(SEAL_KEY, JOB_ID)
        self._violation = violation
        self._nonces: set[tuple[NodeId | None, int, int]] = set()
        self.is_lossy = False  # whether the message being sealed may get lost

    def close(self, header: Header, body: bytes, token: int = 0) -> bytes:
        """Return an encrypted frame, a ``LossyFrame`` if it may get lost; report a used nonce."""
        session = header.edge if header.sender is None else 0
        nonce = header.sender, session, header.counter
        if nonce in self._nonces:
            self._violation(f"I7: node {header.sender} seals twice under counter {header.counter}")
        self._nonces.add(nonce)
        frame = super().close(header, body, token)
        return LossyFrame(frame) if self.is_lossy else frame


class EndpointNetwork(Network):
    """A ``Network`` whose processes send frames through their message endpoints.

    Messages become sealed frames, queue in outboxes and pass replay counters, as in a real fit.
    Delays and losses apply to frames. Recorded frames are sometimes replayed to any receiver, which
    must reject them. ``delivery`` checks that received messages equal the sent ones, and
    ``step_master`` passes an event to the master. The other arguments are those of ``Network``.
    """

    def __init__(
        self,
        time: VirtualClock,
        faults: Faults,
        to_master: Callable[[NodeId | None, Message], None],
        step_master: Callable[[ev.Event], None],
        delivery: DeliveryChecker,
        *,
        liveness_s: float = LIVENESS_S,
    ) -> None:
        super().__init__(time, faults, to_master, liveness_s=liveness_s)
        self._step_master, self._delivery = step_master, delivery
        self._rng = time.rng
        self._seal = LossMarkingSeal(delivery.violation)
        self.receivers: dict[FrameDestination, VirtualReceiver[Owner]] = {}
        self._recorded_frames: deque[tuple[bytes, VirtualReceiver[Owner]]] = deque(
            maxlen=RECORDED_FRAMES_MAX
        )
        self._endpoints: dict[Owner, MessageEndpoint] = {}
        self._due: set[Owner] = set()  # owners whose outbox is flushed at this virtual time
        self._retrying: set[Owner] = set()  # owners with a later flush scheduled
        self._pause_s: dict[Owner, float] = {}  # until the next retry
        self._waking: set[Owner] = set()  # suspended processes that poll once they continue
        self._streams = FIRST_NODE_STREAM
        self._new_endpoint(None)
        self._endpoints[None].listen_for_joins(JOIN_STREAM)

    def _new_endpoint(self, owner: Owner) -> None:
        """Create an owner's message endpoint."""
        self._endpoints[owner] = MessageEndpoint(
            self._new_transport(owner),
            self._seal,
            me=MASTER if owner is None else None,
            token=0 if owner is None else owner.identity.token,
            message_bytes_max=MESSAGE_BYTES_MAX,
            chunk_bytes_max=CHUNK_BYTES_MAX,
        )

    def _new_transport(self, owner: Owner) -> VirtualTransport[Owner]:
        """Return a transport over a new media driver; the master keeps its port."""
        if owner is not None:
            owner.port += 1
        place = Endpoint(MASTER_HOST, 1) if owner is None else Endpoint(owner.name, owner.port)
        frame_bytes_max = OVERHEAD_BYTES + self._rng.choice(PIECE_BYTES)
        return VirtualTransport(self, owner, place, frame_bytes_max)

    def _transport(self, owner: Owner) -> VirtualTransport[Owner]:
        """Return the transport of an owner's endpoint."""
        transport = self._endpoints[owner].transport
        assert isinstance(transport, VirtualTransport)
        return transport

    def add(self, process: SimProcess) -> None:
        """Add a new process, with a message endpoint."""
        super().add(process)
        self._new_endpoint(process)

    def open_streams(self, process: SimProcess) -> Address:
        """Open new streams of a process, as the node's thread does; return their address."""
        end = self._endpoints[process]
        self._streams += STREAMS_PER_EDGE
        here = end.transport.endpoint
        address = Address(here.host, here.port, self._streams, self._streams + 1)
        end.listen(address)
        end.set_master(Endpoint(MASTER_HOST, 1), JOIN_STREAM)
        return address

    def lose_media_driver(self, owner: Owner) -> None:
        """Break an owner's edges and move its endpoint, with its counters, to a new transport."""
        super().lose_media_driver(owner)
        end = self._endpoints[owner]
        end.replace_transport(lambda: self._new_transport(owner))
        if owner is None:
            end.listen_for_joins(JOIN_STREAM)

    def open_edge(self, owner: Owner, effect: ev.OpenEdge) -> None:
        """Open an edge at the owner's endpoint, and assign the edge to the senders made for it."""
        super().open_edge(owner, effect)
        peer = effect.peer
        self._endpoints[owner].open_edge(effect.node, effect.edge, effect.local, peer)
        senders = self._transport(owner).senders
        for stream, data in ((peer.control_stream, False), (peer.data_stream, True)):
            sender = senders[Endpoint(peer.host, peer.port), stream, False]
            sender.edge = effect.edge, owner, data

    def close_edge(self, owner: Owner, node: NodeId) -> None:
        """Close the owner's end of the edge to the neighbour ``node``."""
        super().close_edge(owner, node)
        self._endpoints[owner].close_edge(node)

    def is_stream_alive(self, sender: VirtualSender[Owner]) -> bool:
        """Return True if the sender's stream is not broken."""
        return sender.edge not in self._broken

    def send(self, owner: Owner, to: NodeId, message: Message) -> None:
        """Send a message to a neighbour; drop it if no edge is open."""
        slot = self._slots_of(owner).get(to)
        self._seal.is_lossy = isinstance(message, REPEATED_MESSAGES)
        if slot is not None:
            must_s = 0.0 if self._seal.is_lossy else self._time.now_s
            self._delivery.record_sent(slot.edge, owner, message, must_s)
        self._endpoint_of(owner).send(to, message)
        self._schedule_flush(owner)

    def send_to_master(self, process: SimProcess, message: Direct) -> None:
        """Send a direct message from a process to the master's join stream."""
        self._seal.is_lossy = True
        self._delivery.record_direct(None, message)
        self._endpoint_of(process).send_direct(message)
        self._schedule_flush(process)

    def send_to_process(self, answer: ev.SendToProcess) -> None:
        """Send a direct message from the master to a process."""
        self._seal.is_lossy = True
        self._delivery.record_direct(answer.token, answer.message)
        self._endpoint_of(None).send_to_process(answer)
        self._schedule_flush(None)

    def _endpoint_of(self, owner: Owner) -> MessageEndpoint:
        """Return the owner's endpoint, with its current node id set."""
        end = self._endpoints[owner]
        if owner is not None:
            end.me = owner.me
        return end

    def _schedule_flush(self, owner: Owner) -> None:
        """Schedule a flush of the owner's outbox after the other calls of this virtual time."""
        if owner not in self._due:
            self._due.add(owner)
            self._time.after(0.0, self._flush, owner)

    def _flush(self, owner: Owner) -> None:
        """Send what the transport accepts; schedule a retry for the rest."""
        self._due.discard(owner)
        end = self._endpoints[owner]
        went = end.flush()
        if owner not in self._retrying and (owner is None or owner.alive) and end.waiting:
            pause_s = RETRY_S_MIN if went else self._pause_s.get(owner, RETRY_S_MIN)
            self._pause_s[owner] = min(2 * pause_s, RETRY_S_MAX)
            self._retrying.add(owner)
            self._time.after(pause_s, self._retry_flush, owner)

    def _retry_flush(self, owner: Owner) -> None:
        """Flush again what the transport did not accept."""
        self._retrying.discard(owner)
        self._flush(owner)

    def carry(
        self,
        sender: VirtualSender[Owner],
        receiver: VirtualReceiver[Owner],
        frames: Sequence[bytes],
    ) -> None:
        """Schedule the arrival of frames: each lossy one by itself, others together in order."""
        owner, target, now_s = sender.owner, receiver.owner, self._time.now_s
        cut_s = self._outage_end_s(owner, target)
        if cut_s == math.inf or (cut_s and sender.edge is None):
            receiver.unread_bytes -= sum(map(len, frames))
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
            self._carry_in_order(sender, receiver, whole, start_s)
            whole = []
            self._carry_lossy(sender, receiver, frame, start_s)
        self._carry_in_order(sender, receiver, whole, start_s)

    def _carry_in_order(
        self,
        sender: VirtualSender[Owner],
        receiver: VirtualReceiver[Owner],
        frames: list[bytes],
        start_s: float,
    ) -> None:
        """Schedule the arrival of frames that leave at ``start_s``, after all earlier ones."""
        if frames:
            at_s = max(start_s + self._draw_delay_s(), sender.newest_s)
            sender.newest_s = at_s
            self._time.at(at_s, self._arrive_frames, sender, receiver, frames)

    def _draw_delay_s(self) -> float:
        """Draw a transmission delay."""
        return DELAY_S_MIN + self._random() * self._delay_s_max

    def _carry_lossy(
        self,
        sender: VirtualSender[Owner],
        receiver: VirtualReceiver[Owner],
        frame: bytes,
        start_s: float,
    ) -> None:
        """Send a frame that may get lost, arrive twice or late; sometimes replay an older frame.

        ``start_s`` is the virtual time at which the frame leaves.
        """
        copies = self._draw_copies()
        receiver.unread_bytes += (copies - 1) * len(frame)
        for _ in range(copies):
            if self._random() < self._faults.late:
                self._time.faults["late"] += 1
                # It overtakes no earlier frame.
                at_s = max(start_s + self._draw_delay_s(), sender.newest_s)
                at_s += self._random() * LATE_S_MAX
                self._time.at(at_s, self._arrive_frames, sender, receiver, [frame])
            else:
                self._carry_in_order(sender, receiver, [frame], start_s)
        if copies > 1 and self._recorded_frames and self._random() < REPLAY_SHARE:
            self._replay_frame()

    def _replay_frame(self) -> None:
        """Replay a recorded frame, as an attacker on the path could.

        It goes to a random receiver, or gets another frame's address and goes to that receiver.
        """
        self._time.faults["recordings"] += 1
        (frame, _), (other, receiver) = self._rng.choices(self._recorded_frames, k=2)
        if self._random() < FORGED_SHARE:
            frame = _readdress_frame(frame, other)
        else:
            receiver = self._rng.choice(list(self.receivers.values()))
        receiver.unread_bytes += len(frame)
        self._time.after(self._random() * LATE_S_MAX, self._receive_frames, receiver, [frame])

    def _arrive_frames(
        self, sender: VirtualSender[Owner], receiver: VirtualReceiver[Owner], frames: list[bytes]
    ) -> None:
        """Deliver frames, after an outage if one lasts.

        Drop frames of direct messages during an outage, and of streams that have broken or closed.
        """
        target, ready_s = receiver.owner, 0.0
        if (
            target is not None
            and target.cut is not None
            and self._count_if_blocked(target.cut, up=False)
        ):
            ready_s = target.cut.until_s
        if (ready_s and sender.edge is None) or ready_s == math.inf or sender.is_closed:
            receiver.unread_bytes -= sum(map(len, frames))
        elif ready_s or sender.blocked_until_s > self._time.now_s:
            # Later frames must not overtake those that wait already.
            sender.blocked_until_s = max(ready_s, sender.blocked_until_s)
            self._time.at(sender.blocked_until_s, self._arrive_frames, sender, receiver, frames)
        elif self.is_stream_alive(sender):
            # Only delivered frames are replayed: in a stream of Aeron, nothing overtakes.
            self._recorded_frames.extend((frame, receiver) for frame in frames)
            self._receive_frames(receiver, frames)

    def _receive_frames(self, receiver: VirtualReceiver[Owner], frames: list[bytes]) -> None:
        """Hand frames to the receiver; its owner polls at once, or when it is no longer paused."""
        owner = receiver.owner
        receiver.arrive(frames)
        if owner is None or (owner.alive and owner.paused_until_s <= self._time.now_s):
            self._receive_messages(owner)
        elif owner.alive and owner.paused_until_s < math.inf and owner not in self._waking:
            self._waking.add(owner)
            self._time.at(owner.paused_until_s, self._poll_after_pause, owner)

    def _poll_after_pause(self, owner: SimProcess) -> None:
        """Poll on behalf of a process whose pause is over, unless it has been paused again."""
        self._waking.discard(owner)
        if owner.alive and owner.paused_until_s <= self._time.now_s:
            self._receive_messages(owner)
        elif owner.alive and owner.paused_until_s < math.inf:
            self._waking.add(owner)
            self._time.at(owner.paused_until_s, self._poll_after_pause, owner)

    def _receive_messages(self, owner: Owner) -> None:
        """Poll an endpoint; pass its node each message, and the sizes of incomplete ones."""
        end = self._endpoint_of(owner)
        for sender, message in end.receive(0.0):
            if owner is None:
                self._check_received(owner, sender, message)
                self._to_master(sender, message)
            elif owner.alive:
                self._check_received(owner, sender, message)
                owner.handle(ev.Received(sender, message), self._time.now_s)
                end = self._endpoint_of(owner)
        for sender, size in end.arriving():
            if owner is None:
                self._step_master(ev.DataArriving(sender, size))
            elif owner.alive:
                owner.handle(ev.DataArriving(sender, size), self._time.now_s)

    def _check_received(self, owner: Owner, sender: NodeId | None, message: Message) -> None:
        """Check that a received message was sent to its receiver on this edge."""
        slot = None if sender is None else self._slots_of(owner).get(sender)
        self._delivery.check_received(owner, sender, slot, message)

    def check_during_run(self, world: WorldView) -> None:
        """Check that no endpoint has too many waiting frames."""
        self._delivery.check_bounds(world, self._endpoints)

    def check_at_end(self) -> None:
        """Check that endpoints rejected only replayed, repeated or late frames."""
        self._delivery.check_at_end(
            self._endpoints, recordings=bool(self._time.faults["recordings"])
        )


def _readdress_frame(frame: bytes, other: bytes) -> bytes:
    """Return ``frame`` with the receiver and edge of frame ``other``; they are not encrypted."""
    fields = list(HEADER.unpack_from(frame))
    address = slice(RECEIVER_FIELD, EDGE_FIELD + 1)
    fields[address] = HEADER.unpack_from(other)[address]
    return HEADER.pack(*fields) + frame[HEADER.size :]


DRIVER_HOST = "driver"
SLOW_POLL_S = (0.02, 0.2)  # range of a slow poller's interval
SLOW_POLL_BYTES = 128 << 10  # taken from one stream per poll
NARROWING_FACTORS = (0.1, 0.5)  # range; a link's rate is multiplied by one
OUTAGE_RECHECK_S = 0.1  # from the end of an outage until a stream continues

StreamKey = tuple[int, SimProcess | None, bool]  # edge, sender, data
StreamTarget = tuple[SimProcess | None, ArrivalHandler, int]  # receiver, its handler, edge


class BandwidthNetwork(Network):
    """A ``Network`` whose messages have realistic lengths and share ``Links`` of limited rate.

    ``traffic`` checks all streams, and ``step_master`` passes an event to the master. The other
    arguments are those of ``Network``.
    """

    def __init__(
        self,
        time: VirtualClock,
        faults: Faults,
        to_master: Callable[[NodeId | None, Message], None],
        step_master: Callable[[ev.Event], None],
        traffic: TrafficChecker,
        *,
        liveness_s: float,
    ) -> None:
        super().__init__(time, faults, to_master, liveness_s=liveness_s)
        self.links = Links(time, faults.rate)
        self.traffic, self._step_master = traffic, step_master
        self._streams: dict[StreamKey, LinkStream] = {}
        self._targets: dict[LinkStream, StreamTarget] = {}
        self._arrived: dict[SimProcess | None, dict[LinkStream, None]] = defaultdict(dict)
        self._scheduled_polls: set[SimProcess | None] = set()  # processes with a scheduled poll
        self._slow_pollers: dict[SimProcess, float] = {}

    def check_during_run(self, world: WorldView) -> None:
        """Check F2 to F4 (``TrafficChecker``): queues, dropped messages and the pace of commits."""
        self.traffic.check_during_run(world, self.links.hosts.values())

    def check_at_end(self) -> None:
        """Check F1 (``TrafficChecker``): most bytes sent were useful."""
        self.traffic.check_at_end()

    def host_of(self, process: SimProcess | None) -> LinkHost:
        """Return the host of a process; each executor has its own."""
        return self.links.host(DRIVER_HOST if process is None else process.identity.executor)

    def add(self, process: SimProcess) -> None:
        """Add a process; some hosts get a lower rate, and some processes poll rarely."""
        super().add(process)
        known = process.identity.executor in self.links.hosts
        host, rng = self.host_of(process), self._time.rng
        if not known and len(self.links.hosts) <= self._faults.narrow:
            host.rate *= rng.uniform(*NARROWING_FACTORS)
        if process.identity.partition < self._faults.slow_pollers:
            self._slow_pollers[process] = rng.uniform(*SLOW_POLL_S)

    def narrow_link(self) -> None:
        """Lower the rate of a random host's link."""
        hosts = list(self.links.hosts.values())
        if hosts:
            host = self._time.rng.choice(hosts)
            host.rate *= self._time.rng.uniform(*NARROWING_FACTORS)
            self._time.faults["narrower"] += 1
            self._time.say(f"the link of {host.name} carries {host.rate:,.0f} bytes/s from now on")

    def open_edge(self, owner: SimProcess | None, effect: ev.OpenEdge) -> None:
        """Open an edge, and send what waited for this end of it."""
        self._close_streams(owner, effect.node, except_edge=effect.edge)
        super().open_edge(owner, effect)
        for key in [key for key in self._streams if key[0] == effect.edge]:
            self._streams[key].outbox.flush()  # the other end may have waited for this one

    def close_edge(self, owner: SimProcess | None, node: NodeId) -> None:
        """Close the owner's end of the edge to the neighbour ``node``, and its streams."""
        self._close_streams(owner, node)
        super().close_edge(owner, node)

    def _close_streams(
        self, owner: SimProcess | None, node: NodeId, except_edge: EdgeNo | None = None
    ) -> None:
        """Close the owner's streams to a neighbour, unless their edge is ``except_edge``."""
        slot = self._slots_of(owner).get(node)
        if slot is None or slot.edge == except_edge:
            return
        for data in (False, True):
            stream = self._streams.pop((slot.edge, owner, data), None)
            if stream is not None:
                stream.close()

    def _get_stream(self, key: StreamKey, stream_target: StreamTarget) -> LinkStream:
        """Return the stream with this key; open it if there is none."""
        found = self._streams.get(key)
        if found is not None:
            return found
        (edge, owner, data), target = key, stream_target[0]

        def is_connected() -> bool:
            """Return whether the receiver still has this edge and the stream is not broken."""
            if key in self._broken:
                return False
            slots = self._slots_of(target).values()
            return any(s.edge == edge and s.target is owner for s in slots)

        def is_flowing() -> bool:
            """Return whether no outage blocks the stream; schedule a retry for the outage's end."""
            until_s = self._path_outage_end_s(owner, target)
            if until_s and until_s < math.inf:
                self._time.at(until_s + OUTAGE_RECHECK_S, self._resume_stream, key)
            alive = (owner is None or owner.alive) and (target is None or target.alive)
            return alive and not until_s

        ends = self.host_of(owner), self.host_of(target)
        stream = LinkStream(
            self.links,
            ends,
            data=data,
            is_connected=is_connected,
            is_flowing=is_flowing,
            notify_receiver=self._notify_receiver,
        )
        self._streams[key] = stream
        self._targets[stream] = stream_target
        self.traffic.record_stream(stream, owner, target, lambda: key in self._broken)
        return stream

    def _path_outage_end_s(self, owner: SimProcess | None, target: SimProcess | None) -> float:
        """Return the virtual time at which the outage between two processes ends; 0 without one."""
        until_s, now_s = self._outage_end_s(owner, target), self._time.now_s
        if target is not None and target.cut is not None and target.cut.down:
            until_s = max(until_s, target.cut.until_s if target.cut.until_s > now_s else 0.0)
        return until_s

    def _resume_stream(self, key: StreamKey) -> None:
        """Continue a stream after an outage."""
        if key in self._streams:
            self.links.schedule(self._streams[key])

    def _transmit(
        self,
        owner: SimProcess | None,
        target: SimProcess | None,
        arrive: ArrivalHandler,
        sender: NodeId | None,
        edge: int,
        message: Message,
        *,
        direct: bool = False,
    ) -> None:
        """Queue a message on its edge's stream; see ``Network._transmit`` for the arguments.

        Direct messages, which are short and rare, do not use the links.
        """
        if direct:
            super()._transmit(owner, target, arrive, sender, edge, message, direct=True)
            return
        data = is_data(message)
        size = estimate_body_bytes(message)
        stream = self._get_stream((edge, owner, data), (target, arrive, edge))
        newest_of = type(message) if isinstance(message, SUPERSEDING_MESSAGES) else None
        stream.put(split_into_frames(message, size, sender, data=data), newest_of)

    def _notify_receiver(self, stream: LinkStream) -> None:
        """Schedule a poll of a stream that has data for its receiver."""
        target = self._targets[stream][0]
        self._arrived[target][stream] = None
        if target not in self._scheduled_polls:
            self._scheduled_polls.add(target)
            pause_s = POLL_S if target is None else self._slow_pollers.get(target, POLL_S)
            self._time.after(pause_s, self._poll, target)

    def _poll(self, target: SimProcess | None) -> None:
        """Poll a process's streams, and take a limited number of bytes from each."""
        now_s = self._time.now_s
        if target is not None and now_s < target.paused_until_s:
            if target.paused_until_s < math.inf:
                self._time.at(target.paused_until_s, self._poll, target)
            return
        self._scheduled_polls.discard(target)
        bytes_max = SLOW_POLL_BYTES if target in self._slow_pollers else POLL_BYTES
        streams, self._arrived[target] = list(self._arrived[target]), {}
        for stream in streams:
            frames = stream.take(bytes_max)
            for frame in frames:
                self._deliver(stream, frame)
            if frames and stream.data and stream.arriving:
                self._report_partial_arrival(stream, frames[-1].sender)
            if stream.waiting:
                self._notify_receiver(stream)

    def _deliver(self, stream: LinkStream, frame: SizedFrame) -> None:
        """Count a frame; pass on its message if it is the last one."""
        stream.arriving += frame.size
        if not frame.last:
            return
        stream.arriving = 0
        target, arrive, edge = self._targets[stream]
        self.traffic.record_arrival(stream, target, frame.message)
        arrive(target, frame.sender, edge, frame.message)

    def _report_partial_arrival(self, stream: LinkStream, sender: NodeId | None) -> None:
        """Report to the receiving node how many bytes of an incomplete message have arrived.

        Do nothing if the edge to ``sender`` or its data stream has ended.
        """
        target, _, edge = self._targets[stream]
        assert sender is not None, "a node with an edge has an id"
        slot = self._slots_of(target).get(sender)
        if slot is None or slot.edge != edge or (edge, slot.target, True) in self._broken:
            return
        arriving = ev.DataArriving(sender, stream.arriving)
        if target is None:
            self._step_master(arriving)
        elif target.alive:
            target.handle(arriving, self._time.now_s)


def make_network(
    time: VirtualClock,
    size: RunSize,
    faults: Faults,
    *,
    to_master: Callable[[NodeId | None, Message], None],
    step_master: Callable[[ev.Event], None],
    violation: Callable[[str], None],
) -> Network:
    """Return the kind of network that a run's size and faults require.

    Streams survive an outage of half a lease.
    """
    liveness_s = size.lease_s / 2
    if size.through is TransportMode.ENDPOINT:
        delivery = DeliveryChecker(violation)
        return EndpointNetwork(
            time, faults, to_master, step_master, delivery, liveness_s=liveness_s
        )
    if not faults.rate:
        encodes_messages = size.through is TransportMode.CODEC
        return Network(
            time, faults, to_master, encodes_messages=encodes_messages, liveness_s=liveness_s
        )
    traffic = TrafficChecker(violation, size.message_sizes.longest_bytes)
    return BandwidthNetwork(time, faults, to_master, step_master, traffic, liveness_s=liveness_s)
