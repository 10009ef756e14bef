"""Set up the controller of a gradient-sharing fit.

The controller, also called master, is the state machine that numbers the workers' updates. It runs
in the driver program or in a Spark task, and sends and receives UDP through Aeron's process, the
media driver. The functions here return what the controller must know of the fit (``MasterPlan``),
its deadlines and sizes (``MasterLimits``), and the options of its media driver and transport.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from sparkstrom.base.identity import Endpoint
from sparkstrom.models.base import Buffered, FlatModel
from sparkstrom.options.gradient_sharing import ALL, SharedTrainingMaster
from sparkstrom.options.network import VoidConfiguration
from sparkstrom.planning.memory import count_driver_edges
from sparkstrom.protocol.common.events_and_effects import OptimizerCopyRequest
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.protocol.master.members import CheckpointFiles, MasterLimits
from sparkstrom.runtime.master_thread import MasterPlan
from sparkstrom.runtime.node_thread import OpenTransport
from sparkstrom.runtime.theta import Theta
from sparkstrom.transport.aeron.media_driver import DriverOptions
from sparkstrom.worker.network_setup import port_bounds, transport_opener
from sparkstrom.worker.training_job import longest_message_bytes, make_flow_limits


def make_master_plan(
    spec: FitSpec,
    theta: Theta,
    model: FlatModel,
    master: SharedTrainingMaster,
    kept: CheckpointFiles,
    join_stream: int | None = None,
) -> MasterPlan:
    """Return what the controller must know of a fit.

    Args:
        spec: Description of the fit, which every process gets.
        theta: The controller's replica of the parameters.
        model: The model, whose buffers may have to be averaged.
        master: The user's options.
        kept: Files in which workers of an earlier fit saved residuals (changes not sent yet).
        join_stream: Id of the stream for join messages; None: one that the controller chooses.
    """
    return MasterPlan(
        spec,
        message_bytes_max=longest_message_bytes(theta.n_params, len(theta.buffers)),
        chunk_bytes_max=master.void.max_chunk_size,
        kept=kept,
        average=model.average_buffers if isinstance(model, Buffered) else None,
        join_stream=join_stream,
        summed_workers_max=master.summed_workers_max,
        limits_overshoot=master.limit_overshoot and master.sums_updates,
    )


def driver_transport_opener(spec: FitSpec, void: VoidConfiguration, host: str) -> OpenTransport:
    """Return a function that opens the transport of a controller in the driver program.

    ``spec``: the fit; ``void``: the user's options of the network; ``host``: IP address of this
    machine to bind.
    """
    options = DriverOptions(
        host=host,
        ports=port_bounds(void.controller_ports()),
        edges=count_driver_edges(void.topology(spec.workers), spec.workers),
        scratch=Path(tempfile.gettempdir()),
        is_exclusive=True,
    )
    return transport_opener(f"{spec.job:016x}-driver", options)


def controller_media_driver(
    spec: FitSpec, void: VoidConfiguration, endpoint: Endpoint, scratch: Path
) -> MediaDriverConfig:
    """Return name and options of the media driver for a controller that runs in a Spark task.

    ``void``: the user's options of the network; ``endpoint``: the controller's address and port,
    which the workers know already; ``scratch``: directory for the media driver's files if shared
    memory is too small.
    """
    options = DriverOptions(
        host=endpoint.host,
        ports=(endpoint.port, endpoint.port),
        edges=count_driver_edges(void.topology(spec.workers), spec.workers),
        scratch=scratch,
        is_exclusive=True,
    )
    return MediaDriverConfig(f"{spec.job:016x}-driver", options)


def make_master_limits(master: SharedTrainingMaster, workers: int, n_params: int) -> MasterLimits:
    """Return the controller's deadlines and sizes, computed from the user's options ``master``."""
    tree = master.void.topology(workers)
    return MasterLimits(
        lease_s=master.void.lease_s,
        start_s=master.start_timeout,
        workers_min=min(master.min_workers, workers),
        release_s=master.void.lease_s,
        log_bytes=master.void.log_bytes,
        flow_limits=make_flow_limits(n_params),
        fan_out=tree.fan_out,
        depth=tree.depth_max,
        last_copies=(
            OptimizerCopyRequest(master.checkpoint_updaters == ALL)
            if master.checkpoint_directory
            else None
        ),
    )


@dataclass(frozen=True, slots=True)
class MediaDriverConfig:
    """The media driver that a task with a controller starts before anything else."""

    key: str  # name by which the task's transport finds the media driver
    options: DriverOptions  # address, ports and sizes
