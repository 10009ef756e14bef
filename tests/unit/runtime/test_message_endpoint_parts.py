"""Message endpoints: messages of which only some frames have arrived."""

from __future__ import annotations

from benchmarks.memory_transport import MemoryNetwork
from sparkstrom.base.identity import MASTER
from sparkstrom.codec.messages import Message, TrainingFailure
from tests.unit.runtime.endpoint_peers import Peer, make_update, open_edge_between, send_raw_frames


def test_arriving_reports_growing_bytes_of_partial_data_message(network: MemoryNetwork) -> None:
    """``arriving`` returns the bytes of a partly received data message if they have grown."""
    master, node = Peer(network, MASTER, 10, chunk=1024), Peer(network, 7, 20, chunk=1024)
    open_edge_between(master, node, edge=3)
    whole = make_update(payload=bytes(10_000))
    pieces = seal_pieces(node, whole)
    at = master.at(1012)
    for count, piece in enumerate(pieces[:3], 1):
        send_raw_frames(node, at, piece, control=False)
        assert master.got() == []
        assert master.room.arriving() == [(7, count * 1024)]
        assert master.room.arriving() == []  # nothing new
    send_raw_frames(node, at, *pieces[3:], control=False)
    assert master.got() == [(7, whole)]
    assert master.room.arriving() == []


def test_arriving_reports_zero_bytes_after_lost_frame(network: MemoryNetwork) -> None:
    """A message that lost a frame can never be complete, so none of its bytes are arriving."""
    master, node = Peer(network, MASTER, 10, chunk=1024), Peer(network, 7, 20, chunk=1024)
    open_edge_between(master, node, edge=3)
    first, _, third, *_ = seal_pieces(node, make_update(payload=bytes(10_000)))
    for piece, arriving in ((first, 1024), (third, 0)):
        send_raw_frames(node, master.at(1012), piece, control=False)
        assert master.got() == []
        assert master.room.arriving() == [(7, arriving)]


def test_arriving_ignores_partial_control_message(network: MemoryNetwork) -> None:
    """``arriving`` ignores partly received control messages."""
    master, node = Peer(network, MASTER, 10), Peer(network, 7, 20)
    open_edge_between(master, node, edge=3)
    pieces = seal_pieces(node, TrainingFailure(node=7, reason="r", trace="t" * 16_000))
    send_raw_frames(node, master.at(1012), pieces[0])
    assert master.got() == []
    assert master.room.arriving() == []


def seal_pieces(node: Peer, message: Message) -> list[bytes]:
    """Return the encrypted frames of a message to the master, in order, without sending them."""
    frames = node.room._seal_message(message, receiver=MASTER, edge=3)
    assert len(frames) > 1
    return frames
