"""The training task: prepare this process, join the fit, train one partition and report.

The task's trainer trains the model; its node, in a thread of its own, exchanges messages with the
other workers and with the controller, which numbers updates. An exception is reported to the
controller, which ends the whole fit, and is raised again so that Spark's log contains it.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import secrets
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from sparkstrom.base.clock import SystemClock
from sparkstrom.base.errors import SetupError, UsageError, escape_surrogates, format_reason
from sparkstrom.base.untrusted_files import READ_ERRORS, open_regular, read_npz
from sparkstrom.base.version import __version__
from sparkstrom.codec.messages import ResidualCheckpoint
from sparkstrom.codec.optimizer_state_codec import plain_scalars
from sparkstrom.data.row_blocks import Block
from sparkstrom.data.row_store import Batches
from sparkstrom.encoding.backends import Backend, host, on_device, warm_up
from sparkstrom.encoding.encoder import Encoder
from sparkstrom.encoding.thresholds import AUTO
from sparkstrom.models.base import (
    DeviceModel,
    Flat,
    FlatModel,
    KnowsOptimizerKind,
    State,
    zero_frozen_entries,
)
from sparkstrom.options.gradient_sharing import (
    DDP,
    LEAD_TARGET,
    STALENESS_TARGET,
    UPDATE_TARGET,
    SharedTrainingMaster,
)
from sparkstrom.protocol.common import events_and_effects as ev
from sparkstrom.protocol.common.events_and_effects import Command, TaskEnding
from sparkstrom.protocol.worker.node import Identity, NodeLimits
from sparkstrom.runtime.master_control import READING_ROWS
from sparkstrom.runtime.node_thread import JoinAddress, NodePlan, NodeThread, SnapshotSource
from sparkstrom.runtime.optimizer_states import OptimizerStateServer, load_worker_state
from sparkstrom.runtime.output_capture import WorkerOutput, capture_output
from sparkstrom.runtime.theta import Replica, Theta
from sparkstrom.runtime.trainer_thread import Trainer, TrainerOptions, no_output
from sparkstrom.runtime.training_loop import TrainerInbox
from sparkstrom.worker.network_setup import transport_opener, warm_up_transport
from sparkstrom.worker.task_environment import (
    TaskEnvironment,
    freeze_garbage_collector,
    load_batches,
    place_model,
    remember_model,
)
from sparkstrom.worker.training_job import TrainingJob, make_flow_limits, unpack_parameters

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
MMAP_THRESHOLD_BYTES = 1 << 30  # larger arrays are returned to the system as usual
MMAP_THRESHOLD_FALLBACK_BYTES = 32 << 20  # for C libraries that reject the other value
TRIM_NEVER = (1 << 31) - 1  # bytes
TRIM_THRESHOLD_AFTER_BYTES = 64 << 20  # twice the fallback, as the C library sets it by itself


@contextmanager
def retain_freed_memory() -> Iterator[None]:
    """Keep memory that training steps free inside the process during the ``with`` block.

    Steps allocate and free arrays as large as a layer: gradients and an optimizer's temporaries.
    The C library returns such memory to the system, which clears it again page by page for the next
    step. With 4.35 M parameters and torch's Adam, this took 9 to 16 of 36 to 54 ms per step.
    Afterwards, free memory is returned to the system. Without ``mallopt`` (musl, macOS), nothing
    changes.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        yield
        return
    if not libc.mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES):
        libc.mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_FALLBACK_BYTES)
    libc.mallopt(M_TRIM_THRESHOLD, TRIM_NEVER)
    try:
        yield
    finally:
        libc.mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_FALLBACK_BYTES)
        libc.mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD_AFTER_BYTES)
        libc.malloc_trim(0)


RESIDUAL_FILE_PREFIX = "sparkstrom-kept-"


def save_residual(replica: Replica, directory: Path, network: str) -> ResidualCheckpoint:
    """Write residual, threshold and optimizer state to an npz file; return its path and mass.

    The residual is what the worker has learned but not sent; its mass is the sum of the absolute
    values. ``network``, the network's id, is part of the file's name. The file appears in
    ``directory`` only when it is complete; a failure leaves none.
    """
    residual = replica.residual()
    arrays = {"residual": residual}
    scalars = dict[str, dict[str, Any]]()
    encoder = replica.encoder.state()
    encoder.pop("residual", None)  # stored as an array of its own
    for part, state in (("encoder", encoder), ("updater", replica.model.updater_state())):
        scalars[part] = plain_scalars(state)
        arrays |= {f"{part}/{k}": v for k, v in state.items() if isinstance(v, np.ndarray)}
    path = directory / f"{RESIDUAL_FILE_PREFIX}{network}-{os.getpid()}-{secrets.token_hex(6)}.npz"
    temporary = path.with_suffix(".tmp")
    try:
        with temporary.open("xb") as file:
            np.savez(file, description=np.array(json.dumps(scalars)), **arrays)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return ResidualCheckpoint(str(path), float(np.abs(residual.astype(np.float64)).sum()))


def restore_residual(replica: Replica, path: str) -> str:
    """Add a saved residual to this replica and load the states saved with it; delete the file.

    Return "", or a warning if the file is missing or damaged.
    """
    try:
        residual, states = _take_residual(path)
    except READ_ERRORS as error:
        return RESIDUAL_NOT_READ.format(path, error)
    replica.add_residual(zero_frozen_entries(replica.model, residual))
    replica.encoder.load_state(states["encoder"])
    replica.model.load_updater_state(states["updater"])
    return ""


def _take_residual(path: str) -> tuple[Flat, dict[str, State]]:
    """Read a saved residual, f32[n_params], and the states of encoder and updater.

    Delete the file, so that it is used only once. Raise one of READ_ERRORS if it is missing or
    damaged.
    """
    with open_regular(path, follow=False) as opened:
        arrays = read_npz(opened)
    states: dict[str, State] = json.loads(str(arrays.pop("description")))
    residual = arrays.pop("residual")
    for name, array in arrays.items():
        part, _, key = name.partition("/")
        states[part][key] = array
    Path(path).unlink()
    return residual, states


def delete_residuals(directory: Path, network: str) -> int:
    """Delete a network's residual files in this directory; return their number."""
    files = list(directory.glob(f"{RESIDUAL_FILE_PREFIX}{network}-*"))
    for file in files:
        file.unlink(missing_ok=True)
    return len(files)


log = logging.getLogger(__name__)


def choose_backend(model: FlatModel) -> Backend:
    """Return the backend of the model's GPU, or the host's backend if there is no usable GPU.

    If the GPU cannot be used, each step copies the parameters but results stay correct, so this is
    only a warning.
    """
    device = model.cuda_device if isinstance(model, DeviceModel) else None
    if device is None:
        return host()
    try:
        return on_device(device)
    except SetupError as error:
        log.warning("parameters stay on the host, and each step copies them: %s", error)
        return host()


TRACE_CHARS_MAX = 8_000
FAILURE_TIMEOUT_S = 8.0  # how long a failing task waits for the controller to end the fit
PUBLICATIONS_IN_FLIGHT_MAX = 1  # per worker; the next one is sent when this one is committed


def run_training_task(
    job: TrainingJob, environment: TaskEnvironment, blocks: Iterator[Block]
) -> str:
    """Join the fit, train and leave; return a report as JSON.

    What the user's code prints is captured and sent to the driver. Any exception is reported to the
    controller and raised again.
    """
    output = WorkerOutput(SystemClock())
    with capture_output(output):
        return _run_captured(job, environment, blocks, output)


def _run_captured(
    job: TrainingJob, environment: TaskEnvironment, blocks: Iterator[Block], output: WorkerOutput
) -> str:
    """Do what ``run_training_task`` describes, while that captures what the user's code prints."""
    began_s = time.monotonic()
    warm_up()
    warm_up_transport()
    remember_model(job.model)
    freeze_garbage_collector()
    failure: UsageError | SetupError | None = None
    output.phase = lambda: READING_ROWS
    try:
        place_model(job, environment)
        batches = load_batches(job, environment, blocks)
    except (UsageError, SetupError) as error:  # other errors make Spark repeat the stage
        failure = error
        batches = load_batches(job, environment, None)
    session = TrainingSession(job, environment, batches, output.take)
    output.phase = session.channel.describe_activity
    if failure is not None:
        is_usage = isinstance(failure, UsageError)
        session.report(failure, READING_ROWS if is_usage else "preparing")
    try:
        session.thread.start()
        if failure is not None:
            raise failure
        with retain_freed_memory():
            end = session.trainer.run()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's model may even raise SystemExit
        if error is not failure:
            session.report(error, session.channel.describe_activity())
        session.wait_for_abort()
        raise
    finally:
        session.thread.stop()
        batches.close()
    seconds = time.monotonic() - began_s
    dismissed = session.replica.uncommitted_mass() if end.cause is TaskEnding.DISMISSED else 0.0
    report = {"partition": environment.partition, "ended": end.reason, "seconds": seconds}
    captured = [describe_warning(environment, text) for text in output.warnings.values()]
    report["mass_dismissed"], report["warnings"] = dismissed, session.warnings + captured
    return json.dumps(report | {"epochs": session.trainer.epochs.report()})


class TrainingSession:
    """The replica, the trainer and the node's thread of one task."""

    def __init__(
        self,
        job: TrainingJob,
        environment: TaskEnvironment,
        batches: Batches,
        read_output: Callable[[], ev.OutputPrinted | None] = no_output,
    ) -> None:
        """Create all parts; ``read_output`` returns what the user's code has newly printed."""
        self._job, self._environment = job, environment
        self.warnings: list[str] = []  # for the summary
        theta = load_initial_theta(job, choose_backend(job.model))
        self.replica = replica = make_replica(job, theta)
        if state := job.initial_worker_state(environment.partition):
            load_worker_state(replica, state)
        inbox = TrainerInbox(job.master.void.window_bytes, theta.new_sum)
        optimizer_server, route = OptimizerStateServer(SystemClock()), job.controller_route
        self.thread = NodeThread(
            NodePlan(
                make_identity(job, environment, batches),
                make_node_limits(job),
                JoinAddress(job.endpoint, job.join_stream),
                message_bytes_max=job.message_bytes_max,
                chunk_bytes_max=job.master.void.max_chunk_size,
            ),
            open_transport=transport_opener(
                route.driver_key(environment), route.driver_options(environment)
            ),
            seal=job.seal(),
            inbox=inbox,
            read_output=read_output,
            snapshots=SnapshotSource(replica.chunk, theta.merge, optimizer_server),
            clock=SystemClock(),
        )
        self.channel = self.thread.channel
        self.trainer = Trainer(
            self.channel,
            replica,
            batches,
            make_trainer_options(job, environment.partition, environment.attempt),
            save_residual=self._save_residual,
            add_residuals=self._add_saved_residuals,
            optimizer_server=optimizer_server,
        )

    def report(self, error: BaseException, doing: str) -> None:
        """Report to the controller why training failed; ``doing``: what the worker was doing.

        If the node's thread has not started yet, the node later reports the error instead of
        joining.
        """
        trace = escape_surrogates("".join(traceback.format_exception(error)))[-TRACE_CHARS_MAX:]
        self.channel.post(ev.TrainerFailed(format_reason(error), trace, doing))

    def wait_for_abort(self) -> None:
        """Wait until the controller ends the fit after a failure, at most FAILURE_TIMEOUT_S."""
        until_s = time.monotonic() + FAILURE_TIMEOUT_S
        while time.monotonic() < until_s and self.thread.is_alive():
            if self.channel.command.order in (Command.FAIL, Command.END):
                return
            time.sleep(0.05)

    def _save_residual(self, replica: Replica) -> ResidualCheckpoint | None:
        """Save the residual for the next fit, if that is enabled; only warn on failure.

        Return the file, or None if nothing was saved. The current fit does not need the file.
        """
        if not self._job.keep_residuals:
            return None
        directory = self._environment.scratch
        try:
            return save_residual(replica, directory, self._job.network)
        except (OSError, UsageError) as error:
            self._warn(RESIDUAL_NOT_SAVED.format(directory, error))
            return None

    def _add_saved_residuals(self, replica: Replica, paths: tuple[str, ...]) -> None:
        """Add the residuals that an earlier fit saved in these files."""
        for path in paths:
            if warning := restore_residual(replica, path):
                self._warn(warning)

    def _warn(self, text: str) -> None:
        """Log a warning, and add it to the task's report for the summary."""
        log.warning("%s", text)
        self.warnings.append(describe_warning(self._environment, text))


def describe_warning(place: TaskEnvironment, text: str) -> str:
    """Return a worker's warning as the summary shows it."""
    return f"partition {place.partition} on {place.host}: {text}"


RESIDUAL_NOT_READ = (
    "this worker begins without the changes that were learned but not sent in the fit before, and"
    " with a new optimizer state, because the file {} cannot be read ({})"
)
RESIDUAL_NOT_SAVED = (
    "the next fit begins without what this worker has learned but not sent: "
    "no file could be written in {} ({})"
)


def make_trainer_options(job: TrainingJob, partition: int = 0, attempt: int = 0) -> TrainerOptions:
    """Return the trainer's options, such as the number of epochs and how often it publishes."""
    master = job.master
    limits_are_numbers = isinstance(master.max_lead, int) or isinstance(master.max_staleness, int)
    return TrainerOptions(
        job.spec.epochs,
        None if isinstance(master.publish_every, str) else master.publish_every,
        1 if limits_are_numbers else UPDATE_TARGET,
        master.debug_longer_iterations,
        show_residual=master.encoding_debug_mode,
        metric=job.spec.metric,
        partition=partition,
        attempt=attempt,
        minibatches_before=job.spec.minibatches_before
        if master.minibatch_horizon == "fit"
        else None,
        start=(job.spec.first_epoch, job.spec.minibatches_before),
    )


def load_initial_theta(job: TrainingJob, backend: Backend | None = None) -> Theta:
    """Return the parameters and buffers with which the fit starts.

    If the job does not contain them, all parameters are 0 until a snapshot is fetched.
    """
    theta = Theta(job.spec.n_params, job.k, job.layers, backend)
    if job.initial is not None:
        values, theta.buffers = unpack_parameters(job.initial.value, job.spec.n_params, job.k)
        theta.load(values)
    return theta


def make_replica(job: TrainingJob, theta: Theta) -> Replica:
    """Return this worker's model, parameters and encoder, all on the backend of ``theta``."""
    master, model = job.master, job.model
    is_adaptive = (
        master.scaling == DDP
        and isinstance(model, KnowsOptimizerKind)
        and model.has_adaptive_optimizer()
    )
    encoder = Encoder(
        job.spec.n_params,
        job.k,
        master.choose_threshold(is_adaptive),
        master.residual_post_processor,
        train_on=master.train_on,
        aggregation=master.choose_update_weight(is_adaptive),
        workers=job.spec.workers,
        backend=theta.backend,
        layer_of=model.layer_of,
        warm_up=master.warm_up,
        shake_frequency=master.shake_frequency,
        layers=job.layers,
    )
    return Replica(model, theta, encoder, local=master.train_on == "local")


def make_identity(job: TrainingJob, environment: TaskEnvironment, batches: Batches) -> Identity:
    """Return the facts with which this process joins the fit."""
    return Identity(
        token=secrets.randbits(63),
        partition=environment.partition,
        attempt=environment.attempt,
        rows=batches.rows,
        checksum=batches.checksum,
        batches=batches.batches_per_epoch,
        host=environment.host,
        executor=f"{environment.host}/{environment.jvm}",
        pid=os.getpid(),
        version=__version__,
        start=job.spec.start_of(environment.partition),
        whole=job.initial is not None,
    )


def make_node_limits(job: TrainingJob) -> NodeLimits:
    """Return the node's deadlines and sizes, computed from the user's options."""
    void = job.master.void
    return NodeLimits(
        lease_s=void.lease_s,
        master_silent_s=(3 if job.tree.depth_max == 1 else 6) * void.lease_s,
        step_s=job.master.step_timeout,
        window_bytes=void.window_bytes,
        log_bytes=void.log_bytes,
        flow_limits=make_flow_limits(job.spec.n_params),
        publications_max=PUBLICATIONS_IN_FLIGHT_MAX if job.master.publish_every == AUTO else None,
        optimizer_wait_s=void.lease_s,
        **staleness_limits(job.master),
    )


class StalenessLimits(TypedDict):
    """Limits on how far workers may drift apart; ``NodeLimits`` explains these fields."""

    max_lead: int | None
    lead_minibatches: int
    max_staleness: int | None
    age_of_updates: int
    steps_each: int


def staleness_limits(master: SharedTrainingMaster) -> StalenessLimits:
    """Return the limits on how far workers may drift apart, by ``max_lead`` and ``max_staleness``.

    ``lead_minibatches`` and ``age_of_updates`` are in minibatches of all workers, the other limits
    in steps of one worker. A round is ``publish_every`` steps, or 1 if that is "auto". A number of
    rounds for ``max_staleness`` is converted to steps. With "auto", ``max_lead`` is one round, and
    ``lead_minibatches`` is set in addition if ``publish_every`` is "auto" as well. With "auto",
    ``max_staleness`` is 0, because ``age_of_updates`` is set instead.
    """
    every = 1 if isinstance(master.publish_every, str) else master.publish_every
    lead, rounds, age, lead_minibatches = master.max_lead, master.max_staleness, 0, 0
    if isinstance(lead, str):
        lead = every
        lead_minibatches = LEAD_TARGET if isinstance(master.publish_every, str) else 0
    if isinstance(rounds, str):
        rounds, age = 0, STALENESS_TARGET
    return {
        "max_lead": lead,
        "lead_minibatches": lead_minibatches,
        "max_staleness": None if rounds is None else rounds * every,
        "age_of_updates": age,
        "steps_each": every,
    }
