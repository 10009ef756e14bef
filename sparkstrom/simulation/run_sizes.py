"""Sizes: how much a simulated fit trains, how narrow everything is, and how fast clocks go."""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass

from sparkstrom.base.identity import Position
from sparkstrom.protocol.common.child import Serving
from sparkstrom.protocol.common.events import CopyUpdater
from sparkstrom.protocol.common.fit_spec import PartitionStart
from sparkstrom.protocol.common.optimizer_fetch import RETRY_FIRST_S
from sparkstrom.protocol.common.send_window import SUM_ENTRY_BYTES
from sparkstrom.protocol.common.topology import FLAT
from sparkstrom.protocol.master.master_limits import MasterLimits
from sparkstrom.protocol.worker.node import NodeLimits
from sparkstrom.simulation.sim_replica import CELL
from sparkstrom.simulation.weights import CHUNK_BYTES, Weights

UNDER_WAY_MAX = 64 << 20  # as in a real fit, to all children of a node
SILENT_LEASES = 3  # of the master; twice that in a mesh, where its signs take a detour

ROWS = 7  # of a partition that has some
ATTACH_LEASES = 8  # longer than any trouble lasts from which a place comes in the end


class Through(enum.StrEnum):
    """What messages go through on their way."""

    OBJECTS = "objects"  # nothing: what is sent is what arrives
    CODEC = "codec"  # their bytes
    ENDPOINT = "endpoint"  # message endpoints: frames, seals, outboxes


class Replicas(enum.StrEnum):
    """What is trained."""

    NUMBERS = "numbers"  # a few whole numbers
    REAL = "real"  # a small model, with the replica and the encoder of a real fit


@dataclass(frozen=True, slots=True)
class Size:
    """Counts, bytes, steps, and virtual seconds."""

    nodes: int = 4
    epochs: int = 3
    batches: int = 7
    max_lead: int | None = 6
    max_staleness: int | None = None  # steps beyond that of the oldest uncommitted update
    publish_every: int = 1  # steps; 0: when the last publication is committed
    log_bytes: int = 4_000  # small on purpose: some must take snapshots
    window_bytes: int = 600
    downlink_bytes: int = 2_000
    merged_bytes: int = 1 << 30  # what the machines take a sum of commits to cost
    fan_out: int = FLAT[0]
    depth: int = FLAT[1]
    buffered: bool = False  # the model has statistics beside its parameters
    through: Through = Through.OBJECTS
    replicas: Replicas = Replicas.NUMBERS
    whole: bool = True  # workers begin with the initial replica; otherwise they copy it
    per_executor: int = 2  # tasks
    empty_partitions: int = 0  # the last ones
    kept_files: int = 2  # of an earlier fit
    resumed: int = 0  # it goes on with a fit; positions are drawn from this; 0: a new one
    starts: tuple[PartitionStart, ...] = ()  # the same, where it goes on from a copy
    copies: int = 0  # of an updater's state that the driver wants
    copies_of_all: int = 0  # times that it wants one of everybody's
    last_copies: int = 0  # that its end waits for: nobody's, one worker's, everybody's
    lease_s: float = 2.0
    tick_s: float = 0.1  # between two looks of a machine at its clock, about
    busy_tick_s: float = 0.1  # the same for one that has news to tell
    wake_s: float = 0.005  # until a waiting trainer notices what is new, at most
    look_s: float = 0.2  # a waiting trainer looks around at least so often
    bounds_s: float = 0.1  # between looks at what must stay bounded
    starts_s: float = 1.0  # Spark starts the tasks within this
    end_s: float = 300.0  # a run that is not over by then hangs
    patience_s: float = 10.0  # for workers that come late, and for the master's first answer
    params: int = 0  # of the model that messages are as long as; 0: as short as can be
    density: float = 0.0  # share of its parameters in an update

    def is_empty(self, partition: int) -> bool:
        """Has it no rows?"""
        return partition >= self.nodes - self.empty_partitions

    def start_of(self, partition: int) -> PartitionStart:
        """Where a fit that goes on begins with it."""
        batches = 0 if self.is_empty(partition) else self.batches
        rows = 0 if self.is_empty(partition) else ROWS
        trained = 0
        if self.starts and self.starts[partition].rows >= 0:
            return self.starts[partition]
        if self.resumed and batches:
            chance = random.Random(f"partition {partition} of {self.resumed}")
            trained = chance.randint(0, self.epochs * batches)
        position = Position(*divmod(trained, max(1, batches)))
        return PartitionStart(position, rows, partition, batches)

    @property
    def mesh(self) -> bool:
        return self.depth > 1

    @property
    def weights(self) -> Weights:
        return Weights(self.params, self.density)

    @property
    def serving(self) -> Serving:
        """Of one child and of all; what a sum and a chunk weigh."""
        if self.params:
            return Serving(self.downlink_bytes, UNDER_WAY_MAX, self.params, CHUNK_BYTES)
        entries = max(1, int(self.merged_bytes / SUM_ENTRY_BYTES))
        return Serving(self.downlink_bytes, 4 * self.downlink_bytes, entries, CELL.size)

    def of_master(self) -> MasterLimits:
        return MasterLimits(
            lease_s=self.lease_s,
            start_s=max(self.patience_s, 4 * self.starts_s),
            attach_s=ATTACH_LEASES * self.lease_s,
            rejoin_s=60.0,
            release_s=3.0,
            end_s=30.0,
            log_bytes=self.log_bytes,
            serving=self.serving,
            fan_out=self.fan_out,
            depth=self.depth,
            last_copies=CopyUpdater(self.last_copies > 1) if self.last_copies else None,
        )

    def of_node(self) -> NodeLimits:
        return NodeLimits(
            lease_s=self.lease_s,
            join_s=max(self.patience_s, 4 * self.starts_s),
            master_silent_s=SILENT_LEASES * self.lease_s * (2 if self.mesh else 1),
            window_bytes=self.window_bytes,
            log_bytes=self.log_bytes,
            serving=self.serving,
            max_lead=self.max_lead,
            max_staleness=self.max_staleness,
            publications_max=None if self.publish_every else 1,
            optimizer_wait_s=self.lease_s
            + RETRY_FIRST_S,  # whose first question comes before a copy
        )
