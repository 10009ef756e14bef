"""Listener thread: users' listeners hear of a fit, in order, in a thread that nothing waits for.

The fit's looks are turned into events and queued. A listener that is slow is told less often: of
iterations that wait only the newest stays. What one raises ends the fit at the next look, by the
listener's name, unless it says that it is not worth that.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sparkstrom.base.errors import TrainingError, UsageError
from sparkstrom.base.option_types import shown
from sparkstrom.codec.messages import Phase
from sparkstrom.observe.epochs import Epoch
from sparkstrom.observe.listening.fit_events import (
    CheckpointWritten,
    EpochEnd,
    Event,
    FitBegin,
    FitEnd,
    Iteration,
    WorkerChange,
    WorkerSays,
)
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.runtime.fit_state import Progress
from sparkstrom.runtime.heard_lines import WorkerLine
from sparkstrom.spark.driver.fit_listeners import FitListener
from sparkstrom.spark.driver.fit_progress import iteration_now
from sparkstrom.spark.driver.summary import TrainingSummary

log = logging.getLogger(__name__)

LOST = "the controller was lost, and all workers with it"
LAST_WORDS_S = 120.0  # so long may listeners work after the end of training
METHODS: dict[type[Event], str] = {
    FitBegin: "on_fit_begin",
    Iteration: "on_iteration",
    WorkerChange: "on_worker_change",
    WorkerSays: "on_worker_says",
    EpochEnd: "on_epoch",
    CheckpointWritten: "on_checkpoint",
    FitEnd: "on_fit_end",
}


@dataclass(frozen=True, slots=True)
class Raised:
    """What a listener raised, and where."""

    where: str  # ListenerClass.method
    error: Exception

    def as_error(self) -> TrainingError:
        kind = type(self.error).__name__
        trace = "".join(traceback.format_exception(self.error))
        return TrainingError(
            f"listener {self.where} raised {kind}: {self.error}; mend it, or give it"
            " fails_fit = False to train on without it",
            trace=trace,
        )


def check_listeners(listeners: Sequence[Any]) -> None:
    """Raise UsageError for an object that has none of the methods, and for what is no sequence."""
    if isinstance(listeners, str) or not isinstance(listeners, Sequence):
        raise UsageError(f"listeners={shown(listeners)}: must be a list of listeners, or ()")
    for listener in listeners:
        known = [name for name in METHODS.values() if callable(getattr(listener, name, None))]
        if isinstance(listener, type) or not known:
            raise UsageError(
                f"listeners: {shown(listener)} hears nothing: give an object with one of "
                f"{', '.join(METHODS.values())} (sparkstrom.listeners has some)"
            )


def broken_stream() -> str:
    """Return "stdout" or "stderr" if it cannot be written any more, as its flush tells; else ""."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            return name
    return ""


class ListenerThread(FitListener):
    """Hears a fit in the driver's main thread, and tells the users' listeners in its own."""

    def __init__(
        self,
        listeners: Sequence[Any],
        begin: FitBegin,
        spec: FitSpec,
        *,
        copy: Callable[[], Any],
        judge: Callable[..., Any],
        say: Callable[[str], None],
    ) -> None:
        self._listeners, self._begin, self._spec, self._say = list(listeners), begin, spec, say
        self.warnings: list[str] = []  # of listeners that failed and did not end the fit
        self._copy, self._judge = copy, judge
        self._has_lost_stream = False
        self._queue: deque[Event | None] = deque()
        self._there = threading.Condition()
        self._raised: Raised | None = None
        self._began_s = time.monotonic()
        self._training: frozenset[int] = frozenset()
        self._departures = 0
        self._minibatches = -1
        self._thread = threading.Thread(target=self._run, name="sparkstrom-listeners", daemon=True)

    # -- in the driver's main thread -------------------------------------------------------------

    def on_fit_begin(self, spec: FitSpec) -> None:
        """Listeners hear of one fit, also where it goes on with another controller."""
        self._spec = spec
        if self._thread.ident is None:
            self._thread.start()
            self._put(self._begin)
            return
        left, self._training, self._departures = self._training, frozenset(), 0
        if left:
            self._put(WorkerChange(frozenset(), left, frozenset(), self._seconds(), (LOST,)))

    def on_worker_says(self, line: WorkerLine) -> None:
        said = WorkerSays(line.partition, line.host, line.phase, line.text, self._seconds())
        self._put(said)

    def on_epoch(self, epoch: Epoch) -> None:
        held_out = epoch.validation if epoch.held_weight else None
        self._put(
            EpochEnd(
                epoch.epoch,
                epoch.loss,
                held_out,
                epoch.examples,
                self._seconds(),
                self._copy,
                self._judge,
            )
        )

    def tell(self, event: CheckpointWritten) -> None:
        """What no look at the master shows."""
        self._put(replace(event, seconds=self._seconds()))

    def on_progress(self, progress: Progress) -> None:
        """Raise what a listener raised since the last look."""
        if self._raised is not None:
            raise self._raised.as_error() from self._raised.error
        self._tell_workers(progress)
        if progress.minibatches != self._minibatches:
            self._minibatches = progress.minibatches
            self._put(iteration_now(progress, self._spec, self._seconds()))

    def _tell_workers(self, progress: Progress) -> None:
        if progress.phase is Phase.DONE:  # everybody goes, which is no news
            return
        new = progress.departures[self._departures :]
        self._departures = len(progress.departures)
        left = (self._training - progress.training) | {one.partition for one in new}
        joined = progress.training - (self._training - left)  # also who took over at once
        self._training = progress.training
        if joined or left:
            reasons = tuple(f"partition {d.partition} on {d.host}: {d.reason}" for d in new)
            self._put(WorkerChange(joined, left, self._training, self._seconds(), reasons))

    def follow(self, fit: Callable[[], TrainingSummary]) -> TrainingSummary:
        """Run a fit, whose end is heard whether it is good or bad."""
        try:
            summary = fit()
        except BaseException as error:
            self._close(None, (str(error).splitlines() or [type(error).__name__])[0])
            raise
        self._close(summary, None)
        if self._raised is not None:  # too late to end the fit
            self._warn(str(self._raised.as_error()).splitlines()[0])
        summary.warnings.extend(self.warnings)
        return summary

    def _close(self, summary: TrainingSummary | None, why: str | None) -> None:
        """The fit is over: listeners hear so, and have their time."""
        if self._thread.ident is None:  # it failed before anything began
            return
        self._put(FitEnd(summary, why, self._seconds()))
        self._put(None)
        self._thread.join(LAST_WORDS_S)
        if self._thread.is_alive():
            self._warn(f"listeners are still busy {LAST_WORDS_S:.0f} s after the end; going on")

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
        log.warning("%s", text)
        self._say(f"sparkstrom warns: {text}")

    def _warn_of_stream(self, name: str, error: Exception) -> None:
        """Once: what a listener prints from now on is lost, and it still hears the fit."""
        if not self._has_lost_stream:
            self._has_lost_stream = True
            self._warn(
                f"sys.{name} cannot be written ({type(error).__name__}: {error}): what listeners"
                " print there is lost, and the fit continues"
            )

    def _seconds(self) -> float:
        return round(time.monotonic() - self._began_s, 3)

    def _put(self, event: Event | None) -> None:
        with self._there:
            waits = self._queue[-1] if self._queue else None
            if isinstance(event, Iteration) and isinstance(waits, Iteration):
                self._queue.pop()
            self._queue.append(event)
            self._there.notify()

    # -- in a thread of its own ------------------------------------------------------------------

    def _run(self) -> None:
        while (event := self._next()) is not None:
            method = METHODS[type(event)]
            for listener in list(self._listeners):
                self._tell(listener, method, event)

    def _next(self) -> Event | None:
        with self._there:
            self._there.wait_for(lambda: bool(self._queue))
            return self._queue.popleft()

    def _tell(self, listener: Any, method: str, event: Event) -> None:
        hears = getattr(listener, method, None)
        if hears is None:
            return
        try:
            hears(event)
        except Exception as error:  # handed to the main thread, or told
            if isinstance(error, (OSError, ValueError)) and (broken := broken_stream()):
                self._warn_of_stream(broken, error)
                return
            self._listeners.remove(listener)
            raised = Raised(f"{type(listener).__name__}.{method}", error)
            if getattr(listener, "fails_fit", True):
                self._raised = self._raised or raised
            else:
                self._warn(
                    f"listener {raised.where} raised {type(error).__name__}: {error}; it hears"
                    " nothing more of this fit"
                )
