"""The in-process transport: injected faults and local streams; see also aeron/test_contract.py."""

from __future__ import annotations

import threading

import pytest

from benchmarks.memory_transport import MemoryNetwork
from sparkstrom.base.errors import UsageError
from sparkstrom.transport.base import OfferResult


def offer_over_senders(seed: int, offers: int) -> list[OfferResult]:
    """Offer frames over ``offers`` senders that may break; return the results."""
    network = MemoryNetwork(seed, break_fraction=0.2)
    here, there = network.open(), network.open()
    there.open_receiver(1)
    answers = []
    for _ in range(offers):
        sender = here.open_sender(there.endpoint, 1, control=True)
        answers += [sender.offer([b"x"])[1] for _ in range(5)]
    return answers


def test_broken_sender_stays_unconnected() -> None:
    """A sender that broke after its first frame stays unconnected."""
    network = MemoryNetwork(break_fraction=1.0)
    here, there = network.open(), network.open()
    there.open_receiver(1)
    sender = here.open_sender(there.endpoint, 1, control=True)
    assert sender.offer([b"first"]) == (1, OfferResult.SENT)
    for _ in range(3):
        assert sender.offer([b"second"]) == (0, OfferResult.UNCONNECTED)
    assert [arrival.frame for arrival in there.poll(0)] == [b"first"]


def test_seed_determines_broken_offers() -> None:
    """Equal seeds break equal offers."""
    assert offer_over_senders(1, 20) == offer_over_senders(1, 20)
    assert offer_over_senders(1, 20) != offer_over_senders(2, 20)
    assert {OfferResult.SENT, OfferResult.UNCONNECTED} == set(offer_over_senders(1, 20))


def test_poll_returns_early_when_frame_arrives() -> None:
    """``poll`` returns long before its timeout when a frame arrives."""
    network = MemoryNetwork()
    here, there = network.open(), network.open()
    there.open_receiver(1)
    sender = here.open_sender(there.endpoint, 1, control=True)
    thread = threading.Thread(target=sender.offer, args=([b"wake"],))
    thread.start()
    assert [arrival.frame for arrival in there.poll(30)] == [b"wake"]
    thread.join()


def test_local_sender_reaches_transports_with_its_endpoint() -> None:
    """A local sender reaches transports with its own endpoint, whatever endpoint it names."""
    network = MemoryNetwork()
    here, elsewhere = network.open(), network.open()
    beside = network.open(beside=here)
    for transport in (beside, elsewhere):
        transport.open_receiver(1, local=True)
    near, far = (
        here.open_sender(transport.endpoint, 1, control=True, local=True)
        for transport in (beside, elsewhere)
    )
    assert near.offer([b"near"]) == (1, OfferResult.SENT)
    assert far.offer([b"the endpoint is only a name"]) == (1, OfferResult.SENT)
    assert [len(transport.poll(0)) for transport in (beside, elsewhere)] == [2, 0]


def test_local_and_udp_streams_are_separate() -> None:
    """Local and UDP streams of one number and endpoint are separate; a receiver has one kind."""
    network = MemoryNetwork()
    here = network.open()
    there = network.open(beside=here)
    here.open_receiver(1, local=True)
    there.open_receiver(1)
    for local in (True, False):
        sender = there.open_sender(here.endpoint, 1, control=True, local=local)
        assert sender.offer([b"local" if local else b"other"]) == (1, OfferResult.SENT)
    assert [arrival.frame for arrival in here.poll(0)] == [b"local"]
    assert [arrival.frame for arrival in there.poll(0)] == [b"other"]
    with pytest.raises(UsageError, match=r"stream 1 .* as a local .* open as a UDP one"):
        there.open_receiver(1, local=True)


def test_sender_to_closed_receiver_does_not_reach_new_one() -> None:
    """A sender to a closed receiver does not reach a new receiver of the same stream."""
    network = MemoryNetwork()
    here, there = network.open(), network.open()
    there.open_receiver(1)
    old = here.open_sender(there.endpoint, 1, control=True)
    old.offer([b"old"])
    there.close_receiver(1)
    there.open_receiver(1)
    new = here.open_sender(there.endpoint, 1, control=True)
    assert old.offer([b"late"]) == (0, OfferResult.UNCONNECTED)
    assert new.offer([b"new"]) == (1, OfferResult.SENT)
    assert [arrival.frame for arrival in there.poll(0)] == [b"new"]
