"""UDP between all processes of a group, by plain sockets: who hears whom, how soon, how fast.

Plain datagrams, where training has Aeron's: an Aeron edge needs both directions to come up at all,
so it cannot say which one a firewall drops, nor whether only long datagrams are lost. These are of
Aeron's lengths, between the same addresses and ports, and a probe counts what *arrives*: each
direction of a pair is told by its receiver.

    ping     to each peer, short, then in Aeron's length with and without leave to cut it up
    pong     the short answer, which gives the round trip
    go       "send me a train of datagrams": by what arrives of it, how fast the way is
    train    at most TRAIN_BYTES within TRAIN_S, and one to each peer
    bye      "I have seen all that I wanted"

One thread, no retransmission beyond asking again; nothing here waits longer than the deadline.

Each header is authenticated, for its receiver, under the measurement's token, which is never sent.
A pong has the clock of a ping that its receiver has sent, and so has a go: the newest ping's from
whom it asks. So strangers get no answer, a recording has nobody send a train, and what a process
sends is bounded, whatever arrives: short answers to what is longer, and TRAIN_BYTES to each peer.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from sparkstrom.base.errors import SetupError
from sparkstrom.base.identity import Endpoint

TOKEN_BYTES = 16
TICK_S = 0.02
ASK_S = 0.1  # until a ping or a go that was not answered is repeated
PONGS = 5  # round trips of each peer; the shortest counts
TRAIN_BYTES, TRAIN_S = 4 << 20, 0.2
TRAIN_PATIENCE_S, TRAIN_GAP_S = 0.6, 0.15  # until its first datagram; after its last one
BURST = 32  # datagrams that are sent before the next look at what has arrived
READS_MAX = 512
BIND_S = 5.0  # a media driver that ends may keep the port so long
RECEIVE_BUFFER = 4 << 20

DONT_CUT, MAY_CUT = 3, 0  # IP_PMTUDISC_PROBE, IP_PMTUDISC_DONT
IP_MTU_DISCOVER, IPV6_MTU_DISCOVER = 10, 23  # Linux; Python does not name them

# u8[16] proof | u8 kind | u16 sender | u16 announced length | u64 a clock, ns | padding
HEADER = struct.Struct("<16sBHHQ")
PROOF_BYTES = 16  # of the rest of the header and the receiver, under the token
PROVED = struct.Struct("<BHHQH")
PINGS_MAX = 256  # of one peer that may still be answered


class DatagramKind(enum.IntEnum):
    """What a datagram is."""

    PING = 1  # short
    WHOLE = 2  # a ping of Aeron's length that nobody may cut up
    PIECES = 3  # one that may be cut up
    PONG = 4
    GO = 5
    TRAIN = 6
    BYE = 7


@dataclass(slots=True)
class HeardOf:
    """What one process saw of one peer."""

    pinged: bool = False  # its pings arrive here
    whole: bool = False  # and in Aeron's length
    pieces: bool = False  # or only where they may be cut up
    round_trip_s: float | None = None  # there and back
    bytes_s: float | None = None  # from there to here
    bye: bool = False


@dataclass(frozen=True, slots=True)
class ProbeGroup:
    """Who probes: all processes, each by its place in ``endpoints``."""

    endpoints: tuple[Endpoint, ...]
    token: bytes  # of this measurement, and secret: what others send is not counted
    seconds: float  # that it takes at most


@dataclass(slots=True)
class _Train:
    """One that was asked for: its bytes after the first datagram, and when they came."""

    peer: int
    asked_s: float
    began_s: float = 0.0
    last_s: float = 0.0
    received: int = -1  # -1: nothing yet

    def take(self, length: int, now_s: float) -> None:
        if self.received < 0:
            self.received, self.began_s = 0, now_s
        else:
            self.received += length
        self.last_s = now_s

    def is_over(self, now_s: float) -> bool:
        if self.received < 0:
            return now_s - self.asked_s > TRAIN_PATIENCE_S
        return now_s - self.last_s > TRAIN_GAP_S or now_s - self.began_s > 2 * TRAIN_S

    def bytes_s(self) -> float | None:
        passed_s = self.last_s - self.began_s
        return self.received / passed_s if self.received > 0 and passed_s > 0 else None


@dataclass(slots=True)
class _Sending:
    """A train under way to a peer."""

    peer: int
    until_s: float
    left: int = TRAIN_BYTES


@dataclass(slots=True)
class _Asked:
    """How often a peer was pinged, and what came back."""

    pongs: int = 0
    next_s: float = 0.0
    sent_ns: deque[int] = field(default_factory=lambda: deque(maxlen=PINGS_MAX))  # of short pings
    lengths: set[DatagramKind] = field(default_factory=set)


class UdpProbe:
    """One process's part; a context, whose beginning binds the endpoint."""

    def __init__(self, group: ProbeGroup, own: int, length_to: Callable[[Endpoint], int]) -> None:
        """``length_to``: of Aeron's datagrams to a peer."""
        self._group, self._own = group, own
        self._lengths = [length_to(endpoint) for endpoint in group.endpoints]
        self._peers = [n for n in range(len(group.endpoints)) if n != own]
        # Each begins with its next one, so that not all ask the same one for a train at once.
        self._peers = [n for n in self._peers if n > own] + [n for n in self._peers if n < own]
        self.heard = {peer: HeardOf() for peer in self._peers}
        self._asked = {peer: _Asked() for peer in self._peers}
        self._wanted = list(self._peers)  # trains that are still to be asked for
        self._train: _Train | None = None
        self._sending: list[_Sending] = []
        self._sent_to: set[int] = set()  # peers that have had their train
        self._newest_ns: dict[int, int] = {}  # peer -> the clock of its newest ping
        self._bye_s = 0.0
        self._socket: socket.socket | None = None

    def __enter__(self) -> UdpProbe:
        self._socket = bound(self._group.endpoints[self._own])
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._socket is not None
        self._socket.close()

    def run(self, stopped: Callable[[], bool] = lambda: False) -> dict[int, HeardOf]:
        """Probe until all is known, the deadline is over or ``stopped``; by peer, what was heard.

        Whoever is done goes on answering until the others are.
        """
        self._forget_what_waited()
        end_s = time.monotonic() + self._group.seconds
        while (now_s := time.monotonic()) < end_s and not stopped():
            self._ask(now_s)
            self._go_on_sending(now_s)
            self._take()
            if self._is_done() and all(heard.bye for heard in self.heard.values()):
                self._say_bye(time.monotonic(), urgently=True)
                break
        return self.heard

    def _is_done(self) -> bool:
        knows = all(asked.pongs >= PONGS for asked in self._asked.values())
        return knows and not self._wanted and self._train is None

    # -- asking ----------------------------------------------------------------------------------

    def _ask(self, now_s: float) -> None:
        for peer, asked in self._asked.items():
            if asked.pongs < PONGS and now_s >= asked.next_s:
                asked.next_s = now_s + (ASK_S if asked.pongs == 0 else TICK_S)
                self._ping(peer)
        self._ask_for_train(now_s)
        if self._is_done():
            self._say_bye(now_s)

    def _ping(self, peer: int) -> None:
        stamp_ns = time.monotonic_ns()
        self._asked[peer].sent_ns.append(stamp_ns)
        self._send(peer, DatagramKind.PING, stamp_ns=stamp_ns)
        self._send(peer, DatagramKind.PIECES, self._lengths[peer])
        self._allow_cutting(False)
        self._send(peer, DatagramKind.WHOLE, self._lengths[peer])
        self._allow_cutting(True)

    def _ask_for_train(self, now_s: float) -> None:
        if self._train is not None and self._train.is_over(now_s):
            self.heard[self._train.peer].bytes_s = self._train.bytes_s()
            self._train = None
        if self._train is None:
            reached = [peer for peer in self._wanted if self._asked[peer].pongs >= PONGS]
            reached = [peer for peer in reached if peer in self._newest_ns]
            if reached:
                self._wanted.remove(reached[0])
                self._train = _Train(reached[0], now_s)
                self._send(reached[0], DatagramKind.GO, stamp_ns=self._newest_ns[reached[0]])

    def _say_bye(self, now_s: float, urgently: bool = False) -> None:
        if urgently or now_s >= self._bye_s:
            self._bye_s = now_s + ASK_S
            for peer in self._peers:
                self._send(peer, DatagramKind.BYE)

    def _go_on_sending(self, now_s: float) -> None:
        for sending in list(self._sending):
            for _ in range(BURST):
                if sending.left <= 0 or now_s > sending.until_s:
                    self._sending.remove(sending)
                    break
                if not self._send(sending.peer, DatagramKind.TRAIN, self._lengths[sending.peer]):
                    break  # the socket is full
                sending.left -= self._lengths[sending.peer]

    def _send(self, peer: int, kind: DatagramKind, length: int = 0, stamp_ns: int = 0) -> bool:
        """Whether it went; one that the interface does not take is one that does not arrive."""
        assert self._socket is not None
        stamp_ns = stamp_ns or time.monotonic_ns()
        proof = self._proof(kind, self._own, length, stamp_ns, peer)
        header = HEADER.pack(proof, kind, self._own, length, stamp_ns)
        endpoint = self._group.endpoints[peer]
        try:
            self._socket.sendto(header.ljust(length, b"\0"), (endpoint.host, endpoint.port))
        except OSError:  # too long for the interface, no route, or full: the receiver's word counts
            return False
        return True

    def _proof(self, kind: int, sender: int, length: int, stamp_ns: int, receiver: int) -> bytes:
        said = PROVED.pack(kind, sender, length, stamp_ns, receiver)
        return hashlib.blake2b(said, digest_size=PROOF_BYTES, key=self._group.token).digest()

    def _allow_cutting(self, allowed: bool) -> None:
        assert self._socket is not None
        how = MAY_CUT if allowed else DONT_CUT
        if self._socket.family == socket.AF_INET6:
            self._socket.setsockopt(socket.IPPROTO_IPV6, IPV6_MTU_DISCOVER, how)
        else:
            self._socket.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, how)

    # -- what arrives ----------------------------------------------------------------------------

    def _forget_what_waited(self) -> None:
        """Pings that came before the beginning would be answered late; they are repeated."""
        assert self._socket is not None
        for _ in range(READS_MAX):
            try:
                self._socket.recv(0)
            except BlockingIOError:
                return

    def _take(self) -> None:
        assert self._socket is not None
        wait_s = 0.0 if self._sending else TICK_S
        if not select.select([self._socket], [], [], wait_s)[0]:
            return
        for _ in range(READS_MAX):
            try:
                datagram = self._socket.recv(65_536)
            except BlockingIOError:
                return
            self._on_datagram(datagram)

    def _on_datagram(self, datagram: bytes) -> None:
        if len(datagram) < HEADER.size:
            return
        proof, kind, sender, length, stamp_ns = HEADER.unpack_from(datagram)
        ours = self._proof(kind, sender, length, stamp_ns, self._own)
        if not hmac.compare_digest(proof, ours) or sender not in self.heard:
            return  # somebody else's
        if len(datagram) < length:
            return  # cut on its way
        heard = self.heard[sender]
        if kind == DatagramKind.TRAIN:
            if self._train is not None and self._train.peer == sender:
                self._train.take(len(datagram), time.monotonic())
        elif kind == DatagramKind.GO:
            if stamp_ns in self._asked[sender].sent_ns and sender not in self._sent_to:
                self._sent_to.add(sender)
                self._sending.append(_Sending(sender, time.monotonic() + TRAIN_S))
        elif kind == DatagramKind.PONG and stamp_ns in self._asked[sender].sent_ns:
            passed_s = (time.monotonic_ns() - stamp_ns) / 1e9
            heard.round_trip_s = min(passed_s, heard.round_trip_s or passed_s)
            self._asked[sender].pongs += 1
        elif kind == DatagramKind.BYE:
            heard.bye = True
        elif kind == DatagramKind.PING:
            heard.pinged = True
            self._newest_ns[sender] = max(stamp_ns, self._newest_ns.get(sender, 0))
            self._send(sender, DatagramKind.PONG, stamp_ns=stamp_ns)
        heard.whole |= kind == DatagramKind.WHOLE
        heard.pieces |= kind == DatagramKind.PIECES


def bound(endpoint: Endpoint) -> socket.socket:
    """A socket there. Raise SetupError where the port stays taken or the address is not ours."""
    family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
    end_s = time.monotonic() + BIND_S
    made = socket.socket(family, socket.SOCK_DGRAM)
    made.setblocking(False)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
    while True:
        try:
            made.bind((endpoint.host, endpoint.port))
            return made
        except OSError as error:
            if time.monotonic() > end_s:
                made.close()
                raise SetupError(
                    f"UDP port {endpoint} on {socket.gethostname()} cannot be bound: "
                    f"{error.strerror}; end the program that has it, or choose another port_range"
                ) from error
        time.sleep(TICK_S)
