"""Host way: one media driver for the calling process and all its workers, so edges are IPC."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from sparkstrom.spark.executor.interfaces import OpenTransport, opener
from sparkstrom.spark.executor.job import TrainingJob
from sparkstrom.spark.executor.reaching import WayToController
from sparkstrom.spark.executor.task_place import TaskPlace
from sparkstrom.transport.aeron.driver import DriverOptions
from sparkstrom.transport.aeron.processes import Watched, watched

LOOPBACK = "127.0.0.1"  # joins go over it, and nothing else
EDGES_OVER_UDP = 2  # joins and their answers are short


@dataclass(frozen=True, slots=True)
class HostDriver:
    """The media driver of one fit: all of its processes ask for the same."""

    job: int
    workers: int
    owner: Watched  # the calling process: without it the driver ends

    @classmethod
    def here(cls, job: int, workers: int) -> HostDriver:
        """Of a fit of this process."""
        return cls(job, workers, watched(os.getpid()))

    @property
    def key(self) -> str:
        return f"{self.job:016x}-host"

    def options(self, *, alone: bool = False) -> DriverOptions:
        """``alone``: who closes it last, and so waits for its end."""
        return DriverOptions(
            host=LOOPBACK,
            edges=EDGES_OVER_UDP,
            local_edges=self.workers,
            scratch=Path(tempfile.gettempdir()),
            watch=self.owner,
            alone=alone,
        )

    def opener(self) -> OpenTransport:
        """For the calling process, which leaves it last."""
        return opener(self.key, self.options(alone=True))


@dataclass(frozen=True, slots=True)
class WayOnHost(WayToController):
    """From a worker to the master: the same media driver."""

    driver: HostDriver | None = None

    def driver_key(self, place: TaskPlace) -> str:
        """The same for all."""
        assert self.driver is not None, "it leads over one"
        return self.driver.key

    def driver_options(self, place: TaskPlace) -> DriverOptions:
        """The same for all. Whoever starts the next one does so on the port of the one before."""
        assert self.driver is not None, "it leads over one"
        return replace(self.driver.options(), port_preferred=self.endpoint.port)


@dataclass(frozen=True, slots=True)
class HostJob(TrainingJob):
    """A training job whose workers are processes of this machine."""

    driver: HostDriver | None = None

    @property
    def way(self) -> WayToController:
        """Over the one media driver."""
        assert self.driver is not None, "a fit on one machine has one"
        void, workers = self.master.void, self.spec.workers
        edges = EDGES_OVER_UDP, workers
        return WayOnHost(self.spec.job, self.endpoint, void, *edges, driver=self.driver)
