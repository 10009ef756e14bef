"""Simulated fits with one unusual condition each, and seeds that once showed bugs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sparkstrom.codec.messages import Chunk, Message, Phase
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.events_and_effects import Command
from sparkstrom.protocol.worker.node import Identity
from sparkstrom.simulation.fuzzing import simulate_seed, with_overrides
from sparkstrom.simulation.network import Network
from sparkstrom.simulation.process import Outage, SimProcess
from sparkstrom.simulation.run_options import NO_FAULTS, Faults, ReplicaKind, RunSize, TransportMode
from sparkstrom.simulation.world import World


class MismatchedWorld(World):
    """A simulation whose attempts at partition 1, from ``first`` on, join with facts ``odd``."""

    odd: dict[str, Any]
    first: int

    def identity(self, partition: int, attempt: int) -> Identity:
        usual = super().identity(partition, attempt)
        seen = sum(p.identity.partition == 1 for p in self.processes)
        return replace(usual, **self.odd) if partition == 1 and seen >= self.first else usual


@pytest.mark.parametrize(
    ("odd", "first", "words"),
    [
        ({"version": "other"}, 0, "sparkstrom is sim on the driver and other on the executor"),
        ({"rows": 8}, 1, "the data must not change between attempts"),
        ({"checksum": 99}, 1, "the data must not change between attempts"),
    ],
)
def test_version_or_data_mismatch_ends_all_processes(
    odd: dict[str, Any], first: int, words: str
) -> None:
    """Another version, or other rows in a second attempt, aborts the fit and ends all processes."""
    world = MismatchedWorld(3, RunSize(), replace(NO_FAULTS, crashes=0))
    world.odd, world.first = odd, first
    if first:
        world.time.at(1.2, crash_partition, world, 1)
    (violation,) = world.run()
    assert words in violation
    assert violation.endswith("(h, 1)")
    assert world.alive == []


def crash_partition(world: World, partition: int) -> None:
    """Kill the processes of a partition; Spark starts another attempt."""
    for process in live_processes_of_partition(world, partition):
        world.end(process, restart=True)


def live_processes_of_partition(world: World, partition: int) -> list[Any]:
    """Return the live processes of a partition."""
    return [p for p in world.alive if p.identity.partition == partition]


class LateWorld(World):
    """A simulation in which Spark starts the task of partition 3 only after 20 s."""

    def start(self, partition: int) -> None:
        if partition == 3 and self.time.now_s < 20.0:
            self.time.at(20.0, self.start, partition)
        else:
            super().start(partition)


def test_fit_starts_without_late_worker_but_awaits_its_partition() -> None:
    """A fit begins without a late worker, and ends only after its partition was trained."""
    world = LateWorld(1, RunSize(), NO_FAULTS)
    assert world.run() == []
    assert world.phase is Phase.DONE
    assert any("began with 3 of 4 workers" in line for line in world.time.transcript)
    departed = [departure.reason for departure in world.master.members.departures]
    assert "released" in departed  # a finished worker gave up its slot for partition 3


def test_fit_with_thirty_crashes_keeps_invariants() -> None:
    """A fit with thirty crashes violates no invariant."""
    size, faults = with_overrides(
        RunSize(nodes=2), NO_FAULTS, {"crashes": 30, "restart_s_max": 0.5}
    )
    assert World(9, size, faults).run() == []


# These seeds showed their bugs in a run with these options.
OBJECTS = {"through": TransportMode.OBJECTS, "replicas": ReplicaKind.NUMBERS}
FOUND = [
    ("a returner was granted a second file", 33, 4, {}),
    ("a state that was overtaken let a drained worker train", 244, 4, {"stop": 1.0}),
    ("nobody ever finished an empty partition", 0, 4, {"empty_partitions": 1}),
    ("all finished workers left for one slot", 121, 9, {}),
    ("granted, kept again at the audit, and counted as lost", 5191, 3, {"late": 0.5, "stop": 0.5}),
    ("an overtaken report hid the slowest worker", 36, 3, {"failure": 1.0}),
    ("a single worker was cut off for ever before training", 1536, 1, {}),
    ("one broken stream of a living edge", 7, 3, {"breaks": 8, "failure": 0.0}),
    ("nobody heard the master, then a stream broke before the first word on it", 724, 6, {}),
]

DEATHS = {"driver_deaths": 12, "crashes": 4, "stop": 0.0, "failure": 0.0}
STOPPED = DEATHS | {"driver_deaths": 16, "crashes": 8, "stop": 0.5}
FOUND += [
    ("a media driver died, and with it the id: sent as nobody, heard by none", 3, 4, DEATHS),
    ("a media driver died, and with it the word to hash: audit without end", 101, 4, STOPPED),
]


FOUND_IN_A_MESH: list[tuple[str, int, int, dict[str, Any]]] = [
    ("a stream from the parent broke before its first word; the master's were heard", 135, 12, {}),
    ("a closed node heard done from a parent that still had it", 220, 12, {}),
    ("training raised before the node had an id", 273, 12, {}),
    ("a relay with nothing of its own to send had a dead stream upwards", 2494, 12, {}),
    ("own updates that came down late were taken for a dead stream upwards", 6512, 12, {}),
    ("a released worker had no replica yet, and lost what an earlier fit had left", 6872, 12, {}),
    ("nobody heard the master, and who it had closed never did", 226, 12, {"isolations": 1}),
    ("data that flowed hid that the control stream from the parent was dead", 1343, 12, {}),
    ("a media driver died, and with it the new id of one that came back", 8, 9, DEATHS),
    (
        "a relay took another snapshot for long, and who was to stand below it was closed",
        763,
        12,
        {},
    ),
]


NARROWEST = {"log_bytes": 1, "window_bytes": 1, "downlink_bytes": 1}
FOUND_IN_A_MESH += [
    ("a lender was asked before its own trainer had what it had borrowed", 275, 12, {}),
    ("who waits for its place is not cut off while those above it copy", 292, 12, NARROWEST),
]

CHAIN = {"fan_out": 1, "depth": 13}
FOUND_IN_A_CHAIN = [
    ("a worker without an id had to go, and said something that nobody could read", 7320009),
    ("places were given level by level, and three who came back were taken for lost", 7320010),
    ("the same at the end of the chain", 7320046),
    ("the same, with messages that came late", 7320049),
    ("who stood there before waited for its place as long", 7320227),
    ("and so did who stood below one who waited", 7320298),
]


@pytest.mark.parametrize(("seed", "nodes", "given"), [run[1:] for run in FOUND],
                         ids=[run[0] for run in FOUND])  # fmt: skip
def test_plain_regression_seeds_keep_invariants(
    seed: int, nodes: int, given: dict[str, Any]
) -> None:
    """Seeds that once showed a bug, which the test's id names, are clean."""
    assert simulate_seed(seed, nodes, "plain", OBJECTS | given).violations == []


@pytest.mark.parametrize(("seed", "nodes", "given"), [run[1:] for run in FOUND_IN_A_MESH],
                         ids=[run[0] for run in FOUND_IN_A_MESH])  # fmt: skip
def test_mesh_regression_seeds_keep_invariants(
    seed: int, nodes: int, given: dict[str, Any]
) -> None:
    """Mesh seeds that once showed a bug, which the test's id names, are clean."""
    assert simulate_seed(seed, nodes, "mesh", OBJECTS | given).violations == []


@pytest.mark.parametrize("seed", [run[1] for run in FOUND_IN_A_CHAIN],
                         ids=[run[0] for run in FOUND_IN_A_CHAIN])  # fmt: skip
def test_chain_regression_seeds_keep_invariants(seed: int) -> None:
    """Seeds of a chain that once showed a bug, which the test's id names, are clean."""
    assert (
        simulate_seed(
            seed, 13, "mesh", CHAIN | OBJECTS | {"through": TransportMode.CODEC}
        ).violations
        == []
    )


class PartitionBlockingNetwork(Network):
    """A network that blocks all edges of the first ``attempts`` at partition 2."""

    attempts = 0

    def send(self, owner: SimProcess | None, to: int, message: Message) -> None:
        slot = (self._master_slots if owner is None else owner.slots).get(to)
        ends = [owner, slot.target if slot is not None else None]
        if not any(process in self.behind for process in ends if process is not None):
            super().send(owner, to, message)

    @property
    def behind(self) -> list[SimProcess]:
        """The processes whose edges are blocked."""
        tried = [p for p in self._processes.values() if p.identity.partition == 2]
        return tried[: self.attempts]


@pytest.mark.parametrize("attempts", [1, 3])
def test_worker_without_reachable_neighbour_fails_in_time(attempts: int) -> None:
    """A worker that reaches the master but no neighbour fails in time; Spark tries again."""
    size = RunSize(nodes=5, fan_out=2, depth=4, per_executor=1)
    world = World(1, size, NO_FAULTS)
    wall = PartitionBlockingNetwork(world.time, world.faults, world._arrive_at_master)
    wall.attempts, world.network = attempts, wall
    violations = world.run()
    assert world.phase is Phase.DONE
    failed = [p for p in world.processes if p.node.directive.order is Command.FAIL]
    assert failed == wall.behind
    assert len(failed) == attempts
    for process in failed:
        assert "have had no edge for 16 s" in process.node.directive.reason
    assert all("p2/" in v and "I5" in v and "security group" in v for v in violations)
    assert world.time.now_s < 40.0 * (1 + attempts)


class FirstEdgeBlockingNetwork(Network):
    """A network that blocks everything from partition 1 on its first edge to another worker."""

    first: tuple[SimProcess, int] | None = None

    def send(self, owner: SimProcess | None, to: int, message: Message) -> None:
        slot = owner.slots.get(to) if owner is not None else None
        if owner is not None and owner.identity.partition == 1 and slot is not None:
            if self.first is None and slot.target is not None:
                self.first = owner, slot.edge
            if self.first == (owner, slot.edge):
                return
        super().send(owner, to, message)


def test_unanswered_edge_is_replaced_after_about_one_lease() -> None:
    """A node replaces an edge whose attach message gets no reply for about a lease."""
    size = RunSize(nodes=2, fan_out=1, depth=3, per_executor=1, lease_s=10.0, patience_s=30.0)
    world = World(1, size, NO_FAULTS)
    deaf = FirstEdgeBlockingNetwork(world.time, world.faults, world._arrive_at_master)
    world.network = deaf
    attached_s: list[float] = []

    def look() -> None:
        for process in world.alive:
            if process.identity.partition == 1 and process.node.link.attached:
                attached_s.append(world.time.now_s)
        world.time.after(0.1, look)

    world.time.at(0.1, look)
    assert world.run() == []
    assert deaf.first is not None
    assert size.lease_s < attached_s[0] < 1.3 * size.lease_s


def measure_end_times_s(seed: int, faults: Faults, lead: int | None) -> dict[int, float]:
    """Return when each partition of a mesh was trained completely, in virtual seconds."""
    size = RunSize(nodes=7, fan_out=2, depth=5, max_lead=lead, kept_files=0, per_executor=1)
    world = World(seed, size, faults)
    out: dict[int, float] = {}

    def look() -> None:
        for process in world.alive:
            if process.finished:
                out.setdefault(process.identity.partition, world.time.now_s)
        world.time.after(0.05, look)

    world.time.at(0.05, look)
    assert world.run() == []
    assert any("is slow" in line for line in world.time.transcript) <= bool(faults.slow)
    return out


@pytest.mark.parametrize("seed", range(3))
def test_slow_worker_delays_others_only_with_max_lead(seed: int) -> None:
    """A worker that is ten times slower delays the others only with ``max_lead``."""
    calm = replace(NO_FAULTS, step_s_max=0.2)
    usual, free = (
        measure_end_times_s(seed, calm, None),
        measure_end_times_s(seed, replace(calm, slow=1), None),
    )
    bound = measure_end_times_s(seed, replace(calm, slow=1), 2)
    others = range(1, 7)
    assert free[0] > 2 * usual[0]
    assert max(free[p] for p in others) < 1.3 * max(usual[p] for p in others)
    assert max(bound[p] for p in others) > max(free[p] for p in others)


MARK = 1_000_000  # a commit number that this fit never reaches


@pytest.mark.parametrize(("leases", "breaks"), [(0.4, False), (0.8, True)])
def test_short_outage_delays_messages_and_long_one_breaks_stream(
    leases: float, breaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short outage delays messages in order; a long one breaks the stream, as in Aeron."""
    world = World(1, RunSize(nodes=1, epochs=100), replace(NO_FAULTS, step_s_max=0.1))
    got: list[tuple[float, int]] = []
    feed = SimProcess.handle

    def seen(self: SimProcess, event: ev.Event, now_s: float) -> None:
        if isinstance(event, ev.Received) and getattr(event.message, "commit", 0) == MARK:
            assert isinstance(event.message, Chunk)
            got.append((now_s, event.message.index))
        feed(self, event, now_s)

    monkeypatch.setattr(SimProcess, "handle", seen)
    until_s = 3.0 + leases * world.size.lease_s

    def cut_off() -> None:
        (process,) = world.alive
        world.network.begin_outage(process, Outage(until_s, up=False, down=True))
        for index in range(3):
            chunk = Chunk(index=index, commit=MARK, payload=b"")
            world.network.send(None, process.node.node, chunk)

    world.time.at(3.0, cut_off)
    world.time.at(0.0, world.start, 0)
    world.time.at(0.1, world._tick_master)
    world.time.run(until_s + 0.1)
    assert [index for _, index in got] == ([] if breaks else [0, 1, 2])
    assert all(at_s >= until_s for at_s, _ in got)
