"""Media drivers that die at a chosen call, in fits on threads: no effect of a machine is lost."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.memory_transport import MemoryNetwork, MemorySender, MemoryTransport
from sparkstrom.base.errors import DriverLost, SetupError
from sparkstrom.base.identity import Endpoint
from sparkstrom.models.dense import DenseNetwork
from sparkstrom.observe.telemetry import sum_link_bytes
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.master.members import MasterLimits
from sparkstrom.runtime.node_thread import SUCCESSIVE_DEATHS_MAX, NodeThread
from sparkstrom.transport.base import ReceivedFrame, SentBytes
from tests.unit.runtime.fits import Mesh, assert_fit_complete, wait_until

Death = tuple[str, int]  # (method, number of its call at which the media driver dies)
SOON_S = 20.0  # shorter than any deadline of the fit


class DyingTransport(MemoryTransport):
    """A transport whose media driver dies at ``death`` and stays dead; only closing still works."""

    death: Death | None = None
    driver = ""
    _is_dead = False

    def _call(self, method: str) -> None:
        if self.death is not None and self.death[0] == method:
            self.death = (method, self.death[1] - 1)
            self._is_dead = self._is_dead or self.death[1] == 0
        if self._is_dead:
            raise DriverLost(method, -1000, "driver died on purpose")

    def open_sender(self, *args: Any, **keywords: Any) -> MemorySender:
        self._call("open_sender")
        return super().open_sender(*args, **keywords)

    def open_receiver(self, *args: Any, **keywords: Any) -> None:
        self._call("open_receiver")
        super().open_receiver(*args, **keywords)

    def close_receiver(self, stream: int) -> None:
        if not self._is_closed:
            self._call("close_receiver")
        super().close_receiver(stream)

    def poll(self, wait_s: float) -> list[ReceivedFrame]:
        self._call("poll")
        return super().poll(wait_s)

    def sent(self) -> SentBytes:
        return SentBytes(self.driver, 100, 0)

    def close(self) -> None:
        self._is_closed = True
        super().close()


class DyingTransportFactory:
    """A function that opens transports, of which the first ones die as in ``deaths``."""

    def __init__(self, network: MemoryNetwork, *deaths: Death) -> None:
        self._network, self._deaths = network, list(deaths)
        self.opened: list[DyingTransport] = []

    def __call__(self, before: Endpoint | None) -> DyingTransport:
        transport = DyingTransport(self._network, before or self._network.open().endpoint)
        transport.driver = f"driver {len(self.opened)}"
        if self._deaths:
            transport.death = self._deaths.pop(0)
        self.opened.append(transport)
        return transport


def has_consistent_id(node: NodeThread) -> bool:
    """Return whether the node's endpoint has the id that its machine has."""
    return node._message_endpoint.me == node._machine.node > 0


# A node first opens what it listens on (control and data), then a sender to the join stream; its
# edge to the master is the second and third sender.
@pytest.mark.parametrize(
    "deaths",
    [
        [("open_receiver", 1)],
        [("open_receiver", 2)],
        [("open_sender", 1)],
        [("open_sender", 2)],
        [("open_sender", 3)],
        [("open_sender", 2), ("open_receiver", 1)],
        [("open_sender", 2), ("open_sender", 1), ("open_sender", 3)],
        [("open_receiver", 1), ("open_receiver", 2), ("open_sender", 2), ("poll", 3)],
    ],
    ids=lambda deaths: ", ".join(f"{method} {call}" for method, call in deaths),
)
def test_node_keeps_id_and_byte_counts_after_driver_deaths(
    make_mesh: Callable[..., Mesh], deaths: list[Death]
) -> None:
    """A fit succeeds, and a node keeps its id and byte counts, if its drivers die like this."""
    mesh = make_mesh()
    opening = DyingTransportFactory(mesh.network, *deaths)
    mesh.begin()
    mesh.add_worker(0, opening=opening)
    mesh.add_worker(1)
    assert_fit_complete(mesh, mesh.finish(SOON_S))
    assert len(opening.opened) == len(deaths) + 1
    assert has_consistent_id(mesh.nodes[0])
    assert sum_link_bytes([mesh.nodes[0]._link_bytes.update(opening.opened[-1])]) == 100 * len(
        opening.opened
    )


# The master first opens its join stream, then for each node two receivers and two senders.
@pytest.mark.parametrize(
    "deaths",
    [
        [("open_receiver", 1)],
        [("open_receiver", 2)],
        [("open_sender", 1)],
        [("open_sender", 2), ("open_receiver", 1)],
        [("open_receiver", 1), ("open_receiver", 1), ("open_sender", 2), ("poll", 3)],
    ],
    ids=lambda deaths: ", ".join(f"{method} {call}" for method, call in deaths),
)
def test_fit_succeeds_on_same_endpoint_after_master_driver_deaths(
    make_mesh: Callable[..., Mesh], deaths: list[Death]
) -> None:
    """A fit succeeds, at the master's same endpoint, if its media drivers die at these calls."""
    mesh = make_mesh(MasterLimits(lease_s=2.0))
    opening = DyingTransportFactory(mesh.network, *deaths)
    mesh.opening = opening  # type: ignore[assignment]
    mesh.begin()
    for partition in range(2):
        mesh.add_worker(partition)
    outcome = mesh.finish(SOON_S)
    assert_fit_complete(mesh, outcome)
    assert len(opening.opened) == len(deaths) + 1
    assert sum_link_bytes([outcome.wire]) == 100 * len(opening.opened)
    assert {transport.endpoint for transport in opening.opened} == {mesh.master.endpoint}


class BlockedModel(DenseNetwork):
    """A model whose first step waits for ``goes_on``."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def step(self, batch: Any) -> float:
        self.begun.set()
        assert self.goes_on.wait(60)
        return super().step(batch)


def test_driver_death_at_final_commit_keeps_master_digest(make_mesh: Callable[..., Mesh]) -> None:
    """The driver dies when the master closes the last missing worker and fixes the final commit."""
    mesh = make_mesh(MasterLimits(lease_s=1.0))
    opening = DyingTransportFactory(mesh.network)
    mesh.opening = opening  # type: ignore[assignment]
    mesh.begin()
    stands = BlockedModel([5, 8, 3])
    mesh.add_worker(0)
    mesh.add_worker(1, model=stands)
    assert stands.begun.wait(SOON_S)
    opening.opened[0].death = ("close_receiver", 1)
    mesh.master.request_stop("enough")
    mesh.nodes[1].stop()  # it sends nothing more, so that it is evicted before it has drained
    try:
        assert mesh.master.finished.wait(SOON_S), mesh.master.progress
        assert len(opening.opened) == 2
        assert mesh.master.outcome().hashes["driver"] == mesh.theta.digest()
    finally:
        stands.goes_on.set()
        mesh.stations[1].fail(RuntimeError("the test is over"))


def make_failing_transports(network: MemoryNetwork) -> DyingTransportFactory:
    """Return an opening whose drivers all die, one more than a recovery accepts."""
    return DyingTransportFactory(network, *[("open_receiver", 1)] * (SUCCESSIVE_DEATHS_MAX + 1))


def test_too_many_driver_deaths_fail_task_with_setup_error(make_mesh: Callable[..., Mesh]) -> None:
    """A task fails with a SetupError if too many media drivers of its executor die."""
    mesh = make_mesh()
    mesh.begin()
    opening = make_failing_transports(mesh.network)
    mesh.add_worker(0, opening=opening)
    wait_until(lambda: bool(mesh.errors), SOON_S)
    assert isinstance(mesh.errors[0], SetupError)
    assert "the media driver of this executor died" in str(mesh.errors[0])
    assert len(opening.opened) == SUCCESSIVE_DEATHS_MAX + 1


def test_too_many_driver_deaths_fail_fit_with_setup_error(make_mesh: Callable[..., Mesh]) -> None:
    """A fit fails with a SetupError if too many media drivers of the driver program die."""
    mesh = make_mesh()
    mesh.opening = make_failing_transports(mesh.network)  # type: ignore[assignment]
    mesh.begin()
    assert mesh.master.finished.wait(SOON_S)
    assert isinstance(mesh.master.failure, SetupError)
    assert "the media driver of the driver program died" in str(mesh.master.failure)


def test_driver_death_during_final_flush_is_ignored(
    make_mesh: Callable[..., Mesh],
) -> None:
    """The death of the media driver during a node's final flush is not an error."""
    mesh = make_mesh()
    opening = DyingTransportFactory(mesh.network)
    mesh.begin()
    mesh.add_worker(0, opening=opening)
    mesh.add_worker(1)
    node, failed = mesh.nodes[0], list[BaseException]()
    mesh.stations[0].fail = failed.append  # type: ignore[method-assign]
    say = node._flush_before_exit

    def say_over_a_dead_driver() -> None:
        opening.opened[0].death = ("open_sender", 1)
        mesh.stations[0].post(ev.TrainerFailed("too late", ""))
        node._message_endpoint.set_master(mesh.master.endpoint, mesh.master.join_stream)
        say()

    node._flush_before_exit = say_over_a_dead_driver  # type: ignore[method-assign]
    mesh.finish(SOON_S)
    assert failed == []
    assert opening.opened[0].death == ("open_sender", 0)


def test_final_flush_repeats_until_all_frames_are_accepted(make_mesh: Callable[..., Mesh]) -> None:
    """A node's final flush repeats until the transport has accepted all frames."""
    mesh = make_mesh()
    mesh.begin()
    for partition in range(2):
        mesh.add_worker(partition)
    node, waiting = mesh.nodes[0], list[int]()
    say, flush, refusals = node._flush_before_exit, node._message_endpoint.flush, iter((0, 0))

    def hesitant() -> int:
        waiting.append(node._message_endpoint.waiting)
        return flush() if next(refusals, None) is None else 0

    def say_without_room_at_first() -> None:
        mesh.stations[0].post(ev.TrainerFailed("too late", ""))
        node._message_endpoint.flush = hesitant  # type: ignore[method-assign]
        say()
        waiting.append(node._message_endpoint.waiting)

    node._flush_before_exit = say_without_room_at_first  # type: ignore[method-assign]
    mesh.finish(SOON_S)
    assert waiting[0] == waiting[1] > 0
    assert waiting[-1] == 0
