"""The flat-parameter protocol: what a model must offer to be trained here."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

Flat = NDArray[np.float32]  # f32[n_params], contiguous
Batch = tuple[NDArray[Any], NDArray[Any]]  # features [rows, ...], labels [rows] or [rows, outputs]
State = dict[str, "NDArray[Any] | float | int"]  # named arrays and plain scalars, nothing else


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

    def predict(self, features: NDArray[Any]) -> NDArray[np.float32]:
        """Outputs f32[rows, outputs] under the bound parameters."""

    def check(self, features: NDArray[Any], labels: NDArray[Any]) -> None:
        """Raise UsageError naming value, reason and remedy if these rows do not fit this model."""

    def updater_state(self) -> State:
        """The optimizer's state, by name; ``load_updater_state`` takes it back."""

    def load_updater_state(self, state: State) -> None:
        """Take a state that ``updater_state`` of an equal model returned."""

    def layer_of(self, index: int) -> str:
        """The name of the layer and array that parameter ``index`` belongs to, for messages."""

    def describe(self) -> dict[str, Any]:
        """JSON-able description from which the registry of ``models`` makes an equal model."""
