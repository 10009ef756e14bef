"""Simulated fits through the endpoints of real fits, and tests of checks and virtual transport."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.base.identity import MASTER, Endpoint
from sparkstrom.codec.messages import CommitsRequest, ProbeReply
from sparkstrom.codec.sealed_frames import Header
from sparkstrom.simulation import fuzzing as conditions
from sparkstrom.simulation.endpoint_network import (
    RECEIVER_BYTES_MAX,
    EndpointNetwork,
    FrameDestination,
    LossMarkingSeal,
    VirtualReceiver,
    VirtualSender,
    VirtualTransport,
)
from sparkstrom.simulation.fuzzing import simulate_seeds
from sparkstrom.simulation.links import DeliveryChecker
from sparkstrom.simulation.process import EdgeEnd
from sparkstrom.simulation.run_options import NO_FAULTS, RunSize, TransportMode
from sparkstrom.simulation.world import World
from sparkstrom.transport.base import OfferResult, ReceivedFrame
from tests.simulation.test_seeds import CORES

ENDPOINT = {"through": TransportMode.ENDPOINT}


@pytest.mark.parametrize(("mode", "nodes"), [("plain", 4), ("mesh", 12)])
def test_fits_through_endpoints_keep_invariants_under_faults(mode: str, nodes: int) -> None:
    """Fits through endpoints violate no invariant, and all kinds of network faults occur."""
    seen: set[str] = set()
    for result in simulate_seeds(range(24), nodes, mode, ENDPOINT, CORES):
        repeat = (
            f"python -m sparkstrom.simulation --mode {mode} --nodes {nodes} --seeds {result.seed}"
        )
        assert result.violations == [], f"{repeat} --through endpoint"
        seen |= set(result.faults)
    assert seen >= {"lost", "repeated", "late", "recordings", "edge deaths", "cut off"}


def test_some_seeds_draw_endpoint_or_codec_transport() -> None:
    """Some random scenarios use real endpoints, and some encode messages."""
    ways = [conditions.draw_scenario(seed, 12, "mesh")[0].through for seed in range(400)]
    assert 10 < ways.count(TransportMode.ENDPOINT) < 45
    assert 10 < ways.count(TransportMode.CODEC) < 80


def make_endpoint_world(seed: int, size: RunSize, **faults: Any) -> World:
    """Return a simulation through endpoints without faults, except for those given."""
    return World(seed, replace(size, **ENDPOINT), replace(NO_FAULTS, **faults))


def test_endpoints_use_different_frame_lengths_and_reject_repeats() -> None:
    """Frame lengths differ, and repeated frames are rejected, so these mechanisms are exercised."""
    world = make_endpoint_world(1, RunSize(nodes=4, fan_out=2, depth=3), repeat=0.3, edge_deaths=2)
    assert world.run() == []
    network = world.network
    assert isinstance(network, EndpointNetwork)
    rejected = sum(end.traffic.rejected.total() for end in network._endpoints.values())
    assert rejected > world.time.faults["repeated"] > 10
    longest = {network._transport(owner).max_frame_bytes for owner in network._endpoints}
    assert len(longest) > 1


# -- the checks ------------------------------------------------------------------------------------


def test_delivery_checker_reports_message_received_twice() -> None:
    """A message that is received twice, or was never sent, is reported."""
    found: list[str] = []
    hearing, slot = DeliveryChecker(found.append), EdgeEnd(3, None, 1.0)
    hearing.record_sent(3, None, CommitsRequest(1), 0.0)
    hearing.check_received(None, 7, slot, CommitsRequest(1))
    assert found == []
    hearing.check_received(None, 7, slot, CommitsRequest(1))
    twice = "I7: the master received CommitsRequest of 7, not sent to it, or twice"
    assert found == [twice]
    hearing.check_received(None, 7, slot, ProbeReply(7))
    assert found == [twice, twice.replace("CommitsRequest", "ProbeReply")]


def test_delivery_checker_reports_message_lost_on_intact_stream() -> None:
    """A message missing on an intact stream is reported, unless it was allowed to get lost."""
    found: list[str] = []
    hearing, slot = DeliveryChecker(found.append), EdgeEnd(3, None, 1.0)
    for commit, must_s in ((1, 0.5), (2, 0.0), (3, 1.5), (4, 2.0)):
        hearing.record_sent(3, None, CommitsRequest(commit), must_s)
    hearing.check_received(None, 7, slot, CommitsRequest(4))
    assert found == ["I2: the master missed CommitsRequest on an intact stream"]


def test_delivery_checker_reports_direct_message_received_twice() -> None:
    """A direct message that is received twice is reported."""
    found: list[str] = []
    hearing = DeliveryChecker(found.append)
    hearing.record_direct(None, ProbeReply(7))
    hearing.check_received(None, None, None, ProbeReply(7))
    assert found == []
    hearing.check_received(None, None, None, ProbeReply(7))
    assert found == ["I7: the master received ProbeReply of None, not sent to it, or twice"]


def test_seal_reports_counter_used_twice() -> None:
    """A second frame sealed under the same counter is reported."""
    found: list[str] = []
    seal = LossMarkingSeal(found.append)
    head = Header(1, 7, MASTER, 3, 1, 0, 1)
    seal.close(head, b"")
    seal.close(msgspec.structs.replace(head, counter=2), b"")
    assert found == []
    seal.close(msgspec.structs.replace(head, edge=4), b"")
    assert found == ["I7: node 7 seals twice under counter 1"]


# -- the transport ---------------------------------------------------------------------------------


class ImmediateNetwork:
    """A network that delivers frames at once; if ``lives`` is false, all streams are dead."""

    def __init__(self) -> None:
        self.receivers: dict[FrameDestination, VirtualReceiver[str]] = {}
        self.lives = True

    def is_stream_alive(self, sender: VirtualSender[str]) -> bool:
        return self.lives

    def carry(
        self, sender: VirtualSender[str], receiver: VirtualReceiver[str], frames: Sequence[bytes]
    ) -> None:
        receiver.arrive(frames)


HERE, THERE = Endpoint("here", 1), Endpoint("there", 1)


def make_transports() -> tuple[ImmediateNetwork, VirtualTransport[str], VirtualTransport[str]]:
    """Return a network and two transports on it."""
    wire = ImmediateNetwork()
    return wire, *(VirtualTransport(wire, end.host, end, 1000) for end in (HERE, THERE))


def test_virtual_transport_sends_only_to_open_receiver() -> None:
    """Frames reach the receiver of their stream; without one they are not sent."""
    wire, here, there = make_transports()
    sender = here.open_sender(THERE, 5, control=True)
    assert sender.offer([b"a"]) == (0, OfferResult.UNCONNECTED)
    there.open_receiver(6)
    assert sender.offer([b"a"]) == (0, OfferResult.UNCONNECTED)
    there.open_receiver(5)
    assert sender.offer([b"a", b"b"]) == (2, OfferResult.SENT)
    assert there.poll(0.0) == [ReceivedFrame(5, b"a"), ReceivedFrame(5, b"b")]
    wire.lives = False
    assert sender.offer([b"a"]) == (0, OfferResult.UNCONNECTED)
    sender.close()
    assert sender.offer([b"a"]) == (0, OfferResult.CLOSED)


def test_virtual_sender_is_busy_while_receive_buffer_is_full() -> None:
    """A sender is BUSY while the receiver's buffer is full, until the receiver polls."""
    _, here, there = make_transports()
    there.open_receiver(5)
    sender = here.open_sender(THERE, 5, control=False)
    frames = [bytes(1000)] * (RECEIVER_BYTES_MAX // 1000 + 3)
    sent, offer = sender.offer(frames)
    assert (sent, offer) == (RECEIVER_BYTES_MAX // 1000 + 1, OfferResult.BUSY)
    assert len(there.poll(0.0)) == sent
    assert sender.offer(frames[sent:]) == (2, OfferResult.SENT)


def test_virtual_sender_rejects_too_long_frame() -> None:
    _, here, there = make_transports()
    there.open_receiver(5)
    with pytest.raises(UsageError, match="1001 bytes: at most 1000 are allowed"):
        here.open_sender(THERE, 5, control=False).offer([bytes(1001)])


def test_frames_for_closed_receiver_are_lost_after_reopening() -> None:
    """Frames that arrive for a closed receiver are lost, even if the stream was opened again."""
    wire, here, there = make_transports()
    there.open_receiver(5)
    former = wire.receivers[THERE, 5, False]
    there.close_receiver(5)
    there.open_receiver(5)
    former.arrive([b"late"])
    assert there.poll(0.0) == []
    there.close()
    assert here.open_sender(THERE, 5, control=True).offer([b"a"]) == (0, OfferResult.UNCONNECTED)
