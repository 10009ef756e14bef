"""Module hooks: which of a LightningModule's methods are called here, and what refuses the others.

Both packages, ``lightning`` and ``pytorch_lightning``, have a class LightningModule of their own;
neither is imported here, a user's module brings its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel

from sparkstrom.base.errors import UsageError

BASES = {"lightning", "pytorch_lightning"}
ROWS_COME = "rows come from fit(data); make layers in __init__ or configure_model"
NOT_SAVED = (
    "network.save writes parameters and buffers: make what it adds a buffer (register_buffer)"
)
OWN_STEP = "for a step of your own take TorchModel(module, None, optimizer, step=...)"
REMOVED = "Lightning 2 has no such hook: take on_train_batch_end and on_train_epoch_end"
IN_PREDICT_STEP = "do it in predict_step"

# What would have to be called, and is not -> what to do instead.
REFUSED = {
    "optimizer_step": OWN_STEP,
    "optimizer_zero_grad": OWN_STEP,
    "lr_scheduler_step": "take a scheduler that steps by itself (torch.optim.lr_scheduler)",
    "configure_gradient_clipping": "pass LightningModel(module, clip_norm=...)",
    "configure_callbacks": "callbacks are Lightning's: pass fit(early_stopping=, listeners=)",
    "configure_sharded_model": "each worker has all parameters: make layers in configure_model",
    "transfer_batch_to_device": "tensors are there already: take on_after_batch_transfer",
    "setup": ROWS_COME,
    "teardown": "a worker's process ends with its task",
    "on_fit_start": "take on_train_start",
    "on_fit_end": "do it after fit has returned, with network.module",
    "on_train_end": "do it after fit has returned, with network.module",
    "on_save_checkpoint": NOT_SAVED,
    "on_load_checkpoint": NOT_SAVED,
    "on_predict_start": IN_PREDICT_STEP,
    "on_predict_end": IN_PREDICT_STEP,
    "on_predict_batch_start": IN_PREDICT_STEP,
    "on_predict_batch_end": IN_PREDICT_STEP,
    "on_predict_model_eval": IN_PREDICT_STEP,
    "on_predict_epoch_start": IN_PREDICT_STEP,
    "on_predict_epoch_end": IN_PREDICT_STEP,
    "training_epoch_end": REMOVED,
    "training_step_end": REMOVED,
}

# The same, where rows are held out or scored.
REFUSED_IN_VALIDATION = (
    *("on_validation_start", "on_validation_end", "on_validation_model_zero_grad"),
    *("on_validation_batch_start", "on_validation_batch_end", "on_validation_model_eval"),
    *("on_validation_epoch_start", "on_validation_epoch_end", "on_validation_model_train"),
    *("validation_epoch_end", "validation_step_end"),
)


def base_of(module: Any) -> type | None:
    """Lightning's own class that this module inherits from; None where it is none of them."""
    for kind in type(module).__mro__:
        if kind.__name__ == "LightningModule" and kind.__module__.partition(".")[0] in BASES:
            return kind
    return None


def lightning_parts(module: nn.Module) -> Iterator[Any]:
    """The module, and the LightningModules inside."""
    return (part for part in module.modules() if base_of(part) is not None)


def metrics_of(module: nn.Module) -> Iterator[Any]:
    """The torchmetrics inside; their states are neither parameters nor buffers."""
    for part in module.modules():
        kinds = type(part).__mro__
        if any(k.__module__ == "torchmetrics.metric" and k.__name__ == "Metric" for k in kinds):
            yield part


def has_own(module: Any, name: str) -> bool:
    """Has the user written this method?"""
    mine, theirs = getattr(type(module), name, None), getattr(base_of(module), name, None)
    return name in vars(module) or (mine is not None and mine is not theirs)


def check_module(module: Any) -> None:
    """Raise UsageError naming what a module has that would not be done here."""
    kind = type(module).__name__
    if base_of(module) is None:
        raise UsageError(
            f"module is a {kind}: pass a LightningModule, not compiled; TorchModel takes other"
            " modules"
        )
    if not module.automatic_optimization:
        raise UsageError(f"{kind}.automatic_optimization is False: {OWN_STEP}")
    for name in ("training_step", "configure_optimizers"):
        if not has_own(module, name):
            raise UsageError(f"{kind} has no {name}: a LightningModel trains by it; write one")
    for name, remedy in REFUSED.items():
        if has_own(module, name):
            raise UsageError(f"{kind}.{name} would not be called here: {remedy}")
    for name, part in module.named_modules():
        if isinstance(part, AveragedModel):
            raise UsageError(
                f"{kind}.{name} is an AveragedModel: as a parameter each worker would average it"
                " anew; average after the fit, or take the parameters of the best epoch"
                " (early_stopping)"
            )
    for name in ("training_step", "validation_step"):
        if has_own(module, name):
            arguments(getattr(module, name), None, 0)


def need_validation(module: Any) -> None:
    """Raise UsageError where held-out rows cannot be measured as Lightning would."""
    kind = type(module).__name__
    if not has_own(module, "validation_step"):
        raise UsageError(
            f"{kind} has no validation_step to measure held-out rows with: write one that logs"
            " val_loss, or leave validation out"
        )
    for name in REFUSED_IN_VALIDATION:
        if has_own(module, name):
            raise UsageError(
                f"{kind}.{name} would not be called here: held-out rows are measured minibatch by"
                " minibatch; compute the figure in validation_step, or take network.evaluate"
            )


def arguments(step: Callable[..., Any], batch: Any, index: int) -> tuple[Any, ...]:
    """What training_step and its kin are given. Raise UsageError where they want other things."""
    wanted = inspect.signature(step).parameters
    given = (batch, index) if len(wanted) > 1 else (batch,)
    try:
        inspect.signature(step).bind(*given)
    except TypeError as error:
        wanted_names = ", ".join(wanted)
        raise UsageError(
            f"{step.__qualname__}({wanted_names}) cannot be called with a batch and its number:"
            f" {error}; it must be (batch, batch_idx)"
        ) from error
    if "dataloader_iter" in wanted:
        raise UsageError(f"{step.__qualname__} takes a dataloader_iter: take (batch, batch_idx)")
    return given
