"""Tests of simulated fits in rounds: the same bits as real ones, times by hand, faults, output."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparkstrom import ParallelWrapper, ParameterAveragingTrainingMaster, UsageError
from sparkstrom.cli.main import main
from sparkstrom.models.base import Batch, FlatModel
from sparkstrom.models.dense import DenseNetwork
from sparkstrom.models.updaters import Adam, Nesterov, Sgd
from sparkstrom.planning.scaling import WIRE_OVERHEAD
from sparkstrom.rehearsal import measurement
from sparkstrom.rehearsal.baselines import train_synchronously
from sparkstrom.rehearsal.conditions import StepTimes
from sparkstrom.rehearsal.fit import FitRecipe, SimulatedFit, make_environment
from sparkstrom.rehearsal.measurement import estimate_times, measure_times
from sparkstrom.rehearsal.rounds import JOB_S, VirtualCluster, simulate_rounds
from sparkstrom.rounds.averaging import RoundOptions
from tests.unit.rehearsal.recipes import (
    COLUMNS,
    ROWS,
    make_conditions,
    make_momentum_network,
    make_network,
    make_partitions,
    make_recipe,
    rows,
)

MINIBATCHES = 32  # of all workers in an epoch, for 1, 2, 4 and 8 workers
N_BYTES = 4 * make_network().n_params
SLOW = StepTimes(0.1, 0.0, encode_s=0.03, apply_s=0.02)


def make_rounds_recipe(
    model: FlatModel | None = None, epochs: int = 1, **options: Any
) -> FitRecipe:
    given = {"averaging_frequency": 4, "save_updater": True, **options}
    return replace(make_recipe(model, epochs), rounds=RoundOptions(**given))


def simulate_fit_in_rounds(made: FitRecipe, workers: int, **given: Any) -> SimulatedFit:
    return simulate_rounds(made, make_partitions(made, workers), make_conditions(**given))


@pytest.mark.parametrize("frequency", [1, 5])
@pytest.mark.parametrize(
    "model", [make_network(), make_momentum_network(), make_network(Adam(0.01))]
)
def test_single_worker_in_rounds_equals_single_process(model: FlatModel, frequency: int) -> None:
    """Averages of one worker change nothing, and nothing is rounded to a grid."""
    made = make_rounds_recipe(model, epochs=3, averaging_frequency=frequency)
    ours = simulate_fit_in_rounds(made, 1)
    alone = train_synchronously(made, make_partitions(made, 1), make_conditions())
    assert ours.parameters is not None
    assert alone.parameters is not None
    assert ours.parameters.tobytes() == alone.parameters.tobytes()
    assert ours.minibatches == alone.minibatches == 3 * MINIBATCHES
    assert ours.examples == alone.examples == 3 * ROWS


def test_rounds_of_one_sgd_step_equal_ddp() -> None:
    """With SGD and one step in a round, the mean of parameters is a step of all rows."""
    made = make_rounds_recipe(averaging_frequency=1)
    ours = simulate_fit_in_rounds(made, 4)
    dense = train_synchronously(made, make_partitions(made, 4), make_conditions())
    assert ours.parameters is not None
    np.testing.assert_allclose(ours.parameters, dense.parameters, atol=1e-6)


def test_seed_determines_times_but_not_learned_bits() -> None:
    """Another seed of the step times changes the times, but not what is learned."""
    made = make_rounds_recipe(make_momentum_network(), epochs=2)
    first, again, other = (
        simulate_fit_in_rounds(made, 4, seed=seed, kills=1) for seed in (1, 1, 2)
    )
    assert (first.digest, first.seconds) == (again.digest, again.seconds)
    assert first.digest == other.digest
    assert first.seconds != other.seconds


@pytest.mark.parametrize("speed", [1.0, 0.5])
def test_round_time_has_job_transfers_and_slowest_worker(speed: float) -> None:
    """Two workers train 4 rounds of 4 minibatches; the small results go to the driver program."""
    slow = {"stragglers": 1, "straggler_speed": speed, "link_bits_s": 1e6}
    simulated = simulate_fit_in_rounds(make_rounds_recipe(make_network()), 2, times=SLOW, **slow)
    moved = WIRE_OVERHEAD * 2 * N_BYTES  # each way over the driver program's link
    transfer_s = 1e-3 + 8 * moved / 1e6
    round_s = JOB_S + 2 * transfer_s + (4 * 0.1 + 0.03) / speed + 2 * 0.02
    assert simulated.seconds == pytest.approx(4 * round_s)
    assert simulated.link_bytes["driver"] == pytest.approx((4 * moved, 4 * moved))
    assert simulated.link_bytes["worker 0"] == pytest.approx((2 * moved, 2 * moved))
    assert simulated.update_bytes == 4 * 2 * N_BYTES
    assert simulated.bytes_by_kind == {"parameters": 8 * N_BYTES, "averages": 8 * N_BYTES}


@pytest.mark.parametrize(
    ("options", "down", "up"),
    [
        ({"save_updater": False}, [1 + 1, 1, 1, 1], 1),  # the fresh state is sent once
        ({"save_updater": True}, [2, 2, 2, 2], 2),
        ({"save_updater": "own"}, [2, 2, 2, 2], 2),
        ({"save_updater": True, "accumulator": lambda a, b, n: b.mean(axis=0)}, [2] * 4, 2),
    ],
    ids=["none", "averaged", "own", "accumulator"],
)
def test_simulated_optimizer_state_traffic_matches_save_updater(
    options: dict[str, Any], down: list[int], up: int
) -> None:
    """Momentum is one more vector per worker and round, unless each round starts without it."""
    simulated = simulate_fit_in_rounds(
        make_rounds_recipe(make_momentum_network(), **options), 2, times=SLOW
    )
    assert simulated.bytes_by_kind == {
        "parameters": 2 * sum(down) * N_BYTES,
        "averages": 4 * 2 * up * N_BYTES,
    }


def test_large_results_are_summed_in_tree_by_aggregation_depth() -> None:
    """The same results, by hand for four workers at 8 Mbit/s, without latency and headers."""
    vector, add_s = 4_000_000, 0.5
    slow = make_conditions(link_bits_s=8e6 * WIRE_OVERHEAD, latency_s=0.0)  # 1 MB/s of content

    def collect(averaged: int, own: int, depth: int) -> float:
        return VirtualCluster(slow, 4).collect(averaged, own, depth, add_s)

    # A shuffle sends 3/4 of a vector. Then the driver program gets all four vectors, or the mean.
    assert collect(vector, 0, 1) == pytest.approx(3 + 16 + 4 * add_s)
    assert collect(vector, 0, 2) == pytest.approx(3 + add_s + 4)
    # Two groups' sums of float64 are 16 MB, of which each host sends 3/4 of 4 MB.
    assert collect(vector, 0, 3) == pytest.approx(3 + add_s + 3 + add_s / 2 + 4)
    assert collect(vector, vector, 2) == pytest.approx(6 + add_s + 4 + 16)
    assert collect(1000, 0, 2) == pytest.approx(0.004 + 4 * add_s)  # small: to the driver program
    alone = VirtualCluster(slow, 1).collect(vector, 0, 2, add_s)
    assert alone == pytest.approx(add_s + 4)  # a single worker's shuffle is local


def test_driver_sends_two_copies_of_broadcast() -> None:
    """Executors send the other copies to each other; a worker's own state is sent once."""
    slow = make_conditions(link_bits_s=8e6 * WIRE_OVERHEAD, latency_s=0.5)
    cluster = VirtualCluster(slow, 4)
    assert cluster.broadcast(1_000_000, {1: 500_000}) == pytest.approx(0.5 + 2.5)
    sent, received = zip(*cluster.link_bytes.values(), strict=True)
    assert [each / WIRE_OVERHEAD for each in sent] == [2.5e6] + [5e5] * 4
    assert [each / WIRE_OVERHEAD for each in received] == [0, 1e6, 1.5e6, 1e6, 1e6]


def test_aggregation_depth_option_reaches_simulated_cluster() -> None:
    """The option of ParameterAveragingTrainingMaster reaches the simulated cluster."""
    wide = DenseNetwork([COLUMNS, 60_000, 2], updater=Sgd(0.1), seed=1)
    seconds = []
    for depth in (1, 2):
        master = ParameterAveragingTrainingMaster(averaging_frequency=16, aggregation_depth=depth)
        made = replace(make_recipe(wide, 1), rounds=master)
        seconds.append(
            simulate_fit_in_rounds(made, 2, times=StepTimes(0.1), link_bits_s=1e7).seconds
        )
    vector_s = 8 * WIRE_OVERHEAD * 4 * wide.n_params / 1e7
    assert seconds[0] - seconds[1] == pytest.approx(vector_s)  # two vectors instead of the mean


def test_evaluation_takes_one_job_per_epoch() -> None:
    """It follows each epoch, the last one after the last minibatch."""
    plain = make_rounds_recipe(epochs=2)
    held = replace(plain, fraction=0.2)
    simulated = simulate_rounds(held, make_partitions(held, 2), make_conditions(times=SLOW))
    trained = [each.batches_per_epoch for each in make_partitions(held, 2)]
    assert held.rounds is not None
    rounds = 2 * -(-max(trained) // held.rounds.averaging_frequency)
    bits = 8 * WIRE_OVERHEAD * 2 * N_BYTES
    steps_s = simulated.seconds - rounds * (JOB_S + 0.03 + 2 * 0.02 + 2 * (1e-3 + bits / 1e9))
    assert steps_s - 2 * max(trained) * 0.1 == pytest.approx(JOB_S + 1e-3 + bits / 1e9)


def test_task_of_killed_worker_is_repeated_with_same_result() -> None:
    """A repeated task takes a restart, the download and its steps; all bits stay the same."""
    made = make_rounds_recipe(make_momentum_network(), epochs=2)
    calm = simulate_fit_in_rounds(made, 4, times=SLOW)
    struck = simulate_fit_in_rounds(made, 4, times=SLOW, kills=2, restart_s=7.0)
    assert (struck.deaths, struck.digest) == (2, calm.digest)
    assert struck.minibatches == calm.minibatches
    lost_s = struck.seconds - calm.seconds - 2 * 7.0
    assert 0 < lost_s < 2 * (4 * 0.1 + 0.03) + 0.1
    assert simulate_fit_in_rounds(made, 1, kills=2).deaths == 0


class FailingNetwork(DenseNetwork):
    """A network that fails in the second epoch."""

    steps = 0

    def step(self, batch: Batch) -> float:
        self.steps += 1
        if self.steps > MINIBATCHES:
            raise ValueError("no more steps")
        return super().step(batch)


def test_failure_in_rounds_ends_run_with_reason() -> None:
    """Errors of the model and of an accumulator, and parameters that are not finite."""
    failed = simulate_fit_in_rounds(
        make_rounds_recipe(FailingNetwork([COLUMNS, 8, 2]), epochs=2), 2
    )
    assert failed.error == "ValueError: no more steps"
    assert failed.minibatches == MINIBATCHES
    with np.errstate(all="ignore"):
        wild = simulate_fit_in_rounds(make_rounds_recipe(make_network(Sgd(3e38))), 2)
        assert "lower the learning" in wild.error
    assert (
        "accumulator returned"
        in simulate_fit_in_rounds(make_rounds_recipe(accumulator=lambda a, b, n: a[1:]), 2).error
    )


def test_dense_update_times_are_measured_or_estimated_unencoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A dense update is packed and added; no update is encoded."""
    monkeypatch.setattr(measurement, "BUDGET_S", 0.0)
    made = make_rounds_recipe(make_momentum_network())
    monkeypatch.setattr("sparkstrom.runtime.theta.Replica.publish", None)
    times = measure_times(made, make_partitions(made, 1)[0], make_environment())
    assert 0 < times.step_s < 60
    assert 0 < times.encode_s < 60
    assert 0 < times.apply_s < 60
    assert estimate_times(10**7, 0.1, 0.2, is_dense=True) == StepTimes(0.1, 0.2, 0.08, 0.12)


def rehearse(**given: Any) -> Any:
    options = {"training_mode": "AVERAGING", "averaging_frequency": 4, "progress": False}
    with ParallelWrapper(
        make_momentum_network(), workers=2, batch_size_per_worker=8, **options
    ) as wrapper:
        before = wrapper.parameters
        made = wrapper.rehearse(rows(), step="50ms", **{"workers": (1, 4), "epochs": 2, **given})
        np.testing.assert_array_equal(wrapper.parameters, before)
        return made


def test_rehearsal_in_rounds_has_all_outputs(tmp_path: Path) -> None:
    """All keys are there; staleness and density, which rounds do not have, are None."""
    made = rehearse(validation=0.25, kill=1)
    figures = json.loads(json.dumps(made.to_dict(), allow_nan=False))
    one, alone, four, ddp = figures["runs"]
    assert [run["system"] for run in (one, four, ddp)] == [
        "one process",
        "sparkstrom",
        "DDP all-reduce",
    ]
    assert one["digest"] == ""
    assert alone["loss"] == one["loss"]
    assert (four["staleness"], figures["density"], figures["averaging_frequency"]) == (
        None,
        None,
        4,
    )
    assert four["deaths"] == 1
    assert four["link_bytes"].keys() == {"driver", *(f"worker {i}" for i in range(4))}
    assert len({point["seconds"] for point in four["points"]}) == len(four["points"]) > 2
    assert four["points"][-1]["seconds"] == four["seconds"]
    assert four["points"][-1]["examples"] == one["points"][-1]["examples"]
    text = str(made)
    assert "Rounds of at most 4 minibatches, each with a Spark job of 200 ms" in text
    assert "staleness" not in text
    page = tmp_path / "page.html"
    made.save(page)
    assert "<svg" in page.read_text()
    assert "<table" in made._repr_html_()


def test_rehearsal_in_rounds_rejects_scaling_rules() -> None:
    with pytest.raises(UsageError, match="scaling='ddp': training in rounds has no scaling rules"):
        rehearse(scaling="ddp")


def test_accumulator_and_outer_optimizer_change_simulated_result() -> None:
    """They change what is learned, as in a fit."""
    median = {"accumulator": lambda before, after, rows: np.median(after, axis=0)}
    outer = {"outer": Nesterov(0.7, 0.9), "save_updater": "own"}
    made = [
        simulate_fit_in_rounds(make_rounds_recipe(make_momentum_network(), **each), 4)
        for each in ({}, median, outer)
    ]
    assert len({fit.digest for fit in made}) == 3
    assert not any(fit.error for fit in made)


SCRIPT = """
import numpy as np
from sparkstrom import ParallelWrapper
from sparkstrom.models.dense import DenseNetwork

features = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
labels = (features.sum(axis=1) > 0).astype("int64")
wrapper = ParallelWrapper(DenseNetwork([3, 2]), 2, training_mode="AVERAGING", progress=False)
wrapper.fit((features, labels), epochs=2)
"""


def test_scaling_rejects_rehearsal_of_script_in_rounds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its figures are not those from which sparkstrom scaling can predict."""
    script, figures = tmp_path / "train.py", tmp_path / "rehearsal.json"
    script.write_text(SCRIPT)
    assert main(["rehearse", str(script), "--workers", "2", "--step", "5ms", "--json"]) == 0
    figures.write_text(capsys.readouterr().out)
    assert json.loads(figures.read_text())["averaging_frequency"] == 1
    assert main(["scaling", "--from", str(figures)]) == 2
    assert "that fit trains in rounds, which sparkstrom scaling does" in capsys.readouterr().err


def test_recipe_in_rounds_can_be_pickled() -> None:
    made = make_rounds_recipe(outer=Nesterov(0.7, 0.9))
    assert pickle.loads(pickle.dumps(made)).rounds == made.rounds
