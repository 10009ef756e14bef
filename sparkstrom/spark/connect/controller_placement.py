"""Start the controller, which coordinates a fit's workers, in a Spark task over Spark Connect.

A short task proposes its executor as the place (see ``spark.controller.controller_placement``).
Spark Connect has no preferred locations, but Spark prefers to run a task where the partition that
it reads is cached. So the row that the short task yields is cached, and the controller's task reads
that row. Spark Connect does not report on tasks either, so another short task probes by UDP whether
the controller has started.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

from sparkstrom.base.errors import NetworkError
from sparkstrom.fit.master_setup import MediaDriverConfig
from sparkstrom.fit.supervisor import TASKS_END_S
from sparkstrom.options.network import ControllerChoice, VoidConfiguration
from sparkstrom.spark.connect.jobs import RESULT_SCHEMA, ConnectJob, collect_later, run_rowless_task
from sparkstrom.spark.controller.controller_placement import (
    Candidate,
    ControllerPlacer,
    raise_job_error,
)
from sparkstrom.spark.controller.driver_messages import (
    ControlEndpoint,
    ControllerPlace,
    PlacementMismatch,
)
from sparkstrom.spark.controller.reachability import (
    TOKEN_BYTES,
    ProbeResult,
    ReachabilityProbe,
    probe_controller,
)
from sparkstrom.spark.controller.task import propose_place, run_controller_task
from sparkstrom.spark.executor.entry_points import LazyPickle
from sparkstrom.spark.jobs import SparkJob

PROBE_TIMEOUT_S = 25.0  # a Python worker may have to start first, on either side
CONTROLLER_UNREACHABLE = (
    "the executor on {host} has the controller at {place}, and an executor on {asking} gets no "
    "answer from it by UDP: allow UDP between executors in both directions, or name the network "
    "that they share (network_mask)"
)


def propose_place_of_fit(
    fit: int, void: VoidConfiguration, choice: ControllerChoice, items: Iterable[Any]
) -> Iterator[ControllerPlace | PlacementMismatch]:
    """Run ``propose_place``; the unused argument ``fit`` makes this fit's DataFrame unique.

    Spark shares one cache among identical DataFrames, so another fit that starts at the same time
    would otherwise get the same executor and port.
    """
    return propose_place(void, choice, items)


class ConnectControllerPlacer(ControllerPlacer):
    """Places the controller's task with DataFrames of a Spark Connect session."""

    @contextlib.contextmanager
    def _propose(self) -> Iterator[Candidate]:
        """Run a task that proposes its executor; yield this place, with a row cached there.

        The row stays cached until the block ends.
        """
        void, fit = self.training.master.void, self.training.spec.job
        frame = self._single_task_frame(partial(propose_place_of_fit, fit, void, self._choice))
        try:
            frame.persist()  # inside ``try``: an interrupted call may have taken effect
            (place,) = self._run_short_job(self._make_job("controllers place", frame))
            yield Candidate(place, frame, secrets.token_bytes(TOKEN_BYTES))
        finally:
            frame.unpersist()

    def _make_controller_job(
        self,
        candidate: Candidate,
        routes: tuple[ControlEndpoint, MediaDriverConfig],
        setup: LazyPickle,
    ) -> SparkJob:
        """Return the unstarted job that runs the controller where the candidate's row is cached."""
        task = partial(run_controller_task, routes, candidate.place.process, setup)
        run = partial(run_rowless_task, task)
        return self._make_job("controller", candidate.rows.mapInArrow(run, RESULT_SCHEMA))

    def _wait_for_start(self, job: SparkJob, candidate: Candidate) -> None:
        """Wait until a task on an executor gets an answer from the controller, or ``job`` ends.

        ``job`` is the controller's job. Raise NetworkError if the controller does not answer.
        """
        void, place = self.training.master.void, candidate.place
        probe = ReachabilityProbe(place.endpoint, candidate.token, void, PROBE_TIMEOUT_S)
        frame = self._single_task_frame(partial(probe_controller, probe))
        asking = self._make_job("asking the controller", frame)
        asking.start()
        try:
            self._wait_until(lambda: not (asking.running and job.running))
        finally:
            asking.cancel()
            asking.wait(TASKS_END_S)
        if not job.running:
            return
        raise_job_error(asking)
        answer: ProbeResult = asking.reports[0]
        if not answer.heard:
            raise NetworkError(
                CONTROLLER_UNREACHABLE.format(
                    host=place.host, place=place.endpoint, asking=answer.host
                )
            )

    def _single_task_frame(self, task: Callable[[Iterable[Any]], Iterator[Any]]) -> Any:
        """Return a DataFrame with the encoded results of ``task``, run as a single Spark task."""
        run = partial(run_rowless_task, task)
        return self.context.range(0, 1, 1, 1).mapInArrow(run, RESULT_SCHEMA)

    def _make_job(self, name: str, frame: Any) -> ConnectJob:
        """Return an unstarted job that computes a DataFrame; the job's tag contains ``name``."""
        group = f"sparkstrom-{self.training.spec.job:016x}-{name.replace(' ', '-')}"
        return ConnectJob(self.context, group, collect_later(frame))
