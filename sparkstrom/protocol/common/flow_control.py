"""Limit the bytes that are under way on each link, and detect links that are too slow.

Aeron's streams are ordered and reliable: a message that was handed over arrives unless the stream
breaks. So nothing is sent again while a stream lives, and a link only needs a limit on its queue.
This limit, the window, is the number of bytes that may be under way: about as many as the link
transports in a fraction of a second. Updates that exceed the window stay with the sender, which can
sum them or keep them in its residual (what a worker has learned but not yet sent).

The window follows the delay, as LEDBAT's does (RFC 6817). The delay of a message is the link's own
time (the least ever seen) plus the time in queues. The window grows while queues are short and
shrinks when they are long. Links that use the same network interface share its queue and its rate.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from sparkstrom.codec.messages import (
    Chunk,
    Commit,
    Data,
    LastSeqs,
    MergedRange,
    OptimizerChunk,
    Update,
)
from sparkstrom.observe.telemetry import SlowLink

HEADER_BYTES = 64  # counted for each message besides its payload
LAST_SEQ_BYTES = 12  # per origin of a sum
SUM_ENTRY_BYTES = 1.5  # per entry of a sum: 0.9 to 1.75 measured in sums of 16 to 75 updates
# Acknowledgements and counters for which nobody waits are gathered for this long, unless
# ``PROMPT_ACK_BYTES``, half the smallest window, are unacknowledged.
ROUTINE_SPACING_S = 0.05
PROMPT_ACK_BYTES = 16 << 10
QUEUE_S = 0.25  # target time in queues: short for a user, long for a scheduler's pauses
WINDOW_FIRST = 64 << 10  # bytes; 0.2 s if four links of a host share 10 Mbit/s; it soon grows
WINDOW_LEAST = 32 << 10  # 0.26 s of 1 Mbit/s; one message of any size goes in any case
RATE_S = 2.0  # time constant of the mean rate, in seconds in which something was under way


def message_weight(message: Data, chunk_bytes: int) -> int:
    """Return the bytes that a message counts for in send windows, the same at both ends of a link.

    A snapshot chunk counts as ``chunk_bytes``, because the sender's state machine never holds its
    bytes. Optimizer chunks count as 0: their requester limits how many are under way.
    """
    match message:
        case Commit() | Update():
            return HEADER_BYTES + len(message.payload.data)
        case Chunk():
            return HEADER_BYTES + chunk_bytes
        case OptimizerChunk():
            return 0
        case MergedRange():
            return sum_weight(message.count, message.last)


def sum_weight(count: int, last: LastSeqs) -> int:
    """Return the estimated bytes of a sum of commits: header, ``count`` entries and ``last``."""
    return HEADER_BYTES + int(SUM_ENTRY_BYTES * count) + LAST_SEQ_BYTES * len(last)


def entries_in_sum(counts: int, n_params: int) -> int:
    """Return the expected number of parameters that a sum of ``counts`` random entries changes."""
    return math.ceil(n_params * -math.expm1(-counts / n_params))


class SendWindow:
    """The send window of one direction of one edge: a limit on the bytes under way.

    Sizes are in bytes as ``message_weight`` counts them.
    """

    def __init__(self, window_max: int, now_s: float) -> None:
        self._window_max = window_max  # bound of ``window``, whatever is measured
        self.window = min(WINDOW_FIRST, window_max)  # bytes that may be under way
        self.sent = 0  # bytes handed over since the edge was opened
        self.acked = 0  # bytes of ``sent`` that the neighbour has finished with
        self._arrived = 0  # bytes of ``sent`` that have arrived; at least ``acked``
        self._way: deque[tuple[int, float]] = deque()  # (``sent`` after it, time), per message
        self._least_s = math.inf  # the shortest delay so far: the link without a queue
        self._held_back = False  # a message had to wait since the window last changed
        # A queue shrinks the window once: messages sent before that cut (``_cut_until``) count only
        # if they waited twice as long as the one that caused it (``_cut_s``).
        self._cut_until = 0
        self._cut_s = 0.0
        self._busy_s = now_s  # the rate is measured up to this time
        self._rate_bytes = self._rate_s = 0.0  # decaying sums; their quotient is the rate
        # When the oldest message without any sign of arrival was sent; None: all have arrived.
        self.since_s: float | None = None

    @property
    def under_way(self) -> int:
        """Return the bytes handed over that the neighbour has not acknowledged."""
        return self.sent - self.acked

    @property
    def rate(self) -> float:
        """Return the bytes per second that get through while something is under way; 0: unknown."""
        return self._rate_bytes / self._rate_s if self._rate_s else 0.0

    def has_room(self, size: int) -> bool:
        """Return whether a message of this size may be sent now; if not, record that it must wait.

        An empty link takes any size.
        """
        under_way = self.under_way
        if not under_way or under_way + size <= self.window:
            return True
        self._held_back = True
        return False

    def on_sent(self, size: int, now_s: float) -> None:
        """Record that a message of this size was handed to the transport."""
        if not self._way:
            self._busy_s = now_s
        if self.since_s is None:
            self.since_s = now_s
        self.sent += size
        self._way.append((self.sent, now_s))

    def on_ack(self, arrived: int, acked: int, now_s: float) -> bool:
        """Update the window from the neighbour's two counts; return whether either count has grown.

        Args:
            arrived: all bytes received so far, including parts of incomplete messages.
            acked: all bytes with which the neighbour has finished; they are no longer under way.
            now_s: the current time.
        """
        arrived, acked = min(arrived, self.sent), min(acked, self.sent)
        if arrived > self._arrived:  # the wait for the rest begins now
            self._arrived, self.since_s = arrived, None if arrived >= self.sent else now_s
        elif acked <= self.acked:
            return False
        if acked > self.acked:
            self._adapt_window(acked, now_s)
        return True

    def shift_deadlines(self, later_s: float) -> None:
        """Postpone all timers by ``later_s`` seconds in which this process did not run."""
        if self.since_s is not None:
            self.since_s += later_s

    def _adapt_window(self, acked: int, now_s: float) -> None:
        """Grow the window if acknowledged bytes met a short queue; shrink it if the queue was long.

        It grows only if a message had to wait for room. ``acked`` is the new cumulative count.
        """
        done, self.acked = acked - self.acked, acked
        self._update_rate(done, now_s)
        way_s = None
        while self._way and self._way[0][0] <= acked:
            way_s = now_s - self._way.popleft()[1]
        if way_s is None:
            return
        self._least_s = min(self._least_s, way_s)
        waited_s = way_s - self._least_s
        if waited_s <= QUEUE_S:
            if self._held_back:
                self.window = min(self._window_max, self.window + done)
        elif acked > self._cut_until or waited_s > 2 * self._cut_s:
            shrunk = int(self.window * max(0.5, QUEUE_S / waited_s))
            self.window = min(self._window_max, max(WINDOW_LEAST, shrunk))
            self._cut_until, self._cut_s = self.sent, waited_s
        self._held_back = False

    def _update_rate(self, done: int, now_s: float) -> None:
        """Add ``done`` acknowledged bytes to the link's rate, an exponentially weighted mean."""
        spent_s, self._busy_s = now_s - self._busy_s, now_s
        keep = math.exp(-spent_s / RATE_S)
        self._rate_bytes = self._rate_bytes * keep + done
        self._rate_s = self._rate_s * keep + spent_s


# A burst or a paused process delays data for less than this, a narrow link for longer.
NARROW_S = 5.0


@dataclass(slots=True)
class Backlog:
    """How long data have been waiting for one link without a break.

    A link counts as slow only if data wait at its sender for room on it. Each slow link is reported
    once, with its rate and the rate that training would need.
    """

    since_s: float | None = None  # when it began to wait without a break; None: nothing waits
    from_bytes: int = 0  # bytes that training had produced by ``since_s``
    is_reported: bool = False  # a link is reported once

    def observe(self, waits: bool, made_bytes: int, carries: float, now_s: float) -> float | None:
        """Return the bytes per second that training needs, once, if the link proves to be slower.

        This is the case once data have waited for NARROW_S. Return None before and afterwards, and
        if the link's rate suffices, because then a process stalls. ``waits``: whether data wait;
        ``made_bytes``: all bytes that training has made so far; ``carries``: the link's rate in
        bytes per second.
        """
        if not waits or self.is_reported:
            self.since_s = None
        elif self.since_s is None:
            self.since_s, self.from_bytes = now_s, made_bytes
        elif now_s - self.since_s > NARROW_S:
            needed = (made_bytes - self.from_bytes) / (now_s - self.since_s)
            self.is_reported, self.since_s = needed > carries, None
            return needed if self.is_reported else None
        return None


def describe_slow_link(link: SlowLink, host: str) -> str:
    """Return a human-readable sentence about a slow link; ``host`` is the host of its lower end."""
    how = "summed" if link.sums else "delayed"
    carries, needed = _format_megabytes(link.carries), _format_megabytes(link.needed)
    return (
        f"the link to node {link.node} ({host}) carries {carries} MB/s, training "
        f"would fill {needed}: updates are {how}, staleness {link.behind}"
    )


def _format_megabytes(rate: float) -> str:
    """Return a rate in bytes/s as MB/s, with up to two significant digits, or whole from 10."""
    mega = rate / 1e6
    return f"{mega:.2g}" if mega < 0.095 else f"{mega:.1f}" if mega < 9.95 else f"{mega:.0f}"
