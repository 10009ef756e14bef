"""The flat-parameter protocol: what a model must offer to be trained here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from sparkstrom.base.option_types import shown

Flat = NDArray[np.float32]  # f32[n_params], contiguous
# One array, or several by place or by name; rows first in each.
Columns = NDArray[Any] | tuple[NDArray[Any], ...] | dict[str, NDArray[Any]]
State = dict[str, "NDArray[Any] | float | int"]  # named arrays and plain scalars, nothing else


class Batch(NamedTuple):
    """A minibatch: features, labels, and how much each row counts, f32[rows], at least 0."""

    features: Columns
    labels: Columns
    weights: NDArray[np.float32] | None = None

    @property
    def rows(self) -> int:
        """How many rows."""
        return rows_of(self.features)


def rows_of(columns: Columns) -> int:
    """How many rows these columns have; all have equally many."""
    return len(columns) if isinstance(columns, np.ndarray) else len(arrays_of(columns)[0])


def arrays_of(columns: Columns) -> tuple[NDArray[Any], ...]:
    """The arrays of columns: in their places, or in the order of the names' insertion."""
    if isinstance(columns, np.ndarray):
        return (columns,)
    return tuple(columns.values()) if isinstance(columns, dict) else columns


@runtime_checkable
class FlatModel(Protocol):
    """A model whose parameters are one contiguous float32 vector, changed in place.

    Models are picklable values: what ships to executors is the architecture and the seed;
    parameters travel over the mesh.
    """

    @property
    def n_params(self) -> int:
        """How many parameters."""

    def initial(self) -> Flat:
        """Fresh parameters f32[n_params], the same for the same seed."""

    def bind(self, params: Flat) -> None:
        """Make ``params`` the memory that ``step`` and ``predict`` work on: views, no copies."""

    def step(self, batch: Batch) -> float:
        """Train on one minibatch: change the bound parameters in place; return the mean loss."""

    def predict(self, features: Columns) -> Any:
        """Outputs under the bound parameters: f32[rows, outputs], or what the model puts out."""

    def check(self, features: Columns, labels: Columns) -> None:
        """Raise UsageError naming value, reason and remedy if these rows do not fit this model."""

    def updater_state(self) -> State:
        """The optimizer's state, by name; ``load_updater_state`` takes it back."""

    def load_updater_state(self, state: State) -> None:
        """Take a state that ``updater_state`` of an equal model returned."""

    def layer_of(self, index: int) -> str:
        """The name of the layer and array that parameter ``index`` belongs to, for messages."""

    def describe(self) -> dict[str, Any]:
        """JSON-able description from which the registry of ``models`` makes an equal model."""


WRAPPERS = {  # by the package that a class comes from, or one above it
    **dict.fromkeys(
        ("lightning", "pytorch_lightning"), "a LightningModel of sparkstrom.models.lightning"
    ),
    "keras": "a KerasModel of sparkstrom.models.keras",
    "torch": "a TorchModel of sparkstrom.models.torch",
}


def no_model(value: Any) -> str | None:
    """Why it is no model, and what to pass instead; None: it is one."""
    if isinstance(value, type):
        return f"model is the class {value.__name__}: pass an object, {value.__name__}(...)"
    if isinstance(value, FlatModel):
        return None
    packages = (each.__module__.partition(".")[0] for each in type(value).__mro__)
    wrapper = next((WRAPPERS[name] for name in packages if name in WRAPPERS), None)
    if wrapper:
        return f"model is a {type(value).__name__}: put it into {wrapper}"
    return f"model={shown(value)}: pass a model of sparkstrom.models, such as DenseNetwork"


@runtime_checkable
class Starting(Protocol):
    """A model that starts from values, not from a seed; they do not travel with its pickle."""

    def start_from(self, params: Flat) -> None:
        """Return a copy of these, f32[n_params], from ``initial`` from now on."""


@runtime_checkable
class Buffered(Protocol):
    """A model with arrays that are not parameters, such as BatchNorm's statistics.

    Each worker reports its own at an epoch's end; the average of the latest of each partition, in
    partition order, is everybody's. Bytes are little-endian arrays one behind the other, as the
    model lays them out: no names, no sizes, nothing to execute.
    """

    def buffers_bytes(self) -> bytes:
        """The buffers as they are now; empty where the model has none."""

    def load_buffers_bytes(self, buffers: bytes) -> None:
        """Take what ``buffers_bytes`` of an equal model returned. Raise UsageError if it is not."""

    def average_buffers(self, reports: list[bytes]) -> bytes:
        """One for all: means in float64, added in the given order; integers take the largest."""


@runtime_checkable
class WeighedBuffers(Protocol):
    """A ``Buffered`` model whose buffers can count by weight.

    Rounds of averaging ask it, with what each worker's rows weigh; without it all count equally.
    """

    def weighed_buffers(self, reports: list[bytes], weights: Sequence[float]) -> bytes:
        """As ``average_buffers``; weights are at least 0, and one for each report."""


@runtime_checkable
class Measured(Protocol):
    """A model that says how well it does without training: ``score`` and early stopping ask it.

    Every model of this package is one; a model of yours needs it only for these.
    """

    @property
    def outputs(self) -> str:
        """What ``predict`` returns: "probabilities" (rows that sum to 1), "logits" or "values"."""

    def loss(self, batch: Batch) -> tuple[float, float]:
        """(sum of weight x loss, sum of weights) under the bound parameters, which stay the same.

        Without weights each row weighs 1. No dropout, no statistics, no penalty on parameters.
        """


@runtime_checkable
class Penalized(Protocol):
    """A model whose training has a penalty on its parameters, which its loss leaves out."""

    def penalty(self) -> float:
        """Of the bound parameters: l1 times absolute values, half of l2 times squares."""


@runtime_checkable
class Continuing(Protocol):
    """A model that was trained elsewhere: a network's first fit begins with its updater's state."""

    def continuing_state(self) -> State:
        """As ``updater_state`` has it; empty for a fresh one."""


@dataclass(frozen=True, slots=True)
class Share:
    """What a worker has of its machine, and chance of its own."""

    threads: int  # the task's CPUs
    gpu: int | None  # the index of the GPU that Spark assigned to the task
    seed: int  # another one for each partition and fit


@runtime_checkable
class Placeable(Protocol):
    """A model that asks where it runs. Called on executors, before ``bind``."""

    def place(self, share: Share) -> None:
        """Keep to this share. Raise UsageError if the model needs something else."""


@runtime_checkable
class DeviceModel(Protocol):
    """A model that can train on the memory of a GPU in place. Asked on executors, after ``place``.

    Where it does, parameters, residual and encoding are there, too, and ``bind`` gets an array with
    ``__cuda_array_interface__``, f32[n_params]. Nothing of the mesh is under way on the device when
    ``step`` begins, and nothing of the model's may be when ``step`` returns, on whatever stream.
    """

    @property
    def cuda_device(self) -> int | None:
        """The index of its GPU among those that this process sees; None where it is on the host."""


@runtime_checkable
class Paced(Protocol):
    """A model whose momentum and schedules count the fit's minibatches, not its own steps.

    Every model of this package is one. Saved states hold the user's own hyperparameters.
    """

    def keep_pace(self, workers: int, minibatches: int, counted: int) -> None:
        """Before a step: so many workers train now, and the fit has done so many minibatches.

        Those of earlier fits are among them. It is an estimate that never goes back; ``counted``
        of them the master has surely. 1 and a worker's own count change nothing.
        """

    def horizons(self, workers: int) -> dict[str, str]:
        """What that changes where so many train, for people: name -> change; empty for nothing."""


@runtime_checkable
class Epochal(Protocol):
    """A model that asks where in its worker's epoch a step is."""

    def stand_at(self, epoch: int, batch: int, batches: int) -> None:
        """Before a step: it is on minibatch ``batch`` of ``batches``; both and epochs are from 0.

        Epochs count over all fits of a network.
        """


def buffers_to_save(model: Any) -> bytes:
    """Return what a saved network needs beside the parameters; b"" for a model without buffers.

    A model that keeps frozen weights apart returns them too, from ``saved_buffers_bytes()``.
    """
    if hasattr(model, "saved_buffers_bytes"):
        saved: bytes = model.saved_buffers_bytes()
        return saved
    return model.buffers_bytes() if isinstance(model, Buffered) else b""


@runtime_checkable
class PartlyFrozen(Protocol):
    """A model some of whose parameters may be frozen from one fit to the next."""

    def frozen_parameters(self) -> list[slice]:
        """Return where frozen parameters are in the flat vector."""


def without_frozen(model: Any, residual: Flat) -> Flat:
    """Return the residual with zeros for the parameters that the model does not train now."""
    frozen = model.frozen_parameters() if isinstance(model, PartlyFrozen) else []
    if frozen:
        residual = residual.copy()
        for part in frozen:
            residual[part] = 0
    return residual


@runtime_checkable
class LossBound(Protocol):
    """A Measured model that may have no loss to measure with."""

    def need_loss(self) -> None:
        """Before work starts: raise UsageError where ``loss`` cannot be asked for."""


@runtime_checkable
class Exporting(Protocol):
    """A model that its own library opens again without this package."""

    def exported(self) -> tuple[str, bytes]:
        """A file's suffix and its content, with the parameters that are bound now."""
