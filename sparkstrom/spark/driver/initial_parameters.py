"""Initial parameters and buffers of a fit, on their way to every executor.

They are one broadcast variable of Spark: executors take its blocks from one another, each once,
whatever the number of its workers, and those that Spark starts later still find it. A block's
second reader takes it from the driver with probability 1/2, the third with 1/3, and so on (Spark
picks any holder), so to n executors the driver sends about 1 + 1/2 + ... + 1/n times the bytes;
hence few bytes, and blocks so small that executors which begin together read different ones.
"""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from sparkstrom.encoding.grid import round_to_grid
from sparkstrom.encoding.layers import layers_of
from sparkstrom.models.base import Buffered, Flat, FlatModel
from sparkstrom.runtime.theta import Theta

BLOCK_SIZE = "spark.broadcast.blockSize"
BLOCKS_PER_WORKER = 4  # so that executors which begin together read different ones
BLOCKS_MIN, BLOCKS_MAX = 16, 64  # each costs every executor questions: 64 for four cost 4 s more
BLOCK_KIB_MIN, BLOCK_KIB_MAX = 64, 4096  # a block costs a question to the driver; Spark's own size
QUANTA_MAX = 1 << 23  # a fit begins within 2^22 quanta (``encoding.grid``)
_CONF = threading.Lock()  # the application's configuration is changed and put back by one at a time


class Packed(NamedTuple):
    """Parameters as whole quanta, byte by byte: u8[n_params] each, and the buffers."""

    low: bytes
    middle: bytes
    high: bytes  # sign and little else: deflated, to an eighth or so
    buffers: bytes
    state: bytes  # a worker's, as ``runtime.lent_state`` has it; b"": all begin with fresh ones


class Handle(Protocol):
    """What travels instead of the bytes: a Broadcast."""

    @property
    def value(self) -> Packed:
        """Fetched by the executor's JVM, read from a file of this machine."""


class StateHandle(Protocol):
    """The same of one worker's state."""

    @property
    def value(self) -> bytes:
        """As ``runtime.lent_state`` has it."""


def pack(theta: Theta, state: bytes = b"") -> Packed:
    """Three bytes a parameter, or less: the grid needs no more where a fit begins."""
    quanta = np.ldexp(theta.to_host(), theta.k).astype("<i4")
    assert np.abs(quanta).max(initial=0) < QUANTA_MAX, "a fit begins far inside the exact range"
    planes = quanta.view(np.uint8).reshape(-1, 4)
    low, middle, high = (np.ascontiguousarray(planes[:, place]) for place in range(3))
    deflate = zlib.compressobj(1, strategy=zlib.Z_HUFFMAN_ONLY)
    return Packed(
        low.tobytes(),
        middle.tobytes(),
        deflate.compress(high.tobytes()) + deflate.flush(),
        theta.buffers,
        state,
    )


def unpack(packed: Packed, n_params: int, k: int) -> tuple[Flat, bytes]:
    """The parameters, f32[n_params], bit by bit as they were; and the buffers."""
    quanta: NDArray[np.int32] = np.frombuffer(zlib.decompress(packed.high), np.int8).astype("<i4")
    for plane in (packed.middle, packed.low):
        quanta <<= 8
        quanta |= np.frombuffer(plane, np.uint8)
    assert quanta.size == n_params, "packed for another model"
    return np.ldexp(quanta.astype(np.float32), -k), packed.buffers


def theta_of(model: FlatModel, parameters: Flat, k: int, multipliers: Mapping[str, int]) -> Theta:
    """Parameters and buffers that a fit begins with, on the grid of 2^-k."""
    theta = Theta(model.n_params, k, layers_of(model.n_params, model.layer_of, multipliers))
    theta.load(round_to_grid(parameters, k))
    if isinstance(model, Buffered):
        theta.buffers = model.buffers_bytes()
    return theta


@contextlib.contextmanager
def travelling(context: Any, theta: Theta, workers: int, state: bytes = b"") -> Iterator[Handle]:
    """theta, and a state for all workers, at the executors' disposal.

    Until the end of the block, however that ends.
    """
    packed = pack(theta, state)
    blocks = min(max(BLOCKS_PER_WORKER * workers, BLOCKS_MIN), BLOCKS_MAX)
    kib = sum(map(len, packed)) // blocks // 1024
    with _blocks_of(context, min(max(kib, BLOCK_KIB_MIN), BLOCK_KIB_MAX)):
        handle = context.broadcast(packed)
    try:
        yield handle
    finally:
        handle.destroy()


@contextlib.contextmanager
def own_states(context: Any, states: Mapping[int, bytes]) -> Iterator[dict[int, StateHandle]]:
    """Each worker's state at its own disposal, by partition, until the end of the block.

    Every executor has all of them as files; a worker reads its own alone.
    """
    handles = {partition: context.broadcast(state) for partition, state in states.items()}
    try:
        yield handles
    finally:
        for handle in handles.values():
            handle.destroy()


@contextlib.contextmanager
def _blocks_of(context: Any, kib: int) -> Iterator[None]:
    """Broadcasts are cut so, for now; where an application has its own size, that one holds."""
    conf = context._jsc.sc().conf()  # the live one; what people get is a copy
    with _CONF:
        if conf.contains(BLOCK_SIZE):
            yield
            return
        conf.set(BLOCK_SIZE, f"{kib}k")
        try:
            yield
        finally:
            conf.remove(BLOCK_SIZE)
