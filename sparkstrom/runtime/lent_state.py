"""Lent state: a worker's updater and encoder, as bytes: for who joins late, and for checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sparkstrom.codec.states import decode_state_untrusted, encode_state
from sparkstrom.models.base import Continuing, FlatModel, State
from sparkstrom.runtime.replica import Replica

UPDATER, ENCODER = "updater/", "encoder/"
PARTITION = "partition"  # of whose it is
RESIDUAL = "residual"  # is a worker's own, and with nobody else
STEPS = "round/steps"  # of each worker of rounds: schedules stand there


@dataclass(frozen=True, slots=True)
class LentStates:
    """What the workers of a fit begin with."""

    one: bytes = b""  # for all that have none of their own; b"": these begin with a fresh one
    own: Mapping[int, bytes] = field(default_factory=dict)  # by partition

    def each(self, change: Callable[[bytes], bytes]) -> LentStates:
        """All of them changed."""
        one = change(self.one) if self.one else b""
        return LentStates(one, {index: change(state) for index, state in self.own.items()})

    @classmethod
    def of(cls, copies: Sequence[bytes]) -> LentStates:
        """The first is for all; each one that says whose it is, is that partition's own."""
        if not copies:
            return cls()
        found = {partition_in(state): state for state in copies}
        return cls(copies[0], {i: s for i, s in found.items() if i is not None and i >= 0})


def lent_state(replica: Replica, partition: int) -> bytes:
    """A copy of what another worker may go on with; residuals are not in it."""
    encoder = replica.encoder.state()
    encoder.pop(RESIDUAL, None)
    updater = replica.model.updater_state()
    return encode_state(
        {UPDATER + name: value for name, value in updater.items()}
        | {ENCODER + name: value for name, value in encoder.items()}
        | {PARTITION: partition}
    )


def begun_elsewhere(model: FlatModel) -> LentStates:
    """What a network's first fit begins with: the state of a model that was trained elsewhere."""
    state = model.continuing_state() if isinstance(model, Continuing) else {}
    if not state:
        return LentStates()
    return LentStates(encode_state({UPDATER + name: value for name, value in state.items()}))


def updater_in(content: bytes) -> State:
    """The updater's part. Raise WireError where the bytes are no lent state."""
    return _part(content, UPDATER)


def partition_in(content: bytes) -> int | None:
    """Whose it is. Raise WireError where the bytes are no lent state."""
    partition = decode_state_untrusted(content).get(PARTITION)
    return partition if isinstance(partition, int) else None


def steps_in(content: bytes, otherwise: int) -> int:
    """Where schedules stand. Raise WireError where the bytes are no lent state."""
    steps = decode_state_untrusted(content).get(STEPS) if content else None
    return steps if isinstance(steps, int) else otherwise


def load_updater(replica: Replica, content: bytes) -> None:
    """Go on with another worker's updater; thresholds stay, they belong to the residual."""
    replica.model.load_updater_state(updater_in(content))


def load_all(replica: Replica, content: bytes) -> None:
    """Go on with its thresholds and counts, too, where they are in it."""
    load_updater(replica, content)
    if encoder := _part(content, ENCODER):
        replica.encoder.load_state(encoder)


def without_encoder(content: bytes) -> bytes:
    """For encoders with another algorithm: thresholds are one's own."""
    return encode_state({UPDATER + name: value for name, value in updater_in(content).items()})


def _part(content: bytes, prefix: str) -> State:
    state = decode_state_untrusted(content)
    return {
        name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
    }
