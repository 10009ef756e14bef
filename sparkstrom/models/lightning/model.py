"""LightningModel: trains a LightningModule with the module's own steps and optimizer.

The module's parameters are views of one flat vector, to which other workers' updates are added.
``TrainerStub`` replaces Lightning's Trainer, with the few attributes that modules read.

The packages ``lightning`` and ``pytorch_lightning`` each define their own class LightningModule.
Neither package is imported here; the user's module brings its own.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import is_real, is_whole, shown
from sparkstrom.models.base import Batch, Columns, count_rows
from sparkstrom.models.torch.flat_module import (
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
    INTERVALS,
    UNKNOWN_LENGTH,
    WorkerScaling,
)
from sparkstrom.models.torch.losses import resolve_outputs
from sparkstrom.models.torch.optimizers import check_optimizer, require_gradients, step_optimizer
from sparkstrom.models.torch.tensors import (
    TorchBatch,
    batch_to_device,
    check_rows,
    explaining_shape_errors,
    features_to_device,
    outputs_to_numpy,
)

LIGHTNING_PACKAGES = {"lightning", "pytorch_lightning"}
DATA_REMEDY = "rows come from fit(data); create layers in __init__ or configure_model"
SAVE_REMEDY = "network.save writes parameters and buffers: store other state in a buffer"
CUSTOM_STEP_REMEDY = "for your own step use TorchModel(module, None, optimizer, step=...)"
REMOVED_HOOK_REMEDY = "Lightning 2 has no such hook: use on_train_batch_end and on_train_epoch_end"
PREDICT_STEP_REMEDY = "do it in predict_step"

# Hooks of Lightning that are not called here -> what to do instead.
REFUSED_HOOKS = {
    "optimizer_step": CUSTOM_STEP_REMEDY,
    "optimizer_zero_grad": CUSTOM_STEP_REMEDY,
    "lr_scheduler_step": "use a scheduler of torch.optim.lr_scheduler",
    "configure_gradient_clipping": "pass LightningModel(module, clip_norm=...)",
    "configure_callbacks": "callbacks are Lightning's: pass fit(early_stopping=, listeners=)",
    "configure_sharded_model": "each worker has all parameters: create layers in configure_model",
    "transfer_batch_to_device": "tensors are on the device already: use on_after_batch_transfer",
    "setup": DATA_REMEDY,
    "teardown": "a worker's process ends with its task",
    "on_fit_start": "use on_train_start",
    "on_fit_end": "do it after fit has returned, with network.module",
    "on_train_end": "do it after fit has returned, with network.module",
    "on_save_checkpoint": SAVE_REMEDY,
    "on_load_checkpoint": SAVE_REMEDY,
    "on_predict_start": PREDICT_STEP_REMEDY,
    "on_predict_end": PREDICT_STEP_REMEDY,
    "on_predict_batch_start": PREDICT_STEP_REMEDY,
    "on_predict_batch_end": PREDICT_STEP_REMEDY,
    "on_predict_model_eval": PREDICT_STEP_REMEDY,
    "on_predict_epoch_start": PREDICT_STEP_REMEDY,
    "on_predict_epoch_end": PREDICT_STEP_REMEDY,
    "training_epoch_end": REMOVED_HOOK_REMEDY,
    "training_step_end": REMOVED_HOOK_REMEDY,
}

# Hooks of Lightning that are not called when the model is evaluated on held-out rows.
REFUSED_VALIDATION_HOOKS = (
    *("on_validation_start", "on_validation_end", "on_validation_model_zero_grad"),
    *("on_validation_batch_start", "on_validation_batch_end", "on_validation_model_eval"),
    *("on_validation_epoch_start", "on_validation_epoch_end", "on_validation_model_train"),
    *("validation_epoch_end", "validation_step_end"),
)


def find_lightning_base(module: Any) -> type | None:
    """Return the LightningModule class that the module's class inherits from, or None."""
    for kind in type(module).__mro__:
        if (
            kind.__name__ == "LightningModule"
            and kind.__module__.partition(".")[0] in LIGHTNING_PACKAGES
        ):
            return kind
    return None


def iter_lightning_modules(module: nn.Module) -> Iterator[Any]:
    """Yield each LightningModule among the module and its submodules."""
    return (part for part in module.modules() if find_lightning_base(part) is not None)


def iter_metrics(module: nn.Module) -> Iterator[Any]:
    """Yield the torchmetrics objects in a module; their states are not parameters or buffers."""
    for part in module.modules():
        kinds = type(part).__mro__
        if any(k.__module__ == "torchmetrics.metric" and k.__name__ == "Metric" for k in kinds):
            yield part


def is_overridden(module: Any, name: str) -> bool:
    """Return whether the user's module, or its class, overrides Lightning's method ``name``."""
    method = getattr(type(module), name, None)
    base_method = getattr(find_lightning_base(module), name, None)
    return name in vars(module) or (method is not None and method is not base_method)


def check_module(module: Any) -> None:
    """Raise UsageError unless this is a LightningModule that trains here as it does with a Trainer.

    The message names the part that prevents it, such as a hook that would not be called here.
    """
    kind = type(module).__name__
    if find_lightning_base(module) is None:
        raise UsageError(
            f"module is a {kind}: pass a LightningModule, not compiled; TorchModel takes other"
            " modules"
        )
    if not module.automatic_optimization:
        raise UsageError(f"{kind}.automatic_optimization is False: {CUSTOM_STEP_REMEDY}")
    for name in ("training_step", "configure_optimizers"):
        if not is_overridden(module, name):
            raise UsageError(f"{kind} has no {name}, which a LightningModel needs: implement it")
    for name, remedy in REFUSED_HOOKS.items():
        if is_overridden(module, name):
            raise UsageError(f"{kind}.{name} would not be called here: {remedy}")
    for name, part in module.named_modules():
        if isinstance(part, AveragedModel):
            raise UsageError(
                f"{kind}.{name} is an AveragedModel, which each worker would average separately:"
                " average after the fit, or use the parameters of the best epoch (early_stopping)"
            )
    for name in ("training_step", "validation_step"):
        if is_overridden(module, name):
            make_step_arguments(getattr(module, name), None, 0)


def require_validation_step(module: Any) -> None:
    """Raise UsageError if the module cannot be evaluated on held-out rows.

    It must have a ``validation_step`` and none of ``REFUSED_VALIDATION_HOOKS``, because sparkstrom
    would not call these hooks.
    """
    kind = type(module).__name__
    if not is_overridden(module, "validation_step"):
        raise UsageError(
            f"{kind} has no validation_step to measure held-out rows with: implement one that logs"
            " val_loss, or fit without validation"
        )
    for name in REFUSED_VALIDATION_HOOKS:
        if is_overridden(module, name):
            raise UsageError(
                f"{kind}.{name} would not be called here: held-out rows are measured minibatch by"
                " minibatch; compute the figure in validation_step, or use network.evaluate"
            )


def make_step_arguments(step: Callable[..., Any], batch: Any, index: int) -> tuple[Any, ...]:
    """Return the arguments for the module's ``step``: (batch, index), or (batch,) if it takes one.

    ``index`` is the minibatch's number. Raise UsageError if the step takes other arguments.
    """
    parameters = inspect.signature(step).parameters
    arguments = (batch, index) if len(parameters) > 1 else (batch,)
    try:
        inspect.signature(step).bind(*arguments)
    except TypeError as error:
        wanted_names = ", ".join(parameters)
        raise UsageError(
            f"{step.__qualname__}({wanted_names}) cannot be called with a batch and its number:"
            f" {error}; it must be (batch, batch_idx)"
        ) from error
    if "dataloader_iter" in parameters:
        raise UsageError(f"{step.__qualname__} takes a dataloader_iter: use (batch, batch_idx)")
    return arguments


TRAINING, VALIDATING, PREDICTING, CONFIGURING = "training", "validating", "predicting", ""

TRAINER_REMEDIES = {
    "max_epochs": "pass the module the number that fit gets",
    "max_steps": "pass the module the number of minibatches of the fit",
    "optimizers": "training_step must not use the optimizer (automatic optimization)",
    "strategy": "training_step must not use optimizer and scheduler (automatic optimization)",
    "lr_scheduler_configs": "the scheduler steps by itself",
    "datamodule": "rows come from fit(data)",
    "callback_metrics": "logged values are not kept; use fit's listeners",
}


class TrainerStub:
    """Replacement for a Trainer, with the attributes that Lightning's code and most users read.

    Attributes:
        current_epoch: this worker's epoch, counted over all fits.
        global_step: number of minibatches of the fit so far.
        batch: index of the minibatch in this worker's epoch, from 0.
        num_training_batches: number of minibatches in this worker's epoch.
        fit_length: length of the fit, for schedulers.
        has_read_length: whether configure_optimizers has read the fit's length.
        stage: what the module is doing, such as ``TRAINING``.
        logged: name -> value of the ``log`` calls in the current minibatch.
    """

    def __init__(self) -> None:
        self.current_epoch, self.global_step = 0, 0
        self.batch, self.num_training_batches = 0, 0
        self.logger: Any = None
        self.loggers: list[Any] = []
        self.sanity_checking = self.testing = False
        self.fit_length = UNKNOWN_LENGTH
        self.has_read_length = False
        self.stage = CONFIGURING
        self.logged: dict[str, Any] = {}

    @property
    def training(self) -> bool:
        """Whether a training step is running."""
        return self.stage == TRAINING

    @property
    def validating(self) -> bool:
        """Whether the model is being evaluated on held-out rows."""
        return self.stage == VALIDATING

    @property
    def predicting(self) -> bool:
        """Whether a prediction is running."""
        return self.stage == PREDICTING

    @property
    def estimated_stepping_batches(self) -> int:
        """The number of minibatches of the whole fit, over all workers.

        A scheduler depends on the fit's length if configure_optimizers reads this attribute.
        """
        self.has_read_length |= self.stage == CONFIGURING
        return self.fit_length.minibatches

    @property
    def is_last_batch(self) -> bool:
        """Whether the current minibatch is the last one in the worker's epoch."""
        return self.batch + 1 == self.num_training_batches

    def __getattr__(self, name: str) -> Any:
        """Raise UsageError with a remedy for an attribute that only a Trainer has."""
        if name.startswith("__"):
            raise AttributeError(name)
        remedy = TRAINER_REMEDIES.get(name, "pass the module what it needs when you create it")
        raise UsageError(f"self.trainer.{name}: no Trainer runs on Spark's executors; {remedy}")

    @contextlib.contextmanager
    def attached(self, module: nn.Module, stage: str) -> Iterator[None]:
        """Act as the module's trainer within the context, and record what the module logs.

        ``stage`` is what the module does, such as ``TRAINING``.
        """
        parts = [(part, part._trainer) for part in iter_lightning_modules(module)]
        self.stage, self.logged = stage, {}
        for part, _ in parts:
            part._trainer = self
            part.__dict__["log"] = self._log
        try:
            yield
        finally:
            for part, before in parts:
                part._trainer = before
                del part.__dict__["log"]
            self.stage = CONFIGURING

    def _log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Record a logged value; ignore options such as ``prog_bar``."""
        self.logged[name] = value

    def get_logged_number(self, name: str) -> float | None:
        """Return the logged value, or None; raise UsageError unless it is a single number."""
        if name not in self.logged:
            return None
        value = self.logged[name]
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            return float(value)
        if is_real(value):
            return float(value)
        raise UsageError(
            f"validation_step logs {name} as a {type(value).__name__}: log the mean over the rows"
            " of the minibatch as a number"
        )


IGNORED_KEYS = ("name", "strict", "monitor", "reduce_on_plateau")  # have no effect here
SCHEDULER_KEYS = ("scheduler", "interval", "frequency")
ONE_OPTIMIZER_REMEDY = "training_step is called once in a step here: return one optimizer"


def parse_optimizers(result: Any, scaling: WorkerScaling) -> tuple[Optimizer, LRScheduler | None]:
    """Parse configure_optimizers' result; return (optimizer, scheduler or None).

    Set the scheduler's interval and frequency in ``scaling``. Raise UsageError, with the reason, if
    the result is not supported, such as several optimizers.
    """
    optimizers, schedulers = _split_optimizers_result(result)
    if len(optimizers) != 1 or not isinstance(optimizers[0], Optimizer):
        kinds = ", ".join(type(one).__name__ for one in optimizers) or "nothing"
        raise UsageError(f"configure_optimizers returned {kinds}: {ONE_OPTIMIZER_REMEDY}")
    if len(schedulers) > 1:
        raise UsageError(
            f"configure_optimizers returned {len(schedulers)} schedulers: combine them into one"
            " (torch.optim.lr_scheduler.ChainedScheduler, SequentialLR)"
        )
    return optimizers[0], _parse_scheduler(schedulers[0], scaling) if schedulers else None


def _split_optimizers_result(result: Any) -> tuple[list[Any], list[Any]]:
    """Return (optimizers, schedulers) as lists, from any result that Lightning accepts.

    Raise UsageError for a dict that has other keys or lacks ``optimizer``.
    """
    if isinstance(result, dict):
        unknown = set(result) - {"optimizer", "lr_scheduler", "monitor"}
        if unknown or "optimizer" not in result:
            raise UsageError(
                f"configure_optimizers returned a dict of {sorted(result)}: it must have optimizer,"
                " and may have lr_scheduler"
            )
        schedulers = [result["lr_scheduler"]] if result.get("lr_scheduler") is not None else []
        return [result["optimizer"]], schedulers
    if not isinstance(result, list | tuple):
        return ([] if result is None else [result]), []
    if len(result) == 2 and all(isinstance(part, list | tuple) for part in result):
        return list(result[0]), list(result[1])
    if len(result) == 1 and isinstance(result[0], dict):
        return _split_optimizers_result(result[0])
    return list(result), []


def _parse_scheduler(value: Any, scaling: WorkerScaling) -> LRScheduler:
    """Return the scheduler from ``lr_scheduler``; set its interval and frequency in ``scaling``.

    Raise UsageError if it is not supported.
    """
    options = value if isinstance(value, dict) else {"scheduler": value}
    scheduler = options.get("scheduler")
    unknown = sorted(set(options) - {*SCHEDULER_KEYS, *IGNORED_KEYS})
    if unknown:
        raise UsageError(
            f"lr_scheduler has {', '.join(unknown)}: it may have {', '.join(SCHEDULER_KEYS)}"
        )
    if isinstance(scheduler, ReduceLROnPlateau):
        raise UsageError(
            "lr_scheduler is a ReduceLROnPlateau, but a metric of all workers is not available"
            " while they train: use a schedule by steps or epochs, such as CosineAnnealingLR"
        )
    if not isinstance(scheduler, LRScheduler):
        raise UsageError(
            f"lr_scheduler is a {type(scheduler).__name__}: it must be one of"
            " torch.optim.lr_scheduler, or a dict with `scheduler`"
        )
    # Lightning's default interval is an epoch.
    interval, frequency = options.get("interval", EPOCH), options.get("frequency", 1)
    if interval not in INTERVALS:
        raise UsageError(f"lr_scheduler has interval={interval!r}: it must be step or epoch")
    if not (is_whole(frequency) and frequency >= 1):
        raise UsageError(f"lr_scheduler has frequency={frequency!r}: it must be 1 or above")
    scaling.interval, scaling.frequency = interval, frequency
    return scheduler


BatchFunction = Callable[[TorchBatch], Any]

STEP_REMEDY = (
    "it gets (features, labels), one dict of both if both are dicts, or the features alone"
    " if label=None; name the columns so in fit, or pass LightningModel(module, batch=...)"
)
WEIGHTS_REMEDY = (
    "rows have weights, but a training_step takes none: pass LightningModel(module, batch=...),"
    " which gets them, and let training_step return sum(weights * losses) / sum(weights)"
)


class LightningModel(FlatModule):
    """A LightningModule with automatic optimization, whose parameters are one flat vector.

    ``training_step``, ``configure_optimizers`` and the hooks around a step are the module's own.
    ``validation_step`` evaluates on held-out rows. Predictions come from ``predict_step`` or, if
    the module does not define it, from ``forward``. ``configure_model`` is called at creation.

    Args:
        module: the LightningModule.
        batch: converts a TorchBatch to the argument of the steps. None: the pair (features,
            labels); if both are dicts, one dict; without labels, only the features.
        monitor: name of the value that validation_step logs as its loss: a mean over rows, of which
            lower values are better.
        device: where workers train; None: the GPU that Spark assigned to the task, else the CPU.
        clip_norm: upper bound of the gradient's norm, like Trainer's ``gradient_clip_val``.
        autocast: "bfloat16" corresponds to Trainer's ``precision="bf16-mixed"``.
        outputs: what predictions are, for metrics: logits, probabilities or values.

    Raises:
        UsageError: the module has a part that would not be used here; the message names it.
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
        batch: BatchFunction | None = None,
        monitor: str = "val_loss",
        device: str | None = None,
        clip_norm: float | None = None,
        autocast: str | None = None,
        outputs: str = "logits",
    ) -> None:
        check_module(module)
        if batch is not None and not callable(batch):
            raise UsageError(f"batch={shown(batch)}: pass a function of a TorchBatch, or None")
        if not isinstance(monitor, str):
            raise UsageError(f"monitor={shown(monitor)}: pass the name of a logged value")
        module.configure_model()
        self._make_batch, self._monitor = batch, monitor
        self._device_wanted = check_device_name(device)
        self._clip_norm = CLIP_NORM.read("clip_norm", clip_norm)
        self._autocast, self._outputs_kind = autocast, resolve_outputs(outputs, None)
        check_options(print, None, clip_norm, 1, autocast)
        refuse_captured_module(module, batch=batch)
        self._adopt_module(module)
        self._make_optimizer()
        copy_without_storage(module, self._named_parameters)

    def _collect_options_for_repr(self) -> dict[str, str]:
        """Return the module's hyperparameters and learning rate as name -> text, for ``repr``."""
        known = {name: getattr(self._module, name, None) for name in ("lr", "learning_rate")}
        known |= dict(getattr(self._module, "hparams", {}))
        return {k: repr(v) for k, v in known.items() if isinstance(v, str | int | float | bool)}

    def _set_up(self, module: Any) -> None:
        """Initialize everything that is derived from the module; also called after unpickling."""
        super()._set_up(module)
        self._trainer = TrainerStub()
        self._started_epoch: int | None = None
        self._validated_batches = 0  # minibatches evaluated since the last training step
        self._has_trained_in_epoch = False

    def bind(self, params: Any) -> None:
        """Make the parameters views of ``params``, f32[n_params]; move metrics to the device."""
        super().bind(params)
        for part in iter_lightning_modules(self._module):
            part._device = self._device
        for metric in iter_metrics(self._module):
            metric.to(self._device)

    def set_position(self, epoch: int, batch: int, batches: int) -> None:
        """Set the position of the next step: minibatch ``batch`` of ``batches`` in ``epoch``."""
        self._trainer.current_epoch = self._scaling.epoch = epoch
        self._trainer.batch, self._trainer.num_training_batches = batch, batches

    def keep_pace(self, workers: int, minibatches: int, counted: int) -> None:
        """Set the pace as other torch models do, and ``global_step`` to ``minibatches``."""
        super().keep_pace(workers, minibatches, counted)
        self._trainer.global_step = minibatches

    def _make_optimizer(self) -> OptimizerPair:
        """Return the optimizer and scheduler from the module's configure_optimizers."""
        self._trainer.fit_length = self._fit_length or UNKNOWN_LENGTH
        with self._trainer.attached(self._module, CONFIGURING):
            result = self._module.configure_optimizers()
        optimizer, scheduler = parse_optimizers(result, self._scaling)
        check_optimizer(optimizer, self._named_parameters)
        return optimizer, scheduler

    def _depends_on_fit_length(self) -> bool:
        """Return whether configure_optimizers has read the fit's length."""
        return self._trainer.has_read_length

    def _train_batch(self, optimizer: Optimizer, batch: TorchBatch, rows: int) -> torch.Tensor:
        """Train on one minibatch, with the module's hooks in Lightning's order; return the loss."""
        module: Any = self._module
        trainer, self._validated_batches = self._trainer, 0
        self._has_trained_in_epoch = True
        with trainer.attached(module, TRAINING):
            self._begin_epoch()
            step_batch, index = self._make_step_batch(batch), trainer.batch
            if module.on_train_batch_start(step_batch, index) == -1:
                raise UsageError(
                    f"{type(module).__name__}.on_train_batch_start returned -1: an epoch cannot be"
                    " skipped here, each minibatch is trained once; remove the rows from the data"
                )
            loss, outputs = self._call_training_step(step_batch, index)
            module.on_before_zero_grad(optimizer)
            optimizer.zero_grad()
            module.on_before_backward(loss)
            module.backward(loss)
            module.on_after_backward()
            module.on_before_optimizer_step(optimizer)
            step_optimizer(optimizer, require_gradients(self._named_parameters, self._clip_norm))
            trainer.global_step += 1
            module.on_train_batch_end(outputs, step_batch, index)
            self._end_batch()
        return loss.detach()

    def _skip_batch(self) -> None:
        """Count a minibatch whose rows all weigh 0; call no hooks but those of the epoch."""
        with self._trainer.attached(self._module, TRAINING):
            self._begin_epoch()
            self._end_batch()

    def _end_batch(self) -> None:
        """Count a minibatch; call the hook for the end of an epoch that has trained something."""
        if self._trainer.is_last_batch and self._has_trained_in_epoch:
            module: Any = self._module
            module.on_train_epoch_end()
            self._has_trained_in_epoch = False
        self._trainer.batch += 1

    def _begin_epoch(self) -> None:
        """Call the hooks for the start of training and of an epoch, before the first step of each.

        At the start of an epoch, also reset all metrics.
        """
        module: Any = self._module
        if self._started_epoch is None:
            module.on_train_start()
        if self._started_epoch != self._trainer.current_epoch:
            self._started_epoch = self._trainer.current_epoch
            self._reset_metrics()
            module.on_train_epoch_start()

    def _call_training_step(
        self, step_batch: Any, index: int
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        """Call training_step; return the loss, and the outputs for on_train_batch_end.

        Raise UsageError if training_step does not return a loss.
        """
        step = self._module.training_step
        with (
            explaining_shape_errors(step.__qualname__, STEP_REMEDY, batch=step_batch),
            self._autocast_context(),
        ):
            result = step(*make_step_arguments(step, step_batch, index))
        loss = result.get("loss") if isinstance(result, dict) else result
        if not (isinstance(loss, torch.Tensor) and loss.numel() == 1):
            raise UsageError(
                f"{step.__qualname__} returned {_describe_result(result)}: it must return the loss,"
                " the mean over rows, or a dict with it as `loss`; no minibatch is skipped here"
            )
        rest = result if isinstance(result, dict) else {}
        return loss, {**rest, "loss": loss.detach()}

    def need_loss(self) -> None:
        """Raise UsageError unless validation_step can evaluate the model on held-out rows."""
        require_validation_step(self._module)

    def loss(self, batch: Batch) -> tuple[float, float]:
        """Return (weight x the value that validation_step logs as ``monitor``, weight).

        The weight is the sum of the rows' weights, or the number of rows. With weight 0, nothing is
        computed. Raise UsageError if validation_step does not log that value.
        """
        self.need_loss()
        if not (weight := batch.total_weight):
            return 0.0, 0.0
        step_batch = self._make_step_batch(batch_to_device(self._device, batch))
        step = self._module.validation_step
        with (
            self._evaluation_mode(),
            self._trainer.attached(self._module, VALIDATING),
            explaining_shape_errors(step.__qualname__, STEP_REMEDY, batch=step_batch),
            self._autocast_context(),
        ):
            result = step(*make_step_arguments(step, step_batch, self._validated_batches))
        self._validated_batches += 1
        self._reset_metrics()
        value = self._trainer.get_logged_number(self._monitor)
        if value is None:
            logged = ", ".join(self._trainer.logged) or "nothing"
            raise UsageError(
                f"{step.__qualname__} logs {logged}, but not {self._monitor!r}: log it with"
                f" self.log({self._monitor!r}, loss), or pass LightningModel(module, monitor=...);"
                f" it returned {_describe_result(result)}"
            )
        return value * weight, weight

    def check(self, features: Columns, labels: Columns) -> None:
        """Raise UsageError, naming row and value, for rows that are not finite numbers."""
        rows = count_rows(features)
        check_rows(features, rows, "features")
        check_rows(labels, rows, "labels")

    def _predict_rows(self, features: Columns) -> Any:
        """Return the outputs of predict_step, or of forward without it, as NumPy arrays."""
        module, given = self._module, features_to_device(self._device, features)
        if not is_overridden(module, "predict_step") and not is_overridden(module, "forward"):
            raise UsageError(
                f"{type(module).__name__} has neither predict_step nor forward: implement one of"
                " them to predict"
            )
        with self._trainer.attached(module, PREDICTING), self._autocast_context():
            if not is_overridden(module, "predict_step"):
                return outputs_to_numpy(self._call_module(given))
            step = module.predict_step
            with explaining_shape_errors(step.__qualname__, STEP_REMEDY, batch=given):
                return outputs_to_numpy(step(*make_step_arguments(step, given, 0)))

    def _make_step_batch(self, batch: TorchBatch) -> Any:
        """Return the argument for the module's steps, changed by its batch-transfer hooks.

        Raise UsageError if rows have weights and the option ``batch`` was not given.
        """
        if self._make_batch is not None:
            step_batch = self._make_batch(batch)
        elif batch.weights is not None:
            raise UsageError(WEIGHTS_REMEDY)
        else:
            step_batch = make_default_batch(batch)
        module: Any = self._module
        return module.on_after_batch_transfer(module.on_before_batch_transfer(step_batch, 0), 0)

    def _reset_metrics(self) -> None:
        """Reset the state of all torchmetrics inside the module."""
        for metric in iter_metrics(self._module):
            metric.reset()


def make_default_batch(batch: TorchBatch) -> Any:
    """Return (features, labels), or one dict of both if both are dicts; the features if unlabelled.

    Raise UsageError if both dicts have the same key.
    """
    features, labels = batch.features, batch.labels
    if isinstance(labels, tuple) and not labels:
        return features
    if not (isinstance(features, dict) and isinstance(labels, dict)):
        return features, labels
    if both := sorted(set(features) & set(labels)):
        raise UsageError(f"{', '.join(both)} are in both features and labels: rename them")
    return {**features, **labels}


def _describe_result(result: Any) -> str:
    """Return the type of a step's result, with its shape or keys, for an error message."""
    if isinstance(result, torch.Tensor):
        return f"a tensor {list(result.shape)}"
    if isinstance(result, dict):
        return f"a dict of {sorted(map(str, result))}"
    return "nothing" if result is None else f"a {type(result).__name__}"
