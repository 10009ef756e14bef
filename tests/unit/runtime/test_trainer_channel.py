"""The station: each side sees what the other did, and a broken thread is the trainer's to raise."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from sparkstrom.codec.messages import Committed
from sparkstrom.protocol.common.events import (
    Applied,
    Busy,
    Deliver,
    Directive,
    Drained,
    Order,
    Progressed,
)
from sparkstrom.runtime.theta import Theta
from sparkstrom.runtime.trainer_channel import TrainerChannel
from sparkstrom.runtime.trainer_inbox import TrainerInbox

TRAIN = Directive(Order.TRAIN, steps_max=3)


@pytest.fixture
def station() -> TrainerChannel:
    return TrainerChannel(TrainerInbox(10_000, Theta(300, 10).begin_sum))


def start_waiting(station: TrainerChannel, known: Directive) -> threading.Thread:
    waiter = threading.Thread(target=station.wait, args=(60, known), daemon=True)
    waiter.start()
    return waiter


def returns(waiter: threading.Thread) -> bool:
    """Long before it would for itself."""
    waiter.join(20)
    return not waiter.is_alive()


def test_it_begins_with_waiting(station: TrainerChannel) -> None:
    assert station.take() == ([], Directive(Order.WAIT, "joining"))


def test_items_come_once_and_the_command_stays(
    station: TrainerChannel, make_commit: Callable[..., Committed]
) -> None:
    item = Deliver(make_commit(1, 1))
    station.publish([item], TRAIN)
    assert station.take() == ([item], TRAIN)
    assert station.take() == ([], TRAIN)
    assert station.command == TRAIN


def test_events_come_out_in_order(station: TrainerChannel) -> None:
    station.post(Busy(2))
    station.post(Drained())
    assert [station.events.get_nowait(), station.events.get_nowait()] == [Busy(2), Drained()]


def test_what_others_wait_for_wakes_the_thread_and_what_only_it_wants_to_know_does_not(
    station: TrainerChannel,
) -> None:
    wakes: list[int] = []
    station.wake = lambda: wakes.append(len(wakes))
    for event in (Busy(2), Applied(3)):
        station.post(event)
    assert not wakes
    station.post(Progressed(0, 1, 1))
    assert wakes == [0]


def test_what_broke_the_thread_is_raised_and_the_command_stays_readable(
    station: TrainerChannel,
) -> None:
    station.publish([], TRAIN)
    station.fail(ZeroDivisionError("there"))
    assert returns(start_waiting(station, TRAIN))
    with pytest.raises(ZeroDivisionError, match="there"):
        station.take()
    assert station.command == TRAIN


@pytest.mark.parametrize("how", ["item", "command", "error"])
def test_who_waits_is_woken(
    station: TrainerChannel, make_commit: Callable[..., Committed], how: str
) -> None:
    waiter = start_waiting(station, station.command)
    changes: dict[str, Callable[[], None]] = {
        "item": lambda: station.publish([Deliver(make_commit(1, 1))], station.command),
        "command": lambda: station.publish([], TRAIN),
        "error": lambda: station.fail(ValueError()),
    }
    changes[how]()
    assert returns(waiter)


def test_with_something_there_nobody_waits(
    station: TrainerChannel, make_commit: Callable[..., Committed]
) -> None:
    station.publish([Deliver(make_commit(1, 1))], TRAIN)
    assert returns(start_waiting(station, TRAIN))
    assert len(station.take()[0]) == 1


def test_a_command_that_came_after_taking_is_not_slept_over(station: TrainerChannel) -> None:
    _, known = station.take()
    station.publish([], TRAIN)
    assert returns(start_waiting(station, known))
