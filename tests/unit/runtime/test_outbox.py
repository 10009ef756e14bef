"""Outboxes: what waits for one sender, and what a newer word replaces."""

from __future__ import annotations

from collections.abc import Sequence

from sparkstrom.base.identity import Endpoint
from sparkstrom.codec.messages import Address
from sparkstrom.runtime.outbox import ANSWERS_MAX, DEAF_ANSWERS, PATIENCE_FLUSHES, Answers, Outbox
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


def answering(senders: dict[Address, Stuck]) -> Answers:
    return Answers(lambda address: senders.setdefault(address, Stuck()))


def at(number: int) -> Address:
    return Address("10.0.0.7", 40_000 + number, 1, 2)


def ask(answers: Answers, address: Address, times: int) -> None:
    for _ in range(times):
        answers.put(address, [b"welcome"])
        answers.flush()


def test_who_asks_on_and_takes_no_answer_is_deaf() -> None:
    senders: dict[Address, Stuck] = {}
    answers = answering(senders)
    ask(answers, at(1), DEAF_ANSWERS)
    ask(answers, at(2), 3)  # it has just come, or was killed
    assert answers.deaf() == ()
    ask(answers, at(1), 1)
    assert answers.deaf() == (Endpoint("10.0.0.7", 40_001),)
    senders[at(1)].room = 1
    answers.flush()
    assert answers.deaf() == ()
    ask(answers, at(1), 2 * DEAF_ANSWERS)  # it is slow: it has heard once
    assert answers.deaf() == ()


def test_who_waits_for_a_turn_is_not_deaf() -> None:
    answers = answering({})
    for number in range(ANSWERS_MAX):
        ask(answers, at(number), 1)
    ask(answers, at(999), 2 * DEAF_ANSWERS)
    assert answers.deaf() == ()
    for _ in range(PATIENCE_FLUSHES):
        answers.flush()
    ask(answers, at(999), DEAF_ANSWERS)
    assert answers.deaf() == (Endpoint("10.0.0.7", 40_999),)
