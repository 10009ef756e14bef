"""Message endpoints: messages of which only some frames have arrived."""

from __future__ import annotations

from benchmarks.memory_transport import MemoryNetwork
from sparkstrom.base.identity import MASTER
from sparkstrom.codec.messages import Message, TrainingFailure
from tests.unit.runtime.offices import Office, join, offer, update


def test_part_of_a_data_message_is_told_as_it_comes(network: MemoryNetwork) -> None:
    """``arriving`` returns the bytes of a partly received data message if they have grown."""
    master, node = Office(network, MASTER, 10, chunk=1024), Office(network, 7, 20, chunk=1024)
    join(master, node, edge=3)
    whole = update(payload=bytes(10_000))
    pieces = pieces_of(node, whole)
    at = master.at(1012)
    for count, piece in enumerate(pieces[:3], 1):
        offer(node, at, piece, control=False)
        assert master.got() == []
        assert master.room.arriving() == [(7, count * 1024)]
        assert master.room.arriving() == []  # nothing new
    offer(node, at, *pieces[3:], control=False)
    assert master.got() == [(7, whole)]
    assert master.room.arriving() == []


def test_nothing_is_under_way_of_a_message_that_lost_a_piece(network: MemoryNetwork) -> None:
    """A message that lost a frame can never be complete, so none of its bytes are arriving."""
    master, node = Office(network, MASTER, 10, chunk=1024), Office(network, 7, 20, chunk=1024)
    join(master, node, edge=3)
    first, _, third, *_ = pieces_of(node, update(payload=bytes(10_000)))
    for piece, arriving in ((first, 1024), (third, 0)):
        offer(node, master.at(1012), piece, control=False)
        assert master.got() == []
        assert master.room.arriving() == [(7, arriving)]


def test_part_of_a_control_message_is_not_told(network: MemoryNetwork) -> None:
    """``arriving`` ignores partly received control messages."""
    master, node = Office(network, MASTER, 10), Office(network, 7, 20)
    join(master, node, edge=3)
    pieces = pieces_of(node, TrainingFailure(node=7, reason="r", trace="t" * 16_000))
    offer(node, master.at(1012), pieces[0])
    assert master.got() == []
    assert master.room.arriving() == []


def pieces_of(node: Office, message: Message) -> list[bytes]:
    """Return the encrypted frames of a message to the master, in order, without sending them."""
    frames = node.room._seal_message(message, receiver=MASTER, edge=3)
    assert len(frames) > 1
    return frames
