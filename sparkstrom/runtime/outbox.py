"""Outboxes: frames that wait until the transport takes them; no edge's is dropped for want of room.

Of data no more is handed over than a link takes soon (``protocol/common/send_window``). Of control,
what the newest word makes worthless is replaced by it. So what waits is bounded without a limit
here.

What the master says directly goes to many places, to each of them seldom, so only a few senders
are open at a time. A place whose turn has not come keeps its frames: closing a sender that has
not sent would starve whoever is told something first when a whole mesh joins at once. What is
repeated there beyond a bound is dropped: it says nothing new.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from itertools import islice

from sparkstrom.base.identity import Endpoint
from sparkstrom.codec.messages import Address
from sparkstrom.transport.contract import Offer, Sender

OFFERED_FRAMES = 256  # at a time: a long queue that is stuck costs no more than this to look at
ANSWERS_MAX = 32  # senders kept for those who have no edge
ANSWER_FRAMES_MAX = 16  # for one place; what is repeated meanwhile says nothing new
DEAF_ANSWERS = 12  # to one who asks twice a second: six seconds
PATIENCE_FLUSHES = 1000  # with a place that does not connect while others wait; about a second


class Outbox:
    """Frames that wait for one sender."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._frames: deque[bytes] = deque()
        self._newest: dict[Hashable, list[bytes]] = {}  # waiting messages that may be replaced

    def put(self, frames: list[bytes], newest_of: Hashable = None) -> None:
        """Queue a message's frames; of those with the same ``newest_of`` only the newest counts."""
        if newest_of is not None:
            for frame in self._newest.get(newest_of, ()):
                self._frames.remove(frame)
            self._newest[newest_of] = frames
        self._frames.extend(frames)

    def flush(self) -> int:
        """Offer what waits; return how many frames went."""
        if not self._frames:
            return 0
        sent, offer = self._sender.offer(list(islice(self._frames, OFFERED_FRAMES)))
        for _ in range(sent):
            self._frames.popleft()
        if sent:
            self._newest.clear()
        if offer is Offer.CLOSED:
            self._frames.clear()
            self._newest.clear()
        return sent

    def __len__(self) -> int:
        return len(self._frames)

    def close(self) -> None:
        self._sender.close()


class Answers:
    """Outboxes by address, of which a few have a sender; the others wait for their turn."""

    def __init__(self, opening: Callable[[Address], Sender]) -> None:
        self._opening = opening
        self._open: dict[Address, Outbox] = {}  # the one opened first comes first
        self._turn_ends: dict[Address, int] = {}  # at which flush, if it has not connected
        self._waiting: dict[Address, list[bytes]] = {}
        self._unheard: dict[Address, int] = {}  # answers to who has a sender and took none yet
        self._flushes = 0

    def put(self, address: Address, frames: list[bytes]) -> bool:
        """Queue a message's frames, all or none."""
        if address in self._open:
            if address in self._unheard:
                self._unheard[address] += 1
            self._open[address].put(frames)
            return True
        waiting = self._waiting.setdefault(address, [])
        if waiting and len(waiting) + len(frames) > ANSWER_FRAMES_MAX:
            return False
        waiting.extend(frames)
        return True

    def flush(self) -> int:
        """Offer what waits; return how many frames went."""
        self._flushes += 1
        while self._waiting and self._make_room():
            self._open_next()
        went = 0
        for address, box in self._open.items():
            if sent := box.flush():
                went += sent
                self._unheard.pop(address, None)
        return went

    def deaf(self) -> tuple[Endpoint, ...]:
        """Who goes on asking, so that it lives and is heard, and has taken no answer."""
        asked = [at for at, answers in self._unheard.items() if answers >= DEAF_ANSWERS]
        return tuple(dict.fromkeys(Endpoint(at.host, at.port) for at in asked))

    def _make_room(self) -> bool:
        """One sender may be opened; for it goes the oldest that is done, or has had its time."""
        if len(self._open) < ANSWERS_MAX:
            return True
        for address, box in self._open.items():
            if not len(box) or self._turn_ends[address] <= self._flushes:
                box.close()
                del self._open[address], self._turn_ends[address]
                self._unheard.pop(address, None)
                return True
        return False

    def _open_next(self) -> None:
        address = next(iter(self._waiting))
        box = self._open[address] = Outbox(self._opening(address))
        box.put(self._waiting.pop(address))
        self._turn_ends[address] = self._flushes + PATIENCE_FLUSHES
        self._unheard[address] = 0

    def __len__(self) -> int:
        """Frames that the transport has not taken yet."""
        return sum(map(len, self._open.values())) + sum(map(len, self._waiting.values()))
