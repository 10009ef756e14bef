"""Sixteen processes over lossy media drivers: faults do not lose or repeat the training of rows."""

from __future__ import annotations

import re
import signal
import time
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkstrom.base.identity import MASTER

WORKERS, EXECUTORS, BATCHES, TAU = 16, 4, 18, 0.125
DEPTHS = {2: 4, 3: 3}  # fan-out -> depth with room for more than sixteen nodes

slow = partial(pytest.param, marks=pytest.mark.slow)


def check_each_row_counted_once(mesh: Any, outcome: Any) -> None:
    """Assert that replicas are equal and that theta counts each row once per epoch."""
    print(outcome.departures, outcome.notes)
    assert len(set(outcome.hashes.values())) == 1, outcome.hashes
    assert len(outcome.hashes) == mesh.ended["done"] + 1  # others were released or dismissed before
    assert outcome.hashes["driver"] == mesh.theta.digest()
    epochs = mesh.order.epochs
    assert outcome.minibatches == outcome.minibatches_expected == WORKERS * BATCHES * epochs
    counts, rows = np.unique(mesh.theta.to_host(), return_counts=True)
    assert dict(zip(counts / TAU, rows, strict=True)) == {epochs: mesh.theta.n_params}


def two_inner_nodes(mesh: Any) -> tuple[int, int]:
    """Return the first and the last live relay; the first one is a child of the master."""
    first, *_, last = mesh.inner()
    assert mesh.machine.placement.tree.depth(first) == 1
    return first, last


@pytest.mark.parametrize(("fan_out", "loss"), [(2, 0.01), slow(3, 0.05)])
def test_fit_is_exact_after_two_relays_are_killed(
    real_mesh: Any, fan_out: int, loss: float
) -> None:
    """A fit is exact if two relays are killed and their tasks are repeated."""
    mesh = real_mesh(fan_out=fan_out, depth=DEPTHS[fan_out], loss=loss)
    mesh.under_way(200)
    victims = two_inner_nodes(mesh)
    partitions = [mesh.partition(node) for node in victims]
    for partition in partitions:
        mesh.signal(partition, signal.SIGKILL)
    time.sleep(1)  # time in which Spark would start another attempt
    for partition in partitions:
        mesh.start(partition, WORKERS + partition)
    outcome = mesh.finish()
    check_each_row_counted_once(mesh, outcome)
    assert set(victims) <= {departure.node for departure in outcome.departures}


@pytest.mark.parametrize(("fan_out", "loss"), [slow(2, 0.05), (3, 0.01)])
def test_fit_is_exact_after_stopped_relays_are_evicted(
    real_mesh: Any, fan_out: int, loss: float, until: Any
) -> None:
    """A fit is exact if two relays are stopped until they are evicted, and then return."""
    mesh = real_mesh(fan_out=fan_out, depth=DEPTHS[fan_out], loss=loss)
    mesh.under_way(200)
    victims = two_inner_nodes(mesh)
    partitions = [mesh.partition(node) for node in victims]
    for partition in partitions:
        mesh.signal(partition, signal.SIGSTOP)
    until(
        lambda: not set(victims) & mesh.machine.members.live.keys(), 30, "the end of their leases"
    )
    for partition in partitions:
        mesh.signal(partition, signal.SIGCONT)
    outcome = mesh.finish()
    check_each_row_counted_once(mesh, outcome)
    lost = {d.node: d.partition for d in outcome.departures if d.node in victims}
    assert sorted(lost.values()) == sorted(partitions)  # no other processes were started


def test_fit_is_exact_after_relay_is_stopped_beyond_its_lease(real_mesh: Any) -> None:
    """A fit is exact if a relay is stopped for 1.5 times its lease."""
    mesh = real_mesh(fan_out=2, depth=4, loss=0.01)
    mesh.under_way(200)
    partition = mesh.partition(two_inner_nodes(mesh)[0])
    mesh.signal(partition, signal.SIGSTOP)
    time.sleep(1.5 * mesh.order.lease_s)
    mesh.signal(partition, signal.SIGCONT)
    check_each_row_counted_once(mesh, mesh.finish())


def find_pairs_with_common_logs(mesh: Any) -> set[frozenset[int]]:
    """Return the pairs of nodes that both map some log, and so communicate by shared memory."""
    logs = {}
    for node, member in mesh.machine.members.live.items():
        maps = Path(f"/proc/{member.join.pid}/maps").read_text()
        logs[node] = set(re.findall(r"/dev/shm/\S+/publications/\S+", maps))
        assert logs[node]
    return {frozenset(pair) for pair in combinations(logs, 2) if logs[pair[0]] & logs[pair[1]]}


def test_edges_within_executors_share_memory_and_relays_forward(real_mesh: Any) -> None:
    """Exactly the edges within executors use shared memory, and relays send on all updates."""
    mesh = real_mesh(fan_out=2, depth=4, loss=0.0)
    mesh.under_way(200)
    tree, executors, inner = (
        mesh.machine.placement.tree,
        mesh.machine.members.executors,
        mesh.inner(),
    )
    assert len(list(tree.children(MASTER))) == 2
    edges = {frozenset((n, tree.parent(n))) for n in tree.descendants(MASTER) if tree.depth(n) > 1}
    near = {edge for edge in edges if len({executors[node] for node in edge}) == 1}
    assert near
    assert near < edges
    assert find_pairs_with_common_logs(mesh) == near
    outcome = mesh.finish()
    check_each_row_counted_once(mesh, outcome)
    published = sum(told.node.update_bytes for told in outcome.stats.values())
    sent = {node: told.node.wire_bytes for node, told in outcome.stats.items()}
    assert min(sent[node] for node in inner) > published  # all updates, to at least one child
    # To two children, some of it again if one is slow; not to all sixteen nodes.
    assert 2 * published < outcome.traffic.wire_bytes < 8 * published
