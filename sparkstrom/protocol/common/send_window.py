"""Send window: how much may be under way to a neighbour, by what has been seen to arrive.

Aeron's streams are ordered and reliable: what was handed over arrives, or the stream is gone. So
nothing is sent again while a stream lives, and what a link needs is a bound on what waits in it:
no more than it carries in a fraction of a second. The rest stays where it came from, where it can
be summed, or left in a residual.

The window follows the delay, as LEDBAT's does (RFC 6817): what is handed over takes the link's own
time (the least ever seen) plus the time that it stands in queues; the window grows while queues
are short and shrinks when they are long. Neighbours that share an interface share its queue, and
so its rate.
"""

from __future__ import annotations

import math
from collections import deque

from sparkstrom.codec.messages import Chunk, Data, LastSeqs, MergedRange, UpdaterChunk

HEADER_BYTES = 64  # what a message costs beside its payload
LAST_SEQ_BYTES = 12  # per origin of a sum
SUM_ENTRY_BYTES = 1.5  # of a sum, about: 0.9 to 1.75 seen in sums of 16 and 75 updates
QUEUE_S = 0.25  # standing in queues: short for a person, long for a scheduler's pauses
WINDOW_FIRST = 64 << 10  # bytes: four links of one host with 10 Mbit/s wait 0.2 s; it doubles soon
WINDOW_LEAST = 32 << 10  # 0.26 s of 1 Mbit/s; one message of any size goes in any case
RATE_S = 2.0  # how far back the rate looks, in seconds in which something was under way


def weight(message: Data, chunk_bytes: int) -> int:
    """Bytes that a message counts for, the same at both ends of a link.

    A chunk counts as a full one (its sender's machine has not seen it), and what belongs to an
    updater's state for nothing: whoever asks for it bounds it.
    """
    match message:
        case Chunk():
            return HEADER_BYTES + chunk_bytes
        case UpdaterChunk():
            return 0
        case MergedRange():
            return sum_weight(message.count, message.last)
        case _:
            return HEADER_BYTES + len(message.payload)


def sum_weight(count: int, last: LastSeqs) -> int:
    """Bytes of a sum of so many entries, about: an index, a sign and an amount each."""
    return HEADER_BYTES + int(SUM_ENTRY_BYTES * count) + LAST_SEQ_BYTES * len(last)


def entries_in_sum(counts: int, n_params: int) -> int:
    """Entries of a sum of updates with ``counts`` entries in all, if they fell by chance."""
    return math.ceil(n_params * -math.expm1(-counts / n_params))


class SendWindow:
    """One direction of one edge, in bytes of ``weight``. ``window_max``: whatever is measured."""

    def __init__(self, window_max: int, now_s: float) -> None:
        self._window_max = window_max
        self.window = min(WINDOW_FIRST, window_max)
        self.sent = 0  # all that was ever handed over
        self.acked = 0  # of that, what the neighbour is done with
        self._arrived = 0  # of that, what has arrived there
        self._way: deque[tuple[int, float]] = deque()  # ``sent`` after each message, and when
        self._least_s = math.inf  # the shortest way so far
        self._held_back = False  # something had to wait since the window last moved
        self._cut_until = 0  # one answer to a queue: what was handed over before it counts no more,
        self._cut_s = 0.0  # unless it waits for twice as long as what was answered
        self._busy_s = now_s  # up to then, ``_rate`` knows
        self._rate_bytes = self._rate_s = 0.0
        self.since_s: float | None = None  # the oldest handed over after the last sign of arrival

    @property
    def under_way(self) -> int:
        """Bytes handed over that the neighbour is not done with."""
        return self.sent - self.acked

    @property
    def rate(self) -> float:
        """Bytes per second that went through while something was under way; 0: not known."""
        return self._rate_bytes / self._rate_s if self._rate_s else 0.0

    def has_room(self, size: int) -> bool:
        """Does this go now? An empty link takes one message of any size."""
        if not self.under_way or self.under_way + size <= self.window:
            return True
        self._held_back = True
        return False

    def on_sent(self, size: int, now_s: float) -> None:
        """So much is handed over."""
        if not self._way:
            self._busy_s = now_s
        if self.since_s is None:
            self.since_s = now_s
        self.sent += size
        self._way.append((self.sent, now_s))

    def on_ack(self, arrived: int, acked: int, now_s: float) -> bool:
        """The neighbour says how much has arrived, and how much it is done with; is any new?

        Parts of a message count as they come, also of one that weighs less, or nothing.
        """
        arrived, acked = min(arrived, self.sent), min(acked, self.sent)
        if arrived > self._arrived:  # the next that is handed over has to show it anew
            self._arrived, self.since_s = arrived, None if arrived >= self.sent else now_s
        elif acked <= self.acked:
            return False
        if acked > self.acked:
            self._acknowledge(acked, now_s)
        return True

    def slept(self, later_s: float) -> None:
        """Time in which this process stood still says nothing of the link."""
        if self.since_s is not None:
            self.since_s += later_s

    def _acknowledge(self, acked: int, now_s: float) -> None:
        done, self.acked = acked - self.acked, acked
        self._measure(done, now_s)
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

    def _measure(self, done: int, now_s: float) -> None:
        spent_s, self._busy_s = now_s - self._busy_s, now_s
        keep = math.exp(-spent_s / RATE_S)
        self._rate_bytes = self._rate_bytes * keep + done
        self._rate_s = self._rate_s * keep + spent_s
