"""Measure UDP between all processes of a group: reachability, round-trip time and throughput.

The probe sends plain datagrams, although training uses Aeron, because an Aeron stream connects only
if both directions work. Aeron thus cannot show which direction a firewall drops, or that only long
datagrams are lost. The probe's datagrams have Aeron's lengths, addresses and ports. Each direction
between two processes is reported by the receiver.

    ping     to each peer: short, then in Aeron's length with and without permission to fragment
    pong     short reply, which gives the round-trip time
    go       request to send a train (burst) of datagrams, whose arrival gives the throughput
    train    at most TRAIN_BYTES within TRAIN_S, one per peer
    bye      the sender needs nothing more

The probe runs in one thread, repeats unanswered requests, and never exceeds the deadline.

Every header is authenticated for its receiver with the measurement's secret token. A pong and a go
must contain the timestamp of a ping that their receiver has sent. So strangers get no reply, a
replayed recording triggers no train, and a process sends a bounded amount whatever arrives: short
replies to longer datagrams, and TRAIN_BYTES per peer.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from sparkstrom.base.descriptors import wait_until_readable
from sparkstrom.base.errors import SetupError
from sparkstrom.base.identity import Endpoint

TOKEN_BYTES = 16
TICK_S = 0.02  # longest wait for datagrams, and interval of pings
RETRY_S = 0.1  # interval of repeating an unanswered ping or go
PONGS_WANTED = 5  # round trips to measure per peer; the shortest one counts
TRAIN_BYTES, TRAIN_S = 4 << 20, 0.2
# A train with less of both, as when its sender is suspended after the first burst, shows only how
# fast a router's buffer passes a burst on.
MEASURED_BYTES_MIN, MEASURED_S_MIN = 128 << 10, 0.05
TRAIN_START_TIMEOUT_S = 0.6  # wait for a train's first datagram
TRAIN_GAP_TIMEOUT_S = 0.15  # wait for the next one
BURST_DATAGRAMS = 32  # datagrams to send before reading again
READS_MAX = 512  # datagrams to read before sending again
BIND_TIMEOUT_S = 5.0  # a media driver that exits can hold the port this long
RECEIVE_BUFFER_BYTES = 4 << 20

DONT_FRAGMENT, ALLOW_FRAGMENTATION = 3, 0  # IP_PMTUDISC_PROBE, IP_PMTUDISC_DONT
IP_MTU_DISCOVER, IPV6_MTU_DISCOVER = 10, 23  # Linux; Python does not name them

# u8[16] proof | u8 kind | u16 sender | u16 announced length | u64 timestamp, ns | padding
HEADER = struct.Struct("<16sBHHQ")
PROOF_BYTES = 16  # authenticates the rest of the header and the receiver, keyed by the token
PROOF_INPUT = struct.Struct("<BHHQH")
PENDING_PINGS_MAX = 256  # pings per peer whose reply is still accepted


class DatagramKind(enum.IntEnum):
    """The kinds of datagrams; the values are part of the datagrams."""

    PING = 1  # header only
    PING_UNFRAGMENTED = 2  # a ping of Aeron's length with the don't-fragment bit
    PING_FRAGMENTABLE = 3  # the same without that bit
    PONG = 4  # reply to a ping of the first kind
    GO = 5  # request for a train, a burst of datagrams
    TRAIN = 6  # one datagram of a train
    BYE = 7  # the sender needs nothing more


@dataclass(slots=True)
class PeerResult:
    """What one process has measured about one peer."""

    receives_pings: bool = False  # the peer's short pings arrive at this process
    receives_unfragmented: bool = False  # its long pings arrive unfragmented
    receives_fragmentable: bool = False  # its long pings arrive if they may be fragmented
    round_trip_s: float | None = None  # shortest round trip; None: not measured
    bytes_s: float | None = None  # throughput from the peer to this process; None: not measured
    has_finished: bool = False  # the peer needs nothing more from this process


@dataclass(frozen=True, slots=True)
class ProbeGroup:
    """The processes that probe each other; each one is identified by its index in ``endpoints``."""

    endpoints: tuple[Endpoint, ...]  # where each process receives
    token: bytes  # secret of this measurement; datagrams without proof of it are ignored
    seconds: float  # maximum duration of the whole measurement


@dataclass(slots=True)
class _IncomingTrain:
    """The part that has arrived of a train (burst of datagrams) that a peer was asked to send."""

    peer: int  # index of the sender
    requested_s: float  # monotonic time of the request
    began_s: float = 0.0  # arrival of the first datagram
    last_s: float = 0.0  # arrival of the newest datagram
    received: int = -1  # bytes after the first datagram; -1: none has arrived

    def record(self, length: int, now_s: float) -> None:
        """Record a datagram of ``length`` bytes; the first one only starts the clock."""
        if self.received < 0:
            self.received, self.began_s = 0, now_s
        else:
            self.received += length
        self.last_s = now_s

    def is_over(self, now_s: float) -> bool:
        """Return whether the train started too late, paused too long, or lasted too long."""
        if self.received < 0:
            return now_s - self.requested_s > TRAIN_START_TIMEOUT_S
        return now_s - self.last_s > TRAIN_GAP_TIMEOUT_S or now_s - self.began_s > 2 * TRAIN_S

    def bytes_s(self) -> float | None:
        """Return the throughput in bytes per second; None if too little arrived to measure it."""
        passed_s = self.last_s - self.began_s
        if self.received < MEASURED_BYTES_MIN and passed_s < MEASURED_S_MIN:
            return None
        return self.received / passed_s if self.received > 0 and passed_s > 0 else None


@dataclass(slots=True)
class _OutgoingTrain:
    """A train (burst of datagrams) that is being sent to a peer."""

    peer: int  # index of the receiver
    until_s: float  # monotonic deadline
    left: int = TRAIN_BYTES  # bytes to send


@dataclass(slots=True)
class _PingState:
    """How often a peer was pinged, and what came back."""

    pongs: int = 0  # replies received
    next_s: float = 0.0  # monotonic time of the next ping
    # Timestamps of recent short pings.
    sent_ns: deque[int] = field(default_factory=lambda: deque(maxlen=PENDING_PINGS_MAX))


class UdpProbe:
    """One process's part of the measurement. Entering the context binds the process's endpoint."""

    def __init__(
        self, group: ProbeGroup, index: int, datagram_bytes_to: Callable[[Endpoint], int]
    ) -> None:
        """Prepare to probe as process ``index`` of the group.

        ``datagram_bytes_to`` returns the length of Aeron's datagrams to an endpoint, in bytes.
        """
        self._group, self._index = group, index
        self._lengths = [datagram_bytes_to(endpoint) for endpoint in group.endpoints]
        self._peers = [n for n in range(len(group.endpoints)) if n != index]
        # Start with the next process, so that not all request a train from the same one.
        self._peers = [n for n in self._peers if n > index] + [n for n in self._peers if n < index]
        self.results = {peer: PeerResult() for peer in self._peers}
        self._ping_states = {peer: _PingState() for peer in self._peers}
        self._trains_wanted = list(self._peers)  # peers whose train is still to be requested
        self._incoming: _IncomingTrain | None = None
        self._outgoing: list[_OutgoingTrain] = []
        self._trains_sent: set[int] = set()  # peers that a train was sent to
        self._newest_ping_ns: dict[int, int] = {}  # peer -> timestamp of its newest ping
        self._next_bye_s = 0.0
        self._socket: socket.socket | None = None

    def __enter__(self) -> UdpProbe:
        """Bind the UDP socket."""
        self._socket = bind_socket(self._group.endpoints[self._index])
        return self

    def __exit__(self, *exc: object) -> None:
        """Close the UDP socket."""
        assert self._socket is not None
        self._socket.close()

    def run(self, stopped: Callable[[], bool] = lambda: False) -> dict[int, PeerResult]:
        """Probe until all is measured, the deadline has passed or ``stopped`` returns True.

        A process that has finished keeps replying until the others have finished too.

        Returns:
            The results for each peer, by its index in the group.
        """
        self._discard_queued()
        end_s = time.monotonic() + self._group.seconds
        while (now_s := time.monotonic()) < end_s and not stopped():
            self._send_due(now_s)
            self._send_trains(now_s)
            self._receive()
            if self._is_done() and all(result.has_finished for result in self.results.values()):
                self._send_bye(time.monotonic(), force=True)
                break
        return self.results

    def _is_done(self) -> bool:
        """Return whether all round trips are measured and no train (datagram burst) is awaited."""
        has_round_trips = all(state.pongs >= PONGS_WANTED for state in self._ping_states.values())
        return has_round_trips and not self._trains_wanted and self._incoming is None

    def _send_due(self, now_s: float) -> None:
        """Send the pings, train request and bye messages that are due at ``now_s``."""
        for peer, state in self._ping_states.items():
            if state.pongs < PONGS_WANTED and now_s >= state.next_s:
                state.next_s = now_s + (RETRY_S if state.pongs == 0 else TICK_S)
                self._ping(peer)
        self._ask_for_train(now_s)
        if self._is_done():
            self._send_bye(now_s)

    def _ping(self, peer: int) -> None:
        """Send a peer a short ping, and long ones with and without permission to fragment them."""
        stamp_ns = time.monotonic_ns()
        self._ping_states[peer].sent_ns.append(stamp_ns)
        self._send(peer, DatagramKind.PING, stamp_ns=stamp_ns)
        self._send(peer, DatagramKind.PING_FRAGMENTABLE, self._lengths[peer])
        self._allow_fragmentation(False)
        self._send(peer, DatagramKind.PING_UNFRAGMENTED, self._lengths[peer])
        self._allow_fragmentation(True)

    def _ask_for_train(self, now_s: float) -> None:
        """Finish the incoming train (burst of datagrams) if it is over, and request the next one.

        The next train is requested from a peer that has replied to enough pings.
        """
        if self._incoming is not None and self._incoming.is_over(now_s):
            self.results[self._incoming.peer].bytes_s = self._incoming.bytes_s()
            self._incoming = None
        if self._incoming is None:
            for peer in self._trains_wanted:
                states = self._ping_states
                if states[peer].pongs >= PONGS_WANTED and peer in self._newest_ping_ns:
                    self._trains_wanted.remove(peer)
                    self._incoming = _IncomingTrain(peer, now_s)
                    self._send(peer, DatagramKind.GO, stamp_ns=self._newest_ping_ns[peer])
                    break

    def _send_bye(self, now_s: float, force: bool = False) -> None:
        """Send a bye to all peers, at most once per RETRY_S unless ``force`` is True."""
        if force or now_s >= self._next_bye_s:
            self._next_bye_s = now_s + RETRY_S
            for peer in self._peers:
                self._send(peer, DatagramKind.BYE)

    def _send_trains(self, now_s: float) -> None:
        """Send the next datagrams of each outgoing train, as many as the socket accepts."""
        for train in list(self._outgoing):
            for _ in range(BURST_DATAGRAMS):
                if train.left <= 0 or now_s > train.until_s:
                    self._outgoing.remove(train)
                    break
                if not self._send(train.peer, DatagramKind.TRAIN, self._lengths[train.peer]):
                    break  # the socket's buffer is full
                train.left -= self._lengths[train.peer]

    def _send(self, peer: int, kind: DatagramKind, length: int = 0, stamp_ns: int = 0) -> bool:
        """Send a datagram, padded to ``length`` bytes; return whether the interface accepted it.

        ``stamp_ns`` is the timestamp to send; 0 means the current time.
        """
        assert self._socket is not None
        stamp_ns = stamp_ns or time.monotonic_ns()
        proof = self._proof(kind, self._index, length, stamp_ns, peer)
        header = HEADER.pack(proof, kind, self._index, length, stamp_ns)
        endpoint = self._group.endpoints[peer]
        try:
            self._socket.sendto(header.ljust(length, b"\0"), (endpoint.host, endpoint.port))
        except OSError:  # too long, no route, or a full buffer: the receiver reports what arrives
            return False
        return True

    def _proof(self, kind: int, sender: int, length: int, stamp_ns: int, receiver: int) -> bytes:
        """Return the authentication code of a header's fields for the process ``receiver``."""
        content = PROOF_INPUT.pack(kind, sender, length, stamp_ns, receiver)
        return hashlib.blake2b(content, digest_size=PROOF_BYTES, key=self._group.token).digest()

    def _allow_fragmentation(self, allowed: bool) -> None:
        """Set whether the network may fragment later datagrams, by their don't-fragment bit."""
        assert self._socket is not None
        mode = ALLOW_FRAGMENTATION if allowed else DONT_FRAGMENT
        if self._socket.family == socket.AF_INET6:
            self._socket.setsockopt(socket.IPPROTO_IPV6, IPV6_MTU_DISCOVER, mode)
        else:
            self._socket.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, mode)

    def _discard_queued(self) -> None:
        """Discard datagrams from before the start: late replies would distort round-trip times."""
        assert self._socket is not None
        for _ in range(RECEIVE_BUFFER_BYTES // HEADER.size):  # more do not fit into the buffer
            try:
                self._socket.recv(1)  # recv(0) would leave the datagram in the buffer
            except BlockingIOError:
                return

    def _receive(self) -> None:
        """Process datagrams that have arrived, waiting at most one tick for the first."""
        assert self._socket is not None
        wait_s = 0.0 if self._outgoing else TICK_S
        if not wait_until_readable(self._socket, wait_s):
            return
        for _ in range(READS_MAX):
            try:
                datagram = self._socket.recv(65_536)
            except BlockingIOError:
                return
            self._on_datagram(datagram)

    def _on_datagram(self, datagram: bytes) -> None:
        """Record what a datagram shows, and reply to it.

        Ignore a datagram that is truncated, or not authentic.
        """
        if len(datagram) < HEADER.size:
            return
        proof, kind, sender, length, stamp_ns = HEADER.unpack_from(datagram)
        expected = self._proof(kind, sender, length, stamp_ns, self._index)
        if not hmac.compare_digest(proof, expected) or sender not in self.results:
            return  # not from this group
        if len(datagram) < length:
            return  # truncated in transit
        result = self.results[sender]
        if kind == DatagramKind.TRAIN:
            if self._incoming is not None and self._incoming.peer == sender:
                self._incoming.record(len(datagram), time.monotonic())
        elif kind == DatagramKind.GO:
            if stamp_ns in self._ping_states[sender].sent_ns and sender not in self._trains_sent:
                self._trains_sent.add(sender)
                self._outgoing.append(_OutgoingTrain(sender, time.monotonic() + TRAIN_S))
        elif kind == DatagramKind.PONG and stamp_ns in self._ping_states[sender].sent_ns:
            passed_s = (time.monotonic_ns() - stamp_ns) / 1e9
            result.round_trip_s = min(passed_s, result.round_trip_s or passed_s)
            self._ping_states[sender].pongs += 1
        elif kind == DatagramKind.BYE:
            result.has_finished = True
        elif kind == DatagramKind.PING:
            result.receives_pings = True
            self._newest_ping_ns[sender] = max(stamp_ns, self._newest_ping_ns.get(sender, 0))
            self._send(sender, DatagramKind.PONG, stamp_ns=stamp_ns)
        result.receives_unfragmented |= kind == DatagramKind.PING_UNFRAGMENTED
        result.receives_fragmentable |= kind == DatagramKind.PING_FRAGMENTABLE


def bind_socket(endpoint: Endpoint) -> socket.socket:
    """Return a non-blocking UDP socket bound to ``endpoint``; retry for ``BIND_TIMEOUT_S``.

    Raise SetupError if the port stays in use, or the address is not one of this host's.
    """
    family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
    end_s = time.monotonic() + BIND_TIMEOUT_S
    probe = socket.socket(family, socket.SOCK_DGRAM)
    probe.setblocking(False)
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
    while True:
        try:
            probe.bind((endpoint.host, endpoint.port))
            return probe
        except OSError as error:
            if time.monotonic() > end_s:
                probe.close()
                raise SetupError(
                    f"UDP port {endpoint} on {socket.gethostname()} cannot be bound: "
                    f"{error.strerror}; end the program that has it, or choose another port_range"
                ) from error
        time.sleep(TICK_S)
