"""Outboxes: what waits for one sender, and what a newer word replaces."""

from __future__ import annotations

from collections.abc import Sequence

from sparkstrom.runtime.outbox import Outbox
from sparkstrom.transport.contract import Offer


class Stuck:
    """A sender that takes so many frames and no more."""

    def __init__(self) -> None:
        self.room = 0
        self.taken: list[bytes] = []

    def offer(self, frames: Sequence[bytes]) -> tuple[int, Offer]:
        went = list(frames)[: self.room]
        self.room -= len(went)
        self.taken += went
        return len(went), Offer.SENT if len(went) == len(frames) else Offer.BUSY

    def close(self) -> None:
        """Nothing is open."""


def test_a_message_that_has_begun_to_go_goes_whole() -> None:
    """Its newer one comes after it; half a message would be lost with the rest of the stream."""
    sender = Stuck()
    box = Outbox(sender)
    box.put([b"a1", b"a2"], "state")
    box.put([b"b1"])
    sender.room = 1
    box.flush()
    box.put([b"c1", b"c2"], "state")
    box.put([b"d1", b"d2"], "state")
    box.put([b"e1"], "report")
    sender.room = 10
    box.flush()
    assert sender.taken == [b"a1", b"a2", b"b1", b"d1", b"d2", b"e1"]


def test_a_stream_that_is_gone_keeps_nothing() -> None:
    class Gone(Stuck):
        def offer(self, frames: Sequence[bytes]) -> tuple[int, Offer]:
            return 0, Offer.CLOSED

    box = Outbox(Gone())
    box.put([b"a"], "state")
    box.flush()
    assert len(box) == 0
    box.put([b"b"], "state")
    assert len(box) == 1
