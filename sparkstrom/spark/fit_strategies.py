"""Training strategies on Spark: gradient sharing, and rounds (parameter averaging and DiLoCo).

In gradient sharing, workers exchange updates while they train. In rounds, workers train some
minibatches each, and the results are averaged.

A strategy checks the configuration and creates the object that runs a fit. Both strategies work
with both kinds of application, a SparkContext and a Spark Connect session. ``strategy_for`` selects
the strategy by the class of the user's options; no other code depends on that class.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from sparkstrom.base.clock import SystemClock
from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import shown
from sparkstrom.codec.sealed_frames import KEY_BYTES, Seal
from sparkstrom.encoding.backends import warm_up
from sparkstrom.fit.early_stopping_listener import EarlyStoppingListener
from sparkstrom.fit.events import FitListener
from sparkstrom.fit.fit_context import FitReporting, TaskSlots
from sparkstrom.fit.listeners import ProgressListener, ResidualLogListener
from sparkstrom.fit.master_setup import (
    driver_transport_opener,
    make_master_limits,
    make_master_plan,
)
from sparkstrom.fit.session import FitRunner, FitSession, RestartRunner
from sparkstrom.fit.strategy import GradientSharing, Strategy
from sparkstrom.models.base import FlatModel
from sparkstrom.observe.epoch_history import EpochHistory
from sparkstrom.options.gradient_sharing import SharedTrainingMaster
from sparkstrom.options.network import parse_controller
from sparkstrom.options.parameter_averaging import ParameterAveragingTrainingMaster
from sparkstrom.planning.memory import ModelFootprint, footprint_of_model, gradient_sharing_memory
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.protocol.master.members import CheckpointFiles
from sparkstrom.rounds.run import RoundsRun
from sparkstrom.runtime.master_thread import MasterThread
from sparkstrom.runtime.optimizer_states import OptimizerStates
from sparkstrom.runtime.theta import Theta
from sparkstrom.spark.application import Application
from sparkstrom.spark.controller.remote_controller import RemoteController
from sparkstrom.spark.data.partitioning import PartitionedData
from sparkstrom.spark.executor_slots import (
    ROUNDS_FIT_NOTE,
    SHARED_FIT_NOTE,
    check_conf,
    check_key_encryption,
    check_rounds_conf,
)
from sparkstrom.spark.jobs import SparkJob, StartMonitor
from sparkstrom.worker.network_setup import (
    check_driver_machine,
    choose_driver_address,
    require_ports_on_one_host,
    warm_up_transport,
)
from sparkstrom.worker.training_job import ParametersBroadcast, StateBroadcast, TrainingJob


@dataclass(frozen=True, slots=True)
class FitContext:
    """What all fits of one SparkNetwork have in common, apart from the user's options."""

    application: Application  # runs the Spark jobs
    model: FlatModel  # the model to train
    # The SparkNetwork's id, in the names of files that workers keep on executors for the next fit.
    network: str
    keep: bool  # whether workers keep these files and their optimizer states for the next fit


class SparkFitRunner(FitRunner):
    """Runs one gradient-sharing fit: its controller, its Spark job and its listeners.

    The controller coordinates the workers. It runs in this program or in its own Spark task.

    Args:
        context: What all fits of the SparkNetwork have in common.
        options: The user's options, with ``controller="auto"`` resolved.
        spec: Number of workers, epochs and other facts of this fit.
        theta: The driver's copy of the parameters, which the fit updates.
        data: The rows, in one partition per worker.
        files: Files with residuals (changes not sent yet) that workers of the last fit left.
        states: Optimizer states that workers start with.
    """

    theta: Theta

    def __init__(
        self,
        context: FitContext,
        options: SharedTrainingMaster,
        spec: FitSpec,
        theta: Theta,
        data: PartitionedData,
        files: CheckpointFiles,
        states: OptimizerStates,
    ) -> None:
        self._context, self._options, self.theta, self._data = context, options, theta, data
        self.spec = spec = spec.with_epochs_closed()
        self.states = states
        self._key = secrets.token_bytes(KEY_BYTES)  # encrypts this fit's messages
        self.book = EpochHistory(spec.first_epoch)
        self._remote = self._make_remote_controller(files)
        self.master = self._remote or self._make_local_master(files)

    @property
    def epochs_complete(self) -> int:
        """Number of complete epochs whose updates ``theta`` contains.

        This is 0 if the controller ran in a Spark task and its final parameters did not arrive.
        """
        return super().epochs_complete if self.master.has_final_parameters else 0

    def run(
        self, reporting: FitReporting, stopping: EarlyStoppingListener, *others: FitListener
    ) -> None:
        """Run the fit to its end, or raise the error that ended it early.

        ``others`` are listeners in addition to those of every fit.
        """
        say = reporting.progress.say
        application, states = self._context.application, self.states
        with (
            application.broadcast_parameters(self.theta, self.spec.workers, states.one) as initial,
            application.broadcast_worker_states(states.own) as own,
            self._run_controller_task(initial, own, [stopping, *others], say),
        ):
            job = self._make_spark_job(self._make_training_job(initial, own))
            self._supervise(
                job,
                StartMonitor(job, say, self.master.endpoint, self._options.void),
                *application.executor_monitors(job, reporting.warn),
                stopping,
                ProgressListener(reporting.progress, worker_lines=reporting.shows_worker_output),
                ResidualLogListener(),
                reporting.record,
                *others,
            )

    def _run_controller_task(
        self,
        initial: ParametersBroadcast,
        own: Mapping[int, StateBroadcast],
        listeners: Sequence[FitListener],
        say: Callable[[str], None],
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that runs the controller in a Spark task during the block.

        If the controller runs in this program, the context manager does nothing. ``initial`` and
        ``own`` are as in ``_make_training_job``. Some of the fit's ``listeners`` need a connection
        to the controller; ``say`` shows the user a line of text.
        """
        if self._remote is None:
            return contextlib.nullcontext()
        live_options = [each.live_option for each in listeners if each.live_option]
        return self._remote.run_in_task(self._make_training_job(initial, own), live_options, say)

    def _make_remote_controller(self, files: CheckpointFiles) -> RemoteController | None:
        """Return a proxy for a controller in a Spark task; None if it runs in this program."""
        if not parse_controller(self._options.void.controller).is_in_task:
            return None
        return RemoteController(self._context.application, self.theta, files, self.spec.workers)

    def _make_local_master(self, files: CheckpointFiles) -> MasterThread:
        """Return an unstarted controller that runs in a thread of this program."""
        warm_up()
        warm_up_transport()
        context, options, spec, theta = self._context, self._options, self.spec, self.theta
        host = choose_driver_address(options.void, context.application.host)
        return MasterThread(
            make_master_plan(spec, theta, context.model, options, files),
            make_master_limits(options, spec.workers, theta.n_params),
            theta,
            open_transport=driver_transport_opener(spec, options.void, host),
            seal=Seal.from_fit_key(self._key, spec.job),
            clock=SystemClock(),
        )

    def _make_training_job(
        self, initial: ParametersBroadcast, own: Mapping[int, StateBroadcast]
    ) -> TrainingJob:
        """Return what each worker's task receives: options, model and the controller's address.

        ``initial`` is a handle of the parameters. ``own`` maps partitions to handles of the
        workers' optimizer states.
        """
        return TrainingJob(
            spec=self.spec,
            key=self._key,
            model=self._context.model,
            master=self._options,
            k=self.theta.k,
            layers=self.theta.layers,
            endpoint=self.master.endpoint,
            join_stream=self.master.join_stream,
            is_controller_running=self._remote is None or self._remote.has_connected,
            network=self._context.network,
            rows=self._data.rows,
            initial=initial,
            own_states=own,
            keep_residuals=self._context.keep,
        )

    def _make_spark_job(self, job: TrainingJob) -> SparkJob:
        """Return the unstarted Spark job that runs the workers."""
        context = self._context
        footprint, conf = footprint_of_model(context.model), context.application.live_conf
        need = gradient_sharing_memory(conf, job.spec.workers, footprint, self._options)
        return context.application.create_training_job(job, self._data, need)


class SparkGradientSharingStrategy(GradientSharing):
    """Gradient sharing: workers are tasks of one Spark job and exchange updates over Aeron."""

    allocation_note = SHARED_FIT_NOTE  # part of the notice about dynamic allocation
    leaves_files = True  # workers keep files on executors for the next fit

    def with_controller(
        self, application: Application, slots: TaskSlots, say: Callable[[str], None]
    ) -> SparkGradientSharingStrategy:
        """Return a copy with ``controller="auto"`` replaced by "driver" or "executor"."""
        return SparkGradientSharingStrategy(application.resolve_controller(self.master, slots, say))

    def check(
        self,
        application: Application,
        conf: Mapping[str, str],
        workers: int,
        footprint: ModelFootprint,
    ) -> list[str]:
        """Check Spark's configuration and the driver's machine; return warnings.

        ``application`` will run the fit; ``footprint`` is the memory that the model needs. Raise
        UsageError for settings that make a fit impossible.
        """
        warnings = check_conf(conf, workers, footprint, self.master) + check_key_encryption(conf)
        if conf.get("spark.master", "").startswith("local"):
            require_ports_on_one_host(self.master.void)
        check_driver_machine(self.master.void, workers, application.host)
        return warnings

    def make_runner(
        self, context: FitContext, session: FitSession, spec: FitSpec, data: PartitionedData
    ) -> FitRunner:
        """Return the object that runs a new fit, starting from the session's current state."""
        if not self.has_controller_task:
            warm_up(say=session.say)
        theta = session.state.theta(self.layer_multipliers)
        files, states = session.resume_state(spec.workers)
        return SparkFitRunner(context, self.master, spec, theta, data, files, states)

    def make_restart_runner(
        self, context: FitContext, data: PartitionedData
    ) -> RestartRunner | None:
        """Return the function that creates a new runner after the controller's task was lost."""
        return lambda spec, theta, states: SparkFitRunner(
            context, self.master, spec, theta, data, {}, states
        )


class SparkRoundsStrategy(Strategy[ParameterAveragingTrainingMaster]):
    """Round-based training: the Spark jobs of each round train and then average the results."""

    allocation_note = ROUNDS_FIT_NOTE  # part of the notice about dynamic allocation
    leaves_files = False  # workers keep nothing on executors after a round

    def with_controller(
        self, application: Application, slots: TaskSlots, say: Callable[[str], None]
    ) -> SparkRoundsStrategy:
        """Return this strategy unchanged: rounds have no controller."""
        return self

    def check(
        self,
        application: Application,
        conf: Mapping[str, str],
        workers: int,
        footprint: ModelFootprint,
    ) -> list[str]:
        """Return warnings about Spark's configuration, given the memory that the model needs."""
        return check_rounds_conf(conf, workers, footprint, self.master)

    def make_runner(
        self, context: FitContext, session: FitSession, spec: FitSpec, data: PartitionedData
    ) -> FitRunner:
        """Return the object that runs a new fit, starting from the session's current state."""
        _, states = session.resume_state(spec.workers)
        model, application = context.model, context.application
        backend, make_job = application.create_rounds_backend(spec, model, self.master, data)
        return RoundsRun(
            spec,
            model,
            self.master,
            session.state,
            states,
            backend,
            make_job,
            application.rounds_monitors,
            has_observer=session.request.early_stopping is not None,
            keeps_states=context.keep,
        )

    def make_restart_runner(
        self, context: FitContext, data: PartitionedData
    ) -> RestartRunner | None:
        """Return None: rounds have no controller to lose."""
        return None


SparkStrategy = SparkGradientSharingStrategy | SparkRoundsStrategy


def strategy_for(master: object) -> SparkStrategy:
    """Return the strategy for the user's options. Raise UsageError if they are of another class."""
    if isinstance(master, SharedTrainingMaster):
        return SparkGradientSharingStrategy(master)
    if isinstance(master, ParameterAveragingTrainingMaster):
        return SparkRoundsStrategy(master)
    raise UsageError(
        f"master={shown(master)}: must be a SharedTrainingMaster or a"
        " ParameterAveragingTrainingMaster"
    )
