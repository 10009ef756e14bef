"""Control, from the driver program, a fit's master thread that runs in a Spark task.

The master, also called the controller, coordinates the workers and numbers their updates.
``RemoteController`` has the same interface as a master in this program. During the fit, the task
sends the master's state over a TCP connection; the final state is part of the task's result.
Without a connection, the state arrives only at the end. The fit fails if the task is lost.
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
from typing import Any, Protocol

from sparkstrom.base.errors import ControllerLost, SetupError, SparkstromError, TrainingError
from sparkstrom.base.identity import Endpoint
from sparkstrom.codec.messages import Phase
from sparkstrom.fit.supervisor import TASKS_END_S, as_cancellation, find_cause, setup_error_in
from sparkstrom.protocol.master.members import CheckpointFiles
from sparkstrom.runtime.master_control import FitOutcome, Progress, Snapshot
from sparkstrom.runtime.master_thread import random_join_stream
from sparkstrom.runtime.theta import Theta
from sparkstrom.spark.controller.controller_placement import ControllerPlacer
from sparkstrom.spark.controller.driver_messages import (
    ControlEndpoint,
    ControllerResult,
    ControllerState,
    EndController,
    GetOptimizerStates,
    GetSnapshot,
    GiveUp,
    PlacedController,
    RequestStop,
    join_message,
    shift_outcome,
    shift_progress,
)
from sparkstrom.spark.controller.driver_server import ControlServer
from sparkstrom.spark.jobs import SparkJob
from sparkstrom.worker.training_job import TrainingJob

log = logging.getLogger(__name__)

TASK_POLL_S = 0.25
CONNECTION_TIMEOUT_S = 10.0  # a task that has not connected by then is assumed to be unable to
MEDIA_DRIVER_WAIT_S = 3.0  # wait this long for the task's media driver; workers may start without
SNAPSHOT_TIMEOUT_S = 60.0
RESULT_TIMEOUT_S = 600.0  # a result may be gigabytes over a slow network
DISCONNECTED_MAX_S = 30.0  # a controller that was silent for this long is considered lost

CONTROLLER_LOST = (
    "the controller ({place}) was lost, with the progress since the last checkpoint: {cause}. "
    "Run the program again: with checkpoint_directory it resumes from the newest checkpoint; with "
    "controller='driver' the controller is in the driver program"
)
CONNECTION_REQUIRED = (
    "the controller ({place}) gets no TCP connection to this program at {server}, which {needs} "
    "requires: open that port (port_range fixes it, spark.driver.host sets the address), leave "
    "{needs} out, or use controller='driver'"
)
NO_CONNECTION_NOTICE = (
    "the controller ({place}) has no TCP connection to this program ({server}): progress and "
    "epochs are shown when the fit is over"
)
# Matches the message of an error that Python code raised, not Spark or Java.
PYTHON_ERROR = re.compile(r"(?!org\.|java)[A-Za-z_][\w.]*(Error|Exception)(:|$)")
CONNECTED_NOTICE = "progress arrives from the controller over TCP"


class ControllerApplication(Protocol):
    """The part of a Spark application (``spark.application``) that runs a controller in a task."""

    def create_controller_placer(
        self,
        training: TrainingJob,
        checkpoints: CheckpointFiles,
        control: ControlEndpoint,
        notify: Callable[[str], None],
    ) -> ControllerPlacer:
        """Return an object whose ``run`` starts the controller in a Spark task.

        Args:
            training: What the workers' tasks receive.
            checkpoints: Files with residuals (changes not sent yet) that workers of the last fit
                left on executors.
            control: The address at which the controller connects to this program, and a key.
            notify: Shows the user a line of text.
        """
        ...

    def get_control_addresses(self) -> tuple[str, str]:
        """Return the address to listen on, and the address to which the controller connects.

        Both belong to this program's machine and serve the TCP connection with a controller that
        runs in a Spark task.
        """
        ...

    def create_thread(self, run: Callable[[], None], name: str) -> threading.Thread:
        """Return an unstarted thread that executes ``run``, which may call Spark."""
        ...


class RemoteController:
    """A ``MasterControl`` for a master that runs in a Spark task.

    ``run_in_task`` starts the task. At the end, ``theta`` holds the final parameters.
    """

    def __init__(
        self,
        application: ControllerApplication,
        theta: Theta,
        checkpoints: CheckpointFiles,
        partitions: int,
    ) -> None:
        """Store what the task will need; ``run_in_task`` starts the task.

        ``checkpoints`` are files that workers of the last fit left. ``partitions`` is the number of
        workers, for the progress that is shown before the task has sent any.
        """
        self._application, self._theta, self._checkpoints = application, theta, checkpoints
        self.endpoint, self.join_stream = Endpoint("", 0), random_join_stream()
        self.finished = threading.Event()
        self.failure: SparkstromError | None = None
        self.progress = create_initial_progress(partitions)
        self.has_final_parameters = False
        self._server: ControlServer | None = None
        self._placed: PlacedController | None = None
        self._result: ControllerResult | None = None  # of the task, once it has arrived
        self._last: Snapshot | None = None  # the final parameters, once they have arrived
        self._clock_offset_s: float | None = None  # the controller's clock minus ours
        self._news_count = 0  # number of the task's lines of news received so far
        self._ending = threading.Event()  # tells the monitor thread to stop
        self._is_ended = False  # whether ``end`` has asked a connected task to end
        self._monitor_thread: threading.Thread | None = None

    @contextlib.contextmanager
    def run_in_task(
        self, job: TrainingJob, needs_live: Sequence[str], notify: Callable[[str], None]
    ) -> Iterator[None]:
        """Run the controller in a Spark task during the block, in which ``endpoint`` is valid.

        ``needs_live`` names the user's options that require a TCP connection to the task. Raise
        SetupError if no executor can host the controller, or if such a connection is required and
        the task cannot connect.
        """
        try:
            server = self._open_server(job, needs_live, notify)
            control = ControlEndpoint(server, job.key)
            placer = self._application.create_controller_placer(
                job, self._checkpoints, control, notify
            )
            self._placed = placed = placer.run()
            self.endpoint = placed.place.endpoint
            notify(f"sparkstrom: the controller is on {placed.place}")
            monitor = partial(self._monitor_task, placed.job, server)
            self._monitor_thread = self._application.create_thread(monitor, "sparkstrom-controller")
            self._monitor_thread.start()
            if needs_live:
                self._require_connection(needs_live, server)
            elif self._server is not None:
                self._server.was_connected.wait(
                    MEDIA_DRIVER_WAIT_S
                )  # so that workers need not wait for the media driver
            yield
        finally:
            self._close()

    def _open_server(
        self, job: TrainingJob, needs_live: Sequence[str], notify: Callable[[str], None]
    ) -> Endpoint | None:
        """Listen for the controller; return the address for executors, or None if no port is free.

        ``needs_live`` names the options that require a connection. If no port is free, raise
        SetupError if there are such options; otherwise pass a warning to ``notify``.
        """
        bind, host = self._application.get_control_addresses()
        try:
            self._server = ControlServer(
                job.key, bind, job.master.void.controller_ports(), self._receive_state
            )
        except SetupError as error:
            if needs_live:
                raise
            notify(f"sparkstrom warns: {error}")
            return None
        return Endpoint(host, self._server.port)

    def _require_connection(self, needs_live: Sequence[str], server: Endpoint | None) -> None:
        """Wait for the task to connect; raise SetupError if this takes ``CONNECTION_TIMEOUT_S``.

        Raise the fit's failure if the fit fails first.
        """
        assert self._server is not None, "_open_server raises without one"
        until_s = time.monotonic() + CONNECTION_TIMEOUT_S
        while not self._server.was_connected.wait(TASK_POLL_S):
            if self.failure is not None:
                raise self.failure
            if time.monotonic() > until_s:
                needs = " and ".join(needs_live)
                raise SetupError(
                    CONNECTION_REQUIRED.format(
                        needs=needs, place=self._describe_place(), server=server
                    )
                )

    def _receive_state(self, state: ControllerState) -> None:
        """Update progress and failure from a received state. Called from two threads."""
        offset_s = state.now_s - time.monotonic()
        # The fastest message so far gives the best estimate of the clocks' difference.
        self._clock_offset_s = (
            offset_s if self._clock_offset_s is None else max(self._clock_offset_s, offset_s)
        )
        progress = shift_progress(state.progress, -self._clock_offset_s)
        news = progress.news[self._news_count :]
        self._news_count += len(news)
        self.progress = replace(progress, news=(*self.progress.news, *news))
        if state.finished and not self.finished.is_set():
            self.failure = state.failure
            self.finished.set()

    def _add_news(self, text: str) -> None:
        """Add a line of text that the fit's progress display will show."""
        self.progress = replace(self.progress, news=(*self.progress.news, text))

    def _monitor_task(self, job: SparkJob, server: Endpoint | None) -> None:
        """Watch the task until it returns its result; fail the fit if the task is lost.

        Also add a line to the progress display that tells whether the task has connected to this
        program at ``server``, which is None if no port was free.
        """
        is_notified, start_s = False, time.monotonic()
        was_silent = False  # after a suspension of this process, messages are read by the next poll
        while not self._ending.is_set():
            is_over = job.wait(TASK_POLL_S)
            was_connected = self.has_connected
            if not is_notified and (
                is_over or was_connected or time.monotonic() - start_s > CONNECTION_TIMEOUT_S
            ):
                is_notified = True
                address = server or "no port was free"
                self._add_news(
                    CONNECTED_NOTICE
                    if was_connected
                    else NO_CONNECTION_NOTICE.format(place=self._describe_place(), server=address)
                )
            if is_over:
                self._take_result(job)
                return
            if job.count_tasks()[1]:
                self._fail_as_lost(next(iter(job.task_errors()), "its task failed"))
                return
            is_silent = was_connected and self._silence_s() > DISCONNECTED_MAX_S
            if is_silent and was_silent and not self.finished.is_set():
                self._fail_as_lost(f"no message from it for {self._silence_s():.0f} s")
                return
            was_silent = is_silent

    def _silence_s(self) -> float:
        """Return the seconds since the last message; 0.0 if there is no server."""
        return 0.0 if self._server is None else time.monotonic() - self._server.heard_s

    def _is_connected(self) -> bool:
        """Return whether the task is connected now."""
        return self._server is not None and self._server.is_open

    def _describe_place(self) -> str:
        """Return the executor on which the controller runs, as text for messages."""
        return str(self._placed.place) if self._placed is not None else "no place"

    def _fail_as_lost(self, cause: str) -> None:
        """Fail the fit because the task is lost or cannot run on its machine, due to ``cause``."""
        self._fail(setup_error_in(cause) or self._create_lost_error(cause))

    def _create_lost_error(self, cause: str) -> TrainingError:
        """Return the error for a lost controller: ControllerLost if a new controller may be tried.

        If ``cause`` is a Python error that the task raised, another task would raise it again, so
        the result is a plain TrainingError.
        """
        place = self._describe_place()
        text = CONTROLLER_LOST.format(place=place, cause=cause)
        if PYTHON_ERROR.match(cause):
            return TrainingError(text)
        return ControllerLost(text, f"{place}: {cause}")

    def _fail(self, error: SparkstromError) -> None:
        """Finish the fit with an error, unless the fit has already finished."""
        if not self.finished.is_set():
            self.failure = error
            self.finished.set()

    def _take_result(self, job: SparkJob) -> None:
        """Take over the finished task's result. Without a result, the fit fails."""
        if self._result is not None:
            return
        if job.error is not None:
            if (cancelled := as_cancellation(job.error)) is not None:
                self._fail(cancelled)
            self._fail_as_lost(find_cause(str(job.error)))
            return
        result = join_message(job.reports)
        if not isinstance(result, ControllerResult):
            self._fail_as_lost("Spark restarted its task")
            return
        self._result, self._last = result, result.snapshot
        self._theta.load(result.snapshot.parameters)
        self._theta.buffers = result.snapshot.buffers
        self.has_final_parameters = True
        self._receive_state(result.state)

    @property
    def has_connected(self) -> bool:
        """Whether the task has ever connected; its media driver then answers workers."""
        return self._server is not None and self._server.was_connected.is_set()

    @property
    def drains_after_tasks(self) -> bool:
        """Whether the task runs or its result is being read, so that the fit may yet finish."""
        return self._monitor_thread is not None and self._monitor_thread.is_alive()

    @property
    def is_reachable(self) -> bool:
        """Whether the controller is connected, so that it can respond to requests."""
        return self._last is None and self._is_connected()

    def start(self) -> None:
        """Do nothing: the Spark task starts the master."""

    def request_stop(self, reason: str) -> None:
        """Send a stop request. Without a connection, it is delivered after the task connects."""
        self._send_request(RequestStop(reason))

    def give_up(self, reason: str) -> None:
        """Send a request to give up. Without a connection, it is delivered later."""
        self._send_request(GiveUp(reason))

    def _send_request(self, request: Any) -> Future[Any] | None:
        """Send a request; return the future of its response, or None without a server."""
        return None if self._server is None else self._server.ask(request)

    def acknowledge(self, progress: Progress) -> None:
        """Do nothing: gradient sharing does not wait for observers."""

    def snapshot(self, *, updaters: bool = False) -> Snapshot:
        """Fetch a snapshot over the connection; after the fit, return the last one.

        ``updaters`` is ignored. Raise TrainingError if no snapshot arrives in time, or the error
        with which the fit failed.
        """
        answer = None if self._last is not None else self._send_request(GetSnapshot())
        deadline_s = time.monotonic() + SNAPSHOT_TIMEOUT_S
        while self._last is None and answer is not None and time.monotonic() < deadline_s:
            if wait([answer], TASK_POLL_S).done and not answer.cancelled():
                copied: Snapshot = answer.result()
                return copied
            if self.failure is not None:
                raise self.failure
        if (last := self._last) is not None:
            return last
        raise TrainingError(
            f"the controller ({self._describe_place()}) sent no parameters within "
            f"{SNAPSHOT_TIMEOUT_S:.0f} s"
        )

    def copy_optimizer_states(self, *, everybody: bool) -> Future[tuple[bytes, ...]]:
        """Request encoded optimizer states of one worker, or of all if ``everybody``.

        Return a future with them, or with () if they cannot be fetched.
        """
        copied: Future[tuple[bytes, ...]] = Future()
        answer = (
            None if self._last is not None else self._send_request(GetOptimizerStates(everybody))
        )
        if answer is None:
            copied.set_result(())
        else:

            def resolve(done: Future[tuple[bytes, ...]]) -> None:
                """Pass on the states; () and a log entry if the request failed."""
                error = None if done.cancelled() else done.exception()
                if error is not None:
                    log.warning("the controller sent no optimizer states: %s", error)
                copied.set_result(() if done.cancelled() or error else done.result())

            answer.add_done_callback(resolve)
        return copied

    @property
    def optimizer_copies(self) -> tuple[bytes, ...]:
        """The workers' encoded optimizer states; () until the task's result has arrived."""
        return () if self._result is None else self._result.optimizer_copies

    def end(self) -> None:
        """End the task and take its result; cancel the task if that takes too long. Idempotent.

        If the fit did not succeed, fetch the parameters first.
        """
        if self._placed is None or self._monitor_thread is None:
            return
        if self._is_ended or self._ending.is_set():
            return
        server, job = self._server, self._placed.job
        has_succeeded = self.finished.is_set() and self.failure is None
        if server is not None and self._is_connected():
            if not has_succeeded:
                self._fetch_last_snapshot()
            self._is_ended = True
            server.ask(EndController())
            self._monitor_thread.join(RESULT_TIMEOUT_S if has_succeeded else TASKS_END_S)
        elif has_succeeded:
            self._monitor_thread.join(RESULT_TIMEOUT_S)
        if self._monitor_thread.is_alive():
            self._ending.set()
            job.cancel()
            job.wait(TASKS_END_S)

    def _fetch_last_snapshot(self) -> None:
        """Fetch the parameters of a fit that did not succeed; log a warning if none arrive."""
        answer = self._send_request(GetSnapshot())
        assert answer is not None, "is_connected implies a server"
        deadline_s = time.monotonic() + SNAPSHOT_TIMEOUT_S
        while not wait([answer], TASK_POLL_S).done:
            if time.monotonic() > deadline_s or not self._is_connected():
                log.warning(
                    "no parameters arrived from the controller (%s)", self._describe_place()
                )
                return
        if answer.cancelled() or answer.exception() is not None:
            log.warning("the controller (%s) has no parameters to send", self._describe_place())
            return
        self._last = copied = answer.result()
        self._theta.load(copied.parameters)
        self._theta.buffers = copied.buffers
        self.has_final_parameters = True

    def outcome(self) -> FitOutcome:
        """Return the fit's outcome. Raise TrainingError if the result did not arrive."""
        result = self._result
        if result is None or result.outcome is None:
            cause = str(self.failure) if self.failure is not None else "its result did not arrive"
            raise self._create_lost_error(cause)
        return shift_outcome(result.outcome, -(self._clock_offset_s or 0.0))

    def _close(self) -> None:
        """Cancel the task if it is still running, and stop all threads."""
        self._ending.set()
        if self._placed is not None and self._placed.job.running:
            self._placed.job.cancel()
            self._placed.job.wait(TASKS_END_S)
        if self._monitor_thread is not None:
            self._monitor_thread.join()
        if self._server is not None:
            self._server.close()


def create_initial_progress(partitions: int) -> Progress:
    """Return the progress to show before any state of the fit has been received."""
    return Progress(Phase.GATHERING, 0, partitions, 0, 0, 0, 0, 0.0, {})
