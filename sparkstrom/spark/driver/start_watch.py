"""Start watch: says what a fit's start waits for, and ends one that waits in vain."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from sparkstrom.base.errors import NetworkError, SetupError
from sparkstrom.base.identity import Endpoint
from sparkstrom.codec.messages import Phase
from sparkstrom.runtime.fit_state import Progress
from sparkstrom.spark.driver.controller_choice import who_is_master
from sparkstrom.spark.driver.discovery import VoidConfiguration
from sparkstrom.spark.driver.fit_listeners import FitListener
from sparkstrom.spark.executor.reaching import ports_in_words

if TYPE_CHECKING:
    from sparkstrom.spark.driver.spark_job import SparkJob

QUEUED_S = 10.0  # how often a job that waits for slots says so
REFUSALS_S = 0.5  # how often to look whether a host cannot take part

NO_MODULE = "ModuleNotFoundError"
REFUSALS = {  # by how a traceback writes them
    f"{refusal.__module__}.{refusal.__name__}: ": refusal for refusal in (SetupError, NetworkError)
}
CODE_IS_MISSING = (
    "Executors lack code that the model or the rows are made of: send it (spark-submit --py-files, "
    "sc.addPyFile), install it there, or define it in the script or notebook itself"
)
NETWORK_IS_CLOSED = (
    "If they heard nothing from the master: open UDP between executors and driver in both "
    "directions, and name the network that both share (network_mask, controller_address)"
)


class StartWatch(FitListener):
    """Says now and then what the start waits for; ends a fit whose tasks fail before it."""

    def __init__(
        self,
        job: SparkJob,
        say: Callable[[str], None],
        controller: Endpoint,
        void: VoidConfiguration,
    ) -> None:
        self._job, self._say, self._controller, self._void = job, say, controller, void
        self._who = who_is_master(void.controller)
        self._due_s = time.monotonic() + QUEUED_S
        self._refusals_due_s = time.monotonic() + REFUSALS_S
        self._failed = 0  # tasks, when their errors were looked at
        self._said = ""

    def on_progress(self, progress: Progress) -> None:
        """Raise NetworkError for a host that cannot take part, SetupError when nobody can."""
        if progress.phase is not Phase.GATHERING:
            return
        if time.monotonic() > self._refusals_due_s:
            self._refusals_due_s = time.monotonic() + REFUSALS_S
            self._look_for_refusals(progress)
        if time.monotonic() > self._due_s:
            self._due_s = time.monotonic() + QUEUED_S
            self._look_for_failures(progress)

    def _look_for_refusals(self, progress: Progress) -> None:
        """Of the network: what Spark starts there again finds the same."""
        if progress.deaf:
            here, there, who = self._controller, progress.deaf[0], self._who
            raise NetworkError(
                f"the {who} at {here} hears the executor at {there}, which does not hear the "
                f"{who}: UDP from {here.host} to {there.host} is dropped; ask whoever has the "
                "firewalls (or security groups) of both hosts to allow UDP from "
                f"{here.host} to {there.host} {ports_in_words(self._void, there.port)}"
            )
        _, failed = self._job.tasks()
        if failed == self._failed:
            return
        self._failed = failed
        refusals = [refusal_of(error) for error in self._job.task_errors()]
        closed = [str(each) for each in refusals if isinstance(each, NetworkError)]
        if closed:
            raise NetworkError(closed[0] + _whose(len(closed), progress, self._who))

    def _look_for_failures(self, progress: Progress) -> None:
        running, failed = self._job.tasks()
        if failed and not progress.joined:
            error = next(iter(self._job.task_errors()), "Spark does not say why")
            if (refusal := refusal_of(error)) is not None:
                raise refusal
            remedy = CODE_IS_MISSING if NO_MODULE in error else NETWORK_IS_CLOSED
            if killed := self._job.killed_for_memory():
                remedy = sentence(killed[-1])
            raise SetupError(
                f"{failed} tasks failed before any worker joined: {error}"
                f" (more in the executors' logs: stderr in Spark's UI, `yarn logs`). {remedy}"
            )
        text = (
            f"sparkstrom waits: {progress.workers} of {progress.partitions} workers joined"
            + ("" if running is None else f", {running} tasks have a slot")
            + ("; the job is queued behind others, or executors are missing" * (running == 0))
        )
        if text != self._said:  # the same is no news: the phase with its seconds is shown anyway
            self._said = text
            self._say(text)


def _whose(hosts: int, progress: Progress, who: str) -> str:
    """Is it the master's host, or theirs?"""
    others = f"; {hosts - 1} more say so" if hosts > 1 else ""
    if not progress.joined:
        return f"{others}; nobody has joined so far"
    there = f"{progress.joined} of {progress.partitions} workers have joined"
    return f"{others}; {there}, so it is not the {who}'s host"


def sentence(text: str) -> str:
    """Which follows another one."""
    return text[:1].upper() + text[1:]


def refusal_of(cause: str) -> SetupError | None:
    """Where a task refused to begin because of its machine: its error."""
    for written, refusal in REFUSALS.items():
        if cause.startswith(written):
            return refusal(cause.removeprefix(written))
    return None
