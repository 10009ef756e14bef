"""The in-process transport: injected faults and local streams; see also aeron/test_contract.py."""

from __future__ import annotations

import threading

import pytest

from benchmarks.memory_transport import MemoryNetwork
from sparkstrom.base.errors import UsageError
from sparkstrom.transport.base import OfferResult


def run(seed: int, offers: int) -> list[OfferResult]:
    """Offer frames over ``offers`` senders that may break; return the results."""
    network = MemoryNetwork(seed, break_fraction=0.2)
    here, there = network.open(), network.open()
    there.open_receiver(1)
    answers = []
    for _ in range(offers):
        sender = here.open_sender(there.endpoint, 1, control=True)
        answers += [sender.offer([b"x"])[1] for _ in range(5)]
    return answers


def test_a_broken_sender_stays_broken() -> None:
    """A sender that broke after its first frame stays unconnected."""
    network = MemoryNetwork(break_fraction=1.0)
    here, there = network.open(), network.open()
    there.open_receiver(1)
    sender = here.open_sender(there.endpoint, 1, control=True)
    assert sender.offer([b"first"]) == (1, OfferResult.SENT)
    for _ in range(3):
        assert sender.offer([b"second"]) == (0, OfferResult.UNCONNECTED)
    assert [arrival.frame for arrival in there.poll(0)] == [b"first"]


def test_breaks_follow_from_the_seed() -> None:
    """Equal seeds break equal offers."""
    assert run(1, 20) == run(1, 20)
    assert run(1, 20) != run(2, 20)
    assert {OfferResult.SENT, OfferResult.UNCONNECTED} == set(run(1, 20))


def test_a_waiting_poll_wakes_for_a_frame() -> None:
    """``poll`` returns long before its timeout when a frame arrives."""
    network = MemoryNetwork()
    here, there = network.open(), network.open()
    there.open_receiver(1)
    sender = here.open_sender(there.endpoint, 1, control=True)
    thread = threading.Thread(target=sender.offer, args=([b"wake"],))
    thread.start()
    assert [arrival.frame for arrival in there.poll(30)] == [b"wake"]
    thread.join()


def test_local_streams_lead_to_whom_the_endpoint_is_shared_with() -> None:
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


def test_local_streams_and_others_do_not_meet() -> None:
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


def test_a_receiver_that_came_back_is_another_one() -> None:
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
