"""Define the interfaces of trainable models, their minibatches, and the layout of the flat vector.

The interfaces are ``typing.Protocol`` classes. Each model must implement ``FlatModel``; it supports
any other interface by having the methods of that interface. The flat vector contains all
parameters, one array after the other. ``from_description`` makes a model from the description in a
saved network. In a fit (one call of ``SparkNetwork.fit``), each worker trains its own copy of the
model on its partition of the rows.
"""

from __future__ import annotations

import importlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import shown

Flat = NDArray[np.float32]  # f32[n_params], contiguous
# One array, or several by position or by name; the first dimension of each is the rows.
Columns = NDArray[Any] | tuple[NDArray[Any], ...] | dict[str, NDArray[Any]]
State = dict[str, "NDArray[Any] | float | int"]  # optimizer state: named arrays and plain scalars


class Batch(NamedTuple):
    """A minibatch of one worker.

    Attributes:
        features: array, or tuple or dict of arrays, with rows as first dimension.
        labels: the same; an empty tuple for a model without labels.
        weights: f32[rows], at least 0: each row's weight in the mean loss; None: all rows weigh 1.
    """

    features: Columns
    labels: Columns
    weights: NDArray[np.float32] | None = None

    @property
    def rows(self) -> int:
        """The number of rows in the minibatch."""
        return count_rows(self.features)

    @property
    def total_weight(self) -> float:
        """The sum of the rows' weights; the number of rows if they have no weights."""
        return float(self.rows if self.weights is None else self.weights.sum(dtype=np.float64))


def get_step_weight(model: FlatModel, batch: Batch) -> float:
    """Return the weight of ``batch``, on which the model has just trained, in its epoch's loss.

    It is the sum of the rows' weights, unless the model has an attribute ``step_weight``, such as a
    TorchModel whose loss weights labels, too.
    """
    weight: float | None = getattr(model, "step_weight", None)
    return batch.total_weight if weight is None else weight


def count_rows(columns: Columns) -> int:
    """Return the number of rows, which is the same in all arrays of ``columns``."""
    return len(columns) if isinstance(columns, np.ndarray) else len(arrays_of(columns)[0])


def arrays_of(columns: Columns) -> tuple[NDArray[Any], ...]:
    """Return all arrays as a tuple, ordered by position, or for a dict by insertion."""
    if isinstance(columns, np.ndarray):
        return (columns,)
    return tuple(columns.values()) if isinstance(columns, dict) else columns


def map_columns(function: Callable[[Any], Any], columns: Any) -> Columns:
    """Apply ``function`` to one array, or to each array of a tuple or dict; keep the structure."""
    if isinstance(columns, dict):
        return {name: function(array) for name, array in columns.items()}
    return tuple(map(function, columns)) if isinstance(columns, tuple) else function(columns)


@runtime_checkable
class FlatModel(Protocol):
    """A model whose parameters are one contiguous float32 vector that training changes in place.

    Models are pickled to send them to executors. A pickle contains the architecture and the seed,
    but no parameters, which are sent separately.
    """

    @property
    def n_params(self) -> int:
        """The number of parameters."""

    def initial(self) -> Flat:
        """Return new initial parameters f32[n_params]; equal for equal seeds."""

    def bind(self, params: Flat) -> None:
        """Make ``step`` and ``predict`` work directly on the memory of ``params``, not a copy."""

    def step(self, batch: Batch) -> float:
        """Train on one minibatch, changing the bound parameters in place; return the mean loss.

        If its rows all weigh 0, change nothing and return 0: momentum, Adam and weight decay would
        otherwise change the parameters without a gradient.
        """

    def predict(self, features: Columns) -> Any:
        """Return outputs for the bound parameters: f32[rows, outputs], or model-specific arrays."""

    def check(self, features: Columns, labels: Columns) -> None:
        """Raise UsageError, naming value, reason and remedy, if these rows do not fit the model."""

    def updater_state(self) -> State:
        """Return the optimizer's state by name, as accepted by ``load_updater_state``."""

    def load_updater_state(self, state: State) -> None:
        """Restore a state returned by ``updater_state`` of a model with the same structure."""

    def layer_of(self, index: int) -> str:
        """Return the name of the layer and array that contain parameter ``index``."""

    def describe(self) -> dict[str, Any]:
        """Return a JSON-serializable dict from which ``from_description`` makes an equal model."""


# Top-level package of the class of another library's model, or of a base class -> its wrapper here.
WRAPPERS = {
    **dict.fromkeys(
        ("lightning", "pytorch_lightning"), "a LightningModel of sparkstrom.models.lightning"
    ),
    "keras": "a KerasModel of sparkstrom.models.keras",
    "torch": "a TorchModel of sparkstrom.models.torch",
}


def explain_invalid_model(value: Any) -> str | None:
    """Return why a value is not a model and what to pass instead, or None if it is a model."""
    if isinstance(value, type):
        return f"model is the class {value.__name__}: pass an object, {value.__name__}(...)"
    if isinstance(value, FlatModel):
        return None
    packages = (each.__module__.partition(".")[0] for each in type(value).__mro__)
    wrapper = next((WRAPPERS[name] for name in packages if name in WRAPPERS), None)
    if wrapper:
        return f"model is a {type(value).__name__}: wrap it in {wrapper}"
    return f"model={shown(value)}: pass a model of sparkstrom.models, such as DenseNetwork"


@runtime_checkable
class HasInitialValues(Protocol):
    """A model that can start from given parameters instead of random ones.

    The model's pickle does not contain the given parameters.
    """

    def start_from(self, params: Flat) -> None:
        """Make later calls of ``initial`` return a copy of these parameters, f32[n_params]."""


@runtime_checkable
class Buffered(Protocol):
    """A model with buffers: arrays that are not parameters, such as BatchNorm's statistics.

    Each worker reports its buffers at the end of an epoch. The average over the partitions' latest
    reports, added in partition order, then replaces the buffers of all workers. Buffers are
    exchanged as bytes: the arrays in little endian, one after the other, in an order that the model
    defines. The bytes contain no names, sizes or code.
    """

    def buffers_bytes(self) -> bytes:
        """Return the current buffers; b"" if the model has none."""

    def load_buffers_bytes(self, buffers: bytes) -> None:
        """Restore the result of ``buffers_bytes``.

        Raises:
            UsageError: the bytes do not fit this model.
        """

    def average_buffers(self, reports: list[bytes]) -> bytes:
        """Return the mean of ``reports``, each a worker's buffers; for integers the maximum.

        Sums are computed in float64 and in the given order, so equal reports give equal bytes.
        """


def get_buffers(model: Any) -> bytes:
    """Return the model's current buffers; b"" for a model without buffers."""
    return model.buffers_bytes() if isinstance(model, Buffered) else b""


def load_buffers(model: Any, buffers: bytes) -> None:
    """Load buffers into the model. Do nothing for b"", or for a model without buffers."""
    if isinstance(model, Buffered) and buffers:
        model.load_buffers_bytes(buffers)


@runtime_checkable
class WeighedBuffers(Protocol):
    """A ``Buffered`` model that can average buffers with a weight for each report.

    Round-based training, in which workers train alone for some steps and then average parameters,
    weights each worker's buffers by its number of rows. For other models, all workers count
    equally.
    """

    def weighed_buffers(self, reports: list[bytes], weights: Sequence[float]) -> bytes:
        """Return the mean as ``average_buffers`` does, but with a weight >= 0 for each report."""


@runtime_checkable
class Measured(Protocol):
    """A model that can compute its loss without training, for ``score`` and early stopping.

    All models of this package implement this interface.
    """

    @property
    def outputs(self) -> str:
        """What ``predict`` returns: "probabilities" (rows that sum to 1), "logits" or "values"."""

    def loss(self, batch: Batch) -> tuple[float, float]:
        """Return (sum of weight x loss, sum of weights) over the rows, without changing the model.

        If the batch has no weights, each row weighs 1. Dropout is off, BatchNorm keeps its
        statistics, and penalties on parameters are not included.
        """


@runtime_checkable
class ClassCounter(Protocol):
    """A model that learns from its first step how many classes there are, and then checks labels.

    While ``known_classes`` is not None, ``check`` refuses labels that are not one of the classes.
    """

    # (dimensions of labels, number of classes); None: unknown
    known_classes: tuple[int, int] | None


@runtime_checkable
class HasPenalty(Protocol):
    """A model trained with a penalty on its parameters, such as l2, which ``loss`` leaves out."""

    def penalty(self) -> float:
        """Return the penalty that training adds to the loss, for the currently bound parameters."""


@runtime_checkable
class HasOptimizerState(Protocol):
    """A model that was trained elsewhere, such as by DL4J, and continues its optimizer's state."""

    def continuing_state(self) -> State:
        """Return the optimizer state for a network's first fit; {} means a new state."""


@runtime_checkable
class CanRestoreOptimizerState(HasOptimizerState, Protocol):
    """A model that can be given the optimizer state with which its first fit starts."""

    def continue_from(self, state: State) -> None:
        """Make later calls of ``continuing_state`` return a copy of this state."""


@runtime_checkable
class KnowsOptimizerKind(Protocol):
    """A model that knows what kind of optimizer trains it. All models of this package do.

    ``has_adaptive_optimizer`` is called before ``bind``, and only with ``scaling="ddp"``, which
    gives updates of adaptive optimizers a larger weight. The optimizer of a model without this
    method counts as not adaptive.
    """

    def has_adaptive_optimizer(self) -> bool:
        """Return whether steps are divided by the size of past gradients, as in Adam.

        Optimizers that use only the sign of a gradient, such as Lion, count as not adaptive; the
        best weight of their updates was not measured.
        """


@dataclass(frozen=True, slots=True)
class Share:
    """The resources of its machine that a worker may use, and the worker's random seed."""

    threads: int  # number of CPUs of the task
    gpu: int | None  # index of the GPU that Spark assigned to the task; None: no GPU
    seed: int  # different for each partition and fit


@runtime_checkable
class Placeable(Protocol):
    """A model that must be told which of an executor's resources it may use."""

    def place(self, share: Share) -> None:
        """Use these resources; called before ``bind``. Raise UsageError if they do not suffice."""


@runtime_checkable
class DeviceModel(Protocol):
    """A model that can train in place in the memory of a GPU.

    ``cuda_device`` is read on executors, after ``place``. If it is not None, the parameters, the
    residual (changes not sent yet) and the encoding are on that GPU, and ``bind`` gets an array
    with ``__cuda_array_interface__``, f32[n_params]. When ``step`` starts, none of sparkstrom's
    kernels is running on the device; when ``step`` returns, none of the model's kernels may be
    running, on any stream.
    """

    @property
    def cuda_device(self) -> int | None:
        """The index of the GPU among those visible to this process; None for the CPU."""


@runtime_checkable
class Paced(Protocol):
    """A model whose momentum and schedules follow the whole fit's progress, not only its own steps.

    All models of this package implement this interface. Saved optimizer states contain the user's
    unscaled hyperparameters. In round-based training, a model with the attribute
    ``counts_own_steps = True`` gets its own worker's number of steps as ``minibatches``.
    """

    def keep_pace(self, workers: int, minibatches: int, counted: int) -> None:
        """Adapt momentum to the workers, and schedules to the fit's position, before each step.

        Args:
            workers: effective number of workers: those that train now, or fewer because of
                ``scaling="limited"`` or ``limit_overshoot``.
            minibatches: minibatches of all workers so far, including earlier fits; an estimate that
                never decreases.
            counted: how many of these minibatches the controller, the process that numbers all
                updates, has definitely counted.

        If one worker trains alone, so that all minibatches are its own, nothing is scaled.
        """

    def horizons(self, workers: int) -> dict[str, str]:
        """Return what changes if ``workers`` workers train; {} if nothing does.

        The result maps names of hyperparameters to texts, such as "momentum" to "0.9 -> 0.81".
        """


@runtime_checkable
class EpochAware(Protocol):
    """A model that receives its position in the worker's epoch before each step."""

    def set_position(self, epoch: int, batch: int, batches: int) -> None:
        """Set the position of the next step: minibatch ``batch`` (from 0) of ``batches``.

        ``epoch`` counts from 0 over all fits of a network.
        """


@dataclass(frozen=True, slots=True)
class FitLength:
    """The length of a whole fit, including the part before it was resumed."""

    epochs: int  # number of epochs, without those of earlier fits
    # Number of minibatches, as schedules count them: of all workers; with horizon="worker", of one.
    minibatches: int
    first_epoch: int = 0  # number of epochs in earlier fits
    # Minibatches of all workers in those earlier fits whose optimizer state this fit continues.
    minibatches_before: int = 0


@runtime_checkable
class FitLengthAware(Protocol):
    """A model whose learning-rate schedule can depend on the length of the fit."""

    def set_fit_length(self, length: FitLength) -> None:
        """Set the length, before the fit's first step. A repeated call changes nothing."""


def buffers_to_save(model: Any) -> bytes:
    """Return the bytes that a saved network stores as buffers; b"" for a model without buffers.

    They come from the model's method ``saved_buffers_bytes``, which adds the weights of frozen
    layers, or, if it has no such method, from ``buffers_bytes``.
    """
    if hasattr(model, "saved_buffers_bytes"):
        saved: bytes = model.saved_buffers_bytes()
        return saved
    return get_buffers(model)


def add_frozen_weights(model: Any, buffers: bytes) -> bytes:
    """Return a model's buffers of any time with what ``buffers_to_save`` adds to the current ones.

    ``load_buffers`` restores both.
    """
    return buffers + buffers_to_save(model)[len(get_buffers(model)) :]


@runtime_checkable
class HasFrozenParameters(Protocol):
    """A model whose parameters can be frozen in one fit and trained in the next."""

    def frozen_parameters(self) -> list[slice]:
        """Return the slices of the flat vector that contain frozen parameters."""


@runtime_checkable
class MayChangeParameters(Protocol):
    """A model whose predictions may change its parameters temporarily."""

    def changes_parameters(self) -> bool:
        """Return whether ``predict`` changes the bound parameters until it returns."""


def zero_frozen_entries(model: Any, residual: Flat) -> Flat:
    """Return the residual (changes not sent yet), f32[n_params], with 0 for frozen parameters.

    The result is a copy if the model currently has frozen parameters, else ``residual`` itself.
    """
    frozen = model.frozen_parameters() if isinstance(model, HasFrozenParameters) else []
    if frozen:
        residual = residual.copy()
        for part in frozen:
            residual[part] = 0
    return residual


@runtime_checkable
class RequiresLoss(Protocol):
    """A ``Measured`` model that may have been created without a loss function."""

    def need_loss(self) -> None:
        """Raise UsageError if ``loss`` cannot be computed; called before anything is computed."""


@runtime_checkable
class Exporting(Protocol):
    """A model that can be saved in the file format of its own library."""

    def exported(self) -> tuple[str, bytes]:
        """Return (suffix, content), such as (".pt", bytes), of a file of the bound parameters."""


Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """Names, shapes and positions of the arrays that follow one another in a flat vector."""

    names: tuple[str, ...]  # name of each array
    shapes: tuple[Shape, ...]  # shape of each array
    starts: tuple[int, ...]  # index of each array's first element in the vector
    size: int  # number of elements of the whole vector

    @classmethod
    def from_shapes(cls, arrays: Iterable[tuple[str, Shape]]) -> Layout:
        """Make the layout of consecutive arrays, given as (name, shape)."""
        names, shapes, starts, start = [], [], [], 0
        for name, shape in arrays:
            names.append(name)
            shapes.append(tuple(shape))
            starts.append(start)
            start += prod(shape)
        return cls(tuple(names), tuple(shapes), tuple(starts), start)

    def views(self, flat: NDArray[Any]) -> Iterator[tuple[str, NDArray[Any]]]:
        """Yield (name, array) for each array; the arrays are views of ``flat``."""
        for name, shape, start in zip(self.names, self.shapes, self.starts, strict=True):
            yield name, flat[start : start + prod(shape)].reshape(shape)

    def name_at(self, index: int) -> str:
        """Return the name of the array that contains element ``index``, or raise IndexError."""
        if not 0 <= index < self.size:
            raise IndexError(index)
        return self.names[bisect_right(self.starts, index) - 1]


def check_bindable(params: Flat, n_params: int) -> Flat:
    """Return ``params``; raise UsageError unless it is a writable C-contiguous f32[n_params]."""
    fits = params.shape == (n_params,) and params.dtype == np.float32
    if not (fits and params.flags.c_contiguous and params.flags.writeable):
        raise UsageError(
            f"parameters {params.dtype}{list(params.shape)}: need float32[{n_params}],"
            " contiguous and writable"
        )
    return params


def check_bindable_on_device(params: Any, n_params: int) -> Any:
    """Return ``params``, an array in GPU memory with ``__cuda_array_interface__``.

    Raise UsageError unless it is a contiguous and writable f32[n_params].
    """
    interface = params.__cuda_array_interface__
    shape, read_only = tuple(interface["shape"]), interface["data"][1]
    fits = shape == (n_params,) and interface["typestr"] == "<f4"
    if not fits or interface.get("strides") not in (None, (4,)) or read_only:
        raise UsageError(
            f"parameters {interface['typestr']}{list(shape)} on a device: need <f4[{n_params}],"
            " contiguous and writable"
        )
    return params


def require_single_array(columns: Columns, what: str = "features") -> NDArray[Any]:
    """Return the only array in ``columns``; raise UsageError if there are none or several.

    ``what`` names the columns in the message.
    """
    if isinstance(columns, np.ndarray):
        return columns
    if not columns:
        raise UsageError(f"no {what} were given, and this model needs them: name their column")
    names = f" ({', '.join(map(str, columns))})" if isinstance(columns, dict) else ""
    raise UsageError(
        f"{len(columns)} arrays of {what}{names}: this model takes one; name one column, or several"
        " numeric ones that make one array, or use a model with several inputs (TorchModel)"
    )


# ``kind`` of a description -> (module, class), imported when needed. A description cannot name a
# module, so a file of unknown origin cannot cause an arbitrary import.
MODEL_CLASSES = {
    "dense": ("sparkstrom.models.dense", "DenseNetwork"),
    "jax": ("sparkstrom.models.jax", "JaxModel"),
    "lightning": ("sparkstrom.models.lightning", "LightningModel"),
    "torch": ("sparkstrom.models.torch", "TorchModel"),
    "dl4j-dense": ("sparkstrom.models.dl4j.importing", "ImportedDenseNetwork"),
    "dl4j": ("sparkstrom.models.dl4j.modules.model", "Dl4jModel"),
    "keras": ("sparkstrom.models.keras", "KerasModel"),
}

# ``kind`` of a description -> a key that the description has only if it is self-contained. Models
# of other kinds always need the user's code.
SELF_CONTAINED_KEYS = {
    "dense": "widths",
    "dl4j-dense": "widths",
    "keras": "model",
    "dl4j": "configuration",
}


def is_self_contained(description: dict[str, Any]) -> bool:
    """Return whether a model can be made from its description without the user's code."""
    return SELF_CONTAINED_KEYS.get(description.get("kind", "")) in description


def from_description(description: dict[str, Any]) -> FlatModel:
    """Make the model that ``FlatModel.describe`` described.

    Raise UsageError for an unknown kind of model, or if the model needs code that is not described.
    """
    kind = description.get("kind")
    if kind not in MODEL_CLASSES:
        raise UsageError(
            f"this version of sparkstrom does not know models of kind {kind!r}, only"
            f" {', '.join(MODEL_CLASSES)}"
        )
    module, name = MODEL_CLASSES[kind]
    model = getattr(importlib.import_module(module), name).from_description(description)
    return cast(FlatModel, model)
