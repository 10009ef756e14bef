"""Processor time with which a relay forwards a commit, or a sum of commits, to its children.

    python -m benchmarks.relay_fan --children 16 --update-bytes 65536 --json

Prints one object. The relay runs the package's state machine and message endpoint over an
in-process transport; its children discard the frames. Times are milliseconds of processor time. A
commit's time lasts from receiving its frame until the frames of all children are sent, a sum's from
the state machine's effects on. Every ``x_`` figure is a median of the ratios of 15 pairs in turns.

    commit_ms             receive, decrypt, decode, append to the log, encrypt for all children
    commit_x_each         the same, relative to encoding and splitting the body for each child
    commit_x_sealing      the same, relative to encrypting the frames alone
    sum_ms, sum_x_each    send the same sum of 8 commits to all children; relative to summing for
                          each child
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
    """A cache that is cleared before each use, so that each child's message is encoded."""

    def encode(self, message: Message, piece_bytes: int) -> tuple[Kind, list[bytes]]:
        """Encode a message without the cache."""
        self.clear()
        return super().encode(message, piece_bytes)


class SummedForEach(MergeCache):
    """A cache that is cleared before each use, so that updates are summed for each child."""

    def merge(self, effect: ev.SendMerged) -> MergedRange:
        """Sum the updates without the cache."""
        self.clear()
        return super().merge(effect)


class Relay:
    """A worker's node with a parent and children; its effects are performed as in its thread."""

    def __init__(self, children: int) -> None:
        network, self.seal = MemoryNetwork(), Seal(bytes(KEY_BYTES), 1)
        self.node = Node(_make_identity(), NodeLimits(), 0.0)
        self.transport, self._transports = network.open(), [network.open()]
        self.endpoint, self._parent = (
            self._message_endpoint(self.transport, RELAY),
            self._message_endpoint(self._above, MASTER),
        )
        self.sums = MergeCache(Theta(N_PARAMS, K).merge)
        self._commit = 0
        self._join()
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

    def _join(self) -> None:
        here, up = _make_address(self.transport, 10), _make_address(self._above, 10)
        self.endpoint.listen(here)
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
        peer = _make_address(transport, 10)
        transport.open_receiver(peer.control_stream)
        transport.open_receiver(peer.data_stream)
        local = _make_address(self.transport, 10 * child)
        self.step(ev.Received(MASTER, Adopt(node=child, edge=child, local=local, peer=peer)))
        attach = Attach(have=0, whole=True, catching=False, ids=[child])
        self.step(ev.Received(child, attach))

    # -- as the node's thread --------------------------------------------------------------------

    def step(self, event: ev.Event) -> None:
        """Pass an event to the relay's node, and perform the effects."""
        for effect in self.node.step(event, 0.0):
            self.perform(effect)

    def perform(self, effect: ev.Effect) -> None:
        """Perform an effect that sends a message or opens an edge; ignore others."""
        match effect:
            case ev.Send(to=to, message=message):
                self.endpoint.send(to, message)
            case ev.SendMerged(to=to):
                self.endpoint.send(to, self.sums.merge(effect))
            case ev.OpenEdge(node=node, edge=edge, local=local, peer=peer):
                self.endpoint.open_edge(node, edge, local, peer)
            case _:
                pass  # for its trainer, or the master

    def flush(self) -> None:
        """Send all waiting messages to the children."""
        self.sums.clear()
        self.endpoint.flush()
        assert not self.endpoint.waiting, "the children take all at once"

    def handle_received(self) -> None:
        """Handle all received messages, and send what follows, as in one cycle of the thread."""
        for sender, message in self.endpoint.receive(0.0):
            self.step(ev.Received(sender, message))
        self.flush()

    # -- its neighbours --------------------------------------------------------------------------

    def send_commit(self, data: bytes) -> None:
        """Send another commit from the parent to the relay."""
        self._commit += 1
        payload = Payload(form=1, tau_quanta=2, count=1, data=data)
        commit = Commit(commit=self._commit, origin=9, seq=self._commit, payload=payload)
        self._parent.send(RELAY, commit)
        self._parent.flush()

    def acknowledge(self) -> None:
        """Discard the neighbours' frames; let all children acknowledge all commits."""
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


def _make_identity() -> Identity:
    return Identity(
        token=1, partition=0, attempt=1, rows=1, checksum=1, batches=1, host="h", executor="e",
        pid=1, version="v", whole=True,
    )  # fmt: skip


def _make_address(transport: MemoryTransport, stream: int) -> Address:
    return Address(transport.endpoint.host, transport.endpoint.port, stream, stream + 1)


# -- figures -----------------------------------------------------------------------------------


def measure_commit_ms(relay: Relay, data: bytes) -> float:
    """Return the processor time of a commit in milliseconds, the mean of ``ROUNDS`` commits."""
    spent_s = 0.0
    for _ in range(ROUNDS):
        relay.send_commit(data)
        began_s = time.thread_time()
        relay.handle_received()
        spent_s += time.thread_time() - began_s
        relay.acknowledge()
    return 1000 * spent_s / ROUNDS


def measure_sealing_ms(relay: Relay, data: bytes) -> float:
    """Return the processor time of encrypting a commit's frames for all children."""
    pieces = split_body(bytes(36) + data, relay.transport.max_frame_bytes - 64)
    began_s = time.thread_time()
    for counter in range(ROUNDS):
        for child in relay.node.children.by_node:
            for i, piece in enumerate(pieces):
                head = Header(Kind.COMMITTED, RELAY, child, child, counter, i, len(pieces))
                relay.seal.close(head, piece)
    return 1000 * (time.thread_time() - began_s) / ROUNDS


def measure_sum_ms(relay: Relay, entries: tuple[Commit, ...]) -> float:
    """Return the processor time of summing commits and sending the sum to all children."""
    last, count = [(9, len(entries))], sum(entry.payload.count for entry in entries)
    began_s = time.thread_time()
    for child in relay.node.children.by_node:
        relay.perform(ev.SendMerged(child, 0, len(entries), last, count, entries))
    relay.flush()
    spent_s = time.thread_time() - began_s
    relay.acknowledge()
    return 1000 * spent_s


def make_updates(size: int) -> tuple[Commit, ...]:
    """Return commits of the order of ``size`` bytes, with about one hit per byte."""
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


def compare(one: Callable[[], float], other: Callable[[], float]) -> tuple[float, float]:
    """Measure both in turns; return the medians of the first and of its ratio to the second."""
    pairs = [(one(), other()) for _ in range(PAIRS)]
    return median(a for a, _ in pairs), median(a / b for a, b in pairs)


def measure(children: int, update_bytes: int) -> dict[str, float]:
    """Measure everything, and return the figures."""
    assert quantum(K) <= TAU, "tau is on the grid"
    once, each = Relay(children), Relay(children)
    each.endpoint.encodings = EncodedForEach()
    each.sums = SummedForEach(Theta(N_PARAMS, K).merge)
    data = np.random.default_rng(1).bytes(update_bytes)
    entries = make_updates(update_bytes)
    for relay in (once, each):
        measure_commit_ms(relay, data)
        measure_sum_ms(relay, entries)
    spent, x_each = compare(
        lambda: measure_commit_ms(once, data), lambda: measure_commit_ms(each, data)
    )
    _, x_sealing = compare(
        lambda: measure_commit_ms(once, data), lambda: measure_sealing_ms(once, data)
    )
    summed, sum_x_each = compare(
        lambda: measure_sum_ms(once, entries), lambda: measure_sum_ms(each, entries)
    )
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
    """Print one JSON object, or a line for each figure."""
    parser = argparse.ArgumentParser(description="Processor time of a relay for its children.")
    parser.add_argument("--children", type=int, default=16, help="of the relay")
    parser.add_argument("--update-bytes", type=int, default=65_536, help="size of an update")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args(argv)
    rounded = {k: round(v, 4) for k, v in measure(args.children, args.update_bytes).items()}
    lines = (f"{name:20} {value:.10g}" for name, value in rounded.items())
    print(json.dumps(rounded) if args.json else "\n".join(lines), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
