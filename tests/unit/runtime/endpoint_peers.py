"""Message endpoints in one process, over a transport in memory, and messages to send with them."""

from __future__ import annotations

import secrets

from benchmarks.memory_transport import MemoryNetwork, MemoryTransport
from sparkstrom.base.identity import MASTER, Endpoint, NodeId
from sparkstrom.codec import sealed_frames as frames
from sparkstrom.codec.messages import (
    Address,
    CommitsRequest,
    Join,
    Message,
    Payload,
    Update,
    Welcome,
)
from sparkstrom.codec.sealed_frames import KEY_BYTES, Header, Seal
from sparkstrom.codec.wire import encode
from sparkstrom.protocol.common.events_and_effects import SendToProcess
from sparkstrom.runtime.message_endpoint import MessageEndpoint

KEY, JOB = bytes(range(KEY_BYTES)), 5
LOBBY = 77


class RecordingSeal(Seal):
    """A cipher that records the nonce of each frame that it encrypts."""

    def __init__(self) -> None:
        super().__init__(KEY, JOB)
        self.nonces: list[bytes] = []

    def close(self, header: Header, body: bytes, token: int = 0) -> bytes:
        self.nonces.append(frames._nonce(header))
        return super().close(header, body, token)


class Peer:
    """A message endpoint with its transport and the address where it listens for its parent."""

    def __init__(
        self,
        network: MemoryNetwork,
        me: NodeId | None,
        stream: int,
        chunk: int = 65_536,
        beside: MemoryTransport | None = None,
    ) -> None:
        self.transport = network.open(beside=beside)
        self.seal, self.token = RecordingSeal(), secrets.randbits(63)
        self.room = MessageEndpoint(
            self.transport,
            self.seal,
            me=me,
            token=self.token,
            message_bytes_max=100_000,
            chunk_bytes_max=chunk,
        )
        self.address = self.at(stream)

    def at(self, stream: int) -> Address:
        """Return the address of ``stream`` and the next one on this transport."""
        here = self.transport.endpoint
        return Address(here.host, here.port, stream, stream + 1)

    def answer(
        self, to: Peer, message: Message, node: int | None = None, at: Address | None = None
    ) -> None:
        """As the master, queue a direct message for ``to``, at its own address or at ``at``."""
        self.room.send_to_process(SendToProcess(at or to.address, to.token, message, node))

    def got(self) -> list[tuple[NodeId | None, Message]]:
        """Return the received messages, each with its sender."""
        return list(self.room.receive(0.0))


def open_edge_between(parent: Peer, node: Peer, edge: int) -> Address:
    """Open an edge at both ends; return the address where the parent receives on it."""
    up = parent.at(1000 + 4 * edge)
    parent.room.open_edge(node.room.me, edge, up, node.address)
    node.room.open_edge(parent.room.me, edge, node.address, up)
    return up


def make_update(seq: int = 1, payload: bytes = b"bits", origin: int = 7) -> Update:
    """Return an update of node ``origin``."""
    return Update(
        origin=origin,
        seq=seq,
        seen=0,
        epoch=0,
        batch=1,
        steps=1,
        payload=Payload(form=1, tau_quanta=2, count=1, data=payload),
    )


def make_join_request(address: Address, **fields: object) -> Join:
    """Return a join request from ``address``; ``fields`` replaces fields of it."""
    given = {
        "token": 1, "count": 0, "request": 1, "partition": 0, "attempt": 0, "rows": 1,
        "checksum": 1, "batches": 1, "pid": 1, "address": address, "host": "h", "executor": "e",
        "version": "v", "alone": False,
    }  # fmt: skip
    return Join(**(given | fields))  # type: ignore[arg-type]


def make_welcome(node: int) -> Welcome:
    """Return the master's answer that admits a process as ``node``."""
    return Welcome(
        token=1, count=0, request=1, node=node, parent=MASTER, edge=3, up=Address("h", 1, 1, 2),
        chunks=1, closed=[], epoch=0, batch=0, steps=0, grants=[],
    )  # fmt: skip


def send_raw_frames(office: Peer, at: Address, *frame: bytes, control: bool = True) -> None:
    """Send raw frames to a stream of this address, past the office's own endpoint."""
    stream = at.control_stream if control else at.data_stream
    sender = office.transport.open_sender(Endpoint(at.host, at.port), stream, control=control)
    sender.offer(frame)


HEAD = Header(kind=1, sender=7, receiver=MASTER, edge=3, counter=1, piece=0, pieces=1)
ASK = encode(CommitsRequest(1))[1]
