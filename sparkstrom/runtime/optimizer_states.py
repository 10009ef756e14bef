"""Encode, serve and load the state of a worker's optimizer and encoder.

Workers that join after others have begun to train copy this state from one of them, and checkpoints
contain it. An optimizer's state is, for example, its momentum. The state of an encoder, which makes
updates of what a worker learns, contains above all the threshold for sending.

``OptimizerStateServer`` serves copies of a running trainer's state. When the node, which exchanges
messages for the trainer, receives a request for a copy, the trainer makes it before its next step,
and the node's thread sends it in chunks. A copy is numbered by a hash of its content
(``codec.messages.OptimizerCopy``) and kept as long as requests for it arrive. A process that begins
to fetch gets a new copy, unless the current one is recent or another process is still fetching it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sparkstrom.base.clock import Clock
from sparkstrom.base.identity import NodeId
from sparkstrom.codec.messages import OptimizerChunk, OptimizerCopy, OptimizerRequest
from sparkstrom.codec.optimizer_state_codec import decode_state_untrusted, encode_state
from sparkstrom.models.base import FlatModel, HasOptimizerState, State
from sparkstrom.runtime.theta import Replica

OPTIMIZER_PREFIX, ENCODER_PREFIX = "updater/", "encoder/"
PARTITION_KEY = "partition"  # the partition that the state belongs to
RESIDUAL_KEY = "residual"  # per-worker; never shared
SCHEDULE_STEPS_KEY = "round/steps"  # step of learning-rate schedules; only for training in rounds


@dataclass(frozen=True, slots=True)
class OptimizerStates:
    """The optimizer states that the workers of a fit start with."""

    one: bytes = b""  # encoded state for workers that are not in ``own``; b"": they start fresh
    own: Mapping[int, bytes] = field(default_factory=dict)  # partition -> its worker's state

    def each(self, change: Callable[[bytes], bytes]) -> OptimizerStates:
        """Return these states with ``change`` applied to each."""
        one = change(self.one) if self.one else b""
        return OptimizerStates(one, {index: change(state) for index, state in self.own.items()})

    @classmethod
    def from_copies(cls, copies: Sequence[bytes]) -> OptimizerStates:
        """Return the states in these copies: each for its partition, the first also for others."""
        if not copies:
            return cls()
        found = {decode_partition(state): state for state in copies}
        return cls(copies[0], {i: s for i, s in found.items() if i is not None and i >= 0})


def encode_worker_state(replica: Replica, partition: int) -> bytes:
    """Return a worker's optimizer and encoder state, with ``partition`` but without residual."""
    encoder = replica.encoder.state()
    encoder.pop(RESIDUAL_KEY, None)
    updater = replica.model.updater_state()
    return encode_state(
        {OPTIMIZER_PREFIX + name: value for name, value in updater.items()}
        | {ENCODER_PREFIX + name: value for name, value in encoder.items()}
        | {PARTITION_KEY: partition}
    )


def pretrained_optimizer_states(model: FlatModel) -> OptimizerStates:
    """Return the optimizer states for a network's first fit.

    These are the states that came with a model that was trained elsewhere, such as by DL4J; for
    other models there are none.
    """
    state = model.continuing_state() if isinstance(model, HasOptimizerState) else {}
    if not state:
        return OptimizerStates()
    return OptimizerStates(
        encode_state({OPTIMIZER_PREFIX + name: value for name, value in state.items()})
    )


def decode_optimizer_state(content: bytes) -> State:
    """Return the optimizer's part of an encoded worker state; raise WireError if it is invalid."""
    return _select_prefix(content, OPTIMIZER_PREFIX)


def decode_partition(content: bytes) -> int | None:
    """Return the partition in an encoded worker state, or None. Raise WireError if invalid."""
    partition = decode_state_untrusted(content).get(PARTITION_KEY)
    return partition if isinstance(partition, int) else None


def decode_schedule_steps(content: bytes, default: int) -> int:
    """Return the step of learning-rate schedules that an encoded optimizer state contains.

    Return ``default`` if it contains none or is empty. Raise WireError if it is invalid.
    """
    steps = decode_state_untrusted(content).get(SCHEDULE_STEPS_KEY) if content else None
    return steps if isinstance(steps, int) else default


def load_optimizer_state(replica: Replica, content: bytes) -> None:
    """Load another worker's encoded optimizer state into the model; leave the encoder as is."""
    replica.model.load_updater_state(decode_optimizer_state(content))


def load_worker_state(replica: Replica, content: bytes) -> None:
    """Load another worker's encoded optimizer state and, if included, its encoder state."""
    load_optimizer_state(replica, content)
    if encoder := _select_prefix(content, ENCODER_PREFIX):
        replica.encoder.load_state(encoder)


def remove_encoder_state(content: bytes) -> bytes:
    """Return only the optimizer's part of a state, for a fit with another threshold algorithm."""
    return encode_state(
        {OPTIMIZER_PREFIX + name: value for name, value in decode_optimizer_state(content).items()}
    )


def _select_prefix(content: bytes, prefix: str) -> State:
    """Return a state's entries whose names start with ``prefix``, without the prefix."""
    state = decode_state_untrusted(content)
    return {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }


CHUNK_BYTES = 64 * 1024  # four are requested at once, over links that carry commits too
COPY_LIFETIME_S = 20.0  # after the last request; longer than any interval of requests
# A younger copy need not be replaced, nor need one that no process has fetched.
COPY_FRESH_S = 1.0


class OptimizerStateServer:
    """Serves copies of a trainer's optimizer state, in chunks. Used by trainer and node threads."""

    __slots__ = (
        "_asked_s", "_chunk_bytes", "_clock", "_copy", "_fetchers", "_is_fetched", "_lock",
        "_made_s", "_requests", "_wanted",
    )  # fmt: skip

    def __init__(self, clock: Clock, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._clock, self._chunk_bytes = clock, chunk_bytes
        self._lock = threading.Lock()
        self._wanted = self._is_fetched = False
        self._copy: OptimizerCopy | None = None
        self._asked_s = self._made_s = 0.0
        # node that is fetching the copy -> time of its last request
        self._fetchers: dict[NodeId, float] = {}
        # (neighbour, requester) -> pending request
        self._requests: dict[tuple[NodeId, NodeId], OptimizerRequest] = {}

    def add_request(self, to: NodeId, request: OptimizerRequest) -> None:
        """Store a request; its answer goes to the neighbour ``to``. Node's thread only."""
        self._requests[to, request.asker] = request

    def ready_chunks(self) -> Iterator[tuple[NodeId, OptimizerChunk]]:
        """Yield (neighbour, chunk) for all requests that can be answered now."""
        for (to, asker), request in tuple(self._requests.items()):
            chunk = self.chunk(request)
            if chunk is not None:
                del self._requests[to, asker]
                yield to, chunk

    def chunk(self, request: OptimizerRequest) -> OptimizerChunk | None:
        """Return the requested chunk; if there is no copy to serve, request one and return None."""
        with self._lock:
            now_s = self._asked_s = self._clock.monotonic_s()
            if request.copy:
                self._fetchers[request.asker] = now_s
            elif self._is_obsolete(request.asker, now_s):
                self._copy = None
            if self._copy is None:
                self._wanted = True
                return None
            self._is_fetched = True
            return self._copy.chunk(request)

    def _is_obsolete(self, asker: NodeId, now_s: float) -> bool:
        """Return whether a new request of node ``asker`` needs a new copy.

        True if the copy is old, was fetched, and is not being fetched by another process. A
        requester that asked before the copy existed gets the copy that was made for it.
        """
        self._fetchers.pop(asker, None)
        if not self._is_fetched:
            return False
        taken = any(now_s - asked_s < COPY_LIFETIME_S for asked_s in self._fetchers.values())
        return now_s - self._made_s > COPY_FRESH_S and not taken

    def at_boundary(self, state: Callable[[], bytes]) -> None:
        """Make a copy if one was requested, and drop one that was not requested for a while.

        The trainer calls this between two steps; ``state`` returns the encoded state.
        """
        if self._copy is not None and self._clock.monotonic_s() - self._asked_s > COPY_LIFETIME_S:
            with self._lock:
                self._copy = None
        if not self._wanted:
            return
        copy = OptimizerCopy.from_content(state(), self._chunk_bytes)
        with self._lock:
            self._copy, self._made_s = copy, self._clock.monotonic_s()
            self._wanted = self._is_fetched = False
            self._fetchers.clear()
