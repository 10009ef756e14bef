"""Tests that a TorchModel's schedulers step by epochs or minibatches, as in plain torch's loops."""

from __future__ import annotations

import copy
import pickle
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.models.base import Batch, EpochAware, FitLength, FitLengthAware, Share
from sparkstrom.rounds.worker_round import RoundBatch, RoundPace, RoundStart, train_locally

torch = pytest.importorskip(
    "torch", reason="torch is not here: the tests pin it for CPython 3.11, whose build is CPU only"
)
from torch import nn, optim  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.optim import lr_scheduler  # noqa: E402

from sparkstrom.models.torch import TorchModel  # noqa: E402
from sparkstrom.models.torch.optimizers import takes_total_steps  # noqa: E402

EPOCHS, BATCHES = 5, 7
CHANCE = np.random.default_rng(0)
ROWS = [
    Batch(CHANCE.normal(size=(16, 6)).astype(np.float32), CHANCE.integers(0, 3, 16))
    for _ in range(BATCHES)
]
SGD = partial(optim.SGD, lr=0.1, momentum=0.9)
WARM_UP = partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: min(1.0, (step + 1) / 20))


def warm_and_cosine(made: Any) -> Any:
    parts = [
        lr_scheduler.LinearLR(made, 0.1, total_iters=2),
        lr_scheduler.CosineAnnealingLR(made, 4),
    ]
    return lr_scheduler.SequentialLR(made, parts, [2])


def both_chained(made: Any) -> Any:
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.StepLR(made, 2), lr_scheduler.ExponentialLR(made, 0.7)]
    )


def chained_steps(made: Any) -> Any:
    return lr_scheduler.ChainedScheduler([WARM_UP(made)])


def warm_and_halved(made: Any) -> Any:
    return lr_scheduler.SequentialLR(made, [WARM_UP(made), lr_scheduler.StepLR(made, 2)], [3])


BY_EPOCHS = {
    "StepLR": partial(lr_scheduler.StepLR, step_size=2),
    "MultiStepLR": partial(lr_scheduler.MultiStepLR, milestones=[1, 3]),
    "ExponentialLR": partial(lr_scheduler.ExponentialLR, gamma=0.5),
    "CosineAnnealingLR": partial(lr_scheduler.CosineAnnealingLR, T_max=EPOCHS),
    "PolynomialLR": partial(lr_scheduler.PolynomialLR, total_iters=EPOCHS),
    "MultiplicativeLR": partial(lr_scheduler.MultiplicativeLR, lr_lambda=lambda _: 0.5),
    "ChainedScheduler": both_chained,
}
BY_STEPS = {
    "OneCycleLR": partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=EPOCHS * BATCHES),
    "CyclicLR": partial(lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=4),
    "CosineAnnealingWarmRestarts": partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=4),
    "LambdaLR": WARM_UP,
    "LinearLR": partial(lr_scheduler.LinearLR, total_iters=3),
    "ConstantLR": partial(lr_scheduler.ConstantLR, total_iters=3),
    "ChainedScheduler": chained_steps,
}
CASES = [
    *(pytest.param(one, None, "epoch", id=f"{name} by default") for name, one in BY_EPOCHS.items()),
    *(pytest.param(one, None, "step", id=f"{name} by default") for name, one in BY_STEPS.items()),
    *(pytest.param(BY_EPOCHS[name], "step", "step", id=f"{name} by steps")
      for name in ("StepLR", "CosineAnnealingLR", "ChainedScheduler")),
    *(pytest.param(one, "epoch", "epoch", id=f"{name} by epochs")
      for name, one in BY_STEPS.items()),
    pytest.param(warm_and_cosine, "epoch", "epoch", id="SequentialLR by epochs"),
    pytest.param(warm_and_halved, "epoch", "epoch", id="different parts by epochs"),
    pytest.param(warm_and_halved, "step", "step", id="different parts by steps"),
]  # fmt: skip


def module_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def made(schedule: Any, interval: str | None = None, optimizer: Any = SGD) -> TorchModel:
    return TorchModel(
        module_of(),
        functional.cross_entropy,
        optimizer,
        scheduler=schedule,
        scheduler_interval=interval,
    )


def plain_torch(schedule: Any, interval: str) -> tuple[np.ndarray, list[float]]:
    """Return the parameters and the learning rates of a plain loop in torch."""
    module, rates = module_of(), []
    optimizer = SGD(module.parameters())
    scheduler = schedule(optimizer)
    for _ in range(EPOCHS):
        for batch in ROWS:
            optimizer.zero_grad()
            output = module(torch.from_numpy(batch.features))
            functional.cross_entropy(output, torch.from_numpy(batch.labels)).backward()
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if interval == "step":
                scheduler.step()
        if interval == "epoch":
            scheduler.step()
    return np.concatenate([p.detach().numpy().reshape(-1) for p in module.parameters()]), rates


def record_rates(model: TorchModel) -> list[float]:
    """Return a list to which each step of the model adds its learning rate."""
    rates: list[float] = []
    model._get_optimizer()[0].register_step_pre_hook(
        lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"])
    )
    return rates


@pytest.mark.parametrize("fit_tells", [True, False])
@pytest.mark.parametrize(("schedule", "interval", "meant"), CASES)
def test_rates_and_parameters_equal_plain_torch_loop(
    schedule: Any, interval: str | None, meant: str, fit_tells: bool
) -> None:
    """Rates and parameters equal a plain loop's, with keep_pace and without."""
    wanted, wanted_rates = plain_torch(schedule, meant)
    model = made(schedule, interval)
    params = model.initial()
    model.bind(params)
    rates = record_rates(model)
    assert isinstance(model, EpochAware)
    for done in range(EPOCHS * BATCHES):
        epoch, index = divmod(done, BATCHES)
        model.set_position(epoch, index, BATCHES)
        if fit_tells:
            model.keep_pace(1, done, done)
        model.step(ROWS[index])
    assert rates == pytest.approx(wanted_rates)
    np.testing.assert_allclose(params, wanted, rtol=1e-5, atol=1e-6)
    told = "steps by epochs" if meant == "epoch" else "steps by the fit's minibatches"
    assert model.horizons(2)["scheduler"] == told


@pytest.mark.parametrize(
    "schedule",
    [BY_EPOCHS["StepLR"], BY_EPOCHS["CosineAnnealingLR"], both_chained, warm_and_cosine],
    ids=["StepLR", "CosineAnnealingLR", "ChainedScheduler", "SequentialLR"],
)
def test_schedule_by_epochs_continues_across_averaging_rounds(schedule: Any) -> None:
    """Each round has a new worker, which continues from the state of the round before."""
    wanted, _ = plain_torch(schedule, "epoch")
    model = made(schedule, "epoch")
    params, state, done = model.initial(), copy.deepcopy(model).updater_state(), 0
    while done < EPOCHS * BATCHES:
        epoch, first = divmod(done, BATCHES)
        count = min(3, BATCHES - first)
        turns = [RoundBatch(ROWS[first + n], (epoch, first + n, BATCHES)) for n in range(count)]
        worker = pickle.loads(pickle.dumps(made(schedule, "epoch")))
        alone = train_locally(worker, RoundStart(params, b"", state, done), turns)
        params, state, done = alone.parameters, alone.updater, done + count
    np.testing.assert_allclose(params, wanted, rtol=1e-5, atol=1e-6)


def test_schedule_by_epochs_steps_once_per_epoch_of_four_workers() -> None:
    """With four workers, a schedule by epochs steps once per epoch of the fit."""
    model = made(partial(lr_scheduler.StepLR, step_size=1, gamma=0.5))
    model.bind(model.initial())
    rates = record_rates(model)
    for epoch, minibatches in ((0, 0), (0, 4), (1, 8), (1, 12), (2, 16)):
        model.set_position(epoch, (minibatches // 4) % 2, 2)
        model.keep_pace(4, minibatches, minibatches)
        model.step(ROWS[0])
    assert rates == pytest.approx([0.1, 0.1, 0.05, 0.05, 0.025])


def test_schedule_by_epochs_continues_in_next_fit_even_without_state() -> None:
    """The next fit has the rate of its epoch number, even if the state is not loaded."""
    schedule = partial(lr_scheduler.StepLR, step_size=2, gamma=0.5)
    first, next_one, fresh = made(schedule), made(schedule), made(schedule)
    for model, epochs in ((first, (0, 1, 2)), (next_one, (3, 4)), (fresh, (3, 4))):
        model.bind(model.initial())
        if model is next_one:
            next_one.load_updater_state(first.updater_state())
        rates = record_rates(model)
        for epoch in epochs:
            model.set_position(epoch, 0, 1)
            model.step(ROWS[0])
        if model is not first:
            assert rates == pytest.approx([0.05, 0.025])


def test_scheduler_interval_survives_pickling() -> None:
    for interval in ("epoch", "step"):
        twin = pickle.loads(pickle.dumps(made(BY_EPOCHS["StepLR"], interval)))
        assert ("epochs" in twin.horizons(2)["scheduler"]) == (interval == "epoch")


def test_too_short_schedule_by_epochs_is_refused() -> None:
    one_cycle = partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=2)
    model = made(one_cycle, "epoch")
    model.bind(model.initial())
    for epoch in range(2):
        model.set_position(epoch, 0, 1)
        model.step(ROWS[0])
    model.set_position(3, 0, 1)
    with pytest.raises(
        UsageError, match=r"OneCycleLR: .*once after each epoch, over all fits: make"
    ):
        model.step(ROWS[0])


# -- warnings --------------------------------------------------------------------------------------


def epoch_of(model: TorchModel, batches: int, workers: int = 1) -> list[str]:
    """Run a worker's first epoch; return the warnings."""
    model.bind(model.initial())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for index in range(batches):
            model.keep_pace(workers, index * workers, index * workers)
            model.set_position(0, index, batches)
            model.step(ROWS[index % BATCHES])
    return [str(one.message) for one in caught]


@pytest.mark.parametrize("workers", [1, 4])
def test_schedule_that_decays_within_first_epoch_warns_once(workers: int) -> None:
    decay = partial(lr_scheduler.LambdaLR, lr_lambda=lambda epoch: 0.5**epoch)
    (warning,) = epoch_of(made(decay), 40 // workers, workers)
    assert warning.startswith("scheduler LambdaLR steps once a minibatch and lets")
    assert "fall by a factor of 5.5e+11" in warning
    assert "scheduler_interval='epoch'" in warning
    assert epoch_of(made(decay, "epoch"), 40) == []


def test_reduce_on_plateau_that_decays_in_first_epoch_warns_once() -> None:
    hasty = partial(lr_scheduler.ReduceLROnPlateau, patience=0, mode="max", threshold=1e9)
    (warning,) = epoch_of(made(hasty), 20)
    assert "has let the learning rate fall from 0.1 to 0.0001 within the first epoch" in warning
    assert "patience" in warning


@pytest.mark.parametrize(
    "schedule",
    [
        partial(lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=40),
        partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: max(0.0, 1 - step / 40)),
        partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=100),
        partial(lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.85**step),  # a factor of 600
        WARM_UP,
        lr_scheduler.ReduceLROnPlateau,
    ],
)
def test_schedule_suited_to_one_epoch_does_not_warn(schedule: Any) -> None:
    assert epoch_of(made(schedule), 40) == []


def test_decay_warning_is_limited_to_first_minibatch_of_fit() -> None:
    """A model that starts after the fit's first minibatch does not warn."""
    decay = partial(lr_scheduler.LambdaLR, lr_lambda=lambda epoch: 0.5**epoch)
    for place in ((1, 0, 40), (0, 3, 40)):
        model = made(decay)
        model.bind(model.initial())
        model.set_position(*place)
        model.step(ROWS[0])  # pytest turns warnings into errors


# -- schedules for the length of a fit -------------------------------------------------------------

ONE_CYCLE = partial(lr_scheduler.OneCycleLR, max_lr=0.1)
LENGTH = FitLength(EPOCHS, EPOCHS * BATCHES)


def cosine(made: Any, total_steps: int) -> Any:
    return lr_scheduler.CosineAnnealingLR(made, total_steps)


def chained_cosine(made: Any, *, total_steps: int) -> Any:
    return lr_scheduler.ChainedScheduler([cosine(made, total_steps)])


FOR_LENGTH: dict[str, tuple[Any, str | None, str]] = {
    "OneCycleLR by default": (ONE_CYCLE, None, "step"),
    "OneCycleLR by epochs": (ONE_CYCLE, "epoch", "epoch"),
    "CosineAnnealingLR by default": (cosine, None, "epoch"),
    "CosineAnnealingLR by steps": (cosine, "step", "step"),
    "ChainedScheduler by steps": (chained_cosine, "step", "step"),
}


def total_of(interval: str) -> int:
    """Return the fit's number of scheduler steps."""
    return EPOCHS if interval == "epoch" else EPOCHS * BATCHES


def rates_of(model: TorchModel, first_epoch: int = 0, before: int | None = 0) -> list[float]:
    """Return the rates of a fit with one worker; ``before`` None: without keep_pace."""
    rates = record_rates(model)
    for done in range(EPOCHS * BATCHES):
        epoch, index = divmod(done, BATCHES)
        model.set_position(first_epoch + epoch, index, BATCHES)
        if before is not None:
            model.keep_pace(1, before + done, before + done)
        model.step(ROWS[index])
    return rates


def bound(schedule: Any, interval: str | None) -> TorchModel:
    """Return an unpickled model, bound to its initial parameters."""
    model: TorchModel = pickle.loads(pickle.dumps(made(schedule, interval)))
    model.bind(made(schedule, interval).initial())
    return model


@pytest.mark.parametrize(
    ("factory", "takes"),
    [
        (ONE_CYCLE, True),
        (cosine, True),
        (lambda made, total_steps: None, True),
        (partial(ONE_CYCLE, total_steps=10), False),
        (partial(ONE_CYCLE, epochs=2, steps_per_epoch=5), False),
        (lambda made, total_steps=10: None, False),
        (partial(lr_scheduler.StepLR, step_size=1), False),
        (None, False),
    ],
)
def test_scheduler_factory_requests_total_steps_by_parameter(factory: Any, takes: bool) -> None:
    """A factory whose parameter ``total_steps`` has no value yet needs it from the fit."""
    assert takes_total_steps(factory) == takes


@pytest.mark.parametrize("fit_tells", [True, False])
@pytest.mark.parametrize("case", FOR_LENGTH)
def test_total_steps_equals_scheduler_steps_of_fit(case: str, fit_tells: bool) -> None:
    schedule, interval, meant = FOR_LENGTH[case]
    wanted, wanted_rates = plain_torch(partial(schedule, total_steps=total_of(meant)), meant)
    model = made(schedule, interval)
    assert isinstance(model, FitLengthAware)
    params = model.initial()
    model.place(Share(threads=1, gpu=None, seed=1))  # its optimizer is made when it is bound
    model.bind(params)
    model.set_fit_length(LENGTH)
    assert rates_of(model, before=0 if fit_tells else None) == pytest.approx(wanted_rates)
    np.testing.assert_allclose(params, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fit_tells", [True, False])
@pytest.mark.parametrize("case", FOR_LENGTH)
def test_schedule_with_total_steps_restarts_in_next_fit(case: str, fit_tells: bool) -> None:
    """The next fit restarts the schedule and keeps momentum, loaded before or after the length."""
    schedule, interval, meant = FOR_LENGTH[case]
    _, wanted_rates = plain_torch(partial(schedule, total_steps=total_of(meant)), meant)
    first = bound(schedule, interval)
    first.set_fit_length(LENGTH)
    rates_of(first)
    left = first.updater_state()
    momentum = [name for name in left if name.endswith("momentum_buffer")]
    assert momentum
    before = EPOCHS * BATCHES
    for early in (True, False):
        second = bound(schedule, interval)
        if early:
            second.load_updater_state(copy.deepcopy(left))
        second.set_fit_length(FitLength(EPOCHS, EPOCHS * BATCHES, EPOCHS, before))
        if not early:
            second.load_updater_state(copy.deepcopy(left))
        taken = second.updater_state()
        for name in momentum:
            np.testing.assert_array_equal(taken[name], left[name])
        told = before if fit_tells else None
        assert rates_of(second, EPOCHS, told) == pytest.approx(wanted_rates)


@pytest.mark.parametrize("case", FOR_LENGTH)
@pytest.mark.parametrize("other", [0, 7])
def test_replacement_worker_continues_schedule_with_total_steps(case: str, other: int) -> None:
    """A worker continues from another's state without keep_pace, by its own length of the fit."""
    schedule, interval, meant = FOR_LENGTH[case]
    total = total_of(meant) + (other if meant == "step" else 0)
    module = module_of()
    optimizer = SGD(module.parameters())
    plain, wanted = schedule(optimizer, total_steps=total), []
    for done in range(EPOCHS * BATCHES):
        wanted.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if meant == "step" or done % BATCHES == BATCHES - 1:
            plain.step()
    half = 2 * BATCHES
    first, second = bound(schedule, interval), bound(schedule, interval)
    first.set_fit_length(LENGTH)
    for done in range(half):
        first.set_position(done // BATCHES, done % BATCHES, BATCHES)
        first.step(ROWS[done % BATCHES])
    second.load_updater_state(first.updater_state())
    second.set_fit_length(FitLength(EPOCHS, EPOCHS * BATCHES + other))
    rates = record_rates(second)
    for done in range(half, EPOCHS * BATCHES):
        second.set_position(done // BATCHES, done % BATCHES, BATCHES)
        second.step(ROWS[done % BATCHES])
    assert rates == pytest.approx(wanted[half:])


def test_workers_beyond_end_of_schedule_keep_last_rate() -> None:
    model = bound(ONE_CYCLE, None)
    model.set_fit_length(FitLength(1, 8))
    rates = record_rates(model)
    for minibatches in (0, 4, 7, 8, 12, 16):
        model.keep_pace(4, minibatches, minibatches)
        model.step(ROWS[0])
    optimizer = SGD(module_of().parameters())
    plain, wanted = ONE_CYCLE(optimizer, total_steps=8), []
    for _ in range(8):
        wanted.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        plain.step()
    assert rates == pytest.approx([wanted[at] for at in (0, 4, 7, 7, 7, 7)])


@pytest.mark.parametrize("fresh", [True, False])
def test_averaging_rounds_follow_schedule_of_whole_fit(fresh: bool) -> None:
    """One of two workers, new in each round, has every other rate, with its last state or none."""
    total = 2 * EPOCHS * BATCHES
    optimizer = SGD(module_of().parameters())
    plain, wanted = ONE_CYCLE(optimizer, total_steps=total), []
    for _ in range(total):
        wanted.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        plain.step()
    rates, done, state = list[float](), 0, bound(ONE_CYCLE, None).updater_state()
    length = FitLength(EPOCHS, total, 3, 50)
    while done < EPOCHS * BATCHES:
        epoch, first = divmod(done, BATCHES)
        count = min(3, BATCHES - first)
        turns = [RoundBatch(ROWS[first + n], (3 + epoch, first + n, BATCHES)) for n in range(count)]
        worker = bound(ONE_CYCLE, None)
        make = worker._make_optimizer

        def watched(make: Any = make) -> Any:
            optimizer, scheduler = make()
            optimizer.register_step_pre_hook(
                lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"])
            )
            return optimizer, scheduler

        worker._make_optimizer = watched  # type: ignore[method-assign]
        pace = RoundPace(50 + 2 * done, 2, 2 * count, length)
        begun = copy.deepcopy(state)
        alone = train_locally(
            worker, RoundStart(made(ONE_CYCLE).initial(), b"", begun, done, pace), turns
        )
        state, done = state if fresh else alone.updater, done + count
    assert rates == pytest.approx(wanted[::2])


def test_failed_scheduler_factory_error_has_total_steps() -> None:
    def warm(made: Any, total_steps: int) -> Any:
        return lr_scheduler.LambdaLR(made, lambda step: step / (total_steps // 100))

    model = made(warm)
    model.set_fit_length(LENGTH)
    with pytest.raises(UsageError, match=r"from the optimizer and total_steps=35: .*division"):
        model.updater_state()


def test_tensor_learning_rate_is_not_shared_by_optimizers() -> None:
    """The schedule that is simulated before the first step must not change the real rate."""
    found = []
    for rate in (0.1, torch.tensor(0.1)):
        made = partial(optim.SGD, lr=rate)
        schedule = partial(lr_scheduler.CosineAnnealingWarmRestarts, T_0=10)
        model = TorchModel(nn.Linear(6, 3), functional.cross_entropy, made, scheduler=schedule)
        params = np.zeros(model.n_params, np.float32)
        model.bind(params)
        model.set_position(0, 0, 15)
        model.step(ROWS[0])
        found.append(params)
    np.testing.assert_allclose(*found, rtol=1e-6)
