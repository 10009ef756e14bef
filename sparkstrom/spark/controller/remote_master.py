"""Remote master: stands for the master in the driver program when that runs in a Spark task.

What it tells comes over the task's TCP connection while the fit runs, and through Spark when it is
over; without a connection all of it comes at the end. It ends with the fit, whatever becomes of the
task: a task that is gone is a fit that has failed.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from typing import Any

from sparkstrom.base.errors import ControllerLost, SetupError, SparkstromError, TrainingError
from sparkstrom.base.identity import Endpoint
from sparkstrom.codec.messages import Phase
from sparkstrom.protocol.master.residual_checkpoints import CheckpointFiles
from sparkstrom.runtime.fit_state import Outcome, Progress, Snapshot
from sparkstrom.runtime.master_thread import any_join_stream
from sparkstrom.runtime.theta import Theta
from sparkstrom.spark.controller.control_door import ControlDoor
from sparkstrom.spark.controller.control_words import (
    ControllerResult,
    ControllerState,
    EndWanted,
    GiveUpWanted,
    LineOrder,
    SnapshotWanted,
    StopWanted,
    UpdatersWanted,
    of_parts,
    outcome_later,
    progress_later,
)
from sparkstrom.spark.controller.controller_job import PlacedController
from sparkstrom.spark.data.job_errors import cause_of
from sparkstrom.spark.driver.application import Application
from sparkstrom.spark.driver.fitting import END_S, cancelled_by
from sparkstrom.spark.driver.spark_job import SparkJob
from sparkstrom.spark.driver.start_watch import refusal_of
from sparkstrom.spark.executor.job import TrainingJob

log = logging.getLogger(__name__)

LOOK_S = 0.25
LINE_S = 10.0  # a connection that has not come by then is not expected any more
MEDIA_S = 3.0  # until its task has a media driver, as a rule; workers may begin before
SNAPSHOT_S = 60.0
RESULT_S = 600.0  # a result of gigabytes on a slow way
DROPPED_S = 30.0  # a controller that had a connection, and has been without it for so long

LOST = (
    "the controller is gone, with what was learnt since the last checkpoint ({place}): {cause}. "
    "Run the program again: with checkpoint_directory it goes on from the newest checkpoint; with "
    "controller='driver' the controller is in the driver program"
)
NO_LINE = (
    "the controller ({place}) gets no TCP connection to this program at {door}, and {needs} cannot "
    "do without: open that port (port_range fixes it, spark.driver.host says the address), leave "
    "{needs} out, or use controller='driver'"
)
SILENT = (
    "the controller ({place}) has no TCP connection to this program ({door}): progress and epochs "
    "come when the fit is over"
)
RAISED = re.compile(r"(?!org\.|java)[A-Za-z_][\w.]*(Error|Exception)(:|$)")  # by Python code
LIVE = "progress comes from the controller over TCP"


class RemoteMaster:
    """``opened`` finds it a place. ``theta`` becomes what was learnt, at the end."""

    def __init__(
        self, application: Application, theta: Theta, kept: CheckpointFiles, partitions: int
    ) -> None:
        self._application, self._theta, self._kept = application, theta, kept
        self.endpoint, self.join_stream = Endpoint("", 0), any_join_stream()
        self.finished = threading.Event()
        self.failure: SparkstromError | None = None
        self.progress = nothing_yet(partitions)
        self.knows_theta = False
        self._door: ControlDoor | None = None
        self._placed: PlacedController | None = None
        self._result: ControllerResult | None = None
        self._last: Snapshot | None = None
        self._ahead_s: float | None = None  # of the controller's clock
        self._news_heard = 0
        self._ending = threading.Event()
        self._watch: threading.Thread | None = None

    # -- its task --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def opened(
        self, job: TrainingJob, needs_live: Sequence[str], say: Callable[[str], None]
    ) -> Iterator[None]:
        """With the controller at work; ``endpoint`` is known then.

        ``needs_live``: options that cannot do without a connection. Raise SetupError where no
        executor can have it, or where there is none for these.
        """
        try:
            door = self._open_door(job, needs_live, say)
            line = LineOrder(door, job.key)
            placing = self._application.placing(job, self._kept, line, say)
            self._placed = placed = placing.run()
            self.endpoint = placed.place.endpoint
            say(f"sparkstrom: the controller is on {placed.place}")
            look = partial(self._look_after, placed.job, door)
            self._watch = self._application.thread(look, "sparkstrom-controller")
            self._watch.start()
            if needs_live:
                self._need_line(needs_live, door)
            elif self._door is not None:
                self._door.met.wait(MEDIA_S)  # so that workers need not be patient
            yield
        finally:
            self._close()

    def _open_door(
        self, job: TrainingJob, needs_live: Sequence[str], say: Callable[[str], None]
    ) -> Endpoint | None:
        """Where executors find it; None: there is none, and nothing needs one."""
        bind, host = self._application.door_address()
        try:
            self._door = ControlDoor(job.key, bind, job.master.void.controller_ports(), self._hear)
        except SetupError as error:
            if needs_live:
                raise
            say(f"sparkstrom warns: {error}")
            return None
        return Endpoint(host, self._door.port)

    def _need_line(self, needs_live: Sequence[str], door: Endpoint | None) -> None:
        assert self._door is not None, "without one it has been refused"
        until_s = time.monotonic() + LINE_S
        while not self._door.met.wait(LOOK_S):
            if self.failure is not None:
                raise self.failure
            if time.monotonic() > until_s:
                needs = " and ".join(needs_live)
                raise SetupError(NO_LINE.format(needs=needs, place=self._where(), door=door))

    # -- what it tells ---------------------------------------------------------------------------

    def _hear(self, state: ControllerState) -> None:
        """In the door's thread, or the one that looks after the task."""
        ahead_s = state.now_s - time.monotonic()
        # what takes longest on its way seems earliest
        self._ahead_s = ahead_s if self._ahead_s is None else max(self._ahead_s, ahead_s)
        progress = progress_later(state.progress, -self._ahead_s)
        told = progress.news[self._news_heard :]
        self._news_heard += len(told)
        self.progress = replace(progress, news=(*self.progress.news, *told))
        if state.finished and not self.finished.is_set():
            self.failure = state.failure
            self.finished.set()

    def _note(self, text: str) -> None:
        self.progress = replace(self.progress, news=(*self.progress.news, text))

    def _look_after(self, job: SparkJob, door: Endpoint | None) -> None:
        """Until the end, or until the task is gone."""
        said, began_s = False, time.monotonic()
        while not self._ending.is_set():
            over = job.wait(LOOK_S)
            met = self._door is not None and self._door.met.is_set()
            if not said and (over or met or time.monotonic() - began_s > LINE_S):
                said = True
                at = door or "no port could be had"
                self._note(LIVE if met else SILENT.format(place=self._where(), door=at))
            if over:
                self._take_result(job)
                return
            if job.tasks()[1]:
                self._lose(next(iter(job.task_errors()), "its task failed"))
                return
            if met and self._dropped_s() > DROPPED_S and not self.finished.is_set():
                self._lose(f"nothing heard from it for {self._dropped_s():.0f} s")
                return

    def _dropped_s(self) -> float:
        return 0.0 if self._door is None else time.monotonic() - self._door.heard_s

    def _has_line(self) -> bool:
        return self._door is not None and self._door.is_open

    def _where(self) -> str:
        return str(self._placed.place) if self._placed is not None else "no place"

    def _lose(self, cause: str) -> None:
        self._fail(refusal_of(cause) or self._lost(cause))

    def _lost(self, cause: str) -> TrainingError:
        """Another task would raise the same as one that has raised something."""
        place = self._where()
        text = LOST.format(place=place, cause=cause)
        if RAISED.match(cause):
            return TrainingError(text)
        return ControllerLost(text, f"{place}: {cause}")

    def _fail(self, error: SparkstromError) -> None:
        if not self.finished.is_set():
            self.failure = error
            self.finished.set()

    def _take_result(self, job: SparkJob) -> None:
        if self._result is not None:
            return
        if job.error is not None:
            if (cancelled := cancelled_by(job.error)) is not None:
                self._fail(cancelled)
            self._lose(cause_of(str(job.error)))
            return
        result = of_parts(job.reports)
        if not isinstance(result, ControllerResult):
            self._lose("Spark began its task again")
            return
        self._result, self._last = result, result.snapshot
        self._theta.load(result.snapshot.parameters)
        self._theta.buffers = result.snapshot.buffers
        self.knows_theta = True
        self._hear(result.state)

    # -- what the driver's main thread asks ------------------------------------------------------

    @property
    def answers(self) -> bool:
        """Its task has been heard of: it has a media driver, which answers workers."""
        return self._door is not None and self._door.met.is_set()

    @property
    def settles(self) -> bool:
        """Its task still runs, or its result is being read."""
        return self._watch is not None and self._watch.is_alive()

    @property
    def reachable(self) -> bool:
        """Is there a connection, so that a copy would come?"""
        return self._last is None and self._has_line()

    def start(self) -> None:
        """It has begun with its task."""

    def request_stop(self, reason: str) -> None:
        """As soon as there is a connection."""
        self._ask(StopWanted(reason))

    def give_up(self, reason: str) -> None:
        """As soon as there is a connection."""
        self._ask(GiveUpWanted(reason))

    def _ask(self, what: Any) -> Future[Any] | None:
        return None if self._door is None else self._door.ask(what)

    def snapshot(self, *, updaters: bool = False) -> Snapshot:
        """Over the connection, while the fit runs.

        Raise TrainingError where there is none in time, or what the fit has failed of.
        """
        answer = None if self._last is not None else self._ask(SnapshotWanted())
        until_s = time.monotonic() + SNAPSHOT_S
        while self._last is None and answer is not None and time.monotonic() < until_s:
            if wait([answer], LOOK_S).done and not answer.cancelled():
                copied: Snapshot = answer.result()
                return copied
            if self.failure is not None:
                raise self.failure
        if (last := self._last) is not None:
            return last
        raise TrainingError(
            f"the controller ({self._where()}) sent no parameters within {SNAPSHOT_S:.0f} s"
        )

    def copy_updaters(self, *, everybody: bool) -> Future[tuple[bytes, ...]]:
        """() where there is no connection, or it is gone before it could say."""
        copied: Future[tuple[bytes, ...]] = Future()
        answer = None if self._last is not None else self._ask(UpdatersWanted(everybody))
        if answer is None:
            copied.set_result(())
        else:
            answer.add_done_callback(
                lambda done: copied.set_result(() if done.cancelled() else done.result())
            )
        return copied

    @property
    def updater_copies(self) -> tuple[bytes, ...]:
        """They come with the result."""
        return () if self._result is None else self._result.updater_copies

    def end(self) -> None:
        """Have the task return, and take what it brings."""
        if self._placed is None or self._watch is None:
            return
        door, job = self._door, self._placed.job
        done = self.finished.is_set() and self.failure is None
        if door is not None and self._has_line():
            if not done:
                self._rescue()
            door.ask(EndWanted())
            self._watch.join(RESULT_S if done else END_S)
        elif done:
            self._watch.join(RESULT_S)
        if self._watch.is_alive():
            self._ending.set()
            job.cancel()
            job.wait(END_S)

    def _rescue(self) -> None:
        """What was learnt, of a fit that is being ended from outside."""
        answer = self._ask(SnapshotWanted())
        assert answer is not None, "there is a door"
        until_s = time.monotonic() + SNAPSHOT_S
        while not wait([answer], LOOK_S).done:
            if time.monotonic() > until_s or not self._has_line():
                log.warning("what was learnt does not come from the controller (%s)", self._where())
                return
        if answer.cancelled() or answer.exception() is not None:
            log.warning("the controller (%s) has no parameters to send", self._where())
            return
        self._last = copied = answer.result()
        self._theta.load(copied.parameters)
        self._theta.buffers = copied.buffers
        self.knows_theta = True

    def outcome(self) -> Outcome:
        """Raise TrainingError where the result did not come."""
        result = self._result
        if result is None or result.outcome is None:
            cause = str(self.failure) if self.failure is not None else "its result did not come"
            raise self._lost(cause)
        return outcome_later(result.outcome, -(self._ahead_s or 0.0))

    def _close(self) -> None:
        """Nothing of it runs any more."""
        self._ending.set()
        if self._placed is not None and self._placed.job.running:
            self._placed.job.cancel()
            self._placed.job.wait(END_S)
        if self._watch is not None:
            self._watch.join()
        if self._door is not None:
            self._door.close()


def nothing_yet(partitions: int) -> Progress:
    """Before anything is heard."""
    return Progress(Phase.GATHERING, 0, partitions, 0, 0, 0, 0, 0.0, {})
