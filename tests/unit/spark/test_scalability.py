"""Tests of predict_scaling against encoded updates, built trees, and times computed by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.base.identity import NodeId
from sparkstrom.encoding import gaps
from sparkstrom.encoding import leveled_gaps as levels
from sparkstrom.planning import scaling as scalability
from sparkstrom.planning.scaling import (
    CONTROL_DOWN,
    HOP_S,
    LATENCY,
    PROCESSOR,
    STEP,
    ScalingInputs,
    format_scaling,
    mesh_load,
    payload_bytes,
    predict_gradient_sharing,
    predict_ring_allreduce,
    predict_scaling,
    star_load,
    wire_bytes,
)
from sparkstrom.protocol.common.flow_control import WINDOW_FIRST
from sparkstrom.protocol.common.topology import Topology

WORK = ScalingInputs(25_000_000, step_s=0.3, density=1e-3, link_bits_s=1e9, latency_s=1e-3)
FREE = replace(WORK, link_bits_s=1e15, latency_s=0.0, encoding_s=0.0)


@pytest.mark.parametrize("density", [1e-4, 1e-3, 1e-2, 0.1, 0.3])
def test_predicted_update_size_matches_encoded_update(density: float) -> None:
    """The predicted size of an update is that of an encoded one, also with several thresholds."""
    n, random = 1_000_000, np.random.default_rng(1)
    codes = np.flatnonzero(random.random(n) < density).astype(np.int32)
    codes[::2] ^= -1
    out = np.empty(2 * n, np.uint8)
    size = gaps.encode(codes, n, out)
    amount_bytes = scalability.AMOUNT_BITS * codes.size / 8
    assert payload_bytes(codes.size, n) == pytest.approx(size + amount_bytes, rel=0.03)
    tenths = (random.random(codes.size) < 0.1).astype(np.uint8)  # a tenth moves by two thresholds
    assert payload_bytes(codes.size, n) == pytest.approx(
        levels.encode(codes, tenths, 1, n, out), rel=0.05
    )


def test_dense_update_takes_two_bits_per_parameter() -> None:
    """A dense update takes two bits per parameter, however many entries it has."""
    assert payload_bytes(600_000, 1_000_000) == 250_000
    assert payload_bytes(1_000_000, 1_000_000) == 250_000


@pytest.mark.parametrize("workers", [1, 2, 8, 9, 40, 72, 73, 200])
def test_predicted_mesh_load_matches_topology(workers: int) -> None:
    """The predicted hops and bytes of a mesh are those of the tree that Topology builds."""
    topology = Topology()
    for node in range(1, workers + 1):
        topology = topology.attach(NodeId(node))
    first = NodeId(1)
    load = mesh_load(WORK, workers)
    assert load.hops == max(map(topology.depth, topology.places))
    below = len(topology.descendants(first))
    update, fed = WORK.update_bytes, WORK.received_bytes(workers - 1)
    assert load.worker_in == fed + below * update
    assert load.worker_out == (below + 1) * update + len(list(topology.children(first))) * fed
    assert load.root_out == len(list(topology.children(NodeId(0)))) * fed


def test_many_updates_are_received_as_sums() -> None:
    """Many updates are received as sums, which take less, and no more than all parameters."""
    few, more, many = (WORK.received_bytes(count) for count in (1, 3, 5000))
    assert few == WORK.update_bytes < WINDOW_FIRST  # sent one by one, because none waits
    assert 2.5 * WORK.update_bytes < more < 3 * WORK.update_bytes
    assert many < 5000 * WORK.update_bytes / 4
    theta = wire_bytes(4 * WORK.n_params)
    assert theta / 3 < WORK.received_bytes(10**7) < theta == WORK.received_bytes(10**13)


@pytest.mark.parametrize("workers", [2, 4, 12])
def test_step_time_with_free_links_is_training_time(workers: int) -> None:
    """With free links a step takes as long as training, two hops and adding the updates."""
    pace = predict_gradient_sharing(FREE, star_load(FREE, workers), workers)
    assert pace.limited_by == STEP
    assert pace.steps_per_update == 1
    assert pace.staleness == (workers - 1) / 2
    adding_s = scalability.ADD_ENTRY_S * FREE.entries * (workers - 1)
    assert pace.step_s == pytest.approx(0.3 + 2 * HOP_S + adding_s)


def test_slow_driver_link_determines_step_time() -> None:
    """On a slow driver's link a step takes as long as its updates take there."""
    narrow = replace(WORK, link_bits_s=1e7)
    load = star_load(narrow, 4)
    pace = predict_gradient_sharing(narrow, load, 4)
    assert pace.limited_by == "the driver's link"
    assert pace.steps_per_update == 1
    free = 1e7 / 8 - 4 * CONTROL_DOWN
    assert pace.step_s == pytest.approx(load.root_out / free)
    assert pace.driver_sent == pytest.approx(pace.step_s * 1e7 / 8)  # the link is full


def test_heartbeats_leave_at_least_tenth_of_link() -> None:
    load = star_load(WORK, 8)
    assert load.link_times_s(8e4)[1] == pytest.approx(load.root_out / 1e3)
    assert load.link_times_s(1e12)[1] == pytest.approx(8 * load.root_out / 1e12, rel=1e-3)


def test_workers_on_driver_host_do_not_use_its_link() -> None:
    """Workers on the driver's host do not use its link."""
    apart, beside = (star_load(replace(WORK, beside_driver=n), 4) for n in (0, 1))
    assert beside.root_in == apart.root_in * 3 / 4
    assert beside.root_out == apart.root_out * 3 / 4
    assert beside.root_s == apart.root_s
    assert star_load(replace(WORK, beside_driver=9), 4).root_out == 0


def test_workers_take_steps_while_update_passes_slow_chain() -> None:
    """While an update passes slowly down a chain of four, workers take up to five more steps."""
    chain = replace(FREE, fan_out=1, link_bits_s=2.5 * FREE.update_bytes * 8)  # 0.4 s per hop
    load = mesh_load(chain, 4)
    taken_s = max(load.link_times_s(chain.link_bits_s))
    pace = predict_gradient_sharing(chain, load, 4)
    assert taken_s == pytest.approx(7 * 0.4, rel=0.1)
    assert pace.round_s == pytest.approx(2 * taken_s + 8 * HOP_S, rel=0.1)
    assert pace.steps_per_update == 24 // 4  # five during the update, and the one that publishes
    assert pace.staleness == 3 * 5.5
    assert pace.step_s == pytest.approx((pace.round_s - taken_s / 2 + 0.3) / 6, rel=0.01)
    wide = replace(chain, link_bits_s=100 * chain.link_bits_s)
    assert predict_gradient_sharing(wide, mesh_load(wide, 4), 4).steps_per_update == 1


def test_long_chain_is_computed_without_traversal() -> None:
    """A chain of 100,000 workers is computed at once; walking along it took half an hour."""
    chain = replace(FREE, fan_out=1)
    assert mesh_load(chain, 100_000).hops == 100_000
    short = mesh_load(chain, 3)
    assert (short.hops, short.children, short.at_root) == (3, 1, 1)


def test_steps_wait_for_updates_from_13_workers_on() -> None:
    """With 13 workers or more, no step is taken while an update is not committed."""
    before, after = (predict_gradient_sharing(WORK, star_load(WORK, k), k) for k in (12, 13))
    assert before.limited_by == STEP
    assert after.step_s > WORK.step_s + after.round_s


def test_step_time_is_that_of_slowest_worker() -> None:
    """If times of steps vary, a step takes as long as the slowest worker's on average."""
    spread = replace(FREE, spread=0.1)
    more = [
        predict_gradient_sharing(spread, star_load(spread, k), k).step_s
        / predict_gradient_sharing(FREE, star_load(FREE, k), k).step_s
        - 1
        for k in (4, 8)
    ]
    assert more == pytest.approx([0.103, 0.142], abs=0.006)  # from tables of order statistics


def test_ring_worker_sends_each_parameter_almost_twice() -> None:
    """In a ring each worker sends and receives every parameter almost twice."""
    pace = predict_ring_allreduce(replace(WORK, latency_s=0.0), 4)
    each_way = 2 * 3 / 4 * 4 * WORK.n_params * scalability.WIRE_OVERHEAD
    assert pace.worker_sent == pace.worker_received == each_way
    assert pace.step_s == pytest.approx(0.3 + each_way * 8 / 1e9 - 0.2)  # backward hides 0.2 s


def test_single_worker_pays_only_for_encoding() -> None:
    """A single worker only pays for encoding its updates, and nothing in a ring."""
    pace = predict_gradient_sharing(WORK, star_load(WORK, 1), 1)
    assert pace.step_s == 0.3 + WORK.publish_cpu_s
    assert predict_ring_allreduce(WORK, 1).efficiency == 1


def test_best_is_fastest_and_pays_up_to_is_last_worthwhile_number() -> None:
    """``best`` is the fastest number; up to ``pays_up_to`` each worker adds half a machine."""
    found = predict_scaling(WORK, range(2, 65))
    speedups = {pace.workers: pace.speedup for pace in found.paces["star"]}
    assert speedups[found.best("star")] == max(speedups.values())
    last = found.pays_up_to("star")
    assert speedups[last + 1] - speedups[last] < 0.5
    assert all(speedups[k + 1] - speedups[k] >= 0.5 for k in range(2, last))
    assert all(speedups[k] - speedups[last] < 0.5 * (k - last) for k in range(last + 1, 65))
    assert found.pays_up_to("ring") == 1  # with 1 Gbit/s and 25 million parameters


def test_best_number_is_1_if_one_machine_is_fastest() -> None:
    """If one machine is fastest, the best number is 1, whether or not it was requested."""
    far = replace(WORK, step_s=0.01, latency_s=0.05)
    for workers in ([2, 3, 4], [1, 2, 3, 4]):
        found = predict_scaling(far, workers)
        assert all(pace.speedup < 0.5 for pace in found.paces["star"] if pace.workers > 1)
        assert {found.best(way) for way in found.paces} == {1}
        assert {found.pays_up_to(way) for way in found.paces} == {1}
        said = format_scaling(found)
        assert said.count("one machine alone is faster") == 3
        assert "most minibatches" not in said
    found = predict_scaling(WORK, [2, 64])
    assert found.best("ring") == 64
    assert "64 workers; each more than one machine brings less than half" in format_scaling(found)


def test_step_is_limited_by_its_longest_part() -> None:
    """A step is limited by training, latency or the processor, whichever takes longest."""
    assert predict_gradient_sharing(WORK, star_load(WORK, 2), 2).limited_by == STEP
    far = replace(WORK, step_s=0.01, latency_s=0.05)
    assert predict_gradient_sharing(far, star_load(far, 2), 2).limited_by == LATENCY
    costly = replace(WORK, step_s=0.01, latency_s=0.0)  # a publication takes 21 ms
    assert predict_gradient_sharing(costly, star_load(costly, 2), 2).limited_by == PROCESSOR
    assert predict_gradient_sharing(costly, star_load(costly, 1), 1).limited_by == PROCESSOR


def test_pays_up_to_looks_beyond_drop_at_next_mesh_level() -> None:
    """``pays_up_to`` looks beyond a drop of the speedup at the next level of a mesh."""
    found = predict_scaling(WORK, range(2, 65))
    speedups = {pace.workers: pace.speedup for pace in found.paces["mesh"]}
    assert min(speedups[k + 1] - speedups[k] for k in range(2, 64)) < 0.5
    assert speedups[64] - speedups[12] > 0.5 * (64 - 12)
    assert found.pays_up_to("mesh") > 50


@pytest.mark.parametrize(
    ("field", "value"),
    [("n_params", 0), ("step_s", 0.0), ("density", 0.0), ("density", 1.5), ("link_bits_s", 0.0),
     ("latency_s", -1.0), ("fan_out", 0), ("spread", 1.0), ("spread", -0.1),
     ("step_s", float("nan")), ("encoding_s", -1.0)],
)  # fmt: skip
def test_rejects_impossible_scaling_inputs(field: str, value: float) -> None:
    """The error names the value as the command's flag does: ``step``, not ``step_s``."""
    flag = field.removeprefix("n_").removesuffix("_s").removesuffix("_bits")
    with pytest.raises(UsageError, match=rf"^{flag}={value}: must be"):
        replace(WORK, **{field: value})


@pytest.mark.parametrize("workers", [[], [0], [2, -1]])
def test_rejects_empty_or_nonpositive_worker_counts(workers: list[int]) -> None:
    """An empty list of workers, or a number below 1, is refused."""
    with pytest.raises(UsageError, match="workers"):
        predict_scaling(WORK, workers)
