"""Laws of the down link: whatever is lost, repeated or asked for, a child gets one unbroken run."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sparkstrom.codec.messages import Committed
from sparkstrom.protocol.replay import Downlink, Log, cost

LOG_BYTES = 700
WINDOW_BYTES = 300


class DownLinkMachine(RuleBasedStateMachine):
    """A parent with its log, a child that takes only the next commit, a network between them."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.log = Log(LOG_BYTES)
        self.downlink = Downlink(0, WINDOW_BYTES, self.now_s)
        self.received = 0  # by the child, in order
        self.snapshots = 0
        self.flying: list[int] = []  # commits on their way, as a bag
        self.reports: list[int] = []

    def feed(self) -> None:
        """As the master does: what the log no longer reaches takes a snapshot."""
        if not self.log.reaches(self.downlink.sent):
            self.downlink.rewind(self.log.head, self.now_s)
            self.received = max(self.received, self.log.head)
            self.snapshots += 1
            return
        while self.downlink.sent < self.log.head:
            entry = self.log.next(self.downlink.sent)
            assert entry.commit == self.downlink.sent + 1
            if not self.downlink.put(entry.commit, cost(entry), self.now_s):
                return
            self.flying.append(entry.commit)

    @rule(size=st.integers(0, 400))
    def commit(self, size: int) -> None:
        self.log.append(
            Committed(
                commit=self.log.head + 1,
                origin=9,
                seq=1,
                form=0,
                tau_quanta=2,
                count=0,
                payload=b"x" * size,
            )
        )
        self.feed()

    @precondition(lambda self: self.flying)
    @rule(which=st.integers(0, 10**6))
    def arrives(self, which: int) -> None:
        commit = self.flying.pop(which % len(self.flying))
        if commit == self.received + 1:
            self.received = commit
        self.reports.append(self.received)

    @precondition(lambda self: self.flying)
    @rule(which=st.integers(0, 10**6))
    def is_lost(self, which: int) -> None:
        self.flying.pop(which % len(self.flying))

    @precondition(lambda self: self.flying)
    @rule(which=st.integers(0, 10**6))
    def is_repeated(self, which: int) -> None:
        self.flying.append(self.flying[which % len(self.flying)])

    @precondition(lambda self: self.reports)
    @rule(which=st.integers(0, 10**6))
    def is_acknowledged(self, which: int) -> None:
        """Also late, and out of order."""
        self.downlink.acknowledge(self.reports.pop(which % len(self.reports)), self.now_s)
        self.feed()

    @rule()
    def child_asks(self) -> None:
        self.downlink.rewind(self.received, self.now_s)
        self.feed()

    @rule(seconds=st.floats(0.0, 5.0))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        if self.downlink.overdue(self.now_s):
            self.downlink.back_off(self.now_s)
        self.feed()

    @invariant()
    def nobody_is_ahead(self) -> None:
        assert self.downlink.acked <= self.downlink.sent <= self.log.head
        assert self.received <= self.log.head

    @invariant()
    def the_log_is_bounded_and_whole(self) -> None:
        held = list(self.log.after(self.log.base))
        assert [committed.commit for committed in held] == list(
            range(self.log.base + 1, self.log.head + 1)
        )
        assert sum(map(cost, held)) == self.log.bytes
        assert self.log.bytes <= LOG_BYTES or len(held) == 1

    def teardown(self) -> None:
        """Once nothing is lost any more, the child soon has everything."""
        for _ in range(400):
            if self.received == self.log.head:
                return
            flying, self.flying = self.flying, []
            for commit in flying:
                if commit == self.received + 1:
                    self.received = commit
            self.downlink.acknowledge(self.received, self.now_s)
            self.time_passes(5.0)
        raise AssertionError(f"stuck at {self.received} of {self.log.head}")


TestDownLink = DownLinkMachine.TestCase
TestDownLink.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
