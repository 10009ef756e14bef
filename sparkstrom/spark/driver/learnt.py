"""Learnt: what a network holds between two fits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from sparkstrom.base.errors import UsageError
from sparkstrom.base.option_types import shown
from sparkstrom.encoding.grid import first_exponent, next_exponent
from sparkstrom.models.base import Buffered, Flat, FlatModel
from sparkstrom.protocol.common.fit_spec import FitSpec
from sparkstrom.protocol.master.residual_checkpoints import CheckpointFiles
from sparkstrom.runtime.fit_state import Snapshot
from sparkstrom.runtime.lent_state import LentStates, begun_elsewhere
from sparkstrom.runtime.theta import Theta
from sparkstrom.spark.driver.checkpoint_content import Resumption, load_buffers
from sparkstrom.spark.driver.fit_listeners import FitDone
from sparkstrom.spark.driver.fitting import FitCancelled
from sparkstrom.spark.driver.initial_parameters import theta_of

if TYPE_CHECKING:
    from sparkstrom.spark.driver.fit_site import LearntParameters

NO_STATES = LentStates()


class Learnt:
    """Parameters f32[n_params], and what the next fit goes on with; buffers are the model's."""

    def __init__(self, model: FlatModel) -> None:
        self._model = model
        self.parameters: Flat = np.ascontiguousarray(model.initial(), np.float32)
        self._k: int | None = None
        self._kept: CheckpointFiles = {}  # by workers, on executors
        # for all of the next fit: a checkpoint's, or what an imported model brings
        self._states = begun_elsewhere(model)
        self._states_of = 0  # so many workers
        self.epochs = 0
        self._minibatches = 0

    @property
    def buffers(self) -> bytes:
        """The model's, as they are now."""
        return self._model.buffers_bytes() if isinstance(self._model, Buffered) else b""

    @property
    def minibatches_before(self) -> int:
        """In earlier fits whose updaters' states go on."""
        return self._minibatches if self._kept or self._states.one else 0

    def theta(self, multipliers: Mapping[str, int]) -> Theta:
        """The parameters on the network's grid."""
        return theta_of(self._model, self.parameters, self.exponent(), multipliers)

    def exponent(self) -> int:
        """Of the network's grid, which is chosen at the first fit and kept."""
        self._k = (
            first_exponent(self.parameters)
            if self._k is None
            else next_exponent(self.parameters, self._k)
        )
        return self._k

    @contextlib.contextmanager
    def unless_it_fails(self) -> Iterator[None]:
        """What is learnt in the block stays, unless an error that no person has caused ends it."""
        before, buffers = dict(vars(self)), self.buffers
        try:
            yield
        except (KeyboardInterrupt, FitCancelled):
            raise
        except BaseException:
            vars(self).update(before)
            load_buffers(self._model, buffers)
            raise

    def use_up(self, workers: int = 0) -> tuple[CheckpointFiles, LentStates]:
        """Kept files and states are granted once: a fit that fails uses them up.

        With another number of workers than theirs, rows lie otherwise: all get the one for all.
        """
        kept, states = self._kept, self._states
        self._kept, self._states = {}, LentStates()
        return kept, states if workers == self._states_of else LentStates(states.one)

    def assign(self, values: Flat) -> None:
        """Somebody's parameters. Raise UsageError where they are of another shape."""
        try:
            with np.errstate(over="ignore"):
                values = np.asarray(values, np.float32)
        except (TypeError, ValueError, OverflowError) as error:
            raise UsageError(
                f"parameters={shown(values)}: give an array f32{list(self.parameters.shape)}"
            ) from error
        if values.shape != self.parameters.shape:
            raise UsageError(
                f"parameters of shape {values.shape}: this model has {self.parameters.shape}"
            )
        self.parameters = np.ascontiguousarray(values).copy()
        self._kept, self._states = {}, LentStates()

    def take(
        self,
        theta: LearntParameters,
        end: FitDone,
        best: Snapshot | None,
        states: LentStates = NO_STATES,
    ) -> None:
        """Parameters and buffers as they are at the end, or as they were at the best epoch.

        ``states`` go on from the end.
        """
        outcome = end.outcome
        self._minibatches = end.spec.minibatches_before + outcome.minibatches
        self.epochs = end.spec.first_epoch + end.epochs_trained
        if best is None or best.commit == outcome.commits:
            self._kept, self._states, self._states_of = outcome.kept, states, end.spec.workers
            self._become(theta.to_host(), theta.buffers)
        else:  # what workers kept belongs to later parameters
            self._become(best.parameters, best.buffers)

    def keep(self, theta: LearntParameters, spec: FitSpec, epochs: int) -> None:
        """Of a fit that a person ended: the driver's replica as it was then."""
        self.epochs = spec.first_epoch + epochs
        self._become(theta.to_host(), theta.buffers)

    def begin_with(self, checkpoint: Resumption) -> None:
        """Become what was saved."""
        done = checkpoint.epochs_done
        self.epochs = checkpoint.first_epoch + (done or 0)
        self._minibatches = checkpoint.minibatches_before + checkpoint.minibatches
        self._k, self._kept, self._states = checkpoint.k, {}, checkpoint.states
        self._states_of = len(checkpoint.starts)
        self._become(checkpoint.parameters, checkpoint.buffers)

    def _become(self, parameters: Flat, buffers: bytes) -> None:
        self.parameters = parameters
        load_buffers(self._model, buffers)
