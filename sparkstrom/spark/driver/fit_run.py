"""Fit run: one fit, made of its master, its Spark job and who follows it."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Mapping, Sequence

from sparkstrom.base.clock import SystemClock
from sparkstrom.codec.frames import KEY_BYTES, Seal
from sparkstrom.encoding.backends import warm_up
from sparkstrom.observe.epochs import EpochBook
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.protocol.master.residual_checkpoints import CheckpointFiles
from sparkstrom.runtime.lent_state import LentStates
from sparkstrom.runtime.master_control import MasterControl
from sparkstrom.runtime.master_thread import MasterThread
from sparkstrom.runtime.theta import Theta
from sparkstrom.spark.controller.remote_master import RemoteMaster
from sparkstrom.spark.data.partitioning import Spread
from sparkstrom.spark.driver.container_memory import Need
from sparkstrom.spark.driver.controller_choice import parse_controller
from sparkstrom.spark.driver.epoch_watch import EpochWatch
from sparkstrom.spark.driver.fit_call import Showing
from sparkstrom.spark.driver.fit_listeners import FitEvents, FitListener
from sparkstrom.spark.driver.fit_progress import FitProgress, ResidualLog
from sparkstrom.spark.driver.fit_site import TellingRun, TrainingSite
from sparkstrom.spark.driver.fitting import Fitting
from sparkstrom.spark.driver.initial_parameters import Handle, StateHandle
from sparkstrom.spark.driver.master_setup import driver_transport, limits_of, plan_of
from sparkstrom.spark.driver.memory_parts import demand_of
from sparkstrom.spark.driver.spark_job import SparkJob
from sparkstrom.spark.driver.start_watch import StartWatch
from sparkstrom.spark.driver.training_master import SharedTrainingMaster
from sparkstrom.spark.executor.interfaces import driver_address, warm_up_transport
from sparkstrom.spark.executor.job import TrainingJob


class FitRun(TellingRun):
    """One fit that is about to begin; ``theta`` is the driver's replica, then and afterwards."""

    def __init__(
        self,
        site: TrainingSite[SharedTrainingMaster],
        spec: FitSpec,
        theta: Theta,
        spread: Spread,
        checkpoints: CheckpointFiles,
        states: LentStates,
    ) -> None:
        self._site, self.theta, self._spread = site, theta, spread
        self.spec = spec = spec.by_minibatches()
        self.states = states  # that workers begin with
        self._key = secrets.token_bytes(KEY_BYTES)
        self.book = EpochBook(spec.first_epoch)
        self._remote = self._elsewhere(checkpoints)
        self.master: MasterControl = self._remote or self._local(checkpoints)

    sends_updates = True

    @property
    def epochs_complete(self) -> int:
        """That all who train have come to the end of, so far; of what ``theta`` is."""
        return super().epochs_complete if self.master.knows_theta else 0

    def run(self, showing: Showing, watch: EpochWatch, *others: FitListener) -> None:
        """To its end, good or bad; raise what ended it early."""
        say = showing.progress.say
        application, states = self._site.application, self.states
        with (
            application.travelling(self.theta, self.spec.workers, states.one) as initial,
            application.own_states(states.own) as own,
            self._controller(initial, own, [watch, *others], say),
        ):
            job = self._spark_job(self._training_job(initial, own))
            start = StartWatch(job, say, self.master.endpoint, self._site.master.void)
            watches = self._site.application.watches(job, showing.warn)
            ours = [
                start,
                *watches,
                watch,
                FitProgress(showing.progress, worker_lines=showing.worker_lines),
                ResidualLog(),
            ]
            self._events = FitEvents(self.spec, [*ours, showing.record, *others], self.book)
            Fitting(self.master, job, self._events).run()

    def _controller(
        self,
        initial: Handle,
        own: Mapping[int, StateHandle],
        followers: Sequence[FitListener],
        say: Callable[[str], None],
    ) -> contextlib.AbstractContextManager[None]:
        """At work in the block, where that is not this process."""
        if self._remote is None:
            return contextlib.nullcontext()
        needs_live = [each.needs_live for each in followers if each.needs_live]
        return self._remote.opened(self._training_job(initial, own), needs_live, say)

    def _elsewhere(self, checkpoints: CheckpointFiles) -> RemoteMaster | None:
        site = self._site
        if not parse_controller(site.master.void.controller).apart:
            return None
        return RemoteMaster(site.application, self.theta, checkpoints, self.spec.workers)

    def _local(self, checkpoints: CheckpointFiles) -> MasterThread:
        warm_up()
        warm_up_transport()
        site, spec, theta = self._site, self.spec, self.theta
        void = site.master.void
        host = driver_address(void, site.application.host)
        return MasterThread(
            plan_of(spec, theta, site.model, void.max_chunk_size, checkpoints),
            limits_of(site.master, spec.workers, theta.n_params),
            theta,
            open_transport=driver_transport(spec, void, host),
            seal=Seal.of_fit(self._key, spec.job),
            clock=SystemClock(),
        )

    def _training_job(self, initial: Handle, own: Mapping[int, StateHandle]) -> TrainingJob:
        return TrainingJob(
            spec=self.spec,
            key=self._key,
            model=self._site.model,
            master=self._site.master,
            k=self.theta.k,
            layers=self.theta.layers,
            endpoint=self.master.endpoint,
            join_stream=self.master.join_stream,
            answers=self._remote is None or self._remote.answers,
            network=self._site.network,
            rows=self._spread.rows,
            initial=initial,
            own_states=own,
            keep=self._site.keep,
        )

    def _spark_job(self, job: TrainingJob) -> SparkJob:
        site = self._site
        demand, conf = demand_of(site.model), site.application.live_conf
        need = Need.of(conf, job.spec.workers, demand, site.master)
        return site.application.training(job, self._spread, need)
