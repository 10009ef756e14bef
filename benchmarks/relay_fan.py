"""What a relay pays for its children, on one core: a commit, or a sum of commits, for each of them.

    python -m benchmarks.relay_fan --children 16 --update-bytes 65536 --json

One object. The machine and the message endpoint are those of production, over memory; the children
take frames and throw them away. Times are CPU time in milliseconds: a commit's from its frame to
those of all children, a sum's from the machine's wish. Every ``x_`` figure is the median of the
ratios of 15 pairs, measured in turns.

    commit_ms             received, opened, decoded, numbered in the log, sealed for all children
    commit_x_each         the same, over encoding and cutting the body for each child
    commit_x_sealing      the same, over sealing its frames alone: what AES takes
    sum_ms, sum_x_each    a sum of 8 commits that all children get; over summing for each child
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from statistics import median

import numpy as np

from benchmarks.memory_transport import MemoryNetwork, MemoryTransport
from sparkstrom.base.identity import MASTER
from sparkstrom.codec.messages import (
    Address,
    Adopt,
    Attach,
    AttachReply,
    Commit,
    Heartbeat,
    MergedRange,
    Message,
    Payload,
    Welcome,
)
from sparkstrom.codec.sealed_frames import KEY_BYTES, Header, Seal, split_body
from sparkstrom.codec.wire import Kind
from sparkstrom.encoding.encoder import Encoder
from sparkstrom.encoding.grid import quantum
from sparkstrom.encoding.thresholds import FixedThreshold
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.worker.node import Identity, Node, NodeLimits
from sparkstrom.runtime.message_endpoint import EncodingCache, MergeCache, MessageEndpoint
from sparkstrom.runtime.theta import Theta

PAIRS, ROUNDS = 15, 20
N_PARAMS, K, TAU = 1_000_000, 20, 2**-10
COMMITS_IN_SUM = 8
RELAY, FIRST_CHILD = 1, 100
CHUNK_BYTES_MAX = 1 << 20


class EncodedForEach(EncodingCache):
    """Remembers nothing."""

    def encode(self, message: Message, piece_bytes: int) -> tuple[Kind, list[bytes]]:
        """Encode a message anew for each child, without the cache."""
        self.clear()
        return super().encode(message, piece_bytes)


class SummedForEach(MergeCache):
    """Remembers nothing."""

    def merge(self, effect: ev.SendMerged) -> MergedRange:
        """Sum the updates anew for each child, without the cache."""
        self.clear()
        return super().merge(effect)


class Relay:
    """A worker with children, its parent, and what it wants performed as its thread would."""

    def __init__(self, children: int) -> None:
        network, self.seal = MemoryNetwork(), Seal(bytes(KEY_BYTES), 1)
        self.node = Node(_identity(), NodeLimits(), 0.0)
        self.transport, self._transports = network.open(), [network.open()]
        self.mail, self._parent = (
            self._message_endpoint(self.transport, RELAY),
            self._message_endpoint(self._above, MASTER),
        )
        self.sums = MergeCache(Theta(N_PARAMS, K).merge)
        self._commit = 0
        self._take_place()
        for child in range(FIRST_CHILD, FIRST_CHILD + children):
            self._adopt(child, network.open())

    @property
    def _above(self) -> MemoryTransport:
        return self._transports[0]

    def _message_endpoint(self, transport: MemoryTransport, me: int) -> MessageEndpoint:
        return MessageEndpoint(
            transport, self.seal, me=me, token=1, message_bytes_max=1 << 26,
            chunk_bytes_max=CHUNK_BYTES_MAX,
        )  # fmt: skip

    def _take_place(self) -> None:
        here, up = _at(self.transport, 10), _at(self._above, 10)
        self.mail.listen(here)
        self._parent.open_edge(RELAY, 1, up, here)
        self.step(ev.StreamsOpened(here))
        self.step(ev.Received(MASTER, Welcome(
            token=1, count=1, request=1, node=RELAY, parent=MASTER, edge=1, up=up, chunks=1,
            closed=[], epoch=0, batch=0, steps=0, grants=[],
        )))  # fmt: skip
        self.step(ev.Received(MASTER, AttachReply(base=0, snapshot=False, last=[])))
        self.step(ev.ReplicaInstalled())
        self.step(ev.CommitApplied(0))

    def _adopt(self, child: int, transport: MemoryTransport) -> None:
        self._transports.append(transport)
        peer = _at(transport, 10)
        transport.open_receiver(peer.control_stream)
        transport.open_receiver(peer.data_stream)
        local = _at(self.transport, 10 * child)
        self.step(ev.Received(MASTER, Adopt(node=child, edge=child, local=local, peer=peer)))
        attach = Attach(have=0, whole=True, catching=False, ids=[child])
        self.step(ev.Received(child, attach))

    # -- as the node's thread --------------------------------------------------------------------

    def step(self, event: ev.Event) -> None:
        """Hand an event to the relay's node, and perform what follows."""
        for effect in self.node.step(event, 0.0):
            self.perform(effect)

    def perform(self, effect: ev.Effect) -> None:
        """Perform an effect: put messages into the mail."""
        match effect:
            case ev.Send(to=to, message=message):
                self.mail.send(to, message)
            case ev.SendMerged(to=to):
                self.mail.send(to, self.sums.merge(effect))
            case ev.OpenEdge(node=node, edge=edge, local=local, peer=peer):
                self.mail.open_edge(node, edge, local, peer)
            case _:
                pass  # for its trainer, or the master

    def flush(self) -> None:
        """Send all mail to the children."""
        self.sums.clear()
        self.mail.flush()
        assert not self.mail.waiting, "the children take all at once"

    def take(self) -> None:
        """One duty cycle with what has come."""
        for sender, message in self.mail.receive(0.0):
            self.step(ev.Received(sender, message))
        self.flush()

    # -- its neighbours --------------------------------------------------------------------------

    def feed(self, data: bytes) -> None:
        """Its parent sends another commit."""
        self._commit += 1
        payload = Payload(form=1, tau_quanta=2, count=1, data=data)
        commit = Commit(commit=self._commit, origin=9, seq=self._commit, payload=payload)
        self._parent.send(RELAY, commit)
        self._parent.flush()

    def rest(self) -> None:
        """The neighbours have taken all that came, and say so."""
        for transport in self._transports:
            transport.poll(0.0)
        for child in self.node.children.by_node.values():
            assert child.sent == self._commit, "each child gets each commit"
            report = Heartbeat(
                received=child.sent,
                bytes_received=child.link.sent,
                catching=False,
                stamp=0,
                statuses=[],
            )
            self.step(ev.Received(child.node, report))
        self.flush()
        for transport in self._transports:
            transport.poll(0.0)


def _identity() -> Identity:
    return Identity(
        token=1, partition=0, attempt=1, rows=1, checksum=1, batches=1, host="h", executor="e",
        pid=1, version="v", whole=True,
    )  # fmt: skip


def _at(transport: MemoryTransport, stream: int) -> Address:
    return Address(transport.endpoint.host, transport.endpoint.port, stream, stream + 1)


# -- figures -----------------------------------------------------------------------------------


def commit_ms(relay: Relay, data: bytes) -> float:
    """CPU time of one commit, the mean of some."""
    spent_s = 0.0
    for _ in range(ROUNDS):
        relay.feed(data)
        began_s = time.thread_time()
        relay.take()
        spent_s += time.thread_time() - began_s
        relay.rest()
    return 1000 * spent_s / ROUNDS


def sealing_ms(relay: Relay, data: bytes) -> float:
    """CPU time of sealing that commit for all children, and nothing else."""
    pieces = split_body(bytes(36) + data, relay.transport.max_frame_bytes - 64)
    began_s = time.thread_time()
    for counter in range(ROUNDS):
        for child in relay.node.children.by_node:
            for i, piece in enumerate(pieces):
                head = Header(Kind.COMMITTED, RELAY, child, child, counter, i, len(pieces))
                relay.seal.close(head, piece)
    return 1000 * (time.thread_time() - began_s) / ROUNDS


def sum_ms(relay: Relay, entries: tuple[Commit, ...]) -> float:
    """CPU time of one sum for all children."""
    last, count = [(9, len(entries))], sum(entry.payload.count for entry in entries)
    began_s = time.thread_time()
    for child in relay.node.children.by_node:
        relay.perform(ev.SendMerged(child, 0, len(entries), last, count, entries))
    relay.flush()
    spent_s = time.thread_time() - began_s
    relay.rest()
    return 1000 * spent_s


def updates(size: int) -> tuple[Commit, ...]:
    """Commits of about so many bytes: a hit in gaps takes some."""
    random, made = np.random.default_rng(1), []
    density = size / N_PARAMS
    for commit in range(1, COMMITS_IN_SUM + 1):
        learnt = np.where(random.random(N_PARAMS) < density, TAU, 0).astype(np.float32)
        encoder = Encoder(N_PARAMS, K, FixedThreshold(TAU))
        one = encoder.publish(learnt, np.zeros(N_PARAMS, np.float32))
        assert one is not None
        payload = Payload(int(one.form), one.tau_quanta, one.count, one.payload)
        made.append(Commit(commit=commit, origin=9, seq=commit, payload=payload))
    return tuple(made)


def compared(one: Callable[[], float], other: Callable[[], float]) -> tuple[float, float]:
    """Milliseconds of the one, and its ratio to the other: medians of pairs."""
    pairs = [(one(), other()) for _ in range(PAIRS)]
    return median(a for a, _ in pairs), median(a / b for a, b in pairs)


def figures(children: int, update_bytes: int) -> dict[str, float]:
    """All of them."""
    assert quantum(K) <= TAU, "tau is on the grid"
    once, each = Relay(children), Relay(children)
    each.mail.encodings = EncodedForEach()
    each.sums = SummedForEach(Theta(N_PARAMS, K).merge)
    data = np.random.default_rng(1).bytes(update_bytes)
    entries = updates(update_bytes)
    for relay in (once, each):
        commit_ms(relay, data)
        sum_ms(relay, entries)
    spent, x_each = compared(lambda: commit_ms(once, data), lambda: commit_ms(each, data))
    _, x_sealing = compared(lambda: commit_ms(once, data), lambda: sealing_ms(once, data))
    summed, sum_x_each = compared(lambda: sum_ms(once, entries), lambda: sum_ms(each, entries))
    return {
        "children": children,
        "update_bytes": update_bytes,
        "commit_ms": spent,
        "commit_x_each": x_each,
        "commit_x_sealing": x_sealing,
        "sum_ms": summed,
        "sum_x_each": sum_x_each,
    }


def main(argv: list[str]) -> int:
    """Print one object, or one figure a line."""
    parser = argparse.ArgumentParser(description="What a relay pays for its children.")
    parser.add_argument("--children", type=int, default=16)
    parser.add_argument("--update-bytes", type=int, default=65_536)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args(argv)
    rounded = {k: round(v, 4) for k, v in figures(args.children, args.update_bytes).items()}
    lines = (f"{name:20} {value:.10g}" for name, value in rounded.items())
    print(json.dumps(rounded) if args.json else "\n".join(lines), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
