"""Tests of one simulated fit: reproducibility, equal replicas, faults and links."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from sparkstrom import VoidConfiguration
from sparkstrom.codec.optimizer_state_codec import encode_state
from sparkstrom.models.base import FlatModel
from sparkstrom.models.updaters import Sgd
from sparkstrom.rehearsal.baselines import join_batches, train_synchronously
from sparkstrom.rehearsal.conditions import StepTimes
from sparkstrom.rehearsal.fit import POINTS, FitRecipe, average_recent
from sparkstrom.runtime.optimizer_states import (
    OPTIMIZER_PREFIX,
    OptimizerStates,
    OptimizerStateServer,
)
from sparkstrom.runtime.trainer_thread import EARLY_PUBLICATIONS
from tests.unit.rehearsal.recipes import (
    COLUMNS,
    make_conditions,
    make_momentum_network,
    make_network,
    make_partitions,
    make_recipe,
    make_simulator,
    simulate_fit,
)

MINIBATCHES = 3 * 32  # of all workers, for 1, 2, 4 and 8 workers


@pytest.mark.parametrize("workers", [2, 8])
def test_equal_seeds_give_same_bits_and_equal_replicas(workers: int) -> None:
    """Equal seeds give equal bits, times and curves; all replicas are equal."""
    made = make_recipe(make_momentum_network())
    first, again, other = (simulate_fit(made, workers, seed=seed) for seed in (1, 1, 2))
    assert first.replicas_equal
    assert (first.digest, first.seconds, first.points) == (
        again.digest,
        again.seconds,
        again.points,
    )
    assert other.seconds != first.seconds
    assert first.minibatches == other.minibatches == MINIBATCHES
    assert first.error == ""


@pytest.mark.parametrize("model", [make_network(), make_momentum_network()])
def test_single_worker_equals_single_process_bit_by_bit(model: FlatModel) -> None:
    """Theta lacks the residual; theta + residual equals the single process's parameters."""
    made = make_recipe(model, residual_post_processor=None)
    fit = make_simulator(made, 1)
    simulated = fit.run()
    alone = train_synchronously(made, make_partitions(made, 1), make_conditions())
    local = fit.workers[0].replica.theta.local
    assert local is not None
    assert alone.parameters is not None
    assert local.tobytes() == alone.parameters.tobytes()
    assert simulated.minibatches == alone.minibatches == MINIBATCHES


def test_mesh_relays_forward_updates_and_replicas_are_equal() -> None:
    """In a mesh, relays forward updates, and all workers have the same bits."""
    made = make_recipe(make_network(), void=VoidConfiguration(mesh_build_mode="mesh"))
    simulated = simulate_fit(made, 12)
    assert simulated.replicas_equal
    relayed = [sent for name, (sent, _) in simulated.link_bytes.items() if name != "driver"]
    assert max(relayed) > 2 * min(relayed)  # inner nodes send what leaves need


def test_limit_overshoot_reduces_summed_workers_above_eight() -> None:
    """Above eight workers, ``limit_overshoot`` limits how many workers' updates are summed."""
    wild = make_network(Sgd(2.0))  # at 3, parameters leave the range in which sums are exact
    freed = simulate_fit(make_recipe(wild, epochs=8, limit_overshoot=False), 16)
    limited = simulate_fit(make_recipe(wild, epochs=8), 16)
    assert freed.summed_workers is None
    assert limited.summed_workers is not None
    assert limited.summed_workers < 4  # the initial limit
    assert limited.replicas_equal
    assert limited.digest != freed.digest
    assert limited.minibatches == freed.minibatches
    assert simulate_fit(make_recipe(wild, epochs=8), 8).summed_workers is None


def test_minibatches_count_once_after_worker_is_killed() -> None:
    """After kills and restarts, each minibatch counts once and replicas are equal."""
    made = make_recipe(make_momentum_network(), epochs=6)
    calm, struck = simulate_fit(made, 4), simulate_fit(made, 4, kills=2, restart_s=1.0)
    assert struck.deaths == 2
    assert struck.replicas_equal
    assert struck.minibatches == calm.minibatches
    assert struck.seconds > calm.seconds + 1.0


def test_replacement_worker_gets_optimizer_state_without_retries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before, a new worker requested three of four chunks again, after 2, 4 and 8 seconds."""
    chunked = partial(OptimizerStateServer, chunk_bytes=64)
    monkeypatch.setattr("sparkstrom.rehearsal.worker.OptimizerStateServer", chunked)
    made = make_recipe(make_momentum_network())
    calm, struck = simulate_fit(made, 2), simulate_fit(made, 2, kills=1, restart_s=1.0)
    assert struck.deaths == 1
    assert struck.seconds - calm.seconds < 8.0


def test_slow_worker_determines_fit_duration() -> None:
    """A fit with one slow worker takes about as long as this worker needs."""
    made = make_recipe()
    even, slow = simulate_fit(made, 4), simulate_fit(made, 4, stragglers=1, straggler_speed=0.5)
    assert 1.3 < slow.seconds / even.seconds < 2.5
    # A single worker is never a straggler: stragglers are simulated relative to others.
    assert simulate_fit(made, 1, stragglers=1, straggler_speed=0.5).seconds < even.seconds * 4.5


@pytest.mark.parametrize(("publish_every", "share"), [(1, 1), (2, 2), (4, 4), ("auto", 4)])
def test_encoding_takes_time_once_per_sent_update(publish_every: int | str, share: int) -> None:
    """ "auto" puts four short steps of a single worker into one update, like publish_every=4."""
    made = make_recipe(epochs=12, publish_every=publish_every)
    slow = StepTimes(0.1, encode_s=0.2)
    free = simulate_fit(made, 1, times=replace(slow, encode_s=0.0))
    seconds = simulate_fit(made, 1, times=slow).seconds - free.seconds
    early = EARLY_PUBLICATIONS if publish_every == "auto" else 0  # these have one step each
    updates = early + (4 * MINIBATCHES - early) / share
    assert seconds == pytest.approx(0.2 * updates, rel=0.02)


def test_narrow_link_slows_fit_and_limits_sent_bytes() -> None:
    """A narrow link slows a fit, and no more than its capacity is sent."""
    made = make_recipe()
    wide, narrow = simulate_fit(made, 4), simulate_fit(made, 4, link_bits_s=100_000)
    assert narrow.seconds > 1.3 * wide.seconds
    assert narrow.replicas_equal
    assert 8 * max(narrow.link_bytes["driver"]) <= 1.1 * 100_000 * (narrow.seconds + 5)


def test_nonfinite_loss_ends_run_with_reason() -> None:
    """A loss that is not finite ends the run with a reason and advice."""
    with np.errstate(all="ignore"):
        simulated = simulate_fit(make_recipe(make_network(Sgd(1e30))), 2)
    assert "ower the learning rate" in simulated.error
    assert simulated.minibatches < MINIBATCHES


@pytest.mark.parametrize(
    ("options", "differs"),
    [({}, False), ({"scaling": "sequential"}, False), ({"scaling": "ddp"}, True)],
)
def test_ddp_scaling_rule_changes_result(options: dict[str, Any], differs: bool) -> None:
    """ "sequential" is the default scaling rule; "ddp" gives other results."""
    made, default = (
        make_recipe(make_momentum_network(), **options),
        make_recipe(make_momentum_network()),
    )
    assert (simulate_fit(made, 4).digest != simulate_fit(default, 4).digest) == differs


def test_first_epoch_changes_row_order_of_simulated_fit() -> None:
    """The epoch number determines the order of rows, as in a network's next fit."""
    made = make_recipe()
    later = FitRecipe(
        made.model, made.packed, made.parameters, made.k, made.master, made.epochs, first_epoch=3
    )
    assert simulate_fit(later, 2).digest != simulate_fit(made, 2).digest


def test_workers_start_with_own_optimizer_states_if_counts_match() -> None:
    """A checkpoint may have a state for each worker; other numbers of workers get the first."""
    made = make_recipe(make_momentum_network())
    first, second = (
        encode_state({OPTIMIZER_PREFIX + "velocity": np.full(made.model.n_params, v, np.float32)})
        for v in (0.0, 0.1)
    )
    states = OptimizerStates(first, {0: first, 1: second})
    own = replace(made, states=states, states_workers=2)
    common = replace(made, states=OptimizerStates(first))
    assert simulate_fit(own, 2).digest != simulate_fit(common, 2).digest
    assert simulate_fit(own, 4).digest == simulate_fit(common, 4).digest


def test_ddp_step_equals_step_with_mean_gradient_of_ranks() -> None:
    """A simulated DDP step equals a step with the mean of all ranks' gradients."""
    made = make_recipe(epochs=1)
    ranks = make_partitions(made, 4)
    batches = [each.get(0, 0) for each in ranks]
    gradients = []
    for batch in batches:
        model, values = make_network(), made.parameters.copy()
        model.bind(values)
        model.step(batch)
        gradients.append(values - made.parameters)
    model, values = make_network(), made.parameters.copy()
    model.bind(values)
    joined = join_batches(batches)
    model.step(joined)
    np.testing.assert_allclose(values - made.parameters, np.mean(gradients, axis=0), atol=1e-6)
    assert joined.rows == 32
    assert joined.features.shape == (32, COLUMNS)  # type: ignore[union-attr]
    dense = train_synchronously(made, ranks, make_conditions())
    assert (dense.minibatches, dense.examples) == (32, 256)
    assert dense.seconds == pytest.approx(8 * 0.1, rel=0.3)


def test_zero_weight_minibatches_do_not_change_mean_training_loss() -> None:
    """The mean of the last twentieth of the minibatches is weighted; NaN if nothing counts."""
    earlier = [(1.0, 9.0)] * (3 * POINTS - 3)
    assert average_recent([*earlier, (3.0, 2.0), (1.0, 6.0), (0.0, 0.0)]) == 3.0
    assert np.isnan(average_recent([(0.0, 0.0)]))
    assert np.isnan(average_recent([]))
