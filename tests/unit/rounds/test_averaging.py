"""Tests of the arithmetic of averaging: weighted means, optimizer states, and the outer step."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest

from sparkstrom.base.errors import TrainingError
from sparkstrom.models import Adam, DenseNetwork, Nesterov, Sgd
from sparkstrom.models.base import Batch
from sparkstrom.rounds.averaging import (
    OuterStep,
    WeightedSum,
    average_states,
    fresh_state,
    weighted_mean,
)
from sparkstrom.rounds.worker_round import RoundBatch, RoundStart, train_locally


def make_batch(count, seed=0, weighted=False):
    chance = np.random.default_rng(seed)
    features = chance.normal(size=(count, 6)).astype(np.float32)
    labels = chance.integers(0, 3, count)
    weights = chance.uniform(0.1, 3, count).astype(np.float32) if weighted else None
    return Batch(features, labels, weights)


def slice_batch(batch, first, end):
    weights = None if batch.weights is None else batch.weights[first:end]
    return Batch(batch.features[first:end], batch.labels[first:end], weights)


def make_round_start(model, parameters):
    """Return the start of a round with these parameters and a new optimizer state."""
    return RoundStart(parameters.copy(), b"", fresh_state(copy.deepcopy(model), parameters), 0)


def test_weighted_mean_of_equal_arrays_is_exact() -> None:
    """A mean is weighted, and the mean of equal arrays is exactly the array."""
    a, b = np.array([1, 2], np.float32), np.array([4, 8], np.float32)
    assert weighted_mean([a, b], [1, 2]).tolist() == [3, 6]
    odd = np.random.default_rng(0).normal(size=100).astype(np.float32)
    assert (weighted_mean([odd] * 7, [31, 32, 32, 5, 17, 32, 1]) == odd).all()


def test_partial_sums_give_same_mean_as_one_sum() -> None:
    """Sums of partial sums give the same mean as one sum."""
    parts = [make_batch(5, seed).features.ravel() for seed in range(6)]
    one, two, whole = WeightedSum(30), WeightedSum(30), WeightedSum(30)
    for i, part in enumerate(parts):
        (one if i < 3 else two).add(part, i + 1)
    whole.add_sum(one.total, one.weight)
    whole.add_sum(two.total, two.weight)
    assert np.allclose(whole.mean(), weighted_mean(parts, range(1, 7)), rtol=1e-7)
    assert whole.weight == 21


@pytest.mark.parametrize("weighted", [False, True])
def test_round_of_one_sgd_step_equals_joint_step(weighted) -> None:
    """One step per worker equals one step on all rows, also for unequal parts and weighted rows."""
    model = DenseNetwork([6, 8, 3], updater=Sgd(0.3), seed=2)
    began, union = model.initial(), make_batch(47, weighted=weighted)
    cuts = [0, 16, 32, 47]
    alone = [
        train_locally(
            copy.deepcopy(model),
            make_round_start(model, began),
            [RoundBatch(slice_batch(union, first, end), (0, 0, 1))],
        )
        for first, end in itertools.pairwise(cuts)
    ]
    mean = weighted_mean([one.parameters for one in alone], [one.weight for one in alone])
    together = began.copy()
    model.bind(together)
    loss = model.step(union)
    assert np.abs(OuterStep().step(began, mean) - together).max() < 1e-6
    weight = sum(one.weight for one in alone)
    assert sum(one.loss_sum for one in alone) / weight == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("class_weights", [None, [1.0, 5.0, 0.2]])
def test_workers_count_by_the_weights_of_their_labels(class_weights) -> None:
    """With class weights and ignored labels, too, a round of one step is one machine's step."""
    torch = pytest.importorskip("torch", reason="torch is not here")
    torch_model = pytest.importorskip("sparkstrom.models.torch")
    torch.manual_seed(0)
    weight = None if class_weights is None else torch.tensor(class_weights)
    model = torch_model.TorchModel(
        torch.nn.Linear(6, 3),
        torch.nn.CrossEntropyLoss(weight=weight),
        lambda p: torch.optim.SGD(p, lr=0.3),
    )
    began, union = model.initial(), make_batch(30, weighted=True)
    union.labels[3:20] = -100  # the second worker has no labels
    alone = [
        train_locally(
            copy.deepcopy(model),
            make_round_start(model, began),
            [RoundBatch(slice_batch(union, first, end), (0, 0, 1))],
        )
        for first, end in [(0, 5), (5, 15), (15, 30)]
    ]
    assert [bool(one.weight) for one in alone] == [True, False, True]
    mean = weighted_mean([one.parameters for one in alone], [one.weight for one in alone])
    together = began.copy()
    model.bind(together)
    model.step(union)
    assert np.abs(mean - together).max() < 1e-6


def test_round_result_depends_only_on_its_inputs() -> None:
    """A round's result depends only on its inputs, not on earlier rounds of the model object."""
    model = DenseNetwork([6, 8, 3], updater=Adam(), seed=2)
    turns = [RoundBatch(make_batch(8, seed), (0, seed, 3)) for seed in range(3)]
    first = train_locally(model, make_round_start(model, model.initial()), turns)
    kept = first.parameters.copy(), {k: np.copy(v) for k, v in first.updater.items()}
    train_locally(model, make_round_start(model, model.initial() + 1), turns[:1])
    again = train_locally(model, make_round_start(model, model.initial()), turns)
    assert (again.parameters == kept[0]).all()
    assert all((again.updater[name] == kept[1][name]).all() for name in kept[1])
    assert (again.steps, again.examples, again.weight) == (3, 24, 24.0)


def test_nan_loss_names_its_minibatch() -> None:
    model = DenseNetwork([6, 8, 3], updater=Sgd(1e30), seed=2)
    turns = [RoundBatch(make_batch(8, seed), (0, seed, 9)) for seed in range(9)]
    with (
        np.errstate(all="ignore"),
        pytest.raises(TrainingError, match=r"the loss is nan in minibatch \d of its round"),
    ):
        train_locally(model, make_round_start(model, model.initial()), turns)


def test_optimizer_state_arrays_are_averaged_and_counts_are_maxima() -> None:
    """Float arrays are averaged; numbers are of the workers with most steps; counts are maxima."""
    one = {"mean": np.array([0, 2], np.float32), "steps": 5, "rate": 0.1, "flag": True}
    two = {"mean": np.array([3, 2], np.float32), "steps": 4, "rate": 0.1, "flag": True}
    made = average_states([one, two], [1.0, 2.0], [3, 3])
    assert made["mean"].tolist() == [2, 2]
    assert made["mean"].dtype == np.float32
    assert (made["steps"], made["rate"], made["flag"]) == (5, 0.1, True)
    assert average_states([{"rate": 0.5}, {"rate": 1.25}], [1.0, 2.0], [1, 1]) == {"rate": 1.0}
    assert average_states([{"rate": 0.5}, {"rate": 1.25}], [1.0, 2.0], [2, 1]) == {"rate": 0.5}
    counts = [{"seen": np.array([1, 9])}, {"seen": np.array([3, 2])}]
    assert average_states(counts, [1, 1], [2, 1])["seen"].tolist() == [3, 9]
    late = average_states([{}, {"mean": np.array([3.0])}], [1, 1], [2, 1])  # not in the first yet
    assert late["mean"].tolist() == [3.0]


def test_averaging_keeps_rate_of_torch_scheduler() -> None:
    """PyTorch's schedulers multiply the previous rate, so a mean of two rates would stay wrong."""
    torch = pytest.importorskip("torch", reason="torch is not here")
    torch_model = pytest.importorskip("sparkstrom.models.torch")

    def scheduler(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.1)

    def model():
        torch.manual_seed(0)
        module, loss = torch.nn.Linear(6, 3), torch.nn.CrossEntropyLoss()
        return torch_model.TorchModel(
            module,
            loss,
            lambda p: torch.optim.SGD(p, lr=0.1),
            scheduler=scheduler,
            scheduler_interval="step",
        )

    alone = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    steps_alone, workers = scheduler(alone), [model(), model()]
    state = fresh_state(copy.deepcopy(workers[0]), workers[0].initial())
    for number in range(3):
        done = []
        for worker, count in zip(workers, (4, 3), strict=True):
            turns = [RoundBatch(make_batch(8, seed), (0, seed, count)) for seed in range(count)]
            own = {k: np.copy(v) if isinstance(v, np.ndarray) else v for k, v in state.items()}
            begun = RoundStart(worker.initial(), b"", own, 4 * number)
            done.append(train_locally(worker, begun, turns))
        weights, taken = [one.weight for one in done], [one.steps for one in done]
        state = average_states([one.updater for one in done], weights, taken)
        for _ in range(4):
            alone.step()
            steps_alone.step()
        assert state["groups/0/lr"] == alone.param_groups[0]["lr"]


def test_state_numbers_come_from_workers_with_most_steps() -> None:
    """A schedule's position and its rate belong together, so both are of the furthest workers."""
    short, most, also = {"at": 9, "rate": 0.5}, {"at": 7, "rate": 0.1}, {"at": 7, "rate": 0.2}
    made = average_states([short, most, also], [98.0, 1.0, 1.0], [2, 4, 4])
    assert made == {"at": 7, "rate": pytest.approx(0.15)}
    assert average_states([{"only": 5}, most], [1, 1], [2, 4]) == {"only": 5, **most}


def test_outer_step_equals_diloco_with_nesterov_momentum() -> None:
    """Two rounds equal algorithm 1 of the DiLoCo paper with Nesterov's momentum, done by hand."""
    began = np.array([1.0, -2.0], np.float32)
    outer, velocity = OuterStep(Nesterov(0.7, 0.9)), np.zeros(2)
    common = began.astype(np.float64)
    for mean in ([0.5, -1.0], [0.25, -1.5]):
        drift = common - mean
        velocity = 0.9 * velocity + drift
        expected = common - 0.7 * (drift + 0.9 * velocity)
        made = outer.step(common.astype(np.float32), np.array(mean, np.float32))
        assert np.allclose(made, expected, atol=1e-6)
        common = expected


def test_outer_sgd_with_rate_one_gives_mean() -> None:
    """An outer SGD with rate 1 gives the mean."""
    began, mean = make_batch(4).features, make_batch(4, 1).features
    assert np.allclose(OuterStep(Sgd(1.0)).step(began, mean.copy()), mean, atol=1e-6)
    assert (OuterStep().step(began, mean) == mean).all()
