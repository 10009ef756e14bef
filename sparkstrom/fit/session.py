"""Run one fit with its listeners, checkpoints and progress display, and assemble its summary.

The path of a fit: ``SparkNetwork.fit`` or ``ParallelWrapper.fit`` checks the arguments and prepares
the data. ``FitSession.run`` connects listeners and checkpoints to a ``FitRunner``. The runner opens
the transport between controller and workers, starts the tasks and runs a ``FitSupervisor``, which
waits for their end and dispatches events to all listeners (``fit.events``). The strategy
(``fit.strategy``) contains everything that depends on whether the fit shares gradients or is
round-based.

The controller numbers the workers' updates. If it runs in a Spark task, it is lost when that task
dies. Another runner then continues the fit from the newest checkpoint. For a fit that writes no
checkpoints, the driver program keeps copies with the same content in a temporary directory, and the
next runner continues from the newest copy. If neither exists, it begins where the lost one began.
Checkpoints and copies contain each minibatch at most once, so no minibatch is applied twice. Each
runner draws its own encryption key, so its controller and workers reject messages from processes of
an earlier runner.
"""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sparkstrom.base.errors import CheckpointDamaged, ControllerLost, SetupError, SparkstromError
from sparkstrom.base.version import __version__
from sparkstrom.checkpoint.directory import CheckpointDirectory, format_error, open_checkpoint
from sparkstrom.checkpoint.writer import CheckpointWriter, failure_kind
from sparkstrom.fit.checkpoints import (
    CheckpointConfig,
    CheckpointListener,
    FitCheckpoints,
    FitKey,
    ResumePoint,
    read_resume_point,
)
from sparkstrom.fit.early_stopping_listener import EarlyStoppingListener
from sparkstrom.fit.events import FitEvents, FitListener
from sparkstrom.fit.fit_context import FitReporting, FitRequest
from sparkstrom.fit.listeners import ListenerThread, make_listener_thread
from sparkstrom.fit.network_state import FitParameters, NetworkStateHolder
from sparkstrom.fit.strategy import Strategy
from sparkstrom.fit.summary import FitFacts, TrainingSummary, summarize, summary_to_json
from sparkstrom.fit.supervisor import FitCancelled, FitJob, FitSupervisor
from sparkstrom.observe.early_stopping import LOSS
from sparkstrom.observe.epoch_history import EpochHistory
from sparkstrom.options.common import CommonOptions
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.protocol.master.members import CheckpointFiles
from sparkstrom.runtime.master_control import MasterControl, Progress, Snapshot
from sparkstrom.runtime.optimizer_states import OptimizerStates, remove_encoder_state
from sparkstrom.runtime.theta import Theta

log = logging.getLogger(__name__)

POLL_S = 0.1  # between two checks for the next controller
COPY_INTERVAL = "10 s"  # between copies; at most this time is trained again if copies are quick
COPY_TIME_FACTOR = 20  # pause after a copy / time that it took: copies take 5 % of the time

RESUMED_FROM_COPY = (
    "the controller was lost ({what}); the fit continues with another one from a copy of "
    "{commit} commits: {again:,} minibatches are trained again, {kept:,} are not (loss {loss} of "
    "controller_restarts={most})"
)
RESTARTED = (
    "the controller was lost ({what}); the fit starts again with another one, because this "
    "program has no copy yet: {again:,} minibatches are trained again (loss {loss} of "
    "controller_restarts={most})"
)
RESTARTS_EXHAUSTED = "{lost} It was loss {loss} of this fit, and controller_restarts={most}"

PARAMETERS_LOST = (
    "network.parameters are those from before the fit: the controller's task could not send newer "
    "ones, because it had no TCP connection to this program or was cancelled first"
)
INTERRUPTED = (
    "the fit was interrupted. The next fit of this network is another one, with a new"
    " optimizer state; to resume this one instead, call network.restore({path!r}) before fit"
)


class FitSession:
    """One fit of a network, to be run once. Each lost controller requires another runner.

    Args:
        strategy: How workers combine their results.
        checkpoints: The network's checkpoints.
        request: The checked arguments of ``fit``.
        reporting: Display, warnings and record of the fit.
        state: The network's state, which becomes the result of the fit.
        restart: Makes the next runner after a lost controller; None: controllers are never lost.
    """

    def __init__(
        self,
        strategy: Strategy[CommonOptions],
        checkpoints: FitCheckpoints,
        request: FitRequest,
        reporting: FitReporting,
        state: NetworkStateHolder,
        restart: RestartRunner | None = None,
    ) -> None:
        self._strategy, self._checkpoints, self._reporting = strategy, checkpoints, reporting
        self.state, self._make_next_runner = state, restart
        self.request = self._first_request = request
        # ``_changed`` is notified of the next runner, or of the end.
        self._changed, self._is_over = threading.Condition(), False

    @property
    def say(self) -> Callable[[str], None]:
        """The function that shows a line to the user."""
        return self._reporting.progress.say

    def make_spec(self, workers: int) -> FitSpec:
        """Return the description of this fit, which every process gets."""
        request, state = self.request, self.state
        point, rule = request.resume_from, request.early_stopping
        return FitSpec(
            workers=workers,
            epochs=request.epochs,
            n_params=self._checkpoints.model.n_params,
            version=__version__,
            job=secrets.randbits(63),
            first_epoch=point.first_epoch if point else state.epochs,
            minibatches_before=point.minibatches_before if point else state.minibatches_before,
            fraction=request.columns.fraction,
            metric=rule.metric if rule else LOSS,
            starts=point.starts_for(workers) if point else (),
        )

    def resume_state(self, workers: int) -> tuple[CheckpointFiles, OptimizerStates]:
        """Return the residual files and optimizer states with which the fit's workers start.

        If the fit resumes from a checkpoint of a fit with another threshold algorithm, the states
        do not contain the encoder's part, which depends on the algorithm.
        """
        files, states = self.state.resume_state(workers)
        point = self.request.resume_from
        same = point is None or point.threshold == repr(self._checkpoints.master.threshold)
        return files, states if same else states.each(remove_encoder_state)

    def run(self, runner: FitRunner, export_directory: str | None) -> TrainingSummary:
        """Run the fit to completion, replace the network's state, and return the summary.

        ``export_directory``: where the rows were exported, for the summary; None: nowhere. Raise
        the error that ended the fit. The controller has then ended, even if it was not started yet.
        If the user interrupted the fit, the network keeps what was trained until then. After any
        other error, its state is as before, except that names of residual files are forgotten.
        """
        self._runner = runner
        try:
            return self._run_with_listeners(runner.spec, export_directory)
        except BaseException:
            self._runner.master.end()
            raise

    def _run_with_listeners(self, spec: FitSpec, export_directory: str | None) -> TrainingSummary:
        """Run the fit with the thread of the user's listeners; return the summary."""
        progress = self._reporting.progress
        model, options = self._checkpoints.model, self._strategy.master
        thread = make_listener_thread(self.request, spec, model, options, self._snapshot, progress)
        recovery = ControllerRecovery(self._strategy, self._checkpoints, self._reporting)
        with recovery.create_folder():
            return thread.run_fit(partial(self._run_all, thread, recovery, export_directory))

    def _snapshot(self) -> Snapshot:
        """Return a copy of the current parameters; if the controller is lost, wait for the next.

        Also wait while the controller cannot make a copy, such as while it replaces its media
        driver. Raise ControllerLost if no other run follows, and the error of a fit that has
        failed.
        """
        while True:
            runner = self._runner
            try:
                return runner.master.snapshot()
            except ControllerLost:
                with self._changed:
                    # Wait for another runner, whose controller answers or raises at once.
                    while self._runner is runner or not (
                        self._runner.master.is_reachable or self._runner.master.finished.is_set()
                    ):
                        if self._is_over:
                            raise
                        self._changed.wait(POLL_S)
            except SparkstromError:
                with self._changed:
                    if self._is_over or runner.master.failure is not None:
                        raise
                    self._changed.wait(POLL_S)

    def _switch_to(self, runner: FitRunner) -> None:
        """Make ``runner`` the current one, and wake threads that wait for it."""
        with self._changed:
            self._runner = runner
            self._changed.notify_all()

    def _end(self) -> None:
        """Record that no other runner follows, and wake threads that wait for one."""
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _run_all(
        self, thread: ListenerThread, recovery: ControllerRecovery, export_directory: str | None
    ) -> TrainingSummary:
        """Run one runner after another until one completes; return the summary."""
        with self.state.rollback_on_error(), contextlib.ExitStack() as stack:
            stack.callback(self._end)
            if warning := self.state.shared_buffers_warning():
                self._reporting.warn(warning)
            rule, began_s = self.request.early_stopping, time.monotonic()
            while True:
                runner = self._runner
                self.state.forget_resume_state()  # the runner has it
                stopping = EarlyStoppingListener(runner.master, rule, began_s=began_s)
                self._resume(runner, stopping)
                saving = self._checkpoint_listener(runner, stopping, thread, recovery)
                try:
                    return self._run_one(runner, stopping, thread, saving, export_directory)
                except ControllerLost as lost:
                    with self._checkpoints.mark_failed_on_error():
                        request = recovery.next_request(lost, self.request, runner.master, saving)
                        self._switch_to(self._restart(runner, request))

    def _restart(self, runner: FitRunner, request: FitRequest) -> FitRunner:
        """Return the runner that follows ``runner``, whose controller was lost.

        If ``request`` has a different checkpoint than before, load it into the network first.
        """
        before, self.request = self.request, request
        spec, states = replace(runner.spec, job=secrets.randbits(63)), runner.states
        if request.resume_from is not None and request.resume_from is not before.resume_from:
            self.state.load_checkpoint(request.resume_from)
            spec = self.make_spec(spec.workers)
            _, states = self.resume_state(spec.workers)
        assert self._make_next_runner is not None, "a controller in this process is never lost"
        theta = self.state.theta(self._strategy.layer_multipliers)
        return self._make_next_runner(spec, theta, states)

    def _resume(self, runner: FitRunner, stopping: EarlyStoppingListener) -> None:
        """If the fit resumes from a checkpoint, load its metrics into runner and early stopping.

        Show warnings about what the checkpoint lacks, or what differs in this fit.
        """
        point, workers = self.request.resume_from, runner.spec.workers
        if point is None:
            return
        metric = runner.spec.metric
        has_other_metric = bool(self.request.columns.validation) and point.metric not in (
            None,
            metric,
        )
        if has_other_metric:
            if point.has_validation:
                self._reporting.warn(
                    f"{point.path} has the {point.metric} of held-out rows, and this fit measures"
                    f" their {metric}: the epochs before the resume have no value (NaN), and cannot"
                    " be the best"
                )
            point = point.without_validation()
        runner.book.restore(point.figures_for(workers))
        history = runner.book.history()[: runner.book.epochs_resumed_from]
        if not stopping.resume([] if has_other_metric else history, point.best):
            self._reporting.warn(
                f"{point.path} has no parameters of the best epoch so far: only epochs after the"
                " resume can be the best"
            )
        if workers != len(point.starts):
            complete = runner.spec.starts[0].position.epoch
            self._reporting.warn(
                f"{point.path} was written by {len(point.starts)} workers, now there are {workers}:"
                " rows are distributed differently, and all of epoch"
                f" {complete + 1} is trained again"
            )
        if not point.states.one:
            self._reporting.warn(
                f"{point.path} has no optimizer state, because it holds the parameters of the best"
                " epoch, or because no worker sent one in time: momentum and second moments start"
                " at zero"
            )
        if point.missing_states and point.states.one and workers == len(point.starts):
            partitions = ", ".join(map(str, point.missing_states))
            self._reporting.warn(
                f"{point.path} has no optimizer state of the workers of partitions {partitions},"
                " which did not send theirs in time: they continue with another worker's"
            )

    def _checkpoint_listener(
        self,
        runner: FitRunner,
        stopping: EarlyStoppingListener,
        thread: ListenerThread,
        recovery: ControllerRecovery,
    ) -> CheckpointListener | None:
        """Return the listener that writes checkpoints or else recovery copies; None if neither."""
        key, k = self.request.key, runner.theta.k
        config = self._checkpoints.config(key, k, runner.states)
        common: dict[str, Any] = {
            "book": runner.book,
            "stopping": stopping,
            "notify": thread.notify,
        }
        if config is not None:
            return CheckpointListener(config, runner.master, **common, say=self.say)
        if not recovery.keeps_copies:
            return None
        config = recovery.config(key, k, runner.states)
        return ControllerCopyListener(config, runner.master, **common, say=log.warning)

    def _run_one(
        self,
        runner: FitRunner,
        stopping: EarlyStoppingListener,
        thread: ListenerThread,
        saving: CheckpointListener | None,
        export_directory: str | None,
    ) -> TrainingSummary:
        """Run one runner, update the network's state and checkpoints, and return the summary.

        If the user interrupts the fit, keep and save what is trained so far, then raise again. On
        any other error, finish the current checkpoint and raise the error again.
        """
        reporting, state, key = self._reporting, self.state, self.request.key
        others = [thread] if saving is None else [saving, thread]
        try:
            runner.run(reporting, stopping, *others)
        except (KeyboardInterrupt, FitCancelled):
            self._checkpoints.mark_ended(key.number)
            if not runner.master.has_final_parameters:
                reporting.warn(PARAMETERS_LOST)
                raise
            state.keep_interrupted(runner.theta, runner.spec, runner.epochs_complete)
            if saving is not None and saving.is_user_requested:
                for warning in saving.save_interrupted():
                    reporting.warn(warning)
                if saving.newest is not None:
                    reporting.warn(INTERRUPTED.format(path=saving.newest))
            raise
        except BaseException as error:
            if saving is not None:
                saving.close_failed()
                if saving.is_user_requested and saving.newest is not None:
                    self._checkpoints.mark_written()
            if not isinstance(error, ControllerLost):
                self._checkpoints.mark_failed()
            raise
        end = reporting.record.finished()
        state.take_result(runner.theta, end, stopping.copy, runner.states_after)
        self._checkpoints.mark_ended(key.number)
        summary = self._summarize(runner, stopping, export_directory)
        if saving is None:
            return summary
        if not saving.is_user_requested:
            saving.discard()
            return summary
        return self._save_final(summary, saving)

    def _save_final(self, summary: TrainingSummary, saving: CheckpointListener) -> TrainingSummary:
        """Save the delivered parameters in a last checkpoint; return the completed summary."""
        end, state, checkpoints = self._reporting.record.finished(), self.state, self._checkpoints
        delivered = Snapshot(end.outcome.commits, state.parameters, state.buffers, ())
        checkpoints.record_summary(self.request.key, summary_to_json(summary))
        warnings = saving.finish(
            delivered, end.epochs_trained, checkpoints.summaries_for(self.request.key)
        )
        for warning in warnings:
            self._reporting.warn(warning)
        return replace(summary, checkpoint=saving.newest, warnings=[*summary.warnings, *warnings])

    def _summarize(
        self, runner: FitRunner, stopping: EarlyStoppingListener, export_directory: str | None
    ) -> TrainingSummary:
        """Return the summary of a completed run, and show accuracy warnings."""
        reporting, model, strategy = self._reporting, self._checkpoints.model, self._strategy
        end, slots = reporting.record.finished(), reporting.slots
        spec, outcome = end.spec, end.outcome
        warnings = strategy.accuracy_warnings(model, outcome, spec.minibatches_before)
        for text in warnings:
            self.say(f"sparkstrom warns: {text}")
        facts = FitFacts(
            record=reporting.record,
            executors=0 if slots.is_dynamic else slots.executors,
            warnings=[*reporting.warnings, *warnings],
            master=strategy.master,
            export_directory=export_directory,
            best=stopping.best,
            horizons=strategy.scaled_hyperparameters(model, outcome),
            validation=self.request.columns.validation,
        )
        summary = summarize(facts)
        stopped, limit, point = summary.stopped, self.request.epoch_limit, self._first_request
        if limit is not None and stopped is None:
            last = spec.first_epoch + spec.epochs
            stopped = f"early stopping: {limit} is met in epoch {last}"
        return replace(
            summary,
            epochs_resumed=runner.book.epochs_resumed_from,
            stopped=stopped,
            resumed_from=point.resume_from.path if point.resume_from else None,
        )


class FitRunner(ABC):
    """One run of a fit, on Spark's executors or on this machine.

    ``_supervise`` runs its job under a ``FitSupervisor``, which dispatches events.
    """

    spec: FitSpec  # number of workers, epochs and other facts of the fit
    book: EpochHistory  # losses and metrics by epoch, to which the run adds its own
    states: OptimizerStates  # optimizer states with which the workers start
    master: MasterControl  # the controller
    theta: FitParameters  # the trained parameters, during the run and afterwards
    _events: FitEvents | None = None  # from the start of the run

    @abstractmethod
    def run(
        self, reporting: FitReporting, stopping: EarlyStoppingListener, *others: FitListener
    ) -> None:
        """Run the fit to completion. Raise the error that ended it early.

        ``others`` are listeners in addition to those of every fit.
        """

    @property
    def epochs_complete(self) -> int:
        """Number of epochs that all training partitions have completed so far."""
        return self._events.epochs_complete if self._events is not None else 0

    @property
    def states_after(self) -> OptimizerStates:
        """The optimizer states with which the next fit continues: none, unless overridden."""
        return OptimizerStates()

    def _supervise(self, job: FitJob, *listeners: FitListener) -> None:
        """Run controller and job to completion. Raise the error that ended them early."""
        self._events = FitEvents(self.spec, listeners, self.book)
        FitSupervisor(self.master, job, self._events).run()


# (spec, theta, states) -> the next runner of a fit whose controller was lost
RestartRunner = Callable[[FitSpec, Theta, OptimizerStates], FitRunner]


@dataclass(slots=True)
class ControllerRecovery:
    """Decides how one fit continues after each loss of its controller."""

    strategy: Strategy[CommonOptions]  # says how many controllers the fit may lose
    checkpoints: FitCheckpoints  # checkpoints of the network
    _reporting: FitReporting  # shows warnings and records losses of the controller
    folder: str = ""  # directory for copies of a fit without checkpoints

    @property
    def keeps_copies(self) -> bool:
        """Whether a fit without checkpoints is copied regularly, to survive a lost controller."""
        return self.strategy.controller_restarts > 0 and self.strategy.has_controller_task

    @contextlib.contextmanager
    def create_folder(self) -> Iterator[None]:
        """Create the directory for copies, if the fit needs one, and delete it after the block.

        A program that is killed leaves the directory, so other fits create none.
        """
        if self.keeps_copies and self.checkpoints.directory is None:
            with tempfile.TemporaryDirectory(prefix="sparkstrom-copies-") as self.folder:
                yield
        else:
            yield

    def config(self, key: FitKey, k: int, states: OptimizerStates) -> CheckpointConfig:
        """Return where and how often to copy the fit ``key``, which writes no checkpoints.

        ``k``: the parameters are multiples of 2^-k; ``states``: optimizer states at the start.
        """
        directory = CheckpointDirectory(self.folder, 1)
        config = self.checkpoints.config_in(directory, COPY_INTERVAL, key, k, states)
        return replace(config, frozen=False)  # this process's model has the frozen weights

    def next_request(
        self,
        lost: ControllerLost,
        request: FitRequest,
        master: MasterControl,
        saving: CheckpointListener | None,
    ) -> FitRequest:
        """Return the request with which the fit continues after a lost controller.

        The request resumes from the newest checkpoint or copy of the lost run; if there is neither,
        the request is unchanged.

        Args:
            lost: The error that ended the last run.
            request: The request of the last run.
            master: The lost controller.
            saving: The listener that wrote checkpoints or copies of the last run; None: none did.

        Raises:
            ControllerLost: The fit has lost more controllers than ``controller_restarts``.
        """
        record, most = self._reporting.record, self.strategy.controller_restarts
        record.record_controller_loss(lost.what)
        log.warning("the controller was lost: %s", lost.what)
        loss = len(record.controller_losses)
        if loss > most:
            exhausted = RESTARTS_EXHAUSTED.format(lost=lost, loss=loss, most=most)
            raise ControllerLost(exhausted if most else str(lost), lost.what) from lost
        copy = self._newest_copy(saving)
        point = copy or request.resume_from
        kept = point.minibatches if point is not None else 0
        self._reporting.warn(
            (RESTARTED if copy is None else RESUMED_FROM_COPY).format(
                what=lost.what,
                commit=0 if copy is None else copy.commit,
                again=max(0, master.progress.minibatches - kept),
                kept=kept,
                loss=loss,
                most=most,
            )
        )
        return request if copy is None else replace(request, resume_from=copy)

    def _newest_copy(self, saving: CheckpointListener | None) -> ResumePoint | None:
        """Return the newest checkpoint or copy of the last run; None if there is no valid one."""
        if saving is None or saving.newest is None:
            return None
        try:
            path, checkpoint = open_checkpoint(saving.newest, self._reporting.progress.say)
        except (CheckpointDamaged, SetupError) as error:
            self._reporting.warn(f"the newest copy of this fit is not used: {error}")
            return None
        return read_resume_point(path, checkpoint, self.checkpoints.model)


class ControllerCopyWriter(CheckpointWriter):
    """Writes copies of a fit; messages about copies that fail do not name the directory."""

    def _warn_of_failure(self, note: str, error: Exception) -> None:
        """Warn that the copy named ``note``, such as "commit 70", was not made."""
        self._warn(
            failure_kind("writing", error),
            f"no copy of the controller's replica at {note} could be made "
            f"({format_error(error)}); the next one is tried when due",
        )

    def _report_success(self, failed: int, path: str) -> None:
        """Report that a copy was made after ``failed`` attempts."""
        self._report(
            f"copies of the controller's replica are made again, after {failed} that failed"
        )


class ControllerCopyListener(CheckpointListener):
    """Writes copies of a fit whose controller runs in a task, while that task is connected.

    Copies let the fit survive the loss of its controller.
    """

    live_option = ""  # no option of the user needs copies
    is_user_requested = False
    writer_class = ControllerCopyWriter
    _due_s = -math.inf  # no copy starts before this time
    _timed = 0  # number of written copies that ``_due_s`` accounts for

    def _announce_written(self) -> None:
        """Notify no listener, because only this fit uses the copies; they are deleted after it."""

    def _save_if_due(self, progress: Progress) -> None:
        """Make a copy if one is due and the controller's task is connected."""
        now_s = time.monotonic()
        for written in self._writer.written[self._timed :]:
            self._timed += 1
            self._due_s = now_s + COPY_TIME_FACTOR * written.seconds
        if now_s < self._due_s or not self._master.is_reachable:
            return
        super()._save_if_due(progress)
