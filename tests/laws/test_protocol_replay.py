"""Laws of the way to a child: commits, sums and chunks arrive once and in order, on any link."""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sparkstrom.codec.messages import (
    Address,
    Adopt,
    Attach,
    Chunk,
    Commit,
    Heartbeat,
    MergedRange,
    Payload,
    SnapshotRequired,
)
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.children import Child, Children, FlowLimits, Leases
from sparkstrom.protocol.common.commit_log import History, Log, entry_bytes, preceding_commit
from sparkstrom.protocol.common.flow_control import message_weight

LOG_BYTES = 1500
SERVING = FlowLimits(window_max=400, total_max=600, n_params=50, chunk_bytes=100)
NODES = (5, 6)
CHUNKS = 3
SPACING_S = 1.0  # between two requests of a child
PLACE = Address("h", 1, 1, 2)


class SimulatedChild:
    """A child: the messages under way to it and from it, in order, and what it has received."""

    def __init__(self) -> None:
        self.flying: deque[Commit | MergedRange | Chunk | SnapshotRequired] = deque()
        self.reports: deque[Heartbeat] = deque()
        self.received = self.taken = self.base = 0
        self.missing: set[int] = set()  # chunks of the snapshot that it fetches
        self.sums: list[MergedRange] = []
        self.chunks: list[Chunk] = []


class DownMachine(RuleBasedStateMachine):
    """A parent with its history, and two children, over ordered streams with any delay.

    A stream may break and be opened again; nothing else is ever lost.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.history = History(Log(LOG_BYTES), whole=True)
        self.children = Children(SERVING, self.history, Leases(10.0, 0.0))
        self.edge = 0
        self.below = {node: SimulatedChild() for node in NODES}
        for node in NODES:
            self.opens(node)

    def opens(self, node: int) -> None:
        """Open a new edge to a child, which attaches with its newest commit."""
        self.edge += 1
        mine = self.below[node]
        mine.flying.clear()
        mine.reports.clear()
        mine.taken = 0
        self.children.adopt(Adopt(node=node, edge=self.edge, local=PLACE, peer=PLACE), self.now_s)
        catching = bool(mine.missing)
        attach = Attach(have=mine.received, whole=not catching, catching=catching, ids=[node])
        effects = self.children.on_attach(self.children.by_node[node], attach, self.now_s)
        answer = self.children.by_node[node].answer
        assert answer is not None
        if answer.snapshot:
            self.begins(node, answer.base)
        self.perform(effects)

    def begins(self, node: int, base: int) -> None:
        """Begin a snapshot fetch of a child as of ``base``."""
        mine = self.below[node]
        mine.received = mine.base = base
        mine.missing = set(range(CHUNKS))
        mine.sums.clear()
        mine.chunks.clear()

    @rule(node=st.sampled_from(NODES))
    def asks_for_chunks(self, node: int) -> None:
        """Request all missing chunks; those under way arrive twice and count once."""
        for index in sorted(self.below[node].missing):
            child = self.children.by_node[node]
            self.perform(self.children.on_chunk_request(child, index, self.now_s))

    def perform(self, effects: list[ev.Effect]) -> None:
        """Put sent messages on their streams."""
        for effect in effects:
            match effect:
                case ev.Send(to=node, message=message):
                    if not isinstance(message, Commit | MergedRange | SnapshotRequired):
                        continue
                    self.below[node].flying.append(message)
                case ev.SendMerged(to=node):
                    merged = MergedRange(
                        after=effect.after, commit=effect.commit, last=effect.last,
                        count=effect.count, payload=b"",
                    )  # fmt: skip
                    singly = sum(message_weight(entry, 0) for entry in effect.entries)
                    assert message_weight(merged, 0) < singly
                    self.below[node].flying.append(merged)
                case ev.SendChunk(to=node, index=index):
                    chunk = Chunk(index=index, commit=self.history.applied, payload=b"")
                    self.below[node].flying.append(chunk)

    @rule(size=st.integers(0, 300), count=st.integers(0, 60), origin=st.integers(4, 6))
    def commit(self, size: int, count: int, origin: int) -> None:
        """Append a commit of ``size`` bytes and ``count`` entries, and serve the children."""
        head = self.history.log.head + 1
        self.history.append(
            Commit(
                commit=head,
                origin=origin,
                seq=head,
                payload=Payload(form=0, tau_quanta=2, count=count, data=b"x" * size),
            )
        )
        self.perform(self.children.feed_all(self.now_s))

    @rule(lag=st.integers(0, 3))
    def trainer_applies(self, lag: int) -> None:
        """Let the parent's replica apply all but the last ``lag`` commits."""
        self.history.applied = max(self.history.applied, self.history.log.head - lag)
        self.perform(self.children.feed_all(self.now_s))

    @rule(node=st.sampled_from(NODES), count=st.integers(1, 5))
    def arrives(self, node: int, count: int) -> None:
        for _ in range(min(count, len(self.below[node].flying))):
            self.take(node)

    def take(self, node: int) -> None:
        """Take the next message from a child's stream, and queue a heartbeat."""
        mine = self.below[node]
        message = mine.flying.popleft()
        if isinstance(message, SnapshotRequired):
            if message.base > mine.received:
                self.begins(node, message.base)
            return
        mine.taken += message_weight(message, SERVING.chunk_bytes)
        if isinstance(message, Chunk):
            assert message.commit <= mine.received, "a chunk comes after all that is in it"
            if message.commit >= mine.base:
                mine.missing.discard(message.index)
                mine.chunks.append(message)
        else:
            assert preceding_commit(message) == mine.received, "in order, each once, without a gap"
            mine.received = message.commit
            if isinstance(message, MergedRange):
                mine.sums.append(message)
        for merged in mine.sums:
            halves = [c for c in mine.chunks if merged.after < c.commit < merged.commit]
            assert not halves, "a chunk has all of a sum or nothing"
        catching = bool(mine.missing)
        mine.reports.append(
            Heartbeat(
                received=mine.received,
                bytes_received=mine.taken,
                catching=catching,
                stamp=0,
                statuses=[],
            )
        )

    @precondition(lambda self: any(b.reports for b in self.below.values()))
    @rule(node=st.sampled_from(NODES), skip=st.integers(0, 5))
    def acknowledges(self, node: int, skip: int) -> None:
        """Deliver a heartbeat of a child; ``skip`` older ones are replaced by it."""
        reports = self.below[node].reports
        if not reports:
            return
        for _ in range(min(skip, len(reports) - 1)):
            reports.popleft()
        child = self.children.by_node[node]
        self.perform(self.children.on_heartbeat(child, reports.popleft(), self.now_s))

    @rule(seconds=st.floats(0.0, 90.0))
    def time_passes(self, seconds: float) -> None:
        """Let time pass; the invariants show that nothing is sent twice."""
        self.now_s += seconds
        self.perform(self.children.feed_all(self.now_s))

    @rule(node=st.sampled_from(NODES))
    def breaks_off(self, node: int) -> None:
        """Break a child's streams and open a new edge."""
        self.opens(node)

    @rule(node=st.sampled_from(NODES))
    def takes_a_copy(self, node: int) -> None:
        """Let a child lose its replica but keep its commits, and attach again."""
        self.below[node].missing = set(range(CHUNKS))
        self.below[node].base = self.below[node].received
        self.below[node].sums.clear()
        self.below[node].chunks.clear()
        self.opens(node)

    def child(self, node: int) -> Child:
        return self.children.by_node[node]

    @invariant()
    def what_is_under_way_is_bounded(self) -> None:
        """The bytes under way stay within the limits, plus one long message."""
        longest = LOG_BYTES + 364 + SERVING.chunk_bytes + 64
        for node in NODES:
            assert self.child(node).link.under_way <= SERVING.window_max + longest
        total = sum(self.child(node).link.under_way for node in NODES)
        assert total <= SERVING.total_max + longest

    @invariant()
    def both_ends_count_the_same(self) -> None:
        """The parent's count of sent bytes equals those taken and under way."""
        for node, mine in self.below.items():
            flying = sum(
                message_weight(message, SERVING.chunk_bytes)
                for message in mine.flying
                if not isinstance(message, SnapshotRequired)
            )
            assert self.child(node).link.sent == mine.taken + flying

    @invariant()
    def the_log_is_bounded_and_whole(self) -> None:
        held = list(self.history.log.entries_after(self.history.log.base))
        assert sum(map(entry_bytes, held)) == self.history.log.bytes
        assert self.history.log.bytes <= LOG_BYTES or len(held) == 1

    def teardown(self) -> None:
        """Once everything sent is acknowledged, each child has all commits and chunks."""
        self.history.applied = self.history.log.head
        self.perform(self.children.feed_all(self.now_s))
        for _ in range(400):
            for node in NODES:
                self.asks_for_chunks(node)
                self.arrives(node, 1000)
                self.acknowledges(node, 1000)
            if all(
                mine.received == self.history.log.head and not mine.missing
                for mine in self.below.values()
            ):
                return
        raise AssertionError(f"stuck at {self.below} of {self.history.log.head}")


TestDown = DownMachine.TestCase
TestDown.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
