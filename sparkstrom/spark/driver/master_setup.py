"""Setting up the master of a fit: its plan, its limits, and its way to the network."""

from __future__ import annotations

import tempfile
from pathlib import Path

from sparkstrom.base.identity import Endpoint
from sparkstrom.models.base import Buffered, FlatModel
from sparkstrom.protocol.common.events import CopyUpdater
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.protocol.master.master_limits import MasterLimits
from sparkstrom.protocol.master.residual_checkpoints import CheckpointFiles
from sparkstrom.runtime.master_thread import Plan
from sparkstrom.runtime.node_thread import OpenTransport
from sparkstrom.runtime.theta import Theta
from sparkstrom.spark.controller.control_words import MediaOrder
from sparkstrom.spark.driver.discovery import VoidConfiguration
from sparkstrom.spark.driver.memory_parts import driver_edges
from sparkstrom.spark.driver.training_master import ALL, SharedTrainingMaster
from sparkstrom.spark.executor.interfaces import ends_of, opener
from sparkstrom.spark.executor.job import message_bytes_max, serving_of
from sparkstrom.transport.aeron.driver import DriverOptions


def plan_of(
    spec: FitSpec,
    theta: Theta,
    model: FlatModel,
    chunk_bytes_max: int,
    kept: CheckpointFiles,
    join_stream: int | None = None,
) -> Plan:
    """What the master must know of what is trained; ``kept``: by workers of an earlier fit."""
    return Plan(
        spec,
        message_bytes_max=message_bytes_max(theta.n_params, len(theta.buffers)),
        chunk_bytes_max=chunk_bytes_max,
        kept=kept,
        average=model.average_buffers if isinstance(model, Buffered) else None,
        join_stream=join_stream,
    )


def driver_transport(spec: FitSpec, void: VoidConfiguration, host: str) -> OpenTransport:
    """Opens the driver program's media driver, at this address."""
    options = DriverOptions(
        host=host,
        ports=ends_of(void.controller_ports()),
        edges=driver_edges(void.topology(spec.workers), spec.workers),
        scratch=Path(tempfile.gettempdir()),
        alone=True,
    )
    return opener(f"{spec.job:016x}-driver", options)


def media_of(
    spec: FitSpec, void: VoidConfiguration, endpoint: Endpoint, scratch: Path
) -> MediaOrder:
    """That of a controller's task: at the place that its workers have been told."""
    options = DriverOptions(
        host=endpoint.host,
        ports=(endpoint.port, endpoint.port),
        edges=driver_edges(void.topology(spec.workers), spec.workers),
        scratch=scratch,
        alone=True,
    )
    return MediaOrder(f"{spec.job:016x}-driver", options)


def limits_of(master: SharedTrainingMaster, workers: int, n_params: int) -> MasterLimits:
    """The master's deadlines and sizes, from the user's options."""
    tree = master.void.topology(workers)
    return MasterLimits(
        lease_s=master.void.lease_s,
        start_s=master.start_timeout,
        workers_min=min(master.min_workers, workers),
        release_s=master.void.lease_s,
        log_bytes=master.void.log_bytes,
        serving=serving_of(n_params),
        fan_out=tree.fan_out,
        depth=tree.depth_max,
        last_copies=(
            CopyUpdater(master.checkpoint_updaters == ALL) if master.checkpoint_directory else None
        ),
    )
