"""Outboxes: frames that wait for a sender, replaced messages, and peers that receive no replies."""

from __future__ import annotations

from collections.abc import Sequence

from sparkstrom.base.identity import Endpoint
from sparkstrom.codec.messages import Address
from sparkstrom.runtime.message_endpoint import (
    CONNECT_FLUSHES_MAX,
    OPEN_SENDERS_MAX,
    UNRESPONSIVE_AFTER_REQUESTS,
    Outbox,
    ReplyOutboxes,
)
from sparkstrom.transport.base import OfferResult


class Stuck:
    """A sender that accepts ``room`` more frames."""

    def __init__(self) -> None:
        self.room = 0
        self.taken: list[bytes] = []

    def offer(self, frames: Sequence[bytes]) -> tuple[int, OfferResult]:
        went = list(frames)[: self.room]
        self.room -= len(went)
        self.taken += went
        return len(went), OfferResult.SENT if len(went) == len(frames) else OfferResult.BUSY

    def close(self) -> None:
        """Do nothing: no resource is open."""


def test_a_message_that_has_begun_to_go_goes_whole() -> None:
    """A message is not replaced by a newer one with its key once some of its frames were sent."""
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
    """The waiting frames are dropped if the sender is closed."""

    class Gone(Stuck):
        def offer(self, frames: Sequence[bytes]) -> tuple[int, OfferResult]:
            return 0, OfferResult.CLOSED

    box = Outbox(Gone())
    box.put([b"a"], "state")
    box.flush()
    assert len(box.frames) == 0
    box.put([b"b"], "state")
    assert len(box.frames) == 1


def test_after_a_sender_has_ended_the_next_message_opens_another() -> None:
    """A reply opens another sender after the media driver refused the first one."""

    class Refused(Stuck):
        def offer(self, frames: Sequence[bytes]) -> tuple[int, OfferResult]:
            return 0, OfferResult.CLOSED

    senders = [Refused(), Stuck()]
    senders[1].room = 1
    opening = iter(senders)
    answers = ReplyOutboxes(lambda address: next(opening))
    ask(answers, at(1), 2)
    assert senders[1].taken == [b"welcome"]


def answering(senders: dict[Address, Stuck]) -> ReplyOutboxes:
    """Return reply outboxes that open the sender of each address in ``senders``."""
    return ReplyOutboxes(lambda address: senders.setdefault(address, Stuck()))


def at(number: int) -> Address:
    """Return the address of a peer."""
    return Address("10.0.0.7", 40_000 + number, 1, 2)


def ask(answers: ReplyOutboxes, address: Address, times: int) -> None:
    """Let a peer send ``times`` requests, each answered by a reply that is offered once."""
    for _ in range(times):
        answers.note_request(address)
        answers.put(address, [b"welcome"])
        answers.flush()


def test_who_asks_on_and_takes_no_answer_is_deaf() -> None:
    """A peer is unresponsive if it sends many requests and has never received a reply."""
    senders: dict[Address, Stuck] = {}
    answers = answering(senders)
    ask(answers, at(1), UNRESPONSIVE_AFTER_REQUESTS)
    ask(answers, at(2), 3)  # a new peer, or a killed one
    assert answers.unresponsive_peers() == ()
    ask(answers, at(1), 1)
    assert answers.unresponsive_peers() == (Endpoint("10.0.0.7", 40_001),)
    senders[at(1)].room = 1
    answers.flush()
    assert answers.unresponsive_peers() == ()
    ask(answers, at(1), 2 * UNRESPONSIVE_AFTER_REQUESTS)  # it is slow: it has received a reply
    assert answers.unresponsive_peers() == ()


def test_a_peer_that_died_is_not_called_unresponsive() -> None:
    """A peer that sends no more requests is not unresponsive, however many messages wait for it."""
    answers = answering({})
    ask(answers, at(1), 1)
    for _ in range(2 * UNRESPONSIVE_AFTER_REQUESTS):
        answers.put(at(1), [b"probe"])
        answers.flush()
    assert answers.unresponsive_peers() == ()


def test_who_waits_for_a_turn_is_not_deaf() -> None:
    """Requests of a peer count only once a sender to it is open."""
    answers = answering({})
    for number in range(OPEN_SENDERS_MAX):
        ask(answers, at(number), 1)
    ask(answers, at(999), 2 * UNRESPONSIVE_AFTER_REQUESTS)
    assert answers.unresponsive_peers() == ()
    for _ in range(CONNECT_FLUSHES_MAX):
        answers.flush()
    ask(answers, at(999), UNRESPONSIVE_AFTER_REQUESTS)
    assert answers.unresponsive_peers() == (Endpoint("10.0.0.7", 40_999),)
