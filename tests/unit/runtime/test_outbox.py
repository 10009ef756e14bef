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


class BlockedSender:
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


def test_partly_sent_message_is_not_replaced_by_newer_one() -> None:
    """A message is not replaced by a newer one with its key once some of its frames were sent."""
    sender = BlockedSender()
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


def test_closed_sender_drops_waiting_frames() -> None:
    """The waiting frames are dropped if the sender is closed."""

    class Gone(BlockedSender):
        def offer(self, frames: Sequence[bytes]) -> tuple[int, OfferResult]:
            return 0, OfferResult.CLOSED

    box = Outbox(Gone())
    box.put([b"a"], "state")
    box.flush()
    assert len(box.frames) == 0
    box.put([b"b"], "state")
    assert len(box.frames) == 1


def test_reply_opens_new_sender_after_driver_refused_first() -> None:
    """A reply opens another sender after the media driver refused the first one."""

    class Refused(BlockedSender):
        def offer(self, frames: Sequence[bytes]) -> tuple[int, OfferResult]:
            return 0, OfferResult.CLOSED

    senders = [Refused(), BlockedSender()]
    senders[1].room = 1
    opening = iter(senders)
    answers = ReplyOutboxes(lambda address: next(opening))
    send_requests(answers, peer_address(1), 2)
    assert senders[1].taken == [b"welcome"]


def make_reply_outboxes(senders: dict[Address, BlockedSender]) -> ReplyOutboxes:
    """Return reply outboxes that open the sender of each address in ``senders``."""
    return ReplyOutboxes(lambda address: senders.setdefault(address, BlockedSender()))


def peer_address(number: int) -> Address:
    """Return the address of a peer."""
    return Address("10.0.0.7", 40_000 + number, 1, 2)


def send_requests(answers: ReplyOutboxes, address: Address, times: int) -> None:
    """Let a peer send ``times`` requests, each answered by a reply that is offered once."""
    for _ in range(times):
        answers.note_request(address)
        answers.put(address, [b"welcome"])
        answers.flush()


def test_peer_with_many_requests_and_no_reply_is_unresponsive() -> None:
    """A peer is unresponsive if it sends many requests and has never received a reply."""
    senders: dict[Address, BlockedSender] = {}
    answers = make_reply_outboxes(senders)
    send_requests(answers, peer_address(1), UNRESPONSIVE_AFTER_REQUESTS)
    send_requests(answers, peer_address(2), 3)  # a new peer, or a killed one
    assert answers.unresponsive_peers() == ()
    send_requests(answers, peer_address(1), 1)
    assert answers.unresponsive_peers() == (Endpoint("10.0.0.7", 40_001),)
    senders[peer_address(1)].room = 1
    answers.flush()
    assert answers.unresponsive_peers() == ()
    send_requests(
        answers, peer_address(1), 2 * UNRESPONSIVE_AFTER_REQUESTS
    )  # it is slow: it has received a reply
    assert answers.unresponsive_peers() == ()


def test_peer_that_stopped_sending_requests_is_not_unresponsive() -> None:
    """A peer that sends no more requests is not unresponsive, however many messages wait for it."""
    answers = make_reply_outboxes({})
    send_requests(answers, peer_address(1), 1)
    for _ in range(2 * UNRESPONSIVE_AFTER_REQUESTS):
        answers.put(peer_address(1), [b"probe"])
        answers.flush()
    assert answers.unresponsive_peers() == ()


def test_requests_count_only_once_sender_to_peer_is_open() -> None:
    """Requests of a peer count only once a sender to it is open."""
    answers = make_reply_outboxes({})
    for number in range(OPEN_SENDERS_MAX):
        send_requests(answers, peer_address(number), 1)
    send_requests(answers, peer_address(999), 2 * UNRESPONSIVE_AFTER_REQUESTS)
    assert answers.unresponsive_peers() == ()
    for _ in range(CONNECT_FLUSHES_MAX):
        answers.flush()
    send_requests(answers, peer_address(999), UNRESPONSIVE_AFTER_REQUESTS)
    assert answers.unresponsive_peers() == (Endpoint("10.0.0.7", 40_999),)
