"""The job that a training task receives, the broadcast of its parameters, and checks of the model.

The checks find models that cannot be pickled, before any task starts.

The initial parameters are one Spark broadcast variable, which consists of blocks. An executor,
whenever it starts, fetches each block once, from the driver or from an executor that already has
the block. Spark chooses this source at random, so the driver sends each block about
1 + 1/2 + ... + 1/n times if n executors fetch it one after the other. The driver sends less because
a parameter is encoded in three bytes, and because blocks are small: executors that start at the
same time can fetch different blocks from the driver, and the remaining ones from each other.
"""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import UsageError
from sparkstrom.base.identity import Endpoint
from sparkstrom.codec.sealed_frames import Seal
from sparkstrom.encoding.grid import round_to_grid
from sparkstrom.encoding.layers import Layers, layers_of
from sparkstrom.models.base import Flat, FlatModel, explain_invalid_model, get_buffers
from sparkstrom.models.output_interpretation import get_output_kind
from sparkstrom.models.row_checks import describe_error
from sparkstrom.options.gradient_sharing import SharedTrainingMaster
from sparkstrom.planning.memory import count_executor_edges
from sparkstrom.protocol.common.children import FlowLimits
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.protocol.common.topology import Topology
from sparkstrom.runtime.theta import CHUNK_PARAMS, Theta
from sparkstrom.worker.network_setup import ControllerRoute

BLOCK_SIZE_OPTION = "spark.broadcast.blockSize"
BLOCKS_PER_WORKER = 4  # executors that start at the same time can then fetch different blocks
# Every block costs round trips: 64 blocks for four executors took 4 s more.
BLOCKS_MIN, BLOCKS_MAX = 16, 64
# Lower limit: a block costs a request to the driver. Upper limit: Spark's default.
BLOCK_KIB_MIN, BLOCK_KIB_MAX = 64, 4096
INITIAL_QUANTA_MAX = 1 << 23  # a fit starts within 2^22 quanta (``encoding.grid``)
_CONF_LOCK = threading.Lock()  # held while the application's configuration is changed


class PackedParameters(NamedTuple):
    """Initial parameters as multiples of 2^-k: all low bytes, all middle bytes, all high bytes."""

    low: bytes  # lowest byte of each parameter
    middle: bytes  # second byte of each parameter
    high: bytes  # sign and high bits, which compress to about an eighth
    buffers: bytes  # the model's buffers
    state: bytes  # optimizer state for all workers; b"": they start fresh


Value = TypeVar("Value", covariant=True)


class Broadcast(Protocol[Value]):
    """A Spark broadcast variable, or another handle of a value that workers can read."""

    @property
    def value(self) -> Value:
        """The value; from a broadcast variable, the executor's JVM fetches it to a local file."""


ParametersBroadcast = Broadcast[PackedParameters]
StateBroadcast = Broadcast[bytes]  # a worker's state, as ``runtime.optimizer_states`` encodes it


def pack_parameters(theta: Theta, state: bytes = b"") -> PackedParameters:
    """Return parameters, buffers and an optimizer state, encoded for the broadcast.

    Three bytes per parameter suffice, because the parameters of a fit start within 2^22 grid steps.
    """
    quanta = np.ldexp(theta.to_host(), theta.k).astype("<i4")
    assert np.abs(quanta).max(initial=0) < INITIAL_QUANTA_MAX, (
        "a fit begins far inside the exact range"
    )
    planes = quanta.view(np.uint8).reshape(-1, 4)
    low, middle, high = (np.ascontiguousarray(planes[:, place]) for place in range(3))
    deflate = zlib.compressobj(1, strategy=zlib.Z_HUFFMAN_ONLY)
    return PackedParameters(
        low.tobytes(),
        middle.tobytes(),
        deflate.compress(high.tobytes()) + deflate.flush(),
        theta.buffers,
        state,
    )


def unpack_parameters(packed: PackedParameters, n_params: int, k: int) -> tuple[Flat, bytes]:
    """Return the parameters, f32[n_params], exactly as packed, and the model's buffers."""
    quanta: NDArray[np.int32] = np.frombuffer(zlib.decompress(packed.high), np.int8).astype("<i4")
    for plane in (packed.middle, packed.low):
        quanta <<= 8
        quanta |= np.frombuffer(plane, np.uint8)
    assert quanta.size == n_params, "packed for another model"
    return np.ldexp(quanta.astype(np.float32), -k), packed.buffers


def make_initial_theta(
    model: FlatModel, parameters: Flat, k: int, multipliers: Mapping[str, int]
) -> Theta:
    """Return the parameters and buffers that a fit starts with, rounded to multiples of 2^-k.

    ``multipliers`` are thresholds of layers in multiples of tau, by layer name.
    """
    theta = Theta(model.n_params, k, layers_of(model.n_params, model.layer_of, multipliers))
    theta.load(round_to_grid(parameters, k))
    theta.buffers = get_buffers(model)
    return theta


@contextlib.contextmanager
def broadcast_parameters(
    context: Any, theta: Theta, workers: int, state: bytes = b""
) -> Iterator[ParametersBroadcast]:
    """Broadcast the parameters, and optionally one optimizer state for all workers; yield it.

    ``context`` is a SparkContext; the size of Spark's blocks depends on the number of ``workers``.
    The broadcast variable is destroyed when the ``with`` block ends, even by an exception.
    """
    packed = pack_parameters(theta, state)
    blocks = min(max(BLOCKS_PER_WORKER * workers, BLOCKS_MIN), BLOCKS_MAX)
    kib = sum(map(len, packed)) // blocks // 1024
    with _broadcast_block_size(context, min(max(kib, BLOCK_KIB_MIN), BLOCK_KIB_MAX)):
        handle = context.broadcast(packed)
    try:
        yield handle
    finally:
        handle.destroy()


@contextlib.contextmanager
def _broadcast_block_size(context: Any, kib: int) -> Iterator[None]:
    """Set Spark's block size for broadcasts to ``kib`` KiB within the ``with`` statement.

    If the application has set a block size itself, leave it unchanged.
    """
    conf = context._jsc.sc().conf()  # the live configuration; getConf() returns a copy
    with _CONF_LOCK:
        if conf.contains(BLOCK_SIZE_OPTION):
            yield
            return
        conf.set(BLOCK_SIZE_OPTION, f"{kib}k")
        try:
            yield
        finally:
            conf.remove(BLOCK_SIZE_OPTION)


MESSAGE_OVERHEAD_BYTES = 1 << 20  # headers, sequence numbers of all origins, control messages
BYTES_PER_PARAM_MAX = 8  # upper bound of all payload forms
CHILD_WINDOW_BYTES = 4 << 20  # in flight to one neighbour: 0.25 s at 128 Mbit/s, 0.03 s at 1 Gbit/s
IN_FLIGHT_BYTES_MAX = 64 << 20  # in flight to all children of a node


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """Everything that the tasks of one fit need, as a frozen picklable value.

    Spark sends the job inside its own task closure, which is authenticated, so the job may contain
    the key.
    """

    spec: FitSpec  # partitions and length of the fit
    key: bytes = field(repr=False)  # secret key of this fit's frames
    model: FlatModel  # without parameters: architecture, seed, options
    master: SharedTrainingMaster  # options of training
    k: int  # all parameters are multiples of 2^-k
    layers: Layers | None  # layers with their own thresholds; None: no layer has one
    endpoint: Endpoint  # address and port of the controller, which numbers workers' updates
    join_stream: int  # the controller's stream for direct messages
    network: str  # id of the network, in names of files kept for the next fit
    rows: tuple[int, ...] = ()  # number of rows per partition, if counted before the fit
    # Initial parameters; None: workers fetch the controller's.
    initial: ParametersBroadcast | None = None
    # partition -> optimizer state from a checkpoint
    own_states: Mapping[int, StateBroadcast] = field(default_factory=dict)
    is_controller_running: bool = True  # False: the controller's media driver may still be starting
    keep_residuals: bool = True  # save residuals and optimizer states for the next fit

    def initial_worker_state(self, partition: int) -> bytes:
        """Return the optimizer state with which a partition's worker starts; b"" if fresh."""
        own = self.own_states.get(partition)
        if own is not None:
            return own.value
        return self.initial.value.state if self.initial is not None else b""

    def seal(self) -> Seal:
        """Return the cipher that encrypts and authenticates this fit's frames."""
        return Seal.from_fit_key(self.key, self.spec.job)

    @property
    def tree(self) -> Topology:
        """An empty mesh topology with the fit's fan-out and depth."""
        return self.master.void.topology(self.spec.workers)

    @property
    def controller_route(self) -> ControllerRoute:
        """The route from an executor to the controller."""
        void, edges = self.master.void, count_executor_edges(self.tree)
        return ControllerRoute(
            self.spec.job, self.endpoint, void, *edges, self.is_controller_running
        )

    @property
    def message_bytes_max(self) -> int:
        """Upper bound on the length of any message of this fit, in bytes."""
        return longest_message_bytes(self.spec.n_params, len(get_buffers(self.model)))


def longest_message_bytes(n_params: int, buffers_bytes: int) -> int:
    """Return the length in bytes of a fit's longest message: parameters, or larger buffers.

    Buffers are sent in one piece, both by a worker and as the average over all workers.
    """
    return MESSAGE_OVERHEAD_BYTES + max(BYTES_PER_PARAM_MAX * n_params, buffers_bytes)


def make_flow_limits(n_params: int) -> FlowLimits:
    """Return the limits on what a node may have in flight to its children."""
    return FlowLimits(CHILD_WINDOW_BYTES, IN_FLIGHT_BYTES_MAX, n_params, 4 * CHUNK_PARAMS)


DEPTH_MAX = 8  # levels of attributes and items to search for what cannot be pickled

PickleFunction = Callable[[Any], bytes]


def require_model(model: Any, pack: PickleFunction) -> None:
    """Raise UsageError if ``model`` is not a model, or the function ``pack`` cannot pickle it.

    Raise it also for an unknown value of ``outputs``, which evaluations would refuse.
    """
    if (why := explain_invalid_model(model)) is not None:
        raise UsageError(why)
    get_output_kind(model)
    require_picklable(model, pack)


def require_picklable(model: Any, pack: PickleFunction) -> None:
    """Raise UsageError, which names the part of the model that ``pack`` cannot pickle."""
    error = _pickling_error(model, pack)
    if error is None:
        return
    if isinstance(error, UsageError):  # the model has its own message
        raise error
    path, error = _find_unpicklable_part(model, type(model).__name__, error, pack)
    raise UsageError(
        f"{path} cannot be pickled, which is how a model gets to executors"
        f" ({describe_error(error)}): create it where it is used, or leave locks, files, sockets,"
        " generators and handles out of the model"
    ) from error


def _pickling_error(value: Any, pack: PickleFunction) -> Exception | None:
    """Return the exception that pickling the value raises, or None."""
    try:
        pack(value)
    except Exception as error:  # a user's __reduce__ may raise anything
        return error
    return None


def _find_unpicklable_part(
    value: Any, path: str, error: Exception, pack: PickleFunction
) -> tuple[str, Exception]:
    """Return the path and the error of the deepest part of ``value`` that cannot be pickled.

    ``path`` and ``error`` are those of ``value`` itself.
    """
    for _ in range(DEPTH_MAX):
        for name, part in _iter_parts(value):
            inner = _pickling_error(part, pack)
            if inner is not None:
                value, path, error = part, path + name, inner
                break
        else:
            break
    return path, error


def _iter_parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (path suffix, value) for each part of a container or each attribute of an object."""
    if isinstance(value, dict):
        yield from ((f"[{name!r}]", part) for name, part in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{number}]", part) for number, part in enumerate(value))
    else:
        yield from ((f".{name}", part) for name, part in getattr(value, "__dict__", {}).items())
