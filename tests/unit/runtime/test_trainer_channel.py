"""Trainer channel: items, directives and events between the threads, wakes, and errors."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from sparkstrom.codec.messages import Activity, Commit
from sparkstrom.protocol.common.events_and_effects import (
    ActivityChanged,
    ApplyCommit,
    Command,
    CommitApplied,
    Directive,
    Event,
    StepCompleted,
    TrainerDrained,
)
from sparkstrom.runtime.theta import Theta
from sparkstrom.runtime.trainer_thread import TrainerChannel
from sparkstrom.runtime.training_loop import TrainerInbox

TRAIN = Directive(Command.TRAIN, steps_max=3)


@pytest.fixture
def channel(inbox: TrainerInbox) -> TrainerChannel:
    return TrainerChannel(inbox, wake=lambda: None)


@pytest.fixture
def inbox() -> TrainerInbox:
    return TrainerInbox(10_000, Theta(300, 10).new_sum)


def start_waiting(channel: TrainerChannel, known: Directive) -> threading.Thread:
    """Start a thread that waits up to 60 s on the channel."""
    waiter = threading.Thread(target=channel.wait, args=(60, known), daemon=True)
    waiter.start()
    return waiter


def ends_soon(waiter: threading.Thread) -> bool:
    """Return whether the thread ends within 20 s, long before its wait times out."""
    waiter.join(20)
    return not waiter.is_alive()


def test_channel_starts_without_items_and_waits_for_joining(channel: TrainerChannel) -> None:
    """At first there are no items, and the directive is to wait for joining."""
    assert channel.take() == ([], Directive(Command.WAIT, "joining"))


def test_items_are_taken_once_and_directive_persists(
    channel: TrainerChannel, make_commit: Callable[..., Commit]
) -> None:
    """Items are taken once; the directive can be read again."""
    item = ApplyCommit(make_commit(1, 1))
    channel.publish([item], TRAIN)
    assert channel.take() == ([item], TRAIN)
    assert channel.take() == ([], TRAIN)
    assert channel.command == TRAIN


def test_events_are_read_in_posting_order(channel: TrainerChannel) -> None:
    channel.post(ActivityChanged(2))
    channel.post(TrainerDrained())
    assert [channel.events.get_nowait(), channel.events.get_nowait()] == [
        ActivityChanged(2),
        TrainerDrained(),
    ]


def test_only_events_that_concern_others_wake_node_thread(
    inbox: TrainerInbox,
) -> None:
    """Events wake the node's thread, except applied commits and changes of stepping and waiting."""
    wakes: list[Event] = []
    channel = TrainerChannel(inbox, wake=lambda: wakes.append(events[-1]))
    events: list[Event] = []
    for event in (
        CommitApplied(3),
        ActivityChanged(Activity.WAITING),  # the first activity that is not catching up
        ActivityChanged(Activity.STEPPING),
        ActivityChanged(Activity.WAITING),
        StepCompleted(0, 1, 1),
        ActivityChanged(Activity.FINISHED),
    ):
        events.append(event)
        channel.post(event)
    assert wakes == [events[1], events[4], events[5]]


def test_node_thread_error_ends_wait_and_take_raises(
    channel: TrainerChannel,
) -> None:
    """An error of the node's thread ends a wait and is raised by ``take``."""
    channel.publish([], TRAIN)
    channel.fail(ZeroDivisionError("there"))
    assert ends_soon(start_waiting(channel, TRAIN))
    with pytest.raises(ZeroDivisionError, match="there"):
        channel.take()
    assert channel.command == TRAIN


@pytest.mark.parametrize("how", ["item", "command", "error"])
def test_item_directive_or_error_ends_wait(
    channel: TrainerChannel, make_commit: Callable[..., Commit], how: str
) -> None:
    """An item, another directive or an error ends a wait that has begun."""
    waiter = start_waiting(channel, channel.command)
    changes: dict[str, Callable[[], None]] = {
        "item": lambda: channel.publish([ApplyCommit(make_commit(1, 1))], channel.command),
        "command": lambda: channel.publish([], TRAIN),
        "error": lambda: channel.fail(ValueError()),
    }
    changes[how]()
    assert ends_soon(waiter)


def test_wait_returns_at_once_if_item_is_queued(
    channel: TrainerChannel, make_commit: Callable[..., Commit]
) -> None:
    """``wait`` returns at once if an item is there, even if the directive is known."""
    channel.publish([ApplyCommit(make_commit(1, 1))], TRAIN)
    assert ends_soon(start_waiting(channel, TRAIN))
    assert len(channel.take()[0]) == 1


def test_wait_returns_at_once_if_directive_changed_since_take(channel: TrainerChannel) -> None:
    """``wait`` returns at once if the directive has changed since ``take``."""
    _, known = channel.take()
    channel.publish([], TRAIN)
    assert ends_soon(start_waiting(channel, known))
