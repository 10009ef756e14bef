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


def has_unread_rings(bell: Doorbell) -> bool:
    """Return whether the bell has unread rings."""
    return bool(select.select([bell.descriptor], [], [], 0)[0])


def read_all_rings(bell: Doorbell) -> None:
    """Read all rings."""
    os.read(bell.descriptor, 4096)


def test_owner_rings_are_readable_until_read(bell: Doorbell) -> None:
    """The owner's rings, from several threads, can be read, and are gone once they were read."""
    assert not has_unread_rings(bell)
    threads = [threading.Thread(target=bell.ring) for _ in range(2)]
    for ringing in [*threads, threading.Thread(target=read_all_rings, args=(bell,))]:
        ringing.start()
        ringing.join(60)
    assert not has_unread_rings(bell)
    threading.Thread(target=bell.ring).start()
    assert select.select([bell.descriptor], [], [], 60)[0]


def test_sender_rings_only_bell_of_its_stream(bell: Doorbell, tmp_path: Path) -> None:
    """A sender rings only the bell that has its stream."""
    bell.add_stream(7)
    other = Doorbell(tmp_path)
    other.add_stream(8)
    sender = ReceiverBell(tmp_path, 7)
    sender.ring()
    assert (has_unread_rings(bell), has_unread_rings(other)) == (True, False)
    sender.close()
    other.close()


def test_ring_has_no_effect_until_bell_has_stream(bell: Doorbell, tmp_path: Path) -> None:
    """A sender's ring does nothing until a bell has its stream."""
    sender = ReceiverBell(tmp_path, 7)
    sender.ring()
    bell.add_stream(7)
    sender.ring()
    assert has_unread_rings(bell)
    sender.close()
    sender.close()


def test_sender_rings_newest_receiver_of_stream(bell: Doorbell, tmp_path: Path) -> None:
    bell.add_stream(7)
    successor = Doorbell(tmp_path)
    successor.add_stream(7)
    sender = ReceiverBell(tmp_path, 7)
    sender.ring()
    assert (has_unread_rings(bell), has_unread_rings(successor)) == (False, True)
    sender.close()
    successor.close()


def test_rings_beyond_fifo_capacity_are_dropped(bell: Doorbell) -> None:
    """Rings beyond what the FIFO holds are dropped without an error."""
    for _ in range(70_000):  # more than a FIFO holds
        bell.ring()
    assert has_unread_rings(bell)


def test_ring_write_error_is_raised(bell: Doorbell, tmp_path: Path) -> None:
    """An OSError other than a full FIFO is raised."""
    bell.add_stream(7)
    sender = ReceiverBell(tmp_path, 7)
    sender._descriptor = os.open(tmp_path / BELLS_DIRECTORY / "7", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(OSError, match="Bad file descriptor"):
        sender.ring()
    sender.close()


def test_sender_may_ring_closed_bell(bell: Doorbell, tmp_path: Path) -> None:
    """Ringing a closed bell does nothing."""
    bell.add_stream(7)
    sender = ReceiverBell(tmp_path, 7)
    sender.ring()
    bell.close()
    sender.ring()
    sender.close()


def test_closed_bell_removes_files_and_ignores_rings(bell: Doorbell, tmp_path: Path) -> None:
    """A closed bell removes its files, and ringing it does nothing."""
    bell.add_stream(7)
    bell.close()
    bell.close()
    bell.ring()
    assert list((tmp_path / BELLS_DIRECTORY).iterdir()) == []


def test_bell_tolerates_directory_removed_by_ending_driver(bell: Doorbell, tmp_path: Path) -> None:
    """The bell of a running client tolerates that an ending driver removed its directory."""
    shutil.rmtree(tmp_path / BELLS_DIRECTORY)
    bell.add_stream(7)
    bell.remove_stream(7)
    bell.ring()
    assert has_unread_rings(bell)
