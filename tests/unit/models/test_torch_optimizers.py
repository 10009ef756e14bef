"""Tests that torch's optimizers step in place on the flat vector, and that their state moves."""

from __future__ import annotations

import inspect
import json
import math
import pickle
from functools import partial
from typing import Any

import numpy as np
import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.models.base import Batch

torch = pytest.importorskip(
    "torch", reason="torch is not here: the tests pin it for CPython 3.11, whose build is CPU only"
)
from torch import nn, optim  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.optim import lr_scheduler  # noqa: E402

from sparkstrom.models.torch import TorchModel  # noqa: E402

CHANCE = np.random.default_rng(0)
FEATURES = CHANCE.normal(size=(16, 6)).astype(np.float32)
BATCH = Batch(FEATURES, CHANCE.integers(0, 3, 16))
REFUSED = {"LBFGS": "closure", "SparseAdam": "sparse gradients only"}
ALL = sorted(
    name
    for name, kind in vars(optim).items()
    if inspect.isclass(kind) and issubclass(kind, optim.Optimizer) and kind is not optim.Optimizer
)
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "SGD": [{}, {"momentum": 0.9, "nesterov": True}],
    "Adam": [{}, {"amsgrad": True, "fused": True}, {"lr": torch.tensor(0.01), "foreach": False}],
    "RMSprop": [{"momentum": 0.9, "centered": True}],
    "Adagrad": [{}, {"fused": True}],
}
WORKING = [
    pytest.param(name, options, id=f"{name}{number}")
    for name in ALL
    if name not in REFUSED
    for number, options in enumerate(OPTIONS.get(name, [{}]))
]


def make(name: str, options: dict[str, Any], schedule: Any = None) -> TorchModel:
    torch.manual_seed(0)
    bias = name != "Muon"
    module = nn.Sequential(nn.Linear(6, 5, bias=bias), nn.Tanh(), nn.Linear(5, 3, bias=bias))
    made = partial(getattr(optim, name), **options)
    return TorchModel(
        module,
        functional.cross_entropy,
        made,
        scheduler=schedule,
        scheduler_interval=None if schedule is None else "step",
    )


def bound(model: TorchModel, params: Any = None) -> np.ndarray:
    params = model.initial() if params is None else params.copy()
    model.bind(params)
    return params


def pass_through_json(state: Any) -> Any:
    """Return a state as from a file or socket: arrays, and numbers that passed through JSON."""
    arrays = {name: v.copy() for name, v in state.items() if isinstance(v, np.ndarray)}
    numbers = {name: v for name, v in state.items() if name not in arrays}
    return arrays | json.loads(json.dumps(numbers))


def test_torch_has_expected_optimizers() -> None:
    assert {"Adam", "AdamW", "Adafactor", "Muon", "SGD", *REFUSED} <= set(ALL)


@pytest.mark.parametrize(("name", "options"), WORKING)
def test_optimizer_steps_in_place_and_continues_from_loaded_state(name: str, options: Any) -> None:
    """A model with another's pickle, parameters and state takes the same steps as one alone."""
    alone, first = make(name, options), make(name, options)
    straight = bound(alone)
    for _ in range(6):
        alone.step(BATCH)
    params = bound(first)
    for _ in range(3):
        first.step(BATCH)
    assert (params != first.initial()).mean() > 0.9
    second = pickle.loads(pickle.dumps(first))
    elsewhere = bound(second, params)
    second.load_updater_state(pass_through_json(first.updater_state()))
    for _ in range(3):
        second.step(BATCH)
    np.testing.assert_array_equal(elsewhere, straight)
    state, again = second.updater_state(), alone.updater_state()
    assert sorted(state) == sorted(again)
    for key, value in again.items():
        np.testing.assert_array_equal(state[key], value)


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_optimizer_is_refused_by_name(name: str) -> None:
    with pytest.raises(UsageError, match=f"optimizer {name} cannot be used: .*{REFUSED[name]}"):
        make(name, {})


def test_muon_refuses_parameters_that_are_no_matrices() -> None:
    torch.manual_seed(0)
    with pytest.raises(UsageError, match="Muon trains matrices only"):
        TorchModel(nn.Linear(3, 3), functional.mse_loss, optim.Muon)


SCHEDULES = {
    "lambda": partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
    "step": partial(lr_scheduler.StepLR, step_size=2),
    "milestones": partial(lr_scheduler.MultiStepLR, milestones=[2, 4, 4]),
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.5, total_steps=20),
    "restarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=4),
    "plateau": partial(lr_scheduler.ReduceLROnPlateau, patience=1, mode="max"),  # the loss falls
    "sequence": lambda made: lr_scheduler.SequentialLR(
        made, [lr_scheduler.ConstantLR(made), lr_scheduler.CosineAnnealingLR(made, 9)], [4]
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_continues_from_loaded_state(name: str) -> None:
    """A model that loads another's state has the rates of one that trains alone."""
    options = {"lr": 0.1, "momentum": 0.9}
    alone, first, second = (make("SGD", options, SCHEDULES[name]) for _ in range(3))
    straight = bound(alone)
    rates = []
    for _ in range(8):
        alone.step(BATCH)
        rates.append(alone.updater_state()["groups/0/lr"])
    assert len(set(rates[2:])) > 1  # the rate changes after the move, too
    params = bound(first)
    for _ in range(3):
        first.step(BATCH)
    elsewhere = bound(second, params)
    second.load_updater_state(pass_through_json(first.updater_state()))
    for rate in rates[3:]:
        second.step(BATCH)
        assert second.updater_state()["groups/0/lr"] == rate
    np.testing.assert_array_equal(elsewhere, straight)


def test_state_of_another_optimizer_is_refused() -> None:
    model = make("Adam", {})
    bound(model)
    model.step(BATCH)
    state = model.updater_state()
    with pytest.raises(UsageError, match="which this SGD does not"):
        make("SGD", {}).load_updater_state(state)


def test_optimizer_state_is_arrays_and_plain_numbers() -> None:
    model = make("Adam", {})
    bound(model)
    model.step(BATCH)
    state = model.updater_state()
    assert state["state/0.weight/step:float32"] == 1.0
    assert isinstance(state["state/0.weight/exp_avg"], np.ndarray)
    assert state["groups/0/betas/1"] == 0.999
    for value in state.values():
        assert isinstance(value, np.ndarray | bool | int | float)
        assert not (isinstance(value, float) and math.isnan(value))


def test_sparse_momentum_is_part_of_optimizer_state() -> None:
    """Its momentum, which torch keeps as a sparse tensor, is part of the state."""
    module = nn.Sequential(nn.Embedding(50, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))
    model = TorchModel(module, functional.cross_entropy, partial(optim.SGD, lr=0.1, momentum=0.9))
    other, batch = pickle.loads(pickle.dumps(model)), Batch(np.array([[1, 7]]), np.array([2]))
    params = bound(model)
    model.step(batch)
    theirs = params.copy()
    other.bind(theirs)
    other.load_updater_state(model.updater_state())
    for each in (model, other):
        each.step(Batch(np.array([[3, 7]]), np.array([0])))
    np.testing.assert_array_equal(theirs, params)


def test_sparse_gradients_change_only_rows_of_minibatch() -> None:
    """A step with sparse gradients changes only the rows of the minibatch's words."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(50, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))
    model = TorchModel(module, functional.cross_entropy, partial(optim.SGD, lr=0.1))
    params = bound(model)
    words = np.array([[1, 7], [7, 30]])
    model.step(Batch(words, np.array([0, 2])))
    moved = np.flatnonzero((params != model.initial())[:200].reshape(50, 4).any(axis=1))
    assert moved.tolist() == [1, 7, 30]


class Wrapped(optim.Optimizer):  # type: ignore[misc]
    """An optimizer that lets another one step, as Lookahead does."""

    def __init__(self, parameters: Any, inner: Any, *, as_list: bool = False) -> None:
        made = inner(parameters)
        super().__init__(made.param_groups, {})
        self.inner = [made] if as_list else made

    def step(self, closure: Any = None) -> Any:
        for one in self.inner if isinstance(self.inner, list) else [self.inner]:
            one.step()


@pytest.mark.parametrize("as_list", [False, True])
def test_state_inside_a_wrapped_optimizer_is_not_lost_in_silence(as_list: bool) -> None:
    """It is neither saved nor sent; before, nothing said so."""
    model = make("SGD", {})
    inner = partial(optim.SGD, lr=0.1, momentum=0.9)
    wrapped = TorchModel(
        model.module, functional.cross_entropy, partial(Wrapped, inner=inner, as_list=as_list)
    )
    bound(wrapped)
    wrapped.updater_state()  # there is nothing to lose yet
    wrapped.step(BATCH)
    with pytest.warns(UserWarning, match=r"optimizer Wrapped contains SGD, whose state, such as"):
        wrapped.updater_state()


def test_a_wrapped_optimizer_without_state_loses_none() -> None:
    model = make("SGD", {})
    plain = partial(Wrapped, inner=partial(optim.SGD, lr=0.1))
    wrapped = TorchModel(model.module, functional.cross_entropy, plain)
    bound(wrapped)
    wrapped.step(BATCH)
    wrapped.updater_state()


class Passing(Wrapped):
    """An optimizer whose state is that of the one inside, as Accelerate's and timm's are."""

    @property
    def state(self) -> Any:
        return self.inner.state if "inner" in vars(self) else {}

    @state.setter
    def state(self, state: Any) -> None:
        pass

    def load_state_dict(self, state: Any) -> None:
        self.inner.load_state_dict(state)


def test_state_that_a_wrapper_passes_on_is_not_called_lost() -> None:
    """It is saved and restored. Before, the warning said that it is not."""
    inner = partial(optim.SGD, lr=0.1, momentum=0.9)
    models = [
        TorchModel(make("SGD", {}).module, functional.cross_entropy, partial(Passing, inner=inner))
        for _ in range(2)
    ]
    for model in models:
        bound(model)
    models[0].step(BATCH)
    state = models[0].updater_state()
    moments = {key: value for key, value in state.items() if key.endswith("momentum_buffer")}
    assert moments
    models[1].load_updater_state(state)
    restored = models[1].updater_state()
    for key, value in moments.items():
        np.testing.assert_array_equal(restored[key], value)


@pytest.mark.parametrize("wrap", [list, lambda made: {"first": made[0]}])
def test_inner_state_may_be_tensors_of_no_parameter(wrap: Any) -> None:
    """Before, saving such a state raised "Boolean value of Tensor ... is ambiguous"."""

    def make_wrapped(parameters: Any) -> Any:
        made = Wrapped(parameters, partial(optim.SGD, lr=0.1))
        made.inner.state["scale"] = torch.ones(2)
        made.others = wrap([made.inner])
        made.inner = None
        return made

    model = TorchModel(make("SGD", {}).module, functional.cross_entropy, make_wrapped)
    bound(model)
    with pytest.warns(UserWarning, match="optimizer Wrapped contains SGD, whose state"):
        model.updater_state()
