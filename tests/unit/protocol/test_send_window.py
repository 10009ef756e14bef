"""Tests of ``SendWindow``: how many bytes may be under way, and how that follows the delay."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest

from sparkstrom.codec.messages import Data, OptimizerChunk
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.children import FlowLimits
from sparkstrom.protocol.common.flow_control import (
    HEADER_BYTES,
    LAST_SEQ_BYTES,
    QUEUE_S,
    SUM_ENTRY_BYTES,
    WINDOW_FIRST,
    WINDOW_LEAST,
    SendWindow,
    entries_in_sum,
    message_weight,
)
from tests.unit.protocol.effect_filters import only, sent
from tests.unit.protocol.parents import CHUNK_BYTES

PLENTY = 1 << 40
KIB = 1 << 10


class Wire:
    """A simulated wire with a rate and a delay, and the window of its sender."""

    def __init__(
        self,
        rate: float,
        delay_s: float = 0.0,
        *,
        size: int = 8 * KIB,
        window_max: int = PLENTY,
        now_s: float = 0.0,
    ) -> None:
        self.rate, self.delay_s, self.size = rate, delay_s, size
        self.link = SendWindow(window_max, now_s)
        self.now_s = self.free_s = now_s
        self.way: deque[tuple[float, int]] = (
            deque()
        )  # (arrival time, total bytes sent up to and including the message)
        self.sent = 0
        self.queued_s = 0.0  # the longest time of a message in the queue since ``watch``

    def watch(self) -> None:
        """Restart the measurement of the longest time in the queue."""
        self.queued_s = 0.0

    def narrow(self, times: int) -> None:
        """Divide the rate by ``times``, also for messages that are under way."""
        self.rate /= times
        self.free_s, handed = self.now_s, self.link.acked
        on_its_way, self.way = self.way, deque()
        for _, upto in on_its_way:
            self.free_s, handed = self.free_s + (upto - handed) / self.rate, upto
            self.way.append((self.free_s + self.delay_s, upto))

    def run(self, seconds: float, *, wants: bool = True) -> None:
        """Every 10 ms, acknowledge what arrived, and send what has room if ``wants``."""
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += 0.01
            arrived = 0
            while self.way and self.way[0][0] <= self.now_s:
                arrived = self.way.popleft()[1]
            if arrived:
                self.link.on_ack(arrived, arrived, self.now_s)
            while wants and self.link.has_room(self.size):
                self.link.on_sent(self.size, self.now_s)
                self.sent += 1
                self.queued_s = max(self.queued_s, self.free_s - self.now_s)
                self.free_s = max(self.free_s, self.now_s) + self.size / self.rate
                self.way.append((self.free_s + self.delay_s, self.link.sent))


# -- weights -----------------------------------------------------------------------------------


def test_message_weight_of_each_message_type(make: Any) -> None:
    """The weight follows from what both ends know; the bytes of chunks do not count.

    That both ends of an edge reach the same sum is checked below.
    """
    assert message_weight(make.update(1, 1, b"12345"), 0) == HEADER_BYTES + 5
    assert message_weight(make.committed(1, payload=b""), 0) == HEADER_BYTES
    assert message_weight(make.chunk(3), 1000) == HEADER_BYTES + 1000
    merged = make.merged(1, 5, [(1, 2), (3, 4)], count=10)
    assert (
        message_weight(merged, 0) == HEADER_BYTES + int(10 * SUM_ENTRY_BYTES) + 2 * LAST_SEQ_BYTES
    )
    assert (
        message_weight(OptimizerChunk(asker=1, copy=1, index=0, count=1, payload=b"x" * 99), 1000)
        == 0
    )


def test_sender_and_receiver_count_the_same_bytes(parent: Any, node_with: Any, make: Any) -> None:
    """A parent counts as sent what the child counts as received: commits, sums and chunks."""
    child = node_with(flow_limits=FlowLimits(PLENTY, PLENTY, PLENTY, CHUNK_BYTES)).joined()
    parent.attach(whole=False)
    assert only(parent.asks(0), ev.SendChunk).index == 0
    child.hear(make.chunk(0))
    for message in sent(parent.commit(2) + parent.append(make.merged(2, 6)), Data):
        child.hear(message)
    assert child.me.replication.received == 6
    assert child.me.link.bytes_received == parent.child().link.sent > CHUNK_BYTES


def test_entries_in_sum_is_expected_number_of_distinct_parameters() -> None:
    """A sum's expected number of entries is the expected number of distinct parameters."""
    assert entries_in_sum(0, 100) == 0
    assert entries_in_sum(10, 10**9) == 10
    assert 63 <= entries_in_sum(100, 100) <= 64  # 1 - 1/e
    assert entries_in_sum(10**6, 100) == 100


# -- room --------------------------------------------------------------------------------------


def test_empty_link_takes_message_of_any_size() -> None:
    link = SendWindow(1000, 0.0)
    assert link.has_room(10**9)
    link.on_sent(10**9, 0.0)
    assert not link.has_room(1)
    link.on_ack(10**9 - 1, 10**9 - 1, 1.0)
    assert not link.has_room(10**9)
    link.on_ack(10**9, 10**9, 2.0)
    assert link.has_room(10**9)


def test_window_never_exceeds_its_maximum() -> None:
    link = SendWindow(1000, 0.0)
    assert link.has_room(1000)
    link.on_sent(400, 0.0)
    assert link.has_room(600)
    assert not link.has_room(601)
    wire = Wire(1e9, window_max=400 * KIB)
    wire.run(0.1)
    assert wire.link.window == 400 * KIB


def test_only_forwarded_bytes_make_room() -> None:
    """Only forwarded bytes make room; bytes that merely arrived still wait there."""
    link = SendWindow(1000, 0.0)
    link.on_sent(1000, 0.0)
    link.on_ack(1000, 0, 1.0)
    assert link.under_way == 1000
    assert not link.has_room(1)
    link.on_ack(1000, 700, 1.0)
    assert link.under_way == 300


def test_overtaken_acknowledgement_changes_nothing() -> None:
    """An overtaken acknowledgement with lower counts changes nothing."""
    link = SendWindow(1000, 0.0)
    link.on_sent(900, 0.0)
    assert link.on_ack(900, 900, 1.0)
    assert not link.on_ack(500, 500, 2.0)
    assert (link.under_way, link.acked) == (0, 900)


def test_acknowledged_bytes_beyond_sent_bytes_are_ignored() -> None:
    """Acknowledged bytes beyond those sent are ignored.

    Parts of an optimizer state, which has weight 0, are briefly included in the neighbour's count.
    """
    link = SendWindow(1000, 0.0)
    link.on_sent(500, 0.0)
    link.on_ack(90_000, 90_000, 1.0)
    assert link.under_way == 0
    assert link.since_s is None
    link.on_sent(300, 2.0)
    assert (link.under_way, link.since_s) == (300, 2.0)
    assert not link.on_ack(500, 500, 3.0)
    assert link.since_s == 2.0
    assert link.on_ack(800, 800, 4.0)
    assert link.since_s is None


# -- the window follows the delay ----------------------------------------------------------------


@pytest.mark.parametrize("rate", [125e3, 1.25e6, 12.5e6, 125e6])
@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.5])
def test_link_is_used_at_85_percent_with_short_queue(rate: float, delay_s: float) -> None:
    """From 1 Mbit/s to 1 Gbit/s, 85 % of the rate is used; queues are at most 5 * QUEUE_S."""
    wire = Wire(rate, delay_s, size=max(8 * KIB, int(rate / 500)))
    wire.run(20.0)
    wire.watch()
    sent = wire.sent
    wire.run(20.0)
    assert (wire.sent - sent) * wire.size >= 0.85 * 20.0 * rate
    assert wire.queued_s <= 5 * QUEUE_S


def test_window_shrinks_and_grows_with_rate_of_link() -> None:
    wire = Wire(12.5e6)
    wire.run(20.0)
    wide = wire.link.window
    wire.rate = 1.25e6
    wire.run(20.0)
    narrow = wire.link.window
    assert narrow < wide / 5
    wire.watch()
    wire.run(20.0)
    assert wire.queued_s <= 5 * QUEUE_S
    wire.rate = 12.5e6
    wire.run(20.0)
    assert wire.link.window > 5 * narrow


def test_window_never_shrinks_below_window_least() -> None:
    """On a very slow link the window shrinks to WINDOW_LEAST and no further."""
    wire = Wire(1e4, size=1000)
    wire.run(100.0)
    assert wire.link.window == WINDOW_LEAST


def test_one_long_queue_halves_window_once() -> None:
    """One long queue halves the window once, not once for each message in it."""
    link = SendWindow(PLENTY, 0.0)
    for _ in range(2):  # now the shortest delay is known
        link.on_sent(1, 0.0)
        link.on_ack(link.sent, link.sent, 0.0)
    before = link.window
    for _ in range(64):
        link.on_sent(1000, 0.0)
    for i in range(1, 65):
        link.on_ack(2 + 1000 * i, 2 + 1000 * i, 10.0 + i / 10)
    assert link.window == before / 2


def test_window_shrinks_again_if_queueing_time_doubles() -> None:
    """The window shrinks again if later messages of a queue waited twice as long."""
    wire = Wire(12.5e6, 0.001, window_max=4 << 20)
    wire.run(20.0)
    wire.narrow(100)
    drained_s = wire.link.under_way / wire.rate
    wire.run(drained_s + 1.0)
    assert wire.link.window < wire.rate
    wire.watch()
    sent = wire.sent
    wire.run(50.0)
    assert wire.queued_s <= 5 * QUEUE_S
    assert (wire.sent - sent) * wire.size >= 0.85 * 50.0 * wire.rate


def test_window_does_not_grow_while_no_message_waits() -> None:
    """The window does not grow while no message waits: the link's limit is not reached."""
    link = SendWindow(PLENTY, 0.0)
    for i in range(100):
        assert link.has_room(1000)
        link.on_sent(1000, float(i))
        link.on_ack(link.sent, link.sent, i + 0.01)
    assert link.window == WINDOW_FIRST


def test_message_that_waited_once_grows_window_once() -> None:
    """A message that waited once lets the window grow once, not with each later acknowledgement."""
    link = SendWindow(PLENTY, 0.0)
    link.on_sent(WINDOW_FIRST, 0.0)
    assert not link.has_room(1000)
    link.on_ack(link.sent, link.sent, 0.01)
    grown = link.window
    assert grown > WINDOW_FIRST
    for i in range(100):
        assert link.has_room(1000)
        link.on_sent(1000, float(i))
        link.on_ack(link.sent, link.sent, i + 0.01)
    assert link.window == grown


# -- measurements ------------------------------------------------------------------------------


def test_rate_excludes_idle_time() -> None:
    """The rate counts only time in which something is under way; idle time is left out."""
    wire = Wire(1e6)
    assert wire.link.rate == 0.0
    wire.run(20.0)
    assert wire.link.rate == pytest.approx(1e6, rel=0.05)
    wire.run(100.0, wants=False)
    wire.run(0.5)
    assert wire.link.rate == pytest.approx(1e6, rel=0.1)


def test_since_s_is_send_time_or_last_sign_of_arrival() -> None:
    """``since_s``: when the oldest message without a sign of arrival was sent, or the last sign."""
    link = SendWindow(PLENTY, 0.0)
    link.on_sent(100, 1.0)
    link.on_sent(100, 2.0)
    assert link.since_s == 1.0
    link.on_ack(50, 0, 3.0)  # part of it has arrived: the wait for the rest begins now
    assert link.since_s == 3.0
    link.on_ack(50, 0, 4.0)
    assert link.since_s == 3.0
    link.on_ack(200, 0, 5.0)
    assert link.since_s is None
    link.on_sent(100, 6.0)
    link.shift_deadlines(10.0)
    assert link.since_s == 16.0


def test_pause_of_idle_link_starts_no_wait() -> None:
    """A pause of the process starts no wait if nothing is under way."""
    link = SendWindow(PLENTY, 0.0)
    link.shift_deadlines(10.0)
    assert link.since_s is None
