"""Job: what travels to the executors, as one frozen picklable value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from sparkstrom.base.identity import Endpoint
from sparkstrom.codec.frames import Seal
from sparkstrom.encoding.layers import Layers
from sparkstrom.models.base import Buffered, FlatModel
from sparkstrom.protocol.common.child import Serving
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.protocol.common.topology import Topology
from sparkstrom.runtime.theta import CHUNK_PARAMS
from sparkstrom.spark.driver.initial_parameters import Handle, StateHandle
from sparkstrom.spark.driver.memory_parts import edges_of
from sparkstrom.spark.driver.training_master import SharedTrainingMaster
from sparkstrom.spark.executor.reaching import WayToController

FRAME_ROOM_BYTES = 1 << 20  # headers beside a payload, how far each origin is, control messages
BYTES_PER_PARAM_MAX = 8  # no payload form needs more
WINDOW_MAX_BYTES = 4 << 20  # under way to one neighbour: 0.25 s of 128 Mbit/s, 0.03 s of 1 Gbit/s
UNDER_WAY_MAX_BYTES = 64 << 20  # to all children of a node, however many there are


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """One ``fit``. Travels inside Spark's own task closure, which is where the key is safe."""

    spec: FitSpec
    key: bytes = field(repr=False)
    model: FlatModel  # without its storage: architecture, seed, options
    master: SharedTrainingMaster
    k: int  # the grid: q = 2^-k
    layers: Layers | None  # with thresholds of their own
    endpoint: Endpoint  # of the master
    join_stream: int
    network: str  # names the files kept on executors for the next fit
    rows: tuple[int, ...] = ()  # per partition, where rows stayed and so were counted
    initial: Handle | None = None  # theta at commit 0; without it workers copy the master's
    own_states: Mapping[int, StateHandle] = field(default_factory=dict)  # a checkpoint's
    answers: bool = True  # the master's media driver is known to be there
    keep: bool = True  # residuals and updaters' states for the next fit, on the executors' scratch

    def state_of(self, partition: int) -> bytes:
        """What its worker begins with: its own, or one for all; b"": a fresh one."""
        own = self.own_states.get(partition)
        if own is not None:
            return own.value
        return self.initial.value.state if self.initial is not None else b""

    def seal(self) -> Seal:
        """What closes and opens this job's frames."""
        return Seal.of_fit(self.key, self.spec.job)

    @property
    def tree(self) -> Topology:
        """The topology, empty: its fan-out and depth."""
        return self.master.void.topology(self.spec.workers)

    @property
    def way(self) -> WayToController:
        """From an executor to the master."""
        void, edges = self.master.void, edges_of(self.tree)
        return WayToController(self.spec.job, self.endpoint, void, *edges, self.answers)

    @property
    def message_bytes_max(self) -> int:
        """No message of this job is longer."""
        buffers = len(self.model.buffers_bytes()) if isinstance(self.model, Buffered) else 0
        return message_bytes_max(self.spec.n_params, buffers)


def message_bytes_max(n_params: int, buffers_bytes: int) -> int:
    """The longest message of a fit: of parameters, or of buffers, which may be larger than these.

    Buffers go in one piece, both from a worker and as the average of all.
    """
    return FRAME_ROOM_BYTES + max(BYTES_PER_PARAM_MAX * n_params, buffers_bytes)


def serving_of(n_params: int) -> Serving:
    """What a node's children may cost it."""
    return Serving(WINDOW_MAX_BYTES, UNDER_WAY_MAX_BYTES, n_params, 4 * CHUNK_PARAMS)
