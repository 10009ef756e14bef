"""Faults of the in-process transport; the contract itself is in tests/integration/aeron."""

from __future__ import annotations

import threading

from sparkstrom.transport.base import Offer
from sparkstrom.transport.memory import MemoryNetwork


def run(seed: int, offers: int) -> list[Offer]:
    network = MemoryNetwork(seed, break_fraction=0.2)
    here, there = network.open(), network.open()
    there.open_receiver(1)
    answers = []
    for _ in range(offers):
        sender = here.open_sender(there.endpoint, 1, control=True)
        answers += [sender.offer([b"x"])[1] for _ in range(5)]
    return answers


def test_a_broken_sender_stays_broken() -> None:
    network = MemoryNetwork(break_fraction=1.0)
    here, there = network.open(), network.open()
    there.open_receiver(1)
    sender = here.open_sender(there.endpoint, 1, control=True)
    assert sender.offer([b"first"]) == (1, Offer.SENT)
    for _ in range(3):
        assert sender.offer([b"second"]) == (0, Offer.UNCONNECTED)
    assert [arrival.frame for arrival in there.poll(0)] == [b"first"]


def test_breaks_follow_from_the_seed() -> None:
    assert run(1, 20) == run(1, 20)
    assert run(1, 20) != run(2, 20)
    assert {Offer.SENT, Offer.UNCONNECTED} == set(run(1, 20))


def test_a_waiting_poll_wakes_for_a_frame() -> None:
    network = MemoryNetwork()
    here, there = network.open(), network.open()
    there.open_receiver(1)
    sender = here.open_sender(there.endpoint, 1, control=True)
    thread = threading.Thread(target=sender.offer, args=([b"wake"],))
    thread.start()
    assert [arrival.frame for arrival in there.poll(30)] == [b"wake"]
    thread.join()


def test_a_receiver_that_came_back_is_another_one() -> None:
    network = MemoryNetwork()
    here, there = network.open(), network.open()
    there.open_receiver(1)
    old = here.open_sender(there.endpoint, 1, control=True)
    old.offer([b"old"])
    there.close_receiver(1)
    there.open_receiver(1)
    new = here.open_sender(there.endpoint, 1, control=True)
    assert old.offer([b"late"]) == (0, Offer.UNCONNECTED)
    assert new.offer([b"new"]) == (1, Offer.SENT)
    assert [arrival.frame for arrival in there.poll(0)] == [b"new"]
