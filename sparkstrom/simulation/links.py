"""Simulate hosts, whose Aeron streams share a network interface, and check the traffic.

A stream is ordered and reliable. The sending process queues frames (parts of messages) in an outbox
and offers them to the stream. The stream accepts frames while less than half a term waits to be
sent; a term is one of the three parts of Aeron's buffer for a stream. The host sends a burst of
each of its streams in turn, if the stream's window has room: the window limits the bytes that are
under way or not yet polled. Frames that have arrived wait until the receiving process polls. If an
interface or a process is slow, the outbox therefore fills up.

Two things are not simulated: the bytes of Aeron's status messages, and datagrams that a full switch
drops and Aeron resends. Such data wait for their turn instead, and the windows limit how much can
wait.

``TrafficChecker`` checks the use of these links. ``DeliveryChecker`` checks the messages that
arrive in an ``EndpointNetwork``. A violation is a sentence that begins with the name of the broken
rule.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from sparkstrom.base.identity import MASTER, NodeId
from sparkstrom.codec.messages import (
    Chunk,
    Commit,
    Data,
    MergedRange,
    Message,
    OptimizerChunk,
    Phase,
    Update,
)
from sparkstrom.codec.sealed_frames import OVERHEAD_BYTES, Rejection
from sparkstrom.codec.wire import encode, is_data
from sparkstrom.protocol.common.events_and_effects import Command
from sparkstrom.protocol.common.flow_control import HEADER_BYTES
from sparkstrom.runtime.message_endpoint import (
    CONTROL_PIECE_BYTES,
    OPEN_SENDERS_MAX,
    QUEUED_REPLY_FRAMES_MAX,
    MessageEndpoint,
    Outbox,
)
from sparkstrom.simulation.process import EdgeEnd, SimProcess
from sparkstrom.simulation.virtual_clock import VirtualClock, WorldView
from sparkstrom.transport.aeron.channel_settings import TERM_LENGTHS, WINDOW_BYTES_MAX
from sparkstrom.transport.base import OfferResult

DATA_TERM, CONTROL_TERM = TERM_LENGTHS[0]
DATA_PIECE_BYTES = DATA_TERM // 16 - OVERHEAD_BYTES
BURST_BYTES = 16 << 10  # of one stream in its turn: some datagrams
WIRE_DELAY_S = 0.0002  # from host to host, in addition to the transmission time
DATA_HEADER_BYTES = 40
POLL_S = 0.001  # between two polls of a process
POLL_BYTES = 1 << 20  # taken from one stream per poll


class SizedFrame(bytes):
    """A part of a message, of which only the length and the whole message are stored."""

    message: Message  # the whole message, in each of its frames
    size: int  # bytes
    sender: NodeId | None  # id of the sender
    last: bool  # whether it completes the message

    def __len__(self) -> int:
        return self.size

    __eq__ = object.__eq__
    __hash__ = object.__hash__


def estimate_body_bytes(message: Message) -> int:
    """Return the size of an encoded message; for data messages an estimate, without encoding."""
    if isinstance(message, Data):
        return DATA_HEADER_BYTES + len(message.payload)
    return len(encode(message)[1])


def split_into_frames(
    message: Message, size: int, sender: NodeId | None, *, data: bool
) -> list[SizedFrame]:
    """Return the frames into which an endpoint splits a message of ``size`` bytes.

    ``data``: the frames go over a data stream, whose frames may be longer.
    """
    piece = DATA_PIECE_BYTES if data else CONTROL_PIECE_BYTES
    count = max(1, -(-size // piece))
    frames = []
    for i in range(count):
        frame = SizedFrame()
        frame.message, frame.sender, frame.last = message, sender, i == count - 1
        frame.size = OVERHEAD_BYTES + min(piece, size - i * piece)
        frames.append(frame)
    return frames


@dataclass(eq=False, slots=True)
class LinkHost:
    """A machine with one network interface."""

    name: str  # the executor, or the driver
    rate: float  # bytes per second, in each direction
    busy: bool = False  # sending a burst
    send_queue: deque[LinkStream] = field(default_factory=deque)  # streams that wait for a turn
    free_s: float = 0.0  # when all data in flight to this host will have arrived


class LinkStream:
    """One direction of an edge, control or data; implements ``transport.base.Sender``."""

    def __init__(
        self,
        links: Links,
        ends: tuple[LinkHost, LinkHost],
        *,
        data: bool,
        is_connected: Callable[[], bool],
        is_flowing: Callable[[], bool],
        notify_receiver: Callable[[LinkStream], None],
    ) -> None:
        """Create a stream with callbacks.

        ``is_connected`` returns True if the receiver listens, ``is_flowing`` if no outage blocks
        the stream. ``notify_receiver`` is called when data arrives for the receiving process.
        """
        self._links, self.source, self.target = links, *ends
        self.data = data
        self.is_connected, self.is_flowing = is_connected, is_flowing
        self.notify_receiver = notify_receiver
        term = DATA_TERM if data else CONTROL_TERM
        self._term_window = term // 2
        self._window = min(WINDOW_BYTES_MAX, term // 2 - term // 16)
        self.outbox = Outbox(self)
        self._accepted: deque[SizedFrame] = deque()
        self._head_sent = 0  # bytes of the first accepted frame that have been sent
        self.queued_bytes = 0  # data waiting in the outbox
        self.arriving = 0  # received bytes of an incomplete message
        self.unsent_bytes = 0  # accepted and not sent
        self.under_way = 0  # sent bytes that the receiver has not taken
        self.sent = self.useful_bytes = 0  # total bytes; bytes of complete, useful messages
        self._arrived_bursts: deque[tuple[int, list[SizedFrame]]] = deque()
        self.waiting = 0  # bytes of the arrived bursts
        self.is_scheduled = False  # in its host's send queue
        self.is_closed = False
        self.dropped = 0  # messages that the outbox rejected
        self.longest_bytes = 0  # of the messages so far

    def put(self, frames: list[SizedFrame], newest_of: Hashable = None) -> None:
        """Queue a message's frames, and send what the stream accepts.

        A waiting message with the same key ``newest_of`` is dropped; None: no message is dropped.
        """
        before = len(self.outbox.frames)
        size = sum(map(len, frames))
        self.longest_bytes = max(self.longest_bytes, size)
        self.outbox.put(list[bytes](frames), newest_of)
        if self.data:
            taken = len(self.outbox.frames) == before + len(frames)
            self.queued_bytes += size if taken else 0
            self.dropped += not taken
        self.outbox.flush()

    def offer(self, frames: Sequence[bytes]) -> tuple[int, OfferResult]:
        """Accept frames up to a limit, as Aeron does; return their number, and why not more."""
        if self.is_closed:
            self.queued_bytes = 0
            return 0, OfferResult.CLOSED
        if not self.is_connected():
            return 0, OfferResult.UNCONNECTED
        count = 0
        for frame in frames:
            if self.unsent_bytes >= self._term_window:
                break
            assert isinstance(frame, SizedFrame)
            self._accepted.append(frame)
            self.unsent_bytes += len(frame)
            self.queued_bytes -= len(frame)
            count += 1
        self._links.schedule(self)
        return count, OfferResult.SENT if count == len(frames) else OfferResult.BUSY

    def close(self) -> None:
        """Close the stream and drop what has not been sent."""
        self.is_closed = True
        self._accepted.clear()
        self.queued_bytes = self.unsent_bytes = 0

    def sendable_bytes(self) -> int:
        """Return how many bytes may be sent now."""
        if (
            self.is_closed
            or not self.unsent_bytes
            or not self.is_connected()
            or not self.is_flowing()
        ):
            return 0
        return min(BURST_BYTES, self.unsent_bytes, self._window - self.under_way)

    def send_bytes(self, size: int) -> list[SizedFrame]:
        """Send ``size`` bytes of the accepted frames; return the frames that are now complete."""
        whole: list[SizedFrame] = []
        size = min(size, self.unsent_bytes)
        self.unsent_bytes -= size
        self.under_way += size
        self.sent += size
        while size:
            rest = len(self._accepted[0]) - self._head_sent
            if rest > size:
                self._head_sent += size
                break
            size -= rest
            self._head_sent = 0
            whole.append(self._accepted.popleft())
        return whole

    def arrive(self, size: int, frames: list[SizedFrame]) -> None:
        """Queue a burst of ``size`` bytes, which completes ``frames``; notify the receiver."""
        self._arrived_bursts.append((size, frames))
        self.waiting += size
        self.notify_receiver(self)

    def take(self, bytes_max: int) -> list[SizedFrame]:
        """Return arrived frames, whole bursts up to about ``bytes_max`` bytes; acknowledge them.

        The sender then has as much more room in the receiver's window.
        """
        frames: list[SizedFrame] = []
        taken = 0
        while self._arrived_bursts and taken < bytes_max:
            size, whole = self._arrived_bursts.popleft()
            taken += size
            frames += whole
        self.waiting -= taken
        self._links.acknowledge(self, taken)
        return frames


class Links:
    """All hosts with their network interfaces; transmits the bursts of streams in virtual time.

    ``rate`` is the rate at which each new host sends and receives, in bytes per second.
    """

    def __init__(self, time: VirtualClock, rate: float) -> None:
        self._time, self._rate = time, rate
        self.hosts: dict[str, LinkHost] = {}

    def host(self, name: str) -> LinkHost:
        """Return the host with this name, created on first use."""
        if name not in self.hosts:
            self.hosts[name] = LinkHost(name, self._rate)
        return self.hosts[name]

    def schedule(self, stream: LinkStream) -> None:
        """Queue a stream at its host if it may send bytes, and make an idle host send."""
        host = stream.source
        if not stream.is_scheduled and stream.sendable_bytes() > 0:
            stream.is_scheduled = True
            host.send_queue.append(stream)
        if not host.busy:
            self._send_next_burst(host)

    def acknowledge(self, stream: LinkStream, size: int) -> None:
        """Report to the sender, after a delay, that the receiver has taken ``size`` bytes."""
        self._time.after(WIRE_DELAY_S, self._on_acknowledged, stream, size)

    def _on_acknowledged(self, stream: LinkStream, size: int) -> None:
        """Continue sending after ``size`` bytes were acknowledged."""
        stream.under_way -= size
        self.schedule(stream)

    def _send_next_burst(self, host: LinkHost) -> None:
        """Send a burst of the host's next stream that may send bytes; without one, become idle."""
        host.busy = False
        while host.send_queue:
            stream = host.send_queue.popleft()
            stream.is_scheduled = False
            size = stream.sendable_bytes()
            if size > 0:
                host.busy = True
                local = stream.target is host  # shared memory
                took_s = 0.0 if local else size / host.rate
                self._time.after(took_s, self._on_burst_sent, stream, size)
                return

    def _on_burst_sent(self, stream: LinkStream, size: int) -> None:
        """Schedule the arrival of a burst of ``size`` bytes that has left; send the next one."""
        host, target, now_s = stream.source, stream.target, self._time.now_s
        host.busy = False
        if not stream.is_closed:
            size = min(size, stream.unsent_bytes)
            frames = stream.send_bytes(size)
            arrives_s = now_s
            if target is not host:
                comes_s = max(now_s + WIRE_DELAY_S, target.free_s)
                arrives_s = target.free_s = comes_s + size / target.rate
            self._time.at(arrives_s, stream.arrive, size, frames)
            stream.outbox.flush()
            self.schedule(stream)
        if not host.busy:
            self._send_next_burst(host)


USEFUL_SHARE_MIN = 0.7  # of the bytes sent
SENT_BYTES_MIN = 2 << 20  # the share is not checked for fewer bytes
QUEUE_S_MAX = 1.0  # a host may queue what its link sends in this time
QUEUE_BYTES_MAX = 2 << 20  # bytes that a host may queue in addition, for all neighbours together
PACE_MARGIN = 1.5  # see ``max_commit_interval_s``


@dataclass(frozen=True, slots=True)
class CheckedStream:
    """A stream of a link, with the processes at its ends (None: the master)."""

    stream: LinkStream
    owner: SimProcess | None  # the sender
    target: SimProcess | None  # the receiver
    is_broken: Callable[[], bool]  # returns whether the network broke the stream

    @property
    def is_alive(self) -> bool:
        """Whether the stream is intact and both ends are alive."""
        return not self.is_broken() and all(end is None or end.alive for end in self.processes)

    @property
    def has_failed_end(self) -> bool:
        """Whether an end crashed or failed; such a stream's bytes are not counted."""
        gone = [end for end in self.processes if end is not None and not end.alive]
        return any(end.node.directive.order is not Command.END for end in gone)

    @property
    def processes(self) -> set[SimProcess | None]:
        """The processes at both ends; None is the master."""
        return {self.owner, self.target}


class TrafficChecker:
    """Checks one run's traffic over links of limited rate.

    F1: most bytes sent are useful. F2: commits advance at the pace that the links allow. F3: queues
    stay short. F4: no message is dropped for lack of room.

    Violations go to ``violation``. ``message_bytes`` is the size of the longest message.
    """

    def __init__(self, violation: Callable[[str], None], message_bytes: int) -> None:
        self._violation, self._message_bytes = violation, message_bytes
        self._ways: dict[LinkStream, CheckedStream] = {}  # all streams so far
        self._received: set[tuple[object, ...]] = set()  # receiver and identity of each message
        self._reach: dict[SimProcess, int] = {}  # newest commit that arrived at it
        self._commit: tuple[int, float] = -1, 0.0  # the newest one, and since when
        self.useful_bytes = self.sent = 0
        self._reported_hosts: set[LinkHost] = set()  # with a violation for their queues
        self.kinds: Counter[str] = Counter()  # useless bytes by kind of message

    def record_stream(
        self,
        stream: LinkStream,
        owner: SimProcess | None,
        target: SimProcess | None,
        is_broken: Callable[[], bool],
    ) -> None:
        """Record a new stream and the processes at its ends; None is the master.

        ``is_broken`` returns whether the network has broken the stream.
        """
        self._ways[stream] = CheckedStream(stream, owner, target, is_broken)

    def record_arrival(
        self, stream: LinkStream, target: SimProcess | None, message: Message
    ) -> None:
        """Count a data message's bytes as useful if its content is new, or else as useless."""
        if not stream.data:
            return
        size = estimate_body_bytes(message)
        if self._is_new(target, message):
            stream.useful_bytes += size
        else:
            self.kinds[type(message).__name__] += size

    def _is_new(self, target: SimProcess | None, message: Message) -> bool:
        """Return True if the target has not received this content before.

        A commit or a sum of commits is new if its last commit is newer than all that arrived.
        """
        key: tuple[object, ...]
        match message:
            case Commit(commit=commit) | MergedRange(commit=commit):
                assert target is not None, "the master receives no commits"
                if commit <= max(self._reach.get(target, 0), target.replica.commit):
                    return False
                self._reach[target] = commit
                return True
            case Update():
                key = (target, "update", message.origin, message.seq)
            case Chunk():
                assert target is not None, "the master receives no chunks"
                key = (target, "chunk", target.node.replication.pauses, message.index)
            case OptimizerChunk():
                key = (target, "updater", message.asker, message.copy, message.index)
            case _:
                return True
        new = key not in self._received
        self._received.add(key)
        return new

    def check_queues(self, hosts: Iterable[LinkHost]) -> None:
        """Check F3 and F4: hosts queue at most what they send in a second, and drop no message.

        Beyond that, 2 MiB and one message of any length to each neighbour may wait.
        """
        waiting: Counter[LinkHost] = Counter()
        allowed: Counter[LinkHost] = Counter()
        for stream, checked in self._ways.items():
            if stream.dropped:
                name = "the master" if checked.owner is None else checked.owner.name
                self._violation(f"F4: {name} dropped messages for lack of room")
            if checked.is_alive and stream.data and not stream.is_closed:
                waiting[stream.source] += (
                    stream.queued_bytes + stream.unsent_bytes + stream.under_way
                )
                allowed[stream.source] += stream.longest_bytes
        for host in hosts:
            limit = QUEUE_BYTES_MAX + QUEUE_S_MAX * host.rate + allowed[host]
            if waiting[host] > limit and host not in self._reported_hosts:
                self._reported_hosts.add(host)
                full = f"{waiting[host]:,} bytes wait on {host.name}, at {host.rate:,.0f} a second"
                self._violation(f"F3: {full}; at most {limit:,.0f} may")

    def check_during_run(self, world: WorldView, hosts: Iterable[LinkHost]) -> None:
        """Check F3 and F4; while all living workers train, also F2, the pace of commits."""
        size, master, now_s = world.size, world.master, world.time.now_s
        self.check_queues(hosts)
        calm = (
            world.phase is Phase.RUNNING and now_s > world.shape.trouble_until_s + 2 * size.lease_s
        )
        calm = calm and all(process.has_replica for process in world.alive)
        calm = calm and any(not p.finished or p.node.in_flight.bytes for p in world.alive)
        step_s = max((process.step_s_max for process in world.alive), default=0.0)
        depth = max(map(master.placement.tree.depth, master.members.live), default=1)
        pace_s = self.max_commit_interval_s(depth, size.lease_s / 4, size.publish_every * step_s)
        world.shape.pace_s = pace_s
        self.check_pace(master.sequencer.head, now_s, calm=calm, pace_s=pace_s)

    def max_commit_interval_s(self, depth: int, report_s: float, step_s: float) -> float:
        """Return how long the next commit may take without faults, in seconds.

        ``depth``: levels of the tree; ``report_s``: seconds between two reports of a node;
        ``step_s``: longest time that a worker trains for an update.

        An update travels ``depth`` hops up, and its commit as many down. At each hop it waits for a
        queue of at most a second, and for one message of any length to or from each neighbour of
        the host. What a worker knows of others' steps is as old as one report per hop. A margin of
        half the sum is added.
        """
        busiest_s = 0.0
        lengths: Counter[LinkHost] = Counter()
        for stream, checked in self._ways.items():
            if checked.is_alive and stream.data and not stream.is_closed:
                for host in {stream.source, stream.target}:
                    lengths[host] += max(stream.longest_bytes, self._message_bytes)
        for host, length in lengths.items():
            busiest_s = max(busiest_s, length / host.rate)
        hops = 2 * depth
        return PACE_MARGIN * (step_s + hops * (QUEUE_S_MAX + busiest_s + report_s))

    def check_pace(self, head: int, now_s: float, *, calm: bool, pace_s: float) -> None:
        """Check F2: while training is ``calm``, the commit after number ``head`` comes in time.

        It may come up to ``pace_s`` seconds later.
        """
        commit, since_s = self._commit
        if head != commit or not calm:
            self._commit = head, now_s
        elif now_s - since_s > pace_s:
            self._commit = head, now_s
            self._violation(f"F2: no commit after {head} for {pace_s:.1f} s")

    def check_at_end(self) -> None:
        """Check F1: enough of the bytes sent on intact streams were useful."""
        living = [
            checked.stream
            for checked in self._ways.values()
            if checked.stream.data and not checked.is_broken() and not checked.has_failed_end
        ]
        self.sent = sum(stream.sent for stream in living)
        self.useful_bytes = sum(stream.useful_bytes for stream in living)
        if self.sent > SENT_BYTES_MIN and self.useful_bytes < USEFUL_SHARE_MIN * self.sent:
            share = self.useful_bytes / self.sent
            waste = ", ".join(f"{size:,} of {kind}" for kind, size in self.kinds.most_common(3))
            self._violation(
                f"F1: {share:.2f} of {self.sent:,} bytes were useful; received again: {waste}"
            )


PIECE_BYTES_MIN = 32  # data in the smallest frame of any media driver
CONTROL_FRAMES_MAX = 64  # repeated control messages that may queue for one neighbour
EXPECTED_REJECTIONS = frozenset(
    {Rejection.AGAIN, Rejection.EARLY, Rejection.OTHER_EDGE, Rejection.OTHER_RECEIVER}
)
REJECTIONS_WITH_REPLAYS = EXPECTED_REJECTIONS | {
    Rejection.SEAL,
    Rejection.NOT_DIRECT,
    Rejection.OTHER_STREAM,
}

StreamKey = tuple[int, SimProcess | None, bool]  # edge, sender, data


class DeliveryChecker:
    """Compares the messages that endpoints receive with those sent (I2, I7 of ARCHITECTURE.md).

    Each message received on an edge was sent there, in this order and once. Messages of kinds that
    are not repeated must be received while the stream is intact. Direct messages are received at
    most once, and only by the addressed process. Violations go to ``violation``.
    """

    def __init__(self, violation: Callable[[str], None]) -> None:
        self.violation = violation
        self._sent: dict[StreamKey, deque[tuple[Message, float]]] = defaultdict(deque)
        # Token of the receiver (None: the master), encoded message.
        self._direct_messages: Counter[tuple[int | None, bytes]] = Counter()

    def record_sent(
        self, edge: int, owner: SimProcess | None, message: Message, must_s: float
    ) -> None:
        """Record that ``owner`` sent a message over an edge.

        ``must_s``: the virtual time of sending if the message must arrive; 0 if it may get lost.
        """
        self._sent[edge, owner, is_data(message)].append((message, must_s))

    def record_direct(self, token: int | None, message: Message) -> None:
        """Record a direct message to the process with this token, or to the master."""
        self._direct_messages[token, encode(message)[1]] += 1

    def check_received(
        self,
        owner: SimProcess | None,
        sender: NodeId | None,
        slot: EdgeEnd | None,
        message: Message,
    ) -> None:
        """Check a message that ``owner`` received; ``slot`` is its edge to the sender, or None."""
        said = self._sent[slot.edge, slot.target, is_data(message)] if slot else deque()
        index = next((i for i, (earlier, _) in enumerate(said) if earlier == message), None)
        if index is not None:
            skipped = [said.popleft() for _ in range(index + 1)][:-1]
            assert slot is not None, "without an edge, no message was recorded"
            for lost in (type(m).__name__ for m, must_s in skipped if must_s > slot.opened_s):
                self.violation(f"I2: {_owner_name(owner)} missed {lost} on an intact stream")
            return
        key = None if owner is None else owner.identity.token, encode(message)[1]
        if sender not in (None, MASTER) or not self._direct_messages[key]:
            what = f"{type(message).__name__} of {sender}"
            self.violation(f"I7: {_owner_name(owner)} received {what}, not sent to it, or twice")
        self._direct_messages[key] -= 1

    def check_bounds(
        self, world: WorldView, ends: Mapping[SimProcess | None, MessageEndpoint]
    ) -> None:
        """Check I4: the frames that wait at an endpoint are at most what send windows allow."""
        size = world.size
        weight = (
            size.flow_limits.window_max + 2 * size.log_bytes + CONTROL_FRAMES_MAX * HEADER_BYTES
        )
        for owner, end in ends.items():
            edges = world.master.children.by_node if owner is None else owner.slots
            most = (
                len(edges) * weight // PIECE_BYTES_MIN + OPEN_SENDERS_MAX * QUEUED_REPLY_FRAMES_MAX
            )
            if end.waiting > most:
                self.violation(f"I4: {end.waiting} frames wait at {_owner_name(owner)}: {most} may")

    def check_at_end(
        self, ends: Mapping[SimProcess | None, MessageEndpoint], *, recordings: bool
    ) -> None:
        """Check I7: all rejections of frames have expected reasons.

        ``recordings``: whether frames were replayed, which adds some reasons.
        """
        usual = REJECTIONS_WITH_REPLAYS if recordings else EXPECTED_REJECTIONS
        for owner, end in ends.items():
            if odd := end.traffic.rejected.keys() - usual:
                self.violation(f"I7: {_owner_name(owner)} rejected frames: {sorted(odd)}")


def _owner_name(owner: SimProcess | None) -> str:
    """Return the name of a process (None: the master) for messages."""
    return "the master" if owner is None else owner.name
