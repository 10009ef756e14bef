"""Options of a simulated run: its size and the faults to inject.

Each call of the protocol's state machine returns a list of effects, instructions that its process
must carry out. Many of them need the media driver, Aeron's process that sends and receives UDP.
``DriverFault`` injects one of the faults: a media driver dies in the middle of such a list.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sparkstrom.base.errors import DriverLost
from sparkstrom.base.identity import Position
from sparkstrom.protocol.common import events_and_effects as performing
from sparkstrom.protocol.common.children import FlowLimits
from sparkstrom.protocol.common.events_and_effects import (
    BY_DRIVER,
    CloseEdge,
    Effect,
    OpenEdge,
    OptimizerCopyRequest,
    ReopenStreams,
)
from sparkstrom.protocol.common.fit_spec import PartitionStart
from sparkstrom.protocol.common.flow_control import SUM_ENTRY_BYTES
from sparkstrom.protocol.common.optimizer_fetch import RETRY_FIRST_S
from sparkstrom.protocol.common.topology import FLAT
from sparkstrom.protocol.master.members import MasterLimits
from sparkstrom.protocol.worker.node import NodeLimits
from sparkstrom.simulation.replica import CHUNK_BYTES, CHUNK_STRUCT, MessageSizes

UNDER_WAY_MAX = 64 << 20  # bytes in flight to all children of a node, as in a real fit
SILENT_LEASES = 3  # until the master counts as lost; twice that in a mesh, where it is relayed

ROWS = 7  # of each partition that is not empty
ATTACH_LEASES = 8  # to confirm a place in the tree; longer than any outage that ends


class TransportMode(enum.StrEnum):
    """The form in which the simulated network carries messages."""

    OBJECTS = "objects"  # as Python objects
    CODEC = "codec"  # encoded and decoded
    ENDPOINT = "endpoint"  # as encrypted frames, through the message endpoints of real fits


class ReplicaKind(enum.StrEnum):
    """The kind of replica that the workers train."""

    NUMBERS = "numbers"  # a toy replica of a few integers
    REAL = "real"  # a small model, with the replica and encoder of a real fit


@dataclass(frozen=True, slots=True)
class RunSize:
    """The size and options of a run; times are in seconds of virtual time.

    Most field names are also flags of ``python -m sparkstrom.simulation``.
    """

    nodes: int = 4  # workers
    epochs: int = 3  # to train
    batches: int = 7  # minibatches per partition and epoch
    max_lead: int | None = 6  # steps ahead of the slowest worker; None: no limit
    max_staleness: int | None = None  # steps after the oldest uncommitted update; None: no limit
    publish_every: int = 1  # steps between updates; 0: publish once the previous one is committed
    log_bytes: int = 4_000  # of commits that a node keeps; few, so that some nodes need snapshots
    window_bytes: int = 600  # of one worker's uncommitted updates; with more, its training waits
    downlink_bytes: int = 2_000  # bytes in flight to one child
    merged_bytes: int = 1 << 30  # size that nodes assume for a sum of commits
    fan_out: int = FLAT[0]  # children of a node, at most
    depth: int = FLAT[1]  # levels of the tree below the master, at most
    has_buffers: bool = False  # whether the model has buffers
    through: TransportMode = TransportMode.OBJECTS  # how the network carries messages
    replicas: ReplicaKind = ReplicaKind.NUMBERS  # what the workers train
    whole: bool = True  # workers start with the initial replica; otherwise they fetch it
    per_executor: int = 2  # workers in one executor
    empty_partitions: int = 0  # the last ones have no rows
    kept_files: int = 2  # residual files of an earlier fit
    resumed: int = 0  # seed of the positions at which a resumed fit starts; 0: a new fit
    starts: tuple[PartitionStart, ...] = ()  # by partition, of a fit that resumes from a copy
    copies: int = 0  # times that the driver requests one optimizer state
    copies_of_all: int = 0  # times that the driver requests all workers' optimizer states
    last_copies: int = 0  # optimizer states for which the fit's end waits; 0: none, 1: one, 2: all
    lease_s: float = 2.0  # time after which a silent node counts as lost
    tick_s: float = 0.1  # mean interval of a node's ticks
    busy_tick_s: float = 0.1  # the same, for a node with a pending report
    wake_s: float = 0.005  # longest delay of a waiting trainer's reaction to new items
    trainer_poll_s: float = 0.2  # interval at which a waiting trainer polls its inbox
    check_interval_s: float = 0.1  # between checks of the invariants
    task_start_window_s: float = 1.0  # Spark starts all tasks within this time
    end_s: float = 300.0  # a run that takes longer counts as hanging
    patience_s: float = 10.0  # longest wait for late workers and for the master's first answer
    params: int = 0  # parameters of the model whose message sizes are used; 0: no padding
    density: float = 0.0  # entries of an update per parameter

    def is_empty(self, partition: int) -> bool:
        """Return True if a partition has no rows."""
        return partition >= self.nodes - self.empty_partitions

    def start_of(self, partition: int) -> PartitionStart:
        """Return where the fit starts in a partition, with the number and checksum of its rows."""
        batches = 0 if self.is_empty(partition) else self.batches
        rows = 0 if self.is_empty(partition) else ROWS
        trained = 0
        if self.starts and self.starts[partition].rows >= 0:
            return self.starts[partition]
        if self.resumed and batches:
            rng = random.Random(f"partition {partition} of {self.resumed}")
            trained = rng.randint(0, self.epochs * batches)
        position = Position(*divmod(trained, max(1, batches)))
        return PartitionStart(position, rows, partition, batches)

    @property
    def mesh(self) -> bool:
        """Whether workers relay messages to other workers."""
        return self.depth > 1

    @property
    def message_sizes(self) -> MessageSizes:
        """Sizes of the messages about a model with ``params`` parameters."""
        return MessageSizes(self.params, self.density)

    @property
    def flow_limits(self) -> FlowLimits:
        """Limits on the bytes in flight to one child and to all, and sizes of sums and chunks."""
        if self.params:
            return FlowLimits(self.downlink_bytes, UNDER_WAY_MAX, self.params, CHUNK_BYTES)
        entries = max(1, int(self.merged_bytes / SUM_ENTRY_BYTES))
        return FlowLimits(self.downlink_bytes, 4 * self.downlink_bytes, entries, CHUNK_STRUCT.size)

    def master_limits(self) -> MasterLimits:
        """Return the master's deadlines, memory limits, and limits of the tree."""
        return MasterLimits(
            lease_s=self.lease_s,
            start_s=max(self.patience_s, 4 * self.task_start_window_s),
            attach_s=ATTACH_LEASES * self.lease_s,
            rejoin_s=60.0,
            release_s=3.0,
            end_s=30.0,
            log_bytes=self.log_bytes,
            flow_limits=self.flow_limits,
            fan_out=self.fan_out,
            depth=self.depth,
            last_copies=OptimizerCopyRequest(self.last_copies > 1) if self.last_copies else None,
        )

    def worker_limits(self) -> NodeLimits:
        """Return the deadlines and memory limits of a worker's protocol node."""
        return NodeLimits(
            lease_s=self.lease_s,
            join_s=max(self.patience_s, 4 * self.task_start_window_s),
            master_silent_s=SILENT_LEASES * self.lease_s * (2 if self.mesh else 1),
            window_bytes=self.window_bytes,
            log_bytes=self.log_bytes,
            flow_limits=self.flow_limits,
            max_lead=self.max_lead,
            max_staleness=self.max_staleness,
            publications_max=None if self.publish_every else 1,
            # The first request may arrive before the sender has a copy.
            optimizer_wait_s=self.lease_s + RETRY_FIRST_S,
        )


@dataclass(frozen=True, slots=True)
class Faults:
    """Faults of messages, limits of links and trainers, and how often other faults happen in a run.

    The field names are also flags of ``python -m sparkstrom.simulation``.
    """

    # Share of lost messages among direct and repeated control messages; no other message is lost.
    loss: float = 0.05
    repeat: float = 0.03  # share of the same messages that arrive twice
    delay_ms_max: float = 40.0  # longest delay of messages that are not late
    late: float = 0.02  # share of the same messages that arrive up to 0.5 s late, after newer ones
    bandwidth: float = 0.0  # bytes per second that one host can send; 0: unlimited
    rate: float = 0.0  # bytes/s of each host's interface, each way; 0: interfaces have no limit
    narrow: int = 0  # hosts whose interface has a lower rate from the start
    narrows: int = 0  # times that a host's rate drops during the run
    slow_pollers: int = 0  # workers that poll their streams rarely
    step_s_max: float = 0.03  # longest step of the slowest trainer
    crashes: int = 2  # a worker process dies; Spark starts another attempt later
    executor_crashes: int = 0  # all workers of one executor die at once
    doubles: int = 0  # Spark starts another attempt while the first one is alive
    late_attempts: int = 0  # a task of an earlier stage attempt starts or fails late
    # A worker is unreachable for up to two leases, in one direction or both. An outage of more than
    # half a lease breaks its streams; a shorter one only delays their messages.
    cuts: int = 2
    pauses: int = 1  # a worker process is suspended for up to four leases
    master_pauses: int = 0  # the driver program is suspended for up to two leases
    splits: int = 0  # half of the workers cannot reach the other processes for up to two leases
    isolations: int = 0  # no process can reach the driver program for up to four leases
    slow: int = 0  # workers whose steps take ten times as long
    drift: float = 0.0  # share by which the workers' clocks run fast or slow; their offsets differ
    leaps: int = 0  # a worker's clock jumps forward by up to an eighth of a lease
    breaks: int = 0  # one stream of an edge breaks for good; the edge's other streams live
    exiles: int = 0  # a worker becomes unreachable forever
    master_lost: int = 0  # the driver program dies
    controller_dies: int = 0  # only the controller dies; the fit resumes from a copy
    edge_deaths: int = 2  # a media driver dies; messages in flight on its edges are lost
    driver_deaths: int = 0  # a media driver dies in the middle of a list of effects
    stop: float = 0.0  # probability that the fit is asked to stop early
    failure: float = 0.0  # probability that training raises an exception in a worker
    restart_s_max: float = 4.0  # longest time in seconds until Spark restarts a lost task
    # Seconds of training after which messages are no longer lost, repeated or late.
    quiet_after_s: float = 12.0


NO_FAULTS = Faults(
    loss=0, repeat=0, delay_ms_max=2, late=0, crashes=0, cuts=0, pauses=0, edge_deaths=0
)


EDGE_EFFECTS = frozenset({OpenEdge, CloseEdge, ReopenStreams})


class DriverFault:
    """Kills the media driver of one process ``deaths`` times, each time within a list of effects.

    The driver dies only in lists whose outcome depends on its death: those that open or close an
    edge, or in which an effect that needs no media driver follows one that does. ``chance``
    draws the effect at which it dies, more often one before an effect that needs no driver.
    """

    def __init__(self, chance: random.Random, deaths: int) -> None:
        self._rng, self._deaths = chance, deaths

    def wrap(
        self, effects: Sequence[Effect], perform: Callable[[Effect], None]
    ) -> Callable[[Effect], None]:
        """Return a ``perform`` that raises DriverLost at a random effect.

        Return ``perform`` itself if no death is left, or if the list does not depend on one.
        """
        moments = _fault_points(effects) if self._deaths else []
        if not moments:
            return perform
        left = self._rng.choice(moments)

        def perform_until_death(effect: Effect) -> None:
            """Perform an effect, or raise DriverLost at the drawn effect."""
            nonlocal left
            left -= 1
            if left < 0 and type(effect) in BY_DRIVER:
                self._deaths -= 1
                raise DriverLost("performing", -1000, "a media driver died on purpose")
            perform(effect)

        return perform_until_death


def _fault_points(effects: Sequence[Effect]) -> list[int]:
    """Return the indices of effects at which a driver may die.

    An index is listed three times if an effect that needs no driver follows.
    """
    kinds = [type(effect) for effect in effects]
    needing = [i for i, kind in enumerate(kinds) if kind in BY_DRIVER]
    telling = [i for i in needing if not BY_DRIVER.issuperset(kinds[i:])]
    if len(kinds) < 2 or (EDGE_EFFECTS.isdisjoint(kinds) and not telling):
        return []
    return [*needing, *telling, *telling]


def perform_with_fault(
    effects: Sequence[Effect], perform: Callable[[Effect], None], fault: DriverFault | None
) -> bool:
    """Perform effects as the node's thread does; return False if ``fault`` killed the driver."""
    carry = perform if fault is None else fault.wrap(effects, perform)
    try:
        performing.perform_all(effects, carry)
    except DriverLost:
        return False
    return True
