"""TorchModel: a user's module, loss and optimizer, with all parameters in one flat vector.

The module's parameters are views of the vector passed to ``bind``. So the optimizer directly
updates the memory from which changes are encoded for other workers. The vector is copied only if
the model is on a GPU and the vector on the host.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau

from sparkstrom.base.errors import UsageError
from sparkstrom.models.activations_and_losses import loss_name
from sparkstrom.models.base import Batch, Columns
from sparkstrom.models.row_checks import refuse_unknown_classes
from sparkstrom.models.torch.flat_module import (
    ACCUMULATE,
    CLIP_NORM,
    FlatModule,
    OptimizerPair,
    check_device_name,
    check_options,
    copy_without_storage,
    refuse_captured_module,
)
from sparkstrom.models.torch.hyperparameter_scaling import (
    EPOCH,
    RATE_DROP_MAX,
    STEP,
    UNKNOWN_LENGTH,
    check_interval,
    get_highest_rate,
    infer_interval,
)
from sparkstrom.models.torch.losses import (
    Loss,
    cast_class_labels,
    compute_label_weights,
    compute_weighted_loss,
    count_class_labels,
    get_ignored_label,
    is_per_label,
    is_torch_loss,
    refuse_broadcast,
    resolve_outputs,
)
from sparkstrom.models.torch.optimizers import (
    GroupFactory,
    OptimizerFactory,
    SchedulerFactory,
    format_optimizer,
    make_optimizer,
    make_scheduler,
    refuse_instances,
    require_gradients,
    step_optimizer,
    takes_total_steps,
)
from sparkstrom.models.torch.parameters import move_buffers
from sparkstrom.models.torch.tensors import (
    LOSS_REMEDY,
    TorchBatch,
    batch_to_device,
    explaining_shape_errors,
    split_batch,
)

StepFunction = Callable[[nn.Module, Optimizer, TorchBatch], Any]


class TorchModel(FlatModule):
    """A torch module with its loss and optimizer.

    Args:
        module: the module, with its initial values.
        loss: ``loss(output, target)`` returns the mean over rows. It may be None if ``step`` is
            given. A loss module that ``torch.compile`` has wrapped is used without compilation.
        optimizer: ``optimizer(parameters)`` creates the optimizer, such as
            ``partial(torch.optim.Adam, lr=1e-3)``.
        scheduler: ``scheduler(optimizer)`` creates the scheduler. If it has a parameter
            ``total_steps``, as ``partial(OneCycleLR, max_lr=0.1)`` does, it is given the number of
            its steps in the fit, and starts again in each fit.
        scheduler_interval: "epoch" or "step": the scheduler steps once per epoch, or once per
            minibatch of the fit. By default StepLR, MultiStepLR, ExponentialLR, MultiplicativeLR,
            CosineAnnealingLR and PolynomialLR step by epochs, all others by minibatches.
        groups: ``groups(named)`` returns torch's parameter groups for a dict (name -> parameter).
        device: where workers train; None: the GPU that Spark assigned to the task, else the CPU.
        clip_norm: upper bound of the gradient's norm; None: no bound.
        accumulate: number of parts of a minibatch whose gradients are computed one after another
            and added, to save memory.
        autocast: "bfloat16" to compute in bfloat16; None: in float32.
        step: ``step(module, optimizer, batch: TorchBatch) -> loss`` replaces the whole step;
            the option ``loss`` is then used only for scores.
        outputs: what the module returns, for metrics: logits, probabilities or values; by default
            logits for torch's classification losses, else values.

    Raises:
        UsageError: an argument cannot be used here; the message has reason and remedy.
    """

    KIND = "torch"
    _first_rate: float | None = None  # learning rate before the first step
    _is_warned = False  # whether a rate collapse by ReduceLROnPlateau was reported
    OPTIONS: tuple[str, ...] = (
        *("_loss", "_custom", "_factories", "_device_wanted", "_clip_norm", "_accumulate"),
        *("_autocast", "_outputs_kind", "_interval", "known_classes"),
    )

    def __init__(
        self,
        module: nn.Module,
        loss: Loss | None,
        optimizer: OptimizerFactory,
        *,
        scheduler: SchedulerFactory | None = None,
        scheduler_interval: str | None = None,
        groups: GroupFactory | None = None,
        device: str | None = None,
        clip_norm: float | None = None,
        accumulate: int = 1,
        autocast: str | torch.dtype | None = None,
        step: StepFunction | None = None,
        outputs: str | None = None,
    ) -> None:
        refuse_instances(optimizer, scheduler, groups)
        loss = getattr(loss, "_orig_mod", loss)  # not compiled, to check class and options
        self._loss, self._custom = loss, step
        # As in ``ClassCounter``; found in the first step if the loss takes class indices.
        self.known_classes: tuple[int, int] | None = None
        self._outputs_kind = resolve_outputs(outputs, loss)
        self._factories = optimizer, groups, scheduler
        self._interval = scheduler_interval
        self._device_wanted = check_device_name(device)
        self._clip_norm = CLIP_NORM.read("clip_norm", clip_norm)
        self._accumulate = ACCUMULATE.read("accumulate", accumulate)
        is_dtype = isinstance(autocast, torch.dtype)
        self._autocast = str(autocast).removeprefix("torch.") if is_dtype else autocast
        self._adopt_module(module)
        check_options(loss, step, clip_norm, accumulate, self._autocast)
        refuse_captured_module(
            module, loss=loss, step=step, optimizer=optimizer, groups=groups, scheduler=scheduler
        )
        trial_optimizer = make_optimizer(optimizer, groups, self._named_parameters)
        check_interval(
            scheduler_interval, make_scheduler(scheduler, trial_optimizer, UNKNOWN_LENGTH.epochs)
        )
        copy_without_storage(module, self._named_parameters)

    def _collect_options_for_repr(self) -> dict[str, str]:
        """Return the loss and the optimizer with its options, for ``repr``."""
        optimizer, groups, _ = self._factories
        loss = {} if self._loss is None else {"loss": loss_name(self._loss)}
        return {**loss, "optimizer": format_optimizer(optimizer, groups, self._named_parameters)}

    def bind(self, params: Any) -> None:
        """Make the parameters views of ``params``, f32[n_params], without resetting the optimizer.

        ``params`` is on the host or on the model's device. The loss's buffers move to that device.
        """
        super().bind(params)
        move_buffers(self._device, self._loss)

    def check(self, features: Columns, labels: Columns) -> None:
        """Raise UsageError if rows do not fit the module or lack labels that the loss needs.

        Raise it also, with row and value, for labels outside the classes, if their number is known.
        """
        super().check(features, labels)
        if isinstance(labels, tuple) and not labels and is_torch_loss(self._loss):
            raise UsageError(
                f"the loss {loss_name(self._loss)} needs labels: name their column, or pass a loss"
                " that only uses the module's output"
            )
        if self.known_classes is not None and isinstance(labels, np.ndarray):
            dimensions, count = self.known_classes
            if labels.ndim == dimensions:
                refuse_unknown_classes(labels, count, self.ignored_label)

    @property
    def per_label(self) -> bool:
        """Whether the loss treats each output as a separate label that is true or false."""
        return is_per_label(self._loss)

    @property
    def ignored_label(self) -> int | None:
        """The label that the loss ignores, or None."""
        return get_ignored_label(self._loss)

    def need_loss(self) -> None:
        """Raise UsageError if the model has no loss to evaluate, only a user-defined step."""
        if self._loss is None:
            raise UsageError(
                "this TorchModel has its own step and no loss: pass loss= to measure it"
            )

    def loss(self, batch: Batch) -> tuple[float, float]:
        """Return (sum of weight x loss, sum of weights) of the rows, in evaluation mode.

        A row's weight includes its labels' weights: class weights, and 0 for ignored labels.
        """
        self.need_loss()
        tensors = batch_to_device(self._device, batch)
        with self._evaluation_mode(), self._autocast_context():
            output = self._call_module(tensors.features)
            mean = self._compute_loss(output, tensors)
        weight = float(self._weigh_rows(output, tensors, batch.rows).sum())
        return (float(mean) * weight if weight else 0.0), weight

    def set_position(self, epoch: int, batch: int, batches: int) -> None:
        """Set the epoch of the next step, for a scheduler that steps by epochs; see ``EpochAware``.

        In the first epoch, warn if a scheduler reduces the rate by a factor of ``RATE_DROP_MAX``.
        For a fixed schedule, simulate it and warn before the first step; for ReduceLROnPlateau,
        warn after the reduction.
        """
        self._scaling.epoch = epoch
        if epoch == 0 and batch > 0 and not self._is_warned:
            self._warn_if_rate_collapsed()
        if epoch == batch == 0 and self._interval is None and not self._has_stepped:
            _, scheduler = self._get_optimizer()
            if scheduler is None or isinstance(scheduler, OneCycleLR):  # ends low by design
                return
            if self._fit_length is not None:  # minibatches of all workers
                batches = self._fit_length.minibatches // self._fit_length.epochs
            drop = self._scaling.measure_rate_drop(batches, self._make_optimizer())
            if drop >= RATE_DROP_MAX:
                warnings.warn(
                    f"scheduler {type(scheduler).__name__} steps once a minibatch and lets the"
                    f" learning rate fall by a factor of {drop:.3g} within the first epoch: pass"
                    " scheduler_interval='epoch' if it counts epochs, or 'step' if it counts"
                    " minibatches",
                    stacklevel=2,
                )

    def _warn_if_rate_collapsed(self) -> None:
        """Warn once if ReduceLROnPlateau has reduced the rate by a factor of ``RATE_DROP_MAX``."""
        optimizer, scheduler = self._get_optimizer()
        if not isinstance(scheduler, ReduceLROnPlateau):
            return
        if self._first_rate is None:
            self._first_rate = get_highest_rate(self._make_optimizer()[0])
        if get_highest_rate(optimizer) * RATE_DROP_MAX <= self._first_rate * (1 + 1e-9):
            self._is_warned = True
            warnings.warn(
                "scheduler ReduceLROnPlateau steps by the loss of each minibatch, and has let the"
                f" learning rate fall from {self._first_rate:.3g} to"
                f" {get_highest_rate(optimizer):.3g}"
                " within the first epoch: raise its patience, which counts minibatches here, or"
                " use a schedule by epochs, such as CosineAnnealingLR",
                stacklevel=3,
            )

    def _make_optimizer(self) -> OptimizerPair:
        """Return a new optimizer and scheduler; set the interval by which the scheduler steps."""
        pacing, length = self._scaling, self._fit_length or UNKNOWN_LENGTH
        pacing.interval = self._interval or STEP
        optimizer, scheduler = self._make_optimizer_for(pacing.count_steps(length))
        if self._interval is None and infer_interval(scheduler) != STEP:
            pacing.interval = EPOCH
            if self._depends_on_fit_length():
                return self._make_optimizer_for(length.epochs)
        return optimizer, scheduler

    def _make_optimizer_for(self, total_steps: int) -> OptimizerPair:
        """Return a new optimizer, and a scheduler for ``total_steps`` steps."""
        factory, groups, scheduler = self._factories
        optimizer = make_optimizer(factory, groups, self._named_parameters)
        return optimizer, make_scheduler(scheduler, optimizer, total_steps)

    def _depends_on_fit_length(self) -> bool:
        """Return whether the scheduler is given the fit's number of steps."""
        return takes_total_steps(self._factories[2])

    def _train_batch(self, optimizer: Optimizer, batch: TorchBatch, rows: int) -> Any:
        """Train with the user-defined step or else a gradient step; return the mean loss."""
        if self._custom is not None:
            return self._custom(self._module, optimizer, batch)
        return self._gradient_step(optimizer, batch, rows)

    def _gradient_step(self, optimizer: Optimizer, batch: TorchBatch, rows: int) -> torch.Tensor:
        """Take a step with the gradient summed over ``accumulate`` parts; return the mean loss.

        If no label counts, take no step and return 0: momentum, Adam and weight decay would
        otherwise change the parameters without a gradient.
        """
        optimizer.zero_grad()
        size = -(-rows // self._accumulate)
        total, shares = torch.zeros((), device=self._device), [1.0]
        weight: torch.Tensor | None = None
        for i, part in enumerate(split_batch(batch, rows, size)):
            with self._autocast_context():
                output = self._call_module(part.features)
                if not self._has_stepped:
                    self.known_classes = self._count_classes(output, part.labels)
                mean = self._compute_loss(output, part)
            if i == 0:
                counts = self._compute_label_weights(output, batch)
                if counts is not None:  # the weight that ``loss`` also returns
                    means = counts.reshape(rows, -1).mean(dim=1)
                    weight = (means if batch.weights is None else means * batch.weights).sum()
                if size < rows:
                    shares = self._compute_shares(output, batch, rows, size)
            if shares[i]:  # the mean of a part in which no label counts may be NaN
                loss = mean * shares[i]
                loss.backward()
                total += loss.detach()
            del output, mean  # before the next part needs memory
        gradients = require_gradients(self._named_parameters, self._clip_norm)
        if weight is not None:  # not earlier, because float() waits for the GPU
            self.step_weight = float(weight)
        if self.step_weight == 0:
            optimizer._opt_called = True  # else schedulers warn
            return torch.zeros(())
        step_optimizer(optimizer, gradients)
        return total

    def _count_classes(self, output: Any, labels: Any) -> tuple[int, int] | None:
        """Return (dimensions of labels, number of classes); None if the number is unknown.

        It is the width of the outputs, if some parameter has that length, as in the last layer.
        Otherwise the width may be that of the longest row of a minibatch.
        """
        known = count_class_labels(self._loss, output, labels)
        lengths = {len(each) for each in self._named_parameters.values() if each.ndim}
        return known if known is not None and known[1] in lengths else None

    def _compute_shares(self, output: Any, batch: TorchBatch, rows: int, size: int) -> list[float]:
        """Return the share of each part of ``size`` rows in the minibatch's mean loss.

        If no label counts, all parts have the same share. ``rows`` is the number of rows in
        ``batch``, ``output`` the module's output for the first part.
        """
        parts = self._weigh_rows(output, batch, rows).split(size)
        sums = torch.stack([part.sum() for part in parts]).tolist()
        total = sum(sums)
        return [each / total if total else 1 / len(sums) for each in sums]

    def _compute_loss(self, output: Any, batch: TorchBatch) -> torch.Tensor:
        """Return the mean loss, weighted if rows have weights.

        Raise UsageError if output and labels do not fit, or if the loss is not a scalar tensor.
        """
        assert self._loss is not None
        labels = cast_class_labels(self._loss, output, batch.labels)
        refuse_broadcast(self._loss, output, labels)
        with (
            explaining_shape_errors("the loss", LOSS_REMEDY, output=output, target=labels),
            self._broadcast_warning_as_error(),
        ):
            if batch.weights is None:
                loss = self._loss(output, labels)
            else:
                loss = compute_weighted_loss(self._loss, output, labels, batch.weights)
        if not (isinstance(loss, torch.Tensor) and loss.ndim == 0):
            shape = list(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise UsageError(f"loss(output, target) returned {shape}: it must be one number, the"
                             " mean over rows")  # fmt: skip
        return loss

    def _weigh_rows(self, output: Any, batch: TorchBatch, rows: int) -> torch.Tensor:
        """Return the weight of each row in a minibatch's mean loss, f64[rows].

        It is the row's own weight times the mean weight of its labels. A label's weight is that of
        its class, or 0 if it is ignored. ``output`` shows whether labels that are floats are
        classes.
        """
        ones = torch.ones(rows, dtype=torch.float64, device=self._device)
        weights = ones if batch.weights is None else batch.weights.double()
        counts = self._compute_label_weights(output, batch)
        return weights if counts is None else weights * counts.reshape(rows, -1).mean(dim=1)

    def _compute_label_weights(self, output: Any, batch: TorchBatch) -> torch.Tensor | None:
        """Return the weight of each label, f64 in the labels' shape; None if all weigh 1."""
        labels = cast_class_labels(self._loss, output, batch.labels)
        template = torch.zeros((), dtype=torch.float64, device=self._device)
        return compute_label_weights(self._loss, labels, template)

    @contextlib.contextmanager
    def _broadcast_warning_as_error(self) -> Iterator[None]:
        """Make torch's warning about broadcasting [n, 1] to [n] an error until the first step."""
        if self._has_stepped:
            yield
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Using a target size", UserWarning)
            yield
