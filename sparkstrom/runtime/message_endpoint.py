"""Send and receive a node's messages over a transport, as encrypted frames, and count the bytes.

A node is the controller or a worker, and an edge is its connection to a neighbour in the tree of
nodes, with one stream for control and one for data each way. Direct messages, between the
controller and any worker's process, use no edge.

Only the thread that runs the node's protocol uses a ``MessageEndpoint``. Sending never blocks:
frames wait in an ``Outbox`` per stream, control apart from data, until the transport accepts them.

These queues need no limit, because the protocol hands over only as much data as a link can send
soon (``protocol.common.flow_control``), and a newer control message replaces an older one that it
makes obsolete.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice

from sparkstrom.base.errors import WireError
from sparkstrom.base.identity import EdgeNo, Endpoint, NodeId
from sparkstrom.codec.messages import (
    Address,
    Chunk,
    Commit,
    Direct,
    Heartbeat,
    Join,
    MergedRange,
    Message,
    OptimizerChunk,
    Payload,
    State,
    Update,
)
from sparkstrom.codec.sealed_frames import (
    OVERHEAD_BYTES,
    UNBOUND,
    FrameError,
    Header,
    Reassembler,
    Rejection,
    Seal,
    direct_header,
    split_body,
)
from sparkstrom.codec.wire import UPDATE_HEADER, Kind, decode_untrusted, encode, is_data
from sparkstrom.protocol.common.events_and_effects import SendMerged, SendToProcess
from sparkstrom.transport.base import OfferResult, Sender, Transport

TRAFFIC_KINDS: dict[type[Message], str] = {
    Update: "updates",  # sent towards the controller, at each hop
    Commit: "commits",  # sent to all, at each hop
    MergedRange: "sums",  # merged commits, for nodes that cannot receive each of them
    Chunk: "snapshots",  # parameters, for nodes that join late or cannot catch up
    OptimizerChunk: "optimizer_states",  # for nodes that join late
}
CONTROL_TRAFFIC = "control"  # all other messages


@dataclass(slots=True)
class Traffic:
    """Counts of the bytes that one node has sent, and of the frames that it has rejected."""

    # bytes queued for sending on all streams; LinkBytesCounter counts what left the interfaces
    wire_bytes: int = 0
    # bytes of this node's own updates, encrypted; each update counts once, however often it is sent
    update_bytes: int = 0
    rejected: Counter[Rejection] = field(default_factory=Counter)  # rejected frames by reason
    # wire_bytes by kind of message: a value of TRAFFIC_KINDS, or CONTROL_TRAFFIC
    by_kind: Counter[str] = field(default_factory=Counter)

    @property
    def foreign_frames(self) -> int:
        """The number of rejected frames that indicate strangers, damage or replays.

        Early frames are excluded: at a healthy start a parent's first frame may arrive before the
        controller's command that opens the edge. It has this fit's key and will be sent again.
        """
        return self.rejected.total() - self.rejected[Rejection.EARLY]

    def count_sent(self, message: Message, frames: Iterable[bytes]) -> None:
        """Count the frames of one message that are queued for sending."""
        size = sum(map(len, frames))
        self.wire_bytes += size
        self.by_kind[TRAFFIC_KINDS.get(type(message), CONTROL_TRAFFIC)] += size


OFFER_FRAMES_MAX = 256  # per flush; bounds the cost of a long queue that is stuck
OPEN_SENDERS_MAX = 32  # open senders for direct messages
QUEUED_REPLY_FRAMES_MAX = 16  # per address without a sender; further messages only repeat these
UNRESPONSIVE_AFTER_REQUESTS = 12  # six seconds of a peer that sends two requests per second
CONNECT_FLUSHES_MAX = 1000  # about a second; then an unconnected sender makes room for others


class Outbox:
    """A queue of encrypted frames, which wait until a transport's sender accepts them."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self.frames: deque[bytes] = deque()  # those that wait; changed only by this class
        self._newest: dict[Hashable, list[bytes]] = {}  # key -> frames of the waiting message
        self.is_closed = False  # the sender has ended, so that frames are dropped

    def put(self, frames: list[bytes], replaces: Hashable = None) -> None:
        """Queue a message's frames.

        If ``replaces`` is a key, first drop a waiting message that was queued with the same key.
        """
        if replaces is not None:
            for frame in self._newest.get(replaces, ()):
                self.frames.remove(frame)
            self._newest[replaces] = frames
        self.frames.extend(frames)

    def flush(self) -> int:
        """Offer waiting frames to the sender; return how many it accepted.

        If the sender has ended, drop all frames and set ``is_closed``.
        """
        if not self.frames:
            return 0
        sent, offer = self._sender.offer(list(islice(self.frames, OFFER_FRAMES_MAX)))
        for _ in range(sent):
            self.frames.popleft()
        if sent:
            self._newest.clear()
        if offer is OfferResult.CLOSED:
            self.is_closed = True
            self.frames.clear()
            self._newest.clear()
        return sent

    def close(self) -> None:
        """Close the sender; frames that wait are not sent."""
        self._sender.close()


class ReplyOutboxes:
    """Queues the controller's direct messages by address; few addresses have an open sender.

    The controller sends direct messages to many addresses, to each of them rarely. To make room for
    another address, a sender is closed once it has sent its frames, or has had
    ``CONNECT_FLUSHES_MAX`` flushes to do so. So every address is served, even if many workers join
    at once. While an address waits for a sender, messages beyond ``QUEUED_REPLY_FRAMES_MAX`` frames
    are dropped, because they only repeat earlier ones.
    """

    def __init__(self, open_sender: Callable[[Address], Sender]) -> None:
        self._open_sender = open_sender
        self._open: dict[Address, Outbox] = {}  # in the order of opening
        # flush at which an unconnected sender may be closed
        self._turn_ends: dict[Address, int] = {}
        self._waiting: dict[Address, list[bytes]] = {}
        # Requests since the sender was opened, from peers that have received nothing through it.
        self._unanswered_requests: dict[Address, int] = {}
        self._flushes = 0

    def put(self, address: Address, frames: list[bytes]) -> bool:
        """Queue all or none of a message's frames for ``address``; return False if none."""
        if address in self._open:
            self._open[address].put(frames)
            return True
        waiting = self._waiting.setdefault(address, [])
        if waiting and len(waiting) + len(frames) > QUEUED_REPLY_FRAMES_MAX:
            return False
        waiting.extend(frames)
        return True

    def note_request(self, address: Address) -> None:
        """Count a request from a process, which shows that the process lives."""
        if address in self._unanswered_requests:
            self._unanswered_requests[address] += 1

    def flush(self) -> int:
        """Offer waiting frames to the open senders; return how many they accepted."""
        self._flushes += 1
        while self._waiting and self._make_room():
            self._open_next()
        went = 0
        for address, box in [each for each in self._open.items() if each[1].frames]:
            if sent := box.flush():
                went += sent
                self._unanswered_requests.pop(address, None)
            if box.is_closed:
                self._close(address)  # the next message opens another sender
        return went

    def unresponsive_peers(self) -> tuple[Endpoint, ...]:
        """Return peers that keep sending requests, although no reply could be sent to them."""
        asked = [
            at
            for at, requests in self._unanswered_requests.items()
            if requests >= UNRESPONSIVE_AFTER_REQUESTS
        ]
        return tuple(dict.fromkeys(Endpoint(at.host, at.port) for at in asked))

    def _make_room(self) -> bool:
        """Return whether another sender may be opened; close an idle or overdue one if needed."""
        if len(self._open) < OPEN_SENDERS_MAX:
            return True
        for address, box in self._open.items():
            if not box.frames or self._turn_ends[address] <= self._flushes:
                self._close(address)
                return True
        return False

    def _close(self, address: Address) -> None:
        """Close the sender to an address and drop the frames that wait for it."""
        self._open.pop(address).close()
        del self._turn_ends[address]
        self._unanswered_requests.pop(address, None)

    def _open_next(self) -> None:
        """Open a sender for the address that has waited longest."""
        address = next(iter(self._waiting))
        box = self._open[address] = Outbox(self._open_sender(address))
        box.put(self._waiting.pop(address))
        self._turn_ends[address] = self._flushes + CONNECT_FLUSHES_MAX
        self._unanswered_requests[address] = 0

    def __len__(self) -> int:
        """Return the number of frames that the transport has not accepted yet."""
        queued = sum(len(box.frames) for box in self._open.values())
        return queued + sum(map(len, self._waiting.values()))


SHARED_MESSAGES = (Commit, MergedRange)


class EncodingCache:
    """Keeps encoded bodies of messages for several children, during one duty cycle.

    All children are sent the same message object, nearly always in the cycle in which it arrives,
    so messages are compared by identity. Only encryption is done for each child.
    """

    def __init__(self) -> None:
        # The message is kept so that no other object can get its id.
        self._cache: dict[tuple[int, int], tuple[Message, Kind, list[bytes]]] = {}

    def encode(self, message: Message, piece_bytes: int) -> tuple[Kind, list[bytes]]:
        """Return a message's kind, and its encoded body in pieces of at most ``piece_bytes``."""
        key = id(message), piece_bytes
        if (cached := self._cache.get(key)) is not None:
            return cached[1], cached[2]
        kind, body = encode(message)
        pieces = split_body(body, piece_bytes)
        if isinstance(message, SHARED_MESSAGES):
            self._cache[key] = message, kind, pieces
        return kind, pieces

    def clear(self) -> None:
        """Empty the cache; called at the end of a duty cycle."""
        self._cache.clear()


class MergeCache:
    """Keeps sums of commits (numbered updates) for several children, during one duty cycle."""

    def __init__(self, merge: Callable[[SendMerged], MergedRange]) -> None:
        self._merge = merge
        self._cache: dict[tuple[int, int, int], MergedRange] = {}

    def merge(self, effect: SendMerged) -> MergedRange:
        """Return the sum of the commits in ``effect``, which is computed at the first call."""
        key = effect.after, effect.commit, effect.count
        cached = self._cache.get(key)
        if cached is None:
            cached = self._cache[key] = self._merge(effect)
        return cached

    def clear(self) -> None:
        """Empty the cache; called at the end of a duty cycle."""
        self._cache.clear()


CONTROL_PIECE_BYTES = 8192 - OVERHEAD_BYTES  # fits the smallest log of a control stream
INCOMPLETE_SENDERS_MAX = 1024  # senders whose partial messages the join stream keeps
SUPERSEDING_MESSAGES = (Heartbeat, State)  # each contains all that the one before it did
IDLE_POLL_S = 0.02  # interval of duty cycles; frames and wakes end the wait at once
FAST_POLL_S = 0.001  # if frames wait to be sent, or something is overdue
LOCAL_STREAM_OFFSET = 2  # local streams of an edge are numbered this much above its UDP streams


@dataclass(slots=True)
class OutgoingEdge:
    """The sending half of an edge to a neighbour."""

    edge: EdgeNo  # number of the edge
    control: Outbox  # frames of control messages
    data: Outbox  # frames of data messages


@dataclass(slots=True)
class IncomingEdge:
    """One stream on which this node receives from a neighbour, or will receive once it has one."""

    node: NodeId | None  # the neighbour; None while the stream has none (is unbound)
    edge: EdgeNo  # number of the edge
    data: bool  # whether it carries data messages; False: control messages
    reassembler: Reassembler  # joins frames to messages


@dataclass(slots=True)
class DirectReceiver:
    """Receives direct messages on the controller's join stream, and rejects replays.

    Each worker's process has a random token, and numbers its frames with rising counters. The
    highest counter of each token is kept for the whole fit, even if the stream is reopened. Only
    processes with the job's key can add an entry, so there is one per process of this fit.
    """

    message_bytes_max: int  # longest message to accept, in bytes
    last_counts: dict[int, int] = field(default_factory=dict)  # token -> highest counter received
    # token -> partly received message
    reassemblers: dict[int, Reassembler] = field(default_factory=dict)

    def add_frame(self, header: Header, body: bytes) -> bytes | None:
        """Add a decrypted frame; return its message's body if that is now complete, else None.

        Raise FrameError if the frame is a replay or the message is too long.
        """
        token, cached = header.session, self.last_counts.get(header.session, 0)
        if header.count <= cached:
            raise FrameError(Rejection.AGAIN, f"count {header.count}, it was {cached} already")
        self.last_counts[token] = header.count
        reassembler = self.reassemblers.pop(token, None) or Reassembler(self.message_bytes_max)
        if len(self.reassemblers) >= INCOMPLETE_SENDERS_MAX:
            del self.reassemblers[next(iter(self.reassemblers))]
        whole = reassembler.add_piece(header, body)
        if whole is None:
            self.reassemblers[token] = reassembler
        return whole


class MessageEndpoint:
    """Sends and receives messages for one node.

    Args:
        transport: the open transport, owned from now on.
        seal: cipher of this fit's frames.
        me: id of this node; None until it is assigned.
        token: random token of this process, to which direct messages are bound; 0 for the
            controller.
        message_bytes_max: length of the longest message to accept.
        chunk_bytes_max: longest part of a message in one data frame, in bytes.
        traffic: counters to continue; None: new ones.
    """

    def __init__(
        self,
        transport: Transport,
        seal: Seal,
        *,
        me: NodeId | None,
        token: int,
        message_bytes_max: int,
        chunk_bytes_max: int,
        traffic: Traffic | None = None,
    ) -> None:
        self.transport, self._seal, self.me, self._token = transport, seal, me, token
        self._message_bytes_max, self._chunk_bytes_max = message_bytes_max, chunk_bytes_max
        self.traffic = traffic or Traffic()
        self._counter = self._direct_count = 0
        self._outgoing: dict[NodeId, OutgoingEdge] = {}
        self._incoming: dict[int, IncomingEdge] = {}
        # Highest counter of each past edge: frames recorded before it was reopened stay rejected.
        self._last_counters: dict[tuple[NodeId, EdgeNo, bool], int] = {}
        # where this node listens for its parent and the controller
        self._own_address: Address | None = None
        self._master: tuple[Endpoint, int] | None = None
        self._to_master: Outbox | None = None
        self._direct_receiver = DirectReceiver(CONTROL_PIECE_BYTES * 8)
        self._join_stream: int | None = None
        self._replies = ReplyOutboxes(self._open_reply_sender)
        # direct messages of the controller, on any stream
        self._reassembler = Reassembler(message_bytes_max)
        self.encodings = EncodingCache()
        self._has_unsent = False  # the last flush left frames
        # neighbour -> bytes of a partly received data message
        self._arriving: dict[NodeId, int] = {}

    def listen(self, address: Address) -> None:
        """Listen on both streams of ``address``, this node's own, for the controller and a parent.

        Stop listening at an earlier address.
        """
        if self._own_address is not None:
            for stream in (
                *_stream_numbers(self._own_address),
                *_stream_numbers(_local_address(self._own_address)),
            ):
                self._close_receiver(stream)
        self._own_address = address
        for stream in _stream_numbers(address):
            self._reset_incoming(stream)
            self.transport.open_receiver(stream)

    def listen_for_joins(self, stream: int) -> None:
        """Listen on the join stream for direct messages from any process that has the job's key."""
        self._join_stream = stream
        self.transport.open_receiver(stream)

    def open_edge(self, node: NodeId, edge: EdgeNo, local: Address, peer: Address) -> None:
        """Open an edge to a neighbour, or replace it: receive at ``local``, send to ``peer``.

        Neighbours on the same media driver communicate through shared memory, on separate streams.
        """
        is_local = Endpoint(peer.host, peer.port) == self.transport.endpoint
        if is_local:
            local, peer = _local_address(local), _local_address(peer)
        for stream, incoming in list(self._incoming.items()):
            if (incoming.node, incoming.edge) == (node, edge) and stream not in _stream_numbers(
                local
            ):
                self._stop_receiving(stream)  # before the new slots continue its counters
        for stream in _stream_numbers(local):
            if stream not in self._incoming:
                self.transport.open_receiver(stream, local=is_local)
            self._remove_incoming(stream)
            self._incoming[stream] = self._make_incoming(
                node, edge, data=stream == local.data_stream
            )
        for stream, incoming in list(self._incoming.items()):
            if incoming.node == node and incoming.edge != edge:
                self._stop_receiving(stream)
        self._connect(node, edge, peer, local=is_local)

    def close_edge(self, node: NodeId) -> None:
        """Stop receiving from and sending to the neighbour ``node``; ignore an unknown one."""
        for stream in [s for s, incoming in self._incoming.items() if incoming.node == node]:
            self._stop_receiving(stream)
        self._disconnect(node)

    def _make_incoming(self, node: NodeId | None, edge: EdgeNo, *, data: bool) -> IncomingEdge:
        """Return the receiving end of an edge, which rejects frames that have arrived on it before.

        ``node`` is the neighbour; None: it is not known yet. ``data``: whether data messages are
        received, not control messages.
        """
        after = -1 if node is None else self._last_counters.get((node, edge, data), -1)
        return IncomingEdge(node, edge, data, Reassembler(self._message_bytes_max, after))

    def _remove_incoming(self, stream: int) -> IncomingEdge | None:
        """Remove the incoming edge of a stream and remember its highest counter."""
        incoming = self._incoming.pop(stream, None)
        if incoming is not None and incoming.node is not None:
            self._last_counters[incoming.node, incoming.edge, incoming.data] = (
                incoming.reassembler.counter
            )
        return incoming

    def _reset_incoming(self, own: int) -> None:
        """Make the incoming edge of stream ``own`` (see ``listen``) free for the next parent."""
        assert self._own_address is not None
        self._remove_incoming(own)
        self._incoming[own] = self._make_incoming(
            None, UNBOUND, data=own == self._own_address.data_stream
        )

    def _stop_receiving(self, stream: int) -> None:
        """Stop receiving from a neighbour on a stream; a stream of ``listen`` itself stays open."""
        if self._own_address is not None and stream in _stream_numbers(self._own_address):
            self._reset_incoming(stream)
        else:
            self._close_receiver(stream)

    def _close_receiver(self, stream: int) -> None:
        """Stop listening on a stream, if it is open."""
        if self._remove_incoming(stream) is not None:
            self.transport.close_receiver(stream)

    def _connect(self, node: NodeId, edge: EdgeNo, address: Address, *, local: bool) -> None:
        """Open senders to the neighbour ``node`` at ``address``, and close any earlier ones.

        ``local``: whether they send through shared memory instead of UDP.
        """
        self._disconnect(node)
        endpoint, open_sender = Endpoint(address.host, address.port), self.transport.open_sender
        control = open_sender(endpoint, address.control_stream, control=True, local=local)
        data = open_sender(endpoint, address.data_stream, control=False, local=local)
        self._outgoing[node] = OutgoingEdge(edge, Outbox(control), Outbox(data))

    def _disconnect(self, node: NodeId) -> None:
        """Close the senders to a neighbour; frames that wait are dropped."""
        peer = self._outgoing.pop(node, None)
        if peer is not None:
            peer.control.close()
            peer.data.close()

    def send(self, node: NodeId, message: Message) -> None:
        """Queue a message for a neighbour; drop it if there is no edge to this node."""
        peer = self._outgoing.get(node)
        if peer is None:
            return
        frames = self._seal_message(message, receiver=node, edge=peer.edge)
        box = peer.data if is_data(message) else peer.control
        box.put(frames, type(message) if isinstance(message, SUPERSEDING_MESSAGES) else None)
        self.traffic.count_sent(message, frames)

    def set_master(self, endpoint: Endpoint, join_stream: int) -> None:
        """Set where the controller receives direct messages; an earlier connection is closed."""
        self._master = endpoint, join_stream
        if self._to_master is not None:
            self._to_master.close()
            self._to_master = None

    def send_direct(self, message: Direct) -> None:
        """Queue a direct message from this process to the controller's join stream."""
        assert self._master is not None, "the master's place is not known"
        if self._to_master is not None and self._to_master.is_closed:
            self.set_master(*self._master)
        if self._to_master is None:
            endpoint, stream = self._master
            self._to_master = Outbox(self.transport.open_sender(endpoint, stream, control=True))
        kind, body = encode(message)
        pieces, frames = split_body(body, CONTROL_PIECE_BYTES), []
        for i, piece in enumerate(pieces):
            self._direct_count += 1
            header = direct_header(self._token, self._direct_count, kind, i, len(pieces))
            frames.append(self._seal.close(header, piece))
        self._to_master.put(frames)
        self.traffic.count_sent(message, frames)

    def send_to_process(self, effect: SendToProcess) -> None:
        """Queue a direct message from the controller to a process, which need not be a child."""
        frames = self._seal_message(
            effect.message, receiver=effect.node, edge=UNBOUND, token=effect.token
        )
        if self._replies.put(effect.address, frames):
            self.traffic.count_sent(effect.message, frames)

    def unresponsive_peers(self) -> tuple[Endpoint, ...]:
        """Return peers that keep sending requests, although no reply could be sent to them."""
        return self._replies.unresponsive_peers()

    def _open_reply_sender(self, address: Address) -> Sender:
        """Open a sender for direct messages to a process."""
        endpoint = Endpoint(address.host, address.port)
        return self.transport.open_sender(endpoint, address.control_stream, control=True)

    def flush(self) -> int:
        """Offer waiting frames on all streams, control first; return how many were accepted."""
        self.encodings.clear()
        sent = self._replies.flush()
        self._has_unsent = len(self._replies) > 0
        for box in self._outboxes():
            if box.frames:
                sent += box.flush()
                self._has_unsent |= bool(box.frames)
        return sent

    @property
    def waiting(self) -> int:
        """The number of frames that the transport has not accepted yet."""
        return len(self._replies) + sum(len(box.frames) for box in self._outboxes())

    def _outboxes(self) -> list[Outbox]:
        """Return all outboxes in the order of sending: control before data."""
        join_stream = [self._to_master] if self._to_master is not None else []
        control = [peer.control for peer in self._outgoing.values()]
        return [*join_stream, *control, *(peer.data for peer in self._outgoing.values())]

    @property
    def _piece_bytes(self) -> int:
        """The longest piece of a data message in bytes, which depends on the current transport."""
        return min(self.transport.max_frame_bytes - OVERHEAD_BYTES, self._chunk_bytes_max)

    def _seal_message(
        self, message: Message, *, receiver: NodeId | None, edge: EdgeNo, token: int = 0
    ) -> list[bytes]:
        """Return a message's frames, each encrypted for its receiver, edge and token."""
        piece_bytes = self._piece_bytes if is_data(message) else CONTROL_PIECE_BYTES
        kind, pieces = self.encodings.encode(message, piece_bytes)
        frames = []
        for i, piece in enumerate(pieces):
            self._counter += 1
            header = Header(kind, self.me, receiver, edge, self._counter, i, len(pieces))
            frames.append(self._seal.close(header, piece, token))
        return frames

    def count_update(self, payload: Payload) -> None:
        """Count the bytes of an update that this node has made, as encrypted frames."""
        body_bytes = UPDATE_HEADER.size + len(payload.data)
        pieces = -(-body_bytes // self._piece_bytes)
        self.traffic.update_bytes += body_bytes + pieces * OVERHEAD_BYTES

    def poll_timeout_s(self, due_in_s: float = math.inf) -> float:
        """Return how long the next ``receive`` should wait: briefly if frames wait to be sent.

        ``due_in_s``: seconds until something else is due.
        """
        longest_s = FAST_POLL_S if self._has_unsent else IDLE_POLL_S
        return min(max(FAST_POLL_S, due_in_s), longest_s)

    def receive(self, wait_s: float) -> Iterator[tuple[NodeId | None, Message]]:
        """Yield messages with their senders' ids (None for direct messages).

        Waits up to ``wait_s`` seconds for the first one; ``wake`` ends the wait. Messages are
        yielded one by one, because handling one can change this node's id and its edges, by which
        the next one is checked.
        """
        for stream, frame in self.transport.poll(wait_s):
            try:
                taken = self._open_frame(stream, frame)
            except WireError as error:
                self.traffic.rejected[_rejection_from(error)] += 1
                continue
            if taken is not None:
                yield taken

    def _open_frame(self, stream: int, frame: bytes) -> tuple[NodeId | None, Message] | None:
        """Decrypt a frame; return (sender, message) if it completes a message, otherwise None.

        Raise WireError if the frame is invalid or was not sent to this node on this stream.
        """
        if stream == self._join_stream:
            return self._open_direct(frame)
        incoming = self._incoming.get(stream)
        if incoming is None:
            return None  # of an edge that was just closed
        header, body = self._seal.open_untrusted(frame, self._token)
        is_direct = header.is_direct_from_master
        is_from_edge = incoming.node is not None and (header.sender, header.edge) == (
            incoming.node,
            incoming.edge,
        )
        if not (is_direct or is_from_edge):
            raise FrameError(Rejection.EARLY if incoming.node is None else Rejection.OTHER_EDGE)
        if (header.kind != Kind.CONTROL) != incoming.data:
            # streams have separate counters, so a frame of the other one would look new
            raise FrameError(Rejection.OTHER_STREAM)
        if header.receiver != self.me and not (is_direct and header.receiver is None):
            raise FrameError(Rejection.OTHER_RECEIVER)
        assert header.sender is not None, "a neighbour, or the master"
        reassembler = self._reassembler if is_direct else incoming.reassembler
        whole = reassembler.add_piece(header, body)
        if whole is None:
            if header.kind != Kind.CONTROL:
                self._arriving[header.sender] = reassembler.arriving_bytes
            return None
        self._arriving.pop(header.sender, None)
        return header.sender, decode_untrusted(header.kind, whole)

    def wake(self) -> None:
        """Wake a thread blocked in ``receive``. Thread-safe."""
        self.transport.wake()

    def arriving(self) -> list[tuple[NodeId, int]]:
        """Return (neighbour, bytes so far) of each data message that is partly received.

        Messages of which nothing has arrived since the last call are left out.
        """
        arriving, self._arriving = list(self._arriving.items()), {}
        return arriving

    def _open_direct(self, frame: bytes) -> tuple[None, Message] | None:
        """Decrypt and check a frame of the join stream; return (None, message) if now complete."""
        header, body = self._seal.open_untrusted(frame)
        if header.sender is not None:
            raise FrameError(Rejection.NOT_DIRECT)
        whole = self._direct_receiver.add_frame(header, body)
        if whole is None:
            return None
        message = decode_untrusted(header.kind, whole)
        if not isinstance(message, Direct):
            raise FrameError(Rejection.NOT_DIRECT)
        if isinstance(message, Join):
            self._replies.note_request(message.address)
        return None, message

    def replace_transport(self, open_transport: Callable[[], Transport]) -> None:
        """Continue over a new transport, without edges and streams but with all counters.

        The join stream's counters are also kept, so that recorded messages are still rejected.
        """
        self.close()
        self.transport = open_transport()

    def close(self) -> None:
        """Close all edges and the transport."""
        self._outgoing.clear()
        for stream in list(self._incoming):
            self._remove_incoming(stream)
        self._replies = ReplyOutboxes(self._open_reply_sender)
        self._own_address = self._to_master = self._join_stream = None
        self.transport.close()


def _rejection_from(error: WireError) -> Rejection:
    """Return the kind of rejection to count for an error."""
    return Rejection(error.rejection) if isinstance(error, FrameError) else Rejection.NO_MESSAGE


def _stream_numbers(address: Address) -> tuple[int, int]:
    """Return the numbers of the control and the data stream of an address."""
    return address.control_stream, address.data_stream


def _local_address(address: Address) -> Address:
    """Return the address that a neighbour on the same media driver uses."""
    return Address(
        address.host,
        address.port,
        address.control_stream + LOCAL_STREAM_OFFSET,
        address.data_stream + LOCAL_STREAM_OFFSET,
    )
