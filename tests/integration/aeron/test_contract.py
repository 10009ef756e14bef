"""The contract of transports, tested with each of them: in memory, and Aeron.

Each is tested across two endpoints (media drivers), and on local streams of one.
"""

from __future__ import annotations

import random
import secrets
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from benchmarks.memory_transport import MemoryNetwork
from sparkstrom.base.errors import UsageError
from sparkstrom.base.identity import Endpoint
from sparkstrom.transport.base import OfferResult, Transport

Pair = tuple[Transport, Transport]


@pytest.fixture(params=["memory", "aeron", "memory-local", "aeron-local"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Two transports, on separate endpoints or on one."""
    kind, _, local = request.param.partition("-")
    here: Any
    there: Any
    if kind == "memory":
        network = MemoryNetwork()
        here = network.open()
        there = network.open(beside=here) if local else network.open()
    else:
        drivers = request.getfixturevalue("shared_drivers")
        # Another test's senders, which may still be closing, must not reach this test's receivers.
        keys = [secrets.token_hex(4)] * 2 if local else ["here", "there"]
        here, there = map(drivers.transport, keys)
    if local:
        for transport in (here, there):
            transport.open_sender = partial(transport.open_sender, local=True)
            transport.open_receiver = partial(transport.open_receiver, local=True)
    yield here, there
    here.close()
    there.close()


def frames_of(sizes: list[int], seed: int = 1) -> list[bytes]:
    """Return random frames of these sizes."""
    return [random.Random(seed + size).randbytes(size) for size in sizes]


@pytest.mark.parametrize("control", [False, True])
def test_frames_arrive_whole_and_in_order(pair: Pair, exchange: Any, control: bool) -> None:
    here, there = pair
    longest = there.max_control_frame_bytes if control else there.max_frame_bytes
    there.open_receiver(7)
    sender = here.open_sender(there.endpoint, 7, control=control)
    sizes = [1, 31, 32, 33, 1375, 1376, 1377, 8159, 8160, 8161, longest - 1, longest]
    frames = frames_of(sizes + sizes[::-1]) * 4
    arrivals = exchange(here, sender, frames, there)
    assert [a.frame for a in arrivals] == frames
    assert {a.stream for a in arrivals} == {7}


def test_frame_arrives_on_its_own_stream(pair: Pair, exchange: Any) -> None:
    """A frame arrives on the stream to which it was sent, of twenty."""
    here, there = pair
    for stream in range(1, 21):
        there.open_receiver(stream)
    senders = {s: here.open_sender(there.endpoint, s, control=True) for s in range(1, 21)}
    for stream, sender in senders.items():
        arrivals = exchange(here, sender, [b"to %d" % stream], there)
        assert arrivals == [(stream, b"to %d" % stream)]


def test_long_frames_of_several_senders_on_one_stream_do_not_mix(pair: Pair) -> None:
    here, there = pair
    there.open_receiver(3)
    senders = [here.open_sender(there.endpoint, 3, control=False) for _ in range(5)]
    waiting = [[bytes([i]) * here.max_frame_bytes] * 10 for i in range(5)]
    got: list[bytes] = []
    while len(got) < 50:
        for sender, frames in zip(senders, waiting, strict=True):
            del frames[: sender.offer(frames)[0]]
        here.poll(0)
        got += [arrival.frame for arrival in there.poll(0.01)]
    assert sorted(got) == sorted(
        bytes([i]) * here.max_frame_bytes for i in range(5) for _ in range(10)
    )


def test_unpolled_receiver_makes_sender_busy_without_loss(pair: Pair) -> None:
    """Frames that were accepted before back-pressure arrive once the peer polls."""
    here, there = pair
    there.open_receiver(9)
    sender = here.open_sender(there.endpoint, 9, control=False)
    frame_bytes, sent, answer = here.max_frame_bytes, 0, OfferResult.UNCONNECTED
    while answer is not OfferResult.BUSY:
        went, answer = sender.offer([sent.to_bytes(4, "little") * (frame_bytes // 4)])
        sent += went
        here.poll(0)
        assert sent * frame_bytes < 8 << 20
    got: list[bytes] = []
    while len(got) < sent:
        got += [arrival.frame[:4] for arrival in there.poll(0.05)]
    assert got == [n.to_bytes(4, "little") for n in range(sent)]


def test_sender_without_receiver_stays_unconnected(pair: Pair) -> None:
    """A sender to a stream without a receiver stays unconnected."""
    here, there = pair
    elsewhere = there.endpoint  # it has no receiver for this stream
    sender = here.open_sender(elsewhere, 1234, control=True)
    for _ in range(50):
        assert sender.offer([b"anybody?"]) == (0, OfferResult.UNCONNECTED)
        here.poll(0.002)


def test_receiver_can_be_closed_right_after_opening(pair: Pair, exchange: Any) -> None:
    """A receiver may be closed right after it was opened, and be opened again."""
    here, there = pair
    for stream in (7, 8):
        there.open_receiver(stream)
        there.close_receiver(stream)
    there.open_receiver(8)
    closed, again = (here.open_sender(there.endpoint, s, control=True) for s in (7, 8))
    for i in range(20):
        closed.offer([b"gone"])
        assert exchange(here, again, [b"%d" % i], there) == [(8, b"%d" % i)]


def test_empty_offer_returns_sent(pair: Pair, exchange: Any) -> None:
    """Offering no frames to a connected sender returns SENT."""
    here, there = pair
    there.open_receiver(4)
    sender = here.open_sender(there.endpoint, 4, control=True)
    exchange(here, sender, [b"up"], there)
    assert sender.offer([]) == (0, OfferResult.SENT)


def test_poll_without_frames_returns_empty_list(pair: Pair) -> None:
    here, _ = pair
    assert here.poll(0) == []
    assert here.poll(0.01) == []


def test_wake_ends_exactly_one_poll(pair: Pair) -> None:
    """A wake ends one ``poll``, whether it is called before or during it."""
    here, _ = pair
    early, waiter = (
        threading.Thread(target=here.poll, args=(3600.0,), daemon=True) for _ in range(2)
    )
    here.wake()
    early.start()
    early.join(20)
    assert not early.is_alive()
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive()
    here.wake()
    waiter.join(20)
    assert not waiter.is_alive()


def test_closed_receiver_gets_no_frames(pair: Pair, exchange: Any) -> None:
    """A closed receiver gets no more frames, other streams do; closing twice is allowed."""
    here, there = pair
    there.open_receiver(5)
    there.open_receiver(6)
    fifth = here.open_sender(there.endpoint, 5, control=True)
    sixth = here.open_sender(there.endpoint, 6, control=True)
    exchange(here, fifth, [b"before"], there)
    there.close_receiver(5)
    there.close_receiver(5)
    there.close_receiver(77)
    fifth.offer([b"after"])
    assert exchange(here, sixth, [b"still here"], there) == [(6, b"still here")]


def test_new_sender_reaches_receiver_of_closed_sender(pair: Pair, exchange: Any) -> None:
    """After a sender was closed, another one reaches the same receiver."""
    here, there = pair
    there.open_receiver(5)
    for turn in (b"first", b"second"):
        sender = here.open_sender(there.endpoint, 5, control=False)
        assert exchange(here, sender, [turn], there) == [(5, turn)]
        sender.close()


def test_closed_sender_returns_closed(pair: Pair, exchange: Any) -> None:
    """A sender that was closed, even during its opening, returns CLOSED."""
    here, there = pair
    there.open_receiver(8)
    opened, opening = (here.open_sender(there.endpoint, 8, control=True) for _ in range(2))
    exchange(here, opened, [b"x"], there)
    for sender in (opened, opening):
        sender.close()
        sender.close()
        assert sender.offer([b"y"]) == (0, OfferResult.CLOSED)


@pytest.mark.parametrize("control", [False, True])
def test_a_frame_that_is_too_long_is_refused(pair: Pair, exchange: Any, control: bool) -> None:
    here, there = pair
    longest = here.max_control_frame_bytes if control else here.max_frame_bytes
    there.open_receiver(2)
    sender = here.open_sender(there.endpoint, 2, control=control)
    exchange(here, sender, [b"up"], there)
    with pytest.raises(UsageError, match=f"{longest + 1} bytes.*limit is {longest}"):
        sender.offer([bytes(longest + 1)])


def test_opening_a_receiver_again_changes_nothing(pair: Pair, exchange: Any) -> None:
    here, there = pair
    there.open_receiver(3)
    sender = here.open_sender(there.endpoint, 3, control=True)
    exchange(here, sender, [b"first"], there)
    there.open_receiver(3)
    assert exchange(here, sender, [b"second"], there) == [(3, b"second")]


def test_transport_close_is_idempotent_and_final(pair: Pair) -> None:
    """A transport may be closed twice; other calls then raise UsageError."""
    here, there = pair
    sender = here.open_sender(there.endpoint, 2, control=True)
    here.close()
    here.close()
    assert sender.offer([b"x"]) == (0, OfferResult.CLOSED)
    calls: list[Callable[[], Any]] = [
        lambda: here.poll(0),
        lambda: here.open_receiver(1),
        lambda: here.open_sender(Endpoint("127.0.0.1", 1), 1, control=True),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="closed"):
            call()
