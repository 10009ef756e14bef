"""Listeners that DL4J's users know by name: score, performance, remaining time, evaluation."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable
from typing import Any

from sparkstrom.base.option_types import COUNT_MAX, KEY, whole
from sparkstrom.observe.listening.fit_events import (
    EpochEnd,
    FitBegin,
    FitEnd,
    Iteration,
    TrainingListener,
    WorkerChange,
)

log = logging.getLogger("sparkstrom.listeners")

Say = Callable[[str], None]


def say_line(text: str) -> None:
    """Log a line at level INFO; where logging shows no such records, write it to stderr.

    Without this, a program that has not configured logging would see nothing of its listeners.
    """
    if log.isEnabledFor(logging.INFO) and _has_handlers(log):
        log.info("%s", text)
        return
    with contextlib.suppress(OSError, ValueError, AttributeError):  # a closed or missing stderr
        bars = sys.modules.get("tqdm")  # its write keeps a progress bar below the line
        if bars is not None:
            bars.tqdm.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)


def _has_handlers(logger: logging.Logger | None) -> bool:
    """Return whether a record of ``logger`` reaches a handler that shows it."""
    while logger is not None:
        if any(not isinstance(each, logging.NullHandler) for each in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


class Every:
    """Says when ``every`` more have come; raises UsageError for less than 1."""

    def __init__(self, name: str, every: int) -> None:
        every = whole(1, COUNT_MAX)[KEY].read(name, every)
        self._every, self._next = every, every

    def reset(self) -> None:
        self._next = self._every

    def is_due(self, count: int) -> bool:
        """Of several that came at once one is enough."""
        if count < self._next:
            return False
        self._next = (count // self._every + 1) * self._every
        return True


class Frequent(TrainingListener):
    """Does something every so often; a second fit counts anew."""

    def __init__(self, frequency: int) -> None:
        self._due = Every("frequency", frequency)

    def on_fit_begin(self, event: FitBegin) -> None:
        self._due.reset()


class ScoreIterationListener(Frequent):
    """Logs the loss every ``frequency`` minibatches of the fit. DL4J: ``ScoreIterationListener``.

    ``say`` takes each line; by default it goes to the log ``sparkstrom.listeners``, level INFO,
    or to stderr where the program shows no such records.
    """

    def __init__(self, frequency: int = 100, say: Say = say_line) -> None:
        super().__init__(frequency)
        self._say = say

    def on_iteration(self, event: Iteration) -> None:
        if event.loss is not None and self._due.is_due(event.minibatches):
            self._say(f"loss at minibatch {event.minibatches:,} is {event.loss:.6g}")


class PerformanceListener(Frequent):
    """Logs examples and minibatches per second since its last line. DL4J: the same name."""

    def __init__(self, frequency: int = 100, say: Say = say_line) -> None:
        super().__init__(frequency)
        self._say = say
        self._last: Iteration | None = None

    def on_fit_begin(self, event: FitBegin) -> None:
        super().on_fit_begin(event)
        self._last = None

    def on_iteration(self, event: Iteration) -> None:
        if not self._due.is_due(event.minibatches):
            return
        last, self._last = self._last, event
        since_s = event.seconds - (last.seconds if last else 0.0)
        if since_s <= 0:
            return
        examples = event.examples - (last.examples if last else 0)
        minibatches = event.minibatches - (last.minibatches if last else 0)
        self._say(
            f"minibatch {event.minibatches:,}: {examples / since_s:,.0f} examples/s,"
            f" {minibatches / since_s:,.1f} minibatches/s, {event.bytes_sent / 1e6:.2f} MB sent,"
            f" {event.workers} of {event.workers_wanted} workers"
        )


class TimeIterationListener(Frequent):
    """Logs how long the fit will take from now on. DL4J: ``TimeIterationListener``."""

    def __init__(self, frequency: int = 100, say: Say = say_line) -> None:
        super().__init__(frequency)
        self._say = say
        self._first: Iteration | None = None

    def on_fit_begin(self, event: FitBegin) -> None:
        super().on_fit_begin(event)
        self._first = None

    def on_iteration(self, event: Iteration) -> None:
        self._first = first = self._first or event  # the start is no part of the pace
        done = event.minibatches - first.minibatches
        if not done or not self._due.is_due(event.minibatches):
            return
        left_s = remaining_s(first, event)
        self._say(f"remaining: {left_s / 60:.0f} min {left_s % 60:.0f} s")


def remaining_s(first: Iteration, now: Iteration) -> float:
    """Seconds to the end at the pace since ``first``; there is some."""
    pace = (now.seconds - first.seconds) / (now.minibatches - first.minibatches)
    return max(0.0, pace * (now.minibatches_expected - now.minibatches))


class CollectScoresListener(Frequent):
    """Keeps (minibatches, loss) pairs in ``scores``. DL4J: ``CollectScoresIterationListener``."""

    def __init__(self, frequency: int = 1) -> None:
        super().__init__(frequency)
        self.scores: list[tuple[int, float]] = []

    def on_iteration(self, event: Iteration) -> None:
        if event.loss is not None and self._due.is_due(event.minibatches):
            self.scores.append((event.minibatches, event.loss))


class EvaluativeListener(Frequent):
    """Evaluates rows of your own every ``frequency`` epochs. DL4J: ``EvaluativeListener``.

    On the driver, beside the training, under the parameters of that moment: give some thousand
    rows, not all. ``results`` holds (epoch, evaluation); ``metrics`` as ``network.evaluate`` has.
    """

    def __init__(
        self,
        features: Any,
        labels: Any,
        *,
        frequency: int = 1,
        metrics: Any = None,
        say: Say = say_line,
    ) -> None:
        super().__init__(frequency)
        self._rows, self._metrics, self._say = (features, labels), metrics, say
        self._epochs = 0
        self.results: list[tuple[int, Any]] = []

    def on_fit_begin(self, event: FitBegin) -> None:
        super().on_fit_begin(event)
        self._epochs = 0

    def on_epoch(self, event: EpochEnd) -> None:
        self._epochs += 1
        if not self._due.is_due(self._epochs):
            return
        found = event.evaluate(*self._rows, self._metrics)
        self.results.append((event.epoch, found))
        self._say(f"epoch {event.epoch}:\n{found.table()}")


class WorkerLog(TrainingListener):
    """Tells at once who was lost and who has come back; part of every fit that shows progress."""

    fails_fit = False

    def __init__(self, say: Say) -> None:
        self._say = say
        self._lost: set[int] = set()

    def on_worker_change(self, event: WorkerChange) -> None:
        for reason in event.reasons:
            self._say(f"sparkstrom lost a worker: {reason}")
        lost = self._lost | event.left
        for partition in sorted(event.joined & lost):
            self._say(f"sparkstrom goes on: partition {partition} has another worker")
        self._lost = lost - event.joined

    def on_fit_end(self, event: FitEnd) -> None:
        self._lost.clear()
