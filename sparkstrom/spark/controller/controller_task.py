"""Controller task: the master of a fit in a Spark task of its own, on an executor.

The same master thread as in the driver program, with its replica and its media driver. The driver
program talks to it over a TCP connection, where the task can make one; without it the fit runs all
the same, and what it has to say comes with the task's result.
"""

from __future__ import annotations

import time
from pathlib import Path

from sparkstrom.base.clock import SystemClock
from sparkstrom.encoding.backends import warm_up
from sparkstrom.runtime.master_thread import MasterThread
from sparkstrom.spark.controller.control_words import ControllerOrder, ControllerResult
from sparkstrom.spark.controller.controller_line import ControllerLine
from sparkstrom.spark.driver.master_setup import limits_of, media_of, plan_of
from sparkstrom.spark.executor.interfaces import opener, warm_up_transport
from sparkstrom.spark.executor.tasks import initial_theta

LEAVE_S = 15.0  # how long workers may take to leave a fit that is done
TOLD_S = 8.0  # one that has failed: to all who still speak; they do not take leave
ABSENT_S = 60.0  # a driver program that had a connection may be without one at the end


class ControllerSession:
    """One fit's."""

    def __init__(self, order: ControllerOrder, line: ControllerLine) -> None:
        warm_up()
        warm_up_transport()
        job, place = order.job, order.place
        theta = initial_theta(job)
        void = job.master.void
        media = media_of(job.spec, void, place.endpoint, Path(place.scratch))
        self.master = MasterThread(
            plan_of(job.spec, theta, job.model, void.max_chunk_size, order.kept, job.join_stream),
            limits_of(job.master, job.spec.workers, job.spec.n_params),
            theta,
            open_transport=opener(media.key, media.options),
            seal=job.seal(),
            clock=SystemClock(),
        )
        self._line = line
        line.master = self.master

    def run(self) -> ControllerResult:
        """Until the fit is over and all have left, or the driver program ends it."""
        self.master.start()
        try:
            while not self._is_over():
                self._line.serve()
        finally:
            self.master.end()
            self._line.close()
        state = self._line.state()
        done = state.finished and state.failure is None
        return ControllerResult(
            state,
            self.master.outcome() if done else None,
            self.master.snapshot(),
            self.master.updater_copies,
        )

    def _is_over(self) -> bool:
        line, master = self._line, self.master
        if line.ended:
            return True
        if not master.finished.is_set():
            return False
        passed_s = time.monotonic() - line.finished_s
        if line.is_open:
            return passed_s > LEAVE_S + ABSENT_S
        if line.was_open and passed_s < ABSENT_S:  # it comes back, to say that it is over
            return False
        if master.failure is not None:
            return passed_s > TOLD_S
        return not master.is_needed or passed_s > LEAVE_S
