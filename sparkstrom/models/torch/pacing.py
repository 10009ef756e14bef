"""Pacing: an optimizer's momentum and a scheduler's position, counted in the fit's minibatches.

The groups hold the user's own values, but for the length of a step: so schedulers, saved states and
whoever looks at them see these, and what a scheduler makes of a momentum is what is raised next.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim import lr_scheduler as schedulers
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    LRScheduler,
    ReduceLROnPlateau,
    SequentialLR,
)

from sparkstrom.base.errors import UsageError
from sparkstrom.models.horizons import TORCH, changed, raised
from sparkstrom.models.torch.statistics import paced

STEP, EPOCH = INTERVALS = ("step", "epoch")
# As the tutorials and the documentation of torch step them.
BY_EPOCH_KINDS = (
    schedulers.StepLR,
    schedulers.MultiStepLR,
    schedulers.ExponentialLR,
    schedulers.MultiplicativeLR,
    schedulers.CosineAnnealingLR,
    schedulers.PolynomialLR,
)
FALL_MAX = 1_000  # of the learning rate within the first epoch, before there is a warning
STEPS_TRIED_MAX = 20_000  # of a schedule, to see how far it falls: some tenths of a second

BY_MINIBATCH_WORDS = (
    "each minibatch of the fit (with horizon='worker' or parameter averaging, of its own worker"
    " only), over all epochs and fits: make it longer, or pass scheduler_interval='epoch'"
)
BY_FIT = "steps by the fit's minibatches"
BY_EPOCHS = "steps by epochs"
BY_LOSS = "steps once after each minibatch of its worker, by the loss"


class Pacing:
    """How fast a worker's optimizer forgets, and where its scheduler is.

    The scheduler steps once in ``frequency`` minibatches of the fit, or epochs of its worker.
    """

    def __init__(self) -> None:
        self.interval, self.frequency = STEP, 1
        self.epoch = 0
        self._own = 0  # steps, where nobody tells the fit's
        self._workers = 1
        self._minibatches: int | None = None  # of the fit; None: nobody tells, own steps count
        self._counted = 0

    def keep(self, workers: int, minibatches: int, counted: int) -> None:
        """So many train now; the fit is about there, and surely as far as ``counted``."""
        self._workers, self._minibatches, self._counted = workers, minibatches, counted

    @contextlib.contextmanager
    def step(self, optimizer: Optimizer, scheduler: LRScheduler | None) -> Iterator[None]:
        """Around a minibatch: the schedule is where the fit is, and the groups forget in time."""
        if self._minibatches is not None or self.interval == EPOCH:
            self._reach(scheduler, self._minibatches or 0)
        if self._workers == 1:
            yield
            return
        own = _raise(optimizer, self._workers)
        try:
            yield
        finally:
            for group, key, before, meanwhile in own:
                if group[key] is meanwhile:  # otherwise a step of the user's has set it
                    group[key] = before

    def statistics(self, module: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Around a minibatch: BatchNorm's statistics forget in time, too."""
        return paced(module, self._workers)

    def scheduled(self, scheduler: LRScheduler | None, loss: float) -> None:
        """After a minibatch. Raise UsageError where the schedule is too short."""
        self._own += 1
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step(loss)
        elif self.interval == EPOCH:
            return  # it steps when the next epoch begins
        elif self._minibatches is not None:
            self._reach(scheduler, self._minibatches + 1)
        elif scheduler is not None and self._own % self.frequency == 0:
            _advance(scheduler, self.interval)

    def fall_within(self, batches: int, made: tuple[Optimizer, LRScheduler | None]) -> float:
        """Return by which factor a fresh scheduler lets the rate fall in an epoch, at least 1.

        The rate of the epoch's last minibatch is compared: a decay that reaches 0 after it does
        not count. ``batches``: minibatches of a worker's epoch. ``made`` is stepped here, so pass
        one that is used for nothing else.
        """
        optimizer, scheduler = made
        if scheduler is None or isinstance(scheduler, ReduceLROnPlateau) or self.interval == EPOCH:
            return 1.0
        first = highest_rate(optimizer)
        with _in_any_order(), contextlib.suppress(UsageError):
            for _ in range(min(batches * self._workers - 1, STEPS_TRIED_MAX)):
                _advance(scheduler, self.interval)
        last = highest_rate(optimizer)
        return max(1.0, first / last) if last > 0 else float("inf")

    def _reach(self, scheduler: LRScheduler | None, minibatches: int) -> None:
        """Go on to this position; never back.

        Workers that are a little beyond the end, by an estimate, stay at the end.
        """
        if scheduler is None or isinstance(scheduler, ReduceLROnPlateau):
            return
        at, surely = position_of(scheduler), self._place(self._counted)
        # In rounds, a worker's new optimizer may start in the middle of a schedule, so torch's
        # warning about the order of steps is suppressed.
        first = at == 0 or self._own == 0
        with _in_any_order() if first else contextlib.nullcontext():
            for position in range(at + 1, self._place(minibatches) + 1):
                before = scheduler.state_dict()
                try:
                    _advance(scheduler, self.interval)
                except UsageError:
                    if position <= surely:
                        raise
                    scheduler.load_state_dict(before)
                    return

    def _place(self, minibatches: int) -> int:
        """Where a schedule is when the fit has done so many minibatches."""
        return (self.epoch if self.interval == EPOCH else minibatches) // self.frequency


def highest_rate(optimizer: Optimizer) -> float:
    """Return the highest learning rate of its groups."""
    return float(max(group["lr"] for group in optimizer.param_groups))


def check_interval(interval: Any, scheduler: LRScheduler | None) -> None:
    """Raise UsageError for an interval that is none, or does not go with the scheduler."""
    if interval is None:
        interval_of(scheduler)
    elif interval not in INTERVALS:
        raise UsageError(f"scheduler_interval={interval!r}: must be 'epoch', 'step' or None")
    elif scheduler is None:
        raise UsageError(f"scheduler_interval={interval!r} without a scheduler: pass scheduler=")
    elif interval == EPOCH and isinstance(scheduler, ReduceLROnPlateau):
        raise UsageError(
            "scheduler_interval='epoch' with ReduceLROnPlateau: here it steps by the loss of each"
            " minibatch; take a schedule by epochs, such as CosineAnnealingLR, or leave it out"
        )


def interval_of(scheduler: LRScheduler | None) -> str:
    """Return "epoch" for schedules that are written by epochs as a rule, "step" for others.

    Raise UsageError for a sequence or chain whose parts differ.
    """
    if isinstance(scheduler, SequentialLR | ChainedScheduler):
        each = {interval_of(part) for part in scheduler._schedulers}
        if len(each) > 1:
            names = ", ".join(type(part).__name__ for part in scheduler._schedulers)
            raise UsageError(
                f"scheduler {type(scheduler).__name__} of {names}: some of these are written by"
                " epochs as a rule and some by minibatches; pass scheduler_interval='epoch' or"
                " scheduler_interval='step'"
            )
        return each.pop()
    return EPOCH if isinstance(scheduler, BY_EPOCH_KINDS) else STEP


def _raise(optimizer: Optimizer, workers: int) -> list[tuple[dict[str, Any], str, Any, Any]]:
    """Set what follows; return each group, key, the user's value and the one that holds now."""
    own = []
    for group in optimizer.param_groups:
        for key, value in _following(group):
            group[key] = _raised(key, value, workers)
            own.append((group, key, value, group[key]))
    return own


def _following(group: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(key, group[key]) for key in TORCH if group.get(key)]


def _raised(key: str, value: Any, workers: int) -> Any:
    places = TORCH[key]
    if places is None:
        return raised(value, workers)
    each = (raised(v, workers) if i in places else v for i, v in enumerate(value))
    return type(value)(each)


def position_of(scheduler: LRScheduler) -> int:
    """How many minibatches it has seen."""
    if isinstance(scheduler, ChainedScheduler):  # it keeps none of its own
        return position_of(scheduler._schedulers[0])
    return int(scheduler.last_epoch)


@contextlib.contextmanager
def _in_any_order() -> Iterator[None]:
    """Without torch's warning of a scheduler before the first step: who joins late needs that."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
        yield


def _advance(scheduler: LRScheduler, interval: str) -> None:
    try:
        scheduler.step()
    except ValueError as error:
        when = (
            BY_MINIBATCH_WORDS if interval == STEP else "each epoch, over all fits: make it longer"
        )
        raise UsageError(
            f"scheduler {type(scheduler).__name__}: {error}; it steps once after {when}"
        ) from error


def told(optimizer: Optimizer, scheduler: LRScheduler | None, workers: int) -> dict[str, str]:
    """What is changed where so many train, for people."""
    what: dict[str, str] = {}
    for group in optimizer.param_groups:
        for key, value in _following(group):
            places = TORCH[key]
            values = [value] if places is None else [value[place] for place in places]
            text = ", ".join(changed(v, workers) for v in values)
            what[key] = text if what.get(key, text) == text else f"{what[key]}; {text}"
    if scheduler is not None:
        what["scheduler"] = BY_LOSS if isinstance(scheduler, ReduceLROnPlateau) else BY_FIT
    return what
