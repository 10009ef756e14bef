"""Doorbells: a ring ends the wait of the receiver of a stream, and of no other."""

from __future__ import annotations

import os
import select
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkstrom.transport.aeron.doorbell import BELLS_DIRECTORY, Doorbell, ReceiverBell


@pytest.fixture
def bell(tmp_path: Path) -> Iterator[Doorbell]:
    bell = Doorbell(tmp_path)
    yield bell
    bell.close()


def rung(bell: Doorbell) -> bool:
    """Return whether the bell has unread rings."""
    return bool(select.select([bell.descriptor], [], [], 0)[0])


def silence(bell: Doorbell) -> None:
    """Read all rings."""
    os.read(bell.descriptor, 4096)


def test_its_owner_rings_from_any_thread(bell: Doorbell) -> None:
    """The owner's rings, from several threads, can be read, and are gone once they were read."""
    assert not rung(bell)
    threads = [threading.Thread(target=bell.ring) for _ in range(2)]
    for ringing in [*threads, threading.Thread(target=silence, args=(bell,))]:
        ringing.start()
        ringing.join(60)
    assert not rung(bell)
    threading.Thread(target=bell.ring).start()
    assert select.select([bell.descriptor], [], [], 60)[0]


def test_a_sender_finds_the_bell_of_its_stream(bell: Doorbell, tmp_path: Path) -> None:
    """A sender rings only the bell that has its stream."""
    bell.add_stream(7)
    other = Doorbell(tmp_path)
    other.add_stream(8)
    sender = ReceiverBell(tmp_path, 7)
    sender.ring()
    assert (rung(bell), rung(other)) == (True, False)
    sender.close()
    other.close()


def test_a_sender_waits_for_a_bell_that_comes_later(bell: Doorbell, tmp_path: Path) -> None:
    """A sender's ring does nothing until a bell has its stream."""
    sender = ReceiverBell(tmp_path, 7)
    sender.ring()
    bell.add_stream(7)
    sender.ring()
    assert rung(bell)
    sender.close()
    sender.close()


def test_the_newest_receiver_of_a_stream_is_rung(bell: Doorbell, tmp_path: Path) -> None:
    bell.add_stream(7)
    successor = Doorbell(tmp_path)
    successor.add_stream(7)
    sender = ReceiverBell(tmp_path, 7)
    sender.ring()
    assert (rung(bell), rung(successor)) == (False, True)
    sender.close()
    successor.close()


def test_rings_that_nobody_hears_are_dropped(bell: Doorbell) -> None:
    """Rings beyond what the FIFO holds are dropped without an error."""
    for _ in range(70_000):  # more than a FIFO holds
        bell.ring()
    assert rung(bell)


def test_a_ring_that_cannot_be_written_is_an_error(bell: Doorbell, tmp_path: Path) -> None:
    """An OSError other than a full FIFO is raised."""
    bell.add_stream(7)
    sender = ReceiverBell(tmp_path, 7)
    sender._descriptor = os.open(tmp_path / BELLS_DIRECTORY / "7", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(OSError, match="Bad file descriptor"):
        sender.ring()
    sender.close()


def test_a_sender_outlives_its_receiver(bell: Doorbell, tmp_path: Path) -> None:
    """Ringing a closed bell does nothing."""
    bell.add_stream(7)
    sender = ReceiverBell(tmp_path, 7)
    sender.ring()
    bell.close()
    sender.ring()
    sender.close()


def test_what_is_closed_is_gone_and_silent(bell: Doorbell, tmp_path: Path) -> None:
    """A closed bell removes its files, and ringing it does nothing."""
    bell.add_stream(7)
    bell.close()
    bell.close()
    bell.ring()
    assert list((tmp_path / BELLS_DIRECTORY).iterdir()) == []


def test_a_driver_that_ends_takes_its_bells_along(bell: Doorbell, tmp_path: Path) -> None:
    """The bell of a running client tolerates that an ending driver removed its directory."""
    shutil.rmtree(tmp_path / BELLS_DIRECTORY)
    bell.add_stream(7)
    bell.remove_stream(7)
    bell.ring()
    assert rung(bell)
