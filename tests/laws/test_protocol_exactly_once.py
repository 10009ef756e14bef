"""Laws of the way to the master: each update is committed once and in order, under any id."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sparkstrom.codec.messages import Commit, Payload, Update
from sparkstrom.protocol.common.events_and_effects import IgnoredMessages
from sparkstrom.protocol.master.commit_sequencer import Sequencer
from sparkstrom.protocol.worker.parent_link import InFlight

ORIGINS = 3
Numbered = tuple[int, int]


class Origin:
    """A process under its present id; an update's payload is its number among its updates."""

    def __init__(self, name: int) -> None:
        self.name, self.node = name, -1
        self.uplink = InFlight(10**9)
        self.made = 0
        self.closed: dict[int, int] = {}  # its former ids


class UpLinkMachine(RuleBasedStateMachine):
    """Origins that lose their ids and return, a lossy and reordering network, one sequencer."""

    def __init__(self) -> None:
        super().__init__()
        self.sequencer = Sequencer(10**9, IgnoredMessages())
        self.next_id = 0
        self.origins = [Origin(name) for name in range(ORIGINS)]
        self.holders: dict[int, Origin] = {}
        self.flying: list[Update] = []
        self.numbers: list[Commit] = []  # commits under way to their origins
        self.committed: list[list[int]] = [[] for _ in range(ORIGINS)]
        for origin in self.origins:
            self.admit(origin)

    def admit(self, origin: Origin) -> None:
        """Give an origin a new id, and renumber its uncommitted updates."""
        self.next_id += 1
        origin.node = self.next_id
        self.holders[origin.node] = origin
        self.sequencer.admit(origin.node)
        origin.uplink.renumber(origin.closed, origin.node, 0.0)

    @rule(name=st.integers(0, ORIGINS - 1), arrives=st.booleans())
    def publishes(self, name: int, arrives: bool) -> None:
        """Add an update to those in flight; if it ``arrives`` is false, it gets lost."""
        origin = self.origins[name]
        origin.made += 1
        update = Update(
            origin=origin.node, seq=origin.uplink.last_seq + 1, seen=0, epoch=0, batch=0, steps=0,
            payload=Payload(0, 2, 0, origin.made.to_bytes(4, "little")),
        )  # fmt: skip
        origin.uplink.add(update, 0.0)
        if arrives:
            self.flying.append(update)

    @rule(name=st.integers(0, ORIGINS - 1))
    def sends_all_again(self, name: int) -> None:
        origin = self.origins[name]
        self.flying += origin.uplink.updates_to_resend(origin.node, 0.0, force=True)

    @precondition(lambda self: self.flying)
    @rule(which=st.integers(0, 10**6), again=st.booleans())
    def arrives(self, which: int, again: bool) -> None:
        """Deliver any update that is under way; if ``again``, it stays and may come once more."""
        index = which % len(self.flying)
        update = self.flying[index] if again else self.flying.pop(index)
        committed = self.sequencer.number(update)
        if committed is not None:
            self.numbers.append(committed)
            payload = int.from_bytes(committed.payload.data, "little")
            self.committed[self.holders[committed.origin].name].append(payload)

    @precondition(lambda self: self.numbers)
    @rule(count=st.integers(1, 5))
    def numbers_come_down(self, count: int) -> None:
        """Deliver commits to their origins in commit order, as over the way down."""
        for _ in range(min(count, len(self.numbers))):
            self.acknowledge(self.numbers.pop(0))

    def acknowledge(self, committed: Commit) -> None:
        struck = self.holders[committed.origin].uplink.acknowledge(
            committed.origin, committed.seq, 0.0
        )
        assert struck is not None
        assert struck.payload == committed.payload

    @rule(name=st.integers(0, ORIGINS - 1))
    def loses_its_id_and_comes_back(self, name: int) -> None:
        origin = self.origins[name]
        origin.closed[origin.node] = self.sequencer.close(origin.node)
        self.admit(origin)

    @invariant()
    def each_is_committed_once_and_in_order(self) -> None:
        for committed in self.committed:
            assert committed == list(range(1, len(committed) + 1))

    @invariant()
    def nothing_is_forgotten(self) -> None:
        """Uncommitted updates are still stored at their origin."""
        for origin in self.origins:
            kept = [int.from_bytes(u.payload.data, "little") for u in origin.uplink.uncommitted]
            lacking = range(len(self.committed[origin.name]) + 1, origin.made + 1)
            assert kept[len(kept) - len(lacking) :] == list(lacking)

    def teardown(self) -> None:
        """After one more resend, all updates are committed and no origin stores any."""
        self.flying = []
        for name in range(ORIGINS):
            self.sends_all_again(name)
        while self.flying:
            self.arrives(0, again=False)
        for committed in self.numbers:
            self.acknowledge(committed)
        for origin in self.origins:
            assert self.committed[origin.name] == list(range(1, origin.made + 1))
            assert origin.uplink.uncommitted == ()
            assert origin.uplink.bytes == 0


TestUpLink = UpLinkMachine.TestCase
TestUpLink.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
