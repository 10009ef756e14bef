"""Tests that LightningModel refuses by name what it would not run, before any work starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sparkstrom.base.errors import UsageError
from sparkstrom.models.base import Batch

torch = pytest.importorskip(
    "torch", reason="torch is not here: the tests pin it for CPython 3.11, whose build is CPU only"
)
pl = pytest.importorskip("pytorch_lightning", reason="pip install 'sparkstrom[lightning]'")
from torch import nn, optim  # noqa: E402
from torch.nn import functional  # noqa: E402

from sparkstrom.models.lightning import LightningModel  # noqa: E402
from sparkstrom.models.lightning.model import (  # noqa: E402
    REFUSED_HOOKS,
    REFUSED_VALIDATION_HOOKS,
    find_lightning_base,
)

ROWS, CLASSES = np.ones((4, 2), np.float32), np.array([0, 1, 0, 1])


class Net(pl.LightningModule):
    """A module that LightningModel accepts."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Any) -> Any:
        return self.layer(x)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return optim.SGD(self.parameters(), lr=0.1)


def make_module_with(**methods: Any) -> Net:
    """Return a module with these methods."""
    return type("Odd", (Net,), methods)()


def manual() -> Net:
    """Return a module with manual optimization."""
    net = Net()
    net.automatic_optimization = False
    return net


def averaged() -> Net:
    """Return a module with an averaged copy of a layer."""
    net = Net()
    net.ema = optim.swa_utils.AveragedModel(net.layer)
    return net


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: nn.Linear(2, 2), "module is a Linear: pass a LightningModule"),
        (lambda: 3, "module is a int: pass a LightningModule"),
        (manual, r"automatic_optimization is False.*TorchModel\(module, None, optimizer, step="),
        (averaged, "ema is an AveragedModel"),
        (
            lambda: make_module_with(training_step=pl.LightningModule.training_step),
            "no training_step",
        ),
        (
            lambda: make_module_with(configure_optimizers=pl.LightningModule.configure_optimizers),
            "no configure_optimizers",
        ),
        (lambda: make_module_with(training_step=lambda self: 0), "must be .batch, batch_idx."),
        (
            lambda: make_module_with(training_step=lambda self, dataloader_iter: 0),
            "takes a dataloader_iter",
        ),
        (
            lambda: make_module_with(validation_step=lambda self, a, b, c: 0),
            "missing a required argument",
        ),
    ],
)
def test_unsuitable_module_is_refused(make: Callable[[], Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        LightningModel(make())


@pytest.mark.parametrize("name", sorted(REFUSED_HOOKS))
def test_module_with_hook_that_is_not_called_is_refused(name: str) -> None:
    """A module that overrides a hook which is not run here is refused."""
    with pytest.raises(UsageError, match=rf"Odd\.{name} would not be called here: "):
        LightningModel(make_module_with(**{name: lambda self, *given: None}))


@pytest.mark.parametrize("name", REFUSED_VALIDATION_HOOKS)
def test_validation_hook_that_is_not_called_is_refused(name: str) -> None:
    """A module that overrides a validation hook is refused only if rows are held out."""
    step: Any = {"validation_step": lambda self, batch, index: None}
    model = LightningModel(make_module_with(**{name: lambda self, *given: None}, **step))
    with pytest.raises(UsageError, match=rf"Odd\.{name} would not be called here: "):
        model.need_loss()


def test_every_lightning_hook_is_called_refused_or_about_data() -> None:
    called = {
        *("configure_model", "on_train_start", "on_train_epoch_start", "on_train_epoch_end"),
        *("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad"),
        *("on_before_backward", "on_after_backward", "on_before_optimizer_step"),
        *("on_before_batch_transfer", "on_after_batch_transfer"),
    }
    data = {"prepare_data", *(f"{what}_dataloader" for what in ("train", "val", "predict"))}
    hooks = {
        name
        for kind in find_lightning_base(Net()).__mro__  # type: ignore[union-attr]
        if kind.__module__ == "pytorch_lightning.core.hooks"
        for name in vars(kind)
        if not name.startswith("_") and "test" not in name
    }
    left = hooks - called - set(REFUSED_HOOKS) - set(REFUSED_VALIDATION_HOOKS)
    assert left == data, "rows come from fit's data; nothing tests here"


def two(self: Any) -> Any:
    return [optim.SGD(self.parameters(), lr=0.1), optim.SGD(self.parameters(), lr=0.1)]


def with_scheduler(**options: Any) -> Callable[[Any], Any]:
    def configure(self: Any) -> Any:
        made = optim.SGD(self.parameters(), lr=0.1)
        scheduler = {"scheduler": optim.lr_scheduler.StepLR(made, 1)} | options
        return {"optimizer": made, "lr_scheduler": scheduler}

    return configure


def plateau(self: Any) -> Any:
    made = optim.SGD(self.parameters(), lr=0.1)
    return [made], [optim.lr_scheduler.ReduceLROnPlateau(made)]


def two_schedulers(self: Any) -> Any:
    made = optim.SGD(self.parameters(), lr=0.1)
    return [made], [optim.lr_scheduler.StepLR(made, 1), optim.lr_scheduler.StepLR(made, 1)]


@pytest.mark.parametrize(
    ("configure", "why"),
    [
        (two, "returned SGD, SGD: .*return one optimizer"),
        (lambda self: None, "returned nothing: "),
        (lambda self: [3], "returned int: "),
        (lambda self: {"opt": 3}, r"dict of \['opt'\]: it must have optimizer"),
        (lambda self: optim.LBFGS(self.parameters()), "LBFGS cannot be used"),
        (lambda self: optim.SGD([self.layer.weight], lr=1), "leaves out layer.bias"),
        (lambda self: self.trainer.max_epochs, "self.trainer.max_epochs: no Trainer runs"),
        (plateau, "ReduceLROnPlateau, but a metric of all workers"),
        (two_schedulers, "returned 2 schedulers: combine them"),
        (with_scheduler(interval="batch"), "interval='batch': it must be step or epoch"),
        (with_scheduler(frequency=0), "frequency=0: it must be 1 or above"),
        (with_scheduler(scheduler=7), "lr_scheduler is a int"),
        (with_scheduler(each=2), "lr_scheduler has each: it may have scheduler, interval"),
    ],
)
def test_unsuitable_configure_optimizers_is_refused(
    configure: Callable[[Any], Any], why: str
) -> None:
    with pytest.raises(UsageError, match=why):
        LightningModel(make_module_with(configure_optimizers=configure))


def test_one_optimizer_in_a_list_is_accepted() -> None:
    one = {"optimizer": None}

    def listed(self: Any) -> Any:
        one["optimizer"] = optim.SGD(self.parameters(), lr=0.1)
        return [dict(one)]

    assert LightningModel(make_module_with(configure_optimizers=listed)).n_params == 6


def test_batch_function_that_holds_module_is_refused() -> None:
    net = Net()
    with pytest.raises(UsageError, match=r"batch holds the module itself \((layer\.weight|Net)"):
        LightningModel(net, batch=lambda batch: net(batch.features))


# -- refusals at the first step --------------------------------------------------------------------


def take_step(net: Any, labels: Any = CLASSES) -> None:
    """Take a step."""
    model = LightningModel(net)
    model.bind(model.initial())
    model.step(Batch(ROWS, labels))


def raise_user_error(self: Any, batch: Any, index: int) -> Any:
    raise ValueError("the tide is out")


@pytest.mark.parametrize(
    ("step", "why"),
    [
        (lambda self, batch, index: None, "returned nothing: it must return the loss"),
        (lambda self, batch, index: self(batch[0]), r"returned a tensor \[4, 2\]: it must"),
        (lambda self, batch, index: {"x": 1}, r"returned a dict of \['x'\]"),
        (lambda self, batch, index: self(batch), r"failed for batch \(float32\[4, 2\], int64\[4\]"),
        (lambda self, batch, index: self.optimizers(), "trainer.strategy.*automatic optimization"),
        (lambda self, batch, index: self.trainer.datamodule, r"rows come from fit\(data\)"),
    ],
)
def test_unsuitable_training_step_is_refused(step: Callable[..., Any], why: str) -> None:
    """A training_step with a different result than a loss, or a need for a Trainer, is refused."""
    with pytest.raises(UsageError, match=why):
        take_step(make_module_with(training_step=step))


def test_batch_start_hook_that_skips_batch_is_refused() -> None:
    with pytest.raises(UsageError, match="on_train_batch_start returned -1"):
        take_step(make_module_with(on_train_batch_start=lambda self, batch, index: -1))


def test_user_exception_in_training_step_is_unchanged() -> None:
    with pytest.raises(ValueError, match=r"^the tide is out$"):
        take_step(make_module_with(training_step=raise_user_error))


def test_label_outside_classes_is_refused_with_row_number() -> None:
    with pytest.raises(UsageError, match=r"labels must be 0 to C.*row 2 of this minibatch has 7"):
        take_step(Net(), np.array([0, 1, 7, 1]))


def test_predict_needs_predict_step_or_forward() -> None:
    """predict() is refused for a module with neither predict_step nor forward."""
    model = LightningModel(make_module_with(forward=pl.LightningModule.forward))
    model.bind(model.initial())
    with pytest.raises(UsageError, match="neither predict_step nor forward"):
        model.predict(ROWS)
