"""TorchModel: a user's module, loss and optimizer, trained on one flat vector.

The module's parameters are views of the vector that ``bind`` supplies, so the optimizer steps in
place on what the encoder reads; nothing is copied, but a host's vector for a model on a GPU.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

from sparkstrom.base.errors import UsageError
from sparkstrom.models.base import Batch, Columns
from sparkstrom.models.losses import loss_name
from sparkstrom.models.torch.flat_module import FlatModule, Updater
from sparkstrom.models.torch.optimizer_options import check_options, device_name
from sparkstrom.models.torch.optimizers import (
    Groups,
    OptimizerFactory,
    SchedulerFactory,
    made_optimizer,
    made_scheduler,
    optimizer_in_words,
    refuse_instances,
    stepped,
    with_gradients,
)
from sparkstrom.models.torch.pacing import FALL_MAX, check_interval, highest_rate, interval_of
from sparkstrom.models.torch.parameters import move_buffers
from sparkstrom.models.torch.tensors import (
    LOSS_FITS,
    TorchBatch,
    batch_to,
    explained,
    parts_of,
)
from sparkstrom.models.torch.torch_losses import (
    Loss,
    counted,
    is_per_label,
    is_torchs,
    outputs_kind,
    weighted,
    with_classes,
)
from sparkstrom.models.torch.torch_losses import ignored_label as ignored_by
from sparkstrom.models.torch.travel import refuse_holders, without_storage

Step = Callable[[nn.Module, Optimizer, TorchBatch], Any]


class TorchModel(FlatModule):
    """A torch module with its loss and optimizer, behind the flat-parameter protocol.

    ``loss(output, target)`` returns the rows' mean; ``optimizer(parameters)`` and
    ``scheduler(optimizer)`` make theirs, as ``partial(torch.optim.Adam, lr=1e-3)`` does.
    ``scheduler_interval`` is "epoch" or "step", when the scheduler steps: once an epoch, or once a
    minibatch of the fit. By default StepLR, MultiStepLR, ExponentialLR, MultiplicativeLR,
    CosineAnnealingLR and PolynomialLR step by epochs, all others by minibatches. ``groups`` makes
    torch's parameter groups from a dict name -> parameter. ``device`` is where workers train: None
    takes the GPU that Spark assigned to the task, or else the CPU. ``clip_norm`` bounds the
    gradient's norm; ``accumulate`` computes a minibatch in so many parts, one after the other;
    ``autocast="bfloat16"`` computes in bfloat16. ``step(module, optimizer, batch: TorchBatch) ->
    loss`` does a whole step as a user wants it; then ``loss`` is for scores only, and may be None.
    ``outputs`` says what the module puts out, for metrics: logits, probabilities or values; by
    default logits for torch's losses of classes, else values.
    Raise UsageError for what cannot train here, with reason and remedy.
    """

    KIND = "torch"
    _first_rate: float | None = None
    _is_warned = False
    OPTIONS: tuple[str, ...] = (
        *("_loss", "_custom", "_factories", "_device_wanted", "_clip_norm", "_accumulate"),
        *("_autocast", "_outputs_kind", "_interval"),
    )

    def __init__(
        self,
        module: nn.Module,
        loss: Loss | None,
        optimizer: OptimizerFactory,
        *,
        scheduler: SchedulerFactory | None = None,
        scheduler_interval: str | None = None,
        groups: Groups | None = None,
        device: str | None = None,
        clip_norm: float | None = None,
        accumulate: int = 1,
        autocast: str | torch.dtype | None = None,
        step: Step | None = None,
        outputs: str | None = None,
    ) -> None:
        refuse_instances(optimizer, scheduler)
        self._loss, self._custom = loss, step
        self._outputs_kind = outputs_kind(outputs, loss)
        self._factories = optimizer, groups, scheduler
        self._interval = scheduler_interval
        self._device_wanted = device_name(device)
        self._clip_norm, self._accumulate = clip_norm, accumulate
        self._autocast = None if autocast is None else str(autocast).removeprefix("torch.")
        self._begin(module)
        check_options(loss, step, clip_norm, accumulate, self._autocast)
        refuse_holders(
            module, loss=loss, step=step, optimizer=optimizer, groups=groups, scheduler=scheduler
        )
        made = made_scheduler(scheduler, made_optimizer(optimizer, groups, self._named))
        check_interval(scheduler_interval, made)
        without_storage(module, self._named)

    def _said(self) -> dict[str, str]:
        optimizer, groups, _ = self._factories
        loss = {} if self._loss is None else {"loss": loss_name(self._loss)}
        return {**loss, "optimizer": optimizer_in_words(optimizer, groups, self._named)}

    def bind(self, params: Any) -> None:
        """Work on f32[n_params] of the host or its own device; the optimizer's state stays."""
        super().bind(params)
        move_buffers(self._device, self._loss)

    def check(self, features: Columns, labels: Columns) -> None:
        """Raise UsageError naming row and value where rows do not fit."""
        super().check(features, labels)
        if isinstance(labels, tuple) and not labels and is_torchs(self._loss):
            raise UsageError(
                f"the loss {loss_name(self._loss)} needs labels: name their column, or pass a loss"
                " that takes all from the module's output"
            )

    @property
    def per_label(self) -> bool:
        """Whether the loss takes each of several outputs for a label that is true or false."""
        return is_per_label(self._loss)

    @property
    def ignored_label(self) -> int | None:
        """The label whose places the loss leaves out; None: it counts all."""
        return ignored_by(self._loss)

    def need_loss(self) -> None:
        """Raise UsageError where held-out rows could not be measured."""
        if self._loss is None:
            raise UsageError("this TorchModel has a step of its own and no loss: pass loss= for it")

    def loss(self, batch: Batch) -> tuple[float, float]:
        """(sum of weight x loss, sum of weights) in evaluation mode; nothing changes."""
        self.need_loss()
        tensors = batch_to(self._device, batch)
        with self._evaluating(), self._precision():
            mean = self._loss_of(self._called(tensors.features), tensors)
        weight = self._counted_rows(tensors, batch.rows, mean)
        return (float(mean) * weight if weight else 0.0), weight

    def stand_at(self, epoch: int, batch: int, batches: int) -> None:
        """Take where the next step is: a scheduler by epochs is there, too.

        In the first epoch, warn of a scheduler that is exhausted within it: before the first step,
        or as soon as losses that do not improve have exhausted it.
        """
        self._pacing.epoch = epoch
        if epoch == 0 and batch > 0 and not self._is_warned:
            self._warn_of_plateau()
        if epoch == batch == 0 and self._interval is None and not self._has_stepped:
            _, scheduler = self._made()
            if scheduler is None or isinstance(scheduler, OneCycleLR):  # which ends far down
                return
            fall = self._pacing.fall_within(batches, self._make_updater())
            if fall >= FALL_MAX:
                warnings.warn(
                    f"scheduler {type(scheduler).__name__} steps once a minibatch and lets the"
                    f" learning rate fall by a factor of {fall:.3g} within the first epoch: pass"
                    " scheduler_interval='epoch' if it is written by epochs, or 'step' if not",
                    stacklevel=2,
                )

    def _warn_of_plateau(self) -> None:
        optimizer, scheduler = self._made()
        if not isinstance(scheduler, ReduceLROnPlateau):
            return
        if self._first_rate is None:
            self._first_rate = highest_rate(self._make_updater()[0])
        if highest_rate(optimizer) * FALL_MAX <= self._first_rate * (1 + 1e-9):
            self._is_warned = True
            warnings.warn(
                "scheduler ReduceLROnPlateau steps by the loss of each minibatch, and has let the"
                f" learning rate fall from {self._first_rate:.3g} to {highest_rate(optimizer):.3g}"
                " within the first epoch: raise its patience, which counts minibatches here, or"
                " take a schedule by epochs, such as CosineAnnealingLR",
                stacklevel=3,
            )

    # -- inside ----------------------------------------------------------------------------------

    def _make_updater(self) -> Updater:
        factory, groups, scheduler = self._factories
        optimizer = made_optimizer(factory, groups, self._named)
        made = made_scheduler(scheduler, optimizer)
        self._pacing.interval = self._interval or interval_of(made)
        return optimizer, made

    def _train(self, optimizer: Optimizer, batch: TorchBatch, rows: int) -> Any:
        if self._custom is not None:
            return self._custom(self._module, optimizer, batch)
        return self._gradient_step(optimizer, batch, rows)

    def _gradient_step(self, optimizer: Optimizer, batch: TorchBatch, rows: int) -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.zeros((), device=self._device)
        for part, share in parts_of(batch, rows, self._accumulate):
            with self._precision():
                loss = self._loss_of(self._called(part.features), part) * share
            loss.backward()
            total += loss.detach()
        stepped(optimizer, with_gradients(self._named, self._clip_norm))
        return total

    def _loss_of(self, output: Any, batch: TorchBatch) -> torch.Tensor:
        assert self._loss is not None
        labels = with_classes(self._loss, output, batch.labels)
        with explained("the loss", LOSS_FITS, output=output, target=labels), self._strictly():
            if batch.weights is None:
                loss = self._loss(output, labels)
            else:
                loss = weighted(self._loss, output, labels, batch.weights)
        if not (isinstance(loss, torch.Tensor) and loss.ndim == 0):
            shape = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise UsageError(f"loss(output, target) returned {shape}: it must be one number, the"
                             " mean over rows")  # fmt: skip
        return loss

    def _counted_rows(self, batch: TorchBatch, rows: int, like: torch.Tensor) -> float:
        """Return how many rows the mean loss is of, by weight; ignored places count nothing."""
        counts = counted(self._loss, batch.labels, like.double())
        if batch.weights is None:
            return float(rows) if counts is None else float(counts.sum()) * rows / counts.numel()
        weights = batch.weights.double()
        if counts is None:
            return float(weights.sum())
        return float((weights * counts.reshape(rows, -1).mean(dim=1)).sum())

    @contextlib.contextmanager
    def _strictly(self) -> Iterator[None]:
        """Before the first step is done: torch's warning that [n, 1] meets [n] is an error."""
        if self._has_stepped:
            yield
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Using a target size", UserWarning)
            yield
