"""A worker that stood still for longer than its lease returns under a new id."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from benchmarks.memory_transport import MemoryNetwork, MemoryTransport
from sparkstrom.base.identity import Endpoint
from sparkstrom.models.dense import DenseNetwork
from sparkstrom.protocol.master.members import MasterLimits
from sparkstrom.transport.base import ReceivedFrame
from tests.unit.runtime.fits import Mesh, assert_fit_complete, wait_until

LEASE_S = 1.0
STILL_S = 30.0  # the longest that a thread waits, should the test fail


class HaltingTransport(MemoryTransport):
    """A transport whose ``poll`` blocks while ``gate`` is closed."""

    def __init__(self, network: MemoryNetwork, endpoint: Endpoint, gate: threading.Event) -> None:
        super().__init__(network, endpoint)
        self._gate = gate

    def poll(self, wait_s: float) -> list[ReceivedFrame]:
        self._gate.wait(STILL_S)
        return super().poll(wait_s)


class GatedModel(DenseNetwork):
    """A model whose second step waits for ``gate``, so that it has more to train afterwards."""

    def __init__(self, gate: threading.Event) -> None:
        super().__init__([5, 8, 3])
        self._gate, self._taken = gate, 0

    def step(self, batch: Any) -> float:
        self._taken += 1
        if self._taken == 2:
            assert self._gate.wait(STILL_S), "the test never let it go on"
        return super().step(batch)


def test_rejoined_worker_uses_new_id_and_finishes_fit(make_mesh: Callable[..., Mesh]) -> None:
    """The returned worker's endpoint sends and receives under the new id, and finishes the fit."""
    mesh = make_mesh(MasterLimits(lease_s=LEASE_S))
    gate, goes_on = threading.Event(), threading.Event()
    gate.set()
    network = mesh.network
    mesh.begin()
    mesh.add_worker(
        0,
        model=GatedModel(goes_on),
        opening=lambda before: HaltingTransport(network, network.open().endpoint, gate),
    )
    mesh.add_worker(1)
    master = mesh.master._machine
    wait_until(lambda: master.sequencer.head > 0)
    gate.clear()
    wait_until(lambda: any(gone.partition == 0 for gone in master.members.departures))
    gate.set()
    goes_on.set()
    outcome = mesh.finish()
    assert_fit_complete(mesh, outcome)
    gone = {departure.node for departure in outcome.departures}
    back = mesh.nodes[0]._machine.node
    assert back not in gone
    assert str(back) in outcome.hashes
    assert mesh.nodes[0]._message_endpoint.me == back
