"""LightningModel: a LightningModule's own steps and optimizer, trained on one flat vector."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

from sparkstrom.base.errors import UsageError
from sparkstrom.models.base import Batch, Columns, rows_of
from sparkstrom.models.lightning.module_hooks import (
    arguments,
    check_module,
    has_own,
    lightning_parts,
    metrics_of,
    need_validation,
)
from sparkstrom.models.lightning.optimization import configured
from sparkstrom.models.lightning.stand_in import (
    CONFIGURING,
    PREDICTING,
    TRAINING,
    VALIDATING,
    StandIn,
)
from sparkstrom.models.torch.flat_module import FlatModule, Updater
from sparkstrom.models.torch.optimizer_options import check_options, device_name
from sparkstrom.models.torch.optimizers import check_optimizer, stepped, with_gradients
from sparkstrom.models.torch.tensors import (
    TorchBatch,
    batch_to,
    check_rows,
    explained,
    features_to,
    outputs_of,
)
from sparkstrom.models.torch.torch_losses import outputs_kind
from sparkstrom.models.torch.travel import refuse_holders, without_storage

FromColumns = Callable[[TorchBatch], Any]

STEP_FITS = (
    "it gets (features, labels), one dict of both where both are dicts, or the features alone"
    " where label=None; name the columns so in fit, or pass LightningModel(module, batch=...)"
)
NO_WEIGHTS = (
    "rows have weights, but a training_step takes none: pass LightningModel(module, batch=...),"
    " which gets them, and let training_step return sum(weights * losses) / sum(weights)"
)


class LightningModel(FlatModule):
    """A LightningModule behind the flat-parameter protocol, with automatic optimization.

    ``training_step``, ``configure_optimizers`` and the hooks around a step are the module's own;
    ``validation_step`` measures held-out rows by what it logs as ``monitor``, a mean over rows of
    which less is better; ``predict_step``, or else ``forward``, predicts. ``batch`` makes what the
    steps get of a ``TorchBatch``; by default (features, labels), one dict where both are dicts, and
    the features alone where there are no labels. ``clip_norm`` is Trainer's ``gradient_clip_val``,
    ``autocast="bfloat16"`` its ``precision="bf16-mixed"``, ``device`` as for TorchModel.
    ``outputs`` says what predictions are, for metrics: logits, probabilities or values.
    Raise UsageError, by name, for what of a module would not be done here.
    """

    KIND = "lightning"
    OPTIONS = (
        *("_make_batch", "_monitor", "_device_wanted", "_clip_norm"),
        *("_autocast", "_outputs_kind"),
    )

    def __init__(
        self,
        module: Any,
        *,
        batch: FromColumns | None = None,
        monitor: str = "val_loss",
        device: str | None = None,
        clip_norm: float | None = None,
        autocast: str | None = None,
        outputs: str = "logits",
    ) -> None:
        check_module(module)
        module.configure_model()
        self._make_batch, self._monitor = batch, monitor
        self._device_wanted, self._clip_norm = device_name(device), clip_norm
        self._autocast, self._outputs_kind = autocast, outputs_kind(outputs, None)
        check_options(print, None, clip_norm, 1, autocast)
        refuse_holders(module, batch=batch)
        self._begin(module)
        self._make_updater()
        without_storage(module, self._named)

    def _said(self) -> dict[str, str]:
        """The module's hyperparameters, and its learning rate if it has one by a usual name."""
        known = {name: getattr(self._module, name, None) for name in ("lr", "learning_rate")}
        known |= dict(getattr(self._module, "hparams", {}))
        return {k: repr(v) for k, v in known.items() if isinstance(v, str | int | float | bool)}

    def _set_up(self, module: Any) -> None:
        super()._set_up(module)
        self._trainer = StandIn()
        self._epoch_begun: int | None = None
        self._measured = 0  # minibatches since the last step

    def bind(self, params: Any) -> None:
        """Work on f32[n_params] of the host or its own device; the optimizer's state stays."""
        super().bind(params)
        for part in lightning_parts(self._module):
            part._device = self._device
        for metric in metrics_of(self._module):
            metric.to(self._device)

    # -- training --------------------------------------------------------------------------------

    def stand_at(self, epoch: int, batch: int, batches: int) -> None:
        """The next step is on this minibatch of so many of the worker's epoch, from 0."""
        self._trainer.current_epoch = self._pacing.epoch = epoch
        self._trainer.batch, self._trainer.num_training_batches = batch, batches

    def keep_pace(self, workers: int, minibatches: int, counted: int) -> None:
        """Momentum counts the minibatches of so many workers; the scheduler is where the fit is."""
        super().keep_pace(workers, minibatches, counted)
        self._trainer.global_step = minibatches

    def _make_updater(self) -> Updater:
        with self._trainer.attached(self._module, CONFIGURING):
            answer = self._module.configure_optimizers()
        optimizer, scheduler = configured(answer, self._pacing)
        check_optimizer(optimizer, self._named)
        return optimizer, scheduler

    def _train(self, optimizer: Optimizer, batch: TorchBatch, rows: int) -> torch.Tensor:
        """Lightning's order of hooks, with the optimizer's own step."""
        module: Any = self._module
        trainer, self._measured = self._trainer, 0
        with trainer.attached(module, TRAINING):
            self._begin_epoch()
            given, index = self._given(batch), trainer.batch
            if module.on_train_batch_start(given, index) == -1:
                raise UsageError(
                    f"{type(module).__name__}.on_train_batch_start returned -1: an epoch cannot be"
                    " skipped here, each minibatch is trained once; leave the rows out of the data"
                )
            loss, outputs = self._training_loss(given, index)
            module.on_before_zero_grad(optimizer)
            optimizer.zero_grad()
            module.on_before_backward(loss)
            module.backward(loss)
            module.on_after_backward()
            module.on_before_optimizer_step(optimizer)
            stepped(optimizer, with_gradients(self._named, self._clip_norm))
            trainer.global_step += 1
            module.on_train_batch_end(outputs, given, index)
            if trainer.is_last_batch:
                module.on_train_epoch_end()
            trainer.batch += 1
        return loss.detach()

    def _begin_epoch(self) -> None:
        module: Any = self._module
        if self._epoch_begun is None:
            module.on_train_start()
        if self._epoch_begun != self._trainer.current_epoch:
            self._epoch_begun = self._trainer.current_epoch
            self._reset_metrics()
            module.on_train_epoch_start()

    def _training_loss(self, given: Any, index: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """The loss, and what on_train_batch_end gets."""
        step = self._module.training_step
        with explained(step.__qualname__, STEP_FITS, batch=given), self._precision():
            answer = step(*arguments(step, given, index))
        loss = answer.get("loss") if isinstance(answer, dict) else answer
        if not (isinstance(loss, torch.Tensor) and loss.numel() == 1):
            raise UsageError(
                f"{step.__qualname__} returned {_kind_of(answer)}: it must return the loss, the"
                " mean over rows, or a dict with it as `loss`; no minibatch is skipped here"
            )
        rest = answer if isinstance(answer, dict) else {}
        return loss, {**rest, "loss": loss.detach()}

    # -- measuring and predicting ----------------------------------------------------------------

    def need_loss(self) -> None:
        """Raise UsageError where held-out rows could not be measured."""
        need_validation(self._module)

    def loss(self, batch: Batch) -> tuple[float, float]:
        """(sum over rows of what validation_step logs as ``monitor``, rows); nothing changes."""
        self.need_loss()
        given, step = self._given(batch_to(self._device, batch)), self._module.validation_step
        with (
            self._evaluating(),
            self._trainer.attached(self._module, VALIDATING),
            explained(step.__qualname__, STEP_FITS, batch=given),
            self._precision(),
        ):
            answer = step(*arguments(step, given, self._measured))
        self._measured += 1
        self._reset_metrics()
        value = self._trainer.logged_number(self._monitor)
        if value is None:
            logged = ", ".join(self._trainer.logged) or "nothing"
            raise UsageError(
                f"{step.__qualname__} logs {logged}, but not {self._monitor!r}: log it with"
                f" self.log({self._monitor!r}, loss), or pass LightningModel(module, monitor=...);"
                f" it returned {_kind_of(answer)}"
            )
        return value * batch.rows, float(batch.rows)

    def check(self, features: Columns, labels: Columns) -> None:
        """Raise UsageError naming row and value where rows are no finite numbers."""
        rows = rows_of(features)
        check_rows(features, rows, "features")
        check_rows(labels, rows, "labels")

    def _outputs(self, features: Columns) -> Any:
        module, given = self._module, features_to(self._device, features)
        if not has_own(module, "predict_step") and not has_own(module, "forward"):
            raise UsageError(
                f"{type(module).__name__} has neither predict_step nor forward: write one of them"
                " to predict"
            )
        with self._trainer.attached(module, PREDICTING), self._precision():
            if not has_own(module, "predict_step"):
                return outputs_of(self._called(given))
            step = module.predict_step
            with explained(step.__qualname__, STEP_FITS, batch=given):
                return outputs_of(step(*arguments(step, given, 0)))

    # -- inside ----------------------------------------------------------------------------------

    def _given(self, batch: TorchBatch) -> Any:
        """What the steps get, through the module's own hooks."""
        if self._make_batch is not None:
            given = self._make_batch(batch)
        elif batch.weights is not None:
            raise UsageError(NO_WEIGHTS)
        else:
            given = plain_batch(batch)
        module: Any = self._module
        return module.on_after_batch_transfer(module.on_before_batch_transfer(given, 0), 0)

    def _reset_metrics(self) -> None:
        for metric in metrics_of(self._module):
            metric.reset()


def plain_batch(batch: TorchBatch) -> Any:
    """(features, labels); one dict where both are dicts; the features where there are no labels."""
    features, labels = batch.features, batch.labels
    if isinstance(labels, tuple) and not labels:
        return features
    if not (isinstance(features, dict) and isinstance(labels, dict)):
        return features, labels
    if both := sorted(set(features) & set(labels)):
        raise UsageError(f"{', '.join(both)} among features and labels: give them other names")
    return {**features, **labels}


def _kind_of(answer: Any) -> str:
    if isinstance(answer, torch.Tensor):
        return f"a tensor {list(answer.shape)}"
    if isinstance(answer, dict):
        return f"a dict of {sorted(map(str, answer))}"
    return "nothing" if answer is None else f"a {type(answer).__name__}"
