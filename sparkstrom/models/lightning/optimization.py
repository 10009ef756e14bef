"""Optimization: what configure_optimizers returned, and where its scheduler is in the fit."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from sparkstrom.base.errors import UsageError
from sparkstrom.models.torch.pacing import EPOCH, INTERVALS, Pacing

IGNORED = ("name", "strict", "monitor", "reduce_on_plateau")  # they say nothing here
OPTIONS = ("scheduler", "interval", "frequency")
ONE_OPTIMIZER = "training_step is called once in a step here: return one optimizer"


def configured(answer: Any, pacing: Pacing) -> tuple[Optimizer, LRScheduler | None]:
    """Optimizer and scheduler that configure_optimizers returned; the pacing learns its interval.

    Raise UsageError naming what of it cannot be done here.
    """
    optimizers, schedulers = _parted(answer)
    if len(optimizers) != 1 or not isinstance(optimizers[0], Optimizer):
        kinds = ", ".join(type(one).__name__ for one in optimizers) or "nothing"
        raise UsageError(f"configure_optimizers returned {kinds}: {ONE_OPTIMIZER}")
    if len(schedulers) > 1:
        raise UsageError(
            f"configure_optimizers returned {len(schedulers)} schedulers: join them to one"
            " (torch.optim.lr_scheduler.ChainedScheduler, SequentialLR)"
        )
    return optimizers[0], _scheduler(schedulers[0], pacing) if schedulers else None


def _parted(answer: Any) -> tuple[list[Any], list[Any]]:
    """The forms that Lightning knows: lists of optimizers and of schedulers."""
    if isinstance(answer, dict):
        unknown = set(answer) - {"optimizer", "lr_scheduler", "monitor"}
        if unknown or "optimizer" not in answer:
            raise UsageError(
                f"configure_optimizers returned a dict of {sorted(answer)}: it must have optimizer,"
                " and may have lr_scheduler"
            )
        schedulers = [answer["lr_scheduler"]] if answer.get("lr_scheduler") is not None else []
        return [answer["optimizer"]], schedulers
    if not isinstance(answer, list | tuple):
        return ([] if answer is None else [answer]), []
    if len(answer) == 2 and all(isinstance(part, list | tuple) for part in answer):
        return list(answer[0]), list(answer[1])
    if len(answer) == 1 and isinstance(answer[0], dict):
        return _parted(answer[0])
    return list(answer), []


def _scheduler(given: Any, pacing: Pacing) -> LRScheduler:
    options = given if isinstance(given, dict) else {"scheduler": given}
    scheduler = options.get("scheduler")
    unknown = sorted(set(options) - {*OPTIONS, *IGNORED})
    if unknown:
        raise UsageError(f"lr_scheduler has {', '.join(unknown)}: it may have {', '.join(OPTIONS)}")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise UsageError(
            "lr_scheduler is a ReduceLROnPlateau: no metric of all workers is there while they"
            " train; take a schedule by steps or epochs, as CosineAnnealingLR"
        )
    if not isinstance(scheduler, LRScheduler):
        raise UsageError(
            f"lr_scheduler is a {type(scheduler).__name__}: it must be one of"
            " torch.optim.lr_scheduler, or a dict with `scheduler`"
        )
    # Lightning's own default is an epoch.
    interval, frequency = options.get("interval", EPOCH), options.get("frequency", 1)
    if interval not in INTERVALS:
        raise UsageError(f"lr_scheduler has interval={interval!r}: it must be step or epoch")
    if not (isinstance(frequency, int) and frequency >= 1):
        raise UsageError(f"lr_scheduler has frequency={frequency!r}: it must be 1 or above")
    pacing.interval, pacing.frequency = interval, frequency
    return scheduler
