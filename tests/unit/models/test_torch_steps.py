"""Tests of 20 steps of a TorchModel against plain torch, and of hooks, states and schedules."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import cloudpickle
import numpy as np
import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.models.base import Batch, get_step_weight, zero_frozen_entries

torch = pytest.importorskip(
    "torch", reason="torch is not here: the tests pin it for CPython 3.11, whose build is CPU only"
)
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from sparkstrom.models.torch import TorchModel  # noqa: E402

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
CHANCE = np.random.default_rng(0)
X = CHANCE.normal(size=(24, 6)).astype(np.float32)
Y = CHANCE.integers(0, 3, 24)
IGNORING = np.where(CHANCE.random(24) < 0.4, -100, Y)
CLASS_WEIGHTS = torch.tensor([1.0, 5.0, 0.5])

LOSSES: dict[str, tuple[Any, np.ndarray]] = {
    "cross entropy": (nn.CrossEntropyLoss(), Y),
    "ignored labels": (nn.CrossEntropyLoss(), IGNORING),
    "class weights": (nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), Y),
    "both": (nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, ignore_index=2), Y),
    "label smoothing": (nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, label_smoothing=0.2), IGNORING),
    "function": (functional.cross_entropy, IGNORING),
    "partial": (partial(functional.cross_entropy, weight=CLASS_WEIGHTS), IGNORING),
    "probabilities": (nn.CrossEntropyLoss(), np.eye(3, dtype=np.float32)[Y]),
    "pos_weight": (nn.BCEWithLogitsLoss(pos_weight=CLASS_WEIGHTS), np.eye(3, dtype=np.float32)[Y]),
    "huber": (nn.HuberLoss(), np.eye(3, dtype=np.float32)[Y]),
}


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def bound(model: TorchModel, params: np.ndarray | None = None) -> np.ndarray:
    params = model.initial() if params is None else params
    model.bind(params)
    return params


def pickle_round_trip(model: TorchModel) -> TorchModel:
    copied: TorchModel = cloudpickle.loads(cloudpickle.dumps(model))
    return copied


def plain(module: nn.Module, loss: Any, labels: np.ndarray, optimizer: Callable[..., Any]) -> Any:
    """Return the parameters after 20 steps of plain torch."""
    made = optimizer(module.parameters())
    for _ in range(20):
        made.zero_grad()
        loss(module(torch.from_numpy(X)), torch.from_numpy(labels)).backward()
        made.step()
    return np.concatenate([p.detach().numpy().ravel() for p in module.parameters()])


@pytest.mark.parametrize("weights", [None, np.ones(24, np.float32)], ids=["plain", "ones"])
@pytest.mark.parametrize("name", LOSSES)
def test_twenty_steps_equal_torch(name: str, weights: np.ndarray | None) -> None:
    loss, labels = LOSSES[name]
    model = TorchModel(mlp(), loss, SGD)
    params = bound(model)
    for _ in range(20):
        model.step(Batch(X, labels, weights))
    np.testing.assert_allclose(params, plain(mlp(), loss, labels, SGD), rtol=0, atol=1e-5)


@pytest.mark.parametrize("weights", [None, np.ones(24, np.float32)], ids=["plain", "ones"])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_summed_over_parts_equals_loss_of_all_rows(
    name: str, weights: np.ndarray | None
) -> None:
    loss, labels = LOSSES[name]
    model = TorchModel(mlp(), loss, SGD)
    bound(model)
    total = weight = 0.0
    for part in (slice(0, 5), slice(5, 24)):
        of_part = None if weights is None else weights[part]
        value, rows = model.loss(Batch(X[part], labels[part], of_part))
        total, weight = total + value, weight + rows
    with torch.no_grad():
        wanted = loss(mlp()(torch.from_numpy(X)), torch.from_numpy(labels)).item()
    assert total / weight == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("weights", [None, np.ones(24, np.float32)], ids=["plain", "ones"])
@pytest.mark.parametrize("ignored", ["labels", "rows"])
def test_minibatch_of_ignored_labels_or_zero_weights_changes_nothing(
    ignored: str, weights: np.ndarray | None, accumulate: int
) -> None:
    """If all labels are ignored or all rows weigh 0, AdamW changes no parameter; the loss is 0."""
    model = TorchModel(
        mlp(),
        nn.CrossEntropyLoss(),
        partial(torch.optim.AdamW, lr=0.1),
        scheduler=partial(torch.optim.lr_scheduler.StepLR, step_size=1),
        scheduler_interval="step",
        accumulate=accumulate,
    )
    params, nothing = bound(model), Batch(X, np.full(24, -100), weights)
    if ignored == "rows":
        nothing = Batch(X, Y, np.zeros(24, np.float32))
    for trained in (nothing, Batch(X, Y, weights), nothing):
        before = params.copy()
        loss = model.step(trained)
        assert (loss == 0) == (trained is nothing) == np.array_equal(params, before)
        assert get_step_weight(model, trained) == (0 if trained is nothing else 24)
    assert model.loss(nothing) == (0.0, 0.0)
    assert model.updater_state()["scheduler/last_epoch"] == 3


@pytest.mark.parametrize(
    "nothing", [Batch(X, np.full(24, -100)), Batch(X, Y, np.zeros(24, np.float32))]
)
def test_minibatch_without_weight_is_ignored_by_reduce_on_plateau(nothing: Batch) -> None:
    """ReduceLROnPlateau does not see a loss of 0, below which no later one could be."""
    plateau = partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=1)
    model = TorchModel(mlp(), nn.CrossEntropyLoss(), SGD, scheduler=plateau)
    bound(model)
    for trained in (nothing, *[Batch(X, Y)] * 5):
        model.step(trained)
    assert model.updater_state()["groups/0/lr"] == 0.1


def test_gradient_hooks_survive_pickling_and_deep_copy() -> None:
    """Gradient hooks on parameters survive pickling and deep copies."""
    module = mlp()
    mask = torch.zeros(5, 6)
    mask[2:] = 1
    module[0].weight.register_hook(lambda gradient: gradient * mask)

    def halve(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    module[2].bias.register_post_accumulate_grad_hook(halve)
    wanted = copy.deepcopy(mlp())
    wanted[0].weight.register_hook(lambda gradient: gradient * mask)
    wanted[2].bias.register_post_accumulate_grad_hook(halve)
    expected = plain(wanted, nn.CrossEntropyLoss(), Y, SGD)
    model = TorchModel(module, nn.CrossEntropyLoss(), SGD)
    for made in (
        pickle_round_trip(model),
        copy.deepcopy(model),
        pickle_round_trip(copy.deepcopy(model)),
        model,
    ):
        params = bound(made, model.initial())
        for _ in range(20):
            made.step(Batch(X, Y))
        np.testing.assert_allclose(params, expected, rtol=0, atol=1e-5)


def test_gradient_hook_that_holds_module_is_refused_by_parameter_name() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 3)
            self.register_buffer("mask", torch.ones(3, 6))
            self.inner.weight.register_hook(lambda gradient: gradient * self.mask)

    with pytest.raises(UsageError, match=r"a hook on inner\.weight .* holds the module"):
        TorchModel(Masked(), nn.CrossEntropyLoss(), SGD)


class Lookahead(torch.optim.SGD):
    """SGD that every third step moves halfway back to slow parameters, kept as attributes."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr, momentum=0.9)
        self.steps_done = 0
        self.slow: dict[Any, torch.Tensor] = {}
        self.norms: list[torch.Tensor] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        self.steps_done += 1
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["history"] = [torch.full((2,), float(self.steps_done)), 1]
                slow = self.slow.setdefault(p, p.detach().clone())
                if self.steps_done % 3 == 0:
                    slow.lerp_(p, 0.5)
                    p.copy_(slow)
        self.norms = [*self.norms, p.norm()][-2:]


def test_optimizer_attributes_are_part_of_its_state() -> None:
    """A model that loads another's state continues, also from the optimizer's attributes."""
    optimizer = partial(Lookahead, lr=0.05)
    expected = plain(mlp(), nn.CrossEntropyLoss(), Y, optimizer)
    model = TorchModel(mlp(), nn.CrossEntropyLoss(), optimizer)
    params = bound(model)
    for _ in range(4):
        for _ in range(5):
            model.step(Batch(X, Y))
        other = TorchModel(mlp(1), nn.CrossEntropyLoss(), optimizer)
        params = bound(other, params.copy())
        other.load_updater_state(copy.deepcopy(model.updater_state()))
        model = other
    np.testing.assert_allclose(params, expected, rtol=0, atol=1e-6)
    made = model._get_optimizer()[0]
    history = next(iter(made.state.values()))["history"]
    assert history[0].tolist() == [20.0, 20.0]
    assert history[1] == 1
    assert len(made.norms) == 2


def test_layers_can_be_frozen_and_unfrozen_between_fits() -> None:
    """A frozen layer keeps its parameters and has no residual; afterwards it trains again."""
    model = TorchModel(mlp(), nn.CrossEntropyLoss(), partial(torch.optim.Adam, lr=0.01))
    params = bound(model)
    model.step(Batch(X, Y))
    state = copy.deepcopy(model.updater_state())
    for trained in (False, True):
        model.module[0].requires_grad_(trained)
        other = pickle_round_trip(model)
        now = bound(other, params.copy())
        other.load_updater_state(copy.deepcopy(state))
        other.step(Batch(X, Y))
        assert (now[:35] != params[:35]).any() == trained
        assert (now[35:] != params[35:]).any()
        left = zero_frozen_entries(other, np.ones(other.n_params, np.float32))
        assert left[:35].any() == trained
        assert left[35:].all()
        state = copy.deepcopy(other.updater_state())


def test_buffer_with_changed_shape_is_refused_by_name() -> None:
    module = mlp()
    module.register_buffer("bank", torch.zeros(0, 4))
    model = TorchModel(module, nn.CrossEntropyLoss(), SGD)
    module.bank = torch.zeros(3, 4)
    with pytest.raises(UsageError, match=r"bank is float32\[3, 4\] now.*float32\[0, 4\] when"):
        model.buffers_bytes()


# -- schedules -------------------------------------------------------------------------------------

EPOCHS, BATCHES = 6, 4
BY_EPOCHS = {
    "StepLR": {"step_size": 2, "gamma": 0.5},
    "MultiStepLR": {"milestones": [1, 4]},
    "ExponentialLR": {"gamma": 0.7},
    "CosineAnnealingLR": {"T_max": EPOCHS},
    "PolynomialLR": {"total_iters": EPOCHS},
}
BY_STEPS = {
    "OneCycleLR": {"max_lr": 0.3, "total_steps": EPOCHS * BATCHES},
    "LinearLR": {"start_factor": 0.1, "total_iters": 10},
}


@pytest.mark.parametrize("name", [*BY_EPOCHS, *BY_STEPS])
def test_alternating_workers_have_schedule_rates_of_plain_loop(name: str) -> None:
    """Two workers alternate, as in a fit: each has every other minibatch and its rate."""
    options = BY_EPOCHS.get(name) or BY_STEPS[name]
    schedule = partial(getattr(torch.optim.lr_scheduler, name), **options)
    optimizer = partial(torch.optim.SGD, lr=0.1)
    alone = optimizer(mlp().parameters())
    expected, by_hand = [], schedule(alone)
    for _ in range(EPOCHS):
        for _ in range(BATCHES):
            expected.append(alone.param_groups[0]["lr"])
            alone.step()
            if name in BY_STEPS:
                by_hand.step()
        if name in BY_EPOCHS:
            by_hand.step()
    models = []
    for _ in range(2):
        models.append(
            pickle_round_trip(
                TorchModel(mlp(), nn.CrossEntropyLoss(), optimizer, scheduler=schedule)
            )
        )
        models[-1].bind(TorchModel(mlp(), nn.CrossEntropyLoss(), optimizer).initial())
    rates = []
    for done in range(EPOCHS * BATCHES):
        model = models[done % 2]
        model.set_position(done // BATCHES, done % BATCHES // 2, BATCHES // 2)
        model.keep_pace(2, done, done)
        with model._scaling.scaled_step(*model._get_optimizer()):
            rates.append(model._get_optimizer()[0].param_groups[0]["lr"])
        model.step(Batch(X, Y))
    assert rates == pytest.approx(expected)


def test_scheduler_interval_is_applied_and_validated() -> None:
    step = partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)

    def rate(interval: str | None) -> float:
        model = TorchModel(
            mlp(), nn.CrossEntropyLoss(), SGD, scheduler=step, scheduler_interval=interval
        )
        bound(model)
        for batch in range(3):
            model.set_position(0, batch, 3)
            model.step(Batch(X, Y))
        return float(model.updater_state()["groups/0/lr"])

    assert [rate("step"), rate("epoch"), rate(None)] == pytest.approx([0.0125, 0.1, 0.1])
    with pytest.raises(UsageError, match="scheduler_interval='batch': must be 'epoch', 'step'"):
        rate("batch")
    with pytest.raises(UsageError, match="without a scheduler"):
        TorchModel(mlp(), nn.CrossEntropyLoss(), SGD, scheduler_interval="epoch")

    def warmed_up(optimizer: Any) -> Any:
        first = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)
        return torch.optim.lr_scheduler.SequentialLR(optimizer, [first, step(optimizer)], [3])

    with pytest.raises(
        UsageError, match=r"SequentialLR of LinearLR, StepLR: .* pass scheduler_int"
    ):
        TorchModel(mlp(), nn.CrossEntropyLoss(), SGD, scheduler=warmed_up)
    TorchModel(mlp(), nn.CrossEntropyLoss(), SGD, scheduler=warmed_up, scheduler_interval="epoch")


def test_nan_losses_without_gradients_warn() -> None:
    """A step that skips overflows does not end the fit, and the losses are reported by number."""

    def step(module: Any, optimizer: Any, batch: Any) -> Any:
        optimizer.zero_grad()
        return torch.tensor(float("nan"))

    model = TorchModel(mlp(), None, SGD, step=step)
    bound(model)
    with pytest.warns(UserWarning, match="with a loss of NaN and no gradient: 1") as found:
        assert [model.step(Batch(X, Y)) for _ in range(11)] == [0] * 11
    assert get_step_weight(model, Batch(X, Y)) == 0
    assert [re.findall("gradient: ([0-9]+);", str(each.message)) for each in found] == [
        ["1"],
        ["10"],
    ]
