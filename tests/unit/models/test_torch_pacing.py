"""Tests of torch's momenta and schedules with several workers: the fit's minibatches count."""

from __future__ import annotations

import pickle
from functools import partial
from typing import Any

import numpy as np
import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.models.base import Batch, Paced

torch = pytest.importorskip(
    "torch", reason="torch is not here: the tests pin it for CPython 3.11, whose build is CPU only"
)
from torch import nn, optim  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.optim import lr_scheduler  # noqa: E402

from sparkstrom.models.torch import TorchModel  # noqa: E402

CHANCE = np.random.default_rng(0)
BATCH = Batch(CHANCE.normal(size=(16, 6)).astype(np.float32), CHANCE.integers(0, 3, 16))
MOMENTA = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "nesterov": True}),
    ("SGD", {"lr": 0.1, "dampening": 0.1}),
    ("RMSprop", {"lr": 0.01}),
]
BETAS = [("Adam", {}), ("AdamW", {}), ("NAdam", {}), ("RAdam", {}), ("Adamax", {})]
WAYS = [
    *(pytest.param(n, o, {"momentum": 0.9}, {"momentum": 0.9**4}, id=f"{n}{i}")
      for i, (n, o) in enumerate(MOMENTA)),
    *(pytest.param(n, o, {"betas": (0.9, 0.99)}, {"betas": (0.9**4, 0.99)}, id=n)
      for n, o in BETAS),
]  # fmt: skip
SGD = partial(optim.SGD, lr=0.1, momentum=0.9)
RATES = partial(lr_scheduler.LambdaLR, lr_lambda=lambda position: position + 1)


def make(optimizer: Any, **options: Any) -> TorchModel:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    model = TorchModel(module, functional.cross_entropy, optimizer, **options)
    model.bind(model.initial())
    return model


def params_of(model: TorchModel) -> np.ndarray:
    return np.concatenate([p.detach().numpy().reshape(-1) for p in model.module.parameters()])


def take_steps(model: TorchModel, *paces: tuple[int, int] | None, counted: int = 0) -> list[float]:
    """Take a step at each pace; return each step's learning rate."""
    rates = []
    for pace in paces:
        if pace is not None:
            model.keep_pace(*pace, counted)
        model._get_optimizer()[0].register_step_pre_hook(
            lambda made, *_: rates.append(made.param_groups[0]["lr"])
        ) if not rates else None
        model.step(BATCH)
    return rates


@pytest.mark.parametrize(("name", "options", "own", "by_hand"), WAYS)
def test_momentum_is_raised_to_power_of_worker_count(
    name: str, options: Any, own: Any, by_hand: Any
) -> None:
    """With one worker nothing changes; with four, momentum is its fourth power."""
    kind = getattr(optim, name)
    before, alone, four, expected = (
        make(partial(kind, **options, **value)) for value in (own, own, own, by_hand)
    )
    take_steps(before, *[None] * 4)
    take_steps(alone, (1, 0), (1, 1), (1, 2), (1, 3))
    take_steps(four, (4, 0), (4, 4), (4, 8), (4, 12))
    take_steps(expected, *[None] * 4)
    assert isinstance(four, Paced)
    np.testing.assert_array_equal(params_of(alone), params_of(before))
    np.testing.assert_array_equal(params_of(four), params_of(expected))
    assert (params_of(four) != params_of(alone)).any()


@pytest.mark.parametrize(
    ("name", "adaptive"),
    [
        ("SGD", False),
        ("Rprop", False),
        ("AdamW", True),
        ("RMSprop", True),
        ("Adagrad", True),
        ("Adafactor", True),
    ],
)
def test_adaptive_torch_optimizers_are_recognized(name: str, adaptive: bool) -> None:
    model = make(partial(getattr(optim, name), lr=0.1))
    assert model.has_adaptive_optimizer() == adaptive


def test_muon_is_not_adaptive() -> None:
    module = nn.Linear(6, 3, bias=False)
    muon = partial(optim.Muon, lr=0.1)
    assert not TorchModel(module, functional.cross_entropy, muon).has_adaptive_optimizer()


def test_has_adaptive_optimizer_before_bind_keeps_no_optimizer() -> None:
    """Before ``bind``, parameters have no values, so an optimizer made of them is not kept."""
    module = nn.Linear(6, 3)
    model = TorchModel(module, functional.cross_entropy, partial(optim.Adagrad, lr=0.1))
    unbound = pickle.loads(pickle.dumps(model))
    assert unbound.has_adaptive_optimizer()
    assert unbound._optimizer_pair is None


def test_optimizer_state_has_momentum_as_given_by_user() -> None:
    """The state has the user's momentum, not its power, and a worker that loads it continues."""
    four, other = make(SGD), make(SGD)
    take_steps(four, (4, 0), (4, 4))
    state = four.updater_state()
    assert state["groups/0/momentum"] == 0.9
    other.bind(params_of(four).copy())
    other.load_updater_state({name: np.copy(v) if np.ndim(v) else v for name, v in state.items()})
    take_steps(four, (3, 8), (1, 11))
    take_steps(other, (3, 8), (1, 11))
    np.testing.assert_array_equal(params_of(other), params_of(four))


def with_statistics(momentum: float | None) -> TorchModel:
    """Return a model with BatchNorm."""
    torch.manual_seed(0)
    layers = nn.Linear(6, 5), nn.BatchNorm1d(5, momentum=momentum), nn.Linear(5, 3)
    model = TorchModel(nn.Sequential(*layers), functional.cross_entropy, SGD)
    model.bind(model.initial())
    return model


def test_four_workers_raise_momentum_of_batch_norm() -> None:
    """With four workers, BatchNorm's momentum 0.1 is 1 - 0.9 ** 4."""
    four, by_hand = with_statistics(0.1), with_statistics(1 - 0.9**4)
    take_steps(four, (4, 0))
    take_steps(by_hand, (1, 0))
    assert four.buffers_bytes() == by_hand.buffers_bytes()
    assert four.module[1].momentum == 0.1
    assert four.horizons(4)["statistics"] == "0.1 -> 0.3439"


def test_cumulative_batch_norm_ignores_worker_count() -> None:
    """BatchNorm with momentum=None, a cumulative average, is not changed."""
    four, one = with_statistics(None), with_statistics(None)
    take_steps(four, (4, 0))
    take_steps(one, (1, 0))
    assert four.buffers_bytes() == one.buffers_bytes()
    assert "statistics" not in four.horizons(4)


def test_each_parameter_group_has_own_momentum_raised() -> None:
    def groups(named: Any) -> list[dict[str, Any]]:
        first, *others = named.values()
        return [{"params": [first], "momentum": 0.5}, {"params": others}]

    model, seen = make(SGD, groups=groups), []
    model._get_optimizer()[0].register_step_pre_hook(
        lambda made, *_: seen.append([group["momentum"] for group in made.param_groups])
    )
    take_steps(model, (2, 0), (1, 2))
    assert seen == [[0.25, 0.9 * 0.9], [0.5, 0.9]]
    assert model.horizons(2) == {"momentum": "0.5 -> 0.25; 0.9 -> 0.81"}


def test_momentum_set_by_scheduler_is_raised() -> None:
    """A momentum that a scheduler sets is raised to the number of workers, too."""
    cycle = partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=20, pct_start=0.5)
    model, seen = make(SGD, scheduler=cycle), []
    model._get_optimizer()[0].register_step_pre_hook(
        lambda made, *_: seen.append(made.param_groups[0]["momentum"])
    )
    take_steps(model, (2, 0), (2, 9))
    assert seen == pytest.approx([0.95**2, 0.85**2])
    assert 0.85 < model.updater_state()["groups/0/momentum"] < 0.86


def test_momentum_set_by_custom_step_is_unchanged() -> None:
    """A momentum that a user's step function sets stays as it is."""

    def step(module: Any, optimizer: Any, batch: Any) -> Any:
        optimizer.param_groups[0]["momentum"] = 0.7
        loss = functional.cross_entropy(module(batch.features), batch.labels)
        loss.backward()
        optimizer.step()
        return loss

    model = make(SGD, step=step)
    take_steps(model, (4, 0))
    assert model.updater_state()["groups/0/momentum"] == 0.7


# -- schedulers ------------------------------------------------------------------------------------


def test_schedule_follows_minibatches_of_fit() -> None:
    """A schedule is at the fit's minibatch, not at this worker's step."""
    four, alone = make(SGD, scheduler=RATES), make(SGD, scheduler=RATES)
    assert take_steps(four, (4, 0), (4, 4), (4, 8)) == pytest.approx([0.1, 0.5, 0.9])
    assert take_steps(alone, None, None, None) == pytest.approx([0.1, 0.2, 0.3])


def test_schedule_never_rewinds() -> None:
    model = make(SGD, scheduler=RATES)
    assert take_steps(model, (4, 8), (4, 2), (4, 8)) == pytest.approx([0.9, 1.0, 1.0])


def test_chained_schedule_follows_minibatches_of_fit() -> None:
    def chained(optimizer: Any) -> Any:
        return lr_scheduler.ChainedScheduler([RATES(optimizer)])

    assert take_steps(make(SGD, scheduler=chained), (4, 0), (4, 4)) == pytest.approx([0.1, 0.5])


def test_reduce_on_plateau_steps_once_per_step() -> None:
    model = make(SGD, scheduler=lr_scheduler.ReduceLROnPlateau)
    take_steps(model, (4, 0), (4, 4))
    assert model.updater_state()["scheduler/last_epoch"] == 2
    assert "by the loss" in model.horizons(4)["scheduler"]


ONE_CYCLE = partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=10)


def test_worker_beyond_end_of_schedule_keeps_last_rate() -> None:
    """A worker beyond the schedule's end keeps the last rate."""
    model = make(SGD, scheduler=ONE_CYCLE)
    rates = take_steps(model, (4, 9), (4, 13), (4, 17), counted=10)
    assert rates[1] == rates[2] < 0.1 / 10
    assert model.updater_state()["scheduler/last_epoch"] == 10


def test_schedule_too_short_for_fit_is_refused() -> None:
    model = make(SGD, scheduler=ONE_CYCLE)
    take_steps(model, (4, 9))
    with pytest.raises(UsageError, match=r"OneCycleLR: .*: make it longer"):
        take_steps(model, (4, 13), counted=11)


def test_late_worker_continues_from_schedule_of_loaded_state() -> None:
    """A late worker with another's optimizer state has the rate of the fit's minibatch."""
    lender, late = make(SGD, scheduler=RATES), make(SGD, scheduler=RATES)
    take_steps(lender, (4, 0), (4, 4))
    late.load_updater_state(lender.updater_state())
    assert take_steps(late, (4, 8)) == pytest.approx([0.9])
