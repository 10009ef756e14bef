"""Host fit: one fit on this machine, made of its master, its worker processes and who follows."""

from __future__ import annotations

import pickle
import secrets
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from sparkstrom.base.clock import SystemClock
from sparkstrom.codec.frames import KEY_BYTES, Seal
from sparkstrom.encoding.backends import warm_up
from sparkstrom.local.by_value import packed_by_value
from sparkstrom.local.dealt_rows import RowFile
from sparkstrom.local.fit_files import write_file
from sparkstrom.local.host_way import HostDriver, HostJob
from sparkstrom.local.orders import HOST, ShareGradients, WorkerOrder
from sparkstrom.local.process_job import ProcessJob
from sparkstrom.local.worker_pool import WorkerPool
from sparkstrom.models.base import FlatModel
from sparkstrom.observe.epochs import EpochBook
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.protocol.master.residual_checkpoints import CheckpointFiles
from sparkstrom.runtime.lent_state import LentStates
from sparkstrom.runtime.master_control import MasterControl
from sparkstrom.runtime.master_thread import MasterThread
from sparkstrom.runtime.theta import Theta
from sparkstrom.spark.driver.epoch_watch import EpochWatch
from sparkstrom.spark.driver.fit_call import Showing
from sparkstrom.spark.driver.fit_listeners import FitEvents, FitListener
from sparkstrom.spark.driver.fit_progress import FitProgress, ResidualLog
from sparkstrom.spark.driver.fit_site import TellingRun
from sparkstrom.spark.driver.fitting import Fitting
from sparkstrom.spark.driver.initial_parameters import pack
from sparkstrom.spark.driver.master_setup import limits_of, plan_of
from sparkstrom.spark.driver.training_master import SharedTrainingMaster
from sparkstrom.spark.executor.interfaces import warm_up_transport
from sparkstrom.spark.executor.task_place import TaskPlace

EXECUTOR = "host"  # all workers are one executor's


@dataclass(frozen=True)
class FileHandle:
    """What travels instead of a large value: the name of a file that holds it."""

    path: str

    @classmethod
    def of(cls, value: Any, path: Path) -> FileHandle:
        """Write it. Raise SetupError where there is no room."""
        write_file(path, pickle.dumps(value))
        return cls(str(path))

    @cached_property
    def value(self) -> Any:
        """Read once."""
        return pickle.loads(Path(self.path).read_bytes())


@dataclass(frozen=True, slots=True)
class HostSite:
    """What a wrapper trains, and with whom: the same for all its fits."""

    model: FlatModel
    master: SharedTrainingMaster
    name: str  # names the files that workers keep for the next fit
    pool: WorkerPool
    scratch: Path  # of the wrapper

    def place(self, partition: int, attempt: int) -> TaskPlace:
        """Of an attempt at a partition."""
        return TaskPlace(partition, attempt, HOST, EXECUTOR, self.scratch, self.pool.threads)


@dataclass(frozen=True, slots=True)
class Dealt:
    """The rows of a fit, and the directory that goes with it."""

    files: tuple[RowFile, ...]
    directory: Path


class HostFit(TellingRun):
    """A fit by gradient sharing; ``theta`` is this process' replica, then and afterwards."""

    def __init__(
        self,
        site: HostSite,
        spec: FitSpec,
        theta: Theta,
        dealt: Dealt,
        kept: CheckpointFiles,
        states: LentStates,
    ) -> None:
        warm_up()
        warm_up_transport()
        spec = spec.by_minibatches()
        self._site, self.spec, self.theta, self._dealt = site, spec, theta, dealt
        self.states = states
        self.book = EpochBook(spec.first_epoch)
        self._key = secrets.token_bytes(KEY_BYTES)
        self._driver = HostDriver.here(spec.job, spec.workers)
        options = site.master
        self.master: MasterControl = MasterThread(
            plan_of(spec, theta, site.model, options.void.max_chunk_size, kept),
            limits_of(options, spec.workers, theta.n_params),
            theta,
            open_transport=self._driver.opener(),
            seal=Seal.of_fit(self._key, spec.job),
            clock=SystemClock(),
        )

    sends_updates = True

    def run(self, showing: Showing, watch: EpochWatch, *others: FitListener) -> None:
        """To its end, good or bad; raise what ended it early."""
        job = packed_by_value(self._job())

        def order(partition: int, attempt: int) -> WorkerOrder:
            place = self._site.place(partition, attempt)
            return ShareGradients(job, place, self._dealt.files[partition])

        ours = [watch, FitProgress(showing.progress), ResidualLog(), showing.record]
        self._events = FitEvents(self.spec, [*ours, *others], self.book)
        Fitting(self.master, ProcessJob(self._site.pool, order), self._events).run()

    def _job(self) -> HostJob:
        site, directory, states = self._site, self._dealt.directory, self.states
        own = {  # of a checkpoint
            partition: FileHandle.of(state, directory / f"state-{partition}")
            for partition, state in states.own.items()
        }
        return HostJob(
            spec=self.spec,
            key=self._key,
            model=site.model,
            master=site.master,
            k=self.theta.k,
            layers=self.theta.layers,
            endpoint=self.master.endpoint,
            join_stream=self.master.join_stream,
            network=site.name,
            initial=FileHandle.of(pack(self.theta, states.one), directory / "initial"),
            own_states=own,
            driver=self._driver,
        )
